import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import (
    NODE_PARAMETERS,
    STAGE_DEFAULTS,
    STAGE_PARAMETERS,
    NodeConfig,
    StageConfig,
    node_config,
    refuse_unknown,
    stage_config,
    stage_parameters,
)
from torchperf_ros.settings.params_file import (
    params_for_ros,
    params_of_file,
    parse_value,
    read_params_file,
)
from torchperf_ros.settings.stage_options import ALERTS, SyncRule, alert_kind, check_sync

MINE = {"adapter": "mine:Mine", "output": "mine"}
EVERY = [*NODE_PARAMETERS, *STAGE_PARAMETERS]
NUMBERS = [p for p in EVERY if isinstance(p.default, (int, float)) and not isinstance(p.default, bool)]
FLOATS = [p for p in NUMBERS if isinstance(p.default, float)]
values_of_any_type = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=5),
    st.none(),
    st.binary(max_size=3),
    st.lists(
        st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.booleans() | st.floats(), max_size=3
    ),
)


def kind(value):
    return f"list of {type(value[0]).__name__}" if isinstance(value, list) else type(value).__name__


def refused(parameter, value, prefix=""):
    """What the error says, which names the parameter."""
    with pytest.raises(ConfigError) as caught:
        parameter.check(value, prefix)
    assert f"parameter {prefix}{parameter.name}: {value!r}" in str(caught.value)
    return str(caught.value)


def test_given_the_parameters_when_listed_then_each_is_there_once_described_and_its_default_is_allowed():
    for table in (NODE_PARAMETERS, STAGE_PARAMETERS):
        assert len({parameter.name for parameter in table}) == len(table)
    for parameter in EVERY:
        assert parameter.check(parameter.default) == parameter.default
        assert parameter.description.endswith(".")
    live = (
        "budget_ms hold_last_ms stop_deceleration hang_ms input_timeout_ms sustained_misses batch_wait_ms"
    )
    live += " scene_hold_s action_return_s"
    live += " budget_fast_speed candidate candidate_serves rollout.facts"
    assert {parameter.name for parameter in EVERY if parameter.live} == set(live.split())


def test_given_a_value_of_another_type_when_checked_then_the_error_names_parameter_value_and_what_is_allowed():
    for parameter in EVERY:
        own = {kind(parameter.default), "int" if isinstance(parameter.default, float) else ""}
        for value in (None, b"x", 1.5, 7, "7", True, [1], ["x"], [True], [1.5]):
            if kind(value) not in own and str(value) not in parameter.choices:
                assert parameter.allowed in refused(parameter, value, "perception.")


def test_given_a_number_when_at_its_bounds_then_it_is_allowed_and_beyond_them_refused():
    for parameter in NUMBERS:
        kind = type(parameter.default)
        for bound, beyond in ((parameter.minimum, -1), (parameter.maximum, 1)):
            assert parameter.check(kind(bound)) == bound
            outside = kind(bound) + beyond * (1 if kind is int else 0.001 * max(1.0, abs(bound)))
            assert f"from {parameter.minimum} to {parameter.maximum}" in refused(parameter, outside)
    for parameter in FLOATS:
        assert type(parameter.check(math.ceil(parameter.minimum))) is float
        for value in (math.nan, math.inf, -math.inf):
            refused(parameter, value)
    (affinity,) = (p for p in NODE_PARAMETERS if p.name == "cpu_affinity")
    for value in ([-2], [0, 4096]):
        assert "from -1 to 4095" in refused(affinity, value)


def test_given_a_word_that_is_no_choice_when_checked_then_the_error_lists_the_choices():
    for parameter in EVERY:
        if parameter.choices:
            text = refused(parameter, ["sideways"] if isinstance(parameter.default, list) else "sideways")
            words = [choice for choice in parameter.choices if not choice.isdecimal()]
            assert all(word in text for word in words)


@settings(max_examples=100, deadline=None)
@given(parameter=st.sampled_from(EVERY), value=values_of_any_type)
def test_given_any_value_when_checked_then_it_is_of_the_defaults_type_or_a_config_error(parameter, value):
    try:
        checked = parameter.check(value)
    except ConfigError:
        return
    assert type(checked) is type(parameter.default)
    if isinstance(checked, list) and parameter.default:
        assert all(type(item) is type(parameter.default[0]) for item in checked)


