"""Profiles and looks at memory with real workers, while frames are answered."""

import gzip
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.workers.control import CaptureBegan

from ..stage.conftest import PATIENCE_S, wait_until

STEPS = {"tested/full", "decode", "preprocess", "inference", "postprocess"}


@pytest.fixture
def evidence(tmp_path):
    return {"evidence_dir": str(tmp_path / "evidence"), "evidence_mib": 64}


def until_over(stage):
    """Offer frame after frame, as a camera does, until the capture is over; returns every answer."""
    capture = stage.actor.pool.capture
    first, states = len(stage.answers), set()
    give_up_at = time.monotonic() + PATIENCE_S
    while capture.state or not capture.last:
        assert time.monotonic() < give_up_at, (capture.state, stage.logs)
        stage.ask()
        time.sleep(0.01)  # which leaves the workers the processor
        states.update(stage.actor.pool.state(number) for number in range(stage.actor.config.workers))
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
