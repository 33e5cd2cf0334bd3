"""Who runs what: writes frames into the ring, hands them to workers, and takes their responses."""

import math
from collections import deque
from collections.abc import Sequence

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from torchperf_ros.api.outcome import IN_TIME, Fallback, Outcome
from torchperf_ros.stage.fallback_outputs import FallbackOutputs
from torchperf_ros.stage.frame import Answer, Frame, StepTimes, stamp_age_ms
from torchperf_ros.stage.frame_in_flight import FrameInFlight, Result, Verdict
from torchperf_ros.stage.right_of_way import RightOfWay, expected_ns
from torchperf_ros.stage.stage_figures import StageCounters
from torchperf_ros.stage.tier_ladder import TierLadder
from torchperf_ros.stage.waiting import HedgeRule
from torchperf_ros.workers.frame_ring import InputBytes
from torchperf_ros.workers.protocol import Response
from torchperf_ros.workers.worker_pool import WorkerPool
from torchperf_ros.workers.worker_process import WorkerProcess

_REHEARSE_AFTER_NS = 5 * NS_PER_S
_LONGEST_PROBE = 0.5  # of what a worker is killed for
_MUCH = 0.5  # of a budget, gone before the frame came: that explains more than what the run took
_INTERVALS = 8  # the shortest of so many says when the next frame may come


