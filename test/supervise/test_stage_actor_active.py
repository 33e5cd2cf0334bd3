"""A stage whose second worker runs the cheapest tier on every frame, and whose inputs are several."""

import pytest
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.core.outcome import Fallback, Outcome

STORE = get_typestore(Stores.ROS2_HUMBLE)
LAST_TIER_OFFSET = 1000.0


def text(length):
    data = bytes(STORE.serialize_cdr(STORE.types["std_msgs/msg/String"]("y" * (length - 9)), "std_msgs/msg/String"))
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
    assert stage.statistics.backups == 20
    assert len(stage.published) == 20
    frames, became = stage.accounts()
    assert frames == became


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
    stage.wait_for_workers()
    stage.reconfigure(budget_ms=1500.0)
    runner = int(stage.payload(stage.ask()).header.frame_id)  # who gave the last result is asked first again
    stage.wait_for_workers()
    answer = stage.ask({"do": "sleep", "ms": 2200, "only": runner}, x=3.0)
    stage.reconfigure()
    assert (answer.outcome, answer.fallback) == (Outcome.LATE, Fallback.BACKUP)
    assert stage.payload(answer).poses[0].pose.position.x == 3.0 + LAST_TIER_OFFSET
    assert int(stage.payload(answer).header.frame_id) != runner


def test_given_other_inputs_that_are_too_large_when_received_then_they_are_refused_and_counted(stage):
    refused = stage.statistics.refused_inputs
    stage.actor.offer_latest(1, bytes(4097), 0)
    assert stage.statistics.refused_inputs == refused + 1


def test_given_inputs_that_are_each_as_large_as_allowed_when_a_frame_comes_then_it_and_the_next_are_answered(stage):
    stage.wait_for_workers()
    for index in (1, 2, 3):
        stage.actor.offer_latest(index, text(4096), 0)
    orders = {"pad": "z" * 4000, "do": "nothing"}
    assert stage.ask(orders).outcome is Outcome.ON_TIME
    assert stage.ask().outcome is Outcome.ON_TIME
