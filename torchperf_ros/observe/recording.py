"""The node's side of the recorder: starts its process, sends it what happens, and replaces it.

A recorder reports each second. One that does not, because it is stopped or its disk hangs, is killed and
replaced.
"""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import psutil

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.observe.telemetry.rows import MAX_PACKET_BYTES, StreamWriter
from torchperf_ros.settings.config import NodeConfig
from torchperf_ros.settings.files import node_folder
from torchperf_ros.stage.frame import Answer
from torchperf_ros.workers.frame_ring import FrameRing, RingExtra, record_size
from torchperf_ros.workers.incident_folder import open_incidents
from torchperf_ros.workers.process_setup import step_back

_ENTRY: Final = """\
import os, sys
from torchperf_ros.workers.process_setup import leave_priority, outlive_the_group, set_nice
outlive_the_group()
leave_priority()  # before the imports: they take 0.3 s, and the node's first frames come just then
set_nice(os.getpid(), 10)  # at 19, a full machine leaves it too little to keep images, when they matter
from torchperf_ros.observe.recorder import main
main(*map(int, sys.argv[1:]))"""
_QUEUE_BYTES: Final = 1 << 20
_SO_SNDBUFFORCE: Final = 32  # Python has no name for it
_END_S: Final = 10.0
_RESTART_S: Final = 10.0
_PASS_ON_S: Final = 0.05
_LATE_S: Final = 2.0  # after which a recorder on a machine that is full may still copy what is kept
# What waits to be passed on: a second of the largest images that a node hears beside its frames. It is
# counted from pass to pass, so that there may be twice as much for a moment.
_MOST_WAITING: Final = 3000
_MOST_WAITING_BYTES: Final = 32 << 20
# So long a recorder may be silent, by its state. A stopped one does not go on by itself; a full machine
# leaves no time to one that would run, and to kill it would lose what it holds. Else it waits, as a
# rule for a disk, which other processes may keep from it for a while. One that has yet to say its first
# word reads its modules from there: who is ended at that begins anew, and never comes to an end.
_SILENT_S: Final = 5.0
_KILL_S: Final = {psutil.STATUS_STOPPED: _SILENT_S, psutil.STATUS_RUNNING: 60.0}
_KILL_ELSE_S: Final = 20.0
_PARAMETERS: Final = ("record_mib", "evidence_dir", "evidence_mib", "black_box_s", "black_box_mib", "watch")


class RecorderProcess:
    """A process that takes what the writer sends, and answers on the same socket."""

    def __init__(self, writer: StreamWriter, stage_fds: Sequence[int], setup: dict[str, Any]) -> None:
        """Spawn it, connect the writer that the node sends by, and hand it its setup, see `Recorder`."""
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
        with contextlib.suppress(PermissionError):  # beyond the system's limit where that is permitted
            own.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _QUEUE_BYTES)
        own.setblocking(False)
        with theirs, os.fdopen(os.memfd_create("setup"), "wb") as file:  # of any size, unlike a packet
            file.write(json.dumps(setup, default=str).encode())
            file.seek(0)
            passed = [theirs.fileno(), file.fileno(), writer.ring.fd, *stage_fds]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.socket = own
        self._writer = writer
        assert self._process.stdout is not None
        self._printed = self._process.stdout
        os.set_blocking(self._printed.fileno(), False)
        writer.connect(own)

    @property
    def state(self) -> str:
        """The kernel's word for what it does: running, sleeping, stopped, disk-sleep, zombie."""
        try:
            return str(psutil.Process(self.pid).status())
        except psutil.NoSuchProcess:
            return str(psutil.STATUS_ZOMBIE)

    def heard(self) -> Iterator[dict[str, Any]]:
        """Its messages since the last call.

        Raises:
            ProtocolError: it is gone; the message holds what it printed.
            ValueError: a message is no JSON object.
        """
        while True:
            try:
                data = self.socket.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                printed = b""
                with contextlib.suppress(BlockingIOError):
                    printed = os.read(self._printed.fileno(), 1 << 16)[-4_000:].strip()
                raise ProtocolError(
                    f"the recorder is gone: {printed.decode(errors='replace') or 'it printed nothing'}"
                )
            yield json.loads(data)

    def kill(self) -> None:
        """Have it end, without waiting: its end may take as long as the disk that it waits for."""
        self._writer.disconnect()
        self._process.kill()

    def has_ended(self) -> bool:
        if self._process.poll() is None:
            return False
        self._printed.close()
        return True

    def close(self) -> str:
        """End it once it has written what it has to. Returns what went wrong, empty if nothing did."""
        self._writer.disconnect()
        problem = ""
        if self.state == psutil.STATUS_STOPPED:
            problem = "the recorder was stopped (SIGSTOP): what it had not written is lost"
        else:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                problem = f"the recorder was not done after {_END_S:g} s: an incident may be lost"
        self.kill()
        # A process that waits for a disk stays behind: the node does not wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.has_ended()
        return problem


