"""Small logs of a made-up drive, as the node would have published it, for the tests of the report."""

import json
import math
import re
from pathlib import Path

import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.messages import encode, header
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.observe.telemetry.diagnostics import diagnostic_bytes
from torchperf_ros.observe.telemetry.rows import LABELS, LabelledArray
from torchperf_ros.replay.run_reading import read_runs

from ...api.test_pixels import image as image_message

START_NS = 1_700_000_000_000_000_000
PERIOD_NS = 50_000_000
ARRAY, DIAGNOSTICS = "std_msgs/msg/Float64MultiArray", "diagnostic_msgs/msg/DiagnosticArray"
IMAGE = "sensor_msgs/msg/Image"
MEMORY_LABELS = ("node_rss_mib", "workers_rss_mib", "cuda_allocated_mib")
FRAMES = 100
LATE = 60
BRAKED = 30
"""The frame of `perception` that was late, and had its second input missing.

That of `planning` that had to brake.
"""


def frame_row(stage: int, seq: int) -> list[float]:
    """100 frames on time after 10 to 20 ms, but for one, late and held after 50.5 ms, without input 1."""
    late = stage == 0 and seq == LATE
    total_ms = 50.5 if late else 10.0 + seq % 10
    inference_ms = math.nan if late else total_ms - 4.0
    outcome, fallback = (Outcome.LATE, Fallback.HOLD_LAST) if late else (Outcome.ON_TIME, math.nan)
    row = [stage, seq, 2.0, 0.5, 0.5, 1.0, inference_ms, 1.0, total_ms, 50.0, seq >= 50, outcome, fallback]
    return [*row, checked(stage, seq), 0.0, 2.0 * late, 50.0, total_ms - 50.0, 0.0, math.nan]


def checked(stage: int, seq: int) -> float:
    """Planning has a guard, which brakes once."""
    return math.nan if stage == 0 else GuardVerdict.BRAKE if seq == BRAKED else GuardVerdict.ACCEPT


def published_ns(seq: int) -> int:
    """When the frame was answered: its stamp, its age of 2 ms, and what it took."""
    return START_NS + seq * PERIOD_NS + round((2.0 + frame_row(0, seq)[8]) * 1e6)


def messages(*, images: bool = True, memory: bool = True, diagnostics: bool = True, node: str = "/perf"):
    """(topic, type, time in ns, CDR), in order."""
    rows, parts = LabelledArray(LABELS), LabelledArray(MEMORY_LABELS)
    told = []
    for seq in range(FRAMES):
        t_ns = published_ns(seq)
        told += [
            (f"{node}/latency_stages", ARRAY, t_ns + stage, rows.encode(frame_row(stage, seq)))
            for stage in (0, 1)
        ]
        if images:
            told.append(("/camera/image_raw", IMAGE, START_NS + seq * PERIOD_NS + 2_000_000, image(seq)))
        if seq % 20 == 0:
            if memory:
                told.append(
                    (f"{node}/memory_stats", ARRAY, t_ns, parts.encode([60.0, 800.0 + seq, math.nan]))
                )
            if diagnostics:
                told.append(("/diagnostics", DIAGNOSTICS, t_ns, diagnostics_at(seq, node)))
    anomaly = Alert(Level.WARN, "perception: deadline missed", "<b>no & result</b>", {"seq": str(LATE)})
    told.append(
        (f"{node}/anomaly", DIAGNOSTICS, published_ns(LATE), diagnostic_bytes([anomaly], node, START_NS))
    )
    return sorted(told, key=lambda message: message[2])


def diagnostics_at(seq: int, node: str) -> bytes:
    """What the node says of itself; the health changes once."""
    health = "NOMINAL" if seq < LATE else "DEGRADED"
    statuses = [
        Alert(Level.OK, f"perf: {stage}", "", {"health": health, "tiers": "full,fast", "tier": "full"})
        for stage in ("perception", "planning")
    ]
    statuses.append(Alert(Level.OK, "perf: node", "", {"health": health, "pid": "7"}))
    return diagnostic_bytes(statuses, node, START_NS)


def image(seq: int) -> bytes:
    """A picture of 32 by 24 pixels in rgb8 whose red is the frame's number."""
    pixels = np.zeros((24, 32, 3), dtype=np.uint8)
    pixels[..., 0] = seq
    stamped = header(START_NS + seq * PERIOD_NS, "camera")
    return bytes(encode(image_message("rgb8", pixels, header=stamped), IMAGE))


def write_log(folder: Path, told=None) -> Path:
    """Write messages as a rosbag2 folder with MCAP inside."""
    store = get_typestore(Stores.ROS2_JAZZY)
    with Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        connections = {}
        for topic, type_name, t_ns, cdr in messages() if told is None else told:
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, type_name, typestore=store)
            writer.write(connections[topic], t_ns, cdr)
    return folder


def records() -> list[dict[str, object]]:
    """The same drive as records."""
    stages = [
        {"name": name, "tiers": ["full", "fast"], "budget_ms": 50.0} for name in ("perception", "planning")
    ]
    lines: list[dict[str, object]] = [
        {
            "v": 1,
            "kind": "start",
            "t_ns": START_NS,
            "node": "/perf",
            "versions": {"torch": "2.13"},
            "stages": stages,
        }
    ]
    for seq in range(FRAMES):
        for stage, name in enumerate(("perception", "planning")):
            row = dict(zip(LABELS, frame_row(stage, seq), strict=True))
            late = row["outcome"] == Outcome.LATE
            numbers = {key: value for key, value in row.items() if key.endswith("_ms")}
            lines.append(
                {
                    "v": 1,
                    "kind": "frame",
                    "t_ns": published_ns(seq) + stage,
                    "stage": name,
                    "seq": seq,
                    "stamp_ns": START_NS + seq * PERIOD_NS,
                    "reason": "",
                    "profiled": False,
                    **{key: None if math.isnan(value) else value for key, value in numbers.items()},
                    "tier": "fast" if row["tier"] else "full",
                    "outcome": "late" if late else "on_time",
                    "fallback": "hold_last" if late else None,
                    "a_new_field": 1,
                    "check": None if stage == 0 else GuardVerdict(int(row["check"])).word,
                    "missing_inputs": int(row["missing_inputs"]),
                }
            )
    lines.append(
        {"v": 1, "kind": "memory", "t_ns": START_NS, "values": {"workers_rss_mib": 800.0, "free": None}}
    )
    lines.append(
        {
            "v": 1,
            "kind": "health",
            "t_ns": START_NS,
            "stage": "perception",
            "from": "STARTING",
            "to": "NOMINAL",
        }
    )
    lines.append(
        {
            "v": 1,
            "kind": "anomaly",
            "t_ns": START_NS,
            "level": "WARN",
            "name": "perception: deadline missed",
            "message": "why",
            "values": {"seq": 60},
        }
    )
    lines.append({"v": 1, "kind": "of the future", "t_ns": START_NS})
    return lines


def read(path, node=None):
    """Every run that a path holds."""
    return read_runs(path, lambda done, total: None, node)


def without_plotly(page: str) -> str:
    """The page less the library, which nobody here wrote."""
    from plotly.offline import get_plotlyjs

    return page.replace(get_plotlyjs(), "")


def figures_of(page: str) -> list:
    """The plotly figures of a page."""
    return list(json.loads(re.search(r"const figures = (\{.*\});\n", without_plotly(page))[1]).values())


def write_records(file: Path, lines: list[dict[str, object]]) -> Path:
    """Write them, one a line."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file
