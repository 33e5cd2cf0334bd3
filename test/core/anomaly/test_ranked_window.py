import statistics

from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.core.anomaly.ranked_window import RankedWindow


@given(st.integers(1, 8), st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
       st.floats(allow_nan=False, allow_infinity=False))  # fmt: skip
def test_given_any_samples_when_added_then_the_window_knows_the_last_ones_in_order(size, values, other):
    window = RankedWindow(size)
    for value in values:
        window.add(value)
    kept = sorted(values[-size:])

    assert len(window) == len(kept)
    assert list(window.largest(3)) == kept[-3:]
    assert window.count_from(other) == sum(value >= other for value in kept)
    below, above = sum(value < other for value in kept), sum(value > other for value in kept)
    assert window.position(other) == (below + len(kept) - above) / len(kept) - 1
    half = statistics.median(kept)
    assert window.median() == half or abs(window.median() - half) <= 1e-9 * abs(half)


def test_given_huge_samples_when_the_median_lies_between_then_it_does_not_overflow():
    window = RankedWindow(2)
    for value in (1.7e308, 1.7e308):
        window.add(value)
    assert window.median() == 1.7e308
