"""How often a roll-out's verdict is wrong when it is looked at every minute, and how soon bad candidates are stopped.

False decisions: fleets on which both versions are the same. Minutes are drawn from correlated frames with
Pareto spikes (`fleet/simulate.py`); each drive shifts each version's times by 2 %, and in some fleets
each vehicle does, for good. The verdict on latency, p99 and misses is looked at whenever it can have
changed; one look at which any of them is decided, with margins of zero, makes the fleet a false one. The
roll-outs are `torchperf rollout simulate`, its owner looking once a day.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import sys
from dataclasses import dataclass

import numpy as np

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.fleet.plan import Margins, RolloutPlan, new_plan, utc_now
from torchperf_ros.fleet.records import BLOCK_S
from torchperf_ros.fleet.simulate import (
    CANDIDATES,
    Minutes,
    SimulatedCandidate,
    all_at_once,
    built_in_minutes,
    simulate,
)
from torchperf_ros.fleet.status import (
    ALPHA,
    METRICS,
    STRETCH_BLOCKS,
    Units,
    interval,
    margin_of,
    units_of,
)
from torchperf_ros.observe.runs.changes import Judgement

_DRIVE, _VEHICLE = 0.02, 0.02  # of the logarithm
_DAY_MIN = 1440
_LATEST_MIN, _LEAST_MIN, _MOST_MIN = 900, 120, 480  # of a day's driving
_SHORTEST, _LONGEST, _PAUSE = 5, 120, 3  # of a drive, minutes
_EPILOG = """\
example:
  ./run bench rollout --workers 2 --json rollout.json
  ./run bench rollout --fleets 100 --rollouts 20"""


@dataclass(frozen=True)
class NullFleet:
    """A fleet on which nothing differs but by chance.

    `vehicle_sigma`: by which each vehicle's versions differ.
    """

    vehicles: int
    days: int
    vehicle_sigma: float = 0.0

    def units(self, random: np.random.Generator) -> Units:
        """Its stretches, in the order in which they end."""
        rows = []
        drive = 0
        for vehicle, day in itertools.product(range(self.vehicles), range(self.days)):
            at, left = (
                day * _DAY_MIN + int(random.integers(_LATEST_MIN)),
                int(random.integers(_LEAST_MIN, _MOST_MIN)),
            )
            while left > 0:
                length = min(left, int(random.integers(_SHORTEST, _LONGEST)))
                rows.append((vehicle, drive, at, length))
                drive, at, left = drive + 1, at + length + _PAUSE, left - length
        vehicles, drives, begins, lengths = np.array(rows).T
        # `draw` draws whole stretches; what is over is cut
        padded = -(-lengths // STRETCH_BLOCKS) * STRETCH_BLOCKS
        effects = random.normal(0.0, _DRIVE, (drive, 2))
        effects += random.normal(0.0, self.vehicle_sigma, (self.vehicles, 2))[vehicles]
        stretches = np.repeat(effects, padded // STRETCH_BLOCKS, axis=0)
        drawn = _minutes().draw(stretches, np.ones(len(stretches), bool), random)
        place = np.arange(padded.sum()) - np.repeat(np.cumsum(padded) - padded, padded)
        kept = place < np.repeat(lengths, padded)
        blocks = {name: column[kept] for name, column in drawn.items()}
        zeros = np.zeros(int(kept.sum()), np.int64)
        blocks |= {
            "vehicle": np.repeat(vehicles, lengths),
            "drive": np.repeat(drives, lengths),
            "version": zeros,
            "role": zeros,
            "t_s": BLOCK_S * (np.repeat(begins, lengths) + place[kept]),
            "compared": zeros,
            "agreed": zeros,
        }
        units = units_of(blocks)
        return units.chosen(np.argsort(units.end_s, kind="stable"))


@functools.cache
def _windows() -> tuple[np.ndarray, float]:
    return built_in_minutes(np.random.default_rng(0))


@functools.cache
def _minutes() -> Minutes:
    return Minutes(*_windows(), SimulatedCandidate())


def decisions(fleet: NullFleet, seed: int) -> tuple[bool, bool]:
    """Whether a fleet is called better or worse at any minute, with margins of zero and with a plan's own."""
    units = fleet.units(np.random.default_rng(seed))
    alpha = ALPHA / (len(METRICS) + 1)  # as `status.judge` has it, of one group
    ends = np.searchsorted(units.end_s, np.unique(units.end_s), side="right")
    decided = [False, False]
    for metric in METRICS:
        values, margins = units.values[metric], (0.0, margin_of(metric, Margins()))
        least = 1.0 / float(units.frames.mean()) if metric == "misses" else 0.0
        for end in ends.tolist():
            found = interval(values[:end], units.vehicle[:end], alpha, least)
            for number, margin in enumerate(margins):
                decided[number] |= found.verdict(margin) in {
                    Judgement.BETTER,
                    Judgement.WORSE,
                }
            if all(decided):
                break
    return decided[0], decided[1]


