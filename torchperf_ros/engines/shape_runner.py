"""Inputs of any size on an engine that was made for some: exact, in buckets, or dynamic; large batches in parts."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchperf_ros.config.shape_options import ShapeOptions, Shapes, format_shapes
from torchperf_ros.engines.built_tier import Call, Inputs
from torchperf_ros.engines.output_sizes import Crop, OutputSizes, ShapesRefused, cropped, draw, shapes_of
from torchperf_ros.engines.parity import DynamicDims, ParityError, check, tensors_in
from torchperf_ros.engines.shape_buckets import (
    Axis,
    axes_of,
    bucket_of,
    bucket_shapes,
    smallest_in_bucket,
    with_sizes,
    within,
)
from torchperf_ros.frame.errors import BadInput, ConfigError, one_line

_MOST_PLANS = 4096
_MOST_BUFFER_BYTES = 256 << 20
_WARM_UP_RUNS = 2  # CUDA graphs are captured at the second
_COMPARED_FIRST = 4  # buckets whose padding is tried on eager, before the engine compiles any
_COMPARED = 8  # buckets whose results are compared with eager's
_MOST_CORNERS = 16
_DYNAMIC_DRAWS = 4
_ALIGNMENT = 16  # bytes; compiled code may assume it of its inputs


@dataclass
class ShapeCounters:
    """What became of the frames since the start.

    Attributes:
        hits, misses: frames that the engine answered; whose shape was not prepared, which eager answered.
        chunked: frames whose batch was run in parts.
        valid_elements, run_elements: input elements of the hits; what the engine ran for them, padding included.
    """

    hits: int = 0
    misses: int = 0
    chunked: int = 0
    valid_elements: int = 0
    run_elements: int = 0

    @property
    def waste(self) -> float:
        """Share of what the engine ran that was padding, 0 to 1."""
        return 1.0 - self.valid_elements / self.run_elements if self.run_elements else 0.0


@dataclass(frozen=True)
class _Plan:
    """What runs inputs of one layout, and what that counts as; the elements are those of a hit's inputs."""

    call: Call
    hit: bool = False
    valid_elements: int = 0
    run_elements: int = 0
    chunked: bool = False


