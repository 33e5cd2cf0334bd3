from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchperf_ros.api.clock import NS_PER_S, VirtualClock
from torchperf_ros.workers.worker_pool import RestartPolicy


def delays_s(policy, clock, ready_at_ns=()):
    return [(policy.died(at_ns) - clock()) / NS_PER_S for at_ns in ready_at_ns]


def test_given_deaths_too_soon_when_they_repeat_then_the_delay_doubles_and_the_failure_becomes_lasting():
    clock = VirtualClock()
    policy = RestartPolicy(clock)
    found, lasting = [], []
    for _ in range(10):
        found += delays_s(policy, clock, [None])
        lasting.append(policy.gave_up)
        clock.advance_ms(1000)
    assert found == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert lasting == [False] * 2 + [True] * 8


def test_given_a_worker_that_has_run_many_frames_when_it_dies_again_and_again_then_it_is_replaced_at_once():
    clock = VirtualClock()
    policy = RestartPolicy(clock)
    for frames, delay_ms in ((150, 0), (600, 0), (149, 0), (149, 500), (150, 0)):
        ready_at_ns = clock()
        clock.advance_ms(1300)
        assert policy.died(ready_at_ns, frames) - clock() == delay_ms * 1_000_000
    assert not policy.gave_up


def test_given_an_error_that_no_restart_mends_when_the_worker_dies_then_it_is_lasting_at_once():
    clock = VirtualClock()
    policy = RestartPolicy(clock)
    policy.give_up()
    assert not policy.gave_up
    assert delays_s(policy, clock, [None]) == [30.0]
    assert policy.gave_up
    assert delays_s(policy, clock, [None]) == [2.0]  # of another error: as the fourth early death


class RestartMachine(RuleBasedStateMachine):
    """Any history of lives and deaths.

    A restart is never in the past, never later than the longest delay.
    """

    def __init__(self):
        super().__init__()
        self.clock = VirtualClock()
        self.policy = RestartPolicy(self.clock)
        self.early = 0
        self.deaths = 0
        self.permanent = False
        self.last_delay_ns = 0

    @rule(
        lived_ms=st.integers(0, 10_000) | st.sampled_from([4999, 5000]),
        became_ready=st.booleans(),
        frames=st.sampled_from([0, 1, 149, 150, 600]),
    )
    def die(self, lived_ms, became_ready, frames):
        frames *= became_ready
        ready_at_ns = self.clock() if became_ready else None
        self.clock.advance_ms(lived_ms)
        # to the millisecond: one that served is replaced at once
        proven = frames >= 150 or (became_ready and lived_ms >= 5000)
        self.early = 0 if proven else self.early + 1
        self.deaths += 1
        delay_ns = self.policy.died(ready_at_ns, frames) - self.clock()
        assert delay_ns <= 30 * NS_PER_S
        if self.permanent:
            self.early, self.permanent, self.last_delay_ns = max(self.early, 3), False, 0
            assert delay_ns == 30 * NS_PER_S
            return
        assert (delay_ns == 0) is (self.early <= 1)
        if self.early > 1:
            assert delay_ns >= self.last_delay_ns
        self.last_delay_ns = delay_ns

    @rule()
    def give_up(self):
        self.policy.give_up()
        self.permanent = True

    @invariant()
    def every_death_is_counted_and_only_a_row_of_early_ones_is_lasting(self):
        assert self.policy.restarts == self.deaths
        assert self.policy.gave_up is (self.early >= 3)


TestRestartMachine = RestartMachine.TestCase
TestRestartMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
