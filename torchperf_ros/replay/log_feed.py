"""The messages of a log for the stages: which topic is which input, and which part of the log is read."""

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from torchperf_ros.config.message_types import full_name
from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.logs.log_reader import LogError, LogMessage, LogReader, LogTopic
from torchperf_ros.logs.log_storage import listed
from torchperf_ros.logs.player import ReadAhead
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.workers.process_setup import step_back

_COMPRESSED: Final = {"sensor_msgs/msg/Image": "sensor_msgs/msg/CompressedImage"}
_PERF: Final = ("latency", "latency_stages", "memory", "memory_stats", "anomaly")
_OWN: Final = frozenset({"/diagnostics", *(f"/perf/{name}" for name in _PERF)})


class Wanted(NamedTuple):
    """An input that no stage of the replay gives out: who wants it, and what as the adapter says.

    `needed`: it is the trigger, without which the stage gets no frame.
    """

    stage: str
    topic: str
    type_name: str
    needed: bool

    def is_of(self, topic: LogTopic) -> bool:
        """Whether a topic of the log has the type."""
        return topic.type_name == full_name(self.type_name)


def absolute(topic: str) -> str:
    """A topic's name from the root, for a node without a namespace."""
    return f"/{topic.lstrip('/')}"


def parse_maps(texts: Sequence[str]) -> dict[str, str]:
    """`--map LOG_TOPIC:=STAGE_TOPIC` options as a topic of the log by topic of a stage.

    Raises:
        LogError: one does not have this form, or a topic of a stage stands in two.
    """
    found: dict[str, str] = {}
    for text in texts:
        log_topic, sign, stage_topic = text.partition(":=")
        if not sign or not log_topic or not stage_topic:
            raise LogError(f"--map {text!r}: has to be LOG_TOPIC:=STAGE_TOPIC, for example /camera/front:=image")
        if absolute(stage_topic) in map(absolute, found):
            raise LogError(f"--map {text!r}: {stage_topic} is mapped twice")
        found[stage_topic] = log_topic
    return found


def match_topics(
    wanted: Sequence[Wanted], topics: Mapping[str, LogTopic], remap: Mapping[str, str], log: object,
    say: Callable[[str], None],
) -> dict[str, str]:  # fmt: skip
    """The topic of the log for each topic of a stage that has one.

    One that was named by `remap` (topic of the log by topic of a stage), else one of the same name, else the only one
    of the type, else the only one of the type whose name ends so, as in the log of a node in a namespace. `say` gets
    topics that were chosen by their type, and inputs that are absent and can be done without.

    Raises:
        LogError: a trigger is not there, of another type, or more than one topic could be it.
    """
    named = {absolute(stage_topic): log_topic for stage_topic, log_topic in remap.items()}
    if unknown := sorted(set(named) - {absolute(item.topic) for item in wanted}):
        msg = f"--map: no stage takes {', '.join(unknown)}; they take: {', '.join(item.topic for item in wanted)}"
        raise LogError(msg)
    first: dict[str, Wanted] = {}
    found: dict[str, str] = {}
    for item in wanted:
        key, msg = absolute(item.topic), ""
        other = first.setdefault(key, item)
        topic = topics.get(named.get(key, key))
        if full_name(other.type_name) != full_name(item.type_name):
            msg = f"topic {item.topic}: {other.stage} takes it as {other.type_name}, {item.stage} as {item.type_name}"
        elif key in named and topic is None:
            msg = f"log {log}: has no topic {named[key]}, which --map names; it has: {_listed(topics.values())}"
        elif key in named and topic is not None and not item.is_of(topic):
            msg = f"log {log}: {topic.name} is {topic.type_name}; {item.stage} takes {item.type_name}{_hint(topic)}"
        if msg:
            raise LogError(msg)
        if topic is None or not item.is_of(topic):
            topic = _only_one(item, topics.values(), log, say)
        if topic is not None:
            found[item.topic] = topic.name
    return found


