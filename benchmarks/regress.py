"""How often `torchperf compare` is wrong: false alarms on identical runs, and changes of 5 % that it finds.

Every run is simulated: 20 ms times the exponential of an AR(1) with deviation 0.1, plus Pareto spikes (tail
index 2.5) on a share of the frames; 3 % of the frames miss their budget, in bursts. Two runs are compared
as by the command, with its defaults, and again with margins of zero, so that only the statistics stand
between noise and an alarm.
"""

import argparse
import concurrent.futures
import functools
import itertools
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.rig.arguments import arguments_of, callers_path
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.observe.runs.changes import ALPHA, Judgement, MetricChange
from torchperf_ros.observe.runs.comparison import Comparison, compare
from torchperf_ros.observe.runs.run_log import RunLog, run_of, write_run
from torchperf_ros.stage.frame_table import FRAME

STAGE = "perception"
_START_NS, _PERIOD_NS = 1_700_000_000_000_000_000, 33_333_333  # 30 Hz
_TYPICAL_MS = 20.0
_SPREAD = 0.1  # of the logarithm
_SPIKE_MS = 5.0
_TAIL_INDEX = 2.5  # of the spikes: their variance exists, their fourth moment does not
_CERTAIN = 2_000_000
_LATE_SHARE = 0.03
_WARM_UP = 2000
TESTED = ("p50", "p99", "miss")
_LEAST_INTERVALS = 50  # for a share of them
_SHOWN = {"alarm": "alarm", "p99_worse": "p99 worse", "p99_equivalent": "p99 equivalent"}
_OF_IDENTICAL = {
    **{f"interval_{key}": f"interval {key}" for key in TESTED},
    "alarm_without_margins": "alarm, no margins",
}
_OF_CHANGED = {"p99_not_enough": "p99 not enough data", "p99_frames_needed": "frames needed, it says"}
_EPILOG = """\
interval: 95 % intervals that do not hold the true difference, 0; of those that there were data enough for, if 50 were
alarm: comparisons with at least one metric `worse`
the standard error of a share of 5 % is 1.5 points for 200 pairs, 1 for 500

example:
  ./run bench regress --changes identical --workers 2 --json regress.json"""


@dataclass(frozen=True)
class LatencyModel:
    """20 ms times the exponential of an AR(1), plus Pareto spikes.

    Attributes:
        phi: autocorrelation of successive frames before the spikes, 0 to 1.
        spikes: share of frames with one, 0 to 1.
    """

    phi: float
    spikes: float

    def draw(self, frames: int, random: np.random.Generator) -> np.ndarray:
        """Latencies in ms, shape (frames,)."""
        noise = random.standard_normal(frames + _WARM_UP)
        body = _TYPICAL_MS * np.exp(_SPREAD * _ar1(noise, self.phi)[_WARM_UP:])
        return body + (random.random(frames) < self.spikes) * _SPIKE_MS * (
            1 + random.pareto(_TAIL_INDEX, frames)
        )

    def run(self, frames: int, random: np.random.Generator, slower: "Slower | None" = None) -> RunLog:
        """A run of one stage.

        3 % of the frames of a run that is not slower are over the budget, in bursts.
        """
        p95, p97, p99 = _quantiles_ms(self.spikes)
        total_ms = self.draw(frames, random)
        if slower is not None:
            total_ms = slower.of(total_ms, p95, p99)
        return run_of({"stages": [{"name": STAGE, "tiers": ["full"]}]}, {STAGE: _rows(total_ms, p97)})


@dataclass(frozen=True)
class Slower:
    """A change that moves the p99.

    Attributes:
        p99_share: by this share, 0.05 for 5 %.
        tail_only: by stretching what lies beyond the p95; otherwise every frame takes so much longer.
    """

    p99_share: float
    tail_only: bool

    def of(self, total_ms: np.ndarray, p95: float, p99: float) -> np.ndarray:
        if not self.tail_only:
            return total_ms * (1 + self.p99_share)
        stretch = (p99 * (1 + self.p99_share) - p95) / (p99 - p95)
        return np.where(total_ms > p95, p95 + (total_ms - p95) * stretch, total_ms)


