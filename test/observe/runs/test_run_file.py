"""Runs that a replay writes down.

What they hold comes back, also for the report; what is no run is named.
"""

import json
import math
import os
import shutil

import numpy as np
import pytest

from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.observe.runs.changes import stage_frames
from torchperf_ros.observe.runs.report import stage_figures
from torchperf_ros.observe.runs.report_pictures import timeline
from torchperf_ros.observe.runs.run_log import (
    RUN_FILE,
    UNKNOWN,
    RunLogError,
    StageLog,
    read_run,
    run_of,
    write_run,
)
from torchperf_ros.observe.telemetry.rows import LABELS, LabelledArray
from torchperf_ros.replay.run_reading import load_run
from torchperf_ros.stage.frame_table import FRAME

from . import compare_runs as made
from . import report_logs as logs
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


# -- runs as logs


@pytest.mark.parametrize("source", ["log", "records"])
def test_given_a_drive_when_read_from_either_source_then_it_is_the_same(tmp_path, source):
    path = logs.write_log(tmp_path / "drive") if source == "log" else tmp_path / "records.jsonl"
    if source == "records":
        logs.write_records(path, logs.records())
    (run,) = read(path)
    perception, planning = run.stages
    assert (perception.name, planning.name) == ("perception", "planning")
    assert perception.tiers == ("full", "fast")
    assert len(perception) == len(planning) == logs.FRAMES
    assert np.flatnonzero(~perception.on_time).tolist() == [logs.LATE]
    late = perception.frames[logs.LATE]
    assert (late["outcome"], late["fallback"], late["total_ms"]) == (Outcome.LATE, Fallback.HOLD_LAST, 50.5)
    assert np.isnan(late["inference_ms"])
    assert late["stamp_ns"] == pytest.approx(logs.START_NS + logs.LATE * logs.PERIOD_NS, abs=1000)
    assert [perception.tier_name(int(tier)) for tier in perception.frames["tier"][[0, 99]]] == [
        "full",
        "fast",
    ]
    assert perception.lateness_ms.max() == 0.5
    assert set(perception.frames["check"]) == {UNKNOWN}
    assert np.flatnonzero(planning.frames["check"] != GuardVerdict.ACCEPT).tolist() == [logs.BRAKED]
    assert np.flatnonzero(perception.frames["missing_inputs"] == 1 << 1).tolist() == [logs.LATE]
    assert set(planning.frames["missing_inputs"]) == {0}
    assert run.node == "/perf"
    assert run.used_memory[2].tolist() == (
        [800.0, 820.0, 840.0, 860.0, 880.0] if source == "log" else [800.0]
    )
    assert [word for _, word in run.stages[0].health][:1] == ["NOMINAL"]
    (anomaly,) = run.anomalies
    assert (anomaly.level, anomaly.name, anomaly.values["seq"]) == (
        "WARN",
        "perception: deadline missed",
        "60",
    )
    assert run.missing == ()
    assert run.troubles == ()


def test_given_a_log_without_some_topics_when_read_then_it_says_so_and_stages_have_numbers_for_names(
    tmp_path,
):
    (run,) = read(logs.write_log(tmp_path / "drive", logs.messages(memory=False, diagnostics=False)))
    assert run.missing == (
        "no /perf/memory_stats in this log: memory",
        "no /diagnostics in this log: names of stages and tiers, health",
    )
    assert [stage.name for stage in run.stages] == ["stage 0", "stage 1"]
    assert run.stages[0].tier_name(1) == "tier 1"


def test_given_a_log_of_two_nodes_when_read_then_each_is_a_run_of_its_own(tmp_path):
    messages = sorted(
        logs.messages() + logs.messages(node="/two/perf", images=False), key=lambda message: message[2]
    )
    log = logs.write_log(tmp_path / "drive", messages)
    runs = read(log)
    assert [(run.node, len(run.stages[0])) for run in runs] == [("/perf", 100), ("/two/perf", 100)]
    assert [run.node for run in read(log, "/two/perf")] == ["/two/perf"]
    with pytest.raises(RunLogError, match=r"/three/latency_stages; it has the nodes /perf, /two/perf"):
        read(log, "/three")
    images = logs.write_log(
        tmp_path / "images", [m for m in logs.messages() if m[0] == "/camera/image_raw"]
    )
    with pytest.raises(RunLogError, match=r"ros2 bag record.*it has /camera/image_raw"):
        read(images)


def test_given_an_incident_folder_when_read_then_its_log_its_documents_and_its_records_are_found(tmp_path):
    box = next(logs.write_log(tmp_path / "drive").glob("*.mcap"))
    folder = tmp_path / "20260301T120000.250Z_late"
    folder.mkdir()
    shutil.copy(box, folder / "black_box.mcap")
    (folder / "about.json").write_text("{}")
    for versions in ({}, {"torch": "2.13"}):
        (run,) = read(folder)
        assert len(run.stages[0]) == logs.FRAMES
        assert [path.name for path in run.documents] == ["about.json"]
        assert run.recordings == (folder / "black_box.mcap",)
        assert run.versions == versions
        logs.write_records(folder / "records.jsonl", logs.records())  # they say more than the topics do


def cut(folder):
    file = next(folder.glob("*.mcap"))
    file.write_bytes(file.read_bytes()[:-3_000])
    return file


@pytest.mark.parametrize("how", [cut, lambda log: next(log.glob("*.mcap")).rename(log / "a")])
def test_given_a_log_that_replay_opens_when_read_then_its_frames_are_there(tmp_path, how):
    (run,) = read(how(logs.write_log(tmp_path / "drive", logs.messages(images=False))))
    assert len(run.stages[0]) == logs.FRAMES
    assert any("has no usable index" in trouble for trouble in run.troubles) is (how is cut)


