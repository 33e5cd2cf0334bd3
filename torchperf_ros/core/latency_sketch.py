"""Percentiles over a whole run in bounded memory: counts in buckets that grow geometrically."""

import math

import numpy as np

from torchperf_ros.core.quantiles import PERCENTS, Quantiles

RELATIVE_ERROR = 0.01
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOWEST_MS, _HIGHEST_MS = 1e-3, 1e6  # below: counted as the lowest; a budget is at most a minute


def _bucket(value_ms: float) -> int:
    return math.ceil(math.log(value_ms) / math.log(_GAMMA))


_FIRST, _LAST = _bucket(_LOWEST_MS), _bucket(_HIGHEST_MS)


class LatencySketch:
    """Durations in ms, of which every percentile is known to 1 %; the largest is exact. About 8 KiB.

    Bucket i holds gamma^(i-1) < x <= gamma^i with gamma = (1 + a) / (1 - a), and stands for 2 gamma^i / (gamma + 1):
    no sample is further than the share a from that. Masson, Rim, Lee: DDSketch, PVLDB 12 (2019), section 2.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._counts = np.zeros(_LAST - _FIRST + 1, dtype=np.int64)
        self._max_ms = math.nan

    def add(self, values_ms: np.ndarray) -> None:
        """Count samples; none of them NaN."""
        if not len(values_ms):
            return
        exponents = np.ceil(np.log(np.maximum(values_ms, _LOWEST_MS)) / math.log(_GAMMA)).astype(np.int64)
        np.add.at(self._counts, np.clip(exponents - _FIRST, 0, _LAST - _FIRST), 1)
        self._max_ms = float(np.fmax(self._max_ms, values_ms.max()))

    def clear(self) -> None:
        """Forget every sample."""
        self._counts[:] = 0
        self._max_ms = math.nan

    def quantiles(self) -> Quantiles:
        """Each percentile is the sample at its rank rounded down, to within `RELATIVE_ERROR`."""
        ends = np.cumsum(self._counts)
        count = int(ends[-1])
        if not count:
            return Quantiles()
        ranks = [math.floor(percent / 100 * (count - 1)) for percent in PERCENTS[:-1]]
        places = np.searchsorted(ends, ranks, side="right") + _FIRST
        p50, p95, p99 = np.minimum(2 * _GAMMA ** places.astype(float) / (_GAMMA + 1), self._max_ms).tolist()
        return Quantiles(count, p50, p95, p99, self._max_ms)
