"""A log file made of chunks, by its index or searched for them: what MCAP files and ROS 1 bags have in common."""

import abc
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Final

from torchperf_ros.replay.logs.log_notes import LogNotes
from torchperf_ros.replay.logs.log_storage import Channel, Chunk, Damaged, Part, RawMessage, Storage

_BUFFER_BYTES: Final = 1 << 16  # a larger message is read past the buffer, without a copy
Walk = Iterator[tuple[int, int, bytes]]
"""Messages in the order of the file: number of the channel, time in ns, data."""


class ChunkedFile(Storage):
    """Reads a chunk at a time, and brings its messages into the order of their time.

    A subclass fills `_channels`, by number, and `_chunks`, in the order of the file.
    """

    def __init__(self, path: Path, notes: LogNotes, unpacked: Path | None = None) -> None:
        """Open the file and find its chunks.

        Args:
            path: the file, as it is called in what is said.
            notes: told of what is wrong.
            unpacked: where its bytes are, if it was compressed as a whole.

        Raises:
            LogError: nothing of it can be read.
            OSError: it cannot be opened.
        """
        self.path = path
        self._notes = notes
        self._size = (unpacked or path).stat().st_size
        self._file: BinaryIO = open(unpacked or path, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - closed by `close`
        self._channels: dict[int, Channel] = {}
        self._chunks: list[Chunk] = []
        try:
            self._find()
        except BaseException:
            self.close()
            raise
        self._numbers = {channel: number for number, channel in self._channels.items()}
        counts: Counter[int] = Counter()
        for chunk in self._chunks:
            counts.update(chunk.counts)
        self.counts = {channel: counts[number] for number, channel in self._channels.items()}
        filled = [chunk for chunk in self._chunks if any(chunk.counts.values())]
        self.start_ns = min((chunk.start_ns for chunk in filled), default=0)
        self.end_ns = max((chunk.end_ns for chunk in filled), default=0)

    @abc.abstractmethod
    def _index(self) -> None:
        """Take in channels and chunks from the index at the end.

        Raises:
            Damaged: there is none, or it is not sound.
        """

    @abc.abstractmethod
    def _take(self, at: int) -> tuple[int, bool]:
        """Take in the record at an offset; returns its end, and whether it proves by itself that it is one.

        Raises:
            Damaged: there is none.
        """

    @abc.abstractmethod
    def _next_sound(self, begin: int) -> int:
        """Offset of the next record that proves itself, else the end of the file."""

    @abc.abstractmethod
    def _walk(self, chunk: Chunk, numbers: Collection[int] | None) -> Walk:
        """The messages of these channels; None: of all, without their data, to count them and learn their channels.

        Raises:
            Damaged: the chunk is not sound here.
        """

    def _find(self) -> None:
        try:
            self._index()
        except Damaged:
            self._channels.clear()
            self._chunks.clear()
            self._search()

    def _search(self) -> None:
        """Go from record to record; after a damaged one go on at the next that proves itself.

        A chunk that nobody has counted, or whose channels are not known by then, is read for that.
        """
        at = again = len(self.magic)
        skipped = []
        while at < self._size:
            try:
                end, proved = self._take(at)
            except Damaged:
                self._doubt_last()
                found = self._next_sound(again)
                if found > at:
                    skipped.append((at, found))
                at = again = found
                continue
            again = end if proved else at + 1  # what a record with a wrong length leads over is searched once more
            at = end
        self._doubt_last()
        if not self._chunks and (skipped or self._read(0, len(self.magic)) != self.magic):
            raise self._nothing(self._read(0, 64))
        self._notes.findings.unindexed += 1
        self._notes.tell(f"log {self.path}: has no usable index, so it was searched from begin to end")
        for at, end in skipped:
            why = f"{end - at:,} bytes at offset {at:,} are no sound record; they are left out"
            self._notes.lost(self.path, at, why, size_bytes=end - at)
        self._chunks = [
            chunk if chunk.counts and chunk.counts.keys() <= self._channels.keys() else self._counted(chunk)
            for chunk in self._chunks
        ]

    def _doubt_last(self) -> None:
        """What follows the last chunk and counts its messages may not be whole."""
        if self._chunks and not self._chunks[-1].loose:
            self._chunks[-1] = replace(self._chunks[-1], counts={})

    def _read(self, at: int, size: int) -> bytes:
        self._file.seek(at)
        return self._file.read(size)

    def parts(self, channels: Collection[Channel], start_ns: int | None, end_ns: int | None) -> Iterator[Part]:
        """See `Storage`."""
        numbers = {self._numbers[channel] for channel in channels if channel in self._numbers}
        for chunk in self._chunks:
            if chunk.holds(numbers, start_ns, end_ns):
                yield Part(chunk.start_ns, partial(self._messages, chunk, numbers, start_ns, end_ns))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _messages(
        self, chunk: Chunk, numbers: Collection[int], start_ns: int | None, end_ns: int | None
    ) -> Iterator[RawMessage]:
        messages = [
            RawMessage(t_ns, self._channels[number], data)
            for number, t_ns, data in self._noted(chunk, self._walk(chunk, numbers))
            if (start_ns is None or t_ns >= start_ns) and (end_ns is None or t_ns < end_ns)
        ]
        messages.sort(key=itemgetter(0))
        messages.reverse()
        while messages:  # what has been given out is not held on to
            yield messages.pop()

    def _counted(self, chunk: Chunk) -> Chunk:
        """The chunk with its times and counts, for which it is read."""
        counts: Counter[int] = Counter()
        times: list[int] = []
        for number, t_ns, _ in self._noted(chunk, self._walk(chunk, None)):
            counts[number] += 1
            times.append(t_ns)
        return replace(chunk, start_ns=min(times, default=0), end_ns=max(times, default=0), counts=counts)

    def _noted(self, chunk: Chunk, walk: Walk) -> Walk:
        """The messages up to the damage, if there is one, which is noted."""
        used = 0
        try:
            for message in walk:
                yield message
                used += 1
        except Damaged as error:
            why = f"the chunk at offset {chunk.offset:,} is damaged: {error}; "
            why += f"its first {used} messages are used" if used else "it is left out"
            size, lost = chunk.end - chunk.offset, 0 if used else sum(chunk.counts.values())
            self._notes.lost(self.path, chunk.offset, why, size_bytes=size, messages=lost, chunks=1)
