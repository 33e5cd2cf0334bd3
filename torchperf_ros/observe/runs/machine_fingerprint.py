"""The one description of a machine, for all that report figures; it does not import torch."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import time
from pathlib import Path
from typing import Final

import psutil

from torchperf_ros.settings.build_options import version_of

_KIB_PER_MIB: Final = 1024
_DIGITS: Final = 16
_PR_SET_CHILD_SUBREAPER: Final = 36


def machine_facts(device: str = "cpu", proc: Path = Path("/proc")) -> dict[str, object]:
    """Processor, cores, memory, device and versions, as JSON values.

    `fingerprint` is a hash of those that latency depends on and that an update of software leaves as they
    are: `cpu`, `cores`, `memory_mib`, `device`, which is `cpu` or the name of a CUDA device. Two machines
    of one kind share it.
    """
    total = re.search(r"^MemTotal:\s+(\d+)", _text(proc / "meminfo"), re.MULTILINE)
    memory_mib = installed_mib(int(total[1]) / _KIB_PER_MIB if total else 0.0)
    cores = len(os.sched_getaffinity(0))
    hardware = {"cpu": cpu_model(proc), "cores": cores, "memory_mib": memory_mib, "device": device}
    text = "\n".join(f"{key}={value}" for key, value in hardware.items())
    return {
        **hardware,
        "torch": version_of("torch"),
        "python": platform.python_version(),
        "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:_DIGITS],
    }


def machine_now(device: str = "cpu") -> dict[str, object]:
    """`machine_facts`, and what else may matter when the figures are read: kernel, load and date."""
    return {
        **machine_facts(device),
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


class ProcessorShare:
    """How much of the machine's processor time others took since this object was made.

    Own time is that of this process and its descendants. A descendant whose parent is killed becomes a
    child of this process, so that its time still counts after its end.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._start = _processor_s()

    def of_others(self) -> float:
        """The share of processor time that other processes used here, 0 to 1."""
        busy_s, own_s, _, all_s = self._since()
        return min(max(busy_s - own_s, 0.0) / all_s, 1.0)

    def stolen(self) -> float:
        """The share that the host of a virtual machine took for others, 0 to 1."""
        _, _, stolen_s, all_s = self._since()
        return stolen_s / all_s

    def _since(self) -> tuple[float, float, float, float]:
        busy_s, own_s, stolen_s, all_s = (
            end - start for start, end in zip(self._start, _processor_s(), strict=True)
        )
        return busy_s, own_s, stolen_s, max(all_s, 1e-9)


def _processor_s() -> tuple[float, float, float, float]:
    """Seconds of all processors so far.

    Busy, busy for this process and its children, taken by the host, and all.
    """
    times = psutil.cpu_times()
    here_s = times.user + times.nice + times.system + times.irq + times.softirq
    return here_s, _own_s(), times.steal, here_s + times.idle + times.iowait + times.steal


def _own_s() -> float:
    """Seconds of this process and its descendants, ended ones included."""
    seconds = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(child.cpu_times()[:4])
    return seconds


def cpu_model(proc: Path = Path("/proc")) -> str:
    """The processor's name; where it names none (Arm), the board's, else the architecture."""
    named = re.search(r"^model name\s*:(.*)", _text(proc / "cpuinfo"), re.MULTILINE)
    board = _text(proc / "device-tree" / "model").strip("\0\n ")
    return named[1].strip() if named else board or platform.machine()


def installed_mib(seen_mib: float) -> int:
    """The memory that is built in, from what the kernel leaves of it.

    The next size of 2, 3, 4, 6, 8, 12, ... MiB.

    A kernel keeps a few percent for itself, another version a few more; the machine is the same. 0 stays 0.
    """
    sizes = (size for power in range(1, 60) for size in (1 << power, 3 << (power - 1)))
    return next(size for size in sizes if size >= seen_mib) if seen_mib > 0 else 0


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
