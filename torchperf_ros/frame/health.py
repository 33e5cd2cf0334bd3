"""How a stage is doing, with hysteresis: one miss is a warning, only sustained misses are an error."""

from torchperf_ros.config.config import StageConfig
from torchperf_ros.frame.clock import NS_PER_MS
from torchperf_ros.frame.outcome import IN_TIME, Fallback, GuardVerdict, Health, Outcome

FRESH = frozenset({None, Fallback.BACKUP})
"""Answers computed from the frame itself: its own result, or the backup's."""

ACCEPTED = frozenset({None, GuardVerdict.ACCEPT})
STOPPED = frozenset({GuardVerdict.STOP, GuardVerdict.UNAVOIDABLE})
"""Verdicts that leave nothing of the plan: such a frame has no fresh answer."""


class HealthTracker:
    """STARTING -> WAITING -> NOMINAL -> DEGRADED -> SAFE_STOP and back.

    The parameters `input_timeout_ms`, `sustained_misses` and `recover_frames` say when.
    """

    def __init__(self, limits: StageConfig, now_ns: int) -> None:
        """Start as STARTING."""
        self.limits = limits
        self.misses_in_a_row = 0  # frames without a fresh answer
        self.healthy_in_a_row = 0  # frames that count towards the next better state
        self._last_input_ns = now_ns
        self._seen_input = False
        self._ready = False
        self._was_ready = False
        self._condition = Health.NOMINAL  # what the answers say; loading and missing input come on top of it

    def ready(self) -> None:
        """A worker can answer; after a safe stop, answers have to prove it."""
        self._ready = self._was_ready = True

    def lost(self) -> None:
        """No worker can answer any more, until `ready`."""
        self._ready = False

    def gave_up(self) -> None:
        """The workers keep dying or cannot start: a sustained failure."""
        self._condition = Health.SAFE_STOP
        self.healthy_in_a_row = 0

    def input_at(self, now_ns: int) -> None:
        """A frame was received."""
        self._last_input_ns = now_ns
        self._seen_input = True

    def answered(self, outcome: Outcome, fallback: Fallback | None, tier: int, check: GuardVerdict | None) -> None:
        """A frame was answered: `tier` is the one whose result was used, or asked for, `check` the guard's verdict."""
        if outcome is Outcome.STARTING and not self._was_ready:
            return  # nothing has failed yet: the first worker is still loading
        has_result = fallback in FRESH or outcome in IN_TIME  # the latter also while the emergency lane withholds it
        is_fresh = has_result and check not in STOPPED
        self.misses_in_a_row = 0 if is_fresh else self.misses_in_a_row + 1
        on_time_at_best = outcome is Outcome.ON_TIME and tier == 0 and check in ACCEPTED
        if self.misses_in_a_row >= self.limits.sustained_misses:
            self._condition = Health.SAFE_STOP
            self.healthy_in_a_row = 0
        elif self._condition is Health.SAFE_STOP:
            self._recover(outcome in IN_TIME and is_fresh, Health.DEGRADED)
        elif self._condition is Health.DEGRADED:
            self._recover(on_time_at_best, Health.NOMINAL)
        elif not on_time_at_best:
            self._condition = Health.DEGRADED
            self.healthy_in_a_row = 0

    def _recover(self, good: bool, towards: Health) -> None:
        self.healthy_in_a_row = self.healthy_in_a_row + 1 if good else 0
        if self.healthy_in_a_row >= self.limits.recover_frames:
            self._condition = towards
            self.healthy_in_a_row = 0

    def state(self, now_ns: int) -> Health:
        """The state now: a sustained failure outranks loading, loading outranks missing input."""
        if self._condition is Health.SAFE_STOP:
            return Health.SAFE_STOP
        if not self._ready:
            return Health.STARTING
        silent_ms = (now_ns - self._last_input_ns) / NS_PER_MS
        if not self._seen_input or silent_ms > self.limits.input_timeout_ms:
            return Health.WAITING
        return self._condition
