"""Causes of trouble in the machine.

Load by others, memory that runs out, heat, a card that is throttled.
"""

import math
from collections import deque
from collections.abc import Mapping

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.observe.telemetry.machine_signals import MachineSignals
from torchperf_ros.observe.telemetry.machine_signals_gpu import Gpu
from torchperf_ros.observe.watch.signals import alert, number, since

_SCAN_S = 5.0
# of the processors: from here on, taken by others while deadlines are missed, is an alert
_OTHERS_PERCENT = 30.0
_STEAL_PERCENT = 10.0
_HARM_S = 5  # seconds that a missed deadline is remembered
_FEWEST_MISSES = 2
_LEVELS = ((2.0, Level.ERROR), (5.0, Level.WARN))  # percent of the memory that is available
_PRESSURE_PERCENT = 10.0  # of the time in which every task waited for memory
_CONFIRM_S = {"load": 0}  # after the first second in which it is so; another one for all else


class MachineWatch:
    """Judges the machine once a second, by what the stages suffered meanwhile."""

    def __init__(self, signals: MachineSignals, gpu: Gpu) -> None:
        self.values: dict[str, float] = {}  # what was read last, by name
        self._signals = signals
        self._gpu = gpu
        self._scanned_s = 0.0
        self._misses: deque[int] = deque(maxlen=_HARM_S)
        self._since: dict[str, float] = {}
        self._named = ""

    @property
    def others_percent(self) -> str:
        """Of the processors that other processes took in the last second; empty if unknown."""
        share = self.values.get("others_cpu_percent", math.nan)
        return "" if math.isnan(share) else f"{share:.0f}"

    def read(self, time_s: float) -> None:
        """Read everything; then `values` and `others_percent` are those of the last second."""
        self.values = self._signals.read() | self._gpu.read()
        if time_s >= self._scanned_s + _SCAN_S:
            self._scan(time_s)

    def judge(self, time_s: float, missed: int, *, harmed: bool) -> list[Alert]:
        """What is a cause of trouble now, by what was read last.

        In the last second all stages `missed` so many deadlines; if `harmed`, one was late or slower than
        usual.
        """
        self._misses.append(missed)
        found = [
            self._load(time_s, harmed=harmed or sum(self._misses) >= _FEWEST_MISSES),
            self._memory(time_s),
            *(self._heat(time_s, zone, trip_c) for zone, trip_c in self._signals.too_hot_c.items()),
            self._throttled(time_s),
            self._gpu_memory(time_s),
        ]
        return [one for one in found if one is not None]

    def _load(self, time_s: float, *, harmed: bool) -> Alert | None:
        others, begins = self.values["others_cpu_percent"], "load" not in self._since
        if not self._lasts("load", time_s, is_so=harmed and others >= _OTHERS_PERCENT):
            return None
        if begins and time_s > self._scanned_s and not self._scan(time_s):
            return None  # it may have been the node's own: a worker or compiler that has just begun
        misses, cpus, steal = sum(self._misses), self._signals.cpus, self.values["steal_percent"]
        harm = f"{misses} frame{'' if misses == 1 else 's'} had no own result in time"
        text = f"other processes took {others:.0f}% of the CPU ({cpus} cores) while "
        text += harm if misses else "answers took longer than usual"
        text += f": {self._named}" if self._named else ""
        if steal >= _STEAL_PERCENT:
            text += f"; {steal:.0f}% went to other guests of the host"
        more = {"misses": str(misses), "processes": self._named, "cores": str(cpus)}
        return self._alert_if(True, "load", text, time_s, (others, _OTHERS_PERCENT, "%"), more=more)

    def _scan(self, time_s: float) -> bool:
        """Look through the processes; False if the node's family has grown since the last time."""
        before = self._signals.family
        named = self._signals.scan()
        self._named = ", ".join(f"{name} {share:.0%}" for name, share in named)
        self._scanned_s = time_s
        return self._signals.family <= before

    def _memory(self, time_s: float) -> Alert | None:
        left_mib, stalled = self.values["memory_available_mib"], self.values["memory_pressure_percent"]
        percent = 100 * left_mib / self._signals.memory_total_mib
        level = next((level for least, level in _LEVELS if percent < least), Level.OK)
        text = f"{percent:.1f}% of the memory is left ({left_mib:.0f} MiB)"
        if stalled >= _PRESSURE_PERCENT:
            level = max(level, Level.WARN)
            text += f", every process waited for memory {stalled:.0f}% of the time"
        numbers = (percent, _LEVELS[-1][0], "%")
        return self._alert_if(level > Level.OK, "memory", text, time_s, numbers, level)

    def _heat(self, time_s: float, zone: str, trip_c: float) -> Alert | None:
        now_c = self.values[f"{zone}_c"]
        text = f"{zone} {now_c:.0f} C, slowed down from {trip_c:.0f} C on"
        return self._alert_if(now_c >= trip_c, f"temperature of {zone}", text, time_s, (now_c, trip_c, "C"))

    def _throttled(self, time_s: float) -> Alert | None:
        why = self._gpu.throttled
        hot_c, clock_mhz = (
            self.values.get(f"gpu_{word}", math.nan) for word in ("temperature_c", "clock_mhz")
        )
        more = {"reasons": why, "clock_mhz": number(clock_mhz)}
        text = f"throttled ({why}), {hot_c:.0f} C, {clock_mhz:.0f} MHz"
        return self._alert_if(bool(why), "gpu", text, time_s, (hot_c, math.nan, "C"), more=more)

    def _gpu_memory(self, time_s: float) -> Alert | None:
        used, total = (self.values.get(f"gpu_memory_{word}_mib", math.nan) for word in ("used", "total"))
        percent, least = 100 * (1 - used / total), _LEVELS[0][0]
        text = f"{percent:.1f}% of the card's memory is left ({total - used:.0f} MiB)"
        return self._alert_if(percent < least, "gpu memory", text, time_s, (percent, least, "%"))

    def _lasts(self, what: str, time_s: float, *, is_so: bool) -> bool:
        """Whether something has been so in each second for long enough."""
        if not is_so:
            self._since.pop(what, None)
            return False
        return time_s - self._since.setdefault(what, time_s) >= _CONFIRM_S.get(what, 1)

    def _alert_if(
        self,
        is_so: bool,
        what: str,
        text: str,
        time_s: float,
        numbers: tuple[float, float, str],
        level: Level = Level.WARN,
        more: Mapping[str, str] | None = None,
    ) -> Alert | None:
        if not self._lasts(what, time_s, is_so=is_so):
            return None
        value, limit, unit = numbers
        since_s, words = time_s - self._since[what], (number(value), number(limit), unit)
        return alert(level, f"machine: {what}", text + since(since_s), words, "level", since_s, more=more)
