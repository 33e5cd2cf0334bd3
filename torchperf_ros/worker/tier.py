"""A tier at run time: its engine, the eager model that stands in for it, and a record of what happened to both."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from torchperf_ros.core.tier_ladder import Calibration
from torchperf_ros.worker.device import Device
from torchperf_ros.worker.engine import Call, Runner
from torchperf_ros.worker.shape_runner import ShapeRunner

_WARM_UP_RUNS = 3
_CALIBRATION_RUNS = 20
_CALIBRATION_SECONDS = 1.5
_FEWEST_RUNS = 5
_EAGER_RUNS = 3  # the longest counts: it says whether eager may stand in
_DEMOTE_AFTER = 3
_NS_PER_MS = 1e6
_RECOMPILE = "recompile"


@dataclass
class TierFacts:
    """What `/diagnostics` says of a tier's engine.

    Attributes:
        name: the tier.
        engine: what runs it now: eager, compile or aoti.
        why: why that is not the engine that was asked for, "" where it is.
        graphs, breaks, cache_hits, package: see `Runner`.
        recompiles: calls that would have compiled again, answered in eager instead.
        engine_errors: calls in which the engine raised.
        eager_answers: frames that eager answered in place of the engine.
        guards: why the last call would have been compiled again.
        shapes: policy for sizes that is in force.
        hits, misses: frames of a prepared shape, and others, which eager answered.
        chunked: frames whose batch was run in parts.
        waste: share of what the engine ran that was padding, 0 to 1.
        model: hash of weights and code, if it was asked for at the start; "" otherwise.
        load_s: how long it took to make it ready, compiling included.
    """

    name: str
    engine: str
    why: str = ""
    graphs: int = 0
    breaks: int = 0
    cache_hits: int = 0
    package: str = ""
    recompiles: int = 0
    engine_errors: int = 0
    eager_answers: int = 0
    guards: str = ""
    shapes: str = ""
    hits: int = 0
    misses: int = 0
    chunked: int = 0
    waste: float = 0.0
    model: str = ""
    load_s: float = 0.0


class Tier:
    """Runs a model by its engine, and in eager where that fails and the time allows.

    Attributes:
        facts: for `/diagnostics`.
    """

    def __init__(self, facts: TierFacts, runner: Runner, eager: Call | None, device: Device,
                 say: Callable[[str], None], shapes: ShapeRunner | None = None) -> None:  # fmt: skip
        """Take an engine and its stand-in.

        Args:
            facts: what is known of it already.
            runner: the engine, checked.
            eager: the adapter's own model; None where a ready package is all there is.
            device: where it runs.
            say: takes a line for the node's log and `/perf/anomaly`.
            shapes: what fits inputs of other sizes to the engine, warmed up; None: every input goes as it is.
        """
        self.facts = facts
        facts.graphs, facts.breaks, facts.cache_hits = runner.graphs, runner.breaks, runner.cache_hits
        facts.package = runner.package
        self._call: Call = shapes or runner.call
        self._shapes = shapes
        self._eager = eager
        self._device = device
        self._say = say
        self._eager_ms = 0.0
        self._errors_in_a_row = 0

    def report(self) -> dict[str, Any]:
        """The facts as they are now, for JSON."""
        if self._shapes is not None:
            counters = self._shapes.counters
            self.facts.shapes, self.facts.waste = self._shapes.policy, counters.waste
            self.facts.hits, self.facts.misses = counters.hits, counters.misses
            self.facts.chunked = counters.chunked
        return asdict(self.facts)

    def run(self, inputs: tuple[torch.Tensor, ...], leave_ns: int = 0) -> tuple[Any, int]:
        """Outputs and inference time in ns, copies to the device included.

        Args:
            inputs: from the adapter.
            leave_ns: monotonic time by which the answer has to leave; 0: whenever it is ready.
        """
        try:
            timed = self._timed(self._call, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self._call is self._eager or self._eager is None:
                raise
            return self._stand_in(self._eager, error, inputs, leave_ns)
        self._errors_in_a_row = 0
        return timed

    def _timed(self, call: Call, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, int]:
        with self._device.on_stream(), self._device.timed() as took_ns:
            outputs = call(*self._device.to_device(inputs))
        return outputs, took_ns[0]

    def _stand_in(
        self, eager: Call, error: Exception, inputs: tuple[torch.Tensor, ...], leave_ns: int
    ) -> tuple[Any, int]:
        """Count a failure of the engine, and answer in eager if that has the time; else the error is raised again."""
        recompile = isinstance(error, RuntimeError) and _RECOMPILE in str(error)
        if recompile:
            self.facts.recompiles += 1
            self.facts.guards = _guards(str(error))
        else:
            self.facts.engine_errors += 1
        left_ms = (leave_ns - time.monotonic_ns()) / _NS_PER_MS
        timed = None
        if not leave_ns or left_ms > self._eager_ms:
            timed = self._timed(eager, inputs)  # inputs that eager does not take either are not the engine's fault
            self.facts.eager_answers += 1
        if not recompile:
            self._errors_in_a_row += 1
            if self._errors_in_a_row >= _DEMOTE_AFTER:
                self._demote(eager, error)
        if timed is None:
            raise error
        return timed

    def _demote(self, eager: Call, error: Exception) -> None:
        why = f"{self.facts.engine} raised {_DEMOTE_AFTER} times in a row, at last {type(error).__name__}: {error}"
        self.facts.engine, self.facts.why = "eager", why.splitlines()[0]
        self._call = eager
        self._say(f"tier {self.facts.name} runs in eager from now on: {why}")

    def calibrate(self, inputs: tuple[torch.Tensor, ...], *, briefly: bool = False) -> Calibration:
        """Warm up, then measure median and p99 of at most 20 runs or 1.5 s, but at least 5 runs.

        Args:
            inputs: what to run on.
            briefly: only 5 runs, where another worker serves meanwhile and has been calibrated.
        """
        most = _FEWEST_RUNS if briefly else _CALIBRATION_RUNS
        times_ms = self._measure(self._call, inputs, most)
        if self._eager is not None and self._eager is not self._call:
            self._eager_ms = max(self._timed(self._eager, inputs)[1] / _NS_PER_MS for _ in range(_EAGER_RUNS))
        return Calibration(float(np.median(times_ms)), float(np.percentile(times_ms, 99)))

    def _measure(self, call: Call, inputs: tuple[torch.Tensor, ...], most: int) -> list[float]:
        for _ in range(_WARM_UP_RUNS):
            self._timed(call, inputs)
        times_ms: list[float] = []
        stop_at = time.monotonic() + _CALIBRATION_SECONDS
        while len(times_ms) < most and (len(times_ms) < _FEWEST_RUNS or time.monotonic() < stop_at):
            times_ms.append(self._timed(call, inputs)[1] / _NS_PER_MS)
        return times_ms


def _guards(text: str) -> str:
    """The guards that failed, from the compiler's message: its indented lines."""
    lines = [line.strip(" -") for line in text.splitlines() if line.lstrip().startswith("- ")]
    return "; ".join(lines) or text.splitlines()[0]
