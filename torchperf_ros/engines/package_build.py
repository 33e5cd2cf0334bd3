"""Builds packages and their manifests: export, compile, check against eager, time, store."""

import contextlib
import datetime
import os
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.config.build_options import AUTO, PACKAGE_SUFFIXES, BuildOptions
from torchperf_ros.engines.compile_main import Say
from torchperf_ros.engines.engine import (
    ENGINES,
    Call,
    Runner,
    compare,
    finished,
    identity_of,
    library_of,
    make_runner,
    usable_engines,
    varying_dims,
    warm_up_inputs,
)
from torchperf_ros.engines.fingerprint import differing_weights, identify, signature_of
from torchperf_ros.engines.package_engine import EngineUnavailable
from torchperf_ros.engines.parity import DynamicDims, check_engine
from torchperf_ros.engines.ready_package import load_program, load_ready_package
from torchperf_ros.frame.errors import AdapterError, ConfigError, TorchperfError
from torchperf_ros.model.adapter import Adapter, load_adapter
from torchperf_ros.model.device import Device, choose_device
from torchperf_ros.model.stopwatch import time_interleaved
from torchperf_ros.packages.engine_choice import EAGER, EngineChoice, read_choice
from torchperf_ros.packages.package_cache import PackageCache, find_package, open_cache
from torchperf_ros.packages.package_manifest import (
    Identity,
    Manifest,
    PackageError,
    check_package,
    file_sha256,
    is_exported_program,
    manifest_path,
)

_TIMING_SECONDS = 1.0
_ROUNDS = (5, 1000)
_BRIEFLY = (5, 20)  # a GPU shares its time out by processes, whatever their priority, and a worker serves meanwhile


def build_all(job: Mapping[str, Any], say: Say) -> bool:
    """Build every tier of a job, see `compile_main`; returns whether all of them are there now.

    Raises:
        TorchperfError: nothing can be built: no such adapter, device or folder.
    """
    device = Device(choose_device(job["device"]), job["threads"])
    adapter = load_adapter(job["adapter"])(job["options"], device.device)
    cache = open_cache(job.get("cache_dir", ""), job.get("cache_mib", 4096))
    good = True
    for number, (tier, build) in enumerate(zip(job["tiers"], job["build"], strict=True), start=1):
        say("tier", tier=tier, number=number, step="loading")
        try:
            engine = build["engine"] if build["engine"] in {AUTO, *PACKAGE_SUFFIXES} else "aoti"
            subject = _Subject.of(adapter, job, tier, BuildOptions(**{**build, "engine": engine}), device.device, say)
            if isinstance(subject, Path):
                say("planned", tier=tier, text=f"is compiled: {subject}")
                continue
            builder = (_ChoiceBuild if engine == AUTO else _TierBuild)(subject, cache)
            if job.get("dry_run"):
                say("planned", tier=tier, text=builder.plan())
                continue
            stored = builder.store()
        except Exception as error:  # one tier's boundary: the compiler's errors are of every kind
            good = False
            detail = "" if isinstance(error, TorchperfError) else traceback.format_exc(limit=-6)
            say("failed", tier=tier, text=_first_line(error), detail=detail or str(error))
        else:
            say("built", tier=tier, **asdict(stored))
    say("done")
    return good


@dataclass(frozen=True)
class _Stored:
    """What is there now: package and manifest, "" and None where engine auto has chosen eager.

    `new` is whether it was built, or chosen, now; `choice` how engine auto has come to it, in words.
    """

    package: str
    manifest: Manifest | None
    new: bool
    choice: str = ""


