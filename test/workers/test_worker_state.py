"""A worker's life as a state machine: what any threads ask for, in any order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchperf_ros.workers.worker_state import NEXT, IllegalTransition, WorkerLife, WorkerState

STARTING, SERVING, AWAY, HELD, WITHDRAWN, ENDING, STUCK, GONE = WorkerState
OVER = {WITHDRAWN, ENDING, STUCK, GONE}
"""States from which no way leads back to frames."""


def life_in(state):
    """A life that has come to this state by legal steps."""
    ways = {
        STARTING: [],
        SERVING: [SERVING],
        AWAY: [SERVING, AWAY],
        HELD: [SERVING, HELD],
        WITHDRAWN: [WITHDRAWN],
        ENDING: [ENDING],
        STUCK: [ENDING, STUCK],
        GONE: [GONE],
    }
    life = WorkerLife()
    for each in ways[state]:
        assert life.enter(each)
    return life


@pytest.mark.parametrize(
    ("before", "asked"),
    [
        (STARTING, AWAY),
        (STARTING, HELD),
        (STARTING, STUCK),
        (SERVING, STARTING),
        (SERVING, STUCK),
        (AWAY, HELD),
        (HELD, AWAY),
        (GONE, STARTING),
    ],
    ids=lambda state: state.name,
)
def test_given_a_state_that_another_cannot_follow_when_it_is_entered_then_that_is_an_error(before, asked):
    life = life_in(before)
    with pytest.raises(
        IllegalTransition, match=f"a worker that is {before.name} cannot be {asked.name} next"
    ):
        life.enter(asked)
    assert life.state is before


def test_given_a_worker_that_one_thread_has_killed_when_another_goes_on_with_it_then_it_stays_killed():
    life = life_in(SERVING)
    assert life.enter(ENDING, "it hung", hung=True)
    assert not life.enter(SERVING)
    assert not life.enter(ENDING, "the node stops")
    assert (life.state, life.reason, life.hung) == (ENDING, "it hung", True)


def test_given_another_state_than_the_one_to_come_from_when_asked_then_nothing_changes():
    life = life_in(AWAY)
    assert not life.enter_from(SERVING, HELD)
    assert life.state is AWAY


class Lives(RuleBasedStateMachine):
    """The pool, the stage and captures ask for steps of one worker in any order."""

    def __init__(self):
        super().__init__()
        self.life = WorkerLife()
        self.path = [STARTING]

    def note(self, changed):
        assert changed is (self.life.state is not self.path[-1])
        if changed:
            self.path.append(self.life.state)

    @rule(asked=st.sampled_from(list(WorkerState)))
    def a_thread_asks_for_any_state(self, asked):
        before = self.life.state
        try:
            self.note(self.life.enter(asked))
        except IllegalTransition:
            assert asked not in NEXT[before]
            assert before not in OVER or asked is STARTING
            assert self.life.state is before

    @rule(pair=st.sampled_from([(SERVING, HELD), (HELD, SERVING), (SERVING, AWAY), (AWAY, SERVING)]))
    def a_thread_asks_from_one_state_only(self, pair):
        before = self.life.state
        changed = self.life.enter_from(*pair)
        assert changed is (before is pair[0])
        self.note(changed)

    @rule()
    def it_is_killed(self):
        self.note(self.life.enter(ENDING, f"reason {len(self.path)}"))

    @invariant()
    def every_step_was_a_legal_one(self):
        assert all(after in NEXT[before] for before, after in zip(self.path, self.path[1:], strict=False))

    @invariant()
    def what_is_over_stays_over(self):
        first = next((at for at, state in enumerate(self.path) if state in OVER), len(self.path))
        assert set(self.path[first:]) <= OVER
        assert self.life.is_usable is (self.path[-1] in {SERVING, AWAY, HELD})


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