def _only_one(item: Wanted, topics: Collection[LogTopic], log: object, say: Callable[[str], None]) -> LogTopic | None:
    """The log's only topic of the type, or that of this name in a namespace; None: there is none, and need not be."""
    fitting = [topic for topic in topics if item.is_of(topic) and topic.count]
    what = f"{item.stage} takes {item.topic} ({item.type_name})"
    of_name = [topic for topic in fitting if topic.name.endswith(absolute(item.topic))]
    for some, why in ((fitting, "of this type"), (of_name, "of this type and name")):
        if len(some) == 1:
            say(f"{what} from {some[0].name}, the only topic {why}")
            return some[0]
    if fitting:
        choice = f"--map {fitting[0].name}:={item.topic}"
        msg = f"log {log}: {what}, and has several such topics: {_listed(fitting)}; choose one: {choice}"
    else:
        compressed = next((t for t in topics if t.type_name == _COMPRESSED.get(full_name(item.type_name))), None)
        hint = "" if compressed is None else f"{_hint(compressed)}, and --map {compressed.name}:={item.topic}"
        msg = f"log {log}: {what}, and has no such topic{hint}; it has: {_listed(topics)}"
    if item.needed:
        raise LogError(msg)
    say(f"{msg}; goes without" if fitting else f"{what}, which the log does not have; goes without")
    return None


def _hint(topic: LogTopic) -> str:
    if topic.type_name not in _COMPRESSED.values():
        return ""
    return f"; CameraAdapter takes {topic.name} with --set 'perception.options={{\"compressed\": true}}'"


def _listed(topics: Iterable[LogTopic]) -> str:
    return listed([f"{topic.name} ({topic.type_name})" for topic in topics])


class LogFeed:
    """The part of a log that is to be replayed.

    It begins at `start_ns`, 0 for an empty log, and is `length_ns` long, 0 if the log does not say.
    """

    def __init__(self, reader: LogReader, options: ReplayOptions) -> None:
        """Take a log, and which part of it is wanted."""
        self._reader, self._options = reader, options
        first_ns = reader.start_ns or next((message.t_ns for message in reader.messages()), 0)
        self.start_ns, length_s = first_ns + round(options.start_s * NS_PER_S), options.duration_s
        self._end_ns = None if length_s is None else self.start_ns + round(length_s * NS_PER_S)
        self.length_ns = max(0, (self._end_ns or reader.end_ns) - self.start_ns)

    def to_copy(self, given: Collection[str], published: Collection[str]) -> frozenset[str]:
        """The topics that `--inputs` copies into the output: `all` are those of the log that are `given` to stages.

        Raises:
            LogError: a topic is not in the log, or the replay itself publishes it.
        """
        wanted, own = self._options.inputs, _OWN.union(published)
        if wanted in {"all", "none"}:
            return frozenset(given) - own if wanted == "all" else frozenset()
        names = frozenset(name.strip() for name in wanted.split(","))
        if unknown := sorted(names - set(self._reader.topics)):
            msg = f"--inputs: log {self._reader.path} has no topic {', '.join(unknown)}; give all, none or its topics"
            raise LogError(msg)
        if clashing := sorted(names & own):
            msg = f"--inputs: {', '.join(clashing)} is what the replay itself publishes, and the two would mix"
            raise LogError(msg)
        return names

    def messages(self, topics: frozenset[str]) -> Generator[LogMessage, None, None]:
        """The messages of some topics, read ahead; to be closed.

        Raises:
            LogError: the log is damaged.
        """
        with contextlib.closing(ReadAhead(self._read(topics), lambda m: len(m.data), 64 << 20)) as ahead:
            yield from ahead

    def _read(self, topics: frozenset[str]) -> Iterator[LogMessage]:
        if self._options.pace == "real":
            step_back()  # this runs on the thread that reads ahead
        whole = self._options.start_s == 0.0 and self._end_ns is None
        yield from self._reader.messages(topics, None if whole else self.start_ns, self._end_ns)
