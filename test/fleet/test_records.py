"""What vehicles bring home: bounded, whole lines, and readable whatever happened to the end of a file."""

import json
import math
import os
from dataclasses import asdict

import numpy as np
import pytest

from torchperf_ros.fleet.records import RecordWriter, paired_figures, read_records, record_files

from .conftest import minute

DAY_S = 86_400.0


@pytest.fixture
def clock():
    return [0.0]


def writer(folder, clock, **more):
    return RecordWriter(folder, {"vehicle": folder.name, "gpu": "orin"}, clock=lambda: clock[0], **more)


def test_given_minutes_and_events_when_read_then_they_are_what_was_written(tmp_path, clock):
    for name in ("car-1", "car-2"):
        log = writer(tmp_path / name, clock)
        log.event("trial", "7", 12)
        for number in range(3):
            log.minute(minute(t_s=60.0 * number, base_sum_ms=number, compared=9, agreed=8))
    brought = read_records(record_files([tmp_path]))
    assert list(brought.facts) == ["car-1", "car-2"]
    assert brought.facts["car-2"]["gpu"] == "orin"
    assert brought.blocks["vehicle"].tolist() == [0, 0, 0, 1, 1, 1]
    assert brought.blocks["base_sum_ms"].tolist() == [0, 1, 2, 0, 1, 2]
    assert np.isnan(brought.blocks["memory_mib"]).all()
    assert [event["vehicle"] for event in brought.events] == ["car-1", "car-2"]
    assert brought.left_out == []


def test_given_a_cut_last_line_when_written_on_then_only_that_line_is_lost_and_it_is_said(tmp_path, clock):
    log = writer(tmp_path / "car", clock)
    for number in range(2):
        log.minute(minute(t_s=float(number)))
    (path,) = record_files([tmp_path])
    os.truncate(path, path.stat().st_size - 20)
    log.minute(minute(t_s=2.0))
    brought = read_records([path])
    assert brought.blocks["t_s"].tolist() == [0.0, 2.0]
    assert brought.left_out == [f"{path}: 1 line is damaged or cut"]


def test_given_damage_anywhere_when_read_then_the_rest_counts(tmp_path, clock):
    log = writer(tmp_path / "car", clock)
    log.minute(minute(t_s=1.0))
    (path,) = record_files([tmp_path])
    whole = path.read_bytes()
    path.write_bytes(
        b"\x00\xff\n[]\n3\n{}\n"
        + b'{"kind":"minute","t_s":1}\n{"kind":"event"}\n'
        + whole
        + b'{"kind":"min'
    )
    assert read_records([path]).blocks["t_s"].tolist() == [1.0]
    path.write_bytes(whole.split(b"\n", 1)[1])  # the first line is lost: the folder is the vehicle's
    assert list(read_records([path]).facts) == ["car"]
    assert "cannot be read" in read_records([path, tmp_path / "none.jsonl"]).left_out[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frames", None),
        ("frames", -5),
        ("frames", 1e400),
        ("base_misses", 10**40),
        ("candidate_sum_ms", math.nan),
        ("candidate_sum_ms", -3.0),
        ("t_s", None),
        ("t_s", math.nan),
        ("t_s", math.inf),
        ("serial", "seven"),
        ("step", [1]),
    ],
)
def test_given_a_minute_that_no_vehicle_writes_when_read_then_it_alone_is_left_out(
    tmp_path, clock, name, value
):
    log = writer(tmp_path / "car", clock)
    log.minute(minute(t_s=5.0))
    (path,) = record_files([tmp_path])
    with path.open("a") as file:
        line = {"kind": "minute", **asdict(minute(t_s=6.0)), name: value}
        file.write(json.dumps(line) + "\n" + "[" * 100_000 + "\n")
    brought = read_records([path])
    assert brought.blocks["t_s"].tolist() == [5.0]
    assert brought.left_out == [f"{path}: 2 lines are damaged or cut"]


def test_given_minutes_of_the_future_when_looked_at_then_they_do_not_count_and_their_vehicles_are_named(
    tmp_path, clock
):
    for car, times in (("car-1", (5.0, 500.0)), ("car-2", (6.0, 7000.0, 9e9))):
        log = RecordWriter(tmp_path / car, {"vehicle": car}, clock=lambda: clock[0])
        for t_s in times:
            log.minute(minute(t_s=t_s))
    brought = read_records(record_files([tmp_path])).until(100.0)
    assert sorted(brought.blocks["t_s"]) == [5.0, 6.0, 500.0]
    assert brought.left_out == ["2 minutes of the future, of car-2: their clocks are ahead"]


def test_given_the_same_minutes_twice_when_read_then_each_counts_once(tmp_path, clock):
    for name in ("monday", "tuesday"):
        log = RecordWriter(tmp_path / name, {"vehicle": "car"}, clock=lambda: clock[0])
        log.minute(minute(t_s=5.0))
        log.event("confirmed", "7", 3)
    brought = read_records(record_files([tmp_path, tmp_path / "monday"]))
    assert len(brought.blocks["t_s"]) == 1
    assert len(brought.events) == 1


def test_given_a_limit_when_days_go_by_then_the_oldest_go_and_all_files_stay_below_it(tmp_path, clock):
    limit = 20_000
    log = writer(tmp_path / "car", clock, limit_bytes=limit)
    for day in range(40):
        clock[0] = day * DAY_S
        for number in range(10):
            log.minute(minute(t_s=clock[0] + number))
    files = record_files([tmp_path])
    assert 1 < len(files) < 40
    assert files[-1].name == "rollout-19700209.jsonl"
    assert sum(path.stat().st_size for path in files) <= limit


def test_given_a_clock_that_stands_still_when_minutes_come_then_the_day_is_bounded_too(tmp_path, clock):
    log = writer(tmp_path / "car", clock, limit_bytes=3000)
    for number in range(50):
        log.minute(minute(t_s=float(number)))
    (path,) = record_files([tmp_path])
    assert path.stat().st_size < 4000
    assert "has its 3,000 bytes" in log.problem
    assert log.lost > 30


def test_given_a_folder_that_cannot_be_written_when_a_minute_ends_then_nothing_is_raised_and_it_is_counted(
    tmp_path, clock
):
    (tmp_path / "car").write_text("a file")
    log = writer(tmp_path / "car", clock)
    log.minute(minute())
    log.event("trial", "7", 1)
    assert log.lost == 2
    assert "cannot be written" in log.problem
    (tmp_path / "car").unlink()
    log.minute(minute())
    assert log.problem == ""


def test_given_times_of_the_same_frames_when_figured_then_a_frame_without_a_result_is_a_miss_and_no_time():
    found = paired_figures([[10.0, 20.0, 30.0, np.nan]], [[11.0, np.nan, 60.0, 9.0]], 50.0)
    assert found["frames"] == 4
    assert found["base_sum_ms"].tolist() == [40.0]
    assert found["candidate_sum_ms"].tolist() == [71.0]
    assert found["base_misses"].tolist() == [1]
    assert found["candidate_misses"].tolist() == [2]
    assert json.dumps({name: float(np.ravel(value)[0]) for name, value in found.items()})
