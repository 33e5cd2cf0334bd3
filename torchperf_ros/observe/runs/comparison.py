"""Two sides of runs against each other: whether they may be compared, and what comes of it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from torchperf_ros.api.text import percent
from torchperf_ros.observe.runs.changes import (
    COMPILE,
    MEMORY_PEAK,
    MEMORY_SLOPE,
    METRICS,
    MISS,
    OUTPUTS,
    RESAMPLES,
    RUNS,
    START_UP,
    Judgement,
    Metric,
    MetricChange,
    best_tiers,
    figures,
    frame_changes,
    judge,
    laid_out,
    pooled,
    run_change,
    stage_frames,
)
from torchperf_ros.observe.runs.run_log import RunLog, RunLogError, StageLog

_MACHINE: Final = ("cpu", "cores", "memory_mib", "device")
_FACTS: Final = {
    "log": ("log", "sha256"),
    "parameters": ("params_sha256",),
    "seed": ("seed",),
    "torch": ("machine", "torch"),
    "Python": ("machine", "python"),
}
_UNKNOWN: Final = "unknown machine"
_SHOWN: Final = 12
_OTHER_TIERS: Final = 0.01  # by so much a tier's share of the answers has to differ to be worth a word
_STEADY: Final = frozenset({"fast", "virtual"})


_NOT_ENOUGH: Final = 3


@dataclass(frozen=True)
class ComparedStage:
    """One stage on both sides.

    Attributes:
        block: frames in a block of the bootstrap, the longest of its metrics; 0 where the runs are the
            sample.
    """

    name: str
    base: StageLog
    new: StageLog
    agreement: Mapping[str, int]
    block: int


@dataclass(frozen=True)
class Comparison:
    """What the runs say.

    Attributes:
        changes: every metric, stage by stage, then those of the whole run.
        notes: what makes the runs less comparable, in words.
    """

    base: tuple[RunLog, ...]
    new: tuple[RunLog, ...]
    stages: tuple[ComparedStage, ...]
    changes: tuple[MetricChange, ...]
    notes: tuple[str, ...]

    def with_verdict(self, *verdicts: Judgement) -> list[MetricChange]:
        return [one for one in self.changes if one.verdict in verdicts]

    @property
    def broken_limits(self) -> list[MetricChange]:
        return [one for one in self.changes if one.breaks_limit]

    @property
    def silent(self) -> list[str]:
        """The stages that answered in the base, and not once on the new side."""
        return [stage.name for stage in self.stages if len(stage.base) and not len(stage.new)]

    def status(self, strict: bool = False) -> int:
        """The exit status.

        0: nothing is worse, 1: something is or breaks its limit, 3: not enough data for any metric.

        With `strict` a stage that one side lacks counts as worse, and one metric with too little data is
        enough for 3.
        """
        lacking = any(not len(side) for stage in self.stages for side in (stage.base, stage.new))
        if self.with_verdict(Judgement.WORSE) or self.broken_limits or (strict and lacking):
            return 1
        is_judged = self.with_verdict(Judgement.BETTER, Judgement.EQUIVALENT)
        return 0 if is_judged and not (strict and self.with_verdict(Judgement.NOT_ENOUGH)) else _NOT_ENOUGH


def compare(
    base: Sequence[RunLog],
    new: Sequence[RunLog],
    *,
    margin: float | None = None,
    max_miss: float = math.nan,
    across_machines: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare runs; `progress` is called with what is done now.

    `margin`: the share of p50 and p99, 0 to 1, that matters, in place of their own; `max_miss`: the most
    misses of each stage of the new runs in percent.

    Raises:
        RunLogError: they have no stage in common, or ran at different paces or on different machines.
    """
    known = [list(dict.fromkeys(one.name for run in side for one in run.stages)) for side in (base, new)]
    if not set(known[0]) & set(known[1]):
        shown = [
            f"{side[0].name} has the stages {', '.join(found) or 'none'}"
            for side, found in zip((base, new), known, strict=True)
        ]
        raise RunLogError(f"{', '.join(shown)}: no stage in common; compare runs of the same stages")
    names = list(dict.fromkeys([*known[0], *known[1]]))
    differing = _differences(base, new, names, across_machines)
    notes = [f"{what}: {text}" for what, text in differing.items()]
    for run in (*base, *new):
        there = {one.name for one in run.stages}
        notes += [f"stage {name}: not in {run.name}" for name in names if name not in there]
        notes += [f"{run.name} was interrupted"] if run.fact("complete") is False else []
    steady = {run.fact("pace") for run in (*base, *new)} <= _STEADY
    excuses = [*(set(differing) - {"Python", _UNKNOWN}), *([] if steady else ["pace"])]
    found: list[MetricChange] = []
    stages = []
    for name in names:
        progress(f"comparing {name}")
        first, second = ([stage_frames(run.stage(name)) for run in side] for side in (base, new))
        stage, changes = _stage(first, second, resamples)
        stages.append(stage)
        found += [*changes, *_outputs(stage, excuses)]
        notes += _remarks(stage)
    found += _whole(base, new)
    places = [*names, ""]
    found.sort(key=lambda one: (places.index(one.stage), METRICS.index(one.metric)))
    changes = [replace(one, limit=max_miss) if one.metric is MISS else one for one in judge(found, margin)]
    return Comparison(tuple(base), tuple(new), tuple(stages), tuple(changes), tuple(notes))


