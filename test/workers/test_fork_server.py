"""The fork server with real processes.

What it imports, and what becomes of it when that does not go well.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
import time

import psutil
import pytest

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.workers import fork_server
from torchperf_ros.workers.fork_server import ForkServer

from ..stage.conftest import wait_until

FINE = "adapters_under_test"


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """A folder that processes import from; each file is a module."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
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


@pytest.fixture(scope="module")
def stage(start_stage):
    """A stage with one worker, which tests may end: it is replaced."""
    return start_stage(backup="none")


def test_given_a_module_when_it_is_imported_then_the_server_is_ready_and_ends_when_closed(serve):
    server = serve(FINE)
    process = psutil.Process(server.pid)
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
)
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


def test_given_a_module_that_raises_then_the_server_is_ready_and_leaves_it_to_the_worker_to_say(
    serve, modules
):
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
    assert any(
        "workers take longer to start, as importing threaded starts threads" in text
        for _, text in stage.logs
    )


def test_given_a_killed_fork_server_when_frames_come_then_the_workers_are_replaced(start_own_stage):
    stage = start_own_stage(backup="standby")
    before = stage.pids
    os.kill(stage.actor.pool.server.pid, signal.SIGKILL)
    wait_until(lambda: not set(stage.pids) & set(before), lambda: "its workers are gone")
    stage.wait_for_workers()
    assert stage.ask().outcome is Outcome.ON_TIME
    assert any("its fork server is gone" in text for _, text in stage.logs)


def test_given_a_worker_that_is_replaced_then_it_has_not_timed_again_what_its_predecessor_did(
    stage,
):
    (first,) = stage.actor.pool.workers
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: first.pid not in stage.pids, lambda: "its death is noticed")
    stage.wait_for_workers()
    (second,) = stage.actor.pool.workers
    assert second.calibrations == first.calibrations


def test_given_what_a_worker_has_forked_when_the_worker_dies_then_that_dies_too(stage):
    """It would hold on to the worker's sockets, and to memory."""
    (pid,) = stage.pids
    stage.ask({"do": "fork"})
    (child,) = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE,
        lambda: "the child is gone",
    )
    stage.wait_for_workers()
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_a_worker_then_it_has_a_session_of_its_own_and_goes_first_where_memory_runs_out(
    stage,
):
    (pid,) = stage.pids
    assert os.getsid(pid) == pid
    with open(f"/proc/{pid}/oom_score_adj", encoding="ascii") as file:
        assert int(file.read()) > 0


def test_given_a_model_that_prints_megabytes_then_the_log_has_a_few_lines_and_says_what_is_left_out(
    stage,
):
    lines = len(stage.logs)
    assert stage.ask({"do": "flood", "bytes": 10_000_000}).outcome is Outcome.ON_TIME
    stage.wait_for(lambda: any("which are not shown" in text for _, text in stage.logs), "it says so")
    began = time.monotonic()
    stage.ask()
    assert len(stage.logs) - lines < 200 + 40 * (time.monotonic() - began)
    assert sys.getsizeof(stage.actor.pool.workers[0].printed.tail) < 10_000


NO_FORK = """
    import os, resource
    from adapters_under_test import Controlled

    fork = os.fork

    def fork_as_far_as_allowed():
        if not os.path.exists({marker!r}):
            return fork()
        user, most = os.getresuid(), resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, most[1]))
        try:
            if user[0] == 0:  # whom the limit does not bind
                os.setresuid(65534, 65534, 0)
            return fork()  # which the kernel refuses: EAGAIN
        finally:
            os.setresuid(*user)
            resource.setrlimit(resource.RLIMIT_NPROC, most)

    os.fork = fork_as_far_as_allowed
"""
"""A module whose import gives the fork server no more processes while a file is there."""


