"""The last seconds of everything, in memory; after an incident, with the seconds that follow, on disk."""

import json
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rosbags.rosbag2 import StoragePlugin, Writer

from torchperf_ros.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from torchperf_ros.core.evidence_folder import EvidenceFolder
from torchperf_ros.core.message_types import typestore
from torchperf_ros.supervise.frame_ring import InputBytes
from torchperf_ros.telemetry.labelled_array import LabelledArray, float64_bytes
from torchperf_ros.telemetry.latency_record import LABELS, frame_row
from torchperf_ros.telemetry.record_stream import FrameRecord, MessageRecord

_VERSION: Final = 9  # of rosbag2's metadata: Jazzy and later; Humble reads the .mcap itself
_FOLDER = "black_box"
_JUMP_NS: Final = 60 * NS_PER_S


@dataclass(frozen=True)
class Topic:
    """A topic of the black box: its name as resolved, and its message type."""

    name: str
    type_name: str


@dataclass(frozen=True)
class BlackBoxLimits:
    """How much is kept: seconds before and after an incident, and bytes of each of these two parts."""

    before_s: float
    after_s: float
    part_bytes: int


@dataclass(frozen=True)
class Stage:
    """The topics of a stage: its output, and its inputs by index, None for one that another stage gives out."""

    output: Topic
    inputs: tuple[Topic | None, ...]


@dataclass(slots=True)
class _Entry:
    t_ns: int
    topic: Topic
    data: bytes
    kept_ns: int


@dataclass
class _Incident:
    """An incident that is being recorded: what was kept before, and what has come since."""

    name: str
    until_s: float
    files: dict[str, str]
    entries: list[_Entry]
    left_bytes: int
    more_files: Callable[[int], Mapping[str, str]]
    left_out: int = 0
    is_over: bool = False


