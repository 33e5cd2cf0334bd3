import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.analysis.gain import Gain, gain, slower
from torchperf_ros.worker.stopwatch import Timing


def noisy(ms, seed, spread=0.05, size=200):
    return Timing(tuple(ms * (1.0 + spread * np.random.default_rng(seed).standard_normal(size))))


def test_given_the_same_samples_when_compared_then_there_is_no_gain_and_no_doubt():
    assert gain(noisy(10.0, 1), noisy(10.0, 1)) == Gain(0.0, 0.0, 0.0)


def test_given_half_the_time_when_compared_then_half_is_saved_and_the_interval_is_narrow_around_it():
    found = gain(noisy(10.0, 1), noisy(5.0, 2))
    assert found.low < found.saved < found.high
    assert (found.low, found.high) == pytest.approx((0.5, 0.5), abs=0.02)


def test_given_more_time_when_compared_then_the_gain_is_negative():
    assert gain(noisy(5.0, 1), noisy(10.0, 2)).high < 0.0


def test_given_one_percent_in_five_percent_of_noise_when_compared_then_it_may_be_none():
    found = gain(noisy(10.0, 1, size=60), noisy(9.9, 2, size=60))
    assert found.low < 0.0 < found.high


def test_given_noise_only_when_compared_often_then_the_interval_holds_zero_nearly_always():
    found = [gain(noisy(10.0, 2 * n, size=50), noisy(10.0, 2 * n + 1, size=50)) for n in range(40)]
    assert sum(g.low <= 0.0 <= g.high for g in found) >= 34


def test_given_a_mood_that_both_meet_when_compared_then_it_does_not_widen_the_interval():
    mood = 1.0 + 0.5 * np.sin(np.arange(300) / 40.0)
    before, after = Timing(tuple(10.0 * mood)), Timing(tuple(8.0 * mood))
    found = gain(before, after)
    assert (found.low, found.saved, found.high) == pytest.approx((0.2, 0.2, 0.2))


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=40), st.floats(0.1, 10.0))
def test_given_any_samples_when_all_are_scaled_then_that_is_the_gain(times_ms, factor):
    found = gain(Timing(tuple(times_ms)), Timing(tuple(factor * t for t in times_ms)))
    assert (found.low, found.saved, found.high) == pytest.approx((1.0 - factor,) * 3, abs=1e-9)


def test_given_samples_of_other_measurements_when_compared_then_that_is_an_error():
    with pytest.raises(ValueError, match="2 and 3 samples"):
        gain(Timing((1.0, 1.0)), Timing((1.0, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Gain(0.334, 0.31, 0.36), "+33 % (+31..+36)"),
        (Gain(-0.012, -0.02, 0.004), "-1.2 % (-2.0..+0.4)"),
        (Gain(-3.0, -4.0, -2.5), "x4.0 (x3.5..x5.0)"),
    ],
)
def test_given_a_gain_when_shown_then_it_has_its_sign_and_interval(found, text):
    assert str(found) == text


@pytest.mark.parametrize(("saved", "text"), [(-0.031, "3 % slower"), (-3.1, "takes 4.1 times as long")])
def test_given_a_loss_when_said_in_words_then_large_ones_are_multiples(saved, text):
    assert slower(saved) == text


def test_given_an_interval_when_asked_for_its_spread_then_it_is_the_end_that_is_further_from_zero():
    assert Gain(0.0, -0.03, 0.01).spread == 0.03
