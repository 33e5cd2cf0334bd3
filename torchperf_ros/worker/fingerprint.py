"""What a model is, in hashes: weights, code, signature, and the machine that a package is built for."""

import contextlib
import hashlib
import inspect
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.package_manifest import Identity
from torchperf_ros.worker.parity import DynamicDims

_PLAIN = (bool, int, float, str, type(None))


def identify(
    model: torch.nn.Module,
    options: BuildOptions,
    example: tuple[torch.Tensor, ...],
    dynamic_dims: DynamicDims,
    device: torch.device,
) -> Identity:
    """The identity of the package that this model would be built into here; takes as long as hashing its weights."""
    name, capability = machine_facts(device)
    return Identity(
        torch=torch.__version__,
        device=name,
        capability=capability,
        options=options.as_dict(),
        signature=[signature_of(tensor) for tensor in example],
        dynamic=[[i, dim, *span] for i, dims in sorted(dynamic_dims.items()) for dim, span in sorted(dims.items())],
        weights=weights_hash(model),
        code=code_hash(model),
    )


def machine_facts(device: torch.device) -> tuple[str, str]:
    """Name and capability: `cpu` and its instruction set, or the CUDA device's name and compute capability."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return torch.cuda.get_device_name(device), f"{major}.{minor}"
    return "cpu", torch.backends.cpu.get_cpu_capability()


def signature_of(tensor: torch.Tensor) -> str:
    """Type and shape, for example `float32 1x3x256x448`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))}"


def weights_hash(model: torch.nn.Module) -> str:
    """Hash of every parameter and buffer: name, type, shape and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name} {signature_of(tensor)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def code_hash(model: torch.nn.Module) -> str:
    """Hash of the structure, of plain attributes, and of the source files that the modules' classes come from.

    What lies in further files is not seen; the comparison with eager at every load would find it.
    """
    digest, files = hashlib.sha256(), set()
    for name, module in model.named_modules():
        kind = type(module)
        digest.update(f"{name} {kind.__module__}.{kind.__qualname__} {_plain_attributes(module)};".encode())
        if not kind.__module__.startswith("torch."):
            with contextlib.suppress(TypeError, OSError):  # a class made at run time has no file; its structure counts
                files.add(inspect.getsourcefile(kind) or "")
    for file in sorted(filter(None, files)):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _plain_attributes(module: torch.nn.Module) -> list[tuple[str, Any]]:
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and _is_plain(v)}
    return sorted((key, repr(value)) for key, value in plain.items())


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))
