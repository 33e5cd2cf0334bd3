"""Whether memory grows for good, told from noise, steps, warm-up and the sawtooth of a garbage collector."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist, median

import numpy as np
from numpy.typing import NDArray

_S_PER_H = 3600.0
_THIRDS = 3
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_RESOLUTION = 0.02  # of the growth: what is left below that, as without noise, is no wandering
_SIGNIFICANT_LAG = 1.96  # 95 % limits of an autocorrelation, times 1 / sqrt(n)

_Array = NDArray[np.float64]


@dataclass(frozen=True)
class TrendRules:
    """When memory counts as growing.

    Attributes:
        bucket_s: seconds of one point at the finest scale; each coarser scale takes `ratio` points for one of its own.
        ratio: between scales.
        scales: how many there are; with the defaults their windows are 2 min, 16 min, 2.1 h and 17 h.
        points: of a scale's window.
        least_points: that a verdict needs.
        settle_s: what comes first is not looked at: caches fill.
        p_value: of the Mann-Kendall test, one-sided.
        least_mib: growth over the window that is worth a word.
        over_noise: growth over the window in standard deviations of what is left when the trend is taken off.
        third_share: each third of the window has to grow by this part of the whole window's slope: a step does not,
            and what has stopped growing does not.
        over_before: the last third has to lie above all that was in use before the window, by this part of its range:
            memory that comes and goes does not.
        brief_s, urgent_s: a window shorter than `brief_s` counts only if memory would be used up within `urgent_s`:
            over minutes much comes and goes, but a fast leak leaves no time to look longer.
        in_a_row: verdicts in a row that raise or clear a suspicion.
    """

    bucket_s: float = 2.0
    ratio: int = 8
    scales: int = 4
    points: int = 60
    least_points: int = 40
    settle_s: float = 60.0
    p_value: float = 0.01
    least_mib: float = 8.0
    over_noise: float = 4.0
    third_share: float = 0.25
    over_before: float = 0.5
    brief_s: float = 300.0
    urgent_s: float = 1800.0
    in_a_row: int = 2


@dataclass(frozen=True)
class Growth:
    """A trend over one window.

    Attributes:
        mib_per_hour: Theil-Sen slope.
        confidence: one less the p-value of the Mann-Kendall test, 0 to 1.
        window_s: how long the window is that it was seen in.
        since_s: time of the window's first point, on the clock of the samples.
    """

    mib_per_hour: float
    confidence: float
    window_s: float
    since_s: float

    def lasts_s(self, room_mib: float) -> float:
        """Seconds until `room_mib` more are used up if it goes on; infinite if it does not grow."""
        return max(0.0, room_mib) / self.mib_per_hour * _S_PER_H if self.mib_per_hour > 0 else math.inf


@dataclass
class _Scale:
    """One window of bucket medians, and how its last verdicts went."""

    bucket_s: float
    points: deque[tuple[float, float]]
    pending: list[tuple[float, float]] = field(default_factory=list)
    growth: Growth | None = None
    suspicious: bool = False
    against: int = 0

    def take(self, time_s: float, mib: float) -> tuple[float, float] | None:
        """Add to the bucket; the bucket's point once it is over."""
        closed = None
        if self.pending and time_s - self.pending[0][0] >= self.bucket_s * 0.999:
            closed = (self.pending[0][0], median(value for _, value in self.pending))
            self.points.append(closed)
            self.pending.clear()
        self.pending.append((time_s, mib))
        return closed


