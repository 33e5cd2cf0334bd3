import json
import os
import resource

import jsonschema
import pytest

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.recorder.record_log import RecordLog, schema
from torchperf_ros.stage.frame import StepTimes
from torchperf_ros.stage.frame_table import KEPT

from ..telemetry.frame_records import frame_record

STAGE = {"name": "camera", "tiers": ["full", "fast"], "budget_ms": 50.0}
START = {"node": "/perf", "versions": {"torch": "2.13"}, "stages": [STAGE]}
FRAME = {"seq": 3, "tier": 1, "age_ms": float("nan"), "steps": StepTimes(0.1, 0.2, 3.12345, 0.4)}
LIMIT = 1 << 16


@pytest.fixture
def log(tmp_path):
    return RecordLog(tmp_path / "records", LIMIT, START)


def lines(folder, name="records.jsonl"):
    return [json.loads(line) for line in (folder / "records" / name).read_text().splitlines()]


def test_given_frames_and_events_when_ticked_then_they_are_lines_that_fit_the_schema(log, tmp_path):
    log.frame(frame_record(**FRAME))
    late = {"outcome": Outcome.LATE, "fallback": Fallback.HOLD_LAST, "tier": -1, "reason": "é\nline"}
    late |= {"stale": True, "shapes": b"4x3x48x64 4x6", "lateness_ms": 5.0}
    log.frame(frame_record(**FRAME | late))
    log.event(6, {"kind": "memory", "values": {"node_rss_mib": 80.5, "cuda_free_mib": float("nan")}})
    log.event(7, {"kind": "health", "stage": "camera", "from": "NOMINAL", "to": "DEGRADED"})
    assert not (tmp_path / "records").exists()
    log.tick(8, 0)
    start, on_time, late, memory, health = found = lines(tmp_path)
    validator = jsonschema.Draft202012Validator(json.loads(schema()))
    for line in found:
        validator.validate(line)
    assert start == {"v": 1, "kind": "start", "t_ns": 8, **START}
    assert (on_time["age_ms"], on_time["inference_ms"], on_time["tier"], on_time["fallback"]) == (
        None,
        3.123,
        "fast",
        None,
    )
    assert (late["outcome"], late["fallback"], late["tier"], late["reason"]) == (
        "late",
        "hold_last",
        None,
        "é\nline",
    )
    shown = ("deadline_ms", "lateness_ms", "stale", "input_shapes", "batch")
    assert [on_time[name] for name in shown] == [50.0, -40.0, False, None, None]
    assert [late[name] for name in shown] == [5.0, 5.0, True, "4x3x48x64 4x6", 4]
    assert memory["values"] == {"node_rss_mib": 80.5, "cuda_free_mib": None}
    assert health["from"] == "NOMINAL"


def test_given_the_table_of_a_frames_fields_then_the_schema_has_each_of_them():
    (frame,) = [
        one
        for one in json.loads(schema())["allOf"]
        if one["if"]["properties"]["kind"] == {"const": "frame"}
    ]
    assert {name for name, _ in KEPT} <= {*frame["then"]["properties"], "t_ns"}


def test_given_a_schema_when_a_record_lacks_or_breaks_a_field_then_it_does_not_fit():
    validator = jsonschema.Draft202012Validator(json.loads(schema()))
    for wrong in (
        {"v": 1, "kind": "frame", "t_ns": 1},
        {"v": 2, "kind": "log", "t_ns": 1, "severity": "info", "text": ""},
        {"v": 1, "kind": "log", "t_ns": 1, "severity": "loud", "text": ""},
        {"v": 1, "kind": "health", "t_ns": 1, "stage": "a", "from": "NOMINAL", "to": "WELL"},
    ):
        assert not validator.is_valid(wrong)
    assert validator.is_valid({"v": 1, "kind": "something new", "t_ns": 1, "more": []})


def test_given_more_than_fits_when_written_then_files_are_rotated_and_the_oldest_goes(log, tmp_path):
    for second in range(200):
        for _ in range(10):
            log.frame(frame_record(**FRAME | {"seq": second}))
        log.tick(second, 0)
    names = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert names == ["records.1.jsonl", "records.2.jsonl", "records.3.jsonl", "records.jsonl"]
    assert sum(path.stat().st_size for path in (tmp_path / "records").iterdir()) < LIMIT * 1.25
    oldest_first = [line for name in [*reversed(names[:3]), names[3]] for line in lines(tmp_path, name)]
    seqs = [line["seq"] for line in oldest_first if line["kind"] == "frame"]
    assert seqs == sorted(seqs)
    assert seqs[-1] == 199
    assert all(lines(tmp_path, name)[0]["kind"] == "start" for name in names)


