"""What the kinds of log files have in common: channels, parts that are read at once, notes and salvage.

A file without a usable index is searched from its begin to its first damage. Receipt times that are far
from all others are set aside. A compressed file is unpacked as far as it goes. What is lost is noted and
counted, see `LogNotes`.
"""

import errno
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import zstandard

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.text import listed
from torchperf_ros.stage.frame import USABLE_AGE_MS

if TYPE_CHECKING:
    from torchperf_ros.replay.logs.chunked_files import ChunkedFile


_TRANSIENT_LOCAL: Final = re.compile(r"\bdurability: *(1\b|transient_local)")
_SHOWN_PER_FILE: Final = 5
_MIXED_NS: Final = 250_000_000
_OFF_NS: Final = round(USABLE_AGE_MS * NS_PER_MS)


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
    """`sensor_msgs/Image`, as ROS 1 writes it, as `sensor_msgs/msg/Image`; other names stay as they are.

    But for that of `/tf` before tf2, whose bytes are the same.
    """
    package, slash, name = type_name.partition("/")
    ros2 = f"{package}/msg/{name}" if slash and "/" not in name else type_name
    return "tf2_msgs/msg/TFMessage" if ros2 == "tf/msg/tfMessage" else ros2


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


class Stamps:
    """What is odd about the stamps of a topic's messages in one reading."""

    def __init__(self) -> None:
        self._zero = self._repeated = self._back = self._off = 0
        self._last_ns = self._back_ns = self._off_ns = 0  # the most of what goes back, and is off

    def add(self, stamp_ns: int, t_ns: int) -> None:
        if not stamp_ns:
            self._zero += 1
            return
        if stamp_ns <= self._last_ns:
            self._repeated += stamp_ns == self._last_ns
            self._back += stamp_ns < self._last_ns
            self._back_ns = max(self._back_ns, self._last_ns - stamp_ns)
        self._last_ns = stamp_ns
        if not -_OFF_NS <= t_ns - stamp_ns <= _OFF_NS:
            self._off += 1
            self._off_ns = max(self._off_ns, t_ns - stamp_ns, key=abs)

    def __str__(self) -> str:
        off = f"{abs(self._off_ns) / 1e9:,.3f} s {'behind' if self._off_ns > 0 else 'ahead of'}"
        odd = {
            "zero": self._zero,
            "repeated": self._repeated,
            f"going back by up to {self._back_ns / 1e9:,.3f} s": self._back,
            f"more than 10 s off, up to {off} their receipt": self._off,
        }
        return "; ".join(f"{count:,} {what}" for what, count in odd.items() if count)


