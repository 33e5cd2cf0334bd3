"""A worker on a virtual clock: the real process computes, the clock says how long that took."""

import select
import threading
import time
from dataclasses import replace
from typing import Final

from torchperf_ros.core.clock import NS_PER_MS
from torchperf_ros.core.outcome import Outcome
from torchperf_ros.core.tier_ladder import Calibration
from torchperf_ros.replay.virtual.step_times import StageTimes, VirtualRun
from torchperf_ros.supervise.frame_ring import FrameReader
from torchperf_ros.supervise.protocol import Response
from torchperf_ros.supervise.worker_process import WorkerProcess

_LOOK_S: Final = 0.05
_CATCH_UP_S: Final = 0.0002


class VirtualWorker:
    """Stands in for a `WorkerProcess` in a stage's dispatcher.

    A run is computed at once, and its response kept until the virtual clock says that it is due. What nobody waits for
    (practice) is not computed at all. Attributes that are not here are the process's own.

    Attributes:
        process: who computes.
        due_ns: virtual time of the response, or of the death; None while it has nothing to say.
        dead: why it is, "" while it lives.
    """

    def __init__(
        self, process: WorkerProcess, times: StageTimes, runs: "RunCounter", hang_ms: float, using: threading.Lock
    ) -> None:
        """Take a process that is ready.

        Args:
            process: who computes.
            times: what runs take.
            runs: of the stage.
            hang_ms: how long a run may take at all.
            using: held while the process is used: until it is released, its descriptors stay open.
        """
        self.process = process
        self.number = process.number
        self.pid = process.number  # what a message says of it is to be the same each time
        self.calibrations: list[Calibration] = times.calibrations()
        self.usable = False
        self.seq: int | None = None
        self.busy_since_ns = 0
        self.ready_at_ns: int | None = None
        self.hung = False
        self.away = self.recording = self.kill_reason = self.dead = ""
        self.due_ns: int | None = None
        self._times = times
        self._runs = runs
        self._using = using
        self._hang_ms = hang_ms
        self._response: tuple[Response, bytes] | None = None

    @property
    def idle(self) -> bool:
        """Whether it can take a frame now."""
        return self.usable and self.seq is None

    @property
    def available(self) -> bool:
        """Whether it takes frames, now or when it is done with one."""
        return self.usable

    @property
    def state(self) -> str:
        """One word or phrase."""
        return "dead" if not self.usable else "idle" if self.seq is None else "busy"

    @property
    def tiers(self) -> list[dict[str, object]]:
        """What the process last said of its tiers."""
        return self.process.tiers

    @property
    def missing(self) -> list[str]:
        """Tiers that the process runs in eager although another engine was asked for."""
        return self.process.missing

    def run(
        self, tier: int, seq: int, offset: int, length: int, now_ns: int, *, observe: bool, leave_ns: int = 0
    ) -> bool:
        """Take a frame; False if the process turns out to be dead."""
        self.seq, self.busy_since_ns = seq, now_ns
        stamp_ns, attempt = self._runs.begin(seq, offset, length, wanted=bool(leave_ns))
        plan = self._times.run(stamp_ns, seq, tier, attempt)
        took_ms = plan.steps.total_ms + plan.overhead_ms
        if plan.ending is Outcome.LATE and leave_ns:  # it was done at some time after its answer had left
            took_ms = min(self._hang_ms - 1.0, (leave_ns - now_ns) / NS_PER_MS + took_ms)
        self.hung = plan.ending is Outcome.HUNG or took_ms >= self._hang_ms
        if self.hung or plan.ending is Outcome.CRASHED:
            self._die(f"hung: hang_ms is {self._hang_ms:.0f}" if self.hung else "it crashed in the log")
        elif leave_ns:
            self._compute(tier, seq, offset, length, plan, observe=observe)
        else:
            self._response = (_timed(Response(Outcome.ON_TIME, tier, seq, 0, 0, 0, 0, 0), plan), b"")
        self.due_ns = now_ns + round(min(took_ms, self._hang_ms) * NS_PER_MS)
        return True

    def _compute(self, tier: int, seq: int, offset: int, length: int, plan: VirtualRun, *, observe: bool) -> None:
        process = self.process
        with self._using:
            sent = process.usable and process.run(tier, seq, offset, length, time.monotonic_ns(), observe=observe)
        received = None
        try:
            while received is None:
                with self._using:
                    if not sent or not process.usable:
                        raise EOFError
                    select.select([process.frames], [], [], _LOOK_S)
                    received = process.receive()
        except EOFError:
            self._die("it died")
        else:
            response, payload = received
            self._response = (_timed(response, plan), payload)

    def _die(self, why: str) -> None:
        """The process is to end, or has ended; the stage is told when that is due."""
        with self._using:
            if self.process.usable:
                self.process.kill(why)
        self.dead, self._response = why, None

    def observe(self, seq: int, offset: int, length: int, now_ns: int) -> bool:
        """Let it advance its histories, and wait until it has: the ring goes on faster than any live one."""
        if not self.usable or self.dead:
            return True
        with self._using:
            observed = not self.process.usable or self.process.observe(seq, offset, length, time.monotonic_ns())
        while not self._caught_up:
            time.sleep(_CATCH_UP_S)
        return observed

    @property
    def _caught_up(self) -> bool:
        """Whether the process has done all that it was given, or never will."""
        with self._using:
            return not self.process.usable or self.process.is_dead() or self.process.caught_up

    def receive(self) -> tuple[Response, bytes] | None:
        """The response that is due.

        Raises:
            EOFError: the worker is gone.
        """
        self.due_ns = None
        if self.dead:
            self.kill_reason = self.dead
            raise EOFError
        response, self._response = self._response, None
        self.seq = None
        return response

    def kill(self, reason: str) -> None:
        """End the process."""
        self.usable = False
        self._die(reason)


class RunCounter:
    """How often each frame of a stage was run, and which stamp it has, from the ring that it lies in."""

    def __init__(self, ring_fd: int) -> None:
        """Map the stage's ring."""
        self._ring = FrameReader(ring_fd)
        self._seq: int | None = None
        self._runs = 0

    def begin(self, seq: int, offset: int, length: int, *, wanted: bool) -> tuple[int, int]:
        """A run begins: the frame's stamp in ns, and how many there were before it; practice counts as a late one."""
        if seq != self._seq:
            self._seq, self._runs = seq, 0
        before, self._runs = self._runs, self._runs + 1
        stamp_ns = self._ring.read(offset, length, seq)[0].stamp_ns
        return stamp_ns, before if wanted else max(1, before)


def _timed(response: Response, plan: VirtualRun) -> Response:
    """The response with the plan's times for the steps that were reached."""
    times_ms = {"decode_ns": plan.steps.decode_ms, "preprocess_ns": plan.steps.preprocess_ms,
                "inference_ns": plan.steps.inference_ms, "postprocess_ns": plan.steps.postprocess_ms}  # fmt: skip
    reached = {name: round(ms * NS_PER_MS) for name, ms in times_ms.items() if getattr(response, name) >= 0}
    return replace(response, **reached)
