"""The fork server with real processes: what it imports, and what becomes of it when that does not go well."""

import os
import signal
import sys
import time

import psutil
import pytest

from torchperf_ros.frame.outcome import Outcome
from torchperf_ros.workers.fork_server import ForkServer

from .conftest import wait_until

FINE = "adapters_under_test"


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """A folder that processes import from; each file is a module."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
        yield folder


@pytest.fixture
def serve():
    servers = []

    def start(module):
        server = ForkServer(module)
        servers.append(server)

        def said():
            server.step()
            return server.ready or server.ended

        wait_until(said, lambda: f"the server of {module} is up, or gone")
        return server

    yield start
    for server in servers:
        server.close()


def test_given_a_module_when_it_is_imported_then_the_server_is_ready_and_ends_when_closed(serve):
    server = serve(FINE)
    process = psutil.Process(server._pid)
    assert (server.ready, server.why_bare) == (True, "")
    server.close()
    wait_until(lambda: not process.is_running(), lambda: "it is reaped")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import threading, time\nthreading.Timer(600, print).start()", "starts threads"),
        ("import os\nos.abort()", "did not come through it"),
        ("import sys\nsys.exit(0)", "did not come through it"),
    ],
)  # fmt: skip
def test_given_a_module_that_no_fork_can_share_then_workers_import_it_themselves(serve, modules, code, why):
    name = f"unfit{abs(hash(code))}"
    (modules / f"{name}.py").write_text(code, encoding="utf-8")
    server = serve(name)
    assert server.ended
    successor = server.renewed()
    try:
        assert why in successor.why_bare
        wait_until(lambda: successor.step() or successor.ready, lambda: "the successor is up")
    finally:
        successor.close()


def test_given_a_module_that_raises_then_the_server_is_ready_and_leaves_it_to_the_worker_to_say(serve, modules):
    (modules / "raises.py").write_text("raise RuntimeError('no such camera')", encoding="utf-8")
    assert serve("raises").ready


def test_given_a_stage_whose_module_starts_a_thread_when_started_then_it_answers_and_says_why_it_took_longer(
    start_own_stage, modules
):
    code = f"""
        import threading, time
        from {FINE} import Controlled
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    """
    (modules / "threaded.py").write_text("\n".join(map(str.strip, code.splitlines())), encoding="utf-8")
    stage = start_own_stage(adapter="threaded:Controlled", backup="none")
    assert stage.ask().outcome is Outcome.ON_TIME
    assert any("workers take longer to start, as importing threaded starts threads" in text for _, text in stage.logs)


def test_given_a_killed_fork_server_when_frames_come_then_the_workers_are_replaced(start_own_stage):
    stage = start_own_stage(backup="standby")
    before = stage.pids
    os.kill(stage.actor.pool._server._pid, signal.SIGKILL)
    wait_until(lambda: not set(stage.pids) & set(before), lambda: "its workers are gone")
    stage.wait_for_workers()
    assert stage.ask().outcome is Outcome.ON_TIME
    assert any("its fork server is gone" in text for _, text in stage.logs)


def test_given_a_worker_that_is_replaced_then_it_has_not_timed_again_what_its_predecessor_did(start_own_stage):
    stage = start_own_stage(backup="none")
    (first,) = stage.actor.pool.workers
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: first.pid not in stage.pids, lambda: "its death is noticed")
    stage.wait_for_workers()
    (second,) = stage.actor.pool.workers
    assert second.calibrations == first.calibrations


def test_given_what_a_worker_has_forked_when_the_worker_dies_then_that_dies_too(start_own_stage):
    """It would hold on to the worker's sockets, and to memory."""
    stage = start_own_stage(backup="none")
    (pid,) = stage.pids
    stage.ask({"do": "fork"})
    (child,) = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, lambda: "the child is gone")
    stage.wait_for_workers()
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_a_worker_then_it_has_a_session_of_its_own_and_goes_first_where_memory_runs_out(start_own_stage):
    stage = start_own_stage(backup="none")
    (pid,) = stage.pids
    assert os.getsid(pid) == pid
    with open(f"/proc/{pid}/oom_score_adj", encoding="ascii") as file:
        assert int(file.read()) > 0


def test_given_a_model_that_prints_megabytes_then_the_log_has_a_few_lines_and_says_what_is_left_out(start_own_stage):
    stage = start_own_stage(backup="none")
    lines = len(stage.logs)
    assert stage.ask({"do": "flood", "bytes": 10_000_000}).outcome is Outcome.ON_TIME
    stage.wait_for(lambda: any("which are not shown" in text for _, text in stage.logs), "it says so")
    began = time.monotonic()
    stage.ask()
    assert len(stage.logs) - lines < 200 + 40 * (time.monotonic() - began)
    assert sys.getsizeof(stage.actor.pool.workers[0]._tail) < 10_000
