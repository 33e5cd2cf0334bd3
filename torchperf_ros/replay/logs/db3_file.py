"""A `.db3` file of rosbag2, read by SQLite in the order of its times.

The reader of `rosbags` takes about twice the time for raw images, leaves out what is in a journal, and
refuses a damaged database.
"""

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote

from torchperf_ros.replay.logs.log_storage import (
    Channel,
    LogError,
    LogNotes,
    Part,
    RawMessage,
    Span,
    is_latched,
)

DB3_MAGIC: Final = b"SQLite format 3\0"
_STEPS_AT_ONCE: Final = 1_000_000
_STEPS_PER_BYTE: Final = 100  # a sound database needs about one
_LATER_COLUMNS: Final = (
    "type_description_hash",
    "offered_qos_profiles",
)  # which old recorders do not write
_FORMATS: Final = {"ros2msg", "ros2idl"}
_RECOVER: Final = "`sqlite3 .recover` may find more"


class Db3File:
    """One `.db3` file, up to where it is damaged.

    `counts` has messages by channel, -1 where the database is damaged; `start_ns` and `end_ns` are of the
    first and last message, 0 where that is not known.
    """

    def __init__(self, path: Path, notes: LogNotes, file: Path) -> None:
        """Open it, called `path` in notes and errors, and read its topics; its bytes are in `file`.

        A recorder that was killed leaves its last messages in a file `-wal` beside it; SQLite reads them,
        too.

        Raises:
            LogError: it is no database of rosbag2, or its topics cannot be read.
        """
        self.path = path
        self._notes = notes
        self._size = file.stat().st_size
        self._steps = 0
        journal, self._shared = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
        self._left_as_it_was = self._shared.exists()
        has_journal = journal.is_file() and journal.stat().st_size > 0
        try:
            try:
                self._channels = self._opened(file, "mode=ro" if has_journal else "mode=ro&immutable=1")
            except sqlite3.OperationalError as error:  # SQLite writes beside a journal that it reads
                if not has_journal:
                    raise
                notes.note(f"log {path}: its last messages, in {journal.name}, cannot be read: {error}")
                self._channels = self._opened(file, "mode=ro&immutable=1")
        except (sqlite3.Error, TypeError, OverflowError) as error:
            raise LogError(
                f"log {path}: its topics cannot be read from the database: {error}; {_RECOVER}"
            ) from error
        self.start_ns = self.end_ns = 0
        self.counts = dict.fromkeys(self._channels.values(), -1)
        try:
            self._measure()
        except sqlite3.Error as error:
            self._notes.findings.unindexed += 1
            self._notes.note(
                f"log {path}: the database is damaged ({error}); it is read as far as it goes; {_RECOVER}"
            )

    def parts(self, channels: Collection[Channel], start_ns: float, end_ns: float) -> Iterator[Part]:
        wanted = {number: channel for number, channel in self._channels.items() if channel in channels}
        if wanted:
            yield max(start_ns, self.start_ns), partial(self._read, wanted, start_ns, end_ns)

    def spans(self, longest_ns: int) -> Iterator[Span]:
        """When the file has how many messages.

        Where it lasts for longer than this, by stretches of that length.
        """
        if self.end_ns - self.start_ns <= longest_ns:
            yield Span(self.start_ns, self.end_ns, sum(self.counts.values()), frozenset(self.counts))
            return
        rows = (
            "SELECT topic_id, count(*), min(timestamp), max(timestamp) FROM messages"
            f" WHERE typeof(timestamp) = 'integer' GROUP BY topic_id, timestamp / {longest_ns}"
        )
        for number, count, start_ns, end_ns in self._db.execute(rows).fetchall():
            if number in self._channels:
                yield Span(start_ns, end_ns, count, frozenset({self._channels[number]}))

    def close(self) -> None:
        """Close the database; what SQLite has put beside a journal to read it goes."""
        self._db.close()
        if not self._left_as_it_was:
            with contextlib.suppress(OSError):
                self._shared.unlink(missing_ok=True)

    def _opened(self, file: Path, how: str) -> dict[int, Channel]:
        self._db = sqlite3.connect(
            f"file:{quote(os.fsencode(file))}?{how}", uri=True, check_same_thread=False
        )
        self._db.set_progress_handler(self._goes_in_circles, _STEPS_AT_ONCE)
        self._db.text_factory = lambda data: data.decode(errors="replace")
        try:
            self._db.execute(
                "PRAGMA writable_schema=ON"
            )  # which opens files that are shorter than they should be, too
            return self._read_topics()
        except BaseException:
            self.close()
            raise

    def _goes_in_circles(self) -> bool:
        """Whether a query takes longer than the size of the file can explain.

        Damaged pages may lead to each other.
        """
        self._steps += _STEPS_AT_ONCE
        return self._steps > _STEPS_PER_BYTE * (self._size + _STEPS_AT_ONCE)

    def _columns(self, table: str) -> set[str]:
        return {str(row[1]) for row in self._db.execute(f"PRAGMA table_info({table})")}

    def _read_topics(self) -> dict[int, Channel]:
        columns = self._columns("topics")
        if not columns >= {"id", "name", "type"} or not self._columns("messages") >= {
            "topic_id",
            "timestamp",
            "data",
        }:
            raise sqlite3.DatabaseError("it has no tables `topics` and `messages` as rosbag2 writes them")
        definitions: dict[str, tuple[str, str]] = {}
        if self._columns("message_definitions"):
            rows = self._db.execute(
                "SELECT topic_type, encoded_message_definition, encoding FROM message_definitions"
            )
            definitions = {name: (text, kind) for name, text, kind in rows if kind in _FORMATS}
        more = ", ".join(name if name in columns else "''" for name in _LATER_COLUMNS)
        rows = self._db.execute(
            f"SELECT id, name, type, serialization_format, {more} FROM topics ORDER BY id"
        )
        none = "", ""
        return {
            int(number): Channel(
                str(name),
                str(kind),
                str(form),
                *definitions.get(kind, none),
                str(digest or ""),
                is_latched(str(qos)),
            )
            for number, name, kind, form, digest, qos in rows
        }

    def _measure(self) -> None:
        (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
        if over := self._size % page_bytes:  # SQLite puts zeros in place of what is missing
            what = (
                "the file breaks off within a page: a message may hold up to"
                f" {page_bytes - over:,} wrong bytes; {_RECOVER}"
            )
            self._notes.lost(self.path, "page", what, size_bytes=over, chunks=1)
        counts: Counter[int] = Counter()
        spans: list[int] = []
        rows = "SELECT topic_id, count(*), min(timestamp), max(timestamp) FROM messages GROUP BY topic_id"
        for number, count, *span in self._db.execute(rows):
            spans += [t_ns for t_ns in span if isinstance(t_ns, int)]
            if number in self._channels:
                counts[number] = count
            else:
                what = f"{count} messages of a topic that it does not name (number {number})"
                self._notes.lost(self.path, ("topic", number), what, messages=count)
        times = (
            "SELECT timestamp, timestamp, 1 FROM messages WHERE typeof(timestamp) = 'integer' ORDER BY id"
        )
        self._notes.set_back(self.path, self._db.execute(times))
        self.start_ns, self.end_ns = min(spans, default=0), max(spans, default=0)
        self.counts = {channel: counts[number] for number, channel in self._channels.items()}

    def _read(self, wanted: dict[int, Channel], start_ns: float, end_ns: float) -> Iterator[RawMessage]:
        self._steps = reached_ns = 0
        rows = (
            "SELECT id, timestamp, topic_id, data FROM messages WHERE topic_id IN"
            f" ({','.join(map(str, wanted))}) AND timestamp >= ? AND timestamp < ? ORDER BY timestamp, id"
        )
        try:
            for number, t_ns, topic, data in self._db.execute(rows, (start_ns, end_ns)):
                if not isinstance(t_ns, int) or not isinstance(data, bytes) or topic not in wanted:
                    self._notes.lost(
                        self.path, number, f"message number {number} is none; it is left out", messages=1
                    )
                    continue
                reached_ns = t_ns
                yield RawMessage(t_ns, wanted[topic], data)
        except sqlite3.Error as error:
            why = (
                f"the database is damaged ({error}); what comes after {reached_ns} ns is left out;"
                f" {_RECOVER}"
            )
            self._notes.lost(self.path, "damage", why, messages=1)
