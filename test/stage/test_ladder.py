import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.stage.ladder import TierClock, TierLadder
from torchperf_ros.stage.limits import MemoryGuard
from torchperf_ros.workers.calibration import Calibration, SortedWindow, usual_p99

FRESH_MS = 50.0
FRAME_NS = 33_333_333
START_NS = 1_000 * NS_PER_S


def ladder(*calibrated_ms):
    made = TierLadder(len(calibrated_ms))
    made.calibrate([Calibration(ms, ms) for ms in calibrated_ms])
    return made


class Drive:
    """Frames at 30 Hz on a machine where tier i takes times_ms[i], with a spare worker or without one."""

    def __init__(self, made, times_ms, *, fresh_ms=FRESH_MS, spare=True):
        self.made, self.times_ms, self.fresh_ms, self.spare = made, times_ms, fresh_ms, spare
        self.now_ns, self.busy_until_ns = START_NS, 0
        self.levels, self.slow, self.probes, self.failed, self.lost = [], 0, 0, 0, 0

    def choose(self, left_ms=None, fresh_ms=None):
        self.now_ns += FRAME_NS
        fresh_ms = fresh_ms or self.fresh_ms
        return self.made.choose(fresh_ms if left_ms is None else left_ms, fresh_ms, self.now_ns)

    def frame(self, times_ms=None):
        times_ms = times_ms or self.times_ms
        tier = self.choose()
        self.made.learn(tier, times_ms[tier], 0.0)
        self.slow += times_ms[tier] > self.fresh_ms
        if self.now_ns >= self.busy_until_ns:
            self.probe(times_ms, max(0.0, FRAME_NS / NS_PER_MS - times_ms[tier]))
        self.levels.append(self.made.level)

    def probe(self, times_ms, room_ms):
        probed = self.made.probe(self.fresh_ms, self.now_ns, math.inf if self.spare else room_ms)
        if probed is None:
            return
        took_ms = times_ms[probed]
        self.probes += 1
        self.failed += took_ms > self.fresh_ms
        self.lost += not self.spare and took_ms + times_ms[-1] > room_ms + self.fresh_ms
        self.busy_until_ns = self.now_ns + took_ms * NS_PER_MS
        self.made.probed(probed, took_ms, took_ms, self.fresh_ms)

    def run(self, frames, times_ms=None):
        for _ in range(frames):
            self.frame(times_ms)
        return self


def best(times_ms, fresh_ms=FRESH_MS):
    return next((tier for tier, ms in enumerate(times_ms) if ms <= fresh_ms), len(times_ms) - 1)


def wait_for_probe(drive):
    """Seconds until the ladder wants one, as long as everything fits."""
    start_ns = drive.now_ns
    while drive.made.probe(FRESH_MS, drive.now_ns) is None:
        drive.choose()
    return (drive.now_ns - start_ns) / NS_PER_S


@pytest.mark.parametrize(
    ("calibrated_ms", "left_ms", "tier", "level"),
    [
        ((0.0, 0.0, 0.0), FRESH_MS, 0, 0),  # as without calibrations: the most accurate one is tried
        ((80.0, 40.0, 10.0), FRESH_MS, 1, 1),
        ((80.0, 70.0, 60.0), FRESH_MS, 2, 2),  # none fits: the cheapest
        ((40.0, 20.0, 5.0), 10.0, 2, 0),  # it waited: a cheaper tier runs but the level stays
    ],
)
def test_given_calibrations_then_the_most_accurate_tier_that_fits_runs(calibrated_ms, left_ms, tier, level):
    made = ladder(*calibrated_ms)
    assert made.choose(left_ms, FRESH_MS, START_NS) == tier
    assert made.level == level
    assert made.choose(FRESH_MS, FRESH_MS, START_NS) == level


def test_given_overhead_when_predicted_then_it_counts_with_the_inference():
    made = ladder(45.0, 10.0)
    for _ in range(2):
        made.learn(0, 45.0, 6.0)
    assert made.predicted_ms(0) == pytest.approx(51.0)
    assert made.predicted_ms(1) == pytest.approx(16.0)
    assert made.choose(FRESH_MS, FRESH_MS, START_NS) == 1


def test_given_one_slow_run_when_frames_go_on_then_the_level_stays():
    """The first run of a process, or of one that has just started, may take ten times as long."""
    for slow_at in (0, 1, 5, 40):
        drive = Drive(ladder(20.0, 5.0), [20.0, 5.0]).run(slow_at)
        drive.frame([90.0, 90.0])
        assert drive.run(90).levels == [0] * (91 + slow_at), slow_at


