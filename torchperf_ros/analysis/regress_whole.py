"""What two runs say as a whole: outputs, memory, start-up and compile time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.analysis.regress_blocks import dependence
from torchperf_ros.analysis.regress_interval import resampled_interval
from torchperf_ros.analysis.regress_metric import COMPILE, MEMORY_PEAK, MEMORY_SLOPE, OUTPUTS, START_UP, Metric
from torchperf_ros.analysis.regress_run import RunFrames, StageFrames
from torchperf_ros.analysis.regress_stage import LEAST_BLOCKS, Resampling
from torchperf_ros.analysis.regress_verdict import Estimate
from torchperf_ros.core.memory_trend import theil_sen_slope

_S_PER_H: Final = 3600.0
_SETTLE_S: Final = 60.0
_LEAST_TREND_S: Final = 180.0
_POINTS: Final = 60
_LEAST_POINTS: Final = 20
_STEADY: Final = frozenset({"fast", "virtual"})
_EXPLAINS: Final = (
    ("models", ("model",)), ("logs", ("log", "sha256")), ("parameters", ("params_sha256",)), ("seeds", ("seed",)),
    ("machines", ("machine", "fingerprint")), ("versions of torch", ("machine", "torch")),
)  # fmt: skip

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """The outputs of one stage in both runs, frame for frame.

    Attributes:
        matched: frames of both runs that were answered on time by the same tier, and tell their outputs.
        equal: those whose outputs are the same, bit for bit.
        base_only, new_only: answered frames that the other run does not have.
        by_stamp: matched by their stamps; otherwise by their numbers.
    """

    matched: int
    equal: int
    base_only: int
    new_only: int
    by_stamp: bool

    @property
    def in_words(self) -> str:
        """One line for people."""
        share = f"{self.equal:,} of {self.matched:,} outputs are the same"
        only = f"{self.base_only:,} frames only in the base, {self.new_only:,} only in the new run"
        return f"{share}, matched by {'stamp' if self.by_stamp else 'number'}; {only}"


def agreement(base: StageFrames, new: StageFrames) -> Agreement:
    """Match the frames of a stage and compare what was published for them.

    By stamp where every frame of both runs has one of its own, else by number.
    """
    by_stamp = all(len(one) and one.stamp_ns.all() and len(np.unique(one.stamp_ns)) == len(one) for one in (base, new))
    first, second = ((base.stamp_ns, new.stamp_ns) if by_stamp else (base.seq, new.seq))  # fmt: skip
    common, left, right = np.intersect1d(first, second, return_indices=True)
    matched = equal = 0
    if len(base.output_hash) and len(new.output_hash):
        own = ~(base.missed[left] | new.missed[right]) & (base.tier[left] == new.tier[right])
        before, after = base.output_hash[left][own], new.output_hash[right][own]
        known = (before != 0) & (after != 0)
        matched, equal = int(known.sum()), int((before[known] == after[known]).sum())
    return Agreement(matched, equal, len(base) - len(common), len(new) - len(common), by_stamp)


def compare_outputs(base: RunFrames, new: RunFrames, found: Mapping[str, Agreement]) -> list[Estimate]:
    """The share of outputs that changed, in percent, of each stage that tells them in either run.

    It decides only where nothing else explains it.

    Outputs have to be the same only for the same model, log, parameters and arithmetic, which is another with another
    machine or torch, and only if no frame was dropped for want of time: what a model remembers depends on what it saw.
    """
    excuses = [f"the {what} differ" for what, path in _EXPLAINS if base.fact(*path) != new.fact(*path)]
    if not {base.fact("pace"), new.fact("pace")} <= _STEADY:
        excuses.append("not both at pace fast or virtual")
    estimates = []
    for stage, one in found.items():
        if not any(len(run.stages[stage].output_hash) for run in (base, new)):
            continue
        if not one.matched:
            why = "no frame that both runs answered on time by the same tier, with its output's hash"
            estimates.append(Estimate(stage, OUTPUTS, math.nan, math.nan, why=why))
            continue
        changed = 100.0 * (1 - one.equal / one.matched)
        why = "; ".join([one.in_words, *([f"does not decide: {', '.join(excuses)}"] if excuses else [])])
        estimates.append(
            Estimate(stage, OUTPUTS, 0.0, changed, samples=one.matched, why=why, single=True, decides=not excuses)
        )
    return estimates


def compare_whole(base: RunFrames, new: RunFrames, resampling: Resampling) -> list[Estimate]:
    """Memory, start-up and compile time, as far as one of the runs tells."""
    values = {
        MEMORY_PEAK: [float(np.max(run.memory_mib)) if len(run.memory_mib) else math.nan for run in (base, new)],
        START_UP: [run.number("start_up_s") for run in (base, new)],
        COMPILE: [run.number("compile_s") for run in (base, new)],
    }
    found = [_single(metric, *pair) for metric, pair in values.items() if np.isfinite(pair).any()]
    return [*found, _slope(base, new, resampling)] if len(base.memory_s) or len(new.memory_s) else found


def _single(metric: Metric, base: float, new: float) -> Estimate:
    told = [
        f"the {word} run does not tell" for word, value in (("base", base), ("new", new)) if not math.isfinite(value)
    ]
    why = " and ".join(told) or "one measurement a run: judged by the margin alone"
    return Estimate("", metric, base, new, why=why, single=True)


def _slope(base: RunFrames, new: RunFrames, resampling: Resampling) -> Estimate:
    """Theil and Sen's slope of medians over time, with an interval from resampled blocks of what it leaves over."""
    series = [_medians(run) for run in (base, new)]
    lengths_s = [float(times[-1] - times[0]) if len(times) else 0.0 for times, _ in series]
    points = min(len(times) for times, _ in series)
    if min(lengths_s) < _LEAST_TREND_S or points < _LEAST_POINTS:
        enough, why = 0.0, "no memory samples in one of the runs"
        if all(len(run.memory_s) for run in (base, new)):
            why = (f"{min(lengths_s):.0f} s and {points} samples of memory after the first {_SETTLE_S:.0f} s, in which "
                   "caches fill")  # fmt: skip
            enough = max(_LEAST_TREND_S, min(lengths_s) * _LEAST_POINTS / max(points, 1)) + _SETTLE_S
        return Estimate("", MEMORY_SLOPE, math.nan, math.nan, samples=min(lengths_s), enough=enough, why=why, kind="s")
    random = np.random.default_rng([resampling.seed, len(series)])
    slopes = [_slopes(times, values, resampling.resamples, random) for times, values in series]
    (before, drawn_before, first), (after, drawn_after, second) = slopes
    blocks = min(first, second)
    interval = resampled_interval(after - before, drawn_after - drawn_before, blocks, resampling.alpha)
    enough, why = 0.0, ""
    if blocks < LEAST_BLOCKS:
        enough, why = (
            min(lengths_s) * (LEAST_BLOCKS / blocks) ** 1.5,
            "memory wanders too slowly to tell a trend from it",
        )
    return Estimate("", MEMORY_SLOPE, before, after, interval, min(lengths_s), enough, why, kind="s")


