"""Inputs of any size on an engine that was made for some: exact, in buckets, or dynamic."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from torchperf_ros.api.errors import BadInput, TorchperfError, one_line
from torchperf_ros.engines.built_tier import Call, Inputs
from torchperf_ros.engines.engine import CaptureFailed
from torchperf_ros.engines.outputs import shapes_of
from torchperf_ros.engines.parity import DynamicDims, Parity, ParityError, check, memory_format, random_like
from torchperf_ros.settings.build_options import (
    Axis,
    ShapeOptions,
    Shapes,
    axes_of,
    bucket_of,
    bucket_shapes,
    format_shapes,
    smallest_in_bucket,
    with_sizes,
    within,
)

# `Adapter.unpad`: cuts outputs to what belongs to inputs of these shapes.
Unpad: TypeAlias = Callable[[Any, Shapes], Any]

_MOST_PLANS = 4096
_MOST_BUFFER_BYTES = 256 << 20
_WARM_UP_RUNS = 2  # CUDA graphs are captured at the second
_COMPARED = 8  # buckets whose results are compared with eager's
_MOST_CORNERS = 16
_DYNAMIC_DRAWS = 4
_STATIC = "its package runs the example's shapes only"


class _Plan(NamedTuple):
    """What runs inputs of one layout, and what that counts as; the elements are those of a hit's inputs."""

    call: Call
    hit: bool = False
    valid_elements: int = 0
    run_elements: int = 0


