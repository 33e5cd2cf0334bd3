"""How long something has been so without a break, and whether that is longer than it ever was."""

from torchperf_ros.core.clock import NS_PER_S

_LEAST_S, _FACTOR = 10.0, 3.0
_KNOWN_S = 30.0


class Stretch:
    """Stretches of time in which something is so, for what may be so for a while without being wrong.

    Attributes:
        longest_s: the longest one that is over.
    """

    def __init__(self) -> None:
        """Begin with the first call of `update`."""
        self.longest_s = 0.0
        self._first_ns: int | None = None
        self._since_ns: int | None = None

    def update(self, now_ns: int, *, is_so: bool) -> None:
        """Whether it is so now."""
        if self._first_ns is None:
            self._first_ns = now_ns
        if is_so:
            self._since_ns = now_ns if self._since_ns is None else self._since_ns
        elif self._since_ns is not None:
            self.longest_s = max(self.longest_s, (now_ns - self._since_ns) / NS_PER_S)
            self._since_ns = None

    def unusual_s(self, now_ns: int) -> float:
        """Seconds that it has been so, if that is three times as long as ever before, and 10 s; otherwise 0.

        It has to be known for 30 s before, so that there was something to compare with.
        """
        if self._since_ns is None or self._first_ns is None:
            return 0.0
        lasted_s = (now_ns - self._since_ns) / NS_PER_S
        known = (self._since_ns - self._first_ns) / NS_PER_S >= _KNOWN_S
        return lasted_s if known and lasted_s >= max(_LEAST_S, _FACTOR * self.longest_s) else 0.0
