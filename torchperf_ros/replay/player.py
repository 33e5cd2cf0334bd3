"""Hands out the messages of a log when they are due."""

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from torchperf_ros.core.clock import NS_PER_MS, NS_PER_S, Clock
from torchperf_ros.replay.pace import Pace

LATE_NS: Final = 5 * NS_PER_MS
ROUND_GAP_NS: Final = NS_PER_S // 10
"""Between the last message of a round and the first of the next."""
_LONGEST_WAIT_NS: Final = NS_PER_S  # a lock cannot wait for as long as a log can be silent


class Timed(Protocol):
    """What can be played: it was received at `t_ns` of the log's time."""

    @property
    def t_ns(self) -> int: ...  # noqa: D102 - as above


M = TypeVar("M", bound=Timed)


@dataclass
class Tally:
    """What a player has done.

    Attributes:
        played: messages.
        late: those of them that went out more than 5 ms after they were due.
        worst_late_ms: by how much the latest one was.
        rounds: how often the log was begun.
    """

    played: int = 0
    late: int = 0
    worst_late_ms: float = 0.0
    rounds: int = 0

    def add(self, late_ns: int) -> None:
        """Count a message that went out so long after it was due."""
        self.played += 1
        self.late += late_ns > LATE_NS
        self.worst_late_ms = max(self.worst_late_ms, late_ns / NS_PER_MS)


class Player(Generic[M]):
    """Plays on the thread that calls `play`; the other methods are for any thread.

    Attributes:
        tally: what it has done.
    """

    def __init__(
        self,
        publish: Callable[[M], None],
        *,
        rate: float = 1.0,
        prepare: Callable[[M, int], M] = lambda message, _due_ns: message,
        tell_time: Callable[[int], None] = lambda _log_ns: None,
        clock_hz: float = 0.0,
        paused: bool = False,
        clock: Clock = time.monotonic_ns,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """Prepare to play.

        Args:
            publish: takes a message when it is due.
            rate: how much faster than recorded, > 0.
            prepare: does with a message, given when it is due, what can be done before that.
            tell_time: told the log's time, in ns, just before each message.
            clock_hz: told it so often as well, also during a pause; 0: not.
            paused: whether to begin with a pause.
            clock: the monotonic clock.
            wait: waits on it for so many seconds, or less if there is news.
        """
        self.tally = Tally()
        self._publish, self._prepare, self._tell_time = publish, prepare, tell_time
        self._tick_every_ns = round(NS_PER_S / clock_hz) if clock_hz else 0
        self._next_tick_ns = 0
        self._clock = clock
        self._changed = threading.Condition()
        self._wait = wait or self._changed.wait
        self._pace = Pace(0, 0, rate)
        if paused:
            self._pace.pause(0)
        self._waiting: M | None = None  # what waits until it is due, or asked for
        self._ended = False

    # -- for any thread -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Let the log's time stand still."""
        with self._changed:
            self._pace.pause(self._clock())
            self._changed.notify_all()

    def resume(self) -> None:
        """Go on where the pause began."""
        with self._changed:
            self._pace.resume(self._clock())
            self._changed.notify_all()

    def toggle(self) -> bool:
        """Pause or go on; returns whether it is paused now."""
        (self.resume if self.paused else self.pause)()
        return self.paused

    def play_next(self) -> bool:
        """Have the next message go out and no further one; False if there is no pause, or no message yet."""
        with self._changed:
            if self._waiting is None or not self._pace.paused:
                return False
            now_ns = self._clock()
            self._pace.jump(max(self._waiting.t_ns, self._pace.log_ns(now_ns)), now_ns)
            self._waiting = None
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """Have `play` return."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        """Whether the log's time stands still."""
        return self._pace.paused

    @property
    def log_ns(self) -> int:
        """The log's time now."""
        return self._pace.log_ns(self._clock())

    # -- the playing thread -------------------------------------------------------------------------------------------

    def play(self, messages: Iterable[M | None]) -> None:
        """Play messages until there are none left, or `end` is called.

        Args:
            messages: in the log's order; None: what follows is the log from its start, once more.
        """
        begin_ns: int | None = self._clock()
        for message in messages:
            if message is None:
                begin_ns = self._clock() + ROUND_GAP_NS
            else:
                if begin_ns is not None:
                    self._begin_round(message, begin_ns)
                    begin_ns = None
                if not self._play(message):
                    return

    def _begin_round(self, first: M, now_ns: int) -> None:
        with self._changed:
            self._pace.jump(first.t_ns, max(now_ns, self._clock()))
        self.tally.rounds += 1

    def _play(self, message: M) -> bool:
        """Play a message when it is due; False at the end."""
        with self._changed:
            self._waiting = message
            due_ns = self._pace.due_ns(message.t_ns)
        ready = self._prepare(message, due_ns)
        while (came_ns := self._wait_until_due(message)) != due_ns:
            if came_ns is None:
                return False
            due_ns = came_ns  # a pause came between
            ready = self._prepare(message, due_ns)
        now_ns = self._clock()
        self._tell_time(self._pace.log_ns(now_ns))
        self._publish(ready)
        self.tally.add(now_ns - due_ns)
        return True

    def _wait_until_due(self, message: M) -> int | None:
        """Wait until a message is due; returns when that was, None at the end."""
        with self._changed:
            while not self._ended:
                now_ns = self._clock()
                due_ns = self._pace.due_ns(message.t_ns)
                wait_ns = self._pace.wait_ns(due_ns, now_ns)
                if wait_ns <= 0 or self._waiting is None:
                    self._waiting = None
                    return due_ns
                self._wait(min(wait_ns, self._tick(now_ns), _LONGEST_WAIT_NS) / NS_PER_S)
        return None

    def _tick(self, now_ns: int) -> float:
        """Tell the time if it is time to; returns in how many ns it is so again."""
        if not self._tick_every_ns:
            return math.inf
        if now_ns >= self._next_tick_ns:
            self._next_tick_ns = now_ns + self._tick_every_ns - (now_ns - self._next_tick_ns) % self._tick_every_ns
            self._tell_time(self._pace.log_ns(now_ns))
        return self._next_tick_ns - now_ns
