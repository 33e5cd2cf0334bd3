"""How long from configure to active and to the first answers, and whether the first seconds are as good as any other.

Each start is a new node process with a camera already streaming. `active` is the lifecycle state: frames
are taken, and answered by fallbacks until a worker is ready. The time to the first fresh answer is what a
vehicle waits for; how much of it is the time in which node and camera find each other, the first frame's
line tells.

Then every frame of the first seconds counts, the first one included: how late its answer left, by the time
at which DDS wrote it, and on which tier the frames run once the ladder has had 3 s. The model is such that
every tier fits easily.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.rig.arguments import add_backup, add_camera, add_some, add_stage, arguments_of
from benchmarks.rig.bench_stage import ADAPTER, OURS, TIERS
from benchmarks.rig.figures import distribution, share
from benchmarks.rig.frames import AnsweredFrame, match
from benchmarks.rig.graph import CameraProcess, Graph, PerfNodeProcess, model_options
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.settings.build_options import AUTO, ENGINE_CHOICES, PACKAGE_SUFFIXES

FROM = ("stamp", "receipt")
_LOOK_S, _SETTLED_S = 5.0, 3.0  # after activation
_IN_A_ROW = 10  # frames: one that waited may run on a lower tier than the one that the stage stands on
_STREAM_S = 6.0
_STREAMS = 10  # for a machine that takes long to load
_EPILOG = """\
targets: configure to active <= 1.5 s, to a fresh answer <= 3 s; every frame of the first 5 s by its
deadline + 1 ms; after 3 s every start stands on the best tier

example:
  ./run bench startup --times 50 --engine eager"""


@dataclass
class Start:
    """What one start came to.

    Attributes:
        events: seconds from configure of what happened, in order.
        late_ms: of each answer of the first seconds, from its deadline to when it was written; negative:
            before.
        skipped: frames sent after the first that was answered, and not answered themselves.
        without_output: answers for which there was nothing to publish, as none had been good yet.
        tier: that most of ten frames ran on once the ladder had had its time, -1: none.
        best_after_s: from activation to the first of ten frames in a row on the best tier; NaN: there were
            none.
    """

    events: dict[str, float]
    late_ms: list[float]
    skipped: int
    without_output: int
    tier: int
    best_after_s: float


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument(
        "--times", type=int, default=3, help="starts for each way to count the budget (default 3)"
    )
    add_some(parser, "--budget-from", FROM)
    parser.add_argument(
        "--engine",
        choices=ENGINE_CHOICES,
        default="eager",
        help="of the tiers (default eager); the packages of others are built before",
    )
    add_camera(parser)
    add_stage(parser, model_ms=2.3)
    add_backup(parser)
    parser.add_argument(
        "--adapter", default=ADAPTER, help="module:Class of another adapter than the benchmark's own"
    )
    parser.add_argument("--options", type=json.loads, help="its options as JSON")
    arguments = parser.parse_args()
    report = Report("startup", arguments)
    options = arguments.options
    if options is None:
        options = model_options(arguments.model_ms) if arguments.adapter == ADAPTER else {}
    if arguments.engine in {AUTO, *PACKAGE_SUFFIXES}:
        _compile(arguments, options)
    found: dict[str, list[Start]] = {counted: [] for counted in arguments.budget_from}
    for number in range(arguments.times):
        for counted, starts in found.items():
            say(f"start {number + 1} of {arguments.times}, budget from {counted}")
            starts.append(_start(arguments, options, counted))
    _show(report, found)
    return 0


def _show(report: Report, found: dict[str, list[Start]]) -> None:
    starts = [start for each in found.values() for start in each]
    phases = {
        name: [start.events[name] for start in starts if name in start.events] for name in starts[0].events
    }
    phases_s = {name: distribution(times) for name, times in phases.items()}
    report.table(
        "Seconds from configure, median and maximum of the starts",
        ("", "starts", "p50", "max"),
        [[name, len(phases[name]), figures["p50"], figures["max"]] for name, figures in phases_s.items()],
    )
    frames = {counted: _frame_figures(each) for counted, each in found.items()}
    report.table(
        f"Every frame of the first {_LOOK_S:g} s after activation",
        (
            "budget from",
            "starts",
            "frames",
            "by the deadline",
            "by +1 ms",
            "latest, ms",
            "no output",
            "skipped",
        ),
        [
            [
                counted,
                len(found[counted]),
                each["late_ms"]["count"],
                each["by_deadline_share"],
                each["by_deadline_plus_1_ms_share"],
                each["late_ms"]["max"],
                each["without_output"],
                each["skipped"],
            ]
            for counted, each in frames.items()
        ],
    )
    report.table(
        f"The tier on which frames run {_SETTLED_S:g} s after activation",
        ("budget from", "starts", "on the best", "seconds to the best, p50", "max"),
        [
            [
                counted,
                len(found[counted]),
                each["on_best"],
                each["best_after_s"]["p50"],
                each["best_after_s"]["max"],
            ]
            for counted, each in frames.items()
        ],
    )
    figures = {
        "phases_s": phases_s,
        "starts": [start.events for start in starts],
        "first_seconds": frames,
        "each": {counted: [asdict(start) for start in each] for counted, each in found.items()},
    }
    active, served = (phases_s.get(name, {"p50": math.nan}) for name in ("active", "first fresh answer"))
    targets = [
        Target("configure to active, p50", active["p50"], "<=", 1.5, "s"),
        Target("configure to the first fresh answer, p50", served["p50"], "<=", 3.0, "s"),
    ]
    for counted, each in frames.items():
        share_in_time, on_best = each["by_deadline_plus_1_ms_share"], float(each["on_best"])
        targets.append(Target(f"budget from {counted}: frames by +1 ms, share", share_in_time, "==", 1.0))
        targets.append(
            Target(f"budget from {counted}: starts on the best tier", on_best, "==", len(found[counted]))
        )
    report.finish(figures, targets)


def _frame_figures(starts: list[Start]) -> dict[str, Any]:
    late_ms = [ms for start in starts for ms in start.late_ms]
    return {
        "late_ms": distribution(late_ms),
        "by_deadline_share": share(sum(ms <= 0 for ms in late_ms), len(late_ms)),
        "by_deadline_plus_1_ms_share": share(sum(ms <= 1 for ms in late_ms), len(late_ms)),
        "without_output": sum(start.without_output for start in starts),
        "skipped": sum(start.skipped for start in starts),
        "on_best": sum(start.tier == 0 for start in starts),
        "best_after_s": distribution([start.best_after_s for start in starts]),
    }


def _compile(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Have every tier's package in the cache, as `torchperf compile` does."""
    say("compiling packages, unless they are there")
    command = [
        sys.executable,
        "-m",
        "torchperf_ros.tools",
        "compile",
        arguments.adapter,
        "--device",
        "cpu",
        "--engine",
        arguments.engine,
        "--options",
        json.dumps(options),
    ]
    tiers = [word for tier in TIERS for word in ("--tier", tier)]
    subprocess.run([*command, *tiers], check=True, stdout=subprocess.DEVNULL)


