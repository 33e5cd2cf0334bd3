"""What a node did over some time, in memory: a column of numbers for each thing known about a stage's frames."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.core.outcome import Outcome

STEPS = ("wait_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
"""The parts of a frame's time that are measured, in their order; what is left of the total is hand-over and publish."""
TIMES = ("age_ms", *STEPS, "total_ms", "budget_ms")
COLUMNS = ("t_ns", "stamp_ns", "seq", "tier", "outcome", "fallback", *TIMES)
UNKNOWN = -1


class RunLogError(TorchperfError):
    """A log cannot be reported on; the message says which, why, and what would do."""


@dataclass(frozen=True)
class StageLog:
    """The answered frames of a stage, oldest first.

    Attributes:
        name: of the stage; `stage 0` where the log does not tell.
        tiers: names of its tiers; may be empty.
        frames: columns of equal length: `t_ns` (publish), `stamp_ns` (0 if unknown), `seq`, `tier`, `outcome` and
            `fallback` as integers (indexes, -1: unknown, of `fallback`: none needed); times in ms, NaN where unknown.
        health: ROS time in ns and the word, each time that it changed.
        dropped: frames that were never started, because a newer one came or they were too old; None where not told.
        reasons: why a frame was not on time, by `t_ns`, where the log tells (records do).
        profiled: `t_ns` of frames that ran under a profiler, which takes time (records tell).
    """

    name: str
    tiers: tuple[str, ...]
    frames: Mapping[str, NDArray[np.float64] | NDArray[np.int64]]
    health: tuple[tuple[int, str], ...] = ()
    dropped: int | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)
    profiled: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.frames["t_ns"])

    @property
    def on_time(self) -> NDArray[np.bool_]:
        """Which frames were answered by their own result, in time."""
        return np.asarray(self.frames["outcome"] == Outcome.ON_TIME)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Which frames say something about the stage: all but those that came while it started."""
        return np.asarray(self.frames["outcome"] != Outcome.STARTING)

    @property
    def lateness_ms(self) -> NDArray[np.float64]:
        """How far past its budget each frame was answered; negative: before."""
        return np.asarray(self.frames["total_ms"] - self.frames["budget_ms"])

    def tier_name(self, index: int) -> str:
        """A tier's name, `tier 2` where it is not told."""
        if index == UNKNOWN:
            return "no tier"
        return self.tiers[index] if 0 <= index < len(self.tiers) else f"tier {index}"


@dataclass(frozen=True)
class LoggedAnomaly:
    """One finding that the node told: ROS time in ns, `OK`, `WARN`, `ERROR` or `STALE`, name, message, values."""

    t_ns: int
    level: str
    name: str
    message: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunLog:
    """What is known about one node over some time.

    Attributes:
        name: what the report calls it.
        source: the log's path, None for one that was listened to.
        node: for example `/perf`.
        stages: in the order of the node.
        memory_t_ns: ROS time of each memory sample.
        memory: MiB by label, one for each sample, NaN where unknown.
        anomalies: oldest first.
        versions: what the log says about the software.
        restarts: how often another process took the node's name, as far as the log tells.
        missing: what the log does not hold, in words.
        troubles: what could not be read, in words.
        documents: other files that belong to it (JSON of an evidence folder).
        recordings: recorded logs that may hold the frames' inputs, as `rosbags` takes them.
    """

    name: str
    source: Path | None
    node: str
    stages: tuple[StageLog, ...]
    memory_t_ns: NDArray[np.int64]
    memory: Mapping[str, NDArray[np.float64]]
    anomalies: tuple[LoggedAnomaly, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    missing: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    documents: tuple[Path, ...] = ()
    recordings: tuple[Path, ...] = ()

    @property
    def span_ns(self) -> tuple[int, int]:
        """First and last time of anything in it; (0, 0) if it is empty."""
        times = [np.asarray(stage.frames["t_ns"]) for stage in self.stages] + [self.memory_t_ns]
        times.append(np.array([anomaly.t_ns for anomaly in self.anomalies], dtype=np.int64))
        times = [column for column in times if len(column)]
        if not times:
            return 0, 0
        return int(min(column.min() for column in times)), int(max(column.max() for column in times))
