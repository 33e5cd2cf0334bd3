"""The picture of a running node, drawn without a terminal."""

import io
import math

import pytest
from rich.console import Console

from torchperf_ros.core.outcome import Outcome
from torchperf_ros.telemetry.node_view import node_line, node_picture
from torchperf_ros.telemetry.stage_state import SeenFrame, StageState
from torchperf_ros.telemetry.watched_node import WatchedNode

VALUES = {
    "health": "DEGRADED", "tier": "full", "engine": "aoti", "p50_ms": "12.04", "p95_ms": "20", "p99_ms": "24.9",
    "max_ms": "49", "budget_ms": "50.0", "answered": "1234", "on_time": "1200", "late": "34", "superseded": "2",
    "stale": "1", "fallback_backup": "30", "restarts": "5", "worker_0_pid": "4242", "worker_0_state": "idle",
}  # fmt: skip


def watched(stages: int = 2) -> WatchedNode:
    """A node that has told a lot."""
    node = WatchedNode("/perf")
    node.heard_s = node.elapsed_s = 10.0
    node.node = {"health": "DEGRADED", "lifecycle": "active", "pid": "77"}
    for number in range(stages):
        node.stages[f"stage{number}"] = StageState(f"stage{number}", dict(VALUES))
        for _ in range(300):
            node.stages[f"stage{number}"].add(SeenFrame(0, Outcome.LATE, None, 0, 25.0, 50.0))
    for second in range(90):
        node.memory.append((float(second), 800.0 + second))
        node.event("warn", "stage0", "deadline missed: " + "again " * 40)
    node.memory_mib = 889.0
    node.memory_parts = {"node_rss_mib": 60.0, "cuda_allocated_mib": math.nan}
    node.end_to_end_ms.extend([20.0, 30.0, math.nan])
    return node


def drawn(node: WatchedNode, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(node_picture(node, width, height, began_s=0.0, where="in ROS_DOMAIN_ID 7"))
    return capture.get().splitlines()


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (220, 60), (60, 24)])
@pytest.mark.parametrize("stages", [0, 1, 2, 3, 5])
def test_given_any_terminal_and_any_number_of_stages_when_drawn_then_the_picture_fits_it(
    size: tuple[int, int], stages: int
) -> None:
    rows = drawn(watched(stages), *size)
    assert size[1] - 3 <= len(rows) <= size[1]
    assert max(len(row) for row in rows) <= size[0]
    assert "q quits" in rows[-1]


def test_given_eighty_columns_when_drawn_then_what_matters_is_not_cut_off() -> None:
    text = "\n".join(drawn(watched()))
    for words in (
        "/perf ● DEGRADED active", "pid 77", "workers 889 MiB", "+60.0 MiB/min", "p95  20.0", "max  49.0",
        "on time 97.2%", "L late 34", "backup 30", "dropped 3", "restarts 5", "worker 0 idle", "deadline missed",
    ):  # fmt: skip
        assert words in text


def test_given_too_many_stages_when_drawn_then_those_without_room_are_named() -> None:
    assert "no room for" in "\n".join(drawn(watched(12)))


def test_given_nothing_heard_when_drawn_then_it_says_what_it_waits_for_where_and_who_was_heard_instead() -> None:
    node = WatchedNode("/perf")
    node.others.add("/robot2/perf")
    text = "\n".join(drawn(node))
    for words in ("waiting for /perf ...", "/perf/latency_stages", "in ROS_DOMAIN_ID 7", "instead: /robot2/perf"):
        assert words in text
    assert "heard instead: /robot2/perf" in node_line(node)


def test_given_a_node_that_fell_silent_when_shown_then_picture_and_line_say_so_first() -> None:
    node = watched()
    node.at(22.4)
    assert "SILENT for 12 s" in drawn(node)[0]
    assert "SILENT for 12 s" in node_line(node)


def test_given_a_node_without_stages_when_drawn_then_it_says_what_it_lacks() -> None:
    node = WatchedNode("/perf")
    node.heard_s, node.node = 0.0, {"lifecycle": "unconfigured"}
    assert "unconfigured" in "\n".join(drawn(node))
