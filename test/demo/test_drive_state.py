"""The state of a drive, folded from messages that are made up here."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.demo.drive_state import DriveState
from torchperf_ros.telemetry.stage_state import RECENT_FRAMES

LABELS = ["stage", "age_ms", "total_ms", "budget_ms", "tier", "outcome", "fallback"]
STAMP_NS = 1_700_000_000_000_000_000


def drive() -> DriveState:
    """A drive of the two reference stages."""
    return DriveState(["perception", "planning"], "a road", 20.0)


def stages_message(**values: float) -> Any:
    """A message of `/perf/latency_stages`; what is not given is NaN."""
    row = [float(values.get(label, math.nan)) for label in LABELS]
    return SimpleNamespace(layout=SimpleNamespace(dim=[SimpleNamespace(label=label) for label in LABELS]), data=row)


def frame(state: DriveState, stamp_ns: int = STAMP_NS, **values: float) -> None:
    """An answered frame of this stamp, on time after 10 of 50 ms unless said otherwise."""
    values = {"stage": 0, "age_ms": 2.0, "total_ms": 10.0, "budget_ms": 50.0, "tier": 0, "outcome": 0} | values
    published_ns = stamp_ns + round((values["age_ms"] + values["total_ms"]) * 1e6)
    state.on_frame(stages_message(**values), published_ns)


def diagnostics(**statuses: dict[str, object]) -> Any:
    """A message of `/diagnostics`."""
    return SimpleNamespace(
        status=[
            SimpleNamespace(
                name=f"perf: {name}",
                values=[SimpleNamespace(key=key, value=str(value)) for key, value in values.items()],
            )
            for name, values in statuses.items()
        ]
    )


def anomaly(level: int | bytes, name: str, message: str) -> Any:
    """A message of `/perf/anomaly`."""
    return SimpleNamespace(status=[SimpleNamespace(level=level, name=name, message=message, values=[])])


def journal_line(kind: str = "hang", stamp_ns: int = STAMP_NS) -> str:
    """A line as a saboteur writes it."""
    return json.dumps({"stamp_ns": stamp_ns, "kind": kind, "pid": 77, "monotonic_ns": 1})


def test_given_a_frame_on_time_when_folded_then_its_stage_has_it_without_a_fallback() -> None:
    state = drive()
    frame(state, stage=1)
    (record,) = state.stages["planning"].recent
    assert (record.outcome, record.fallback, record.lateness_ms) == (Outcome.ON_TIME, None, -40.0)
    assert abs(record.stamp_ns - STAMP_NS) < 1000
    assert state.stages["perception"].records == 0


def test_given_a_late_frame_when_folded_then_it_is_an_event_only_beyond_five_milliseconds() -> None:
    state = drive()
    frame(state, total_ms=50.4, outcome=Outcome.LATE, fallback=Fallback.HOLD_LAST)
    assert not state.events
    frame(state, total_ms=57.0, outcome=Outcome.LATE, fallback=Fallback.BACKUP)
    stage = state.stages["perception"]
    assert (stage.records, stage.far_late, stage.worst_ms) == (2, 1, 7.0)
    assert state.events[-1].text == "late → backup, 7.0 ms after its deadline"


def test_given_a_starting_stage_when_it_answers_late_then_that_is_no_failed_deadline() -> None:
    state = drive()
    frame(state, total_ms=90.0, outcome=Outcome.STARTING, fallback=Fallback.NONE)
    assert (state.stages["perception"].records, state.stages["perception"].far_late) == (1, 0)


@pytest.mark.parametrize(
    "values", [{"stage": 7}, {"stage": -1}, {"stage": math.nan}, {"outcome": 99}, {"outcome": math.nan}]
)
def test_given_a_record_of_an_unknown_stage_or_outcome_when_folded_then_it_is_passed_over(
    values: dict[str, float],
) -> None:
    state = drive()
    frame(state, **values)
    assert sum(stage.records for stage in state.stages.values()) == 0


@given(values=st.dictionaries(st.sampled_from(LABELS), st.floats(allow_nan=True, allow_infinity=True)))
def test_given_any_numbers_when_folded_then_nothing_breaks(values: dict[str, float]) -> None:
    state = drive()
    state.on_frame(stages_message(**values), STAMP_NS)
    state.on_journal("perception", journal_line())
    state.match()


def test_given_a_shorter_message_when_folded_then_missing_entries_count_as_unknown() -> None:
    state = drive()
    message = stages_message(stage=0, outcome=0)
    message.data = [0.0]
    state.on_frame(message, STAMP_NS)
    assert state.stages["perception"].records == 0


def test_given_diagnostics_when_folded_then_ours_are_kept_and_strangers_are_passed_over() -> None:
    state = drive()
    message = diagnostics(
        perception={"health": "nominal", "tier": 1, "tiers": "full, medium"}, node={"lifecycle": "active"}
    )
    message.status.append(SimpleNamespace(name="lidar: driver", values=[]))
    state.on_diagnostics(message)
    state.on_diagnostics(SimpleNamespace(status=[SimpleNamespace(name="lidar: driver", values=[])]))
    assert (state.stages["perception"].health, state.stages["perception"].tier) == ("NOMINAL", "medium")
    assert state.node == {"lifecycle": "active"}
    assert state.diagnostics == 1


def test_given_an_anomaly_with_a_traceback_when_folded_then_its_event_is_one_line_with_the_error_itself() -> None:
    state = drive()
    state.on_anomaly(anomaly(b"\x02", "perception: model error", "Traceback (most recent)\n  File x\nValueError: bad"))
    state.on_anomaly(anomaly(1, "planning: worker died", "signal SIGSEGV\nFatal Python error"))
    state.on_anomaly(anomaly(0, "odd", ""))
    assert [(e.kind, e.source, e.text) for e in state.events] == [
        ("error", "perception", "model error: ValueError: bad"),
        ("warn", "planning", "worker died: signal SIGSEGV"),
        ("ok", "odd", ""),
    ]


def test_given_what_the_player_says_when_folded_then_words_notes_and_garbage_find_their_place() -> None:
    state = drive()
    for line in (
        '{"event": "ready"}',
        '{"event": "note", "text": "again"}',
        "Traceback",
        "[1]",
        '{"event": "done", "late": 2}',
    ):
        state.on_player(line)
    assert state.player_ready
    assert state.player == {"late": 2}
    assert [event.text for event in state.events] == ["again", "Traceback", "[1]"]


def test_given_an_injection_when_the_frame_of_its_stamp_is_answered_then_they_are_matched_once() -> None:
    state = drive()
    state.on_journal("perception", journal_line("sigkill"))
    frame(state, stamp_ns=STAMP_NS - 33_000_000)
    state.match()
    assert state.injections[0].record is None
    frame(state, stamp_ns=STAMP_NS + 3_000_000, outcome=Outcome.CRASHED, fallback=Fallback.HOLD_LAST, total_ms=30.0)
    state.match()
    state.match()
    assert state.injections[0].answer == "crashed → hold last"
    assert [event.kind for event in state.events] == ["sabotage"]
    assert state.answers() == {"sigkill": {"crashed → hold last": 1}}


def test_given_an_injection_in_another_stage_when_a_frame_of_that_stamp_is_answered_then_it_is_not_its_own() -> None:
    state = drive()
    state.on_journal("planning", journal_line())
    state.on_journal("unknown", journal_line())
    frame(state)
    state.match()
    assert [injection.answer for injection in state.injections] == ["not seen", "not seen"]


def test_given_a_very_long_drive_when_folded_then_records_are_counted_and_only_recent_ones_kept() -> None:
    state = drive()
    for _ in range(RECENT_FRAMES + 10):
        frame(state, total_ms=70.0)
    stage = state.stages["perception"]
    assert (stage.records, len(stage.recent)) == (RECENT_FRAMES + 10, RECENT_FRAMES)
    assert len(state.events) < stage.far_late == state.events_told
