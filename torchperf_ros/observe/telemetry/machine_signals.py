"""What the machine is doing.

Processors, memory, pressure, temperatures; read from /proc and /sys, cheaply.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; 3 and 4 are idle and iowait
_STEAL, _FIELDS = 7, 8
_STAT_WORDS = (
    1,
    11,
    12,
    13,
    14,
    19,
)  # behind the name, see proc(5): ppid, utime, stime, cutime, cstime, starttime
_KIB_PER_MIB = 1024
_PRESSURES = {"cpu": "some", "memory": "full", "io": "some"}
_NAMES = 3
_LOWEST_TRIP_C = 40.0
_WORTH_LOOKING, _WORTH_NAMING = 0.005, 0.02  # of the processors
_WITH_VALUE = {"-W", "-X", "-O", "-o"}  # options of interpreters that take another word
_INTERPRETERS = ("python", "bash", "sh", "perl", "ruby", "node")


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
    """

    def __init__(self, node: int, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        """Begin now; the node, by its process id, and what descends from it are the family."""
        self._node = node
        self._proc = proc
        self._family = {node}
        self._processes: dict[int, _Process] = {}
        self._scan_total = 0.0
        self._zones = _zones(sys)
        self.too_hot_c = {
            name: c for name, folder in self._zones.items() if (c := _trip_c(folder)) < math.inf
        }
        self.cpus = max(
            1, sum(line.startswith("cpu") for line in _text(proc / "stat").splitlines()) - 1
        )  # processors
        self.memory_total_mib = self._memory_mib().get("MemTotal", math.nan)  # of the machine
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
        """The node and its descendants, as of the last scan."""
        return frozenset(self._family)

    def scan(self) -> list[tuple[str, float]]:
        """Look through all processes.

        The largest outside the family since the last scan, as (name, share 0 to 1).

        Also finds out who belongs to the family by now. Takes some 20 us for each process of the machine.
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
        largest = sorted(took.items(), key=lambda item: -item[1])[:_NAMES]
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
        family = {self._node}
        children: dict[int, list[int]] = {}
        for pid, process in self._processes.items():
            children.setdefault(process.parent, []).append(pid)
        waiting = [self._node]
        while waiting:
            for child in children.get(waiting.pop(), []):
                if child not in family:
                    family.add(child)
                    waiting.append(child)
        return family

    def _own_ticks(self) -> int:
        found = (self._read_one(pid) for pid in self._family)
        return sum(process.ticks + process.reaped for process in found if process is not None)

    def _read_all(self) -> Iterable[tuple[int, _Process]]:
        for entry in os.scandir(self._proc):
            if entry.name.isdigit() and (process := self._read_one(int(entry.name))) is not None:
                yield int(entry.name), process

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
        return {word[0].rstrip(":"): int(word[1]) / _KIB_PER_MIB for word in words if len(word) > 1}

    def _pressure(self, name: str, kind: str) -> float:
        """Pressure stall information, see the kernel's Documentation/accounting/psi.rst; NaN without it."""
        for line in _text(self._proc / "pressure" / name).splitlines():
            words = line.split()
            if words and words[0] == kind:
                return float(words[1].partition("=")[2])
        return math.nan


def _zones(sys: Path) -> dict[str, Path]:
    """Thermal zones by type; of the same type, by number."""
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
