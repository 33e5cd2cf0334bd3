"""Runs one trial: builds a tier's model in one way, compares it with eager fp32, and times both in turns.

A process of its own does that, see `engines/compile_main.py`. Job: `adapter`, `options`, `device`,
`started_ns` (when the process was started, by the monotonic clock); for a trial `tier`, `candidate` (see
`TuneCandidate`), `reference_threads`, `seconds` (of measuring, for each side), `judged` (examples for the
accuracy, 0: none), `eager_accuracy` (null: not known yet) and `frames` (a file of a log's frames, or "");
for the facts `tiers` (none: those that the adapter builds), `log` (or "") and `frames` (where its frames
go).

It sends `step` (text), and at last one of `facts` (facts), `trial` (outcome, reason, figures) or `failed`
(text: the adapter cannot be used at all).
"""

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchperf_ros.api.adapter import Adapter, open_adapter
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import AdapterError, TorchperfError, one_line
from torchperf_ros.api.training_task import Task
from torchperf_ros.engines.built_tier import (
    BuiltTier,
    Call,
    Inputs,
    build_model,
    drawing_task,
    judged,
    read_frames,
    scoring_of,
    varying_dims,
)
from torchperf_ros.engines.device import Device, choose_device
from torchperf_ros.engines.fingerprint import changing_weights, files_hash, identify, tiers_of
from torchperf_ros.engines.kept_state import KeptState
from torchperf_ros.engines.model_transforms import applies, in_precision, matrix_precision
from torchperf_ros.engines.outputs import shapes_of
from torchperf_ros.engines.package import make_runner
from torchperf_ros.engines.package_build import peak_memory_bytes
from torchperf_ros.engines.parity import Parity, ParityError, check_engine, random_inputs
from torchperf_ros.engines.shape_runner import ShapeRunner
from torchperf_ros.engines.stopwatch import Timing, no_garbage_collection, time_interleaved
from torchperf_ros.settings.build_options import INT8_STATIC, PRECISIONS, BuildOptions
from torchperf_ros.settings.shape_options import ShapeOptions, axes_of
from torchperf_ros.tools.log_frames import keep_frames
from torchperf_ros.tools.tune.trial import (
    BUCKET,
    Accuracy,
    Facts,
    TrialFigures,
    TrialOutcome,
    TuneCandidate,
)
from torchperf_ros.workers.control import from_json
from torchperf_ros.workers.package_manifest import file_sha256

_SAMPLES = (30, 2000)  # at least, at most
_SIZES = 4  # inputs of so many sizes are timed where sizes vary
_PARTS = 5  # of a measurement
_BYTES_PER_MB = 1e6

Say = Callable[[str], None]


def do_job(job: Mapping[str, Any], say: Callable[..., None]) -> bool:
    """Find the facts, or run the trial, in a process of its own."""
    if "candidate" in job:
        say("trial", **run_trial(job, lambda text: say("step", text=text)))
    else:
        if job.get("log"):
            say("step", text=f"reading frames of {job['log']}")
            keep_frames(job)
        say("facts", facts=facts_of(job))
    return True


def facts_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """`Facts` of the job's tiers, as a dict.

    What can be tried is that of the first; or a `TorchperfError`.
    """
    device = Device(choose_device(job["device"]), 0).device
    with _named(f"adapter {job['adapter']!r}"):
        names = job["tiers"] or tiers_of(open_adapter(job["adapter"], job["options"], device))
    tier, *others = (load_tier({**job, "tier": name}, 0, twice=True) for name in names)
    task = drawing_task(tier.adapter)
    judging = "" if task is None else files_hash(type(task))
    identities = [identify(one, BuildOptions()) for one in (tier, *others)]
    options = {name: BuildOptions(precision=name) for name in PRECISIONS}
    options |= {
        "channels_last": BuildOptions(channels_last=True),
        "cuda_graphs": BuildOptions(cuda_graphs=True),
    }
    left_out = {name: applies(tier.model, each, device) for name, each in options.items()}
    left_out[INT8_STATIC] = left_out[INT8_STATIC] or tier.why_uncalibrated()
    axes, cores = axes_of(tier.dims, shapes_of(tier.example)), len(os.sched_getaffinity(0))
    facts = Facts(
        identity="".join(
            [*(one.key for one in identities), judging, _frames_hash(job)]
        ),  # results of all tiers are kept under one name
        cuda=device.type == "cuda",
        machine=(
            f"{identities[0].device} {identities[0].capability}, {cores} cores, {platform.machine()},"
            f" {platform.node()}, torch {torch.__version__}"
        ),
        threads=torch.get_num_threads(),
        cores=cores,
        tiers=tuple(names),
        changing=next((one.changing for one in (tier, *others) if one.changing), ""),
        left_out={name: why for name, why in left_out.items() if why},
        ranges=tuple((axis.low, axis.high) for axis in axes if axis.low < axis.high),
        has_task=task is not None,
    )
    return asdict(facts)


