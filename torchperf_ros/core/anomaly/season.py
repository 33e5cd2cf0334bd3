"""What a series usually does at this time of a period, learnt visit by visit."""

from collections import deque

_VISITS = 7  # remembered for each slot: a week of days
_NEEDED = 3  # visits before a slot predicts: the first whose median one odd day cannot move


class Season:
    """A profile over a period, cut into slots: the median of each slot's last seven visits.

    A visit is the mean of the samples in the slot. The visit that goes on predicts nothing yet: a slot never looks at
    the day that it judges.
    """

    __slots__ = ("_count", "_current", "_period_s", "_profile", "_slots", "_sum")

    def __init__(self, period_s: float, slots: int) -> None:
        """Cut `period_s` seconds into `slots`, from time 0 on."""
        self._period_s = period_s
        self._slots = slots
        self._profile: dict[int, deque[float]] = {}
        self._current = -1
        self._sum = 0.0
        self._count = 0

    def usual(self, time_s: float) -> float | None:
        """The usual value at a finite time, or None where the period has not come round often enough."""
        visits = self._profile.get(self._slot(time_s))
        if visits is None or len(visits) < _NEEDED:
            return None
        ordered = sorted(visits)
        half, odd = divmod(len(ordered), 2)
        return ordered[half] if odd else 0.5 * ordered[half - 1] + 0.5 * ordered[half]

    def learn(self, time_s: float, value: float) -> None:
        """Add a finite value; `usual` knows it once the series has left the slot."""
        slot = self._slot(time_s)
        if slot != self._current:
            if self._count:
                self._profile.setdefault(self._current, deque(maxlen=_VISITS)).append(self._sum / self._count)
            self._current, self._sum, self._count = slot, 0.0, 0
        self._sum += value
        self._count += 1

    def _slot(self, time_s: float) -> int:
        return min(self._slots - 1, int(time_s % self._period_s / self._period_s * self._slots))
