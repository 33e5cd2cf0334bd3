"""What a node did over some time: a table of the answered frames of each stage, and what else is known.

As a file it is a summary and a row for each frame, as JSON for people or as Parquet for many frames. JSON:
the summary, with `frames` in each of its `stages`: a list for each column of `FRAME`. Parquet: a row for
each frame, the columns of `FRAME` after `stage`; the summary is the file's metadata under the key
`torchperf_run`.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.outcome import IN_TIME, Health, Outcome
from torchperf_ros.settings.files import part_of
from torchperf_ros.stage.frame_table import FRAME
from torchperf_ros.stage.trend import theil_sen_slope

# The parts of a frame's time that are measured, in their order.
#
# What is left of the total is hand-over and publish.
STEPS: Final = ("wait_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
UNKNOWN: Final = -1
# The figures of memory that say what the models use, the best first.
MEMORY: Final = {
    "cuda_allocated_mib": "Device memory of the workers",
    "workers_rss_mib": "Memory of the workers",
    "memory_mib": "Memory",
}
_SETTLE_S: Final = 60.0  # caches fill
_LEAST_TREND_S: Final = 180.0
_LEAST_SAMPLES, _TREND_POINTS = 8, 60
_NS_PER_S: Final = 1e9
_S_PER_H: Final = 3600.0

T = TypeVar("T")
Values = NDArray[np.float64]


class RunLogError(TorchperfError):
    """Runs cannot be read, compared or kept; the message says which, why, and what would do."""


# Keys of `/diagnostics` and records about the two versions of a stage's model, with titles.
CANDIDATE: Final = {
    "version": "serves",
    "candidate": "candidate",
    "candidate_pairs": "on the same frames",
    "candidate_differs": "outputs differ, the last",
    "candidate_refused": "the guard would refuse, the last",
    "candidate_failed": "without a result, the last",
}


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
        candidate: the last status of the other version of its model, by the keys of `/diagnostics`; else
            empty.
        dropped: how many frames were never started; None where not known.
        lateness_ms: how far past its deadline each frame was answered. Negative: before; NaN where the log
            does not say, or the frame had none.
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
        return None if self.drops is None else sum(count for _, count in self.drops)

    @property
    def own_stamps(self) -> NDArray[np.int64] | None:
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
        return np.asarray(self.frames["lateness_ms"], dtype=np.float64)

    @property
    def safe_stops(self) -> list[tuple[int, int]]:
        """From when to when, in ns of ROS time, it was in SAFE_STOP."""
        end_ns = max([int(self.frames["t_ns"].max(initial=0)), *(t_ns for t_ns, _ in self.health)])
        changes = pairwise([*self.health, (end_ns, "")])
        return [
            (begin_ns, over_ns)
            for (begin_ns, word), (over_ns, _) in changes
            if word == Health.SAFE_STOP.name
        ]

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

    @property
    def frames(self) -> dict[str, NDArray[np.void]]:
        return {stage.name: stage.frames for stage in self.stages}

    def stage(self, name: str) -> StageLog:
        """The stage of this name; one without frames where there is none."""
        return next((one for one in self.stages if one.name == name), StageLog(name))

    def fact(self, *path: str) -> Any:  # noqa: ANN401 - any JSON value
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
        """MiB per hour after the start: Theil (1950) and Sen (1968), of medians of up to 60 stretches.

        A worker that is replaced now and then does not bend it. NaN where there are less than three
        minutes.
        """
        _, times, mib = self.used_memory
        used = np.flatnonzero((times >= times[:1] + _SETTLE_S) & (np.diff(times, prepend=-1.0) > 0))
        if len(used) < _LEAST_SAMPLES or np.ptp(times[used]) < _LEAST_TREND_S:
            return math.nan
        return theil_sen_slope(times[used], mib[used], _TREND_POINTS) * _S_PER_H


# The run in the folder of a log that was replayed beside others.
RUN_FILE: Final = "run.parquet"
SUFFIXES: Final = (".json", ".parquet")
VERSION: Final = 1
_KEY: Final = b"torchperf_run"
_KIND: Final = "run"
_NAMES: Final = FRAME.names or ()
# Columns that runs of older versions lack.
_LATER: Final = ("check", "missing_inputs", "scene", "stale", "deadline_ms")
_MEMORY: Final = {"rss_mib": "workers_rss_mib", "own_rss_mib": "node_rss_mib"}
_SOFTWARE: Final = ("torchperf_ros", "commit", "pace")

# Of `FRAME`.
Rows = NDArray[np.void]


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to: all of it gets that name when the block ends, or nothing does.

    Through a link to where that leads; a terminal or a pipe is written itself.

    Raises:
        OSError: it cannot be written; the error names `path`.
    """
    target = path.resolve()
    part = part_of(target) if target.is_file() or not target.exists() else target
    try:
        yield part
        if part != target:
            part.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        if part != target:
            part.unlink(missing_ok=True)


