"""A process that compiles, often at low priority, and the builder of a stage's missing packages."""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchperf_ros.api.errors import ProtocolError, how_it_ended
from torchperf_ros.workers.package_cache import open_cache
from torchperf_ros.workers.worker_setup import WorkerSetup

_TAIL = 4_000
_END_S = 10.0
_SILENT_S = 10.0
_POLL_S = 0.2
# What is sent by whoever stops a machine, a service or a command: no death of what the process does.
_STOPS = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


# Its process had to end for what it has found out; the same job goes on in the next one. What `lacked` memory
# is handed to that in the job.
AGAIN = "again"


class CompileProcess:
    """Runs one job by `python -m`, by default `torchperf_ros.engines.compile_main`'s.

    That one writes JSON objects, one per line: `kind` is `tiers` (those that were guessed), `tier` (tier,
    number, step, and while a CUDA graph is captured its key as `capturing`), `planned` (tier, text),
    `built` (tier, package, manifest), `failed` (tier, text) or `done`. What compilers print is kept for
    `death_reason`.

    Attributes:
        news: descriptor that is readable when there is a message, or it has ended.
        pid: of the process, which leads a group of its own (compilers spawn compilers).

    Its `TMPDIR` is a folder of its own, which goes when it is closed.
    """

    def __init__(
        self,
        job: dict[str, Any],
        *,
        background: bool,
        module: str = "torchperf_ros.engines.compile_main",
        takes_more: bool = False,
    ) -> None:
        """Spawn it and hand it its job, see `compile_main`.

        The spawning thread must outlive it, as it dies with that.

        `module` takes the job on stdin, a line of JSON, and a descriptor for its news; `background` is the lowest
        priority. One that `takes_more` gets further lines by `send`.
        """
        self._buffer = self._printed = b""
        self._capturing, self._cache = "", open_cache(job.get("cache_dir", ""), 0)
        job_json = _line({**job, "background": background})
        # Killed, compilers leave their files.
        self._folder = tempfile.TemporaryDirectory(prefix="torchperf_", ignore_cleanup_errors=True)
        self._name = job.get("does", module).rpartition(".")[2].rpartition("_")[0]
        self.news, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs)],
                pass_fds=(theirs,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": self._folder.name},
            )
        except OSError:
            os.close(self.news)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self._output_fd = self._process.stdout.fileno()
        os.set_blocking(self._output_fd, False)
        os.set_blocking(self.news, False)
        self._write(job_json)
        if not takes_more:
            self._close_input()

    def send(self, job: dict[str, Any]) -> None:
        """Hand a process that `takes_more` its next job."""
        self._write(_line(job))

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; its end says why
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def listen(self) -> list[dict[str, Any]] | None:
        """Its messages since the last call, None once it has ended.

        A `ProtocolError` where one is no JSON object.
        """
        self._take_output()
        try:
            data = os.read(self.news, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        with contextlib.suppress(ValueError):
            messages = [json.loads(line) for line in lines]
            if all(isinstance(message, dict) for message in messages):
                self._capturing = messages[-1].get("capturing", "") if messages else self._capturing
                return messages
        raise ProtocolError(f"the {self._name} process wrote {lines!r}: not JSON objects")

    def messages(self, timeout_s: float = math.inf) -> Iterator[dict[str, Any]]:
        """Its messages as they come, until it has ended; a `TimeoutError` if that takes longer."""
        give_up_at_s = time.monotonic() + timeout_s
        while (found := self.listen()) is not None:
            yield from found
            if (left_s := give_up_at_s - time.monotonic()) <= 0:
                raise TimeoutError
            select.select([self.news], [], [], min(_POLL_S, left_s))

    def _take_output(self) -> None:
        """Take what was printed, so that the process never waits for room; the end of it is kept."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output_fd, 65_536):
                self._printed = (self._printed + data)[-_TAIL:]

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def death_reason(self, *, wait: bool = True) -> str:
        """How it ended, "" if well.

        With the last that was printed. Waits for its end, if at all, not for ever.
        """
        try:
            code = self._process.wait(_END_S if wait else 0.0)
        except subprocess.TimeoutExpired:
            return f"the {self._name} process has nothing more to say, but does not end"
        if code == 0:
            return ""
        self._take_output()  # what it printed since
        printed = self._printed.decode(errors="replace")
        return f"the {self._name} process ended by {how_it_ended(code)}\n{printed}".strip()

    def died_capturing(self) -> bool:
        """Whether it has died by itself while it captured a model, and that is kept: the next may go on."""
        return (
            self._process.poll() not in (0, None, *_STOPS)
            and bool(self._capturing)
            and self._cache.keep_uncapturable(self._capturing)
        )

    def hold(self, held: bool) -> None:
        """Stop it with all that it spawned for a while, or let it go on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP if held else signal.SIGCONT)

    def kill(self) -> None:
        """Kill it with all that it spawned; does not wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it with all that it spawned, and reap it.

        One that the kernel cannot end is left to it after 10 s.
        """
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        assert self._process.stdout is not None
        self._close_input()
        self._process.stdout.close()
        os.close(self.news)
        self._folder.cleanup()


