"""Another version beside the one that serves.

It gets the same frames, disturbs none, and takes over between two.
"""

import os
import pickle
import re
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.fleet.comparer import Pair
from torchperf_ros.fleet.plan import candidate_of, read_candidate
from torchperf_ros.fleet.shadow import Shadow, promote
from torchperf_ros.fleet.trial import Trial
from torchperf_ros.safety.guard import Guard
from torchperf_ros.stage.frame import StepTimes

from ..stage.conftest import STORE, wait_until
from ..stage.test_stage_guard import GUARD, tell

pytestmark = pytest.mark.usefixtures("settled_soon")
SHIFT = 0.5
ADAPTERS = "adapters_under_test"


def add_shadow(stage, **given):
    """The version `new`, which differs from the stage's by what is given."""
    given = {"adapter": "adapters_under_test:Shifted", **given}
    candidate = candidate_of("new", given, stage.actor.config.name, stage.values, "candidate")
    setup = replace(stage.actor.model.setup, adapter=candidate.config.adapter, options=stage.options)
    return Shadow(stage.actor, "new", candidate.config, candidate.changes, setup)


def ready_shadow(stage, **given):
    shadow = add_shadow(stage, **given)
    wait_until(lambda: shadow.pool.ready, lambda: shadow.pool.progress)
    return shadow


def pair_of(stage, shadow, seq):
    """What the shadow came to on a frame."""
    found = []

    def look():
        found.extend(pair for pair in shadow.take_pairs() if pair.answer.frame.seq == seq)
        return found

    wait_until(look, lambda: f"a pair of frame {seq}; skipped {shadow.skipped}")
    return found[0]


def is_free(stage, shadow):
    """Whether the shadow runs the stage's next frame, if no other follows at once; else it may skip it."""
    with stage.actor.lock:
        idle = all(worker is not None and worker.idle for worker in shadow.pool.workers)
        return idle and not shadow.is_running and stage.actor.turn is None


def ask_both(stage, shadow, orders=None, **values):
    """The stage's answer to a frame, and the pair of what both versions came to on it."""
    wait_until(lambda: is_free(stage, shadow), lambda: f"the shadow to be free: {shadow.pool.progress}")
    answer = stage.ask(orders, **values)
    return answer, pair_of(stage, shadow, answer.frame.seq)


def priorities(stage):
    return [os.getpriority(os.PRIO_PROCESS, pid) for pid in stage.pids]


def x_of(payload):
    return STORE.deserialize_cdr(payload, "nav_msgs/msg/Path").poses[0].pose.position.x


def exchange(stage, to):
    stage.actor.shadow.exchange()
    wait_until(lambda: stage.actor.version == to, lambda: "the exchange")


@pytest.fixture
def stage(start_own_stage):
    return start_own_stage(backup="none")


@pytest.fixture
def shadow(stage):
    return ready_shadow(stage)


def test_given_a_shadow_when_frames_are_answered_then_it_has_the_same_and_publishes_nothing(stage, shadow):
    published = len(stage.published)
    answer, pair = ask_both(stage, shadow, x=3.0)
    assert (pair.outcome, pair.payload is not None, pair.late) == (Outcome.ON_TIME, True, False)
    assert (pair.answer is answer, pair.steps_ms > 0) == (True, True)
    assert x_of(pair.payload) == x_of(answer.payload) + SHIFT
    assert len(stage.published) == published + 1
    assert os.getpriority(os.PRIO_PROCESS, shadow.pool.workers[0].pid) == 19


def test_given_a_shadow_that_fails_or_dies_then_the_stage_serves_on_and_the_pair_says_so(stage, shadow):
    pid = shadow.pool.workers[0].pid
    answer, pair = ask_both(stage, shadow, {"do": "raise", "only": pid})
    assert (answer.outcome, pair.outcome, pair.payload, pair.late) == (
        Outcome.ON_TIME,
        Outcome.ERROR,
        None,
        True,
    )
    answer, pair = ask_both(stage, shadow, {"do": "os_exit", "only": pid})
    assert (answer.outcome, pair.outcome) == (Outcome.ON_TIME, Outcome.CRASHED)
    assert stage.counters.late_results == stage.actor.pool.restarts == 0
    wait_until(lambda: shadow.deaths == 1 and shadow.pool.ready, lambda: shadow.pool.progress)
    assert ask_both(stage, shadow)[1].payload is not None


