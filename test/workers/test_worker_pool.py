"""Workers that cannot start, cannot be started, or keep dying."""

import contextlib
import ctypes
import errno
import os
import re
import signal

import psutil
import pytest

from torchperf_ros.api.errors import ProtocolError, how_it_ended
from torchperf_ros.api.outcome import Fallback, Health, Outcome
from torchperf_ros.stage import practice
from torchperf_ros.workers import worker_pool as pool_module
from torchperf_ros.workers import worker_process
from torchperf_ros.workers.fork_server import ForkServer, start_base
from torchperf_ros.workers.package_cache import open_cache

from ..stage.conftest import wait_until

HOPELESS = {
    "no_such_module": ({"adapter": "nowhere:Nothing"}, "importing nowhere failed: ModuleNotFoundError"),
    "unknown_type": ({"adapter": "UnknownOutput"}, "install nowhere_msgs"),
    "bad_option": ({"options": {"at_start": {"init": "config_error"}}}, "option speed: -1 is not allowed"),
}
"""What no restart can mend: stage parameters, and what the stage then says."""


@pytest.mark.parametrize("name", HOPELESS)
def test_given_an_error_that_no_restart_mends_then_the_stage_gives_up_at_once_and_says_why(
    start_own_stage, name
):
    values, said = HOPELESS[name]
    stage = start_own_stage(wait=False, forgiving=False, backup="none", budget_ms=50.0, **values)
    stage.wait_for(
        lambda: any(a.name == "tested: worker died" for a in stage.anomalies), "the death is told"
    )
    pool = stage.actor.pool
    assert pool.gave_up
    assert pool.restarts == 1
    assert said in pool.last_error
    assert "exit status 1" in pool.last_error
    assert stage.health is Health.SAFE_STOP
    assert re.fullmatch(r"worker 0 waits for its restart in (\d\d s)", pool.progress)
    assert ("error", True) in [(severity, said in text) for severity, text in stage.logs]
    answer = stage.ask()
    assert (answer.outcome, answer.fallback) == (Outcome.STARTING, Fallback.NONE)


def test_given_a_worker_that_keeps_dying_when_given_up_then_restarts_were_few_and_the_traceback_is_there(
    start_own_stage, monkeypatch
):
    monkeypatch.setattr(pool_module, "_LASTING_DEATHS", 2)
    monkeypatch.setattr(pool_module, "_FIRST_DELAY_NS", 1 << 40)
    monkeypatch.setattr(pool_module, "_LONGEST_DELAY_NS", 1 << 40)
    stage = start_own_stage(
        wait=False, forgiving=False, backup="none", options={"at_start": {"init": "raise"}}
    )

    stage.wait_for(
        lambda: any(death.level.name == "ERROR" for death in deaths(stage)), "the lasting failure is told"
    )
    pool = stage.actor.pool
    assert [death.level.name for death in deaths(stage)] == ["WARN", "ERROR"]
    assert stage.health is Health.SAFE_STOP
    assert pool.gave_up
    assert pool.restarts == 2
    assert "RuntimeError: the model has had enough" in pool.last_error
    assert "Traceback (most recent call last)" in pool.last_error
    assert stage.pids == []


def test_given_a_worker_that_is_not_ready_in_time_then_it_is_killed_and_says_how_far_it_was(
    start_own_stage,
):
    stage = start_own_stage(
        wait=False, backup="none", start_timeout_s=0.2, options={"at_start": {"init": "spin"}}
    )
    stage.wait_for(lambda: any("not ready after 0 s (" in text for _, text in stage.logs), "it is killed")


