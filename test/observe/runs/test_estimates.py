"""What two sides say: blocks, intervals of shares and means, and runs as the sample."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

pytest.importorskip("arch", reason="arch is not installed")

from torchperf_ros.observe.runs.compare.estimates import (
    block_length,
    figures,
    inflation,
    latencies,
    of_runs,
    same_frames,
    shares,
    stage_frames,
)
from torchperf_ros.observe.runs.compare.verdict import DROPPED, MAX, MISS, P50, P99, Rules
from torchperf_ros.observe.runs.run_log import RunLog, StageLog

from . import compare_runs as made

COUNT = 2000


def stage(total_ms, tiers=(), **columns):
    rows = made.rows(total_ms)
    for name, values in columns.items():
        rows[name] = values
    return stage_frames(StageLog("perception", tiers, rows))


def missing(places, count=3000, **columns):
    """A stage of 20 ms a frame, in which those at these places miss."""
    values = np.full(count, 20.0) + np.arange(count) / count
    values[places] = made.BUDGET_MS + 1
    return stage(values, **columns)


def share(base, new, metric=MISS, paired=True):
    found = shares(base, new, same_frames([base], [new]) if paired else None, 1, 0.05)
    return next(one for one in found if one.metric is metric)


@pytest.mark.parametrize("phi", [0.0, 0.6, 0.9])
def test_given_an_ar1_when_its_dependence_is_estimated_then_it_is_near_the_theory(phi):
    series = [made.autocorrelated(COUNT, phi, seed) for seed in range(10)]
    # AR(1): G / g(0) = 2 phi / (1 - phi^2), so b = (6 phi^2 / (1 - phi^2)^2)^(1/3) n^(1/3)
    block = (6 * phi**2 / (1 - phi**2) ** 2) ** (1 / 3) * COUNT ** (1 / 3)
    assert np.median([block_length(one) for one in series]) == pytest.approx(block, rel=0.25, abs=5)
    found = np.median([inflation(one, math.ceil(2 * block) or 1) for one in series])
    assert found == pytest.approx((1 + phi) / (1 - phi), rel=0.25)


@given(arrays(np.float64, st.integers(1, 60), elements=st.floats(-1e6, 1e6)))
def test_given_any_values_when_estimated_then_the_block_fits_and_the_inflation_is_one_or_more(values):
    block = block_length(values)
    assert 1 <= block <= max(1, -(-len(values) // 3))
    assert 1.0 <= inflation(values, block) < math.inf


def test_given_misses_in_bursts_when_compared_then_they_count_for_less_than_as_many_that_are_spread():
    spread = missing(np.random.default_rng(0).permutation(3000)[:90])
    bursts = missing(np.r_[100:130, 700:730, 2000:2030])
    even, clustered = (share(one, missing([]), paired=False).interval for one in (spread, bursts))
    assert clustered.high - clustered.low > 2 * (even.high - even.low)
    assert even.p < 1e-6
    assert clustered.p > 0.01


def test_given_no_miss_at_all_when_compared_then_the_interval_is_not_empty():
    base, new = missing([], 100), missing([], 100)
    new = stage(new.total_ms + 1)
    for paired, reach in ((False, 2.75), (True, 1.95)):  # Agresti and Caffo 2000; Agresti and Min 2005
        found = share(base, new, paired=paired).interval
        assert (found.low, found.high) == pytest.approx((-reach, reach), abs=0.2)
        assert found.p == pytest.approx(1.0)


def test_given_one_short_burst_of_a_log_when_compared_then_it_may_be_chance():
    found = share(missing([]), missing(slice(300, 500)))
    assert found.tested is None or found.tested.p > 0.01


def test_given_the_same_frames_missed_when_paired_then_less_is_left_to_chance_than_in_other_logs():
    hard = np.random.default_rng(0).permutation(3000)[:300]
    base, new = missing(hard), missing(np.r_[hard, np.setdiff1d(np.arange(0, 3000, 150), hard)])
    paired, unpaired = (share(base, new, paired=one).interval for one in (True, False))
    assert paired.p < 0.001 < unpaired.p
    assert paired.high - paired.low < 0.5 * (unpaired.high - unpaired.low)


def test_given_stamps_of_another_log_or_none_when_matched_then_no_frames_are_the_same():
    base, other = missing([]), missing([], stamp_ns=np.arange(3000) + 5)
    assert same_frames([base], [base]) is not None
    assert same_frames([base], [other]) is None
    assert same_frames([base], [missing([], stamp_ns=0)]) is None
    assert len(same_frames([base] * 3, [base])[0]) == 3000
    left, right = same_frames([base, other], [base, other])
    assert len(left) == 6000
    np.testing.assert_array_equal(left, right)


def test_given_numbers_with_gaps_when_counted_then_the_frames_between_were_never_started():
    assert figures(stage(np.full(3, 20.0), seq=[0, 2, 5]))[DROPPED] == 50.0
    assert (
        figures(stage(np.full(4, 20.0), seq=[0, 1, 2**60, 2**62]))[DROPPED] > 99.9
    )  # and memory stays bounded


def test_given_autocorrelated_latencies_when_bootstrapped_then_the_interval_is_as_wide_as_theory_says():
    phi, found = 0.8, []
    for seed in range(6):
        pair = [stage(20 + made.autocorrelated(3000, phi, 2 * seed + at)) for at in range(2)]
        interval = next(
            one for one in latencies(*pair, Rules(resamples=300))[0] if one.metric is P50
        ).interval
        found.append((interval.high - interval.low) / 2)
    # the median of an AR(1) is about pi/2 as uncertain as independent values' is, times the inflation of
    # its signs
    inflated = 1 + 2 * sum(2 / math.pi * math.asin(phi**lag) for lag in range(1, 200))
    expected = 1.96 * math.sqrt(2 * math.pi / 2 * inflated / 3000)
    assert np.median(found) == pytest.approx(expected, rel=0.3)


def test_given_three_runs_a_side_when_compared_then_welchs_test_is_on_their_values():
    found = of_runs("perception", P99, [20.0, 21.0, 22.0], [30.0, 31.0, 32.0], 0.05)
    assert (found.base, found.new, found.samples, found.kind) == (21.0, 31.0, 3, "runs")
    assert (found.interval.low, found.interval.high) == pytest.approx((7.733, 12.267), abs=0.01)
    assert found.tested.p == pytest.approx(0.000255, rel=0.02)
    assert not of_runs("perception", MAX, [1.0] * 3, [9.0] * 3, 0.05).decides
    assert math.isnan(
        of_runs("perception", MISS, [1.0] * 3, [9.0] * 3, 0.05).interval.p
    )  # nothing is left to chance


def memory_slope(seconds, mib):
    return RunLog(
        "run", (), memory_t_ns=(seconds * 1e9).astype(np.int64), memory={"workers_rss_mib": mib}
    ).memory_slope


def test_given_memory_over_time_when_its_slope_is_asked_for_then_start_end_and_replaced_workers_do_not_bend_it():
    seconds = np.arange(900.0)
    mib = 800 + np.random.default_rng(0).normal(0, 0.5, 900) + seconds / 6
    mib[:60] -= 500
    mib[300:350] -= 250
    mib[890:] = 0.0
    assert memory_slope(seconds, mib) == pytest.approx(600, abs=10)
    assert memory_slope(seconds // 30 * 30, np.full(900, 800.0)) == 0.0
    assert math.isnan(memory_slope(seconds[:100], mib[:100]))
    assert math.isnan(RunLog("run", ()).memory_slope)
