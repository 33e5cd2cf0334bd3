"""A stage without a second worker: what it says while there is none, and how it comes back."""

import time

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Fallback, Health, Outcome
from torchperf_ros.workers.frame_ring import FrameReader

from .conftest import trigger, wait_until


@pytest.fixture(scope="module")
def running(start_stage):
    return start_stage(backup="none", adapter="Plain", sustained_misses=5)


@pytest.fixture
def stage(running):
    running.reconfigure()
    running.wait_for_workers()
    running.ask()
    yield running
    running.settle_accounts()


def test_given_an_adapter_without_histories_when_described_then_it_is_not_asked_to_observe(stage):
    description = stage.actor.pool.description
    assert description.observes is False
    assert description.inputs == (("point", "geometry_msgs/msg/PointStamped"),)
    assert (description.output, description.device) == ("nav_msgs/msg/Path", "cpu")
    (pid,) = stage.pids
    assert stage.notes("observed", pid) == []


def test_given_a_stage_that_is_free_when_a_trigger_is_put_into_its_slot_then_it_is_answered_from_there(
    stage,
):
    wait_until(lambda: stage.actor.slot() is not None, lambda: "it is free, and knows how long records are")
    slot, stamp_ns = stage.actor.slot(), time.time_ns()
    data = trigger(stamp_ns, None, 0.25)
    part = slot[: len(data)]
    part[:] = data
    seq, _ = stage.offer(data=part, stamp_ns=stamp_ns)
    answer = stage.answer(seq)
    assert answer.outcome is Outcome.ON_TIME
    as_bytes = stage.ask(data=data, stamp_ns=stamp_ns)
    assert stage.payload(answer) == stage.payload(as_bytes)
    held = FrameReader(stage.actor.pool.ring.fd).read(answer.offset, answer.length, seq)
    assert bytes(held[0].data) == data


def test_given_a_frame_that_runs_when_the_next_is_put_into_its_slot_then_both_are_answered_and_a_third_has_none(
    stage,
):
    stamp_ns = time.time_ns()
    data = trigger(stamp_ns, None, 0.75)
    with stage.running() as (first, _):
        part = stage.actor.slot()[: len(data)]
        part[:] = data
        second, _ = stage.offer(data=part, stamp_ns=stamp_ns)
        assert stage.actor.slot() is None
    running, waited = stage.answer(first), stage.answer(second)
    assert stage.payload(waited).header.stamp.nanosec == stamp_ns % 1_000_000_000
    reader = FrameReader(stage.actor.pool.ring.fd)
    assert bytes(reader.read(waited.offset, waited.length, second)[0].data) == data
    assert reader.read(running.offset, running.length, first)[0].stamp_ns == running.frame.stamp_ns


def test_given_a_crash_when_nobody_takes_over_then_frames_are_held_until_the_worker_is_back(stage):
    good = stage.ask()
    crashed = stage.ask({"do": "sigkill"})
    assert (crashed.outcome, crashed.fallback) == (Outcome.CRASHED, Fallback.HOLD_LAST)
    stage.reconfigure(budget_ms=20.0)
    starting = stage.ask()
    assert (starting.outcome, starting.fallback, starting.tier) == (
        Outcome.STARTING,
        Fallback.HOLD_LAST,
        -1,
    )
    assert starting.reason.startswith("worker 0 ")
    assert stage.payload(starting).header.stamp == stage.payload(good).header.stamp
    stage.wait_for_workers()
    back = stage.ask()
    assert (back.outcome, back.fallback) == (Outcome.ON_TIME, None)


def test_given_a_hang_when_its_frame_is_due_later_then_the_frame_is_answered_as_hung(stage):
    seq, _ = stage.offer({"do": "spin"})
    stage.reconfigure(
        budget_ms=400.0, hang_ms=500.0
    )  # both shorter while the frame runs, which keeps its deadline
    answer = stage.answer(seq)
    assert (answer.outcome, answer.fallback) == (Outcome.HUNG, Fallback.HOLD_LAST)
    assert answer.reason.startswith("hung: ")
    assert "hang_ms is 500" in answer.reason
    assert answer.lateness_ms < 0


def test_given_a_hang_when_frames_go_on_coming_then_each_has_its_answer_and_the_worker_is_replaced(stage):
    stage.reconfigure(
        budget_ms=200.0, hang_ms=2500.0
    )  # a busy machine answers both before the worker is killed
    (before,) = stage.pids
    first = stage.ask({"do": "spin"})
    assert first.outcome is Outcome.LATE
    second = stage.ask()
    assert (second.outcome, second.reason) == (Outcome.LATE, "no worker is free: worker 0 busy")
    death = f"(pid {before}) ended by signal SIGKILL: hung"
    stage.wait_for(lambda: any(death in text for _, text in stage.logs), "it is killed")
    stage.wait_for_workers()
    assert stage.ask().outcome is Outcome.ON_TIME


