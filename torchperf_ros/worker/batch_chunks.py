"""Batches that are too large, run in parts: which inputs are split, and how the outputs are joined."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.shape_buckets import Axis
from torchperf_ros.core.shape_options import Shapes
from torchperf_ros.worker.output_check import tensors_in
from torchperf_ros.worker.output_sizes import Model, OutputSizes, SizesNotLearned, draw, rebuilt, shapes_of
from torchperf_ros.worker.parity import check

_ALIGNMENT = 16  # bytes; compiled code may assume it of its inputs
_MOST_LEARNED = 4  # the largest batch that learning runs


class BatchChunks:
    """Splits dimension 0 of the inputs that share the batch size, and joins the outputs.

    Those inputs are the ones whose dimension 0 the adapter declares as dynamic, with one range; where it declares none,
    those whose example has the size of the first input's. The others go to every part as they are.
    """

    def __init__(self, max_batch: int, axes: Sequence[Axis], example: Shapes) -> None:
        """Find the inputs.

        Raises:
            ConfigError: `max_batch` is below the smallest batch that the adapter declares.
        """
        self.max_batch = max_batch
        self._declared = [axis for axis in axes if axis.places[0][1] == 0]
        first = self._declared[0].places[0][0] if self._declared else 0
        size = example[first][0] if example and example[first] else 0
        places = tuple((index, 0) for index, shape in enumerate(example) if shape and shape[0] == size)
        self._axis = Axis(1, _MOST_LEARNED, self._declared[0].places if self._declared else places)
        self._inputs = frozenset(index for index, _ in self._axis.places)
        self._multiples: tuple[tuple[int, int], ...] = ()
        if self._declared and self._declared[0].low > max_batch:
            msg = (
                f"parameter max_batch: {max_batch} is below the smallest batch that the adapter declares,"
                f" {self._declared[0].low}; it has to be 0 or at least that"
            )
            raise ConfigError(msg)

    def learn(self, model: Model, example: tuple[torch.Tensor, ...], precision: str) -> None:
        """Learn along which dimension outputs are joined, and check that parts together give what the whole gives.

        Raises:
            SizesNotLearned: an output does not follow the batch, or there is no one batch.
            ParityError: the parts' results are others; the message has the figures.
        """
        if len(self._declared) > 1 or not self._axis.places:
            names = " and ".join(str(axis) for axis in self._declared) or "no input has a dimension 0"
            msg = f"there is no one batch size: {names}"
            raise SizesNotLearned(msg)
        multiples = []
        for number, follows in enumerate(OutputSizes.learn(model, example, [self._axis]).follows):
            kept = [(dim, rule.multiple) for dim, (_, rule) in follows.items() if rule.proportional]
            if len(kept) != 1 or len(follows) != 1:
                msg = f"output {number} does not follow the batch along one dimension"
                raise SizesNotLearned(msg)
            multiples += kept
        self._multiples = tuple(multiples)
        whole = draw(example, self._with_batch(shapes_of(example), _MOST_LEARNED - 1), seed=1)
        expected = model(*whole)
        check(expected, self.run(model, whole, min(self.max_batch, 2)), precision)

    def bounded(self, shapes: Shapes) -> Shapes:
        """The shapes of a full part where the batch is larger, else the same."""
        return self._with_batch(shapes, self.max_batch) if self.batch(shapes) > self.max_batch else shapes

    def bounded_axes(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """The axes with the batch ending at `max_batch`."""
        return tuple(
            Axis(axis.low, min(axis.high, self.max_batch), axis.places) if axis in self._declared else axis
            for axis in axes
        )

    def batch(self, shapes: Shapes) -> int:
        """The batch size; 0 where the inputs do not agree on one."""
        sizes = {shapes[index][0] if index < len(shapes) and shapes[index] else 0 for index in self._inputs}
        return sizes.pop() if len(sizes) == 1 else 0

    def run(self, model: Callable[..., Any], inputs: tuple[torch.Tensor, ...], most: int | None = None) -> Any:  # noqa: ANN401
        """Full parts, then the rest; each part's outputs are copied out before the next part runs.

        Args:
            model: takes a part's inputs.
            inputs: of any batch size above 0.
            most: batch size of a full part; default `max_batch`.
        """
        most = most or self.max_batch
        total = self.batch(shapes_of(inputs))
        joined: list[torch.Tensor] = []
        outputs = None
        for start in range(0, total, most):
            size = min(most, total - start)
            outputs = model(*(self._part(i, tensor, start, size) for i, tensor in enumerate(inputs)))
            parts = list(tensors_in(outputs))
            if not joined:
                for part, (dim, multiple) in zip(parts, self._multiples, strict=True):
                    joined.append(part.new_empty((*part.shape[:dim], total * multiple, *part.shape[dim + 1 :])))
            for whole, part, (dim, multiple) in zip(joined, parts, self._multiples, strict=True):
                whole.narrow(dim, start * multiple, size * multiple).copy_(part)
        return rebuilt(outputs, iter(joined))

    def _part(self, index: int, tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
        if index not in self._inputs:
            return tensor
        part = tensor.narrow(0, start, size)
        return part if part.data_ptr() % _ALIGNMENT == 0 else part.clone()

    def _with_batch(self, shapes: Shapes, size: int) -> Shapes:
        return tuple((size, *shape[1:]) if i in self._inputs else shape for i, shape in enumerate(shapes))
