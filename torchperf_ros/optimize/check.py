"""Whether an adapter keeps the adapter contract: loaded, built twice, and run on one frame, in this process.

The first thing to run on a new adapter. It finds in seconds what a node finds on the road: a model that cannot be
built, weights that differ at every build, tiers that take different inputs, an output message that contradicts itself.
"""

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from torchperf_ros.config.message_types import decode, empty_message, encode, has_header, message_class
from torchperf_ros.engines.fingerprint import differing_weights
from torchperf_ros.engines.parity import signature_of, tensors_in
from torchperf_ros.frame.errors import BadInput, TorchperfError
from torchperf_ros.frame.frame import header_stamp_ns
from torchperf_ros.logs.log_reader import LogReader
from torchperf_ros.model.adapter import Adapter, Received, load_adapter
from torchperf_ros.model.device import Device, choose_device
from torchperf_ros.model.tier import InvalidOutput, OutputCheck

_IMAGE: Final = "sensor_msgs/msg/Image"
_BYTES_PER_PIXEL: Final = {"mono8": 1, "8UC1": 1, "mono16": 2, "16UC1": 2, "rgb8": 3, "bgr8": 3, "8UC3": 3, "rgba8": 4,
                           "bgra8": 4, "32FC1": 4}  # fmt: skip
_MADE_SIZE: Final = 480, 640
_MADE_STAMP_NS: Final = 1_000_000_000
_SHOWN: Final = 3


@dataclass(frozen=True)
class Finding:
    """One step of the check.

    Attributes:
        step: what was tried, for example `tier full: build`.
        ok: True, False, or None for something to know that is no failure.
        text: what came of it; of a failure also what would be right.
        took_ms: milliseconds, NaN where the time says nothing.
    """

    step: str
    ok: bool | None
    text: str
    took_ms: float = math.nan


class _Failed(Exception):
    """A step failed, and those that build on it cannot be tried."""