@given(
    node=st.dictionaries(
        st.sampled_from([p.name for p in NODE_PARAMETERS]), values_of_any_type, max_size=3
    ),
    stage=st.dictionaries(
        st.sampled_from([p.name for p in STAGE_PARAMETERS]), values_of_any_type, max_size=3
    ),
)
def test_given_any_values_when_the_node_is_configured_then_it_is_a_config_or_a_config_error(node, stage):
    try:
        config = node_config(node, {"perception": stage})
    except ConfigError as error:
        assert str(error).startswith("parameter ")  # noqa: PT017 - either end is right
        return
    assert isinstance(config, NodeConfig)


def test_given_stages_with_defaults_when_listed_then_only_known_parameters_are_overridden():
    for stage, own in STAGE_DEFAULTS.items():
        assert set(own) <= {parameter.name for parameter in STAGE_PARAMETERS}
        assert isinstance(stage_config(stage, {}), StageConfig)
        assert {p.name: p.default for p in stage_parameters(stage)}.items() >= own.items()


@pytest.mark.parametrize("name", ["", "Perception", "1st", "a-b", "a.b", "a b", "_a", "a\n"])
def test_given_a_name_that_cannot_be_a_stages_when_configured_then_it_is_refused(name):
    with pytest.raises(ConfigError, match="parameter stages: .* is not a stage name"):
        stage_config(name, MINE)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        *(({missing: ""}, rf"mine\.{missing}: is empty") for missing in ("adapter", "output")),
        ({"engine": "warp"}, r"mine\.engine: 'warp' .*eager"),
        *(({"tiers": tiers}, r"mine\.tiers: ") for tiers in ([], [""], ["full", ""], ["full", "full"])),
        ({"budget_ms": 100.0, "hang_ms": 99.0}, r"mine\.hang_ms: 99.0 .*mine\.budget_ms 100.0"),
        (
            {"engine": "eager", "precision": ["int8_static"]},
            r"mine\.precision: int8_static runs by engine aoti only",
        ),
        (
            {"engine": "aoti", "parts": "body"},
            r"mine\.parts: 'body' is not allowed with engine aoti; .* engine compile",
        ),
        (
            {"parts": "blocks"},
            r"mine\.parts: 'blocks' is not allowed with engine auto; it has to be paths of modules",
        ),
        (
            {"precision": ["fp32", "bf16"]},
            r"mine\.precision: .* has 2 entries; it has to have 1, or 3, one per tier",
        ),
        *(
            ({"output": topic}, r"mine\.output: .* is no topic: letters, digits")
            for topic in ("la bels", "1st", "a//b", "a/", "bücher", "a-b", "~a")
        ),
        *(
            ({"options": x}, r"mine\.options: ")
            for x in ("{", "[]", "1", "null", '"x"', "{'a': 1}", "[" * 100_000)
        ),
    ],
)
def test_given_values_that_a_stage_cannot_have_when_configured_then_the_error_names_them(values, says):
    with pytest.raises(ConfigError, match=f"parameter {says}"):
        stage_config("mine", {**MINE, **values})


def test_given_values_that_a_stage_can_have_when_configured_then_they_are_kept():
    assert stage_config("mine", {**MINE, "budget_ms": 100, "hang_ms": 100}).hang_ms == 100.0
    for text, options in (("", {}), ("{}", {}), ('{"a": [1, 2]}', {"a": [1, 2]})):
        assert stage_config("mine", {**MINE, "options": text}).options == options
    for backup, workers in (("none", 1), ("standby", 2), ("active", 2)):
        assert stage_config("mine", {**MINE, "backup": backup}).workers == workers


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("stages", [[], ["perception", "perception"]], "at least one name, each once"),
        ("device", ["", "gpu", "cuda:", "cuda:x", "CPU", "cpu:0", "cuda:0\n"], "auto, cpu, cuda or cuda:N"),
        (
            "metrics_address",
            ["", "localhost", "127.0.0.1:9464", "127.0.0.256", "http://0.0.0.0"],
            r"such as 127\.0\.0\.1, or 0\.0\.0\.0",
        ),
        ("package_dirs", [["models"]], "'models' is not allowed; it has to begin with / or ~"),
    ],
)
def test_given_a_value_of_another_form_when_configured_then_the_error_says_what_would_be_right(
    name, values, says
):
    for value in values:
        with pytest.raises(ConfigError, match=rf"parameter {name}: .*{says}"):
            node_config({name: value}, {})


