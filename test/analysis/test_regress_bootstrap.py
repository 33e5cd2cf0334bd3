import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.analysis import regress_bootstrap
from torchperf_ros.analysis.regress_bootstrap import resampled

sys.path.insert(0, str(Path(__file__).parent))
from regress_runs import autocorrelated

SHARES = (0.0, 0.5, 0.95, 0.99, 1.0)


def by_copying(values, columns, block, resamples, random):
    """The same bootstrap, as one would write it down."""
    n = len(values)
    whole, rest = divmod(n, block)
    starts = random.integers(0, n, (resamples, whole))
    last = random.integers(0, n, (resamples, 1)) if rest else np.empty((resamples, 0), dtype=int)
    quantiles, means = [], []
    for row, end in zip(starts, last, strict=True):
        blocks = [np.arange(start, start + block) for start in row] + [np.arange(start, start + rest) for start in end]
        places = np.concatenate(blocks) % n
        quantiles.append(np.quantile(values[places], SHARES))
        means.append(columns[places].mean(axis=0))
    return np.array(quantiles), np.array(means)


@given(n=st.integers(2, 40), block=st.integers(1, 40), seed=st.integers(0, 100), ties=st.booleans())
def test_given_any_series_when_resampled_by_counts_then_it_is_what_copying_gives(n, block, seed, ties):
    block = min(block, n)
    values = np.random.default_rng(seed).normal(size=n)
    values = np.round(values) if ties else values
    columns = np.column_stack([values, np.ones(n)])

    quantiles, means = resampled(values, SHARES, columns, block, 7, np.random.default_rng(seed))
    expected = by_copying(values, columns, block, 7, np.random.default_rng(seed))

    np.testing.assert_allclose(quantiles, expected[0], atol=1e-12)
    np.testing.assert_allclose(means, expected[1], atol=1e-12)


def test_given_an_ar1_when_its_mean_is_resampled_then_it_varies_as_theory_says_and_without_blocks_too_little():
    values, phi = autocorrelated(6000, 0.8), 0.8
    truth = np.sqrt((1 + phi) / (1 - phi) / len(values))

    def deviation(block):
        _, means = resampled(values, (), values[:, None], block, 400, np.random.default_rng(0))
        return means.std()

    assert deviation(100) == pytest.approx(truth, rel=0.25)
    assert deviation(1) < 0.5 * truth


def test_given_more_cells_than_fit_at_once_when_resampled_then_every_resample_is_told_of(monkeypatch):
    monkeypatch.setattr(regress_bootstrap, "_CELLS_AT_ONCE", 100)
    told = []
    quantiles, _ = resampled(np.arange(30.0), (0.5,), np.ones((30, 1)), 4, 10, np.random.default_rng(0), told.append)

    assert sum(told) == 10
    assert len(told) > 1
    assert np.isfinite(quantiles).all()
