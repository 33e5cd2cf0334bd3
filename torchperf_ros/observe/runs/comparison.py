"""Two sides of runs against each other: whether they may be compared, and what comes of it.

As a page, in words and cells for terminals and pull requests, and as JSON for machines.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchperf_ros import __version__
from torchperf_ros.api.text import listed, markdown_table, percent
from torchperf_ros.observe.runs.changes import (
    ALPHA,
    COMPILE,
    MEMORY_PEAK,
    MEMORY_SLOPE,
    METRICS,
    MISS,
    OUTPUTS,
    RESAMPLES,
    RUNS,
    START_UP,
    TAGS,
    ComparedStage,
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
from torchperf_ros.observe.runs.report import Block, Cell, Page, number_cell, table
from torchperf_ros.observe.runs.run_log import RunLog, RunLogError, StageLog

_MACHINE: Final = ("cpu", "cores", "memory_mib", "device")
_COMPARED_FACTS: Final = {
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
    excuses = [what for what in differing if what not in {"Python", _UNKNOWN}]
    excuses += [] if steady else ["pace"]
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
    for what, path in (
        *_COMPARED_FACTS.items(),
        *((f"model of {stage}", ("model", stage)) for stage in stages),
    ):
        facts = [{str(run.fact(*path))[:_SHOWN] for run in side} - {"None"} for side in (base, new)]
        if all(facts) and facts[0] != facts[1]:
            found[what] = " and ".join(", ".join(sorted(side)) for side in facts)
    return found


JSON_VERSION: Final = 2
# The heads of `rows`.
COLUMNS: Final = (
    "metric",
    "base",
    "new",
    "change",
    f"{1 - ALPHA:.0%} interval of the change",
    "margin",
    "p",
    "verdict",
)
_SHOWN_FACTS: Final = ("log", "model", "params_sha256", "pace", "seed", "machine", "commit", "complete")
_MOST_NAMED: Final = 3
_TINY_P: Final = 0.001
_LEAST_RELATIVE: Final = 1e-12


def headline(comparison: Comparison) -> str:
    """The verdict in one line.

    What breaks a limit, what is worse or else what is not, what people have to look at.
    """
    verdicts = Judgement.WORSE, Judgement.BETTER, Judgement.EQUIVALENT, Judgement.NOT_ENOUGH
    worse, better, same, short = map(comparison.with_verdict, verdicts)
    broken = comparison.broken_limits
    parts = [f"limit broken: {listed([_measured(one) for one in broken], _MOST_NAMED)}"] if broken else []
    parts += [f"{_count(worse)} worse: {_named(worse)}"] if worse else []
    look = conspicuous(comparison)
    parts += [f"WARNING, not judged: {listed(look, _MOST_NAMED)}"] if look else []
    if not worse and (better or same):
        parts.append("nothing is worse")
        parts += [f"{_count(better)} better: {_named(better)}"] if better else []
        parts += [f"{len(same)} equivalent"] if same else []
        parts += [f"not enough data for {len(short)}"] if short else []
    elif not worse:
        parts.append(f"no verdict: not enough data for any of {len(short)} metrics")
    text = "; ".join(parts)
    return text[0].upper() + text[1:]


def conspicuous(comparison: Comparison) -> list[str]:
    """What has no verdict and should be looked at all the same, in words, unless it breaks its limit."""
    found = [f"{stage} has no answered frame in the new run" for stage in comparison.silent]
    return found + [
        (
            f"{one.title} {_with_unit(one)} is {one.difference / one.margin:,.0f} times its margin"
            if math.isfinite(one.difference)
            else f"{one.title} is missing in the new run"
        )
        for one in comparison.changes
        if one.conspicuous and not one.breaks_limit and one.stage not in comparison.silent
    ]


def rows(changes: Sequence[MetricChange]) -> list[tuple[str, ...]]:
    """A row of `COLUMNS` for each metric."""
    found: list[tuple[str, ...]] = []
    for one in changes:
        bounds = [number(value, signed=True) for value in (one.low, one.high) if math.isfinite(value)]
        p = "-" if not math.isfinite(one.p) else f"< {_TINY_P}" if one.p < _TINY_P else f"{one.p:.3f}"
        found.append(
            (
                f"{one.title} [{one.metric.unit}]",
                number(one.base),
                number(one.new),
                _change(one),
                " to ".join(bounds) or "-",
                f"±{number(one.margin)}",
                p,
                _verdict(one),
            )
        )
    return found


def number(value: float, signed: bool = False) -> str:
    """A value for people: three or four digits that matter, a dash for what is not known."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3  # noqa: PLR2004
    return f"{value:{'+' if signed else ''}{',' if not digits else ''}.{digits}f}"


