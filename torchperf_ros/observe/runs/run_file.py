"""A run, written down.

A summary and a row for each frame, as JSON for people or as Parquet for many frames.

JSON: the summary, with `frames` in each of its `stages`: a list for each column of `FRAME`. Parquet: a row
for each frame, the columns of `FRAME` after `stage`; the summary is the file's metadata under the key
`torchperf_run`.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.observe.runs.run_log import UNKNOWN, RunLogError
from torchperf_ros.stage.frame_table import FRAME

RUN_FILE: Final = "run.parquet"
"""The run in the folder of a log that was replayed beside others."""
SUFFIXES: Final = (".json", ".parquet")
VERSION: Final = 1
_KEY: Final = b"torchperf_run"
_KIND: Final = "run"
_NAMES: Final = FRAME.names or ()
_LATER: Final = ("check", "missing_inputs", "scene", "stale", "deadline_ms")
"""Columns that runs of older versions lack."""


@dataclass(frozen=True)
class Run:
    """What a run came to.

    A JSON object, see `docs/replay.md`, and rows of `FRAME` by stage, in the stages' order.
    """

    summary: Mapping[str, Any]
    frames: Mapping[str, NDArray[np.void]]


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


def write_run(run: Run, path: Path) -> None:
    """Write a run to a `.json` or `.parquet` file: all of it, or nothing under this name.

    Raises:
        RunLogError: another suffix, or pyarrow is not installed.
        OSError: it cannot be written.
    """
    check_run_path(path)
    summary = {"v": VERSION, "kind": _KIND, **run.summary}
    with whole_file(path) as part:
        if path.suffix == ".json":
            stages = [{**stage, "frames": _lists(run.frames[stage["name"]])} for stage in summary["stages"]]
            part.write_bytes(_json({**summary, "stages": stages}) + b"\n")
        else:
            _write_parquet(run, part, _json(summary))


def read_run(path: Path) -> Run:
    """Read what `write_run` wrote.

    A `RunLogError` where it cannot be read, or is no run of this version.
    """
    try:
        return _read_parquet(path) if path.suffix == ".parquet" else _read_json(path)
    except OSError as error:
        raise RunLogError(f"run {path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        msg = f"run {path}: is no run that `torchperf replay --json` or `--parquet` wrote ({error})"
        raise RunLogError(msg) from error


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


def _lists(rows: NDArray[np.void]) -> dict[str, list[Any]]:
    return {
        name: [None if isinstance(one, float) and math.isnan(one) else one for one in rows[name].tolist()]
        for name in _NAMES
    }


def _rows(columns: Mapping[str, Any]) -> NDArray[np.void]:
    rows = np.empty(len(columns["seq"]), dtype=FRAME)
    for name in _NAMES:
        unknown = UNKNOWN if FRAME[name].kind == "i" else math.nan
        rows[name] = columns.get(name, unknown) if name in _LATER else columns[name]
    return rows


def _read_json(path: Path) -> Run:
    summary = _summary(path.read_bytes(), path)
    frames = {}
    for stage in summary["stages"]:
        columns = stage.pop("frames")
        known = {
            name: [math.nan if value is None else value for value in columns[name]] for name in columns
        }
        frames[str(stage["name"])] = _rows(known)
    return Run(summary, frames)


def _write_parquet(run: Run, path: Path, summary: bytes) -> None:
    pa, pq = _pyarrow()
    kinds = [("stage", pa.dictionary(pa.int8(), pa.string()))]
    kinds += [(name, pa.from_numpy_dtype(FRAME[name])) for name in _NAMES]
    schema = pa.schema(kinds, metadata={_KEY: summary})
    names = list(run.frames)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for index, rows in enumerate(run.frames.values()):
            stage = pa.DictionaryArray.from_arrays(np.full(len(rows), index, np.int8), names)
            columns = [pa.array(np.ascontiguousarray(rows[name])) for name in _NAMES]
            writer.write_table(pa.Table.from_arrays([stage, *columns], schema=schema))


def _read_parquet(path: Path) -> Run:
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
    return Run(summary, frames)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        msg = (
            "Parquet needs pyarrow, which is not installed: `pip install 'torchperf_ros[logs]'`, or use"
            " .json"
        )
        raise RunLogError(msg) from error
    return pa, pq
