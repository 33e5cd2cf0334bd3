"""A stage in a frame of a terminal: a pure function from what is known about it to rows of text."""

import math
from typing import Final

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.core.percent import percent
from torchperf_ros.telemetry.stage_state import SeenFrame, StageState

STAGE_ROWS: Final = 9
_STRIP_ROWS: Final = 2
BARS: Final = " ▁▂▃▄▅▆▇█"
_DASH: Final = "-"

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
}
HEALTH_COLOURS: Final = {
    "STARTING": "steel_blue1",
    "WAITING": "steel_blue1",
    "NOMINAL": "green3",
    "DEGRADED": "gold1",
    "SAFE_STOP": "red1",
}


def stage_panel(stage: StageState, width: int, rows: int = STAGE_ROWS, *, explained: bool = False) -> Panel:
    """All that is known about a stage, in a frame.

    Args:
        stage: what to show.
        width: columns.
        rows: how many there are with the frame, at most `STAGE_ROWS`; the least important are left out first.
        explained: whether the frame says how the columns are read.
    """
    health = stage.health or "NO WORD YET"
    colour = HEALTH_COLOURS.get(health, "grey62")
    title = Text.assemble(
        (f" {stage.name} ", "bold"), ("● ", colour), (health.replace("_", " "), f"bold {colour}"), " "
    )
    if stage.tier:
        title.append("tier ", "grey62").append(f"{stage.tier} ", "bold")
    if engine := stage.values.get("engine"):
        title.append("engine ", "grey62").append(f"{engine} ", "bold")
    if math.isfinite(stage.rate_hz):
        title.append(f"{stage.rate_hz:.1f} ", "bold").append("Hz ", "grey62")
    if stage.health == "STARTING" and (progress := stage.values.get("progress")):
        title.append(f"{progress} ", "grey62")
    inside = width - 4
    shown = _rows(stage, inside, rows - 2)
    for row in shown:
        row.truncate(inside, overflow="ellipsis")
    return Panel(
        Group(*shown), title=title, title_align="left", border_style=colour, width=width, padding=(0, 1),
        subtitle=Text(" a column is a frame, full height its budget ", "grey42") if explained else None,
        subtitle_align="right",
    )  # fmt: skip


def stage_line(stage: StageState) -> str:
    """The same in one line, where there is no terminal to draw in."""
    answered, on_time = stage.count("answered"), stage.count("on_time")
    share = percent(on_time / answered) if answered and on_time is not None else _DASH
    progress = f" ({stage.values.get('progress', '')})" if stage.health == "STARTING" else ""
    return (
        f"{stage.name} {stage.health or _DASH}{progress} {stage.tier} p50 {_short(stage.values.get('p50_ms'))}"
        f" p99 {_short(stage.values.get('p99_ms'))} of {_short(stage.values.get('budget_ms'))} ms, {share} on time"
    )


def _rows(stage: StageState, width: int, count: int) -> list[Text]:
    """Those that matter most, in the order in which they are read."""
    latency, numbers = _latency(stage, width), [_counters(stage), _fallbacks(stage), _workers(stage)]
    if count >= STAGE_ROWS - 2:
        return [latency, *_strip(stage, width), *numbers]
    if count == STAGE_ROWS - 3:
        return [latency, *_strip(stage, width), *numbers[:2]]
    return [latency, *numbers][:count]


def _latency(stage: StageState, width: int) -> Text:
    """p50 and p99 in numbers, and as a bar on the scale of the budget."""
    row = Text()
    for key, unit in (("p50_ms", ""), ("p95_ms", ""), ("p99_ms", ""), ("max_ms", ""), ("budget_ms", " ms")):
        row.append(f"{key.removesuffix('_ms')} ", "grey62").append(
            f"{_short(stage.values.get(key)):>5}{unit}  ", "bold"
        )
    p50, p99, budget = (_float(stage.values.get(key)) for key in ("p50_ms", "p99_ms", "budget_ms"))
    cells = width - row.cell_len - 1
    if cells < 10 or not all(math.isfinite(x) for x in (p50, p99, budget)) or budget <= 0:  # noqa: PLR2004 - no room
        return row
    to_p50, to_p99 = (min(round(cells * value / budget), cells) for value in (p50, p99))
    row.append("━" * to_p50, "green3").append("━" * max(to_p99 - to_p50, 0), "gold1")
    row.append("╌" * (cells - max(to_p99, to_p50)), "grey35").append("┃", "bold")
    return row


