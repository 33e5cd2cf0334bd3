"""An MCAP file: read by its index if it has one, searched from begin to end if not, a chunk at a time."""

import io
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from mcap.opcode import Opcode

from torchperf_ros.replay.logs.chunk_compression import unpacked as unpacked_chunk
from torchperf_ros.replay.logs.chunked_file import ChunkedFile, Walk
from torchperf_ros.replay.logs.log_notes import LogNotes
from torchperf_ros.replay.logs.log_storage import Channel, Chunk, Damaged
from torchperf_ros.replay.logs.mcap_index import MESSAGE, RECORD, ChannelTable, chunk_head, summary_index
from torchperf_ros.replay.logs.mcap_search import McapSearch


class McapFile(ChunkedFile):
    """One `.mcap` file, with chunks or without, whole or damaged."""

    def __init__(self, path: Path, notes: LogNotes, unpacked: Path | None = None, *, check_crc: bool = True) -> None:
        """Open it; see `ChunkedFile`.

        Args:
            path: the file, as it is called in what is said.
            notes: told of what is wrong.
            unpacked: where its bytes are, if it was compressed as a whole.
            check_crc: whether chunks are compared with their checksums, if they have them.
        """
        self._check_crc = check_crc
        self._table = ChannelTable()
        super().__init__(path, notes, unpacked)

    def _found(self) -> tuple[Mapping[int, Channel], Sequence[Chunk]]:
        return summary_index(self._file, self._size) or self._searched()

    def _searched(self) -> tuple[Mapping[int, Channel], Sequence[Chunk]]:
        """Chunks that nobody has counted, or whose channels are not known yet, are read for that."""
        self._note_search()
        search = McapSearch(self._file, self._size, self._table)
        search.run()
        for offset, end in search.skipped:
            self._note_skipped(offset, end)
        if search.skipped and not search.chunks:
            raise self._nothing("MCAP file")
        channels = self._table.channels
        chunks = [
            self._counted(chunk) if index in search.uncounted or not chunk.counts.keys() <= channels.keys() else chunk
            for index, chunk in enumerate(search.chunks)
        ]
        return channels, chunks

    def _walk(self, chunk: Chunk, numbers: Collection[int] | None) -> Walk:
        stream, left, cut = self._opened(chunk)
        while left > 0:
            head = stream.read(RECORD.size)
            opcode, length = RECORD.unpack(head) if len(head) == RECORD.size else (0, left)
            left -= RECORD.size + length
            if left < 0 or (opcode == Opcode.MESSAGE and length < MESSAGE.size):
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
                self._table.learn(opcode, stream.read(length))
                continue
            stream.seek(length, io.SEEK_CUR)
        if cut or left < 0:
            msg = "the file breaks off in it" if cut else "one of its records leads out of it"
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