class LogNotes:
    """Counts what is wrong with a log, and notes it once, however often the log is read."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.findings = LogFindings()
        self._say = say
        self._noted: set[str] = set()
        self._set_back: set[Path] = set()
        self._lost: dict[Path, set[object]] = {}

    def note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._say(text)

    def set_back(self, path: Path, stretches: Iterable[tuple[int, int, int]]) -> None:
        """Note, once for a file, that its times go back by more than threads of a recorder mix messages.

        `stretches`: first and last time in ns and number of messages, in the order of the file.
        """
        reached_ns, messages, worst_ns = 0, 0, _MIXED_NS
        for start_ns, end_ns, count in stretches:
            if _MIXED_NS < reached_ns - start_ns <= DAY_NS:  # more: is set aside, or noted as a pause
                messages, worst_ns = messages + count, max(worst_ns, reached_ns - start_ns)
            reached_ns = max(reached_ns, end_ns)
        if messages and path not in self._set_back:
            self._set_back.add(path)
            self.note(
                f"log {path}: up to {messages:,} messages are written after later ones, by about"
                f" {worst_ns / 1e9:,.1f} s, as where a clock was set back or logs were joined; they come in"
                " the order of their receipt"
            )

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


_LOOSE_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 1 << 17  # of zstd; what is damaged costs what is unpacked at once with it
DAY_NS: Final = 86_400 * 1_000_000_000
_FEW: Final = 10  # messages; or a hundredth of the log
# ROS counts time in signed 64 bit.
_LATEST_NS: Final = (1 << 63) - 1


def search(file: "ChunkedFile") -> list[Chunk]:
    """Search a file without a usable index from its begin to its first damage.

    It learns the channels on the way, and counts their messages.

    Raises:
        LogError: there is no message before the damage.
    """
    chunks: list[Chunk] = []
    damage, sound = "", len(file.magic)
    try:
        for kind, begin, end, _, _ in file.records(file.stream, sound, file.size):
            if kind == file.data_end:  # the summary that follows is not sound
                break
            sound = min(end, file.size)
            if kind == file.chunk_kind:
                chunks.append(Chunk(begin, sound))
            elif kind in file.definitions:
                file.learn(file.stream, begin, end)
            elif (
                kind == file.message_kind
            ):  # outside of chunks; those that follow each other are read together
                last = chunks[-1] if chunks else Chunk(0, 0)
                joins = last.loose and last.end == begin < last.offset + _LOOSE_BYTES
                offset = chunks.pop().offset if joins else begin
                chunks.append(Chunk(offset, end, loose=True))
        else:
            damage = "the file breaks off" if file.data_end >= 0 else ""
    except (OSError, TorchperfError):
        raise
    except Exception as error:
        damage = str(error) or type(error).__name__
    hint = f"{damage}; `{file.recover}` may find more"
    if damage and not chunks:
        raise LogError(f"log {file.path}: nothing in it can be read: it is damaged: {hint}")
    file.notes.findings.unindexed += 1
    file.notes.note(f"log {file.path}: has no usable index, so it was searched from begin to end")
    if damage and (left := file.size - sound):
        why = f"its last {left:,} bytes, from offset {sound:,} on, are left out: {hint}"
        file.notes.lost(file.path, sound, why, size_bytes=left)
    return [_learned(file, chunk) for chunk in chunks]


def _learned(file: "ChunkedFile", chunk: Chunk) -> Chunk:
    found = list(file.walk(chunk, None))
    file.found.update(number for number, _, _ in found)
    times, numbers = [t_ns for _, t_ns, _ in found], frozenset(number for number, _, _ in found)
    start_ns, end_ns = min(times, default=0), max(times, default=0)
    return replace(chunk, start_ns=start_ns, end_ns=end_ns, numbers=numbers, count=len(found))


def set_aside(path: Path, spans: Iterator[Span], notes: LogNotes) -> tuple[int, int, list[Span]]:
    """Which stretches of a log to leave out, as their receipt is far from that of all others.

    A clock that was not set yet, or damage. One such time would make the log last for years. They are few;
    many are a stretch of the log like any other. Gives begin and end of what is kept, and what is left out.

    Raises:
        LogError: no message has a time that ROS can count.
    """
    ordered = sorted((span for span in spans if span.messages), key=attrgetter("start_ns"))
    reached_ns = list(itertools.accumulate((span.end_ns for span in ordered), max))
    cuts = [at for at in range(1, len(ordered)) if ordered[at].start_ns - reached_ns[at - 1] > DAY_NS]
    groups = [ordered[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(ordered)])]
    sizes = [sum(span.messages for span in group) for group in groups]
    few = max(_FEW, sum(sizes) // 100)
    possible = [
        size if group[-1].end_ns <= _LATEST_NS else 0 for group, size in zip(groups, sizes, strict=True)
    ]
    if not any(possible):
        raise LogError(
            f"log {path}: no message has a receipt time below 2^63 ns; it cannot be put in order"
        )
    largest = max(range(len(groups)), key=lambda number: (possible[number], number))
    kept = [number for number, size in enumerate(possible) if size > few or number == largest]
    aside = [group for number, group in enumerate(groups) if not kept[0] <= number <= kept[-1]]
    for group in aside:
        size = sum(span.messages for span in group)
        topics = listed(sorted({channel.topic for span in group for channel in span.channels}))
        messages = "1 message" if size == 1 else f"{size:,} messages"
        when = f"received at {group[0].start_ns} ns, more than a day from all others"
        notes.note(f"log {path}: {messages} on {topics}, {when}: set aside")
        notes.findings.set_aside += size
    end_ns = max(span.end_ns for group in groups[kept[0] : kept[-1] + 1] for span in group)
    return groups[kept[0]][0].start_ns, end_ns, list(itertools.chain(*aside))


def is_odd(start_ns: int, end_ns: int) -> bool:
    """Whether a log that lasts from then to then may have receipt times that are far from all others."""
    return end_ns - start_ns > DAY_NS or end_ns > _LATEST_NS


def unpacked_file(path: Path, folder: Path, notes: LogNotes) -> Path:
    """A file that was compressed as a whole, unpacked into a folder, as far as it goes.

    Raises:
        LogError: nothing of it can be unpacked, or the folder cannot take it.
        OSError: it cannot be read.
    """
    target = folder / path.stem
    with path.open("rb") as packed, target.open("wb") as raw:
        try:
            with zstandard.ZstdDecompressor().stream_reader(
                packed, read_across_frames=True, closefd=False
            ) as reader:
                while block := reader.read1(_BLOCK_BYTES):
                    raw.write(block)
        except zstandard.ZstdError as error:
            if not raw.tell():
                raise LogError(
                    f"log {path}: nothing of it can be unpacked: it is damaged ({error})"
                ) from error
            why = f"is damaged after {raw.tell():,} unpacked bytes ({error}); what comes before is read"
            notes.lost(path, packed.tell(), why)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise
            raise LogError(
                f"log {path}: cannot be unpacked into {folder}: {error.strerror}; TMPDIR names another"
                " folder"
            ) from error
    return target
