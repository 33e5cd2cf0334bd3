"""What a stage leaves behind: nothing, whether it is stopped or its node is killed."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.workers.fork_server import start_base

from .conftest import PATIENCE_S, StageUnderTest, wait_until

NODE = """
    import os, signal, sys
    sys.path.insert(0, {folder!r})
    for step in {steps!r}:
        exec(step)
    from conftest import StageUnderTest, wait_until
    from pathlib import Path
    stage = StageUnderTest(Path({notes!r}), backup="none").start()
    (pid,) = stage.pids
    _, stamp_ns = stage.offer({{"do": "spin"}})
    wait_until(lambda: stamp_ns in stage.notes("preprocessed", pid), lambda: "the model to begin")
    print(pid, flush=True)
    signal.pause()
"""
FIFO = "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))"
NICE = "os.setpriority(os.PRIO_PROCESS, 0, -5)"
PINNED = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"


def permitted(step):
    done = subprocess.run([sys.executable, "-c", f"import os; {step}"], check=False, capture_output=True)
    return done.returncode == 0


@pytest.fixture(scope="module")
def orphan(tmp_path_factory):
    """A node with priorities and a CPU of its own is killed while its worker is in an endless model.

    What the worker was, and whether it still is.
    """
    steps = [step for step in (NICE, FIFO, PINNED) if permitted(step)]
    notes = tmp_path_factory.mktemp("orphan")
    code = textwrap.dedent(NODE).format(folder=str(Path(__file__).parent), steps=steps, notes=str(notes))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout is not None
            pid = int(node.stdout.readline())
            pidfd = os.pidfd_open(pid)
            found = SimpleNamespace(
                steps=steps,
                nice=os.getpriority(os.PRIO_PROCESS, pid),
                cpus=os.sched_getaffinity(pid),
                policies={os.sched_getscheduler(int(task)) for task in os.listdir(f"/proc/{pid}/task")},
            )
        finally:
            node.kill()
    found.gone = bool(select.select([pidfd], [], [], PATIENCE_S)[0])
    if not found.gone:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    return found


def test_given_a_node_that_is_killed_when_its_worker_lives_then_the_worker_dies_with_it(orphan):
    assert orphan.gone


@pytest.mark.parametrize(
    ("step", "what", "usual"), [(FIFO, "policies", {os.SCHED_OTHER}), (NICE, "nice", 0)]
)
def test_given_a_node_that_is_real_time_or_has_a_nice_when_it_starts_a_worker_then_no_thread_of_it_has_that(
    orphan, step, what, usual
):
    if step not in orphan.steps:
        pytest.skip(f"not permitted here: {step}")
    assert getattr(orphan, what) == usual


def test_given_a_node_that_is_pinned_when_it_starts_a_worker_then_the_worker_has_every_cpu(orphan):
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one CPU")
    assert orphan.cpus == os.sched_getaffinity(0)


def belongings():
    """What this process has: open descriptors, threads, children, mapped memory files.

    The process that has imported torch belongs to it as long as it lives.
    """
    start_base()
    return SimpleNamespace(
        descriptors=set(os.listdir("/proc/self/fd")),
        threads={thread.ident for thread in threading.enumerate()},
        children={child.pid for child in psutil.Process().children(recursive=True)},
        maps=sum(
            "torchperf_" in line
            for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        ),
    )


def test_given_a_stage_whose_worker_was_replaced_and_runs_a_frame_then_nothing_of_it_is_left(
    start_own_stage,
):
    before = belongings()
    stage = start_own_stage(backup="standby", hang_ms=60_000.0, budget_ms=500.0)
    os.kill(stage.pids[0], signal.SIGKILL)  # nor is anything left of one that died and was replaced
    stage.wait_for(
        lambda: any("ended by signal SIGKILL" in text for _, text in stage.logs), "the death is logged"
    )
    stage.wait_for_workers()
    stage.ask()
    stage.offer({"do": "spin", "once": False})
    during = belongings()
    assert len(during.children - before.children) == 3  # two workers, and what they are forked from
    assert during.maps > before.maps
    stage.actor.stop()
    wait_until(lambda: belongings().children <= before.children, lambda: "what was forked is gone")
    after = belongings()
    assert after.threads <= before.threads
    assert after.descriptors <= before.descriptors
    assert after.maps <= before.maps
    stage.actor.stop = lambda: None  # the fixture need not do it again


@pytest.mark.parametrize(("takes_ms", "budget_ms"), [(100, 5000.0), (60_000, 600.0)])
def test_given_a_stage_that_runs_a_frame_then_the_frame_is_answered_by_its_deadline_first(
    start_own_stage, takes_ms, budget_ms
):
    stage = start_own_stage(backup="none", budget_ms=budget_ms)
    stage.ask()
    seq, _ = stage.offer({"do": "sleep", "ms": takes_ms})
    stage.actor.stop()
    (answer,) = [answer for answer in stage.answers if answer.frame.seq == seq]
    assert (answer.outcome is Outcome.ON_TIME) is (takes_ms < budget_ms)
    assert stage.payload(answer) is not None
    assert stage.published[-1] == stage.handed_on[-1][0]
    stage.settle_accounts()
    stage.actor.stop = lambda: None


def test_given_a_stage_that_was_never_started_when_stopped_then_nothing_is_left(tmp_path):
    before = belongings()
    StageUnderTest(tmp_path).actor.stop()
    after = belongings()
    assert after.descriptors <= before.descriptors
    assert after.maps <= before.maps
