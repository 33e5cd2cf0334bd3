"""The pictures of pages, as plotly figures; colours of text and grid are the page's, light or dark.

The palette is Okabe and Ito's (2008), which people with any colour vision can distinguish; outcomes
also differ by their mark.
"""

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.outcome import Health, Outcome
from torchperf_ros.observe.runs.run_log import STEPS, LoggedAlert, RunLog, StageLog

if TYPE_CHECKING:
    from torchperf_ros.observe.runs.changes import ComparedStage

BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
GREEN: Final = "#009E73"
GREY: Final = "#8a8f98"
LEGEND: Final = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
_MARKS: Final = {
    Outcome.LATE: (ORANGE, "circle"),
    Outcome.ERROR: (VERMILION, "triangle-up"),
    Outcome.INVALID: (PURPLE, "diamond"),
    Outcome.CRASHED: (VERMILION, "x"),
    Outcome.HUNG: (PURPLE, "square"),
    Outcome.BAD_INPUT: (VERMILION, "triangle-down"),
    Outcome.STARTING: (GREY, "circle-open"),
    Outcome.PARTIAL: (SKY, "circle"),
}
_SIDE_COLOURS: Final = {"base": BLUE, "new": ORANGE}
_SIDE_POINTS: Final = 1500
_BUDGETS_BEYOND: Final = 3.0  # of other paces than real the budget may be a day
_TIER_COLOURS: Final = (BLUE, SKY, GREEN, PURPLE, ORANGE, GREY)  # the last one: no tier
_STEP_COLOURS: Final = (GREY, SKY, GREEN, BLUE, PURPLE, ORANGE)
_STEP_NAMES: Final = ("wait", "decode", "preprocess", "inference", "postprocess", "hand-over and publish")
_MEMORY_COLOURS: Final = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY)
_BINS: Final = 80
_SLOWEST: Final = 0.01
_LEAST: Final = -0.3  # log10: a single frame is a bar, too
_LONGEST_HOVER: Final = 160
_BUDGETS_SHOWN: Final = 1.5
_HEIGHTS_PX: Final = (280, 74, 96)  # of latency, tier and health
_STOP_BAND: Final = "rgba(213,0,0,0.16)"
_GAP_INTERVALS, _GAP_S = 5, 1.0  # a line breaks where so many usual intervals, and a second, hold no frame
_MOST_MARKS: Final = 300
_GAP_PX, _AROUND_PX = 18, 110
_HALF: Final = 0.5  # of the height of a word of health


