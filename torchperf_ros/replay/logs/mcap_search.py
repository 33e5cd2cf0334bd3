"""A search for the chunks and messages of an MCAP file that has no index, or a damaged one."""

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO, Final

from mcap.opcode import Opcode

from torchperf_ros.replay.logs.log_storage import Chunk, Damaged
from torchperf_ros.replay.logs.mcap_index import MAGIC, MESSAGE, RECORD, ChannelTable, chunk_head

_LAST_OPCODE: Final = int(Opcode.DATA_END)
_FIRST_PRIVATE: Final = 0x80
_LOOSE_BYTES: Final = 1 << 20
_WINDOW_BYTES: Final = 1 << 20
_CANDIDATE: Final = re.compile(rb"(?=[\x05\x06].{5}\x00\x00\x00)", re.DOTALL)
"""A message or a chunk shorter than a TiB begins like this; a look ahead, as candidates may overlap."""


class McapSearch:
    """Goes through a file from record to record; after a damaged one it goes on at the next chunk or message."""

    def __init__(self, file: BinaryIO, size: int, table: ChannelTable) -> None:
        """Take an open file of this size, and the table that learns its channels."""
        self._file = file
        self._size = size
        self._table = table
        self._in_summary = self._proved = False
        self.chunks: list[Chunk] = []
        self.uncounted: set[int] = set()
        self.skipped: list[tuple[int, int]] = []

    def run(self) -> None:
        """Fill `chunks`, `uncounted` (which of them nobody has counted) and `skipped` (from where to where)."""
        at, before = len(MAGIC), len(MAGIC)
        while at < self._size:
            if self._size - at == len(MAGIC) and self._read(at, len(MAGIC)) == MAGIC:
                return
            try:
                end = self._record(at)
            except Damaged:
                self._doubt_last()
                found = self._next_sound(before)
                self.skipped.append((at, max(found, at)))
                at = before = found
                continue
            # What a record with a wrong length leads over is searched once more; a chunk or message has proved itself.
            before = end if self._proved else at + 1
            at = end
        self._doubt_last()

    def _doubt_last(self) -> None:
        """The indexes of the last chunk's messages may be missing: whoever reads the chunk has to count."""
        if self.chunks and not self.chunks[-1].loose:
            self.uncounted.add(len(self.chunks) - 1)

    def _read(self, at: int, count: int) -> bytes:
        self._file.seek(at)
        return self._file.read(count)

    def _record(self, at: int) -> int:
        """Take in the record at an offset; returns its end."""
        self._proved = False
        head = self._read(at, RECORD.size)
        if len(head) < RECORD.size:
            msg = "the file ends in a record"
            raise Damaged(msg)
        opcode, length = RECORD.unpack(head)
        end: int = at + RECORD.size + length
        if opcode == Opcode.CHUNK:
            chunk = chunk_head(self._file, at)
            self.uncounted.add(len(self.chunks))
            self.chunks.append(Chunk(at, min(end, self._size), chunk.start_ns, chunk.end_ns, {}))
            self._proved = True
            return min(end, self._size)
        if end > self._size or not (0 < opcode <= _LAST_OPCODE or opcode >= _FIRST_PRIVATE):
            msg = "there is no sound record"
            raise Damaged(msg)
        if opcode == Opcode.MESSAGE:
            self._message(at, end)
            self._proved = True
        elif opcode == Opcode.MESSAGE_INDEX and self.chunks:
            self._count(self._read(at + RECORD.size, 6), length)
        elif opcode == Opcode.DATA_END:
            self._in_summary = True
        elif opcode in {Opcode.SCHEMA, Opcode.CHANNEL} and not self._in_summary:  # a summary that nobody vouches for
            self._table.learn(opcode, self._read(at + RECORD.size, length))
        return end

    def _message(self, at: int, end: int) -> None:
        head = self._file.read(MESSAGE.size)
        number, _, t_ns, _ = MESSAGE.unpack(head) if end - at >= RECORD.size + MESSAGE.size else (-1, 0, 0, 0)
        if number not in self._table.channels:
            msg = "a message of no known channel"
            raise Damaged(msg)
        last = self.chunks[-1] if self.chunks else None
        if last is None or not last.loose or last.end != at or at - last.offset > _LOOSE_BYTES:
            self.chunks.append(Chunk(at, end, t_ns, t_ns, {number: 1}, loose=True))
            return
        counts = {**last.counts, number: last.counts.get(number, 0) + 1}
        times = {"start_ns": min(last.start_ns, t_ns), "end_ns": max(last.end_ns, t_ns)}
        self.chunks[-1] = replace(last, end=end, counts=counts, **times)

    def _count(self, head: bytes, length: int) -> None:
        number, size = struct.unpack("<HI", head) if length >= len(head) else (0, 0)
        if size + 6 != length:
            msg = "an index of messages contradicts itself"
            raise Damaged(msg)
        chunk = self.chunks[-1]
        if not chunk.loose:
            self.uncounted.discard(len(self.chunks) - 1)
            self.chunks[-1] = replace(chunk, counts={**chunk.counts, number: size // 16})

    def _next_sound(self, begin: int) -> int:
        """Offset of the next chunk or message that proves itself, else the end of the file."""
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

    def _is_message(self, at: int) -> bool:
        """Of a channel that is known, and with another record, or the end of the file, after it."""
        head = self._read(at, RECORD.size + MESSAGE.size)
        if len(head) < RECORD.size + MESSAGE.size:
            return False
        _, length = RECORD.unpack_from(head)
        number, *_ = MESSAGE.unpack_from(head, RECORD.size)
        end = at + RECORD.size + length
        if length < MESSAGE.size or number not in self._table.channels or end > self._size:
            return False
        after = self._read(end, RECORD.size)
        if len(after) < RECORD.size:
            return not after or after == MAGIC
        opcode, length = RECORD.unpack(after)
        return bool(0 < opcode <= _LAST_OPCODE and end + RECORD.size + length <= self._size)

    def _candidates(self, begin: int) -> Iterator[int]:
        at = begin
        while at < self._size:
            window = self._read(at, _WINDOW_BYTES + RECORD.size - 1)
            for match in _CANDIDATE.finditer(window):
                yield at + match.start()
            at += _WINDOW_BYTES
