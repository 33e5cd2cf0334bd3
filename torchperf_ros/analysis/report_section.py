"""One run as a part of the page: words, numbers, pictures, anomalies, worst frames."""

import html
import math
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from torchperf_ros.analysis.report_figures import distribution, memory, timeline, waterfall
from torchperf_ros.analysis.report_inputs import InputPicture
from torchperf_ros.analysis.report_summary import StageFigures, in_words, stage_figures, worst_frames
from torchperf_ros.analysis.run_log import STEPS, UNKNOWN, LoggedAnomaly, RunLog, StageLog
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.core.percent import percent

WORST = 10
_MOST_ANOMALIES = 300
_MOST_DOCUMENT = 20_000
_NS_PER_S = 1e9
_EVIDENCE = ("evidence", "folder", "path", "file")
_LEVEL_CLASS = {"OK": "good", "WARN": "", "ERROR": "bad", "STALE": "bad"}
_SAME_MS = 8.0  # a frame's stamp is known from outside to some milliseconds
_GOOD_SHARE = 0.999

AddFigure = Callable[[go.Figure], str]
"""Takes a figure into the page and returns the HTML of its place."""


def section(
    run: RunLog, anchor: str, add: AddFigure, pictures: Mapping[int, InputPicture], troubles: list[str], points: int
) -> str:
    """The HTML of one run.

    Args:
        run: what to tell.
        anchor: the section's id.
        add: takes figures.
        pictures: the inputs of the worst frames by stamp.
        troubles: what is missing beside what the run itself says.
        points: at most so many for each series.
    """
    begin_ns, end_ns = run.span_ns
    told = [
        f"node {run.node}", f"{utc(begin_ns)} UTC", f"{(end_ns - begin_ns) / _NS_PER_S:,.1f} s",
        *(f"{name} {version}" for name, version in run.versions.items() if version),
    ]  # fmt: skip
    parts = [f'<section id="{anchor}"><h2>{_text(run.name)}</h2><p class="soft">{_text(" · ".join(told))}</p>']
    parts.append('<div class="card">' + "".join(f"<p>{_text(line)}</p>" for line in in_words(run)) + "</div>")
    if odd := [*run.missing, *run.troubles, *troubles]:
        items = "".join(f"<li>{_text(line)}</li>" for line in odd)
        parts.append(f'<div class="note"><b>Notes</b><ul>{items}</ul></div>')
    parts += [_stage(stage, add, pictures, points) for stage in run.stages if len(stage)]
    if np.isfinite(np.concatenate([[math.nan], *run.memory.values()])).any():
        parts.append(f'<h3>Memory</h3><div class="card">{add(memory(run, points))}</div>')
    if run.anomalies:
        parts.append(_anomalies(run))
    parts += [_document(path) for path in run.documents]
    return "\n".join([*parts, "</section>"])


def comparison(runs: list[RunLog]) -> str:
    """All runs side by side, a row for each stage."""
    head = "".join(
        f'<th class="{css}">{name}</th>'
        for name, css in (("log", ""), ("stage", ""), *((n, "n") for n in (
            "frames", "on time", "p50 ms", "p99 ms", "longest ms", "budget ms", "latest answer ms")))
    )  # fmt: skip
    rows = []
    for number, run in enumerate(runs):
        for stage in run.stages:
            figures = stage_figures(stage)
            numbers = [
                f"{figures.frames:,}", _share(figures.on_time_share), *(_ms(value) for value in (
                    figures.p50_ms, figures.p99_ms, figures.max_ms, figures.budget_ms)),
                f"{figures.worst_lateness_ms:+.1f}" if math.isfinite(figures.worst_lateness_ms) else "-",
            ]  # fmt: skip
            cells = "".join(f'<td class="n">{text}</td>' for text in numbers)
            rows.append(
                f'<tr><td><a href="#run{number}">{_text(run.name)}</a></td><td>{_text(stage.name)}</td>{cells}</tr>'
            )
    return f'<div class="card scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def utc(t_ns: int) -> str:
    """A time in words, to the second."""
    return f"{datetime.fromtimestamp(t_ns / _NS_PER_S, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _stage(stage: StageLog, add: AddFigure, pictures: Mapping[int, InputPicture], points: int) -> str:
    figures = stage_figures(stage)
    pair = (("How long answers took, by tier", distribution(stage)), ("Where the time goes", waterfall(stage)))
    places = [f'<div class="card"><h4>{name}</h4>{add(figure)}</div>' for name, figure in pair]
    worst = worst_frames(stage, WORST)
    cards = "".join(_frame(stage, int(index), pictures) for index in worst)
    shown = "Latency of every frame, tier and health" if stage.health else "Latency of every frame, and its tier"
    explained = (
        "Answered past the deadline first, then those not on time, the emptiest answer first, then the slowest others."
    )
    return "\n".join([
        f"<h3>{_text(stage.name)}</h3>", _figures(figures),
        f'<div class="card"><h4>{shown}</h4>{add(timeline(stage, points))}</div>',
        f'<div class="pair">{"".join(places)}</div>',
        f"<h3>The {len(worst)} worst frames of {_text(stage.name)}</h3>" if len(worst) else "",
        f'<p class="soft small">{explained}</p><div class="frames">{cards}</div>' if len(worst) else "",
    ])  # fmt: skip


