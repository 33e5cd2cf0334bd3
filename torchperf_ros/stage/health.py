"""How a stage is doing, with hysteresis: one miss is a warning, only sustained misses are an error."""

from collections import deque
from typing import Final, NamedTuple

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict, Health, Outcome
from torchperf_ros.settings.config import StageConfig

# Answers computed from the frame itself: its own result, or the backup's.
FRESH = frozenset({None, Fallback.BACKUP})

ACCEPTED = frozenset({None, GuardVerdict.ACCEPT})
# Verdicts that leave nothing of the plan: such a frame has no fresh answer.
STOPPED = frozenset({GuardVerdict.STOP, GuardVerdict.UNAVOIDABLE})


# More of the frames that came than this are too many to be superseded.
SUPERSEDED_SHARE: Final = 0.1
# Over so many seconds the share is taken; the first are those from the first frame on.
SUPERSEDED_S: Final = 10
_FEWEST_SUPERSEDED: Final = 3


def too_many_superseded(received: int, superseded: int) -> bool:
    """Whether a stage is too slow for its input: so many of the frames that came had no answer."""
    return superseded > SUPERSEDED_SHARE * received


class Flow(NamedTuple):
    """Frames that came to a stage, were superseded and ended, and its time for them, until a time."""

    at_ns: int
    received: int
    superseded: int
    ended: int
    busy_ms: float

    def since(self, other: "Flow") -> "Flow":
        return Flow(
            self.at_ns - other.at_ns,
            self.received - other.received,
            self.superseded - other.superseded,
            self.ended - other.ended,
            self.busy_ms - other.busy_ms,
        )

    @property
    def share(self) -> float:
        """Of the frames that came, how many were superseded, 0 to 1."""
        return self.superseded / self.received if self.received else 0.0

    @property
    def words(self) -> str:
        """How many had no answer, and why."""
        interval_ms = self.at_ns / NS_PER_MS / max(self.received, 1)
        takes_ms = self.busy_ms / max(self.ended, 1)
        uneven = ", but they come in bunches" if takes_ms < interval_ms else ""
        return (
            f"{self.superseded:,} of {self.received:,} frames in {self.at_ns / NS_PER_S:.0f} s had no"
            f" answer, as a newer one came first: one comes every {interval_ms:.1f} ms and takes"
            f" {takes_ms:.1f}{uneven}"
        )


class SupersededRule:
    """Whether too many of a stage's frames are superseded.

    A frame without an answer is the worst that can come of it.

    A fixed rule, which holds from the first frame on: nothing is learnt that could make it the usual state.

    Attributes:
        broken: the last 10 s, where more than `SUPERSEDED_SHARE` were; until they are half as many.
        due_ns: the receipt from which on `look` looks again, once a second.
    """

    def __init__(self) -> None:
        self.broken: Flow | None = None
        self.due_ns = 0
        self._seconds: deque[Flow] = deque()

    def look(self, flow: Flow) -> None:
        """Take how things stand at a receipt."""
        self.due_ns = flow.at_ns + NS_PER_S
        seconds, since_ns = self._seconds, flow.at_ns - SUPERSEDED_S * NS_PER_S
        if seconds and seconds[-1].at_ns < since_ns:  # the input had stopped
            seconds.clear()
            self.broken = None
        seconds.append(flow)
        while len(seconds) > 1 and seconds[1].at_ns <= since_ns:
            seconds.popleft()
        if seconds[0].at_ns <= since_ns:
            last = flow.since(seconds[0])
            most = SUPERSEDED_SHARE if self.broken is None else SUPERSEDED_SHARE / 2
            self.broken = last if last.superseded >= _FEWEST_SUPERSEDED and last.share > most else None


class HealthTracker:
    """STARTING -> WAITING -> NOMINAL -> DEGRADED -> SAFE_STOP and back.

    The parameters `input_timeout_ms` and `sustained_misses` say when.
    """

    def __init__(self, limits: StageConfig, now_ns: int) -> None:
        self.limits = limits
        self.misses_in_a_row = 0  # frames without a fresh answer
        self.healthy_in_a_row = 0  # frames that count towards the next better state
        self._last_input_ns = now_ns
        self._seen_input = False
        self._ready = False
        self._was_ready = False
        self.superseded = SupersededRule()
        # by the answers; loading and missing input come on top of it
        self._condition = Health.NOMINAL

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
        self._last_input_ns = now_ns
        self._seen_input = True

    def answered(
        self, outcome: Outcome, fallback: Fallback | None, tier: int, check: GuardVerdict | None
    ) -> None:
        """A frame was answered.

        `tier` is the one whose result was used, or asked for, `check` the guard's verdict.
        """
        if outcome is Outcome.STARTING and not self._was_ready:
            return  # nothing has failed yet: the first worker is still loading
        # the latter also while the emergency lane withholds it
        has_result = fallback in FRESH or outcome in IN_TIME
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
        return self._condition if self.superseded.broken is None else Health.DEGRADED
