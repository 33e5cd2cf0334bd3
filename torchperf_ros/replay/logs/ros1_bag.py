"""A ROS 1 bag, version 2.0: read by its index if it has one, searched from begin to end if not, a chunk at a time."""

import re
import struct
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.replay.logs.chunk_compression import unpacked
from torchperf_ros.replay.logs.chunked_file import ChunkedFile, Walk
from torchperf_ros.replay.logs.log_storage import Channel, Chunk, Damaged, LogError

MAGIC: Final = b"#ROSBAG V2.0\n"
_MESSAGE, _BAG, _INDEX, _CHUNK, _CHUNK_INFO, _CONNECTION = 2, 3, 4, 5, 6, 7
_U32: Final = struct.Struct("<I")
_TIME: Final = struct.Struct("<II")
_MAX_HEADER_BYTES: Final = 1 << 20
_WINDOW_BYTES: Final = 1 << 20
_CHUNK_FIELD: Final = re.compile(rb"\x04\x00\x00\x00op=\x05")
_NEAR: Final = 80  # bytes of a chunk's header before and after this field, at most


class _Record(NamedTuple):
    """Fields of a record's header, where its data begins, and how long it is."""

    fields: Mapping[bytes, bytes]
    data_at: int
    size: int

    @property
    def kind(self) -> int:
        return self.fields.get(b"op", b"\x00")[0]

    @property
    def end(self) -> int:
        return self.data_at + self.size

    def number(self, name: bytes) -> int:
        """An integer of 4 or 8 bytes.

        Raises:
            Damaged: there is none of this name.
        """
        if not (field := self.fields.get(name)):
            msg = f"a record has no field {name.decode()!r}"
            raise Damaged(msg)
        return int.from_bytes(field[:8], "little")

    def time_ns(self, name: bytes) -> int:
        stamp = self.number(name)
        return (stamp & 0xFFFFFFFF) * NS_PER_S + (stamp >> 32)


