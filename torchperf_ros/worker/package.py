"""AOTInductor packages: a model exported, compiled ahead of time into a `.pt2` file, and loaded in milliseconds."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.core.package_manifest import PackageError
from torchperf_ros.worker.parity import DynamicDims, random_inputs

_FEWEST = 2  # torch.export takes sizes of 0 and 1 for constants


def build_package(
    model: torch.nn.Module, example: tuple[torch.Tensor, ...], dynamic_dims: DynamicDims, path: Path
) -> str:
    """Export and compile a model into the file `path`; returns the hash of the exported graph.

    Raises:
        Exception: whatever torch raises where it cannot export or compile the model.
    """
    program = export(model, example, dynamic_dims)
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return hashlib.sha256(str(program.graph).encode()).hexdigest()


def export(
    model: torch.nn.Module, example: tuple[torch.Tensor, ...], dynamic_dims: DynamicDims
) -> torch.export.ExportedProgram:
    """The model as one graph; dimensions with the same range and place in several inputs are one dimension."""
    dynamic_dims = from_front(dynamic_dims, example)
    shapes: list[dict[int, Any] | None] = [None] * len(example)
    for index, spans in dynamic_dims.items():
        shapes[index] = {
            dim: torch.export.Dim(f"size_{dim}_{low}_{high}", min=low, max=high) for dim, (low, high) in spans.items()
        }
    larger = {
        index: {dim: (_at_least(example[index].shape[dim], high),) * 2 for dim, (_, high) in spans.items()}
        for index, spans in dynamic_dims.items()
    }
    inputs = random_inputs(example, 0, larger) if dynamic_dims else example
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=tuple(shapes) if dynamic_dims else None)


def from_front(dynamic_dims: DynamicDims, example: tuple[torch.Tensor, ...]) -> DynamicDims:
    """The same with every dimension counted from the first, as compilers want them."""
    return {
        index: {dim % example[index].dim(): span for dim, span in spans.items()}
        for index, spans in dynamic_dims.items()
    }


def _at_least(size: int, high: int) -> int:
    return min(max(size, _FEWEST), high)


def load_package(path: Path, device: torch.device) -> Callable[..., Any]:
    """Load a package. Its inputs are those of the model, positional tensors; it does not check their sizes itself.

    The loader is called without its Python wrapper, whose import alone takes longer than a worker has to start.

    Raises:
        PackageError: torch cannot load the file.
    """
    index = -1 if device.type == "cpu" else device.index or 0
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, index)
        specification = loader.get_call_spec()[1]
    except (RuntimeError, IndexError) as error:
        msg = f"package {path} cannot be loaded by torch {torch.__version__}: {str(error).splitlines()[0]}"
        raise PackageError(msg) from error
    return _caller(loader.boxed_run, specification)


def _caller(boxed_run: Callable[[list[torch.Tensor]], list[torch.Tensor]], specification: str) -> Callable[..., Any]:
    from torch.utils._pytree import tree_unflatten, treespec_loads

    tree = treespec_loads(specification)
    if tree.is_leaf():
        return lambda *inputs: boxed_run(list(inputs))[0]
    return lambda *inputs: tree_unflatten(boxed_run(list(inputs)), tree)


def is_exported_program(path: Path) -> bool:
    """Whether a `.pt2` file holds an exported program (which can be built) instead of a compiled package.

    Raises:
        PackageError: it is neither.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        msg = f"package {path} cannot be read: {error}"
        raise PackageError(msg) from error
    if any("/aotinductor/" in name for name in names):
        return False
    if any(name.endswith(("models/model.json", "serialized_exported_program.json")) for name in names):
        return True
    msg = f"package {path} holds neither an AOTInductor package nor an exported program"
    raise PackageError(msg)
