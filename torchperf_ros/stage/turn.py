"""A frame's turn in a stage: which workers run it, until when, what has come of it, and its answer."""

from dataclasses import dataclass

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict, Outcome
from torchperf_ros.safety.guard import Checked
from torchperf_ros.stage.frame import Answer, Frame, StepTimes
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.workers.worker_process import WorkerProcess

_PREPARE_NS = 4 * NS_PER_MS
_HEDGE_MARGIN_NS = NS_PER_MS

# It is time to answer the current frame, with this outcome and for this reason.
Verdict = tuple[Outcome, str]


@dataclass(slots=True)
class RunResult:
    """A good result of one run.

    Output bytes, the tier that gave it, its times, and the step of an anytime model.
    """

    payload: bytes
    tier: int
    steps: StepTimes
    step: int = 0


@dataclass(slots=True)
class Output:
    """What a stage is about to publish for a frame. Checks may replace it.

    Attributes:
        payload: CDR bytes; None where there is nothing to publish.
        source: the frame that it was computed from; None where there is nothing.
        result: the frame's own result, or the backup's; None where something else stands in.
        fallback: what stands in; None for an own result.
        outcome, reason: of the frame, so far.
        checked: what the guard made of the output; None before, and without a guard.
    """

    payload: bytes | None
    source: Frame | None
    result: RunResult | None
    fallback: Fallback | None
    outcome: Outcome
    reason: str = ""
    checked: Checked | None = None


