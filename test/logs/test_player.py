"""When messages are due and go out, on a clock that is set by hand; reading ahead, with real threads."""

import itertools
import threading
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.clock import NS_PER_MS, NS_PER_S, VirtualClock
from torchperf_ros.logs.player import Pace, Player, ReadAhead, Tally

LOG_MS = 1_600_000_000_000
LOG_NS = LOG_MS * NS_PER_MS
START_NS = 5_000 * NS_PER_S


# -- when they are due ------------------------------------------------------------------------------------------------


def due_ms(pace, *at_ms):
    """When messages of these times of the log are due, in ms after the start."""
    return [(pace.due_ns(LOG_NS + round(ms * NS_PER_MS)) - START_NS) / NS_PER_MS for ms in at_ms]


def test_given_a_clock_that_was_set_back_when_asked_then_the_log_goes_on_from_there_at_its_pace():
    pace = Pace(LOG_NS, START_NS)
    assert due_ms(pace, 5000, -3_600_000, -3_599_967) == [5000, 5000, 5033]
    assert pace.log_ns(START_NS + 5033 * NS_PER_MS) == LOG_NS - 3_599_967 * NS_PER_MS


def test_given_a_pause_when_resumed_then_time_stood_still_and_all_that_follows_moves_by_it():
    pace = Pace(LOG_NS, START_NS, 2.0)
    pace.pause(START_NS + 10 * NS_PER_MS)
    pace.pause(START_NS + 400 * NS_PER_MS)  # it is paused already
    assert pace.log_ns(START_NS + 500 * NS_PER_MS) == LOG_NS + 20 * NS_PER_MS
    pace.resume(START_NS + 1010 * NS_PER_MS)
    assert due_ms(pace, 20, 40) == [1010, 1020]
    assert pace.log_ns(START_NS + 1010 * NS_PER_MS) == LOG_NS + 20 * NS_PER_MS


@given(st.lists(st.integers(-10 * NS_PER_S, 100 * NS_PER_S), min_size=1, max_size=20), st.floats(0.01, 100.0))
def test_given_any_log_when_asked_in_its_order_then_nothing_is_due_before_what_came_earlier(times_ns, rate):
    pace = Pace(times_ns[0], START_NS, rate)
    due_ns = [pace.due_ns(t_ns) for t_ns in times_ns]
    assert due_ns[0] == START_NS
    assert due_ns == sorted(due_ns)


# -- when they go out -------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    t_ns: int
    name: str = ""


class Drive:
    """A player whose publishing takes as long as the test says, and whom the test interrupts at given times."""

    def __init__(self, publish_ms=(), at_ms=(), **options):
        self.clock = VirtualClock()
        self.start_ns = self.clock()
        self.published = []
        self.times = []
        self._publish_ms = iter(publish_ms)
        self._events = list(at_ms)
        self.player = Player(
            self._publish, prepare=lambda message, due_ns: (message, due_ns), publish_time=self._tell,
            clock=self.clock, wait=self._wait, **options,
        )  # fmt: skip

    def play(self, *at_ms):
        self.player.play(
            [None if ms is None else Message((LOG_MS * NS_PER_MS) + round(ms * NS_PER_MS), f"{ms}") for ms in at_ms]
        )
        return self.published

    @property
    def now_ms(self):
        return (self.clock() - self.start_ns) / NS_PER_MS

    def _wait(self, seconds):
        """Until then, or until the test's next event if that comes before."""
        until_ms = self.now_ms + seconds * 1e3
        if self._events and self._events[0][0] <= until_ms:
            until_ms, act = self._events.pop(0)
            self.clock.advance_ms(until_ms - self.now_ms)
            act(self.player)
        else:
            self.clock.advance_ms(max(until_ms - self.now_ms, 1e-6))

    def _publish(self, prepared):
        message, due_ns = prepared
        self.published.append((self.now_ms, message.name, (due_ns - self.start_ns) / NS_PER_MS))
        self.clock.advance_ms(next(self._publish_ms, 0.0))

    def _tell(self, log_ns):
        self.times.append((self.now_ms, log_ns / NS_PER_MS - LOG_MS))


def times(published):
    return [at_ms for at_ms, _, _ in published]


def test_given_a_log_when_played_then_each_message_goes_out_when_it_is_due():
    drive = Drive(rate=2.0)
    assert drive.play(500, 520, 2500) == [(0.0, "500", 0.0), (10.0, "520", 10.0), (1000.0, "2500", 1000.0)]
    assert drive.player.tally == Tally(played=3, rounds=1)


