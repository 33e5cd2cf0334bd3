"""How strongly successive frames depend on each other: the length of a bootstrap's blocks, and what a mean is worth."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCKS_LONGER: Final = 2.0
"""So much longer than that of the best variance are the blocks that intervals are made with."""
_LIMIT: Final = 2.0  # c of the rule: an autocorrelation below c sqrt(log10(n) / n) counts as none
_LEAST_RUN: Final = 5
_LEAST_VALUES: Final = 4

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Dependence:
    """What autocorrelation does to a series of n values.

    Attributes:
        block: length of the blocks of a circular block bootstrap, 1 to n / 3.
        inflation: variance of the mean over what it would be if the values were independent; at least 1.
        count: n.
    """

    block: int
    inflation: float
    count: int

    @property
    def effective(self) -> float:
        """Independent values that would tell as much about the mean."""
        return self.count / self.inflation


def dependence(values: Values) -> Dependence:
    """The automatic block length of Politis and White, and the variance inflation by the same estimate.

    Politis and White, "Automatic block-length selection for the dependent bootstrap", Econometric Reviews 23 (2004),
    with the correction of Patton, Politis and White, Econometric Reviews 28 (2009): for the circular bootstrap
    b = (2 G^2 / D)^(1/3) n^(1/3), D = 4/3 g(0)^2; G and g(0) are sums of autocovariances under the flat-top window of
    Politis and Romano (1995), as wide as twice the last lag that matters.

    Args:
        values: shape (n,), in order of time, no NaN; constant ones depend on nothing.
    """
    n = len(values)
    centred = values - values.mean() if n else values
    variance = float(centred @ centred) / n if n else 0.0
    if n < _LEAST_VALUES or variance <= np.finfo(float).eps * float(np.max(np.abs(values))) ** 2:
        return Dependence(1, 1.0, n)
    run = max(_LEAST_RUN, math.ceil(math.sqrt(math.log10(n))))
    widest = min(n - 1, math.ceil(math.sqrt(n)) + run)
    covariances = _autocovariances(centred, min(n - 1, widest + run))
    window = min(2 * _last_lag(covariances / variance, n, run), widest)
    lags = np.arange(1, window + 1)
    weights = np.minimum(1.0, 2.0 * (1.0 - lags / window)) * covariances[1 : window + 1]
    spectrum, slope = variance + 2.0 * float(weights.sum()), 2.0 * float(lags @ weights)
    if spectrum <= 0:  # a flat-top window may say so; the values undo each other
        return Dependence(1, 1.0, n)
    length = (1.5 * (slope / spectrum) ** 2 * n) ** (1 / 3)
    longest = max(1, math.ceil(min(3.0 * math.sqrt(n), n / 3)))
    return Dependence(min(max(1, math.ceil(length)), longest), max(1.0, spectrum / variance), n)


def block_inflation(values: Values, block: int) -> float:
    """Variance of the mean over that of independent values, as a circular block bootstrap would find it; at least 1.

    Args:
        values: shape (n,), in order of time.
        block: length of the blocks, 1 to n.
    """
    centred = values - values.mean()
    variance = float(centred @ centred) / len(values)
    if variance <= 0:
        return 1.0
    sums = np.cumsum(np.concatenate([centred, centred[:block]]))
    means = (sums[block:] - sums[:-block]) / block
    return max(1.0, block * float(means @ means) / len(values) / variance)


def _autocovariances(centred: Values, most: int) -> Values:
    """At lags 0 to `most`, divided by n at each, through the power spectrum."""
    n = len(centred)
    size = 1 << (n + most).bit_length()
    power = np.abs(np.fft.rfft(centred, size)) ** 2
    return np.asarray(np.fft.irfft(power, size)[: most + 1] / n)


def _last_lag(correlations: Values, n: int, run: int) -> int:
    """The smallest lag that is followed by `run` autocorrelations that count as none; 1 at least."""
    counts = np.abs(correlations[1:]) >= _LIMIT * math.sqrt(math.log10(n) / n)
    quiet = 0
    for lag, one in enumerate(counts.tolist(), 1):
        quiet = 0 if one else quiet + 1
        if quiet == run:
            return max(1, lag - run)
    return max(1, int(np.flatnonzero(counts)[-1]) + 1) if counts.any() else 1
