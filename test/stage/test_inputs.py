"""Which message of an input fits a trigger, how long a frame waits for it, and which alerts say so."""

import itertools
import math
import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.alert import Level
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.settings.stage_options import SyncRule
from torchperf_ros.stage.inputs import KEPT, MOST_MISSES, InputSync, SyncedInput
from torchperf_ros.stage.wiring import StageInput

from .conftest import MS, TRIGGER, trigger, wait_until

T = 1_000_000 * MS
"""The trigger's stamp, and the time of its receipt on the clock of inputs."""
POINT = "geometry_msgs/msg/PointStamped"


def synced(*lines):
    """The rules of `other` and `third`, inputs 1 and 2."""
    sync = InputSync("fusion", lines)
    sync.bind([("trigger", POINT), ("other", POINT), ("third", POINT)])
    return sync


def frame(sync, at_ms=0.0, room_ms=1000.0, stamp_ns=None):
    """A frame that comes when its stamp says, relative to `T`, and asks for its inputs."""
    now_ns = T + round(at_ms * MS)
    sync.begin(now_ns if stamp_ns is None else stamp_ns, now_ns, 0.0, room_ms)
    return sync.until_ns


def take(sync, stamp_ms, word, at_ms=0.0, index=1):
    assert sync.take(index, T + round(stamp_ms * MS), word, T + round(at_ms * MS))


def settle(sync, at_ms=0.0, stamp_ns=T):
    latest = {}
    return sync.settle(stamp_ns, T + round(at_ms * MS), latest), latest


@given(
    st.lists(st.integers(-100, 100), max_size=20),
    st.integers(-50, 50),
    st.integers(0, 60),
)
def test_given_any_stamps_when_a_frame_asks_then_it_gets_the_nearest_within_the_slop_or_none(
    stamps, offset, slop
):
    sync = synced(SyncRule("other", slop, offset))
    for number, stamp_ms in enumerate(stamps):
        take(sync, stamp_ms, (stamp_ms, number))
    frame(sync)
    missing, latest = settle(sync)
    # of two with one stamp the later counts
    newest = {stamp_ms: number for number, stamp_ms in enumerate(stamps)}
    kept = sorted(newest, key=newest.get)[-KEPT:]
    distances = sorted(abs(stamp_ms - offset) for stamp_ms in kept)
    if distances and distances[0] <= slop:
        stamp_ms, number = latest[1]
        assert missing == 0
        assert abs(stamp_ms - offset) == distances[0]
        assert number == newest[stamp_ms]
    else:
        assert (missing, latest) == (2, {})


@given(
    st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 30)), max_size=6),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_given_messages_that_come_later_when_a_frame_waits_then_it_ends_with_the_first_that_fits_or_in_time(
    messages, wait_ms, room_ms
):
    sync = synced(SyncRule("other", 10.0, 0.0, wait_ms))
    until_ns = frame(sync, room_ms=room_ms)
    longest_ms = min(wait_ms, room_ms)
    assert until_ns == (T + longest_ms * MS if longest_ms else 0)
    came_ms = None
    for stamp_ms, at_ms in sorted(messages, key=lambda one: one[1]):
        if at_ms >= longest_ms or not sync.until_ns:
            break
        take(sync, stamp_ms, stamp_ms, at_ms)
        came_ms = at_ms if abs(stamp_ms) <= 10 else None
    assert (sync.until_ns == 0) == (came_ms is not None or not longest_ms)
    missing, _ = settle(sync, longest_ms)
    assert missing == (2 if came_ms is None else 0)
    one = sync.inputs[1]
    assert one.waited == (1 if longest_ms else 0)
    assert one.waited_ms == (longest_ms if came_ms is None else came_ms)


