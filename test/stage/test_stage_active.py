"""A stage whose second worker runs the cheapest tier on every frame, and whose inputs are several."""

import math
import time

import pytest

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.stage.frame import Frame, Origin
from torchperf_ros.stage.inputs import aged
from torchperf_ros.workers.frame_ring import FrameReader, InputBytes

from .conftest import STORE

LAST_TIER_OFFSET = 1000.0


def text(length):
    data = bytes(
        STORE.serialize_cdr(STORE.types["std_msgs/msg/String"]("y" * (length - 9)), "std_msgs/msg/String")
    )
    assert len(data) == length
    return data


@pytest.fixture(scope="module")
def stage(start_stage):
    return start_stage(backup="active", adapter="ManyInputs", max_frame_bytes=4096)


def test_given_good_frames_when_both_workers_run_them_then_each_has_one_answer_of_its_own(stage):
    answers = []
    for x in range(20):
        stage.wait_for_workers()
        answers.append(stage.ask(x=float(x)))
    assert {(answer.outcome, answer.fallback) for answer in answers} == {(Outcome.ON_TIME, None)}
    assert stage.counters.backups == 20
    assert len(stage.published) == 20
    stage.settle_accounts()


def test_given_a_runner_that_fails_when_the_backup_ran_as_well_then_its_last_tier_is_published(stage):
    stage.wait_for_workers()
    answer = stage.ask({"do": "nan"}, x=2.0)
    assert answer.outcome in {Outcome.INVALID, Outcome.ON_TIME}  # whichever worker came to the fault first
    message = stage.payload(answer)
    if answer.outcome is Outcome.INVALID:
        assert (answer.fallback, answer.tier) == (Fallback.BACKUP, 1)
        assert message.poses[0].pose.position.x == 2.0 + LAST_TIER_OFFSET
    else:
        assert message.poses[0].pose.position.x == 2.0


def test_given_a_runner_that_is_late_when_the_deadline_comes_then_the_backups_result_is_published(stage):
    def asked():
        stage.reconfigure()
        stage.wait_for_workers()
        first = stage.ask()  # by the budget as it is, which the runner keeps on a busy machine as well
        assert (first.outcome, first.tier) == (Outcome.ON_TIME, 0)
        runner = stage.runner(first)  # it is asked first again
        stage.wait_for_workers()
        stage.reconfigure(budget_ms=2500.0)
        return runner, stage.ask({"do": "sleep", "ms": 3500, "only": runner}, x=3.0)

    # After a good answer the other worker is asked first, once, if it has failed before.
    tries = (asked() for _ in range(5))
    runner, answer = next(found for found in tries if found[1].outcome is not Outcome.ON_TIME)
    stage.reconfigure()
    assert (answer.outcome, answer.fallback) == (Outcome.LATE, Fallback.BACKUP)
    assert stage.payload(answer).poses[0].pose.position.x == 3.0 + LAST_TIER_OFFSET
    assert stage.runner(answer) != runner


def test_given_other_inputs_that_are_too_large_when_received_then_they_are_refused_and_counted(stage):
    refused = stage.counters.refused_inputs
    stage.actor.offer_latest(1, bytes(4097), 0)
    assert stage.counters.refused_inputs == refused + 1


def test_given_inputs_that_are_each_as_large_as_allowed_when_a_frame_comes_then_it_and_the_next_are_answered(
    stage,
):
    stage.wait_for_workers()
    for index in (1, 2, 3):
        stage.actor.offer_latest(index, text(4096), 0)
    orders = {"pad": "z" * 4000, "do": "nothing"}
    assert stage.ask(orders).outcome is Outcome.ON_TIME
    assert stage.ask().outcome is Outcome.ON_TIME


def test_given_another_input_that_stopped_when_frames_come_then_its_age_grows_on(stage):
    stage.wait_for_workers()
    stamp_ns = time.time_ns()
    stage.actor.offer_latest(1, text(64), stamp_ns)
    stage.actor.offer_latest(2, text(64), 0)
    waited_ms = 0.0
    for _ in range(2):
        answer = stage.ask()
        record = FrameReader(stage.actor.pool.ring.fd).read(answer.offset, answer.length, answer.frame.seq)
        (stopped,), (stampless,) = ([item for item in record if item.index == index] for index in (1, 2))
        frame_ns = answer.frame.ros_ns(answer.frame.received_ns)
        assert stopped.age_ms == pytest.approx((frame_ns - stamp_ns) / 1e6, abs=0.001)
        assert stopped.age_ms > waited_ms
        assert waited_ms * 1000 <= stopped.waited_us <= stopped.age_ms * 1000 + 1000
        assert math.isnan(stampless.age_ms)
        waited_ms = stopped.waited_us / 1000


@pytest.mark.parametrize(
    ("frame_stamp_ns", "frame_age_ms", "stamp_ns", "age_ms", "wanted_ms"),
    [
        (
            9_000_000_000,
            1000.0,
            8_000_000_000,
            5.0,
            2000.0,
        ),  # ROS time is at 10 s, however fast it ran meanwhile
        (0, math.nan, 8_000_000_000, 5.0, 605.0),  # the trigger does not tell it
        (9_000_000_000, 1000.0, 0, math.nan, math.nan),
        (
            9_000_000_000,
            1000.0,
            8_000_000_000,
            math.nan,
            2000.0,
        ),  # there was no ROS time yet at its receipt
    ],
)
def test_given_another_input_when_a_frame_comes_600_ms_later_then_its_age_is_that_at_the_frames_receipt(
    frame_stamp_ns, frame_age_ms, stamp_ns, age_ms, wanted_ms
):
    frame = Frame(0, b"", frame_stamp_ns, frame_age_ms, 1_600_000_000, 2_000_000_000, Origin(0, 0.0))
    item = aged(InputBytes(1, stamp_ns, age_ms, b""), 1_000_000_000, frame)
    assert item.age_ms == pytest.approx(wanted_ms, nan_ok=True)
    assert item.waited_us == 600_000