def test_given_frames_one_after_the_other_then_the_shadow_skips_what_has_no_slack_and_observes_it(
    stage, shadow
):
    with stage.running(only=stage.pids[0]) as (first, _):
        second, stamp_ns = stage.offer()  # waits for its turn, so that the first one leaves no slack
    assert [pair_of(stage, shadow, second).answer.frame.seq, shadow.skipped] == [second, 1]
    pid = shadow.pool.workers[0].pid
    assert len(stage.notes("observed", pid)) == 2
    assert stage.notes("preprocessed", pid)[-1:] == [stamp_ns]
    assert first == second - 1


def test_given_a_frame_while_the_shadow_runs_another_then_the_time_of_that_one_says_nothing(stage, shadow):
    with stage.running(only=shadow.pool.workers[0].pid) as (first, _):
        wait_until(lambda: shadow.is_running, lambda: "the shadow's run")
        stage.ask()
    pair = pair_of(stage, shadow, first)
    assert (pair.payload is not None, pair.disturbed, pair.timed, pair.late) == (True, True, False, False)
    _, pair = ask_both(stage, shadow)
    assert (pair.payload is not None, pair.disturbed, pair.timed) == (True, False, True)


def test_given_a_frame_that_ends_its_runner_then_the_shadow_does_not_get_it_and_knows_of_the_gap(
    stage, shadow
):
    ask_both(stage, shadow)
    pid = shadow.pool.workers[0].pid
    deadly = stage.ask({"do": "os_exit"})
    assert deadly.outcome is Outcome.CRASHED
    wait_until(lambda: stage.actor.pool.ready, lambda: stage.actor.pool.progress)
    assert ask_both(stage, shadow)[1].payload is not None
    assert (shadow.deaths, stage.notes("missed", pid)) == (0, [1])


def test_given_an_exchange_when_frames_come_then_the_other_version_serves_at_once_and_back_again(
    stage, shadow
):
    before = x_of(stage.ask(x=3.0).payload)
    exchange(stage, "new")
    answer, pair = ask_both(stage, shadow, x=3.0)
    assert (answer.outcome, x_of(answer.payload)) == (Outcome.ON_TIME, before + SHIFT)
    assert (pair.payload is not None, x_of(pair.payload)) == (True, before)  # the old one stays warm
    stage.reconfigure(budget_ms=4000.0)
    assert stage.actor.config.adapter.endswith("Shifted")
    assert stage.ask().budget_ms == 4000.0
    exchange(stage, "base")
    assert x_of(stage.ask(x=3.0).payload) == before
    stage.actor.shadow.remove()
    assert (stage.ask().outcome, stage.actor.shadow) == (Outcome.ON_TIME, None)
    stage.settle_accounts()


def test_given_another_version_serves_when_the_own_one_is_put_beside_then_it_has_its_own_configuration(
    stage,
):
    own, setup = stage.actor.config, stage.actor.model.setup
    ready_shadow(stage)
    exchange(stage, "new")
    stage.actor.shadow.remove()
    Shadow(stage.actor, "base", own, {}, setup)
    assert (stage.actor.shadow.pool.config.adapter, stage.actor.config.adapter) == (
        own.adapter,
        f"{ADAPTERS}:Shifted",
    )
    wait_until(lambda: stage.actor.shadow.pool.ready, lambda: stage.actor.shadow.pool.progress)
    exchange(stage, "base")
    assert stage.actor.config == own
    assert x_of(stage.ask(x=3.0).payload) % 1 == 0


def test_given_deaths_before_anybody_looks_at_the_exchange_then_they_are_of_the_version_that_has_them(
    stage,
    shadow,
):
    trial = Trial(stage.actor, "new")
    stage.ask({"do": "os_exit"})  # of the version that is to be replaced
    wait_until(lambda: stage.actor.pool.ready, lambda: stage.actor.pool.progress)
    exchange(stage, "new")
    assert stage.ask({"do": "os_exit"}).outcome is Outcome.CRASHED
    wait_until(lambda: stage.actor.pool.ready, lambda: stage.actor.pool.progress)
    trial.changed_places()
    assert (trial.figures().deaths, trial.figures().frames) == (1, 1)
    exchange(stage, "base")
    os.kill(shadow.pool.workers[0].pid, signal.SIGKILL)
    wait_until(lambda: shadow.deaths == 1, lambda: shadow.pool.progress)
    trial.changed_places()
    assert trial.figures().deaths == 1


