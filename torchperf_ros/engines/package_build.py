"""Builds packages and their manifests: export, compile, check against eager, time, store."""

import contextlib
import datetime
import os
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
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
from torchperf_ros.engines.device import Device, choose_device
from torchperf_ros.engines.engine import (
    ENGINES,
    choice_of,
    compare,
    identity_of,
    load_ready_package,
    make_runner,
    open_package,
)
from torchperf_ros.engines.fingerprint import changing_weights, identify, tiers_of
from torchperf_ros.engines.outputs import signature_of
from torchperf_ros.engines.package_engine import Built, EngineUnavailable
from torchperf_ros.engines.parity import check_engine
from torchperf_ros.engines.stopwatch import no_garbage_collection, time_interleaved
from torchperf_ros.settings.build_options import AUTO, INT8_STATIC, PACKAGE_SUFFIXES, BuildOptions
from torchperf_ros.workers.engine_choice import EAGER, EngineChoice
from torchperf_ros.workers.package_cache import PackageCache, open_cache
from torchperf_ros.workers.package_manifest import (
    Identity,
    Manifest,
    PackageError,
    check_package,
    file_sha256,
    manifest_path,
)

_TIMING_SECONDS = 1.0
_ROUNDS = (5, 200)
_BRIEFLY = (
    5,
    20,
)  # a GPU shares its time among processes evenly, and a worker serves meanwhile


def do_job(job: Mapping[str, Any], say: Callable[..., None]) -> bool:
    """Build every tier of a job, see `compile_main`.

    Returns whether all are there now; a `TorchperfError` if none can be.
    """
    device = Device(choose_device(job["device"]), job["threads"]).device
    adapter = open_adapter(job["adapter"], job["options"], device)
    cache = open_cache(job.get("cache_dir", ""), job.get("cache_mib", 1024))
    good, tiers = True, tiers_of(adapter) if job.get("guessed") else job["tiers"]
    if job.get("guessed"):
        say("tiers", tiers=tiers)
    for number, name in enumerate(tiers):

        def step(text: str, tier: str = name, number: int = number + 1) -> None:
            say("tier", tier=tier, number=number, step=text)

        step("loading")
        try:
            build, package = job["build"][number], job["packages"][number] if job.get("packages") else ""
            engine = build["engine"] if build["engine"] in {AUTO, *PACKAGE_SUFFIXES} else "aoti"
            options = BuildOptions(**build).with_engine(engine)
            tier = _tier_of(adapter, name, package, options, device, job.get("frames", ""))
            if tier is None:
                say("planned", tier=name, text=f"is compiled: {package}")
                continue
            builder = (_ChoiceBuild if engine == AUTO else _PackageBuild)(
                _Work(job, name, tier, options, cache, step)
            )
            if job.get("dry_run"):
                say("planned", tier=name, text=builder.plan())
                continue
            stored = builder.store()
        except (
            Exception,
            SystemExit,
        ) as error:  # one tier's boundary: the compiler's errors are of every kind
            good, text = False, one_line(error)
            detail = str(error) if isinstance(error, TorchperfError) else traceback.format_exc(limit=-6)
            say("failed", tier=name, text=text, detail="" if detail == text else detail)
        else:
            say("built", tier=name, **asdict(stored))
    say("done")
    return good


def _tier_of(
    adapter: Adapter, name: str, package: str, options: BuildOptions, device: torch.device, frames: str
) -> BuiltTier | None:
    """What the adapter builds; None where the user has a package, which is only checked."""
    example = tuple(tensor.to(device) for tensor in adapter.example_inputs(name))
    dims = varying_dims(options, adapter.dynamic_dims())
    if package:
        load_ready_package(Path(package), None, device, example, dims)
        return None
    model = build_model(adapter, name)
    # a package of weights that no second build gives would fit no worker
    if why := changing_weights(name, model, build_model(adapter, name)):
        raise AdapterError(why)
    scoring = scoring_of(adapter, name, device)
    return BuiltTier(
        model.to(device),
        example,
        dims,
        device,
        scoring=scoring,
        frames=read_frames(frames, example, device),
    )


@dataclass(frozen=True)
class _Stored:
    """Package and manifest, "" and None for eager.

    Whether they are `new`, and how engine auto has chosen, in words.
    """

    package: str
    manifest: Manifest | None
    new: bool
    choice: str = ""


@dataclass(frozen=True)
class _Work:
    job: Mapping[str, Any]
    name: str
    tier: BuiltTier
    options: BuildOptions
    cache: PackageCache
    step: Callable[[str], None]