def test_given_a_tier_that_grew_slow_when_it_did_so_twice_then_the_step_down_is_at_once():
    drive = Drive(ladder(20.0, 5.0), [20.0, 5.0]).run(20)
    drive.run(2, [70.0, 5.0])
    assert drive.made.level == 0
    drive.frame()
    assert drive.made.level == 1


def test_given_a_calibration_beside_a_busy_sibling_when_the_tier_is_probed_then_the_ladder_steps_up():
    drive = Drive(ladder(60.0, 5.0), [20.0, 5.0])
    assert drive.run(1).made.forecasts[0].source == "calibration 60.0 ms x 1.00 + overhead 0.0 ms"
    assert drive.run(3).made.level == 0
    assert drive.made.forecasts[0].source == "4 own runs + overhead 0.0 ms"


def test_given_a_scaled_guess_that_does_not_fit_when_there_is_a_spare_worker_then_it_bars_no_tier():
    drive = Drive(ladder(30.0, 10.0, 1.0), [20.0, 20.0, 5.0]).run(20, [900.0, 900.0, 5.0])
    assert drive.made.level == 2
    assert drive.made.forecasts[0].factor == 5.0
    assert drive.run(240).made.level == 0


def test_given_probes_that_do_not_fit_when_they_are_repeated_then_the_time_between_doubles_up_to_eight_seconds():
    drive = Drive(ladder(60.0, 5.0), [60.0, 5.0])
    drive.choose()
    waits = []
    for _ in range(7):
        waits.append(wait_for_probe(drive))
        drive.made.probed(0, math.nan, math.inf, FRESH_MS)
    assert waits == pytest.approx([0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0], abs=0.04)


def test_given_a_level_that_does_not_last_when_it_is_left_then_the_next_try_waits_longer_than_after_a_long_stay():
    drive = Drive(ladder(20.0, 5.0), [20.0, 5.0]).run(300)
    drive.run(3, [70.0, 5.0])
    assert wait_for_probe(drive) == pytest.approx(0.5, abs=0.07)
    for _ in range(TierLadder.PROBES):
        drive.made.probed(0, 20.0, 20.0, FRESH_MS)
    drive.run(3, [70.0, 5.0])
    assert wait_for_probe(drive) == pytest.approx(1.0, abs=0.07)


def test_given_no_spare_worker_when_a_frame_could_not_wait_for_the_probe_then_there_is_none_for_two_seconds():
    made = ladder(60.0, 15.0)
    made.choose(FRESH_MS, FRESH_MS, START_NS)
    assert made.probe(FRESH_MS, START_NS, room_ms=26.0) == 0
    assert made.probe(FRESH_MS, START_NS, room_ms=24.0) is None
    made = ladder(60.0, 15.0)
    made.choose(FRESH_MS, FRESH_MS, START_NS)
    assert made.probe(FRESH_MS, START_NS + NS_PER_S, room_ms=24.0) is None
    assert made.probe(FRESH_MS, START_NS + 2 * NS_PER_S, room_ms=24.0) == 0
    made.probed(0, 60.0, 60.0, FRESH_MS)
    assert made.probe(FRESH_MS, START_NS + 60 * NS_PER_S, room_ms=24.0) is None
    assert made.probe(FRESH_MS, START_NS + 62 * NS_PER_S, room_ms=24.0) == 0


def test_given_a_tier_that_would_be_taken_for_hung_when_there_is_a_spare_worker_then_it_is_not_tried():
    made = ladder(600.0, 5.0)
    made.choose(FRESH_MS, FRESH_MS, START_NS)
    assert made.probe(FRESH_MS, START_NS, longest_ms=500.0) is None
    assert made.probe(FRESH_MS, START_NS, longest_ms=700.0) == 0


@pytest.mark.parametrize("every", [40, 100])
def test_given_isolated_stalls_when_frames_run_then_the_level_stays(every):
    drive = Drive(ladder(20.0, 5.0), [20.0, 5.0])
    for frame in range(400):
        drive.frame([500.0, 5.0] if frame % every == every - 1 else None)
    assert drive.made.level == 0


