"""Worker processes that stages share (`worker: shared`): one for each place that a stage's workers have.

Every stage's pool looks after workers of its own, with sockets and memory of their own. What it forks them from is
replaced: `SharedServer` stands in for the stage's `ForkServer`, and a `Seat` starts one worker, either as the first
session of a new process or as one more of a process that lives. The process's side is `model/fork_main.py`.

When such a process ends, one session is the cause, and the others must not pay for it twice: `Seat.culprit`.
"""

import contextlib
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchperf_ros.config.config import StageConfig
from torchperf_ros.workers.fork_server import ForkServer
from torchperf_ros.workers.process_setup import is_ending, is_readable
from torchperf_ros.workers.protocol import NOTES_FILE, pack_control
from torchperf_ros.workers.worker_setup import WorkerFolder

if TYPE_CHECKING:
    from torchperf_ros.workers.worker_pool import WorkerPool
    from torchperf_ros.workers.worker_process import WorkerProcess

_LOCK_WITHIN_S: Final = 0.05  # a fork by another stage's thread takes milliseconds, and at worst seconds
_EXIT_WITHIN_S: Final = 1.0
_KEPT_SEATS: Final = 16  # of sessions that are over: another stage may yet ask whether one was the culprit
_NOTES_BYTES: Final = 4_000
_LOOKS, _LOOK_S = 20, 0.0003  # at what a thread waits for
_SESSION: Final = re.compile(r"^session (\d+) thread ([0-9a-f]+) task (\d+)$", re.MULTILINE)
_CULPRIT: Final = re.compile(r"^culprit (\d+)$", re.MULTILINE)
_FATAL: Final = re.compile(r"^Fatal Python error:.*", re.MULTILINE | re.DOTALL)
_CURRENT_THREAD: Final = re.compile(r"^Current thread 0x0*([0-9a-f]+)", re.MULTILINE)
_numbers = itertools.count()


class SharedProcesses:
    """What the stages of a node share; each stage's pool calls on a thread of its own."""

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        """Take the stages; nothing is started before the first of them asks."""
        self.stages = [stage.name for stage in stages]
        self.lock = threading.RLock()
        self.users: set[SharedServer] = set()
        self._modules = ",".join(dict.fromkeys(stage.adapter.partition(":")[0] for stage in stages))
        self._count = max(stage.workers for stage in stages)
        self._server: ForkServer | None = None
        self._processes: dict[int, _Process] = {}

    def server(self, user: "SharedServer") -> ForkServer:
        """The one that processes are forked from now; one that has ended gets a successor."""
        with self.lock:
            self.users.add(user)
            if self._server is None:
                self._server = ForkServer(self._modules)
            elif self._server.ended:
                self._server = self._server.renewed()
            return self._server

    @property
    def usable(self) -> bool:
        """Whether a worker of any stage can serve."""
        seats = [seat for process in self._processes.values() for seat in process.seats]
        return any(seat.worker is not None and seat.worker.usable for seat in seats)

    def enter(self, seat: "Seat", place: int, descriptors: Sequence[int], meanwhile: Callable[[], None]) -> "_Process":
        """Start a session for a worker that is to have this place in its stage.

        The first stage's regular worker runs beside the second one's standby, and so on in turns: a fault costs one
        stage its runner and the other one its standby, and two runners do not wait for one interpreter.

        Raises:
            OSError, ProtocolError: a process was to be forked, and was not; see `ForkServer.fork`.
        """
        while not self.lock.acquire(timeout=_LOCK_WITHIN_S):  # another stage waits for a fork
            meanwhile()
        try:
            number = (place + self.stages.index(seat.stage)) % self._count
            process = self._processes.get(number)
            if process is None or not process.enter(seat, descriptors):
                assert self._server is not None
                process = self._processes[number] = _Process(self._server, seat, descriptors, meanwhile)
            return process
        finally:
            self.lock.release()


