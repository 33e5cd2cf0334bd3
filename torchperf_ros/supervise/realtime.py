"""Set the node's process up for deadlines: scheduling, memory, garbage collection. Each step says what it came to."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

from torchperf_ros.core.thread_nice import set_nice

SWITCH_INTERVAL_S = 1e-4
_NICE = -10
_MCL_CURRENT_AND_FUTURE = 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_PR_SET_TIMERSLACK = 29
_BACKGROUND_PRIORITY = 1
_libc = ctypes.CDLL(None, use_errno=True)


def keep_freed_memory(largest_bytes: int) -> None:
    """Let glibc keep freed blocks up to this size instead of returning their pages to the kernel.

    A message of a few MB otherwise costs a page fault for every 4 KiB, several times over, each time it is taken: that
    was 3 of the 4 ms that taking a 2.7 MB image took.
    """
    if hasattr(_libc, "mallopt"):  # glibc; other C libraries have no such habit to change
        _libc.mallopt(_M_MMAP_THRESHOLD, largest_bytes)
        _libc.mallopt(_M_TRIM_THRESHOLD, 8 * largest_bytes)


def prefer_this_process(priority: int) -> str:
    """SCHED_FIFO for every thread of the process; where that is not permitted nice, else a word of warning.

    Args:
        priority: 1 to 98; 0 leaves the scheduler alone.

    Returns:
        What holds now: `fifo 10`, `nice -10`, `normal`, or `normal: ...` with what to do about it.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    if not priority:
        return "normal"
    try:
        _for_each_thread(lambda thread: os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority)))
    except PermissionError:
        try:
            set_nice(os.getpid(), _NICE)
        except PermissionError:
            return "normal: SCHED_FIFO and nice are not permitted; give the user an rtprio limit, or CAP_SYS_NICE"
        return f"nice {_NICE}"
    return f"fifo {priority}"


def step_back() -> None:
    """Make the calling thread, which no frame waits for, give way to the process's others.

    It stays real-time where they are: a thread of normal priority that holds the interpreter lock would make them wait
    for the whole machine.
    """
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_BACKGROUND_PRIORITY))


def stop_collecting() -> None:
    """Take what is there out of garbage collection, and collect from now on only when asked to."""
    gc.collect()
    gc.freeze()
    gc.disable()


def lock_memory() -> str:
    """Lock the process in memory; returns `locked`, or why not."""
    if _libc.mlockall(_MCL_CURRENT_AND_FUTURE) == 0:
        return "locked"
    return f"not locked: {os.strerror(ctypes.get_errno())}; raise the memlock limit"


def pin_this_process(cpus: tuple[int, ...]) -> None:
    """Let every thread of the process run on these CPUs only.

    Raises:
        OSError: a CPU that is not there.
    """
    _for_each_thread(lambda thread: os.sched_setaffinity(thread, cpus))


def _for_each_thread(act: Callable[[int], None]) -> None:
    """Do this to every thread of the process; one that ends meanwhile does not matter."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            act(int(thread.name))