def _whole(base: Sequence[RunLog], new: Sequence[RunLog]) -> Iterator[MetricChange]:
    of_run: dict[Metric, Callable[[RunLog], float]] = {
        MEMORY_PEAK: lambda run: float(run.used_memory[2].max(initial=-math.inf)),
        MEMORY_SLOPE: lambda run: run.memory_slope,
        START_UP: lambda run: _number(run.fact("start_up_s")),
        COMPILE: lambda run: _number(run.fact("compile_s")),
    }
    for metric, value in of_run.items():
        sides = [[value(run) for run in side] for side in (base, new)]
        if np.isfinite([*sides[0], *sides[1]]).any():
            yield run_change("", metric, *sides)


def _number(fact: object) -> float:
    return float(fact) if isinstance(fact, (int, float)) else math.nan


def _remarks(stage: ComparedStage) -> Iterator[str]:
    first, second = stage.base.total_ms, stage.new.total_ms
    if np.array_equal(first, second, equal_nan=True) and np.isfinite(first).any():
        yield f"{stage.name}: every latency is the same in both runs"
    budgets = stage.base.budget_ms, stage.new.budget_ms
    if budgets[0] != budgets[1] and np.isfinite(budgets).all():
        yield f"{stage.name}: the budget is {budgets[0]:g} ms in the base, {budgets[1]:g} ms in the new run"
    lacked = [int((side.frames["missing_inputs"] > 0).sum()) for side in (stage.base, stage.new)]
    if any(lacked):
        of = (
            f"{count:,} of {len(side):,}"
            for count, side in zip(lacked, (stage.base, stage.new), strict=True)
        )
        yield (
            f"{stage.name}: {' frames in the base, '.join(of)} in the new run had a synchronised input"
            " missing"
        )
    named = bool(
        stage.base.tiers and stage.new.tiers
    )  # a side that knows no names is compared by their numbers
    shares, words = [], []
    for side in (stage.base, stage.new):
        counts = Counter(tier for tier in side.frames["tier"].tolist() if tier >= 0)
        names = {
            tier: side.tiers[tier] if named and tier < len(side.tiers) else f"tier {tier}"
            for tier in counts
        }
        shares.append({names[tier]: count / counts.total() for tier, count in counts.most_common()})
        words.append(", ".join(f"{name} {percent(share, 0)}" for name, share in shares[-1].items()))
    moved = [abs(shares[0].get(name, 0.0) - shares[1].get(name, 0.0)) for name in {*shares[0], *shares[1]}]
    if all(words) and max(moved) >= _OTHER_TIERS:
        yield f"{stage.name}: base answered by {words[0]}; new by {words[1]}"


def agreement(base: StageLog, new: StageLog) -> dict[str, int]:
    """Match the frames of a stage, by stamp or else by number, and compare what was published.

    `matched`: frames of both that were answered on time by the same tier, with their outputs known;
    `equal`: those whose outputs are the same, bit for bit; `base_only`, `new_only`: frames that the other
    one does not have.
    """
    first, second = base.own_stamps, new.own_stamps
    by_stamp = first is not None and second is not None
    if first is None or second is None:
        first, second = base.frames["seq"], new.frames["seq"]
    common, left, right = np.intersect1d(first, second, return_indices=True)
    own = base.on_time[left] & new.on_time[right] & (base.frames["tier"][left] == new.frames["tier"][right])
    before, after = base.frames["output_hash"][left][own], new.frames["output_hash"][right][own]
    known = (before != 0) & (after != 0)
    return {
        "matched": int(known.sum()),
        "equal": int((before[known] == after[known]).sum()),
        "base_only": len(base) - len(common),
        "new_only": len(new) - len(common),
        "by_stamp": by_stamp,
    }


