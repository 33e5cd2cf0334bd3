"""The node's parameters from outside.

Refused with one clear line at start and live, described, and all in the file.
"""

import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("rclpy")

from rcl_interfaces.msg import Parameter as ParameterMessage
from rcl_interfaces.msg import ParameterType, ParameterValue
from rcl_interfaces.srv import DescribeParameters, GetParameters, ListParameters, SetParameters
from rclpy.parameter import Parameter as RosParameter
from rclpy.parameter import parameter_dict_from_yaml_file, parameter_value_to_python
from ruamel.yaml import YAML
from sensor_msgs.msg import Image

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.settings.config import NODE_PARAMETERS, STAGE_DEFAULTS, stage_parameters

FILE = Path(__file__).resolve().parents[2] / "config" / "perception.yaml"
DEFAULTS = {parameter.name: parameter for parameter in NODE_PARAMETERS} | {
    f"{stage}.{parameter.name}": parameter
    for stage in STAGE_DEFAULTS
    for parameter in stage_parameters(stage)
}
# name -> parameters, and what the line has to say; `test/settings` has the rule of each parameter
REFUSED_AT_START = {
    "wrong type": (
        {"perception": {"budget_ms": "fast"}},
        ("perception.budget_ms", "'fast'", "a number from 1.0 to 60000.0"),
    ),
    "unknown name": (
        {"perception": {"budgetms": 20.0}},
        ("perception.budgetms", "unknown", "perception.budget_ms"),
    ),
    "unknown scene": (
        {
            "perception": {
                "scenes": ["park"],
                "scene": {"park": {"tiers": ["fast"]}, "prak": {"tiers": ["fast"]}},
            }
        },
        ("perception.scene.prak.tiers", "no scene 'prak'", "it has park"),
    ),
}


@pytest.fixture(scope="module")
def refused(start_node):
    """Nodes that are all refused, started side by side."""
    return {
        name: start_node(parameters, cold=name == "wrong type")
        for name, (parameters, _) in REFUSED_AT_START.items()
    }


@pytest.mark.parametrize("kind", REFUSED_AT_START)
def test_given_a_value_that_is_not_allowed_when_started_then_one_line_says_why_and_the_status_is_2(
    refused, kind
):
    node = refused[kind]
    assert node.process.wait(200) == 2
    # the middleware's, of killed processes
    lines = [line for line in node.errors.splitlines() if "RTPS" not in line]
    assert len(lines) == 1, lines
    (line,) = lines
    assert line.startswith("torchperf_node: parameter ")
    for part in REFUSED_AT_START[kind][1]:
        assert part in line


COMMAND_LINES = [  # words, exit status, and a part of the message
    (["--help"], 0, "torchperf_node --params-file my_robot.yaml"),
    (["my_robot.yaml"], 2, "unrecognized arguments: my_robot.yaml"),
    (["--params-file", "{others}"], 2, "has no entry for this node; it has to be like /**/perf:"),
    (
        ["--ros-args", "--params-file", "{others}"],
        2,
        "has no entry for this node; it has to be like /**/perf:",
    ),
    (
        ["--params-file", "{none}"],
        2,
        "/none: cannot be read (No such file or directory); it has to be a YAML file\n",
    ),
    (["--params-file", "{cut}"], 2, "/cut: is not YAML: line 2, column 1: "),
    (
        ["--ros-args", "--params-file", "{tab}"],
        2,
        "/tab: line 2 begins with a tab; indent it with spaces\n",
    ),
    (["--ros-args", "-p", "device"], 2, "Couldn't parse parameter override rule: '-p device'"),
    (
        ["--params-file", "{wrong}"],
        2,
        "parameter metrics_prt: is unknown; the closest names are metrics_port",
    ),
]


