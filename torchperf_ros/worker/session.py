"""A worker's life from its fork (see `fork_main.py`).

Load, warm up, calibrate, then one frame after the other.
"""

import contextlib
import faulthandler
import hashlib
import os
import random
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchperf_ros.api.adapter import Adapter, Received, open_adapter
from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.errors import (
    AdapterError,
    BadInput,
    ConfigError,
    FrameOverwritten,
    ProtocolError,
    TorchperfError,
    UnknownMessageType,
)
from torchperf_ros.api.histories import history_bytes
from torchperf_ros.api.messages import decode, full_name, warm_up
from torchperf_ros.api.outcome import IN_TIME, Outcome
from torchperf_ros.engines.cuda_graph import CaptureFailed
from torchperf_ros.engines.device import Device, choose_device, leave
from torchperf_ros.engines.outputs import tensors_in
from torchperf_ros.worker.capture import CaptureTaker, step_into_background
from torchperf_ros.worker.output_message import check_inputs, output_message, place_of
from torchperf_ros.worker.tier import InvalidOutput, OutputCheck, Tier, TierFacts
from torchperf_ros.worker.tier_loader import TierLoader
from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.frame_ring import FrameReader
from torchperf_ros.workers.package_cache import use_compiler_cache
from torchperf_ros.workers.process_setup import (
    LARGEST_KEPT_BYTES,
    keep_freed_memory,
    kept_bytes,
    set_nice,
)
from torchperf_ros.workers.protocol import (
    MAX_CONTROL_BYTES,
    OBSERVE,
    RUN,
    SOON,
    STACK_FILE,
    STACK_SIGNAL,
    Request,
    Response,
    pack_control,
    pack_report,
    shapes_text,
    unpack_control,
    unpack_request,
)
from torchperf_ros.workers.result_area import ResultArea

_PERMANENT = (AdapterError, ConfigError, UnknownMessageType, SystemExit)  # the adapter called exit()
_REPORT_EVERY_S = 1.0
_EXIT_DEVICE_LOST = 70
_STAYS_AWAKE_NS = 2 * NS_PER_MS  # the node takes an image of 1920x1080 in 1 ms
_MOST_SHAPE_TEXTS = 256


def main(frames_fd: int, control_fd: int, ring_fd: int, result_fd: int) -> int:
    """Set up, load, serve until the node is gone. Returns the exit status.

    Takes the sockets for frames and for everything else, where the setup waits, and the memory of frames
    and results.
    """
    control = socket.socket(fileno=control_fd)
    setup = unpack_control(control.recv(MAX_CONTROL_BYTES))
    faulthandler.enable()  # a worker that dies by a signal leaves its stacks on stderr
    _answer_stack_signal()
    if setup.get("definitions"):  # message types that no installed package has
        others = os.environ.get("AMENT_PREFIX_PATH", "")
        os.environ["AMENT_PREFIX_PATH"] = os.pathsep.join(filter(None, [setup["definitions"], others]))
    keep_freed_memory(LARGEST_KEPT_BYTES, setup["kept_mib"] << 20)
    try:
        if setup.get("nice"):
            set_nice(os.getpid(), setup["nice"])
        come_forward = step_into_background() if setup["background"] else lambda: None
        if setup.get("compile") and any(build["engine"] == "compile" for build in setup["build"]):
            setup["compiler_cache"] = use_compiler_cache(setup["cache_dir"], setup["cache_mib"] << 20)
        session = Session(setup, control, socket.socket(fileno=frames_fd), ring_fd, result_fd)
        session.load()
        session.calibrate()
        come_forward()
        session.serve()
    except (Exception, SystemExit) as error:  # the process's boundary: the node shows this on /diagnostics
        text = str(error)
        if not isinstance(error, TorchperfError):
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        with contextlib.suppress(OSError):
            failed = {
                "permanent": isinstance(error, _PERMANENT),
                "without_graphs": isinstance(error, CaptureFailed),
            }
            control.send(pack_control("error", text=text, **failed))
        leave(1)
    return 0