def test_given_an_exchange_while_a_frame_is_in_flight_then_the_one_that_has_it_answers_it(stage):
    ready_shadow(stage)
    with stage.running(only=stage.pids[0]) as (seq, _):
        stage.actor.shadow.exchange()
        later = stage.offer()[0]
    assert x_of(stage.answer(seq).payload) + SHIFT == x_of(stage.answer(later).payload)
    stage.actor.shadow.remove()  # which is the old one now
    assert stage.actor.version == "new"
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_a_shadow_that_dies_before_the_frame_in_flight_is_answered_then_it_does_not_begin_to_serve(
    start_own_stage,
):
    stage = start_own_stage(backup="none", budget_ms=60_000.0, hang_ms=60_000.0)
    shadow = ready_shadow(stage)
    os.kill(stage.pids[0], signal.SIGSTOP)
    seq, _ = stage.offer()
    stage.actor.shadow.exchange()
    # when the next is started: not before the test wants it
    shadow.pool.policies[0].died = lambda *_, **__: 1 << 62
    os.kill(shadow.pool.workers[0].pid, signal.SIGKILL)
    wait_until(lambda: shadow.deaths == 1, lambda: shadow.pool.progress)
    os.kill(stage.pids[0], signal.SIGCONT)
    stage.answer(seq)
    stage.wait_for(
        lambda: any("does not begin to serve" in one.message for one in stage.anomalies), "it says so"
    )
    assert (stage.actor.version, stage.actor.shadow.exchanges) == ("base", False)
    assert stage.ask().outcome is Outcome.ON_TIME
    shadow.pool._start_at_ns[0] = 0
    wait_until(lambda: shadow.pool.ready, lambda: shadow.pool.progress)
    exchange(stage, "new")  # as the roll-out does that asks again


@pytest.mark.parametrize("whose", ["shadow", "stage"])
def test_given_a_pool_that_is_about_to_tell_of_a_death_when_an_exchange_is_due_then_it_tells_the_right_side(
    stage, shadow, whose
):
    pool = {"shadow": shadow.pool, "stage": stage.actor.pool}[whose]
    with stage.actor.lock:  # which the pool's thread waits for
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        wait_until(pool.telling.locked, lambda: "it has noticed")
        stage.actor.shadow.exchanges = True
        shadow.before_turn(time.monotonic_ns())
        assert (stage.actor.version, stage.actor.shadow.exchanges) == ("base", True)
    wait_until(lambda: not stage.actor.shadow.exchanges, lambda: "the exchange, or a word")
    assert stage.actor.version == ("base" if whose == "shadow" else "new")
    for each in (stage.actor.pool, shadow.pool):
        wait_until(lambda: each.ready, lambda: each.progress)  # noqa: B023
    wait_until(lambda: not stage.actor.model.crew.runs, lambda: "no run is left")
    assert not shadow.model.crew.runs

    def runs_a_frame():
        stage.ask()  # where the machine is busy, the shadow skips some
        return [pair for pair in shadow.take_pairs() if pair.payload is not None]

    wait_until(runs_a_frame, lambda: "the shadow runs frames")


def test_given_the_stage_has_a_standby_when_promoted_then_the_version_has_one_too_before_it_serves(
    start_own_stage,
):
    stage = start_own_stage(backup="standby")
    shadow = ready_shadow(stage)
    assert (len(shadow.pool.workers), shadow.ready) == (1, False)
    wait_until(lambda: shadow.promote() or shadow.ready, lambda: shadow.pool.progress)
    exchange(stage, "new")
    wait_until(lambda: priorities(stage) == [0, 0], lambda: priorities(stage))
    answer = stage.ask({"do": "raise", "only": stage.pids[0]})  # a failure of one is answered by the other
    assert (answer.fallback, answer.outcome) in {(None, Outcome.ON_TIME), (Fallback.BACKUP, Outcome.ERROR)}


