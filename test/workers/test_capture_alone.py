"""An capture step by step, with a clock and a worker of the test's own: what real workers do too seldom."""

import os
from types import SimpleNamespace

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.workers.capture import Capture

S = 1_000_000_000
MS = 1_000_000


class WorkerOnPaper:
    def __init__(self, busy_since_ns=0):
        self.busy_since_ns = busy_since_ns
        self.seq, self.usable, self.caught_up = None, True, True
        self.away = self.recording = self.kill_reason = ""
        self.ready_at_ns, self.pid, self.nice = 0, os.getpid(), 0
        self.told = []

    @property
    def available(self):
        return self.usable and not self.away

    def command(self, kind, **fields):
        self.told.append((kind, fields))
        return True

    def has_not_waited(self, now_ns):
        self.excused_until_ns = now_ns

    def kill(self, reason):
        self.usable, self.kill_reason = False, reason


@pytest.fixture
def capture():
    capture = Capture("tested", {"evidence_dir": "there"}, lambda severity, text: capture.logs.append(text))
    capture.logs = []
    return capture


def test_given_two_workers_when_asked_then_the_serving_one_goes_through_every_phase(capture):
    spare, serving = WorkerOnPaper(1), WorkerOnPaper(2)
    workers = [spare, serving]
    capture.ask("profile", workers)
    capture.step(workers, 0)
    assert (serving.available, spare.available, serving.recording) == (False, True, "")
    serving.seq = 7  # it was being handed a frame
    capture.step(workers, 50 * MS)
    assert serving.told == []
    serving.seq, serving.caught_up = None, False  # it observes one
    capture.step(workers, 75 * MS)
    assert (serving.told, capture.busy_with) == ([], None)
    serving.caught_up = True
    capture.step(workers, 100 * MS)
    assert serving.told == [("record", {"what": "profile", "evidence": {"evidence_dir": "there"}})]
    assert capture.busy_with is serving
    capture.take(serving, {"kind": "recording", "error": ""}, S)
    assert (capture.busy_with, serving.excused_until_ns) == (None, S)
    serving.caught_up = False
    capture.step(workers, S)
    assert not serving.available
    serving.caught_up = True
    capture.step(workers, S)
    assert (serving.available, serving.recording) == (True, "profile: records")
    capture.take(serving, {"kind": "recorded"}, 2 * S)
    capture.step(workers, 3 * S)
    assert serving.told[1:] == [("finish", {})]
    capture.take(serving, {"kind": "evidence", "error": "", "path": "/there/x", "summary": "fast"}, 4 * S)
    capture.step(workers, 4 * S)
    assert (serving.available, serving.recording, capture.state) == (True, "", "")
    assert capture.last == "/there/x: fast"
    assert capture.logs == ["tested: profile in /there/x: fast"]
    assert spare.told == []


def test_given_frames_that_do_not_come_when_recording_then_it_is_finished_all_the_same(capture):
    worker = WorkerOnPaper()
    capture.ask("profile", [worker])
    for now_ns in (0, S):
        capture.step([worker], now_ns)
    capture.take(worker, {"kind": "recording", "error": ""}, S)
    for now_ns in (S, 15 * S, 17 * S, 18 * S):
        capture.step([worker], now_ns)
    assert [kind for kind, _ in worker.told] == ["record", "finish"]


def test_given_a_worker_that_never_answers_when_asked_then_it_is_killed_and_the_capture_ends(capture):
    worker = WorkerOnPaper()
    capture.ask("profile", [worker])
    for now_ns in (0, S, 120 * S):
        capture.step([worker], now_ns)
    assert worker.usable
    capture.step([worker], 122 * S)
    assert worker.kill_reason == "profile: no answer to 'record' after 121 s"
    capture.step([worker], 122 * S)
    assert (capture.state, worker.away) == ("", "")
    assert capture.last == "profile: the worker is gone: profile: no answer to 'record' after 121 s"


def test_given_a_profiler_that_cannot_start_when_asked_then_why_is_said_and_the_worker_serves_on(capture):
    worker = WorkerOnPaper()
    capture.ask("memory", [worker])
    for now_ns in (0, S):
        capture.step([worker], now_ns)
    capture.take(worker, {"kind": "recording", "error": "Traceback\n  somewhere\nRuntimeError: no"}, 2 * S)
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
    capture.take(worker, {"kind": "evidence", "error": "", "path": "/late", "summary": ""}, 3 * S)
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
