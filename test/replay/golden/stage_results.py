"""Results of replays that never were: stages that published these messages."""

import math

import numpy as np

from torchperf_ros.config.message_types import encode
from torchperf_ros.frame.frame_table import FRAME, output_hash
from torchperf_ros.frame.outcome import Fallback, Outcome
from torchperf_ros.replay.output_log import OutputLog
from torchperf_ros.replay.replay_result import ReplayResult, StageResult

START_NS = 1_760_000_000_000_000_000
PERIOD_NS = 100_000_000


def stamp_ns(seq):
    return START_NS + seq * PERIOD_NS


def frame_row(seq, data, *, outcome=Outcome.ON_TIME, total_ms=10.0):
    row = np.zeros(1, FRAME)
    for name in FRAME.names:
        if FRAME[name].kind == "f":
            row[name] = math.nan
    row["seq"], row["stamp_ns"], row["t_ns"] = seq, stamp_ns(seq), stamp_ns(seq) + 3_000_000
    row["outcome"], row["total_ms"], row["output_hash"] = outcome, total_ms, output_hash(data)
    row["check"] = -1
    row["fallback"] = -1 if outcome is Outcome.ON_TIME else Fallback.HOLD_LAST
    return row


def stage_result(name, kind, rows, output=None, reasons=()):
    frames = np.concatenate([np.zeros(0, FRAME), *rows])
    return StageResult(
        name, ("full", "fast"), f"/{name}", kind, 50.0, frames, len(rows), 0, 0, (), dict(reasons), output
    )


def result_of(folder, stages, **summary):
    """A result whose stages published these messages: {"perception": [message, None for a frame without, ...]}."""
    output = OutputLog(folder / "outputs.mcap")
    results = {}
    for name, messages in stages.items():
        rows, kind = [], "std_msgs/msg/Float64MultiArray"
        for seq, message in enumerate(messages):
            data = None
            if message is not None:
                kind = message.__msgtype__
                data = bytes(encode(message, kind))
                output.write(f"/{name}", kind, data, stamp_ns(seq) + 3_000_000)
            rows.append(frame_row(seq, data))
        results[name] = stage_result(name, kind, rows, output.path)
    output.close()
    told = {
        "log": {"sha256": "a log"}, "params_sha256": "parameters", "model": dict.fromkeys(stages, "a model"),
        "pace": "fast", "seed": 0,
    }  # fmt: skip
    return ReplayResult(folder / "drive.mcap", results, (), {**told, **summary}, output.path)