def envelope(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Indexes of the points to keep, in order, so that no spike is lost.

    This is the M4 aggregation (Jugel et al., 2014). There are `most` points, at least 4; a shorter series
    is kept. NaN, unknown, is kept only as first or last.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(most // 4, 1) + 1).astype(int)
    kept: set[int] = set()
    low, high = np.where(np.isnan(values), np.inf, values), np.where(np.isnan(values), -np.inf, values)
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        kept |= {
            begin,
            end - 1,
            begin + int(low[begin:end].argmin()),
            begin + int(high[begin:end].argmax()),
        }
    return np.array(sorted(kept), dtype=np.int64)


def rounded(values: Any) -> list[float | None]:  # noqa: ANN401 - any sequence of numbers
    """For a page: to four digits, None where unknown."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


def stretches(t_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each time the number of the stretch without a gap that it lies in."""
    steps = np.diff(t_ns)
    gap_ns = max(_GAP_S * NS_PER_S, _GAP_INTERVALS * float(np.median(steps))) if len(steps) else math.inf
    return np.concatenate([[0], np.cumsum(steps > gap_ns)]).astype(np.int64)[: len(t_ns)]


def timeline(stage: StageLog, most: int, alerts: Sequence[LoggedAlert] = ()) -> go.Figure:
    """Latency of every frame with its budget; below, on the same axis, tier and, if known, health.

    There are `most` points at most for the frames that were on time, and again for each outcome. Lines
    break where no frames were answered. Alerts of this stage, and of what all stages share, are marked;
    SAFE_STOP is a red band.
    """
    # the axis without data would take its labels with it
    heights = _HEIGHTS_PX if stage.health else _HEIGHTS_PX[:2]
    rows, height_px = len(heights), sum(heights) + _GAP_PX * (len(heights) - 1)
    figure = make_subplots(
        rows=rows,
        cols=1,
        shared_xaxes=True,
        row_heights=list(heights),
        vertical_spacing=_GAP_PX / height_px,
    )
    frames, total_ms = stage.frames, stage.total_ms
    stretch = stretches(frames["t_ns"])

    # plotly's
    def draw(chosen: Any, name: str, row: int = 1, y: Any = None, **look: Any) -> None:  # noqa: ANN401
        look = {"hovertemplate": "%{y:.2f} ms", **look}
        x, y = _times(frames["t_ns"][chosen]), rounded(total_ms[chosen]) if y is None else y
        if "lines" in look["mode"]:
            x, y = broken(x, y, stretch[chosen])
        figure.add_scatter(x=x, y=y, name=name, row=row, col=1, **look)

    fine = np.flatnonzero(stage.on_time)
    draw(
        fine[envelope(total_ms[fine], most)],
        "on time",
        mode="lines+markers",
        line={"color": "rgba(0,114,178,0.35)", "width": 1},
        marker={"size": 3, "color": BLUE},
    )
    for outcome, (colour, symbol) in _MARKS.items():
        hit = np.flatnonzero(frames["outcome"] == outcome)
        if len(hit):
            draw(
                hit[envelope(total_ms[hit], most)],
                f"{outcome.word.replace('_', ' ')} ({len(hit):,})",
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 8, "line": {"width": 0.5}},
            )
    profiled = np.flatnonzero(np.isin(frames["t_ns"], list(stage.profiled)))
    if len(profiled):
        draw(
            profiled,
            f"under a profiler ({len(profiled):,})",
            mode="markers",
            hovertemplate=None,
            hoverinfo="skip",
            marker={"color": GREY, "symbol": "circle-open", "size": 12},
        )
    if np.isfinite(frames["budget_ms"]).any():
        budget = _changes(np.asarray(frames["budget_ms"]), stretch)
        draw(
            budget,
            "budget",
            y=rounded(frames["budget_ms"][budget]),
            mode="lines",
            hovertemplate="%{y:.1f} ms",
            line={"color": VERMILION, "width": 1.5, "dash": "dash", "shape": "hv"},
        )
    ran = np.asarray(frames["tier"], dtype=np.float64)
    shown = _changes(ran, stretch)
    shown = shown[envelope(ran[shown], most)]
    draw(
        shown,
        "tier",
        2,
        [stage.tier_name(int(tier)) for tier in ran[shown]],
        mode="lines",
        showlegend=False,
        hovertemplate="%{y}",
        line={"color": GREEN, "width": 1.5, "shape": "hv"},
    )
    if stage.health:
        _draw_health(figure, stage)
    concerned = {stage.name, "machine", "node"}  # what all stages share, too
    marked = [one for one in alerts if one.level != "OK" and one.name.partition(": ")[0] in concerned]
    if marked:
        _mark(figure, marked[:_MOST_MARKS])
    names = [stage.tier_name(number) for number in sorted({int(tier) for tier in ran}, reverse=True)]
    figure.update_yaxes(title_text="ms", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="tier", categoryorder="array", categoryarray=names, row=2, col=1)
    figure.update_xaxes(type="date")
    figure.update_xaxes(title_text="UTC", row=rows, col=1)
    figure.update_layout(height=height_px + _AROUND_PX, hovermode="x unified", legend=LEGEND)
    return figure


def _draw_health(figure: go.Figure, stage: StageLog) -> None:
    """In the third row, with SAFE_STOP as a band over all of them."""
    times, words = zip(*stage.health, strict=True)
    end_ns = max(int(stage.frames["t_ns"][-1]) if len(stage) else 0, times[-1])
    figure.add_scatter(
        x=_times([*times, end_ns]),
        y=[*words, words[-1]],
        name="health",
        mode="lines",
        showlegend=False,
        line={"color": ORANGE, "width": 2, "shape": "hv"},
        hovertemplate="%{y}",
        row=3,
        col=1,
    )
    figure.update_yaxes(
        title_text="health",
        categoryorder="array",
        categoryarray=[one.name for one in Health],
        range=[len(Health) - _HALF, -_HALF],
        dtick=1,
        row=3,
        col=1,
    )
    for stop in stage.safe_stops:
        begin, end = _times(stop)
        figure.add_shape(
            type="rect",
            x0=begin,
            x1=end,
            y0=0,
            y1=1,
            yref="paper",
            fillcolor=_STOP_BAND,
            layer="below",
            line={"width": 0},
        )


def _mark(figure: go.Figure, alerts: Sequence[LoggedAlert]) -> None:
    """A star at the foot of the first row for each of these, and a line over all rows."""
    times = _times([one.t_ns for one in alerts])
    colours = [VERMILION if one.level == "ERROR" else ORANGE for one in alerts]
    figure.add_scatter(
        x=times,
        y=[0] * len(alerts),
        name=f"anomalies ({len(alerts):,})",
        text=[html.escape(f"{one.name}: {one.message}"[:_LONGEST_HOVER]) for one in alerts],
        mode="markers",
        hovertemplate="%{text}",
        row=1,
        col=1,
        cliponaxis=False,
        marker={"color": colours, "size": 10, "symbol": "star"},
    )
    for at, colour in zip(times, colours, strict=True):
        figure.add_shape(
            type="line",
            x0=at,
            x1=at,
            y0=0,
            y1=1,
            yref="paper",
            layer="below",
            line={"color": colour, "width": 1, "dash": "dot"},
        )


def distribution(stage: StageLog) -> go.Figure:
    """How long the answers of each tier took, on a logarithmic count, so that the tail is seen."""
    figure, total_ms, budget_ms = go.Figure(), stage.total_ms, stage.budget_ms
    known = stage.counted & np.isfinite(total_ms)
    highest = float(total_ms[known].max(initial=1.0))
    if (
        np.isfinite(budget_ms) and known.any()
    ):  # none is while every frame came before the models were there
        highest = min(
            highest * 1.02, max(budget_ms * _BUDGETS_SHOWN, float(np.percentile(total_ms[known], 99.9)))
        )
    edges, most = np.linspace(0.0, highest, _BINS + 1), 1
    for tier in sorted({int(tier) for tier in stage.frames["tier"][known]}):
        chosen = total_ms[known & (stage.frames["tier"] == tier)]
        counts, _ = np.histogram(np.minimum(chosen, highest), edges)
        most = max(most, int(counts.max()))
        colour = _TIER_COLOURS[tier if tier < 0 else tier % (len(_TIER_COLOURS) - 1)]
        figure.add_bar(
            x=np.round((edges[:-1] + edges[1:]) / 2, 3).tolist(),
            y=counts.tolist(),
            opacity=0.7,
            name=f"{stage.tier_name(tier)} ({len(chosen):,})",
            hovertemplate="%{x:.1f} ms: %{y:,} frames",
            marker={"color": colour, "line": {"width": 0}},
        )
    mark_budget(figure, budget_ms)
    figure.update_yaxes(type="log", dtick=1, range=[_LEAST, float(np.log10(2 * most))])
    return laid_out(
        figure,
        320,
        "ms, receipt to publish; last bar: and more",
        "frames",
        barmode="overlay",
        bargap=0,
        showlegend=True,
    )


def waterfall(stage: StageLog) -> go.Figure | None:
    """Where the time goes, as means over frames whose steps are all known.

    All, each tier, and the slowest 1 %.

    None where there is no such frame.
    """
    figure = go.Figure()
    steps = np.array([stage.frames[name] for name in STEPS], dtype=np.float64)
    total_ms = stage.total_ms
    known = stage.counted & np.isfinite(steps).all(axis=0) & np.isfinite(total_ms)
    if not known.any():
        return None
    groups = [("all", known)]
    groups += [
        (stage.tier_name(tier), known & (stage.frames["tier"] == tier))
        for tier in sorted({int(tier) for tier in stage.frames["tier"][known]})
    ]
    groups.append(("slowest 1 %", known & (total_ms >= np.quantile(total_ms[known], 1 - _SLOWEST))))
    means = [steps[:, chosen].mean(axis=1) for _, chosen in groups]
    means = [
        [*mean, max(total_ms[chosen].mean() - mean.sum(), 0.0)]
        for (_, chosen), mean in zip(groups, means, strict=True)
    ]
    for number, (name, colour) in enumerate(zip(_STEP_NAMES, _STEP_COLOURS, strict=True)):
        figure.add_bar(
            y=[f"{group} ({int(chosen.sum()):,})" for group, chosen in groups],
            x=np.round([mean[number] for mean in means], 3).tolist(),
            name=name,
            orientation="h",
            marker={"color": colour},
            hovertemplate=f"{name}: %{{x:.2f}} ms",
        )
    mark_budget(figure, stage.budget_ms, text="")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="ms, mean")
    height_px = 190 + 34 * len(groups)
    figure.update_layout(
        height=height_px, barmode="stack", bargap=0.3, legend={**LEGEND, "traceorder": "normal"}
    )
    return figure


