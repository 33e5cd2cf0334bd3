"""What happens, told once a second: events on `/perf/anomaly`, and everything to the recorder, with evidence."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from rclpy.node import Node

from torchperf_ros.core.anomaly_desk import AnomalyDesk
from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.clock import NS_PER_S, monotonic_ns
from torchperf_ros.core.outcome import Health
from torchperf_ros.ros.endpoints import OUTPUT_QOS, ros_message_class
from torchperf_ros.ros.recording_setup import ANOMALY
from torchperf_ros.supervise.stack_dump import stacks
from torchperf_ros.supervise.stage_actor import StageActor
from torchperf_ros.telemetry.diagnostics import diagnostic_bytes
from torchperf_ros.telemetry.recording import Recording
from torchperf_ros.telemetry.signal_findings import LastFindings

_EVIDENCE_EVERY_NS = 60 * NS_PER_S


class Announcer:
    """Collects findings from any thread; `step` tells them, from one.

    Attributes:
        recording: who writes it all down; None while nothing is recorded.
        told: called with each anomaly that was told.
    """

    def __init__(self, node: Node) -> None:
        """Create the publisher."""
        self.recording: Recording | None = None
        self.told: Callable[[Anomaly], None] = lambda anomaly: None
        self._node = node
        diagnostics = ros_message_class("diagnostic_msgs/msg/DiagnosticArray")
        self._publisher = node.create_publisher(diagnostics, "~/anomaly", OUTPUT_QOS)
        self._desk = AnomalyDesk()
        self._healths: dict[str, Health] = {}
        self._dropped: dict[str, tuple[int, int]] = {}
        self._wanted: deque[tuple[str, str]] = deque(maxlen=16)
        self._evidence_ns: int | None = None
        self._last_findings = LastFindings()
        self._lock = threading.Lock()

    def found(self, anomaly: Anomaly) -> None:
        """A finding, from any thread: it is told within a second, with what belongs to it."""
        self._desk.report(anomaly, monotonic_ns())

    @property
    def findings_lost(self) -> int:
        """Findings that came faster than they could be told."""
        return self._desk.lost

    def log(self, severity: str, text: str) -> None:
        """A line for the records, from any thread."""
        if (recording := self.recording) is not None:
            recording.tell(self._ros_now_ns, kind="log", severity=severity, text=text)

    def record(self, what: str, why: str) -> str:
        """Have the last and the next seconds written, from any thread; returns the folder, "" if nothing is recorded.

        Args:
            what: one or two words for the folder's name.
            why: a line for people.
        """
        if (recording := self.recording) is None:
            return ""
        with self._lock:
            name = recording.incident(what, monotonic_ns())
            self._wanted.append((name, why))
        return recording.evidence_path(name)

    def step(self, now_ns: int, ros_now_ns: int, healths: Sequence[tuple[StageActor, Health]]) -> None:
        """Tell what has been found, and pass everything on to the recorder."""
        if (recording := self.recording) is not None:
            recording.ros_offset_ns = ros_now_ns - now_ns
            for finding in self._recorder_finds(recording, now_ns):
                self.found(finding)
        for event in self._desk.tick(now_ns):
            self._tell(self._with_evidence(event, now_ns), ros_now_ns)
        for stage, health in healths:
            self._follow(stage, health, now_ns, ros_now_ns)
        if recording is not None:
            while self._wanted:
                name, why = self._wanted.popleft()
                recording.record(name, why, ros_now_ns, stacks([stage for stage, _ in healths]))

    def _recorder_finds(self, recording: Recording, now_ns: int) -> Sequence[Anomaly]:
        """What the recorder finds at present: what it found last, while a busy machine leaves it no time to look."""
        status = recording.status
        found = [_finding(fields) for fields in recording.step()]
        return self._last_findings.update(found, now_ns, looked=recording.status is not status)

    def _tell(self, event: Sequence[Anomaly], ros_now_ns: int) -> None:
        data = diagnostic_bytes(event, self._node.get_fully_qualified_name(), ros_now_ns)
        self._publisher.publish(data)
        for anomaly in event:
            self.told(anomaly)
        if (recording := self.recording) is None:
            return
        recording.message(ANOMALY, ros_now_ns, data)
        for anomaly in event:
            recording.tell(
                ros_now_ns, kind="anomaly", level=anomaly.level.name, name=anomaly.name, message=anomaly.message,
                values=dict(anomaly.values),
            )  # fmt: skip

    def _with_evidence(self, event: list[Anomaly], now_ns: int) -> list[Anomaly]:
        """An error is recorded, and says where."""
        error = next((anomaly for anomaly in event if anomaly.level is Level.ERROR), None)
        path = "" if error is None else self._record_once(error.name, error.message, now_ns)
        return [replace(anomaly, values={**anomaly.values, "evidence": path}) for anomaly in event] if path else event

    def _record_once(self, what: str, why: str, now_ns: int) -> str:
        """Record, but not without end where errors keep coming; the folder, "" if the last time was just now."""
        if self._evidence_ns is not None and now_ns - self._evidence_ns < _EVIDENCE_EVERY_NS:
            return ""
        self._evidence_ns = now_ns
        return self.record(what, why)

    def _follow(self, stage: StageActor, health: Health, now_ns: int, ros_now_ns: int) -> None:
        """Changes of health and drops of one stage."""
        name = stage.config.name
        before = self._healths.get(name, Health.STARTING)
        self._healths[name] = health
        drops = (stage.mailbox.superseded, stage.mailbox.stale)
        superseded, stale = (new - old for new, old in zip(drops, self._dropped.get(name, (0, 0)), strict=True))
        self._dropped[name] = drops
        if (recording := self.recording) is None:
            return
        if health is not before:
            recording.tell(ros_now_ns, kind="health", stage=name, **{"from": before.name, "to": health.name})
            if health is Health.SAFE_STOP:
                self._record_once(f"{name} safe stop", f"{name} went from {before.name} to SAFE_STOP", now_ns)
        if superseded > 0 or stale > 0:
            recording.tell(ros_now_ns, kind="dropped", stage=name, superseded=superseded, stale=stale)

    @property
    def _ros_now_ns(self) -> int:
        return int(self._node.get_clock().now().nanoseconds)


def _finding(fields: dict[str, object]) -> Anomaly:
    """What the recorder has found, as it says it."""
    values = fields["values"]
    assert isinstance(values, dict)
    texts = {key: str(value) for key, value in values.items()}
    return Anomaly(Level[str(fields["level"])], str(fields["name"]), str(fields["message"]), texts)
