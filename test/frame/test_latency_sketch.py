import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.stage_figures import RELATIVE_ERROR, LatencySketch

durations_ms = st.floats(1e-3, 1e6)


@given(st.lists(st.lists(durations_ms, max_size=40), max_size=4))
def test_given_any_durations_when_asked_then_each_percentile_is_within_its_error_and_the_maximum_is_exact(batches):
    sketch, seen = LatencySketch(), [value for batch in batches for value in batch]
    for batch in batches:
        sketch.add(np.array(batch, dtype=float))
    found = sketch.quantiles()
    assert found.count == len(seen)
    if not seen:
        assert all(math.isnan(value) for _, value in found.items())
        return
    assert found.max_ms == max(seen)
    exact = np.percentile(seen, [50, 95, 99], method="lower")
    assert [found.p50_ms, found.p95_ms, found.p99_ms] == pytest.approx(exact, rel=RELATIVE_ERROR * 1.0001)


def test_given_durations_out_of_range_when_added_then_they_count_at_its_ends():
    sketch = LatencySketch()
    sketch.add(np.array([-1.0, 0.0, 1e9]))
    assert sketch.quantiles().count == 3
    assert sketch.quantiles().p50_ms == pytest.approx(1e-3, rel=0.02)
    assert sketch.quantiles().max_ms == 1e9


def test_given_a_long_run_when_added_then_the_memory_stays_the_same():
    sketch = LatencySketch()
    size = sketch._counts.nbytes
    sketch.add(np.random.default_rng(1).lognormal(2, 3, 100_000))
    assert sketch._counts.nbytes == size < 9000


def test_given_durations_when_cleared_then_nothing_is_left():
    sketch = LatencySketch()
    sketch.add(np.array([7.0]))
    sketch.clear()
    assert sketch.quantiles().count == 0
    assert math.isnan(sketch.quantiles().max_ms)
    sketch.add(np.array([3.0]))
    assert sketch.quantiles().max_ms == 3.0
