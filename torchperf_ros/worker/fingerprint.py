"""What a model is, in hashes: weights, code, signature, and the machine that a package is built for."""

import contextlib
import dataclasses
import hashlib
import inspect
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.package_manifest import Identity
from torchperf_ros.worker.model_transforms import cpu_flags
from torchperf_ros.worker.parity import DynamicDims

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_OF_FX = frozenset(vars(torch.fx.GraphModule({}, torch.fx.Graph())))


def identify(
    model: torch.nn.Module,
    options: BuildOptions,
    example: tuple[torch.Tensor, ...],
    dynamic_dims: DynamicDims,
    device: torch.device,
) -> Identity:
    """The identity of the package that this model would be built into here; takes as long as hashing its weights.

    Options that a package does not depend on do not count: how it is run, and `dynamic`, as the dimensions do.
    """
    plain = BuildOptions()
    name, capability = machine_facts(device)
    return Identity(
        torch=torch.__version__,
        device=name,
        capability=capability,
        options=replace(options, mode=plain.mode, dynamic=plain.dynamic, cuda_graphs=plain.cuda_graphs).as_dict(),
        signature=[signature_of(tensor) for tensor in example],
        dynamic=declared_dims(dynamic_dims),
        weights=weights_hash(model),
        code=code_hash(model),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
    )


def declared_dims(dynamic_dims: DynamicDims) -> list[list[int]]:
    """As manifests hold them: [input, dimension, smallest, largest]."""
    return [[i, dim, *span] for i, dims in sorted(dynamic_dims.items()) for dim, span in sorted(dims.items())]


def machine_facts(device: torch.device) -> tuple[str, str]:
    """The CUDA device's name and compute capability, or `cpu`, its vector instructions and a hash of all its flags.

    Packages for CPUs are compiled with `-march=native`: another CPU may not know all of their instructions.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return torch.cuda.get_device_name(device), f"{major}.{minor}"
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    return "cpu", f"{torch.backends.cpu.get_cpu_capability()} flags {flags}"


def signature_of(tensor: torch.Tensor) -> str:
    """Type and shape, for example `float32 1x3x256x448`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def weights_hash(model: torch.nn.Module) -> str:
    """Hash of every parameter and buffer: name, type, shape and values."""
    digest = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {signature_of(tensor)};".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def code_hash(model: torch.nn.Module) -> str:
    """Hash of the structure, of attributes, and of the source files of the modules' classes and their bases.

    What lies in further files, and attributes of classes that are not known here, are not seen; the comparison with
    eager at every load would find it.
    """
    digest, files = hashlib.sha256(), set()
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        digest.update(f"{name} {kind.__module__}.{kind.__qualname__} {_attributes(module)};".encode())
        if isinstance(module, torch.fx.GraphModule):  # its class is made at run time: the code is in the graph
            digest.update(module.code.encode())
        for base in kind.__mro__:
            if not base.__module__.startswith(("torch.", "builtins")):
                with contextlib.suppress(TypeError, OSError):  # a class made at run time has no file
                    files.add(inspect.getsourcefile(base) or "")
    for file in sorted(filter(None, files)):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _attributes(module: torch.nn.Module) -> list[str]:
    """What distinguishes this module from others of its class, apart from weights and submodules."""
    own = _OF_FX if isinstance(module, torch.fx.GraphModule) else _OF_EVERY_MODULE
    return sorted(f"{key}={_described(value)}" for key, value in vars(module).items() if key not in own)


def _described(value: object) -> str:
    """The value as text that is the same in every process; of a kind that is not known here only its class."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):  # a constant that is no buffer
        content = _bytes_of(value) if isinstance(value, torch.Tensor) else value.tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, (tuple, list, set, frozenset)):
        items = list(map(_described, value))
        return f"[{', '.join(items if isinstance(value, (tuple, list)) else sorted(items))}]"
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return f"{name}{{{', '.join(f'{key!r}: {_described(item)}' for key, item in value.items())}}}"
    return name
