import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.stage_figures import Quantiles


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=60))
def test_given_any_samples_when_asked_then_numpy_says_the_same_of_the_known_ones(samples):
    found = Quantiles.of(np.array(samples, dtype=float))
    known = [sample for sample in samples if not math.isnan(sample)]
    assert found.count == len(known)
    if known:
        assert [value for _, value in found.items()] == pytest.approx(np.percentile(known, [50, 95, 99, 100]))
    else:
        assert all(math.isnan(value) for _, value in found.items())


def test_given_quantiles_when_itemised_then_names_carry_the_unit():
    assert Quantiles(1, 1.0, 2.0, 3.0, 4.0).items() == [
        ("p50_ms", 1.0), ("p95_ms", 2.0), ("p99_ms", 3.0), ("max_ms", 4.0)
    ]  # fmt: skip
