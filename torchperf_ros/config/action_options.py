"""What follows from an alert: lines `ALERT -> ACTION`, as parameters have them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchperf_ros.config.parameter import require

LOWER_TIER, LOWER_RATE, SCENE, BACKUP_ACTIVE, OFF = "lower_tier", "lower_rate", "scene", "backup_active", "off"
SWITCHES = (LOWER_RATE, BACKUP_ACTIVE, OFF)
"""Actions of one step that are in force or not, and have no more to say."""
ACTIONS = (LOWER_TIER, LOWER_RATE, SCENE, BACKUP_ACTIVE, OFF)
DRIFT = "drift"
ALERTS = (
    DRIFT, "latency", "misses", "drops", "tier", "restarts", "recompilation", "model error", "input rate",
    "input stopped", "jitter", "age", "input frozen", "input black", "input white", "input featureless",
    "input saturated", "input empty", "input stands still", "output", "output frozen", "output empty", "load",
    "memory", "memory grows", "temperature", "gpu", "gpu memory", "worker died", "worker failed",
    "result too slow", "deadline missed", "bad input", "invalid output", "partial result", "plan refused",
    "plan unchecked", "emergency stop",
)  # fmt: skip
"""Kinds of alerts, see docs/watching.md; those of the machine and of the node count for every stage."""
_ARROW = "->"


@dataclass(frozen=True)
class ActionRule:
    """One line, checked; `scene` is the one that action `scene` names, else ""."""

    alert: str
    action: str
    scene: str = ""

    def __str__(self) -> str:
        """As the parameter has it."""
        return f"{self.alert} {_ARROW} {self.action} {self.scene}".rstrip()


def parse_actions(stage: str, lines: Sequence[str], scenes: Sequence[str], backup: str) -> tuple[ActionRule, ...]:
    """The rules of a stage with these scenes and this backup.

    Raises:
        ConfigError: names the line and what is allowed.
    """
    return tuple(_parse(f"{stage}.actions: {line!r}", line, scenes, backup) for line in lines if line.strip())


def _parse(where: str, line: str, scenes: Sequence[str], backup: str) -> ActionRule:
    alert, arrow, said = (part.strip() for part in line.partition(_ARROW))
    require(arrow, f"{where} is not allowed; it has to be ALERT {_ARROW} ACTION, such as drift {_ARROW} {LOWER_TIER}")
    require(alert in ALERTS, f"{where}: there is no alert {alert!r}; it has to be one of: {', '.join(ALERTS)}")
    action, _, scene = said.partition(" ")
    require(action in ACTIONS, f"{where}: there is no action {action!r}; it has to be one of: {', '.join(ACTIONS)}")
    require(action == SCENE or not scene, f"{where}: {scene!r} behind {action} means nothing; only scene has a name")
    known = ", ".join(scenes)
    require(action != SCENE or scene in scenes, f"{where}: there is no scene {scene!r}; it has to be one of: {known}")
    require(action != BACKUP_ACTIVE or backup != "none", f"{where}: needs a second worker, and backup is none")
    return ActionRule(alert, action, scene)


def alert_kind(name: str) -> str:
    """The kind of an alert by its name, for example `camera: input frozen (/image)`; "" for one of no kind here."""
    what = name.partition(": ")[2]
    return max((kind for kind in ALERTS if what == kind or what.startswith(f"{kind} ")), key=len, default="")
