"""What there is to say of a stage and of the node: one table for `/diagnostics`, Prometheus and `top`.

A field stands here once, with its name in each of them, its unit, how it is read and what it means. The
renderers are `stage_status`, for `/diagnostics`, and `metrics.py`; `node_state.py` reads what the first of
them wrote.
"""

import functools
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from torchperf_ros import __version__
from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import monotonic_ns
from torchperf_ros.api.messages import encode, header, message_class
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict, Health, Outcome
from torchperf_ros.observe.telemetry.memory import MemoryUse
from torchperf_ros.observe.telemetry.rows import LatencyRecord
from torchperf_ros.safety.emergency import KINDS
from torchperf_ros.settings.build_options import version_of
from torchperf_ros.settings.config import BASE, NodeConfig, StageConfig
from torchperf_ros.stage.figures import Spans, StageStatistics
from torchperf_ros.stage.frame import Answer, Frame, Origin, StepTimes
from torchperf_ros.stage.ladder import Forecast
from torchperf_ros.stage.limits import MEMORY_SHARE
from torchperf_ros.stage.stage import Stage

# The values of a status on `/diagnostics`, by key.
Values = Mapping[str, str]

HISTOGRAM: Final = "histogram"
WORDS: Final = "words"
_PACKAGE_DIGITS: Final = 12
_CUDA_KINDS: Final = ("allocated", "reserved", "free", "total")
_version = functools.cache(version_of)  # it reads files


class StageLook:
    """A stage at one moment, as the fields read it."""

    def __init__(self, stage: Stage, rss_by_pid: Mapping[int, int], health: Health | None = None) -> None:
        """Take the stage and its workers' memory; `health`: its state, if that is known already."""
        now_ns, statistics = monotonic_ns(), stage.statistics
        self.stage, self.config, self.pool, self.counters = (
            stage,
            stage.config,
            stage.pool,
            statistics.counters,
        )
        self.health = statistics.health.state(now_ns) if health is None else health
        self.figures = statistics.figures
        self.reading = statistics.figures.read(now_ns, self.health)
        self.inputs = (
            {} if stage.sync is None else {one.rule.topic: one for one in stage.sync.inputs.values()}
        )
        self.tiers = {tier["name"]: tier for tier in stage.pool.tally.rows(stage.pool.everyone)}
        self.pairs = None if stage.shadow is None else stage.shadow.figures
        self.rss_by_pid = rss_by_pid

    @functools.cached_property
    def histograms(self) -> tuple[Any, Any, Any]:
        """Of latency by tier, of lateness, and of each step."""
        return self.figures.histograms()

    @property
    def tier(self) -> str:
        return self.config.tiers[self.stage.ladder.tier]

    def scene(self, number: int) -> str:
        return self.config.scenes[number].name


class NodeLook:
    def __init__(self, config: NodeConfig, use: MemoryUse, lane: Values, refused: int) -> None:
        """Take memory in use, the emergency lane's status, and how many scrapes were refused."""
        self.use, self.lane, self.refused = use, lane, refused
        self.used_share = use.used_share(config.memory_limit_mib)


@dataclass(frozen=True)
class Field:
    """One thing to say.

    Attributes:
        key: of its value on `/diagnostics`, "" where it has none. Of a field with labels the key has a `{}`
            for each, or stands by the label's value.
        read: its value; of a field with labels a dict of values by these labels' values. Of a histogram
            cumulative counts by upper bound, and the sum of all samples.
        name: as Prometheus queries it, counters with `_total`; "" where it has none.
        text: what it means, in one line.
        labels: in Prometheus beside the stage; each has few values, known when the node is configured.
        unit: of what `read` gives: `ms` becomes seconds in Prometheus, a `histogram` is in seconds; `words` are
            no number, or not always.
    """

    key: str | Mapping[str, str]
    read: Callable[[Any], Any]
    name: str = ""
    text: str = ""
    labels: tuple[str, ...] = ()
    unit: str = ""

    @property
    def kind(self) -> str:
        return (
            HISTOGRAM if self.unit == HISTOGRAM else "counter" if self.name.endswith("_total") else "gauge"
        )

    def by_label(self, look: StageLook | NodeLook) -> dict[tuple[str, ...], Any]:
        """Its values by those of its labels; of none by ()."""
        found = self.read(look)
        if not isinstance(found, dict):
            return {(): found}
        return {(label,) if isinstance(label, str) else label: value for label, value in found.items()}

    def keys(self, look: StageLook) -> dict[str, Any]:
        key = self.key
        if not key:
            return {}
        found = self.by_label(look).items()
        return {
            key.format(*label) if isinstance(key, str) else key[label[0]]: value for label, value in found
        }


