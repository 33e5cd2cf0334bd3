"""When messages are due, on a clock that is set by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.core.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.replay.pace import Pace

LOG_NS = 1_600_000_000 * NS_PER_S
START_NS = 5_000 * NS_PER_S


def due_ms(pace, *at_ms):
    """When messages of these times of the log are due, in ms after the start."""
    return [(pace.due_ns(LOG_NS + round(ms * NS_PER_MS)) - START_NS) / NS_PER_MS for ms in at_ms]


@pytest.mark.parametrize(("rate", "due"), [(1.0, [0, 33, 5033]), (2.0, [0, 16.5, 2516.5]), (0.5, [0, 66, 10066])])
def test_given_a_rate_when_asked_then_the_log_s_gaps_are_kept_at_that_rate(rate, due):
    assert due_ms(Pace(LOG_NS, START_NS, rate), 0, 33, 5033) == due


def test_given_a_message_that_goes_back_when_asked_then_it_is_due_with_its_predecessor_and_delays_nothing():
    assert due_ms(Pace(LOG_NS, START_NS), 100, 40, 90, 110) == [100, 100, 100, 110]


def test_given_a_clock_that_was_set_back_when_asked_then_the_log_goes_on_from_there_at_its_pace():
    pace = Pace(LOG_NS, START_NS)
    assert due_ms(pace, 5000, -3_600_000, -3_599_967) == [5000, 5000, 5033]
    assert pace.log_ns(START_NS + 5033 * NS_PER_MS) == LOG_NS - 3_599_967 * NS_PER_MS


def test_given_a_pause_when_resumed_then_time_stood_still_and_all_that_follows_moves_by_it():
    pace = Pace(LOG_NS, START_NS, 2.0)
    pace.pause(START_NS + 10 * NS_PER_MS)
    pace.pause(START_NS + 400 * NS_PER_MS)  # it is paused already
    assert pace.paused
    assert pace.log_ns(START_NS + 500 * NS_PER_MS) == LOG_NS + 20 * NS_PER_MS
    pace.resume(START_NS + 1010 * NS_PER_MS)
    assert not pace.paused
    assert due_ms(pace, 20, 40) == [1010, 1020]
    assert pace.log_ns(START_NS + 1010 * NS_PER_MS) == LOG_NS + 20 * NS_PER_MS


def test_given_a_paused_pace_when_it_jumps_then_it_stands_still_there_and_goes_on_from_there():
    pace = Pace(LOG_NS, START_NS)
    pace.pause(START_NS)
    pace.jump(LOG_NS + 70 * NS_PER_MS, START_NS + 200 * NS_PER_MS)
    assert pace.log_ns(START_NS + 900 * NS_PER_MS) == LOG_NS + 70 * NS_PER_MS
    pace.resume(START_NS + 1200 * NS_PER_MS)
    assert due_ms(pace, 70, 100) == [1200, 1230]


@given(
    st.lists(st.integers(-10 * NS_PER_S, 100 * NS_PER_S), min_size=1, max_size=20),
    st.floats(0.01, 100.0),
)
def test_given_any_log_when_asked_in_its_order_then_nothing_is_due_before_what_came_earlier(times_ns, rate):
    pace = Pace(times_ns[0], START_NS, rate)
    due_ns = [pace.due_ns(t_ns) for t_ns in times_ns]
    assert due_ns[0] == START_NS
    assert due_ns == sorted(due_ns)


@given(st.integers(0, 100 * NS_PER_S), st.floats(0.01, 100.0))
def test_given_a_message_when_it_is_due_then_that_is_the_log_s_time(t_ns, rate):
    pace = Pace(0, START_NS, rate)
    assert pace.log_ns(pace.due_ns(t_ns)) == pytest.approx(t_ns, abs=1 + rate)
