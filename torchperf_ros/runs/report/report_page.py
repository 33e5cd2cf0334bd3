"""The page of `torchperf report`: one file that needs no network, not larger than 8 MB."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros import __version__
from torchperf_ros.frame.outcome import Fallback, Outcome
from torchperf_ros.frame.percent import percent
from torchperf_ros.runs.run_log import MEMORY, STEPS, UNKNOWN, LoggedAlert, RunLog, RunLogError, StageLog

if TYPE_CHECKING:
    from torchperf_ros.runs.report.report_inputs import InputPicture

MOST_BYTES: Final = 8_000_000
MOST_ROWS: Final = 4000
"""Of the table of many logs."""
_TEMPLATE: Final = Path(__file__).with_name("page.html")
_POINTS, _SIDE, _LEAST_POINTS = 4000, 360, 50
_WORST: Final = 10
_MOST_ANOMALIES: Final = 300
_MOST_DOCUMENT: Final = 20_000
_NS_PER_S: Final = 1e9
_NS_PER_MS: Final = 1_000_000
_PUNCTUAL_MS: Final = 1.0
_SAME_MS: Final = 8.0  # a frame's stamp is known from outside to some milliseconds
_GOOD_SHARE: Final = 0.999
_LONGEST_PATH: Final = 1024
_LINKED: Final = ("evidence", "folder", "path", "file")
_LEVEL_CLASS: Final = {"OK": "good", "WARN": "", "ERROR": "bad", "STALE": "bad"}
_INSTEAD: Final = {
    Fallback.BACKUP: "the backup worker's result", Fallback.HOLD_LAST: "the last result held",
    Fallback.STOP: "a stop output", Fallback.NONE: "nothing at all",
}  # fmt: skip
_HEAD: Final = [("log", ""), ("stage", ""), *((name, "n") for name in (
    "frames", "on time", "p50 ms", "p99 ms", "longest ms", "budget ms", "latest answer ms", "anomalies",
))]  # fmt: skip
"""The columns of a table of runs, and their style."""

Block = dict[str, Any]
"""A part of a section, with its `kind`, as `page.html` draws it."""


class Page:
    """Sections and figures on their way into `page.html`, which reports and comparisons share."""

    def __init__(self) -> None:
        """Begin an empty page."""
        self.top: list[Block] = []
        self._sections: list[dict[str, Any]] = []
        self._figures: list[str] = []

    def section(self, title: str, blocks: Sequence[Block | None], anchor: str = "", subtitle: str = "") -> None:
        """Append a section; blocks that are None are left out."""
        shown = [block for block in blocks if block]
        self._sections.append({"title": title, "blocks": shown, "id": anchor, "subtitle": subtitle})

    def plots(self, *pictures: tuple[str, Any]) -> Block:
        """A block of plotly figures with their titles, side by side if there are several."""
        shown = []
        for title, figure in pictures:
            shown.append((title, f"figure{len(self._figures)}"))
            figure.update_layout(template=None)
            text = json.dumps(figure.to_plotly_json(), separators=(",", ":"), allow_nan=False)
            self._figures.append(f'"{shown[-1][1]}":{text}'.replace("</", "<\\/"))
        return {"kind": "plots", "plots": shown}

    def render(self, title: str, subtitle: str, footer: str, links: Sequence[tuple[str, str]] = ()) -> str:
        """The page; `links` are names and places."""
        import jinja2
        from plotly.offline import get_plotlyjs

        template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
        return template.render(
            title=title, subtitle=f"{subtitle} In a picture: drag to zoom, double-click to go back.", links=links,
            top=self.top, sections=self._sections, footer=footer, plotly=get_plotlyjs(),
            figures="{" + ",".join(self._figures) + "}",
        )  # fmt: skip


@dataclass(frozen=True)
class StageFigures:
    """A stage in numbers; times in ms, NaN where no frame has them.

    Attributes:
        frames: answered ones, without those that came while it started.
        starting: and those.
        on_time_share: 0 to 1, of `frames`.
        worst_lateness_ms: the latest answer; negative: before its deadline.
        outcomes, fallbacks: how many, without zeros and `on_time`, the most frequent first.
    """

    frames: int
    starting: int
    on_time_share: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    budget_ms: float
    worst_lateness_ms: float
    outcomes: dict[Outcome, int]
    fallbacks: dict[Fallback, int]


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


def write_report(
    runs: list[RunLog], path: Path, progress: Callable[[str], None], overview: Overview | None = None
) -> int:
    """Write the page; series are thinned, and pictures made smaller, until it fits. Returns its size in bytes.

    Where `runs` are only some, the `overview` is of all. `progress` is called with what is done now.

    Raises:
        RunLogError: there is too much even so; fewer logs would do.
        OSError: the file cannot be written.
    """
    points, side = _POINTS, _SIDE
    while points >= _LEAST_POINTS:
        page = Page()
        if overview is not None:
            _overview(page, overview, {run.name: f"#run{number}" for number, run in enumerate(runs)})
        elif len(runs) > 1:
            page.top.append(_side_by_side(runs))
        for number, run in enumerate(runs):
            progress(f"drawing {run.name}")
            _section(page, run, f"run{number}", points, side)
        title, count = ", ".join(run.name for run in runs), len(runs)
        if overview is not None:
            title, count = overview.title, len({row.run for row in overview.rows})
        begin_ns = min((run.span_ns[0] for run in runs if run.span_ns[0]), default=0)
        data = page.render(
            f"How the models did: {title}",
            f"{count:,} {'log' if count == 1 else 'logs'}, from {_utc(begin_ns)} on; all times are UTC.",
            f"torchperf report {__version__}. Long series are thinned so that the first, last, lowest and highest value"
            " of each stretch stay; every number is of all frames.",
            [(run.name, f"#run{number}") for number, run in enumerate(runs)] if len(runs) > 1 and not overview else (),
        ).encode()  # fmt: skip
        if len(data) <= MOST_BYTES:
            path.write_bytes(data)
            return len(data)
        points, side = points // 4, side // 2
    msg = f"{len(runs)} logs make a page of more than {MOST_BYTES // 1_000_000} MB; report on fewer at a time"
    raise RunLogError(msg)


def stage_figures(stage: StageLog) -> StageFigures:
    """Count and measure a stage's frames."""
    counted = stage.counted
    total_ms = stage.total_ms[counted & np.isfinite(stage.total_ms)]
    p50, p95, p99, highest = np.percentile(total_ms, (50, 95, 99, 100)) if len(total_ms) else [math.nan] * 4
    frames = stage.frames[counted]
    seen = {name: zip(*np.unique(frames[name], return_counts=True), strict=True) for name in ("outcome", "fallback")}
    often = {name: sorted(counts, key=lambda one: -int(one[1])) for name, counts in seen.items()}
    return StageFigures(
        int(counted.sum()), int((~counted).sum()),
        float(stage.on_time[counted].mean()) if counted.any() else math.nan,
        float(p50), float(p95), float(p99), float(highest), stage.budget_ms,
        float(np.fmax.reduce(stage.lateness_ms[counted], initial=math.nan)),
        {Outcome(one): int(count) for one, count in often["outcome"] if one != Outcome.ON_TIME},
        {Fallback(one): int(count) for one, count in often["fallback"] if one != UNKNOWN},
    )  # fmt: skip