def _of_words(
    kind: type[Outcome] | type[Fallback] | type[GuardVerdict], counts: str
) -> Callable[[StageLook], Any]:
    read = attrgetter(counts)
    return lambda look: {one.word: read(look)[one] for one in kind}


def _quantiles(attribute: str) -> Callable[[StageLook], dict[str, float]]:
    read = attrgetter(attribute)
    return lambda look: {name.removesuffix("_ms"): value_ms for name, value_ms in read(look).items()}


def _by_tier(fact: str) -> Callable[[StageLook], dict[str, Any]]:
    """As the workers say; nothing before one is ready."""
    return lambda look: {name: tier[fact] for name, tier in look.tiers.items()}


def _of_inputs(
    words: tuple[str, ...], attribute: str = "{}"
) -> Callable[[StageLook], dict[tuple[str, str], Any]]:
    return lambda look: {
        (topic, word): getattr(one, attribute.format(word))
        for topic, one in look.inputs.items()
        for word in words
    }


def _by_input(attribute: str) -> Callable[[StageLook], dict[str, Any]]:
    read = attrgetter(attribute)
    return lambda look: {topic: read(one) for topic, one in look.inputs.items()}


def _spans_of_tiers(
    read: Callable[[Spans], Any],
) -> Callable[[StageLook], dict[tuple[str, str], float]]:
    return lambda look: {
        (tier, name): value
        for tier, spans in look.reading.tiers.items()
        if tier
        for name, value in read(spans).items()
    }


def _forecasts(look: StageLook) -> dict[str, Forecast]:
    """By tier, in their order.

    Of one in several scenes that of the scene in use, which learns from its runs.
    """
    ladders = [*look.stage.ladders, look.stage.ladder]
    found = {
        tier: one for ladder in ladders for tier, one in zip(ladder.tiers, ladder.forecasts, strict=True)
    }
    return {look.config.tiers[tier]: found[tier] for tier in sorted(found)}


def kept_down(stage: Stage) -> str:
    """Why frames do not get the best tier; empty if they do."""
    return stage.ladder.explain(stage.config.tiers, monotonic_ns())


def _workers(look: StageLook) -> dict[tuple[str, str], Any]:
    pids = {number: "" if one is None else one.pid for number, one in enumerate(look.pool.workers)}
    states = {number: look.pool.state(number) for number in pids}
    found: dict[str, dict[int, Any]] = {"pid": pids, "state": states}
    return {(str(number), name): values[number] for number in pids for name, values in found.items()}


def _workers_mib(look: StageLook) -> dict[str, Any]:
    sizes = [None if one is None else look.rss_by_pid.get(one.pid) for one in look.pool.workers]
    return {str(number): "" if size is None else size / (1 << 20) for number, size in enumerate(sizes)}


def _facts(look: StageLook) -> dict[tuple[str, str], Any]:
    return {
        (name, fact): value
        for name, tier in look.tiers.items()
        for fact, value in tier.items()
        if fact != "name"
    }


def _engines(look: StageLook) -> dict[tuple[str, ...], int]:
    return {
        (name, tier["engine"], tier["package"][:_PACKAGE_DIGITS]): 1 for name, tier in look.tiers.items()
    }


def _pairs(look: StageLook) -> dict[tuple[str, str], int]:
    pairs = look.pairs
    return {} if pairs is None else {(pairs.version, name): getattr(pairs.total, name) for name in _PAIRS}


def _differences(look: StageLook) -> dict[tuple[str, str], float]:
    pairs = look.pairs
    return {} if pairs is None else {(pairs.version, f"p{n}"): pairs.quantile_ms(n / 100) for n in (50, 99)}


def _versions(look: StageLook) -> dict[tuple[str, str], int]:
    """The version that serves, and the other; nothing where there never was another."""
    stage, shadow = look.stage, look.stage.shadow
    if shadow is None and stage.version == BASE:
        return {}
    beside = {} if shadow is None else {(shadow.version, "shadow"): 1}
    return {(stage.version, "serves"): 1, **beside}


