"""Builds packages and their manifests: export, compile, check against eager, time, store."""

import contextlib
import datetime
import os
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.api.adapter import Adapter, open_adapter
from torchperf_ros.api.errors import AdapterError, ConfigError, TorchperfError, one_line
from torchperf_ros.engines.built_tier import (
    BuiltTier,
    Call,
    Inputs,
    build_model,
    read_frames,
    scoring_of,
    varying_dims,
)
from torchperf_ros.engines.device import Device, choose_device, no_garbage_collection, time_interleaved
from torchperf_ros.engines.engine import CaptureFailed, CaptureRecord, EngineUnavailable, Runner, finished
from torchperf_ros.engines.fingerprint import changing_weights, identify, tiers_of
from torchperf_ros.engines.outputs import signature_of
from torchperf_ros.engines.package import (
    ENGINES,
    IN_PROCESS,
    Package,
    TimingFailed,
    compare,
    identity_of,
    make_runner,
    users_package,
    ways_of,
)
from torchperf_ros.engines.parity import check_engine
from torchperf_ros.settings.build_options import (
    AUTO,
    GRAPH,
    INT8_STATIC,
    OF_PARTS,
    PACKAGE_SUFFIXES,
    BuildOptions,
)
from torchperf_ros.workers.package_cache import NoRoom, PackageCache, open_cache
from torchperf_ros.workers.package_manifest import (
    EAGER,
    EngineChoice,
    Identity,
    Manifest,
    PackageError,
    check_package,
    file_sha256,
    manifest_path,
)

# What runs a tier of whose engine there is nothing to build.
_WITHOUT_PACKAGE = {
    "eager": "runs the model as it is: nothing is built",
    GRAPH: "captures the model as each worker starts, on CUDA: nothing is built",
    OF_PARTS: "compiles the model in each worker, beside those that serve: nothing is built",
}
_TIMING_SECONDS = 1.0
_TRIED_AGAIN = "; `torchperf compile` tries it again"
_ROUNDS = (5, 200)
# A GPU shares its time among processes evenly, and a worker serves meanwhile.
_BRIEFLY = (5, 20)


def do_job(job: Mapping[str, Any], say: Callable[..., None]) -> bool:
    """Build every tier of a job, see `compile_main`.

    Returns whether all are there now; a `TorchperfError` if none can be, a `CaptureFailed` if this process has to end
    and the next one may go on.
    """
    device = Device(choose_device(job["device"]), job["threads"]).device
    adapter = open_adapter(job["adapter"], job["options"], device)
    cache = open_cache(job.get("cache_dir", ""), job.get("cache_mib", 1024))
    good, tiers = True, tiers_of(adapter) if job.get("guessed") else job["tiers"]
    if job.get("guessed"):
        say("tiers", tiers=tiers)
    for number, name in enumerate(tiers):

        def step(text: str, capturing: str = "", tier: str = name, number: int = number + 1) -> None:
            say("tier", tier=tier, number=number, step=text, capturing=capturing)

        package = job["packages"][number] if job.get("packages") else ""
        options = BuildOptions(**job["build"][number])
        if options.engine in IN_PROCESS and not package:
            say("planned", tier=name, text=f"engine {options.engine} {_WITHOUT_PACKAGE[options.engine]}")
            continue
        step("loading")
        try:
            tier = _tier_of(adapter, name, package, options, device, job.get("frames", ""))
            if tier is None:
                say("planned", tier=name, text=f"is compiled: {package}")
                continue
            kind = _ChoiceBuild if options.engine == AUTO else _PackageBuild
            build = kind(_Work(job, name, tier, options, cache, step))
            if job.get("dry_run"):
                say("planned", tier=name, text=build.plan())
            else:
                say("built", tier=name, **asdict(build.store()))
        except (CaptureFailed, TimingFailed, NoRoom):
            raise
        # One tier's boundary: the compiler's errors are of every kind.
        except (Exception, SystemExit) as error:
            cache.check_room(error)
            good, text = False, one_line(error)
            detail = str(error) if isinstance(error, TorchperfError) else traceback.format_exc(limit=-6)
            say("failed", tier=name, text=text, detail="" if detail == text else detail)
    say("done")
    return good


