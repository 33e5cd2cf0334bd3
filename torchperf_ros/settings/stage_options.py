"""What a stage's parameters say in lines and names of their own.

What follows from an alert, which inputs belong to a trigger, streams that share the stage's workers, its
topics, and scenes: situations with tiers, packages and a budget of their own.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torchperf_ros.settings.parameter import (
    Parameter,
    check_all,
    declared,
    numbers_by_word,
    one_each,
    param,
    require,
)

LOWER_TIER, LOWER_RATE, SCENE, BACKUP_ACTIVE, OFF = (
    "lower_tier",
    "lower_rate",
    "scene",
    "backup_active",
    "off",
)
# Actions of one step that are in force or not, and have no more to say.
SWITCHES = (LOWER_RATE, BACKUP_ACTIVE, OFF)
ACTIONS = (LOWER_TIER, LOWER_RATE, SCENE, BACKUP_ACTIVE, OFF)
DRIFT, STALE = "drift", "stale"
# Kinds of alerts, see docs/watching.md.
#
# What explains others before what it explains. Those of the machine and of the node count for every
# stage.
ALERTS = (
    "worker died",
    "model error",
    "invalid output",
    "temperature",
    "gpu",
    "gpu memory",
    "memory",
    "memory grows",
    "load",
    "restarts",
    "input rate",
    "input stopped",
    "input frozen",
    "input black",
    "input white",
    "input featureless",
    "input saturated",
    "input noise",
    "input empty",
    "input stands still",
    STALE,
    "bad input",
    "recompilation",
    "tier",
    "output",
    "output frozen",
    "output empty",
    "age",
    "jitter",
    "drops",
    DRIFT,
    "latency",
    "misses",
    "worker failed",
    "result too slow",
    "deadline missed",
    "partial result",
    "plan refused",
    "plan unchecked",
    "emergency stop",
)
_ARROW = "->"


@dataclass(frozen=True)
class ActionRule:
    """A line ALERT -> ACTION, checked; `scene` is the one that action `scene` names, else ""."""

    alert: str
    action: str
    scene: str = ""

    def __str__(self) -> str:
        return f"{self.alert} {_ARROW} {self.action} {self.scene}".rstrip()


def parse_actions(
    stage: str, lines: Sequence[str], scenes: Sequence[str], backup: str
) -> tuple[ActionRule, ...]:
    """The rules of a stage with these scenes and this backup.

    Raises:
        ConfigError: names the line and what is allowed.
    """
    return tuple(
        _parse_action(f"{stage}.actions: {line!r}", line, scenes, backup) for line in lines if line.strip()
    )


def _parse_action(where: str, line: str, scenes: Sequence[str], backup: str) -> ActionRule:
    alert, arrow, reported = (part.strip() for part in line.partition(_ARROW))
    require(
        arrow,
        f"{where} is not allowed; it has to be ALERT {_ARROW} ACTION, such as drift {_ARROW} {LOWER_TIER}",
    )
    require(
        alert in ALERTS, f"{where}: there is no alert {alert!r}; it has to be one of: {', '.join(ALERTS)}"
    )
    action, _, scene = reported.partition(" ")
    require(
        action in ACTIONS,
        f"{where}: there is no action {action!r}; it has to be one of: {', '.join(ACTIONS)}",
    )
    require(
        action == SCENE or not scene,
        f"{where}: {scene!r} behind {action} means nothing; only scene has a name",
    )
    known = ", ".join(scenes)
    require(
        action != SCENE or scene in scenes,
        f"{where}: there is no scene {scene!r}; it has to be one of: {known}",
    )
    require(
        action != BACKUP_ACTIVE or backup != "none", f"{where}: needs a second worker, and backup is none"
    )
    return ActionRule(alert, action, scene)


def alert_kind(name: str) -> str:
    """The kind of an alert by its name, for example `camera.

    Input frozen (/image)`; "" for one of no kind here.
    """
    what = name.partition(": ")[2]
    return max(
        (kind for kind in ALERTS if what == kind or what.startswith(f"{kind} ")), key=len, default=""
    )


_MOST_MS = 60_000.0
# What a line says of its input after its name, in any order, and what each may be.
_WORDS = {
    "slop": (0.0, _MOST_MS, "ms"),
    "offset": (-_MOST_MS, _MOST_MS, "ms"),
    "wait": (0.0, _MOST_MS, "ms"),
}
_FORM = (
    "it has to be INPUT slop MS, then offset MS and wait MS where wanted, such as cloud slop 40 offset 0"
    " wait 15"
)


@dataclass(frozen=True)
class SyncRule:
    """A line INPUT slop MS offset MS wait MS, checked.

    Attributes:
        topic: of the input, as the adapter names it.
        slop_ms: a message whose stamp is further from the one that is wanted is not used.
        offset_ms: that stamp less the trigger's; negative: an older message is wanted.
        wait_ms: a frame waits for it so long at most, counted from the trigger's receipt.
    """

    topic: str
    slop_ms: float
    offset_ms: float = 0.0
    wait_ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.topic} slop {self.slop_ms:g} offset {self.offset_ms:g} wait {self.wait_ms:g}"


def parse_sync(stage: str, lines: Sequence[str], budgets_ms: Sequence[float]) -> tuple[SyncRule, ...]:
    """The rules of a stage; none may wait as long as the shortest of its budgets.

    Raises:
        ConfigError: names the line and what is allowed.
    """
    rules = tuple(
        _parse_rule(f"{stage}.sync: {line!r}", line, min(budgets_ms)) for line in lines if line.strip()
    )
    topics = [rule.topic for rule in rules]
    for topic in topics:
        require(
            topics.count(topic) == 1,
            f"{stage}.sync: {topic} stands in {topics.count(topic)} lines; it may have one",
        )
    return rules


def check_sync(stage: str, rules: Sequence[SyncRule], inputs: Sequence[tuple[str, bool]]) -> None:
    """See that every rule is for an input that can be synchronised.

    The trigger's type may have no stamp: what another stage gives out has that of its frame.

    `inputs` are those of the adapter, the trigger first: topic, and whether the message type has a stamp.

    Raises:
        ConfigError: names the rule and the inputs that there are.
    """
    trigger, stamped = inputs[0][0], dict(inputs[1:])
    known = ", ".join(stamped) or "none beside its trigger"
    for rule in rules:
        where = f"{stage}.sync: {str(rule)!r}"
        require(
            rule.topic != trigger,
            f"{where}: {trigger} is the trigger, with which the others are synchronised",
        )
        require(rule.topic in stamped, f"{where}: the adapter has no input {rule.topic}; it has: {known}")
        what = f"the message type of {rule.topic} does not begin with a std_msgs/Header"
        require(stamped[rule.topic], f"{where}: {what}; messages without a stamp cannot be synchronised")


def _parse_rule(where: str, line: str, budget_ms: float) -> SyncRule:
    topic, *rest = line.split()
    given = numbers_by_word(where, rest, _WORDS, _FORM)
    require("slop" in given, f"{where} is not allowed; {_FORM}")
    rule = SyncRule(topic, **{f"{word}_ms": value for word, value in given.items()})
    text = (
        f"{where}: wait {rule.wait_ms:g} is not allowed; it has to be below the shortest budget,"
        f" {budget_ms:g} ms"
    )
    require(rule.wait_ms < budget_ms, text)
    return rule


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


def given_names(names: object) -> list[str]:
    """The names in a value that has to be a list of names; none for what is no list."""
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
    if not dot or stream not in given_names(names):
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


DEFAULT_SCENE = "default"
EMERGENCY_SCENE = "emergency"
_PREFIX = "scene."
# Index of the odometry among what scenes depend on.
#
# That of a topic that names the scene N is `ODOMETRY - N`.
ODOMETRY = -1
_ANY_SPEED = 1000.0


@dataclass(frozen=True)
class SceneOptions:
    """One scene, checked. It holds while all that it states holds, or while the adapter names it.

    Attributes:
        tiers: indexes of the stage's tiers, from most to least accurate.
        budget_ms: 0 for that of the stage.
        topic: where a `std_msgs/String` names the scene; "" for none.
    """

    name: str
    tiers: tuple[int, ...] = param([""], "Tiers of the scene, from most to least accurate.")
    packages: tuple[str, ...] = param(
        [""], "A .pt2 file of each of them, as the stage's packages; '': none."
    )
    budget_ms: float = param(
        0.0, "Time in ms to answer its frames; 0: the stage's.", 0.0, 60_000.0, live=True
    )
    min_speed: float = param(0.0, "The scene begins at this speed in m/s.", 0.0, _ANY_SPEED, live=True)
    max_speed: float = param(_ANY_SPEED, "It ends above this speed in m/s.", 0.0, _ANY_SPEED, live=True)
    topic: str = param("", "Topic of std_msgs/String that names the scene; empty: none.")
    word: str = param("", "Its name in those messages; empty: the scene's own.")

    @property
    def by_speed(self) -> bool:
        return self.min_speed > 0.0 or self.max_speed < _ANY_SPEED


SCENE_PARAMETERS = declared(SceneOptions)


def scene_parameters(names: object) -> Iterator[Parameter]:
    """The parameters of the scenes of these names, as `scene.NAME.PARAMETER`.

    Nothing for what is no list of names.
    """
    for name in dict.fromkeys(given_names(names)):
        for one in SCENE_PARAMETERS:
            yield replace(one, name=f"{_PREFIX}{name}.{one.name}")


def parse_scenes(
    stage: str,
    names: Sequence[str],
    values: Mapping[str, Any],
    tiers: Sequence[str],
    packages: Sequence[str],
) -> tuple[tuple[SceneOptions, ...], dict[str, str]]:
    """The scenes of a stage, `default` first, and the package of every tier, a scene's own at the end.

    `names` are of the scenes beside `default`, which has these `tiers` and their `packages`; `values` are
    those of the stage's parameters.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    names = given_names(list(names))
    good = all(_NAME.fullmatch(name) and name != DEFAULT_SCENE for name in names) and len(
        set(names)
    ) == len(names)
    where = f"{stage}.scenes: {names!r} is not allowed; it has to be"
    require(
        good,
        f"{where} a list of names, each once: lower-case letters, digits and _; default is there anyway",
    )
    package_of = dict(zip(tiers, packages, strict=True))
    scenes = [SceneOptions(DEFAULT_SCENE, tuple(range(len(tiers))), (), 0.0, 0.0, _ANY_SPEED, "", "")]
    for name in names:
        prefix = f"{stage}.{_PREFIX}{name}."
        found = check_all(SCENE_PARAMETERS, values, f"{stage}.", f"{_PREFIX}{name}.")
        own, given = found["tiers"], found["packages"]
        require(own and own[0], f"{prefix}tiers: is empty; scene {name} has to have at least one tier")
        once = all(own) and len(set(own)) == len(own)
        require(once, f"{prefix}tiers: {own!r} is not allowed; it has to be at least one name, each once")
        for tier, package in zip(own, one_each(given, own, f"{prefix}packages"), strict=True):
            before = package_of.setdefault(tier, package)
            text = (
                f"tier {tier} runs {before or 'no package'} in another scene; a tier with another package"
                " is another"
            )
            require(
                package in {"", before},
                f"{prefix}packages: {package!r} is not allowed: {text} tier, name it so",
            )
        least, most, budget_ms = found["min_speed"], found["max_speed"], found["budget_ms"]
        require(least < most, f"{prefix}min_speed: {least} is not below max_speed {most}")
        require(
            budget_ms == 0.0 or budget_ms >= 1.0,
            f"{prefix}budget_ms: {budget_ms} is not allowed; 0, or from 1 on",
        )
        order = list(package_of)
        scenes.append(
            SceneOptions(
                name,
                **found
                | {
                    "tiers": tuple(map(order.index, own)),
                    "packages": tuple(given),
                    "word": found["word"] or name,
                },
            )
        )
    return tuple(scenes), package_of


def is_of_scene(stage: str, given: str, names: object) -> bool:
    """Whether a given name is of the form `scene.NAME.PARAMETER`.

    Raises:
        ConfigError: it is, and the stage has no such scene, or a scene no such parameter.
    """
    if not given.startswith(_PREFIX):
        return False
    scenes, fields = given_names(names), [one.name for one in SCENE_PARAMETERS]
    scene, _, name = given.removeprefix(_PREFIX).partition(".")
    listed = ", ".join(scenes) or "none"
    require(scene in scenes, f"{stage}.{given}: {stage}.scenes has no scene {scene!r}; it has {listed}")
    require(name in fields, f"{stage}.{given}: is unknown; a scene has {', '.join(fields)}")
    return True
