"""A trial: builds a tier's model in one way, compares it with eager fp32, and times both in turns."""

import os
import platform
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from torchperf_ros.core.build_options import PRECISIONS, BuildOptions
from torchperf_ros.core.errors import AdapterError, TorchperfError
from torchperf_ros.core.package_manifest import Identity
from torchperf_ros.core.shape_buckets import axes_of
from torchperf_ros.core.shape_options import ShapeOptions
from torchperf_ros.core.tune_space import Facts
from torchperf_ros.core.tune_trial import HOPELESS, MEASURED, REFUSED, Candidate, Figures
from torchperf_ros.worker.adapter import Adapter, load_adapter
from torchperf_ros.worker.device import Device, choose_device
from torchperf_ros.worker.engine import Call, make_runner, varying_dims
from torchperf_ros.worker.fingerprint import identify
from torchperf_ros.worker.model_transforms import applies, matrix_precision
from torchperf_ros.worker.output_sizes import shapes_of
from torchperf_ros.worker.parity import Parity, ParityError, check_engine, random_inputs
from torchperf_ros.worker.shape_runner import ShapeRunner
from torchperf_ros.worker.stopwatch import Timing, time_interleaved

_LOOK_SECONDS = 0.3
_LOOK_ROUNDS = (5, 30)
_FEWEST_SAMPLES = 30
_MOST_SAMPLES = 2000
_SIZES = 4  # inputs of so many sizes are timed where sizes vary
_BLOCKS = 5
_BYTES_PER_MB = 1e6

Inputs = tuple[torch.Tensor, ...]
Say = Callable[[str], None]