class ShapeRunner:
    """Runs a tier's engine on the shapes that were prepared, and eager on all others; none is refused or recompiled.

    A frame is a *hit* where its shape, after the policy, was prepared, or lies in the ranges of a dynamic engine.
    Inputs that are laid out in another way than those that the engine was warmed up with (strides, or made outside of
    inference mode) are copied: a compiled engine would compile for them, and a package read them wrongly.

    Call it under `torch.inference_mode()`. Outputs may be views on memory that the next call writes to.

    Attributes:
        policy: the one in force; after `warm_up` it may be another than asked for.
        notes: why something that was asked for is not done, one sentence each.
        counters: hits, misses, waste.
        shapes: what is warmed up before the first frame: the example, the common shapes, the buckets.
    """

    def __init__(
        self,
        run: Call,
        eager: Call | None,
        options: ShapeOptions,
        dynamic_dims: DynamicDims,
        example: Inputs,
        precision: str,
        *,
        dynamic_engine: bool = False,
        static: bool = False,
    ) -> None:
        """Take an engine and what it stands in for; nothing is run yet.

        Args:
            run: the engine.
            eager: the model itself: the reference, and the answer to every miss; None where there is only a package,
                which then is not compared, is not padded, and a miss raises `BadInput`.
            options: the stage's.
            dynamic_dims: the adapter's.
            example: the adapter's inputs, on the device.
            precision: decides how far results may be from eager's.
            dynamic_engine: whether the engine runs every size in `dynamic_dims` without being compiled again.
            static: whether it takes the example's shapes only; other options are not used then, and noted.

        Raises:
            ConfigError: common shapes or max_batch do not fit the inputs, or the buckets are too many.
            AdapterError: `dynamic_dims` do not fit the example.
        """
        self._run, self._eager, self._precision = run, eager, precision
        self._example, self._dynamic_engine = example, dynamic_engine
        usual = shapes_of(example)
        self._axes = axes_of(dynamic_dims, usual)
        self.notes: list[str] = []
        self.counters = ShapeCounters()
        self._options = self._exact_only(options, usual) if static else options
        if self._options.policy == "dynamic" and not self._axes:  # nothing varies, so there is nothing to note
            self._options = replace(self._options, policy="exact")
        most = self._options.max_batch
        self._batches = BatchParts(most, self._axes, usual) if most else None
        self._choose(self._options.policy)

    def __call__(self, *inputs: torch.Tensor) -> Any:  # noqa: ANN401
        """Outputs of the inputs, whatever their shape."""
        return self.call_for(inputs)(*inputs)

    def call_for(self, inputs: Inputs) -> Call:
        """What runs these inputs, counted as a frame: for a prepared shape the engine itself."""
        plan, counters = self._plan_of(inputs), self.counters
        if plan.hit:
            counters.hits += 1
            counters.valid_elements += plan.valid_elements
            counters.run_elements += plan.run_elements
        else:
            counters.misses += 1
        counters.chunked += plan.chunked
        return plan.call

    def _plan_of(self, inputs: Inputs) -> _Plan:
        key = tuple([(t.shape, t.stride(), t.dtype, t.is_inference()) for t in inputs])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(inputs)
        return plan

    def _plan(self, inputs: Inputs) -> _Plan:
        """What to do with inputs of a layout that was not seen lately."""
        shapes, call = shapes_of(inputs), self._run
        parts = self._batches.parts(shapes) if self._batches else [shapes]
        targets = [self._target(part) for part in parts]
        known = [target for target in targets if target is not None]
        if len(known) < len(parts) or [t.dtype for t in inputs] != [t.dtype for t in self._example]:
            plan = _Plan(self._eager or _no_eager)
        else:
            if known[0] != shapes or not all(map(_is_laid_out_like, inputs, self._example)):
                crop = () if known[0] == shapes else self._output_sizes.crop(shapes)
                call = partial(self._run_held, self._run, known[0], crop)
            plan = _Plan(call, True, sum(map(_elements, parts)), sum(map(_elements, known)))
        if self._batches and len(parts) > 1:
            return replace(
                plan, call=partial(self._batches.run, lambda *part: self._plan_of(part).call(*part)), chunked=True
            )
        return plan

    def _target(self, shapes: Shapes) -> Shapes | None:
        """The shapes that the engine runs for a frame's; None where none are prepared."""
        if shapes in self._warm:
            return shapes
        if self.policy == "exact" or not within(shapes, self._bounded_axes, self._usual):
            return None
        if self.policy == "dynamic":
            return shapes
        bucket = self._bucket(shapes)
        return bucket if bucket in self._warm else None

    def _run_held(self, run: Call, target: Shapes, crop: Crop, *inputs: torch.Tensor) -> Any:  # noqa: ANN401
        """Copy the inputs into the target's buffers, run, and crop."""
        outputs = run(*self._buffers.hold(target, inputs))
        return cropped(outputs, crop) if crop else outputs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every shape to prepare, learn how outputs are cropped and joined, and compare with eager.

        A policy that fails is replaced by dynamic, where the engine is, else by exact; `notes` say so.

        Raises:
            ParityError: not even the example's results are eager's.
        """
        if self._batches:
            try:
                self._batches.learn(self._eager or _no_eager, self._example, self._precision)
            except Exception as error:  # the user's model runs here, on sizes that it may not take
                self._batches = None
                self.notes.append(
                    f"max_batch {self._options.max_batch}: batches are not run in chunks: {one_line(error)}"
                )
        for policy in {"bucket": ("bucket", "dynamic"), "dynamic": ("dynamic",)}.get(self._options.policy, ()):
            before = len(self.notes)
            try:
                self._prepare(policy)
            except Exception as error:  # likewise
                self.notes[before:] = [f"shapes: the policy {policy} cannot be used: {one_line(error)}"]
            else:
                return
        self._prepare("exact")

    def _choose(self, policy: str) -> None:
        """Take a policy into force; nothing is warm yet."""
        options, axes, usual = replace(self._options, policy=policy), self._axes, shapes_of(self._example)
        if self._batches:
            options = replace(options, common=tuple(map(self._batches.bounded, options.common)))
            axes, usual = self._batches.bounded_axes(axes), self._batches.bounded(usual)
        self.policy, self._bounded_axes, self._usual = policy, axes, usual
        options.check_inputs(usual)
        buckets = bucket_shapes(usual, axes, options.bucket_width) if policy == "bucket" else ()
        self.shapes = tuple(dict.fromkeys((usual, *options.common, *buckets)))
        self._warm: set[Shapes] = set()
        self._output_sizes = OutputSizes()
        self._buffers = PaddedBuffers(self._example)
        self._plans: dict[Any, _Plan] = {}

    def _prepare(self, policy: str) -> None:
        """Learn how padded outputs are cropped, warm everything up, and compare with eager.

        Raises:
            ParityError, ShapesRefused: the policy does not go with the model or engine.
        """
        self._choose(policy)
        refused = ""
        if policy != "exact" and not self._bounded_axes:
            refused = "the adapter declares no dynamic_dims"
        elif policy == "dynamic" and not self._dynamic_engine:
            refused = "the engine was made for fixed sizes"
        elif policy == "bucket" and not self._eager:
            refused = "there is no eager model to compare padded results with"
        if refused:
            raise ShapesRefused(refused)
        buckets: list[Shapes] = []
        if policy == "bucket" and self._eager:
            inside = (shapes for shapes in self.shapes if within(shapes, self._bounded_axes, self._usual))
            buckets = [shapes for shapes in inside if self._bucket(shapes) == shapes]
            self._output_sizes = OutputSizes.learn(self._eager, self._example, self._bounded_axes)
            for bucket in _spread(buckets, _COMPARED_FIRST):
                self._compare_padded(self._eager, bucket)
        for shapes in (each for each in self.shapes if each not in buckets):
            try:
                self._warm_up(shapes)
            except Exception as error:  # the user's model runs here, on sizes that it may not take
                if shapes == self._usual:
                    raise
                self.notes.append(f"common_shapes: {format_shapes(shapes)!r} is left to eager: {one_line(error)}")
        for shapes in _dynamic_draws(self._usual, self._bounded_axes) if policy == "dynamic" else ():
            self._warm_up(shapes)
        compared = _spread(buckets, _COMPARED)
        for bucket in buckets:
            self._warm_up(bucket, compare=bucket in compared)
            if bucket in compared:
                self._compare_padded(self._run, bucket)

    def _bucket(self, shapes: Shapes) -> Shapes:
        return bucket_of(shapes, self._bounded_axes, self._options.bucket_width)

    def _warm_up(self, shapes: Shapes, *, compare: bool = True) -> None:
        """Run random inputs of these shapes, and compare with eager."""
        for seed in range(_WARM_UP_RUNS):
            inputs = draw(self._example, shapes, seed)
            found = self._run_held(self._run, shapes, (), *inputs)
        if self._eager and compare:
            check(self._eager(*inputs), found, self._precision)
        self._warm.add(shapes)

    def _compare_padded(self, run: Call, bucket: Shapes) -> None:
        """Run shapes of a bucket, the one that is padded most and one at random, and compare with eager."""
        assert self._eager
        smallest = smallest_in_bucket(bucket, self._bounded_axes, self._options.bucket_width)
        drawn = random.Random(format_shapes(bucket))
        sizes = [drawn.randint(axis.size_in(smallest), axis.size_in(bucket)) for axis in self._bounded_axes]
        for seed, valid in enumerate((smallest, with_sizes(bucket, self._bounded_axes, sizes))):
            inputs = draw(self._example, valid, seed)
            crop = () if valid == bucket else self._output_sizes.crop(valid)
            found = self._run_held(run, bucket, crop, *inputs)
            try:
                check(self._eager(*inputs), found, self._precision)
            except ParityError as error:
                msg = f"padding {format_shapes(valid)} to {format_shapes(bucket)} changes the result: {error}"
                raise ShapesRefused(msg) from error

    def _exact_only(self, options: ShapeOptions, usual: Shapes) -> ShapeOptions:
        """What may be asked of an engine that takes the example's shapes only; notes what may not."""
        asked = []
        if options.policy == "bucket" or (options.policy == "dynamic" and self._axes):
            asked.append(f"shapes {options.policy}")
        if any(each != usual for each in options.common):
            asked.append("common_shapes")
        if options.max_batch and BatchParts(options.max_batch, self._axes, usual).bounded(usual) != usual:
            options = replace(options, max_batch=0)
            asked.append("max_batch below the example's batch")
        if asked:
            self.notes.append(f"{', '.join(asked)}: not used, as its package runs the example's shapes only")
        return replace(options, policy="exact", common=())


