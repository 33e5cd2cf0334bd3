"""What `/diagnostics` and `/perf/anomaly` say, as CDR bytes."""

from collections.abc import Iterable, Mapping

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import monotonic_ns
from torchperf_ros.api.messages import encode, header, message_class
from torchperf_ros.api.outcome import IN_TIME, Fallback, Health, Outcome
from torchperf_ros.observe.telemetry.fields import FIELDS, StageLook, kept_down
from torchperf_ros.observe.telemetry.latency_record import LatencyRecord
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.figures import StageStatistics
from torchperf_ros.stage.frame import Answer, Frame, Origin, StepTimes
from torchperf_ros.stage.stage import Stage

_ARRAY = "diagnostic_msgs/msg/DiagnosticArray"

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
    return bytes(encode(message_class(_ARRAY)(header=header(ros_now_ns, ""), status=built), _ARRAY))


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
    scene = f"scene {_scene(stage, stage.scenes.active)}" if len(stage.config.scenes) > 1 else ""
    if stage.scenes.active != stage.scenes.wanted:
        scene += f", {_scene(stage, stage.scenes.wanted)} is wanted"
    lost = (
        [] if stage.sync is None else [one.rule.topic for one in stage.sync.inputs.values() if one.is_lost]
    )
    inputs = f"without {', '.join(lost)}" if lost else ""
    too_many = stage.statistics.health.superseded.broken
    dropped = "" if too_many is None else too_many.words
    why = kept_down(stage) or (_not_yet_nominal(stage) if health is Health.DEGRADED and not dropped else "")
    parts = [f"tier {tier}", scene, inputs, stage.actions.words(monotonic_ns()), dropped, why, compiling]
    return f"{health.name}: " + ", ".join(filter(None, parts))


def _scene(stage: Stage, number: int) -> str:
    return stage.config.scenes[number].name


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
