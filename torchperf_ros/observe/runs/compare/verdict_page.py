"""The page of `torchperf compare`: one file that needs no network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from torchperf_ros import __version__
from torchperf_ros.observe.runs.compare import verdict_text as text
from torchperf_ros.observe.runs.compare.changes import ALPHA, Judgement, MetricChange
from torchperf_ros.observe.runs.compare.comparison import ComparedStage, Comparison
from torchperf_ros.observe.runs.report import report_pictures as draw
from torchperf_ros.observe.runs.report.page import Block, Cell, Page, number_cell, table
from torchperf_ros.observe.runs.run_log import RunLog

_POINTS: Final = 1500
_WHOLE: Final = 100.0
_BUDGET_SHOWN: Final = 3.0
_COLOURS: Final = {"base": draw.BLUE, "new": draw.ORANGE}
_CLASS: Final = {Judgement.WORSE: "bad", Judgement.BETTER: "good"}
_MACHINE: Final = ("cpu", "cores", "memory_mib", "device", "torch")


def verdict_page(comparison: Comparison) -> str:
    page = Page()
    bad = (
        comparison.with_verdict(Judgement.WORSE) or comparison.broken_limits or text.conspicuous(comparison)
    )
    notes = text.remarks(comparison)
    known = comparison.with_verdict(Judgement.BETTER, Judgement.EQUIVALENT)
    page.top.append(
        {
            "kind": "verdict",
            "lines": [("bad" if bad else "good" if known else "fair", text.headline(comparison))],
        }
    )
    page.section(
        "",
        [
            {"kind": "words", "lines": text.samples(comparison)},
            {"kind": "note", "title": "What to know", "items": notes} if notes else None,
        ],
    )
    for stage in comparison.stages:
        changes = [one for one in comparison.changes if one.stage == stage.name]
        page.section(
            stage.name,
            [
                _table(changes),
                page.plots(("Latency: how many frames took longer", exceedance(stage))),
                page.plots(("Latency over time", over_frames(stage))),
            ],
        )
    sides = {"base": comparison.base, "new": comparison.new}
    if changes := [one for one in comparison.changes if not one.stage]:
        sampled = any(len(run.used_memory[1]) for runs in sides.values() for run in runs)
        picture = page.plots(("Memory of the workers", memory(sides))) if sampled else None
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
        f"{text.side_name(comparison.new)} against {text.side_name(comparison.base)}",
        f"{count} runs compared; intervals are of {1 - ALPHA:.0%}.",
        f"torchperf compare {__version__}. Long series are thinned so that no spike is lost; every number"
        " is of all frames.",
    )


def exceedance(stage: ComparedStage) -> go.Figure:
    """What share of the frames took as long or longer.

    The ECDF turned over, whose logarithmic axis shows the tail.
    """
    figure = go.Figure()
    longest_ms = 0.0
    for word, frames in (("base", stage.base), ("new", stage.new)):
        values = np.sort(frames.total_ms[np.isfinite(frames.total_ms)])
        longest_ms = max(longest_ms, float(values.max(initial=0.0)))
        shares = _WHOLE * (1.0 - np.arange(len(values)) / max(len(values), 1))
        shown = np.unique(np.round(len(values) - np.geomspace(max(len(values), 1), 1, _POINTS)).astype(int))
        shown = shown[: len(values)]  # none of none
        _line(
            figure,
            word,
            draw.rounded(values[shown]),
            shares[shown],
            "%{y:.2f} % took %{x:.2f} ms or more",
            name=f"{word} ({len(values):,})",
            line={"color": _COLOURS[word], "width": 2, "shape": "hv"},
        )
    if (
        stage.new.budget_ms <= _BUDGET_SHOWN * longest_ms
    ):  # of other paces than real the budget may be a day
        draw.mark_budget(figure, stage.new.budget_ms)
    figure.update_yaxes(type="log", dtick=1)
    return draw.laid_out(
        figure, 340, "ms, receipt to publish", "% of frames took as long or longer", showlegend=True
    )


def over_frames(stage: ComparedStage) -> go.Figure:
    """Latency of every frame, in order; of several runs one after the other."""
    figure = go.Figure()
    for word, frames in (("base", stage.base), ("new", stage.new)):
        shown = draw.envelope(frames.total_ms, _POINTS)
        _line(
            figure,
            word,
            shown.tolist(),
            frames.total_ms[shown],
            "frame %{x}: %{y:.2f} ms",
            opacity=0.75,
            line={"color": _COLOURS[word], "width": 1},
        )
    return draw.laid_out(figure, 300, "frame", "ms", showlegend=True)


def memory(sides: dict[str, tuple[RunLog, ...]]) -> go.Figure:
    """What the workers of each run used over time."""
    figure = go.Figure()
    for word, run in ((word, run) for word, runs in sides.items() for run in runs):
        _, seconds, mib = run.used_memory
        shown = draw.envelope(mib, _POINTS)
        _line(
            figure,
            word,
            draw.rounded(seconds[shown] - seconds[:1]),
            mib[shown],
            "%{x:.0f} s: %{y:,.1f} MiB",
        )
    return draw.laid_out(figure, 260, "s", "MiB", showlegend=True)


# plotly's
def _line(figure: go.Figure, word: str, x: list[Any], y: Any, hover: str, **look: Any) -> None:  # noqa: ANN401
    look = {"name": word, "line": {"color": _COLOURS[word], "width": 2}, **look}
    figure.add_scatter(x=x, y=draw.rounded(y), mode="lines", hovertemplate=hover, **look)


def _table(changes: Sequence[MetricChange]) -> Block:
    """The verdict stands in the second column, where a phone shows it, too."""
    lines: list[list[Cell]] = []
    for one, row in zip(changes, text.rows(changes), strict=True):
        verdict: Cell = row[-1]
        if one.breaks_limit or one.conspicuous:
            verdict = {"text": row[-1], "bold": True}
        elif one.verdict in _CLASS:
            verdict = {"text": row[-1], "tag": _CLASS[one.verdict]}
        title = f"{one.metric.title} [{one.metric.unit}]"
        lines.append([title, verdict, *map(number_cell, row[1:-1])])
    first, *heads, last = text.COLUMNS
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
