"""Frames of several streams in one run: whether a model may take them so, and how long that takes."""

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.errors import ConfigError, one_line
from torchperf_ros.engines.outputs import layout_of, numbers_of, split, tensors_in
from torchperf_ros.engines.parity import LIMITS, Inputs, measure, random_inputs
from torchperf_ros.settings.build_options import Shapes
from torchperf_ros.worker.reports import Reports
from torchperf_ros.worker.tier import RESTS, Tier, holds_finite
from torchperf_ros.workers.calibration import Batching
from torchperf_ros.workers.worker_setup import WorkerSetup

_RUNS: Final = 5
_BRIEF_RUNS: Final = 3


def run_together(tier: Tier, inputs: Sequence[Inputs], leave_ns: int = 0) -> tuple[list[Any], int]:
    """Run inputs that agree in all but dimension 0 at once; the outputs of each, and the time in ns.

    Outputs may be views on memory that the next run writes to. For `leave_ns` see `Tier.run`. Whether all of
    them are finite is found out at once; where they are not, the check of each frame's finds its own.
    """
    started = time.perf_counter_ns()
    # What is not on the device is brought there one by one: concatenated here, it would be copied twice.
    joined = tuple(torch.cat(tier.device.to_device(column)) for column in zip(*inputs, strict=True))
    joined_ns = time.perf_counter_ns() - started
    outputs, ran_ns = tier.run(joined, leave_ns)
    tier.is_finite = tier.is_finite or all(
        holds_finite(part) for tensor in tensors_in(outputs) for part in numbers_of(tensor)
    )
    return split(outputs, [each[0].shape[0] for each in inputs]), joined_ns + ran_ns


def layout_for_batch(inputs: Inputs) -> object:
    """Equal for inputs that can be run together; an object of its own for those that can only run alone."""
    if len({tensor.shape[:1] for tensor in inputs}) != 1 or not inputs[0].dim():
        return object()
    return tuple((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in inputs)


def batch_shapes(adapter: Adapter, example: Inputs, wanted: int) -> tuple[Shapes, ...]:
    """The shapes of 2 to so many examples at once, as far as the adapter's `dynamic_dims` go."""
    most, _ = most_frames(adapter, example, wanted)
    return tuple(
        tuple((frames * tensor.shape[0], *tensor.shape[1:]) for tensor in example)
        for frames in range(2, most + 1)
    )


def most_frames(adapter: Adapter, example: Inputs, wanted: int) -> tuple[int, str]:
    """How many frames, of those wanted, one run can take by what the adapter declares; why not more."""
    if adapter.anytime:
        return 1, "the steps of an anytime model are one frame's"
    if len({tensor.shape[:1] for tensor in example}) != 1 or not example[0].dim():
        return 1, "dimension 0 of the example inputs differs, so it is not that of a batch"
    declared, why = adapter.dynamic_dims(), ""
    for index, tensor in enumerate(example):
        usual = tensor.shape[0]
        # dimensions may be counted from the end, as torch allows
        dims = {dim % tensor.dim(): span for dim, span in declared.get(index, {}).items()}
        _, high = dims.get(0, (usual, usual))
        if high < wanted * usual:
            wanted = high // usual
            why = (
                f"dynamic_dims() lets dimension 0 of input {index} be {high} at most; one frame has {usual}"
            )
    return wanted, why


def find_batching(
    adapter: Adapter,
    tiers: dict[int, Tier],
    setup: WorkerSetup,
    reports: Reports,
    *,
    rests: bool,
) -> Batching:
    """How many frames one run may take, why not more, and how long each tier takes for 1, 2, 4 and so on.

    With `rests`, another process on the same GPU gets a share of it meanwhile. What an earlier worker has
    found is taken over: each size runs once, which loads what it needs. A model that does not do what its
    adapter declares is an alert; one whose adapter declares less than is asked for is a line in the log.

    Raises:
        ConfigError: fewer than the parameter asks for, and it is strict about that.
    """
    known, refusal = setup.batching, ""
    # A later worker finds less only for want of memory, and serves all the same.
    strict = setup.batch_strict and not known
    most = known.most if known else setup.batch
    times_ms = [dict[int, float]() for _ in setup.tiers]
    for number, tier in sorted(tiers.items()):
        name = setup.tiers[number]
        example = adapter.example_inputs(name)
        declared, why = most_frames(adapter, example, most)
        able = declared
        if able > 1 and not known:
            mixes = _why_not_together(tier, example, setup.build[number].precision)
            able, why = (1, mixes) if mixes else (able, why)
        if able > 1:
            able, failed = _measure(tier, example, able, times_ms[number], setup, rests=rests)
            why = failed or why
        if able < most:
            most, refusal = able, f"tier {name} takes {able} at most: {why}"
            if not strict:
                say = reports.alert if able < declared else reports.warn
                say(f"fewer frames of several streams run together than batch allows: {refusal}")
    if known and not refusal:
        return known
    if refusal and strict:
        allowed = f"1 to {most}" if most > 1 else "1"
        raise ConfigError(
            f"parameter {setup.stage}.batch asks for {setup.batch} frames in one run (at most one of each"
            f" stream); it has to be {allowed}, or auto: {refusal}"
        )
    rows = (tuple(each for each in row.items() if each[0] <= most) for row in times_ms)
    return Batching(most, refusal, tuple(rows))


def _measure(
    tier: Tier, example: Inputs, able: int, times_ms: dict[int, float], setup: WorkerSetup, *, rests: bool
) -> tuple[int, str]:
    """Time runs of 1, 2, 4 and so on frames; how many frames that goes up to, and what failed then, or ""."""
    runs = 0 if setup.batching else _BRIEF_RUNS if setup.background else _RUNS
    for size in sizes_up_to(able):
        try:
            times_ms[size] = _median_ms(tier, example, size, runs, rests=rests)
        except Exception as error:  # the user's model and the engine run here
            return max(1, size // 2), f"a run of {size} frames failed: {one_line(error)}"
    return able, ""


def sizes_up_to(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and the most."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def _why_not_together(tier: Tier, example: Inputs, precision: str) -> str:
    """Run two drawn inputs alone and together, and compare; why that is not the same, "" where it is."""
    inputs = [random_inputs(example, seed) for seed in (1, 2)]
    try:
        # the next run may write to their memory
        alone = [copy.deepcopy(tier.run(each)[0]) for each in inputs]
        together, _ = run_together(tier, inputs)
        for expected, found in zip(alone, together, strict=True):
            if (wanted := layout_of(expected)) != (layout := layout_of(found)):
                return f"the outputs of a frame are {wanted} alone, and {layout} in a run of two"
            parity, limit = measure(expected, found), LIMITS[precision]
            if not parity.within(limit):
                return (
                    "the outputs of a frame depend on the others in its run, as of BatchNorm in training mode or"
                    f" a mean over dimension 0: {parity}; allowed for {precision}: {limit}"
                )
    except Exception as error:  # the user's model and the engine run here
        return f"two frames in one run: {one_line(error)}"
    return ""


def _median_ms(tier: Tier, example: Inputs, size: int, runs: int, *, rests: bool) -> float:
    """Of so many runs of this size, after one that is cold."""
    inputs = [random_inputs(example, seed) for seed in range(size)]
    times_ms = [run_together(tier, inputs)[1] / NS_PER_MS]
    for _ in range(runs):
        times_ms.append(run_together(tier, inputs)[1] / NS_PER_MS)
        time.sleep(RESTS * times_ms[-1] / 1e3 if rests else 0.0)
    return float(np.median(times_ms[1:] or times_ms))
