"""Reads the runs that a path holds: recorded logs, records, incident folders with both, and replayed runs."""

import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.text import listed
from torchperf_ros.observe.runs.run_builder import Progress, RunLogBuilder, read_records
from torchperf_ros.observe.runs.run_log import RUN_FILE, SUFFIXES, RunLog, RunLogError, StageLog, read_run
from torchperf_ros.observe.telemetry.node_state import by_label
from torchperf_ros.replay.logs.log_reader import SUFFIXES as LOG_SUFFIXES
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage, LogReader, is_log

_NO_DEADLINES: Final = "fast"  # the pace of a replay whose budget is a day
_METADATA: Final = "metadata.yaml"
_ROTATED: Final = re.compile(r"\.\d+\.jsonl$")
_NO_LOG: Final = "is no rosbag2 folder, .mcap, .db3, .bag, .jsonl or replayed run"


def read_runs(path: Path, progress: Progress, node: str | None = None) -> list[RunLog]:
    """Everything that a path holds; only this `node`, where a recorded log holds several.

    It is a recorded log as `LogReader` takes it, a `.jsonl` file of records, a `.json` or `.parquet` file
    that `torchperf replay` wrote, or a folder with such.

    Raises:
        RunLogError: it does not exist, holds nothing of the kind, or cannot be read.
    """
    if not path.exists():
        raise RunLogError(f"log {path}: does not exist")
    name = path.resolve().name
    if path.suffix == ".jsonl":
        return [read_records(path, name, progress)]
    if path.is_file() and path.suffix in SUFFIXES:
        return [_replayed(path, name)]
    if path.is_file():
        return _read_log(path, name, progress, node)
    if replayed := sorted([*path.glob(RUN_FILE), *path.glob(f"*/{RUN_FILE}")]):
        return [_replayed(file, name if file.parent == path else file.parent.name) for file in replayed]
    documents, recordings = tuple(sorted(path.glob("*.json"))), recorded_logs(path)
    if records := [file for file in sorted(path.glob("*.jsonl")) if not _ROTATED.search(file.name)]:
        # They say more than the topics do; what was recorded beside them shows the inputs.
        names = [name if len(records) == 1 else f"{name}/{file.name}" for file in records]
        runs = [read_records(file, shown, progress) for file, shown in zip(records, names, strict=True)]
    else:
        runs = _read_logs(path, name, recordings, progress, node)
    return [replace(run, documents=documents, recordings=recordings) for run in runs]


def load_run(path: Path) -> RunLog:
    """One run to compare.

    A `RunLogError` where it has no frame that was answered after the start, or is several.
    """
    runs = read_runs(path, lambda _done, _total: None)
    if len(runs) > 1:
        raise RunLogError(
            f"run {path}: holds {len(runs)} runs ({', '.join(run.name for run in runs)}); name one of them"
        )
    if not any(stage.counted.any() for stage in runs[0].stages):
        raise RunLogError(
            f"run {path}: holds no frame that was answered after the start; record `/perf/.*`, or replay"
            " a log"
        )
    return replace(runs[0], name=str(path))


_ARRAY: Final = "std_msgs/msg/Float64MultiArray"
_DIAGNOSTICS: Final = "diagnostic_msgs/msg/DiagnosticArray"
# What only a node publishes, below its name.
_TOPICS: Final = {"latency_stages": _ARRAY, "memory_stats": _ARRAY, "anomaly": _DIAGNOSTICS}
_LITTLE_ENDIAN: Final = b"\x00\x01"
_MESSAGES_AT_ONCE: Final = 1_000


def recorded_logs(path: Path) -> tuple[Path, ...]:
    """The recorded logs that a path stands for; none if it is something else."""
    if path.is_file():
        return (path,) if is_log(path) else ()
    if (path / _METADATA).is_file():
        return (path,)
    folders = (
        folder for folder in sorted(path.glob("*")) if (folder / _METADATA).is_file() or _log_files(folder)
    )
    return tuple(_log_files(path) or folders)


def _log_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.name.endswith(LOG_SUFFIXES))


def _read_logs(
    path: Path, name: str, recordings: tuple[Path, ...], progress: Progress, node: str | None
) -> list[RunLog]:
    """The recorded logs in a folder: its files are one log, folders in it are several."""
    if not recordings:
        raise RunLogError(f"log {path}: {_NO_LOG}, and holds none")
    if recordings[0].is_file():
        recordings = (path,) if len(recordings) > 1 else recordings
    runs: list[RunLog] = []
    errors: list[RunLogError] = []
    for log in recordings:
        try:
            runs += _read_log(log, name if len(recordings) == 1 else f"{name}/{log.name}", progress, node)
        except RunLogError as error:
            errors.append(error)
    if not runs:
        raise errors[0]
    return [replace(run, troubles=(*run.troubles, *map(str, errors))) for run in runs]


