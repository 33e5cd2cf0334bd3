"""A machine: the facts that reports name, and its processors, memory, temperatures and GPU now.

It is read from /proc and /sys, and a card by NVML, or sysfs on a Jetson. Nothing here imports torch.
"""

import ctypes
import hashlib
import importlib
import math
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.settings.build_options import version_of
from torchperf_ros.workers.process_setup import prefer_this_process

_DIGITS: Final = 16
_PR_SET_CHILD_SUBREAPER: Final = 36
_TIMER_PRIORITY: Final = 80  # above cameras and nodes


def machine_facts(device: str = "cpu", proc: Path = Path("/proc")) -> dict[str, object]:
    """Processor, cores, memory, device and versions, as JSON values.

    `fingerprint` is a hash of those that latency depends on and that an update of software leaves as they
    are: `cpu`, `cores`, `memory_mib`, `device`, which is `cpu` or the name of a CUDA device. Two machines
    of one kind share it.
    """
    total = re.search(r"^MemTotal:\s+(\d+)", _text(proc / "meminfo"), re.MULTILINE)
    memory_mib = installed_mib(int(total[1]) / 1024 if total else 0.0)
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
    """How much of the machine's processor time others took since this object was made, or was asked.

    Own time is that of this process and its descendants. A descendant whose parent is killed becomes a
    child of this process, so that its time still counts after its end.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._signals = MachineSignals(os.getpid())

    def taken(self) -> tuple[float, float]:
        """The shares, 0 to 1, that other processes used here, and that the host took."""
        self._signals.scan()
        found = self._signals.read()
        stolen = found["steal_percent"] / 100
        return max(0.0, found["others_cpu_percent"] / 100 - stolen), stolen


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


_BUSY: Final = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; 3 and 4 are idle and iowait
_STEAL, _FIELDS = 7, 8
# Behind the name, see proc(5): ppid, utime, stime, cutime, cstime, starttime.
_STAT_WORDS: Final = (1, 11, 12, 13, 14, 19)
_PRESSURES: Final = {"cpu": "some", "memory": "full", "io": "some"}
_MOST_NAMED: Final = 3
_LOWEST_TRIP_C: Final = 40.0
_WORTH_LOOKING, _WORTH_NAMING = 0.005, 0.02  # of the processors
_WITH_VALUE: Final = {"-W", "-X", "-O", "-o"}  # options of interpreters that take another word
_INTERPRETERS: Final = ("python", "bash", "sh", "perl", "ruby", "node")
_MIB: Final = 1 << 20
# NVML's reasons for lower clocks that lead to an alert; a power cap or idle clocks are how cards
# work.
_THROTTLED: Final = {
    0x20: "thermal",
    0x40: "thermal, by hardware",
    0x08: "slowed down by hardware",
    0x80: "power brake",
}
_BY_BUS: Final = "PCI_BUS_ID"
_JETSON_GPUS: Final = ("gpu", "ga10b", "gv11b", "gp10b", "gm20b", "gb10b")


class _Process(NamedTuple):
    """A line of /proc/PID/stat: times in ticks; `reaped` is what its children took that have ended."""

    name: str
    parent: int
    ticks: int
    reaped: int
    started: int


class MachineSignals:
    """Reads the machine once a second; all processes are looked through only by `scan`.

    Attributes:
        too_hot_c: by thermal zone, the temperature from which on it throttles, where it says so.
        cpus: processors.
        memory_total_mib: of the machine.
    """

    def __init__(self, node: int, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        """Begin now; the node, by its process id, and what descends from it are the family."""
        self._node = node
        self._proc = proc
        self._family = {node}
        self._processes: dict[int, _Process] = {}
        self._scan_total = 0.0
        self._zones = _zones(sys)
        trips_c = {name: _trip_c(folder) for name, folder in self._zones.items()}
        self.too_hot_c = {name: trip_c for name, trip_c in trips_c.items() if trip_c < math.inf}
        lines = _text(proc / "stat").splitlines()
        self.cpus = max(1, sum(line.startswith("cpu") for line in lines) - 1)
        self.memory_total_mib = self._memory_mib().get("MemTotal", math.nan)
        self._cpu = self._cpu_ticks()
        self.scan()
        self._own = self._own_ticks()

    def read(self) -> dict[str, float]:
        """What happened since the last call, by name and unit as the records have it.

        NaN where the kernel is silent.

        `others_cpu_percent` is what processes outside the node's own family took of all processors,
        `steal_percent` what other guests of the host did; a pressure is the share of the last 10 s in which
        some (`cpu`, `io`) or all (`memory`) of the tasks waited.
        """
        cpu, own = self._cpu_ticks(), self._own_ticks()
        passed = [now - before for now, before in zip(cpu, self._cpu, strict=True)]
        percent = 100 / sum(passed) if sum(passed) > 0 else math.nan
        busy = sum(passed[field] for field in _BUSY)
        own_ticks = min(max(0, own - self._own), busy)
        self._cpu, self._own = cpu, own
        memory = self._memory_mib()
        return {
            "cpu_percent": busy * percent,
            "others_cpu_percent": (busy - own_ticks) * percent,
            "steal_percent": passed[_STEAL] * percent,
            "memory_available_mib": memory.get("MemAvailable", math.nan),
            "swap_used_mib": memory.get("SwapTotal", math.nan) - memory.get("SwapFree", math.nan),
            **{f"{name}_pressure_percent": self._pressure(name, word) for name, word in _PRESSURES.items()},
            **{f"{name}_c": number_in(folder / "temp") / 1000 for name, folder in self._zones.items()},
        }

    @property
    def family(self) -> frozenset[int]:
        return frozenset(self._family)

    def scan(self) -> list[tuple[str, float]]:
        """Look through all processes.

        The largest outside the family since the last scan, as (name, share 0 to 1).

        Also finds out which processes belong to the family by now. Takes some 20 us for each process of the machine.
        """
        before, self._processes = self._processes, dict(self._read_all())
        total = float(sum(self._cpu_ticks()))
        passed, self._scan_total = total - self._scan_total, total
        self._family = self._descendants()
        if not before or passed <= 0:
            return []
        took: dict[str, float] = {}
        for pid, process in self._processes.items():
            was = before.get(pid)
            ticks = process.ticks - (was.ticks if was and was.started == process.started else 0)
            if pid not in self._family and ticks / passed >= _WORTH_LOOKING:
                name = self._name(pid, process)
                took[name] = took.get(name, 0.0) + ticks / passed
        largest = sorted(took.items(), key=lambda item: -item[1])[:_MOST_NAMED]
        return [(name, share) for name, share in largest if share >= _WORTH_NAMING]

    def _name(self, pid: int, process: _Process) -> str:
        """Of an interpreter the module or script that it runs, otherwise as the kernel has it."""
        if not process.name.startswith(_INTERPRETERS):
            return process.name
        words = iter(_text(self._proc / str(pid) / "cmdline").split("\0")[1:])
        for word in words:
            if word in {"-m", "-c"}:
                what = next(words, "") if word == "-m" else ""
                return f"{process.name} {word} {what}".rstrip()
            if word in _WITH_VALUE:
                next(words, "")
            elif word and not word.startswith("-"):
                return f"{process.name} {Path(word).name}"
        return process.name

    def _descendants(self) -> set[int]:
        children: dict[int, set[int]] = {}
        for pid, process in self._processes.items():
            children.setdefault(process.parent, set()).add(pid)
        family, newest = {self._node}, {self._node}
        while newest:
            newest = set().union(*(children.get(pid, set()) for pid in newest)) - family
            family |= newest
        return family

    def _own_ticks(self) -> int:
        found = (self._read_one(pid) for pid in self._family)
        return sum(process.ticks + process.reaped for process in found if process is not None)

    def _read_all(self) -> Iterable[tuple[int, _Process]]:
        for name in filter(str.isdigit, os.listdir(self._proc)):
            if (process := self._read_one(int(name))) is not None:
                yield int(name), process

    def _read_one(self, pid: int) -> _Process | None:
        name, _, rest = _text(f"{self._proc}/{pid}/stat").partition("(")[2].rpartition(")")
        if not rest:  # it has ended
            return None
        words = rest.split()
        parent, user, system, children_user, children_system, started = (int(words[n]) for n in _STAT_WORDS)
        return _Process(name, parent, user + system, children_user + children_system, started)

    def _cpu_ticks(self) -> list[int]:
        words = _text(self._proc / "stat").partition("\n")[0].split()[1:]
        ticks = [int(word) for word in words[:_FIELDS]]
        return ticks + [0] * (_FIELDS - len(ticks))

    def _memory_mib(self) -> dict[str, float]:
        words = (line.split() for line in _text(self._proc / "meminfo").splitlines())
        return {word[0].rstrip(":"): int(word[1]) / 1024 for word in words if len(word) > 1}

    def _pressure(self, name: str, kind: str) -> float:
        """Pressure stall information, see the kernel's Documentation/accounting/psi.rst; NaN without it."""
        for line in _text(self._proc / "pressure" / name).splitlines():
            words = line.split()
            if words and words[0] == kind:
                return float(words[1].partition("=")[2])
        return math.nan