def test_given_options_that_no_message_holds_when_started_then_the_stage_says_so_and_leaves_nothing(
    start_own_stage,
):
    start_base()
    children = {child.pid for child in psutil.Process().children()}
    descriptors = set(os.listdir("/proc/self/fd"))
    stage = start_own_stage(wait=False, forgiving=False, backup="none", options={"labels": ["x" * 70_000]})
    stage.wait_for(lambda: any("at most 65536" in text for _, text in stage.logs), "the log says so")
    assert "at most 65536" in stage.actor.pool.last_error
    stage.wait_for(
        lambda: any(one.level.name == "ERROR" for one in stage.anomalies), "the lasting failure is told"
    )
    assert {one.name for one in stage.anomalies} == {"tested: worker died"}
    assert stage.health is Health.SAFE_STOP
    stage.actor.stop()
    stage.actor.stop = lambda: None  # the fixture need not do it again
    assert {child.pid for child in psutil.Process().children()} <= children
    assert set(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("refusal", [OSError(errno.EAGAIN, "no more processes"), MemoryError()], ids=repr)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_given_a_machine_that_cannot_start_a_process_now_when_it_can_again_then_the_worker_is_started(
    start_own_stage, monkeypatch, refusal
):
    refusals = iter([True])

    def refuse_once(*values):
        if next(refusals, False):
            raise refusal
        return ForkServer(*values)

    monkeypatch.setattr(pool_module, "ForkServer", refuse_once)
    stage = start_own_stage(backup="none")
    assert stage.ask().outcome is Outcome.ON_TIME
    assert next(refusals, None) is None
    said = f"worker 0 cannot be started: {type(refusal).__name__}: {refusal}"
    (logged,) = [text for _, text in stage.logs if said in text]
    assert ("Traceback" in logged) is (
        not isinstance(refusal, OSError)
    )  # an unexpected error says where it was
    assert [one.level.name for one in stage.anomalies if said in one.message] == ["WARN"]


def test_given_a_process_with_more_than_a_thousand_descriptors_then_its_worker_is_looked_after(
    start_own_stage,
):
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        stage = start_own_stage(backup="none")
        assert stage.ask().outcome is Outcome.ON_TIME
        assert stage.actor.pool.restarts == 0
    finally:
        for descriptor in many:
            os.close(descriptor)


def test_given_a_bad_package_on_trial_then_it_is_replaced_and_the_swap_says_why_it_failed(
    start_own_stage, tmp_path
):
    for name in ("broken.pt2", "another.pt2"):
        (tmp_path / name).write_bytes(b"no package")
    stage = start_own_stage(backup="standby", node={"package_dirs": [str(tmp_path)]})
    pool = stage.actor.pool
    pool.rolling_update.swap("full", str(tmp_path / "broken.pt2"))
    wait_until(lambda: pool.rolling_update.candidate, lambda: "a candidate is started")
    candidate = pool.rolling_update.candidate
    os.kill(candidate.pid, signal.SIGSTOP)  # before it finds the package
    killed = stage.pids[1]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in stage.pids, lambda: "its death is noticed")
    stage.wait_for_workers()
    assert pool.rolling_update.swap_state[1].startswith("swapping: ")
    os.kill(candidate.pid, signal.SIGCONT)
    wait_until(lambda: pool.rolling_update.candidate is None, lambda: "the candidate is gone")
    done, why = pool.rolling_update.swap_state
    assert not done
    assert "broken.pt2" in why
    assert pool.restarts == 1
    assert not [text for _, text in stage.logs if "failed:\n" in text]
    assert stage.ask().outcome is Outcome.ON_TIME
    pool.rolling_update.swap("full", str(tmp_path / "another.pt2"))


def test_given_a_standby_that_stands_still_when_its_queue_is_full_and_it_is_needed_then_it_is_replaced(
    start_own_stage, monkeypatch
):
    """Observations pile up in its socket; when it has to take over, it cannot even be handed the frame."""
    monkeypatch.setattr(
        practice, "REHEARSE_AFTER_NS", 1 << 62
    )  # a rehearsal would find out, and a kill follow
    stage = start_own_stage(backup="standby", hang_ms=60_000.0)  # which it would be killed for
    runner, standby = stage.actor.pool.workers
    os.kill(standby.pid, signal.SIGSTOP)
    for _ in range(2000):
        stage.ask()
        if stage.counters.missed_observations:
            break
    assert stage.counters.missed_observations
    stage.reconfigure(hang_ms=5000.0)
    runner.kill("the test needs the standby")
    stage.wait_for(
        lambda: any(f"(pid {runner.pid}) ended" in text for _, text in stage.logs), "the runner is dead"
    )
    stage.ask()
    wait_until(lambda: standby.pid not in stage.pids, lambda: "the standby is replaced")


