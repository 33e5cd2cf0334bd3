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
from dataclasses import dataclass, replace
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
    Damaged,
    LogError,
    LogNotes,
    Part,
    RawMessage,
    Span,
    is_latched,
    ros2_name,
)

MCAP_MAGIC: Final = b"\x89MCAP0\r\n"
ROS1_MAGIC: Final = b"#ROSBAG V2.0\n"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# A chunk that claims to be larger is damaged: recorders write chunks of about a MiB, or of one
# message.
_MAX_CHUNK_BYTES: Final = 1 << 31
_BUFFER_BYTES: Final = 1 << 16  # a larger message is read past the buffer, without a copy
_LOOSE_BYTES: Final = 1 << 20
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
# Messages in the order of the file: number of the channel, time in ns, data.
Walk = Iterator[tuple[int, int, bytes]]


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


@dataclass(frozen=True)
class Chunk:
    offset: int  # of its record, in bytes
    end: int  # likewise; that of the file if the file breaks off before
    start_ns: int = 0  # of its messages
    end_ns: int = 0
    numbers: frozenset[int] = frozenset()  # of the channels that have messages in it
    count: int = 0  # of its messages
    loose: bool = False  # True for messages outside of a chunk


class ChunkedFile(abc.ABC):
    """Reads a chunk at a time, and brings its messages into the order of their time.

    A damaged file leads the libraries to errors of any kind; they are caught where the rest of the file can
    be used. `counts` has messages by channel; `start_ns` and `end_ns` are of
    the first and last message, 0 without any.
    """

    _magic: ClassVar[bytes]
    _recover: ClassVar[str]  # the command that finds more in a damaged file
    _chunk: ClassVar[int]  # what the records are that are looked at
    _message: ClassVar[int]
    _definitions: ClassVar[frozenset[int]]
    _data_end: ClassVar[
        int
    ] = -1  # the record without which the file breaks off; -1: there is none in this format

    def __init__(self, path: Path, notes: LogNotes, file: Path) -> None:
        """Open the file, called `path` in notes and errors, and find its chunks; its bytes are in `file`.

        Raises:
            LogError: nothing of it can be read.
            OSError: it cannot be opened.
        """
        self.path = path
        self._notes = notes
        self._size = file.stat().st_size
        self._file: BinaryIO = open(file, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - closed by `close`
        self._channels: dict[int, Channel] = {}
        self._counts: Counter[int] = Counter()
        self._chunks: list[Chunk] = []
        self._stated = Counter[int]()  # messages by channel, as the file's statistics say
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            try:
                self._index()
            except TorchperfError:
                raise
            except Exception:  # the index cannot be used
                self._find_without_index()
            on_failure.pop_all()
        self._numbers = {channel: number for number, channel in self._channels.items()}
        self.counts = {channel: self._counts[number] for number, channel in self._channels.items()}
        filled = [chunk for chunk in self._chunks if chunk.numbers]
        self.start_ns = min((chunk.start_ns for chunk in filled), default=0)
        self.end_ns = max((chunk.end_ns for chunk in filled), default=0)

    @abc.abstractmethod
    def _index(self) -> None:
        """Take in channels, counts and chunks, in the order of the file, from the index at the end."""

    @abc.abstractmethod
    def _records(self, stream: BinaryIO, begin: int, end: int) -> Records:
        """The records between two offsets, the stream at the data of each.

        Only a chunk may lead beyond the end.
        """

    @abc.abstractmethod
    def _learn(self, stream: BinaryIO, begin: int, end: int) -> None:
        """Take in a definition of a channel that lies here."""

    @abc.abstractmethod
    def _opened(self, chunk: Chunk) -> tuple[BinaryIO, int, int, bool]:
        """A stream with the records of a chunk, from where to where, and whether the file breaks off in it."""

    def _find_without_index(self) -> None:
        self._channels, self._counts, self._chunks = {}, Counter(), []
        damage, sound = "", len(self._magic)
        try:
            for kind, begin, end, _, _ in self._records(self._file, sound, self._size):
                if kind == self._data_end:  # the summary that follows is not sound
                    break
                sound = min(end, self._size)
                if kind == self._chunk:
                    self._chunks.append(Chunk(begin, sound))
                elif kind in self._definitions:
                    self._learn(self._file, begin, end)
                elif (
                    kind == self._message
                ):  # outside of chunks; those that follow each other are read together
                    last = self._chunks[-1] if self._chunks else None
                    joins = (
                        last is not None and last.loose and last.end == begin < last.offset + _LOOSE_BYTES
                    )
                    offset = self._chunks.pop().offset if joins else begin
                    self._chunks.append(Chunk(offset, end, loose=True))
            else:
                damage = "the file breaks off" if self._data_end >= 0 else ""
        except (OSError, TorchperfError):
            raise
        except Exception as error:
            damage = str(error) or type(error).__name__
        hint = f"{damage}; `{self._recover}` may find more"
        if damage and not self._chunks:
            raise LogError(f"log {self.path}: nothing in it can be read: it is damaged: {hint}")
        self._notes.findings.unindexed += 1
        self._notes.note(f"log {self.path}: has no usable index, so it was searched from begin to end")
        if damage and (left := self._size - sound):
            why = f"its last {left:,} bytes, from offset {sound:,} on, are left out: {hint}"
            self._notes.lost(self.path, sound, why, size_bytes=left)
        self._chunks = [self._learned(chunk) for chunk in self._chunks]
        for number in self._stated.keys() - self._channels.keys():
            count = self._stated[number]
            what = f"{count:,} messages of channel {number}, which it does not describe, are left out"
            self._notes.lost(self.path, ("channel", number), what, messages=count)
        # what else the statistics have and the file has not is noted when the file has been read
        self._counts |= self._stated

    def _learned(self, chunk: Chunk) -> Chunk:
        found = list(self._noted(chunk, self._walk(chunk, None)))
        self._counts.update(number for number, _, _ in found)
        times, numbers = [t_ns for _, t_ns, _ in found], frozenset(number for number, _, _ in found)
        start_ns, end_ns = min(times, default=0), max(times, default=0)
        return replace(chunk, start_ns=start_ns, end_ns=end_ns, numbers=numbers, count=len(found))

    def spans(self, longest_ns: int) -> Iterator[Span]:
        """When the file has how many messages; of what lasts for longer than this, of each message."""
        for chunk in self._chunks:
            if chunk.end_ns - chunk.start_ns <= longest_ns:
                channels = frozenset(self._channels[number] for number in chunk.numbers)
                yield Span(chunk.start_ns, chunk.end_ns, chunk.count, channels)
                continue
            for number, t_ns, _ in self._noted(chunk, self._walk(chunk, None)):
                yield Span(t_ns, t_ns, 1, frozenset({self._channels[number]}))

    def parts(self, channels: Collection[Channel], start_ns: float, end_ns: float) -> Iterator[Part]:
        """What has to be read for these channels and this time range, `start_ns <= t_ns < end_ns`."""
        numbers = {self._numbers[channel] for channel in channels if channel in self._numbers}
        for chunk in self._chunks:
            if chunk.end_ns >= start_ns and chunk.start_ns < end_ns and chunk.numbers & numbers:
                yield chunk.start_ns, partial(self._messages, chunk, numbers, start_ns, end_ns)

    def close(self) -> None:
        self._file.close()

    def _messages(
        self, chunk: Chunk, numbers: Collection[int], start_ns: float, end_ns: float
    ) -> Iterator[RawMessage]:
        found = (
            RawMessage(t_ns, self._channels[number], data)
            for number, t_ns, data in self._noted(chunk, self._walk(chunk, numbers))
            if start_ns <= t_ns < end_ns
        )
        messages = deque(sorted(found, key=itemgetter(0)))
        while messages:  # what has been given out is not held on to
            yield messages.popleft()

    def _walk(self, chunk: Chunk, numbers: Collection[int] | None) -> Walk:
        """The messages of these channels.

        None: of all, without their data, to count them and learn their channels.
        """
        stream, begin, end, cut = (
            (self._file, chunk.offset, chunk.end, False) if chunk.loose else self._opened(chunk)
        )
        try:
            for kind, at, after, number, t_ns in self._records(stream, begin, end):
                if kind == self._message:
                    if numbers is None:
                        yield number, t_ns, b""
                    elif number in numbers:
                        yield number, t_ns, stream.read(after - stream.tell())
                elif numbers is None and kind in self._definitions:
                    self._learn(stream, at, after)
        except Exception as error:
            if not cut or isinstance(error, OSError):
                raise
        if cut:
            raise Damaged("the file breaks off in it")

    def _noted(self, chunk: Chunk, walk: Walk) -> Walk:
        used = 0
        try:
            for message in walk:
                yield message
                used += 1
        except (OSError, TorchperfError):
            raise
        except Exception as error:
            left_out = f"its first {used} messages are used" if used else "it is left out"
            why = (
                f"the chunk at offset {chunk.offset:,} is damaged: {error or type(error).__name__};"
                f" {left_out}"
            )
            self._notes.lost(self.path, chunk.offset, why, size_bytes=chunk.end - chunk.offset, chunks=1)


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
    _magic, _recover = MCAP_MAGIC, "mcap recover"
    _chunk, _message, _data_end = Opcode.CHUNK, Opcode.MESSAGE, Opcode.DATA_END
    _definitions = frozenset({Opcode.SCHEMA, Opcode.CHANNEL})

    def _index(self) -> None:
        self._schemas: dict[int, mcap_records.Schema] = {}
        summary = SeekingReader(self._file, record_size_limit=self._size).get_summary()
        if summary is None or summary.statistics is None:
            raise Damaged("it has no summary")
        self._schemas = summary.schemas
        self._channels = {number: self._channel(record) for number, record in summary.channels.items()}
        self._counts.update(summary.statistics.channel_message_counts)
        self._chunks = [
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
        self._stated.update(summary.statistics.channel_message_counts)
        if sum(chunk.count for chunk in self._chunks) != summary.statistics.message_count:
            raise Damaged("the index does not have every message")
        indexed = frozenset[int]().union(*(chunk.numbers for chunk in self._chunks))
        ends = [chunk.end for chunk in self._chunks]
        if (
            indexed != {*+self._counts}
            or not indexed <= self._channels.keys()
            or max(ends, default=0) > self._size
        ):
            raise Damaged("the summary does not name every chunk")

    def _records(self, stream: BinaryIO, begin: int, end: int) -> Records:
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

    def _learn(self, stream: BinaryIO, begin: int, end: int) -> None:
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
        self._file.seek(chunk.offset)
        opcode, _, _, _, raw_bytes, crc, letters = _CHUNK.unpack(self._file.read(_CHUNK.size))
        compression = self._file.read(min(letters, 8)).decode()
        data_bytes = int.from_bytes(self._file.read(8), "little")
        begin = self._file.tell()
        here = min(data_bytes, chunk.end - begin)
        cut = here < data_bytes
        if opcode != Opcode.CHUNK or here < 0:
            raise Damaged("there is no chunk")
        if not compression and (cut or not crc):  # without a copy
            return self._file, begin, begin + here, cut
        raw = unpacked(compression, self._file.read(here), raw_bytes, whole=not cut)
        if crc and not cut and zlib.crc32(raw) != crc:
            raise Damaged("its checksum does not fit")
        return io.BytesIO(raw), 0, len(raw), cut


class Ros1Bag(ChunkedFile):
    """One `.bag` file of version 2.0.

    The index of the messages in a chunk is not used, only that of the chunks.
    """

    _magic, _recover = ROS1_MAGIC, "rosbag reindex"
    _chunk, _message, _definitions = (
        RecordType.CHUNK,
        RecordType.MSGDATA,
        frozenset({RecordType.CONNECTION}),
    )

    def _index(self) -> None:
        bag = self._reader(self._file)
        self._file.seek(len(ROS1_MAGIC))
        head = Header.read(self._file, RecordType.BAGHEADER)
        if head.get("encryptor"):
            raise LogError(f"log {self.path}: is encrypted; decrypt it with `rosbag decrypt`")
        at = head.get_uint64("index_pos")
        for _ in range(head.get_uint32("conn_count")):
            self._learn(self._file, at, self._size)
            at = self._file.tell()
        self._file.seek(at)
        infos = [bag.read_chunk_info() for _ in range(head.get_uint32("chunk_count"))]
        known = all(info.connection_counts.keys() <= self._channels.keys() for info in infos)
        if self._file.tell() != self._size or not known:
            raise Damaged("the index is not whole")
        for info in infos:
            self._file.seek(info.pos)
            chunk = bag.read_chunk()
            end, numbers = chunk.datapos + chunk.datasize, frozenset(info.connection_counts)
            count = sum(info.connection_counts.values())
            self._chunks.append(Chunk(info.pos, end, info.start_time, info.end_time - 1, numbers, count))
            self._counts.update(info.connection_counts)

    def _reader(self, stream: Any) -> Reader:  # noqa: ANN401 - a binary stream
        """The reader of `rosbags` for single records of a stream.

        As a whole it would hold an index of all messages.
        """
        bag = Reader(self.path)
        bag.bio = stream
        return bag

    def _records(self, stream: BinaryIO, begin: int, end: int) -> Records:
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

    def _learn(self, stream: BinaryIO, begin: int, end: int) -> None:
        stream.seek(begin)
        found = self._reader(stream).read_connection()
        latched = isinstance(found.ext, ConnectionExtRosbag1) and found.ext.latching == 1
        text = found.msgdef.data
        channel = Channel(
            found.topic, found.msgtype, "ros1", text, "ros1msg" if text else "", found.digest, latched
        )
        self._channels.setdefault(found.id, channel)

    def _opened(self, chunk: Chunk) -> tuple[BinaryIO, int, int, bool]:
        self._file.seek(chunk.offset)
        head = Header.read(self._file, RecordType.CHUNK)
        size = read_uint32(self._file)
        data = self._file.read(min(size, self._size))
        cut = len(data) < size
        raw = unpacked(head.get_string("compression"), data, head.get_uint32("size"), whole=not cut)
        return io.BytesIO(raw), 0, len(raw), cut
