"""The pictures of a report, as plotly figures; colours of text and grid are the page's, light or dark.

The palette is Okabe and Ito's (2008), told apart with every kind of colour vision; outcomes differ by their mark, too.
"""

from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from torchperf_ros.analysis.report_envelope import envelope
from torchperf_ros.analysis.run_log import STEPS, UNKNOWN, RunLog, StageLog
from torchperf_ros.core.outcome import Health, Outcome

BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
GREEN: Final = "#009E73"
GREY: Final = "#8a8f98"
_MARKS: Final = {
    Outcome.LATE: (ORANGE, "circle"),
    Outcome.ERROR: (VERMILION, "triangle-up"),
    Outcome.INVALID: (PURPLE, "diamond"),
    Outcome.CRASHED: (VERMILION, "x"),
    Outcome.HUNG: (PURPLE, "square"),
    Outcome.BAD_INPUT: (GREEN, "triangle-down"),
    Outcome.STARTING: (GREY, "circle-open"),
}
_TIER_COLOURS: Final = (BLUE, SKY, GREEN, PURPLE, ORANGE)
_STEP_COLOURS: Final = (GREY, SKY, GREEN, BLUE, PURPLE, ORANGE)
_STEP_NAMES: Final = ("wait", "decode", "preprocess", "inference", "postprocess", "hand-over and publish")
_LEGEND: Final = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
_BINS: Final = 80
_SLOWEST: Final = 0.01
_LEAST: Final = -0.3  # log10: a single frame is a bar, too
_NS_PER_MS: Final = 1e6
_BUDGETS_SHOWN: Final = 1.5
_HEIGHTS_PX: Final = (280, 74, 58)  # of latency, tier and health
_GAP_PX, _AROUND_PX = 18, 110


def timeline(stage: StageLog, most: int) -> go.Figure:
    """Latency of every frame with its budget, and below, on the same axis, the tier that ran and, if known, the health.

    Args:
        stage: what to show.
        most: points at most, for the frames that were on time and again for each outcome.
    """
    heights = _HEIGHTS_PX if stage.health else _HEIGHTS_PX[:2]  # the axis without data would take its labels with it
    rows, height_px = len(heights), sum(heights) + _GAP_PX * (len(heights) - 1)
    figure = make_subplots(
        rows=rows, cols=1, shared_xaxes=True, row_heights=list(heights), vertical_spacing=_GAP_PX / height_px
    )
    frames, total_ms = stage.frames, np.asarray(stage.frames["total_ms"], dtype=np.float64)
    fine = np.flatnonzero(stage.on_time)
    fine = fine[envelope(total_ms[fine], most)]
    figure.add_scatter(
        x=_times(frames["t_ns"][fine]), y=_rounded(total_ms[fine]), name="on time", mode="lines+markers",
        line={"color": "rgba(0,114,178,0.35)", "width": 1}, marker={"size": 3, "color": BLUE},
        hovertemplate="%{y:.2f} ms", row=1, col=1,
    )  # fmt: skip
    for outcome, (colour, symbol) in _MARKS.items():
        hit = np.flatnonzero(frames["outcome"] == outcome)
        if len(hit):
            shown = hit[envelope(total_ms[hit], most)]
            figure.add_scatter(
                x=_times(frames["t_ns"][shown]), y=_rounded(total_ms[shown]), mode="markers",
                name=f"{outcome.word.replace('_', ' ')} ({len(hit):,})", hovertemplate="%{y:.2f} ms",
                marker={"color": colour, "symbol": symbol, "size": 8, "line": {"width": 0.5}}, row=1, col=1,
            )  # fmt: skip
    profiled = np.flatnonzero(np.isin(frames["t_ns"], list(stage.profiled)))
    if len(profiled):
        figure.add_scatter(
            x=_times(frames["t_ns"][profiled]), y=_rounded(total_ms[profiled]), mode="markers",
            name=f"under a profiler ({len(profiled):,})", hoverinfo="skip",
            marker={"color": GREY, "symbol": "circle-open", "size": 12}, row=1, col=1,
        )  # fmt: skip
    if np.isfinite(frames["budget_ms"]).any():
        budget = _changes(np.asarray(frames["budget_ms"]))
        figure.add_scatter(
            x=_times(frames["t_ns"][budget]), y=_rounded(frames["budget_ms"][budget]), name="budget", mode="lines",
            line={"color": VERMILION, "width": 1.5, "dash": "dash", "shape": "hv"}, hovertemplate="%{y:.1f} ms",
            row=1, col=1,
        )  # fmt: skip
    ran = np.asarray(frames["tier"], dtype=np.float64)
    shown = _thinned(_changes(ran), ran, most)
    figure.add_scatter(
        x=_times(frames["t_ns"][shown]), y=[stage.tier_name(int(tier)) for tier in ran[shown]], name="tier",
        mode="lines", line={"color": GREEN, "width": 1.5, "shape": "hv"}, showlegend=False, hovertemplate="%{y}",
        row=2, col=1,
    )  # fmt: skip
    if stage.health:
        times, words = zip(*stage.health, strict=True)
        end_ns = max(int(frames["t_ns"][-1]) if len(stage) else 0, times[-1])
        figure.add_scatter(
            x=_times([*times, end_ns]), y=[*words, words[-1]], name="health", mode="lines", showlegend=False,
            line={"color": ORANGE, "width": 2, "shape": "hv"}, hovertemplate="%{y}", row=3, col=1,
        )  # fmt: skip
        told = {word for _, word in stage.health}
        ordered = [health.name for health in reversed(Health) if health.name in told]
        figure.update_yaxes(title_text="health", categoryorder="array", categoryarray=ordered, row=3, col=1)
    names = [stage.tier_name(number) for number in sorted({int(tier) for tier in ran}, reverse=True)]
    figure.update_yaxes(title_text="ms", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="tier", categoryorder="array", categoryarray=names, row=2, col=1)
    figure.update_xaxes(title_text="UTC", row=rows, col=1)
    figure.update_layout(height=height_px + _AROUND_PX, hovermode="x unified", legend=_LEGEND)
    return figure