class Recording:
    """The node's side of the recorder, for any thread.

    `frame` and `message` take no lock: what they get waits in a queue, which a thread of this object's passes on
    20 times a second.

    Attributes:
        process: the recorder; None while there is none.
        status: the recorder's last report on itself.
        problem: why nothing is recorded at present, empty if all is well.
        restarts: recorders that had to be replaced; at most one in 10 s.
        ros_offset_ns: ROS time less monotonic time, as of the last second; for frames whose age is unknown.
    """

    def __init__(
        self,
        config: NodeConfig,
        setup: Mapping[str, Any],
        rings: Sequence[FrameRing],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a recorder, see it for the setup.

        Rings of stages that have triggers for the black box keep them for its seconds.
        """
        self.status: dict[str, Any] = {}
        self.problem = ""
        self.restarts = 0
        self.ros_offset_ns = int(setup["ros_offset_ns"])
        self._clock = clock
        self._evidence = open_incidents(config.evidence_dir, config.evidence_mib)
        after_s = config.black_box_s / 2
        self._setup = {
            **setup,
            **{name: getattr(config, name) for name in _PARAMETERS},
            "black_box_after_s": after_s,
            "record_dir": str(node_folder(self._evidence.root / "records", setup["node"])),
        }
        self._stage_fds = [ring.fd for ring in rings]
        extra = RingExtra(config.black_box_mib << 20)
        for ring, stage in zip(rings, setup["stages"], strict=True):
            if stage["inputs"] and stage["inputs"][0] is not None:
                ring.keep(config.black_box_s + _LATE_S, extra)
        self.writer = StreamWriter(max(record_size([stage.max_frame_bytes]) for stage in config.stages))
        self._after_ns = round(after_s * NS_PER_S)
        self._incident = ("", 0)
        self._index = {topic: index for index, (topic, _) in enumerate([*setup["topics"], *setup["heard"]])}
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        # Counted without a lock: two threads may lose some of it, but only until the next pass, which
        # begins anew.
        self._waiting_bytes = 0
        self._unpassed = ""  # the last error of passing on, and how many there were
        self._pass_errors = 0
        self._lock = threading.Lock()
        self._tried_at = self._heard_at = clock()
        self._killed: RecorderProcess | None = None
        self.process: RecorderProcess | None = self._spawn()
        self._ending = threading.Event()
        self._client = threading.Thread(target=self._pass_on, name="recorder-client", daemon=True)
        self._client.start()

    def _spawn(self) -> RecorderProcess | None:
        try:
            return RecorderProcess(self.writer, self._stage_fds, self._setup)
        except OSError as error:
            self.problem = f"the recorder cannot be started: {error}"
            return None

    def frame(self, stage: int, answer: Answer, answer_ms: float) -> None:
        """An answered frame; on its stage's thread."""
        size_bytes = 0 if answer.payload is None else len(answer.payload)
        self._queue(size_bytes, self._send_frame, stage, answer, answer_ms)

    def message(self, topic: str, t_ns: int, data: bytes) -> None:
        """A message of one of the setup's topics, at its ROS time: published, or heard."""
        self._queue(len(data), self._send_message, topic, t_ns, data)

    def event(self, t_ns: int, **fields: Any) -> None:  # noqa: ANN401 - JSON
        size_bytes = sum(len(value) for value in fields.values() if isinstance(value, str))
        self._queue(size_bytes, self.writer.event, t_ns, fields)

    def _queue(self, size_bytes: int, send: Callable[..., None], *what: Any) -> None:  # noqa: ANN401
        """Have it passed on; what finds no room is lost and counted. Takes no lock."""
        if len(self._waiting) >= _MOST_WAITING or self._waiting_bytes + size_bytes > _MOST_WAITING_BYTES:
            self.writer.lost += 1
            return
        self._waiting_bytes += size_bytes
        self._waiting.append((send, what))

    def _pass_on(self) -> None:
        step_back()
        while not self._ending.wait(_PASS_ON_S):
            with self._lock:
                self._pass_waiting()

    def _pass_waiting(self) -> None:
        self._waiting_bytes = 0
        while self._waiting:
            send, what = self._waiting.popleft()
            try:
                send(*what)
            except Exception:  # the threads' boundary: one unforeseen thing must not end the records
                self._pass_errors += 1
                self.writer.lost += 1
                count = f"{self._pass_errors} times something could not be passed on to the recorder"
                self._unpassed = self.problem = f"{count}, the last time:\n{traceback.format_exc()}"

    def _send_message(self, topic: str, t_ns: int, data: bytes) -> None:
        self.writer.message(self._index[topic], t_ns, data)

    def _send_frame(self, stage: int, answer: Answer, answer_ms: float) -> None:
        t_ns = answer.frame.ros_ns(answer.published_ns)
        known_ns = answer.published_ns + self.ros_offset_ns if t_ns is None else t_ns
        self.writer.frame(stage, known_ns, answer, answer_ms)

    @property
    def cut(self) -> int:
        return self.writer.cut

    def unable(self) -> str:
        """Why nothing can be recorded now, empty if it can; without waiting."""
        process = self.process
        if process is None:
            return self.problem or "the recorder is being restarted"
        state, silent_s = process.state, self._clock() - self._heard_at
        if state in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}:
            return f"the recorder is {state}"
        if silent_s >= _SILENT_S and state != psutil.STATUS_RUNNING:
            return f"the recorder has made no progress for {silent_s:.0f} s ({state})"
        return ""

    def incident(self, what: str, now_ns: int) -> str:
        """The name of an incident of now, or of the one that is being recorded.

        `what`: one or two words for it.
        """
        name, until_ns = self._incident
        if now_ns >= until_ns:
            name = self._evidence.name(what)
            self._incident = (name, now_ns + self._after_ns)
        return name

    def evidence_path(self, name: str) -> str:
        """Where that incident will be once it is complete."""
        return str(self._evidence.root / name)

    def record(self, name: str, why: str, t_ns: int, stacks: str) -> None:
        """Have an incident written, with a line for people and the stacks of node and workers."""
        with self._lock:
            self._pass_waiting()  # first what was published before
            self.writer.event(t_ns, {"kind": "record", "name": name, "why": why, "stacks": stacks})

    def step(self) -> list[dict[str, Any]]:
        """Once a second: read what the recorder reports, and start another one if need be."""
        with self._lock:
            return self._step()

    def _step(self) -> list[dict[str, Any]]:
        self._pass_waiting()
        process = self.process
        if process is None:
            self._start_again()
            return []
        try:
            heard = list(process.heard())
        except (ProtocolError, ValueError) as error:
            self._give_up(process, str(error))
            return []
        silent_s, state = self._clock() - self._heard_at, process.state
        if heard:
            self._heard_at = self._clock()
        elif silent_s >= _SILENT_S:
            self.problem = self.unable() or self.problem
            else_s = _KILL_ELSE_S if self._heard_at > self._tried_at else _KILL_S[psutil.STATUS_RUNNING]
            if silent_s >= _KILL_S.get(state, else_s):
                self._give_up(process, f"the recorder made no progress for {silent_s:.0f} s ({state})")
        for message in heard:
            if message["kind"] == "status":
                self.status = message
                self.problem = "; ".join(filter(None, (message["problem"], self._unpassed)))
        return [message for message in heard if message["kind"] != "status"]

    def _give_up(self, process: RecorderProcess, why: str) -> None:
        self.problem = f"{why}; another one is started"
        process.kill()
        self.process, self._killed = None, process
        self._incident = ("", 0)

    def _start_again(self) -> None:
        """Start another recorder, unless that was just tried, or the last one still waits for its disk."""
        if self._killed is not None and not self._killed.has_ended():
            self.problem = "the recorder was killed and has not ended: look at the disk of evidence_dir"
            return
        self._killed = None
        if self._clock() - self._tried_at >= _RESTART_S:
            self._tried_at = self._heard_at = self._clock()
            self.restarts += 1
            self.process = self._spawn()

    def close(self, t_ns: int) -> str:
        """End the recorder once it has written what it has to; returns what went wrong."""
        self._ending.set()
        self._client.join()
        with self._lock:
            self._step()
            self._tried_at = math.inf
            problem = ""
            if self.process is not None:
                self.writer.event(t_ns, {"kind": "end"})
                problem = self.process.close()
                self.process = None
            self.writer.close()
            return problem
