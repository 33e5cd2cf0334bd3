"""What the workers of a stage say of their tiers, as one: states of the one that serves, counters of all there were."""

from collections.abc import Iterable, Sequence
from typing import Any

from torchperf_ros.supervise.worker_process import WorkerProcess

COUNTERS = ("recompiles", "engine_errors", "eager_answers", "hits", "misses", "chunked")


class TierTally:
    """Adds up over workers, those that are gone included."""

    def __init__(self, tiers: Sequence[str]) -> None:
        """Name the tiers."""
        self._tiers = tiers
        self._gone = [dict.fromkeys(COUNTERS, 0) for _ in tiers]
        self._out_of_memory = 0

    def left(self, worker: WorkerProcess) -> None:
        """Keep what a worker counted that is gone."""
        self._out_of_memory += worker.out_of_memory
        for kept, last in zip(self._gone, worker.tiers, strict=False):
            for name in COUNTERS:
                kept[name] += last[name]

    def out_of_memory(self, workers: Iterable[WorkerProcess]) -> int:
        """Frames for which a tier had not enough memory."""
        return self._out_of_memory + sum(worker.out_of_memory for worker in workers)

    def rows(self, workers: Iterable[WorkerProcess]) -> list[dict[str, Any]]:
        """One row per tier, see `TierFacts`; empty before any worker is ready."""
        said = [worker.tiers for worker in workers if worker.tiers]
        if not said:
            return []
        rows = []
        for number, gone in enumerate(self._gone):
            counted = {name: gone[name] + sum(tiers[number][name] for tiers in said) for name in COUNTERS}
            rows.append({**said[0][number], **counted})
        return rows
