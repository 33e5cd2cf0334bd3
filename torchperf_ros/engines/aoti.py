"""Engine aoti.

A model exported, compiled ahead of time by AOTInductor into a `.pt2` file, loaded in milliseconds.
"""

import ctypes
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from torchperf_ros.engines.built_tier import BuiltTier, Call, Inputs
from torchperf_ros.engines.engine import EngineUnavailable, name_torch_unquoted
from torchperf_ros.engines.model_transforms import int8_in_package, quantise_static, transform
from torchperf_ros.engines.package_engine import (
    Built,
    PackageEngine,
    built_of,
    export,
    nested,
    written_to,
)
from torchperf_ros.engines.parity import DynamicDims
from torchperf_ros.engines.stopwatch import time_interleaved
from torchperf_ros.settings.build_options import INT8_STATIC, BuildOptions
from torchperf_ros.workers.package_manifest import PackageError

_MADV_DONTNEED: Final = 4  # sys/mman.h
_READ_ONLY: Final = re.compile(
    r"^(\w+)-(\w+) r--p [^\n]*/aotinductor/[^\n]*\n(?:[A-Z][^\n]*\n)*?Anonymous: +0 kB", re.MULTILINE
)  # of the files that a package unpacks to
_CUDA_HEADER = "cuda_runtime_api.h"
_CPP_LIBRARY = b"libstdc++.so"
_VARIANT_SECONDS, _ROUNDS = 0.5, (5, 200)


class Aoti(PackageEngine):
    """AOTInductor, which is part of torch."""

    name = "aoti"
    keeps_nest = True

    def convert(self, tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
        if options.precision != INT8_STATIC:
            return build_package(tier.model, tier.example, tier.dims, path)
        if why := tier.why_uncalibrated():
            raise EngineUnavailable(f"{INT8_STATIC}: {why}")
        graph = export(tier.model, tier.example, tier.dims).module(check_guards=False)
        quantised = quantise_static(graph, tier.calibration())
        return build_package(quantised, tier.example, tier.dims, path, frozen_only=True)

    def in_int8(self, path: Path) -> Counter[str]:
        return int8_in_package(path)

    def open(self, path: Path, options: BuildOptions, device: torch.device) -> Call:
        return load_package(path, device)


def build_package(
    model: torch.nn.Module,
    example: Inputs,
    dynamic_dims: DynamicDims,
    path: Path,
    *,
    frozen_only: bool = False,
) -> Built:
    """Export a model, compile it in each of its variants, and keep the fastest as the file `path`.

    `frozen_only`: of int8_static Inductor makes int8 kernels where it packs weights, and nowhere else.

    Raises:
        PackageError: what compiles for CUDA is not installed.
        Exception: torch's error, which cannot export or compile the model.
    """
    if any(tensor.is_cuda for tensor in example):
        check_toolkit()
    device = next((tensor.device for tensor in example), torch.device("cpu"))
    calls: dict[str, Callable[[], Any]] = {}
    files: dict[str, Path] = {}
    errors: list[Exception] = []
    name_torch_unquoted()
    program = export(model, example, dynamic_dims)
    try:
        variants = {"frozen": (model, True)} if frozen_only else _variants(model, program, example, device)
        for name, (variant, frozen) in variants.items():
            file = files[name] = path.with_name(f"{path.stem}.{len(files)}.pt2")
            try:
                exported = program if variant is model else export(variant, example, dynamic_dims)
                with torch.no_grad():  # where gradients are recorded, Inductor freezes nothing, in silence
                    torch._inductor.aoti_compile_and_package(
                        exported, package_path=str(file), inductor_configs={"freezing": frozen}
                    )
                check_linked(file)
                calls[name] = partial(load_package(file, device), *example)
            except Exception as error:  # the compiler's boundary: another variant may do
                errors.append(error)
        if not calls:
            raise errors[0]
        with torch.inference_mode():
            found = time_interleaved(calls, device, seconds=_VARIANT_SECONDS, rounds=_ROUNDS)
        times_ms = {name: timing.median_ms for name, timing in found.items()}
        ranked = sorted(times_ms, key=lambda name: times_ms[name])
        files[ranked[0]].rename(path)
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)
    return built_of(program, variants_ms={name: times_ms[name] for name in ranked})


def _variants(
    model: torch.nn.Module, program: torch.export.ExportedProgram, example: Inputs, device: torch.device
) -> dict[str, tuple[torch.nn.Module, bool]]:
    """The ways to compile a model out of which the fastest is kept: name -> model, frozen.

    `frozen`: Inductor folds what follows from weights alone, batch normalisation too, and packs weights as
    the machine's kernels want them. With convolutions that pays, so that it is the memory format that is
    open; without, packed weights may be slower for the few rows that a vehicle has, and `plain` is the
    other one. A model without weights has nothing to freeze; of one that writes to its buffers, Inductor
    would freeze what changes.
    """
    if not program.state_dict or "buffers" in written_to(program):
        return {"plain": (model, False)}
    images = transform(model, BuildOptions(channels_last=True), device, example)
    if images is model:
        return {"frozen": (model, True), "plain": (model, False)}
    return {"frozen": (model, True), "frozen channels_last": (images, True)}


def check_toolkit() -> None:
    """Raise a `PackageError` before the long export where CUDA's headers for a package are missing."""
    from torch.utils import cpp_extension

    try:
        folders = [
            *cpp_extension.include_paths("cuda"),
            "/usr/include",
        ]  # Debian's, which the compiler knows itself
    except OSError:  # no toolkit at all
        folders = []
    if not any(Path(folder, _CUDA_HEADER).is_file() for folder in folders):
        where = ", ".join(folders) or "no toolkit was found"
        raise PackageError(
            f"packages for CUDA cannot be built here: {_CUDA_HEADER} is missing ({where}); install a CUDA"
            " toolkit or set CUDA_HOME, or build them on a machine with the same card and torch"
        )


def check_linked(path: Path) -> None:
    """A `PackageError` for a package with a C++ library of its own.

    Beside torch's, loading it ends the process.
    """
    with zipfile.ZipFile(path) as package:
        libraries = [package.read(name) for name in package.namelist() if name.endswith(".so")]
    if not all(_CPP_LIBRARY in library for library in libraries):
        raise PackageError(
            f"the compiler {os.environ.get('CXX', 'g++')} has linked a C++ library of its own into the"
            " package, which would crash beside torch's; set CXX and CC to one that links the system's,"
            " such as /usr/bin/g++"
        )


def load_package(path: Path, device: torch.device) -> Callable[..., Any]:
    """Load a package, which takes the model's inputs, positional tensors, and does not check their sizes.

    The loader is called without its Python wrapper, whose import alone takes longer than a worker has to
    start. It runs for one thread: for several it would ask the device whether earlier runs are over, which
    no capture as a CUDA graph permits.
    """
    index = -1 if device.type == "cpu" else device.index or 0
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
    tree = pytree.treespec_loads(loader.get_call_spec()[1])
    _give_back_constants()
    return nested(lambda *inputs: loader.boxed_run(list(inputs)), tree)


def _give_back_constants() -> None:
    """Give back the pages of packages' constants.

    The loader has copied them, and the file's are not read again.

    That was as much memory again as all weights take, in each worker. Only mappings count that cannot be
    written to and were not (`Anonymous`, see proc(5)): a later read of one gets its pages from the file.
    """
    try:
        mappings = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for start, end in _READ_ONLY.findall(mappings):
        first, behind = int(start, 16), int(end, 16)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(behind - first), _MADV_DONTNEED)
