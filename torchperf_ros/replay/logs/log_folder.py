"""Which files belong to a log, and of what kind they are."""

from pathlib import Path, PurePath
from typing import Any, Final

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.replay.logs.chunked_files import MCAP_MAGIC, ROS1_MAGIC, ZSTD_MAGIC
from torchperf_ros.replay.logs.db3_file import DB3_MAGIC
from torchperf_ros.replay.logs.log_storage import LogError, LogNotes
from torchperf_ros.settings.params_file import read_yaml

# What the kinds of files are, and the bytes that they begin with.
_KINDS: Final = {
    ".mcap": ("an MCAP file", MCAP_MAGIC),
    ".db3": ("a database of SQLite", DB3_MAGIC),
    ".bag": ("a ROS 1 bag of version 2.0", ROS1_MAGIC),
    ".zstd": ("a file compressed by zstd", ZSTD_MAGIC),
}
SUFFIXES: Final = (".mcap", ".db3", ".bag", ".mcap.zstd", ".db3.zstd", ".bag.active")
_METADATA: Final = "metadata.yaml"


def log_files(path: Path, notes: LogNotes) -> list[Path]:
    """The files of a log, in order.

    A folder's are those that its `metadata.yaml` names; without a usable one, the files of the only kind
    that is there.

    Raises:
        LogError: there is nothing that could be read, or files that cannot belong to one log.
    """
    if not path.exists():
        raise LogError(f"log {path}: does not exist")
    if not path.is_dir():
        return [path]
    inside = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    named, trouble = _named(path / _METADATA)
    if there := [file for file in named if file.exists()]:
        if missing := sorted({file.name for file in named} - {file.name for file in there}):
            notes.note(f"log {path}: {_METADATA} names files that are not there: {', '.join(missing)}")
        if more := sorted({file.name for file in inside} - {file.name for file in there}):
            notes.note(
                f"log {path}: {_METADATA} does not name these files, which are left out: {', '.join(more)}"
            )
        return there
    if not inside:
        logs = sorted(found.name for found in path.iterdir() if (found / _METADATA).is_file())
        hint = f"; name one of the logs in it: {', '.join(logs[:4])}" if logs else ""
        raise LogError(f"log {path}: {trouble}, and there is no .mcap, .db3 or .bag file in it{hint}")
    kinds = {
        next(suffix for suffix in _KINDS if suffix in file.suffixes): file.name for file in reversed(inside)
    }
    if len(kinds) > 1:
        shown = " and ".join(sorted(kinds.values()))
        raise LogError(
            f"log {path}: holds logs of different kinds, {shown}, and no {_METADATA} says which; name one"
        )
    if kinds.keys() != {".bag"}:
        notes.note(f"log {path}: {trouble}; the files in the folder are read")
    return inside


def _named(metadata: Path) -> tuple[list[Path], str]:
    """The files that a folder's metadata names; and why none of them may be there."""
    if not metadata.is_file():
        return [], f"has no {_METADATA}"
    try:
        content: Any = read_yaml(metadata, "metadata")
        names = content["rosbag2_bagfile_information"]["relative_file_paths"]
        files = [metadata.parent / PurePath(str(name)).name for name in names]
    except (ConfigError, KeyError, TypeError, IndexError):
        return [], f"its {_METADATA} is not that of a rosbag2"
    return (
        files,
        f"of the files that its {_METADATA} names none is there ({', '.join(file.name for file in files)})",
    )


def metadata_counts(path: Path) -> dict[str, int]:
    """How many messages each topic of a folder has, as its `metadata.yaml` says.

    Empty where it does not.
    """
    try:
        content: Any = read_yaml(path / _METADATA, "metadata")
        topics = content["rosbag2_bagfile_information"]["topics_with_message_count"]
        return {str(one["topic_metadata"]["name"]): int(one["message_count"]) for one in topics}
    except (ConfigError, KeyError, TypeError, ValueError, IndexError, OSError):
        return {}


def is_log(path: Path) -> bool:
    """Whether a file is called like one of a log, or begins like one."""
    return path.name.endswith(SUFFIXES) or any(
        _begin(path).startswith(magic) for _, magic in _KINDS.values()
    )


def _begin(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(16)


def kind_of(path: Path, name: Path) -> str:
    """`.mcap`, `.db3`, `.bag` or `.zstd`.

    What a file says it is; errors call it `name`, where it was unpacked.

    Raises:
        LogError: it is no file, is empty, or its content is not that of a log.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise LogError(f"log {name}: is no file and no folder")
    if not (begin := _begin(path)):
        raise LogError(f"log {name}: is empty")
    for kind, (_, magic) in _KINDS.items():
        if begin.startswith(magic):
            return kind
    if (suffix := PurePath(path.name.removesuffix(".active")).suffix) in _KINDS:
        what, magic = _KINDS[suffix]
        msg = f"log {name}: is not {what}: it begins with {begin!r}, not with {magic!r}"
    else:
        known = "a rosbag2 folder, an .mcap or .db3 file, or a ROS 1 .bag of version 2.0"
        msg = f"log {name}: is no log; it has to be {known}"
    raise LogError(msg)
