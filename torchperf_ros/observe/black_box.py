"""The last seconds of everything, in memory; after an incident, with the seconds that follow, on disk.

What triggers frames, images as a rule, stays in the ring of its stage, and nothing is made of a record,
until an incident happens.
"""

import json
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from torchperf_ros.api.clock import NS_PER_S, NS_PER_US, Clock, monotonic_ns
from torchperf_ros.api.messages import typestore
from torchperf_ros.observe.telemetry.rows import (
    LABELS,
    ROW_TYPE,
    FrameRecord,
    LatencyRecord,
    MessageRecord,
    float64_bytes,
)
from torchperf_ros.workers.frame_ring import InputBytes
from torchperf_ros.workers.incident_folder import IncidentFolder

_METADATA_VERSION: Final = 9  # of rosbag2: Jazzy and later; Humble reads the .mcap itself
_JUMP_NS: Final = 60 * NS_PER_S
_ROW_BYTES: Final = 16 * len(LABELS)  # about what a frame's row and latency take
_LEFT_OUT: Final = (
    "black_box_mib was full, or inputs were overwritten in shared memory before they could be copied"
)
_Topic = tuple[str, str]  # its name as resolved, and its message type


class _Kept(NamedTuple):
    t_ns: int
    kept_ns: int
    size: int
    record: FrameRecord | MessageRecord
    inputs: tuple[InputBytes, ...]
    lasting: Mapping[_Topic, bytes]  # what later frames run with, too, until something newer comes


class _Entry(NamedTuple):
    """A message for the log."""

    t_ns: int
    topic: _Topic
    data: bytes


def _always() -> bool:
    return True


@dataclass
class _Incident:
    name: str
    until_s: float
    files: dict[str, str]
    left_bytes: int
    more_files: Callable[[int], Mapping[str, str]]
    entries: list[_Entry] = field(default_factory=list)
    left_out: int = 0
    overwritten: int = 0
    is_over: bool = False

    def take(
        self,
        t_ns: int,
        topic: _Topic,
        data: bytes | memoryview,
        is_there: Callable[[], bool] = _always,
    ) -> None:
        """Have a message in the log; one that finds no room is counted, and not copied.

        `is_there`, asked after the copy: whether nothing was written over the message before.
        """
        if len(data) > self.left_bytes:
            self.left_out += 1
            return
        copied = bytes(data)
        if is_there():
            self.left_bytes -= len(copied)
            self.entries.append(_Entry(t_ns, topic, copied))
        else:
            self.overwritten += 1


