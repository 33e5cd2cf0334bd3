import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.analysis.regress_interval import Share, adjusted, resampled_interval, share_interval, widening

MANY = 10**9
"""So many blocks that nothing is widened."""


def share(hits, of):
    return Share(hits / of, MANY, 1, of)


@pytest.mark.parametrize(
    ("base", "new", "low", "high"),  # Newcombe 1998, table II, method 10
    [((48, 80), (56, 70), 0.0524, 0.3339), ((3, 10), (9, 10), 0.1705, 0.8090), ((0, 10), (10, 10), 0.6075, 1.0000)],
)
def test_given_published_examples_when_shares_are_compared_then_the_interval_is_as_published(base, new, low, high):
    found = share_interval(share(*base), share(*new), 0.05)

    assert (found.low, found.high) == (pytest.approx(100 * low, abs=0.01), pytest.approx(100 * high, abs=0.01))
    assert found.p < 0.05


def test_given_no_miss_at_all_when_compared_then_the_interval_is_not_empty():
    found = share_interval(share(0, 100), share(0, 100), 0.05)

    assert found.p == pytest.approx(1.0)
    assert found.high == -found.low == pytest.approx(3.7, abs=0.1)


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.01, 0.3), st.sampled_from([3.0, 10.0, 1e6]))
def test_given_any_shares_when_compared_then_the_p_value_and_the_interval_agree(base, new, alpha, blocks):
    runs = [Share(hits / 60, round(blocks) * 10, 10, 60.0) for hits in (base, new)]
    found = share_interval(*runs, alpha)

    if abs(found.p - alpha) > 1e-6:
        assert (found.p < alpha) == (found.low > 0 or found.high < 0)
    assert found.low <= 100 * (new - base) / 60 + 1e-9
    assert found.high >= 100 * (new - base) / 60 - 1e-9


def test_given_misses_in_bursts_when_measured_then_they_tell_less_than_as_many_that_are_spread():
    spread, bursts = np.zeros(3000, dtype=bool), np.zeros(3000, dtype=bool)
    spread[np.random.default_rng(0).permutation(3000)[:90]] = True
    for at in (100, 700, 2000):
        bursts[at : at + 30] = True
    even, clustered = Share.of(spread, 1), Share.of(bursts, 1)

    assert even.share == clustered.share == 0.03
    assert clustered.effective < 0.2 * even.effective
    assert clustered.block > even.block
    assert share_interval(clustered, clustered, 0.05).high > 2 * share_interval(even, even, 0.05).high


@given(st.floats(-3, 3), st.floats(2.5, 1000), st.integers(0, 20))
def test_given_resamples_when_an_interval_is_made_then_it_holds_the_estimate_and_agrees_with_p(
    difference, blocks, seed
):
    draws = difference + np.random.default_rng(seed).normal(size=999)
    found = resampled_interval(difference, draws, blocks, 0.05)

    assert found.low <= difference <= found.high
    assert 2 / 1000 <= found.p <= 1.0
    if not 0.04 < found.p < 0.06:
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


def test_given_normal_resamples_and_many_blocks_when_an_interval_is_made_then_it_is_the_normal_one():
    draws = NormalDist().samples(20_000, seed=1)
    found = resampled_interval(0.0, np.array(draws), 1e9, 0.05)

    assert (found.low, found.high) == (pytest.approx(-1.96, abs=0.05), pytest.approx(1.96, abs=0.05))
    assert widening(1e9, 0.05) == pytest.approx(1.0)
    assert widening(10, 0.05) == pytest.approx(2.262 / 1.960 * math.sqrt(10 / 9), rel=1e-3)


def test_given_p_values_when_corrected_then_holm_and_bh_are_as_published_and_nan_is_no_test():
    p_values = np.array([0.01, math.nan, 0.04, 0.03, 0.005])

    np.testing.assert_allclose(adjusted(p_values, "holm"), [0.03, math.nan, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(adjusted(p_values, "bh"), [0.02, math.nan, 0.04, 0.04, 0.02])
    np.testing.assert_allclose(adjusted(p_values, "none"), p_values)
    assert np.isnan(adjusted(np.array([math.nan]), "holm")).all()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_given_any_p_values_when_corrected_then_bh_is_scipys_and_lies_between_none_and_holm(p_values):
    from scipy.stats import false_discovery_control

    plain = np.array(p_values)
    bh, holm = adjusted(plain, "bh"), adjusted(plain, "holm")
    np.testing.assert_allclose(bh, false_discovery_control(plain), atol=1e-12)
    assert (plain <= bh + 1e-12).all()
    assert (bh <= holm + 1e-12).all()
