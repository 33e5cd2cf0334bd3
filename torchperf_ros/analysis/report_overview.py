"""Many runs on one page: all of them in one picture and one table, so that only the worst need a section each."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from torchperf_ros.analysis.report_figures import BLUE, GREEN, ORANGE, PURPLE, SKY
from torchperf_ros.analysis.report_summary import StageFigures
from torchperf_ros.core.percent import percent

MOST_ROWS = 4000
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
_GOOD_SHARE = 0.999
_MOST_NAMED = 12  # logs that have their names below the picture
_TICK, _TILT_DEGREES = 18, 30  # characters of a name there, and how it stands
_HALF = 0.5  # of a log's width
_COLUMNS = (
    "log", "stage", "frames", "on time", "p50 ms", "p99 ms", "longest ms", "budget ms", "latest answer ms", "anomalies",
)  # fmt: skip


@dataclass(frozen=True)
class OverviewRow:
    """A stage of a run, in numbers; `anomalies` of that stage."""

    run: str
    stage: str
    figures: StageFigures
    anomalies: int


@dataclass(frozen=True)
class Overview:
    """Everything that ran, the worst first, and everything that did not.

    Attributes:
        rows: one for each stage of each run.
        failed: name and reason.
        title: what they are together.
    """

    rows: Sequence[OverviewRow]
    failed: Sequence[tuple[str, str]] = ()
    title: str = ""


def overview_html(overview: Overview, anchors: dict[str, str], add: Callable[[go.Figure], str]) -> str:
    """The HTML of the overview.

    Args:
        overview: what to tell.
        anchors: ids of the sections of runs that have one, by run.
        add: takes figures.
    """
    shown = overview.rows[:MOST_ROWS]
    parts = [_figures(overview), _failed(overview.failed)]
    if shown:
        parts.append(f'<div class="card"><h4>p99 of every log, the worst first</h4>{add(_latencies(shown))}</div>')
        head = "".join(f'<th class="{"n" if i > 1 else ""}" tabindex="0">{c}</th>' for i, c in enumerate(_COLUMNS))
        rows = "\n".join(_row(row, anchors.get(row.run, "")) for row in shown)
        more = f'<p class="soft">{len(overview.rows) - len(shown):,} more rows, of the best, are left out.</p>'
        parts.append(
            '<p class="soft small">The worst logs come first, and those that are links are told below. A click on a '
            f'column sorts.</p><div class="card scroll tall"><table class="sortable"><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>{more if len(overview.rows) > len(shown) else ''}"
        )
    return "\n".join(filter(None, parts))


def _figures(overview: Overview) -> str:
    runs = len({row.run for row in overview.rows})
    frames = sum(row.figures.frames for row in overview.rows)
    on_time = sum(row.figures.on_time_share * row.figures.frames for row in overview.rows if row.figures.frames)
    share = on_time / frames if frames else math.nan
    shown = [
        (f"{runs:,}", "logs", ""),
        (f"{len(overview.failed):,}", "failed", "bad" if overview.failed else ""),
        (f"{frames:,}", "frames answered, of all stages", ""),
        (percent(share, 2) if frames else "-", "on time", "good" if share >= _GOOD_SHARE else "bad"),
        (f"{sum(row.anomalies for row in overview.rows):,}", "anomalies", ""),
    ]
    return '<div class="figures">' + "".join(
        f'<div><b class="{css}">{value}</b><span>{name}</span></div>' for value, name, css in shown
    ) + "</div>"  # fmt: skip


def _failed(failed: Sequence[tuple[str, str]]) -> str:
    if not failed:
        return ""
    items = "".join(f"<li><b>{_text(name)}</b>: {_text(reason)}</li>" for name, reason in failed)
    return f'<div class="note"><b>Not replayed</b><ul class="tall">{items}</ul></div>'


def _latencies(rows: Sequence[OverviewRow]) -> go.Figure:
    """A point for each stage of each run; logs in the table's order, budgets as lines over the width of their log."""
    figure = go.Figure()
    places = {run: place for place, run in enumerate(dict.fromkeys(row.run for row in rows), start=1)}
    for number, stage in enumerate(dict.fromkeys(row.stage for row in rows)):
        own = [row for row in rows if row.stage == stage and math.isfinite(row.figures.p99_ms)]
        colour = _COLOURS[number % len(_COLOURS)]
        figure.add_scatter(
            x=[places[row.run] for row in own], y=[round(row.figures.p99_ms, 3) for row in own], name=stage,
            text=[row.run for row in own], mode="markers", marker={"color": colour, "size": 6},
            hovertemplate="%{text}: %{y:.2f} ms",
        )  # fmt: skip
        budgets = [row for row in own if math.isfinite(row.figures.budget_ms)]
        if budgets:
            figure.add_scatter(
                x=[places[row.run] + side for row in budgets for side in (-_HALF, _HALF)],
                y=[row.figures.budget_ms for row in budgets for _ in range(2)],
                name=f"budget of {stage}", mode="lines", line={"color": colour, "width": 1.5, "dash": "dash"},
                hoverinfo="skip",
            )  # fmt: skip
    figure.update_xaxes(type="linear", range=[1 - _HALF, len(places) + _HALF], zeroline=False)
    if len(places) <= _MOST_NAMED:
        ticks = {"tickvals": list(places.values()), "ticktext": [_tick(run) for run in places]}
        figure.update_xaxes(**ticks, tickangle=-_TILT_DEGREES, ticklabeloverflow="allow")
    else:
        figure.update_xaxes(title_text="place in the table", tickformat=",")
    figure.update_yaxes(title_text="p99, ms", rangemode="tozero")
    figure.update_layout(height=360, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return figure


def _tick(run: str) -> str:
    """A name that fits below an axis: its beginning and its end, which is where names of logs differ."""
    short = run if len(run) <= _TICK else f"{run[: _TICK // 2]}…{run[-_TICK // 2 + 1 :]}"
    return _text(short)


def _row(row: OverviewRow, anchor: str) -> str:
    figures = row.figures
    name = f'<a href="#{anchor}">{_text(row.run)}</a>' if anchor else _text(row.run)
    share = figures.on_time_share
    cells = [
        (f"{figures.frames:,}", figures.frames),
        (percent(share, 2) if math.isfinite(share) else "-", share),
        *((_ms(value), value) for value in (figures.p50_ms, figures.p99_ms, figures.max_ms, figures.budget_ms)),
        (f"{figures.worst_lateness_ms:+.1f}" if math.isfinite(figures.worst_lateness_ms) else "-",
         figures.worst_lateness_ms),
        (f"{row.anomalies:,}", row.anomalies),
    ]  # fmt: skip
    numbers = "".join(
        f'<td class="n" data-v="{value:.6g}">{text}</td>' if math.isfinite(value) else f'<td class="n">{text}</td>'
        for text, value in cells
    )
    return f"<tr><td>{name}</td><td>{_text(row.stage)}</td>{numbers}</tr>"


def _text(text: str) -> str:
    return html.escape(text)


def _ms(value: float) -> str:
    return f"{value:,.1f}" if math.isfinite(value) else "-"
