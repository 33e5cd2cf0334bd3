"""What two sides say about each metric: values, and how far chance may move their difference.

From one or two runs a side the frames are the sample. Frames that follow each other are alike, so a
circular block bootstrap draws them in blocks, and shares count fewer frames than there are. From three runs
a side on, the run is the
sample: each run gives a value of each metric, and Welch's test compares the values.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.observe.runs.compare import verdict
from torchperf_ros.observe.runs.compare.verdict import Finding, Interval, Metric, Rules
from torchperf_ros.observe.runs.run_log import UNKNOWN, RunLog, StageLog

RUNS: Final = 3
"""So many runs a side, and the run is the sample: two have no spread worth the name."""
_QUANTILES: Final = {verdict.P50: 0.50, verdict.P95: 0.95, verdict.P99: 0.99}
_NO_INTERVAL: Final = "a maximum has no interval: the next run's may be anything; it does not decide"
_BLOCKS_LONGER: Final = 2.0  # than those of the best variance: intervals come out too short otherwise
_LEAST_BLOCKS: Final = 10.0  # fewer say too little about how much a resample varies
_LEAST_BEYOND: Final = 5.0  # effective frames on each side of a quantile
_LEAST_FRAMES: Final = 30  # effective ones, of a share
_LEAST_VALUES: Final = 8  # of which a block's length can be estimated
_PAIRED: Final = 0.5  # of each side's frames, that have to be in the other for their pairs to stand for all
_ROUNDING: Final = 1e-9  # of a value: what moves by less is constant
_MOST_DROPPED: Final = 1 << 22
_WHOLE: Final = 100.0

Values = NDArray[np.float64]
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Places of the same frames on both sides."""


def stage_frames(stage: StageLog) -> StageLog:
    """The answered frames of a stage in the order of their numbers, without those that say nothing about it.

    Left out are frames that came before the stage had started for the first time, and those that ran under
    a profiler. Frames that found it starting again, after a crash, count: they were missed.
    """
    seq = stage.frames["seq"]
    order = np.argsort(seq, kind="stable") if len(np.unique(seq)) == len(seq) else np.arange(len(seq))
    gaps = np.maximum(np.diff(seq[order], prepend=seq[order][:1] - 1) - 1, 0)
    frames = stage.frames[order]
    counted = np.logical_or.accumulate(stage.counted[order]) & ~np.isin(
        frames["t_ns"], list(stage.profiled)
    )
    return StageLog(stage.name, stage.tiers, frames[counted], gaps=gaps[counted])


def pooled(stages: Sequence[StageLog]) -> StageLog:
    """The frames of a stage in several runs, one run after the other; names are the first's."""
    frames, gaps = (np.concatenate([getattr(one, name) for one in stages]) for name in ("frames", "gaps"))
    return replace(stages[0], frames=frames, gaps=gaps)


def figures(frames: StageLog, first: str = "") -> dict[Metric, float]:
    """Every metric of a stage's frames, in its unit.

    NaN where nothing is known. `first` names the best tier.
    """
    known = frames.total_ms[np.isfinite(frames.total_ms)]
    quantiles = (
        np.quantile(known, list(_QUANTILES.values())) if len(known) else [math.nan] * len(_QUANTILES)
    )
    return {
        verdict.MAX: float(known.max()) if len(known) else math.nan,
        **{metric: float(value) for metric, value in zip(_QUANTILES, quantiles, strict=True)},
        verdict.JITTER: float(np.abs(np.diff(known)).mean()) if len(known) > 1 else math.nan,
        **{metric: _percent(flags) for metric, flags in _flags(frames, first).items()},
    }


