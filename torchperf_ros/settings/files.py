"""Files: where a user's own lie, safe from other users, and how those of others are read.

A vehicle reads files that a person or another host provides while it drives. What lies there may be
anything: a FIFO without a writer to, a device without an end, a folder, a link to itself, or a file that
fills the memory. They are read without waiting for anybody, and no further than a bound.
"""

import contextlib
import errno
import hashlib
import os
import pwd
import stat
from pathlib import Path
from typing import IO, Final

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_folder(variable: str, below_home: str) -> Path:
    """`torchperf_ros` in the folder that the environment names, else below the user's home.

    Never where others may write: packages that lie there are run, and evidence shows what a camera saw. A
    variable that holds no absolute path counts as unset. For example `user_folder("XDG_CACHE_HOME",
    ".cache")`.
    """
    base = os.environ.get(variable, "")
    if base.startswith("/"):
        return Path(base) / "torchperf_ros"
    try:
        home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # the user is not in the list of users, as in containers
        home = "/"
    return Path(home) / below_home / "torchperf_ros"


def node_folder(root: Path, node: str) -> Path:
    """The folder of a node's own below one that several may share.

    `node` is its fully qualified name: /front/perf.
    """
    return root.joinpath(*filter(None, node.split("/")))


def make_private(folder: Path) -> None:
    """Make a folder, and what is missing on the way to it, that only the user may enter, with any umask.

    One that is there already stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileNotFoundError:
        make_private(folder.parent)
        with contextlib.suppress(FileExistsError):  # by another process meanwhile
            os.mkdir(folder, 0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise


def part_of(path: Path) -> Path:
    """What a replacement of a file writes first; it is left where a process ended meanwhile."""
    return path.with_name(f".{path.name}.part")


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file, in a folder of the user's own.

    On return the new one is on the disk, and until then the old one.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    make_private(path.parent)
    part = part_of(path)
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o600)
        try:
            while data:
                data = data[os.write(handle, data) :]
            os.fsync(
                handle
            )  # before the name: else a file system may write the name first, and nothing under it
        finally:
            os.close(handle)
        os.replace(part, path)
        _sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # what it takes of a full disk is needed elsewhere
            part.unlink()
        raise


def remove_file(path: Path) -> None:
    """Remove a file, if it is there, and a part of it that is left: on return they are gone from the disk.

    Raises:
        OSError: one cannot be removed.
    """
    for one in (path, part_of(path)):
        with contextlib.suppress(FileNotFoundError):
            one.unlink()
            _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exposed(path: Path) -> str:
    """Which users besides the user and root can change a file or folder, and what to do about it.

    "" if none can.

    Every folder on the way counts: a user that may write there can replace those below. In a
    sticky one such as `/tmp` only their owner can, so that it may be on the way, but may not hold the
    file itself. Symbolic links have to be followed before; what does not exist yet is left out.
    """
    holds_file = path if path.is_dir() else path.parent
    for part in (path, *path.parents):
        try:
            status = part.stat()
        except OSError:  # not there, or not to be seen: the folder that hides it comes next
            continue
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid not in {0, os.geteuid()}:
            owner, user = _user_name(status.st_uid), _user_name(os.geteuid())
            return f"{part} belongs to {owner}; it has to belong to {user} or root"
        if mode & stat.S_ISVTX and part not in {path, holds_file}:
            continue
        if mode & stat.S_ISVTX and mode & _OTHERS_WRITE:
            return f"everybody can write {part} (mode {mode:04o}); choose a folder of your own"
        if mode & _OTHERS_WRITE:
            change = "700" if part == path and stat.S_ISDIR(status.st_mode) else "go-w"
            return (
                f"others can write {part} (mode {mode:04o}); if its content is yours: `chmod {change}"
                f" {part}`"
            )
    return ""


def exposed_at(path: Path) -> str:
    """The same of what a path leads to, with symbolic links followed."""
    return exposed(Path(os.path.realpath(path)))


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# Of a plan, a key, a parameter file, a manifest: each takes some kilobytes.
SMALL_BYTES: Final = 1 << 20
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read; reading it waits for no other process.

    Raises:
        OSError: it cannot be opened, or is something else; `strerror` says what, for a sentence such as
            "plan FILE: cannot be read (is a FIFO and no file)".
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((word for is_one, word in _KINDS if is_one(mode)), "something else")
        raise OSError(errno.EINVAL, f"is {kind} and no file", str(path))
    return os.fdopen(handle, "rb")


def read_bounded(path: Path, most_bytes: int = SMALL_BYTES) -> bytes:
    """What a regular file holds.

    Raises:
        OSError: see `open_regular`; or it holds more.
    """
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes:,} bytes", str(path))
    return data


def sha256_of(file: IO[bytes]) -> str:
    """Of the rest of an open file, in hexadecimal; hashlib.file_digest is not in Python 3.10."""
    digest = hashlib.sha256()
    while part := file.read(1 << 20):
        digest.update(part)
    return digest.hexdigest()
