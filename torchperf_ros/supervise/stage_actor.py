"""The frame's way through a stage: take the newest, hand it over, wait until the deadline, choose, publish, record.

Two threads meet here, under one lock that is never held while anything is published: the thread that received a frame
hands it to an idle worker itself (waking another thread first would cost more than the copy), and the stage's own
thread waits for results and for the deadline, and publishes. Events only change the turn; `_decide` alone says what
follows.
"""

import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchperf_ros.core.admission import admit
from torchperf_ros.core.clock import NS_PER_MS
from torchperf_ros.core.config import StageConfig
from torchperf_ros.core.errors import ProtocolError
from torchperf_ros.core.frame import Frame, stamp_age_ms
from torchperf_ros.core.mailbox import Mailbox
from torchperf_ros.core.memory_guard import MemoryGuard
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.core.reserve import Reserve
from torchperf_ros.core.tier_ladder import TierLadder
from torchperf_ros.supervise.fallback_outputs import FallbackOutputs
from torchperf_ros.supervise.frame_ring import InputBytes
from torchperf_ros.supervise.stage_journal import StageJournal
from torchperf_ros.supervise.stage_machinery import StageMachinery
from torchperf_ros.supervise.stage_ports import StagePorts
from torchperf_ros.supervise.stage_waiter import StageWaiter
from torchperf_ros.supervise.stage_workers import StageWorkers
from torchperf_ros.supervise.turn import Turn, Verdict
from torchperf_ros.supervise.worker_process import WorkerProcess

_FIRST_WAKE_MS = 2.0
_FIRST_WAKE_SHARE = 0.06  # of the budget


