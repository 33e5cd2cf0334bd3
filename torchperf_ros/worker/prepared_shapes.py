"""The shapes that an engine was warmed up with under one policy, and what other shapes they can stand for."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.core.shape_buckets import Axis, bucket_of, prepared_shapes, smallest_in_bucket, with_sizes, within
from torchperf_ros.core.shape_options import ShapeOptions, Shapes, format_shapes
from torchperf_ros.worker.output_sizes import Crop, Model, OutputSizes, cropped, draw
from torchperf_ros.worker.padded_buffer import PaddedBuffers
from torchperf_ros.worker.parity import ParityError, check

_WARM_UP_RUNS = 2  # CUDA graphs are captured at the second
_COMPARED_FIRST = 4  # buckets whose padding is tried on eager, before the engine compiles any
_COMPARED = 8  # buckets whose results are compared with eager's
_MOST_CORNERS = 16
_DYNAMIC_DRAWS = 4


class PolicyRefused(TorchperfError):
    """A shape policy cannot be used with this model or engine; says why."""


class PreparedShapes:
    """Warms an engine up for a policy, and finds the prepared shapes that frames are run in.

    Attributes:
        every: what is warmed up: the example, the common shapes, the buckets.
        notes: common shapes that the engine cannot run.
    """

    def __init__(
        self,
        run: Model,
        eager: Model | None,
        options: ShapeOptions,
        axes: Sequence[Axis],
        example: tuple[torch.Tensor, ...],
        shapes: Shapes,
    ) -> None:
        """Take an engine; nothing is run yet.

        Args:
            run: the engine.
            eager: what it is compared with; None: with nothing.
            options: which policy.
            axes: the sizes that vary.
            example: inputs that random ones are drawn like.
            shapes: of the example, or of one part of it where it is run in parts.

        Raises:
            ConfigError: common shapes do not fit the inputs, or the buckets are too many.
        """
        self._run, self._eager, self._options, self._axes = run, eager, options, axes
        self._example, self._shapes = example, shapes
        self.every = prepared_shapes(options, axes, shapes)
        self.notes: list[str] = []
        self._warm: set[Shapes] = set()
        self._output_sizes = OutputSizes(())
        self._buffers = PaddedBuffers(example)

    def prepare(self, precision: str, *, dynamic_engine: bool) -> None:
        """Learn how padded outputs are cropped, warm everything up, and compare with eager.

        Args:
            precision: of the engine; says how far its results may be from eager's.
            dynamic_engine: whether the engine runs every size of the axes.

        Raises:
            PolicyRefused, ParityError, SizesNotLearned: the policy does not go with the model or engine.
        """
        policy, buckets = self._options.policy, self._buckets()
        if policy != "exact" and not self._axes:
            msg = "the adapter declares no dynamic_dims"
            raise PolicyRefused(msg)
        if policy == "dynamic" and not dynamic_engine:
            msg = "the engine was made for fixed sizes"
            raise PolicyRefused(msg)
        if policy == "bucket" and not self._eager:
            msg = "there is no eager model to compare padded results with"
            raise PolicyRefused(msg)
        if policy == "bucket" and self._eager:
            self._output_sizes = OutputSizes.learn(self._eager, self._example, self._axes)
            for bucket in _spread(buckets, _COMPARED_FIRST):
                self._compare_padded(self._eager, bucket, precision)
        for shapes in self.every:
            if shapes not in buckets:
                self._warm_up_alone(shapes, precision)
        for shapes in _dynamic_draws(self._shapes, self._axes) if policy == "dynamic" else ():
            self._warm_up(shapes, precision)
        compared = _spread(buckets, _COMPARED)
        for bucket in buckets:
            self._warm_up(bucket, precision if bucket in compared else "")
            if bucket in compared:
                self._compare_padded(self._run, bucket, precision)

    def target(self, shapes: Shapes) -> Shapes | None:
        """The shapes that the engine runs for a frame's; None where none are prepared."""
        if shapes in self._warm:
            return shapes
        if self._options.policy == "exact" or not within(shapes, self._axes, self._shapes):
            return None
        if self._options.policy == "dynamic":
            return shapes
        bucket = self._bucket(shapes)
        return bucket if bucket in self._warm else None

    def crop(self, shapes: Shapes, target: Shapes) -> Crop:
        """What of the target's outputs belongs to the frame's shapes; empty: all."""
        return () if shapes == target else self._output_sizes.crop(shapes)

    def run_held(self, run: Model, target: Shapes, inputs: Sequence[torch.Tensor], crop: Crop) -> Any:  # noqa: ANN401
        """Copy the inputs into the target's buffers, run, and crop."""
        outputs = run(*self._buffers.hold(target, inputs))
        return cropped(outputs, crop) if crop else outputs

    def _bucket(self, shapes: Shapes) -> Shapes:
        return bucket_of(shapes, self._axes, self._options.bucket_width)

    def _buckets(self) -> tuple[Shapes, ...]:
        if self._options.policy != "bucket":
            return ()
        return tuple(s for s in self.every if within(s, self._axes, self._shapes) and self._bucket(s) == s)

    def _warm_up_alone(self, shapes: Shapes, precision: str) -> None:
        """The example has to run; a common shape that the engine cannot run is left to eager, with a note."""
        try:
            self._warm_up(shapes, precision)
        except Exception as error:  # the user's model runs here, on sizes that it may not take
            if shapes == self._shapes:
                raise
            self.notes.append(f"common_shapes: {format_shapes(shapes)!r} is left to eager: {said(error)}")

    def _warm_up(self, shapes: Shapes, precision: str) -> None:
        """Run random inputs of these shapes; compare with eager where a precision is given."""
        for seed in range(_WARM_UP_RUNS):
            inputs = draw(self._example, shapes, seed)
            found = self.run_held(self._run, shapes, inputs, ())
        if self._eager and precision:
            check(self._eager(*inputs), found, precision)
        self._warm.add(shapes)

    def _compare_padded(self, run: Model, bucket: Shapes, precision: str) -> None:
        """Run shapes of a bucket, the one that is padded most and one at random, and compare with eager."""
        assert self._eager
        smallest = smallest_in_bucket(bucket, self._axes, self._options.bucket_width)
        drawn = random.Random(format_shapes(bucket))
        sizes = [drawn.randint(axis.size_in(smallest), axis.size_in(bucket)) for axis in self._axes]
        for seed, valid in enumerate((smallest, with_sizes(bucket, self._axes, sizes))):
            inputs = draw(self._example, valid, seed)
            found = self.run_held(run, bucket, inputs, self.crop(valid, bucket))
            try:
                check(self._eager(*inputs), found, precision)
            except ParityError as error:
                msg = f"padding {format_shapes(valid)} to {format_shapes(bucket)} changes the result: {error}"
                raise PolicyRefused(msg) from error


def said(error: Exception) -> str:
    """What an error says, in one line; whose it is where it is not this package's."""
    lines = f"{error}".strip().splitlines() or [""]
    return lines[0] if isinstance(error, TorchperfError) else f"{type(error).__name__}: {lines[0]}"


def _dynamic_draws(example: Shapes, axes: Sequence[Axis]) -> list[Shapes]:
    """Shapes that show a compiler that sizes are independent: drawn ones first, then corners.

    Sizes that are equal when it compiles are one to it, and size 1 gets a graph of its own.
    """
    drawn = random.Random(0)
    sizes = [tuple(drawn.randint(axis.low, axis.high) for axis in axes) for _ in range(_DYNAMIC_DRAWS)]
    corners = itertools.product(*(sorted({axis.low, axis.high}) for axis in axes))
    sizes += itertools.islice(corners, _MOST_CORNERS)
    return [with_sizes(example, axes, each) for each in dict.fromkeys(sizes)]


def _spread(shapes: tuple[Shapes, ...], most: int) -> tuple[Shapes, ...]:
    """At most so many, evenly from first to last."""
    count = min(most, len(shapes))
    return tuple(shapes[round(i * (len(shapes) - 1) / max(1, count - 1))] for i in range(count))
