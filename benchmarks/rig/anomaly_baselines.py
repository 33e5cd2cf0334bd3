"""Detectors to beat: what many projects write first, and what a careful one writes second."""

import math
import statistics
from collections import deque

from torchperf_ros.frame.sorted_window import SortedWindow
from torchperf_ros.watch.series_detector import FRAME_CAUTION, SeriesDetector

_SIGMAS = 3.0


def score_of(departure: float, spread: float, sigmas: float) -> float:
    """From 0 to 1: 0.5 at `sigmas` times the spread, so that all detectors have the same threshold."""
    if departure <= 0:
        return 0.0
    return departure / (departure + sigmas * spread)


class Ours:
    """`SeriesDetector` with its defaults, or more cautious."""

    def __init__(self, caution=1.0):
        self._detector = SeriesDetector(caution=caution)

    def update(self, time_s, value):
        return self._detector.update(time_s, value).score


class FrozenZScore:
    """Mean and deviation of the first 100 samples, for ever; an anomaly is 3 deviations off."""

    _FIRST = 100

    def __init__(self):
        self._samples = []
        self._mean = self._deviation = 0.0

    def update(self, time_s, value):
        if not math.isfinite(value):
            return 0.0
        if len(self._samples) < self._FIRST:
            self._samples.append(value)
            self._mean, self._deviation = statistics.fmean(self._samples), statistics.pstdev(self._samples)
            return 0.0
        return score_of(abs(value - self._mean), self._deviation, _SIGMAS)


class Ewma:
    """Exponentially weighted mean and deviation that learn the sample before they judge it."""

    _WEIGHT = 0.05

    def __init__(self):
        self._mean = math.nan
        self._variance = 0.0

    def update(self, time_s, value):
        if not math.isfinite(value):
            return 0.0
        if math.isnan(self._mean):
            self._mean = value
        self._mean += self._WEIGHT * (value - self._mean)
        departure = abs(value - self._mean)
        self._variance += self._WEIGHT * (departure**2 - self._variance)
        return score_of(departure, math.sqrt(self._variance), _SIGMAS)


class RollingMad:
    """Median and median absolute deviation of the last 200 samples; an anomaly is 6 robust deviations off."""

    _SIZE, _FIRST, _ROBUST_SIGMAS, _TO_SIGMA = 200, 50, 6.0, 1.4826

    def __init__(self):
        self._values = SortedWindow(self._SIZE)
        self._last = deque(maxlen=self._SIZE)

    def update(self, time_s, value):
        if not math.isfinite(value):
            return 0.0
        score = 0.0
        if len(self._last) >= self._FIRST:
            median = self._values.median()
            spread = self._TO_SIGMA * statistics.median(abs(one - median) for one in self._last)
            score = score_of(abs(value - median), spread, self._ROBUST_SIGMAS)
        self._values.add(value)
        self._last.append(value)
        return score


DETECTORS = {
    "torchperf_ros": Ours,
    "torchperf_ros, cautious": lambda: Ours(FRAME_CAUTION),
    "frozen z-score": FrozenZScore,
    "EWMA": Ewma,
    "rolling median, MAD": RollingMad,
}