def of_runs(
    stage: str, metric: Metric, base: Sequence[float], new: Sequence[float], alpha: float
) -> Finding:
    """The means of a metric over the runs of each side, and Welch's interval of their difference.

    Where a side has fewer than `RUNS` runs that know it, the means are shown and decide nothing.
    """
    sides = [np.array(side)[np.isfinite(side)] for side in (base, new)]
    before, after = (float(side.mean()) if len(side) else math.nan for side in sides)
    least = min(map(len, sides))
    shown = Finding(stage, metric, before, after, samples=least, kind="runs")
    if metric is verdict.MAX:
        return replace(shown, why=_NO_INTERVAL, decides=False)
    if unknown := [word for word, side in zip(("base", "new"), sides, strict=True) if not len(side)]:
        why = " and ".join(f"the {word} run does not say" for word in unknown)
        return replace(shown, why=why, decides=bool(stage))  # a stage that one side lacks is no verdict
    if least < RUNS:
        why = f"{least} run{'s' * (least > 1)} a side: shown, not judged; {RUNS} a side are"
        return replace(shown, why=why, decides=False)
    interval = Interval(shown.difference, shown.difference, math.nan)
    if not all(map(_constant, sides)):
        from scipy.stats import ttest_ind

        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", RuntimeWarning
            )  # one side may be constant, which Welch's test bears
            test = ttest_ind(sides[1], sides[0], equal_var=False)
        bounds = test.confidence_interval(1 - alpha)
        interval = Interval(float(bounds.low), float(bounds.high), float(test.pvalue))
    return replace(shown, interval=interval)


def latencies(base: StageLog, new: StageLog, rules: Rules) -> tuple[list[Finding], int]:
    """The latencies of two sides by a circular block bootstrap (Politis and Romano 1992) of each.

    Returns the metrics, and the frames in a block, of the side with the longer ones.
    """
    series = [_Series(one) for one in (base, new)]
    before, after = (figures(one) for one in (base, new))
    samples = min(len(one.values) for one in series)
    metrics = [*_QUANTILES, verdict.JITTER]
    intervals: dict[Metric, Interval] = {}
    certain = np.array_equal(base.total_ms, new.total_ms, equal_nan=True)
    if certain:  # as on a virtual clock: nothing is chance
        intervals = dict.fromkeys(metrics, Interval(0.0, 0.0, math.nan))
    elif samples >= _LEAST_VALUES:
        streams = np.random.SeedSequence(rules.seed).spawn(2)
        first, second = (
            one.drawn(rules.resamples, stream) for one, stream in zip(series, streams, strict=True)
        )
        moved = _measured(series[1].values, series[1].steps) - _measured(series[0].values, series[0].steps)
        blocks = min(len(one.values) / one.block for one in series)
        intervals = {
            metric: _percentile(float(one), column, blocks, rules.alpha)
            for metric, one, column in zip(metrics, moved, (second - first).T, strict=True)
        }
    longest = before[verdict.MAX], after[verdict.MAX]
    found = [Finding(base.name, verdict.MAX, *longest, None, samples, why=_NO_INTERVAL, decides=False)]
    for metric in metrics:
        short = [one for one in series if not certain and len(one.values) < one.least[metric]]
        enough, why = max(
            ((one.least[metric], _few(len(one.values), one.block)) for one in short), default=(0.0, "")
        )
        interval = intervals.get(metric)
        found.append(
            Finding(base.name, metric, before[metric], after[metric], interval, samples, enough, why)
        )
    return found, max(one.block for one in series)


