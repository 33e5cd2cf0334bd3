"""What a node did over some time.

A table of the answered frames of each stage, and what else is known about it.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.alert import Level
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict, Outcome
from torchperf_ros.observe.telemetry.node_state import NodeState
from torchperf_ros.observe.watch.memory_watch import theil_sen_slope
from torchperf_ros.stage.frame_table import FRAME

STEPS: Final = ("wait_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
"""The parts of a frame's time that are measured, in their order.

What is left of the total is hand-over and publish.
"""
UNKNOWN: Final = -1
MEMORY: Final = {
    "cuda_allocated_mib": "Device memory of the workers",
    "workers_rss_mib": "Memory of the workers",
    "memory_mib": "Memory",
}
"""The figures of memory that say what the models use, the best first."""
_ROW: Final = struct.Struct("".join(FRAME[name].char for name in FRAME.names or ()))
_ZEROS: Final = {name: math.nan if FRAME[name].kind == "f" else 0 for name in FRAME.names or ()}
_INDEXES: Final = ("tier", "fallback", "check", "scene", "missing_inputs", "stale")
_NOTHING_KNOWN: Final = _ZEROS | dict.fromkeys(_INDEXES, UNKNOWN)
_WORDS: Final = (("fallback", Fallback), ("check", GuardVerdict))
_TIMES: Final = ("age_ms", *STEPS, "total_ms", "budget_ms", "deadline_ms", "lateness_ms")
_FARTHEST_MS: Final = 1e9  # a stamp is further off only if it is nonsense
_MOST_TROUBLES: Final = 20
_MOST_REASONS: Final = 50_000
_SETTLE_S: Final = 60.0  # caches fill
_LEAST_TREND_S: Final = 180.0
_LEAST_SAMPLES, _TREND_POINTS = 8, 60
_SAME_RESTART_NS: Final = 10_000_000_000
_NS_PER_S: Final = 1e9
_S_PER_H: Final = 3600.0

T = TypeVar("T")
Values = NDArray[np.float64]


class RunLogError(TorchperfError):
    """Runs cannot be read, compared or kept; the message says which, why, and what would do."""


CANDIDATE: Final = {
    "version": "serves",
    "candidate": "candidate",
    "candidate_pairs": "on the same frames",
    "candidate_differs": "outputs differ, the last",
    "candidate_refused": "the guard would refuse, the last",
    "candidate_failed": "without a result, the last",
}
"""What `/diagnostics` and records say of the two versions of a stage's model, with titles."""


