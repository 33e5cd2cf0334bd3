"""A stage's workers on a virtual clock: real processes, whose lives are told when the clock says so."""

import threading
import time
from dataclasses import replace
from typing import Any, Final

from torchperf_ros.core.clock import NS_PER_MS, NS_PER_S, Clock
from torchperf_ros.core.config import StageConfig
from torchperf_ros.core.restart_policy import RestartPolicy
from torchperf_ros.replay.virtual.step_times import StageTimes
from torchperf_ros.replay.virtual.virtual_worker import RunCounter, VirtualWorker
from torchperf_ros.supervise.crew import Crew, CrewListener, Log
from torchperf_ros.supervise.frame_ring import FrameRing
from torchperf_ros.supervise.worker_process import Description, WorkerProcess

_POLL_S: Final = 0.01
_LONGEST_RUN_MS: Final = 600_000.0


class _Processes:
    """The listener of the real crew: lets its workers serve, and leaves all else to the virtual one.

    The crew closes a dead worker's descriptors when it has been told: nobody may be using them then.
    """

    def __init__(self, using: threading.Lock) -> None:
        self._using = using

    def worker_ready(self, worker: WorkerProcess) -> None:
        worker.usable = True

    def worker_died(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        if worker is not None:
            with self._using:
                worker.usable = False

    def worker_replaced(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        return False  # nothing is compiled and nothing swapped in a replay

    def worker_told(self, text: str) -> None:
        """The crew has logged it."""


class VirtualCrew:
    """Stands in for a `Crew`.

    A worker that dies is replaced after `restart_ms` of the clock and the delays of `RestartPolicy`, however long the
    process really takes to start.

    Attributes:
        config: the stage's parameters.
        last_error: why the last worker died.
        policies: for each worker.
    """

    def __init__(
        self,
        times: StageTimes,
        clock: Clock,
        config: StageConfig,
        setup: dict[str, Any],
        listener: CrewListener,
        log: Log,
    ) -> None:
        """Prepare; times and clock come from the replay, the others are those of `Crew`."""
        self.config = config
        self.last_error = ""
        self.policies = [RestartPolicy(clock) for _ in range(config.workers)]
        self._times = times
        self._clock = clock
        self._listener = listener
        self._log = log
        self._using = threading.Lock()
        longest_ms = max(config.hang_ms, _LONGEST_RUN_MS)  # a slow machine is no hang: the virtual clock tells those
        self._real = Crew(replace(config, hang_ms=longest_ms), setup, _Processes(self._using), log)
        self._real.policies = [RestartPolicy(time.monotonic_ns, proven_s=0.0) for _ in self.policies]
        self._runs = RunCounter(self._real.ring.fd)
        self._slots: list[VirtualWorker | None] = [None] * config.workers
        self._start_at_ns: list[int | None] = [None] * config.workers

    @property
    def ring(self) -> FrameRing:
        """The stage's ring."""
        return self._real.ring

    @property
    def description(self) -> Description | None:
        """What the adapter says of itself."""
        return self._real.description

    @property
    def workers(self) -> list[VirtualWorker | None]:
        """By number; None where there is none now."""
        return self._slots

    @property
    def everyone(self) -> list[VirtualWorker]:
        """The workers that there are."""
        return [worker for worker in self._slots if worker is not None]

    @property
    def ready(self) -> bool:
        """Whether any worker can serve."""
        return any(worker.usable for worker in self.everyone)

    @property
    def restarts(self) -> int:
        """Workers replaced so far."""
        return sum(policy.restarts for policy in self.policies)

    @property
    def gave_up(self) -> bool:
        """No worker can serve, and the last ones died too often in a row, or no process can be started."""
        return not self.ready and (self.policies[0].gave_up or self._real.gave_up)

    @property
    def progress(self) -> str:
        """What the workers are doing, one phrase each."""
        states = ["waits for its restart" if worker is None else worker.state for worker in self._slots]
        return "; ".join(f"worker {number} {state}" for number, state in enumerate(states))

    def start(self) -> None:
        """Start the processes."""
        self._real.start()

    def settle(self) -> None:
        """Wait until every process is ready; the stage is told so at the clock's time of now."""
        for number in range(len(self._slots)):
            self._place(number)

    def stop(self) -> None:
        """End the processes."""
        self._real.stop()

    # -- the virtual clock --------------------------------------------------------------------------------------------

    @property
    def next_ns(self) -> int | None:
        """When a worker's replacement is ready; None: none is missing."""
        return min((at_ns for at_ns in self._start_at_ns if at_ns is not None), default=None)

    def step(self, now_ns: int) -> None:
        """Bury workers that the stage has dropped, and put replacements in the place of those that are due."""
        for number, worker in enumerate(self._slots):
            if worker is not None and worker.dead and not worker.usable:
                self._bury(number, worker, now_ns)
            start_ns = self._start_at_ns[number]
            if start_ns is not None and start_ns <= now_ns:
                self._start_at_ns[number] = None
                self._place(number)

    def _bury(self, number: int, worker: VirtualWorker, now_ns: int) -> None:
        policy = self.policies[number]
        after_ns = policy.died(worker.ready_at_ns)
        self._start_at_ns[number] = max(after_ns, now_ns) + round(self._times.restart_ms * NS_PER_MS)
        self._slots[number] = None
        self.last_error = f"worker {number} ended: {worker.dead}"
        self._log("warn", f"{self.config.name}: {self.last_error}, at {now_ns / NS_PER_S:.3f} s of the log")
        self._listener.worker_died(worker, self.last_error, lasting=policy.gave_up)  # type: ignore[arg-type]

    def _place(self, number: int) -> None:
        """Wait for the process that serves in this place, and let it."""
        process = self._await(number)
        if process is None:
            return
        worker = VirtualWorker(process, self._times, self._runs, self.config.hang_ms, self._using)
        worker.ready_at_ns = self._clock()
        self._slots[number] = worker
        self._listener.worker_ready(worker)  # type: ignore[arg-type]

    def _await(self, number: int) -> WorkerProcess | None:
        """The process, once it is ready; None if none can be started."""
        while not self._real.gave_up:
            with self._using:
                process = self._real.workers[number]
                if process is not None and process.usable and not process.is_dead():
                    return process
            time.sleep(_POLL_S)
        self.last_error = self._real.last_error
        return None
