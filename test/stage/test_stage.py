"""A stage with a standby, real workers and everything that a model can do to it."""

import math
import os
import signal
import time

import pytest

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.stage import practice
from torchperf_ros.stage.frame import Frame, Origin
from torchperf_ros.stage.practice import HedgeRule
from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.worker_process import WorkerProcess

from .conftest import wait_until

TIER_OFFSET = 1000.0


def path_stamp_ns(message):
    return message.header.stamp.sec * 1_000_000_000 + message.header.stamp.nanosec


@pytest.fixture(scope="module")
def running(start_stage):
    return start_stage(backup="standby")


@pytest.fixture
def stage(running):
    """The module's stage with both workers idle, its limits as at the start, and a good output to hold."""
    running.reconfigure()
    running.wait_for_workers()
    assert running.ask().outcome is Outcome.ON_TIME
    running.wait_for_workers()  # a rehearsal may have followed
    yield running
    running.settle_accounts()
    seqs = [answer.frame.seq for answer in running.answers]
    assert seqs == sorted(set(seqs))
    assert running.counters.internal_errors == 0


def test_given_a_good_frame_when_offered_then_its_own_result_is_published_and_recorded(stage):
    seq, stamp_ns = stage.offer(x=7.5)
    answer = stage.answer(seq)
    assert (answer.outcome, answer.fallback, answer.reason) == (Outcome.ON_TIME, None, "")
    message = stage.payload(answer)
    assert path_stamp_ns(message) == stamp_ns
    assert message.poses[0].pose.position.x == 7.5 + TIER_OFFSET * answer.tier
    assert stage.runner(answer) in stage.pids
    assert answer.frame.stamp_ns == stamp_ns
    assert all(not math.isnan(step) for step in (answer.steps.decode_ms, answer.steps.total_ms))
    assert answer.lateness_ms < 0 < answer.total_ms
    assert answer.budget_ms == 5000.0
    assert stage.published[-1] == stage.handed_on[-1][0]


@pytest.mark.parametrize(
    ("orders", "outcome", "words"),
    [
        ({"do": "nan"}, Outcome.INVALID, ["1 of 1 values that are NaN or Inf"]),
        ({"do": "wrong_shape"}, Outcome.INVALID, ["(2,)", "(1,)"]),  # another one than when calibrated
        (
            {"do": "raise"},
            Outcome.ERROR,
            ["RuntimeError: the model has had enough", "adapters_under_test.py"],
        ),
        ({"do": "exit"}, Outcome.ERROR, []),
        ({"do": "keyboard_interrupt"}, Outcome.ERROR, []),
        ({"do": "recursion"}, Outcome.ERROR, []),
        ({"do": "raise_speechless"}, Outcome.ERROR, []),
        ({"do": "raise_unprintable"}, Outcome.ERROR, ["FileNotFoundError"]),
        ({"do": "large", "bytes": 70_000}, Outcome.ERROR, ["max_frame_bytes, 65536, fit"]),
    ],
)
def test_given_a_fault_of_the_model_in_every_worker_when_offered_then_the_last_good_output_is_held_and_workers_live(
    stage, orders, outcome, words
):
    good, pids = stage.ask(x=1.0), stage.pids
    answer = stage.ask({**orders, "once": False})
    assert (answer.outcome, answer.fallback) == (outcome, Fallback.HOLD_LAST)
    assert all(each in answer.reason for each in words), answer.reason
    if outcome is Outcome.ERROR:  # the stage publishes an answer before it keeps its error
        wait_until(
            lambda: stage.actor.pool.last_error == answer.reason, lambda: stage.actor.pool.last_error
        )
    assert path_stamp_ns(stage.payload(answer)) == good.frame.stamp_ns
    assert stage.ask().outcome is Outcome.ON_TIME
    assert stage.pids == pids


