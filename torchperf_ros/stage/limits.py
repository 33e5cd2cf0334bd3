"""What keeps a stage from its most accurate tiers: memory that is short, and actions upon alerts."""

from collections.abc import Callable, Sequence
from typing import Final

from torchperf_ros.api.alert import Alert
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.settings.stage_rules import DRIFT
from torchperf_ros.stage.alert_actions import AlertActions
from torchperf_ros.stage.alert_rules import change_alert
from torchperf_ros.stage.drift import DriftWatch
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.workers.worker_pool import Log

# Of the memory's limit: from here on it is short.
MEMORY_SHARE: Final = 0.7
# Below this part of the share there is room again.
_RELAX: Final = 0.9


class MemoryGuard:
    """Decides how many of the most accurate tiers are left out while memory is short.

    Attributes:
        left_out: tiers that are left out, 0 while there is room.
        tight: whether memory is short: then nothing is compiled either.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self.tight = False

    def update(self, used_share: float, tiers: int) -> None:
        """Take a sample, about once a second.

        One of the `tiers` fewer while short, one more while there is room again.

        It is short where `used_share` (memory in use over its limit, NaN where unknown) is above
        `MEMORY_SHARE`. The cheapest tier is never left out.
        """
        if used_share > MEMORY_SHARE:
            self.tight = True
            self.left_out = min(self.left_out + 1, tiers - 1)
        elif used_share < _RELAX * MEMORY_SHARE:
            self.tight = False
            self.left_out = max(self.left_out - 1, 0)


class TierLimits:
    """Applies them to the ladders of the version that serves.

    Attributes:
        memory: see `MemoryGuard`.
        actions: what is done about alerts, see `AlertActions`.
        drift: watches for answers that take longer and longer; None where no action asks for it.
    """

    def __init__(self, config: StageConfig, tell: Callable[[Alert], None], log: Log) -> None:
        self.memory = MemoryGuard()
        self.actions = AlertActions(config)
        self.drift = DriftWatch(config.name) if self.actions.asks_for(DRIFT) else None
        self._name, self._tell, self._log = config.name, tell, log

    def sample_memory(self, ladders: Sequence[TierLadder], used_share: float, suspect: str) -> None:
        """Take a sample of the memory in use; `suspect` says which worker took it, "" if none took much."""
        was_tight = self.memory.tight
        self.memory.update(used_share, max(len(ladder.tiers) for ladder in ladders))
        self.leave_out(ladders)
        if self.memory.tight and not was_tight:
            text = f"memory is short: {used_share:.0%} of the limit is in use, {MEMORY_SHARE:.0%} may be"
            text += f"; {suspect}" if suspect else ""
            text += "; lower tiers run, and nothing is compiled"
            self._log("warn", f"{self._name}: {text}")
            self._tell(change_alert(self._name, "model", text))

    def act(self, ladders: Sequence[TierLadder], now_ns: int, fresh_ms: float) -> None:
        """Once a second: do what follows from the alerts that were reported to `actions`.

        `fresh_ms`: the time that a frame has which did not wait.
        """
        if self.drift is not None and (alert := self.drift.step(now_ns, fresh_ms)) is not None:
            self.actions.report(alert, now_ns)
            self._tell(alert)
        for change in self.actions.step(now_ns):
            self._log("warn", f"{self._name}: {change}")
            self._tell(change_alert(self._name, "action", change))
        self.leave_out(ladders)

    def leave_out(self, ladders: Sequence[TierLadder]) -> None:
        """Leave tiers out for want of memory, or as an alert's action."""
        short, lower = self.memory.left_out, self.actions.lower_tiers
        for ladder in ladders:
            ladder.left_out = min(max(short, lower), len(ladder.tiers) - 1)
            ladder.why_left_out = "while memory is short" if short >= lower else "as an alert's action"
