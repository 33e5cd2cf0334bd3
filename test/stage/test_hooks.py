"""What a stage calls: checks and observers of every answer, and a second version beside the first."""

from types import SimpleNamespace

import pytest

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.stage.hooks import SecondVersion

from .conftest import wait_until


class Beside:
    """A second version without workers that notes its calls, and whether the stage's lock is held."""

    def __init__(self, stage):
        self.version, self.figures, self.pool = "new", None, SimpleNamespace(everyone=[])
        self.stage, self.calls, self.config = stage, [], None

    def _note(self, *call):
        assert self.stage.lock.locked()
        self.calls.append(call)

    def before_turn(self, now_ns):
        self._note("before", self.stage.turn)

    def begun(self):
        self._note("begun", self.stage.turn.frame.seq)

    def answered(self, turn, answer, now_ns, *, free):
        assert answer.frame is turn.frame
        self._note("answered", turn.frame.seq, free)

    def takes(self, worker, now_ns, *, free):
        assert worker in self.stage.pool.everyone
        return False

    def reconfigure(self, config):
        self._note("reconfigured", config.budget_ms)

    def remove(self):
        self.stage.shadow = None


@pytest.fixture
def stage(start_own_stage):
    return start_own_stage(backup="none")


def put_beside(stage):
    beside: SecondVersion = Beside(stage.actor)
    with stage.actor.lock:
        stage.actor.shadow = beside
    return beside


def test_given_a_second_version_when_frames_are_answered_then_it_is_called_in_their_order_with_the_lock_held(
    stage,
):
    beside = put_beside(stage)
    with stage.running() as (first, _):
        second, _ = stage.offer()
    assert {stage.answer(seq).outcome for seq in (first, second)} == {Outcome.ON_TIME}
    stage.wait_for_workers()
    stage.reconfigure(budget_ms=4000.0)
    calls = [call for call in beside.calls if call != ("before", None)]
    assert calls == [
        ("begun", first),
        ("begun", second),
        ("answered", first, False),
        ("answered", second, True),
        ("reconfigured", 4000.0),
    ]
    assert beside.calls[0] == ("before", None)  # no frame was in flight
    stage.actor.stop()
    assert stage.actor.shadow is None
    stage.actor.stop = lambda: None  # the fixture need not do it again


def test_given_an_output_that_a_check_replaces_when_answered_then_that_goes_out_and_it_is_not_held_later(
    stage,
):
    def replaced(output, now_ns):
        output.payload = b"replaced"
        return output

    good = stage.ask()
    stage.actor.checks.append(replaced)
    answer = stage.ask(x=2.0)
    assert (answer.outcome, answer.payload, stage.published[-1]) == (
        Outcome.ON_TIME,
        b"replaced",
        b"replaced",
    )
    stage.actor.checks.remove(replaced)
    assert stage.ask({"do": "raise"}).payload == good.payload


def test_given_an_observer_when_a_frame_is_answered_then_it_follows_the_output_and_its_alert_is_published(
    stage,
):
    alert, seen = SimpleNamespace(values={}), []

    def observe(turn, answer):
        seen.append((answer.payload in stage.published, answer in stage.answers, stage.actor.lock.locked()))
        return alert

    stage.actor.observers.append(observe)
    stage.ask()
    wait_until(lambda: alert in stage.anomalies, lambda: stage.anomalies)
    assert seen == [(True, True, False)]
