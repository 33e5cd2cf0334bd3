"""A worker's loop: receive a frame, let histories advance, run a tier, answer."""

import contextlib
import hashlib
import math
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import torch

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.errors import AdapterError, FrameOverwritten
from torchperf_ros.api.histories import work_for
from torchperf_ros.api.messages import decode, encode
from torchperf_ros.api.outcome import IN_TIME, Outcome
from torchperf_ros.engines.device import Device, leave
from torchperf_ros.engines.outputs import described
from torchperf_ros.engines.parity import Inputs
from torchperf_ros.worker.batching import layout_for_batch, run_together
from torchperf_ros.worker.capture import CaptureTaker
from torchperf_ros.worker.reports import EVERY_S, Reports, failure_of, place_of
from torchperf_ros.worker.tier import InvalidOutput, OutputCheck, Tier
from torchperf_ros.workers.control import LastWords, TierFacts
from torchperf_ros.workers.frame_ring import FrameReader
from torchperf_ros.workers.protocol import (
    OBSERVE,
    REQUEST_BYTES,
    RUN,
    SOON,
    Request,
    Response,
    shapes_text,
    unpack_requests,
)
from torchperf_ros.workers.result_area import ResultArea
from torchperf_ros.workers.worker_setup import WorkerSetup

_EXIT_DEVICE_LOST = 70
_STAYS_AWAKE_NS = 2 * NS_PER_MS  # the node takes an image of 1920x1080 in 1 ms
_MOST_SHAPE_TEXTS = 256
# of a record that lists 13,000 texts at the most: 30 ms; to limit its time takes 2 us
_QUICK_BYTES = 65_536
_T = TypeVar("_T")


@dataclass
class Prepared:
    """What a worker's start has made: adapters and tiers, by number, ready to run.

    Attributes:
        adapters: one for each stream; the first has built the tiers.
        inputs: topic and full type name of each, as the adapter orders them.
        observes, names_scenes: whether the adapter has its own `observe` and `scene`.
        checks: of each tier's outputs.
    """

    adapters: Sequence[Adapter]
    device: Device
    inputs: Sequence[tuple[str, str]]
    output: str
    observes: bool
    names_scenes: bool
    tiers: dict[int, Tier]
    checks: dict[int, OutputCheck]

    def facts(self, names: Sequence[str]) -> Iterator[TierFacts]:
        """What the node shows of each tier, those that are not loaded included."""
        for number, name in enumerate(names):
            tier = self.tiers.get(number)
            yield TierFacts(name, "not loaded") if tier is None else tier.report()


@dataclass(slots=True)
class _Frame:
    """A frame that is being answered: what was asked for, with what, and what comes of it."""

    request: Request
    response: Response
    adapter: Adapter
    ring: FrameReader
    messages: dict[str, Received] = field(default_factory=dict)


