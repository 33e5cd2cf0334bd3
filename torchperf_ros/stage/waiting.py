"""How long a stage waits for a frame: the publish margin, and whether the standby is asked as well."""

from collections import deque
from typing import Final

_LEAST_MS: Final = 0.1
_MOST_MS: Final = 4.0
_SAMPLES: Final = 128  # that each part is learned from


class PublishMargin:
    """A bounded margin in ms, 0.1 to 4.

    The worst recent wake-up lateness plus the worst recent publish time.

    The maximum, not a high percentile: 99.9 % of answers by the deadline leaves no room for the worst 1 %.
    """

    def __init__(self, first_wake_ms: float = _LEAST_MS) -> None:
        """Say what to expect of a wake-up before any was seen.

        The first deadline is the worst one to learn from: its code is cold, and the next message may just
        be arriving.
        """
        self._wake = deque([first_wake_ms], maxlen=_SAMPLES)
        self._publish = deque([_LEAST_MS], maxlen=_SAMPLES)
        self._update()

    def woke(self, late_ms: float) -> None:
        """A timed wait ended `late_ms` after the time that was asked for."""
        self._wake.append(max(0.0, late_ms))
        self._update()

    def published(self, took_ms: float) -> None:
        """Publishing an answer took `took_ms`."""
        self._publish.append(took_ms)
        self._update()

    def _update(self) -> None:
        self.ms = min(max(max(self._wake) + max(self._publish), _LEAST_MS), _MOST_MS)


_PROOFS: Final = 3
_MOST_PROOFS: Final = 96


class HedgeRule:
    """Learns whose fault it is when a frame is late: the worker's or the frame's.

    A standby that is given the overdue frame (a hedge) saves that frame if the runner was at fault, a pause
    of garbage collection, say. If the frame is at fault, a scene with too many boxes, say, the standby is
    late as well, and the frames after it have nobody. So the standby is kept for the next frame until there
    is proof: a late frame that its runner came through is run once more by a spare worker, for nobody (a
    retrial). It was the worker's fault if that is quick. Three such proofs allow hedges. A hedge or a
    retrial that is late as well suspends them, and doubles the proofs that it takes, up to 96, and the late
    frames that go by before the next retrial.

    Attributes:
        retrials, slow_retrials, hedges, lost_hedges: counters; slow: as late as the first run, lost: runner and standby
            were late on the same frame.
    """

    def __init__(self) -> None:
        """Start without a proof."""
        self.allowed = False  # whether hedges are given now
        self.retrials = self.slow_retrials = self.hedges = self.lost_hedges = 0
        self._proofs = 0
        self._wanted = _PROOFS
        self._passes_by = 0

    def wants_retrial(self) -> bool:
        """A late frame could be run once more: whether that is wanted, called once for each."""
        if self.allowed:
            return False
        if self._passes_by > 0:
            self._passes_by -= 1
            return False
        return True

    def retried(self, *, in_time: bool) -> None:
        """A retrial is over; `in_time`: within the time of a fresh frame."""
        self.retrials += 1
        if in_time:
            self._proofs += 1
            self.allowed = self.allowed or self._proofs >= self._wanted
        else:
            self.slow_retrials += 1
            self._suspend()

    def hedged(self, *, in_time: bool) -> None:
        """A frame is over that was hedged and whose runner was late.

        `in_time`: the standby had a result.
        """
        self.hedges += 1
        if not in_time:
            self.lost_hedges += 1
            self._suspend()

    def _suspend(self) -> None:
        self.allowed = False
        self._proofs = 0
        self._wanted = min(2 * self._wanted, _MOST_PROOFS)
        self._passes_by = self._wanted // (2 * _PROOFS)

    @property
    def words(self) -> str:
        """For `/diagnostics`."""
        if self.allowed:
            return "the standby also runs a frame that is overdue"
        proofs = f"{self._proofs} of {self._wanted} late frames were quick when run again"
        if self.slow_retrials or self.lost_hedges:
            times = self.slow_retrials + self.lost_hedges
            return f"suspended: frames were late on both workers ({times} times); {proofs}"
        return f"not yet: the standby is kept for the next frame; {proofs}"
