import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import stage_config
from torchperf_ros.settings.shape_options import ShapeOptions, format_shapes, parse_shapes
from torchperf_ros.workers.control import from_json

shapes = st.lists(
    st.lists(st.integers(1, 5000), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4
).map(tuple)


@given(shapes=shapes)
def test_given_any_shapes_when_written_and_read_then_they_are_the_same(shapes):
    assert parse_shapes(format_shapes(shapes)) == shapes


@given(
    st.sampled_from(["exact", "bucket", "dynamic"]),
    st.integers(1, 512),
    st.lists(shapes, max_size=3).map(tuple),
)
def test_given_any_options_when_sent_as_json_then_they_arrive_the_same(policy, width, common):
    options = ShapeOptions(policy, width, common)
    assert from_json(ShapeOptions, json.loads(json.dumps(asdict(options)))) == options


def shapes_of(**values):
    return stage_config("s", {"adapter": "a:B", "output": "o", **values}).shapes


def test_given_the_parameters_when_checked_then_empty_strings_are_no_shape():
    options = shapes_of(shapes="bucket 16", common_shapes=["", "1x3x256x448", "1x10x50 1x10 "])
    assert options == ShapeOptions("bucket", 16, (((1, 3, 256, 448),), ((1, 10, 50), (1, 10))))
    assert shapes_of(shapes="exact", common_shapes=[""]) == ShapeOptions()
    assert shapes_of(shapes="bucket") == ShapeOptions("bucket", 32)


@pytest.mark.parametrize(
    "text", ["", "bucket 0", "bucket 65537", "bucket -1", "bucket x", "exact 16", "bucket  8", "Bucket"]
)
def test_given_text_that_is_no_policy_when_checked_then_it_is_named_with_an_example(text):
    with pytest.raises(ConfigError) as caught:
        shapes_of(shapes=text)
    assert str(caught.value).startswith(
        f"parameter s.shapes: {text!r} is not allowed; it has to be one of: "
    )
    assert "such as bucket 64" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["1x3xa", "1x0x3", "-1x3", "1 x 3", "1x", "x3", "1X3", "1.5x2", "1x3,1x3", " "]
)
def test_given_text_that_is_no_shape_when_parsed_then_it_is_named_with_an_example(text):
    with pytest.raises(ConfigError) as caught:
        parse_shapes(text, "perception.")
    assert str(caught.value).startswith(f"parameter perception.common_shapes: {text!r} is not allowed;")
    assert "'1x3x256x448'" in str(caught.value)


@pytest.mark.parametrize(
    ("common", "said"),
    [
        (["1x0"], "s.common_shapes: '1x0' is not allowed"),
        (["1"] * 257, "s.common_shapes: 257 shapes; at most 256"),
    ],
)
def test_given_common_shapes_that_are_not_allowed_when_checked_then_parameter_and_value_are_named(
    common, said
):
    with pytest.raises(ConfigError, match=f"parameter {said}"):
        shapes_of(common_shapes=common)


def test_given_common_shapes_when_the_model_has_other_inputs_then_an_example_is_named():
    options = ShapeOptions(common=(((1, 10, 50), (1, 10)),))
    options.check_inputs(((2, 3, 4), (5, 6)))
    for example in (((1, 10, 50),), ((1, 10, 50), (1, 10, 1))):
        with pytest.raises(
            ConfigError, match="'1x10x50 1x10' does not fit the model's inputs; it has to be like '1x"
        ):
            options.check_inputs(example)


@pytest.mark.parametrize(
    ("values", "dynamic"),
    [
        ({}, "auto"),
        ({"shapes": "bucket"}, "auto"),
        ({"shapes": "exact"}, "never"),
        ({"shapes": "exact", "common_shapes": ["1x3"]}, "auto"),
        ({"shapes": "exact", "common_shapes": ["1x3"], "engine": "compile"}, "never"),
    ],
)
def test_given_a_policy_when_a_tier_is_built_then_an_engine_lets_sizes_vary_where_frames_may(
    values, dynamic
):
    stage = stage_config("s", {"adapter": "a:B", "output": "o", **values})
    assert stage.build_options(0).dynamic == dynamic


@pytest.mark.parametrize(("engine", "captured"), [("aoti", True), ("auto", True), ("compile", False)])
def test_given_a_mode_with_graphs_when_a_tier_is_built_then_every_engine_but_the_compiler_captures_its_own(
    engine, captured
):
    values = {"adapter": "a:B", "output": "o", "engine": engine, "compile_mode": "reduce-overhead"}
    options = stage_config("s", values).build_options(0)
    assert (options.cuda_graphs, options.mode) == (captured, "reduce-overhead")
