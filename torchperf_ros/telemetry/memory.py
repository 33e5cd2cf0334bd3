"""Memory in use by the node and its workers."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import psutil  # reads /proc in C and knows other systems too

from torchperf_ros.supervise.stage_actor import StageActor
from torchperf_ros.supervise.worker_process import WorkerProcess
from torchperf_ros.telemetry.proportional_memory import ProportionalMemory

_MIB = 1 << 20
LABELS = (
    "node_rss_mib", "workers_rss_mib", "cuda_allocated_mib", "cuda_reserved_mib", "cuda_free_mib", "history_mib",
    "shared_memory_mib", "node_pss_mib", "workers_pss_mib", "cuda_peak_mib", "cuda_inactive_split_mib",
    "cuda_alloc_retries", "cuda_out_of_memory",
)  # fmt: skip


@dataclass(frozen=True)
class MemoryUse:
    """One sample in bytes.

    Attributes:
        node_rss: resident memory of the node process.
        rss_by_pid: the same of each worker.
        told: what the workers report themselves, summed: `history`; on CUDA `allocated`, `reserved`, `peak`,
            `inactive_split`, the counts `retries` and `ooms`, and of the device the least `free` and `total`.
        shared: shared memory that the stages' rings have touched.
        pss_by_pid: proportional memory of the node and the workers, as far as it was read.
    """

    node_rss: int
    rss_by_pid: dict[int, int]
    told: dict[str, int]
    shared: int
    pss_by_pid: Mapping[int, int] = field(default_factory=dict)

    @property
    def workers_mib(self) -> float:
        """The headline figure: device memory on CUDA, resident memory on the CPU, in MiB."""
        return self.told.get("allocated", sum(self.rss_by_pid.values())) / _MIB

    def used_share(self, limit_mib: int) -> float:
        """The part of the limit that is in use; above 1 beyond it.

        Args:
            limit_mib: for all workers together; 0: the CUDA device, whoever fills it, or this machine's memory.
        """
        if limit_mib:
            return self.workers_mib / limit_mib
        if "total" in self.told:
            return 1.0 - self.told["free"] / self.told["total"]
        return sum(self.rss_by_pid.values()) / float(psutil.virtual_memory().total)

    def row(self) -> list[float]:
        """Values for `LABELS`, in MiB but for the counts; NaN where not measured."""
        nan = float("nan")
        told = [self.told.get(key, nan) for key in ("allocated", "reserved", "free", "history")]
        pss = [self.pss_by_pid.get(pid, nan) for pid in self.rss_by_pid]
        values = [
            self.node_rss, sum(self.rss_by_pid.values()), *told, self.shared, self.pss_by_pid.get(os.getpid(), nan),
            sum(pss), self.told.get("peak", nan), self.told.get("inactive_split", nan),
        ]  # fmt: skip
        return [*(value / _MIB for value in values), self.told.get("retries", nan), self.told.get("ooms", nan)]


def sample_memory(stages: Iterable[StageActor], proportional: ProportionalMemory | None = None) -> MemoryUse:
    """Read the memory of this process and of every worker that lives.

    Args:
        stages: whose workers.
        proportional: reads PSS now and then; None: it is not looked at.
    """
    workers = [worker for stage in stages for worker in stage.crew.everyone]
    told: dict[str, int] = {}
    for worker in workers:
        for key, value in worker.memory_bytes.items():
            told[key] = min(told.get(key, value), value) if key in {"free", "total"} else told.get(key, 0) + value
    rss = {worker.pid: rss for worker in workers if (rss := _rss_bytes(worker)) is not None}
    pss = proportional.sample([os.getpid(), *rss], time.monotonic()) if proportional is not None else {}
    shared = sum(stage.crew.ring.used_bytes for stage in stages)
    return MemoryUse(psutil.Process().memory_info().rss, rss, told, shared, pss)


def _rss_bytes(worker: WorkerProcess) -> int | None:
    try:
        return int(psutil.Process(worker.pid).memory_info().rss)
    except psutil.NoSuchProcess:  # it died between the look and the read; its death is counted elsewhere
        return None
