"""How a stage's worker is asked for evidence, a profile or a look at its memory, while the stage keeps its deadlines.

What takes long (starting to record, writing) happens while the worker gets no frames and another one
answers; in between it serves, and records what it does. With one worker only, the fallbacks answer
meanwhile.
"""

import contextlib
import enum
from collections.abc import Callable, Sequence
from typing import Any

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import ConfigError
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
        self, stage: str, evidence: dict[str, Any] | None, log: Callable[[str, str], None]
    ) -> None:
        """Take the parameters of the evidence folder, None if there is none."""
        # how the last one ended: a path and what it shows, or why there is none; "" before the first
        self.last = ""
        self._stage, self._evidence, self._log = stage, evidence, log
        self._wanted = self._what = ""
        self._worker: WorkerProcess | None = None
        self._phase = _Phase.CLEARING
        self._command = ""  # the one that is being sent, or was last
        self._since_ns = 0

    @property
    def state(self) -> str:
        """What is being done, for `/diagnostics`; "" if nothing is."""
        worker = self._worker
        return self._wanted if worker is None else worker.away or worker.recording

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
                self._clear_for("record", now_ns)
        elif worker not in workers or not worker.usable:
            self._end(f"the worker is gone: {worker.kill_reason or 'it died, or was replaced'}")
        else:
            if self._phase is _Phase.ASKED and not _ready(workers):
                with contextlib.suppress(PermissionError):  # it gives way to the other one, which is gone
                    set_nice(worker.pid, worker.nice)
            self._advance(worker, now_ns)

    def _advance(self, worker: WorkerProcess, now_ns: int) -> None:
        waited_ns = now_ns - self._since_ns
        if (
            self._phase is _Phase.CLEARING
            and worker.seq is None
            and worker.caught_up
            and waited_ns >= _SETTLE_NS
        ):
            fields = {"what": self._what, "evidence": self._evidence} if self._command == "record" else {}
            if worker.command(self._command, **fields):
                self._enter(_Phase.ASKED, now_ns)
        elif self._phase is _Phase.RETURNING and worker.caught_up:
            if self._command == "record":
                self._enter(_Phase.RECORDING, now_ns)
            else:
                self._end("")
        elif self._phase is _Phase.RECORDING and waited_ns > _LONGEST_WINDOW_NS:  # too few frames came
            self._clear_for("finish", now_ns)
        elif self._phase is _Phase.ASKED and waited_ns > _LONGEST_PAUSE_NS:
            worker.kill(f"{self._what}: no answer to {self._command!r} after {waited_ns / NS_PER_S:.0f} s")

    def take(self, worker: WorkerProcess, message: dict[str, Any], now_ns: int) -> None:
        """Take what the worker says of it."""
        if worker is not self._worker:
            return  # it was given up meanwhile; what it wrote is there all the same
        if message["kind"] == "recorded":
            self._clear_for("finish", now_ns)
            return
        if message["error"]:
            self._command = "finish"  # there is nothing to record
            self.last = f"{self._what}: {message['error'].strip().splitlines()[-1]}"
            self._log("warn", f"{self._stage}: {self._what} failed: {message['error']}")
        elif message["kind"] == "evidence":
            self.last = f"{message['path']}: {message['summary']}"
            self._log("info", f"{self._stage}: {self._what} in {self.last}")
        worker.has_not_waited(now_ns)  # what it was given to observe meanwhile has
        self._enter(_Phase.RETURNING, now_ns)

    def give_up(self, problem: str) -> None:
        """End it, if there is one, whatever it was doing."""
        if self._worker is not None:
            self._end(problem)
        self._wanted = ""

    def _clear_for(self, command: str, now_ns: int) -> None:
        """Give the worker no more frames, as it is to do something else."""
        self._command = command
        self._enter(_Phase.CLEARING, now_ns)

    def _enter(self, phase: _Phase, now_ns: int) -> None:
        """Go on; the worker takes frames only while it records."""
        assert self._worker is not None
        self._phase, self._since_ns = phase, now_ns
        words = f"{self._what}: {phase.value}"
        recording = phase is _Phase.RECORDING
        self._worker.recording, self._worker.away = (words, "") if recording else ("", words)

    def _end(self, problem: str) -> None:
        """Nothing more to do with the worker, which takes frames as before."""
        assert self._worker is not None
        if problem:
            self.last = f"{self._what}: {problem}"
            self._log("warn", f"{self._stage}: {self.last}")
        self._worker.recording = self._worker.away = ""
        self._worker, self._wanted = None, ""
