"""What runs are compared by, the margins and limits of that, and the verdict on each metric."""

import enum
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import NormalDist
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.errors import ConfigError

T = TypeVar("T")
# margins that a change has to make for people to look at it, though nothing judges it
_CONSPICUOUS: Final = 10.0
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%|pp|ms|s|MiB/h|MiB)")
_DIGITS: Final = 2


@dataclass(frozen=True)
class Metric:
    """One thing that runs are compared by; more of it is worse.

    Attributes:
        key: as in parameters, for example `p99`.
        unit: of its values in tables.
        margin: the smallest change that matters, as in parameters.
        whole: one value for the whole run, instead of one for each stage.
        plain: a share whose pairs of frames are counted one by one from so many percentage points of change
            on.
    """

    key: str
    title: str
    unit: str
    margin: str
    whole: bool = False
    plain: float = math.inf


P50 = Metric("p50", "p50 latency", "ms", "2%,0.1ms")
P95 = Metric("p95", "p95 latency", "ms", "3%,0.2ms")
P99 = Metric("p99", "p99 latency", "ms", "3%,0.2ms")
MAX = Metric("max", "longest latency", "ms", "5%,0.2ms")
JITTER = Metric("jitter", "jitter", "ms", "10%,0.1ms")
MISS = Metric("miss", "miss ratio", "%", "0.1pp", plain=10.0)
FALLBACK = Metric("fallback", "fallback ratio", "%", "0.1pp", plain=10.0)
DROPPED = Metric("dropped", "dropped ratio", "%", "0.5pp", plain=10.0)
# After a disturbance the ladder is back at its first tier within 10 s: a tenth of a short log, without any
# reason.
LOWER_TIER = Metric("lower_tier", "lower tiers", "%", "1pp", plain=30.0)
OUTPUTS = Metric("outputs", "outputs changed", "%", "0pp")
MEMORY_PEAK = Metric("memory_peak", "memory peak", "MiB", "5%,16MiB", whole=True)
MEMORY_SLOPE = Metric("memory_slope", "memory slope", "MiB/h", "60MiB/h", whole=True)
START_UP = Metric("start_up", "start-up time", "s", "50%,2s", whole=True)
COMPILE = Metric("compile", "compile time", "s", "25%,2s", whole=True)
METRICS: Final = {
    metric.key: metric
    for metric in (
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
}
"""Every metric by its key, in the order of the tables."""


Margin = tuple[float, float]
"""The smallest change that matters.

A share of the base, 0 to 1, or so much in the metric's unit if that is more.
"""


@dataclass(frozen=True)
class Rules:
    """How verdicts are reached.

    Attributes:
        margins: of `read_margins`; the metric's own where there is none.
        alpha: chance of a false alarm, 0 to 1, of all comparisons together; intervals are of 1 - alpha.
        resamples: of the bootstrap of each side; the smallest p-value is 2 / (resamples + 1).
        seed: of the bootstrap; the same seed, the same verdicts.
    """

    margins: Mapping[str, Margin] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    alpha: float = 0.05
    skip: frozenset[str] = frozenset()
    resamples: int = 2000
    seed: int = 0

    def margin(self, stage: str, metric: Metric, base: float) -> float:
        """The margin of a stage's metric in its unit.

        `stage` is empty for the whole run, `base` may be NaN.
        """
        found = self.margins.get(f"{stage}.{metric.key}", self.margins.get(metric.key))
        share, absolute = found or _margin(metric, metric.margin)
        return max(share * abs(base), absolute) if math.isfinite(base) else absolute

    def limit(self, stage: str, metric: Metric) -> float:
        """The limit of a stage's metric, NaN where there is none."""
        return self.limits.get(f"{stage}.{metric.key}", self.limits.get(metric.key, math.nan))

    def limited(self, stages: Iterable[str]) -> set[tuple[str, Metric]]:
        """Every stage, empty for the whole run, and metric that has a limit."""
        places = [(stage, METRICS[key]) for name in self.limits for stage, _, key in [name.rpartition(".")]]
        return {
            (one, metric)
            for stage, metric in places
            for one in ([stage] if stage or metric.whole else stages)
        }

    def check_stages(self, stages: Collection[str]) -> None:
        """Raise a `ConfigError` for a margin or limit of a stage that is not there, or of a metric that is skipped."""
        for option, names in (("--min-effect", self.margins), ("--limit", self.limits)):
            for name in names:
                stage, dot, key = name.rpartition(".")
                if dot and stage not in stages:
                    raise ConfigError(
                        f"{option} {name}: no stage {stage!r}; there are: {', '.join(stages)}"
                    )
                if option == "--limit" and key in self.skip:
                    raise ConfigError(
                        f"--limit {key}: cannot be kept with --skip {key}; leave out one of them"
                    )


class Verdict(enum.Enum):
    """What the runs say about a metric."""

    WORSE = "worse"
    BETTER = "better"
    EQUIVALENT = "equivalent"
    NOT_ENOUGH = "not enough data"
    INFORMATIVE = "informative"


@dataclass(frozen=True)
class Interval:
    """Where new less base lies; `p` is two-sided, of no difference, NaN where nothing is left to chance."""

    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Finding:
    """A metric of both sides, and what `judge` makes of it.

    Attributes:
        stage: empty for a metric of the whole run.
        base, new: the values, in the metric's unit; of several runs the mean or that of all frames; NaN
        where unknown.
        interval: of the difference; None where there can be none.
        samples: frames or runs (see `kind`) of the side that has fewer.
        enough: how many an interval takes to be believed; 0 where it is, or where more would not help.
        why: in words, what keeps the metric from an interval or a verdict.
        decides: whether it can be worse or better at all.
        kind: what `samples` counts.
        margin: the smallest change that matters, in the metric's unit.
        p: p-value after the correction for the number of comparisons; NaN where nothing was tested.
        needed: with about so many frames or runs a side a verdict could be expected; NaN where it cannot be
            said.
        limit: the highest value that the new side may have, whatever the base was; NaN where there is none.
    """

    stage: str
    metric: Metric
    base: float
    new: float
    interval: Interval | None = None
    samples: float = 0.0
    enough: float = 0.0
    why: str = ""
    decides: bool = True
    kind: str = "frames"
    verdict: Verdict = Verdict.INFORMATIVE
    margin: float = math.nan
    p: float = math.nan
    needed: float = math.nan
    limit: float = math.nan

    @property
    def title(self) -> str:
        """The stage and the metric, as people call them."""
        return f"{self.stage} {self.metric.title}".strip()

    @property
    def difference(self) -> float:
        """New less base."""
        return self.new - self.base

    @property
    def tested(self) -> Interval | None:
        """The interval, if it can be believed and decides."""
        return self.interval if self.decides and self.samples >= self.enough else None

    @property
    def breaks_limit(self) -> bool:
        """Whether the new side is over its limit; what was not measured keeps none."""
        return not math.isnan(self.limit) and not self.new <= self.limit

    @property
    def conspicuous(self) -> bool:
        """Whether people should look at what has no verdict.

        Far more than its margin, or gone from the new side.
        """
        gone = math.isfinite(self.base) and not math.isfinite(self.new) and not self.metric.whole
        far = self.difference >= _CONSPICUOUS * self.margin > 0
        if self.verdict is Verdict.INFORMATIVE:
            return self.metric.whole and far
        return self.verdict is Verdict.NOT_ENOUGH and (far or gone)


def judge(findings: Sequence[Finding], rules: Rules) -> list[Finding]:
    """Judge all metrics of a comparison together, as one false alarm is one too many.

    P-values are corrected by Holm.

    Worse (better): the value has moved by the margin or more, and the corrected p-value is alpha or less.
    Equivalent: the whole interval lies within the margins, which is more than two one-sided tests at alpha
    ask for (Schuirmann 1987). Everything else is not enough data. A limit is no statistics: it is on what
    was measured.
    """
    p_values = np.array([one.tested.p if one.tested else math.nan for one in findings])
    tests = np.isfinite(p_values)
    if tests.any():
        p_values[tests] = holm(p_values[tests])
    return [_judged(one, float(p), rules) for one, p in zip(findings, p_values, strict=True)]


def holm(p_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """P-values corrected for their number (Holm 1979), [n] as they came.

    As statsmodels' `multipletests`, which has the whole process's garbage collected each time: 0.15 s and
    more.
    """
    order, count = np.argsort(p_values), len(p_values)
    corrected = np.empty(count)
    corrected[order] = np.minimum(np.maximum.accumulate(p_values[order] * np.arange(count, 0, -1)), 1.0)
    return corrected


def _judged(one: Finding, p: float, rules: Rules) -> Finding:
    margin, verdict, needed = rules.margin(one.stage, one.metric, one.base), Verdict.NOT_ENOUGH, math.nan
    found = one.tested
    by_chance = found is not None and not math.isnan(found.p) and p > rules.alpha
    if not one.decides:
        verdict, p = Verdict.INFORMATIVE, math.nan
    elif found and abs(one.difference) >= margin and one.difference and not by_chance:
        verdict = Verdict.WORSE if one.difference > 0 else Verdict.BETTER
    elif found and math.isfinite(one.difference) and -margin <= found.low and found.high <= margin:
        verdict = Verdict.EQUIVALENT
    else:
        needed = _needed(one, margin, p, rules.alpha)
    limit = rules.limit(one.stage, one.metric)
    return replace(one, verdict=verdict, margin=margin, p=p, needed=needed, limit=limit)


def _needed(one: Finding, margin: float, p: float, alpha: float) -> float:
    """How many frames would do, to two digits, if the difference stays and the interval narrows with their root."""
    count = one.enough
    if one.interval is not None:
        size, normal = abs(one.difference), NormalDist()
        reach = max(one.interval.high - one.difference, one.difference - one.interval.low)
        # it has to leave zero, or to fit between the margins; what lies at one of them never would
        room = size if size >= margin else max(margin - size, margin / 2)
        factor = reach / room if room > 0 else 0.0
        if size >= margin and alpha < p < 1:  # the correction asks for more than to leave zero
            least = 1e-3  # of a standard deviation: that of a p of nearly 1 is rounded to none
            factor = max(factor, normal.inv_cdf(1 - alpha / 2) / max(normal.inv_cdf(1 - p / 2), least))
        count = max(count, one.samples * max(1.0, factor) ** 2)
    if not math.isfinite(count) or count <= 0:
        return math.nan
    scale = 10.0 ** max(0, math.floor(math.log10(count)) - _DIGITS + 1)
    return math.ceil(count / scale - 1e-9) * scale


def _read(option: str, parse: Callable[[Metric, str], T], settings: Iterable[str]) -> dict[str, T]:
    values: dict[str, T] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        name = name.strip()
        stage, dot, key = name.rpartition(".")
        metric = METRICS.get(key)
        if metric is None:
            raise ConfigError(f"{option} {setting!r}: no metric {name!r}; there are: {', '.join(METRICS)}")
        if dot and metric.whole:
            msg = (
                f"{option} {setting!r}: {key} is of the whole run, not of stage {stage!r}; has to be"
                f" {key}={text}"
            )
            raise ConfigError(msg)
        try:
            values[name] = parse(metric, text)
        except ValueError as error:
            like = (
                f"2{metric.unit}"
                if parse is _limit
                else "0.5pp"
                if metric.unit == "%"
                else f"3%,2{metric.unit}"
            )
            raise ConfigError(f"{option} {name}={text}: has to be like {like}") from error
    return values


def _margin(metric: Metric, text: str) -> Margin:
    """A margin out of its text, for example `3%` or `2%,0.2ms`.

    A share changes by percentage points, `0.5pp`.
    """
    absolute = "pp" if metric.unit == "%" else metric.unit
    units = {absolute} if absolute == "pp" else {absolute, "%"}
    found = {unit: value for value, unit in (_quantity(part, units) for part in text.split(","))}
    return found.get("%", 0.0) / 100, found.get(absolute, 0.0)


def _limit(metric: Metric, text: str) -> float:
    return _quantity(text, {metric.unit})[0]


def _quantity(text: str, units: Collection[str]) -> tuple[float, str]:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units:
        raise ValueError(text)
    return float(found[1]), found[2]


read_margins: Final = partial(_read, "--min-effect", _margin)
"""Margins by `metric` or `stage.metric`, from options like `p50=2%,0.2ms`.

A `ConfigError` where one cannot be read.
"""
read_limits: Final = partial(_read, "--limit", _limit)
"""The highest values of the new runs, by `metric` or `stage.metric`, in the metric's unit.

A `ConfigError` likewise.
"""
