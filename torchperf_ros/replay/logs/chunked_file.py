"""A log file made of chunks: what MCAP files and ROS 1 bags have in common."""

import abc
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Final

from torchperf_ros.replay.logs.log_notes import LogNotes
from torchperf_ros.replay.logs.log_storage import Channel, Chunk, Damaged, LogError, Part, RawMessage, Storage

_BUFFER_BYTES: Final = 1 << 16  # a larger message is read past the buffer, without a copy
Walk = Iterator[tuple[int, int, bytes]]
"""Messages in the order of the file: number of the channel, time in ns, data."""


class ChunkedFile(Storage):
    """Reads a chunk at a time, and brings its messages into the order of their time.

    A subclass finds channels and chunks in `_found`, and goes through a chunk in `_walk`.
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
        try:
            self._channels, self._chunks = self._found()
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
    def _found(self) -> tuple[Mapping[int, Channel], Sequence[Chunk]]:
        """Channels by number, and chunks in the order of the file."""

    @abc.abstractmethod
    def _walk(self, chunk: Chunk, numbers: Collection[int] | None) -> Walk:
        """The messages of these channels; None: of all, without their data, to count them and learn their channels.

        Raises:
            Damaged: the chunk is not sound here.
        """

    def parts(self, channels: Collection[Channel], start_ns: int | None, end_ns: int | None) -> Iterator[Part]:
        """See `Storage`."""
        numbers = {self._numbers[channel] for channel in channels if channel in self._numbers}
        for chunk in self._chunks:
            if chunk.holds(numbers, start_ns, end_ns):
                yield Part(chunk.start_ns, partial(self._read, chunk, numbers, start_ns, end_ns))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(
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

    def _note_search(self) -> None:
        self._notes.findings.unindexed += 1
        self._notes.tell(f"log {self.path}: has no usable index, so it was searched from begin to end")

    def _note_skipped(self, offset: int, end: int) -> None:
        why = f"{end - offset:,} bytes at offset {offset:,} are no sound record; they are left out"
        self._notes.lost(self.path, offset, why, size_bytes=end - offset)

    def _nothing(self, kind: str) -> LogError:
        return LogError(f"log {self.path}: nothing in it can be read; it is damaged, or no {kind}")
