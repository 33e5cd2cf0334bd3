"""The watch over a node's signals: each second it finds what is unusual, and since when."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.observe.telemetry.machine import Gpu, MachineSignals, gpu_source
from torchperf_ros.observe.telemetry.rows import EventRecord, FrameRecord, StreamRecord
from torchperf_ros.observe.watch.content import InputContent, OutputContent
from torchperf_ros.observe.watch.series_detector import alert, number, since
from torchperf_ros.observe.watch.stage_signals import CounterSignals, StageSignals

# The event that says whether the node is `active`, and the counters of its `stages` by name, see `COUNTED`.
COUNTERS: Final = "counters"
_MOST_SECONDS: Final = 600  # a longer silence is not judged second by second
_SCAN_S: Final = 5.0
# Of the processors: from here on, taken by others while deadlines are missed, is an alert.
_OTHERS_PERCENT: Final = 30.0
_STEAL_PERCENT: Final = 10.0
_HARM_S: Final = 5  # seconds that a missed deadline is remembered
_FEWEST_MISSES: Final = 2
_LEVELS: Final = ((2.0, Level.ERROR), (5.0, Level.WARN))  # percent of the memory that is available
_PRESSURE_PERCENT: Final = 10.0  # of the time in which every task waited for memory


class _Cause(NamedTuple):
    """What may be a cause of trouble: whether it is so now, in words and as value, limit and unit."""

    what: str
    is_so: bool
    text: str
    numbers: tuple[float, float, str]
    level: Level = Level.WARN
    more: Mapping[str, str] | None = None


class MachineWatch:
    """Judges the machine once a second, by what the stages suffered meanwhile.

    Attributes:
        values: what was read last, by name.
    """

    def __init__(self, signals: MachineSignals, gpu: Gpu) -> None:
        self.values: dict[str, float] = {}
        self._signals, self._gpu = signals, gpu
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
        self.values = self._signals.read() | self._gpu.read()
        if time_s >= self._scanned_s + _SCAN_S:
            self._scan(time_s)

    def _scan(self, time_s: float) -> bool:
        """Look through the processes; False if the node's family has grown since the last time."""
        before = self._signals.family
        self._named = ", ".join(f"{name} {share:.0%}" for name, share in self._signals.scan())
        self._scanned_s = time_s
        return self._signals.family <= before

    def judge(self, time_s: float, missed: int, *, harmed: bool) -> list[Alert]:
        """What is a cause of trouble now, by what was read last.

        In the last second all stages `missed` so many deadlines; if `harmed`, one was late or slower than
        usual. Load by others is an alert at once, all else if it is so in a second second.
        """
        self._misses.append(missed)
        found = []
        for one in (self._load(time_s, harmed=harmed), *self._causes()):
            if not one.is_so:
                self._since.pop(one.what, None)
                continue
            since_s = time_s - self._since.setdefault(one.what, time_s)
            if one.text and since_s >= (one.what != "load"):
                value, limit, unit = one.numbers
                words, text = (number(value), number(limit), unit), one.text + since(since_s)
                name = f"machine: {one.what}"
                found.append(alert(one.level, name, text, words, "level", since_s, more=one.more))
        return found

    def _load(self, time_s: float, *, harmed: bool) -> _Cause:
        others, misses = self.values["others_cpu_percent"], sum(self._misses)
        is_so = (harmed or misses >= _FEWEST_MISSES) and others >= _OTHERS_PERCENT
        numbers = (others, _OTHERS_PERCENT, "%")
        begins = is_so and "load" not in self._since
        # It may have been the node's own: a worker or compiler that has just begun.
        if begins and time_s > self._scanned_s and not self._scan(time_s):
            return _Cause("load", is_so, "", numbers)
        cpus, steal = self._signals.cpus, self.values["steal_percent"]
        harm = f"{misses} frame{'' if misses == 1 else 's'} had no own result in time"
        text = f"other processes took {others:.0f}% of the CPU ({cpus} cores) while "
        text += harm if misses else "answers took longer than usual"
        text += f": {self._named}" if self._named else ""
        text += f"; {steal:.0f}% went to other guests of the host" if steal >= _STEAL_PERCENT else ""
        more = {"misses": str(misses), "processes": self._named, "cores": str(cpus)}
        return _Cause("load", is_so, text, numbers, more=more)

    def _causes(self) -> Iterator[_Cause]:
        left_mib, stalled = self.values["memory_available_mib"], self.values["memory_pressure_percent"]
        percent = 100 * left_mib / self._signals.memory_total_mib
        level = next((level for least, level in _LEVELS if percent < least), Level.OK)
        text = f"{percent:.1f}% of the memory is left ({left_mib:.0f} MiB)"
        if stalled >= _PRESSURE_PERCENT:
            level = max(level, Level.WARN)
            text += f", every process waited for memory {stalled:.0f}% of the time"
        yield _Cause("memory", level > Level.OK, text, (percent, _LEVELS[-1][0], "%"), level)
        for zone, trip_c in self._signals.too_hot_c.items():
            now_c = self.values[f"{zone}_c"]
            text = f"{zone} {now_c:.0f} C, slowed down from {trip_c:.0f} C on"
            yield _Cause(f"temperature of {zone}", now_c >= trip_c, text, (now_c, trip_c, "C"))
        names = ("temperature_c", "clock_mhz", "memory_used_mib", "memory_total_mib")
        hot_c, clock_mhz, used, total = (self.values.get(f"gpu_{name}", math.nan) for name in names)
        why = self._gpu.throttled
        text = f"throttled ({why}), {hot_c:.0f} C, {clock_mhz:.0f} MHz"
        more = {"reasons": why, "clock_mhz": number(clock_mhz)}
        yield _Cause("gpu", bool(why), text, (hot_c, math.nan, "C"), more=more)
        percent, least = 100 * (1 - used / total), _LEVELS[0][0]
        text = f"{percent:.1f}% of the card's memory is left ({total - used:.0f} MiB)"
        yield _Cause("gpu memory", percent < least, text, (percent, least, "%"))


