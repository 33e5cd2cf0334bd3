"""Which events are worth a profile or a look at the memory, and how often."""

from collections.abc import Collection

from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.clock import NS_PER_S


class EvidenceRule:
    """Memory that grows asks for a look at it, any other error of a stage for a profile; each seldom."""

    def __init__(self, every_s: float = 600.0, apart_s: float = 60.0) -> None:
        """Ask for each kind of evidence of a stage at most every `every_s` seconds, of all stages every `apart_s`."""
        self._every_ns = round(every_s * NS_PER_S)
        self._apart_ns = round(apart_s * NS_PER_S)
        self._last_ns: int | None = None
        self._asked_ns: dict[tuple[str, str], int] = {}

    def wanted(self, anomaly: Anomaly, stages: Collection[str], now_ns: int) -> tuple[str, str] | None:
        """The stage and what is wanted of it, `profile` or `memory`; None mostly. `taken` says that it could be had.

        Args:
            anomaly: as it is told.
            stages: names that it may begin with.
            now_ns: monotonic time.
        """
        stage, _, what = anomaly.name.partition(": ")
        if stage == "node" and stages and stage not in stages:  # a worker's snapshot shows the node's memory, too
            stage = next(iter(stages))
        kind = "memory" if what == "memory grows" else "profile"
        least = Level.WARN if kind == "memory" else Level.ERROR
        asked_ns = self._asked_ns.get((stage, kind))
        if stage not in stages or anomaly.level is Level.STALE or anomaly.level < least:
            return None
        if asked_ns is not None and now_ns - asked_ns < self._every_ns:
            return None
        if self._last_ns is not None and now_ns - self._last_ns < self._apart_ns:
            return None  # the stages share a machine: one loses a worker for a while, not all of them
        return stage, kind

    def taken(self, stage: str, kind: str, now_ns: int) -> None:
        """What was wanted is being taken."""
        self._asked_ns[stage, kind] = self._last_ns = now_ns