def shares(base: StageLog, new: StageLog, pairs: Pairs | None, block: int, alpha: float) -> list[Finding]:
    """The shares of frames that went wrong.

    `pairs`: of `same_frames`; latencies depend on each other over `block`.
    """
    first = base.tiers[0] if base.tiers and new.tiers else ""
    same = np.array_equal(base.total_ms, new.total_ms, equal_nan=True)
    any_dropped = bool(base.gaps.any() or new.gaps.any())  # what one side dropped has no pair
    before, after = (_flags(one, first) for one in (base, new))
    found = []
    for metric in before:
        sides = [one[metric][np.isfinite(one[metric])] for one in (before, after)]
        if not any(map(len, sides)):
            continue
        samples = min(map(len, sides))
        one = Finding(base.name, metric, _percent(sides[0]), _percent(sides[1]), samples=samples)
        if same and not one.difference:
            interval, enough, why = Interval(0.0, 0.0, math.nan), 0.0, ""
        elif samples < _LEAST_FRAMES:
            interval, enough, why = None, float(_LEAST_FRAMES), _few(samples, 1)
        elif pairs is None or metric is verdict.DROPPED or (metric is verdict.MISS and any_dropped):
            interval, enough, why = _of_shares(sides[0], sides[1], block, alpha)
        else:  # 1 where a frame went wrong on the new side alone, -1 on the base alone
            steps = after[metric][pairs[1]] - before[metric][pairs[0]]
            interval, enough, why = _of_pairs(one, steps[np.isfinite(steps)], block, alpha)
        found.append(replace(one, interval=interval, enough=enough, why=why))
    return found


def same_frames(base: Sequence[StageLog], new: Sequence[StageLog]) -> Pairs | None:
    """The frames of one log in pairs of runs, one of each side, by their stamps; None if these differ."""
    places: list[Pairs] = []
    at = np.zeros(2, dtype=np.int64)
    for one, other in zip(base, new, strict=False):
        first, second = one.own_stamps, other.own_stamps
        if first is None or second is None:
            return None
        _, left, right = np.intersect1d(first, second, return_indices=True)
        places.append((left + at[0], right + at[1]))
        at += len(one), len(other)
    left, right = (np.concatenate(side) for side in zip(*places, strict=True))
    return (left, right) if len(left) and len(left) >= _PAIRED * max(at) else None


def whole(base: Sequence[RunLog], new: Sequence[RunLog], alpha: float) -> list[Finding]:
    """Memory, start-up and compile time, as far as one of the runs says: a value a run."""
    of_run: dict[Metric, Callable[[RunLog], float]] = {
        verdict.MEMORY_PEAK: lambda run: float(run.used_memory[2].max(initial=-math.inf)),
        verdict.MEMORY_SLOPE: lambda run: run.memory_slope,
        verdict.START_UP: lambda run: _number(run.fact("start_up_s")),
        verdict.COMPILE: lambda run: _number(run.fact("compile_s")),
    }
    found = []
    for metric, value in of_run.items():
        sides = [[value(run) for run in side] for side in (base, new)]
        if np.isfinite([*sides[0], *sides[1]]).any():
            found.append(of_runs("", metric, sides[0], sides[1], alpha))
    return found


def block_length(values: Values) -> int:
    """Frames over which successive values depend on each other.

    The automatic block length of a circular bootstrap.

    Politis and White, Econometric Reviews 23 (2004), corrected by Patton, Politis and White, 28 (2009). 1
    where values are constant or too few.
    """
    if len(values) < _LEAST_VALUES or _constant(values):
        return 1
    from arch.bootstrap import optimal_block_length

    with np.errstate(all="ignore"):
        found = float(optimal_block_length(values)["circular"].iloc[0])
    return math.ceil(found) if math.isfinite(found) else 1


def inflation(values: Values, block: int) -> float:
    """Variance of the mean of blocks over that of independent values, as a circular bootstrap would find it; from 1."""
    centred = values - values.mean()
    variance = float(centred @ centred) / len(values)
    sums = np.cumsum(np.concatenate([[0.0], centred, centred[:block]]))
    means = (sums[block:-1] - sums[: -block - 1]) / block
    return max(1.0, block * float(means @ means) / len(means) / variance) if variance > 0 else 1.0


