"""What `/diagnostics` and `/perf/anomaly` say, as CDR bytes."""

import math
from collections.abc import Iterable, Mapping

from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.clock import NS_PER_S, monotonic_ns
from torchperf_ros.core.message_types import encode, message_class
from torchperf_ros.core.outcome import Fallback, Health, Outcome
from torchperf_ros.core.stage_figures import Spans, StageReading
from torchperf_ros.supervise.stage_actor import StageActor

_ARRAY = "diagnostic_msgs/msg/DiagnosticArray"
_MIB = 1 << 20

LEVELS = {
    Health.STARTING: Level.WARN,
    Health.WAITING: Level.WARN,
    Health.NOMINAL: Level.OK,
    Health.DEGRADED: Level.WARN,
    Health.SAFE_STOP: Level.ERROR,
}
"""Unknown is never OK: a stage that loads or has no input is a warning."""


def diagnostic_bytes(statuses: Iterable[Anomaly], hardware_id: str, ros_now_ns: int) -> bytes:
    """CDR of a `diagnostic_msgs/DiagnosticArray` with one status each."""
    status_class = message_class("diagnostic_msgs/msg/DiagnosticStatus")
    pair = message_class("diagnostic_msgs/msg/KeyValue")
    header = message_class("std_msgs/msg/Header")
    seconds, nanoseconds = divmod(ros_now_ns, NS_PER_S)
    stamp = message_class("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
    built = [
        status_class(
            level=int(status.level), name=status.name, message=_encodable(status.message), hardware_id=hardware_id,
            values=[pair(key=key, value=_encodable(value)) for key, value in status.values.items()],
        )
        for status in statuses
    ]  # fmt: skip
    return bytes(encode(message_class(_ARRAY)(header=header(stamp=stamp, frame_id=""), status=built), _ARRAY))


def _encodable(text: str) -> str:
    """Without the lone surrogates that file names in error messages can hold and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def stage_status(stage: StageActor, health: Health, rss_bytes: Mapping[int, int]) -> Anomaly:
    """Status of a stage: health, tier, latencies, counters, workers.

    Args:
        stage: the stage.
        health: its state now.
        rss_bytes: resident memory by process id.
    """
    statistics, config, crew = stage.journal.statistics, stage.config, stage.crew
    reading = stage.journal.figures.read(monotonic_ns(), health)
    tiers = crew.tally.rows(crew.everyone)
    values = {
        "health": health.name,
        "progress": crew.progress,
        "tier": config.tiers[stage.ladder.level],
        "tiers": ",".join(config.tiers),
        "engine": tiers[stage.ladder.level]["engine"] if tiers else config.engine,
        "device": crew.description.device if crew.description else "",
        **_timing(reading),
        "budget_ms": _number(config.budget_ms),
        "reserve_ms": _number(stage.reserve.ms),
        "miss_ratio": _number(statistics.miss_ratio),
        "frames": str(statistics.frames),
        "answered": str(statistics.answered),
        **{outcome.word: str(statistics.outcomes[outcome]) for outcome in Outcome},
        **{f"fallback_{fallback.word}": str(statistics.fallbacks[fallback]) for fallback in Fallback},
        "superseded": str(stage.mailbox.superseded),
        "stale": str(stage.mailbox.stale),
        "restarts": str(crew.restarts),
        "memory_tight": str(stage.memory.tight),
        "out_of_memory": str(crew.tally.out_of_memory(crew.everyone)),
        "compiling": crew.succession.compiling,
        **{name: str(getattr(statistics, name)) for name in _COUNTERS},
    }
    for tier in tiers:
        for key, value in tier.items():
            if key != "name":
                values[f"tier_{tier['name']}_{key}"] = _number(value) if isinstance(value, float) else str(value)
    for number, worker in enumerate(crew.workers):
        values[f"worker_{number}_pid"] = "" if worker is None else str(worker.pid)
        values[f"worker_{number}_state"] = crew.state(number)
        rss = None if worker is None else rss_bytes.get(worker.pid)
        values[f"worker_{number}_rss_mib"] = "" if rss is None else _number(rss / _MIB)
    values["last_reason"] = statistics.last_reason
    values["last_error"] = crew.last_error
    return Anomaly(LEVELS[health], f"perf: {config.name}", _summary(stage, health), values)


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
        **{f"health_{state.name.lower()}_s": _number(seconds) for state, seconds in reading.health_s.items()},
        "unrecorded": str(reading.unrecorded),
    }


def _spans(prefix: str, spans: Spans) -> dict[str, str]:
    values = {f"{prefix}window_miss_ratio": _number(spans.miss_ratio)}
    for span, quantiles in (("", spans.window), ("run_", spans.run), ("active_", spans.active)):
        values |= {f"{prefix}{span}{name}": _number(value) for name, value in quantiles.items()}
    return values


_COUNTERS = (
    "missed_deadline", "late_results", "rehearsals", "probes", "backups", "ignored", "missed_observations",
    "refused_inputs", "internal_errors", "zero_stamps", "future_stamps", "backward_stamps", "repeated_stamps",
)  # fmt: skip


def _summary(stage: StageActor, health: Health) -> str:
    """One line that says why the stage is in this state."""
    if health is Health.STARTING:
        return f"STARTING: {stage.crew.progress}"
    if health is Health.SAFE_STOP:
        last = stage.crew.last_error.splitlines()
        why = last[0] if last and not stage.crew.ready else f"{stage.journal.health.misses_in_a_row} misses in a row"
        return f"SAFE_STOP: {why}"
    if health is Health.WAITING:
        return "WAITING: no input" if stage.journal.statistics.frames == 0 else "WAITING: input stopped"
    compiling = stage.crew.succession.compiling
    return f"{health.name}: tier {stage.config.tiers[stage.ladder.level]}" + (f", {compiling}" if compiling else "")


def _number(value: float) -> str:
    return "nan" if math.isnan(value) else f"{value:.3f}"