def remarks(comparison: Comparison) -> list[str]:
    undecided = comparison.with_verdict(Judgement.WORSE, Judgement.NOT_ENOUGH, Judgement.INFORMATIVE)
    found = []
    for reason in dict.fromkeys(one.why for one in undecided if one.why):
        changes = [one for one in undecided if one.why == reason]
        stages = " and ".join(dict.fromkeys(one.stage for one in changes if one.stage))
        titles = ", ".join(dict.fromkeys(one.metric.title for one in changes))
        found.append(f"{' '.join(filter(None, [stages, titles]))}: {reason}")
    return [*comparison.notes, *found]


def samples(comparison: Comparison) -> list[str]:
    runs = f"of {len(comparison.base)} and {len(comparison.new)} runs"
    return [
        f"{stage.name}: {len(stage.base):,} and {len(stage.new):,} frames"
        + (f", in blocks of {stage.block}" if stage.block else f" {runs}")
        for stage in comparison.stages
    ]


def side_name(runs: Sequence[RunLog]) -> str:
    name = Path(runs[0].name).name or runs[0].name
    return name if len(runs) == 1 else f"{name} and {len(runs) - 1} more"


def markdown(comparison: Comparison) -> str:
    """For a pull request: the verdict, what decided it, and everything else folded away."""
    decided = [
        one
        for one in comparison.changes
        if one.verdict in {Judgement.WORSE, Judgement.BETTER} or one.breaks_limit or one.conspicuous
    ]
    lines = [
        f"**{headline(comparison)}**",
        "",
        f"`{side_name(comparison.new)}` against `{side_name(comparison.base)}`",
    ]
    lines += [f"- {note}" for note in comparison.notes]
    if decided:
        lines += ["", *markdown_table("", COLUMNS, rows(decided))]
    lines += ["", f"<details><summary>all {len(comparison.changes)} metrics</summary>"]
    lines += ["", *markdown_table("", COLUMNS, rows(comparison.changes)), ""]
    lines += [f"- {text}" for text in [*remarks(comparison)[len(comparison.notes) :], *samples(comparison)]]
    return "\n".join([*lines, "", "</details>", ""])


def to_json(comparison: Comparison, status: int) -> str:
    content = {
        "v": JSON_VERSION,
        "kind": "regress",
        "status": status,
        "verdict": headline(comparison),
        "notes": list(comparison.notes),
        "base": _side(comparison.base),
        "new": _side(comparison.new),
        "alpha": ALPHA,
        "findings": [
            {
                "stage": one.stage,
                "metric": one.metric.key,
                "unit": one.metric.unit,
                "base": one.base,
                "new": one.new,
                "low": one.low,
                "high": one.high,
                "p": one.p,
                "margin": one.margin,
                "limit": one.limit,
                "breaks_limit": one.breaks_limit,
                "conspicuous": one.conspicuous,
                "verdict": one.verdict.value,
                "samples": one.samples,
                "needed": one.needed,
                "counted_in": one.kind,
                "notes": [one.why] if one.why else [],
            }
            for one in comparison.changes
        ],
        "stages": [
            {
                "name": stage.name,
                "frames": [len(stage.base), len(stage.new)],
                "block": stage.block,
                "agreement": stage.agreement,
            }
            for stage in comparison.stages
        ],
    }
    plain = json.loads(json.dumps(content), parse_constant=lambda _: None)  # NaN is null in JSON
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def _side(runs: Sequence[RunLog]) -> dict[str, Any]:
    facts = runs[0].facts
    known = {key: facts[key] for key in _SHOWN_FACTS if key in facts}
    return {"name": runs[0].name, "runs": [run.name for run in runs], **known}


def _change(one: MetricChange) -> str:
    if not math.isfinite(one.difference):
        return "-"
    text = number(one.difference, signed=True)
    if one.metric.unit == "%":
        return f"{text} pp"
    # a slope may be zero or below: no share of it says anything
    relative = one.metric is not MEMORY_SLOPE and abs(one.base) >= _LEAST_RELATIVE
    return f"{text} ({one.difference / abs(one.base):+.1%})" if relative else text


