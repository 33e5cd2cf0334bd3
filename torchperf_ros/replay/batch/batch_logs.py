"""Which logs lie under some paths, and what each is called in the folder of results."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.observe.runs.run_log import RUN_FILE
from torchperf_ros.replay.logs.log_reader import SUFFIXES
from torchperf_ros.replay.logs.log_storage import LogError
from torchperf_ros.replay.replay_options import recording_in

_METADATA: Final = "metadata.yaml"
_SPLIT: Final = re.compile(r"(?P<stem>.+)_(?P<number>\d+)\.(mcap|db3)(\.zstd)?")
_ODD: Final = re.compile(r"[^\w.+-]+")


class BatchError(TorchperfError):
    """Many logs cannot be replayed like this; the message says why and what would do."""


@dataclass(frozen=True)
class FoundLog:
    path: Path  # what a `LogReader` takes; absolute
    name: str  # of its folder of results; unique
    files: tuple[Path, ...]  # those that it consists of
    size_bytes: int  # of all of them


def is_batch(paths: Sequence[Path]) -> bool:
    """Whether these are several logs, or a folder to search, and not one log."""
    return len(paths) > 1 or (paths[0].is_dir() and not is_log(paths[0]))


def is_log(path: Path) -> bool:
    """Whether a path is one log, not a folder to search: a file, a rosbag2 folder, an incident's folder."""
    if not path.is_dir():
        return path.name.endswith(SUFFIXES)
    return (path / _METADATA).is_file() or recording_in(path) != path or _is_split(path)


def find_logs(
    paths: Sequence[Path],
    owner: Callable[[str], str] = lambda _: "",
    say: Callable[[str], None] = lambda _: None,
) -> tuple[FoundLog, ...]:
    """Every log that is named, and those in folders that are, at any depth; each once.

    A rosbag2 folder is one log with all its files, also where its metadata is lost, and so is an incident's
    folder. What is hidden is passed over, and so are results of replays.

    `owner` gives the path of the log that has results of a name already: it keeps the name. `say` gets a
    line for a folder that cannot be read.

    Raises:
        LogError: a path does not exist.
        BatchError: there is no log.
    """
    found: dict[Path, FoundLog] = {}
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise LogError(f"log {path}: does not exist")
        for log in _search(path, seen, say):
            resolved = log.resolve()
            if not resolved.exists():
                say(f"log {log}: is passed over: a link to nothing")
            elif resolved not in found:
                found[resolved] = _described(log, resolved)
    if not found:
        shown = ", ".join(map(str, paths))
        raise BatchError(
            f"no log in {shown}: no rosbag2 folder, .mcap, .db3 or ROS 1 .bag file; name one, or a folder"
            " with some"
        )
    return _named(sorted(found.values(), key=lambda log: (log.name, log.path)), owner)


def _is_split(folder: Path) -> bool:
    """Whether a folder holds one log's numbered files, as of rosbag2, though no metadata says so."""
    try:
        names = [file.name for file in folder.iterdir() if file.name.endswith(SUFFIXES)]
    except OSError:
        return False
    parts = [match for name in names if (match := _SPLIT.fullmatch(name))]
    stems, numbers = {part["stem"] for part in parts}, sorted(int(part["number"]) for part in parts)
    whole = len(parts) == len(names) and len(stems) == 1 and numbers == list(range(len(numbers)))
    return whole and (len(names) > 1 or stems == {folder.name})


def _search(path: Path, seen: set[Path], say: Callable[[str], None]) -> Iterator[Path]:
    """A log, or those in a folder, at any depth; no folder twice, also where links lead back to it."""
    try:
        if is_log(path):
            yield path
        elif path.is_dir() and (resolved := path.resolve()) not in seen:
            seen.add(resolved)
            is_result = (path / RUN_FILE).is_file()
            for entry in [] if is_result else sorted(path.iterdir()):
                if not entry.name.startswith("."):
                    yield from _search(entry, seen, say)
    except OSError as error:
        what = "link" if path.is_symlink() else "folder"
        say(f"{what} {path}: is passed over: {error.strerror or error}")


def _described(log: Path, resolved: Path) -> FoundLog:
    files: tuple[Path, ...] = (resolved,)
    name = log.name
    if resolved.is_dir():  # SQLite's shared memory changes when somebody reads
        files = tuple(
            sorted(
                file for file in resolved.rglob("*") if file.is_file() and not file.name.endswith("-shm")
            )
        )
        name = log.absolute().name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return FoundLog(
        resolved, _ODD.sub("_", name).lstrip(".") or "log", files, sum(os.stat(f).st_size for f in files)
    )


def _named(logs: Sequence[FoundLog], owner: Callable[[str], str]) -> tuple[FoundLog, ...]:
    """Names that differ.

    With their folder's and a part of the path's hash where two are the same, or one is taken.
    """
    count = Counter(log.name for log in logs)
    named = []
    for log in logs:
        of = owner(log.name)
        if of != str(log.path) and (count[log.name] > 1 or (of and Path(of).exists())):
            digest = hashlib.blake2b(str(log.path).encode(), digest_size=8).hexdigest()[:6]
            beside = _ODD.sub("_", log.path.parent.name).lstrip(".")
            # the same log
            log = replace(log, name=f"{beside}-{log.name}-{digest}".lstrip("-"))  # noqa: PLW2901
        named.append(log)
    return tuple(named)