@functools.cache
def _quantiles_ms(spikes: float) -> tuple[float, ...]:
    """The true p95, p97 and p99, from 2,000,000 frames, which need no memory of each other."""
    values = LatencyModel(0.0, spikes).draw(_CERTAIN, np.random.default_rng(1))
    return tuple(np.quantile(values, (0.95, 1 - _LATE_SHARE, 0.99)).tolist())


def _ar1(noise: np.ndarray, phi: float) -> np.ndarray:
    """Variance 1, once warmed up."""
    from scipy.signal import lfilter

    return lfilter([np.sqrt(1 - phi**2)], [1.0, -phi], noise)


def _rows(total_ms: np.ndarray, budget_ms: float) -> np.ndarray:
    late = total_ms > budget_ms
    rows = np.zeros(len(total_ms), dtype=FRAME)
    rows["seq"] = np.arange(len(total_ms))
    rows["stamp_ns"] = _START_NS + rows["seq"] * _PERIOD_NS
    rows["t_ns"] = rows["stamp_ns"] + np.round(total_ms * 1e6).astype(np.int64)
    rows["outcome"], rows["fallback"] = late, np.where(late, 1, -1)
    rows["total_ms"], rows["budget_ms"] = total_ms, budget_ms
    return rows


CHANGES = {"identical": None, "all frames": Slower(0.05, False), "tail only": Slower(0.05, True)}


@dataclass(frozen=True)
class Cell:
    """What is repeated: a model of latencies, a length, and what is different in the second run."""

    phi: float
    spikes: float
    frames: int
    change: str


@dataclass
class Counts:
    """What came of the pairs of one cell.

    How many intervals there were and missed 0, alarms, and p99 verdicts.
    """

    intervals: dict[str, int]
    missed: dict[str, int]
    alarms: int = 0
    alarms_without_margins: int = 0
    p99_worse: int = 0
    p99_equivalent: int = 0
    p99_unknown: int = 0
    needed: tuple[float, ...] = ()


def count(cell: Cell, pairs: int, resamples: int, seed: int) -> Counts:
    counts = Counts(dict.fromkeys(TESTED, 0), dict.fromkeys(TESTED, 0))
    model, changed = LatencyModel(cell.phi, cell.spikes), CHANGES[cell.change]
    random = np.random.default_rng([seed, round(cell.phi * 1000), round(cell.spikes * 1000), cell.frames])
    needed = []
    for _ in range(pairs):
        base, new = model.run(cell.frames, random), model.run(cell.frames, random, changed)
        found = compare([base], [new], resamples=resamples)
        for one in found.changes:
            if one.metric.key in TESTED and one.tested:
                counts.intervals[one.metric.key] += 1
                counts.missed[one.metric.key] += not one.low <= 0 <= one.high
        counts.alarms += bool(found.with_verdict(Judgement.WORSE))
        counts.alarms_without_margins += any(one.p <= ALPHA and one.difference > 0 for one in found.changes)
        p99 = _p99(found)
        counts.p99_worse += p99.verdict is Judgement.WORSE
        counts.p99_equivalent += p99.verdict is Judgement.EQUIVALENT
        counts.p99_unknown += p99.verdict is Judgement.NOT_ENOUGH
        needed.append(p99.needed)
    counts.needed = tuple(needed)
    return counts


