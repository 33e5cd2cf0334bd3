"""`torchperf report`: what a run says, in words and as one page that needs no network, not larger than 8 MB.

Comparisons, drives, training and roll-outs make their pages of the same sections of blocks and figures
(`Page`).
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros import __version__
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict, Outcome
from torchperf_ros.api.text import percent
from torchperf_ros.observe.runs.run_log import (
    CANDIDATE,
    MEMORY,
    STEPS,
    UNKNOWN,
    LoggedAlert,
    RunLog,
    RunLogError,
    StageLog,
    whole_file,
)
from torchperf_ros.stage.frame_table import flow_of

_TEMPLATE: Final = Path(__file__).with_name("page.html")

# A part of a section, with its `kind`, as `page.html` draws it.
Block = dict[str, Any]
# Of a table: a text, or a text with how it looks, as `page.html` draws it.
Cell = str | dict[str, Any]


def number_cell(text: str, value: float = math.nan) -> Cell:
    """A cell that stands on the right; a table that can be sorted goes by `value`."""
    return {"text": text, "css": "n", **({"value": f"{value:.6g}"} if math.isfinite(value) else {})}


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], **look: Any) -> Block:  # noqa: ANN401
    """A table; the head of a column of numbers stands on the right, too. `look`: see `page.html`."""
    first = rows[0] if rows else [""] * len(heads)
    styles = ["n" if isinstance(cell, dict) and cell.get("css") == "n" else "" for cell in first]
    return {"kind": "table", "head": list(zip(heads, styles, strict=True)), "rows": rows, **look}


class Page:
    """Sections and figures on their way into `page.html`, which reports and comparisons share."""

    def __init__(self) -> None:
        self.top: list[Block] = []
        self._sections: list[dict[str, Any]] = []
        self._figures: list[str] = []

    def section(
        self, title: str, blocks: Sequence[Block | None], anchor: str = "", subtitle: str = ""
    ) -> None:
        """Append a section; blocks that are None are left out."""
        shown = [block for block in blocks if block]
        self._sections.append({"title": title, "blocks": shown, "id": anchor, "subtitle": subtitle})

    def plots(self, *pictures: tuple[str, Any]) -> Block:
        """A block of plotly figures, or of words in their place, with titles; several stand side by side."""
        shown = []
        for title, figure in pictures:
            if isinstance(figure, str):
                shown.append((title, "", figure))
                continue
            shown.append((title, f"figure{len(self._figures)}", ""))
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
            title=title,
            subtitle=f"{subtitle} In a picture: drag to zoom, double-click to go back.",
            links=links,
            top=self.top,
            sections=self._sections,
            footer=footer,
            plotly=get_plotlyjs(),
            figures="{" + ",".join(self._figures) + "}",
        )


PUNCTUAL_MS: Final = 1.0
_GOOD_SHARE: Final = 0.999
_FAIR_SHARE: Final = 0.99
_NUMBER: Final = re.compile(r"\d+(\.\d+)?")
_INSTEAD: Final = {
    Fallback.BACKUP: "the backup worker's result",
    Fallback.HOLD_LAST: "the last result held",
    Fallback.STOP: "a stop output",
    Fallback.NONE: "nothing at all",
}


@dataclass(frozen=True)
class StageSummary:
    """A stage in numbers; times in ms, NaN where no frame has them.

    Attributes:
        frames: answered ones, without those that came while it started.
        starting: and those.
        superseded: and those that had no answer, as a newer one came first; 0 where the log does not say.
        on_time_share: 0 to 1, of `came`.
        worst_lateness_ms: the latest answer; negative: before its deadline.
        outcomes, fallbacks, checks: how many, without zeros, `on_time` and `accept`, the most frequent
        first.
        guarded: whether the stage had a guard.
        incomplete: that ran without a synchronised input.
    """

    frames: int
    starting: int
    superseded: int
    on_time_share: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    budget_ms: float
    worst_lateness_ms: float
    outcomes: dict[Outcome, int]
    fallbacks: dict[Fallback, int]
    checks: dict[GuardVerdict, int]
    guarded: bool
    incomplete: int

    @property
    def came(self) -> int:
        return self.frames + self.superseded


def stage_figures(stage: StageLog) -> StageSummary:
    counted = stage.counted
    total_ms = stage.total_ms[counted & np.isfinite(stage.total_ms)]
    p50, p95, p99, highest = np.percentile(total_ms, (50, 95, 99, 100)) if len(total_ms) else [math.nan] * 4
    frames = stage.frames[counted]
    answered, superseded = len(frames), _superseded(stage)
    seen = {
        name: zip(*np.unique(frames[name], return_counts=True), strict=True)
        for name in ("outcome", "fallback", "check")
    }
    often = {name: sorted(counts, key=lambda one: -int(one[1])) for name, counts in seen.items()}
    return StageSummary(
        answered,
        int((~counted).sum()),
        superseded,
        int(stage.on_time[counted].sum()) / (answered + superseded) if answered else math.nan,
        float(p50),
        float(p95),
        float(p99),
        float(highest),
        stage.budget_ms,
        float(np.fmax.reduce(stage.lateness_ms[counted], initial=math.nan)),
        {Outcome(one): int(count) for one, count in often["outcome"] if one != Outcome.ON_TIME},
        {Fallback(one): int(count) for one, count in often["fallback"] if one != UNKNOWN},
        {
            GuardVerdict(one): int(count)
            for one, count in often["check"]
            if one not in {UNKNOWN, GuardVerdict.ACCEPT}
        },
        bool((frames["check"] != UNKNOWN).any()),
        int((frames["missing_inputs"] > 0).sum()),
    )


def verdict(stage: StageLog) -> tuple[str, str]:
    """`good`, `fair` or `bad`, and in one line how often a stage was on time, and why not more often."""
    figures, stops = stage_figures(stage), stage.safe_stops
    if not figures.frames:
        return "bad", f"{stage.name}: no frame was answered after the start"
    share, late_ms = figures.on_time_share, figures.worst_lateness_ms
    text = f"{stage.name}: {percent(share, 2)} on time"
    causes = [_cause(stage)] if figures.outcomes else []
    causes += [flow_of(stage.frames[stage.counted], figures.superseded).words] if figures.superseded else []
    if figures.superseded > sum(figures.outcomes.values()):
        causes.reverse()
    text += f": {'; '.join(causes)}" if causes else ""
    text += f"; an answer left {late_ms:.1f} ms after its deadline" if late_ms > PUNCTUAL_MS else ""
    text += f"; the guard did not accept every output: {_counts(figures.checks)}" if figures.checks else ""
    if stops:
        return "bad", f"{text}; SAFE_STOP for {sum(end - begin for begin, end in stops) / NS_PER_S:.1f} s"
    if GuardVerdict.UNAVOIDABLE in figures.checks:
        return "bad", text
    flawed = late_ms > PUNCTUAL_MS or figures.checks
    return "fair" if share_word(share) == "good" and flawed else share_word(share), text


def share_word(share: float) -> str:
    """`good`, `fair` or `bad`: what a share of frames on time, 0 to 1, is; the design promises 99.9 %."""
    return "good" if share >= _GOOD_SHARE else "fair" if share >= _FAIR_SHARE else "bad"


def _cause(stage: StageLog) -> str:
    """Why most frames that were not on time were not; reasons that differ in their numbers are the same."""
    missed = stage.frames[stage.counted & ~stage.on_time]
    reasons = [stage.reasons[t_ns] for t_ns in missed["t_ns"].tolist() if stage.reasons.get(t_ns)]
    if not reasons and stage.last_reason:
        return stage.last_reason
    if not reasons:
        return _counts(stage_figures(stage).outcomes)
    ((kind, count),) = Counter(_NUMBER.sub("", reason) for reason in reasons).most_common(1)
    text = next(reason for reason in reasons if _NUMBER.sub("", reason) == kind)
    return text if count == len(missed) else f"{text} ({count:,} of {len(missed):,} misses)"


def _superseded(stage: StageLog) -> int:
    """How many frames had no answer; where the log does not count them, those whose numbers are missing."""
    if stage.dropped is not None:
        return stage.dropped
    seq: NDArray[np.int64] = np.unique(stage.frames["seq"][stage.frames["seq"] != UNKNOWN])
    return int(np.ptp(seq)) + 1 - len(seq) if len(seq) == len(stage.frames) > 0 else 0


def in_words(run: RunLog) -> list[str]:
    """What the figures of a run do not say, in a few sentences, the most important first."""
    sentences = [text for stage in run.stages if (text := _stage_words(stage))]
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

    Frames answered more than 1 ms after their deadline come first, by lateness; then those that were not on
    time, the emptier the answer the earlier (none, stop, hold_last, backup), and the longer they took; then
    those whose output the guard did not accept; then the slowest others.
    """
    late = np.nan_to_num(stage.lateness_ms, nan=-math.inf)
    past = np.where(late > PUNCTUAL_MS, late, 0.0)
    missed = stage.counted & ~stage.on_time
    fallback = np.asarray(stage.frames["fallback"], dtype=np.float64) + 1.0  # 0: own result ... 4: none
    total_ms = np.nan_to_num(stage.total_ms, nan=-math.inf)
    # the harder the guard had to do it, the earlier
    refused = np.maximum(stage.frames["check"], 0) * stage.counted
    order = np.lexsort((total_ms, np.where(missed, fallback, 0.0), refused, missed, past))[::-1]
    return np.asarray(order[stage.counted[order]][:count])


