"""What runs are compared by, how each metric changed, how far chance may move it, and the verdict.

Frames that follow each other are alike. Therefore frames are drawn again in blocks (the circular block
bootstrap of Politis and Romano 1992), and the spread of what the draws give is the standard error of a
difference. From three runs a side on the run is what is drawn: a mean over runs has that standard error in
closed form. Student's t makes an interval of either.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.observe.runs.run_log import UNKNOWN, StageLog

# Chance of a false alarm of all verdicts together; intervals are of 1 - ALPHA.
ALPHA: Final = 0.05
# So many runs a side, and the run is the sample: two have no spread worth the name.
RUNS: Final = 3
RESAMPLES: Final = 1000
NO_INTERVAL: Final = "a maximum has no interval: the next run's may be anything; it does not decide"
_OF_RUNS: Final = f"shown, not judged; {RUNS} runs a side are judged by it"
# So many margins of change deserve a look, though nothing judges them.
_CONSPICUOUS: Final = 10.0
# The best block for a variance; intervals come out too short with it, so that blocks are twice as long.
_BLOCKS_LONGER: Final = 2.0
_LEAST_BLOCKS: Final = 10.0
_LEAST_BEYOND: Final = 5.0  # effective frames on each side of a quantile
_LEAST_FRAMES: Final = 30  # effective ones, of a share
_LEAST_VALUES: Final = 8  # of which a block's length can be estimated
_PAIRED: Final = 0.5  # of each side's frames that the other side has, too, for one axis of both
_ROUNDING: Final = 1e-9  # of a value: what moves by less is constant
Values = NDArray[np.float64]


@dataclass(frozen=True)
class ComparedStage:
    """One stage on both sides.

    Attributes:
        block: frames in a block of the bootstrap, the longest of its metrics; 0 where the runs are the
            sample.
    """

    name: str
    base: StageLog
    new: StageLog
    agreement: Mapping[str, int]
    block: int


@dataclass(frozen=True)
class Metric:
    """One thing that runs are compared by; more of it is worse.

    Attributes:
        key: its name in `-o FILE.json`, for example `p99`.
        unit: of its values.
        share, least: the smallest change that matters: a share of the base, 0 to 1, or so much in the unit
            if that is more.
        whole: one value for the whole run, instead of one for each stage.
    """

    key: str
    title: str
    unit: str
    share: float
    least: float
    whole: bool = False

    def margin(self, base: float, share: float | None = None) -> float:
        """The smallest change of this base that matters; `share` replaces the metric's own."""
        found = self.share if share is None else share
        return max(found * abs(base), self.least) if math.isfinite(base) else self.least


P50: Final = Metric("p50", "p50 latency", "ms", 0.02, 0.1)
P95: Final = Metric("p95", "p95 latency", "ms", 0.03, 0.2)
P99: Final = Metric("p99", "p99 latency", "ms", 0.03, 0.2)
MAX: Final = Metric("max", "longest latency", "ms", 0.05, 0.2)
JITTER: Final = Metric("jitter", "jitter", "ms", 0.1, 0.1)
MISS: Final = Metric("miss", "miss ratio", "%", 0.0, 0.1)
FALLBACK: Final = Metric("fallback", "fallback ratio", "%", 0.0, 0.1)
DROPPED: Final = Metric("dropped", "dropped ratio", "%", 0.0, 0.5)
LOWER_TIER: Final = Metric("lower_tier", "lower tiers", "%", 0.0, 1.0)
OUTPUTS: Final = Metric("outputs", "outputs changed", "%", 0.0, 0.0)
MEMORY_PEAK: Final = Metric("memory_peak", "memory peak", "MiB", 0.05, 16.0, whole=True)
MEMORY_SLOPE: Final = Metric("memory_slope", "memory slope", "MiB/h", 0.0, 60.0, whole=True)
START_UP: Final = Metric("start_up", "start-up time", "s", 0.5, 2.0, whole=True)
COMPILE: Final = Metric("compile", "compile time", "s", 0.25, 2.0, whole=True)
_SHARES: Final = (MISS, FALLBACK, DROPPED, LOWER_TIER)
# In the order of the tables.
METRICS: Final = (
    *(P50, P95, P99, MAX, JITTER),
    *_SHARES,
    *(OUTPUTS, MEMORY_PEAK, MEMORY_SLOPE, START_UP, COMPILE),
)
# Metrics whose share `--margin` sets: those quantiles of the latency.
_QUANTILES: Final = {P50: 0.50, P99: 0.99}
# From so many percentage points on, frames of one log are counted one by one: so large a change is judged,
# even if it is a single stretch. After a disturbance the ladder is back at its first tier within 10 s, a
# tenth of a short log, without any fault: lower tiers take more.
_PLAIN: Final = {MISS: 10.0, LOWER_TIER: 30.0}


