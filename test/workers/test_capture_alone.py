"""An capture step by step, with a clock and a worker of the test's own: what real workers do too seldom."""

import os
from types import SimpleNamespace

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.workers.capture import Capture
from torchperf_ros.workers.control import (
    BeginCapture,
    CaptureBegan,
    CaptureDone,
    CaptureFull,
    EndCapture,
)
from torchperf_ros.workers.incident_folder import EvidenceLimits

S = 1_000_000_000
MS = 1_000_000
EVIDENCE = EvidenceLimits("there", 64)


class WorkerOnPaper:
    def __init__(self, busy_since_ns=0):
        self.busy_since_ns = busy_since_ns
        self.seq, self.usable, self.available = None, True, True
        self.backlog = SimpleNamespace(is_empty=True, wait_from=self.excuse)
        self.capturing = self.kill_reason = ""
        self.ready_at_ns, self.pid, self.setup = 0, os.getpid(), SimpleNamespace(nice=0)
        self.told = []

    def capture(self, words, *, serves):
        self.capturing, self.available = words, serves and self.usable
        return self.usable

    def command(self, command):
        self.told.append(command)
        return True

    def excuse(self, now_ns):
        self.excused_until_ns = now_ns

    def kill(self, reason):
        self.usable, self.kill_reason = False, reason


@pytest.fixture
def capture():
    capture = Capture("tested", EVIDENCE, lambda severity, text: capture.logs.append(text))
    capture.logs = []
    return capture


def test_given_two_workers_when_asked_then_the_serving_one_goes_through_every_phase(capture):
    spare, serving = WorkerOnPaper(1), WorkerOnPaper(2)
    workers = [spare, serving]
    capture.ask("profile", workers)
    capture.step(workers, 0)
    assert (serving.available, spare.available) == (False, True)
    serving.seq = 7  # it was being handed a frame
    capture.step(workers, 50 * MS)
    assert serving.told == []
    serving.seq, serving.backlog.is_empty = None, False  # it observes one
    capture.step(workers, 75 * MS)
    assert (serving.told, capture.busy_with) == ([], None)
    serving.backlog.is_empty = True
    capture.step(workers, 100 * MS)
    assert serving.told == [BeginCapture("profile", EVIDENCE)]
    assert capture.busy_with is serving
    capture.take(serving, CaptureBegan("profile", ""), S)
    assert (capture.busy_with, serving.excused_until_ns) == (None, S)
    serving.backlog.is_empty = False
    capture.step(workers, S)
    assert not serving.available
    serving.backlog.is_empty = True
    capture.step(workers, S)
    assert (serving.available, serving.capturing) == (True, "profile: records")
    capture.take(serving, CaptureFull("profile"), 2 * S)
    capture.step(workers, 3 * S)
    assert serving.told[1:] == [EndCapture()]
    capture.take(serving, CaptureDone("profile", "/there/x", "fast", ""), 4 * S)
    capture.step(workers, 4 * S)
    assert (serving.available, serving.capturing, capture.state) == (True, "", "")
    assert capture.last == "/there/x: fast"
    assert capture.logs == ["tested: profile in /there/x: fast"]
    assert spare.told == []


def test_given_frames_that_do_not_come_when_recording_then_it_is_finished_all_the_same(capture):
    worker = WorkerOnPaper()
    capture.ask("profile", [worker])
    for now_ns in (0, S):
        capture.step([worker], now_ns)
    capture.take(worker, CaptureBegan("profile", ""), S)
    for now_ns in (S, 15 * S, 17 * S, 18 * S):
        capture.step([worker], now_ns)
    assert worker.told == [BeginCapture("profile", EVIDENCE), EndCapture()]


def test_given_a_worker_that_never_answers_when_asked_then_it_is_killed_and_the_capture_ends(capture):
    worker = WorkerOnPaper()
    capture.ask("profile", [worker])
    for now_ns in (0, S, 120 * S):
        capture.step([worker], now_ns)
    assert worker.usable
    capture.step([worker], 122 * S)
    assert worker.kill_reason == "profile: not begun after 121 s"
    capture.step([worker], 122 * S)
    assert (capture.state, worker.capturing) == ("", "")
    assert capture.last == "profile: the worker is gone: profile: not begun after 121 s"


def test_given_a_profiler_that_cannot_start_when_asked_then_why_is_said_and_the_worker_serves_on(capture):
    worker = WorkerOnPaper()
    capture.ask("memory", [worker])
    for now_ns in (0, S):
        capture.step([worker], now_ns)
    capture.take(worker, CaptureBegan("memory", "Traceback\n  somewhere\nRuntimeError: no"), 2 * S)
    capture.step([worker], 2 * S)
    assert (capture.state, worker.available) == ("", True)
    assert capture.last.startswith("memory: RuntimeError: no")
    assert "somewhere" in capture.logs[0]


def test_given_a_worker_that_is_replaced_when_recording_then_another_can_be_asked(capture):
    worker, successor = WorkerOnPaper(), WorkerOnPaper()
    capture.ask("profile", [worker])
    for now_ns in (0, S):
        capture.step([worker], now_ns)
    capture.step([successor], 2 * S)
    assert capture.last == "profile: the worker is gone: it died, or was replaced"
    capture.take(worker, CaptureDone("profile", "/late", "", ""), 3 * S)
    assert "/late" not in capture.last
    assert capture.ask("profile", [successor])


def test_given_nobody_who_can_be_asked_when_asked_then_the_error_says_why(capture):
    with pytest.raises(ConfigError, match="stage tested has no worker that is ready"):
        capture.ask("profile", [None, SimpleNamespace(available=False)])
    with pytest.raises(ConfigError, match="stage tested has no evidence folder"):
        Capture("tested", None, print).ask("profile", [WorkerOnPaper()])


def test_given_an_event_when_it_asks_then_it_has_to_wait_until_both_workers_have_settled(capture):
    workers = [WorkerOnPaper(1), WorkerOnPaper(2)]
    workers[1].ready_at_ns = 10 * S
    with pytest.raises(ConfigError, match="stage tested has had all its workers for less than 30 s"):
        capture.ask("profile", workers, settled_at_ns=39 * S)
    assert capture.ask("profile", workers, settled_at_ns=40 * S)


def test_given_a_worker_that_gives_way_when_the_other_one_is_gone_then_it_does_so_no_more(
    capture, monkeypatch
):
    raised = []
    monkeypatch.setattr("torchperf_ros.workers.capture.set_nice", lambda pid, nice: raised.append(nice))
    workers = [WorkerOnPaper(1), WorkerOnPaper(2)]
    capture.ask("profile", workers)
    for at_ns in (0, 100 * MS, 200 * MS):
        capture.step(workers, at_ns)
    assert raised == []
    workers[0] = None
    capture.step(workers, 300 * MS)
    assert raised == [0]
