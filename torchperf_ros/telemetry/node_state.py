"""What a node says about itself on its topics, folded into one state, for those who look at it from outside.

Nothing here waits, reads a clock or draws; times are handed in. Missing keys and unknown stages are tolerated, so that
a view can look at any version of the node. Messages may be rclpy's or those of `rosbags`.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.telemetry.stage_state import SeenFrame, StageState

_EVENTS: Final = 200
_LONGEST_MS: Final = 1e9  # a stamp is further off only if it is nonsense
NODE_STATUS: Final = "node"
STATUS_PREFIX: Final = "perf: "


@dataclass(frozen=True)
class Event:
    """One line of the list of events.

    Attributes:
        at_s: seconds since the onlooker began.
        kind: `ok`, `warn`, `error`, `sabotage` or `note`.
        source: a stage, `node`, or who else tells it.
        text: what happened.
    """

    at_s: float
    kind: str
    source: str
    text: str


class NodeState:
    """What is known about a running node.

    Attributes:
        elapsed_s: since the onlooker began; events get this time.
        stages: by name, in the order of the node.
        node: keys and values of the node's own status.
        events: the last ones, oldest first.
        events_told: how many there were.
        end_to_end_ms: the last values of `/perf/latency`.
        memory_mib: the last value of `/perf/memory`, NaN before.
        diagnostics: how many messages of `/diagnostics` of the node came in.
        strange_frames: messages of `/perf/latency_stages` of an unknown stage or outcome.
    """

    def __init__(self, stages: Iterable[str]) -> None:
        """Know nothing yet about these stages."""
        self.elapsed_s = 0.0
        self.stages = {name: StageState(name) for name in stages}
        self.node: dict[str, str] = {}
        self.events: deque[Event] = deque(maxlen=_EVENTS)
        self.events_told = 0
        self.end_to_end_ms: deque[float] = deque(maxlen=300)
        self.memory_mib = math.nan
        self.diagnostics = 0
        self.strange_frames = 0

    def on_frame(self, message: Any, published_ns: int) -> None:  # noqa: ANN401 - std_msgs/Float64MultiArray
        """Fold in a message of `/perf/latency_stages`.

        Args:
            message: the message.
            published_ns: ROS time at which the node published it.
        """
        values = {dim.label: value for dim, value in zip(message.layout.dim, message.data, strict=False)}
        index = _whole(values.get("stage"))
        names = list(self.stages)
        outcome, fallback = _whole(values.get("outcome")), _whole(values.get("fallback"))
        if index is None or not 0 <= index < len(names) or outcome is None or not 0 <= outcome < len(Outcome):
            self.strange_frames += 1
            return
        total_ms, age_ms = values.get("total_ms", math.nan), values.get("age_ms", math.nan)
        before_ms = total_ms + age_ms
        record = SeenFrame(
            stamp_ns=published_ns - round(before_ms * 1e6) if abs(before_ms) < _LONGEST_MS else 0,
            outcome=Outcome(outcome),
            fallback=None if fallback is None or not 0 <= fallback < len(Fallback) else Fallback(fallback),
            tier=-1 if (tier := _whole(values.get("tier"))) is None else tier,
            total_ms=total_ms,
            budget_ms=values.get("budget_ms", math.nan),
            published_ns=published_ns,
        )
        stage = self.stages[names[index]]
        far_late = stage.far_late
        stage.add(record)
        if stage.far_late > far_late:
            self.event("error", stage.name, f"{record.answer}, {record.lateness_ms:.1f} ms after its deadline")

    def on_diagnostics(self, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Fold in a message of `/diagnostics`; those of other nodes are passed over."""
        ours = [status for status in message.status if status.name.startswith(STATUS_PREFIX)]
        self.diagnostics += bool(ours)
        for status in ours:
            values = {pair.key: pair.value for pair in status.values}
            name = status.name.removeprefix(STATUS_PREFIX)
            if name == NODE_STATUS:
                self.node = values
            elif name in self.stages:
                self.stages[name].values = values

    def on_latency(self, total_ms: float) -> None:
        """Fold in a value of `/perf/latency`."""
        self.end_to_end_ms.append(total_ms)

    def on_memory(self, mib: float) -> None:
        """Fold in a value of `/perf/memory`."""
        self.memory_mib = mib

    def on_memory_stats(self, message: Any) -> None:  # noqa: ANN401 - std_msgs/Float64MultiArray
        """Fold in a message of `/perf/memory_stats`; a drive of seconds has no use for it."""

    def on_anomaly(self, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Fold in a message of `/perf/anomaly`."""
        for status in message.status:
            level = status.level[0] if isinstance(status.level, bytes) else int(status.level)
            kind = ("ok", "warn", "error", "warn")[min(level, 3)]
            stage, _, what = status.name.partition(": ")
            lines = status.message.strip().splitlines() or [""]
            message = lines[-1 if lines[0].startswith("Traceback") else 0]  # the error itself; there is one line for it
            self.event(kind, stage, f"{what}: {message}" if what else message)

    def event(self, kind: str, source: str, text: str) -> None:
        """Add an event, now."""
        self.events_told += 1
        self.events.append(Event(self.elapsed_s, kind, source, " ".join(text.split())))


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value)
