import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.config.config import (
    NODE_PARAMETERS,
    STAGE_DEFAULTS,
    STAGE_PARAMETERS,
    NodeConfig,
    Parameter,
    StageConfig,
    node_config,
    stage_config,
    stage_parameters,
)
from torchperf_ros.frame.errors import ConfigError
from torchperf_ros.frame.outcome import Fallback

MINE = {"adapter": "mine:Mine", "output": "mine"}
EVERY = [*NODE_PARAMETERS, *STAGE_PARAMETERS]
NUMBERS = [p for p in EVERY if isinstance(p.default, (int, float)) and not isinstance(p.default, bool)]
values_of_any_type = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5), st.none(), st.binary(max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.booleans() | st.floats(), max_size=3),
)  # fmt: skip


def named(parameters):
    return pytest.mark.parametrize("parameter", parameters, ids=lambda parameter: parameter.name)


@named(EVERY)
def test_given_a_parameter_when_its_default_is_checked_then_it_is_valid_and_described(parameter):
    assert parameter.check(parameter.default) == parameter.default
    assert parameter.description.endswith(".")


def kind(value):
    return f"list of {type(value[0]).__name__}" if isinstance(value, list) else type(value).__name__


def of_another_type():
    for parameter in EVERY:
        own = {kind(parameter.default), "int" if isinstance(parameter.default, float) else ""}
        for value in (None, b"x", 1.5, 7, "7", True, [1], ["x"], [True], [1.5]):
            if kind(value) not in own:
                yield pytest.param(parameter, value, id=f"{parameter.name}-{value!r}")


@pytest.mark.parametrize(("parameter", "value"), list(of_another_type()))
def test_given_a_value_of_another_type_when_checked_then_the_error_names_parameter_value_and_what_is_allowed(
    parameter, value
):
    with pytest.raises(ConfigError) as caught:
        parameter.check(value, "perception.")
    assert f"parameter perception.{parameter.name}: {value!r}" in str(caught.value)
    assert parameter.allowed in str(caught.value)


@named(NUMBERS)
def test_given_a_number_when_at_its_bounds_then_it_is_allowed_and_beyond_them_refused(parameter):
    kind = type(parameter.default)
    for bound, beyond in ((parameter.minimum, -1), (parameter.maximum, 1)):
        assert parameter.check(kind(bound)) == bound
        with pytest.raises(ConfigError) as caught:
            parameter.check(kind(bound) + beyond * (1 if kind is int else 0.001 * max(1.0, abs(bound))))
        assert f"parameter {parameter.name}:" in str(caught.value)
        assert f"from {parameter.minimum} to {parameter.maximum}" in str(caught.value)


@named([p for p in NUMBERS if isinstance(p.default, float)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_given_a_float_that_is_no_number_when_checked_then_it_is_refused(parameter, value):
    with pytest.raises(ConfigError, match=f"parameter {parameter.name}: "):
        parameter.check(value)


@named([p for p in NUMBERS if isinstance(p.default, float)])
def test_given_a_whole_number_for_a_float_when_checked_then_it_becomes_one(parameter):
    checked = parameter.check(math.ceil(parameter.minimum))
    assert type(checked) is float


@named([p for p in EVERY if p.choices])
def test_given_a_word_that_is_no_choice_when_checked_then_the_error_lists_the_choices(parameter):
    value = ["sideways"] if isinstance(parameter.default, list) else "sideways"
    with pytest.raises(ConfigError) as caught:
        parameter.check(value)
    assert all(choice in str(caught.value) for choice in parameter.choices)


@pytest.mark.parametrize("value", [[-2], [0, 4096]])
def test_given_a_list_with_a_number_out_of_range_when_checked_then_the_error_says_what_the_range_is(value):
    (affinity,) = (p for p in NODE_PARAMETERS if p.name == "cpu_affinity")
    with pytest.raises(ConfigError, match=r"parameter cpu_affinity: .*-1.*4095"):
        affinity.check(value)


@named(EVERY)
@settings(max_examples=30, deadline=None)
@given(value=values_of_any_type)
def test_given_any_value_when_checked_then_it_is_of_the_defaults_type_or_a_config_error(parameter, value):
    try:
        checked = parameter.check(value)
    except ConfigError:
        return
    assert type(checked) is type(parameter.default)
    if isinstance(checked, list) and parameter.default:
        assert all(type(item) is type(parameter.default[0]) for item in checked)


@given(
    node=st.dictionaries(st.sampled_from([p.name for p in NODE_PARAMETERS]), values_of_any_type, max_size=3),
    stage=st.dictionaries(st.sampled_from([p.name for p in STAGE_PARAMETERS]), values_of_any_type, max_size=3),
)
def test_given_any_values_when_the_node_is_configured_then_it_is_a_config_or_a_config_error(node, stage):
    try:
        config = node_config(node, {"perception": stage})
    except ConfigError as error:
        assert str(error).startswith("parameter ")  # noqa: PT017 - either end is right
        return
    assert isinstance(config, NodeConfig)


def test_given_nothing_when_configured_then_the_defaults_are_those_of_the_design():
    config = node_config({}, {})
    perception, planning = config.stages
    assert (config.device, config.autostart, config.metrics_port, config.cpu_affinity) == ("auto", True, 9464, ())
    assert (perception.name, planning.name) == ("perception", "planning")
    assert (perception.budget_ms, perception.hang_ms, perception.max_frame_bytes) == (50.0, 1000.0, 8_388_608)
    assert perception.tiers == ("full", "medium", "fast")
    assert perception.fallback == (Fallback.BACKUP, Fallback.HOLD_LAST, Fallback.STOP)
    assert (perception.backup, perception.hold_last_ms, perception.budget_from) == ("standby", 300.0, "receipt")
    assert (perception.output, planning.output) == ("detections", "trajectory")
    assert perception.options == {}


@pytest.mark.parametrize(("backup", "workers"), [("none", 1), ("standby", 2), ("active", 2)])
def test_given_a_backup_when_asked_for_workers_then_it_takes_a_second_one(backup, workers):
    assert stage_config("mine", {**MINE, "backup": backup}).workers == workers


@pytest.mark.parametrize("name", ["", "Perception", "1st", "a-b", "a.b", "a b", "_a", "a\n"])
def test_given_a_name_that_cannot_be_a_stages_when_configured_then_it_is_refused(name):
    with pytest.raises(ConfigError, match="parameter stages: .* is not a stage name"):
        stage_config(name, MINE)


@pytest.mark.parametrize("missing", ["adapter", "output"])
def test_given_a_stage_of_ones_own_when_it_lacks_what_it_needs_then_the_error_names_it(missing):
    with pytest.raises(ConfigError, match=rf"parameter mine\.{missing}: is empty"):
        stage_config("mine", {**MINE, missing: ""})


def test_given_an_engine_that_does_not_exist_when_configured_then_the_error_names_it_and_what_there_is():
    with pytest.raises(ConfigError, match=r"parameter mine\.engine: 'warp' .*eager"):
        stage_config("mine", {**MINE, "engine": "warp"})


@pytest.mark.parametrize("tiers", [[], [""], ["full", ""], ["full", "full"]])
def test_given_tiers_that_cannot_be_told_apart_when_configured_then_they_are_refused(tiers):
    with pytest.raises(ConfigError, match=r"parameter mine\.tiers: "):
        stage_config("mine", {**MINE, "tiers": tiers})


def test_given_a_hang_below_the_budget_when_configured_then_the_error_names_both():
    with pytest.raises(ConfigError, match=r"parameter mine\.hang_ms: 99.0 .*mine\.budget_ms 100.0"):
        stage_config("mine", {**MINE, "budget_ms": 100.0, "hang_ms": 99.0})
    assert stage_config("mine", {**MINE, "budget_ms": 100, "hang_ms": 100}).hang_ms == 100.0


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '"x"', "{'a': 1}", "[" * 100_000], ids=lambda t: t[:9])
def test_given_options_that_are_no_json_object_when_configured_then_the_error_names_them(text):
    with pytest.raises(ConfigError, match=r"parameter mine\.options: "):
        stage_config("mine", {**MINE, "options": text})


