"""A stage's worker processes.

Started, watched, killed when they hang, replaced when they die, later and later.
"""

import contextlib
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import psutil

from torchperf_ros.api.clock import NS_PER_S, Clock
from torchperf_ros.api.errors import ConfigError, ProtocolError
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.workers.calibration import Batching, Calibration
from torchperf_ros.workers.capture import Capture
from torchperf_ros.workers.control import (
    Description,
    LastWords,
    MemoryReport,
    Progress,
    Ready,
    Remark,
    Report,
    TierReport,
)
from torchperf_ros.workers.fork_server import ForkServer
from torchperf_ros.workers.frame_ring import FrameRing
from torchperf_ros.workers.package_cache import open_cache
from torchperf_ros.workers.process_setup import step_back
from torchperf_ros.workers.rolling_update import RollingUpdate
from torchperf_ros.workers.worker_process import ENDS_WITHIN_S, WorkerProcess
from torchperf_ros.workers.worker_setup import WorkerSetup
from torchperf_ros.workers.worker_state import WorkerState

_FIRST_DELAY_NS = NS_PER_S // 2
_LONGEST_DELAY_NS = 30 * NS_PER_S
_LASTING_DEATHS = 3
_PROVEN_FRAMES = 150  # of a camera of 30 Hz in 5 s; a worker of several streams handles them sooner


class RestartPolicy:
    """Exponential back-off over early deaths, those within `proven_s` of being ready.

    A worker that had served for longer, or as many frames as a camera sends in that time, is replaced at
    once, and what came before is forgotten; so is one that dies early for the first time. Each further
    early death doubles the delay, from 0.5 up to 30 s.
    After three early deaths in a row the failure is lasting: health says so, and the delay goes on growing
    as before. After an error that no restart mends the failure is lasting at once, and the delay the
    longest.
    """

    def __init__(self, clock: Clock, proven_s: float = 5.0) -> None:
        self.restarts = 0  # deaths so far
        self._clock, self._proven_ns = clock, round(proven_s * NS_PER_S)
        self._early_deaths = 0
        self._permanent = False

    def died(self, ready_at_ns: int | None, frames: int = 0) -> int:
        """A worker died that was ready at `ready_at_ns` (None: never), and had handled so many frames.

        Returns when to start its replacement, in ns.
        """
        now_ns = self._clock()
        has_served = ready_at_ns is not None and now_ns - ready_at_ns >= self._proven_ns
        proven = has_served or frames >= _PROVEN_FRAMES
        self._early_deaths = 0 if proven else self._early_deaths + 1
        self.restarts += 1
        if self._permanent:
            self._permanent, self._early_deaths = False, max(self._early_deaths, _LASTING_DEATHS)
            return now_ns + _LONGEST_DELAY_NS
        if self._early_deaths <= 1:
            return now_ns
        return now_ns + min(_FIRST_DELAY_NS << (self._early_deaths - 2), _LONGEST_DELAY_NS)

    def give_up(self) -> None:
        """Another try would fail alike, as with an adapter that does not exist.

        The next death is a lasting failure.
        """
        self._permanent = True

    @property
    def gave_up(self) -> bool:
        """Whether the workers died too often in a row to call it anything but a lasting failure."""
        return self._early_deaths >= _LASTING_DEATHS


COUNTERS = ("recompiles", "engine_errors", "eager_answers", "hits", "misses")


