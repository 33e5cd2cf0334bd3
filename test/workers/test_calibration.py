import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.workers.calibration import SortedWindow

samples_ms = st.lists(st.floats(0, 1e6) | st.sampled_from([1.0, 2.0]), min_size=1, max_size=60)  # ties too


def filled(size, samples):
    window = SortedWindow(size)
    for sample in samples:
        window.add(sample)
    return window


@given(size=st.integers(1, 20), samples=samples_ms, share=st.floats(0, 1))
def test_given_any_samples_when_asked_then_numpy_says_the_same_of_the_last_ones(size, samples, share):
    window, last = filled(size, samples), samples[-size:]
    assert len(window) == len(last)
    assert window.quantile(share) == pytest.approx(np.percentile(last, 100 * share))


@given(samples=samples_ms, share=st.floats(0, 1), data=st.data())
def test_given_any_samples_when_asked_of_the_smallest_then_the_largest_do_not_count(samples, share, data):
    of = data.draw(st.integers(1, len(samples)))
    window = filled(len(samples), samples)
    assert window.quantile(share, of) == pytest.approx(np.percentile(sorted(samples)[:of], 100 * share))


@given(size=st.integers(1, 20), samples=samples_ms, value=st.floats(0, 1e6) | st.sampled_from([1.0, 2.0]))
def test_given_any_samples_when_counted_then_equal_ones_are_in(size, samples, value):
    assert filled(size, samples).count_up_to(value) == sum(sample <= value for sample in samples[-size:])


def test_given_a_full_window_when_cleared_then_old_samples_do_not_come_back():
    window = filled(3, [100.0, 200.0, 300.0])
    window.clear()
    assert len(window) == 0
    with pytest.raises(IndexError):
        window.quantile(0.5)
    for sample in (1.0, 2.0, 3.0, 4.0):
        window.add(sample)
    assert (window.quantile(0.0), window.quantile(1.0)) == (2.0, 4.0)