def _stage(
    base: list[StageLog], new: list[StageLog], resamples: int
) -> tuple[ComparedStage, list[MetricChange]]:
    first, second = pooled(base), pooled(new)
    matched = agreement(base[0], new[0])
    if min(len(base), len(new)) < RUNS:
        changes, block = frame_changes(first, second, laid_out(base, new), resamples)
        return ComparedStage(first.name, first, second, matched, block), changes
    tiers = best_tiers(first, second)
    values = [[figures(run, tier) for run in side] for side, tier in zip((base, new), tiers, strict=True)]
    changes = [
        run_change(first.name, metric, *([run[metric] for run in side] for side in values))
        for metric in values[0][0]
    ]
    return ComparedStage(first.name, first, second, matched, 0), changes


def _outputs(stage: ComparedStage, excuses: Sequence[str]) -> list[MetricChange]:
    """The share of outputs that changed, in percent. It decides only where nothing else explains it.

    Outputs have to be the same only for the same model, log, parameters and arithmetic, which is another
    with another machine or torch, and only if no frame was dropped for want of time: what a model remembers
    depends on what it saw.
    """
    one = stage.agreement
    if not (stage.base.frames["output_hash"].any() or stage.new.frames["output_hash"].any()):
        return []
    if not one["matched"]:
        why = "no frame that both runs answered on time by the same tier, with its output's hash"
        return [MetricChange(stage.name, OUTPUTS, math.nan, math.nan, why=why)]
    changed = 100.0 * (1 - one["equal"] / one["matched"])
    why = (
        f"{one['equal']:,} of {one['matched']:,} outputs are the same, matched by "
        f"{'stamp' if one['by_stamp'] else 'number'}; {one['base_only']:,} frames only in the base, "
        f"{one['new_only']:,} only in the new run"
        + (f"; does not decide: {', '.join(excuses)}" if excuses else "")
    )
    return [
        MetricChange(
            stage.name,
            OUTPUTS,
            0.0,
            changed,
            low=changed,
            high=changed,
            samples=one["matched"],
            why=why,
            decides=not excuses,
        )
    ]


def _differences(
    base: Sequence[RunLog], new: Sequence[RunLog], stages: Sequence[str], across_machines: bool
) -> dict[str, str]:
    """What the sides do not have in common, in words, by what it is.

    Runs of other paces and machines are refused.
    """
    runs = [*base, *new]
    paces = {str(run.fact("pace")): run.name for run in reversed(runs) if run.fact("pace")}
    if len(paces) > 1:
        shown = ", ".join(f"{name} at {pace}" for pace, name in reversed(paces.items()))
        raise RunLogError(
            f"runs of different paces cannot be compared: {shown}; replay the log anew with one --pace"
        )
    found = {}
    machines = {str(run.fact("machine", "fingerprint") or ""): run for run in reversed(runs)}
    if machines.pop("", None):
        found[_UNKNOWN] = "not every run names its own, so that it may be another"
    if len(machines) > 1:
        first, other = list(reversed(machines.values()))[:2]
        pairs = {key: (first.fact("machine", key), other.fact("machine", key)) for key in _MACHINE}
        parts = [f"{key} {one} and {two}" for key, (one, two) in pairs.items() if one != two]
        found["machine"] = ", ".join(parts) or f"fingerprints {' and '.join(machines)}"
        if not across_machines:
            where = f"{other.name} ran on another machine than {first.name}"
            raise RunLogError(f"{where}: {found['machine']}; --across-machines compares them anyway")
    for what, path in (*_FACTS.items(), *((f"model of {stage}", ("model", stage)) for stage in stages)):
        facts = [{str(run.fact(*path))[:_SHOWN] for run in side} - {"None"} for side in (base, new)]
        if all(facts) and facts[0] != facts[1]:
            found[what] = " and ".join(", ".join(sorted(side)) for side in facts)
    return found
