"""Runs as they are compared: what is read, and which frames count."""

import json

import numpy as np
import pytest

from torchperf_ros.frame.outcome import Outcome
from torchperf_ros.runs.compare.estimates import stage_frames
from torchperf_ros.runs.run_file import write_run
from torchperf_ros.runs.run_log import RunLogError, StageLog
from torchperf_ros.runs.run_log_source import load_run

from . import compare_runs as made

MEMORY = {"t_ns": [0, 10**9, 2 * 10**9], "rss_mib": [800.0, 801.5, 801.0]}


def frames(rows):
    return stage_frames(StageLog("perception", (), rows))


@pytest.mark.parametrize("name", ["run.json", "run.parquet", "folder/run.parquet"])
def test_given_a_replays_file_when_loaded_then_frames_memory_and_facts_are_there(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write_run(made.run(made.latencies(50, 1), memory=MEMORY, pace="virtual"), path)
    run = load_run(path.parent if "folder" in name else path)
    stage = run.stage("perception")
    np.testing.assert_array_equal(stage.total_ms, made.latencies(50, 1))
    assert stage.frames["output_hash"].tolist() == list(range(1, 51))
    assert stage.budget_ms == made.BUDGET_MS
    assert [column.tolist() for column in run.used_memory[1:]] == [[0.0, 1.0, 2.0], [800.0, 801.5, 801.0]]
    assert run.fact("machine", "fingerprint") == "feedfeedfeedfeed"
    assert run.fact("log", "sha256", "nothing", "below") is None


def test_given_records_when_compared_then_frames_under_a_profiler_do_not_count(tmp_path):
    path = tmp_path / "records.jsonl"
    frame = {"v": 1, "kind": "frame", "stage": "perception", "tier": "full", "outcome": "on_time", "total_ms": 20.0}
    lines = [json.dumps({**frame, "seq": at, "t_ns": at + 1, "profiled": at == 3}) for at in range(6)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    stage = stage_frames(load_run(path).stages[0])
    assert stage.frames["seq"].tolist() == [0, 1, 2, 4, 5]
    assert not stage.gaps.any()


def test_given_several_runs_in_a_folder_when_loaded_then_it_asks_for_one(tmp_path):
    for name in ("monday", "tuesday"):
        (tmp_path / name).mkdir()
        write_run(made.run(made.latencies(5, 1)), tmp_path / name / "run.parquet")
    with pytest.raises(RunLogError, match=r"holds 2 runs \(monday, tuesday\); name one"):
        load_run(tmp_path)


def test_given_a_worker_that_starts_again_and_again_when_compared_then_only_the_first_start_is_left_out(tmp_path):
    rows = made.rows(np.full(8, 20.0))
    rows["outcome"][[0, 1, 4, 5, 7]] = Outcome.STARTING
    rows["outcome"][3] = Outcome.CRASHED
    assert frames(rows).frames["seq"].tolist() == [2, 3, 4, 5, 6, 7]
    assert frames(rows).on_time.tolist() == [True, False, False, False, True, False]
    run = made.run(np.full(8, 20.0))
    run.frames["perception"]["outcome"] = Outcome.STARTING
    write_run(run, tmp_path / "run.json")
    with pytest.raises(RunLogError, match="holds no frame that was answered after the start"):
        load_run(tmp_path / "run.json")


@pytest.mark.parametrize("memory", [{**MEMORY, "rss_mib": [800.0]}, {**MEMORY, "t_ns": ["soon"] * 3}, [1.0], "much"])
def test_given_memory_that_is_no_series_when_loaded_then_the_message_names_the_run(tmp_path, memory):
    write_run(made.run(made.latencies(5, 1), memory=memory), tmp_path / "run.json")
    with pytest.raises(RunLogError, match=r"run run\.json: its `memory` has to hold `t_ns` and `rss_mib`"):
        load_run(tmp_path / "run.json")


def test_given_a_node_that_was_restarted_when_compared_then_its_order_is_kept_and_nothing_is_dropped():
    rows = made.rows(np.arange(6.0))
    rows["seq"] = [0, 1, 2, 0, 1, 2]
    assert frames(rows).total_ms.tolist() == [0, 1, 2, 3, 4, 5]
    assert not frames(rows).gaps.any()
