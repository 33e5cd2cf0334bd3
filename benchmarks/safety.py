"""Whether keeping deadlines, and checking plans, makes driving safer.

Collisions in a closed loop, by arm.

drives: each arm drives the same scenarios on the same seeds with the same latencies and faults, on a
virtual clock: the planner without any latency (the bound), the naive node, and these stages without
fallbacks, without the guard, and with all. Collisions are those that the vehicle is to blame for.
Differences between arms are of pairs, with an interval of 95 % from a paired bootstrap within each
scenario.

restarts: the naive node's collisions by how long it takes to come back and by how often something goes
wrong, beside those of all stages; and how long a naive node really takes to come back here.

ordinary: drives in which nothing goes wrong, in ordinary traffic and in the same scenarios: whether the
emergency lane latches, and whether the guard replaces a plan.

lane: drawn sequences of what can happen to the emergency lane, whose stop paths the vehicle follows:
whether it stands once it stands, until a person has cleared the lane.
"""

import argparse
import functools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil

from benchmarks.rig.arguments import add_some, arguments_of, callers_path
from benchmarks.rig.report import Part, Report, Target, say
from benchmarks.traffic.lane_sequences import FASTER_MS, SEQUENCE_S, run_sequence
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.tools.shell import follow, progress_bars
from torchperf_ros.workers.process_setup import die_with_parent
from torchperf_ros.world.drive_command import write_drive
from torchperf_ros.world.latencies import FAULTS
from torchperf_ros.world.loop import ARMS, NAIVE_ARMS, NAIVE_RESTART_MS, Drive, Workers, drive, end_workers
from torchperf_ros.world.scenarios import SCENARIOS, TRAFFIC, draw_scenario

_NAIVE_RESTART_S = NAIVE_RESTART_MS / 1e3
_BOUND, _NAIVE, _FULL, _CAMERA, _WATCHED = "zero", "naive", "full", "camera", "watched"
_RESTARTS_S = (0.3, 1.0, 2.0, 4.0)  # 0.3: as a worker of ours
_RATES = {"none": "none", "each=1": "1 a minute", "each=3": "3 a minute", "bench": "as bench deadline"}
_REPLACED = {"guard brake", "guard rebased", "guard stop", "guard unavoidable"}
_CHUNK = 6  # drives that a process takes at once
_TTC_BOUND_S = 0.95  # the least time to collision that nuPlan and NAVSIM accept
_RESAMPLES = 4000
_SHOWN = 5  # sequences that went wrong
_PAST_M = 0.5
_EPILOG = """\
targets, with faults: collisions at most 1 percentage point above those of the arm without latency; at least 80 % fewer
than the naive node's, and the interval of the difference excludes 0; 10 times real time

examples:
  ./run bench safety
  ./run bench safety --seeds 200 --json safety.json
  ./run bench safety --arms zero,full,camera --seeds 5
  ./run bench safety --scenarios cut_in,pedestrian --arms zero,naive,full --load 4 --faults all"""

_Row = dict[str, Any]
_workers: Workers = {}  # of this process


_In, _Out = TypeVar("_In"), TypeVar("_Out")