class Judgement(enum.Enum):
    WORSE = "worse"
    BETTER = "better"
    EQUIVALENT = "equivalent"
    NOT_ENOUGH = "not enough data"
    INFORMATIVE = "informative"


# How a judgement looks: the tag of its cell on a page, and its style in a terminal.
TAGS: Final = {Judgement.WORSE: "bad", Judgement.BETTER: "good"}
STYLES: Final = {
    Judgement.WORSE: "bold red",
    Judgement.BETTER: "green",
    Judgement.NOT_ENOUGH: "yellow",
    Judgement.INFORMATIVE: "dim",
}


@dataclass(frozen=True)
class MetricChange:
    """A metric of both sides, and what `judge` makes of it.

    Attributes:
        stage: empty for a metric of the whole run.
        base, new: the values, in the metric's unit; of several runs the mean or that of all frames; NaN
            where unknown.
        low, high: the interval of the difference, new less base; NaN where there is none.
        p: of no difference, two-sided; NaN where chance plays no part. `judge` multiplies it by the number
            of comparisons.
        samples: frames or runs (see `kind`) of the side that has fewer.
        enough: how many an interval takes to be believed; 0 where it is, or where more would not help.
        why: in words, what keeps the metric from an interval or a verdict.
        decides: whether it can be worse or better at all.
        needed: with about so many frames or runs a side a verdict could be expected; NaN where that is
            unknown.
        limit: the highest value that the new side may have; NaN where there is none.
    """

    stage: str
    metric: Metric
    base: float
    new: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    samples: float = 0.0
    enough: float = 0.0
    why: str = ""
    decides: bool = True
    kind: str = "frames"
    verdict: Judgement = Judgement.INFORMATIVE
    margin: float = math.nan
    needed: float = math.nan
    limit: float = math.nan

    @property
    def title(self) -> str:
        return f"{self.stage} {self.metric.title}".strip()

    @property
    def difference(self) -> float:
        return self.new - self.base

    @property
    def tested(self) -> bool:
        """Whether it has an interval that can be believed, and decides."""
        return self.decides and math.isfinite(self.low) and self.samples >= self.enough

    @property
    def breaks_limit(self) -> bool:
        """Whether the new side is over its limit; what was not measured keeps none."""
        return not math.isnan(self.limit) and not self.new <= self.limit

    @property
    def conspicuous(self) -> bool:
        """Whether people should look at what has no verdict: far more than its margin, or gone."""
        if self.verdict not in {Judgement.INFORMATIVE, Judgement.NOT_ENOUGH} or self.metric is MAX:
            return False
        gone = math.isfinite(self.base) and not math.isfinite(self.new) and not self.metric.whole
        return gone or self.difference >= _CONSPICUOUS * self.margin > 0


# -- the verdict


def judge(changes: Sequence[MetricChange], margin: float | None = None) -> list[MetricChange]:
    """Judge all metrics of a comparison together, as one false alarm is one too many.

    Worse (better): the value has moved by the margin or more, and its p-value times the number of
    comparisons (Bonferroni) is `ALPHA` or less. Equivalent: the whole interval lies within the margins.
    Everything else is not enough data. `margin`: the share of the base that matters for p50 and p99.
    """
    count = sum(one.tested and not math.isnan(one.p) for one in changes)
    return [_judged(one, count, margin if one.metric in _QUANTILES else None) for one in changes]


def _judged(one: MetricChange, count: int, share: float | None) -> MetricChange:
    margin = one.metric.margin(one.base, share)
    # NaN stays NaN: where chance plays no part, a change counts as it is.
    p = one.p * count if one.tested else math.nan
    one = replace(one, margin=margin, p=1.0 if p > 1.0 else p)
    if not one.decides:
        return one
    if one.tested and abs(one.difference) >= margin and one.difference and not one.p > ALPHA:
        return replace(one, verdict=Judgement.WORSE if one.difference > 0 else Judgement.BETTER)
    if one.tested and -margin <= one.low and one.high <= margin:
        return replace(one, verdict=Judgement.EQUIVALENT)
    return replace(one, verdict=Judgement.NOT_ENOUGH, needed=_needed(one, count))


