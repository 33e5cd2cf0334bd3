import json
from dataclasses import asdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torchperf_ros.api.errors import AdapterError, ConfigError
from torchperf_ros.settings.build_options import (
    Axis,
    ShapeOptions,
    axes_of,
    bucket_of,
    bucket_shapes,
    bucket_sizes,
    format_shapes,
    parse_shapes,
    round_up,
    smallest_in_bucket,
    within,
)
from torchperf_ros.settings.config import stage_config
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
    ("read", "says", "example", "text"),
    [
        *(
            (
                lambda text: shapes_of(shapes=text),
                "s.shapes: {!r} is not allowed; it has to be one of: ",
                "such as bucket 64",
                text,
            )
            for text in (
                "",
                "bucket 0",
                "bucket 65537",
                "bucket -1",
                "bucket x",
                "exact 16",
                "bucket  8",
                "Bucket",
            )
        ),
        *(
            (
                lambda text: parse_shapes(text, "perception."),
                "perception.common_shapes: {!r} is not allowed;",
                "'1x3x256x448'",
                text,
            )
            for text in ("1x3xa", "1x0x3", "-1x3", "1 x 3", "1x", "x3", "1X3", "1.5x2", "1x3,1x3", " ")
        ),
    ],
)
def test_given_text_that_is_no_policy_or_no_shape_when_read_then_it_is_named_with_an_example(
    read, says, example, text
):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value).startswith(f"parameter {says.format(text)}")
    assert example in str(caught.value)


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
    ("values", "options"),
    [
        ({}, {"dynamic": "auto"}),
        ({"shapes": "bucket"}, {"dynamic": "auto"}),
        ({"shapes": "exact"}, {"dynamic": "never"}),
        ({"shapes": "exact", "common_shapes": ["1x3"]}, {"dynamic": "auto"}),
        ({"shapes": "exact", "common_shapes": ["1x3"], "engine": "compile"}, {"dynamic": "never"}),
        *(
            (
                {"compile_mode": "reduce-overhead", "engine": engine},
                {"cuda_graphs": captured, "mode": "reduce-overhead"},
            )
            for engine, captured in (("aoti", True), ("auto", True), ("compile", False))
        ),
    ],
)
def test_given_a_policy_or_a_mode_when_a_tier_is_built_then_its_engine_varies_sizes_or_captures(
    values, options
):
    stage = stage_config("s", {"adapter": "a:B", "output": "o", **values})
    assert asdict(stage.build_options(0)).items() >= options.items()


# -- sizes that vary, and what they are rounded up to


IMAGE = ((1, 3, 128, 128),)
HEIGHT_AND_WIDTH = axes_of({0: {2: (100, 200), 3: (100, 200)}}, IMAGE)
ranges = st.tuples(st.integers(1, 500), st.integers(0, 500)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def test_given_the_range_100_to_200_when_rounded_by_32_then_the_last_bucket_is_the_range_s_end():
    assert bucket_sizes(100, 200, 32) == (128, 160, 192, 200)
    assert bucket_sizes(1, 8, 32) == (8,)
    assert bucket_sizes(32, 96, 32) == (32, 64, 96)


@given(span=ranges, width=st.integers(1, 300), data=st.data())
def test_given_any_size_in_a_range_then_it_fits_its_bucket_with_less_than_a_width_of_padding(
    span, width, data
):
    low, high = span
    size = data.draw(st.integers(low, high))
    bucket = round_up(size, width, high)
    assert size <= bucket <= high
    assert bucket - size < width
    assert bucket % width == 0 or bucket == high
    assert round_up(bucket, width, high) == bucket


@given(span=ranges, width=st.integers(1, 300), data=st.data())
def test_given_any_bucket_when_asked_for_its_smallest_then_one_less_belongs_to_another(span, width, data):
    axes = (Axis(*span, ((0, 0),)),)
    bucket = ((data.draw(st.sampled_from(bucket_sizes(*span, width))),),)
    ((smallest,),) = smallest_in_bucket(bucket, axes, width)
    assert bucket_of(((smallest,),), axes, width) == bucket
    assert smallest == span[0] or bucket_of(((smallest - 1,),), axes, width) != bucket


@given(sizes=st.tuples(st.integers(90, 210), st.integers(90, 210)))
def test_given_any_image_when_it_is_in_range_then_its_bucket_is_one_of_the_prepared(sizes):
    shapes = ((1, 3, *sizes),)
    assert within(shapes, HEIGHT_AND_WIDTH, IMAGE) == all(100 <= size <= 200 for size in sizes)
    assume(within(shapes, HEIGHT_AND_WIDTH, IMAGE))
    assert bucket_of(shapes, HEIGHT_AND_WIDTH, 32) in bucket_shapes(IMAGE, HEIGHT_AND_WIDTH, 32)


def test_given_two_axes_when_listed_then_every_combination_is_there_with_the_example_s_other_sizes():
    buckets = bucket_shapes(IMAGE, HEIGHT_AND_WIDTH, 32)
    assert len(set(buckets)) == 16
    assert {shape[:2] for (shape,) in buckets} == {(1, 3)}
    assert bucket_shapes(IMAGE, (), 32) == (IMAGE,)


def test_given_too_many_buckets_when_listed_then_a_width_that_would_do_is_named():
    with pytest.raises(ConfigError) as caught:
        bucket_shapes(IMAGE, HEIGHT_AND_WIDTH, 4)
    said = str(caught.value)
    assert said.startswith(
        "parameter shapes: bucket 4 makes 676 buckets of dimension 2 of input 0 (100 to 200); "
    )
    assert "at most 256 are prepared: 8 makes 169, or use the policy dynamic" in said
    with pytest.raises(ConfigError, match="makes 1000000000000 buckets"):  # at once
        bucket_shapes(((5,),), (Axis(1, 10**12, ((0, 0),)),), 1)


def test_given_inputs_that_share_a_size_when_declared_then_it_is_one_axis_and_must_agree():
    example = ((2, 10, 8), (2, 10))
    axes = axes_of({0: {1: (1, 20)}, 1: {-1: (1, 20)}}, example)
    assert axes == (Axis(1, 20, ((0, 1), (1, 1))),)
    assert bucket_of(((2, 5, 8), (2, 5)), axes, 16) == ((2, 16, 8), (2, 16))
    assert not within(((2, 5, 8), (2, 6)), axes, example)


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ({1: {0: (1, 2)}}, "dimension 0 of input 1 does not exist in '1x3x128x128'"),
        ({0: {4: (1, 2)}}, "dimension 4 of input 0 does not exist"),
        (
            {0: {2: (129, 200)}},
            "range 129 to 200 of dimension 2 of input 0; it has to be at least 1 and hold",
        ),
        ({0: {2: (0, 200)}}, "range 0 to 200"),
        ({0: {2: (200, 100)}}, "range 200 to 100"),
    ],
)
def test_given_dimensions_that_do_not_fit_the_example_when_read_then_they_are_named(dims, said):
    with pytest.raises(AdapterError) as caught:
        axes_of(dims, IMAGE)
    assert said in str(caught.value)
