"""Prometheus exporter: what `/diagnostics` says, for scraping."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torchperf_ros.core.clock import monotonic_ns
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.supervise.stage_actor import StageActor


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
