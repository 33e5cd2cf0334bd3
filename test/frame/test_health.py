import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchperf_ros.frame.clock import VirtualClock
from torchperf_ros.frame.health import HealthLimits, HealthTracker
from torchperf_ros.frame.outcome import Fallback, Health, Outcome

LIMITS = HealthLimits(input_timeout_ms=1000.0, sustained_misses=10, recover_frames=30)


class Stage:
    """A tracker with a clock, spoken to frame by frame."""

    def __init__(self, *, ready=True, limits=LIMITS):
        self.clock = VirtualClock()
        self.health = HealthTracker(limits, self.clock())
        if ready:
            self.health.ready()

    def frame(self, outcome=Outcome.ON_TIME, fallback=None, tier=0, times=1):
        for _ in range(times):
            self.clock.advance_ms(33)
            self.health.input_at(self.clock())
            self.health.answered(outcome, fallback, tier)
        return self.state

    def missed(self, times=1):
        return self.frame(Outcome.LATE, Fallback.HOLD_LAST, times=times)

    @property
    def state(self):
        return self.health.state(self.clock())


def test_given_a_new_stage_when_asked_then_it_is_starting_even_with_input():
    stage = Stage(ready=False)
    assert stage.state is Health.STARTING
    assert stage.frame(Outcome.STARTING, Fallback.NONE, tier=-1, times=100) is Health.STARTING


def test_given_a_ready_worker_when_no_input_has_come_then_the_stage_waits():
    assert Stage().state is Health.WAITING


def test_given_a_new_stage_that_was_starting_for_long_when_ready_then_nothing_is_held_against_it():
    stage = Stage(ready=False)
    stage.frame(Outcome.STARTING, Fallback.NONE, tier=-1, times=100)
    stage.health.ready()
    assert stage.frame() is Health.NOMINAL


def test_given_input_when_it_stops_for_longer_than_its_timeout_then_the_stage_waits_and_comes_back():
    stage = Stage()
    assert stage.frame() is Health.NOMINAL
    stage.clock.advance_ms(1000)
    assert stage.state is Health.NOMINAL
    stage.clock.advance_ms(1)
    assert stage.state is Health.WAITING
    assert stage.frame() is Health.NOMINAL


@pytest.mark.parametrize(
    ("outcome", "fallback", "tier"),
    [
        (Outcome.LATE, Fallback.HOLD_LAST, 0),
        (Outcome.CRASHED, Fallback.BACKUP, 2),
        (Outcome.ON_TIME, None, 1),
        (Outcome.LATE, None, 0),
        (Outcome.BAD_INPUT, Fallback.NONE, -1),
    ],
)
def test_given_a_nominal_stage_when_one_frame_is_not_at_its_best_then_it_is_degraded_and_no_worse(
    outcome, fallback, tier
):
    stage = Stage()
    stage.frame()
    assert stage.frame(outcome, fallback, tier) is Health.DEGRADED


def test_given_a_degraded_stage_when_enough_frames_are_at_their_best_then_it_is_nominal_and_no_sooner():
    stage = Stage()
    stage.missed()
    assert stage.frame(times=29) is Health.DEGRADED
    assert stage.frame() is Health.NOMINAL


def test_given_a_degraded_stage_when_a_good_run_is_broken_then_it_counts_anew():
    stage = Stage()
    stage.missed()
    stage.frame(times=29)
    stage.missed()
    assert stage.frame(times=29) is Health.DEGRADED
    assert stage.frame() is Health.NOMINAL


def test_given_a_degraded_stage_when_it_stays_on_a_lower_tier_then_it_stays_degraded():
    stage = Stage()
    assert stage.frame(tier=1, times=500) is Health.DEGRADED


def test_given_misses_when_they_are_sustained_then_the_stage_stops_safely_and_no_sooner():
    stage = Stage()
    stage.frame()
    assert stage.missed(9) is Health.DEGRADED
    assert stage.missed() is Health.SAFE_STOP


@pytest.mark.parametrize("fresh", [(Outcome.LATE, Fallback.BACKUP), (Outcome.LATE, None), (Outcome.ON_TIME, None)])
def test_given_misses_when_a_fresh_answer_comes_between_then_they_are_not_in_a_row(fresh):
    stage = Stage()
    stage.missed(9)
    stage.frame(*fresh)
    assert stage.missed(9) is Health.DEGRADED


@pytest.mark.parametrize("fallback", [Fallback.HOLD_LAST, Fallback.STOP, Fallback.NONE])
def test_given_any_stale_answer_when_repeated_then_each_counts_as_a_miss(fallback):
    stage = Stage()
    assert stage.frame(Outcome.ERROR, fallback, times=10) is Health.SAFE_STOP
    assert stage.health.misses_in_a_row == 10


def test_given_a_safe_stop_when_frames_are_on_time_again_then_it_climbs_one_state_at_a_time():
    stage = Stage()
    stage.missed(10)
    assert stage.frame(times=29) is Health.SAFE_STOP
    assert stage.frame() is Health.DEGRADED
    assert stage.frame(times=29) is Health.DEGRADED
    assert stage.frame() is Health.NOMINAL


