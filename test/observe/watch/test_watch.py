"""The watch as a whole.

Fed like a recorder feeds it, on a virtual clock; its signals fit the records' schema.
"""

import json
import os

import jsonschema
import numpy as np
import pytest

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.messages import encode, header
from torchperf_ros.observe.recorder import RecordLog, schema
from torchperf_ros.observe.recording import RecorderProcess
from torchperf_ros.observe.telemetry.machine import Gpu
from torchperf_ros.observe.telemetry.rows import EventRecord, MessageRecord, StreamWriter
from torchperf_ros.observe.watch.watch import Watch
from torchperf_ros.stage.frame import StepTimes
from torchperf_ros.workers.frame_ring import FrameRing, InputBytes

from ...api.test_pixels import image as image_message
from ...stage.conftest import wait_until
from ..telemetry.frame_records import frame_record

IMAGE, MARKERS = "sensor_msgs/msg/Image", "visualization_msgs/msg/MarkerArray"
SETUP = {
    "node": "/perf",
    "pid": os.getpid(),
    "parameters": {"device": "cpu"},
    "topics": [
        ["/perf/memory", "std_msgs/msg/Float64"],
        ["/diagnostics", "diagnostic_msgs/msg/DiagnosticArray"],
    ],
    "heard": [],
    "stages": [
        {
            "name": "camera",
            "tiers": ["full", "fast"],
            "budget_ms": 50.0,
            "output": ["/boxes", MARKERS],
            "inputs": [["/image", IMAGE]],
        },
        {"name": "plan", "tiers": ["full"], "budget_ms": 30.0, "output": ["/path", ""], "inputs": [None]},
    ],
}
START_NS = 1_000 * NS_PER_S


def image(stamp_ns, value):
    noise = np.random.default_rng(value).integers(0, 8, 48 * 64 * 3)
    pixels = (np.linspace(20, 200, noise.size) + noise).astype(np.uint8).reshape(48, 64, 3)
    return bytes(encode(image_message("rgb8", pixels, header=header(stamp_ns, "")), IMAGE))


def frame(at_s, value=None, stage=0, total_ms=20.0):
    received_ns = START_NS + round(at_s * NS_PER_S)
    number = round(at_s * 10)
    data = image(received_ns, number if value is None else value)
    return frame_record(
        received_ns,
        stage=stage,
        seq=number,
        stamp_ns=received_ns,
        received_ns=received_ns,
        age_ms=4.0,
        steps=StepTimes(1.0, 2.0, total_ms - 4.0, 1.0),
        total_ms=total_ms,
        inputs=[] if stage else [InputBytes(0, received_ns, 4.0, data)],
    )


def diagnostics(lifecycle="active", **camera):
    values = {key: str(value) for key, value in camera.items()}
    active = lifecycle == "active"
    return EventRecord(START_NS, {"kind": "counters", "active": active, "stages": {"camera": values}})


@pytest.fixture
def watch():
    return Watch(SETUP, Gpu("none"))


def tick(watch, at_s, known_s=None):
    """What is found, by name."""
    now_ns, known_ns = (
        START_NS + round(s * NS_PER_S) for s in (at_s, at_s if known_s is None else known_s)
    )
    return {
        found.name: found for found in watch.tick(now_ns, known_ns) if not found.name.startswith("machine")
    }


def drive(watch, begin_s, end_s, **frames):
    """Ten frames a second of both stages, each second ticked; the findings of the last."""
    found = {}
    for second in range(begin_s, end_s):
        for part in range(10):
            watch.take(frame(second + part / 10, **frames))
            watch.take(frame(second + part / 10, stage=1))
        found = tick(watch, second + 1)
    return found