class Session:
    """Answers the frames of a node that sits at the other end of two sockets.

    Attributes:
        limited: calls what decodes a frame's messages; a worker ends it there when it takes too long.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        prepared: Prepared,
        reports: Reports,
        control: socket.socket,
        frames: socket.socket,
        result_fd: int,
        *ring_fds: int,
    ) -> None:
        """Take what the start has made, and the memory of results and of each stream's frames."""
        self.limited: Callable[..., dict[str, Received]] = lambda act, frame: act(frame)
        self._stage, self._names, self._lower = setup.stage, setup.tiers, setup.lower
        self._seed, self._stream_names = setup.seed, setup.streams or ("",)
        self._scenes = {name: number for number, name in enumerate(setup.scenes)}
        self._unknown_scene = ""
        # A packet that holds more is cut, and is no number of whole requests then.
        self._most_bytes = setup.batch * REQUEST_BYTES + 1
        self._prepared, self._reports, self._frames = prepared, reports, frames
        self._device, self._tiers, self._checks = prepared.device, prepared.tiers, prepared.checks
        rings = [FrameReader(descriptor) for descriptor in ring_fds]
        self._streams = list(zip(prepared.adapters, rings, strict=True))
        self._results = ResultArea(result_fd, writable=True)
        self._capture = CaptureTaker(control, reports.say, setup.stage, prepared.device.device)
        self._out_of_memory = 0
        self._shape_texts: dict[tuple[Any, ...] | None, bytes] = {}

    def serve(self) -> None:
        """Answer requests until the node closes the socket."""
        # The kernel's own limit: with Python's each `recv` and each `send` is preceded by a `poll`.
        self._frames.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", round(EVERY_S), 0))
        with torch.inference_mode():
            while True:
                with contextlib.suppress(BlockingIOError):  # nothing came: a moment to report
                    data = self._frames.recv(self._most_bytes)
                    while data == SOON:
                        data = self._next_soon()
                    if not data:
                        return
                    requests = unpack_requests(data)
                    if len(requests) == 1:
                        self._answer(requests[0])
                    else:
                        self._answer_batch(requests)
                self._capture.poll()
                self._reports.tick(
                    self._device, lambda: list(self._prepared.facts(self._names)), self._out_of_memory
                )

    def _next_soon(self) -> bytes:
        """The request that follows `SOON`, without sleeping.

        Waking up again can take longer than the wait.
        """
        give_up_ns = time.perf_counter_ns() + _STAYS_AWAKE_NS
        while time.perf_counter_ns() < give_up_ns:
            with contextlib.suppress(BlockingIOError):
                return self._frames.recv(self._most_bytes, socket.MSG_DONTWAIT)
        return self._frames.recv(self._most_bytes)

    def _answer(self, request: Request) -> None:
        """Do what is asked for; any error is an outcome of this frame."""
        self._device.part_threads()
        frame = self._taken_up(request)
        act: Callable[[_Frame], bytes | memoryview] = self._run if request.kind & RUN else self._observe
        self._reply_with(frame, act, frame)

    def _answer_batch(self, requests: Sequence[Request]) -> None:
        """Run frames of several streams together as far as their inputs allow; an error is its frame's own.

        One in the common run is the outcome of each frame in it.
        """
        self._device.part_threads()
        alike: dict[object, list[tuple[_Frame, Inputs]]] = {}
        with self._capture.mark(f"{self._stage}/{self._names[requests[0].tier]}"):
            for place, request in enumerate(requests):
                frame = self._taken_up(request, place)
                inputs = self._attempt(frame, self._prepare, frame)
                if inputs is not None:
                    alike.setdefault(layout_for_batch(inputs), []).append((frame, inputs))
            for parts in alike.values():
                self._run_together(parts)
        self._capture.frame_done()

    def _run_together(self, parts: Sequence[tuple[_Frame, Inputs]]) -> None:
        """Answer frames whose inputs can be concatenated; one frame as if it had come alone."""
        frames, inputs = zip(*parts, strict=True)
        first = frames[0]
        self._seed_for(first.request)
        work_for(first.request.stream)
        if len(frames) == 1:
            self._reply_with(first, self._infer, first, inputs[0])
            return
        leave_ns = min((each.request.leave_ns for each in frames if each.request.leave_ns), default=0)
        rows = sum(each[0].shape[0] for each in inputs)
        joined = self._text_of(tuple((rows, *tensor.shape[1:]) for tensor in inputs[0]))
        for frame in frames:  # a frame's record says what the model got
            frame.response.shapes = joined
        try:
            with self._capture.mark("inference"):
                shares, took_ns = run_together(self._tiers[first.request.tier], inputs, leave_ns)
        # the user's model may raise anything, `SystemExit` and `KeyboardInterrupt` too
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                self._out_of_memory += 1
                torch.cuda.empty_cache()
            for frame in frames:
                self._reply(frame, self._failed(frame, error))
            return
        for frame, share in zip(frames, shares, strict=True):
            work_for(frame.request.stream)
            frame.response.inference_ns = took_ns
            self._reply_with(frame, self._finish, frame, share)

    def _taken_up(self, request: Request, place: int = 0) -> _Frame:
        """A frame whose adapter is at work from now on."""
        self._seed_for(request)
        work_for(request.stream)
        response = Response(
            Outcome.ERROR, request.tier, request.seq, 0, -1, -1, -1, -1, stream=request.stream, place=place
        )
        return _Frame(request, response, *self._streams[request.stream])

    def _seed_for(self, request: Request) -> None:
        if self._seed is not None:
            one_of_several = (request.stream, request.seq)
            seed_from(self._seed, one_of_several if len(self._streams) > 1 else request.seq)

    def _attempt(self, frame: _Frame, act: Callable[..., _T], *given: Any) -> _T | None:  # noqa: ANN401
        """What an act gives; None where it raises, and the frame has been answered with that."""
        try:
            return act(*given)
        # the user's model may raise anything, `SystemExit` and `KeyboardInterrupt` too
        except BaseException as error:
            self._reply(frame, self._failed(frame, error))
            return None

    def _reply_with(self, frame: _Frame, act: Callable[..., bytes | memoryview], *given: Any) -> None:  # noqa: ANN401
        """Answer a frame with what an act gives."""
        payload = self._attempt(frame, act, *given)
        if payload is not None:
            self._reply(frame, payload)

    def _failed(self, frame: _Frame, error: BaseException) -> bytes:
        frame.response.outcome, reason = failure_of(error, frame.adapter)
        if self._device.is_lost(error):
            self._end_without_device(reason)
        return reason

    def _reply(self, frame: _Frame, payload: bytes | memoryview) -> None:
        request, response = frame.request, frame.response
        self._results.count_handled()
        if request.kind & RUN:
            payload = self._fitting(payload, response)
            self._results.write(payload, response.place)
            response.length = len(payload)
            self._frames.send(response.pack())
        elif response.outcome != Outcome.ON_TIME:
            stream = self._stream_names[request.stream]
            where = f"frame {request.seq}{f' of stream {stream}' if stream else ''}"
            self._reports.unobserved(where, bytes(payload).decode(errors="replace"))

    def _observe(self, frame: _Frame) -> bytes:
        self._receive(frame)
        frame.response.outcome = Outcome.ON_TIME
        return b""

    def _receive(self, frame: _Frame) -> None:
        """Decode the frame's messages, and let the adapter advance its histories if it is to."""
        request, adapter = frame.request, frame.adapter
        mark, started = self._capture.mark, time.perf_counter_ns()
        with mark("decode"):
            is_quick = request.length <= _QUICK_BYTES
            frame.messages = self._decode(frame) if is_quick else self.limited(self._decode, frame)
        frame.response.decode_ns = time.perf_counter_ns() - started
        if request.kind & OBSERVE and self._prepared.observes:
            if request.missed:
                adapter.missed(request.missed)
            with mark("observe"):
                adapter.observe(frame.messages)
            try:
                frame.ring.check(request.offset, request.seq)
            except FrameOverwritten:  # what it has just learned may be half of another frame
                adapter.forget()
                raise

    def _decode(self, frame: _Frame) -> dict[str, Received]:
        messages, request = {}, frame.request
        for item in frame.ring.read(request.offset, request.length, request.seq):
            topic, type_name = self._prepared.inputs[item.index]
            messages[topic] = Received(decode(item.data, type_name), item.stamp_ns, item.age_ms)
        return messages

    def _run(self, frame: _Frame) -> memoryview:
        """Bytes in, bytes out; the times of the steps go into the response."""
        with self._capture.mark(f"{self._stage}/{self._names[frame.response.tier]}"):
            payload = self._infer(frame, self._prepare(frame))
            if self._prepared.names_scenes:
                frame.response.scene = self._scene_of(frame.adapter.scene(frame.messages))
        self._capture.frame_done()
        return payload

    def _prepare(self, frame: _Frame) -> Inputs:
        """The frame as inputs of the model."""
        response, started = frame.response, time.perf_counter_ns()
        self._receive(frame)
        with self._capture.mark("preprocess"):
            inputs = frame.adapter.preprocess(frame.messages)
        response.preprocess_ns = time.perf_counter_ns() - started - response.decode_ns
        response.shapes = self._shapes_of(inputs)
        return inputs

    def _shapes_of(self, tensors: Inputs) -> bytes:
        is_row = isinstance(tensors, (tuple, list))
        shapes = tuple(getattr(tensor, "shape", ()) for tensor in tensors) if is_row else None
        if (text := self._shape_texts.get(shapes)) is None:
            check_inputs(tensors)
        return text or self._text_of(shapes)

    def _text_of(self, shapes: tuple[Any, ...] | None) -> bytes:
        if (text := self._shape_texts.get(shapes)) is None:
            if len(self._shape_texts) >= _MOST_SHAPE_TEXTS:
                self._shape_texts.clear()
            text = self._shape_texts[shapes] = shapes_text(shapes or ())
        return text

    def _infer(self, frame: _Frame, tensors: Inputs) -> memoryview:
        """The tier's result; out of memory, empty the cache and run the next lower one."""
        request, response = frame.request, frame.response
        while True:
            tier = self._tiers[response.tier]
            try:
                if tier.is_anytime:
                    return self._run_steps(tier, frame, tensors)
                with self._capture.mark("inference"):
                    outputs, response.inference_ns = tier.run(tensors, request.leave_ns)
                return self._finish(frame, outputs)
            except torch.OutOfMemoryError:
                if response.tier == request.tier:
                    self._out_of_memory += 1
                    torch.cuda.empty_cache()
                lower = self._lower[response.tier]
                if lower not in self._tiers:
                    raise
                response.tier = lower

    def _run_steps(self, tier: Tier, frame: _Frame, tensors: Inputs) -> memoryview:
        """The last result of an anytime model; each lies in shared memory where the frame waits for one.

        It ends early, `PARTIAL`, when the frame has been answered.
        """
        request, response = frame.request, frame.response
        payload, response.step = memoryview(b""), 0
        steps = tier.steps(tensors)
        while True:
            with self._capture.mark("inference"):
                outputs, inference_ns = next(steps, (None, -1))
            if inference_ns < 0:
                break
            response.inference_ns = inference_ns
            payload = self._finish(frame, outputs)
            response.step += 1
            if request.leave_ns:
                self._results.put(response, payload)
            is_answered = request.leave_ns and frame.ring.is_answered(request.seq)
            if is_answered or response.step == request.last_step:
                response.outcome = Outcome.PARTIAL
                return payload
        if not response.step:
            raise AdapterError("steps gave nothing; the last has to be what forward gives")
        return payload

    def _finish(self, frame: _Frame, outputs: Any) -> memoryview:  # noqa: ANN401
        """Outputs that are good as the bytes of a message."""
        inferred, response = time.perf_counter_ns(), frame.response
        tier = self._tiers[response.tier]
        with self._capture.mark("postprocess"):
            self._checks[response.tier].check(outputs, is_finite=tier.is_finite)
            payload = output_message(frame.adapter, outputs, frame.messages, self._prepared.output)
        frame.ring.check(frame.request.offset, frame.request.seq)
        response.postprocess_ns = time.perf_counter_ns() - inferred + tier.waited_ns
        response.outcome = Outcome.ON_TIME
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

    def _scene_of(self, name: str | None) -> int:
        """Index of the scene that the adapter names, -1 where it names none; an unknown one is an alert."""
        if name is not None and name not in self._scenes and name != self._unknown_scene:
            self._unknown_scene = name
            there_are = ", ".join(self._scenes)
            self._reports.alert(f"the adapter names the scene {name!r}; there are {there_are}")
        return -1 if name is None else self._scenes.get(name, -1)

    def _end_without_device(self, reason: bytes) -> None:
        """End at once without a CUDA context: the driver takes most of a second to end such a process."""
        self._reports.say(LastWords(f"CUDA device lost: {reason.decode(errors='replace')}"))
        self._frames.shutdown(socket.SHUT_RDWR)
        leave(_EXIT_DEVICE_LOST)


