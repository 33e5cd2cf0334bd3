"""What `torchperf play` does beside its node: which part of a log is played, what is stamped, what is shown."""

import io
import itertools
import struct

import pytest
from rich.console import Console

pytest.importorskip("rclpy", reason="rclpy is not installed")

from torchperf_ros.frame.clock import NS_PER_S, VirtualClock
from torchperf_ros.frame.frame import header_stamp_ns
from torchperf_ros.logs.log_reader import LogError, LogMessage, LogReader, LogTopic
from torchperf_ros.logs.play import PlayView
from torchperf_ros.logs.player import HeaderStamps, Player, PlayError, choose_topics, part_ns, rounds

from . import small_logs as logs

pytestmark = pytest.mark.ros

START_NS = logs.START_NS
HEADER = b"\x00\x01\x00\x00" + struct.pack("<iI", 3, 5) + bytes(8)
TOPICS = {"/text": LogTopic("/text", logs.TEXT)}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Five words, a second apart, and a number with each."""
    entries = [(*entry[:3], START_NS + number // 2 * NS_PER_S) for number, entry in enumerate(logs.cdr(10))]
    with LogReader(logs.rosbag2(tmp_path_factory.mktemp("log") / "log", entries=entries)) as reader:
        yield reader


class Broken:
    """A log that cannot be read any further after two messages, and one of another type."""

    path = "broken"
    start_ns = end_ns = 0

    def messages(self, *_):
        yield from (LogMessage("/text", logs.TEXT, b"", number * NS_PER_S) for number in range(2))
        yield LogMessage("/text", logs.NUMBERS, b"", 2 * NS_PER_S)
        raise LogError("log broken: cannot be read: Input/output error")


def seconds(messages):
    return [None if message is None else (message.t_ns - START_NS) / NS_PER_S for message in messages]


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
    assert tuple((t_ns - START_NS) / NS_PER_S for t_ns in span_ns) == span_s


def test_given_a_loop_when_played_then_the_part_comes_again_and_again(log):
    played = rounds(log, TOPICS, start_s=3.0, loop=True)
    assert seconds(itertools.islice(played, 8)) == [3, 4, None, 3, 4, None, 3, 4]


def test_given_a_part_without_messages_when_looped_then_it_says_so_and_does_not_search_for_ever(log):
    with pytest.raises(PlayError, match="has no message of /text in this part of it"):
        list(rounds(log, TOPICS, start_s=60.0, loop=True))


def test_given_a_log_that_breaks_off_when_played_then_what_was_read_comes_first_and_other_types_do_not():
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


def seen(*, terminal, span_s=10.0, late_ms=0.0):
    """A player that has played four messages, the last after four seconds of the log; what was shown of it."""
    clock, shown = VirtualClock(), io.StringIO()
    player = Player(
        lambda message: message.t_ns > START_NS + NS_PER_S and clock.advance_ms(late_ms),
        rate=2.0, clock=clock, wait=lambda s: clock.advance_ms(s * 1e3),
    )  # fmt: skip
    console = Console(file=shown, width=120, force_terminal=terminal)
    with PlayView(player, (START_NS, START_NS + round(span_s * NS_PER_S)), 2.0, console) as view:
        player.play([LogMessage("/text", logs.TEXT, b"", START_NS + s * NS_PER_S) for s in (0, 3, 3, 4)])
        player.pause()
        view.show()
        view.show()
        player.resume()
        view.show()
    return shown.getvalue(), view.summary()


def test_given_no_terminal_when_shown_then_a_line_comes_where_something_has_changed():
    text, _ = seen(terminal=False)
    assert text.splitlines() == ["4.0 of 10.0 s, 3 s left, 4 messages, paused", "4.0 of 10.0 s, 3 s left, 4 messages"]
    text, _ = seen(terminal=False, span_s=0.0)  # the log does not say how long it is
    assert text.splitlines()[0] == "playing, 4 messages, paused"


def test_given_a_terminal_when_shown_then_there_is_a_bar_and_a_word_on_the_keys():
    text, _ = seen(terminal=True)
    assert all(word in text for word in ("space pauses and goes on", "━", "4.0 of 10.0 s"))


@pytest.mark.parametrize(
    ("late_ms", "says"), [(2.0, ", none later than 5 ms (the worst 2.0 ms)"), (30.0, ", 1 late, the worst by 30.0 ms")]
)
def test_given_messages_when_all_is_over_then_the_summary_says_how_late_they_were(late_ms, says):
    _, summary = seen(terminal=False, late_ms=late_ms)
    assert summary.startswith("played 4 messages in ")
    assert summary.endswith(says)
