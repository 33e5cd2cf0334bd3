"""Shares as people read them."""

import pytest

from torchperf_ros.api.text import percent


@pytest.mark.parametrize(
    ("share", "decimals", "text"),
    [(1.0, 1, "100.0%"), (0.99999, 1, "99.9%"), (0.99999, 2, "99.99%"), (0.29, 0, "29%"), (0.0, 1, "0.0%")],
)
def test_given_a_share_when_told_then_all_is_said_only_of_all(
    share: float, decimals: int, text: str
) -> None:
    assert percent(share, decimals) == text