def distribution(stage: StageLog) -> go.Figure:
    """How long the answers of each tier took, on a logarithmic count, so that the tail is seen."""
    figure = go.Figure()
    total_ms, counted = np.asarray(stage.frames["total_ms"], dtype=np.float64), stage.counted
    known = counted & np.isfinite(total_ms)
    budget_ms = _budget_ms(stage)
    highest = float(total_ms[known].max(initial=1.0))
    if np.isfinite(budget_ms):
        highest = min(highest * 1.02, max(budget_ms * _BUDGETS_SHOWN, float(np.percentile(total_ms[known], 99.9))))
    edges, most = np.linspace(0.0, highest, _BINS + 1), 1
    for tier in sorted({int(tier) for tier in stage.frames["tier"][known]}):
        chosen = total_ms[known & (stage.frames["tier"] == tier)]
        counts, _ = np.histogram(np.minimum(chosen, highest), edges)
        most = max(most, int(counts.max()))
        figure.add_bar(
            x=np.round((edges[:-1] + edges[1:]) / 2, 3).tolist(), y=counts.tolist(),
            name=f"{stage.tier_name(tier)} ({len(chosen):,})", hovertemplate="%{x:.1f} ms: %{y:,} frames",
            marker={"color": _tier_colour(tier), "line": {"width": 0}}, opacity=0.7,
        )  # fmt: skip
    if np.isfinite(budget_ms):
        figure.add_vline(
            x=budget_ms, line={"color": VERMILION, "dash": "dash", "width": 1.5}, annotation_text="budget",
            annotation_position="top left",
        )  # fmt: skip
    figure.update_xaxes(title_text="ms, receipt to publish; last bar: and more")
    figure.update_yaxes(title_text="frames", type="log", dtick=1, range=[_LEAST, float(np.log10(2 * most))])
    figure.update_layout(height=320, barmode="overlay", bargap=0, showlegend=True, legend=_LEGEND)
    return figure


