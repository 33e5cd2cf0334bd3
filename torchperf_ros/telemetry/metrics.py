"""Prometheus exporter: what `/diagnostics` says, for scraping."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torchperf_ros.core.clock import monotonic_ns
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.supervise.stage_actor import StageActor

_TIER_GAUGES = (
    ("graphs", "graphs", "Graphs that the tier was compiled into"),
    ("breaks", "graph_breaks", "Breaks between them"),
    ("waste", "padding_ratio", "Share of what the engine ran that was padding"),
)
_TIER_COUNTERS = (
    ("recompiles", "recompiles", "Frames that would have compiled again, answered in eager"),
    ("engine_errors", "engine_errors", "Frames in which the engine raised"),
    ("eager_answers", "eager_answers", "Frames that eager answered in the engine's place"),
    ("hits", "shape_hits", "Frames of a prepared shape"),
    ("misses", "shape_misses", "Frames of another shape, answered in eager"),
    ("cache_hits", "compiler_cache_hits", "Graphs that came out of the compiler's cache"),
)


class StageCollector(Collector):
    """Reads the stages when scraped; between scrapes it costs nothing."""

    def __init__(self, stages: Sequence[StageActor]) -> None:
        """Take the node's stages."""
        self._stages = stages

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges by stage, outcome and fallback."""
        frames = CounterMetricFamily("torchperf_frames", "Frames received", labels=["stage"])
        answers = CounterMetricFamily("torchperf_answers", "Frames answered", labels=["stage", "outcome"])
        fallbacks = CounterMetricFamily("torchperf_fallbacks", "Fallbacks published", labels=["stage", "fallback"])
        dropped = CounterMetricFamily("torchperf_dropped", "Frames dropped", labels=["stage", "why"])
        restarts = CounterMetricFamily("torchperf_worker_restarts", "Workers replaced", labels=["stage"])
        latency = GaugeMetricFamily(
            "torchperf_latency_seconds", "Receipt to publish, last frames", labels=["stage", "quantile"]
        )
        health = GaugeMetricFamily("torchperf_health", "0 STARTING, 1 WAITING, 2 NOMINAL, 3 DEGRADED, 4 SAFE_STOP",
                                   labels=["stage"])  # fmt: skip
        for stage in self._stages:
            name, statistics = stage.config.name, stage.journal.statistics
            frames.add_metric([name], statistics.frames)
            for outcome in Outcome:
                answers.add_metric([name, outcome.word], statistics.outcomes[outcome])
            for fallback in Fallback:
                fallbacks.add_metric([name, fallback.word], statistics.fallbacks[fallback])
            dropped.add_metric([name, "superseded"], stage.mailbox.superseded)
            dropped.add_metric([name, "stale"], stage.mailbox.stale)
            restarts.add_metric([name], stage.crew.restarts)
            for quantile, value in zip((50, 95, 99), statistics.total_ms.percentiles(50, 95, 99), strict=True):
                latency.add_metric([name, f"0.{quantile}"], value / 1000)
            health.add_metric([name], stage.journal.health.state(monotonic_ns()))
        yield from (frames, answers, fallbacks, dropped, restarts, latency, health)
        yield from self._tiers()

    def _tiers(self) -> Iterator[Metric]:
        """How each tier runs, by stage and tier."""
        engines = GaugeMetricFamily("torchperf_tier_engine", "1 for the engine that runs the tier; graphs and package",
                                    labels=["stage", "tier", "engine", "package"])  # fmt: skip
        gauges = {
            key: GaugeMetricFamily(f"torchperf_tier_{name}", text, labels=["stage", "tier"])
            for key, name, text in _TIER_GAUGES
        }
        counters = {
            key: CounterMetricFamily(f"torchperf_tier_{name}", text, labels=["stage", "tier"])
            for key, name, text in _TIER_COUNTERS
        }
        exhausted = CounterMetricFamily("torchperf_out_of_memory", "Frames without enough memory", labels=["stage"])
        for stage in self._stages:
            crew, name = stage.crew, stage.config.name
            exhausted.add_metric([name], crew.tally.out_of_memory(crew.everyone))
            for tier in crew.tally.rows(crew.everyone):
                labels = [name, tier["name"]]
                engines.add_metric([*labels, tier["engine"], tier["package"][:12]], 1)
                for key, gauge in gauges.items():
                    gauge.add_metric(labels, tier[key])
                for key, counter in counters.items():
                    counter.add_metric(labels, tier[key])
        yield from (engines, exhausted, *gauges.values(), *counters.values())


class MetricsExporter:
    """An HTTP server on 127.0.0.1 that answers `/metrics`."""

    def __init__(self, port: int, stages: Iterable[StageActor]) -> None:
        """Serve on `port`.

        Raises:
            OSError: the port is taken or not allowed.
        """
        registry = CollectorRegistry()
        registry.register(StageCollector(list(stages)))
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
