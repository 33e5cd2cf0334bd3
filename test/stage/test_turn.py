import math
from types import SimpleNamespace

import pytest

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.stage.frame import Frame, Origin
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.stage.turn import Output, Turn

MS = 1_000_000
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
