"""The frame's way through a stage.

Take the newest, hand it over, wait until the deadline, choose, publish, record.

Two threads meet here, under one lock that is never held while anything is published: the thread that
received a frame hands it to an idle worker itself (waking another thread first would cost more than the
copy), and the stage's own thread waits for results and for the deadline, and publishes. Events only change
the turn; `_decide` alone says what follows.
"""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.errors import BadInput, ConfigError, ProtocolError
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.safety.stop_output import PATH, can_stop, warm_up_stop
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.frame import Answer, Frame, Mailbox, admit, stamp_age_ms
from torchperf_ros.stage.frame_in_flight import FrameInFlight, Verdict
from torchperf_ros.stage.input_sync import InputSync
from torchperf_ros.stage.right_of_way import NEVER_NS, RightOfWay
from torchperf_ros.stage.scenes import DEFAULT, situation_budget_ms
from torchperf_ros.stage.stage_guard import GUARD_ODOMETRY, StageGuard
from torchperf_ros.stage.stage_versions import LIVE, StageMachinery, StagePorts, StageVersions
from torchperf_ros.workers.frame_ring import InputBytes
from torchperf_ros.workers.worker_process import WorkerProcess

_ANSWER_MARGIN_S = 1.0  # past the deadline, on a machine that is overloaded
_ANSWER_POLL_S = 0.001
_WITHHELD = "withheld: the emergency lane is latched"


