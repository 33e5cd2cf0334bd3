"""Which messages of a log are played, and when, on a clock that is set by hand.

Reading ahead, with real threads.
"""

import itertools
import struct
import threading
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S, VirtualClock
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage, LogReader, LogTopic
from torchperf_ros.replay.logs.player import (
    HeaderStamps,
    Pace,
    Player,
    PlayError,
    ReadAhead,
    Tally,
    choose_topics,
    part_ns,
    rounds,
)

from . import small_logs as logs

LOG_MS = 1_600_000_000_000
LOG_NS = LOG_MS * NS_PER_MS
START_NS = 5_000 * NS_PER_S


# -- when they are due


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


@given(
    st.lists(st.integers(-10 * NS_PER_S, 100 * NS_PER_S), min_size=1, max_size=20), st.floats(0.01, 100.0)
)
def test_given_any_log_when_asked_in_its_order_then_nothing_is_due_before_what_came_earlier(times_ns, rate):
    pace = Pace(times_ns[0], START_NS, rate)
    due_ns = [pace.due_ns(t_ns) for t_ns in times_ns]
    assert due_ns[0] == START_NS
    assert due_ns == sorted(due_ns)


# -- when they go out


class Message(NamedTuple):
    t_ns: int
    name: str = ""


class Drive:
    """A player whose publishing takes as long as the test wants, which interrupts it at given times."""

    def __init__(self, publish_ms=(), at_ms=(), **options):
        self.clock = VirtualClock()
        self.start_ns = self.clock()
        self.published = []
        self.times = []
        self._publish_ms = iter(publish_ms)
        self._events = list(at_ms)
        self.player = Player(
            self._publish,
            prepare=lambda message, due_ns: (message, due_ns),
            publish_time=self._tell,
            clock=self.clock,
            wait=self._wait,
            **options,
        )

    def play(self, *at_ms):
        self.player.play(
            [
                None if ms is None else Message((LOG_MS * NS_PER_MS) + round(ms * NS_PER_MS), f"{ms}")
                for ms in at_ms
            ]
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
        (
            {
                "at_ms": [
                    (10, Player.pause),
                    (500, Player.toggle),
                    (505, Player.toggle),
                    (1505, Player.resume),
                ]
            },
            (0, 33, 66),
            [0, 1523, 1556],
            0,
        ),
        # a pause from the beginning
        ({"paused": True, "at_ms": [(40, Player.resume)]}, (0, 33), [40, 73], 0),
        # the end, also in a pause
        ({"at_ms": [(20, Player.end)]}, (0, 10, 33), [0, 10], 0),
        ({"at_ms": [(5, Player.pause), (20, Player.end)]}, (0, 10), [0], 0),
        # rounds: a gap between them
        ({}, (0, 50, None, 0, 50), [0, 50, 150, 200], 0),
    ],
)
def test_given_a_log_when_played_then_messages_go_out_in_time_whatever_comes_between(
    options, log_ms, out_ms, late
):
    drive = Drive(**options)
    published = drive.play(*log_ms)
    assert times(published) == out_ms
    assert [
        due_ms for _, _, due_ms in published
    ] == out_ms or late  # what was prepared before a pause is prepared anew
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
        (
            {"rate": 2.0, "clock_hz": 100.0, "at_ms": [(25, Player.pause), (45, Player.resume)]},
            (0, 70),
            [(0, 0), (0, 0), (10, 20), (20, 40), (30, 50), (40, 50), (50, 60), (55, 70)],
        ),
        # a slow publish: the ticks that follow are back in step
        (
            {"publish_ms": [14.0], "clock_hz": 100.0},
            (0, 35),
            [(0, 0), (14, 14), (20, 20), (30, 30), (35, 35)],
        ),
        # rounds: the time goes back with the log
        ({}, (0, 50, None, 0, 50), [(0, 0), (50, 50), (150, 0), (200, 50)]),
    ],
)
def test_given_a_clock_rate_when_played_then_time_is_told_so_often_and_before_each_message(
    options, log_ms, told
):
    drive = Drive(**options)
    drive.play(*log_ms)
    assert drive.times == told


# -- read ahead


def message(number):
    return LogMessage("/topic", "std_msgs/msg/String", bytes(1000), number)


def test_given_a_slow_taker_when_read_ahead_then_no_more_waits_than_allowed():
    read = []
    full = threading.Event()

    def source():
        for number in itertools.count():
            read.append(number)
            if number == 4:  # the fifth finds no room
                full.set()
            yield message(number)

    ahead = ReadAhead(source(), 4 * 1512)
    assert full.wait(60)
    assert read == [0, 1, 2, 3, 4]
    assert next(iter(ahead)).t_ns == 0
    ahead.close()
    assert len(read) <= 6