@pytest.mark.parametrize(
    ("data", "tier", "reason"),
    [
        (b"\x00\x01\x00\x00garbage", 0, "not a geometry_msgs/msg/PointStamped"),
        (bytes(65_536), 0, "not a geometry_msgs/msg/PointStamped"),
        (
            bytes(65_537),
            -1,
            "message of 65537 bytes; the parameter max_frame_bytes, which may be raised, is 65536",
        ),
    ],
)
def test_given_bytes_that_are_no_message_or_too_many_when_offered_then_it_is_bad_input_and_the_workers_live(
    stage, data, tier, reason
):
    pids = stage.pids
    answer = stage.ask(data=data)
    assert (answer.outcome, min(answer.tier, 0)) == (Outcome.BAD_INPUT, tier)
    assert answer.reason.startswith(reason)
    assert stage.pids == pids


@pytest.mark.parametrize(
    ("orders", "parameters", "outcome", "fallback", "backups"),
    [
        ({"do": "nan"}, {}, Outcome.INVALID, Fallback.BACKUP, 1),
        ({"do": "nan"}, {"fallback": ["hold_last", "stop"]}, Outcome.INVALID, Fallback.HOLD_LAST, 0),
        ({"do": "raise", "once": False}, {"fallback": ["none"]}, Outcome.ERROR, Fallback.NONE, 0),
        ({"do": "bad_input", "once": False}, {}, Outcome.BAD_INPUT, Fallback.HOLD_LAST, 0),
    ],
)
def test_given_a_runner_that_fails_when_fallbacks_are_in_order_then_the_first_that_is_there_is_published(
    stage, orders, parameters, outcome, fallback, backups
):
    stage.reconfigure(**parameters)
    before, published = stage.counters.backups, len(stage.published)
    seq, stamp_ns = stage.offer(orders, x=3.0)
    answer = stage.answer(seq)
    assert (answer.outcome, answer.fallback) == (outcome, fallback)
    assert stage.counters.backups == before + backups
    assert len(stage.published) == published + (fallback is not Fallback.NONE)
    if fallback is Fallback.BACKUP:
        message = stage.payload(answer)
        assert (path_stamp_ns(message), message.poses[0].pose.position.x) == (stamp_ns, 3.0 + TIER_OFFSET)
    if outcome is Outcome.BAD_INPUT:
        assert answer.reason == "this point is useless"
        assert sum(stamp_ns in stage.notes("preprocessed", pid) for pid in stage.pids) == 1


def test_given_nothing_from_the_stage_before_when_offered_then_it_is_bad_input_with_its_reason(stage):
    upstream = Frame(5, b"", 0, math.nan, time.monotonic_ns(), time.monotonic_ns(), Origin(7, 3.0))
    seq = stage.counters.frames
    stage.actor.offer(None, 0, stamped=False, upstream=upstream, refusal="nothing to hand over")
    answer = stage.answer(seq)
    assert (answer.outcome, answer.reason) == (Outcome.BAD_INPUT, "nothing to hand over")
    assert answer.frame.origin is upstream.origin


def test_given_a_model_that_prints_when_offered_then_it_is_logged_with_stage_and_pid_and_the_frame_is_good(
    stage,
):
    answer = stage.ask({"do": "print"})
    assert answer.outcome is Outcome.ON_TIME
    for text in ("said on stdout", "said on stderr"):
        stage.wait_for(
            lambda text=text: any(text in logged for _, logged in stage.logs), f"{text!r} is logged"
        )
        (logged,) = [logged for _, logged in stage.logs if text in logged]
        assert any(f"tested worker {number} (pid {pid})" in logged for number, pid in enumerate(stage.pids))


def test_given_a_late_model_when_offered_then_a_fallback_leaves_first_and_the_late_result_is_only_held(
    stage,
):
    good = stage.ask()
    stage.reconfigure(budget_ms=300.0)
    late = stage.counters.late_results
    seq, stamp_ns = stage.offer({"do": "sleep", "ms": 700, "once": False})
    answer = stage.answer(seq)
    assert stage.counters.late_results == late
    assert (answer.outcome, answer.fallback) == (Outcome.LATE, Fallback.HOLD_LAST)
    assert path_stamp_ns(stage.payload(answer)) == good.frame.stamp_ns
    assert "was not done after" in answer.reason
    published = len(stage.published)
    stage.wait_for_workers()
    assert stage.counters.late_results > late
    assert len(stage.published) == published
    stage.reconfigure()
    held = stage.ask({"do": "raise", "once": False})
    assert held.fallback is Fallback.HOLD_LAST
    assert path_stamp_ns(stage.payload(held)) == stamp_ns


