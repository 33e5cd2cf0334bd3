"""What checking a plan costs, and whether its verdicts are right in drawn traffic.

Cost: the whole of `Guard.check`, from bytes to verdict, and reading odometry and obstacles.

Scenes differ in what the guard has to look at: a straight road, a bend, where what drives along is predicted to follow
it, no obstacles, and a plan that has to be replaced. Each plan is another one, so that nothing is remembered.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.rig import traffic
from benchmarks.rig.arguments import add_some, arguments_of
from benchmarks.rig.figures import distribution
from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, plan_bytes
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.config.safety_options import guard_options
from torchperf_ros.safety.guard import Guard

_SPEED, _BEND = 10.0, 0.01  # m/s and 1/m
_LANES_M = (-7.0, -3.5, 3.5, 7.0)
_EPILOG = """\
targets: with 30 poses and 32 objects, p50 <= 0.5 ms and p99 <= 1 ms; of plans that end head-on although braking now
would avoid it, 0 accepted; at most 1 % of clear plans refused; no plan of a bend beside a car replaced; no contact of a
moving vehicle in overtakings

examples:
  ./run bench guard --parts cost
  ./run bench guard --parts head-on --plans 1000 --seed 7
  ./run bench guard --times 20000 --poses 60 --objects 64 --json guard.json"""


def main() -> int:
    parts = {"cost": _cost, "head-on": _head_on, "bends": _bends, "overtaking": _overtaking}
    arguments = _parser(parts).parse_args()
    Report("guard", arguments).finish_parts(arguments, parts)
    return 0


def _parser(parts: Iterable[str]) -> argparse.ArgumentParser:
    parser = arguments_of(__doc__ or "", _EPILOG)
    add_some(parser, "--parts", parts)
    parser.add_argument("--times", type=int, default=5000, help="checks of each scene (default 5000)")
    parser.add_argument("--poses", type=int, default=30, help="of each plan (default 30)")
    parser.add_argument("--objects", type=int, default=32, help="around the vehicle (default 32)")
    about = "that end head-on, twice as many clear ones, half as many bends (default 500)"
    parser.add_argument("--plans", type=int, default=500, help=about)
    parser.add_argument("--drives", type=int, default=108, help="overtakings (default 108)")
    parser.add_argument("--seed", type=int, default=1, help="that plans and traffic are drawn from (default 1)")
    return parser


def _cost(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    figures = _measure(arguments)
    columns = ("", "times", "p50", "p90", "p99", "p99.9", "max")
    keys = ("count", "p50", "p90", "p99", "p99_9", "max")
    size = f"{arguments.poses} poses, {arguments.objects} objects"
    report.table(f"ms, {size}", columns, [[name, *(took[key] for key in keys)] for name, took in figures.items()])
    checks = [figures[name] for name in ("check, straight", "check, bend")]
    return figures, [
        Target("p50 of a check, straight or in a bend", max(took["p50"] for took in checks), "<=", 0.5, "ms"),
        Target("p99 of a check, straight or in a bend", max(took["p99"] for took in checks), "<=", 1.0, "ms"),
    ]


def _head_on(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    say(f"{arguments.plans} plans that end head-on, {2 * arguments.plans} clear ones, from seed {arguments.seed}")
    found: dict[str, list[bool]] = {}
    for scene in traffic.head_on_plans(arguments.seed, arguments.plans):
        kind = "head-on, bends" if scene.road.bends.any() else "head-on, straight"
        found.setdefault(kind, []).append(bool(traffic.refused(scene, 1.0)))
    for scene in traffic.clear_plans(arguments.seed, 2 * arguments.plans):
        found.setdefault(f"clear, {scene.kind}", []).append(bool(traffic.refused(scene, 1.0)))
    rows = [[kind, len(refused), len(refused) - sum(refused), sum(refused)] for kind, refused in found.items()]
    report.table(f"plans, from seed {arguments.seed}", ("", "drawn", "accepted", "refused"), rows)
    accepted = sum(len(refused) - sum(refused) for kind, refused in found.items() if kind.startswith("head-on"))
    clear = [one for kind, refused in found.items() if kind.startswith("clear") for one in refused]
    return {kind: {"drawn": drawn, "accepted": went, "refused": not_} for kind, drawn, went, not_ in rows}, [
        Target("accepted plans that end head-on", accepted, "==", 0),
        Target("refused clear plans", 100 * sum(clear) / max(len(clear), 1), "<=", 1.0, "%"),
    ]


def _bends(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    count = arguments.plans // 2
    say(f"{count} passages into a bend beside cars, from seed {arguments.seed}")
    stops = [traffic.false_stops(scene) for scene in traffic.passages(arguments.seed, count)]
    passages, plans = sum(map(bool, stops)), sum(map(len, stops))
    report.table(f"passages into a bend, from seed {arguments.seed}", ("", "drawn", "with a false stop", "plans"),
                 [["beside a car", count, passages, plans]])  # fmt: skip
    figures = {"drawn": count, "passages": passages, "plans": plans}
    return figures, [Target("passages into a bend with a false stop", passages, "==", 0)]


def _overtaking(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    say(f"{arguments.drives} overtakings, from seed {arguments.seed}")
    rng = np.random.default_rng(arguments.seed)
    found = [traffic.contact_of(traffic.an_overtaking(rng)) for _ in range(arguments.drives)]
    contacts = [speed for _, speed, _ in found if not math.isnan(speed)]
    moving = sum(speed > traffic.MOVES for speed in contacts)
    replaced = sum(verdicts != {"accept"} for _, _, verdicts in found)
    report.table(f"overtakings, from seed {arguments.seed}", ("", "drawn", "replaced", "contacts", "while moving"),
                 [["the planner does not look", arguments.drives, replaced, len(contacts), moving]])  # fmt: skip
    figures = {"drawn": arguments.drives, "replaced": replaced, "contacts": len(contacts), "moving": moving}
    return figures, [Target("overtakings with a contact of the moving vehicle", moving, "==", 0)]


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