def in_words(run: RunLog) -> list[str]:
    """The run in a few sentences, the most important first."""
    sentences = [_stage_words(stage) for stage in run.stages if len(stage)] or ["No frames were answered in this log."]
    if run.restarts:
        sentences.append(f"The node was restarted {_count(run.restarts, 'time')} meanwhile.")
    if len(run.memory_t_ns):
        sentences.append(_memory_words(run))
    bad = [anomaly for anomaly in run.anomalies if anomaly.level != "OK"]
    if bad:
        errors = sum(anomaly.level == "ERROR" for anomaly in bad)
        names = list(dict.fromkeys(anomaly.name for anomaly in bad))
        more = f" and {len(names) - 3} other kinds" if len(names) > 3 else ""  # noqa: PLR2004
        anomalies = _count(len(bad), "anomaly", "anomalies")
        sentences.append(f"{anomalies} reported, {errors} of them errors: {', '.join(names[:3])}{more}.")
    elif not any("anomal" in text for text in run.missing):
        sentences.append("No anomalies were reported.")
    return sentences


def worst_frames(stage: StageLog, count: int) -> NDArray[np.int64]:
    """Indexes of the frames that a person should look at first.

    Frames answered more than 1 ms after their deadline come first, by lateness; then those that were not on time, the
    emptier the answer the earlier (none, stop, hold_last, backup), and the longer they took; then the slowest others.
    """
    late = np.nan_to_num(stage.lateness_ms, nan=-math.inf)
    past = np.where(late > _PUNCTUAL_MS, late, 0.0)
    missed = stage.counted & ~stage.on_time
    fallback = np.asarray(stage.frames["fallback"], dtype=np.float64) + 1.0  # 0: own result ... 4: none
    total_ms = np.nan_to_num(stage.total_ms, nan=-math.inf)
    order = np.lexsort((total_ms, np.where(missed, fallback, 0.0), missed, past))[::-1]
    return np.asarray(order[stage.counted[order]][:count])


