"""What a stage's thread waits for: its workers, and a timer that any thread can set; the publish margin."""

import contextlib
import ctypes
import os
import select
import time
from typing import Final

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.workers.calibration import SortedWindow
from torchperf_ros.workers.worker_process import WorkerProcess

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_AT_ONCE_NS = 1
_Itimerspec = ctypes.c_long * 4  # interval and value, each in s and ns
# These calls do not block. `PyDLL` keeps the interpreter meanwhile: giving it away and asking for it back
# would let a thread that computes hold up the frame for a switch interval each time.
_libc = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


class StageWaiter:
    """One thread waits; others add workers, drop them and set the timer, each under the stage's lock.

    The timer is Linux's `timerfd` on CLOCK_MONOTONIC (the clock of `time.monotonic_ns`); `os.timerfd_*` is
    Python 3.13. Unlike the time-out of `select`, it has nanosecond resolution, no timer slack, and can be
    set from any thread.

    Attributes:
        timer: the timer's descriptor; -1 after `close`.
        at_ns: what the timer is set to; 0: to nothing.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        flags = os.O_CLOEXEC | os.O_NONBLOCK  # the same bits as TFD_CLOEXEC and TFD_NONBLOCK
        self.timer = _check(_libc.timerfd_create(time.CLOCK_MONOTONIC, flags), "timerfd_create")
        self._spec, self._now_spec = _Itimerspec(0, 0, 0, 0), _Itimerspec(0, 0, 0, _AT_ONCE_NS)
        self._workers: dict[int, WorkerProcess] = {}
        self.at_ns = 0
        self._poll.register(self.timer, select.EPOLLIN)

    def wait(self) -> list[int]:
        """Block until something is ready; returns descriptors for `worker`."""
        return [descriptor for descriptor, _ in self._poll.poll()]

    def worker(self, descriptor: int) -> WorkerProcess | None:
        """The worker that has something to read.

        None for the timer, which is cleared, or a worker just dropped.
        """
        if descriptor == self.timer:
            with contextlib.suppress(BlockingIOError):  # it was set anew meanwhile
                os.read(self.timer, 8)
                self.at_ns = 0
        return self._workers.get(descriptor)

    def set(self, at_ns: int) -> None:
        """Wake up at this monotonic time, at once if it has passed.

        0: only for workers. The last setting counts.
        """
        if at_ns == self.at_ns and self.timer >= 0:
            return
        self._spec[2], self._spec[3] = divmod(at_ns, NS_PER_S)
        _check(_libc.timerfd_settime(self.timer, _ABSOLUTE, self._spec, None), "timerfd_settime")
        # After the call: a wake-up without the lock in between leaves it too late here at worst, never too early.
        self.at_ns = at_ns

    def wake(self) -> None:
        """Wake up now.

        Also without the stage's lock, but then a timer that is being set may come after it.
        """
        self.at_ns = _AT_ONCE_NS
        _check(_libc.timerfd_settime(self.timer, _ABSOLUTE, self._now_spec, None), "timerfd_settime")

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
        """Release the descriptors.

        Who still calls gets an `OSError`, and sets no timer that is another one's now.
        """
        self._poll.close()
        timer, self.timer = self.timer, -1
        os.close(timer)


class Alarm:
    """One stream's part of the timer that all streams of a stage share; it rings for the earliest of them.

    Attributes:
        at_ns: when this stream wants to be looked at; 0: not before a worker has something for it.
    """

    def __init__(self, waiter: StageWaiter, beside: "list[Alarm]") -> None:
        self.at_ns = 0
        self._waiter, self._beside = waiter, beside
        beside.append(self)

    def set(self, at_ns: int) -> None:
        """See `StageWaiter.set`; what the other streams have set stands."""
        rings_ns, before_ns, self.at_ns = self._waiter.at_ns, self.at_ns, at_ns
        if not rings_ns or rings_ns == before_ns or 0 < at_ns < rings_ns:
            self.ring_for_the_first()

    def ring_for_the_first(self) -> None:
        """Set the timer to the earliest time that any of the streams wants."""
        self._waiter.set(min((one.at_ns for one in self._beside if one.at_ns), default=0))

    def wake(self) -> None:
        """See `StageWaiter.wake`."""
        self.at_ns = _AT_ONCE_NS
        self._waiter.wake()


_LEAST_MS: Final = 0.1
_MOST_MS: Final = 4.0
_SAMPLES: Final = 128  # that each part is learned from


class PublishMargin:
    """A bounded margin in ms, 0.1 to 4.

    The worst recent wake-up lateness plus the worst recent publish time.

    The maximum, not a high percentile: 99.9 % of answers by the deadline leaves no room for the worst 1 %.
    """

    def __init__(self, first_wake_ms: float = _LEAST_MS, streams: int = 1) -> None:
        """Say what to expect of a wake-up before any was seen.

        The first deadline is the worst one to learn from: its code is cold, and the next message may just
        be arriving. Of several `streams` with one deadline the last answer leaves after those of all others,
        so that the margin may be so many times as long.
        """
        self._most_ms = streams * _MOST_MS
        self._wake, self._publish = SortedWindow(_SAMPLES), SortedWindow(_SAMPLES)
        self._wake.add(first_wake_ms)
        self.published(_LEAST_MS)

    def woke(self, late_ms: float) -> None:
        """A timed wait ended `late_ms` after the time that was asked for."""
        self._wake.add(max(0.0, late_ms))
        self._update()

    def published(self, took_ms: float) -> None:
        """Publishing an answer took `took_ms`."""
        self._publish.add(took_ms)
        self._update()

    def _update(self) -> None:
        self.ms = min(max(self._wake.quantile(1.0) + self._publish.quantile(1.0), _LEAST_MS), self._most_ms)
