"""The process that compiles packages: spawned at low priority, heard line by line, killed as a group."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from torchperf_ros.core.errors import ProtocolError

_TAIL = 4_000


class CompileProcess:
    """Runs `python -m torchperf_ros.worker.compile_main` on one job.

    It says JSON objects, one per line: `kind` is `progress` (text), `tier` (name, step), `built` (tier, package,
    manifest), `failed` (tier, text) or `done`. Whatever the compilers print is kept for `death_reason`.

    Attributes:
        news: descriptor that is readable when it says something or has ended.
        pid: of the process, which leads a group of its own (compilers spawn compilers).
    """

    def __init__(self, job: dict[str, Any], *, background: bool) -> None:
        """Spawn it and hand it its job; the spawning thread must outlive it, as it dies with that.

        Args:
            job: adapter, options, device, threads, tiers, build, cache_dir, cache_mib, see `compile_main`.
            background: at the lowest priority, where a vehicle drives meanwhile.
        """
        self._buffer = self._said = b""
        with contextlib.ExitStack() as given_away:
            self.news, theirs = os.pipe()
            given_away.callback(os.close, theirs)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torchperf_ros.worker.compile_main", str(theirs)],
                pass_fds=(theirs,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self._output_fd = self._process.stdout.fileno()
        os.set_blocking(self._output_fd, False)
        os.set_blocking(self.news, False)
        with contextlib.suppress(BrokenPipeError):  # it died at once; its end says why
            self._process.stdin.write(json.dumps({**job, "background": background}).encode())
            self._process.stdin.close()

    def listen(self) -> list[dict[str, Any]] | None:
        """What it has said since the last call, None once it has ended.

        Raises:
            ProtocolError: it says something that is no JSON object.
        """
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output_fd, 65_536):
                self._said = (self._said + data)[-_TAIL:]
        try:
            data = os.read(self.news, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            msg = f"the compile process said {lines!r}: {error}"
            raise ProtocolError(msg) from error

    def death_reason(self) -> str:
        """How it ended, "" if well; with the last that was printed."""
        code = self._process.wait()
        if code == 0:
            return ""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        said = self._said.decode(errors="replace").strip()
        return f"the compile process ended by {how}" + (f"\n{said}" if said else "")

    def close(self) -> None:
        """Kill it with all that it spawned, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self.news)
