"""A comparison in words and cells, for terminals, pages and pull requests alike."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchperf_ros.analysis.regress_compare import Comparison
from torchperf_ros.analysis.regress_metric import MEMORY_SLOPE
from torchperf_ros.analysis.regress_verdict import Finding, Verdict
from torchperf_ros.core.markdown_table import markdown_table

COLUMNS: Final = ("metric", "base", "new", "change", "interval of the change", "margin", "p", "verdict")
_MOST_NAMED: Final = 3
_SMALL, _MIDDLE, _LARGE = 1.0, 10.0, 1000.0
_TINY_P: Final = 0.001
_LEAST_RELATIVE: Final = 1e-12
_ABSOLUTE: Final = {MEMORY_SLOPE}  # may be zero or below: no share of it says anything


def headline(comparison: Comparison) -> str:
    """The verdict in one line: what breaks a limit, what is worse or else what is not, what people have to look at."""
    worse, better, same, short = (
        comparison.with_verdict(verdict)
        for verdict in (Verdict.WORSE, Verdict.BETTER, Verdict.EQUIVALENT, Verdict.NOT_ENOUGH)
    )
    broken = comparison.broken_limits
    parts = [f"limit broken: {_listed([_measured(one) for one in broken])}"] if broken else []
    parts += [f"{len(worse)} {_metrics(worse)} worse: {_named(worse)}"] if worse else []
    look = conspicuous(comparison)
    parts += [f"WARNING, not judged: {_listed(look)}"] if look else []
    if not worse and (better or same):
        parts.append("nothing is worse")
        parts += [f"{len(better)} {_metrics(better)} better: {_named(better)}"] if better else []
        parts += [f"{len(same)} equivalent"] if same else []
        parts += [f"not enough data for {len(short)}"] if short else []
    elif not worse:
        parts.append(f"no verdict: not enough data for any of {len(short)} metrics")
    text = "; ".join(parts)
    return text[0].upper() + text[1:]


def conspicuous(comparison: Comparison) -> list[str]:
    """What has no verdict and should be looked at all the same, in words; what breaks its limit is told already."""
    found = [f"{stage} has no answered frame in the new run" for stage in comparison.silent]
    return found + [
        f"{_full_title(one)} {_with_unit(one)} is {one.estimate.difference / one.margin:,.0f} times its margin"
        if math.isfinite(one.estimate.difference) else f"{_full_title(one)} is missing in the new run"
        for one in comparison.findings
        if one.conspicuous and not one.breaks_limit and one.estimate.stage not in comparison.silent
    ]  # fmt: skip


def rows(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """A row of `COLUMNS` for each finding."""
    return [
        (
            name(finding), number(finding.estimate.base), number(finding.estimate.new), change(finding),
            interval(finding), _margin(finding), _p(finding.p), verdict(finding),
        )
        for finding in findings
    ]  # fmt: skip


def name(finding: Finding) -> str:
    """Stage, metric and unit."""
    return f"{_full_title(finding)} [{finding.estimate.metric.unit}]"


def change(finding: Finding) -> str:
    """The difference, and for what is no share its part of the base."""
    one = finding.estimate
    if not math.isfinite(one.difference):
        return "-"
    if one.metric in _ABSOLUTE or one.metric.unit == "%" or abs(one.base) < _LEAST_RELATIVE:
        return f"{number(one.difference, signed=True)}{' pp' if one.metric.unit == '%' else ''}"
    return f"{number(one.difference, signed=True)} ({one.difference / abs(one.base):+.1%})"


def interval(finding: Finding) -> str:
    """The confidence interval of the difference, a dash where there is none."""
    found = finding.estimate.interval
    return f"{number(found.low, signed=True)} to {number(found.high, signed=True)}" if found else "-"


def verdict(finding: Finding) -> str:
    """The word, how many frames would be enough where there are too few, and the limit if there is one."""
    text = finding.verdict.value
    if finding.verdict is Verdict.NOT_ENOUGH and math.isfinite(finding.needed):
        text += f": about {finding.needed:,.0f} {finding.estimate.kind} would be"
    if math.isfinite(finding.limit):
        word = "BREAKS" if finding.breaks_limit else "within"
        text += f", {word} the limit of {finding.limit:g} {finding.estimate.metric.unit}"
    return text


def number(value: float, signed: bool = False) -> str:
    """A value for people: three or four digits that matter, a dash for what is not known."""
    if not math.isfinite(value):
        return "-"
    sign, size = "+" if signed else "", abs(value)
    if value == 0:
        return "0"
    if size >= _LARGE:
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.{1 if size >= _MIDDLE * _MIDDLE else 2 if size >= _SMALL else 3}f}"


def remarks(comparison: Comparison) -> list[str]:
    """What is different about the runs, and why metrics have no verdict or did not decide."""
    said: dict[str, dict[str, list[str]]] = {}
    for finding in comparison.findings:
        if finding.verdict not in {Verdict.EQUIVALENT, Verdict.BETTER}:
            for note in finding.notes:
                said.setdefault(note, {}).setdefault(finding.estimate.metric.title, []).append(finding.estimate.stage)
    found = []
    for note, titles in said.items():
        stages = list(dict.fromkeys(stage for told in titles.values() for stage in told if stage))
        found.append(f"{' '.join(filter(None, [' and '.join(stages), ', '.join(titles)]))}: {note}")
    return [*comparison.notes, *found]


def sizes(comparison: Comparison) -> list[str]:
    """The effect sizes of each stage's latency, a sentence each."""
    told = []
    for stage in comparison.stages:
        one = stage.sizes
        if math.isfinite(one.longer_share):
            told.append(
                f"{stage.name}: a frame of the new run takes longer than one of the base with a chance of "
                f"{one.longer_share:.1%} (Mann-Whitney, p {_p(one.mann_whitney_p)}); the means differ by "
                f"{number(one.mean_difference_ms, signed=True)} ms (Welch, p {_p(one.welch_p)}), "
                f"Cohen's d {number(one.cohens_d, signed=True)}; {stage.frames[0]:,} and {stage.frames[1]:,} frames, "
                f"in blocks of {stage.block}"
            )
    return told


