"""Synchronised inputs of a stage with a real worker, on a virtual clock and at `fast`.

Their rules: test/frame.
"""

import json

import numpy as np
import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.tools.log_commands import _lines

from .conftest import MS, START_NS, drive, one_stage, point, write_points

RUN_MS, WAIT_MS = 8.0, 15.0
OTHER = 1 << 1
"""The bit of the second input."""


def stamp(at_ms):
    return 0 if at_ms is None else START_NS + round(at_ms * MS)


def pair(frames, others, folder):
    """A log of triggers every 40 ms, received with their stamps, and of `others`.

    (stamp, receipt, x), in ms.
    """
    triggers = [("/first", t_ns, data) for _, t_ns, data in drive(frames, age_ms=0)]
    found = [("/other", stamp(at_ms), point(stamp(stamp_ms), x)) for stamp_ms, at_ms, x in others]
    return write_points(folder / "log", sorted([*triggers, *found], key=lambda message: message[1]))


def every(frames, stamp_ms=0.0, late_ms=0.0, skip=()):
    """A message of the other input for each trigger: stamp and receipt relative to it."""
    return [(40 * n + stamp_ms, 40 * n + late_ms, float(n)) for n in range(frames) if n not in skip]


def run(log, folder, *, sync=f"other slop 10 wait {WAIT_MS}", name="out", pace="virtual", **own):
    """The rows of the frames, x of the other input that each got (-1: none), and the result."""
    times = folder / "times.yaml"
    times.write_text(
        json.dumps({"first": {tier: {"inference_ms": RUN_MS} for tier in ("full", "fast")}}), "utf-8"
    )
    values = one_stage(
        adapter="replay_adapters:Joining", output="joined", sync=[sync], **{"budget_ms": 35.0, **own}
    )
    more = {"step_times": str(times)} if pace == "virtual" else {}
    options = ReplayOptions(pace=pace, overrides=values, output=folder / f"{name}.mcap", **more)
    result = replay(log, options)
    stage = result.stage("first")
    return stage.frames, np.array([message.message.point.z for message in stage.messages]), result


def alerts(result):
    return [
        (alert.level.name, alert.message.partition(",")[0])
        for _, alert in result.anomalies
        if alert.name == "first: input missing (other)"
    ]


@pytest.mark.parametrize(("stamp_ms", "late_ms", "wait_ms"), [(-3.0, -1.0, 0.0), (0.0, 9.0, 9.0)])
def test_given_both_inputs_in_time_or_one_late_within_the_wait_when_replayed_then_frames_wait_just_for_it(
    tmp_path, stamp_ms, late_ms, wait_ms
):
    others = every(20, stamp_ms=stamp_ms, late_ms=late_ms)
    frames, got, result = run(pair(20, others, tmp_path), tmp_path)
    assert got.tolist() == list(range(20))
    assert set(frames["wait_ms"]) == {wait_ms}
    assert set(frames["total_ms"]) == {wait_ms + RUN_MS}
    assert set(frames["missing_inputs"]) == {0}
    assert alerts(result) == []


def test_given_the_second_lost_for_a_while_when_replayed_then_no_frame_fails_and_it_counts_again_at_once(
    tmp_path,
):
    """It comes 9 ms late: the first message after the gap is for a frame that has not waited for it."""
    frames, got, result = run(pair(60, every(60, late_ms=9.0, skip=range(20, 40)), tmp_path), tmp_path)
    lost = range(20, 41)
    assert got.tolist() == [-1.0 if n in lost else n for n in range(60)]
    assert np.flatnonzero(frames["missing_inputs"]).tolist() == list(lost)
    assert result.stage("first").incomplete == result.summary["stages"][0]["incomplete"] == len(lost)
    assert "first: 21 of 60 frames had a synchronised input missing: other in 21" in [*_lines(result)]
    waits = [WAIT_MS if 20 <= n < 30 else 0.0 if n in lost else 9.0 for n in range(60)]
    assert frames["wait_ms"].tolist() == waits
    assert set(frames["outcome"]) == {Outcome.ON_TIME}
    assert alerts(result) == [("WARN", "missing in 10 frames in a row"), ("OK", "is there again")]


def test_given_a_model_that_needs_the_time_when_replayed_then_frames_wait_only_as_long_as_it_leaves(
    tmp_path,
):
    frames, _, _ = run(pair(10, [(-900, 1, 0.0)], tmp_path), tmp_path, budget_ms=20.0)
    assert np.all(frames["wait_ms"] < 20.0 - RUN_MS)
    assert np.all(frames["wait_ms"] > 8.0)
    assert set(frames["outcome"]) == {Outcome.ON_TIME}


def test_given_a_newer_trigger_while_a_frame_waits_when_replayed_then_it_has_its_turn_after_that_frame(
    tmp_path,
):
    frames, got, result = run(
        pair(10, every(10, late_ms=45.0), tmp_path), tmp_path, sync="other slop 10 wait 50", budget_ms=100.0
    )
    assert got.tolist() == list(range(10))
    assert frames["total_ms"].tolist() == [45.0 + RUN_MS] * 10
    assert result.stage("first").superseded == 0


def test_given_one_log_when_replayed_twice_then_the_files_are_the_same_bytes(tmp_path):
    others = [*every(40, late_ms=9.0, skip=range(15, 27)), (None, 3.0, -9.0)]
    log = pair(40, others, tmp_path)
    first, second = (run(log, tmp_path, name=name, backup="standby")[2] for name in ("a", "b"))
    assert first.output.read_bytes() == second.output.read_bytes()
    assert len(set(first.stage("first").frames["missing_inputs"])) == 2


@pytest.mark.parametrize("late_ms", [9.0, 45.0])
def test_given_no_deadline_when_replayed_fast_then_frames_wait_by_the_logs_time_as_on_the_virtual_clock(
    tmp_path, late_ms
):
    log = pair(30, every(30, late_ms=late_ms, skip=range(12, 15)), tmp_path)
    wait = {"sync": "other slop 10 wait 60", "budget_ms": 150.0} if late_ms > 40 else {}
    virtual, fast = (run(log, tmp_path, pace=pace, **wait) for pace in ("virtual", "fast"))
    assert fast[1].tolist() == virtual[1].tolist()
    assert fast[0]["missing_inputs"].tolist() == virtual[0]["missing_inputs"].tolist()
    assert len(fast[0]) == 30
    assert fast[2].summary["took_s"] < 25.0


def test_given_an_input_that_the_adapter_has_not_when_replayed_then_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the adapter has no input othr; it has: other"):
        run(pair(3, [], tmp_path), tmp_path, sync="othr slop 10")
