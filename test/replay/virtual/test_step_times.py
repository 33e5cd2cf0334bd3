import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.core.frame import StepTimes
from torchperf_ros.core.outcome import Outcome
from torchperf_ros.replay.virtual.step_times import KnownRun, Spread, StageTimes, TierTimes

STAMP_NS = 1_700_000_000_000_000_000
FULL, FAST = TierTimes(Spread((20.0,))), TierTimes(Spread((5.0,)))
STEPS = StepTimes(0.5, 1.0, 33.0, 0.25)


def times(**own):
    return StageTimes([FULL, FAST], **own)


def known(**own):
    return times(known={STAMP_NS: KnownRun(**{"tier": 0, "outcome": Outcome.ON_TIME, "steps": STEPS, **own})})


def test_given_a_fixed_time_when_drawn_then_it_is_always_that():
    assert {Spread((20.0,)).draw(random.Random(n)) for n in range(5)} == {20.0}


def test_given_median_and_p99_when_drawn_often_then_the_draws_have_them():
    spread = Spread((20.0,), math.log(35 / 20) / 2.3263478740408408)
    rng = random.Random(1)
    drawn = sorted(spread.draw(rng) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(20.0, rel=0.01)
    assert drawn[19_800] == pytest.approx(35.0, rel=0.03)
    assert spread.calibration.median_ms == 20.0
    assert spread.calibration.p99_ms == pytest.approx(35.0, abs=0.001)


def test_given_samples_when_drawn_then_only_they_come_and_the_calibration_is_theirs():
    spread = Spread((1.0, 2.0, 3.0, 50.0))
    assert {spread.draw(random.Random(n)) for n in range(100)} == {1.0, 2.0, 3.0, 50.0}
    assert (spread.calibration.median_ms, spread.calibration.p99_ms) == (2.0, 50.0)


@given(st.permutations([(0, 0, 0), (1, 0, 0), (2, 1, 0), (2, 1, 1), (3, 0, 1)]))
def test_given_runs_in_any_order_when_drawn_then_each_takes_the_same(order):
    stage = StageTimes([TierTimes(Spread((20.0,), 0.3)), TierTimes(Spread((5.0,), 0.3))], seed=7)
    assert {run: stage.run(0, *run) for run in order} == {run: stage.run(0, *run) for run in sorted(order)}


def test_given_another_seed_when_drawn_then_it_takes_another_time():
    tiers = [TierTimes(Spread((20.0,), 0.3))]
    assert StageTimes(tiers, seed=1).run(0, 5, 0, 0) != StageTimes(tiers, seed=2).run(0, 5, 0, 0)


@pytest.mark.parametrize("off_ns", [0, 4_000_000, -4_000_000])
def test_given_a_frame_of_the_log_when_run_on_its_tier_then_it_takes_what_it_took(off_ns):
    assert known().run(STAMP_NS + off_ns, 3, 0, 0).steps == STEPS


@pytest.mark.parametrize(
    ("stamp_ns", "tier", "attempt"), [(STAMP_NS + 6_000_000, 0, 0), (0, 0, 0), (STAMP_NS, 1, 0), (STAMP_NS, 0, 1)]
)
def test_given_another_frame_tier_or_attempt_when_run_then_its_time_is_drawn(stamp_ns, tier, attempt):
    assert known().run(stamp_ns, 3, tier, attempt).steps.inference_ms == (FULL, FAST)[tier].inference.samples[0]


@pytest.mark.parametrize("outcome", [Outcome.LATE, Outcome.HUNG, Outcome.CRASHED])
def test_given_a_frame_that_ended_badly_when_run_first_then_it_ends_so_and_its_backup_does_not(outcome):
    stage = known(outcome=outcome, steps=StepTimes())
    assert stage.run(STAMP_NS, 3, 0, 0).ending is outcome
    assert stage.run(STAMP_NS, 3, 1, 1).ending is Outcome.ON_TIME


def test_given_a_frame_that_its_backup_answered_when_the_backup_runs_then_it_takes_what_it_took():
    stage = known(tier=1, outcome=Outcome.LATE, backup=True)
    assert stage.run(STAMP_NS, 3, 1, 1).steps == STEPS
