"""When workers give way to new ones that know more (compiled tiers, another package): one by one, while they serve."""

import threading
from collections.abc import Sequence
from typing import Any

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.supervise.worker_process import WorkerProcess

_SETTLE_NS = 2 * NS_PER_S
_PAUSE_NS = 5 * NS_PER_S  # after a new worker that died
_TRIES = 2


class Renewal:
    """The rules by which a crew renews itself; the crew does what they say.

    A new worker is started beside the others with what workers are told from now on. Once it has been ready for 2 s
    (its histories are warm by then) it takes the place of an older one, which is ended between two frames. This goes
    on until none is left that was started before. While no new worker has taken a place, two that die end the renewal,
    and nothing has changed; once one has, what it came with is proven, and others are tried again.

    Attributes:
        setup: what workers are told at their start.
        generation: how often that has changed; workers of an earlier one are to be replaced.
        outcome: what became of the last renewal: "" while it goes on, else `done` or why not.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        """Take what the first workers are told."""
        self.setup = setup
        self.generation = 0
        self.outcome = "done"
        self._before = setup
        self._tries = 0
        self._proven = False
        self._not_before_ns = 0
        self._lock = threading.Lock()

    def ask(self, tries: int = _TRIES, **changes: object) -> None:
        """Have every worker replaced; may be called from any thread.

        Args:
            tries: new workers that may die before they are ready.
            changes: what workers are told from now on in place of what they were told before.
        """
        with self._lock:
            self._before = self.setup
            self.setup = {**self.setup, "swapped": None, **changes}
            self.generation += 1
            self.outcome = ""
            self._tries = tries
            self._proven = False

    def wants_candidate(self, workers: Sequence[WorkerProcess | None], now_ns: int) -> bool:
        """Whether to start a new worker beside the others now: all of them are up, and one is of an earlier kind."""
        if now_ns < self._not_before_ns:
            return False
        return all(worker is not None and worker.usable for worker in workers) and self.outdated(workers) is not None

    def outdated(self, workers: Sequence[WorkerProcess | None]) -> WorkerProcess | None:
        """A worker that is to be replaced, the last one first: the standby rather than the one that runs."""
        for worker in reversed(workers):
            if worker is not None and worker.usable and worker.generation < self.generation:
                return worker
        return None

    @staticmethod
    def has_settled(candidate: WorkerProcess, now_ns: int) -> bool:
        """Whether a new worker has been ready for long enough to be relied on."""
        return candidate.usable and candidate.ready_at_ns is not None and now_ns - candidate.ready_at_ns >= _SETTLE_NS

    def took_a_place(self) -> None:
        """A new worker serves in place of an older one."""
        self._proven = True

    def failed(self, candidate: WorkerProcess, reason: str, now_ns: int) -> bool:
        """A new worker died; True if that ends the renewal, and workers are told again what they were told before."""
        with self._lock:
            self._not_before_ns = now_ns + _PAUSE_NS
            if candidate.generation != self.generation or self._proven:
                return False
            self._tries -= 1
        if self._tries > 0:
            return False
        self.give_up(reason)
        return True

    def give_up(self, reason: str) -> None:
        """Replace nobody, and tell workers again what they were told before; nothing if nobody is being replaced."""
        with self._lock:
            if self.outcome:
                return
            self.setup = self._before
            self.generation -= 1
            self.outcome = reason

    def settled(self, workers: Sequence[WorkerProcess | None]) -> None:
        """Note that a renewal is done, once nobody is left to be replaced."""
        with self._lock:
            if not self.outcome and self.outdated(workers) is None:
                self.outcome = "done"
