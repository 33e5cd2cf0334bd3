"""Builds packages and their manifests: export, compile, check against eager, time, store."""

import contextlib
import datetime
import os
import resource
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.errors import ConfigError, TorchperfError
from torchperf_ros.core.package_cache import PackageCache, open_cache
from torchperf_ros.core.package_manifest import (
    Manifest,
    PackageError,
    check_package,
    file_sha256,
    manifest_path,
)
from torchperf_ros.worker.adapter import Adapter, load_adapter
from torchperf_ros.worker.device import Device, choose_device
from torchperf_ros.worker.engine import varying_dims, warm_up_inputs
from torchperf_ros.worker.fingerprint import identify, signature_of
from torchperf_ros.worker.model_transforms import matrix_precision, transform
from torchperf_ros.worker.package import build_package, load_package
from torchperf_ros.worker.parity import check_engine
from torchperf_ros.worker.ready_package import load_ready_package
from torchperf_ros.worker.stopwatch import time_interleaved

Say = Callable[..., None]
_TIMING_SECONDS = 1.0


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
            builder = _TierBuild(adapter, job, tier, BuildOptions(**{**build, "engine": "aoti"}), device.device, say)
            if builder.ready:
                say("planned", tier=tier, text=f"is compiled: {builder.ready}")
                continue
            if job.get("dry_run"):
                say("planned", tier=tier, text=builder.plan(cache))
                continue
            path, manifest, new = builder.store(cache)
        except Exception as error:  # one tier's boundary: the compiler's errors are of every kind
            good = False
            text = str(error) if isinstance(error, TorchperfError) else f"{type(error).__name__}: {error}"
            detail = "" if isinstance(error, TorchperfError) else traceback.format_exc(limit=-6)
            say("failed", tier=tier, text=text.splitlines()[0], detail=detail or text)
        else:
            say("built", tier=tier, package=str(path), new=new, manifest=manifest.as_dict())
    say("done")
    return good


class _TierBuild:
    """One tier on its way into a package.

    Attributes:
        ready: the package that the user names for this tier, None where there is something to build.
    """

    def __init__(
        self, adapter: Adapter, job: Mapping[str, Any], tier: str, options: BuildOptions, device: torch.device, say: Say
    ) -> None:
        self._job, self._tier, self._options, self._device = job, tier, options, device
        number = job["tiers"].index(tier)
        self._step: Callable[[str], None] = lambda step: say("tier", tier=tier, number=number + 1, step=step)
        self._example = tuple(tensor.to(device) for tensor in adapter.example_inputs(tier))
        self._dims = varying_dims(options, adapter.dynamic_dims())
        self.ready: Path | None = None
        named = job["packages"][number] if job.get("packages") else ""
        if named:
            model, _ = load_ready_package(Path(named), device, self._example, self._dims)
            if model is None:
                self.ready = Path(named)
                return
        else:
            model = adapter.build(tier).eval()
        self._model = model.to(device)
        self._identity = identify(self._model, options, self._example, self._dims, device)

    def _path(self, cache: PackageCache) -> Path:
        out = self._job.get("out")
        return Path(out) / f"{self._tier}.pt2" if out else cache.path(self._identity)

    def plan(self, cache: PackageCache) -> str:
        """What `store` would do, in words."""
        path = self._path(cache)
        if not path.exists():
            return f"would be built: {path} is not there"
        try:
            check_package(path, self._identity)
        except PackageError as error:
            return f"would be built: {error}"
        return f"is there: {path}" + ("; it would be built again" if self._job.get("force") else "")

    def store(self, cache: PackageCache) -> tuple[Path, Manifest, bool]:
        """The package in the cache or the folder, built unless it is there; the last: whether it was built now."""
        path = self._path(cache)
        with cache.building(self._identity):
            if not self._job.get("force"):
                try:
                    return path, check_package(path, self._identity), False
                except PackageError:  # not there, or not as it should be: it is built
                    pass
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.stem}.{os.getpid()}.part.pt2")
            try:
                manifest = self._build(part)
                _replace(part, manifest, path)
            finally:
                for left in (part, manifest_path(part)):
                    left.unlink(missing_ok=True)
        if path.parent == cache.folder:
            with contextlib.suppress(ConfigError):  # an entry of somebody else's: the package is there all the same
                cache.shrink(keep=path)
        return path, manifest, True

    def _timed_inputs(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Inputs of each shape once, by shape; the example comes last."""
        by_shape: dict[str, tuple[torch.Tensor, ...]] = {}
        for inputs in warm_up_inputs(self._example, self._dims):
            shapes = ", ".join(map(signature_of, inputs))
            by_shape.pop(shapes, None)
            by_shape[shapes] = inputs
        return by_shape

    def _build(self, part: Path) -> Manifest:
        started = time.perf_counter()
        self._step("compiling")
        prepared = transform(self._model, self._options, self._device)
        with matrix_precision(self._options.precision, self._device):
            graph = build_package(prepared, self._example, self._dims, part)
        compile_s = time.perf_counter() - started
        self._step("checking")
        with torch.inference_mode():
            call = load_package(part, self._device)
            parity = check_engine(self._model, call, self._example, self._dims, self._options.precision, seeds=4)
            self._step("timing")
            timings = {}
            for shapes, inputs in self._timed_inputs().items():
                candidates = {"": lambda i=inputs: call(*i), "eager_": lambda i=inputs: self._model(*i)}
                measured = time_interleaved(candidates, self._device, seconds=_TIMING_SECONDS)
                timings[shapes] = {
                    f"{name}{what}_ms": value
                    for name, found in measured.items()
                    for what, value in (("p50", found.median_ms), ("p99", found.p99_ms))
                }
        return Manifest(
            identity=self._identity, adapter=self._job["adapter"], tier=self._tier,
            package_sha256=file_sha256(part), package_bytes=part.stat().st_size, graph=graph,
            parity=parity.as_dict(), timings=timings, peak_memory_bytes=_peak_memory_bytes(self._device),
            compile_s=compile_s, built=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )  # fmt: skip


def _replace(part: Path, manifest: Manifest, path: Path) -> None:
    """Put both files in place, each at once; the manifest last, as it makes the package complete."""
    manifest_part = manifest_path(part)
    manifest_part.write_text(manifest.to_json(), encoding="utf-8")
    manifest_path(path).unlink(missing_ok=True)
    part.rename(path)
    manifest_part.rename(manifest_path(path))


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
