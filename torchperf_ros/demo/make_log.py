"""Writes a synthetic drive as a log: all of it, or nothing under the final name."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer as Writer2
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.core.message_types import typestore
from torchperf_ros.demo.drive_log import OBJECTS_TOPIC, START_NS, DriveLog
from torchperf_ros.replay.logs.log_reader import LogMessage

FORMATS: Final = ("mcap", "db3", "bag")
Progress = Callable[[int, int], None]
"""Told how much of how much of the drive has been written, in ns."""
_VERSION: Final = 9  # of rosbag2's metadata
_PLUGINS: Final = {"mcap": StoragePlugin.MCAP, "db3": StoragePlugin.SQLITE3}
_JPEG_SHARE: Final = 0.05  # of an image's bytes, about
_Put = Callable[[LogMessage], None]


class MakeLogError(TorchperfError):
    """A log cannot be written as it was asked for; the message says why and what would do."""


def format_of(path: Path, chosen: str | None = None) -> str:
    """The format of a log: as chosen, else as its name says; a name without a suffix is that of a folder, with `mcap`.

    Raises:
        MakeLogError: there is no such format, or the name says another one, or one that is not there.
    """
    named = path.suffix.removeprefix(".")
    if chosen is not None and chosen not in FORMATS:
        msg = f"--format {chosen!r} is not there; it has to be one of: {', '.join(FORMATS)}"
        raise MakeLogError(msg)
    if chosen is not None and named in FORMATS and named != chosen:
        msg = f"{path} is called .{named}, but --format says {chosen}; leave out one of them"
        raise MakeLogError(msg)
    if chosen is None and named and named not in FORMATS:
        suffixes = ", ".join(f".{name}" for name in FORMATS)
        msg = f"{path}: .{named} is no suffix of a log; there are {suffixes}, and none for a rosbag2 folder"
        raise MakeLogError(msg)
    return chosen or named or "mcap"


def write_drive(
    path: Path,
    drive: DriveLog,
    *,
    format_: str | None = None,
    force: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> Path:
    """Write a drive; the same arguments give the same bytes.

    Args:
        path: a file `.mcap`, `.db3` or `.bag`; a name without a suffix is that of a rosbag2 folder.
        drive: what is written.
        format_: `mcap`, `db3` or `bag`; None: as the name says, else `mcap`.
        force: replace a log that is there.
        progress: told how far it is.

    Returns:
        What was written: `path`.

    Raises:
        MakeLogError: something is there already, the format cannot hold the drive, or it cannot be written.
    """
    kind = format_of(path, format_)
    try:
        _check(path, drive, kind, force)
        _write(path, drive, kind, progress)
    except (OSError, sqlite3.Error) as error:
        msg = f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}"
        raise MakeLogError(msg) from error
    return path


def _write(path: Path, drive: DriveLog, kind: str, progress: Progress) -> None:
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        alone = kind != "bag" and path.suffix == f".{kind}"
        written = part / (path.stem if alone else path.name)
        with _writer(written, kind) as put:
            for message in drive.messages():
                put(message)
                progress(message.t_ns - START_NS, round(drive.seconds * NS_PER_S))
        if alone:
            written /= path.name
        if path.exists():
            path.rename(part / "replaced")
        written.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _check(path: Path, drive: DriveLog, kind: str, force: bool) -> None:
    if path.name in {"", ".."}:
        msg = f"{path}: has to be the name of a log in a folder, such as drive.mcap"
        raise MakeLogError(msg)
    if not path.parent.is_dir():
        msg = f"{path}: the folder {path.parent} is not there"
        raise MakeLogError(msg)
    if path.exists() and not force:
        msg = f"{path} exists; --force replaces it"
        raise MakeLogError(msg)
    if path.exists() and not path.is_file() and not path.is_dir():
        msg = f"{path} is no file and no folder; it is not replaced"
        raise MakeLogError(msg)
    if path.is_dir() and not (path / "metadata.yaml").exists():
        msg = f"{path} is a folder, and no rosbag2; it is not replaced"
        raise MakeLogError(msg)
    for fault in drive.faults:
        if fault.start_s >= drive.seconds:
            msg = f"fault {fault.kind}@{fault.start_s:g} begins after the end of the drive, at {drive.seconds:g} s"
            raise MakeLogError(msg)
    if kind == "bag" and any(fault.kind == "truncated" for fault in drive.faults):
        msg = "a truncated message cannot be written to a ROS 1 bag; choose mcap or db3"
        raise MakeLogError(msg)
    image_bytes = 3 * drive.width * drive.height * (_JPEG_SHARE if drive.compressed else 1.0)
    needed, free = drive.seconds * drive.rate_hz * image_bytes, shutil.disk_usage(path.parent).free
    if needed > free:
        msg = f"{path}: needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; --compressed needs less"
        raise MakeLogError(msg)


@contextlib.contextmanager
def _writer(path: Path, kind: str) -> Iterator[_Put]:
    """What writes messages to a ROS 1 bag, or to a rosbag2 folder; the bag has no objects: its markers are others."""
    if kind == "bag":
        with Writer1(path) as bag:
            yield _ros1(bag)
    else:
        with Writer2(path, version=_VERSION, storage_plugin=_PLUGINS[kind]) as log:
            yield _ros2(log)


def _ros2(log: Writer2) -> _Put:
    connections = {}

    def put(message: LogMessage) -> None:
        if message.topic not in connections:
            store = typestore([message.type_name])
            connections[message.topic] = log.add_connection(message.topic, message.type_name, typestore=store)
        log.write(connections[message.topic], message.t_ns, message.data)

    return put


def _ros1(bag: Writer1) -> _Put:
    connections, store = {}, get_typestore(Stores.ROS1_NOETIC)

    def put(message: LogMessage) -> None:
        if message.topic == OBJECTS_TOPIC:
            return
        if message.topic not in connections:
            connections[message.topic] = bag.add_connection(message.topic, message.type_name, typestore=store)
        data = typestore([message.type_name]).cdr_to_ros1(message.data, message.type_name)
        bag.write(connections[message.topic], message.t_ns, data)

    return put
