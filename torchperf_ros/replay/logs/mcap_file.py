"""An MCAP file: read by its index if it has one, searched from begin to end if not, a chunk at a time."""

import io
import re
import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.records import Channel as ChannelRecord
from mcap.records import Schema

from torchperf_ros.replay.logs.chunk_compression import unpacked as unpacked_chunk
from torchperf_ros.replay.logs.chunked_file import ChunkedFile, Walk
from torchperf_ros.replay.logs.log_notes import LogNotes
from torchperf_ros.replay.logs.log_storage import Chunk, Damaged
from torchperf_ros.replay.logs.mcap_records import MAGIC, MESSAGE, RECORD, channel_of, chunk_head, summary_index

_LAST_OPCODE: Final = int(Opcode.DATA_END)
_FIRST_PRIVATE: Final = 0x80
_LOOSE_BYTES: Final = 1 << 20
_WINDOW_BYTES: Final = 1 << 20
_CANDIDATE: Final = re.compile(rb"(?=[\x05\x06].{5}\x00\x00\x00)", re.DOTALL)
"""A message or a chunk shorter than a TiB begins like this; a look ahead, as candidates may overlap."""


class McapFile(ChunkedFile):
    """One `.mcap` file, with chunks or without, whole or damaged."""

    kind, magic = "an MCAP file", MAGIC

    def __init__(self, path: Path, notes: LogNotes, unpacked: Path | None = None, *, check_crc: bool = True) -> None:
        """Open it; see `ChunkedFile`.

        Args:
            path: the file, as it is called in what is said.
            notes: told of what is wrong.
            unpacked: where its bytes are, if it was compressed as a whole.
            check_crc: whether chunks are compared with their checksums, if they have them.
        """
        self._check_crc = check_crc
        self._schemas: dict[int, Schema] = {}
        self._in_summary = False
        super().__init__(path, notes, unpacked)

    def _index(self) -> None:
        self._channels, self._chunks = summary_index(self._file, self._size)

    # -- the search ---------------------------------------------------------------------------------------------------

    def _take(self, at: int) -> tuple[int, bool]:
        if self._size - at == len(MAGIC) and self._read(at, len(MAGIC)) == MAGIC:
            return self._size, True
        head = self._read(at, RECORD.size)
        if len(head) < RECORD.size:
            msg = "the file ends in a record"
            raise Damaged(msg)
        opcode, length = RECORD.unpack(head)
        end: int = at + RECORD.size + length
        if opcode == Opcode.CHUNK:
            chunk = chunk_head(self._file, at)
            end = min(end, self._size)
            self._chunks.append(Chunk(at, end, chunk.start_ns, chunk.end_ns, {}))
        elif end > self._size or not (0 < opcode <= _LAST_OPCODE or opcode >= _FIRST_PRIVATE):
            msg = "there is no sound record"
            raise Damaged(msg)
        elif opcode == Opcode.MESSAGE:
            self._take_message(at, end)
        elif opcode == Opcode.MESSAGE_INDEX and self._chunks:
            self._take_count(length)
        elif opcode == Opcode.DATA_END:
            self._in_summary = True
        elif opcode in {Opcode.SCHEMA, Opcode.CHANNEL} and not self._in_summary:  # a summary that nobody vouches for
            self._learn(opcode, self._file.read(length))
        return end, opcode in {Opcode.CHUNK, Opcode.MESSAGE}

    def _take_message(self, at: int, end: int) -> None:
        """A message outside of chunks; those that follow each other are read together."""
        head = self._file.read(MESSAGE.size)
        number, _, t_ns, _ = MESSAGE.unpack(head) if end - at >= RECORD.size + MESSAGE.size else (-1, 0, 0, 0)
        if number not in self._channels:
            msg = "a message of no known channel"
            raise Damaged(msg)
        last = self._chunks[-1] if self._chunks else None
        if last is None or not last.loose or last.end != at or at - last.offset > _LOOSE_BYTES:
            self._chunks.append(Chunk(at, end, t_ns, t_ns, {number: 1}, loose=True))
            return
        last.counts[number] = last.counts.get(number, 0) + 1
        self._chunks[-1] = replace(last, end=end, start_ns=min(last.start_ns, t_ns), end_ns=max(last.end_ns, t_ns))

    def _take_count(self, length: int) -> None:
        """How many messages of a channel the last chunk has: its index of them has 16 bytes for each."""
        head = self._file.read(6)
        number, size = struct.unpack("<HI", head) if length >= len(head) else (0, 0)
        if size + 6 != length:
            msg = "an index of messages contradicts itself"
            raise Damaged(msg)
        if not self._chunks[-1].loose:
            self._chunks[-1].counts[number] = size // 16

    def _learn(self, opcode: int, body: bytes) -> None:
        """Take in a schema or a channel.

        Raises:
            Damaged: it cannot be understood.
        """
        stream = ReadDataStream(io.BytesIO(body))
        try:
            if opcode == Opcode.SCHEMA:
                schema = Schema.read(stream)
                self._schemas[schema.id] = schema
            else:
                record = ChannelRecord.read(stream)
                if record.id not in self._channels:
                    self._channels[record.id] = channel_of(record, self._schemas.get(record.schema_id))
        except Exception as error:  # damaged bytes may lead the parser to any error
            msg = f"a schema or channel cannot be understood ({type(error).__name__})"
            raise Damaged(msg) from error

    def _next_sound(self, begin: int) -> int:
        for at in self._candidates(begin):
            try:
                if self._read(at, 1)[0] == Opcode.CHUNK:
                    chunk_head(self._file, at)
                    return at
                if self._is_message(at):
                    return at
            except Damaged:
                continue
        return self._size

    def _candidates(self, begin: int) -> Iterator[int]:
        for at in range(begin, self._size, _WINDOW_BYTES):
            window = self._read(at, _WINDOW_BYTES + RECORD.size - 1)
            yield from (at + match.start() for match in _CANDIDATE.finditer(window))

    def _is_message(self, at: int) -> bool:
        """Of a channel that is known, and with another record, or the end of the file, after it."""
        head = self._read(at, RECORD.size + MESSAGE.size)
        if len(head) < RECORD.size + MESSAGE.size:
            return False
        _, length = RECORD.unpack_from(head)
        number, *_ = MESSAGE.unpack_from(head, RECORD.size)
        end = at + RECORD.size + length
        if length < MESSAGE.size or number not in self._channels or end > self._size:
            return False
        after = self._read(end, RECORD.size)
        if len(after) < RECORD.size:
            return not after or after == MAGIC
        opcode, length = RECORD.unpack(after)
        return bool(0 < opcode <= _LAST_OPCODE and end + RECORD.size + length <= self._size)

    # -- a chunk ------------------------------------------------------------------------------------------------------

    def _walk(self, chunk: Chunk, numbers: Collection[int] | None) -> Walk:
        stream, left, cut = self._opened(chunk)
        while left > 0:
            head = stream.read(RECORD.size)
            opcode, length = RECORD.unpack(head) if len(head) == RECORD.size else (0, left)
            left -= RECORD.size + length
            if left < 0 or not opcode or (opcode == Opcode.MESSAGE and length < MESSAGE.size):
                left = -1
                break
            if opcode == Opcode.MESSAGE:
                number, _, t_ns, _ = MESSAGE.unpack(stream.read(MESSAGE.size))
                length -= MESSAGE.size
                if numbers is None:
                    yield number, t_ns, b""
                elif number in numbers:
                    yield number, t_ns, stream.read(length)
                    continue
            elif numbers is None and opcode in {Opcode.SCHEMA, Opcode.CHANNEL}:
                self._learn(opcode, stream.read(length))
                continue
            stream.seek(length, io.SEEK_CUR)
        if cut or left < 0:
            msg = "the file breaks off in it" if cut else "one of its records is not sound"
            raise Damaged(msg)

    def _opened(self, chunk: Chunk) -> tuple[BinaryIO, int, bool]:
        """A stream of the chunk's records, its bytes, and whether the file breaks off in it."""
        if chunk.loose:
            self._file.seek(chunk.offset)
            return self._file, chunk.end - chunk.offset, False
        head = chunk_head(self._file, chunk.offset)
        here = min(head.data_bytes, self._size - head.data_at)
        cut = here < head.data_bytes
        self._file.seek(head.data_at)
        if not head.compression and (cut or not head.crc or not self._check_crc):
            return self._file, here, cut
        raw = unpacked_chunk(head.compression, self._file.read(here), head.raw_bytes, whole=not cut)
        if self._check_crc and head.crc and not cut and zlib.crc32(raw) != head.crc:
            msg = "its checksum does not fit"
            raise Damaged(msg)
        return io.BytesIO(raw), len(raw), cut