def test_given_two_inputs_when_the_one_with_the_longer_wait_has_come_then_the_other_is_not_waited_for_beyond_its_own():
    sync = synced(SyncRule("other", 5.0, 0.0, 10.0), SyncRule("third", 5.0, 0.0, 20.0))
    assert frame(sync) == T + 20 * MS
    take(sync, 1.0, "third", at_ms=4.0, index=2)
    assert sync.until_ns == T + 10 * MS
    missing, latest = settle(sync, 10.0)
    assert (missing, latest) == (1 << 1, {2: "third"})
    assert (sync.inputs[1].waited_ms, sync.inputs[2].waited_ms) == (10.0, 4.0)


def test_given_a_slower_input_when_two_frames_ask_then_both_get_the_same_message():
    sync = synced(SyncRule("other", 40.0))
    take(sync, 10.0, "one")
    frame(sync)
    first = settle(sync)
    frame(sync, 33.0)
    assert first == settle(sync) == (0, {1: "one"})
    assert list(sync.inputs[1].skews_ms) == [10.0, -23.0]
    assert (sync.inputs[1].skew_p50_ms, sync.inputs[1].skew_max_ms) == (16.5, 23.0)


def lose(sync, frames=MOST_MISSES, from_frame=0):
    """So many frames 50 ms apart without a message; until when each waited, in ms from its receipt."""
    waits = []
    for number in range(from_frame, from_frame + frames):
        until_ns = frame(sync, 50.0 * number)
        waits.append((until_ns - T) / MS - 50.0 * number if until_ns else 0.0)
        settle(sync, 50.0 * number + waits[-1])
    return waits


def test_given_an_input_that_never_comes_when_frames_go_on_then_they_wait_ten_times_and_that_is_told_once():
    sync = synced(SyncRule("other", 20.0, 0.0, 15.0))
    assert lose(sync, 30) == [15.0] * MOST_MISSES + [0.0] * 20
    assert (sync.inputs[1].missing, sync.inputs[1].waited, sync.inputs[1].waited_ms) == (30, 10, 150.0)
    (alert,) = sync.news
    assert (alert.level, alert.name) == (Level.WARN, "fusion: input missing (other)")
    assert alert.message.startswith("missing in 10 frames in a row, no message with a stamp has come")


@pytest.mark.parametrize(("late_ms", "waits"), [(0.0, [0.0]), (8.0, [15.0]), (16.0, [0.0])])
def test_given_a_lost_input_when_it_comes_again_then_it_is_waited_for_if_it_comes_in_time(late_ms, waits):
    """Though frames run without it.

    What comes before the wait would have been over is worth the next wait.
    """
    sync = synced(SyncRule("other", 20.0, 0.0, 15.0))
    lose(sync)
    at_ms = 50.0 * MOST_MISSES
    if late_ms:
        assert frame(sync, at_ms) == 0
        settle(sync, at_ms)
    take(sync, at_ms, "back", at_ms + late_ms)
    if not late_ms:
        assert frame(sync, at_ms) == 0
        assert settle(sync, at_ms)[1] == {1: "back"}
    assert [alert.level for alert in sync.news][1:] == ([] if late_ms > 15.0 else [Level.OK])
    assert lose(sync, 1, MOST_MISSES + 1) == ([15.0] if late_ms <= 15.0 else waits)


@pytest.mark.parametrize("stamp_ns", [0, -5])
def test_given_messages_without_a_stamp_when_frames_ask_then_these_fit_none_and_that_is_told_once(stamp_ns):
    sync = synced(SyncRule("other", 20.0))
    for _ in range(3):
        assert sync.take(1, stamp_ns, "unstamped", T)
        frame(sync)
        assert settle(sync) == (2, {})
    assert sync.inputs[1].unstamped == 3
    assert [alert.name for alert in sync.news] == ["fusion: input without stamps (other)"]
    assert sync.inputs[1].why_missing == "no message with a stamp has come, 3 without one"


def test_given_a_trigger_without_a_stamp_when_it_asks_then_nothing_fits_and_it_does_not_wait():
    sync = synced(SyncRule("other", 20.0, 0.0, 15.0))
    take(sync, 0.0, "one")
    assert frame(sync, stamp_ns=0) == 0
    assert settle(sync, stamp_ns=0) == (2, {})
    assert sync.inputs[1].why_missing == "the trigger had no stamp"
    assert [alert.name for alert in sync.news] == ["fusion: input without stamps (trigger)"]


