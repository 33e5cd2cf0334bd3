"""What the kinds of log files have in common: channels, chunks, and parts that are read at once."""

import abc
import re
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from torchperf_ros.core.errors import TorchperfError

MAX_CHUNK_BYTES: Final = 1 << 31
"""A chunk that claims to be larger is damaged: recorders write chunks of about a MiB, or of one message."""
_SHOWN_BYTES: Final = 16
_TRANSIENT_LOCAL: Final = re.compile(r"\bdurability: *(1\b|transient_local)")


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
    counts: dict[int, int]
    loose: bool = False

    def holds(self, numbers: Set[int], start_ns: int | None, end_ns: int | None) -> bool:
        """Whether a message of these channels in this time range can be in it."""
        return (
            (start_ns is None or self.end_ns >= start_ns)
            and (end_ns is None or self.start_ns < end_ns)
            and not self.counts.keys().isdisjoint(numbers)
        )


class Storage(abc.ABC):
    """One file of a log.

    Attributes:
        kind, magic: what such a file is, with its article, and the bytes that it begins with.
        path: the file.
        counts: messages by channel, -1 where that is not known.
        start_ns, end_ns: of the first and last message, 0 where that is not known.
    """

    kind: ClassVar[str]
    magic: ClassVar[bytes]
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

    def _nothing(self, begin: bytes) -> LogError:
        """The error of a file with this begin of which nothing can be read."""
        why = "it is damaged"
        if not begin.startswith(self.magic):
            why = f"it is not {self.kind}, as it begins with {begin[:_SHOWN_BYTES]!r}, not with {self.magic!r}"
        return LogError(f"log {self.path}: nothing in it can be read: {why}")
