"""The frame's way through a stage: take the newest, hand it over, wait until the deadline, choose, publish, record.

Two threads meet here, under one lock that is never held while anything is published: the thread that received a frame
hands it to an idle worker itself (waking another thread first would cost more than the copy), and the stage's own
thread waits for results and for the deadline, and publishes. Events only change the turn; `_decide` alone says what
follows.
"""

import select
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchperf_ros.core.anomaly_rules import Anomaly, AnomalyRules
from torchperf_ros.core.clock import NS_PER_MS
from torchperf_ros.core.config import StageConfig
from torchperf_ros.core.errors import ProtocolError
from torchperf_ros.core.frame import Answer, Frame, Origin, StepTimes, stamp_age_ms, usable_age_ms
from torchperf_ros.core.health import HealthLimits, HealthTracker
from torchperf_ros.core.mailbox import Mailbox
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.core.reserve import Reserve
from torchperf_ros.core.stage_statistics import StageStatistics
from torchperf_ros.core.tier_ladder import TierLadder
from torchperf_ros.supervise.crew import Crew
from torchperf_ros.supervise.dispatcher import Dispatcher
from torchperf_ros.supervise.fallback_outputs import FallbackOutputs
from torchperf_ros.supervise.frame_ring import InputBytes
from torchperf_ros.supervise.stage_ports import StagePorts
from torchperf_ros.supervise.timer_fd import TimerFd
from torchperf_ros.supervise.turn import Result, Turn
from torchperf_ros.supervise.worker_process import WorkerProcess

_HEDGE_MARGIN_MS = 1.0
_PREPARE_MS = 4.0
_AT_ONCE = 1
_WOKE_LATE = "its own result, but the node woke up after the deadline"
_FINAL = frozenset({Outcome.BAD_INPUT})  # another worker would say the same


@dataclass(slots=True)
class _Decision:
    """How to answer the current frame."""

    outcome: Outcome
    result: Result | None = None
    reason: str = ""


