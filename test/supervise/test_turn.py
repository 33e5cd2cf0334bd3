import math
from types import SimpleNamespace

import pytest

from torchperf_ros.core.frame import Frame, Origin
from torchperf_ros.core.outcome import Outcome
from torchperf_ros.supervise.turn import Turn

MS = 1_000_000
LEAVE_NS = 50 * MS


@pytest.fixture
def turn():
    return Turn(Frame(0, b"", 0, math.nan, 0, LEAVE_NS, Origin(0, math.nan)), 0.0, LEAVE_NS)


@pytest.fixture
def runner():
    return SimpleNamespace(number=0)


def test_given_a_turn_when_asked_then_it_knows_the_time_that_is_left(turn):
    assert turn.left_ms(20 * MS) == 30.0
    assert turn.left_ms(60 * MS) == -10.0


def test_given_a_turn_that_nobody_runs_when_time_passes_then_no_backup_is_wanted(turn):
    assert not turn.wants_backup(49 * MS)


def test_given_a_runner_when_it_is_overdue_and_the_backup_could_still_answer_then_it_is_wanted(turn, runner):
    turn.started(runner, tier=0, now_ns=0, expected_ms=20.0, backup_ms=10.0)
    assert turn.hedge_ns == (50 - 10 - 1) * MS
    assert not turn.wants_backup(turn.hedge_ns - 1)
    assert turn.wants_backup(turn.hedge_ns)


def test_given_a_runner_that_is_not_yet_due_when_the_last_moment_comes_then_the_backup_waits_for_it(turn, runner):
    turn.started(runner, tier=0, now_ns=5 * MS, expected_ms=40.0, backup_ms=30.0)
    assert turn.hedge_ns == 45 * MS


def test_given_a_runner_that_failed_when_asked_then_the_backup_is_wanted_once(turn, runner):
    turn.started(runner, 0, 0, 20.0, 10.0)
    turn.lost(runner, Outcome.CRASHED, "it died")
    assert (turn.failure, turn.reason) == (Outcome.CRASHED, "it died")
    assert turn.wants_backup(1)
    turn.backup = SimpleNamespace(number=1)
    assert not turn.wants_backup(1)


def test_given_a_backup_that_fails_when_the_runner_still_runs_then_the_frame_has_not_failed(turn, runner):
    turn.started(runner, 0, 0, 20.0, 10.0)
    turn.backup = SimpleNamespace(number=1)
    turn.lost(turn.backup, Outcome.ERROR, "it raised")
    assert turn.failure is None
    assert turn.backup_failed


def test_given_a_worker_that_has_nothing_to_do_with_the_frame_when_it_is_lost_then_nothing_changes(turn, runner):
    turn.started(runner, 0, 0, 20.0, 10.0)
    turn.lost(SimpleNamespace(number=2), Outcome.CRASHED, "it died")
    assert (turn.failure, turn.backup_failed) == (None, False)


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
