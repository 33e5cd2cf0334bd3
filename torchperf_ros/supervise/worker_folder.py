"""Where a worker keeps its temporary files: the packages that it has unpacked, tens of megabytes each."""

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "torchperf_worker_"
_STARTS_WITHIN_S: Final = 60.0  # a younger one may belong to a process that has made it and not yet locked it


class WorkerFolder:
    """Locked by this process for as long as it lives, so that others can tell what a killed one has left.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        """Make it where temporary files go."""
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        self.path = self._folder.name
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._unlock = weakref.finalize(self, os.close, descriptor)
        with suppress(OSError):  # a file system without locks, where `remove_dead_folders` cannot take one either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it, with all that is in it."""
        self._folder.cleanup()
        self._unlock()


def remove_dead_folders(where: Path | None = None) -> int:
    """Remove this user's worker folders whose process was killed before it could; returns how many bytes that frees.

    Args:
        where: the folder that they are in; None: where temporary files go.
    """
    youngest_s = time.time() - _STARTS_WITHIN_S
    freed = 0
    for folder in (where or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked, gone meanwhile, or no folder
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(descriptor)
                if found.st_uid == os.getuid() and found.st_mtime < youngest_s:
                    size = sum(file.lstat().st_size for file in folder.rglob("*"))
                    shutil.rmtree(folder)
                    freed += size
            finally:
                os.close(descriptor)
    return freed