class ShapeRunner:
    """Runs a tier's engine on the shapes that were prepared, and eager on all others.

    None is refused or recompiled.

    A frame is a *hit* where its shape, after the policy, was prepared, or lies in the ranges of a dynamic
    engine. Inputs that are laid out in another way than those that the engine was warmed up with (strides,
    or made outside of inference mode) are copied: a compiled engine would compile for them, and a package
    read them wrongly.

    Call it under `torch.inference_mode()`. Outputs may be views on memory that the next call writes to.

    Attributes:
        policy: the one in force; after `warm_up` it may be another than asked for.
        notes: why something that was asked for is not done, one sentence each.
        hits, misses: frames that the engine answered; whose shape was not prepared, which eager answered.
        shapes: what is warmed up before the first frame: the example, the common shapes, the buckets.
    """

    def __init__(  # noqa: PLR0913
        self,
        run: Call,
        eager: Call | None,
        options: ShapeOptions,
        dynamic_dims: DynamicDims,
        example: Inputs,
        precision: str,
        known: Parity | None = None,
        *,
        unpad: Unpad = lambda outputs, _: outputs,
        dynamic_engine: bool = False,
        static: bool = False,
        capture: Callable[[Inputs], None] | None = None,
    ) -> None:
        """Take an engine and what it stands in for; nothing is run yet.

        `eager` is the model itself: the reference, and the answer to every miss. Without it, where there
        is only a package, nothing is compared or padded, and a miss raises `BadInput`. A `dynamic_engine`
        runs every size in `dynamic_dims` without being compiled again; a `static` one takes the example's
        shapes only, and what else is asked for is noted. `capture` makes a
        CUDA graph of one size more. `unpad` cuts the outputs of padded inputs. The
        `precision` decides how far results may be from eager's, with what is `known` of the engine, see
        `check`.

        Raises:
            ConfigError: common shapes do not fit the inputs, or the buckets are too many.
            AdapterError: `dynamic_dims` do not fit the example.
        """
        self._run, self._eager, self._check = run, eager, partial(check, precision=precision, known=known)
        self._example, self._usual = example, shapes_of(example)
        self._dynamic_engine, self._unpad, self._capture = dynamic_engine, unpad, capture
        self._axes = axes_of(dynamic_dims, self._usual)
        self.notes: list[str] = []
        self.hits = self.misses = 0
        # of the hits' inputs; of what the engine ran, padding included
        self._valid_elements = self._run_elements = 0
        options.check_inputs(self._usual)
        self._options, self._static = options, static
        if static and any(each != self._usual for each in options.common):
            self._options = replace(options, common=())
            self.notes.append(f"common_shapes: left to eager: {_STATIC}")
        if self._options.policy == "dynamic" and not self._axes:
            # Nothing varies, so there is nothing to note.
            self._options = replace(self._options, policy="exact")
        self._choose(self._options.policy)

    def __call__(self, *inputs: torch.Tensor) -> Any:  # noqa: ANN401
        return self.call_for(inputs)(*inputs)

    def call_for(self, inputs: Inputs) -> Call:
        """What runs these inputs, counted as a frame: for a prepared shape the engine itself."""
        key = tuple([(t.shape, t.stride(), t.dtype, t.is_inference()) for t in inputs])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(inputs)
        self.hits += plan.hit
        self.misses += not plan.hit
        self._valid_elements += plan.valid_elements
        self._run_elements += plan.run_elements
        return plan.call

    @property
    def waste(self) -> float:
        """Share of what the engine ran that was padding, 0 to 1."""
        return 1.0 - self._valid_elements / self._run_elements if self._run_elements else 0.0

    def _plan(self, inputs: Inputs) -> _Plan:
        shapes = shapes_of(inputs)
        target = self._target(shapes)
        if target is None or [t.dtype for t in inputs] != [t.dtype for t in self._example]:
            return _Plan(self._eager or _no_eager)
        call = self._run
        if target != shapes or not all(map(_is_laid_out_like, inputs, self._example)):
            call = partial(self._run_held, target, shapes)
        return _Plan(call, True, _elements(shapes), _elements(target))

    def _target(self, shapes: Shapes) -> Shapes | None:
        """The shapes that the engine runs for a frame's; None where none are prepared."""
        if shapes in self._warm:
            return shapes
        if self.policy == "exact" or not within(shapes, self._axes, self._usual):
            return None
        target = shapes if self.policy == "dynamic" else self._bucket(shapes)
        return target if self.policy == "dynamic" or target in self._warm else None

    def _run_held(self, target: Shapes, shapes: Shapes, *inputs: torch.Tensor) -> Any:  # noqa: ANN401
        outputs = self._run(*self._buffers.hold(target, inputs))
        return outputs if shapes == target else self._unpad(outputs, shapes)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every shape to prepare, and compare with eager.

        A policy that fails is replaced by dynamic, where the engine is, else by exact, with the reason in `notes`.

        Raises:
            ParityError: not even the example's results are eager's.
            CaptureFailed: a size cannot be captured; this process has to end.
        """
        for policy in {"bucket": ("bucket", "dynamic"), "dynamic": ("dynamic",)}.get(
            self._options.policy, ()
        ):
            before = len(self.notes)
            try:
                self._prepare(policy)
            except CaptureFailed:
                raise
            except Exception as error:  # the user's model runs here, on sizes that it may not take
                self.notes[before:] = [f"shapes: the policy {policy} cannot be used: {one_line(error)}"]
            else:
                return
        self._prepare("exact")

    def _choose(self, policy: str) -> None:
        self.policy, width = policy, self._options.bucket_width
        buckets = bucket_shapes(self._usual, self._axes, width) if policy == "bucket" else ()
        self.shapes = tuple(dict.fromkeys((self._usual, *self._options.common, *buckets)))
        self._warm: set[Shapes] = set()
        self._buffers = PaddedBuffers(self._example)
        self._plans: dict[Any, _Plan] = {}

    def _prepare(self, policy: str) -> None:
        """Warm everything up and compare with eager, or raise a `TorchperfError` with what does not go."""
        self._choose(policy)
        reasons = {
            "the adapter declares no dynamic_dims": not self._axes,
            _STATIC: self._static,
            "the engine was made for fixed sizes": policy == "dynamic" and not self._dynamic_engine,
            "there is no eager model to compare padded results with": (
                policy == "bucket" and not self._eager
            ),
        }
        if policy != "exact" and (why := next((reason for reason, holds in reasons.items() if holds), "")):
            raise TorchperfError(why)
        inside = [shapes for shapes in self.shapes if within(shapes, self._axes, self._usual)]
        buckets = [shapes for shapes in inside if policy == "bucket" and self._bucket(shapes) == shapes]
        for shapes in (each for each in self.shapes if each not in buckets):
            try:
                self._warm_up(shapes)
            except CaptureFailed:
                raise
            except Exception as error:  # the user's model runs here, on sizes that it may not take
                if shapes == self._usual:
                    raise
                self.notes.append(
                    f"common_shapes: {format_shapes(shapes)!r} is left to eager: {one_line(error)}"
                )
        for shapes in _dynamic_draws(self._usual, self._axes) if policy == "dynamic" else ():
            self._warm_up(shapes, keep=False)
        # The first and the last of them, and some evenly between.
        compared = [*buckets[:: -(-len(buckets) // _COMPARED) or 1], *buckets[-1:]]
        for bucket in buckets:
            self._warm_up(bucket, compare=bucket in compared)
            if bucket in compared:
                self._compare_padded(bucket)

    def _bucket(self, shapes: Shapes) -> Shapes:
        return bucket_of(shapes, self._axes, self._options.bucket_width)

    def _warm_up(self, shapes: Shapes, *, compare: bool = True, keep: bool = True) -> None:
        """Run inputs of these shapes, and compare; where frames will have them, they are to `keep`."""
        for seed in range(_WARM_UP_RUNS):
            inputs = draw(self._example, shapes, seed)
            if self._capture and keep:
                self._capture(inputs)
            found = self._run_held(shapes, shapes, *inputs)
        if self._eager and compare:
            self._check(self._eager(*inputs), found)
        self._warm.add(shapes)

    def _compare_padded(self, bucket: Shapes) -> None:
        """Run shapes of a bucket, the one that is padded most and one at random, and compare with eager."""
        assert self._eager
        smallest = smallest_in_bucket(bucket, self._axes, self._options.bucket_width)
        drawn = random.Random(format_shapes(bucket))
        sizes = [drawn.randint(axis.size_in(smallest), axis.size_in(bucket)) for axis in self._axes]
        for seed, valid in enumerate((smallest, with_sizes(bucket, self._axes, sizes))):
            inputs = draw(self._example, valid, seed)
            try:
                self._check(self._eager(*inputs), self._run_held(bucket, valid, *inputs))
            except ParityError as error:
                raise TorchperfError(
                    f"padding {format_shapes(valid)} to {format_shapes(bucket)} changes the result: {error};"
                    " where only sizes differ, the adapter's `unpad` has to cut the outputs"
                ) from error


class PaddedBuffers:
    """Memory of the buckets' sizes that holds smaller inputs with zeros (False) around them.

    All of it is given up where one bucket more would be too much, and made again as frames come.
    """

    def __init__(self, example: Inputs) -> None:
        self._example = example
        self._sets: dict[Shapes, list[torch.Tensor]] = {}
        self._held: dict[Shapes, list[tuple[int, ...]]] = {}  # the size of what was last copied in

    def hold(self, bucket: Shapes, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy inputs, no larger than the bucket in any dimension, into its buffers, until its next use."""
        buffers = self._sets.get(bucket) or self._made(bucket)
        held = self._held[bucket]
        for number, (target, source) in enumerate(zip(buffers, inputs, strict=True)):
            # only what the last input covered and this one does not is zeroed
            for dim, (before, now) in enumerate(zip(held[number], source.shape, strict=True)):
                if now < before:
                    target.narrow(dim, now, before - now).zero_()
                if now < target.shape[dim]:
                    target = target.narrow(dim, 0, now)  # noqa: PLW2901
            held[number] = tuple(source.shape)
            target.copy_(source, non_blocking=True)
        return buffers

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for buffers in self._sets.values() for tensor in buffers)

    def _made(self, bucket: Shapes) -> list[torch.Tensor]:
        buffers = [
            torch.empty(
                shape, dtype=like.dtype, device=like.device, memory_format=memory_format(like)
            ).zero_()
            for shape, like in zip(bucket, self._example, strict=True)
        ]
        if self.size_bytes + sum(tensor.nbytes for tensor in buffers) > _MOST_BUFFER_BYTES:
            self._sets.clear()
        self._sets[bucket], self._held[bucket] = buffers, list(bucket)
        return buffers


