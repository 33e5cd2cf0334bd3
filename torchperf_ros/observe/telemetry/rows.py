"""The row that a frame leaves: on `/perf/latency_stages`, and as a packet for the recorder.

Arrays on topics have a layout that names their entries. What the node sends to its recorder is a packet for
each frame, message and event; the bytes stay in shared memory. A `SOCK_SEQPACKET` socket carries fixed
structs with small payloads, and JSON for what is rare. A frame's inputs are read from the ring that its
stage wrote for the workers, large outputs from a ring of the sender's. Neither side waits: what finds the
socket full, or its bytes overwritten, is lost and counted; texts too large for a packet are cut.
"""

import json
import math
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.errors import FrameOverwritten, ProtocolError
from torchperf_ros.api.messages import encode, message_class
from torchperf_ros.stage.frame import Answer
from torchperf_ros.stage.frame_table import KEPT, NULLABLE, WIRE, frame_row, wire_row
from torchperf_ros.workers.frame_ring import FrameReader, FrameRing, InputBytes
from torchperf_ros.workers.protocol import SHAPES_BYTES

_FLOAT64 = struct.Struct("<d")
ROW_TYPE = "std_msgs/msg/Float64MultiArray"


def float64_bytes(value: float) -> bytes:
    """CDR of a `std_msgs/Float64`: little-endian encapsulation, then the number."""
    return b"\x00\x01\x00\x00" + _FLOAT64.pack(value)