def test_given_a_safe_stop_when_frames_are_on_time_on_a_lower_tier_then_it_is_degraded_and_no_better():
    stage = Stage()
    stage.missed(10)
    assert stage.frame(tier=2, times=300) is Health.DEGRADED


def test_given_a_safe_stop_when_only_the_backup_answers_then_it_does_not_recover():
    stage = Stage()
    stage.missed(10)
    assert stage.frame(Outcome.CRASHED, Fallback.BACKUP, 2, times=300) is Health.SAFE_STOP


def test_given_workers_that_keep_dying_when_given_up_then_it_is_a_safe_stop_until_answers_prove_otherwise():
    stage = Stage()
    stage.frame()
    stage.health.lost()
    stage.health.gave_up()
    assert stage.state is Health.SAFE_STOP
    stage.health.ready()
    assert stage.state is Health.SAFE_STOP
    assert stage.frame(times=30) is Health.DEGRADED


def test_given_a_worker_that_served_when_it_is_lost_then_the_stage_starts_and_its_frames_count_as_misses():
    stage = Stage()
    stage.frame()
    stage.health.lost()
    assert stage.state is Health.STARTING
    assert stage.frame(Outcome.STARTING, Fallback.HOLD_LAST, -1, times=10) is Health.SAFE_STOP


def test_given_a_safe_stop_when_input_stops_then_the_failure_still_shows():
    stage = Stage()
    stage.missed(10)
    stage.clock.advance_ms(60_000)
    assert stage.state is Health.SAFE_STOP


class HealthMachine(RuleBasedStateMachine):
    """Any history: unknown is never nominal, one miss is never a safe stop, recovery takes its frames."""

    LIMITS = HealthLimits(input_timeout_ms=1000.0, sustained_misses=3, recover_frames=4)

    def __init__(self):
        super().__init__()
        self.stage = Stage(ready=False, limits=self.LIMITS)
        self.is_ready = self.was_ready = False
        self.stale_in_a_row = 0
        self.on_time_in_a_row = 0
        self.best_in_a_row = 0
        self.gave_up_since_good = False
        self.silent_ms = 0.0
        self.seen = False
        self.imperfect = False

    @rule(tier=st.integers(0, 2), times=st.integers(1, 4))
    def frames_on_time(self, tier, times):
        self.frames(Outcome.ON_TIME, None, tier, times)

    @rule(
        outcome=st.sampled_from(sorted(set(Outcome) - {Outcome.ON_TIME})), fallback=st.sampled_from([None, *Fallback]),
        tier=st.integers(-1, 2), times=st.integers(1, 4),
    )  # fmt: skip
    def frames_not_on_time(self, outcome, fallback, tier, times):
        self.frames(outcome, fallback, tier, times)

    def frames(self, outcome, fallback, tier, times):
        self.stage.frame(outcome, fallback, tier, times=times)
        self.seen, self.silent_ms = True, 0.0
        if outcome is Outcome.STARTING and not self.was_ready:
            return
        fresh = fallback in {None, Fallback.BACKUP}
        best = outcome is Outcome.ON_TIME and tier == 0
        self.stale_in_a_row = 0 if fresh else self.stale_in_a_row + times
        self.on_time_in_a_row = self.on_time_in_a_row + times if outcome is Outcome.ON_TIME else 0
        self.best_in_a_row = self.best_in_a_row + times if best else 0
        self.imperfect = self.imperfect or not best

    @rule()
    def ready(self):
        self.stage.health.ready()
        self.is_ready = self.was_ready = True

    @rule()
    def lost(self):
        self.stage.health.lost()
        self.is_ready = False

    @rule()
    def gave_up(self):
        self.stage.health.gave_up()
        self.on_time_in_a_row = self.best_in_a_row = 0
        self.imperfect = True

    @rule(ms=st.floats(0, 1500))
    def silence(self, ms):
        self.stage.clock.advance_ms(ms)
        self.silent_ms += ms

    @invariant()
    def the_state_follows_from_the_history(self):
        state = self.stage.state
        if self.stale_in_a_row >= self.LIMITS.sustained_misses:
            assert state is Health.SAFE_STOP
        if state is Health.NOMINAL:
            assert self.is_ready
            assert self.seen
            assert self.silent_ms <= self.LIMITS.input_timeout_ms + 1e-3
            assert not self.imperfect or self.best_in_a_row >= self.LIMITS.recover_frames
        if state is Health.WAITING:
            assert not self.seen or self.silent_ms > self.LIMITS.input_timeout_ms - 1e-3
        if state is Health.STARTING:
            assert not self.is_ready
        if self.on_time_in_a_row >= self.LIMITS.recover_frames:
            assert state is not Health.SAFE_STOP


TestHealthMachine = HealthMachine.TestCase
TestHealthMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
