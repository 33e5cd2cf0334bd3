"""A run in words and in a table: what a person wants to know before any picture."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.analysis.run_log import RunLog, StageLog
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.core.percent import percent

_NS_PER_S = 1e9
_S_PER_H = 3600.0
_LEAST_TREND_S = 300.0
_TREND_SAMPLES = 400
_PUNCTUAL_MS = 1.0
_HEADLINE_LABELS = ("cuda_allocated_mib", "workers_rss_mib", "memory_mib")


@dataclass(frozen=True)
class StageFigures:
    """A stage in numbers; times in ms, NaN where no frame tells.

    Attributes:
        frames: answered ones, without those that came while it started.
        starting: and those.
        on_time_share: 0 to 1, of `frames`.
        worst_lateness_ms: the latest answer; negative: before its deadline.
        outcomes, fallbacks: how many, by word, without zeros and `on_time`.
    """

    frames: int
    starting: int
    on_time_share: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    budget_ms: float
    worst_lateness_ms: float
    outcomes: dict[str, int]
    fallbacks: dict[str, int]


def stage_figures(stage: StageLog) -> StageFigures:
    """Count and measure a stage's frames."""
    counted = stage.counted
    total_ms = np.asarray(stage.frames["total_ms"], dtype=np.float64)[counted]
    total_ms = total_ms[np.isfinite(total_ms)]
    p50, p95, p99, highest = np.percentile(total_ms, (50, 95, 99, 100)) if len(total_ms) else [math.nan] * 4
    lateness = stage.lateness_ms[counted]
    lateness = lateness[np.isfinite(lateness)]
    budgets = np.asarray(stage.frames["budget_ms"], dtype=np.float64)
    budgets = budgets[np.isfinite(budgets)]
    outcome, fallback = stage.frames["outcome"], stage.frames["fallback"]
    outcomes = {o.word: int((outcome == o).sum()) for o in Outcome if o not in {Outcome.ON_TIME, Outcome.STARTING}}
    fallbacks = {f.word: int((fallback[counted] == f).sum()) for f in Fallback}
    return StageFigures(
        int(counted.sum()), int((~counted).sum()),
        float(stage.on_time[counted].mean()) if counted.any() else math.nan,
        float(p50), float(p95), float(p99), float(highest), float(budgets[-1]) if len(budgets) else math.nan,
        float(lateness.max()) if len(lateness) else math.nan,
        {word: count for word, count in outcomes.items() if count},
        {word: count for word, count in fallbacks.items() if count},
    )  # fmt: skip


def in_words(run: RunLog) -> list[str]:
    """The run in a few sentences, the most important first."""
    sentences = [_stage_words(stage) for stage in run.stages if len(stage)]
    if not sentences:
        sentences = ["No frames were answered in this log."]
    if run.restarts:
        sentences.append(f"The node was restarted {_count(run.restarts, 'time')} meanwhile.")
    if len(run.memory_t_ns):
        sentences.append(_memory_words(run))
    bad = [anomaly for anomaly in run.anomalies if anomaly.level != "OK"]
    if bad:
        errors = sum(anomaly.level == "ERROR" for anomaly in bad)
        names = list(dict.fromkeys(anomaly.name for anomaly in bad))
        more = f" and {len(names) - 3} other kinds" if len(names) > 3 else ""  # noqa: PLR2004
        sentences.append(f"{_count(len(bad), 'anomaly', 'anomalies')} told, {errors} of them errors: "
                         f"{', '.join(names[:3])}{more}.")  # fmt: skip
    elif not any("anomal" in text for text in run.missing):
        sentences.append("No anomalies were told.")
    return sentences


def worst_frames(stage: StageLog, count: int) -> NDArray[np.int64]:
    """Indexes of the frames that a person should look at first.

    Frames answered more than 1 ms after their deadline come first, by lateness; then those that were not on time, the
    emptier the answer the earlier (none, stop, hold_last, backup), and the longer they took; then the slowest others.
    """
    late = np.nan_to_num(stage.lateness_ms, nan=-math.inf)
    past = np.where(late > _PUNCTUAL_MS, late, 0.0)
    missed = stage.counted & ~stage.on_time
    fallback = np.asarray(stage.frames["fallback"], dtype=np.float64) + 1.0  # 0: own result ... 4: none
    total_ms = np.nan_to_num(np.asarray(stage.frames["total_ms"], dtype=np.float64), nan=-math.inf)
    order = np.lexsort((total_ms, np.where(missed, fallback, 0.0), missed, past))[::-1]
    return np.asarray(order[stage.counted[order]][:count])