class AdapterCheck:
    """Checks one adapter, step by step.

    Attributes:
        refused: the adapter refused the frame with `BadInput`, so that its answer is not known.
    """

    def __init__(
        self, path: str, options: dict[str, Any], tiers: tuple[str, ...], device: str, log: Path | None, found: "Found"
    ) -> None:
        """Take what to check.

        Args:
            path: `module:Class`.
            options: handed to the adapter.
            tiers: in their order.
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            log: a recorded log to take the frame from; None: it is made.
            found: hears of each step as it ends.
        """
        self._path, self._options, self._tiers, self._log, self._found = path, options, tiers, log, found
        self._device = Device(choose_device(device), threads=0)  # with as many CPU threads as a worker has
        self._failed = self.refused = False

    def run(self) -> bool:
        """Run every step that can be run; whether all went well."""
        try:
            adapter = self._step("load", self._load, lambda found: f"{type(found).__name__} on {self._device.device}")
            self._step("inputs and output", lambda: self._contract(adapter), str)
            with torch.inference_mode():
                models = [self._tier(adapter, tier) for tier in self._tiers]
                self._tell(self._same_inputs(adapter))
                messages = self._step("a frame", lambda: self._messages(adapter), self._describe)
                for tier, model in zip(self._tiers, models, strict=True):
                    if model is not None:
                        self._frame(adapter, tier, model, messages)
        except _Failed:
            pass
        return not self._failed

    def _tell(self, finding: Finding | None) -> None:
        if finding is not None:
            self._failed |= finding.ok is False
            self._found(finding)

    def _step(self, name: str, act: Callable[[], Any], text: Callable[[Any], str]) -> Any:  # noqa: ANN401
        started_ns = time.perf_counter_ns()
        try:
            result = act()
        except Exception as error:  # the user's code runs here: whatever it raises is what the check is for
            self._tell(Finding(name, ok=False, text=_reason(error, self._path)))
            raise _Failed from error
        self._tell(Finding(name, ok=True, text=text(result), took_ms=(time.perf_counter_ns() - started_ns) / 1e6))
        return result

    def _load(self) -> Adapter:
        return load_adapter(self._path)(self._options, self._device.device)

    def _contract(self, adapter: Adapter) -> str:
        if not getattr(adapter, "inputs", None) or not getattr(adapter, "output", ""):
            msg = "has to have `inputs` (topic -> message type, the trigger first) and `output` (a message type)"
            raise TorchperfError(msg)
        for name in (*adapter.inputs.values(), adapter.output):
            message_class(name)
        trigger, trigger_type = next(iter(adapter.inputs.items()))
        if not has_header(trigger_type):
            text = f"trigger {trigger} ({trigger_type}) has no header: ages and `budget_from: stamp` are not known"
            self._tell(Finding("trigger", ok=None, text=text))
        return f"{', '.join(f'{topic} ({kind})' for topic, kind in adapter.inputs.items())} to {adapter.output}"

    def _tier(self, adapter: Adapter, tier: str) -> torch.nn.Module | None:
        """Build a tier twice, and run it on its example inputs; None if that cannot be done."""
        try:
            model = self._step(f"tier {tier}: build", lambda: self._built(adapter, tier), _size)
            again = self._step(f"tier {tier}: build again", lambda: self._built(adapter, tier), lambda _: "")
            if names := differing_weights(model, again):
                shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
                text = f"{shown} differ from build to build: no package fits; load them, or set torch.manual_seed"
                self._tell(Finding(f"tier {tier}: weights", ok=False, text=text))
            example = self._step(f"tier {tier}: example inputs", lambda: self._example(adapter, tier), _shapes)
            outputs = self._step(f"tier {tier}: first run", lambda: model(*example), _shapes)
            self._step(f"tier {tier}: second run", lambda: self._run(model, example, outputs), lambda _: "finite")
        except _Failed:
            return None
        return model  # type: ignore[no-any-return]

    @staticmethod
    def _built(adapter: Adapter, tier: str) -> torch.nn.Module:
        model = adapter.build(tier)
        if not isinstance(model, torch.nn.Module):
            msg = f"build({tier!r}) gave a {type(model).__name__}; it has to be a torch.nn.Module"
            raise TorchperfError(msg)
        return model.eval()

    @staticmethod
    def _example(adapter: Adapter, tier: str) -> tuple[torch.Tensor, ...]:
        example = adapter.example_inputs(tier)
        if not isinstance(example, tuple) or not all(isinstance(each, torch.Tensor) for each in example):
            msg = f"example_inputs({tier!r}) gave {_kind(example)}; it has to be a tuple of tensors"
            raise TorchperfError(msg)
        return example

    @staticmethod
    def _run(model: torch.nn.Module, example: tuple[torch.Tensor, ...], outputs: Any) -> None:  # noqa: ANN401
        check = OutputCheck(outputs, fixed_sizes=True)
        check.check(outputs)
        check.check(model(*example))

    def _same_inputs(self, adapter: Adapter) -> Finding | None:
        """Tiers have to take the same inputs, as one `preprocess` makes them for all."""
        try:
            signatures = {tier: _shapes(adapter.example_inputs(tier)) for tier in self._tiers}
        except Exception:  # it was told above
            return None
        if len(set(signatures.values())) > 1:
            text = f"tiers take different inputs: {signatures}; every tier has to take what `preprocess` gives"
            return Finding("tiers", ok=False, text=text)
        return None

    # -- one frame ----------------------------------------------------------------------------------------------------

    def _messages(self, adapter: Adapter) -> dict[str, Received]:
        """The frame's messages: of the log, else the adapter's own examples, else made ones."""
        if self._log is not None:
            return self._of_log(adapter, self._log)
        return dict(adapter.example_messages()) or dict(_made(adapter.inputs))

    @staticmethod
    def _of_log(adapter: Adapter, path: Path) -> dict[str, Received]:
        found: dict[str, Received] = {}
        with LogReader(path) as log:
            by_type = {kind: topic for topic, kind in reversed(adapter.inputs.items())}
            for message in log.messages():
                topic = by_type.get(message.type_name)
                if topic is None:
                    continue
                stamp_ns = header_stamp_ns(message.data) if has_header(message.type_name) else 0
                found[topic] = Received(decode(message.data, message.type_name), stamp_ns, 0.0)
                if next(iter(adapter.inputs)) in found and len(found) == len(by_type):
                    return found
            if next(iter(adapter.inputs)) not in found:
                kinds = ", ".join(sorted({topic.type_name for topic in log.topics.values()}))
                msg = f"log {path} has no {next(iter(adapter.inputs.values()))}, which is the trigger; it has {kinds}"
                raise TorchperfError(msg)
        return found

    def _describe(self, messages: Mapping[str, Received]) -> str:
        origin = "made up" if self._log is None else f"of {self._log.name}"
        return f"{origin}: " + ", ".join(f"{topic} ({_kind(each.message)})" for topic, each in messages.items())

    def _frame(self, adapter: Adapter, tier: str, model: torch.nn.Module, messages: dict[str, Received]) -> None:
        try:
            adapter.observe(messages)
            inputs = adapter.preprocess(messages)
        except BadInput as error:
            text = f"refused: {error}" + ("; try a frame of a log: --log" if self._log is None else "")
            self.refused = True
            self._tell(Finding(f"tier {tier}: frame", ok=None, text=text))
            return
        except Exception as error:  # the user's code
            self._tell(Finding(f"tier {tier}: preprocess", ok=False, text=_reason(error, self._path)))
            return
        outputs: Any = None
        try:
            wanted, given = _shapes(adapter.example_inputs(tier)), _shapes(inputs)
            if wanted != given:
                text = (
                    f"preprocess gives {given}, example_inputs {wanted}: `dynamic_dims` has to declare the difference"
                )
                self._tell(Finding(f"tier {tier}: preprocess", ok=None if adapter.dynamic_dims() else False, text=text))
            outputs = model(*inputs)
            self._step(
                f"tier {tier}: frame", lambda: self._answer(adapter, outputs, messages),
                lambda size: f"{adapter.output}, {size} bytes",
            )  # fmt: skip
        except _Failed:
            self._tell(Finding(f"tier {tier}: outputs", ok=None, text=f"build's model returns {_kind(outputs)}"))
        except Exception as error:  # the user's code
            self._tell(Finding(f"tier {tier}: frame", ok=False, text=_reason(error, self._path)))

    @staticmethod
    def _answer(adapter: Adapter, outputs: Any, messages: Mapping[str, Received]) -> int:  # noqa: ANN401
        message = adapter.postprocess(outputs, messages)
        if message is None:
            msg = f"postprocess gave None; it has to give a {adapter.output}"
            raise TorchperfError(msg)
        data = bytes(encode(message, adapter.output))
        if why := contradiction(decode(data, adapter.output), adapter.output):
            raise InvalidOutput(why)
        if has_header(adapter.output) and (trigger := next(iter(messages.values()))).stamp_ns:
            stamp_ns = header_stamp_ns(data)
            if stamp_ns != trigger.stamp_ns:
                msg = f"header.stamp is {stamp_ns} ns, the trigger's is {trigger.stamp_ns}: an output keeps its frame's"
                raise TorchperfError(msg)
        return len(data)