def markdown(comparison: Comparison, confidence: float) -> str:
    """For a pull request: the verdict, what decided it, and everything else folded away.

    Args:
        comparison: what to tell.
        confidence: of the intervals, 0 to 1.
    """
    decided = [one for one in comparison.findings
               if one.verdict in {Verdict.WORSE, Verdict.BETTER} or one.breaks_limit or one.conspicuous]  # fmt: skip
    lines = [
        f"**{headline(comparison)}**",
        "",
        f"`{_short(comparison.new.name)}` against `{_short(comparison.base.name)}`",
    ]
    lines += [f"- {note}" for note in comparison.notes]
    columns = [f"{confidence:.0%} {column}" if "interval" in column else column for column in COLUMNS]
    if decided:
        lines += _table(columns, decided)
    lines += ["", f"<details><summary>all {len(comparison.findings)} metrics</summary>"]
    lines += [*_table(columns, comparison.findings), ""]
    lines += [f"- {text}" for text in [*remarks(comparison)[len(comparison.notes) :], *sizes(comparison)]]
    return "\n".join([*lines, "", "</details>", ""])


def _table(columns: Sequence[str], findings: Sequence[Finding]) -> list[str]:
    """A Markdown table without a heading."""
    lines = markdown_table("", columns, rows(findings))
    return ["", *lines[3:]]


def _named(findings: Sequence[Finding]) -> str:
    return _listed([f"{_full_title(one)} {_with_unit(one)}" for one in findings])


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _full_title(finding: Finding) -> str:
    return " ".join(filter(None, [finding.estimate.stage, finding.estimate.metric.title]))


def _measured(finding: Finding) -> str:
    """What the new run has of something that has a limit."""
    value, unit = finding.estimate.new, finding.estimate.metric.unit
    told = f"{number(value)} {unit}" if math.isfinite(value) else "not measured"
    return f"{_full_title(finding)} {told} (limit {finding.limit:g} {unit})"


def _with_unit(finding: Finding) -> str:
    value, _, relative = change(finding).partition(" ")
    unit = finding.estimate.metric.unit
    return " ".join(filter(None, [value, unit if unit != "%" else "", relative]))


def _metrics(findings: Sequence[Finding]) -> str:
    return "metric is" if len(findings) == 1 else "metrics are"


def _margin(finding: Finding) -> str:
    return f"±{number(finding.margin)}"


def _p(value: float) -> str:
    return "-" if not math.isfinite(value) else f"< {_TINY_P}" if value < _TINY_P else f"{value:.3f}"


def _short(path: str) -> str:
    return Path(path).name or path