def _line(job: dict[str, Any]) -> bytes:
    return json.dumps(job).encode() + b"\n"


class PackageBuilder:
    """Compiles one stage's missing packages, once, on the pool's thread: only `close` waits.

    `progress` is for `/diagnostics`, for example `compiling 2 of 3`. `process` is the one that compiles now,
    `killed` those that have not ended yet. `lacked`: what had not enough memory to be captured or timed, and
    why; no further process of this builder tries that.
    """

    def __init__(
        self, setup: WorkerSetup, built: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._setup, self._built, self._warn = setup, built, warn
        self.progress = ""
        self.process: CompileProcess | None = None
        self.killed: list[CompileProcess] = []
        self.lacked: dict[str, str] = {}
        self._tried: set[str] = set()
        self._silent_since_s: float | None = None
        self._held = self._has_warned = self._goes_on = False
        self._wanted: list[str] = []
        self._count = 0

    @property
    def news(self) -> int | None:
        """Descriptor to wait for, None while nothing is compiled, or nothing more will come."""
        return None if self.process is None or self._silent_since_s is not None else self.process.news

    def want(self, tiers: Iterable[str]) -> None:
        wanted = [tier for tier in tiers if tier not in self._tried]
        if not wanted or self.process is not None or not self._setup.compile_missing:
            return
        setup = self._setup
        numbers = [setup.tiers.index(tier) for tier in wanted]
        job = {
            "adapter": setup.adapter,
            "options": setup.options_of(0),
            "device": setup.device,
            "threads": setup.threads,
            "cache_dir": setup.cache_dir,
            "cache_mib": setup.cache_mib,
            "tiers": wanted,
            "build": [setup.build[number].as_dict() for number in numbers],
            "packages": [setup.packages[number] for number in numbers],
            "lacked": self.lacked,
        }
        self._tried |= set(wanted)
        self._wanted, self._goes_on = wanted, False
        try:
            self.process = CompileProcess(job, background=True)
        except OSError as error:
            self._warn(f"packages of {', '.join(wanted)} cannot be compiled: {error}")
            return
        self._held = self._has_warned = False
        self._count = len(wanted)
        self.progress = f"compiling 1 of {self._count}"

    def hold(self, *, held: bool) -> None:
        """Let what compiles stand still while a worker is missing.

        Its replacement needs the processor more.
        """
        if self.process is not None and held != self._held:
            self.process.hold(held)
            self._held = held

    def listen(self) -> None:
        """Take in the messages of the process; clean up when it has ended."""
        for process in [process for process in self.killed if process.ended]:
            self.killed.remove(process)
            process.close()
        if self.process is None:
            return
        try:
            messages = self.process.listen()
        except ProtocolError as error:
            self._warn(str(error))
            self.stop()
            return
        if messages is None:
            self._silent_since_s = self._silent_since_s or time.monotonic()
            if not self.process.ended and time.monotonic() - self._silent_since_s < _SILENT_S:
                return  # it is asked again: workers are looked after meanwhile
            reason = self.process.death_reason(wait=False)
            goes_on = self._goes_on or self.process.died_capturing()
            if reason and not self._has_warned and not goes_on:
                self._warn(reason)
            self.stop()
            if goes_on:
                self._tried -= set(self._wanted)
                self.want(self._wanted)
            return
        for message in messages:
            if message["kind"] == "tier":
                self.progress = f"compiling {message['number']} of {self._count}"
            elif message["kind"] == "built":
                self._built(message["tier"])
            elif message["kind"] == AGAIN:
                self._goes_on = True
                self.lacked |= message["lacked"]
                self._warn(f"{message['text']}; it goes on without that")
            elif message["kind"] == "failed":
                self._has_warned = True
                self._warn(f"tier {message['tier']} is not compiled: {message['text']}")

    def stop(self) -> None:
        self.progress = ""
        if self.process is not None:
            self.process.kill()
            self.killed.append(self.process)
            self.process = self._silent_since_s = None

    def close(self) -> None:
        self.stop()
        while self.killed:
            self.killed.pop().close()