def seed_from(seed: int | None, what: object) -> None:
    """In a replay, let what models draw at random follow from its seed; None: it is no replay."""
    if seed is None:
        return
    digest = hashlib.blake2b(repr((seed, what)).encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(number)
    # `torch.manual_seed` takes 0.1 ms, for devices that are not there
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


_BYTES_PER_PIXEL: Final = {
    "mono8": 1,
    "8UC1": 1,
    "mono16": 2,
    "16UC1": 2,
    "rgb8": 3,
    "bgr8": 3,
    "8UC3": 3,
    "rgba8": 4,
    "bgra8": 4,
    "32FC1": 4,
}
_MISTAKES: Final = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
)  # what a wrong idea of `outputs` raises


class PostprocessError(AdapterError):
    """`postprocess` failed; the message has the line, and what the model returned."""


def output_message(
    adapter: Adapter,
    outputs: Any,  # noqa: ANN401
    messages: Mapping[str, Received],
    kind: str,
) -> memoryview:
    """What `postprocess` makes of a model's outputs, as CDR bytes of the message type `kind`.

    Bytes are taken as they are.

    Raises:
        PostprocessError: it raised what comes of taking the outputs for something else; or it gave no such
            message.
        InvalidOutput: the message contradicts itself.
        Exception: what else it raises.
    """
    try:
        message = adapter.postprocess(outputs, messages)
    except _MISTAKES as error:
        reported, got = f"{type(error).__name__}: {error}{place_of(error, adapter)}", described(outputs)
        hint = f"the model of build() returns {got}; postprocess(outputs) got it whole"
        raise PostprocessError(f"{reported}; {hint}") from error
    if isinstance(message, bytes):
        return memoryview(message)
    if message is None:
        raise PostprocessError(f"postprocess gave None; it has to give a {kind}")
    try:
        data = encode(message, kind)
    except Exception as error:  # wrong fields may lead the encoder to any
        reported = (
            f"{described(message)}, which cannot be encoded as {kind} ({type(error).__name__}: {error})"
        )
        raise PostprocessError(f"postprocess gave {reported}") from error
    if why := contradiction(message, kind):
        raise InvalidOutput(f"the {kind} contradicts itself: {why}")
    return data


