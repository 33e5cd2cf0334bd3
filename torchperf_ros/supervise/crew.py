"""A stage's worker processes: started, watched, killed when they hang, replaced when they die."""

import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.config import StageConfig
from torchperf_ros.core.errors import ProtocolError
from torchperf_ros.core.restart_policy import RestartPolicy
from torchperf_ros.core.tier_ladder import Calibration
from torchperf_ros.supervise.frame_ring import FrameRing
from torchperf_ros.supervise.inquiry import Inquiry
from torchperf_ros.supervise.realtime import step_back
from torchperf_ros.supervise.succession import Succession
from torchperf_ros.supervise.tier_tally import TierTally
from torchperf_ros.supervise.worker_process import Description, WorkerProcess

_TICK_MS = 50
_RING_FRAMES = 4  # of the largest size: what a worker that is late may still be reading
_RING_HEADERS = 65_536
_TOLD = 64
_COMPILING_TAKES = 10  # times as long as loading
_OUR_ERROR = "an error in the node"
Log = Callable[[str, str], None]  # severity ("info", "warn", "error"), text


class CrewListener(Protocol):
    """What a crew tells its stage; called on the crew's thread."""

    def worker_ready(self, worker: WorkerProcess) -> None:
        """The worker can take frames from now on."""

    def worker_died(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        """The worker is gone; `lasting` if its kind keeps dying. Its descriptors close when this returns.

        None: it could not even be started.
        """

    def worker_replaced(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        """Give a worker no more frames, as another takes its place; False if it is busy with one."""

    def worker_told(self, text: str) -> None:
        """Something about a worker's models that people should know, and that is no failure of the worker."""


class Crew:
    """One or two workers of a stage, for a while one more that is to replace one, and the thread that looks after them.

    The second one is started when the first is ready: the first answer matters more. The thread spawns the workers
    and lives as long as they do, because they are made to die with the thread that started them.
    """

    def __init__(self, config: StageConfig, setup: dict[str, Any], listener: CrewListener, log: Log) -> None:
        """Take the stage's configuration and what each worker is told at its start; nothing runs before `start`."""
        self.config = config
        self.description: Description | None = None
        self.last_error = ""
        self.workers: list[WorkerProcess | None] = [None] * config.workers
        self.policies = [RestartPolicy(time.monotonic_ns) for _ in self.workers]
        self.succession = Succession(config, setup, self._tell)
        self.tally = TierTally(config.tiers)
        self.inquiry = Inquiry(config.name, setup.get("evidence"), log)
        self.ring = FrameRing(_RING_FRAMES * config.max_frame_bytes + _RING_HEADERS)
        self._result_bytes = config.max_frame_bytes
        self._listener = listener
        self._log = log
        self._start_at_ns = [0] * config.workers
        self._start_timeout_s = float(setup["start_timeout_s"])
        self._told: deque[str] = deque(maxlen=_TOLD)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"crew-{config.name}", daemon=True)

    @property
    def everyone(self) -> list[WorkerProcess]:
        """The workers that there are, the one that is to replace another included."""
        return [worker for worker in (*self.workers, self.succession.candidate) if worker is not None]

    @property
    def restarts(self) -> int:
        """Workers replaced so far."""
        return sum(policy.restarts for policy in self.policies)

    @property
    def gave_up(self) -> bool:
        """No worker can serve, and the last ones died too often in a row."""
        return not self.ready and self.policies[0].gave_up

    @property
    def ready(self) -> bool:
        """Whether any worker can serve."""
        return any(worker.usable for worker in self.everyone)

    @property
    def progress(self) -> str:
        """What the workers are doing, one phrase each."""
        words = [f"worker {number} {self.state(number)}" for number in range(len(self.workers))]
        if (candidate := self.succession.candidate) is not None:
            words.append(f"new worker {candidate.state}")
        return "; ".join([self.succession.compiling, *words] if self.succession.compiling else words)

    def state(self, number: int) -> str:
        """What one worker is doing: loading, idle, busy, or why there is none."""
        worker = self.workers[number]
        if worker is not None:
            return worker.state
        return "waits for its restart" if self.policies[number].restarts else "starts when the first is ready"

    def start(self) -> None:
        """Start the watching thread, which starts the workers."""
        self._thread.start()

    def stop(self) -> None:
        """Kill the workers, end the thread, release the memory."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self.ring.close()

    def _watch(self) -> None:
        step_back()
        while not self._stopping.is_set():
            now_ns = time.monotonic_ns()
            self._spawn_missing(now_ns)
            self._wait_for_news()
            for worker in self.everyone:
                try:
                    self._look_after(worker)
                except Exception:  # the thread's boundary: one worker's nonsense must not leave the others alone
                    self.last_error = traceback.format_exc()
                    self._log("error", f"{self.config.name}: looking after a worker failed:\n{self.last_error}")
                    worker.kill("it could not be looked after")
            now_ns, replaced = time.monotonic_ns(), self._listener.worker_replaced
            try:
                self.inquiry.step(self.workers, now_ns)
            except Exception:  # likewise: what people would like to know must not end what is good
                self._log("error", f"{self.config.name}: an inquiry failed:\n{traceback.format_exc()}")
                self.inquiry.give_up(_OUR_ERROR)
            try:
                self.succession.step(self.workers, now_ns, self._spawn, replaced, self._dismiss)
            except Exception:  # likewise: nor must what could be better
                self._log("error", f"{self.config.name}: replacing workers failed:\n{traceback.format_exc()}")
                self.succession.give_up(_OUR_ERROR)
        self.succession.stop()
        for worker in self.everyone:
            worker.kill("the node stops")
            worker.close()
        self.workers = [None] * len(self.workers)

    def _spawn_missing(self, now_ns: int) -> None:
        for number, worker in enumerate(self.workers):
            first_is_up = number == 0 or self.ready
            if worker is None and now_ns >= self._start_at_ns[number] and first_is_up:
                try:
                    self.workers[number] = self._spawn(number)
                except Exception as error:  # the thread's boundary: no memory to be had, options too long, a mistake
                    self.last_error = f"worker {number} cannot be started: {type(error).__name__}: {error}"
                    if not isinstance(error, (OSError, ProtocolError)):
                        self.last_error += f"\n{traceback.format_exc()}"
                    self._log("error", f"{self.config.name}: {self.last_error}")
                    policy = self.policies[number]
                    self._start_at_ns[number] = policy.died(None)
                    self._listener.worker_died(None, self.last_error, lasting=policy.gave_up)

    def _spawn(self, number: int) -> WorkerProcess:
        generation = self.succession.renewal.generation
        # the first one has to serve at once; what takes long to compile is left to those that come beside it, unless
        # nobody waits: `compile_first`
        begins = self.ready or bool(self.succession.renewal.setup.get("compile_first"))
        compiles = begins and self.succession.may_compile
        setup = {**self.succession.renewal.setup, "background": self.ready, "compile": compiles}
        worker = WorkerProcess(number, setup, self.ring, self._result_bytes)
        worker.generation = generation
        return worker

    def _dismiss(self, worker: WorkerProcess, why: str) -> None:
        self.tally.left(worker)
        worker.kill(why)
        self._log("info", f"{self.config.name}: worker of pid {worker.pid} ended: {why}")
        worker.close()

    def _tell(self, text: str) -> None:
        """Say something of the models, once: the next worker finds the same."""
        if text in self._told:
            return
        self._told.append(text)
        self._log("warn", f"{self.config.name}: {text}")
        self._listener.worker_told(text)

    # -- news ---------------------------------------------------------------------------------------------------------

    def _wait_for_news(self) -> None:
        poll = select.poll()
        for descriptor in self.succession.news:
            poll.register(descriptor, select.POLLIN)
        for worker in self.everyone:
            for descriptor in worker.speaking:
                poll.register(descriptor, select.POLLIN)
        poll.poll(_TICK_MS)

    def _look_after(self, worker: WorkerProcess) -> None:
        """Take in what a worker says; kill it if it hangs; bury it if it is dead."""
        dead = worker.is_dead()
        self._print_output(worker)
        try:
            while (message := worker.receive_control()) is not None:
                self._take(worker, message)
        except ProtocolError as error:
            worker.kill(str(error))
        if dead:
            self._bury(worker)
            return
        now_ns = time.monotonic_ns()
        if worker.kill_reason:
            return  # it is on its way out
        stuck_ms = worker.stuck_ms(now_ns)
        if stuck_ms > self.config.hang_ms and not worker.away:
            doing = "observing a frame" if worker.seq is None else f"on frame {worker.seq}"
            worker.hung = True
            worker.kill(f"hung: {stuck_ms:.0f} ms {doing}, hang_ms is {self.config.hang_ms:.0f}")
        if worker.ready_at_ns is None and not self.ready:
            worker.hurry()
        timeout_s = self._start_timeout_s * (_COMPILING_TAKES if worker.compiles else 1)
        if worker.ready_at_ns is None and now_ns - worker.started_ns > timeout_s * NS_PER_S:
            worker.kill(f"not ready after {timeout_s:.0f} s ({worker.progress})")

    def _print_output(self, worker: WorkerProcess) -> None:
        for line in worker.read_output().decode(errors="replace").splitlines():
            if line.strip():
                self._log("warn", f"{self.config.name} worker {worker.number} (pid {worker.pid}): {line}")

    def _take(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "hello":
            inputs = tuple((str(topic), str(name)) for topic, name in message["inputs"])
            found = Description(inputs, message["output"], message["observes"], message["device"])
            if self.description is not None and found != self.description:
                worker.kill(f"its adapter describes itself as {found}, the first one as {self.description}")
                return
            worker.description = self.description = found
        elif kind == "progress":
            worker.progress = message["text"]
        elif kind == "ready":
            worker.calibrations = [Calibration(*pair) for pair in message["calibrations"]]
            worker.tiers, worker.missing = message["tiers"], message["missing"]
            self._ready(worker)
        elif kind == "tiers":
            worker.tiers, worker.out_of_memory = message["tiers"], message["out_of_memory"]
        elif kind == "anomaly":
            self._tell(message["text"])
        elif kind in {"recording", "recorded", "evidence"}:
            self.inquiry.take(worker, message, time.monotonic_ns())
        elif kind == "memory":
            worker.memory_bytes = message["bytes"]
        elif kind == "error":
            worker.error = self.last_error = message["text"]
            if message["permanent"]:
                self.policies[worker.number].give_up()
        elif kind == "warn":
            self._log("warn", f"{self.config.name} worker {worker.number}: {message['text']}")
        else:
            worker.kill(f"unknown control message {kind!r}")

    def _ready(self, worker: WorkerProcess) -> None:
        """Let it serve, unless it came with a package that is too slow to be swapped in."""
        refusal = self.succession.why_too_slow(worker, self.config.budget_ms)
        if refusal:
            worker.kill(refusal)
            return
        worker.ready_at_ns = time.monotonic_ns()
        self._listener.worker_ready(worker)
        self.succession.complete(worker)

    def _bury(self, worker: WorkerProcess) -> None:
        self.tally.left(worker)
        reason = worker.death_reason()
        self.last_error = reason
        if worker is self.succession.candidate:
            self.succession.lost(worker, reason)
            self._listener.worker_died(worker, reason, lasting=False)
            worker.close()
            return
        policy = self.policies[worker.number]
        self._start_at_ns[worker.number] = policy.died(worker.ready_at_ns)
        self.workers[worker.number] = None
        worker.usable = False
        self._log("error" if policy.gave_up else "warn", f"{self.config.name}: {reason}")
        self._listener.worker_died(worker, reason, lasting=policy.gave_up)
        worker.close()
