"""What telemetry costs: per frame, per second, in processor time, and whether scraping makes answers late.

`frames`: a real node process with a camera at 30 Hz and an onlooker that subscribes to everything; a
stopwatch sits around the node's own functions. Wall time is what the next frame waits for; processor time
leaves out what others took.

`beside`: without the stopwatch, the processor time of the node with recorder and exporter (scraped every
second), and of one without, in turns.

`scrapes`: one node, the same stream with a scrape every second and without, in turns. The scraper asks as
Prometheus does, and notes when each scrape began and ended; so the frames that were on their way through
the node during a scrape can be looked at alone. Lateness is receipt to publish less the budget; overhead is
the same less the model's own steps, which the scrape has no part in.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rig.arguments import add_backup, add_camera, add_some, add_stage, arguments_of
from benchmarks.rig.figures import distribution
from benchmarks.rig.frames import lateness, show_lateness
from benchmarks.rig.graph import Streaming
from benchmarks.rig.observer import Row
from benchmarks.rig.report import Report, Target, say
from benchmarks.rig.scraper import Scrapes, free_port

_PER_FRAME = (
    "record and publish",
    "encode the record",
    "publish latency_stages",
    "publish latency",
    "tell the recorder",
    "count and judge health",
)
_FIRST_FRAMES = 10  # of each stream: after the pause, caches are cold
_REPORTS_PER_S = 1.0
_WARM_UP_S = 5.0
_WITH, _WITHOUT, _DURING = "with scrapes", "without", "during a scrape"
_NS_PER_MS = 1e6
_EPILOG = """\
targets: record, /perf/latency_stages, /perf/latency and recorder together <= 40 us per frame (p50); reporter <= 1 %
of a core; recorder and exporter together <= 1 % of the machine; scrapes move p99.9 of the lateness by <= 0.1 ms

