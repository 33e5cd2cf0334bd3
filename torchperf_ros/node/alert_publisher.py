"""Alerts on `/perf/anomaly`, all of them to the recorder with their incident, and the log, throttled."""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rclpy.node import Node

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S, Clock, monotonic_ns
from torchperf_ros.api.outcome import Health
from torchperf_ros.node.endpoints import OUTPUT_QOS
from torchperf_ros.observe.recording import Recording
from torchperf_ros.observe.ros_types import ros_message_class
from torchperf_ros.observe.telemetry.diagnostics import diagnostic_bytes
from torchperf_ros.observe.watch.alert_grouping import AlertGrouping, LastAlerts
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.protocol import STACK_FILE
from torchperf_ros.workers.worker_process import WorkerProcess

_EVIDENCE_EVERY_NS = 60 * NS_PER_S
_MOST_EVENTS = 64
_MEMORY = frozenset({"machine: memory", "machine: gpu memory"})
_Value = TypeVar("_Value")


class AlertPublisher:
    """Collects alerts from any thread; `step` publishes them, from one."""

    def __init__(self, node: Node) -> None:
        """Create the publisher."""
        self.recording: Recording | None = None  # who writes it all down; None while nothing is recorded
        # called with each finding, on its thread
        self.heard: Callable[[Alert], None] = lambda anomaly: None
        self.published: Callable[[Alert], None] = lambda anomaly: (
            None
        )  # called with each alert once it is out
        self.takes_memory: tuple[str, Mapping[str, str]] = "", {}  # see `MemoryWatch.suspect`
        self._node = node
        diagnostics = ros_message_class("diagnostic_msgs/msg/DiagnosticArray")
        self._publisher = node.create_publisher(diagnostics, "~/anomaly", OUTPUT_QOS)
        self._grouping = AlertGrouping()
        self._healths: dict[str, Health] = {}
        self._dropped: dict[str, int] = {}
        self._wanted: deque[tuple[str, str]] = deque(maxlen=16)
        self._evidence_ns: int | None = None
        self._evidence_of: dict[str, str] = {}
        self._logged: dict[str, Level] = {}
        self._last_findings = LastAlerts()
        self._lock = threading.Lock()

    def found(self, anomaly: Alert) -> None:
        """Take an alert, from any thread: it is published within a second, with what belongs to it."""
        self._grouping.report(anomaly, monotonic_ns())
        self.heard(anomaly)

    @property
    def open(self) -> list[Alert]:
        """What goes on now, as far as it has been published; for the thread that calls `step`."""
        return self._grouping.open

    @property
    def findings_lost(self) -> int:
        """Alerts that came faster than they could be published."""
        return self._grouping.lost

    def why_no_record(self) -> str:
        """Why nothing can be recorded now, empty if it can; from any thread."""
        if (recording := self.recording) is None:
            return "parameter recorder is false, or the node is not configured"
        return recording.unable()

    def record(self, what: str, why: str) -> str:
        """Have the last and the next seconds written, from any thread.

        Returns the folder, "" if nothing is recorded.

        One or two words of `what` are in the folder's name; `why` is a line for people.
        """
        if (recording := self.recording) is None or recording.unable():
            return ""
        with self._lock:
            name = recording.incident(what, monotonic_ns())
            self._wanted.append((name, why))
        return recording.evidence_path(name)

    def step(self, now_ns: int, ros_now_ns: int, healths: Sequence[tuple[Stage, Health]]) -> None:
        """Publish what has been found, and pass everything on to the recorder."""
        if (recording := self.recording) is not None:
            recording.ros_offset_ns = ros_now_ns - now_ns
            is_new, findings = self._recorder_finds(recording, now_ns)
            for finding in findings:
                self._grouping.report(finding, monotonic_ns())
                if is_new:
                    self.heard(finding)
        for event in self._grouping.tick(now_ns):
            self._publish(self._with_evidence(event, now_ns), ros_now_ns)
        for stage, health in healths:
            self._follow(stage, health, now_ns, ros_now_ns)
        if recording is not None:
            while self._wanted:
                name, why = self._wanted.popleft()
                recording.record(name, why, ros_now_ns, stacks([stage for stage, _ in healths]))
                _print(
                    self._node,
                    "info",
                    f"evidence is written to {recording.evidence_path(name)}: {why.splitlines()[0]}",
                )

    def _recorder_finds(self, recording: Recording, now_ns: int) -> tuple[bool, Sequence[Alert]]:
        """What the recorder finds at present.

        What it found last, while a busy machine leaves it no time to look.

        And whether that is new: it leads to no action twice.
        """
        status = recording.status
        found = [
            Alert(Level[one["level"]], one["name"], one["message"], one["values"])
            for one in recording.step()
        ]
        found = [self._with_suspect(alert) if alert.name in _MEMORY else alert for alert in found]
        looked = recording.status is not status
        return bool(found) or looked, self._last_findings.update(found, now_ns, looked=looked)

    def _with_suspect(self, alert: Alert) -> Alert:
        """Where the machine's memory runs out.

        Also which worker took it, which the recorder does not know.
        """
        text, values = self.takes_memory
        if not text:
            return alert
        return replace(alert, message=f"{alert.message}; {text}", values={**alert.values, **values})

    def _publish(self, event: Sequence[Alert], ros_now_ns: int) -> None:
        data, recording = (
            diagnostic_bytes(event, self._node.get_fully_qualified_name(), ros_now_ns),
            self.recording,
        )
        self._publisher.publish(data)
        if recording is not None:
            recording.message(self._publisher.topic_name, ros_now_ns, data)
        self._log(event)
        for alert in event:
            self.published(alert)
            if recording is not None:
                fields = {"name": alert.name, "message": alert.message, "values": dict(alert.values)}
                recording.event(ros_now_ns, kind="anomaly", level=alert.level.name, **fields)

    def _log(self, event: Sequence[Alert]) -> None:
        """A line on the terminal when something begins, grows worse or is over, its cause first.

        None for reminders.
        """
        found = [alert for alert in event if not alert.logged]
        news = [alert for alert in found if alert.level is not self._logged.get(alert.name, Level.OK)]
        for alert in news:
            self._logged.pop(alert.name, None)
            if alert.level is not Level.OK:
                _remember(self._logged, alert.name, alert.level)
        if not news:
            return
        first, *others = news
        with_it = f" (with it: {', '.join(alert.name for alert in others)})" if others else ""
        text = f"{first.name}: {first.message}{with_it}"
        _print(self._node, first.level.name.lower(), text)

    def _with_evidence(self, event: list[Alert], now_ns: int) -> list[Alert]:
        """An error is recorded, and says where.

        Of what goes on for long, once: its reminders name the same folder.
        """
        error = next((anomaly for anomaly in event if anomaly.level is Level.ERROR), None)
        if error is None:
            return event
        number = error.values.get("event", "")
        path = self._evidence_of.get(number, "") or self._record_once(error.name, error.message, now_ns)
        if number and path:
            _remember(self._evidence_of, number, path)
        return (
            [replace(anomaly, values={**anomaly.values, "evidence": path}) for anomaly in event]
            if path
            else event
        )

    def _record_once(self, what: str, why: str, now_ns: int) -> str:
        """Record, but not without end where errors keep coming.

        The folder, "" if the last time was just now.
        """
        if self._evidence_ns is not None and now_ns - self._evidence_ns < _EVIDENCE_EVERY_NS:
            return ""
        self._evidence_ns = now_ns
        return self.record(what, why)

    def _follow(self, stage: Stage, health: Health, now_ns: int, ros_now_ns: int) -> None:
        """Changes of health and drops of one stage."""
        name = stage.config.name
        before = self._healths.get(name, Health.STARTING)
        self._healths[name] = health
        superseded = stage.mailbox.superseded - self._dropped.get(name, 0)
        self._dropped[name] = stage.mailbox.superseded
        if (recording := self.recording) is None:
            return
        if health is not before:
            recording.event(
                ros_now_ns, kind="health", stage=name, **{"from": before.name, "to": health.name}
            )
            if health is Health.SAFE_STOP:
                self._record_once(
                    f"{name} safe stop", f"{name} went from {before.name} to SAFE_STOP", now_ns
                )
        if superseded > 0:
            recording.event(ros_now_ns, kind="dropped", stage=name, superseded=superseded)


