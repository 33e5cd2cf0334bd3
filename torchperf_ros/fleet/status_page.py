"""A roll-out shown to people: the table in a terminal, the page, and the picture of a simulated one."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from torchperf_ros import __version__
from torchperf_ros.api.text import console_table
from torchperf_ros.fleet.plan import RolloutPlan
from torchperf_ros.fleet.sequence import CandidateVerdict
from torchperf_ros.fleet.status import Move, RolloutStanding

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.table import Table

_HEADS: Final = (
    "step",
    "share %",
    "candidate",
    "vehicles",
    "h as a shadow",
    "h serving",
    "plans refused",
    "deaths",
    "score",
)
_CLASS: Final = {CandidateVerdict.WORSE: "bad", CandidateVerdict.BETTER: "good"}
_STYLE: Final = {
    CandidateVerdict.WORSE: "bold red",
    CandidateVerdict.BETTER: "green",
    CandidateVerdict.NOT_ENOUGH: "yellow",
}
_FINDING_HEADS: Final = ("metric", "vehicles", "difference, candidate less base", "units", "verdict")
_MOST_REASONS: Final = 50
_MARGIN_COLOUR: Final = "#D55E00"


def step_rows(plan: RolloutPlan, standing: RolloutStanding) -> list[list[str]]:
    return [
        [
            f"{'> ' if number == plan.step else ''}{number}",
            f"{step.share:g}",
            "shadow" if step.shadow else "serves",
            f"{found.vehicles:,}",
            f"{found.shadow_h:,.1f}",
            f"{found.serving_h:,.1f}",
            f"{found.refused:,}",
            f"{found.deaths:,}",
            f"{found.score:.3f}" if math.isfinite(found.score) else "-",
        ]
        for number, (step, found) in enumerate(zip(plan.steps, standing.steps, strict=True))
    ]


def finding_rows(standing: RolloutStanding) -> list[list[str]]:
    return [
        [one.metric, one.group or "all", one.text, f"{one.interval.units:,}", one.verdict.value]
        for one in standing.findings
    ]


def tables(plan: RolloutPlan, standing: RolloutStanding) -> "list[Table]":
    reached = ["bold" if number == plan.step else "" for number in range(len(plan.steps))]
    styles = [_STYLE.get(one.verdict, "") for one in standing.findings]
    return [
        console_table(_HEADS, step_rows(plan, standing), reached),
        console_table(_FINDING_HEADS, finding_rows(standing), styles),
    ]


def headline(plan: RolloutPlan) -> str:
    state, last = plan.state.replace("_", " "), len(plan.steps) - 1
    return (
        f"{plan.name}: {plan.stage} {plan.version}, serial {plan.serial}, {state} at step {plan.step} of"
        f" {last}"
    )


def status_page(plan: RolloutPlan, standing: RolloutStanding, move: Move, left_out: Sequence[str]) -> str:
    from torchperf_ros.observe.runs.report import Cell, Page, table

    page = Page()
    look = {"advance": "good", "hold": "fair", "rollback": "bad"}[move.kind.value]
    lines = [(look, f"{move.kind.value}: {reason}") for reason in move.reasons]
    page.top.append({"kind": "verdict", "lines": lines})
    page.section(
        "Steps",
        [
            table(_HEADS, step_rows(plan, standing), css="soft"),
            (
                {"kind": "note", "title": "What could not be read", "items": list(left_out)}
                if left_out
                else None
            ),
        ],
    )
    rows: list[list[Cell]] = [list(row) for row in finding_rows(standing)]
    for row, one in zip(rows, standing.findings, strict=True):
        row[-1] = {"text": row[-1], "tag": _CLASS[one.verdict]} if one.verdict in _CLASS else row[-1]
    page.section(
        "Verdicts",
        [table(_FINDING_HEADS, rows), page.plots(("Differences and margins", _forest(standing)))],
        subtitle="Intervals hold however often they are looked at.",
    )
    for found, what in ((standing.rolled_back, "rolled it back"), (standing.refused, "refused the plan")):
        if found:
            rows = [list(one) for one in list(found.items())[:_MOST_REASONS]]
            page.section(f"{len(found)} vehicles {what}", [table(("vehicle", "why"), rows)])
    vehicles = f"{standing.vehicles:,} vehicles had it; the step has lasted {standing.since_step_h:,.1f} h."
    return page.render(headline(plan), vehicles, f"torchperf rollout status {__version__}")


def _forest(standing: RolloutStanding) -> "go.Figure | str":
    """Each difference with its interval and margin, in margins: 1 is where it matters."""
    import plotly.graph_objects as go

    shown = [one for one in standing.findings if math.isfinite(one.interval.low) and one.margin]
    if not shown:
        return "not enough data for an interval yet"
    figure = go.Figure()
    figure.add_scatter(
        x=[one.interval.mean / one.margin for one in shown],
        mode="markers",
        showlegend=False,
        y=[f"{one.metric} {one.group}".strip() for one in shown],
        error_x={
            "type": "data",
            "array": [(one.interval.high - one.interval.mean) / one.margin for one in shown],
        },
        text=[one.text for one in shown],
        hovertemplate="%{y}: %{text}",
    )
    for edge in (-1, 1):
        figure.add_vline(x=edge, line={"color": _MARGIN_COLOUR, "dash": "dot", "width": 1})
    figure.update_xaxes(title_text="in margins; dotted: where it begins to matter")
    figure.update_layout(height=120 + 34 * len(shown))
    return figure
