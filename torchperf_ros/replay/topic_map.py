"""Which topic of a log is which input of a stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchperf_ros.core.message_types import full_name
from torchperf_ros.replay.logs.log_reader import LogError, LogTopic

_SHOWN = 8
_COMPRESSED = {"sensor_msgs/msg/Image": "sensor_msgs/msg/CompressedImage"}


@dataclass(frozen=True)
class Wanted:
    """An input that no stage of the replay gives out.

    Attributes:
        stage: who wants it.
        topic: as the adapter names it, for example `image`.
        type_name: for example `sensor_msgs/msg/Image`.
        needed: whether it is the trigger, without which the stage gets no frame.
    """

    stage: str
    topic: str
    type_name: str
    needed: bool


def parse_maps(texts: Sequence[str]) -> dict[str, str]:
    """`--map LOG_TOPIC:=STAGE_TOPIC` options as a topic of the log by topic of a stage.

    Raises:
        LogError: one does not have this form, or a topic of a stage stands in two.
    """
    found: dict[str, str] = {}
    for text in texts:
        log_topic, sign, stage_topic = text.partition(":=")
        if not sign or not log_topic or not stage_topic:
            msg = f"--map {text!r}: has to be LOG_TOPIC:=STAGE_TOPIC, for example /camera/front:=image"
            raise LogError(msg)
        if absolute(stage_topic) in map(absolute, found):
            msg = f"--map {text!r}: {stage_topic} is mapped twice"
            raise LogError(msg)
        found[stage_topic] = log_topic
    return found


def absolute(topic: str) -> str:
    """A topic's name from the root, for a node without a namespace."""
    return f"/{topic.lstrip('/')}"


def match_topics(
    wanted: Sequence[Wanted],
    topics: Mapping[str, LogTopic],
    remap: Mapping[str, str],
    log: object,
    say: Callable[[str], None],
) -> dict[str, str]:
    """The topic of the log for each topic of a stage that has one.

    One that was named by `remap`, else one of the same name, else the only one of the type.

    Args:
        wanted: what the stages need.
        topics: what the log has.
        remap: topic of the log by topic of a stage.
        log: its name, for messages.
        say: told of topics that were chosen by their type, and of inputs that are not there and can be done without.

    Raises:
        LogError: a trigger is not there, of another type, or more than one topic could be it.
    """
    named = {absolute(stage_topic): log_topic for stage_topic, log_topic in remap.items()}
    unknown = sorted(set(named) - {absolute(item.topic) for item in wanted})
    if unknown:
        msg = f"--map: no stage takes {', '.join(unknown)}; they take: {', '.join(item.topic for item in wanted)}"
        raise LogError(msg)
    types: dict[str, Wanted] = {}
    for item in wanted:
        other = types.setdefault(absolute(item.topic), item)
        if full_name(other.type_name) != full_name(item.type_name):
            msg = f"topic {item.topic}: {other.stage} takes it as {other.type_name}, {item.stage} as {item.type_name}"
            raise LogError(msg)
    found: dict[str, str] = {}
    for item in wanted:
        name = named.get(absolute(item.topic), absolute(item.topic))
        topic = topics.get(name)
        if topic is None and absolute(item.topic) in named:
            msg = f"log {log}: has no topic {name}, which --map names; it has: {_listed(topics.values())}"
            raise LogError(msg)
        if topic is None or (_same(topic, item) is False and absolute(item.topic) not in named):
            topic = _only_one(item, topics, log, say)
        if topic is None:
            continue
        if not _same(topic, item):
            msg = f"log {log}: {topic.name} is {topic.type_name}; {item.stage} takes {item.type_name}{_hint(topic)}"
            raise LogError(msg)
        found[item.topic] = topic.name
    return found


def _only_one(item: Wanted, topics: Mapping[str, LogTopic], log: object, say: Callable[[str], None]) -> LogTopic | None:
    """The log's only topic of the type; None where there is none and it is not needed."""
    fitting = [topic for topic in topics.values() if _same(topic, item) and topic.count]
    what = f"{item.stage} takes {item.topic} ({item.type_name})"
    if len(fitting) == 1:
        say(f"{what} from {fitting[0].name}, the only topic of this type")
        return fitting[0]
    if fitting:
        choice = f"--map {fitting[0].name}:={item.topic}"
        msg = f"log {log}: {what}, and has several such topics: {_listed(fitting)}; choose one: {choice}"
        if item.needed:
            raise LogError(msg)
        say(f"{msg}; goes without")
        return None
    if not item.needed:
        say(f"{what}, which the log does not have; goes without")
        return None
    compressed = next((t for t in topics.values() if t.type_name == _COMPRESSED.get(full_name(item.type_name))), None)
    hint = "" if compressed is None else f"{_hint(compressed)}, and --map {compressed.name}:={item.topic}"
    msg = f"log {log}: {what}, and has no such topic{hint}; it has: {_listed(topics.values())}"
    raise LogError(msg)


def _same(topic: LogTopic, item: Wanted) -> bool:
    return topic.type_name == full_name(item.type_name)


def _hint(topic: LogTopic) -> str:
    if topic.type_name not in _COMPRESSED.values():
        return ""
    return f"; CameraAdapter takes {topic.name} with --set 'perception.options={{\"compressed\": true}}'"


def _listed(topics: object) -> str:
    shown = [f"{topic.name} ({topic.type_name})" for topic in topics]  # type: ignore[attr-defined]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return (", ".join(shown[:_SHOWN]) + more) if shown else "none"
