"""The watch over a node's signals.

The recorder feeds it, and once a second it says what is unusual, and since when.
"""

import math
from collections.abc import Mapping
from typing import Any

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.observe.telemetry.machine_signals import MachineSignals
from torchperf_ros.observe.telemetry.machine_signals_gpu import Gpu, gpu_source
from torchperf_ros.observe.telemetry.record_stream import EventRecord, FrameRecord, MessageRecord
from torchperf_ros.observe.watch.content_input import InputContent
from torchperf_ros.observe.watch.content_output import OutputContent
from torchperf_ros.observe.watch.machine_watch import MachineWatch
from torchperf_ros.observe.watch.stage_signals import CounterSignals, StageSignals

# The event that says whether the node is `active`, and the counters of its `stages` by name, see
# `COUNTED`.
COUNTERS = "counters"
_MOST_SECONDS = 600  # a longer silence is not judged second by second


class StageWatch:
    """All signals of one stage, second by second of the frames' own time.

    What comes late because the recorder had no processor is judged as if it had come in time.

    Attributes:
        active: whether the node takes frames.
        others_percent: of the processor that other processes took in the last second; empty if unknown.
        missed, harmed: deadlines missed, and whether answers were late or slower than usual, since `Watch`
        reset them.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Take what the node says of the stage at the start, see `Recorder`."""
        name, inputs, tiers, budget_ms = setup["name"], setup["inputs"], setup["tiers"], setup["budget_ms"]
        # none where another stage gives it out
        trigger = inputs[0][0] if inputs and inputs[0] is not None else ""
        self.active, self.others_percent = True, ""
        self.missed, self.harmed = 0, False
        self.values: dict[str, float] = {}  # what the last second was
        self.alerts: list[Alert] = []  # what was unusual about it
        self.signals = StageSignals(name, tiers, budget_ms, trigger, list(setup.get("scenes", {}).values()))
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
        values, alerts = self.signals.second(now_ns, self.others_percent, active=self.active)
        for more, found in (self.counters.second(now_ns / NS_PER_S), self._output.second(now_ns)):
            values |= more
            alerts += found
        if self.active:
            for content in self._contents.values():
                alerts += content.alerts(now_ns)
        self.values, self.alerts = values, alerts
        self.missed += self.signals.missed
        self.harmed |= self.signals.harmed


class Watch:
    """Watches one node.

    Attributes:
        signals: what the last second was, as the records have it: `machine` and `stages`.
    """

    def __init__(self, setup: Mapping[str, Any], gpu: Gpu | None = None) -> None:
        """Take what the node says at its start, see `Recorder`.

        The card is by default that of its `device`.
        """
        self.signals: dict[str, Any] = {"machine": {}, "stages": {}}
        self._stages = {stage["name"]: StageWatch(stage) for stage in setup["stages"]}
        self._by_index = list(self._stages.values())
        gpu = gpu or gpu_source(str(setup["parameters"].get("device", "auto")))
        self.gpu = gpu.word  # the card, or why none is watched
        self._machine = MachineWatch(MachineSignals(setup["pid"]), gpu)
        self._active = True
        self._counters: dict[str, Mapping[str, str]] = {}

    def take(self, record: FrameRecord | MessageRecord | EventRecord) -> None:
        """Take a record of the node: frames, drops, counters."""
        if isinstance(record, FrameRecord):
            self._by_index[record.stage].frame(record)
        elif not isinstance(record, EventRecord):
            return
        elif record.fields["kind"] == "dropped":
            signals = self._stages[record.fields["stage"]].signals
            signals.superseded += record.fields["superseded"]
        elif record.fields["kind"] == COUNTERS:
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
