"""The recorder as the node sees it: spawned, told, heard, never waited for."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torchperf_ros.core.errors import ProtocolError
from torchperf_ros.telemetry.record_stream import MAX_PACKET_BYTES, StreamWriter

_QUEUE_BYTES = 1 << 20
_END_S = 10.0
_TAIL = 4_000


class RecorderProcess:
    """A process that takes what the writer sends, and answers on the same socket.

    Attributes:
        pid: of the process.
    """

    def __init__(self, writer: StreamWriter, stage_fds: Sequence[int], setup: dict[str, Any]) -> None:
        """Spawn it, connect the writer, and tell it what it records.

        Args:
            writer: what the node tells goes through it.
            stage_fds: the stages' rings.
            setup: see `Recorder`.
        """
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _enlarge(own)
        own.setblocking(False)
        passed = [theirs.fileno(), writer.ring.fd, *stage_fds]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torchperf_ros.telemetry.recorder_main", *map(str, passed)],
                pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.pid = self._process.pid
        self._writer, self._own = writer, own
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        writer.connect(own)
        writer.event(0, {"kind": "setup", **setup})

    def heard(self) -> Iterator[dict[str, Any]]:
        """What it has said since the last call.

        Raises:
            ProtocolError: it is gone, or says something that is no JSON object; the message holds what it printed.
        """
        while True:
            try:
                data = self._own.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ProtocolError(self._last_words()) from error
            if not data:
                raise ProtocolError(self._last_words())
            yield json.loads(data)

    def _last_words(self) -> str:
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            printed = os.read(self._process.stdout.fileno(), 1 << 16)[-_TAIL:].decode(errors="replace").strip()
            return f"the recorder is gone: {printed or 'it printed nothing'}"
        return "the recorder is gone"

    def close(self, *, orderly: bool) -> str:
        """End it: after what it has to write, or at once. Returns what went wrong, empty if nothing did."""
        self._writer.disconnect()
        if not orderly:
            self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"the recorder was not done after {_END_S:g} s: an incident may be lost"
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
        return ""


def _enlarge(own: socket.socket) -> None:
    """More room for what the recorder has not taken yet: beyond the system's limit where that is permitted."""
    with contextlib.suppress(PermissionError):
        own.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_SNDBUFFORCE", 32), _QUEUE_BYTES)
        return
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
