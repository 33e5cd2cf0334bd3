"""Files that a person or another host provides, read without waiting for anybody and no further than a bound.

A vehicle looks at such files while it drives. What lies there may be anything: a FIFO without a writer
to, a device without an end, a folder, a link to itself, or a file that fills the memory.
"""

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import IO, Final

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
