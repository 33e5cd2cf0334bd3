"""Whether an adapter keeps the adapter contract.

Loaded, built twice, and run on one frame, in this process.

The first thing to run on a new adapter. It finds in seconds what a node finds on the road: a model that
cannot be built, weights that differ at every build, tiers that take different inputs, an output message
that contradicts itself.

Here is also how a log's frames become model inputs: what quantised engines are calibrated with, and
compared by. A process of its own reads them, as the adapter's code runs there. Job: `adapter`, `options`,
`device`, `log`, `frames` (the file to write). It sends `step` (text), and `frames` (text) at last, or
`failed` (text).
"""

import contextlib
import itertools
import math
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from torchperf_ros.api.adapter import Adapter, Received, open_adapter, without_exit
from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.errors import AdapterError, BadInput, TorchperfError, one_line
from torchperf_ros.api.messages import (
    decode,
    empty_message,
    encode,
    full_name,
    has_header,
    message_class,
)
from torchperf_ros.engines.built_tier import BuiltTier, Inputs, build_model, write_frames
from torchperf_ros.engines.device import Device, choose_device
from torchperf_ros.engines.fingerprint import changing_weights, identify, tiers_of, uninitialised
from torchperf_ros.engines.outputs import (
    described,
    drawn,
    flat_numbers,
    shapes_of,
    signature_of,
    sizes_follow_values,
    tensors_in,
)
from torchperf_ros.engines.parity import KeptState, depends_on_state, random_inputs, same
from torchperf_ros.replay.log_feed import absolute
from torchperf_ros.replay.logs.log_reader import LogReader
from torchperf_ros.settings.build_options import BuildOptions, axes_of, within
from torchperf_ros.tools.tune.trial_run import example_of
from torchperf_ros.worker.session import check_inputs, contradiction, output_message, seed_from
from torchperf_ros.worker.tier import InvalidOutput, OutputCheck

_IMAGE: Final = "sensor_msgs/msg/Image"
_USUAL_SIZE: Final = 480, 640
_MADE_STAMP_NS: Final = 1_000_000_000
_COLOURS: Final = 3
_IMAGE_DIMS: Final = 3  # from so many on, a tensor may be an image
_DECLARED: Final = "`dynamic_dims` declares that"
_OF_TRAINING: Final = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class CheckStep:
    """One step of the check.

    `ok` is None for what is no failure, `took_ms` NaN where the time means nothing.
    """

    step: str
    ok: bool | None
    text: str
    took_ms: float = math.nan


Found = Generator[CheckStep, None, Any]


@dataclass(frozen=True)
class _Ran:
    """A tier's model, in the state that its build gave it, and the check that its outputs have to pass."""

    model: torch.nn.Module
    check: OutputCheck


class _Failed(Exception):
    """A step failed, and those that build on it cannot be tried."""


