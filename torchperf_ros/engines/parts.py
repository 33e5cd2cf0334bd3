"""Parts of a model: how its modules are called, which are one block over and over, and which can be exported."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchperf_ros.engines.outputs import signature_of
from torchperf_ros.engines.package_engine import export, written_to
from torchperf_ros.engines.parity import Inputs, memory_format
from torchperf_ros.frame.errors import TorchperfError, one_line

_FEWEST_BLOCKS: Final = 4
_LEAST_COVERED: Final = 0.8  # of eager's time: what is left runs in eager, and a whole package would compile it
_LEAST_SHARE: Final = 0.02  # of eager's time that a part has to take to be worth a call of its own
_RUNS: Final = 7  # in which the time of each module is added up
_JSON: Final = (bool, int, float, str, type(None))  # what arguments that are no tensors may be

Calls = dict[str, list[tuple[list[Any], pytree.TreeSpec]]]
"""By a module's path the arguments of each of its calls, see `flatten`."""


class PartsError(TorchperfError):
    """A model cannot be taken apart as asked; the message says where and why."""


@dataclass(frozen=True)
class Part:
    """One module, or several that are the same but for their weights and are called alike.

    Attributes:
        paths: of the modules in the model.
        example: the tensors of one call, of the largest sizes.
        dims: sizes that vary, tensor -> {dimension: (min, max)}.
        tree: how arguments are nested, keywords sorted by name.
        constants: arguments that are no tensors, by their place.
    """

    paths: tuple[str, ...]
    example: Inputs
    dims: dict[int, dict[int, tuple[int, int]]]
    tree: pytree.TreeSpec
    constants: dict[int, Any]

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401 - whatever it returns
        """What the module's `forward` gives; hooks on it stay in eager, around what is compiled."""
        leaves: list[Any] = list(tensors)
        for place, value in self.constants.items():
            leaves.insert(place, value)
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return module.forward(*args, **kwargs)


