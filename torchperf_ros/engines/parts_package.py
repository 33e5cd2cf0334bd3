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

from torchperf_ros.config.build_options import AUTO, BLOCKS, INT8_STATIC, BuildOptions
from torchperf_ros.engines.built_tier import BuiltTier, Call
from torchperf_ros.engines.model_transforms import transform
from torchperf_ros.engines.package import Aoti, check_linked, check_toolkit, load_flat, name_torch_unquoted
from torchperf_ros.engines.package_engine import Built, export, nested
from torchperf_ros.engines.parity import DynamicDims, check_engine, memory_format
from torchperf_ros.engines.parts import Anatomy, Part, PartsError, export_part, flatten, named, split, tensors_of
from torchperf_ros.frame.errors import one_line
from torchperf_ros.model.stopwatch import time_interleaved

_ABOUT: Final = "parts.json"
_INSIDE: Final = "data/aotinductor/model"  # of what torch packages
_WEIGHTS: Final = "weights."
_ALIGNED: Final = 64  # bytes, of each constant in the file of them (torch, AOTI_CONST_ALIGNMENT)
_MOST_PLANS: Final = 256
_IMAGE_RANK: Final = 4
_PRODUCTS_SECONDS: Final = 0.5
_ROUNDS: Final = (5, 200)

