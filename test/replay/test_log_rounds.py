"""Which part of a log is played, and how often: a real log, and one that breaks off."""

import itertools

import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.replay.log_rounds import LogRounds, PlayError, choose_topics
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage, LogReader, LogTopic

STORE = get_typestore(Stores.ROS2_JAZZY)
WORD, NUMBER = "std_msgs/msg/String", "std_msgs/msg/Float64"
S = 1_000_000_000
START_NS = 1_600_000_000 * S


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Five words, a second apart; a topic of numbers; one without messages."""
    folder = tmp_path_factory.mktemp("log") / "log"
    with Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        word = writer.add_connection("/word", WORD, typestore=STORE)
        number = writer.add_connection("/number", NUMBER, typestore=STORE)
        writer.add_connection("/empty", WORD, typestore=STORE)
        for second in range(5):
            t_ns = START_NS + second * S
            writer.write(word, t_ns, STORE.serialize_cdr(STORE.types[WORD](f"{second}"), WORD))
            writer.write(number, t_ns, STORE.serialize_cdr(STORE.types[NUMBER](1.0), NUMBER))
    with LogReader(folder) as reader:
        yield reader


class Broken:
    """A log that cannot be read any further after two messages."""

    path = "broken"
    start_ns = end_ns = 0

    def messages(self, *_):
        yield from (LogMessage("/word", WORD, b"", number * S) for number in range(2))
        yield LogMessage("/word", NUMBER, b"", 2 * S)
        msg = "log broken: nothing can be read from offset 99 on"
        raise LogError(msg)


TOPICS = {"/word": LogTopic("/word", WORD)}


def seconds(messages):
    return [None if message is None else (message.t_ns - START_NS) / S for message in messages]


@pytest.mark.parametrize(
    ("part", "played", "span_s"),
    [
        ({}, [0, 1, 2, 3, 4], (0, 4)),
        ({"start_s": 1.5}, [2, 3, 4], (1.5, 4)),
        ({"start_s": 1.0, "duration_s": 2.0}, [1, 2], (1, 3)),
        ({"duration_s": 100.0}, [0, 1, 2, 3, 4], (0, 4)),
    ],
)
def test_given_a_part_of_a_log_when_played_then_it_is_that_part(log, part, played, span_s):
    rounds = LogRounds(log, TOPICS, **part)
    assert seconds(rounds.messages()) == played
    assert tuple((t_ns - START_NS) / S for t_ns in rounds.span_ns) == span_s


def test_given_a_loop_when_played_then_the_part_comes_again_and_again(log):
    rounds = LogRounds(log, TOPICS, start_s=3.0, loop=True)
    assert seconds(itertools.islice(rounds.messages(), 8)) == [3, 4, None, 3, 4, None, 3, 4]


@pytest.mark.parametrize("loop", [True, False])
def test_given_a_part_without_messages_when_played_then_it_says_so_and_does_not_search_for_ever(log, loop):
    with pytest.raises(PlayError, match="has no message of /word in this part of it"):
        list(LogRounds(log, TOPICS, start_s=60.0, loop=loop).messages())


def test_given_a_log_that_breaks_off_when_played_then_what_was_read_comes_first_and_other_types_do_not():
    messages = LogRounds(Broken(), TOPICS).messages()
    assert [next(messages).type_name for _ in range(2)] == [WORD, WORD]
    with pytest.raises(LogError, match="offset 99"):
        next(messages)


def test_given_a_log_that_breaks_off_when_looped_then_it_goes_on_and_says_so_once():
    said = []
    rounds = LogRounds(Broken(), TOPICS, loop=True, say=said.append)
    assert [message is None for message in itertools.islice(rounds.messages(), 8)] == [False, False, True] * 2 + [
        False
    ] * 2
    assert said == ["each round ends here: log broken: nothing can be read from offset 99 on"]


def test_given_a_log_when_topics_are_chosen_then_those_that_have_messages_or_those_that_are_named(log):
    assert choose_topics(log, None).keys() == {"/number", "/word"}
    assert choose_topics(log, {"/empty", "/word"}).keys() == {"/empty", "/word"}
    for names, renamed in (({"/no"}, frozenset()), (None, {"/no"})):
        with pytest.raises(PlayError, match="has no topic /no; it has: /number, /word$"):
            choose_topics(log, names, renamed)
