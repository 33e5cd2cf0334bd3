"""A node's messages about itself, folded into one state, for views from outside.

Nothing here waits, reads a clock or draws; times are arguments. Missing keys and unknown stages are
tolerated, so that a view can look at any version of the node. Messages may be rclpy's or those of
`rosbags`.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np

from torchperf_ros.api.alert import Level
from torchperf_ros.api.messages import stamp_ns_of
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.telemetry.diagnostics import typed
from torchperf_ros.stage.figures import STEPS
from torchperf_ros.stage.trend import theil_sen_slope

NODE_STATUS: Final = "node"
STATUS_PREFIX: Final = "perf: "
RECENT_FRAMES: Final = 4096
FAR_LATE_MS: Final = 5.0
# A node reports every second; what has missed three reports is not there, or cannot be heard.
SILENT_S: Final = 3.0
_LONGEST_MS: Final = 1e9  # a stamp is further off only if it is nonsense
_MATCH_NS: Final = 8_000_000
_RATE_FRAMES: Final = 64
_MEMORY_SAMPLES: Final = 600  # ten minutes
_LEAST_SAMPLES: Final = 60  # the memory that a start fills is no trend
_ALERT: Final = "alert "
# Of events, by the level of a diagnostic status.
_KINDS: Final = ("ok", "warn", "error", "warn")


@dataclass(frozen=True)
class NodeEvent:
    """One line of the list of events: `at_s` after the listening began."""

    at_s: float
    kind: str  # `ok`, `warn`, `error`, `sabotage` or `note`
    source: str  # a stage, `node`, or another program that reports it
    text: str


@dataclass(frozen=True)
class SeenFrame:
    """One answered frame, from `/perf/latency_stages`.

    Attributes:
        stamp_ns: of its trigger, as far as it can be computed from outside; 0 if unknown.
        fallback: what was published instead of its result, None if nothing had to be.
        lateness_ms: how far past its deadline; negative: before it; NaN: an older node does not say.
        published_ns: when it was answered; 0 if unknown.
        steps_ms: how long its steps took, in the order of `STEPS`.
    """

    stamp_ns: int
    outcome: Outcome
    fallback: Fallback | None
    total_ms: float
    budget_ms: float
    lateness_ms: float
    published_ns: int = 0
    steps_ms: tuple[float, ...] = ()

    @property
    def answer(self) -> str:
        word = self.outcome.word if self.fallback is None else f"{self.outcome.word} → {self.fallback.word}"
        return word.replace("_", " ")


@dataclass
class StageState:
    """The newest status of a stage on `/diagnostics`, typed, and its last answered frames.

    Attributes:
        message: of that status: health, and why.
        records: answered frames seen, all of them.
        worst_ms: largest lateness of all answers but those of a starting stage; negative: before the
            deadline.
        far_late: those of them that were answered later than `FAR_LATE_MS` after their deadline.
        late: the last of them that were answered after it at all.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    recent: deque[SeenFrame] = field(default_factory=lambda: deque(maxlen=RECENT_FRAMES))
    records: int = 0
    worst_ms: float = -math.inf
    far_late: int = 0
    late: deque[SeenFrame] = field(default_factory=lambda: deque(maxlen=RECENT_FRAMES))

    def add(self, record: SeenFrame) -> None:
        self.recent.append(record)
        self.records += 1
        if record.outcome is not Outcome.STARTING:
            self.worst_ms = max(self.worst_ms, record.lateness_ms)
            self.far_late += record.lateness_ms > FAR_LATE_MS
            self.late.extend([record] * (record.lateness_ms > 0))

    def nearest(self, stamp_ns: int) -> SeenFrame | None:
        """The recent frame whose stamp is nearest to this one, None if none is within 8 ms."""
        near = min(self.recent, key=lambda record: abs(record.stamp_ns - stamp_ns), default=None)
        return near if near is not None and abs(near.stamp_ns - stamp_ns) <= _MATCH_NS else None

    def number(self, key: str) -> float:
        """A number of the status, NaN if it is unknown."""
        value = self.values.get(key)
        return value if isinstance(value, float) else math.nan

    def count(self, key: str) -> int | None:
        """A counter of the status, None if it is unknown."""
        number = self.number(key)
        return int(number) if math.isfinite(number) else None

    @property
    def rate_hz(self) -> float:
        """Answers per second, over the last ones; NaN if unknown or if no input comes."""
        times = [record.published_ns for record in list(self.recent)[-_RATE_FRAMES:] if record.published_ns]
        if len(times) < 2 or times[-1] <= times[0] or self.health == "WAITING":  # noqa: PLR2004
            return math.nan
        return (len(times) - 1) / (times[-1] - times[0]) * 1e9

    @property
    def steps_ms(self) -> dict[str, float]:
        """How long each step took in the median of the last frames that have a result of their own.

        Empty without any.
        """
        last = [frame for frame in list(self.recent)[-_RATE_FRAMES:] if frame.steps_ms]
        rows = [(*frame.steps_ms, frame.total_ms - sum(frame.steps_ms)) for frame in last]
        columns = zip(*(row for row in rows if math.isfinite(row[-1])), strict=True)
        return dict(zip((*STEPS, "rest"), map(median, columns), strict=False))

    @property
    def health(self) -> str:
        """`NOMINAL` and so on, empty if unknown yet."""
        return str(self.values.get("health", "")).upper()

    @property
    def tier(self) -> str:
        """Name of the tier in use, empty if unknown; of an older node its number."""
        return str(self.values.get("tier", ""))

    @property
    def complete(self) -> bool:
        states = [value for key, value in self.values.items() if key[:7] == "worker_" and "_state" in key]
        return bool(states) and all(state in {"idle", "busy"} for state in states)

    @property
    def unanswered(self) -> int:
        return self.count("unanswered") or 0

    @property
    def ended(self) -> int:
        """Frames that came to an end, with or without an answer."""
        return (self.count("answered") or 0) + self.unanswered

    @property
    def on_time_share(self) -> float:
        """Share of the frames that came whose own result was in time.

        NaN if unknown. Superseded ones were not.
        """
        on_time, came = self.count("on_time"), self.ended + (self.dropped or 0)
        return (on_time + (self.count("partial") or 0)) / came if came and on_time is not None else math.nan

    @property
    def dropped(self) -> int | None:
        """Frames without any answer.

        None if unknown. Older nodes dropped stale ones, too, and do not say `dropped`.
        """
        if (dropped := self.count("dropped")) is not None:
            return dropped
        superseded, stale = self.count("superseded"), self.count("stale")
        return None if superseded is None or stale is None else superseded + stale

    @property
    def lost(self) -> int | None:
        """Started frames that came to no end; None if the counters are unknown."""
        frames, answered, dropped = self.count("frames"), self.count("answered"), self.dropped
        if frames is None or answered is None or dropped is None:
            return None
        return frames - dropped - answered - self.unanswered