def test_given_a_standby_that_never_returns_from_observe_then_it_is_replaced(start_own_stage, monkeypatch):
    """No frame waits for it yet, but it could not take over."""
    monkeypatch.setattr(practice, "REHEARSE_AFTER_NS", 1 << 62)
    stage = start_own_stage(backup="standby", hang_ms=1000.0, budget_ms=900.0)
    _, standby = stage.actor.pool.workers
    stage.ask({"do": "spin", "where": "observe", "only": standby.pid})
    wait_until(lambda: standby.pid not in stage.pids, lambda: "the standby is replaced")


def test_given_a_model_that_cannot_be_captured_when_started_then_the_next_runs_without_graphs_and_on_the_same_device(
    start_own_stage, monkeypatch
):
    setups, start = [], pool_module.WorkerProcess
    monkeypatch.setattr(pool_module, "WorkerProcess", lambda *how: (setups.append(how[1]), start(*how))[1])
    stage = start_own_stage(
        adapter="Uncapturable", backup="none", compile_mode="reduce-overhead", forgiving=False
    )
    assert stage.ask().outcome is Outcome.ON_TIME
    assert not any(severity == "error" for severity, _ in stage.logs)  # each may be another tier's
    (told,) = [text for severity, text in stage.logs if "without CUDA graphs" in text]
    assert "it cannot be captured; the next worker runs without CUDA graphs" in told
    assert stage.actor.pool.restarts == 4
    assert [setup.device_before for setup in setups] == ["", *["cpu"] * 4]


@pytest.mark.parametrize("does", ["sigkill", "sigsegv", "spin"])
def test_given_workers_that_end_while_they_capture_when_the_pool_sees_two_die_then_that_is_kept_unless_it_ends_them(
    start_own_stage, tmp_path, does
):
    stage = start_own_stage(
        adapter="Capturing",
        backup="none",
        options={"cache": str(tmp_path), "does": does},
        node={"cache_dir": str(tmp_path)},
        wait=does != "spin",
    )
    if does == "spin":
        wait_until(
            lambda: [one for one in stage.actor.pool.everyone if one.reported.capturing],
            lambda: "it begins",
        )
        stage.actor.stop()
        assert not list(tmp_path.iterdir())
    else:
        assert stage.ask().outcome is Outcome.ON_TIME
        assert stage.actor.pool.restarts == 2
        assert open_cache(str(tmp_path), 0).uncapturable() == {
            "key": "2 processes have died while they captured it"
        }


# -- how processes end, and what the pool makes of it


PTRACE_DETACH, PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 17, 0x4206, 0x40
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes, _libc.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long


@contextlib.contextmanager
def that_does_not_end(pid):
    """Have the kernel stop a process on its way out, for whoever traces it.

    SIGKILL does not end it meanwhile.

    That is how one looks from outside that sleeps in a driver, where no signal reaches it.
    """
    assert _libc.ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACEEXIT) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert _libc.ptrace(PTRACE_DETACH, pid, 0, 0) == 0, os.strerror(ctypes.get_errno())


def deaths(stage):
    return [alert for alert in list(stage.anomalies) if alert.name == "tested: worker died"]


@pytest.mark.parametrize("number", range(1, signal.NSIG))
def test_given_any_signal_that_ends_a_process_then_it_has_a_name(number):
    name = how_it_ended(-number)
    known = {one.value: one.name for one in signal.Signals} | {32: "32", 33: "33"}
    assert name == f"signal {known.get(number) or f'SIGRTMIN+{number - signal.SIGRTMIN}'}"


def test_given_any_way_to_end_when_reaped_then_its_name_is_of_what_the_process_did():
    for code in (0, 1, 127, 128, 255):
        pid = os.fork()
        if not pid:
            os._exit(code)
        assert how_it_ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) == f"exit status {code}"
    core_dumped = signal.SIGSEGV | 0x80
    assert how_it_ended(os.waitstatus_to_exitcode(core_dumped)) == "signal SIGSEGV"


