import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Fallback
from torchperf_ros.settings.config import (
    NODE_PARAMETERS,
    STAGE_DEFAULTS,
    STAGE_PARAMETERS,
    NodeConfig,
    StageConfig,
    node_config,
    stage_config,
    stage_parameters,
)
from torchperf_ros.settings.params_file import config_of

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


def test_given_nothing_when_configured_then_the_defaults_are_those_of_the_design():
    config = node_config({}, {})
    perception, planning = config.stages
    assert (config.device, config.autostart, config.metrics_port, config.cpu_affinity) == (
        "auto",
        True,
        9464,
        (),
    )
    assert (perception.name, planning.name) == ("perception", "planning")
    assert (perception.budget_ms, perception.hang_ms, perception.max_frame_bytes) == (
        50.0,
        1000.0,
        8_388_608,
    )
    assert perception.tiers == ("full", "medium", "fast")
    assert perception.fallback == (Fallback.BACKUP, Fallback.HOLD_LAST, Fallback.STOP)
    assert (perception.backup, perception.hold_last_ms, perception.budget_from) == (
        "standby",
        300.0,
        "receipt",
    )
    assert (perception.output, planning.output) == ("detections", "trajectory")
    assert perception.options == {}


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


def test_given_two_stages_when_they_share_an_output_then_the_error_names_both():
    with pytest.raises(ConfigError, match="perception, planning share an output"):
        node_config({}, {"planning": {"output": "detections"}})


@pytest.mark.parametrize("topic", ["detections", "/a/b", "~/c_1", "{node}/d"])
def test_given_a_topic_as_ros_takes_it_when_checked_then_it_is_the_output(topic):
    assert stage_config("perception", {**MINE, "output": topic}).output == topic


@pytest.mark.parametrize("topic", ["la bels", "1st", "a//b", "a/", "bücher", "a-b", "~a"])
def test_given_an_output_that_ros_takes_as_no_topic_when_checked_then_it_is_refused(topic):
    with pytest.raises(ConfigError, match=r"parameter perception\.output: .* is no topic: letters, digits"):
        stage_config("perception", {**MINE, "output": topic})


def test_given_a_stage_whose_name_cannot_be_then_the_rule_is_named_and_not_the_name_recommended():
    with pytest.raises(ConfigError, match=r"stages: 'seg mentation' is not a stage name: lower-case"):
        config_of({"stages": ["seg mentation"], "segmentation.adapter": "mine:Mine"})