def test_given_a_late_model_when_hedges_are_allowed_then_the_answer_is_the_backups_on_the_last_tier(
    stage, monkeypatch
):
    monkeypatch.setattr(stage.actor.hedge_rule, "allowed", True)
    monkeypatch.setattr("torchperf_ros.stage.turn._HEDGE_MARGIN_NS", 300_000_000)  # on a busy machine, too
    for _ in range(150):  # the ladder forgets the stalls of earlier tests
        stage.ask()
    stage.wait_for_workers()
    stage.reconfigure(budget_ms=1000.0)
    with stage.running() as (seq, stamp_ns):
        answer = stage.answer(seq)
    assert (answer.outcome, answer.fallback, answer.tier) == (Outcome.LATE, Fallback.BACKUP, 1)
    assert path_stamp_ns(stage.payload(answer)) == stamp_ns


def test_given_a_late_model_when_hedges_are_not_proven_then_the_standby_takes_the_next_frame(stage):
    backups = stage.counters.backups
    assert not stage.actor.hedge_rule.allowed
    stage.reconfigure(budget_ms=600.0)
    with stage.running(once=False) as (seq, _):
        late = stage.answer(seq)
        stage.reconfigure()
        following = stage.ask()
    assert (late.outcome, late.fallback) == (Outcome.LATE, Fallback.HOLD_LAST)
    assert (following.outcome, following.fallback) == (Outcome.ON_TIME, None)
    assert stage.counters.backups == backups


def test_given_a_late_frame_that_is_quick_when_run_again_then_that_is_a_proof_for_hedges(
    stage, monkeypatch
):
    rule = HedgeRule()  # what earlier tests have proven is not this one's
    monkeypatch.setattr(stage.actor.model.crew.practice, "hedge_rule", rule)
    stage.reconfigure(budget_ms=600.0)
    assert stage.ask({"do": "sleep", "ms": 900}).outcome is Outcome.LATE  # once: for one worker only
    stage.reconfigure()

    def retried():
        stage.ask()
        return rule.retrials > 0

    wait_until(retried, lambda: rule.words)
    assert rule.slow_retrials == 0


def test_given_a_runner_that_fails_when_the_other_worker_is_free_in_time_then_the_answer_is_its_result(
    stage,
):
    """The other one is still busy with an earlier frame that came too late."""
    stage.reconfigure(budget_ms=300.0)
    assert stage.ask({"do": "sleep", "ms": 700}).outcome is Outcome.LATE
    stage.reconfigure()
    answer = stage.ask({"do": "raise"})
    assert (answer.outcome, answer.fallback) == (Outcome.ERROR, Fallback.BACKUP)


def test_given_a_frame_that_failed_when_the_spare_worker_rehearses_then_it_is_not_on_that(
    stage, monkeypatch
):
    monkeypatch.setattr(practice, "REHEARSE_AFTER_NS", 0)
    seq, stamp_ns = stage.offer({"do": "bad_input", "once": False})
    assert stage.answer(seq).outcome is Outcome.BAD_INPUT
    stage.wait_for_workers()
    assert sum(stage.notes("preprocessed", pid).count(stamp_ns) for pid in stage.pids) == 1
    rehearsals = stage.counters.rehearsals
    stage.ask()
    stage.wait_for_workers()
    assert stage.counters.rehearsals == rehearsals + 1