class AdapterCheck:
    """Checks one adapter, step by step.

    `refused`: by `BadInput`, so that the frame's answer is not known.
    """

    def __init__(
        self, path: str, options: dict[str, Any], tiers: Sequence[str], device: str, log: Path | None
    ) -> None:
        """Take what to check.

        No tiers: those of the node's default that it builds; no log: the frame is made.
        """
        self._path, self._options, self._tiers, self._log = path, options, tiers, log
        self._device = Device(choose_device(device), threads=0)  # with as many CPU threads as a worker has
        self._example: tuple[torch.Tensor, ...] = ()
        self.failed = self.refused = False

    def run(self) -> Iterator[CheckStep]:
        """Try every step that can be tried; what came of each, as it ends."""
        for found in self._steps():
            self.failed |= found.ok is False
            yield found

    def _steps(self) -> Found:
        try:
            adapter: Adapter = yield from self._step(
                "load",
                lambda: open_adapter(self._path, self._options, self._device.device),
                lambda found: f"{type(found).__name__} on {self._device.device}",
            )
            yield from self._step("inputs and output", lambda: _contract(adapter), str)
            trigger, kind = next(iter(adapter.inputs.items()))
            if not has_header(kind):
                text = (
                    f"trigger {trigger} ({kind}) has no header: ages and `budget_from: stamp` are not known"
                )
                yield CheckStep("trigger", None, text)
            with torch.inference_mode():
                tiers = self._tiers
                if not tiers:
                    tiers = yield from self._step("tiers", lambda: tiers_of(adapter), ", ".join)
                models: dict[str, _Ran | None] = {}
                for tier in tiers:
                    models[tier] = yield from self._tier(adapter, tier)
                if None not in models.values():
                    inputs = {tier: _shapes(adapter.example_inputs(tier)) for tier in tiers}
                    if len(set(inputs.values())) > 1:
                        text = (
                            f"tiers take different inputs: {inputs}; every tier has to take what"
                            " `preprocess` gives"
                        )
                        yield CheckStep("tiers", False, text)
                messages = yield from self._step("a frame", lambda: self._messages(adapter), self._describe)
                for tier, ran in models.items():
                    if ran is not None:
                        yield from self._frame(adapter, tier, ran, messages)
        except _Failed:
            pass

    def _step(self, name: str, act: Callable[[], Any], text: Callable[[Any], str]) -> Found:
        started_ns = time.perf_counter_ns()
        try:
            with without_exit(name):
                result = act()
        except Exception as error:  # the user's code runs here: the check is for its errors
            yield CheckStep(name, False, _reason(error, self._path))
            raise _Failed from error
        yield CheckStep(name, True, text(result), (time.perf_counter_ns() - started_ns) / 1e6)
        return result

    def _tier(self, adapter: Adapter, tier: str) -> Found:
        """Build a tier twice, and run it on its example inputs.

        Gives what came of it, None if that cannot be done.
        """

        def identity() -> str:
            return identify(
                BuiltTier(model, example, adapter.dynamic_dims(), self._device.device), BuildOptions()
            ).key

        def run_again() -> None:
            check.check(outputs)
            check.check(_run(model, example))

        try:
            model = yield from self._step(f"tier {tier}: build", lambda: build_model(adapter, tier), _size)
            again = yield from self._step(
                f"tier {tier}: build again", lambda: build_model(adapter, tier), lambda _: ""
            )
            if why := uninitialised(model) or changing_weights(tier, model, again):
                yield CheckStep(f"tier {tier}: weights", False, why)
            self._example = yield from self._step(
                f"tier {tier}: example inputs", lambda: example_of(adapter, tier), _shapes
            )
            example, kept = self._example, KeptState(model)
            yield from self._step(
                f"tier {tier}: identity", identity, lambda key: f"{key[:8]}, of weights and code"
            )
            outputs = yield from self._step(
                f"tier {tier}: first run", lambda: _run(model, example), _shapes
            )
            fixed_sizes = not adapter.dynamic_dims()
            of_values = fixed_sizes and sizes_follow_values(lambda: _run(model, example))
            check = OutputCheck(outputs, fixed_sizes=fixed_sizes, of_values=of_values)
            yield from self._step(f"tier {tier}: second run", run_again, lambda _: "finite")
            for ok, text in _odd_ways(model, kept, example):
                yield CheckStep(f"tier {tier}: same input", ok, text)
            if check.unchecked:
                yield CheckStep(
                    f"tier {tier}: outputs", None, f"are not checked for NaN and Inf: {check.unchecked}"
                )
        except _Failed:
            return None
        kept.restore()
        return _Ran(model, check)

    def _messages(self, adapter: Adapter) -> dict[str, Received]:
        """The frame's messages: of the log, else the adapter's own examples, else made ones."""
        if self._log is None:
            return dict(adapter.example_messages()) or dict(_made(adapter.inputs, self._example))
        found: dict[str, Received] = {}
        for found in log_frames(adapter, self._log):
            if len(found) == len(adapter.inputs):
                break
        return found

    def _describe(self, messages: Mapping[str, Received]) -> str:
        origin = "made up" if self._log is None else f"of {self._log.name}"
        return f"{origin}: " + ", ".join(
            f"{topic} ({described(each.message)})" for topic, each in messages.items()
        )

    def _frame(self, adapter: Adapter, tier: str, ran: "_Ran", messages: dict[str, Received]) -> Found:
        try:
            with without_exit("preprocess"):
                adapter.observe(messages)
                inputs = adapter.preprocess(messages)
            check_inputs(inputs)
            example = adapter.example_inputs(tier)
        except BadInput as error:
            text = f"refused: {error}" + ("; try a frame of a log: --log" if self._log is None else "")
            self.refused = True
            yield CheckStep(f"tier {tier}: frame", None, text)
            return
        except Exception as error:  # the user's code
            yield CheckStep(f"tier {tier}: preprocess", False, _reason(error, self._path))
            return
        if why := _why_other(inputs, example, adapter):
            text = f"preprocess gives {_shapes(inputs)}, example_inputs {_shapes(example)}: {why}"
            yield CheckStep(f"tier {tier}: preprocess", None if why == _DECLARED else False, text)

        def answer() -> int:
            outputs = _run(ran.model, inputs)
            ran.check.check(outputs)
            return _answer(adapter, outputs, messages)

        with contextlib.suppress(_Failed):
            yield from self._step(
                f"tier {tier}: frame", answer, lambda size: f"{adapter.output}, {size} bytes"
            )


