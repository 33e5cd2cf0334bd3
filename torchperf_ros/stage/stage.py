"""A frame's way through a stage: receive, hand over, wait, choose, check, publish, record.

Two threads meet here, under one lock that is never held while anything is published: the thread that
received a frame hands it to an idle worker itself (waking another thread first would cost more than the
copy), and the stage's own thread waits for results and for the deadline, and publishes. Events only change
the turn; `_decide` alone decides what follows.

A stage with streams is several objects of this class, one for each stream. They share the workers, the lock
and the thread, see `stage_thread.py`; all else is each stream's own.
"""

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.outcome import IN_TIME, Fallback, Outcome
from torchperf_ros.safety.guard import Guard
from torchperf_ros.safety.stop_output import warm_up_stop
from torchperf_ros.settings.config import BASE, StageConfig
from torchperf_ros.stage.alert_rules import change_alert
from torchperf_ros.stage.crew import Crew
from torchperf_ros.stage.fallbacks import FallbackOutputs
from torchperf_ros.stage.figures import StageStatistics
from torchperf_ros.stage.frame import Answer, Frame, Mailbox, admit, stamp_age_ms
from torchperf_ros.stage.hooks import (
    LIVE,
    Check,
    ModelVersion,
    Observer,
    SecondVersion,
    StageMachinery,
    StagePorts,
)
from torchperf_ros.stage.inputs import Inputs
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.stage.limits import TierLimits
from torchperf_ros.stage.practice import HedgeRule, Purpose
from torchperf_ros.stage.right_of_way import NEVER_NS, Arrivals, RightOfWay
from torchperf_ros.stage.scenes import DEFAULT, SceneChooser
from torchperf_ros.stage.stage_guard import GUARD_ODOMETRY, StageGuard
from torchperf_ros.stage.stage_thread import StageThread
from torchperf_ros.stage.turn import Turn, Verdict
from torchperf_ros.stage.waiter import Alarm, PublishMargin, StageWaiter
from torchperf_ros.workers.frame_ring import FrameRing, InputBytes
from torchperf_ros.workers.protocol import Response
from torchperf_ros.workers.worker_pool import WorkerPool
from torchperf_ros.workers.worker_process import WorkerProcess
from torchperf_ros.workers.worker_setup import WorkerSetup

_ANSWER_MARGIN_S = 1.0  # past the deadline, on a machine that is overloaded
_ANSWER_POLL_S = 0.001
_FIRST_WAKE_MS = 2.0
_FIRST_WAKE_SHARE = 0.06  # of the budget
# Outcomes that no run of a stage of lower priority can have brought about.
_SAY_NOTHING = frozenset({Outcome.BAD_INPUT, Outcome.STARTING})
_WAIT_SHARE = 0.05  # of the newest frame, in what a frame of a stream usually waits
_KEPT = "the last worker is kept for other streams: this one's frames end workers, or still run on the other one"
_WITHHELD = "withheld: the emergency lane is latched"


