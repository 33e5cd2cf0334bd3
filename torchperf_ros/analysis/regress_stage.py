"""What two runs say about one stage: latency, jitter, and shares of frames that went wrong, with their intervals."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.analysis.regress_blocks import BLOCKS_LONGER, block_inflation, dependence
from torchperf_ros.analysis.regress_bootstrap import resampled
from torchperf_ros.analysis.regress_interval import Interval, Share, resampled_interval, share_interval
from torchperf_ros.analysis.regress_metric import DROPPED, FALLBACK, JITTER, MAX, MISS, P50, P95, P99, Metric
from torchperf_ros.analysis.regress_run import StageFrames
from torchperf_ros.analysis.regress_sizes import EffectSizes, effect_sizes
from torchperf_ros.analysis.regress_verdict import Estimate

SHARES: Final = (0.50, 0.95, 0.99)
_LEAST_BEYOND: Final = 5.0  # effective frames on each side of a quantile
LEAST_BLOCKS: Final = 10.0
"""Fewer say too little about how much a resample varies."""
_LEAST_SHARE_FRAMES: Final = 30
_MOST_DROPPED: Final = 1 << 22
_MOST_DROPPED_PER_FRAME: Final = 8
_LEAST_JITTER: Final = 5.0
_WHOLE: Final = 100.0
_CERTAIN: Final = Interval(0.0, 0.0, 1.0)
_LEAST_FRAMES: Final = 2

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Resampling:
    """How resamples are drawn.

    Attributes:
        resamples: how many; the smallest p-value is 2 / (resamples + 1); more are drawn if a correction asks for less.
        seed: the same seed, the same verdicts.
        alpha: intervals are of 1 - alpha.
        curve: further quantiles, 0 to 1, whose differences are wanted for a picture.
    """

    resamples: int = 2000
    seed: int = 0
    alpha: float = 0.05
    curve: tuple[float, ...] = ()


@dataclass(frozen=True)
class StageComparison:
    """One stage in both runs.

    Attributes:
        name: of the stage.
        frames: answered frames that count, of the base and of the new run.
        estimates: its metrics.
        sizes: effect sizes of the latency.
        curve: rows of share, difference, low, high in ms, for a picture; may be empty.
        block: frames in a block of the bootstrap, the longer of both runs.
        identical: every latency is the same in both runs, as on a virtual clock: nothing is left to chance.
    """

    name: str
    frames: tuple[int, int]
    estimates: tuple[Estimate, ...]
    sizes: EffectSizes
    curve: tuple[tuple[float, float, float, float], ...]
    block: int
    identical: bool = False


class _Series:
    """The latencies of one run, what they come to (NaN of none), and how they depend on each other."""

    def __init__(self, frames: StageFrames) -> None:
        self.values: Values = frames.total_ms[np.isfinite(frames.total_ms)]
        self.steps: Values = np.abs(np.diff(self.values))
        self.block: int = 1
        self.figures: dict[Metric, float] = dict.fromkeys((P50, P95, P99, MAX, JITTER), math.nan)
        if not len(self.values):
            return
        quantiles = np.quantile(self.values, SHARES).tolist()
        self.figures |= {**dict(zip((P50, P95, P99), quantiles, strict=True)), MAX: float(self.values.max())}
        if len(self.values) < _LEAST_FRAMES:
            return
        self.figures[JITTER] = float(self.steps.mean())
        series = [*((self.values > value).astype(np.float64) for value in quantiles), self.steps]
        found = [dependence(one) for one in series]
        longest = max(dependence(self.values).block, *(one.block for one in found))
        self.block = min(len(self.values), math.ceil(BLOCKS_LONGER * longest) if longest > 1 else 1)
        self.inflations = [max(told.inflation, block_inflation(one, min(self.block, len(one))))
                           for told, one in zip(found, series, strict=True)]  # fmt: skip

    @property
    def blocks(self) -> float:
        return len(self.values) / self.block

    @property
    def enough(self) -> float:
        return frames_for(LEAST_BLOCKS, len(self.values), self.block)

    def resampled(
        self, resampling: Resampling, stream: np.random.SeedSequence, progress: Callable[[int], None]
    ) -> Values:
        """Shape (resamples, len(SHARES) + len(curve) + 1), the last column jitter."""
        steps = np.append(self.steps, self.steps.mean())[:, None]  # the ring has no step from its end to its begin
        quantiles, means = resampled(
            self.values, (*SHARES, *resampling.curve), steps, self.block, resampling.resamples,
            np.random.default_rng(stream), progress,
        )  # fmt: skip
        return np.hstack([quantiles, means])


def compare_stage(
    base: StageFrames, new: StageFrames, resampling: Resampling, progress: Callable[[int], None] = lambda _: None
) -> StageComparison:
    """Compare one stage of two runs.

    The blocks of the bootstrap are twice as long as the longest that `dependence` asks for, among the latencies, their
    steps, and for each quantile the series of which frames lie beyond it: that series' mean is what a quantile's error
    comes from (Bahadur 1966). Twice, because that length is best for a variance and too short for an interval
    (see `docs/regression.md` for what was measured).

    Args:
        base: the stage's frames.
        new: the same of the other run.
        resampling: how.
        progress: told how many resamples were added, of 2 x `resamples`.
    """
    series = _Series(base), _Series(new)
    intervals: list[Interval] = []
    curve: list[tuple[float, float, float, float]] = []
    if min(len(one.values) for one in series) >= _LEAST_FRAMES:
        streams = np.random.SeedSequence([resampling.seed, *base.name.encode()]).spawn(2)
        before, after = (
            one.resampled(resampling, stream, progress) for one, stream in zip(series, streams, strict=True)
        )
        drawn, blocks = after - before, max(min(one.blocks for one in series), 2.0)
        wanted = (*SHARES, *resampling.curve)
        moved = np.quantile(series[1].values, wanted) - np.quantile(series[0].values, wanted)
        moved = np.append(moved, series[1].figures[JITTER] - series[0].figures[JITTER])
        found = [resampled_interval(float(one), column, blocks, resampling.alpha)
                 for one, column in zip(moved, drawn.T, strict=True)]  # fmt: skip
        intervals = [*found[: len(SHARES)], found[-1]]
        bounds = zip(wanted, moved, found, strict=False)
        curve = [(share, float(one), bound.low, bound.high) for share, one, bound in list(bounds)[len(SHARES) :]]
    block = max(one.block for one in series)
    shares = _shares(base, new, (series[0].block, series[1].block), resampling.alpha)
    estimates = [*_latencies(base.name, series, intervals), *shares]
    identical = len(series[0].values) > 0 and np.array_equal(base.total_ms, new.total_ms, equal_nan=True)
    if identical:
        estimates = [replace(one, interval=_CERTAIN, enough=0.0, why="") if one.decides and one.difference == 0 else one
                     for one in estimates]  # fmt: skip
    sizes = effect_sizes(series[0].values, series[1].values)
    return StageComparison(
        base.name, (len(base), len(new)), tuple(estimates), sizes, () if identical else tuple(curve), block, identical
    )


def _latencies(stage: str, series: tuple[_Series, _Series], intervals: list[Interval]) -> list[Estimate]:
    samples = min(len(one.values) for one in series)
    why = "a maximum has no interval: the next run's may be anything; it does not decide"
    longest = Estimate(stage, MAX, *_values(series, MAX), samples=samples, why=why, decides=False)
    if not intervals:
        why = f"frames with a known latency in one of the runs: {samples}"
        return [longest, *(Estimate(stage, metric, *_values(series, metric), samples=samples, enough=_fewest(metric),
                                    why=why) for metric in (P50, P95, P99, JITTER))]  # fmt: skip
    estimates = [longest]
    for number, (metric, share) in enumerate(zip((P50, P95, P99), SHARES, strict=True)):
        least = _LEAST_BEYOND / min(share, 1 - share)
        inflations = [one.inflations[number] for one in series]
        estimates.append(_estimate(stage, metric, series, inflations, least, intervals[number]))
    jitters = [one.inflations[-1] for one in series]
    return [*estimates, _estimate(stage, JITTER, series, jitters, _LEAST_JITTER, intervals[-1])]


def _estimate(
    stage: str, metric: Metric, series: tuple[_Series, _Series], inflations: list[float], least: float,
    interval: Interval,
) -> Estimate:  # fmt: skip
    """An estimate, with its interval if both runs hold enough for one."""
    values = _values(series, metric)
    samples = min(len(one.values) for one in series)
    enough = max(max(one.enough, least * inflation) for one, inflation in zip(series, inflations, strict=True))
    short = [one for one, inflation in zip(series, inflations, strict=True)
             if len(one.values) < least * inflation or one.blocks < LEAST_BLOCKS]  # fmt: skip
    if not short:
        return Estimate(stage, metric, *values, interval, samples)
    fewest = min(short, key=lambda one: len(one.values))
    why = _few(len(fewest.values), fewest.block)
    return Estimate(stage, metric, *values, interval, samples, enough, why)


def _values(series: tuple[_Series, _Series], metric: Metric) -> tuple[float, float]:
    return series[0].figures[metric], series[1].figures[metric]


def frames_for(blocks: float, count: int, block: float) -> float:
    """How many frames make so many blocks: a block's length grows with the cube root of their number.

    Args:
        blocks: that are wanted.
        count: frames that there are.
        block: as long as one is with these.
    """
    return float(count * (blocks * block / count) ** 1.5)


def _few(frames: int, block: int) -> str:
    return f"{frames:,} frame{'s' * (frames != 1)}" + (
        f", which depend on each other over about {block}" if block > 1 else ""
    )


def _fewest(metric: Metric) -> float:
    shares = dict(zip((P50.key, P95.key, P99.key), SHARES, strict=True))
    return _LEAST_BEYOND / (1 - shares[metric.key]) if metric.key in shares else LEAST_BLOCKS


def _shares(base: StageFrames, new: StageFrames, blocks: tuple[int, int], alpha: float) -> list[Estimate]:
    """The shares of frames that went wrong; `blocks` are as long as latencies depend on each other in each run."""
    columns = (
        (MISS, base.missed, new.missed),
        (FALLBACK, base.fell_back, new.fell_back),
        (DROPPED, _never_started(base), _never_started(new)),
    )
    estimates = []
    for metric, *runs in columns:
        samples = min(map(len, runs))
        if samples < _LEAST_SHARE_FRAMES:
            before, after = (_WHOLE * float(one.mean()) if len(one) else math.nan for one in runs)
            estimates.append(Estimate(base.name, metric, before, after, None, samples, _LEAST_SHARE_FRAMES,
                                      _few(samples, 1)))  # fmt: skip
            continue
        shares = [Share.of(one, block) for one, block in zip(runs, blocks, strict=True)]
        interval = share_interval(shares[0], shares[1], alpha)
        enough, why = 0.0, ""
        for one in shares:
            if one.blocks < LEAST_BLOCKS or one.effective < _LEAST_SHARE_FRAMES:
                fewest = max(frames_for(LEAST_BLOCKS, one.frames, one.block),
                             one.frames * _LEAST_SHARE_FRAMES / one.effective)  # fmt: skip
                enough, why = max((enough, why), (fewest, _few(one.frames, one.block)))
        before, after = (_WHOLE * one.share for one in shares)
        rare = all(one.share * one.effective < _LEAST_BEYOND for one in shares)
        estimates.append(Estimate(base.name, metric, before, after, interval, samples, enough, why,
                                  narrows=1.0 if rare else 0.5))  # fmt: skip
    return estimates


def _never_started(frames: StageFrames) -> NDArray[np.bool_]:
    """Every frame that came, in order: True for those that were dropped.

    The numbers of frames are a file's word: where they leave out far more frames than there are, each gap is made
    shorter by the same factor, so that a single wrong number does not take all memory.
    """
    dropped = frames.dropped
    total = float(dropped.sum(dtype=np.float64))
    if total > (most := max(_MOST_DROPPED, _MOST_DROPPED_PER_FRAME * len(frames))):
        dropped = (dropped * (most / total)).astype(np.int64)
    ends = np.cumsum(dropped + 1) - 1
    came = np.ones(int(ends[-1]) + 1 if len(ends) else 0, dtype=np.bool_)
    came[ends] = False
    return came
