"""Inputs of any size on an engine that was made for some: exact, in buckets, or dynamic; large batches in chunks."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from torchperf_ros.core.errors import BadInput
from torchperf_ros.core.shape_buckets import axes_of, elements, waste
from torchperf_ros.core.shape_options import ShapeOptions, Shapes, format_shapes
from torchperf_ros.worker.batch_chunks import BatchChunks
from torchperf_ros.worker.output_sizes import Crop, Model, shapes_of
from torchperf_ros.worker.padded_buffer import is_laid_out_like
from torchperf_ros.worker.parity import DynamicDims
from torchperf_ros.worker.prepared_shapes import PreparedShapes, said

_MOST_PLANS = 4096


@dataclass
class ShapeCounters:
    """What became of the frames since the start.

    Attributes:
        hits: frames that the engine answered.
        misses: frames whose shape was not prepared, answered by eager.
        chunked: frames whose batch was run in parts.
        valid_elements: input elements of the hits.
        run_elements: input elements that the engine ran for them, padding included.
    """

    hits: int = 0
    misses: int = 0
    chunked: int = 0
    valid_elements: int = 0
    run_elements: int = 0

    @property
    def waste(self) -> float:
        """Share of what the engine ran that was padding, 0 to 1."""
        return waste(self.valid_elements, self.run_elements)

    @property
    def hit_ratio(self) -> float:
        """Share of the frames that were hits; 1 where there were none."""
        frames = self.hits + self.misses
        return self.hits / frames if frames else 1.0


@dataclass(frozen=True)
class _Plan:
    """What is done with inputs of one layout.

    Attributes:
        run: engine or eager.
        hit: whether it is the engine.
        held_in: shapes of the buffers that the inputs are copied into; None: they are taken as they come.
        crop: what is kept of the outputs; empty: everything.
        valid_elements, run_elements: of the inputs; 0 for eager.
    """

    run: Model
    hit: bool
    held_in: Shapes | None = None
    crop: Crop = ()
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
        shapes: what is warmed up before the first frame.
    """

    def __init__(
        self,
        run: Model,
        eager: Model | None,
        shapes: ShapeOptions,
        dynamic_dims: DynamicDims,
        example: tuple[torch.Tensor, ...],
        precision: str,
        *,
        dynamic_engine: bool = False,
    ) -> None:
        """Take an engine and what it stands in for.

        Args:
            run: the engine: input tensors to a nest of output tensors.
            eager: the model itself: the reference, and the answer to every miss; None where there is only a package,
                which then is not compared, is not padded, and a miss raises `BadInput`.
            shapes: the stage's options.
            dynamic_dims: the adapter's: input index -> {dimension: (min, max)}.
            example: the adapter's example inputs, on the device that the model runs on.
            precision: the engine's; says how far its results may be from eager's.
            dynamic_engine: whether the engine runs every size in `dynamic_dims` without being compiled again.

        Raises:
            ConfigError: common shapes or max_batch do not fit the inputs, or the buckets are too many.
            AdapterError: `dynamic_dims` do not fit the example.
        """
        self._run, self._eager, self._options, self._precision = run, eager, shapes, precision
        self._example, self._dynamic_engine = example, dynamic_engine
        self._axes = axes_of(dynamic_dims, shapes_of(example))
        self._chunks: BatchChunks | None = None
        if shapes.max_batch:
            self._chunks = BatchChunks(shapes.max_batch, self._axes, shapes_of(example))
        self.notes: list[str] = []
        self.counters = ShapeCounters()
        self._prepared = self._choose(shapes.policy)
        self._plans: dict[Any, _Plan] = {}

    def __call__(self, *inputs: torch.Tensor) -> Any:  # noqa: ANN401
        """Outputs of the inputs, whatever their shape."""
        key = tuple([(t.shape, t.stride(), t.dtype, t.is_inference()) for t in inputs])
        plan = self._plans.get(key) or self._planned(key, inputs)
        counters = self.counters
        if plan.chunked:
            return self._run_chunks(inputs)
        if plan.hit:
            counters.hits += 1
            counters.valid_elements += plan.valid_elements
            counters.run_elements += plan.run_elements
        else:
            counters.misses += 1
        if plan.held_in is None:
            return plan.run(*inputs)
        return self._prepared.run_held(plan.run, plan.held_in, inputs, plan.crop)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every shape to prepare, learn how outputs are cropped and joined, and compare with eager.

        A policy that fails is replaced by dynamic, where the engine is, else by exact; `notes` say so.

        Raises:
            ParityError: not even the example's results are eager's.
        """
        if self._chunks:
            try:
                self._chunks.learn(self._eager or _no_eager, self._example, self._precision)
            except Exception as error:  # the user's model runs here, on sizes that it may not take
                self._chunks = None
                self.notes.append(f"max_batch {self._options.max_batch}: batches are not run in chunks: {said(error)}")
        for policy in {"bucket": ("bucket", "dynamic"), "dynamic": ("dynamic",)}.get(self._options.policy, ()):
            try:
                self._prepare(policy)
            except Exception as error:  # likewise
                self.notes.append(f"shapes: the policy {policy} cannot be used: {said(error)}")
            else:
                return
        self._prepare("exact")

    def _prepare(self, policy: str) -> None:
        self._prepared = self._choose(policy)
        self._plans.clear()
        self._prepared.prepare(self._precision, dynamic_engine=self._dynamic_engine)
        self.notes += self._prepared.notes

    def _choose(self, policy: str) -> PreparedShapes:
        """Take a policy into force; nothing is prepared yet."""
        options, axes, shapes = replace(self._options, policy=policy), self._axes, shapes_of(self._example)
        if self._chunks:
            options = replace(options, common=tuple(map(self._chunks.bounded, options.common)))
            axes, shapes = self._chunks.bounded_axes(axes), self._chunks.bounded(shapes)
        prepared = PreparedShapes(self._run, self._eager, options, axes, self._example, shapes)
        self.policy, self.shapes = policy, prepared.every
        return prepared

    def _planned(self, key: Any, inputs: tuple[torch.Tensor, ...]) -> "_Plan":  # noqa: ANN401
        """What to do with inputs of a layout that was not seen lately."""
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        plan = self._plans[key] = self._plan(inputs)
        return plan

    def _plan(self, inputs: tuple[torch.Tensor, ...]) -> "_Plan":
        shapes = shapes_of(inputs)
        if self._chunks and self._chunks.batch(shapes) > self._chunks.max_batch:
            return _Plan(self._run, hit=True, chunked=True)
        target = self._prepared.target(shapes)
        if target is None or [t.dtype for t in inputs] != [t.dtype for t in self._example]:
            return _Plan(self._eager or _no_eager, hit=False)
        as_it_is = target == shapes and all(map(is_laid_out_like, inputs, self._example))
        crop = self._prepared.crop(shapes, target)
        return _Plan(self._run, True, None if as_it_is else target, crop, elements(shapes), elements(target))

    def _run_chunks(self, inputs: tuple[torch.Tensor, ...]) -> Any:  # noqa: ANN401
        """The parts one after the other; the frame is a hit where all of them are."""
        assert self._chunks
        counters = self.counters
        hits, misses = counters.hits, counters.misses
        outputs = self._chunks.run(self, inputs)
        missed = counters.misses > misses
        counters.hits, counters.misses, counters.chunked = hits + (not missed), misses + missed, counters.chunked + 1
        return outputs


def _no_eager(*inputs: torch.Tensor) -> Any:  # noqa: ANN401
    msg = f"inputs of {format_shapes(shapes_of(inputs))}: not prepared, and there is no eager model to answer"
    raise BadInput(msg)
