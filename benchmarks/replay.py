"""What a replay adds to the model's own time, and whether its memory grows with the log.

A log of raw images is replayed as fast as it goes, without an output, through a stage of the benchmark's model. The
overhead of a frame is the time from one frame to the next, less the steps in the worker: reading the log, the copy into
shared memory, two processes waking each other, the row that is kept. It is replayed once more, then one twice as long,
and the memory of the replaying process is read at the end of each.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.bare_stage import write_images
from benchmarks.rig.bench_stage import ADAPTER
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import model_options
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayOptions

_STEPS: Final = ("decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
_FIRST_FRAMES: Final = 20
_TARGET_MS: Final = 0.5
_EPILOG = """\
target at 1280x720: overhead p50 <= 0.5 ms; memory flat

examples:
  ./run bench replay
  ./run bench replay --frames 900 --json replay.json"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--frames", type=int, default=600, help="of the shortest log (default 600)")
    parser.add_argument("--size", default="1280x720", help="of the images, rgb8 (default 1280x720)")
    parser.add_argument("--model-ms", type=float, default=0.0, help="inference time (default 0: the smallest)")
    arguments = parser.parse_args()
    report = Report("replay", arguments)
    with tempfile.TemporaryDirectory(prefix="torchperf_replay_") as folder:
        runs = [_run(Path(folder), arguments, factor * arguments.frames) for factor in (1, 1, 2)]
    overhead = runs[0]["overhead_ms"]
    keys = ("count", "p50", "p90", "p99", "max")
    rows = [[name, *(runs[0][f"{name}_ms"][key] for key in keys)] for name in ("overhead", "model", "frame")]
    report.table(f"{arguments.size} rgb8, --pace fast, in ms", ("", "frames", "p50", "p90", "p99", "max"), rows)
    report.table("memory of the replaying process", ("frames", "log MB", "RSS MiB"),
                 [[run["frames"], run["log_mb"], run["rss_mib"]] for run in runs])  # fmt: skip
    growth_mib = runs[2]["rss_mib"] - runs[1]["rss_mib"]
    targets = [
        Target("overhead p50", overhead["p50"], "<=", _TARGET_MS, "ms"),
        Target("RSS, log twice as long, less", growth_mib, "<=", 16.0, "MiB"),
    ]
    report.finish({"runs": runs}, targets)
    return 0


def _run(folder: Path, arguments: argparse.Namespace, frames: int) -> dict[str, Any]:
    log = folder / f"{frames}.mcap"
    width, height = (int(word) for word in arguments.size.split("x"))
    if not log.exists():
        say(f"writing {frames} images")
        write_images(log, frames, width, height)
    values = {
        "stages": ["perception"], "perception.adapter": ADAPTER,
        "perception.options": json.dumps(model_options(arguments.model_ms)),
        "perception.output": "path", "perception.tiers": ["full"], "perception.engine": "eager",
        "perception.max_frame_bytes": max(1024, 2 * width * height * 3),
    }  # fmt: skip
    answered_ns: list[int] = []
    say(f"replaying {frames} images")
    result = replay(log, ReplayOptions(overrides=values), lambda _done, _total: answered_ns.append(time.monotonic_ns()))
    rows = result.stage("perception").frames
    # the progress is told when a frame is handed over, which is right after the one before was answered
    frame_ms = np.diff(np.array(answered_ns[: len(rows)])) / 1e6
    model_ms = sum(np.asarray(rows[name]) for name in _STEPS)[: len(frame_ms)]
    kept = slice(_FIRST_FRAMES, None)
    return {
        "frames": frames, "log_mb": log.stat().st_size / 1e6,
        "rss_mib": psutil.Process().memory_info().rss / (1 << 20), "on_time": rows["outcome"].tolist().count(0),
        "overhead_ms": distribution((frame_ms - model_ms)[kept]), "model_ms": distribution(model_ms[kept]),
        "frame_ms": distribution(frame_ms[kept]), "took_s": result.summary["took_s"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
