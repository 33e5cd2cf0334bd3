"""The picture of a drive, drawn without a terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.demo.drive_state import DriveState
from torchperf_ros.demo.view import picture, save_svg, status_line
from torchperf_ros.telemetry.event_panel import event_line
from torchperf_ros.telemetry.stage_state import SeenFrame

VALUES = {
    "health": "DEGRADED",
    "tier": "0",
    "tiers": "full, medium",
    "engine": "eager",
    "p50_ms": "12.04",
    "p99_ms": "24.9",
    "budget_ms": "50.0",
    "frames": "1236",
    "answered": "1234",
    "on_time": "1200",
    "crashed": "2",
    "superseded": "2",
    "stale": "0",
    "fallback_backup": "30",
    "restarts": "1",
    "worker_0_pid": "4242",
    "worker_0_state": "warming up full (1 of 3)",
    "worker_0_rss_mib": "412.2",
    "worker_1_pid": "4243",
    "worker_1_state": "idle",
}


def drive() -> DriveState:
    """A drive of two stages of which the first has told everything and the second nothing."""
    state = DriveState(["perception", "planning"], "a road", 20.0)
    state.phase, state.elapsed_s = "driving", 10.0
    state.stages["perception"].values = dict(VALUES)
    return state


def add(state: DriveState, outcome: Outcome, fallback: Fallback | None, total_ms: float = 25.0) -> None:
    state.stages["perception"].add(SeenFrame(0, outcome, fallback, 0, total_ms, 50.0))


def drawn(state: DriveState, width: int = 100, height: int = 30) -> list[str]:
    """The rows as plain text."""
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(picture(state, width, height))
    return capture.get().splitlines()


def styled(state: DriveState) -> str:
    """The rows with their colours."""
    console = Console(width=100, height=30, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(picture(state))
    return capture.get()


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24), (200, 60), (60, 30)])
def test_given_a_terminal_when_drawn_then_the_picture_fills_it_exactly(width: int, height: int) -> None:
    state = drive()
    for _ in range(300):
        add(state, Outcome.CRASHED, Fallback.BACKUP)
        state.event("note", "player", "again " * 40)
    rows = drawn(state, width, height)
    assert len(rows) == height
    assert max(len(row) for row in rows) <= width


def test_given_a_stage_that_told_all_when_drawn_then_it_can_be_read_and_the_silent_one_shows_dashes() -> None:
    text = "\n".join(drawn(drive()))
    for words in (
        "perception ● DEGRADED tier full engine eager",
        "p50  12.0  p95     -  p99  24.9  max     -  budget  50.0 ms",
        "answered 1,234  on time 97.2%  C crashed 2",
        "own 1,200  ■ backup 30",
        "worker 0 warming up full pid 4242 412 MiB",
        "worker 1 idle pid 4243 - MiB",
        "planning ● NO WORD YET",
        "answered -  on time -",
    ):
        assert words in text


def test_given_frames_when_drawn_then_each_is_a_column_with_its_share_of_the_budget_and_its_letter() -> None:
    state = drive()
    add(state, Outcome.ON_TIME, None, total_ms=25.0)
    add(state, Outcome.LATE, Fallback.HOLD_LAST, total_ms=50.0)
    add(state, Outcome.INVALID, Fallback.STOP, total_ms=12.5)
    upper, lower, letters = (row.rstrip("│ ") for row in drawn(state)[4:7])
    assert upper.endswith("█")
    assert lower.endswith("██▄")
    assert letters.endswith("LN")


@pytest.mark.parametrize(
    ("fallback", "colour"),
    [(None, 40), (Fallback.BACKUP, 39), (Fallback.HOLD_LAST, 220), (Fallback.STOP, 196), (Fallback.NONE, 201)],
)
def test_given_what_was_published_when_drawn_then_the_column_has_its_colour(
    fallback: Fallback | None, colour: int
) -> None:
    state = drive()
    add(state, Outcome.ON_TIME if fallback is None else Outcome.LATE, fallback, total_ms=50.0)
    assert f"38;5;{colour}m█" in styled(state).splitlines()[5]


def test_given_odd_numbers_when_drawn_then_it_still_draws() -> None:
    state = drive()
    add(state, Outcome.ON_TIME, None, total_ms=float("nan"))
    state.stages["perception"].values |= {"p50_ms": "soon", "budget_ms": "0", "answered": "0"}
    state.seconds = 0.0
    state.end_to_end_ms.append(float("nan"))
    assert drawn(state)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("starting", "starting the node"),
        ("driving", "10.0 of 20 s"),
        ("ending", "last counters"),
        ("ended", "drove 10.0 s"),
    ],
)
def test_given_a_phase_when_drawn_then_the_second_row_tells_it(phase: str, words: str) -> None:
    state = drive()
    state.phase = phase
    assert words in drawn(state)[1]


def test_given_no_terminal_when_told_in_lines_then_stage_and_event_fit_in_one_each() -> None:
    state = drive()
    state.event("error", "planning", "worker\n died")
    line = status_line(state)
    assert "\n" not in line
    assert "perception DEGRADED full p50 12.0 p99 24.9 of 50.0 ms, 97.2% on time" in line
    assert event_line(state.events[-1]).plain == "  10.0 s ■ planning   worker died"


def test_given_a_file_when_saved_then_it_is_a_picture_for_a_document(tmp_path: Path) -> None:
    save_svg(drive(), tmp_path / "view.svg")
    text = (tmp_path / "view.svg").read_text()
    assert text.startswith("<svg")
    assert "perception" in text