class MemoryTrend:
    """One series of memory samples, kept as bucket medians at several time scales: bounded, however long it runs."""

    def __init__(self, rules: TrendRules | None = None) -> None:
        """Start with nothing known."""
        self._rules = rules or TrendRules()
        self._scales = [
            _Scale(self._rules.bucket_s * self._rules.ratio**number, deque(maxlen=self._rules.points))
            for number in range(self._rules.scales)
        ]
        self._began_s: float | None = None

    def add(self, time_s: float, mib: float) -> None:
        """Take a sample; NaN is passed over. Times rise, about one second apart."""
        if math.isnan(mib):
            return
        self._began_s = time_s if self._began_s is None else self._began_s
        if time_s - self._began_s < self._rules.settle_s:
            return
        point: tuple[float, float] | None = (time_s, mib)
        for scale in self._scales:
            if point is None:
                return
            point = scale.take(*point)
            if point is not None and len(scale.points) >= self._rules.least_points:
                self._judge(scale)

    def suspicion(self, room_mib: float = math.inf) -> Growth | None:
        """The growth that is suspected, by the longest window that shows it; None if none is.

        Args:
            room_mib: how much more there is to be used; with less of it, shorter windows are believed.
        """
        found = [scale.growth for scale in self._scales if scale.suspicious and scale.growth is not None]
        rules = self._rules
        if not found or (found[-1].window_s < rules.brief_s and found[-1].lasts_s(room_mib) > rules.urgent_s):
            return None
        return found[-1]

    @property
    def growth(self) -> Growth | None:
        """What the longest window with a verdict shows, suspicious or not; None while there is none."""
        found = [scale.growth for scale in self._scales if scale.growth is not None]
        return found[-1] if found else None

    def _judge(self, scale: _Scale) -> None:
        """Look at the window anew; a suspicion is raised and cleared by several verdicts in a row."""
        times, values = np.array(scale.points, dtype=np.float64).T
        slope = theil_sen_slope(times, values)
        p_value = mann_kendall_p(values, slope * (times - times[0]))
        window_s = float(times[-1] - times[0]) + scale.bucket_s
        scale.growth = Growth(slope * _S_PER_H, 1.0 - p_value, window_s, float(times[0]))
        grows = p_value < self._rules.p_value and self._lasting(scale, times, values, slope)
        scale.against = 0 if grows is scale.suspicious else scale.against + 1
        if scale.against >= self._rules.in_a_row:
            scale.suspicious, scale.against = grows, 0

    def _lasting(self, scale: _Scale, times: _Array, values: _Array, slope: float) -> bool:
        """Whether a significant trend is more than noise, a step, a warm-up, or memory that was in use before."""
        rules, residuals = self._rules, values - slope * times
        noise = _MAD_TO_SIGMA * float(np.median(np.abs(residuals - np.median(residuals))))
        growth = slope * float(times[-1] - times[0])
        if growth < max(rules.least_mib, rules.over_noise * noise):
            return False
        thirds = zip(np.array_split(times, _THIRDS), np.array_split(values, _THIRDS), strict=True)
        if any(_end_slope(*third) < rules.third_share * slope for third in thirds):
            return False
        before = list(self._before(float(times[0])))
        if scale.suspicious or not before:
            return True
        last = float(np.median(np.array_split(values, _THIRDS)[-1]))
        return last > max(before) + rules.over_before * (max(before) - min(before))

    def _before(self, time_s: float) -> Iterator[float]:
        """What was in use before this time, as far as it is remembered."""
        return (mib for scale in self._scales for began_s, mib in scale.points if began_s + scale.bucket_s <= time_s)


def theil_sen_slope(times: _Array, values: _Array) -> float:
    """Median of the slopes of all pairs (Theil 1950, Sen 1968): a third of the points may lie anywhere.

    Args:
        times: shape (n,), rising, n >= 2.
        values: shape (n,).
    """
    first, second = np.triu_indices(len(times), 1)
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def mann_kendall_p(values: _Array, trend: _Array) -> float:
    """One-sided p-value of the Mann-Kendall test against "no growth", with ties and autocorrelation.

    Autocorrelated noise wanders, and looks like a trend to the plain test; its variance is corrected by the
    autocorrelation of the ranks of what is left without the trend (Hamed and Rao 1998), never below the plain one.

    Args:
        values: shape (n,), n >= 3, in order of time.
        trend: shape (n,), what is taken off before the autocorrelation is looked at.
    """
    n = len(values)
    score = float(np.sum(np.sign(values[None, :] - values[:, None])[np.triu_indices(n, 1)]))
    _, counts = np.unique(values, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float(np.sum(counts * (counts - 1) * (2 * counts + 5)))) / 18
    if variance <= 0:  # all the same
        return 1.0
    residuals, resolution = values - trend, _RESOLUTION * abs(float(trend[-1] - trend[0]))
    inflation = _inflation(np.round(residuals / resolution) if resolution else residuals)
    z = score / math.sqrt(variance * max(1.0, inflation))
    return 1.0 - NormalDist().cdf(z)


def _inflation(residuals: _Array) -> float:
    """By how much autocorrelation widens the variance of the Mann-Kendall score; 1 for none."""
    n = len(residuals)
    _, places = np.unique(residuals, return_inverse=True)
    ranks = places - places.mean()
    if not ranks.any():
        return 1.0
    lags = np.arange(1, n - 1)
    correlations = np.correlate(ranks, ranks, mode="full")[n:-1] / float(ranks @ ranks)
    weights = (n - lags) * (n - lags - 1) * (n - lags - 2)
    counted = np.abs(correlations) > _SIGNIFICANT_LAG / math.sqrt(n)
    return 1.0 + 2.0 / (n * (n - 1) * (n - 2)) * float(np.sum((weights * correlations)[counted]))


def _end_slope(times: _Array, values: _Array) -> float:
    """Slope of a third from the median of its first to that of its last third: sees a stair wherever it lies."""
    size = max(1, len(times) // _THIRDS)
    rise = float(np.median(values[-size:]) - np.median(values[:size]))
    return rise / float(np.median(times[-size:]) - np.median(times[:size]))
