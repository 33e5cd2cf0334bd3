"""Parts of a model: how its modules are called, which are one block over and over, and which can be exported."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchperf_ros.engines.package_engine import export, written_to
from torchperf_ros.engines.parity import Inputs, memory_format, signature_of
from torchperf_ros.frame.errors import TorchperfError, one_line

Spans = dict[int, dict[int, tuple[int, int]]]
Called = dict[str, list["_CallOf"]]

_FEWEST_BLOCKS: Final = 4
_LEAST_COVERED: Final = 0.8  # of eager's time: what is left runs in eager, and a whole package would compile it
_LEAST_SHARE: Final = 0.02  # of eager's time that a part has to take to be worth a call of its own
_RUNS: Final = 7  # of which the share of each module is the median
_JSON: Final = (bool, int, float, str, type(None))


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
    dims: Spans
    tree: pytree.TreeSpec
    constants: dict[int, Any]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module's `forward` gets."""
        leaves: list[Any] = list(tensors)
        for place, value in self.constants.items():
            leaves.insert(place, value)
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return args, kwargs


class Flat(nn.Module):
    """A part's module as compilers want it: tensors in, a tuple of tensors out."""

    def __init__(self, module: nn.Module, part: Part) -> None:
        super().__init__()
        self.module, self._part = module, part

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Hooks on the module itself stay outside: they run in eager, around what is compiled."""
        args, kwargs = self._part.arguments(tensors)
        outputs = pytree.tree_leaves(self.module.forward(*args, **kwargs))
        return tuple(leaf for leaf in outputs if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class _CallOf:
    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @property
    def layout(self) -> list[Any]:
        return [(leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]

    def is_like(self, other: "_CallOf") -> bool:
        """Whether the arguments are the same but for the values, and the sizes, of tensors."""
        kinds = [
            [(leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in one.leaves]
            for one in (self, other)
        ]
        return self.tree == other.tree and kinds[0] == kinds[1]


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Arguments as leaves and their nest, keywords sorted by name."""
    return pytree.tree_flatten((args, dict(sorted(kwargs.items()))))