def test_given_command_lines_that_cannot_be_meant_when_started_then_each_says_so_and_ends(
    warm_process, tmp_path
):
    for name, node, parameter in (("others", "other", "metrics_port"), ("wrong", "perf", "metrics_prt")):
        (tmp_path / name).write_text(json.dumps({f"/**/{node}": {"ros__parameters": {parameter: 0}}}))
    (tmp_path / "cut").write_text("a: [1\n")
    (tmp_path / "tab").write_text("/perf:\n\tros__parameters: {}\n")
    files = {name: tmp_path / name for name in ("others", "wrong", "cut", "tab", "none")}
    for words, status, said in COMMAND_LINES:
        with (tmp_path / "output").open("w") as prints:
            process = warm_process.start(
                "node", [word.format_map(files) for word in words], os.environ, prints.fileno()
            )
        code, output = process.wait(200), (tmp_path / "output").read_text()
        assert (code, said in output, "Traceback" in output) == (status, True, False), (words, output)


# -- the file that holds every parameter


def flat(values, prefix=""):
    for name, value in values.items():
        yield from (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
        )


def test_given_the_parameter_file_then_it_has_every_parameter_with_its_default_and_description():
    text = FILE.read_text()
    (settings,) = YAML(typ="safe").load(text).values()
    found = dict(flat(settings["ros__parameters"]))
    assert found == {name: parameter.default for name, parameter in DEFAULTS.items()}
    assert {name: type(value) for name, value in found.items()} == {
        name: type(parameter.default) for name, parameter in DEFAULTS.items()
    }
    comments = re.findall(r"((?: *# .+\n)+) *(\w+): ", text)
    described = {
        (" ".join(line.strip(" #") for line in said.splitlines()), name) for said, name in comments
    }
    for parameter in DEFAULTS.values():
        name = parameter.name.rpartition(".")[2]
        assert any(key == name and said.startswith(parameter.description) for said, key in described), (
            parameter
        )


@pytest.fixture(scope="module")
def idle(start_node, tmp_path_factory):
    """A node that was started from the parameter file, with an integer for a number, and is not configured.

    Beside that it has a file as people write it, and what a launch hands to all of its nodes.
    """
    written = tmp_path_factory.mktemp("files") / "written.yaml"
    written.write_text(
        "x: &none []\n/**: {ros__parameters: {wheel_radius: 0.3, perception: {scenes: *none}}}\n"
    )
    own = ("-p", "autostart:=false", "-p", "perception.hold_last_ms:=3e2", "-p", "launch_wide:=1:40")
    return start_node(None, arguments=("--params-file", str(FILE), "--params-file", str(written), *own))


def test_given_parameters_of_other_nodes_when_started_then_one_warning_names_them(idle):
    idle.wait_for(lambda: "wheel_radius" in idle.errors, "the warning")
    (line,) = [line for line in idle.errors.splitlines() if "wheel_radius" in line]
    assert "parameters that this node does not have change nothing: " in line
    assert "launch_wide (the closest is " in line
    assert "no parameters were given" not in idle.errors


def test_given_the_parameter_file_when_the_node_starts_from_it_then_it_has_those_values(idle):
    names = list(DEFAULTS)
    own = {"autostart": False, "perception.scenes": []}
    answer = idle.call(GetParameters, "get_parameters", GetParameters.Request(names=names))
    values = [parameter_value_to_python(value) for value in answer.values]
    found = {
        name: list(value) if isinstance(DEFAULTS[name].default, list) else value
        for name, value in zip(names, values, strict=True)
    }
    assert found == {name: parameter.default for name, parameter in DEFAULTS.items()} | own
    assert all(type(value) is type(DEFAULTS[name].default) for name, value in found.items())


def test_given_any_parameter_when_described_then_it_has_a_description_a_type_and_a_range(idle):
    request = DescribeParameters.Request(names=list(DEFAULTS))
    answer = idle.call(DescribeParameters, "describe_parameters", request)
    for parameter, told in zip(DEFAULTS.values(), answer.descriptors, strict=True):
        assert told.description == parameter.description
        assert told.type == RosParameter.Type.from_parameter_value(parameter.default).value
        assert parameter.allowed in told.additional_constraints
        assert ("read-only while configured" in told.additional_constraints) != parameter.live
        ranges = [*told.floating_point_range, *told.integer_range]
        assert [(span.from_value, span.to_value) for span in ranges] == (
            []
            if parameter.minimum is None or isinstance(parameter.default, list)
            else [(parameter.minimum, parameter.maximum)]
        )


