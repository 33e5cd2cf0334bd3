"""A tier's model on its device: what every build, trial and check begins with."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchperf_ros.config.build_options import BuildOptions
from torchperf_ros.engines.parity import Call, DynamicDims, Inputs, Scoring, described, random_inputs, usual_inputs
from torchperf_ros.frame.errors import AdapterError, one_line
from torchperf_ros.model.adapter import Adapter
from torchperf_ros.train.task import HELD_OUT

__all__ = ["BuiltTier", "Call", "Inputs", "build_model", "drawing_task", "judged", "scoring_of", "varying_dims"]


@dataclass(frozen=True)
class BuiltTier:
    """A model with what it is run on.

    Attributes:
        model: on the device, in eval mode; nobody changes it.
        example: the adapter's example inputs, on the device.
        dims: dimensions that vary, input index -> {dimension: (min, max)}.
        scoring: the adapter's own judgement of what the model answers.
    """

    model: torch.nn.Module
    example: Inputs
    dims: DynamicDims
    device: torch.device
    scoring: Scoring | None = field(default=None, kw_only=True)

    def calibration(self) -> Sequence[Inputs]:
        """What ranges of activations are taken from, see `usual_inputs`."""
        return usual_inputs(self.example, self.scoring)

    def inputs_by_size(self) -> list[Inputs]:
        """The example, and where sizes vary, before it inputs of the middle, smallest and largest other sizes."""
        found = []
        for part in (0.5, 0.0, 1.0) if self.dims else ():
            sizes = {
                index: {dim: (round(low + part * (high - low)),) * 2 for dim, (low, high) in spans.items()}
                for index, spans in self.dims.items()
            }
            found.append(random_inputs(self.example, 0, sizes))
        usual = [tensor.shape for tensor in self.example]
        return [*(inputs for inputs in found if [tensor.shape for tensor in inputs] != usual), self.example]


def scoring_of(adapter: Adapter, tier: str, device: torch.device) -> Scoring:
    """The adapter's own judgement of a tier's answers."""
    task_of = functools.cache(lambda: drawing_task(adapter))

    def accuracy(call: Call) -> tuple[str, float] | None:
        task = task_of()
        if task is None or not getattr(task, "higher_is_better", True):  # a task need not derive from `Task`
            return None
        return judged(task, call, task.judged, device)

    return Scoring(
        adapter.score, lambda: [tuple(t.to(device) for t in inputs) for inputs in adapter.score_inputs(tier)], accuracy
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
    """Name and value of a call's accuracy on so many held-out examples, by a training task; or an `AdapterError`."""
    try:
        figures = dict(task.judge(call, HELD_OUT, count, device))
    except Exception as error:  # the user's code
        raise AdapterError(f"accuracy: the training task's judge raises {one_line(error)}") from error
    if not figures:
        raise AdapterError("accuracy: the training task's judge gives no figure")
    return next(iter(figures.items()))


def build_model(adapter: Adapter, tier: str) -> torch.nn.Module:
    """What the adapter builds, in eval mode; an `AdapterError` where it is no module."""
    with torch.inference_mode(mode=False):  # a model whose weights are inference tensors cannot be exported
        model = adapter.build(tier)
    if not isinstance(model, torch.nn.Module):
        raise AdapterError(f"tier {tier}: {type(adapter).__name__}.build gave {described(model)}, not a Module")
    return model.eval()


def varying_dims(options: BuildOptions, declared: DynamicDims) -> DynamicDims:
    """The dimensions that an engine with these options has to let vary; a range of one size does not."""
    if options.dynamic == "never":
        return {}
    varying = {i: {dim: span for dim, span in spans.items() if span[0] != span[1]} for i, spans in declared.items()}
    return {index: spans for index, spans in varying.items() if spans}
