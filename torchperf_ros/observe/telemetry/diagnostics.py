"""What `/diagnostics` and `/perf/anomaly` say, as CDR bytes."""

import math
from collections.abc import Iterable, Mapping

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import monotonic_ns
from torchperf_ros.api.messages import encode, header, message_class
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict, Health, Outcome
from torchperf_ros.observe.telemetry.latency_record import LatencyRecord
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.figures import Spans, StageReading, StageStatistics
from torchperf_ros.stage.frame import Answer, Frame, Origin, StepTimes
from torchperf_ros.stage.ladder import Forecast
from torchperf_ros.stage.stage import Stage

_ARRAY = "diagnostic_msgs/msg/DiagnosticArray"
_MIB = 1 << 20

LEVELS = dict.fromkeys(Health, Level.WARN) | {Health.NOMINAL: Level.OK, Health.SAFE_STOP: Level.ERROR}
"""Unknown is never OK: a stage that loads or has no input is a warning."""


def diagnostic_bytes(statuses: Iterable[Alert], hardware_id: str, ros_now_ns: int) -> bytes:
    """CDR of a `diagnostic_msgs/DiagnosticArray` with one status each."""
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
    return bytes(encode(message_class(_ARRAY)(header=header(ros_now_ns, ""), status=built), _ARRAY))


def warm_up(config: StageConfig) -> None:
    """Do on made-up frames, and for nobody, what the first frames and the first report after them will do.

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
        values = _timing(statistics.figures.read(monotonic_ns(), Health.NOMINAL))
        diagnostic_bytes([Alert(Level.OK, "warm-up", "", values), *([finding] if finding else [])], "", 0)


def _encodable(text: str) -> str:
    """Without the lone surrogates that file names in error messages can hold and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def stage_status(stage: Stage, health: Health, rss_bytes: Mapping[int, int]) -> Alert:
    """Status of a stage of this health.

    Tier, latencies, counters, workers; `rss_bytes`: memory by process id.
    """
    statistics, config, pool = stage.statistics.counters, stage.config, stage.pool
    reading = stage.statistics.figures.read(monotonic_ns(), health)
    tiers = pool.tally.rows(pool.everyone)
    values = {
        "health": health.name,
        "progress": pool.progress,
        "tier": config.tiers[stage.ladder.tier],
        "tiers": ",".join(config.tiers),
        "scene": _scene(stage, stage.scenes.active),
        "scene_wanted": _scene(stage, stage.scenes.wanted),
        "scenes": ",".join(scene.name for scene in config.scenes),
        "scenes_ready": ",".join(_scene(stage, number) for number in sorted(stage.scenes.ready)),
        "scene_switches": str(stage.scenes.switches),
        "scene_unknown": stage.scenes.unknown,
        "actions": stage.actions.words(monotonic_ns()),
        "actions_taken": str(stage.actions.taken),
        "output": config.output,
        "ladder": _kept_down(stage),
        "hedging": stage.hedge_rule.words if config.backup == "standby" else "",
        "hedges": str(stage.hedge_rule.hedges),
        "hedges_lost": str(stage.hedge_rule.lost_hedges),
        "retrials": str(stage.hedge_rule.retrials),
        "retrials_slow": str(stage.hedge_rule.slow_retrials),
        "engine": tiers[stage.ladder.tier]["engine"] if tiers else config.engine,
        "device": pool.description.device if pool.description else "",
        **_timing(reading),
        "budget_ms": _number(config.scene_budget_ms(stage.scenes.active)),
        "budget_now_ms": _number(stage.budget_ms),
        "reserve_ms": _number(stage.margin.ms),
        "miss_ratio": _number(statistics.miss_ratio(stage.mailbox.superseded)),
        **{name: str(getattr(statistics, name)) for name in ("frames", "answered", "unanswered")},
        **{outcome.word: str(statistics.outcomes[outcome]) for outcome in Outcome},
        **{f"fallback_{fallback.word}": str(statistics.fallbacks[fallback]) for fallback in Fallback},
        **(_guard(stage) if stage.guard is not None else {}),
        **_synchronised(stage),
        "superseded": str(stage.mailbox.superseded),
        "dropped": str(stage.mailbox.superseded),
        "stale": str(statistics.stale),
        "restarts": str(pool.restarts),
        "unended": str(pool.unended),
        "unended_pids": ", ".join(map(str, pool.unended_pids)),
        "memory_tight": str(stage.memory.tight),
        "out_of_memory": str(pool.tally.out_of_memory(pool.everyone)),
        "compiling": pool.rolling_update.compiling,
        **{name: str(getattr(statistics, name)) for name in _COUNTERS},
    }
    for name, forecast in _forecasts(stage).items():
        values[f"tier_{name}_predicted_ms"] = _number(forecast.ms)
        values[f"tier_{name}_predicted_from"] = forecast.source
    for tier in tiers:
        for key, value in tier.items():
            if key != "name":
                values[f"tier_{tier['name']}_{key}"] = (
                    _number(value) if isinstance(value, float) else str(value)
                )
    for number, worker in enumerate(pool.workers):
        values[f"worker_{number}_pid"] = "" if worker is None else str(worker.pid)
        values[f"worker_{number}_state"] = pool.state(number)
        rss = None if worker is None else rss_bytes.get(worker.pid)
        values[f"worker_{number}_rss_mib"] = "" if rss is None else _number(rss / _MIB)
    values["last_reason"] = statistics.last_reason
    values["last_error"] = pool.last_error
    return Alert(LEVELS[health], f"perf: {config.name}", _summary(stage, health), values)


