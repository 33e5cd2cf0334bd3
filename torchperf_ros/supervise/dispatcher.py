"""Who runs what: writes frames into the ring, hands them to workers, and takes their responses into the turn."""

import math

from torchperf_ros.core.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.core.frame import StepTimes
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.core.stage_statistics import StageStatistics
from torchperf_ros.core.tier_ladder import TierLadder
from torchperf_ros.supervise.crew import Crew
from torchperf_ros.supervise.fallback_outputs import FallbackOutputs
from torchperf_ros.supervise.frame_ring import InputBytes
from torchperf_ros.supervise.protocol import Response
from torchperf_ros.supervise.turn import Result, Turn, Verdict
from torchperf_ros.supervise.worker_process import WorkerProcess

_REHEARSE_AFTER_NS = 5 * NS_PER_S


class Dispatcher:
    """The stage's view of its workers; every call holds the stage's lock.

    The worker that ran last is preferred (its caches are warm); while it is busy the other takes over and becomes the
    preferred one, so that a first worker that comes back becomes the standby.
    """

    def __init__(self, crew: Crew, ladder: TierLadder, outputs: FallbackOutputs, statistics: StageStatistics) -> None:
        """Take the stage's parts."""
        self.latest: dict[int, InputBytes] = {}
        self._crew = crew
        self._ladder = ladder
        self._outputs = outputs
        self._statistics = statistics
        self._preferred: WorkerProcess | None = None
        self._running: dict[WorkerProcess, Turn | None] = {}  # whose frame it runs, None: practice
        self._lessons: list[tuple[int, float, float]] = []

    def write(self, turn: Turn, data: bytes) -> None:
        """Write the frame and the latest other inputs into the ring."""
        frame = turn.frame
        inputs = [InputBytes(0, frame.stamp_ns, frame.age_ms, data), *self.latest.values()]
        try:
            turn.offset, turn.length = self._crew.ring.write(frame.seq, inputs)
        except ValueError as error:
            turn.failure, turn.reason = Outcome.BAD_INPUT, f"the inputs together are too large: {error}"

    def _idle_worker(self, other_than: WorkerProcess | None = None) -> WorkerProcess | None:
        """An idle worker: one that records if there is, else the preferred one, else another."""
        idle = [worker for worker in self._crew.everyone if worker is not other_than and worker.idle]
        return min(idle, key=lambda worker: (not worker.recording, worker is not self._preferred), default=None)

    def other_usable(self, worker: WorkerProcess | None) -> bool:
        """Whether another worker is there, idle or busy."""
        return any(other is not worker and other.available for other in self._crew.everyone)

    def may_have_backup(self, turn: Turn) -> bool:
        """Whether waiting for another worker's result of a frame that failed makes sense; it has one: no more."""
        if turn.failure is Outcome.BAD_INPUT or turn.backup_result is not None or turn.backup_failed:
            return False
        return Fallback.BACKUP in self._crew.config.fallback and self.other_usable(turn.runner)

    def why_late(self, turn: Turn, now_ns: int) -> Verdict:
        """What a frame without a result comes to when its time is up, and why."""
        if turn.failure is not None:
            return turn.failure, turn.reason
        if turn.runner is not None:
            busy_ms = (now_ns - turn.runner.busy_since_ns) / NS_PER_MS
            tier = self._crew.config.tiers[turn.tier]
            reason = f"tier {tier} on worker {turn.runner.number} was not done after {busy_ms:.1f} ms"
            return Outcome.LATE, reason
        if self._crew.ready:
            return Outcome.LATE, f"no worker is free: {self._crew.progress}"
        return Outcome.STARTING, self._crew.progress

    def start(self, turn: Turn, fresh_ms: float, now_ns: int) -> None:
        """Run the turn's frame on an idle worker, if there is one, on the tier that fits the time left.

        Args:
            turn: the current turn.
            fresh_ms: time that a frame has which did not wait; decides the ladder's level.
            now_ns: monotonic time.
        """
        tier = None
        while worker := self._idle_worker():
            tier = self._ladder.choose(turn.left_ms(now_ns), fresh_ms) if tier is None else tier
            if not self._hand_over(worker, turn, tier, now_ns):
                continue  # it has just died and is no longer idle
            backup_ms = self._ladder.predicted_ms(self._ladder.last)
            turn.started(worker, tier, now_ns, self._ladder.predicted_ms(tier), backup_ms)
            self._preferred = worker
            if self._crew.config.backup == "active":
                self.start_backup(turn, now_ns)
            return

    def start_backup(self, turn: Turn, now_ns: int) -> None:
        """Run the turn's frame on another worker as well, on the cheapest tier, if one is idle."""
        worker = self._idle_worker(other_than=turn.runner)
        if worker is not None and self._hand_over(worker, turn, self._ladder.last, now_ns):
            turn.backup = worker
            self._statistics.backups += 1

    def _hand_over(self, worker: WorkerProcess, turn: Turn, tier: int, now_ns: int) -> bool:
        observe = worker not in turn.observed
        turn.observed.add(worker)
        handed = worker.run(
            tier, turn.frame.seq, turn.offset, turn.length, now_ns, observe=observe, leave_ns=turn.leave_ns
        )
        if handed:
            self._running[worker] = turn
        return handed

    def observe(self, turn: Turn, now_ns: int) -> None:
        """Let the workers that do not run this frame advance their histories all the same."""
        if self._crew.description is None or not self._crew.description.observes or not turn.length:
            return
        for worker in self._crew.everyone:
            if worker not in turn.observed:
                turn.observed.add(worker)
                observed = worker.observe(turn.frame.seq, turn.offset, turn.length, now_ns)
                self._statistics.missed_observations += not observed

    def practise(self, turn: Turn, fresh_ms: float, now_ns: int) -> None:
        """After an answer, with no frame waiting: run its frame once more where that helps and costs no deadline.

        A spare worker that has not run for a while rehearses on the cheapest tier: a run that nobody waits for brings
        its code and memory back (the first run of a process can take ten times as long). Else the ladder may want to
        know how long the next tier up takes now.
        """
        first = self._idle_worker()
        if first is None or not turn.length or None in self._running.values():
            return
        spare = self._idle_worker(other_than=first)
        if spare is not None and now_ns - spare.busy_since_ns > _REHEARSE_AFTER_NS:
            tier, worker = self._ladder.last, spare
            self._statistics.rehearsals += 1
        else:
            wanted = self._ladder.probe(fresh_ms, spare is not None)
            if wanted is None:
                return
            tier, worker = wanted, spare or first
            self._statistics.probes += 1
        if worker.run(tier, turn.frame.seq, turn.offset, turn.length, now_ns, observe=False):
            self._running[worker] = None

    def take(self, worker: WorkerProcess, response: Response, payload: bytes, fresh_ms: float, now_ns: int) -> None:
        """Take a response: give it to the turn that it belongs to, and note its times for `learn`."""
        took_ms = (now_ns - worker.busy_since_ns) / NS_PER_MS
        steps = _step_times(response)
        outcome = Outcome(response.outcome)
        turn = self._running.pop(worker)
        rehearsed = turn is None and response.tier == self._ladder.last
        if not math.isnan(steps.inference_ms) and not rehearsed:  # its times are those of a cold start
            self._lessons.append((response.tier, steps.inference_ms, took_ms - steps.inference_ms))
        if turn is None:
            self._ladder.probed(response.tier, took_ms if outcome is Outcome.ON_TIME else math.inf, fresh_ms)
        elif outcome is not Outcome.ON_TIME:
            turn.lost(worker, outcome, payload.decode(errors="replace"))
        elif turn.answered:
            self._statistics.late_results += 1
            self._outputs.remember(payload, turn.frame)
        elif worker is turn.runner:
            turn.result = Result(payload, response.tier, steps)
        else:
            turn.backup_result = Result(payload, response.tier, steps)

    def learn(self) -> None:
        """Let the ladder learn from the responses since the last call; done when the answer is out."""
        for tier, inference_ms, overhead_ms in self._lessons:
            self._ladder.learn(tier, inference_ms, overhead_ms)
        self._lessons.clear()

    def lost(self, worker: WorkerProcess) -> None:
        """A worker is gone, whatever it was doing."""
        turn = self._running.pop(worker, None)
        if turn is not None:
            reason = worker.kill_reason or f"worker {worker.number} (pid {worker.pid}) died"
            turn.lost(worker, Outcome.HUNG if worker.hung else Outcome.CRASHED, reason)


def _step_times(response: Response) -> StepTimes:
    values = (response.decode_ns, response.preprocess_ns, response.inference_ns, response.postprocess_ns)
    return StepTimes(*(value / NS_PER_MS if value >= 0 else math.nan for value in values))