class _Wanted(NamedTuple):
    """A drive."""

    arm: str
    scenario: str
    seed: int
    load: int = 1
    faults: str = "none"
    naive_restart_s: float = _NAIVE_RESTART_S

    @property
    def drive(self) -> Drive:
        scenario = draw_scenario(self.scenario, self.seed)
        restart_ms = 1e3 * self.naive_restart_s if self.arm in NAIVE_ARMS else None
        return Drive(scenario, self.arm, self.load, self.faults, restart_ms=restart_ms)


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.quick:
        for name in ("seeds", "sequences", "ordinary"):
            setattr(arguments, name, max(1, getattr(arguments, name) // 5))
    try:
        for seed in (arguments.seed, arguments.seed + arguments.seeds - 1):
            Drive(draw_scenario(SCENARIOS[0], seed), "full", arguments.load, arguments.faults).luck()
    except ConfigError as error:
        parser.error(str(error))
    Report("safety", arguments).finish_parts(arguments, _PARTS)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = arguments_of(__doc__ or "", _EPILOG)
    add_some(parser, "--parts", _PARTS)
    parser.add_argument(
        "--seeds", type=int, default=10, help="drives of each scenario by each arm (default 10)"
    )
    parser.add_argument("--seed", type=int, default=1, help="the first one (default 1)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="end the drives after so long; 0: with the last seed (default)",
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of all drives and sequences")
    parser.add_argument(
        "--ordinary", type=int, default=1000, help="drives without faults, at least (default 1000)"
    )
    parser.add_argument(
        "--sequences", type=int, default=1000, help="that are drawn for the lane (default 1000)"
    )
    # which runs a network for every frame: ten times as long
    usual = [arm for arm in ARMS if arm not in {_CAMERA, _WATCHED}]
    add_some(parser, "--arms", ARMS, usual)
    add_some(parser, "--scenarios", (*SCENARIOS, *TRAFFIC), SCENARIOS)
    parser.add_argument(
        "--load", type=int, default=1, choices=(1, 4), help="work on the machine (default 1)"
    )
    parser.add_argument(
        "--faults", default="bench", help=f"of {', '.join(FAULTS)}, or by rate (default bench)"
    )
    parser.add_argument(
        "--collisions", type=callers_path, metavar="FOLDER", help="write log, picture and test of each"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs",
        type=int,
        default=cores,
        help=f"processes that drive side by side (default {cores}, a core each)",
    )
    return parser


def _spread(
    what: str, work: Callable[[_In], _Out], items: Sequence[_In], arguments: argparse.Namespace
) -> Iterator[_Out]:
    """The result of each item as it comes, beside a bar.

    A process keeps its workers from drive to drive.
    """
    with progress_bars() as bars:
        tell = follow(bars, f"{len(items):,} {what}")
        for done, result in enumerate(_spread_silently(work, items, arguments.jobs), 1):
            tell(done, len(items))
            yield result


def _spread_silently(work: Callable[[_In], _Out], items: Sequence[_In], jobs: int) -> Iterator[_Out]:
    if jobs <= 1:
        yield from map(work, items)
        end_workers(_workers)
        return
    context = multiprocessing.get_context("spawn")  # threads of worker pools do not outlive a fork
    chunks = [items[at : at + _CHUNK] for at in range(0, len(items), _CHUNK)]
    with context.Pool(jobs, _begin) as pool:
        for results in pool.imap_unordered(functools.partial(_work_all, work), chunks):
            yield from results


def _work_all(work: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
    return [work(item) for item in items]


def _begin() -> None:
    """A process of the pool.

    It ends with the benchmark in every case; Ctrl-C is for the benchmark.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# -- drives


def _drives(arguments: argparse.Namespace, report: Report) -> tuple[_Row, list[Target]]:
    arms, scenarios = arguments.arms, arguments.scenarios
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    wanted = [
        _Wanted(arm, name, seed, arguments.load, arguments.faults)
        for seed in seeds
        for name in scenarios
        for arm in arms
    ]
    rows: list[_Row] = []
    begun_s = time.monotonic()
    for row in _spread("drives", _drive, wanted, arguments):
        rows.append(row)
        if arguments.minutes and time.monotonic() - begun_s > 60.0 * arguments.minutes:
            break
    took_s = time.monotonic() - begun_s
    driven_s = sum(row["driven_s"] for row in rows)
    rows = _whole(rows, len(arms) * len(scenarios))
    rows.sort(key=lambda row: (arms.index(row["arm"]), scenarios.index(row["scenario"]), row["seed"]))
    figures = {arm: _figures([row for row in rows if row["arm"] == arm], rows) for arm in arms}
    differences = {arm: _difference(rows, arm, _NAIVE) for arm in arms if _NAIVE in arms and arm != _NAIVE}
    driven = len(rows) // len(arms) // len(scenarios)
    _show(report, (figures, differences), scenarios, driven, arguments)
    report.text(
        f"{driven_s:,.0f} s driven in {took_s:,.0f} s by {arguments.jobs} processes:"
        f" {driven_s / took_s:.1f} times real time"
    )
    if arguments.collisions is not None:
        for row in (row for row in rows if row["collision"]):
            one = _Wanted(row["arm"], row["scenario"], row["seed"], arguments.load, arguments.faults).drive
            folder = arguments.collisions / f"{row['scenario']}-{row['seed']}-{row['arm']}"
            write_drive(one, folder, _workers)
            report.text(f"wrote {folder}: a log to replay, a picture, and a test")
        end_workers(_workers)
    result = {
        "arms": figures,
        "less_naive": differences,
        "times_real_time": driven_s / took_s,
        "drives": rows,
    }
    return result, _targets(figures, differences, driven_s / took_s)


def _whole(rows: list[_Row], drives: int) -> list[_Row]:
    """Those of the seeds that have all their drives; arms are compared on the same seeds."""
    count = Counter(row["seed"] for row in rows)
    if not (found := [row for row in rows if count[row["seed"]] == drives]):
        sys.exit("no seed was driven by every arm in every scenario in that time")
    return found


def _drive(wanted: _Wanted) -> _Row:
    driven = drive(wanted.drive, workers=_workers)
    return {
        **wanted._asdict(),
        "driven_s": driven.world.now_s,
        **driven.row(),
        "faults": len(driven.injected),
        "goes_wrong": wanted.faults,
    }


def pdms(score: _Row, possible_m: float) -> float:
    """The score of NAVSIM, from 0 to 1: NC * DAC * (5 TTC + 5 EP + 2 C) / 12, of the figures of a `Score`.

    Dauner et al., "NAVSIM", NeurIPS 2024. No collision, on the road, time to collision above 0.95 s,
    progress as a share of what was possible (to the arm without latency and faults on the same scenario and
    seed), comfort.
    """
    if score["collision"] or score["left_road"]:
        return 0.0
    progress = min(1.0, max(0.0, score["progress_m"]) / possible_m) if possible_m > 0 else 1.0
    return (5.0 * (score["min_ttc_s"] > _TTC_BOUND_S) + 5.0 * progress + 2.0 * score["comfortable"]) / 12.0


def paired_difference(
    first: Sequence[float], second: Sequence[float], groups: Sequence[str]
) -> dict[str, Any]:
    """First less second, by a paired bootstrap of the drives within each group (scenario), seeded.

    95 % interval.

    Efron and Tibshirani, "An Introduction to the Bootstrap", 1993: the 2.5 and 97.5 % quantiles of the mean
    of pairs that are drawn with replacement.
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    rng, names, sums = np.random.default_rng(0), np.asarray(groups), np.zeros(_RESAMPLES)
    for name in sorted(set(groups)):
        own = differences[names == name]
        sums += own[rng.integers(len(own), size=(_RESAMPLES, len(own)))].sum(axis=1)
    low, high = np.quantile(sums / len(differences), (0.025, 0.975)).tolist()
    return {
        "mean": float(differences.mean()),
        "low": low,
        "high": high,
        "excludes_zero": low > 0 or high < 0,
    }


def _figures(own: list[_Row], rows: list[_Row]) -> dict[str, Any]:
    possible = {(row["scenario"], row["seed"]): row["progress_m"] for row in rows if row["arm"] == _BOUND}
    scores = [pdms(row, possible.get((row["scenario"], row["seed"]), row["progress_m"])) for row in own]
    counts: Counter[str] = Counter()
    for row in own:
        counts.update(row["counts"])
    hit = [row["impact_ms"] for row in own if row["collision"]]
    return {
        "drives": len(own),
        "collisions": len(hit),
        "collision_share": len(hit) / len(own),
        "by_scenario": dict(Counter(row["scenario"] for row in own if row["collision"])),
        "impact_kmh": 3.6 * float(np.mean(hit)) if hit else 0.0,
        "min_ttc_s": float(np.mean([row["min_ttc_s"] for row in own])),
        "ttc_below_s_share": float(np.mean([row["min_ttc_s"] <= _TTC_BOUND_S for row in own])),
        "comfortable_share": float(np.mean([row["comfortable"] for row in own])),
        "progress_m": float(np.mean([row["progress_m"] for row in own])),
        "pdms": float(np.mean(scores)),
        "faults": sum(row["faults"] for row in own),
        "counts": dict(counts),
    }


def _difference(rows: list[_Row], arm: str, other: str) -> dict[str, Any]:
    first, second = ([row for row in rows if row["arm"] == name] for name in (arm, other))
    hits = [[bool(row["collision"]) for row in own] for own in (first, second)]
    fewer = 1.0 - sum(hits[0]) / sum(hits[1]) if sum(hits[1]) else math.nan
    return {**paired_difference(*hits, [row["scenario"] for row in first]), "fewer": fewer}


def _show(
    report: Report,
    compared: tuple[_Row, _Row],
    scenarios: list[str],
    seeds: int,
    arguments: argparse.Namespace,
) -> None:
    figures, differences = compared

    def difference(arm: str) -> str:
        found = differences.get(arm)
        if found is None:
            return "-"
        return f"{100 * found['mean']:+.1f} ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"

    arms = figures.values()
    report.table(
        f"{seeds} seeds of each scenario, load x{arguments.load}, faults {arguments.faults}",
        ("", *figures),
        [
            ["drives", *(arm["drives"] for arm in arms)],
            ["faults injected", *(arm["faults"] for arm in arms)],
            ["collisions that the vehicle is to blame for", *(arm["collisions"] for arm in arms)],
            *([f"  {name}", *(arm["by_scenario"].get(name, 0) for arm in arms)] for name in scenarios),
            ["the same, % of drives", *(100 * arm["collision_share"] for arm in arms)],
            ["less the naive node's, points (95 %)", *map(difference, figures)],
            ["impact speed, km/h, mean", *(arm["impact_kmh"] for arm in arms)],
            ["least time to collision, s, mean", *(arm["min_ttc_s"] for arm in arms)],
            ["within nuPlan's comfort, %", *(100 * arm["comfortable_share"] for arm in arms)],
            ["progress, m, mean", *(arm["progress_m"] for arm in arms)],
            ["PDMS, mean", *(arm["pdms"] for arm in arms)],
        ],
    )
    for name, arm in figures.items():
        report.text(
            f"{name}:"
            f" {', '.join(f'{word} {count:,}' for word, count in sorted(arm['counts'].items()) if count)}"
        )


def _targets(figures: dict[str, Any], differences: dict[str, Any], speed: float) -> list[Target]:
    targets = [Target("times real time", speed, ">=", 10.0)]
    if _FULL in figures and _BOUND in figures:
        more = 100 * (figures[_FULL]["collision_share"] - figures[_BOUND]["collision_share"])
        targets.append(Target("collisions of full less those of zero latency", more, "<=", 1.0, "points"))
    if _FULL in differences:
        found = differences[_FULL]
        share = 100 * found["fewer"] if not math.isnan(found["fewer"]) else math.nan
        targets.append(Target("fewer collisions than the naive node", share, ">=", 80.0, "%"))
        targets.append(
            Target("upper end of the difference's interval", 100 * found["high"], "<", 0.0, "points")
        )
    return targets


# -- restart times and fault rates


def _restarts(arguments: argparse.Namespace, report: Report) -> tuple[_Row, list[Target]]:
    real = measured_restart()
    restarts_s = sorted({*_RESTARTS_S, real["processor_s"]})
    drawn = [
        (name, seed)
        for seed in range(arguments.seed, arguments.seed + arguments.seeds)
        for name in arguments.scenarios
    ]
    cells = [(_FULL, faults, _NAIVE_RESTART_S) for faults in _RATES]
    cells += [(_NAIVE, faults, restart_s) for faults in _RATES for restart_s in restarts_s]
    cells = [cell for cell in cells if cell[1] != "none" or cell[2] in {restarts_s[0], _NAIVE_RESTART_S}]
    wanted = [_Wanted(arm, *one, 1, faults, restart_s) for one in drawn for arm, faults, restart_s in cells]
    hits: dict[tuple[str, str, float], dict[tuple[str, int], bool]] = {cell: {} for cell in cells}
    for row in _spread("drives", _drive, wanted, arguments):
        cell = row["arm"], row["goes_wrong"], row["naive_restart_s"]
        hits[cell][row["scenario"], row["seed"]] = bool(row["collision"])
    figures = []
    for arm, faults, restart_s in cells:
        own, full = (
            [found[one] for one in drawn]
            for found in (hits[arm, faults, restart_s], hits[_FULL, faults, _NAIVE_RESTART_S])
        )
        figures.append(
            {
                "arm": arm,
                "faults": faults,
                "restart_s": restart_s if arm == _NAIVE else None,
                "drives": len(own),
                "collisions": sum(own),
                "share": wilson(sum(own), len(own)),
                "more_than_full": paired_difference(own, full, [name for name, _ in drawn]),
            }
        )
    found = {(one["arm"], one["faults"], one["restart_s"]): one for one in figures}

    def shown(arm: str, faults: str, restart_s: float | None) -> str:
        one = found.get((arm, faults, restart_s)) or found[arm, faults, restarts_s[0]]
        low, high = one["share"]
        same = arm == _FULL or one["more_than_full"]["excludes_zero"]
        return f"{one['collisions']} ({100 * low:.0f} to {100 * high:.0f} %){'' if same else ' ='}"

    report.table(
        f"Collisions in {len(drawn)} drives each (95 %), from seed {arguments.seed}, by how long the naive"
        f" node is gone after a death; =: no difference to {_FULL}",
        ("faults of each kind", _FULL, *(_title_of(restart_s, real) for restart_s in restarts_s)),
        [
            [
                name,
                shown(_FULL, faults, None),
                *(shown(_NAIVE, faults, restart_s) for restart_s in restarts_s),
            ]
            for faults, name in _RATES.items()
        ],
    )
    report.text(
        f"A naive node was ready {real['elapsed_s']:.1f} s after its process began (median of"
        f" {real['starts']}), of which it used a processor for {real['processor_s']:.1f} s: that is what it"
        " takes on a machine with nothing else to do. Imports of torch and rclpy, the reference"
        " perception, 5 runs to warm up."
    )
    worst = found[_NAIVE, "bench", real["processor_s"]]["more_than_full"]
    return {"cells": figures, "measured_restart": real}, [
        Target(
            "restarts: as measured, faults as bench: lower end of naive less full",
            100 * worst["low"],
            ">=",
            0.0,
            "points",
        )
    ]


def _title_of(restart_s: float, real: _Row) -> str:
    return f"naive, {restart_s:g} s" + (" (measured)" if restart_s == real["processor_s"] else "")


def measured_restart(starts: int = 3) -> _Row:
    """Seconds from the start of a naive node's process until it takes images.

    That pass, and of a processor.
    """
    options: _Row = {
        "adapter": "torchperf_ros.models.camera:CameraAdapter",
        "options": {},
        "budget_ms": 79.0,
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.rig.naive_node",
        "--config",
        json.dumps({**options, "margin_ms": 1.0}),
    ]
    elapsed_s, processor_s = [], []
    for number in range(starts):
        say(f"start {number + 1} of {starts} of a naive node")
        begun_s = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
        ) as node:
            assert node.stdout is not None
            if not any(line.strip() == "ready" for line in node.stdout):
                sys.exit("the naive node did not start: see above")
            elapsed_s.append(time.monotonic() - begun_s)
            used = psutil.Process(node.pid).cpu_times()
            processor_s.append(used.user + used.system)
            node.kill()
    return {
        "starts": starts,
        "elapsed_s": float(np.median(elapsed_s)),
        "processor_s": round(float(np.median(processor_s)), 1),
    }


def wilson(hits: int, drives: int) -> tuple[float, float]:
    """The interval of 95 % of a share, by Wilson's score.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    z, share = 1.959964, hits / drives
    middle = (share + z * z / (2 * drives)) / (1 + z * z / drives)
    half = (
        z / (1 + z * z / drives) * math.sqrt(share * (1 - share) / drives + z * z / (4 * drives * drives))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


# -- nothing goes wrong


def _ordinary(arguments: argparse.Namespace, report: Report) -> tuple[_Row, list[Target]]:
    chosen = arguments.scenarios
    names = [*TRAFFIC, *SCENARIOS] if chosen == list(SCENARIOS) else chosen
    seeds = range(arguments.seed, arguments.seed + math.ceil(arguments.ordinary / len(names)))
    wanted = [_Wanted(_WATCHED, name, seed) for seed in seeds for name in names]
    rows = sorted(
        _spread("drives", _drive, wanted, arguments), key=lambda row: (row["scenario"], row["seed"])
    )

    def checked(row: _Row) -> int:
        return sum(number for word, number in row["counts"].items() if word.startswith("guard "))

    def replaced(row: _Row) -> int:
        return sum(number for word, number in row["counts"].items() if word in _REPLACED)

    figures = {
        name: {
            "drives": len(own),
            "latched": sum(bool(row["latch"]) for row in own),
            "checked": sum(map(checked, own)),
            "replaced": sum(map(replaced, own)),
            "drives_with_replaced": sum(replaced(row) > 0 for row in own),
            "collisions": sum(bool(row["collision"]) for row in own),
        }
        for name in names
        if (own := [row for row in rows if row["scenario"] == name])
    }
    report.table(
        f"{len(rows):,} drives without faults, {len(seeds)} seeds from {arguments.seed} on",
        (
            "",
            "drives",
            "the lane latched",
            "plans checked",
            "the guard replaced",
            "in drives",
            "collisions",
        ),
        [[name, *one.values()] for name, one in figures.items()],
    )
    wrong = [row for row in rows if row["latch"] or (replaced(row) and row["scenario"] in TRAFFIC)]
    for row in wrong[:_SHOWN]:
        what = f"the lane latched after {row['latch']}" if row["latch"] else f"the guard: {row['counts']}"
        report.text(f"{row['scenario']}, seed {row['seed']}: {what}")
    latched = sum(one["latched"] for one in figures.values())
    ours = sum(one["drives_with_replaced"] for name, one in figures.items() if name in TRAFFIC)
    return {"scenarios": figures, "seed": arguments.seed, "drives": len(rows), "wrong": wrong}, [
        Target("ordinary: drives in which the lane latches", latched, "==", 0),
        Target("ordinary: drives in traffic in which the guard replaces a plan", ours, "==", 0),
    ]


# -- the emergency lane


def _lane(arguments: argparse.Namespace, report: Report) -> tuple[_Row, list[Target]]:
    seeds = range(arguments.seed, arguments.seed + arguments.sequences)
    rows = sorted(_spread("sequences", run_sequence, seeds, arguments), key=lambda held: held.seed)
    wrong = [held for held in rows if not held.holds]
    past_m = np.array([held.past_m for held in rows if held.latched])

    def most(name: str) -> float:
        return float(max((getattr(held, name) for held in rows), default=math.nan))

    def count(name: str, above: float = 0.0) -> int:
        return sum(getattr(held, name) > above for held in rows)

    report.table(
        f"{len(rows):,} sequences of {SEQUENCE_S:g} s, from seed {arguments.seed}",
        ("", "sequences", "largest"),
        [
            ["the lane latched", count("latched"), most("latched")],
            ["speed after the first standstill, m/s", count("fastest_ms"), most("fastest_ms")],
            [
                f"distance past the first stop's end, m, above {_PAST_M}",
                count("past_m", _PAST_M),
                most("past_m"),
            ],
            [
                "a path asks for more speed than the vehicle had, m/s",
                count("faster_by_ms", FASTER_MS),
                most("faster_by_ms"),
            ],
            ["paths that do not end at a standstill", count("moving_ends"), most("moving_ends")],
            ["clears granted while a reason lasted", count("cleared_too_early"), most("cleared_too_early")],
            ["paths that the vehicle could not follow", count("refused"), most("refused")],
        ],
    )
    shown = sorted(wrong, key=lambda held: -held.fastest_ms)[:_SHOWN]
    shown += sorted(
        (held for held in rows if held.past_m > _PAST_M and held.holds), key=lambda held: -held.past_m
    )[:1]
    for held in shown:
        report.text(
            f"seed {held.seed}: {held.fastest_ms:.2f} m/s, {held.past_m:.1f} m past;"
            f" {', '.join(held.kinds)}"
        )
    figures = {
        "sequences": len(rows),
        "seed": arguments.seed,
        "latched": count("latched"),
        "hold": len(rows) - len(wrong),
        "fastest_ms": most("fastest_ms"),
        "past_m": most("past_m"),
        "past_m_p99": float(np.percentile(past_m, 99)) if len(past_m) else math.nan,
        "wrong": [asdict(held) for held in wrong],
    }
    return figures, [
        Target("lane: largest speed after the first standstill", most("fastest_ms"), "==", 0.0, "m/s"),
        Target("lane: sequences in which an invariant does not hold", len(wrong), "==", 0),
    ]


_PARTS: dict[str, Part] = {"drives": _drives, "restarts": _restarts, "ordinary": _ordinary, "lane": _lane}


if __name__ == "__main__":
    say("starting")
    sys.exit(main())
