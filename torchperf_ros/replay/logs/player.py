"""Which messages of a log are played and when they are due.

Reading ahead, so that none waits for a disk.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S, Clock
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.text import listed
from torchperf_ros.replay.logs.log_reader import LogMessage, LogReader, LogTopic

T = TypeVar("T", bound=LogMessage | None)

_SET_BACK_NS: Final = NS_PER_S
_LONGEST_GAP_NS: Final = 86_400 * NS_PER_S
_LATE_NS: Final = 5 * NS_PER_MS
_ROUND_GAP_NS: Final = NS_PER_S // 10  # between the last message of a round and the first of the next
_LONGEST_WAIT_NS: Final = NS_PER_S  # a lock cannot wait for as long as a log can be silent
_MESSAGE_BYTES: Final = 512  # what a message that was read ahead costs beside its data


class PlayError(TorchperfError):
    """A log cannot be played as asked; the message says why and what would do."""


def choose_topics(
    log: LogReader, names: Set[str] | None, renamed: Set[str] = frozenset()
) -> dict[str, LogTopic]:
    """The topics of a log that have these names, None.

    All that have messages; what is `renamed` has to be there, too.

    Raises:
        PlayError: one is not there, or there are none.
    """
    filled = {name: topic for name, topic in log.topics.items() if topic.count}
    if unknown := sorted(((names or frozenset()) | renamed) - log.topics.keys()):
        raise PlayError(f"log {log.path}: has no topic {listed(unknown)}; it has: {listed(sorted(filled))}")
    chosen = filled if names is None else {name: log.topics[name] for name in sorted(names)}
    if not chosen:
        raise PlayError(f"log {log.path}: has no messages")
    return chosen


def part_ns(log: LogReader, start_s: float, duration_s: float | None) -> tuple[int, int]:
    """Begin and end of a part in the log's time; equal where the log does not say.

    Left out is so much of the log's beginning; the part is so long, or reaches to the log's end.
    """
    begin_ns = log.start_ns + round(start_s * NS_PER_S)
    end_ns = max(log.end_ns, begin_ns)
    return begin_ns, end_ns if duration_s is None else min(end_ns, begin_ns + round(duration_s * NS_PER_S))


def rounds(
    log: LogReader,
    topics: Mapping[str, LogTopic],
    start_s: float = 0.0,
    duration_s: float | None = None,
    loop: bool = False,
) -> Iterator[LogMessage | None]:
    """The messages of a part in the log's order, once or again and again.

    None between one round and the next.

    Raises:
        LogError: the log cannot be read any further.
        PlayError: there is no message to play.
    """
    begin_ns = log.start_ns + round(start_s * NS_PER_S)
    stop_ns = None if duration_s is None else begin_ns + round(duration_s * NS_PER_S)
    while True:
        played = False
        for message in log.part(topics.keys(), begin_ns if start_s else None, stop_ns):
            yield message
            played = True
        if not played:
            raise PlayError(
                f"log {log.path}: has no message of {listed(sorted(topics))} in this part of it"
            )
        if not loop:
            return
        yield None


class HeaderStamps:
    """What `--restamp` does: headers get the time at which their message is published.

    `kept` messages went on with the stamp they had, as they are too short for one or the time is too late.
    """

    def __init__(self, topics: Collection[str], *, log_time: bool) -> None:
        """Stamp the messages on these topics, with the log's time or with that of now."""
        self.kept = 0
        self._topics, self._log_time = topics, log_time
        self._ros_offset_ns = time.time_ns() - time.monotonic_ns()

    def stamp(self, message: LogMessage, due_ns: int) -> LogMessage:
        """The message as it is published when it is due; again with another time after a pause."""
        if message.topic not in self._topics:
            return message
        data = restamped(message.data, message.t_ns if self._log_time else due_ns + self._ros_offset_ns)
        self.kept += data is message.data
        return message._replace(data=data)


class Pace:
    """When the messages of a log are due, on the monotonic clock.

    It counts from one start, so that delays do not add up; a pause moves all that is still to come. A gap
    in the log stays a gap. A message that was received before its predecessor is due together with it; if
    it is more than a second before, the recorder's clock was set back, and the log goes on from there. So
    it does after more than a day.
    """

    def __init__(self, log_start_ns: int, start_ns: int, rate: float = 1.0) -> None:
        """A monotonic time has this time of the log; from it on the log goes so much faster, > 0."""
        self._rate = rate
        self._paused_ns: int | None = None
        self.jump(log_start_ns, start_ns)

    def jump(self, t_ns: int, now_ns: int) -> None:
        """Go on from here: the time `t_ns` of the log is reached at `now_ns` of the monotonic clock."""
        self._log_start_ns = self._latest_ns = t_ns
        self._start_ns = now_ns
        if self._paused_ns is not None:
            self._paused_ns = now_ns

    def due_ns(self, t_ns: int) -> int:
        """Monotonic time at which a message of the log's time `t_ns` is due.

        To be asked in the log's order.
        """
        if not self._latest_ns - _SET_BACK_NS <= t_ns <= self._latest_ns + _LONGEST_GAP_NS:
            self.jump(t_ns, self._due_ns(self._latest_ns))
        self._latest_ns = max(self._latest_ns, t_ns)
        return self._due_ns(self._latest_ns)

    def _due_ns(self, t_ns: int) -> int:
        return self._start_ns + round((t_ns - self._log_start_ns) / self._rate)

    def log_ns(self, now_ns: int) -> int:
        """Time of the log at this monotonic time; it stands still during a pause."""
        now_ns = now_ns if self._paused_ns is None else self._paused_ns
        return self._log_start_ns + round((now_ns - self._start_ns) * self._rate)

    @property
    def paused(self) -> bool:
        return self._paused_ns is not None

    def pause(self, now_ns: int) -> None:
        if self._paused_ns is None:
            self._paused_ns = now_ns

    def resume(self, now_ns: int) -> None:
        if self._paused_ns is not None:
            self._start_ns += now_ns - self._paused_ns
            self._paused_ns = None


