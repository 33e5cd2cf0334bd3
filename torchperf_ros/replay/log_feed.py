"""The topics of a log: which one is which input of the stages, and which are copied into the output."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchperf_ros.api.messages import full_name
from torchperf_ros.api.text import listed
from torchperf_ros.replay.logs.log_reader import LogError, LogReader, LogTopic

if TYPE_CHECKING:
    from torchperf_ros.stage.wiring import StageInput

_COMPRESSED: Final = {"sensor_msgs/msg/Image": "sensor_msgs/msg/CompressedImage"}
_PERF: Final = ("latency", "latency_stages", "memory", "memory_stats", "anomaly")
_OWN: Final = frozenset({"/diagnostics", *(f"/perf/{name}" for name in _PERF)})


def absolute(topic: str) -> str:
    """A topic's name from the root, for a node without a namespace."""
    return f"/{topic.lstrip('/')}"


@dataclass(frozen=True)
class KnownTopics:
    """What an incident's folder says about the topics of its node.

    Attributes:
        inputs: topic of the log by stage and number of the input.
        outputs: the topics that stages published.
    """

    inputs: Mapping[tuple[str, int], str] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()

    @classmethod
    def of_incident(cls, folder: Path) -> "KnownTopics":
        """Read `incident.json`; nothing is known without one, or by one of an older node."""
        try:
            stages = json.loads((folder / "incident.json").read_text(encoding="utf-8"))["stages"]
            inputs = {
                (str(stage["name"]), number): str(topic)
                for stage in stages
                for number, topic in enumerate(stage["inputs"])
                if topic
            }
            return cls(inputs, frozenset(str(stage["output"]) for stage in stages))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()


def match_topics(
    wanted: "Sequence[StageInput]",
    topics: Mapping[str, LogTopic],
    remap: Mapping[str, str],
    log: object,
    say: Callable[[str], None],
    known: KnownTopics | None = None,
) -> dict[str, str]:
    """The topic of the log for each topic of a stage that has one.

    One that was named by `remap` (topic of the log by topic of a stage), else the one that an incident's
    node took, else one of the same name, else the only one of the type, else the only one of the type whose
    name ends so, as in the log of a node in a namespace. The last two are never outputs of stages, which a
    log of the node holds as well, nor the topic of another input of the stage. `say` gets topics that were
    chosen by their type, and inputs that are absent and can be done without.

    `wanted` are the inputs that no stage of the replay gives out; a stage gets no frame without its
    trigger.

    Raises:
        LogError: a trigger is not there, of another type, or more than one topic could be it.
    """
    named = {absolute(stage_topic): log_topic for stage_topic, log_topic in remap.items()}
    if unknown := sorted(set(named) - {absolute(item.topic) for item in wanted}):
        raise LogError(
            f"--map: no stage takes {', '.join(unknown)}; they take:"
            f" {', '.join(item.topic for item in wanted)}"
        )
    known = known or KnownTopics()
    first: dict[str, StageInput] = {}
    found: dict[str, str] = {}
    for item in wanted:
        key = absolute(item.topic)
        other = first.setdefault(key, item)
        taken = known.inputs.get((_name(item), item.index), "")
        topic = topics.get(named[key]) if key in named else topics.get(taken) or topics.get(key)
        if full_name(other.type_name) != full_name(item.type_name):
            raise LogError(
                f"topic {item.topic}: {_name(other)} takes it as {other.type_name}, {_name(item)} as"
                f" {item.type_name}"
            )
        if key in named and topic is None:
            raise LogError(
                f"log {log}: has no topic {named[key]}, which --map names; it has:"
                f" {_listed(topics.values())}"
            )
        if key in named and topic is not None and not _fits(topic, item):
            raise LogError(
                f"log {log}: {topic.name} is {topic.type_name}; {_name(item)} takes"
                f" {item.type_name}{_hint(topic)}"
            )
        if topic is None or not _fits(topic, item):
            siblings = {
                each
                for one in wanted
                if one.stage is item.stage and absolute(one.topic) != key
                if min(one.index, item.index) >= 0  # guard and scenes may take what the adapter takes
                for each in (found.get(one.topic), named.get(absolute(one.topic), absolute(one.topic)))
            }
            free = [each for each in topics.values() if each.name not in siblings]
            topic = _only_one(item, free, known.outputs, log, say)
        if topic is not None:
            found[item.topic] = topic.name
    return found


def _name(item: "StageInput") -> str:
    return item.stage.config.name


def _fits(topic: LogTopic, item: "StageInput") -> bool:
    return topic.type_name == full_name(item.type_name)


def _only_one(
    item: "StageInput",
    topics: Collection[LogTopic],
    outputs: frozenset[str],
    log: object,
    say: Callable[[str], None],
) -> LogTopic | None:
    """The log's only topic of the type, or that of this name in a namespace.

    None: there is none, and need not be.
    """
    of_type = [topic for topic in topics if _fits(topic, item) and topic.count]
    fitting = [topic for topic in of_type if not _is_output(topic.name, outputs)]
    what = f"{_name(item)} takes {item.topic} ({item.type_name})"
    of_name = [topic for topic in fitting if topic.name.endswith(absolute(item.topic))]
    for some, why in ((fitting, "of this type"), (of_name, "of this type and name")):
        if len(some) == 1:
            say(f"{what} from {some[0].name}, the only topic {why}")
            return some[0]
    if fitting:
        choice = f"--map {fitting[0].name}:={item.topic}"
        msg = f"log {log}: {what}, and has several such topics: {_listed(fitting)}; choose one: {choice}"
    else:
        compressed = next(
            (t for t in topics if t.type_name == _COMPRESSED.get(full_name(item.type_name))), None
        )
        hint = (
            "" if compressed is None else f"{_hint(compressed)}, and --map {compressed.name}:={item.topic}"
        )
        if of_type:
            hint = f" but what a stage publishes; if that is meant: --map {of_type[0].name}:={item.topic}"
        msg = f"log {log}: {what}, and has no such topic{hint}; it has: {_listed(topics)}"
    if item.index == 0:  # the trigger
        raise LogError(msg)
    say(f"{msg}; goes without" if fitting else f"{what}, which the log does not have; goes without")
    return None


def _is_output(topic: str, outputs: frozenset[str]) -> bool:
    return topic in _OWN or any(topic.endswith(output) for output in outputs)


def _hint(topic: LogTopic) -> str:
    if topic.type_name not in _COMPRESSED.values():
        return ""
    return f"; CameraAdapter takes {topic.name} with --set 'perception.options={{\"compressed\": true}}'"


def _listed(topics: Iterable[LogTopic]) -> str:
    return listed([f"{topic.name} ({topic.type_name})" for topic in topics])


def topics_to_copy(
    wanted: str, reader: LogReader, given: Collection[str], published: Collection[str]
) -> frozenset[str]:
    """The topics that `--inputs` copies into the output.

    `all` are those of the log that are `given` to stages.

    Raises:
        LogError: a topic is not in the log, or the replay itself publishes it.
    """
    own = _OWN.union(published)
    if wanted in {"all", "none"}:
        return frozenset(given) - own if wanted == "all" else frozenset()
    names = frozenset(name.strip() for name in wanted.split(","))
    if unknown := sorted(names - set(reader.topics)):
        raise LogError(
            f"--inputs: log {reader.path} has no topic {', '.join(unknown)}; give all, none or its topics"
        )
    if clashing := sorted(names & own):
        raise LogError(
            f"--inputs: {', '.join(clashing)} is what the replay itself publishes, and the two would mix"
        )
    return names
