"""How a stage's worker is asked for evidence, a profile or its memory, while deadlines are kept.

What takes long (starting to record, writing) happens while the worker gets no frames and another one
answers; in between it serves, and records what it does. With one worker only, the fallbacks answer
meanwhile.
"""

import contextlib
import enum
from collections.abc import Callable, Sequence

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.workers.control import (
    BeginCapture,
    CaptureBegan,
    CaptureDone,
    CaptureFull,
    Command,
    EndCapture,
    Report,
)
from torchperf_ros.workers.incident_folder import EvidenceLimits
from torchperf_ros.workers.process_setup import set_nice
from torchperf_ros.workers.worker_process import WorkerProcess

# a frame that was being handed over when the worker was taken out has arrived by then
_SETTLE_NS = NS_PER_S // 50
_LONGEST_WINDOW_NS = 15 * NS_PER_S
_LONGEST_PAUSE_NS = 120 * NS_PER_S
_SETTLED_NS = 30 * NS_PER_S


class _Phase(enum.Enum):
    """Where a capture stands; the worker goes round twice: to begin, and to finish."""

    CLEARING = "waits for the end of its frame"
    ASKED = "works"
    RETURNING = "catches up"
    RECORDING = "records"


def _ready(workers: Sequence[WorkerProcess | None]) -> list[WorkerProcess]:
    return [worker for worker in workers if worker is not None and worker.available]


