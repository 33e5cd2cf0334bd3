"""What a stage's parameters say in lines.

What follows from an alert, and which inputs belong to a trigger.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchperf_ros.settings.parameter import numbers_by_word, require

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