def _is_laid_out_like(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether code that was compiled for buffers made here, `like` another tensor, runs this one as it is.

    Compilers guard on type, strides (also of dimensions of size 1) and on being made under inference mode.
    """
    usual = torch.empty(tensor.shape, device="meta", memory_format=memory_format(like)).stride()
    return tensor.dtype is like.dtype and tensor.stride() == usual and tensor.is_inference()


def draw(example: Inputs, shapes: Shapes, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return tuple(random_like(like, shape, generator) for like, shape in zip(example, shapes, strict=True))


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _no_eager(*inputs: torch.Tensor) -> Any:  # noqa: ANN401
    raise BadInput(
        f"inputs of {format_shapes(shapes_of(inputs))}: not prepared, and there is no eager model to answer"
    )


def _dynamic_draws(example: Shapes, axes: Sequence[Axis]) -> list[Shapes]:
    """Shapes that show a compiler that sizes are independent: drawn ones first, then corners.

    Sizes that are equal when it compiles are one to it, and size 1 gets a graph of its own.
    """
    drawn = random.Random(0)
    sizes = [tuple(drawn.randint(axis.low, axis.high) for axis in axes) for _ in range(_DYNAMIC_DRAWS)]
    corners = itertools.product(*(sorted({axis.low, axis.high}) for axis in axes))
    sizes += itertools.islice(corners, _MOST_CORNERS)
    return [with_sizes(example, axes, each) for each in dict.fromkeys(sizes)]
