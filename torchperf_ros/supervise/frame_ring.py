"""The ring of shared memory that a stage writes its frames into and its workers read them from.

An anonymous memory file: nothing is left behind by any death. Records are written once and read by every worker of the
stage in place. The writer never waits: a reader that is too slow finds out, by asking, that its record is gone.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from torchperf_ros.core.errors import FrameOverwritten, ProtocolError

_MAGIC = 0x54504652
_HEAD = 8  # byte position of the u64 that says how far the writer has come
_DATA = mmap.PAGESIZE
_RING = struct.Struct("<IIQQ")  # magic, version, head, capacity
_RECORD = struct.Struct("<QII")  # seq, number of inputs, zero
_INPUT = struct.Struct("<IIqdQQ")  # index, zero, stamp_ns, age_ms, offset in the record, length
_VERSION = 1


@dataclass(slots=True)
class InputBytes:
    """One input message in a record: index in the adapter's `inputs`, stamp, age, CDR bytes."""

    index: int
    stamp_ns: int
    age_ms: float
    data: bytes | memoryview


def _aligned(length: int) -> int:
    return (length + 7) & ~7


def record_size(lengths: Sequence[int]) -> int:
    """Bytes that a record with inputs of these lengths takes."""
    return _RECORD.size + len(lengths) * _INPUT.size + sum(_aligned(length) for length in lengths)


class FrameRing:
    """Writer's side. One thread at a time."""

    def __init__(self, capacity: int) -> None:
        """Make the memory file; `capacity` bytes, touched only as far as frames reach."""
        self.capacity = _aligned(capacity)
        self.fd = os.memfd_create("torchperf_frames", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _DATA + self.capacity)
        self._map = mmap.mmap(self.fd, _DATA + self.capacity)
        self._view = memoryview(self._map)
        self._head_word = self._view[_HEAD : _HEAD + 8].cast("Q")
        _RING.pack_into(self._map, 0, _MAGIC, _VERSION, 0, self.capacity)
        self._head = 0

    def write(self, seq: int, inputs: Sequence[InputBytes]) -> tuple[int, int]:
        """Write one record and return its (offset, length); `offset` counts all bytes ever written.

        Raises:
            ValueError: the record is larger than the ring.
        """
        length = record_size([len(item.data) for item in inputs])
        if length > self.capacity:
            msg = f"a record of {length} bytes does not fit a ring of {self.capacity}"
            raise ValueError(msg)
        offset = self._head
        if offset % self.capacity + length > self.capacity:  # records do not wrap
            offset += self.capacity - offset % self.capacity
        self._head = offset + length
        self._head_word[0] = self._head  # before the bytes change, so that a slow reader can tell
        start = _DATA + offset % self.capacity
        _RECORD.pack_into(self._map, start, seq, len(inputs), 0)
        place = _RECORD.size + len(inputs) * _INPUT.size
        for number, item in enumerate(inputs):
            entry = start + _RECORD.size + number * _INPUT.size
            _INPUT.pack_into(self._map, entry, item.index, 0, item.stamp_ns, item.age_ms, place, len(item.data))
            self._view[start + place : start + place + len(item.data)] = item.data
            place += _aligned(len(item.data))
        return offset, length

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that the ring has touched so far."""
        return min(self._head, self.capacity)

    def close(self) -> None:
        """Release the memory; workers that still map it keep it until they end."""
        self._head_word.release()
        self._view.release()
        self._map.close()
        os.close(self.fd)


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
            msg = f"not a frame ring of version {_VERSION}: magic {magic:#x}, version {version}, {size} bytes"
            raise ProtocolError(msg)
        self._head_word = self._view[_HEAD : _HEAD + 8].cast("Q")

    def check(self, offset: int, seq: int) -> None:
        """Make sure that the record at `offset` has not been overwritten; ask again after using it.

        Raises:
            FrameOverwritten: it has.
        """
        if self._head_word[0] > offset + self._capacity:
            msg = f"frame {seq} was overwritten by newer ones before this worker was done with it"
            raise FrameOverwritten(msg)

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
        # a record that is overwritten meanwhile holds anything: look only as far as it reaches, then ask again
        count = min(count, (length - _RECORD.size) // _INPUT.size)
        entries = [_INPUT.unpack_from(record, _RECORD.size + n * _INPUT.size) for n in range(count)]
        self.check(offset, seq)
        if found != seq or any(place + size > length for *_, place, size in entries):
            msg = f"record at {offset} holds frame {found}, not {seq}, or lengths beyond its {length} bytes"
            raise ProtocolError(msg)
        return [
            InputBytes(index, stamp_ns, age_ms, record[place : place + size])
            for index, _, stamp_ns, age_ms, place, size in entries
        ]
