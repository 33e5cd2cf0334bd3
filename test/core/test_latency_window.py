import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.core.latency_window import LatencyWindow

durations_ms = st.floats(0, 1e6)


@given(size=st.integers(1, 20), samples=st.lists(durations_ms, max_size=60), percent=st.floats(0, 100))
def test_given_any_samples_when_asked_then_numpy_says_the_same_of_the_last_ones(size, samples, percent):
    window = LatencyWindow(size)
    for sample in samples:
        window.add(sample)
    last = samples[-size:]
    assert len(window) == len(last)
    assert sorted(window.values) == sorted(last)
    if last:
        assert window.percentiles(percent, 50)[0] == pytest.approx(np.percentile(last, percent))
        assert window.percentiles(50) == (pytest.approx(np.median(last)),)
        assert window.maximum() == max(last)


def test_given_no_samples_when_asked_then_everything_is_nan():
    window = LatencyWindow(4)
    assert all(math.isnan(value) for value in window.percentiles(50, 95, 99))
    assert len(window.percentiles(50, 95, 99)) == 3
    assert math.isnan(window.maximum())


def test_given_a_full_window_when_cleared_then_old_samples_do_not_come_back():
    window = LatencyWindow(3)
    for sample in (100.0, 200.0, 300.0):
        window.add(sample)
    window.clear()
    assert len(window) == 0
    assert math.isnan(window.maximum())
    window.add(1.0)
    assert window.maximum() == 1.0
    assert window.percentiles(50) == (1.0,)