class _Rows:
    """Reads labelled arrays.

    After the first of its kind, only the numbers at the end of the bytes are new.
    """

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._labels: list[str] = []
        self._prefix = b""
        self._numbers = struct.Struct("")

    def read(self, message: LogMessage) -> dict[str, float]:
        raw = message.data
        if not self._labels or raw[: -self._numbers.size] != self._prefix:
            array = self._log.decode(message)
            values = by_label(array)
            if raw[:2] != _LITTLE_ENDIAN or len(values) != len(array.data):
                return values
            self._labels, self._numbers = list(values), struct.Struct(f"<{len(values)}d")
            self._prefix = raw[: -self._numbers.size]
        return dict(
            zip(self._labels, self._numbers.unpack_from(raw, len(raw) - self._numbers.size), strict=True)
        )


def _read_log(path: Path, name: str, progress: Progress, node: str | None) -> list[RunLog]:
    notes: list[str] = []
    try:
        if path.is_file() and not is_log(path):
            raise RunLogError(f"log {path}: {_NO_LOG}")
        with LogReader(path, notes.append) as log:
            places = [(*one.name.rpartition("/")[::2], one.type_name) for one in log.topics.values()]
            nodes = sorted({found for found, topic, kind in places if found and _TOPICS.get(topic) == kind})
            builders = {found: RunLogBuilder(found) for found in nodes if node in {None, found}}
            if not builders:
                raise RunLogError(_nothing(path, log, nodes, node))
            _fold_log(log, builders, progress)
            there = {topic.name for topic in log.topics.values() if topic.count}
    except LogError as error:
        raise RunLogError(str(error)) from error
    except OSError as error:
        raise RunLogError(f"log {path}: cannot be read: {error.strerror or error}") from error
    runs = []
    for found, builder in builders.items():
        expected = {
            f"{found}/latency_stages": "latencies, tiers and outcomes",
            f"{found}/memory_stats": "memory",
            f"{found}/anomaly": "anomalies",
            "/diagnostics": "names of stages and tiers, health",
        }
        missing = (
            f"no {topic} in this log: {what}" for topic, what in expected.items() if topic not in there
        )
        run = builder.build(name if len(builders) == 1 else f"{name} {found}", path, tuple(missing))
        runs.append(replace(run, recordings=(path,), troubles=(*run.troubles, *notes)))
    return runs


def _fold_log(log: LogReader, builders: Mapping[str, RunLogBuilder], progress: Progress) -> None:
    wanted = {f"{found}/{topic}": kind for found in builders for topic, kind in _TOPICS.items()}
    wanted["/diagnostics"] = _DIAGNOSTICS
    topics = [topic for topic in log.topics.values() if wanted.get(topic.name) == topic.type_name]
    total = sum(max(topic.count, 0) for topic in topics)
    rows = {topic.name: _Rows(log) for topic in topics}
    done = 0
    for done, message in enumerate(log.messages([topic.name for topic in topics]), start=1):
        if done % _MESSAGES_AT_ONCE == 0:
            progress(done, total)
        if message.type_name != wanted[message.topic]:
            continue
        found, _, topic = message.topic.rpartition("/")
        own = [builders[found]] if topic in _TOPICS else list(builders.values())
        try:
            if topic == "latency_stages":
                own[0].row(message.t_ns, rows[message.topic].read(message))
            elif topic == "memory_stats":
                own[0].memory(message.t_ns, rows[message.topic].read(message))
            else:
                decoded = log.decode(message)
                for builder in own:
                    (builder.on_anomaly if topic == "anomaly" else builder.on_diagnostics)(
                        message.t_ns, decoded
                    )
        except BadInput as error:
            for builder in own:
                builder.trouble(f"topic {message.topic}: {error}")
    progress(done, total)
    for builder in builders.values() if done < total else ():
        builder.trouble(f"{total - done:,} of {total:,} messages cannot be read")


def _nothing(path: Path, log: LogReader, nodes: list[str], node: str | None) -> str:
    others = f"; it has the nodes {', '.join(nodes)}" if nodes else ""
    return (
        f"log {path}: no node's topics such as {node or '/perf'}/latency_stages{others}; record them with "
        f"`ros2 bag record -e '/perf/.*|/diagnostics'`; it has {listed(sorted(log.topics))}"
    )


def _without_deadlines(stage: StageLog) -> StageLog:
    frames = stage.frames.copy()
    frames["budget_ms"] = frames["lateness_ms"] = np.nan
    return replace(stage, frames=frames)


def _replayed(file: Path, name: str) -> RunLog:
    """A run with the log that it was made of, which shows its inputs.

    Where that is gone, what was recorded beside a run in the folder of its log may show them.
    """
    run = replace(read_run(file), name=name)
    if run.fact("pace") == _NO_DEADLINES:
        run = replace(run, stages=tuple(map(_without_deadlines, run.stages)))
    log = Path(str(run.fact("log", "path") or ""))
    recordings = recorded_logs(log) if log.is_absolute() and log.exists() else ()
    if not recordings and file.name == RUN_FILE:
        recordings = tuple(sorted(file.parent.glob("*.mcap")))
    return replace(run, recordings=recordings)
