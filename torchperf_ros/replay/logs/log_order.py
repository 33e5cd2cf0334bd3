"""Messages of many parts of a log in the order of their time."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from torchperf_ros.replay.logs.log_storage import Part, RawMessage

_OPEN_AT_ONCE: Final = 64


def in_order(parts: Iterable[Part]) -> Iterator[RawMessage]:
    """The messages of all parts in the order of their time; each part's messages are in order already.

    A part is opened when its time comes. Where more than 64 overlap, the others wait, and their messages come late.
    """
    waiting = deque(sorted(parts, key=lambda part: part.start_ns))
    numbers = itertools.count()
    heads: list[tuple[int, int, RawMessage, Iterator[RawMessage]]] = []
    while waiting or heads:
        while waiting and len(heads) < _OPEN_AT_ONCE and (not heads or waiting[0].start_ns <= heads[0][0]):
            messages = waiting.popleft().read()
            if (first := next(messages, None)) is not None:
                heapq.heappush(heads, (first.t_ns, next(numbers), first, messages))
        if not heads:
            continue
        _, number, message, messages = heads[0]
        yield message
        del message
        if (following := next(messages, None)) is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (following.t_ns, number, following, messages))
