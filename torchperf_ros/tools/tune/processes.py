"""The processes in which tuning tries: one that is shared as long as nothing fails in it, and one for each compiled.

What fails takes its process along: after an error, a crash or a hang the next job goes to another one.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.tools.tune.trial import MEASURING, TrialOutcome
from torchperf_ros.workers.compile_process import CompileProcess

_DOES = "torchperf_ros.tools.tune.trial_run"
# With fewer cores a spare process would take its start from what is built at the same time.
_CORES_FOR_SPARE = 3


class TrialProcesses:
    """Hands jobs to processes, see `trial_run`; it starts each, and ends it with all that it spawned.

    Where there are cores to spare, the next process gets ready while the present one builds. It stands still while that
    one measures.

    Attributes:
        started: how many processes there were.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        """Take what every process starts with; it is started when there is something to do."""
        self._job = job
        self._ready: dict[str, str] = {}
        self._shared: _TrialProcess | None = None
        self._spare: _TrialProcess | None = None
        self.started = 0

    def keep_spare(self, tier: str, cores: int) -> None:
        """Have, from now on, a spare process with this tier's model, on a machine with enough cores."""
        self._ready = {"tier": tier} if cores >= _CORES_FOR_SPARE else {}

    def ask(
        self, job: dict[str, Any], timeout_s: float, says: Callable[[str], None], *, alone: bool = False
    ) -> dict[str, Any]:
        """The answer to a job, by a process that it has `alone`, or by the shared one.

        It is of the kind `crashed` or `hung` where no other came.
        """
        process = (None if alone else self._shared) or self._spare or self._start()
        if process is self._spare:
            self._spare = None
        if not alone:
            self._shared = process
        if self._ready and self._spare is None:
            self._spare = self._start(**self._ready)
        goes_on = False
        try:
            answer = self._answer(process, job, timeout_s, says)
            goes_on = answer.get("goes_on", False) and not alone
        finally:
            if not goes_on:
                self._shared = self._shared if alone else None
                process.close()
        return answer

    def _answer(
        self, process: "_TrialProcess", job: dict[str, Any], timeout_s: float, says: Callable[[str], None]
    ) -> dict[str, Any]:
        doing = "starting"
        says(doing)
        process.send(job)
        try:
            for message in process.messages(timeout_s):
                if message["kind"] != "step":
                    return message
                doing = message["text"]
                self._hold_spare(doing == MEASURING)
                says(doing)
            reason = process.death_reason() or "the trial process ended without a word"
        except TimeoutError:
            text = f"no end after {timeout_s:.0f} s, while {doing}; killed"
            return {"kind": TrialOutcome.HUNG, "text": text}
        except ProtocolError as error:
            reason = str(error)
        finally:
            self._hold_spare(False)
        return {"kind": TrialOutcome.CRASHED, "text": f"while {doing}: {reason}"}

    def _start(self, **ready: str) -> "_TrialProcess":
        self.started += 1
        return _TrialProcess({**self._job, **ready})

    def _hold_spare(self, held: bool) -> None:
        if self._spare is not None:
            self._spare.hold(held)

    def close(self) -> None:
        for process in (self._shared, self._spare):
            if process is not None:
                process.close()
        self._shared = self._spare = None


class _TrialProcess(CompileProcess):
    """One of them, with a folder of its own.

    What its compilers keep on disk goes with it: compile seconds are those of a first time.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torchperf_", ignore_cleanup_errors=True)
        own = {"tiers": [], "does": _DOES, "folder": self._folder.name, "started_ns": time.monotonic_ns()}
        super().__init__({**job, **own}, background=False, takes_more=True)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()