class StageActor:
    """One stage: a mailbox, the turn of one frame, a crew of workers, a ladder of tiers and its fallbacks.

    Attributes:
        config: parameters; replaced as a whole when one changes.
        journal, ladder, reserve, memory, mailbox, workers, crew: the stage's parts, for `/diagnostics`.
    """

    def __init__(
        self,
        config: StageConfig,
        setup: dict[str, Any],
        ports: StagePorts,
        ros_now: Callable[[], int],
        machinery: StageMachinery = StageMachinery(),  # noqa: B008 - frozen
    ) -> None:
        """Prepare a stage.

        Args:
            config: its parameters.
            setup: what its workers are told at their start.
            ports: where its answers go.
            ros_now: gives ROS time in ns.
            machinery: what it runs on.
        """
        self._clock = machinery.clock
        self.config = config
        self.journal = StageJournal(config, self._clock)
        self.ladder = TierLadder(len(config.tiers))
        self.reserve = Reserve(first_wake_ms=min(_FIRST_WAKE_MS, _FIRST_WAKE_SHARE * config.budget_ms))
        self.memory = MemoryGuard()
        self.mailbox = Mailbox()
        self._ports = ports
        self._ros_now = ros_now
        self._outputs = FallbackOutputs()
        self._lock = threading.Lock()
        self._turn: Turn | None = None
        self._accepting = False
        self._open = True
        self._waiter: StageWaiter = machinery.waiter()
        self.workers = StageWorkers(
            lambda listener: machinery.crew(config, setup, listener, ports.log),
            self.ladder, self._outputs, self.journal, self._waiter, self._lock,
        )  # fmt: skip
        self.crew = self.workers.crew
        self._dispatcher = self.workers.dispatcher
        self._thread = threading.Thread(target=self._run, name=f"stage-{config.name}", daemon=True)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and the stage's thread; frames are taken from `activate` on."""
        self.crew.start()
        self._thread.start()

    def activate(self) -> None:
        """Take frames from now on."""
        self.journal.activated()
        self._accepting = True

    def deactivate(self) -> None:
        """Take no more frames; the current one is still answered, a waiting one is counted as superseded."""
        with self._lock:
            self._accepting = False
            self.mailbox.clear()

    def stop(self) -> None:
        """End the thread and kill the workers."""
        self.deactivate()
        self._open = False
        with self._lock:
            self._waiter.wake()
        if self._thread.is_alive():
            self._thread.join()
        self.crew.stop()
        self._waiter.close()

    def reconfigure(self, config: StageConfig) -> None:
        """Take changed parameters (those that may change live)."""
        self.config = self.crew.config = config
        self.journal.reconfigure(config)

    # -- the receiving thread: a frame comes in -----------------------------------------------------------------------

    def offer(
        self, data: bytes | None, stamp_ns: int, *, stamped: bool, upstream: Frame | None = None, refusal: str = ""
    ) -> None:
        """A trigger message: start it if the stage is free, else let it wait in the mailbox.

        Args:
            data: CDR bytes; None where the stage before has nothing to hand over.
            stamp_ns: `header.stamp`, 0 if none.
            stamped: whether the message type has a stamp.
            upstream: the frame of the stage before that this is the output of.
            refusal: why the message cannot be used, if that is known already.
        """
        received_ns = self._clock()
        if not self._accepting:
            self.journal.statistics.ignored += 1
            return
        frame = admit(
            self.config, data, stamp_ns,
            received_ns=received_ns, ros_now_ns=self._ros_now(), upstream=upstream, refusal=refusal,
        )  # fmt: skip
        with self._lock:
            self.journal.received(frame, stamped=stamped)
            self.mailbox.put(frame)
            if self._turn is None:
                self._begin(received_ns)

    def offer_latest(self, index: int, data: bytes, stamp_ns: int) -> None:
        """Another input than the trigger: the newest is handed over with the next frame."""
        if len(data) > self.config.max_frame_bytes:
            self.journal.statistics.refused_inputs += 1
            return
        received = InputBytes(index, stamp_ns, stamp_age_ms(stamp_ns, self._ros_now()), data)
        with self._lock:
            self._dispatcher.latest[index] = received

    def _begin(self, now_ns: int) -> None:
        """Give the waiting frame its turn: hand it to an idle worker, and set the timer."""
        waiting = self.mailbox.waiting
        frame = self.mailbox.take(now_ns)
        if frame is None:
            if waiting is not None:
                self.journal.stale()
                self._ports.hand_on(None, waiting)  # the next stage still has to answer
            return
        leave_ns = frame.deadline_ns - round(self.reserve.ms * NS_PER_MS)
        turn = self._turn = Turn(frame, (now_ns - frame.received_ns) / NS_PER_MS, leave_ns)
        if frame.data is None or frame.refusal:
            turn.failure, turn.reason = Outcome.BAD_INPUT, frame.refusal
        else:
            self._dispatcher.write(turn, frame.data)
        if turn.failure is not None:
            self._waiter.wake()
            return
        self._dispatcher.start(turn, self._fresh_ms, now_ns)
        self._dispatcher.observe(turn, now_ns)
        self._waiter.set(turn.next_event_ns(now_ns))

    # -- the stage's thread: results, deadline, answer ----------------------------------------------------------------

    def _run(self) -> None:
        while self._open:
            try:
                self.step(self._waiter.wait())
            except Exception:  # the thread's boundary: this frame is lost, the stage goes on
                self.journal.statistics.internal_errors += 1
                self.crew.last_error = traceback.format_exc()
                self._ports.log("error", f"stage {self.config.name} lost a frame:\n{self.crew.last_error}")
                with self._lock:
                    if self._turn is not None:
                        self._turn.answered = True  # what still comes for it is late
                    self._turn = None
                    self._waiter.wake()  # for the frame that waits

    def step(self, descriptors: list[int]) -> None:
        """Take what is ready, and do what follows: answer the frame, or wait on; called by the stage's thread only."""
        with self._lock:
            for descriptor in descriptors:
                worker = self._waiter.worker(descriptor)
                if worker is not None:
                    self._receive(worker)
            if self._turn is None and self.mailbox.waiting is not None:  # an error of ours has lost the one before it
                self._begin(self._clock())
            turn = self._turn
            verdict = None if turn is None else self._decide(turn, self._clock())
        if turn is not None and verdict is not None:
            self._answer(turn, verdict)
            self._next(turn)
        while self.workers.untold:
            self._ports.anomaly(self.workers.untold.popleft())

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            received = worker.receive()
        except EOFError:
            self.workers.drop(worker)
        except ProtocolError as error:
            worker.kill(str(error))
            self.workers.drop(worker)
        else:
            if received is not None:
                self._dispatcher.take(worker, *received, self._fresh_ms, self._clock())

    def _decide(self, turn: Turn, now_ns: int) -> Verdict | None:
        """What to do about the current frame: answer it, or see to it that someone works on it and wait."""
        if turn.result is not None:
            return Outcome.ON_TIME, ""
        if turn.failure is not None and not self._dispatcher.may_have_backup(turn):
            return turn.failure, turn.reason
        if now_ns >= turn.leave_ns:
            self.reserve.woke(-turn.left_ms(now_ns))
            return self._dispatcher.why_late(turn, now_ns)
        if turn.runner is None:
            self._dispatcher.start(turn, self._fresh_ms, now_ns)
        elif Fallback.BACKUP in self.config.fallback and turn.wants_backup(now_ns):
            self._dispatcher.start_backup(turn, now_ns)
        if now_ns >= turn.prepare_ns:
            ros_leave_ns = self._ros_now() + turn.leave_ns - now_ns
            self._outputs.prepare(self.config, self._output_type, turn.leave_ns, ros_leave_ns)
        self._waiter.set(turn.next_event_ns(now_ns))
        return None

    def _answer(self, turn: Turn, verdict: Verdict) -> None:
        """Publish the best there is, hand it on, and record it. Holds no lock."""
        turn.answered = True
        frame, result, fallback = turn.frame, turn.result, None
        started_ns = self._clock()
        if result is None:
            if turn.backup_result is None:
                self._outputs.prepare(self.config, self._output_type, started_ns, self._ros_now())
            fallback = self._outputs.choose(self.config, started_ns, backup=turn.backup_result is not None)
            result = turn.backup_result if fallback is Fallback.BACKUP else None
        payload = self._outputs.payload(fallback) if result is None else result.payload
        if payload is not None:
            self._ports.publish(payload)
        published_ns = self._clock()
        self._ports.hand_on(payload, frame if result is not None else replace(frame, stamp_ns=self._outputs.stamp_ns))
        self.reserve.published((published_ns - started_ns) / NS_PER_MS)
        if result is not None:
            self._outputs.remember(result.payload, frame)
        answer = turn.answer(verdict, fallback, result, payload, self.config.budget_ms, published_ns)
        frame.data = None  # it is in the ring; who remembers the frame need not keep megabytes
        self._ports.answered(answer)
        anomaly = self.journal.answered(answer)
        if anomaly is not None:
            self._ports.anomaly(anomaly)

    def _next(self, answered: Turn) -> None:
        """Begin the waiting frame if there is one; else there may be time to practise."""
        with self._lock:
            self._dispatcher.learn()
            self._turn = None
            self._waiter.set(0)
            now_ns = self._clock()
            self._begin(now_ns)
            if self._turn is None and answered.result is not None:
                self._dispatcher.practise(answered, self._fresh_ms, now_ns)

    @property
    def _fresh_ms(self) -> float:
        """Time that a frame has which did not wait."""
        return self.config.budget_ms - self.reserve.ms

    @property
    def _output_type(self) -> str:
        return "" if self.crew.description is None else self.crew.description.output
