"""A user's own package in place of what the adapter builds."""

from collections.abc import Sequence
from pathlib import Path

import torch

from torchperf_ros.config.build_options import BuildOptions
from torchperf_ros.engines.built_tier import Inputs
from torchperf_ros.engines.engine import ENGINES, Runner
from torchperf_ros.engines.fingerprint import declared_dims, machine_facts
from torchperf_ros.engines.parity import DynamicDims, random_inputs, same, signature_of, tensors_in
from torchperf_ros.frame.errors import one_line
from torchperf_ros.packages.package_cache import find_package
from torchperf_ros.packages.package_manifest import Manifest, PackageError, check_package, file_sha256, manifest_path


def load_ready_package(
    path: Path, folders: Sequence[str] | None, device: torch.device, example: Inputs, dynamic_dims: DynamicDims
) -> Runner:
    """A compiled package, ready to run; it takes other sizes than the example's if its manifest says so.

    Raises:
        PackageError: it is not there or not to be loaded from there, it is an exported program, its hash, machine or
            engine does not match, or it does not run on the example's shapes.
        EngineUnavailable: its engine cannot run it here.
    """
    path = find_package(path, folders)
    manifest = _check_hash(path, device, example)
    identity = manifest.identity if manifest else None
    if identity and identity.dynamic not in ([], declared_dims(dynamic_dims)):
        msg = f"package {path} was built for the dynamic dimensions {identity.dynamic}; the adapter declares"
        raise PackageError(f"{msg} {declared_dims(dynamic_dims)}, each [input, dimension, smallest, largest]")
    options = BuildOptions(**identity.options) if identity else BuildOptions("aoti")
    engine = ENGINES[options.engine]
    engine.check(options, {}, device)
    if identity and identity.library != engine.version:
        raise PackageError(f"package {path} was built by {identity.library}; here is {engine.version}")
    call = engine.load(path, manifest.outputs if manifest else "", options, device)
    drawn, outputs = [random_inputs(example, seed) for seed in (1, 2)], []
    for inputs in drawn:
        try:
            outputs.append([tensor.clone() for tensor in tensors_in(call(*inputs))])
        except RuntimeError as error:
            shapes = ", ".join(signature_of(tensor) for tensor in inputs)
            msg = f"package {path} does not run on the adapter's inputs ({shapes}): {one_line(error)}"
            raise PackageError(msg) from error
    if not all(bool(torch.isfinite(t).all()) for tensors in outputs for t in tensors if t.is_floating_point()):
        raise PackageError(f"package {path} gives NaN or Inf on random inputs like the adapter's example")
    numbers = [[t for t in tensors if t.is_floating_point() and t.numel()] for tensors in outputs]  # classes may agree
    if numbers[0] and same(*numbers) and not same(*drawn):
        raise PackageError(f"package {path} gives the same outputs whatever its inputs")
    model, static = ((identity.weights, identity.code), not identity.dynamic) if identity else (None, True)
    return Runner(call, graphs=1, package=file_sha256(path)[:32], model=model, static=static, engine=engine.name)


def _check_hash(path: Path, device: torch.device, example: Inputs) -> Manifest | None:
    """Against the manifest that `torchperf compile` wrote, or `<file>.sha256` as the program sha256sum writes it."""
    if manifest_path(path).is_file():
        manifest = check_package(path, None)
        identity = manifest.identity
        name, capability = machine_facts(device)
        here = [torch.__version__, name, capability, *map(signature_of, example)]
        built = [identity.torch, identity.device, identity.capability, *identity.signature]
        if here != built:
            raise PackageError(f"package {path} was built for {'; '.join(built)}; this is {'; '.join(here)}")
        return manifest
    beside = path.with_name(f"{path.name}.sha256")
    digest = file_sha256(path)
    try:
        expected = beside.read_text(encoding="utf-8").split()
    except OSError:
        msg = f"package {path} has neither a manifest nor {beside.name}: `sha256sum {path.name}` makes the latter"
        raise PackageError(msg) from None
    if expected[:1] != [digest]:
        msg = f"package {path} has the SHA-256 {digest}; {beside.name} says {' '.join(expected[:1]) or 'nothing'}"
        raise PackageError(msg)
    return None