@dataclass(frozen=True)
class _Subject:
    """A tier's model on its device, and the job that it is built for."""

    job: Mapping[str, Any]
    tier: str
    model: torch.nn.Module
    example: tuple[torch.Tensor, ...]
    dims: DynamicDims
    options: BuildOptions
    device: torch.device
    step: Callable[[str], None]

    @classmethod
    def of(
        cls, adapter: Adapter, job: Mapping[str, Any], tier: str, options: BuildOptions, device: torch.device, say: Say
    ) -> "_Subject | Path":
        """What the adapter builds, or what the user's program is; the user's package where that is one."""
        number = job["tiers"].index(tier)
        example = tuple(tensor.to(device) for tensor in adapter.example_inputs(tier))
        dims = varying_dims(options, adapter.dynamic_dims())
        named = job["packages"][number] if job.get("packages") else ""
        programs = not job.get("background")  # the node compiles what the adapter builds, nothing from a file
        if named and programs and is_exported_program(find_package(Path(named), None, program=True)):
            model = load_program(Path(named), device, example)
        elif named:
            load_ready_package(Path(named), None, device, example, dims)
            return Path(named)
        else:
            model = adapter.build(tier).eval()
            _check_repeatable(model, adapter, tier)

        def step(text: str) -> None:
            say("tier", tier=tier, number=number + 1, step=text)

        return cls(job, tier, model.to(device), example, dims, options, device, step)

    def identity(self, library: str) -> Identity:
        """Of what is built from it."""
        return identify(self.model, self.options, self.example, self.dims, self.device, library)

    def runner(self, engine: str) -> Runner:
        """The model itself, run by an engine that needs no package."""
        return make_runner(self.model, replace(self.options, engine=engine), self.example, self.dims, self.device)

    def timed_inputs(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Inputs of each shape once, by shape; the example comes last."""
        by_shape: dict[str, tuple[torch.Tensor, ...]] = {}
        for inputs in warm_up_inputs(self.example, self.dims):
            shapes = ", ".join(map(signature_of, inputs))
            by_shape.pop(shapes, None)
            by_shape[shapes] = inputs
        return by_shape


class _TierBuild:
    """One tier on its way into a package."""

    def __init__(self, subject: _Subject, cache: PackageCache, identity: Identity | None = None) -> None:
        """Take a tier, and the identity of its package where that is known already; then others are built beside it."""
        self._subject, self._cache = subject, cache
        self._engine = ENGINES[subject.options.engine]
        self._engine.check(subject.options, subject.dims, subject.device)
        self._identity = identity or subject.identity(self._engine.version)
        out = subject.job.get("out")
        name = f"{subject.tier}{PACKAGE_SUFFIXES[self._engine.name]}"
        self._path = Path(out) / name if out else cache.path(self._identity)
        self._prefix = f"{self._engine.name}: " if identity else ""

    def plan(self) -> str:
        """What `store` would do, in words."""
        if not self._path.exists():
            return f"would be built: {self._path} is not there"
        try:
            check_package(self._path, self._identity)
        except PackageError as error:
            return f"would be built: {error}"
        return f"is there: {self._path}" + ("; it would be built again" if self._subject.job.get("force") else "")

    def store(self) -> _Stored:
        """The package in the cache or the folder, built unless it is there."""
        path = self._path
        with self._cache.building(self._identity):
            if not self._subject.job.get("force"):
                with contextlib.suppress(PackageError):  # not there, or not as it should be: it is built
                    return _Stored(str(path), check_package(path, self._identity), new=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.stem}.{os.getpid()}.part{path.suffix}")
            try:
                manifest = self._build(part)
                manifest_path(part).write_text(manifest.to_json(), encoding="utf-8")
                manifest_path(path).unlink(missing_ok=True)
                part.rename(path)
                manifest_path(part).rename(manifest_path(path))  # last, as it makes the package complete
            finally:
                for left in (part, manifest_path(part)):
                    left.unlink(missing_ok=True)
        if path.parent == self._cache.folder:
            with contextlib.suppress(ConfigError):  # an entry of somebody else's: the package is there all the same
                self._cache.shrink(keep=path)
        return _Stored(str(path), manifest, new=True)

    def load(self, path: Path, outputs: str, *, graphs: bool = True) -> Call:
        """A package, as a worker runs it."""
        subject, options = self._subject, self._subject.options
        options = options if graphs else replace(options, cuda_graphs=False)
        runner = Runner(self._engine.load(path, outputs, options, subject.device))
        return finished(runner, options, subject.example, subject.device).call

    def _build(self, part: Path) -> Manifest:
        subject = self._subject
        started = time.perf_counter()
        subject.step(f"{self._prefix}compiling")
        built = self._engine.build(subject.model, subject.options, subject.example, subject.dims, subject.device, part)
        compile_s = time.perf_counter() - started
        subject.step(f"{self._prefix}checking")
        with torch.inference_mode():
            call = self.load(part, built.outputs, graphs=False)  # it runs in the precision that it is checked in
            parity = check_engine(
                subject.model, call, subject.example, subject.dims, subject.options.precision, seeds=4
            )
            briefly = subject.job.get("background") and subject.device.type == "cuda"
            subject.step(self._prefix + ("timing, briefly" if briefly else "timing"))
            rounds = _BRIEFLY if briefly else _ROUNDS
            timings = {shapes: self._timed(call, inputs, rounds) for shapes, inputs in subject.timed_inputs().items()}
        return Manifest(
            identity=self._identity, adapter=subject.job["adapter"], tier=subject.tier,
            package_sha256=file_sha256(part), package_bytes=part.stat().st_size, graph=built.graph,
            parity=parity.as_dict(), timings=timings, peak_memory_bytes=peak_memory_bytes(subject.device),
            compile_s=compile_s, built=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            variants_ms=built.variants_ms, outputs=built.outputs,
        )  # fmt: skip

    def _timed(self, call: Call, inputs: tuple[torch.Tensor, ...], rounds: tuple[int, int]) -> dict[str, float]:
        candidates = {"": lambda: call(*inputs), "eager_": lambda: self._subject.model(*inputs)}
        found = time_interleaved(candidates, self._subject.device, seconds=_TIMING_SECONDS, rounds=rounds)
        return {
            f"{name}{what}_ms": value
            for name, timing in found.items()
            for what, value in (("p50", timing.median_ms), ("p99", timing.p99_ms))
        }


class _ChoiceBuild:
    """One tier for engine auto: a package of every engine that can run it, and the choice between them."""

    def __init__(self, subject: _Subject, cache: PackageCache) -> None:
        self._subject, self._cache, self._force = subject, cache, subject.job.get("force")
        self._engines = usable_engines(subject.options, subject.dims, subject.device)
        self._identity = subject.identity(library_of(self._engines))

    def plan(self) -> str:
        """What `store` would do, in words."""
        if stored := self._found():
            what = f"is there: {stored.package or EAGER}: {stored.choice}"
            return what + ("; it would be chosen again" if self._force else "")
        return f"would be chosen out of {', '.join(engine.name for engine in self._engines)} and {EAGER}"

    def store(self) -> _Stored:
        """The package of the engine that is the fastest here, chosen unless that was done before."""
        with self._cache.building(self._identity):
            stored = (None if self._force else self._found()) or self._choose()
        out = self._subject.job.get("out")
        if out and stored.package:
            Path(out).mkdir(parents=True, exist_ok=True)
            package, target = Path(stored.package), Path(out) / self._subject.tier
            for path in (manifest_path(package), package):
                copy = shutil.copy(path, target.with_name(f"{target.name}{path.suffix}"))
            return replace(stored, package=str(copy))
        return stored

    def _found(self) -> _Stored | None:
        """What was chosen before, if it is still there.

        Raises:
            EngineUnavailable: nothing but eager could run it.
        """
        choice = read_choice(self._cache.choice_path(self._identity))
        return None if choice is None else self._stored(choice, new=False)

    def _stored(self, choice: EngineChoice, *, new: bool) -> _Stored | None:
        if self._engines and set(choice.timings_ms) == {EAGER}:
            why = "; ".join(f"{name}: {text}" for name, text in choice.left_out.items())
            msg = f"no engine can run it: {why}"
            raise EngineUnavailable(msg)
        if choice.engine == EAGER:
            return _Stored("", None, new, choice.words)
        identity = identity_of(self._identity, ENGINES[choice.engine])
        path = self._cache.path(identity)
        try:
            return _Stored(str(path), check_package(path, identity), new, choice.words)
        except PackageError:
            return None

    def _choose(self) -> _Stored:
        subject, left_out, calls = self._subject, {}, {EAGER: self._subject.runner(EAGER).call}
        for engine in self._engines:
            try:
                options = replace(subject.options, engine=engine.name)
                of_one = replace(subject, options=options, job={**subject.job, "out": None})
                build = _TierBuild(of_one, self._cache, identity_of(self._identity, engine))
                stored = build.store()
                with torch.inference_mode():
                    assert stored.manifest
                    calls[engine.name] = build.load(Path(stored.package), stored.manifest.outputs)
            except Exception as error:  # the libraries' boundary: what one cannot take is for another
                left_out[engine.name] = _first_line(error)
        subject.step("choosing between " + ", ".join(calls))
        with torch.inference_mode():
            example = tuple(tensor.clone() for tensor in subject.example)
            choice = compare(calls, example, subject.device, left_out)
        self._cache.keep_choice(self._identity, choice)
        chosen = self._stored(choice, new=True)
        if chosen is None:
            mib = subject.job.get("cache_mib")
            msg = f"the package of {choice.engine} is gone again: cache_mib {mib} is too small"
            raise ConfigError(msg)
        return chosen


def _check_repeatable(model: torch.nn.Module, adapter: Adapter, tier: str) -> None:
    """Whether the adapter builds this model again: a package of weights that nobody builds again would fit no worker.

    Raises:
        AdapterError: it builds one with other weights.
    """
    differing = differing_weights(model, adapter.build(tier))
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        msg = f"no package can be kept: build({tier!r}) gives other weights at every call ({differing[0]}{more});"
        raise AdapterError(f"{msg} load them from a file, or call torch.manual_seed before they are drawn")


def _first_line(error: Exception) -> str:
    text = str(error) if isinstance(error, TorchperfError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has had: of the device's memory on CUDA, else of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
