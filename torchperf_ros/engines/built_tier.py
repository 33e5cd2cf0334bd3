"""A tier's model on its device: what every build, trial and check begins with."""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from torchperf_ros.api.adapter import HELD_OUT, Adapter, without_exit
from torchperf_ros.api.errors import AdapterError, one_line
from torchperf_ros.engines.outputs import described, shapes_of, signature_of
from torchperf_ros.engines.parity import Call, DynamicDims, Inputs, Scoring, random_inputs, says_something
from torchperf_ros.settings.build_options import INT8_STATIC, BuildOptions

_FEWEST_FRAMES = 2  # one to calibrate with, one to compare on
__all__ = [
    "BuiltTier",
    "Call",
    "Inputs",
    "build_model",
    "drawing_task",
    "judged",
    "read_frames",
    "scoring_of",
    "varying_dims",
    "write_frames",
]


@dataclass(frozen=True)
class BuiltTier:
    """A model with what it is run on.

    Attributes:
        model: on the device, in eval mode; it stays as it is.
        example: the adapter's example inputs, on the device.
        dims: dimensions that vary, input index -> {dimension: (min, max)}.
        scoring: the adapter's own judgement of what the model answers.
        frames: inputs that the adapter made of a log's frames, see `read_frames`.
    """

    model: torch.nn.Module
    example: Inputs
    dims: DynamicDims
    device: torch.device
    scoring: Scoring | None = field(default=None, kw_only=True)
    frames: Sequence[Inputs] = field(default=(), kw_only=True)

    def narrowed(self, options: BuildOptions) -> "BuiltTier":
        """The same with those dimensions only that an engine with these options has to let vary."""
        return replace(self, dims=varying_dims(options, self.dims))

    def usual_inputs(self) -> Sequence[Inputs]:
        """Inputs as frames have them.

        Of a log, else those that the adapter scores by; constant ones do not count.
        """
        return [inputs for inputs in self.frames or self.scored_inputs() if says_something(inputs)]

    def scored_inputs(self) -> Sequence[Inputs]:
        return (self.scoring.inputs() if self.scoring else ()) or [self.example]

    def calibration(self) -> Sequence[Inputs]:
        """What ranges of activations are taken from: every other of the usual inputs."""
        return self.usual_inputs()[::2]

    def held_out(self, precision: str) -> Sequence[Inputs]:
        """The usual inputs from which nothing is calibrated in this precision; none where there is only one."""
        usual = self.usual_inputs()
        return usual[1::2] if precision == INT8_STATIC else usual if len(usual) >= _FEWEST_FRAMES else []

    def why_uncalibrated(self) -> str:
        """Why no range of activations can be taken; empty: it can."""
        count = len(self.usual_inputs())
        if count >= _FEWEST_FRAMES:
            return ""
        return (
            "ranges of activations come from inputs as frames have them, and answers are compared on"
            f" others; there are {count} that are not constant, {_FEWEST_FRAMES} are needed: --log LOG, or"
            " Adapter.score_inputs"
        )

    def inputs_by_size(self) -> list[Inputs]:
        """The example; where sizes vary, before it inputs of the middle, smallest and largest other sizes."""
        found = []
        for part in (0.5, 0.0, 1.0) if self.dims else ():
            sizes = {
                index: {dim: (round(low + part * (high - low)),) * 2 for dim, (low, high) in spans.items()}
                for index, spans in self.dims.items()
            }
            inputs = random_inputs(self.example, 0, sizes)
            if shapes_of(inputs) != shapes_of(self.example):
                found.append(inputs)
        return [*found, self.example]


def scoring_of(adapter: Adapter, tier: str, device: torch.device) -> Scoring:
    task_of = functools.cache(lambda: drawing_task(adapter))

    @functools.cache  # eager is asked once for all engines, and it takes seconds
    def accuracy(call: Call) -> tuple[str, float] | None:
        task = task_of()
        # a task need not derive from `Task`
        if task is None or not getattr(task, "higher_is_better", True):
            return None
        return judged(task, call, task.judged, device)

    return Scoring(
        adapter.score,
        lambda: [tuple(t.to(device) for t in inputs) for inputs in adapter.score_inputs(tier)],
        accuracy,
    )


def drawing_task(adapter: Adapter) -> Any:  # noqa: ANN401 - a `train.task.Task`
    """The adapter's training task that needs no log, None where there is none; or an `AdapterError`."""
    try:
        return adapter.training_task(None)
    except Exception as error:  # the user's code
        raise AdapterError(
            f"training_task(None) raises {one_line(error)}; it has to give None where the task needs a log"
        ) from error


def judged(task: Any, call: Call, count: int, device: torch.device) -> tuple[str, float]:  # noqa: ANN401
    """Name and value of a call's accuracy on so many held-out examples, by a training task.

    Or an `AdapterError`.
    """
    try:
        figures = dict(task.judge(call, HELD_OUT, count, device))
    except Exception as error:  # the user's code
        raise AdapterError(f"accuracy: the training task's judge raises {one_line(error)}") from error
    if not figures:
        raise AdapterError("accuracy: the training task's judge gives no figure")
    return next(iter(figures.items()))


def read_frames(path: str, example: Inputs, device: torch.device) -> list[Inputs]:
    """The inputs in a file of `write_frames`, on the device; none where the path is empty.

    Those whose types or shapes are not the example's are left out: what is calibrated takes the example's.
    """
    if not path:
        return []
    tensors, usual = load_file(path), [signature_of(tensor) for tensor in example]
    count = 1 + max((int(name.partition(".")[0]) for name in tensors), default=-1)
    frames = [tuple(tensors[f"{frame}.{index}"] for index in range(len(example))) for frame in range(count)]
    return [
        tuple(t.to(device) for t in each) for each in frames if [signature_of(t) for t in each] == usual
    ]


def write_frames(frames: Sequence[Inputs], path: Path) -> None:
    """Keep inputs in one safetensors file, from which nothing is run when it is read."""
    named = {
        f"{frame}.{index}": t.contiguous().cpu()
        for frame, inputs in enumerate(frames)
        for index, t in enumerate(inputs)
    }
    save_file(named, path)


def build_model(adapter: Adapter, tier: str) -> torch.nn.Module:
    """What the adapter builds, in eval mode; an `AdapterError` where it is no module."""
    where = f"tier {tier}: {type(adapter).__name__}.build"
    # a model whose weights are inference tensors cannot be exported
    with torch.inference_mode(mode=False), without_exit(where):
        try:
            model = adapter.build(tier)
        except KeyError as error:
            if error.args != (tier,):
                raise
            raise AdapterError(
                f"{where} knows no tier {tier!r}: the parameter `tiers` has to list those that it builds,"
                " most accurate first"
            ) from error
    if not isinstance(model, torch.nn.Module):
        hint = "; its .module() is one" if type(model).__name__ == "ExportedProgram" else ""
        raise AdapterError(f"{where} gave {described(model)}, not a torch.nn.Module{hint}")
    for module in model.modules():
        # That of an exported program raises, as it is what it was exported as, and so do those around it.
        with contextlib.suppress(NotImplementedError):
            module.train(mode=False)
    return model


def varying_dims(options: BuildOptions, declared: DynamicDims) -> DynamicDims:
    """The dimensions that an engine with these options has to let vary; a range of one size does not."""
    if options.dynamic == "never":
        return {}
    varying = {
        i: {dim: span for dim, span in spans.items() if span[0] != span[1]} for i, spans in declared.items()
    }
    return {index: spans for index, spans in varying.items() if spans}
