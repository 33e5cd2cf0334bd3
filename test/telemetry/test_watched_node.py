"""A node looked at from outside, folded from messages that are made up here."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from torchperf_ros.telemetry.watched_node import SILENT_S, WatchedNode


def status(name: str, hardware_id: str = "/perf", level: int | bytes = 0, message: str = "", **values: object) -> Any:
    pairs = [SimpleNamespace(key=key, value=str(value)) for key, value in values.items()]
    return SimpleNamespace(name=name, level=level, message=message, hardware_id=hardware_id, values=pairs)


def report(node: WatchedNode, *statuses: Any) -> None:
    node.on_diagnostics(SimpleNamespace(status=list(statuses)))


def heard(pid: int = 1) -> WatchedNode:
    """A node of two stages that has reported once."""
    node = WatchedNode("/perf")
    report_of(node, pid)
    return node


def report_of(node: WatchedNode, pid: int) -> None:
    report(
        node,
        status("perf: perception", health="NOMINAL", tier="full"),
        status("perf: planning", health="DEGRADED"),
        status("perf: node", pid=pid, lifecycle="active"),
    )


def test_given_a_report_when_folded_then_the_stages_are_learned_in_its_order() -> None:
    node = WatchedNode("/perf")
    assert not node.heard
    report_of(node, 7)
    assert node.heard
    assert list(node.stages) == ["perception", "planning"]
    assert node.stages["perception"].health == "NOMINAL"
    assert node.node["pid"] == "7"


def test_given_the_report_of_another_node_when_folded_then_only_its_name_is_kept() -> None:
    node = WatchedNode("/perf")
    report(node, status("perf: perception", "/robot2/perf", health="NOMINAL"), status("battery", "x"))
    assert not node.heard
    assert not node.stages
    assert node.others == {"/robot2/perf"}


def test_given_reports_that_stop_when_time_passes_then_silence_is_told_once_and_so_is_the_return() -> None:
    node = heard()
    node.at(SILENT_S)
    assert not node.silent
    for second in (SILENT_S + 0.5, SILENT_S + 1):
        node.at(second)
    assert node.silent
    assert [event.kind for event in node.events] == ["error"]
    report_of(node, 1)
    assert not node.silent
    assert [event.text for event in node.events][1:] == ["is back after 4 s"]


def test_given_another_process_under_the_name_when_it_reports_then_it_is_a_restart_and_starts_afresh() -> None:
    node = heard(pid=1)
    node.on_memory(500.0)
    report_of(node, 2)
    assert node.restarts == 1
    assert not node.memory
    assert "pid 1 is now 2" in node.events[-1].text
    report_of(node, 2)
    assert node.restarts == 1


def test_given_an_input_of_the_wrong_type_when_reported_again_and_again_then_it_is_told_once() -> None:
    node = heard()
    for _ in range(3):
        report(node, status("perf: perception input", level=b"\x02", message="/image: camera publishes String"))
    assert [event.text for event in node.events] == ["/image: camera publishes String"]
    assert node.events[0].kind == "error"
    assert "perception input" not in node.stages


def test_given_memory_that_grows_when_asked_for_the_trend_then_it_is_per_minute_and_unknown_after_few_samples() -> None:
    node = heard()
    for second in range(120):
        node.at(float(second))
        node.on_memory(500.0 + second / 30)
        if second == 30:
            assert math.isnan(node.memory_trend)
    assert node.memory_trend == pytest.approx(2.0)