def memory(run: RunLog, most: int) -> go.Figure:
    figure = go.Figure()
    stretch = stretches(run.memory_t_ns)
    # the rest are counts
    sizes = {label: column for label, column in run.memory.items() if label.endswith("_mib")}
    for number, (label, column) in enumerate(sizes.items()):
        if np.isfinite(column).any() and np.nanmax(column) > 0:
            shown, turn = envelope(column, most), divmod(number, len(_MEMORY_COLOURS))
            x, y = broken(_times(run.memory_t_ns[shown]), rounded(column[shown]), stretch[shown])
            figure.add_scatter(
                x=x,
                y=y,
                mode="lines",
                name=label.removesuffix("_mib").replace("_", " "),
                hovertemplate="%{y:,.1f} MiB",
                line={"color": _MEMORY_COLOURS[turn[1]], "width": 2, "dash": ("solid", "dot")[turn[0] % 2]},
            )
    figure.update_xaxes(type="date")
    return laid_out(figure, 280, "", "MiB", hovermode="x unified")


def mark_budget(figure: go.Figure, budget_ms: float, text: str = "budget") -> None:
    if np.isfinite(budget_ms):
        figure.add_vline(
            x=budget_ms,
            line={"color": VERMILION, "dash": "dash", "width": 1.5},
            **({"annotation_text": text, "annotation_position": "top left"} if text else {}),
        )


