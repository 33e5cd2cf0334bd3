import math

import pytest

from torchperf_ros.analysis.regress_limit import Limits
from torchperf_ros.analysis.regress_metric import MEMORY_SLOPE, MISS, P99
from torchperf_ros.core.errors import ConfigError


def test_given_limits_when_asked_then_they_are_in_the_metrics_unit_and_a_stages_own_wins():
    limits = Limits(["perception.p99=40 ms", "p99=50ms", "miss=.5%", "memory_slope=10MiB/h"])

    assert [limits.limit(stage, P99) for stage in ("perception", "planning")] == [40.0, 50.0]
    assert limits.limit("planning", MISS) == 0.5
    assert limits.limit("", MEMORY_SLOPE) == 10.0
    assert math.isnan(Limits().limit("perception", P99))


@pytest.mark.parametrize(
    "setting", ["miss=1pp", "miss=1", "p99=3%", "p99=40", "p99=-1ms", "p99=", "p99=1ms,2ms", "p99"]
)
def test_given_a_limit_that_is_none_when_read_then_the_message_says_what_would_do(setting):
    name, unit = setting.partition("=")[0], "%" if setting.startswith("miss") else "ms"
    with pytest.raises(ConfigError, match=f"^--limit {name}=.*: has to be like 2{unit}$"):
        Limits([setting])
