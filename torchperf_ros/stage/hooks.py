"""What a stage is given: ports, its clock and processes, checks, observers, a second version."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import Clock, monotonic_ns
from torchperf_ros.api.outcome import Fallback
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.crew import Crew
from torchperf_ros.stage.frame import Answer, Frame
from torchperf_ros.stage.turn import Output, Turn
from torchperf_ros.stage.waiter import StageWaiter
from torchperf_ros.workers.worker_pool import Log, WorkerPool
from torchperf_ros.workers.worker_process import WorkerProcess
from torchperf_ros.workers.worker_setup import WorkerSetup

# What the emergency lane published in place of a stage's output: `stop` with its bytes, or `none`.
Instead = tuple[Fallback, bytes | None]

# Looks at every output, at a monotonic time, and returns the one that is to be published.
Check = Callable[[Output, int], Output]

# Follows every answer that is out, and returns an alert if there is one; without the stage's lock.
Observer = Callable[[Turn, Answer], Alert | None]


@dataclass
class StagePorts:
    """Where a stage's answers go. All but `log` are called on the stage's thread, `publish` first.

    Attributes:
        publish: takes the output's CDR bytes; returns what went out in their place, None if they did.
        hand_on: takes output bytes (None: there is nothing) with their frame, for the next stage inside the
            node. A held output comes with the stamp of the frame that it was computed from.
        answered: takes the record of a frame.
        anomaly: takes an event for `/perf/anomaly`.
        log: takes severity and text; also called on the pool's thread.
    """

    publish: Callable[[bytes], Instead | None]
    hand_on: Callable[[bytes | None, Frame], None]
    answered: Callable[[Answer], None]
    anomaly: Callable[[Alert], None]
    log: Log


@dataclass(frozen=True)
class StageMachinery:
    """What a stage runs on; a replay on a virtual clock has its own.

    Attributes:
        clock: monotonic time in ns.
        waiter: makes what the stage's thread waits for, see `StageWaiter`.
        pool: makes the stage's workers, with the arguments of `WorkerPool`.
        input_clock: measures waiting for inputs; None: `clock`. Whoever moves another one calls
            `Stage.inputs_are_over`.
    """

    clock: Clock = monotonic_ns
    waiter: Callable[[], Any] = StageWaiter
    pool: Callable[..., Any] = WorkerPool
    input_clock: Clock | None = None


# The machine's clock, threads and processes.
LIVE = StageMachinery()


@dataclass
class ModelVersion:
    """One version of a stage's model with all that is its own. A swap exchanges two of these.

    Attributes:
        name: `BASE` is the version of the stage's own parameters.
        config: its parameters; replaced as a whole when one changes.
        changes: the fields of `config` that are its own; the stage's parameters do not change them.
        setup: what its workers get at their start.
        pool: its workers' processes.
        crew: hands frames to them.
    """

    name: str
    config: StageConfig
    changes: Mapping[str, Any]
    setup: WorkerSetup
    pool: WorkerPool
    crew: Crew


class SecondVersion(Protocol):
    """A second version of a stage's model: it sees what the stage does, and publishes nothing.

    It is put into `Stage.shadow`. Its workers read the frames in the stage's ring. All calls but `remove`
    hold the stage's lock; they neither wait nor raise.

    Attributes:
        figures: what came of comparing the two, for metrics.
    """

    figures: Any

    @property
    def version(self) -> str:
        """The name of the version that does not serve."""

    @property
    def pool(self) -> WorkerPool:
        """Its workers."""

    def before_turn(self, now_ns: int) -> None:
        """No frame is in flight, and one may begin: `Stage.serve` may exchange the versions now."""

    def begun(self) -> None:
        """The stage has a frame: leave it the processor."""

    def answered(self, turn: Turn, answer: Answer, now_ns: int, *, free: bool) -> None:
        """A frame was answered; `free`: the stage has no other."""

    def takes(self, worker: WorkerProcess, now_ns: int, *, free: bool) -> bool:
        """Take what a worker has sent, if it is one of its own; whether it is."""

    def reconfigure(self, config: StageConfig) -> None:
        """Take the stage's changed parameters, but for what is this version's own."""

    def remove(self) -> None:
        """End its workers. The stage stops."""
