"""What runs are compared by, whatever wrote them: columns of each stage, memory, and what they were runs of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.frame.errors import TorchperfError
from torchperf_ros.frame.frame_table import FRAME
from torchperf_ros.frame.outcome import Outcome
from torchperf_ros.runs.run_file import RUN_FILE, SUFFIXES, Run, read_run
from torchperf_ros.runs.run_log import UNKNOWN, RunLog
from torchperf_ros.runs.run_log_source import read_runs

_MEMORY_LABELS: Final = ("cuda_allocated_mib", "workers_rss_mib", "memory_mib")
_NS_PER_S: Final = 1e9

Values = NDArray[np.float64]


class CompareError(TorchperfError):
    """Runs cannot be compared; the message says which, why, and what would do."""


@dataclass(frozen=True)
class StageFrames:
    """The answered frames of a stage in the order of their numbers, without those that say nothing about it.

    Left out are frames that came before the stage had started for the first time, and those that ran under a profiler.
    Frames that found it starting again, after a crash, count: they were missed.

    Attributes:
        name: of the stage.
        tiers: their names, from the most accurate on; may be empty.
        budget_ms: of the last frame, NaN where unknown.
        seq, stamp_ns, tier: shape (n,); `stamp_ns` 0 where unknown.
        total_ms: shape (n,), receipt to publish, NaN where unknown.
        missed: shape (n,), which frames were not on time.
        fell_back: shape (n,), for which frames something else than their own result was published.
        dropped: shape (n,), frames before each that were never started, by the gaps in `seq`.
        output_hash: shape (n,), 0 where nothing was published or the source does not say.
    """

    name: str
    tiers: tuple[str, ...]
    budget_ms: float
    seq: NDArray[np.int64]
    stamp_ns: NDArray[np.int64]
    tier: NDArray[np.int64]
    total_ms: Values
    missed: NDArray[np.bool_]
    fell_back: NDArray[np.bool_]
    dropped: NDArray[np.int64]
    output_hash: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.seq)


@dataclass(frozen=True)
class RunFrames:
    """One run.

    Attributes:
        name: what people call it, a path for example.
        stages: by name, in the order of the run.
        facts: what the summary says: `log`, `machine`, `model`, `params_sha256`, `pace`, `commit`, ...; may be empty.
        memory_s, memory_mib: shape (k,), times from any start and what the workers used; may be empty.
    """

    name: str
    stages: Mapping[str, StageFrames]
    facts: Mapping[str, Any] = field(default_factory=dict)
    memory_s: Values = field(default_factory=lambda: np.empty(0))
    memory_mib: Values = field(default_factory=lambda: np.empty(0))

    def fact(self, *path: str) -> Any:  # noqa: ANN401 - whatever the summary holds
        """What lies below these keys; None where there is nothing."""
        found: Any = self.facts
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def number(self, key: str) -> float:
        """A number of the summary; NaN where there is none."""
        found = self.fact(key)
        return float(found) if isinstance(found, (int, float)) else float("nan")


def load_run(path: Path, progress: Callable[[int, int], None] = lambda _done, _total: None) -> RunFrames:
    """Read a run that `torchperf replay` wrote, records, or a recorded log with a node's `/perf` topics.

    Args:
        path: `.json`, `.parquet`, or a folder with one `run.parquet`; `.jsonl`; a rosbag2 folder, `.mcap`, `.db3`,
            `.bag`, or a folder with one of these.
        progress: called with how far it is.

    Raises:
        RunLogError: it cannot be read.
        CompareError: it holds no answered frame, or several nodes.
    """
    file = path / RUN_FILE if (path / RUN_FILE).is_file() else path
    if file.suffix in SUFFIXES and file.is_file():
        run = of_run(read_run(file), str(path))
    else:
        logs = read_runs(path, progress)
        if len(logs) > 1:
            msg = f"run {path}: holds {len(logs)} runs ({', '.join(log.name for log in logs)}); name one of them"
            raise CompareError(msg)
        run = _of_log(logs[0], str(path))
    if not any(map(len, run.stages.values())):
        msg = f"run {path}: holds no frame that was answered after the start; record `/perf/.*`, or replay a log"
        raise CompareError(msg)
    return run


def of_run(run: Run, name: str) -> RunFrames:
    """The view of a run that `write_run` takes, under this name.

    Raises:
        CompareError: its memory is no series.
    """
    series = run.summary.get("memory") or {}
    try:
        times, memory = np.array([series.get(key) or [] for key in ("t_ns", "rss_mib")], dtype=np.float64)
    except (AttributeError, TypeError, ValueError) as error:
        msg = f"run {name}: its `memory` has to hold `t_ns` and `rss_mib`, a number for each sample ({error})"
        raise CompareError(msg) from error
    known = np.isfinite(times) & np.isfinite(memory)
    tiers = {entry["name"]: tuple(map(str, entry.get("tiers") or ())) for entry in run.summary.get("stages") or ()}
    stages = {stage: stage_frames(stage, rows, tiers.get(stage, ())) for stage, rows in run.frames.items()}
    return RunFrames(name, stages, run.summary, times[known] / _NS_PER_S, memory[known])


def stage_frames(
    name: str,
    columns: Mapping[str, Any] | NDArray[np.void],
    tiers: tuple[str, ...] = (),
    profiled: frozenset[int] = frozenset(),
) -> StageFrames:
    """The view of a stage's columns, by the names of `FRAME`.

    Args:
        name: of the stage.
        columns: `seq`, `stamp_ns`, `tier`, `outcome`, `fallback`, `total_ms`, `budget_ms`; `output_hash` if known.
        tiers: their names.
        profiled: `t_ns` of frames that ran under a profiler.
    """
    seq = np.asarray(columns["seq"], dtype=np.int64)
    order = np.argsort(seq, kind="stable") if len(np.unique(seq)) == len(seq) else np.arange(len(seq))
    gaps = np.maximum(np.diff(seq[order], prepend=seq[order][:1] - 1) - 1, 0)
    counted = np.logical_or.accumulate(np.asarray(columns["outcome"])[order] != Outcome.STARTING)
    if profiled:
        counted &= ~np.isin(np.asarray(columns["t_ns"])[order], list(profiled))
    order = order[counted]
    budgets = np.asarray(columns["budget_ms"], dtype=np.float64)[order]
    budgets = budgets[np.isfinite(budgets)]
    names = columns.dtype.names or () if isinstance(columns, np.ndarray) else columns
    hashes = columns["output_hash"] if "output_hash" in names else np.zeros(len(seq))
    return StageFrames(
        name, tiers, float(budgets[-1]) if len(budgets) else float("nan"), seq[order],
        np.asarray(columns["stamp_ns"], dtype=np.int64)[order],
        np.asarray(columns["tier"], dtype=np.int64)[order],
        np.asarray(columns["total_ms"], dtype=np.float64)[order],
        np.asarray(columns["outcome"])[order] != Outcome.ON_TIME,
        np.asarray(columns["fallback"])[order] != UNKNOWN,
        gaps[counted], np.asarray(hashes, dtype=np.uint64)[order],
    )  # fmt: skip


def stage_of(runs: Sequence[RunFrames], name: str) -> list[StageFrames]:
    """A stage of each run; without frames where a run lacks it."""
    return [run.stages.get(name) or stage_frames(name, np.empty(0, dtype=FRAME)) for run in runs]


def pooled(stages: Sequence[StageFrames]) -> StageFrames:
    """The frames of a stage in several runs, one run after the other; budget and names are the first's."""
    names = [each.name for each in fields(StageFrames) if each.name not in {"name", "tiers", "budget_ms"}]
    columns: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in stages]) for name in names}
    return replace(stages[0], **columns)


def _of_log(log: RunLog, name: str) -> RunFrames:
    memory = next((log.memory[label] for label in _MEMORY_LABELS if np.isfinite(log.memory.get(label, np.nan)).any()),
                  np.empty(0))  # fmt: skip
    known = np.isfinite(memory) & (memory > 0)
    stages = {one.name: stage_frames(one.name, one.frames, one.tiers, one.profiled) for one in log.stages}
    seconds = (log.memory_t_ns[known] - log.memory_t_ns[0]) / _NS_PER_S if known.any() else np.empty(0)
    return RunFrames(name, stages, {"versions": dict(log.versions)}, seconds, memory[known])
