"""What a stage waits for on a virtual clock: its workers' responses, and its timer."""

from typing import Final

from torchperf_ros.replay.virtual.virtual_worker import VirtualWorker

_TIMER: Final = -1
_NEVER: Final = 0


class VirtualWaiter:
    """Stands in for `StageWaiter`; nobody blocks: who replays asks when something is due, and hands it over."""

    def __init__(self) -> None:
        """Wait for nothing."""
        self._timer_ns = _NEVER
        self._workers: dict[int, VirtualWorker] = {}

    @property
    def next_ns(self) -> int | None:
        """When something is due; None: nothing is."""
        due = [worker.due_ns for worker in self._workers.values() if worker.due_ns is not None]
        return min(due + ([self._timer_ns] if self._timer_ns else []), default=None)

    def ready(self, now_ns: int) -> list[int]:
        """Descriptors of what is due, for `StageActor.step`; responses in the order in which they came."""
        due = sorted((w.due_ns, n) for n, w in self._workers.items() if w.due_ns is not None and w.due_ns <= now_ns)
        timer = [_TIMER] if self._timer_ns and self._timer_ns <= now_ns else []
        return timer + [number for _, number in due]

    def worker(self, descriptor: int) -> VirtualWorker | None:
        """The worker that has something to say; None for the timer, which is cleared, or a worker just dropped."""
        if descriptor == _TIMER:
            self._timer_ns = _NEVER
        return self._workers.get(descriptor)

    def set(self, at_ns: int) -> None:
        """Be due at this time; 0: only for workers."""
        self._timer_ns = at_ns

    def wake(self) -> None:
        """Be due at once."""
        self._timer_ns = 1

    def add(self, worker: VirtualWorker) -> None:
        """Wait for this worker's responses too."""
        self._workers[worker.number] = worker

    def drop(self, worker: VirtualWorker) -> bool:
        """No longer wait for this worker; False if it was dropped before."""
        if self._workers.get(worker.number) is not worker:
            return False
        del self._workers[worker.number]
        return True

    def close(self) -> None:
        """Nothing is held."""