class Stage:
    """One stage, or one stream of it: a mailbox, a turn for one frame, and a version of the model that runs it.

    Attributes:
        thread: its thread, lock and timer; `place` the number of the stream that this is, 0 mostly.
        model: the version that serves.
        shadow: a version beside it, None mostly; it is set with the lock held.
        mailbox: the frame that waits; `turn` has the one that is being answered, None without one.
        checks, observers: called with every output before it is published, and with every answer.
        guard: the check of plans; None where the parameters ask for none.
        lower: stages that give way to this one.
        lock: held by all that changes the turn, never while anything is published.
        arrivals: when its frames come.
        ring: where its frames lie for the workers.
        budget_ms: of the last frame that was begun.
        behind: frames in a row that had no result in time.
        ended_workers: how many have ended at its frames since one came back from one.
    """

    def __init__(
        self,
        config: StageConfig,
        setup: WorkerSetup,
        ports: StagePorts,
        ros_now: Callable[[], int],
        machinery: StageMachinery = LIVE,
        beside: "Stage | None" = None,
    ) -> None:
        """Prepare a stage.

        `setup` is what its workers get at their start, `ros_now` gives ROS time in ns. `beside` is another
        stream of the stage, whose workers and thread this one shares.
        """
        self.ports, self.clock, self.ros_now = ports, machinery.clock, ros_now
        self.thread: StageThread = StageThread(config, machinery) if beside is None else beside.thread
        self.lock = self.thread.lock
        self.place: int = len(self.thread.stages)
        self.waiter: StageWaiter | Alarm = self.thread.add(self)
        self.mailbox = Mailbox()
        self.turn: Turn | None = None
        self.budget_ms = config.budget_ms
        first_wake_ms = min(_FIRST_WAKE_MS, _FIRST_WAKE_SHARE * config.budget_ms)
        self.margin = PublishMargin(first_wake_ms, max(1, len(config.streams)))
        self.fallbacks = FallbackOutputs()
        self.statistics = StageStatistics(config, self.clock)
        self.scenes = SceneChooser(config)
        self._alerts: deque[Alert] = deque()  # for the stage's thread to publish; any thread appends
        self.limits = TierLimits(config, self.tell, ports.log)
        self.actions, self.memory = self.limits.actions, self.limits.memory
        self._inputs, self.arrivals = Inputs(config, machinery.input_clock), Arrivals()
        self.sync = self._inputs.sync
        self.right_of_way: RightOfWay | None = None
        self.lower: list[Stage] = []
        self.shadow: SecondVersion | None = None
        if beside is None:
            setup = replace(setup, loaded=tuple(self.scenes.tiers_to_load()))
            pool = machinery.pool(config.whole_stage, setup, self.thread, ports.log)
            crew = Crew(pool, config, self.thread.waiter)
            self.model = ModelVersion(BASE, config, {}, setup, pool, crew)
        else:
            self.model = replace(beside.model, config=config)
        self.pool.config = self.thread.whole_config()
        self.ring: FrameRing = self.pool.rings[self.place]
        self.guard: StageGuard | None = None
        self.checks: list[Check] = []
        self.observers: list[Observer] = [self._record]
        if self.limits.drift is not None:
            self.observers.append(self.limits.drift.answered)
        if config.guard is not None:
            self.guard = StageGuard(
                config.name,
                Guard(config.guard),
                self.statistics.counters,
                self._alerts.append,
                ros_now,
                self._stop_output,
                self.note_error,
            )
            self.checks += [self.guard.check_output, self.scenes.check_output]
            self.observers.append(self.guard.answered)
        self.behind = 0
        self._usual_wait_ms = 0.0  # of the frames of a stream, for a worker that another one has
        # whether a frame of this stream had no result of a batch, and none has come through since
        self._alone = False
        self.ended_workers = 0
        self._unlogged = ""  # the traceback of an error that happened under the lock
        self._accepting = False

    # -- the receiving thread: a frame comes in

    def slot(self) -> memoryview | None:
        """Where the next trigger's bytes can be put before they are offered.

        None: give them to `offer` as they come.

        The trigger is there, so the worker that will run it wakes up while the middleware copies it. Not among
        streams: while it waits, it would take its processor from the frames of others. For the one thread that
        offers triggers. Behind a frame whose record is written there is a slot, too: what comes late would else
        be copied more often than what comes in time. There is none while a frame waits, in the mailbox or for
        inputs: the slot is its own.
        """
        with self.lock:
            turn, description = self.turn, self.model.pool.description
            has_room = turn is None or turn.length > 0
            if not (self._accepting and has_room and self.mailbox.waiting is None) or description is None:
                return None
            if turn is None and not self.thread.has_streams:
                self.model.crew.expect()
            return self.ring.slot(len(description.inputs))

    def offer(
        self,
        data: bytes | memoryview | None,
        stamp_ns: int,
        *,
        stamped: bool,
        upstream: Frame | None = None,
        refusal: str = "",
    ) -> None:
        """A trigger message: start it if the stage is free, else let it wait in the mailbox.

        Args:
            data: CDR bytes, or the part of `slot` that they take; None where the stage before has nothing
                to hand over.
            stamp_ns: `header.stamp`, 0 if none.
            stamped: whether the message type has a stamp.
            upstream: the frame of the stage before that this is the output of.
            refusal: why the message cannot be used, if that is known already.
        """
        received_ns = self.clock()
        if not self._accepting:
            self.statistics.counters.ignored += 1
            return
        if self.actions.off:
            refusal = refusal or f"the stage is off: {self.actions.words(received_ns)}"
        scene = self.scenes.choose(received_ns)
        if self.scenes.wanted not in self.scenes.ready:
            self._load_wanted_scene()
        frame = admit(
            self.config,
            data,
            stamp_ns,
            received_ns=received_ns,
            ros_now_ns=self.ros_now(),
            upstream=upstream,
            refusal=refusal,
            budget_ms=self.scenes.budget_ms(scene, received_ns, self._least_ms),
        )
        frame.scene = scene
        if self.sync is not None:
            frame.inputs_since_ns = self._inputs.now_ns(received_ns)
        with self.lock:
            frame.seq = self.statistics.counters.frames
            if self.actions.lower_rate and frame.seq & 1 and self.mailbox.waiting is None:
                self.mailbox.superseded += 1  # by the next one
            else:
                self.mailbox.put(frame)
            if self.turn is None:
                self._begin(received_ns)
            # The worker has the frame by now: counting comes after it.
            alert = self.statistics.received(frame, self.mailbox.superseded, stamped=stamped)
            if alert is not None:
                self._alerts.append(alert)

    def _begin(self, now_ns: int) -> None:
        """Give the waiting frame, if there is one, its turn: hand it to an idle worker, and set the timer.

        One that is stale is answered at once; `_next` may have it run afterwards.
        """
        if self.shadow is not None:
            self.shadow.before_turn(now_ns)
        frame = self.mailbox.take(now_ns)
        if frame is None:
            return
        if frame.scene not in self.scenes.ready:  # its tiers may be gone since it was received
            frame.scene = DEFAULT
        self.budget_ms = frame.budget_ms
        ladder = self.model.crew.use(frame.scene, self.place)
        leave_ns = max(now_ns, frame.deadline_ns - round(self.margin.ms * NS_PER_MS))
        wait_ms = (now_ns - frame.received_ns) / NS_PER_MS
        can_back_up = Fallback.BACKUP in self.config.fallback
        self.turn = Turn(frame, wait_ms, leave_ns, ladder, self.place, can_back_up)
        self._go_on(self.turn, now_ns)
        if self.shadow is not None:
            self.shadow.begun()

    def _go_on(self, turn: Turn, now_ns: int) -> None:
        """Hand the frame over as soon as it has its inputs, and set the timer."""
        frame = turn.frame
        try:
            if frame.data is None or frame.refusal:
                # While the stage is off, its inputs are watched: they may be well again.
                if self.actions.off and frame.data is not None:
                    self._write(turn)
                turn.fail(Outcome.BAD_INPUT, frame.refusal)
            elif self.sync is not None and self._awaits_inputs(turn, now_ns):
                return
            else:
                self._write(turn)
            if turn.failure is None and not frame.stale:
                self._start(turn, now_ns)
                self.waiter.set(turn.next_event_ns(now_ns))
            else:
                self.waiter.wake()
        # A boundary of threads, the receiving one's too: the stage answers all the same.
        except Exception as error:
            self.statistics.counters.internal_errors += 1
            self.pool.last_error = self._unlogged = traceback.format_exc()
            if turn.runner is None:
                # The record may be incomplete, so no other worker may run it.
                turn.fail(Outcome.ERROR, f"an error in the node: {type(error).__name__}: {error}")
                turn.backup_failed = True
            self.waiter.wake()

    def _write(self, turn: Turn) -> None:
        self.arrivals.add(turn.frame)
        self._inputs.write(turn, self.ring)

    def _start(self, turn: Turn, now_ns: int) -> None:
        """Run a frame on an idle worker, if there is one, and no stage of higher priority forbids it.

        A stale frame is answered already; its result stands in for the frames after it. It gets the time
        that a fresh one has.
        """
        fresh_ms, way = self.fresh_ms, self.right_of_way
        left_ms = fresh_ms if turn.frame.stale else turn.left_ms(now_ns)
        if way is not None:
            if blocked := self._blocked(now_ns):
                turn.held_ns, turn.held_by = blocked
                return
            turn.held_by = ""
            left_ms = min(left_ms, way.left_ms(now_ns))
        if self.thread.has_streams and not turn.frame.stale:
            if self.model.crew.idle() is None or self.thread.is_too_late(turn, now_ns):
                return
            if self.thread.keeps_last_from(self):
                turn.held_by = _KEPT
                return
            turn.held_by = ""
            if not turn.held_ns and (until_ns := self.thread.gives_way(self, now_ns)):
                turn.held_ns = until_ns
                return
        if self.thread.batches and not turn.frame.stale:
            if self._waits_for_others(turn, now_ns):
                return
            self.thread.start_together(now_ns)
            if turn.runner is not None:
                return
        if self.model.crew.start(turn, left_ms, fresh_ms, now_ns) and self._runs_all:
            self._start_backup(turn, now_ns)

    @property
    def may_batch(self) -> bool:
        """Whether the frame in flight waits for a worker only, and may share one with those of other streams.

        One whose frame failed in a batch runs alone until a frame has come through.
        """
        turn = self.turn
        return (
            turn is not None
            and turn.runner is None
            and turn.failure is None
            and turn.length > 0
            and not (
                turn.frame.stale
                or turn.inputs_until_ns
                or turn.held_by
                or self._alone
                or self.ended_workers
            )
        )

    def _waits_for_others(self, turn: Turn, now_ns: int) -> bool:
        """Whether the frame may still wait for those of other streams; sets when to look again if it does."""
        if not self.config.batch_wait_ms or not self.may_batch or self.thread.all_wait:
            return False
        until_ns = turn.frame.received_ns + round(self.config.batch_wait_ms * NS_PER_MS)
        whole_ms = self.model.crew.whole_batch_ms(self.ladder)
        if until_ns <= now_ns or (turn.leave_ns - until_ns) / NS_PER_MS < whole_ms:
            return False
        turn.held_ns = until_ns
        return True

    @property
    def _runs_all(self) -> bool:
        return self.actions.backup_active or self.model.config.backup == "active"

    def _start_backup(self, turn: Turn, now_ns: int) -> None:
        if self.model.crew.start_backup(turn, now_ns, always=self._runs_all):
            self.statistics.counters.backups += 1

    # -- the stage's thread: results, deadline, answer

    @property
    def has_work(self) -> bool:
        """Whether there is a frame, in flight or waiting, or something to publish; with the lock held."""
        has_frame = self.turn is not None or self.mailbox.waiting is not None
        return has_frame or bool(self._alerts or self._unlogged)

    @property
    def only_waits(self) -> bool:
        """Whether the frame in flight has no answer yet, so that only a worker or time moves it on."""
        turn = self.turn
        return turn is not None and turn.result is None and turn.failure is None

    def look(self) -> Verdict | None:
        """Begin what waits, and find out what follows; the verdict where the frame in flight can be answered.

        With the lock held, on the stage's thread.
        """
        if self.turn is None:  # a frame waits all the same where an error has lost the one before it
            self._begin(self.clock())
        return None if self.turn is None else self._decide(self.turn, self.clock())

    def go_on(self, turn: Turn | None, verdict: Verdict | None) -> None:
        """Without the lock, do what takes a moment: answer a frame with a verdict, publish alerts."""
        if turn is not None and verdict is not None:
            late_ms = -turn.left_ms(self.clock())
            if verdict[0] is not Outcome.ON_TIME and late_ms >= 0:
                # Answers of other streams may have gone out first.
                self.margin.woke(late_ms)
            self._next(turn, self._answer(turn, verdict))
        elif turn is not None and not turn.prepared and (now_ns := self.clock()) >= turn.prepare_ns:
            turn.prepared = True
            ros_leave_ns = self.ros_now() + turn.leave_ns - now_ns
            self.fallbacks.prepare(self.config, self.output_type, turn.leave_ns, ros_leave_ns)
        if self._unlogged:
            text, self._unlogged = self._unlogged, ""
            self.ports.log("error", f"stage {self.config.name} could not hand a frame over:\n{text}")
        while self._alerts:
            self.ports.anomaly(self._alerts.popleft())

    def lose_frame(self) -> None:
        """An error ended what the thread did for this stage: its frame is lost, the stage goes on."""
        with contextlib.suppress(Exception):  # logging may fail as well
            self.note_error("lost a frame")
        with self.lock:
            if self.turn is not None:
                self.turn.answered = True  # what still comes for it is late
            self.turn = None
            self.waiter.wake()  # for the frame that waits

    def take(self, worker: WorkerProcess, response: Response, payload: bytes) -> None:
        """Take what a worker has sent for a frame of this stage; with the lock held."""
        now_ns, was_warm, crew = self.clock(), worker.has_run, self.model.crew
        turn = crew.take(worker, response, payload, self.fresh_ms, now_ns)
        if (way := self.right_of_way) is not None:
            way.ended_ns = now_ns
            if (
                turn is not None
                and was_warm
                and response.inference_ns >= 0
                and response.tier == self.ladder.last
            ):
                way.ran((now_ns - worker.busy_since_ns) / NS_PER_MS, now_ns)
        self.ended_workers = 0
        if turn is not None and response.outcome == Outcome.ON_TIME:
            self._alone = False
            self.scenes.name(response.scene, worker, response.seq)
            if turn.answered:
                self.statistics.counters.late_results += 1
                self.fallbacks.remember(payload, turn.frame, late=True)

    def _decide(self, turn: Turn, now_ns: int) -> Verdict | None:
        """The verdict if the frame can be answered now; otherwise makes sure that a worker has it."""
        crew = self.model.crew
        if turn.inputs_until_ns:
            self._go_on(turn, now_ns)
            return None
        if turn.result is not None:
            return Outcome.ON_TIME, ""
        if turn.failure is not None and (turn.partial is not None or not crew.may_have_backup(turn)):
            return crew.partial(turn, (turn.failure, turn.reason))
        if now_ns >= turn.leave_ns:
            return crew.partial(turn, crew.why_late(turn, now_ns))
        if turn.runner is None:
            self._start(turn, now_ns)
            if turn.runner is None and self._makes_room(turn, now_ns):
                return crew.partial(turn, crew.why_late(turn, now_ns))
        elif crew.wants_backup(turn, now_ns):
            if blocked := self._blocked(now_ns):
                turn.held_ns = blocked[0]
            else:
                self._start_backup(turn, now_ns)
        self.waiter.set(turn.next_event_ns(now_ns))
        return None

    def _makes_room(self, turn: Turn, now_ns: int) -> bool:
        """Whether a stream's frame that must be late is answered now, as a newer one waits for it.

        Else the newer one would begin with what is left of its own time at that deadline, and be late as well.
        """
        waits = self.thread.has_streams and self.mailbox.waiting is not None
        return waits and not turn.frame.stale and self.thread.is_too_late(turn, now_ns)

    def _answer(self, turn: Turn, verdict: Verdict) -> Answer:
        """Publish the best there is, hand it on, and record it. Holds no lock."""
        frame, turn.answered = turn.frame, True
        if not frame.stale:
            # Of a stale frame an anytime model gives all its steps, for the frames after it.
            self.ring.answered(frame.seq)
        started_ns = self.clock()
        output = self.fallbacks.best(
            self.config, self.output_type, turn, verdict, now_ns=started_ns, ros_now=self.ros_now
        )
        for check in self.checks:
            output = check(output, started_ns)
        instead = None if output.payload is None else self.ports.publish(output.payload)
        published_ns = self.clock()
        self.ports.hand_on(output.payload, self.fallbacks.source_of(output, frame))
        self.margin.published((published_ns - started_ns) / NS_PER_MS)
        if output.result is not None and output.payload is output.result.payload:
            self.fallbacks.remember(output.payload, frame)
        if instead is not None:
            output.fallback, output.payload = instead
        answer = turn.answer(output, published_ns, "" if instead is None else _WITHHELD)
        frame.data = None  # it is in the ring; a frame that is remembered need not keep megabytes
        alerts = [observe(turn, answer) for observe in self.observers]
        for alert in alerts:
            if alert is not None:
                self.ports.anomaly(alert)
        return answer

    def _stop_output(self, now_ns: int) -> bytes | None:
        """The stop output, for the guard that has failed; None if there is none."""
        return self.fallbacks.stop(self.config, now_ns, self.ros_now())

    def _record(self, turn: Turn, answer: Answer) -> Alert | None:
        alert = self.statistics.answered(answer)
        self.ports.answered(answer)
        if answer.outcome is Outcome.ERROR:
            self.pool.last_error = answer.reason
        return alert

    def _next(self, answered: Turn, answer: Answer) -> None:
        """Begin the waiting frame if there is one; else there may be time to practise."""
        crew = self.model.crew
        with self.lock:
            now_ns = self.clock()
            runs_late = answered.frame.stale and answered.length and not answered.frame.refusal
            if runs_late and self.mailbox.waiting is None:
                self._start(answered, now_ns)  # for the histories, and the next `hold_last`
            crew.learn(answered, now_ns)
            if self.thread.has_streams:
                begun_ns = answered.begun_ns or answered.leave_ns
                waited_ms = (begun_ns - answered.frame.received_ns) / NS_PER_MS
                self._usual_wait_ms += _WAIT_SHARE * (waited_ms - self._usual_wait_ms)
            self.behind = self.behind + 1 if answer.outcome is Outcome.LATE else 0
            if answered.together and answered.result is None:
                self._alone = True
            self.statistics.counters.batched += answered.together
            self.statistics.counters.missed_observations += crew.unseen
            crew.unseen = 0
            self.turn = None
            self.waiter.set(0)
            self._begin(now_ns)
            if answered.result is not None and self.thread.may_practise:
                self._practise(answered, now_ns)
            if self.shadow is not None:
                self.shadow.answered(answered, answer, now_ns, free=self.turn is None)
        for stage in self.lower:
            stage.look_again(answer)
        self.ring.make_ready()

    def _practise(self, answered: Turn, now_ns: int) -> None:
        """Have an idle worker run the frame once more where that helps and costs no deadline."""
        crew, way, counters = self.model.crew, self.right_of_way, self.statistics.counters
        worker = crew.may_practise(answered)
        if worker is None or self._blocked(now_ns):
            return
        room_ms = 0.0  # which matters to a probe of a tier above only
        if self.ladder.level:
            room_ms = self.thread.room_ms(now_ns, self.ladder.predicted_ms(self.ladder.last))
        purpose = crew.practise(
            worker,
            answered,
            fresh_ms=self.fresh_ms,
            room_ms=room_ms,
            way_ms=float("inf") if way is None else way.left_ms(now_ns),
            now_ns=now_ns,
        )
        counters.rehearsals += purpose is Purpose.REHEARSAL
        counters.probes += purpose is Purpose.PROBE

    def note_error(self, what: str) -> None:
        """Count and log the exception that is being handled: an error of the node, not of a model."""
        self.statistics.counters.internal_errors += 1
        self.pool.last_error = traceback.format_exc()
        self.ports.log("error", f"stage {self.config.name} {what}:\n{self.pool.last_error}")

    def overdue_ms(self, now_ns: int) -> float:
        """For how long the answer of the frame in flight should have left, in ms.

        0: nothing is late; takes no lock.
        """
        turn = self.turn
        return 0.0 if turn is None else max(0.0, (now_ns - turn.leave_ns) / NS_PER_MS)

    # -- other inputs than the trigger

    def offer_latest(self, index: int, data: bytes, stamp_ns: int) -> None:
        """Another input of the adapter: the newest is handed over with the next frame."""
        if len(data) > self.config.max_frame_bytes:
            self.statistics.counters.refused_inputs += 1
            return
        received_ns, age_ms = self.clock(), stamp_age_ms(stamp_ns, self.ros_now())
        message = InputBytes(index, stamp_ns, age_ms, data)
        with self.lock:
            may_wait = self._inputs.take(message, received_ns, self._inputs.now_ns(received_ns))
            if may_wait and self.turn is not None and self.turn.inputs_until_ns:
                self._go_on(self.turn, received_ns)

    def hear(self, index: int, data: bytes, stamp_ns: int = 0) -> None:
        """A message of another input than the adapter's: the guard's, or one that scenes depend on."""
        now_ns = self.clock()
        if index <= GUARD_ODOMETRY:
            if self.guard is not None:
                self.guard.take(index, data, stamp_ns, now_ns)
            return
        try:
            self.scenes.hear(index, data, now_ns)
        except BadInput:
            self.statistics.counters.refused_inputs += 1

    @property
    def inputs(self) -> list[tuple[int, str, str]]:
        """What the stage takes, see `Inputs.wanted`; empty until a worker has described its adapter."""
        description = self.pool.description
        return [] if description is None else self._inputs.wanted(description)

    def _awaits_inputs(self, turn: Turn, now_ns: int) -> bool:
        """Whether the frame waits for synchronised inputs; sets the timer if it does."""
        cheapest_ms = self.ladder.predicted_ms(self.ladder.last)
        until_ns = self._inputs.wait_until_ns(turn, now_ns, self._inputs.now_ns(now_ns), cheapest_ms)
        if until_ns:
            self.waiter.set(turn.leave_ns if self._inputs.has_clock else until_ns)
            return True
        assert self.sync is not None
        while self.sync.news:
            self._alerts.append(self.sync.news.popleft())
        return False

    @property
    def inputs_until_ns(self) -> int:
        """Until when, by the clock of inputs, the frame in flight waits for some.

        0: it does not; takes no lock.
        """
        turn = self.turn
        return 0 if turn is None else turn.inputs_until_ns

    def inputs_are_over(self) -> None:
        """The clock of inputs has moved.

        The frame in flight may have waited long enough; see `StageMachinery`.
        """
        with self.lock:
            if self.turn is not None and self.turn.inputs_until_ns:
                self._go_on(self.turn, self.clock())

    # -- life

    def start(self) -> None:
        """Start the workers and the stage's thread; frames are taken from `activate` on."""
        self.thread.start(self)

    def warm_up(self) -> None:
        """Have memory for the first frame and code for a stop ready, and wake the stage's thread once."""
        warm_up_stop(self.output_type)
        self.ring.make_ready(self.config.max_frame_bytes)
        with self.lock:
            self.waiter.wake()

    def activate(self) -> None:
        self.statistics.activated()
        self.fallbacks.forget(self.clock())
        if self.guard is not None:
            self.guard.guard.forget(self.clock())
        self._accepting = True

    def deactivate(self) -> None:
        """Take no more frames.

        The current one is still answered, a waiting one is counted as superseded.
        """
        with self.lock:
            self._accepting = False
            self.mailbox.put(None)

    def finish(self) -> None:
        """Block until the current frame is answered; give up one second after its deadline.

        Not for the stage's own thread, which answers it.
        """
        turn = self.turn
        if turn is None or not self.thread.is_alive:
            return
        left_s = (turn.frame.deadline_ns - self.clock()) / NS_PER_S
        give_up_at = time.monotonic() + max(left_s, 0.0) + _ANSWER_MARGIN_S
        # Poll: notifying a condition would cost every frame, and this runs once per deactivation.
        while self.turn is turn and time.monotonic() < give_up_at:
            time.sleep(_ANSWER_POLL_S)

    def stop(self) -> None:
        """Answer the current frame; end the thread and kill the workers if no other stream has them."""
        self.deactivate()
        self.finish()
        self.thread.stop(self)

    def reconfigure(self, config: StageConfig) -> None:
        """Take changed parameters (those that may change live); each version keeps what is its own."""
        with self.lock:  # no exchange in between may give one version the other's changes
            own = replace(config, **self.model.changes)
            self.model.config = self.scenes.config = self.actions.config = own
            self.pool.config = self.thread.whole_config()
            if self.shadow is not None:
                self.shadow.reconfigure(config)
        self.statistics.reconfigure(own)

    # -- the version that serves

    @property
    def version(self) -> str:
        """The name of the version that serves; `BASE` is the one of the stage's own parameters."""
        return self.model.name

    @property
    def config(self) -> StageConfig:
        """The parameters of the version that serves; replaced as a whole when one changes."""
        return self.model.config

    @property
    def pool(self) -> WorkerPool:
        return self.model.pool

    @property
    def ladders(self) -> list[TierLadder]:
        """Those that its frames are answered by: one for each scene, or the stream's own."""
        ladders = self.model.crew.ladders
        return [ladders[self.place]] if self.config.stream else ladders

    @property
    def ladder(self) -> TierLadder:
        """The one that its last frame was answered by."""
        return self.model.crew.ladders[self.place] if self.config.stream else self.model.crew.ladder

    @property
    def hedge_rule(self) -> HedgeRule:
        """Whether its standby also runs frames that are overdue."""
        return self.model.crew.practice.hedge_rule

    @property
    def everyone(self) -> list[WorkerProcess]:
        """Its workers and a second version's; streams share theirs, which are the first one's here."""
        if self.place:
            return []
        shadow = self.shadow
        return self.pool.everyone if shadow is None else [*self.pool.everyone, *shadow.pool.everyone]

    @property
    def runs_on_cpu(self) -> bool:
        """Whether the models run on the CPU; False before a worker has described itself."""
        description = self.pool.description
        return description is not None and description.device == "cpu"

    @property
    def output_type(self) -> str:
        """Message type of the output; "" before a worker has described its adapter."""
        return "" if self.pool.description is None else self.pool.description.output

    @property
    def batch_words(self) -> str:
        """How many frames of streams may run together, or why none do."""
        times = self.model.crew.batch_times
        return times.refusal or (
            f"up to {times.most} frames in one run" if times.most > 1 else "each frame alone"
        )

    @property
    def output_stamp_problem(self) -> str:
        """What is wrong with the stamp of the newest output, see `FallbackOutputs`; takes no lock."""
        return self.fallbacks.stamp_problem(self.output_type)

    @property
    def fresh_ms(self) -> float:
        """Time that a frame has which did not wait; among streams, which waited for a worker as is usual."""
        return self.budget_ms - self.margin.ms - self._usual_wait_ms

    def _least_ms(self, scene: int) -> float:
        """What the cheapest tier of a scene takes, with the time to publish: no budget is shorter."""
        return self.ladders[scene].forecasts[-1].ms + self.margin.ms

    # -- a second version

    def serve(self, model: ModelVersion) -> ModelVersion:
        """Have another version answer from the next frame on; returns the one that did.

        Called by `SecondVersion.before_turn`: with the lock held, and no frame in flight. The caller
        becomes the listener of the returned version's pool.
        """
        served, self.model = self.model, model
        model.pool.listener = self.thread
        for each in (served, model):
            each.crew.disown()
        self.scenes.config = self.actions.config = model.config
        self.limits.leave_out(self.ladders)
        self.scenes.look_at(self.pool)
        self.scenes.forget_word()  # the other version's workers name the scene anew
        return served

    def add_alert(self, alert: Alert) -> None:
        """Have the stage's thread publish an alert; with the lock held."""
        self._alerts.append(alert)
        self.waiter.wake()

    # -- stages of other priorities

    def give_way(self, right_of_way: RightOfWay) -> None:
        """Begin nothing that would run while a stage of higher priority has a frame due; before `start`."""
        self.right_of_way = right_of_way

    def look_again(self, answer: Answer | None = None) -> None:
        """A stage of higher priority has answered. On that one's thread, takes no lock."""
        way, outcome = self.right_of_way, None if answer is None else answer.outcome
        if answer is not None and way is not None and outcome not in _SAY_NOTHING:
            beside_a_run = self.model.crew.runs or way.ended_ns >= answer.frame.received_ns
            way.answered(self.clock(), missed=outcome not in IN_TIME, beside_a_run=beside_a_run)
        turn = self.turn
        if turn is not None and turn.held_by and turn.runner is None:
            self.waiter.wake()

    def due_ns(self, now_ns: int) -> int:
        """When this stage has or expects a frame that a worker is to run.

        `NEVER_NS`: none; takes no lock.
        """
        if not self.pool.ready:
            return NEVER_NS
        return now_ns if self.turn is not None else self.arrivals.expected_ns(now_ns)

    def _blocked(self, now_ns: int) -> tuple[int, str] | None:
        """When to look again, and why nothing may begin beside a stage of higher priority; None: it may."""
        way, ladder = self.right_of_way, self.ladder
        return None if way is None else way.blocks(now_ns, ladder.predicted_ms(ladder.last))

    # -- situation and limits

    def _load_wanted_scene(self) -> None:
        if text := self.scenes.load_wanted(self.pool):
            self.ports.log("warn", f"{self.config.name}: {text}")
            self._alerts.append(change_alert(self.config.name, "model", text))

    def limit_memory(self, used_share: float, suspect: str = "") -> None:
        """Take a sample of the memory in use, see `TierLimits`.

        While it is short, nothing is compiled either.
        """
        self.limits.sample_memory(self.ladders, used_share, suspect)
        shadow = self.shadow
        for pool in (self.pool,) if shadow is None else (self.pool, shadow.pool):
            pool.rolling_update.may_compile = not self.memory.tight

    def act(self, now_ns: int) -> None:
        """Once a second: do what follows from the alerts that were reported to `actions`."""
        self.limits.act(self.ladders, now_ns, self.fresh_ms)
        self.scenes.force(self.actions.scene)

    def tell(self, alert: Alert) -> None:
        """Have the stage's thread publish an alert; takes the lock."""
        with self.lock:
            self.add_alert(alert)