# -- changes


@pytest.fixture(scope="module")
def node(start_node, obedient):
    """A node with one stage, active, whose tiers were changed before it was configured."""
    node = start_node({"stages": ["camera"], "autostart": False, "camera": obedient() | {"options": ""}})
    assert change(node, "camera.tiers", ["slow", "fast"]) == ""
    assert (
        change(node, "stages", ["camera", "lidar"])
        == "parameter stages: is read from the parameter file at start; start the node anew"
    )
    assert node.change_state("configure")
    assert node.change_state("activate")
    node.wait_until_ready("camera")
    return node


def change(node, name, value):
    """Why a change is refused; empty if it was made."""
    message = RosParameter(name, value=value).to_parameter_msg()
    return ask_for(node, message)


def ask_for(node, message):
    request = SetParameters.Request(parameters=[message])
    answer = node.call(SetParameters, "set_parameters", request)
    (result,) = answer.results
    assert result.successful != bool(result.reason)
    return result.reason


def test_given_a_change_before_configure_then_the_stage_is_made_with_it(node):
    assert node.values("camera")["tiers"] == "slow,fast"


def value_of(node, name):
    (value,) = node.call(GetParameters, "get_parameters", GetParameters.Request(names=[name])).values
    return value


@pytest.mark.parametrize("budget_ms", [7000.0, 8000])
def test_given_a_running_node_when_the_budget_is_changed_then_frames_have_the_new_one(
    node, image, budget_ms
):
    camera = node.publisher("image", Image)
    assert node.answer(camera, image())["outcome"] == Outcome.ON_TIME
    assert change(node, "camera.budget_ms", budget_ms) == ""
    assert value_of(node, "camera.budget_ms").type == ParameterType.PARAMETER_DOUBLE
    row = node.answer(camera, image())
    assert (row["budget_ms"], row["outcome"]) == (budget_ms, Outcome.ON_TIME)
    node.wait_for(lambda: float(node.values("camera")["budget_ms"]) == budget_ms, "diagnostics to say it")


REFUSED_LIVE = {  # name -> value, and what the reason has to say
    "camera.adapter": (
        "other:Adapter",
        "parameter camera.adapter: is read-only while the node is configured",
    ),
    "camera.tiers": (
        ["fast"],
        "parameter camera.tiers: is read-only while the node is configured; clean up first",
    ),
    "metrics_port": (
        9999,
        "parameter metrics_port: is read-only while the node is configured; clean up first",
    ),
    "camera.hang_ms": (100.0, "parameter camera.hang_ms: 100.0 is below camera.budget_ms"),
    "camera.budget_ms": (
        11_000.0,
        "parameter camera.hang_ms: 10000.0 is below camera.budget_ms 11000.0; it has to be at",
    ),
    "camera.hold_last_ms": (
        -1.0,
        "Parameter camera.hold_last_ms out of range Min: 0.0, Max: 60000.0, value: -1.0",
    ),
    "camera.sustained_misses": (
        "many",
        "parameter camera.sustained_misses: 'many' is a text; it has to be an integer from 1 to",
    ),
    "camera.stop_deceleration": (float("nan"), "nan"),
    "camera.budgt_ms": (20.0, "camera.budgt_ms; the closest names are camera.budget_ms, "),
}


@pytest.mark.parametrize("name", REFUSED_LIVE)
def test_given_a_running_node_when_a_change_is_not_allowed_then_it_is_refused_and_nothing_changes(
    node, image, name
):
    value, reason = REFUSED_LIVE[name]
    request = GetParameters.Request(names=[name])
    before = node.call(GetParameters, "get_parameters", request)
    assert reason in change(node, name, value)
    assert node.call(GetParameters, "get_parameters", request) == before
    assert node.answer(node.publisher("image", Image), image())["outcome"] == Outcome.ON_TIME


