"""A verdict for each metric: better, worse, equivalent, or not enough data and how much would be."""

import enum
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Final

import numpy as np

from torchperf_ros.analysis.regress_effect import MinEffects
from torchperf_ros.analysis.regress_interval import Interval, adjusted
from torchperf_ros.analysis.regress_limit import Limits
from torchperf_ros.analysis.regress_metric import Metric
from torchperf_ros.core.errors import ConfigError

CORRECTIONS: Final = ("holm", "bh", "none")
_DIGITS: Final = 2
_CONSPICUOUS: Final = 10.0
"""Margins that a change has to make for people to look at it, though it may be chance."""


class Verdict(enum.Enum):
    """What two runs say about a metric."""

    WORSE = "worse"
    BETTER = "better"
    EQUIVALENT = "equivalent"
    NOT_ENOUGH = "not enough data"
    INFORMATIVE = "informative"


@dataclass(frozen=True)
class Estimate:
    """A metric of both runs before it is judged.

    Attributes:
        stage: empty for a metric of the whole run.
        metric: which.
        base, new: the values, in the metric's unit; NaN where unknown.
        interval: of the difference; None where there can be none.
        samples: frames (or seconds, see `kind`) of the run that has fewer.
        enough: how many an interval takes to be believed; 0 where it is, or where more would not help.
        why: in words, what keeps the metric from an interval or a verdict.
        single: one measurement a run, which the margin alone judges.
        decides: whether it can be worse or better at all.
        kind: what `samples` counts.
        narrows: the interval narrows with this power of their number: 1 for a share of hardly anything, else 1/2.
    """

    stage: str
    metric: Metric
    base: float
    new: float
    interval: Interval | None = None
    samples: float = 0.0
    enough: float = 0.0
    why: str = ""
    single: bool = False
    decides: bool = True
    kind: str = "frames"
    narrows: float = 0.5

    @property
    def difference(self) -> float:
        """New less base."""
        return self.new - self.base

    @property
    def tested(self) -> Interval | None:
        """The interval, if it can be believed and decides."""
        return self.interval if self.decides and self.samples >= self.enough else None


@dataclass(frozen=True)
class Finding:
    """A metric that has been judged.

    Attributes:
        estimate: what was measured.
        verdict: what it means.
        margin: the smallest change that matters, in the metric's unit.
        p: p-value after the correction for the number of comparisons; NaN where nothing was tested.
        needed: with about so many frames in each run a verdict could be expected; NaN where it cannot be said.
        limit: the highest value that the new run may have, whatever the base was; NaN where there is none.
        notes: what people should know.
    """

    estimate: Estimate
    verdict: Verdict
    margin: float
    p: float = math.nan
    needed: float = math.nan
    notes: tuple[str, ...] = ()
    limit: float = math.nan

    @property
    def breaks_limit(self) -> bool:
        """Whether the new run is over its limit; what was not measured keeps none."""
        return not math.isnan(self.limit) and not self.estimate.new <= self.limit

    @property
    def conspicuous(self) -> bool:
        """Whether people should look at what has no verdict: far more than its margin, or gone from the new run."""
        one = self.estimate
        gone = math.isfinite(one.base) and not math.isfinite(one.new) and not one.metric.whole
        far = one.difference >= _CONSPICUOUS * self.margin > 0
        return self.verdict is Verdict.NOT_ENOUGH and (far or gone)


@dataclass(frozen=True)
class Rules:
    """How verdicts are reached.

    Attributes:
        effects: margins.
        alpha: chance of a false alarm, 0 to 1, of all comparisons together with `holm`; intervals are of 1 - alpha.
        correction: one of `CORRECTIONS`.
        skip: keys of metrics that are not looked at.
        limits: the highest values that the new run may have.
    """

    effects: MinEffects = field(default_factory=MinEffects)
    alpha: float = 0.05
    correction: str = "holm"
    skip: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)

    def check_stages(self, stages: Collection[str]) -> None:
        """See that margins and limits are for stages that there are, and limits for metrics that are looked at.

        Raises:
            ConfigError: one is not.
        """
        self.effects.check_stages(stages)
        self.limits.check_stages(stages)
        for _, metric in self.limits.places(stages):
            if metric.key in self.skip:
                msg = f"--limit {metric.key}: cannot be kept with --skip {metric.key}; leave out one of them"
                raise ConfigError(msg)


def judge(estimates: Sequence[Estimate], rules: Rules) -> list[Finding]:
    """Judge all metrics of a comparison together, as one false alarm is one too many.

    Worse (better): the estimate has moved by the margin or more, and the corrected p-value is alpha or less.
    Equivalent: the whole interval lies within the margins, which is more than two one-sided tests at alpha ask for
    (Schuirmann 1987). Everything else is not enough data. A limit is no statistics: it is on what was measured.
    """
    tested = [one.tested.p if one.tested else math.nan for one in estimates]
    p_values = adjusted(np.array(tested, dtype=np.float64), rules.correction)
    tests = int(np.isfinite(p_values).sum())
    return [replace(_judged(one, float(p), tests, rules), limit=rules.limits.limit(one.stage, one.metric))
            for one, p in zip(estimates, p_values, strict=True)]  # fmt: skip


def _judged(one: Estimate, p: float, tests: int, rules: Rules) -> Finding:
    margin = rules.effects.margin(one.stage, one.metric).of(one.base)
    notes = (one.why,) if one.why else ()
    if not one.decides:
        return Finding(one, Verdict.INFORMATIVE, margin, notes=notes)
    if not math.isfinite(one.difference) or (one.tested is None and not one.single):
        needed = max(one.enough, _needed(one, margin, tests, rules) if one.interval else 0.0)
        return Finding(one, Verdict.NOT_ENOUGH, margin, needed=_rounded(needed), notes=notes)
    moved = abs(one.difference) >= margin and one.difference != 0
    changed = Verdict.WORSE if one.difference > 0 else Verdict.BETTER
    if one.tested is None:
        return Finding(one, changed if moved else Verdict.EQUIVALENT, margin, notes=notes)
    if moved and p <= rules.alpha:
        return Finding(one, changed, margin, p, notes=notes)
    if -margin <= one.tested.low and one.tested.high <= margin:
        return Finding(one, Verdict.EQUIVALENT, margin, p, notes=notes)
    return Finding(one, Verdict.NOT_ENOUGH, margin, p, _rounded(_needed(one, margin, tests, rules)), notes)


def _needed(one: Estimate, margin: float, tests: int, rules: Rules) -> float:
    """How many frames would do, if the difference stays and the interval narrows with their number."""
    assert one.interval is not None
    reach = max(one.interval.high - one.difference, one.difference - one.interval.low)
    size = abs(one.difference)
    if size >= margin:  # it has to leave zero, at the strictest level of the correction
        strictest = rules.alpha / (max(tests, 1) if rules.correction == "holm" else 1)
        normal = NormalDist()
        reach *= normal.inv_cdf(1 - strictest / 2) / normal.inv_cdf(1 - rules.alpha / 2)
        room = size
    else:  # it has to fit between the margins; what lies at one of them never would
        room = max(margin - size, margin / 2)
    return float(one.samples * max(1.0, reach / room) ** (1 / one.narrows)) if room > 0 else 0.0


def _rounded(count: float) -> float:
    """Up to two digits: it is an estimate."""
    if not math.isfinite(count) or count <= 0:
        return math.nan
    scale = 10.0 ** max(0, math.floor(math.log10(count)) - _DIGITS + 1)
    return math.ceil(count / scale - 1e-9) * scale