def test_given_values_of_the_right_form_when_configured_then_they_are_kept():
    for device in ("auto", "cpu", "cuda", "cuda:0", "cuda:12"):
        assert node_config({"device": device}, {}).device == device
    for address in ("127.0.0.1", "0.0.0.0", "::1"):
        assert node_config({"metrics_address": address}, {}).metrics_address == address
    folders = node_config({"package_dirs": ["/opt/models", "~/packages", ""]}, {}).package_dirs
    assert folders == ("/opt/models", "~/packages")


@pytest.mark.parametrize("topic", ["detections", "/a/b", "~/c_1", "{node}/d"])
def test_given_a_topic_as_ros_takes_it_when_checked_then_it_is_the_output(topic):
    assert stage_config("perception", {**MINE, "output": topic}).output == topic


# -- files of parameters


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
            "perf: {ros__parameters: {planning: {output: detections}}}",
            "perception, planning share an output",
        ),
        (
            "perf: {ros__parameters: {stages: [seg mentation], segmentation.adapter: 'mine:Mine'}}",
            "stages: 'seg mentation' is not a stage name: lower-case",
        ),
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
        *(
            (text, "parameter perception.worker: is gone, as each worker is a process of its")
            for text in ("{perception: {worker: own}}", "{stages: [perception], perception.worker: shared}")
        ),
    ],
)
def test_given_a_misspelt_name_or_one_that_is_gone_when_read_then_it_is_refused_with_the_nearest(
    read, text, message
):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(f"perf: {{ros__parameters: {text}}}")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("memory_share", "memory_limit_mib"),
        ("record_dir", "evidence_dir"),
        ("rollout.folder", "XDG_STATE_HOME"),
        ("emergency.odometry", r"STAGE\.odometry"),
        ("emergency.types", r"emergency\.sensors: \['TOPIC TYPE'\]"),
        ("emergency.mounting", "yaw RAD"),
        ("emergency.timeouts_ms", "timeout MS"),
        ("emergency.lowest_m", r"emergency\.heights_m"),
        ("emergency.highest_m", r"emergency\.heights_m"),
        ("perception.dynamic", "shapes: exact"),
        ("perception.bucket_width", "shapes: bucket WIDTH"),
        ("perception.cuda_graphs", "compile_mode: reduce-overhead"),
        ("perception.recover_frames", "sustained_misses"),
        ("perception.left.recover_frames", "sustained_misses"),
        ("perception.window_s", "10 s"),
        ("perception.action_cooldown_s", "2 s"),
        ("perception.budget_near_s", "4 s"),
        ("perception.situation_timeout_ms", "input_timeout_ms"),
        *((name, " kee?p.*; remove it") for name in ("evidence_count", "black_box_after_s")),
    ],
)
def test_given_a_parameter_that_is_gone_when_read_then_the_error_names_what_holds_instead(
    read, name, instead
):
    text = f"{{stages: [perception], perception.streams: [left], {name}: 1}}"
    with pytest.raises(ConfigError, match=f"parameter {name}: is gone, as .*{instead}"):
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


# -- lines of actions and sync


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")


def stage(**values):
    return stage_config("fusion", {"adapter": "a:B", "output": "o", **values})


def test_given_actions_when_read_then_each_is_a_rule_and_reads_as_it_was_written():
    found = stage(actions=["drift -> lower_tier", "", " gpu memory->scene default "]).actions
    assert [(one.alert, one.action, one.scene) for one in found] == [
        ("drift", "lower_tier", ""),
        ("gpu memory", "scene", "default"),
    ]
    assert [str(one) for one in found] == ["drift -> lower_tier", "gpu memory -> scene default"]