def _stage_words(stage: StageLog) -> str:
    figures, text = stage_figures(stage), ""
    if figures.outcomes:
        instead = ", ".join(f"{_INSTEAD[one]} ({count:,})" for one, count in figures.fallbacks.items())
        text = f" Not on time: {_counts(figures.outcomes)}" + (
            f"; published instead: {instead}." if instead else "."
        )
    if figures.incomplete:
        text += f" {_count(figures.incomplete, 'frame')} had a synchronised input missing."
    if figures.starting:
        text += f" {_count(figures.starting, 'frame')} came while it started and are not counted."
    return f"{stage.name}:{text}" if text else ""


def _counts(found: Mapping[Any, int]) -> str:
    """Outcomes or verdicts of the guard, for example `2 late, 1 bad input`."""
    return ", ".join(f"{count:,} {one.word.replace('_', ' ')}" for one, count in found.items())


def _memory_words(run: RunLog) -> str:
    label, slope = run.used_memory[0], run.memory_slope
    if not label:
        return "Memory was sampled, but no figure is known."
    text = (
        f"{MEMORY[label]}: {np.nanmin(run.memory[label]):,.0f} to {np.nanmax(run.memory[label]):,.0f} MiB"
    )
    return (
        f"{text}, trend {slope:+,.1f} MiB per hour."
        if math.isfinite(slope)
        else f"{text}; too short for a trend."
    )


