"""A tier at run time.

The engine's call for a frame's inputs, eager where that fails, and the check of the outputs.
"""

import cmath
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.engines.built_tier import Call, Inputs
from torchperf_ros.engines.device import Device
from torchperf_ros.engines.engine import Runner
from torchperf_ros.engines.outputs import (
    drawn,
    hidden_in,
    holds_lazy,
    leaves_in,
    numbers_of,
    sizes_follow_values,
    tensors_in,
)
from torchperf_ros.engines.shape_runner import ShapeRunner
from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.control import TierFacts

_WARM_UP_RUNS = 3
_CALIBRATION_RUNS = 20
_CALIBRATION_SECONDS = 1.5
_FEWEST_RUNS = 5
_EAGER_RUNS = 3  # the longest counts: it decides whether eager may stand in
_DEMOTE_AFTER = 3
# a GPU shares its time out evenly, without regard to priorities: a quarter is left to this one
RESTS = 3.0
_RECOMPILE = "recompile"
_END: Final = object()
_MOST_SUMS: Final = 32  # of more outputs than this, each is waited for
_PLAIN_NUMBERS: Final = (float, complex, np.inexact)  # of those that may be NaN


class InvalidOutput(TorchperfError):
    """An output has NaN or Inf, or another shape or type than when it was calibrated."""


