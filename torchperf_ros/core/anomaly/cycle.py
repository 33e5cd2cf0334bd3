"""The season of a series: the day where its clock is one, else the period that it turns out to have."""

from array import array

from torchperf_ros.core.anomaly.period import find_period
from torchperf_ros.core.anomaly.season import Season

_DAY_S = 86_400.0
_MOST_SLOTS = 96  # of a period: 15 minutes of a day
_REMEMBERED = 4096  # samples that a period is looked for in
_FIRST_LOOK = 256  # samples; then at each doubling, then every 4096
_SAME = 0.05  # periods that differ by less are one


class Cycle:
    """What is usual at this time of the day or, until the day is known, of the period found in the samples.

    A look for the period costs a fraction of a millisecond, at 256, 512, 1024, 2048 samples and every 4096.
    """

    __slots__ = ("_count", "_day", "_found", "_period", "_times", "_values")

    def __init__(self) -> None:
        self._day = Season(_DAY_S, _MOST_SLOTS)
        self._found: Season | None = None
        self._period = 0.0
        self._times = array("d", bytes(8 * _REMEMBERED))
        self._values = array("d", bytes(8 * _REMEMBERED))
        self._count = 0

    def usual(self, time_s: float) -> float | None:
        """The usual value at a finite time; None where neither has come round three times."""
        usual = self._day.usual(time_s)
        if usual is None and self._found is not None:
            return self._found.usual(time_s)
        return usual

    def learn(self, time_s: float, value: float) -> None:
        """Add a finite value at a finite time."""
        self._day.learn(time_s, value)
        if self._found is not None:
            self._found.learn(time_s, value)
        place = self._count % _REMEMBERED
        self._times[place] = time_s
        self._values[place] = value
        self._count += 1
        looks = self._count >= _FIRST_LOOK and self._count & (self._count - 1) == 0
        if (looks and self._count < _REMEMBERED) or self._count % _REMEMBERED == 0:
            self._look(min(self._count, _REMEMBERED))

    def _look(self, count: int) -> None:
        """Find the period of the last `count` samples, which lie in order at every look."""
        samples = find_period(self._values[:count])
        duration_s = self._times[count - 1] - self._times[0]
        if samples is None or not 0 < duration_s < _DAY_S * _REMEMBERED:
            return
        period_s = samples * duration_s / (count - 1)
        if abs(period_s - self._period) <= _SAME * period_s or abs(period_s - _DAY_S) <= _SAME * _DAY_S:
            return
        self._period = period_s
        self._found = Season(period_s, min(_MOST_SLOTS, int(samples)))
        for place in range(count):
            self._found.learn(self._times[place], self._values[place])