def test_given_options_when_configured_then_they_are_read():
    assert stage_config("mine", {**MINE, "options": '{"a": [1, 2]}'}).options == {"a": [1, 2]}


@pytest.mark.parametrize("stages", [[], ["perception", "perception"]])
def test_given_stages_that_cannot_be_told_apart_when_configured_then_they_are_refused(stages):
    with pytest.raises(ConfigError, match="parameter stages: "):
        node_config({"stages": stages}, {})


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "CPU", "cpu:0", "cuda:0\n"])
def test_given_a_device_of_another_form_when_configured_then_it_is_refused(device):
    with pytest.raises(ConfigError, match="parameter device: "):
        node_config({"device": device}, {})


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_given_a_device_when_configured_then_it_is_kept(device):
    assert node_config({"device": device}, {}).device == device


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1:9464", "127.0.0.256", "http://0.0.0.0"])
def test_given_an_address_that_is_none_when_configured_then_the_error_says_what_would_be_right(address):
    with pytest.raises(ConfigError, match=r"parameter metrics_address: .*such as 127\.0\.0\.1, or 0\.0\.0\.0"):
        node_config({"metrics_address": address}, {})


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_given_an_address_when_configured_then_it_is_kept(address):
    assert node_config({"metrics_address": address}, {}).metrics_address == address


def test_given_two_stages_when_they_share_an_output_then_the_error_names_both():
    with pytest.raises(ConfigError, match="perception, planning share an output"):
        node_config({}, {"planning": {"output": "detections"}})


def test_given_stages_with_defaults_when_listed_then_only_known_parameters_are_overridden():
    names = {parameter.name for parameter in STAGE_PARAMETERS}
    for stage, own in STAGE_DEFAULTS.items():
        assert set(own) <= names
        assert isinstance(stage_config(stage, {}), StageConfig)
        assert {p.name: p.default for p in stage_parameters(stage)}.items() >= own.items()


def test_given_a_parameter_when_live_then_it_is_a_budget_or_a_threshold():
    live = {parameter.name for parameter in EVERY if parameter.live}
    assert live == {
        "budget_ms", "hold_last_ms", "stop_deceleration", "hang_ms", "input_timeout_ms", "sustained_misses",
        "recover_frames", "window_s",
    }  # fmt: skip


def test_given_names_of_parameters_when_listed_then_none_is_there_twice():
    for table in (NODE_PARAMETERS, STAGE_PARAMETERS):
        names = [parameter.name for parameter in table]
        assert len(set(names)) == len(names)
    assert isinstance(NODE_PARAMETERS[0], Parameter)


def test_given_folders_of_packages_when_checked_then_only_those_that_lie_in_one_place_are_allowed():
    def dirs(*names):
        values = {"stages": ["planning"], "package_dirs": list(names)}
        return node_config(values, {"planning": {"adapter": "a:B", "output": "path"}}).package_dirs

    assert dirs("/opt/models", "~/packages", "") == ("/opt/models", "~/packages")
    with pytest.raises(ConfigError, match="parameter package_dirs: 'models' is not allowed; it has to begin with"):
        dirs("models")