# plotly's
def laid_out(figure: go.Figure, height_px: int, x: str, y: str, **layout: Any) -> go.Figure:  # noqa: ANN401
    """A figure with titles of its axes, a legend above it, and more of plotly's layout.

    Its values begin at 0.
    """
    figure.update_xaxes(title_text=x or None)
    figure.update_yaxes(title_text=y, **({} if figure.layout.yaxis.type else {"rangemode": "tozero"}))
    return figure.update_layout(height=height_px, legend=LEGEND, **layout)


def _times(t_ns: Any) -> list[float]:  # noqa: ANN401 - any sequence of whole numbers
    """Milliseconds since 1970, which is what a date axis takes."""
    return np.round(np.asarray(t_ns, dtype=np.int64) / NS_PER_MS, 1).tolist()  # type: ignore[no-any-return]


def broken(x: Sequence[Any], y: Sequence[Any], stretch: NDArray[np.int64]) -> tuple[list[Any], list[Any]]:
    """The points of a line, with a point that is none between those of different stretches."""
    cuts = (np.flatnonzero(np.diff(stretch)) + 1).tolist()
    parts = [slice(begin, end) for begin, end in pairwise([0, *cuts, len(stretch)])]
    found = [[value for part in parts for value in (*values[part], None)][:-1] for values in (x, y)]
    return found[0], found[1]


