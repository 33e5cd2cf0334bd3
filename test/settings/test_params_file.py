import json
import math
import re
from pathlib import Path

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import node_config, refuse_unknown
from torchperf_ros.settings.params_file import params_for_ros, params_of_file, parse_value, read_params_file

SHIPPED = Path(__file__).resolve().parents[2] / "config" / "perception.yaml"


@pytest.fixture
def read(tmp_path):
    def reader(text):
        path = tmp_path / "params.yaml"
        path.write_text(text, encoding="utf-8")
        return read_params_file(path)

    return reader


def test_given_the_shipped_file_when_read_then_it_is_the_defaults():
    assert read_params_file(SHIPPED) == node_config({}, {})


@pytest.mark.parametrize(
    "name", ["perf", "/perf", "/**", "/**/perf", "/robot/perf", '"**"', "robot: {perf"]
)
def test_given_a_name_that_stands_for_the_node_when_read_then_its_values_count(read, name):
    nested = "}" if "{" in name else ""
    assert read(f"{name}: {{ros__parameters: {{metrics_port: 7}}}}{nested}").metrics_port == 7


def test_given_several_entries_when_read_then_the_later_wins_and_other_nodes_do_not_count(read):
    text = """
/**: {ros__parameters: {metrics_port: 1, worker_threads: 3}}
/perf: {ros__parameters: {metrics_port: 2}}
/camera: {ros__parameters: {metrics_port: 9}}
"""
    config = read(text)
    assert (config.metrics_port, config.worker_threads) == (2, 3)


def test_given_stages_nested_and_dotted_when_read_then_both_are(read):
    text = """
/**/perf:
  ros__parameters:
    perception: {engine: eager, channels_last: yes}
    planning.precision: [bf16, fp32, fp32]
"""
    perception, planning = read(text).stages
    assert (perception.engine, perception.channels_last) == ("eager", True)
    assert planning.precision == ("bf16", "fp32", "fp32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "has no entry for the node 'perf'; it has to be like"),
        ("", "has no entry for the node 'perf'"),
        ("/camera: {ros__parameters: {a: 1}}", "has no entry for the node 'perf'"),
        ("a: [", "is not YAML"),
        ("perf: {ros__parameters: {stages: 3}}", "parameter stages: 3 is an integer; it has to be a list"),
        (
            "perf: {ros__parameters: {perception: {engine: fast}}}",
            "perception.engine: 'fast' is not allowed",
        ),
    ],
)
def test_given_a_file_that_is_wrong_when_read_then_the_error_says_what(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_given_no_file_when_read_then_the_error_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"parameter file .*absent\.yaml: cannot be read"):
        read_params_file(tmp_path / "absent.yaml")


@pytest.mark.parametrize("text", ["[1,", "{a", "'x", "*x"])
def test_given_a_value_that_is_not_yaml_when_read_then_the_error_names_the_parameter(read, text):
    with pytest.raises(ConfigError, match=r"parameter perception\.engine: "):
        parse_value("perception.engine", text)
    with pytest.raises(ConfigError, match="is not YAML|has no &x above it"):
        read(f"perf: {{ros__parameters: {{metrics_port: {text}}}}}")


AS_ROS_READS_THEM = {  # each was read by rcl, see test/node/test_parameters.py
    "4e1": 40.0,
    "1:40": "1:40",
    "1_000": "1_000",
    "0x10": 16,
    "010": 8,
    "08": 8.0,
    "1.": 1.0,
    ".5": 0.5,
    "+1": 1,
    "yes": True,
    "Off": False,
    "yEs": "yEs",
    "~": "~",
    "null": "null",
    "''": "",
    "'3'": "3",
    "!!str 5": "5",
    "-.inf": -math.inf,
    "1e400": "1e400",
    "99999999999999999999": 1e20,
    "2024-13-45": "2024-13-45",
    "[1:40, 2:50]": ["1:40", "2:50"],
    "[]": [],
}


@pytest.mark.parametrize("text", AS_ROS_READS_THEM)
def test_given_a_value_when_read_then_it_is_what_ros_makes_of_it(text):
    found = parse_value("name", text)
    assert (found, type(found)) == (AS_ROS_READS_THEM[text], type(AS_ROS_READS_THEM[text]))


