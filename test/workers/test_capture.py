"""Profiles and looks at memory with real workers, while frames are answered."""

import gzip
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.workers.capture import Capture
from torchperf_ros.workers.control import (
    BeginCapture,
    CaptureBegan,
    CaptureDone,
    CaptureFull,
    EndCapture,
)
from torchperf_ros.workers.incident_folder import EvidenceLimits

from ..stage.conftest import wait_until

STEPS = {"tested/full", "decode", "preprocess", "inference", "postprocess"}


@pytest.fixture
def evidence(tmp_path):
    return {"evidence_dir": str(tmp_path / "evidence"), "evidence_mib": 64}


def until_over(stage):
    """Offer frame after frame, as a camera does, until the capture is over; returns every answer."""
    pool, first, states = stage.actor.pool, len(stage.answers), set()

    def is_over():
        stage.ask()
        states.update(pool.state(number) for number in range(stage.actor.config.workers))
        return pool.capture.last and not pool.capture.state

    wait_until(is_over, lambda: (pool.capture.state, stage.logs))
    return stage.answers[first:], states


def evidence_path(stage):
    path, _, summary = stage.actor.pool.capture.last.partition(": ")
    return Path(path), summary


def test_given_a_standby_when_the_serving_worker_is_profiled_then_every_frame_is_on_time_and_the_trace_has_its_steps(
    start_own_stage, evidence, monkeypatch
):
    stage = start_own_stage(node=evidence)
    stage.ask()
    pids, pool = stage.pids, stage.actor.pool
    with monkeypatch.context() as patch:  # an error of ours is logged, and the next profile goes well
        patch.setattr(type(pool.workers[0]), "command", lambda *_, **__: 1 / 0)
        pool.capture.ask("profile", pool.workers)
        stage.wait_for(
            lambda: any("a capture failed:\nTraceback" in text for _, text in stage.logs), "it is said"
        )
        stage.wait_for_workers()
    assert pool.capture.last == "profile: an error in the node"
    pool.capture.last = ""
    assert (
        stage.actor.pool.capture.ask("profile", stage.actor.pool.workers)
        == "stage tested: profile of one worker"
    )
    with pytest.raises(ConfigError, match=r"stage tested is busy with one already \(profile"):
        stage.actor.pool.capture.ask("profile", stage.actor.pool.workers)
    answers, states = until_over(stage)
    assert {(answer.outcome, answer.fallback) for answer in answers} == {(Outcome.ON_TIME, None)}
    assert any("profile: records" in state for state in states), states
    assert stage.pids == pids
    assert stage.actor.pool.restarts == 0
    folder, summary = evidence_path(stage)
    assert re.fullmatch(r"\d{8}T\d{6}\.\d{3}Z_profile-tested", folder.name)
    assert re.match(
        r"1\d frames of [\d.]+ ms, most of it in \w+ \([\d.]+ ms\), most in aten::\w+", summary
    ), summary
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert set(names) >= STEPS
    assert names.count("inference") >= 10
    table = (folder / "profile.txt").read_text(encoding="utf-8")
    assert " aten::add " in table
    assert " inference " in table
    assert [text for severity, text in stage.logs if severity == "info" and str(folder) in text]
    stage.ask()  # and both serve on as before
    stage.wait_for_workers()


