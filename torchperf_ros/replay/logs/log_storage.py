"""What the kinds of log files have in common.

Channels, parts that are read at once, and notes of what is wrong.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from torchperf_ros.api.errors import TorchperfError

_TRANSIENT_LOCAL: Final = re.compile(r"\bdurability: *(1\b|transient_local)")
_SHOWN_PER_FILE: Final = 5


class LogError(TorchperfError):
    """A log cannot be read.

    The message names file, topic and offset as far as they are known, and what would do.
    """


class Damaged(Exception):
    """Bytes of a log are not what they should be; the message says why."""


@dataclass(frozen=True, eq=False)
class Channel:
    """Messages of one topic and type in one file."""

    topic: str  # for example `/camera`
    type_name: str  # for example `sensor_msgs/msg/Image`
    encoding: str  # of the messages: `cdr`, `ros1`, or something that cannot be read
    definition: str = ""  # the type's definition as it stands in the log, empty if it does not
    definition_format: str = ""  # `ros2msg`, `ros2idl`, `ros1msg` or empty
    digest: str = ""  # the type's hash in the log: RIHS01 of ROS 2, MD5 of ROS 1; empty if there is none
    latched: bool = False  # whether its publisher kept messages for later subscribers


def is_latched(qos_profiles: str) -> bool:
    """Whether a publisher of these QoS profiles, as rosbag2 writes them down, kept messages.

    Transient local.
    """
    return _TRANSIENT_LOCAL.search(qos_profiles) is not None


def ros2_name(type_name: str) -> str:
    """`sensor_msgs/Image`, as ROS 1 writes it, as `sensor_msgs/msg/Image`; other names stay as they are."""
    package, slash, name = type_name.partition("/")
    return f"{package}/msg/{name}" if slash and "/" not in name else type_name


class RawMessage(NamedTuple):
    """A message as it stands in the file; `t_ns`: when it was received."""

    t_ns: int
    channel: Channel
    data: bytes


class Span(NamedTuple):
    """From when to when, in ns, a file has so many messages, and on which channels."""

    start_ns: int
    end_ns: int
    messages: int
    channels: frozenset[Channel]


@dataclass(frozen=True)
class Chunk:
    offset: int  # of its record in the file, in bytes
    end: int  # likewise; that of the file if the file breaks off before
    start_ns: int = 0  # of its messages
    end_ns: int = 0
    numbers: frozenset[int] = frozenset()  # of the channels that have messages in it
    count: int = 0  # of its messages
    loose: bool = False  # True for messages outside of a chunk


# What is read at once: from which time in ns on it has messages, and what reads them in order.
Part = tuple[float, Callable[[], Iterator[RawMessage]]]


@dataclass
class LogFindings:
    """What was noticed while a log was opened and read; all zero for a sound one."""

    unindexed: int = 0  # files without a usable index, which were searched from begin to end
    # messages of the last reading that were received before the one that came before them
    out_of_order: int = 0
    chunks_lost: int = 0  # chunks that could not be read, or not to their end
    messages_lost: int = 0  # messages that are known to be lost; there may be more
    set_aside: int = 0  # messages whose receipt is more than a day from that of all others
    bytes_skipped: int = 0  # bytes of the files that could not be understood
    types_differing: int = 0  # types whose definition or hash in the log is another one than here


class LogNotes:
    """Counts what is wrong with a log, and notes it once, however often the log is read."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.findings = LogFindings()
        self._say = say
        self._noted: set[str] = set()
        self._lost: dict[Path, set[object]] = {}

    def note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._say(text)

    def lost(
        self,
        path: Path,
        place: object,
        why: str,
        *,
        size_bytes: int = 0,
        messages: int = 0,
        chunks: int = 0,
    ) -> bool:
        """Count what cannot be read in a file at this `place`, and note the first few places with the reason.

        Each place counts once. Returns whether it is new.
        """
        places = self._lost.setdefault(path, set())
        if place in places:
            return False
        places.add(place)
        self.findings.chunks_lost += chunks
        self.findings.messages_lost += messages
        self.findings.bytes_skipped += size_bytes
        few = len(places) <= _SHOWN_PER_FILE
        self.note(f"log {path}: {why if few else 'more of it is damaged; from here on it is only counted'}")
        return True
