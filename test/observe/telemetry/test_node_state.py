"""A node looked at from outside, folded from messages that are made up here."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.telemetry.diagnostics import typed
from torchperf_ros.observe.telemetry.node_state import (
    SILENT_S,
    NodeState,
    SeenFrame,
    StageState,
)

STEPS = ["wait_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms"]
LABELS = ["stage", "age_ms", *STEPS, "total_ms", "budget_ms", "tier", "outcome", "fallback", "lateness_ms"]
STAMP_NS = 1_700_000_000_000_000_000
STAMPED = SimpleNamespace(stamp=SimpleNamespace(sec=STAMP_NS // 10**9, nanosec=7))


def status(
    name: str, hardware_id: str = "/perf", level: int | bytes = 0, message: str = "", **values: object
) -> Any:
    pairs = [SimpleNamespace(key=key, value=str(value)) for key, value in values.items()]
    return SimpleNamespace(name=name, level=level, message=message, hardware_id=hardware_id, values=pairs)


def report(node: NodeState, *statuses: Any) -> None:
    node.on_diagnostics(SimpleNamespace(header=STAMPED, status=list(statuses)))


def report_of(node: NodeState, pid: int = 1) -> None:
    report(
        node,
        status("perf: perception", health="nominal", tier="medium", tiers="full, medium"),
        status("perf: planning", health="DEGRADED"),
        status("perf: node", pid=pid, lifecycle="active"),
    )


def heard(pid: int = 1) -> NodeState:
    """A node of two stages that has reported once."""
    node = NodeState("/perf")
    report_of(node, pid)
    return node


def stages_message(**values: float) -> Any:
    """A message of `/perf/latency_stages`; what is not given is NaN."""
    row = [float(values.get(label, math.nan)) for label in LABELS]
    return SimpleNamespace(
        layout=SimpleNamespace(dim=[SimpleNamespace(label=label) for label in LABELS]), data=row
    )


def frame(node: NodeState, stamp_ns: int = STAMP_NS, **values: float) -> None:
    """An answered frame of this stamp, on time after 10 of 50 ms unless given otherwise."""
    values = {
        "stage": 0,
        "age_ms": 2.0,
        "total_ms": 10.0,
        "budget_ms": 50.0,
        "tier": 0,
        "outcome": 0,
    } | values
    values = {"lateness_ms": values["total_ms"] - values["budget_ms"], **values}
    node.on_frame(stages_message(**values), stamp_ns + round((values["age_ms"] + values["total_ms"]) * 1e6))


def test_given_reports_when_folded_then_stages_are_learned_in_order_and_strangers_only_by_name() -> None:
    node = NodeState("/perf")
    report(node, status("perf: perception", "/robot2/perf", health="NOMINAL"), status("lidar: driver", "x"))
    assert (node.heard, node.stages, node.others) == (False, {}, {"/robot2/perf"})
    report_of(node, 7)
    assert (node.heard, list(node.stages), node.node["pid"], node.reports) == (
        True,
        ["perception", "planning"],
        "7",
        1,
    )
    assert (node.stages["perception"].health, node.stages["perception"].tier) == ("NOMINAL", "medium")


@pytest.fixture
def node():
    return heard()


def test_given_a_frame_on_time_when_folded_then_its_stage_has_it_without_a_fallback(node):
    frame(node, stage=1)
    (record,) = node.stages["planning"].recent
    assert (record.outcome, record.fallback, record.lateness_ms) == (Outcome.ON_TIME, None, -40.0)
    assert abs(record.stamp_ns - STAMP_NS) < 1000
    assert node.stages["perception"].records == 0


def test_given_late_frames_when_folded_then_only_those_beyond_five_ms_are_events_and_no_starting_ones(node):
    frame(node, total_ms=90.0, outcome=Outcome.STARTING, fallback=Fallback.NONE)
    frame(node, total_ms=50.4, outcome=Outcome.LATE, fallback=Fallback.HOLD_LAST)
    assert not node.events
    frame(node, total_ms=57.0, outcome=Outcome.LATE, fallback=Fallback.BACKUP)
    stage = node.stages["perception"]
    assert (stage.records, stage.far_late, stage.worst_ms) == (3, 1, 7.0)
    assert node.events[-1].text == "late → backup, 7.0 ms after its deadline"


@pytest.mark.parametrize(
    "values", [{"stage": 7}, {"stage": math.nan}, {"outcome": 99}, {"outcome": math.nan}]
)
def test_given_a_record_of_an_unknown_stage_or_outcome_then_it_is_passed_over(node, values):
    frame(node, **values)
    assert sum(stage.records for stage in node.stages.values()) == 0


@given(values=st.dictionaries(st.sampled_from(LABELS), st.floats(allow_nan=True, allow_infinity=True)))
def test_given_any_numbers_when_folded_then_nothing_breaks(values: dict[str, float]) -> None:
    node = heard()
    node.on_frame(stages_message(**values), STAMP_NS)
    assert node.stages["perception"].records <= 1


def test_given_an_anomaly_with_a_traceback_when_folded_then_its_event_is_one_line_with_the_error_itself() -> (
    None
):
    node = NodeState("/perf")
    for level, name, text in (
        (b"\x02", "perception: model error", "Traceback (most recent)\n  File x\nValueError: bad"),
        (1, "planning: worker died", "signal SIGSEGV\nFatal Python error"),
        (0, "odd", ""),
    ):
        node.on_anomaly(SimpleNamespace(status=[status(name, level=level, message=text)]))
    assert [(e.kind, e.source, e.text) for e in node.events] == [
        ("error", "perception", "model error: ValueError: bad"),
        ("warn", "planning", "worker died: signal SIGSEGV"),
        ("ok", "odd", ""),
    ]


def test_given_an_anomaly_with_evidence_when_folded_then_an_event_says_where_it_lies_once() -> None:
    node = NodeState("/perf")
    for _ in range(2):
        alerts = [
            status(name, level=2, message="why", evidence="/state/x") for name in ("a: misses", "a: late")
        ]
        node.on_anomaly(SimpleNamespace(status=alerts))
    said = [(e.kind, e.source, e.text) for e in node.events]
    assert said.count(("note", "node", "evidence: /state/x")) == 1
    assert said.index(("note", "node", "evidence: /state/x")) == 2


def test_given_reports_that_stop_when_time_passes_then_silence_is_an_event_once_and_so_is_the_return(node):
    node.at(SILENT_S)
    assert not node.silent
    for second in (SILENT_S + 0.5, SILENT_S + 1):
        node.at(second)
    assert node.silent
    assert [event.kind for event in node.events] == ["error"]
    report_of(node)
    assert not node.silent
    assert [event.text for event in node.events][1:] == ["is back after 4 s"]


def test_given_another_process_under_the_name_when_it_reports_then_it_is_a_restart_and_starts_afresh() -> (
    None
):
    node = heard(pid=1)
    frame(node)
    node.on_memory(500.0)
    for _ in range(2):
        report_of(node, 2)
    assert (node.restarts, len(node.memory), node.stages["perception"].records) == (1, 0, 0)
    assert "pid 1 is now 2" in node.events[-1].text


def test_given_two_processes_of_one_name_when_both_report_then_one_is_shown_and_it_is_said_once() -> None:
    node = heard(pid=1)
    frame(node)
    for _ in range(3):
        for pid in (2, 1):
            report_of(node, pid)
    assert (node.restarts, node.node["pid"], node.pids) == (0, "2", ["1", "2"])
    assert [event.text for event in node.events][1:] == [
        "two processes report under this name, pid 1 and 2: give each node a name or a namespace of its own"
    ]
    node.at(SILENT_S + 0.5)  # pid 2 has ended
    report_of(node, 1)
    assert (node.node["pid"], node.pids) == ("1", ["1"])


def test_given_open_alerts_on_diagnostics_when_a_listener_joins_late_then_it_knows_them_until_they_are_over(
    node,
):
    alerts = {
        "alert perception: model error": "ERROR KeyError: 0 (b_dict.py:36)",
        "alert machine: load": "WARN busy",
    }
    report(node, status("perf: node", pid=1, **alerts))
    assert [(alert.kind, alert.source, alert.text) for alert in node.alerts] == [
        ("error", "perception", "model error: KeyError: 0 (b_dict.py:36)"),
        ("warn", "machine", "load: busy"),
    ]
    report_of(node)
    assert not node.alerts


def test_given_steps_when_asked_then_they_are_medians_of_the_last_frames_and_the_rest_adds_up_to_the_whole(
    node,
):
    steps = {"wait_ms": 1.0, "decode_ms": 0.5, "preprocess_ms": 2.0, "postprocess_ms": 0.5}
    for inference_ms in (20.0, 30.0, 100.0):
        frame(node, total_ms=inference_ms + 5.0, inference_ms=inference_ms, **steps)
    frame(node, total_ms=50.0)  # without a result of its own
    found = node.stages["perception"].steps_ms
    assert found == {
        "wait": 1.0,
        "decode": 0.5,
        "preprocess": 2.0,
        "inference": 30.0,
        "postprocess": 0.5,
        "rest": 1.0,
    }
    assert StageState("s").steps_ms == {}


def test_given_an_input_of_the_wrong_type_when_reported_again_and_again_then_it_is_an_event_once(node):
    for _ in range(3):
        report(
            node, status("perf: perception input", level=b"\x02", message="/image: camera publishes String")
        )
    assert [(event.kind, event.text) for event in node.events] == [
        ("error", "/image: camera publishes String")
    ]
    assert "perception input" not in node.stages


def test_given_memory_that_grows_when_asked_for_the_trend_then_it_is_per_minute_and_unknown_after_few_samples(
    node,
):
    for second in range(120):
        node.at(float(second))
        node.on_memory(500.0 + second / 30)
        if second == 30:
            assert math.isnan(node.memory_trend)
    assert node.memory_trend == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("values", "tier"), [({}, ""), ({"tier": "a"}, "a"), ({"tier": "5", "tiers": "full"}, "5")]
)
def test_given_a_tier_in_other_words_when_asked_then_what_there_is_is_shown(
    values: dict[str, str], tier: str
) -> None:
    assert StageState("s", values).tier == tier


@pytest.mark.parametrize(
    ("states", "complete"), [([], False), (["idle", "busy"], True), (["busy", "loading"], False)]
)
def test_given_workers_when_one_still_loads_then_the_stage_is_not_complete(
    states: list[str], complete: bool
) -> None:
    assert (
        StageState("s", {f"worker_{n}_state": state for n, state in enumerate(states)}).complete is complete
    )


def test_given_counters_when_asked_for_the_lost_then_what_came_to_an_end_does_not_count() -> None:
    values = {"frames": "100", "superseded": "3", "stale": "1", "answered": "95"}
    assert StageState("s", typed(values)).lost == 1
    assert StageState("s", typed(values | {"unanswered": "1"})).lost == 0
    assert StageState("s", typed(values | {"answered": "many"})).lost is None


def test_given_answers_a_thirtieth_apart_when_asked_for_the_rate_then_it_is_thirty_unless_the_input_stopped() -> (
    None
):
    stage = StageState("s")
    assert math.isnan(stage.rate_hz)
    for number in range(1, 100):
        stage.add(SeenFrame(1, Outcome.ON_TIME, None, 10.0, 50.0, -40.0, published_ns=number * 33_333_333))
    assert stage.rate_hz == pytest.approx(30.0)
    stage.values["health"] = "WAITING"
    assert math.isnan(stage.rate_hz)