def _zones(sys: Path) -> dict[str, Path]:
    zones: dict[str, Path] = {}
    for folder in sorted((sys / "class" / "thermal").glob("thermal_zone*")):
        name = _text(folder / "type").strip() or folder.name
        zones[name if name not in zones else f"{name}_{folder.name.removeprefix('thermal_zone')}"] = folder
    return zones


def _trip_c(zone: Path) -> float:
    """The lowest temperature at which the kernel slows something down or worse.

    Infinity if the zone has none.

    See the kernel's Documentation/driver-api/thermal/sysfs-api.rst. Some firmware names absurd ones.
    """
    trips = [
        number_in(path.with_name(path.name.replace("_type", "_temp"))) / 1000
        for path in zone.glob("trip_point_*_type")
        if _text(path).strip() in {"passive", "hot", "critical"}
    ]
    return min((celsius for celsius in trips if celsius > _LOWEST_TRIP_C), default=math.inf)


def number_in(path: Path) -> float:
    """The number that a file of the kernel holds; NaN where there is none."""
    try:
        return float(_text(path))
    except ValueError:
        return math.nan


def _text(path: Path | str) -> str:
    """Of a file of the kernel; empty where this kernel does not have it, or the device sleeps."""
    try:
        with open(path, "rb", buffering=0) as file:  # without the layers of a text file, half of the time
            return file.readall().decode(errors="replace")
    except OSError:
        return ""


