"""Prometheus exporter: what `/diagnostics` says and more, for scraping."""

import contextlib
import functools
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from torchperf_ros import __version__
from torchperf_ros.api.clock import monotonic_ns
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Health, Outcome
from torchperf_ros.observe.telemetry.memory import MemoryUse, sample_memory
from torchperf_ros.safety.emergency import KINDS
from torchperf_ros.settings.build_options import version_of
from torchperf_ros.settings.config import BASE, NodeConfig
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.process_setup import step_back

Values = Mapping[str, str]
"""What a status on `/diagnostics` says, by key."""

_C, _G, _H = "counter", "gauge", "histogram"
_FAMILIES: dict[str, type[Any]] = {
    _C: CounterMetricFamily,
    _G: GaugeMetricFamily,
    _H: HistogramMetricFamily,
}
_version = functools.cache(version_of)  # it reads files


def _ros_distro() -> str:
    """The distribution that is sourced; without one, the version of the wheels' rclpy."""
    return os.environ.get("ROS_DISTRO") or f"rclpy {_version('ros-rclpy')}".strip()


_PACKAGE_DIGITS = 12
_CUDA_KINDS = ("allocated", "reserved", "free", "total")


class _Scrape:
    """One stage, or the whole node where there is none, as a scrape finds it."""

    def __init__(
        self, config: NodeConfig, use: MemoryUse, stage: Stage | None, lane: Values, refused: int = 0
    ) -> None:
        self.lane, self.refused = lane, refused
        self.use, self.used_share, self.memory_share = (
            use,
            use.used_share(config.memory_limit_mib),
            config.memory_share,
        )
        if stage is None:
            return
        now_ns, statistics = monotonic_ns(), stage.statistics
        self.stage, self.pool, self.counters = stage, stage.pool, statistics.counters
        self.health = statistics.health.state(now_ns)
        self.reading = statistics.figures.read(now_ns, self.health)
        self.tier_times, self.lateness, self.step_times = statistics.figures.histograms()
        self.synchronised = [] if stage.sync is None else list(stage.sync.inputs.values())
        self.tiers = stage.pool.tally.rows(stage.pool.everyone)
        self.pairs = None if stage.shadow is None else stage.shadow.figures
        self.workers = [each for each in stage.pool.everyone if each.pid in use.rss_by_pid]


@dataclass(frozen=True)
class MetricSpec:
    """One metric, in base units (seconds, bytes, ratios from 0 to 1).

    Attributes:
        read: its value; with more labels than the stage's, a dict of values by these labels' values. Of a
            histogram cumulative counts by upper bound, and the sum of all samples.
    """

    name: str  # as it is queried, counters with `_total`
    kind: str  # counter, gauge or histogram
    text: str  # one line for people
    read: Callable[[Any], Any]
    # names of its labels; each has few values, known when the node is configured
    labels: tuple[str, ...] = ("stage",)

    def family(self, stages: Mapping[str, _Scrape], node: _Scrape) -> Metric:
        """What it is now, of every stage or of the node."""
        family = _FAMILIES[self.kind](self.name.removesuffix("_total"), self.text, labels=self.labels)
        of_stages = self.labels[:1] == ("stage",)
        for name, scrape in stages.items() if of_stages else [("", node)]:
            more, own = self.labels[of_stages:], (name,) * of_stages
            for labels, value in self.read(scrape).items() if more else [((), self.read(scrape))]:
                words = (labels,) if isinstance(labels, str) else labels
                family.add_metric((*own, *words), *(value if self.kind == _H else (value,)))
        return cast("Metric", family)


def _ms(attribute: str) -> Callable[[_Scrape], float]:
    """In seconds what the attribute says in ms."""
    read = attrgetter(attribute)
    return lambda scrape: read(scrape) / 1000


def _quantiles(attribute: str) -> Callable[[_Scrape], dict[str, float]]:
    read = attrgetter(attribute)
    return lambda scrape: {
        name.removesuffix("_ms"): value_ms / 1000 for name, value_ms in read(scrape).items()
    }


def _counted(**counters: str) -> Callable[[_Scrape], dict[str, int]]:
    return lambda scrape: {why: attrgetter(name)(scrape) for why, name in counters.items()}


def _by_tier(fact: str) -> Callable[[_Scrape], dict[str, float]]:
    """As the workers say; nothing before one is ready."""
    return lambda scrape: {tier["name"]: tier[fact] for tier in scrape.tiers}


