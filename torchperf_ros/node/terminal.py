"""What the node and its children print, passed on by a process of its own: nothing waits for who reads it.

A terminal that is paused (Ctrl-S), a pipe that is full or a disk that hangs holds up the process that
writes to it. The logger of rclpy holds the interpreter lock meanwhile, so that one line would stop every
thread of the node: deadlines, hang detection and restarts. So standard output and error are pipes here, and
a process reads them that has nothing else to do. What waits there is bounded; lines beyond that are left
out and counted, and a line says so.
"""

import array
import contextlib
import fcntl
import mmap
import os
import select
import signal
import sys
import termios
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from torchperf_ros.workers.process_setup import name_process

PROCESS_NAME: Final = "perf_terminal"
_KEPT_BYTES: Final = 1 << 20
_PIPE_BYTES: Final = 1 << 20
_OUTPUTS: Final = (1, 2)
_LOST, _BUSY = range(
    2
)  # words of what the two processes share, of each output: lines left out, whether any wait
_FLUSH_S, _LOOK_S = 0.5, 0.002
_ENDS_WITHIN_S: Final = 2.0  # once no process can print any more
_COLOURS: Final = "RCUTILS_COLORIZED_OUTPUT"


@contextlib.contextmanager
def passed_on() -> Iterator[Callable[[], int]]:
    """Within the block nothing that is printed waits.

    Gives a function that says how many lines were left out.

    To be entered while the process has one thread: it forks. Should the other process be killed, that
    function, which is asked once a second, has all printed as before.
    """
    if os.isatty(2):  # the logger would not see that any more
        os.environ.setdefault(_COLOURS, "1")
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    words = memoryview(shared).cast("Q")
    relays = [
        _Relay(outputs, words[2 * number : 2 * number + 2]) for number, outputs in enumerate(_by_file())
    ]
    _flush()
    with warnings.catch_warnings():  # numpy's threads are idle, and of no use to the fork
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            print(
                f"what is printed may hold the node up: no process can be forked for it: {error}",
                file=sys.stderr,
            )
            pid, relays = -1, []
        if pid == 0:
            _serve(relays)
    for relay in relays:
        relay.begin()
    is_there = pid > 0

    def lost() -> int:
        nonlocal is_there
        if is_there and _has_ended(pid):
            is_there = False
            for relay in relays:
                relay.end(0.0)
            print(
                "what is printed may hold the node up: the process that passes it on is gone",
                file=sys.stderr,
            )
        return sum(relay.lost for relay in relays)

    try:
        yield lost
    finally:
        _flush()
        give_up_at = time.monotonic() + _FLUSH_S
        for relay in relays:
            relay.end(give_up_at)


def _has_ended(child: int) -> bool:
    try:
        return bool(os.waitpid(child, os.WNOHANG)[0])
    except ChildProcessError:  # the process that started this one has the kernel reap its children
        return True


def _by_file() -> list[list[int]]:
    """Standard output and error, in one group if they are one file: what is printed keeps its order."""
    groups: dict[tuple[int, int], list[int]] = {}
    for output in _OUTPUTS:
        with contextlib.suppress(OSError):  # it is closed
            found = os.fstat(output)
            groups.setdefault((found.st_dev, found.st_ino), []).append(output)
    return list(groups.values())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, or None
            stream.flush()


def _serve(relays: "list[_Relay]") -> None:
    """The process that passes lines on, until no process can print any more; never returns."""
    try:
        name_process(PROCESS_NAME)
        # Those of the group: what the others say of their end is to be read, too. And that of a terminal to
        # a process that writes to it in the background.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        kept = {descriptor for relay in relays for descriptor in (relay.source, relay.target)}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in kept:
                with contextlib.suppress(OSError):  # that of the look
                    os.close(descriptor)
        threads = [threading.Thread(target=relay.take) for relay in relays]
        for relay, thread in zip(relays, threads, strict=True):
            thread.start()
            threading.Thread(target=relay.write, daemon=True).start()
        for thread in threads:
            thread.join()
        give_up_at = time.monotonic() + _ENDS_WITHIN_S
        while any(relay.busy for relay in relays) and time.monotonic() < give_up_at:
            time.sleep(_LOOK_S)
    finally:
        os._exit(0)


class _Relay:
    """One file that is printed to, with the pipe that stands in for it.

    The node's side and the other process's.

    Attributes:
        source: where this process reads what was printed.
        target: the file that it goes to.
    """

    def __init__(self, outputs: list[int], words: memoryview) -> None:
        self._outputs, self._words = outputs, words
        self.target = os.dup(outputs[0])
        self.source, self._pipe = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # beyond what the user may have in pipes
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(
            self._pipe, False
        )  # should its reader be held up or gone, a line is lost, and nothing else
        self._chunks: deque[bytes] = deque()
        self._bytes = self._left_out = 0
        self._news = threading.Condition()

    # -- the node

    @property
    def lost(self) -> int:
        """Lines that were left out."""
        return int(self._words[_LOST])

    @property
    def busy(self) -> bool:
        """Whether something waits for who reads it."""
        return bool(self._words[_BUSY])

    def begin(self) -> None:
        """Have what is printed go into the pipe."""
        for output in self._outputs:
            os.dup2(self._pipe, output)
        os.close(self._pipe)
        os.close(self.source)

    def end(self, give_up_at: float) -> None:
        """Have it go where it went before, once all that was printed has left; nothing if that was done."""
        if self.target < 0:
            return
        unread = array.array("i", [0])
        while time.monotonic() < give_up_at:
            fcntl.ioctl(self._outputs[0], termios.FIONREAD, unread)
            if not unread[0] and not self.busy:
                break
            time.sleep(_LOOK_S)
        for output in self._outputs:
            os.dup2(self.target, output)
        os.close(self.target)
        self.target = -1

    # -- the process that passes it on

    def take(self) -> None:
        """Take what comes, at once, until all ends are closed that could be written to."""
        poll = select.poll()
        poll.register(self.source, select.POLLIN)
        data = b"."
        while data:
            poll.poll()
            with self._news:
                self._words[_BUSY] = 1
                data = os.read(self.source, _PIPE_BYTES)
                if self._bytes + len(data) > _KEPT_BYTES:
                    self._left_out += data.count(b"\n")
                    self._words[_LOST] += data.count(b"\n")
                else:
                    self._keep(data)
                self._news.notify()

    def _keep(self, data: bytes) -> None:
        """Have this written, after a word on what was left out before it."""
        if self._left_out:
            reported = f"{self._left_out} lines were left out here, as they were not read\n"
            self._left_out, data = 0, reported.encode() + data
        self._chunks.append(data)
        self._bytes += len(data)

    def write(self) -> None:
        """Write what has come, as fast as it is read."""
        while True:
            with self._news:
                while not self._chunks:
                    if self._left_out:
                        self._keep(b"")
                    else:
                        self._words[_BUSY] = 0
                        self._news.wait()
                data = self._chunks.popleft()
                self._bytes -= len(data)
            with contextlib.suppress(OSError):  # it has no reader any more
                while data:
                    data = data[os.write(self.target, data) :]
