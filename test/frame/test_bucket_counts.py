import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.stage_figures import LATENESS_BOUNDS_S, BucketCounts, budget_bounds_s


@given(st.lists(st.floats(0, 3) | st.sampled_from([*LATENESS_BOUNDS_S, math.nan]), max_size=60))
def test_given_any_samples_when_counted_then_each_bucket_holds_those_up_to_its_bound(samples):
    counts = BucketCounts(LATENESS_BOUNDS_S)
    counts.add(np.array(samples[:20], dtype=float))
    counts.add(np.array(samples[20:], dtype=float))
    buckets, total_s = counts.snapshot()
    known = [sample for sample in samples if not math.isnan(sample)]
    assert [count for _, count in buckets] == [
        sum(sample <= float(bound) for sample in known) for bound, _ in buckets
    ]  # fmt: skip
    assert [bound for bound, _ in buckets][-1] == "+Inf"
    assert total_s == pytest.approx(sum(known))


@given(st.floats(1.0, 60_000.0))
def test_given_any_budget_when_bounds_are_placed_then_they_rise_and_the_budget_is_one_of_them(budget_ms):
    bounds_s = budget_bounds_s(budget_ms)
    assert list(bounds_s) == sorted(set(bounds_s))
    assert any(bound == pytest.approx(budget_ms / 1000, rel=1e-5) for bound in bounds_s)


def test_given_the_default_budget_when_bounds_are_placed_then_they_read_well():
    assert budget_bounds_s(50.0)[:3] == (0.005, 0.01, 0.015)
    assert 0.05 in budget_bounds_s(50.0)
