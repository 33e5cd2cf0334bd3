"""Whether a model's outputs can count: finite numbers of the shape that the tier has always had."""

from collections.abc import Iterator
from typing import Any

import torch

from torchperf_ros.core.errors import TorchperfError


class InvalidOutput(TorchperfError):
    """An output has NaN or Inf, or another shape or type than when it was calibrated."""


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - whatever a model returns
    """Every tensor in a nest of tuples, lists and dicts, in order."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            yield from tensors_in(value)


class OutputCheck:
    """Compares outputs with those of the calibration: number of tensors, ranks, types, and the sizes that are fixed.

    A size may differ where the adapter declares dynamic dimensions: then only rank and type are compared.
    """

    def __init__(self, example: Any, *, fixed_sizes: bool) -> None:  # noqa: ANN401
        """Take the outputs of the example inputs."""
        self._fixed_sizes = fixed_sizes
        self._expected = self._signature(example)

    def _signature(self, outputs: Any) -> list[tuple[object, ...]]:  # noqa: ANN401
        return [(t.dtype, tuple(t.shape) if self._fixed_sizes else t.dim()) for t in tensors_in(outputs)]

    def check(self, outputs: Any) -> None:  # noqa: ANN401
        """Pass good outputs.

        Raises:
            InvalidOutput: says which output is wrong and how.
        """
        found = self._signature(outputs)
        if found != self._expected:
            msg = f"outputs have (type, shape) {found}; at calibration they had {self._expected}"
            raise InvalidOutput(msg)
        for number, tensor in enumerate(tensors_in(outputs)):
            # a sum is finite only if every element is, and takes one pass without a temporary; a sum that overflows
            # although its elements are finite is sorted out by the exact test
            if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                bad = int((~torch.isfinite(tensor)).sum())
                msg = f"output {number} has {bad} of {tensor.numel()} values that are NaN or Inf"
                raise InvalidOutput(msg)