def _needed(one: MetricChange, comparisons: int) -> float:
    """How many frames would do, to two digits, if the interval narrows with the root of their number."""
    count, size = one.enough, abs(one.difference)
    if math.isfinite(one.low):
        reach = one.high - one.difference
        # The interval has to leave zero, or to fit between the margins; at a margin it never would.
        room = size if size >= one.margin else max(one.margin - size, one.margin / 2)
        if size >= one.margin:
            # A difference has to stand out from chance among all comparisons.
            normal = NormalDist()
            reach *= normal.inv_cdf(1 - ALPHA / 2 / max(comparisons, 1)) / normal.inv_cdf(1 - ALPHA / 2)
        count = max(count, one.samples * max(1.0, reach / room) ** 2) if room > 0 else count
    if not math.isfinite(count) or count <= 0:
        return math.nan
    scale = 10.0 ** max(0, math.floor(math.log10(count)) - 1)
    return math.ceil(count / scale - 1e-9) * scale


# -- the frames

# The frames of one side in their order, shape [9, frames]: latency in ms, NaN where no answer is known;
# then, for each of `_SHARES`, how many frames went wrong at each place, and of how many. A frame that
# was never started counts at the next answered one.
_Side = NDArray[np.float64]


def wrong_of(side: _Side, metric: Metric) -> tuple[Values, Values]:
    """Of a share: how many frames went wrong at each place, and of how many."""
    at = _SHARES.index(metric)
    return side[1 + at], side[1 + len(_SHARES) + at]


@dataclass(frozen=True)
class Sides:
    """Both sides, laid out for drawing; with `paired` on one axis of stamps, as frames of one log are."""

    base: _Side
    new: _Side
    paired: bool
    is_same: bool


def stage_frames(stage: StageLog) -> StageLog:
    """The answered frames of a stage in the order of their numbers, without those that say nothing about it.

    Left out are frames that came before the stage had started for the first time, and those that ran under
    a profiler. Frames that found it starting again, after a crash, count: they were missed.
    """
    seq = stage.frames["seq"]
    order = np.argsort(seq, kind="stable") if len(np.unique(seq)) == len(seq) else np.arange(len(seq))
    gaps = np.maximum(np.diff(seq[order], prepend=seq[order][:1] - 1) - 1, 0)
    frames = stage.frames[order]
    started = np.logical_or.accumulate(stage.counted[order])
    counted = started & ~np.isin(frames["t_ns"], list(stage.profiled))
    return StageLog(stage.name, stage.tiers, frames[counted], gaps=gaps[counted])


def pooled(stages: Sequence[StageLog]) -> StageLog:
    """The frames of a stage in several runs, one run after the other; names are the first's."""
    frames, gaps = (np.concatenate([getattr(one, name) for one in stages]) for name in ("frames", "gaps"))
    return replace(stages[0], frames=frames, gaps=gaps)


def _side(frames: StageLog, best: int) -> _Side:
    gaps, tier = frames.gaps.astype(np.float64), frames.frames["tier"]
    came, answered, ran = gaps + 1.0, np.ones(len(frames)), tier >= 0
    fallback = frames.frames["fallback"] != UNKNOWN
    wrong = (gaps + frames.missed, fallback, gaps, ran & (tier != best))
    return np.array([frames.total_ms, *wrong, came, answered, came, ran], dtype=np.float64)


def _share(side: _Side, metric: Metric) -> float:
    wrong, of = wrong_of(side, metric)
    return 100.0 * float(wrong.sum()) / float(of.sum()) if of.any() else math.nan


def figures(frames: StageLog, best: int = 0) -> dict[Metric, float]:
    """Every metric of a stage's frames, in its unit; NaN where unknown. `best`: the best tier's number."""
    known = frames.total_ms[np.isfinite(frames.total_ms)]
    quantiles = np.quantile(known, (0.5, 0.95, 0.99, 1.0)) if len(known) else np.full(4, math.nan)
    side = _side(frames, best)
    return {
        **dict(zip((P50, P95, P99, MAX), quantiles.tolist(), strict=True)),
        JITTER: float(np.abs(np.diff(known)).mean()) if len(known) > 1 else math.nan,
        **{metric: _share(side, metric) for metric in _SHARES},
    }


def best_tiers(base: StageLog, new: StageLog) -> tuple[int, int]:
    """The number on each side of the base's best tier; one that a side lacks is -2, without names it is 0."""
    if not (base.tiers and new.tiers):
        return 0, 0
    return 0, new.tiers.index(base.tiers[0]) if base.tiers[0] in new.tiers else UNKNOWN - 1