def _section(page: Page, run: RunLog, anchor: str, points: int, side: int) -> None:
    """One run: words, numbers, pictures, anomalies, worst frames."""
    from torchperf_ros.runs.report import report_pictures
    from torchperf_ros.runs.report.report_inputs import input_pictures

    pictures: dict[int, InputPicture] = {}
    why = "no recorded inputs beside these figures, so the worst frames are shown without pictures"
    if run.recordings:
        places = [(stage, index) for stage in run.stages for index in worst_frames(stage, _WORST)]
        wanted = {int(stage.frames["stamp_ns"][at]): int(stage.frames["t_ns"][at]) for stage, at in places}
        wanted.pop(0, None)  # unknown
        pictures, why = input_pictures(run.recordings, wanted.items(), side)
    notes = [*run.missing, *run.troubles, *([why] if why else [])]
    blocks: list[Block | None] = [
        {"kind": "words", "lines": in_words(run)},
        {"kind": "note", "title": "Notes", "items": notes} if notes else None,
    ]
    for stage in run.stages:
        if not len(stage):
            continue
        figures, worst = stage_figures(stage), worst_frames(stage, _WORST)
        shown = "Latency of every frame, tier and health" if stage.health else "Latency of every frame, and its tier"
        blocks += [
            {"kind": "heading", "text": stage.name}, _tiles(figures),
            page.plots((shown, report_pictures.timeline(stage, points))),
            page.plots(("How long answers took, by tier", report_pictures.distribution(stage)),
                       ("Where the time goes", report_pictures.waterfall(stage))),
        ]  # fmt: skip
        if len(worst):
            blocks += [
                {"kind": "heading", "text": f"The {len(worst)} worst frames of {stage.name}"},
                {"kind": "soft", "text": "Answered past the deadline first, then those not on time, the emptiest "
                                         "answer first, then the slowest others."},
                {"kind": "frames", "frames": [_frame(stage, int(index), pictures) for index in worst]},
            ]  # fmt: skip
    if np.isfinite(np.concatenate([[math.nan], *run.memory.values()])).any():
        blocks += [{"kind": "heading", "text": "Memory"}, page.plots(("", report_pictures.memory(run, points)))]
    if run.anomalies:
        blocks += [{"kind": "heading", "text": "Anomalies"}, _anomalies(run)]
    blocks += [_document(path) for path in run.documents]
    begin_ns, end_ns = run.span_ns
    facts = [
        f"node {run.node}", f"{_utc(begin_ns)} UTC", f"{(end_ns - begin_ns) / _NS_PER_S:,.1f} s",
        *(f"{name} {version}" for name, version in run.versions.items() if version),
    ]  # fmt: skip
    page.section(run.name, blocks, anchor, " · ".join(facts))


def _side_by_side(runs: Sequence[RunLog]) -> Block:
    """All runs, a row for each stage."""
    rows = [_row(OverviewRow(run.name, stage.name, stage_figures(stage), 0), f"#run{number}")[:-1]
            for number, run in enumerate(runs) for stage in run.stages]  # fmt: skip
    return {"kind": "table", "head": _HEAD[:-1], "rows": rows}


