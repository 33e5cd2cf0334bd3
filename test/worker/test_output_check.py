import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.worker.output_check import InvalidOutput, OutputCheck, tensors_in


def test_given_a_nest_when_searched_then_every_tensor_comes_in_order():
    a, b, c, d = (torch.tensor(float(n)) for n in range(4))
    nest = {"x": (a, [b, None, "text", 3]), "y": {"z": c}, "w": d}
    assert [float(tensor) for tensor in tensors_in(nest)] == [0.0, 1.0, 2.0, 3.0]
    assert list(tensors_in(None)) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_given_one_value_that_is_no_number_when_checked_then_the_error_counts_it_and_names_the_output(bad, dtype):
    check = OutputCheck((torch.zeros(2), torch.zeros(3, dtype=dtype)), fixed_sizes=True)
    with pytest.raises(InvalidOutput, match="output 1 has 1 of 3 values that are NaN or Inf"):
        check.check((torch.ones(2), torch.tensor([1.0, bad, 2.0], dtype=dtype)))


def test_given_infinities_that_cancel_when_checked_then_they_are_found():
    with pytest.raises(InvalidOutput, match="2 of 2"):
        OutputCheck(torch.zeros(2), fixed_sizes=True).check(torch.tensor([math.inf, -math.inf]))


def test_given_large_finite_values_when_their_sum_overflows_then_they_pass():
    OutputCheck(torch.zeros(4), fixed_sizes=True).check(torch.full((4,), 3e38))
    OutputCheck(torch.zeros(4, dtype=torch.float16), fixed_sizes=True).check(torch.full((4,), 6e4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_given_outputs_that_cannot_be_nan_when_checked_then_they_pass(dtype):
    OutputCheck(torch.zeros(2, dtype=dtype), fixed_sizes=True).check(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize(
    "outputs",
    [
        torch.zeros(3),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.float64),
        (torch.zeros(2), torch.zeros(2)),
        (),
        None,
    ],
    ids=["size", "rank", "type", "more", "fewer", "nothing"],
)
def test_given_another_signature_than_calibrated_when_checked_then_the_error_shows_both(outputs):
    with pytest.raises(InvalidOutput, match=r"they had \[\(torch.float32, \(2,\)\)\]"):
        OutputCheck(torch.zeros(2), fixed_sizes=True).check(outputs)


def test_given_dynamic_dimensions_when_sizes_differ_then_only_rank_and_type_count():
    check = OutputCheck(torch.zeros(2, 5), fixed_sizes=False)
    check.check(torch.zeros(7, 5))
    check.check(torch.zeros(0, 5))
    for wrong in (torch.zeros(7), torch.zeros(7, 5, dtype=torch.int32)):
        with pytest.raises(InvalidOutput):
            check.check(wrong)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), max_size=20))
def test_given_any_values_when_checked_then_just_the_finite_ones_pass(values):
    check = OutputCheck(torch.zeros(len(values)), fixed_sizes=True)
    if all(math.isfinite(value) for value in values):
        check.check(torch.tensor(values))
    else:
        with pytest.raises(InvalidOutput, match="NaN or Inf"):
            check.check(torch.tensor(values))