_PAIRS: Final = (
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
_FITTED: Final = ("matched", "missing")
_DROPPED: Final = {
    "superseded": "stage.mailbox.superseded",
    "ignored": "counters.ignored",
    "refused_input": "counters.refused_inputs",
    "internal_error": "counters.internal_errors",
}
_STAMPS: Final = ("zero", "future", "backward", "repeated")
_BESIDE: Final = ("backup", "rehearsal", "probe")
_get = attrgetter
_F = Field
# Of a stage.
FIELDS: Final = (
    # state, in words
    _F("health", _get("health.name"), unit=WORDS),
    _F("progress", _get("pool.progress"), unit=WORDS),
    _F("tier", _get("tier"), unit=WORDS),
    _F("stream", lambda s: {"": s.config.stream} if s.config.stream else {}, unit=WORDS),
    _F("batch", lambda s: {"": s.stage.batch_words} if s.config.stream else {}, unit=WORDS),
    _F("tiers", lambda s: ",".join(s.config.tiers), unit=WORDS),
    _F("scene", lambda s: s.scene(s.stage.scenes.active), unit=WORDS),
    _F("scene_wanted", lambda s: s.scene(s.stage.scenes.wanted), unit=WORDS),
    _F("scenes", lambda s: ",".join(scene.name for scene in s.config.scenes), unit=WORDS),
    _F("scenes_ready", lambda s: ",".join(s.scene(number) for number in sorted(s.stage.scenes.ready)), unit=WORDS),
    _F("scene_unknown", _get("stage.scenes.unknown"), unit=WORDS),
    _F("actions", lambda s: s.stage.actions.words(monotonic_ns()), unit=WORDS),
    _F("actions_taken", _get("stage.actions.taken")),
    _F("output", _get("config.output"), unit=WORDS),
    _F("ladder", lambda s: kept_down(s.stage), unit=WORDS),
    _F("hedging", lambda s: s.stage.hedge_rule.words if s.config.backup == "standby" else "", unit=WORDS),
    _F("hedges", _get("stage.hedge_rule.hedges")),
    _F("hedges_lost", _get("stage.hedge_rule.lost_hedges")),
    _F("retrials", _get("stage.hedge_rule.retrials")),
    _F("retrials_slow", _get("stage.hedge_rule.slow_retrials")),
    _F("engine", lambda s: s.tiers[s.tier]["engine"] if s.tiers else s.config.engine, unit=WORDS),
    _F("device", lambda s: s.pool.description.device if s.pool.description else "", unit=WORDS),
    _F("compiling", _get("pool.rolling_update.compiling"), unit=WORDS),
    # frames
    _F("frames", _get("counters.frames"), "torchperf_frames_total", "Frames received"),
    _F("answered", _get("counters.answered")),
    _F({one.word: one.word for one in Outcome}, _of_words(Outcome, "counters.outcomes"), "torchperf_answers_total",
       "Frames answered, unanswered ones included", ("outcome",)),
    _F("unanswered", _get("counters.unanswered"), "torchperf_unanswered_total",
       "Frames for which there was nothing to publish"),
    _F("fallback_{}", _of_words(Fallback, "counters.fallbacks"), "torchperf_fallbacks_total",
       "Frames by what was published instead", ("fallback",)),
    _F("check_{}", lambda s: _of_words(GuardVerdict, "counters.checks")(s) if s.stage.guard else {},
       "torchperf_guard_verdicts_total", "Outputs by what the guard made of them; without a guard none",
       ("verdict",)),
    _F("check_shadow_refusals", _get("counters.shadow_refusals"), "torchperf_guard_shadow_refusals_total",
       "Outputs that a check in shadow would have refused"),
    _F("last_check", _get("counters.last_check"), unit=WORDS),
    _F("guard_{}", lambda s: dict(s.stage.guard.refused) if s.stage.guard else {}),
    _F("miss_ratio", lambda s: s.counters.miss_ratio(s.stage.mailbox.superseded)),
    _F("dropped", _get("stage.mailbox.superseded")),
    _F({why: why + "s" * (why[-1] in "rt") for why in _DROPPED},
       lambda s: {why: attrgetter(name)(s) for why, name in _DROPPED.items()}, "torchperf_dropped_total",
       "Messages that were not answered", ("why",)),
    _F("input_{}_{}", _of_inputs(_FITTED), "torchperf_input_frames_total",
       "Frames by whether a synchronised input had a message that fits", ("input", "result")),
    _F("input_{}_waited", _by_input("waited"), "torchperf_input_waits_total",
       "Frames that waited for a synchronised input", ("input",)),
    _F("input_{}_waited_ms", _by_input("waited_ms"), "torchperf_input_wait_seconds_total",
       "How long they did, together", ("input",), "ms"),
    _F("input_{}_skew_{}_ms", _of_inputs(("p50", "max"), "skew_{}_ms"), "torchperf_input_skew_seconds",
       "Distance of its last 128 messages that fitted from the stamp wanted", ("input", "statistic"),
       "ms"),
    _F("input_{}_unstamped", _by_input("unstamped")),
    _F("input_{}_why", _by_input("why_missing"), unit=WORDS),
    _F("missed_deadline", _get("counters.missed_deadline"), "torchperf_missed_deadlines_total",
       "Answers that left after their deadline"),
    _F("stale", _get("counters.stale"), "torchperf_stale_total",
       "Frames whose deadline had passed when their turn came"),
    _F("{}_stamps", lambda s: {why: getattr(s.counters, f"{why}_stamps") for why in _STAMPS},
       "torchperf_odd_stamps_total", "Stamps that cannot be right", ("why",)),
    _F("batched", lambda s: {"": s.counters.batched} if s.config.stream else {}),
    _F({why: f"{why}s" for why in _BESIDE}, lambda s: {why: getattr(s.counters, f"{why}s") for why in _BESIDE},
       "torchperf_side_runs_total", "Runs beside a frame's own", ("why",)),
    _F("late_results", _get("counters.late_results"), "torchperf_late_results_total",
       "Results that came after their frame was answered"),
    _F("missed_observations", _get("counters.missed_observations"), "torchperf_missed_observations_total",
       "Frames that a worker could not observe, as its queue was full"),
    _F("unrecorded", _get("reading.unrecorded"), "torchperf_unrecorded_rows_total",
       "Receipts and answers that these times leave out"),
    # times
    _F("", lambda s: s.histograms[0], "torchperf_latency_seconds",
       "Receipt to publish; a bound is the budget at configure", ("tier",), HISTOGRAM),
    _F("", lambda s: s.histograms[1], "torchperf_lateness_seconds",
       "Time past the deadline, 0 for answers in time", (), HISTOGRAM),
    _F("", lambda s: s.histograms[2], "torchperf_step_seconds", "Parts of a frame's time", ("step",),
       HISTOGRAM),
    _F("{}_ms", _quantiles("reading.latency.window")),
    _F("window_{}_ms", _quantiles("reading.latency.window"), "torchperf_window_latency_seconds",
       "Receipt to publish in the window", ("statistic",), "ms"),
    _F("run_{}_ms", _quantiles("reading.latency.run")),
    _F("active_{}_ms", _quantiles("reading.latency.active")),
    _F("tier_{}_{}", _spans_of_tiers(lambda spans: spans.window), unit=WORDS),
    _F("tier_{}_run_{}", _spans_of_tiers(lambda spans: spans.run)),
    _F("tier_{}_active_{}", _spans_of_tiers(lambda spans: spans.active)),
    _F("tier_{}_{}", _spans_of_tiers(lambda spans: {"window_miss_ratio": spans.miss_ratio}), unit=WORDS),
    _F("lateness_{}_ms", _quantiles("reading.lateness")),
    _F("age_{}_ms", _quantiles("reading.age"), "torchperf_window_age_seconds",
       "Stamp to receipt in the window", ("statistic",), "ms"),
    _F("wait_{}_ms", _quantiles("reading.wait")),
    _F("interval_ms", _get("reading.interval_ms"), "torchperf_interval_seconds",
       "Mean time between receipts in the window", unit="ms"),
    _F("interval_jitter_ms", _get("reading.interval_jitter_ms"), "torchperf_interval_jitter_seconds",
       "Standard deviation of that time", unit="ms"),
    _F("latency_jitter_ms", _get("reading.latency_jitter_ms"), "torchperf_latency_jitter_seconds",
       "Mean difference of successive latencies in the window", unit="ms"),
    _F("window_miss_ratio", _get("reading.latency.miss_ratio"), "torchperf_window_miss_ratio",
       "Share of frames in the window that were misses"),
    _F("budget_ms", lambda s: s.config.scene_budget_ms(s.stage.scenes.active), "torchperf_budget_seconds",
       "Budget of a frame", unit="ms"),
    _F("budget_now_ms", _get("stage.budget_ms")),
    _F("reserve_ms", _get("stage.margin.ms"), "torchperf_reserve_seconds",
       "How long before the deadline an answer is made", unit="ms"),
    # state
    _F("", lambda s: {state.word: state is s.health for state in Health}, "torchperf_health",
       "1 for the state that the stage is in", ("state",)),
    _F("health_{}_s", lambda s: {state.word: seconds for state, seconds in s.reading.health_s.items()},
       "torchperf_health_seconds_total", "Time in each state since configure", ("state",)),
    _F("", lambda s: {tier: tier == s.tier for tier in s.config.tiers}, "torchperf_tier_in_use",
       "1 for the tier that frames get", ("tier",)),
    _F("",
       lambda s: {one.name: number == s.stage.scenes.active for number, one in enumerate(s.config.scenes)},
       "torchperf_scene_in_use", "1 for the scene that frames are answered for", ("scene",)),
    _F("scene_switches", _get("stage.scenes.switches"), "torchperf_scene_switches_total",
       "Changes of the scene"),
    _F("", lambda s: sum(worker.usable for worker in s.pool.everyone), "torchperf_workers_ready",
       "Workers that can take frames"),
    _F("restarts", _get("pool.restarts"), "torchperf_worker_restarts_total", "Workers replaced"),
    _F("unended", _get("pool.unended"), "torchperf_workers_unended_total",
       "Workers' processes that SIGKILL did not end in time"),
    _F("unended_pids", lambda s: ", ".join(map(str, s.pool.unended_pids)), unit=WORDS),
    # versions
    _F("", _versions, "torchperf_version_info", "1 for the version that serves, and for the one beside it",
       ("version", "role")),
    _F("", _pairs, "torchperf_version_pairs_total", "Frames that a candidate had beside another version",
       ("version", "result")),
    _F("", _differences, "torchperf_version_difference_seconds",
       "The candidate's steps less the base's, of the last 1024 frames", ("version", "statistic"), "ms"),
    _F("", lambda s: {s.pairs.version: s.pairs.total.score} if s.pairs else {}, "torchperf_version_score",
       "Mean of the adapter's own score of the candidate's outputs beside the base's", ("version",)),
    _F("", lambda s: {s.pool.description.device: 1} if s.pool.description is not None else {},
       "torchperf_device_info", "1 for the device that the stage's models run on", ("device",)),
    # memory
    _F("", lambda look: {str(one.number): look.rss_by_pid[one.pid]
                         for one in look.pool.everyone if one.pid in look.rss_by_pid},
       "torchperf_worker_resident_bytes",
       "Resident memory of a worker, without shared memory", ("worker",)),
    _F("memory_tight", _get("stage.memory.tight"), "torchperf_memory_tight",
       "1 while lower tiers run for lack of memory"),
    _F("out_of_memory", lambda s: s.pool.tally.out_of_memory(s.pool.everyone)
                                  + len(s.pool.rolling_update.builder.lacked),
       "torchperf_out_of_memory_total", "Frames and captures without enough memory"),
    # tiers
    _F("tier_{}_predicted_ms", lambda s: {tier: one.ms for tier, one in _forecasts(s).items()}),
    _F("tier_{}_predicted_from", lambda s: {tier: one.source for tier, one in _forecasts(s).items()}, unit=WORDS),
    _F("tier_{}_{}", _facts, unit=WORDS),
    _F("", _engines, "torchperf_tier_engine", "1 for what runs the tier", ("tier", "engine", "package")),
    _F("tier_{}_graphs", _by_tier("graphs"), "torchperf_tier_graphs",
       "Graphs that the tier was compiled into", ("tier",)),
    _F("tier_{}_breaks", _by_tier("breaks"), "torchperf_tier_graph_breaks", "Breaks between them",
       ("tier",)),
    _F("tier_{}_cache_hits", _by_tier("cache_hits"), "torchperf_tier_compiler_cache_hits",
       "Of its graphs, those that a cache held", ("tier",)),
    _F("tier_{}_waste", _by_tier("waste"), "torchperf_tier_padding_ratio",
       "Share of what the engine ran that was padding", ("tier",)),
    _F("tier_{}_recompiles", _by_tier("recompiles"), "torchperf_tier_recompiles_total",
       "Frames that eager answered instead of compiling again", ("tier",)),
    _F("tier_{}_engine_errors", _by_tier("engine_errors"), "torchperf_tier_engine_errors_total",
       "Frames in which the engine raised", ("tier",)),
    _F("tier_{}_eager_answers", _by_tier("eager_answers"), "torchperf_tier_eager_answers_total",
       "Frames that eager answered in the engine's place", ("tier",)),
    _F("tier_{}_hits", _by_tier("hits"), "torchperf_tier_shape_hits_total", "Frames of a prepared shape",
       ("tier",)),
    _F("tier_{}_misses", _by_tier("misses"), "torchperf_tier_shape_misses_total",
       "Frames of another shape, answered in eager", ("tier",)),
    # workers, and what went wrong last
    _F("worker_{}_{}", _workers, unit=WORDS),
    _F("worker_{}_rss_mib", _workers_mib),
    _F("last_reason", _get("counters.last_reason"), unit=WORDS),
    _F("last_error", _get("pool.last_error"), unit=WORDS),
)  # fmt: skip

# Of the node, for Prometheus; beside `process_*` of its process, which `prometheus_client` names.
NODE_FIELDS: Final = (
    _F("", # of ROS the distribution that is sourced; without one, the version of the wheels' rclpy
       lambda _: {(__version__, _version("torch"),
                   os.environ.get("ROS_DISTRO") or f"rclpy {_version('ros-rclpy')}".strip(),
                   platform.python_version()): 1},
       "torchperf_build_info", "1, with versions", ("version", "torch", "ros_distro", "python")),
    _F("", _get("refused"), "torchperf_refused_scrapes_total", "Scrapes without an answer: four went on"),
    # emergency lane
    _F("", lambda node: node.lane.get("state") == "latched", "torchperf_emergency_latched",
       "1 while the emergency lane stops the vehicle"),
    _F("", lambda node: {kind: int(node.lane.get(f"triggers_{kind}", 0)) for kind in KINDS},
       "torchperf_emergency_triggers_total", "How often it did, since configure", ("why",)),
    _F("", lambda node: sum(int(count) for key, count in node.lane.items() if key.endswith(" refused")),
       "torchperf_emergency_refused_total", "Messages of its sensors that could not be used"),
    # memory
    _F("", lambda node: {kind: node.use.by_workers[kind] for kind in _CUDA_KINDS if kind in node.use.by_workers},
       "torchperf_cuda_memory_bytes", "Memory of the CUDA device, as the workers say", ("kind",)),
    _F("", lambda node: node.use.by_workers.get("history", 0), "torchperf_history_bytes",
       "Histories that the adapters keep"),
    _F("", _get("use.shared"), "torchperf_shared_memory_bytes", "Shared memory that frames have touched"),
    _F("", _get("used_share"), "torchperf_memory_used_ratio",
       "Memory of the models, as a share of its limit"),
    _F("", lambda _: MEMORY_SHARE, "torchperf_memory_share_ratio", "Share from which lower tiers run"),
)  # fmt: skip

# Those that Prometheus gets.
METRICS: Final = (*(field for field in FIELDS if field.name), *NODE_FIELDS)

_NUMBERS: Final = re.compile(
    "|".join(
        re.escape(key).replace(r"\{\}", ".+")
        for field in FIELDS
        if field.key and field.unit != WORDS
        for key in ([field.key] if isinstance(field.key, str) else field.key.values())
    )
)


def typed(values: Values) -> dict[str, Any]:
    """A status of a stage as its fields' types: numbers as floats, all else as text.

    What stands for no number, or is of no field, as of another version of the node, stays text.
    """
    return {key: _number(text) if _NUMBERS.fullmatch(key) else text for key, text in values.items()}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


DIAGNOSTICS_TYPE = "diagnostic_msgs/msg/DiagnosticArray"

# Unknown is never OK: a stage that loads or has no input is a warning.
LEVELS = dict.fromkeys(Health, Level.WARN) | {Health.NOMINAL: Level.OK, Health.SAFE_STOP: Level.ERROR}


def diagnostic_bytes(statuses: Iterable[Alert], hardware_id: str, ros_now_ns: int) -> bytes:
    status_class = message_class("diagnostic_msgs/msg/DiagnosticStatus")
    pair = message_class("diagnostic_msgs/msg/KeyValue")
    built = [
        status_class(
            level=int(status.level),
            name=status.name,
            message=_encodable(status.message),
            hardware_id=hardware_id,
            values=[pair(key=key, value=_encodable(value)) for key, value in status.values.items()],
        )
        for status in statuses
    ]
    return bytes(
        encode(
            message_class(DIAGNOSTICS_TYPE)(header=header(ros_now_ns, ""), status=built), DIAGNOSTICS_TYPE
        )
    )


def warm_up(config: StageConfig) -> None:
    """Run on made-up frames what the first frames and the first report after them will run.

    The first of each generates code and imports modules, 20 to 50 ms in which it holds the interpreter
    again and again; a frame's deadline would pass meanwhile.
    """
    statistics, record = StageStatistics(config), LatencyRecord(0)
    for outcome in Outcome:
        now_ns = monotonic_ns()
        frame = Frame(0, None, now_ns, 1.0, now_ns, now_ns, Origin(now_ns, 1.0))
        fallback = None if outcome in IN_TIME else Fallback.NONE
        steps = StepTimes(1.0, 1.0, 1.0, 1.0)
        answer = Answer(frame, outcome, fallback, "warm-up", 0, 1.0, 1.0, 1.0, -1.0, now_ns, steps)
        statistics.received(frame, stamped=True)
        finding = statistics.answered(answer)
        record.encode(answer)
        statistics.figures.read(monotonic_ns(), Health.NOMINAL)
        values = {"number": f"{1.0:.3f}"}
        diagnostic_bytes([Alert(Level.OK, "warm-up", "", values), *([finding] if finding else [])], "", 0)


def _encodable(text: str) -> str:
    """Without the lone surrogates that file names in error messages can hold and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def stage_status(stage: Stage, health: Health, rss_bytes: Mapping[int, int]) -> Alert:
    values = status_values(StageLook(stage, rss_bytes, health))
    return Alert(LEVELS[health], f"perf: {stage.config.name}", _summary(stage, health), values)


def status_values(look: StageLook) -> dict[str, str]:
    return {
        key: f"{value:.3f}" if isinstance(value, float) else str(value)
        for field in FIELDS
        for key, value in field.keys(look).items()
    }


def _summary(stage: Stage, health: Health) -> str:
    if health is Health.STARTING:
        return f"STARTING: {stage.pool.progress}"
    if health is Health.SAFE_STOP:
        return f"SAFE_STOP: {_why_stopped(stage)}"
    if health is Health.WAITING:
        return "WAITING: no input" if stage.statistics.counters.frames == 0 else "WAITING: input stopped"
    tier, compiling = stage.config.tiers[stage.ladder.tier], stage.pool.rolling_update.compiling
    scenes, known = stage.scenes, stage.config.scenes
    scene = f"scene {known[scenes.active].name}" if len(known) > 1 else ""
    if scenes.active != scenes.wanted:
        scene += f", {known[scenes.wanted].name} is wanted"
    lost = (
        [] if stage.sync is None else [one.rule.topic for one in stage.sync.inputs.values() if one.is_lost]
    )
    inputs = f"without {', '.join(lost)}" if lost else ""
    too_many = stage.statistics.health.superseded.broken
    dropped = "" if too_many is None else too_many.words
    why = kept_down(stage) or (_not_yet_nominal(stage) if health is Health.DEGRADED and not dropped else "")
    parts = [f"tier {tier}", scene, inputs, stage.actions.words(monotonic_ns()), dropped, why, compiling]
    return f"{health.name}: " + ", ".join(filter(None, parts))


def _not_yet_nominal(stage: Stage) -> str:
    health, reason = stage.statistics.health, stage.statistics.counters.last_reason.partition("\n")[0]
    since = f" since {reason}" if reason else ""
    return f"{health.healthy_in_a_row} of {health.limits.recover_frames} frames on time in a row{since}"


def _why_stopped(stage: Stage) -> str:
    """What a sustained failure is about.

    Dead workers and what is done about them, misses, or what is left of it.
    """
    pool, health = stage.pool, stage.statistics.health
    if not pool.ready and pool.last_error:
        return f"{pool.last_error.splitlines()[0]}; {pool.progress}"
    if health.misses_in_a_row:
        reason = stage.statistics.counters.last_reason.partition("\n")[0]
        return f"{health.misses_in_a_row} misses in a row, the last one of {reason}"
    return (
        f"over after {health.limits.recover_frames} frames on time in a row, {health.healthy_in_a_row}"
        " so far"
    )
