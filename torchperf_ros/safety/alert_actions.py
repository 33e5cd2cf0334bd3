"""Down before it breaks: what a stage does about alerts, by the lines of its parameter `actions`."""

from collections import Counter, deque
from dataclasses import dataclass

from torchperf_ros.config.config import StageConfig
from torchperf_ros.config.stage_rules import LOWER_RATE, LOWER_TIER, OFF, SCENE, SWITCHES, ActionRule, alert_kind
from torchperf_ros.frame.alert_rules import Alert
from torchperf_ros.frame.clock import NS_PER_S

_OF_ALL = ("machine", "node")
_MOST_DOUBLINGS = 4  # of the time without an alert after which an action is taken back
_SOON = 2  # times that time: an alert that is back by then has not been over
_MOST_WAITING = 256
_CAUSES = {
    OFF: {"bad input", "misses", "plan refused", "plan unchecked", "output", "output frozen", "output empty"},
    LOWER_RATE: {"drops"},
    LOWER_TIER: {"tier"},
}
_LINGERS_NS = 15 * NS_PER_S  # `misses` counts frames of the last 10 s, and the recorder tells it a second or two later


@dataclass
class _Line:
    """How a rule stands: it was applied `steps` times, and its alert was found at `seen_ns` the last time."""

    rule: ActionRule
    steps: int = 0
    seen_ns: int | None = None
    began_ns: int = 0
    changed_ns: int | None = None
    returned_ns: int | None = None
    doublings: int = 0


class AlertActions:
    """The rules of one stage; `step` once a second, `report` from any thread.

    An alert applies its rule at once, and while it goes on once more after each `action_cooldown_s`: `lower_tier` takes
    one more tier each time, the other actions have one step. Without the alert for `action_return_s` a step is taken
    back, and another after each such time. An alert that is back within twice that time doubles it, up to 16 times.
    What an action causes by itself, as `off` causes misses, does not count until it has been over for 15 s: it would
    hold that action in force without end.

    Attributes:
        lower_tiers: so many of the most accurate tiers are left out.
        scene: the scene that is to run, "" for what the situation says.
        lower_rate, backup_active, off: whether these actions are in force.
    """

    def __init__(self, config: StageConfig) -> None:
        """Start with nothing in force."""
        self.config = config  # the stage's; replaced as a whole when a parameter changes
        self.lower_tiers = 0
        self.scene = ""
        self.lower_rate = self.backup_active = self.off = False
        self.taken = 0  # steps so far
        self._most = {LOWER_TIER: max(len(scene.tiers) for scene in config.scenes) - 1}
        self._lines = [_Line(rule) for rule in config.actions]
        self._found: deque[tuple[str, int]] = deque(maxlen=_MOST_WAITING)
        self._in_force_ns: dict[str, int] = {}  # by action: when it was last in force

    def asks_for(self, alert: str) -> bool:
        """Whether a rule has this alert."""
        return any(line.rule.alert == alert for line in self._lines)

    def report(self, alert: Alert, now_ns: int) -> None:
        """An alert was found, of this stage, another, or the machine."""
        if self._lines and alert.name.partition(": ")[0] in {self.config.name, *_OF_ALL}:
            self._found.append((alert_kind(alert.name), now_ns))

    def step(self, now_ns: int) -> list[str]:
        """Apply the rules; what has begun and what is over now, a line each."""
        while self._found:
            kind, found_ns = self._found.popleft()
            if self._is_caused(kind, found_ns):
                continue
            for line in self._lines:
                if line.rule.alert == kind:
                    line.seen_ns = found_ns
        changes = [text for line in self._lines if (text := self._follow(line, now_ns))]
        # Of each action the most that one rule asks for: several alerts may have one cause.
        steps = Counter({line.rule.action: line.steps for line in sorted(self._lines, key=lambda line: line.steps)})
        self._in_force_ns |= {what: now_ns for what, count in steps.items() if count}
        self.lower_tiers = steps[LOWER_TIER]
        self.lower_rate, self.backup_active, self.off = (steps[what] > 0 for what in SWITCHES)
        self.scene = next((one.rule.scene for one in self._lines if one.steps and one.rule.action == SCENE), "")
        return changes

    def _is_caused(self, kind: str, found_ns: int) -> bool:
        """Whether an action in force, or one that was until just now, brings alerts of this kind about."""
        return any(kind in _CAUSES.get(what, ()) and found_ns - at_ns < _LINGERS_NS
                   for what, at_ns in self._in_force_ns.items())  # fmt: skip

    def _follow(self, line: _Line, now_ns: int) -> str:
        """One rule: a step down, a step back, or neither ("")."""
        if line.seen_ns is None:
            return ""
        quiet_ns, cooldown_ns = now_ns - line.seen_ns, self.config.action_cooldown_s * NS_PER_S
        back_ns = self.config.action_return_s * NS_PER_S * (1 << line.doublings)
        if line.changed_ns is None or line.seen_ns > line.changed_ns:
            may = not line.steps or line.changed_ns is None or now_ns - line.changed_ns >= cooldown_ns
            if may and line.steps < self._most.get(line.rule.action, 1):
                again = line.returned_ns is not None and now_ns - line.returned_ns < _SOON * back_ns
                line.doublings = min(line.doublings + 1, _MOST_DOUBLINGS) if again else line.doublings
                line.steps, line.changed_ns, line.returned_ns = line.steps + 1, now_ns, None
                line.began_ns = now_ns if line.steps == 1 else line.began_ns
                self.taken += 1
                return f"{line.rule}: step {line.steps} begins"
        if line.steps and quiet_ns >= back_ns and now_ns - (line.changed_ns or 0) >= back_ns:
            line.steps, line.changed_ns, line.returned_ns = line.steps - 1, now_ns, now_ns
            return f"{line.rule}: a step back, {line.steps} left, after {quiet_ns / NS_PER_S:.0f} s without the alert"
        if not line.steps and line.returned_ns is not None and now_ns - line.returned_ns >= _SOON * back_ns:
            line.returned_ns, line.doublings = None, 0  # it has been over for long enough
        return ""

    def words(self, now_ns: int) -> str:
        """What is in force, in words; empty for nothing."""
        return "; ".join(
            f"{line.rule} ({line.steps} step{'s' * (line.steps > 1)}, for {(now_ns - line.began_ns) / NS_PER_S:.0f} s)"
            for line in self._lines if line.steps
        )  # fmt: skip