def test_given_a_calibration_that_was_disturbed_when_frames_go_on_then_probes_take_the_ladder_up(
    start_own_stage,
):
    stage = start_own_stage(backup="standby")
    ladder = stage.actor.ladder
    ladder.calibrate([Calibration(6000.0, 9000.0), Calibration(0.0, 0.0)])
    stage.ask()
    assert ladder.level == 1

    def is_up():
        stage.ask()
        return ladder.level == 0

    wait_until(is_up, lambda: ladder.explain(["full", "fast"], time.monotonic_ns()))
    assert stage.counters.probes == 3


def test_given_a_new_worker_when_it_runs_its_first_frame_then_the_ladder_does_not_learn_from_it(stage):
    learned = []
    learn, stage.actor.ladder.learn = stage.actor.ladder.learn, lambda *lesson: learned.append(lesson)
    try:
        for worker in stage.actor.pool.everyone:
            worker.has_run = False
        stage.ask()
        stage.wait_for_workers()
        assert learned == []
        stage.ask()
        stage.wait_for_workers()
        assert len(learned) == 1
    finally:
        stage.actor.ladder.learn = learn


def test_given_an_idle_stage_when_a_trigger_is_about_to_be_taken_then_the_worker_that_runs_it_is_woken_first(
    stage, monkeypatch
):
    events = []
    expect, run = WorkerProcess.expect, WorkerProcess.run
    monkeypatch.setattr(
        WorkerProcess, "expect", lambda worker: (events.append(("expect", worker)), expect(worker))
    )
    monkeypatch.setattr(
        WorkerProcess,
        "run",
        lambda worker, *of, **how: (events.append(("run", worker)), run(worker, *of, **how))[1],
    )
    stage.ask()
    stage.wait_for_workers()
    events.clear()
    assert stage.actor.slot() is not None
    assert stage.ask().outcome is Outcome.ON_TIME
    (first, woken), (second, runner), *_ = events
    assert (first, second, runner) == ("expect", "run", woken)
    stage.wait_for_workers()


def test_given_a_model_that_holds_the_interpreter_when_offered_then_the_node_answers_all_the_same(stage):
    stage.reconfigure(budget_ms=300.0)
    answer = stage.ask({"do": "hold_gil", "ms": 600, "once": False})
    assert answer.outcome is Outcome.LATE
    assert answer.fallback is Fallback.HOLD_LAST


def test_given_a_busy_stage_when_frames_arrive_then_only_the_newest_waits_and_the_others_are_superseded(
    stage,
):
    superseded = stage.actor.mailbox.superseded
    with stage.running(once=False) as (first, _):
        waiting = [stage.offer()[0] for _ in range(4)]
    assert stage.answer(first).outcome is Outcome.ON_TIME
    assert stage.answer(waiting[-1]).outcome is Outcome.ON_TIME
    assert stage.actor.mailbox.superseded == superseded + 3
    assert {answer.frame.seq for answer in stage.answers} & set(waiting[:-1]) == set()
    assert stage.answer(waiting[-1]).wait_ms > 0


def stale(stage, age_ms, **values):
    """The answer to a frame whose stamp is so old, and the stamp."""
    seq, stamp_ns = stage.offer(stamp_ns=time.time_ns() - round(age_ms * 1e6), **values)
    return stage.answer(seq), stamp_ns


def stamp_of(stage, answer):
    return path_stamp_ns(stage.payload(answer))


def test_given_a_frame_older_than_its_budget_when_offered_then_the_fallback_answers_at_once_and_an_alert_says_why(
    stage,
):
    held, before = stage.answers[-1], stage.counters.stale
    stage.reconfigure(budget_from="stamp", budget_ms=1000.0)
    answer, stamp_ns = stale(stage, 3000.0)
    assert (answer.outcome, answer.fallback, answer.frame.stale) == (Outcome.LATE, Fallback.HOLD_LAST, True)
    assert answer.lateness_ms >= 2000.0
    assert answer.reason.startswith("stale: 300")
    assert (
        "by its stamp when it was received (the camera's latency, its host's clock is behind"
        in answer.reason
    )
    assert stamp_of(stage, answer) == held.frame.stamp_ns
    alert = stage.alert(answer)
    assert alert.name == "tested: stale"
    assert alert.message.startswith(
        f"{answer.reason.removeprefix('stale: ')}; frame {held.frame.seq} before it was "
    )
    assert float(alert.values["age_ms"]) >= 3000.0
    assert stage.counters.stale == before + 1
    assert stage.actor.mailbox.waiting is None