class OutputCheck:
    """Compares outputs with those of the calibration.

    Number of tensors, ranks, types, and the sizes that are fixed.

    A size may differ where the adapter declares dynamic dimensions, or where it follows from values, as the
    number of boxes does: then only rank and type are compared. Where it follows from values, there may also
    be more or fewer tensors.

    Attributes:
        unchecked: which outputs cannot be looked into, and are published as they come; "" where
            everything can be.
    """

    def __init__(self, example: Any, *, fixed_sizes: bool, of_values: bool = False) -> None:  # noqa: ANN401
        self._fixed_sizes, self._of_values = fixed_sizes and not of_values, of_values
        tensors = list(tensors_in(example))
        # Of usual tensors nothing has to be taken apart, which most models' frames need not pay for. Where an
        # example has no tensors, those of a frame may be of any kind.
        self._is_usual = all(map(_is_dense, tensors)) and not (of_values and not tensors)
        self._expected = self._signature(tensors)
        self.unchecked = hidden_in(example)
        self._has_plain = of_values or any(isinstance(leaf, _PLAIN_NUMBERS) for leaf in leaves_in(example))

    def _signature(self, tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
        return [(t.dtype, t.shape if self._fixed_sizes and not t.is_nested else t.dim()) for t in tensors]

    def check(self, outputs: Any, *, is_finite: bool = False) -> None:  # noqa: ANN401
        """Pass good outputs.

        `is_finite`: every number in their tensors is known to be, see `Tier.is_finite`.

        Raises:
            InvalidOutput: names the wrong output and what is wrong with it.
        """
        tensors = list(tensors_in(outputs))
        found = self._signature(tensors)
        may_differ = self._of_values and len(found) != len(self._expected)
        if found != self._expected and not may_differ:
            what = "types and shapes" if self._fixed_sizes else "types and numbers of dimensions"
            raise InvalidOutput(
                f"outputs have the {what} {_words(found)}; on the example inputs {_words(self._expected)}"
            )
        for number, tensor in enumerate(() if is_finite else tensors):
            for part in (tensor,) if self._is_usual else numbers_of(tensor):
                if not holds_finite(part):
                    bad = int((~torch.isfinite(part)).sum())
                    raise InvalidOutput(
                        f"output {number} has {bad} of {part.numel()} values that are NaN or Inf"
                    )
        if self._has_plain:
            self._check_plain(outputs)

    def _check_plain(self, outputs: Any) -> None:  # noqa: ANN401
        for leaf in leaves_in(outputs):
            if isinstance(leaf, _PLAIN_NUMBERS) and not cmath.isfinite(leaf):
                raise InvalidOutput(f"an output that is a plain number is {leaf}")


def holds_finite(part: torch.Tensor) -> bool:
    """Whether all numbers of a dense tensor are finite.

    A sum is finite only if every element is, and takes one pass without a temporary; one that overflows
    although its elements are finite is sorted out by the exact test.
    """
    return not part.is_floating_point() or math.isfinite(part.sum()) or bool(torch.isfinite(part).all())


def _words(signature: Sequence[tuple[object, ...]]) -> str:
    return (
        ", ".join(
            f"{str(kind).removeprefix('torch.')} {tuple(sizes) if isinstance(sizes, torch.Size) else sizes}"
            for kind, sizes in signature
        )
        or "none"
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values are a row of numbers that arithmetic is defined for."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    is_float8 = tensor.is_floating_point() and tensor.element_size() == 1
    return not (is_float8 or tensor.is_complex() or tensor.is_quantized)


class EarlySums:
    """Sums of a model's outputs that are enqueued right behind it, so that one wait is for both.

    A sum is finite only if every element is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._count = device, -1
        # Frames write to them, in inference mode and, in tools, out of it.
        with torch.inference_mode(mode=False):
            self._sums = torch.zeros(_MOST_SUMS, device=device)
            self._slots = self._sums.unbind()
            # page-locked, so that the copy is enqueued as well
            self._found = torch.zeros(_MOST_SUMS, pin_memory=device.type == "cuda")

    def begin(self, outputs: Any) -> None:  # noqa: ANN401
        """Enqueue the sums of outputs that are usual tensors on this device; others are left to `OutputCheck`.

        Without any, nothing is known.
        """
        tensors, self._count = list(tensors_in(outputs)), -1
        floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
        usual = all(_is_dense(tensor) and tensor.device == self.device for tensor in tensors)
        if not usual or not 0 < len(floating) <= _MOST_SUMS:
            return
        for tensor, slot in zip(floating, self._slots, strict=False):
            torch.sum(tensor, dim=None, dtype=torch.float32, out=slot)
        self._found.copy_(self._sums, non_blocking=True)
        self._count = len(floating)

    def are_finite(self) -> bool:
        """Whether every number is known to be finite; asked once the stream has come that far."""
        return self._count >= 0 and all(map(math.isfinite, self._found.tolist()[: self._count]))


class Tier:
    """Runs a model by its engine, and in eager where that fails and the time allows.

    Attributes:
        facts: for `/diagnostics`.
        call_for: gives what runs inputs of these shapes.
        device: that it runs on.
        is_finite: whether every number in the tensors of the last run's outputs is known to be finite. On the
            CPU it is not after a run of one frame: the check of the frame's outputs finds out.
        waited_ns: on CUDA, how long the last run took beyond the model's time: sums of outputs, and waking up.
    """

    def __init__(
        self,
        facts: TierFacts,
        runner: Runner,
        eager: Call | None,
        device: Device,
        say: Callable[[str], None],
        shapes: ShapeRunner | None = None,
        *,
        steps: Callable[[Inputs], Iterator[Any]] | None = None,
    ) -> None:
        """Take an engine, checked, and its stand-in, the adapter's own model.

        None where a package is all there is.

        `say` takes a line for the node's log and `/perf/anomaly`. `shapes`, warmed up, runs inputs of other
        sizes; where it is None the engine takes every input. `steps` gives an anytime model's outputs, from
        coarse to fine.
        """
        self.facts = facts
        facts.graphs, facts.breaks, facts.cache_hits = runner.graphs, runner.breaks, runner.cache_hits
        facts.package = runner.package.key if runner.package else ""
        self.call_for: Callable[[Inputs], Call] = shapes.call_for if shapes else lambda _: runner.call
        self._shapes, self._eager, self._is_eager = shapes, eager, shapes is None and runner.call is eager
        self.device, self._say, self._steps = device, say, steps
        self._eager_ms, self._errors_in_a_row = 0.0, 0
        self.is_finite, self.waited_ns = False, 0
        self._sums = EarlySums(device.device) if device.is_cuda else None
        # Whether outputs hold generators, which run when their numbers are asked for.
        self._is_lazy = False

    def sizes_follow_values(self, inputs: Inputs) -> bool:
        """See `outputs.sizes_follow_values`, of the adapter's own model."""
        if self._eager is None:
            return False
        return sizes_follow_values(partial(self._eager, *self.device.to_device(inputs)))

    def report(self) -> TierFacts:
        if (of := self._shapes) is None:
            return self.facts
        return replace(self.facts, shapes=of.policy, hits=of.hits, misses=of.misses, waste=of.waste)

    def run(self, inputs: Inputs, leave_ns: int = 0) -> tuple[Any, int]:
        """Outputs and inference time in ns, copies to the device included.

        `leave_ns` is the monotonic time by which the answer has to leave; 0: whenever it is ready.
        """
        try:
            timed = self._timed(inputs)
        except Exception as error:
            self._tell_out_of_memory(error)
            if self._is_eager or self._eager is None:
                raise
            return self._stand_in(self._eager, error, inputs, leave_ns)
        self._errors_in_a_row = 0
        return timed

    @property
    def is_anytime(self) -> bool:
        return self._steps is not None

    def steps(self, inputs: Inputs) -> Iterator[tuple[Any, int]]:
        """Outputs of an anytime model, from coarse to fine, and the inference time in ns up to each."""
        inputs, total_ns = self.device.to_device(inputs), 0
        found = None if self._steps is None else self._steps(inputs)
        while found is not None:
            try:
                outputs, took_ns = self._timed((), partial(next, found, _END))
            except Exception as error:
                self._tell_out_of_memory(error)
                raise
            if outputs is _END:
                return
            total_ns += took_ns
            yield outputs, total_ns

    def _tell_out_of_memory(self, error: Exception) -> None:
        """Raise what says so, if it was memory that did not suffice."""
        if self.device.is_out_of_memory(error):
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            raise torch.OutOfMemoryError(str(error)) from error

    def _timed(self, inputs: Inputs, call: Call | None = None) -> tuple[Any, int]:
        """Run a call, by default the one for inputs of these shapes.

        The engine's own, for the usual ones.
        """
        with self.device.timed as timed:
            inputs = self.device.to_device(inputs)
            outputs = (call or self.call_for(inputs))(*inputs)
            if self._is_lazy:
                outputs = drawn(outputs)
            if self._sums:
                timed.stop()
                self._sums.begin(outputs)
        self.is_finite, self.waited_ns = bool(self._sums and self._sums.are_finite()), timed.waited_ns
        return outputs, timed.took_ns

    def _stand_in(self, eager: Call, error: Exception, inputs: Inputs, leave_ns: int) -> tuple[Any, int]:
        """Count a failure of the engine, and answer in eager if that has the time.

        Else the error is raised again.
        """
        recompile = isinstance(error, RuntimeError) and _RECOMPILE in str(error)
        if recompile:
            self.facts.recompiles += 1
            self.facts.guards = _guards(str(error))
        else:
            self.facts.engine_errors += 1
        left_ms = (leave_ns - time.monotonic_ns()) / NS_PER_MS
        timed = None
        if not leave_ns or left_ms > self._eager_ms:
            # Inputs that eager does not take either are not the engine's fault: it raises here.
            timed = self._timed(inputs, eager)
            self.facts.eager_answers += 1
        self._errors_in_a_row += not recompile
        if not recompile and self._errors_in_a_row >= _DEMOTE_AFTER:
            self._demote(eager, error)
        if timed is None:
            raise error
        return timed

    def _demote(self, eager: Call, error: Exception) -> None:
        why = (
            f"{self.facts.engine} raised {_DEMOTE_AFTER} times in a row, at last {type(error).__name__}:"
            f" {error}"
        )
        self.facts.engine, self.facts.why = "eager", why.splitlines()[0]
        self.call_for, self._is_eager = lambda _: eager, True
        self._say(f"tier {self.facts.name} runs in eager from now on: {why}")

    def calibrate(
        self, inputs: Inputs, *, briefly: bool = False, known: Calibration | None = None
    ) -> Calibration:
        """Warm up, then measure median and p99 of at most 20 runs or 1.5 s, but at least 5 runs.

        Only 5 runs `briefly`, where another worker serves meanwhile; none where a worker of the same kind
        has measured before, and the calibration is `known`.
        """
        for _ in range(_WARM_UP_RUNS):
            self._is_lazy |= holds_lazy(self._timed(inputs)[0])
        most = _FEWEST_RUNS if briefly else _CALIBRATION_RUNS
        # so many times a run's time passes after it
        rest = RESTS if briefly and self.device.is_cuda else 0.0
        times_ms: list[float] = []
        stop_at = time.monotonic() + _CALIBRATION_SECONDS
        while (
            not known
            and len(times_ms) < most
            and (len(times_ms) < _FEWEST_RUNS or time.monotonic() < stop_at)
        ):
            times_ms.append(self._timed(inputs)[1] / NS_PER_MS)
            time.sleep(rest * times_ms[-1] / 1e3)
        if self._eager is not None and not self._is_eager:
            self._eager_ms = max(
                self._timed(inputs, self._eager)[1] / NS_PER_MS for _ in range(_EAGER_RUNS)
            )
        return known or Calibration(float(np.median(times_ms)), float(np.percentile(times_ms, 99)))


def _guards(text: str) -> str:
    """The guards that failed, from the compiler's message: its indented lines."""
    lines = [line.strip(" -") for line in text.splitlines() if line.lstrip().startswith("- ")]
    return "; ".join(lines) or text.splitlines()[0]