def _answer_stack_signal() -> None:
    file = os.open(Path(os.environ["TMPDIR"], STACK_FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(STACK_SIGNAL, file, all_threads=True)  # without the interpreter lock


class Session:
    """Runs an adapter for a node that sits at the other end of two sockets."""

    def __init__(
        self,
        setup: Mapping[str, Any],
        control: socket.socket,
        frames: socket.socket,
        ring_fd: int,
        result_fd: int,
    ) -> None:
        self._setup = setup
        self._control = control
        self._frames = frames
        self._ring = FrameReader(ring_fd)
        self._results = ResultArea(result_fd, writable=True)
        device = choose_device(setup["device"], before=setup.get("device_before", ""))
        self._device = Device(device, setup["threads"], stream_priority=setup.get("stream_priority", -1))
        self._capture = CaptureTaker(control, self._say, setup["stage"], self._device.device)
        self._loaded = sorted(
            setup.get("loaded", range(len(setup["tiers"])))
        )  # the others are not to be run
        self._scenes = {name: number for number, name in enumerate(setup.get("scenes", ()))}
        self._unknown_scene = ""
        self._tiers: dict[int, Tier] = {}
        self._checks: dict[int, OutputCheck] = {}
        self._reported_at = 0.0
        self._out_of_memory = 0
        self._unobserved = 0
        self._why_unobserved = ""
        self._left_out = False  # a report, as it was too long
        self._shape_texts: dict[tuple[Any, ...] | None, bytes] = {}

    def load(self) -> None:
        """Import the adapter, say what it takes and gives, and build every tier."""
        self._seed("load")
        self._adapter: Adapter = open_adapter(
            self._setup["adapter"], self._setup["options"], self._device.device
        )
        self._inputs = [(topic, full_name(name)) for topic, name in self._adapter.inputs.items()]
        self._output = full_name(self._adapter.output)
        for name in [*(name for _, name in self._inputs), self._output]:
            warm_up(name)
        # asked of the bound method, so that an adapter that wraps another can pass the other's on
        self._observes = getattr(self._adapter.observe, "__func__", None) is not Adapter.observe
        self._names_scenes = getattr(self._adapter.scene, "__func__", None) is not Adapter.scene
        scores = getattr(self._adapter.score_messages, "__func__", None) is not Adapter.score_messages
        self._say(
            "hello",
            inputs=self._inputs,
            output=self._output,
            observes=self._observes,
            scores=scores,
            device=str(self._device.device),
            card=self._device.card,
        )
        self._loader = TierLoader(
            self._adapter, self._setup, self._device, lambda text: self._say("anomaly", text=text)
        )
        with torch.inference_mode():
            for number, _ in self._each_tier("loading"):
                self._tiers[number] = self._loader.load(number)

    def calibrate(self) -> None:
        """Warm up and time every tier, then report ready."""
        known: list[Calibration | None] = [
            Calibration(*pair) for pair in self._setup.get("calibrations", ())
        ]
        known = known or [None] * len(self._setup["tiers"])
        calibrations = [Calibration(0.0, 0.0)] * len(known)
        fixed_sizes = not self._adapter.dynamic_dims()
        with torch.inference_mode():
            for number, name in self._each_tier("warming up"):
                tier, example = self._tiers[number], self._adapter.example_inputs(name)
                briefly = self._setup.get("background", False)
                calibrations[number] = tier.calibrate(example, briefly=briefly, known=known[number])
                outputs, _ = tier.run(example)
                self._checks[number] = OutputCheck(outputs, fixed_sizes=fixed_sizes)
                self._check_steps(tier, self._checks[number], example)
                self._warm_up(tier, self._checks[number], example)
                self._loader.forget_runs(name, example)
                if why := self._checks[number].unchecked:
                    self._say("warn", text=f"tier {name}: outputs are not checked for NaN and Inf: {why}")
        if any(tier.facts.engine == "compile" for tier in self._tiers.values()):
            torch.compiler.set_stance(
                "fail_on_recompile"
            )  # from here on it would cost a frame its deadline
        self._say(
            "ready",
            calibrations=[(c.median_ms, c.p99_ms) for c in calibrations],
            tiers=self._facts(),
            missing=self._loader.missing,
        )

    def _check_steps(self, tier: Tier, check: OutputCheck, example: tuple[torch.Tensor, ...]) -> None:
        """Run an anytime model's steps once.

        Raises:
            AdapterError: there are none, or one gives something else than `forward`.
        """
        number = 0
        try:
            for number, (outputs, _) in enumerate(tier.steps(example), start=1):  # noqa: B007
                check.check(outputs)
        except InvalidOutput as error:
            raise AdapterError(f"tier {tier.facts.name}: step {number} of its example: {error}") from error
        if tier.is_anytime and not number:
            raise AdapterError(
                f"tier {tier.facts.name}: steps gave nothing; the last has to be what forward gives"
            )

    def _warm_up(self, tier: Tier, check: OutputCheck, example: tuple[torch.Tensor, ...]) -> None:
        """Do once what a frame does beside the model.

        On CUDA the first use of a kernel loads it, a copy pins memory.

        Without messages to begin with it is upload, check and download; whatever fails here will do so at a
        frame.
        """
        try:
            messages = self._adapter.example_messages()
            if not messages and not self._device.is_cuda:
                return
            if messages:
                inputs = self._adapter.preprocess(messages)
                self._adapter.forget()  # a history that it was put into
            else:
                inputs = tuple(tensor.cpu() for tensor in example)
            outputs, _ = tier.run(inputs)
            check.check(outputs)
            if messages:
                output_message(self._adapter, outputs, messages, self._output)
            for tensor in tensors_in(outputs):
                tensor.cpu()
        except Exception as error:  # the user's adapter and model run here
            kind = "" if isinstance(error, TorchperfError) else f"{type(error).__name__}: "
            said = f"{kind}{_readable(error).decode()}"
            self._say(
                "warn", text=f"tier {tier.facts.name}: its first whole frame, of examples, failed: {said}"
            )

    def _each_tier(self, doing: str) -> Iterator[tuple[int, str]]:
        """Number and name of each tier that is to be loaded."""
        for place, number in enumerate(self._loaded, start=1):
            tier = self._setup["tiers"][number]
            self._say("progress", text=f"{doing} {tier} ({place} of {len(self._loaded)})")
            yield number, tier

    def serve(self) -> None:
        """Answer requests until the node closes the socket."""
        with torch.inference_mode():
            self._frames.settimeout(_REPORT_EVERY_S)
            while True:
                with contextlib.suppress(TimeoutError):  # nothing came: a moment to report
                    data = self._frames.recv(256)
                    while data == SOON:
                        data = self._next_soon()
                    if not data:
                        return
                    self._handle(unpack_request(data))
                self._capture.poll()
                self._report()

    def _next_soon(self) -> bytes:
        """The request that follows `SOON`, without sleeping.

        Waking up again can take longer than the wait.
        """
        give_up_ns = time.perf_counter_ns() + _STAYS_AWAKE_NS
        while time.perf_counter_ns() < give_up_ns:
            with contextlib.suppress(BlockingIOError):
                return os.read(self._frames.fileno(), 256)
        return self._frames.recv(256)

    def _handle(self, request: Request) -> None:
        self._seed(request.seq)
        self._device.part_threads()
        response = Response(Outcome.ERROR, request.tier, request.seq, 0, -1, -1, -1, -1)
        lost = False
        try:
            payload = self._run(request, response)
        except BadInput as error:
            response.outcome, payload = Outcome.BAD_INPUT, _readable(error)
        except InvalidOutput as error:
            response.outcome, payload = Outcome.INVALID, _readable(error)
        except TorchperfError as error:
            payload = _readable(error) + _last_calls(error.__cause__)
        except (
            BaseException
        ) as error:  # the frame's boundary: whatever the user's model raises, `SystemExit` and
            # `KeyboardInterrupt` too, is an outcome of this frame and no end of the worker
            payload = type(error).__name__.encode() + b": " + _readable(error)
            payload += place_of(error, self._adapter).encode() + _last_calls(error)
            lost = self._device.is_lost(error)
        # the node is to hear at once: the driver takes most of a second to end a process without a device
        if lost:
            self._say(
                "error",
                text=f"CUDA device lost: {bytes(payload).decode(errors='replace')}",
                permanent=False,
            )
            self._frames.shutdown(socket.SHUT_RDWR)
            leave(_EXIT_DEVICE_LOST)
        self._results.count_handled()
        if request.kind & RUN:
            payload = self._fitting(payload, response)
            self._results.write(payload)
            response.length = len(payload)
            self._frames.send(response.pack())
        elif response.outcome != Outcome.ON_TIME:
            self._unobserved += 1
            self._why_unobserved = f"frame {request.seq}: {bytes(payload).decode(errors='replace')}"

    def _run(self, request: Request, response: Response) -> bytes | memoryview:
        """Bytes in, bytes out; the times of the steps go into `response`."""
        mark = self._capture.mark
        if not request.kind & RUN:
            self._receive(request, response)
            response.outcome = Outcome.ON_TIME
            return b""
        started = time.perf_counter_ns()
        with mark(f"{self._setup['stage']}/{self._setup['tiers'][request.tier]}"):
            messages = self._receive(request, response)
            with mark("preprocess"):
                tensors = self._adapter.preprocess(messages)
            response.preprocess_ns = time.perf_counter_ns() - started - response.decode_ns
            response.shapes = self._shapes_of(tensors)
            payload = self._infer(tensors, messages, request, response)
            if self._names_scenes:
                response.scene = self._scene_of(self._adapter.scene(messages))
        self._capture.frame_done()
        return payload

    def _shapes_of(self, tensors: tuple[torch.Tensor, ...]) -> bytes:
        """As text, which is made once for all frames of these shapes."""
        is_row = isinstance(tensors, (tuple, list))
        shapes = tuple(getattr(tensor, "shape", ()) for tensor in tensors) if is_row else None
        if (text := self._shape_texts.get(shapes)) is None:
            check_inputs(tensors)
            if len(self._shape_texts) >= _MOST_SHAPE_TEXTS:
                self._shape_texts.clear()
            text = self._shape_texts[shapes] = shapes_text(shapes or ())
        return text

    def _receive(self, request: Request, response: Response) -> dict[str, Received]:
        """Decode the frame's messages, and let the adapter advance its histories if it is to."""
        mark, started = self._capture.mark, time.perf_counter_ns()
        messages = {}
        with mark("decode"):
            for item in self._ring.read(request.offset, request.length, request.seq):
                topic, type_name = self._inputs[item.index]
                messages[topic] = Received(decode(item.data, type_name), item.stamp_ns, item.age_ms)
        response.decode_ns = time.perf_counter_ns() - started
        if request.kind & OBSERVE:
            if request.missed and self._observes:
                self._adapter.missed(request.missed)
            with mark("observe"):
                self._adapter.observe(messages)
            try:
                self._ring.check(request.offset, request.seq)
            except FrameOverwritten:  # what it has just learned may be half of another frame
                self._adapter.forget()
                raise
        return messages

    def _infer(
        self,
        tensors: tuple[torch.Tensor, ...],
        messages: dict[str, Received],
        request: Request,
        response: Response,
    ) -> memoryview:
        """The tier's result; out of memory, empty the cache and run the next lower one."""
        while True:
            tier = self._tiers[response.tier]
            try:
                if tier.is_anytime:
                    return self._run_steps(tier, tensors, messages, request, response)
                with self._capture.mark("inference"):
                    outputs, response.inference_ns = tier.run(tensors, request.leave_ns)
                payload = self._finish(outputs, messages, request, response)
                response.outcome = Outcome.ON_TIME
                return payload
            except torch.OutOfMemoryError:
                if response.tier == request.tier:
                    self._out_of_memory += 1
                    self._device.empty_cache()
                lower = self._setup["lower"][response.tier]
                if lower not in self._tiers:
                    raise
                response.tier = lower

    def _scene_of(self, name: str | None) -> int:
        """Index of the scene that the adapter names, -1 where it names none.

        One that is not there is told of.
        """
        if name is not None and name not in self._scenes and name != self._unknown_scene:
            self._unknown_scene = name
            self._say(
                "anomaly", text=f"the adapter names the scene {name!r}; there are {', '.join(self._scenes)}"
            )
        return -1 if name is None else self._scenes.get(name, -1)

    def _run_steps(
        self,
        tier: Tier,
        tensors: tuple[torch.Tensor, ...],
        messages: dict[str, Received],
        request: Request,
        response: Response,
    ) -> memoryview:
        """The last result of an anytime model; each lies in shared memory, if somebody waits for the frame.

        It ends early, `PARTIAL`, when the frame has been answered.
        """
        payload, response.step = memoryview(b""), 0
        steps = tier.steps(tensors)
        while True:
            with self._capture.mark("inference"):
                outputs, inference_ns = next(steps, (None, -1))
            if inference_ns < 0:
                break
            response.inference_ns = inference_ns
            payload = self._finish(outputs, messages, request, response)
            response.step += 1
            if request.leave_ns:
                self._results.put(response, payload)
            if response.step == request.last_step or (
                request.leave_ns and self._ring.is_answered(request.seq)
            ):
                response.outcome = Outcome.PARTIAL
                return payload
        if not response.step:
            raise AdapterError("steps gave nothing; the last has to be what forward gives")
        response.outcome = Outcome.ON_TIME
        return payload

    def _finish(
        self,
        outputs: Any,  # noqa: ANN401
        messages: dict[str, Received],
        request: Request,
        response: Response,
    ) -> memoryview:
        """Outputs that are good as the bytes of a message."""
        inferred = time.perf_counter_ns()
        with self._capture.mark("postprocess"):
            self._checks[response.tier].check(outputs)
            payload = output_message(self._adapter, outputs, messages, self._output)
        self._ring.check(request.offset, request.seq)
        response.postprocess_ns = time.perf_counter_ns() - inferred
        return payload

    def _fitting(self, payload: bytes | memoryview, response: Response) -> bytes | memoryview:
        """The payload if the result area holds it, else the reason why it cannot be handed over.

        Reasons are cut.
        """
        room = self._results.room
        if len(payload) <= room or response.outcome not in IN_TIME:
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
            self._say(
                "warn", text=f"{self._unobserved} frames not observed, the last one {self._why_unobserved}"
            )
            self._unobserved = 0
        kept = {"kept": found} if (found := kept_bytes()) is not None else {}
        self._say("memory", bytes={"history": history_bytes(), **kept, **self._device.memory_bytes()})
        try:
            self._say("tiers", tiers=self._facts(), out_of_memory=self._out_of_memory)
        except ProtocolError as error:  # that is no reason to end
            if not self._left_out:
                self._say(
                    "warn", text=f"what there is to say of the tiers is left out from now on: {error}"
                )
            self._left_out = True

    def _seed(self, what: object) -> None:
        """In a replay, let what models draw at random follow from its seed."""
        if "seed" not in self._setup:
            return
        text = repr((self._setup["seed"], what))
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(
            seed
        )  # `torch.manual_seed` takes 0.1 ms, for devices that are not there
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)

    def _facts(self) -> list[dict[str, Any]]:
        return [
            self._tiers[number].report() if number in self._tiers else asdict(TierFacts(name, "not loaded"))
            for number, name in enumerate(self._setup["tiers"])
        ]

    def _say(self, kind: str, **fields: object) -> None:
        self._control.send(pack_report(kind, **fields))


def _readable(said: BaseException | str) -> bytes:
    """As UTF-8; file names and messages may hold characters that have none, and an error may have no text at all."""
    try:
        return str(said).encode(errors="replace")
    except BaseException as error:  # the user's class runs here
        return f"its text cannot be had: {type(error).__name__}".encode()


def _last_calls(error: BaseException | None) -> bytes:
    """The end of its traceback, from the next line on; nothing where there is none."""
    calls = traceback.format_exception(type(error), error, error.__traceback__, limit=-4) if error else []
    return _readable("".join(["\n", *calls])) if calls else b""
