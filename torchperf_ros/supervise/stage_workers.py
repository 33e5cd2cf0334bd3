"""How a stage's workers come and go: who serves, who no longer does, and what people are told of it."""

import threading
from collections import deque
from collections.abc import Callable

from torchperf_ros.core.anomaly_rules import Anomaly
from torchperf_ros.core.stop_output import warm_up_stop
from torchperf_ros.core.tier_ladder import TierLadder
from torchperf_ros.supervise.crew import Crew, CrewListener
from torchperf_ros.supervise.dispatcher import Dispatcher
from torchperf_ros.supervise.fallback_outputs import FallbackOutputs
from torchperf_ros.supervise.stage_journal import StageJournal
from torchperf_ros.supervise.stage_waiter import StageWaiter
from torchperf_ros.supervise.worker_process import WorkerProcess


class StageWorkers:
    """A crew, the listener that it tells of its workers' lives, and who hands them frames.

    Attributes:
        crew: starts, watches and replaces the workers; its thread calls the listener.
        dispatcher: hands them frames.
        untold: what the stage's thread has to publish; any thread appends.
    """

    def __init__(
        self,
        make_crew: Callable[[CrewListener], Crew],
        ladder: TierLadder,
        outputs: FallbackOutputs,
        journal: StageJournal,
        waiter: StageWaiter,
        lock: threading.Lock,
    ) -> None:
        """Make the crew and the dispatcher, out of the stage's other parts; `lock` is the stage's."""
        self.crew = make_crew(self)
        self.dispatcher = Dispatcher(self.crew, ladder, outputs, journal.statistics)
        self.untold: deque[Anomaly] = deque()
        self._ladder = ladder
        self._journal = journal
        self._waiter = waiter
        self._lock = lock

    def worker_ready(self, worker: WorkerProcess) -> None:
        """A worker can take frames: calibrate the ladder by the first one, and wake the stage: a frame may wait."""
        if self.crew.description is not None:
            warm_up_stop(self.crew.description.output)
        with self._lock:
            if not self.crew.ready:
                self._ladder.calibrate(worker.calibrations)
            worker.usable = True
            self._waiter.add(worker)
            self._journal.health.ready()
            self._waiter.wake()

    def worker_died(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        """A worker is gone, or was never there; the stage's thread answers for it if it had not noticed yet."""
        with self._lock:
            pid = 0
            if worker is not None:
                self.drop(worker)
                pid = worker.pid
            alone, restarts = not self.crew.ready, self.crew.restarts
            self.untold.append(self._journal.worker_died(reason, pid, restarts, lasting=lasting, alone=alone))
            self._waiter.wake()

    def worker_replaced(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        """Have nothing more to do with an idle worker; predict from what its successor measured."""
        with self._lock:
            if not worker.idle:
                return False
            worker.usable = False
            self._waiter.drop(worker)
            self._ladder.calibrate(successor.calibrations)
            return True

    def worker_told(self, text: str) -> None:
        """Something about a worker's models: for `/perf/anomaly`."""
        with self._lock:
            self.untold.append(self._journal.worker_told(text))
            self._waiter.wake()

    def drop(self, worker: WorkerProcess) -> None:
        """Have nothing more to do with a worker that is gone; called with the stage's lock held."""
        worker.usable = False
        if self._waiter.drop(worker):
            self.dispatcher.lost(worker)
