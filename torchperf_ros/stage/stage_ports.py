"""What a stage is connected to: where its answers go, and the threads, processes and clock that it runs on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchperf_ros.frame.alert_rules import Alert
from torchperf_ros.frame.clock import Clock, monotonic_ns
from torchperf_ros.frame.frame import Answer, Frame
from torchperf_ros.stage.stage_waiter import StageWaiter
from torchperf_ros.workers.worker_pool import Log, WorkerPool


@dataclass
class StagePorts:
    """Where a stage's answers go. All but `log` are called on the stage's thread, `publish` first.

    Attributes:
        hand_on: output bytes (None: there is nothing) with their frame, to the next stage inside the node. A held
            output comes with the stamp of the frame that it was computed from.
    """

    publish: Callable[[bytes], None]  # the output's CDR bytes
    hand_on: Callable[[bytes | None, Frame], None]
    answered: Callable[[Answer], None]  # the record of a frame
    anomaly: Callable[[Alert], None]  # an event for `/perf/anomaly`
    log: Log  # severity and text; also called on the pool's thread


@dataclass(frozen=True)
class StageMachinery:
    """Made once for each stage."""

    clock: Clock = monotonic_ns  # monotonic time in ns
    waiter: Callable[[], Any] = StageWaiter  # makes what the stage's thread waits for, see `StageWaiter`
    pool: Callable[..., Any] = WorkerPool  # makes the stage's workers, with the arguments of `WorkerPool`
