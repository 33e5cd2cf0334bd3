"""The process's end, bounded: what others do while it ends may take for ever."""

import ctypes
import time
from typing import Final

_SIGEV_THREAD: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_size_t), ("signal_number", ctypes.c_int), ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("padding", ctypes.c_char * 32),
    )  # fmt: skip


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long), ("value_ns", ctypes.c_long),
    )  # fmt: skip


def end_within(seconds: int, status: int) -> None:
    """Have the process exit with `status` after these whole seconds, should it still be there.

    Fast DDS can deadlock while it takes down a TCP connection on which nothing ever came (its transport LARGE_DATA),
    and rclpy holds the interpreter lock meanwhile: no Python thread could end the process. So a POSIX timer calls
    `_exit` from a thread of the C library. Call it when nothing of one's own is left to be done.

    Raises:
        OSError: the timer cannot be made.
    """
    function = ctypes.cast(_libc._exit, ctypes.c_void_p).value
    event = _SigEvent(value=status, notify=_SIGEV_THREAD, function=function)
    timer = ctypes.c_void_p()
    spec = _TimerSpec(value_s=seconds)
    if _libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) or _libc.timer_settime(
        timer, 0, ctypes.byref(spec), None
    ):
        raise OSError(ctypes.get_errno(), "the timer that bounds the end of the process cannot be made")
