"""A log that is not sound: a search for messages where there is no index, and what is left out.

A file without a usable index is searched from its begin to its first damage. Receipt times that are far from all others
are set aside. A compressed file is unpacked as far as it goes. What is lost is noted and counted, see `LogNotes`.
"""

import errno
import itertools
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zstandard

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.text import listed
from torchperf_ros.replay.logs.log_storage import Chunk, LogError, LogNotes, Span

if TYPE_CHECKING:
    from torchperf_ros.replay.logs.chunked_files import ChunkedFile

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
