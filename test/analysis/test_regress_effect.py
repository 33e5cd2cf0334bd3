import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.analysis.regress_effect import MinEffects
from torchperf_ros.analysis.regress_metric import MEMORY_SLOPE, METRICS, MISS, P50, P99
from torchperf_ros.core.errors import ConfigError


def test_given_no_settings_when_asked_then_every_metric_has_its_default():
    effects = MinEffects()

    assert effects.margin("perception", P99).of(100.0) == pytest.approx(3.0)
    assert effects.margin("perception", P99).of(1.0) == 0.2
    assert effects.margin("", MEMORY_SLOPE).of(math.nan) == 60.0
    assert all(effects.margin("", metric).of(1.0) >= 0 for metric in METRICS.values())


def test_given_settings_when_asked_then_the_larger_of_share_and_absolute_counts_and_a_stages_own_wins():
    effects = MinEffects(["p50=2%,0.2ms", "p99=0.5ms", "planning.p99=10%", "miss=1pp", "miss = 2 pp"])

    assert effects.margin("planning", P50).of(5.0) == 0.2
    assert effects.margin("planning", P50).of(50.0) == pytest.approx(1.0)
    assert effects.margin("perception", P99).of(50.0) == 0.5
    assert effects.margin("planning", P99).of(50.0) == pytest.approx(5.0)
    assert effects.margin("planning", MISS).of(50.0) == 2.0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("p98=3%", ("'p98'", "p95, p99")), ("p99", ("p99=", "3%, 2ms")), ("p99=3", ("p99=3",)), ("p99=-3%", ("-3%",)),
        ("p99=3s", ("3s",)), ("miss=3%", ("miss=3%", "0.5pp")), ("memory_slope=1MiB", ("2MiB/h",)), ("=3%", ("''",)),
    ],
)  # fmt: skip
def test_given_a_setting_that_is_none_when_read_then_the_message_says_what_would_do(setting, words):
    with pytest.raises(ConfigError) as error:
        MinEffects([setting])
    assert all(word in str(error.value) for word in words)


@given(st.floats(0, 100).map(lambda value: round(value, 3)), st.floats(0, 100).map(lambda value: round(value, 3)))
def test_given_any_numbers_when_written_and_read_then_they_are_the_margin(share, absolute):
    margin = MinEffects([f"p99={share:.3f}%,{absolute:.3f}ms"]).margin("", P99)

    assert margin.of(10.0) == pytest.approx(max(share / 10, absolute))
