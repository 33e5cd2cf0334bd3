"""Lines for people, few enough to be read: what comes beyond is counted, and said once it is over."""

from collections.abc import Callable

from torchperf_ros.core.clock import NS_PER_S

_MOST_PER_S = 10.0
_BURST = 30.0


class LogThrottle:
    """A token bucket: 30 lines at once, 10 lines per second for long. Not for several threads at once."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        """Take the clock, monotonic in ns."""
        self._now_ns = now_ns
        self._tokens = _BURST
        self._at_ns = now_ns()
        self._held_back = 0

    def lines(self, text: str) -> list[str]:
        """What to log for this text: nothing, itself, or itself after a word on how many lines were left out."""
        now_ns = self._now_ns()
        self._tokens = min(_BURST, self._tokens + (now_ns - self._at_ns) / NS_PER_S * _MOST_PER_S)
        self._at_ns = now_ns
        if self._tokens < 1.0:
            self._held_back += 1
            return []
        self._tokens -= 1.0
        left_out, self._held_back = self._held_back, 0
        if not left_out:
            return [text]
        return [f"{left_out} lines were left out, as there were too many at once; the records hold more", text]