class SharedServer:
    """What a stage's pool has in place of a `ForkServer` of its own; see there."""

    def __init__(self, processes: SharedProcesses, stage: str) -> None:
        """Start it, unless another stage has."""
        self._processes, self._stage = processes, stage
        self._server = processes.server(self)
        self.started_ns = self._server.started_ns

    @property
    def ready(self) -> bool:
        """Whether it can fork now."""
        return self._server.ready

    @property
    def ended(self) -> bool:
        """Whether it is gone, and all workers with it."""
        return self._server.ended

    @property
    def why_bare(self) -> str:
        """Why workers import the adapters' modules themselves; "" if they need not."""
        return self._server.why_bare

    @property
    def failure(self) -> str:
        """See `ForkServer`."""
        return self._server.failure

    @property
    def stuck(self) -> bool:
        """Whether it does not answer, and no stage has a worker of it that can serve."""
        return self._server.stuck and not self._processes.usable

    def fileno(self) -> int:
        """Descriptor that is readable when `step` has something to do, for whoever comes first."""
        return self._server.fileno()

    def renewed(self) -> "SharedServer":
        """Another one in the place of one that has ended."""
        return SharedServer(self._processes, self._stage)

    def step(self) -> None:
        """Take in what it says, unless another stage's thread does."""
        if self._processes.lock.acquire(timeout=_LOCK_WITHIN_S):
            try:
                self._server.step()
            finally:
                self._processes.lock.release()

    def seat(self, place: int) -> "Seat":
        """For a worker that is to have this place in its stage."""
        return Seat(self._processes, self._stage, place)

    def close(self) -> None:
        """End it, with all processes, if it is of no use, or nobody else uses it."""
        with self._processes.lock:
            self._processes.users.discard(self)
            if not self._processes.users or self._server.ended or not self._server.ready or self.stuck:
                self._server.close()


