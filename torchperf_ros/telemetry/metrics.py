"""Prometheus exporter: what `/diagnostics` says and more, for scraping."""

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from torchperf_ros import __version__
from torchperf_ros.config.config import NodeConfig
from torchperf_ros.frame.clock import monotonic_ns
from torchperf_ros.frame.outcome import Fallback, Health, Outcome
from torchperf_ros.frame.quantiles import Quantiles
from torchperf_ros.stage.stage_actor import StageActor
from torchperf_ros.telemetry.memory import sample_memory
from torchperf_ros.workers.process_setup import step_back

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
    MetricSpec("torchperf_answers_total", _C, "Frames answered, unanswered ones included", ("stage", "outcome")),
    MetricSpec("torchperf_unanswered_total", _C, "Frames for which there was nothing to publish"),
    MetricSpec("torchperf_fallbacks_total", _C, "Frames by what was published instead", ("stage", "fallback")),
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
    MetricSpec(
        "torchperf_worker_resident_bytes", _G, "Resident memory of a worker, without shared memory", ("stage", "worker")
    ),
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


_PACKAGE_DIGITS = 12
_DROPPED = {"ignored": "ignored", "refused_inputs": "refused_input", "internal_errors": "internal_error"}
_ODD_STAMPS = {f"{why}_stamps": why for why in ("zero", "future", "backward", "repeated")}
_SIDE_RUNS = {"backups": "backup", "rehearsals": "rehearsal", "probes": "probe"}
_COUNTERS = {
    "frames": "torchperf_frames_total",
    "unanswered": "torchperf_unanswered_total",
    "missed_deadline": "torchperf_missed_deadlines_total",
    "late_results": "torchperf_late_results_total",
    "missed_observations": "torchperf_missed_observations_total",
}
_TIER_FACTS = {
    "graphs": "torchperf_tier_graphs",
    "breaks": "torchperf_tier_graph_breaks",
    "cache_hits": "torchperf_tier_compiler_cache_hits",
    "waste": "torchperf_tier_padding_ratio",
    "recompiles": "torchperf_tier_recompiles_total",
    "engine_errors": "torchperf_tier_engine_errors_total",
    "eager_answers": "torchperf_tier_eager_answers_total",
    "hits": "torchperf_tier_shape_hits_total",
    "misses": "torchperf_tier_shape_misses_total",
}
_CUDA_KINDS = ("allocated", "reserved", "free", "total")


class StageCollector(Collector):
    """Reads the stages when scraped; between scrapes it costs nothing, and it never takes a lock that a frame needs."""

    def __init__(self, config: NodeConfig, stages: Sequence[StageActor]) -> None:
        """Take the node's stages."""
        self._config = config
        self._stages = stages
        self._versions = (__version__, _version("torch"), _ros_distro(), platform.python_version())

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: registering a collector would otherwise scrape it."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every metric of the table; called on a thread of the scrape's own, which gives way to all others."""
        step_back()
        page = MetricPage()
        page.put("torchperf_build_info", 1, *self._versions)
        self._put_memory(page)
        for stage in self._stages:
            _put_counters(page, stage)
            _put_state(page, stage)
            _put_times(page, stage)
            _put_tiers(page, stage)
        return page.metrics()

    def _put_memory(self, page: MetricPage) -> None:
        use = sample_memory(self._stages)
        for stage in self._stages:
            for worker in stage.pool.everyone:
                if worker.pid in use.rss_by_pid:
                    labels = stage.config.name, str(worker.number)
                    page.put("torchperf_worker_resident_bytes", use.rss_by_pid[worker.pid], *labels)
        for kind in _CUDA_KINDS:
            if kind in use.told:
                page.put("torchperf_cuda_memory_bytes", use.told[kind], kind)
        page.put("torchperf_history_bytes", use.told.get("history", 0))
        page.put("torchperf_shared_memory_bytes", use.shared)
        page.put("torchperf_memory_used_ratio", use.used_share(self._config.memory_limit_mib))
        page.put("torchperf_memory_share_ratio", self._config.memory_share)