def test_given_a_message_that_is_too_far_off_when_a_frame_asks_then_its_skew_is_told():
    sync = synced(SyncRule("other", 20.0, -100.0))
    take(sync, -63.0, "one")
    frame(sync)
    settle(sync)
    one = sync.inputs[1]
    assert one.missing_skew_ms == 37.0
    assert one.why_missing == "the nearest message was +37.0 ms off, slop is 20 ms"
    assert math.isnan(one.skew_p50_ms)


def test_given_an_input_that_is_not_synchronised_when_it_comes_then_it_is_left_to_others():
    assert not synced(SyncRule("other", 20.0)).take(2, T, "third", T)


def test_given_a_message_type_without_a_header_when_bound_then_it_is_refused():
    sync = InputSync("fusion", [SyncRule("other", 20.0)])
    with pytest.raises(ConfigError, match="does not begin with a std_msgs/Header"):
        sync.bind([("trigger", POINT), ("other", "std_msgs/msg/String")])


def test_given_one_input_when_it_is_bound_anew_then_what_it_knows_stays():
    sync = synced(SyncRule("other", 20.0))
    take(sync, 0.0, "one")
    sync.bind([("trigger", POINT), ("other", POINT)])
    frame(sync)
    assert settle(sync) == (0, {1: "one"})
    assert isinstance(sync.inputs[1], SyncedInput)


SYNC = "other slop 10 wait 4000"
_numbers = itertools.count()


def new_stamp_ns():
    """A stamp that no other test's message fits."""
    return time.time_ns() + next(_numbers) * 1000 * MS


@pytest.fixture(scope="module")
def running(start_stage):
    stage = start_stage(adapter="Fusing", tiers=["full"], backup="none", sync=[SYNC])
    stage.other = StageInput(stage.actor, 1, "other", TRIGGER, stamped=True)
    stage.trigger = StageInput(stage.actor, 0, "point", TRIGGER, stamped=True)
    assert stage.actor.inputs[:2] == [(0, "point", TRIGGER), (1, "other", TRIGGER)]
    return stage


@pytest.fixture
def stage(running):
    """The module's stage, idle, with its second input waited for."""
    running.wait_for_workers()
    stamp_ns = new_stamp_ns()
    running.other.receive(trigger(stamp_ns))
    assert running.ask(stamp_ns=stamp_ns).outcome is Outcome.ON_TIME
    running.wait_for_workers()
    yield running
    running.settle_accounts()


def x(stage, answer):
    return stage.payload(answer).poses[0].pose.position.x


def assert_waits(stage):
    assert stage.actor.inputs_until_ns > 0


def test_given_both_inputs_when_the_trigger_comes_then_the_frame_runs_at_once(stage):
    stamp_ns = new_stamp_ns()
    stage.other.receive(trigger(stamp_ns - 4 * MS, x=7.0))
    answer = stage.ask(stamp_ns=stamp_ns)
    assert (x(stage, answer), answer.missing_inputs) == (7.0, 0)
    assert stage.actor.sync.inputs[1].skews_ms[-1] == -4.0


def test_given_a_frame_that_waits_when_its_input_comes_then_it_is_handed_over_on_the_receiving_thread(
    stage,
):
    waited = stage.actor.sync.inputs[1].waited
    seq, stamp_ns = stage.offer(stamp_ns=new_stamp_ns())
    assert_waits(stage)
    stage.other.receive(trigger(stamp_ns - 500 * MS, x=5.0))  # another frame's
    assert_waits(stage)
    stage.other.receive(trigger(stamp_ns + 10 * MS, x=8.0))
    assert stage.actor.inputs_until_ns == 0
    answer = stage.answer(seq)
    assert (x(stage, answer), answer.missing_inputs, answer.outcome) == (8.0, 0, Outcome.ON_TIME)
    assert stage.actor.sync.inputs[1].waited == waited + 1
    assert 0 < answer.wait_ms < answer.total_ms


