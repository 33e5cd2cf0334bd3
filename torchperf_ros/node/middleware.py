"""What the middleware needs.

Transport settings, the removal of what killed processes left, and a bounded exit.
"""

import faulthandler
import fcntl
import importlib.metadata
import os
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROFILE, _NODE_PROFILE, _LANE_PROFILE = (
    f"fastdds_{name}.xml" for name in ("shared_memory", "node", "lane")
)
_PROFILE_VARIABLES = (
    "FASTDDS_DEFAULT_PROFILES_FILE",
    "FASTRTPS_DEFAULT_PROFILES_FILE",
)  # Kilted and later; before
# Of rmw_fastrtps: with the first it takes memory policies from a profile, and leaves the second aside.
_QOS_FROM_XML: Final = "RMW_FASTRTPS_USE_QOS_FROM_XML"
_PUBLICATION_MODE: Final = "RMW_FASTRTPS_PUBLICATION_MODE"
_KILTED_RCLPY = 9


def image_transport(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that give a process a shared-memory segment which images fit into.

    None where a transport was chosen.

    With Fast DDS' defaults most messages of 1 MB and more are lost.
    """
    if any(name in environment for name in ("FASTDDS_BUILTIN_TRANSPORTS", *_PROFILE_VARIABLES)):
        return {}
    prefixes = [*environment.get("AMENT_PREFIX_PATH", "").split(os.pathsep), sys.prefix]
    folders = [
        Path(__file__).parents[2],
        *(Path(prefix, "share", "torchperf_ros") for prefix in prefixes if prefix),
    ]
    for folder in folders:
        profile = folder / "config" / _PROFILE
        if profile.is_file():
            older = int(importlib.metadata.version("rclpy").partition(".")[0]) < _KILTED_RCLPY
            return {_PROFILE_VARIABLES[older]: str(profile)}
    return {}  # an installation without the package's data files


def carry_images() -> None:
    """Set these variables for this process and its children."""
    os.environ.update(image_transport(os.environ))


def own_segment(environment: Mapping[str, str], *, lane: bool = False) -> dict[str, str]:
    """Where this package's profile is set, variables that have the node, or its lane, take its own instead.

    Fast DDS touches a whole segment: that is 48 MiB less, 63 for the lane. Who publishes images needs the
    larger segment; these two take them out of the camera's.

    rmw_fastrtps gives each subscription memory for two messages, which it keeps. The node's profile has them share
    what is free: eight cameras of 1280x720 take 15 to 20 MiB less, and as it is still in the processor's cache, an
    image takes 0.1 to 0.3 ms less. It does so unless the user has chosen what a profile decides then.
    """
    for name in _PROFILE_VARIABLES:
        profile = Path(environment.get(name, ""))
        own = profile.parent / (_LANE_PROFILE if lane else _NODE_PROFILE)
        if profile.name in {_PROFILE, _NODE_PROFILE} and own.is_file():
            has_chosen = not lane and {_QOS_FROM_XML, _PUBLICATION_MODE} & environment.keys()
            return {name: str(own)} | ({} if has_chosen else {_QOS_FROM_XML: "0" if lane else "1"})
    return {}


def end_within(seconds: int) -> None:
    """Have the process exit with status 1 after this time, should it still be there.

    Fast DDS can deadlock while it takes down a TCP connection on which nothing ever came (its transport
    LARGE_DATA), and rclpy holds the interpreter lock meanwhile: no Python thread could end the process. The
    watchdog of `faulthandler` is a thread in C. Call it when nothing of one's own is left to be done.
    """
    # until the end
    faulthandler.dump_traceback_later(seconds, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115


_HASH: Final = 16 * "[0-9a-f]"
_LOCKS: Final = (f"fastdds_{_HASH}_el", f"fastrtps_{_HASH}_el")  # Kilted and later; before
# a younger lock may belong to a process that has made it and not yet taken it
_STARTS_WITHIN_S: Final = 60.0


def remove_dead_segments(folder: Path = Path("/dev/shm")) -> int:
    """Remove the Fast DDS segments of processes that are dead, our own and others'.

    Returns how many bytes that frees.

    Each segment has a file that its owner holds a lock on for as long as it lives; `fastdds shm clean` goes
    by it too. Segments of other users are left to them.
    """
    youngest_s = time.time() - _STARTS_WITHIN_S
    freed = 0
    for lock in (path for pattern in _LOCKS for path in folder.glob(pattern)):
        segment = lock.with_name(lock.name.removesuffix("_el"))
        with (
            suppress(OSError),
            open(lock, "rb", opener=_without_waiting) as file,
        ):  # locked, gone, another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_mtime < youngest_s:
                size = segment.stat().st_size
                segment.unlink()
                lock.unlink()
                freed += size
    return freed


def _without_waiting(path: str, flags: int) -> int:
    """Opening a FIFO waits for who writes to it, and anyone may put one into this folder, or a link."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