def test_given_frames_that_are_all_stale_when_answered_then_each_is_held_one_frame_old_and_histories_go_on(
    stage,
):
    """The worker runs them all the same, so the outputs go on; the standby observes them as any others."""
    stage.reconfigure(budget_from="stamp", budget_ms=1000.0)
    stamps, retrials = [], stage.actor.hedge_rule.retrials
    for number in range(4):
        late_results = stage.counters.late_results
        answer, stamp_ns = stale(stage, 3000.0)
        assert (answer.outcome, answer.fallback) == (Outcome.LATE, Fallback.HOLD_LAST)
        if number:
            assert stamp_of(stage, answer) == stamps[-1]
        stamps.append(stamp_ns)
        wait_until(lambda: stage.counters.late_results > late_results, lambda: f"{number} was run")  # noqa: B023
    stage.wait_for_workers()
    wait_until(
        lambda: all(stage.notes("observed", pid)[-4:] == stamps for pid in stage.pids),
        lambda: f"both observe them: {[stage.notes('observed', pid) for pid in stage.pids]}",
    )
    assert stage.actor.hedge_rule.retrials == retrials  # no worker is at fault that they were late


def test_given_a_stage_that_has_no_output_yet_when_a_frame_is_stale_then_only_the_first_has_nothing(
    start_own_stage,
):
    stage = start_own_stage(backup="none", adapter="Plain", budget_from="stamp", budget_ms=1000.0)
    answers = []
    for _ in range(3):
        late_results = stage.counters.late_results
        answers.append(stale(stage, 3000.0)[0])
        wait_until(lambda: stage.counters.late_results > late_results, lambda: "it was run")  # noqa: B023
    assert [answer.fallback for answer in answers] == [
        Fallback.NONE,
        Fallback.HOLD_LAST,
        Fallback.HOLD_LAST,
    ]
    assert {answer.outcome for answer in answers} == {Outcome.LATE}
    assert "; no frame was younger; compare the clocks of both hosts" in stage.alert(answers[-1]).message
    assert (stage.counters.answered, stage.counters.unanswered, stage.counters.stale) == (2, 1, 3)
    stage.settle_accounts()


def test_given_an_offset_that_drifts_across_the_budget_when_offered_then_every_frame_is_answered_before_its_run_ends(
    stage,
):
    """With 1 ms left, as with none, the stage does not wait for the run that begins."""
    stage.reconfigure(budget_from="stamp", budget_ms=2000.0)
    for age_ms in (1990.0, 1999.9, 2001.0):
        go = stage.folder / f"go-{age_ms}"
        stamp_ns = time.time_ns() - round(age_ms * 1e6)
        seq, _ = stage.offer({"do": "wait", "until": go.name, "once": False}, stamp_ns=stamp_ns)
        answer = stage.answer(seq)
        go.touch()
        assert (answer.outcome, answer.fallback) == (Outcome.LATE, Fallback.HOLD_LAST)
        assert "ms of its budget of 2000 ms had passed at its turn" in answer.reason
        stage.wait_for_workers()


def test_given_a_frame_that_waits_longer_than_its_budget_when_its_turn_comes_then_it_is_stale_by_waiting(
    stage,
):
    first, _ = stage.offer({"do": "sleep", "ms": 300, "once": False})
    stage.reconfigure(budget_ms=50.0)
    second, _ = stage.offer()
    assert stage.answer(first).outcome is Outcome.ON_TIME
    answer = stage.answer(second)
    assert (answer.outcome, answer.fallback, answer.frame.stale) == (Outcome.LATE, Fallback.HOLD_LAST, True)
    assert answer.reason.startswith("stale: ")
    assert answer.reason.endswith(" ms waiting for its turn")
    assert answer.wait_ms > 50.0
    assert f"stale: {stage.alert(answer).message}" == answer.reason  # no stamp has to do with it