def _count(number: int, word: str, words: str = "") -> str:
    return f"{number:,} {word if number == 1 else words or word + 's'}"


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
    figures: StageSummary
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
                    _row(OverviewRow(run.name, stage.name, stage_figures(stage), 0), f"#run{number}")[:-1]
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
            with whole_file(path) as part:
                part.write_bytes(data)
            return len(data)
        points, side = points // 4, side // 2
    raise RunLogError(
        f"{len(runs)} logs make a page of more than {MOST_BYTES // 1_000_000} MB; report on fewer at a time"
    )


def _section(page: Page, run: RunLog, anchor: str, points: int, pictures: InputPictures, side: int) -> None:
    from torchperf_ros.observe.runs import report_pictures as draw

    stages = [stage for stage in run.stages if len(stage)]
    worst = {stage.name: worst_frames(stage, _WORST) for stage in stages}
    shown_by_stamp, why = pictures(run, worst, side)
    notes = [*run.missing, *run.troubles, *([why] if why else [])]
    blocks: list[Block | None] = []
    for stage in stages:
        blocks += [{"kind": "heading", "text": stage.name}, _tiles(stage_figures(stage))]
        if stage.candidate:
            blocks.append(_candidate(stage.candidate))
    blocks.append({"kind": "words", "lines": in_words(run)})
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
                    "folded": verdict(stage)[0] == "good",
                    "pictured": any("picture" in frame for frame in frames),
                    "soft": (
                        "Answered past the deadline first, then those not on time, the emptiest answer"
                        " first, then the slowest others."
                    ),
                }
            )
    blocks += [_document(path) for path in run.documents]
    begin_ns, end_ns = run.span_ns
    span = f"{_utc(begin_ns)} UTC · {(end_ns - begin_ns) / NS_PER_S:,.1f} s"
    page.section(run.name, blocks, anchor, f"node {run.node} · {span}")


