"""When the messages of a log are due, on the monotonic clock."""

import math
from typing import Final

from torchperf_ros.core.clock import NS_PER_S

_SET_BACK_NS: Final = NS_PER_S


class Pace:
    """Counts from one start, so that delays do not add up; it may be paused, which moves all that is still to come.

    A gap in the log stays a gap. A message that was received before its predecessor is due together with it; if it is
    more than a second before, the recorder's clock was set back, and the log goes on from there.
    """

    def __init__(self, log_start_ns: int, start_ns: int, rate: float = 1.0) -> None:
        """Fix the start.

        Args:
            log_start_ns: a time of the log.
            start_ns: monotonic time at which it is reached.
            rate: how much faster than recorded, > 0.
        """
        self._rate = rate
        self._paused_ns: int | None = None
        self.jump(log_start_ns, start_ns)

    def jump(self, t_ns: int, now_ns: int) -> None:
        """Go on from here: the time `t_ns` of the log is reached at `now_ns` of the monotonic clock."""
        self._log_start_ns = self._latest_ns = t_ns
        self._start_ns = now_ns
        if self._paused_ns is not None:
            self._paused_ns = now_ns

    def due_ns(self, t_ns: int) -> int:
        """Monotonic time at which a message of the log's time `t_ns` is due; to be asked in the log's order."""
        if t_ns < self._latest_ns - _SET_BACK_NS:
            self.jump(t_ns, self._due_ns(self._latest_ns))
        self._latest_ns = max(self._latest_ns, t_ns)
        return self._due_ns(self._latest_ns)

    def _due_ns(self, t_ns: int) -> int:
        return self._start_ns + round((t_ns - self._log_start_ns) / self._rate)

    def log_ns(self, now_ns: int) -> int:
        """Time of the log at this monotonic time; it stands still during a pause."""
        return self._log_start_ns + round((self._going_ns(now_ns) - self._start_ns) * self._rate)

    def wait_ns(self, due_ns: int, now_ns: int) -> float:
        """How long what is due then still has to wait, <= 0 if it is due; without end during a pause."""
        return math.inf if self.paused else due_ns - now_ns

    def _going_ns(self, now_ns: int) -> int:
        return now_ns if self._paused_ns is None else self._paused_ns

    @property
    def paused(self) -> bool:
        """Whether the log's time stands still; what is due meanwhile has to wait."""
        return self._paused_ns is not None

    def pause(self, now_ns: int) -> None:
        """Let the log's time stand still from now on."""
        if self._paused_ns is None:
            self._paused_ns = now_ns

    def resume(self, now_ns: int) -> None:
        """Go on where the pause began."""
        if self._paused_ns is not None:
            self._start_ns += now_ns - self._paused_ns
            self._paused_ns = None
