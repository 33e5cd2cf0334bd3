"""Figures of a stage are numbers like any other, and know the frames that they come from."""

import json

import numpy as np
import pytest

from torchperf_ros.api.outcome import Outcome

from .golden.made_outputs import frame_row, stage_result

KIND = "std_msgs/msg/Float64MultiArray"


@pytest.fixture
def stage():
    """30 frames that took 10 to 39 ms, of which three came late after 60 to 62 ms."""
    rows = [
        (
            frame_row(seq, b"", outcome=Outcome.LATE, total_ms=50.0 + seq)
            if seq in (10, 11, 12)
            else frame_row(seq, b"", total_ms=10.0 + seq)
        )
        for seq in range(30)
    ]
    reasons = {11: "tier full on worker 0 was not done after 48 ms\nTraceback"}
    return stage_result("perception", KIND, rows, reasons=reasons)


def test_given_a_stage_when_asked_for_figures_then_they_are_those_of_the_result(stage):
    assert stage.miss_ratio == 0.1
    assert (stage.p50_ms, stage.max_ms) == (27.5, 62.0)
    assert stage.p95_ms == pytest.approx(60.55)
    assert stage.outcomes == {"on_time": 27, "late": 3}
    assert json.dumps([stage.p50_ms, stage.outcomes]) == '[27.5, {"on_time": 27, "late": 3}]'
    assert stage.fallbacks == {"hold_last": 3}
    assert stage.outcomes["error"] == 0
    assert stage.miss_ratio + 0.1 == pytest.approx(0.2)
    assert f"{stage.miss_ratio:.0%} {stage.miss_ratio!r}" == "10% 0.1"


def test_given_frames_when_their_table_is_asked_for_then_the_ten_longest_are_in_it_of_all_or_of_the_missed_ones(
    stage,
):
    head, columns, *rows = [line.split() for line in stage.miss_ratio.stage.worst_frames(only_missed=True)]
    assert " ".join(head) == "perception: 3 of 30 frames not on time; those that took longest:"
    assert columns == ["seq", "stamp", "total_ms", "outcome", "tier", "fallback", "reason"]
    assert [row[0] for row in rows] == ["12", "11", "10"]
    told = "11 1760000001.100000000 61.0 late full hold_last tier full on worker 0 was not done after 48 ms"
    assert " ".join(rows[1]) == told
    rows = [line.split() for line in stage.worst_frames(only_missed=False)[2:]]
    assert [int(row[0]) for row in rows] == [12, 11, 10, 29, 28, 27, 26, 25, 24, 23]
    assert repr(stage) == "<stage perception: 30 frames, 27 on_time, 3 late>"
    sound = stage_result("perception", KIND, [frame_row(0, b"")])
    assert sound.worst_frames(only_missed=True) == ["perception: no frame not on time"]
    assert np.isnan(stage_result("perception", KIND, []).p99_ms)


def test_given_a_guard_of_several_checks_when_hashed_in_other_processes_then_the_parameters_are_the_same(
    python,
):
    code = """
from torchperf_ros.settings.params_file import config_of
from torchperf_ros.replay.replay_options import params_hash
print(params_hash(config_of({"planning.guard.act": ["all"]})))
"""
    assert len({python(code, PYTHONHASHSEED=seed) for seed in ("1", "2", "3")}) == 1
