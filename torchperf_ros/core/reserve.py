"""How much earlier than the deadline to stop waiting, learned from what waking up and publishing take here."""

from collections import deque


class Reserve:
    """A bounded reserve in ms: the worst recent wake-up lateness plus the worst recent publish time.

    The maximum, not a high percentile: 99.9 % of answers by the deadline leaves no room for the worst 1 %.
    """

    def __init__(
        self, minimum_ms: float = 0.1, maximum_ms: float = 4.0, window: int = 128, first_wake_ms: float | None = None
    ) -> None:
        """Start with `minimum_ms` for each part until the first samples are in.

        Args:
            minimum_ms: lower bound of the reserve.
            maximum_ms: upper bound of the reserve.
            window: samples that each part is learned from.
            first_wake_ms: what to expect of a wake-up before any was seen. The first deadline is the worst one to
                learn from: its code is cold, and the next message may just be arriving.
        """
        self._minimum_ms = minimum_ms
        self._maximum_ms = maximum_ms
        self._wake = deque([minimum_ms if first_wake_ms is None else first_wake_ms], maxlen=window)
        self._publish = deque([minimum_ms], maxlen=window)
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
        worst_ms = max(self._wake) + max(self._publish)
        self.ms = min(max(worst_ms, self._minimum_ms), self._maximum_ms)