class _Flat(nn.Module):
    """A part's module as compilers want it: tensors in, a tuple of tensors out."""

    def __init__(self, module: nn.Module, part: Part) -> None:
        super().__init__()
        self.module, self._part = module, part

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(split(pytree.tree_leaves(self._part.run(self.module, tensors)))[0])


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Arguments as leaves and their nest, keywords sorted by name."""
    return pytree.tree_flatten((args, dict(sorted(kwargs.items()))))


def split(leaves: Iterable[Any]) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """The tensors among leaves, and what is none by its place."""
    tensors, constants = list[torch.Tensor](), dict[int, Any]()
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        else:
            constants[place] = leaf
    return tensors, constants


class Anatomy:
    """How a model calls its modules, found by running it in eager with hooks.

    Attributes:
        modules: every module but the model itself by its path, one path for each.
    """

    def __init__(self, model: nn.Module, runs: Sequence[Inputs]) -> None:
        """Run the model on inputs of every size that it has to take, the usual one last."""
        self.modules = {path: module for path, module in model.named_modules() if path}
        self._model, self._runs = model, [plain(inputs) for inputs in runs]
        self._calls = [self._listen(self.modules, inputs) for inputs in self._runs]
        self._largest = max(self._runs, key=lambda inputs: sum(tensor.numel() for tensor in inputs))

    def part(self, paths: Sequence[str]) -> Part:
        """The part that these modules are, which are alike; a `PartsError` where they cannot be one."""
        path = paths[0]
        if why := self._why_not(path):
            raise PartsError(f"parts: {path} {why}")
        leaves, tree = self._listen({path: self.modules[path]}, self._largest, keep=True)[path][0]
        tensors, constants = split(leaves)
        dims: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        shapes = [[tensor.shape for tensor in split(calls[path][0][0])[0]] for calls in self._calls]
        for index, each in enumerate(zip(*shapes, strict=True)):
            spans = {dim: (min(sizes), max(sizes)) for dim, sizes in enumerate(zip(*each, strict=True))}
            if varying := {dim: span for dim, span in spans.items() if span[0] != span[1]}:
                dims[index] = varying
        example = tuple(tensor.contiguous(memory_format=memory_format(tensor)) for tensor in tensors)
        return Part(tuple(paths), example, dict(dims), tree, constants)

    def parts(self, paths: Sequence[str]) -> list[Part]:
        """The parts that these modules are, those that are alike as one; a `PartsError` where there are none such."""
        for number, path in enumerate(paths):
            if path not in self.modules:
                near = ", ".join(one for one in self.modules if "." not in one)
                raise PartsError(f"parts: the model has no module {path!r}; at its top are {near}")
            if any(is_within(path, other) for place, other in enumerate(paths) if place != number):
                raise PartsError(f"parts: {path} is named twice, or lies within another part")
        return [self.part(group) for group in self._groups(paths)]

    def blocks(self) -> list[Part]:
        """The blocks that there are four or more of; a `PartsError` where they are not most of the model."""
        groups = [group for group in self._groups(filter(self._is_block, self.modules)) if len(group) >= _FEWEST_BLOCKS]
        found = list[str]()
        for paths in sorted(groups, key=self._covers, reverse=True):
            found += [] if any(is_within(path, other) for path in paths for other in found) else paths
        if not found:
            raise PartsError(f"it has no {_FEWEST_BLOCKS} blocks that are alike")
        if (covered := self.covered(found)) < _LEAST_COVERED:
            msg = f"the {len(found)} blocks that are alike ({named(found)}) take {covered:.0%} of eager's time"
            raise PartsError(f"{msg}, not most of it")
        return self.parts(found)

    def exporting(self) -> dict[str, float]:
        """The largest modules that can be exported, in the model's order, with their shares of eager's time."""
        shares, found = self.shares(), dict[str, float]()
        exports: dict[str, bool] = {}  # of blocks that are alike one is tried

        def walk(path: str, module: nn.Module) -> None:
            if path and not self._why_not(path):
                kind = self._kind(path)
                if kind not in exports:
                    exports[kind] = shares[path] >= _LEAST_SHARE and self._exports(path)
                if exports[kind]:
                    found[path] = shares[path]
                    return
            for name, child in module.named_children():
                one = f"{path}.{name}" if path else name
                if one in self.modules:  # a module that has several paths is looked at once
                    walk(one, child)

        walk("", self._model)
        return found

    def shares(self) -> dict[str, float]:
        """The share of eager's time that each module takes, modules within included, on the usual inputs."""
        spent: dict[str, float] = defaultdict(float)
        begun: dict[str, float] = {}

        def now() -> float:
            if not self._runs[-1][0].is_cuda:
                return time.process_time()  # which other processes, that may have most of the processor, do not change
            torch.cuda.synchronize(self._runs[-1][0].device)
            return time.perf_counter()

        def begin(path: str) -> Callable[..., None]:
            return lambda *_: begun.__setitem__(path, now())

        def end(path: str) -> Callable[..., None]:
            return lambda *_: spent.__setitem__(path, spent[path] + now() - begun[path])

        for _ in range(_RUNS):
            hooks = [module.register_forward_pre_hook(begin(path)) for path, module in self.modules.items()]
            hooks += [module.register_forward_hook(end(path)) for path, module in self.modules.items()]
            begin("")()
            self._run(self._runs[-1], hooks)
            end("")()
        return {path: spent[path] / spent[""] for path in self.modules}

    def covered(self, paths: Iterable[str]) -> float:
        """The share of eager's time that modules take which do not lie within one another."""
        shares = self.shares()
        return min(1.0, sum(shares[path] for path in paths))

    def _exports(self, path: str) -> bool:
        try:
            export_part(self.modules[path], self.part([path]))
        except Exception:  # the exporter's boundary: what is within may go
            return False
        return True

    def _groups(self, paths: Iterable[str]) -> list[list[str]]:
        groups: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            groups[self._kind(path)].append(path)
        return list(groups.values())

    def _kind(self, path: str) -> str:
        """The same for modules that may be one block: class, weights' names and shapes, how they are called."""
        module = self.modules[path]
        weights = [f"{name} {signature_of(tensor)}" for name, tensor in tensors_of(module).items()]
        calls = [[_signature(*call) for call in calls[path][:1]] for calls in self._calls]
        return f"{type(module)} {weights or path} {calls}"  # without weights nothing is shared

    def _is_block(self, path: str) -> bool:
        """Whether it has weights, is more than a layer of torch's, and may be a part."""
        module = self.modules[path]
        own = any(module.children()) or not type(module).__module__.startswith("torch.nn.")
        return own and any(True for _ in module.parameters()) and not self._why_not(path)

    def _covers(self, paths: Sequence[str]) -> tuple[int, int]:
        """How much of the model modules that are alike are, and how far out."""
        weights = sum(tensor.numel() for tensor in tensors_of(self.modules[paths[0]]).values())
        return weights * len(paths), -paths[0].count(".")

    def _why_not(self, path: str) -> str:
        """Why a module cannot be a part; "" where it may be one."""
        every = [calls[path] for calls in self._calls]
        if not all(every):
            return "is not called on the example inputs"
        if any(_signature(*one) != _signature(*calls[0]) for calls in every for one in calls):
            return "is called with different arguments or sizes in one run"
        if len({_signature(*calls[0], sizes=False) for calls in every}) > 1:
            return "is called with other arguments where sizes are others"
        tensors, constants = split(every[-1][0][0])
        strange = [type(value).__name__ for value in constants.values() if not isinstance(value, _JSON)]
        return f"gets an argument of type {strange[0]}" if strange else "" if tensors else "gets no tensor"

    def _listen(self, modules: Mapping[str, nn.Module], inputs: Inputs, *, keep: bool = False) -> Calls:
        """The calls of modules in one run, with the values of tensors if these are to be kept."""
        found: Calls = {path: [] for path in modules}

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().clone() if keep else torch.empty_like(tensor, device="meta")

        def hook(path: str) -> Callable[..., None]:
            def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                leaves, tree = flatten(args, kwargs)
                found[path].append((pytree.tree_map_only(torch.Tensor, kept, leaves), tree))

            return note

        self._run(
            inputs, [each.register_forward_pre_hook(hook(path), with_kwargs=True) for path, each in modules.items()]
        )
        return found

    def _run(self, inputs: Inputs, hooks: Sequence[Any]) -> None:
        """Run the model with hooks in place, which are gone when this returns."""
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._model(*plain(inputs))
        finally:
            for one in hooks:
                one.remove()


