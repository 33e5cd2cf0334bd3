"""One worker process seen from the node: spawned, spoken to, killed."""

import contextlib
import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.errors import ProtocolError, how_it_ended
from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.fork_server import ForkServer
from torchperf_ros.workers.frame_ring import FrameRing
from torchperf_ros.workers.process_setup import is_ending, is_readable, set_nice
from torchperf_ros.workers.protocol import (
    MAX_CONTROL_BYTES,
    OBSERVE,
    RUN,
    SOON,
    STACK_SIGNAL,
    Request,
    Response,
    pack_control,
    unpack_control,
    unpack_response,
)
from torchperf_ros.workers.result_area import ResultArea, make_result_area
from torchperf_ros.workers.worker_setup import WorkerFolder

ENDS_WITHIN_S = 5.0  # of SIGKILL; a process that has not waits for a driver or a disk, and may never end
_OUTPUT_TAIL = 4_000
_SHOWN_BYTES = 16_384  # of what was printed since the last look
_LINES_A_SECOND = 20
_PIPE_BYTES = 1 << 20  # of what a worker has printed and nobody has read: what fits does not hold it up


@dataclass(frozen=True)
class Description:
    """What an adapter says of itself.

    Inputs in order (topic, type), output type, whether it keeps histories.

    On CUDA `card` is the device's name; `scores`: it has a `score_messages`.
    """

    inputs: tuple[tuple[str, str], ...]
    output: str
    observes: bool
    device: str
    card: str = ""
    scores: bool = False


