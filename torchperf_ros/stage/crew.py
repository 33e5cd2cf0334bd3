"""The workers of one version of a stage's model: which is idle, what each runs, what comes of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.batching import BatchTimes, FrameBatch
from torchperf_ros.stage.frame import StepTimes
from torchperf_ros.stage.ladder import TierClock, TierLadder
from torchperf_ros.stage.practice import DISOWNED, Job, Practice, Purpose
from torchperf_ros.stage.turn import RunResult, Turn, Verdict
from torchperf_ros.stage.waiter import StageWaiter
from torchperf_ros.workers.protocol import Response
from torchperf_ros.workers.worker_pool import WorkerPool
from torchperf_ros.workers.worker_process import RunPart, WorkerProcess

# So many times a worker fails where another does not, without a good run in between: then it is replaced.
_REFUTED = 3
_MUCH = 0.5  # of a budget, gone before the frame came: that explains more than what the run took


@dataclass
class _Doubt:
    """What speaks against a worker: streams and tiers of its failures, and how often another ran one well."""

    failed: set[tuple[int, int]] = field(default_factory=set)
    refuted: int = 0


class Crew:
    """Hands frames to the workers of a pool and takes their responses; every call holds the stage's lock.

    The worker that ran last is preferred (its caches are warm); while it is busy the other takes over and
    becomes the preferred one, so that a first worker that comes back becomes the standby. After an error or
    an invalid output the other one is preferred. A worker that fails again and again where another does not
    has a broken state, as of a leak of descriptors: it is replaced.

    Attributes:
        pool: the workers.
        ladders: of tiers, one for each scene; of a stage with streams one for each of these.
        ladder: the one of the scene that the last frame was answered for.
        practice: runs that no frame waits for.
        batch_times: what runs of several frames take.
        preferred: the worker that ran last, None before the first run.
        unseen: observations that did not reach a worker, as its queue was full; the stage takes the count.
    """

    def __init__(self, pool: WorkerPool, config: StageConfig, waiter: StageWaiter) -> None:
        self.pool = pool
        clocks = [TierClock() for _ in config.tiers]
        rows = [scene.tiers for scene in config.scenes] * max(1, len(config.streams))
        self.ladders = [TierLadder(tiers, clocks) for tiers in rows]
        self.ladder = self.ladders[0]
        self.practice = Practice(hedges=not config.streams)
        self.batch_times = BatchTimes()
        self.unseen = 0
        self._waiter = waiter
        self.preferred: WorkerProcess | None = None
        self._running: dict[WorkerProcess, Turn | Job | FrameBatch] = {}
        self._lessons: list[tuple[TierLadder, int, float, float]] = []
        self._doubts: dict[WorkerProcess, _Doubt] = {}

    # -- who is idle

    def idle(self, other_than: WorkerProcess | None = None) -> WorkerProcess | None:
        """An idle worker: one that records if there is, else the preferred one, else another."""
        found = None
        for worker in self.pool.everyone:
            if worker is other_than or not worker.idle:
                continue
            if worker.recording:
                return worker
            if found is None or worker is self.preferred:
                found = worker
        return found

    def spared(self, stream: int) -> int:
        """How many workers are there that run no frame of this stream."""
        taken = self._run_by(stream)
        return sum(worker.available and worker not in taken for worker in self.pool.everyone)

    def runs_frame_of(self, stream: int) -> bool:
        """Whether a worker runs a frame of this stream alone."""
        return bool(self._run_by(stream))

    def _run_by(self, stream: int) -> list[WorkerProcess]:
        return [
            worker
            for worker, run in self._running.items()
            if isinstance(run, Turn) and run.stream == stream
        ]

    @property
    def runs(self) -> bool:
        return bool(self._running)

    def expect(self) -> None:
        """A frame is about to come: wake the worker that is to run it."""
        if worker := self.idle():
            worker.expect()

    # -- hand over

    def use(self, scene: int, stream: int) -> TierLadder:
        """The ladder for a frame of this scene, or of this stream; a stage has several of one kind only."""
        ladder = self.ladders[scene + stream]
        if ladder is not self.ladder:
            if not self.pool.config.streams:
                ladder.take_over(self.ladder)
            self.ladder = ladder
        return ladder

    def start(self, turn: Turn, left_ms: float, fresh_ms: float, now_ns: int) -> bool:
        """Run a frame on an idle worker, if there is one, on the tier that fits the time left.

        `fresh_ms`: the time that a frame has which did not wait; it decides the ladder's level.
        """
        tier, ladder = None, turn.ladder
        while worker := self.idle():
            tier = ladder.choose(left_ms, fresh_ms, now_ns) if tier is None else tier
            if not self.hand_over(worker, turn, tier, now_ns):
                continue  # it has just died and is no longer idle
            turn.started(worker, tier, now_ns, ladder.predicted_ms(tier), ladder.predicted_ms(ladder.last))
            self.preferred = worker
            return True
        return False

    def start_together(self, turns: Sequence[Turn], fresh_ms: float, now_ns: int) -> int:
        """Run frames of several streams, the most urgent first, on an idle worker as one batch.

        `fresh_ms` is as in `start`, of the first of them. Returns how many frames run; 0: that does not pay,
        or no worker is idle.
        """
        worker, first = self.idle(), turns[0]
        if worker is None:
            return 0
        ladder, times = first.ladder, self.batch_times
        tier = ladder.choose(first.left_ms(now_ns), fresh_ms, now_ns)
        alone, overhead_ms = ladder.forecast(tier), ladder.usual_overhead_ms(tier)
        lefts_ms = [turn.left_ms(now_ns) for turn in turns]
        size = times.largest(tier, lefts_ms, alone.ms - alone.overhead_ms, overhead_ms, ladder.slowdown)
        if size == 1 or not worker.run_batch(
            tier, [self._part(worker, turn) for turn in turns[:size]], now_ns
        ):
            return 0
        expected_ms = times.predicted_ms(tier, size, ladder.slowdown) + size * overhead_ms
        for turn in turns[:size]:
            worker.observed[turn.stream] = turn.number
            turn.started(worker, tier, now_ns, expected_ms, turn.ladder.predicted_ms(turn.ladder.last))
            turn.together = True
        self._running[worker] = FrameBatch(size, {turn.stream: turn for turn in turns[:size]})
        self.preferred = worker
        return size

    def whole_batch_ms(self, ladder: TierLadder) -> float:
        """What the largest batch takes on the cheapest tier; infinite where none is known."""
        times = self.batch_times
        inference_ms = times.predicted_ms(ladder.last, times.most, ladder.slowdown)
        return inference_ms + times.most * ladder.usual_overhead_ms(ladder.last)

    @staticmethod
    def _part(worker: WorkerProcess, turn: Turn) -> RunPart:
        return RunPart(
            turn.stream,
            turn.frame.seq,
            turn.offset,
            turn.length,
            leave_ns=turn.leave_ns,
            observe=_is_behind(worker, turn),
            missed=_missed(worker, turn),
        )

    def wants_backup(self, turn: Turn, now_ns: int) -> bool:
        """Whether another worker is to run the frame too: the runner failed, or is nearly out of time."""
        return turn.may_have_backup and turn.wants_backup(now_ns, hedges=self.practice.hedge_rule.allowed)

    def start_backup(self, turn: Turn, now_ns: int, *, always: bool) -> bool:
        """Run the frame on another worker as well, on the cheapest tier, if one is idle.

        `always`: every frame gets a backup, so that this one says nothing about its runner.
        """
        hedged = turn.failure is None and not always
        if hedged and turn.runner is not None and turn.runner.is_ending:
            turn.hedge_ns = 0  # it is no overdue frame, but one that has ended its runner
            return False
        worker = self.idle(other_than=turn.runner)
        if worker is None or not self.hand_over(worker, turn, turn.ladder.last, now_ns):
            return False
        turn.backup, turn.hedged = worker, hedged
        return True

    def hand_over(self, worker: WorkerProcess, turn: Turn, tier: int, now_ns: int) -> bool:
        """Have this worker run a frame; False if it is gone."""
        handed = worker.run(
            tier,
            turn.frame.seq,
            turn.offset,
            turn.length,
            now_ns,
            observe=_is_behind(worker, turn),
            leave_ns=turn.leave_ns,
            missed=_missed(worker, turn),
            stream=turn.stream,
        )
        if handed:
            self._running[worker] = turn
            worker.observed[turn.stream] = turn.number
        return handed

    def observe(self, turn: Turn, now_ns: int, *, one: bool = False) -> None:
        """Have the workers that did not run this frame advance their histories, or only one of them.

        A worker that has seen a later frame keeps the gap: histories go forward only.
        """
        if self.pool.description is None or not self.pool.description.observes or not turn.length:
            return
        behind = [worker for worker in self.pool.everyone if _is_behind(worker, turn)]
        for worker in behind[:1] if one else behind:
            missed, stream = _missed(worker, turn), turn.stream
            if worker.observe(
                turn.frame.seq, turn.offset, turn.length, now_ns, missed=missed, stream=stream
            ):
                worker.observed[stream] = turn.number
            else:
                self.unseen += 1

    # -- take

    def take(
        self, worker: WorkerProcess, response: Response, payload: bytes, fresh_ms: float, now_ns: int
    ) -> Turn | None:
        """Give a response to the frame that it belongs to, and note its times for `learn`.

        Returns that frame; None for a run that no frame waited for.
        """
        run, has_run, worker.has_run = self._running.pop(worker), worker.has_run, True
        took_ms = (now_ns - worker.busy_since_ns) / NS_PER_MS
        steps, outcome = _step_times(response), Outcome(response.outcome)
        if isinstance(run, Job):
            good = outcome is Outcome.ON_TIME and response.tier == run.tier
            self.practice.done(
                run,
                self._ladder_of(run),
                good=good,
                inference_ms=steps.inference_ms,
                took_ms=took_ms,
                fresh_ms=fresh_ms,
            )
            return None
        batch = None
        if isinstance(run, FrameBatch):
            batch = run
            run = batch.turns.pop(response.stream)
            if batch.turns:
                self._running[worker] = batch
        if worker is run.runner:
            run.survived, run.shapes = True, response.shapes
            if run.answered:
                self.observe(run, now_ns)
        # The first run of a process is cold, and says nothing about those that follow.
        if has_run and not math.isnan(steps.inference_ms):
            known_ms = steps.inference_ms
            # A run that was stopped would have taken longer than there was time.
            inference_ms = max(known_ms, fresh_ms) if outcome is Outcome.PARTIAL else known_ms
            if batch is None:
                self._lessons.append((run.ladder, response.tier, inference_ms, took_ms - known_ms))
        if has_run and batch is not None:
            self._learn_batch(batch, run.ladder, response.tier, steps.inference_ms, took_ms)
        self._give(worker, run, outcome, payload, RunResult(payload, response.tier, steps, response.step))
        return run

    def _learn_batch(
        self, batch: FrameBatch, ladder: TierLadder, tier: int, inference_ms: float, took_ms: float
    ) -> None:
        """Learn once from a batch, when its last frame is there.

        Frames of different sizes ran one after the other: what each took alone says nothing of the whole.
        """
        batch.slowest_ms = max(batch.slowest_ms, 0.0 if math.isnan(inference_ms) else inference_ms)
        if not batch.turns and batch.slowest_ms:
            beside_ms = batch.size * ladder.usual_overhead_ms(tier)
            self.batch_times.add(tier, batch.size, max(batch.slowest_ms, took_ms - beside_ms))

    def _give(
        self, worker: WorkerProcess, run: Turn, outcome: Outcome, payload: bytes, result: RunResult
    ) -> None:
        """What has come of a run, to its frame."""
        kind = run.stream, run.tier if worker is run.runner else run.ladder.last
        if outcome is Outcome.ON_TIME:
            self._trust(worker, kind)
        elif outcome is Outcome.ERROR or outcome is Outcome.INVALID:
            self._doubt(worker, kind)
        if outcome is not Outcome.ON_TIME:
            self._failed(worker, run, outcome, payload.decode(errors="replace"))
        elif run.answered:
            if worker is run.runner and run.backup is None and not run.frame.stale:
                self.practice.was_late(run)
        elif worker is run.runner:
            run.result = result
        else:
            run.backup_result = result

    def _doubt(self, worker: WorkerProcess, kind: tuple[int, int]) -> None:
        self._doubts.setdefault(worker, _Doubt()).failed.add(kind)
        if worker is self.preferred:
            others = (one for one in self.pool.everyone if one is not worker and one.available)
            self.preferred = next(others, worker)

    def _trust(self, worker: WorkerProcess, kind: tuple[int, int]) -> None:
        """A good run clears a worker, and speaks against one that failed at the same: that is tried again."""
        if not self._doubts:
            return
        self._doubts.pop(worker, None)
        for other, doubt in self._doubts.items():
            if kind not in doubt.failed:
                continue
            doubt.failed.clear()
            doubt.refuted += 1
            if doubt.refuted < _REFUTED:
                self.preferred = other
            elif other.idle:
                other.kill(
                    f"it failed {doubt.refuted} times where another worker did not, and never ran well between"
                )

    def _ladder_of(self, job: Job) -> TierLadder:
        return self.ladder if job.turn is None else job.turn.ladder

    def learn(self, answered: Turn, now_ns: int) -> None:
        """Learn from a frame, and let the other workers see it; done when its answer is out."""
        if answered.hedged and answered.result is None:
            self.practice.hedge_rule.hedged(in_time=answered.backup_result is not None)
        # A frame that no worker had time to run is seen by one of them.
        has_no_runner = answered.runner is None and not answered.frame.refusal
        if answered.survived or has_no_runner:
            self.observe(answered, now_ns, one=has_no_runner)
        for ladder, tier, inference_ms, overhead_ms in self._lessons:
            ladder.learn(tier, inference_ms, overhead_ms)
        self._lessons.clear()

    def partial(self, turn: Turn, verdict: Verdict) -> Verdict:
        """The verdict on a frame without a whole result, or on the newest step of an anytime model.

        The runner's step comes before the backup's, and before every other fallback: it becomes the frame's
        result.
        """
        for worker in (turn.runner, turn.backup):
            if worker is not None and self._running.get(worker) is turn:
                _note_partial(worker, turn)
        if turn.partial is None:
            return verdict
        turn.result = turn.partial
        tier, step = self.pool.config.tiers[turn.result.tier], turn.result.step
        return Outcome.PARTIAL, f"step {step} of tier {tier} was published: {verdict[1]}"

    def may_have_backup(self, turn: Turn) -> bool:
        """Whether waiting for another worker's result of a frame that failed makes sense."""
        if turn.failure is Outcome.BAD_INPUT or turn.backup_result is not None or turn.backup_failed:
            return False
        if turn.suspect and turn.backup is None:
            return False
        if not turn.may_have_backup:
            return False
        return any(other is not turn.runner and other.available for other in self.pool.everyone)

    def why_late(self, turn: Turn, now_ns: int) -> Verdict:
        """The verdict on a frame that has no result when its time is up."""
        frame, runner = turn.frame, turn.runner
        if turn.failure is not None:
            return turn.failure, turn.reason
        if frame.stale and self.pool.ready:
            return Outcome.LATE, f"stale: {frame.gone_words(turn.wait_ms)}"
        if runner is not None:
            busy_ms = (now_ns - runner.busy_since_ns) / NS_PER_MS
            tier = self.pool.config.tiers[turn.tier]
            reason = f"tier {tier} on worker {runner.number} was not done after {busy_ms:.1f} ms"
            if frame.gone_ms > _MUCH * frame.budget_ms:
                reason += f"; {frame.gone_words(turn.wait_ms)}"
            return Outcome.LATE, reason
        if turn.held_by:
            return Outcome.LATE, turn.held_by
        if self.pool.ready:
            return Outcome.LATE, f"no worker is free: {self.pool.progress}"
        return Outcome.STARTING, self.pool.progress

    def _failed(self, worker: WorkerProcess, turn: Turn, outcome: Outcome, reason: str) -> None:
        """A worker gave no whole result. After the answer an anytime model stops, which is no failure."""
        if outcome is not Outcome.PARTIAL:
            _note_partial(worker, turn)
            turn.lost(worker, outcome, reason)

    # -- runs that no frame waits for

    def may_practise(self, answered: Turn) -> WorkerProcess | None:
        """An idle worker, if none practises already and the frame's record was written; else None."""
        if not answered.length:
            return None
        for run in self._running.values():
            if isinstance(run, Job):
                return None
        return self.idle()

    def practise(
        self,
        first: WorkerProcess,
        answered: Turn,
        *,
        fresh_ms: float,
        room_ms: float,
        way_ms: float,
        now_ns: int,
    ) -> Purpose | None:
        """Have a worker do what helps next, see `Practice.next`; what that is for, None for nothing.

        `first` is idle, and runs the next frame if one comes.
        """
        spare = self.idle(other_than=first)
        job = self.practice.next(
            answered,
            spare,
            answered.ladder,
            fresh_ms=fresh_ms,
            room_ms=room_ms,
            way_ms=way_ms,
            hang_ms=self.pool.config.hang_ms,
            now_ns=now_ns,
        )
        if job is None or job.turn is None:
            return None
        worker, turn = spare or first, job.turn
        place = turn.frame.seq, turn.offset, turn.length
        if worker.run(job.tier, *place, now_ns, observe=False, stream=turn.stream):
            self._running[worker] = job
        return job.purpose

    # -- workers come and go

    def join(self, worker: WorkerProcess) -> None:
        """A worker can take frames; the first one's measurements calibrate the ladders."""
        if not self.pool.ready:
            self._calibrate(worker)
        worker.serve()
        self._waiter.add(worker)

    def replace(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        """Give an idle worker no more frames, and predict from what its successor measured.

        False if it is busy.
        """
        if not worker.idle:
            return False
        worker.withdraw()
        self._doubts.pop(worker, None)
        self._waiter.drop(worker)
        self._calibrate(successor)
        return True

    def drop(self, worker: WorkerProcess) -> Turn | None:
        """A worker is gone; the frame that it ran has failed, and is returned.

        The second call for one does nothing.
        """
        worker.withdraw()
        self._doubts.pop(worker, None)
        if not self._waiter.drop(worker):
            return None
        run = self._running.pop(worker, None)
        if isinstance(run, Job):
            self.practice.lost(run, self._ladder_of(run))
            return None
        turns = (
            list(run.turns.values()) if isinstance(run, FrameBatch) else [run] if run is not None else []
        )
        reason = worker.kill_reason or f"worker {worker.number} (pid {worker.pid}) died"
        for turn in turns:
            self._failed(worker, turn, Outcome.HUNG if worker.hung else Outcome.CRASHED, reason)
        return next(iter(turns), None)

    def disown(self) -> None:
        """Discard the results of all runs that have begun: their version has changed its place."""
        self._running = dict.fromkeys(self._running, DISOWNED)
        self.practice.forget()

    def _calibrate(self, worker: WorkerProcess) -> None:
        self.batch_times.measured(worker.batching)
        for ladder in self.ladders:
            ladder.calibrate(worker.calibrations)


def _note_partial(worker: WorkerProcess, turn: Turn) -> None:
    """Take the steps that a worker has of the frame so far, while its memory is there."""
    if turn.answered or (turn.partial is not None and worker is not turn.runner):
        return
    if (found := worker.partial(turn.frame.seq, turn.stream)) is not None:
        response, payload = found
        turn.shapes = response.shapes
        turn.partial = RunResult(payload, response.tier, _step_times(response), response.step)


def _is_behind(worker: WorkerProcess, turn: Turn) -> bool:
    """Whether the worker has observed neither this frame nor a later one of its stream."""
    observed = worker.observed.get(turn.stream)
    return observed is None or observed < turn.number


def _missed(worker: WorkerProcess, turn: Turn) -> int:
    """Started frames of the stream that the worker was not given since its last one; 0 for a new worker."""
    observed = worker.observed.get(turn.stream)
    return 0 if observed is None else max(0, turn.number - observed - 1)


def _step_times(response: Response) -> StepTimes:
    values = (response.decode_ns, response.preprocess_ns, response.inference_ns, response.postprocess_ns)
    return StepTimes(*[value / NS_PER_MS if value >= 0 else math.nan for value in values])
