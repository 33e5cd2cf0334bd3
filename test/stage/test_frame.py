import math
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchperf_ros.api.cdr import header_stamp_ns, restamped
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.settings.config import stage_config
from torchperf_ros.stage.frame import Frame, Mailbox, Origin, StepTimes, admit, stamp_age_ms, usable_age_ms
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.stage.turn import Output, Turn

from .conftest import MS, STORE


def header_bytes(sec, nanosec, name, little):
    types = STORE.types
    header = types["std_msgs/msg/Header"](
        stamp=types["builtin_interfaces/msg/Time"](sec, nanosec), frame_id=name
    )
    return bytes(STORE.serialize_cdr(header, "std_msgs/msg/Header", little_endian=little))


@given(
    sec=st.integers(-(2**31), 2**31 - 1),
    nanosec=st.integers(0, 999_999_999),
    little=st.booleans(),
    name=st.text(),
)
def test_given_any_stamped_message_when_its_bytes_are_read_then_the_stamp_is_as_written(
    sec, nanosec, little, name
):
    assert header_stamp_ns(header_bytes(sec, nanosec, name, little)) == sec * 1_000_000_000 + nanosec


@given(
    sec=st.integers(0, 2**31 - 1), nanosec=st.integers(0, 999_999_999), little=st.booleans(), name=st.text()
)
def test_given_any_time_when_restamped_then_only_the_stamp_changes(sec, nanosec, little, name):
    data = restamped(header_bytes(7, 8, name, little), sec * 1_000_000_000 + nanosec)
    again = STORE.deserialize_cdr(data, "std_msgs/msg/Header")
    assert (again.stamp.sec, again.stamp.nanosec, again.frame_id) == (sec, nanosec, name)


@given(st.binary(max_size=64))
def test_given_any_bytes_when_read_then_the_stamp_fits_a_signed_64_bit_word_and_is_zero_where_they_are_too_short(
    data,
):
    assert -(2**63) <= header_stamp_ns(data) < 2**63
    assert header_stamp_ns(data[:11]) == 0


def test_given_a_stamp_when_its_age_is_asked_then_future_is_negative_and_zero_is_unknown():
    assert stamp_age_ms(10 * MS, 35 * MS) == 25.0
    assert math.isnan(stamp_age_ms(10 * MS, 0))  # before the first /clock
    assert stamp_age_ms(35 * MS, 10 * MS) == -25.0
    assert math.isnan(stamp_age_ms(0, 10 * MS))


@pytest.mark.parametrize(
    ("age_ms", "usable_ms"),
    [
        (0.0, 0.0),
        (25.0, 25.0),
        (10_000.0, 10_000.0),
        (10_000.1, 0.0),
        (-0.1, 0.0),
        (math.nan, 0.0),
        (math.inf, 0.0),
    ],
)
def test_given_an_age_when_it_cannot_be_one_then_the_frame_counts_from_its_receipt(age_ms, usable_ms):
    assert usable_age_ms(age_ms) == usable_ms


@pytest.mark.parametrize(
    ("age_ms", "latency_ms"), [(20.0, 50.0), (math.nan, 30.0), (-5.0, 30.0), (60_000.0, 30.0)]
)
def test_given_an_origin_then_the_latency_counts_from_a_usable_stamp_or_else_from_receipt(
    age_ms, latency_ms
):
    assert Origin(received_ns=100 * MS, age_ms=age_ms).latency_ms(130 * MS) == latency_ms


def test_given_step_times_when_added_up_then_an_unknown_step_makes_the_total_unknown():
    assert StepTimes(1.0, 2.0, 3.0, 4.0).total_ms == 10.0
    assert math.isnan(StepTimes(1.0, 2.0).total_ms)


def test_given_a_frame_when_ros_time_is_asked_for_then_stamp_and_age_say_it_also_for_a_log_of_years_ago():
    old = Frame(0, b"", 35 * MS, 1.6e12, 100 * MS, 0, Origin(0, 1.6e12))
    assert abs(old.ros_ns(130 * MS) - (1_600_000_000_000 * MS + 65 * MS)) < 1_000  # a float of so many ms
    assert Frame(0, b"", 35 * MS, math.nan, 100 * MS, 0, Origin(0, math.nan)).ros_ns(130 * MS) is None


