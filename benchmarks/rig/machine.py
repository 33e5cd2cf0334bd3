"""What the figures were measured on."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import psutil


def machine() -> dict[str, object]:
    """Processor, kernel, versions, and how busy others keep the machine (takes a second)."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "rclpy": _version("rclpy"),
        "fastdds": _version("ros-fastdds"),
        "fifo_permitted": _fifo_permitted(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "others_cpu_percent": psutil.cpu_percent(interval=1.0),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


class Others:
    """How much of the machine other processes used since this object was made, by processor time."""

    def __init__(self) -> None:
        """Begin."""
        self._busy_s, self._all_s = _processor_s()
        self._own_s = _own_s()

    def percent(self) -> float:
        """Of the whole machine, 0 to 100. Own processes count once they have ended and were waited for."""
        busy_s, all_s = _processor_s()
        others_s = busy_s - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, 100.0 * others_s / max(all_s - self._all_s, 1e-9))


def _processor_s() -> tuple[float, float]:
    """Seconds in which processors were busy, and all seconds."""
    times = psutil.cpu_times()
    idle_s = times.idle + times.iowait
    return sum(times[:7]) - idle_s + times.steal, sum(times[:7]) + times.steal


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _fifo_permitted() -> bool:
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, policy, parameters)
    return True