def test_given_inputs_when_read_then_each_is_a_rule_whatever_the_order_of_its_words_and_reads_as_such_a_line():
    found = stage(sync=["cloud offset 0 slop 40 wait 15", "", "/radar/points slop 2.5 offset -100"]).sync
    assert found == (SyncRule("cloud", 40.0, 0.0, 15.0), SyncRule("/radar/points", 2.5, -100.0))
    assert stage(sync=[str(rule) for rule in found]).sync == found
    assert stage().sync == ()


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        *(
            ({name: [line]}, parts)
            for name, line, parts in (
                ("actions", "drift", ["fusion.actions: 'drift'", "ALERT -> ACTION"]),
                ("actions", "drfit -> off", ["there is no alert 'drfit'", "drift, latency"]),
                ("actions", " -> off", ["there is no alert ''"]),
                (
                    "actions",
                    "drift -> stop",
                    ["there is no action 'stop'", "lower_rate, scene, backup_active, off"],
                ),
                ("actions", "drift -> scene moon", ["there is no scene 'moon'", "default"]),
                ("actions", "drift -> scene", ["there is no scene ''"]),
                ("actions", "drift -> off now", ["'now' behind off"]),
                ("sync", "cloud", ["fusion.sync: 'cloud'", "INPUT slop MS"]),
                ("sync", "cloud slop", ["'cloud slop'", "INPUT slop MS"]),
                ("sync", "cloud wait 5", ["'cloud wait 5'", "INPUT slop MS"]),
                ("sync", "cloud slop -1", ["slop -1", "from 0 to 60000 ms"]),
                ("sync", "cloud slop 5 wait -1", ["wait -1", "from 0 to 60000 ms"]),
                ("sync", "cloud slop 5 offset -1e9", ["offset -1e9", "from -60000 to 60000 ms"]),
                ("sync", "cloud slop nan", ["slop nan", "from 0 to 60000 ms"]),
                ("sync", "cloud slop soon", ["slop soon", "from 0 to 60000 ms"]),
                ("sync", "cloud slop 5 slop 6", ["slop stands there twice"]),
                ("sync", "cloud slop 5 queue 3", ["'queue' is not allowed"]),
                ("sync", "cloud slop 5 wait 50", ["wait 50", "below the shortest budget, 50 ms"]),
            )
        ),
        (
            {"actions": ["misses -> backup_active"], "backup": "none"},
            ["needs a second worker, and backup is none"],
        ),
        ({"sync": ["cloud slop 5", "cloud slop 6"]}, ["cloud stands in 2 lines"]),
        (
            {
                "sync": ["cloud slop 5 wait 20"],
                "scenes": ["fast"],
                "scene.fast.tiers": ["a"],
                "scene.fast.budget_ms": 20.0,
            },
            ["below the shortest budget, 20 ms"],
        ),
    ],
)
def test_given_a_line_that_means_nothing_or_not_with_the_stage_when_read_then_the_error_says_what_would(
    values, parts
):
    with pytest.raises(ConfigError) as caught:
        stage(**values)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("kind", ALERTS)
def test_given_a_kind_when_an_alert_has_its_name_then_it_is_found_and_the_page_has_it(kind):
    assert alert_kind(f"camera: {kind}") == alert_kind(f"camera: {kind} (/image)") == kind
    assert {kind, kind.removeprefix("input ")} & set(re.findall(r"`([a-z ]+?)(?: of \.\.\.)?`", PAGE))


@pytest.mark.parametrize(
    ("topic", "inputs", "said"),
    [
        ("clout", [("image", True), ("cloud", True)], "the adapter has no input clout; it has: cloud"),
        ("cloud", [("image", True)], "it has: none beside its trigger"),
        ("image", [("image", True), ("cloud", True)], "image is the trigger"),
        (
            "cloud",
            [("image", True), ("cloud", False)],
            "the message type of cloud does not begin with a std_msgs/Hea",
        ),
    ],
)
def test_given_an_adapters_inputs_when_a_rule_is_for_none_that_has_stamps_then_it_is_refused(
    topic, inputs, said
):
    with pytest.raises(ConfigError, match=said):
        check_sync("fusion", stage(sync=[f"{topic} slop 5"]).sync, inputs)
