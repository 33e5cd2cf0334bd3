import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.config.shape_options import MOST_SHAPES, ShapeOptions, format_shapes, parse_shapes
from torchperf_ros.frame.errors import ConfigError

shapes = st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple)


@given(shapes=shapes)
def test_given_any_shapes_when_written_and_read_then_they_are_the_same(shapes):
    assert parse_shapes(format_shapes(shapes)) == shapes


@given(
    policy=st.sampled_from(["exact", "bucket", "dynamic"]),
    width=st.integers(1, 512),
    common=st.lists(shapes, max_size=3).map(tuple),
    max_batch=st.integers(0, 64),
)
def test_given_any_options_when_sent_as_json_then_they_arrive_the_same(policy, width, common, max_batch):
    options = ShapeOptions(policy, width, common, max_batch)
    assert ShapeOptions.from_dict(json.loads(json.dumps(options.as_dict()))) == options


def test_given_the_parameters_when_parsed_then_empty_strings_are_no_shape():
    options = ShapeOptions.parse("bucket", 16, ["", "1x3x256x448", "1x10x50 1x10 "], 8)
    assert options == ShapeOptions("bucket", 16, (((1, 3, 256, 448),), ((1, 10, 50), (1, 10))), 8)
    assert ShapeOptions.parse("exact", 32, [""], 0) == ShapeOptions()


@pytest.mark.parametrize("text", ["1x3xa", "1x0x3", "-1x3", "1 x 3", "1x", "x3", "1X3", "1.5x2", "1x3,1x3", " "])
def test_given_text_that_is_no_shape_when_parsed_then_it_is_named_with_an_example(text):
    with pytest.raises(ConfigError) as caught:
        parse_shapes(text, "perception.")
    assert str(caught.value).startswith(f"parameter perception.common_shapes: {text!r} is not allowed;")
    assert "'1x3x256x448'" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("padded", 32, [""], 0), "s.shapes: 'padded' is not allowed; it has to be one of: exact, bucket, dynamic"),
        (("bucket", 0, [""], 0), "s.bucket_width: 0 is not allowed; it has to be an int of at least 1"),
        (("bucket", 2.5, [""], 0), "s.bucket_width: 2.5 is not allowed"),
        (("bucket", 32, [""], -1), "s.max_batch: -1 is not allowed; it has to be an int of at least 0"),
        (("bucket", 32, ["1x0"], 0), "s.common_shapes: '1x0' is not allowed"),
        (("bucket", 32, ["1"] * (MOST_SHAPES + 1), 0), "s.common_shapes: 257 shapes; at most 256"),
    ],
)
def test_given_a_value_that_is_not_allowed_when_parsed_then_parameter_and_value_are_named(values, said):
    with pytest.raises(ConfigError) as caught:
        ShapeOptions.parse(*values, prefix="s.")
    assert f"parameter {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"width": 3}, "width: unknown; allowed: policy, bucket_width, common, max_batch"),
        ({"common": [[[1, -3]]]}, "common_shapes: '1x-3' is not allowed"),
        ({"bucket_width": True}, "bucket_width: True is not allowed"),
    ],
)
def test_given_json_that_is_not_of_options_when_read_then_it_is_refused(values, said):
    with pytest.raises(ConfigError) as caught:
        ShapeOptions.from_dict(values)
    assert said in str(caught.value)


def test_given_common_shapes_when_the_model_has_other_inputs_then_an_example_is_named():
    options = ShapeOptions(common=(((1, 10, 50), (1, 10)),))
    options.check_inputs(((2, 3, 4), (5, 6)))
    for example in (((1, 10, 50),), ((1, 10, 50), (1, 10, 1))):
        with pytest.raises(ConfigError, match="'1x10x50 1x10' does not fit the model's inputs; it has to be like '1x"):
            options.check_inputs(example)