@dataclass
class StageLog:
    """The answered frames of a stage, oldest first.

    Attributes:
        name: of the stage; `stage 0` where the log does not say.
        tiers: names of its tiers, from the most accurate on; may be empty.
        frames: rows of `FRAME`; what the source does not know is NaN, an index -1, a stamp or a hash 0.
        health: ROS time in ns and the word, each time that it changed.
        drops: ROS time in ns and how many frames were never started, because a newer one came or they were
            too old; None where not known.
        reasons: why a frame was not on time, or what the guard refused, by `t_ns`, where the log says
            (records and replays do).
        last_reason: of the last frame that was not on time, as `/diagnostics` has it.
        profiled: `t_ns` of frames that ran under a profiler, which takes time (records say).
        trigger: the topic that the stage runs for; empty where the log does not say, or another stage
            publishes it.
        output: the topic that it publishes, without the namespace that it may have; empty where the log
            does not say.
        gaps: shape (n,), frames before each that were never started, by the gaps in `seq`; of what is
            compared.
        candidate: what was last said of the other version of its model, by the keys of `/diagnostics`; else
            empty.
    """

    name: str
    tiers: tuple[str, ...] = ()
    frames: NDArray[np.void] = field(default_factory=lambda: np.empty(0, dtype=FRAME))
    health: list[tuple[int, str]] = field(default_factory=list)
    drops: list[tuple[int, int]] | None = None
    reasons: dict[int, str] = field(default_factory=dict)
    last_reason: str = ""
    profiled: set[int] = field(default_factory=set)
    trigger: str = ""
    output: str = ""
    gaps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    candidate: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def dropped(self) -> int | None:
        """Frames that were never started; None where not known."""
        return None if self.drops is None else sum(count for _, count in self.drops)

    @property
    def own_stamps(self) -> NDArray[np.int64] | None:
        """The stamps, where each frame has its own."""
        stamps = np.asarray(self.frames["stamp_ns"])
        return stamps if len(stamps) and stamps.all() and len(np.unique(stamps)) == len(stamps) else None

    @property
    def total_ms(self) -> Values:
        """Receipt to publish of each frame, NaN where unknown."""
        return np.asarray(self.frames["total_ms"], dtype=np.float64)

    @property
    def budget_ms(self) -> float:
        """The last known budget, NaN where there is none."""
        budgets: Values = self.frames["budget_ms"]
        known = budgets[np.isfinite(budgets)]
        return float(known[-1]) if len(known) else math.nan

    @property
    def on_time(self) -> NDArray[np.bool_]:
        """Which frames were answered by their own whole result, in time."""
        return np.asarray(self.frames["outcome"] == Outcome.ON_TIME)

    @property
    def missed(self) -> NDArray[np.bool_]:
        """Which frames had no result of their own in time, not even a part of one."""
        return np.asarray(~np.isin(self.frames["outcome"], IN_TIME))

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Which frames say something about the stage: all but those that came while it started."""
        return np.asarray(self.frames["outcome"] != Outcome.STARTING)

    @property
    def lateness_ms(self) -> Values:
        """How far past its deadline each frame was answered.

        Negative: before; NaN where the log does not say.
        """
        return np.asarray(self.frames["lateness_ms"], dtype=np.float64)

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

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "LoggedAlert":
        """An alert as records and replayed runs have it."""
        values = {str(key): str(value) for key, value in (record.get("values") or {}).items()}
        return cls(
            int(record["t_ns"]), str(record["level"]), str(record["name"]), str(record["message"]), values
        )


@dataclass(frozen=True)
class RunLog:
    """What is known about one node over some time.

    Attributes:
        source: the log's path, None for one that was listened to.
        memory_t_ns: ROS time of each memory sample.
        memory: MiB by label, one for each sample, NaN where unknown.
        anomalies: oldest first.
        restarted_ns: ROS times at which another process took the node's name, as far as the log says.
        missing: what the log does not hold, in words.
        troubles: what could not be read, in words.
        documents: other files that belong to it (JSON of an incident).
        recordings: recorded logs that may hold the frames' inputs, as `LogReader` takes them.
        facts: what the summary of a replay says: `log`, `machine`, `model`, `pace`, `commit`, ...; may be
            empty.
    """

    name: str
    stages: tuple[StageLog, ...]
    source: Path | None = None
    node: str = "/perf"
    memory_t_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    memory: Mapping[str, Values] = field(default_factory=dict)
    anomalies: tuple[LoggedAlert, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    restarted_ns: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    documents: tuple[Path, ...] = ()
    recordings: tuple[Path, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def stage(self, name: str) -> StageLog:
        """The stage of this name; one without frames where there is none."""
        return next((one for one in self.stages if one.name == name), StageLog(name))

    def fact(self, *path: str) -> Any:  # noqa: ANN401 - whatever the summary holds
        """What lies below these keys of `facts`; None where there is nothing."""
        found: Any = self.facts
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def lives(self) -> "list[RunLog]":
        """A run for each process that had the node's name.

        Figures and trends of several say nothing about any.
        """
        edges = pairwise([-math.inf, *self.restarted_ns, math.inf])
        lives = [one for begin_ns, end_ns in edges if any((one := self._between(begin_ns, end_ns)).span_ns)]
        if len(lives) < 2:  # noqa: PLR2004
            return [self]
        return [
            replace(one, name=f"{self.name}, run {at} of {len(lives)}")
            for at, one in enumerate(lives, start=1)
        ]

    def _between(self, begin_ns: float, end_ns: float) -> "RunLog":
        def within(pairs: list[tuple[int, T]]) -> list[tuple[int, T]]:
            return [pair for pair in pairs if begin_ns <= pair[0] < end_ns]

        def chosen(t_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
            return np.asarray((begin_ns <= t_ns) & (t_ns < end_ns))

        stages = (
            replace(
                stage,
                frames=stage.frames[chosen(stage.frames["t_ns"])],
                health=within(stage.health),
                drops=None if stage.drops is None else within(stage.drops),
            )
            for stage in self.stages
        )
        sampled = chosen(self.memory_t_ns)
        return replace(
            self,
            stages=tuple(stages),
            memory_t_ns=self.memory_t_ns[sampled],
            restarted_ns=(),
            memory={label: column[sampled] for label, column in self.memory.items()},
            anomalies=tuple(one for one in self.anomalies if begin_ns <= one.t_ns < end_ns),
        )

    @property
    def span_ns(self) -> tuple[int, int]:
        """First and last time of anything in it; (0, 0) if it is empty."""
        times = np.concatenate(
            [
                *(stage.frames["t_ns"] for stage in self.stages),
                self.memory_t_ns,
                [one.t_ns for one in self.anomalies],
            ]
        ).astype(np.int64)
        return (int(times.min()), int(times.max())) if len(times) else (0, 0)

    @property
    def used_memory(self) -> tuple[str, Values, Values]:
        """What the models used.

        The label in `MEMORY`, times from the first sample on in s, and MiB; may be empty.
        """
        for label in MEMORY:
            column = self.memory.get(label, np.empty(0))
            if np.isfinite(column).any():
                known = np.isfinite(column) & (column > 0)
                return label, (self.memory_t_ns[known] - self.memory_t_ns[0]) / _NS_PER_S, column[known]
        return "", np.empty(0), np.empty(0)

    @property
    def memory_slope(self) -> float:
        """MiB per hour after the start, as Theil (1950) and Sen (1968) have it, of medians of up to 60 stretches.

        A worker that is replaced now and then does not bend it. NaN where there are less than three
        minutes.
        """
        _, times, mib = self.used_memory
        used = np.flatnonzero((times >= times[:1] + _SETTLE_S) & (np.diff(times, prepend=-1.0) > 0))
        if len(used) < _LEAST_SAMPLES or np.ptp(times[used]) < _LEAST_TREND_S:
            return math.nan
        parts = np.array_split(used, min(len(used), _TREND_POINTS))
        middle, memory = (np.array([np.median(column[part]) for part in parts]) for column in (times, mib))
        return theil_sen_slope(middle, memory) * _S_PER_H


@dataclass
class _Stage(StageLog):
    """A stage while it is read: bytes of its rows, and what the next message is compared with."""

    rows: bytearray = field(default_factory=bytearray)
    dropped_before: int | None = None
    last_seq: int = UNKNOWN

    def drop(self, t_ns: int, count: int) -> None:
        self.drops = self.drops or []
        if count:
            self.drops.append((t_ns, count))


class RunLogBuilder:
    """Folds what a node says, message by message or record by record, into a `RunLog`.

    What comes may be of any kind in any order; messages may be rclpy's or those of `rosbags`. `state`: the
    node's own.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self._odd = 0
        self._by_index: dict[int, _Stage] = {}
        self._names: list[str] = []  # of the first stages
        self._memory: list[tuple[int, Mapping[str, float | None]]] = []
        self._anomalies: list[LoggedAlert] = []
        self._versions: dict[str, str] = {}
        self._troubles: list[str] = []
        self.state = NodeState(node)
        self._started_ns = self._last_ns = 0  # the last `start`, and the last frame
        self._restarted_ns: list[int] = []

    def trouble(self, text: str) -> None:
        """Note what could not be read."""
        if len(self._troubles) < _MOST_TROUBLES:
            self._troubles.append(text)

    def row(self, t_ns: int, values: Mapping[str, float]) -> None:
        """Take a row of `/perf/latency_stages` by label, received at this time.

        One that makes no sense is counted.
        """
        index, outcome, seq = (_whole(values.get(name)) for name in ("stage", "outcome", "seq"))
        indexes = {name: _whole(values.get(name)) for name in _INDEXES}
        if index < 0 or not 0 <= outcome < len(Outcome):
            self._odd += 1
            return
        times = {name: values.get(name, math.nan) for name in _TIMES}
        before_ms = times["total_ms"] + times["age_ms"]
        self._add(
            self._by_number(index),
            t_ns,
            seq,
            outcome=outcome,
            stamp_ns=t_ns - round(before_ms * 1e6) if abs(before_ms) < _FARTHEST_MS else 0,
            **(indexes | {name: UNKNOWN for name, words in _WORDS if indexes[name] >= len(words)}),
            **times,
        )

    def record(self, record: Mapping[str, Any]) -> None:
        """Take a line of records; kinds and fields that are not known are passed over.

        Raises:
            KeyError, ValueError, TypeError, AttributeError: it is no record; nothing of it counts.
        """
        kind = record["kind"]
        if kind == "frame":
            self._frame(record)
        elif kind == "memory":
            self.memory(int(record["t_ns"]), dict(record["values"]))
        elif kind == "health":
            self._health(int(record["t_ns"]), str(record["stage"]), str(record["to"]))
        elif kind == "anomaly":
            self._anomalies.append(LoggedAlert.of(record))
        elif kind == "candidate":
            self._stage(str(record["stage"])).candidate = {
                name: str(record.get(name, "")) for name in CANDIDATE
            }
        elif kind == "dropped":
            count = int(record["superseded"]) + int(
                record.get("stale", 0)
            )  # older nodes dropped stale frames, too
            self._stage(str(record["stage"])).drop(int(record["t_ns"]), count)
        elif kind == "start":
            self._started_ns = int(record.get("t_ns") or 0)
            self.node = str(record.get("node", self.node))
            self._versions.update(
                {key: str(value) for key, value in (record.get("versions") or {}).items()}
            )
            for entry in record.get("stages") or ():
                stage = self._stage(str(entry["name"]))
                stage.drops = stage.drops or []  # where there are any, records say so
                stage.tiers = tuple(map(str, entry.get("tiers") or ()))
                stage.trigger, stage.output = (
                    str(entry.get("trigger") or ""),
                    str(entry.get("output") or ""),
                )

    def memory(self, t_ns: int, values: Mapping[str, float | None]) -> None:
        """Take a memory sample, MiB by label."""
        self._memory.append((t_ns, values))

    def on_anomaly(self, t_ns: int, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Take a message of `/perf/anomaly`."""
        for status in message.status:
            level = status.level[0] if isinstance(status.level, bytes) else int(status.level)
            word = Level(min(level, Level.STALE)).name
            values = {pair.key: pair.value for pair in status.values}
            self._anomalies.append(LoggedAlert(t_ns, word, status.name, status.message, values))

    # diagnostic_msgs/DiagnosticArray
    def on_diagnostics(self, t_ns: int, message: Any) -> None:  # noqa: ANN401
        """Take a message of `/diagnostics`; other nodes' are passed over."""
        restarts = self.state.restarts
        self.state.on_diagnostics(message)
        if self.state.restarts > restarts:
            self._restart(t_ns)
        for name, now in self.state.stages.items():
            self._health(t_ns, name, now.health)
            stage = self._stage(name)
            if tiers := now.values.get("tiers", ""):
                stage.tiers = tuple(tier.strip() for tier in tiers.split(","))
            stage.output = now.values.get("output", "")
            stage.trigger = now.values.get("trigger") or stage.trigger
            if now.values.get("candidate"):
                stage.candidate = {key: now.values.get(key, "") for key in CANDIDATE}
            stage.last_reason = now.values.get("last_reason", "").partition("\n")[0] or stage.last_reason
            if now.dropped is not None:  # counters begin anew with another process
                before = now.dropped if stage.dropped_before is None else stage.dropped_before
                stage.drop(t_ns, now.dropped - before if now.dropped >= before else now.dropped)
                stage.dropped_before = now.dropped

    def build(self, name: str, source: Path | None, missing: tuple[str, ...] = ()) -> RunLog:
        """The log as it stands; see `RunLog`."""
        odd = (
            [f"{self._odd:,} rows made no sense (unknown stage or outcome) and were left out"]
            if self._odd
            else []
        )
        labels = dict.fromkeys(label for _, values in self._memory for label in values)
        stages = [stage for _, stage in sorted(self._by_index.items())]
        for stage in stages:
            frames = np.frombuffer(stage.rows, FRAME)
            stage.frames = frames[np.argsort(frames["t_ns"], kind="stable")]
        if mute := sum(int(np.isnan(stage.lateness_ms).sum()) for stage in stages):
            self.trouble(f"{mute:,} frames do not say how late they were: an older node has written them")
        return RunLog(
            name,
            tuple(stages),
            source,
            self.node,
            np.array([t_ns for t_ns, _ in self._memory], dtype=np.int64),
            {
                label: np.array([values.get(label) for _, values in self._memory], np.float64)
                for label in labels
            },
            tuple(sorted(self._anomalies, key=lambda anomaly: anomaly.t_ns)),
            self._versions,
            tuple(self._restarted_ns),
            missing,
            (*self._troubles, *odd),
        )

    def _frame(self, record: Mapping[str, Any]) -> None:
        stage, t_ns = self._stage(str(record["stage"])), int(record["t_ns"])
        tier, fallback, check = (record.get(name) for name in ("tier", "fallback", "check"))
        if tier is not None and tier not in stage.tiers:
            stage.tiers = (*stage.tiers, str(tier))
        self._add(
            stage,
            t_ns,
            int(record.get("seq") or 0),
            stamp_ns=int(record.get("stamp_ns") or 0),
            tier=UNKNOWN if tier is None else stage.tiers.index(str(tier)),
            outcome=Outcome[str(record["outcome"]).upper()],
            fallback=UNKNOWN if fallback is None else Fallback[str(fallback).upper()],
            check=UNKNOWN if check is None else GuardVerdict[str(check).upper()],
            **{name: int(record.get(name, UNKNOWN)) for name in ("scene", "missing_inputs", "stale")},
            **{key: math.nan if record.get(key) is None else float(record[key]) for key in _TIMES},
        )
        if record.get("profiled"):
            stage.profiled.add(t_ns)
        if (reason := str(record.get("reason") or "")) and len(stage.reasons) < _MOST_REASONS:
            stage.reasons[t_ns] = reason.partition("\n")[0]

    def _add(self, stage: _Stage, t_ns: int, seq: int, **values: float) -> None:
        """Append a frame.

        Where numbers begin anew, another process has the node's name since its `start`.
        """
        if seq < stage.last_seq:
            self._restart(self._started_ns if self._started_ns > self._last_ns else t_ns)
        stage.last_seq, self._last_ns = seq, t_ns
        stage.rows += _ROW.pack(*{**_NOTHING_KNOWN, "t_ns": t_ns, "seq": seq, **values}.values())

    def _restart(self, t_ns: int) -> None:
        """Another process has the name; both its frames and its reports say so."""
        for stage in self._by_index.values():
            stage.last_seq = UNKNOWN
        if not self._restarted_ns or t_ns - self._restarted_ns[-1] > _SAME_RESTART_NS:
            self._restarted_ns.append(t_ns)

    def _health(self, t_ns: int, stage: str, word: str) -> None:
        """Only changes are kept, and the first word of a process."""
        changes = self._stage(stage).health
        began_ns = max(self._started_ns, *self._restarted_ns[-1:], 0)
        if not changes or changes[-1][1] != word or changes[-1][0] < began_ns <= t_ns:
            changes.append((t_ns, word))

    def _stage(self, name: str) -> _Stage:
        if name not in self._names:
            self._names.append(name)
        stage = self._by_number(self._names.index(name))
        stage.name = name
        return stage

    def _by_number(self, index: int) -> _Stage:
        return self._by_index.setdefault(index, _Stage(f"stage {index}"))


def _whole(value: float | None) -> int:
    return UNKNOWN if value is None or not math.isfinite(value) else round(value)