def test_given_frequent_stalls_when_frames_run_then_the_ladder_steps_down():
    drive = Drive(ladder(20.0, 5.0), [20.0, 5.0]).run(50)
    assert drive.made.level == 0
    for frame in range(60):
        drive.frame([500.0, 5.0] if frame % 4 == 0 else None)
    assert 1 in drive.levels[-20:]


def test_given_a_tier_that_only_fits_alone_when_frames_run_then_it_seldom_flaps():
    """The probe fits, the frames do not: each stay doubles the time to the next, up to 8 s."""
    drive = Drive(ladder(40.0, 5.0), [40.0, 5.0])
    for _ in range(4000):
        tier = drive.choose()
        drive.made.learn(tier, [60.0, 5.0][tier], 0.0)
        drive.slow += tier == 0
        drive.probe([40.0, 5.0], 0.0)
    assert drive.slow < 50  # two of each stay


def test_given_a_lower_level_when_explained_then_it_says_what_is_predicted_and_when_it_is_tried_next():
    made = ladder(60.0, 5.0)
    assert made.explain(["full", "fast"], START_NS) == ""
    made.choose(FRESH_MS, FRESH_MS, START_NS)
    text = "full predicted 60.0 ms > 50.0 left; 0 of 3 probes fitted, next one when a worker has the time"
    assert made.explain(["full", "fast"], START_NS) == text
    made.probed(0, 41.0, 60.0, FRESH_MS)
    assert (
        made.explain(["full", "fast"], START_NS)
        == "full predicted 41.0 ms <= 50.0 left; next probe in 0.5 s"
    )
    made.left_out = 1
    assert made.explain(["full", "fast"], START_NS) == "full is left out while memory is short"


TIMES_MS = st.floats(0.1, 400.0)


@st.composite
def ladders(draw):
    """A ladder with calibrations of any kind, and what its tiers really take; the cheapest one fits."""
    count = draw(st.integers(2, 5))
    medians = draw(st.lists(TIMES_MS, min_size=count, max_size=count))
    made = TierLadder(count)
    made.calibrate([Calibration(ms, ms * draw(st.floats(1.0, 20.0))) for ms in medians])
    return made, [
        *draw(st.lists(TIMES_MS, min_size=count - 1, max_size=count - 1)),
        draw(st.floats(0.1, 25.0)),
    ]


@settings(max_examples=25, deadline=None)
@given(ladders())
def test_given_whatever_calibrations_when_the_machine_is_calm_then_the_best_tier_is_reached_in_three_seconds(
    drawn,
):
    made, times_ms = drawn
    drive = Drive(made, times_ms).run(90)
    assert drive.made.level == best(times_ms)
    assert drive.run(300).levels[90:] == [best(times_ms)] * 300


@settings(max_examples=25, deadline=None)
@given(ladders())
def test_given_no_spare_worker_when_probes_are_made_then_the_results_lost_are_bounded(drawn):
    made, times_ms = drawn
    drive = Drive(made, times_ms, spare=False).run(900)
    assert drive.made.level == best(times_ms)
    assert drive.lost <= 3 * len(times_ms)
    assert drive.slow <= 3 * len(times_ms)


@settings(max_examples=25, deadline=None)
@given(ladders())
def test_given_tiers_that_do_not_fit_when_there_is_a_spare_worker_then_failing_probes_grow_rare(drawn):
    made, times_ms = drawn
    drive = Drive(made, times_ms).run(900)
    assert drive.failed <= 8 * len(times_ms)
    assert drive.slow <= 3 * len(times_ms)


@settings(max_examples=25, deadline=None)
@given(ladders(), st.lists(st.lists(TIMES_MS, min_size=5, max_size=5), max_size=60), st.integers(1, 10))
def test_given_any_disturbance_when_it_is_over_then_the_best_tier_is_back_in_ten_seconds(
    drawn, disturbed, repeated
):
    made, times_ms = drawn
    drive = Drive(made, times_ms).run(30)
    for _ in range(repeated):
        for frame_ms in disturbed:
            drive.frame(frame_ms[: len(times_ms)])
    assert drive.run(300).made.level == best(times_ms)


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
    clock.calibrate(Calibration(10.0, 12.0))
    assert clock.forecast().ms == 12.0
    assert clock.forecast(slowdown=2.0, overhead_ms=1.0).ms == 25.0
    clock.add(5.0, 1.0)
    assert clock.forecast().ms == 12.0  # one run may be that of a cold process
    clock.add(5.0, 1.0)
    assert (clock.forecast(slowdown=2.0).ms, clock.forecast().runs) == (6.0, 2)
    assert clock.slowdown is None
    for _ in range(20):
        clock.add(5.0, 1.0)
    assert clock.slowdown == 0.5
    clock.forget()
    assert clock.forecast().ms == 12.0
    assert clock.slowdown is None


