"""The node's side of the recorder, with real recorders.

What is too large, what is not understood, who is stopped.
"""

import json
import os
import select
import signal
import time

import psutil
import pytest

from torchperf_ros.observe.recorder.recording import RecorderProcess, Recording
from torchperf_ros.observe.telemetry.record_stream import MAX_PACKET_BYTES
from torchperf_ros.settings.config import node_config
from torchperf_ros.workers.frame_ring import FrameRing

from ..telemetry.frame_records import answered_frame

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
        until = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < until, self.recording.problem
            self.recording.step()
            time.sleep(0.02)

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
    ("state", "silent_s", "warned", "killed"),
    [
        ("sleeping", 4.0, False, False),
        ("running", 30.0, False, False),
        ("disk-sleep", 6.0, True, False),
        ("disk-sleep", 21.0, True, True),
        ("running", 61.0, True, True),
    ],
)
def test_given_a_recorder_that_is_silent_when_judged_then_it_depends_on_what_it_waits_for(
    node, monkeypatch, state, silent_s, warned, killed
):
    node.wait_for(lambda: node.recording.status)
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