def widening(blocks: float, alpha: float) -> float:
    """By how much an interval is widened for how few blocks there are.

    t / z, the quantiles of Student's t with `blocks` - 1 degrees of freedom and of the normal distribution,
    times sqrt(blocks / (blocks - 1)): a variance from so few blocks is uncertain, and too small by that (as
    Efron and Tibshirani 1993, ch. 12 and 14, say for independent values, whose place the blocks take).
    """
    from scipy.stats import norm, t

    blocks = max(blocks, 2.0)
    return float(t.isf(alpha / 2, blocks - 1) / norm.isf(alpha / 2)) * math.sqrt(blocks / (blocks - 1))


class _Series:
    """The latencies of one side, how they depend on each other, and how many an interval takes to be believed."""

    def __init__(self, frames: StageLog) -> None:
        self.values: Values = frames.total_ms[np.isfinite(frames.total_ms)]
        self.block = 1
        self.least = {metric: _LEAST_BEYOND / min(share, 1 - share) for metric, share in _QUANTILES.items()}
        self.least[verdict.JITTER] = _LEAST_BLOCKS
        if len(self.values) >= _LEAST_VALUES:
            steps = np.abs(np.diff(self.values))
            self.steps = np.append(
                steps, steps.mean()
            )  # the ring has no step from its end to its beginning
            quantiles = np.quantile(self.values, list(_QUANTILES.values()))
            beyond = [np.asarray(self.values > quantile, np.float64) for quantile in quantiles]
            self.block = _blocks(self.values, *beyond, self.steps)
            for metric, one in zip(self.least, [*beyond, self.steps], strict=True):
                self.least[metric] *= inflation(one, self.block)
        self.least = {
            metric: max(least, _LEAST_BLOCKS * self.block) for metric, least in self.least.items()
        }

    def drawn(self, resamples: int, stream: np.random.SeedSequence) -> Values:
        from arch.bootstrap import CircularBlockBootstrap

        bootstrap = CircularBlockBootstrap(
            self.block, self.values, self.steps, seed=np.random.default_rng(stream)
        )
        return np.asarray(bootstrap.apply(_measured, resamples))


def _measured(values: Values, steps: Values) -> Values:
    return np.append(np.quantile(values, list(_QUANTILES.values())), steps.mean())


def _number(fact: object) -> float:
    return float(fact) if isinstance(fact, (int, float)) else math.nan


def _constant(values: Values) -> bool:
    return bool(np.ptp(values) <= _ROUNDING * np.abs(values).max())


def _blocks(*series: Values) -> int:
    longest = max(map(block_length, series))
    return min(len(series[0]), math.ceil(_BLOCKS_LONGER * longest) if longest > 1 else 1)


def _few(frames: int, block: int) -> str:
    depend = f", which depend on each other over about {block}" if block > 1 else ""
    return f"{frames:,} frame{'s' * (frames != 1)}{depend}"


def _percent(flags: Values) -> float:
    known = flags[np.isfinite(flags)]
    return _WHOLE * float(known.mean()) if len(known) else math.nan


def _percentile(difference: float, resamples: Values, blocks: float, alpha: float) -> Interval:
    """Percentile interval of a block bootstrap, each bound as much further from the estimate as `widening` says."""
    wider = widening(blocks, alpha)
    low, high = np.quantile(resamples, (alpha / 2, 1 - alpha / 2))
    zero = difference * (1 - 1 / wider)  # where a resample lies that would be moved to no difference
    tail = int(min(np.count_nonzero(resamples <= zero), np.count_nonzero(resamples >= zero)))
    return Interval(
        difference - wider * max(0.0, difference - float(low)),
        difference + wider * max(0.0, float(high) - difference),
        min(1.0, 2 * (tail + 1) / (len(resamples) + 1)),
    )


