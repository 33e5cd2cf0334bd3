"""A running node as an onlooker knows it who was told nothing but its name: stages, silence, restarts, memory."""

import math
from collections import deque
from statistics import linear_regression
from typing import Any, Final

from torchperf_ros.telemetry.node_state import NODE_STATUS, STATUS_PREFIX, NodeState
from torchperf_ros.telemetry.stage_state import StageState

SILENT_S: Final = 3.0
"""A node reports every second; what has missed three reports is not there, or cannot be heard."""
_MEMORY_SAMPLES: Final = 600  # ten minutes
_LEAST_SAMPLES: Final = 60  # what a start fills is no trend
_S_PER_MIN: Final = 60.0
_WARN: Final = 1


class WatchedNode(NodeState):
    """What is known about a node, from its first word on.

    Attributes:
        name: for example `/perf`.
        others: nodes that were heard instead, by their names.
        heard_s: when it reported last, -inf before.
        restarts: how often another process took its name since the onlooker began.
        memory: time in s and MiB of the workers, the last ten minutes.
        memory_parts: the newest row of `/perf/memory_stats` by label, in MiB.
    """

    def __init__(self, name: str) -> None:
        """Know its name and nothing else."""
        super().__init__(())
        self.name = name
        self.others: set[str] = set()
        self.heard_s = -math.inf
        self.restarts = 0
        self.memory: deque[tuple[float, float]] = deque(maxlen=_MEMORY_SAMPLES)
        self.memory_parts: dict[str, float] = {}
        self._warnings: set[str] = set()
        self._silence_told = False

    @property
    def heard(self) -> bool:
        """Whether it has ever reported."""
        return math.isfinite(self.heard_s)

    @property
    def silence_s(self) -> float:
        """Since its last report; infinite before the first."""
        return self.elapsed_s - self.heard_s

    @property
    def silent(self) -> bool:
        """Whether its reports have stopped."""
        return self.heard and self.silence_s > SILENT_S

    @property
    def memory_trend(self) -> float:
        """Slope of the workers' memory in MiB per minute, least squares; NaN with too few samples."""
        if len(self.memory) < _LEAST_SAMPLES or self.memory[0][0] == self.memory[-1][0]:
            return math.nan
        times, values = zip(*self.memory, strict=True)
        return linear_regression(times, values).slope * _S_PER_MIN

    def at(self, elapsed_s: float) -> None:
        """Let time pass; a silence that begins is an event."""
        self.elapsed_s = elapsed_s
        if self.silent and not self._silence_told:
            self.event("error", NODE_STATUS, f"no report for {SILENT_S:.0f} s: ended, hung, or cut off")
        self._silence_told = self.silent

    def on_diagnostics(self, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Fold in a message of `/diagnostics`, from which stages are learned; other nodes are noted by name."""
        ours = []
        for status in message.status:
            if not status.name.startswith(STATUS_PREFIX):
                continue
            if status.hardware_id in {self.name, ""}:
                ours.append(status)
            else:
                self.others.add(status.hardware_id)
        if not ours:
            return
        if self.silent:
            self.event("ok", NODE_STATUS, f"is back after {self.silence_s:.0f} s")
        self.heard_s = self.elapsed_s
        values = {status.name.removeprefix(STATUS_PREFIX): _values(status) for status in ours}
        self._notice_restart(values.get(NODE_STATUS, {}))
        for name, told in values.items():
            if name != NODE_STATUS and "health" in told:
                self.stages.setdefault(name, StageState(name))
        for status in ours:
            if "health" not in values[status.name.removeprefix(STATUS_PREFIX)]:
                self._warn(status)
        super().on_diagnostics(message)

    def on_memory(self, mib: float) -> None:
        """Fold in a value of `/perf/memory`."""
        super().on_memory(mib)
        if math.isfinite(mib):
            self.memory.append((self.elapsed_s, mib))

    def on_memory_stats(self, message: Any) -> None:  # noqa: ANN401 - std_msgs/Float64MultiArray
        """Fold in a message of `/perf/memory_stats`."""
        self.memory_parts = {
            dim.label: float(value) for dim, value in zip(message.layout.dim, message.data, strict=False)
        }

    def _notice_restart(self, told: dict[str, str]) -> None:
        before, now = self.node.get("pid"), told.get("pid")
        if before and now and before != now:
            self.restarts += 1
            self.event("error", NODE_STATUS, f"restarted: pid {before} is now {now}")
            self.stages.clear()
            self.memory.clear()
            self.end_to_end_ms.clear()

    def _warn(self, status: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticStatus
        """Tell once of what stands on `/diagnostics` beside the stages, an input of the wrong type for example."""
        level = status.level[0] if isinstance(status.level, bytes) else int(status.level)
        if level >= _WARN and status.message not in self._warnings and status.name != STATUS_PREFIX + NODE_STATUS:
            self._warnings.add(status.message)
            self.event("warn" if level == _WARN else "error", NODE_STATUS, status.message)


def _values(status: Any) -> dict[str, str]:  # noqa: ANN401 - diagnostic_msgs/DiagnosticStatus
    return {pair.key: pair.value for pair in status.values}