class NodeState:
    """A running node, from its first message on.

    Attributes:
        elapsed_s: since the listening began; events get this time.
        stages: by name, in the order of the node's report.
        node: keys and values of the node's own status.
        alerts: what goes on now, by the node's own status; also for who joins late.
        events: the last ones, oldest first; `event_count` is of all.
        end_to_end_ms: the last values of `/perf/latency`.
        memory: time in s and MiB of the workers, the last ten minutes.
        memory_parts: the newest row of `/perf/memory_stats` by label, in MiB.
        reports: messages of `/diagnostics` of the node that came in; `heard_s`: when the last one did;
            `reported_ns`: its stamp.
        others: nodes that were heard instead, by their names.
        restarts: how often another process took its name since the listening began.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # for example `/perf`
        self.elapsed_s, self.heard_s = 0.0, -math.inf
        self.stages: dict[str, StageState] = {}
        self.node: dict[str, str] = {}
        self.alerts: list[NodeEvent] = []
        self.events: deque[NodeEvent] = deque(maxlen=200)
        self.event_count = self.reports = self.restarts = self.reported_ns = 0
        self.end_to_end_ms: deque[float] = deque(maxlen=300)
        self.memory: deque[tuple[float, float]] = deque(maxlen=_MEMORY_SAMPLES)
        self.memory_parts: dict[str, float] = {}
        self.others: set[str] = set()
        self._heard_pids: dict[str, float] = {}  # when each process of this name reported last
        self._known: set[str] = set()  # warnings and evidence that are an event once
        self._silence_known = False

    @property
    def heard(self) -> bool:
        return math.isfinite(self.heard_s)

    @property
    def silence_s(self) -> float:
        """Since its last report; infinite before the first."""
        return self.elapsed_s - self.heard_s

    @property
    def silent(self) -> bool:
        return self.heard and self.silence_s > SILENT_S

    @property
    def memory_trend(self) -> float:
        """Slope of the workers' memory in MiB per minute, by Theil and Sen; NaN with too few samples."""
        if len(self.memory) < _LEAST_SAMPLES or self.memory[0][0] == self.memory[-1][0]:
            return math.nan
        times, values = np.array(self.memory).T
        return theil_sen_slope(times, values) * 60.0

    def at(self, elapsed_s: float) -> None:
        """Let time pass; a silence that begins is an event."""
        self.elapsed_s = elapsed_s
        if self.silent and not self._silence_known:
            self.event("error", NODE_STATUS, f"no report for {SILENT_S:.0f} s: ended, hung, or cut off")
        self._silence_known = self.silent

    def event(self, kind: str, source: str, text: str) -> None:
        self.event_count += 1
        self.events.append(NodeEvent(self.elapsed_s, kind, source, " ".join(text.split())))

    def _event_once(self, kind: str, text: str) -> bool:
        is_new = text not in self._known
        self._known.add(text)
        if is_new:
            self.event(kind, NODE_STATUS, text)
        return is_new

    def on_frame(self, message: Any, published_ns: int) -> None:  # noqa: ANN401 - std_msgs/Float64MultiArray
        """Fold in a message of `/perf/latency_stages`; one of an unknown stage or outcome is passed over.

        `published_ns` is the ROS time at which the node published it.
        """
        values = by_label(message)
        index, outcome, fallback = (whole(values.get(key)) for key in ("stage", "outcome", "fallback"))
        if not 0 <= index < len(self.stages) or not 0 <= outcome < len(Outcome):
            return
        record = SeenFrame(
            stamp_before(values, published_ns),
            Outcome(outcome),
            Fallback(fallback) if 0 <= fallback < len(Fallback) else None,
            values.get("total_ms", math.nan),
            values.get("budget_ms", math.nan),
            values.get("lateness_ms", math.nan),
            published_ns,
            tuple(values.get(f"{step}_ms", math.nan) for step in STEPS),
        )
        stage = list(self.stages.values())[index]
        far_late = stage.far_late
        stage.add(record)
        if stage.far_late > far_late:
            text = f"{record.answer}, {record.lateness_ms:.1f} ms after its deadline"
            self.event("error", stage.name, text)

    def on_diagnostics(self, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Fold in a message of `/diagnostics`, which names the stages; other nodes are noted by name."""
        perf = [status for status in message.status if status.name.startswith(STATUS_PREFIX)]
        ours = {
            status.name.removeprefix(STATUS_PREFIX): status
            for status in perf
            if status.hardware_id in {self.name, ""}
        }
        self.others |= {status.hardware_id for status in perf} - {self.name, ""}
        values = {name: {pair.key: pair.value for pair in status.values} for name, status in ours.items()}
        if not ours or self._is_another(values.get(NODE_STATUS, {}).get("pid", "")):
            return
        if self.silent:
            self.event("ok", NODE_STATUS, f"is back after {self.silence_s:.0f} s")
        self.heard_s, self.reported_ns = self.elapsed_s, stamp_ns_of(message.header)
        self.reports += 1
        for name, status in ours.items():
            if name == NODE_STATUS:
                self.node = values[name]
                self.alerts = [
                    self._alert(key, text) for key, text in self.node.items() if key.startswith(_ALERT)
                ]
            elif "health" in values[name]:
                stage = self.stages.setdefault(name, StageState(name))
                stage.values, stage.message = typed(values[name]), status.message
            elif (kind := _KINDS[level_of(status)]) != "ok":  # an input of the wrong type for example
                self._event_once(kind, status.message)

    def on_memory(self, mib: float) -> None:
        """Fold in a value of `/perf/memory`."""
        if math.isfinite(mib):
            self.memory.append((self.elapsed_s, mib))

    def on_memory_stats(self, message: Any) -> None:  # noqa: ANN401 - std_msgs/Float64MultiArray
        """Fold in a message of `/perf/memory_stats`."""
        self.memory_parts = by_label(message)

    def on_anomaly(self, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Fold in a message of `/perf/anomaly`."""
        for status in message.status:
            stage, _, what = status.name.partition(": ")
            lines = status.message.strip().splitlines() or [""]
            # The error itself; there is one line for it.
            text = lines[-1 if lines[0].startswith("Traceback") else 0]
            self.event(_KINDS[level_of(status)], stage, f"{what}: {text}" if what else text)
        for value in (value for status in message.status for value in status.values):
            if value.key == "evidence":
                self._event_once("note", f"evidence: {value.value}")

    @property
    def pids(self) -> list[str]:
        """The processes that report under this name now.

        More than one is a mistake, and the first is shown.
        """
        return sorted(
            pid for pid, heard_s in self._heard_pids.items() if self.elapsed_s - heard_s <= SILENT_S
        )

    def _is_another(self, pid: str) -> bool:
        """Whether a report comes from a second process under the name.

        A first one that took its place is a restart.
        """
        shown, before = self.node.get("pid"), self.pids
        self._heard_pids = {known: self._heard_pids[known] for known in before}
        if pid:
            self._heard_pids[pid] = self.elapsed_s
        if not shown or pid in {shown, ""}:
            return False
        if {shown, pid} <= set(before):
            together = f"two processes report under this name, pid {' and '.join(self.pids)}"
            # What looked like a restart was the second process.
            text = f"{together}: give each node a name or a namespace of its own"
            self.restarts -= self._event_once("error", text)
            return True
        self.restarts += 1
        self.event("error", NODE_STATUS, f"restarted: pid {shown} is now {pid}")
        for old in (self.stages, self.memory, self.end_to_end_ms):
            old.clear()
        return False

    def _alert(self, key: str, value: str) -> NodeEvent:
        level, _, text = value.partition(" ")
        source, _, what = key.removeprefix(_ALERT).partition(": ")
        return NodeEvent(self.elapsed_s, level.lower(), source, f"{what}: {text}")


def by_label(message: Any) -> dict[str, float]:  # noqa: ANN401 - std_msgs/Float64MultiArray
    return {dim.label: float(value) for dim, value in zip(message.layout.dim, message.data, strict=False)}


def whole(value: float | None) -> int:
    """An index of a row; -1 where it is unknown."""
    return -1 if value is None or not math.isfinite(value) else round(value)


def stamp_before(values: Mapping[str, float], published_ns: int) -> int:
    """The stamp of a row's frame by when its answer was published; 0 if unknown, or nonsense."""
    before_ms = values.get("total_ms", math.nan) + values.get("age_ms", math.nan)
    return published_ns - round(before_ms * 1e6) if abs(before_ms) < _LONGEST_MS else 0


def level_of(status: Any) -> Level:  # noqa: ANN401 - diagnostic_msgs/DiagnosticStatus
    """A byte of rclpy's, or a number of a decoded message; what no level is counts as stale."""
    level = status.level[0] if isinstance(status.level, bytes) else int(status.level)
    return Level(min(level, Level.STALE))
