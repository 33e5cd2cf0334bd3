"""What checking a plan costs: the whole of `Guard.check`, from bytes to verdict, and reading odometry and obstacles.

Scenes differ in what the guard has to look at: a straight road, a bend, where what drives along is predicted to follow
it, no obstacles, and a plan that has to be replaced. Each plan is another one, so that nothing is remembered.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.figures import distribution
from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, plan_bytes
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.config.safety_options import guard_options
from torchperf_ros.safety.guard import Guard

_SPEED, _BEND = 10.0, 0.01  # m/s and 1/m
_LANES_M = (-7.0, -3.5, 3.5, 7.0)
_EPILOG = """\
target: with 30 poses and 32 objects, p50 <= 0.5 ms and p99 <= 1 ms

examples:
  ./run bench guard
  ./run bench guard --times 20000 --poses 60 --objects 64 --json guard.json"""


def main() -> int:
    arguments = _parser().parse_args()
    report = Report("guard", arguments)
    figures = _measure(arguments)
    columns = ("", "times", "p50", "p90", "p99", "p99.9", "max")
    keys = ("count", "p50", "p90", "p99", "p99_9", "max")
    size = f"{arguments.poses} poses, {arguments.objects} objects"
    report.table(f"ms, {size}", columns, [[name, *(took[key] for key in keys)] for name, took in figures.items()])
    checks = [figures[name] for name in ("check, straight", "check, bend")]
    report.finish(figures, [
        Target("p50 of a check, straight or in a bend", max(took["p50"] for took in checks), "<=", 0.5, "ms"),
        Target("p99 of a check, straight or in a bend", max(took["p99"] for took in checks), "<=", 1.0, "ms"),
    ])  # fmt: skip
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--times", type=int, default=5000, help="checks of each scene (default 5000)")
    parser.add_argument("--poses", type=int, default=30, help="of each plan (default 30)")
    parser.add_argument("--objects", type=int, default=32, help="around the vehicle (default 32)")
    return parser


def _measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(0)
    found = {}
    for name, bend, count, blocked in (
        ("check, straight", 0.0, arguments.objects, False),
        ("check, bend", _BEND, arguments.objects, False),
        ("check, nothing around", 0.0, 0, False),
        ("check and replace", 0.0, arguments.objects, True),
    ):
        say(name)
        guard, plans = _guard(bend, _boxes(rng, bend, count, blocked=blocked)), _plans(rng, bend, arguments.poses)
        found[name] = _times_ms(
            lambda n, g=guard, p=plans: g.check(p[n % len(p)], 10 * S, START_NS, 60.0), arguments.times
        )
    markers, odometry = markers_bytes(_boxes(rng, 0.0, arguments.objects, blocked=False)), odometry_bytes()
    guard = _guard(0.0, [])
    found["read obstacles"] = _times_ms(lambda n: guard.saw(0, markers, 10 * S), arguments.times)
    found["read odometry"] = _times_ms(lambda n: guard.moved(odometry, 10 * S), arguments.times)
    return found


def _guard(bend: float, boxes: list[Box]) -> Guard:
    guard = Guard(guard_options({"guard.act": ["all"]}))
    guard.moved(odometry_bytes(speed=_SPEED, yaw_rate=bend * _SPEED), 10 * S)
    guard.saw(0, markers_bytes(boxes), 10 * S)
    return guard


def _boxes(rng: Any, bend: float, count: int, *, blocked: bool) -> list[Box]:
    """Cars in the lanes beside, at 5 to 15 m/s; `blocked`: one stands in our way."""
    boxes = []
    for number in range(count):
        s, left, speed = rng.uniform(-30, 60), _LANES_M[number % len(_LANES_M)], rng.uniform(5, 15)
        turned = bend * s
        x, y = (math.sin(turned) / bend, (1 - math.cos(turned)) / bend) if bend else (s, 0.0)
        x, y = x - left * math.sin(turned), y + left * math.cos(turned)
        boxes.append(Box(x, y, turned, velocity=(speed * math.cos(turned), speed * math.sin(turned))))
    return [*boxes[:-1], Box(25.0, 0.0)] if blocked else boxes


def _plans(rng: Any, bend: float, poses: int) -> list[bytes]:
    """Plans of three seconds, each with a little another speed."""
    plans = []
    times_s = np.linspace(0.0, 3.0, poses)
    for _ in range(50):
        way = rng.uniform(0.99, 1.01) * _SPEED * times_s
        turned = bend * way
        x, y = (np.sin(turned) / bend, (1 - np.cos(turned)) / bend) if bend else (way, 0.0 * way)
        plans.append(plan_bytes(times_s, x, y, turned))
    return plans


def _times_ms(call: Callable[[int], object], times: int) -> dict[str, float]:
    """What a call takes, after a twentieth as many to warm up; a collection of garbage is no part of it."""
    for number in range(times // 20 + 1):
        call(number)
    took = np.empty(times)
    gc.collect()
    gc.disable()
    try:
        for number in range(times):
            began_ns = time.perf_counter_ns()
            call(number)
            took[number] = (time.perf_counter_ns() - began_ns) / 1e6
    finally:
        gc.enable()
    return distribution(took)


if __name__ == "__main__":
    sys.exit(main())