class Anatomy:
    """How a model calls its modules, found by running it in eager with hooks.

    Attributes:
        modules: every module but the model itself by its path, one path for each.
    """

    def __init__(self, model: nn.Module, runs: Sequence[Inputs]) -> None:
        """Run the model on inputs of every size that it has to take, the usual one last."""
        self.modules = {path: module for path, module in model.named_modules() if path}
        self._model, self._runs = model, [_plain(inputs) for inputs in runs]
        self._calls = [self._listen(self.modules, inputs) for inputs in self._runs]
        self._largest = max(range(len(self._runs)), key=lambda run: sum(t.numel() for t in self._runs[run]))

    def part(self, paths: Sequence[str]) -> Part:
        """The part that these modules are, which are alike; a `PartsError` where they cannot be one."""
        path = paths[0]
        if why := self._why_not(path):
            raise PartsError(f"parts: {path} {why}")
        (example, *_) = self._listen({path: self.modules[path]}, self._runs[self._largest], keep=True)[path]
        tensors = [t.contiguous(memory_format=memory_format(t)) for t in example.leaves if isinstance(t, torch.Tensor)]
        constants = {place: leaf for place, leaf in enumerate(example.leaves) if not isinstance(leaf, torch.Tensor)}
        dims: Spans = {}
        shapes = [[leaf.shape for leaf in calls[path][0].leaves if isinstance(leaf, torch.Tensor)]
                  for calls in self._calls]  # fmt: skip
        for index, of_each_run in enumerate(zip(*shapes, strict=True)):
            for dim, sizes in enumerate(zip(*of_each_run, strict=True)):
                if min(sizes) != max(sizes):
                    dims.setdefault(index, {})[dim] = min(sizes), max(sizes)
        try:
            json.loads(pytree.treespec_dumps(example.tree))
        except Exception as error:  # a nest of the user's own that torch cannot write down
            raise PartsError(f"parts: {path} gets arguments in a nest of its own: {one_line(error)}") from error
        return Part(tuple(paths), tuple(tensors), dims, example.tree, constants)

    def parts(self, paths: Sequence[str]) -> list[Part]:
        """The parts that these modules are, those that are alike as one; a `PartsError` where one is not there."""
        for path in paths:
            if path not in self.modules:
                near = ", ".join(one for one in self.modules if "." not in one)
                raise PartsError(f"parts: the model has no module {path!r}; at its top are {near}")
        return [self.part(group) for group in self._groups(paths)]

    def blocks(self) -> list[Part]:
        """The blocks that there are four or more of; a `PartsError` where they are not most of the model."""
        groups = [g for g in self._groups(filter(self._is_block, self.modules)) if len(g) >= _FEWEST_BLOCKS]
        found: list[list[str]] = []
        for paths in sorted(groups, key=self._size):
            if not any(is_within(path, other) for path in paths for one in found for other in one):
                found.append(paths)
        if not found:
            raise PartsError(f"it has no {_FEWEST_BLOCKS} blocks that are alike")
        covered = self.covered([path for paths in found for path in paths])
        if covered < _LEAST_COVERED:
            names = "; ".join(named(paths) for paths in found)
            raise PartsError(f"the blocks that are alike ({names}) take {covered:.0%} of eager's time, not most of it")
        return [self.part(paths) for paths in found]

    def exporting(self) -> tuple[list[str], dict[str, str]]:
        """The largest modules that can be exported, in the model's order, and why those around them cannot."""
        shares, refused, found = self.shares(), dict[str, str](), list[str]()
        tried: dict[str, str] = {}  # of blocks that are alike one is tried

        def walk(path: str, module: nn.Module) -> None:
            if path and not self._why_not(path):
                if shares[path] < _LEAST_SHARE:
                    return
                kind = self._kind(path)
                if kind not in tried:
                    tried[kind] = self._why_no_export(path)
                if not tried[kind]:
                    found.append(path)
                    return
                refused[path] = tried[kind]
            for name, child in module.named_children():
                one = f"{path}.{name}" if path else name
                if one in self.modules:  # a module that has several paths is looked at once
                    walk(one, child)

        walk("", self._model)
        return found, refused

    def _why_no_export(self, path: str) -> str:
        try:
            part = self.part([path])
            export_part(Flat(self.modules[path], part), part)
        except Exception as error:  # the exporter's boundary: what is within may go
            return one_line(error)
        return ""

    def _groups(self, paths: Iterable[str]) -> list[list[str]]:
        groups: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            groups[self._kind(path)].append(path)
        return list(groups.values())

    def _kind(self, path: str) -> str:
        """The same for modules that may be one block: class, weights' names and shapes, how they are called."""
        weights = [f"{name} {signature_of(tensor)}" for name, tensor in _tensors(self.modules[path])]
        layouts = [[(str(call.tree), call.layout) for call in calls[path][:1]] for calls in self._calls]
        return f"{type(self.modules[path])} {weights or path} {layouts}"  # without weights nothing is shared

    def _is_block(self, path: str) -> bool:
        """Whether it has weights, is more than a layer of torch's, and may be a part."""
        module = self.modules[path]
        own = any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")
        return own and any(True for _ in module.parameters()) and not self._why_not(path)

    def shares(self) -> dict[str, float]:
        """The share of eager's time that each module takes, modules within included, on the usual inputs."""
        took: dict[str, list[float]] = {path: [] for path in self.modules}
        for _ in range(_RUNS):
            spent: dict[str, float] = defaultdict(float)
            total = self._time(spent)
            for path, of_each_run in took.items():
                of_each_run.append(spent[path] / total)
        return {path: median(of_each_run) for path, of_each_run in took.items()}

    def covered(self, paths: Sequence[str]) -> float:
        """The share of eager's time that modules take which do not lie within one another."""
        shares = self.shares()
        return min(1.0, sum(shares[path] for path in paths))

    def _why_not(self, path: str) -> str:
        """Why a module cannot be a part; "" where it may be one."""
        usual = self._calls[-1][path]
        for calls in (each[path] for each in self._calls):
            if not calls:
                return "is not called on the example inputs"
            if any(one.tree != calls[0].tree or one.layout != calls[0].layout for one in calls):
                return "is called with different arguments or sizes in one run"
            if not calls[0].is_like(usual[0]):
                return "is called with other arguments where sizes are others"
        strange = [leaf for leaf in usual[0].leaves if not isinstance(leaf, (torch.Tensor, *_JSON))]
        if strange:
            return f"gets an argument of type {type(strange[0]).__name__}"
        return "" if any(isinstance(leaf, torch.Tensor) for leaf in usual[0].leaves) else "gets no tensor"

    def _size(self, paths: Sequence[str]) -> tuple[int, int]:
        weights = sum(tensor.numel() for _, tensor in _tensors(self.modules[paths[0]])) * len(paths)
        return -weights, paths[0].count(".")

    def _listen(self, modules: Mapping[str, nn.Module], inputs: Inputs, *, keep: bool = False) -> Called:
        """The calls of modules in one run, with the values of tensors if these are to be kept."""
        found: Called = {path: [] for path in modules}

        def kept(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.detach().clone() if keep else torch.empty_like(leaf, device="meta")

        def hook(path: str) -> Callable[..., None]:
            def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                leaves, tree = flatten(args, kwargs)
                found[path].append(_CallOf(tree, tuple(map(kept, leaves))))

            return note

        handles = [each.register_forward_pre_hook(hook(path), with_kwargs=True) for path, each in modules.items()]
        self._run(inputs, handles)
        return found

    def _time(self, spent: dict[str, float]) -> float:
        """Seconds of one run; those of each module are added up in `spent`."""
        begun: dict[str, float] = {}

        def now() -> float:
            if self._runs[-1][0].is_cuda:
                torch.cuda.synchronize(self._runs[-1][0].device)
            return time.perf_counter()

        def begin(path: str) -> Callable[..., None]:
            return lambda *_: begun.__setitem__(path, now())

        def end(path: str) -> Callable[..., None]:
            return lambda *_: spent.__setitem__(path, spent[path] + now() - begun[path])

        handles = []
        for path, module in self.modules.items():
            handles += [module.register_forward_pre_hook(begin(path)), module.register_forward_hook(end(path))]
        started = now()
        self._run(self._runs[-1], handles)
        return now() - started

    def _run(self, inputs: Inputs, handles: Sequence[Any]) -> None:
        """Run the model with hooks in place, which are gone when this returns."""
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._model(*_plain(inputs))
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True)
class Exported:
    """What of a model can be exported, where the whole cannot, and `why` that is.

    Attributes:
        shares: of eager's time, by the path of each module that can be.
        refused: why modules that were tried cannot.
    """

    why: str
    shares: dict[str, float]
    refused: dict[str, str]


