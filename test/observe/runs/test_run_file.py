"""Runs that a replay writes down.

What they hold comes back, also for the report; what is no run is named.
"""

import json
import math
import os

import numpy as np
import pytest

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.observe.runs.changes import stage_frames
from torchperf_ros.observe.runs.run_log import (
    RUN_FILE,
    UNKNOWN,
    RunLogError,
    StageLog,
    read_run,
    run_of,
    write_run,
)
from torchperf_ros.replay.run_reading import load_run
from torchperf_ros.stage.frame_table import FRAME

from . import compare_runs as made
from .report_logs import read

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
START_NS = 1_700_000_000_000_000_000


def rows(count=5):
    """Frames of which the second last was late; the last two were answered in the other order."""
    late = np.arange(count) == count - 2
    found = made.rows(np.where(late, 51.0, 10.0), 50.0)
    found["t_ns"] = START_NS + np.arange(count) * 50_000_000
    found["inference_ms"] = np.where(late, math.nan, 8.0)
    return found[[*range(count - 2), count - 1, count - 2]]


def run():
    anomaly = {
        "t_ns": START_NS + 7,
        "level": "WARN",
        "name": "perception: late",
        "message": "late",
        "values": {"a": 1},
    }
    drops = {"superseded": 2, "stale": 1, "reasons": {"3": "slow"}}
    stages = [{"name": "perception", "tiers": ["full", "fast"], **drops}, {"name": "planning"}]
    memory = {"t_ns": [0, 10**9], "rss_mib": [800.0, 810.0], "own_rss_mib": [60.0, 61.0]}
    summary = {"stages": stages, "anomalies": [anomaly], "memory": memory, "torchperf_ros": "1.2"}
    return run_of(summary, {"perception": rows(), "planning": rows(2)[:0]})


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_given_a_run_file_when_read_then_every_frame_is_there_in_the_order_of_time(tmp_path, suffix):
    write_run(run(), tmp_path / f"drive{suffix}")
    (found,) = read(tmp_path / f"drive{suffix}")
    perception, planning = found.stages
    assert (perception.name, perception.tiers, perception.dropped) == ("perception", ("full", "fast"), 3)
    assert (planning.name, planning.tiers, planning.dropped, len(planning)) == ("planning", (), None, 0)
    assert perception.frames.dtype == FRAME
    assert perception.frames["seq"].tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(~perception.on_time).tolist() == [3]
    assert np.isnan(perception.frames["inference_ms"]).tolist() == [False, False, False, True, False]
    assert perception.reasons == {START_NS + 3 * 50_000_000: "slow"}
    assert found.memory_t_ns.tolist() == [START_NS, START_NS + 10**9]
    assert found.memory["workers_rss_mib"].tolist() == [800.0, 810.0]
    assert [column.tolist() for column in found.used_memory[1:]] == [[0.0, 1.0], [800.0, 810.0]]
    assert (found.versions, found.missing) == ({"torchperf_ros": "1.2"}, ())
    assert (found.fact("torchperf_ros"), found.fact("torchperf_ros", "nothing", "below")) == ("1.2", None)
    assert (perception.budget_ms, perception.frames["output_hash"].tolist()) == (50.0, [1, 2, 3, 4, 5])
    assert [(a.t_ns, a.level, a.values) for a in found.anomalies] == [(START_NS + 7, "WARN", {"a": "1"})]


