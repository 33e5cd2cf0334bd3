"""One worker process seen from the node: forked, given frames, killed."""

import contextlib
import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.errors import ProtocolError, how_it_ended
from torchperf_ros.workers.calibration import Batching, Calibration
from torchperf_ros.workers.control import (
    REPORTS,
    Command,
    Report,
    TierFacts,
    pack_message,
    unpack_message,
)
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
    unpack_response,
)
from torchperf_ros.workers.result_area import ResultArea, make_result_area
from torchperf_ros.workers.worker_setup import WorkerFolder, WorkerSetup
from torchperf_ros.workers.worker_state import WorkerLife, WorkerState

# Python 3.10 and 3.11 look a member of an enum up in 0.1 us, several times a frame
_SERVING: Final = WorkerState.SERVING
ENDS_WITHIN_S = 5.0  # of SIGKILL; a process that has not waits for a driver or a disk, and may never end


@dataclass
class WorkerWords:
    """The last that a worker has reported of itself, see `control`."""

    progress: str = "starting"
    capturing: str = ""
    calibrations: tuple[Calibration, ...] = ()
    tiers: tuple[TierFacts, ...] = ()
    missing: tuple[str, ...] = ()
    batching: Batching = Batching()
    out_of_memory: int = 0
    found_out: bool = False
    memory_bytes: dict[str, int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class RunPart:
    """A frame of a batch, see `WorkerProcess.run`."""

    stream: int
    seq: int
    offset: int
    length: int
    leave_ns: int
    observe: bool
    missed: int = 0


class ForkedProcess:
    """A process by its descriptor, so that no signal reaches another one that has its number later.

    It is not this process's child: its fork server reaps it, and knows how it ended.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self.descriptor = pid, descriptor  # -1: it is closed
        # held while it is closed, and by other threads than the pool's that signal
        self._lock = threading.Lock()

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False: the process has ended. On any thread."""
        with self._lock, contextlib.suppress(OSError):
            if self.descriptor >= 0:
                signal.pidfd_send_signal(self.descriptor, number)
                return True
        return False

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, or does so within so many seconds; not asked once it is closed."""
        return is_readable(self.descriptor, seconds)

    def close(self) -> None:
        """Close the descriptor; nothing if that was done."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            self.descriptor = -1


class Backlog:
    """What a worker was given and has not finished.

    The worker counts what it has handled in shared memory, so that no thread has to wake for a frame that
    was only observed.
    """

    def __init__(self, results: ResultArea) -> None:
        self._results = results
        self._sent = self._handled_at_last_look = self._waiting_since_ns = 0

    @property
    def handled(self) -> int:
        """How many frames the worker has finished, well or not; those that it only observed count too."""
        return self._results.handled

    @property
    def is_empty(self) -> bool:
        return self.handled == self._sent

    def sent(self, frames: int) -> None:
        self._sent += frames

    def wait_from(self, now_ns: int) -> None:
        """Count `stuck_ms` from now: it had nothing to do, or was busy with something else."""
        self._waiting_since_ns = now_ns

    def stuck_ms(self, now_ns: int) -> float:
        """For how long it has not finished what it was given; the pool asks now and then."""
        handled = self.handled
        if handled != self._handled_at_last_look:
            self._handled_at_last_look, self._waiting_since_ns = handled, now_ns
        return 0.0 if handled == self._sent else (now_ns - self._waiting_since_ns) / NS_PER_MS


class WorkerProcess:
    """A process that runs one stage's model: its state, its sockets, and what it has reported.

    Attributes:
        number: its place in the stage's pool, 0 or 1; 2 while it is to take another's place.
        setup: what it was given at its start; `loaded` the numbers of the tiers that it can run.
        pid: its process id; `folder` where it keeps its temporary files, which is removed with it.
        generation: of the pool's renewal in which it was started.
        life: its state; `reported` what it reported of itself; `process` to signal it; `backlog` what it has not
            handled yet.
        seq: frame that it is running, None if idle; `busy_since_ns` since when, `tier` on which, or on
            which the last one ran, None before.
        observed: of each stream the number of the last started frame that it was to observe.
        has_run: a frame; the first run is one of a cold process.
        ready_at_ns: when it reported ready, None before.
        printed: the end of what it printed.
        capturing: words for the capture that it takes part in, "" mostly.
        speaking: descriptors to wait for.
    """

    def __init__(
        self,
        number: int,
        setup: WorkerSetup,
        rings: Sequence[FrameRing],
        result_bytes: int,
        server: ForkServer,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Have it forked by `server`, and send it its setup; for `meanwhile` see `ForkServer.fork`.

        It reads one ring for each stream.

        Raises:
            OSError: no descriptors or memory are to be had.
            ProtocolError: the setup is too long, or the server forks none.
        """
        self.number, self.setup, self.generation = number, setup, 0
        self.seq: int | None = None
        self.busy_since_ns = 0
        self.tier: int | None = None
        self.observed: dict[int, int] = {}
        self._given: list[tuple[int, int]] = []  # stream and number of the frames that it has not answered
        self.has_run = False
        self.ready_at_ns: int | None = None
        self.capturing = ""
        self.life, self.reported = WorkerLife(), WorkerWords()
        self._has_priority = not setup.background
        self._folder = WorkerFolder()
        self.folder, self.loaded = self._folder.path, frozenset(setup.loaded)
        self._server = server
        try:
            self._start(pack_message(setup), rings, result_bytes, meanwhile)
        except BaseException:
            self._folder.remove()
            raise
        self.pid, self.backlog = self.process.pid, Backlog(self._results)
        # An end that the worker has closed is always readable: it is taken out, or whoever waits for it
        # would spin, at real-time priority, until the kernel has taken the process down.
        self.speaking = {self.process.descriptor, self.control.fileno(), self.printed.descriptor}
        for descriptor in (self.frames.fileno(), self.control.fileno()):
            os.set_blocking(descriptor, False)
        self.started_ns = time.monotonic_ns()

    def _start(
        self,
        first_message: bytes,
        rings: Sequence[FrameRing],
        result_bytes: int,
        meanwhile: Callable[[], None],
    ) -> None:
        with contextlib.ExitStack() as given_away, contextlib.ExitStack() as on_failure:
            result_fd = make_result_area(result_bytes, self.setup.batch)
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
            stdout_fd, worker_stdout = os.pipe2(os.O_CLOEXEC)
            given_away.callback(os.close, worker_stdout)
            on_failure.callback(os.close, stdout_fd)
            self.printed = PrintedLines(stdout_fd)
            passed = (
                worker_frames.fileno(),
                worker_control.fileno(),
                result_fd,
                *(ring.reader_fd for ring in rings),
                worker_stdout,
            )
            self.process = ForkedProcess(*self._server.fork(passed, self._folder.path, meanwhile))
            on_failure.pop_all()

    # -- its state

    @property
    def usable(self) -> bool:
        return self.life.is_usable

    @property
    def available(self) -> bool:
        """Whether it takes frames, now or when it is done with one."""
        return self.life.state is _SERVING

    @property
    def idle(self) -> bool:
        return self.life.state is _SERVING and self.seq is None

    @property
    def recording(self) -> str:
        """What it records while it serves, "" mostly; it runs the frames if it can."""
        return self.capturing if self.capturing and self.available else ""

    @property
    def kill_reason(self) -> str:
        """Why it was killed, "" if it was not."""
        return self.life.reason

    @property
    def hung(self) -> bool:
        """Whether it was killed as it did not come back from a frame."""
        return self.life.hung

    @property
    def calibrations(self) -> tuple[Calibration, ...]:
        """What it measured of each tier before its first frame."""
        return self.reported.calibrations

    @property
    def batching(self) -> Batching:
        """How many frames it takes in one run, and how long that takes."""
        return self.reported.batching

    @property
    def state(self) -> str:
        """One word or phrase for `/diagnostics`."""
        if self.ready_at_ns is None:
            return self.reported.progress
        if not self.usable:
            return "dead"
        if self.life.state is WorkerState.AWAY:
            return self.capturing
        doing = "idle" if self.seq is None else "busy"
        return f"{doing}, {self.capturing}" if self.capturing else doing

    def serve(self) -> None:
        self.life.enter(WorkerState.SERVING)

    def withdraw(self) -> None:
        """It takes no more frames: another has its place, or it is gone."""
        self.life.enter(WorkerState.WITHDRAWN)

    def capture(self, words: str, *, serves: bool) -> bool:
        """It takes part in a capture ("": no more) and `serves` meanwhile; False: it is gone or held."""
        states = WorkerState.AWAY, WorkerState.SERVING
        before, wanted = states if serves else states[::-1]
        can = self.life.state is wanted or self.life.enter_from(before, wanted)
        if can or serves:
            self.capturing = words
        return can

    def hold(self) -> None:
        """Stop it where it is, until `go_on`; not while it is away, as its capture has a time limit."""
        if self.life.enter_from(WorkerState.SERVING, WorkerState.HELD):
            self.process.signal(signal.SIGSTOP)

    def go_on(self, now_ns: int) -> None:
        """End `hold`; the time in between does not count as its own."""
        self.process.signal(signal.SIGCONT)
        self.backlog.wait_from(now_ns)
        self.life.enter_from(WorkerState.HELD, WorkerState.SERVING)

    # -- frames, on the stage's thread

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
        stream: int = 0,
    ) -> bool:
        """Hand over a frame whose answer leaves at `leave_ns`; False if the worker turns out to be dead.

        An anytime model ends after `last_step`, 0: see `Request`.
        """
        kind = RUN | OBSERVE if observe else RUN
        request = Request(kind, tier, seq, offset, length, leave_ns, missed, last_step, stream)
        return self._begin(request.pack(), [(stream, seq)], tier, now_ns)

    def run_batch(self, tier: int, parts: Sequence[RunPart], now_ns: int) -> bool:
        """Hand over frames of different streams to be run together, at most `batch`; else as `run`.

        Each is answered by a response of its own; until then the worker is not idle.
        """
        requests = [
            Request(
                RUN | OBSERVE if part.observe else RUN,
                tier,
                part.seq,
                part.offset,
                part.length,
                part.leave_ns,
                part.missed,
                stream=part.stream,
            )
            for part in parts
        ]
        packet = b"".join(request.pack() for request in requests)
        return self._begin(packet, [(part.stream, part.seq) for part in parts], tier, now_ns)

    def _begin(self, packet: bytes, given: list[tuple[int, int]], tier: int, now_ns: int) -> bool:
        if not self._send(packet, len(given), now_ns):
            self.kill("it takes no more frames")
            return False
        self.busy_since_ns, self.tier = now_ns, tier
        self._given = given
        self.seq = given[0][1]
        return True

    def expect(self) -> None:
        """Have it awake for a frame that is about to be handed over."""
        with contextlib.suppress(OSError):  # `run` finds out
            self.frames.send(SOON)

    def observe(
        self, seq: int, offset: int, length: int, now_ns: int, *, missed: int = 0, stream: int = 0
    ) -> bool:
        """Let it advance its histories; False if its queue is full, and it misses the frame."""
        request = Request(OBSERVE, 0, seq, offset, length, missed=missed, stream=stream)
        return not self.usable or self._send(request.pack(), 1, now_ns)

    def _send(self, packet: bytes, frames: int, now_ns: int) -> bool:
        if self.backlog.is_empty:
            self.backlog.wait_from(now_ns)
        try:
            self.frames.send(packet)
        except OSError:  # EAGAIN: its queue is full, EPIPE: it died; the caller turns both into an outcome
            return False
        self.backlog.sent(frames)
        return True

    def receive(self) -> tuple[Response, bytes] | None:
        """The next response and its payload (result, or reason), None if there is none.

        Raises:
            EOFError: the worker is gone; so is one, from now on, that does not speak the protocol.
        """
        try:
            return self._next_response()
        except ProtocolError as error:
            self.kill(str(error))
            raise EOFError from error

    def _next_response(self) -> tuple[Response, bytes] | None:
        try:
            data = self.frames.recv(256)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        response = unpack_response(data)
        payload = self._results.read(response.length, response.place)
        answers = response.stream, response.seq
        if answers not in self._given:
            given = ", ".join(_frame_words(*each) for each in self._given) or "none"
            raise ProtocolError(f"response to frame {_frame_words(*answers)}; it was given {given}")
        self._given.remove(answers)
        self.seq = self._given[0][1] if self._given else None
        return response, payload

    def partial(self, seq: int, stream: int = 0) -> tuple[Response, bytes] | None:
        """The newest partial result of this frame, also of a worker that has died.

        None if there is none.
        """
        return self._results.newest(seq, stream)

    # -- everything else, on the pool's thread

    def stuck_ms(self, now_ns: int) -> float:
        """For how long it has not finished what it was given; none of the time while it is held."""
        if self.life.state is WorkerState.HELD:
            self.backlog.wait_from(now_ns)
        return self.backlog.stuck_ms(now_ns)

    def lost_ms(self, now_ns: int) -> float:
        """For how long it has taken no more frames although nothing has killed it: it closed its socket."""
        is_lost = self.life.state is WorkerState.WITHDRAWN and self.ready_at_ns is not None
        return (now_ns - self.life.since_ns) / NS_PER_MS if is_lost else 0.0

    def receive_report(self) -> Report | None:
        """The next of what it says, None if there is nothing (also once the worker is gone).

        Raises:
            ProtocolError: it does not speak the protocol.
        """
        try:
            if data := self.control.recv(MAX_CONTROL_BYTES):
                report: Report = unpack_message(data, *REPORTS)
                return report
        except BlockingIOError:
            return None
        except ConnectionError:
            pass
        self.speaking.discard(self.control.fileno())
        return None

    def command(self, command: Command) -> bool:
        """Have it do something else than frames, see `CaptureTaker`; False if that cannot reach it."""
        try:
            self.control.send(pack_message(command))
        except OSError:  # EAGAIN: it has not read the last ones, EPIPE: it died
            return False
        return True

    def read_lines(self, now_ns: int) -> tuple[list[str], int]:
        """Lines that it printed since the last call, and how many bytes were left out."""
        lines, left_out, goes_on = self.printed.read(now_ns)
        if not goes_on:
            self.speaking.discard(self.printed.descriptor)
        return lines, left_out

    def hurry(self) -> None:
        """Load at normal priority, as no other worker serves.

        Where that is not permitted it never stepped back.
        """
        if not self._has_priority:
            self._has_priority = True
            with contextlib.suppress(PermissionError):
                set_nice(self.pid, self.setup.nice)

    def ask_for_stacks(self) -> None:
        """Send the signal upon which it writes its stacks down; on any thread.

        Raises:
            ProcessLookupError: it has ended.
        """
        if not self.process.signal(STACK_SIGNAL):
            raise ProcessLookupError

    # -- its end

    def is_dead(self) -> bool:
        """Whether the process has ended, not yet reaped."""
        return self.process.ends_within(0.0)

    @property
    def is_ending(self) -> bool:
        """Whether the kernel ends the process; its socket shows that only when its memory is freed."""
        return is_ending(self.pid)

    def kill(self, reason: str, *, hung: bool = False) -> None:
        """SIGKILL: nothing that a model does can prevent it. The first `reason` is the one that counts."""
        self.life.enter(WorkerState.ENDING, reason, hung=hung)
        self.process.signal(signal.SIGKILL)

    def is_overdue(self, now_ns: int) -> bool:
        return (
            self.life.state is WorkerState.ENDING and now_ns - self.life.since_ns > ENDS_WITHIN_S * NS_PER_S
        )

    def give_up(self) -> None:
        """Do not wait any longer for the end of a process that SIGKILL does not end."""
        self.life.enter(WorkerState.STUCK)

    def death_reason(self) -> str:
        """Why the process ended: by whom, which signal or exit status, and the last it reported."""
        name = f"worker {self.number} (pid {self.pid})"
        if self.life.state is WorkerState.STUCK:
            what = f"has not ended within {ENDS_WITHIN_S:.0f} s of SIGKILL, and its place is given up"
            return f"{name} {what}: {self.life.reason}"
        code = self._server.exit_code(self.pid)
        unknown = "an unknown cause: its fork server is gone, or does not answer"
        how = unknown if code is None else how_it_ended(code)
        why = ": ".join(filter(None, [f"{name} ended by {how}", self.life.reason, self.reported.error]))
        printed = "" if self.reported.error else self.printed.tail
        return f"{why}\n{printed}" if printed else why

    def close(self) -> None:
        """Release what the node has of it, but for what `reap` does."""
        self.printed.close()
        self.control.close()
        self.frames.close()
        self._results.close()

    def reap(self, seconds: float = 0.0) -> bool:
        """After `close`: forget the process once it has ended; False: it has not within so many seconds."""
        if not self.process.ends_within(seconds):
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Release what is left of it, whether or not the process has ended; nothing if that was done."""
        self.process.close()
        self._folder.remove()
        self.life.enter(WorkerState.GONE)


def _frame_words(stream: int, seq: int) -> str:
    return f"{seq} of stream {stream}" if stream else str(seq)


_TAIL_BYTES = 4_000
_SHOWN_BYTES = 16_384  # of what was printed since the last look
_LINES_A_SECOND = 20
_PIPE_BYTES = (
    1 << 20
)  # what a worker has printed and the pool has not read yet: what fits does not hold it up


class PrintedLines:
    """The pool's end of the pipe into which a worker prints.

    A model that prints megabytes slows down itself, not the node.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._tail = b""
        self._since_ns = self._left_out = 0
        self._lines_left = _LINES_A_SECOND
        os.set_blocking(descriptor, False)
        with contextlib.suppress(PermissionError):  # beyond what the user may have in pipes
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def read(self, now_ns: int) -> tuple[list[str], int, bool]:
        """Lines since the last call, at most 20 a second; bytes that were left out; whether more can come."""
        left_out = 0
        if now_ns - self._since_ns > NS_PER_S:
            self._since_ns, self._lines_left = now_ns, _LINES_A_SECOND
            left_out, self._left_out = self._left_out, 0
        try:
            data = os.read(self.descriptor, _PIPE_BYTES)
        except BlockingIOError:
            return [], left_out, True
        self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        shown, rest = data[:_SHOWN_BYTES], data[_SHOWN_BYTES:]
        lines = [line for line in shown.decode(errors="replace").splitlines() if line.strip()]
        self._left_out += sum(len(line) + 1 for line in lines[self._lines_left :]) + len(rest)
        lines = lines[: self._lines_left]
        self._lines_left -= len(lines)
        return lines, left_out, bool(data)

    @property
    def tail(self) -> str:
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        os.close(self.descriptor)
