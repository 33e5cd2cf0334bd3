"""What happened, line by line, newest last."""

import time
from collections.abc import Iterable
from typing import Final

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from torchperf_ros.telemetry.node_state import Event

_EVENT_MARKS: Final = {
    "ok": ("·", "green3"),
    "note": ("·", "grey62"),
    "warn": ("▲", "gold1"),
    "error": ("■", "red1"),
    "sabotage": ("✗", "orchid1"),
}


def events_panel(
    events: Iterable[Event], rows: int, title: str = "events", note: Text | None = None, began_s: float | None = None
) -> Panel:
    """The last events that fit into so many rows, plus two for the frame.

    Args:
        events: oldest first.
        rows: without the frame.
        title: what stands in the frame, above.
        note: and what stands below.
        began_s: seconds since 1970 when the onlooker began, for the local time of day; without it, seconds since then.
    """
    shown = list(events)[-rows:]
    lines = [event_line(event, began_s) for event in shown] + [Text()] * (rows - len(shown))
    return Panel(
        Group(*lines), title=Text(f" {title} ", "bold"), title_align="left", border_style="grey42", padding=(0, 1),
        subtitle=note, subtitle_align="right",
    )  # fmt: skip


def event_line(event: Event, began_s: float | None = None) -> Text:
    """An event in one line; its time as in `events_panel`."""
    mark, colour = _EVENT_MARKS.get(event.kind, _EVENT_MARKS["note"])
    row = Text(no_wrap=True, overflow="ellipsis")
    at = f"{event.at_s:6.1f} s" if began_s is None else time.strftime("%H:%M:%S", time.localtime(began_s + event.at_s))
    row.append(f"{at} ", "grey62").append(f"{mark} ", colour)
    return row.append(f"{event.source:<11}", "bold").append(event.text, colour if event.kind == "error" else "")