def waterfall(stage: StageLog) -> go.Figure:
    """Where the time goes, as means over frames whose steps are all known: all, each tier, and the slowest 1 %."""
    figure = go.Figure()
    steps = np.array([stage.frames[name] for name in STEPS], dtype=np.float64)
    total_ms = np.asarray(stage.frames["total_ms"], dtype=np.float64)
    known = stage.counted & np.isfinite(steps).all(axis=0) & np.isfinite(total_ms)
    groups: list[tuple[str, NDArray[np.bool_]]] = [("all", known)]
    for tier in sorted({int(tier) for tier in stage.frames["tier"][known]}):
        groups.append((stage.tier_name(tier), known & (stage.frames["tier"] == tier)))
    if known.any():
        limit = np.quantile(total_ms[known], 1 - _SLOWEST)
        groups.append(("slowest 1 %", known & (total_ms >= limit)))
    labels = [f"{name} ({int(chosen.sum()):,})" for name, chosen in groups]
    shown = [(steps[:, chosen].mean(axis=1), total_ms[chosen].mean()) for _, chosen in groups if chosen.any()]
    for number, (name, colour) in enumerate(zip(_STEP_NAMES, _STEP_COLOURS, strict=True)):
        lengths = [
            float(means[number]) if number < len(STEPS) else max(float(total - means.sum()), 0.0)
            for means, total in shown
        ]
        figure.add_bar(
            y=labels[: len(shown)], x=np.round(lengths, 3).tolist(), name=name, orientation="h",
            marker={"color": colour}, hovertemplate=f"{name}: %{{x:.2f}} ms",
        )  # fmt: skip
    if np.isfinite(budget_ms := _budget_ms(stage)):
        figure.add_vline(x=budget_ms, line={"color": VERMILION, "dash": "dash", "width": 1.5})
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="ms, mean")
    figure.update_layout(
        height=190 + 34 * max(len(shown), 1), barmode="stack", bargap=0.3, legend={**_LEGEND, "traceorder": "normal"},
    )  # fmt: skip
    return figure


def memory(run: RunLog, most: int) -> go.Figure:
    """Memory by whom, in MiB."""
    figure = go.Figure()
    colours = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY)
    dashes = ("solid", "dot")
    sizes = {label: column for label, column in run.memory.items() if label.endswith("_mib")}  # the rest are counts
    for number, (label, column) in enumerate(sizes.items()):
        if np.isfinite(column).any() and np.nanmax(column) > 0:
            shown = envelope(column, most)
            figure.add_scatter(
                x=_times(run.memory_t_ns[shown]), y=_rounded(column[shown]), mode="lines",
                name=label.removesuffix("_mib").replace("_", " "), hovertemplate="%{y:,.1f} MiB",
                line={"color": colours[number % len(colours)], "width": 2, "dash": dashes[number // len(colours) % 2]},
            )  # fmt: skip
    figure.update_yaxes(title_text="MiB", rangemode="tozero")
    figure.update_layout(height=280, hovermode="x unified", legend=_LEGEND)
    return figure


def _tier_colour(tier: int) -> str:
    return GREY if tier == UNKNOWN else _TIER_COLOURS[tier % len(_TIER_COLOURS)]


def _budget_ms(stage: StageLog) -> float:
    known = np.asarray(stage.frames["budget_ms"], dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(known[-1]) if len(known) else float("nan")


def _times(t_ns: Any) -> list[float]:  # noqa: ANN401 - any sequence of whole numbers
    """Milliseconds since 1970, which is what a date axis takes."""
    return np.round(np.asarray(t_ns, dtype=np.int64) / _NS_PER_MS, 1).tolist()  # type: ignore[no-any-return]


def _rounded(values: Any) -> list[float | None]:  # noqa: ANN401 - any sequence of numbers
    return [round(float(value), 3) if np.isfinite(value) else None for value in values]


def _changes(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Where a series changes; its first and its last point, too."""
    if not len(values):
        return np.arange(0)
    changed = np.flatnonzero(np.diff(np.nan_to_num(values, nan=-1.0))) + 1
    return np.unique(np.concatenate([[0], changed, [len(values) - 1]])).astype(np.int64)


def _thinned(indexes: NDArray[np.int64], values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    return indexes[envelope(values[indexes], most)]
