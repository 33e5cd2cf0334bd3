"""A stage whose model gives partial results.

What is published at the deadline, and what becomes of the run.
"""

import math
import time

import pytest

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.stage.waiter import PublishMargin

from .conftest import wait_until

SHORT_MS, MARGIN_MS = 1000.0, 900.0
BUDGET_MS = 5000.0
TRIES = 4
"""A step may take longer than a short budget on a busy machine.

Each try has twice the time of the one before it.
"""


class Generous(PublishMargin):
    """Room for a machine that others use as well: what leaves before its deadline is to be out by then."""

    def _update(self):
        self.ms = MARGIN_MS


def ask_in_short(stage, **orders):
    """The answer to a frame that waits before a step until its budget is over, and its stamp."""
    for number in range(TRIES):
        stage.wait_for_workers()
        stage.reconfigure(budget_ms=MARGIN_MS + (SHORT_MS - MARGIN_MS) * 2**number)
        with stage.running(x=10.0, **orders) as (seq, stamp_ns):
            answer = stage.answer(seq)
        stage.reconfigure()
        if answer.outcome is not Outcome.LATE:
            break
    return answer, stamp_ns


@pytest.fixture(scope="module")
def running(start_stage):
    return start_stage(adapter="Stepping", backup="none", tiers=["full"], fallback=["hold_last"])


@pytest.fixture
def stage(running):
    running.reconfigure()
    running.actor.margin = Generous()
    running.wait_for_workers()
    assert running.ask(x=1.0).outcome is Outcome.ON_TIME
    running.wait_for_workers()
    return running


def x_of(stage, answer):
    return stage.payload(answer).poses[0].pose.position.x


def test_given_the_time_when_run_then_the_last_step_is_on_time_and_recorded(stage):
    answer = stage.ask(x=10.0)
    assert (answer.outcome, answer.fallback, answer.reason, answer.step) == (Outcome.ON_TIME, None, "", 3)
    assert x_of(stage, answer) == 13.0


def test_given_a_step_that_takes_too_long_when_the_deadline_comes_then_the_one_before_it_is_published(
    stage,
):
    pids, late_results = stage.pids, stage.counters.late_results
    answer, stamp_ns = ask_in_short(stage, step=3)
    assert (answer.outcome, answer.fallback, answer.step, answer.tier) == (Outcome.PARTIAL, None, 2, 0)
    assert answer.reason.startswith(
        "step 2 of tier full was published: tier full on worker 0 was not done after"
    )
    assert answer.lateness_ms <= 0
    assert not math.isnan(answer.steps.total_ms)
    assert answer.steps.inference_ms < answer.budget_ms
    assert x_of(stage, answer) == 12.0
    (handed_on,) = [frame for _, frame in stage.handed_on if frame.seq == answer.frame.seq]
    assert handed_on.stamp_ns == stamp_ns  # it is this frame's own
    stage.wait_for_workers()  # it has stopped
    assert stage.ask(x=20.0).outcome is Outcome.ON_TIME
    assert stage.pids == pids
    assert stage.counters.late_results == late_results


def test_given_no_step_by_the_deadline_when_it_comes_then_it_is_late_as_ever(stage):
    stage.reconfigure(budget_ms=SHORT_MS)
    answer = stage.ask({"do": "wait", "step": 1, "until": "then"}, x=10.0)
    stage.reconfigure()
    (stage.folder / "then").touch()
    assert (answer.outcome, answer.fallback, answer.step) == (Outcome.LATE, Fallback.HOLD_LAST, 0)
    assert x_of(stage, answer) == 4.0  # the fixture's frame


@pytest.mark.parametrize(
    ("do", "said"),
    [("sigkill", "died"), ("raise", "RuntimeError: the model has had enough"), ("os_exit", "died")],
)
def test_given_a_run_that_fails_in_the_middle_when_noticed_then_its_newest_step_is_published_at_once(
    stage, do, said
):
    answer = stage.ask({"do": do, "step": 3}, x=10.0)
    assert (answer.outcome, answer.fallback, answer.step) == (Outcome.PARTIAL, None, 2)
    assert answer.reason.startswith("step 2 of tier full was published: ")
    assert said in answer.reason
    assert x_of(stage, answer) == 12.0
    assert answer.total_ms < BUDGET_MS
    alert = stage.alert(answer)
    assert (alert.name, alert.values["outcome"]) == ("tested: partial result", "partial")


def test_given_a_backups_whole_result_when_the_runner_has_a_step_then_the_step_is_published(
    start_own_stage,
):
    stage = start_own_stage(adapter="Stepping", backup="active", fallback=["backup", "none"])
    stage.actor.margin = Generous()
    assert stage.ask().outcome is Outcome.ON_TIME
    stage.wait_for_workers()
    pid = stage.actor.model.crew.preferred.pid
    answer, _ = ask_in_short(stage, step=2, only=pid)
    assert (answer.outcome, answer.fallback, answer.step, answer.tier) == (Outcome.PARTIAL, None, 1, 0)
    assert x_of(stage, answer) == 11.0
    assert stage.counters.backups > 0


def test_given_stale_frames_when_answered_then_the_run_that_follows_gives_all_steps_and_is_held(stage):
    """Its frame is answered before it begins.

    Were it stopped after its first step, there would be nothing to hold.
    """
    stage.reconfigure(budget_from="stamp", budget_ms=SHORT_MS)
    xs = []
    for x in (10.0, 20.0, 30.0):
        late_results = stage.counters.late_results
        answer = stage.ask(x=x, stamp_ns=time.time_ns() - 3_000_000_000)
        assert (answer.outcome, answer.fallback, answer.frame.stale) == (
            Outcome.LATE,
            Fallback.HOLD_LAST,
            True,
        )
        xs.append(x_of(stage, answer))
        wait_until(lambda: stage.counters.late_results > late_results, lambda: "its run's end")  # noqa: B023
    stage.reconfigure()
    assert xs == [4.0, 13.0, 23.0]