@given(data=st.binary(max_size=11), stamp_ns=st.integers(-(2**63), 2**63))
def test_given_bytes_too_short_for_a_stamp_when_restamped_then_they_are_the_same(data, stamp_ns):
    assert restamped(data, stamp_ns) is data


@pytest.mark.parametrize("seconds", [2**31, 2**40, -(2**31) - 1])
def test_given_a_time_that_a_stamp_cannot_hold_when_restamped_then_the_message_is_the_same(seconds):
    data = b"\x00\x01\x00\x00" + struct.pack("<iI", 3, 5)
    assert restamped(data, seconds * 1_000_000_000) is data
    assert header_stamp_ns(restamped(data, (2**31 - 1) * 1_000_000_000)) == (2**31 - 1) * 1_000_000_000


class MailboxMachine(RuleBasedStateMachine):
    """Any order of putting, taking and clearing.

    No frame is lost, doubled or handed out after a newer one.
    """

    def __init__(self):
        super().__init__()
        self.mailbox = Mailbox()
        self.put = 0
        self.taken = []
        self.now_ns = self.superseded = 0
        self.waiting = None

    @rule(left_ns=st.integers(-5, 5))
    def put_one(self, left_ns):
        self.superseded += self.waiting is not None
        self.waiting = Frame(
            self.put, b"", 0, 0.0, self.now_ns, self.now_ns + left_ns, Origin(self.now_ns, 0.0)
        )
        self.mailbox.put(self.waiting)
        self.put += 1

    @rule(step_ns=st.integers(0, 4))
    def take_one(self, step_ns):
        self.now_ns += step_ns
        frame = self.mailbox.take(self.now_ns)
        assert frame is self.waiting
        self.waiting = None
        if frame is not None:
            assert frame.stale == (frame.deadline_ns <= self.now_ns)
            self.taken.append(frame.seq)

    @rule()
    def clear(self):
        self.mailbox.put(None)
        self.superseded += self.waiting is not None
        self.waiting = None

    @invariant()
    def every_frame_is_accounted_for_once(self):
        assert self.mailbox.waiting is self.waiting
        assert self.mailbox.superseded == self.superseded
        assert self.put == len(self.taken) + self.superseded + (self.waiting is not None)
        assert self.taken == sorted(set(self.taken))


TestMailboxMachine = MailboxMachine.TestCase
TestMailboxMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


RECEIVED_NS, ROS_NS = 500 * MS, 1_700_000_000_000 * MS


def admitted(age_ms, upstream=None, **parameters):
    """A frame of a stage with a budget of 50 ms, received at 500 ms."""
    config = stage_config("perception", {"budget_ms": 50.0, **parameters})
    stamp_ns = ROS_NS - round(age_ms * MS) if math.isfinite(age_ms) else 0
    return admit(config, b"", stamp_ns, received_ns=RECEIVED_NS, ros_now_ns=ROS_NS, upstream=upstream)


@pytest.mark.parametrize(
    ("budget_from", "age_ms", "left_ms"),
    [
        ("receipt", 0.0, 50.0),
        ("receipt", 100.0, 50.0),
        ("receipt", -100.0, 50.0),
        ("receipt", math.nan, 50.0),
        ("stamp", 0.0, 50.0),
        ("stamp", 10.0, 40.0),
        ("stamp", 49.75, 0.25),
        ("stamp", 50.0, 0.0),
        ("stamp", 100.0, -50.0),
        ("stamp", 10_000.0, -9_950.0),
        ("stamp", 10_001.0, 50.0),
        ("stamp", -3.0, 50.0),
        ("stamp", math.nan, 50.0),
    ],
)
def test_given_any_age_when_admitted_then_the_budget_counts_from_a_usable_stamp_or_from_the_receipt(
    budget_from, age_ms, left_ms
):
    frame = admitted(age_ms, budget_from=budget_from)
    assert (frame.deadline_ns - frame.received_ns) / MS == left_ms
    assert frame.gone_ms == 50.0 - left_ms
    assert frame.budget_ms == 50.0


def before(due_ms, age_ms, *, stale=False):
    """A frame of the stage before, received 20 ms ago, due at this time after the receipt here."""
    received_ns = RECEIVED_NS - 20 * MS
    origin = Origin(received_ns, age_ms)
    return Frame(0, b"", 5, age_ms, received_ns, RECEIVED_NS + round(due_ms * MS), origin, stale=stale)