class Seat:
    """One worker's place in a process that it shares; its `WorkerProcess` has it in place of a fork server."""

    def __init__(self, processes: SharedProcesses, stage: str, place: int) -> None:
        """Take which stage, and which of its places."""
        self.stage, self.place, self.number = stage, place, next(_numbers)
        self.worker: WorkerProcess | None = None  # who has it; None before and after
        self._processes = processes
        self._process: _Process | None = None

    @property
    def stages(self) -> list[str]:
        """Which stages have a session in its process, in the order of the node's."""
        there = {seat.stage for seat in self.process.seats if seat.worker is not None}
        return [name for name in self._processes.stages if name in there]

    @property
    def process(self) -> "_Process":
        """The process, once it is there."""
        assert self._process is not None
        return self._process

    def fork(
        self, descriptors: Sequence[int], folder: str, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[int, int]:
        """Have a session started; returns the process's id and a descriptor of it."""
        self._process = self._processes.enter(self, self.place, descriptors, meanwhile)
        try:
            return self._process.pid, os.dup(self._process.pidfd)
        except OSError:
            self.leave()
            raise

    def exit_code(self, pid: int) -> int | None:
        """See `ForkServer.exit_code`; None also while another stage waits for a fork."""
        if not self._processes.lock.acquire(timeout=_EXIT_WITHIN_S):
            return None
        try:
            return self.process.server.exit_code(pid)
        finally:
            self._processes.lock.release()

    def blame(self, reason: str, *, hung: bool) -> None:
        """Note that the process is about to be killed for what this session does, or keeps others from doing."""
        self.process.blame(self, reason, hung=hung)

    def culprit(self) -> "Seat | None":
        """Whose session has ended the process; None if it has not ended, or nobody knows."""
        return self.process.culprit()

    def leave(self) -> None:
        """Give it up, before the worker's memory is released; the last one that does ends the process."""
        self.process.left(self)

    def stuck_ms(self, now_ns: int) -> float:
        """For how long its session has been busy with one thing."""
        return self.worker.busy_ms(now_ns) if self.worker is not None else 0.0


class _Process:
    """One process, and who has a session in it."""

    def __init__(
        self, server: ForkServer, seat: Seat, descriptors: Sequence[int], meanwhile: Callable[[], None]
    ) -> None:
        """Have it forked, with its first session."""
        self.server = server
        self.kill_reason = ""
        self._folder = WorkerFolder()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self.pid, self.pidfd = server.fork([*descriptors, theirs.fileno()], self.folder, meanwhile)
        except BaseException:
            self._socket.close()
            self._folder.remove()
            raise
        self._socket.setblocking(False)
        self._lock = threading.Lock()  # held for microseconds, as a frame may wait for it
        self._seats = {seat.number: seat}  # of those who are here, and of the last ones who were
        self._open = self._undecided = True
        self._killed = False  # and perhaps not to be ended
        self._culprit: Seat | None = None

    @property
    def folder(self) -> str:
        """Where it keeps its temporary files."""
        return self._folder.path

    @property
    def seats(self) -> list[Seat]:
        """Of those who are in it, and of the last ones who were."""
        return list(self._seats.values())

    def enter(self, seat: Seat, descriptors: Sequence[int]) -> bool:
        """Have it start one more session; False: it has ended, or takes no more."""
        with self._lock:
            if not self._open or self._killed or is_readable(self.pidfd, 0.0):
                return False
            try:
                socket.send_fds(self._socket, [pack_control("session")], list(descriptors))
            except OSError:
                return False
            self._seats[seat.number] = seat
            gone = [number for number, each in self._seats.items() if each.worker is None and each is not seat]
            for number in gone[:-_KEPT_SEATS]:
                del self._seats[number]
            return True

    def left(self, seat: Seat) -> None:
        """A session is over, or about to be; without any the process ends when its socket closes."""
        with self._lock:
            seat.worker = None
            if self._open and all(each.worker is None for each in self._seats.values()):
                self._open = False
                self._socket.close()
                os.close(self.pidfd)
                self._folder.remove()

    def blame(self, seat: Seat, reason: str, *, hung: bool) -> None:
        """It is about to be killed; where a session hangs, for the one that keeps the interpreter from the others."""
        found = self._holder(seat) if hung else seat  # which takes milliseconds
        with self._lock:
            self._killed = True
            if self._undecided:
                self._undecided, self.kill_reason, self._culprit = False, reason, found

    def _holder(self, seat: Seat) -> Seat:
        """Of those that are stuck and do not wait for a lock, or else of all that are, the one that is for longest."""
        now_ns = time.monotonic_ns()
        long_ms = seat.stuck_ms(now_ns) / 2
        tasks = {int(number): task for number, _, task in _SESSION.findall(self._notes())}
        seats = [each for each in self.seats if each.number in tasks]
        stuck = [each for each in seats if each.stuck_ms(now_ns) >= long_ms]
        at_work = [each for each in stuck if not _waits_for_lock(self.pid, tasks[each.number])]
        return max(at_work or stuck, key=lambda each: each.stuck_ms(now_ns), default=seat)

    def culprit(self) -> Seat | None:
        """See `Seat.culprit`: what was found first holds, so that every stage names the same one."""
        with self._lock:
            if self._undecided and self._open:
                notes = self._notes()
                threads = {thread: int(number) for number, thread, _ in _SESSION.findall(notes)}
                found = [int(number) for number in _CULPRIT.findall(notes)]
                found += [threads[thread] for thread in _CURRENT_THREAD.findall(notes) if thread in threads]
                if found:
                    self._culprit, self._undecided = self._seats.get(found[0]), False
                elif is_readable(self.pidfd, 0.0) or is_ending(self.pid):
                    busy = [each for each in self._seats.values() if each.worker is not None and each.worker.at_work]
                    self._culprit, self._undecided = busy[0] if len(busy) == 1 else None, False
            return self._culprit

    @property
    def last_words(self) -> str:
        """The stacks of one that ended by a signal; "" for others."""
        found = _FATAL.search(self._notes())
        return found[0][-_NOTES_BYTES:] if found else ""

    def _notes(self) -> str:
        """What its sessions have written down, each one's threads, and what ended it."""
        try:
            return Path(self.folder, NOTES_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _waits_for_lock(pid: int, task: str) -> bool:
    """Whether a thread is seen to sleep on a lock in the kernel, as one that waits for the interpreter.

    That one wakes up every 0.1 ms for a moment (`sys.setswitchinterval`), which takes longer on a busy machine.
    """
    file = Path(f"/proc/{pid}/task/{task}/wchan")
    for _ in range(_LOOKS):
        with contextlib.suppress(OSError):
            if "futex" in file.read_text(encoding="ascii"):
                return True
        time.sleep(_LOOK_S)
    return False


def share_processes(pools: "Sequence[WorkerPool]") -> None:
    """Have the workers of those stages share processes whose parameters say so; before they start."""
    sharing = [pool for pool in pools if pool.config.worker == "shared"]
    if sharing:
        processes = SharedProcesses([pool.config for pool in sharing])
        for pool in sharing:
            pool.processes = processes
