"""A running node as a picture in a terminal: a pure function from what is known about it to rows of text."""

import math
from typing import Final

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchperf_ros.telemetry.event_panel import events_panel
from torchperf_ros.telemetry.stage_panel import BARS, HEALTH_COLOURS, STAGE_ROWS, stage_line, stage_panel
from torchperf_ros.telemetry.watched_node import WatchedNode

_HEAD_ROWS: Final = 2
_EVENT_FRAME_ROWS: Final = 2
_LEAST_EVENTS: Final = 2
_LEAST_STAGE_ROWS: Final = 3
_SPARK_CELLS: Final = 12
_STEADY_MIB_PER_MIN: Final = 1.0
_WIDE: Final = 100


def node_picture(
    node: WatchedNode, width: int, height: int, *, began_s: float = 0.0, where: str = "", paused: bool = False
) -> RenderableType:
    """The whole view, to fill a terminal of this size.

    Args:
        node: what to show.
        width: columns.
        height: rows; with few of them, stages leave out what matters least.
        began_s: seconds since 1970 when the onlooker began, for the time of day of events.
        where: what is listened to, shown while nothing is heard.
        paused: whether the picture is an old one.
    """
    keys = Text(" paused: p goes on " if paused else " q quits  p pauses ", "bold gold1" if paused else "grey42")
    if not node.heard or not node.stages:
        inside = height - _HEAD_ROWS - _EVENT_FRAME_ROWS
        return Group(_head(node, width), _numbers(node, width), _waiting(node, where, inside, keys))
    stages = list(node.stages.values())
    room = height - _HEAD_ROWS - _EVENT_FRAME_ROWS - _LEAST_EVENTS
    rows = max(_LEAST_STAGE_ROWS, min(STAGE_ROWS, room // len(stages)))
    fitting = stages[: max(1, room // rows)]
    events = max(_LEAST_EVENTS, height - _HEAD_ROWS - _EVENT_FRAME_ROWS - rows * len(fitting))
    title = "anomalies"
    if hidden := [stage.name for stage in stages[len(fitting) :]]:
        title = f"anomalies (no room for {', '.join(hidden)})"
    panels = [stage_panel(stage, width, rows, explained=not number) for number, stage in enumerate(fitting)]
    return Group(
        _head(node, width), _numbers(node, width), *panels, events_panel(node.events, events, title, keys, began_s)
    )  # fmt: skip


def node_line(node: WatchedNode) -> str:
    """The node in one line, where there is no terminal to draw in."""
    if not node.heard:
        return f"waiting for {node.name}: nothing heard for {node.elapsed_s:.0f} s{_others(node)}"
    parts = [f"{node.elapsed_s:6.1f} s {node.name}"]
    if node.silent:
        parts.append(f"SILENT for {node.silence_s:.0f} s; last known:")
    parts += [stage_line(stage) for stage in node.stages.values()] or [node.node.get("lifecycle", "no stages")]
    if math.isfinite(node.memory_mib):
        parts.append(f"workers {node.memory_mib:.0f} MiB")
    return " | ".join(parts)


def _head(node: WatchedNode, width: int) -> Table:
    row = _row(width)
    left = Text.assemble((" torchperf top ", "bold black on green3"), (f" {node.name} ", "bold"))
    if not node.heard:
        left.append("● WAITING", "bold steel_blue1")
    elif node.silent:
        left.append(f"● SILENT for {node.silence_s:.0f} s", "bold red1").append("  what follows is old", "red1")
    else:
        health = node.node.get("health", "") or "NO HEALTH"
        left.append(f"● {health.replace('_', ' ')}", f"bold {HEALTH_COLOURS.get(health, 'grey62')}")
        left.append(f" {node.node.get('lifecycle', '')}", "grey62")
    right = Text()
    if node.restarts:
        right.append(f"node restarts {node.restarts}  ", "bold gold1")
    if pid := node.node.get("pid"):
        right.append("pid ", "grey62").append(f"{pid} ")
    row.add_row(left, right)
    return row


def _numbers(node: WatchedNode, width: int) -> Table:
    """End to end, and memory with where it goes."""
    row = _row(width)
    left, right = Text(" "), Text()
    recent = [value for value in node.end_to_end_ms if math.isfinite(value)]
    if recent:
        left.append("end to end p50 ", "grey62").append(f"{np.percentile(recent, 50):.1f}", "bold")
        left.append(" p99 ", "grey62").append(f"{np.percentile(recent, 99):.1f}", "bold").append(" ms", "grey62")
    if math.isfinite(node.memory_mib):
        right.append("workers ", "grey62").append(f"{node.memory_mib:,.0f} MiB ", "bold")
        right.append(_spark([mib for _, mib in node.memory]), "deep_sky_blue1")
        if math.isfinite(trend := node.memory_trend):
            colour = "grey62" if abs(trend) < _STEADY_MIB_PER_MIN else "gold1"
            right.append(f" {trend:+.1f} MiB/min ", colour)
    for label, word in (("node_rss_mib", "node"), ("cuda_allocated_mib", "cuda"), ("cuda_free_mib", "free")):
        if math.isfinite(mib := node.memory_parts.get(label, math.nan)) and (width >= _WIDE or label[0] == "c"):
            right.append(f" {word} ", "grey62").append(f"{mib:,.0f} ", "bold")
    row.add_row(left, right)
    return row


def _waiting(node: WatchedNode, where: str, rows: int, keys: Text) -> Panel:
    """What is looked for, and what may be wrong, as long as there is nothing to see."""
    if node.heard:
        lines = [
            f"{node.name} is there, and has no stages yet",
            f"its lifecycle state: {node.node.get('lifecycle', 'not told')}",
            "it shows them once it is configured: autostart:=true, or `ros2 lifecycle set`",
        ]
    else:
        lines = [
            f"waiting for {node.name} ... {node.elapsed_s:.0f} s",
            f"listening to /diagnostics, {node.name}/latency_stages, {node.name}/anomaly, {node.name}/memory",
            where,
            "same ROS_DOMAIN_ID? same FASTDDS_BUILTIN_TRANSPORTS? another name: --node",
        ]
    if node.others:
        lines.append(f"heard instead: {', '.join(sorted(node.others))}")
    shown = [
        Text(line, "bold" if not number else "grey62", no_wrap=True, overflow="ellipsis")
        for number, line in enumerate(lines)
    ][: max(rows, 1)]
    padding = [Text()] * max(rows - len(shown), 0)
    return Panel(
        Group(*shown, *padding), border_style="steel_blue1", padding=(0, 1), subtitle=keys, subtitle_align="right"
    )


def _others(node: WatchedNode) -> str:
    return f"; heard instead: {', '.join(sorted(node.others))}" if node.others else ""


def _row(width: int) -> Table:
    row = Table.grid(expand=True)
    row.width = width
    row.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    row.add_column(justify="right", no_wrap=True, overflow="ellipsis")
    return row


def _spark(values: list[float]) -> str:
    """The course of a number in a few cells, the highest of each part of the time."""
    if not values:
        return ""
    cells = min(_SPARK_CELLS, len(values))
    parts = [values[len(values) * cell // cells : len(values) * (cell + 1) // cells] for cell in range(cells)]
    peaks = [max(part) for part in parts]
    low, span = min(values), max(values) - min(values)
    top = len(BARS) - 1
    return "".join(BARS[1 + round((peak - low) / span * (top - 1)) if span > 0 else 1] for peak in peaks)
