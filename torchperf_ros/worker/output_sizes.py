"""How the shapes of a model's outputs follow from those of its inputs, learned by running it."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.core.shape_buckets import Axis, with_sizes
from torchperf_ros.core.shape_options import Shapes
from torchperf_ros.core.size_rule import SizeRule
from torchperf_ros.worker.output_check import tensors_in
from torchperf_ros.worker.parity import random_inputs

Model: TypeAlias = Callable[..., Any]
"""Takes input tensors, returns a nest of tensors."""

Crop: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""Per output tensor: (dimension, size to keep) of what follows an axis."""

_JOINT_CHECKS = 3


class SizesNotLearned(TorchperfError):
    """Output sizes do not follow from input sizes in a way that outputs could be cropped or joined by."""


@dataclass(frozen=True)
class OutputSizes:
    """What the output sizes follow from.

    Attributes:
        follows: per output tensor, {dimension: (axis, rule)}; a dimension that is missing is constant.
    """

    follows: tuple[dict[int, tuple[Axis, SizeRule]], ...]

    @classmethod
    def learn(cls, model: Model, example: tuple[torch.Tensor, ...], axes: Sequence[Axis]) -> "OutputSizes":
        """Run the model on sizes of each axis alone, then of all together.

        Raises:
            SizesNotLearned: an output's size follows from several axes, or by no rule; says which.
        """
        base = shapes_of(example)
        at_example = tuple(axis.size_in(base) for axis in axes)
        asked: dict[tuple[int, ...], Shapes] = {}

        def ask(sizes: tuple[int, ...]) -> Shapes:
            if sizes not in asked:
                # another seed each time: sizes that follow from the content fit no rule
                inputs = draw(example, with_sizes(base, axes, sizes), seed=len(asked))
                asked[sizes] = shapes_of(tensors_in(model(*inputs)))
                if [len(shape) for shape in asked[sizes]] != [len(shape) for shape in asked[at_example]]:
                    msg = f"outputs of sizes {sizes} have the shapes {asked[sizes]}, others {asked[at_example]}"
                    raise SizesNotLearned(msg)
            return asked[sizes]

        def follow(output: int, dim: int) -> tuple[Axis, SizeRule] | None:
            found = []
            for number, axis in enumerate(axes):
                before, after = at_example[:number], at_example[number + 1 :]
                rule = SizeRule.learn(lambda n: ask((*before, n, *after))[output][dim], axis.low, axis.high)  # noqa: B023
                if rule is None:
                    msg = f"the size of dimension {dim} of output {output} follows by no known rule from {axis}"
                    raise SizesNotLearned(msg)
                found += [(axis, rule)] if not rule.constant else []
            if len(found) > 1:
                names = " and ".join(str(axis) for axis, _ in found)
                msg = f"the size of dimension {dim} of output {output} follows from both {names}"
                raise SizesNotLearned(msg)
            return found[0] if found else None

        learned = []
        for output, shape in enumerate(ask(at_example)):
            rules = {dim: follow(output, dim) for dim in range(len(shape))}
            learned.append({dim: rule for dim, rule in rules.items() if rule})
        sizes = cls(tuple(learned))
        drawn = random.Random(0)
        for _ in range(_JOINT_CHECKS):
            together = tuple(drawn.randint(axis.low, axis.high) for axis in axes)
            crop = sizes.crop(with_sizes(base, axes, together))
            followed = [list(shape) for shape in ask(at_example)]
            for sizes_of_one, kept in zip(followed, crop, strict=True):
                for dim, size in kept:
                    sizes_of_one[dim] = size
            if followed != [list(shape) for shape in ask(together)]:
                msg = f"outputs of sizes {together} have the shapes {ask(together)}; each size alone gives {followed}"
                raise SizesNotLearned(msg)
        return sizes

    def crop(self, shapes: Shapes) -> Crop:
        """What of each output belongs to inputs of these shapes."""
        return tuple(
            tuple((dim, rule(axis.size_in(shapes))) for dim, (axis, rule) in dims.items()) for dims in self.follows
        )


def cropped(outputs: Any, crop: Crop) -> Any:  # noqa: ANN401 - whatever a model returns
    """The outputs as views on what is kept."""
    views = []
    for tensor, kept in zip(tensors_in(outputs), crop, strict=True):
        view = tensor
        for dim, size in kept:
            view = view.narrow(dim, 0, size)
        views.append(view)
    return rebuilt(outputs, iter(views))


def rebuilt(outputs: Any, tensors: Iterator[torch.Tensor]) -> Any:  # noqa: ANN401
    """The same nest with other tensors, in the order of `tensors_in`."""
    if isinstance(outputs, torch.Tensor):
        return next(tensors)
    if isinstance(outputs, dict):
        values = [(key, rebuilt(value, tensors)) for key, value in outputs.items()]
        return type(outputs)(values)
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(rebuilt(value, tensors) for value in outputs))
    if isinstance(outputs, (tuple, list)):
        return type(outputs)([rebuilt(value, tensors) for value in outputs])
    return outputs


def shapes_of(tensors: Any) -> Shapes:  # noqa: ANN401 - any iterable of tensors
    """Their shapes as plain tuples."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


def draw(example: tuple[torch.Tensor, ...], shapes: Shapes, seed: int) -> tuple[torch.Tensor, ...]:
    """Random inputs like the example in these shapes."""
    sizes = {index: {dim: (size, size) for dim, size in enumerate(shape)} for index, shape in enumerate(shapes)}
    return random_inputs(example, seed, sizes)