def _tier_of(
    adapter: Adapter, name: str, package: str, options: BuildOptions, device: torch.device, frames: str
) -> BuiltTier | None:
    example = tuple(tensor.to(device) for tensor in adapter.example_inputs(name))
    dims = varying_dims(options, adapter.dynamic_dims())
    if package:
        users_package(Path(package), None, device, example, dims)
        return None
    model = build_model(adapter, name)
    # A package of weights that no second build gives would fit no worker.
    if why := changing_weights(name, model, build_model(adapter, name)):
        raise AdapterError(why)
    scoring, inputs = scoring_of(adapter, name, device), read_frames(frames, example, device)
    return BuiltTier(model.to(device), example, dims, device, scoring=scoring, frames=inputs)


@dataclass(frozen=True)
class _Stored:
    """Package and manifest, "" and None where none is needed, and whether they are new.

    Of engine auto also how it has chosen, in words, and which way.
    """

    package: str
    manifest: Manifest | None
    new: bool
    choice: str = ""
    engine: str = ""


@dataclass(frozen=True)
class _Work:
    job: Mapping[str, Any]
    name: str
    tier: BuiltTier
    options: BuildOptions
    cache: PackageCache
    step: Callable[..., None]

    @property
    def force(self) -> bool:
        return bool(self.job.get("force"))


class _PackageBuild:
    def __init__(self, work: _Work, identity: Identity | None = None) -> None:
        """Take a tier; the identity of its package where others are built beside it, to be chosen from."""
        self._work, self._engine = work, ENGINES[work.options.engine]
        self._engine.check(work.options, work.tier.dims, work.tier.device)
        self._identity = identity or identify(work.tier, work.options, self._engine.version)
        self._path = work.cache.path(self._identity)
        if work.job.get("out") and not identity:
            self._path = Path(work.job["out"]) / f"{work.name}{PACKAGE_SUFFIXES[work.options.engine]}"
        self._prefix = f"{self._engine.name}: " if identity else ""
        # Without a log it is calibrated by the adapter's own inputs, which the identity holds.
        of_log = work.options.precision == INT8_STATIC and work.job.get("frames")
        self._calibrated_by = file_sha256(Path(work.job["frames"])) if of_log else ""

    def plan(self) -> str:
        if not self._path.exists():
            return f"would be built: {self._path} is not there"
        try:
            check_package(self._path, self._identity)
        except PackageError as error:
            return f"would be built: {error}"
        return f"is there: {self._path}" + ("; it would be built again" if self._work.force else "")

    def store(self) -> _Stored:
        path, cache = self._path, self._work.cache
        with cache.building(self._identity):
            if not self._work.force:
                with contextlib.suppress(PackageError):  # not there, or not as it should be: it is built
                    manifest = check_package(path, self._identity)
                    if self._calibrated_by in {manifest.calibration, ""}:
                        return _Stored(str(path), manifest, new=False)
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
        if path.parent == cache.folder:
            # An entry of another user stays: the package is there all the same.
            with contextlib.suppress(ConfigError):
                cache.shrink(keep=path)
        return _Stored(str(path), manifest, new=True)

    def _build(self, part: Path) -> Manifest:
        work, tier, precision = self._work, self._work.tier, self._work.options.precision
        started = time.perf_counter()
        work.step(f"{self._prefix}compiling")
        built = self._engine.build(tier, work.options, part)
        compile_s = time.perf_counter() - started
        work.step(f"{self._prefix}checking")
        with torch.inference_mode():
            call = self._engine.load(part, built.outputs, work.options, tier.device)
            # It runs in the precision that it is checked in.
            call = finished(
                Runner(call), replace(work.options, cuda_graphs=False), tier.example, tier.device
            ).call
            scoring = tier.scoring and replace(tier.scoring, judges=True, held_out=tier.held_out(precision))
            parity = check_engine(tier.model, call, tier.example, tier.dims, precision, scoring=scoring)
            briefly = work.job.get("background") and tier.device.type == "cuda"
            work.step(self._prefix + ("timing, briefly" if briefly else "timing"))
            with no_garbage_collection():  # once: with a compiler in memory it takes a quarter of a second
                timings = {
                    ", ".join(map(signature_of, inputs)): _timed(
                        tier, call, inputs, _BRIEFLY if briefly else _ROUNDS
                    )
                    for inputs in tier.inputs_by_size()
                }
        return Manifest(
            identity=self._identity,
            adapter=work.job["adapter"],
            tier=work.name,
            package_sha256=file_sha256(part),
            package_bytes=part.stat().st_size,
            graph=built.graph,
            parity=asdict(parity),
            timings=timings,
            peak_memory_bytes=peak_memory_bytes(tier.device),
            compile_s=compile_s,
            built=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            variants_ms=built.variants_ms,
            outputs=built.outputs,
            int8=built.int8,
            calibration=self._calibrated_by,
        )


