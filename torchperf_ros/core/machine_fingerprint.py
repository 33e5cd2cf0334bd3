"""What a run was measured on, and whether two runs were measured on the like: no torch, so that anyone may ask."""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Final

_KIB_PER_MIB: Final = 1024
_DIGITS: Final = 16


def machine_facts(device: str = "cpu", proc: Path = Path("/proc")) -> dict[str, object]:
    """Processor, cores, memory, device and versions, as JSON values.

    `fingerprint` is a hash of those that latency depends on and that an update of software leaves as they are: `cpu`,
    `cores`, `memory_mib`, `device`. Two machines of one kind share it.

    Args:
        device: what the models ran on: `cpu`, or the name of a CUDA device.
        proc: the kernel's view of the machine, or a test's.
    """
    hardware = {
        "cpu": cpu_model(proc),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": installed_mib(_total_mib(proc)),
        "device": device,
    }
    told = "\n".join(f"{key}={value}" for key, value in hardware.items())
    return {
        **hardware,
        "torch": _version("torch"),
        "python": platform.python_version(),
        "fingerprint": hashlib.sha256(told.encode()).hexdigest()[:_DIGITS],
    }


def cpu_model(proc: Path = Path("/proc")) -> str:
    """The processor's name; where it tells none (Arm), the board's, else the architecture."""
    for line in _text(proc / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return _text(proc / "device-tree" / "model").strip("\0\n ") or platform.machine()


def installed_mib(seen_mib: float) -> int:
    """The memory that is built in, from what the kernel leaves of it: the next size of 2, 3, 4, 6, 8, 12, ... MiB.

    A kernel keeps a few percent for itself, another version a few more; the machine is the same. 0 stays 0.
    """
    power = 2
    while seen_mib > power:
        if seen_mib <= power * 3 // 2:
            return power * 3 // 2
        power *= 2
    return power if seen_mib > 0 else 0


def _total_mib(proc: Path) -> float:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) / _KIB_PER_MIB
    return 0.0


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
