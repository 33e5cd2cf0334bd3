"""A run in numbers and words.

What a stage's frames came to, the verdict and its cause, and the frames to look at.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.outcome import Fallback, GuardVerdict, Health, Outcome
from torchperf_ros.api.text import percent
from torchperf_ros.observe.runs.run_log import MEMORY, UNKNOWN, RunLog, StageLog
from torchperf_ros.stage.frame_table import flow_of

PUNCTUAL_MS: Final = 1.0
_GOOD_SHARE: Final = 0.999
_FAIR_SHARE: Final = 0.99
_NS_PER_S: Final = 1e9
_NUMBER: Final = re.compile(r"\d+(\.\d+)?")
_INSTEAD: Final = {
    Fallback.BACKUP: "the backup worker's result",
    Fallback.HOLD_LAST: "the last result held",
    Fallback.STOP: "a stop output",
    Fallback.NONE: "nothing at all",
}


@dataclass(frozen=True)
class StageSummary:
    """A stage in numbers; times in ms, NaN where no frame has them.

    Attributes:
        frames: answered ones, without those that came while it started.
        starting: and those.
        superseded: and those that had no answer, as a newer one came first; 0 where the log does not say.
        on_time_share: 0 to 1, of `came`.
        worst_lateness_ms: the latest answer; negative: before its deadline.
        outcomes, fallbacks, checks: how many, without zeros, `on_time` and `accept`, the most frequent
        first.
        guarded: whether the stage had a guard.
        incomplete: that ran without a synchronised input.
    """

    frames: int
    starting: int
    superseded: int
    on_time_share: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    budget_ms: float
    worst_lateness_ms: float
    outcomes: dict[Outcome, int]
    fallbacks: dict[Fallback, int]
    checks: dict[GuardVerdict, int]
    guarded: bool
    incomplete: int

    @property
    def came(self) -> int:
        return self.frames + self.superseded


def stage_figures(stage: StageLog) -> StageSummary:
    counted = stage.counted
    total_ms = stage.total_ms[counted & np.isfinite(stage.total_ms)]
    p50, p95, p99, highest = np.percentile(total_ms, (50, 95, 99, 100)) if len(total_ms) else [math.nan] * 4
    frames = stage.frames[counted]
    answered, superseded = len(frames), _superseded(stage)
    seen = {
        name: zip(*np.unique(frames[name], return_counts=True), strict=True)
        for name in ("outcome", "fallback", "check")
    }
    often = {name: sorted(counts, key=lambda one: -int(one[1])) for name, counts in seen.items()}
    return StageSummary(
        answered,
        int((~counted).sum()),
        superseded,
        int(stage.on_time[counted].sum()) / (answered + superseded) if answered else math.nan,
        float(p50),
        float(p95),
        float(p99),
        float(highest),
        stage.budget_ms,
        float(np.fmax.reduce(stage.lateness_ms[counted], initial=math.nan)),
        {Outcome(one): int(count) for one, count in often["outcome"] if one != Outcome.ON_TIME},
        {Fallback(one): int(count) for one, count in often["fallback"] if one != UNKNOWN},
        {
            GuardVerdict(one): int(count)
            for one, count in often["check"]
            if one not in {UNKNOWN, GuardVerdict.ACCEPT}
        },
        bool((frames["check"] != UNKNOWN).any()),
        int((frames["missing_inputs"] > 0).sum()),
    )


def verdict(stage: StageLog) -> tuple[str, str]:
    """`good`, `fair` or `bad`, and in one line how often a stage was on time, and why not more often."""
    figures, stops = stage_figures(stage), safe_stops(stage)
    if not figures.frames:
        return "bad", f"{stage.name}: no frame was answered after the start"
    share, late_ms = figures.on_time_share, figures.worst_lateness_ms
    text = f"{stage.name}: {percent(share, 2)} on time"
    causes = [_cause(stage)] if figures.outcomes else []
    causes += [flow_of(stage.frames[stage.counted], figures.superseded).words] if figures.superseded else []
    if figures.superseded > sum(figures.outcomes.values()):
        causes.reverse()
    text += f": {'; '.join(causes)}" if causes else ""
    text += f"; an answer left {late_ms:.1f} ms after its deadline" if late_ms > PUNCTUAL_MS else ""
    text += f"; the guard did not accept every output: {_counts(figures.checks)}" if figures.checks else ""
    if stops:
        return "bad", f"{text}; SAFE_STOP for {sum(end - begin for begin, end in stops) / _NS_PER_S:.1f} s"
    if GuardVerdict.UNAVOIDABLE in figures.checks:
        return "bad", text
    flawed = late_ms > PUNCTUAL_MS or figures.checks
    return "fair" if share_word(share) == "good" and flawed else share_word(share), text


def share_word(share: float) -> str:
    """`good`, `fair` or `bad`: what a share of frames on time, 0 to 1, is; the design promises 99.9 %."""
    return "good" if share >= _GOOD_SHARE else "fair" if share >= _FAIR_SHARE else "bad"


def safe_stops(stage: StageLog) -> list[tuple[int, int]]:
    """From when to when, in ns of ROS time, the stage was in SAFE_STOP."""
    end_ns = max([int(stage.frames["t_ns"].max(initial=0)), *(t_ns for t_ns, _ in stage.health)])
    changes = pairwise([*stage.health, (end_ns, "")])
    return [
        (begin_ns, over_ns) for (begin_ns, word), (over_ns, _) in changes if word == Health.SAFE_STOP.name
    ]


def _cause(stage: StageLog) -> str:
    """Why most frames that were not on time were not; reasons that differ in their numbers are the same."""
    missed = stage.frames[stage.counted & ~stage.on_time]
    reasons = [stage.reasons[t_ns] for t_ns in missed["t_ns"].tolist() if stage.reasons.get(t_ns)]
    if not reasons and stage.last_reason:
        return stage.last_reason
    if not reasons:
        return _counts(stage_figures(stage).outcomes)
    ((kind, count),) = Counter(_NUMBER.sub("", reason) for reason in reasons).most_common(1)
    text = next(reason for reason in reasons if _NUMBER.sub("", reason) == kind)
    return text if count == len(missed) else f"{text} ({count:,} of {len(missed):,} misses)"


def _superseded(stage: StageLog) -> int:
    """How many frames had no answer; where the log does not count them, those whose numbers are missing."""
    if stage.dropped is not None:
        return stage.dropped
    seq: NDArray[np.int64] = np.unique(stage.frames["seq"][stage.frames["seq"] != UNKNOWN])
    return int(np.ptp(seq)) + 1 - len(seq) if len(seq) == len(stage.frames) > 0 else 0


def in_words(run: RunLog) -> list[str]:
    """What the figures of a run do not say, in a few sentences, the most important first."""
    sentences = [text for stage in run.stages if (text := _stage_words(stage))]
    if len(run.memory_t_ns):
        sentences.append(_memory_words(run))
    bad = [anomaly for anomaly in run.anomalies if anomaly.level != "OK"]
    if bad:
        errors = sum(anomaly.level == "ERROR" for anomaly in bad)
        names = list(dict.fromkeys(anomaly.name for anomaly in bad))
        more = f" and {len(names) - 3} other kinds" if len(names) > 3 else ""  # noqa: PLR2004
        anomalies = _count(len(bad), "anomaly", "anomalies")
        sentences.append(f"{anomalies} reported, {errors} of them errors: {', '.join(names[:3])}{more}.")
    elif not any("anomal" in text for text in run.missing):
        sentences.append("No anomalies were reported.")
    return sentences


def worst_frames(stage: StageLog, count: int) -> NDArray[np.int64]:
    """Indexes of the frames that a person should look at first.

    Frames answered more than 1 ms after their deadline come first, by lateness; then those that were not on
    time, the emptier the answer the earlier (none, stop, hold_last, backup), and the longer they took; then
    those whose output the guard did not accept; then the slowest others.
    """
    late = np.nan_to_num(stage.lateness_ms, nan=-math.inf)
    past = np.where(late > PUNCTUAL_MS, late, 0.0)
    missed = stage.counted & ~stage.on_time
    fallback = np.asarray(stage.frames["fallback"], dtype=np.float64) + 1.0  # 0: own result ... 4: none
    total_ms = np.nan_to_num(stage.total_ms, nan=-math.inf)
    # the harder the guard had to do it, the earlier
    refused = np.maximum(stage.frames["check"], 0) * stage.counted
    order = np.lexsort((total_ms, np.where(missed, fallback, 0.0), refused, missed, past))[::-1]
    return np.asarray(order[stage.counted[order]][:count])


def _stage_words(stage: StageLog) -> str:
    figures, text = stage_figures(stage), ""
    if figures.outcomes:
        instead = ", ".join(f"{_INSTEAD[one]} ({count:,})" for one, count in figures.fallbacks.items())
        text = f" Not on time: {_counts(figures.outcomes)}" + (
            f"; published instead: {instead}." if instead else "."
        )
    if figures.incomplete:
        text += f" {_count(figures.incomplete, 'frame')} had a synchronised input missing."
    if figures.starting:
        text += f" {_count(figures.starting, 'frame')} came while it started and are not counted."
    return f"{stage.name}:{text}" if text else ""


def _counts(found: Mapping[Any, int]) -> str:
    """Outcomes or verdicts of the guard, for example `2 late, 1 bad input`."""
    return ", ".join(f"{count:,} {one.word.replace('_', ' ')}" for one, count in found.items())


def _memory_words(run: RunLog) -> str:
    label, slope = run.used_memory[0], run.memory_slope
    if not label:
        return "Memory was sampled, but no figure is known."
    text = (
        f"{MEMORY[label]}: {np.nanmin(run.memory[label]):,.0f} to {np.nanmax(run.memory[label]):,.0f} MiB"
    )
    return (
        f"{text}, trend {slope:+,.1f} MiB per hour."
        if math.isfinite(slope)
        else f"{text}; too short for a trend."
    )


def _count(number: int, word: str, words: str = "") -> str:
    return f"{number:,} {word if number == 1 else words or word + 's'}"