def test_given_one_worker_when_it_is_profiled_then_fallbacks_answer_in_between_and_say_why(
    start_own_stage, evidence
):
    stage = start_own_stage(node=evidence, backup="none", budget_ms=100.0)
    stage.ask()
    capture, workers = stage.actor.pool.capture, stage.actor.pool.workers
    with pytest.raises(ConfigError, match="stage tested has one worker only, and frames would be left"):
        capture.ask("profile", workers, settled_at_ns=time.monotonic_ns())
    assert "fallbacks answer" in capture.ask("profile", workers)
    answers, _ = until_over(stage)
    assert evidence_path(stage)[0].is_dir()
    late = [answer for answer in answers if answer.outcome is not Outcome.ON_TIME]
    assert any(answer.fallback is not None for answer in late)
    assert all(
        answer.fallback is not None or answer.lateness_ms > 0 for answer in late
    )  # its own, out too late
    assert any("worker 0 profile: works" in answer.reason for answer in late), {
        answer.reason for answer in late
    }
    assert stage.actor.pool.restarts == 0
    stage.wait_for_workers()
    stage.reconfigure(budget_ms=5000.0)  # it serves again, however busy the machine is
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_a_worker_busy_with_evidence_when_it_handles_no_frames_for_long_then_it_is_no_hang_until_it_is_back(
    start_own_stage, evidence, monkeypatch
):
    stage = start_own_stage(node=evidence, budget_ms=600.0, hang_ms=700.0)
    pool = stage.actor.pool
    monkeypatch.setattr(type(pool.workers[0]), "command", lambda *_, **__: True)  # which it never hears of
    pool.capture.ask("profile", pool.workers)
    wait_until(lambda: pool.capture.busy_with, lambda: "a worker is asked")
    busy = pool.capture.busy_with
    os.kill(busy.pid, signal.SIGSTOP)
    until = time.monotonic() + 1.4
    wait_until(lambda: stage.ask() and time.monotonic() > until, lambda: "frames that it is to observe")
    assert (busy.backlog.is_empty, busy.kill_reason, pool.restarts) == (False, "", 0)
    back_at = time.monotonic()
    pool.capture.take(busy, CaptureBegan("profile", ""), time.monotonic_ns())
    wait_until(lambda: busy.kill_reason, lambda: "it is killed")
    assert busy.kill_reason.startswith("hung: ")
    assert time.monotonic() - back_at > 0.6


def test_given_one_worker_that_hangs_when_it_is_to_be_profiled_then_it_is_replaced_as_ever(
    start_own_stage, evidence
):
    stage = start_own_stage(node=evidence, backup="none", budget_ms=100.0, hang_ms=1000.0)
    stage.ask()
    pool, (pid,) = stage.actor.pool, stage.pids
    stage.offer({"do": "spin", "once": False})
    pool.capture.ask("profile", pool.workers)
    wait_until(lambda: stage.pids and stage.pids != [pid], lambda: f"it is replaced: {pool.progress}")
    assert pool.capture.last.startswith("profile: the worker is gone: hung: ")
    stage.wait_for_workers()
    assert pool.capture.ask("profile", pool.workers)


# -- the stage's side alone


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


def asked(capture, kind="profile"):
    """One worker that has been asked to begin."""
    worker = WorkerOnPaper()
    capture.ask(kind, [worker])
    for now_ns in (0, S):
        capture.step([worker], now_ns)
    return worker


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
    worker = asked(capture)
    capture.take(worker, CaptureBegan("profile", ""), S)
    for now_ns in (S, 15 * S, 17 * S, 18 * S):
        capture.step([worker], now_ns)
    assert worker.told == [BeginCapture("profile", EVIDENCE), EndCapture()]


def test_given_a_worker_that_never_answers_when_asked_then_it_is_killed_and_the_capture_ends(capture):
    worker = asked(capture)
    capture.step([worker], 120 * S)
    assert worker.usable
    capture.step([worker], 122 * S)
    assert worker.kill_reason == "profile: not begun after 121 s"
    capture.step([worker], 122 * S)
    assert (capture.state, worker.capturing) == ("", "")
    assert capture.last == "profile: the worker is gone: profile: not begun after 121 s"


def test_given_a_profiler_that_cannot_start_when_asked_then_why_is_said_and_the_worker_serves_on(capture):
    worker = asked(capture, "memory")
    capture.take(worker, CaptureBegan("memory", "Traceback\n  somewhere\nRuntimeError: no"), 2 * S)
    capture.step([worker], 2 * S)
    assert (capture.state, worker.available) == ("", True)
    assert capture.last.startswith("memory: RuntimeError: no")
    assert "somewhere" in capture.logs[0]


def test_given_a_worker_that_is_replaced_when_recording_then_another_can_be_asked(capture):
    worker, successor = asked(capture), WorkerOnPaper()
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