class Gpu:
    """A card, or none.

    Attributes:
        word: what it is, or why there is none.
        throttled: why its clocks are lower than they could be, as of the last look; empty if they are not.
    """

    def __init__(self, word: str) -> None:
        self.word, self.throttled = word, ""

    def read(self) -> dict[str, float]:
        """The card now, by name and unit as the records have it, NaN where it does not say.

        Empty without one.

        `gpu_used_percent` is the share of the last moment in which a kernel ran.
        """
        return {}


class Nvml(Gpu):
    """A card by NVML, or a part of one (MIG)."""

    def __init__(self, nvml: Any, index: int, environment: Mapping[str, str] = os.environ) -> None:  # noqa: ANN401
        """Open the card that CUDA calls by this index.

        Args:
            nvml: the module, which has no types.
            index: CUDA's, among those that are visible.
            environment: `CUDA_VISIBLE_DEVICES` names these in their order, by NVML's index or by the first
                letters of a UUID; without it, workers have CUDA number the cards as NVML does, see
                `choose_device`.

        Raises:
            nvml.NVMLError: there is no driver, or no such card.
            LookupError: which card it is cannot be known.
        """
        self._nvml = nvml
        nvml.nvmlInit()
        self._card = self._handle(index, environment)
        super().__init__(str(nvml.nvmlDeviceGetName(self._card)))

    def _handle(self, index: int, environment: Mapping[str, str]) -> Any:  # noqa: ANN401
        nvml = self._nvml
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        names = (
            [str(index)]
            if visible is None
            else [name.strip() for name in visible.split(",")][index : index + 1]
        )
        if not names:
            raise LookupError(f"CUDA_VISIBLE_DEVICES is {visible!r}, which has no device {index}")
        (name,) = names
        if name.isdecimal():
            cards = nvml.nvmlDeviceGetCount()
            if cards > 1 and environment.get("CUDA_DEVICE_ORDER", _BY_BUS) != _BY_BUS:
                raise LookupError(f"CUDA_DEVICE_ORDER is not {_BY_BUS}, and there are {cards} cards")
            return nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        for number in range(nvml.nvmlDeviceGetCount()):
            card = nvml.nvmlDeviceGetHandleByIndex(number)
            if str(nvml.nvmlDeviceGetUUID(card)).startswith(name):
                return card
        raise LookupError(f"CUDA_VISIBLE_DEVICES names {name}, and no card has that UUID")

    def read(self) -> dict[str, float]:
        nvml, card = self._nvml, self._card
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))
        bits = 0 if math.isnan(reasons) else int(reasons)
        self.throttled = "; ".join(why for bit, why in _THROTTLED.items() if bits & bit)
        return {
            "gpu_temperature_c": self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu_clock_mhz": self._ask(lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
            "gpu_used_percent": self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu),
            "gpu_memory_used_mib": self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(card).used / _MIB),
            "gpu_memory_total_mib": self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(card).total / _MIB),
            "gpu_throttled": float(bool(self.throttled)),
        }

    def _ask(self, question: Callable[[], float]) -> float:
        """The answer, NaN where this card or driver does not have it."""
        try:
            return float(question())
        except self._nvml.NVMLError:
            return math.nan