def test_given_a_version_that_had_to_serve_at_once_when_promoted_then_it_gets_its_standby_and_their_priority(
    start_own_stage,
):
    stage = start_own_stage(backup="standby")
    ready_shadow(stage)
    exchange(stage, "new")
    stage.actor.shadow.remove()
    assert priorities(stage) == [19]
    wait_until(lambda: not promote(stage.actor.model), lambda: stage.actor.pool.progress)
    stage.wait_for_workers()
    wait_until(lambda: priorities(stage) == [0, 0], lambda: priorities(stage))
    assert stage.ask().outcome is Outcome.ON_TIME


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"adapter": "adapters_under_test:GivesPoints"},
            "it publishes geometry_msgs/msg/PointStamped, the version",
        ),
        ({"adapter": "adapters_under_test:NoSuchClass"}, "its workers keep dying"),
    ],
)
def test_given_a_version_that_cannot_stand_beside_then_it_is_refused_and_the_stage_serves_on(
    stage, given, why
):
    shadow = add_shadow(stage, **given)
    wait_until(lambda: shadow.refused, lambda: shadow.pool.progress)
    assert why in shadow.refused
    with pytest.raises(ConfigError, match="has no other version whose workers are ready"):
        stage.actor.shadow.exchange()
    assert stage.ask().outcome is Outcome.ON_TIME
    with pytest.raises(ConfigError, match="has version new beside it already"):
        add_shadow(stage)
    stage.actor.shadow.remove()
    assert stage.ask().outcome is Outcome.ON_TIME


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tiers": ["other"]}, "tiers cannot be changed; a candidate changes adapter, options"),
        ({}, "is what stage tested runs already; it has to change one of adapter, options"),
        ({"engine": "warp"}, "parameter tested.engine: 'warp' is not allowed"),
    ],
)
def test_given_a_candidate_that_changes_nothing_or_what_it_may_not_then_the_error_says_what_it_may(
    given, why
):
    values = {"adapter": "module:Class", "output": "path"}
    with pytest.raises(ConfigError, match=why):
        candidate_of("new", given, "tested", values, "candidate new.yaml")


def test_given_less_memory_than_a_worker_has_when_asked_for_room_then_the_pool_says_what_is_missing(
    stage, monkeypatch
):
    assert stage.actor.pool.why_no_room() == ""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    why = stage.actor.pool.why_no_room()
    assert re.fullmatch(r"a worker of stage tested has \d+ MiB of its own, 1 MiB are free", why)
    monkeypatch.undo()
    stage.actor.pool.workers[0].reported.memory_bytes |= {"reserved": 64 << 20, "free": 63 << 20}
    assert stage.actor.pool.why_no_room().endswith("has 64 MiB of its own on the device, 63 MiB are free")


def test_given_a_parameter_file_when_read_as_a_candidate_then_what_it_says_of_the_stage_counts(tmp_path):
    path = tmp_path / "tuned.yaml"
    stage = "{adapter: 'm:C', output: path, engine: openvino}"
    path.write_text(f"/**/perf: {{ros__parameters: {{worker_threads: 2, tested: {stage}}}}}")
    values = {"adapter": "m:C", "output": "path", "engine": "eager"}
    candidate = read_candidate(path, "tested", values)
    assert (candidate.version, dict(candidate.changes)) == ("tuned", {"engine": "openvino"})
    path.write_text(path.read_text().replace("output: path", "output: road"))
    with pytest.raises(ConfigError, match="tuned.yaml: output cannot be changed"):
        read_candidate(path, "tested", values)


def test_given_a_frame_while_the_shadow_runs_then_it_stands_still_until_the_answer_and_is_not_taken_for_hung(
    start_own_stage,
):
    stage = start_own_stage(backup="none", hang_ms=2000.0, budget_ms=2000.0)
    shadow = ready_shadow(stage)
    (worker,) = shadow.pool.workers
    held = []
    shadow.comparing = held.append
    with stage.running(only=worker.pid) as (first, _):
        wait_until(lambda: shadow.is_running, lambda: "the shadow's run")
        with stage.running(only=stage.pids[0]) as (second, _):
            wait_until(
                lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED, lambda: "a stop"
            )
            later = stage.offer({"do": "sleep", "ms": 1200, "only": stage.pids[0]})[0]
            time.sleep(1.0)  # with the later frame it stands still for longer than `hang_ms`
        stage.answer(second)
        assert psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
        stage.answer(later)
    pair = pair_of(stage, shadow, first)
    assert (pair.outcome, pair.disturbed, shadow.deaths) == (Outcome.ON_TIME, True, 0)
    assert psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED
    assert held == [True, False, True, True, False]
    assert ask_both(stage, shadow)[1].timed


def test_given_frames_without_a_pause_when_the_ring_has_gone_round_then_the_shadow_has_skipped_that_frame(
    stage,
    shadow,
):
    pid, skipped = shadow.pool.workers[0].pid, shadow.skipped
    stage.ask({"do": "sleep", "ms": 300, "only": pid})
    for _ in range(200):
        stage.ask()
    wait_until(lambda: shadow.skipped > skipped, lambda: "a skipped frame")


