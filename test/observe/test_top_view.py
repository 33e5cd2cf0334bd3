"""The picture of a running node, drawn without a terminal."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")

from rich.console import Console
from rich.text import Text

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.telemetry.diagnostics import typed
from torchperf_ros.observe.telemetry.node_state import NodeEvent, NodeState, SeenFrame, StageState
from torchperf_ros.observe.top import Screen, save_svg
from torchperf_ros.observe.top_view import node_line, node_picture, node_title

VALUES = {
    "health": "DEGRADED",
    "tier": "full",
    "engine": "aoti",
    "p50_ms": "12.04",
    "p95_ms": "20",
    "p99_ms": "24.9",
    "max_ms": "49",
    "budget_ms": "50.0",
    "answered": "1234",
    "on_time": "1200",
    "late": "34",
    "superseded": "2",
    "stale": "1",
    "fallback_backup": "30",
    "restarts": "5",
    "worker_0_pid": "4242",
    "worker_0_state": "idle",
}
STEPS_MS = (0.1, 0.4, 2.0, 21.0, 0.5)


def watched(stages: int = 2) -> NodeState:
    """A node that has reported a lot."""
    node = NodeState("/perf")
    node.heard_s = node.elapsed_s = 10.0
    node.node = {"health": "DEGRADED", "lifecycle": "active", "pid": "77"}
    for number in range(stages):
        node.stages[f"stage{number}"] = StageState(f"stage{number}", typed(VALUES))
        for _ in range(300):
            node.stages[f"stage{number}"].add(
                SeenFrame(0, Outcome.LATE, None, 25.0, 50.0, -25.0, 0, STEPS_MS)
            )
    for second in range(90):
        node.memory.append((float(second), 800.0 + second))
        node.event("warn", "stage0", "deadline missed: " + "again " * 40)
    node.memory_parts = {"node_rss_mib": 60.0, "cuda_allocated_mib": math.nan}
    node.end_to_end_ms.extend([20.0, 30.0, math.nan])
    return node


def drawn(node: NodeState, width: int = 80, height: int = 24, *, coloured: bool = False) -> list[str]:
    colours = "truecolor" if coloured else None
    options = {"color_system": colours, "force_terminal": coloured or None}
    console = Console(width=width, height=height, file=io.StringIO(), **options)
    waits = [f"waiting for {node.name}", "in ROS_DOMAIN_ID 7"]
    with console.capture() as capture:
        console.print(node_picture(node, width, height, node_title(node, width), waits, Text(" q quits ")))
    return capture.get().splitlines()


@pytest.mark.parametrize("alerts", [0, 30])
@pytest.mark.parametrize(
    ("width", "height", "stages"), [(80, 24, 2), (100, 30, 0), (220, 60, 5), (60, 24, 1)]
)
def test_given_any_terminal_any_stages_and_alerts_when_drawn_then_the_picture_fits_it(
    width, height, stages, alerts
):
    node = watched(stages)
    node.alerts = [NodeEvent(0, "error", "machine", "load: " + "busy " * 40)] * alerts
    rows = drawn(node, width, height)
    assert height - 3 <= len(rows) <= height
    assert max(len(row) for row in rows) <= width
    assert "q quits" in rows[-1]


def nonsense(node):
    node.stages["new"] = StageState("new")
    node.stages["stage0"].values |= typed({"p50_ms": "soon", "budget_ms": "0", "answered": "0"})
    node.stages["stage0"].add(SeenFrame(0, Outcome.ON_TIME, None, math.nan, 50.0, math.nan))


def on_a_lower_tier(node):
    node.stages["stage0"].message = f"DEGRADED: {WHY}"
    node.stages["stage0"].values |= typed({"unanswered": "3"})


def anytime(node):
    node.stages["stage0"].values |= typed(
        {"answered": "100", "on_time": "50", "partial": "40", "late": "10"}
    )
    node.stages["stage0"].values |= typed(
        {
            "fallback_backup": "0",
            "fallback_hold_last": "4",
            "fallback_stop": "1",
        }
    )


def without_inputs(node):
    node.stages["stage0"].values |= typed(
        {
            "input_/cloud_missing": "7",
            "input_/cloud_why": "late",
            "input_radar_missing": "0",
        }
    )


def failing_and_compiling(node):
    node.stages["stage1"].values["compiling"] = "compiling 2 of 3"
    error = "KeyError: 0 (b_dict.py:36)\nTraceback (most recent call last):\n  x"
    node.stages["stage1"].values["last_error"] = error


def two_of_one_name(node):
    for pid in ("77", "78"):
        statuses = [SimpleNamespace(key="pid", value=pid)]
        status = SimpleNamespace(
            name="perf: node", hardware_id="/perf", level=0, message="", values=statuses
        )
        for _ in range(2):
            header = SimpleNamespace(stamp=SimpleNamespace(sec=1, nanosec=0))
            node.on_diagnostics(SimpleNamespace(header=header, status=[status]))


WHY = "tier fast, full predicted 55.0 ms > 50.0 left; next probe in 2.0 s"
STEPS = "wait 0.1 decode 0.4 preprocess 2.0 inference 21.0 postprocess 0.5 rest 1.0 "


@pytest.mark.parametrize(
    ("stages", "change", "shown"),
    [
        (
            2,
            lambda node: None,
            [
                "/perf ● DEGRADED active",
                "pid 77",
                "workers 889 MiB",
                "+60.0 MiB/min",
                "p95  20.0",
                "max  49.0",
                "on time 97.0%",
                "L late 34",
                "backup 30",
                "dropped 3",
                "restarts 5",
                "worker 0 idle",
                "deadline missed",
                STEPS,
            ],
        ),
        (1, nonsense, ["new ● NO WORD YET", "answered -  on time -"]),
        (
            1,
            on_a_lower_tier,
            [
                "DEGRADED tier fast, full predicted 55.0 ms > 50.0 left",
                "answered 1,234  unanswered 3  on time 96.7%",
                f"DEGRADED: {WHY} p50 12.0 p99 24.9 of 50.0 ms, 96.7% on time",
            ],
        ),
        (
            1,
            anytime,
            [
                "answered 100  on time 87.3%",
                "P partial 40",
                "■ own 95  ■ backup 0  ■ hold last 4  ■ stop 1",
            ],
        ),
        (1, without_inputs, ["L late 34  without /cloud 7 "]),
        (
            2,
            failing_and_compiling,
            ["engine aoti, compiling 2 of 3", "last error KeyError: 0 (b_dict.py:36) "],
        ),
        (12, lambda node: None, ["no room for"]),
        (
            2,
            two_of_one_name,
            ["2 nodes of this name: pid 77, 78"],
        ),
        (2, lambda node: node.at(22.4), ["● SILENT for 12 s", "s /perf | SILENT for 12 s"]),
    ],
)
def test_given_a_node_when_drawn_in_eighty_columns_and_in_a_line_then_what_matters_is_there(
    stages, change, shown
):
    node = watched(stages)
    change(node)
    text = "\n".join([*drawn(node), node_line(node)])
    assert [words for words in shown if words not in text] == []


def test_given_frames_when_drawn_then_each_is_a_column_with_its_share_of_the_budget_its_letter_and_colour():
    node = watched(2)
    stage = node.stages["stage0"]
    stage.add(SeenFrame(0, Outcome.ON_TIME, None, 25.0, 50.0, -25.0))
    stage.add(SeenFrame(0, Outcome.LATE, Fallback.HOLD_LAST, 50.0, 50.0, 0.0))
    stage.add(SeenFrame(0, Outcome.INVALID, Fallback.STOP, 12.5, 50.0, -37.5))
    upper, lower, letters = (row.rstrip("│ ") for row in drawn(node, height=30)[4:7])
    assert upper.endswith("█")
    assert lower.endswith("██▄")
    assert letters.endswith("LN")
    lower = drawn(node, height=30, coloured=True)[5]
    assert "38;5;220m█" in lower  # the held output
    assert "38;5;196m▄" in lower  # the stop


def test_given_open_alerts_when_drawn_or_joined_in_lines_then_they_stand_before_the_events():
    node = watched()
    node.alerts = [NodeEvent(0, "error", "stage0", "model error: KeyError: 0 (b_dict.py:36)")]
    text = "\n".join(drawn(node))
    assert "1 alert" in text
    assert "now ■ stage0     model error: KeyError: 0 (b_dict.py:36)" in text
    assert text.index("model error") < text.index("deadline missed")
    console = Console(width=80, file=io.StringIO())
    node.event("error", "planning", "worker\n died")
    node.event("note", "segmentation", "misses")
    with Screen(node, console, None) as screen:
        screen.show()
        screen.show()
    assert console.file.getvalue().count("model error: KeyError: 0 (b_dict.py:36)") == 1
    assert console.file.getvalue().count("\n  10.0 s ■ planning   worker died\n") == 1
    assert " segmentation misses\n" in console.file.getvalue()


def test_given_a_long_event_when_drawn_then_it_goes_on_in_the_next_row_below_its_text():
    node = watched(1)
    node.event("error", "stage0", "worker died: " + " ".join(f"word{number}" for number in range(26)))
    rows = [row.strip("│ ") for row in drawn(node)]
    first = next(number for number, row in enumerate(rows) if "worker died" in row)
    assert "word25" in " ".join(rows[first : first + 4])
    assert not any("…" in row for row in rows[first : first + 4])


def test_given_nothing_heard_when_drawn_then_it_says_what_it_waits_for_and_who_was_heard_instead():
    node = NodeState("/perf")
    node.others.add("/robot2/perf")
    text = "\n".join(drawn(node))
    assert "/perf ● WAITING" in text
    assert "in ROS_DOMAIN_ID 7" in text
    assert "heard instead: /robot2/perf" in node_line(node)


def test_given_a_file_when_saved_then_it_is_a_picture_that_loads_nothing_from_the_network(tmp_path: Path):
    save_svg(node_picture(watched(), 100, 30, Text("title"), []), tmp_path / "view.svg", "torchperf")
    text = (tmp_path / "view.svg").read_text()
    assert text.startswith("<svg")
    assert "stage0" in text
    assert "@font-face" not in text


def test_given_a_candidate_beside_when_drawn_then_how_it_compares_is_there_to_the_end_and_fits():
    node = watched(1)
    pairs = (
        "653 frames, 0 late (base 0), +0.47 ms p50, +11.01 ms p99, 155 of 212 outputs differ, 3 plans"
        " refused (base 1)"
    )
    node.stages["stage0"].values |= typed(
        {"candidate": "7.2: refused: " + "why " * 30, "candidate_pairs": pairs}
    )
    rows = drawn(node, 100, 40)
    assert max(len(row) for row in rows) <= 100
    words = " ".join(" ".join(rows).replace("│", " ").split())
    assert "candidate 7.2: refused: why" in words
    assert pairs in words


def test_given_streams_when_drawn_then_the_worst_stands_first_and_the_stages_keep_their_order():
    node = NodeState("/perf")
    for name, health, on_time in (
        ("seen.good", "NOMINAL", 1234),
        ("seen.slow", "NOMINAL", 900),
        ("seen.down", "DEGRADED", 1234),
        ("seen.new", "", 0),
        ("planned", "SAFE_STOP", 0),
    ):
        values = typed({**VALUES, "health": health, "on_time": str(on_time)})
        node.stages[name] = StageState(name, values if health else {})
    node.heard_s = node.elapsed_s = 1.0
    order = ["seen.down", "seen.slow", "seen.good", "seen.new", "planned"]
    text = "\n".join(drawn(node, 100, 60))
    assert sorted(order, key=text.index) == order
    assert sorted(order, key=node_line(node).index) == order
    small = "\n".join(drawn(node, 80, 14))
    assert "seen.down" in small
    assert "no room for seen.good" in small or "no room for seen.slow, seen.good" in small