class _PackageBuild:
    def __init__(self, work: "_Work", identity: Identity | None = None) -> None:
        """Take a tier, and the identity of its package where that is known already.

        Then others are built beside it.
        """
        self._work, self._engine = work, ENGINES[work.options.engine]
        self._engine.check(work.options, work.tier.dims, work.tier.device)
        self._identity = identity or identify(work.tier, work.options, self._engine.version)
        self._path = work.cache.path(self._identity)
        if work.job.get("out") and not identity:
            self._path = Path(work.job["out"]) / f"{work.name}{PACKAGE_SUFFIXES[work.options.engine]}"
        self._prefix = f"{self._engine.name}: " if identity else ""
        of_log = work.options.precision == INT8_STATIC and work.job.get("frames")
        # else by the adapter's own inputs
        self._calibrated_by = file_sha256(Path(work.job["frames"])) if of_log else ""

    def plan(self) -> str:
        if not self._path.exists():
            return f"would be built: {self._path} is not there"
        try:
            check_package(self._path, self._identity)
        except PackageError as error:
            return f"would be built: {error}"
        return f"is there: {self._path}" + (
            "; it would be built again" if self._work.job.get("force") else ""
        )

    def store(self) -> _Stored:
        path = self._path
        with self._work.cache.building(self._identity):
            if not self._work.job.get("force"):
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
        if path.parent == self._work.cache.folder:
            with contextlib.suppress(
                ConfigError
            ):  # an entry of another user stays: the package is there all the same
                self._work.cache.shrink(keep=path)
        return _Stored(str(path), manifest, new=True)

    def load(self, path: Path, built: Built | Manifest, *, graphs: bool = True) -> Call:
        options = self._work.options if graphs else replace(self._work.options, cuda_graphs=False)
        return open_package(path, built, options, self._work.tier).call

    def _build(self, part: Path) -> Manifest:
        tier, started = self._work.tier, time.perf_counter()
        self._work.step(f"{self._prefix}compiling")
        built = self._engine.build(tier, self._work.options, part)
        compile_s = time.perf_counter() - started
        self._work.step(f"{self._prefix}checking")
        with torch.inference_mode():
            call = self.load(part, built, graphs=False)  # it runs in the precision that it is checked in
            precision = self._work.options.precision
            scoring = tier.scoring and replace(tier.scoring, judges=True, held_out=tier.held_out())
            parity = check_engine(
                tier.model, call, tier.example, tier.dims, precision, seeds=4, scoring=scoring
            )
            briefly = self._work.job.get("background") and tier.device.type == "cuda"
            self._work.step(self._prefix + ("timing, briefly" if briefly else "timing"))
            with no_garbage_collection():  # once: with a compiler in memory it takes a quarter of a second
                timings = {
                    ", ".join(map(signature_of, inputs)): self._timed(
                        call, inputs, _BRIEFLY if briefly else _ROUNDS
                    )
                    for inputs in tier.inputs_by_size()
                }
        return Manifest(
            identity=self._identity,
            adapter=self._work.job["adapter"],
            tier=self._work.name,
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

    def _timed(self, call: Call, inputs: Inputs, rounds: tuple[int, int]) -> dict[str, float]:
        candidates = {"": lambda: call(*inputs), "eager_": lambda: self._work.tier.model(*inputs)}
        found = time_interleaved(candidates, self._work.tier.device, seconds=_TIMING_SECONDS, rounds=rounds)
        return {
            f"{name}{figure}": value
            for name, one in found.items()
            for figure, value in (("p50_ms", one.median_ms), ("p99_ms", one.p99_ms))
        }


class _ChoiceBuild:
    """One tier for engine auto: a package of every engine that can run it, and the choice between them."""

    def __init__(self, work: "_Work") -> None:
        self._work = work
        self._engines, self._identity = choice_of(work.tier, work.options)

    def plan(self) -> str:
        if stored := self._found():
            what = f"is there: {stored.package or EAGER}: {stored.choice}"
            return what + ("; it would be chosen again" if self._work.job.get("force") else "")
        return f"would be chosen out of {', '.join(engine.name for engine in self._engines)} and {EAGER}"

    def store(self) -> _Stored:
        with self._work.cache.building(self._identity, "choice"):
            stored = (None if self._work.job.get("force") else self._found()) or self._choose()
        out = self._work.job.get("out")
        if out and stored.package:
            Path(out).mkdir(parents=True, exist_ok=True)
            package, target = Path(stored.package), Path(out) / self._work.name
            for path in (manifest_path(package), package):
                copy = shutil.copy(path, target.with_name(f"{target.name}{path.suffix}"))
            return replace(stored, package=str(copy))
        return stored

    def _found(self) -> _Stored | None:
        """What was chosen before, if it is still there.

        `EngineUnavailable` where nothing but eager could run it.
        """
        choice = self._work.cache.choice(self._identity)
        return None if choice is None else self._stored(choice, new=False)

    def _stored(self, choice: EngineChoice, *, new: bool) -> _Stored | None:
        if self._engines and set(choice.timings_ms) == {EAGER}:
            why = "; ".join(f"{name}: {text}" for name, text in choice.left_out.items())
            raise EngineUnavailable(f"no engine can run it: {why}")
        if choice.engine == EAGER:
            return _Stored("", None, new, choice.words)
        identity = identity_of(self._identity, ENGINES[choice.engine])
        path = self._work.cache.path(identity)
        try:
            return _Stored(str(path), check_package(path, identity), new, choice.words)
        except PackageError:
            return None

    def _choose(self) -> _Stored:
        tier, left_out = self._work.tier, {}
        calls = {EAGER: make_runner(tier, replace(self._work.options, engine=EAGER)).call}
        for engine in self._engines:
            try:
                of_one = replace(self._work, options=self._work.options.with_engine(engine.name))
                build = _PackageBuild(of_one, identity_of(self._identity, engine))
                stored = build.store()
                with torch.inference_mode():
                    assert stored.manifest
                    calls[engine.name] = build.load(Path(stored.package), stored.manifest)
            except Exception as error:  # the libraries' boundary: what one cannot take is for another
                left_out[engine.name] = one_line(error)
        self._work.step("choosing between " + ", ".join(calls))
        with torch.inference_mode():
            choice = compare(calls, tuple(tensor.clone() for tensor in tier.example), tier.device, left_out)
        self._work.cache.keep_choice(self._identity, choice)
        chosen = self._stored(choice, new=True)
        if chosen is None:
            mib = self._work.job.get("cache_mib")
            raise ConfigError(f"the package of {choice.engine} is gone again: cache_mib {mib} is too small")
        return chosen


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has had: of the device's memory on CUDA, else of the machine's.

    Not `ru_maxrss`, which counts the parent's memory from before the program was loaded.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
