"""What telemetry costs: per frame on the stage's thread, and once a second on the reporter's.

A real node process with a camera at 30 Hz and an onlooker that subscribes to everything; a stopwatch sits around the
node's own functions. Wall time is what the next frame waits for; processor time leaves out what others took.
"""

import argparse
import json
import sys
from typing import Any

from benchmarks.rig.arguments import add_backup, add_camera, add_stage, arguments_of
from benchmarks.rig.bench_stage import ADAPTER, OURS
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import CameraProcess, Graph, PerfNodeProcess, model_options
from benchmarks.rig.report import Report, Target, say

_PER_FRAME = ("record and publish", "encode the record", "publish latency_stages", "publish latency",
              "count and judge health")  # fmt: skip
_FIRST_FRAMES = 10
_REPORTS_PER_S = 1.0
_EPILOG = """\
targets: record, /perf/latency_stages and /perf/latency together <= 50 us per frame (p50); reporter <= 1 % of a core

example:
  ./run bench telemetry --seconds 60"""


def main() -> int:
    """Measure, show, write."""
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--seconds", type=float, default=20.0, help="of stream (default 20)")
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
    _show(report, figures)
    per_frame_us = figures["record and publish"]["wall_us"]["p50"]
    report.finish(figures, [
        Target("record and publish, per frame, p50", per_frame_us, "<=", 50.0, "us"),
        Target("reporter", cpu_percent, "<=", 1.0, "% of a core"),
    ])  # fmt: skip
    return 0


def _samples(arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    options = model_options(arguments.model_ms)
    with Graph((OURS,)) as graph:
        file = graph.folder / "samples.json"
        node = PerfNodeProcess(graph, ADAPTER, options, file, backup=arguments.backup, budget_ms=arguments.budget_ms)
        camera = CameraProcess(graph)
        node.wait_ready()
        camera.connect(OURS, size=arguments.size, rate=arguments.rate)
        say(f"{arguments.seconds:g} s of images")
        camera.stream(OURS, seconds=arguments.seconds, rate=arguments.rate, size=arguments.size)
        node.process.end()
        return dict(json.loads(file.read_text(encoding="utf-8"))["samples"])


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


if __name__ == "__main__":
    sys.exit(main())
