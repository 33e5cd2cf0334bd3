"""A running node as a picture in a terminal, for `torchperf top` and the demo.

Functions from its state to text.
"""

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchperf_ros.api.outcome import WORST_FIRST, Fallback, GuardVerdict, Outcome
from torchperf_ros.api.text import percent
from torchperf_ros.observe.telemetry.node_state import (
    NodeEvent,
    NodeState,
    SeenFrame,
    StageState,
)

HEAD_ROWS: Final = 2
_LEAST_STAGE_ROWS, _MOST_STAGE_ROWS = 3, 15
_STRIP_FROM_ROWS: Final = 5  # in fewer, numbers say more
_MOST_BARS: Final = 6
_FRAME_ROWS: Final = 2
_LEAST_EVENTS, _MOST_EVENT_ROWS = 2, 4
_SMALL: Final = 20  # rows for stages and events, above which both grow
_LEAST_CELLS: Final = 12  # of a bar, and those of the line of memory
_STEADY_MIB_PER_MIN: Final = 1.0
_WIDE: Final = 100
_BARS: Final = " ▁▂▃▄▅▆▇█"
DASH: Final = "-"

_OWN: Final = "green3"
_FALLBACK_COLOURS: Final = {
    Fallback.BACKUP: "deep_sky_blue1",
    Fallback.HOLD_LAST: "gold1",
    Fallback.STOP: "red1",
    Fallback.NONE: "magenta1",
}
_LETTERS: Final = {
    Outcome.LATE: "L",
    Outcome.ERROR: "E",
    Outcome.INVALID: "N",
    Outcome.CRASHED: "C",
    Outcome.HUNG: "H",
    Outcome.BAD_INPUT: "B",
    Outcome.STARTING: "S",
    Outcome.PARTIAL: "P",
}
_HEALTH_COLOURS: Final = {
    "STARTING": "steel_blue1",
    "WAITING": "steel_blue1",
    "NOMINAL": "green3",
    "DEGRADED": "gold1",
    "SAFE_STOP": "red1",
}
_STEP_COLOURS: Final = ("grey62", "steel_blue1", "dark_cyan", "green3", "orchid1", "grey42")
_EVENT_MARKS: Final = {
    "ok": ("·", "green3"),
    "note": ("·", "grey62"),
    "warn": ("▲", "gold1"),
    "error": ("■", "red1"),
    "sabotage": ("✗", "orchid1"),
}