def _overview(page: Page, overview: Overview, anchors: Mapping[str, str]) -> None:
    """Many runs in one picture and one table, so that only the worst need a section each."""
    from torchperf_ros.runs.report.report_pictures import latencies

    rows = overview.rows
    frames = sum(row.figures.frames for row in rows)
    on_time = sum(row.figures.on_time_share * row.figures.frames for row in rows if row.figures.frames)
    share = on_time / frames if frames else math.nan
    page.top.append({"kind": "tiles", "tiles": [
        (f"{len({row.run for row in rows}):,}", "logs", ""),
        (f"{len(overview.failed):,}", "failed", "bad" if overview.failed else ""),
        (f"{frames:,}", "frames answered, of all stages", ""),
        (_share(share), "on time", "good" if share >= _GOOD_SHARE else "bad"),
        (f"{sum(row.anomalies for row in rows):,}", "anomalies", ""),
    ]})  # fmt: skip
    if overview.failed:
        page.top.append({"kind": "note", "title": "Not replayed", "items": overview.failed})
    if rows:
        shown, left = rows[:MOST_ROWS], len(rows) - MOST_ROWS
        page.top += [
            page.plots(("p99 of every log, the worst first", latencies(shown))),
            {"kind": "soft", "text": "The worst logs come first; those that are links have a section below. A click "
                                     "on a column sorts."},
            {"kind": "table", "sortable": True, "rows": [_row(row, anchors.get(row.run, "")) for row in shown],
             "head": _HEAD, "more": f"{left:,} more rows, of the best, are left out." if left > 0 else ""},
        ]  # fmt: skip


def _row(row: OverviewRow, href: str) -> list[Any]:
    """Cells of `_HEAD`."""
    one = row.figures
    late = f"{one.worst_lateness_ms:+.1f}" if math.isfinite(one.worst_lateness_ms) else "-"
    cells = [
        (f"{one.frames:,}", one.frames), (_share(one.on_time_share), one.on_time_share),
        *((_ms(value), value) for value in (one.p50_ms, one.p99_ms, one.max_ms, one.budget_ms)),
        (late, one.worst_lateness_ms), (f"{row.anomalies:,}", row.anomalies),
    ]  # fmt: skip
    numbers = [{"text": text, "css": "n", **({"value": f"{value:.6g}"} if math.isfinite(value) else {})}
               for text, value in cells]  # fmt: skip
    return [{"text": row.run, "href": href} if href else row.run, row.stage, *numbers]


def _tiles(figures: StageFigures) -> Block:
    late = figures.worst_lateness_ms
    return {"kind": "tiles", "tiles": [
        (f"{figures.frames:,}", "frames answered", ""),
        (_share(figures.on_time_share), "on time", "good" if figures.on_time_share >= _GOOD_SHARE else "bad"),
        (f"{_ms(figures.p50_ms)} ms", "p50", ""),
        (f"{_ms(figures.p95_ms)} ms", "p95", ""),
        (f"{_ms(figures.p99_ms)} ms", "p99", ""),
        (f"{_ms(figures.max_ms)} ms", f"longest{_of(figures.budget_ms)}", ""),
        (f"{late:+.1f} ms" if math.isfinite(late) else "-", "latest answer, to its deadline",
         "bad" if late > _PUNCTUAL_MS else ""),
        (f"{sum(figures.fallbacks.values()):,}", "fallbacks", ""),
    ]}  # fmt: skip


def _frame(stage: StageLog, index: int, pictures: Mapping[int, "InputPicture"]) -> dict[str, Any]:
    row = stage.frames[index]
    outcome, t_ns = Outcome(int(row["outcome"])), int(row["t_ns"])
    fallback = "" if row["fallback"] == UNKNOWN else f" → {Fallback(int(row['fallback'])).word.replace('_', ' ')}"
    steps = ", ".join(f"{name.removesuffix('_ms')} {row[name]:.1f}" for name in STEPS if math.isfinite(row[name]))
    time = f"{_utc(t_ns)[11:]}.{t_ns // _NS_PER_MS % 1000:03d}"
    shown: dict[str, Any] = {
        "took": f"{_ms(row['total_ms'])} ms", "of": _of(row["budget_ms"]),
        "css": "good" if outcome == Outcome.ON_TIME else "bad", "outcome": outcome.word.replace("_", " ") + fallback,
        "lines": [f"frame {int(row['seq'])}, {time}, {stage.tier_name(int(row['tier']))}", steps or "steps unknown",
                  *([stage.reasons[t_ns]] if t_ns in stage.reasons else [])],
    }  # fmt: skip
    picture = pictures.get(int(row["stamp_ns"]))
    if picture is not None:
        words = f"{picture.topic}, stamp {picture.off_ms:+.1f} ms from the frame's"
        off = f"a neighbour, {picture.off_ms:+.0f} ms off" if abs(picture.off_ms) > _SAME_MS else ""
        shown |= {"picture": picture.uri, "words": words, "off": off}
    return shown


