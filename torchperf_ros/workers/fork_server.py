"""The fork server seen from the node: a warm process out of which a worker comes in milliseconds.

Importing torch takes seconds, and a vehicle that has lost a worker has not got them. So one process of the
node, the base, imports torch and nothing else. Each stage forks its own server from it, which imports the
adapter's module, and each worker is a fork of that server. Neither runs a model, starts a thread or touches
a GPU: a fork inherits no thread and cannot use its parent's CUDA context. What they have imported is
shared, copy on write, so that a worker costs less memory than a process of its own. Their side is
`worker/fork_main.py`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.workers.process_setup import is_readable
from torchperf_ros.workers.protocol import MAX_CONTROL_BYTES, pack_control, unpack_control

_FORK_TAKES_AT_MOST_S = 10.0
_EXIT_TELLS_WITHIN_S = 1.0
_BASE_ENDS_WITHIN_S = 5.0
_LOOK_S = 0.05
_KEPT_EXITS = 64
_NO_DESCRIPTOR = "this process has no descriptor left for it"


class _Base:
    """The process that has imported torch and nothing of the user's.

    It ends when the last reference to this does.
    """

    _current: "_Base | None" = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.surroundings = _surroundings()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # stdout belongs to the program that started us, which may write its results there
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torchperf_ros.worker.fork_main", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        weakref.finalize(self, _end, self.socket, self._process)

    @classmethod
    def get(cls) -> "_Base":
        """The one of this process.

        A new one where there is none, it has ended, or the environment has changed.
        """
        with cls._lock:
            base = cls._current
            if base is None or not base.lives or base.surroundings != _surroundings():
                base = cls._current = cls()
            return base

    @property
    def lives(self) -> bool:
        return self._process.poll() is None


def _surroundings() -> tuple[dict[str, str], str]:
    """What a process takes over from the one that starts it, less pytest's note of the test that runs."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}, os.getcwd()


def _end(node: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a base that is not needed any more, also in the middle of an import."""
    node.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk, and nothing for it
        process.wait(_BASE_ENDS_WITHIN_S)


def start_base() -> None:
    """Start to import torch in the background, so that the first worker need not wait for all of it."""
    _Base.get()


class ForkServer:
    """Forks one stage's workers. One thread at a time uses it.

    Attributes:
        ready: whether it can fork now.
        ended: whether it is gone, and its workers with it.
        why_bare: why workers import the adapter's module themselves, which takes them longer; "" if they
            need not.
        failure: why it could not be started; "" if it could, or the reason is unknown.
        stuck: whether it has not answered the last request for a worker in time.
        pid: of its process, 0 before it has reported; `number` of the last request for a worker.
    """

    def __init__(self, module: str, why_bare: str = "") -> None:
        """Start it; returns at once.

        It imports `module` for its workers, "" for nothing, and `why_bare` says why.
        """
        self.ready = self.ended = self.stuck = False
        self.failure = ""
        self.started_ns = time.monotonic_ns()
        self.why_bare, self._module, self._unfit = why_bare, module, ""
        self.pid, self._pidfd = 0, -1
        self.number = 0
        self._forked: tuple[int, int] | None = None  # what came of it: process id and descriptor,
        self._refusal = ""  # or why there is no process
        self._exits: dict[int, int] = {}
        self._base = _Base.get()
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with (
            far,
            contextlib.suppress(OSError),
        ):  # a base that has just died: `step` finds the far end closed
            socket.send_fds(self._base.socket, [pack_control("server", module=module)], [far.fileno()])

    def fileno(self) -> int:
        """Descriptor that is readable when `step` has something to do."""
        return self._socket.fileno()

    def renewed(self) -> "ForkServer":
        """Another one in the place of one that has ended: without the module if that is what ended it."""
        why = self.why_bare or self._unfit
        if not why and self.pid and not self.ready and self._base.lives:
            why = f"a process that imported {self._module} did not come through it"
        return ForkServer("" if why else self._module, why)

    def step(self) -> None:
        while not self.ended:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, MAX_CONTROL_BYTES, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                data, descriptors = b"", []
            message: dict[str, Any] = unpack_control(data) if data else {"kind": "ended"}
            match message["kind"]:
                case "ended":
                    self.ended = True
                case "hello":
                    self._hello(message["pid"], descriptors)
                case "ready":
                    self.ready = True
                case "unfit":
                    self._unfit = message["why"]
                case "forked":
                    self._take(message["number"], message["pid"], descriptors)
                case "failed":
                    self.failure = message["why"]  # the base's word, where there is no server
                    if message["number"] == self.number:
                        self._refusal = message["why"]
                case "exited":
                    self._exits[message["pid"]] = message["code"]
                    while len(self._exits) > _KEPT_EXITS:
                        del self._exits[next(iter(self._exits))]

    def _hello(self, pid: int, descriptors: list[int]) -> None:
        if descriptors:
            self.pid, self._pidfd = pid, descriptors[0]
        else:  # it ends when it finds the socket closed
            self.ended, self.failure = True, _NO_DESCRIPTOR

    def _take(self, number: int, pid: int, descriptors: list[int]) -> None:
        """A worker was forked.

        One that is not waited for any more, or cannot be watched, is not to live on.
        """
        if descriptors and number == self.number:
            self._forked = pid, descriptors[0]
            return
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # it has ended, and the worker with it
            self._socket.send(pack_control("kill", pid=pid))
        if number == self.number:
            self._refusal = _NO_DESCRIPTOR

    def fork(
        self, descriptors: Sequence[int], folder: str, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[int, int]:
        """Fork a worker; returns its process id and a descriptor of the process.

        Args:
            descriptors: frames, control, result, a ring for each stream, and where it prints, see
                `preparation.main`.
            folder: where it keeps its temporary files.
            meanwhile: called again and again while the server takes its time, as on a machine that swaps.

        Raises:
            OSError: this process has not got what that takes.
            ProtocolError: the server has not, or does not answer, or has ended; those that it has forked
                live on.
        """
        self.number, self._forked, self._refusal = self.number + 1, None, ""
        asked = pack_control("worker", folder=folder, number=self.number)
        with contextlib.suppress(ConnectionError):  # it has just ended: the wait finds out
            socket.send_fds(self._socket, [asked], list(descriptors))
        self._wait(lambda: self._forked is not None or self._refusal, _FORK_TAKES_AT_MOST_S, meanwhile)
        self.stuck = self._forked is None and not self._refusal
        self.number += self.stuck  # what comes now comes too late
        if self._forked is None:
            late = "has ended" if self.ended else f"gave no worker within {_FORK_TAKES_AT_MOST_S:.0f} s"
            why = f"forked none: {self._refusal}" if self._refusal else late
            raise ProtocolError(f"the fork server (pid {self.pid}) {why}")
        return self._forked

    def exit_code(self, pid: int) -> int | None:
        """The exit status of a worker that has ended, negative for a signal.

        None if that is not known any more.
        """
        self._wait(lambda: pid in self._exits, _EXIT_TELLS_WITHIN_S)
        return self._exits.get(pid)

    def _wait(
        self, condition: Callable[[], object], seconds: float, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        give_up_at = time.monotonic() + seconds
        self.step()
        while not condition() and not self.ended and (left_s := give_up_at - time.monotonic()) > 0:
            if not is_readable(self._socket.fileno(), min(left_s, _LOOK_S)):
                meanwhile()
            self.step()

    def close(self) -> None:
        self.ended = True
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            is_readable(self._pidfd, _FORK_TAKES_AT_MOST_S)
            os.close(self._pidfd)
            self._pidfd = -1
        self._socket.close()