@dataclass
class Tally:
    played: int = 0  # messages
    late: int = 0  # those of them that went out more than 5 ms after they were due
    worst_late_ms: float = 0.0  # by how much the latest one was
    rounds: int = 0  # how often the log was begun

    def add(self, late_ns: int) -> None:
        self.played += 1
        self.late += late_ns > _LATE_NS
        self.worst_late_ms = max(self.worst_late_ms, late_ns / NS_PER_MS)


class Player:
    """Plays on the thread that calls `play`.

    The other methods are for any thread. `tally`: what it has done.
    """

    def __init__(
        self,
        publish: Callable[[LogMessage], None],
        *,
        rate: float = 1.0,
        prepare: Callable[[LogMessage, int], LogMessage] = lambda message, _due_ns: message,
        publish_time: Callable[[int], None] = lambda _log_ns: None,
        clock_hz: float = 0.0,
        paused: bool = False,
        clock: Clock = time.monotonic_ns,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """Prepare to play, so much faster than recorded (`rate` > 0), and to begin with a pause if `paused`.

        `publish` takes a message when it is due, on the monotonic `clock`; `prepare` does with it, given
        when that is, what can be done before. `publish_time` takes the log's time in ns before each
        message, and `clock_hz` times a second besides, also during a pause (0: not). `wait` waits for so
        many seconds, or less if there is news.
        """
        self.tally = Tally()
        self._publish, self._prepare, self._publish_time = publish, prepare, publish_time
        self._tick_every_ns = round(NS_PER_S / clock_hz) if clock_hz else 0
        self._next_tick_ns = 0
        self._clock = clock
        self._changed = threading.Condition()
        self._wait = wait or self._changed.wait
        self._pace = Pace(0, 0, rate)
        if paused:
            self._pace.pause(0)
        self._ended = False

    def pause(self) -> None:
        with self._news():
            self._pace.pause(self._clock())

    def resume(self) -> None:
        with self._news():
            self._pace.resume(self._clock())

    def toggle(self) -> None:
        (self.resume if self.paused else self.pause)()

    def end(self) -> None:
        with self._news():
            self._ended = True

    @contextlib.contextmanager
    def _news(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        return self._pace.paused

    @property
    def log_ns(self) -> int:
        return self._pace.log_ns(self._clock())

    def play(self, messages: Iterable[LogMessage | None]) -> None:
        """Play messages, in the log's order, until there are none left or `end` is called.

        After None the log anew.
        """
        begin_ns: int | None = self._clock()
        for message in messages:
            if message is None:
                begin_ns = self._clock() + _ROUND_GAP_NS
                continue
            if begin_ns is not None:
                with self._changed:
                    self._pace.jump(message.t_ns, max(begin_ns, self._clock()))
                self.tally.rounds += 1
                begin_ns = None
            if not self._play(message):
                return

    def _play(self, message: LogMessage) -> bool:
        with self._changed:
            due_ns = self._pace.due_ns(message.t_ns)
        ready = self._prepare(message, due_ns)
        while (came_ns := self._wait_until_due(message)) != due_ns:
            if came_ns is None:
                return False
            due_ns = came_ns  # a pause came between
            ready = self._prepare(message, due_ns)
        now_ns = self._clock()
        self._publish_time(self._pace.log_ns(now_ns))
        self._publish(ready)
        self.tally.add(now_ns - due_ns)
        return True

    def _wait_until_due(self, message: LogMessage) -> int | None:
        """Wait until a message is due, and publish the time meanwhile.

        Returns when that was, None at the end.
        """
        with self._changed:
            while not self._ended:
                now_ns = self._clock()
                due_ns = self._pace.due_ns(message.t_ns)
                wait_ns = math.inf if self._pace.paused else due_ns - now_ns
                if wait_ns <= 0:
                    return due_ns
                if self._tick_every_ns:
                    if now_ns >= self._next_tick_ns:
                        passed_ns = (now_ns - self._next_tick_ns) % self._tick_every_ns
                        self._next_tick_ns = now_ns + self._tick_every_ns - passed_ns
                        self._publish_time(self._pace.log_ns(now_ns))
                    wait_ns = min(wait_ns, self._next_tick_ns - now_ns)
                self._wait(min(wait_ns, _LONGEST_WAIT_NS) / NS_PER_S)
        return None


class ReadAhead(Generic[T]):
    """Iterates over messages that another thread has read in advance, in memory that is bounded.

    What is due never waits for a disk or for decompression.
    """

    def __init__(self, source: Iterable[T], limit_bytes: int = 64 << 20) -> None:
        """Begin to read; so many bytes of messages may wait, or one message of any size."""
        self._source, self._limit_bytes = source, limit_bytes
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
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._held_bytes < self._limit_bytes)
                    if self._closed:
                        break
                    self._items.append(item)
                    self._held_bytes += _size_bytes(item)
                    self._changed.notify_all()
        except Exception as error:  # the thread's boundary: raised again where the items are taken
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        """The items; the error that ended the reading is raised after the last of them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._done)
                if not self._items:
                    break
                item = self._items.popleft()
                self._held_bytes -= _size_bytes(item)
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


def _size_bytes(message: LogMessage | None) -> int:
    return _MESSAGE_BYTES + (len(message.data) if message else 0)
