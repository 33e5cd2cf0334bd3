"""What runs are compared by."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Metric:
    """One thing that two runs are compared by; more of it is worse.

    Attributes:
        key: as in parameters, for example `p99`.
        title: as in tables.
        unit: of its values in tables.
        margin: the smallest change that matters, as in parameters.
        whole: one value for the whole run, instead of one for each stage.
    """

    key: str
    title: str
    unit: str
    margin: str
    whole: bool = False


P50 = Metric("p50", "p50 latency", "ms", "2%,0.1ms")
P95 = Metric("p95", "p95 latency", "ms", "3%,0.2ms")
P99 = Metric("p99", "p99 latency", "ms", "3%,0.2ms")
MAX = Metric("max", "longest latency", "ms", "5%,0.2ms")
JITTER = Metric("jitter", "jitter", "ms", "10%,0.1ms")
MISS = Metric("miss", "miss ratio", "%", "0.1pp")
FALLBACK = Metric("fallback", "fallback ratio", "%", "0.1pp")
DROPPED = Metric("dropped", "dropped ratio", "%", "0.5pp")
OUTPUTS = Metric("outputs", "outputs changed", "%", "0pp")
MEMORY_PEAK = Metric("memory_peak", "memory peak", "MiB", "5%,16MiB", whole=True)
MEMORY_SLOPE = Metric("memory_slope", "memory slope", "MiB/h", "60MiB/h", whole=True)
START_UP = Metric("start_up", "start-up time", "s", "50%,2s", whole=True)
COMPILE = Metric("compile", "compile time", "s", "25%,2s", whole=True)
METRICS: Final = {
    metric.key: metric
    for metric in (P50, P95, P99, MAX, JITTER, MISS, FALLBACK, DROPPED, OUTPUTS, MEMORY_PEAK, MEMORY_SLOPE, START_UP,
                   COMPILE)
}  # fmt: skip
"""Every metric by its key, in the order of the tables."""
