"""How long from configure to active, and to the first answers, and what takes the time.

Each start is a new node process with a camera already streaming. `active` is the lifecycle state: frames are taken, and
answered by fallbacks until a worker is ready. The time to the first fresh answer is what a vehicle waits for; how much
of it is the time in which node and camera find each other, the first frame's line tells.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.rig.arguments import add_backup, add_stage, arguments_of
from benchmarks.rig.bench_stage import ADAPTER, OURS, TIERS
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import CameraProcess, Graph, PerfNodeProcess, model_options
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.core.build_options import ENGINES
from torchperf_ros.core.outcome import Outcome

_STREAM_S = 30.0
_EPILOG = """\
target: configure to active <= 3 s, from packages

example:
  ./run bench startup --times 5 --engine eager"""


def main() -> int:
    """Measure, show, write."""
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--times", type=int, default=3, help="starts (default 3)")
    parser.add_argument("--engine", choices=ENGINES, default="eager",
                        help="of the tiers (default eager); aoti: their packages are compiled before")  # fmt: skip
    add_stage(parser)
    add_backup(parser)
    parser.add_argument("--adapter", default=ADAPTER, help="module:Class of another adapter than the benchmark's own")
    parser.add_argument("--options", type=json.loads, help="its options as JSON")
    arguments = parser.parse_args()
    report = Report("startup", arguments)
    options = arguments.options
    if options is None:
        options = model_options(arguments.model_ms) if arguments.adapter == ADAPTER else {}
    if arguments.engine == "aoti":
        _compile(arguments, options)
    starts = []
    for number in range(arguments.times):
        say(f"start {number + 1} of {arguments.times}")
        starts.append(_start(arguments, options))
    phases = {name: [start[name] for start in starts if name in start] for name in starts[0]}
    figures = {"phases_s": {name: distribution(times) for name, times in phases.items()}, "starts": starts}
    report.table(
        "Seconds from configure, median and maximum of the starts",
        ("", "starts", "p50", "max"),
        [[name, len(times), found["p50"], found["max"]]
         for name, times in phases.items() for found in (figures["phases_s"][name],)],
    )  # fmt: skip
    active, served = (figures["phases_s"].get(name, {"p50": float("nan")}) for name in ("active", "first fresh answer"))
    report.finish(figures, [
        Target("configure to active, p50", active["p50"], "<=", 3.0, "s"),
        Target("configure to the first fresh answer, p50", served["p50"], "<=", 3.0, "s"),
    ])  # fmt: skip
    return 0


def _compile(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Have every tier's package in the cache, as `torchperf compile` does."""
    say("compiling packages, unless they are there")
    command = [sys.executable, "-m", "torchperf_ros.cli", "compile", "--adapter", arguments.adapter, "--device", "cpu",
               "--options", json.dumps(options)]  # fmt: skip
    tiers = [word for tier in TIERS for word in ("--tier", tier)]
    subprocess.run([*command, *tiers], check=True, stdout=subprocess.DEVNULL)


def _start(arguments: argparse.Namespace, options: dict[str, Any]) -> dict[str, float]:
    """Seconds from configure of what happened, in order."""
    with Graph((OURS,)) as graph:
        file = graph.folder / "events.json"
        seen = graph.observer.seen[OURS]
        camera = CameraProcess(graph)
        spawned_s = time.monotonic()
        stage = {"backup": arguments.backup, "engine": arguments.engine, "budget_ms": arguments.budget_ms}
        node = PerfNodeProcess(graph, arguments.adapter, options, file, **stage)
        camera.begin(OURS, seconds=_STREAM_S, rate=30.0, size="640x480")
        graph.wait(
            lambda: any(row["outcome"] == Outcome.ON_TIME for row in seen.rows), "the first answer", node.process
        )
        node.wait_ready()
        node.process.end()
        events = json.loads(file.read_text(encoding="utf-8"))["events"]
    events["process started"] = spawned_s
    return {name: at_s - events["configure"] for name, at_s in sorted(events.items(), key=lambda event: event[1])}


if __name__ == "__main__":
    sys.exit(main())