# parameter files of any kind, and the parameters that both the commands and the node have of them
WRITTEN = {
    "anchor": ("/**/perf:\n  ros__parameters:\n    a: &x [1, 2]\n    b: *x\n", {"a": [1, 2], "b": [1, 2]}),
    "merge": (
        "base: &base {a: 1, b: 2}\nperf:\n  ros__parameters:\n    s: {<<: [*base, {a: 3, c: 4}], b: 5}\n",
        {"s.a": 1, "s.b": 5, "s.c": 4},
    ),
    "two documents": (
        "perf: {ros__parameters: {a: 1, b: 1}}\n---\nperf: {ros__parameters: {a: 2}}\n---\n", {"a": 2, "b": 1},
    ),
    "two entries of one name": (
        "perf: {ros__parameters: {a: 1, s: {b: 2}}}\nperf: {ros__parameters: {s: {c: 3}}}\n",
        {"a": 1, "s.b": 2, "s.c": 3},
    ),
    "any node": ("/*: {ros__parameters: {a: 1}}\n/**: {ros__parameters: {b: 2}}\n", {"a": 1, "b": 2}),
    "tab between": ("perf: {ros__parameters:\t{a: 1}}", {"a": 1}),
    "byte order mark": ("\ufeffperf: {ros__parameters: {a: 1}}", {"a": 1}),
    "other nodes' odd values": (
        "camera: {ros__parameters: {a: [1, x], b: }}\nperf: {ros__parameters: {a: 1}}", {"a": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITTEN)
def test_given_a_parameter_file_when_read_then_the_node_is_handed_what_the_commands_read(tmp_path, kind):
    text, expected = WRITTEN[kind]
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    assert params_of_file(path) == expected
    handed = json.loads(params_for_ros(path, "perf"))
    assert {
        name: value for entry in handed.values() for name, value in entry["ros__parameters"].items()
    } == expected


WRONG_FILES = {  # and what the line says beside the file
    "perf: {ros__parameters: {a: 1,\n a: 2}}": "line 2 sets a again; leave one of the two in the file",
    "perf: {ros__parameters: {s: {a: 1}, s: {a: 2}}}": "line 1 sets a again",
    "perf:\n\tros__parameters:\n\t\ta: 1\n": "line 2 begins with a tab; indent it with spaces",
    "perf:\n  ros__parameters:\n  \ta: 1\n   b: 2\n": "line 3 begins with a tab; indent it with spaces",
    "perf: {ros_parameters: {a: 1}}": (
        "ros_parameters has to be ros__parameters, with two underscores, as in /**/perf:"
    ),
    "perf: {Ros__parameters: {a: 1}}": "Ros__parameters has to be ros__parameters",
    "perf: {a: 1}": "a stands directly below perf; it belongs below ros__parameters",
    "perf: {ros__parameters: {a: , b: 1}}": "parameter a: has no value; write one, or '' for an empty text",
    "perf: {ros__parameters: {a: [1, x]}}": (
        "parameter a: [1, 'x'] is not allowed; it has to be a text, a number"
    ),
    "perf: {ros__parameters: {a: [[1]]}}": "parameter a: [[1]] is not allowed",
    "perf: {ros__parameters: {a.: 1}}": "parameter 'a.': a part of its name is empty",
    "perf: {ros__parameters: {? [a] : 1}}": "line 1: a list or a mapping stands where a name belongs",
    "perf: {ros__parameters: {<<: 3}}": "line 1: << merges mappings, not 3",
    "a: &a {x: *a}": "line 1: *a has no &a above it",
    "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcde", "bcdef", strict=True)
    ): "has more than 100000 values",
    "perf: [": "is not YAML: line 1",
}


@pytest.mark.parametrize("text", WRONG_FILES, ids=WRONG_FILES.get)
def test_given_a_parameter_file_that_cannot_be_meant_when_read_then_node_and_commands_say_the_same(
    tmp_path, text
):
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as commands:
        params_of_file(path)
    with pytest.raises(ConfigError) as node:
        params_for_ros(path, "perf")
    assert str(commands.value) == str(node.value)
    assert f"parameter file {path}: {WRONG_FILES[text]}" in str(node.value)


