"""Folds what a node says, message by message or record by record, into a `RunLog`."""

import math
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchperf_ros.analysis.run_log import COLUMNS, TIMES, UNKNOWN, LoggedAnomaly, RunLog, StageLog
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.telemetry.node_state import NODE_STATUS, STATUS_PREFIX

_WHOLE = tuple(name for name in COLUMNS if name not in TIMES)
_LEVELS = ("OK", "WARN", "ERROR", "STALE")
_FARTHEST_MS = 1e9  # a stamp is further off only if it is nonsense
_MOST_TROUBLES = 20
_MOST_REASONS = 50_000


class _Stage:
    """The columns of one stage while they grow."""

    def __init__(self) -> None:
        self.whole = {name: array("q") for name in _WHOLE}
        self.times = {name: array("d") for name in TIMES}
        self.health: list[tuple[int, str]] = []
        self.reasons: dict[int, str] = {}
        self.dropped: int | None = None
        self.dropped_told: int | None = None
        self.tiers: tuple[str, ...] = ()
        self.profiled: set[int] = set()

    def add(self, whole: Mapping[str, int], times: Mapping[str, float]) -> None:
        for name in _WHOLE:
            self.whole[name].append(whole[name])
        for name in TIMES:
            self.times[name].append(times[name])


class RunLogBuilder:
    """Takes what comes, in any order of kinds; messages may be rclpy's or those of `rosbags`.

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
        self._anomalies: list[LoggedAnomaly] = []
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

    def stages(self, names: Iterable[str]) -> None:
        """Name the stages in the order of the node; names that are known keep their places."""
        self._names += [name for name in names if name not in self._names]

    def row(self, t_ns: int, values: Mapping[str, float]) -> None:
        """Take a row of `/perf/latency_stages` by label, received at this time."""
        index, outcome = _whole(values.get("stage")), _whole(values.get("outcome"))
        if index < 0 or not 0 <= outcome < len(Outcome):
            self.odd += 1
            return
        times = {name: values.get(name, math.nan) for name in TIMES}
        before_ms = times["total_ms"] + times["age_ms"]
        fallback = _whole(values.get("fallback"))
        self._stage(index).add(
            {
                "t_ns": t_ns,
                "stamp_ns": t_ns - round(before_ms * 1e6) if abs(before_ms) < _FARTHEST_MS else 0,
                "seq": _whole(values.get("seq")),
                "tier": _whole(values.get("tier")),
                "outcome": outcome,
                "fallback": fallback if 0 <= fallback < len(Fallback) else UNKNOWN,
            },
            times,
        )

    def frame(self, record: Mapping[str, Any]) -> None:
        """Take a record of kind `frame`.

        Raises:
            KeyError: it lacks a stage, time or outcome.
            ValueError: a number is none.
        """
        name, tier = str(record["stage"]), record.get("tier")
        self.stages([name])
        stage = self._stage(self._names.index(name))
        if tier is not None and tier not in stage.tiers:
            stage.tiers = (*stage.tiers, str(tier))
        fallback = record.get("fallback")
        stage.add(
            {
                "t_ns": int(record["t_ns"]),
                "stamp_ns": int(record.get("stamp_ns") or 0),
                "seq": int(record.get("seq") or 0),
                "tier": UNKNOWN if tier is None else stage.tiers.index(str(tier)),
                "outcome": int(Outcome[str(record["outcome"]).upper()]),
                "fallback": UNKNOWN if fallback is None else int(Fallback[str(fallback).upper()]),
            },
            {key: math.nan if record.get(key) is None else float(record[key]) for key in TIMES},
        )
        if record.get("profiled"):
            stage.profiled.add(int(record["t_ns"]))
        if (reason := str(record.get("reason") or "")) and len(stage.reasons) < _MOST_REASONS:
            stage.reasons[int(record["t_ns"])] = reason.splitlines()[0]

    def tiers(self, stage: str, names: Iterable[str]) -> None:
        """Name a stage's tiers."""
        self.stages([stage])
        self._stage(self._names.index(stage)).tiers = tuple(names)

    def drops(self, stage: str, count: int) -> None:
        """Note frames of a stage that were never started."""
        self.stages([stage])
        found = self._stage(self._names.index(stage))
        found.dropped = (found.dropped or 0) + count

    def health(self, t_ns: int, stage: str, word: str) -> None:
        """Note a stage's health; only changes are kept."""
        self.stages([stage])
        _note_change(self._stage(self._names.index(stage)).health, t_ns, word)

    def memory(self, t_ns: int, values: Mapping[str, float | None]) -> None:
        """Take a memory sample, MiB by label."""
        for label in values:
            if label not in self._memory:
                self._memory[label] = array("d", [math.nan] * len(self._memory_t_ns))
        self._memory_t_ns.append(t_ns)
        for label, column in self._memory.items():
            value = values.get(label)
            column.append(math.nan if value is None else value)

    def anomaly(self, anomaly: LoggedAnomaly) -> None:
        """Take a finding."""
        self._anomalies.append(anomaly)

    def on_anomaly(self, t_ns: int, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Take a message of `/perf/anomaly`."""
        for status in message.status:
            self.anomaly(LoggedAnomaly(t_ns, _level(status), status.name, status.message, _values(status)))

    def on_diagnostics(self, t_ns: int, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Take a message of `/diagnostics`; other nodes' are passed over."""
        ours = [
            (status.name.removeprefix(STATUS_PREFIX), _values(status))
            for status in message.status
            if status.name.startswith(STATUS_PREFIX) and status.hardware_id in {self.node, ""}
        ]
        for name, values in ours:
            if name == NODE_STATUS:
                self._restarts += self._pid not in {"", values.get("pid", "")}
                self._pid = values.get("pid", "")
            if name == NODE_STATUS or "health" not in values:
                continue
            self.health(t_ns, name, values["health"])
            stage = self._stage(self._names.index(name))
            if tiers := values.get("tiers", ""):
                stage.tiers = tuple(tier.strip() for tier in tiers.split(","))
            self._count_drops(stage, values)

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
        return RunLog(
            name, source, self.node, tuple(self._built(index) for index in indexes),
            np.array(self._memory_t_ns, dtype=np.int64),
            {label: np.array(column, dtype=np.float64) for label, column in self._memory.items()},
            tuple(sorted(self._anomalies, key=lambda anomaly: anomaly.t_ns)), dict(self._versions), self._restarts,
            tuple(missing), tuple(troubles),
        )  # fmt: skip

    def _count_drops(self, stage: _Stage, values: Mapping[str, str]) -> None:
        """Add what the counters grew by since the last report; they begin anew with another process."""
        try:
            told = int(values["superseded"]) + int(values["stale"])
        except (KeyError, ValueError):
            return
        before = stage.dropped_told if stage.dropped_told is not None else told
        stage.dropped = (stage.dropped or 0) + (told - before if told >= before else told)
        stage.dropped_told = told

    def _built(self, index: int) -> StageLog:
        stage = self._stage(index)
        order = np.argsort(np.array(stage.whole["t_ns"], dtype=np.int64), kind="stable")
        frames = {name: np.array(column, dtype=np.int64)[order] for name, column in stage.whole.items()}
        times = {name: np.array(column, dtype=np.float64)[order] for name, column in stage.times.items()}
        name = self._names[index] if index < len(self._names) else f"stage {index}"
        return StageLog(
            name, stage.tiers, {**frames, **times}, tuple(stage.health), stage.dropped, stage.reasons,
            frozenset(stage.profiled),
        )  # fmt: skip

    def _stage(self, index: int) -> _Stage:
        return self._by_index.setdefault(index, _Stage())


def _note_change(changes: list[tuple[int, str]], t_ns: int, word: str) -> None:
    if not changes or changes[-1][1] != word:
        changes.append((t_ns, word))


def _whole(value: float | None) -> int:
    return UNKNOWN if value is None or not math.isfinite(value) else round(value)


def _level(status: Any) -> str:  # noqa: ANN401 - diagnostic_msgs/DiagnosticStatus
    level = status.level[0] if isinstance(status.level, bytes) else int(status.level)
    return _LEVELS[min(level, len(_LEVELS) - 1)]


def _values(status: Any) -> dict[str, str]:  # noqa: ANN401 - diagnostic_msgs/DiagnosticStatus
    return {pair.key: pair.value for pair in status.values}