def test_given_a_storm_of_one_kind_when_written_then_it_is_cut_and_counted_and_other_kinds_are_not(
    log, tmp_path
):
    for number in range(60):
        log.event(number, {"kind": "log", "severity": "warn", "text": "x"})
    log.event(61, {"kind": "health", "stage": "camera", "from": "NOMINAL", "to": "DEGRADED"})
    log.tick(62, lost=3)
    found = lines(tmp_path)
    assert [line["kind"] for line in found].count("log") == 50
    assert [line["kind"] for line in found].count("health") == 1
    assert found[-1] == {"v": 1, "kind": "drops", "t_ns": 62, "records": 13, "by": {"log": 10, "lost": 3}}
    log.event(70, {"kind": "log", "severity": "warn", "text": "y"})
    log.tick(71, 0)
    assert lines(tmp_path)[-1]["text"] == "y"


def test_given_a_disk_that_takes_no_more_when_written_then_it_is_said_and_counted_and_goes_on_later(
    log, tmp_path
):
    log.frame(frame_record(**FRAME))
    log.tick(1, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        log.frame(frame_record(**FRAME))
        log.tick(2, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "records.jsonl: " in log.problem
    log.frame(frame_record(**FRAME))
    log.tick(3, 0)
    assert log.problem == ""
    assert [line["kind"] for line in lines(tmp_path)] == ["start", "frame", "start", "frame", "drops"]
    assert lines(tmp_path)[-1]["by"] == {"disk": 1}


def test_given_an_incident_when_asked_for_records_since_then_they_are_a_file_of_their_own(log):
    for second in range(5):
        log.frame(frame_record(second, seq=second))
    start, *frames = [json.loads(line) for line in log.since(3).splitlines()]
    assert (start["kind"], start["stages"]) == ("start", START["stages"])
    assert [frame["seq"] for frame in frames] == [3, 4]


def both(tmp_path, limit=LIMIT):
    """The logs of two nodes with one folder."""
    return [
        RecordLog(tmp_path / "records", limit, {**START, "node": node})
        for node in ("/front/perf", "/rear/perf")
    ]


def test_given_two_logs_with_one_folder_when_written_then_both_rotate_by_what_is_there(tmp_path):
    logs = both(tmp_path, 40_000)
    for second in range(400):
        for log in logs:
            log.event(second, {"kind": "log", "severity": "info", "text": "x" * 100})
            log.tick(second, 0)
    names = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert names == ["records.1.jsonl", "records.2.jsonl", "records.3.jsonl", "records.jsonl"]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "records").iterdir()}
    assert all(10_000 <= size < 11_000 for name, size in sizes.items() if name != "records.jsonl"), sizes
    oldest_first = [line for name in [*reversed(names[:3]), names[3]] for line in lines(tmp_path, name)]
    seconds = [line["t_ns"] for line in oldest_first if line["kind"] == "log"]
    assert seconds == sorted(seconds)
    assert seconds[-2:] == [399, 399]
    for name in names:  # each says whose lines come
        assert {line["node"] for line in lines(tmp_path, name) if line["kind"] == "start"} == {
            "/front/perf",
            "/rear/perf",
        }


def test_given_two_logs_with_one_folder_when_the_disk_is_full_for_one_then_no_line_of_the_other_is_cut(
    tmp_path,
):
    front, rear = both(tmp_path)
    for second in range(20):
        front.event(second, {"kind": "log", "severity": "info", "text": "x" * 100})
        front.tick(second, 0)
    before = (tmp_path / "records" / "records.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
    try:
        rear.event(21, {"kind": "log", "severity": "info", "text": "y" * 100})
        rear.tick(21, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "records.jsonl: " in rear.problem
    assert (tmp_path / "records" / "records.jsonl").read_bytes() == before
    front.event(22, {"kind": "log", "severity": "info", "text": "z"})
    front.tick(22, 0)
    assert lines(tmp_path)[-1]["text"] == "z"


def test_given_a_fifo_where_records_go_when_written_then_nobody_waits_and_it_is_said(tmp_path, log):
    (tmp_path / "records").mkdir()
    os.mkfifo(tmp_path / "records" / "records.jsonl")
    log.frame(frame_record(**FRAME))
    log.tick(1, 0)
    assert "records.jsonl: " in log.problem