class BlackBox:
    """Keeps what it is given for a while, and writes it to the evidence folder when something has happened.

    Attributes:
        held_bytes: bytes kept at present.
        incidents: incidents written.
        problem: why the last one could not be written, empty if it could.
    """

    def __init__(
        self,
        node: str,
        stages: list[Stage],
        topics: list[Topic],
        limits: BlackBoxLimits,
        evidence: EvidenceFolder,
        clock: Clock = monotonic_ns,
    ) -> None:
        """Start empty.

        Args:
            node: its fully qualified name.
            stages: what each stage takes and gives, by index.
            topics: the other topics, by the index of `MessageRecord.topic`.
            limits: how much is kept.
            evidence: where incidents go.
            clock: how long something is kept: ROS time may stand still, or jump.
        """
        self.held_bytes = self.incidents = 0
        self.problem = ""
        self._stages = stages
        self._topics = topics
        self._limits = limits
        self._evidence = evidence
        self._monotonic_ns = clock
        self._reported_ns = 0
        self._rows = (Topic(f"{node}/latency_stages", "std_msgs/msg/Float64MultiArray"), LabelledArray(LABELS))
        self._latency = Topic(f"{node}/latency", "std_msgs/msg/Float64")
        self._kept: deque[_Entry] = deque()
        self._last_input: dict[Topic, bytes] = {}
        self._incident: _Incident | None = None
        self._writing: threading.Thread | None = None

    def frame(self, record: FrameRecord) -> None:
        """Keep a frame: its inputs that are new, what was published for it, and its row of `latency_stages`."""
        stage = self._stages[record.stage]
        received_ns = record.t_ns - round(record.total_ms * NS_PER_MS)
        for item in sorted(record.inputs, key=lambda item: -item.index):  # the trigger last, as a replay needs it
            topic = stage.inputs[item.index]
            if topic is None or (item.index and self._last_input.get(topic) == item.data):
                continue
            if item.index:
                self._last_input[topic] = bytes(item.data)
            self._keep(_received_ns(item, received_ns), topic, bytes(item.data))
        if record.output is not None:
            self._keep(record.t_ns, stage.output, record.output)
        topic, array = self._rows
        self._keep(record.t_ns, topic, array.encode(frame_row(record)))
        if not math.isnan(record.answer_ms):  # the last stage's
            self._keep(record.t_ns, self._latency, float64_bytes(record.answer_ms))

    def message(self, record: MessageRecord) -> None:
        """Keep a message that the node published; such messages come every second."""
        if not self._reported_ns <= record.t_ns <= self._reported_ns + _JUMP_NS:
            self._jumped(record.t_ns)
        self._reported_ns = record.t_ns
        self._keep(record.t_ns, self._topics[record.topic], record.data)

    def _jumped(self, t_ns: int) -> None:
        """ROS time went back, or far ahead: what came before stands on a time line of its own."""
        for _ in range(_before_jump(self._kept, t_ns)):
            self.held_bytes -= len(self._kept.popleft().data)
        incident = self._incident
        if incident is not None and (count := _before_jump(incident.entries, t_ns)):
            del incident.entries[count:]
            incident.is_over = True
            self.finish(wait=False)

    def _keep(self, t_ns: int, topic: Topic, data: bytes) -> None:
        now_ns = self._monotonic_ns()
        entry = _Entry(max(t_ns, 0), topic, data, now_ns)
        kept, size = self._kept, len(data)
        kept.append(entry)
        self.held_bytes += size
        oldest_ns = now_ns - self._limits.before_s * NS_PER_S
        while kept and (kept[0].kept_ns < oldest_ns or self.held_bytes > self._limits.part_bytes):
            self.held_bytes -= len(kept.popleft().data)
        incident = self._incident
        if incident is not None and not incident.is_over:
            if size <= incident.left_bytes:
                incident.left_bytes -= size
                incident.entries.append(entry)
            else:
                incident.left_out += 1

    def record(
        self, name: str, now_s: float, files: Mapping[str, str], more_files: Callable[[int], Mapping[str, str]]
    ) -> None:
        """Something has happened: write what is kept, and what comes during the next seconds.

        While an incident is being recorded another one is part of it.

        Args:
            name: the incident's folder, as `EvidenceFolder.name` gives it.
            now_s: monotonic time: ROS time may stand still.
            files: texts to be put beside the log, by file name.
            more_files: more of them, asked for at the end with the time at which the log begins.
        """
        if self._incident is not None:
            self._incident.files.update({f"{name}_{file}": text for file, text in files.items()})
            return
        until_s, entries = now_s + self._limits.after_s, list(self._kept)
        self._incident = _Incident(name, until_s, dict(files), entries, self._limits.part_bytes, more_files)

    def tick(self, now_s: float) -> None:
        """Once a second: write the incident if its time has come."""
        if self._incident is not None and (self._incident.is_over or now_s >= self._incident.until_s):
            self.finish(wait=False)

    def finish(self, *, wait: bool = True) -> None:
        """Write an incident now, however much has come since, and, with `wait`, see it written."""
        incident = self._incident
        if self._writing is not None and (wait or not self._writing.is_alive()):
            self._writing.join()
            self._writing = None
        if incident is not None and self._writing is None:
            self._incident = None
            incident.files.update(incident.more_files(min((e.t_ns for e in incident.entries), default=0)))
            self._writing = threading.Thread(target=self._write, args=(incident,), name="incident")
            self._writing.start()
            if wait:
                self._writing.join()

    def _write(self, incident: _Incident) -> None:
        try:
            self._evidence.keep(incident.name, lambda folder: self._fill(folder, incident), incident.name)
        except Exception as error:  # the thread's boundary: a full disk is reported and harms nothing
            self.problem = f"incident {incident.name} is lost: {error}"
            if not isinstance(error, OSError):
                self.problem += f"\n{traceback.format_exc()}"
        else:
            self.incidents += 1
            self.problem = ""

    def _fill(self, folder: Path, incident: _Incident) -> None:
        for name, text in incident.files.items():
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        others = [path.name for path in self._evidence.incidents() if path.name > incident.name]
        if others:  # a profile, a memory snapshot
            (folder / "see_also.txt").write_text("\n".join(others) + "\n", encoding="utf-8")
        if not incident.entries:
            return
        store = typestore({entry.topic.type_name for entry in incident.entries})
        with Writer(folder / _FOLDER, version=_VERSION, storage_plugin=StoragePlugin.MCAP) as writer:
            connections: dict[Topic, Any] = {}
            for entry in sorted(incident.entries, key=lambda entry: entry.t_ns):
                if entry.topic not in connections:
                    connections[entry.topic] = writer.add_connection(
                        entry.topic.name, entry.topic.type_name, typestore=store
                    )
                writer.write(connections[entry.topic], entry.t_ns, entry.data)
        if incident.left_out:
            text = json.dumps({"messages_left_out": incident.left_out, "why": "black_box_mib was full"})
            (folder / "left_out.json").write_text(text, encoding="utf-8")


def _before_jump(entries: Iterable[_Entry], t_ns: int) -> int:
    """How many entries came before ROS time jumped, if it is `t_ns` since: those up to the last one that is far off."""
    far_off = (n for n, entry in enumerate(entries, 1) if not t_ns - _JUMP_NS <= entry.t_ns <= t_ns + NS_PER_S)
    return max(far_off, default=0)


def _received_ns(item: InputBytes, frame_ns: int) -> int:
    """When an input came in, in ROS time; `frame_ns` is when the frame's trigger did, later than all others."""
    if not item.index:
        return frame_ns
    if item.stamp_ns and math.isfinite(item.age_ms):
        return min(item.stamp_ns + round(item.age_ms * NS_PER_MS), frame_ns - 1)
    return frame_ns - 1
