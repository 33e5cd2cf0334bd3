"""What the machine gives and lacks, read without root from `/proc`, `/sys` and `/dev/shm`."""

import ctypes
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperf_ros.observe.doctor.rules import BUSIEST, CLOCK_RATE, LARGE_BYTES, LARGER_SEGMENT, REAL_TIME

_MIB: Final = 1 << 20
_SHM_FREE: Final = 128 * _MIB  # the segments of two participants with this package's profile
_DAY_MS: Final = 86_400_000.0  # a clock that was set is not so far off: these are the stamps of a log
_TIME_ERROR: Final = 5  # of adjtimex(2): the clock is not synchronised
_FULL: Final = 0.9


@dataclass(frozen=True)
class Check:
    """One thing of the environment.

    Attributes:
        ok: None where it cannot be read, or does not matter here.
        found: what holds.
        mend: the command that mends it.
    """

    name: str
    ok: bool | None
    found: str
    mend: str = ""


@dataclass(frozen=True)
class Need:
    """What the node asks of the machine.

    Attributes:
        pid: of its process on this machine; None: the limits of this shell are looked at.
        scheduling: what the node itself says, for example `fifo 10`; empty where not known.
        realtime_priority, lock_memory: its parameters.
        message_bytes: of its largest messages.
        lost: messages that did not reach it.
        clock_ms: how far stamps show a clock to be off; NaN if they do not.
        busy: share of the processors that was used while it was looked at; NaN where not known.
        clock_problem: why the node says that stamps and its clock cannot fit, as one of them goes by
            `/clock`.
        unheard: a topic that the node gets and a second subscriber did not: too large for its publisher's
            segment.
    """

    pid: int | None = None
    scheduling: str = ""
    realtime_priority: int = 10
    lock_memory: bool = False
    message_bytes: int = 0
    lost: int = 0
    clock_ms: float = math.nan
    busy: float = math.nan
    unheard: str = ""
    clock_problem: str = ""


def kernel_clock() -> int:
    """What adjtimex(2) says of this machine's clock, which every user may ask.

    Below 0: it cannot be asked.
    """
    largest_timex = 512  # more bytes than any kernel's `struct timex`
    return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(largest_timex)))


def look_around(need: Need, root: Path = Path("/"), clock: Callable[[], int] = kernel_clock) -> list[Check]:
    """Look at everything.

    Args:
        need: what the node asks of the machine.
        root: where `proc`, `sys` and `dev` lie.
        clock: as `kernel_clock`.
    """
    limits = _limits(root, need.pid)
    priority, locked = (
        limits.get(f"Max {what}", math.nan) for what in ("realtime priority", "locked memory")
    )
    is_fifo = need.scheduling.startswith("fifo")
    scheduled = f"scheduling {need.scheduling or 'not known'}, limit {_number(priority)}"
    lockable = f"limit {_number(locked / _MIB)} MiB"
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    governors = {file.read_text().strip() for file in files}
    return [
        Check("rtprio", is_fifo or priority >= need.realtime_priority, scheduled, REAL_TIME)
        if need.realtime_priority or is_fifo
        else Check("rtprio", None, f"{scheduled}: realtime_priority is 0"),
        Check("memlock", math.isinf(locked), lockable, REAL_TIME.replace("rtprio 98", "memlock unlimited"))
        if need.lock_memory
        else Check("memlock", None, f"{lockable}: lock_memory is off, which needs none"),
        Check("governor", governors == {"performance"}, ", ".join(sorted(governors)), CLOCK_RATE)
        if governors
        else Check("governor", None, "this machine does not show one (a virtual machine sets none)"),
        Check("load", None, "not measured")
        if math.isnan(need.busy)
        else Check("load", need.busy < _FULL, f"{need.busy:.0%} of the processors' time was used", BUSIEST),
        _segment(need, root),
        _room(root),
        _clock(need, clock),
        _udp(need, root),
    ]