def _flags(frames: StageLog, first: str) -> dict[Metric, Values]:
    """For each frame 1 where it went wrong, else 0, NaN where that is not known.

    Misses and dropped ones are of each frame that came: one that nothing answers is the worst miss.
    `first` names the best tier, which a side may lack; without names it is tier 0.
    """
    # Numbers of frames are a file's word: where they leave out far more frames than there are, each gap is
    # made shorter by the same factor, so that a single wrong number does not take all memory.
    total = float(frames.gaps.sum(dtype=np.float64))
    most = max(_MOST_DROPPED, 8 * len(frames))
    gaps = frames.gaps if total <= most else (frames.gaps * (most / total)).astype(np.int64)
    ends = np.cumsum(gaps + 1) - 1
    dropped = np.ones(int(ends[-1]) + 1 if len(ends) else 0)
    dropped[ends] = 0.0
    missed = dropped.copy()
    missed[ends] = frames.missed
    best = 0 if not first else frames.tiers.index(first) if first in frames.tiers else -1
    tier = frames.frames["tier"]
    return {
        verdict.MISS: missed,
        verdict.FALLBACK: (frames.frames["fallback"] != UNKNOWN) * 1.0,
        verdict.DROPPED: dropped,
        verdict.LOWER_TIER: np.where(tier >= 0, tier != best, math.nan),
    }


def _of_shares(base: Values, new: Values, block: int, alpha: float) -> tuple[Interval, float, str]:
    """The interval of the difference of two shares, by the variance of Agresti and Caffo, for frames in bursts.

    The American Statistician 54 (2000). It counts as many frames as independent ones would say as much.
    Returns the interval in percentage points, how many frames it takes to be believed (0 if there are), and
    why it is not.
    """
    sides = [base, new]
    # A side without a miss does not show how misses come in bursts: the other one's bursts count for both.
    length = min(min(map(len, sides)) // 2, max(block, *map(_blocks, sides)))
    inflated = max(inflation(one, length) for one in sides)
    variance = 0.0
    for one in sides:
        effective = len(one) / inflated
        share = (one.mean() * effective + 1) / (effective + 2)
        variance += share * (1 - share) / (effective + 2)
    blocks = min(map(len, sides)) / length
    needs = [_needs(len(one), length, len(one) / inflated) for one in sides]
    return _interval(_percent(new) - _percent(base), variance, blocks, alpha), *max(needs)


def _of_pairs(found: Finding, steps: Values, block: int, alpha: float) -> tuple[Interval, float, str]:
    """The interval of the difference of two shares of the same frames, as `_of_shares`.

    Only frames that went wrong on one side alone say anything (McNemar 1947); the variance is that of
    Agresti and Min (Statistics in Medicine 24 (2005)), for frames in bursts. From the metric's `plain`
    points on the frames are counted one by one: so large a change is judged, even if it is a single stretch
    of frames.
    """
    difference = found.difference
    length = (
        1 if abs(difference) >= found.metric.plain else min(len(steps) // 2, max(block, _blocks(steps)))
    )
    effective = len(steps) / inflation(steps, length)
    worse, better = (float(np.mean(steps == sign)) * effective for sign in (1.0, -1.0))
    moved = (worse - better) / (effective + 2)
    variance = ((worse + better + 1) / (effective + 2) - moved**2) / (effective + 2)
    return _interval(difference, variance, len(steps) / length, alpha), *_needs(
        len(steps), length, effective
    )


def _interval(difference: float, variance: float, blocks: float, alpha: float) -> Interval:
    """Around a difference in percentage points, of shares whose difference has this variance, from so many blocks."""
    from scipy.stats import norm

    error = widening(blocks, alpha) * _WHOLE * math.sqrt(variance)
    reach = float(norm.isf(alpha / 2)) * error
    return Interval(difference - reach, difference + reach, float(2 * norm.sf(abs(difference) / error)))


def _needs(frames: int, block: int, effective: float) -> tuple[float, str]:
    """How many frames a share's interval takes to be believed, and why; nothing if there are as many."""
    least = max(_LEAST_BLOCKS * block, frames * _LEAST_FRAMES / effective)
    return (least, _few(frames, block)) if frames < least else (0.0, "")