@pytest.fixture
def errors(stage):
    """How many errors of ours there were in this test."""
    before = stage.counters.internal_errors
    return lambda: stage.counters.internal_errors - before


def test_given_an_error_of_ours_then_it_is_lost_and_its_result_counts_as_late(start_own_stage, monkeypatch):
    stage = start_own_stage(backup="none", adapter="Plain")
    with monkeypatch.context() as patch:
        patch.setattr(stage.actor.model.crew, "wants_backup", lambda *_: 1 / 0)
        with stage.running():
            with stage.actor.lock:
                stage.actor.waiter.wake()
            stage.wait_for(
                lambda: any("lost a frame:\nTraceback" in text for _, text in stage.logs), "it is said"
            )
    wait_until(lambda: stage.counters.late_results == 1, lambda: "its result is late")
    assert stage.counters.internal_errors == 1
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_an_error_of_ours_then_that_one_is_answered_without_a_third(start_own_stage, monkeypatch):
    stage = start_own_stage(backup="none", adapter="Plain", budget_ms=2000.0, hang_ms=30_000.0)
    crew, errors = stage.actor.model.crew, iter([ZeroDivisionError("as ordered")])

    wants_backup = crew.wants_backup

    def fail_once(*of):
        if error := next(errors, None):
            raise error
        return wants_backup(*of)

    stage.offer(
        {"do": "sleep", "ms": 8000}
    )  # nothing else wakes the stage before the other frame's deadline
    seq, _ = stage.offer()
    with stage.actor.lock:
        monkeypatch.setattr(crew, "wants_backup", fail_once)
        stage.actor.waiter.wake()
    assert stage.answer(seq).outcome is Outcome.LATE
    assert stage.counters.internal_errors == 1


@pytest.mark.parametrize("where", ["write", "start"])
def test_given_an_error_of_ours_when_a_frame_is_begun_then_the_receiver_goes_on_and_a_fallback_answers(
    stage, errors, monkeypatch, where
):
    good = stage.ask(x=1.0)
    with monkeypatch.context() as patch:
        parts = {"write": stage.actor.pool.ring, "start": stage.actor.model.crew}
        patch.setattr(parts[where], where, lambda *_: 1 / 0)
        answer = stage.ask()
    assert (answer.outcome, answer.fallback) == (Outcome.ERROR, Fallback.HOLD_LAST)
    assert answer.reason.startswith("an error in the node: ZeroDivisionError: division by zero")
    assert answer.payload == good.payload
    assert errors() == 1
    stage.wait_for(
        lambda: any("hand a frame over:\nTraceback" in text for _, text in stage.logs), "it is said"
    )
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_an_error_of_ours_when_its_worker_has_the_frame_already_then_the_result_is_published(
    stage, errors, monkeypatch
):
    crew = stage.actor.model.crew
    start = crew.start

    def fail_after(*of):
        start(*of)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(crew, "start", fail_after)
        assert stage.ask({"do": "sleep", "ms": 100}).outcome is Outcome.ON_TIME
    assert errors() == 1


def test_given_a_frame_that_waits_for_its_worker_when_that_is_ready_in_time_then_it_is_on_time(stage):
    stage.reconfigure(budget_ms=60_000.0, hang_ms=60_000.0)
    stage.ask({"do": "sigkill"})
    answer = stage.ask()
    assert (answer.outcome, answer.fallback) == (Outcome.ON_TIME, None)


def test_given_sustained_misses_when_frames_are_good_again_then_the_stage_stops_safely_and_recovers_by_steps(
    stage,
):
    for _ in range(5):
        stage.ask({"do": "raise", "once": False})
    assert stage.health is Health.SAFE_STOP
    serious = lambda: any(  # noqa: E731
        each.level == 2 and each.name == "tested: model error" for each in stage.anomalies
    )
    stage.wait_for(serious, "the sustained misses are told")
    healths = [stage.health for _ in range(200) if stage.ask()]
    assert healths[2] is Health.SAFE_STOP
    order = list(dict.fromkeys(healths))
    assert order == [Health.SAFE_STOP, Health.DEGRADED, Health.NOMINAL]


def test_given_memory_that_runs_short_when_frames_come_then_lower_tiers_answer_and_it_is_told_once(
    start_own_stage,
):
    stage = start_own_stage(adapter="Plain", backup="none")
    assert stage.ask().tier == 0
    for _ in range(3):
        stage.actor.limit_memory(0.8, "the most is worker 0's")
    assert stage.ask().tier == 1
    stage.wait_for(lambda: stage.anomalies, "it is told")
    (told,) = stage.anomalies
    assert told.message.startswith(
        "memory is short: 80% of the limit is in use, 70% may be; the most is worker 0's; lower tiers run"
    )
    with pytest.raises(ConfigError, match="short of memory"):
        stage.actor.pool.rolling_update.swap("full", "new.pt2")
    stage.actor.limit_memory(0.1)
    assert not stage.actor.memory.tight
