"""A stage on a virtual clock: real processes compute, and the clock says how long that took.

The replay goes from one event to the next, however long the work in between really takes. `VirtualPace` has
the clock. Of what a stage runs on (`StageMachinery`), `_Pool` stands in for its thread's waiter and for its
worker pool, and `_Worker` for each worker process.
"""

import select
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S, Clock, VirtualClock
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.replay_stages import ReplayPace, ReplayStages
from torchperf_ros.replay.step_times import RunTimes, StageTimes
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.frame import StepTimes
from torchperf_ros.stage.hooks import StageMachinery
from torchperf_ros.workers.calibration import Batching
from torchperf_ros.workers.frame_ring import FrameReader
from torchperf_ros.workers.process_setup import held_interrupt
from torchperf_ros.workers.protocol import Response
from torchperf_ros.workers.worker_pool import Log, PoolListener, RestartPolicy, WorkerPool
from torchperf_ros.workers.worker_process import WorkerProcess
from torchperf_ros.workers.worker_setup import WorkerSetup

_POLL_S: Final = 0.005
_LOOK_S: Final = 0.05
_CATCH_UP_S: Final = 0.0002
_LONGEST_RUN_MS: Final = 600_000.0
_TIMER: Final = -1
_NEVER: Final = 0
_TOO_LATE: Final = frozenset({Outcome.LATE, Outcome.PARTIAL})


# Worker processes by the index of their stage, for one pace after the other, each with stages of
# the same parameters.
#
# For adapters that remember nothing from frame to frame; starting workers takes longer than a short
# drive. For the same reason a death that is drawn ends none of them: its replacement is due when
# the clock says so, and is the same process. The caller that keeps these pools stops them.
KeptPools = dict[int, WorkerPool]


class VirtualPace(ReplayPace):
    """Deadlines, mailboxes, ladders and fallbacks on a clock that reads the log's time.

    One thread does everything, in an order that only the log, the parameters, the times and the seed
    decide: of what is due at the same time, workers come before messages, and stages in their own order.
    """

    threaded = False

    def __init__(self, start_ns: int, times: Sequence[StageTimes], kept: KeptPools | None = None) -> None:
        """Begin at this time of the log, with the times of each stage's runs.

        `kept`: workers that outlive the pace.
        """
        self._clock = VirtualClock(start_ns)
        self._pools = [_Pool(times[stage:], self._clock, stage, kept) for stage in range(len(times))]

    def machinery(self, stage: int) -> StageMachinery:
        pool = self._pools[stage]
        return StageMachinery(self._clock, lambda: pool, pool.opened)

    def now(self) -> int:
        return self._clock()

    def reach(self, t_ns: int, stages: ReplayStages, record: ReplayRecord) -> None:
        """Let happen what is due until then, one event after the other."""
        self._run(t_ns, stages, record)
        self._clock.reach(t_ns)

    def finish(self, stages: ReplayStages, record: ReplayRecord) -> None:
        """Let happen what is still to come, until every frame is answered."""
        self._run(None, stages, record)

    def _run(self, until_ns: int | None, stages: ReplayStages, record: ReplayRecord) -> None:
        while until_ns is not None or record.pending > stages.unanswered:
            due = [at_ns for pool in self._pools if (at_ns := pool.next_ns) is not None]
            if not due or (until_ns is not None and min(due) > until_ns):
                return
            self._clock.reach(min(due))
            with held_interrupt():
                for actor, pool in zip(stages.actors, self._pools, strict=True):
                    if actor.place:  # its stage's first stream has the pool
                        continue
                    if descriptors := pool.due(self._clock()):
                        actor.thread.step(descriptors)
                    pool.step(self._clock())
            record.tick()


