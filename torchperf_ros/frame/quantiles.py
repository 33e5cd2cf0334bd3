"""How durations are spread: a count, three percentiles and the largest."""

import math
from dataclasses import dataclass

import numpy as np

PERCENTS = (50.0, 95.0, 99.0, 100.0)


@dataclass(frozen=True)
class Quantiles:
    """Percentiles of durations in ms; NaN where there are none.

    Attributes:
        count: number of samples.
        p50_ms, p95_ms, p99_ms, max_ms: linear between ranks, as `numpy.percentile`, unless their source says otherwise.
    """

    count: int = 0
    p50_ms: float = math.nan
    p95_ms: float = math.nan
    p99_ms: float = math.nan
    max_ms: float = math.nan

    @classmethod
    def of(cls, values_ms: np.ndarray) -> "Quantiles":
        """Exactly, of samples in any order; NaN samples are unknown and do not count."""
        known = values_ms[~np.isnan(values_ms)]
        return cls(len(known), *np.percentile(known, PERCENTS).tolist()) if len(known) else cls()

    def items(self) -> list[tuple[str, float]]:
        """Names with their unit, and values in ms."""
        return [(name, value) for name, value in vars(self).items() if name != "count"]
