"""Down before it breaks: what a stage does about alerts, by the lines of its parameter `actions`."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.settings.stage_options import (
    ALERTS,
    BACKUP_ACTIVE,
    LOWER_RATE,
    LOWER_TIER,
    OFF,
    SCENE,
    STALE,
    SWITCHES,
    ActionRule,
    alert_kind,
)

_OF_ALL = ("machine", "node")
_MOST_DOUBLINGS = 4  # of the time without an alert after which an action is taken back
_SOON = 2  # times that time: an alert that is back by then has not been over
_MOST_WAITING = 256
_COOLDOWN_S = 2.0  # an alert that goes on leads one step further
_OUTPUT = frozenset({"output", "output frozen", "output empty", "plan refused", "plan unchecked"})
# Alerts that an action brings about for certain.
#
# While it is in force, and for 15 s more, they do not count.
_CAUSES: dict[str, frozenset[str]] = {
    OFF: _OUTPUT | {"bad input", "misses"},
    LOWER_RATE: frozenset({"drops"}),
    LOWER_TIER: frozenset({"tier"}),
}
_OF_ANSWERS = _OUTPUT | {
    "bad input",
    "misses",
    "drops",
    "tier",
    "worker died",
    "restarts",
    "model error",
    "invalid output",
    "recompilation",
    "latency",
    "drift",
    "worker failed",
    "result too slow",
    "deadline missed",
    "partial result",
    STALE,
}
_LOAD, _LATENCY = "load", "latency"
# Of a machine with more to do: it also takes messages later, or loses them.
_OF_MACHINE = frozenset(
    {_LOAD, "temperature", "gpu", "gpu memory", "memory", "memory grows", "age", "jitter", "input rate"}
)
# Alerts that may be an action's own effect.
#
# While it is in force they do not show that its cause goes on.
_MAY_CAUSE = {
    OFF: _OF_ANSWERS,
    LOWER_RATE: _OF_ANSWERS | {"jitter"},  # slower between frames: caches and clocks
    LOWER_TIER: _OF_ANSWERS - {_LATENCY, "drift"},  # these judge each tier by itself
    SCENE: _OF_ANSWERS | _OF_MACHINE,  # of the machine only where it has no lighter tiers, see `_effects`
    BACKUP_ACTIVE: _OF_ANSWERS | _OF_MACHINE,  # twice the work
}
# Of a stage that takes the outputs of one with an action: these it cannot bring about.
_OF_FED = frozenset(ALERTS) - {"temperature", "gpu", "gpu memory", "memory", "emergency stop"}
# A ladder is back within this time: the effect of a lower tier, and of another stage, lasts so much longer.
_COMES_BACK_S = 10.0
# A rise of less is no alert, see `stage_signals`: as long as noise decides, no further tier goes.
_AS_USUAL = 1.15
_COUNTED = {"restarts", "recompilation", "model error"}
# `misses` counts frames of the last 10 s, and the recorder reports it a second or two later
_LINGERS_S = 15.0
# `load` goes by deadlines that were missed within the last 5 s
_LATE_S = {"misses": _LINGERS_S, "drift": 0.0, _LOAD: 8.0}
_NEVER_NS = -(1 << 62)
# the recorder judges whole seconds, and the node hears of them up to two seconds later
_USUALLY_LATE_S = 3.0


_Node = TypeVar("_Node")


@dataclass(eq=False)
class _Line:
    """How a rule stands: it was applied `steps` times. Times are monotonic.

    Attributes:
        effects: kinds of alerts that its action may cause.
        found_ns: when its alert was found the last time.
        seen_ns: when it was found the last time and was not what an action in force may cause.
        began_with: signal of the alert that led to the first step, and what it was before, where it has these.
        counted, counted_ns: of an alert that counts what happened in some span of time: the last number,
        and when.
        doubted_ns: when it was found the last time and may have been what an action causes.
        on_trial: a step was taken back although that was found: only without the action it shows what it
            is.
        circle: the rules of the node that it may bring about and that may bring it about, directly or not.
        causes: of these, those whose action may cause its alert.
        lag_ns: for so long after these actions are over, outputs may still be of other tiers than before.
    """

    rule: ActionRule
    effects: frozenset[str]
    steps: int = 0
    found_ns: int | None = None
    seen_ns: int = _NEVER_NS
    began_ns: int = 0
    changed_ns: int | None = None
    returned_ns: int | None = None
    doublings: int = 0
    began_with: tuple[str, float] | None = None
    counted: float = 0.0
    counted_ns: int = 0
    doubted_ns: int = _NEVER_NS
    on_trial: bool = False
    circle: Collection["_Line"] = ()
    causes: Set["_Line"] = frozenset()
    lag_ns: float = 0.0


class AlertActions:
    """The rules of one stage; `step` once a second, `report` from any thread.

    An alert applies its rule at once. It leads one step further when it is found again after the effect of
    the last step can be seen: `lower_tier` takes one more tier each time, the other actions have one step.
    Without the alert for `action_return_s` a step is taken back, and another after each such time. An alert
    that is back within twice that time doubles it, up to 16 times.

    No action keeps itself or another in force. What it causes for certain, as `off` causes misses, does not
    count until it has been over for 15 s. What it may cause does not count as a reason to go on: the step is
    taken back, and the alert, if it is found then, applies the rule again. Actions that may cause each
    other's alerts are taken back together, or each would find the other's effect and begin again. These may
    be of several stages, see `find_circles`.

    Attributes:
        lower_tiers: so many of the most accurate tiers are left out.
        scene: the scene that is to run, "" for what the situation says.
        lower_rate, backup_active, off: whether these actions are in force.
    """

    def __init__(self, config: StageConfig) -> None:
        self.config = config  # the stage's; replaced as a whole when a parameter changes
        self.lower_tiers = 0
        self.scene = ""
        self.lower_rate = self.backup_active = self.off = False
        self.taken = 0  # steps so far
        self._most = {LOWER_TIER: max(len(scene.tiers) for scene in config.scenes) - 1}
        self._lines = [_Line(rule, _effects(rule, config)) for rule in config.actions]
        self._found: deque[tuple[Alert, int]] = deque(maxlen=_MOST_WAITING)
        self._in_force_ns: dict[str, int] = {}  # by action: when it was last in force
        self._node: Collection[AlertActions] = ()
        self._changes: list[str] = []
        find_circles({self: ()})

    def asks_for(self, alert: str) -> bool:
        return any(line.rule.alert == alert for line in self._lines)

    def report(self, alert: Alert, now_ns: int) -> None:
        """An alert was found, of this stage or stream, of another, or of the machine.

        What is of a whole stage, as its workers' memory is, is of each of its streams.
        """
        if self._lines and alert.name.partition(": ")[0] in {self.config.name, self.config.stage, *_OF_ALL}:
            self._found.append((alert, now_ns))

    def step(self, now_ns: int) -> list[str]:
        """Apply the rules; what has begun and what is over now, a line each."""
        while self._found:
            alert, found_ns = self._found.popleft()
            kind = alert_kind(alert.name)
            if self._is_caused(kind, found_ns):
                continue
            for line in self._lines:
                if line.rule.alert == kind:
                    self._take(line, alert, found_ns)
        self._changes += [text for line in self._lines if (text := self._follow(line, now_ns))]
        for line in self._lines:
            if line.on_trial and not line.steps and line.changed_ns == now_ns:
                self._try_without(line.circle, now_ns)
        # Of each action the most that one rule asks for: several alerts may have one cause.
        steps = Counter(
            {line.rule.action: line.steps for line in sorted(self._lines, key=lambda line: line.steps)}
        )
        self._in_force_ns |= {what: now_ns for what, count in steps.items() if count}
        self.lower_tiers = steps[LOWER_TIER]
        self.lower_rate, self.backup_active, self.off = (steps[what] > 0 for what in SWITCHES)
        self.scene = next(
            (one.rule.scene for one in self._lines if one.steps and one.rule.action == SCENE), ""
        )
        changes, self._changes = self._changes, []
        return changes

    def _is_caused(self, kind: str, found_ns: int) -> bool:
        """Whether an action in force, or one that was until just now, brings alerts of this kind about."""
        return any(
            kind in _CAUSES.get(what, ()) and found_ns - at_ns < _LINGERS_S * NS_PER_S
            for what, at_ns in self._in_force_ns.items()
        )

    def _take(self, line: _Line, alert: Alert, found_ns: int) -> None:
        """Note an alert of a rule: as a reason for a step, as one to go on, or as neither."""
        action, kind = line.rule.action, line.rule.alert
        if action == LOWER_TIER and self._is_left_out(alert.values.get("tier", "")):
            return  # it is about frames from before
        value, usual = (_number(alert, name) for name in ("value", "baseline"))
        if kind in _COUNTED and alert.values.get("kind") == "level" and value is not None:
            before = line.counted if found_ns - line.counted_ns < _USUALLY_LATE_S * NS_PER_S else 0.0
            line.counted, line.counted_ns = value, found_ns
            if value <= before:
                return  # nothing has happened since then
        if not _may_be_effect(line, found_ns):
            line.seen_ns = found_ns
        elif line.steps:
            line.doubted_ns = found_ns
        elif kind in line.effects and self._is_in_force(action):
            return  # another rule has brought the action about, and this may be its effect
        signal = alert.values.get("signal", "")
        if not line.steps:
            # Of a tier that another rule has brought about, the level now: its rise has led to a step already.
            reference = value if self._is_in_force(action) else usual
            line.began_with = None if reference is None else (signal, reference)
        elif kind == _LATENCY and _is_below(line.began_with, signal, value):
            return  # the step has done what it is for: frames take about what was usual before it, or less
        elif kind == _LOAD and action == LOWER_TIER and _number(alert, "misses") == 0.0:
            return  # likewise: frames of this tier take longer than is usual for it, and are in time
        line.found_ns = found_ns

    def _is_in_force(self, action: str) -> bool:
        return any(line.steps and line.rule.action == action for line in self._lines)

    def _try_without(self, circle: Collection[_Line], now_ns: int) -> None:
        """Take back all else that actions may keep going: without them, alerts show what they are."""
        for stage in self._node:
            for line in stage._lines:
                late_ns = max(_late_ns(line.rule.alert), _USUALLY_LATE_S * NS_PER_S)
                if line not in circle or now_ns - line.seen_ns < late_ns:
                    continue
                if line.steps:
                    line.returned_ns = now_ns
                    stage._changes.append(
                        f"{line.rule}: 0 steps left, as another action may have caused the alert"
                    )
                line.steps, line.changed_ns, line.on_trial = 0, now_ns, True

    def _is_left_out(self, tier: str) -> bool:
        """Whether no scene runs frames on this tier any more, as it is one of those that are left out."""
        scenes = [[self.config.tiers[number] for number in scene.tiers] for scene in self.config.scenes]
        places = [names.index(tier) for names in scenes if tier in names]
        return bool(places) and max(places) < self.lower_tiers

    def _follow(self, line: _Line, now_ns: int) -> str:
        """One rule: a step down, a step back, or neither ("")."""
        if line.found_ns is None:
            return ""
        cooldown_ns = _COOLDOWN_S * NS_PER_S
        back_ns = self.config.action_return_s * NS_PER_S * (1 << line.doublings)
        if self._leads_on(line, cooldown_ns):
            again = line.returned_ns is not None and now_ns - line.returned_ns < _SOON * back_ns
            line.doublings = min(line.doublings + 1, _MOST_DOUBLINGS) if again else line.doublings
            line.steps, line.changed_ns, line.returned_ns = line.steps + 1, now_ns, None
            line.began_ns = now_ns if line.steps == 1 else line.began_ns
            line.on_trial = False
            self.taken += 1
            return f"{line.rule}: step {line.steps} begins"
        quiet_ns = now_ns - line.seen_ns
        if line.steps and quiet_ns >= back_ns and now_ns - (line.changed_ns or 0) >= back_ns:
            line.steps, line.changed_ns, line.returned_ns = line.steps - 1, now_ns, now_ns
            late_ns = max(_late_ns(line.rule.alert), _USUALLY_LATE_S * NS_PER_S)
            line.on_trial = now_ns - line.doubted_ns < late_ns
            but = ", but for what actions may cause" if line.on_trial else ""
            return (
                f"{line.rule}: a step back, {line.steps} left, after {quiet_ns / NS_PER_S:.0f} s without"
                f" the alert{but}"
            )
        if not line.steps and line.returned_ns is not None and now_ns - line.returned_ns >= _SOON * back_ns:
            line.returned_ns, line.doublings = None, 0  # it has been over for long enough
        return ""

    def _leads_on(self, line: _Line, cooldown_ns: float) -> bool:
        """Whether the alert asks for a step more.

        The first, or a further one whose predecessor was not enough.
        """
        if line.found_ns is None or line.steps >= self._most.get(line.rule.action, 1):
            return False
        if line.changed_ns is None:
            return True
        late_ns = _late_ns(line.rule.alert)
        after_ns = line.found_ns - line.changed_ns
        if line.steps:
            return not line.on_trial and after_ns >= max(cooldown_ns, late_ns)
        return after_ns > (
            late_ns + line.lag_ns if line.on_trial else 0.0
        )  # what is found until then may be of the time before

    def words(self, now_ns: int) -> str:
        """What is in force, in words; empty for nothing."""
        return "; ".join(
            f"{line.rule} ({line.steps} step{'s' * (line.steps > 1)}, for"
            f" {(now_ns - line.began_ns) / NS_PER_S:.0f} s)"
            for line in self._lines
            if line.steps
        )


def find_circles(feeds: Mapping[AlertActions, Iterable[AlertActions]]) -> None:
    """See which rules of a node may bring each other about: only there an alert may be an action's effect.

    Args:
        feeds: of each stage, those that take its outputs.
    """
    fed = _reach(feeds)
    rules = [(stage, line) for stage in feeds for line in stage._lines]
    effects = {
        line: [other for on, other in rules if other.rule.alert in _effects_on(on, stage, line, fed[stage])]
        for stage, line in rules
    }
    reach = _reach(effects)
    for stage, line in rules:
        stage._node = tuple(feeds)
        line.circle = {other for other in reach[line] if line in reach[other]}
        line.causes = {other for other in line.circle if line in effects[other]}
        near = {one for one in stage._lines if one.rule.action != LOWER_TIER}
        line.lag_ns = 0 if line.causes <= near else _COMES_BACK_S * NS_PER_S


def _effects_on(
    stage: AlertActions, of: AlertActions, line: _Line, fed: Collection[AlertActions]
) -> Collection[str]:
    """What alerts of a stage a rule `of` that stage or another may cause.

    By the machine, or by its outputs.
    """
    if stage in fed:
        return _OF_FED | line.effects
    is_near = stage.config.stage == of.config.stage or _LOAD in line.effects
    # A stage that takes other outputs than before may miss deadlines, without which `load` is no alert.
    return (line.effects if is_near else frozenset()) | ({_LOAD} if fed else set())


def _reach(direct: Mapping[_Node, Iterable[_Node]]) -> dict[_Node, set[_Node]]:
    """What each leads to, directly or by others."""
    reach = {one: set(others) for one, others in direct.items()}
    for middle, beyond in reach.items():
        for others in reach.values():
            if middle in others:
                others.update(beyond)
    return reach


def _may_be_effect(line: _Line, found_ns: int) -> bool:
    """Whether a rule's alert may come from an action in force, or from one that was until just now."""
    late_ns = _late_ns(line.rule.alert) + line.lag_ns
    return any(
        one.steps or (one.changed_ns is not None and found_ns - one.changed_ns < late_ns)
        for one in line.causes
    )


def _late_ns(kind: str) -> float:
    """For how long after a change alerts of this kind may still be about the time before it."""
    return _LATE_S.get(kind, _USUALLY_LATE_S) * NS_PER_S


def _effects(rule: ActionRule, config: StageConfig) -> frozenset[str]:
    """What the rule's action may cause; a scene of lighter tiers than the default's is no load for a machine."""
    if rule.action == SCENE:
        best = {scene.name: min(scene.tiers) for scene in config.scenes}
        if best[rule.scene] > min(config.scenes[0].tiers):
            return _MAY_CAUSE[SCENE] - _OF_MACHINE
    return frozenset(_MAY_CAUSE[rule.action])


def _is_below(began_with: tuple[str, float] | None, signal: str, value: float | None) -> bool:
    if began_with is None or value is None:
        return False
    return signal != began_with[0] or value < _AS_USUAL * began_with[1]


def _number(alert: Alert, name: str) -> float | None:
    """A value of an alert that is a number; None if it has none."""
    try:
        value = float(alert.values.get(name, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
