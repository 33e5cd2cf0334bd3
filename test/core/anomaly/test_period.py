import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.core.anomaly.period import find_period


def wave(count, period, noise, seed=1):
    draw = random.Random(seed)
    return [50 + 3 * math.sin(2 * math.pi * i / period) + draw.gauss(0, noise) for i in range(count)]


@pytest.mark.parametrize(("count", "period"), [(256, 40.0), (512, 97.3), (2048, 97.3), (4096, 288.0), (4096, 1200.0)])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_given_a_noisy_wave_when_looked_at_then_its_period_is_found_and_no_multiple(count, period, noise):
    assert find_period(wave(count, period, noise)) == pytest.approx(period, rel=0.03)


def test_given_a_trend_and_outliers_when_looked_at_then_the_period_is_found_all_the_same():
    values = [value + 0.05 * i for i, value in enumerate(wave(1024, 97.3, 0.5))]
    values[100] = values[777] = 1e9
    assert find_period(values) == pytest.approx(97.3, rel=0.03)


@pytest.mark.parametrize(
    "values",
    [[], [1.0] * 500, [float(i) for i in range(500)], wave(500, 8.0, 0.1)[:10], wave(500, 400.0, 0.1), [0.0] * 500],
    ids=["nothing", "constant", "line", "short", "not three times", "zeros"],
)
def test_given_no_cycle_when_looked_at_then_there_is_no_period(values):
    assert find_period(values) is None


def test_given_noise_when_looked_at_then_there_is_no_period():
    for seed in range(20):
        draw = random.Random(seed)
        assert find_period([draw.gauss(0, 1) for _ in range(512)]) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e150, 1e150), max_size=200))
def test_given_any_values_when_looked_at_then_a_period_fits_three_times(values):
    period = find_period(values)
    assert period is None or 15 <= period <= len(values) / 3 + 1