class StageActor:
    """One stage: a mailbox, the turn of one frame, a crew of workers, a ladder of tiers and its fallbacks.

    Attributes:
        config: parameters; replaced as a whole when one changes.
        statistics, ladder, reserve, mailbox, health, crew: the stage's parts, for `/diagnostics`.
    """

    def __init__(self, config: StageConfig, setup: dict[str, Any], ports: StagePorts, ros_now: Callable[[], int]) -> None:
        """Prepare a stage; `setup` is what its workers are told at start, `ros_now` gives ROS time in ns."""
        self.config = config
        self.statistics = StageStatistics()
        self.ladder = TierLadder(len(config.tiers))
        self.reserve = Reserve()
        self.mailbox = Mailbox()
        self.health = HealthTracker(HealthLimits(), time.monotonic_ns())
        self.crew = Crew(config, setup, self, ports.log)
        self.reconfigure(config)
        self._ports = ports
        self._ros_now = ros_now
        self._rules = AnomalyRules(config.name)
        self._outputs = FallbackOutputs()
        self._dispatcher = Dispatcher(self.crew, self.ladder, self._outputs, self.statistics)
        self._lock = threading.Lock()
        self._turn: Turn | None = None
        self._accepting = False
        self._open = True
        self._leave_ns = 0
        self._deaths: list[Anomaly] = []
        self._poll = select.epoll()
        self._by_fd: dict[int, WorkerProcess] = {}
        self._timer = TimerFd()
        self._poll.register(self._timer.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"stage-{config.name}", daemon=True)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and the stage's thread; frames are taken from `activate` on."""
        self.crew.start()
        self._thread.start()

    def activate(self) -> None:
        """Take frames from now on."""
        self._accepting = True

    def deactivate(self) -> None:
        """Take no more frames; the current one is still answered, a waiting one is counted as superseded."""
        with self._lock:
            self._accepting = False
            self.mailbox.clear()

    def stop(self) -> None:
        """End the thread and kill the workers."""
        self._accepting = False
        self._open = False
        with self._lock:
            self._timer.set(_AT_ONCE)
        if self._thread.is_alive():
            self._thread.join()
        self.crew.stop()
        self._poll.close()
        self._timer.close()

    def reconfigure(self, config: StageConfig) -> None:
        """Take changed parameters (those that may change live)."""
        self.config = self.crew.config = config
        self.health.limits = HealthLimits(config.input_timeout_ms, config.sustained_misses, config.recover_frames)

    # -- the receiving thread: a frame comes in -----------------------------------------------------------------------

    def offer(self, data: bytes | None, stamp_ns: int, *, stamped: bool, upstream: Frame | None = None, refusal: str = "") -> None:
        """A trigger message: start it if the stage is free, else let it wait in the mailbox.

        Args:
            data: CDR bytes; None where the stage before has nothing to hand over.
            stamp_ns: `header.stamp`, 0 if none.
            stamped: whether the message type has a stamp.
            upstream: the frame of the stage before that this is the output of; the budget then counts from when
                this frame was due, its deadline there, at the latest, so that end to end no more than the sum is taken.
            refusal: why the message cannot be used, if that is known already.
        """
        received_ns = time.monotonic_ns()
        if not self._accepting:
            self.statistics.ignored += 1
            return
        age_ms = stamp_age_ms(stamp_ns, self._ros_now())
        config = self.config
        due_ns = received_ns if upstream is None else min(received_ns, upstream.deadline_ns)
        budget_ms = config.budget_ms - (usable_age_ms(age_ms) if config.budget_from == "stamp" else 0.0)
        if data is not None and len(data) > config.max_frame_bytes:
            refusal = f"message of {len(data)} bytes; max_frame_bytes is {config.max_frame_bytes}"
        origin = Origin(received_ns, age_ms) if upstream is None else upstream.origin
        with self._lock:
            self.statistics.received(stamp_ns, age_ms, stamped=stamped)
            self.health.input_at(received_ns)
            deadline_ns = due_ns + round(budget_ms * NS_PER_MS)
            seq = self.statistics.frames - 1
            frame = Frame(seq, data, stamp_ns, age_ms, received_ns, deadline_ns, origin, refusal)
            self.mailbox.put(frame)
            if self._turn is None:
                self._begin(received_ns)

    def offer_latest(self, index: int, data: bytes, stamp_ns: int) -> None:
        """Another input than the trigger: the newest is handed over with the next frame."""
        if len(data) > self.config.max_frame_bytes:
            self.statistics.refused_inputs += 1
            return
        received = InputBytes(index, stamp_ns, stamp_age_ms(stamp_ns, self._ros_now()), data)
        with self._lock:
            self._dispatcher.latest[index] = received

    def _begin(self, now_ns: int) -> None:
        """Give the waiting frame its turn: hand it to an idle worker, and set the timer."""
        stale = self.mailbox.stale
        frame = self.mailbox.take(now_ns)
        if frame is None:
            if self.mailbox.stale > stale:
                self.health.answered(Outcome.LATE, Fallback.NONE, 0)
            return
        turn = self._turn = self._dispatcher.begin(frame, now_ns)
        self._leave_ns = frame.deadline_ns - round(self.reserve.ms * NS_PER_MS)
        if not turn.length:
            self._timer.set(_AT_ONCE)
            return
        self._dispatcher.start(turn, self._left_ms(now_ns), self._fresh_ms, now_ns)
        self._dispatcher.observe(turn)
        self._timer.set(self._next_event_ns(now_ns))

    # -- the stage's thread: results, deadline, answer ----------------------------------------------------------------

    def _run(self) -> None:
        while self._open:
            try:
                self._step(self._poll.poll())
            except Exception:  # noqa: PERF203 - the thread's boundary: the frame is lost, the stage goes on
                self.statistics.internal_errors += 1
                self.crew.last_error = traceback.format_exc()
                self._ports.log("error", f"stage {self.config.name} lost a frame:\n{self.crew.last_error}")
                with self._lock:
                    self._turn = None

    def _step(self, events: list[tuple[int, int]]) -> None:
        with self._lock:
            for descriptor, _ in events:
                if descriptor == self._timer.fileno():
                    self._timer.clear()
                else:
                    self._receive(descriptor)
            turn = self._turn
            decision = None if turn is None else self._decide(turn, time.monotonic_ns())
            deaths, self._deaths = self._deaths, []
        for anomaly in deaths:
            self._ports.anomaly(anomaly)
        if turn is not None and decision is not None:
            self._answer(turn, decision)
            self._next(turn)

    def _receive(self, descriptor: int) -> None:
        worker = self._by_fd.get(descriptor)
        if worker is None:
            return
        try:
            received = worker.receive()
        except EOFError:
            self._drop(worker)
        except ProtocolError as error:
            worker.kill(str(error))
            self._drop(worker)
        else:
            if received is not None:
                self._dispatcher.take(worker, *received, self._turn, self._fresh_ms)

    def _drop(self, worker: WorkerProcess) -> None:
        """Have nothing more to do with a worker that is gone."""
        if self._by_fd.pop(worker.frames.fileno(), None) is None:
            return
        self._poll.unregister(worker.frames.fileno())
        worker.usable = False
        self._dispatcher.lost(worker, self._turn)
        if not self.crew.ready:
            self.health.lost()

    def _decide(self, turn: Turn, now_ns: int) -> _Decision | None:
        """What to do about the current frame: answer it, or see to it that someone works on it and wait."""
        if not turn.length:
            return _Decision(Outcome.BAD_INPUT, reason=turn.frame.refusal or "nothing was handed over")
        if turn.result is not None:
            late = now_ns > turn.frame.deadline_ns
            return _Decision(Outcome.LATE if late else Outcome.ON_TIME, turn.result, _WOKE_LATE if late else "")
        if turn.failure is not None:
            if turn.backup_result is not None or turn.failure in _FINAL:
                return _Decision(turn.failure, turn.backup_result, turn.reason)
            if turn.backup_failed or (turn.backup is None and not self._dispatcher.start_backup(turn, now_ns)):
                return _Decision(turn.failure, None, turn.reason)
        if now_ns >= self._leave_ns:
            self.reserve.woke((now_ns - self._leave_ns) / NS_PER_MS)
            outcome, reason = self._why_late(turn, now_ns)
            return _Decision(outcome, turn.backup_result, reason)
        if turn.runner is None:
            self._dispatcher.start(turn, self._left_ms(now_ns), self._fresh_ms, now_ns)
        elif turn.backup is None and turn.failure is None and now_ns >= self._hedge_ns:
            self.statistics.hedges += self._dispatcher.start_backup(turn, now_ns)
        if now_ns >= self._prepare_ns:
            self._outputs.prepare(self.config, self._output_type, self._leave_ns, self._ros_now() + self._leave_ns - now_ns)
        self._timer.set(self._next_event_ns(now_ns))
        return None

    def _why_late(self, turn: Turn, now_ns: int) -> tuple[Outcome, str]:
        if turn.failure is not None:
            return turn.failure, turn.reason
        if not self._dispatcher.any_usable:
            return Outcome.STARTING, self.crew.progress
        if turn.runner is None:
            return Outcome.LATE, "every worker is busy with an earlier frame"
        tier = self.config.tiers[turn.tier]
        busy_ms = (now_ns - turn.runner.busy_since_ns) / NS_PER_MS
        return Outcome.LATE, f"tier {tier} on worker {turn.runner.number} was not done after {busy_ms:.1f} ms"

    def _answer(self, turn: Turn, decision: _Decision) -> None:
        """Publish the best there is, hand it on, and record it. Holds no lock."""
        frame, result = turn.frame, decision.result
        started_ns = time.monotonic_ns()
        if result is not None:
            payload: bytes | None = result.payload
            fallback = None if result is turn.result else Fallback.BACKUP
        else:
            self._outputs.prepare(self.config, self._output_type, started_ns, self._ros_now())
            fallback = self._outputs.choose(self.config, started_ns, backup=False)
            payload = self._outputs.payload(fallback)
        if payload is not None:
            self._ports.publish(payload)
        published_ns = time.monotonic_ns()
        self.reserve.published((published_ns - started_ns) / NS_PER_MS)
        self._ports.hand_on(payload, frame)
        if result is not None:
            self._outputs.remember(result.payload, frame.seq, frame.received_ns)
        answer = Answer(
            frame, decision.outcome, fallback, decision.reason,
            tier=turn.tier if result is None else result.tier,
            wait_ms=turn.wait_ms,
            total_ms=(published_ns - frame.received_ns) / NS_PER_MS,
            budget_ms=self.config.budget_ms,
            lateness_ms=(published_ns - frame.deadline_ns) / NS_PER_MS,
            published_ns=published_ns,
            steps=StepTimes() if result is None else result.steps,
        )  # fmt: skip
        self._record(answer)

    def _record(self, answer: Answer) -> None:
        self.statistics.add(answer)
        self.health.answered(answer.outcome, answer.fallback, answer.tier)
        self._ports.answered(answer)
        anomaly = self._rules.answered(answer, self.health.misses_in_a_row, self.config.sustained_misses)
        if anomaly is not None:
            self._ports.anomaly(anomaly)

    def _next(self, answered: Turn) -> None:
        """Begin the waiting frame if there is one; else there may be time to probe a higher tier."""
        with self._lock:
            self._turn = None
            self._timer.set(0)
            now_ns = time.monotonic_ns()
            self._begin(now_ns)
            if self._turn is None:
                self._dispatcher.probe(answered, self._fresh_ms, now_ns)

    # -- the crew's thread ------------------------------------------------------------------------------------------

    def worker_ready(self, worker: WorkerProcess) -> None:
        """A worker can take frames: calibrate the ladder by the first one, and wake the stage if a frame waits."""
        with self._lock:
            if not self.crew.ready:
                self.ladder.calibrate(worker.calibrations)
            worker.usable = True
            self._by_fd[worker.frames.fileno()] = worker
            self._poll.register(worker.frames.fileno(), select.EPOLLIN)
            self.health.ready()
            if self._turn is not None:
                self._timer.set(_AT_ONCE)

    def worker_died(self, worker: WorkerProcess, reason: str, *, lasting: bool) -> None:
        """A worker is gone; the stage's thread answers for it if it had not noticed yet."""
        with self._lock:
            self._drop(worker)
            if lasting and not self.crew.ready:
                self.health.gave_up()
            told = self._rules.worker_died(reason, worker.pid, self.crew.restarts, lasting, time.monotonic_ns())
            if told is not None:
                self._deaths.append(told)
            self._timer.set(_AT_ONCE)

    # -- times ------------------------------------------------------------------------------------------------------

    @property
    def _fresh_ms(self) -> float:
        return self.config.budget_ms - self.reserve.ms

    def _left_ms(self, now_ns: int) -> float:
        return (self._leave_ns - now_ns) / NS_PER_MS

    @property
    def _hedge_ns(self) -> int:
        """The last moment at which the second worker could still run the cheapest tier in time."""
        return self._leave_ns - round((self.ladder.predicted_ms(self.ladder.last) + _HEDGE_MARGIN_MS) * NS_PER_MS)

    @property
    def _prepare_ns(self) -> int:
        return self._leave_ns - round(_PREPARE_MS * NS_PER_MS)

    def _next_event_ns(self, now_ns: int) -> int:
        later = (at_ns for at_ns in (self._hedge_ns, self._prepare_ns) if at_ns > now_ns)
        return min(later, default=self._leave_ns)

    @property
    def _output_type(self) -> str:
        return "" if self.crew.description is None else self.crew.description.output
