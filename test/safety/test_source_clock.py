import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import START_NS, S
from torchperf_ros.safety.source_clock import SourceClock

MS = S // 1000


class Source:
    """A source whose messages take so long to come, on a clock that is ahead of ROS time by so much."""

    def __init__(self, ahead_s=0.0):
        self.clock, self.ahead_ns = SourceClock(), round(ahead_s * S)
        self.now_ns, self.ros_ns = 100 * S, START_NS

    def hear(self, delay_s=0.02, since_s=0.03, period_s=0.1):
        """The age of a message that is looked at some time after its receipt."""
        self.pass_by(period_s)
        stamp_ns = self.ros_ns + self.ahead_ns - round((delay_s + since_s) * S)
        return self.clock.age_s(stamp_ns, self.now_ns - round(since_s * S), self.now_ns, self.ros_ns)

    def pass_by(self, seconds):
        self.now_ns += round(seconds * S)
        self.ros_ns += round(seconds * S)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.25, 9.9, 10.1, 60.0, 3599.0])
def test_given_a_source_in_ros_time_when_its_first_message_is_old_already_then_it_is_old(delay_s):
    source = Source()
    assert source.hear(delay_s, 0.0) == (pytest.approx(delay_s), "")
    assert source.hear(delay_s) == (pytest.approx(delay_s + 0.03), "")
    assert source.hear(0.02) == (pytest.approx(0.05), "")
    assert source.clock.is_ros


@pytest.mark.parametrize("ahead_s", [0.5, 1.1, 18.0, 1e6, -3601.0, 5.0 - START_NS / S])
def test_given_a_source_ahead_or_in_another_clock_when_it_falls_behind_then_its_messages_are_as_old_as_it_has(
    ahead_s,
):
    source = Source(ahead_s)
    assert source.hear(0.0) == (pytest.approx(0.03), "")  # what it had no time for cannot be known
    assert source.clock.is_ros is (ahead_s == 0.5)
    assert source.clock.off_s == pytest.approx(ahead_s)
    for delay_s in (0.25, 0.45, 5.0, 12.0, 0.0):
        assert source.hear(delay_s) == (pytest.approx(delay_s + 0.03, abs=1e-3), "")
    assert source.clock.is_ros is (ahead_s == 0.5)


@pytest.mark.parametrize("ahead_s", [0.0, 1e6])
def test_given_a_backlog_that_comes_later_when_it_lasts_then_it_stays_old_for_minutes(ahead_s):
    source = Source(ahead_s)
    source.hear()
    for _ in range(1800):
        age_s, unknown = source.hear(12.0)
        assert not unknown
        assert age_s > 11.8


def test_given_a_clock_that_drifts_when_hours_pass_then_its_messages_do_not_become_old():
    for drift in (-1e-4, 1e-4):
        source = Source(1e6)
        for _ in range(36_000):
            source.ahead_ns += round(drift * 0.1 * S)
            age_s, unknown = source.hear()
        assert (age_s, unknown) == (pytest.approx(0.03, abs=0.001), "")


@pytest.mark.parametrize("ahead_s", [0.0, 1e6])
def test_given_stamps_that_leap_ahead_when_asked_then_they_are_not_believed_and_teach_nothing(ahead_s):
    source = Source(ahead_s)
    source.hear(0.0)
    for _ in range(5):
        assert source.hear(-0.9)[1] == ""
    age_s, unknown = source.hear(-2.0)
    assert age_s == math.inf
    assert unknown == (
        f"stamped {1.1 if ahead_s else 2:g} s "
        + ("by a clock that leapt ahead by so much" if ahead_s else "ahead of ROS time")
    )
    source.hear(-1e6)
    assert source.hear(0.0) == (pytest.approx(0.93, abs=2e-3), "")  # by the one that was 0.9 s ahead