def _remember(events: dict[str, _Value], name: str, value: _Value) -> None:
    """Have this as the newest of the last 64."""
    events[name] = value
    if len(events) > _MOST_EVENTS:
        del events[next(iter(events))]


def _print(node: Node, severity: str, text: str) -> None:
    """A line on the terminal.

    One call for each severity, as rclpy remembers that by the place of the call.
    """
    logger = node.get_logger()
    if severity == "error":
        logger.error(text)
    elif severity == "warn":
        logger.warning(text)
    else:
        logger.info(text)


_MOST_PER_S, _BURST = 10.0, 30.0


class NodeLog:
    """The log for people and for the records; takes lines from any thread.

    A storm is cut: 30 lines at once, 10 a second for long (a token bucket).
    """

    def __init__(self, node: Node, alert_publisher: AlertPublisher, now_ns: Clock = monotonic_ns) -> None:
        """Log as this node; the clock is monotonic."""
        self._node = node
        self._alert_publisher = alert_publisher
        self._now_ns = now_ns
        self._tokens, self._at_ns, self._held_back = _BURST, now_ns(), 0
        self._lock = threading.Lock()

    def __call__(self, severity: str, text: str) -> None:
        """Log a text; `severity` is info, warn or error."""
        if (recording := self._alert_publisher.recording) is not None:
            recording.event(
                self._node.get_clock().now().nanoseconds, kind="log", severity=severity, text=text
            )
        with self._lock:
            lines = self._lines(text)
        for line in lines:
            _print(self._node, severity, line)

    def _lines(self, text: str) -> list[str]:
        """What to log: nothing, the text, or the text after a word on how many lines were left out."""
        before_ns, self._at_ns = self._at_ns, self._now_ns()
        self._tokens = min(_BURST, self._tokens + (self._at_ns - before_ns) / NS_PER_S * _MOST_PER_S)
        if self._tokens < 1.0:
            self._held_back += 1
            return []
        self._tokens -= 1.0
        left_out, self._held_back = self._held_back, 0
        if not left_out:
            return [text]
        return [
            f"{left_out} lines were left out, as there were too many at once; the records hold more",
            text,
        ]


