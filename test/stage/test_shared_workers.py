"""Two stages whose workers share processes: they answer, fall and come back together, and pay for their own faults."""

import os
import resource
import signal
import socket
import time

import pytest

from torchperf_ros.frame.outcome import Fallback, Outcome
from torchperf_ros.telemetry.diagnostics import stage_status
from torchperf_ros.telemetry.memory import sample_memory
from torchperf_ros.workers.process_setup import is_readable
from torchperf_ros.workers.shared_process import share_processes

from .conftest import PATIENCE_S, StageUnderTest, wait_until


class Pair:
    """Two stages that share their workers' processes; each has its own folder."""

    def __init__(self, tmp_path_factory, *, start_second=True, **values):
        options = {"worker": "shared", "backup": "standby", "forgiving": False, **values}
        self.first, self.second = (
            StageUnderTest(tmp_path_factory.mktemp(name), name=name, **{**options, **options.pop(name, {})})
            for name in ("first", "second")
        )
        self.both = (self.first, self.second)
        share_processes([stage.actor.pool for stage in self.both])
        for stage in self.both[: 1 + start_second]:
            stage.start(wait=False)
        for stage in self.both[: 1 + start_second]:
            stage.wait_for_workers()

    def worker(self, stage, pid):
        (found,) = [worker for worker in stage.actor.pool.everyone if worker.pid == pid]
        return found

    def runner_pid(self, stage):
        """Of the process that answers a frame of this stage."""
        return int(stage.payload(stage.ask()).header.frame_id)

    def together(self):
        """Have both stages run in one process, which their standbys do not; returns its pid."""
        pid = self.runner_pid(self.second)

        def runs_there():
            worker = self.worker(self.first, pid)
            with self.first.actor._lock:
                self.first.actor._dispatcher._preferred = worker  # which may be practising
            return self.runner_pid(self.first) == pid

        wait_until(runs_there, lambda: f"the first stage runs in {pid}")
        self.wait_for_all()  # nor does one of them practise there
        return pid

    def stop(self, *stages):
        for stage in stages or self.both:
            if stage.actor._open:
                stage.actor.stop()

    def wait_for_all(self):
        for stage in self.both:
            stage.wait_for_workers()


@pytest.fixture
def start_pair(tmp_path_factory):
    pairs = []

    def start(**values):
        pairs.append(Pair(tmp_path_factory, **values))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """One pair for what leaves both stages as it found them."""
    found = Pair(tmp_path_factory)
    yield found
    found.stop()


def reasons(stage):
    return [text for severity, text in stage.logs if "ended by" in text]


def early_deaths(stage):
    return [policy._early_deaths for policy in stage.actor.pool.policies]


def test_given_two_stages_when_started_then_they_answer_in_two_processes_and_run_in_different_ones(pair):
    assert set(pair.first.pids) == set(pair.second.pids)
    assert len(set(pair.first.pids)) == 2
    assert pair.first.pids == pair.second.pids[::-1]
    assert [stage.ask().outcome for stage in pair.both] == [Outcome.ON_TIME] * 2


def test_given_shared_processes_when_memory_is_looked_at_then_each_counts_once_as_the_first_stages_and_says_so(pair):
    pair.wait_for_all()
    actors = [stage.actor for stage in pair.both]
    use = sample_memory(actors)
    assert use.rss_by_pid.keys() == set(pair.first.pids)
    assert [[worker.is_counted for worker in actor.pool.workers] for actor in actors] == [[True] * 2, [False] * 2]
    values = [
        stage_status(actor, stage.health, use.rss_by_pid).values for actor, stage in zip(actors, pair.both, strict=True)
    ]
    assert [each["worker_0_shared_with"] for each in values] == ["second", "first"]