class BlackBox:
    """Keeps what it is given for a while, and writes it to the evidence folder when something has happened.

    Attributes:
        held_bytes: kept at present.
        incidents: that were written.
        problem: why the last one could not be written, empty if it could.
    """

    def __init__(
        self, setup: Mapping[str, Any], evidence: IncidentFolder, clock: Clock = monotonic_ns
    ) -> None:
        """Start empty.

        Args:
            setup: the node's topics and stages, see the end of `node/node.py`, and how much is kept, in
                seconds before and after an incident and in MiB of each of these two parts.
            evidence: where incidents go.
            clock: how long something is kept: ROS time may stand still, or jump.
        """
        self.held_bytes = self.incidents = 0
        self.problem = ""
        self._topics: list[_Topic] = [(name, kind) for name, kind in (*setup["topics"], *setup["heard"])]
        self._heard_from = len(setup["topics"])
        self._inputs: list[list[_Topic | None]] = [
            [topic and (topic[0], topic[1]) for topic in stage["inputs"]] for stage in setup["stages"]
        ]
        self._outputs: list[_Topic] = [(*stage["output"],) for stage in setup["stages"]]
        self._rows = [
            LatencyRecord(index, stage.get("stream")) for index, stage in enumerate(setup["stages"])
        ]
        self._row_topic = f"{setup['node']}/latency_stages", ROW_TYPE
        self._latency_topic = f"{setup['node']}/latency", "std_msgs/msg/Float64"
        self._before_ns, self._after_s = setup["black_box_s"] * NS_PER_S, setup["black_box_after_s"]
        self._part_bytes = round(setup["black_box_mib"] * (1 << 20))
        self._evidence = evidence
        self._monotonic_ns = clock
        self._reported_ns = 0
        self._kept: deque[_Kept] = deque()
        self._last_input: dict[_Topic, bytes] = {}
        self._older: dict[_Topic, bytes] = {}  # what lasts, of all that is not kept any more
        self._incident: _Incident | None = None
        self._writing: threading.Thread | None = None

    def frame(self, record: FrameRecord) -> None:
        """Keep a frame: its inputs that are new, its output, and its row of `latency_stages`."""
        topics = self._inputs[record.stage]
        inputs = tuple(item for item in record.inputs if self._is_new(item, topics[item.index]))
        size = _ROW_BYTES + len(record.payload or b"") + sum(len(item.data) for item in inputs)
        others = ((topics[item.index], bytes(item.data)) for item in inputs if item.index)
        self._keep(record, size, inputs, {topic: data for topic, data in others if topic is not None})

    def _is_new(self, item: InputBytes, topic: _Topic | None) -> bool:
        """Whether an input becomes a message: no other stage's output, and not the frame before's."""
        if topic is None or not item.index:
            return topic is not None
        known, self._last_input[topic] = self._last_input.get(topic), bytes(item.data)
        return known != item.data

    def message(self, record: MessageRecord) -> None:
        """Keep a message that the node published, which it does every second, or one that it heard."""
        if record.topic < self._heard_from:
            if not self._reported_ns <= record.t_ns <= self._reported_ns + _JUMP_NS:
                self._jumped(record.t_ns)
            self._reported_ns = record.t_ns
        is_heard = record.topic >= self._heard_from
        self._keep(
            record, len(record.data), (), {self._topics[record.topic]: record.data} if is_heard else {}
        )

    def _jumped(self, t_ns: int) -> None:
        """ROS time went back, or far ahead: what came before stands on a time line of its own."""
        for _ in range(_before_jump(self._kept, t_ns)):
            self._drop()
        incident = self._incident
        if incident is not None and (count := _before_jump(incident.entries, t_ns)):
            del incident.entries[count:]
            incident.is_over = True
            self.finish(wait=False)

    def _drop(self) -> None:
        gone = self._kept.popleft()
        self.held_bytes -= gone.size
        self._older.update(gone.lasting)

    def _keep(
        self,
        record: FrameRecord | MessageRecord,
        size: int,
        inputs: tuple[InputBytes, ...],
        lasting: Mapping[_Topic, bytes],
    ) -> None:
        now_ns, kept = self._monotonic_ns(), self._kept
        entry = _Kept(record.t_ns, now_ns, size, record, inputs, lasting)
        kept.append(entry)
        self.held_bytes += size
        while kept and (now_ns - kept[0].kept_ns > self._before_ns or self.held_bytes > self._part_bytes):
            self._drop()
        if self._incident is not None and not self._incident.is_over:
            self._add(self._incident, entry)

    def _add(self, incident: _Incident, kept: _Kept) -> None:
        """Have the messages of something kept in the log, as far as there is room for them."""
        record, t_ns = kept.record, max(kept.t_ns, 0)
        if isinstance(record, MessageRecord):
            incident.take(t_ns, self._topics[record.topic], record.data)
            return
        received_ns = record.t_ns - (record.published_ns - record.received_ns)
        # The trigger comes last, as a replay needs it, and later than all others.
        for item in sorted(kept.inputs, key=lambda item: -item.index):
            topic = self._inputs[record.stage][item.index]
            earlier_ns = max(item.waited_us * NS_PER_US, 1) if item.index else 0
            if topic is not None:
                is_there = _always if item.index else lambda: record.is_there
                incident.take(max(received_ns - earlier_ns, 0), topic, item.data, is_there)
        if record.payload is not None:
            incident.take(t_ns, self._outputs[record.stage], record.payload)
        incident.take(t_ns, self._row_topic, self._rows[record.stage].of_row(record.row))
        answer_ms = float(record.row["answer_ms"])
        if not math.isnan(answer_ms):  # the last stage's
            incident.take(t_ns, self._latency_topic, float64_bytes(answer_ms))

    def record(
        self,
        name: str,
        now_s: float,
        files: Mapping[str, str],
        more_files: Callable[[int], Mapping[str, str]],
    ) -> None:
        """Something has happened: write what is kept, and what comes during the next seconds.

        While an incident is being recorded another one is part of it. `now_s` is monotonic: ROS time may
        stand still. `files` are texts to be put beside the log; `more_files` gives more of them at the end,
        for the time at which the log begins.
        """
        if self._incident is not None:
            self._incident.files.update({f"{name}_{file}": text for file, text in files.items()})
            return
        room = self._part_bytes
        incident = self._incident = _Incident(name, now_s + self._after_s, dict(files), room, more_files)
        for kept in self._kept:
            self._add(incident, kept)
        incident.left_bytes = room
        begin_ns = min((entry.t_ns for entry in incident.entries), default=1)
        for topic, data in self._older.items():  # frames run with the latest, however old
            incident.take(max(begin_ns - 1, 0), topic, data)

    def tick(self, now_s: float) -> None:
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
        texts = incident.files
        # A profile, a memory snapshot.
        others = [path.name for path in self._evidence.incidents() if path.name > incident.name]
        if others:
            texts["see_also.txt"] = "\n".join(others) + "\n"
        lost = {"messages_left_out": incident.left_out, "messages_overwritten": incident.overwritten}
        if any(lost.values()):
            texts["left_out.json"] = json.dumps({**lost, "why": _LEFT_OUT})
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        if not incident.entries:
            return
        from rosbags.rosbag2 import StoragePlugin, Writer  # 4 MiB, which no drive without an incident needs

        store = typestore({entry.topic[1] for entry in incident.entries})
        plugin = StoragePlugin.MCAP
        with Writer(folder / "black_box", version=_METADATA_VERSION, storage_plugin=plugin) as writer:
            connections: dict[_Topic, Any] = {}
            for entry in sorted(incident.entries, key=lambda entry: entry.t_ns):
                if entry.topic not in connections:
                    connections[entry.topic] = writer.add_connection(*entry.topic, typestore=store)
                writer.write(connections[entry.topic], entry.t_ns, entry.data)


def _before_jump(entries: Iterable[_Kept | _Entry], t_ns: int) -> int:
    """How many entries, up to the last one that is far off, came before ROS time jumped to `t_ns`."""
    far_off = (
        n for n, entry in enumerate(entries, 1) if not t_ns - _JUMP_NS <= entry.t_ns <= t_ns + NS_PER_S
    )
    return max(far_off, default=0)
