"""What a node says about itself on its topics, folded into one state, for those who look at it from outside.

Nothing here waits, reads a clock or draws; times are arguments. Missing keys and unknown stages are
tolerated, so that a view can look at any version of the node. Messages may be rclpy's or those of
`rosbags`.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.stage.trend import theil_sen_slope

NODE_STATUS: Final = "node"
STATUS_PREFIX: Final = "perf: "
RECENT_FRAMES: Final = 4096
FAR_LATE_MS: Final = 5.0
# A node reports every second; what has missed three reports is not there, or cannot be heard.
SILENT_S: Final = 3.0
_EVENTS: Final = 200
_LONGEST_MS: Final = 1e9  # a stamp is further off only if it is nonsense
_MATCH_NS: Final = 8_000_000
_RATE_FRAMES: Final = 64
_AT_WORK: Final = ("idle", "busy")
_MEMORY_SAMPLES: Final = 600  # ten minutes
_LEAST_SAMPLES: Final = 60  # the memory that a start fills is no trend
_S_PER_MIN: Final = 60.0
_STEPS: Final = ("wait", "decode", "preprocess", "inference", "postprocess")
_ALERT: Final = "alert "
# Of events, by the level of a diagnostic status.
_KINDS: Final = ("ok", "warn", "error", "warn")


@dataclass(frozen=True)
class NodeEvent:
    """One line of the list of events."""

    at_s: float  # seconds since the listening began
    kind: str  # `ok`, `warn`, `error`, `sabotage` or `note`
    source: str  # a stage, `node`, or who else reports it
    text: str  # what happened


@dataclass(frozen=True)
class SeenFrame:
    """One answered frame, from `/perf/latency_stages`."""

    stamp_ns: int  # `header.stamp` of its trigger, as far as it can be computed from outside; 0 if unknown
    outcome: Outcome  # how it ended
    fallback: Fallback | None  # what was published instead of its result, None if nothing had to be
    total_ms: float  # receipt to publish
    budget_ms: float  # its budget
    lateness_ms: float  # how far past its deadline; negative: before it; NaN: an older node does not say
    published_ns: int = 0  # when it was answered; 0 if unknown
    steps_ms: tuple[float, ...] = ()  # what its steps took, in the order of `_STEPS`

    @property
    def answer(self) -> str:
        words = (
            self.outcome.word if self.fallback is None else f"{self.outcome.word} → {self.fallback.word}"
        )
        return words.replace("_", " ")


@dataclass
class StageState:
    """What is known about one stage.

    Attributes:
        worst_ms: largest lateness of all answers but those of a starting stage; negative: before the
            deadline.
    """

    name: str  # of the stage
    values: dict[str, str] = field(
        default_factory=dict
    )  # keys and values of its newest status on `/diagnostics`
    message: str = ""  # of that status: health, and why
    recent: deque[SeenFrame] = field(
        default_factory=lambda: deque(maxlen=RECENT_FRAMES)
    )  # its last answered frames
    records: int = 0  # answered frames seen, all of them
    worst_ms: float = -math.inf
    far_late: int = 0  # those of them that were answered later than `FAR_LATE_MS` after their deadline

    def add(self, record: SeenFrame) -> None:
        self.recent.append(record)
        self.records += 1
        if record.outcome is not Outcome.STARTING:
            self.worst_ms = max(self.worst_ms, record.lateness_ms)
            self.far_late += record.lateness_ms > FAR_LATE_MS

    def nearest(self, stamp_ns: int) -> SeenFrame | None:
        """The recent frame whose stamp is nearest to this one, None if none is within 8 ms."""
        near = min(self.recent, key=lambda record: abs(record.stamp_ns - stamp_ns), default=None)
        return near if near is not None and abs(near.stamp_ns - stamp_ns) <= _MATCH_NS else None

    def number(self, key: str) -> float:
        """A number from the diagnostics, NaN if it is unknown."""
        return number_of(self.values.get(key))

    def count(self, key: str) -> int | None:
        """A counter from the diagnostics, None if it is unknown."""
        return int(number) if math.isfinite(number := self.number(key)) else None

    @property
    def rate_hz(self) -> float:
        """Answers per second, over the last ones; NaN if unknown or if no input comes."""
        times = [record.published_ns for record in list(self.recent)[-_RATE_FRAMES:] if record.published_ns]
        moving = len(times) > 1 and self.health != "WAITING"
        return (
            (len(times) - 1) / (times[-1] - times[0]) * 1e9 if moving and times[-1] > times[0] else math.nan
        )

    @property
    def steps_ms(self) -> dict[str, float]:
        """What each step took in the median of the last frames that have a result of their own.

        Empty without any.
        """
        last = [frame for frame in list(self.recent)[-_RATE_FRAMES:] if frame.steps_ms]
        rows = [(*frame.steps_ms, frame.total_ms - sum(frame.steps_ms)) for frame in last]
        columns = zip(*(row for row in rows if math.isfinite(row[-1])), strict=True)
        return dict(zip((*_STEPS, "rest"), map(median, columns), strict=False))

    @property
    def health(self) -> str:
        """`NOMINAL` and so on, empty if unknown yet."""
        return self.values.get("health", "").upper()

    @property
    def tier(self) -> str:
        """Name of the tier in use, empty if unknown."""
        names = [name.strip() for name in self.values.get("tiers", "").split(",")]
        tier = self.values.get("tier", "")
        return names[int(tier)] if tier.isdigit() and int(tier) < len(names) and names[int(tier)] else tier

    @property
    def complete(self) -> bool:
        states = [
            value
            for key, value in self.values.items()
            if key.startswith("worker_") and key.endswith("_state")
        ]
        return bool(states) and all(state in _AT_WORK for state in states)

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
        """Started frames that came to no end.

        Received, and in none of the counters; None if these are unknown.
        """
        frames, answered, dropped = self.count("frames"), self.count("answered"), self.dropped
        if frames is None or answered is None or dropped is None:
            return None
        return frames - dropped - answered - self.unanswered


class NodeState:
    """What is known about a running node, from its first word on.

    Attributes:
        memory: time in s and MiB of the workers, the last ten minutes.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # for example `/perf`
        self.elapsed_s = 0.0  # since the listening began; events get this time
        self.stages: dict[str, StageState] = {}  # by name, in the order of the node's report
        self.node: dict[str, str] = {}  # keys and values of the node's own status
        self.events: deque[NodeEvent] = deque(maxlen=_EVENTS)  # the last ones, oldest first
        self.event_count = 0  # how many there were
        self.end_to_end_ms: deque[float] = deque(maxlen=300)  # the last values of `/perf/latency`
        self.memory: deque[tuple[float, float]] = deque(maxlen=_MEMORY_SAMPLES)
        self.memory_parts: dict[str, float] = {}  # the newest row of `/perf/memory_stats` by label, in MiB
        self.reports = 0  # how many messages of `/diagnostics` of the node came in
        self.others: set[str] = set()  # nodes that were heard instead, by their names
        self.heard_s = -math.inf  # when it reported last, -inf before
        self.restarts = 0  # how often another process took its name since the listening began
        self.alerts: list[
            NodeEvent
        ] = []  # what goes on now, by the node's own status; also for who joins late
        self._heard_pids: dict[str, float] = {}  # when each process of this name reported last
        self._warnings: set[str] = set()
        self._evidence: set[str] = set()
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
        return theil_sen_slope(times, values) * _S_PER_MIN

    def at(self, elapsed_s: float) -> None:
        """Let time pass; a silence that begins is an event."""
        self.elapsed_s = elapsed_s
        if self.silent and not self._silence_known:
            self.event("error", NODE_STATUS, f"no report for {SILENT_S:.0f} s: ended, hung, or cut off")
        self._silence_known = self.silent

    def event(self, kind: str, source: str, text: str) -> None:
        self.event_count += 1
        self.events.append(NodeEvent(self.elapsed_s, kind, source, " ".join(text.split())))

    # std_msgs/Float64MultiArray
    def on_frame(self, message: Any, published_ns: int) -> None:  # noqa: ANN401
        """Fold in a message of `/perf/latency_stages`; one of an unknown stage or outcome is passed over.

        `published_ns` is the ROS time at which the node published it.
        """
        values = by_label(message)
        index, outcome, fallback = (_whole(values.get(key)) for key in ("stage", "outcome", "fallback"))
        if (
            index is None
            or not 0 <= index < len(self.stages)
            or outcome is None
            or not 0 <= outcome < len(Outcome)
        ):
            return
        total_ms, age_ms = values.get("total_ms", math.nan), values.get("age_ms", math.nan)
        record = SeenFrame(
            stamp_ns=(
                published_ns - round((total_ms + age_ms) * 1e6)
                if abs(total_ms + age_ms) < _LONGEST_MS
                else 0
            ),
            outcome=Outcome(outcome),
            fallback=Fallback(fallback) if fallback is not None and 0 <= fallback < len(Fallback) else None,
            total_ms=total_ms,
            budget_ms=values.get("budget_ms", math.nan),
            published_ns=published_ns,
            steps_ms=tuple(values.get(f"{step}_ms", math.nan) for step in _STEPS),
            lateness_ms=values.get("lateness_ms", math.nan),
        )
        stage = list(self.stages.values())[index]
        far_late = stage.far_late
        stage.add(record)
        if stage.far_late > far_late:
            self.event(
                "error", stage.name, f"{record.answer}, {record.lateness_ms:.1f} ms after its deadline"
            )

    def on_diagnostics(self, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Fold in a message of `/diagnostics`, which names the stages; other nodes are noted by name."""
        perf = [status for status in message.status if status.name.startswith(STATUS_PREFIX)]
        ours = [status for status in perf if status.hardware_id in {self.name, ""}]
        self.others |= {status.hardware_id for status in perf} - {self.name, ""}
        if not ours:
            return
        statuses = {status.name.removeprefix(STATUS_PREFIX): status for status in ours}
        values = {
            name: {pair.key: pair.value for pair in status.values} for name, status in statuses.items()
        }
        if self._is_another(values.get(NODE_STATUS, {}).get("pid", "")):
            return
        if self.silent:
            self.event("ok", NODE_STATUS, f"is back after {self.silence_s:.0f} s")
        self.heard_s = self.elapsed_s
        self.reports += 1
        for name, status in statuses.items():
            if name == NODE_STATUS:
                self.node = values[name]
                self.alerts = [
                    self._alert(*pair) for pair in self.node.items() if pair[0].startswith(_ALERT)
                ]
            elif "health" in values[name]:
                stage = self.stages.setdefault(name, StageState(name))
                stage.values, stage.message = values[name], status.message
            else:
                self._warn(status)

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
            text = lines[
                -1 if lines[0].startswith("Traceback") else 0
            ]  # the error itself; there is one line for it
            self.event(_kind(status), stage, f"{what}: {text}" if what else text)
        evidence = {
            value.value for status in message.status for value in status.values if value.key == "evidence"
        }
        for path in evidence - self._evidence:
            self.event("note", NODE_STATUS, f"evidence: {path}")
        self._evidence |= evidence

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
        self._heard_pids = {known: self._heard_pids[known] for known in before} | (
            {pid: self.elapsed_s} if pid else {}
        )
        if not shown or pid in {shown, ""}:
            return False
        if {shown, pid} <= set(before):
            if (together := " and ".join(self.pids)) not in self._warnings:
                self._warnings.add(together)
                self.restarts -= 1  # what looked like one was the second process
                text = f"two processes report under this name, pid {together}: give each node a name"
                self.event("error", NODE_STATUS, f"{text} or a namespace of its own")
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

    def _warn(self, status: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticStatus
        """Report once what stands on `/diagnostics` beside the stages, an input of the wrong type for example."""
        if (kind := _kind(status)) != "ok" and status.message not in self._warnings:
            self._warnings.add(status.message)
            self.event(kind, NODE_STATUS, status.message)


def number_of(text: str | None) -> float:
    """The number of a status's value; NaN where there is none."""
    try:
        return float(text or math.nan)
    except ValueError:
        return math.nan


def by_label(message: Any) -> dict[str, float]:  # noqa: ANN401 - std_msgs/Float64MultiArray
    return {dim.label: float(value) for dim, value in zip(message.layout.dim, message.data, strict=False)}


def _kind(status: Any) -> str:  # noqa: ANN401 - diagnostic_msgs/DiagnosticStatus
    level = status.level[0] if isinstance(status.level, bytes) else int(status.level)
    return _KINDS[min(level, len(_KINDS) - 1)]


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value)
