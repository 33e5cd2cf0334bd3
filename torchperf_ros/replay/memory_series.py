"""The memory that a replay's workers use, over time."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from torchperf_ros.supervise.stage_actor import StageActor
from torchperf_ros.telemetry.memory import MemoryUse, sample_memory

_MIB: Final = 1 << 20
_EVERY_S: Final = 1.0
_MOST: Final = 4096


class MemorySeries:
    """Samples once a second; when there are more than 4,096 every second sample goes, and so does the rate."""

    def __init__(self, stages: Sequence[StageActor], tell: Callable[[MemoryUse], None] = lambda _: None) -> None:
        """Sample the workers of these stages, and this process; without stages nothing. `tell` gets each sample."""
        self._stages = stages
        self._tell = tell
        self._every_s = _EVERY_S
        self._next_s = 0.0
        self._start_s = time.monotonic()
        self._rows: list[tuple[float, float, float]] = []

    def tick(self) -> None:
        """Sample if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_s or not self._stages:
            return
        self._next_s = now_s + self._every_s
        use = sample_memory(self._stages)
        self._tell(use)
        self._rows.append((now_s - self._start_s, use.workers_mib, use.node_rss / _MIB))
        if len(self._rows) > _MOST:
            self._rows = self._rows[::2]
            self._every_s *= 2

    @property
    def summary(self) -> dict[str, Any]:
        """Monotonic time in ns from the start, and MiB of the workers (on CUDA of the device) and of this process."""
        return {
            "t_ns": [round(at_s * 1e9) for at_s, _, _ in self._rows],
            "rss_mib": [round(workers, 3) for _, workers, _ in self._rows],
            "own_rss_mib": [round(own, 3) for _, _, own in self._rows],
        }