def test_given_a_folder_of_replayed_logs_when_read_then_each_is_a_run_with_what_was_recorded_beside_it(
    tmp_path,
):
    for name in ("tuesday", "monday"):
        (tmp_path / name).mkdir()
        write_run(run(), tmp_path / name / RUN_FILE)
    (tmp_path / "monday" / "output.mcap").touch()
    monday, tuesday = read(tmp_path)
    assert (monday.name, tuesday.name) == ("monday", "tuesday")
    assert monday.recordings == (tmp_path / "monday" / "output.mcap",)
    assert tuesday.recordings == ()
    assert [run.name for run in read(tmp_path / "tuesday")] == ["tuesday"]
    (tmp_path / "drive.mcap").touch()  # where the log is still there, it shows the inputs
    for name, recordings in (("drive.mcap", (tmp_path / "drive.mcap",)), ("gone.mcap", ())):
        write_run(
            run_of({**run().facts, "log": {"path": str(tmp_path / name)}}, run().frames),
            tmp_path / "run.json",
        )
        assert read(tmp_path / "run.json")[0].recordings == recordings


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_given_a_run_file_when_read_and_written_again_then_it_is_the_same_file(tmp_path, suffix):
    first, again = (tmp_path / f"{name}{suffix}" for name in ("first", "again"))
    write_run(run(), first)
    write_run(read_run(first), again)
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_given_a_path_that_is_not_utf_8_when_a_run_names_it_then_it_is_written_and_comes_back(
    tmp_path, suffix
):
    path = os.fsdecode(b"/logs/caf\xe9 \xff") + "/\N{GREEK SMALL LETTER MU}"
    run = run_of(
        {"stages": [{"name": "perception"}], "log": {"path": path}}, {"perception": np.zeros(2, FRAME)}
    )
    write_run(run, tmp_path / f"run{suffix}")
    assert read_run(tmp_path / f"run{suffix}").facts["log"]["path"] == path


STAGES = '{"v": 1, "kind": "run", "stages": %s}'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{}", "is no run that"),
        ("a.json", b"\xff", "is no run that"),
        ("a.parquet", "PAR1", "is no Parquet file"),
        (
            "a.json",
            '{"v": 2, "kind": "run", "stages": []}',
            "is of version 2; this program reads version 1",
        ),
        ("a.json", STAGES % '["x"]', "is no run that"),
        ("a.json", STAGES % '"x"', "is no run that"),
        ("a.json", STAGES % "[{}]", "is no run that"),
        ("a.json", STAGES % '[{"name": "a", "frames": null}]', "is no run that"),
        ("a.json", STAGES % f'[{{"name": "a", "frames": {{"seq": [{10**30}]}}}}]', "is no run that"),
    ],
)
def test_given_a_file_that_is_no_run_when_read_then_the_error_names_it(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunLogError, match=rf"run {tmp_path / name}: {words}"):
        read(tmp_path / name)


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
@pytest.mark.parametrize("column", ["check", "missing_inputs"])
def test_given_a_run_of_before_there_was_a_column_when_read_then_it_is_unknown(tmp_path, suffix, column):
    path = tmp_path / f"drive{suffix}"
    write_run(run(), path)
    if suffix == ".json":
        content = json.loads(path.read_text())
        for stage in content["stages"]:
            del stage["frames"][column]
        path.write_text(json.dumps(content))
    else:
        pq.write_table(pq.read_table(path).drop([column]), path)
    assert set(read_run(path).frames["perception"][column]) == {UNKNOWN}


# -- runs as they are compared


def test_given_several_runs_in_a_folder_when_loaded_then_it_asks_for_one(tmp_path):
    for name in ("monday", "tuesday"):
        (tmp_path / name).mkdir()
        write_run(made.run(made.latencies(5, 1)), tmp_path / name / "run.parquet")
    with pytest.raises(RunLogError, match=r"holds 2 runs \(monday, tuesday\); name one"):
        load_run(tmp_path)


def frames(rows):
    return stage_frames(StageLog("perception", (), rows))


def test_given_a_worker_that_starts_again_and_again_when_compared_then_only_the_first_start_is_left_out(
    tmp_path,
):
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


MEMORY = {"t_ns": [0, 10**9, 2 * 10**9], "rss_mib": [800.0, 801.5, 801.0]}


@pytest.mark.parametrize(
    "memory", [{**MEMORY, "rss_mib": [800.0]}, {**MEMORY, "t_ns": ["soon"] * 3}, [1.0], "much"]
)
def test_given_memory_that_is_no_series_when_loaded_then_the_message_names_the_run(tmp_path, memory):
    path = tmp_path / "run.json"
    write_run(made.run(made.latencies(5, 1)), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"memory": memory}))
    with pytest.raises(RunLogError, match=r"run run\.json: its `memory` has to hold `t_ns` and `rss_mib`"):
        load_run(tmp_path / "run.json")


def test_given_a_node_that_was_restarted_when_compared_then_its_order_is_kept_and_nothing_is_dropped():
    rows = made.rows(np.arange(6.0))
    rows["seq"] = [0, 1, 2, 0, 1, 2]
    assert frames(rows).total_ms.tolist() == [0, 1, 2, 3, 4, 5]
    assert not frames(rows).gaps.any()
