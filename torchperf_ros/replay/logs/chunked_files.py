"""MCAP files and ROS 1 bags.

Read a chunk at a time, by their index, or searched for chunks if they have none.

The chunks are read here and not by `rosbags`, for three reasons. Its readers take about twice the processor
time for raw images (they copy each three times) and a third more for chunks of zstd. Of a bag they hold an
index of 160 bytes for each message. They refuse a file without a sound index, end at the first damage, and
give fewer messages without a word where an index lacks some. The functions of `rosbags` for single records
of a bag are used.
"""

import abc
import bz2
import contextlib
import io
import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

import lz4.frame  # type: ignore[import-untyped]
import zstandard
from mcap import records as mcap_records
from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.reader import SeekingReader
from rosbags.interfaces import ConnectionExtRosbag1
from rosbags.rosbag1.reader import Header, Reader, RecordType, read_uint32

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.replay.logs.log_storage import (
    Channel,
    Chunk,
    Damaged,
    LogError,
    LogNotes,
    Part,
    RawMessage,
    Span,
    is_latched,
    ros2_name,
    search,
)

MCAP_MAGIC: Final = b"\x89MCAP0\r\n"
ROS1_MAGIC: Final = b"#ROSBAG V2.0\n"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# A chunk that claims to be larger is damaged: recorders write chunks of about a MiB, or of one
# message.
_MAX_CHUNK_BYTES: Final = 1 << 31
_BUFFER_BYTES: Final = 1 << 16  # a larger message is read past the buffer, without a copy
_RECORD: Final = struct.Struct("<BQ")  # of MCAP: what it is, and how many bytes follow
_CHUNK: Final = struct.Struct(
    "<BQQQQII"
)  # of MCAP, with its record's head: two times, size, CRC, length of a word
# of MCAP's index of a channel's messages: kind, length, channel, length of the entries
_INDEX_HEAD_BYTES: Final = 15
_INDEX_ENTRY_BYTES: Final = 16  # time and offset
_MESSAGE: Final = struct.Struct(
    "<HIQQ"
)  # of MCAP, before the data: channel, sequence, when logged, when published

_NO_SCHEMA: Final = mcap_records.Schema(data=b"", encoding="", id=0, name="")

# Of each record what it is in its format, its begin and end, and of a message its channel's number
# and time in ns.
Records = Iterator[tuple[int, int, int, int, int]]


def unpacked(compression: str, data: bytes, raw_bytes: int, *, whole: bool = True) -> bytes:
    """The bytes of a chunk, never more than it claims to hold, however much they would unpack to.

    Where `data` is cut off, or the claim is only a limit (`whole` is False), fewer bytes are fine.

    Raises:
        Damaged: it is shorter than it claims, or its claim is not sound; and errors of the library for
            bytes that it cannot unpack.
    """
    if compression not in _UNPACK or raw_bytes > _MAX_CHUNK_BYTES:
        raise Damaged(
            f"it claims to hold {raw_bytes:,} bytes, compressed as {compression!r}; known are zstd,"
            " lz4, bz2"
        )
    try:
        raw = _UNPACK[compression](data, raw_bytes)
    except OSError as error:  # bz2 says so of garbage; nothing is read from a disk here
        raise Damaged(str(error)) from error
    if whole and len(raw) != raw_bytes:
        raise Damaged(f"it unpacks to {len(raw):,} bytes instead of {raw_bytes:,}")
    return raw


def unpacked_message(data: bytes) -> bytes:
    """A CDR message begins with a zero byte; one that rosbag2 compressed by itself begins as zstd does."""
    return unpacked("zstd", data, _MAX_CHUNK_BYTES, whole=False) if data.startswith(ZSTD_MAGIC) else data


def _zstd(data: bytes, limit: int) -> bytes:
    if 0 <= zstandard.frame_content_size(data) <= limit:  # in one go, without a window
        try:
            return zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError:
            pass  # cut off: as much as there is
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        return reader.read(limit)


_UNPACK: Final[Mapping[str, Callable[[bytes, int], bytes]]] = {
    "": lambda data, limit: data[:limit],
    "none": lambda data, limit: data[:limit],
    "zstd": _zstd,
    "lz4": lambda data, limit: bytes(lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=limit)),
    "bz2": lambda data, limit: bz2.BZ2Decompressor().decompress(data, max_length=limit),
}


