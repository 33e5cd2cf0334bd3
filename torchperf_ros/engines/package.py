"""The layer Package: a model that was built into a file, with its manifest, and what may be loaded of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchperf_ros.api.errors import one_line
from torchperf_ros.engines.built_tier import Call, Inputs
from torchperf_ros.engines.engine import Runner
from torchperf_ros.engines.engine_table import ENGINES
from torchperf_ros.engines.fingerprint import declared_dims, machine_facts
from torchperf_ros.engines.outputs import signature_of, tensors_in
from torchperf_ros.engines.package_engine import PackageEngine
from torchperf_ros.engines.parity import DynamicDims, Parity, random_inputs, same
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers.package_cache import find_package
from torchperf_ros.workers.package_manifest import (
    Identity,
    Manifest,
    PackageError,
    check_package,
    file_sha256,
    manifest_path,
)


@dataclass(frozen=True)
class Package:
    """A file that was checked against what lies beside it.

    Attributes:
        key: names it on `/diagnostics`: that of its identity, of a user's file its hash.
        manifest: None where only a checksum lies beside it; then it is AOTInductor's, of the example's shapes.
    """

    path: Path
    key: str
    manifest: Manifest | None

    @property
    def identity(self) -> Identity | None:
        return self.manifest.identity if self.manifest else None

    @property
    def options(self) -> BuildOptions:
        return BuildOptions(**self.identity.options) if self.identity else BuildOptions("aoti")

    @property
    def engine(self) -> PackageEngine:
        return ENGINES[self.options.engine]

    @property
    def parity(self) -> Parity | None:
        """What the build has found."""
        return Parity.read(self.manifest.parity) if self.manifest else None

    def runner(self, device: torch.device) -> Runner:
        """What runs it, before it is `finished`; a `PackageError` if its library cannot load it."""
        outputs = self.manifest.outputs if self.manifest else ""
        call = self.engine.load(self.path, outputs, self.options, device)
        static = self.identity is None or not self.identity.dynamic
        return Runner(call, graphs=1, static=static, package=self)


def users_package(
    path: Path,
    folders: Sequence[str] | None,
    device: torch.device,
    example: Inputs,
    dynamic_dims: DynamicDims,
) -> Runner:
    """A file that a user has named, before it is `finished`; it takes other sizes if its manifest has ranges.

    Raises:
        PackageError: it is not there or not to be loaded from there, it is an exported program, its hash,
            machine or engine does not match, or it does not run on the example's shapes.
        EngineUnavailable: its engine cannot run it here.
    """
    package = _checked(find_package(path, folders), device, example)
    path, identity, engine = package.path, package.identity, package.engine
    declared = declared_dims(dynamic_dims)
    if identity and identity.dynamic not in ([], declared):
        raise PackageError(
            f"package {path} was built for the dynamic dimensions {identity.dynamic}; the adapter declares"
            f" {declared}, each [input, dimension, smallest, largest]"
        )
    engine.check(package.options, {}, device)
    if identity and identity.library != engine.version:
        raise PackageError(f"package {path} was built by {identity.library}; here is {engine.version}")
    runner = package.runner(device)
    _try(path, runner.call, example)
    return runner


def _checked(path: Path, device: torch.device, example: Inputs) -> Package:
    """By the manifest that `torchperf compile` wrote, or `<file>.sha256` as the program sha256sum writes it."""
    if manifest_path(path).is_file():
        manifest = check_package(path, None)
        identity = manifest.identity
        here = [torch.__version__, *machine_facts(device), *map(signature_of, example)]
        built = [identity.torch, identity.device, identity.capability, *identity.signature]
        if here != built:
            raise PackageError(
                f"package {path} was built for {'; '.join(built)}; this is {'; '.join(here)}"
            )
        return Package(path, manifest.package_sha256[:32], manifest)
    beside, digest = path.with_name(f"{path.name}.sha256"), file_sha256(path)
    try:
        expected = beside.read_text(encoding="utf-8").split()[:1]
    except OSError:
        raise PackageError(
            f"package {path} has neither a manifest nor {beside.name}: `sha256sum {path.name}` makes the"
            " latter"
        ) from None
    if expected != [digest]:
        raise PackageError(
            f"package {path} has the SHA-256 {digest}; {beside.name} says {' '.join(expected) or 'nothing'}"
        )
    return Package(path, digest[:32], None)


def _try(path: Path, call: Call, example: Inputs) -> None:
    """Run it on two random inputs, whose outputs have to be numbers and to differ."""
    drawn, numbers = [random_inputs(example, seed) for seed in (1, 2)], []
    for inputs in drawn:
        try:
            outputs = [t.clone() for t in tensors_in(call(*inputs)) if t.is_floating_point() and t.numel()]
        except RuntimeError as error:
            shapes = ", ".join(signature_of(tensor) for tensor in inputs)
            raise PackageError(
                f"package {path} does not run on the adapter's inputs ({shapes}): {one_line(error)}"
            ) from error
        if not all(bool(torch.isfinite(tensor).all()) for tensor in outputs):
            raise PackageError(
                f"package {path} gives NaN or Inf on random inputs like the adapter's example"
            )
        numbers.append(outputs)
    # Classes, which are no numbers with a point, may agree.
    if numbers[0] and same(*numbers) and not same(*drawn):
        raise PackageError(f"package {path} gives the same outputs for different inputs")