def test_given_calibrations_of_another_number_of_tiers_when_taken_then_they_are_refused():
    with pytest.raises(ValueError, match="zip"):
        TierLadder(2).calibrate([Calibration(1.0, 1.0)])


class LadderMachine(RuleBasedStateMachine):
    """Any times, budgets and probes.

    The choice fits or is the cheapest, and only good probes take the level up.
    """

    def __init__(self):
        super().__init__()
        self.made = ladder(30.0, 15.0, 5.0)
        self.now_ns = START_NS
        self.good = (0, 0)

    @rule(left_ms=st.floats(-5, 100), fresh_ms=st.floats(1, 100), later_ms=st.integers(0, 3000))
    def choose(self, left_ms, fresh_ms, later_ms):
        before = self.made.level
        self.now_ns += later_ms * NS_PER_MS
        tier = self.made.choose(left_ms, fresh_ms, self.now_ns)
        assert tier == self.made.last or self.made.predicted_ms(tier) <= left_ms
        assert before <= self.made.level <= tier <= self.made.last
        assert self.made.level == self.made.last or self.made.predicted_ms(self.made.level) <= fresh_ms
        for skipped in range(self.made.level, tier):
            assert self.made.predicted_ms(skipped) > left_ms
        if self.made.level > before:
            self.good = (0, 0)

    @rule(tier=st.integers(0, 2), inference_ms=st.floats(0.1, 200), overhead_ms=st.floats(0, 10))
    def learn(self, tier, inference_ms, overhead_ms):
        self.made.learn(tier, inference_ms, overhead_ms)

    @rule(fresh_ms=st.floats(1, 100), room_ms=st.floats(0, 1000))
    def probe(self, fresh_ms, room_ms):
        tier = self.made.probe(fresh_ms, self.now_ns, room_ms)
        assert tier is None or tier < self.made.level

    @rule(tier=st.integers(0, 2), took_ms=st.floats(0.1, 200), fresh_ms=st.floats(1, 100))
    def probed(self, tier, took_ms, fresh_ms):
        before = self.made.level
        self.made.probed(tier, took_ms, took_ms, fresh_ms)
        if tier < before:
            self.good = (tier, self.good[1] * (self.good[0] == tier) + 1) if took_ms <= fresh_ms else (0, 0)
        rises = tier < before and self.good == (tier, TierLadder.PROBES)
        assert self.made.level == (tier if rises else before)
        if rises:
            self.good = (0, 0)

    @invariant()
    def the_level_is_a_tier(self):
        assert 0 <= self.made.level <= self.made.last


TestLadderMachine = LadderMachine.TestCase
TestLadderMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_given_tiers_that_are_left_out_when_chosen_then_a_lower_one_runs_and_is_left_only_when_they_are_back():
    ladder = TierLadder(3)
    ladder.calibrate([Calibration(1.0, 1.0)] * 3)
    ladder.left_out = 1
    assert [ladder.choose(50.0, 50.0, START_NS + frame) for frame in range(20)] == [1] * 20
    assert ladder.probe(50.0, START_NS) is None
    ladder.left_out = 0
    assert ladder.probe(50.0, START_NS) == 0


@pytest.mark.parametrize(
    ("used", "left_out", "tight"),
    [
        ([0.1, 0.69, 0.7], [0, 0, 0], False),
        ([0.8, 0.8, 0.8, 0.8], [1, 2, 2, 2], True),  # one tier after the other, but the last
        ([0.8, 0.65], [1, 1], True),  # a little below the share: nothing changes yet
        ([0.9, 0.9, 0.5, 0.5, 0.5], [1, 2, 1, 0, 0], False),
        ([math.nan], [0], False),  # unknown
        ([0.9, math.nan], [1, 1], True),
    ],
)
def test_given_memory_in_use_then_tiers_are_left_out_one_by_one_and_come_back_with_room(
    used, left_out, tight
):
    guard, alone = MemoryGuard(), MemoryGuard()
    found = []
    for share in used:
        guard.update(share, 3)
        alone.update(share, 1)
        found.append(guard.left_out)
    assert (found, guard.tight, alone.left_out) == (left_out, tight, 0)