examples:
  ./run bench telemetry --seconds 60
  ./run bench telemetry --parts scrapes --seconds 120 --every 0.2 --json scrapes.json"""


def main() -> int:
    parts = {"frames": _frames, "beside": _beside, "scrapes": _scrapes}
    parser = arguments_of(__doc__ or "", _EPILOG)
    add_some(parser, "--parts", parts)
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="of stream: of frames, and with and without scrapes each (default 60)",
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="with and without recorder and exporter (default 3)"
    )
    parser.add_argument("--slice", type=float, default=10.0, help="seconds of each turn (default 10)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between scrapes (default 1)")
    add_camera(parser)
    add_stage(parser)
    add_backup(parser)
    arguments = parser.parse_args()
    Report("telemetry", arguments).finish_parts(arguments, parts)
    return 0


def _frames(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    with tempfile.TemporaryDirectory(prefix="torchperf_telemetry_") as folder:
        file = Path(folder) / "samples.json"
        with Streaming(arguments, instrumented=file) as streaming:
            say(f"{arguments.seconds:g} s of images")
            streaming.stream(arguments.seconds)
        samples = json.loads(file.read_text(encoding="utf-8"))["samples"]
    reports = samples.pop("report", [])
    figures = {name: _times(found[_FIRST_FRAMES:] or found) for name, found in samples.items()}
    figures["report"] = _times(reports)
    cpu_percent = 100 * sum(cpu_us for _, cpu_us in reports) / 1e6 / max(1, len(reports)) * _REPORTS_PER_S

    def row(name: str) -> list[object]:
        wall, cpu = figures[name]["wall_us"], figures[name]["cpu_us"]
        return [name, wall["count"], wall["p50"], wall["p99"], wall["max"], cpu["p50"], cpu["p99"]]

    columns = ("us", "calls", "wall p50", "p99", "max", "processor p50", "p99")
    report.table(
        "Per frame, on the stage's thread; lines two to four are parts of the first, timed apart",
        columns,
        [row(name) for name in _PER_FRAME if name in figures],
    )
    report.table(
        "Once a second, on the reporter's thread, from the node's start on", columns, [row("report")]
    )
    per_frame_us = figures["record and publish"]["wall_us"]["p50"]
    return {**figures, "reporter_cpu_percent": cpu_percent}, [
        Target("record and publish, per frame, p50", per_frame_us, "<=", 40.0, "us"),
        Target("reporter", cpu_percent, "<=", 1.0, "% of a core"),
    ]


def _times(found: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "wall_us": distribution([wall for wall, _ in found]),
        "cpu_us": distribution([cpu for _, cpu in found]),
    }


def _beside(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    """Processor time in % of a core.

    Of the node with recorder and exporter, of the recorder, of the node without.
    """
    shares: dict[str, list[float]] = {"node on": [], "node off": [], "recorder": []}
    for turn in range(2 * arguments.turns):
        on = turn % 2 == 0
        say(f"turn {turn + 1} of {2 * arguments.turns}: recorder and exporter {'on' if on else 'off'}")
        node, recorder = _processor_percent(arguments, on=on)
        shares["node on" if on else "node off"].append(node)
        if on:
            shares["recorder"].append(recorder)
    middle = {name: statistics.median(found) for name, found in shares.items()}
    added = middle["node on"] - middle["node off"] + middle["recorder"]
    columns = ("% of a core, median of the turns", *middle, "added by telemetry")
    rows = [["", *middle.values(), added]]
    report.table("Recorder and exporter, scraped every second, beside neither", columns, rows)
    percent = added / (psutil.cpu_count() or 1)
    return {**middle, "added": added, "percent": percent, "turns": shares}, [
        Target("recorder and exporter, beside off", percent, "<=", 1.0, "% of the machine"),
    ]


def _processor_percent(arguments: argparse.Namespace, *, on: bool) -> tuple[float, float]:
    """Processor time of node and recorder during one stream, in % of a core."""
    port = free_port() if on else 0
    with Streaming(arguments, metrics_port=port, recorder=on) as streaming:
        streaming.stream(_WARM_UP_S)  # first pages
        node = psutil.Process(streaming.node.pid)
        name = "torchperf_ros.observe.recorder import"
        watched = [node, *(child for child in node.children() if name in str(child.cmdline()))]
        before_s, began = [_processor_s(process) for process in watched], time.monotonic()
        with Scrapes().every(1.0, port) if on else contextlib.nullcontext():
            streaming.stream(arguments.slice)
            took_s = [
                _processor_s(process) - start_s for process, start_s in zip(watched, before_s, strict=True)
            ]
            wall_s = time.monotonic() - began
        return 100 * took_s[0] / wall_s, 100 * sum(took_s[1:]) / wall_s


def _processor_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def _scrapes(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    port, scrapes = free_port(), Scrapes()
    rows: dict[str, list[Row]] = {_WITHOUT: [], _WITH: []}
    processor_s = dict.fromkeys(rows, 0.0)
    with Streaming(arguments, metrics_port=port) as streaming:
        process, seconds = psutil.Process(streaming.node.pid), min(arguments.slice, arguments.seconds)
        for turn in range(max(1, round(arguments.seconds / seconds))):
            for kind in (_WITHOUT, _WITH):
                say(f"turn {turn + 1}: {kind}, {seconds:g} s")
                streaming.seen.clear()
                before_s = _processor_s(process)
                with scrapes.every(arguments.every, port) if kind == _WITH else contextlib.nullcontext():
                    streaming.stream(seconds)
                processor_s[kind] += _processor_s(process) - before_s
                rows[kind] += streaming.seen.rows[_FIRST_FRAMES:]
    rows[_DURING] = [row for row in rows[_WITH] if scrapes.touches(row)]
    late = {kind: lateness(found) for kind, found in rows.items()}
    took_ms = distribution([(ended_ns - began_ns) / _NS_PER_MS for began_ns, ended_ns in scrapes.spans_ns])
    each_ms = 1000 * (processor_s[_WITH] - processor_s[_WITHOUT]) / max(1, len(scrapes.spans_ns))
    show_lateness(report, late)
    report.table(
        "The scrapes",
        ("", ""),
        [
            ["scrapes", took_ms["count"]],
            ["took, p50 / max, in ms", f"{took_ms['p50']:.2f} / {took_ms['max']:.2f}"],
            ["processor time of the node for each, in ms", each_ms],
            ["page", f"{scrapes.page_lines} lines, {scrapes.page_bytes / 1024:.0f} KiB"],
        ],
    )
    moved_ms = late[_WITH]["lateness_ms"]["p99_9"] - late[_WITHOUT]["lateness_ms"]["p99_9"]
    figures = {
        **late,
        "scrape_ms": took_ms,
        "processor_ms_per_scrape": each_ms,
        "page_bytes": scrapes.page_bytes,
        "page_lines": scrapes.page_lines,
    }
    return figures, [Target("p99.9 of the lateness, with scrapes less without", moved_ms, "<=", 0.1, "ms")]


if __name__ == "__main__":
    sys.exit(main())