def memory_trend(run: RunLog) -> tuple[str, float]:
    """Label of the headline figure and its slope in MiB per hour; NaN where there are less than five minutes of it.

    The median of the slopes between all pairs of samples (Theil, 1950; Sen, 1968), which a worker that is replaced now
    and then does not bend. The first tenth, in which a start fills memory, and samples without workers are left out.
    """
    label = next((name for name in _HEADLINE_LABELS if np.isfinite(run.memory.get(name, np.array([]))).any()), "")
    if not label:
        return "", math.nan
    column, t_s = run.memory[label], (run.memory_t_ns - run.memory_t_ns[0]) / _NS_PER_S
    used = np.flatnonzero(np.isfinite(column) & (column > 0) & (t_s >= 0.1 * t_s[-1]))
    used = used[np.linspace(0, len(used) - 1, min(len(used), _TREND_SAMPLES)).astype(int)]
    if len(used) < 2 or np.ptp(t_s[used]) < _LEAST_TREND_S:  # noqa: PLR2004 - a slope takes two
        return label, math.nan
    first, second = np.triu_indices(len(used), 1)
    slopes = np.diff(column[used][[first, second]], axis=0) / np.diff(t_s[used][[first, second]], axis=0)
    return label, float(np.nanmedian(slopes)) * _S_PER_H


def _stage_words(stage: StageLog) -> str:
    figures = stage_figures(stage)
    if not figures.frames:
        return f"{stage.name}: {_count(figures.starting, 'frame')}, all of them while it started."
    of_budget = f", of {figures.budget_ms:.0f} ms" if math.isfinite(figures.budget_ms) else ", without a deadline"
    text = (
        f"{stage.name}: {_count(figures.frames, 'frame')}, {percent(figures.on_time_share, 2)} on time; half of the "
        f"answers took {figures.p50_ms:.1f} ms or less, 99 % {figures.p99_ms:.1f} ms or less, the longest "
        f"{figures.max_ms:.1f} ms{of_budget}."
    )
    if figures.outcomes:
        reasons = ", ".join(f"{count:,} {word.replace('_', ' ')}" for word, count in _most_first(figures.outcomes))
        told = ", ".join(f"{_SAID[word]} ({count:,})" for word, count in _most_first(figures.fallbacks))
        text += f" Not on time: {reasons}; published instead: {told}." if told else f" Not on time: {reasons}."
    worst = figures.worst_lateness_ms
    if math.isfinite(worst):
        text += (
            f" The latest answer left {worst:.1f} ms after its deadline."
            if worst > 0
            else " Every answer left before its deadline."
        )
    if stage.dropped:
        text += f" {_count(stage.dropped, 'frame')} more were never started: a newer one came, or they were too old."
    if figures.starting:
        text += f" {_count(figures.starting, 'frame')} came while it started and are not counted."
    return text


_SAID = {
    "backup": "the backup worker's result",
    "hold_last": "the last result held",
    "stop": "a stop output",
    "none": "nothing at all",
}


def _memory_words(run: RunLog) -> str:
    label, slope = memory_trend(run)
    if not label:
        return "Memory was sampled, but no figure is known."
    column = run.memory[label]
    name = {"cuda_allocated_mib": "Device memory of the workers", "workers_rss_mib": "Memory of the workers"}.get(
        label, "Memory"
    )
    text = f"{name}: {np.nanmin(column):,.0f} to {np.nanmax(column):,.0f} MiB"
    return f"{text}, trend {slope:+,.1f} MiB per hour." if math.isfinite(slope) else f"{text}; too short for a trend."


def _most_first(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _count(number: int, word: str, words: str = "") -> str:
    return f"{number:,} {word if number == 1 else words or word + 's'}"
