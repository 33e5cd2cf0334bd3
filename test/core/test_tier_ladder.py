import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchperf_ros.core.sorted_window import SortedWindow
from torchperf_ros.core.tier_ladder import Calibration, TierClock, TierLadder, usual_p99

FRESH_MS = 50.0
UP_AFTER = 5


def ladder(*calibrated_ms, step_up_after=UP_AFTER):
    made = TierLadder(len(calibrated_ms), step_up_after)
    made.calibrate([Calibration(ms, ms) for ms in calibrated_ms])
    return made


def run(made, times_ms, frames, fresh_ms=FRESH_MS, *, spare=True):
    """Frames on a machine where tier i takes times_ms[i]; returns the level after each frame."""
    levels = []
    for _ in range(frames):
        tier = made.choose(fresh_ms, fresh_ms)
        made.learn(tier, times_ms[tier], 0.0)
        probed = made.probe(fresh_ms, spare_worker=spare)
        if probed is not None:
            made.learn(probed, times_ms[probed], 0.0)
            made.probed(probed, times_ms[probed], fresh_ms)
        levels.append(made.level)
    return levels


def test_given_no_calibration_when_a_frame_comes_then_the_most_accurate_tier_is_tried():
    assert TierLadder(3).choose(FRESH_MS, FRESH_MS) == 0


def test_given_calibrations_when_a_frame_comes_then_the_most_accurate_tier_that_fits_runs():
    made = ladder(80.0, 40.0, 10.0)
    assert made.choose(FRESH_MS, FRESH_MS) == 1
    assert made.level == 1


def test_given_no_tier_that_fits_when_a_frame_comes_then_the_cheapest_runs():
    made = ladder(80.0, 70.0, 60.0)
    assert made.choose(FRESH_MS, FRESH_MS) == made.last == 2


def test_given_a_frame_that_waited_when_chosen_then_a_cheaper_tier_runs_but_the_level_stays():
    made = ladder(40.0, 20.0, 5.0)
    assert made.choose(left_ms=10.0, fresh_ms=FRESH_MS) == 2
    assert made.level == 0
    assert made.choose(left_ms=FRESH_MS, fresh_ms=FRESH_MS) == 0


def test_given_overhead_when_predicted_then_it_counts_with_the_inference():
    made = ladder(45.0, 10.0)
    made.learn(0, 45.0, 6.0)
    assert made.predicted_ms(0) == pytest.approx(51.0)
    assert made.choose(FRESH_MS, FRESH_MS) == 1


def test_given_a_tier_that_grew_slow_when_the_next_frame_comes_then_the_step_down_is_at_once():
    made = ladder(20.0, 5.0)
    run(made, [20.0, 5.0], 20)
    assert made.level == 0
    for _ in range(2):  # the second slow run: one alone may be an isolated stall
        made.learn(0, 70.0, 0.0)
    assert made.choose(FRESH_MS, FRESH_MS) == 1
    assert made.level == 1


def test_given_a_lower_level_when_all_fits_then_the_step_up_waits_for_a_run_of_frames_and_good_probes():
    made = ladder(20.0, 5.0)
    made.choose(10.0, fresh_ms=10.0)
    assert made.level == 1
    patience = 2 * UP_AFTER  # the step down came soon
    for frame in range(1, patience + 1):
        assert made.probe(FRESH_MS, spare_worker=True) is None, frame
        made.choose(FRESH_MS, FRESH_MS)
    for number in range(TierLadder.PROBES):
        assert made.level == 1, number
        assert made.probe(FRESH_MS, spare_worker=True) == 0
        made.probed(0, 20.0, FRESH_MS)
    assert made.level == 0


def test_given_a_run_of_fitting_frames_when_one_does_not_fit_then_the_run_starts_anew():
    made = ladder(20.0, 5.0)
    made.choose(10.0, fresh_ms=10.0)
    assert made.level == 1
    for _ in range(2 * UP_AFTER - 1):
        made.choose(FRESH_MS, FRESH_MS)
    made.choose(10.0, fresh_ms=10.0)
    for _ in range(2 * UP_AFTER - 1):
        made.choose(FRESH_MS, FRESH_MS)
        assert made.probe(FRESH_MS, spare_worker=True) is None
    made.choose(FRESH_MS, FRESH_MS)
    assert made.probe(FRESH_MS, spare_worker=True) == 0