class WorkerProcess:
    """A spawned Python process that runs one stage's model; `__init__` says what each attribute is."""

    def __init__(
        self,
        number: int,
        setup: dict[str, Any],
        ring: FrameRing,
        result_bytes: int,
        server: ForkServer,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Have it forked by `server`, and send it its setup; for `meanwhile` see `ForkServer.fork`.

        Raises:
            OSError: no descriptors or memory are to be had.
            ProtocolError: the setup is too long, or the server forks nobody.
        """
        self.number = number  # its place in the stage's pool, 0 or 1; 2 while it is to take another's place
        self.seq: int | None = None  # frame that it is running, None if idle
        self.busy_since_ns = 0  # when that run began
        self.tier: int | None = None  # the one that it ran last, None before
        # number of the last started frame that it was told to observe, None before
        self.observed: int | None = None
        self.ready_at_ns: int | None = None  # when it reported ready, None before
        self.has_run = False  # a frame: the first run is one of a cold process
        self.usable = False  # ready and not known to be dead; cleared by whoever notices first
        self.generation = 0  # of the pool's renewal in which it was started
        self.swapped: int | None = setup.get(
            "swapped"
        )  # the tier that it has a new package for, None if none
        loaded = setup.get("loaded")
        self.loaded = None if loaded is None else frozenset(loaded)  # tiers that it can run, None: all
        self.compiles = bool(setup.get("compile", False)) and any(  # while it loads, which takes its time
            build["engine"] == "compile" for build in setup.get("build", ())
        )
        self.progress = "starting"
        self.error = self.kill_reason = ""
        self.hung = False
        self.unended = False  # SIGKILL did not end it in time, and nobody waits for it any more
        self.away = ""  # why it takes no frames for a while, for example `profile: writing`; "" mostly
        self.held = False  # stopped for a moment, see `hold`
        self.recording = ""  # what it records while it serves, "" mostly; it runs the frames if it can
        self.calibrations: list[Calibration] = []
        self.tiers: list[dict[str, Any]] = []  # what it last said of each tier, see `TierFacts`
        self.missing: list[str] = []  # tiers that run in eager because they are not compiled yet
        self.out_of_memory = 0  # frames for which the device's memory did not suffice
        self.memory_bytes: dict[str, int] = {}
        self.nice = int(setup.get("nice", 0))  # while it serves
        self._hurried = not setup.get("background", False)
        self._sent = self._handled_at_last_look = self._waiting_since_ns = 0
        self._tail = b""
        self._lines_since_ns = self._lost_since_ns = self._left_out = 0
        self._lines_left = _LINES_A_SECOND
        self._killed_ns = 0
        # held while it is closed, and by other threads than the pool's that signal
        self._pidfd_lock = threading.Lock()
        self._folder = WorkerFolder()
        self._server = server
        try:
            self._start(pack_control("setup", **setup), ring, result_bytes, meanwhile)
        except BaseException:
            self._folder.remove()
            raise
        # An end that the worker has closed is always readable: it is taken out, or whoever waits for it
        # would spin, at real-time priority, until the kernel has taken the process down.
        self.speaking = {self.pidfd, self.control.fileno(), self._stdout_fd}
        for descriptor in (self.frames.fileno(), self.control.fileno(), self._stdout_fd):
            os.set_blocking(descriptor, False)
        self.started_ns = time.monotonic_ns()

    def _start(
        self, first_message: bytes, ring: FrameRing, result_bytes: int, meanwhile: Callable[[], None]
    ) -> None:
        """Make what the two sides share, and have the process forked with it."""
        with contextlib.ExitStack() as given_away, contextlib.ExitStack() as on_failure:
            result_fd = make_result_area(result_bytes)
            given_away.callback(os.close, result_fd)
            self._results = ResultArea(result_fd, writable=False)
            on_failure.callback(self._results.close)
            self.frames, worker_frames = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given_away.enter_context(worker_frames)
            on_failure.enter_context(self.frames)
            self.control, worker_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given_away.enter_context(worker_control)
            on_failure.enter_context(self.control)
            self.control.send(first_message)  # it waits in the socket until the worker is up
            self._stdout_fd, worker_stdout = os.pipe2(os.O_CLOEXEC)
            given_away.callback(os.close, worker_stdout)
            on_failure.callback(os.close, self._stdout_fd)
            with contextlib.suppress(PermissionError):  # beyond what the user may have in pipes
                fcntl.fcntl(self._stdout_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            passed = (
                worker_frames.fileno(),
                worker_control.fileno(),
                ring.reader_fd,
                result_fd,
                worker_stdout,
            )
            self.pid, self.pidfd = self._server.fork(passed, self._folder.path, meanwhile)
            on_failure.pop_all()

    @property
    def folder(self) -> str:
        """Where it keeps its temporary files; removed with it."""
        return self._folder.path

    @property
    def idle(self) -> bool:
        """Whether it can take a frame now."""
        return self.available and self.seq is None

    @property
    def available(self) -> bool:
        """Whether it takes frames, now or when it is done with one."""
        return self.usable and not self.away

    @property
    def state(self) -> str:
        """One word or phrase for `/diagnostics`."""
        if self.ready_at_ns is None:
            return self.progress
        if not self.usable:
            return "dead"
        doing = "idle" if self.seq is None else "busy"
        return self.away or (f"{doing}, {self.recording}" if self.recording else doing)

    def run(  # noqa: PLR0913 - the fields of a request
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
        last_step: int = 0,
    ) -> bool:
        """Hand over a frame whose answer leaves at `leave_ns`; False if the worker turns out to be dead.

        An anytime model ends after `last_step`, 0: see `Request`.
        """
        kind = RUN | OBSERVE if observe else RUN
        if not self._send(Request(kind, tier, seq, offset, length, leave_ns, missed, last_step), now_ns):
            self.kill("it takes no more frames")
            return False
        self.busy_since_ns, self.tier = now_ns, tier
        self.seq = seq
        return True

    def expect(self) -> None:
        """Have it awake for a frame that is about to be handed over."""
        with contextlib.suppress(OSError):  # who hands it over finds out
            self.frames.send(SOON)

    def observe(self, seq: int, offset: int, length: int, now_ns: int, *, missed: int = 0) -> bool:
        """Let it advance its histories; False if its queue is full, and it misses the frame."""
        return not self.usable or self._send(
            Request(OBSERVE, 0, seq, offset, length, missed=missed), now_ns
        )

    def _send(self, request: Request, now_ns: int) -> bool:
        if self._results.handled == self._sent:
            self._waiting_since_ns = now_ns
        try:
            self.frames.send(request.pack())
        except OSError:  # EAGAIN: its queue is full, EPIPE: it died; the caller turns both into an outcome
            return False
        self._sent += 1
        return True

    def stuck_ms(self, now_ns: int) -> float:
        """For how long it has not finished what it has been given; the pool asks now and then.

        The worker counts what it has handled in shared memory, so that nobody has to be woken for a frame
        that was only observed.
        """
        handled = self._results.handled
        if handled != self._handled_at_last_look or self.held:
            self._handled_at_last_look = handled
            self._waiting_since_ns = now_ns
        return 0.0 if handled == self._sent else (now_ns - self._waiting_since_ns) / NS_PER_MS

    def has_not_waited(self, now_ns: int) -> None:
        """Count `stuck_ms` from now: it was busy with something else than what it has been given."""
        self._waiting_since_ns = now_ns

    def hold(self) -> None:
        """Stop it where it is, at once, until `go_on`."""
        self.held = self._signal(signal.SIGSTOP)

    def go_on(self, now_ns: int) -> None:
        """End `hold`; the time in between does not count as its own."""
        self._signal(signal.SIGCONT)
        self.has_not_waited(now_ns)
        self.held = False

    def _signal(self, number: signal.Signals) -> bool:
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(self.pidfd, number)
            return True
        return False

    def receive(self) -> tuple[Response, bytes] | None:
        """The next response and its payload (result, or reason), None if there is none.

        Raises:
            EOFError: the worker is gone.
            ProtocolError: it does not speak the protocol.
        """
        try:
            data = self.frames.recv(256)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        response = unpack_response(data)
        payload = self._results.read(response.length)
        if response.seq != self.seq:
            msg = (
                f"response to frame {response.seq}; it was given {'none' if self.seq is None else self.seq}"
            )
            raise ProtocolError(msg)
        self.seq = None
        return response, payload

    def partial(self, seq: int) -> tuple[Response, bytes] | None:
        """The newest partial result of this frame, also of a worker that has died.

        None if there is none.
        """
        return self._results.newest(seq)

    def receive_control(self) -> dict[str, Any] | None:
        """The next control message, None if there is none (also once the worker is gone).

        Raises:
            ProtocolError: it does not speak the protocol.
        """
        try:
            if data := self.control.recv(MAX_CONTROL_BYTES):
                return unpack_control(data)
        except BlockingIOError:
            return None
        except ConnectionError:
            pass
        self.speaking.discard(self.control.fileno())
        return None

    def command(self, kind: str, **fields: object) -> bool:
        """Have it do something else than frames, see `CaptureTaker`; False if it cannot be told."""
        try:
            self.control.send(pack_control(kind, **fields))
        except OSError:  # EAGAIN: it has not read the last ones, EPIPE: it died
            return False
        return True

    @property
    def caught_up(self) -> bool:
        """Whether it has handled all that it has been given."""
        return self._results.handled == self._sent

    def read_lines(self, now_ns: int) -> tuple[list[str], int]:
        """Lines that the worker printed since the last call, at most 20 a second, and how many bytes were left out.

        A model that prints megabytes is to slow itself down, not the node. The end is kept for
        `death_reason`.
        """
        left_out = 0
        if now_ns - self._lines_since_ns > NS_PER_S:
            self._lines_since_ns, self._lines_left = now_ns, _LINES_A_SECOND
            left_out, self._left_out = self._left_out, 0
        try:
            data = os.read(self._stdout_fd, _PIPE_BYTES)
        except BlockingIOError:
            return [], left_out
        if not data:
            self.speaking.discard(self._stdout_fd)
        self._tail = (self._tail + data[-_OUTPUT_TAIL:])[-_OUTPUT_TAIL:]
        shown, rest = data[:_SHOWN_BYTES], data[_SHOWN_BYTES:]
        lines = [line for line in shown.decode(errors="replace").splitlines() if line.strip()]
        self._left_out += sum(len(line) + 1 for line in lines[self._lines_left :]) + len(rest)
        lines = lines[: self._lines_left]
        self._lines_left -= len(lines)
        return lines, left_out

    def lost_ms(self, now_ns: int) -> float:
        """For how long it has not been usable although it had reported ready and nobody has killed it.

        0 while it is.

        That is a worker that has closed its socket.
        """
        if self.usable or self.ready_at_ns is None or self.kill_reason:
            self._lost_since_ns = 0
        elif not self._lost_since_ns:
            self._lost_since_ns = now_ns
        return (now_ns - self._lost_since_ns) / NS_PER_MS if self._lost_since_ns else 0.0

    def hurry(self) -> None:
        """Load at normal priority.

        Nobody else serves any more. Where that is not permitted it never stepped back.
        """
        if not self._hurried:
            self._hurried = True
            with contextlib.suppress(PermissionError):
                set_nice(self.pid, self.nice)

    def is_dead(self) -> bool:
        """Whether the process has ended, not yet reaped."""
        return is_readable(self.pidfd, 0.0)

    @property
    def is_ending(self) -> bool:
        """Whether the kernel is taking the process down, which shows on its socket only when its memory is freed."""
        return is_ending(self.pid)

    def kill(self, reason: str) -> None:
        """SIGKILL: nothing that a model does can prevent it."""
        self.usable = False
        self.kill_reason = self.kill_reason or reason
        self._killed_ns = self._killed_ns or time.monotonic_ns()
        self._signal(signal.SIGKILL)

    def is_overdue(self, now_ns: int) -> bool:
        """Whether SIGKILL has not ended it in time."""
        return bool(self._killed_ns) and now_ns - self._killed_ns > ENDS_WITHIN_S * NS_PER_S

    def death_reason(self) -> str:
        """Why the process ended: by whom, which signal or exit status, and the last it said."""
        said = self._tail.decode(errors="replace").strip()
        if self.unended:
            name = f"worker {self.number} (pid {self.pid})"
            what = f"has not ended within {ENDS_WITHIN_S:.0f} s of SIGKILL, and its place is given up"
            return f"{name} {what}: {self.kill_reason}"
        code = self._server.exit_code(self.pid)
        unknown = "an unknown cause: its fork server is gone, or does not answer"
        how = unknown if code is None else how_it_ended(code)
        name = f"worker {self.number} (pid {self.pid}) ended by {how}"
        why = ": ".join(filter(None, [name, self.kill_reason, self.error]))
        return f"{why}\n{said}" if said and not self.error else why

    def ask_for_stacks(self) -> None:
        """Send the signal upon which it writes its stacks down; on any thread.

        Raises:
            ProcessLookupError: it has ended.
        """
        with self._pidfd_lock:
            if self.pidfd < 0:
                raise ProcessLookupError
            signal.pidfd_send_signal(self.pidfd, STACK_SIGNAL)

    def close(self) -> None:
        """Release what the node has of it, but for what `reap` does."""
        os.close(self._stdout_fd)
        self.control.close()
        self.frames.close()
        self._results.close()

    def reap(self, seconds: float = 0.0) -> bool:
        """After `close`: forget the process once it has ended; False: it has not within so many seconds."""
        if not is_readable(self.pidfd, seconds):
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Release what is left of it, whether or not the process has ended; nothing if that was done."""
        with self._pidfd_lock:
            if self.pidfd >= 0:
                os.close(self.pidfd)
            self.pidfd = -1
        self._folder.remove()
