import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchperf_ros.api.clock import VirtualClock
from torchperf_ros.api.outcome import IN_TIME, Fallback, Health, Outcome
from torchperf_ros.settings.config import stage_config
from torchperf_ros.stage.health import HealthTracker

LIMITS = stage_config("perception", {"input_timeout_ms": 1000.0, "sustained_misses": 10})


class Stage:
    """A tracker with a clock, spoken to frame by frame."""

    def __init__(self, limits=LIMITS):
        self.clock = VirtualClock()
        self.health = HealthTracker(limits, self.clock())

    def frame(self, outcome=Outcome.ON_TIME, fallback=None, tier=0, times=1):
        for _ in range(times):
            self.clock.advance_ms(33)
            self.health.input_at(self.clock())
            self.health.answered(outcome, fallback, tier, None)

    def do(self, what, times):
        if what in FRAMES:
            self.frame(*FRAMES[what], times=times)
        elif what == "silence":
            self.clock.advance_ms(times)
        else:
            getattr(self.health, what)()

    @property
    def state(self):
        return self.health.state(self.clock())


FRAMES = {
    "good": (Outcome.ON_TIME, None, 0), "lower": (Outcome.ON_TIME, None, 1), "lowest": (Outcome.ON_TIME, None, 2),
    "miss": (Outcome.LATE, Fallback.HOLD_LAST, 0), "late": (Outcome.LATE, None, 0),
    "backup": (Outcome.CRASHED, Fallback.BACKUP, 2), "bad": (Outcome.BAD_INPUT, Fallback.NONE, -1),
    "partial": (Outcome.PARTIAL, None, 0), "held": (Outcome.ERROR, Fallback.HOLD_LAST, 0),
    "stop": (Outcome.ERROR, Fallback.STOP, 0), "none": (Outcome.ERROR, Fallback.NONE, 0),
    "withheld": (Outcome.ON_TIME, Fallback.STOP, 0),
    "starting": (Outcome.STARTING, Fallback.NONE, -1), "starting_held": (Outcome.STARTING, Fallback.HOLD_LAST, -1),
}  # fmt: skip
"""Outcome, fallback and tier of what a frame came to."""
RULES = {
    "a new stage is starting, with input too": "starting 100 STARTING",
    "a ready stage waits for its first input": "ready 1 WAITING",
    "frames before the first is ready are not held against it": (
        "starting 100 STARTING, ready 1 x, good 1 NOMINAL"
    ),
    "without input for longer than its time-out it waits, and comes back": (
        "ready 1 x, good 1 NOMINAL, silence 1000 NOMINAL, silence 1 WAITING, good 1 NOMINAL"
    ),
    "one miss degrades": "ready 1 x, good 1 NOMINAL, miss 1 DEGRADED",
    "one frame of the backup degrades": "ready 1 x, good 1 NOMINAL, backup 1 DEGRADED",
    "one frame on a lower tier degrades": "ready 1 x, good 1 NOMINAL, lower 1 DEGRADED",
    "one partial result degrades, and no more of them do worse": "ready 1 x, partial 500 DEGRADED",
    "a partial result between breaks the row": "ready 1 x, miss 9 x, partial 1 x, miss 9 DEGRADED",
    "after a safe stop partial results make it degraded and no better": (
        "ready 1 x, miss 10 x, partial 300 DEGRADED"
    ),
    "one result of its own that is late degrades": "ready 1 x, good 1 NOMINAL, late 1 DEGRADED",
    "one bad input degrades": "ready 1 x, good 1 NOMINAL, bad 1 DEGRADED",
    "30 frames at their best make it nominal again": (
        "ready 1 x, miss 1 DEGRADED, good 29 DEGRADED, good 1 NOMINAL"
    ),
    "a good run that is broken counts anew": (
        "ready 1 x, miss 1 DEGRADED, good 29 x, miss 1 x, good 29 DEGRADED, good 1 NOMINAL"
    ),
    "on a lower tier it stays degraded": "ready 1 x, lower 500 DEGRADED",
    "ten misses in a row stop it safely, and no fewer": (
        "ready 1 x, good 1 x, miss 9 DEGRADED, miss 1 SAFE_STOP"
    ),
    "a backup's answer between breaks the row": "ready 1 x, miss 9 x, backup 1 x, miss 9 DEGRADED",
    "a late answer of its own between breaks the row": "ready 1 x, miss 9 x, late 1 x, miss 9 DEGRADED",
    "a good one between breaks the row": "ready 1 x, miss 9 x, good 1 x, miss 9 DEGRADED",
    "a held output counts as a miss": "ready 1 x, held 10 SAFE_STOP",
    "a stop counts as a miss": "ready 1 x, stop 10 SAFE_STOP",
    "what the emergency lane withholds is none": "ready 1 x, good 1 NOMINAL, withheld 50 NOMINAL",
    "nothing counts as a miss": "ready 1 x, none 10 SAFE_STOP",
    "after a safe stop it climbs one state at a time": (
        "ready 1 x, miss 10 x, good 29 SAFE_STOP, good 1 DEGRADED, good 29 DEGRADED, good 1 NOMINAL"
    ),
    "after a safe stop on a lower tier it is degraded and no better": (
        "ready 1 x, miss 10 x, lowest 300 DEGRADED"
    ),
    "after a safe stop the backup alone is no recovery": "ready 1 x, miss 10 x, backup 300 SAFE_STOP",
    "workers that keep dying are a safe stop until answers prove otherwise": (
        "ready 1 x, good 1 x, lost 1 x, gave_up 1 SAFE_STOP, ready 1 SAFE_STOP, good 30 DEGRADED"
    ),
    "without its worker it starts again, and those frames count as misses": (
        "ready 1 x, good 1 x, lost 1 STARTING, starting_held 10 SAFE_STOP"
    ),
    "a safe stop shows when input stops, too": "ready 1 x, miss 10 x, silence 60000 SAFE_STOP",
}
"""What happens how often (or for how many ms), and the state after it; x: it does not matter."""


@pytest.mark.parametrize("rule", RULES)
def test_given_a_stage_when_this_happens_then_the_rule_holds(rule):
    stage = Stage()
    for step in RULES[rule].split(", "):
        what, times, state = step.split()
        stage.do(what, int(times))
        assert state in {"x", stage.state.name}, step


class HealthMachine(RuleBasedStateMachine):
    """Any history: unknown is never nominal, one miss is never a safe stop, recovery takes its frames."""

    LIMITS = stage_config("perception", {"input_timeout_ms": 1000.0, "sustained_misses": 3})

    def __init__(self):
        super().__init__()
        self.stage = Stage(self.LIMITS)
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
        outcome=st.sampled_from(sorted(set(Outcome) - {Outcome.ON_TIME})),
        fallback=st.sampled_from([None, *Fallback]),
        tier=st.integers(-1, 2),
        times=st.integers(1, 4),
    )
    def frames_not_on_time(self, outcome, fallback, tier, times):
        self.frames(outcome, fallback, tier, times)

    def frames(self, outcome, fallback, tier, times):
        self.stage.frame(outcome, fallback, tier, times=times)
        self.seen, self.silent_ms = True, 0.0
        if outcome is Outcome.STARTING and not self.was_ready:
            return
        fresh = fallback in {None, Fallback.BACKUP} or outcome in IN_TIME
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
        assert self.stage.health.misses_in_a_row == self.stale_in_a_row
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
