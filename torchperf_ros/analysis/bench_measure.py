"""Measures one case of `torchperf bench model`, in a process that does nothing else."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.analysis.bench_case import Case, Figures
from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.engine_choice import EAGER
from torchperf_ros.core.errors import AdapterError, TorchperfError
from torchperf_ros.worker.adapter import Adapter, load_adapter
from torchperf_ros.worker.device import Device, choose_device
from torchperf_ros.worker.engine import make_runner
from torchperf_ros.worker.parity import check_engine, random_inputs
from torchperf_ros.worker.stopwatch import Timing, time_interleaved, time_once

_WARM_UP_CALLS = 30
_WARM_UP_SECONDS = 5.0
_FEWEST_WARM_UP_CALLS = 3
_REFERENCE = "reference"
_MIB = 1 << 20
_KIB_PER_MIB = 1024

Inputs = tuple[torch.Tensor, ...]


class CaseFailed(TorchperfError):
    """This case cannot be measured; another batch size or engine may well be."""


def measure_case(job: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Build, call, warm up, compare, and time in turns with eager; returns `Figures` as a dict.

    Args:
        job: `adapter`, `options`, `device`, `tier`, `batch`, `engine`, `seconds`, and `started_ns`, when the process
            was started by the monotonic clock.
        say: told what happens next.

    Raises:
        CaseFailed: this case cannot be measured.
        TorchperfError: the adapter or the device cannot be used at all.
    """
    case = Case(job["tier"], job["batch"], job["engine"])
    device = Device(choose_device(job["device"]), threads=0)
    on = device.device
    with torch.inference_mode():
        say("loading")
        model, usual, dims = _load(job, case.tier, on)
        example = _at_batch(usual, case.batch, dims)
        say("compiling" if case.engine != EAGER else "the first call")
        try:
            runner = make_runner(model, BuildOptions(engine=case.engine), example, dims, on)
            runner.call(*example)
        except TorchperfError:
            raise
        except Exception as error:  # the compiler's, or the model's with this batch: another case may do
            msg = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CaseFailed(msg) from error
        cold_start_s = (time.monotonic_ns() - job["started_ns"]) / NS_PER_S
        say("warming up")
        warm_up_ms = _warm_up(runner.call, example, on)
        peak_mib = _peak_mib(on)
        say("comparing with eager")
        try:
            parity = check_engine(model, runner.call, example, {}, "fp32")
        except TorchperfError as error:
            msg = f"parity: {error}"
            raise CaseFailed(msg) from error
        say("timing")
        timing, eager, reference = _timings(case.engine, model, runner.call, example, usual, on, job["seconds"])
    return asdict(
        Figures(
            cold_start_s=cold_start_s, compile_s=runner.compile_s, cache_hits=runner.cache_hits,
            warm_up_ms=warm_up_ms, p50_ms=timing.median_ms, p95_ms=timing.p95_ms, p99_ms=timing.p99_ms,
            max_ms=timing.max_ms, samples=len(timing.times_ms), usual_p99_ms=timing.calibration.p99_ms,
            eager_p50_ms=eager.median_ms, eager_usual_p99_ms=eager.calibration.p99_ms,
            reference_p50_ms=reference.median_ms, reference_batch=usual[0].shape[0],
            items_per_s=case.batch * len(timing.times_ms) / sum(timing.times_ms) * 1e3, peak_mib=peak_mib,
            relative_l2=parity.relative_l2, cosine=parity.cosine, max_error=parity.max_error,
            threads=torch.get_num_threads(),
        )
    )  # fmt: skip


def _load(
    job: Mapping[str, Any], tier: str, device: torch.device
) -> tuple[torch.nn.Module, Inputs, dict[int, dict[int, tuple[int, int]]]]:
    made = load_adapter(job["adapter"])
    try:
        adapter: Adapter = made(job["options"], device)
        with torch.inference_mode(mode=False):  # a model whose weights are inference tensors cannot be exported
            model = adapter.build(tier)
        example, dims = adapter.example_inputs(tier), adapter.dynamic_dims()
    except TorchperfError:
        raise
    except Exception as error:  # the user's adapter runs here: whatever it raises is why there is no model
        msg = f"adapter {job['adapter']!r}, tier {tier!r}: {type(error).__name__}: {error}"
        raise AdapterError(msg) from error
    if not isinstance(model, torch.nn.Module):
        msg = f"adapter {job['adapter']!r}: build({tier!r}) gave a {type(model).__name__}, not a torch.nn.Module"
        raise AdapterError(msg)
    return model.eval().to(device), tuple(tensor.to(device) for tensor in example), dims


def _at_batch(example: Inputs, batch: int, dims: Mapping[int, Mapping[int, tuple[int, int]]]) -> Inputs:
    """The example at this batch size: inputs whose first dimension is the first input's get it, values drawn anew."""
    usual = example[0].shape[0] if example and example[0].dim() else None
    if usual is None:
        msg = "the first input has no dimension that could be a batch"
        raise CaseFailed(msg)
    batched = {index for index, tensor in enumerate(example) if tensor.dim() and tensor.shape[0] == usual}
    for index in sorted(batched):
        low, high = dims.get(index, {}).get(0, (batch, batch))
        if not low <= batch <= high:
            msg = f"batch {batch} is outside {low}..{high}, which the adapter's dynamic_dims allow for input {index}"
            raise CaseFailed(msg)
    if batch == usual:
        return example
    return random_inputs(example, 0, {index: {0: (batch, batch)} for index in batched})


def _timings(
    engine: str, model: torch.nn.Module, call: Callable[..., Any], example: Inputs, usual: Inputs, device: torch.device,
    seconds: float,
) -> tuple[Timing, Timing, Timing]:  # fmt: skip
    """The engine's samples, eager's, and eager's with the usual inputs, taken in turns; once where two are the same."""
    candidates = {engine: lambda: call(*example), EAGER: lambda: model(*example)}
    if usual is not example:
        candidates[_REFERENCE] = lambda: model(*usual)
    found = time_interleaved(candidates, device, seconds=seconds)
    return found[engine], found[EAGER], found.get(_REFERENCE, found[EAGER])


def _warm_up(call: Callable[..., Any], example: Inputs, device: torch.device) -> tuple[float, ...]:
    times_ms: list[float] = []
    stop_at = time.monotonic() + _WARM_UP_SECONDS
    while len(times_ms) < _WARM_UP_CALLS and (len(times_ms) < _FEWEST_WARM_UP_CALLS or time.monotonic() < stop_at):
        times_ms.append(time_once(lambda: call(*example), device))
    return tuple(times_ms)


def _peak_mib(device: torch.device) -> float:
    """Of this process so far; not `ru_maxrss`, which counts the parent's memory from before the program was loaded."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _MIB
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / _KIB_PER_MIB
