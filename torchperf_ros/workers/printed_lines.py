"""What a worker prints: few lines a second for the node's log, and its end for the reason of a death."""

import contextlib
import fcntl
import os

from torchperf_ros.api.clock import NS_PER_S

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