def test_given_rotated_records_when_the_newest_is_named_then_all_are_read_and_what_is_lost_is_told(
    tmp_path,
):
    lines = logs.records()
    logs.write_records(tmp_path / "records.2.jsonl", lines[:50])
    logs.write_records(tmp_path / "records.1.jsonl", lines[:1] + lines[50:100])
    rest = [*lines[:1], *lines[100:], {"v": 1, "kind": "drops", "records": 7}, {"v": 2, "kind": "frame"}]
    with logs.write_records(tmp_path / "records.jsonl", rest).open("a") as file:
        file.write('{"v":1,"kind":"fra')
    (run,) = read(tmp_path)
    assert [len(stage) for stage in run.stages] == [100, 100]
    words = ("1 lines could not", "7 records were not", "1 records are of")
    assert all(trouble.startswith(begin) for trouble, begin in zip(run.troubles, words, strict=True))


def test_given_drops_reasons_and_a_profiler_in_records_when_read_then_they_belong_to_their_stage_and_frame(
    tmp_path,
):
    lines = logs.records()
    late = next(line for line in lines if line.get("outcome") == "late")
    late["reason"] = "the model took too long\nTraceback ..."
    frames = [line for line in lines if line["kind"] == "frame" and line["stage"] == "perception"]
    for frame in frames[10:20]:
        frame["profiled"] = True
    lines += [
        {"v": 1, "kind": "dropped", "t_ns": 1, "stage": "perception", "superseded": 3, "stale": 1}
    ] * 2
    (run,) = read(logs.write_records(tmp_path / "records.jsonl", lines))
    assert [stage.dropped for stage in run.stages] == [8, 0]
    assert run.stages[0].reasons == {late["t_ns"]: "the model took too long"}
    assert run.stages[0].profiled == {frame["t_ns"] for frame in frames[10:20]}
    assert "under a profiler (10)" in [trace.name for trace in timeline(run.stages[0], 1000).data]
    assert not any("profiler" in (trace.name or "") for trace in timeline(run.stages[1], 1000).data)


def test_given_counters_and_another_process_in_a_log_when_read_then_drops_add_up_and_it_is_a_restart(
    tmp_path,
):
    messages = []
    for second, (pid, superseded) in enumerate([(1, 10), (1, 14), (2, 3), (2, 5)]):
        values = {"health": "NOMINAL", "superseded": str(superseded), "stale": "0"}
        statuses = [logs.Alert(logs.Level.OK, "perf: perception", "", values)]
        statuses.append(logs.Alert(logs.Level.OK, "perf: node", "", {"pid": str(pid)}))
        t_ns = logs.START_NS + second * 1_000_000_000
        messages.append(
            ("/diagnostics", logs.DIAGNOSTICS, t_ns, logs.diagnostic_bytes(statuses, "/perf", t_ns))
        )
    rows = [message for message in logs.messages(diagnostics=False) if message[0] == "/perf/latency_stages"]
    (run,) = read(logs.write_log(tmp_path / "drive", messages + rows))
    assert run.stages[0].dropped == 4 + 3 + 2
    assert len(run.restarted_ns) == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.mcap", None, "does not exist"),
        ("empty", "folder", "and holds none"),
        ("drive.mcap", "no mcap", "is not an MCAP file"),
        ("records.jsonl", "no json\n", "none of its 1 lines is a record"),
        ("notes.txt", "text", "is no rosbag2"),
    ],
)
def test_given_what_is_no_log_when_read_then_the_error_names_it_and_says_why(
    tmp_path, name, content, words
):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    with pytest.raises(RunLogError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_given_rows_of_an_older_node_when_read_then_how_late_they_were_is_unknown_and_said(tmp_path):
    """It had no label for that. Total less budget would be wrong where the budget counts from the stamp."""
    labels = [label for label in LABELS if label not in {"deadline_ms", "lateness_ms", "stale"}]
    rows = LabelledArray(labels)
    told = [
        (
            "/perf/latency_stages",
            logs.ARRAY,
            logs.published_ns(seq) + stage,
            rows.encode(logs.frame_row(stage, seq)[: len(labels)]),
        )
        for seq in range(logs.FRAMES)
        for stage in (0, 1)
    ]
    (run,) = read(logs.write_log(tmp_path / "drive", told))
    assert sum(map(len, run.stages)) == len(told)
    for stage in run.stages:
        assert np.isnan(stage.lateness_ms).all()
        assert set(stage.frames["stale"]) == {UNKNOWN}
        assert np.isfinite(stage.total_ms).all()
    assert run.troubles == (
        f"{len(told)} frames do not say how late they were: an older node has written them",
    )
    assert np.isnan(stage_figures(run.stages[0]).worst_lateness_ms)


def test_given_records_of_an_older_node_when_read_then_their_own_lateness_counts_and_stale_frames_were_dropped(
    tmp_path,
):
    lines = logs.records()
    for line in lines:
        if line["kind"] == "frame":
            del line["deadline_ms"]
            line["lateness_ms"] = 5.0  # of a frame 35 ms after receipt, of 40, that was 10 ms old by then
    dropped = {
        "v": 1,
        "kind": "dropped",
        "t_ns": logs.START_NS,
        "stage": "perception",
        "superseded": 3,
        "stale": 2,
    }
    path = tmp_path / "records.jsonl"
    logs.write_records(path, [*lines, dropped, {**dropped, "stale": 0}])
    (run,) = read(path)
    assert set(run.stages[0].lateness_ms) == {5.0}
    assert run.stages[0].dropped == 8
    assert run.troubles == ()
