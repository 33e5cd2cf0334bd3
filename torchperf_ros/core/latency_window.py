"""A bounded window of durations with exact percentiles."""

import math

import numpy as np


class LatencyWindow:
    """The last `size` samples in ms; the oldest makes room for the newest."""

    def __init__(self, size: int = 512) -> None:
        """Preallocate room for `size` >= 1 samples."""
        self._samples = np.full(size, math.nan)
        self._count = 0

    def add(self, value_ms: float) -> None:
        """Add one sample."""
        self._samples[self._count % len(self._samples)] = value_ms
        self._count += 1

    def __len__(self) -> int:
        """Number of samples held."""
        return min(self._count, len(self._samples))

    def clear(self) -> None:
        """Forget every sample."""
        self._count = 0

    @property
    def values(self) -> np.ndarray:
        """The held samples in ms, in no particular order, as a view."""
        return self._samples[: len(self)]

    def percentiles(self, *percents: float) -> tuple[float, ...]:
        """Percentiles (0 to 100) of the held samples, linear between ranks as `numpy.percentile`; NaN if empty."""
        if not len(self):
            return (math.nan,) * len(percents)
        return tuple(np.percentile(self.values, percents).tolist())

    def maximum(self) -> float:
        """The largest held sample; NaN if empty."""
        return float(self.values.max()) if len(self) else math.nan
