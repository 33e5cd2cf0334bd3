import math
import subprocess
import sys

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.core.memory_trend import MemoryTrend, mann_kendall_p, theil_sen_slope

MIB = 1 << 20
BASE = 1000.0


def follow(series, seconds, noise=2.0, seed=0, every_s=1, room_mib=4000.0):
    """Feed a series with noise; returns the trend and the seconds at which a suspicion was held."""
    trend, rng, held = MemoryTrend(), np.random.default_rng(seed), []
    for second in range(0, seconds, every_s):
        trend.add(float(second), series(second) + rng.normal(0.0, noise))
        if trend.suspicion(room_mib) is not None:
            held.append(second)
    return trend, held


@pytest.mark.parametrize(("mib_per_hour", "within_s"), [(9000, 200), (600, 900), (60, 900), (10, 6000)])
def test_given_a_leak_in_noise_when_followed_then_it_is_found_in_time_and_its_rate_is_right(mib_per_hour, within_s):
    trend, held = follow(lambda s: BASE + mib_per_hour * s / 3600, within_s + 2000)
    assert held[0] < within_s
    assert held[-100:] == list(range(held[-1] - 99, held[-1] + 1))  # and stays
    assert trend.suspicion(100.0).mib_per_hour == pytest.approx(mib_per_hour, rel=0.1)
    assert trend.suspicion(100.0).confidence > 0.999


