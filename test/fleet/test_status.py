"""Verdicts, by simulation with known truth, and the stretches that they are made of."""

import math

import numpy as np
import pytest

from benchmarks.rollout import NullFleet, decisions
from torchperf_ros.fleet.plan import Margins
from torchperf_ros.fleet.status import (
    ALPHA,
    DISAGREEMENT,
    LATENCY,
    MISSES,
    P99,
    ConfidenceInterval,
    MetricVerdict,
    interval,
    margin_of,
    units_of,
)
from torchperf_ros.observe.runs.changes import Judgement


def test_given_fleets_on_which_nothing_differs_when_looked_at_every_minute_then_at_most_one_in_twenty_is_decided():
    fleet = NullFleet(20, 2, vehicle_sigma=0.02)
    found = [decisions(fleet, seed) for seed in range(60)]
    assert sum(without for without, _ in found) <= 6  # of 60 at 5 %: 7 or more have a chance of 3 %
    assert sum(with_margins for _, with_margins in found) <= 6


@pytest.mark.parametrize("tail", [2.2, 30.0])
def test_given_values_with_heavy_tails_when_looked_at_at_all_times_then_the_truth_is_rarely_left_out(tail):
    random, left_out = np.random.default_rng(5), 0
    for _ in range(100):
        values = random.standard_t(tail, 1500)
        vehicles = random.integers(0, 40, 1500)
        found = [interval(values[:n], vehicles[:n], ALPHA) for n in range(60, 1500, 12)]
        left_out += any(one.low > 0 or one.high < 0 for one in found)
    assert left_out <= 10


def test_given_a_difference_when_units_come_then_it_is_found_and_intervals_hold_it():
    random = np.random.default_rng(2)
    vehicles = np.arange(4000) % 50
    values = random.normal(0.05, 0.1, 4000)
    widths = []
    for count in (60, 400, 4000):
        found = interval(values[:count], vehicles[:count], ALPHA)
        assert found.low < 0.05 < found.high
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True)
    assert found.verdict(0.03) is Judgement.WORSE
    assert interval(-values, vehicles, ALPHA).verdict(0.03) is Judgement.BETTER
    assert interval(values - 0.05, vehicles, ALPHA).verdict(0.03) is Judgement.EQUIVALENT


def test_given_vehicles_that_differ_for_good_when_few_then_the_interval_is_as_wide_as_they_differ():
    random = np.random.default_rng(3)
    vehicles = np.repeat(np.arange(20), 200)
    values = random.normal(0, 0.1, 20)[vehicles] + random.normal(0, 0.01, 4000)
    assert interval(values, vehicles, ALPHA).verdict(0.01) is Judgement.NOT_ENOUGH
    assert (
        interval(values, np.arange(4000), ALPHA).high - interval(values, np.arange(4000), ALPHA).low < 0.02
    )


def test_given_too_few_units_or_vehicles_when_asked_then_there_is_no_interval():
    for count, vehicles in ((59, 30), (500, 9)):
        found = interval(np.zeros(count), np.arange(count) % vehicles, ALPHA)
        assert (found.low, found.high, found.units) == (-math.inf, math.inf, count)
        assert found.verdict(0.1) is Judgement.NOT_ENOUGH


def test_given_an_interval_that_is_too_wide_when_asked_then_so_many_units_as_it_says_make_it_narrow_enough():
    random = np.random.default_rng(4)
    values, vehicles = random.normal(0.0, 0.1, 20_000), np.arange(20_000) % 50
    found = interval(values[:200], vehicles[:200], ALPHA)
    count = found.units_for(0.01)
    assert 1000 < count < 8000
    for share, narrow in ((0.5, False), (1.2, True)):
        later = interval(values[: int(share * count)], vehicles[: int(share * count)], ALPHA)
        assert (later.high - later.mean <= 0.01) is narrow
    assert found.units_for(1.0) == 200
    assert found.units_for(0.0) == math.inf


