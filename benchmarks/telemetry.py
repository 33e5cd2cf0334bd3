"""What telemetry costs: per frame on the stage's thread, once a second on the reporter's, and in processor time.

A real node process with a camera at 30 Hz and an onlooker that subscribes to everything; a stopwatch sits around the
node's own functions. Wall time is what the next frame waits for; processor time leaves out what others took.

Then, without the stopwatch, the processor time of the node with recorder and exporter (scraped every second), and of
one without, in turns.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rig.arguments import add_backup, add_camera, add_stage, arguments_of
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import Streaming
from benchmarks.rig.report import Report, Target, say
from benchmarks.rig.scraper import Scrapes, free_port

_PER_FRAME = ("record and publish", "encode the record", "publish latency_stages", "publish latency",
              "tell the recorder", "count and judge health")  # fmt: skip
_ON, _OFF = "on", "off"
_FIRST_FRAMES = 10
_REPORTS_PER_S = 1.0
_WARM_UP_S = 5.0
_EPILOG = """\
targets: record, /perf/latency_stages, /perf/latency and recorder together <= 40 us per frame (p50); reporter <= 1 %
of a core; recorder and exporter together <= 1 % of the machine

example:
  ./run bench telemetry --seconds 60"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--seconds", type=float, default=20.0, help="of stream (default 20)")
    parser.add_argument("--turns", type=int, default=3, help="with and without recorder and exporter (default 3)")
    parser.add_argument("--slice", type=float, default=10.0, help="seconds of each such turn (default 10)")
    add_camera(parser)
    add_stage(parser)
    add_backup(parser)
    arguments = parser.parse_args()
    report = Report("telemetry", arguments)
    samples = _samples(arguments)
    reports = samples.pop("report", [])
    figures = {name: _figures(found[_FIRST_FRAMES:] or found) for name, found in samples.items()}
    figures["report"] = _figures(reports)
    cpu_percent = 100 * sum(cpu_us for _, cpu_us in reports) / 1e6 / max(1, len(reports)) * _REPORTS_PER_S
    figures["reporter_cpu_percent"] = cpu_percent
    figures["beside"] = _beside(arguments)
    _show(report, figures)
    per_frame_us = figures["record and publish"]["wall_us"]["p50"]
    report.finish(figures, [
        Target("record and publish, per frame, p50", per_frame_us, "<=", 40.0, "us"),
        Target("reporter", cpu_percent, "<=", 1.0, "% of a core"),
        Target("recorder and exporter, beside off", figures["beside"]["percent"], "<=", 1.0, "% of the machine"),
    ])  # fmt: skip
    return 0


def _samples(arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    with tempfile.TemporaryDirectory(prefix="torchperf_telemetry_") as folder:
        file = Path(folder) / "samples.json"
        with Streaming(arguments, instrumented=file) as streaming:
            say(f"{arguments.seconds:g} s of images")
            streaming.stream(arguments.seconds)
        return dict(json.loads(file.read_text(encoding="utf-8"))["samples"])


def _beside(arguments: argparse.Namespace) -> dict[str, Any]:
    """Processor time in % of a core: of the node with recorder and exporter, of the recorder, of the node without."""
    shares: dict[str, list[float]] = {"node on": [], "node off": [], "recorder": []}
    for turn in range(2 * arguments.turns):
        on = turn % 2 == 0
        say(f"turn {turn + 1} of {2 * arguments.turns}: recorder and exporter {_ON if on else _OFF}")
        node_s, recorder_s, wall_s = _processor_times(arguments, on=on)
        shares[f"node {_ON if on else _OFF}"].append(100 * node_s / wall_s)
        if on:
            shares["recorder"].append(100 * recorder_s / wall_s)
    middle = {name: statistics.median(found) for name, found in shares.items()}
    added = middle["node on"] - middle["node off"] + middle["recorder"]
    return {**middle, "added": added, "percent": added / (psutil.cpu_count() or 1), "turns": shares}


def _processor_times(arguments: argparse.Namespace, *, on: bool) -> tuple[float, float, float]:
    """Seconds of processor time of node and recorder, and of wall time, during one stream."""
    port = free_port() if on else 0
    with Streaming(arguments, metrics_port=port, recorder=on) as streaming:
        streaming.stream(_WARM_UP_S)  # first pages
        pid = streaming.node.pid
        watched = [psutil.Process(pid), *_recorder_of(pid)]
        before = [_processor_s(process) for process in watched]
        began, ending = time.monotonic(), threading.Event()
        scraper = threading.Thread(target=Scrapes().run, args=(port, 1.0, ending), daemon=True)
        if on:
            scraper.start()
        streaming.stream(arguments.slice)
        took = [_processor_s(process) - start for process, start in zip(watched, before, strict=True)]
        ending.set()
        return took[0], sum(took[1:]), time.monotonic() - began


def _recorder_of(pid: int) -> list[psutil.Process]:
    name = "torchperf_ros.recorder.recorder import"
    return [child for child in psutil.Process(pid).children() if name in str(child.cmdline())]


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _figures(found: list[tuple[float, float]]) -> dict[str, Any]:
    wall_us, cpu_us = [wall_us for wall_us, _ in found], [cpu_us for _, cpu_us in found]
    return {"wall_us": distribution(wall_us), "cpu_us": distribution(cpu_us)}


def _show(report: Report, figures: dict[str, Any]) -> None:
    def row(name: str) -> list[object]:
        wall, cpu = figures[name]["wall_us"], figures[name]["cpu_us"]
        return [name, wall["count"], wall["p50"], wall["p99"], wall["max"], cpu["p50"], cpu["p99"]]

    columns = ("us", "calls", "wall p50", "p99", "max", "processor p50", "p99")
    report.table("Per frame, on the stage's thread; lines two to four are parts of the first, timed apart", columns,
                 [row(name) for name in _PER_FRAME if name in figures])  # fmt: skip
    report.table("Once a second, on the reporter's thread, from the node's start on", columns, [row("report")])
    beside = figures["beside"]
    columns = ("% of a core, median of the turns", "node on", "node off", "recorder", "added by telemetry")
    report.table("Recorder and exporter, scraped every second, beside neither", columns, [
        ["", beside["node on"], beside["node off"], beside["recorder"], beside["added"]],
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