def free_descriptors(pid, count):
    """A limit for this process's descriptors that leaves it so many more."""
    folder = f"/proc/{pid}/fd"
    # not the look's own
    used = {int(name) for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")}
    free = [number for number in range(len(used) + count + 1) if number not in used]
    return free[count]


@contextlib.contextmanager
def descriptors_left(pid, count):
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free_descriptors(pid, count), before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def file_at(path):
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("short_of", "said"),
    [
        ("processes", "Resource temporarily"),
        ("pidfd", "Too many open files"),
        ("passed", "Too many open files"),
    ],
)
def test_given_a_fork_that_fails_when_a_worker_is_replaced_then_the_other_lives_and_it_is_tried_again(
    start_own_stage, modules, tmp_path, short_of, said
):
    marker = tmp_path / "no_fork"
    lines = [line[4:] for line in NO_FORK.format(marker=str(marker)).splitlines()]
    (modules / "limited.py").write_text("\n".join(lines), encoding="utf-8")
    stage = start_own_stage(adapter="limited:Controlled", backup="standby")
    server = stage.actor.pool.server
    runner, standby = stage.pids
    # the dead worker's own descriptor becomes free, five are passed for the next one, and one is its own
    left = {"pidfd": 4, "passed": 1}
    with file_at(marker) if short_of == "processes" else descriptors_left(server.pid, left[short_of]):
        os.kill(standby, signal.SIGKILL)
        failed = lambda: [text for _, text in stage.logs if "forked none: " in text]  # noqa: E731
        stage.wait_for(lambda: len(failed()) >= 2, "it is tried again, in vain")
        assert all(said in text for text in failed())
        assert stage.ask().outcome is Outcome.ON_TIME
    stage.wait_for_workers()
    assert stage.pids[0] == runner
    assert stage.actor.pool.server is server
    assert len(psutil.Process(server.pid).children()) == 2
    assert stage.ask().outcome is Outcome.ON_TIME


@pytest.mark.parametrize("count", [0, 1], ids=["its socket", "the process"])
def test_given_a_base_that_has_no_descriptor_left_when_a_server_is_wanted_then_others_live_and_the_next_is_whole(
    serve, count
):
    other = serve(FINE)
    base = psutil.Process(other.pid).ppid()
    with descriptors_left(base, count):
        server = ForkServer(FINE)
        wait_until(lambda: server.step() or server.ended, lambda: "it is given up")
    assert "Too many open files" in server.failure or count == 0
    other.step()
    assert (other.ended, other.ready) == (False, True)
    successor = server.renewed()
    server.close()
    try:
        wait_until(lambda: successor.step() or successor.ready, lambda: "the successor is up")
        assert successor.why_bare == ""  # the module has nothing to do with it
    finally:
        successor.close()


@pytest.fixture
def ask_for_worker(serve):
    """Ask a server for a process; the far ends of what it gets are open until the test is done."""
    with contextlib.ExitStack() as kept:

        def ask(server):
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(5)]
            with contextlib.ExitStack() as given_away:
                for near, far in pairs:
                    kept.enter_context(near)
                    given_away.enter_context(far)
                pid, pidfd = server.fork([far.fileno() for _, far in pairs], "/tmp")
            kept.callback(os.close, pidfd)
            return pid

        yield ask


def test_given_a_node_that_has_no_descriptor_left_when_it_asks_for_a_worker_then_none_lives_and_the_next_does(
    serve, ask_for_worker
):
    server = serve(FINE)

    def fork_without_descriptors():
        pairs = [socket.socketpair() for _ in range(5)]
        with contextlib.ExitStack() as opened:
            for pair in pairs:
                for end in pair:
                    opened.enter_context(end)
            opened.enter_context(descriptors_left(os.getpid(), 0))
            server.fork([far.fileno() for _, far in pairs], "/tmp")

    with pytest.raises(ProtocolError, match="forked none: this process has no descriptor left"):
        fork_without_descriptors()
    process = psutil.Process(server.pid)
    wait_until(lambda: not process.children(), lambda: "what was forked is ended")
    assert psutil.pid_exists(ask_for_worker(server))
    assert not server.ended