def node_picture(
    node: NodeState,
    width: int,
    height: int,
    title: RenderableType,
    waits: Sequence[str],
    note: Text | None = None,
    began_s: float | None = None,
) -> RenderableType:
    """The whole view, to fill a terminal of this size; in few rows, stages leave out what matters least.

    The `title` is its first row, the `note` stands below in the frame of the events, and `waits` are shown
    as long as no stage is known. `began_s`: seconds since 1970 when the listening began, for the time of
    day of events; None: events show seconds since then.
    """
    head = (title, _numbers(node, width))
    if not node.stages:
        rows = height - HEAD_ROWS - _FRAME_ROWS
        styles = ["bold", *["grey62"] * len(waits)]
        lines = [
            Text(line, style, no_wrap=True, overflow="ellipsis")
            for line, style in zip(waits[: max(rows, 1)], styles, strict=False)
        ]
        return Group(*head, _panel(lines, rows, "steel_blue1", note))
    stages = _in_order(node)
    room = height - HEAD_ROWS - _FRAME_ROWS
    for_events = _LEAST_EVENTS + max(0, room - _SMALL) // 2
    rows = max(_LEAST_STAGE_ROWS, min(_MOST_STAGE_ROWS, (room - for_events) // len(stages)))
    fitting = stages[: max(1, (room - _LEAST_EVENTS) // rows)]
    hidden = ", ".join(stage.name for stage in stages[len(fitting) :])
    panels = [
        _stage_panel(stage, width, rows, explained=not number) for number, stage in enumerate(fitting)
    ]
    count = max(_LEAST_EVENTS, room - rows * len(fitting))
    title = "events" + (f" (no room for {hidden})" if hidden else "")
    colour = "grey42"
    if node.alerts:
        title = f"{len(node.alerts)} alert{'' if len(node.alerts) == 1 else 's'}, then {title}"
        colour = "red1" if any(alert.kind == "error" for alert in node.alerts) else "gold1"
    news = _news(node, width - 4, count, began_s)
    return Group(*head, *panels, _panel(news, count, colour, note, Text(f" {title} ", "bold")))


def whole_height(node: NodeState) -> int:
    """Rows in which nothing of what there is now has to be left out."""
    return (
        HEAD_ROWS
        + (_FRAME_ROWS + 9) * len(node.stages)
        + _FRAME_ROWS
        + _MOST_EVENT_ROWS * (2 + len(node.alerts))
    )


def ends(left: Text, right: Text, width: int) -> Table:
    table = Table.grid(expand=True)
    table.width = width
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True, overflow="ellipsis")
    table.add_row(left, right)
    return table


def node_title(node: NodeState, width: int) -> Table:
    left = Text.assemble((" torchperf top ", "bold black on green3"), (f" {node.name} ", "bold"))
    if not node.heard:
        left.append("● WAITING", "bold steel_blue1")
    elif node.silent:
        left.append(f"● SILENT for {node.silence_s:.0f} s", "bold red1").append(
            "  what follows is old", "red1"
        )
    else:
        health = node.node.get("health", "") or "NO HEALTH"
        left.append(f"● {health.replace('_', ' ')}", f"bold {_HEALTH_COLOURS.get(health, 'grey62')}")
        left.append(f" {node.node.get('lifecycle', '')}", "grey62")
    right = Text()
    if len(node.pids) > 1:
        right.append(f"{len(node.pids)} nodes of this name: pid {', '.join(node.pids)} ", "bold red1")
        return ends(left, right, width)
    if node.restarts:
        right.append(f"node restarts {node.restarts}  ", "bold gold1")
    if pid := node.node.get("pid"):
        right.append("pid ", "grey62").append(f"{pid} ")
    return ends(left, right, width)


def node_line(node: NodeState) -> str:
    if not node.heard:
        others = f"; heard instead: {', '.join(sorted(node.others))}" if node.others else ""
        return f"waiting for {node.name}: nothing heard for {node.elapsed_s:.0f} s{others}"
    parts = [f"{node.elapsed_s:6.1f} s {node.name}"]
    if node.silent:
        parts.append(f"SILENT for {node.silence_s:.0f} s; last known:")
    parts += [_stage_line(stage) for stage in _in_order(node)] or [node.node.get("lifecycle", "no stages")]
    if node.memory:
        parts.append(f"workers {node.memory[-1][1]:.0f} MiB")
    return " | ".join(parts)


def event_line(event: NodeEvent, began_s: float | None = None, *, now: bool = False) -> Text:
    """An event in one line; its time as in `node_picture`, or the word `now`."""
    mark, colour = _EVENT_MARKS.get(event.kind, _EVENT_MARKS["note"])
    at = (
        f"{event.at_s:6.1f} s"
        if began_s is None
        else time.strftime("%H:%M:%S", time.localtime(began_s + event.at_s))
    )
    line = Text.assemble((f"{'now' if now else at:>8} ", "grey62"), (f"{mark} ", colour))
    return line.append(f"{event.source:<10} ", "bold").append(
        event.text, colour if event.kind == "error" else ""
    )


def _news(node: NodeState, width: int, count: int, began_s: float | None) -> list[Text]:
    alerts: list[Text] = []
    for alert in node.alerts:
        alerts += _wrapped(event_line(alert, began_s, now=True), alert, width, count // 2 - len(alerts))
    rows: list[Text] = []
    for event in reversed(node.events):
        rows[:0] = _wrapped(event_line(event, began_s), event, width, count - len(alerts) - len(rows))
    return alerts + rows


def _wrapped(line: Text, event: NodeEvent, width: int, most: int) -> list[Text]:
    if most <= 0:
        return []
    indent, most = len(line) - len(event.text), min(most, _MOST_EVENT_ROWS)
    texts = textwrap.wrap(event.text, max(width - indent, 1), max_lines=most, placeholder=" …") or [""]
    style = _EVENT_MARKS["error"][1] if event.kind == "error" else ""
    return [
        line[:indent].append(texts[0], style),
        *(Text(" " * indent).append(text, style) for text in texts[1:]),
    ]


def _panel(
    lines: Sequence[Text], rows: int, colour: str, note: Text | None, title: Text | None = None
) -> Panel:
    filled = Group(*lines, *[Text()] * (rows - len(lines)))
    return Panel(
        filled,
        title=title,
        title_align="left",
        border_style=colour,
        padding=(0, 1),
        subtitle=note,
        subtitle_align="right",
    )


def _numbers(node: NodeState, width: int) -> Table:
    left, right = Text(" "), Text()
    if recent := [value for value in node.end_to_end_ms if math.isfinite(value)]:
        p50, p99 = np.percentile(recent, (50, 99))
        _fact(_fact(left, "end to end p50", f"{p50:.1f} "), "p99", f"{p99:.1f}").append(" ms", "grey62")
    if node.memory:
        used = [mib for _, mib in node.memory]
        _fact(right, "workers", f"{used[-1]:,.0f} MiB ").append(_spark(used), "deep_sky_blue1")
        if math.isfinite(trend := node.memory_trend):
            colour = "grey62" if abs(trend) < _STEADY_MIB_PER_MIN else "gold1"
            right.append(f" {trend:+.1f} MiB/min ", colour)
    parts = {"node_rss_mib": "node", "cuda_allocated_mib": "cuda", "cuda_free_mib": "free"}
    for label, word in parts.items():
        mib = node.memory_parts.get(label, math.nan)
        if math.isfinite(mib) and (width >= _WIDE or word != "node"):
            _fact(right, f" {word}", f"{mib:,.0f} ")
    return ends(left, right, width)


def _fact(row: Text, name: str, value: str, style: str = "bold") -> Text:
    return row.append(f"{name} ", "grey62").append(value, style)


def _spark(values: list[float]) -> str:
    cells, low, span = min(_LEAST_CELLS, len(values)), min(values), max(values) - min(values)
    highest = [max(part) for part in np.array_split(values, cells)]
    return "".join(
        _BARS[1 + round((one - low) / span * (len(_BARS) - 2)) if span else 1] for one in highest
    )


def _in_order(node: NodeState) -> list[StageState]:
    """The stages in their order, and of each its streams, the worst first."""
    places: dict[str, int] = {}
    for name in node.stages:
        places.setdefault(name.partition(".")[0], len(places))
    healths = [health.name for health in WORST_FIRST]

    def key(stage: StageState) -> tuple[int, int, float]:
        health = healths.index(stage.health) if stage.health in healths else len(healths)
        share = stage.on_time_share
        return places[stage.name.partition(".")[0]], health, 1.0 if math.isnan(share) else share

    return sorted(node.stages.values(), key=key)


def _stage_panel(stage: StageState, width: int, rows: int, *, explained: bool) -> Panel:
    health = stage.health or "NO WORD YET"
    colour = _HEALTH_COLOURS.get(health, "grey62")
    why = _why(stage)
    title = Text.assemble(
        (f" {stage.name} ", "bold"),
        ("● ", colour),
        (f"{health.replace('_', ' ')} ", f"bold {colour}"),
        (f"{why} " if why else "", "" if health == "NOMINAL" else colour),
        overflow="ellipsis",
    )
    below = Text(" a column is a frame, full height its budget ─" if explained else "", "grey42")
    if engine := stage.values.get("engine"):
        _fact(below, " engine", engine)
    if compiling := stage.values.get("compiling"):
        below.append(f", {compiling}", "steel_blue1")
    if math.isfinite(stage.rate_hz):
        below.append(f"  {stage.rate_hz:.1f} ", "bold").append("Hz", "grey62")
    inside = width - 4
    shown = _rows(stage, inside, rows - 2)
    for row in shown:
        row.truncate(inside, overflow="ellipsis")
    return _panel(shown, len(shown), colour, below.append(" ") if below else None, title)


def _why(stage: StageState) -> str:
    return stage.message.partition(": ")[2] or (f"tier {stage.tier}" if stage.tier else "")


def _stage_line(stage: StageState) -> str:
    p50, p99, budget = (short(stage.number(key)) for key in ("p50_ms", "p99_ms", "budget_ms"))
    state = ": ".join(filter(None, [stage.health or DASH, _why(stage)]))
    return f"{stage.name} {state} p50 {p50} p99 {p99} of {budget} ms, {_on_time(stage)} on time"


def _rows(stage: StageState, width: int, count: int) -> list[Text]:
    first = [_latency(stage, width), *_candidate(stage, width), *_last_error(stage)]
    numbers = [_counters(stage), _fallbacks(stage), _workers(stage), *_steps(stage, width)]
    bars = min(max(count - len(first) - len(numbers) - 1, 1), _MOST_BARS)
    strip = _strip(stage, width, bars) if count >= _STRIP_FROM_ROWS else []
    return [*first, *strip, *numbers][:count]


def _candidate(stage: StageState, width: int) -> list[Text]:
    if not (reported := stage.values.get("candidate")):
        return []
    colour = "red1" if any(word in reported for word in ("rolled back", "refused", "given up")) else "bold"
    rows = [Text(line, colour) for line in textwrap.wrap(f"candidate {reported}", width)]
    rows[0].stylize("grey62", 0, len("candidate"))
    return rows + [Text(line) for line in textwrap.wrap(stage.values.get("candidate_pairs", ""), width)]


def _last_error(stage: StageState) -> list[Text]:
    lines = stage.values.get("last_error", "").strip().splitlines()
    last = lines[-1:] if lines and lines[0].startswith("Traceback") else lines[:1]
    return [Text.assemble(("last error ", "grey62"), line) for line in last]


def _latency(stage: StageState, width: int) -> Text:
    row = Text()
    for name in ("p50", "p95", "p99", "max", "budget"):
        _fact(row, name, f"{short(stage.number(f'{name}_ms')):>5}{' ms' * (name == 'budget')}  ")
    p50, p99, budget = map(stage.number, ("p50_ms", "p99_ms", "budget_ms"))
    cells = width - row.cell_len - 1
    if cells < _LEAST_CELLS or not math.isfinite(p50 + p99) or not 0 < budget < math.inf:
        return row
    to_p50, to_p99 = (min(round(cells * value / budget), cells) for value in (p50, p99))
    row.append("━" * to_p50, "green3").append("━" * max(to_p99 - to_p50, 0), "gold1")
    return row.append("╌" * (cells - max(to_p99, to_p50)), "grey35").append("┃", "bold")


def _steps(stage: StageState, width: int) -> list[Text]:
    row, steps = Text(), list(zip(stage.steps_ms.items(), _STEP_COLOURS, strict=False))
    for (name, ms), colour in steps:
        _fact(row, name, f"{ms:.1f} ", f"bold {colour}")
    cells, whole_ms, at_ms = width - row.cell_len - len("ms "), sum(stage.steps_ms.values()), 0.0
    if cells >= _LEAST_CELLS and whole_ms > 0:
        row.append("ms ", "grey62")
        for (_, ms), colour in steps:
            begin, at_ms = round(at_ms / whole_ms * cells), at_ms + ms
            row.append("━" * (round(at_ms / whole_ms * cells) - begin), colour)
    return [row] if steps else []


def _strip(stage: StageState, width: int, bars: int) -> list[Text]:
    """The last frames, one column each, newest right.

    Bars as high as the share of the budget, then what went wrong.
    """
    records = list(stage.recent)[-width:]
    rows = [Text(" " * (width - len(records))) for _ in range(bars + 1)]
    for record in records:
        colour = _OWN if record.fallback is None else _FALLBACK_COLOURS[record.fallback]
        eighths = _eighths(record, bars * 8)
        for level, row in enumerate(rows[:bars]):
            above = (bars - 1 - level) * 8
            row.append(_BARS[min(max(eighths - above, 0), 8)], colour)
        rows[bars].append(_LETTERS.get(record.outcome, " "), f"bold {colour}")
    return rows


def _eighths(record: SeenFrame, most: int) -> int:
    """Height of a frame's bar in eighths of a row, at least 1: deadline on top, a budget before below."""
    late_ms = (
        record.lateness_ms if math.isfinite(record.lateness_ms) else record.total_ms - record.budget_ms
    )
    known = record.budget_ms > 0 and math.isfinite(late_ms)
    return max(1, min(round((1 + late_ms / record.budget_ms) * most), most)) if known else 1


def _counters(stage: StageState) -> Text:
    some = {f"{letter} {_plain(one)}": stage.count(one.word) for one, letter in _LETTERS.items()}
    for key in stage.values:
        if key.startswith("input_") and key.endswith("_missing"):
            some[f"without {key.removeprefix('input_').removesuffix('_missing')}"] = stage.count(key)
    answered = {"answered": stage.count("answered"), **_known({"unanswered": stage.unanswered})}
    return _pairs({**answered, "on time": _on_time(stage), **_known(some)})


def _plain(one: Outcome | Fallback) -> str:
    return one.word.replace("_", " ")


def _on_time(stage: StageState) -> str:
    return percent(stage.on_time_share) if math.isfinite(stage.on_time_share) else DASH


def _fallbacks(stage: StageState) -> Text:
    counts = {one: stage.count(f"fallback_{one.word}") for one in _FALLBACK_COLOURS}
    own = stage.ended - sum(count or 0 for count in counts.values())  # partial and late results, too
    known = None if stage.count("answered") is None else own
    shares = [("own", known, _OWN), *((_plain(one), counts[one], _FALLBACK_COLOURS[one]) for one in counts)]
    row = Text()
    for word, count, colour in shares:
        row.append("■ ", colour if count else "grey35").append_text(_pairs({word: count}))
    refused = [one.word for one in GuardVerdict if one is not GuardVerdict.ACCEPT]
    guard = {f"guard: {word}": stage.count(f"check_{word}") for word in refused}
    some = _known({"stale": stage.count("stale"), **guard})
    return row.append_text(_pairs({"dropped": stage.dropped, **some}))


def _workers(stage: StageState) -> Text:
    row = _pairs({"restarts": stage.count("restarts")})
    states = [key for key in stage.values if key.startswith("worker_") and key.endswith("_state")]
    for number in sorted(key.split("_")[1] for key in states) or ["0"]:
        pid, state = (stage.values.get(f"worker_{number}_{key}") or DASH for key in ("pid", "state"))
        rss = short(stage.number(f"worker_{number}_rss_mib"))
        _fact(_fact(row, f"worker {number}", f"{state.split(' (')[0]} "), "pid", f"{pid} {rss} MiB   ", "")
    return row


def _pairs(values: Mapping[str, int | str | None]) -> Text:
    row = Text()
    for name, value in values.items():
        shown = f"{value:,}" if isinstance(value, int) else value or DASH
        _fact(row, name, f"{shown}  ", "bold" if value else "grey62")
    return row


def _known(counts: Mapping[str, int | None]) -> dict[str, int | str | None]:
    """Counts that are neither zero nor unknown."""
    return {name: count for name, count in counts.items() if count}


def short(number: float) -> str:
    """A number in at most four characters, a dash if it is none."""
    return f"{number:.{int(number < 100)}f}" if math.isfinite(number) else DASH  # noqa: PLR2004