def _by_input(count: str, per: float = 1) -> Callable[[_Scrape], dict[str, float]]:
    """A count of each synchronised input, `per` so many of which there is one."""
    read = attrgetter(count)
    return lambda scrape: {each.rule.topic: read(each) / per for each in scrape.synchronised}


def _versions(scrape: _Scrape) -> dict[tuple[str, str], int]:
    """The version that serves, and the other; nothing where there never was another."""
    stage, shadow = scrape.stage, scrape.stage.shadow
    if shadow is None and stage.version == BASE:
        return {}
    beside = {} if shadow is None else {(shadow.version, "shadow"): 1}
    return {(stage.version, "serves"): 1, **beside}


_PAIRS = (
    "pairs",
    "both",
    "base_late",
    "candidate_late",
    "compared",
    "different",
    "base_refused",
    "candidate_refused",
    "scored",
    "failed",
)
_FITTED, _INPUT = ("matched", "missing"), ("stage", "input")
_WHY, _STATE, _STATISTIC, _TIER = (
    ("stage", "why"),
    ("stage", "state"),
    ("stage", "statistic"),
    ("stage", "tier"),
)
_get = attrgetter
_M = MetricSpec
METRICS = (
    # frames
    _M("torchperf_frames_total", _C, "Frames received", _get("counters.frames")),
    _M("torchperf_answers_total", _C, "Frames answered, unanswered ones included",
       lambda s: {outcome.word: s.counters.outcomes[outcome] for outcome in Outcome}, ("stage", "outcome")),
    _M("torchperf_unanswered_total", _C, "Frames for which there was nothing to publish", _get("counters.unanswered")),
    _M("torchperf_fallbacks_total", _C, "Frames by what was published instead",
       lambda s: {fallback.word: s.counters.fallbacks[fallback] for fallback in Fallback}, ("stage", "fallback")),
    _M("torchperf_guard_verdicts_total", _C, "Outputs by what the guard made of them; without a guard none",
       lambda s: {verdict.word: s.counters.checks[verdict] for verdict in GuardVerdict} if s.stage.guard else {},
       ("stage", "verdict")),
    _M("torchperf_guard_shadow_refusals_total", _C, "Outputs that a check in shadow would have refused",
       _get("counters.shadow_refusals")),
    _M("torchperf_dropped_total", _C, "Messages that were not answered",
       _counted(superseded="stage.mailbox.superseded", ignored="counters.ignored",
                refused_input="counters.refused_inputs", internal_error="counters.internal_errors"), _WHY),
    _M("torchperf_input_frames_total", _C, "Frames by whether a synchronised input had a message that fits",
       lambda s: {(each.rule.topic, result): getattr(each, result) for each in s.synchronised for result in _FITTED},
       ("stage", "input", "result")),
    _M("torchperf_input_waits_total", _C, "Frames that waited for a synchronised input", _by_input("waited"), _INPUT),
    _M("torchperf_input_wait_seconds_total", _C, "How long they did, together", _by_input("waited_ms", 1000), _INPUT),
    _M("torchperf_input_skew_seconds", _G, "Distance of its last 128 messages that fitted from the stamp wanted",
       lambda s: {(each.rule.topic, name): getattr(each, f"skew_{name}_ms") / 1000
                  for each in s.synchronised for name in ("p50", "max")}, ("stage", "input", "statistic")),
    _M("torchperf_missed_deadlines_total", _C, "Answers that left after their deadline",
       _get("counters.missed_deadline")),
    _M("torchperf_stale_total", _C, "Frames whose deadline had passed when their turn came", _get("counters.stale")),
    _M("torchperf_odd_stamps_total", _C, "Stamps that cannot be right",
       _counted(**{why: f"counters.{why}_stamps" for why in ("zero", "future", "backward", "repeated")}), _WHY),
    _M("torchperf_side_runs_total", _C, "Runs beside a frame's own",
       _counted(**{why: f"counters.{why}s" for why in ("backup", "rehearsal", "probe")}), _WHY),
    _M("torchperf_late_results_total", _C, "Results that came after their frame was answered",
       _get("counters.late_results")),
    _M("torchperf_missed_observations_total", _C, "Frames that a worker could not observe, as its queue was full",
       _get("counters.missed_observations")),
    _M("torchperf_unrecorded_rows_total", _C, "Receipts and answers that these times leave out",
       _get("reading.unrecorded")),
    # times
    _M("torchperf_latency_seconds", _H, "Receipt to publish; a bound is the budget at configure", _get("tier_times"),
       _TIER),
    _M("torchperf_lateness_seconds", _H, "Time past the deadline, 0 for answers in time", _get("lateness")),
    _M("torchperf_step_seconds", _H, "Parts of a frame's time", _get("step_times"), ("stage", "step")),
    _M("torchperf_window_latency_seconds", _G, "Receipt to publish in the window",
       _quantiles("reading.latency.window"), _STATISTIC),
    _M("torchperf_window_age_seconds", _G, "Stamp to receipt in the window", _quantiles("reading.age"), _STATISTIC),
    _M("torchperf_interval_seconds", _G, "Mean time between receipts in the window", _ms("reading.interval_ms")),
    _M("torchperf_interval_jitter_seconds", _G, "Standard deviation of that time", _ms("reading.interval_jitter_ms")),
    _M("torchperf_latency_jitter_seconds", _G, "Mean difference of successive latencies in the window",
       _ms("reading.latency_jitter_ms")),
    _M("torchperf_window_miss_ratio", _G, "Share of frames in the window that were misses",
       _get("reading.latency.miss_ratio")),
    _M("torchperf_budget_seconds", _G, "Budget of a frame",
       lambda s: s.stage.config.scene_budget_ms(s.stage.scenes.active) / 1000),
    _M("torchperf_reserve_seconds", _G, "How long before the deadline an answer is made", _ms("stage.margin.ms")),
    # state
    _M("torchperf_health", _G, "1 for the state that the stage is in",
       lambda s: {state.word: state is s.health for state in Health}, _STATE),
    _M("torchperf_health_seconds_total", _C, "Time in each state since configure",
       lambda s: {state.word: seconds for state, seconds in s.reading.health_s.items()}, _STATE),
    _M("torchperf_tier_in_use", _G, "1 for the tier that frames get",
       lambda s: {tier: number == s.stage.ladder.tier for number, tier in enumerate(s.stage.config.tiers)}, _TIER),
    _M("torchperf_scene_in_use", _G, "1 for the scene that frames are answered for",
       lambda s: {one.name: number == s.stage.scenes.active for number, one in enumerate(s.stage.config.scenes)},
       ("stage", "scene")),
    _M("torchperf_scene_switches_total", _C, "Changes of the scene", _get("stage.scenes.switches")),
    _M("torchperf_workers_ready", _G, "Workers that can take frames",
       lambda s: sum(worker.usable for worker in s.pool.everyone)),
    _M("torchperf_worker_restarts_total", _C, "Workers replaced", _get("pool.restarts")),
    _M("torchperf_workers_unended_total", _C, "Workers' processes that SIGKILL did not end in time",
       _get("pool.unended")),
    # versions
    _M("torchperf_version_info", _G, "1 for the version that serves, and for the one beside it", _versions,
       ("stage", "version", "role")),
    _M("torchperf_version_pairs_total", _C, "Frames that a candidate had beside another version",
       lambda s: {(s.pairs.version, name): getattr(s.pairs.total, name) for name in _PAIRS} if s.pairs else {},
       ("stage", "version", "result")),
    _M("torchperf_version_difference_seconds", _G, "The candidate's steps less the base's, of the last 1024 frames",
       lambda s: {(s.pairs.version, f"p{share}"): s.pairs.quantile_ms(share / 100) / 1000
                  for share in (50, 99)} if s.pairs else {}, ("stage", "version", "statistic")),
    _M("torchperf_version_score", _G, "Mean of the adapter's own score of the candidate's outputs beside the base's",
       lambda s: {s.pairs.version: s.pairs.total.score} if s.pairs else {}, ("stage", "version")),
    _M("torchperf_device_info", _G, "1 for the device that the stage's models run on",
       lambda s: {s.pool.description.device: 1} if s.pool.description is not None else {}, ("stage", "device")),
    _M("torchperf_build_info", _G, "1, with versions",
       lambda _: {(__version__, _version("torch"), _ros_distro(), platform.python_version()): 1},
       ("version", "torch", "ros_distro", "python")),
    _M("torchperf_refused_scrapes_total", _C, "Scrapes without an answer: four went on", _get("refused"), ()),
    # emergency lane
    _M("torchperf_emergency_latched", _G, "1 while the emergency lane stops the vehicle",
       lambda node: node.lane.get("state") == "latched", ()),
    _M("torchperf_emergency_triggers_total", _C, "How often it did, since configure",
       lambda node: {kind: int(node.lane.get(f"triggers_{kind}", 0)) for kind in KINDS}, ("why",)),
    _M("torchperf_emergency_refused_total", _C, "Messages of its sensors that could not be used",
       lambda node: sum(int(count) for key, count in node.lane.items() if key.endswith(" refused")), ()),
    # memory
    _M("torchperf_worker_resident_bytes", _G,
       "Resident memory of a worker, without shared memory",
       lambda s: {str(worker.number): s.use.rss_by_pid[worker.pid] for worker in s.workers}, ("stage", "worker")),
    _M("torchperf_cuda_memory_bytes", _G, "Memory of the CUDA device, as the workers say",
       lambda node: {kind: node.use.told[kind] for kind in _CUDA_KINDS if kind in node.use.told}, ("kind",)),
    _M("torchperf_history_bytes", _G, "Histories that the adapters keep", lambda node: node.use.told.get("history", 0),
       ()),
    _M("torchperf_shared_memory_bytes", _G, "Shared memory that frames have touched", _get("use.shared"), ()),
    _M("torchperf_memory_used_ratio", _G, "Memory of the models, as a share of its limit", _get("used_share"), ()),
    _M("torchperf_memory_share_ratio", _G, "Share from which lower tiers run", _get("memory_share"), ()),
    _M("torchperf_memory_tight", _G, "1 while lower tiers run for lack of memory", _get("stage.memory.tight")),
    _M("torchperf_out_of_memory_total", _C, "Frames without enough memory",
       lambda s: s.pool.tally.out_of_memory(s.pool.everyone)),
    # tiers
    _M("torchperf_tier_engine", _G, "1 for what runs the tier",
       lambda s: {(tier["name"], tier["engine"], tier["package"][:_PACKAGE_DIGITS]): 1 for tier in s.tiers},
       ("stage", "tier", "engine", "package")),
    _M("torchperf_tier_graphs", _G, "Graphs that the tier was compiled into", _by_tier("graphs"), _TIER),
    _M("torchperf_tier_graph_breaks", _G, "Breaks between them", _by_tier("breaks"), _TIER),
    _M("torchperf_tier_compiler_cache_hits", _G, "Of its graphs, those that a cache held", _by_tier("cache_hits"),
       _TIER),
    _M("torchperf_tier_padding_ratio", _G, "Share of what the engine ran that was padding", _by_tier("waste"), _TIER),
    _M("torchperf_tier_recompiles_total", _C, "Frames that eager answered instead of compiling again",
       _by_tier("recompiles"), _TIER),
    _M("torchperf_tier_engine_errors_total", _C, "Frames in which the engine raised", _by_tier("engine_errors"), _TIER),
    _M("torchperf_tier_eager_answers_total", _C, "Frames that eager answered in the engine's place",
       _by_tier("eager_answers"), _TIER),
    _M("torchperf_tier_shape_hits_total", _C, "Frames of a prepared shape", _by_tier("hits"), _TIER),
    _M("torchperf_tier_shape_misses_total", _C, "Frames of another shape, answered in eager", _by_tier("misses"),
       _TIER),
)  # fmt: skip
"""What there is beside `process_*` of the node's process, which `prometheus_client` names."""


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
        """Take the node's stages, what asks for the values of its emergency lane's status, and for refused scrapes."""
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
        stages = {stage.config.name: _Scrape(self._config, use, stage, {}) for stage in self._stages}
        node = _Scrape(self._config, use, None, self._lane(), self._refused())
        return iter([spec.family(stages, node) for spec in METRICS])


_MOST_SCRAPES: Final = 4
_AFTER_ERROR_S: Final = 0.2
_SCRAPE_TIMEOUT_S: Final = 10.0  # Prometheus's own for the whole scrape


class _ScrapeHandler(WSGIRequestHandler):
    """Answers one client, who has to ask and to take the answer without long pauses."""

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

        Where this process has no descriptor left for it, it waits, and nobody spins meanwhile.
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
    """An HTTP server that answers `/metrics`."""

    def __init__(
        self, config: NodeConfig, stages: Iterable[Stage], lane: Callable[[], Values] = dict
    ) -> None:
        """Serve on `metrics_port` of `metrics_address`.

        Raises:
            OSError: the port is taken or not allowed, or the address is none of this machine's.
        """
        registry = CollectorRegistry()
        registry.register(StageCollector(config, list(stages), lane, lambda: self._server.refused))
        ProcessCollector(registry=registry)
        kind = _ScrapeServer6 if ":" in config.metrics_address else _ScrapeServer
        self._server = kind((config.metrics_address, config.metrics_port), _ScrapeHandler)
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