def _timed(tier: BuiltTier, call: Call, inputs: Inputs, rounds: tuple[int, int]) -> dict[str, float]:
    found = time_interleaved(
        {"": lambda: call(*inputs), "eager_": lambda: tier.model(*inputs)},
        tier.device,
        seconds=_TIMING_SECONDS,
        rounds=rounds,
    )
    return {
        f"{name}{figure}": value
        for name, one in found.items()
        for figure, value in (("p50_ms", one.median_ms), ("p99_ms", one.p99_ms))
    }


class _ChoiceBuild:
    """One tier for engine auto: a package of every engine that can, and the choice between all ways."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._ways, self._identity = ways_of(work.tier, work.options)

    def plan(self) -> str:
        if stored := self._found():
            again = "; it would be chosen again" if self._work.force else ""
            return f"is there: {stored.package or stored.engine}: {stored.choice}{again}"
        return f"would be chosen out of {', '.join([*self._ways][1:])} and {EAGER}"

    def store(self) -> _Stored:
        with self._work.cache.building(self._identity, "choice"):
            stored = (None if self._work.force else self._found()) or self._choose()
        out = self._work.job.get("out")
        if not (out and stored.package):
            return stored
        Path(out).mkdir(parents=True, exist_ok=True)
        package, target = Path(stored.package), Path(out) / self._work.name
        for path in (manifest_path(package), package):
            copy = shutil.copy(path, target.with_name(f"{target.name}{path.suffix}"))
        return replace(stored, package=str(copy))

    def _found(self) -> _Stored | None:
        """What was chosen before, if it is still there.

        A command chooses anew where memory did not suffice to capture a way. In the background that is not
        tried again: it would lack memory beside the same workers, which may need just then what it takes.

        `EngineUnavailable` where nothing but eager could run it.
        """
        choice = self._work.cache.choice(self._identity)
        lacked = choice is not None and any(_TRIED_AGAIN in why for why in choice.left_out.values())
        if choice is None or (lacked and not self._work.job.get("background")):
            return None
        return self._stored(choice, new=False)

    def _stored(self, choice: EngineChoice, *, new: bool) -> _Stored | None:
        if len(self._ways) > 1 and set(choice.timings_ms) == {EAGER}:
            why = "; ".join(f"{name}: {text}" for name, text in choice.left_out.items())
            raise EngineUnavailable(f"no engine can run it: {why}")
        options = self._ways.get(choice.engine)
        if choice.engine == GRAPH and self._work.tier.dims:
            # Where a stage's sizes are not known beforehand, the best package runs in the graph's place.
            packages = [name for name, way in self._ways.items() if way.engine in ENGINES]
            options = self._ways.get(choice.best_of([EAGER, *packages]))
        if options is None or options.engine not in ENGINES:
            return _Stored("", None, new, choice.words, choice.engine)
        identity = identity_of(self._identity, options.engine)
        path = self._work.cache.path(identity)
        try:
            return _Stored(str(path), check_package(path, identity), new, choice.words, choice.engine)
        except PackageError:
            return None

    def _choose(self) -> _Stored:
        work, tier = self._work, self._work.tier
        if work.force:  # should this process have to end before it has chosen
            work.cache.forget_findings(self._identity.key)
        calls, left_out = {EAGER: make_runner(tier, self._ways[EAGER]).call}, dict[str, str]()
        packages: dict[str, Package] = {}
        # What is captured comes last: where that fails, this process has to end, and the packages are there.
        for name, options in sorted([*self._ways.items()][1:], key=lambda way: way[1].is_captured):
            try:
                if options.engine in ENGINES and not options.is_captured:
                    identity = identity_of(self._identity, options.engine)
                    stored = _PackageBuild(replace(work, options=options), identity).store()
                    packages[name] = Package(Path(stored.package), identity.key, stored.manifest)
                # Where there is a package, torch.compile makes the same kernels, for one process's life.
                if options.engine == OF_PARTS and packages:
                    continue
                calls[name] = self._call(name, packages.get(options.engine))
            except (CaptureFailed, NoRoom):
                raise
            except Exception as error:  # the libraries' boundary: what one cannot take is for another
                work.cache.check_room(error)  # which says nothing about the engine
                is_lacking = isinstance(error, torch.OutOfMemoryError)
                left_out[name] = f"{error}{_TRIED_AGAIN}" if is_lacking else one_line(error)
        work.step("choosing between " + ", ".join(calls))
        try:
            with torch.inference_mode():
                example = tuple(tensor.clone() for tensor in tier.example)
                choice = compare(calls, example, tier.device, left_out)
        except TimingFailed as error:
            raise TimingFailed(str(error), f"{work.name} {error.lacked}") from error
        work.cache.keep_choice(self._identity, choice)
        chosen = self._stored(choice, new=True)
        if chosen is None:
            mib = work.job.get("cache_mib")
            raise ConfigError(f"the package of {choice.engine} is gone again: cache_mib {mib} is too small")
        return chosen

    def _call(self, name: str, package: Package | None) -> Call:
        """What runs a way; one that no build has checked is compared with eager.

        Raises:
            EngineUnavailable: its package could not be built, or an earlier process failed to capture it.
            OutOfMemoryError: an earlier process had not enough memory to capture or to time it.
            CaptureFailed: it cannot be captured, which is kept; this process has to end.
        """
        tier, options, record = self._work.tier, self._ways[name], None
        lacked = self._work.job.get("lacked", {})
        if why := lacked.get(f"{self._work.name} {name}"):
            raise torch.OutOfMemoryError(why)
        if options.is_captured:
            say = partial(self._work.step, f"{options.engine}: capturing")
            record = CaptureRecord(self._work.cache, identity_of(self._identity, options.engine), say)
            if why := record.why_not():
                raise EngineUnavailable(why)
            if why := lacked.get(record.key):
                raise torch.OutOfMemoryError(why)
        with torch.inference_mode():
            if package is not None:
                found = finished(package.runner(tier.device), options, tier.example, tier.device, record)
            elif options.engine in ENGINES:
                raise EngineUnavailable(f"there is no package of {options.engine}")
            else:
                found = make_runner(tier, options, record)
            if options.is_captured or package is None:
                check_engine(
                    tier.model,
                    found.call,
                    tier.example,
                    {},
                    options.precision,
                    briefly=True,
                    scoring=tier.scoring,
                )
        return found.call


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has had: of the device's memory on CUDA, else of the machine's.

    Not `ru_maxrss`, which counts the parent's memory from before the program was loaded.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