def _candidate(status: Mapping[str, str]) -> Block:
    rows: list[list[Cell]] = [
        [title, {"text": status[key], "css": "text"}] for key, title in CANDIDATE.items() if status.get(key)
    ]
    return table(("two versions", "at the end"), rows, css="stack")


def _verdicts(run: RunLog, prefix: str) -> Block:
    lines = [verdict(stage) for stage in run.stages if len(stage)] or [("bad", "no frame was answered")]
    return {"kind": "verdict", "lines": [(css, prefix + text) for css, text in lines]}


def _overview(page: Page, overview: Overview, anchors: Mapping[str, str]) -> None:
    rows = overview.rows
    frames = sum(row.figures.came for row in rows)
    on_time = sum(row.figures.on_time_share * row.figures.came for row in rows if row.figures.frames)
    share = on_time / frames if frames else math.nan
    count = len({row.run for row in rows})
    line = f"{count:,} {'log' if count == 1 else 'logs'}, {_share(share)} on time"
    line += f"; {len(overview.failed):,} could not be replayed" if overview.failed else ""
    page.top.append({"kind": "verdict", "lines": [("bad" if overview.failed else share_word(share), line)]})
    page.top.append(
        {
            "kind": "tiles",
            "tiles": [
                (f"{count:,}", "logs", ""),
                (f"{len(overview.failed):,}", "failed", "bad" if overview.failed else ""),
                (f"{frames:,}", "frames that came, of all stages", ""),
                (_share(share), "on time", share_word(share)),
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


def _tiles(figures: StageSummary) -> Block:
    late = figures.worst_lateness_ms
    return {
        "kind": "tiles",
        "tiles": [
            (f"{figures.frames:,}", "frames answered", ""),
            *([(f"{figures.superseded:,}", "had no answer", "bad")] if figures.superseded else []),
            (_share(figures.on_time_share), "on time", share_word(figures.on_time_share)),
            (f"{_ms(figures.p50_ms)} ms", "p50", ""),
            (f"{_ms(figures.p95_ms)} ms", "p95", ""),
            (f"{_ms(figures.p99_ms)} ms", "p99", ""),
            (f"{_ms(figures.max_ms)} ms", f"longest{_of(figures.budget_ms)}", ""),
            (
                f"{late:+.1f} ms" if math.isfinite(late) else "-",
                "latest answer, to its deadline",
                "bad" if late > PUNCTUAL_MS else "",
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
    time = f"{_utc(t_ns)[11:]}.{t_ns // NS_PER_MS % 1000:03d}"
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
    return f"{datetime.fromtimestamp(t_ns / NS_PER_S, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _ms(value: float) -> str:
    return f"{value:,.1f}" if math.isfinite(value) else "-"


def _of(budget_ms: float) -> str:
    return f", of {_ms(budget_ms)} ms" if math.isfinite(budget_ms) else ""


def _share(value: float) -> str:
    return percent(value, 2) if math.isfinite(value) else "-"