@pytest.mark.parametrize(
    ("options", "log_ms", "out_ms", "late"),
    [
        # a slow subscriber: later messages are back on time
        ({"publish_ms": [50.0, 1.0]}, (0, 33, 46, 66), [0, 50, 51, 66], 1),
        # pauses: nothing goes out meanwhile
        ({"at_ms": [(10, Player.pause), (500, Player.toggle), (505, Player.toggle), (1505, Player.resume)]},
         (0, 33, 66), [0, 1523, 1556], 0),
        # the next one asked for in a pause: the log goes on from there; messages of one time go out one by one
        ({"paused": True, "at_ms": [(40, Player.play_next), (70, Player.play_next), (100, Player.resume),
                                    (101, Player.play_next)]}, (0, 33, 66, 99), [40, 70, 133, 166], 0),
        ({"paused": True, "at_ms": [(40, Player.play_next), (80, Player.play_next), (120, Player.play_next),
                                    (200, Player.resume)]}, (0, 0, -20, 10), [40, 80, 120, 210], 0),
        # the end, also in a pause
        ({"at_ms": [(20, Player.end)]}, (0, 10, 33), [0, 10], 0),
        ({"at_ms": [(5, Player.pause), (20, Player.end)]}, (0, 10), [0], 0),
        # rounds: a gap between them
        ({}, (0, 50, None, 0, 50), [0, 50, 150, 200], 0),
    ],
)  # fmt: skip
def test_given_a_log_when_played_then_messages_go_out_in_time_whatever_comes_between(options, log_ms, out_ms, late):
    drive = Drive(**options)
    published = drive.play(*log_ms)
    assert times(published) == out_ms
    assert [due_ms for _, _, due_ms in published] == out_ms or late  # what was prepared before a pause is prepared anew
    tally = drive.player.tally
    assert (tally.played, tally.late, tally.rounds) == (len(out_ms), late, 1 + log_ms.count(None))
    assert tally.worst_late_ms == pytest.approx(17.0 if late else 0.0)


def test_given_a_message_that_is_overdue_when_a_pause_begins_then_it_waits_as_well():
    drive = Drive(publish_ms=[50.0], at_ms=[(300, Player.resume)])
    drive.player.tally.add = lambda _: drive.now_ms == 50 and drive.player.pause()
    assert times(drive.play(0, 33, 66)) == [0, 300, 316]


@pytest.mark.parametrize(
    ("options", "log_ms", "told"),
    [
        ({"rate": 2.0, "clock_hz": 100.0, "at_ms": [(25, Player.pause), (45, Player.resume)]}, (0, 70),
         [(0, 0), (0, 0), (10, 20), (20, 40), (30, 50), (40, 50), (50, 60), (55, 70)]),
        # a slow publish: the ticks that follow are back in step
        ({"publish_ms": [14.0], "clock_hz": 100.0}, (0, 35), [(0, 0), (14, 14), (20, 20), (30, 30), (35, 35)]),
        # rounds: the time goes back with the log
        ({}, (0, 50, None, 0, 50), [(0, 0), (50, 50), (150, 0), (200, 50)]),
    ],
)  # fmt: skip
def test_given_a_clock_rate_when_played_then_time_is_told_so_often_and_before_each_message(options, log_ms, told):
    drive = Drive(**options)
    drive.play(*log_ms)
    assert drive.times == told


# -- read ahead -------------------------------------------------------------------------------------------------------


def test_given_a_slow_taker_when_read_ahead_then_no_more_waits_than_allowed():
    read = []
    full = threading.Event()

    def source():
        for number in itertools.count():
            read.append(number)
            if number == 4:  # the fifth finds no room
                full.set()
            yield number

    ahead = ReadAhead(source(), lambda _: 1000, 4 * 1512)
    assert full.wait(10)
    assert read == [0, 1, 2, 3, 4]
    assert next(iter(ahead)) == 0
    ahead.close()
    assert len(read) <= 6


def test_given_a_source_that_breaks_off_when_read_ahead_then_what_came_before_is_given_first():
    def source():
        yield from range(1000)
        raise ValueError("damaged here")

    items = iter(ReadAhead(source(), lambda _: 1, 4000))
    assert [next(items) for _ in range(1000)] == list(range(1000))
    with pytest.raises(ValueError, match="damaged here"):
        next(items)