@pytest.mark.parametrize(
    "series",
    [
        pytest.param(lambda s: BASE, id="noise"),
        pytest.param(lambda s: BASE + 200 * (s > 1800), id="one step"),
        pytest.param(lambda s: BASE + 100 * (s > 1200) + 200 * (s > 2700), id="two steps"),
        pytest.param(lambda s: BASE + 300 * (1 - math.exp(-s / 15)), id="warm-up, then flat"),
        pytest.param(lambda s: BASE + 50 * (s % 60) / 60, id="sawtooth of a collector"),
        pytest.param(lambda s: BASE - 600 * s / 3600, id="shrinking"),
        pytest.param(lambda s: BASE + 25 * min(s // 20, 3), id="stairs that stop"),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_given_memory_that_does_not_grow_for_good_when_followed_then_nothing_is_suspected(series, seed):
    assert follow(series, 5400, seed=seed)[1] == []


def test_given_a_staircase_that_goes_on_when_followed_then_it_is_a_leak():
    trend, held = follow(lambda s: BASE + 20 * (s // 300), 2400)
    assert held
    assert held[0] < 1200
    assert trend.suspicion(100.0).mib_per_hour == pytest.approx(240, rel=0.3)


def test_given_a_slow_sawtooth_when_it_comes_back_then_only_its_first_tooth_is_suspected():
    _, held = follow(lambda s: BASE + 50 * (s % 1200) / 1200, 9000)
    assert max(held) < 1300


def test_given_growth_that_stops_when_followed_then_the_suspicion_is_over_soon():
    _, held = follow(lambda s: BASE + 300 * min(s, 1800) / 1800, 5400)
    assert 600 < held[0] < 900
    assert 1800 <= held[-1] < 2600


def test_given_noise_that_wanders_when_followed_then_it_is_not_taken_for_a_leak():
    rng, wandering = np.random.default_rng(3), [0.0]
    for _ in range(5400):
        wandering.append(0.9 * wandering[-1] + rng.normal(0.0, 4.0))
    assert follow(lambda s: BASE + wandering[s], 5400, noise=0.0)[1] == []


def test_given_growth_over_minutes_only_when_there_is_room_then_it_is_believed_later():
    trend = MemoryTrend()
    for second in range(300):
        trend.add(float(second), BASE + second)
    assert trend.growth.mib_per_hour == pytest.approx(3600)
    assert trend.suspicion() is None
    assert trend.suspicion(1801.0) is None
    assert trend.suspicion(1799.0) == trend.growth
    assert trend.growth.lasts_s(60.0) == pytest.approx(60.0, rel=1e-3)
    assert trend.growth.lasts_s(-5.0) == 0.0
    assert trend.growth.since_s < 300 - trend.growth.window_s + 3


def test_given_shrinking_memory_when_asked_how_long_it_lasts_then_it_is_for_ever():
    assert follow(lambda s: BASE - s / 60, 900)[0].growth.lasts_s(1.0) == math.inf


def test_given_too_little_to_judge_when_asked_then_nothing_is_known():
    trend = MemoryTrend()
    for second in range(120):
        trend.add(float(second), BASE + second)
    trend.add(121.0, math.nan)
    assert trend.growth is None
    assert trend.suspicion(0.0) is None


def test_given_samples_for_days_when_followed_then_what_is_kept_is_bounded():
    trend, _ = follow(lambda s: BASE, 3 * 86_400, every_s=120)
    kept = sum(len(scale.points) + len(scale.pending) for scale in trend._scales)
    assert kept <= 4 * (60 + 8)
    assert 16 * 3600 < trend.growth.window_s < 21 * 3600  # and the longest window is full


numbers = st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 1)), min_size=4, max_size=60)


@given(values=numbers)
def test_given_any_series_when_its_slope_is_taken_then_it_is_scipys(values):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    times, values = np.arange(len(values), dtype=float) * 3.0, np.array(values)
    assert theil_sen_slope(times, values) == pytest.approx(stats.theilslopes(values, times).slope, abs=1e-9)


@settings(max_examples=50)
@given(values=numbers)
def test_given_independent_values_when_tested_then_p_is_scipys_and_autocorrelation_only_raises_it(values):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    times, values = np.arange(len(values), dtype=float), np.array(values)
    own = mann_kendall_p(values, np.zeros(len(values)))
    theirs = stats.kendalltau(times, values, method="asymptotic", alternative="greater").pvalue
    if np.ptp(values) == 0:
        assert own == 1.0
    elif own < 0.5:
        assert own >= theirs - 1e-9
    alternating = np.resize([1.0, -1.0], len(values)) * 1e-6
    if np.ptp(values) == 0:
        values = values + alternating
        theirs = stats.kendalltau(times, values, method="asymptotic", alternative="greater").pvalue
        assert mann_kendall_p(values, np.zeros(len(values))) == pytest.approx(theirs, abs=1e-9)


def test_given_white_noise_when_tested_then_false_alarms_are_as_rare_as_the_p_value_says():
    rng = np.random.default_rng(0)
    p_values = [mann_kendall_p(rng.normal(size=60), np.zeros(60)) for _ in range(2000)]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.02)


def autocorrelated(rng, length, correlation, deviation):
    values = [0.0]
    for _ in range(length):
        step = rng.normal(0.0, deviation * math.sqrt(1 - correlation**2))
        values.append(correlation * values[-1] + step)
    return np.array(values)


def test_given_noise_that_wanders_when_tested_then_autocorrelation_keeps_most_false_alarms_away():
    rng, times, found = np.random.default_rng(0), np.arange(61.0), 0
    for _ in range(400):
        values = autocorrelated(rng, 60, 0.8, 1.0)
        found += mann_kendall_p(values, theil_sen_slope(times, values) * times) < 0.01
    assert found / 400 < 0.14  # 0.09; the plain test 0.20


def test_given_little_room_and_noise_that_wanders_far_when_followed_then_suspicions_are_rare_and_short():
    wandering = [autocorrelated(np.random.default_rng(seed), 1500, 0.97, 30.0) for seed in range(8)]
    held = [len(follow(lambda s, w=w: BASE + w[s], 1500, noise=0.0, room_mib=300.0)[1]) for w in wandering]
    assert sum(held) < 100, held


@given(
    scale=st.floats(0.5, 100.0), shift=st.floats(-1e3, 1e3), values=st.lists(st.floats(0, 100), min_size=8, max_size=30)
)
def test_given_other_units_when_the_slope_is_taken_then_it_scales(scale, shift, values):
    times, values = np.arange(len(values), dtype=float), np.array(values)
    expected = scale * theil_sen_slope(times, values)
    assert theil_sen_slope(times, scale * values + shift) == pytest.approx(expected, abs=1e-6)


LEAKING = """
import sys
kept = []
for line in sys.stdin:
    kept.append(bytearray(b"x" * int(line)))
    print(flush=True)
"""


@pytest.mark.parametrize(("leak_bytes", "found"), [(MIB, True), (0, False)])
def test_given_a_real_process_when_it_leaks_then_its_resident_memory_gives_it_away(leak_bytes, found):
    with subprocess.Popen(
        [sys.executable, "-c", LEAKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        trend = MemoryTrend()
        for second in range(200):  # of a virtual clock
            print(leak_bytes, file=process.stdin, flush=True)
            process.stdout.readline()
            trend.add(float(second), psutil.Process(process.pid).memory_info().rss / MIB)
        process.stdin.close()
    assert (trend.suspicion(100.0) is not None) is found
    if found:
        assert trend.suspicion(100.0).mib_per_hour == pytest.approx(3600, rel=0.05)
