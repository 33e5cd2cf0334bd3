"""What the node does to be recorded: starts the recorder, tells it what happens, and starts another if it is gone."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.config import NodeConfig
from torchperf_ros.core.errors import ProtocolError
from torchperf_ros.core.evidence_folder import open_evidence
from torchperf_ros.core.frame import Answer
from torchperf_ros.core.user_folder import user_folder
from torchperf_ros.supervise.frame_ring import record_size
from torchperf_ros.supervise.realtime import step_back
from torchperf_ros.telemetry.record_stream import StreamWriter
from torchperf_ros.telemetry.recorder_process import RecorderProcess

_RESTART_S = 10.0
_PASS_ON_S = 0.05
_MOST_WAITING = 1000


class Recording:
    """The node's side of the recorder. `frame` is for the stages' threads and takes no lock, the rest for any thread.

    A stage's thread only leaves its answer here: a thread of this object's passes it on, 20 times a second.

    Attributes:
        status: what the recorder last said of itself.
        problem: why nothing is recorded at present, empty if all is well.
        restarts: recorders that had to be replaced.
        ros_offset_ns: ROS time less monotonic time, as of the last second; for frames whose age is unknown.
    """

    def __init__(self, config: NodeConfig, setup: Mapping[str, Any], stage_fds: Sequence[int]) -> None:
        """Start a recorder.

        Args:
            config: the parameters.
            setup: node, pid, versions, parameters, stages, topics, see `Recorder`.
            stage_fds: the rings of the stages, in their order.
        """
        self.status: dict[str, Any] = {}
        self.problem = ""
        self.restarts = 0
        self.ros_offset_ns = int(setup["ros_offset_ns"])
        self._evidence = open_evidence(config.evidence_dir, config.evidence_count, config.evidence_mib)
        records = Path(config.record_dir).expanduser() if config.record_dir else (
            user_folder("XDG_STATE_HOME", ".local/state") / "records"
        )  # fmt: skip
        self._setup = {
            **setup, "record_dir": str(records), "record_mib": config.record_mib, "evidence_dir": config.evidence_dir,
            "evidence_count": config.evidence_count, "evidence_mib": config.evidence_mib,
            "black_box_s": config.black_box_s, "black_box_after_s": config.black_box_after_s,
            "black_box_mib": config.black_box_mib, "watch": config.watch,
        }  # fmt: skip
        self._stage_fds = list(stage_fds)
        self._writer = StreamWriter(max(record_size([stage.max_frame_bytes]) for stage in config.stages))
        self._after_ns = round(config.black_box_after_s * NS_PER_S)
        self._incident = ("", 0)
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.Lock()
        self._tried_at = time.monotonic()
        self._process: RecorderProcess | None = self._spawn()
        self._answers: deque[tuple[int, Answer, float]] = deque(maxlen=_MOST_WAITING)
        self._ending = threading.Event()
        self._scribe = threading.Thread(target=self._pass_on, name="scribe", daemon=True)
        self._scribe.start()

    def _spawn(self) -> RecorderProcess | None:
        try:
            return RecorderProcess(self._writer, self._stage_fds, self._setup)
        except OSError as error:
            self.problem = f"the recorder cannot be started: {error}"
            return None

    def frame(self, stage: int, answer: Answer, answer_ms: float) -> None:
        """An answered frame; on its stage's thread."""
        if len(self._answers) == _MOST_WAITING:
            self._writer.lost += 1
        self._answers.append((stage, answer, answer_ms))

    def _pass_on(self) -> None:
        step_back()
        while not self._ending.wait(_PASS_ON_S):
            with self._lock:
                self._pass_answers()

    def _pass_answers(self) -> None:
        while self._answers:
            stage, answer, answer_ms = self._answers.popleft()
            t_ns = answer.frame.ros_ns(answer.published_ns)
            if t_ns is None:
                t_ns = answer.published_ns + self.ros_offset_ns
            self._writer.frame(stage, t_ns, answer, answer_ms)

    def message(self, topic: int, t_ns: int, data: bytes) -> None:
        """A message that was published; `topic` is its index among the setup's topics."""
        with self._lock:
            self._writer.message(topic, t_ns, data)

    def tell(self, t_ns: int, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Anything else, with its `kind`, from any thread; it is passed on within a second."""
        if len(self._waiting) == _MOST_WAITING:
            self._writer.lost += 1
        self._waiting.append((t_ns, fields))

    def incident(self, what: str, now_ns: int) -> str:
        """The name of an incident of now, or of the one that is being recorded; `what`: one or two words for it."""
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
            self._writer.event(t_ns, {"kind": "record", "name": name, "why": why, "stacks": stacks})

    def step(self) -> list[dict[str, Any]]:
        """Once a second: pass on what was told, and hear what the recorder says; another one is started if need be."""
        with self._lock:
            return self._step()

    def _step(self) -> list[dict[str, Any]]:
        self._pass_answers()
        while self._waiting:
            self._writer.event(*self._waiting.popleft())
        if self._process is None:
            if time.monotonic() - self._tried_at >= _RESTART_S:
                self._tried_at = time.monotonic()
                self.restarts += 1
                self._process = self._spawn()
            return []
        try:
            heard = list(self._process.heard())
        except (ProtocolError, ValueError) as error:
            self.problem = str(error)
            self._process.close(orderly=False)
            self._process = None
            self._tried_at = time.monotonic()
            return []
        for message in heard:
            if message["kind"] == "status":
                self.status = message
                self.problem = message["problem"]
        return [message for message in heard if message["kind"] != "status"]

    def close(self, t_ns: int) -> str:
        """End the recorder once it has written what it has to; returns what went wrong."""
        self._ending.set()
        self._scribe.join()
        with self._lock:
            self._step()
            self._tried_at = math.inf
            problem = ""
            if self._process is not None:
                self._writer.event(t_ns, {"kind": "end"})
                problem = self._process.close(orderly=True)
                self._process = None
            self._writer.close()
            return problem