@pytest.mark.parametrize(
    ("found", "metric", "said"),
    [
        (ConfidenceInterval(units=0), P99, "a verdict needs 10 vehicles, 0 brought some home"),
        (
            ConfidenceInterval(units=900, vehicles=4),
            P99,
            "if 1 % of the fleet are no more, a step of 3 % is needed, or --force",
        ),
        (
            ConfidenceInterval(units=20, vehicles=12),
            P99,
            "not enough data: it needs some 40 more units of half an hour, 5.0 h",
        ),
        (
            ConfidenceInterval(0.02, -0.03, 0.07, 100, 12),
            LATENCY,
            (
                "latency: not enough data, +2.02 % (-2.96 to +7.25), margin 5.13 %: it needs some 159 more"
                " units"
            ),
        ),
        (
            ConfidenceInterval(0.05, -0.03, 0.13, 100, 12),
            DISAGREEMENT,
            "disagreement: not enough data, +5.00 points",
        ),
        (
            ConfidenceInterval(0.05, -0.03, 0.13, 100, 12),
            DISAGREEMENT,
            "the difference is the margin itself",
        ),
    ],
)
def test_given_too_little_for_a_verdict_when_asked_then_what_is_missing_and_how_long_it_takes_is_said(
    found, metric, said
):
    finding = MetricVerdict("", metric, found, 0.05, Judgement.NOT_ENOUGH)
    assert said in finding.lacks(8.0, 1.0)


def test_given_no_miss_at_all_when_units_come_then_three_that_chance_may_have_hidden_keep_it_open():
    none = interval(np.zeros(70), np.arange(70), ALPHA, least=1 / 1800)
    assert none.high > 3 / (70 * 1800)
    assert (
        interval(np.zeros(7000), np.arange(7000), ALPHA, least=1 / 54_000).verdict(0.001)
        is Judgement.EQUIVALENT
    )


@pytest.mark.parametrize(
    ("found", "limited"),
    [
        (ConfidenceInterval(0.1, 0.06, 0.2), Judgement.WORSE),
        (ConfidenceInterval(0.01, 0.0, 0.04), Judgement.EQUIVALENT),
        (ConfidenceInterval(0.05, 0.0, 0.1), Judgement.NOT_ENOUGH),
    ],
)
def test_given_a_share_with_a_limit_when_asked_then_the_interval_decides(found, limited):
    assert found.limited(0.05) is limited


def test_given_a_difference_below_its_margin_when_certain_then_it_is_neither_worse_nor_enough():
    assert ConfidenceInterval(0.02, 0.01, 0.03).verdict(0.025) is Judgement.NOT_ENOUGH
    assert margin_of(LATENCY, Margins()) == pytest.approx(math.log(1.02))
    assert margin_of(P99, Margins()) == pytest.approx(math.log(1.03))
    assert margin_of(MISSES, Margins()) == pytest.approx(0.001)


def blocks(*drives):
    """Minutes of (vehicle, drive, minutes), one second apart; the candidate takes twice as long."""
    vehicle, drive = (
        np.concatenate([np.full(n, one) for *keys, n in drives for one in [keys[i]]]) for i in (0, 1)
    )
    count = len(vehicle)
    ones = np.ones(count)
    return {
        "vehicle": vehicle,
        "drive": drive,
        "version": np.full(count, "7"),
        "role": np.full(count, "shadow"),
        "t_s": 60.0 * np.arange(count),
        "frames": 1800 * ones,
        "base_sum_ms": ones,
        "candidate_sum_ms": 2 * ones,
        "base_p99_ms": ones,
        "candidate_p99_ms": 2 * ones,
        "base_misses": 0 * ones,
        "candidate_misses": 18 * ones,
        "compared": 10 * ones,
        "agreed": 9 * ones,
    }


def test_given_minutes_when_cut_into_stretches_then_drives_are_kept_apart_and_short_ones_left_out():
    units = units_of(blocks((0, 1, 70), (0, 2, 4), (1, 3, 12)))
    assert units.vehicle.tolist() == [0, 0, 0, 1]
    assert units.frames.tolist() == [54_000, 54_000, 18_000, 21_600]
    assert units.values[LATENCY] == pytest.approx(math.log(2))
    assert units.values[P99] == pytest.approx(math.log(2))
    assert units.values[MISSES] == pytest.approx(0.01)
    assert units.values[DISAGREEMENT] == pytest.approx(0.1)


def test_given_a_drive_that_goes_on_when_cut_then_its_last_stretch_counts_when_it_is_over():
    drive = blocks((0, 1, 42))
    last_s = drive["t_s"][-1]
    assert units_of(drive, now_s=last_s + 60).end_s.tolist() == [29 * 60.0]
    assert units_of(drive, now_s=last_s + 660).end_s.tolist() == [29 * 60.0, last_s]
    assert len(units_of({name: column[:0] for name, column in drive.items()}).vehicle) == 0