def check_run_path(path: Path) -> None:
    """Find out before a long run whether its file can be written at its end.

    A `RunLogError` says why not.
    """
    if path.suffix not in SUFFIXES:
        raise RunLogError(f"run {path}: has to end in .json or .parquet")
    if path.suffix == ".parquet":
        _pyarrow()


def write_run(run: RunLog, path: Path) -> None:
    """Write a run of a replay to a `.json` or `.parquet` file: all of it, or nothing under this name.

    Its `facts` are the summary, a JSON object (see `docs/replay.md`).

    Raises:
        RunLogError: another suffix, or pyarrow is not installed.
        OSError: it cannot be written.
    """
    check_run_path(path)
    summary = {"v": VERSION, "kind": _KIND, **run.facts}
    with whole_file(path) as part:
        if path.suffix == ".json":
            frames = run.frames
            stages = [{**stage, "frames": _lists(frames[stage["name"]])} for stage in summary["stages"]]
            part.write_bytes(_json({**summary, "stages": stages}) + b"\n")
        else:
            _write_parquet(run.frames, part, _json(summary))


def read_run(path: Path) -> RunLog:
    """Read what `write_run` wrote.

    A `RunLogError` where it cannot be read, or is no run of this version.
    """
    try:
        summary, frames = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path)
        return run_of(summary, frames, path.name, path)
    except OSError as error:
        raise RunLogError(f"run {path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise RunLogError(f"run {path}: is no run that `torchperf replay -o` wrote ({error})") from error


def run_of(
    summary: Mapping[str, Any], frames: Mapping[str, Rows], name: str = "run", path: Path | None = None
) -> RunLog:
    """The run of a summary, see `docs/replay.md`, and rows of `FRAME` by stage, in the stages' order.

    Raises:
        RunLogError: its memory is no series.
    """
    entries = {entry["name"]: entry for entry in summary["stages"]}
    stages = tuple(_stage(stage, rows, entries.get(stage, {})) for stage, rows in frames.items())
    begin_ns = min((int(stage.frames["t_ns"][0]) for stage in stages if len(stage)), default=0)
    times_ns, sizes = _memory(summary.get("memory") or {}, begin_ns, name)
    alerts = map(LoggedAlert.of, summary.get("anomalies") or ())
    return RunLog(
        name,
        stages,
        path,
        "/perf",
        times_ns,
        sizes,
        tuple(sorted(alerts, key=lambda alert: alert.t_ns)),
        {key: str(summary[key]) for key in _SOFTWARE if key in summary},
        missing=() if len(times_ns) else ("no memory samples in this run: memory",),
        troubles=tuple(map(str, summary.get("troubles") or ())),
        facts=summary,
    )


def _stage(name: str, rows: Rows, entry: Mapping[str, Any]) -> StageLog:
    ordered = np.all(np.diff(rows["t_ns"]) >= 0)
    frames = rows if ordered else rows[np.argsort(rows["t_ns"], kind="stable")]
    # Older replays dropped stale frames, too.
    words = ("dropped",) if "dropped" in entry else ("superseded", "stale")
    drops = [entry[word] for word in words if word in entry]
    reasons = {int(seq): str(reason) for seq, reason in (entry.get("reasons") or {}).items()}
    explained = frames[np.isin(frames["seq"], list(reasons))] if reasons else frames[:0]
    return StageLog(
        name,
        tuple(map(str, entry.get("tiers") or ())),
        frames,
        drops=[(0, sum(drops))] if drops else None,
        reasons={int(row["t_ns"]): reasons[int(row["seq"])] for row in explained},
        output=str(entry.get("output") or ""),
    )


def _memory(memory: Any, begin_ns: int, name: str) -> tuple[NDArray[np.int64], dict[str, Values]]:  # noqa: ANN401
    """Times and sizes of what was sampled in the replay's time from its start on."""
    try:
        times_ns = begin_ns + np.array(memory.get("t_ns") or (), dtype=np.int64)
        known = {label: memory[key] or () for key, label in _MEMORY.items() if key in memory}
        sizes = {label: np.array(column, dtype=np.float64) for label, column in known.items()}
        if any(column.shape != times_ns.shape for column in sizes.values()):
            raise ValueError("one is longer than the other")
    except (AttributeError, TypeError, ValueError) as error:
        raise RunLogError(
            f"run {name}: its `memory` has to hold `t_ns` and `rss_mib`, a number for each sample ({error})"
        ) from error
    return times_ns, sizes


def _summary(text: bytes, path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(text)
    if summary["kind"] != _KIND:
        raise ValueError(summary["kind"])
    if summary["v"] != VERSION:
        raise RunLogError(f"run {path}: is of version {summary['v']}; this program reads version {VERSION}")
    return summary


def _json(content: Mapping[str, Any]) -> bytes:
    r"""JSON as UTF-8.

    A byte of a path that is not UTF-8 becomes an escape of JSON like `\udcff`, and is read back.
    """
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


def _lists(rows: Rows) -> dict[str, list[Any]]:
    return {
        name: [None if isinstance(one, float) and math.isnan(one) else one for one in rows[name].tolist()]
        for name in _NAMES
    }


def _rows(columns: Mapping[str, Any]) -> Rows:
    rows = np.empty(len(columns["seq"]), dtype=FRAME)
    for name in _NAMES:
        unknown = UNKNOWN if FRAME[name].kind == "i" else math.nan
        rows[name] = columns.get(name, unknown) if name in _LATER else columns[name]
    return rows


def _read_json(path: Path) -> tuple[dict[str, Any], dict[str, Rows]]:
    summary = _summary(path.read_bytes(), path)
    frames = {}
    for stage in summary["stages"]:
        columns = stage.pop("frames")
        known = {
            name: [math.nan if value is None else value for value in columns[name]] for name in columns
        }
        frames[str(stage["name"])] = _rows(known)
    return summary, frames


def _write_parquet(frames: Mapping[str, Rows], path: Path, summary: bytes) -> None:
    pa, pq = _pyarrow()
    kinds = [("stage", pa.dictionary(pa.int8(), pa.string()))]
    kinds += [(name, pa.from_numpy_dtype(FRAME[name])) for name in _NAMES]
    schema = pa.schema(kinds, metadata={_KEY: summary})
    names = list(frames)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for index, rows in enumerate(frames.values()):
            stage = pa.DictionaryArray.from_arrays(np.full(len(rows), index, np.int8), names)
            columns = [pa.array(np.ascontiguousarray(rows[name])) for name in _NAMES]
            writer.write_table(pa.Table.from_arrays([stage, *columns], schema=schema))


def _read_parquet(path: Path) -> tuple[dict[str, Any], dict[str, Rows]]:
    pa, pq = _pyarrow()
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise RunLogError(f"run {path}: is no Parquet file: {error}") from error
    summary = _summary((table.schema.metadata or {})[_KEY], path)
    stage = np.asarray(table["stage"].to_pylist(), dtype=object)
    frames = {}
    for entry in summary["stages"]:
        mine = table.filter(pa.array(stage == entry["name"], pa.bool_())).drop(["stage"])
        frames[str(entry["name"])] = _rows({name: mine[name].to_numpy() for name in mine.column_names})
    return summary, frames


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise RunLogError(
            "Parquet needs pyarrow, which is not installed: `pip install 'torchperf_ros[logs]'`, or use"
            " .json"
        ) from error
    return pa, pq