class JetsonGpu(Gpu):
    """The GPU of a Jetson by sysfs.

    Its temperature is among the machine's thermal zones, its memory the machine's.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"Jetson, {folder.name}")
        self._folder = folder

    def read(self) -> dict[str, float]:
        return {
            "gpu_clock_mhz": number_in(self._folder / "cur_freq") / 1_000_000,
            "gpu_used_percent": number_in(self._folder / "device" / "load") / 10,
        }


def gpu_source(device: str, sys: Path = Path("/sys")) -> Gpu:
    """The card that a node of this parameter `device` uses, asked for once."""
    if device == "cpu":
        return Gpu("not used")
    for folder in sorted((sys / "class" / "devfreq").glob("*")):
        if any(name in folder.name for name in _JETSON_GPUS) and (folder / "cur_freq").exists():
            return JetsonGpu(folder)
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Gpu("not watched: nvidia-ml-py is not installed")
    try:
        return Nvml(nvml, int(device.partition(":")[2] or 0))
    except nvml.NVMLError as error:
        return Gpu(f"none: {error}")
    except LookupError as error:
        return Gpu(f"not watched: {error}")


def time_barely(cpu: int, every_ns: int) -> None:
    """Wake up on this processor again and again, and print each time that it was late by a millisecond.

    It prints the ROS time and the lateness, both in ns. So long the processor ran nothing of this priority.
    """
    os.sched_setaffinity(0, [cpu])
    due_ns = time.monotonic_ns()
    while True:
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        late_ns = time.monotonic_ns() - due_ns
        if late_ns > NS_PER_MS:
            # in one piece, as others write to the same file
            print(f"[{time.time_ns()}, {late_ns}]\n", end="", flush=True)
            due_ns += late_ns
        due_ns += every_ns


if __name__ == "__main__":
    prefer_this_process(_TIMER_PRIORITY)
    first, *others = sorted(os.sched_getaffinity(0))
    # Each 2 ms; where there are many processors, 2,000 times a second in all.
    rate_ns = max(2 * NS_PER_MS, (1 + len(others)) * NS_PER_MS // 2)
    for other in others:
        threading.Thread(target=time_barely, args=(other, rate_ns), daemon=True).start()
    time_barely(first, rate_ns)