def _anomalies(run: RunLog) -> Block:
    ranked = sorted(run.anomalies, key=lambda anomaly: (anomaly.level == "OK", anomaly.level != "ERROR"))
    kept = sorted(ranked[:_MOST_ANOMALIES], key=lambda anomaly: anomaly.t_ns)
    left = len(run.anomalies) - len(kept)
    return {
        "kind": "table", "head": [(name, "") for name in ("UTC", "level", "what", "message")],
        "rows": [_anomaly(anomaly, run.source) for anomaly in kept],
        "more": f"{left:,} more, of the mildest, are left out." if left else "",
    }  # fmt: skip


def _anomaly(anomaly: LoggedAlert, source: Path | None) -> list[Any]:
    places = [_existing(value, source) for key, value in anomaly.values.items() if any(word in key for word in _LINKED)]
    message = {
        "text": anomaly.message, "css": "text",
        "details": "; ".join(f"{key} {value}" for key, value in anomaly.values.items() if value),
        "links": [(f"evidence {place.name}", place.as_uri()) for place in places if place],
    }  # fmt: skip
    level = {"text": anomaly.level, "tag": _LEVEL_CLASS.get(anomaly.level, "")}
    return [{"text": _utc(anomaly.t_ns)[11:], "css": "time"}, level, anomaly.name, message]


def _existing(value: str, source: Path | None) -> Path | None:
    """The file or folder that a value names, if it is there: as it stands, or beside the log."""
    if not value or "\n" in value or len(value) > _LONGEST_PATH:
        return None
    beside = [source.parent / Path(value).name] if source is not None else []
    return next((path.resolve() for path in (Path(value), *beside) if path.exists()), None)


def _document(path: Path) -> Block:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        text = f"cannot be read: {error.strerror or error}"
    cut = f"\n... {len(text) - _MOST_DOCUMENT:,} more characters" if len(text) > _MOST_DOCUMENT else ""
    return {"kind": "document", "name": path.name, "text": text[:_MOST_DOCUMENT] + cut}


def _stage_words(stage: StageLog) -> str:
    figures = stage_figures(stage)
    if not figures.frames:
        return f"{stage.name}: {_count(figures.starting, 'frame')}, all of them while it started."
    of_budget = f", of {figures.budget_ms:.0f} ms" if math.isfinite(figures.budget_ms) else ", without a deadline"
    text = (
        f"{stage.name}: {_count(figures.frames, 'frame')}, {percent(figures.on_time_share, 2)} on time; half of the "
        f"answers took {figures.p50_ms:.1f} ms or less, 99 % {figures.p99_ms:.1f} ms or less, the longest "
        f"{figures.max_ms:.1f} ms{of_budget}."
    )
    if figures.outcomes:
        reasons = ", ".join(f"{count:,} {one.word.replace('_', ' ')}" for one, count in figures.outcomes.items())
        instead = ", ".join(f"{_INSTEAD[one]} ({count:,})" for one, count in figures.fallbacks.items())
        text += f" Not on time: {reasons}" + (f"; published instead: {instead}." if instead else ".")
    worst = figures.worst_lateness_ms
    if math.isfinite(worst):
        text += (f" The latest answer left {worst:.1f} ms after its deadline." if worst > 0
                 else " Every answer left before its deadline.")  # fmt: skip
    if stage.dropped:
        text += f" {_count(stage.dropped, 'frame')} more were never started: a newer one came, or they were too old."
    if figures.starting:
        text += f" {_count(figures.starting, 'frame')} came while it started and are not counted."
    return text


def _memory_words(run: RunLog) -> str:
    label, slope = run.used_memory[0], run.memory_slope
    if not label:
        return "Memory was sampled, but no figure is known."
    text = f"{MEMORY[label]}: {np.nanmin(run.memory[label]):,.0f} to {np.nanmax(run.memory[label]):,.0f} MiB"
    return f"{text}, trend {slope:+,.1f} MiB per hour." if math.isfinite(slope) else f"{text}; too short for a trend."


def _utc(t_ns: int) -> str:
    """A time in words, to the second."""
    return f"{datetime.fromtimestamp(t_ns / _NS_PER_S, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _count(number: int, word: str, words: str = "") -> str:
    return f"{number:,} {word if number == 1 else words or word + 's'}"


def _ms(value: float) -> str:
    return f"{value:,.1f}" if math.isfinite(value) else "-"


def _of(budget_ms: float) -> str:
    return f", of {_ms(budget_ms)} ms" if math.isfinite(budget_ms) else ""


def _share(value: float) -> str:
    return percent(value, 2) if math.isfinite(value) else "-"