def test_given_a_source_that_breaks_off_when_read_ahead_then_what_came_before_is_given_first():
    def source():
        yield from map(message, range(1000))
        raise ValueError("damaged here")

    items = iter(ReadAhead(source(), 4 * 1512))
    assert [next(items).t_ns for _ in range(1000)] == list(range(1000))
    with pytest.raises(ValueError, match="damaged here"):
        next(items)


# -- which messages, and what is stamped and said

HEADER = b"\x00\x01\x00\x00" + struct.pack("<iI", 3, 5) + bytes(8)
TOPICS = {"/text": LogTopic("/text", logs.TEXT)}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Five words, a second apart, and a number with each."""
    entries = [
        (*entry[:3], logs.START_NS + number // 2 * NS_PER_S) for number, entry in enumerate(logs.cdr(10))
    ]
    with LogReader(logs.rosbag2(tmp_path_factory.mktemp("log") / "log", entries=entries)) as reader:
        yield reader


class Broken:
    """A log that cannot be read any further after two messages, and one of another type."""

    path = "broken"
    start_ns = end_ns = 0

    def part(self, *_):
        yield from (LogMessage("/text", logs.TEXT, b"", number * NS_PER_S) for number in range(2))
        raise LogError("log broken: cannot be read: Input/output error")


def seconds(messages):
    return [None if message is None else (message.t_ns - logs.START_NS) / NS_PER_S for message in messages]


@pytest.mark.parametrize(
    ("part", "played", "span_s"),
    [
        ({}, [0, 1, 2, 3, 4], (0, 4)),
        ({"start_s": 1.5}, [2, 3, 4], (1.5, 4)),
        ({"start_s": 1.0, "duration_s": 2.0}, [1, 2], (1, 3)),
    ],
)
def test_given_a_part_of_a_log_when_played_then_it_is_that_part(log, part, played, span_s):
    assert seconds(rounds(log, TOPICS, **part)) == played
    span_ns = part_ns(log, part.get("start_s", 0.0), part.get("duration_s"))
    assert tuple((t_ns - logs.START_NS) / NS_PER_S for t_ns in span_ns) == span_s


def test_given_a_loop_when_played_then_the_part_comes_again_and_again(log):
    played = rounds(log, TOPICS, start_s=3.0, loop=True)
    assert seconds(itertools.islice(played, 8)) == [3, 4, None, 3, 4, None, 3, 4]


def test_given_a_part_without_messages_when_looped_then_it_says_so_and_does_not_search_for_ever(log):
    with pytest.raises(PlayError, match="has no message of /text in this part of it"):
        list(rounds(log, TOPICS, start_s=60.0, loop=True))


def test_given_a_log_that_breaks_off_when_played_then_what_was_read_comes_first():
    messages = rounds(Broken(), TOPICS)
    assert [next(messages).type_name for _ in range(2)] == [logs.TEXT, logs.TEXT]
    with pytest.raises(LogError, match="Input/output error"):
        next(messages)


def test_given_a_log_when_topics_are_chosen_then_all_or_those_that_are_named(log):
    assert choose_topics(log, None).keys() == {"/numbers", "/text"}
    assert choose_topics(log, {"/text"}).keys() == {"/text"}
    for names, renamed in (({"/no"}, frozenset()), (None, {"/no"})):
        with pytest.raises(PlayError, match="has no topic /no; it has: /numbers, /text$"):
            choose_topics(log, names, renamed)


def test_given_headers_when_stamped_then_those_that_can_be_get_the_log_s_time_and_the_others_are_counted():
    stamps = HeaderStamps({"/point"}, log_time=True)
    message = LogMessage("/point", "geometry_msgs/msg/PointStamped", HEADER, 100 * NS_PER_S)
    assert header_stamp_ns(stamps.stamp(message, 0).data) == 100 * NS_PER_S
    assert stamps.stamp(message._replace(topic="/other"), 0).data == HEADER
    assert stamps.kept == 0
    short, late = message._replace(data=HEADER[:8]), message._replace(t_ns=2**31 * NS_PER_S)
    assert [stamps.stamp(each, 0) for each in (short, late)] == [short, late]
    assert stamps.kept == 2


def test_given_messages_when_all_is_over_then_the_summary_says_how_late_they_were():
    pytest.importorskip("rclpy", reason="rclpy is not installed")
    from torchperf_ros.replay.logs.play import summary

    assert (
        summary(Tally(4, 0, 2.0, 1), 1.5)
        == "played 4 messages in 1.5 s, none later than 5 ms, the worst by 2.0 ms"
    )
    assert (
        summary(Tally(1, 1, 30.0, 3), 2)
        == "played 1 message in 3 rounds in 2.0 s, 1 late, the worst by 30.0 ms"
    )