class LabelledArray:
    """Encodes rows of numbers under labels that never change.

    Only the numbers at the end of the bytes do.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        dimension = message_class("std_msgs/msg/MultiArrayDimension")
        layout = message_class("std_msgs/msg/MultiArrayLayout")
        dims = [dimension(label=label, size=1, stride=1) for label in labels]
        message = message_class(ROW_TYPE)(
            layout=layout(dim=dims, data_offset=0), data=np.zeros(len(labels))
        )
        numbers = struct.Struct(f"<{len(labels)}d")
        self.pack = numbers.pack  # makes those of the numbers
        self.prefix = bytes(encode(message, ROW_TYPE))[: -numbers.size]  # the bytes before the numbers

    def encode(self, values: Sequence[float]) -> bytes:
        return self.prefix + self.pack(*values)


LABELS = ("stage", *(name for name, _ in WIRE), "stream")


class LatencyRecord:
    """Encodes answers of one stage, or of one stream of it.

    Attributes:
        stage_index: its place in the order in which `/diagnostics` names stages and streams.
    """

    def __init__(self, stage_index: int, stream: int | None = None) -> None:
        """`stream` is its number among those of its stage, None where that has none."""
        self.stage_index = stage_index
        self._stream = math.nan if stream is None else float(stream)
        array = LabelledArray(LABELS)
        self._prefix, self._pack = array.prefix, array.pack  # a call less for each frame

    def encode(self, answer: Answer) -> bytes:
        """CDR bytes of the row; NaN where unknown, where no fallback was needed, or without a guard."""
        return self._prefix + self._pack(self.stage_index, *wire_row(answer, math.nan), self._stream)

    def of_row(self, row: np.void) -> bytes:
        """The same bytes of a row of `KEPT`, which has -1 for what is unknown."""
        values = dict(zip(row.dtype.names or (), row.item(), strict=True))
        known = (math.nan if name in NULLABLE and values[name] < 0 else values[name] for name, _ in WIRE)
        return self._prefix + self._pack(self.stage_index, *known, self._stream)


VERSION: Final = 5
MAX_PACKET_BYTES: Final = 131_072
# A payload up to this size travels in the packet itself, which takes less time than a ring does.
_MAX_INLINE: Final = 16_384
_MAX_REASON: Final = 4_000
# Version, kind, index, lost, ROS time.
#
# Of the payload: offset and length in the ring, length in the packet.
_HEAD: Final = struct.Struct("<BBHIqQII")
# A frame's row, see `KEPT`, with what only the recorder needs.
#
# `received_ns` is monotonic. `offset` and `length`: place of the inputs in the stage's ring.
# `profiled`: whether a profiler was recording. `step`: of an anytime model. `shapes`: of the
# model's inputs.
SENT: Final = np.dtype(
    [
        *KEPT,
        ("received_ns", "i8"),
        ("offset", "u8"),
        ("length", "u8"),
        ("profiled", "?"),
        ("step", "u2"),
        ("shapes", f"S{SHAPES_BYTES}"),
    ]
)
_CODES: Final = {"i8": "q", "f8": "d", "u8": "Q", "u2": "H", "b1": "?"}
# The bytes of a row: `struct` makes them of a tuple in a tenth of the time that numpy takes.
_ROW: Final = struct.Struct(
    "<" + "".join(_CODES.get(SENT[name].str[1:], f"{SENT[name].itemsize}s") for name in SENT.names or ())
)
_BODY: Final = _HEAD.size + _ROW.size
_MOST_STEPS: Final = 2**16 - 1
_FRAME_KIND, _MESSAGE_KIND, _EVENT_KIND = range(3)
_MAX_EVENT: Final = MAX_PACKET_BYTES - _HEAD.size
# Characters that each text of an event may have, tried in this order until the event fits.
_CUT_TO: Final = (_MAX_EVENT, 16_384, 2_048, 64)


def sent_row(answer: Answer, t_ns: int, answer_ms: float) -> bytes:
    return _ROW.pack(
        *frame_row(answer, t_ns, answer_ms),
        answer.frame.received_ns,
        answer.offset,
        answer.length,
        answer.profiled,
        min(answer.step, _MOST_STEPS),
        answer.shapes,
    )


@dataclass(slots=True)
class FrameRecord:
    """An answered frame, as the recorder has it.

    Attributes:
        t_ns: ROS time of the answer.
        stage: index of the stage.
        row: of `SENT`.
        payload: what was published; None for nothing, and where its bytes are lost.
        reason: why it was not on time.
        inputs: the messages that it was computed from, the trigger as a view on the stage's ring; empty
            where they were overwritten, or never handed over.
        ring: where the trigger is, at the row's offset.
    """

    t_ns: int
    stage: int
    row: np.void
    payload: bytes | None = None
    reason: str = ""
    inputs: list[InputBytes] = field(default_factory=list)
    ring: FrameReader | None = None

    @property
    def received_ns(self) -> int:
        """Monotonic time of its receipt."""
        return int(self.row["received_ns"])

    @property
    def published_ns(self) -> int:
        total_ms = float(self.row["total_ms"])
        return self.received_ns + (round(total_ms * NS_PER_MS) if math.isfinite(total_ms) else 0)

    @property
    def is_there(self) -> bool:
        """Whether the trigger has not been overwritten; to be asked again once it has been copied."""
        return self.ring is None or self.ring.holds(int(self.row["offset"]))


@dataclass(slots=True)
class MessageRecord:
    """A message that the node published: index of its topic, ROS time, CDR bytes."""

    t_ns: int
    topic: int
    data: bytes


@dataclass(slots=True)
class EventRecord:
    """Anything else: ROS time, and a JSON object with its `kind`."""

    t_ns: int
    fields: dict[str, Any]


StreamRecord = FrameRecord | MessageRecord | EventRecord


class StreamWriter:
    """One sender, for one thread at a time. Never waits; while it is not connected it does nothing.

    Attributes:
        lost: packets that found no room, of which the recorder does not know yet.
        cut: events that were too large for a packet, and had their texts cut.
    """

    def __init__(self, ring_bytes: int) -> None:
        self.lost = self.cut = 0
        self._socket: socket.socket | None = None
        self.ring = FrameRing(ring_bytes)

    def connect(self, own: socket.socket) -> None:
        self.disconnect()
        self._socket = own

    def disconnect(self) -> None:
        own, self._socket = self._socket, None
        if own is not None:
            own.close()

    def frame(self, stage: int, t_ns: int, answer: Answer, answer_ms: float) -> None:
        reason = answer.reason[:_MAX_REASON].encode(errors="replace")[:_MAX_REASON]
        row = sent_row(answer, t_ns, answer_ms)
        self._send(_FRAME_KIND, stage, t_ns, row, answer.payload or b"", reason)

    def message(self, topic: int, t_ns: int, data: bytes) -> None:
        self._send(_MESSAGE_KIND, topic, t_ns, b"", data)

    def event(self, t_ns: int, fields: dict[str, Any]) -> None:
        """Send anything else, as JSON.

        Of what is too large for a packet the texts are cut, and say by how much.
        """
        data, was_cut = event_bytes(fields)
        self.cut += was_cut
        self._send(_EVENT_KIND, 0, t_ns, data)

    def _send(
        self, kind: int, index: int, t_ns: int, fixed: bytes, payload: bytes = b"", tail: bytes = b""
    ) -> None:
        """Send a packet; a large payload goes through the ring, and the packet says where it is."""
        own = self._socket
        if own is None:
            return
        offset = length = 0
        if len(payload) > _MAX_INLINE:
            try:
                offset, length = self.ring.write(0, [InputBytes(0, 0, 0.0, payload)])
            except ValueError:  # larger than any output may be
                self.lost += 1
            payload = b""
        head = _HEAD.pack(VERSION, kind, index, self.lost, t_ns, offset, length, len(payload))
        try:
            own.send(head + fixed + payload + tail)
        except OSError:  # full, or the recorder is gone, or just disconnected by another thread
            self.lost += 1
        else:
            self.lost = 0

    def close(self) -> None:
        self.disconnect()
        self.ring.close()


def event_bytes(fields: dict[str, Any]) -> tuple[bytes, bool]:
    """An event as JSON that fits into a packet, and whether its texts had to be cut for that."""
    data = b""
    for longest in _CUT_TO:
        data = json.dumps(_cut(fields, longest), default=str).encode()
        if len(data) <= _MAX_EVENT:
            return data, longest != _CUT_TO[0]
    text = f"an event {fields['kind']!r} of {len(data):,} bytes was too large to be recorded"
    return json.dumps({"kind": "log", "severity": "error", "text": text}).encode(), True


def _cut(value: Any, longest: int) -> Any:  # noqa: ANN401 - JSON
    """The same with no text longer than that, but for the words that say how much is missing."""
    if isinstance(value, str):
        missing = len(value) - longest
        return value if missing <= 0 else f"{value[:longest]}... ({missing:,} more characters were cut)"
    if isinstance(value, dict):
        return {key: _cut(item, longest) for key, item in value.items()}
    return [_cut(item, longest) for item in value] if isinstance(value, (list, tuple)) else value


class StreamReader:
    """The recorder's end of one sender.

    Attributes:
        overwritten: records whose bytes were gone before they were read.
    """

    def __init__(self, own: socket.socket, ring_fd: int, stage_fds: list[int]) -> None:
        self.socket = own
        self.lost = self.overwritten = 0  # packets that the sender could not send
        # `recv` makes room for the largest packet each time. What is kept of small ones would lie so far
        # apart that the heap doubles within an hour.
        self._packet = memoryview(bytearray(MAX_PACKET_BYTES))
        self._payloads = FrameReader(ring_fd)
        self._stages = [FrameReader(descriptor) for descriptor in stage_fds]

    def read(self) -> StreamRecord | None:
        """The next record, None at the end of the stream.

        Raises:
            BlockingIOError: there is none yet.
            ProtocolError: the packet has another version or length.
        """
        data = bytes(self._packet[: self.socket.recv_into(self._packet)])
        if not data:
            return None
        if len(data) < _HEAD.size or data[0] != VERSION:
            raise ProtocolError(
                f"a packet of {len(data)} bytes and version {data[0]}; it has to be version {VERSION}"
            )
        _, kind, index, lost, t_ns, offset, length, inline = _HEAD.unpack_from(data)
        self.lost += lost
        if kind == _EVENT_KIND:
            return EventRecord(t_ns, json.loads(data[_HEAD.size :]))
        begin = _HEAD.size if kind == _MESSAGE_KIND else _BODY
        payload = data[begin : begin + inline]
        if length:
            items = self._items(self._payloads, offset, length, 0, copied=0)
            payload = bytes(items[0].data) if items else b""
        if kind == _MESSAGE_KIND:
            return MessageRecord(t_ns, index, payload)
        (row,) = np.frombuffer(data, SENT, 1, _HEAD.size)
        ring, reason = self._stages[index], data[begin + inline :].decode(errors="replace")
        inputs = self._items(ring, int(row["offset"]), int(row["length"]), int(row["seq"]))
        return FrameRecord(t_ns, index, row, payload or None, reason, inputs, ring)

    def _items(
        self, ring: FrameReader, offset: int, length: int, seq: int, *, copied: int = 1
    ) -> list[InputBytes]:
        """What a record of a ring holds, as copies from the index `copied` on.

        Nothing if it is overwritten.
        """
        if not length:
            return []
        try:
            items = ring.read(offset, length, seq)
            for item in items:
                if item.index >= copied:
                    item.data = bytes(item.data)
            ring.check(offset, seq)
        except (FrameOverwritten, ProtocolError):
            self.overwritten += 1
            return []
        return items
