"""The streams of a stage: several cameras, or other sensors, that share its workers; and its topics."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from torchperf_ros.settings.parameter import require

# What each stream may have of its own, as STAGE.STREAM.PARAMETER. Streams share all else.
OF_STREAM: Final = frozenset(
    {
        "topics",
        "output",
        "budget_ms",
        "budget_from",
        "fallback",
        "hold_last_ms",
        "priority",
        "stop_deceleration",
        "input_reliability",
        "input_timeout_ms",
        "sync",
        "sustained_misses",
        "actions",
        "action_return_s",
    }
)
# So many frames may be in one run.
MOST_BATCH: Final = 64
_GUARD: Final = "guard."
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_IS: Final = ":="


def given_streams(names: object) -> list[str]:
    """The streams that a value of the parameter `streams` names; none for what is no list of names."""
    return [name for name in names if isinstance(name, str) and name] if isinstance(names, list) else []


def check_streams(
    stage: str, streams: Sequence[str], stages: Sequence[str], words: Collection[str]
) -> None:
    """See that no stream's name is one of the `stages`, of the stage's own `words`, or taken.

    Raises:
        ConfigError: names the parameter, the value and what is allowed.
    """
    where = f"{stage}.streams: {list(streams)!r} is not allowed; "
    taken = {word.partition(".")[0] for word in words}
    for name in streams:
        rule = "it has to be a list of names: lower-case letters, digits, _ after a letter"
        require(_NAME.fullmatch(name), f"{where}{rule}")
        require(streams.count(name) == 1, f"{where}{name} stands there {streams.count(name)} times")
        require(name not in stages, f"{where}{name} is a stage; a stream has a name of its own")
        require(name not in taken, f"{where}{name} is a parameter of the stage; name the stream otherwise")


def stream_values(stream: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The stage's values with those that the stream has of its own in their place."""
    own = {
        name.removeprefix(f"{stream}."): value
        for name, value in values.items()
        if name.startswith(f"{stream}.")
    }
    return {**values, **own}


def is_of_stream(stage: str, given: str, names: object) -> bool:
    """Whether a given name below the stage is of the form STREAM.PARAMETER.

    Raises:
        ConfigError: it is, and a stream has no such parameter of its own.
    """
    stream, dot, name = given.partition(".")
    if not dot or stream not in given_streams(names):
        return False
    is_own = name in OF_STREAM or name.startswith(_GUARD)
    rule = f"a stream may have {', '.join(sorted(OF_STREAM))} and {_GUARD}* of its own"
    require(is_own, f"{stage}.{given}: {rule}; all else is the stage's, whose workers its streams share")
    return True


def parse_topics(stage: str, lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The topic of each input of the adapter that does not keep the adapter's name, from lines INPUT:=TOPIC.

    Raises:
        ConfigError: names the line and what is allowed.
    """
    found: dict[str, str] = {}
    for line in filter(None, lines):
        name, sign, topic = (part.strip() for part in line.partition(_IS))
        where = f"{stage}.topics: {line!r} is not allowed; "
        rule = f"it has to be INPUT{_IS}TOPIC, such as image{_IS}/front/image_raw"
        require(name and sign and topic and not re.search(r"\s", name + topic), f"{where}{rule}")
        require(name not in found, f"{where}{name} has the topic {found.get(name)} already")
        found[name] = topic
    return tuple(found.items())


def topic_of_stream(stream: str, topic: str) -> str:
    """The topic in the stream's own namespace; an absolute or private one stays as it is."""
    return f"{stream}/{topic}" if stream and not topic.startswith(("/", "~")) else topic