def _medians(run: RunFrames) -> tuple[Values, Values]:
    """Times in s and medians in MiB of at most `_POINTS` stretches, after the start."""
    times = run.memory_s
    used = np.flatnonzero(times >= times[0] + _SETTLE_S) if len(times) else np.empty(0, dtype=np.int64)
    parts = np.array_split(used, min(len(used), _POINTS)) if len(used) else []
    middle = np.array([np.median(times[part]) for part in parts])
    later = np.diff(middle, prepend=-np.inf) > 0  # two samples of one time have no slope
    return middle[later], np.array([np.median(run.memory_mib[part]) for part in parts])[later]


def _slopes(times: Values, values: Values, resamples: int, random: np.random.Generator) -> tuple[float, Values, float]:
    """The slope in MiB per hour, that of each resample, shape (resamples,), and how many blocks one has."""
    slope = theil_sen_slope(times, values)
    residuals = values - slope * times
    n = len(times)
    block = min(2 * dependence(residuals).block, n // 3)
    starts = random.integers(0, n, (resamples, -(-n // block)))
    places = ((starts[:, :, None] + np.arange(block)) % n).reshape(resamples, -1)[:, :n]
    first, second = np.triu_indices(n, 1)
    drawn = residuals[places] + slope * times
    apart = times[second] - times[first]
    found = np.array([np.median((row[second] - row[first]) / apart) for row in drawn])
    return slope * _S_PER_H, found * _S_PER_H, max(n / block, 2.0)
