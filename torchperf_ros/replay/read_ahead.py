"""A log read by a thread of its own, so that what is due never waits for a disk or for decompression."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_ITEM_BYTES: Final = 512  # what an item costs beside its data


class ReadAhead(Generic[T]):
    """Iterates over what another thread has read in advance, in memory that is bounded."""

    def __init__(self, source: Iterable[T], size: Callable[[T], int], limit_bytes: int) -> None:
        """Begin to read.

        Args:
            source: read and ended by the thread.
            size: bytes of an item.
            limit_bytes: how much may wait; one item may, whatever its size.
        """
        self._source = source
        self._size = size
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._done = self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    break
        except Exception as error:  # the thread's boundary: raised again where the items are taken
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        """Let an item wait once there is room; False if nobody will take it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._items or self._held_bytes < self._limit_bytes)
            self._items.append(item)
            self._held_bytes += self._cost(item)
            self._changed.notify_all()
            return not self._closed

    def _cost(self, item: T) -> int:
        return self._size(item) + _ITEM_BYTES

    def __iter__(self) -> Iterator[T]:
        """The items; whatever ended the reading is raised after the last of them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._done)
                if not self._items:
                    break
                item = self._items.popleft()
                self._held_bytes -= self._cost(item)
                self._changed.notify_all()
            yield item
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Read no more; returns when the thread has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
