"""A user's own `.pt2` file in place of what the adapter builds: a compiled package, or an exported program."""

from collections.abc import Sequence
from pathlib import Path

import torch

from torchperf_ros.core.package_manifest import Identity, PackageError, check_package, file_sha256, manifest_path
from torchperf_ros.worker.engine import Runner
from torchperf_ros.worker.fingerprint import declared_dims, machine_facts, signature_of
from torchperf_ros.worker.output_check import tensors_in
from torchperf_ros.worker.package import is_exported_program, load_package
from torchperf_ros.worker.parity import DynamicDims, random_inputs


def load_ready_package(
    path: Path, device: torch.device, example: tuple[torch.Tensor, ...], dynamic_dims: DynamicDims
) -> tuple[torch.nn.Module | None, Runner]:
    """The model in an exported program, which is then built like an adapter's; or None and the package, ready to run.

    Only a manifest says that a package takes other sizes than the example's.

    Args:
        path: of the `.pt2` file.
        device: where it runs.
        example: the adapter's example inputs, on the device.
        dynamic_dims: the dimensions that vary, as the adapter declares.

    Raises:
        PackageError: it is missing, its hash or machine does not match, or it does not run on the example's shapes.
    """
    if not path.is_file():
        msg = f"package {path} is not there; parameter packages has to name a .pt2 file, or be empty"
        raise PackageError(msg)
    identity = _check_hash(path, device, example)
    if is_exported_program(path):
        module = torch.export.load(str(path)).module()
        return module, Runner(module)
    if identity and identity.dynamic not in ([], declared_dims(dynamic_dims)):
        msg = f"package {path} was built for the dynamic dimensions {identity.dynamic}; the adapter declares"
        raise PackageError(f"{msg} {declared_dims(dynamic_dims)}, each [input, dimension, smallest, largest]")
    call = load_package(path, device)
    outputs = []
    for seed in (1, 2):
        inputs = random_inputs(example, seed)
        try:
            outputs.append([tensor.clone() for tensor in tensors_in(call(*inputs))])
        except RuntimeError as error:
            shapes = ", ".join(signature_of(tensor) for tensor in inputs)
            msg = f"package {path} does not run on the adapter's inputs ({shapes}): {str(error).splitlines()[0]}"
            raise PackageError(msg) from error
    if not all(bool(torch.isfinite(t).all()) for tensors in outputs for t in tensors if t.is_floating_point()):
        msg = f"package {path} gives NaN or Inf on random inputs like the adapter's example"
        raise PackageError(msg)
    drawn = [random_inputs(example, seed) for seed in (1, 2)]
    numbers = [[t for t in tensors if t.is_floating_point() and t.numel()] for tensors in outputs]  # classes may agree
    if numbers[0] and _same(*numbers) and not _same(*drawn):
        msg = f"package {path} gives the same outputs whatever its inputs"
        raise PackageError(msg)
    model, static = ((identity.weights, identity.code), not identity.dynamic) if identity else (None, True)
    return None, Runner(call, graphs=1, package=file_sha256(path)[:32], model=model, static=static)


def _same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _check_hash(path: Path, device: torch.device, example: tuple[torch.Tensor, ...]) -> Identity | None:
    """Against the manifest that `torchperf compile` wrote, or `<file>.sha256` as the program sha256sum writes it."""
    if manifest_path(path).is_file():
        identity = check_package(path, None).identity
        name, capability = machine_facts(device)
        here = [torch.__version__, name, capability, *map(signature_of, example)]
        built = [identity.torch, identity.device, identity.capability, *identity.signature]
        if here != built:
            msg = f"package {path} was built for {'; '.join(built)}; this is {'; '.join(here)}"
            raise PackageError(msg)
        return identity
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
