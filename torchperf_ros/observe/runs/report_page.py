"""The page of `torchperf report`: one file that needs no network, not larger than 8 MB."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchperf_ros import __version__
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict, Outcome
from torchperf_ros.api.text import percent
from torchperf_ros.observe.runs import report_words as words
from torchperf_ros.observe.runs.page import Block, Cell, Page, number_cell, table
from torchperf_ros.observe.runs.run_log import (
    CANDIDATE,
    STEPS,
    UNKNOWN,
    LoggedAlert,
    RunLog,
    RunLogError,
    StageLog,
)

# Keys of a frame in `page.html`: its input or a neighbour as a JPEG (`data:` URI), and which one it
# is.
Picture = Mapping[str, str]
# Makes pictures of frames that are chosen by stage and index, their longest side in pixels.
#
# Returns them by trigger and stamp in ns, and why some are missing, empty if none is.
InputPictures = Callable[
    [RunLog, Mapping[str, Collection[int]], int], tuple[Mapping[tuple[str, int], Picture], str]
]
MOST_BYTES: Final = 8_000_000
# Of the table of many logs.
MOST_ROWS: Final = 4000
_POINTS, _SIDE, _LEAST_POINTS = 4000, 360, 50
_WORST: Final = 10
_MOST_ANOMALIES: Final = 300
_MOST_DOCUMENT: Final = 20_000
_NS_PER_S: Final = 1e9
_NS_PER_MS: Final = 1_000_000
_LONGEST_PATH: Final = 1024
_LINKED: Final = ("evidence", "folder", "path", "file")
_LEVEL_CLASS: Final = {"OK": "good", "WARN": "", "ERROR": "bad", "STALE": "bad"}
# The columns of a table of runs.
_HEADS: Final = (
    "log",
    "stage",
    "frames",
    "on time",
    "p50 ms",
    "p99 ms",
    "longest ms",
    "budget ms",
    "latest answer ms",
    "anomalies",
)


@dataclass(frozen=True)
class OverviewRow:
    run: str
    stage: str
    figures: words.StageSummary
    anomalies: int


@dataclass(frozen=True)
class Overview:
    """What ran, a row for each stage, the worst first; and what failed, by name and reason."""

    rows: Sequence[OverviewRow]
    failed: Sequence[tuple[str, str]] = ()
    title: str = ""


def write_report(
    runs: list[RunLog],
    path: Path,
    progress: Callable[[str], None],
    pictures: InputPictures,
    overview: Overview | None = None,
) -> int:
    """Write the page.

    Series are thinned, and pictures made smaller, until it fits. Returns its size in bytes.

    A log of several runs of the node is several. Where `runs` are only some, the `overview` is of all.
    `progress` is called with what is done now; `pictures` shows the inputs of the worst frames.

    Raises:
        RunLogError: there is too much even so; fewer logs would do.
        OSError: the file cannot be written.
    """
    title, count = ", ".join(run.name for run in runs), len(runs)
    if overview is not None:
        title, count = overview.title, len({row.run for row in overview.rows})
    runs = [life for run in runs for life in run.lives()]
    points, side = _POINTS, _SIDE
    while points >= _LEAST_POINTS:
        page = Page()
        if overview is not None:
            _overview(page, overview, {run.name: f"#run{number}" for number, run in enumerate(runs)})
        else:
            several = len(runs) > 1
            page.top += [_verdicts(run, f"{run.name}: " * several) for run in runs]
            if several:
                rows = [
                    _row(OverviewRow(run.name, stage.name, words.stage_figures(stage), 0), f"#run{number}")[
                        :-1
                    ]
                    for number, run in enumerate(runs)
                    for stage in run.stages
                ]
                page.top.append(table(_HEADS[:-1], rows))
        for number, run in enumerate(runs):
            progress(f"drawing {run.name}")
            _section(page, run, f"run{number}", points, pictures, side)
        begin_ns = min((run.span_ns[0] for run in runs if run.span_ns[0]), default=0)
        versions = dict.fromkeys(
            f"{name} {word}" for run in runs for name, word in run.versions.items() if word
        )
        data = page.render(
            f"How the models did: {title}",
            f"{count:,} {'log' if count == 1 else 'logs'}, from {_utc(begin_ns)} on; all times are UTC.",
            f"{' · '.join([f'torchperf report {__version__}', *versions])}. Long series are thinned so that"
            " the first, last, lowest and highest value of each stretch stay; every number is of all"
            " frames.",
            (
                [(run.name, f"#run{number}") for number, run in enumerate(runs)]
                if len(runs) > 1 and not overview
                else ()
            ),
        ).encode()
        if len(data) <= MOST_BYTES:
            path.write_bytes(data)
            return len(data)
        points, side = points // 4, side // 2
    raise RunLogError(
        f"{len(runs)} logs make a page of more than {MOST_BYTES // 1_000_000} MB; report on fewer at a time"
    )


def _section(page: Page, run: RunLog, anchor: str, points: int, pictures: InputPictures, side: int) -> None:
    from torchperf_ros.observe.runs import report_pictures as draw

    stages = [stage for stage in run.stages if len(stage)]
    worst = {stage.name: words.worst_frames(stage, _WORST) for stage in stages}
    shown_by_stamp, why = pictures(run, worst, side)
    notes = [*run.missing, *run.troubles, *([why] if why else [])]
    blocks: list[Block | None] = []
    for stage in stages:
        blocks += [{"kind": "heading", "text": stage.name}, _tiles(words.stage_figures(stage))]
        if stage.candidate:
            blocks.append(_candidate(stage.candidate))
    blocks.append({"kind": "words", "lines": words.in_words(run)})
    if run.anomalies:
        blocks += [{"kind": "heading", "text": "Anomalies"}, _anomalies(run)]
    blocks.append({"kind": "note", "title": "Notes", "items": notes} if notes else None)
    for stage in stages:
        none = "" if stage.on_time.any() else "; no frame was on time"
        steps = draw.waterfall(stage) or f"There is no frame with all of its steps known{none}."
        shown = (
            "Latency of every frame, tier and health"
            if stage.health
            else "Latency of every frame, and its tier"
        )
        blocks += [
            {"kind": "heading", "text": f"{stage.name} over time"},
            page.plots((f"{shown}{none}", draw.timeline(stage, points, run.anomalies))),
            page.plots(
                (f"How long answers took, by tier{none}", draw.distribution(stage)),
                ("Where the time goes", steps),
            ),
        ]
    if np.isfinite(np.concatenate([[math.nan], *run.memory.values()])).any():
        blocks += [{"kind": "heading", "text": "Memory"}, page.plots(("", draw.memory(run, points)))]
    for stage in stages:
        if frames := [_frame(stage, int(index), shown_by_stamp) for index in worst[stage.name]]:
            blocks.append(
                {
                    "kind": "frames",
                    "title": f"The {len(frames)} worst frames of {stage.name}",
                    "frames": frames,
                    "folded": words.verdict(stage)[0] == "good",
                    "pictured": any("picture" in frame for frame in frames),
                    "soft": (
                        "Answered past the deadline first, then those not on time, the emptiest answer"
                        " first, then the slowest others."
                    ),
                }
            )
    blocks += [_document(path) for path in run.documents]
    begin_ns, end_ns = run.span_ns
    span = f"{_utc(begin_ns)} UTC · {(end_ns - begin_ns) / _NS_PER_S:,.1f} s"
    page.section(run.name, blocks, anchor, f"node {run.node} · {span}")


def _candidate(status: Mapping[str, str]) -> Block:
    rows: list[list[Cell]] = [
        [title, {"text": status[key], "css": "text"}] for key, title in CANDIDATE.items() if status.get(key)
    ]
    return table(("two versions", "at the end"), rows, css="stack")


def _verdicts(run: RunLog, prefix: str) -> Block:
    lines = [words.verdict(stage) for stage in run.stages if len(stage)] or [
        ("bad", "no frame was answered")
    ]
    return {"kind": "verdict", "lines": [(css, prefix + text) for css, text in lines]}


def _overview(page: Page, overview: Overview, anchors: Mapping[str, str]) -> None:
    rows = overview.rows
    frames = sum(row.figures.came for row in rows)
    on_time = sum(row.figures.on_time_share * row.figures.came for row in rows if row.figures.frames)
    share = on_time / frames if frames else math.nan
    count = len({row.run for row in rows})
    line = f"{count:,} {'log' if count == 1 else 'logs'}, {_share(share)} on time"
    line += f"; {len(overview.failed):,} could not be replayed" if overview.failed else ""
    page.top.append(
        {"kind": "verdict", "lines": [("bad" if overview.failed else words.share_word(share), line)]}
    )
    page.top.append(
        {
            "kind": "tiles",
            "tiles": [
                (f"{count:,}", "logs", ""),
                (f"{len(overview.failed):,}", "failed", "bad" if overview.failed else ""),
                (f"{frames:,}", "frames that came, of all stages", ""),
                (_share(share), "on time", words.share_word(share)),
                (f"{sum(row.anomalies for row in rows):,}", "anomalies", ""),
            ],
        }
    )
    if overview.failed:
        page.top.append({"kind": "note", "title": "Not replayed", "items": overview.failed})
    if rows:
        shown, left = rows[:MOST_ROWS], len(rows) - MOST_ROWS
        page.top += [
            {
                "kind": "soft",
                "text": (
                    "The worst logs come first; those that are links have a section below. A click "
                    "on a column sorts."
                ),
            },
            table(
                _HEADS,
                [_row(row, anchors.get(row.run, "")) for row in shown],
                sortable=True,
                more=f"{left:,} more rows, of the best, are left out." if left > 0 else "",
            ),
        ]


def _row(row: OverviewRow, href: str) -> list[Cell]:
    """Cells of `_HEADS`."""
    one = row.figures
    late = f"{one.worst_lateness_ms:+.1f}" if math.isfinite(one.worst_lateness_ms) else "-"
    cells = [
        (f"{one.came:,}", one.came),
        (_share(one.on_time_share), one.on_time_share),
        *((_ms(value), value) for value in (one.p50_ms, one.p99_ms, one.max_ms, one.budget_ms)),
        (late, one.worst_lateness_ms),
        (f"{row.anomalies:,}", row.anomalies),
    ]
    name: Cell = {"text": row.run, "href": href} if href else row.run
    return [name, row.stage, *(number_cell(text, value) for text, value in cells)]


def _tiles(figures: words.StageSummary) -> Block:
    late = figures.worst_lateness_ms
    return {
        "kind": "tiles",
        "tiles": [
            (f"{figures.frames:,}", "frames answered", ""),
            *([(f"{figures.superseded:,}", "had no answer", "bad")] if figures.superseded else []),
            (_share(figures.on_time_share), "on time", words.share_word(figures.on_time_share)),
            (f"{_ms(figures.p50_ms)} ms", "p50", ""),
            (f"{_ms(figures.p95_ms)} ms", "p95", ""),
            (f"{_ms(figures.p99_ms)} ms", "p99", ""),
            (f"{_ms(figures.max_ms)} ms", f"longest{_of(figures.budget_ms)}", ""),
            (
                f"{late:+.1f} ms" if math.isfinite(late) else "-",
                "latest answer, to its deadline",
                "bad" if late > words.PUNCTUAL_MS else "",
            ),
            (f"{sum(figures.fallbacks.values()):,}", "fallbacks", ""),
            *(
                [
                    (
                        f"{sum(figures.checks.values()):,}",
                        "not accepted by the guard",
                        "bad" if figures.checks else "good",
                    )
                ]
                if figures.guarded
                else []
            ),
        ],
    }


def _frame(stage: StageLog, index: int, pictures: Mapping[tuple[str, int], Picture]) -> dict[str, Any]:
    row = stage.frames[index]
    outcome, t_ns = Outcome(int(row["outcome"])), int(row["t_ns"])
    fallback = (
        "" if row["fallback"] == UNKNOWN else f" → {Fallback(int(row['fallback'])).word.replace('_', ' ')}"
    )
    check = GuardVerdict(int(row["check"])) if row["check"] != UNKNOWN else GuardVerdict.ACCEPT
    guard = "" if check is GuardVerdict.ACCEPT else f" → guard: {check.word}"
    steps = ", ".join(
        f"{name.removesuffix('_ms')} {row[name]:.1f}" for name in STEPS if math.isfinite(row[name])
    )
    time = f"{_utc(t_ns)[11:]}.{t_ns // _NS_PER_MS % 1000:03d}"
    late = f"{row['lateness_ms']:.1f} ms after its deadline" if row["lateness_ms"] > 0 else ""
    shown: dict[str, Any] = {
        "took": f"{_ms(row['total_ms'])} ms",
        "of": _of(row["budget_ms"]),
        "css": "good" if outcome in IN_TIME and not guard else "bad",
        "outcome": outcome.word.replace("_", " ") + fallback + guard,
        "lines": [
            f"frame {int(row['seq'])}, {time}, {stage.tier_name(int(row['tier']))}",
            steps or "steps unknown",
            *([late] if late else []),
            *([stage.reasons[t_ns]] if t_ns in stage.reasons else []),
        ],
    }
    return {**shown, **pictures.get((stage.trigger, int(row["stamp_ns"])), {})}


def _anomalies(run: RunLog) -> Block:
    ranked = sorted(run.anomalies, key=lambda anomaly: (anomaly.level == "OK", anomaly.level != "ERROR"))
    kept = sorted(ranked[:_MOST_ANOMALIES], key=lambda anomaly: anomaly.t_ns)
    left = len(run.anomalies) - len(kept)
    return table(
        ("UTC", "level", "what", "message"),
        [_anomaly(anomaly, run.source) for anomaly in kept],
        css="stack",
        # It scrolls by itself: the charts are what people look for next.
        low=len(kept) > _WORST,
        more=f"{left:,} more, of the mildest, are left out." if left else "",
    )


def _anomaly(anomaly: LoggedAlert, source: Path | None) -> list[Cell]:
    places = [
        _existing(value, source)
        for key, value in anomaly.values.items()
        if any(word in key for word in _LINKED)
    ]
    message: Cell = {
        "text": anomaly.message,
        "css": "text",
        "details": "; ".join(f"{key} {value}" for key, value in anomaly.values.items() if value),
        "links": [(f"evidence {place.name}", place.as_uri()) for place in places if place],
    }
    level: Cell = {"text": anomaly.level, "tag": _LEVEL_CLASS.get(anomaly.level, "")}
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


def _utc(t_ns: int) -> str:
    return f"{datetime.fromtimestamp(t_ns / _NS_PER_S, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _ms(value: float) -> str:
    return f"{value:,.1f}" if math.isfinite(value) else "-"


def _of(budget_ms: float) -> str:
    return f", of {_ms(budget_ms)} ms" if math.isfinite(budget_ms) else ""


def _share(value: float) -> str:
    return percent(value, 2) if math.isfinite(value) else "-"