_WAIT_S = 0.1
_STEP_S = 0.01


def stacks(stages: Iterable[Stage]) -> str:
    """Text with the stacks of this process and of every worker that is ready.

    Takes up to 0.1 s per worker.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        "== node ==",
        *(
            f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
            for number, frame in sys._current_frames().items()
        ),
    ]
    for stage in stages:
        for worker in stage.everyone:
            title = f"== {stage.config.name} worker {worker.number} (pid {worker.pid}) =="
            parts.append(f"{title}\n{_worker_stacks(worker)}")
    return "\n".join(parts)


def _worker_stacks(worker: WorkerProcess) -> str:
    """Stacks of a worker's threads, most recent call first.

    Also of one that hangs or holds its interpreter lock.
    """
    if worker.ready_at_ns is None:
        return f"not ready: {worker.state}\n"
    file = Path(worker.folder) / STACK_FILE
    try:
        file.write_bytes(b"")  # else what it is asked for again and again would fill the disk; it appends
        worker.ask_for_stacks()
        give_up_at = time.monotonic() + _WAIT_S
        while time.monotonic() < give_up_at:  # until it has begun, and then until it has come to the end
            size = file.stat().st_size
            time.sleep(_STEP_S)
            if 0 < size == file.stat().st_size:
                break
        return (
            file.read_text(encoding="utf-8", errors="replace")
            or "no answer: it does not even take signals\n"
        )
    except ProcessLookupError:
        return "gone\n"
    except OSError as error:
        return f"cannot be read: {error}\n"