def aged(item: InputBytes, received_ns: int, frame: Frame) -> InputBytes:
    """Another input than the trigger as it goes into the frame's record, with its age at the frame's receipt.

    The age is ROS time, which may run faster than the monotonic clock; the latter stands in for it where
    the frame's stamp does not tell it.

    Args:
        item: the newest message, with its age at its own receipt; it ages also when no newer one comes.
        received_ns: that receipt, monotonic.
        frame: the frame.
    """
    waited_ns, ros_ns = frame.received_ns - received_ns, frame.ros_ns(frame.received_ns)
    age_ms = item.age_ms + waited_ns / NS_PER_MS if ros_ns is None else stamp_age_ms(item.stamp_ns, ros_ns)
    return InputBytes(item.index, item.stamp_ns, age_ms, item.data, max(waited_ns, 0) // NS_PER_US)


class Dispatcher:
    """The stage's view of its workers; every call holds the stage's lock.

    The worker that ran last is preferred (its caches are warm); while it is busy the other takes over and
    becomes the preferred one, so that a first worker that comes back becomes the standby.

    Attributes:
        latest: the newest message of each other input than the trigger, and its monotonic receipt.
        ladder: the one of the scene that the last frame was answered for.
        right_of_way: of stages with a higher priority; None where there is none.
    """

    def __init__(
        self,
        pool: WorkerPool,
        ladders: Sequence[TierLadder],
        outputs: FallbackOutputs,
        statistics: StageCounters,
    ) -> None:
        """Take the stage's parts; there is a ladder for each scene."""
        self.latest: dict[int, tuple[InputBytes, int]] = {}
        self.hedge_rule = HedgeRule()  # whether the standby also runs frames that are overdue
        self.right_of_way: RightOfWay | None = None
        self._pool, self._ladders, self._outputs, self._statistics = pool, ladders, outputs, statistics
        self.ladder = ladders[0]
        # whether the second worker runs every frame for now, whatever `backup` says
        self.backup_active = False
        self._preferred: WorkerProcess | None = None
        self._running: dict[WorkerProcess, FrameInFlight | None] = {}  # whose frame it runs, None: practice
        self._probe: int | None = None  # tier that the practice is to try; None: a rehearsal
        self._lessons: list[tuple[int, float, float]] = []
        self._started = 0  # frames
        self._to_retry: FrameInFlight | None = None
        self._retrying: WorkerProcess | None = None
        self._intervals_ns: deque[int] = deque(maxlen=_INTERVALS)
        self._last_received_ns = 0
        self._comes_by_itself = False  # rather than from the stage before

    def take_over(self, other: "Dispatcher") -> None:
        """Dispatch the stage's frames from now on, and let `other` have what this one had.

        Its workers' frames.
        """
        self._outputs, other._outputs = other._outputs, self._outputs
        self._statistics, other._statistics = other._statistics, self._statistics
        self.right_of_way, self.backup_active = other.right_of_way, other.backup_active
        self.latest, other.latest = other.latest, self.latest
        self._intervals_ns, other._intervals_ns = other._intervals_ns, self._intervals_ns
        self._last_received_ns, self._comes_by_itself = other._last_received_ns, other._comes_by_itself
        for each in (self, other):  # what still runs is nobody's answer
            each._running = dict.fromkeys(each._running)
            each._probe = each._to_retry = each._retrying = None

    def shadow(self, answered: FrameInFlight, now_ns: int, *, runs: bool) -> FrameInFlight | None:
        """Run a frame once more that another dispatcher's workers answered; None if none of these does.

        Those that do not run it observe it; one that ended its runner is a gap in their histories.
        """
        frame, place = answered.frame, (answered.offset, answered.length)
        mine = FrameInFlight(
            frame, 0.0, 0, offset=place[0], length=place[1], number=self._started
        )  # without an end
        self._started += 1
        if answered.suspect:
            return None
        self.use(frame.scene)
        if runs and (worker := self._idle_worker()) is not None:
            tier = answered.tier if answered.tier >= 0 else self.ladder.last
            if self._hand_over(worker, mine, tier, now_ns):
                mine.runner, mine.tier = worker, tier
                return mine
        self._observe(mine, now_ns)
        return None

    def use(self, scene: int) -> None:
        """Run frames on the tiers of a scene from now on."""
        if self._ladders[scene] is not self.ladder:
            self._ladders[scene].take_over(self.ladder)
            self.ladder = self._ladders[scene]

    def write(self, in_flight: FrameInFlight, data: bytes | memoryview) -> None:
        """Write the frame and the latest other inputs into the ring."""
        frame = in_flight.frame
        if self._last_received_ns:
            self._intervals_ns.append(frame.received_ns - self._last_received_ns)
        self._last_received_ns = frame.received_ns
        self._comes_by_itself = frame.origin.received_ns == frame.received_ns
        inputs = [InputBytes(0, frame.stamp_ns, frame.age_ms, data)]
        inputs += [aged(item, received_ns, frame) for item, received_ns in self.latest.values()]
        try:
            in_flight.offset, in_flight.length = self._pool.ring.write(frame.seq, inputs)
        except ValueError as error:
            in_flight.fail(Outcome.BAD_INPUT, f"the inputs together are too large: {error}")
        else:
            in_flight.number, self._started = self._started, self._started + 1

    def partial(self, in_flight: FrameInFlight, verdict: Verdict) -> Verdict:
        """The verdict on a frame without a whole result, or if there is one, on the newest step of an anytime model.

        The runner's comes before the backup's, and before whatever else could stand in: it becomes the
        frame's result.
        """
        for worker in (in_flight.runner, in_flight.backup):
            if worker is not None and self._running.get(worker) is in_flight:
                self._note_partial(worker, in_flight)
        if in_flight.partial is None:
            return verdict
        in_flight.result = in_flight.partial
        tier, step = self._pool.config.tiers[in_flight.result.tier], in_flight.result.step
        return Outcome.PARTIAL, f"step {step} of tier {tier} was published: {verdict[1]}"

    def _note_partial(self, worker: WorkerProcess, in_flight: FrameInFlight) -> None:
        """Take what a worker has of the frame so far, while its memory is there."""
        if in_flight.answered or (in_flight.partial is not None and worker is not in_flight.runner):
            return
        if (found := worker.partial(in_flight.frame.seq)) is not None:
            response, payload = found
            in_flight.shapes = response.shapes
            in_flight.partial = Result(payload, response.tier, _step_times(response), response.step)

    def _idle_worker(self, other_than: WorkerProcess | None = None) -> WorkerProcess | None:
        """An idle worker: one that records if there is, else the preferred one, else another."""
        idle = [worker for worker in self._pool.everyone if worker is not other_than and worker.idle]
        return min(
            idle, key=lambda worker: (not worker.recording, worker is not self._preferred), default=None
        )

    def expect(self) -> None:
        """A frame is about to come: wake the worker that is to run it."""
        if worker := self._idle_worker():
            worker.expect()

    def expected_ns(self, now_ns: int) -> int:
        """When the next frame is expected, `NEVER_NS` if none is.

        What the stage before causes is not foreseen.
        """
        period_ns = min(self._intervals_ns, default=0) if self._comes_by_itself else 0
        return expected_ns(self._last_received_ns, period_ns, now_ns)

    def higher_answered(self, answer: Answer, now_ns: int) -> None:
        """A stage of higher priority has answered a frame.

        Whether a run of this stage has cost it the deadline.
        """
        way, outcome = self.right_of_way, answer.outcome
        if way is None or outcome in {Outcome.BAD_INPUT, Outcome.STARTING}:
            return
        beside_a_run = bool(self._running) or way.ended_ns >= answer.frame.received_ns
        way.answered(now_ns, missed=outcome not in IN_TIME, beside_a_run=beside_a_run)

    def _note_run(self, tier: int, took_ms: float, now_ns: int) -> None:
        if self.right_of_way is not None and tier == self.ladder.last:
            self.right_of_way.ran(took_ms, now_ns)

    def _blocked(self, now_ns: int) -> tuple[int, str] | None:
        """When to look again, and for which stage of higher priority nothing may begin now.

        None: it may.
        """
        if self.right_of_way is None:
            return None
        return self.right_of_way.blocks(now_ns, self.ladder.predicted_ms(self.ladder.last))

    def may_have_backup(self, in_flight: FrameInFlight) -> bool:
        """Whether waiting for another worker's result of a frame that failed makes sense.

        It has one: no more.
        """
        if (
            in_flight.failure is Outcome.BAD_INPUT
            or in_flight.backup_result is not None
            or in_flight.backup_failed
        ):
            return False
        if Fallback.BACKUP not in self._pool.config.fallback or (
            in_flight.suspect and in_flight.backup is None
        ):
            return False
        return any(other is not in_flight.runner and other.available for other in self._pool.everyone)

    def why_late(self, in_flight: FrameInFlight, now_ns: int) -> Verdict:
        """What a frame without a result comes to when its time is up, and why."""
        if in_flight.failure is not None:
            return in_flight.failure, in_flight.reason
        if in_flight.frame.stale and self._pool.ready:
            return Outcome.LATE, f"stale: {in_flight.frame.gone_words(in_flight.wait_ms)}"
        if in_flight.runner is None and in_flight.held_by:
            return Outcome.LATE, in_flight.held_by
        if in_flight.runner is not None:
            busy_ms = (now_ns - in_flight.runner.busy_since_ns) / NS_PER_MS
            tier = self._pool.config.tiers[in_flight.tier]
            reason = f"tier {tier} on worker {in_flight.runner.number} was not done after {busy_ms:.1f} ms"
            if in_flight.frame.gone_ms > _MUCH * in_flight.frame.budget_ms:
                reason += f"; {in_flight.frame.gone_words(in_flight.wait_ms)}"
            return Outcome.LATE, reason
        if self._pool.ready:
            return Outcome.LATE, f"no worker is free: {self._pool.progress}"
        return Outcome.STARTING, self._pool.progress

    def start(self, in_flight: FrameInFlight, fresh_ms: float, now_ns: int) -> None:
        """Run the frame in flight on an idle worker, if there is one, on the tier that fits the time left.

        `fresh_ms`: the time that a frame has which did not wait; it decides the ladder's level, and it is
        what a stale frame gets: that one is answered already, and its result stands in for the frames after
        it.
        """
        tier, left_ms = None, fresh_ms if in_flight.frame.stale else in_flight.left_ms(now_ns)
        if blocked := self._blocked(now_ns):
            in_flight.held_ns, in_flight.held_by = blocked
            return
        if self.right_of_way is not None:
            in_flight.held_by = ""
            left_ms = min(left_ms, (self.right_of_way.due(now_ns)[0] - now_ns) / NS_PER_MS)
        while worker := self._idle_worker():
            tier = self.ladder.choose(left_ms, fresh_ms, now_ns) if tier is None else tier
            if not self._hand_over(worker, in_flight, tier, now_ns):
                continue  # it has just died and is no longer idle
            backup_ms = self.ladder.predicted_ms(self.ladder.last)
            in_flight.started(worker, tier, now_ns, self.ladder.predicted_ms(tier), backup_ms)
            self._preferred = worker
            if self._runs_all:
                self._start_backup(in_flight, now_ns)
            return

    @property
    def _runs_all(self) -> bool:
        """Whether the backup runs every frame."""
        return self.backup_active or self._pool.config.backup == "active"

    def start_wanted_backup(self, in_flight: FrameInFlight, now_ns: int) -> None:
        """Run the frame on another worker as well if the runner failed, or is nearly out of time."""
        is_configured = Fallback.BACKUP in self._pool.config.fallback
        if is_configured and in_flight.wants_backup(now_ns, hedges=self.hedge_rule.allowed):
            if blocked := self._blocked(now_ns):
                in_flight.held_ns = blocked[0]
            else:
                self._start_backup(in_flight, now_ns)

    def _start_backup(self, in_flight: FrameInFlight, now_ns: int) -> None:
        """Run the frame in flight on another worker as well, on the cheapest tier, if one is idle."""
        hedged = in_flight.failure is None and not self._runs_all
        if hedged and in_flight.runner is not None and in_flight.runner.is_ending:
            in_flight.hedge_ns = 0  # it is no overdue frame, but one that has ended its runner
            return
        worker = self._idle_worker(other_than=in_flight.runner)
        if worker is not None and self._hand_over(worker, in_flight, self.ladder.last, now_ns):
            in_flight.backup, in_flight.hedged = worker, hedged
            self._statistics.backups += 1

    def _hand_over(self, worker: WorkerProcess, in_flight: FrameInFlight, tier: int, now_ns: int) -> bool:
        observe = worker.observed is None or worker.observed < in_flight.number
        handed = worker.run(
            tier,
            in_flight.frame.seq,
            in_flight.offset,
            in_flight.length,
            now_ns,
            observe=observe,
            leave_ns=in_flight.leave_ns,
            missed=_missed(worker, in_flight),
        )
        if handed:
            self._running[worker] = in_flight
            worker.observed = in_flight.number
        return handed

    def _observe(self, in_flight: FrameInFlight, now_ns: int, *, one: bool = False) -> None:
        """Let the workers that did not run this frame advance their histories all the same, or only one of them.

        A worker that has seen a later frame already keeps the gap: histories go forward only.
        """
        if self._pool.description is None or not self._pool.description.observes or not in_flight.length:
            return
        behind = [
            each
            for each in self._pool.everyone
            if each.observed is None or each.observed < in_flight.number
        ]
        for worker in behind[:1] if one else behind:
            missed = _missed(worker, in_flight)
            if worker.observe(
                in_flight.frame.seq, in_flight.offset, in_flight.length, now_ns, missed=missed
            ):
                worker.observed = in_flight.number
            else:
                self._statistics.missed_observations += 1

    def practise(self, in_flight: FrameInFlight, fresh_ms: float, now_ns: int) -> None:
        """After an answer, with no frame waiting.

        Run its frame once more where that helps and costs no deadline.

        A spare worker that has not run for a while rehearses on the cheapest tier: a run that nobody waits
        for brings its code and memory back (the first run of a process can take ten times as long). Else a
        frame that was late may be run again, to find out whose fault that was. Else the ladder may want to
        know how long the next tier up takes now.
        """
        first = self._idle_worker()
        if first is None or not in_flight.length or None in self._running.values():
            return
        if self._blocked(now_ns):
            return
        way = self.right_of_way
        spare = self._idle_worker(other_than=first)
        if spare is not None and now_ns - spare.busy_since_ns > _REHEARSE_AFTER_NS:
            tier, worker, self._probe = self.ladder.last, spare, None
            self._statistics.rehearsals += 1
        elif spare is not None and spare.has_run and self._to_retry is not None:
            in_flight, self._to_retry = self._to_retry, None
            tier, worker, self._probe, self._retrying = self.ladder.last, spare, None, spare
        else:
            next_ns = self._last_received_ns + min(self._intervals_ns, default=0)
            room_ms = math.inf if spare is not None else max(0.0, (next_ns - now_ns) / NS_PER_MS)
            room_ms = room_ms if way is None else min(room_ms, (way.due(now_ns)[0] - now_ns) / NS_PER_MS)
            wanted = self.ladder.probe(
                fresh_ms, now_ns, room_ms, _LONGEST_PROBE * self._pool.config.hang_ms
            )
            if wanted is None:
                return
            tier, worker, self._probe = wanted, spare or first, wanted
            self._statistics.probes += 1
        if worker.run(tier, in_flight.frame.seq, in_flight.offset, in_flight.length, now_ns, observe=False):
            self._running[worker] = None
        else:
            self._retrying = None

    def practises(self, worker: WorkerProcess) -> bool:
        """Whether it runs what is nobody's answer: a frame that was answered before, once more."""
        return self._running.get(worker) is None

    def _ended(self, worker: WorkerProcess, now_ns: int) -> FrameInFlight | None:
        """A worker's run is over: whose frame it was."""
        if self.right_of_way is not None:
            self.right_of_way.ended_ns = now_ns
        return self._running.pop(worker)

    def take(
        self, worker: WorkerProcess, response: Response, payload: bytes, fresh_ms: float, now_ns: int
    ) -> None:
        """Take a response: give it to the frame that it belongs to, and note its times for `learn`."""
        took_ms = (now_ns - worker.busy_since_ns) / NS_PER_MS
        steps, outcome = _step_times(response), Outcome(response.outcome)
        in_flight = self._ended(worker, now_ns)
        if in_flight is not None and worker is in_flight.runner:
            in_flight.survived, in_flight.shapes = True, response.shapes
            if in_flight.answered:
                self._observe(in_flight, now_ns)
        if in_flight is not None and worker.has_run and not math.isnan(steps.inference_ms):
            known_ms = steps.inference_ms  # one that was stopped takes longer than there was time
            inference_ms = max(known_ms, fresh_ms) if outcome is Outcome.PARTIAL else known_ms
            self._lessons.append((response.tier, inference_ms, took_ms - known_ms))
            self._note_run(response.tier, took_ms, now_ns)
        worker.has_run = True  # what came before was a cold run
        if worker is self._retrying:
            self._retrying = None
            if outcome is Outcome.ON_TIME:  # else it was overwritten meanwhile, or has another fault
                self.hedge_rule.retried(in_time=took_ms <= fresh_ms)
        elif in_flight is None:
            if self._probe is not None:
                good = outcome is Outcome.ON_TIME and response.tier == self._probe
                self.ladder.probed(self._probe, steps.inference_ms, took_ms if good else math.inf, fresh_ms)
        elif outcome is not Outcome.ON_TIME:
            self._failed(worker, in_flight, outcome, payload.decode(errors="replace"))
        elif in_flight.answered:
            self._statistics.late_results += 1
            self._outputs.remember(payload, in_flight.frame, late=True)
            alone = worker is in_flight.runner and in_flight.backup is None
            if alone and not in_flight.frame.stale and self.hedge_rule.wants_retrial():
                self._to_retry = in_flight
        elif worker is in_flight.runner:
            in_flight.result = Result(payload, response.tier, steps, response.step)
        else:
            in_flight.backup_result = Result(payload, response.tier, steps, response.step)

    def learn(self, answered: FrameInFlight, now_ns: int) -> None:
        """Learn from a frame, and let the other workers see it; done when its answer is out."""
        if answered.hedged and answered.result is None:
            self.hedge_rule.hedged(in_time=answered.backup_result is not None)
        is_nobodys = answered.runner is None and not answered.frame.refusal
        if answered.survived or is_nobodys:  # nobody had time to run it: one of them is to see it
            self._observe(answered, now_ns, one=is_nobodys)
        for tier, inference_ms, overhead_ms in self._lessons:
            self.ladder.learn(tier, inference_ms, overhead_ms)
        self._lessons.clear()

    def lost(self, worker: WorkerProcess) -> None:
        """A worker is gone, whatever it was doing."""
        practised = worker in self._running
        in_flight = self._running.pop(worker, None)
        if worker is self._retrying:
            self._retrying = None
            self.hedge_rule.retried(in_time=False)
        elif practised and in_flight is None and self._probe is not None:
            self.ladder.probed(self._probe, math.nan, math.inf, 0.0)
        if in_flight is not None:
            reason = worker.kill_reason or f"worker {worker.number} (pid {worker.pid}) died"
            self._failed(worker, in_flight, Outcome.HUNG if worker.hung else Outcome.CRASHED, reason)

    def _failed(
        self, worker: WorkerProcess, in_flight: FrameInFlight, outcome: Outcome, reason: str
    ) -> None:
        """A worker gave no whole result; `PARTIAL`: the frame was answered, so it was told to stop."""
        if outcome is not Outcome.PARTIAL:
            self._note_partial(worker, in_flight)
            in_flight.lost(worker, outcome, reason)


def _missed(worker: WorkerProcess, in_flight: FrameInFlight) -> int:
    """Started frames that the worker has not been told of since the last one that it was.

    A new one misses none.
    """
    return 0 if worker.observed is None else max(0, in_flight.number - worker.observed - 1)


def _step_times(response: Response) -> StepTimes:
    values = (response.decode_ns, response.preprocess_ns, response.inference_ns, response.postprocess_ns)
    return StepTimes(*(value / NS_PER_MS if value >= 0 else math.nan for value in values))