def test_given_a_running_node_when_a_parameter_is_to_be_deleted_then_it_is_refused(node):
    unset = ParameterValue(type=ParameterType.PARAMETER_NOT_SET)
    reason = ask_for(node, ParameterMessage(name="camera.hold_last_ms", value=unset))
    assert (
        "parameter camera.hold_last_ms: None is empty; it has to be a number from 0.0 to 60000.0" in reason
    )


def test_given_a_running_node_when_its_parameters_are_dumped_and_loaded_then_all_of_them_are_taken(
    node, tmp_path
):
    """As `ros2 param dump` and `ros2 param load` do it."""
    names = node.call(ListParameters, "list_parameters", ListParameters.Request()).result.names
    values = node.call(GetParameters, "get_parameters", GetParameters.Request(names=names)).values
    dumped = {name: parameter_value_to_python(value) for name, value in zip(names, values, strict=True)}
    file = tmp_path / "dumped.yaml"
    file.write_text(json.dumps({node.name: {"ros__parameters": dumped}}, default=list))
    loaded = list(parameter_dict_from_yaml_file(str(file), target_nodes=[node.name]).values())
    results = node.call(SetParameters, "set_parameters", SetParameters.Request(parameters=loaded)).results
    refused = {
        one.name: result.reason
        for one, result in zip(loaded, results, strict=True)
        if not result.successful
    }
    assert refused.keys() <= {"start_type_description_service"}, refused  # rclpy's own


def test_given_every_parameter_set_to_its_own_value_by_service_when_configured_again_and_again_then_it_succeeds(
    start_node, obedient
):
    """What comes by service has other types than what a file has: arrays of numbers are `array.array`."""
    node = start_node({"stages": ["camera"], "autostart": False, "camera": obedient()})
    names = node.call(ListParameters, "list_parameters", ListParameters.Request()).result.names
    values = node.call(GetParameters, "get_parameters", GetParameters.Request(names=names)).values
    own = {
        name: value
        for name, value in zip(names, values, strict=True)
        if name != "start_type_description_service"
    }
    kinds = {value.type for value in own.values()}
    assert kinds >= {
        ParameterType.PARAMETER_BOOL,
        ParameterType.PARAMETER_INTEGER,
        ParameterType.PARAMETER_DOUBLE,
        ParameterType.PARAMETER_STRING,
        ParameterType.PARAMETER_INTEGER_ARRAY,
        ParameterType.PARAMETER_DOUBLE_ARRAY,
        ParameterType.PARAMETER_STRING_ARRAY,
    }
    parameters = [ParameterMessage(name=name, value=value) for name, value in own.items()]
    for _ in range(2):
        results = node.call(
            SetParameters, "set_parameters", SetParameters.Request(parameters=parameters)
        ).results
        assert [result.reason for result in results if not result.successful] == []
        assert node.change_state("configure"), node.errors
        assert node.change_state("cleanup"), node.errors
    assert "Traceback" not in node.errors


@pytest.mark.parametrize(
    "value", [[b"a", b"b"], [True, False], [1, 2], [1.5, 2.5], ["a"], True, 1, 1.5, "a"], ids=repr
)
@pytest.mark.parametrize(
    "name", ["cpu_affinity", "emergency.heights_m", "rollout.facts", "metrics_port", "device"]
)
def test_given_a_value_of_any_type_when_set_then_it_is_taken_or_refused_with_a_reason_and_the_node_lives(
    idle, name, value
):
    before = value_of(idle, name)
    reason = change(idle, name, value)
    if reason:
        assert name in reason
        assert value_of(idle, name) == before
    request = SetParameters.Request(parameters=[ParameterMessage(name=name, value=before)])
    assert idle.call(SetParameters, "set_parameters", request).results[0].successful
    assert "Traceback" not in idle.errors
