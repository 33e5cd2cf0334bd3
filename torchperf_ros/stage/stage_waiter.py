"""What a stage's thread waits for: its workers' responses, and a timer that any thread can set."""

import ctypes
import errno
import os
import select
import time

from torchperf_ros.workers.worker_process import WorkerProcess

_NS_PER_S = 1_000_000_000
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long), ("value_ns", ctypes.c_long),
    )  # fmt: skip


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


class TimerFd:
    """Linux `timerfd` on CLOCK_MONOTONIC (the clock of `time.monotonic_ns`), by ctypes: `os.timerfd_*` is Python 3.13.

    Unlike the time-out of `select`, it has nanosecond resolution, no timer slack, and can be set from any thread.
    """

    def __init__(self) -> None:
        """Make a disarmed timer."""
        flags = os.O_CLOEXEC | os.O_NONBLOCK  # the same bits as TFD_CLOEXEC and TFD_NONBLOCK
        self._fd = _check(_libc.timerfd_create(time.CLOCK_MONOTONIC, flags), "timerfd_create")
        self._spec = _Itimerspec(0, 0, 0, 0)

    def fileno(self) -> int:
        """Descriptor, readable from the set time on."""
        return self._fd

    def set(self, at_ns: int) -> None:
        """Become readable at `at_ns`; a time in the past: at once; 0: never. Replaces an earlier setting."""
        self._spec.value_s, self._spec.value_ns = divmod(at_ns, _NS_PER_S)
        _check(_libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._spec), None), "timerfd_settime")

    def clear(self) -> None:
        """Stop being readable until the next set time."""
        try:
            os.read(self._fd, 8)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


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
