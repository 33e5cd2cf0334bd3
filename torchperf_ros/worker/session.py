"""A worker's life: hello, load, warm up, calibrate, ready, then one frame after the other."""

import contextlib
import mmap
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchperf_ros.core.errors import BadInput, TorchperfError
from torchperf_ros.core.message_types import decode, encode, full_name, warm_up
from torchperf_ros.core.outcome import Outcome
from torchperf_ros.supervise.frame_ring import FrameReader
from torchperf_ros.supervise.protocol import RESULT_OFFSET, Kind, Request, Response, pack_control, unpack_request
from torchperf_ros.worker.adapter import Adapter, Received, load_adapter
from torchperf_ros.worker.device import Device, choose_device
from torchperf_ros.worker.evidence_taker import EvidenceTaker
from torchperf_ros.worker.history_buffer import history_bytes
from torchperf_ros.worker.output_check import InvalidOutput, OutputCheck
from torchperf_ros.worker.seeding import seed_generators
from torchperf_ros.worker.tier import Tier
from torchperf_ros.worker.tier_loader import TierLoader

_REPORT_EVERY_S = 1.0
_EXIT_DEVICE_LOST = 70


class Session:
    """Runs an adapter for a node that sits at the other end of two sockets."""

    def __init__(
        self, setup: Mapping[str, Any], control: socket.socket, frames: socket.socket, ring_fd: int, result_fd: int
    ) -> None:
        """Take the node's setup message and the descriptors."""
        self._setup = setup
        self._control = control
        self._frames = frames
        self._ring = FrameReader(ring_fd)
        self._result = mmap.mmap(result_fd, 0)
        self._handled = memoryview(self._result)[:RESULT_OFFSET].cast("Q")
        self._device = Device(choose_device(setup["device"]), setup["threads"])
        self._evidence = EvidenceTaker(control, self._say, setup["stage"], self._device.device)
        self._tiers: list[Tier] = []
        self._checks: list[OutputCheck] = []
        self._reported_at = 0.0
        self._out_of_memory = 0
        self._unobserved = 0
        self._why_unobserved = ""

    def load(self) -> None:
        """Import the adapter, say what it takes and gives, and build every tier."""
        self._seed("load")
        self._adapter: Adapter = load_adapter(self._setup["adapter"])(self._setup["options"], self._device.device)
        self._inputs = [(topic, full_name(name)) for topic, name in self._adapter.inputs.items()]
        self._output = full_name(self._adapter.output)
        for name in [*(name for _, name in self._inputs), self._output]:
            warm_up(name)
        # asked of the bound method, so that an adapter that wraps another can pass the other's on
        self._observes = getattr(self._adapter.observe, "__func__", None) is not Adapter.observe
        self._say("hello", inputs=self._inputs, output=self._output, observes=self._observes,
                  device=str(self._device.device))  # fmt: skip
        self._loader = TierLoader(self._adapter, self._setup, self._device, self._tell)
        with torch.inference_mode():
            for number, _ in enumerate(self._each_tier("loading")):
                self._tiers.append(self._loader.load(number))

    def calibrate(self) -> None:
        """Warm up and time every tier, then report ready."""
        calibrations = []
        fixed_sizes = not self._adapter.dynamic_dims()
        with torch.inference_mode():
            for name, tier in zip(self._each_tier("warming up"), self._tiers, strict=True):
                example = self._adapter.example_inputs(name)
                calibrations.append(tier.calibrate(example, briefly=self._setup.get("background", False)))
                outputs, _ = tier.run(example)
                self._checks.append(OutputCheck(outputs, fixed_sizes=fixed_sizes))
        if any(tier.facts.engine == "compile" for tier in self._tiers):
            torch.compiler.set_stance("fail_on_recompile")  # from here on it would cost a frame its deadline
        self._say("ready", calibrations=[(c.median_ms, c.p99_ms) for c in calibrations],
                  tiers=self._facts(), missing=self._loader.missing)  # fmt: skip

    def _each_tier(self, doing: str) -> Iterator[str]:
        tiers = self._setup["tiers"]
        for number, tier in enumerate(tiers, start=1):
            self._say("progress", text=f"{doing} {tier} ({number} of {len(tiers)})")
            yield tier

    def serve(self) -> None:
        """Answer requests until the node closes the socket."""
        with torch.inference_mode():
            self._frames.settimeout(_REPORT_EVERY_S)
            while True:
                with contextlib.suppress(TimeoutError):  # nothing came: a moment to report
                    data = self._frames.recv(256)
                    if not data:
                        return
                    self._handle(unpack_request(data))
                self._evidence.poll()
                self._report()

    def _seed(self, what: object) -> None:
        """In a replay, let what models draw at random follow from its seed."""
        if "seed" in self._setup:
            seed_generators(self._setup["seed"], what)

    def _handle(self, request: Request) -> None:
        self._seed(request.seq)
        response = Response(Outcome.ERROR, request.tier, request.seq, 0, -1, -1, -1, -1)
        lost = False
        try:
            payload = self._run(request, response)
            response.outcome = Outcome.ON_TIME
        except BadInput as error:
            response.outcome, payload = Outcome.BAD_INPUT, _readable(str(error))
        except InvalidOutput as error:
            response.outcome, payload = Outcome.INVALID, _readable(str(error))
        except TorchperfError as error:
            payload = _readable(str(error))
        except Exception as error:  # the frame's boundary: whatever the user's model raises is an outcome
            payload = _readable(f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}")
            lost = self._device.is_lost(error)
        self._handled[0] += 1
        if request.kind & Kind.RUN:
            payload = self._fitting(payload, response)
            self._result[RESULT_OFFSET : RESULT_OFFSET + len(payload)] = bytes(payload)
            response.length = len(payload)
            self._frames.send(response.pack())
        elif response.outcome != Outcome.ON_TIME:
            self._unobserved += 1
            self._why_unobserved = f"frame {request.seq}: {bytes(payload).decode(errors='replace')}"
        if lost:
            self._say("error", text=f"CUDA device lost: {bytes(payload).decode(errors='replace')}", permanent=False)
            raise SystemExit(_EXIT_DEVICE_LOST)

    def _run(self, request: Request, response: Response) -> bytes | memoryview:
        """Bytes in, bytes out; the times of the steps go into `response`."""
        mark = self._evidence.mark
        if not request.kind & Kind.RUN:
            self._look(request, response)
            return b""
        started = time.perf_counter_ns()
        with mark(f"{self._setup['stage']}/{self._setup['tiers'][request.tier]}"):
            messages = self._look(request, response)
            with mark("preprocess"), self._device.on_stream():
                tensors = self._adapter.preprocess(messages)
            response.preprocess_ns = time.perf_counter_ns() - started - response.decode_ns
            with mark("inference"):
                outputs, response.inference_ns = self._infer(tensors, request, response)
            inferred = time.perf_counter_ns()
            with mark("postprocess"):
                self._checks[response.tier].check(outputs)
                payload = encode(self._adapter.postprocess(outputs, messages), self._output)
            self._ring.check(request.offset, request.seq)
            response.postprocess_ns = time.perf_counter_ns() - inferred
        self._evidence.frame_done()
        return payload

    def _look(self, request: Request, response: Response) -> dict[str, Received]:
        """Decode the frame's messages, and let the adapter advance its histories if it is to."""
        mark, started = self._evidence.mark, time.perf_counter_ns()
        messages = {}
        with mark("decode"):
            for item in self._ring.read(request.offset, request.length, request.seq):
                topic, type_name = self._inputs[item.index]
                messages[topic] = Received(decode(item.data, type_name), item.stamp_ns, item.age_ms)
        response.decode_ns = time.perf_counter_ns() - started
        if request.kind & Kind.OBSERVE:
            with mark("observe"):
                self._adapter.observe(messages)
        return messages

    def _infer(self, tensors: tuple[torch.Tensor, ...], request: Request, response: Response) -> tuple[Any, int]:
        """Run the tier; out of memory, empty the cache and run the next lower one."""
        while True:
            try:
                return self._tiers[response.tier].run(tensors, request.leave_ns)
            except torch.OutOfMemoryError:
                if response.tier == request.tier:
                    self._out_of_memory += 1
                    self._device.empty_cache()
                if response.tier + 1 >= len(self._tiers):
                    raise
                response.tier += 1

    def _fitting(self, payload: bytes | memoryview, response: Response) -> bytes | memoryview:
        """The payload if the result area holds it, else the reason why it cannot be handed over; reasons are cut."""
        room = len(self._result) - RESULT_OFFSET
        if len(payload) <= room or response.outcome != Outcome.ON_TIME:
            return payload[:room]
        response.outcome = Outcome.ERROR
        return f"output of {len(payload)} bytes; at most max_frame_bytes, {room}, fit".encode()

    def _report(self) -> None:
        """Once a second, after an answer: memory, and frames that the adapter could not observe."""
        now = time.monotonic()
        if now - self._reported_at < _REPORT_EVERY_S:
            return
        self._reported_at = now
        if self._unobserved:
            self._say("warn", text=f"{self._unobserved} frames not observed, the last one {self._why_unobserved}")
            self._unobserved = 0
        self._say("memory", bytes={"history": history_bytes(), **self._device.memory_bytes()})
        self._say("tiers", tiers=self._facts(), out_of_memory=self._out_of_memory)

    def _facts(self) -> list[dict[str, Any]]:
        return [tier.report() for tier in self._tiers]

    def _tell(self, text: str) -> None:
        """To the log and to `/perf/anomaly`."""
        self._say("anomaly", text=text)

    def _say(self, kind: str, **fields: object) -> None:
        self._control.send(pack_control(kind, **fields))


def _readable(text: str) -> bytes:
    """As UTF-8; file names and messages may hold characters that have none."""
    return text.encode(errors="replace")
