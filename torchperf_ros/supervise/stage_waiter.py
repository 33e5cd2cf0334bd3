"""What a stage's thread waits for: its workers' responses, and a timer that any thread can set."""

import select

from torchperf_ros.supervise.timer_fd import TimerFd
from torchperf_ros.supervise.worker_process import WorkerProcess

_AT_ONCE_NS = 1


class StageWaiter:
    """One thread waits; others add workers, drop them and set the timer, each under the stage's lock."""

    def __init__(self) -> None:
        """Wait for nothing but the timer, which is not set."""
        self._poll = select.epoll()
        self._timer = TimerFd()
        self._workers: dict[int, WorkerProcess] = {}
        self._poll.register(self._timer.fileno(), select.EPOLLIN)

    def wait(self) -> list[int]:
        """Block until something is ready; returns descriptors for `worker`."""
        return [descriptor for descriptor, _ in self._poll.poll()]

    def worker(self, descriptor: int) -> WorkerProcess | None:
        """The worker that has something to read; None for the timer, which is cleared, or a worker just dropped."""
        if descriptor == self._timer.fileno():
            self._timer.clear()
        return self._workers.get(descriptor)

    def set(self, at_ns: int) -> None:
        """Wake up at this monotonic time; 0: only for workers."""
        self._timer.set(at_ns)

    def wake(self) -> None:
        """Wake up now."""
        self._timer.set(_AT_ONCE_NS)

    def add(self, worker: WorkerProcess) -> None:
        """Wait for this worker's responses too."""
        self._workers[worker.frames.fileno()] = worker
        self._poll.register(worker.frames.fileno(), select.EPOLLIN)

    def drop(self, worker: WorkerProcess) -> bool:
        """No longer wait for this worker; False if it was dropped before."""
        if self._workers.pop(worker.frames.fileno(), None) is None:
            return False
        self._poll.unregister(worker.frames.fileno())
        return True

    def close(self) -> None:
        """Release the descriptors."""
        self._poll.close()
        self._timer.close()