def _changes(values: NDArray[np.float64], stretch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where a series changes, and where each stretch begins.

    The points before those, and the last one, too.
    """
    changed = np.flatnonzero(np.diff(np.nan_to_num(values, nan=-1.0))) + 1
    begins = np.flatnonzero(np.diff(stretch)) + 1
    return np.unique(np.concatenate([[0], changed, begins - 1, begins, [len(values) - 1]])).astype(np.int64)


# -- of two sides of runs


def exceedance(stage: "ComparedStage") -> go.Figure:
    """What share of the frames took as long or longer.

    The ECDF turned over, whose logarithmic axis shows the tail.
    """
    figure = go.Figure()
    longest_ms = 0.0
    for word, frames in (("base", stage.base), ("new", stage.new)):
        values = np.sort(frames.total_ms[np.isfinite(frames.total_ms)])
        longest_ms = max(longest_ms, float(values.max(initial=0.0)))
        shares = 100.0 * (1.0 - np.arange(len(values)) / max(len(values), 1))
        shown = np.unique(
            np.round(len(values) - np.geomspace(max(len(values), 1), 1, _SIDE_POINTS)).astype(int)
        )
        shown = shown[: len(values)]  # none of none
        _line(
            figure,
            word,
            rounded(values[shown]),
            shares[shown],
            "%{y:.2f} % took %{x:.2f} ms or more",
            name=f"{word} ({len(values):,})",
            line={"color": _SIDE_COLOURS[word], "width": 2, "shape": "hv"},
        )
    if (
        stage.new.budget_ms <= _BUDGETS_BEYOND * longest_ms
    ):  # of other paces than real the budget may be a day
        mark_budget(figure, stage.new.budget_ms)
    figure.update_yaxes(type="log", dtick=1)
    return laid_out(
        figure, 340, "ms, receipt to publish", "% of frames took as long or longer", showlegend=True
    )


def over_frames(stage: "ComparedStage") -> go.Figure:
    figure = go.Figure()
    for word, frames in (("base", stage.base), ("new", stage.new)):
        shown = envelope(frames.total_ms, _SIDE_POINTS)
        _line(
            figure,
            word,
            shown.tolist(),
            frames.total_ms[shown],
            "frame %{x}: %{y:.2f} ms",
            opacity=0.75,
            line={"color": _SIDE_COLOURS[word], "width": 1},
        )
    return laid_out(figure, 300, "frame", "ms", showlegend=True)


def memory_of_sides(sides: dict[str, tuple[RunLog, ...]]) -> go.Figure:
    figure = go.Figure()
    for word, run in ((word, run) for word, runs in sides.items() for run in runs):
        _, seconds, mib = run.used_memory
        shown = envelope(mib, _SIDE_POINTS)
        _line(
            figure,
            word,
            rounded(seconds[shown] - seconds[:1]),
            mib[shown],
            "%{x:.0f} s: %{y:,.1f} MiB",
        )
    return laid_out(figure, 260, "s", "MiB", showlegend=True)


# plotly's
def _line(figure: go.Figure, word: str, x: list[Any], y: Any, hover: str, **look: Any) -> None:  # noqa: ANN401
    look = {"name": word, "line": {"color": _SIDE_COLOURS[word], "width": 2}, **look}
    figure.add_scatter(x=x, y=rounded(y), mode="lines", hovertemplate=hover, **look)