def test_given_nodes_in_two_namespaces_that_differ_when_read_then_the_commands_ask_for_one(read):
    one, other = (
        "/front/perf: {ros__parameters: {metrics_port: 1}}",
        "/rear/perf: {ros__parameters: {metrics_port: %d}}",
    )
    assert read(f"{one}\n{other % 1}").metrics_port == 1
    with pytest.raises(ConfigError, match="metrics_port differs between /front/perf and /rear/perf"):
        read(f"{one}\n{other % 2}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{buget_ms: 20.0}", "parameter buget_ms: is unknown; the closest names are perception.budget_ms"),
        ("{metrics_prt: 0}", "parameter metrics_prt: is unknown; the closest names are metrics_port"),
        (
            "{stages: [perception], percetion: {budget_ms: 20.0}}",
            "parameter percetion.budget_ms: stage percetion is none of the stages that run, perception",
        ),
        ("{perception: {buget_ms: 20.0}}", "the closest names are perception.budget_ms"),
        (
            "{perception: {device: cuda}}",
            "perception.device: is unknown; device is one of the node's: it has to stand",
        ),
        (
            "{perception: {input: image}}",
            "the adapter names the inputs; `topics` says which topics they are",
        ),
        (
            "{perception: {inputs: {image: /cam}}}",
            "perception.inputs.image: is unknown; the adapter names the inputs",
        ),
        (
            "{perception: {options: {a: {b: 1}}}}",
            "perception.options.a.b: is unknown; options is one text of JSON",
        ),
        ("{perception: {model: yolo.pt}}", "perception.model: is unknown; a stage's model is its adapter"),
    ],
)
def test_given_a_misspelt_name_when_read_then_it_is_refused_with_the_nearest(read, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(f"perf: {{ros__parameters: {text}}}")


@pytest.mark.parametrize("name", ["evidence_count", "black_box_after_s"])
def test_given_a_parameter_of_an_earlier_version_when_read_then_it_is_refused_with_what_holds_instead(
    read, name
):
    with pytest.raises(ConfigError, match=f"parameter {name}: is gone, as .* kee?p.*; remove it"):
        read(f"perf: {{ros__parameters: {{stages: [planning], {name}: 5}}}}")


@pytest.mark.parametrize(
    "text", ["{perception: {worker: own}}", "{stages: [perception], perception.worker: shared}"]
)
def test_given_where_workers_run_when_read_then_it_is_refused_with_what_replaces_it(read, text):
    with pytest.raises(
        ConfigError, match="parameter perception.worker: is gone, as each worker is a process of its"
    ):
        read(f"perf: {{ros__parameters: {text}}}")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("memory_share", "memory_limit_mib"),
        ("record_dir", "evidence_dir"),
        ("rollout.folder", "XDG_STATE_HOME"),
        ("emergency.odometry", "STAGE.odometry"),
        ("emergency.types", "emergency.sensors: ['TOPIC TYPE']"),
        ("emergency.mounting", "yaw RAD"),
        ("emergency.timeouts_ms", "timeout MS"),
        ("emergency.lowest_m", "emergency.heights_m"),
        ("emergency.highest_m", "emergency.heights_m"),
        ("perception.dynamic", "shapes: exact"),
        ("perception.bucket_width", "shapes: bucket WIDTH"),
        ("perception.cuda_graphs", "compile_mode: reduce-overhead"),
        ("perception.recover_frames", "sustained_misses"),
        ("perception.left.recover_frames", "sustained_misses"),
        ("perception.window_s", "10 s"),
        ("perception.action_cooldown_s", "2 s"),
        ("perception.budget_near_s", "4 s"),
        ("perception.situation_timeout_ms", "input_timeout_ms"),
    ],
)
def test_given_a_parameter_that_another_replaces_when_read_then_the_error_names_the_other(
    read, name, instead
):
    text = f"{{stages: [perception], perception.streams: [left], {name}: 1}}"
    with pytest.raises(ConfigError, match=f"parameter {name}: is gone, as .*{re.escape(instead)}"):
        read(f"perf: {{ros__parameters: {text}}}")


def test_given_a_global_parameter_of_such_a_name_when_read_then_it_is_another_nodes(read):
    assert read("/**: {ros__parameters: {ekf.window_s: 1.0, window_s: 2.0}}").stages


def test_given_parameters_of_a_stage_that_does_not_run_when_read_then_they_do_not_matter(read):
    text = (
        "perf: {ros__parameters: {stages: [perception], use_sim_time: true, planning: {budget_ms: 20.0}}}"
    )
    assert [stage.name for stage in read(text).stages] == ["perception"]


@pytest.mark.parametrize(
    "name", ["wheel_radius", "robot_description", "robot.wheel.radius", "debug", "device_id"]
)
def test_given_a_parameter_of_a_launch_for_all_nodes_when_checked_then_it_is_left_to_the_others(name):
    assert list(refuse_unknown({name: 0.3, "metrics_port": 1}, ["perception"])) == [name]


def test_given_a_file_with_a_parameter_of_other_nodes_when_read_then_one_warning_names_it(read, caplog):
    assert read("/**: {ros__parameters: {wheel_radius: 0.3, metrics_port: 1}}").metrics_port == 1
    (message,) = caplog.messages
    assert message.startswith(
        "parameters that this node does not have change nothing: wheel_radius (the closest is "
    )


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("metrics_prt", "metrics_port"),
        ("budget_ms", "perception.budget_ms"),
        ("use_sim_tme", ""),
        ("perception.wheel_radius", ""),
        ("planning.buget_ms", "planning.budget_ms"),
        ("guard.wheel_radius", "guard."),
        ("vehicle", "vehicle."),
        ("perception", ""),
        ("stage", "stages"),
    ],
)
def test_given_a_near_miss_or_a_name_below_a_stage_when_checked_then_it_is_refused(name, named):
    with pytest.raises(
        ConfigError, match=re.escape(f"parameter {name}: is unknown; the closest names are ") + f".*{named}"
    ):
        refuse_unknown({name: 0.3}, ["perception"])
