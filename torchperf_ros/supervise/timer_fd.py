"""A timer that `select` can wait for and another thread can set without waking the one that waits."""

import ctypes
import errno
import os
import time

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
