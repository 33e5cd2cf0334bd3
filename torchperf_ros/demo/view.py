"""The drive as a picture in a terminal: a pure function from the state to rows of text."""

import math
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchperf_ros.demo.drive_state import DriveState
from torchperf_ros.telemetry import terminal_picture
from torchperf_ros.telemetry.event_panel import events_panel
from torchperf_ros.telemetry.stage_panel import STAGE_ROWS, stage_line, stage_panel

WIDTH: Final = 100
HEIGHT: Final = 30
_OTHER_ROWS: Final = 4  # title, progress, frame of the events
_LEAST_EVENTS: Final = 2


def picture(state: DriveState, width: int = WIDTH, height: int = HEIGHT) -> RenderableType:
    """The whole view, to fill a terminal of this size; the events take the rows that are left.

    Args:
        state: what to show.
        width: columns.
        height: rows.
    """
    events = max(_LEAST_EVENTS, height - _OTHER_ROWS - STAGE_ROWS * len(state.stages))
    return Group(
        _title(state, width),
        _progress(state, width),
        *(stage_panel(stage, width, explained=not row) for row, stage in enumerate(state.stages.values())),
        events_panel(state.events, events, note=_injected(state)),
    )


def save_svg(state: DriveState, path: Path) -> None:
    """Write the view as a picture for a document.

    Raises:
        OSError: the file cannot be written.
    """
    terminal_picture.save_svg(picture(state), path, "torchperf demo", WIDTH, HEIGHT)


def status_line(state: DriveState) -> str:
    """The drive in one line, where there is no terminal to draw in."""
    return " | ".join([f"{state.elapsed_s:6.1f} s", *(stage_line(stage) for stage in state.stages.values())])


def _title(state: DriveState, width: int) -> Table:
    row = Table.grid(expand=True)
    row.width = width
    row.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    row.add_column(justify="right", no_wrap=True)
    recent = sorted(value for value in state.end_to_end_ms if math.isfinite(value))
    numbers = Text()
    if recent:
        numbers.append("end to end ", "grey62").append(f"{recent[len(recent) // 2]:.1f} ms   ", "bold")
    if math.isfinite(state.memory_mib):
        numbers.append("workers ", "grey62").append(f"{state.memory_mib:,.0f} MiB ", "bold")
    row.add_row(Text.assemble((" torchperf ", "bold black on green3"), (f" {state.title}", "bold")), numbers)
    return row


def _progress(state: DriveState, width: int) -> Text:
    words = {
        "starting": "starting the node and its workers",
        "driving": f"{state.elapsed_s:5.1f} of {state.seconds:.0f} s",
        "ending": "waiting for the last counters",
        "ended": f"drove {state.elapsed_s:.1f} s",
    }[state.phase]
    share = min(state.elapsed_s / state.seconds, 1.0) if state.seconds > 0 else 0.0
    cells = max(width - len(words) - 3, 0)
    done = round(cells * share)
    return Text.assemble(" ", (words, "grey62"), " ", ("━" * done, "green3"), ("━" * (cells - done), "grey23"))


def _injected(state: DriveState) -> Text | None:
    return Text(f" {len(state.injections)} faults injected ", "orchid1") if state.injections else None