def _segment(need: Need, root: Path) -> Check:
    """Fast DDS's segments of all participants here.

    A message larger than its sender's goes by UDP, or is lost.
    """
    segment = re.compile(r"(fastdds|fastrtps)_[0-9a-f]{16}$")
    sizes = [file.stat().st_size for file in (root / "dev/shm").glob("fast*") if segment.match(file.name)]
    least = f"{len(sizes)} participants have {min(sizes, default=0) / _MIB:.1f} MiB and more"
    found, ok = least if sizes else "no Fast DDS segment", True if sizes else None
    if need.unheard:
        found += f"; a second subscriber gets nothing of {need.unheard}: too large for its publisher's"
        ok = False
    elif need.message_bytes:
        found += f"; the largest message has {need.message_bytes / _MIB:.1f}"
    if sizes and not need.unheard and need.message_bytes >= LARGE_BYTES:
        ok = max(sizes) > 2 * need.message_bytes and not need.lost
    return Check("segment", ok, found, LARGER_SEGMENT.format("its publisher"))


def _room(root: Path) -> Check:
    try:
        room = os.statvfs(root / "dev/shm")
    except OSError as error:
        return Check("/dev/shm", False, f"not there: {error.strerror}", "docker run --ipc=host ...")
    free = room.f_bavail * room.f_frsize
    mend = "fastdds shm clean   # in a container: docker run --ipc=host, or --shm-size=1g"
    return Check("/dev/shm", free >= _SHM_FREE, f"{free / _MIB:,.0f} MiB free", mend)


def _clock(need: Need, clock: Callable[[], int]) -> Check:
    if need.clock_problem:
        why = "the same for every node; /clock: simulation, or play --clock"
        return Check("clock", False, need.clock_problem, f"ros2 param get NODE use_sim_time   # {why}")
    mend = "chronyc tracking   # on both machines; sudo systemctl enable --now chrony"
    state = clock()
    kernel = "not synchronised" if state == _TIME_ERROR else "synchronised" if state >= 0 else "not known"
    if math.isfinite(need.clock_ms):
        found = f"stamps and receipt differ by {need.clock_ms:,.1f} ms; this machine's clock is {kernel}"
        if abs(need.clock_ms) > _DAY_MS:
            found = (
                f"stamps and receipt differ by {need.clock_ms / _DAY_MS:,.1f} days, as those of a log do"
            )
            mend = "torchperf play LOG --restamp   # or play LOG --clock, and the node with use_sim_time"
        return Check("clock", False, found, mend)
    alone = ", which matters where stamps come from another machine" if state == _TIME_ERROR else ""
    return Check("clock", True if state >= 0 and not alone else None, f"{kernel}{alone}; stamps fit", mend)


def _udp(need: Need, root: Path) -> Check:
    file = root / "proc/sys/net/core/rmem_max"
    size = int(file.read_text()) if file.is_file() else 0
    if not size:
        return Check("udp buffers", None, "not shown here")
    ok = size >= need.message_bytes or not need.lost or None
    lost = f"; {need.lost} messages were lost: this counts where they come from another machine"
    found = f"net.core.rmem_max {size / _MIB:.1f} MiB{'' if ok else lost}"
    return Check("udp buffers", ok, found, "sudo sysctl -w net.core.rmem_max=8388608")


def _limits(root: Path, pid: int | None) -> dict[str, float]:
    """Soft limits of a process by name; of this one where that may not be read."""
    for folder in (f"proc/{pid}", "proc/self"):
        try:
            lines = (root / folder / "limits").read_text().splitlines()
        except OSError:
            continue
        rows = (re.split(r"\s{2,}", line) for line in lines[1:])
        return {
            row[0]: math.inf if row[1] == "unlimited" else float(row[1]) for row in rows if len(row) > 1
        }
    return {}


def _number(value: float) -> str:
    return "unlimited" if math.isinf(value) else "not known" if math.isnan(value) else f"{value:g}"
