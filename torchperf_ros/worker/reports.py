"""What a worker says to the node beside its answers, and errors in words."""

import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.errors import BadInput, ProtocolError, TorchperfError
from torchperf_ros.api.histories import history_bytes
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.engines.device import Device
from torchperf_ros.worker.tier import InvalidOutput
from torchperf_ros.workers.control import (
    MemoryReport,
    Remark,
    Report,
    TierFacts,
    TierReport,
    pack_readable,
)
from torchperf_ros.workers.process_setup import kept_bytes

EVERY_S = 1.0
_OWN_CODE = Path(__file__).resolve().parents[1]
# Torch and other packages that are installed beside it, and Python's own.
_OTHERS_CODE = (_OWN_CODE, Path(torch.__file__).parents[1], Path(sysconfig.get_path("stdlib")))


class Reports:
    """The worker's end of the control socket, and what it reports once a second."""

    def __init__(self, control: socket.socket, every_s: float = EVERY_S) -> None:
        self._control = control
        self._every_s = every_s
        self._reported_at_s = 0.0
        self._unobserved = 0
        self._why_unobserved = ""
        self._is_too_long = False  # the report of the tiers

    def say(self, report: Report) -> None:
        """Send a report; its texts are cut until it fits."""
        self._control.send(pack_readable(report))

    def warn(self, text: str) -> None:
        """A line for the node's log."""
        self.say(Remark(text))

    def alert(self, text: str) -> None:
        """A line for the node's log and `/perf/anomaly`, once."""
        self.say(Remark(text, alert=True))

    def unobserved(self, frame: str, reason: str) -> None:
        """Count a frame that the adapter could not observe."""
        self._unobserved += 1
        self._why_unobserved = f"{frame}: {reason}"

    def tick(self, device: Device, facts: Callable[[], Sequence[TierFacts]], out_of_memory: int) -> None:
        """Once a second, after an answer: memory, tiers, and frames that the adapter could not observe."""
        now_s = time.monotonic()
        if now_s - self._reported_at_s < self._every_s:
            return
        self._reported_at_s = now_s
        if self._unobserved:
            self.warn(f"{self._unobserved} frames not observed, the last one {self._why_unobserved}")
            self._unobserved = 0
        kept = {"kept": found} if (found := kept_bytes()) is not None else {}
        self.say(MemoryReport({"history": history_bytes(), **kept, **device.memory_bytes()}))
        try:
            self.say(TierReport(tuple(facts()), out_of_memory))
        except ProtocolError as error:  # the worker can serve all the same
            if not self._is_too_long:
                self.warn(f"the report of the tiers is left out from now on: {error}")
            self._is_too_long = True


def failure_of(error: BaseException, adapter: Adapter) -> tuple[Outcome, bytes]:
    """The outcome of a frame that ended in this error, and the reason in words."""
    match error:
        case BadInput():
            return Outcome.BAD_INPUT, readable(error)
        case InvalidOutput():
            return Outcome.INVALID, readable(error)
        case TorchperfError():
            return Outcome.ERROR, readable(error) + _last_calls(error.__cause__)
    words = f"{type(error).__name__}: ".encode() + readable(error)
    return Outcome.ERROR, words + place_of(error, adapter).encode() + _last_calls(error)


def of_start(error: BaseException, adapter: str) -> str:
    """Why a worker could not start: a line with adapter and user's line, then the calls from there on.

    The calls that lead to the user's code are left out; without any of the user's, all are there.
    """
    calls, place = error.__traceback__, ""
    while calls and Path(calls.tb_frame.f_code.co_filename).is_relative_to(_OWN_CODE):
        calls = calls.tb_next
    for called in traceback.extract_tb(calls):
        file = Path(called.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in _OTHERS_CODE):
            place = f" ({file.name}:{called.lineno})"
    words = f"{type(error).__name__}: {readable(error).decode()}{place}"
    lines = traceback.format_exception(type(error), error, calls or error.__traceback__)
    whose = f"adapter {adapter!r}: " if place else ""
    return f"{whose}{words}\n{readable(''.join(lines)).decode()}"


def readable(reported: BaseException | str) -> bytes:
    """As UTF-8, of texts that hold characters which have none, and of errors that have no text."""
    try:
        return str(reported).encode(errors="replace")
    except BaseException as error:  # the user's class runs here
        return f"its text cannot be had: {type(error).__name__}".encode()


def place_of(error: BaseException, adapter: Adapter) -> str:
    """The last line in the adapter's own file that an error came through; empty if none."""
    own = getattr(sys.modules.get(type(adapter).__module__), "__file__", None)
    lines = [
        line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == own
    ]
    return f" ({Path(own).name}:{lines[-1]})" if own and lines else ""


def _last_calls(error: BaseException | None) -> bytes:
    """The end of its traceback, from the next line on; nothing where there is none."""
    calls = traceback.format_exception(type(error), error, error.__traceback__, limit=-4) if error else []
    return readable("".join(["\n", *calls])) if calls else b""
