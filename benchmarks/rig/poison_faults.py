"""Faults that follow a frame, by the step in which they happen. Without torch: the benchmark reads their names."""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn

import numpy as np

from torchperf_ros.config.message_types import header, message_class

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
