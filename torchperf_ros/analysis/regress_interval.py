"""Intervals of differences, and how surprising a difference is: by resamples for times, by scores for shares."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.analysis.regress_blocks import BLOCKS_LONGER, block_inflation, dependence

_NORMAL: Final = NormalDist()
_LARGEST_Z: Final = 40.0
_HALVINGS: Final = 60
_WHOLE: Final = 100.0

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """Where the difference of two runs lies, new less base.

    Attributes:
        low, high: confidence interval.
        p: two-sided p-value of "no difference".
    """

    low: float
    high: float
    p: float


def widening(blocks: float, alpha: float) -> float:
    """By how much an interval is widened for how few blocks there are.

    t / z, the quantiles of Student's t with `blocks` - 1 degrees of freedom and of the normal distribution, times
    sqrt(blocks / (blocks - 1)): a variance from so few blocks is uncertain, and too small by that (as Efron and
    Tibshirani 1993, ch. 12 and 14, say for independent values, whose place the blocks take).

    Args:
        blocks: in the run that has fewer; more than 1.
        alpha: 1 less the confidence.
    """
    from scipy.stats import t  # only this needs it

    normal = _NORMAL.inv_cdf(1 - alpha / 2)
    return float(t.ppf(1 - alpha / 2, blocks - 1)) / normal * math.sqrt(blocks / (blocks - 1))


def resampled_interval(difference: float, resamples: Values, blocks: float, alpha: float) -> Interval:
    """Percentile interval of a block bootstrap, each bound as much further from the estimate as `widening` says.

    Args:
        difference: the estimate.
        resamples: shape (B,), the difference in each pair of resamples.
        blocks: how many blocks a resample has, in the run that has fewer; more than 1.
        alpha: 1 less the confidence.
    """
    wider = widening(blocks, alpha)
    low, high = np.quantile(resamples, (alpha / 2, 1 - alpha / 2))
    zero = difference * (1 - 1 / wider)  # where a resample lies that would be moved to no difference
    tail = int(min(np.count_nonzero(resamples <= zero), np.count_nonzero(resamples >= zero)))
    return Interval(
        difference - wider * max(0.0, difference - float(low)), difference + wider * max(0.0, float(high) - difference),
        min(1.0, 2 * (tail + 1) / (len(resamples) + 1)),
    )  # fmt: skip


@dataclass(frozen=True)
class Share:
    """A share of a run's frames.

    Attributes:
        share: 0 to 1.
        frames: how many there are, missed or not.
        block: as many as depend on each other.
        effective: independent frames that would tell as much: misses that come in bursts tell less.
    """

    share: float
    frames: int
    block: int
    effective: float

    @property
    def blocks(self) -> float:
        """How many there are."""
        return self.frames / self.block

    @classmethod
    def of(cls, hits: NDArray[np.bool_], block: int) -> "Share":
        """Measure.

        Args:
            hits: shape (n,), n >= 4, in order of time.
            block: frames that depend on each other at least; more, if the hits themselves do over more.
        """
        values = hits.astype(np.float64)
        found = dependence(values)
        longest = min(len(hits) // 2, max(block, math.ceil(BLOCKS_LONGER * found.block) if found.block > 1 else 1))
        inflation = max(found.inflation, block_inflation(values, longest))
        return cls(float(values.mean()), len(hits), longest, len(hits) / inflation)


def share_interval(base: Share, new: Share, alpha: float) -> Interval:
    """The interval of the difference of two shares, in percentage points.

    Newcombe's hybrid score interval (Statistics in Medicine 17 (1998), method 10) from Wilson's of each, which stay
    honest where nothing was missed at all, with the effective number of frames, widened for how few blocks there are.

    Args:
        base: of the base.
        new: of the new run.
        alpha: 1 less the confidence.
    """
    difference = new.share - base.share
    wider = widening(min(base.blocks, new.blocks), alpha)

    def bounds(z: float) -> tuple[float, float]:
        (l1, u1), (l2, u2) = (_wilson(one.share, one.effective, z * wider) for one in (base, new))
        return (difference - math.hypot(new.share - l2, u1 - base.share),
                difference + math.hypot(u2 - new.share, base.share - l1))  # fmt: skip

    below, above = 0.0, _LARGEST_Z
    for _ in range(_HALVINGS):  # the widest interval that has no zero in it
        z = (below + above) / 2
        low, high = bounds(z)
        below, above = (z, above) if low > 0 or high < 0 else (below, z)
    low, high = bounds(_NORMAL.inv_cdf(1 - alpha / 2))
    return Interval(low * _WHOLE, high * _WHOLE, math.erfc(below / math.sqrt(2)))


def _wilson(share: float, count: float, z: float) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927)."""
    centre, spread = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    scale = 1 + z * z / count
    return (centre - spread) / scale, (centre + spread) / scale


def adjusted(p_values: Values, method: str) -> Values:
    """p-values that allow for how many of them there are.

    Args:
        p_values: shape (k,); NaN where nothing was tested.
        method: `holm` (Holm 1979; the chance of any false alarm stays below alpha), `bh` (Benjamini and Hochberg 1995;
            the expected share of false ones among the alarms does), or `none`.
    """
    tested = np.flatnonzero(np.isfinite(p_values))
    found = p_values.copy()
    count = len(tested)
    if method == "none" or not count:
        return found
    order = tested[np.argsort(p_values[tested], kind="stable")]
    ranks = np.arange(count)
    if method == "holm":
        found[order] = np.maximum.accumulate(p_values[order] * (count - ranks))
    else:
        found[order] = np.minimum.accumulate((p_values[order] * count / (ranks + 1))[::-1])[::-1]
    return np.minimum(found, 1.0)
