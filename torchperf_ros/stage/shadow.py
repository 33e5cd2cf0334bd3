"""Another version of a stage's model beside the one that serves.

It gets the same frames, and publishes nothing.

Its workers read the frames where they are, in the stage's ring, after these were answered and only while no
other frame is. What it makes of a frame goes with the answer, as a `Pair`, to whoever compares the two. The
two versions can change places between two frames (`StageActor.exchange`): both are warm, so it takes as
long as answering one frame.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchperf_ros.api.clock import Clock
from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.safety.guard import Known
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.dispatcher import Dispatcher
from torchperf_ros.stage.fallback_outputs import FallbackOutputs
from torchperf_ros.stage.frame import Answer, Frame
from torchperf_ros.stage.frame_in_flight import FrameInFlight
from torchperf_ros.stage.pair_figures import Pair, PairFigures
from torchperf_ros.stage.stage_figures import StageCounters
from torchperf_ros.stage.tier_ladder import TierClock, TierLadder
from torchperf_ros.workers.worker_pool import Log, WorkerPool
from torchperf_ros.workers.worker_process import Description, WorkerProcess

if TYPE_CHECKING:
    from torchperf_ros.stage.stage_waiter import StageWaiter

_PAIRS = 64  # that nobody has taken yet
_NICE = 19
_PRIORITIES = ("nice", "stream_priority")
_SERVING = (*_PRIORITIES, "loaded")  # what the workers of the version that serves are told otherwise


@dataclass(frozen=True)
class ShadowParts:
    """What a shadow shares with its stage."""

    lock: AbstractContextManager[Any]
    waiter: "StageWaiter"
    clock: Clock
    log: Log
    served: Callable[[], Description | None]  # how the version that serves describes itself
    guard_knows: Callable[[Frame, int], Known | None]  # when a plan was computed from this frame, now


class Shadow:
    """The version of a stage that does not serve, and its workers.

    All but `start` and `stop` under the stage's lock.

    After an exchange it is the other version that is in here.

    Attributes:
        version, config, changes, pool, ladders, dispatcher: of the version that does not serve.
        refused: why this version cannot stand beside the other, "" if it can.
        deaths: of its workers, while they were in here.
        skipped: frames that it did not run, as there was no slack or no idle worker; it has observed them.
        lost_pairs: pairs that nobody took in time.
        figures: what the pairs come to; who takes them adds them.
        comparing: holds what compares pairs (true), or lets it go on; None: nothing does.
    """

    def __init__(
        self,
        version: str,
        config: StageConfig,
        changes: Mapping[str, Any],
        setup: Mapping[str, Any],
        pool: WorkerPool,
        parts: ShadowParts,
    ) -> None:
        """Prepare one worker that gives way to everybody.

        `pool` is the one that serves, `setup` as in `StageActor`.
        """
        self.version, self.config, self.changes = version, config, dict(changes)
        self.refused, self.deaths, self.skipped, self.lost_pairs = "", 0, 0, 0
        self.setup, self.figures = dict(setup), PairFigures()
        self._parts = parts
        clocks = [TierClock() for _ in config.tiers]
        self.ladders = [TierLadder(scene.tiers, clocks) for scene in config.scenes]
        alone = {
            **self.setup,
            "loaded": list(range(len(config.tiers))),
            "nice": _NICE,
            "stream_priority": 0,
        }
        self.pool = WorkerPool(replace(config, backup="none"), alone, self, parts.log, pool.ring)
        self.dispatcher = Dispatcher(self.pool, self.ladders, FallbackOutputs(), StageCounters())
        self._running: tuple[FrameInFlight, FrameInFlight, Answer] | None = None  # its own, the stage's
        self._disturbed = False  # whether the stage had another frame since then
        self._held: WorkerProcess | None = None  # while the stage has a frame
        self.comparing: Callable[[bool], None] | None = None
        self._pairs: deque[Pair] = deque(maxlen=_PAIRS)

    # -- frames, on the stage's thread

    def has(self, worker: WorkerProcess) -> bool:
        """Whether this worker is one of its own."""
        return any(worker is each for each in self.pool.everyone)

    def give_way(self) -> None:
        """The stage has a frame.

        Whatever runs here is stopped, wherever it is, so that no core or cache is shared.
        """
        if self._running is not None and self._held is None:
            self._disturbed = True
            worker = self._running[0].runner
            if worker is not None:
                worker.hold()
                self._held = worker
        if self.comparing is not None:
            self.comparing(True)

    def go_on(self, now_ns: int) -> None:
        """The stage has none."""
        if self._held is not None:
            self._held.go_on(now_ns)
            self._held = None
        if self.comparing is not None:
            self.comparing(False)

    def follow(self, answered: FrameInFlight, answer: Answer, now_ns: int, *, free: bool) -> None:
        """A frame was answered.

        Run it if the stage is `free`, else observe it. Not one that ended its runner.

        One that was stale is observed only: that it was late says nothing about either version. Nor does
        one that was refused, which nobody is to run.
        """
        if self.refused or not self.pool.ready or not answered.length or answered.frame.refusal:
            return
        runs = free and self._running is None and not answered.frame.stale
        self._disturbed = not runs
        mine = self.dispatcher.shadow(answered, now_ns, runs=runs)
        if mine is None:
            self.skipped += 1
        else:
            self._running = mine, answered, answer

    def receive(self, worker: WorkerProcess, now_ns: int, *, free: bool) -> None:
        """Take what a worker of its own says of a frame; `free`: the stage answers none now."""
        self._disturbed |= not free
        try:
            received = worker.receive()
        except EOFError:
            self.drop(worker)
        except ProtocolError as error:
            worker.kill(str(error))
            self.drop(worker)
        else:
            if received is not None:
                self.dispatcher.take(worker, *received, math.inf, now_ns)
                self._settle(now_ns)

    def drop(self, worker: WorkerProcess) -> None:
        """Have nothing more to do with a worker that is gone."""
        worker.usable = False
        self._held = None if self._held is worker else self._held
        if self._parts.waiter.drop(worker):
            self.dispatcher.lost(worker)
            self._settle(self._parts.clock())

    def _settle(self, now_ns: int) -> None:
        """Make a pair of the frame that it ran, once it is known what came of it."""
        if self._running is None:
            return
        mine, answered, answer = self._running
        if mine.result is None and mine.failure is None:
            return
        self._running = None
        self.dispatcher.learn(mine, now_ns)
        if mine.failure is Outcome.ERROR and not self.pool.ring.holds(mine.offset):
            self.skipped += 1  # newer frames have taken its place
            return
        self.lost_pairs += len(self._pairs) == _PAIRS
        served = None if answered.result is None else answered.result.payload
        if mine.result is not None:
            steps_ms, payload = mine.result.steps.total_ms, mine.result.payload
            known = self._parts.guard_knows(answer.frame, now_ns)
            self._pairs.append(
                Pair(answer, Outcome.ON_TIME, steps_ms, served, payload, "", known, self._disturbed)
            )
        elif mine.failure is not None:
            self._pairs.append(Pair(answer, mine.failure, math.nan, served, None, mine.reason))

    def take_pairs(self) -> list[Pair]:
        """The pairs since the last call, oldest first; on any thread, takes no lock."""
        pairs = []
        while self._pairs:
            pairs.append(self._pairs.popleft())
        return pairs

    @property
    def ready(self) -> bool:
        """Whether it may serve: it has all the workers of the stage, at their priority, and they are up."""
        workers = self.pool.workers
        is_whole = len(workers) >= self.config.workers and all(w is not None and w.usable for w in workers)
        return is_whole and self._is_promoted and not self.refused

    @property
    def _is_promoted(self) -> bool:
        return bool(self.pool.rolling_update.renewal.outcome) and not _gives_way(self.pool, self.setup)

    def promote(self) -> None:
        """Take the next step towards `ready`, if there is one to take now; on any thread, takes no lock."""
        if not self.refused and self.pool.ready:
            promote(self.pool, self.setup, self.config)

    def exchanged(self) -> None:
        """The versions have changed places: what was run here is over."""
        self._running = None
        self.deaths = 0

    # -- the pool's thread: workers come and go

    def worker_ready(self, worker: WorkerProcess) -> None:
        """A worker can take frames, unless it takes or gives something else than the version that serves."""
        with self._parts.lock:
            served, own = self._parts.served(), self.pool.description
            if served is not None and own is not None:
                self.refused = self.refused or why_not_beside(served, own)
            if self.refused:
                worker.kill(self.refused)
                return
            if not self.pool.ready:
                for ladder in self.ladders:
                    ladder.calibrate(worker.calibrations)
            worker.usable = True
            self._parts.waiter.add(worker)

    def worker_died(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        """A worker is gone, or was never there; the stage does not mind."""
        with self._parts.lock:
            if worker is not None:
                self.drop(worker)
            self.deaths += 1
            if lasting and not self.pool.ready:
                self.refused = self.refused or f"its workers keep dying: {reason}"

    def worker_replaced(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        """Give a worker no more frames, as another takes its place; False if it is busy with one."""
        with self._parts.lock:
            if not worker.idle:
                return False
            worker.usable = False
            self._parts.waiter.drop(worker)
            for ladder in self.ladders:
                ladder.calibrate(successor.calibrations)
            return True

    def worker_told(self, text: str) -> None:
        """The pool has logged it."""


def promote(pool: WorkerPool, setup: Mapping[str, Any], config: StageConfig) -> bool:
    """Take the next step towards workers as a version has that serves.

    False if none is left; on any thread.
    """
    renewal = pool.rolling_update.renewal
    if not renewal.outcome:
        return True  # workers are being replaced
    if _gives_way(pool, setup):
        renewal.swap(**{name: setup[name] for name in _SERVING})
        return True
    pool.grow(config)
    return False


def _gives_way(pool: WorkerPool, setup: Mapping[str, Any]) -> bool:
    """Whether its workers have a lower priority than a version has that serves."""
    proven = pool.rolling_update.renewal.proven.setup
    return any(proven[name] != setup[name] for name in _PRIORITIES)


def why_not_beside(served: Description, own: Description) -> str:
    """Why a version cannot take the place of the one that serves: inputs or output differ; "" if it can."""
    if own.output != served.output:
        return f"it publishes {own.output}, the version that serves {served.output}"
    if own.inputs != served.inputs:
        mine, theirs = (", ".join(f"{t} ({k})" for t, k in each.inputs) for each in (own, served))
        return f"its inputs are {mine}; those of the version that serves {theirs}"
    return ""