def _frames_hash(job: Mapping[str, Any]) -> str:
    return file_sha256(Path(job["frames"])) if job.get("frames") else ""


def run_trial(job: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """`outcome`, `reason` and `figures` of the job's candidate, see `trial.main`; or a `TorchperfError`."""
    candidate = from_json(TuneCandidate, job["candidate"])
    with torch.inference_mode():
        tier = load_tier(job, job["reference_threads"])
        try:
            say("building" if candidate.is_eager else "compiling")
            attempt = Attempt(tier, candidate, job["started_ns"])
            say("comparing with eager fp32")
            attempt.compare()
            say("measuring")
            figures = attempt.measure(job["seconds"])
            if job.get("judged"):
                say("judging")
                figures["accuracy"] = attempt.judge(job["judged"], job["eager_accuracy"])
            return {"outcome": TrialOutcome.MEASURED, "reason": "", "figures": figures}
        except (
            Exception
        ) as error:  # the compiler's boundary: what it cannot take is refused with the reason
            reason = f"parity: {error}" if isinstance(error, ParityError) else one_line(error)
    return {"outcome": TrialOutcome.REFUSED, "reason": reason, "figures": None}


@dataclass(frozen=True)
class TierModel(BuiltTier):
    """A tier's model with eager fp32 as the reference; `changing`: why no package of it could be kept."""

    adapter: Adapter
    reference: Call
    threads: int
    changing: str = ""


def load_tier(job: Mapping[str, Any], threads: int, *, twice: bool = False) -> TierModel:
    """Load the job's `adapter`, build its `tier` on the `device`, and call it once.

    `twice`: see if its weights change.

    Raises:
        TorchperfError: the adapter or the device cannot be used.
    """
    device, name = Device(choose_device(job["device"]), threads).device, job["tier"]
    with _named(f"adapter {job['adapter']!r}, tier {name!r}"):
        adapter = open_adapter(job["adapter"], job["options"], device)
        model, dims = build_model(adapter, name), adapter.dynamic_dims()
        changing = changing_weights(name, model, build_model(adapter, name)) if twice else ""
        model = model.to(device)
        example = tuple(tensor.to(device) for tensor in adapter.example_inputs(name))
        axes_of(dims, shapes_of(example))
    reference = in_precision(model, "fp32", device)
    doing = f"adapter {job['adapter']!r}, tier {name!r}: the model raises on its own example inputs"
    kept = KeptState(model)
    with _named(doing), torch.inference_mode():
        reference(*example)
    kept.restore()
    return TierModel(
        model,
        example,
        dims,
        device,
        adapter,
        reference,
        torch.get_num_threads(),
        changing,
        scoring=scoring_of(adapter, name, device),
        frames=read_frames(job.get("frames", ""), example, device),
    )


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Context in which the user's adapter runs: its error is why there is no model."""
    try:
        yield
    except TorchperfError:
        raise
    except (Exception, SystemExit) as error:
        raise AdapterError(f"{what}: {type(error).__name__}: {error}") from error


class Attempt:
    """One candidate on its way to figures.

    Use it inside of `torch.inference_mode`, which compilers depend on.
    """

    parity: Parity

    def __init__(self, tier: TierModel, candidate: TuneCandidate, started_ns: int) -> None:
        """Build and compile it on its own number of threads, and call it once.

        What the compiler raises passes.
        """
        self._tier, self._candidate = tier, candidate
        torch.set_num_threads(candidate.threads)
        with matrix_precision(candidate.options.precision, tier.device):
            runner = make_runner(tier, candidate.options)
            runner.call(*tier.example)
            if tier.device.type == "cuda":
                torch.cuda.synchronize(tier.device)
        self.cold_start_s = (time.monotonic_ns() - started_ns) / NS_PER_S
        self._call, self.compile_s = runner.call, runner.compile_s

    def compare(self) -> None:
        """Compare its outputs with eager's, and find out whether its shape policy can be used.

        Raises:
            ParityError: they are too far off.
            AdapterError: another policy would be in force.
        """
        options, tier = self._candidate.options, self._tier
        call = in_precision(self._call, options.precision, tier.device)
        dims = varying_dims(options, tier.dims)
        scoring = None if tier.scoring is None else replace(tier.scoring, held_out=tier.held_out())
        if (
            call is tier.model
        ):  # which may keep state between calls, so that it would not be the same as itself
            self.parity = Parity(0.0, 0.0)
        else:
            self.parity = check_engine(
                tier.reference, call, tier.example, dims, options.precision, scoring=scoring
            )
        self._call = call
        if self._candidate.is_eager and self._candidate.shapes != BUCKET:
            return
        policy, started = self._candidate.shapes if tier.dims else "exact", time.perf_counter()
        fitted = ShapeRunner(  # as a worker of the node would run it
            call,
            tier.reference,
            ShapeOptions(policy, self._candidate.bucket_width),
            tier.dims,
            tier.example,
            options.precision,
            self.parity,
            unpad=tier.adapter.unpad,
            dynamic_engine=self._candidate.is_eager or bool(dims),
        )
        fitted.warm_up()
        if fitted.policy != policy:
            raise AdapterError("; ".join(fitted.notes))
        self._call = fitted
        if options.engine == "compile":  # a new size compiles a graph
            self.compile_s += time.perf_counter() - started

    def measure(self, seconds: float) -> dict[str, Any]:
        """`TrialFigures` of the candidate and of eager beside it, as a dict."""
        return self._figures(*self._time(seconds))

    def judge(self, count: int, eager: float | None) -> dict[str, Any] | None:
        """`Accuracy` by so many examples, with eager fp32's where that is not known yet, in the place of frames.

        None where the adapter has no task.
        """
        task: Task | None = drawing_task(self._tier.adapter)
        if task is None:
            return None
        name, value = self._judged(task, self._call, count)
        if eager is None:
            is_reference = self._candidate.options == BuildOptions()
            torch.set_num_threads(self._tier.threads)
            eager = value if is_reference else self._judged(task, self._tier.reference, count)[1]
        higher_is_better = getattr(task, "higher_is_better", True)  # a task need not derive from `Task`
        return asdict(Accuracy(name, value, eager, count, higher_is_better))

    def _judged(self, task: Task, call: Call, count: int) -> tuple[str, float]:
        try:
            return judged(task, call, count, self._tier.device)
        except AdapterError as error:
            raise AdapterError(f"{error}; --judged 0 tunes without accuracy") from error

    def _figures(self, own: Timing, eager: Timing) -> dict[str, Any]:
        parts = [np.array_split(timing.times_ms, _PARTS) for timing in (own, eager)]
        shares = [float(np.median(a) / np.median(b)) for a, b in zip(*parts, strict=True)]
        figures = TrialFigures(
            p50_ms=own.median_ms,
            p95_ms=own.p95_ms,
            p99_ms=own.calibration.p99_ms,
            max_ms=own.max_ms,
            eager_p50_ms=eager.median_ms,
            eager_p99_ms=eager.calibration.p99_ms,
            least_share=min(shares),
            most_share=max(shares),
            samples=len(own.times_ms),
            cold_start_s=self.cold_start_s,
            compile_s=self.compile_s,
            memory_mb=peak_memory_bytes(self._tier.device) / _BYTES_PER_MB,
            relative_l2=self.parity.relative_l2,
            max_error=self.parity.max_error,
            score=self.parity.score,
        )
        return asdict(figures)

    def _time(self, seconds: float) -> tuple[Timing, Timing]:
        """The candidate and the reference, each on its threads and on inputs of every size.

        Where the threads differ the two take turns in blocks, as a change of their number takes calls to
        settle.
        """
        sides = ("own", self._call), ("eager", self._tier.reference)
        calls = [
            {f"{who} {size}": partial(call, *inputs) for size, inputs in enumerate(self._inputs())}
            for who, call in sides
        ]
        share = seconds / len(calls[0])
        threads = (self._candidate.threads, self._tier.threads)
        if threads[0] == threads[1]:
            found = time_interleaved(
                {**calls[0], **calls[1]}, self._tier.device, seconds=share, rounds=_SAMPLES
            )
            return _pooled(found, "own"), _pooled(found, "eager")
        times: dict[str, list[float]] = {"own": [], "eager": []}
        fewest, most = (count // _PARTS for count in _SAMPLES)
        with no_garbage_collection():
            for _ in range(_PARTS):
                for count, candidates, who in zip(threads, calls, times, strict=True):
                    torch.set_num_threads(count)
                    part = time_interleaved(
                        candidates, self._tier.device, seconds=share / _PARTS, rounds=(fewest, most)
                    )
                    times[who].extend(_pooled(part, who).times_ms)
        torch.set_num_threads(threads[0])
        return Timing(tuple(times["own"])), Timing(tuple(times["eager"]))

    def _inputs(self) -> list[Inputs]:
        example, dims = self._tier.example, self._tier.dims
        drawn = [random_inputs(example, seed, dims) for seed in range(1, _SIZES)]
        return [random_inputs(example, 0), *(drawn if dims else ())]


def _pooled(found: Mapping[str, Timing], who: str) -> Timing:
    """All samples of one side, of every input size, round by round.

    What a percentile over frames is of.
    """
    own = [timing for name, timing in found.items() if name.startswith(who)]
    rounds = zip(*(timing.times_ms for timing in own), strict=True)
    return Timing(
        tuple(time_ms for each in rounds for time_ms in each), max(timing.inner for timing in own)
    )
