"""Effect sizes of two runs' latencies, which are reported and decide nothing."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.analysis.regress_blocks import dependence

_SOME = 2

Values = NDArray[np.float64]


@dataclass(frozen=True)
class EffectSizes:
    """How far two samples of latencies lie apart; NaN where there are too few or all are the same.

    Attributes:
        longer_share: chance that a frame of the new run took longer than one of the base, ties half (Mann-Whitney's
            U / nm, also called AUC; 0.5: neither does; 2 x this - 1 is Cliff's delta).
        mann_whitney_p: two-sided, of 0.5.
        mean_difference_ms: new less base.
        welch_p: two-sided, of no difference of the means with unequal variances.
        cohens_d: difference of the means in pooled standard deviations.
    """

    longer_share: float = math.nan
    mann_whitney_p: float = math.nan
    mean_difference_ms: float = math.nan
    welch_p: float = math.nan
    cohens_d: float = math.nan


def effect_sizes(base: Values, new: Values) -> EffectSizes:
    """Compare two series; both p-values allow for autocorrelation.

    Mann-Whitney's variance is DeLong's (Biometrics 44 (1988)), from the rank of each value among the other sample's;
    Welch's is that of the means. In both the variance is inflated by each series' autocorrelation, see `dependence`,
    and the degrees of freedom are Welch and Satterthwaite's for the effective numbers of frames.

    Args:
        base: shape (n,), in order of time, no NaN.
        new: shape (m,), likewise.
    """
    if min(len(base), len(new)) < _SOME:
        return EffectSizes()
    from scipy.stats import mannwhitneyu

    share = float(mannwhitneyu(new, base, use_continuity=False).statistic) / (len(base) * len(new))
    difference = float(new.mean() - base.mean())
    pooled = ((len(base) - 1) * base.var(ddof=1) + (len(new) - 1) * new.var(ddof=1)) / (len(base) + len(new) - 2)
    return EffectSizes(
        share, _p(share - 0.5, [_placements(base, new), _placements(new, base)]),
        difference, _p(difference, [base, new]), difference / math.sqrt(pooled) if pooled > 0 else math.nan,
    )  # fmt: skip


def _placements(values: Values, others: Values) -> Values:
    """The share of the others that lies below each value, ties half."""
    ordered = np.sort(others)
    below, not_above = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + not_above) / (2 * len(others))


def _p(difference: float, series: list[Values]) -> float:
    """Two-sided p-value of a difference of two means, in Student's t."""
    from scipy.stats import t

    effective = [max(dependence(values).effective, _SOME) for values in series]
    parts = [float(values.var(ddof=1)) / count for values, count in zip(series, effective, strict=True)]
    if sum(parts) <= 0:
        return math.nan
    freedom = sum(parts) ** 2 / sum(part**2 / (count - 1) for part, count in zip(parts, effective, strict=True))
    return float(2 * t.sf(abs(difference) / math.sqrt(sum(parts)), freedom))
