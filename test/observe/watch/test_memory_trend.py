import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.observe.watch.memory_watch import MemoryTrend
from torchperf_ros.stage.trend import theil_sen_slope

MIB = 1 << 20
BASE = 1000.0


def follow(series, seconds, noise=2.0, seed=0, every_s=2, room_mib=4000.0):
    """Feed a series with noise; returns the trend and the seconds at which a suspicion was held."""
    trend, rng, held = MemoryTrend(), np.random.default_rng(seed), []
    for second in range(0, seconds, every_s):
        trend.add(float(second), series(second) + rng.normal(0.0, noise))
        if trend.suspicion(room_mib) is not None:
            held.append(second)
    return trend, held


@pytest.mark.parametrize(("mib_per_hour", "within_s"), [(9000, 200), (60, 900)])
def test_given_a_leak_in_noise_when_followed_then_it_is_found_in_time_and_its_rate_is_right(
    mib_per_hour, within_s
):
    trend, held = follow(lambda s: BASE + mib_per_hour * s / 3600, within_s + 1000)
    assert held[0] < within_s
    assert held[-100:] == list(range(held[-1] - 198, held[-1] + 1, 2))  # and stays
    assert trend.suspicion(100.0).mib_per_hour == pytest.approx(mib_per_hour, rel=0.1)
    assert trend.suspicion(100.0).confidence > 0.999


@pytest.mark.parametrize("at_once_mib", [1, 20])
@pytest.mark.parametrize("begins_s", [0, 400])
def test_given_a_megabyte_leaked_a_second_when_there_is_room_for_hours_then_it_is_found_within_three_minutes(
    begins_s, at_once_mib
):
    # as all series here
    leak = lambda s: BASE + max(0, s - begins_s) // at_once_mib * at_once_mib  # noqa: E731
    _, held = follow(leak, 800, every_s=1, room_mib=32_000.0)
    assert begins_s < held[0] < begins_s + 180
    assert held[-1] == 799


@pytest.mark.parametrize(
    "series",
    [
        pytest.param(lambda s: BASE + 400 * (1 - math.exp(-s / 100)), id="caches that fill for minutes"),
        pytest.param(lambda s: BASE + min(90, max(0, s - 500)), id="growth for a minute and a half"),
        pytest.param(lambda s: BASE + s % 100, id="slow sawtooth"),
        pytest.param(lambda s: BASE, id="noise"),
        pytest.param(lambda s: BASE + 100 * (s > 900) + 200 * (s > 1700), id="two steps"),
        pytest.param(lambda s: BASE + 300 * (1 - math.exp(-s / 15)), id="warm-up, then flat"),
        pytest.param(lambda s: BASE + 50 * (s % 60) / 60, id="sawtooth of a collector"),
        pytest.param(lambda s: BASE - 600 * s / 3600, id="shrinking"),
        pytest.param(lambda s: BASE + 25 * min(s // 20, 3), id="stairs that stop"),
    ],
)
def test_given_memory_that_does_not_grow_for_good_when_followed_then_nothing_is_suspected(series):
    assert follow(series, 2700)[1] == []


def test_given_a_staircase_that_goes_on_when_followed_then_it_is_a_leak():
    trend, held = follow(lambda s: BASE + 20 * (s // 300), 2400)
    assert held[0] < 1200
    assert trend.suspicion(100.0).mib_per_hour == pytest.approx(240, rel=0.3)


def test_given_a_slow_sawtooth_when_it_comes_back_then_only_its_first_tooth_is_suspected():
    _, held = follow(lambda s: BASE + 50 * (s % 1200) / 1200, 5000)
    assert max(held) < 1300


def test_given_growth_that_stops_when_followed_then_the_suspicion_is_over_soon():
    _, held = follow(lambda s: BASE + 300 * min(s, 1800) / 1800, 3600)
    assert 600 < held[0] < 900
    assert 1800 <= held[-1] < 2600


def test_given_noise_that_wanders_when_followed_then_it_is_not_taken_for_a_leak():
    rng = np.random.default_rng(3)
    near, far = (wandering(rng, 2700, *how) for how in ((0.9, 9.0), (0.97, 30.0)))
    assert follow(lambda s: BASE + near[s], 2700, noise=0.0)[1] == []
    assert (
        len(follow(lambda s: BASE + far[s], 1500, noise=0.0, room_mib=300.0)[1]) < 20
    )  # rare where little is left


def wandering(rng, length, correlation, deviation):
    values = [0.0]
    for _ in range(length):
        step = rng.normal(0.0, deviation * math.sqrt(1 - correlation**2))
        values.append(correlation * values[-1] + step)
    return values


def test_given_growth_over_minutes_only_when_there_is_room_then_it_is_believed_later():
    trend = MemoryTrend()
    for second in range(300):
        trend.add(float(second), BASE + second / 4)
    assert trend.growth.mib_per_hour == pytest.approx(900)
    assert trend.suspicion() is None
    assert trend.suspicion(451.0) is None
    assert trend.suspicion(449.0) == trend.growth
    assert trend.growth.lasts_s(15.0) == pytest.approx(60.0, rel=1e-3)
    assert trend.growth.lasts_s(-5.0) == 0.0


def test_given_too_little_to_judge_when_asked_then_nothing_is_known():
    trend = MemoryTrend()
    for second in range(120):
        trend.add(float(second), BASE + second)
    trend.add(121.0, math.nan)
    assert trend.growth is None
    assert trend.suspicion(0.0) is None


def test_given_samples_for_days_when_followed_then_what_is_kept_is_bounded_and_what_shrinks_lasts_for_ever():
    trend, _ = follow(lambda s: BASE - s / 1e4, 86_400, every_s=120)
    assert len(pickle.dumps(trend)) < 12_000  # some 270 points of two numbers
    assert 16 * 3600 < trend.growth.window_s < 21 * 3600  # and the longest window is full
    assert trend.growth.lasts_s(1.0) == math.inf


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 1)), min_size=4, max_size=30))
def test_given_any_series_when_its_slope_is_taken_then_it_is_scipys(values):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    times, values = np.arange(len(values), dtype=float) * 3.0, np.array(values)
    assert theil_sen_slope(times, values) == pytest.approx(stats.theilslopes(values, times).slope, abs=1e-9)
