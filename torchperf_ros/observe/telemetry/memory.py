"""Memory in use by the node and its workers.

Proportional set size, with pages that several share divided.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from torchperf_ros.stage.stage import Stage

_KIB, _MIB = 1 << 10, 1 << 20
_EVERY_S = 10.0
LABELS = (
    "node_rss_mib",
    "workers_rss_mib",
    "cuda_allocated_mib",
    "cuda_reserved_mib",
    "cuda_free_mib",
    "history_mib",
    "shared_memory_mib",
    "node_pss_mib",
    "workers_pss_mib",
    "cuda_peak_mib",
    "cuda_inactive_split_mib",
    "cuda_alloc_retries",
    "cuda_out_of_memory",
    "workers_kept_mib",
)


class ProportionalMemory:
    """PSS by process id, read seldom: the kernel walks every page for it (5 ms for a process with torch).

    One process is read at a time, at most once in ten seconds each; in between the last value holds.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._read: dict[int, tuple[float, int]] = {}

    def sample(self, pids: Iterable[int], now_s: float) -> Mapping[int, int]:
        """Bytes by process id, of those that could be read so far; `now_s` is monotonic.

        Reads at most one, the one due for longest. Processes that are not among `pids` are forgotten.
        """
        wanted = list(pids)
        self._read = {pid: self._read[pid] for pid in wanted if pid in self._read}
        due = min(wanted, key=lambda pid: self._read.get(pid, (-1.0, 0))[0], default=None)
        if due is not None and (due not in self._read or now_s - self._read[due][0] >= _EVERY_S):
            self._read[due] = (now_s, self._pss_bytes(due))
        return {pid: size for pid, (_, size) in self._read.items() if size}

    def _pss_bytes(self, pid: int) -> int:
        """Of one process; 0 where the kernel does not let this process read it."""
        try:
            lines = (self._proc / str(pid) / "smaps_rollup").read_bytes().splitlines()
        except OSError:  # it has ended, belongs to another user, or the kernel is older than 4.14
            return 0
        return next((int(line.split()[1]) * _KIB for line in lines if line.startswith(b"Pss:")), 0)


@dataclass(frozen=True)
class MemoryUse:
    """One sample in bytes.

    Attributes:
        by_workers: what the workers report themselves, summed: `history`, `kept` (freed, and not given back); on
            CUDA `allocated`, `reserved`, `peak`, `inactive_split`, the counts `retries` and `ooms`, and of
            the device the least `free` and `total`.
        pss_by_pid: proportional memory of the node and the workers, as far as it was read.
    """

    # resident memory of the node process, without shared memory: each process would count it anew
    node_rss: int
    rss_by_pid: dict[int, int]  # the same of each worker
    by_workers: dict[str, int]
    shared: int  # shared memory that the stages' rings have touched
    pss_by_pid: Mapping[int, int] = field(default_factory=dict)

    @property
    def workers_mib(self) -> float:
        """The headline figure: device memory on CUDA, resident memory on the CPU, in MiB."""
        return self.by_workers.get("allocated", sum(self.rss_by_pid.values())) / _MIB

    def used_share(self, limit_mib: int) -> float:
        """The part of the limit for all workers that is in use; above 1 beyond it.

        A limit of 0 is the CUDA device with all its users, or this machine's memory.
        """
        if limit_mib:
            return self.workers_mib / limit_mib
        if "total" in self.by_workers:
            kept = self.by_workers.get("reserved", 0) - self.by_workers.get(
                "allocated", 0
            )  # torch's, for its next tensors
            return 1.0 - (self.by_workers["free"] + kept) / self.by_workers["total"]
        return sum(self.rss_by_pid.values()) / float(psutil.virtual_memory().total)

    def row(self) -> list[float]:
        """Values for `LABELS`, in MiB but for the counts; NaN where not measured."""
        nan = float("nan")
        by_workers = [self.by_workers.get(key, nan) for key in ("allocated", "reserved", "free", "history")]
        pss = [self.pss_by_pid.get(pid, nan) for pid in self.rss_by_pid]
        values = [
            self.node_rss,
            sum(self.rss_by_pid.values()),
            *by_workers,
            self.shared,
            self.pss_by_pid.get(os.getpid(), nan),
            sum(pss),
            self.by_workers.get("peak", nan),
            self.by_workers.get("inactive_split", nan),
        ]
        counts = [self.by_workers.get("retries", nan), self.by_workers.get("ooms", nan)]
        return [*(value / _MIB for value in values), *counts, self.by_workers.get("kept", nan) / _MIB]


def sample_memory(stages: Iterable[Stage], proportional: ProportionalMemory | None = None) -> MemoryUse:
    """Read the memory of this process and of every worker that lives.

    `proportional` reads PSS now and then; without it, nothing does.
    """
    workers = [worker for stage in stages for worker in stage.everyone]
    by_workers: dict[str, int] = {}
    for worker in workers:
        for key, value in worker.reported.memory_bytes.items():
            if key in {"free", "total"}:
                by_workers[key] = min(by_workers.get(key, value), value)
            else:
                by_workers[key] = by_workers.get(key, 0) + value
    rss = {worker.pid: rss for worker in workers if (rss := _own_rss_bytes(worker.pid)) is not None}
    pss = proportional.sample([os.getpid(), *rss], time.monotonic()) if proportional is not None else {}
    shared = sum(stage.ring.used_bytes for stage in stages)
    return MemoryUse(_own_rss_bytes(os.getpid()) or 0, rss, by_workers, shared, pss)


def _own_rss_bytes(pid: int) -> int | None:
    """Resident memory but for shared memory; None: the process died between the look and the read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:  # its death is counted elsewhere
        return None
    kib = {line[:8]: int(line.split()[1]) for line in lines if line.startswith((b"RssAnon:", b"RssFile:"))}
    return sum(kib.values()) * _KIB
