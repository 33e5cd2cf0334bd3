"""How like anything before: the distances of a sample, and of the run that ends in it, to those that came earlier."""

import numpy as np

_SIZE = 2048  # samples that are remembered: a week at 5 minutes
_RECENT = 32  # samples that are no precedent: every slow series is like what it was just now
_FADE = 0.8  # weight of a run's sample against the next: the last ten make nine tenths of a run
_RUN = 16  # samples before a run is one: all but 3 % of its weight
_LENGTHS = _SIZE - _RECENT
_ZERO = 1e-100  # smaller distances are 0: they would fade to denormal numbers, with which a processor is slow


class Precedents:
    """The last 2048 samples, and how far each run of them lies from the one that goes on.

    The distance of two runs is the sum of their absolute differences, weighted 0.8 ** age. So each sample brings the
    distances to all runs up to date in one step, and none is compared anew. The nearest neighbour of a short window as
    a measure of novelty: E. Burnaev, V. Ishimtsev, Conformalized density- and distance-based anomaly detection in
    time-series data, 2016.
    """

    __slots__ = ("_count", "_end", "_runs", "_values")

    def __init__(self) -> None:
        self._values = np.zeros(2 * _SIZE)  # the past is always one piece of it: moved to the front at its end
        self._end = _SIZE
        self._runs = np.zeros(_LENGTHS)  # by lag, the longest first: a run's lag never changes
        self._count = 0

    def compare(self, value: float) -> tuple[float, float] | None:
        """How far a finite value, and the run that it ends, lie from the nearest earlier ones, in its unit.

        None for the first 49 samples, which have nothing to be compared with. Call it once for each sample, then
        `learn`.
        """
        known = min(self._count - _RECENT, _LENGTHS)
        if known <= 0:
            return None
        apart = self._values[self._end - _RECENT - known : self._end - _RECENT] - value
        np.abs(apart, out=apart)
        runs = self._runs[_LENGTHS - known :]
        runs *= _FADE
        runs += apart
        if known <= _RUN:
            return None
        whole = runs[_RUN if self._count < _SIZE + _RUN else 0 :]
        return float(apart.min()), float(whole.min())

    def learn(self, value: float) -> None:
        """Remember a finite value, the oldest goes; not that which was compared where that is to be no precedent."""
        if self._end == len(self._values):
            self._values[:_SIZE] = self._values[_SIZE:]
            self._end = _SIZE
            self._runs[self._runs < _ZERO] = 0.0
        self._values[self._end] = value
        self._end += 1
        self._count += 1
