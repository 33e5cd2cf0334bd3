"""The node's records, JSON lines in rotated files, as a `RunLog`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchperf_ros.analysis.run_log import LoggedAnomaly, RunLog, RunLogError
from torchperf_ros.analysis.run_log_builder import RunLogBuilder

_VERSION = 1
_ROTATED = re.compile(r"(?P<stem>.+?)(\.(?P<number>\d+))?\.jsonl")
_TOLD_EVERY = 5_000
_SHOWN_CHARACTERS = 60


def rotated(path: Path) -> list[Path]:
    """This file and those that were rotated away from it, oldest first: `records.2.jsonl`, ..., `records.jsonl`."""
    match = _ROTATED.fullmatch(path.name)
    if match is None or match["number"]:
        return [path]
    older = [(int(other["number"]), file) for file in path.parent.iterdir() if (other := _ROTATED.fullmatch(file.name))
             and other["stem"] == match["stem"] and other["number"]]  # fmt: skip
    return [file for _, file in sorted(older, reverse=True)] + [path]


def is_newest(path: Path) -> bool:
    """Whether this is `records.jsonl` rather than `records.3.jsonl`."""
    match = _ROTATED.fullmatch(path.name)
    return match is not None and match["number"] is None


def read_records(path: Path, name: str, progress: Callable[[int, int], None]) -> RunLog:
    """Read a file of records, and those rotated away from it; kinds and fields that are not known are passed over.

    Args:
        path: for example `records.jsonl`.
        name: what the report calls it.
        progress: told how many of how many bytes have been read.

    Raises:
        RunLogError: it cannot be read, or none of its lines is such a record.
    """
    files = rotated(path)
    builder = RunLogBuilder("/perf")
    kinds: dict[str, int] = {}
    broken = lost = done = 0
    try:
        total = sum(file.stat().st_size for file in files)
        for file in files:
            with file.open("rb") as lines:
                for number, line in enumerate(lines):
                    done += len(line)
                    if number % _TOLD_EVERY == 0:
                        progress(done, total)
                    try:
                        record = json.loads(line)
                        kind = str(record["kind"]) if record["v"] == _VERSION else "of another version"
                        lost += int(record["records"]) if kind == "drops" else 0
                        _fold(builder, kind, record)
                        kinds[kind] = kinds.get(kind, 0) + 1
                    except (ValueError, KeyError, TypeError, AttributeError):
                        broken += 1  # a line that was being written when the power went, for example
    except OSError as error:
        msg = f"log {path}: cannot be read: {error.strerror or error}"
        raise RunLogError(msg) from error
    progress(total, total)
    if not kinds:
        msg = f"log {path}: none of its {broken:,} lines is a record; one begins like {{'v': 1, 'kind': 'frame', ...}}"
        raise RunLogError(msg)
    if broken:
        builder.trouble(f"{broken:,} lines could not be read and were left out (a cut-off last line is normal)")
    if lost:
        builder.trouble(f"{lost:,} records were not written by the node: too many at once, or no room on the disk")
    if other := kinds.get("of another version"):
        builder.trouble(f"{other:,} records are of another version than {_VERSION} and were left out")
    expected = {"frame": "latencies", "memory": "memory", "health": "health", "anomaly": "anomalies"}
    missing = [f"no records of kind {kind}: {what}" for kind, what in expected.items() if kind not in kinds]
    return builder.build(name, path, missing)


def _fold(builder: RunLogBuilder, kind: str, record: dict[str, Any]) -> None:
    if kind == "frame":
        builder.frame(record)
    elif kind == "memory":
        builder.memory(int(record["t_ns"]), record["values"])
    elif kind == "health":
        builder.health(int(record["t_ns"]), str(record["stage"]), str(record["to"]))
    elif kind == "anomaly":
        values = {key: str(value) for key, value in (record.get("values") or {}).items()}
        level, name, message = (str(record[key]) for key in ("level", "name", "message"))
        builder.anomaly(LoggedAnomaly(int(record["t_ns"]), level, name, message, values))
    elif kind == "dropped":
        builder.drops(str(record["stage"]), int(record["superseded"]) + int(record["stale"]))
    elif kind == "start":
        builder.node = str(record.get("node", builder.node))
        builder.versions(record.get("versions") or {})
        for stage in record.get("stages") or ():
            builder.tiers(str(stage["name"]), map(str, stage.get("tiers") or ()))
