"""A frame's turn in a stage: who runs it, and what has come of it so far."""

from dataclasses import dataclass, field

from torchperf_ros.core.frame import Frame, StepTimes
from torchperf_ros.core.outcome import Outcome
from torchperf_ros.supervise.worker_process import WorkerProcess


@dataclass(slots=True)
class Result:
    """A good result of one run: output bytes, the tier that gave it, and its times."""

    payload: bytes
    tier: int
    steps: StepTimes


@dataclass(slots=True)
class Turn:
    """The frame that the stage is answering now.

    Attributes:
        frame: the frame.
        offset, length: its record in the ring.
        wait_ms: time that it spent in the mailbox.
        runner: worker that runs it, None while none is idle.
        backup: worker that runs it on the cheapest tier, None if none does.
        tier: tier of the runner's run, -1 before.
        result: the runner's good result.
        backup_result: the backup's good result.
        backup_failed: the backup ran and gave nothing; it is not tried twice.
        failure, reason: what the runner came to, other than a good result.
        observed: numbers of the workers that were told of the frame.
    """

    frame: Frame
    offset: int
    length: int
    wait_ms: float
    runner: WorkerProcess | None = None
    backup: WorkerProcess | None = None
    tier: int = -1
    result: Result | None = None
    backup_result: Result | None = None
    backup_failed: bool = False
    failure: Outcome | None = None
    reason: str = ""
    observed: set[int] = field(default_factory=set)

    def lost(self, worker: WorkerProcess, outcome: Outcome, reason: str) -> None:
        """A worker failed at this frame: note it if it was the runner; a backup that fails is not tried again."""
        if worker is self.runner:
            self.failure, self.reason = outcome, reason
        if worker is self.backup:
            self.backup_failed = True
