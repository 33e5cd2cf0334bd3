"""What comes of a drive."""

import io
import json
import math

import pytest
from rich.console import Console

from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.demo.drive_state import DriveState
from torchperf_ros.demo.verdict import judge, report, summary
from torchperf_ros.telemetry.stage_state import SeenFrame

STAMP_NS = 1_700_000_000_000_000_000


def drive(unanswered: int = 0) -> DriveState:
    """A good drive: a hundred frames of each stage, two of them superseded, the others answered in time."""
    state = DriveState(["perception", "planning"], "a road", 20.0)
    state.player = {"images": 100, "late": 0, "worst_late_ms": 0.4}
    for stage in state.stages.values():
        stage.values = {
            "frames": "100",
            "superseded": "2",
            "stale": "0",
            "answered": str(98 - unanswered),
            "on_time": "98",
        }
        for number in range(98):
            stage.add(SeenFrame(STAMP_NS + number * 33_000_000, Outcome.ON_TIME, None, 0, 20.0, 50.0))
    return state


def printed(state: DriveState, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(summary(state, judge(state), width))
    return capture.get()


def test_given_every_frame_answered_in_time_when_judged_then_the_exit_status_is_0() -> None:
    state = drive()
    verdict = judge(state)
    assert (verdict.exit_status, verdict.failures, verdict.notes) == (0, (), ())
    assert "PASS  every started frame was answered: 196, the latest 30.00 ms before its deadline" in printed(state)


def test_given_one_frame_in_flight_at_the_end_when_judged_then_it_passes_and_two_fail() -> None:
    assert judge(drive(unanswered=1)).exit_status == 0
    verdict = judge(drive(unanswered=2))
    assert verdict.exit_status == 1
    assert verdict.failures[0] == "perception: 2 started frames were not answered"


def test_given_an_answer_more_than_five_milliseconds_late_when_judged_then_it_fails_and_five_passes() -> None:
    state = drive()
    state.stages["planning"].add(SeenFrame(0, Outcome.LATE, Fallback.STOP, 0, 55.0, 50.0))
    assert judge(state).exit_status == 0
    assert "5.00 ms after its deadline" in printed(state)
    state.stages["planning"].add(SeenFrame(0, Outcome.LATE, Fallback.STOP, 0, 56.5, 50.0))
    assert judge(state).failures == ("planning: 1 answers later than 5 ms after their deadline, the worst by 6.5 ms",)
    assert "FAIL" in printed(state)


def test_given_no_answer_at_all_or_a_player_that_died_when_judged_then_it_fails() -> None:
    state = DriveState(["perception"], "a road", 20.0)
    verdict = judge(state)
    assert "perception: no frame was answered" in verdict.failures
    assert "player: ended before its time" in verdict.failures
    assert printed(state)


def test_given_frames_while_starting_when_judged_then_they_are_told_and_are_no_failure() -> None:
    state = drive()
    state.stages["perception"].values["starting"] = "7"
    assert judge(state).exit_status == 0
    assert judge(state).notes == ("perception: 7 frames came while it was still starting",)


def test_given_a_busy_machine_and_a_late_player_when_judged_then_the_notes_say_so() -> None:
    state = drive()
    state.player |= {"late": 3, "worst_late_ms": 9.0}
    state.others_share = 0.4
    state.node = {"scheduling": "normal", "scheduling_warning": "normal: not permitted"}
    state.stages["perception"].values["answered"] = "200"
    text = " | ".join(judge(state).notes)
    assert "3 messages were late, the worst by 9.0 ms" in text
    assert "other programs took 40% of the processor" in text
    assert "node: normal: not permitted" in text
    assert "102 answers were not seen here" in text


def test_given_images_that_never_reached_the_node_when_judged_then_a_note_says_what_to_look_at() -> None:
    state = drive()
    state.player["images"] = 150
    verdict = judge(state)
    assert "of 150 images only 100 reached the node" in verdict.notes[0]
    assert verdict.exit_status == 0


@pytest.mark.parametrize(("width", "restarts"), [(100, True), (80, False)])
def test_given_a_terminal_when_summed_up_then_no_word_is_cut_off(width: int, restarts: bool) -> None:
    text = printed(drive(), width)
    assert "…" not in text
    assert ("restarts" in text) is restarts
    assert " perception " in text


def test_given_sabotage_when_summed_up_then_each_kind_tells_how_often_and_how_it_was_answered() -> None:
    state = drive()
    state.stages["perception"].add(SeenFrame(STAMP_NS - 10**9, Outcome.CRASHED, Fallback.BACKUP, 0, 41.0, 50.0))
    for kind, stamp_ns in (("sigkill", STAMP_NS - 10**9), ("hang", STAMP_NS), ("hang", STAMP_NS - 5 * 10**9)):
        state.on_journal("perception", json.dumps({"kind": kind, "stamp_ns": stamp_ns, "pid": 1}))
    state.match()
    rows = [" ".join(row.split()) for row in printed(state).splitlines()]
    assert "sigkill 1 -9.00 1 crashed → backup" in rows
    assert "hang 2 -30.00 1 on time, 1 not seen" in rows
    assert "sabotage: the frames of 1 injections were not seen here" in judge(state).notes


def test_given_a_drive_when_reported_then_it_is_strict_json_with_null_for_the_unknown() -> None:
    state = drive()
    state.stages["planning"].worst_ms = -math.inf
    state.on_journal("perception", json.dumps({"kind": "nan", "stamp_ns": 5, "pid": 1}))
    said = json.loads(json.dumps(report(state, judge(state)), allow_nan=False))
    assert said["exit_status"] == 0
    assert said["stages"]["perception"]["worst_lateness_ms"] == -30.0
    assert said["stages"]["planning"]["worst_lateness_ms"] is None
    assert said["sabotage"] == [
        {
            "stage": "perception",
            "kind": "nan",
            "stamp_ns": 5,
            "pid": 1,
            "outcome": None,
            "fallback": None,
            "lateness_ms": None,
        }
    ]