def _verdict(one: MetricChange) -> str:
    text = one.verdict.value
    if one.verdict is Judgement.NOT_ENOUGH and math.isfinite(one.needed):
        text += f": about {one.needed:,.0f} {one.kind} would be"
    if math.isfinite(one.limit):
        word = "BREAKS" if one.breaks_limit else "within"
        text += f", {word} the limit of {one.limit:g} {one.metric.unit}"
    return text


def _named(changes: Sequence[MetricChange]) -> str:
    return listed([f"{one.title} {_with_unit(one)}" for one in changes], _MOST_NAMED)


def _measured(one: MetricChange) -> str:
    value, unit = one.new, one.metric.unit
    measured = f"{number(value)} {unit}" if math.isfinite(value) else "not measured"
    return f"{one.title} {measured} (limit {one.limit:g} {unit})"


def _with_unit(one: MetricChange) -> str:
    value, _, relative = _change(one).partition(" ")
    unit = one.metric.unit
    return " ".join(filter(None, [value, unit if unit != "%" else "", relative]))


def _count(changes: Sequence[MetricChange]) -> str:
    return f"{len(changes)} {'metric is' if len(changes) == 1 else 'metrics are'}"


_SHOWN_OF_MACHINE: Final = ("cpu", "cores", "memory_mib", "device", "torch")


def verdict_page(comparison: Comparison) -> str:
    from torchperf_ros.observe.runs import report_pictures as draw

    page = Page()
    bad = comparison.with_verdict(Judgement.WORSE) or comparison.broken_limits or conspicuous(comparison)
    notes = remarks(comparison)
    known = comparison.with_verdict(Judgement.BETTER, Judgement.EQUIVALENT)
    page.top.append(
        {
            "kind": "verdict",
            "lines": [("bad" if bad else "good" if known else "fair", headline(comparison))],
        }
    )
    page.section(
        "",
        [
            {"kind": "words", "lines": samples(comparison)},
            {"kind": "note", "title": "What to know", "items": notes} if notes else None,
        ],
    )
    for stage in comparison.stages:
        changes = [one for one in comparison.changes if one.stage == stage.name]
        page.section(
            stage.name,
            [
                _table(changes),
                page.plots(("Latency: how many frames took longer", draw.exceedance(stage))),
                page.plots(("Latency over time", draw.over_frames(stage))),
            ],
        )
    sides = {"base": comparison.base, "new": comparison.new}
    if changes := [one for one in comparison.changes if not one.stage]:
        sampled = any(len(run.used_memory[1]) for runs in sides.values() for run in runs)
        picture = page.plots(("Memory of the workers", draw.memory_of_sides(sides))) if sampled else None
        page.section("The whole run", [_table(changes), picture])
    page.section(
        "The runs",
        [
            table(
                ("side", "file", "commit", "log", "machine"),
                [_run(word, run) for word, runs in sides.items() for run in runs],
                css="stack",
            )
        ],
    )
    count = len(comparison.base) + len(comparison.new)
    return page.render(
        f"{side_name(comparison.new)} against {side_name(comparison.base)}",
        f"{count} runs compared; intervals are of {1 - ALPHA:.0%}.",
        f"torchperf compare {__version__}. Long series are thinned so that no spike is lost; every number"
        " is of all frames.",
    )


def _table(changes: Sequence[MetricChange]) -> Block:
    """The verdict stands in the second column, where a phone shows it, too."""
    lines: list[list[Cell]] = []
    for one, row in zip(changes, rows(changes), strict=True):
        verdict: Cell = row[-1]
        if one.breaks_limit or one.conspicuous:
            verdict = {"text": row[-1], "bold": True}
        elif one.verdict in TAGS:
            verdict = {"text": row[-1], "tag": TAGS[one.verdict]}
        title = f"{one.metric.title} [{one.metric.unit}]"
        lines.append([title, verdict, *map(number_cell, row[1:-1])])
    first, *heads, last = COLUMNS
    return table((first, last, *heads), lines)


def _run(word: str, run: RunLog) -> list[Cell]:
    machine = ", ".join(
        str(run.fact("machine", key)) for key in _SHOWN_OF_MACHINE if run.fact("machine", key)
    )
    shown = (
        Path(run.name).as_posix(),
        run.fact("commit") or "-",
        run.fact("log", "path") or "-",
        machine or "-",
    )
    return [word, *({"text": str(cell), "css": "text"} for cell in shown)]