@pytest.mark.parametrize("budget_from", ["receipt", "stamp"])
@pytest.mark.parametrize("due_ms", [-200.0, -50.0, -0.5, 0.0])
@pytest.mark.parametrize("age_ms", [-3.0, 0.0, 100.0, math.nan, 20_000.0])
def test_given_a_frame_that_was_stale_in_the_stage_before_when_admitted_then_this_stage_has_its_whole_budget(
    budget_from, due_ms, age_ms
):
    frame = admitted(1.0, before(due_ms, age_ms, stale=True), budget_from=budget_from)
    assert frame.deadline_ns == RECEIVED_NS + 50 * MS
    assert frame.origin.age_ms is age_ms  # the end-to-end latency still counts from the camera's stamp


@pytest.mark.parametrize(
    ("budget_from", "due_ms", "age_ms", "left_ms"),
    [
        ("receipt", 10.0, 5.0, 50.0),
        ("receipt", -10.0, 5.0, 40.0),
        ("stamp", 10.0, 5.0, 25.0),
        ("stamp", -10.0, 5.0, 25.0),  # 25 ms after its stamp, however late it was there
        ("stamp", -10.0, math.nan, 40.0),
        ("stamp", -10.0, -30.0, 40.0),
        ("stamp", -10.0, 10_000.0, 40.0),
    ],
)
def test_given_a_frame_of_the_stage_before_when_admitted_then_no_more_than_both_budgets_is_taken(
    budget_from, due_ms, age_ms, left_ms
):
    frame = admitted(1.0, before(due_ms, age_ms), budget_from=budget_from)
    assert (frame.deadline_ns - RECEIVED_NS) / MS == left_ms


def test_given_what_is_gone_of_a_budget_when_put_into_words_then_they_say_where_it_went():
    assert (
        admitted(100.0, budget_from="stamp").gone_words(0.0)
        == "100.0 ms of its budget of 50 ms had passed at its turn: 100.0 ms by its stamp when it was"
        " received (the camera's latency, its host's clock is behind this one's, or its publisher kept it)"
    )
    assert (
        admitted(100.0).gone_words(60.0)
        == "60.0 ms of its budget of 50 ms had passed at its turn: 60.0 ms waiting for its turn"
    )
    assert (
        admitted(1.0, before(-70.0, 5.0)).gone_words(1.0)
        == "71.0 ms of its budget of 50 ms had passed at its turn: 70.0 ms in the stages before, 1.0 ms"
        " waiting for its turn"
    )


# -- a frame's turn


LEAVE_NS = 50 * MS


@pytest.fixture
def turn():
    return Turn(Frame(0, b"", 0, math.nan, 0, LEAVE_NS, Origin(0, math.nan)), 0.0, LEAVE_NS, TierLadder(2))


@pytest.fixture
def runner():
    return SimpleNamespace(number=0, recording="")


def test_given_a_turn_when_asked_then_it_knows_the_time_that_is_left(turn):
    assert turn.left_ms(20 * MS) == 30.0
    assert turn.left_ms(60 * MS) == -10.0


def test_given_a_turn_that_nobody_runs_when_time_passes_then_no_backup_is_wanted(turn):
    assert not turn.wants_backup(49 * MS, hedges=True)


def test_given_a_runner_when_it_is_overdue_and_the_backup_could_still_answer_then_it_is_wanted(
    turn, runner
):
    turn.started(runner, tier=0, now_ns=0, expected_ms=20.0, backup_ms=10.0)
    assert turn.hedge_ns == (50 - 10 - 1) * MS
    assert not turn.wants_backup(turn.hedge_ns - 1, hedges=True)
    assert turn.wants_backup(turn.hedge_ns, hedges=True)
    assert not turn.wants_backup(turn.hedge_ns, hedges=False)


def test_given_a_runner_that_is_not_yet_due_when_the_last_moment_comes_then_the_backup_waits_for_it(
    turn, runner
):
    turn.started(runner, tier=0, now_ns=5 * MS, expected_ms=40.0, backup_ms=30.0)
    assert turn.hedge_ns == 45 * MS


