"""Whether memory and descriptors of the node and its workers grow over many frames.

One stage, small images at a high rate. Resident memory and open descriptors are sampled each second; the
trend is the least-squares slope over the last 80 % of the samples, in KiB per 1,000 frames.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rig.arguments import add_backup, add_camera, add_stage, arguments_of
from benchmarks.rig.figures import slope, sparkline
from benchmarks.rig.graph import Streaming
from benchmarks.rig.report import Report, Target, say

_EVERY_S = 1.0
_LAST_SHARE = 0.8
_EPILOG = """\
target: node < 1 KiB per 1,000 frames

examples:
  ./run bench soak
  ./run bench soak --frames 100000 --json soak.json"""


class Sampler:
    """Samples memory and descriptors of some processes over the frames that went through."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._next = time.monotonic()
        self.frames: list[int] = []
        self.rss_kib: dict[str, list[float]] = {name: [] for name in pids}
        self.descriptors: dict[str, list[int]] = {name: [] for name in pids}

    def sample(self, frames: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next += _EVERY_S
        self.frames.append(frames)
        for name, pid in self._pids.items():
            self.rss_kib[name].append(psutil.Process(pid).memory_info().rss / 1024)
            self.descriptors[name].append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
        if len(self.frames) % 10 == 0:
            node_mib = self.rss_kib["node"][-1] / 1024
            say(f"{frames} frames; node {node_mib:.2f} MiB, {self.descriptors['node'][-1]} descriptors")


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--frames", type=int, default=20_000, help="default 20000")
    add_camera(parser, size="64x48", rate=200.0)
    add_stage(parser, model_ms=1.0, budget_ms=20.0)
    add_backup(parser)
    arguments = parser.parse_args()
    report = Report("soak", arguments)
    figures = _measure(arguments)
    _show(report, figures)
    trend = figures["processes"]["node"]["kib_per_1000_frames"]
    report.finish(figures, [Target("node, per 1,000 frames", trend, "<", 1.0, "KiB")])
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    # The ring of frames is touched page by page in its first round: keep that short, it is no trend.
    width, height = (int(word) for word in arguments.size.split("x"))
    with Streaming(arguments, outputs=False, max_frame_bytes=8 * width * height) as streaming:
        node, seen = streaming.node, streaming.seen
        workers = {f"worker {number}": pid for number, pid in enumerate(node.worker_pids())}
        sampler = Sampler({"node": node.pid, **workers})

        def look() -> None:
            if seen.rows:
                sampler.sample(int(seen.rows[-1]["seq"]))
                del seen.rows[:-1]

        seconds = arguments.frames / arguments.rate
        say(f"{arguments.frames} frames at {arguments.rate:g} Hz: {seconds:.0f} s")
        streaming.stream(seconds, meanwhile=look)
        counters = node.settled_counters()
    return {
        "frames": sampler.frames,
        "counters": counters,
        "processes": {name: _trend(sampler, name) for name in sampler.rss_kib},
    }


def _trend(sampler: Sampler, name: str) -> dict[str, Any]:
    rss_kib, descriptors = sampler.rss_kib[name], sampler.descriptors[name]
    per_frame, error = slope(sampler.frames, rss_kib, _LAST_SHARE)
    return {
        "kib_per_1000_frames": 1000 * per_frame,
        "standard_error": 1000 * error,
        "rss_kib": rss_kib,
        "descriptors": descriptors,
    }


def _show(report: Report, figures: dict[str, Any]) -> None:
    rows = [
        [
            name,
            process["rss_kib"][0] / 1024,
            process["rss_kib"][-1] / 1024,
            process["kib_per_1000_frames"],
            process["standard_error"],
            process["descriptors"][0],
            max(process["descriptors"]),
            process["descriptors"][-1],
        ]
        for name, process in figures["processes"].items()
    ]
    counters = figures["counters"]
    report.table(
        f"{counters['answered']:.0f} frames answered of {counters['frames']:.0f} received",
        (
            "",
            "first MiB",
            "last MiB",
            "KiB/1,000 frames",
            "std. error",
            "descriptors: first",
            "most",
            "last",
        ),
        rows,
    )
    for name, process in figures["processes"].items():
        report.text(f"{name:9} {sparkline(process['rss_kib'])}")


if __name__ == "__main__":
    sys.exit(main())
