"""What the kinds of log files have in common: channels, parts that are read at once, and notes on what is wrong."""

import abc
import heapq
import itertools
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from torchperf_ros.core.errors import TorchperfError

MAX_CHUNK_BYTES: Final = 1 << 31
"""A chunk that claims to be larger is damaged: recorders write chunks of about a MiB, or of one message."""
_TRANSIENT_LOCAL: Final = re.compile(r"\bdurability: *(1\b|transient_local)")
_OPEN_AT_ONCE: Final = 64
_TOLD_PER_FILE: Final = 5


class LogError(TorchperfError):
    """A log cannot be read; the message names file, topic and offset as far as they are known, and what would do."""


class Damaged(Exception):
    """Bytes of a log are not what they should be; the message says why."""


@dataclass(frozen=True, eq=False)
class Channel:
    """Messages of one topic and type in one file.

    Attributes:
        topic, type_name: as a ROS 2 name, for example `sensor_msgs/msg/Image`.
        encoding: of the messages: `cdr`, `ros1`, or something that cannot be read.
        definition: the type's definition as it stands in the log, empty if it does not.
        definition_format: `ros2msg`, `ros2idl`, `ros1msg` or empty.
        digest: the type's hash in the log: RIHS01 of ROS 2, MD5 of ROS 1; empty if there is none.
        latched: whether its publisher kept messages for those who subscribe later.
    """

    topic: str
    type_name: str
    encoding: str
    definition: str = ""
    definition_format: str = ""
    digest: str = ""
    latched: bool = False


def is_latched(qos_profiles: str) -> bool:
    """Whether a publisher of these QoS profiles, as rosbag2 writes them down, kept messages: transient local."""
    return _TRANSIENT_LOCAL.search(qos_profiles) is not None


class RawMessage(NamedTuple):
    """A message as it stands in the file; `t_ns`: when it was received."""

    t_ns: int
    channel: Channel
    data: bytes


@dataclass(frozen=True)
class Part:
    """What is read at once: from which time on it has messages, and what reads them in order."""

    start_ns: int
    read: Callable[[], Iterator[RawMessage]]


@dataclass(frozen=True)
class Chunk:
    """Where a chunk lies in a file.

    Attributes:
        offset, end: of its record, in bytes; `end` is the end of the file if the file breaks off before.
        start_ns, end_ns: of its messages.
        counts: messages by the number of their channel.
        loose: True for messages outside of a chunk.
    """

    offset: int
    end: int
    start_ns: int
    end_ns: int
    counts: Mapping[int, int]
    loose: bool = False

    def holds(self, numbers: Collection[int], start_ns: int | None, end_ns: int | None) -> bool:
        """Whether a message of these channels in this time range can be in it."""
        return (
            (start_ns is None or self.end_ns >= start_ns)
            and (end_ns is None or self.start_ns < end_ns)
            and any(self.counts.get(number) for number in numbers)
        )


class Storage(abc.ABC):
    """One file of a log.

    Attributes:
        path: the file.
        counts: messages by channel, -1 where that is not known.
        start_ns, end_ns: of the first and last message, 0 where that is not known.
    """

    path: Path
    counts: dict[Channel, int]
    start_ns: int = 0
    end_ns: int = 0

    @abc.abstractmethod
    def parts(self, channels: Collection[Channel], start_ns: int | None, end_ns: int | None) -> Iterator[Part]:
        """What has to be read for these channels and this time range, `start_ns <= t_ns < end_ns`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file."""


@dataclass
class LogFindings:
    """What was noticed while a log was opened and read; all zero for a sound one.

    Attributes:
        unindexed: files without a usable index, which were searched from begin to end.
        out_of_order: messages of the last reading that were received before the one that came before them.
        chunks_lost: chunks that could not be read, or not to their end.
        messages_lost: messages that are known to be lost; a lost chunk may have held more.
        bytes_skipped: bytes of the files that could not be understood.
        types_differing: types whose definition or hash in the log is another one than here.
    """

    unindexed: int = 0
    out_of_order: int = 0
    chunks_lost: int = 0
    messages_lost: int = 0
    bytes_skipped: int = 0
    types_differing: int = 0


class LogNotes:
    """Counts what is wrong with a log, and tells it once, however often the log is read."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Start without notes.

        Args:
            say: told in one line.
        """
        self.findings = LogFindings()
        self._say = say
        self._told: set[str] = set()
        self._lost: dict[Path, set[object]] = {}

    def tell(self, text: str) -> None:
        """Say something, once."""
        if text not in self._told:
            self._told.add(text)
            self._say(text)

    def lost(
        self, path: Path, place: object, why: str, *, size_bytes: int = 0, messages: int = 0, chunks: int = 0
    ) -> None:
        """Something in a file cannot be read; said for the first few.

        Args:
            path: the file.
            place: what tells this from all else that is lost in the file, for example an offset.
            why: what is wrong, and where.
            size_bytes: how much of the file is left out.
            messages: how many are known to be lost.
            chunks: how many are lost, in whole or in part.
        """
        places = self._lost.setdefault(path, set())
        if place in places:
            return
        places.add(place)
        self.findings.chunks_lost += chunks
        self.findings.messages_lost += messages
        self.findings.bytes_skipped += size_bytes
        if len(places) <= _TOLD_PER_FILE:
            self.tell(f"log {path}: {why}")
        else:
            self.tell(f"log {path}: more of it is damaged; from here on it is only counted")


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