def test_given_a_stale_frame_that_cannot_be_run_at_all_when_answered_then_that_is_the_reason(stage):
    stage.reconfigure(budget_from="stamp", budget_ms=1000.0)
    answer, _ = stale(stage, 3000.0, data=b"")
    assert answer.outcome in {Outcome.BAD_INPUT, Outcome.LATE}
    answer, _ = stale(stage, 3000.0, refusal="off")
    assert (answer.outcome, answer.reason, answer.frame.stale) == (Outcome.BAD_INPUT, "off", True)
    stage.wait_for_workers()


def test_given_started_frames_of_every_kind_when_observed_then_none_is_seen_twice_and_a_late_one_leaves_a_gap(
    stage, monkeypatch
):
    """The worker that is late sees them all; the other one does not wait, and hears of the gap."""
    monkeypatch.setattr(
        stage.actor.model.crew.practice, "hedge_rule", HedgeRule()
    )  # what was late before proves nothing here
    since_ns = time.time_ns()
    gaps = {pid: len(stage.notes("missed", pid)) for pid in stage.pids}
    started = []
    started.append(stage.ask().frame.stamp_ns)
    stage.reconfigure(budget_ms=400.0)
    with stage.running() as (late, stamp_ns):
        stage.answer(late)
        started.append(stamp_ns)
        stage.reconfigure()
        started.append(stage.ask().frame.stamp_ns)
    for orders in (None, {"do": "nan", "once": False}, {"do": "raise"}, None):
        started.append(stage.ask(orders).frame.stamp_ns)
    stage.wait_for_workers()

    def saw(pid):
        return [stamp_ns for stamp_ns in stage.notes("observed", pid) if stamp_ns >= since_ns]

    without_the_late_one = [started[0], *started[2:]]
    wait_until(
        lambda: sorted(saw(pid) for pid in stage.pids) == sorted([started, without_the_late_one]),
        lambda: (started, [saw(pid) for pid in stage.pids]),
    )
    assert sorted(stage.notes("missed", pid)[gaps[pid] :] for pid in stage.pids) == [[], [1]]


def test_given_an_observe_that_raises_on_the_standby_when_offered_then_it_is_logged_and_the_frame_is_good(
    stage,
):
    runner = stage.actor.model.crew.preferred
    (standby,) = set(stage.pids) - {runner.pid}
    seq, _ = stage.offer({"do": "raise", "where": "observe", "only": standby})
    assert stage.answer(seq).outcome is Outcome.ON_TIME
    said = f"1 frames not observed, the last one frame {seq}: RuntimeError"

    def told():  # once a second, after a frame
        assert stage.ask().outcome is Outcome.ON_TIME
        return any(said in text for _, text in stage.logs)

    wait_until(told, lambda: stage.logs)


def test_given_an_inactive_stage_when_offered_then_the_message_is_ignored_and_counted(stage):
    stage.actor.deactivate()
    frames, ignored = stage.counters.frames, stage.counters.ignored
    stage.offer()
    stage.actor.activate()
    assert (stage.counters.frames, stage.counters.ignored) == (frames, ignored + 1)
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_a_deactivation_when_a_frame_runs_and_one_waits_then_only_the_first_is_answered(stage):
    superseded = stage.actor.mailbox.superseded
    with stage.running() as (running, _):
        waiting, _ = stage.offer()
        stage.actor.deactivate()
    assert stage.answer(running).outcome in {Outcome.ON_TIME, Outcome.LATE}
    assert stage.actor.mailbox.superseded == superseded + 1
    stage.actor.activate()
    stage.ask()
    assert all(answer.frame.seq != waiting for answer in stage.answers)