def _timing(reading: StageReading) -> dict[str, str]:
    """Latency, jitter and misses; without a word on the span of time, over the window."""
    values = _spans("", reading.latency)
    values |= {f"window_{name}": _number(value) for name, value in reading.latency.window.items()}
    for tier, spans in reading.tiers.items():
        if tier:
            values |= _spans(f"tier_{tier}_", spans)
    for name, quantiles in (("lateness", reading.lateness), ("age", reading.age), ("wait", reading.wait)):
        values |= {f"{name}_{key}": _number(value) for key, value in quantiles.items()}
    return values | {
        "interval_ms": _number(reading.interval_ms),
        "interval_jitter_ms": _number(reading.interval_jitter_ms),
        "latency_jitter_ms": _number(reading.latency_jitter_ms),
        **{f"health_{state.word}_s": _number(seconds) for state, seconds in reading.health_s.items()},
        "unrecorded": str(reading.unrecorded),
    }


def _spans(prefix: str, spans: Spans) -> dict[str, str]:
    values = {f"{prefix}window_miss_ratio": _number(spans.miss_ratio)}
    for span, quantiles in (("", spans.window), ("run_", spans.run), ("active_", spans.active)):
        values |= {f"{prefix}{span}{name}": _number(value) for name, value in quantiles.items()}
    return values


def _guard(stage: Stage) -> dict[str, str]:
    """What the guard made of outputs, and what it cannot use of what it is given."""
    counters, guard = stage.statistics.counters, stage.guard
    values = {f"check_{verdict.word}": str(counters.checks[verdict]) for verdict in GuardVerdict}
    values |= {"check_shadow_refusals": str(counters.shadow_refusals), "last_check": counters.last_check}
    return values | {f"guard_{key}": str(value) for key, value in (guard.refused if guard else {}).items()}


def _synchronised(stage: Stage) -> dict[str, str]:
    """Of each synchronised input how often it had a message that fitted, waits, skews, and why it was missing."""
    values: dict[str, str] = {}
    for one in () if stage.sync is None else stage.sync.inputs.values():
        numbers = {name: str(getattr(one, name)) for name in ("matched", "missing", "waited", "unstamped")}
        times = {name: _number(getattr(one, name)) for name in ("waited_ms", "skew_p50_ms", "skew_max_ms")}
        values |= {f"input_{one.rule.topic}_{name}": value for name, value in (numbers | times).items()}
        values[f"input_{one.rule.topic}_why"] = one.why_missing
    return values


_COUNTERS = (
    "missed_deadline",
    "late_results",
    "rehearsals",
    "probes",
    "backups",
    "ignored",
    "missed_observations",
    "refused_inputs",
    "internal_errors",
    "zero_stamps",
    "future_stamps",
    "backward_stamps",
    "repeated_stamps",
)


def _summary(stage: Stage, health: Health) -> str:
    """One line that says why the stage is in this state."""
    if health is Health.STARTING:
        return f"STARTING: {stage.pool.progress}"
    if health is Health.SAFE_STOP:
        return f"SAFE_STOP: {_why_stopped(stage)}"
    if health is Health.WAITING:
        return "WAITING: no input" if stage.statistics.counters.frames == 0 else "WAITING: input stopped"
    tier, compiling = stage.config.tiers[stage.ladder.tier], stage.pool.rolling_update.compiling
    scene = f"scene {_scene(stage, stage.scenes.active)}" if len(stage.config.scenes) > 1 else ""
    if stage.scenes.active != stage.scenes.wanted:
        scene += f", {_scene(stage, stage.scenes.wanted)} is wanted"
    lost = (
        [] if stage.sync is None else [one.rule.topic for one in stage.sync.inputs.values() if one.is_lost]
    )
    inputs = f"without {', '.join(lost)}" if lost else ""
    too_many = stage.statistics.health.superseded.broken
    dropped = "" if too_many is None else too_many.words
    why = _kept_down(stage) or (
        _not_yet_nominal(stage) if health is Health.DEGRADED and not dropped else ""
    )
    parts = [f"tier {tier}", scene, inputs, stage.actions.words(monotonic_ns()), dropped, why, compiling]
    return f"{health.name}: " + ", ".join(filter(None, parts))


def _scene(stage: Stage, number: int) -> str:
    return stage.config.scenes[number].name


def _forecasts(stage: Stage) -> dict[str, Forecast]:
    """By tier, in their order.

    Of one in several scenes that of the scene in use, which learns from its runs.
    """
    ladders = [*stage.ladders, stage.ladder]
    found = {
        tier: one for ladder in ladders for tier, one in zip(ladder.tiers, ladder.forecasts, strict=True)
    }
    return {stage.config.tiers[tier]: found[tier] for tier in sorted(found)}


def _kept_down(stage: Stage) -> str:
    return stage.ladder.explain(stage.config.tiers, monotonic_ns())


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


def _number(value: float) -> str:
    return "nan" if math.isnan(value) else f"{value:.3f}"
