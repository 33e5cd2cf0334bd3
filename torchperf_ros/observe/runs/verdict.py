"""A comparison as a page, in words and cells for terminals and pull requests, and as JSON for machines."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from torchperf_ros import __version__
from torchperf_ros.api.text import listed, markdown_table
from torchperf_ros.observe.runs.changes import ALPHA, MEMORY_SLOPE, Judgement, MetricChange
from torchperf_ros.observe.runs.comparison import Comparison
from torchperf_ros.observe.runs.report import Block, Cell, Page, number_cell, table
from torchperf_ros.observe.runs.run_log import RunLog

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
_FACTS: Final = ("log", "model", "params_sha256", "pace", "seed", "machine", "commit", "complete")
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
        "findings": [_change_as_json(one) for one in comparison.changes],
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
    known = {key: facts[key] for key in _FACTS if key in facts}
    return {"name": runs[0].name, "runs": [run.name for run in runs], **known}


def _change_as_json(one: MetricChange) -> dict[str, Any]:
    return {
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


_CLASS: Final = {Judgement.WORSE: "bad", Judgement.BETTER: "good"}
_MACHINE: Final = ("cpu", "cores", "memory_mib", "device", "torch")


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
        elif one.verdict in _CLASS:
            verdict = {"text": row[-1], "tag": _CLASS[one.verdict]}
        title = f"{one.metric.title} [{one.metric.unit}]"
        lines.append([title, verdict, *map(number_cell, row[1:-1])])
    first, *heads, last = COLUMNS
    return table((first, last, *heads), lines)


def _run(word: str, run: RunLog) -> list[Cell]:
    machine = ", ".join(str(run.fact("machine", key)) for key in _MACHINE if run.fact("machine", key))
    shown = (
        Path(run.name).as_posix(),
        run.fact("commit") or "-",
        run.fact("log", "path") or "-",
        machine or "-",
    )
    return [word, *({"text": str(cell), "css": "text"} for cell in shown)]
