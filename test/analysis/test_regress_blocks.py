import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from torchperf_ros.analysis.regress_blocks import block_inflation, dependence

sys.path.insert(0, str(Path(__file__).parent))
from regress_runs import autocorrelated

COUNT = 8000


@pytest.mark.parametrize("phi", [0.3, 0.6, 0.9])
def test_given_an_ar1_when_its_dependence_is_estimated_then_it_is_near_the_theory(phi):
    found = [dependence(autocorrelated(COUNT, phi, seed)) for seed in range(12)]

    # AR(1): G / g(0) = 2 phi / (1 - phi^2), so b = (6 phi^2 / (1 - phi^2)^2)^(1/3) n^(1/3)
    block = (6 * phi**2 / (1 - phi**2) ** 2) ** (1 / 3) * COUNT ** (1 / 3)
    assert np.median([one.block for one in found]) == pytest.approx(block, rel=0.2)
    assert np.median([one.inflation for one in found]) == pytest.approx((1 + phi) / (1 - phi), rel=0.15)
    assert found[0].effective == pytest.approx(COUNT / found[0].inflation)


def test_given_independent_values_when_estimated_then_blocks_are_short_and_nothing_is_inflated():
    found = [dependence(autocorrelated(COUNT, 0.0, seed)) for seed in range(12)]

    assert np.median([one.block for one in found]) <= 5
    assert np.median([one.inflation for one in found]) < 1.1


def test_given_values_that_undo_each_other_when_estimated_then_nothing_counts_for_more_than_it_is():
    assert dependence(autocorrelated(COUNT, -0.8)).inflation == 1.0


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [20.0] * 50, [0.1 + 0.2] * 50])
def test_given_too_few_or_constant_values_when_estimated_then_they_depend_on_nothing(values):
    found = dependence(np.array(values))

    assert (found.block, found.inflation, found.count) == (1, 1.0, len(values))


@given(arrays(np.float64, st.integers(1, 60), elements=st.floats(-1e6, 1e6)))
def test_given_any_values_when_estimated_then_the_block_fits_and_the_inflation_is_one_or_more(values):
    found = dependence(values)

    assert 1 <= found.block <= max(1, -(-len(values) // 3))
    assert found.inflation >= 1.0
    assert np.isfinite(found.inflation)


def test_given_bursts_when_their_blocks_are_looked_at_then_they_count_as_few():
    bursts = np.zeros(4000)
    for at in range(0, 4000, 400):
        bursts[at : at + 20] = 1.0

    assert block_inflation(bursts, 100) == pytest.approx(20, rel=0.3)
    assert block_inflation(np.zeros(10), 3) == 1.0