class Ros1Bag(ChunkedFile):
    """One `.bag` file, whole or damaged."""

    kind, magic = "a ROS 1 bag of version 2.0", MAGIC

    def _index(self) -> None:
        bag = self._record(len(MAGIC))
        if bag.fields.get(b"encryptor"):
            msg = f"log {self.path}: is encrypted; decrypt it with `rosbag decrypt`"
            raise LogError(msg)
        at = bag.number(b"index_pos")
        for _ in range(bag.number(b"conn_count")):
            record = self._record(at)
            self._learn(record, self._data(record))
            at = record.end
        for _ in range(bag.number(b"chunk_count")):
            record = self._record(at)
            self._chunks.append(self._chunk_of(record))
            at = record.end
        if at != self._size or any(not chunk.counts.keys() <= self._channels.keys() for chunk in self._chunks):
            msg = "the index is not whole"
            raise Damaged(msg)

    def _chunk_of(self, info: _Record) -> Chunk:
        """The chunk that an entry of the index describes."""
        offset, data = info.number(b"chunk_pos"), self._data(info)
        chunk = self._record(offset)
        if (info.kind, chunk.kind) != (_CHUNK_INFO, _CHUNK) or len(data) != 8 * info.number(b"count"):
            msg = "the index leads to no chunk"
            raise Damaged(msg)
        counts = dict(struct.iter_unpack("<II", data))
        return Chunk(offset, chunk.end, info.time_ns(b"start_time"), info.time_ns(b"end_time"), counts)

    def _take(self, at: int) -> tuple[int, bool]:
        record = self._record(at, cut=True)
        end = min(record.end, self._size)
        if record.kind == _CHUNK:  # counted at once, as its connections come before those of an index
            self._chunks.append(self._counted(Chunk(at, end, 0, 0, {})))
        elif record.kind == _CONNECTION:
            self._learn(record, self._data(record))
        elif record.kind not in {_BAG, _INDEX, _CHUNK_INFO}:
            msg = "there is no sound record"
            raise Damaged(msg)
        return end, record.kind == _CHUNK

    def _next_sound(self, begin: int) -> int:
        for at in range(begin, self._size, _WINDOW_BYTES):
            window = self._read(at, _WINDOW_BYTES + 2 * _NEAR)
            for match in _CHUNK_FIELD.finditer(window):
                for start in range(max(match.start() - _NEAR, 0), match.start()):
                    length = int.from_bytes(window[start : start + 4], "little")
                    if match.end() - start - 4 <= length <= 2 * _NEAR and self._is_chunk(at + start):
                        return at + start
        return self._size

    def _is_chunk(self, at: int) -> bool:
        try:
            record = self._record(at, cut=True)
        except Damaged:
            return False
        return record.kind == _CHUNK and record.fields.keys() >= {b"compression", b"size"}

    def _record(self, at: int, *, cut: bool = False) -> _Record:
        """The record at an offset.

        Raises:
            Damaged: there is none, or it leads beyond the end of the file; with `cut` a chunk may do so.
        """
        self._file.seek(min(at, self._size))
        length = int.from_bytes(self._file.read(4), "little")
        header = self._file.read(min(length, _MAX_HEADER_BYTES) + 4)
        if not length or len(header) != length + 4:
            msg = "there is no sound record"
            raise Damaged(msg)
        record = _Record(_fields(header[:length]), at + length + 8, _U32.unpack_from(header, length)[0])
        if record.end > self._size and not (cut and record.kind == _CHUNK):
            msg = "a record leads beyond the end of the file"
            raise Damaged(msg)
        return record

    def _data(self, record: _Record) -> bytes:
        return self._read(record.data_at, record.size)

    def _learn(self, record: _Record, data: bytes) -> None:
        """Take in a connection.

        Raises:
            Damaged: it is none.
        """
        fields = _fields(data)
        if record.kind != _CONNECTION or b"topic" not in record.fields or b"type" not in fields:
            msg = "there is no sound connection"
            raise Damaged(msg)
        text = {key: value.decode(errors="replace") for key, value in fields.items()}
        topic = record.fields[b"topic"].decode(errors="replace")
        topic = "/" * topic.startswith("/") + "/".join(part for part in topic.split("/") if part)
        definition, digest = text.get(b"message_definition", ""), text.get(b"md5sum", "")
        latched = text.get(b"latching") == "1"
        channel = Channel(topic, text[b"type"], "ros1", definition, "ros1msg" if definition else "", digest, latched)
        self._channels.setdefault(record.number(b"conn"), channel)

    def _walk(self, chunk: Chunk, numbers: Collection[int] | None) -> Walk:
        head = self._record(chunk.offset, cut=True)
        data = self._data(head)
        cut = len(data) < head.size
        compression = head.fields.get(b"compression", b"").decode(errors="replace")
        raw = unpacked(compression, data, head.number(b"size"), whole=not cut)
        at = 0
        while at < len(raw):
            record = _record_in(raw, at)
            if record.end > len(raw):
                break
            at = record.end
            if record.kind == _MESSAGE:
                number = record.number(b"conn")
                if numbers is None:
                    yield number, record.time_ns(b"time"), b""
                elif number in numbers:
                    yield number, record.time_ns(b"time"), raw[record.data_at : record.end]
            elif record.kind == _CONNECTION and numbers is None:
                self._learn(record, raw[record.data_at : record.end])
        if cut or at != len(raw):
            msg = "the file breaks off in it" if cut else "one of its records leads out of it"
            raise Damaged(msg)


def _record_in(raw: bytes, at: int) -> _Record:
    """A record of a chunk."""
    try:
        (length,) = _U32.unpack_from(raw, at)
        (size,) = _U32.unpack_from(raw, at + 4 + length)
    except struct.error as error:
        msg = "one of its records leads out of it"
        raise Damaged(msg) from error
    if not length:
        msg = "one of its records is empty"
        raise Damaged(msg)
    return _Record(_fields(raw[at + 4 : at + 4 + length]), at + length + 8, size)


def _fields(header: bytes) -> dict[bytes, bytes]:
    """The fields `name=value` of a header, each with its length before it.

    Raises:
        Damaged: there are none.
    """
    fields, at = {}, 0
    while at < len(header):
        end = at + 4 + int.from_bytes(header[at : at + 4], "little")
        name, equals, value = header[at + 4 : end].partition(b"=")
        if not equals or end > len(header):
            msg = "the header of a record is damaged"
            raise Damaged(msg)
        fields[name] = value
        at = end
    return fields