def _start(arguments: argparse.Namespace, options: dict[str, Any], counted: str) -> Start:
    with Graph((OURS,)) as graph:
        file = graph.folder / "events.json"
        seen = graph.observer.seen[OURS]
        camera = CameraProcess(graph)
        spawned_s, to_ros_s = time.monotonic(), time.time() - time.monotonic()
        node = PerfNodeProcess(
            graph,
            arguments.adapter,
            options,
            file,
            backup=arguments.backup,
            engine=arguments.engine,
            budget_ms=arguments.budget_ms,
            budget_from=counted,
        )
        stamps_ns: list[int] = []
        for _ in range(_STREAMS):
            stamps_ns += camera.stream(OURS, seconds=_STREAM_S, rate=arguments.rate, size=arguments.size)[
                "stamps"
            ]
            if any(row["outcome"] == Outcome.ON_TIME for row in seen.rows):
                break
        graph.wait(
            lambda: any(row["outcome"] == Outcome.ON_TIME for row in seen.rows),
            "the first answer",
            node.process,
        )
        node.wait_ready()
        node.process.end()
        events = json.loads(file.read_text(encoding="utf-8"))["events"]
    events["process started"] = spawned_s
    ordered = {
        name: at_s - events["configure"]
        for name, at_s in sorted(events.items(), key=lambda event: event[1])
    }
    active_ns = round((events["active"] + to_ros_s) * 1e9)
    return _judged(ordered, active_ns, stamps_ns, match(stamps_ns, seen.rows, seen.outputs), counted)


def _judged(
    events: dict[str, float],
    active_ns: int,
    stamps_ns: list[int],
    frames: list[AnsweredFrame],
    counted: str,
) -> Start:
    """Look at the first seconds after activation."""
    until_ns, settled_ns = (active_ns + round(after_s * 1e9) for after_s in (_LOOK_S, _SETTLED_S))
    first = [frame for frame in frames if frame.stamp_ns < until_ns]
    answered = {frame.stamp_ns for frame in first}
    due = [stamp for stamp in stamps_ns if min(answered, default=math.inf) <= stamp < until_ns]
    after = [frame.row["tier"] for frame in frames if frame.stamp_ns >= settled_ns][:_IN_A_ROW]
    tiers = [frame.row["tier"] for frame in frames]
    best = [
        frame
        for number, frame in enumerate(frames)
        if tiers[number : number + _IN_A_ROW] == [0.0] * _IN_A_ROW
    ]
    return Start(
        events=events,
        late_ms=[_late_ms(frame, counted) for frame in first],
        skipped=sum(stamp not in answered for stamp in due),
        without_output=sum(frame.row["fallback"] == Fallback.NONE for frame in first),
        tier=int(np.nan_to_num(np.median(after), nan=-1)) if after else -1,
        best_after_s=(best[0].stamp_ns - active_ns) / 1e9 if best else math.nan,
    )


def _late_ms(frame: AnsweredFrame, counted: str) -> float:
    """From the deadline to the time at which the answer's record was written, which follows the output."""
    begin_ms = 0.0 if counted == "stamp" else frame.row["age_ms"]
    return (frame.row.written_ns - frame.stamp_ns) / 1e6 - begin_ms - frame.row["budget_ms"]


if __name__ == "__main__":
    sys.exit(main())
