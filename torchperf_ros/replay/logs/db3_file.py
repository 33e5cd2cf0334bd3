"""A `.db3` file of rosbag2: in the order of its times, and what is left of it if the database is damaged."""

import contextlib
import fcntl
import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from torchperf_ros.replay.logs.log_notes import LogNotes
from torchperf_ros.replay.logs.log_storage import Channel, LogError, Part, RawMessage, Storage, is_latched

_FARTHEST_ID: Final = 1 << 40
_STEPS_AT_ONCE: Final = 1_000_000
_STEPS_PER_BYTE: Final = 100  # a sound database needs about one
_IN_USE: Final = 128
"""Whoever has a `-shm` file open holds a lock on this byte of it: `UNIX_SHM_DMS` in SQLite's `os_unix.c`."""
_FORMATS: Final = {"ros2msg", "ros2idl"}


class Db3File(Storage):
    """One `.db3` file, whole or damaged."""

    kind, magic = "a database of SQLite", b"SQLite format 3\0"

    def __init__(self, path: Path, notes: LogNotes, unpacked: Path | None = None) -> None:
        """Open it and read its topics.

        A recorder that was killed leaves its last messages in a file `-wal` beside it; they are read, too.

        Args:
            path: the file, as it is called in what is said.
            notes: told of what is wrong.
            unpacked: where its bytes are, if it was compressed as a whole.

        Raises:
            LogError: it is no database of rosbag2, or its topics cannot be read.
        """
        self.path = path
        self._notes = notes
        self._size = (unpacked or path).stat().st_size
        self._steps = 0
        with (unpacked or path).open("rb") as file:
            begin = file.read(len(self.magic))
        if begin != self.magic:
            raise self._nothing(begin)
        journal, self._shared = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
        self._left_as_it_was = self._shared.exists()
        try:
            if journal.is_file() and journal.stat().st_size:
                try:
                    self._channels = self._opened(unpacked or path, "mode=ro")
                except sqlite3.OperationalError as error:  # SQLite writes beside a journal that it reads
                    notes.tell(f"log {path}: its last messages, in {journal.name}, cannot be read: {error}")
                    self._channels = self._opened(unpacked or path, "mode=ro&immutable=1")
            else:
                self._channels = self._opened(unpacked or path, "mode=ro&immutable=1")
        except (sqlite3.Error, TypeError, OverflowError) as error:
            msg = f"log {path}: its topics cannot be read from the database: {error}"
            raise LogError(msg) from error
        self.counts = dict.fromkeys(self._channels.values(), -1)
        try:
            self._measure()
        except sqlite3.Error as error:
            self._notes.findings.unindexed += 1
            self._notes.tell(f"log {self.path}: the database is damaged ({error}); it is read as far as it goes")

    def parts(self, channels: Collection[Channel], start_ns: int | None, end_ns: int | None) -> Iterator[Part]:
        """See `Storage`."""
        wanted = {number: channel for number, channel in self._channels.items() if channel in channels}
        if wanted:
            first_ns = self.start_ns if start_ns is None else max(start_ns, self.start_ns)
            yield Part(first_ns, partial(self._read, wanted, start_ns, end_ns))

    def close(self) -> None:
        """Close the database; what SQLite has put beside its journal goes, if no other process uses it by now."""
        self._db.close()
        if not self._left_as_it_was:
            with contextlib.suppress(OSError), self._shared.open("r+b") as shared:
                fcntl.lockf(shared, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _IN_USE)
                self._shared.unlink()

    def _opened(self, file: Path, how: str) -> dict[int, Channel]:
        """Open the database; returns its topics."""
        self._db = sqlite3.connect(f"file:{quote(os.fsencode(file))}?{how}", uri=True, check_same_thread=False)
        self._db.set_progress_handler(self._goes_in_circles, _STEPS_AT_ONCE)
        self._db.text_factory = lambda data: data.decode(errors="replace")
        try:
            self._db.execute("PRAGMA writable_schema=ON")  # which opens files that are shorter than they should be, too
            return self._read_topics()
        except BaseException:
            self.close()
            raise

    def _goes_in_circles(self) -> bool:
        """Whether a query takes longer than the size of the file can explain: damaged pages may lead to each other."""
        self._steps += _STEPS_AT_ONCE
        return self._steps > _STEPS_PER_BYTE * (self._size + _STEPS_AT_ONCE)

    def _columns(self, table: str) -> set[str]:
        return {str(row[1]) for row in self._db.execute(f"PRAGMA table_info({table})")}

    def _read_topics(self) -> dict[int, Channel]:
        columns = self._columns("topics")
        if not columns >= {"id", "name", "type"} or not self._columns("messages") >= {"topic_id", "timestamp", "data"}:
            msg = "it has no tables `topics` and `messages` as rosbag2 writes them"
            raise sqlite3.DatabaseError(msg)
        definitions: dict[str, tuple[str, str]] = {}
        if self._columns("message_definitions"):
            rows = self._db.execute("SELECT topic_type, encoding, encoded_message_definition FROM message_definitions")
            definitions = {name: (text, kind) for name, kind, text in rows if kind in _FORMATS}
        more = [name if name in columns else "''" for name in ("type_description_hash", "offered_qos_profiles")]
        rows = self._db.execute(
            f"SELECT id, name, type, serialization_format, {', '.join(more)} FROM topics ORDER BY id"
        )
        return {
            int(number): Channel(
                str(name),
                str(kind),
                str(form),
                *definitions.get(kind, ("", "")),
                str(digest or ""),
                is_latched(str(qos)),
            )
            for number, name, kind, form, digest, qos in rows
        }

    def _measure(self) -> None:
        first, last = self._db.execute("SELECT min(timestamp), max(timestamp) FROM messages").fetchone()
        self.start_ns, self.end_ns = _integer(first), _integer(last)
        counts: Counter[int] = Counter()
        for number, count in self._db.execute("SELECT topic_id, count(*) FROM messages GROUP BY topic_id"):
            if number in self._channels:
                counts[number] = count
            else:
                what = f"{count} messages of a topic that it does not name (number {number})"
                self._notes.lost(self.path, ("topic", number), what, messages=count)
        self.counts = {channel: counts[number] for number, channel in self._channels.items()}

    def _read(self, wanted: dict[int, Channel], start_ns: int | None, end_ns: int | None) -> Iterator[RawMessage]:
        """By time; from where the database is damaged on, by number, without what has come already."""
        self._steps = 0
        reached = (-1 << 63, -1)
        rows = (
            f"SELECT id, timestamp, topic_id, data FROM messages WHERE topic_id IN ({','.join(map(str, wanted))})"
            f"{'' if start_ns is None else f' AND timestamp >= {start_ns}'}"
            f"{'' if end_ns is None else f' AND timestamp < {end_ns}'} ORDER BY timestamp, id"
        )
        try:
            for number, t_ns, topic, data in self._db.execute(rows):
                if (message := self._checked(number, t_ns, wanted.get(topic), data)) is None:
                    continue
                if (message.t_ns, number) <= reached:
                    msg = "its index leads backwards"
                    raise sqlite3.DatabaseError(msg)
                reached = (message.t_ns, number)
                yield message
        except sqlite3.Error as error:
            why = f"the database is damaged ({error}); the rest is read in the order of writing"
            self._notes.lost(self.path, "index", why)
            for message, number in self._salvaged(wanted):
                within = (start_ns is None or message.t_ns >= start_ns) and (end_ns is None or message.t_ns < end_ns)
                if within and (message.t_ns, number) > reached:
                    yield message

    def _salvaged(self, wanted: dict[int, Channel]) -> Iterator[tuple[RawMessage, int]]:
        """Every message that can still be found, without the index; steps over damaged pages, ever farther."""
        one = "SELECT id, timestamp, topic_id, data FROM messages NOT INDEXED WHERE id >= ? ORDER BY id LIMIT 1"
        begin, damaged, at = 0, -1, 0  # of a gap; what was tried last in it; what is tried next
        while at < _FARTHEST_ID:
            try:  # one row at a time, as Python's sqlite3 drops a row if the next one is damaged
                row = self._db.execute(one, (at,)).fetchone()
                if row is not None and row[0] < at:
                    msg = "its pages lead backwards"
                    raise sqlite3.DatabaseError(msg)
            except sqlite3.Error as error:
                self._notes.lost(
                    self.path, begin, f"messages from number {begin} on cannot be read ({error})", messages=1
                )
                damaged, at = at, at + 1 + (at - begin) // 8
                continue
            if begin <= damaged < at - 1:  # a step may have led over sound rows: back, until there are none between
                at = (damaged + at) // 2
                continue
            if row is None:
                return
            number, t_ns, topic, data = row
            begin = at = number + 1
            if topic in wanted and (found := self._checked(number, t_ns, wanted[topic], data)) is not None:
                yield found, number

    def _checked(self, number: int, t_ns: Any, channel: Channel | None, data: Any) -> RawMessage | None:  # noqa: ANN401
        """A message, if the columns hold what they should; SQLite lets any column hold anything."""
        if isinstance(t_ns, int) and isinstance(data, bytes) and channel is not None:
            return RawMessage(t_ns, channel, data)
        self._notes.lost(self.path, number, f"message number {number} is no message; it is left out", messages=1)
        return None


def _integer(value: Any) -> int:  # noqa: ANN401 - whatever a damaged database holds
    return value if isinstance(value, int) else 0
