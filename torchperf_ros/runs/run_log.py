"""What a node did over some time: a table of the answered frames of each stage, and what else is known about it."""

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.frame.errors import TorchperfError
from torchperf_ros.frame.frame_table import FRAME
from torchperf_ros.frame.outcome import Fallback, Outcome
from torchperf_ros.telemetry.node_state import NODE_STATUS, STATUS_PREFIX

STEPS: Final = ("wait_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
"""The parts of a frame's time that are measured, in their order; what is left of the total is hand-over and publish."""
UNKNOWN: Final = -1
_NAMES: Final = FRAME.names or ()
_NOTHING_KNOWN: Final = {name: math.nan if FRAME[name].kind == "f" else 0 for name in _NAMES} | {
    "tier": UNKNOWN,
    "fallback": UNKNOWN,
}
_TIMES: Final = ("age_ms", *STEPS, "total_ms", "budget_ms")
_ROWS_AT_ONCE: Final = 4096
_LEVELS: Final = ("OK", "WARN", "ERROR", "STALE")
_FARTHEST_MS: Final = 1e9  # a stamp is further off only if it is nonsense
_MOST_TROUBLES: Final = 20
_MOST_REASONS: Final = 50_000


class RunLogError(TorchperfError):
    """A log cannot be reported on; the message says which, why, and what would do."""


@dataclass(frozen=True)
class StageLog:
    """The answered frames of a stage, oldest first.

    Attributes:
        name: of the stage; `stage 0` where the log does not say.
        tiers: names of its tiers; may be empty.
        frames: rows of `FRAME`; what the source does not know is NaN, an index -1, a stamp or a hash 0.
        health: ROS time in ns and the word, each time that it changed.
        dropped: frames that were never started, because a newer one came or they were too old; None where not known.
        reasons: why a frame was not on time, by `t_ns`, where the log says (records do).
        profiled: `t_ns` of frames that ran under a profiler, which takes time (records say).
    """

    name: str
    tiers: tuple[str, ...]
    frames: NDArray[np.void]
    health: tuple[tuple[int, str], ...] = ()
    dropped: int | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)
    profiled: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def on_time(self) -> NDArray[np.bool_]:
        """Which frames were answered by their own result, in time."""
        return np.asarray(self.frames["outcome"] == Outcome.ON_TIME)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Which frames say something about the stage: all but those that came while it started."""
        return np.asarray(self.frames["outcome"] != Outcome.STARTING)

    @property
    def lateness_ms(self) -> NDArray[np.float64]:
        """How far past its budget each frame was answered; negative: before."""
        return np.asarray(self.frames["total_ms"] - self.frames["budget_ms"])

    def tier_name(self, index: int) -> str:
        """A tier's name, `tier 2` where it is not known."""
        if index == UNKNOWN:
            return "no tier"
        return self.tiers[index] if 0 <= index < len(self.tiers) else f"tier {index}"