NULL_FLEETS = {
    "100 vehicles, 2 days": NullFleet(100, 2),
    "the same, vehicles differ": NullFleet(100, 2, _VEHICLE),
    "20 vehicles, 6 days, they differ": NullFleet(20, 6, _VEHICLE),
    "10 vehicles, 10 days, they differ": NullFleet(10, 10, _VEHICLE),
}


def _plan() -> RolloutPlan:
    return new_plan(
        {"name": "bench", "stage": "perception", "version": "2", "candidate": {"engine": "eager"}},
        utc_now(),
    )


def one_rollout(kind: str, vehicles: int, seed: int, at_once: bool = False) -> dict[str, object]:
    """A roll-out of a candidate of 5 %."""
    plan = all_at_once(_plan()) if at_once else _plan()
    found = simulate(plan, vehicles, SimulatedCandidate(kind, 0.05), _windows(), seed)
    return {name: value for name, value in vars(found).items() if name != "line"}


def _arguments() -> argparse.Namespace:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument(
        "--fleets", type=int, default=1000, help="on which nothing differs, of each kind (default 1000)"
    )
    parser.add_argument("--rollouts", type=int, default=200, help="of each candidate (default 200)")
    parser.add_argument("--vehicles", type=int, default=10_000, help="of a roll-out (default 10000)")
    parser.add_argument(
        "--candidates", default=",".join(CANDIDATES), help="of the roll-outs (default: all)"
    )
    parser.add_argument(
        "--same", type=int, default=20, help="roll-outs that are not stopped soon (default 20)"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    report = Report("rollout", arguments)
    figures: dict[str, dict[str, object]] = {"null": {}, "rollouts": {}}
    targets, rows = [], []
    with contextlib.ExitStack() as stack:
        each = map
        if arguments.workers > 1:
            each = stack.enter_context(concurrent.futures.ProcessPoolExecutor(arguments.workers)).map
        for name, fleet in NULL_FLEETS.items():
            say(f"{arguments.fleets} fleets on which nothing differs: {name}")
            found = list(each(decisions, itertools.repeat(fleet), range(arguments.fleets)))
            shares = [100 * float(np.mean([one[column] for one in found])) for column in (0, 1)]
            figures["null"][name] = dict(zip(("margin_0", "margins"), shares, strict=True))
            targets.append(Target(f"false decisions, {name}", shares[0], "<=", 5.0, "%"))
            rows.append([name, *shares])
        report.table(
            "Fleets on which nothing differs, called better or worse at any minute, %",
            ("", "margins of 0", "margins of a plan"),
            rows,
        )
        rows = []
        for kind in arguments.candidates.split(","):
            count = arguments.same if kind in {"same", "better"} else arguments.rollouts
            say(f"{count} roll-outs of a candidate of kind {kind}")
            found = list(
                each(
                    one_rollout, itertools.repeat(kind), itertools.repeat(arguments.vehicles), range(count)
                )
            )
            once = one_rollout(kind, arguments.vehicles, 0, at_once=True)
            stopped = [one for one in found if one["stopped"]]
            early = 100 * sum(one["step"] <= 2 for one in stopped) / count  # step 2 is the one of 5 %
            reached = [float(one["reached"]) for one in found]
            rows.append(
                [
                    kind,
                    100 * len(stopped) / count,
                    early,
                    float(np.median(reached)),
                    max(reached),
                    float(np.median([one["hours"] for one in found])),
                    float(np.median([one["exposure_h"] for one in found])),
                    float(once["reached"]),
                    float(once["exposure_h"]),
                ]
            )
            figures["rollouts"][kind] = {
                "stopped": len(stopped) / count,
                "early": early,
                "each": found,
                "once": once,
            }
            if kind == "crashing":
                targets.append(
                    Target(
                        "vehicles that a crashing candidate reaches, the most", max(reached), "<=", 1.5, "%"
                    )
                )
            elif kind in {"worse", "worse-tail"}:
                targets.append(Target(f"stopped by the 5 % step: {kind} by 5 %", early, ">=", 95.0, "%"))
            elif kind in {"same", "better"}:
                targets.append(Target(f"stopped: {kind}", 100 * len(stopped) / count, "<=", 5.0, "%"))
    report.table(
        f"Roll-outs on {arguments.vehicles:,} vehicles; at once: one of the same on all of them",
        (
            "candidate",
            "stopped %",
            "by the 5 % step",
            "reached %",
            "most",
            "hours",
            "driven with it, h",
            "at once: reached %",
            "driven, h",
        ),
        rows,
    )
    report.finish(figures, targets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
