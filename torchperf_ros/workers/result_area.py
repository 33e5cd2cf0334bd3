"""The shared memory of a worker's results: the one it answers with and, if anytime, the newest.

An anonymous memory file: what lies in it outlives the worker. Partial results go into two slots in turn, so
that the newest whole one is never written to, whenever the node looks and wherever the worker dies. No side
waits. A reader that was overtaken by two results, or sees them in another order than they were written,
finds that out by the slot's number and checksum, and looks again. What the worker answers with is followed
by a message, which comes after it. Each frame of a batch has a place of its own for that.
"""

import mmap
import os
import zlib
from typing import Final

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.workers.memory_file import make_memory_file
from torchperf_ros.workers.protocol import RESPONSE_BYTES, Response, unpack_response

_HANDLED, _NEWEST, _ROOM = range(
    3
)  # u64 words: requests handled; number of the newest partial result, 0: none; bytes
_RESULT: Final = 24
_NUMBER, _CHECKSUM = range(
    2
)  # u64 words that begin a slot; then the response, and in its place the payload
_RESPONSE: Final = 16
_PAYLOAD: Final = (_RESPONSE + RESPONSE_BYTES + 7) & ~7
_MOST_LOOKS: Final = 16  # to overtake one look takes two whole steps of the model


def make_result_area(room: int, places: int = 1) -> int:
    """A descriptor of an area for results of up to `room` bytes, so many at a time.

    Memory that is never used is never taken.
    """
    fd = make_memory_file("torchperf_result", _slot(room, 2) + (places - 1) * _aligned(room))
    os.pwrite(fd, room.to_bytes(8, "little"), 8 * _ROOM)
    return fd


def _slot(room: int, number: int) -> int:
    """Where the first or second slot begins, or, of number 2, ends the area."""
    return _aligned(_RESULT + room) + number * _aligned(_PAYLOAD + room)


def _aligned(length: int) -> int:
    return (length + 7) & ~7


class ResultArea:
    """One side of an area: the worker writes, the node reads.

    Attributes:
        room: bytes of the longest result.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self._view = memoryview(self._map)
        self._words = self._view[:_RESULT].cast("Q")
        self.room = int(self._words[_ROOM])
        self._begins = [_slot(self.room, number) for number in range(2)]
        self._slots = [self._view[begin : begin + _RESPONSE].cast("Q") for begin in self._begins]
        self._number = 0

    # -- the worker

    def count_handled(self) -> None:
        self._words[_HANDLED] += 1

    def write(self, payload: bytes | memoryview, place: int = 0) -> None:
        """Leave a result, which a response is about to follow."""
        begin = self._begin(place) if place else _RESULT
        self._view[begin : begin + len(payload)] = payload

    def _begin(self, place: int) -> int:
        """Where a place for results begins, but for the first: behind the partial results."""
        return _slot(self.room, 2) + (place - 1) * _aligned(self.room)

    def put(self, response: Response, payload: bytes | memoryview) -> bool:
        """Leave a partial result, which replaces the one before; False: it is too long."""
        if len(payload) > self.room:
            return False
        self._number += 1
        begin, words = self._begins[self._number & 1], self._slots[self._number & 1]
        words[_NUMBER] = 0
        response.length = len(payload)
        head = response.pack()
        self._view[begin + _RESPONSE : begin + _RESPONSE + len(head)] = head
        self._view[begin + _PAYLOAD : begin + _PAYLOAD + len(payload)] = payload
        words[_CHECKSUM] = zlib.crc32(payload, zlib.crc32(head))
        words[_NUMBER] = self._words[_NEWEST] = self._number
        return True

    # -- the node

    @property
    def handled(self) -> int:
        return int(self._words[_HANDLED])

    def read(self, length: int, place: int = 0) -> bytes:
        """The result that a response announces.

        Raises:
            ProtocolError: it cannot be so long, or there is no such place.
        """
        if length > self.room:
            raise ProtocolError(f"response of {length} bytes in a result area of {self.room}")
        begin = self._begin(place) if place else _RESULT
        if begin + length > len(self._map):
            raise ProtocolError(f"response in place {place} of a result area that has fewer")
        return self._map[begin : begin + length]

    def newest(self, seq: int, stream: int = 0) -> tuple[Response, bytes] | None:
        """The newest partial result of this frame, whole; None if there is none."""
        for _ in range(_MOST_LOOKS):
            number = self._words[_NEWEST]
            begin, words = self._begins[number & 1], self._slots[number & 1]
            if not number:
                break
            head = self._map[begin + _RESPONSE : begin + _RESPONSE + RESPONSE_BYTES]
            checksum = words[_CHECKSUM]
            try:
                response = unpack_response(head)
                wanted = (response.seq, response.stream) == (seq, stream)
                payload = self._map[
                    begin + _PAYLOAD : begin + _PAYLOAD + min(response.length, self.room) * wanted
                ]
            except ProtocolError:  # overtaken, or a worker that writes what it likes
                continue
            if words[_NUMBER] != number:
                continue
            if not wanted:
                break
            if zlib.crc32(payload, zlib.crc32(head)) == checksum:
                return response, payload
        return None

    def close(self) -> None:
        for words in (self._words, *self._slots, self._view):
            words.release()
        self._map.close()