@dataclass(slots=True)
class Turn:
    """The frame that the stage is answering now.

    It waits (no `runner`), for inputs, an idle worker or a stage of higher priority. It runs (`runner`, maybe
    `backup`). It is decided by a result, or by a failure that no backup can mend. It is `answered`.

    Attributes:
        offset, length: its record in the ring; length 0: there is none, the frame cannot be run.
        failure, reason: what the runner came to, other than a good result.
        partial: what a worker that has failed at the frame left of it.
        inputs_until_ns: until when it waits for inputs, by the clock of these; 0: it does not, or no more.
    """

    frame: Frame  # the frame
    wait_ms: float  # time that it spent in the mailbox, and waiting for inputs
    leave_ns: int  # when waiting ends: the deadline less the publish margin
    ladder: TierLadder  # chooses the tier that runs it
    stream: int = 0  # number of the stream that it is of
    may_have_backup: bool = True  # whether its stage, or stream, has that fallback
    hedge_ns: int = 0  # when the backup is asked as well, 0 before the runner has started
    offset: int = 0
    length: int = 0
    runner: WorkerProcess | None = None  # worker that runs it, None while none is idle
    backup: WorkerProcess | None = None  # worker that runs it on the cheapest tier, None if none does
    hedged: bool = False  # whether the backup was asked because the runner was overdue
    begun_ns: int = 0  # when the runner got it, 0 before
    tier: int = -1  # tier of the runner's run, -1 before
    result: RunResult | None = None  # the runner's good result
    backup_result: RunResult | None = None  # the backup's good result
    together: bool = False  # whether the runner has it in a batch with frames of other streams
    partial: RunResult | None = None
    backup_failed: bool = False  # the backup ran and gave nothing; it is not tried twice
    failure: Outcome | None = None
    reason: str = ""
    held_ns: int = 0  # when to ask again whether it may begin beside stages of higher priority
    held_by: str = ""  # why it may not, the last time
    number: int = -1  # how many frames were started before it; -1: it was not
    # whether the runner came through it, well or not; only then others get to see it
    survived: bool = False
    answered: bool = False  # it is over; what still comes for it is late
    prepared: bool = False  # whether fallbacks that take time to make are made
    inputs_until_ns: int = 0
    missing_inputs: int = 0  # see `Answer`
    shapes: bytes = b""  # of the model's inputs, once a worker has described them
    checked: Checked | None = None  # what the guard made of its output

    def left_ms(self, now_ns: int) -> float:
        """Time until the answer has to leave."""
        return (self.leave_ns - now_ns) / NS_PER_MS

    def started(
        self, runner: WorkerProcess, tier: int, now_ns: int, expected_ms: float, backup_ms: float
    ) -> None:
        """The runner has the frame and is expected back within `expected_ms`.

        The backup is asked at the last moment at which it could still answer, in `backup_ms`, but not
        before the runner is overdue.
        """
        self.runner, self.tier, self.begun_ns = runner, tier, now_ns
        last_moment_ns = self.leave_ns - round(backup_ms * NS_PER_MS) - _HEDGE_MARGIN_NS
        self.hedge_ns = max(last_moment_ns, now_ns + round(expected_ms * NS_PER_MS))

    def fail(self, outcome: Outcome, reason: str) -> None:
        """The runner gives no good result, or there can be none."""
        self.failure, self.reason = outcome, reason

    def lost(self, worker: WorkerProcess, outcome: Outcome, reason: str) -> None:
        """A worker failed at this frame.

        Note it if it was the runner; a backup that fails is not tried again.
        """
        if worker is self.runner:
            self.fail(outcome, reason)
        if worker is self.backup:
            self.backup_failed = True

    @property
    def suspect(self) -> bool:
        """Whether the frame ended the worker that ran it: no other worker gets it."""
        return self.failure is Outcome.CRASHED or self.failure is Outcome.HUNG

    def wants_backup(self, now_ns: int, *, hedges: bool) -> bool:
        """Whether the frame should be run on the backup as well.

        The runner failed, or is nearly out of time.
        """
        if self.backup is not None or self.suspect:
            return False
        return self.failure is not None or (hedges and 0 < self.hedge_ns <= now_ns)

    @property
    def prepare_ns(self) -> int:
        """When fallbacks that take time to make are made."""
        return self.leave_ns - _PREPARE_NS

    def next_event_ns(self, now_ns: int) -> int:
        """When to look at this turn again if nothing happens before.

        When the answer has to leave at the latest.
        """
        events = (self.hedge_ns, self.held_ns, self.prepare_ns)
        return min((at_ns for at_ns in events if now_ns < at_ns < self.leave_ns), default=self.leave_ns)

    def answer(self, output: Output, published_ns: int, withheld: str = "") -> Answer:
        """The record of how the frame was answered.

        Its own result that was out after the deadline makes it `late` all the same. `reason` says why there
        was no result in time; what was published instead is `fallback`, and when `lateness_ms`.

        Args:
            output: what was published.
            published_ns: monotonic time at which it was out.
            withheld: why something else went out in its place; "" mostly.
        """
        frame, result, checked = self.frame, output.result, output.checked
        outcome, reason, check = output.outcome, output.reason, None
        lateness_ms = (published_ns - frame.deadline_ns) / NS_PER_MS
        if outcome in IN_TIME and lateness_ms > 0:
            outcome = Outcome.LATE
            reason = f"its own result was out {lateness_ms:.2f} ms after the deadline"
        if withheld:
            reason = f"{withheld}; {reason}" if reason else withheld
        self.checked = checked
        if checked is not None:
            check = checked.verdict
            if check is not GuardVerdict.ACCEPT:
                refusal = f"guard, {check.word}: {checked.reason}"
                reason = f"{refusal}; {reason}" if reason else refusal
        return Answer(
            frame,
            outcome,
            output.fallback,
            reason,
            tier=self.tier if result is None else result.tier,
            steps=StepTimes() if result is None else result.steps,
            wait_ms=self.wait_ms,
            total_ms=(published_ns - frame.received_ns) / NS_PER_MS,
            budget_ms=frame.budget_ms,
            lateness_ms=lateness_ms,
            published_ns=published_ns,
            payload=output.payload,
            offset=self.offset,
            length=self.length,
            profiled=self.runner is not None and bool(self.runner.recording),
            check=check,
            step=0 if result is None else result.step,
            missing_inputs=self.missing_inputs,
            shapes=self.shapes,
        )
