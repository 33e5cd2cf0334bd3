"""The node's side of the recorder, with real recorders.

What is too large, what is not understood, who is stopped.
"""

import json
import os
import select
import signal
import time

import jsonschema
import psutil
import pytest

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.recorder import RecordLog, schema
from torchperf_ros.observe.recording import RecorderProcess, Recording
from torchperf_ros.observe.telemetry.rows import MAX_PACKET_BYTES
from torchperf_ros.settings.config import node_config
from torchperf_ros.stage.frame import StepTimes
from torchperf_ros.stage.frame_table import KEPT
from torchperf_ros.workers.frame_ring import FrameRing

from ..stage.conftest import wait_until
from .telemetry.frame_records import answered_frame, frame_record

WITHIN_S = 200.0
SETUP = {
    "node": "/perf",
    "pid": os.getpid(),
    "ros_offset_ns": 0,
    "versions": {},
    "parameters": {},
    "topics": [],
    "heard": [("/objects", "std_msgs/msg/String")],
    "stages": [
        {"name": "camera", "tiers": ["full"], "budget_ms": 50.0, "output": ["/boxes", ""], "inputs": [None]}
    ],
}


class Node:
    """What a node does of a recording, whose steps are called as often as a test likes."""

    def __init__(self, folder, evidence_dir=None, **setup):
        self.folder = folder
        evidence = str(folder / "evidence") if evidence_dir is None else evidence_dir
        own = {"evidence_dir": evidence, "watch": False}
        config = node_config(
            {"stages": ["camera"], "black_box_mib": 1, "record_mib": 1, **own},
            {"camera": {"adapter": "a:A", "output": "/boxes"}},
        )
        self.ring, self.later_s = FrameRing(4096), 0.0
        self.recording = Recording(
            config, {**SETUP, **setup}, [self.ring], lambda: time.monotonic() + self.later_s
        )

    @property
    def recorder(self):
        return self.recording.process

    def wait_for(self, condition):
        wait_until(lambda: condition() or self.recording.step(), lambda: self.recording.problem)

    def records(self):
        file = self.folder / "evidence" / "records" / "perf" / "records.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def texts(self):
        return [record["text"] for record in self.records() if record["kind"] == "log"]


@pytest.fixture
def start(tmp_path):
    nodes = []

    def start(**setup):
        nodes.append(Node(tmp_path, **setup))
        return nodes[-1]

    yield start
    for node in nodes:
        node.recording.close(0)
        node.ring.close()


def test_given_parameters_and_events_of_any_size_then_texts_are_cut_and_counted_and_the_recorder_goes_on(
    start,
):
    node = start(parameters={"camera.options": "x" * 3 * MAX_PACKET_BYTES})
    node.recording.event(1, kind="log", severity="error", text="x" * 3 * MAX_PACKET_BYTES)
    node.recording.event(2, kind="memory", values={f"label_{number}": number for number in range(100_000)})
    node.recording.record("20260101T000000.000Z_large", "why", 3, "é" * MAX_PACKET_BYTES)
    node.recording.event(4, kind="log", severity="info", text="after it")
    pid = node.recorder.pid
    node.wait_for(lambda: "after it" in node.texts())
    cut, replaced, _ = node.texts()
    assert cut.startswith("x" * 16_384 + "... (")
    assert cut.endswith(f"{3 * MAX_PACKET_BYTES - 16_384:,} more characters were cut)")
    assert replaced.startswith("an event 'memory' of ")
    assert (node.recording.cut, node.recording.restarts, node.recorder.pid) == (3, 0, pid)


@pytest.fixture
def node(start):
    return start()


def test_given_records_that_nobody_understands_when_sent_then_it_is_said_and_the_recorder_goes_on(node):
    node.recorder.socket.send(b"no packet")
    node.recording.event(1, kind="record")  # without its name
    node.recording.event(2, kind="log", severity="info", text="after it")
    # on a busy machine, that it is silent comes first
    said = "2 records were not understood, the last one:\nTraceback"
    node.wait_for(lambda: "after it" in node.texts() and node.recording.problem.startswith(said))
    assert node.recording.restarts == 0


def test_given_a_recorder_that_is_stopped_when_seconds_pass_then_it_is_replaced(node):
    """A step that waited for it would never end."""
    node.wait_for(lambda: node.recording.status)
    stopped = node.recorder.pid
    assert node.recording.unable() == ""
    os.kill(stopped, signal.SIGSTOP)
    node.wait_for(node.recording.unable)  # once it has had the processor to stop
    assert node.recording.unable() == "the recorder is stopped"
    node.later_s = 6.0
    node.wait_for(lambda: "s (stopped); another one is started" in node.recording.problem)
    assert "made no progress for" in node.recording.unable()
    node.later_s = 20.0
    node.wait_for(lambda: node.recording.restarts == 1 and node.recording.problem == "")
    assert node.recording.unable() == ""
    assert not psutil.pid_exists(stopped)


