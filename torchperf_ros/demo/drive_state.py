"""What is known about a running drive: the node's messages and the saboteurs' journals, folded into one state.

Nothing here waits, reads a clock or draws; times are handed in. Missing keys and unknown stages are tolerated, so that
the view can look at any version of the node.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.demo.stage_state import FrameRecord, StageState

_EVENTS: Final = 200
_LONGEST_MS: Final = 1e9  # a stamp is further off only if it is nonsense
_NODE: Final = "node"
_PREFIX: Final = "perf: "


@dataclass(frozen=True)
class Injection:
    """One line of a saboteur's journal, and the frame that it hit."""

    stage: str
    kind: str
    stamp_ns: int
    pid: int
    record: FrameRecord | None = None

    @property
    def answer(self) -> str:
        """How the frame was answered, in words."""
        return "not seen" if self.record is None else self.record.answer


@dataclass(frozen=True)
class Event:
    """One line of the list of events.

    Attributes:
        at_s: seconds since the start of the drive.
        kind: `ok`, `warn`, `error`, `sabotage` or `note`.
        source: a stage, `node` or `player`.
        text: what happened.
    """

    at_s: float
    kind: str
    source: str
    text: str


class DriveState:
    """Everything that the view and the verdict are made of.

    Attributes:
        title: what is driven.
        seconds: how long it is to last.
        phase: `starting`, `driving`, `ending` or `ended`.
        elapsed_s: of the drive.
        stages: by name, in the order of the node.
        node: keys and values of the node's own status.
        events: the last ones, oldest first.
        events_told: how many there were.
        injections: what was sabotaged.
        player: what the player said at its end, empty before.
        player_ready: whether the player can start.
        end_to_end_ms: the last values of `/perf/latency`.
        memory_mib: the last value of `/perf/memory`, NaN before.
        diagnostics: how many messages of `/diagnostics` of the node came in.
        others_share: of the processor, that other programs took, 0 to 1; NaN if unknown.
    """

    def __init__(self, stages: Iterable[str], title: str, seconds: float) -> None:
        """Know nothing yet about these stages."""
        self.title = title
        self.seconds = seconds
        self.phase = "starting"
        self.elapsed_s = 0.0
        self.stages = {name: StageState(name) for name in stages}
        self.node: dict[str, str] = {}
        self.events: deque[Event] = deque(maxlen=_EVENTS)
        self.events_told = 0
        self.injections: list[Injection] = []
        self.player: dict[str, Any] = {}
        self.player_ready = False
        self.end_to_end_ms: deque[float] = deque(maxlen=300)
        self.memory_mib = math.nan
        self.diagnostics = 0
        self.others_share = math.nan

    def on_frame(self, message: Any, published_ns: int) -> None:  # noqa: ANN401 - std_msgs/Float64MultiArray
        """Fold in a message of `/perf/latency_stages`.

        Args:
            message: the message.
            published_ns: ROS time at which the node published it.
        """
        values = {dim.label: value for dim, value in zip(message.layout.dim, message.data, strict=False)}
        index = _whole(values.get("stage"))
        names = list(self.stages)
        if index is None or not 0 <= index < len(names):
            return
        outcome, fallback = _whole(values.get("outcome")), _whole(values.get("fallback"))
        if outcome is None or not 0 <= outcome < len(Outcome):
            return
        total_ms, age_ms = values.get("total_ms", math.nan), values.get("age_ms", math.nan)
        before_ms = total_ms + age_ms
        record = FrameRecord(
            stamp_ns=published_ns - round(before_ms * 1e6) if abs(before_ms) < _LONGEST_MS else 0,
            outcome=Outcome(outcome),
            fallback=None if fallback is None or not 0 <= fallback < len(Fallback) else Fallback(fallback),
            tier=-1 if (tier := _whole(values.get("tier"))) is None else tier,
            total_ms=total_ms,
            budget_ms=values.get("budget_ms", math.nan),
        )
        stage = self.stages[names[index]]
        far_late = stage.far_late
        stage.add(record)
        if stage.far_late > far_late:
            self.event("error", stage.name, f"{record.answer}, {record.lateness_ms:.1f} ms after its deadline")

    def on_diagnostics(self, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Fold in a message of `/diagnostics`; those of other nodes are passed over."""
        ours = [status for status in message.status if status.name.startswith(_PREFIX)]
        self.diagnostics += bool(ours)
        for status in ours:
            values = {pair.key: pair.value for pair in status.values}
            name = status.name.removeprefix(_PREFIX)
            if name == _NODE:
                self.node = values
            elif name in self.stages:
                self.stages[name].values = values

    def on_anomaly(self, message: Any) -> None:  # noqa: ANN401 - diagnostic_msgs/DiagnosticArray
        """Fold in a message of `/perf/anomaly`."""
        for status in message.status:
            level = status.level[0] if isinstance(status.level, bytes) else int(status.level)
            kind = ("ok", "warn", "error", "warn")[min(level, 3)]
            stage, _, what = status.name.partition(": ")
            lines = status.message.strip().splitlines() or [""]
            message = lines[-1 if lines[0].startswith("Traceback") else 0]  # the error itself; there is one line for it
            self.event(kind, stage, f"{what}: {message}" if what else message)

    def event(self, kind: str, source: str, text: str) -> None:
        """Add an event, now."""
        self.events_told += 1
        self.events.append(Event(self.elapsed_s, kind, source, " ".join(text.split())))

    def on_player(self, line: str) -> None:
        """Fold in a line that the player wrote."""
        try:
            said = json.loads(line)
            word = said.pop("event")
        except (ValueError, KeyError, AttributeError, TypeError):
            said, word = {"text": line}, "note"
        if word == "done":
            self.player = said
        elif word == "ready":
            self.player_ready = True
        else:
            self.event("note", "player", str(said.get("text", word)))

    def on_journal(self, stage: str, line: str) -> None:
        """Fold in a line of a saboteur's journal."""
        entry = json.loads(line)
        self.injections.append(Injection(stage, entry["kind"], entry["stamp_ns"], entry["pid"]))

    def match(self) -> None:
        """Find the frames that were hit by injections whose frame is not known yet, and tell how they were answered."""
        for number, injection in enumerate(self.injections):
            stage = self.stages.get(injection.stage)
            if injection.record is not None or stage is None:
                continue
            near = stage.nearest(injection.stamp_ns)
            if near is None:
                continue
            found = Injection(injection.stage, injection.kind, injection.stamp_ns, injection.pid, near)
            self.injections[number] = found
            self.event(
                "sabotage",
                injection.stage,
                f"{injection.kind} in pid {injection.pid}: {found.answer} after {near.total_ms:.1f} ms"
                f" of {near.budget_ms:.0f}",
            )

    def answers(self) -> Mapping[str, Counter[str]]:
        """Per kind of sabotage, how often it was answered how."""
        table: dict[str, Counter[str]] = {}
        for injection in self.injections:
            table.setdefault(injection.kind, Counter())[injection.answer] += 1
        return table


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value)