def test_given_no_hold_when_every_worker_fails_then_a_braking_path_is_published_once_per_failure(stage):
    good = stage.ask()
    stage.reconfigure(hold_last_ms=0.0)
    first = stage.ask({"do": "raise", "once": False})
    second = stage.ask({"do": "raise", "once": False})
    assert first.fallback is second.fallback is Fallback.STOP
    paths = [stage.payload(answer) for answer in (first, second)]
    assert [path_stamp_ns(path) for path in paths] == [good.frame.stamp_ns] * 2
    assert paths[0] == paths[1]
    x = [pose.pose.position.x for pose in paths[0].poses]
    assert x == sorted(x)
    assert x[-1] == pytest.approx(x[-2], abs=1e-6)


def test_given_a_good_output_when_activated_again_then_nothing_is_held_and_no_stop_is_made_of_it(stage):
    stage.ask()
    stage.reconfigure(fallback=["hold_last", "stop"])
    assert stage.ask({"do": "raise", "once": False}).fallback is Fallback.HOLD_LAST
    stage.actor.deactivate()
    stage.actor.activate()
    answer = stage.ask({"do": "raise", "once": False})
    assert (answer.fallback, stage.payload(answer)) == (Fallback.NONE, None)


def test_given_a_late_frame_when_its_stop_is_made_then_that_is_before_the_deadline_and_frames_can_be_received(
    stage, monkeypatch
):
    made = []

    def stop(*given):
        made.append((time.monotonic_ns(), stage.actor.lock.locked()))
        return made_by_path(*given)

    made_by_path = TimedPath.stop
    monkeypatch.setattr(TimedPath, "stop", stop)

    def is_in_time():
        """Where the stage's thread got the processor in its 4 ms; else with another frame and stop."""
        stage.reconfigure()
        stage.ask()  # a good frame ends the stop of the try before, which would go on
        stage.wait_for_workers()
        stage.reconfigure(fallback=["stop"], budget_ms=300.0)
        made.clear()
        with stage.running() as (seq, _):
            answer = stage.answer(seq)
        assert answer.fallback is Fallback.STOP
        [(at_ns, locked)] = made
        assert not locked
        return at_ns < answer.frame.deadline_ns

    wait_until(is_in_time, lambda: made)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("sigkill", "signal SIGKILL"),
        ("sigsegv", "signal SIGSEGV"),
        ("os_exit", "exit status 3"),
        ("close_sockets", "exit"),
        ("close_frames", "it closed its socket and did not exit"),
    ],
)
@pytest.mark.parametrize("where", ["preprocess", "observe"])
def test_given_a_frame_that_ends_whoever_runs_it_when_offered_then_it_costs_one_worker_and_the_next_frame_is_fresh(
    stage, kind, how, where
):
    restarts, before = stage.actor.pool.restarts, stage.pids
    seq, stamp_ns = stage.offer({"do": kind, "where": where, "once": False})
    answer = stage.answer(seq)
    assert (answer.outcome, answer.fallback) == (Outcome.CRASHED, Fallback.HOLD_LAST)
    following = stage.ask()
    assert (following.outcome, following.fallback) == (Outcome.ON_TIME, None)
    stage.wait_for(
        lambda: any("ended by" in text and how in text for _, text in stage.logs), f"{how} is logged"
    )
    stage.wait_for_workers()
    assert stage.actor.pool.restarts == restarts + 1
    assert len(set(stage.pids) - set(before)) == 1
    assert (
        sum(
            stage.notes(f"{where}d" if where == "observe" else "preprocessed", pid).count(stamp_ns)
            for pid in {*before, *stage.pids}
        )
        == 1
    )
    assert any(anomaly.name == "tested: worker died" for anomaly in stage.anomalies)


def test_given_a_killed_standby_when_frames_come_then_none_is_lost_and_it_is_replaced(stage):
    standby = next(
        worker for worker in stage.actor.pool.workers if worker is not stage.actor.model.crew.preferred
    )
    os.kill(standby.pid, signal.SIGKILL)
    for _ in range(5):
        assert stage.ask().outcome is Outcome.ON_TIME
    death = f"(pid {standby.pid}) ended by"
    stage.wait_for(lambda: any(death in text for _, text in stage.logs), "its death is logged")
    stage.wait_for_workers()
    assert standby.pid not in stage.pids
