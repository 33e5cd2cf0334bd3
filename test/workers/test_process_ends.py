"""Every way in which a worker's process ends, or does not end: buried once, with a name, and replaced."""

import contextlib
import ctypes
import os
import signal

import pytest

from torchperf_ros.api.errors import ProtocolError, how_it_ended
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.workers import worker_process

from ..stage.conftest import wait_until

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


def test_given_signals_of_every_kind_when_they_end_a_worker_then_it_is_buried_once_and_replaced(
    start_own_stage,
):
    stage = start_own_stage(backup="none")
    for count, number in enumerate(
        (signal.SIGRTMIN + 1, signal.SIGRTMAX - 1, signal.SIGRTMAX, signal.SIGVTALRM), 1
    ):
        (pid,) = stage.pids
        os.kill(pid, number)
        stage.wait_for(lambda at=count: len(deaths(stage)) >= at, "its death is told")
        stage.wait_for_workers()
        assert [alert.values["pid"] for alert in deaths(stage)][count - 1 :] == [str(pid)]
        assert how_it_ended(-number) in deaths(stage)[-1].message
        assert stage.actor.pool.restarts == count
    assert stage.ask().outcome is Outcome.ON_TIME
    assert not [text for _, text in stage.logs if "failed:\n" in text]


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