@dataclass(frozen=True)
class LoggedAlert:
    """An alert of the node: ROS time in ns, `OK`, `WARN`, `ERROR` or `STALE`, name, message, values."""

    t_ns: int
    level: str
    name: str
    message: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunLog:
    """What is known about one node over some time.

    Attributes:
        name: what the report calls it.
        source: the log's path, None for one that was listened to.
        node: for example `/perf`.
        stages: in the order of the node.
        memory_t_ns: ROS time of each memory sample.
        memory: MiB by label, one for each sample, NaN where unknown.
        anomalies: oldest first.
        versions: what the log says about the software.
        restarts: how often another process took the node's name, as far as the log says.
        missing: what the log does not hold, in words.
        troubles: what could not be read, in words.
        documents: other files that belong to it (JSON of an incident).
        recordings: recorded logs that may hold the frames' inputs, as `rosbags` takes them.
    """

    name: str
    source: Path | None
    node: str
    stages: tuple[StageLog, ...]
    memory_t_ns: NDArray[np.int64]
    memory: Mapping[str, NDArray[np.float64]]
    anomalies: tuple[LoggedAlert, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    missing: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    documents: tuple[Path, ...] = ()
    recordings: tuple[Path, ...] = ()

    @property
    def span_ns(self) -> tuple[int, int]:
        """First and last time of anything in it; (0, 0) if it is empty."""
        times = [np.asarray(stage.frames["t_ns"]) for stage in self.stages] + [self.memory_t_ns]
        times.append(np.array([anomaly.t_ns for anomaly in self.anomalies], dtype=np.int64))
        times = [column for column in times if len(column)]
        if not times:
            return 0, 0
        return int(min(column.min() for column in times)), int(max(column.max() for column in times))


class _Stage:
    """One stage while its table grows."""

    def __init__(self) -> None:
        self.health: list[tuple[int, str]] = []
        self.reasons: dict[int, str] = {}
        self.dropped: int | None = None
        self.dropped_before: int | None = None
        self.tiers: tuple[str, ...] = ()
        self.profiled: set[int] = set()
        self._rows: list[tuple[float, ...]] = []
        self._blocks: list[NDArray[np.void]] = []

    def add(self, **values: float) -> None:
        row = {**_NOTHING_KNOWN, **values}
        row["lateness_ms"] = row["total_ms"] - row["budget_ms"]
        self._rows.append(tuple(row[name] for name in _NAMES))
        if len(self._rows) >= _ROWS_AT_ONCE:
            self._pack()

    def _pack(self) -> None:
        self._blocks.append(np.array(self._rows, dtype=FRAME))
        self._rows.clear()

    def built(self, name: str) -> StageLog:
        self._pack()
        frames = np.concatenate(self._blocks)
        frames = frames[np.argsort(frames["t_ns"], kind="stable")]
        health, profiled = tuple(self.health), frozenset(self.profiled)
        return StageLog(name, self.tiers, frames, health, self.dropped, self.reasons, profiled)


class RunLogBuilder:
    """Folds what a node says, message by message or record by record, into a `RunLog`.

    What comes may be of any kind in any order; messages may be rclpy's or those of `rosbags`.

    Attributes:
        odd: rows and records that made no sense, left out and counted.
    """

    def __init__(self, node: str) -> None:
        """Name the node, for example `/perf`."""
        self.node = node
        self.odd = 0
        self._by_index: dict[int, _Stage] = {}
        self._names: list[str] = []
        self._memory_t_ns = array("q")
        self._memory: dict[str, array[float]] = {}
        self._anomalies: list[LoggedAlert] = []
        self._versions: dict[str, str] = {}
        self._troubles: list[str] = []
        self._pid = ""
        self._restarts = 0

    def trouble(self, text: str) -> None:
        """Note what could not be read."""
        if len(self._troubles) < _MOST_TROUBLES:
            self._troubles.append(text)

    def versions(self, versions: Mapping[str, object]) -> None:
        """Note what the log says about the software."""
        self._versions.update({key: str(value) for key, value in versions.items()})

    def row(self, t_ns: int, values: Mapping[str, float]) -> None:
        """Take a row of `/perf/latency_stages` by label, received at this time."""
        index, outcome, fallback = (_whole(values.get(name)) for name in ("stage", "outcome", "fallback"))
        if index < 0 or not 0 <= outcome < len(Outcome):
            self.odd += 1
            return
        times = {name: values.get(name, math.nan) for name in _TIMES}
        before_ms = times["total_ms"] + times["age_ms"]
        self._by_number(index).add(
            t_ns=t_ns,
            stamp_ns=t_ns - round(before_ms * 1e6) if abs(before_ms) < _FARTHEST_MS else 0,
            seq=_whole(values.get("seq")),
            tier=_whole(values.get("tier")),
            outcome=outcome,
            fallback=fallback if 0 <= fallback < len(Fallback) else UNKNOWN,
            **times,
        )

    def frame(self, record: Mapping[str, Any]) -> None:
        """Take a record of kind `frame`.

        Raises:
            KeyError: it lacks a stage, time or outcome.
            ValueError: a number is none.
        """
        stage, t_ns = self._stage(str(record["stage"])), int(record["t_ns"])
        tier, fallback = record.get("tier"), record.get("fallback")
        if tier is not None and tier not in stage.tiers:
            stage.tiers = (*stage.tiers, str(tier))
        stage.add(
            t_ns=t_ns,
            stamp_ns=int(record.get("stamp_ns") or 0),
            seq=int(record.get("seq") or 0),
            tier=UNKNOWN if tier is None else stage.tiers.index(str(tier)),
            outcome=Outcome[str(record["outcome"]).upper()],
            fallback=UNKNOWN if fallback is None else Fallback[str(fallback).upper()],
            **{key: math.nan if record.get(key) is None else float(record[key]) for key in _TIMES},
        )
        if record.get("profiled"):
            stage.profiled.add(t_ns)
        if (reason := str(record.get("reason") or "")) and len(stage.reasons) < _MOST_REASONS:
            stage.reasons[t_ns] = reason.splitlines()[0]

    def tiers(self, stage: str, names: Iterable[str]) -> None:
        """Name a stage's tiers; stages that are new come after those that are known."""
        self._stage(stage).tiers = tuple(names)

    def drops(self, stage: str, count: int) -> None:
        """Note frames of a stage that were never started."""
        found = self._stage(stage)
        found.dropped = (found.dropped or 0) + count

    def health(self, t_ns: int, stage: str, word: str) -> None:
        """Note a stage's health; only changes are kept."""
        changes = self._stage(stage).health
        if not changes or changes[-1][1] != word:
            changes.append((t_ns, word))

    def memory(self, t_ns: int, values: Mapping[str, float | None]) -> None:
        """Take a memory sample, MiB by label."""
        for label in values:
            if label not in self._memory:
                self._memory[label] = array("d", [math.nan] * len(self._memory_t_ns))
        self._memory_t_ns.append(t_ns)
        for label, column in self._memory.items():
            value = values.get(label)
            column.append(math.nan if value is None else value)

    def anomaly(self, anomaly: LoggedAlert) -> None:
        """Take an alert."""
        self._anomalies.append(anomaly)

    def on_anomaly(self, t_ns: int, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Take a message of `/perf/anomaly`."""
        for status in message.status:
            level = status.level[0] if isinstance(status.level, bytes) else int(status.level)
            word = _LEVELS[min(level, len(_LEVELS) - 1)]
            self.anomaly(LoggedAlert(t_ns, word, status.name, status.message, _values(status)))

    def on_diagnostics(self, t_ns: int, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Take a message of `/diagnostics`; other nodes' are passed over."""
        for status in message.status:
            if not status.name.startswith(STATUS_PREFIX) or status.hardware_id not in {self.node, ""}:
                continue
            name, values = status.name.removeprefix(STATUS_PREFIX), _values(status)
            if name == NODE_STATUS:
                self._restarts += self._pid not in {"", values.get("pid", "")}
                self._pid = values.get("pid", "")
            elif "health" in values:
                self.health(t_ns, name, values["health"])
                if tiers := values.get("tiers", ""):
                    self.tiers(name, (tier.strip() for tier in tiers.split(",")))
                self._count_drops(self._stage(name), values)

    def build(self, name: str, source: Path | None, missing: Iterable[str] = ()) -> RunLog:
        """The log as it stands.

        Args:
            name: what the report calls it.
            source: where it was read.
            missing: what it does not hold, in words.
        """
        troubles = list(self._troubles)
        if self.odd:
            troubles.append(f"{self.odd:,} rows made no sense (unknown stage or outcome) and were left out")
        indexes = sorted({*self._by_index, *range(len(self._names))})
        names = dict(enumerate(self._names))
        return RunLog(
            name, source, self.node,
            tuple(self._by_number(index).built(names.get(index, f"stage {index}")) for index in indexes),
            np.array(self._memory_t_ns, dtype=np.int64),
            {label: np.array(column, dtype=np.float64) for label, column in self._memory.items()},
            tuple(sorted(self._anomalies, key=lambda anomaly: anomaly.t_ns)), dict(self._versions), self._restarts,
            tuple(missing), tuple(troubles),
        )  # fmt: skip

    def _count_drops(self, stage: _Stage, values: Mapping[str, str]) -> None:
        """Add what the counters grew by since the last report; they begin anew with another process."""
        try:
            count = int(values["superseded"]) + int(values["stale"])
        except (KeyError, ValueError):
            return
        before = stage.dropped_before if stage.dropped_before is not None else count
        stage.dropped = (stage.dropped or 0) + (count - before if count >= before else count)
        stage.dropped_before = count

    def _stage(self, name: str) -> _Stage:
        if name not in self._names:
            self._names.append(name)
        return self._by_number(self._names.index(name))

    def _by_number(self, index: int) -> _Stage:
        return self._by_index.setdefault(index, _Stage())


def _whole(value: float | None) -> int:
    return UNKNOWN if value is None or not math.isfinite(value) else round(value)


def _values(status: Any) -> dict[str, str]:  # noqa: ANN401 - diagnostic_msgs/DiagnosticStatus
    return {pair.key: pair.value for pair in status.values}
