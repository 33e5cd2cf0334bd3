"""The records of an MCAP file: heads of chunks, schemas and channels, and the summary at its end."""

import struct
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import BinaryIO, Final

from mcap.opcode import Opcode
from mcap.reader import SeekingReader
from mcap.records import Channel as ChannelRecord
from mcap.records import ChunkIndex, Schema

from torchperf_ros.replay.logs.log_storage import MAX_CHUNK_BYTES, Channel, Chunk, Damaged, is_latched

MAGIC: Final = b"\x89MCAP0\r\n"
RECORD: Final = struct.Struct("<BQ")
"""Of each record: what it is, and how many bytes follow."""
MESSAGE: Final = struct.Struct("<HIQQ")
"""Before a message's data: channel, sequence, when it was logged, when it was published."""
_CHUNK: Final = struct.Struct("<QQQII")
_FOOTER: Final = struct.Struct("<BQQQI")
_COMPRESSIONS: Final = (b"", b"zstd", b"lz4")
_CHUNK_HEAD: Final = _CHUNK.size + 8  # without the name of the compression, before its last 8 bytes


@dataclass(frozen=True)
class ChunkHead:
    """What stands before the data of a chunk: where the data is, what it is packed with, and its size and CRC."""

    start_ns: int
    end_ns: int
    raw_bytes: int
    crc: int
    compression: str
    data_at: int
    data_bytes: int


def chunk_head(file: BinaryIO, offset: int) -> ChunkHead:
    """Read the head of a chunk's record.

    Raises:
        Damaged: there is no chunk.
    """
    file.seek(offset)
    data = file.read(RECORD.size + _CHUNK_HEAD + 4)
    if len(data) < RECORD.size + _CHUNK_HEAD:
        msg = "the file ends in the head of a chunk"
        raise Damaged(msg)
    opcode, length = RECORD.unpack_from(data)
    start_ns, end_ns, raw_bytes, crc, letters = _CHUNK.unpack_from(data, RECORD.size)
    at = RECORD.size + _CHUNK.size
    compression = data[at : at + min(letters, 4)]
    known = compression in _COMPRESSIONS and len(compression) == letters and len(data) >= at + letters + 8
    if opcode != Opcode.CHUNK or not known or raw_bytes > MAX_CHUNK_BYTES:
        msg = "there is no sound chunk"
        raise Damaged(msg)
    (data_bytes,) = struct.unpack_from("<Q", data, at + letters)
    if length != _CHUNK_HEAD + letters + data_bytes or (not letters and raw_bytes != data_bytes):
        msg = "the sizes of the chunk contradict each other"
        raise Damaged(msg)
    return ChunkHead(start_ns, end_ns, raw_bytes, crc, compression.decode(), offset + at + letters + 8, data_bytes)


def channel_of(record: ChannelRecord, schema: Schema | None) -> Channel:
    """A channel and its schema as a `Channel`."""
    return Channel(
        record.topic,
        schema.name if schema else "",
        record.message_encoding,
        schema.data.decode(errors="replace") if schema else "",
        schema.encoding if schema else "",
        record.metadata.get("topic_type_hash", ""),
        is_latched(record.metadata.get("offered_qos_profiles", "")),
    )


def summary_index(file: BinaryIO, size: int) -> tuple[dict[int, Channel], list[Chunk]]:
    """Channels and chunks that the summary at the end of a file names.

    Raises:
        Damaged: there is none, or a wrong one.
    """
    try:
        whole = _summary_is_whole(file, size)
        file.seek(0)
        summary = SeekingReader(file, record_size_limit=size).get_summary() if whole else None
    except Exception as error:  # damaged bytes may lead the parser to any error
        msg = f"the summary cannot be understood ({type(error).__name__})"
        raise Damaged(msg) from error
    if summary is not None and summary.statistics is not None:
        channels = {n: channel_of(c, summary.schemas.get(c.schema_id)) for n, c in summary.channels.items()}
        chunks = sorted(map(_indexed, summary.chunk_indexes), key=lambda chunk: chunk.offset)
        counts: Counter[int] = Counter()
        for chunk in chunks:
            counts.update(chunk.counts)
        told = {number: count for number, count in summary.statistics.channel_message_counts.items() if count}
        if +counts == told and counts.keys() <= channels.keys() and all(chunk.end <= size for chunk in chunks):
            return channels, chunks
    msg = "the summary is not whole"
    raise Damaged(msg)


def _summary_is_whole(file: BinaryIO, size: int) -> bool:
    """Whether the summary has the CRC that the footer names, if it names one."""
    end = size - len(MAGIC)
    file.seek(end - _FOOTER.size)
    opcode, _, begin, _, crc = _FOOTER.unpack(file.read(_FOOTER.size))
    if opcode != Opcode.FOOTER or not 0 < begin < end:
        return False
    file.seek(begin)
    return not crc or zlib.crc32(file.read(end - 4 - begin)) == crc


def _indexed(index: ChunkIndex) -> Chunk:
    """The messages of a channel are as many as its index of messages has entries, of 16 bytes."""
    end = index.chunk_start_offset + index.chunk_length
    places = sorted((offset, number) for number, offset in index.message_index_offsets.items())
    ends = [offset for offset, _ in places[1:]] + [end + index.message_index_length]
    counts = {
        number: (following - offset - RECORD.size - 6) // 16
        for (offset, number), following in zip(places, ends, strict=True)
    }
    return Chunk(index.chunk_start_offset, end, index.message_start_time, index.message_end_time, counts)