def _put_counters(page: MetricPage, stage: StageActor) -> None:
    name, statistics = stage.config.name, stage.statistics.counters
    for attribute, metric in _COUNTERS.items():
        page.put(metric, getattr(statistics, attribute), name)
    for outcome in Outcome:
        page.put("torchperf_answers_total", statistics.outcomes[outcome], name, outcome.word)
    for fallback in Fallback:
        page.put("torchperf_fallbacks_total", statistics.fallbacks[fallback], name, fallback.word)
    page.put("torchperf_dropped_total", stage.mailbox.superseded, name, "superseded")
    page.put("torchperf_dropped_total", stage.mailbox.stale, name, "stale")
    for metric, reasons in (
        ("torchperf_dropped_total", _DROPPED),
        ("torchperf_odd_stamps_total", _ODD_STAMPS),
        ("torchperf_side_runs_total", _SIDE_RUNS),
    ):
        for attribute, why in reasons.items():
            page.put(metric, getattr(statistics, attribute), name, why)
    page.put("torchperf_worker_restarts_total", stage.pool.restarts, name)
    page.put("torchperf_out_of_memory_total", stage.pool.tally.out_of_memory(stage.pool.everyone), name)


def _put_state(page: MetricPage, stage: StageActor) -> None:
    name, config, pool = stage.config.name, stage.config, stage.pool
    page.put("torchperf_budget_seconds", config.budget_ms / 1000, name)
    page.put("torchperf_reserve_seconds", stage.margin.ms / 1000, name)
    for level, tier in enumerate(config.tiers):
        page.put("torchperf_tier_in_use", level == stage.ladder.level, name, tier)
    page.put("torchperf_workers_ready", sum(worker.usable for worker in pool.everyone), name)
    page.put("torchperf_memory_tight", stage.memory.tight, name)
    if pool.description is not None:
        page.put("torchperf_device_info", 1, name, pool.description.device)


def _put_times(page: MetricPage, stage: StageActor) -> None:
    name, now_ns = stage.config.name, monotonic_ns()
    health = stage.statistics.health.state(now_ns)
    reading = stage.statistics.figures.read(now_ns, health)
    for state in Health:
        page.put("torchperf_health", state is health, name, state.name.lower())
        page.put("torchperf_health_seconds_total", reading.health_s[state], name, state.name.lower())
    _put_quantiles(page, "torchperf_window_latency_seconds", reading.latency.window, name)
    _put_quantiles(page, "torchperf_window_age_seconds", reading.age, name)
    page.put("torchperf_interval_seconds", reading.interval_ms / 1000, name)
    page.put("torchperf_interval_jitter_seconds", reading.interval_jitter_ms / 1000, name)
    page.put("torchperf_latency_jitter_seconds", reading.latency_jitter_ms / 1000, name)
    page.put("torchperf_window_miss_ratio", reading.latency.miss_ratio, name)
    page.put("torchperf_unrecorded_rows_total", reading.unrecorded, name)
    tiers, lateness, steps = stage.statistics.figures.histograms()
    for tier, snapshot in tiers.items():
        page.put_histogram("torchperf_latency_seconds", *snapshot, name, tier)
    page.put_histogram("torchperf_lateness_seconds", *lateness, name)
    for step, snapshot in steps.items():
        page.put_histogram("torchperf_step_seconds", *snapshot, name, step)


def _put_quantiles(page: MetricPage, metric: str, quantiles: Quantiles, name: str) -> None:
    for statistic, value_ms in quantiles.items():
        page.put(metric, value_ms / 1000, name, statistic.removesuffix("_ms"))


def _put_tiers(page: MetricPage, stage: StageActor) -> None:
    """How each tier runs, as the workers say; nothing before one is ready."""
    for tier in stage.pool.tally.rows(stage.pool.everyone):
        labels = stage.config.name, tier["name"]
        page.put("torchperf_tier_engine", 1, *labels, tier["engine"], tier["package"][:_PACKAGE_DIGITS])
        for fact, metric in _TIER_FACTS.items():
            page.put(metric, tier[fact], *labels)


def _version(package: str) -> str:
    """Of an installed package, without importing it; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _ros_distro() -> str:
    """The distribution that is sourced; without one, the version of the wheels' rclpy."""
    return os.environ.get("ROS_DISTRO") or f"rclpy {_version('ros-rclpy')}".strip()


class MetricsExporter:
    """An HTTP server that answers `/metrics`."""

    def __init__(self, config: NodeConfig, stages: Iterable[StageActor]) -> None:
        """Serve on `metrics_port` of `metrics_address`.

        Raises:
            OSError: the port is taken or not allowed, or the address is none of this machine's.
        """
        registry = CollectorRegistry()
        registry.register(StageCollector(config, list(stages)))
        ProcessCollector(registry=registry)
        self._server, self._thread = start_http_server(
            config.metrics_port, addr=config.metrics_address, registry=registry
        )

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