class _Dropout(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if given.get("dropout_p"):
            self.found = f"{name} gets dropout_p={given['dropout_p']}"
        elif "dropout" in name and (given.get("training") or True in args[1:]):
            self.found = f"{name} gets training=True"
        return func(*args, **given)


def _run(model: torch.nn.Module, inputs: Inputs) -> Any:  # noqa: ANN401 - a model may return anything
    """A model's outputs; it may write to its inputs, which serve again."""
    return drawn(model(*(tensor.clone() for tensor in inputs)))


def _odd_ways(
    model: torch.nn.Module, kept: KeptState, example: Inputs
) -> Iterator[tuple[bool | None, str]]:
    """What makes a model answer the same input in another way, and whether that is no mistake (None)."""
    training = [
        name for name, each in model.named_modules() if each.training and isinstance(each, _OF_TRAINING)
    ]
    if training:
        yield (
            False,
            f"{training[0]} is in training mode after eval(): it changes at every frame, or drops values",
        )
    with _Dropout() as dropout:
        _run(model, example)
    if dropout.found:
        yield False, f"dropout is active: {dropout.found}; it has to follow self.training"
        return
    kept.restore()
    first = flat_numbers(_run(model, example))
    with contextlib.suppress(Exception):  # a model may not take inputs that are drawn
        model(*random_inputs(example, 1))
    second = _run(model, example)
    if same(first, flat_numbers(second)):
        return
    if names := kept.changed_weights() or depends_on_state(model, kept, example, second):
        kept_in = ", ".join(names)
        yield (
            None,
            (
                f"the answer depends on earlier calls ({kept_in}): a worker starts as build gave it, and"
                " runs eager"
            ),
        )
        return
    seeded = []
    for _ in range(2):
        seed_from(0, "check")
        seeded.append([t.clone() for t in flat_numbers(_run(model, example))])
    if same(*seeded):
        yield None, "the same input gives another answer the second time: the model draws at random"
    else:
        yield (
            None,
            (
                "the answer depends on earlier calls, and no attribute of a module holds what it depends on: a"
                " global, a class, a closure, or a generator without a seed; no worker starts as build gave it"
            ),
        )


def _why_other(given: Inputs, example: Inputs, adapter: Adapter) -> str:
    """Why inputs differ from those of `example_inputs`.

    "" where they are, `_DECLARED` where the difference is allowed.
    """
    if [(t.dtype, t.shape) for t in given] == [(t.dtype, t.shape) for t in example]:
        return ""
    if [(t.dtype, t.dim()) for t in given] != [(t.dtype, t.dim()) for t in example]:
        return "number, types and dimensions of the tensors have to be the same"
    dims = adapter.dynamic_dims()
    if within(shapes_of(given), axes_of(dims, shapes_of(example)), shapes_of(example)):
        return _DECLARED
    return f"`dynamic_dims` has to declare the difference; it declares {dict(dims) or 'none'}"


def _contract(adapter: Adapter) -> str:
    if not getattr(adapter, "inputs", None) or not getattr(adapter, "output", ""):
        raise TorchperfError(
            "has to have `inputs` (topic -> message type, the trigger first) and `output` (a type)"
        )
    for name in (*adapter.inputs.values(), adapter.output):
        message_class(name)
    return f"{', '.join(f'{topic} ({kind})' for topic, kind in adapter.inputs.items())} to {adapter.output}"


def _answer(adapter: Adapter, outputs: Any, messages: Mapping[str, Received]) -> int:  # noqa: ANN401
    data = bytes(output_message(adapter, outputs, messages, full_name(adapter.output)))
    for name, held in _held(decode(data, adapter.output)):
        if (why := contradiction(held, held.__msgtype__)) and not _is_unset(held):
            raise InvalidOutput(f"the {adapter.output} contradicts itself: {name}: {why}")
    if has_header(adapter.output) and (trigger := next(iter(messages.values()))).stamp_ns:
        stamp_ns = header_stamp_ns(data)
        if stamp_ns != trigger.stamp_ns:
            raise TorchperfError(
                f"header.stamp is {stamp_ns} ns, the trigger's is {trigger.stamp_ns}: an output keeps its"
                " frame's"
            )
    return len(data)


def _is_unset(held: Any) -> bool:  # noqa: ANN401 - a message of rosbags
    """Whether it was never given a value, as the texture of most markers."""
    return bytes(encode(held, held.__msgtype__)) == bytes(
        encode(empty_message(held.__msgtype__), held.__msgtype__)
    )


def _held(message: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - a message of rosbags
    """Every message inside of a message, with the name of its field.

    The node looks at the outer one only.
    """
    for name, value in vars(message).items():
        for held in value if isinstance(value, list) else [value]:
            if hasattr(held, "__msgtype__"):
                yield name, held
                yield from _held(held)


def _made(inputs: Mapping[str, str], example: Sequence[torch.Tensor]) -> Iterator[tuple[str, Received]]:
    """A message for each input.

    A grey image of the example's size, else one with every field at its zero.
    """
    for topic, kind in inputs.items():
        message: Any = empty_message(kind)
        if kind == _IMAGE:
            height, width = _image_size(example)
            message.height, message.width, message.encoding, message.step = height, width, "rgb8", width * 3
            message.data = np.full(height * width * 3, 128, np.uint8)
        stamp_ns = _MADE_STAMP_NS if has_header(kind) else 0
        if stamp_ns:
            message.header.stamp.sec = 1
        yield topic, Received(decode(bytes(encode(message, kind)), kind), stamp_ns, 0.0)


def _image_size(example: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Height and width of the first input that looks like a colour image, channels first or last."""
    for tensor in example:
        shape = tuple(tensor.shape)
        if len(shape) >= _IMAGE_DIMS and _COLOURS in {shape[-3], shape[-1]}:
            return (shape[-2], shape[-1]) if shape[-3] == _COLOURS else (shape[-3], shape[-2])
    return _USUAL_SIZE


def _size(model: torch.nn.Module) -> str:
    count = sum(each.numel() for each in model.parameters() if not is_lazy(each))
    kinds = sorted(
        {signature_of(each).split()[0] for each in model.parameters() if not is_lazy(each)} - {"float32"}
    )
    return f"{type(model).__name__}, {count:,} parameters" + (f" ({', '.join(kinds)})" if kinds else "")


def _shapes(tensors: Any) -> str:  # noqa: ANN401 - a model may return anything
    return (
        ", ".join(signature_of(each) for each in tensors_in(tensors)) or f"no tensor: {described(tensors)}"
    )


def _reason(error: Exception, path: str) -> str:
    file = path.partition(":")[0].replace(".", "/") + ".py"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    kind = "" if isinstance(error, TorchperfError) else f"{type(error).__name__}: "
    return f"{kind}{error}{where}"


# half of them calibrate, as many as static quantisation usually takes, and half are compared
_MOST_FRAMES: Final = 64


def do_job(job: Mapping[str, Any], say: Callable[..., None]) -> bool:
    """Keep the log's frames as inputs; a `TorchperfError` where there are none."""
    say("step", text=f"reading frames of {job['log']}")
    say("frames", text=keep_frames(job))
    return True


def keep_frames(job: Mapping[str, Any]) -> str:
    """Write the inputs that the job's adapter makes of frames spread over the job's log.

    Returns how many there are, in words.

    Raises:
        TorchperfError: the log has no frame that the adapter takes, or the adapter raises.
    """
    device, log = Device(choose_device(job["device"]), 0).device, Path(job["log"])
    adapter = open_adapter(job["adapter"], job["options"], device)
    triggers = sum(1 for _ in log_frames(adapter, log))
    chosen = set(np.linspace(0, triggers - 1, min(_MOST_FRAMES, triggers)).astype(int))
    frames, refused, why = list[Inputs](), 0, ""
    for number, messages in enumerate(log_frames(adapter, log)):
        try:
            adapter.observe(messages)
            if number in chosen:
                frames.append(tuple(adapter.preprocess(messages)))
        except BadInput as error:
            refused, why = refused + 1, str(error)
        except Exception as error:  # the user's code
            raise AdapterError(
                f"adapter {job['adapter']!r} raises on frame {number} of {log}: {one_line(error)}"
            ) from error
    if not frames:
        refusal = f"; the adapter refuses all {refused}: {why}" if refused else ""
        raise TorchperfError(f"log {log}: none of its {triggers} frames can be used{refusal}")
    write_frames(frames, Path(job["frames"]))
    return f"{len(frames)} of {triggers} frames of {log.name}" + (
        f", {refused} refused: {why}" if refused else ""
    )


def log_frames(adapter: Adapter, log: Path) -> Iterator[dict[str, Received]]:
    """Each frame of a log: its trigger, and the newest message of each other input before it, if any.

    Raises:
        TorchperfError: the log has no message of the trigger's type.
    """
    trigger, latest = next(iter(adapter.inputs)), dict[str, Received]()
    with LogReader(log) as reader:
        inputs = _inputs_in(reader, adapter)
        for message in reader.messages(inputs):
            stamp_ns = header_stamp_ns(message.data) if has_header(message.type_name) else 0
            decoded = decode(message.data, message.type_name)
            latest[inputs[message.topic]] = Received(decoded, stamp_ns, 0.0)
            if inputs[message.topic] == trigger:
                yield {name: latest[name] for name in adapter.inputs if name in latest}


def _inputs_in(log: LogReader, adapter: Adapter) -> dict[str, str]:
    """The input of each topic: that of its name, else of its type; the topic with most messages is first."""
    free, found = dict(adapter.inputs), dict[str, str]()
    for each, name in sorted(
        itertools.product(adapter.inputs, log.topics),
        key=lambda pair: (not pair[1].endswith(absolute(pair[0])), -log.topics[pair[1]].count),
    ):
        if each in free and name not in found and full_name(free[each]) == log.topics[name].type_name:
            found[name] = each
            del free[each]
    if (trigger := next(iter(adapter.inputs))) in free:
        there = ", ".join(f"{topic.name} ({topic.type_name})" for topic in log.topics.values())
        raise TorchperfError(
            f"log {log.path} has no {adapter.inputs[trigger]}, which is the trigger {trigger}; it has {there}"
        )
    return found
