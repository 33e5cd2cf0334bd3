"""Which files belong to a log, and of what kind they are."""

import errno
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import BinaryIO, Final

import zstandard

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.params_file import read_yaml
from torchperf_ros.replay.logs.chunk_compression import ZSTD_MAGIC
from torchperf_ros.replay.logs.db3_file import Db3File
from torchperf_ros.replay.logs.log_notes import LogNotes
from torchperf_ros.replay.logs.log_storage import LogError
from torchperf_ros.replay.logs.mcap_file import McapFile
from torchperf_ros.replay.logs.ros1_bag import Ros1Bag

_MAGICS: Final = {McapFile.magic: ".mcap", Db3File.magic: ".db3", Ros1Bag.magic: ".bag", ZSTD_MAGIC: ".zstd"}
SUFFIXES: Final = (".mcap", ".db3", ".bag", ".mcap.zstd", ".db3.zstd", ".bag.active")
_METADATA: Final = "metadata.yaml"
_BLOCK_BYTES: Final = 1 << 17  # of zstd; what is damaged costs what is unpacked at once with it


def log_files(path: Path, notes: LogNotes) -> list[Path]:
    """The files of a log, in order.

    A folder's are those that its `metadata.yaml` names; without a usable one, the files of the only kind that is there.

    Args:
        path: a file or a folder.
        notes: told of what is missing and can be done without.

    Raises:
        LogError: there is nothing that could be read, or files that cannot belong to one log.
    """
    if not path.exists():
        msg = f"log {path}: does not exist"
        raise LogError(msg)
    if not path.is_dir():
        return [path]
    inside = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    named, trouble = _named(path / _METADATA)
    if there := [file for file in named if file.exists()]:
        if missing := sorted({file.name for file in named} - {file.name for file in there}):
            notes.tell(f"log {path}: {_METADATA} names files that are not there: {', '.join(missing)}")
        if more := sorted({file.name for file in inside} - {file.name for file in there}):
            notes.tell(f"log {path}: {_METADATA} does not name these files, which are left out: {', '.join(more)}")
        return there
    if not inside:
        logs = sorted(found.name for found in path.iterdir() if (found / _METADATA).is_file())
        hint = f"; name one of the logs in it: {', '.join(logs[:4])}" if logs else ""
        msg = f"log {path}: {trouble}, and there is no .mcap, .db3 or .bag file in it{hint}"
        raise LogError(msg)
    kinds = {_suffix(file): file.name for file in reversed(inside)}
    if len(kinds) > 1:
        shown = " and ".join(sorted(kinds.values()))
        msg = (
            f"log {path}: holds logs of different kinds, {shown}, and no {_METADATA} that says which; name one of them"
        )
        raise LogError(msg)
    if kinds.keys() != {".bag"}:
        notes.tell(f"log {path}: {trouble}; the files in the folder are read")
    return inside


def _suffix(file: Path) -> str:
    return next(suffix for suffix in (".mcap", ".db3", ".bag") if suffix in file.suffixes)


def _named(metadata: Path) -> tuple[list[Path], str]:
    """The files that a folder's metadata names; and why none of them may be there."""
    if not metadata.is_file():
        return [], f"has no {_METADATA}"
    what = "log's metadata"
    try:
        content = read_yaml(metadata, what)
        information = content["rosbag2_bagfile_information"] if isinstance(content, Mapping) else {}
        files = [metadata.parent / PurePath(str(name)).name for name in information["relative_file_paths"]]
    except ConfigError as error:
        return [], f"its {_METADATA} {str(error).removeprefix(f'{what} {metadata}: ')}"
    except (KeyError, TypeError):
        return [], f"its {_METADATA} names no files, so it is not that of a rosbag2"
    return files, f"of the files that its {_METADATA} names none is there ({', '.join(file.name for file in files)})"


def kind_of(path: Path) -> str:
    """`.mcap`, `.db3`, `.bag` or `.zstd`: what a file says it is, else what it is called.

    Raises:
        LogError: it is no file, is empty, or neither its name nor its content is that of a log.
        OSError: it cannot be read.
    """
    if not path.is_file():
        msg = f"log {path}: is no file and no folder"
        raise LogError(msg)
    with path.open("rb") as file:
        begin = file.read(max(map(len, _MAGICS)))
    if not begin:
        msg = f"log {path}: is empty"
        raise LogError(msg)
    for magic, kind in _MAGICS.items():
        if begin.startswith(magic):
            return kind
    if (suffix := PurePath(path.name.removesuffix(".active")).suffix) in _MAGICS.values():
        return suffix
    msg = f"log {path}: is no log; it has to be a rosbag2 folder, an .mcap or .db3 file, or a ROS 1 .bag of version 2.0"
    raise LogError(msg)


def unpacked_file(path: Path, folder: Path, notes: LogNotes) -> Path:
    """A file that was compressed as a whole, unpacked into a folder, as far as it goes.

    Raises:
        LogError: nothing of it can be unpacked, or the folder cannot take it.
        OSError: it cannot be read.
    """
    target = folder / path.stem
    try:
        with path.open("rb") as packed, target.open("wb") as raw:
            _copy(path, packed, raw, notes)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise
        msg = f"log {path}: cannot be unpacked into {folder}: {error.strerror}; TMPDIR names another folder"
        raise LogError(msg) from error
    if not target.stat().st_size:
        with path.open("rb") as packed:
            begin = packed.read(len(ZSTD_MAGIC))
        why = "it is damaged" if begin == ZSTD_MAGIC else f"it begins with {begin!r}, not with {ZSTD_MAGIC!r}"
        msg = f"log {path}: nothing of it can be unpacked: {why}"
        raise LogError(msg)
    return target


def _copy(path: Path, packed: BinaryIO, raw: BinaryIO, notes: LogNotes) -> None:
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True, closefd=False) as reader:
            while block := reader.read1(_BLOCK_BYTES):
                raw.write(block)
    except zstandard.ZstdError as error:
        why = f"is damaged after {raw.tell():,} unpacked bytes ({error}); what comes before is read"
        if raw.tell():
            notes.lost(path, packed.tell(), why)