class ChunkedFile(abc.ABC):
    """Reads a chunk at a time, and brings its messages into the order of their time.

    A damaged file leads the libraries to errors of any kind; they are caught where the rest of the file can
    be used. `counts` has messages by channel; `start_ns` and `end_ns` are of
    the first and last message, 0 without any.
    """

    magic: ClassVar[bytes]
    recover: ClassVar[str]  # the command that finds more in a damaged file
    chunk_kind: ClassVar[int]  # what the records are that are looked at
    message_kind: ClassVar[int]
    definitions: ClassVar[frozenset[int]]
    data_end: ClassVar[int] = -1  # the record without which the file breaks off; -1: the format has none

    def __init__(self, path: Path, notes: LogNotes, file: Path) -> None:
        """Open the file, called `path` in notes and errors, and find its chunks; its bytes are in `file`.

        Raises:
            LogError: nothing of it can be read.
            OSError: it cannot be opened.
        """
        self.path, self.notes = path, notes
        self.size = file.stat().st_size
        self.stream: BinaryIO = open(file, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - closed by `close`
        self._channels: dict[int, Channel] = {}
        self.found = Counter[int]()  # messages by channel, as the index says or a search has counted
        self._stated = Counter[int]()  # the same as the file's statistics say
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            try:
                self._chunks = self._index()
            except TorchperfError:
                raise
            except Exception:  # the index cannot be used
                self._channels, self.found = {}, Counter()
                self._chunks = search(self)
                self._note_undescribed()
            on_failure.pop_all()
        self._numbers = {channel: number for number, channel in self._channels.items()}
        self.counts = {channel: self.found[number] for number, channel in self._channels.items()}
        filled = [chunk for chunk in self._chunks if chunk.numbers]
        self.start_ns = min((chunk.start_ns for chunk in filled), default=0)
        self.end_ns = max((chunk.end_ns for chunk in filled), default=0)
        notes.set_back(path, ((chunk.start_ns, chunk.end_ns, chunk.count) for chunk in filled))

    def _note_undescribed(self) -> None:
        for number in self._stated.keys() - self._channels.keys():
            count = self._stated[number]
            what = f"{count:,} messages of channel {number}, which it does not describe, are left out"
            self.notes.lost(self.path, ("channel", number), what, messages=count)
        # what else the statistics have and the file has not is noted when the file has been read
        self.found |= self._stated

    @abc.abstractmethod
    def _index(self) -> list[Chunk]:
        """The chunks in the order of the file, from the index at its end; takes in channels and counts."""

    @abc.abstractmethod
    def records(self, stream: BinaryIO, begin: int, end: int) -> Records:
        """The records between two offsets, the stream at the data of each.

        Only a chunk may lead beyond the end.
        """

    @abc.abstractmethod
    def learn(self, stream: BinaryIO, begin: int, end: int) -> None:
        """Take in a definition of a channel that lies here."""

    @abc.abstractmethod
    def _opened(self, chunk: Chunk) -> tuple[BinaryIO, int, int, bool]:
        """A stream of a chunk's records, from where to where, and whether the file breaks off in it."""

    def spans(self, longest_ns: int) -> Iterator[Span]:
        """When the file has how many messages; of what lasts for longer than this, of each message."""
        for chunk in self._chunks:
            if chunk.end_ns - chunk.start_ns <= longest_ns:
                channels = frozenset(self._channels[number] for number in chunk.numbers)
                yield Span(chunk.start_ns, chunk.end_ns, chunk.count, channels)
                continue
            for number, t_ns, _ in self.walk(chunk, None):
                yield Span(t_ns, t_ns, 1, frozenset({self._channels[number]}))

    def parts(self, channels: Collection[Channel], start_ns: float, end_ns: float) -> Iterator[Part]:
        """What has to be read for these channels and this time range, `start_ns <= t_ns < end_ns`."""
        numbers = {self._numbers[channel] for channel in channels if channel in self._numbers}
        for chunk in self._chunks:
            if chunk.end_ns >= start_ns and chunk.start_ns < end_ns and chunk.numbers & numbers:
                yield chunk.start_ns, partial(self._messages, chunk, numbers, start_ns, end_ns)

    def close(self) -> None:
        self.stream.close()

    def _messages(
        self, chunk: Chunk, numbers: Collection[int], start_ns: float, end_ns: float
    ) -> Iterator[RawMessage]:
        messages = deque(
            RawMessage(t_ns, self._channels[number], data)
            for number, t_ns, data in self.walk(chunk, numbers)
            if start_ns <= t_ns < end_ns
        )
        self.notes.set_back(self.path, ((message.t_ns, message.t_ns, 1) for message in messages))
        messages = deque(sorted(messages, key=itemgetter(0)))
        while messages:  # what has been given out is not held on to
            yield messages.popleft()

    def walk(self, chunk: Chunk, numbers: Collection[int] | None) -> Iterator[tuple[int, int, bytes]]:
        """The messages of these channels in the order of the file: number of the channel, time in ns, data.

        None: of all, without their data, to count them and learn their channels. Damage ends it, and is noted.
        """
        used, cut, damage = 0, False, ""
        try:
            stream, begin, end, cut = (
                (self.stream, chunk.offset, chunk.end, False) if chunk.loose else self._opened(chunk)
            )
            for kind, at, after, number, t_ns in self.records(stream, begin, end):
                if kind != self.message_kind:
                    if numbers is None and kind in self.definitions:
                        self.learn(stream, at, after)
                elif numbers is None or number in numbers:
                    yield number, t_ns, b"" if numbers is None else stream.read(after - stream.tell())
                    used += 1
        except (OSError, TorchperfError):
            raise
        except Exception as error:
            damage = str(error) or type(error).__name__
        if cut:
            damage = "the file breaks off in it"
        if damage:
            left_out = f"its first {used} messages are used" if used else "it is left out"
            why = f"the chunk at offset {chunk.offset:,} is damaged: {damage}; {left_out}"
            self.notes.lost(self.path, chunk.offset, why, size_bytes=chunk.end - chunk.offset, chunks=1)


def _indexed(index: mcap_records.ChunkIndex) -> int:
    """How many messages of a chunk have an entry in its message index, by the length of that.

    Raises:
        Damaged: the index of a channel is not named.
    """
    entries_bytes = index.message_index_length - _INDEX_HEAD_BYTES * len(index.message_index_offsets)
    count, left_over = divmod(entries_bytes, _INDEX_ENTRY_BYTES)
    if left_over:
        raise Damaged("the index does not name every channel of a chunk")
    return count


class McapFile(ChunkedFile):
    magic, recover = MCAP_MAGIC, "mcap recover"
    chunk_kind, message_kind, data_end = Opcode.CHUNK, Opcode.MESSAGE, Opcode.DATA_END
    definitions = frozenset({Opcode.SCHEMA, Opcode.CHANNEL})

    def _index(self) -> list[Chunk]:
        self._schemas: dict[int, mcap_records.Schema] = {}
        summary = SeekingReader(self.stream, record_size_limit=self.size).get_summary()
        if summary is None or summary.statistics is None:
            raise Damaged("it has no summary")
        self._schemas = summary.schemas
        self._channels = {number: self._channel(record) for number, record in summary.channels.items()}
        self.found.update(summary.statistics.channel_message_counts)
        self._stated.update(self.found)
        chunks = [
            Chunk(
                i.chunk_start_offset,
                i.chunk_start_offset + i.chunk_length,
                i.message_start_time,
                i.message_end_time,
                frozenset(i.message_index_offsets),
                _indexed(i),
            )
            for i in sorted(summary.chunk_indexes, key=lambda index: index.chunk_start_offset)
        ]
        if sum(chunk.count for chunk in chunks) != summary.statistics.message_count:
            raise Damaged("the index does not have every message")
        indexed = frozenset[int]().union(*(chunk.numbers for chunk in chunks))
        is_known = indexed == {*+self.found} and indexed <= self._channels.keys()
        if not is_known or max((chunk.end for chunk in chunks), default=0) > self.size:
            raise Damaged("the summary does not name every chunk")
        return chunks

    def records(self, stream: BinaryIO, begin: int, end: int) -> Records:
        while begin < end:
            stream.seek(begin)
            opcode, length = _RECORD.unpack(stream.read(_RECORD.size))
            after = begin + _RECORD.size + length
            too_long = after > end and opcode != Opcode.CHUNK
            if not opcode or too_long or (opcode == Opcode.MESSAGE and length < _MESSAGE.size):
                raise Damaged(
                    "the file breaks off in a record" if too_long else "one of its records is not sound"
                )
            number = t_ns = 0
            if opcode == Opcode.MESSAGE:
                number, _, t_ns, _ = _MESSAGE.unpack(stream.read(_MESSAGE.size))
            yield opcode, begin, after, number, t_ns
            begin = after

    def learn(self, stream: BinaryIO, begin: int, end: int) -> None:
        stream.seek(begin)
        opcode, _ = _RECORD.unpack(stream.read(_RECORD.size))
        content = ReadDataStream(io.BytesIO(stream.read(end - stream.tell())))
        if opcode == Opcode.SCHEMA:
            schema = mcap_records.Schema.read(content)
            self._schemas[schema.id] = schema
        else:
            record = mcap_records.Channel.read(content)
            self._channels.setdefault(record.id, self._channel(record))

    def _channel(self, record: mcap_records.Channel) -> Channel:
        schema = self._schemas.get(record.schema_id) or _NO_SCHEMA
        digest, qos = (record.metadata.get(key, "") for key in ("topic_type_hash", "offered_qos_profiles"))
        text, encoding = schema.data.decode(errors="replace"), record.message_encoding
        return Channel(
            record.topic, ros2_name(schema.name), encoding, text, schema.encoding, digest, is_latched(qos)
        )

    def _opened(self, chunk: Chunk) -> tuple[BinaryIO, int, int, bool]:
        self.stream.seek(chunk.offset)
        opcode, _, _, _, raw_bytes, crc, letters = _CHUNK.unpack(self.stream.read(_CHUNK.size))
        compression = self.stream.read(min(letters, 8)).decode()
        data_bytes = int.from_bytes(self.stream.read(8), "little")
        begin = self.stream.tell()
        here = min(data_bytes, chunk.end - begin)
        cut = here < data_bytes
        if opcode != Opcode.CHUNK or here < 0:
            raise Damaged("there is no chunk")
        if not compression and (cut or not crc):  # without a copy
            return self.stream, begin, begin + here, cut
        raw = unpacked(compression, self.stream.read(here), raw_bytes, whole=not cut)
        if crc and not cut and zlib.crc32(raw) != crc:
            raise Damaged("its checksum does not fit")
        return io.BytesIO(raw), 0, len(raw), cut


class Ros1Bag(ChunkedFile):
    """One `.bag` file of version 2.0.

    The index of the messages in a chunk is not used, only that of the chunks.
    """

    magic, recover = ROS1_MAGIC, "rosbag reindex"
    chunk_kind, message_kind, definitions = (
        RecordType.CHUNK,
        RecordType.MSGDATA,
        frozenset({RecordType.CONNECTION}),
    )

    def _index(self) -> list[Chunk]:
        bag = self._reader(self.stream)
        self.stream.seek(len(ROS1_MAGIC))
        head = Header.read(self.stream, RecordType.BAGHEADER)
        if head.get("encryptor"):
            raise LogError(f"log {self.path}: is encrypted; decrypt it with `rosbag decrypt`")
        at = head.get_uint64("index_pos")
        for _ in range(head.get_uint32("conn_count")):
            self.learn(self.stream, at, self.size)
            at = self.stream.tell()
        self.stream.seek(at)
        infos = [bag.read_chunk_info() for _ in range(head.get_uint32("chunk_count"))]
        known = all(info.connection_counts.keys() <= self._channels.keys() for info in infos)
        if self.stream.tell() != self.size or not known:
            raise Damaged("the index is not whole")
        chunks = []
        for info in infos:
            self.stream.seek(info.pos)
            chunk = bag.read_chunk()
            end, numbers = chunk.datapos + chunk.datasize, frozenset(info.connection_counts)
            count = sum(info.connection_counts.values())
            chunks.append(Chunk(info.pos, end, info.start_time, info.end_time - 1, numbers, count))
            self.found.update(info.connection_counts)
        return chunks

    def _reader(self, stream: Any) -> Reader:  # noqa: ANN401 - a binary stream
        """The reader of `rosbags` for single records of a stream.

        As a whole it would hold an index of all messages.
        """
        bag = Reader(self.path)
        bag.bio = stream
        return bag

    def records(self, stream: BinaryIO, begin: int, end: int) -> Records:
        while begin < end:
            stream.seek(begin)
            header = Header.read(stream)
            length, kind = read_uint32(stream), header.get_uint8("op")
            after = stream.tell() + length
            if after > end and kind != RecordType.CHUNK:
                raise Damaged("the file breaks off in a record")
            is_message = kind == RecordType.MSGDATA
            yield (
                kind,
                begin,
                after,
                *((header.get_uint32("conn"), header.get_time("time")) if is_message else (0, 0)),
            )
            begin = after

    def learn(self, stream: BinaryIO, begin: int, end: int) -> None:
        stream.seek(begin)
        found = self._reader(stream).read_connection()
        latched = isinstance(found.ext, ConnectionExtRosbag1) and found.ext.latching == 1
        text = found.msgdef.data
        channel = Channel(
            found.topic,
            ros2_name(found.msgtype),
            "ros1",
            text,
            "ros1msg" if text else "",
            found.digest,
            latched,
        )
        self._channels.setdefault(found.id, channel)

    def _opened(self, chunk: Chunk) -> tuple[BinaryIO, int, int, bool]:
        self.stream.seek(chunk.offset)
        head = Header.read(self.stream, RecordType.CHUNK)
        size = read_uint32(self.stream)
        data = self.stream.read(min(size, self.size))
        cut = len(data) < size
        raw = unpacked(head.get_string("compression"), data, head.get_uint32("size"), whole=not cut)
        return io.BytesIO(raw), 0, len(raw), cut
