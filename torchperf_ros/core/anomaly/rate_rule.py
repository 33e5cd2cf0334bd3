"""The share of events among all, over a sliding window, with hysteresis: on above one limit, off below another."""

import math
from collections import deque


class RateRule:
    """Watches a ratio such as misses per frame or errors per request.

    The window is cut into 16 parts, so memory is bounded whatever the rate. It is on only once the window holds enough
    samples that the limit means more than one event.
    """

    _PARTS = 16
    _FEWEST_EVENTS = 2

    def __init__(self, high: float, low: float, window_s: float) -> None:
        """Turn on when the share reaches `high`, off when it falls to `low` or below.

        Args:
            high: share of events from which on the rule is on, above 0 and at most 1.
            low: share at or below which it is off again, from 0 to below `high`.
            window_s: seconds that count, above 0.

        Raises:
            ValueError: the limits are not in that order; the message names them.
        """
        if not 0 <= low < high <= 1:
            msg = f"high {high!r} and low {low!r}: have to be shares with 0 <= low < high <= 1"
            raise ValueError(msg)
        if not 0 < window_s < math.inf:
            msg = f"window_s {window_s!r}: has to be a number of seconds above 0"
            raise ValueError(msg)
        self._high = high
        self._low = low
        self._part_s = window_s / self._PARTS
        self._parts: deque[list[float]] = deque()  # index of the part, events, all
        self._since_s: float | None = None

    @property
    def active(self) -> bool:
        """Whether the rate is too high."""
        return self._since_s is not None

    @property
    def since_s(self) -> float | None:
        """When it became too high, on the clock of `time_s`; None if it is not."""
        return self._since_s

    @property
    def share(self) -> float:
        """Share of events in the window, from 0 to 1; 0 where the window is empty."""
        total = sum(part[2] for part in self._parts)
        return sum(part[1] for part in self._parts) / total if total else 0.0

    def update(self, time_s: float, events: float, of: float) -> bool:
        """Add `events` out of `of` at `time_s`; whether the rate is too high now.

        Times that go backward count for the newest part. Counts that are negative or not finite are refused.

        Raises:
            ValueError: not 0 <= events <= of, or `time_s` is not finite.
        """
        if not (0 <= events <= of < math.inf and math.isfinite(time_s)):
            msg = f"{events!r} events of {of!r} at {time_s!r} s: has to be 0 <= events <= of, at a finite time"
            raise ValueError(msg)
        index = math.floor(time_s / self._part_s)
        if not self._parts or index > self._parts[-1][0]:
            self._parts.append([index, 0.0, 0.0])
        self._parts[-1][1] += events
        self._parts[-1][2] += of
        while self._parts[0][0] <= self._parts[-1][0] - self._PARTS:
            self._parts.popleft()
        seen = sum(part[1] for part in self._parts)
        if self._since_s is None and seen >= self._FEWEST_EVENTS and self.share >= self._high:
            self._since_s = time_s
        elif self.share <= self._low:
            self._since_s = None
        return self.active
