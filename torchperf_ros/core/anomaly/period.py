"""After how many samples a series repeats itself, for those whose clock does not tell."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SHORTEST = 16  # samples: shorter cycles are variation, which has its own judge
_REPEATS = 3  # periods that must have been seen
_AS_HIGH = 0.9
_ALIKE = 0.5  # autocorrelation from which on a cycle explains more than it leaves open


def find_period(values: ArrayLike) -> float | None:
    """The period of finite values in samples, 16 or more, or None if they show none three times.

    The first of the highest peaks of the autocorrelation behind its first zero (by way of the power spectrum, Wiener
    and Khinchin), after a straight line is taken out and outliers are cut to the inner 98 %; a parabola tells it
    between samples.
    """
    series = np.asarray(values, dtype=float)
    alike = _autocorrelation(series) if len(series) >= _SHORTEST * _REPEATS else None
    if alike is None:
        return None
    crossed = np.flatnonzero(alike <= 0)
    first = max(_SHORTEST, int(crossed[0])) if len(crossed) else len(alike)
    if first >= len(alike) - 1:
        return None
    highest = float(alike[first:-1].max())
    if highest < _ALIKE:
        return None
    begin = first + int(np.argmax(alike[first:-1] >= _AS_HIGH * highest))  # later humps as high are its multiples
    below = np.flatnonzero(alike[begin:-1] < highest / 2)
    lag = begin + int(np.argmax(alike[begin : begin + int(below[0]) if len(below) else -1]))
    before, peak, after = alike[lag - 1 : lag + 2]
    if before > peak or after > peak:
        return None
    bend = before - 2 * peak + after
    return lag + (0.5 * float(before - after) / float(bend) if bend else 0.0)


def _autocorrelation(series: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """At lags up to a third of the series, each as if it had as many pairs as lag 0; None if nothing varies."""
    series = np.clip(series, *np.quantile(series, (0.01, 0.99)))
    scale = float(np.abs(series).max())
    if scale == 0:
        return None
    series = series / scale
    steps = np.arange(len(series)) - (len(series) - 1) / 2
    series = series - series.mean()
    series = series - steps * (steps @ series) / (steps @ steps)
    spectrum = np.fft.rfft(series, 2 * len(series))
    products = np.fft.irfft(spectrum * spectrum.conj())[: len(series) // _REPEATS + 1]
    if products[0] <= 1e-18 * len(series):  # a straight line, and rounding
        return None
    alike: NDArray[np.float64] = products / products[0] * len(series) / (len(series) - np.arange(len(products)))
    return alike
