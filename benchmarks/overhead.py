"""What a node adds to the model's own time, beside the naive node and beside a bare loop.

Both nodes run at once, and with them a loop that calls the same adapter and does nothing else; they work in
turns, so that all see the same machine. Overhead is the time from the subscription's callback to the
published output, less decode, preprocess, inference and postprocess. For the naive node the same adapter
calls are timed in the callback's thread pool; its decoding happens in rclpy before the callback and, like
the cost of taking the message, shows in the age at receipt (from the stamp, which the camera sets as it
publishes).
"""

import argparse
import sys
from typing import Any

from benchmarks.rig.arguments import add_backup, add_device, add_stage, arguments_of
from benchmarks.rig.bench_stage import ADAPTER, NAIVE, OURS
from benchmarks.rig.figures import distribution
from benchmarks.rig.frames import lateness, steps_ms
from benchmarks.rig.graph import (
    BareLoopProcess,
    CameraProcess,
    Graph,
    NaiveProcess,
    PerfNodeProcess,
    model_options,
)
from benchmarks.rig.observer import Row
from benchmarks.rig.report import Report, Target, say

SIZES = ("640x480", "1280x720", "1920x1080")
_LARGE = SIZES[1:]
_NAMES = {OURS: "torchperf_ros", NAIVE: "naive"}
_BARE = "bare loop"
_FIRST_FRAMES = 10  # of each slice: after the pause, caches are cold
_P50_MS, _P99_MS = 0.5, 1.0
# Of the naive node's stamp to publish, by the device of the model.
_MOST_OF_NAIVE = {"cpu": 0.8, "cuda": 0.7}
_MOST_OF_BARE = 1.05
_EPILOG = """\
targets: at 1280x720, overhead p50 <= 0.5 ms, p99 <= 1 ms; from 1280x720 on, p50 and p99: the model's steps <= 1.05
times those of the bare loop, stamp to publish <= 0.8 times the naive node's (0.7 on CUDA)

examples:
  ./run bench overhead
  ./run bench overhead --sizes 1280x720 --seconds 60 --json overhead.json"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of stream for each node and size (default 30)"
    )
    parser.add_argument("--slice", type=float, default=5.0, help="seconds of each node's turn (default 5)")
    parser.add_argument("--sizes", default=",".join(SIZES), help="image sizes, default " + ",".join(SIZES))
    parser.add_argument("--rate", type=float, default=30.0, help="images per second (default 30)")
    add_stage(parser)
    add_device(parser)
    add_backup(parser)
    arguments = parser.parse_args()
    report = Report("overhead", arguments)
    figures = _measure(arguments)
    for size, nodes in figures.items():
        _show(report, size, nodes)
    report.finish(figures, _targets(figures, _MOST_OF_NAIVE[arguments.device]))
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    options = model_options(arguments.model_ms, arguments.device)
    figures: dict[str, Any] = {}
    with Graph((OURS, NAIVE), device=arguments.device) as graph:
        say("starting both nodes")
        stage = {"budget_ms": arguments.budget_ms, "backup": arguments.backup, "tiers": ["full"]}
        node = PerfNodeProcess(graph, ADAPTER, options, **stage)
        naive = NaiveProcess(graph, ADAPTER, options, arguments.budget_ms, margin_ms=1.0)
        camera = CameraProcess(graph)
        loop = BareLoopProcess(graph, ADAPTER, options, "full")
        node.wait_ready()
        naive.wait_ready()
        for namespace in (OURS, NAIVE):
            camera.connect(namespace, size="64x48", rate=arguments.rate)
        for size in arguments.sizes.split(","):
            rows, bare_ms = _rows(arguments, size, graph, camera, loop)
            figures[size] = {_NAMES[namespace]: _figures(found) for namespace, found in rows.items()}
            figures[size][_BARE] = {"model_ms": distribution(bare_ms)}
    return figures


def _rows(
    arguments: argparse.Namespace, size: str, graph: Graph, camera: CameraProcess, loop: BareLoopProcess
) -> tuple[dict[str, list[Row]], list[float]]:
    """Records of the frames by node, and the bare loop's times in ms, without the first of each slice."""
    rows: dict[str, list[Row]] = {OURS: [], NAIVE: []}
    bare_ms: list[float] = []
    seconds = min(arguments.slice, arguments.seconds)
    for turn in range(max(1, round(arguments.seconds / seconds))):
        for namespace in (OURS, NAIVE):
            say(f"{size}, turn {turn + 1}: {_NAMES[namespace]}, {seconds:g} s")
            seen = graph.observer.seen[namespace]
            seen.clear()
            camera.stream(namespace, seconds=seconds, rate=arguments.rate, size=size)
            rows[namespace] += seen.rows[_FIRST_FRAMES:]
        say(f"{size}, turn {turn + 1}: {_BARE}, {seconds:g} s")
        bare_ms += loop.ask(seconds, rate=arguments.rate, size=size)["model_ms"][_FIRST_FRAMES:]
    return rows, bare_ms


def _figures(rows: list[Row]) -> dict[str, Any]:
    fresh = [row for row in rows if row["outcome"] == 0]
    return {
        **lateness(rows),
        "age_at_receipt_ms": distribution([row["age_ms"] for row in fresh]),
        "model_ms": distribution([steps_ms(row) for row in fresh]),
        "stamp_to_publish_ms": distribution([row["age_ms"] + row["total_ms"] for row in fresh]),
    }


def _show(report: Report, size: str, nodes: dict[str, Any]) -> None:
    lines = [
        [f"{what}, {name}", found["count"], *(found[key] for key in ("p50", "p90", "p99", "max"))]
        for what, key in (
            ("overhead", "overhead_ms"),
            ("age at receipt", "age_at_receipt_ms"),
            ("model's steps", "model_ms"),
            ("stamp to publish", "stamp_to_publish_ms"),
        )
        for name, node in nodes.items()
        if (found := node.get(key))
    ]
    missed = ", ".join(f"{name} {nodes[name]['not_on_time']}" for name in _NAMES.values())
    report.table(
        f"{size} rgb8, in ms (not on time, left out: {missed})",
        ("", "frames", "p50", "p90", "p99", "max"),
        lines,
    )


def _targets(figures: dict[str, Any], most_of_naive: float) -> list[Target]:
    targets = []
    for size, nodes in figures.items():
        ours, naive, bare = (nodes[name] for name in (*_NAMES.values(), _BARE))
        if size == "1280x720":
            limits = {"p50": _P50_MS, "p99": _P99_MS}
            targets += [
                Target(f"overhead {key}, {size}", ours["overhead_ms"][key], "<=", limits[key], "ms")
                for key in limits
            ]
        if size in _LARGE:
            for key in ("p50", "p99"):
                steps = ours["model_ms"][key] / bare["model_ms"][key]
                whole = ours["stamp_to_publish_ms"][key] / naive["stamp_to_publish_ms"][key]
                targets += [
                    Target(
                        f"model's steps {key}, {size}, beside the bare loop", steps, "<=", _MOST_OF_BARE
                    ),
                    Target(
                        f"stamp to publish {key}, {size}, beside the naive node",
                        whole,
                        "<=",
                        most_of_naive,
                    ),
                ]
    return targets


if __name__ == "__main__":
    sys.exit(main())
