"""Frames of several streams in one run: whether a model may take them so, and how long that takes."""

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.errors import ConfigError, TorchperfError, one_line
from torchperf_ros.engines.built_tier import Inputs
from torchperf_ros.engines.outputs import layout_of, split
from torchperf_ros.engines.package_engine import from_front
from torchperf_ros.engines.parity import LIMITS, measure, random_inputs
from torchperf_ros.settings.shape_options import Shapes
from torchperf_ros.worker.tier import Tier
from torchperf_ros.workers.calibration import Batching
from torchperf_ros.workers.worker_setup import WorkerSetup

_RUNS: Final = 5
_BRIEF_RUNS: Final = 3
# a GPU shares its time out evenly, without regard to priorities: a quarter is left to this one
_RESTS: Final = 3.0


class BatchRefused(TorchperfError):
    """A model may not take frames of several streams in one run; the message says why."""


def run_together(tier: Tier, inputs: Sequence[Inputs], leave_ns: int = 0) -> tuple[list[Any], int]:
    """Run inputs that agree in all but dimension 0 at once; the outputs of each, and the time in ns.

    Outputs may be views on memory that the next run writes to. For `leave_ns` see `Tier.run`.
    """
    started = time.perf_counter_ns()
    joined = tuple(torch.cat(column) for column in zip(*inputs, strict=True))
    joined_ns = time.perf_counter_ns() - started
    outputs, ran_ns = tier.run(joined, leave_ns)
    return split(outputs, [each[0].shape[0] for each in inputs]), joined_ns + ran_ns


def layout_for_batch(inputs: Inputs) -> object:
    """Equal for inputs that can be run together; an object of its own for those that can only run alone."""
    if len({tensor.shape[:1] for tensor in inputs}) != 1 or not inputs[0].dim():
        return object()
    return tuple((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in inputs)


def batch_shapes(adapter: Adapter, example: Inputs, wanted: int) -> tuple[Shapes, ...]:
    """The shapes of 2 to so many examples at once, as far as the adapter's `dynamic_dims` go; none where not."""
    try:
        most = most_frames(adapter, example, wanted)
    except BatchRefused:
        return ()
    return tuple(
        tuple((frames * tensor.shape[0], *tensor.shape[1:]) for tensor in example)
        for frames in range(2, most + 1)
    )


def most_frames(adapter: Adapter, example: Inputs, wanted: int) -> int:
    """How many frames one run can take by the adapter's `dynamic_dims`, at most those that are wanted.

    Raises:
        BatchRefused: not two.
    """
    if adapter.anytime:
        raise BatchRefused("the steps of an anytime model are one frame's")
    if len({tensor.shape[:1] for tensor in example}) != 1 or not example[0].dim():
        raise BatchRefused("dimension 0 of the example inputs differs, so it is not that of a batch")
    dims = from_front(adapter.dynamic_dims(), example)
    for index, tensor in enumerate(example):
        _, high = dims.get(index, {}).get(0, (1, tensor.shape[0]))
        wanted = min(wanted, high // tensor.shape[0])
        if wanted < 2:  # noqa: PLR2004 - what a batch has at least
            raise BatchRefused(
                f"dynamic_dims() has to let dimension 0 of every input vary, from {tensor.shape[0]} to"
                f" {2 * tensor.shape[0]} and more; of input {index} it may be {high} at most"
            )
    return wanted


def find_batching(adapter: Adapter, tiers: dict[int, Tier], setup: WorkerSetup, *, rests: bool) -> Batching:
    """How many frames one run may take, why not more, and how long each tier takes for 1, 2, 4 and so on.

    With `rests`, another process on the same GPU gets a share of it meanwhile. What an earlier worker has
    found is taken over: each size runs once, which loads what it needs.

    Raises:
        ConfigError: fewer than the parameter asks for, and it is strict about that.
    """
    known, most, refusal = setup.batching, setup.batch, ""
    runs = 0 if known else _BRIEF_RUNS if setup.background else _RUNS
    times_ms: dict[int, dict[int, float]] = {}
    for number, tier in sorted(tiers.items()):
        name = setup.tiers[number]
        example = adapter.example_inputs(name)
        try:
            able = most_frames(adapter, example, setup.batch)
            if not known:
                _check_together(tier, example, setup.build[number].precision)
        except BatchRefused as error:
            return Batching(1, f"tier {name}: {error}")
        why = f"dimension 0 of its inputs may be {able} times the example's at most by dynamic_dims()"
        times_ms[number] = {}
        for size in sizes_up_to(able):
            try:
                times_ms[number][size] = _median_ms(tier, example, size, runs, rests=rests)
            except Exception as error:  # the user's model and the engine run here
                able, why = size // 2, f"a run of {size} failed: {one_line(error)}"
                break
        if able < most:
            most, refusal = able, f"tier {name} takes {able} at most: {why}"
    if refusal:
        refusal = f"parameter {setup.stage}.batch is {setup.batch}: {refusal}"
        if setup.batch_strict:
            raise ConfigError(f"{refusal}; it has to be 1 to {most}, or auto")
    if known:
        return known
    rows = [times_ms.get(number, {}) for number in range(len(setup.tiers))]
    return Batching(
        most, refusal, tuple(tuple((size, ms) for size, ms in row.items() if size <= most) for row in rows)
    )


def sizes_up_to(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and the most."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def _drawn(example: Inputs, count: int) -> list[Inputs]:
    return [random_inputs(example, seed) for seed in range(1, count + 1)]


def _check_together(tier: Tier, example: Inputs, precision: str) -> None:
    """Run two drawn inputs alone and together, and compare.

    Raises:
        BatchRefused: the outputs of one depend on the other, or cannot be divided.
    """
    inputs = _drawn(example, 2)
    try:
        # the next run may write to their memory
        alone = [copy.deepcopy(tier.run(each)[0]) for each in inputs]
        together, _ = run_together(tier, inputs)
        for expected, found in zip(alone, together, strict=True):
            if layout_of(expected) != (layout := layout_of(found)):
                raise BatchRefused(
                    f"of a frame alone the outputs are {layout_of(expected)}, in two {layout}"
                )
            parity, limit = measure(expected, found), LIMITS[precision]
            if not parity.within(limit):
                raise BatchRefused(
                    f"the outputs of a frame depend on the others in its run, as of BatchNorm in training mode or"
                    f" a mean over dimension 0: {parity}; allowed for {precision}: {limit}"
                )
    except BatchRefused:
        raise
    except Exception as error:  # the user's model and the engine run here
        raise BatchRefused(f"two frames in one run: {one_line(error)}") from error


def _median_ms(tier: Tier, example: Inputs, size: int, runs: int, *, rests: bool) -> float:
    """Of so many runs of this size, after one that is cold."""
    inputs = _drawn(example, size)
    times_ms = [run_together(tier, inputs)[1] / NS_PER_MS]
    for _ in range(runs):
        times_ms.append(run_together(tier, inputs)[1] / NS_PER_MS)
        time.sleep(_RESTS * times_ms[-1] / 1e3 if rests else 0.0)
    return float(np.median(times_ms[1:] or times_ms))