def test_given_no_stamp_when_the_source_never_had_one_then_its_receipt_counts_and_else_it_cannot_be_used():
    clock = SourceClock()
    assert clock.age_s(0, 5 * S, 5 * S + 200 * MS, START_NS) == (0.2, "")
    assert clock.age_s(0, 5 * S, 4 * S, START_NS) == (0.0, "")  # received in between
    assert clock.is_ros is None
    clock.age_s(START_NS, 5 * S, 5 * S, START_NS)
    assert clock.age_s(0, 6 * S, 6 * S, START_NS) == (math.inf, "without a stamp, unlike before")


def test_given_no_ros_time_yet_when_asked_then_nothing_is_learned():
    clock = SourceClock()
    assert clock.age_s(7 * S, 5 * S, 5 * S + 100 * MS, 0) == (0.1, "")
    assert clock.is_ros is None
    assert clock.age_s(7 * S, 5 * S, 5 * S + 100 * MS, 7 * S + 150 * MS) == (pytest.approx(0.15), "")
    assert clock.is_ros


@pytest.mark.parametrize("step_s", [-30.0, -0.5])
def test_given_ros_time_that_steps_back_when_a_log_begins_anew_then_old_and_new_messages_are_fresh(step_s):
    source = Source()
    before = SimpleNamespace(stamp_ns=source.ros_ns - 20 * MS, received_ns=source.now_ns)
    assert source.clock.age_s(before.stamp_ns, before.received_ns, source.now_ns, source.ros_ns) == (
        0.02,
        "",
    )
    source.pass_by(0.05)
    source.ros_ns += round(step_s * S)
    age_s, unknown = source.clock.age_s(before.stamp_ns, before.received_ns, source.now_ns, source.ros_ns)
    assert (age_s, unknown) == (pytest.approx(0.05), "")
    for _ in range(3):
        assert source.hear() == (pytest.approx(0.05), "")


def test_given_ros_time_that_steps_ahead_when_the_source_does_so_too_then_only_older_messages_are_old():
    source = Source()
    source.hear()
    source.ros_ns += 5 * S
    assert source.hear() == (pytest.approx(0.05), "")
    source.ros_ns += 5 * S
    source.ahead_ns -= 5 * S  # on a host whose clock has not stepped
    assert source.hear() == (pytest.approx(5.05), "")


@settings(max_examples=200)
@given(
    ahead_s=st.sampled_from([0.0, 0.4, 1e6, -1e9]),
    delays_s=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=30),
)
def test_given_any_delays_when_asked_then_no_message_seems_newer_than_the_least_confirmed_delay_allows(
    ahead_s, delays_s
):
    source = Source(ahead_s)
    least_s, leads_s = None, []
    for delay_s in delays_s:
        age_s, unknown = source.hear(delay_s)
        assert age_s >= 0.03 - 1e-6
        if unknown:
            continue
        behind_s = delay_s - (ahead_s if source.clock.is_ros else 0.0)
        if least_s is None:
            least_s = min(behind_s, 0.0) if source.clock.is_ros else behind_s
        assert age_s >= behind_s - least_s + 0.03 - 0.01 - 0.001 * len(delays_s)
        if behind_s >= least_s - 0.011:  # drift is believed at once
            least_s, leads_s = min(least_s, behind_s), []
        else:
            leads_s.append(behind_s)
        if len(leads_s) >= 5:
            least_s, leads_s = min(least_s, *leads_s), []


@pytest.mark.parametrize("ahead_s", [0.0, 1e6])
@pytest.mark.parametrize("wrong", [1, 4])
def test_given_a_few_stamps_that_are_ahead_when_others_follow_then_those_are_as_fresh_as_before(
    ahead_s, wrong
):
    source = Source(ahead_s)
    for _ in range(3):
        assert source.hear(0.0) == (pytest.approx(0.03, abs=1e-3), "")
    for _ in range(wrong):
        assert source.hear(-0.9)[1] == ""
    for _ in range(3):
        assert source.hear(0.0) == (pytest.approx(0.03, abs=1e-3), "")
    for _ in range(5):
        source.hear(-0.9)
    assert source.hear(0.0) == (pytest.approx(0.93, abs=5e-3), "")