def test_given_a_probe_that_does_not_fit_when_reported_then_the_patience_doubles():
    made = ladder(20.0, 5.0)
    made.choose(10.0, fresh_ms=10.0)

    def frames_until_probe():
        count = 0
        while made.probe(FRESH_MS, spare_worker=True) is None:
            made.choose(FRESH_MS, FRESH_MS)
            count += 1
        return count

    waits = []
    for _ in range(8):
        waits.append(frames_until_probe())
        made.probed(0, FRESH_MS + 1, FRESH_MS)
    assert waits == [min(2**n, 32) * UP_AFTER for n in range(1, 9)]


def test_given_good_probes_when_one_fails_then_the_good_ones_do_not_count_any_more():
    made = ladder(20.0, 5.0)
    made.choose(10.0, fresh_ms=10.0)
    for took_ms in (20.0, 20.0, FRESH_MS + 1, 20.0, 20.0):
        made.probed(0, took_ms, FRESH_MS)
    assert made.level == 1
    made.probed(0, 20.0, FRESH_MS)
    assert made.level == 0


def test_given_a_probe_of_another_tier_than_the_next_when_reported_then_it_counts_for_nothing():
    made = ladder(20.0, 10.0, 5.0)
    made.choose(6.0, fresh_ms=6.0)
    assert made.level == 2
    for _ in range(10):
        made.probed(0, 1.0, FRESH_MS)
    assert made.level == 2


def test_given_no_spare_worker_when_a_frame_could_not_wait_for_the_probe_then_there_is_none():
    made = ladder(40.0, 15.0)
    made.choose(20.0, fresh_ms=20.0)
    for _ in range(2 * UP_AFTER):
        made.choose(FRESH_MS, FRESH_MS)
    assert made.probe(FRESH_MS, spare_worker=True) == 0
    assert made.probe(FRESH_MS, spare_worker=False) is None
    assert made.probe(56.0, spare_worker=False) == 0


def test_given_the_most_accurate_level_when_probed_then_there_is_nothing_above():
    made = ladder(1.0, 1.0)
    run(made, [1.0, 1.0], 50)
    assert made.level == 0
    assert made.probe(FRESH_MS, spare_worker=True) is None


@pytest.mark.parametrize("every", [40, 100])
def test_given_isolated_stalls_when_frames_run_then_the_level_stays(every):
    made = ladder(20.0, 5.0)
    for frame in range(400):
        made.choose(FRESH_MS, FRESH_MS)
        made.learn(0, 500.0 if frame % every == every - 1 else 20.0, 0.0)
    assert made.level == 0


def test_given_frequent_stalls_when_frames_run_then_the_ladder_steps_down():
    made = ladder(20.0, 5.0)
    levels = run(made, [20.0, 5.0], 50)
    for frame in range(60):
        tier = made.choose(FRESH_MS, FRESH_MS)
        made.learn(tier, [500.0 if frame % 4 == 0 else 20.0, 5.0][tier], 0.0)
        levels.append(made.level)
    assert levels[49] == 0
    assert levels[-1] == 1


def test_given_calibration_under_load_when_the_load_is_gone_then_the_ladder_climbs_back():
    made = ladder(400.0, 200.0, 100.0)
    assert run(made, [20.0, 10.0, 5.0], 1)[-1] == 2
    assert run(made, [20.0, 10.0, 5.0], 400)[-1] == 0


def test_given_calibration_on_an_idle_machine_when_it_is_loaded_then_the_tiers_above_are_not_trusted():
    made = ladder(40.0, 20.0, 5.0)
    assert run(made, [200.0, 100.0, 25.0], 200)[-1] == 2
    assert made.predicted_ms(1) == pytest.approx(100.0, rel=0.1)


def test_given_a_tier_that_only_fits_alone_when_frames_run_then_it_does_not_flap():
    """The probe fits, the frames do not: each climb doubles the patience, so climbs grow rare."""
    made = ladder(40.0, 5.0)
    climbs = []
    for frame in range(4000):
        before = made.level
        tier = made.choose(FRESH_MS, FRESH_MS)
        made.learn(tier, [60.0, 5.0][tier], 0.0)
        if made.probe(FRESH_MS, spare_worker=True) is not None:
            made.learn(0, 40.0, 0.0)
            made.probed(0, 40.0, FRESH_MS)
        if made.level < before:
            climbs.append(frame)
    gaps = np.diff(climbs)
    assert len(climbs) < 40
    assert max(gaps) > 16 * UP_AFTER


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=200))
def test_given_any_samples_when_predicted_then_it_lies_within_them_and_not_above_their_p99(samples):
    p99_ms = usual_p99(window_of(samples))
    assert min(samples) <= p99_ms <= np.percentile(samples, 99) * (1 + 1e-9)


