"""Time is an argument: rules take a clock, tests pass a virtual one."""

import time
from collections.abc import Callable

# Returns nanoseconds that never go backwards.
Clock = Callable[[], int]

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

monotonic_ns: Clock = time.monotonic_ns


class VirtualClock:
    """A clock that moves only when `advance_ms` or `reach` is called, for tests and virtual-time replay."""

    def __init__(self, start_ns: int = 1_000 * NS_PER_S) -> None:
        """Start at `start_ns`."""
        self._now_ns = start_ns

    def __call__(self) -> int:
        """The current virtual time in ns."""
        return self._now_ns

    def advance_ms(self, ms: float) -> int:
        """Move forward by `ms` >= 0 milliseconds and return the new time in ns."""
        if ms < 0:
            raise ValueError(f"a clock cannot go back by {ms} ms")
        self._now_ns += round(ms * NS_PER_MS)
        return self._now_ns

    def reach(self, at_ns: int) -> None:
        """Move forward to a time; one that has passed changes nothing."""
        self._now_ns = max(self._now_ns, at_ns)
