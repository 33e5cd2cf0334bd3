"""What of a run is compared: the frames of each stage that say something about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.runs.run_log import RunLog, RunLogError, StageLog
from torchperf_ros.runs.run_log_source import read_runs


@dataclass(frozen=True)
class StageFrames(StageLog):
    """The answered frames of a stage in the order of their numbers, without those that say nothing about it.

    Left out are frames that came before the stage had started for the first time, and those that ran under a profiler.
    Frames that found it starting again, after a crash, count: they were missed.

    Attributes:
        gaps: shape (n,), frames before each that were never started, by the gaps in `seq`.
    """

    gaps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def own_stamps(self) -> NDArray[np.int64] | None:
        """The stamps, where each frame has its own."""
        stamps = np.asarray(self.frames["stamp_ns"])
        return stamps if len(stamps) and stamps.all() and len(np.unique(stamps)) == len(stamps) else None


def load_run(path: Path, progress: Callable[[int, int], None] = lambda _done, _total: None) -> RunLog:
    """One run from whatever `read_runs` reads; a `RunLogError` where it has no answered frame, or several nodes."""
    runs = read_runs(path, progress)
    if len(runs) > 1:
        msg = f"run {path}: holds {len(runs)} runs ({', '.join(run.name for run in runs)}); name one of them"
        raise RunLogError(msg)
    if not any(len(stage_frames(stage)) for stage in runs[0].stages):
        msg = f"run {path}: holds no frame that was answered after the start; record `/perf/.*`, or replay a log"
        raise RunLogError(msg)
    return replace(runs[0], name=str(path))


def stage_frames(stage: StageLog) -> StageFrames:
    """The frames of a stage that are compared."""
    seq = stage.frames["seq"]
    order = np.argsort(seq, kind="stable") if len(np.unique(seq)) == len(seq) else np.arange(len(seq))
    gaps = np.maximum(np.diff(seq[order], prepend=seq[order][:1] - 1) - 1, 0)
    frames = stage.frames[order]
    counted = np.logical_or.accumulate(stage.counted[order]) & ~np.isin(frames["t_ns"], list(stage.profiled))
    return StageFrames(stage.name, stage.tiers, frames[counted], gaps=gaps[counted])


def pooled(stages: Sequence[StageFrames]) -> StageFrames:
    """The frames of a stage in several runs, one run after the other; names are the first's."""
    frames, gaps = (np.concatenate([getattr(one, name) for one in stages]) for name in ("frames", "gaps"))
    return replace(stages[0], frames=frames, gaps=gaps)
