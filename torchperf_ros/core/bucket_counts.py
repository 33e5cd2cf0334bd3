"""A histogram with fixed bounds, as Prometheus wants it."""

from collections.abc import Sequence

import numpy as np

_SHARES_OF_BUDGET = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
LATENESS_BOUNDS_S = (0.0, 0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
"""Bounds for the time past a deadline: the first bucket holds what was in time."""


def budget_bounds_s(budget_ms: float) -> tuple[float, ...]:
    """Bounds in s around a budget, which is one of them: finest just before it, where it is decided."""
    return tuple(float(f"{share * budget_ms / 1000:.6g}") for share in _SHARES_OF_BUDGET)


class BucketCounts:
    """Counts samples in s by upper bound (inclusive), and adds them up."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """Take rising bounds; a last bucket without one holds the rest."""
        self._bounds_s = np.array(bounds_s)
        self._counts = np.zeros(len(bounds_s) + 1, dtype=np.int64)
        self._sum_s = 0.0

    def add(self, values_s: np.ndarray) -> None:
        """Count samples; NaN ones are unknown and do not count."""
        known = values_s[~np.isnan(values_s)]
        np.add.at(self._counts, np.searchsorted(self._bounds_s, known, side="left"), 1)
        self._sum_s += float(known.sum())

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by bound as text, the last one `+Inf`, and the sum in s."""
        words = [*(repr(bound) for bound in self._bounds_s.tolist()), "+Inf"]
        return list(zip(words, np.cumsum(self._counts).tolist(), strict=True)), self._sum_s