def exported_parts(model: nn.Module, runs: Sequence[Inputs]) -> Exported | None:
    """Try the whole on the first inputs, then the modules within it; None where the whole can be exported."""
    try:
        export(model, _plain(runs[0]), {})
    except Exception as error:  # the exporter's boundary
        anatomy = Anatomy(model, [*runs[1:], runs[0]])
        found, refused = anatomy.exporting()
        shares = anatomy.shares()
        return Exported(one_line(error), {path: shares[path] for path in found}, refused)
    return None


def export_part(module: Flat, part: Part) -> torch.export.ExportedProgram:
    """A part as one graph; a `PartsError` where it writes to what eager reads as well."""
    shapes = [
        {dim: torch.export.Dim.DYNAMIC(min=low, max=high) for dim, (low, high) in part.dims.get(index, {}).items()}
        for index in range(len(part.example))
    ]
    with torch.inference_mode(mode=False), torch.no_grad():
        program = torch.export.export(module, part.example, dynamic_shapes=(tuple(shapes),) if part.dims else None)
    if written := written_to(program):
        raise PartsError(f"parts: {part.paths[0]} writes to its {' and '.join(written)}")
    return program


def named(paths: Sequence[str]) -> str:
    """Paths in words: `layers.0 to layers.11`, or all of them where they are few."""
    return ", ".join(paths) if len(paths) <= 2 else f"{paths[0]} to {paths[-1]}"  # noqa: PLR2004


def overlapping(paths: Sequence[str]) -> str:
    """The first path that lies within another one, or stands twice; "" where there is none."""
    pairs = ((one, other) for n, one in enumerate(paths) for m, other in enumerate(paths) if n != m)
    return next((one for one, other in pairs if is_within(one, other)), "")


def is_within(path: str, other: str) -> bool:
    """Whether a module is another one or lies in it."""
    return path == other or path.startswith(f"{other}.")


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _plain(inputs: Inputs) -> Inputs:
    with torch.inference_mode(mode=False):  # an inference tensor cannot be exported
        return tuple(tensor.clone() for tensor in inputs)
