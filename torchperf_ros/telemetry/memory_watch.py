"""Follows the memory of the node and of every worker, and says what grows, how fast, and how long that lasts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.memory_trend import Growth, MemoryTrend
from torchperf_ros.supervise.stage_actor import StageActor
from torchperf_ros.telemetry.memory import MemoryUse

NODE = "node"
_MIB = 1 << 20
_ERROR_S = 600.0
_TOLD = {"history": "histories", "allocated": "CUDA memory in use", "reserved": "CUDA memory reserved"}


@dataclass(frozen=True)
class _Sample:
    """One series' value: whose it is, what, and how much more there is to be used."""

    owner: str
    what: str
    mib: float
    room_mib: float


class MemoryWatch:
    """One trend for each series; a replaced worker begins new ones. Called once a second, by one thread."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._trends: dict[tuple[str, str], MemoryTrend] = {}
        self._rooms_mib: dict[tuple[str, str], float] = {}

    def step(self, use: MemoryUse, stages: Sequence[StageActor], limit_mib: int, now_s: float) -> list[Anomaly]:
        """Take a sample; returns what is suspected, one finding per owner, for as long as it is.

        Args:
            use: the sample.
            stages: those that it was taken of.
            limit_mib: parameter `memory_limit_mib`.
            now_s: monotonic time.
        """
        samples = list(_samples(use, stages, limit_mib))
        keys = {(sample.owner, sample.what) for sample in samples}
        self._trends = {key: trend for key, trend in self._trends.items() if key in keys}
        self._rooms_mib = {(sample.owner, sample.what): sample.room_mib for sample in samples}
        for sample in samples:
            self._trends.setdefault((sample.owner, sample.what), MemoryTrend()).add(now_s, sample.mib)
        return [self._finding(owner) for owner in dict(keys) if self._worst(owner) is not None]

    def values(self, owner: str) -> Mapping[str, str]:
        """What `/diagnostics` says of a stage, or of the node: MiB/h, and seconds to exhaustion; nan while unknown."""
        worst = self._worst(owner)
        if worst is not None:
            what, growth = worst
            return _values(growth, self._rooms_mib[owner, what])
        known = [trend.growth for (whose, _), trend in self._trends.items() if whose == owner and trend.growth]
        most = max((growth.mib_per_hour for growth in known), default=math.nan)
        return {"memory_growth_mib_per_hour": f"{most:.3f}", "memory_exhausted_in_s": "nan"}

    def _worst(self, owner: str) -> tuple[str, Growth] | None:
        """The owner's series whose memory is used up first."""
        found = [
            (what, growth)
            for (whose, what), trend in self._trends.items()
            if whose == owner and (growth := trend.suspicion(self._rooms_mib[whose, what])) is not None
        ]
        return min(found, key=lambda each: each[1].lasts_s(self._rooms_mib[owner, each[0]]), default=None)

    def _finding(self, owner: str) -> Anomaly:
        worst = self._worst(owner)
        assert worst is not None
        what, growth = worst
        room_mib = self._rooms_mib[owner, what]
        left_s = growth.lasts_s(room_mib)
        return Anomaly(
            Level.ERROR if left_s < _ERROR_S else Level.WARN,
            f"{owner}: memory grows",
            f"{what} grows by {growth.mib_per_hour:.1f} MiB/h, as seen over {growth.window_s / 60:.0f} min;"
            f" the {room_mib:.0f} MiB that are left last {_duration(left_s)}",
            {"series": what, "confidence": f"{growth.confidence:.4f}", "window_s": f"{growth.window_s:.0f}"}
            | _values(growth, room_mib),
        )


def _samples(use: MemoryUse, stages: Sequence[StageActor], limit_mib: int) -> Iterator[_Sample]:
    """Every series' value now; of workers only those that are ready, as loading is growth, too."""
    available = psutil.virtual_memory().available / _MIB
    on_cuda = "allocated" in use.told
    room = max(0.0, limit_mib - use.workers_mib) if limit_mib else math.inf
    rss_room = available if on_cuda else min(room, available)
    yield _Sample(NODE, "resident memory of the node", use.node_rss / _MIB, available)
    for stage in stages:
        for worker in stage.crew.everyone:
            if worker.ready_at_ns is None:
                continue
            if (rss := use.rss_by_pid.get(worker.pid)) is not None:
                yield _Sample(stage.config.name, f"resident memory of pid {worker.pid}", rss / _MIB, rss_room)
            for key, words in _TOLD.items():
                if (told := worker.memory_bytes.get(key)) is not None:
                    left = rss_room if key == "history" else min(room, use.told["free"] / _MIB)
                    yield _Sample(stage.config.name, f"{words} of pid {worker.pid}", told / _MIB, left)


def _values(growth: Growth, room_mib: float) -> dict[str, str]:
    return {
        "memory_growth_mib_per_hour": f"{growth.mib_per_hour:.3f}",
        "memory_exhausted_in_s": f"{growth.lasts_s(room_mib):.0f}",
    }


def _duration(seconds: float) -> str:
    hours = seconds / 3600.0
    return f"{hours:.1f} h" if hours >= 1 else f"{seconds / 60:.0f} min"
