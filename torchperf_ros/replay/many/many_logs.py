"""Which logs lie under some paths, and what each is called in the folder of results."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.replay.logs.log_folder import SUFFIXES
from torchperf_ros.replay.logs.log_storage import LogError
from torchperf_ros.replay.replay import recording_in

RUN_FILE, SUMMARY_FILE, OUTPUT_FILE = "run.parquet", "summary.json", "output.mcap"
"""What lies in the folder of a replayed log: its frames, what came of it, and what was published."""
KIND: Final = "replayed log"
"""What the summary in such a folder says that it is of."""

_METADATA = "metadata.yaml"
_SPLIT = re.compile(r"(?P<stem>.+)_(?P<number>\d+)\.(mcap|db3)(\.zstd)?")
_ODD = re.compile(r"[^\w.+-]+")
_DIGITS = 6
_NS_PER_S = 1e9


class ManyError(TorchperfError):
    """Many logs cannot be replayed like this; the message says why and what would do."""


@dataclass(frozen=True)
class FoundLog:
    """A log to replay.

    Attributes:
        path: what a `LogReader` takes; absolute.
        name: of its folder of results; unique.
        files: those that it consists of.
        size_bytes: of all of them.
    """

    path: Path
    name: str
    files: tuple[Path, ...]
    size_bytes: int


def is_log(path: Path) -> bool:
    """Whether a path is one log, not a folder to search: a file, a rosbag2 folder, a folder of evidence."""
    if not path.is_dir():
        return path.name.endswith(SUFFIXES)
    return (path / _METADATA).is_file() or recording_in(path) != path or _is_split(path)


def find_logs(
    paths: Sequence[Path], results: Path, say: Callable[[str], None] = lambda _: None
) -> tuple[FoundLog, ...]:
    """Every log that is named, and those in folders that are, at any depth; each once.

    A rosbag2 folder is one log with all its files, also where its metadata is lost, and so is a folder of evidence.
    What is hidden is passed over, and so are results of replays.

    Args:
        paths: logs, and folders to search.
        results: folder of results, which decides about names: a log keeps the one that it has there.
        say: told in one line of a folder that cannot be read.

    Raises:
        LogError: a path does not exist.
        ManyError: there is no log.
    """
    found: dict[Path, FoundLog] = {}
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            msg = f"log {path}: does not exist"
            raise LogError(msg)
        for log in [path] if is_log(path) else _search(path, seen, say):
            resolved = log.resolve()
            if not resolved.exists():
                say(f"log {log}: is passed over: a link to nothing")
            elif resolved not in found:
                found[resolved] = _described(log, resolved)
    if not found:
        shown = ", ".join(map(str, paths))
        msg = f"no log in {shown}: no rosbag2 folder, .mcap, .db3 or ROS 1 .bag file; name one, or a folder with some"
        raise ManyError(msg)
    return _named(sorted(found.values(), key=lambda log: (log.name, log.path)), results)


def log_of(folder: Path) -> str:
    """Path of the log that a folder of results belongs to; "" if it is none."""
    try:
        told = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        return str(told["log"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def check_replaceable(folder: Path) -> None:
    """See that nothing but an earlier result, or nothing at all, gives way to a log's folder of results.

    Raises:
        ManyError: something else lies there.
    """
    if (folder.exists() or folder.is_symlink()) and not _is_result(folder):
        msg = (
            f"--output {folder.parent}: results would replace {folder}, which is no result of a replay; "
            "name another folder, or move it away"
        )
        raise ManyError(msg)


def check_results(logs: Sequence[FoundLog], results: Path) -> None:
    """See that no log, and nothing else that is no result, gives way to the folders of results.

    Args:
        logs: to be replayed.
        results: folder of their results.

    Raises:
        ManyError: it lies in a log, a log lies where results would, or something else does.
    """
    within = results.resolve()
    for log in logs:
        if within.is_relative_to(log.path):
            msg = f"--output {results}: lies in the log {log.path}; name another folder"
            raise ManyError(msg)
    paths = [log.path for log in logs]
    for log in logs:
        final = within / log.name
        if hit := next((path for path in paths if path.is_relative_to(final.resolve())), None):
            msg = f"--output {results}: results would replace {final}, where the log {hit} lies; name another folder"
            raise ManyError(msg)
        check_replaceable(final)


def _is_result(folder: Path) -> bool:
    """Whether its summary says so; what the summary names has to be ours, whether or not all of it is there."""
    try:
        return bool(json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def duration_s(log: FoundLog) -> float | None:
    """How long a log is, where it says so at its beginning or end; None where all of it would have to be read."""
    from mcap.reader import make_reader
    from ruamel.yaml import YAML

    try:
        if log.path.is_dir():
            metadata = recording_in(log.path) / _METADATA
            told = YAML(typ="safe", pure=True).load(metadata.read_text(encoding="utf-8"))
            return float(told["rosbag2_bagfile_information"]["duration"]["nanoseconds"]) / _NS_PER_S
        if log.path.suffix != ".mcap":
            return None
        with log.path.open("rb") as file:
            summary = make_reader(file).get_summary()
    except Exception:  # a stranger's file: whatever is wrong with it, the replay tells
        return None
    statistics = None if summary is None else summary.statistics
    return None if statistics is None else (statistics.message_end_time - statistics.message_start_time) / _NS_PER_S


def _is_split(folder: Path) -> bool:
    """Whether a folder holds the numbered files of one log, as rosbag2 writes them, though no metadata says so."""
    try:
        names = [file.name for file in folder.iterdir() if file.name.endswith(SUFFIXES)]
    except OSError:
        return False
    parts = [match for name in names if (match := _SPLIT.fullmatch(name))]
    stems, numbers = {part["stem"] for part in parts}, sorted(int(part["number"]) for part in parts)
    whole = len(parts) == len(names) and len(stems) == 1 and numbers == list(range(len(numbers)))
    return whole and (len(names) > 1 or stems == {folder.name})


def _search(folder: Path, seen: set[Path], say: Callable[[str], None]) -> Iterator[Path]:
    """Logs in a folder, at any depth; no folder twice, whatever links there are."""
    resolved = folder.resolve()
    if resolved in seen:
        return
    seen.add(resolved)
    try:
        if is_log(folder):
            yield folder
            return
        if (folder / RUN_FILE).is_file():
            return
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        say(f"folder {folder}: is passed over: {error.strerror or error}")
        return
    for entry in entries:
        try:
            is_folder = entry.is_dir()
        except OSError as error:
            say(f"link {entry}: is passed over: {error.strerror or error}")
            continue
        if is_folder:
            yield from _search(entry, seen, say)
        elif is_log(entry):
            yield entry


def _described(log: Path, resolved: Path) -> FoundLog:
    files: tuple[Path, ...] = (resolved,)
    name = log.name
    if resolved.is_dir():  # SQLite's shared memory changes when somebody reads
        files = tuple(sorted(file for file in resolved.rglob("*") if file.is_file() and not file.name.endswith("-shm")))
        name = log.absolute().name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return FoundLog(resolved, _ODD.sub("_", name).lstrip(".") or "log", files, sum(os.stat(f).st_size for f in files))


def _named(logs: Sequence[FoundLog], results: Path) -> tuple[FoundLog, ...]:
    """Names that differ: with their folder's and a part of the path's hash where two are the same, or one is taken."""
    count = Counter(log.name for log in logs)
    named = []
    for log in logs:
        owner = log_of(results / log.name)
        taken = owner not in {"", str(log.path)} and Path(owner).exists()
        if taken or (owner != str(log.path) and count[log.name] > 1):
            digest = hashlib.blake2b(str(log.path).encode(), digest_size=8).hexdigest()[:_DIGITS]
            beside = _ODD.sub("_", log.path.parent.name).lstrip(".")
            log = replace(log, name=f"{beside}-{log.name}-{digest}".lstrip("-"))  # noqa: PLW2901 - the same log
        named.append(log)
    return tuple(named)
