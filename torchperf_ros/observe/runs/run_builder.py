"""Folds the messages or records of a node into a `RunLog`."""

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.observe.runs.run_log import (
    CANDIDATE,
    UNKNOWN,
    LoggedAlert,
    RunLog,
    RunLogError,
    StageLog,
)
from torchperf_ros.observe.telemetry.node_state import NodeState, level_of, stamp_before, whole
from torchperf_ros.stage.frame_table import FRAME, KEPT

# Called with how many of how many messages or bytes have been read.
Progress = Callable[[int, int], None]

_ROW: Final = struct.Struct("".join(FRAME[name].char for name in FRAME.names or ()))
_KINDS: Final = {name: FRAME[name].kind for name in FRAME.names or ()}
# Columns that messages or records fill; the others stay 0.
_FILLED: Final = tuple(name for name, _ in KEPT)
# Whole numbers that are 0 where they are unknown; the others are indexes, and -1.
_ZERO: Final = {"t_ns", "stamp_ns"}
_WORDS: Final[Mapping[str, type[Outcome] | type[Fallback] | type[GuardVerdict]]] = {
    "outcome": Outcome,
    "fallback": Fallback,
    "check": GuardVerdict,
}
_MOST_TROUBLES: Final = 20
_MOST_REASONS: Final = 50_000
_SAME_RESTART_NS: Final = 10_000_000_000


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
    """Folds a node's messages or records, one by one, into a `RunLog`.

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
        if len(self._troubles) < _MOST_TROUBLES:
            self._troubles.append(text)

    def row(self, t_ns: int, values: Mapping[str, float]) -> None:
        """Take a row of `/perf/latency_stages` by label, received at this time.

        One that makes no sense is counted.
        """
        index, outcome = (whole(values.get(name)) for name in ("stage", "outcome"))
        if index < 0 or not 0 <= outcome < len(Outcome):
            self._odd += 1
            return
        known: dict[str, float | None] = {name: values.get(name) for name in _FILLED}
        odd = [name for name, words in _WORDS.items() if whole(known[name]) >= len(words)]
        stamped = {"stamp_ns": stamp_before(values, t_ns)}
        self._add(self._by_number(index), t_ns, known | dict.fromkeys(odd) | stamped)

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
        for status in message.status:
            values = {pair.key: pair.value for pair in status.values}
            self._anomalies.append(
                LoggedAlert(t_ns, level_of(status).name, status.name, status.message, values)
            )

    # diagnostic_msgs/DiagnosticArray
    def on_diagnostics(self, t_ns: int, message: Any) -> None:  # noqa: ANN401
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
        if mute := sum(
            int(np.isnan(stage.lateness_ms[np.isfinite(stage.frames["budget_ms"])]).sum())
            for stage in stages
        ):
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
        known = {name: record.get(name) for name in _FILLED} | {"outcome": record["outcome"]}
        for name, words in _WORDS.items():
            known[name] = None if known[name] is None else words[str(known[name]).upper()]
        if (tier := record.get("tier")) is not None:
            stage.tiers += () if tier in stage.tiers else (str(tier),)
            known["tier"] = stage.tiers.index(str(tier))
        self._add(stage, t_ns, known | {"seq": record.get("seq") or 0})
        if record.get("profiled"):
            stage.profiled.add(t_ns)
        if (reason := str(record.get("reason") or "")) and len(stage.reasons) < _MOST_REASONS:
            stage.reasons[t_ns] = reason.partition("\n")[0]

    def _add(self, stage: _Stage, t_ns: int, known: Mapping[str, float | None]) -> None:
        """Append a frame.

        Where numbers begin anew, another process has the node's name since its `start`.
        """
        row = {name: _cell(name, known.get(name)) for name in _KINDS} | {"t_ns": t_ns}
        seq = int(row["seq"])
        if seq < stage.last_seq:
            self._restart(self._started_ns if self._started_ns > self._last_ns else t_ns)
        stage.last_seq, self._last_ns = seq, t_ns
        stage.rows += _ROW.pack(*row.values())

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


def _cell(name: str, value: float | None) -> float:
    """A value as the column has it: NaN, 0 or -1 where it is unknown."""
    if _KINDS[name] == "f":
        return math.nan if value is None else float(value)
    return 0 if value is None and (name in _ZERO or name not in _FILLED) else whole(value)


_VERSION: Final = 1
_LINES_AT_ONCE: Final = 5_000


def _rotated(path: Path) -> list[Path]:
    """This file and those that were rotated away from it, oldest first.

    `records.2.jsonl`, ..., `records.jsonl`.
    """
    own = re.compile(rf"{re.escape(path.stem)}\.(\d+)\.jsonl")
    older = [
        (int(number[1]), file) for file in path.parent.iterdir() if (number := own.fullmatch(file.name))
    ]
    return [file for _, file in sorted(older, reverse=True)] + [path]


def read_records(path: Path, name: str, progress: Progress) -> RunLog:
    """The run that a node's records (`.jsonl`) are of, with the files that were rotated away from this one.

    Raises:
        RunLogError: a file cannot be read, or no line is a record.
    """
    files = _rotated(path)
    builder = RunLogBuilder("/perf")
    kinds: Counter[str] = Counter()
    broken = lost = other = done = 0
    try:
        total = sum(file.stat().st_size for file in files)
        for file in files:
            with file.open("rb") as lines:
                for number, line in enumerate(lines):
                    done += len(line)
                    if number % _LINES_AT_ONCE == 0:
                        progress(done, total)
                    try:
                        record = json.loads(line)
                        if record["v"] != _VERSION:
                            other += 1
                            continue
                        lost += int(record["records"]) if record["kind"] == "drops" else 0
                        builder.record(record)
                        kinds[str(record["kind"])] += 1
                    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
                        broken += 1  # a line that was being written when the power went, for example
    except OSError as error:
        raise RunLogError(f"log {path}: cannot be read: {error.strerror or error}") from error
    progress(total, total)
    if not kinds and not other:
        raise RunLogError(
            f"log {path}: none of its {broken:,} lines is a record; one begins like {{'v': 1, 'kind':"
            " 'frame', ...}"
        )
    for count, what in (
        (broken, "lines could not be read and were left out (a cut-off last line is normal)"),
        (lost, "records were not written by the node: too many at once, or no room on the disk"),
        (other, f"records are of another version than {_VERSION} and were left out"),
    ):
        if count:
            builder.trouble(f"{count:,} {what}")
    expected = {"frame": "latencies", "memory": "memory", "health": "health", "anomaly": "anomalies"}
    missing = (f"no records of kind {kind}: {what}" for kind, what in expected.items() if kind not in kinds)
    return builder.build(name, path, tuple(missing))
