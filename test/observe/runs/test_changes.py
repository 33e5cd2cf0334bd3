"""The verdict on a change, and what two sides say: blocks, intervals of shares and means, runs as the sample."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from torchperf_ros.observe.runs.changes import (
    DROPPED,
    MAX,
    MEMORY_SLOPE,
    METRICS,
    MISS,
    OUTPUTS,
    P99,
    START_UP,
    Judgement,
    MetricChange,
    block_length,
    figures,
    frame_changes,
    inflation,
    judge,
    laid_out,
    run_change,
    stage_frames,
    wrong_of,
)
from torchperf_ros.observe.runs.run_log import RunLog, StageLog

from . import compare_runs as made

pytestmark = made.needs_libraries
MARGIN = 0.05  # of a p99 of 20 ms: 1 ms


def judged(one):
    return judge([one], MARGIN)[0]


def test_given_a_base_when_its_margin_is_asked_for_then_it_is_the_larger_of_share_and_least():
    assert P99.margin(100.0) == pytest.approx(3.0)
    assert P99.margin(100.0, 0.1) == pytest.approx(10.0)
    assert P99.margin(1.0) == 0.2
    assert MEMORY_SLOPE.margin(math.nan) == 60.0
    assert len({metric.key for metric in METRICS}) == len(METRICS)


def p99(new, low, high, p, **changes):
    return MetricChange("perception", P99, 20.0, new, low, high, p, **{"samples": 1000, **changes})


def certain(new):
    return MetricChange("perception", OUTPUTS, 0.0, new, new, new)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (p99(22.0, 1.0, 3.0, 0.001), Judgement.WORSE),
        (p99(18.0, -3.0, -1.0, 0.001), Judgement.BETTER),
        (p99(20.1, -0.5, 0.7, 0.5), Judgement.EQUIVALENT),
        (p99(20.5, 0.1, 0.9, 0.01), Judgement.EQUIVALENT),  # there is a change, and it does not matter
        (p99(20.5, 0.1, 1.4, 0.01), Judgement.NOT_ENOUGH),  # whether it matters is not known
        (p99(22.0, -1.0, 5.0, 0.2), Judgement.NOT_ENOUGH),
        (p99(22.0, 1.0, 3.0, 0.001, enough=2000.0, why="too few"), Judgement.NOT_ENOUGH),
        (p99(22.0, 1.0, 3.0, 0.001, decides=False), Judgement.INFORMATIVE),
        (MetricChange("perception", P99, math.nan, 20.0), Judgement.NOT_ENOUGH),
        (MetricChange("perception", MAX, 20.0, 90.0, decides=False), Judgement.INFORMATIVE),
        (certain(0.0), Judgement.EQUIVALENT),
        (certain(0.01), Judgement.WORSE),
    ],
)
def test_given_an_estimate_when_judged_then_the_verdict_is(one, expected):
    assert judged(one).verdict is expected


def test_given_many_comparisons_when_judged_then_what_chance_explains_is_no_alarm():
    one = p99(22.0, 0.2, 3.8, 0.03)
    others = [p99(20.0, -0.5, 0.5, 0.9) for _ in range(5)]
    silent = [
        p99(20.0, -9.0, 9.0, 0.9, decides=False),
        p99(20.0, -9.0, 9.0, 0.9, enough=5000.0),
        certain(0.0),
    ]
    found = judge([one, *others], MARGIN)[0]
    assert (found.verdict, found.p) == (Judgement.NOT_ENOUGH, pytest.approx(0.18))
    assert found.needed > 1000
    assert judged(one).verdict is Judgement.WORSE
    assert judge([one, *silent], MARGIN)[0].verdict is Judgement.WORSE  # these are no comparisons


@pytest.mark.parametrize(
    ("one", "needed"),
    [
        (p99(20.0, -2.0, 2.0, 1.0), 4000),
        (p99(20.0, -1.1, 1.1, 1.0, enough=4321.0), 4400),
        (MetricChange("perception", P99, math.nan, math.nan, enough=500.0), 500),
    ],
)
def test_given_a_wide_interval_when_judged_then_four_times_the_frames_would_do_for_half_of_it(one, needed):
    assert judge([one], MARGIN)[0].needed == needed


@given(st.floats(-5, 5), st.floats(0.01, 10), st.floats(0, 1))
@example(1.0, 1.0, 0.9999999999999999)
def test_given_any_interval_when_judged_then_only_what_moved_by_the_margin_is_worse_or_better(
    moved, reach, p
):
    found = judge([p99(20.0 + moved, moved - reach, moved + reach, p)], MARGIN)[0]
    if found.verdict in {Judgement.WORSE, Judgement.BETTER}:
        assert abs(moved) >= 1.0 - 1e-9
        assert (found.verdict is Judgement.WORSE) == (moved > 0)
    if found.verdict is Judgement.NOT_ENOUGH:
        assert found.needed >= 1000


@pytest.mark.parametrize(("new", "breaks"), [(1.0, False), (1.01, True), (math.nan, True)])
def test_given_a_limit_when_asked_then_it_is_on_what_was_measured(new, breaks):
    assert MetricChange("perception", MISS, 0.0, new, limit=1.0).breaks_limit is breaks
    assert not MetricChange("perception", MISS, 0.0, new).breaks_limit


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (p99(30.0, -1.0, 21.0, 0.2), True),  # ten margins more, and chance may explain it
        (p99(29.9, -1.0, 21.0, 0.2), False),
        (p99(10.0, -21.0, 1.0, 0.2), False),  # less is no harm
        (p99(30.0, 9.0, 11.0, 0.001), False),  # it has a verdict
        (MetricChange("perception", P99, 20.0, math.nan), True),
        (MetricChange("perception", P99, math.nan, 20.0), False),
        (MetricChange("", START_UP, 2.0, 23.0, decides=False), True),  # one run a side: shown, not judged
        (MetricChange("perception", MAX, 2.0, 90.0, decides=False), False),
    ],
)
def test_given_no_verdict_when_far_more_than_the_margin_or_gone_then_it_is_conspicuous(one, expected):
    assert judged(one).conspicuous is expected


# -- two sides


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


def changed(base, new, metric=MISS):
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
    even, clustered = (changed(one, of_another_log(missing([]))) for one in (spread, bursts))
    assert width(clustered) > 2 * width(even)
    assert even.p < 1e-6
    assert clustered.p > 0.01


@pytest.mark.parametrize("stamps", [missing, lambda *given: of_another_log(missing(*given))])
def test_given_no_miss_at_all_when_compared_then_the_interval_is_not_empty(stamps):
    base, new = missing([], 100), stamps([], 100)
    new.frames["total_ms"] += 1
    found = changed(base, new)
    assert (found.low, found.high) == (pytest.approx(-2, abs=0.1), pytest.approx(2, abs=0.1))
    assert found.p == pytest.approx(1.0)


def test_given_one_short_burst_of_a_log_when_compared_then_it_may_be_chance():
    found = changed(missing([]), missing(slice(300, 500)))
    assert not found.tested or found.p > 0.01


def test_given_the_same_frames_missed_when_paired_then_less_is_left_to_chance_than_in_other_logs():
    hard = np.random.default_rng(0).permutation(3000)[:300]
    more = np.r_[hard, np.setdiff1d(np.arange(0, 3000, 150), hard)]
    paired = changed(missing(hard), missing(more))
    unpaired = changed(missing(hard), of_another_log(missing(more)))
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