class BatchParts:
    """Batches that are too large, in parts: dimension 0 of the inputs that share the batch size, and joined outputs.

    Those inputs are the ones whose dimension 0 the adapter declares as dynamic, with one range; where it declares none,
    those whose example has the size of the first input's. The others go to every part as they are.
    """

    def __init__(self, most: int, axes: Sequence[Axis], example: Shapes) -> None:
        """Find the inputs; a `ConfigError` where `most`, the parameter max_batch, is below the declared range."""
        self._most = most
        self._declared = [axis for axis in axes if axis.places[0][1] == 0]
        first = self._declared[0].places[0][0] if self._declared else 0
        size = example[first][0] if example and example[first] else 0
        places = tuple((index, 0) for index, shape in enumerate(example) if shape and shape[0] == size)
        self._inputs = frozenset(index for index, _ in (self._declared[0].places if self._declared else places))
        self._joins: list[tuple[int, int]] = []  # per output: the dimension, and its size for a batch of one
        if self._declared and self._declared[0].low > most:
            raise ConfigError(
                f"parameter max_batch: {most} is below the smallest batch that the adapter declares,"
                f" {self._declared[0].low}; it has to be 0 or at least that"
            )

    def learn(self, model: Call, example: Inputs, precision: str) -> None:
        """Learn along which dimension outputs are joined, and check that parts together give what the whole gives.

        Raises:
            ShapesRefused, ParityError: an output does not follow the batch; the parts' results are others.
        """
        if len(self._declared) > 1 or not self._inputs:
            names = " and ".join(str(axis) for axis in self._declared) or "no input has a dimension 0"
            raise ShapesRefused(f"there is no one batch size: {names}")
        axis = Axis(1, 3, tuple((index, 0) for index in sorted(self._inputs)))
        self._joins = []
        for number, follows in enumerate(OutputSizes.learn(model, example, [axis]).follows):
            if [rule(1) == rule.multiple for _, rule in follows.values()] != [True]:
                raise ShapesRefused(f"output {number} does not follow the batch along one dimension")
            self._joins += [(dim, rule.multiple) for dim, (_, rule) in follows.items()]
        whole = draw(example, self._with_batch(shapes_of(example), 3), seed=3)
        check(model(*whole), self.run(model, *whole, most=min(self._most, 2)), precision)

    def parts(self, shapes: Shapes) -> list[Shapes]:
        """The shapes of the parts: full ones, then the rest; of a batch that is not too large, it is the one."""
        size, most = self._size(shapes), self._most
        full, rest = divmod(size, most) if size > most else (0, size)
        if not full:
            return [shapes]
        return [self._with_batch(shapes, each) for each in [most] * full + [rest] * (rest > 0)]

    def bounded(self, shapes: Shapes) -> Shapes:
        """The shapes of a full part where the batch is larger, else the same."""
        return self.parts(shapes)[0]

    def bounded_axes(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """The axes with the batch ending at the largest part."""
        return tuple(replace(a, high=min(a.high, self._most)) if a in self._declared else a for a in axes)

    def run(self, model: Call, *inputs: torch.Tensor, most: int = 0) -> Any:  # noqa: ANN401
        """Parts of at most `most`, 0: as usual; each part's outputs are copied out before the next part runs."""
        most, total = most or self._most, self._size(shapes_of(inputs))
        joined: list[torch.Tensor] = []
        outputs = None
        for start in range(0, total, most):
            size = min(most, total - start)
            outputs = model(*(self._part(i, tensor, start, size) for i, tensor in enumerate(inputs)))
            parts = list(tensors_in(outputs))
            for number, (part, (dim, multiple)) in enumerate(zip(parts, self._joins, strict=True)):
                if start == 0:
                    joined.append(part.new_empty((*part.shape[:dim], total * multiple, *part.shape[dim + 1 :])))
                joined[number].narrow(dim, start * multiple, size * multiple).copy_(part)
        wholes = iter(joined)
        return pytree.tree_map_only(torch.Tensor, lambda _: next(wholes), outputs)

    def _part(self, index: int, tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
        if index not in self._inputs:
            return tensor
        part = tensor.narrow(0, start, size)
        return part if part.data_ptr() % _ALIGNMENT == 0 else part.clone()

    def _size(self, shapes: Shapes) -> int:
        """The batch size; 0 where the inputs do not agree on one."""
        sizes = {shapes[index][0] if index < len(shapes) and shapes[index] else 0 for index in self._inputs}
        return sizes.pop() if len(sizes) == 1 else 0

    def _with_batch(self, shapes: Shapes, size: int) -> Shapes:
        return tuple((size, *shape[1:]) if i in self._inputs else shape for i, shape in enumerate(shapes))


class PaddedBuffers:
    """Memory of the buckets' sizes that holds smaller inputs with zeros (False) around them.

    The longest unused buckets are given up where all together are too large.
    """

    def __init__(self, example: Inputs, most_bytes: int = _MOST_BUFFER_BYTES) -> None:
        self._example = example
        self._most_bytes = most_bytes
        self._sets: dict[Shapes, list[torch.Tensor]] = {}
        self._held: dict[Shapes, list[tuple[int, ...]]] = {}  # the size of what was last copied in

    def hold(self, bucket: Shapes, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy inputs, no larger than the bucket in any dimension, into its buffers, which are made at its first use.

        Returns:
            Tensors of the bucket's shapes, the same memory at every frame, valid until the bucket's next use.
        """
        buffers = self._sets.pop(bucket, None) or self._made(bucket)
        self._sets[bucket] = buffers  # the one that was used last stands at the end
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
        """Memory in use."""
        return sum(tensor.nbytes for buffers in self._sets.values() for tensor in buffers)

    def _made(self, bucket: Shapes) -> list[torch.Tensor]:
        buffers = [
            torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=_memory_format(like)).zero_()
            for shape, like in zip(bucket, self._example, strict=True)
        ]
        room = self._most_bytes - sum(tensor.nbytes for tensor in buffers)
        while self._sets and self.size_bytes > room:
            del self._sets[next(iter(self._sets))]
        self._held[bucket] = list(bucket)
        return buffers


def _is_laid_out_like(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether code that was compiled for buffers made here, `like` another tensor, runs this one as it is.

    Compilers guard on type, strides (also of dimensions of size 1) and on being made under inference mode.
    """
    usual = torch.empty(tensor.shape, device="meta", memory_format=_memory_format(like)).stride()
    return tensor.dtype is like.dtype and tensor.stride() == usual and tensor.is_inference()


def _memory_format(like: torch.Tensor) -> torch.memory_format:
    """Channels last where the tensor is laid out so and not in the usual order; contiguous for every other."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(like.dim(), torch.contiguous_format)
    return layout if like.is_contiguous(memory_format=layout) and not like.is_contiguous() else torch.contiguous_format


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _no_eager(*inputs: torch.Tensor) -> Any:  # noqa: ANN401
    raise BadInput(f"inputs of {format_shapes(shapes_of(inputs))}: not prepared, and there is no eager model to answer")


def _dynamic_draws(example: Shapes, axes: Sequence[Axis]) -> list[Shapes]:
    """Shapes that show a compiler that sizes are independent: drawn ones first, then corners.

    Sizes that are equal when it compiles are one to it, and size 1 gets a graph of its own.
    """
    drawn = random.Random(0)
    sizes = [tuple(drawn.randint(axis.low, axis.high) for axis in axes) for _ in range(_DYNAMIC_DRAWS)]
    corners = itertools.product(*(sorted({axis.low, axis.high}) for axis in axes))
    sizes += itertools.islice(corners, _MOST_CORNERS)
    return [with_sizes(example, axes, each) for each in dict.fromkeys(sizes)]


def _spread(shapes: list[Shapes], most: int) -> list[Shapes]:
    """At most so many, evenly from first to last."""
    count = min(most, len(shapes))
    return [shapes[round(i * (len(shapes) - 1) / max(1, count - 1))] for i in range(count)]
