"""What two sides say: blocks, intervals of shares and means, and runs as the sample."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from torchperf_ros.observe.runs.changes import (
    DROPPED,
    MAX,
    MISS,
    P99,
    block_length,
    figures,
    frame_changes,
    inflation,
    laid_out,
    run_change,
    stage_frames,
    wrong_of,
)
from torchperf_ros.observe.runs.run_log import RunLog, StageLog

from . import compare_runs as made

pytestmark = made.needs_libraries
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


def change(base, new, metric=MISS):
    found, _ = frame_changes(base, new, laid_out([base], [new]), 300)
    return next(one for one in found if one.metric is metric)


def of_another_log(frames):
    """The same frames under stamps that no other run has."""
    frames.frames["stamp_ns"] += 5
    return frames


def width(one):
    return one.high - one.low


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
    even, clustered = (change(one, of_another_log(missing([]))) for one in (spread, bursts))
    assert width(clustered) > 2 * width(even)
    assert even.p < 1e-6
    assert clustered.p > 0.01


@pytest.mark.parametrize("stamps", [missing, lambda *given: of_another_log(missing(*given))])
def test_given_no_miss_at_all_when_compared_then_the_interval_is_not_empty(stamps):
    base, new = missing([], 100), stamps([], 100)
    new.frames["total_ms"] += 1
    found = change(base, new)
    assert (found.low, found.high) == (pytest.approx(-2, abs=0.1), pytest.approx(2, abs=0.1))
    assert found.p == pytest.approx(1.0)


def test_given_one_short_burst_of_a_log_when_compared_then_it_may_be_chance():
    found = change(missing([]), missing(slice(300, 500)))
    assert not found.tested or found.p > 0.01


def test_given_the_same_frames_missed_when_paired_then_less_is_left_to_chance_than_in_other_logs():
    hard = np.random.default_rng(0).permutation(3000)[:300]
    more = np.r_[hard, np.setdiff1d(np.arange(0, 3000, 150), hard)]
    paired = change(missing(hard), missing(more))
    unpaired = change(missing(hard), of_another_log(missing(more)))
    assert paired.p < 0.001 < unpaired.p
    assert width(paired) < 0.5 * width(unpaired)


def test_given_frames_of_one_side_only_when_laid_out_then_both_keep_their_place_on_one_axis():
    base, new = stage(np.arange(1.0, 6.0)), stage(np.arange(1.0, 6.0))
    new.frames = np.delete(new.frames, 2)
    new.gaps = np.array([0, 0, 1, 0])
    both = laid_out([base], [new])
    np.testing.assert_array_equal(both.base[0], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(both.new[0], [1, 2, np.nan, 4, 5])
    np.testing.assert_array_equal(wrong_of(both.new, MISS), [[0, 0, 0, 1, 0], [1, 1, 0, 2, 1]])


def test_given_numbers_with_gaps_when_counted_then_the_frames_between_were_never_started():
    assert figures(stage(np.full(3, 20.0), seq=[0, 2, 5]))[DROPPED] == 50.0
    # Memory stays bounded.
    assert figures(stage(np.full(4, 20.0), seq=[0, 1, 2**60, 2**62]))[DROPPED] > 99.9


def test_given_three_runs_a_side_when_compared_then_students_test_is_on_their_values():
    found = run_change("perception", P99, [20.0, 21.0, 22.0], [30.0, 31.0, 32.0])
    assert (found.base, found.new, found.samples, found.kind) == (21.0, 31.0, 3, "runs")
    assert (found.low, found.high) == pytest.approx((7.733, 12.267), abs=0.01)
    assert found.tested
    assert found.p == pytest.approx(0.000255, rel=0.02)
    assert not run_change("perception", MAX, [1.0] * 3, [9.0] * 3).decides
    # Where runs do not vary nothing is left to chance.
    assert math.isnan(run_change("perception", MISS, [1.0] * 3, [9.0] * 3).p)


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
