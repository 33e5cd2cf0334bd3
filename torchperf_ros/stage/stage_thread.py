"""The thread of a stage, with the lock and the timer that it shares with whoever brings frames.

A stage without streams has one `Stage` on its thread. The streams of a stage are one `Stage` each, all on one
thread: at each event the frame with the earliest deadline is looked at first, so that it gets the idle
worker.
"""

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.safety.stop_output import warm_up_stop
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.alert_rules import change_alert
from torchperf_ros.stage.hooks import StageMachinery
from torchperf_ros.stage.turn import Turn
from torchperf_ros.stage.waiter import Alarm, StageWaiter
from torchperf_ros.workers.worker_process import WorkerProcess

if TYPE_CHECKING:
    from torchperf_ros.stage.stage import Stage

_NO_DEADLINE = 1 << 62
_MOST_ENDED = 2  # workers in a row that ended at frames of a stream: then it leaves the last one to others
_MOST_BEHIND = 3  # frames of a stream in a row without a result in time: then others give way
_LOOK_AGAIN_NS = 2 * NS_PER_MS
_TRIES_EACH = 8  # of so many frames in a row that none would be in time by what is known, one runs


class StageThread:
    """Waits for workers and the timer, and has the stages that are on it go on; listens to their pool.

    Attributes:
        stages: one, or the streams of one stage in the order of the parameter.
        lock: held by all that changes a turn, never while anything is published.
        waiter: what the thread waits for.
    """

    def __init__(self, config: StageConfig, machinery: StageMachinery) -> None:
        self.stages: list[Stage] = []
        self.lock = threading.Lock()
        self.waiter: StageWaiter = machinery.waiter()
        self._clock = machinery.clock
        self._alarms: list[Alarm] = []
        for _ in config.streams:
            Alarm(self.waiter, self._alarms)
        self._stopped: set[int] = set()  # places of the stages that have asked for the end
        self._ran: dict[WorkerProcess, int] = {}  # the stream of whose frame a worker that is gone had one
        self._at: Stage | None = None  # which stage the thread works for, None: for all
        self._open = True
        self._thread = threading.Thread(
            target=self._run, name=f"stage-{config.whole_stage.name}", daemon=True
        )

    def add(self, stage: "Stage") -> StageWaiter | Alarm:
        """Take one more stage; returns the timer that it is to use."""
        self.stages.append(stage)
        return self._alarms[len(self.stages) - 1] if self._alarms else self.waiter

    def whole_config(self) -> StageConfig:
        """The parameters of the workers: those of the first stream, with the shortest budget of all."""
        whole = self.stages[0].config.whole_stage
        return replace(whole, budget_ms=min(stage.config.budget_ms for stage in self.stages))

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_free(self) -> bool:
        """Whether no stage on it has a frame in flight; with the lock held."""
        return all(stage.turn is None for stage in self.stages)

    @property
    def may_practise(self) -> bool:
        """Whether no frame needs the workers that are idle; with the lock held.

        Among several streams there is always a frame of some: it is enough that each has its worker.
        """
        if not self._alarms:
            return self.is_free
        return all(stage.turn is None or stage.turn.runner is not None for stage in self.stages)

    def room_ms(self, now_ns: int, cheapest_ms: float) -> float:
        """Time that an idle worker has for a run that no frame waits for.

        While the other worker has a frame, it alone is there for the next one of each stream: what they take
        is left out.
        """
        room_ms = max(0.0, (self.next_frame_ns - now_ns) / NS_PER_MS)
        if self.is_free:
            return room_ms
        return room_ms - cheapest_ms * (sum(map(self._has_frames, self.stages)) - 1)

    @property
    def has_streams(self) -> bool:
        return bool(self._alarms)

    def keeps_last_from(self, stage: "Stage") -> bool:
        """Whether a stream may not have the only worker that it has left to the others.

        That is one at whose frames two workers have ended in a row, or one whose late frames still run, or ended
        the worker that is missing. One that is late as there is a worker less now is not to blame.
        """
        crew = stage.model.crew
        is_bad = stage.ended_workers >= _MOST_ENDED or (
            stage.behind >= _MOST_BEHIND and (stage.ended_workers > 0 or crew.runs_frame_of(stage.place))
        )
        if not is_bad or stage.pool.config.workers == 1:
            return False
        others = any(self._has_frames(other) for other in self.stages if other is not stage)
        return others and crew.spared(stage.place) < 2  # noqa: PLR2004 - one for it, one for others

    @property
    def batches(self) -> bool:
        """Whether frames of several streams may run together."""
        return self.stages[0].model.crew.batch_times.most > 1

    @property
    def all_wait(self) -> bool:
        """Whether each stream, or as many as a batch holds, has a frame that waits for a worker."""
        most = min(len(self.stages), self.stages[0].model.crew.batch_times.most)
        return sum(stage.may_batch for stage in self.stages) >= most

    def start_together(self, now_ns: int) -> None:
        """Hand the frames that wait for a worker over as a batch where that pays; with the lock held."""
        waiting = sorted(
            (stage for stage in self.stages if stage.turn is not None and stage.may_batch), key=_urgency
        )
        while len(waiting) > 1:
            first = waiting[0]
            turns = [stage.turn for stage in waiting if stage.turn is not None]
            started = first.model.crew.start_together(turns, first.fresh_ms, now_ns)
            for stage in waiting[:started]:
                if stage.turn is not None:
                    stage.waiter.set(stage.turn.next_event_ns(now_ns))
            waiting = waiting[started:] if started else []

    @property
    def next_frame_ns(self) -> int:
        """The earliest receipt of the next frame of any of its stages that has frames."""
        return min(
            (stage.arrivals.next_ns for stage in self.stages if self._has_frames(stage)),
            default=self.stages[0].arrivals.next_ns,
        )

    def _has_frames(self, stage: "Stage") -> bool:
        """Whether the stage is alone, or a stream whose frames come: an unplugged one wants no worker."""
        return not self._alarms or not stage.arrivals.have_ended(self._clock())

    def start(self, stage: "Stage") -> None:
        """Start the workers and the thread, when the first of its stages asks for it."""
        if stage is self.stages[0]:
            stage.pool.start()
            self._thread.start()

    def stop(self, stage: "Stage") -> None:
        """End the thread and kill the workers, when the last of its stages asks for it."""
        with self.lock:
            was_stopped = stage.place in self._stopped
            self._stopped.add(stage.place)
            if was_stopped or len(self._stopped) < len(self.stages):
                return
        self._open = False
        with self.lock:
            self.waiter.wake()
        if self._thread.is_alive():
            self._thread.join()
        if stage.shadow is not None:
            stage.shadow.remove()
        stage.pool.stop()
        self.waiter.close()

    # -- the thread

    def _run(self) -> None:
        while self._open:
            try:
                self.step(self.waiter.wait())
            except Exception:  # the thread's boundary: this frame is lost, the stage goes on
                for stage in self.stages if self._at is None else (self._at,):
                    stage.lose_frame()
                with self.lock:
                    for stage in self.stages:
                        stage.waiter.wake()  # for what it had not come to yet

    def step(self, descriptors: list[int]) -> None:
        """Take what is ready, and do what follows: answer frames, or wait on.

        Called by the thread only.
        """
        self._at = None
        with self.lock:
            for descriptor in descriptors:
                worker = self.waiter.worker(descriptor)
                if worker is not None:
                    self._receive(worker)
            found = []
            for stage in self._in_order():
                self._at = stage
                verdict = stage.look()
                found.append((stage, stage.turn, verdict))
            if self._alarms:
                self._alarms[0].ring_for_the_first()
        # What takes a moment is done without the lock.
        for self._at, turn, verdict in found:
            self._at.go_on(turn, verdict)

    def _in_order(self) -> "list[Stage]":
        """The stages that have work, in the order to look: high priority and early deadlines first.

        While no worker is idle, a frame that waits for one is left alone until its alarm rings: on a machine
        that is too slow, to look at all of them each time would make it slower still.
        """
        if not self._alarms:
            return self.stages
        now_ns, ringing = self._clock(), []
        for stage, alarm in zip(self.stages, self._alarms, strict=True):
            if 0 < alarm.at_ns <= now_ns:  # it has rung, as a timer does once
                alarm.at_ns = 0
                ringing.append(stage)
        waiting = [stage for stage in self.stages if stage.has_work]
        if any(stage.only_waits for stage in waiting) and self.stages[0].model.crew.idle() is None:
            waiting = [stage for stage in waiting if stage in ringing or not stage.only_waits]
        return sorted(waiting, key=_urgency) if len(waiting) > 1 else waiting

    def _receive(self, worker: WorkerProcess) -> None:
        """Take what a worker has sent: a response, or the end of its socket."""
        first = self.stages[0]
        if first.shadow is not None and first.shadow.takes(worker, self._clock(), free=first.turn is None):
            return
        try:
            received = worker.receive()
        except EOFError:
            self._drop(worker)
        else:
            if received is not None:
                self.stages[received[0].stream].take(worker, *received)

    # -- the pool's thread: workers come and go

    def worker_ready(self, worker: WorkerProcess) -> None:
        """A worker can take frames; a frame may wait for it."""
        warm_up_stop(self.stages[0].output_type)
        with self.lock:
            self.stages[0].model.crew.join(worker)
            self._look_at_scenes()
            for stage in self.stages:
                stage.statistics.health.ready()
                stage.waiter.wake()

    def worker_died(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        """A worker is gone, or was never there.

        The stage's thread answers for it if it had not noticed yet.
        """
        with self.lock:
            pid, at = 0, 0
            if worker is not None:
                self._drop(worker)
                pid, at = worker.pid, self._ran.pop(worker, 0)
            for stage in self.stages:
                pool = stage.pool
                alert = stage.statistics.worker_died(
                    reason, pid, pool.restarts, lasting=lasting, alone=not pool.ready
                )
                # One death is one alert, of the stream whose frame the worker ran.
                if stage is self.stages[at]:
                    stage.add_alert(alert)
                stage.waiter.wake()

    def worker_replaced(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        """Have nothing more to do with an idle worker, as another takes its place; False if it is busy."""
        with self.lock:
            is_free = self.stages[0].model.crew.replace(worker, successor)
            if is_free:
                self._look_at_scenes()
            return is_free

    def worker_told(self, text: str) -> None:
        """A change of a worker's models: for `/perf/anomaly`."""
        first = self.stages[0]
        first.tell(change_alert(first.config.name, "model", text))

    def _drop(self, worker: WorkerProcess) -> None:
        """Have nothing more to do with a worker that is gone; with the lock held."""
        for stage in self.stages:
            if worker is stage.scenes.word_of:
                stage.scenes.forget_word()  # the tiers of that scene may be what ends its workers
        if (turn := self.stages[0].model.crew.drop(worker)) is not None:
            self._ran[worker] = turn.stream
            self.stages[turn.stream].ended_workers += 1
        self._look_at_scenes()

    def _look_at_scenes(self) -> None:
        for stage in self.stages:
            stage.scenes.look_at(stage.pool)

    def gives_way(self, stage: "Stage", now_ns: int) -> int:
        """Until when an idle worker is left to another stream that has gone without results; 0: it is not.

        Cameras that are triggered together send in the same order each time. On a machine that is too slow
        for all of them the last would never have a worker. Only a stream that is well gives way: where all
        are behind, each wait would put them further behind.
        """
        if stage.behind:
            return 0
        ladder = stage.ladder
        done_ns = now_ns + round(ladder.predicted_ms(ladder.last) * NS_PER_MS)
        for other in self.stages:
            if other.behind < _MOST_BEHIND or other.turn is not None:
                continue
            if other.config.priority >= stage.config.priority:
                due_ns = other.arrivals.expected_ns(now_ns)
                if due_ns < done_ns:
                    return due_ns + _LOOK_AGAIN_NS
        return 0

    def is_too_late(self, turn: Turn, now_ns: int) -> bool:
        """Whether a run of this frame would only keep a worker from frames that can still be in time.

        Where all streams that have frames are behind it may run: what is known of a run's time may be what is
        wrong. So may some frames of a stream whose frames would be too late even if they had not waited, as
        none of them would ever show that; they go on as long as they are in time.
        """
        if not _is_too_late(turn, now_ns):
            return False
        stage = self.stages[turn.stream]
        never_ms = (turn.leave_ns - turn.frame.received_ns) / NS_PER_MS
        if never_ms < turn.ladder.likely_ms(turn.ladder.last) and stage.behind % _TRIES_EACH == 0:
            return False
        return any(not one.behind and self._has_frames(one) for one in self.stages)


def _is_too_late(turn: Turn, now_ns: int) -> bool:
    return turn.left_ms(now_ns) < turn.ladder.likely_ms(turn.ladder.last)


def _urgency(stage: "Stage") -> tuple[int, bool, int]:
    """A stream's place in the order: by priority; then what can still be in time; then by deadline.

    The deadline of a stream that has gone without results counts as earlier.
    """
    turn = stage.turn
    if turn is None:
        return -stage.config.priority, True, _NO_DEADLINE
    handicap_ns = min(stage.behind, _MOST_BEHIND) * stage.budget_ms * NS_PER_MS / _MOST_BEHIND
    return (
        -stage.config.priority,
        _is_too_late(turn, stage.clock()),
        turn.frame.deadline_ns - round(handicap_ns),
    )
