"""When a dead worker is replaced: at once at first, then later and later, and when to call it a lasting failure."""

from torchperf_ros.core.clock import NS_PER_S, Clock


class RestartPolicy:
    """Exponential back-off over deaths that follow each other too soon.

    The first death of a worker that had served for a while is followed by a restart at once; each death within
    `proven_s` of being ready doubles the delay from `first_delay_s` up to `longest_delay_s`. After `give_up_after`
    such deaths in a row the failure is lasting: the stage stops safely, and is tried again at the longest delay.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        proven_s: float = 5.0,
        first_delay_s: float = 0.5,
        longest_delay_s: float = 30.0,
        give_up_after: int = 3,
    ) -> None:
        """Take the clock and the bounds."""
        self._clock = clock
        self._proven_ns = round(proven_s * NS_PER_S)
        self._first_ns = round(first_delay_s * NS_PER_S)
        self._longest_ns = round(longest_delay_s * NS_PER_S)
        self._give_up_after = give_up_after
        self._early_deaths = 0
        self.restarts = 0

    def died(self, ready_at_ns: int | None) -> int:
        """A worker died that was ready at `ready_at_ns` (None: never); returns when to start its replacement, in ns."""
        now_ns = self._clock()
        proven = ready_at_ns is not None and now_ns - ready_at_ns >= self._proven_ns
        self._early_deaths = 0 if proven else self._early_deaths + 1
        self.restarts += 1
        if not self._early_deaths:
            return now_ns
        if self.gave_up:
            return now_ns + self._longest_ns
        return now_ns + min(self._first_ns << (self._early_deaths - 1), self._longest_ns)

    def give_up(self) -> None:
        """Another try would fail alike, as with an adapter that does not exist: the next death is a lasting failure."""
        self._early_deaths = max(self._early_deaths, self._give_up_after - 1)

    @property
    def gave_up(self) -> bool:
        """Whether the workers died too often in a row to call it anything but a lasting failure."""
        return self._early_deaths >= self._give_up_after
