"""The ring of shared memory that a stage writes its frames into and its workers read them from.

An anonymous memory file: nothing is left behind by any death. Records are written once and read by every
worker of the stage in place. The writer never waits: a reader that is too slow finds out, by asking, that
its record is gone.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from torchperf_ros.api.clock import NS_PER_S, monotonic_ns
from torchperf_ros.api.errors import FrameOverwritten, ProtocolError
from torchperf_ros.workers.memory_file import keep_order, make_memory_file, read_only

_MAGIC = 0x54504652
_HEAD = 8  # byte position of the u64 that says how far the writer has come
_ANSWERED = 24  # likewise of the one that says which frames are answered: those of smaller numbers
_DATA = mmap.PAGESIZE
_RING = struct.Struct("<IIQQ")  # magic, version, head, capacity
_RECORD = struct.Struct("<QII")  # seq, number of inputs, zero
_INPUT = struct.Struct("<IIqdQQ")  # index, waited_us, stamp_ns, age_ms, offset in the record, length
_MOST_US = 2**32 - 1
_VERSION = 1
_AT_ONCE = 256 * 1024
# by an eighth it is larger than the longest record: what is compressed varies, other inputs may come
_SLOT_MORE = 8
_LEAST_ROUND = 65_536
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; Python has no name for it


@dataclass(slots=True)
class InputBytes:
    """One input message in a record."""

    index: int  # in the adapter's `inputs`
    stamp_ns: int  # its stamp, 0 if none
    age_ms: float  # ROS time since the stamp when the frame was received, NaN if unknown
    data: bytes | memoryview  # CDR bytes
    waited_us: int = 0  # time from its own receipt to that of the frame; 71 min if longer


def _aligned(length: int) -> int:
    return (length + 7) & ~7


def record_size(lengths: Sequence[int]) -> int:
    return _RECORD.size + len(lengths) * _INPUT.size + sum(_aligned(length) for length in lengths)


@dataclass
class RingExtra:
    """Bytes by which the rings of a node may still grow together.

    It takes no lock, as a few more do not matter.
    """

    left_bytes: int


class FrameRing:
    """Writer's side. One thread at a time.

    A record's place is its offset modulo the capacity, which is what the ring can grow to. Where a round
    ends before that, the next record's offset leaves out the rest: so a ring can grow while readers look at
    it.
    """

    def __init__(self, room: int, capacity: int = 0, records: int = 0) -> None:
        """Make the memory file, touched only as far as frames reach.

        After `room` bytes, which the largest record has, it begins anew; see `keep` for `capacity`, 0: it
        never grows. With `records` it begins anew earlier: after so many of the longest record so far. What
        that takes is then part of the bytes that `keep` allows.
        """
        self._records = records
        self._room = self._largest = _aligned(room)
        self.capacity = max(_aligned(capacity), self._room)
        self.fd = make_memory_file("torchperf_frames", _DATA + self.capacity)
        self.reader_fd = read_only(self.fd)
        self._map = mmap.mmap(self.fd, _DATA + self.capacity)
        self._view = memoryview(self._map)
        self._head_word = self._view[_HEAD : _HEAD + 8].cast("Q")
        self._answered_word = self._view[_ANSWERED : _ANSWERED + 8].cast("Q")
        _RING.pack_into(self._map, 0, _MAGIC, _VERSION, 0, self.capacity)
        self._head = self._at_hand = self._longest = 0
        self._keep_ns = self._round_ns = self._slot = self._slot_bytes = 0
        self._extra = RingExtra(0)

    def keep(self, seconds: float, extra: RingExtra) -> None:
        """From now on grow, as far as `extra` reaches, so that records stay for so many seconds."""
        self._keep_ns, self._extra = round(seconds * NS_PER_S), extra

    def _may_grow(self, more: int) -> bool:
        """Whether a round goes on behind the room's end: what it began with is still to be kept."""
        if not self._keep_ns or self._room + more > self.capacity or more > self._extra.left_bytes:
            return False
        return monotonic_ns() - self._round_ns < self._keep_ns

    def make_ready(self, length: int = 0) -> None:
        """Have the kernel give the memory that comes next, which a frame would otherwise pay for.

        3 ms for an image.

        That is for a record of `length` bytes, or as many as the longest one so far, if that is more.
        """
        end = self._head % self.capacity + max(length, self._longest)
        if end > self._room and not self._may_grow(end - self._room):
            # In a short round that is the rest of it: such a record begins the next one.
            end = 0 if self._records else self._room
        if end <= self._at_hand:
            return
        # What a slot has beyond its record lies before the head, and is not touched.
        begin = max(self._at_hand, self._head % self.capacity) // mmap.PAGESIZE * mmap.PAGESIZE
        self._at_hand = end
        with contextlib.suppress(OSError):  # an older kernel: then frames pay for it
            for at in range(
                begin, _DATA + end, _AT_ONCE
            ):  # the call keeps the interpreter from other threads
                self._map.madvise(_POPULATE_WRITE, at, min(_AT_ONCE, _DATA + end - at))

    def slot(self, inputs: int) -> memoryview | None:
        """Where the first input of the next record can be put before `write` is called with it, to save a copy.

        It holds a little more than the longest record so far; None before there was one. It may be left
        unused. The record can have so many `inputs` at most.
        """
        if not self._longest:
            return None
        place = record_size([0] * inputs)
        length = min(self._longest + self._longest // _SLOT_MORE, self._largest)
        if length <= place:
            return None
        start = _DATA + self._allot(length) % self.capacity
        self._slot, self._slot_bytes = start + place, _aligned(length)
        return self._view[start + place : start + length]

    def _allot(self, length: int) -> int:
        """Offset of the next record.

        Readers know from now on that the bytes of older ones there may change.
        """
        offset = self._head
        more = offset % self.capacity + length - self._room
        if more > 0 and self._may_grow(more):
            self._room += more
            self._extra.left_bytes -= more
        elif more > 0:  # records do not wrap
            offset += self.capacity - offset % self.capacity
        if self._keep_ns and offset % self.capacity == 0:
            self._round_ns = monotonic_ns()
        self._head = offset
        self._head_word[0] = max(self._head_word[0], offset + length)
        keep_order()
        return offset

    def write(self, seq: int, inputs: Sequence[InputBytes]) -> tuple[int, int]:
        """Write one record and return its (offset, length); `offset` counts all bytes ever written.

        The first input's bytes stay where they are if they are in the ring's slot.

        Raises:
            ValueError: the record is larger than the ring.
        """
        first = inputs[0].data if inputs else b""
        slot = self._slot if isinstance(first, memoryview) and first.obj is self._map else 0
        place = slot - _DATA - self._head % self.capacity if slot else record_size([0] * len(inputs))
        length = place + sum(_aligned(len(item.data)) for item in inputs)
        if length > self._largest:
            raise ValueError(f"a record of {length} bytes does not fit a ring of {self._largest}")
        self._slot = 0
        if length > self._longest:
            self._lengthen(length)
        offset = self._allot(length)
        self._at_hand = max(self._at_hand, offset % self.capacity + length)
        start = _DATA + offset % self.capacity
        _RECORD.pack_into(self._map, start, seq, len(inputs), 0)
        for number, item in enumerate(inputs):
            entry = start + _RECORD.size + number * _INPUT.size
            waited_us = min(item.waited_us, _MOST_US)
            _INPUT.pack_into(
                self._map, entry, item.index, waited_us, item.stamp_ns, item.age_ms, place, len(item.data)
            )
            if number or start + place != slot:
                self._view[start + place : start + place + len(item.data)] = item.data
            place += _aligned(len(item.data))
        # In short rounds a record keeps its slot: the next round's slot would reach into it.
        self._head = offset + (max(length, self._slot_bytes) if slot and self._records else length)
        return offset, length

    def _lengthen(self, longest: int) -> None:
        """A record is longer than all before it; a round that ends after a number of records ends later."""
        if self._records:
            known = self._room if self._longest else 0
            room = self._records * _aligned(longest + longest // _SLOT_MORE)
            self._room = min(self._largest, max(room, _LEAST_ROUND, known))
            self._extra.left_bytes -= self._room - known
        self._longest = longest

    def answered(self, seq: int) -> None:
        """Let the workers that still run this frame, or an older one, see that its answer has left."""
        self._answered_word[0] = seq + 1

    def holds(self, offset: int) -> bool:
        """Whether the record at `offset` has not been overwritten."""
        return self._head <= offset + self.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that the ring has touched so far, at most."""
        return self._at_hand

    def close(self) -> None:
        """Release the memory; workers that still map it keep it until they end."""
        self._head_word.release()
        self._answered_word.release()
        self._view.release()
        with contextlib.suppress(
            BufferError
        ):  # the bytes of a frame that was not answered are in a slot still
            self._map.close()
        os.close(self.fd)
        os.close(self.reader_fd)


class FrameReader:
    """Reader's side, in a worker; maps the ring read-only."""

    def __init__(self, fd: int) -> None:
        """Map the ring behind `fd`.

        Raises:
            ProtocolError: it is not a ring of this version.
        """
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        magic, version, _, self._capacity = _RING.unpack_from(self._map, 0)
        if magic != _MAGIC or version != _VERSION or size != _DATA + self._capacity:
            raise ProtocolError(
                f"not a frame ring of version {_VERSION}: magic {magic:#x}, version {version}, {size} bytes"
            )
        self._head_word = self._view[_HEAD : _HEAD + 8].cast("Q")
        self._answered_word = self._view[_ANSWERED : _ANSWERED + 8].cast("Q")

    def is_answered(self, seq: int) -> bool:
        return bool(self._answered_word[0] > seq)

    def holds(self, offset: int) -> bool:
        """Whether the record at `offset` has not been overwritten; ask again after using it."""
        keep_order()
        return bool(self._head_word[0] <= offset + self._capacity)

    def check(self, offset: int, seq: int) -> None:
        """Make sure that the record at `offset` has not been overwritten; ask again after using it.

        Raises:
            FrameOverwritten: it has.
        """
        if not self.holds(offset):
            raise FrameOverwritten(
                f"frame {seq} was overwritten by newer ones before this worker was done with it"
            )

    def read(self, offset: int, length: int, seq: int) -> list[InputBytes]:
        """The inputs of a record, as views on the ring.

        Raises:
            FrameOverwritten: the record is gone.
            ProtocolError: the record is not the one asked for, or its lengths do not add up.
        """
        self.check(offset, seq)
        start = _DATA + offset % self._capacity
        record = self._view[start : start + length]
        found, count, _ = _RECORD.unpack_from(record, 0)
        # a record that is overwritten meanwhile holds anything: look only as far as it reaches, then ask
        # again
        count = min(count, (length - _RECORD.size) // _INPUT.size)
        entries = [_INPUT.unpack_from(record, _RECORD.size + n * _INPUT.size) for n in range(count)]
        self.check(offset, seq)
        if found != seq or any(place + size > length for *_, place, size in entries):
            raise ProtocolError(
                f"record at {offset} holds frame {found}, not {seq}, or lengths beyond its {length} bytes"
            )
        return [
            InputBytes(index, stamp_ns, age_ms, record[place : place + size], waited_us)
            for index, waited_us, stamp_ns, age_ms, place, size in entries
        ]
