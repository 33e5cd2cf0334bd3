"""A judged series as a picture: value and baseline above, score below, events marked in both."""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchperf_ros.analysis.anomalies_run import Course, Event
from torchperf_ros.core.anomaly.series_detector import THRESHOLD

_SIZE_INCHES = (12.0, 6.0)
_DOTS_PER_INCH = 130
_INK, _VALUE, _BASELINE, _EVENT = "#52514e", "#2a78d6", "#1baf7a", "#e34948"
_DAY_S = 86_400.0  # the unit of matplotlib's dates, which count from 1970
_DATES_FROM_S = 1e8  # smaller times count from a start, not from 1970
_MOST_LABELS = 12
_THIN_FROM = 20_000  # rows; thinner lines beyond


def save_picture(course: Course, events: list[Event], title: str, path: Path) -> None:
    """Draw one row or more and write a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    seconds = np.asarray(course.time_s)
    dated = bool(seconds.min() >= _DATES_FROM_S)
    order = np.argsort(seconds, kind="stable")  # rows whose time goes backward would draw lines across the picture
    unit_s = _DAY_S if dated else 1.0
    x = seconds[order] / unit_s
    value, score = np.asarray(course.value)[order], np.asarray(course.score)[order]
    baseline, departure = np.asarray(course.baseline)[order], np.asarray(course.departure)[order]
    width = 0.9 if len(x) < _THIN_FROM else 0.4
    above.fill_between(x, baseline - departure, baseline + departure, color=_BASELINE, alpha=0.2, linewidth=0,
                       label="98 % of the departures so far")  # fmt: skip
    above.plot(x, baseline, color=_BASELINE, linewidth=0.8, label="baseline")
    above.plot(x, np.where(np.isfinite(value), value, math.nan), color=_VALUE, linewidth=width, label="value")
    _fit(above, value)
    below.plot(x, score, color=_INK, linewidth=width)
    below.axhline(THRESHOLD, color=_EVENT, linewidth=0.8, linestyle="--")
    below.set_ylim(0, 1)
    below.set_ylabel("score")
    _mark(above, below, events, unit_s)
    if dated:
        below.xaxis_date("UTC")
    else:
        below.ticklabel_format(axis="x", useOffset=False, style="plain")
        below.set_xlabel("time in s")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e3df", linewidth=0.6)
    above.set_title(title, loc="left", fontweight="bold")
    above.legend(frameon=False, fontsize="small", loc="upper left", ncols=4)
    figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")


def _fit(axes: Axes, value: np.ndarray) -> None:
    finite = value[np.isfinite(value)]
    if finite.size:
        low, high = float(finite.min()), float(finite.max())
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - room, high + 3 * room)  # the legend's place


def _mark(above: Axes, below: Axes, events: list[Event], unit_s: float) -> None:
    labelled = sorted(events, key=lambda event: -event.score)[:_MOST_LABELS]
    for number, event in enumerate(events):
        for axes in (above, below):
            axes.axvspan(event.begin_s / unit_s, event.end_s / unit_s, color=_EVENT, alpha=0.18)
        peak = event.peak_s / unit_s
        above.plot([peak], [event.value], "o", color=_EVENT, markersize=5, markerfacecolor="none",
                   label="event (score from 0.5 on)" if number == 0 else None)  # fmt: skip
        if event in labelled:
            above.annotate(event.kind, (peak, event.value), (4, 6), textcoords="offset points", fontsize="x-small",
                           color=_EVENT)  # fmt: skip
