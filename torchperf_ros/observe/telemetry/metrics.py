"""Prometheus exporter: what `/diagnostics` says and more, for scraping."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from torchperf_ros.observe.telemetry.diagnostics import (
    HISTOGRAM,
    METRICS,
    NODE_FIELDS,
    Field,
    NodeLook,
    StageLook,
    Values,
)
from torchperf_ros.observe.telemetry.memory import sample_memory
from torchperf_ros.settings.config import NodeConfig
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.process_setup import step_back

_FAMILIES: Final[dict[str, type[Any]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
}
_MS_PER_S: Final = 1000.0


def family_of(field: Field, looks: Mapping[str, StageLook] | NodeLook) -> Metric:
    """A field as a metric in base units, of stages by name, or of the node."""
    if isinstance(looks, NodeLook):
        labels, found = field.labels, field.by_label(looks)
    else:
        # A stage without streams has no such label, where others have some: Prometheus takes "" for none.
        has_streams = any(look.config.stream for look in looks.values())
        labels = ("stage", *("stream",) * has_streams, *field.labels)
        found = {
            (look.config.stage, *(look.config.stream,) * has_streams, *words): value
            for look in looks.values()
            for words, value in field.by_label(look).items()
        }
    family = _FAMILIES[field.kind](field.name.removesuffix("_total"), field.text, labels=labels)
    for words, value in found.items():
        if field.kind == HISTOGRAM:
            family.add_metric(words, *value)
        else:
            family.add_metric(words, value / _MS_PER_S if field.unit == "ms" else value)
    return cast("Metric", family)


class StageCollector(Collector):
    """Reads the stages when scraped.

    Between scrapes it costs nothing, and it never takes a lock that a frame needs.
    """

    def __init__(
        self,
        config: NodeConfig,
        stages: Sequence[Stage],
        lane: Callable[[], Values] = dict,
        refused: Callable[[], int] = int,
    ) -> None:
        self._config, self._refused = config, refused
        self._lane = lane
        self._stages = stages

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: registering a collector would otherwise scrape it."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every metric of the table.

        Called on a thread of the scrape's own, which gives way to all others.
        """
        step_back()
        use = sample_memory(self._stages)
        stages = {stage.config.name: StageLook(stage, use.rss_by_pid) for stage in self._stages}
        node = NodeLook(self._config, use, self._lane(), self._refused())
        for field in METRICS:
            yield family_of(field, node if field in NODE_FIELDS else stages)


_MOST_SCRAPES: Final = 4
_AFTER_ERROR_S: Final = 0.2
_SCRAPE_TIMEOUT_S: Final = 10.0  # Prometheus's own for the whole scrape


class _ScrapeHandler(WSGIRequestHandler):
    """Answers one client, which has to ask and to take the answer without long pauses."""

    timeout = _SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: each scrape would be a line on the node's terminal."""


class _ScrapeServer(ThreadingMixIn, WSGIServer):
    """Has a thread for each client, but only so many at a time.

    They take the interpreter from the stages' threads.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.refused = 0
        self._free = threading.BoundedSemaphore(_MOST_SCRAPES)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without asking for a name of the address, which may take as long as a resolver likes."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> Any:  # noqa: ANN401 - socketserver's
        """The next client.

        Where this process has no descriptor left for it, it waits, and no thread spins meanwhile.
        """
        try:
            return super().get_request()
        except OSError:
            time.sleep(_AFTER_ERROR_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's
        if self._free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # the machine gives no more threads
                self._free.release()
                raise
            return
        self.refused += 1
        with contextlib.suppress(OSError):
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Say an error, unless it is that a client has gone, or is too slow."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _ScrapeServer6(_ScrapeServer):
    address_family = socket.AF_INET6


class MetricsExporter:
    def __init__(
        self, config: NodeConfig, stages: Iterable[Stage], lane: Callable[[], Values] = dict
    ) -> None:
        """Serve on `metrics_port` of `metrics_address`.

        Raises:
            OSError: the port is taken or not allowed, or the address is none of this machine's.
        """
        registry = CollectorRegistry()
        registry.register(StageCollector(config, list(stages), lane, lambda: self.server.refused))
        ProcessCollector(registry=registry)
        kind = _ScrapeServer6 if ":" in config.metrics_address else _ScrapeServer
        self.server = kind((config.metrics_address, config.metrics_port), _ScrapeHandler)
        self.server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self.server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