class _Pool:
    """Stands in for what a stage's thread waits for (`StageWaiter`), and for its `WorkerPool`.

    Nothing blocks: the pace asks when something is due, and hands it over. A worker that dies is replaced
    after `restart_ms` of the clock and the delays of `RestartPolicy`, however long the process really takes
    to start. What is not here is the real pool's (`ring`, `description`, `start`, `stop`). It is the
    listener of that, which closes a dead worker's descriptors after `worker_died`, when nothing may be using
    them.
    """

    def __init__(
        self, times: Sequence[StageTimes], clock: Clock, stage: int, kept: KeptPools | None
    ) -> None:
        """`times` are those of the stage, or of its first stream, and of what follows it."""
        self.times, self._of_streams = times[0], times
        self._stage, self._kept = stage, kept
        self.using = threading.Lock()
        self.last_error = ""
        self._clock, self.at_ns = clock, _NEVER
        self._waited: dict[int, _Worker] = {}
        self._start_at_ns: dict[int, int] = {}

    def opened(self, config: StageConfig, setup: WorkerSetup, listener: PoolListener, log: Log) -> "_Pool":
        self.config, self._listener, self._log = config, listener, log
        self.policies = [RestartPolicy(self._clock) for _ in range(config.workers)]
        self.workers: list[_Worker | None] = [None] * config.workers
        longest_ms = max(
            config.hang_ms, _LONGEST_RUN_MS
        )  # a slow machine is no hang: the virtual clock tells those
        self._starts = self._kept is None or self._stage not in self._kept
        if self._kept is not None and not self._starts:
            self._real = self._kept[self._stage]
            self._real.listener = self
        else:
            self._real = WorkerPool(replace(config, hang_ms=longest_ms), setup, self, log)
        self._real.policies = [RestartPolicy(time.monotonic_ns, proven_s=0.0) for _ in self.policies]
        self._rings = [FrameReader(ring.fd) for ring in self._real.rings]
        self._frame, self._runs = (-1, -1), 0
        return self

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._real, name)

    def start(self) -> None:
        """Start the processes, unless they are kept from another pace."""
        if self._starts:
            self._real.start()
        if self._kept is not None:
            self._kept[self._stage] = self._real

    def stop(self) -> None:
        """End the processes, unless they are kept."""
        if self._kept is None or self._stage not in self._kept:
            self._real.stop()

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    @property
    def everyone(self) -> "list[_Worker]":
        return [worker for worker in self.workers if worker is not None]

    @property
    def ready(self) -> bool:
        return any(worker.usable for worker in self.everyone)

    @property
    def restarts(self) -> int:
        return sum(policy.restarts for policy in self.policies)

    @property
    def gave_up(self) -> bool:
        """No worker can serve, and the last ones died too often in a row, or no process can be started."""
        return not self.ready and (self.policies[0].gave_up or self._real.gave_up)

    @property
    def progress(self) -> str:
        """What the workers are doing, one phrase each; the same each time, as reasons quote it."""
        states = ["waits for its restart" if worker is None else worker.state for worker in self.workers]
        return "; ".join(f"worker {number} {state}" for number, state in enumerate(states))

    # -- the real pool's thread

    def worker_ready(self, worker: WorkerProcess) -> None:
        worker.serve()

    def worker_died(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        if worker is not None:
            with self.using:
                worker.withdraw()

    def worker_replaced(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        return False  # nothing is compiled and nothing swapped in a replay

    def worker_told(self, text: str) -> None:
        """The real pool has logged it."""

    # -- the replay's thread

    def settle(self) -> None:
        """Wait until every process is ready; the stage gets them at the clock's time of now."""
        for number in range(len(self.workers)):
            self._place(number)

    @property
    def next_ns(self) -> int | None:
        """When something is due: the timer, a worker, or its replacement; None: nothing is."""
        workers = [worker.due_ns for worker in self._waited.values() if worker.due_ns is not None]
        timer = [self.at_ns] if self.at_ns else []
        return min([*timer, *workers, *self._start_at_ns.values()], default=None)

    def due(self, now_ns: int) -> list[int]:
        """Descriptors of what is due, for `StageThread.step`; responses in the order in which they came."""
        due = sorted(
            (w.due_ns, n) for n, w in self._waited.items() if w.due_ns is not None and w.due_ns <= now_ns
        )
        timer = [_TIMER] if self.at_ns and self.at_ns <= now_ns else []
        return timer + [number for _, number in due]

    def worker(self, descriptor: int) -> "_Worker | None":
        """The worker that has something to say.

        None for the timer, which is cleared, or a worker just dropped.
        """
        if descriptor == _TIMER:
            self.at_ns = _NEVER
        return self._waited.get(descriptor)

    def set(self, at_ns: int) -> None:
        self.at_ns = at_ns

    def wake(self) -> None:
        self.at_ns = 1

    def add(self, worker: "_Worker") -> None:
        self._waited[worker.number] = worker

    def drop(self, worker: "_Worker") -> bool:
        """No longer wait for this worker; False if it was dropped before."""
        return self._waited.get(worker.number) is worker and bool(self._waited.pop(worker.number))

    def close(self) -> None:
        """Nothing is held."""

    def step(self, now_ns: int) -> None:
        """Bury workers that the stage has dropped, and replace those whose time has come."""
        for number, worker in enumerate(self.workers):
            if worker is not None and worker.dead and not worker.usable:
                policy = self.policies[number]
                after_ns = policy.died(worker.ready_at_ns)
                self._start_at_ns[number] = max(after_ns, now_ns) + round(self.times.restart_ms * NS_PER_MS)
                self.workers[number] = None
                self.last_error = f"worker {number} ended: {worker.dead}"
                self._log(
                    "warn",
                    f"{self.config.name}: {self.last_error}, at {now_ns / NS_PER_S:.3f} s of the log",
                )
                self._listener.worker_died(worker, self.last_error, lasting=policy.gave_up)  # type: ignore[arg-type]
            if self._start_at_ns.get(number, now_ns + 1) <= now_ns:
                del self._start_at_ns[number]
                self._place(number)

    def _place(self, number: int) -> None:
        """Wait for the process that serves in this place, and let it.

        Without one if none can be started.
        """
        while not self._real.gave_up:
            with self.using:
                process = self._real.workers[number]
                is_ready = process is not None and process.usable and not process.is_dead()
            if process is not None and is_ready:
                worker = self.workers[number] = _Worker(process, self, self._clock())
                self._listener.worker_ready(worker)  # type: ignore[arg-type]
                return
            time.sleep(_POLL_S)
        self.last_error = self._real.last_error

    def now(self) -> int:
        return self._clock()

    def begin(
        self, tier: int, seq: int, offset: int, length: int, stream: int, *, wanted: bool
    ) -> RunTimes:
        """What the run that begins takes.

        The frame's first, its backup, and so on; practice counts as a late one.
        """
        if (stream, seq) != self._frame:
            self._frame, self._runs = (stream, seq), 0
        attempt, self._runs = self._runs, self._runs + 1
        stamp_ns = self._rings[stream].read(offset, length, seq)[0].stamp_ns
        return self._of_streams[stream].run(stamp_ns, seq, tier, attempt if wanted else max(1, attempt))


class _Worker:
    """Stands in for a `WorkerProcess` in a stage's crew.

    A run is computed at once, and its response kept until the virtual clock says that it is due. What
    no frame waits for (practice) is not computed at all. The process is used with the pool's lock: until then
    its descriptors stay open.

    Attributes:
        due_ns: virtual time of the response, or of the death; None while it has nothing to say.
        dead: why it is, "" while it lives.
        pid: its number: what a message says of it is to be the same each time.
    """

    def __init__(self, process: WorkerProcess, pool: _Pool, ready_at_ns: int) -> None:
        self.number = self.pid = process.number
        self.calibrations = pool.times.calibrations()
        self.batching = Batching()  # on the virtual clock each frame runs alone
        self.reported, self.loaded = process.reported, process.loaded
        self.usable = self.hung = self.has_run = False
        self.seq: int | None = None
        self.busy_since_ns = 0
        self.observed: dict[int, int] = {}
        self.ready_at_ns = ready_at_ns
        self.recording = self.kill_reason = self.dead = ""
        self.due_ns: int | None = None
        self._process, self._pool, self._using = process, pool, pool.using
        self._response: tuple[Response, bytes] | None = None
        self._of, self._stream, self._plan = (0, 0, 0, 0), 0, RunTimes(StepTimes())  # the last run

    def serve(self) -> None:
        self.usable = True

    def withdraw(self) -> None:
        self.usable = False

    @property
    def idle(self) -> bool:
        return self.usable and self.seq is None

    @property
    def available(self) -> bool:
        return self.usable

    @property
    def state(self) -> str:
        return "dead" if not self.usable else "idle" if self.seq is None else "busy"

    @property
    def is_ending(self) -> bool:
        """Whether it is about to die; the virtual clock makes that known at once."""
        return bool(self.dead)

    def run(  # noqa: PLR0913 - as `WorkerProcess.run`
        self,
        tier: int,
        seq: int,
        offset: int,
        length: int,
        now_ns: int,
        *,
        observe: bool,
        leave_ns: int = 0,
        missed: int = 0,
        stream: int = 0,
    ) -> bool:
        self.seq, self.busy_since_ns, hang_ms = seq, now_ns, self._pool.config.hang_ms
        plan = self._pool.begin(tier, seq, offset, length, stream, wanted=bool(leave_ns))
        took_ms = plan.steps.total_ms + plan.overhead_ms
        self._of, self._stream, self._plan = (tier, seq, offset, length), stream, plan
        if plan.ending in _TOO_LATE and leave_ns:  # it was done at some time after its answer had left
            took_ms = min(hang_ms - 1.0, (leave_ns - now_ns) / NS_PER_MS + took_ms)
        self.hung = plan.ending is Outcome.HUNG or took_ms >= hang_ms
        if self.hung or plan.ending is Outcome.CRASHED:
            self._die(f"hung: hang_ms is {hang_ms:.0f}" if self.hung else "it crashed in the log")
        elif not leave_ns:
            response = Response(Outcome.ON_TIME, tier, seq, 0, 0, 0, 0, 0, stream=stream)
            self._response = _timed(response, plan), b""
        elif (computed := self._compute(self._of, observe=observe, missed=missed)) is None:
            self._die("it died")
        else:
            self._response = _timed(computed[0], plan), computed[1]
        self.due_ns = now_ns + round(min(took_ms, hang_ms) * NS_PER_MS)
        return True

    def partial(self, seq: int, stream: int = 0) -> tuple[Response, bytes] | None:
        """What an anytime model has of a frame that is answered now.

        Of its steps the share that its time has passed.

        It then ends with the step that it is at.
        """
        whole, due_ns = None if self._response is None else self._response[0], self.due_ns
        if whole is None or due_ns is None or (seq, stream) != (self.seq, self._stream) or not whole.step:
            return None
        took_ns, passed_ns = due_ns - self.busy_since_ns, self._pool.now() - self.busy_since_ns
        step = max(whole.step * passed_ns // max(1, took_ns), int(self._plan.ending is Outcome.PARTIAL))
        found = self._compute(self._of, observe=False, missed=0, last_step=step) if step else None
        if found is None or found[0].outcome != Outcome.PARTIAL:
            return None
        inference_ms = self._plan.steps.inference_ms * step / whole.step
        plan = replace(self._plan, steps=replace(self._plan.steps, inference_ms=inference_ms))
        self._response = _timed(found[0], plan), b""
        self.due_ns = self.busy_since_ns + took_ns * (step + 1) // whole.step
        return self._response[0], found[1]

    def _compute(
        self, of: tuple[int, int, int, int], *, observe: bool, missed: int, last_step: int = 0
    ) -> tuple[Response, bytes] | None:
        """What the process answers; None if it dies of it."""
        process, received = self._process, None
        with self._using:
            sent = process.usable and process.run(
                *of,
                time.monotonic_ns(),
                observe=observe,
                missed=missed,
                last_step=last_step,
                stream=self._stream,
            )
        while sent and received is None:
            with self._using:
                if not process.usable:
                    return None
                select.select([process.frames], [], [], _LOOK_S)
                try:
                    received = process.receive()
                except EOFError:
                    return None
        return received

    def _die(self, why: str) -> None:
        """The process is to end, unless it is kept, or has ended.

        The stage learns of it when that is due.
        """
        with self._using:
            if self._process.usable and not self._pool.keeps:
                self._process.kill(why)
        self.dead, self._response = why, None

    def observe(
        self, seq: int, offset: int, length: int, now_ns: int, *, missed: int = 0, stream: int = 0
    ) -> bool:
        """Let it advance its histories, and wait until it has.

        The ring goes on faster than any live one.
        """
        if not self.usable or self.dead:
            return True
        with self._using:
            observed = self._process.observe(
                seq, offset, length, time.monotonic_ns(), missed=missed, stream=stream
            )
        while True:
            with self._using:
                if not self._process.usable or self._process.is_dead() or self._process.backlog.is_empty:
                    return observed
            time.sleep(_CATCH_UP_S)

    def receive(self) -> tuple[Response, bytes] | None:
        """The response that is due; raises `EOFError` where the worker is gone."""
        self.due_ns = None
        if self.dead:
            self.kill_reason = self.dead
            raise EOFError
        response, self._response, self.seq = self._response, None, None
        return response

    def kill(self, reason: str) -> None:
        self.usable = False
        self._die(reason)


def _timed(response: Response, plan: RunTimes) -> Response:
    steps = [
        step
        for step in ("decode", "preprocess", "inference", "postprocess")
        if getattr(response, f"{step}_ns") >= 0
    ]
    return replace(
        response, **{f"{step}_ns": round(getattr(plan.steps, f"{step}_ms") * NS_PER_MS) for step in steps}
    )