@pytest.mark.parametrize(
    ("state", "silent_s", "has_begun", "warned", "killed"),
    [
        ("sleeping", 4.0, True, False, False),
        ("running", 30.0, True, False, False),
        ("disk-sleep", 6.0, True, True, False),
        ("disk-sleep", 21.0, True, True, True),
        ("disk-sleep", 21.0, False, True, False),
        ("disk-sleep", 61.0, False, True, True),
        ("running", 61.0, True, True, True),
    ],
)
def test_given_a_recorder_that_is_silent_when_judged_then_it_depends_on_what_it_waits_for(
    node, monkeypatch, state, silent_s, has_begun, warned, killed
):
    node.wait_for(lambda: not has_begun or node.recording.status)
    monkeypatch.setattr(RecorderProcess, "heard", lambda self: iter(()))
    monkeypatch.setattr(RecorderProcess, "state", state)
    node.later_s = silent_s
    node.recording.step()
    progress = ["no progress" in words for words in (node.recording.problem, node.recording.unable())]
    assert progress == [warned, warned]
    assert (node.recorder is None) == killed


def test_given_a_killed_recorder_that_does_not_end_then_no_second_one_waits_for_the_same_disk(
    node, monkeypatch
):
    node.wait_for(lambda: node.recording.status)
    node.later_s = 20.0
    monkeypatch.setattr(RecorderProcess, "has_ended", lambda self: False)
    os.kill(node.recorder.pid, signal.SIGKILL)
    node.wait_for(lambda: "has not ended" in node.recording.problem)
    assert (node.recorder, node.recording.restarts) == (None, 0)
    assert "disk" in node.recording.unable()
    monkeypatch.undo()
    node.wait_for(lambda: node.recording.restarts == 1)


def test_given_a_node_that_dies_with_a_status_unread_when_gone_then_its_last_seconds_are_written(
    node, tmp_path
):
    assert select.select([node.recorder.socket], [], [], WITHIN_S)[
        0
    ]  # a status, which nobody reads any more
    process = psutil.Process(node.recorder.pid)
    node.recorder.socket.close()
    process.wait(WITHIN_S)
    (incident,) = tmp_path.glob("evidence/2*_node-died")
    assert "gone without a word" in (incident / "incident.json").read_text()


def test_given_more_than_can_be_passed_on_then_it_is_bounded_lost_and_counted_and_then_there_is_room_again(
    node,
):
    node.wait_for(lambda: node.recording.status)
    large = bytes(5 << 20)
    # Six of these may wait. Passes may come in between, the more of them the busier the machine is: so it
    # goes on until enough are lost.
    while node.recording.writer.lost < 17:
        node.recording.message("/objects", 1, large)
    node.wait_for(lambda: node.recording.status["lost"] >= 17)
    node.recording.message("/objects", 1, bytes(20_000))
    node.recording.event(1, kind="log", severity="info", text="after it")
    node.wait_for(lambda: "after it" in node.texts())


def test_given_something_that_cannot_be_passed_on_then_it_is_counted_and_what_follows_is_recorded(node):
    node.wait_for(lambda: node.recording.status)
    node.recording.message("/nobody_heard_of", 1, b"x")  # of no topic of the setup
    node.wait_for(lambda: "1 times something could not be passed on" in node.recording.problem)
    assert "KeyError: '/nobody_heard_of'" in node.recording.problem
    node.recording.frame(0, answered_frame(seq=7), 1.0)
    node.recording.event(2, kind="log", severity="info", text="after it")
    node.wait_for(lambda: "after it" in node.texts())
    assert [record["seq"] for record in node.records() if record["kind"] == "frame"] == [7]
    assert (
        "could not be passed on" in node.recording.problem
    )  # it stands there as long as the recorder goes on


def test_given_no_folder_of_evidence_when_started_then_each_node_has_its_own(start, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    nodes = [start(node=name, evidence_dir="") for name in ("/front/perf", "/rear/perf")]
    files = [
        tmp_path / "torchperf_ros" / "records" / name / "perf" / "records.jsonl"
        for name in ("front", "rear")
    ]
    for node in nodes:
        node.recording.event(1, kind="log", severity="info", text="here")
    for node, file in zip(nodes, files, strict=True):
        node.wait_for(file.exists)


# -- the log of records


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
    log, tmp_path, limited
):
    log.frame(frame_record(**FRAME))
    log.tick(1, 0)
    with limited("FSIZE", 100):
        log.frame(frame_record(**FRAME))
        log.tick(2, 0)
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
    tmp_path, limited
):
    front, rear = both(tmp_path)
    for second in range(20):
        front.event(second, {"kind": "log", "severity": "info", "text": "x" * 100})
        front.tick(second, 0)
    before = (tmp_path / "records" / "records.jsonl").read_bytes()
    with limited("FSIZE", len(before) + 50):
        rear.event(21, {"kind": "log", "severity": "info", "text": "y" * 100})
        rear.tick(21, 0)
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
