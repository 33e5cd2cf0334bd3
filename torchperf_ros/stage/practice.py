"""Runs that no frame waits for: rehearsals, retrials and probes; and whether hedges pay.

Nothing here is on a frame's way: the stage asks once, after an answer, when no frame waits.
"""

import enum
import math
from dataclasses import dataclass
from typing import Final

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.stage.turn import Turn
from torchperf_ros.workers.worker_process import WorkerProcess

# A spare worker that has not run for so long rehearses.
REHEARSE_AFTER_NS: Final = 5 * NS_PER_S
# A probe may take this part of the time after which a worker is killed.
_LONGEST_PROBE: Final = 0.5
_PROOFS: Final = 3
_MOST_PROOFS: Final = 96


class Purpose(enum.Enum):
    """What a run is for that no frame waits for."""

    # Brings the code and memory of a spare worker back: its first run can take ten times as
    # long.
    REHEARSAL = "rehearsal"
    # Finds out whether the worker or the frame was at fault when a frame was late.
    RETRIAL = "retrial"
    # Finds out how long a tier above the current one takes now.
    PROBE = "probe"
    # It began for a frame of a version that serves no more; its result is discarded.
    DISOWNED = "disowned"


@dataclass(frozen=True, slots=True)
class Job:
    """One such run: a tier, on the record of a frame that was answered before."""

    purpose: Purpose
    tier: int = 0
    turn: Turn | None = None


DISOWNED: Final = Job(Purpose.DISOWNED)


class Practice:
    """Decides which run helps next, and learns from it; every call holds the stage's lock.

    Attributes:
        hedge_rule: whether the standby also runs frames that are overdue.
    """

    def __init__(self, *, hedges: bool = True) -> None:
        self.hedge_rule = HedgeRule(possible=hedges)
        self._late: Turn | None = None  # a late frame that its runner came through

    def forget(self) -> None:
        """Retry no frame from before."""
        self._late = None

    def was_late(self, turn: Turn) -> None:
        """The result of a frame's only run came after its answer."""
        if self.hedge_rule.wants_retrial():
            self._late = turn

    def next(
        self,
        turn: Turn,
        spare: WorkerProcess | None,
        ladder: TierLadder,
        *,
        fresh_ms: float,
        room_ms: float,
        way_ms: float,
        hang_ms: float,
        now_ns: int,
    ) -> Job | None:
        """The run that helps most now; None: none does.

        A spare worker that has not run for 5 s rehearses on the cheapest tier. Else it runs a late frame
        once more. Else the ladder may want to know how long the next tier up takes.

        Args:
            turn: the frame that was just answered, whose record is run.
            spare: an idle worker beside the one that runs the next frame.
            ladder: of the scene in use.
            fresh_ms: the time that a frame has which did not wait.
            room_ms: time until the next frame may come; without a spare worker it would wait for this run.
            way_ms: time until a stage of higher priority has a frame; infinite where there is none.
            hang_ms: after which a worker is killed.
            now_ns: monotonic time.
        """
        if spare is not None and now_ns - spare.busy_since_ns > REHEARSE_AFTER_NS:
            return Job(Purpose.REHEARSAL, ladder.last, turn)
        if spare is not None and spare.has_run and self._late is not None:
            late, self._late = self._late, None
            return Job(Purpose.RETRIAL, ladder.last, late)
        room_ms = min(way_ms, room_ms if spare is None else math.inf)
        tier = ladder.probe(fresh_ms, now_ns, room_ms, _LONGEST_PROBE * hang_ms)
        return None if tier is None else Job(Purpose.PROBE, tier, turn)

    def done(
        self,
        job: Job,
        ladder: TierLadder,
        *,
        good: bool,
        inference_ms: float,
        took_ms: float,
        fresh_ms: float,
    ) -> None:
        """A job has ended with a response; `good`: with a result of its tier."""
        # A retrial without a result says nothing: newer frames have taken its record's place, or the frame
        # has another fault.
        if job.purpose is Purpose.RETRIAL and good:
            self.hedge_rule.retried(in_time=took_ms <= fresh_ms)
        elif job.purpose is Purpose.PROBE:
            ladder.probed(job.tier, inference_ms, took_ms if good else math.inf, fresh_ms)

    def lost(self, job: Job, ladder: TierLadder) -> None:
        if job.purpose is Purpose.RETRIAL:
            self.hedge_rule.retried(in_time=False)
        elif job.purpose is Purpose.PROBE:
            ladder.probed(job.tier, math.nan, math.inf, 0.0)


class HedgeRule:
    """Learns whose fault it is when a frame is late: the worker's or the frame's.

    A standby that is given the overdue frame (a hedge) saves that frame if the runner was at fault, for
    example by a pause of garbage collection. If the frame is at fault, for example a scene with too many
    boxes, the standby is late as well, and the frames after it have no worker. So the standby is kept for
    the next frame until there is proof: a late frame that its runner came through is run once more by a
    spare worker, for no answer (a retrial). It was the worker's fault if that is quick. Three such proofs
    allow hedges. A hedge or a retrial that is late as well suspends them, and doubles the proofs that it
    takes, up to 96, and the late frames that go by before the next retrial.

    Among streams there are neither: a frame that stalls would have both workers then, which the frames of all
    other streams need.

    Attributes:
        retrials, slow_retrials, hedges, lost_hedges: counters; slow: as late as the first run, lost: runner
            and standby were late on the same frame.
    """

    def __init__(self, *, possible: bool = True) -> None:
        self._possible = possible
        self.allowed = False  # whether hedges are given now
        self.retrials = self.slow_retrials = self.hedges = self.lost_hedges = 0
        self._proofs = 0
        self._wanted = _PROOFS
        self._passes_by = 0

    def wants_retrial(self) -> bool:
        """A late frame could be run once more: whether that is wanted, called once for each."""
        if self.allowed or not self._possible:
            return False
        if self._passes_by > 0:
            self._passes_by -= 1
            return False
        return True

    def retried(self, *, in_time: bool) -> None:
        """A retrial is over; `in_time`: within the time of a fresh frame."""
        self.retrials += 1
        if in_time:
            self._proofs += 1
            self.allowed = self._possible and (self.allowed or self._proofs >= self._wanted)
        else:
            self.slow_retrials += 1
            self._suspend()

    def hedged(self, *, in_time: bool) -> None:
        """A frame is over that was hedged and whose runner was late.

        `in_time`: the standby had a result.
        """
        self.hedges += 1
        if not in_time:
            self.lost_hedges += 1
            self._suspend()

    def _suspend(self) -> None:
        self.allowed = False
        self._proofs = 0
        self._wanted = min(2 * self._wanted, _MOST_PROOFS)
        self._passes_by = self._wanted // (2 * _PROOFS)

    @property
    def words(self) -> str:
        """For `/diagnostics`."""
        if not self._possible:
            return "never: the other worker is there for the other streams' frames"
        if self.allowed:
            return "the standby also runs a frame that is overdue"
        proofs = f"{self._proofs} of {self._wanted} late frames were quick when run again"
        if self.slow_retrials or self.lost_hedges:
            times = self.slow_retrials + self.lost_hedges
            return f"suspended: frames were late on both workers ({times} times); {proofs}"
        return f"not yet: the standby is kept for the next frame; {proofs}"
