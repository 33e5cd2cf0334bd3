"""What a stage runs on: threads, processes and the monotonic clock; a replay on a virtual clock brings its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchperf_ros.core.clock import Clock, monotonic_ns
from torchperf_ros.supervise.crew import Crew
from torchperf_ros.supervise.stage_waiter import StageWaiter


@dataclass(frozen=True)
class StageMachinery:
    """Made once for each stage.

    Attributes:
        clock: monotonic time in ns.
        waiter: makes what the stage's thread waits for, see `StageWaiter`.
        crew: makes the stage's workers, with the arguments of `Crew`.
    """

    clock: Clock = monotonic_ns
    waiter: Callable[[], Any] = StageWaiter
    crew: Callable[..., Any] = Crew