class StageActor(StageVersions):
    """One stage: a mailbox, one frame in flight, and what runs and answers it.

    Attributes:
        mailbox: the frame that waits.
        sync: which messages of other inputs fit a trigger; None where every one's latest does.
        lower: stages that give way to this one.
    """

    def __init__(
        self,
        config: StageConfig,
        setup: dict[str, Any],
        ports: StagePorts,
        ros_now: Callable[[], int],
        machinery: StageMachinery = LIVE,
    ) -> None:
        """Prepare a stage.

        `setup` is what its workers are told at their start, `ros_now` gives ROS time in ns.
        """
        super().__init__(config, setup, ports, ros_now, machinery)
        self._input_clock = machinery.input_clock
        self.mailbox = Mailbox()
        self.lower: list[StageActor] = []
        sync = InputSync[tuple[InputBytes, int]](config.name, config.sync) if config.sync else None
        self.sync = sync
        self._unlogged = ""  # the traceback of an error that happened under the lock
        self._accepting = False
        self._open = True
        self._thread = threading.Thread(target=self._run, name=f"stage-{config.name}", daemon=True)

    # -- life

    def give_way(self, right_of_way: RightOfWay) -> None:
        """Begin nothing that would run while a stage of higher priority has a frame due; before `start`."""
        self._dispatcher.right_of_way = right_of_way

    def look_again(self, answer: Answer | None = None) -> None:
        """A stage that this one gives way to has answered, with this.

        On that one's thread, takes no lock.
        """
        if answer is not None:
            self._dispatcher.higher_answered(answer, self._clock())
        in_flight = self._in_flight
        if in_flight is not None and in_flight.held_by and in_flight.runner is None:
            self._waiter.wake()

    def due_ns(self, now_ns: int) -> int:
        """When this stage has or expects a frame that a worker is to run.

        `NEVER_NS`: none; takes no lock.
        """
        if not self.pool.ready:
            return NEVER_NS
        return now_ns if self._in_flight is not None else self._dispatcher.expected_ns(now_ns)

    def start(self) -> None:
        """Start the workers and the stage's thread; frames are taken from `activate` on."""
        self.pool.start()
        self._thread.start()

    def warm_up(self) -> None:
        """Have memory for the first frame and code for a stop at hand, and the stage's thread awake once."""
        warm_up_stop(self._output_type)
        self.pool.ring.make_ready(self.config.max_frame_bytes)
        with self._lock:
            self._waiter.wake()

    def activate(self) -> None:
        """Take frames from now on."""
        self.statistics.activated()
        self._outputs.forget(self._clock())
        if self.guard is not None:
            self.guard.guard.forget(self._clock())
        self._accepting = True

    def deactivate(self) -> None:
        """Take no more frames.

        The current one is still answered, a waiting one is counted as superseded.
        """
        with self._lock:
            self._accepting = False
            self.mailbox.put(None)

    def finish(self) -> None:
        """Wait until the current frame is answered.

        By its deadline, or a second later on a machine out of breath.

        Not for the stage's own thread, which answers it.
        """
        in_flight = self._in_flight
        if in_flight is None or not self._thread.is_alive():
            return
        left_s = (in_flight.frame.deadline_ns - self._clock()) / NS_PER_S
        give_up_at = time.monotonic() + max(left_s, 0.0) + _ANSWER_MARGIN_S
        while self._in_flight is in_flight and time.monotonic() < give_up_at:
            time.sleep(_ANSWER_POLL_S)  # no condition: the frame's way should not pay for what happens once

    def stop(self) -> None:
        """Answer the current frame, end the thread and kill the workers."""
        self.deactivate()
        self.finish()
        self._open = False
        with self._lock:
            self._waiter.wake()
        if self._thread.is_alive():
            self._thread.join()
        self.remove_shadow()
        self.pool.stop()
        self._waiter.close()

    # -- the receiving thread: a frame comes in

    def slot(self) -> memoryview | None:
        """Where the next trigger's bytes can be put before they are offered.

        None: give them to `offer` as they come.

        The trigger is there, so the worker that will run it wakes up while the middleware copies it. For
        the one thread that offers triggers. A frame that waits has its bytes elsewhere: the ring's newest
        record belongs to a frame that runs.
        """
        with self._lock:
            is_free = self._accepting and self._in_flight is None and self.mailbox.waiting is None
            description = self.pool.description
            if not is_free or description is None:
                return None
            self._dispatcher.expect()
            slot: memoryview | None = self.pool.ring.slot(len(description.inputs))
            return slot

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
        received_ns = self._clock()
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
            ros_now_ns=self._ros_now(),
            upstream=upstream,
            refusal=refusal,
            budget_ms=self._situation_budget_ms(scene, received_ns),
        )
        frame.scene = scene
        if self.sync is not None:
            frame.inputs_since_ns = self._input_ns(received_ns)
        with self._lock:
            frame.seq = self.statistics.counters.frames
            if self.actions.lower_rate and frame.seq & 1 and self.mailbox.waiting is None:
                self.mailbox.superseded += 1  # by the next one
            else:
                self.mailbox.put(frame)
            if self._in_flight is None:
                self._begin(received_ns)
            # when the worker has it: counting can wait
            alert = self.statistics.received(frame, self.mailbox.superseded, stamped=stamped)
            if alert is not None:
                self._untold.append(alert)

    def offer_latest(self, index: int, data: bytes, stamp_ns: int) -> None:
        """Another input than the trigger: the newest is handed over with the next frame."""
        if len(data) > self.config.max_frame_bytes:
            self.statistics.counters.refused_inputs += 1
            return
        received_ns, age_ms = self._clock(), stamp_age_ms(stamp_ns, self._ros_now())
        message = InputBytes(index, stamp_ns, age_ms, data), received_ns
        with self._lock:
            if self.sync is None or not self.sync.take(
                index, stamp_ns, message, self._input_ns(received_ns)
            ):
                self._dispatcher.latest[index] = message
            elif self._in_flight is not None and self._in_flight.inputs_until_ns:
                self._go_on(self._in_flight, received_ns)  # it may be what the frame waits for

    def hear(self, index: int, data: bytes, stamp_ns: int = 0) -> None:
        """A message of another input than the adapter's.

        For the guard, or what scenes depend on, see `inputs`.
        """
        now_ns = self._clock()
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
        """Index, topic and message type.

        The adapter's inputs, the trigger first, then those of scenes and guard.

        Empty until a worker has described its adapter.

        Raises:
            ConfigError: the stage has a guard and publishes something else than a path, or an input cannot
                be synchronised.
        """
        if self.pool.description is None:
            return []
        if self.guard is not None and not can_stop(self._output_type):
            what = f"the stage publishes {self._output_type}, and a guard checks {PATH}"
            raise ConfigError(
                f"parameter {self.config.name}.guard.act: {what}; leave it empty, and shadow as well"
            )
        if self.sync is not None:
            self.sync.bind(self.pool.description.inputs)
        own = [(index, topic, kind) for index, (topic, kind) in enumerate(self.pool.description.inputs)]
        return [*own, *self.config.situation_inputs, *StageGuard.inputs(self.config)]

    def _situation_budget_ms(self, scene: int, now_ns: int) -> float:
        config, scenes = self.config, self.scenes
        budget_ms = config.scene_budget_ms(scene)
        if not config.budget_least_ms:
            return budget_ms
        least_ms = self.ladders[scene].forecasts[-1].ms + self.margin.ms
        return situation_budget_ms(config, budget_ms, scenes.speed(now_ns), scenes.ttc_s(now_ns), least_ms)

    def _begin(self, now_ns: int) -> None:
        """Give the waiting frame, if there is one, its turn: hand it to an idle worker, and set the timer.

        One that is stale is answered at once; `_next` may have it run afterwards.
        """
        if self.exchanges and self.shadow is not None:
            self._exchange(self.shadow, now_ns)
        frame = self.mailbox.take(now_ns)
        if frame is None:
            return
        if frame.scene not in self.scenes.ready:  # its tiers may be gone since it was received
            frame.scene = DEFAULT
        self.budget_ms = frame.budget_ms
        self._dispatcher.use(frame.scene)
        leave_ns = max(now_ns, frame.deadline_ns - round(self.margin.ms * NS_PER_MS))
        in_flight = self._in_flight = FrameInFlight(
            frame, (now_ns - frame.received_ns) / NS_PER_MS, leave_ns
        )
        self._go_on(in_flight, now_ns)
        if self.shadow is not None:
            self.shadow.give_way()

    def _go_on(self, in_flight: FrameInFlight, now_ns: int) -> None:
        """Hand the frame in flight over as soon as it has its inputs, and set the timer."""
        frame = in_flight.frame
        try:
            if frame.data is None or frame.refusal:
                if (
                    self.actions.off and frame.data is not None
                ):  # the inputs are watched: they may be well again
                    self._dispatcher.write(in_flight, frame.data)
                in_flight.fail(Outcome.BAD_INPUT, frame.refusal)
            elif self.sync is not None and self._awaits_inputs(self.sync, in_flight, now_ns):
                return
            else:
                self._dispatcher.write(in_flight, frame.data)
            if in_flight.failure is None and not frame.stale:
                self._dispatcher.start(in_flight, self._fresh_ms, now_ns)
                self._waiter.set(in_flight.next_event_ns(now_ns))
            else:
                self._waiter.wake()
        except (
            Exception
        ) as error:  # a thread's boundary, the receiving one's too: the stage answers all the same
            self.statistics.counters.internal_errors += 1
            self.pool.last_error = self._unlogged = traceback.format_exc()
            if in_flight.runner is None:  # nobody else is to run what may be half written
                in_flight.fail(Outcome.ERROR, f"an error in the node: {type(error).__name__}: {error}")
                in_flight.backup_failed = True
            self._waiter.wake()

    def _input_ns(self, now_ns: int) -> int:
        return now_ns if self._input_clock is None else self._input_clock()

    def _awaits_inputs(self, sync: InputSync[Any], in_flight: FrameInFlight, now_ns: int) -> bool:
        """Whether the frame waits for inputs.

        Else it has what there is of them. It leaves time for the cheapest tier.

        A newer frame waits in the mailbox meanwhile, as behind any frame that is being answered.
        """
        frame, at_ns = in_flight.frame, self._input_ns(now_ns)
        waits, in_flight.inputs_until_ns = in_flight.inputs_until_ns > 0, 0
        if not waits:
            waited_ms = (at_ns - frame.inputs_since_ns) / NS_PER_MS
            room_ms = in_flight.left_ms(now_ns) - self.ladder.predicted_ms(self.ladder.last)
            sync.begin(frame.stamp_ns, at_ns, waited_ms, room_ms)
        until_ns = sync.until_ns
        if until_ns > at_ns:
            in_flight.inputs_until_ns = until_ns
            self._waiter.set(until_ns if self._input_clock is None else in_flight.leave_ns)
            return True
        if waits:
            in_flight.wait_ms = (now_ns - frame.received_ns) / NS_PER_MS
        in_flight.missing_inputs = sync.settle(frame.stamp_ns, at_ns, self._dispatcher.latest)
        while sync.news:
            self._untold.append(sync.news.popleft())
        return False

    @property
    def inputs_until_ns(self) -> int:
        """Until when, by the clock of inputs, the frame in flight waits for some.

        0: it does not; takes no lock.
        """
        in_flight = self._in_flight
        return 0 if in_flight is None else in_flight.inputs_until_ns

    @property
    def output_stamp_problem(self) -> str:
        """What is wrong with the stamp of the newest output, see `FallbackOutputs`; takes no lock."""
        return self._outputs.stamp_problem(self._output_type)

    def overdue_ms(self, now_ns: int) -> float:
        """For how long the answer of the frame in flight should have left, in ms.

        0: nothing is late; takes no lock.
        """
        in_flight = self._in_flight
        return 0.0 if in_flight is None else max(0.0, (now_ns - in_flight.leave_ns) / NS_PER_MS)

    def inputs_are_over(self) -> None:
        """The clock of inputs has moved.

        The frame in flight may have waited long enough; see `StageMachinery`.
        """
        with self._lock:
            if self._in_flight is not None and self._in_flight.inputs_until_ns:
                self._go_on(self._in_flight, self._clock())

    # -- the stage's thread: results, deadline, answer

    def _run(self) -> None:
        while self._open:
            try:
                self.step(self._waiter.wait())
            except Exception:  # the thread's boundary: this frame is lost, the stage goes on
                with contextlib.suppress(Exception):  # of what writes it down, too
                    self._note_error("lost a frame")
                with self._lock:
                    if self._in_flight is not None:
                        self._in_flight.answered = True  # what still comes for it is late
                    self._in_flight = None
                    self._waiter.wake()  # for the frame that waits

    def _note_error(self, what: str) -> None:
        self.statistics.counters.internal_errors += 1
        self.pool.last_error = traceback.format_exc()
        self._ports.log("error", f"stage {self.config.name} {what}:\n{self.pool.last_error}")

    def step(self, descriptors: list[int]) -> None:
        """Take what is ready, and do what follows.

        Answer the frame, or wait on; called by the stage's thread only.
        """
        with self._lock:
            for descriptor in descriptors:
                worker = self._waiter.worker(descriptor)
                if worker is not None:
                    self._receive(worker)
            if (
                self._in_flight is None
            ):  # a frame that waits all the same: an error of ours has lost the one before it
                self._begin(self._clock())
            in_flight = self._in_flight
            verdict = None if in_flight is None else self._decide(in_flight, self._clock())
        # what takes a moment is done without the lock
        if in_flight is not None and verdict is not None:
            self._next(in_flight, self._answer(in_flight, verdict))
        elif in_flight is not None and (now_ns := self._clock()) >= in_flight.prepare_ns:
            ros_leave_ns = self._ros_now() + in_flight.leave_ns - now_ns
            self._outputs.prepare(self.config, self._output_type, in_flight.leave_ns, ros_leave_ns)
        if self._unlogged:
            text, self._unlogged = self._unlogged, ""
            self._ports.log("error", f"stage {self.config.name} could not hand a frame over:\n{text}")
        while self._untold:
            self._ports.anomaly(self._untold.popleft())

    def _receive(self, worker: WorkerProcess) -> None:
        if self.shadow is not None and self.shadow.has(worker):
            self.shadow.receive(worker, self._clock(), free=self._in_flight is None)
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
                if received[0].outcome == Outcome.ON_TIME and not self._dispatcher.practises(worker):
                    self.scenes.name(received[0].scene, worker, received[0].seq)
                self._dispatcher.take(worker, *received, self._fresh_ms, self._clock())

    def _decide(self, in_flight: FrameInFlight, now_ns: int) -> Verdict | None:
        """What to do about the current frame: answer it, or see to it that someone works on it and wait."""
        if in_flight.inputs_until_ns:
            self._go_on(in_flight, now_ns)
            return None
        if in_flight.result is not None:
            return Outcome.ON_TIME, ""
        if in_flight.failure is not None and (
            in_flight.partial or not self._dispatcher.may_have_backup(in_flight)
        ):
            return self._dispatcher.partial(in_flight, (in_flight.failure, in_flight.reason))
        if now_ns >= in_flight.leave_ns:
            self.margin.woke(-in_flight.left_ms(now_ns))
            return self._dispatcher.partial(in_flight, self._dispatcher.why_late(in_flight, now_ns))
        if in_flight.runner is None:
            self._dispatcher.start(in_flight, self._fresh_ms, now_ns)
        else:
            self._dispatcher.start_wanted_backup(in_flight, now_ns)
        self._waiter.set(in_flight.next_event_ns(now_ns))
        return None

    def _answer(self, in_flight: FrameInFlight, verdict: Verdict) -> Answer:
        """Publish the best there is, hand it on, and record it. Holds no lock."""
        in_flight.answered = True
        if (
            not in_flight.frame.stale
        ):  # of a stale frame an anytime model gives all its steps, for the frames after it
            self.pool.ring.answered(in_flight.frame.seq)
        frame, result, fallback = in_flight.frame, in_flight.result, None
        started_ns = self._clock()
        if result is None:
            if in_flight.backup_result is None:
                self._outputs.prepare(self.config, self._output_type, started_ns, self._ros_now())
            fallback = self._outputs.choose(
                self.config, started_ns, backup=in_flight.backup_result is not None
            )
            result = in_flight.backup_result if fallback is Fallback.BACKUP else None
        payload = self._outputs.payload(fallback) if result is None else result.payload
        checked = None
        if self.guard is not None:
            source = frame if result is not None else self._outputs.frame
            try:
                is_stop = fallback is Fallback.STOP
                checked = self.guard.check(payload, source, started_ns, self._ros_now(), is_stop=is_stop)
            except Exception as error:  # the guard's boundary: this frame is answered by the stage's stop
                verdict = Outcome.ERROR, f"an error in the guard: {type(error).__name__}: {error}"
                self._note_error("had an error in its guard")
                stop = self._outputs.stop(self.config, started_ns, self._ros_now())
                checked = self.guard.instead(payload, stop)
                if checked.verdict is not GuardVerdict.ACCEPT:
                    result, fallback = None, Fallback.NONE if checked.payload is None else Fallback.STOP
            payload = checked.payload
            self.scenes.near(checked.ttc_s, started_ns)
        withheld = None if payload is None else self._ports.publish(payload)
        published_ns = self._clock()
        held = self._outputs.frame
        stamp_ns = frame.stamp_ns if result is not None else 0 if held is None else held.stamp_ns
        self._ports.hand_on(payload, frame if result is not None else replace(frame, stamp_ns=stamp_ns))
        self.margin.published((published_ns - started_ns) / NS_PER_MS)
        if result is not None and payload is result.payload:
            self._outputs.remember(result.payload, frame)
        fallback, payload = withheld or (fallback, payload)
        answer = in_flight.answer(verdict, fallback, result, payload, frame.budget_ms, published_ns)
        if withheld is not None:
            answer.reason = f"{_WITHHELD}; {answer.reason}" if answer.reason else _WITHHELD
        refusal = None if self.guard is None or checked is None else self.guard.judge(answer, checked)
        frame.data = None  # it is in the ring; who remembers the frame need not keep megabytes
        told = self.statistics.answered(answer)
        self._ports.answered(answer)
        if answer.outcome is Outcome.ERROR:
            self.pool.last_error = answer.reason
        if self._drift is not None and in_flight.result is not None:
            self._drift.add(answer.tier, answer.total_ms - answer.wait_ms)
        for alert in (told, refusal):
            if alert is not None:
                self._ports.anomaly(alert)
        return answer

    def _next(self, answered: FrameInFlight, answer: Answer) -> None:
        """Begin the waiting frame if there is one; else there may be time to practise."""
        with self._lock:
            now_ns = self._clock()
            runs_late = answered.frame.stale and answered.length and not answered.frame.refusal
            if runs_late and self.mailbox.waiting is None:
                self._dispatcher.start(
                    answered, self._fresh_ms, now_ns
                )  # for the histories, and the next `hold_last`
            self._dispatcher.learn(answered, now_ns)
            self._in_flight = None
            self._waiter.set(0)
            self._begin(now_ns)
            if self._in_flight is None and answered.result is not None:
                self._dispatcher.practise(answered, self._fresh_ms, now_ns)
            if self.shadow is not None:
                if self._in_flight is None:
                    self.shadow.go_on(now_ns)
                self.shadow.follow(answered, answer, now_ns, free=self._in_flight is None)
        for stage in self.lower:
            stage.look_again(answer)
        self.pool.ring.make_ready()
