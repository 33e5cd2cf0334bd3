"""A process that compiles: spawned at low priority or not, heard line by line, killed as a group."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from torchperf_ros.core.errors import ProtocolError

_TAIL = 4_000
_END_S = 10.0


class CompileProcess:
    """Runs one job by `python -m`, by default `torchperf_ros.worker.compile_main`'s.

    That one says JSON objects, one per line: `kind` is `progress` (text), `tier` (name, step), `built` (tier, package,
    manifest), `failed` (tier, text) or `done`. Whatever the compilers print is kept for `death_reason`.

    Attributes:
        news: descriptor that is readable when it says something or has ended.
        pid: of the process, which leads a group of its own (compilers spawn compilers).
    """

    def __init__(
        self, job: dict[str, Any], *, background: bool, module: str = "torchperf_ros.worker.compile_main"
    ) -> None:
        """Spawn it and hand it its job; the spawning thread must outlive it, as it dies with that.

        Args:
            job: adapter, options, device, threads, tiers, build, cache_dir, cache_mib, see `compile_main`.
            background: at the lowest priority, where a vehicle drives meanwhile.
            module: what is run: `..._main`, which takes a job on stdin and a descriptor for what it says.
        """
        self._buffer = self._said = b""
        job_json = json.dumps({**job, "background": background}).encode()
        self._name = module.rpartition(".")[2].removesuffix("_main")
        self.news, theirs = os.pipe()
        with contextlib.ExitStack() as given_away, contextlib.ExitStack() as on_failure:
            given_away.callback(os.close, theirs)
            on_failure.callback(os.close, self.news)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs)],
                pass_fds=(theirs,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            on_failure.pop_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self._output_fd = self._process.stdout.fileno()
        os.set_blocking(self._output_fd, False)
        os.set_blocking(self.news, False)
        with contextlib.suppress(BrokenPipeError):  # it died at once; its end says why
            self._process.stdin.write(job_json)
            self._process.stdin.close()

    def listen(self) -> list[dict[str, Any]] | None:
        """What it has said since the last call, None once it has ended.

        Raises:
            ProtocolError: it says something that is no JSON object.
        """
        self._take_output()
        try:
            data = os.read(self.news, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            msg = f"the {self._name} process said {lines!r}: {error}"
            raise ProtocolError(msg) from error
        if not all(isinstance(message, dict) for message in messages):
            msg = f"the {self._name} process said {lines!r}: not JSON objects"
            raise ProtocolError(msg)
        return messages

    def _take_output(self) -> None:
        """Take what was printed, so that nobody waits for room to print more; the end of it is kept."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output_fd, 65_536):
                self._said = (self._said + data)[-_TAIL:]

    def death_reason(self) -> str:
        """How it ended, "" if well; with the last that was printed. Waits for its end, but not for ever."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"the {self._name} process has nothing more to say, but does not end"
        if code == 0:
            return ""
        self._take_output()  # what it printed since, and that was its last words
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        said = self._said.decode(errors="replace").strip()
        return f"the {self._name} process ended by {how}" + (f"\n{said}" if said else "")

    def hold(self, held: bool) -> None:
        """Stop it with all that it spawned for a while, or let it go on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP if held else signal.SIGCONT)

    def close(self) -> None:
        """Kill it with all that it spawned, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self.news)
