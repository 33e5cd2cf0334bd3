"""What is wrong with a log: counted, and told once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TOLD_PER_FILE: Final = 5


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