def laid_out(base: Sequence[StageLog], new: Sequence[StageLog]) -> Sides:
    """The runs of both sides for `frame_changes`: paired where each run has the stamps of its counterpart."""
    whole = pooled(base), pooled(new)
    tiers = best_tiers(*whole)
    is_same = np.array_equal(whole[0].total_ms, whole[1].total_ms, equal_nan=True)
    parts: list[list[_Side]] = []
    for pair in zip(base, new, strict=False):
        stamps = [own for one in pair if (own := one.own_stamps) is not None]
        if len(base) != len(new) or len(stamps) < len(pair):
            break
        axis = np.union1d(stamps[0], stamps[1])
        if sum(map(len, pair)) - len(axis) < _PAIRED * max(map(len, pair)):
            break
        spread = []
        for one, tier, own in zip(pair, tiers, stamps, strict=True):
            # At its places of the longer axis, with nothing in between.
            table = np.zeros((1 + 2 * len(_SHARES), len(axis)))
            table[0] = math.nan
            table[:, np.searchsorted(axis, own)] = _side(one, tier)
            spread.append(table)
        parts.append(spread)
    if paired := len(parts) == len(base):
        first, second = (np.concatenate(side, axis=1) for side in zip(*parts, strict=True))
    else:
        first, second = (_side(one, tier) for one, tier in zip(whole, tiers, strict=True))
    return Sides(first, second, paired, is_same)


# -- how each metric changed


def frame_changes(
    base: StageLog, new: StageLog, sides: Sides, resamples: int = RESAMPLES
) -> tuple[list[MetricChange], int]:
    """Every metric of one or two runs a side, with intervals of p50, p99, misses and lower tiers.

    Returns them, and the frames in the longest block.
    """
    tiers = best_tiers(base, new)
    before, after = figures(base, tiers[0]), figures(new, tiers[1])
    found, longest, samples = [], 1, min(len(base), len(new))
    for metric, value in before.items():
        one = MetricChange(base.name, metric, value, after[metric], samples=samples, decides=False)
        if metric not in _QUANTILES and metric not in _PLAIN:
            found.append(replace(one, why=NO_INTERVAL if metric is MAX else _OF_RUNS))
        elif metric is not LOWER_TIER or math.isfinite(one.difference):
            one, block = _estimated(replace(one, decides=True), sides, resamples)
            longest = max(longest, block)
            found.append(one)
    return found, longest


def run_change(stage: str, metric: Metric, base: Sequence[float], new: Sequence[float]) -> MetricChange:
    """The means of a metric over the runs of each side, and the interval of their difference.

    Where a side has fewer than `RUNS` runs that know it, the means are shown and decide nothing.
    """
    sides = [np.array(side)[np.isfinite(side)] for side in (base, new)]
    before, after = (float(side.mean()) if len(side) else math.nan for side in sides)
    least = min(map(len, sides))
    shown = MetricChange(stage, metric, before, after, samples=least, kind="runs", decides=False)
    if metric is MAX:
        return replace(shown, why=NO_INTERVAL)
    if unknown := [word for word, side in zip(("base", "new"), sides, strict=True) if not len(side)]:
        why = " and ".join(f"the {word} run does not say" for word in unknown)
        # A stage that one side lacks has no verdict; a figure of the whole run decides nothing.
        return replace(shown, why=why, decides=bool(stage))
    if least < RUNS:
        return replace(shown, why=_OF_RUNS)
    error = math.sqrt(sum(float(side.var(ddof=1)) / len(side) for side in sides))
    constant = all(map(_constant, sides))
    return _interval(replace(shown, decides=True), 0.0 if constant else error, sum(map(len, sides)) - 2)


def block_length(values: Values) -> int:
    """Frames over which successive values depend on each other; 1 where values are constant or too few.

    The automatic block length of a circular bootstrap: Politis and White, Econometric Reviews 23 (2004),
    corrected by Patton, Politis and White, 28 (2009).
    """
    if len(values) < _LEAST_VALUES or _constant(values):
        return 1
    from arch.bootstrap import optimal_block_length

    with np.errstate(all="ignore"):
        found = float(optimal_block_length(values)["circular"].iloc[0])
    return math.ceil(found) if math.isfinite(found) else 1


def inflation(values: Values, block: int) -> float:
    """Variance of the mean of blocks (of a ring) over that of independent values; 1 or more."""
    centred = values - values.mean()
    variance = float(centred @ centred) / len(values)
    sums = np.cumsum(np.concatenate([[0.0], centred, centred[:block]]))
    means = (sums[block:-1] - sums[: -block - 1]) / block
    return max(1.0, block * float(means @ means) / len(means) / variance) if variance > 0 else 1.0