def test_given_a_shadow_when_parameters_change_then_its_pool_has_them_too_also_after_an_exchange(
    start_own_stage,
):
    stage = start_own_stage(backup="standby")
    shadow = ready_shadow(stage)
    stage.reconfigure(hang_ms=12_345.0, budget_ms=4321.0)
    pool = shadow.pool
    assert (pool.config.hang_ms, pool.config.budget_ms, pool.config.backup) == (12_345.0, 4321.0, "none")
    assert pool.config.adapter == f"{ADAPTERS}:Shifted"
    exchange(stage, "new")
    assert stage.actor.pool is pool
    assert stage.actor.pool.config.hang_ms == 12_345.0
    stage.reconfigure(hang_ms=23_456.0)
    assert stage.actor.pool.config.hang_ms == stage.actor.shadow.pool.config.hang_ms == 23_456.0
    assert stage.actor.shadow.pool.config.adapter.endswith("Controlled")
    assert stage.actor.shadow.pool.config.backup == "standby"


def test_given_a_scene_that_the_version_before_named_when_the_other_one_serves_then_it_is_named_anew(stage):
    ready_shadow(stage)
    stage.ask()
    stage.actor.scenes.name(0, stage.actor.pool.workers[0], stage.counters.frames)
    exchange(stage, "new")
    assert (stage.actor.scenes.word, stage.actor.scenes.word_of) == (-1, None)


def test_given_a_stale_frame_when_answered_then_it_is_no_pair_and_the_shadow_observes_it(stage, shadow):
    """That the base was late says nothing about it; it would lose each of these pairs."""
    pair_of(stage, shadow, stage.ask(x=3.0).frame.seq)
    (pid,) = [worker.pid for worker in shadow.pool.everyone]
    stage.reconfigure(budget_from="stamp", budget_ms=1000.0)
    stamp_ns = time.time_ns() - 3_000_000_000
    assert stage.ask(stamp_ns=stamp_ns).frame.stale
    wait_until(lambda: stamp_ns in stage.notes("observed", pid), lambda: "the shadow observes it")
    stage.reconfigure()
    later = stage.ask(x=4.0)
    assert pair_of(stage, shadow, later.frame.seq).answer is later
    assert shadow.figures.total.base_late == 0


@pytest.mark.parametrize(("lateness_ms", "late"), [(-30.0, False), (-5.0, True)])
def test_given_a_budget_that_had_partly_passed_when_paired_then_the_shadow_has_the_time_to_the_deadline(
    make_answer, lateness_ms, late
):
    """Both took 20 ms of a budget of 50, and the shadow would take 10 ms more.

    The second had 25 ms to its deadline.
    """
    answer = make_answer(total_ms=20.0, lateness_ms=lateness_ms)
    answer.steps = StepTimes(1.0, 1.0, 7.0, 1.0)
    assert Pair(answer, Outcome.ON_TIME, 20.0, b"x", b"x").late is late


def test_given_a_stage_that_is_off_when_frames_come_then_no_version_runs_or_observes_them_and_both_know_of_the_gap(
    stage,
    shadow,
):
    pids = [*stage.pids, shadow.pool.workers[0].pid]
    ask_both(stage, shadow)
    stage.actor.actions.off = True
    for _ in range(3):
        answer = stage.ask()
        assert (answer.outcome, answer.length > 0) == (Outcome.BAD_INPUT, True)
    stage.actor.actions.off = False
    _, pair = ask_both(stage, shadow)
    assert pair.payload is not None
    assert [len(stage.notes("preprocessed", pid)) for pid in pids] == [2, 2]
    assert [stage.notes("missed", pid) for pid in pids] == [[3], [3]]


def test_given_another_version_beside_then_the_plans_of_both_can_be_judged_as_they_are_by_what_the_guard_knows(
    start_own_stage,
):
    stage = start_own_stage(backup="none", tiers=["full"], **GUARD)
    shadow = ready_shadow(stage)
    tell(stage)
    _, free = ask_both(stage, shadow)
    assert [Guard.refusal(plan, free.known) for plan in (free.served, free.payload)] == ["", ""]
    tell(stage, obstacles=[9.0])
    answer, pair = ask_both(stage, shadow)
    pair = pickle.loads(pickle.dumps(pair))
    assert answer.check is not GuardVerdict.ACCEPT
    assert answer.payload != pair.served  # what the stage has published is the guard's
    assert x_of(pair.payload) == x_of(pair.served) + SHIFT
    for plan in (pair.served, pair.payload):
        assert Guard.refusal(plan, pair.known).startswith("distance: the plan ")
    stage.actor.shadow.remove()
