"""What killed processes leave in shared memory: tens of megabytes each, which nobody else takes away."""

import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_HASH: Final = 16 * "[0-9a-f]"
_LOCKS: Final = (f"fastdds_{_HASH}_el", f"fastrtps_{_HASH}_el")  # Kilted and later; before
_STARTS_WITHIN_S: Final = 60.0  # a younger lock may belong to a process that has made it and not yet taken it


def remove_dead_segments(folder: Path = Path("/dev/shm")) -> int:
    """Remove the Fast DDS segments of processes that are dead, our own and others'; returns how many bytes that frees.

    Each segment has a file that its owner holds a lock on for as long as it lives; `fastdds shm clean` goes by it too.
    Segments of other users are left to them.
    """
    youngest_s = time.time() - _STARTS_WITHIN_S
    freed = 0
    for lock in (path for pattern in _LOCKS for path in folder.glob(pattern)):
        segment = lock.with_name(lock.name.removesuffix("_el"))
        with suppress(OSError), lock.open("rb") as file:  # locked, gone meanwhile, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.stat().st_mtime < youngest_s:
                size = segment.stat().st_size
                segment.unlink()
                lock.unlink()
                freed += size
    return freed