def check_inputs(given: Any) -> None:  # noqa: ANN401 - what a user's method gives
    """Pass a tuple of tensors.

    Raises:
        AdapterError: `preprocess` gave something else; a tensor would be taken apart along its first
            dimension.
    """
    if isinstance(given, torch.Tensor):
        raise AdapterError(
            f"preprocess gave {described(given)} alone; it has to give a tuple of tensors: (tensor,)"
        )
    if not isinstance(given, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in given):
        raise AdapterError(f"preprocess gave {described(given)}; it has to give a tuple of tensors")


# a message of rosbags, whose arrays are numpy's
def contradiction(message: Any, kind: str) -> str:  # noqa: ANN401
    """What in a message contradicts itself, "" if nothing.

    Sizes of images, clouds, grids and arrays; 0.1 to 0.8 us.
    """
    why = ""
    if kind == "sensor_msgs/msg/Image":
        found, height, step = len(message.data), message.height, message.step
        least = message.width * _BYTES_PER_PIXEL.get(message.encoding, 0)
        if step < least:
            why = f"step is {step}; {message.width} pixels of {message.encoding} take {least}"
        elif found != height * step:
            why = f"data has {found} bytes; {height} rows of {step} bytes are {height * step}"
    elif kind == "sensor_msgs/msg/CompressedImage":
        why = "" if len(message.data) else "data is empty"
    elif kind == "sensor_msgs/msg/PointCloud2":
        found, height, step = len(message.data), message.height, message.row_step
        if found != height * step or step < message.width * message.point_step:
            why = (
                f"data has {found} bytes; height {height} x row_step {step} is {height * step},"
                f" width {message.width} x point_step {message.point_step}"
            )
    elif kind == "nav_msgs/msg/OccupancyGrid":
        found, height, width = len(message.data), message.info.height, message.info.width
        why = (
            ""
            if found == height * width
            else f"data has {found} cells; {height} rows of {width} are {height * width}"
        )
    elif kind.endswith("MultiArray") and message.layout.dim:
        found, sizes = len(message.data), [dim.size for dim in message.layout.dim]
        reported = message.layout.data_offset + math.prod(sizes)
        labelled = set(sizes) == {1}  # one entry for each label, as in this package
        why = (
            ""
            if labelled or found >= reported
            else f"data has {found} values; its dimensions make {reported}"
        )
    return why