class TierTally:
    """Adds up over workers, those that are gone included."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._gone = [dict.fromkeys(COUNTERS, 0) for _ in tiers]
        self._out_of_memory = 0

    def left(self, worker: WorkerProcess) -> None:
        self._out_of_memory += worker.reported.out_of_memory
        for kept, last in zip(self._gone, worker.reported.tiers, strict=False):
            kept.update({name: kept[name] + getattr(last, name) for name in COUNTERS})

    def out_of_memory(self, workers: Iterable[WorkerProcess]) -> int:
        """Frames for which a tier had not enough memory."""
        return self._out_of_memory + sum(worker.reported.out_of_memory for worker in workers)

    def rows(self, workers: Iterable[WorkerProcess]) -> list[dict[str, Any]]:
        """One row per tier, see `TierFacts`; empty before any worker is ready."""
        reported = [worker.reported.tiers for worker in workers if worker.reported.tiers]
        if not reported:
            return []
        return [
            {
                **asdict(reported[0][tier]),
                **{
                    name: gone[name] + sum(getattr(tiers[tier], name) for tiers in reported)
                    for name in COUNTERS
                },
            }
            for tier, gone in enumerate(self._gone)
        ]


_TICK_MS = 50
_AFTER_ERROR_S = 0.05
_RING_FRAMES = 4  # of the largest size: what a worker that is late may still be reading
# Of those that have come: one is written while a worker reads the other, or the recorder the one before.
# Several streams of the largest size would fill the memory.
_STREAM_FRAMES = 3
_RING_HEADERS = 65_536
_TOLD = 64
_IMPORTS_WITHIN_S = 60.0  # at least: importing torch takes its time, and is no start of a worker
_DIES_WITHIN_MS = 100.0  # of its socket's end: the kernel takes a process down step by step
_COMPILING_TAKES = 10  # times as long as loading
Log = Callable[[str, str], None]  # severity ("info", "warn", "error"), text


class PoolListener(Protocol):
    """What a pool calls when workers come and go, on its own thread."""

    def worker_ready(self, worker: WorkerProcess) -> None:
        """The worker can take frames from now on."""

    def worker_died(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        """The worker is gone.

        `lasting` if its kind keeps dying. It is one of the pool's until this returns.

        None: it could not even be started.
        """

    def worker_replaced(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        """Give a worker no more frames, as another takes its place; False if it is busy with one."""

    def worker_told(self, text: str) -> None:
        """Something about a worker's models that people should know, and that is no failure of the worker."""