@pytest.mark.parametrize(
    ("do", "how"), [("sigsegv", "signal SIGSEGV"), ("os_exit", "exit status 3"), ("sigkill", "signal SIGKILL")]
)
def test_given_a_crash_in_one_stage_then_its_frame_costs_it_and_the_other_one_is_back_at_once_and_says_whose_it_was(
    pair, do, how
):
    for stage in pair.both:
        stage.wait_for_workers()
        stage.logs.clear()
    pid, before = pair.together(), early_deaths(pair.second)
    assert pair.first.ask({"do": do}).outcome is Outcome.CRASHED
    answer = pair.second.ask()  # at once: it may be given to the process that is just ending
    assert answer.outcome is Outcome.ON_TIME or answer.fallback is Fallback.BACKUP
    wait_until(lambda: all(reasons(stage) for stage in pair.both), lambda: [stage.logs for stage in pair.both])
    pair.wait_for_all()
    assert set(pair.first.pids) == set(pair.second.pids)
    assert pid not in pair.first.pids
    (own,), (others,) = reasons(pair.first), reasons(pair.second)
    assert f"(pid {pid}) ended by {how}" in own
    assert "because of" not in own
    assert ("Current thread" in own) == (do == "sigsegv")
    assert f"(pid {pid}) ended by {how}, because of stage first in the same process" in others
    assert early_deaths(pair.second) == before


def test_given_a_frame_in_flight_when_the_other_stage_ends_their_process_then_the_standby_answers_it(pair):
    pair.wait_for_all()
    pid = pair.together()
    pair.second.reconfigure(budget_ms=15_000.0)  # a busy machine takes long to see that the process has ended
    second, _ = pair.second.offer({"do": "sleep", "ms": 600_000, "only": pid}, x=3.0)
    wait_until(lambda: pair.worker(pair.second, pid).seq == second, lambda: "it runs")
    pair.first.ask({"do": "sigsegv"})
    answer = pair.second.answer(second)
    assert (answer.outcome, answer.fallback) == (Outcome.CRASHED, Fallback.BACKUP)
    assert pair.second.payload(answer).poses[0].pose.position.x == pytest.approx(1003.0)
    pair.second.reconfigure()
    pair.wait_for_all()


@pytest.mark.parametrize("hang_ms", [400.0, 600_000.0])  # the other stage's pool kills where its own is more patient
def test_given_a_stage_that_hangs_when_it_holds_the_interpreter_then_it_is_the_reason_that_both_give(
    start_pair, hang_ms
):
    pair = start_pair(budget_ms=400.0, hang_ms=400.0, first={"hang_ms": hang_ms})
    pair.together()
    late, _ = pair.first.offer({"do": "hold_gil", "ms": 600_000})

    def both_say_why():
        pair.second.offer()  # the first frames may come before the interpreter is held
        return all(reasons(stage) for stage in pair.both)

    wait_until(both_say_why, lambda: [stage.logs for stage in pair.both])
    assert pair.first.answer(late).outcome in {Outcome.LATE, Outcome.HUNG}
    assert "because of" not in reasons(pair.first)[0]
    assert "because of stage first in the same process: hung: " in reasons(pair.second)[0]
    pair.wait_for_all()
    assert [stage.ask().outcome for stage in pair.both] == [Outcome.ON_TIME] * 2


def test_given_a_stage_that_cannot_load_then_the_other_one_keeps_its_processes_and_the_error_is_said(start_pair):
    pair = start_pair(start_second=False, second={"options": {"at_start": {"init": "config_error"}}})
    pids = pair.first.pids
    pair.second.start(wait=False)
    wait_until(lambda: pair.second.actor.pool.gave_up, lambda: pair.second.actor.pool.progress)
    assert "ended by the end of its session: option speed: -1 is not allowed" in pair.second.actor.pool.last_error
    assert pair.first.ask().outcome is Outcome.ON_TIME
    assert pair.first.pids == pids
    assert pair.first.actor.pool.restarts == 0