def _strip(stage: StageState, width: int) -> list[Text]:
    """The last frames, one column each, newest right: bars as high as the share of the budget, then what went wrong."""
    records = list(stage.recent)[-width:]
    rows = [Text(" " * (width - len(records))) for _ in range(_STRIP_ROWS + 1)]
    for record in records:
        colour = _colour(record)
        eighths = _eighths(record)
        for level, row in enumerate(rows[:_STRIP_ROWS]):
            above = (_STRIP_ROWS - 1 - level) * 8
            row.append(BARS[min(max(eighths - above, 0), 8)], colour)
        rows[_STRIP_ROWS].append(_LETTERS.get(record.outcome, " "), f"bold {colour}")
    return rows


def _eighths(record: SeenFrame) -> int:
    """Height of a frame's bar in eighths of a row, never none: the top is its budget."""
    if not record.budget_ms > 0 or not math.isfinite(record.total_ms):
        return 1
    return max(1, min(round(record.total_ms / record.budget_ms * _STRIP_ROWS * 8), _STRIP_ROWS * 8))


def _colour(record: SeenFrame) -> str:
    return _OWN if record.fallback is None else _FALLBACK_COLOURS[record.fallback]


def _counters(stage: StageState) -> Text:
    answered, on_time = stage.count("answered"), stage.count("on_time")
    row = Text()
    _pair(row, "answered", answered)
    _pair(row, "on time", None if not answered or on_time is None else percent(on_time / answered))
    for outcome, letter in _LETTERS.items():
        if count := stage.count(outcome.word):
            _pair(row, f"{letter} {outcome.word.replace('_', ' ')}", count)
    return row


def _fallbacks(stage: StageState) -> Text:
    """What was published, in the colours of the strip; then the frames that no one started."""
    row = Text()
    shares = [("own", "on_time", _OWN)]
    shares += [(f.word.replace("_", " "), f"fallback_{f.word}", colour) for f, colour in _FALLBACK_COLOURS.items()]
    for name, key, colour in shares:
        row.append("■ ", colour if stage.count(key) else "grey35")
        _pair(row, name, stage.count(key))
    superseded, stale = stage.count("superseded"), stage.count("stale")
    _pair(row, "dropped", None if superseded is None or stale is None else superseded + stale)
    if stale:
        _pair(row, "of them stale", stale)
    return row


def _workers(stage: StageState) -> Text:
    row = Text()
    _pair(row, "restarts", stage.count("restarts"))
    numbers = sorted({key.split("_")[1] for key in stage.values if key.startswith("worker_") and key.count("_") > 1})
    for number in numbers or ["0"]:
        pid, state, rss = (stage.values.get(f"worker_{number}_{key}") or _DASH for key in ("pid", "state", "rss_mib"))
        row.append(f"worker {number} ", "grey62").append(f"{state.split(' (')[0]} ", "bold")
        row.append("pid ", "grey62").append(f"{pid} ").append(f"{_short(rss)} MiB   ")
    return row


def _pair(row: Text, name: str, value: int | str | None) -> None:
    shown = f"{value:,}" if isinstance(value, int) else value or _DASH
    row.append(f"{name} ", "grey62").append(f"{shown}  ", "bold" if value else "grey62")


def _float(text: str | None) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        return math.nan


def _short(text: str | None) -> str:
    number = _float(text)
    if not math.isfinite(number):
        return _DASH
    return f"{number:.1f}" if number < 100 else f"{number:.0f}"  # noqa: PLR2004 - four characters
