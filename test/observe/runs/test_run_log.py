"""A drive read back from a log and from records: the same drive, in the same form."""

import shutil

import numpy as np
import pytest

from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.observe.runs.report_pictures import timeline
from torchperf_ros.observe.runs.report_words import stage_figures
from torchperf_ros.observe.runs.run_log import UNKNOWN, RunLogError
from torchperf_ros.observe.telemetry.latency_record import LABELS, LabelledArray

from . import report_logs as logs
from .report_logs import read


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