def test_given_a_usual_drive_when_ticked_then_nothing_is_found_and_the_signals_fit_the_schema(
    watch, tmp_path
):
    assert drive(watch, 0, 20) == {}
    signals = watch.signals
    assert signals["stages"]["camera"]["latency_p50_ms"] == 20.0
    assert signals["stages"]["camera"]["rate_hz"] == pytest.approx(10.0)
    assert signals["stages"]["camera"]["objects"] is None
    assert "rate_hz" not in signals["stages"]["plan"]
    assert signals["machine"]["memory_available_mib"] > 0
    start = {
        "node": "/perf",
        "versions": {},
        "stages": [{"name": "camera", "tiers": [], "budget_ms": 50.0}],
    }
    log = RecordLog(tmp_path, 1 << 20, start)
    log.event(1, {"kind": "signals", **signals})
    log.tick(1, 0)
    line = json.loads((tmp_path / "records.jsonl").read_text().splitlines()[-1])
    jsonschema.Draft202012Validator(json.loads(schema())).validate(line)
    assert line["stages"]["camera"] == signals["stages"]["camera"]


@pytest.mark.parametrize(
    ("begins_s", "ends_s", "fault", "name"),
    [
        (5, 8, {"value": 7}, "camera: input frozen"),
        (90, 96, {"total_ms": 30.0}, "camera: latency"),
    ],
)
def test_given_a_frozen_camera_or_a_slower_model_when_seconds_have_passed_then_it_is_told_until_it_is_over(
    watch, begins_s, ends_s, fault, name
):
    drive(watch, 0, begins_s)
    assert set(drive(watch, begins_s, ends_s, **fault)) == {name}
    assert drive(watch, ends_s, ends_s + 6) == {}


def test_given_a_recorder_without_time_when_frames_come_late_then_they_are_judged_as_if_they_had_not(watch):
    """Nothing is taken for many seconds while the camera goes on; then all of it at once."""
    drive(watch, 0, 5)
    for second in range(6, 20):
        assert tick(watch, second, known_s=5.0) == {}
    assert drive(watch, 5, 20) == {}
    assert set(tick(watch, 25, known_s=25)) == {"camera: input stopped"}


def test_given_a_node_that_is_deactivated_when_its_camera_stops_then_nothing_is_told(watch):
    drive(watch, 0, 5)
    watch.take(diagnostics("inactive"))
    assert [tick(watch, second) for second in range(6, 20)] == [{}] * 14


def test_given_diagnostics_and_drops_when_taken_then_they_are_counted(watch):
    watch.take(diagnostics(restarts=1))
    drive(watch, 0, 2)
    watch.take(diagnostics(restarts=4, tier_full_recompiles=0))
    watch.take(EventRecord(START_NS, {"kind": "dropped", "stage": "camera", "superseded": 3}))
    watch.take(
        EventRecord(START_NS, {"kind": "health", "stage": "camera", "from": "NOMINAL", "to": "DEGRADED"})
    )
    watch.take(MessageRecord(START_NS, 0, b"no diagnostics"))
    tick(watch, 2)
    assert set(drive(watch, 2, 3)) == {"camera: restarts"}
    assert watch.signals["stages"]["camera"]["superseded"] == 3


def test_given_an_input_of_an_unknown_type_then_the_watch_says_that_it_has_ended_and_the_rest_goes_on(
    tmp_path,
):
    """With a real recorder, as the node spawns it."""
    stage = {**SETUP["stages"][0], "inputs": [["/image", "nobody_msgs/msg/Knows"]]}
    setup = {
        **SETUP,
        "stages": [stage],
        "versions": {},
        "record_dir": str(tmp_path / "records"),
        "record_mib": 1,
        "evidence_dir": str(tmp_path / "evidence"),
        "evidence_mib": 5,
        "black_box_s": 1.0,
        "black_box_after_s": 1.0,
        "black_box_mib": 1,
        "watch": True,
    }
    ring, writer = FrameRing(4096), StreamWriter(4096)
    recorder = RecorderProcess(writer, [ring.fd], setup)
    writer.event(START_NS, {"kind": "log", "severity": "info", "text": "still recorded"})
    heard = []
    wait_until(lambda: heard.extend(recorder.heard()) or heard, lambda: "a word of the recorder")
    writer.event(START_NS, {"kind": "end"})
    assert recorder.close() == ""
    ring.close()
    assert "the watch has ended" in heard[0]["problem"]
    assert "nobody_msgs/msg/Knows" in heard[0]["problem"]
    assert "still recorded" in (tmp_path / "records" / "records.jsonl").read_text()
