import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.core.anomaly.rate_rule import RateRule


def test_given_a_rising_rate_when_it_crosses_high_then_it_is_on_until_it_falls_to_low():
    rule = RateRule(high=0.2, low=0.05, window_s=16.0)
    for second in range(20):
        assert not rule.update(float(second), 1, 10)
    for second in range(20, 40):
        rule.update(float(second), 5, 10)
    assert rule.active
    since = rule.since_s
    assert 20 < since < 30
    for second in range(40, 52):
        assert rule.update(float(second), 0, 10)  # between the limits it stays on
    assert rule.since_s == since
    for second in range(52, 58):
        rule.update(float(second), 0, 10)
    assert not rule.active
    assert rule.since_s is None


def test_given_a_single_event_when_it_is_all_there_is_then_it_is_not_a_rate():
    rule = RateRule(0.5, 0.1, 10.0)
    assert not rule.update(0.0, 1, 1)
    assert rule.update(0.1, 1, 1)


def test_given_a_long_pause_when_the_next_sample_comes_then_the_past_is_forgotten():
    rule = RateRule(0.5, 0.1, 10.0)
    rule.update(0.0, 10, 10)
    assert rule.active
    assert not rule.update(1000.0, 0, 1)
    assert rule.share == 0.0


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.integers(0, 5), st.integers(0, 5)), max_size=100))
def test_given_any_times_when_updated_then_the_share_is_one_and_memory_is_bounded(samples):
    rule = RateRule(0.3, 0.1, 7.0)
    for time_s, events, others in samples:
        rule.update(time_s, events, events + others)
        assert 0.0 <= rule.share <= 1.0
        assert len(rule._parts) <= 17


@pytest.mark.parametrize("limits", [(0.1, 0.2, 1.0), (1.5, 0.2, 1.0), (0.5, -0.1, 1.0), (0.5, 0.1, 0.0),
                                    (math.nan, 0.1, 1.0), (0.5, 0.1, math.inf)])  # fmt: skip
def test_given_limits_out_of_order_when_made_then_the_error_says_which(limits):
    with pytest.raises(ValueError, match=r"high|window_s"):
        RateRule(*limits)


@pytest.mark.parametrize("sample", [(0.0, 2, 1), (0.0, -1, 1), (math.nan, 0, 1), (0.0, 0, math.inf)])
def test_given_counts_that_cannot_be_when_updated_then_they_are_refused(sample):
    with pytest.raises(ValueError, match="events"):
        RateRule(0.5, 0.1, 1.0).update(*sample)