def window_of(samples):
    window = SortedWindow(len(samples))
    for sample in samples:
        window.add(sample)
    return window


@pytest.mark.parametrize(("stalls", "counted"), [(1, False), (10, False), (11, True), (30, True)])
def test_given_a_hundred_samples_when_at_most_a_tenth_are_stalls_then_they_do_not_count(stalls, counted):
    samples = [10.0] * (100 - stalls) + [100.0] * stalls
    assert (usual_p99(window_of(samples)) > 50.0) is counted


def test_given_a_tier_clock_when_forgotten_then_it_predicts_by_its_calibration_again():
    clock = TierClock()
    clock.calibration = Calibration(10.0, 12.0)
    assert clock.p99_ms() == 12.0
    assert clock.p99_ms(slowdown=2.0) == 24.0
    clock.add(5.0)
    assert clock.p99_ms() == 12.0  # few runs: the calibration still holds
    for _ in range(20):
        clock.add(5.0)
    assert clock.p99_ms() == 5.0
    assert clock.slowdown == 0.5
    clock.forget()
    assert clock.p99_ms() == 12.0
    assert clock.slowdown is None


def test_given_calibrations_of_another_number_of_tiers_when_taken_then_they_are_refused():
    with pytest.raises(ValueError, match="zip"):
        TierLadder(2).calibrate([Calibration(1.0, 1.0)])


class LadderMachine(RuleBasedStateMachine):
    """Any times, budgets and probes: the choice fits or is the cheapest, and the level climbs one step at a time."""

    def __init__(self):
        super().__init__()
        self.made = ladder(30.0, 15.0, 5.0, step_up_after=3)
        self.good_probes = 0

    @rule(left_ms=st.floats(-5, 100), fresh_ms=st.floats(1, 100))
    def choose(self, left_ms, fresh_ms):
        before = self.made.level
        tier = self.made.choose(left_ms, fresh_ms)
        assert tier == self.made.last or self.made.predicted_ms(tier) <= left_ms
        assert before <= self.made.level <= tier <= self.made.last
        assert self.made.level == self.made.last or self.made.predicted_ms(self.made.level) <= fresh_ms
        for skipped in range(self.made.level, tier):
            assert self.made.predicted_ms(skipped) > left_ms
        if self.made.level > before:
            self.good_probes = 0

    @rule(tier=st.integers(0, 2), inference_ms=st.floats(0.1, 200), overhead_ms=st.floats(0, 10))
    def learn(self, tier, inference_ms, overhead_ms):
        self.made.learn(tier, inference_ms, overhead_ms)

    @rule(fresh_ms=st.floats(1, 100), spare=st.booleans())
    def probe(self, fresh_ms, spare):
        tier = self.made.probe(fresh_ms, spare)
        assert tier is None or (tier == self.made.level - 1 and self.made.predicted_ms(tier) <= fresh_ms)

    @rule(tier=st.integers(0, 2), took_ms=st.floats(0.1, 200), fresh_ms=st.floats(1, 100))
    def probed(self, tier, took_ms, fresh_ms):
        before = self.made.level
        self.made.probed(tier, took_ms, fresh_ms)
        if tier == before - 1:
            self.good_probes = self.good_probes + 1 if took_ms <= fresh_ms else 0
        climbed = before - self.made.level
        assert climbed == (1 if self.good_probes == TierLadder.PROBES else 0)
        if climbed:
            self.good_probes = 0

    @invariant()
    def the_level_is_a_tier(self):
        assert 0 <= self.made.level <= self.made.last


TestLadderMachine = LadderMachine.TestCase
TestLadderMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_given_tiers_that_are_left_out_when_chosen_then_a_lower_one_runs_and_is_left_only_when_they_are_back():
    ladder = TierLadder(3, step_up_after=2)
    ladder.calibrate([Calibration(1.0, 1.0)] * 3)
    ladder.left_out = 1
    assert [ladder.choose(50.0, 50.0) for _ in range(20)] == [1] * 20
    assert ladder.probe(50.0, True) is None
    ladder.left_out = 0
    assert ladder.probe(50.0, True) == 0