def test_given_a_runner_that_failed_when_asked_then_the_backup_is_wanted_once(turn, runner):
    turn.started(runner, 0, 0, 20.0, 10.0)
    turn.lost(runner, Outcome.ERROR, "it raised")
    assert (turn.failure, turn.reason) == (Outcome.ERROR, "it raised")
    assert turn.wants_backup(1, hedges=False)
    turn.backup = SimpleNamespace(number=1)
    assert not turn.wants_backup(1, hedges=True)


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.HUNG])
def test_given_a_frame_that_ended_its_runner_when_asked_then_nobody_else_is_to_run_it(
    turn, runner, outcome
):
    turn.started(runner, 0, 0, 20.0, 10.0)
    turn.lost(runner, outcome, "it ended")
    assert turn.suspect
    assert not turn.wants_backup(turn.hedge_ns, hedges=True)


def test_given_a_backup_that_fails_when_the_runner_still_runs_then_the_frame_has_not_failed(turn, runner):
    turn.started(runner, 0, 0, 20.0, 10.0)
    turn.backup = SimpleNamespace(number=1)
    turn.lost(turn.backup, Outcome.ERROR, "it raised")
    assert turn.failure is None
    assert turn.backup_failed


def test_given_a_worker_that_has_nothing_to_do_with_the_frame_when_it_is_lost_then_nothing_changes(
    turn, runner
):
    turn.started(runner, 0, 0, 20.0, 10.0)
    turn.lost(SimpleNamespace(number=2), Outcome.CRASHED, "it died")
    assert (turn.failure, turn.backup_failed) == (None, False)


@pytest.mark.parametrize(
    ("outcome", "fallback", "out_at_ms", "recorded", "reason"),
    [
        (Outcome.ON_TIME, None, 50, Outcome.ON_TIME, ""),
        (Outcome.ON_TIME, None, 51, Outcome.LATE, "its own result was out 1.00 ms after the deadline"),
        (Outcome.PARTIAL, None, 50, Outcome.PARTIAL, "not done"),
        (Outcome.PARTIAL, None, 51, Outcome.LATE, "its own result was out 1.00 ms after the deadline"),
        (Outcome.LATE, Fallback.HOLD_LAST, 50, Outcome.LATE, "not done"),
        (Outcome.LATE, Fallback.STOP, 51, Outcome.LATE, "not done"),
        (Outcome.LATE, Fallback.NONE, 50, Outcome.LATE, "not done"),
        (Outcome.ERROR, Fallback.STOP, 50, Outcome.ERROR, "not done"),
    ],
)
def test_given_what_was_published_and_when_when_recorded_then_the_reason_says_why_its_own_result_was_not(
    turn, runner, outcome, fallback, out_at_ms, recorded, reason
):
    turn.started(runner, 0, 0, 20.0, 10.0)
    why = "" if outcome is Outcome.ON_TIME else "not done"
    answer = turn.answer(Output(b"", None, None, fallback, outcome, why), out_at_ms * MS)
    assert (answer.outcome, answer.reason) == (recorded, reason)


def test_given_a_turn_when_asked_for_its_next_event_then_they_come_in_order_and_none_is_past(turn, runner):
    turn.started(runner, 0, 0, 20.0, 10.0)
    events, now_ns = [], 0
    while now_ns < LEAVE_NS:
        now_ns = turn.next_event_ns(now_ns)
        events.append(now_ns)
    assert events == [39 * MS, 46 * MS, LEAVE_NS]


def test_given_a_hedge_after_the_turn_when_asked_for_its_next_event_then_leaving_comes_first(turn, runner):
    turn.started(runner, 0, 0, expected_ms=80.0, backup_ms=10.0)
    assert turn.hedge_ns == 80 * MS
    assert turn.next_event_ns(47 * MS) == LEAVE_NS


def test_given_a_turn_that_begins_after_its_answer_had_to_leave_when_asked_then_it_leaves_at_once(
    turn, runner
):
    """With the timer at the hedge, a frame with 0.1 ms left would be answered when its run is overdue."""
    now_ns = LEAVE_NS + MS
    turn.started(runner, 0, now_ns, expected_ms=20.0, backup_ms=10.0)
    turn.held_ns = now_ns + 5 * MS
    assert turn.next_event_ns(now_ns) == LEAVE_NS
