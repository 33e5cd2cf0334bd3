"""What comes of a drive."""

import io
import json
import math
from dataclasses import replace

import pytest

pytest.importorskip("rclpy")

from rich.console import Console

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.telemetry.node_state import SeenFrame, StageState
from torchperf_ros.tools.demo.drive import drive_picture
from torchperf_ros.tools.demo.verdict import DriveState, judge, report, summary

STAMP_NS = 1_700_000_000_000_000_000
STAGES = ("perception", "planning")


def drive(unanswered: int = 0) -> DriveState:
    """A good drive: 98 frames of each stage, all of them answered in time but for so many."""
    state = DriveState("a road", 20.0)
    state.stages = {name: StageState(name) for name in STAGES}
    state.player = {"images": 100, "late": 0, "worst_late_ms": 0.4}
    for stage in state.stages.values():
        counts = {"frames": 98, "superseded": 0, "stale": 0, "answered": 98 - unanswered, "on_time": 98}
        stage.values = {key: float(count) for key, count in counts.items()}
        for number in range(98):
            stage.add(SeenFrame(STAMP_NS + number * 33_000_000, Outcome.ON_TIME, None, 20.0, 50.0, -30.0))
    return state


def printed(state: DriveState, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(summary(state, judge(state)))
    return capture.get()


def late(ms):
    frame = SeenFrame(0, Outcome.LATE, Fallback.STOP, 50.0 + ms, 50.0, ms)
    return lambda state: state.stages["planning"].add(frame)


def late_beside_a_timer(ms, timer_ms, before_ms=0.3):
    """An answer, and a bare timer that woke up late so long before it left."""

    def change(state):
        late(ms)(state)
        frame = state.stages["planning"].late[-1]
        state.stages["planning"].late[-1] = replace(frame, published_ns=STAMP_NS)
        state.stalls_ns.append((STAMP_NS - round(before_ms * 1e6), round(timer_ms * 1e6)))

    return change


def unheard_at_the_end(state):
    """The last report is of a frame in flight, and another one that waits."""
    state.reported_ns, state.ended_ns = STAMP_NS, STAMP_NS + 1
    for stage in state.stages.values():
        stage.values["answered"] -= 2


def nothing_to_publish(state):
    state.stages["planning"].values["unanswered"] = state.stages["perception"].values["unanswered"] = 3.0


def odd(state):
    state.stages["perception"].values["starting"] = 7.0
    state.player |= {"late": 3, "worst_late_ms": 9.0, "images": 150}
    state.others_share = 0.4
    state.node = {"scheduling": "normal", "scheduling_warning": "normal: not permitted"}


def superseded(state):
    state.stages["planning"].values |= {"frames": 598.0, "superseded": 500.0}


def own_results(count):
    def change(state):
        state.stages["perception"].values |= {"on_time": float(count), "late": 98.0 - count}

    return change


def busy(change):
    def changed(state):
        change(state)
        state.others_share = 0.4

    return changed


def sabotaged(change):
    def changed(state):
        change(state)
        state.sabotaged = True
        state.on_journal("perception", json.dumps({"kind": "nan", "stamp_ns": 5, "pid": 1}))

    return changed


BUSY = "other programs took 40% of the processor meanwhile"
NO_ANSWER = "planning: 500 of 598 frames had no answer; 1% may have none"


@pytest.fixture
def state():
    return drive()


@pytest.mark.parametrize(
    ("change", "status", "short", "shown"),
    [
        (
            lambda state: None,
            0,
            [],
            "PASS 196 of 196 frames were answered, the latest 30.00 ms before its deadline;",
        ),
        (late(0.9), 0, [], "the latest 0.90 ms after its deadline"),
        (
            late(2.0),
            1,
            ["planning: an answer left 2.0 ms after its deadline; 1 ms is allowed"],
            "FAIL planning: an",
        ),
        (busy(late(2.0)), 3, ["planning: an answer left 2.0 ms"], f"BUSY no verdict: {BUSY}; drive again"),
        (late_beside_a_timer(5.4, 5.9), 0, [], "5.40 ms after its deadline, as a bare timer was late then"),
        (late_beside_a_timer(5.4, 3.9), 1, ["planning: an answer left 5.4 ms"], "beyond what a bare timer"),
        (late_beside_a_timer(5.4, 5.9, before_ms=16.0), 1, ["planning: an answer left 5.4 ms"], "FAIL"),
        (unheard_at_the_end, 1, ["node: it reported nothing after the drive"], "FAIL node"),
        (busy(unheard_at_the_end), 3, ["node: it reported nothing after the drive"], "BUSY"),
        (superseded, 1, [NO_ANSWER, "planning: 16.3% of"], f"FAIL {NO_ANSWER}"),
        (busy(superseded), 3, [NO_ANSWER, "planning: 16.3% of"], f"BUSY no verdict: {BUSY}"),
        (own_results(88), 1, ["perception: 89.7% of the frames had their own"], "FAIL perception: 89.7%"),
        (sabotaged(own_results(88)), 0, [], "95% have to be, 85% by their own result in time"),
        (sabotaged(own_results(82)), 1, ["perception: 83.6% of"], "85% have to"),
        (busy(lambda state: None), 0, [], "PASS"),
        (
            lambda state: setattr(state, "sabotaged", True),
            1,
            ["sabotage: no fault was injected"],
            "FAIL sabotage",
        ),
    ],
)
def test_given_a_drive_when_judged_then_it_passes_by_stated_shares_and_a_busy_machine_gives_no_verdict(
    state, change, status, short, shown
):
    change(state)
    verdict = judge(state)
    assert (verdict.failures, verdict.status) == ([], status)
    assert [words in text for words, text in zip(short, verdict.short, strict=True)] == [True] * len(short)
    text = " ".join(printed(state).split())
    assert shown in text
    assert ("PASS" in text) == (status == 0)
    assert report(state, verdict)["exit_status"] == status


@pytest.mark.parametrize(
    ("unanswered", "change", "failures", "notes", "shown"),
    [
        (1, None, [], [], "PASS"),  # it is in flight
        (2, None, [f"{name}: 2 started frames were not answered" for name in STAGES], [], "FAIL"),
        (
            3,
            nothing_to_publish,
            [],
            [f"{name}: 3 frames had nothing to publish, yet or any more" for name in STAGES],
            "planning: 3 of 98 frames had no answer; 1% may have none",
        ),
        (0, busy(own_results(50)), [], ["other programs took 40%"], "BUSY"),
        (
            0,
            odd,
            [],
            [
                "perception: 7 frames came while it was still starting",
                "of 150 images only 98 reached the node",
                "3 messages were late, the worst by 9.0 ms",
                "node: normal: not permitted",
                "other programs took 40% of the processor",
            ],
            "PASS",
        ),
    ],
)
def test_given_a_drive_when_judged_then_lost_frames_fail_and_the_rest_is_noted(
    unanswered, change, failures, notes, shown
):
    state = drive(unanswered)
    if change is not None:
        change(state)
    verdict = judge(state)
    assert verdict.failures == failures
    assert [words in note for words, note in zip(notes, verdict.notes, strict=True)] == [True] * len(notes)
    assert shown in " ".join(printed(state).split())


def test_given_no_answer_at_all_or_a_player_that_died_when_judged_then_it_fails():
    state = DriveState("a road", 20.0)
    assert judge(state).failures == ["node: reported no stages", "player: ended before its time"]
    state.stages["perception"] = StageState("perception")
    assert "perception: no frame was answered" in judge(state).failures
    assert printed(state)


@pytest.mark.parametrize("width", [100, 80])
def test_given_a_terminal_when_summed_up_then_no_word_is_cut_off(width: int):
    text = printed(drive(), width)
    assert "…" not in text
    assert "restarts" in text
    assert " perception " in text


def test_given_sabotage_when_summed_up_then_each_kind_tells_how_often_and_how_it_was_answered(state):
    state.stages["perception"].add(
        SeenFrame(STAMP_NS - 10**9, Outcome.CRASHED, Fallback.BACKUP, 41.0, 50.0, -9.0)
    )
    for kind, stamp_ns in (
        ("sigkill", STAMP_NS - 10**9),
        ("hang", STAMP_NS),
        ("hang", STAMP_NS - 5 * 10**9),
    ):
        state.on_journal("perception", json.dumps({"kind": kind, "stamp_ns": stamp_ns, "pid": 1}))
    state.match()
    rows = [" ".join(row.split()) for row in printed(state).splitlines()]
    assert "sigkill 1 -9.00 1 crashed → backup" in rows
    assert "hang 2 -30.00 1 on time, 1 not seen" in rows


def test_given_a_drive_when_reported_then_it_is_strict_json_with_null_for_the_unknown(state):
    state.stages["planning"].worst_ms = -math.inf
    state.on_journal("perception", json.dumps({"kind": "nan", "stamp_ns": 5, "pid": 1}))
    said = json.loads(json.dumps(report(state, judge(state)), allow_nan=False))
    assert said["exit_status"] == 0
    assert said["stages"]["perception"]["worst_lateness_ms"] == -30.0
    assert said["stages"]["planning"]["worst_lateness_ms"] is None
    unknown = dict.fromkeys(("outcome", "fallback", "lateness_ms"))
    assert said["sabotage"] == [{"stage": "perception", "kind": "nan", "stamp_ns": 5, "pid": 1, **unknown}]


def test_given_what_the_player_writes_when_folded_then_words_notes_and_garbage_find_their_place():
    state = DriveState("a road", 20.0)
    ready, note, done = (
        '{"event": "ready"}',
        '{"event": "note", "text": "again"}',
        '{"event": "done", "late": 2}',
    )
    for line in (ready, note, "Traceback", done):
        state.on_player(line)
    assert state.player_ready
    assert state.player == {"late": 2}
    assert [event.text for event in state.events] == ["again", "Traceback"]


def test_given_an_injection_when_the_frame_of_its_stamp_is_answered_then_they_are_matched_once(state):
    stage, stamp_ns = state.stages["perception"], STAMP_NS + 10**10
    for name, at_ns in (("perception", stamp_ns), ("unknown", STAMP_NS)):
        state.on_journal(name, json.dumps({"kind": "sigkill", "stamp_ns": at_ns, "pid": 7}))
    state.match()
    assert [injection.answer for injection in state.injections] == ["not seen", "not seen"]
    stage.add(SeenFrame(stamp_ns + 3_000_000, Outcome.CRASHED, Fallback.HOLD_LAST, 30.0, 50.0, -20.0))
    for _ in range(2):
        state.match()
    assert [injection.answer for injection in state.injections] == ["crashed → hold last", "not seen"]
    assert [event.kind for event in state.events] == ["sabotage"]


@pytest.mark.parametrize(
    ("phase", "words"),
    [("starting", "starting"), ("driving", "10.0 of 20 s"), ("drove 10.0 s", "drove 10.0 s")],
)
def test_given_a_phase_when_drawn_then_the_first_row_shows_it_and_the_picture_fills_the_terminal(
    state, phase, words
):
    state.phase, state.elapsed_s = phase, 10.0
    console = Console(width=100, height=30, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(drive_picture(state, 100, 30))
    rows = capture.get().splitlines()
    assert len(rows) == 30
    assert "torchperf demo  a road" in rows[0]
    assert words in rows[0]