def exported_parts(model: nn.Module, runs: Sequence[Inputs]) -> tuple[str, dict[str, float]] | None:
    """Why a model cannot be exported, and the modules that can be with their shares of eager's time; None: it can."""
    try:
        export(model, plain(runs[0]), {})
    except Exception as error:  # the exporter's boundary
        return one_line(error), Anatomy(model, [*runs[1:], runs[0]]).exporting()
    return None


def export_part(module: nn.Module, part: Part) -> torch.export.ExportedProgram:
    """A module of a part as one graph; a `PartsError` where it writes to what eager reads as well."""
    shapes = [
        {dim: torch.export.Dim.DYNAMIC(min=low, max=high) for dim, (low, high) in part.dims.get(index, {}).items()}
        for index in range(len(part.example))
    ]
    varying = (tuple(shapes),) if part.dims else None
    with torch.inference_mode(mode=False), torch.no_grad():
        program = torch.export.export(_Flat(module, part), part.example, dynamic_shapes=varying)
    if written := written_to(program):
        raise PartsError(f"parts: {part.paths[0]} writes to its {' and '.join(written)}")
    return program


def named(paths: Sequence[str]) -> str:
    """Paths in words: `layers.0 to layers.11`, or all of them where they are few."""
    return ", ".join(paths) if len(paths) <= 2 else f"{paths[0]} to {paths[-1]}"  # noqa: PLR2004


def is_within(path: str, other: str) -> bool:
    """Whether a module is another one or lies in it."""
    return path == other or path.startswith(f"{other}.")


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def plain(inputs: Inputs) -> Inputs:
    """Copies that can be exported with, which inference tensors cannot."""
    with torch.inference_mode(mode=False):
        return tuple(tensor.clone() for tensor in inputs)


def _signature(leaves: Sequence[Any], tree: pytree.TreeSpec, *, sizes: bool = True) -> str:
    """The same for calls that differ only in the values of tensors, without `sizes` also in their sizes."""
    kinds = [
        (one.dtype, tuple(one.shape) if sizes else one.dim()) if isinstance(one, torch.Tensor) else (type(one), one)
        for one in leaves
    ]
    return f"{kinds} {tree}"