class Capture:
    """One at a time per stage. `ask` may be called on any thread, the rest on the pool's."""

    def __init__(
        self, stage: str, evidence: EvidenceLimits | None, log: Callable[[str, str], None]
    ) -> None:
        """Take the parameters of the evidence folder, None if there is none."""
        # how the last one ended: a path and what it shows, or why there is none; "" before the first
        self.last = ""
        self._stage, self._evidence, self._log = stage, evidence, log
        self._wanted = self._what = ""
        self._worker: WorkerProcess | None = None
        self._phase = _Phase.CLEARING
        self._ends = False  # whether the worker is to end it, or has, rather than to begin it
        self._since_ns = 0

    @property
    def state(self) -> str:
        """What is being done, for `/diagnostics`; "" if nothing is."""
        return (self._worker.capturing if self._worker is not None else "") or self._wanted

    @property
    def busy_with(self) -> WorkerProcess | None:
        """The worker that is busy with evidence and not with frames, for which this sets the bound.

        Mostly None.
        """
        return self._worker if self._phase is _Phase.ASKED else None

    def ask(
        self, what: str, workers: Sequence[WorkerProcess | None], *, settled_at_ns: int | None = None
    ) -> str:
        """Have a worker record; returns at once, with what will happen in words.

        Args:
            what: `profile` or `memory`.
            workers: the pool's.
            settled_at_ns: a monotonic time: refuse if the stage did not have all its workers, two or more,
                for half a minute by then. Frames would be left to the fallbacks, or to a worker whose first
                runs are slow.

        Raises:
            ConfigError: it is not possible now; the message says why.
        """
        stage, ready = f"stage {self._stage}", _ready(workers)
        why_not = ""
        if self._evidence is None:
            why_not = "has no evidence folder"
        elif self.state:
            why_not = f"is busy with one already ({self.state}); try again later"
        elif not ready:
            why_not = "has no worker that is ready; try again later"
        elif settled_at_ns is not None and len(ready) == 1:
            why_not = "has one worker only, and frames would be left to the fallbacks"
        elif settled_at_ns is not None and any(
            settled_at_ns - (w.ready_at_ns or 0) < _SETTLED_NS for w in ready
        ):
            why_not = f"has had all its workers for less than {_SETTLED_NS // NS_PER_S} s"
        if why_not:
            raise ConfigError(f"{stage} {why_not}")
        self._wanted = what
        alone = (
            "; it has one worker only, fallbacks answer while that starts and writes"
            if len(ready) == 1
            else ""
        )
        return f"{stage}: {what} of one worker{alone}"

    def step(self, workers: Sequence[WorkerProcess | None], now_ns: int) -> None:
        """Take the next step, if there is one to take.

        The pool's thread calls this every 50 ms or more often.
        """
        worker = self._worker
        if worker is None:
            if self._wanted and (ready := _ready(workers)):
                self._worker = max(ready, key=lambda each: each.busy_since_ns)  # the one that serves
                self._what = self._wanted
                if not self._clear(now_ns, ends=False):
                    self._worker = None
        elif worker not in workers or not worker.usable:
            self._end(f"the worker is gone: {worker.kill_reason or 'it died, or was replaced'}")
        else:
            if self._phase is _Phase.ASKED and not _ready(workers):
                with contextlib.suppress(PermissionError):  # it gives way to the other one, which is gone
                    set_nice(worker.pid, worker.setup.nice)
            self._advance(worker, now_ns)

    def _advance(self, worker: WorkerProcess, now_ns: int) -> None:
        waited_ns = now_ns - self._since_ns
        if self._phase is _Phase.CLEARING:
            is_free = worker.seq is None and worker.backlog.is_empty and waited_ns >= _SETTLE_NS
            if is_free and worker.command(self._command()):
                self._enter(_Phase.ASKED, now_ns)
        elif self._phase is _Phase.RETURNING:
            if worker.backlog.is_empty and self._ends:
                self._end("")
            elif worker.backlog.is_empty:
                self._enter(_Phase.RECORDING, now_ns)
        elif self._phase is _Phase.RECORDING:
            if waited_ns > _LONGEST_WINDOW_NS:  # too few frames came
                self._clear(now_ns, ends=True)
        elif waited_ns > _LONGEST_PAUSE_NS:
            missing = "written" if self._ends else "begun"
            worker.kill(f"{self._what}: not {missing} after {waited_ns / NS_PER_S:.0f} s")

    def _command(self) -> Command:
        if self._ends or self._evidence is None:
            return EndCapture()
        return BeginCapture(self._what, self._evidence)

    def take(self, worker: WorkerProcess, report: Report, now_ns: int) -> None:
        if worker is not self._worker:
            return  # it was given up meanwhile; what it wrote is there all the same
        match report:
            case CaptureFull():
                self._clear(now_ns, ends=True)
                return
            case CaptureBegan(error=error) | CaptureDone(error=error) if error:
                self._ends = True  # there is nothing to record
                self.last = f"{self._what}: {error.strip().splitlines()[-1]}"
                self._log("warn", f"{self._stage}: {self._what} failed: {error}")
            case CaptureDone(path=path, summary=summary):
                self.last = f"{path}: {summary}"
                self._log("info", f"{self._stage}: {self._what} in {self.last}")
        worker.backlog.wait_from(now_ns)  # what it was given to observe meanwhile has
        self._enter(_Phase.RETURNING, now_ns)

    def give_up(self, problem: str) -> None:
        if self._worker is not None:
            self._end(problem)
        self._wanted = ""

    def _clear(self, now_ns: int, *, ends: bool) -> bool:
        """Give the worker no more frames, as it is to do something else; False: not now."""
        self._ends = ends
        return self._enter(_Phase.CLEARING, now_ns)

    def _enter(self, phase: _Phase, now_ns: int) -> bool:
        """Go on; the worker takes frames only while it records. False: it has just ended, or is held."""
        assert self._worker is not None
        words = f"{self._what}: {phase.value}"
        can = self._worker.capture(words, serves=phase is _Phase.RECORDING)
        if can:
            self._phase, self._since_ns = phase, now_ns
        return can

    def _end(self, problem: str) -> None:
        assert self._worker is not None
        if problem:
            self.last = f"{self._what}: {problem}"
            self._log("warn", f"{self._stage}: {self.last}")
        self._worker.capture("", serves=True)
        self._worker, self._wanted = None, ""
