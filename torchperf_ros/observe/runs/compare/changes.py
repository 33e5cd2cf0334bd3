"""What runs are compared by, how each metric changed, and the verdict on a change."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

# Chance of a false alarm of all verdicts together; intervals are of 1 - ALPHA.
ALPHA: Final = 0.05
# So many margins of change deserve a look, though nothing judges them.
_CONSPICUOUS: Final = 10.0
_DIGITS: Final = 2


@dataclass(frozen=True)
class Metric:
    """One thing that runs are compared by; more of it is worse.

    Attributes:
        key: its name in `--json`, for example `p99`.
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
# In the order of the tables.
METRICS: Final = (
    P50,
    P95,
    P99,
    MAX,
    JITTER,
    MISS,
    FALLBACK,
    DROPPED,
    LOWER_TIER,
    OUTPUTS,
    MEMORY_PEAK,
    MEMORY_SLOPE,
    START_UP,
    COMPILE,
)
# Metrics whose share `--margin` sets.
LATENCIES: Final = (P50, P99)


class Judgement(enum.Enum):
    """What the runs say about a metric."""

    WORSE = "worse"
    BETTER = "better"
    EQUIVALENT = "equivalent"
    NOT_ENOUGH = "not enough data"
    INFORMATIVE = "informative"


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
        """The stage and the metric, as people call them."""
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


def judge(changes: Sequence[MetricChange], margin: float | None = None) -> list[MetricChange]:
    """Judge all metrics of a comparison together, as one false alarm is one too many.

    Worse (better): the value has moved by the margin or more, and its p-value times the number of
    comparisons (Bonferroni) is `ALPHA` or less. Equivalent: the whole interval lies within the margins.
    Everything else is not enough data. `margin`: the share of the base that matters for `LATENCIES`.
    """
    count = sum(one.tested and not math.isnan(one.p) for one in changes)
    return [_judged(one, count, margin if one.metric in LATENCIES else None) for one in changes]


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
    """How many frames would do, to two digits.

    If the difference stays and the interval narrows with the root of their number.
    """
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
    scale = 10.0 ** max(0, math.floor(math.log10(count)) - _DIGITS + 1)
    return math.ceil(count / scale - 1e-9) * scale
