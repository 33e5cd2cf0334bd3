"""Runs trials: builds a tier's model in one way, compares it with eager fp32, and times both in turns.

A process does that which answers one job after the other, see `engines/compile_main.py`. It starts with `adapter`,
`options`, `device`, `frames` (a file of a log's frames, or ""), `started_ns` (when it was started, by the monotonic
clock) and, where it gets ready before its first job, `tier`. Each job is a line of JSON on stdin. For a trial it has
`tier`, `candidate` (see `TuneCandidate`), `start_s` (see `Facts`), `look_s` and `seconds` (of measuring, for each
side: of the first look, and where that is near enough), `to_beat` (`TrialFigures.shares` of the best so far; none:
every one is near enough), `judged` (examples for the accuracy, 0: none) and `eager_accuracy` (null: not known yet).
For the facts it has `tiers` (none: those that the adapter builds) and `log` (or ""). To compare weights it
has `built_again`, the tiers that are built once more.

It sends `step` (text), and for each job one of `facts` (facts), `changing` (text: why no package can be kept,
or "") or `trial` (outcome, reason, figures), with `goes_on`: whether this process takes another. `failed`
(text) is its last: the adapter cannot be used at all.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchperf_ros.api.adapter import Adapter, Task, open_adapter
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import AdapterError, TorchperfError, one_line
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
from torchperf_ros.engines.device import (
    Device,
    Timing,
    choose_device,
    no_garbage_collection,
    time_interleaved,
)
from torchperf_ros.engines.fingerprint import changing_weights, files_hash, identify, tiers_of
from torchperf_ros.engines.model_transforms import applies
from torchperf_ros.engines.outputs import described, drawn, shapes_of, tensors_in
from torchperf_ros.engines.package import ENGINES, IN_PROCESS, make_runner
from torchperf_ros.engines.package_build import peak_memory_bytes
from torchperf_ros.engines.parity import KeptState, Parity, ParityError, check_engine, random_inputs
from torchperf_ros.engines.shape_runner import ShapeRunner
from torchperf_ros.settings.build_options import (
    INT8_STATIC,
    PRECISIONS,
    BuildOptions,
    ShapeOptions,
    axes_of,
)
from torchperf_ros.tools.tune.trial import (
    BUCKET,
    EAGER,
    MEASURING,
    Accuracy,
    Facts,
    TrialFigures,
    TrialOutcome,
    TuneCandidate,
)
from torchperf_ros.workers.control import from_json
from torchperf_ros.workers.package_cache import open_cache
from torchperf_ros.workers.package_manifest import file_sha256

_LOOKED = (5, 2000)  # samples at least, at most: of a first look
# At length: for each second of it, and in all. A model that takes long must not take a candidate's share of
# the search several times over.
_SAMPLES_PER_S, _FEWEST_SAMPLES, _MOST_FEWEST = 10, 10, 30
_SIZES = 4  # inputs of so many sizes are timed where sizes vary
_PARTS = 5  # of a measurement
_BYTES_PER_MB = 1e6

# What takes seconds to import and every compiled candidate on CUDA needs.
_COMPILER = "torch._inductor.compile_fx"

Say = Callable[[str], None]


def do_job(job: Mapping[str, Any], say: Callable[..., None]) -> bool:
    """Answer jobs until there are no more, or one has left this process unfit for the next."""
    # An adapter that reads its standard input must not take a job away.
    jobs, sys.stdin = sys.stdin, io.StringIO()
    with torch.inference_mode():
        bench = TrialBench(job)
        for line in jobs:
            answer = bench.answer(json.loads(line), lambda text: say("step", text=text))
            say(**answer)
            if not answer["goes_on"]:
                return False
    return True


class TrialBench:
    """A process that tries: it keeps the tier's model from one job to the next.

    Use it inside of `torch.inference_mode`, which compilers depend on.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job, self._name = job, ""
        self._tier: TierModel | None = None
        self._device = Device(choose_device(job["device"]), 0).device
        self._threads = torch.get_num_threads()
        self._opened_s = (time.monotonic_ns() - job["started_ns"]) / NS_PER_S
        if job.get("tier"):
            if self._device.type == "cuda":
                importlib.import_module(_COMPILER)
            self.tier(job["tier"])

    def answer(self, job: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Find the facts, or run the trial; or a `TorchperfError`, after which this must not be used."""
        if "candidate" in job:
            return self._trial(job, say)
        if "built_again" in job:
            found = map(self._changing, job["built_again"])
            return {"kind": "changing", "text": next(filter(None, found), ""), "goes_on": True}
        if job["log"]:
            # It imports the readers of logs, which no other trial needs.
            from torchperf_ros.tools.check import keep_frames

            say(f"reading frames of {job['log']}")
            keep_frames({**self._job, **job})
        return {"kind": "facts", "facts": self._facts(job["tiers"]), "goes_on": True}

    def tier(self, name: str) -> "TierModel":
        if self._tier is None or self._name != name:
            self._tier = None
            self._tier, self._name = load_tier({**self._job, "tier": name}, self._threads), name
        return self._tier

    def _trial(self, job: Mapping[str, Any], say: Say) -> dict[str, Any]:
        candidate, tier = from_json(TuneCandidate, job["candidate"]), self.tier(job["tier"])
        _forget(tier.device)
        figures, reason, goes_on = None, "", True
        try:
            say("building" if candidate.in_process else "compiling")
            began_ns = time.monotonic_ns() - round(job["start_s"] * NS_PER_S)
            attempt = Attempt(tier, candidate, began_ns)
            say("comparing with eager fp32")
            attempt.compare(is_judged=bool(job["judged"]))
            say(MEASURING)
            found = attempt.look(job["look_s"], job["seconds"], job["to_beat"])
            if job["judged"] and found.is_near(job["to_beat"]):
                say("judging")
                found = replace(found, accuracy=attempt.judge(job["judged"], job["eager_accuracy"]))
            figures = asdict(found)
        except ParityError as error:
            reason = f"parity: {error}"
        # The compiler's boundary: what it cannot take is refused with the reason. What is left of the attempt here,
        # a capture that never ends among it, must not be in the way of the next.
        except Exception as error:
            open_cache("", 0).check_room(error)
            reason, goes_on = one_line(error), False
        outcome = TrialOutcome.REFUSED if figures is None else TrialOutcome.MEASURED
        return {
            "kind": "trial",
            "outcome": outcome,
            "reason": reason,
            "figures": figures,
            "goes_on": goes_on,
        }

    def _facts(self, tiers: Sequence[str]) -> dict[str, Any]:
        """`Facts` of these tiers, as a dict.

        What can be tried is that of the first; or a `TorchperfError`.
        """
        name, device = self._job["adapter"], self._device
        with _named(f"adapter {name!r}"):
            names = tiers or tiers_of(open_adapter(name, self._job["options"], device))
        began_s = time.monotonic()
        tier = self.tier(names[0])
        start_s = self._opened_s + time.monotonic() - began_s
        models = [tier, *(load_tier({**self._job, "tier": name}, self._threads) for name in names[1:])]
        task = drawing_task(tier.adapter)
        judging = "" if task is None else files_hash(type(task))
        identities = [identify(one, BuildOptions()) for one in models]
        options = {name: BuildOptions(precision=name) for name in PRECISIONS}
        options["channels_last"] = BuildOptions(channels_last=True)
        left_out = {
            name: engine.why_not(BuildOptions(name), {}, device)
            for name, engine in {**IN_PROCESS, **ENGINES}.items()
        }
        left_out |= {name: applies(tier.model, each, device) for name, each in options.items()}
        left_out[INT8_STATIC] = left_out[INT8_STATIC] or tier.why_uncalibrated()
        axes, cores = axes_of(tier.dims, shapes_of(tier.example)), len(os.sched_getaffinity(0))
        frames = self._job.get("frames")
        facts = Facts(
            # Results of all tiers are kept under one name. What other rules have let pass says nothing.
            identity="".join(
                [
                    file_sha256(Path(sys.modules[check_engine.__module__].__file__ or "")),
                    *(one.key for one in identities),
                    judging,
                    file_sha256(Path(frames)) if frames else "",
                ]
            ),
            cuda=device.type == "cuda",
            machine=(
                f"{identities[0].device} {identities[0].capability}, {cores} cores, {platform.machine()},"
                f" {platform.node()}, torch {torch.__version__}"
            ),
            threads=tier.threads,
            cores=cores,
            tiers=tuple(names),
            left_out={name: why for name, why in left_out.items() if why},
            precisions={
                name: tuple(
                    each
                    for each in PRECISIONS
                    if not engine.why_not(BuildOptions(name, precision=each), {}, device)
                )
                for name, engine in ENGINES.items()
            },
            ranges=tuple((axis.low, axis.high) for axis in axes if axis.low < axis.high),
            has_task=task is not None,
            start_s=start_s,
        )
        return asdict(facts)

    def _changing(self, name: str) -> str:
        """Why no package of a tier could be kept: another build has other weights; else ""."""
        with _named(f"tier {name!r}"):
            tier = self.tier(self._name or name)
            model = tier.model if name == self._name else build_model(tier.adapter, name)
            return changing_weights(name, model, build_model(tier.adapter, name))


def _forget(device: torch.device) -> None:
    """Give back what the last candidate held, and begin a new peak: the next one's memory is its own."""
    gc.collect()
    if device.type == "cuda":
        # cuBLAS keeps a workspace for each stream that it was used on, and each capture has its own.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    ctypes.CDLL(None).malloc_trim(0)
    # "5" sets the peak to the present size (proc(5)); some containers do not have the file.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@dataclass(frozen=True)
class TierModel(BuiltTier):
    """A tier's model, which is the reference as well: eager in fp32, as `Device` sets it."""

    adapter: Adapter
    threads: int


def load_tier(job: Mapping[str, Any], threads: int) -> TierModel:
    """Load the job's `adapter`, build its `tier` on the `device`, and call it once.

    Raises:
        TorchperfError: the adapter or the device cannot be used.
    """
    device, name = Device(choose_device(job["device"]), threads).device, job["tier"]
    with _named(f"adapter {job['adapter']!r}, tier {name!r}"):
        adapter = open_adapter(job["adapter"], job["options"], device)
        model = build_model(adapter, name)
        with torch.inference_mode(mode=False):  # weights made under it cannot be exported
            model = model.to(device)
        example = tuple(tensor.to(device) for tensor in example_of(adapter, name))
    with _named(f"adapter {job['adapter']!r}, dynamic_dims"):
        dims = adapter.dynamic_dims()
        axes_of(dims, shapes_of(example))
    kept, what = KeptState(model), f"adapter {job['adapter']!r}, tier {name!r}"
    with _named(f"{what}: the model raises on its own example inputs"), torch.inference_mode():
        given = drawn(model(*example))
    if not list(tensors_in(given)):
        raise AdapterError(
            f"{what}: the model returns {described(given)}, in which there is no tensor: no candidate can be"
            " compared with eager"
        )
    kept.restore()
    return TierModel(
        model,
        example,
        dims,
        device,
        adapter,
        torch.get_num_threads(),
        scoring=scoring_of(adapter, name, device),
        frames=read_frames(job.get("frames", ""), example, device),
    )


def example_of(adapter: Adapter, tier: str) -> Inputs:
    example = adapter.example_inputs(tier)
    if not isinstance(example, tuple) or not all(isinstance(each, torch.Tensor) for each in example):
        raise AdapterError(
            f"example_inputs({tier!r}) gave {described(example)}; it has to be a tuple of tensors"
        )
    return example


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
        runner = make_runner(tier, candidate.options)
        runner.call(*tier.example)
        if tier.device.type == "cuda":
            torch.cuda.synchronize(tier.device)
        self.cold_start_s = (time.monotonic_ns() - started_ns) / NS_PER_S
        self._call, self._captured, self.compile_s = runner.call, runner.captured, runner.compile_s

    def compare(self, *, is_judged: bool) -> None:
        """Compare its outputs with eager's, and find out whether its shape policy can be used.

        What `is_judged` later, by the adapter's task, is compared by numbers alone.

        Raises:
            ParityError: they are too far off.
            AdapterError: another policy would be in force.
        """
        options, tier, call = self._candidate.options, self._tier, self._call
        dims = varying_dims(options, tier.dims)
        scoring = (
            None
            if tier.scoring is None
            else replace(tier.scoring, held_out=tier.held_out(options.precision))
        )
        if (
            call is tier.model
        ):  # which may keep state between calls, so that it would not be the same as itself
            self.parity = Parity(0.0, 0.0)
        else:
            drawn = {} if self._captured else dims  # other sizes do not reach the graph
            self.parity = check_engine(
                tier.model,
                call,
                tier.example,
                drawn,
                options.precision,
                is_judged_later=is_judged,
                scoring=scoring,
            )
        if self._candidate.in_process and self._candidate.shapes != BUCKET:
            return
        policy, started = self._candidate.shapes if tier.dims else "exact", time.perf_counter()
        fitted = ShapeRunner(  # as a worker of the node would run it
            call,
            tier.model,
            ShapeOptions(policy, self._candidate.bucket_width),
            tier.dims,
            tier.example,
            options.precision,
            self.parity,
            unpad=tier.adapter.unpad,
            dynamic_engine=options.engine == EAGER or (bool(dims) and not self._captured),
            capture=self._captured.capture if self._captured else None,
        )
        fitted.warm_up()
        if fitted.policy != policy:
            raise AdapterError("; ".join(fitted.notes))
        self._call = fitted
        if options.engine == "compile":  # a new size compiles a graph
            self.compile_s += time.perf_counter() - started

    def look(self, look_s: float, seconds: float, to_beat: Sequence[float]) -> TrialFigures:
        """Measure briefly, and where that is near `to_beat` go on: in all for so many seconds."""
        looked = self._time(look_s, _LOOKED)
        found = self._figures(*looked)
        if to_beat and not found.is_near(to_beat):
            return found
        fewest = min(max(_FEWEST_SAMPLES, round(_SAMPLES_PER_S * seconds)), _MOST_FEWEST)
        left = max(_PARTS, fewest - found.samples)
        more = self._time(max(0.0, seconds - look_s), (left, _LOOKED[1]))
        return self._figures(
            *(replace(a, times_ms=a.times_ms + b.times_ms) for a, b in zip(looked, more, strict=True))
        )

    def judge(self, count: int, eager: float | None) -> Accuracy | None:
        """Accuracy by so many examples, with eager fp32's where that is not known yet, in the place of frames.

        None where the adapter has no task.
        """
        task: Task | None = drawing_task(self._tier.adapter)
        if task is None:
            return None
        name, value = self._judged(task, self._call, count)
        if eager is None:
            torch.set_num_threads(self._tier.threads)
            is_other = self._candidate.options != BuildOptions()
            eager = self._judged(task, self._tier.model, count)[1] if is_other else value
        # A task need not derive from `Task`.
        return Accuracy(name, value, eager, count, getattr(task, "higher_is_better", True))

    def _judged(self, task: Task, call: Call, count: int) -> tuple[str, float]:
        try:
            return judged(task, call, count, self._tier.device)
        except AdapterError as error:
            raise AdapterError(f"{error}; --judged 0 tunes without accuracy") from error

    def _figures(self, own: Timing, eager: Timing) -> TrialFigures:
        parts = [np.array_split(timing.times_ms, _PARTS) for timing in (own, eager)]
        shares = [float(np.median(a) / np.median(b)) for a, b in zip(*parts, strict=True)]
        return TrialFigures(
            p50_ms=own.median_ms,
            p95_ms=own.p95_ms,
            p99_ms=own.calibration().p99_ms,
            max_ms=own.max_ms,
            eager_p50_ms=eager.median_ms,
            eager_p99_ms=eager.calibration().p99_ms,
            least_share=min(shares),
            most_share=max(shares),
            samples=len(own.times_ms),
            cold_start_s=self.cold_start_s,
            compile_s=self.compile_s,
            # the most since `_forget`: a graph's pool is the allocator's for as long as there is the graph
            memory_mb=(
                torch.cuda.max_memory_reserved(self._tier.device)
                if self._tier.device.type == "cuda"
                else peak_memory_bytes(self._tier.device)
            )
            / _BYTES_PER_MB,
            relative_l2=self.parity.relative_l2,
            max_error=self.parity.max_error,
            score=self.parity.score,
        )

    def _time(self, seconds: float, rounds: tuple[int, int]) -> tuple[Timing, Timing]:
        """The candidate and the reference, each on its threads and on inputs of every size.

        Where the threads differ the two take turns in blocks, as a change of their number takes calls to
        settle.
        """
        sides = ("own", self._call), ("eager", self._tier.model)
        calls = [
            {f"{who} {size}": partial(call, *inputs) for size, inputs in enumerate(self._inputs())}
            for who, call in sides
        ]
        share = seconds / len(calls[0])
        threads = (self._candidate.threads, self._tier.threads)
        if threads[0] == threads[1]:
            is_reference = self._call is self._tier.model
            timed = calls[0] if is_reference else {**calls[0], **calls[1]}
            found = time_interleaved(timed, self._tier.device, seconds=share, rounds=rounds)
            return _pooled(found, "own"), _pooled(found, "own" if is_reference else "eager")
        times: dict[str, list[float]] = {"own": [], "eager": []}
        fewest, most = (count // _PARTS for count in rounds)
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