def _figures(figures: StageFigures) -> str:
    late = figures.worst_lateness_ms
    share_class = "good" if figures.on_time_share >= _GOOD_SHARE else "bad"
    shown = [
        (f"{figures.frames:,}", "frames answered", ""),
        (_share(figures.on_time_share), "on time", share_class),
        (f"{_ms(figures.p50_ms)} ms", "p50", ""),
        (f"{_ms(figures.p95_ms)} ms", "p95", ""),
        (f"{_ms(figures.p99_ms)} ms", "p99", ""),
        (f"{_ms(figures.max_ms)} ms", f"longest{_of(figures.budget_ms)}", ""),
        (
            f"{late:+.1f} ms" if math.isfinite(late) else "-",
            "latest answer, to its deadline",
            "bad" if late > 1 else "",
        ),
        (f"{sum(figures.fallbacks.values()):,}", "fallbacks", ""),
    ]
    return '<div class="figures">' + "".join(
        f'<div><b class="{css}">{value}</b><span>{name}</span></div>' for value, name, css in shown
    ) + "</div>"  # fmt: skip


def _frame(stage: StageLog, index: int, pictures: Mapping[int, InputPicture]) -> str:
    row = {name: column[index] for name, column in stage.frames.items()}
    picture = pictures.get(int(row["stamp_ns"]))
    if picture is None:
        shown = '<div class="none">no picture of its input</div>'
    else:
        words = f"{picture.topic}, stamp {picture.off_ms:+.1f} ms from the frame's"
        shown = f'<img src="{picture.uri}" alt="{_text(words)}" title="{_text(words)}">'
        if abs(picture.off_ms) > _SAME_MS:
            shown += f'<div class="off">a neighbour, {picture.off_ms:+.0f} ms off</div>'
    outcome = Outcome(int(row["outcome"])).word.replace("_", " ")
    fallback = "" if row["fallback"] == UNKNOWN else f" → {Fallback(int(row['fallback'])).word.replace('_', ' ')}"
    steps = ", ".join(f"{name.removesuffix('_ms')} {row[name]:.1f}" for name in STEPS if math.isfinite(row[name]))
    reason = f"<br>{_text(stage.reasons[int(row['t_ns'])])}" if int(row["t_ns"]) in stage.reasons else ""
    css = "bad" if row["outcome"] != Outcome.ON_TIME else "good"
    return (
        f'<div class="frame">{shown}<div class="text"><b>{_ms(row["total_ms"])} ms</b>{_of(row["budget_ms"])} '
        f'<span class="tag {css}">{outcome}{fallback}</span><div class="small soft">frame {int(row["seq"])}, '
        f"{utc(int(row['t_ns']))[11:]}.{int(row['t_ns']) // 1_000_000 % 1000:03d}, "
        f"{_text(stage.tier_name(int(row['tier'])))}<br>{steps or 'steps unknown'}{reason}</div></div></div>"
    )


def _anomalies(run: RunLog) -> str:
    ranked = sorted(run.anomalies, key=lambda anomaly: (anomaly.level == "OK", anomaly.level != "ERROR"))
    kept = sorted(ranked[:_MOST_ANOMALIES], key=lambda anomaly: anomaly.t_ns)
    rows = "".join(_anomaly(anomaly, run.source) for anomaly in kept)
    left = len(run.anomalies) - len(kept)
    more = f'<p class="soft">{left:,} more, of the mildest, are left out.</p>' if left else ""
    head = "<tr><th>UTC</th><th>level</th><th>what</th><th>message</th></tr>"
    return f'<h3>Anomalies</h3><div class="card scroll"><table>{head}{rows}</table>{more}</div>'


def _anomaly(anomaly: LoggedAnomaly, source: Path | None) -> str:
    values = "; ".join(f"{key} {value}" for key, value in anomaly.values.items() if value)
    links = " ".join(
        f'<a href="{_text(target.as_uri())}">evidence {_text(target.name)}</a>'
        for key, value in anomaly.values.items()
        if any(word in key for word in _EVIDENCE) and (target := _existing(value, source)) is not None
    )
    details = f"<details><summary>values</summary>{_text(values)}</details>" if values else ""
    return (
        f'<tr><td class="time">{utc(anomaly.t_ns)[11:]}</td><td><span class="tag '
        f'{_LEVEL_CLASS.get(anomaly.level, "")}">{_text(anomaly.level)}</span></td><td>{_text(anomaly.name)}</td>'
        f'<td class="text">{_text(anomaly.message)} {links}{details}</td></tr>'
    )


def _existing(value: str, source: Path | None) -> Path | None:
    """The file or folder that a value names, if it is there: as it stands, or beside the log."""
    if not value or "\n" in value or len(value) > 1024:  # noqa: PLR2004 - no path
        return None
    beside = [source.parent / Path(value).name] if source is not None else []
    candidates = [path for path in (Path(value), *beside) if path.is_absolute() or path.exists()]
    return next((path.resolve() for path in candidates if path.exists()), None)


def _document(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        text = f"cannot be read: {error.strerror or error}"
    cut = f"\n... {len(text) - _MOST_DOCUMENT:,} more characters" if len(text) > _MOST_DOCUMENT else ""
    return f"<details><summary>{_text(path.name)}</summary><pre>{_text(text[:_MOST_DOCUMENT] + cut)}</pre></details>"


def _text(text: str) -> str:
    return html.escape(text)


def _ms(value: float) -> str:
    return f"{value:,.1f}" if math.isfinite(value) else "-"


def _of(budget_ms: float) -> str:
    return f", of {_ms(budget_ms)} ms" if math.isfinite(budget_ms) else ""


def _share(value: float) -> str:
    return percent(value, 2) if math.isfinite(value) else "-"