def save(folder: Path, seed: int) -> None:
    """Write runs of 9,000 frames that `torchperf compare` can be tried on.

    `branch` has a longer tail than `main`; of `burst`, 60 % of the frames miss their deadline, all in a
    row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, random = LatencyModel(0.8, 0.01), np.random.default_rng(seed)
    for name, change in (("main", None), ("branch", Slower(0.12, True))):
        write_run(model.run(9000, random, change), folder / f"{name}.json")
    burst = model.run(9000, random)
    for column in ("outcome", "fallback"):
        burst.frames[STAGE][column][1800:7200] = 1  # late, and the last output held
    write_run(burst, folder / "burst.json")


def _p99(found: Comparison) -> MetricChange:
    return next(one for one in found.changes if one.metric.key == "p99")


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--pairs", type=int, default=200, help="of runs, for each line (default 200)")
    parser.add_argument("--resamples", type=int, default=500, help="of each run (default 500)")
    parser.add_argument(
        "--frames", type=int, nargs="+", default=[300, 1000, 3000, 10_000], help="in each run"
    )
    parser.add_argument(
        "--phi", type=float, nargs="+", default=[0.0, 0.5, 0.9, 0.97], help="autocorrelation"
    )
    parser.add_argument(
        "--spikes", type=float, nargs="+", default=[0.002, 0.02], help="share of frames with a spike"
    )
    parser.add_argument(
        "--changes", nargs="+", choices=list(CHANGES), default=list(CHANGES), help="what is simulated"
    )
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default 1)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument(
        "--save", type=callers_path, metavar="FOLDER", help="write runs to try it on, and stop"
    )
    arguments = parser.parse_args()
    if arguments.save:
        save(arguments.save, arguments.seed)
        return 0
    report = Report("regress", arguments)
    cells = [
        Cell(*told)
        for told in itertools.product(arguments.phi, arguments.spikes, arguments.frames, arguments.changes)
    ]
    figures = {
        cell: _figures(counts, arguments.pairs) for cell, counts in _counted(cells, arguments).items()
    }
    _show(report, figures)
    targets = []
    if identical := [found for cell, found in figures.items() if cell.change == "identical"]:
        alarms, bare = ([found[key] for found in identical] for key in ("alarm", "alarm_without_margins"))
        by_chance = 2 * math.sqrt(ALPHA * (1 - ALPHA) / arguments.pairs)
        targets = [
            Target("alarms on identical runs", float(np.mean(alarms)), "<=", ALPHA),
            Target("the same without margins", float(np.mean(bare)), "<=", ALPHA),
            Target("alarms in the worst line", max(alarms), "<=", ALPHA + by_chance),
        ]
    report.finish({"cells": [{**vars(cell), **found} for cell, found in figures.items()]}, targets)
    return 0


def _counted(cells: list[Cell], arguments: argparse.Namespace) -> dict[Cell, Counts]:
    found = {}
    with concurrent.futures.ProcessPoolExecutor(
        arguments.workers, initializer=os.nice, initargs=(2,)
    ) as pool:
        waiting = {
            pool.submit(count, cell, arguments.pairs, arguments.resamples, arguments.seed): cell
            for cell in sorted(cells, key=lambda cell: -cell.frames)
        }
        for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
            found[waiting[done]] = done.result()
            say(f"{number} of {len(cells)}: {waiting[done]}")
    return {cell: found[cell] for cell in cells}


def _figures(counts: Counts, pairs: int) -> dict[str, float]:
    known = [value for value in counts.needed if math.isfinite(value)]
    return {
        **{
            f"interval_{key}": (
                counts.missed[key] / counts.intervals[key]
                if counts.intervals[key] >= _LEAST_INTERVALS
                else math.nan
            )
            for key in TESTED
        },
        **{f"intervals_{key}": counts.intervals[key] for key in TESTED},
        "alarm": counts.alarms / pairs,
        "alarm_without_margins": counts.alarms_without_margins / pairs,
        "p99_worse": counts.p99_worse / pairs,
        "p99_equivalent": counts.p99_equivalent / pairs,
        "p99_not_enough": counts.p99_unknown / pairs,
        "p99_frames_needed": float(np.median(known)) if known else math.nan,
    }


def _show(report: Report, figures: dict[Cell, dict[str, float]]) -> None:
    for change in CHANGES:
        columns = _SHOWN | (_OF_IDENTICAL if change == "identical" else _OF_CHANGED)
        rows = [
            [f"{cell.phi:g}", f"{cell.spikes:.1%}", cell.frames, *(found[key] for key in columns)]
            for cell, found in figures.items()
            if cell.change == change
        ]
        if rows:
            title = "Identical runs" if change == "identical" else f"p99 longer by 5 %: {change}"
            report.table(title, ("phi", "spikes", "frames", *columns.values()), rows)


if __name__ == "__main__":
    sys.exit(main())
