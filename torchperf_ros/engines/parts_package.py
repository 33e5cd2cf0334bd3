"""Packages of parts: some modules of a model compiled, each kind once with weights for each, the rest in eager."""

import copy
import ctypes
import hashlib
import json
import operator
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchperf_ros.config.build_options import AUTO, BLOCKS, BuildOptions
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.model_transforms import transform, ways_to_compile
from torchperf_ros.engines.package import Aoti, check_linked, check_toolkit, load_package
from torchperf_ros.engines.package_engine import Built, export, nested
from torchperf_ros.engines.parity import check_engine, memory_format
from torchperf_ros.engines.parts import (
    Anatomy,
    Flat,
    Part,
    PartsError,
    export_part,
    flatten,
    named,
    overlapping,
)
from torchperf_ros.frame.errors import one_line
from torchperf_ros.model.stopwatch import time_interleaved

_ABOUT: Final = "parts.json"
_INSIDE: Final = "data/aotinductor/model"  # of what torch packages
_WEIGHTS: Final = "weights"
_ALIGNED: Final = 64  # bytes, of each constant in the file of them (torch, AOTI_CONST_ALIGNMENT)
_VARIANT_SECONDS, _ROUNDS = 0.5, (5, 200)
_MOST_PLANS: Final = 256


class PartCall:
    """Runs a module's compiled code where its arguments are what that was compiled for, else the module itself.

    Attributes:
        path, part: of the module.
        hits, misses: calls that the compiled code has answered; that the module has, in eager.
    """

    def __init__(self, path: str, module: nn.Module, part: Part, run: Callable[..., Any]) -> None:
        """Take the module as it is, whose `forward` is the stand-in, and what runs its tensors."""
        self.path, self.part, self.hits, self.misses = path, part, 0, 0
        self._eager, self._run = module.forward, run
        self._formats = [memory_format(tensor) for tensor in part.example]
        self._plans: dict[Any, bool | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and returns
        """What the module's `forward` would return."""
        leaves, tree = flatten(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        key = tuple([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan(tensors)
        laid_out = self._plans[key]
        if laid_out is None or tree != self.part.tree or constants != self.part.constants:
            self.misses += 1
            return self._eager(*args, **kwargs)
        if not laid_out:
            tensors = [t.contiguous(memory_format=way) for t, way in zip(tensors, self._formats, strict=True)]
        self.hits += 1
        return self._run(*tensors)

    def _plan(self, tensors: Sequence[torch.Tensor]) -> bool | None:
        """Whether the code takes these as they lie in memory, after they are copied (False), or not (None)."""
        if len(tensors) != len(self.part.example):
            return None
        for index, (tensor, like) in enumerate(zip(tensors, self.part.example, strict=True)):
            spans = self.part.dims.get(index, {})
            if tensor.dtype != like.dtype or tensor.dim() != like.dim():
                return None
            for dim, (size, usual) in enumerate(zip(tensor.shape, like.shape, strict=True)):
                low, high = spans.get(dim, (usual, usual))
                if not low <= size <= high:
                    return None
        return all(t.is_contiguous(memory_format=way) for t, way in zip(tensors, self._formats, strict=True))


def holds_parts(path: Path) -> bool:
    """Whether a package is of parts of a model, which it needs to run."""
    return zipfile.is_zipfile(path) and _ABOUT in zipfile.ZipFile(path).namelist()


def open_parts(path: Path, tier: BuiltTier, options: BuildOptions) -> tuple[nn.Module, list[PartCall]]:
    """The tier's model as the options want it with its compiled parts in their places; it shares what is not changed.

    The code of each kind is mapped once; every module of the kind has its own weights in memory.
    """
    calls: dict[int, PartCall] = {}
    with tempfile.TemporaryDirectory(prefix="torchperf_") as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
        about = json.loads(archive.read(_ABOUT))
        way = BuildOptions(precision=options.precision, channels_last=options.channels_last or about["channels_last"])
        with torch.inference_mode(mode=False):
            model = transform(tier.model, way, tier.device, tier.example)
        for number, kind in enumerate(about["kinds"]):
            part = _part_of(kind, tier.device)
            outputs = pytree.treespec_loads(kind["tree_out"]), [(int(i), v) for i, v in kind["constants_out"].items()]
            for place, module_path in enumerate(part.paths):
                own = Path(folder) / f"{number}.{place}" / _INSIDE
                own.mkdir(parents=True)
                for file in (Path(folder) / str(number)).iterdir():
                    if file.name == f"{_WEIGHTS}.{place}":
                        file.rename(own / kind["weights"])
                    elif not file.name.startswith(f"{_WEIGHTS}."):
                        os.link(file, own / file.name)  # the same file to the loader of libraries: it maps it once
                run = nested(load_package(own.parents[2], tier.device), *outputs)
                module = model.get_submodule(module_path)
                calls[id(module)] = PartCall(module_path, module, part, run)
    return _with_calls(model, calls, {}), list(calls.values())


def _with_calls(module: nn.Module, calls: Mapping[int, PartCall], made: dict[int, nn.Module]) -> nn.Module:
    """The module, or where there are parts in it a copy that shares all else, with calls for their `forward`."""
    if id(module) not in made:
        children = {name: child and _with_calls(child, calls, made) for name, child in module._modules.items()}
        changed = copy.copy(module) if id(module) in calls or children != module._modules else module
        if id(module) in calls:  # hooks on the module stay around it, and who looks at its attributes finds them
            changed.forward = calls[id(module)]
        elif changed is not module:
            changed._modules = children
        made[id(module)] = changed
    return made[id(module)]


def _part_of(kind: Mapping[str, Any], device: torch.device) -> Part:
    example = tuple(
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta", memory_format=getattr(torch, layout))
        for dtype, shape, layout in kind["tensors"]
    )
    dims = {int(i): {int(dim): (low, high) for dim, (low, high) in spans.items()} for i, spans in kind["dims"].items()}
    constants = {int(place): value for place, value in kind["constants"].items()}
    return Part(tuple(kind["paths"]), example, dims, pytree.treespec_loads(kind["tree"]), constants)


@dataclass(frozen=True)
class _Kind:
    """One kind of module: torch's package of the first, and of each module the bytes of its constants."""

    part: Part
    package: Path
    weights: list[bytes]
    graph: str
    outputs: Any


@dataclass(frozen=True)
class _Seen:
    """What is about to become code: the graph as text, with its plain values, and its constants in their order."""

    graph: str
    constants: dict[str, torch.Tensor]


class _Enough(Exception):
    """The graph is known, and no code is wanted."""


def build_parts(tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
    """Compile the parts that the options name, in each way that there is, and keep the fastest as the file `path`.

    Raises:
        PartsError: there are no such parts, one cannot be compiled, or one is not what runs.
        Exception: whatever torch raises where it cannot export or compile them.
    """
    runs = tier.inputs_by_size()
    anatomy = Anatomy(tier.model, runs)
    wanted = [part.paths for part in _wanted(anatomy, tier, options.parts)]
    every = [one for paths in wanted for one in paths]
    covered = anatomy.covered(every)
    timed: dict[str, Callable[[], Any]] = {}
    files: dict[str, Path] = {}
    graphs: dict[str, str] = {}
    first_error: Exception | None = None
    try:
        for name, (model, frozen) in ways_to_compile(tier.model, tier.example, tier.device).items():
            file = files[name] = path.with_name(f"{path.stem}.{len(files)}.pt2")
            try:
                variant = anatomy if model is tier.model else Anatomy(model, runs)
                with tempfile.TemporaryDirectory(prefix="torchperf_") as folder:
                    kinds = [kind for paths in wanted for kind in _kinds(variant, paths, Path(folder), frozen=frozen)]
                    graphs[name] = _write(file, kinds, channels_last=model is not tier.model)
                call, calls = open_parts(file, tier, BuildOptions(channels_last=model is not tier.model))
                with torch.inference_mode():
                    for inputs in runs:
                        call(*inputs)
                    if idle := [one.path for one in calls if one.misses or not one.hits]:
                        raise PartsError(f"parts: {idle[0]} is called in another way than by its name, or otherwise")
                    check_engine(tier.model, call, tier.example, tier.dims, options.precision, 2, tier.scoring)
                timed[name] = partial(call, *tier.example)
            except Exception as error:  # the compiler's boundary: another way may do
                first_error = first_error or error
        if first_error is not None and not timed:
            raise first_error
        with torch.inference_mode():
            found = time_interleaved(timed, tier.device, seconds=_VARIANT_SECONDS, rounds=_ROUNDS)
        times_ms = {name: timing.median_ms for name, timing in found.items()}
        ranked = sorted(times_ms, key=lambda name: times_ms[name])
        files[ranked[0]].rename(path)
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)
    rest = f"{covered:.0%} of eager's time; the rest runs in eager"
    words = "; ".join(named(paths) + (f" ({len(paths)} alike)" if len(paths) > 1 else "") for paths in wanted)
    return Built(graphs[ranked[0]], variants_ms={name: times_ms[name] for name in ranked}, parts=f"{words}: {rest}")


def _wanted(anatomy: Anatomy, tier: BuiltTier, parts: str) -> list[Part]:
    if parts == BLOCKS:
        return anatomy.blocks()
    if parts != AUTO:
        paths = [path.strip() for path in parts.split(",")]
        if one := overlapping(paths):
            raise PartsError(f"parts: {one} is named twice, or lies within another part")
        return anatomy.parts(paths)
    try:
        export(tier.model, tier.example, tier.dims)
    except Exception:  # the exporter's boundary: that is why there are parts
        found, refused = anatomy.exporting()
        if not found:
            why = next((f": {path}: {text}" for path, text in refused.items()), "")
            raise PartsError(f"no part of the model that takes 2 % of its time exports{why}") from None
        return anatomy.parts(found)
    raise PartsError("the model exports as a whole")


def _kinds(anatomy: Anatomy, paths: Sequence[str], folder: Path, *, frozen: bool) -> list[_Kind]:
    """Compile the first of some modules, and others only where their graph comes out as another one.

    Of all that have the first one's graph only the constants are taken, as the compiler has folded and packed them.
    """
    left, kinds = list(paths), list[_Kind]()
    while left:
        if len(left) < len(paths) < 2 * (len(kinds) + 1):  # hardly one of them is like another
            raise PartsError(f"{named(paths)} differ in more than the values of their weights")
        part, package = anatomy.part(left), folder / f"{left[0]}.pt2"
        first = _compile(anatomy.modules[left[0]], part, package, frozen=frozen)
        check_linked(package)
        with zipfile.ZipFile(package) as archive:
            blobs = [name for name in archive.namelist() if name.endswith(".blob")]
            weights = [archive.read(name) for name in blobs]
        alike, others = left[:1], list[str]()
        for path in left[1:]:
            seen = _compile(anatomy.modules[path], part, None, frozen=frozen)
            (alike if seen.graph == first.graph else others).append(path)
            weights += [_bytes_of(seen.constants)] if alike[-1] == path else []
        if len(alike) > 1 and weights[0] != _bytes_of(first.constants):
            raise PartsError(f"torch {torch.__version__} keeps the constants of {left[0]} in a way that is not known")
        args, kwargs = part.arguments(part.example)
        with torch.no_grad():
            outputs = anatomy.modules[left[0]].forward(*args, **kwargs)
        kinds.append(_Kind(replace(part, paths=tuple(alike)), package, weights, first.graph, outputs))
        left = others
    return kinds


def _compile(module: nn.Module, part: Part, path: Path | None, *, frozen: bool) -> _Seen:
    """Compile a module to the file; without one stop where the graph is final, before there is code."""
    seen: list[_Seen] = []

    def look(graph: torch.fx.Graph) -> None:
        targets = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        constants = {target: operator.attrgetter(target)(graph.owning_module) for target in targets}
        seen.append(_Seen(str(graph), constants))
        if path is None:
            raise _Enough

    configs = {
        "freezing": frozen,
        "always_keep_tensor_constants": True,  # a short one would become part of the code
        "aot_inductor.package_constants_on_disk_format": "binary_blob" if _has_weights(module) else None,
        "post_grad_custom_post_pass": look,
    }
    program = export_part(Flat(module, part), part)
    try:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path or "none.pt2"), inductor_configs=configs
            )
    except Exception:
        if path is not None or not seen:
            raise
    return seen[-1]


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _bytes_of(constants: Mapping[str, torch.Tensor]) -> bytes:
    """Constants as torch lays them out in a file of weights (`AotCodeCompiler.compile`, torch 2.13)."""
    found = bytearray()
    for tensor in constants.values():
        if tensor.is_mkldnn:  # packed for the machine's kernels
            size_bytes = torch.ops.mkldnn._nbytes(tensor)
            content = ctypes.string_at(torch.ops.mkldnn.data_ptr(tensor), size_bytes)
        else:
            storage = tensor.untyped_storage().cpu()
            content = ctypes.string_at(storage.data_ptr(), storage.nbytes())
        found += content + bytes(-len(content) % _ALIGNED)
    return bytes(found)


def _write(path: Path, kinds: Sequence[_Kind], *, channels_last: bool) -> str:
    """Write the file of all kinds; returns the hash of their graphs."""
    about = []
    with zipfile.ZipFile(path, "w") as archive:
        for number, kind in enumerate(kinds):
            with zipfile.ZipFile(kind.package) as package:
                inside = {Path(name).name: name for name in package.namelist() if f"/{_INSIDE}/" in name}
                for name, member in inside.items():
                    if not name.endswith((".blob", ".cpp")):
                        archive.writestr(f"{number}/{name}", package.read(member))
            for place, weights in enumerate(kind.weights):
                archive.writestr(f"{number}/{_WEIGHTS}.{place}", weights)
            leaves, tree = pytree.tree_flatten(kind.outputs)
            about.append({
                "paths": kind.part.paths, "weights": next((name for name in inside if name.endswith(".blob")), ""),
                "tensors": [
                    [str(t.dtype).removeprefix("torch."), list(t.shape), str(memory_format(t)).removeprefix("torch.")]
                    for t in kind.part.example
                ],
                "dims": kind.part.dims, "tree": pytree.treespec_dumps(kind.part.tree),
                "constants": kind.part.constants, "tree_out": pytree.treespec_dumps(tree),
                "constants_out": {n: leaf for n, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
            })  # fmt: skip
        archive.writestr(_ABOUT, json.dumps({"channels_last": channels_last, "kinds": about}))
    return hashlib.sha256("\n".join(kind.graph for kind in kinds).encode()).hexdigest()


class AotiOfParts(Aoti):
    """The same, of a model's parts where the options name some."""

    parts = True

    def convert(self, tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
        """Compile the parts; the whole where `blocks` or `auto` cannot be done, and say why."""
        if not options.parts:
            return super().convert(tier, options, path)
        if tier.device.type == "cuda":
            check_toolkit()
        try:
            return build_parts(tier, options, path)
        except Exception as error:  # the compiler's boundary: the whole may go
            if options.parts not in {AUTO, BLOCKS}:
                raise
            why = one_line(error)
        return replace(super().convert(tier, options, path), parts=f"the whole model: {why}")
