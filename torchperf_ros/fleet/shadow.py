"""Another version of a stage's model beside the one that serves.

It gets the same frames, and publishes nothing.

Its workers read the frames where they are, in the stage's ring, after these were answered and only while no
other frame is. What it makes of a frame goes with the answer, as a `Pair`, to the thread that compares the
two. The two versions can change places between two frames (`Shadow.exchange`): both are warm, so it takes
as long as answering one frame.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import IN_TIME, GuardVerdict, Outcome
from torchperf_ros.fleet.comparer import Pair, PairFigures
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.alert_rules import change_alert
from torchperf_ros.stage.crew import Crew
from torchperf_ros.stage.frame import Answer
from torchperf_ros.stage.hooks import ModelVersion
from torchperf_ros.stage.stage import Stage
from torchperf_ros.stage.turn import Turn
from torchperf_ros.workers.control import Description
from torchperf_ros.workers.worker_pool import WorkerPool
from torchperf_ros.workers.worker_process import WorkerProcess
from torchperf_ros.workers.worker_setup import WorkerSetup

# Pairs that wait for the thread that compares; older ones are lost and counted.
_PAIRS: Final = 64
_NICE: Final = 19
_LOOK_AGAIN_NS: Final = NS_PER_MS


def counts(stage: Stage) -> dict[str, int]:
    """The counts that a roll-out's guards look at, of the version that serves.

    Frames, deaths of workers, plans refused, and misses. A miss is a frame without an own result in time, also
    where a fallback was published by its deadline.
    """
    counters = stage.statistics.counters
    frames = counters.ended
    return {
        "frames": frames,
        "deaths": stage.pool.restarts,
        "refused": counters.checks[GuardVerdict.STOP] + counters.checks[GuardVerdict.UNAVOIDABLE],
        "misses": frames - sum(counters.outcomes[outcome] for outcome in IN_TIME),
    }


class Shadow:
    """The version of a stage that does not serve, and its workers; a `SecondVersion` of the stage's hooks.

    After an exchange it is the other version that is in here.

    Attributes:
        model: the version that does not serve.
        exchanges: whether the two change places as soon as no frame is in flight.
        counts_at_exchange: `counts` when the version that serves began to.
        refused: why this version cannot stand beside the other, "" if it can.
        deaths: of its workers, while they were in here.
        skipped: frames that it did not run, as there was no slack or no idle worker; it has observed them.
        lost_pairs: pairs that were pushed out before they were taken.
        figures: the sum of the pairs; the thread that takes them adds them.
        comparing: holds the process that compares pairs (true), or lets it go on; None: there is none.
    """

    def __init__(
        self,
        stage: Stage,
        version: str,
        config: StageConfig,
        changes: Mapping[str, Any],
        setup: WorkerSetup,
    ) -> None:
        """Start one worker of the lowest priority, which gets the stage's frames from now on.

        `changes` are the fields of `config` that are the version's own; `setup` is as in `Stage`.

        Raises:
            ConfigError: the stage has a version beside it already.
        """
        if stage.shadow is not None:
            raise ConfigError(
                f"stage {stage.config.name} has version {stage.shadow.version} beside it already"
            )
        self.exchanges, self.counts_at_exchange = False, counts(stage)
        self.refused, self.deaths, self.skipped, self.lost_pairs = "", 0, 0, 0
        self.figures = PairFigures()
        self.comparing: Callable[[bool], None] | None = None
        self._stage = stage
        tiers = tuple(range(len(config.tiers)))
        alone = replace(setup, loaded=tiers, nice=_NICE, stream_priority=0)
        pool = WorkerPool(replace(config, backup="none"), alone, self, stage.ports.log, stage.ring)
        crew = Crew(pool, config, stage.thread.waiter)
        self.model = ModelVersion(version, config, dict(changes), setup, pool, crew)
        self._running: tuple[Turn, Turn, Answer] | None = None  # its own, the stage's
        self._disturbed = False  # whether the stage had another frame since then
        self._held: WorkerProcess | None = None  # while the stage has a frame
        self._pairs: deque[Pair] = deque(maxlen=_PAIRS)
        with stage.lock:
            stage.shadow = self
        pool.start()

    @property
    def version(self) -> str:
        return self.model.name

    @property
    def pool(self) -> WorkerPool:
        return self.model.pool

    @property
    def is_running(self) -> bool:
        return self._running is not None

    # -- the two change places

    def exchange(self) -> None:
        """Have this version serve from the next frame on, and the one that serves now stand beside it.

        The frame in flight is answered before that, by its deadline, by the version that has it.

        Raises:
            ConfigError: none of its workers can serve.
        """
        with self._stage.lock:
            if not self.pool.ready:
                name = self._stage.config.name
                raise ConfigError(f"stage {name} has no other version whose workers are ready")
            self.exchanges = True
            self._stage.waiter.wake()

    def before_turn(self, now_ns: int) -> None:
        """Change places if that was asked for, and the other version's workers are still there.

        A pool that is just reporting a worker that comes or goes has reported nothing yet: until it has,
        the two stay where they are, and the stage's thread looks again.
        """
        if not self.exchanges:
            return
        stage = self._stage
        with contextlib.ExitStack() as quiet:
            for pool in (stage.pool, self.pool):
                if not pool.telling.acquire(blocking=False):
                    stage.waiter.set(now_ns + _LOOK_AGAIN_NS)
                    return
                quiet.callback(pool.telling.release)
            self.exchanges = False
            if not self.pool.ready:
                text = (
                    f"version {self.version} does not begin to serve: its workers have died since it was"
                    " asked to"
                )
                stage.add_alert(change_alert(stage.config.name, "model", text))
                return
            self._go_on(now_ns)
            self.model = stage.serve(self.model)
            self.pool.listener = self
            self._running, self.deaths = None, 0
            self.counts_at_exchange = counts(stage)

    def reconfigure(self, config: StageConfig) -> None:
        """Take the stage's changed parameters, but for this version's own and the number of its workers."""
        self.model.config = replace(config, **self.model.changes)
        self.pool.config = replace(self.model.config, backup=self.pool.config.backup)

    def remove(self) -> None:
        stage, pool = self._stage, self.pool
        with stage.lock:
            stage.shadow = None
            for worker in pool.everyone:
                stage.thread.waiter.drop(worker)
            # A worker that is ready from now on is not to be waited for.
            self.refused = self.refused or "it was removed"
            if pool.owns_ring:  # it has served: the ring stays with the version that serves
                pool.owns_ring, stage.pool.owns_ring = False, True
        pool.stop()

    # -- frames, on the stage's thread

    def begun(self) -> None:
        """The stage has a frame.

        A run here is stopped where it is, so that no core or cache is shared.
        """
        if self._running is not None and self._held is None:
            self._disturbed = True
            worker = self._running[0].runner
            if worker is not None:
                worker.hold()
                self._held = worker
        if self.comparing is not None:
            self.comparing(True)

    def _go_on(self, now_ns: int) -> None:
        if self._held is not None:
            self._held.go_on(now_ns)
            self._held = None
        if self.comparing is not None:
            self.comparing(False)

    def answered(self, turn: Turn, answer: Answer, now_ns: int, *, free: bool) -> None:
        """A frame was answered.

        Run it if the stage is `free`, else observe it. Not one that ended its runner.

        One that was stale is observed only: that it was late says nothing about either version. One that
        was refused is neither run nor observed.
        """
        if free:
            self._go_on(now_ns)
        if self.refused or not self.pool.ready or not turn.length or turn.frame.refusal:
            return
        runs = free and self._running is None and not turn.frame.stale
        self._disturbed = not runs
        # A frame that ended its runner is a gap in the histories here, too.
        if turn.suspect or not self._follow(turn, answer, now_ns, runs=runs):
            self.skipped += 1

    def _follow(self, turn: Turn, answer: Answer, now_ns: int, *, runs: bool) -> bool:
        """Run a frame once more that the stage has answered; where no worker does, all of them observe it."""
        crew = self.model.crew
        ladder = crew.use(turn.frame.scene, turn.stream)
        mine = Turn(
            turn.frame,
            0.0,
            0,
            ladder,
            turn.stream,
            offset=turn.offset,
            length=turn.length,
            number=turn.number,
        )
        worker = crew.idle() if runs else None
        tier = turn.tier if turn.tier >= 0 else crew.ladder.last
        if worker is not None and crew.hand_over(worker, mine, tier, now_ns):
            mine.runner, mine.tier = worker, tier
            self._running = mine, turn, answer
            return True
        crew.observe(mine, now_ns)
        return False

    def takes(self, worker: WorkerProcess, now_ns: int, *, free: bool) -> bool:
        """Take what a worker of its own has sent of a frame; `free`: the stage answers none now."""
        if not any(worker is each for each in self.pool.everyone):
            return False
        self._disturbed |= not free
        try:
            received = worker.receive()
        except EOFError:
            self._drop(worker)
        else:
            if received is not None:
                self.model.crew.take(worker, *received, math.inf, now_ns)
                self._settle(now_ns)
        return True

    def _drop(self, worker: WorkerProcess) -> None:
        self._held = None if self._held is worker else self._held
        self.model.crew.drop(worker)
        self._settle(self._stage.clock())

    def _settle(self, now_ns: int) -> None:
        if self._running is None:
            return
        mine, turn, answer = self._running
        if mine.result is None and mine.failure is None:
            return
        self._running = None
        self.model.crew.learn(mine, now_ns)
        if mine.failure is Outcome.ERROR and not self.pool.ring.holds(mine.offset):
            self.skipped += 1  # newer frames have taken its place
            return
        self.lost_pairs += len(self._pairs) == _PAIRS
        served = None if turn.result is None else turn.result.payload
        if mine.result is not None:
            steps_ms, payload = mine.result.steps.total_ms, mine.result.payload
            guard, ros_now_ns = self._stage.guard, self._stage.ros_now()
            known = None if guard is None else guard.known(answer.frame, now_ns, ros_now_ns)
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

    # -- towards serving

    @property
    def ready(self) -> bool:
        """Whether it may serve: it has all the workers of the stage, at their priority, and they are up."""
        workers = self.pool.workers
        is_whole = len(workers) >= self.model.config.workers
        is_up = all(worker is not None and worker.usable for worker in workers)
        is_promoted = bool(self.pool.rolling_update.renewal.outcome) and not _gives_way(self.model)
        return is_whole and is_up and is_promoted and not self.refused

    def promote(self) -> None:
        """Take the next step towards `ready`, if there is one to take now; on any thread, takes no lock."""
        if not self.refused and self.pool.ready:
            promote(self.model)

    # -- the pool's thread: workers come and go

    def worker_ready(self, worker: WorkerProcess) -> None:
        with self._stage.lock:
            served, own = self._stage.pool.description, self.pool.description
            if served is not None and own is not None:
                self.refused = self.refused or why_not_beside(served, own)
            if self.refused:
                worker.kill(self.refused)
                return
            self.model.crew.join(worker)

    def worker_died(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        with self._stage.lock:
            if worker is not None:
                self._drop(worker)
            self.deaths += 1
            if lasting and not self.pool.ready:
                self.refused = self.refused or f"its workers keep dying: {reason}"

    def worker_replaced(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        with self._stage.lock:
            return self.model.crew.replace(worker, successor)

    def worker_told(self, text: str) -> None:
        """The pool has logged it."""


def promote(model: ModelVersion) -> bool:
    """Take the next step towards the workers of a version that serves: all of them, at their priority.

    False if no step is left; on any thread. A version that was put into service early lacks some.
    """
    renewal = model.pool.rolling_update.renewal
    if not renewal.outcome:
        return True  # workers are being replaced
    if _gives_way(model):
        was, serving = renewal.proven.setup, model.setup
        renewal.swap(
            replace(
                was,
                loaded=serving.loaded,
                nice=serving.nice,
                stream_priority=serving.stream_priority,
            )
        )
        return True
    model.pool.grow(model.config)
    return False


def _gives_way(model: ModelVersion) -> bool:
    proven = model.pool.rolling_update.renewal.proven.setup
    serving = model.setup
    return (proven.nice, proven.stream_priority) != (serving.nice, serving.stream_priority)


def why_not_beside(served: Description, own: Description) -> str:
    """Why a version cannot take the place of the one that serves: inputs or output differ; "" if it can."""
    if own.output != served.output:
        return f"it publishes {own.output}, the version that serves {served.output}"
    if own.inputs != served.inputs:
        mine, theirs = (", ".join(f"{t} ({k})" for t, k in each.inputs) for each in (own, served))
        return f"its inputs are {mine}; those of the version that serves {theirs}"
    return ""