def test_given_a_frame_that_waits_when_its_input_does_not_come_then_it_runs_without(start_own_stage):
    stage = start_own_stage(adapter="Fusing", tiers=["full"], backup="none", sync=["other slop 10 wait 50"])
    assert stage.actor.inputs
    answer = stage.ask(stamp_ns=new_stamp_ns())
    assert (x(stage, answer), answer.missing_inputs, answer.outcome) == (-1.0, 2, Outcome.ON_TIME)
    assert answer.wait_ms >= 50.0
    for _ in range(9):
        stage.ask(stamp_ns=new_stamp_ns())
    stage.wait_for(lambda: stage.anomalies, "an alert about the lost input")
    (alert,) = stage.anomalies
    assert (alert.name, alert.once) == ("tested: input missing (other)", True)
    assert stage.ask(stamp_ns=new_stamp_ns()).missing_inputs == 2
    assert stage.actor.sync.inputs[1].waited == 10


def test_given_a_trigger_in_the_ring_when_it_waits_for_an_input_then_nothing_else_is_put_there(stage):
    seq, stamp_ns = stage.counters.frames, new_stamp_ns()
    data, slot = trigger(stamp_ns), stage.actor.slot()
    slot[: len(data)] = data
    stage.trigger.receive(slot[: len(data)])
    assert_waits(stage)
    assert stage.actor.slot() is None
    newer, newer_ns = stage.offer(stamp_ns=new_stamp_ns())
    for at_ns, number in ((stamp_ns, 3.0), (newer_ns, 4.0)):
        stage.other.receive(trigger(at_ns, x=number))
    assert [x(stage, stage.answer(one)) for one in (seq, newer)] == [3.0, 4.0]
    assert stage.payload(stage.answer(seq)).header.stamp.nanosec == stamp_ns % 1_000_000_000


def test_given_a_frame_that_waits_when_the_worker_dies_then_it_waits_on_and_the_next_worker_runs_it(stage):
    seq, stamp_ns = stage.offer(stamp_ns=new_stamp_ns())
    os.kill(stage.pids[0], signal.SIGKILL)
    wait_until(lambda: not stage.actor.pool.ready, lambda: stage.actor.pool.progress)
    assert_waits(stage)
    stage.other.receive(trigger(stamp_ns, x=6.0))
    answer = stage.answer(seq)
    assert (x(stage, answer), answer.outcome) == (6.0, Outcome.ON_TIME)


def test_given_a_frame_that_waits_when_the_stage_is_deactivated_then_it_still_gets_its_input(stage):
    seq, stamp_ns = stage.offer(stamp_ns=new_stamp_ns())
    stage.actor.deactivate()
    assert_waits(stage)
    stage.other.receive(trigger(stamp_ns, x=9.0))
    stage.actor.finish()
    stage.actor.activate()
    assert (x(stage, stage.answer(seq)), stage.answer(seq).outcome) == (9.0, Outcome.ON_TIME)


def test_given_an_error_in_the_rule_when_a_frame_has_waited_then_it_is_answered_and_the_next_one_is_good(
    stage, monkeypatch
):
    errors = stage.counters.internal_errors
    with monkeypatch.context() as patch:
        patch.setattr(stage.actor.sync, "settle", None)
        seq, stamp_ns = stage.offer(stamp_ns=new_stamp_ns())
        assert_waits(stage)
        stage.other.receive(trigger(stamp_ns))
        answer = stage.answer(seq)
    assert answer.outcome is Outcome.ERROR
    assert answer.reason.startswith("an error in the node: TypeError")
    assert stage.counters.internal_errors == errors + 1
    stamp_ns = new_stamp_ns()
    stage.other.receive(trigger(stamp_ns))
    assert stage.ask(stamp_ns=stamp_ns).outcome is Outcome.ON_TIME
