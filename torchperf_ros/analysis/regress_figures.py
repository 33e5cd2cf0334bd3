"""The pictures of a comparison, as plotly figures; colours of text and grid are the page's."""

from typing import Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from torchperf_ros.analysis.regress_run import StageFrames
from torchperf_ros.analysis.report_envelope import envelope
from torchperf_ros.analysis.report_figures import BLUE, GREEN, GREY, ORANGE, VERMILION

CURVE: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.96, 0.97, 0.98, 0.985, 0.995)
"""Quantiles of the picture beside p50, p95 and p99; 0.5 and those come from the verdicts themselves."""
_POINTS: Final = 1500
_LEGEND: Final = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
_WHOLE: Final = 100.0
_BUDGET_SHOWN: Final = 3.0
_COLOURS: Final = (BLUE, ORANGE)
_BANDS: Final = "rgba(0,158,115,0.2)"

Bounds = tuple[tuple[float, float, float, float], ...]


def exceedance(base: StageFrames, new: StageFrames) -> go.Figure:
    """What share of the frames took as long or longer: the ECDF turned over, whose logarithmic axis shows the tail."""
    figure = go.Figure()
    for frames, word, colour in _both(base, new):
        values = np.sort(frames.total_ms[np.isfinite(frames.total_ms)])
        shares = _WHOLE * (1.0 - np.arange(len(values)) / max(len(values), 1))
        shown = np.unique(np.round(len(values) - np.geomspace(max(len(values), 1), 1, _POINTS)).astype(int))
        shown = shown[: len(values)]  # none of none
        figure.add_scatter(
            x=_rounded(values[shown]), y=np.round(shares[shown], 4).tolist(), mode="lines",
            name=f"{word} ({len(values):,})", line={"color": colour, "width": 2, "shape": "hv"},
            hovertemplate="%{y:.2f} % took %{x:.2f} ms or more",
        )  # fmt: skip
    longest_ms = np.nanmax(np.concatenate([base.total_ms, new.total_ms, [0.0]]))
    if new.budget_ms <= _BUDGET_SHOWN * longest_ms:  # without a deadline the budget is a day
        figure.add_vline(x=new.budget_ms, line={"color": VERMILION, "dash": "dash", "width": 1.5},
                         annotation_text="budget", annotation_position="top left")  # fmt: skip
    figure.update_xaxes(title_text="ms, receipt to publish")
    figure.update_yaxes(title_text="% of frames took as long or longer", type="log", dtick=1)
    figure.update_layout(height=340, legend=_LEGEND, showlegend=True)
    return figure


def difference(curve: Bounds, margin_ms: float) -> go.Figure:
    """How much longer (up) or shorter each quantile of the new run is, with its interval.

    Args:
        curve: rows of share (0 to 1), difference, low and high in ms, in order of the shares.
        margin_ms: the smallest change of the p99 that matters, NaN if there is none.
    """
    share, middle, low, high = (list(column) for column in zip(*curve, strict=True))
    at = [f"p{_WHOLE * one:g}" for one in share]
    figure = go.Figure()
    figure.add_scatter(x=at, y=_rounded(high), mode="lines", line={"width": 0}, showlegend=False, hoverinfo="skip")
    figure.add_scatter(x=at, y=_rounded(low), mode="lines", line={"width": 0}, fill="tonexty", fillcolor=_BANDS,
                       name="interval", hoverinfo="skip")  # fmt: skip
    figure.add_scatter(
        x=at, y=_rounded(middle), mode="lines+markers", name="new less base", line={"color": GREEN, "width": 2},
        customdata=[[round(one, 3), round(other, 3)] for one, other in zip(low, high, strict=True)],
        hovertemplate="%{x}: %{y:+.2f} ms (%{customdata[0]:+.2f} to %{customdata[1]:+.2f})",
    )  # fmt: skip
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    for side in (margin_ms, -margin_ms) if np.isfinite(margin_ms) else ():
        figure.add_hline(y=side, line={"color": VERMILION, "dash": "dot", "width": 1})
    figure.update_xaxes(title_text="quantile of the latency; dotted: the margin of the p99", type="category")
    figure.update_yaxes(title_text="ms longer")
    figure.update_layout(height=340, legend=_LEGEND, showlegend=True)
    return figure


def over_time(base: StageFrames, new: StageFrames) -> go.Figure:
    """Latency of every frame by its number, from each run's first on."""
    figure = go.Figure()
    for frames, word, colour in _both(base, new):
        shown = envelope(frames.total_ms, _POINTS)
        figure.add_scatter(
            x=(frames.seq[shown] - frames.seq[:1]).tolist(), y=_rounded(frames.total_ms[shown]), mode="lines",
            name=word, line={"color": colour, "width": 1}, opacity=0.75,
            hovertemplate="frame %{x}: %{y:.2f} ms",
        )  # fmt: skip
    figure.update_xaxes(title_text="frame")
    figure.update_yaxes(title_text="ms", rangemode="tozero")
    figure.update_layout(height=300, legend=_LEGEND, showlegend=True)
    return figure


def memory(base: tuple[NDArray[np.float64], NDArray[np.float64]], new: tuple[NDArray[np.float64], ...]) -> go.Figure:
    """What the workers used over time: pairs of seconds and MiB."""
    figure = go.Figure()
    for (seconds, mib), word, colour in zip((base, new), ("base", "new"), _COLOURS, strict=True):
        shown = envelope(mib, _POINTS)
        figure.add_scatter(
            x=_rounded(seconds[shown] - seconds[:1]), y=_rounded(mib[shown]), mode="lines", name=word,
            line={"color": colour, "width": 2}, hovertemplate="%{x:.0f} s: %{y:,.1f} MiB",
        )  # fmt: skip
    figure.update_xaxes(title_text="s")
    figure.update_yaxes(title_text="MiB", rangemode="tozero")
    figure.update_layout(height=260, legend=_LEGEND, showlegend=True)
    return figure


def _both(base: StageFrames, new: StageFrames) -> list[tuple[StageFrames, str, str]]:
    return [(base, "base", _COLOURS[0]), (new, "new", _COLOURS[1])]


def _rounded(values: NDArray[np.float64] | list[float]) -> list[float | None]:
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]