def test_given_a_process_that_sigkill_does_not_end_then_it_gives_its_place_up_is_counted_and_reaped_at_last(
    start_own_stage, monkeypatch
):
    monkeypatch.setattr(worker_process, "ENDS_WITHIN_S", 0.5)
    stage = start_own_stage(backup="standby", hang_ms=500.0, budget_ms=400.0)
    pool, (runner, standby) = stage.actor.pool, stage.pids
    with that_does_not_end(runner):
        stage.ask({"do": "spin"})
        stage.wait_for(lambda: deaths(stage), "it is given up")
        assert (
            "has not ended within 0 s of SIGKILL, and its place is given up: hung: "
            in deaths(stage)[0].message
        )
        stage.wait_for_workers()
        assert runner not in stage.pids
        assert standby in stage.pids
        stage.reconfigure(budget_ms=5000.0, hang_ms=20_000.0)  # on a busy machine, too
        assert stage.ask().outcome is Outcome.ON_TIME
        assert (pool.unended, pool.unended_pids) == (1, [runner])
        assert len(deaths(stage)) == pool.restarts == 1
    wait_until(lambda: not pool.unended_pids, lambda: "it is reaped")
    assert pool.unended == 1
    wait_until(lambda: not os.path.exists(f"/proc/{runner}"), lambda: "its parent has reaped it")


def test_given_a_process_that_sigkill_does_not_end_when_the_node_stops_then_it_stops_as_well(
    start_own_stage, monkeypatch
):
    monkeypatch.setattr(worker_process, "ENDS_WITHIN_S", 0.5)
    stage = start_own_stage(backup="none")
    descriptors = len(os.listdir("/proc/self/fd"))
    with that_does_not_end(stage.pids[0]):
        stage.actor.stop()
    stage.actor.stop = lambda: None  # the fixture need not do it again
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_given_a_worker_that_is_traced_when_it_dies_then_its_server_goes_on_serving(start_own_stage):
    """A debugger has it first; until it lets go, no other process can reap it."""
    stage = start_own_stage(backup="standby")
    runner, standby = stage.pids
    assert _libc.ptrace(PTRACE_SEIZE, standby, 0, 0) == 0
    os.kill(standby, signal.SIGKILL)
    stage.wait_for(lambda: deaths(stage), "its death is told")
    stage.wait_for_workers()
    assert stage.pids[0] == runner
    assert "an unknown cause" in deaths(stage)[0].message
    os.waitpid(standby, 0x40000000)  # __WALL: as the tracer, which then lets go
    wait_until(lambda: not os.path.exists(f"/proc/{standby}"), lambda: "its parent has reaped it")


@pytest.mark.parametrize("broken", ["_wait_for_news", "_look_after", "_spawn_missing"])
def test_given_an_error_in_the_pools_thread_then_it_says_so_and_goes_on(start_own_stage, broken):
    stage = start_own_stage(backup="none")
    pool, (pid,) = stage.actor.pool, stage.pids
    whole, errors = (
        getattr(pool, broken),
        [ProtocolError("nonsense"), IndexError("tuple"), ValueError("fd -1")],
    )

    def break_down(*given):
        errors.append(errors.pop(0))
        raise errors[-1]

    setattr(pool, broken, break_down)
    stage.wait_for(
        lambda: any("failed:\n" in text and "fd -1" in text for _, text in stage.logs), "it says so"
    )
    with contextlib.suppress(ProcessLookupError):  # it was ended, as it could not be looked after
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in stage.pids, lambda: "a death is noticed all the same")
    setattr(pool, broken, whole)
    stage.wait_for_workers()
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_a_stage_that_fails_when_it_hears_of_a_death_then_the_worker_is_buried_once(start_own_stage):
    stage = start_own_stage(backup="none")
    pool, (pid,) = stage.actor.pool, stage.pids
    heard, died = [], pool.listener.worker_died

    def fail_once(worker, reason, *, lasting):
        heard.append(worker.pid)
        died(worker, reason, lasting=lasting)
        if len(heard) == 1:
            raise RuntimeError("the stage has had enough")

    pool.listener.worker_died = fail_once
    os.kill(pid, signal.SIGKILL)
    stage.wait_for(lambda: any("the stage has had enough" in text for _, text in stage.logs), "it says so")
    stage.wait_for_workers()
    assert heard == [pid]
    assert stage.ask().outcome is Outcome.ON_TIME