def test_given_every_signal_when_it_ends_a_worker_then_the_server_says_which(serve, ask_for_worker):
    server = serve(FINE)
    harmless = {signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGCONT}
    harmless |= {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    ignored = {signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ}  # by the base, and by Python
    # Below `nohup`, every process that is started from here ignores SIGHUP.
    ignored |= {number for number in range(1, signal.NSIG) if signal.getsignal(number) is signal.SIG_IGN}
    for number in set(range(1, signal.NSIG)) - harmless - ignored - {32, 33}:
        pid = ask_for_worker(server)
        os.kill(pid, number)
        wait_until(lambda: server.exit_code(pid) is not None, lambda: f"the end by signal {number}")  # noqa: B023
        assert server.exit_code(pid) == -number
    assert not server.ended


def test_given_a_server_that_stands_still_when_a_worker_is_to_be_forked_then_the_other_is_looked_after_meanwhile(
    start_own_stage, monkeypatch
):
    monkeypatch.setattr(fork_server, "_FORK_TAKES_AT_MOST_S", 600.0)
    stage = start_own_stage(backup="standby", hang_ms=500.0, budget_ms=400.0)
    server, (runner, standby) = stage.actor.pool.server, list(stage.actor.pool.workers)
    os.kill(server.pid, signal.SIGSTOP)
    standby.kill("the test wants it")
    wait_until(lambda: server.number == 3, lambda: "another one is asked for")
    stage.ask({"do": "spin"})
    wait_until(lambda: "hung" in runner.kill_reason, lambda: "the hang is noticed")
    os.kill(server.pid, signal.SIGCONT)
    stage.wait_for_workers()
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_a_server_that_answers_too_late_then_the_other_worker_lives_and_what_came_late_does_not(
    start_own_stage, monkeypatch
):
    monkeypatch.setattr(fork_server, "_FORK_TAKES_AT_MOST_S", 0.3)
    stage = start_own_stage(backup="standby")
    server, (runner, standby) = stage.actor.pool.server, stage.pids
    os.kill(server.pid, signal.SIGSTOP)
    os.kill(standby, signal.SIGKILL)
    stage.wait_for(lambda: any("gave no worker within" in text for _, text in stage.logs), "it is given up")
    assert stage.ask().outcome is Outcome.ON_TIME
    monkeypatch.setattr(fork_server, "_FORK_TAKES_AT_MOST_S", 600.0)
    os.kill(server.pid, signal.SIGCONT)
    stage.wait_for_workers()
    assert (stage.pids[0], stage.actor.pool.server) == (runner, server)
    process = psutil.Process(server.pid)
    wait_until(lambda: len(process.children()) == 2, lambda: "the late ones are ended")


def test_given_a_server_that_does_not_answer_and_no_worker_that_can_serve_then_another_server_is_started(
    start_own_stage, monkeypatch
):
    monkeypatch.setattr(fork_server, "_FORK_TAKES_AT_MOST_S", 0.3)
    stage = start_own_stage(backup="none")
    server = stage.actor.pool.server
    os.kill(server.pid, signal.SIGSTOP)
    stage.actor.pool.workers[0].kill("the test wants it")
    wait_until(lambda: stage.actor.pool.server is not server, lambda: "it has a successor")
    monkeypatch.setattr(fork_server, "_FORK_TAKES_AT_MOST_S", 600.0)
    stage.wait_for_workers()
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_a_module_that_has_the_kernel_reap_children_when_a_worker_dies_then_it_is_replaced(
    start_own_stage, modules
):
    code = (
        "import signal\nfrom adapters_under_test import Controlled\nsignal.signal(signal.SIGCHLD,"
        " signal.SIG_IGN)\n"
    )
    (modules / "reaped.py").write_text(code, encoding="utf-8")
    stage = start_own_stage(adapter="reaped:Controlled", backup="standby")
    server, (runner, standby) = stage.actor.pool.server, stage.pids
    os.kill(standby, signal.SIGKILL)
    wait_until(lambda: standby not in stage.pids, lambda: "its death is noticed")
    stage.wait_for_workers()
    assert (stage.pids[0], stage.actor.pool.server) == (runner, server)
    assert any("ended by an unknown cause" in text for _, text in stage.logs)
