"""What of the machine is a cause of trouble: load by others, memory that runs out, heat, a card that is throttled."""

from collections.abc import Mapping

from torchperf_ros.frame.alert_rules import Alert, Level
from torchperf_ros.telemetry.machine_signals import Machine, MachineSignals
from torchperf_ros.telemetry.machine_signals_gpu import Gpu, GpuSource
from torchperf_ros.watch.signals import alert, number, since

_SCAN_S = 5.0
_OTHERS = 0.3  # of the processors: more than this, taken by others while deadlines are missed, is an alert
_STEAL = 0.1
_HARM_S = 5  # seconds that a missed deadline is remembered
_FEWEST_MISSES = 2
_LEVELS = ((0.02, Level.ERROR), (0.05, Level.WARN))  # of the memory that is available
_PRESSURE = 0.1  # of the time in which every task waited for memory
_CONFIRM_S = 2


class MachineWatch:
    """Judges the machine once a second, by what the stages suffered meanwhile."""

    def __init__(self, signals: MachineSignals, gpu: GpuSource) -> None:
        """Take the sources: of the machine, and of the card."""
        self.gpu_word = gpu.word
        self.others_percent = ""
        self.values: dict[str, float] = {}
        self._signals = signals
        self._gpu = gpu
        self._scanned_s = 0.0
        self._misses: list[int] = []
        self._since: dict[str, float] = {}
        self._named = ""

    def read(self, time_s: float) -> tuple[Machine, Gpu | None]:
        """Read everything; then `values` and `others_percent` are those of the last second."""
        machine, gpu = self._signals.read(), self._gpu.read()
        self.values = machine.values() | (gpu.values() if gpu is not None else {})
        if time_s >= self._scanned_s + _SCAN_S:
            self._scan(time_s)
        share = machine.others_share
        self.others_percent = f"{100 * share:.0f}" if share == share else ""  # noqa: PLR0124 - not NaN
        return machine, gpu

    def judge(self, time_s: float, machine: Machine, gpu: Gpu | None, missed: int, *, harmed: bool) -> list[Alert]:
        """What is a cause of trouble now.

        Args:
            time_s: monotonic.
            machine: as read.
            gpu: as read.
            missed: deadlines of all stages in the last second.
            harmed: whether any stage was late or slower than usual in it.
        """
        self._misses = [*self._misses, missed][-_HARM_S:]
        found = [
            self._load(time_s, machine, harmed=harmed or sum(self._misses) >= _FEWEST_MISSES),
            self._memory(time_s, machine),
            *(self._heat(time_s, machine, zone) for zone in machine.too_hot_c),
            *([] if gpu is None else [self._throttled(time_s, gpu), self._gpu_memory(time_s, gpu)]),
        ]
        return [one for one in found if one is not None]

    def _load(self, time_s: float, machine: Machine, *, harmed: bool) -> Alert | None:
        others, begins = machine.others_share, "load" not in self._since
        if not self._lasts("load", time_s, is_so=harmed and others >= _OTHERS, confirm_s=1):
            return None
        if begins and time_s > self._scanned_s and not self._scan(time_s):
            return None  # it may have been the node's own: a worker or compiler that has just begun
        misses = sum(self._misses)
        harm = f"while {misses} frame{'' if misses == 1 else 's'} had no own result in time"
        harm = harm if misses else "while answers took longer than usual"
        text = f"other processes took {others:.0%} of the CPU ({machine.cpus} cores) {harm}"
        text += f": {self._named}" if self._named else ""
        if machine.steal_share >= _STEAL:
            text += f"; {machine.steal_share:.0%} went to other guests of the host"
        values = {"misses": str(misses), "processes": self._named, "cores": str(machine.cpus)}
        return self._alert("load", Level.WARN, text, time_s, 100 * others, 100 * _OTHERS, "%", values)

    def _scan(self, time_s: float) -> bool:
        """Look through the processes; False if the node's family has grown since the last time."""
        before = self._signals.family
        named = self._signals.scan()
        self._named = ", ".join(f"{name} {share:.0%}" for name, share in named)
        self._scanned_s = time_s
        return self._signals.family <= before

    def _memory(self, time_s: float, machine: Machine) -> Alert | None:
        share, stalled = machine.available_share, machine.pressure["memory"]
        level = next((level for least, level in _LEVELS if share < least), Level.OK)
        if stalled >= _PRESSURE:
            level = max(level, Level.WARN)
        if not self._lasts("memory", time_s, is_so=level > Level.OK):
            return None
        text = f"{share:.1%} of the memory is left ({machine.memory_available_mib:.0f} MiB)"
        text += f", every process waited for memory {stalled:.0%} of the time" if stalled >= _PRESSURE else ""
        return self._alert("memory", level, text, time_s, 100 * share, 100 * _LEVELS[-1][0], "%", {})

    def _heat(self, time_s: float, machine: Machine, zone: str) -> Alert | None:
        now_c, trip_c = machine.temperatures_c[zone], machine.too_hot_c[zone]
        if not self._lasts(f"temperature of {zone}", time_s, is_so=now_c >= trip_c):
            return None
        text = f"{zone} {now_c:.0f} C, slowed down from {trip_c:.0f} C on"
        return self._alert(f"temperature of {zone}", Level.WARN, text, time_s, now_c, trip_c, "C", {})

    def _throttled(self, time_s: float, gpu: Gpu) -> Alert | None:
        if not self._lasts("gpu", time_s, is_so=bool(gpu.throttled)):
            return None
        why = "; ".join(gpu.throttled)
        text = f"throttled ({why}), {gpu.temperature_c:.0f} C, {gpu.clock_mhz:.0f} MHz"
        values = {"reasons": why, "clock_mhz": number(gpu.clock_mhz)}
        return self._alert("gpu", Level.WARN, text, time_s, gpu.temperature_c, float("nan"), "C", values)

    def _gpu_memory(self, time_s: float, gpu: Gpu) -> Alert | None:
        share = 1.0 - gpu.memory_used_mib / gpu.memory_total_mib if gpu.memory_total_mib > 0 else float("nan")
        if not self._lasts("gpu memory", time_s, is_so=share < _LEVELS[0][0]):
            return None
        text = f"{share:.1%} of the card's memory is left ({gpu.memory_total_mib - gpu.memory_used_mib:.0f} MiB)"
        return self._alert("gpu memory", Level.WARN, text, time_s, 100 * share, 100 * _LEVELS[0][0], "%", {})

    def _lasts(self, what: str, time_s: float, *, is_so: bool, confirm_s: float = _CONFIRM_S) -> bool:
        """Whether something has been so in each second for long enough."""
        if not is_so:
            self._since.pop(what, None)
            return False
        return time_s - self._since.setdefault(what, time_s) >= confirm_s - 1

    def _alert(
        self, what: str, level: Level, text: str, time_s: float, value: float, limit: float, unit: str,
        more: Mapping[str, str],
    ) -> Alert:  # fmt: skip
        since_s, numbers = time_s - self._since[what], (number(value), number(limit), unit)
        return alert(level, f"machine: {what}", text + since(since_s), numbers, "level", since_s, more=more)
