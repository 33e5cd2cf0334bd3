"""How the shapes of a model's outputs follow from those of its inputs, learned by running it."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.engines.built_tier import Call, Inputs
from torchperf_ros.engines.outputs import tensors_in
from torchperf_ros.engines.parity import random_like
from torchperf_ros.engines.shape_buckets import Axis, with_sizes
from torchperf_ros.settings.shape_options import Shapes

Crop: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""Per output tensor: (dimension, size to keep) of what follows an axis."""

_RULE_CHECKS = 5


class ShapesRefused(TorchperfError):
    """A shape policy does not go with the model or engine.

    Or output sizes do not follow from input sizes.
    """


@dataclass(frozen=True)
class SizeRule:
    """`size -> base + multiple * ((size - first) // stride)`, for sizes within the range that it was learned on.

    Covers what layers do: the same size (pointwise), a constant (pooled), `(size + offset) // stride`
    (convolutions, pooling), and multiples (flattening, upsampling).

    Attributes:
        base: output size at `first`.
        multiple: by how much the output grows at once; 0 where it is constant.
        first: a size at which the output grows, or the lowest.
        stride: how far the next such size is.
    """

    base: int
    multiple: int
    first: int
    stride: int

    def __call__(self, size: int) -> int:
        """The output's size for an input's."""
        return self.base + self.multiple * ((size - self.first) // self.stride)

    @classmethod
    def learn(cls, size_of: Callable[[int], int], low: int, high: int) -> "SizeRule | None":
        """Find the rule from a few sizes between `low` and `high`; None where no rule fits what was asked.

        `size_of`, the output's size for an input's, is asked about twice log2(stride) times, and a few
        times to check.
        """
        smallest, largest = size_of(low), size_of(high)
        first = _next_growth(size_of, low, high)
        if first is None:
            rule = cls(smallest, 0, low, 1)
        else:
            base = size_of(first)
            second = _next_growth(size_of, first, high)
            stride = high - low + 1 if second is None else second - first
            if base < smallest or first - low > stride:
                return None
            rule = cls(base, base - smallest, first, stride)
        # spread by the golden ratio, so that no period of the sizes is hit only
        sizes = {low + round((high - low) * (0.618034 * n % 1.0)) for n in range(1, _RULE_CHECKS + 1)}
        fits = (
            rule(low) == smallest
            and rule(high) == largest
            and all(rule(size) == size_of(size) for size in sizes)
        )
        return rule if fits else None


def _next_growth(size_of: Callable[[int], int], start: int, high: int) -> int | None:
    """The first size above `start` with another output size; None: there is none up to `high`."""
    at_start, below, step = size_of(start), start, 1
    while size_of(above := min(start + step, high)) == at_start:
        if above == high:
            return None
        below, step = above, 2 * step
    between = range(below + 1, above)
    return below + 1 + bisect_left(between, True, key=lambda size: size_of(size) != at_start)


@dataclass(frozen=True)
class OutputSizes:
    """What sizes follow from.

    Per output {dimension: (axis, rule)}; a dimension that is missing is constant.
    """

    follows: tuple[dict[int, tuple[Axis, SizeRule]], ...] = ()

    @classmethod
    def learn(cls, model: Call, example: Inputs, axes: Sequence[Axis]) -> "OutputSizes":
        """Run the model on sizes of each axis alone.

        That they hold together, a comparison with eager has to show.

        Raises:
            ShapesRefused: an output's size follows from several axes, or by no rule; the message says
                which.
        """
        base = shapes_of(example)
        usual = tuple(axis.size_in(base) for axis in axes)
        asked: dict[tuple[int, ...], Shapes] = {}

        def ask(sizes: tuple[int, ...]) -> Shapes:
            if sizes not in asked:
                # another seed each time: sizes that follow from the content fit no rule
                inputs = draw(example, with_sizes(base, axes, sizes), seed=len(asked))
                asked[sizes] = shapes_of(tensors_in(model(*inputs)))
                if [len(shape) for shape in asked[sizes]] != [len(shape) for shape in asked[usual]]:
                    msg = f"outputs of sizes {sizes} have the shapes {asked[sizes]}, others {asked[usual]}"
                    raise ShapesRefused(msg)
            return asked[sizes]

        learned: list[dict[int, tuple[Axis, SizeRule]]] = []
        for output, shape in enumerate(ask(usual)):
            learned.append({})
            for dim, (number, axis) in itertools.product(range(len(shape)), enumerate(axes)):
                before, after = usual[:number], usual[number + 1 :]
                rule = SizeRule.learn(lambda n: ask((*before, n, *after))[output][dim], axis.low, axis.high)  # noqa: B023
                what = f"the size of dimension {dim} of output {output} follows"
                if rule is None:
                    raise ShapesRefused(f"{what} by no known rule from {axis}")
                if rule.multiple and dim in learned[output]:
                    raise ShapesRefused(f"{what} from both {learned[output][dim][0]} and {axis}")
                if rule.multiple:
                    learned[output][dim] = axis, rule
        return cls(tuple(learned))

    def crop(self, shapes: Shapes) -> Crop:
        """What of each output belongs to inputs of these shapes."""
        return tuple(
            tuple((dim, rule(axis.size_in(shapes))) for dim, (axis, rule) in dims.items())
            for dims in self.follows
        )


def cropped(outputs: Any, crop: Crop) -> Any:  # noqa: ANN401 - whatever a model returns
    """The outputs as views on what is kept."""
    kept = iter(crop)

    def view(tensor: torch.Tensor) -> torch.Tensor:
        for dim, size in next(kept):
            tensor = tensor.narrow(dim, 0, size)
        return tensor

    return pytree.tree_map_only(torch.Tensor, view, outputs)


def shapes_of(tensors: Any) -> Shapes:  # noqa: ANN401 - any iterable of tensors
    """Their shapes as plain tuples."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


def draw(example: Inputs, shapes: Shapes, seed: int) -> Inputs:
    """Random inputs like the example in these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(random_like(like, shape, generator) for like, shape in zip(example, shapes, strict=True))
