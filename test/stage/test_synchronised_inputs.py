"""A live stage, with its threads and real workers, whose second input has to fit the trigger's stamp."""

import itertools
import os
import signal
import time

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.stage.stage import StageInput

from .conftest import TRIGGER, trigger, wait_until

MS = 1_000_000
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


def test_given_an_input_without_a_header_when_the_inputs_are_asked_for_then_it_is_refused(start_own_stage):
    stage = start_own_stage(adapter="ManyInputs", tiers=["full"], backup="none", sync=["other1 slop 10"])
    with pytest.raises(
        ConfigError, match="the message type of other1 does not begin with a std_msgs/Header"
    ):
        _ = stage.actor.inputs
