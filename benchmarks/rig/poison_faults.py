"""Faults that follow a frame, by the step in which they happen.

Without torch: the benchmark reads their names.
"""

import ctypes
import mmap
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn

import numpy as np

from torchperf_ros.api.messages import header, message_class

_SLEEP_S: Final = 0.3
_FOR_EVER_S: Final = 3600.0
_BUSY_S: Final = 2.0
_FLOOD_BYTES: Final = 10_000_000
_ALLOCATED_BYTES: Final = 1_500_000_000
_FRAME_ID_BYTES: Final = 60_000_000
_EXIT_STATUS: Final = 3


class Unprintable(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no words")


def _raise(error: BaseException) -> Callable[[], NoReturn]:
    def act() -> NoReturn:
        raise error

    return act


def _print_and_exit() -> NoReturn:
    print("the model has seen something terrible", flush=True)
    os._exit(_EXIT_STATUS)


def _segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def _abort() -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def _fork() -> None:
    if os.fork() == 0:
        time.sleep(_FOR_EVER_S)
        os._exit(0)
    os._exit(_EXIT_STATUS)  # the child keeps every descriptor open


def _recurse() -> object:
    return _recurse()


def _spin_until(end_s: float) -> None:
    while time.monotonic() < end_s:
        pass


def _eight_busy_threads() -> None:
    end_s = time.monotonic() + _BUSY_S
    for _ in range(8):
        threading.Thread(target=_spin_until, args=(end_s,), daemon=True).start()


# -- what the next worker, or the whole node, lacks when this one has died

_LACKS_S: Final = 2.0
_UNENDED_S: Final = 9.0  # longer than the node waits for the end of what it has killed
_NOBODY: Final = 65_534
_LOW_DESCRIPTORS: Final = 16  # which a node has in use from its start to its end
_PTRACE_SEIZE, _PTRACE_O_TRACEEXIT = 0x4206, 0x40
_no_fork_until_ns = memoryview(mmap.mmap(-1, 8)).cast(
    "Q"
)  # shared with the processes that are forked from this one
_fork_at_once = os.fork


def obey_limit() -> None:
    """Have this process, from which workers are forked, be at its RLIMIT_NPROC while a fault wants it."""
    os.fork = _fork_within_limit


def _fork_within_limit() -> int:
    if time.monotonic_ns() >= _no_fork_until_ns[0]:
        return _fork_at_once()
    users, (least, most) = os.getresuid(), resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, most))
    try:
        if users[0] == 0:  # whom the limit does not bind
            os.setresuid(_NOBODY, _NOBODY, 0)
        return _fork_at_once()  # which the kernel refuses
    finally:
        os.setresuid(*users)
        resource.setrlimit(resource.RLIMIT_NPROC, (least, most))


def _die_without_successor() -> NoReturn:
    _no_fork_until_ns[0] = time.monotonic_ns() + round(_LACKS_S * 1e9)
    os._exit(_EXIT_STATUS)


def _beside(act: Callable[[], object], then_s: float, last: Callable[[], object]) -> None:
    """Do this in a process that lives on when this one dies, and so much later something else.

    Wait for the first.
    """
    ready, begun = os.pipe()
    if _fork_at_once() == 0:
        os.setsid()
        act()
        os.closerange(0, begun)
        os.closerange(begun + 1, 1024)
        os.close(begun)
        time.sleep(then_s)
        last()
        os._exit(0)
    os.close(begun)
    os.read(ready, 1)


def _hang_and_never_end() -> None:
    """As in a driver that does not return.

    Who traces this process stops it on its way out, and SIGKILL is no help.
    """
    libc, pid = ctypes.CDLL(None, use_errno=True), os.getpid()

    def trace() -> None:
        libc.ptrace(_PTRACE_SEIZE, pid, None, _PTRACE_O_TRACEEXIT)

    _beside(trace, _UNENDED_S, bool)
    time.sleep(_FOR_EVER_S)


def _use_up_descriptors() -> NoReturn:
    """Of the node, of which this is a fork's fork's fork."""
    pid = os.getpid()
    for _ in range(3):
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    least = min(set(range(_LOW_DESCRIPTORS + 1)) - used, default=_LOW_DESCRIPTORS)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    def give_back() -> None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    _beside(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (least, before[1])), _LACKS_S, give_back)
    os._exit(_EXIT_STATUS)


PREPROCESS: Final[dict[str, Callable[[], object]]] = {
    "sleep in preprocess": lambda: time.sleep(_SLEEP_S),
    "hang": lambda: time.sleep(_FOR_EVER_S),
    "sys.exit": lambda: sys.exit(_EXIT_STATUS),
    "print and exit": _print_and_exit,
    "abort": _abort,
    "segfault": _segfault,
    "closerange": lambda: os.closerange(0, 1024),
    "SIGSTOP of itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit with a forked child": _fork,
    "10 MB on stdout": lambda: sys.stdout.write("many words\n" * (_FLOOD_BYTES // 11)),
    "SystemExit": _raise(SystemExit("enough")),
    "KeyboardInterrupt": _raise(KeyboardInterrupt()),
    "RecursionError": _recurse,
    "unprintable error": _raise(Unprintable()),
    "eight busy threads": _eight_busy_threads,
    "1.5 GB allocated": lambda: np.ones(_ALLOCATED_BYTES // 8).sum(),
    "real-time signal": lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1),
    "exit at RLIMIT_NPROC": _die_without_successor,
    "hang that SIGKILL does not end": _hang_and_never_end,
    "exit while the node has no descriptor left": _use_up_descriptors,
}
OBSERVE: Final[dict[str, Callable[[], object]]] = {
    "hang in observe": lambda: time.sleep(_FOR_EVER_S),
    "segfault in observe": _segfault,
}
POSTPROCESS: Final[dict[str, Callable[[], object]]] = {"sleep in postprocess": lambda: time.sleep(_SLEEP_S)}
OUTPUTS: Final[dict[str, Callable[[int], object]]] = {
    "None as output": lambda _: None,
    "another type as output": lambda _: {"path": []},
    "frame_id of 60 MB": lambda stamp_ns: message_class("nav_msgs/msg/Path")(
        header=header(stamp_ns, "x" * _FRAME_ID_BYTES), poses=[]
    ),
}
FAULTS: Final = (*PREPROCESS, *OBSERVE, *POSTPROCESS, *OUTPUTS)
"""The image's first byte is 0 for none, or 1 and up for the faults in this order."""
