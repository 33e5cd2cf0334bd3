"""The stage that is measured: its name, its model, and the namespaces of the two nodes that run it."""

from typing import Final

STAGE: Final = "bench"
ADAPTER: Final = "benchmarks.rig.bench_adapter:BenchAdapter"
TIERS: Final = ("full", "medium", "fast")
SHARES: Final = (1.0, 0.5, 0.2)
"""Cost of each tier, relative to the first."""

OURS: Final = "/bench/ours"
NAIVE: Final = "/bench/naive"
"""Each node subscribes to `image` in its namespace and publishes `answer` and `perf/latency_stages` there."""