Found = Callable[[Finding], None]


def contradiction(message: Any, kind: str) -> str:  # noqa: ANN401 - a message of rosbags
    """What in a message contradicts itself, "" if nothing: sizes of images, point clouds and arrays."""
    if kind == _IMAGE:
        pixel = _BYTES_PER_PIXEL.get(message.encoding)
        if pixel is not None and message.step < message.width * pixel:
            return f"step is {message.step}; {message.width} pixels of {message.encoding} take {message.width * pixel}"
        if message.data.size != message.height * message.step:
            return (
                f"data has {message.data.size} bytes; {message.height} rows of {message.step} bytes"
                f" are {message.height * message.step}"
            )
    if kind == "sensor_msgs/msg/PointCloud2":
        expected = message.height * message.row_step
        if message.data.size != expected or message.row_step < message.width * message.point_step:
            return (
                f"data has {message.data.size} bytes; height {message.height} x row_step {message.row_step} is"
                f" {expected}, width {message.width} x point_step {message.point_step}"
            )
    layout = getattr(message, "layout", None)
    if layout is not None and getattr(layout, "dim", None):
        expected = math.prod(dim.size for dim in layout.dim)
        labelled = all(dim.size == 1 for dim in layout.dim)  # one entry for each label, as in this package
        if not labelled and len(message.data) < layout.data_offset + expected:
            return f"data has {len(message.data)} values; its dimensions say {expected}"
    return ""


def _made(inputs: Mapping[str, str]) -> Iterator[tuple[str, Received]]:
    """A message for each input: a grey image, else one with every field at its zero."""
    for topic, kind in inputs.items():
        message: Any
        if kind == _IMAGE:
            height, width = _MADE_SIZE
            pixels = np.full(height * width * 3, 128, np.uint8)
            message = message_class(kind)(
                empty_message("std_msgs/msg/Header"), height, width, "rgb8", 0, width * 3, pixels
            )
        else:
            message = empty_message(kind)
        stamp_ns = 0
        if has_header(kind):
            message.header.stamp.sec = 1
            stamp_ns = _MADE_STAMP_NS
        yield topic, Received(decode(bytes(encode(message, kind)), kind), stamp_ns, 0.0)


def _size(model: torch.nn.Module) -> str:
    count = sum(each.numel() for each in model.parameters())
    return f"{type(model).__name__}, {count:,} parameters"


def _shapes(tensors: Any) -> str:  # noqa: ANN401 - whatever a model returns
    return ", ".join(signature_of(each) for each in tensors_in(tensors)) or f"no tensor: {_kind(tensors)}"


def _kind(value: Any) -> str:  # noqa: ANN401
    """What something is, for a message: `dict with keys boxes, scores`."""
    if isinstance(value, dict):
        return f"a dict with keys {', '.join(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(_kind(each) for each in value)}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {signature_of(value)}"
    name = type(value).__name__
    return f"a {name}" if name in {"int", "float", "str", "NoneType"} else name.replace("__msg__", "/msg/")


def _reason(error: Exception, path: str) -> str:
    """The error in a line, with the line of the adapter's own code that it came from."""
    file = path.partition(":")[0].replace(".", "/") + ".py"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    kind = "" if isinstance(error, TorchperfError) else f"{type(error).__name__}: "
    return f"{kind}{error}{where}"