def test_given_a_renewal_of_one_stage_then_its_sessions_change_and_the_processes_and_the_other_one_do_not(start_pair):
    pair = start_pair()
    pids, workers = pair.first.pids, list(pair.first.actor.pool.workers)
    pool = pair.first.actor.pool
    pool.rolling_update.renewal.ask()
    asked = 0
    give_up_at = time.monotonic() + PATIENCE_S
    while any(worker in workers for worker in pool.workers) or pool.rolling_update.candidate is not None:
        assert time.monotonic() < give_up_at, pool.progress
        assert pair.second.ask().outcome is Outcome.ON_TIME
        asked += 1
    assert asked
    assert pair.first.pids == pair.second.pids[::-1] == pids
    assert pair.first.ask().outcome is Outcome.ON_TIME
    assert [stage.actor.pool.restarts for stage in pair.both] == [0, 0]


def test_given_a_stage_that_stops_then_the_other_one_serves_on_and_the_last_one_ends_the_processes(start_pair):
    pair = start_pair()
    pidfds = [os.dup(worker.pidfd) for worker in pair.first.actor.pool.workers]
    pair.stop(pair.second)
    assert pair.first.ask().outcome is Outcome.ON_TIME
    assert pair.first.actor.pool.restarts == 0
    pair.stop(pair.first)
    for pidfd in pidfds:
        assert is_readable(pidfd, PATIENCE_S)
        os.close(pidfd)


def test_given_a_fork_server_that_is_killed_then_both_stages_get_another_one_that_they_share_again(start_pair):
    pair = start_pair(backup="none")
    before = pair.first.pids
    assert pair.second.pids == before  # one place, one process
    os.kill(pair.first.actor.pool._server._server._pid, signal.SIGKILL)
    wait_until(lambda: not {*pair.first.pids, *pair.second.pids} & set(before), lambda: "the workers are gone")
    pair.wait_for_all()
    assert pair.first.pids == pair.second.pids
    assert [stage.ask().outcome for stage in pair.both] == [Outcome.ON_TIME] * 2


def test_given_an_error_or_bad_input_in_one_stage_then_no_worker_ends(pair):
    pair.wait_for_all()
    pids = pair.first.pids
    assert pair.first.ask({"do": "exit"}).outcome is Outcome.ERROR
    assert pair.first.ask({"do": "bad_input"}).outcome is Outcome.BAD_INPUT
    assert pair.first.pids == pids


def test_given_a_process_without_descriptors_when_a_session_is_to_join_then_the_others_live_and_it_is_tried_again(
    start_pair,
):
    pair = start_pair(forgiving=True, second={"start_timeout_s": 250.0})
    pid = pair.runner_pid(pair.second)
    worker = pair.worker(pair.second, pid)
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limit[1]))  # what it has open stays open
    try:
        worker.frames.shutdown(socket.SHUT_RDWR)  # which ends its session
        ends = lambda: [text for text in reasons(pair.second) if "the end of its session" in text]  # noqa: E731
        pair.second.wait_for(lambda: len(ends()) >= 3, "others cannot join")
        assert pid in pair.first.pids
        assert [stage.ask().outcome for stage in pair.both] == [Outcome.ON_TIME] * 2
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    pair.wait_for_all()
    assert pid in pair.second.pids
    assert not reasons(pair.first)


def test_given_a_session_that_ends_again_and_again_then_its_process_remembers_the_last_ones_only(start_pair):
    pair = start_pair(forgiving=True)
    pid = pair.runner_pid(pair.second)
    for _ in range(20):
        wait_until(lambda: pid in pair.second.pids, lambda: "the process has a session of it again")
        worker = pair.worker(pair.second, pid)
        worker.frames.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: worker not in pair.second.actor.pool.everyone, lambda: "it is replaced")  # noqa: B023
        pair.second.wait_for_workers()
    assert len(pair.worker(pair.first, pid).seat.process.seats) <= 19
