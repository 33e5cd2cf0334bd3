"""The worker's side of evidence: takes the node's commands between frames, records, writes, and says where."""

import contextlib
import socket
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchperf_ros.core.errors import ProtocolError, TorchperfError
from torchperf_ros.core.evidence_folder import open_evidence
from torchperf_ros.supervise.protocol import MAX_CONTROL_BYTES, unpack_control
from torchperf_ros.worker.background import step_into_background
from torchperf_ros.worker.memory_recording import MemoryRecording
from torchperf_ros.worker.profile_recording import ProfileRecording
from torchperf_ros.worker.recording import Recording

_NOT_MARKED = contextlib.nullcontext()


class EvidenceTaker:
    """Commands: `record` (what, evidence: the parameters of the folder) begins, `finish` ends and writes.

    The answers: `recording` (error: why not, or ""), `recorded` (there is enough) and `evidence` (what, path, summary,
    error). The node gives no frames to a worker between a command and its answer.
    """

    def __init__(self, control: socket.socket, say: Callable[..., None], stage: str, device: torch.device) -> None:
        """Take the socket that commands come over, and who says the answers."""
        self._control, self._say, self._stage, self._device = control, say, stage, device
        self._recording: Recording | None = None
        self._what = ""
        self._evidence: dict[str, Any] = {}
        self._said_full = self._marks = False

    def poll(self) -> None:
        """Obey what has come in; never waits. Whatever fails is said, and the worker serves on."""
        while True:
            try:
                data = self._control.recv(MAX_CONTROL_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionError):  # nothing; or the node is gone, which ends the worker elsewhere
                break
            if not data:
                break
            self._obey(unpack_control(data))
        if self._recording is not None and self._recording.full and not self._said_full:
            self._said_full = True
            self._say("recorded", what=self._what)

    def mark(self, name: str) -> AbstractContextManager[object]:
        """A context that shows up under this name in what is recorded."""
        return torch.profiler.record_function(name) if self._marks else _NOT_MARKED

    def frame_done(self) -> None:
        """A frame was run."""
        if self._recording is not None:
            self._recording.frame_done()

    def _obey(self, command: dict[str, Any]) -> None:
        come_forward = step_into_background()  # another worker answers meanwhile
        if command["kind"] == "record":
            self._begin(command["what"], command["evidence"])
        elif command["kind"] == "finish":
            self._finish()
        else:
            msg = f"unknown command {command['kind']!r}"
            raise ProtocolError(msg)
        come_forward()

    def _begin(self, what: str, evidence: dict[str, Any]) -> None:
        made: Recording
        made = ProfileRecording(self._stage, self._device) if what == "profile" else MemoryRecording(self._device)
        error = ""
        try:
            made.begin()
        except Exception:  # a profiler that cannot start must not end a worker that can serve
            error = traceback.format_exc()
        self._what, self._evidence, self._said_full = what, evidence, False
        self._recording, self._marks = (None, False) if error else (made, what == "profile")
        self._say("recording", what=what, error=error)

    def _finish(self) -> None:
        recording, self._recording, self._marks = self._recording, None, False
        path = summary = error = ""
        if recording is None:
            error = "nothing was being recorded"
        else:
            written: list[str] = []
            try:
                folder = open_evidence(**self._evidence)
                kept = folder.keep(f"{self._what}-{self._stage}", lambda part: written.append(recording.finish(part)))
                path, summary = str(kept), written[0]
            except TorchperfError as failed:
                error = str(failed)
            except Exception:  # likewise
                error = traceback.format_exc()
        self._say("evidence", what=self._what, path=path, summary=summary, error=error)