class WorkerPool:
    """One or two workers of a stage, a third while one is replaced, and the thread that looks after them.

    The second one is started when the first is ready: the first answer matters more. The thread spawns the
    workers and lives as long as they do, because they are made to die with the thread that started them.
    """

    def __init__(
        self,
        config: StageConfig,
        setup: WorkerSetup,
        listener: PoolListener,
        log: Log,
        ring: FrameRing | None = None,
    ) -> None:
        """Take the stage's configuration and what each worker gets at its start.

        Nothing runs before `start`.

        `ring`: another pool's, whose frames its workers read, too.

        Raises:
            ConfigError: another pool's ring, and several streams.
        """
        self.config = config
        self.description: Description | None = None
        self.last_error = ""
        self.listener = listener
        self.workers: list[WorkerProcess | None] = [None] * config.workers
        self.policies = [RestartPolicy(time.monotonic_ns) for _ in self.workers]
        self.rolling_update = RollingUpdate(config, setup, self._tell)
        self.tally = TierTally(config.tiers)
        self.capture = Capture(config.name, setup.evidence, log)
        if ring is not None and len(setup.streams) > 1:
            raise ConfigError(
                f"stage {config.name} has {len(setup.streams)} streams; no other version of its model can run"
                " beside it"
            )
        room = _RING_FRAMES * config.max_frame_bytes + _RING_HEADERS
        self.owns_ring = ring is None
        streams = len(setup.streams) or 1
        records, kept = _STREAM_FRAMES if streams > 1 else 0, (setup.black_box_mib << 20) // streams
        self.rings = (
            [FrameRing(room, room + kept, records) for _ in range(streams)] if ring is None else [ring]
        )
        self._log = log
        self._start_at_ns = [0] * config.workers
        self._start_timeout_s = setup.start_timeout_s
        self.server: ForkServer | None = None
        # of the first worker of which kit
        self._calibrated: tuple[int, tuple[Calibration, ...], Batching] | None = None
        self.unended = 0  # processes so far that SIGKILL did not end in time
        self._leaving: list[WorkerProcess] = []  # closed, and the process has not ended yet
        # Held while the pool calls its listener: until then the two versions of a stage do not
        # change places.
        self.telling = threading.Lock()
        self._told: deque[str] = deque(maxlen=_TOLD)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"pool-{config.name}", daemon=True)

    @property
    def ring(self) -> FrameRing:
        """The ring of the first stream; mostly there is no other."""
        return self.rings[0]

    @property
    def everyone(self) -> list[WorkerProcess]:
        """The workers that there are, the one that is to replace another included."""
        return [worker for worker in (*self.workers, self.rolling_update.candidate) if worker is not None]

    @property
    def unended_pids(self) -> list[int]:
        """Processes that SIGKILL has not ended yet, although there was time enough."""
        return [worker.pid for worker in list(self._leaving) if worker.life.state is WorkerState.STUCK]

    @property
    def restarts(self) -> int:
        return sum(policy.restarts for policy in self.policies)

    @property
    def gave_up(self) -> bool:
        """No worker can serve, and the last ones died too often in a row."""
        return not self.ready and self.policies[0].gave_up

    @property
    def ready(self) -> bool:
        return any(worker.usable for worker in self.everyone)

    @property
    def loaded_tiers(self) -> list[str]:
        """Names of the tiers that some worker can run: not those of scenes that are not loaded."""
        loaded = [worker.loaded for worker in self.everyone if worker.usable]
        return [
            name
            for number, name in enumerate(self.config.tiers)
            if any(number in tiers for tiers in loaded)
        ]

    @property
    def progress(self) -> str:
        words = [f"worker {number} {self.state(number)}" for number in range(len(self.workers))]
        if (candidate := self.rolling_update.candidate) is not None:
            words.append(f"new worker {candidate.state}")
        return "; ".join(filter(None, [self.rolling_update.compiling, *words]))

    def state(self, number: int) -> str:
        """What one worker is doing: loading, idle, busy, or why there is none."""
        worker = self.workers[number]
        if worker is not None:
            return worker.state
        if self.server is None or not self.server.ready:
            return "waits for torch to be imported"
        if not self.policies[number].restarts:
            return "starts when the first is ready"
        left_s = (self._start_at_ns[number] - time.monotonic_ns()) / NS_PER_S
        return "waits for its restart" + (f" in {left_s:.0f} s" if left_s >= 1 else "")

    def start(self) -> None:
        """Start the watching thread, which starts the workers, and what they are forked from."""
        self._thread.start()

    def stop(self) -> None:
        """Kill the workers, end the thread, release the memory."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.owns_ring:
            for ring in self.rings:
                ring.close()

    def why_no_room(self) -> str:
        """Why there is no memory for one more worker as large as one of these is now; "" if there is.

        Of the machine's, what only it has mapped; of a CUDA device's, what its allocator holds.
        """
        worker = next((one for one in self.workers if one is not None and one.usable), None)
        if worker is None:
            return ""
        try:
            own = psutil.Process(worker.pid).memory_full_info().uss
        except psutil.Error:  # it has just died
            return ""
        memory = worker.reported.memory_bytes
        kinds = [("", own, psutil.virtual_memory().available)]
        if {"reserved", "free"} <= memory.keys():
            kinds.append((" on the device", memory["reserved"], memory["free"]))
        return next(
            (
                f"a worker of stage {self.config.name} has {needs >> 20} MiB of its own{where},"
                f" {free >> 20} MiB are free"
                for where, needs, free in kinds
                if needs > free
            ),
            "",
        )

    def grow(self, config: StageConfig) -> None:
        """Have as many workers as this configuration asks for; any thread may call."""
        more = config.workers - len(self.workers)
        self.config = config
        self.policies += [RestartPolicy(time.monotonic_ns) for _ in range(more)]
        self._start_at_ns += [0] * more
        self.workers += [None] * more

    def _watch(self) -> None:
        step_back()
        while not self._stopping.is_set():
            if not self._guarded("looking after the workers", self._step):
                self._stopping.wait(_AFTER_ERROR_S)
        self._guarded("ending a compiler", self.rolling_update.builder.close)
        for worker in self.everyone:
            worker.kill("the node stops")
            self._guarded(
                "forgetting a capture",
                open_cache(worker.setup.cache_dir, 0).forget_findings,
                f"*.{worker.pid}",
            )
            self._guarded("ending a worker", self._release, worker)
        self.workers = [None] * len(self.workers)
        give_up_at = time.monotonic() + ENDS_WITHIN_S
        for worker in self._leaving:
            worker.reap(max(0.0, give_up_at - time.monotonic()))
            worker.forget()
        if self.server is not None:
            self._guarded("ending the fork server", self.server.close)

    def _step(self) -> None:
        """Each part is done even if another one fails."""
        self._guarded("starting workers", self._spawn_missing, time.monotonic_ns())
        if not self._guarded("waiting for news", self._wait_for_news):
            self._stopping.wait(_AFTER_ERROR_S)
        self._look_after_all()
        now_ns = time.monotonic_ns()
        if not self._guarded("a capture", self.capture.step, self.workers, now_ns):
            self.capture.give_up("an error in the node")
        if not self._guarded("replacing workers", self.rolling_update.step, self, now_ns):
            self.rolling_update.give_up("an error in the node")

    def _look_after_all(self) -> None:
        for worker in self.everyone:
            if (
                self._guarded("looking after a worker", self._look_after, worker)
                or worker not in self.everyone
            ):
                continue
            if worker.is_dead():
                self._guarded("burying a worker", self._bury, worker)
            else:
                worker.kill("it could not be looked after")
        now_ns = time.monotonic_ns()
        for worker in self._leaving:
            if worker.is_overdue(now_ns):
                self._give_up(worker)
                self._log("error", f"{self.config.name}: {worker.death_reason()}")
        self._leaving = [worker for worker in self._leaving if not worker.reap()]

    def _guarded(self, what: str, act: Callable[..., object], *given: object) -> bool:
        """The thread's boundary: an exception while handling one worker must not stop the pool's thread."""
        try:
            act(*given)
        except Exception:
            self.last_error = traceback.format_exc()
            with contextlib.suppress(Exception):  # of what writes it down, too
                self._log("error", f"{self.config.name}: {what} failed:\n{self.last_error}")
            return False
        return True

    def _spawn_missing(self, now_ns: int) -> None:
        for number, worker in enumerate(self.workers):
            first_is_up = number == 0 or self.ready
            if worker is None and now_ns >= self._start_at_ns[number] and first_is_up:
                try:
                    if self._can_fork(now_ns):
                        self.workers[number] = self.spawn(number)
                except (
                    Exception
                ) as error:  # the thread's boundary: no memory to be had, options too long, a mistake
                    self.last_error = f"worker {number} cannot be started: {type(error).__name__}: {error}"
                    if not isinstance(error, (OSError, ProtocolError)):
                        self.last_error += f"\n{traceback.format_exc()}"
                    self._log("error", f"{self.config.name}: {self.last_error}")
                    self._has_died(number, None, None, self.last_error)

    def _has_died(
        self, number: int, worker: WorkerProcess | None, ready_at_ns: int | None, reason: str
    ) -> None:
        """There is no worker at this place; say so, and when the next one is tried."""
        policy = self.policies[number]
        self._start_at_ns[number] = policy.died(
            ready_at_ns,
            # One that has found out what the next one has to do without has done its part.
            max(worker.backlog.handled, _PROVEN_FRAMES * worker.reported.found_out) if worker else 0,
        )
        if worker is not None:
            self._log("error" if policy.gave_up else "warn", f"{self.config.name}: {reason}")
        self._tell_death(worker, reason, lasting=policy.gave_up)

    def _tell_death(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        with self.telling:
            self.listener.worker_died(worker, reason, lasting=lasting)

    def replace(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        """Have the stage give a worker no more frames, as another takes its place.

        False if it is busy with one.
        """
        with self.telling:
            return self.listener.worker_replaced(worker, successor)

    def _can_fork(self, now_ns: int) -> bool:
        """Whether the fork server is up; one that has ended gets a successor.

        Raises:
            ProtocolError: it has ended, or says nothing, for no reason that a successor would do better.
        """
        server = self.server
        if server is None:
            server = self.server = ForkServer(self.config.adapter.partition(":")[0])
        if server.stuck and not self.ready:
            server.close()
        if (
            not server.ready
            and now_ns - server.started_ns > max(self._start_timeout_s, _IMPORTS_WITHIN_S) * NS_PER_S
        ):
            server.close()
        if server.ended:
            server.close()
            new = self.server = server.renewed()
            if new.why_bare != server.why_bare:
                self._log("warn", f"{self.config.name}: workers take longer to start, as {new.why_bare}")
            elif not server.ready:
                msg = "the process that imports torch ended, or was not done in time; its stderr says why"
                raise ProtocolError(server.failure or msg)
            server = new
        return server.ready

    def spawn(self, number: int) -> WorkerProcess:
        """Start a worker: of the pool's own, or beside them (`len(workers)`)."""
        assert self.server is not None
        kit = self.rolling_update.renewal.kit(candidate=number == len(self.workers))
        # The first one has to serve at once. What takes long to compile is left to those that come beside
        # it, unless no frame waits: `compile_first`.
        begins = self.ready or kit.setup.compile_first
        setup = replace(
            kit.setup, background=self.ready, compile=begins and self.rolling_update.may_compile
        )
        if self.description is not None:  # a worker that finds no GPU any more must not come up on the CPU
            setup = replace(setup, device_before=self.description.device)
        if self._calibrated is not None and self._calibrated[0] == kit.number:
            _, calibrations, batching = self._calibrated
            setup = replace(setup, calibrations=calibrations, batching=batching)
        worker = WorkerProcess(
            number, setup, self.rings, self.config.max_frame_bytes, self.server, self._look_after_all
        )
        worker.generation = kit.number
        return worker

    def dismiss(self, worker: WorkerProcess, why: str) -> None:
        self.tally.left(worker)
        worker.kill(why)
        self._log("info", f"{self.config.name}: worker of pid {worker.pid} ended: {why}")
        self._release(worker)

    def _tell(self, text: str) -> None:
        """Say something of the models, once: the next worker finds the same."""
        if text not in self._told:
            self._told.append(text)
            self._log("warn", f"{self.config.name}: {text}")
            self.listener.worker_told(text)

    # -- news

    def _wait_for_news(self) -> None:
        poll = select.poll()
        if self.server is not None and not self.server.ended:
            poll.register(self.server.fileno(), select.POLLIN)
        if self.rolling_update.builder.news is not None:
            poll.register(self.rolling_update.builder.news, select.POLLIN)
        for worker in self.everyone:
            for descriptor in worker.speaking:
                poll.register(descriptor, select.POLLIN)
        poll.poll(_TICK_MS)
        if self.server is not None:
            self.server.step()

    def _look_after(self, worker: WorkerProcess) -> None:
        """Take in what a worker says; kill it if it hangs; bury it if it is dead."""
        dead = worker.is_dead()
        self._print_output(worker)
        try:
            while (report := worker.receive_report()) is not None:
                self._take(worker, report)
        except ProtocolError as error:
            worker.kill(str(error))
        now_ns = time.monotonic_ns()
        if dead:
            self._bury(worker)
            return
        if worker.kill_reason:  # it is on its way out
            if worker.is_overdue(now_ns):
                self._give_up(worker)
                self._bury(worker)
            return
        if worker.lost_ms(now_ns) > _DIES_WITHIN_MS:
            worker.kill("it closed its socket and did not exit")
            return
        stuck_ms = worker.stuck_ms(now_ns)
        if stuck_ms > self.config.hang_ms and worker is not self.capture.busy_with:
            doing = "observing a frame" if worker.seq is None else f"on frame {worker.seq}"
            hang_ms = self.config.hang_ms
            worker.kill(f"hung: {stuck_ms:.0f} ms {doing}, hang_ms is {hang_ms:.0f}", hung=True)
        if worker.ready_at_ns is None:
            if not self.ready:
                worker.hurry()
            timeout_s = self._start_timeout_s * (_COMPILING_TAKES if worker.setup.compiles else 1)
            if now_ns - worker.started_ns > timeout_s * NS_PER_S:
                worker.kill(f"not ready after {timeout_s:.0f} s ({worker.reported.progress})")

    def _print_output(self, worker: WorkerProcess) -> None:
        name = f"{self.config.name} worker {worker.number} (pid {worker.pid})"
        lines, left_out = worker.read_lines(time.monotonic_ns())
        for line in lines:
            self._log("warn", f"{name}: {line}")
        if left_out:
            self._log("warn", f"{name}: and {left_out} bytes more, which are not shown")

    def _take(self, worker: WorkerProcess, report: Report) -> None:
        reported = worker.reported
        match report:
            case Description():
                if self.description not in {None, report}:
                    first = self.description
                    worker.kill(f"its adapter describes itself as {report}, the first one as {first}")
                    return
                self.description = report
            case Progress(text):
                reported.progress = text
            case Ready(calibrations, tiers, missing, batching):
                reported.calibrations, reported.tiers, reported.missing = calibrations, tiers, missing
                reported.batching = batching
                self._ready(worker)
            case TierReport(tiers, out_of_memory):
                reported.tiers, reported.out_of_memory = tiers, out_of_memory
            case MemoryReport(bytes=sizes):
                reported.memory_bytes = sizes
            case Remark(text, alert=True):
                self._tell(text)
            case Remark(text):
                self._log("warn", f"{self.config.name} worker {worker.number}: {text}")
            case LastWords():
                self._ends(worker, report)
            case _:
                self.capture.take(worker, report, time.monotonic_ns())

    def _ends(self, worker: WorkerProcess, words: LastWords) -> None:
        worker.reported.error = self.last_error = words.text
        worker.reported.found_out = words.found_out
        worker.reported.out_of_memory += words.out_of_memory
        if words.without_graphs:
            self.rolling_update.renewal.without_graphs(worker.generation)
            self._tell(f"{words.text}; the next worker runs without CUDA graphs")
        # a candidate is not tried again anyway
        if words.permanent and worker is not self.rolling_update.candidate:
            self.policies[worker.number].give_up()

    def _ready(self, worker: WorkerProcess) -> None:
        """Let it serve, unless it came with a package that is too slow to be swapped in."""
        refusal = self.rolling_update.why_too_slow(worker, self.config.budget_ms)
        if refusal:
            worker.kill(refusal)
            return
        if self._calibrated is None or self._calibrated[0] != worker.generation:
            self._calibrated = worker.generation, worker.calibrations, worker.batching
        worker.ready_at_ns = time.monotonic_ns()
        with self.telling:
            self.listener.worker_ready(worker)
        self.rolling_update.complete(worker)

    def _bury(self, worker: WorkerProcess) -> None:
        """Have nothing more to do with a worker that is dead or does not end.

        Once, even if a part of it fails.
        """
        reason = f"worker {worker.number} (pid {worker.pid}) is gone; looking for the reason failed"
        try:
            reason = self.last_error = worker.death_reason()
            self.tally.left(worker)
        finally:
            try:
                if worker is self.rolling_update.candidate:
                    self._tell_death(worker, reason, lasting=False)
                else:
                    self._has_died(worker.number, worker, worker.ready_at_ns, reason)
            finally:  # until now it was one of the pool's: the stage asks whose it is
                if worker is self.rolling_update.candidate:
                    self.rolling_update.lost(reason)
                else:
                    self.workers[worker.number] = None
                self._release(worker)

    def _give_up(self, worker: WorkerProcess) -> None:
        """Do not wait any longer for the end of a process that SIGKILL does not end."""
        worker.give_up()
        self.unended += 1

    def _release(self, worker: WorkerProcess) -> None:
        """Close a worker that is ending, and reap it as soon as it has ended.

        Nothing else waits for that.
        """
        worker.close()
        if not worker.reap():
            self._leaving.append(worker)
