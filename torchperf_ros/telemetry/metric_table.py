"""Every metric of the exporter: its name, what it says, and its labels. `docs/metrics.md` holds the same table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

_FAMILIES: dict[str, type[Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True)
class MetricSpec:
    """One metric, in base units (seconds, bytes, ratios from 0 to 1).

    Attributes:
        name: as it is queried, counters with `_total`.
        kind: counter, gauge or histogram.
        text: one line for people.
        labels: names of its labels; each has few values, known when the node is configured.
    """

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ("stage",)


_C, _G, _H = "counter", "gauge", "histogram"
_TIER = ("stage", "tier")

METRICS = (
    # frames
    MetricSpec("torchperf_frames_total", _C, "Frames received"),
    MetricSpec("torchperf_answers_total", _C, "Frames answered", ("stage", "outcome")),
    MetricSpec("torchperf_fallbacks_total", _C, "Fallbacks published", ("stage", "fallback")),
    MetricSpec("torchperf_dropped_total", _C, "Messages that were not answered", ("stage", "why")),
    MetricSpec("torchperf_missed_deadlines_total", _C, "Answers that left after their deadline"),
    MetricSpec("torchperf_odd_stamps_total", _C, "Stamps that cannot be right", ("stage", "why")),
    MetricSpec("torchperf_side_runs_total", _C, "Runs beside a frame's own", ("stage", "why")),
    MetricSpec("torchperf_late_results_total", _C, "Results that came after their frame was answered"),
    MetricSpec("torchperf_missed_observations_total", _C, "Frames that a full worker could not be told of"),
    MetricSpec("torchperf_unrecorded_rows_total", _C, "Receipts and answers that these times leave out"),
    # times
    MetricSpec("torchperf_latency_seconds", _H, "Receipt to publish; a bound is the budget at configure", _TIER),
    MetricSpec("torchperf_lateness_seconds", _H, "Time past the deadline, 0 for answers in time"),
    MetricSpec("torchperf_step_seconds", _H, "Parts of a frame's time", ("stage", "step")),
    MetricSpec("torchperf_window_latency_seconds", _G, "Receipt to publish in the window", ("stage", "statistic")),
    MetricSpec("torchperf_window_age_seconds", _G, "Stamp to receipt in the window", ("stage", "statistic")),
    MetricSpec("torchperf_interval_seconds", _G, "Mean time between receipts in the window"),
    MetricSpec("torchperf_interval_jitter_seconds", _G, "Standard deviation of that time"),
    MetricSpec("torchperf_latency_jitter_seconds", _G, "Mean difference of successive latencies in the window"),
    MetricSpec("torchperf_window_miss_ratio", _G, "Share of answers in the window that were not on time"),
    MetricSpec("torchperf_budget_seconds", _G, "Budget of a frame"),
    MetricSpec("torchperf_reserve_seconds", _G, "How long before the deadline an answer is made"),
    # state
    MetricSpec("torchperf_health", _G, "1 for the state that the stage is in", ("stage", "state")),
    MetricSpec("torchperf_health_seconds_total", _C, "Time in each state since configure", ("stage", "state")),
    MetricSpec("torchperf_tier_in_use", _G, "1 for the tier that frames get", _TIER),
    MetricSpec("torchperf_workers_ready", _G, "Workers that can take frames"),
    MetricSpec("torchperf_worker_restarts_total", _C, "Workers replaced"),
    MetricSpec("torchperf_device_info", _G, "1 for the device that the stage's models run on", ("stage", "device")),
    MetricSpec("torchperf_build_info", _G, "1, with versions", ("version", "torch", "ros_distro", "python")),
    # memory
    MetricSpec("torchperf_worker_resident_bytes", _G, "Resident memory of a worker", ("stage", "worker")),
    MetricSpec("torchperf_cuda_memory_bytes", _G, "Memory of the CUDA device, as the workers say", ("kind",)),
    MetricSpec("torchperf_history_bytes", _G, "Histories that the adapters keep", ()),
    MetricSpec("torchperf_shared_memory_bytes", _G, "Shared memory that frames have touched", ()),
    MetricSpec("torchperf_memory_used_ratio", _G, "Memory of the models, as a share of its limit", ()),
    MetricSpec("torchperf_memory_share_ratio", _G, "Share from which lower tiers run", ()),
    MetricSpec("torchperf_memory_tight", _G, "1 while lower tiers run for lack of memory"),
    MetricSpec("torchperf_out_of_memory_total", _C, "Frames without enough memory"),
    # tiers
    MetricSpec("torchperf_tier_engine", _G, "1 for what runs the tier", ("stage", "tier", "engine", "package")),
    MetricSpec("torchperf_tier_graphs", _G, "Graphs that the tier was compiled into", _TIER),
    MetricSpec("torchperf_tier_graph_breaks", _G, "Breaks between them", _TIER),
    MetricSpec("torchperf_tier_compiler_cache_hits", _G, "Of its graphs, those that a cache held", _TIER),
    MetricSpec("torchperf_tier_padding_ratio", _G, "Share of what the engine ran that was padding", _TIER),
    MetricSpec("torchperf_tier_recompiles_total", _C, "Frames that eager answered instead of compiling again", _TIER),
    MetricSpec("torchperf_tier_engine_errors_total", _C, "Frames in which the engine raised", _TIER),
    MetricSpec("torchperf_tier_eager_answers_total", _C, "Frames that eager answered in the engine's place", _TIER),
    MetricSpec("torchperf_tier_shape_hits_total", _C, "Frames of a prepared shape", _TIER),
    MetricSpec("torchperf_tier_shape_misses_total", _C, "Frames of another shape, answered in eager", _TIER),
)
"""What there is beside `process_*` of the node's process, which `prometheus_client` names."""


class MetricPage:
    """What one scrape says: every metric of the table, filled in any order."""

    def __init__(self) -> None:
        """Begin with every metric empty."""
        self._families = {
            spec.name: _FAMILIES[spec.kind](spec.name.removesuffix("_total"), spec.text, labels=spec.labels)
            for spec in METRICS
        }

    def put(self, name: str, value: float, *labels: str) -> None:
        """One value of a counter or gauge, with the values of its labels in the table's order.

        Raises:
            KeyError: the table has no such metric.
        """
        self._families[name].add_metric(labels, value)

    def put_histogram(self, name: str, buckets: Sequence[tuple[str, float]], total: float, *labels: str) -> None:
        """Cumulative counts by upper bound, and the sum of all samples."""
        self._families[name].add_metric(labels, buckets, total)

    def metrics(self) -> Iterator[Metric]:
        """What was filled, in the table's order."""
        return iter(self._families.values())