def state_facts(job: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which candidates make sense, see `Facts`, as a dict.

    Raises:
        TorchperfError: the adapter or the device cannot be used.
    """
    subject = _Subject(job, 0)
    identity, keys = subject.identity(), ""
    for tier in job["others"]:  # results of theirs are kept under the same name
        keys += _Subject({**job, "tier": tier}, 0).identity().key
    on = subject.device.device
    left_out = {name: applies(subject.model, BuildOptions(precision=name), on) for name in PRECISIONS}
    layouts = {"channels_last": BuildOptions(channels_last=True), "fold_batch_norm": BuildOptions(fold_batch_norm=True)}
    left_out |= {name: applies(subject.model, options, on) for name, options in layouts.items()}
    axes = axes_of(subject.dims, shapes_of(subject.example))
    where = f"{identity.device} {identity.capability}"
    cores = len(os.sched_getaffinity(0))
    machine = f"{where}, {cores} cores, {platform.machine()}, {platform.node()}, torch {identity.torch}"
    facts = Facts(
        identity=identity.key + keys, cuda=on.type == "cuda", machine=machine, threads=torch.get_num_threads(),
        cores=cores,
        left_out={name: why for name, why in left_out.items() if why},
        ranges=tuple((axis.low, axis.high) for axis in axes if axis.low < axis.high),
    )  # fmt: skip
    return asdict(facts)


def run_trial(job: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Try the job's candidate, see `trial_main`; returns `outcome`, `reason` and `figures` of its `Trial`.

    Raises:
        TorchperfError: the adapter or the device cannot be used.
    """
    candidate = Candidate.from_dict(job["candidate"])
    with torch.inference_mode():
        subject = _Subject(job, job["reference_threads"])
        attempt = _Attempt(subject, candidate, job["reference_threads"])
        try:
            say("compiling" if candidate.options.engine != "eager" else "building")
            attempt.make()
            say("comparing with eager fp32")
            parity = attempt.compare()
            say("measuring")
            return attempt.measure(parity, job["seconds"], job["hopeless_ratio"])
        except ParityError as error:
            return {"outcome": REFUSED, "reason": f"parity: {error}", "figures": None}
        except TorchperfError as error:
            return {"outcome": REFUSED, "reason": str(error), "figures": None}
        except Exception as error:  # the compiler's boundary: what it cannot take is refused, and says why
            return {"outcome": REFUSED, "reason": f"{type(error).__name__}: {error}".splitlines()[0], "figures": None}


class _Subject:
    """The adapter's model on its device, with eager fp32 as the reference."""

    def __init__(self, job: Mapping[str, Any], threads: int) -> None:
        self.device = Device(choose_device(job["device"]), threads)
        made = load_adapter(job["adapter"])
        try:
            adapter: Adapter = made(job["options"], self.device.device)
            with torch.inference_mode(mode=False):  # a model whose weights are inference tensors cannot be exported
                model = adapter.build(job["tier"])
            example = adapter.example_inputs(job["tier"])
            self.dims = adapter.dynamic_dims()
        except TorchperfError:
            raise
        except Exception as error:  # the user's adapter runs here: whatever it raises is why there is no model
            msg = f"adapter {job['adapter']!r}, tier {job['tier']!r}: {type(error).__name__}: {error}"
            raise AdapterError(msg) from error
        if not isinstance(model, torch.nn.Module):
            msg = f"adapter {job['adapter']!r}: build({job['tier']!r}) gave a {type(model).__name__}, not a Module"
            raise AdapterError(msg)
        self.model = model.eval().to(self.device.device)
        self.example: Inputs = tuple(tensor.to(self.device.device) for tensor in example)
        axes_of(self.dims, shapes_of(self.example))
        try:
            with torch.inference_mode():
                self.reference(*self.example)
        except Exception as error:  # likewise
            msg = f"adapter {job['adapter']!r}, tier {job['tier']!r}: the model raises on its own example inputs: "
            raise AdapterError(f"{msg}{type(error).__name__}: {error}") from error

    def identity(self) -> Identity:
        """Of the model as it is."""
        return identify(self.model, BuildOptions(), self.example, self.dims, self.device.device)

    def reference(self, *inputs: torch.Tensor) -> object:
        """Eager, in fp32 proper."""
        with self.precision("fp32"):
            return self.model(*inputs)

    def precision(self, name: str) -> AbstractContextManager[None]:
        """For a call: matrix products in this precision."""
        return matrix_precision(name, self.device.device)


class _Attempt:
    """One candidate on its way to figures."""

    def __init__(self, subject: _Subject, candidate: Candidate, reference_threads: int) -> None:
        self._subject, self._candidate, self._reference_threads = subject, candidate, reference_threads
        self._on = subject.device.device
        self._compile_s = 0.0

    def make(self) -> None:
        """Build and compile it on its own number of threads.

        Raises:
            Exception: whatever the compiler raises.
        """
        options, subject = self._candidate.options, self._subject
        torch.set_num_threads(self._candidate.threads)
        with subject.precision(options.precision):
            runner = make_runner(subject.model, options, subject.example, subject.dims, self._on)
        self._runner, self._compile_s = runner.call, runner.compile_s

    def compare(self) -> Parity:
        """Its outputs against eager's, and whether its shape policy can be used.

        Raises:
            ParityError: they are too far off.
            AdapterError: another policy would be in force.
        """
        options, subject, run = self._candidate.options, self._subject, self._runner
        call = run if self._on.type != "cuda" else self._in_precision(run)
        dims = varying_dims(options, subject.dims)
        parity = check_engine(subject.reference, call, subject.example, dims, options.precision)
        self._call = call
        if options.engine != "eager" or self._candidate.shapes == "bucket":  # as a worker of the node would run it
            policy = self._candidate.shapes if subject.dims else "exact"
            started = time.perf_counter()
            fitted = ShapeRunner(
                call, subject.reference, ShapeOptions(policy, self._candidate.bucket_width), subject.dims,
                subject.example, options.precision, dynamic_engine=options.engine == "eager" or bool(dims),
            )  # fmt: skip
            fitted.warm_up()
            if fitted.policy != policy:
                raise AdapterError("; ".join(fitted.notes))
            self._call = fitted
            if options.engine == "compile":  # a new size compiles a graph
                self._compile_s += time.perf_counter() - started
        return parity

    def _in_precision(self, call: Call) -> Call:
        def on_cuda(*inputs: torch.Tensor) -> object:
            with self._subject.precision(self._candidate.options.precision):
                return call(*inputs)

        return on_cuda

    def measure(self, parity: Parity, seconds: float, hopeless_ratio: float | None) -> dict[str, Any]:
        """A first look, then the measurement; `outcome`, `reason` and `figures`."""
        look = self._time(_LOOK_SECONDS, _LOOK_ROUNDS, 1)
        ratio = min(look[0].times_ms) / min(look[1].times_ms)  # the machine may have stalled the others
        if hopeless_ratio is not None and ratio > hopeless_ratio:
            reason = f"at a first look {ratio:.2g} times eager fp32's time; the limit is {hopeless_ratio:.2g}"
            return {"outcome": HOPELESS, "reason": reason, "figures": self._figures(look, parity)}
        found = self._time(seconds, (_FEWEST_SAMPLES, _MOST_SAMPLES), _BLOCKS)
        return {"outcome": MEASURED, "reason": "", "figures": self._figures(found, parity)}

    def _figures(self, found: tuple[Timing, Timing], parity: Parity) -> dict[str, Any]:
        own, eager = found
        figures = Figures(
            p50_ms=own.median_ms, p95_ms=own.p95_ms, p99_ms=own.calibration.p99_ms, max_ms=own.max_ms,
            eager_p50_ms=eager.median_ms, eager_p99_ms=eager.calibration.p99_ms, samples=len(own.times_ms),
            compile_s=self._compile_s, memory_mb=_peak_memory_bytes(self._on) / _BYTES_PER_MB, **parity.as_dict(),
        )  # fmt: skip
        return asdict(figures)

    def _time(self, seconds: float, rounds: tuple[int, int], blocks: int) -> tuple[Timing, Timing]:
        """The candidate and the reference, each on its threads and on inputs of every size.

        Where the threads differ the two take turns in blocks, as a change of their number takes calls to settle.
        """
        calls = [
            {f"{who} {size}": partial(call, *inputs) for size, inputs in enumerate(self._inputs())}
            for who, call in (("own", self._call), ("eager", self._subject.reference))
        ]
        share = seconds / len(calls[0])
        threads = (self._candidate.threads, self._reference_threads)
        with self._subject.device.on_stream():
            if threads[0] == threads[1]:
                found = time_interleaved({**calls[0], **calls[1]}, self._on, seconds=share, rounds=rounds)
                return _pooled(found, "own"), _pooled(found, "eager")
            times: dict[str, list[float]] = {"own": [], "eager": []}
            per_block = tuple(max(1, count // blocks) for count in rounds)
            for _ in range(blocks):
                for count, candidates, who in zip(threads, calls, times, strict=True):
                    torch.set_num_threads(count)
                    part = time_interleaved(
                        candidates, self._on, seconds=share / blocks, rounds=(per_block[0], per_block[1])
                    )
                    times[who].extend(_pooled(part, who).times_ms)
            torch.set_num_threads(threads[0])
        return Timing(tuple(times["own"])), Timing(tuple(times["eager"]))

    def _inputs(self) -> list[Inputs]:
        """The example's sizes, and some drawn from the ranges."""
        subject = self._subject
        drawn = [random_inputs(subject.example, seed, subject.dims) for seed in range(1, _SIZES)]
        return [random_inputs(subject.example, 0), *(drawn if subject.dims else ())]


def _pooled(found: Mapping[str, Timing], who: str) -> Timing:
    """All samples of one side, whatever their input's size: what a percentile over frames is taken of."""
    own = [timing for name, timing in found.items() if name.startswith(who)]
    return Timing(tuple(time_ms for timing in own for time_ms in timing.times_ms), max(timing.inner for timing in own))


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