class StageWatch:
    """All signals of one stage, second by second of the frames' own time.

    A frame that reaches a busy recorder late is judged by its own time.

    Attributes:
        active: whether the node takes frames.
        others_percent: of the processor that other processes took in the last second; empty if unknown.
        missed, harmed: deadlines missed, and whether answers were late or slower than usual, since `Watch`
            reset them.
        values, alerts: what the last second was, and what was unusual about it.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        name, inputs, tiers = setup["name"], setup["inputs"], setup["tiers"]
        # none where another stage gives it out
        trigger = inputs[0][0] if inputs and inputs[0] is not None else ""
        scenes = list(setup.get("scenes", {}).values())
        self.active, self.others_percent = True, ""
        self.missed, self.harmed = 0, False
        self.values: dict[str, float] = {}
        self.alerts: list[Alert] = []
        self.signals = StageSignals(name, tiers, setup["budget_ms"], trigger, scenes)
        self.counters = CounterSignals(name, tiers)
        self._contents = {
            index: InputContent(name, *topic, trigger=index == 0)
            for index, topic in enumerate(inputs)
            if topic is not None and topic[1]
        }
        self._output = OutputContent(name, *setup["output"])
        self._end_ns = 0

    def frame(self, record: FrameRecord) -> None:
        self.advance(record.published_ns)
        self.signals.answered(record.row)
        for item in record.inputs:
            if (content := self._contents.get(item.index)) is not None:
                content.take(item, record.received_ns)
        self._output.take(record)

    def advance(self, known_ns: int) -> None:
        """Judge the seconds that end until `known_ns`, up to which every frame has come."""
        if not self._end_ns or known_ns - self._end_ns > _MOST_SECONDS * NS_PER_S:
            self._end_ns = known_ns + NS_PER_S
        while known_ns >= self._end_ns:
            self._second(self._end_ns)
            self._end_ns += NS_PER_S

    def _second(self, now_ns: int) -> None:
        self.values, self.alerts = self.signals.second(now_ns, self.others_percent, active=self.active)
        contents = self._contents.values() if self.active else ()
        for part in (self.counters, self._output, *contents):
            values, alerts = part.second(now_ns)
            self.values |= values
            self.alerts += alerts
        self.missed += self.signals.missed
        self.harmed |= self.signals.harmed


class Watch:
    """Watches one node.

    Attributes:
        signals: what the last second was, as the records have it: `machine` and `stages`.
        gpu: the card, or why none is watched.
    """

    def __init__(self, setup: Mapping[str, Any], gpu: Gpu | None = None) -> None:
        self.signals: dict[str, Any] = {"machine": {}, "stages": {}}
        self._stages = {stage["name"]: StageWatch(stage) for stage in setup["stages"]}
        self._by_index = list(self._stages.values())
        gpu = gpu or gpu_source(str(setup["parameters"].get("device", "auto")))
        self.gpu = gpu.word
        self._machine = MachineWatch(MachineSignals(setup["pid"]), gpu)
        self._active = True
        self._counters: dict[str, Mapping[str, str]] = {}

    def take(self, record: StreamRecord) -> None:
        if isinstance(record, FrameRecord):
            self._by_index[record.stage].frame(record)
        elif isinstance(record, EventRecord) and record.fields["kind"] == "dropped":
            self._stages[record.fields["stage"]].signals.superseded += record.fields["superseded"]
        elif isinstance(record, EventRecord) and record.fields["kind"] == COUNTERS:
            self._active, self._counters = record.fields["active"], record.fields["stages"]

    def tick(self, now_ns: int, known_ns: int) -> list[Alert]:
        """Once a second: what is unusual now. What lasts is returned every time, until it is over.

        Args:
            now_ns: monotonic time, as `FrameRecord.received_ns`.
            known_ns: the time until which all records of the node have been taken; earlier than `now_ns`
                where the machine has left this process no time.
        """
        time_s = now_ns / NS_PER_S
        self._machine.read(time_s)
        missed, harmed = 0, False
        for name, stage in self._stages.items():
            stage.active, stage.others_percent = self._active, self._machine.others_percent
            stage.counters.status(known_ns / NS_PER_S, self._counters.get(name, {}))
            stage.advance(known_ns)
            missed, harmed = missed + stage.missed, harmed or stage.harmed
            stage.missed, stage.harmed = 0, False
        causes = self._machine.judge(time_s, missed, harmed=harmed)
        stages = {name: _json(stage.values) for name, stage in self._stages.items()}
        self.signals = {"machine": _json(self._machine.values), "stages": stages}
        return causes + [found for stage in self._stages.values() for found in stage.alerts]


def _json(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: round(value, 3) if math.isfinite(value) else None for name, value in values.items()}
