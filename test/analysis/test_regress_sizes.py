import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from torchperf_ros.analysis.regress_sizes import effect_sizes

sys.path.insert(0, str(Path(__file__).parent))
from regress_runs import autocorrelated


def test_given_independent_samples_when_measured_then_sizes_and_p_values_are_scipys():
    random = np.random.default_rng(3)
    base, new = random.normal(size=4000), random.normal(0.06, 1.2, size=3000)
    found = effect_sizes(base, new)

    mann_whitney, welch = stats.mannwhitneyu(new, base), stats.ttest_ind(new, base, equal_var=False)
    assert found.longer_share == pytest.approx(mann_whitney.statistic / (4000 * 3000))
    assert found.mann_whitney_p == pytest.approx(mann_whitney.pvalue, rel=0.5)
    assert found.welch_p == pytest.approx(welch.pvalue, rel=0.5)
    assert found.mean_difference_ms == pytest.approx(new.mean() - base.mean())
    pooled = math.sqrt((3999 * base.var(ddof=1) + 2999 * new.var(ddof=1)) / 6998)
    assert found.cohens_d == pytest.approx(found.mean_difference_ms / pooled)


def test_given_autocorrelated_samples_of_one_kind_when_tested_then_p_values_are_not_those_of_independent_frames():
    pairs = [(autocorrelated(1000, 0.9, 2 * seed), autocorrelated(1000, 0.9, 2 * seed + 1)) for seed in range(25)]
    ours = [effect_sizes(*pair) for pair in pairs]

    assert np.mean([stats.ttest_ind(*pair, equal_var=False).pvalue < 0.05 for pair in pairs]) > 0.4
    assert np.mean([one.welch_p < 0.05 for one in ours]) < 0.25
    assert np.mean([one.mann_whitney_p < 0.05 for one in ours]) < 0.25


def test_given_ties_and_constants_when_measured_then_there_is_a_share_and_no_p_value():
    same = effect_sizes(np.full(9, 20.0), np.full(7, 20.0))
    longer = effect_sizes(np.full(9, 20.0), np.full(7, 21.0))

    assert same.longer_share == 0.5
    assert longer.longer_share == 1.0
    assert math.isnan(same.welch_p)
    assert math.isnan(longer.cohens_d)
    assert math.isnan(effect_sizes(np.array([1.0]), np.array([2.0, 3.0])).longer_share)