def _measured(side: _Side, metric: Metric) -> Callable[[Values], float]:
    """Gives the metric of a draw: of how often each place was drawn."""
    if metric in _PLAIN:
        wrong, of = wrong_of(side, metric)

        def share(drawn: Values) -> float:
            total = float(drawn @ of)
            return 100.0 * float(drawn @ wrong) / total if total else math.nan

        return share
    order = np.argsort(side[0])[: int(np.isfinite(side[0]).sum())]
    values = side[0][order]

    def quantile(drawn: Values) -> float:
        passed = np.cumsum(drawn[order])
        at = np.searchsorted(passed, _QUANTILES[metric] * passed[-1])
        return float(values[at]) if passed[-1] else math.nan

    return quantile


def _flags(side: _Side, metric: Metric) -> tuple[Values, ...]:
    """The series whose dependence decides how long blocks have to be; the last one is of zeros and ones.

    A quantile depends on which frames lie beyond it (Bahadur 1966).
    """
    if metric in _PLAIN:
        wrong, of = wrong_of(side, metric)
        return ((wrong[of > 0] > 0).astype(np.float64),)
    known = side[0][np.isfinite(side[0])]
    if not len(known):
        return known, known
    return known, (known > np.quantile(known, _QUANTILES[metric])).astype(np.float64)


def _estimated(one: MetricChange, sides: Sides, resamples: int) -> tuple[MetricChange, int]:
    """The change with its interval, or with how many frames one takes; and the block's length."""
    metric = one.metric
    series = [_flags(side, metric) for side in (sides.base, sides.new)]
    samples = min(len(each[-1]) for each in series)
    one = replace(one, samples=samples)
    if sides.is_same and not one.difference and samples:
        return replace(one, low=0.0, high=0.0), 1  # as on a virtual clock: nothing is chance
    need = _LEAST_FRAMES if metric in _PLAIN else _LEAST_BEYOND / (1 - _QUANTILES[metric])
    if samples < _LEAST_VALUES or not math.isfinite(one.difference):
        return replace(one, enough=need, why=_few(samples, 1)), 1
    longest = max(block_length(values) for each in series for values in each)
    block = min(samples, math.ceil(_BLOCKS_LONGER * longest) if longest > 1 else 1)
    if sides.paired and abs(one.difference) >= _PLAIN.get(metric, math.inf):
        block = 1
    inflated = max(inflation(each[-1], block) for each in series)
    least = max(_LEAST_BLOCKS * block, need * inflated)
    error = _error(metric, sides, block, resamples)
    if metric in _PLAIN:
        # One frame that went wrong unseen: no miss in 100 frames is not 0 %.
        error = math.hypot(error, 100.0 * inflated / samples)
    blocks = max(samples / block, 2.0)
    one = _interval(one, error * math.sqrt(blocks / (blocks - 1)), blocks - 1)
    return replace(one, enough=least, why=_few(samples, block)) if samples < least else one, block


def _error(metric: Metric, sides: Sides, block: int, resamples: int) -> float:
    """The standard error of the difference: the spread over so many draws of blocks."""
    random = np.random.default_rng(0)
    base, new = (_measured(side, metric) for side in (sides.base, sides.new))
    moved = np.empty(resamples)
    for number in range(resamples):
        drawn = _drawn(random, sides.base.shape[1], block)
        other = drawn if sides.paired else _drawn(random, sides.new.shape[1], block)
        moved[number] = new(other) - base(drawn)
    known = moved[np.isfinite(moved)]
    return float(known.std(ddof=1)) if len(known) > 1 else math.inf


def _drawn(random: np.random.Generator, count: int, block: int) -> Values:
    """How often each place comes in a ring's blocks, which begin anywhere."""
    begins = random.integers(0, count, math.ceil(count / block))
    places = ((begins[:, None] + np.arange(block)) % count).ravel()[:count]
    return np.bincount(places, minlength=count).astype(np.float64)


def _interval(one: MetricChange, error: float, freedom: float) -> MetricChange:
    """With the interval of Student's t around its difference, and the p-value of none."""
    from scipy.stats import t

    if error == 0.0:
        return replace(one, low=one.difference, high=one.difference)
    reach = float(t.isf(ALPHA / 2, freedom)) * error
    p = float(2 * t.sf(abs(one.difference) / error, freedom))
    return replace(one, low=one.difference - reach, high=one.difference + reach, p=p)


def _constant(values: Values) -> bool:
    return bool(np.ptp(values) <= _ROUNDING * np.abs(values).max())


def _few(frames: int, block: int) -> str:
    depend = f", which depend on each other over about {block}" if block > 1 else ""
    return f"{frames:,} frame{'s' * (frames != 1)}{depend}"