_Product = tuple[int, torch.Tensor]


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
        self._plain = [True for _ in part.example if not part.constants and part.tree == flatten(part.example, {})[1]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and returns
        """What the module's `forward` would return."""
        tensors: Sequence[torch.Tensor] = args
        if self._plain and not kwargs and [isinstance(each, torch.Tensor) for each in args] == self._plain:
            alike = True  # nearly all modules are called so, and a nest takes longer than all else here
        else:
            leaves, tree = flatten(args, kwargs)
            tensors, constants = split(leaves)
            alike = tree == self.part.tree and constants == self.part.constants
        key = tuple([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan(tensors)
        laid_out = self._plans[key]
        if laid_out is None or not alike:
            self.misses += 1
            return self._eager(*args, **kwargs)
        if not laid_out:
            tensors = [t.contiguous(memory_format=way) for t, way in zip(tensors, self._formats, strict=True)]
        self.hits += 1
        return self._run(*tensors)

    def _plan(self, tensors: Sequence[torch.Tensor]) -> bool | None:
        """Whether the code takes these as they lie in memory, after they are copied (False), or not (None)."""
        if [(t.dtype, t.dim()) for t in tensors] != [(t.dtype, t.dim()) for t in self.part.example]:
            return None
        for index, (tensor, like) in enumerate(zip(tensors, self.part.example, strict=True)):
            spans = self.part.dims.get(index, {})
            for dim, (size, usual) in enumerate(zip(tensor.shape, like.shape, strict=True)):
                low, high = spans.get(dim, (usual, usual))
                if not low <= size <= high:
                    return None
        return all(t.is_contiguous(memory_format=way) for t, way in zip(tensors, self._formats, strict=True))


def holds_parts(path: Path) -> bool:
    """Whether a package is of parts of a model, which it needs to run."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return _ABOUT in archive.namelist()


def open_parts(path: Path, tier: BuiltTier, options: BuildOptions) -> tuple[Call, list[PartCall]]:
    """The tier's model as the options want it with its compiled parts in their places; it shares what is not changed.

    The code of each kind is mapped once; every module of the kind has its own weights in memory. Outputs of a model
    whose parts have channels last are contiguous, as adapters may `view` them.
    """
    calls: dict[int, PartCall] = {}
    with tempfile.TemporaryDirectory(prefix="torchperf_") as name, zipfile.ZipFile(path) as archive:
        archive.extractall(name)
        way = BuildOptions(precision=options.precision, channels_last=options.channels_last)
        with torch.inference_mode(mode=False):
            model = transform(tier.model, way, tier.device, tier.example)
        for kind in json.loads(archive.read(_ABOUT)):
            part, outputs = _part_of(kind), kind["outputs"]
            tree, constants = pytree.treespec_loads(outputs["tree"]), outputs["constants"].items()
            for place, module_path in enumerate(part.paths):
                inside = Path(name) / f"{part.paths[0]} {place}" / _INSIDE
                inside.mkdir(parents=True)
                for file in (Path(name) / part.paths[0]).iterdir():
                    if file.name == f"{_WEIGHTS}{place}":
                        file.rename(inside / kind["weights"])
                    elif not file.name.startswith(_WEIGHTS):
                        os.link(file, inside / file.name)  # one file to the loader of libraries, which maps it once
                run = nested(load_flat(inside.parents[2], tier.device)[0], tree, [(int(i), v) for i, v in constants])
                module = model.get_submodule(module_path)
                calls[id(module)] = PartCall(module_path, module, part, run)
    images = any(memory_format(each) is torch.channels_last for one in calls.values() for each in one.part.example)
    changed = _with_calls(model, calls, {}, images=images)
    if not images:
        return changed, list(calls.values())
    contiguous = partial(pytree.tree_map_only, torch.Tensor, torch.Tensor.contiguous)
    return lambda *inputs: contiguous(changed(*inputs)), list(calls.values())


def _with_calls(
    module: nn.Module, calls: Mapping[int, PartCall], made: dict[int, nn.Module], *, images: bool
) -> nn.Module:
    """The module, or where there are parts in it a copy that shares all else, with calls for their `forward`.

    `images`: parts want channels last, and a convolution in eager gives what its weights have: so one has them, too.
    """
    if id(module) not in made:
        children = {
            name: child and _with_calls(child, calls, made, images=images) for name, child in module._modules.items()
        }
        convolves = images and type(module) is nn.Conv2d and id(module) not in calls
        weight = module._parameters.get("weight") if convolves else None
        changes = id(module) in calls or weight is not None or children != module._modules
        changed = copy.copy(module) if changes else module
        if id(module) in calls:  # hooks on the module stay around it, and who looks at its attributes finds them
            changed.forward = calls[id(module)]
        elif weight is not None:
            laid_out = nn.Parameter(weight.detach().contiguous(memory_format=torch.channels_last), requires_grad=False)
            changed._parameters = {**module._parameters, "weight": laid_out}
        elif changed is not module:
            changed._modules = children
        made[id(module)] = changed
    return made[id(module)]


def build_parts(tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
    """Compile the parts that the options name to the file `path`.

    Of the ways that there are to compile a whole only the one is taken that usually is the fastest: around convolutions
    frozen, with channels last from the first part to the last; else frozen only where packed weights are faster here.

    Raises:
        PartsError: there are no such parts, one cannot be compiled, or one is not what runs.
    """
    runs = tier.inputs_by_size()
    anatomy = Anatomy(tier.model, runs)
    wanted = [part.paths for part in _wanted(anatomy, tier, options.parts)]
    every = [one for paths in wanted for one in paths]
    covered = anatomy.covered(every)
    with tempfile.TemporaryDirectory(prefix="torchperf_") as folder:
        frozen = options.precision == INT8_STATIC
        kinds = [kind for paths in wanted for kind in _kinds(anatomy, paths, Path(folder), frozen_only=frozen)]
        _write(path, kinds)
    call, calls = open_parts(path, tier, BuildOptions())  # the model is in its precision already
    with torch.inference_mode():
        for inputs in runs:
            call(*inputs)
        if idle := [one.path for one in calls if one.misses or not one.hits]:
            raise PartsError(f"parts: {idle[0]} is run in another way than by its name in the model")
        check_engine(tier.model, call, tier.example, tier.dims, options.precision, 2, tier.scoring)
    words = "; ".join(named(paths) + (f" ({len(paths)} alike)" if len(paths) > 1 else "") for paths in wanted)
    graph = hashlib.sha256("\n".join(kind.graph for kind in kinds).encode()).hexdigest()
    return Built(graph, parts=f"{words}: {covered:.0%} of eager's time; the rest runs in eager")


def _wanted(anatomy: Anatomy, tier: BuiltTier, parts: str) -> list[Part]:
    if parts == BLOCKS:
        return anatomy.blocks()
    if parts != AUTO:
        return anatomy.parts([path.strip() for path in parts.split(",")])
    try:
        export(tier.model, tier.example, tier.dims)
    except Exception as error:  # the exporter's boundary: that is why there are parts
        if found := anatomy.exporting():
            return anatomy.parts(list(found))
        raise PartsError("no part of it that takes 2 % of its time exports either") from error
    raise PartsError("it exports as a whole")


@dataclass(frozen=True)
class _Kind:
    """One kind of module: torch's package of the first, and of each module the bytes of its constants."""

    part: Part
    package: Path
    weights: list[bytes]
    graph: str
    outputs: dict[str, Any]


def _kinds(anatomy: Anatomy, paths: Sequence[str], folder: Path, *, frozen_only: bool) -> list[_Kind]:
    """Compile the first of some modules, and others only where their graph comes out as another one.

    Of all that have the first one's graph only the constants are taken, as the compiler has folded and packed them.
    `frozen_only`: of int8_static Inductor makes int8 kernels where it packs weights, and nowhere else.
    """
    left, kinds = list(paths), list[_Kind]()
    while left:
        if len(left) < len(paths) < 2 * (len(kinds) + 1):  # hardly one of them is like another
            raise PartsError(f"{named(paths)} differ in more than the values of their weights")
        first, package = anatomy.modules[left[0]], folder / f"{left[0]}.pt2"
        part = _laid_out(anatomy.part(left), first)
        frozen = bool(tensors_of(first))
        if frozen and not frozen_only and part.example[0].device.type == "cpu" and not _has_convolutions(first):
            products = _compile(first, part, None, frozen=False).products
            frozen = not products or _packing_pays(products)
        compiled = _compile(first, part, package, frozen=frozen)
        check_linked(package)
        with zipfile.ZipFile(package) as archive:
            weights = [archive.read(name) for name in archive.namelist() if name.endswith(".blob")]
        alike, others = left[:1], list[str]()
        for path in left[1:]:
            other = _compile(anatomy.modules[path], part, None, frozen=frozen)
            same = other.text == compiled.text
            (alike if same else others).append(path)
            weights += [_bytes_of(other.constants)] if same else []
        if len(alike) > 1 and weights[0] != _bytes_of(compiled.constants):
            raise PartsError(f"torch {torch.__version__} keeps the constants of {left[0]} in a way that is not known")
        kinds.append(_Kind(replace(part, paths=tuple(alike)), package, weights, compiled.text, compiled.outputs))
        left = others
    return kinds


def _laid_out(part: Part, module: nn.Module) -> Part:
    """The part with images as the compiler's convolutions want them."""
    if not _has_convolutions(module):
        return part
    last = torch.channels_last
    images = tuple(t.contiguous(memory_format=last) if t.dim() == _IMAGE_RANK else t for t in part.example)
    return replace(part, example=images)


def _has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(each, nn.Conv2d) for each in module.modules())


@dataclass(frozen=True)
class _Compiled:
    """What the compiler has made of a module.

    Attributes:
        text: the final graph with all plain values that it holds, and how outputs are nested.
        constants: of the graph, in their order.
        outputs: how they are nested.
        products: see `_products`; none where weights are packed.
    """

    text: str
    constants: dict[str, torch.Tensor]
    outputs: dict[str, Any]
    products: list[_Product]


def _compile(module: nn.Module, part: Part, path: Path | None, *, frozen: bool) -> _Compiled:
    """Compile a module to the file; without one stop where the graph is final, before there is code.

    `frozen`: what follows from weights alone is folded, and weights are packed for the machine's kernels.
    """
    seen: list[tuple[str, dict[str, torch.Tensor], list[_Product]]] = []

    def look(graph: torch.fx.Graph) -> None:
        """The compiler's last pass over the graph."""
        targets = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        constants = {each: operator.attrgetter(each)(graph.owning_module) for each in targets}
        seen.append((str(graph), constants, _products(graph, constants)))
        if path is None:
            raise PartsError("no code is wanted")

    configs = {
        "freezing": frozen,
        "always_keep_tensor_constants": True,  # a short one would become part of the code
        "aot_inductor.package_constants_on_disk_format": "binary_blob" if tensors_of(module) else None,
        "post_grad_custom_post_pass": look,
    }
    program = export_part(module, part)
    with torch.no_grad():
        leaves, tree = pytree.tree_flatten(part.run(module, [tensor.clone() for tensor in part.example]))
        try:
            name = str(path or "no_code.pt2")
            name_torch_unquoted()
            torch._inductor.aoti_compile_and_package(program, package_path=name, inductor_configs=configs)
        except Exception:
            if path is not None or not seen:
                raise
    outputs = {"tree": pytree.treespec_dumps(tree), "constants": split(leaves)[1]}
    graph, constants, products = seen[-1]
    return _Compiled(f"{graph}\n{json.dumps(outputs)}", constants, outputs, products)


def _products(graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]) -> list[_Product]:
    """The products of a matrix with weights as the model has them: how many rows the matrix has, and the weights."""
    found = []
    for node in graph.nodes:
        if node.target in {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}:
            matrix, turned = node.args[-2:]
            weight = turned.target is torch.ops.aten.permute.default and constants.get(str(turned.args[0].target))
            if isinstance(weight, torch.Tensor):
                size = matrix.meta["val"].shape[0]
                rows = size.node.hint if isinstance(size, torch.SymInt) else size
                found += [] if rows is None else [(rows, weight)]  # None: it depends on the values of tensors
    return found


def _packing_pays(products: Sequence[_Product]) -> bool:
    """Whether weights that are packed for the CPU's kernels, as freezing does, make products faster on this machine.

    They are timed alone, in both ways, which takes a tenth of what a compiler takes. For the few rows that a vehicle
    has, packed weights may be slower: a block of 128 tokens took a quarter longer on an AMD processor.
    """
    packed, plain = list[Callable[[], Any]](), list[Callable[[], Any]]()
    for rows, weight in products:
        matrix = torch.randn(rows, weight.shape[1], dtype=weight.dtype)
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        packed.append(partial(torch.ops.mkldnn._linear_pointwise, matrix, laid_out, None, "none", [], ""))
        plain.append(partial(torch.mm, matrix, weight.t()))
    calls = {"packed": lambda: [each() for each in packed], "plain": lambda: [each() for each in plain]}
    with torch.no_grad():
        times = time_interleaved(calls, torch.device("cpu"), seconds=_PRODUCTS_SECONDS, rounds=_ROUNDS)
    return times["packed"].median_ms <= times["plain"].median_ms


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


def _write(path: Path, kinds: Sequence[_Kind]) -> None:
    about = []
    with zipfile.ZipFile(path, "w") as archive:
        for kind in kinds:
            part, blob = kind.part, ""
            with zipfile.ZipFile(kind.package) as package:
                for member in package.namelist():
                    name = Path(member).name
                    blob = name if name.endswith(".blob") else blob
                    if f"/{_INSIDE}/" in member and not name.endswith((".blob", ".cpp")):
                        archive.writestr(f"{part.paths[0]}/{name}", package.read(member))
            for place, weights in enumerate(kind.weights):
                archive.writestr(f"{part.paths[0]}/{_WEIGHTS}{place}", weights)
            tensors = [[str(each).removeprefix("torch.") for each in (tensor.dtype, memory_format(tensor))]
                       + [list(tensor.shape)] for tensor in part.example]  # fmt: skip
            about.append({
                "paths": part.paths, "weights": blob, "tensors": tensors, "dims": part.dims,
                "tree": pytree.treespec_dumps(part.tree), "constants": part.constants, "outputs": kind.outputs,
            })  # fmt: skip
        archive.writestr(_ABOUT, json.dumps(about))


def _part_of(kind: Mapping[str, Any]) -> Part:
    """The part of a kind as `_write` has noted it, with tensors that only have their layout."""
    example = tuple(
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta", memory_format=getattr(torch, layout))
        for dtype, layout, shape in kind["tensors"]
    )
    dims = {int(i): {int(dim): (low, high) for dim, (low, high) in spans.items()} for i, spans in kind["dims"].items()}
    constants = {int(place): value for place, value in kind["constants"].items()}
    return Part(tuple(kind["paths"]), example, dims, pytree.treespec_loads(kind["tree"]), constants)


class AotiOfParts(Aoti):
    """The same, of a model's parts where the options name some."""

    parts = True

    def why_not(self, options: BuildOptions, dynamic_dims: DynamicDims, device: torch.device) -> str:
        """Likewise; what is quantised by the adapter's inputs is a whole."""
        static = options.parts and options.precision == INT8_STATIC
        why = super().why_not(options, dynamic_dims, device)
        return why or (f"precision {INT8_STATIC} takes whole models only; parts has to be empty" if static else "")

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
