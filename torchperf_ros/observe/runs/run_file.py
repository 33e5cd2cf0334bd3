"""A run as a file, written and read.

A summary and a row for each frame, as JSON for people or as Parquet for many frames.

JSON: the summary, with `frames` in each of its `stages`: a list for each column of `FRAME`. Parquet: a row
for each frame, the columns of `FRAME` after `stage`; the summary is the file's metadata under the key
`torchperf_run`.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.observe.runs.run_log import (
    UNKNOWN,
    LoggedAlert,
    RunLog,
    RunLogError,
    StageLog,
    Values,
)
from torchperf_ros.stage.frame_table import FRAME

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

    Raises:
        OSError: it cannot be written; the error names `path`.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
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
        raise RunLogError(
            f"run {path}: is no run that `torchperf replay --json` or `--parquet` wrote ({error})"
        ) from error


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
