"""Engines that build a model ahead of time into a file that loads in milliseconds, for `package`."""

import hashlib
import inspect
import json
import tempfile
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from torchperf_ros.api.text import listed
from torchperf_ros.engines.built_tier import BuiltTier, Call, Inputs
from torchperf_ros.engines.engine import Engine, EngineUnavailable, Runner, from_front
from torchperf_ros.engines.model_transforms import (
    layers_of,
    matrix_precision,
    transform,
    why_not_int8,
)
from torchperf_ros.engines.outputs import described
from torchperf_ros.engines.parity import DynamicDims, KeptState, random_inputs
from torchperf_ros.settings.build_options import (
    INT8_PRECISIONS,
    INT8_STATIC,
    OF_PARTS,
    PACKAGE_SUFFIXES,
    PRECISIONS,
    BuildOptions,
    installed,
)
from torchperf_ros.workers.package_manifest import PackageError

FlatCall = Callable[..., Sequence[torch.Tensor]]

_FEWEST = 2  # torch.export takes sizes of 0 and 1 for constants


@dataclass(frozen=True)
class Built:
    """The result of a build besides its file.

    Attributes:
        graph: hash of the exported graph.
        outputs: how the outputs are nested, see `nest_of`; "" where the file itself holds that.
        variants_ms: p50 of each variant that was compiled, the one that was kept first; empty where there
            is one way.
        left: layers that are not quantised, by kind.
        int8: by kind of layer, how many the model has (`there`), how many are `quantised`, and how many run in
            `int8`; empty for other precisions.
    """

    graph: str
    outputs: str = ""
    variants_ms: dict[str, float] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    int8: dict[str, dict[str, int]] = field(default_factory=dict)


class PackageEngine(Engine):
    """One way to build and run packages; it imports its library in `convert` and `open`, nowhere else.

    Attributes:
        distributions: names under which pip may know its library; none where torch is all.
        build_distributions: what only a build needs, all of them.
        precisions: the arithmetic that it can be asked for, by the types of torch devices that it runs on.
        dynamic: whether sizes may vary.
        keeps_nest: its file holds how outputs are nested, as long as they are tensors.
    """

    distributions: ClassVar[tuple[str, ...]] = ()
    build_distributions: ClassVar[tuple[str, ...]] = ()
    precisions: ClassVar[Mapping[str, Sequence[str]]] = {
        "cpu": PRECISIONS,
        "cuda": tuple(name for name in PRECISIONS if name != INT8_STATIC),
    }
    dynamic: ClassVar[bool] = True
    keeps_nest: ClassVar[bool] = False

    @property
    def version(self) -> str:
        """The library with its version, as `openvino 2026.4.1`; "" where torch is all, or it is absent."""
        return installed(self.distributions)

    def why_not(self, options: BuildOptions, dynamic_dims: DynamicDims, device: torch.device) -> str:
        able, name = self.precisions.get(device.type), f"engine {self.name}"
        if self.distributions and not self.version:
            return self._needs(self.distributions[0])
        if not able:
            return f"{name} runs on {' and '.join(self.precisions)}; the device here is {device}"
        if options.precision not in able:
            return f"{name} has no precision {options.precision} on {device.type}; it has {', '.join(able)}"
        reasons = {
            "cannot be captured: compile_mode has to be default": options.cuda_graphs
            and self.distributions,
            f"takes whole models only; engine {OF_PARTS} takes parts": options.parts,
            "runs fixed sizes only; shapes has to be exact": dynamic_dims and not self.dynamic,
        }
        return next((f"{name} {why}" for why, holds in reasons.items() if holds), "")

    def _needs(self, distribution: str) -> str:
        return (
            f"engine {self.name} needs the package {distribution}: pip install 'torchperf-ros[{self.name}]'"
        )

    def prepare(self, tier: BuiltTier, options: BuildOptions) -> Runner:
        """Build a package that nothing keeps, and load it."""
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="torchperf_") as folder:
            path = Path(folder) / f"model{PACKAGE_SUFFIXES[self.name]}"
            with torch.inference_mode(mode=False):
                plain = replace(tier, example=tuple(tensor.clone() for tensor in tier.example))
                built = self.build(plain, options, path)
            call = self.load(path, built.outputs, options, tier.device)
        return Runner(call, graphs=1, static=not tier.dims, compile_s=time.perf_counter() - started)

    def build(self, tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
        """Export a model, which stays as it is, and build the file `path`.

        Call it outside of inference mode.

        Raises:
            EngineUnavailable: it cannot run this here, or what it has built for int8 would run in fp32.
            Exception: the error of torch or the library, which cannot export or compile the model.
        """
        for distribution in self.build_distributions:
            if not installed([distribution]):
                raise EngineUnavailable(self._needs(distribution))
        there = Counter[str]()
        if options.precision in INT8_PRECISIONS:
            there = layers_of(export(tier.model, tier.example, tier.dims).graph)
            if why := why_not_int8(options.precision, there):
                raise EngineUnavailable(f"precision {options.precision}: {why}")
        model = transform(tier.model, self.for_model(options), tier.device, tier.example)
        outputs = nest_of(tier, always=not self.keeps_nest)
        prepared = replace(tier, model=TensorsOnly(model) if outputs else model)
        with matrix_precision(options.precision, tier.device):
            built = replace(self.convert(prepared, options, path), outputs=outputs)
        if not there:
            return built
        int8 = self.in_int8(path)
        share = {
            kind: {"there": count, "quantised": count - built.left[kind], "int8": int8[kind]}
            for kind, count in there.items()
        }
        if not any(count["int8"] for count in share.values()):
            layers = ", ".join(
                f"{count['quantised']} of {count['there']} {kind}" for kind, count in share.items()
            )
            raise EngineUnavailable(
                f"precision {options.precision}: {layers} are quantised, none runs in int8 as"
                f" {self.name} has compiled it, all in floating point"
            )
        return replace(built, int8=share)

    def load(self, path: Path, outputs: str, options: BuildOptions, device: torch.device) -> Call:
        """Load a checked package, maybe native code, with its build's `outputs`.

        Raises:
            PackageError: the library cannot load it.
        """
        try:
            call = self.open(path, options, device)
        except Exception as error:  # the library's boundary
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PackageError(
                f"package {path} cannot be loaded by {self.version or 'torch ' + torch.__version__}: {text}"
            ) from error
        if not outputs:
            return call
        nest = json.loads(outputs)
        return nested(call, pytree.treespec_loads(nest["tree"]), nest["added"])

    def for_model(self, options: BuildOptions) -> BuildOptions:
        """The options to apply to the torch model; the library applies the others."""
        return options

    def in_int8(self, path: Path) -> Counter[str]:
        """How many layers of each kind the file runs in int8."""
        raise NotImplementedError

    @abstractmethod
    def convert(self, tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
        """Build the file from a model that is prepared."""

    @abstractmethod
    def open(self, path: Path, options: BuildOptions, device: torch.device) -> FlatCall:
        """Load the file: a call that gives the flat outputs."""


def export(
    model: torch.nn.Module, example: Inputs, dynamic_dims: DynamicDims
) -> torch.export.ExportedProgram:
    """The model as one graph.

    Dimensions with the same range and place in several inputs are one dimension.
    """
    dynamic_dims = from_front(dynamic_dims, example)
    shapes: list[dict[int, Any] | None] = [None] * len(example)
    for index, spans in dynamic_dims.items():
        shapes[index] = {
            dim: torch.export.Dim(f"size_{dim}_{low}_{high}", min=low, max=high)
            for dim, (low, high) in spans.items()
        }
    larger = {
        index: {
            dim: (min(max(example[index].shape[dim], _FEWEST), high),) * 2
            for dim, (_, high) in spans.items()
        }
        for index, spans in dynamic_dims.items()
    }
    inputs = random_inputs(example, 0, larger) if dynamic_dims else example
    try:
        with torch.no_grad():
            varying = _by_argument(model, shapes) if dynamic_dims else None
            return torch.export.export(model, inputs, dynamic_shapes=varying)
    except Exception as error:  # the exporter's boundary: its text about a script does not help
        users = model.model if isinstance(model, TensorsOnly) else model
        scripted = [
            name for name, module in users.named_modules() if isinstance(module, torch.jit.ScriptModule)
        ]
        if not scripted:
            raise
        what, who = (
            (f"module {scripted[0]}", "eager and compile run")
            if scripted[0]
            else ("the model", "eager runs")
        )
        raise EngineUnavailable(
            f"{what} is scripted or traced (torch.jit): only {who} that; build it plain"
        ) from error


def _by_argument(model: torch.nn.Module, shapes: Sequence[Any]) -> tuple[Any, ...]:
    """The shapes of inputs as the exporter wants them.

    Those that `forward` takes as `*inputs` are one argument.
    """
    for place, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return (*shapes[:place], tuple(shapes[place:]))
    return tuple(shapes)


def written_to(program: torch.export.ExportedProgram) -> list[str]:
    """What the model changes while it runs, of its `buffers` and its `inputs`."""
    if not any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in program.graph.nodes
    ):
        return []
    signature = program.run_decompositions({}).graph_signature  # before, views hide what is written
    found = {"buffers": signature.buffers_to_mutate, "inputs": signature.user_inputs_to_mutate}
    return [name for name, targets in found.items() if targets]


class TensorsOnly(torch.nn.Module):
    """A model whose outputs are a tuple of its tensors, each once: all that every compiler takes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = pytree.tree_leaves(self.model(*inputs))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise EngineUnavailable(
                    f"output {place} is a number that follows from the inputs; return a tensor"
                )
        return tuple({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def nest_of(tier: BuiltTier, *, always: bool = True) -> str:
    """How tensors and plain values are nested in the outputs of a model in `TensorsOnly`, as JSON.

    "" where each output is a tensor by itself, and it is not `always` wanted.

    Raises:
        EngineUnavailable: one is neither a tensor nor a plain value, or lies in a named tuple; there is none;
            or the model changes its weights.
    """
    kept = KeptState(tier.model)
    with torch.no_grad():
        leaves, tree = pytree.tree_flatten(tier.model(*(tensor.clone() for tensor in tier.example)))
    kept.restore()
    if names := kept.changed_weights():
        raise EngineUnavailable(f"the model changes its weights ({listed(names, 1)}): only eager runs that")
    first: dict[int, int] = {}
    added: list[tuple[Any, ...]] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if first.setdefault(id(leaf), place) != place:
                added.append((place, first[id(leaf)]))
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            added.append((place, None, leaf))
        else:
            what = f"{described(leaf)}, neither a tensor nor a plain value"
            raise EngineUnavailable(f"output {place} is {what}: only eager and compile run that")
    if not first:
        given = described(pytree.tree_unflatten(leaves, tree))
        raise EngineUnavailable(f"the model gives no tensor: {given}")
    try:
        nest = json.dumps({"tree": pytree.treespec_dumps(tree), "added": added})
    except NotImplementedError as error:  # of torch, for named tuples, those of `topk` and `max` among them
        given = described(pytree.tree_unflatten(leaves, tree))
        raise EngineUnavailable(
            f"the model gives {given}: only eager, graph and compile run that; packages take tuples, lists"
            " and dicts"
        ) from error
    return nest if always or added else ""


def exported(tier: BuiltTier) -> torch.export.ExportedProgram:
    """The model as one graph, for engines that convert such a graph.

    Raises:
        EngineUnavailable: it writes to its buffers.
    """
    program = export(tier.model, tier.example, tier.dims)
    if "buffers" in written_to(program):
        raise EngineUnavailable(
            "the model writes to its buffers, which only the engines eager, compile and aoti can"
        )
    return program


def built_of(program: torch.export.ExportedProgram, **more: Any) -> Built:  # noqa: ANN401
    """What a manifest says of a package that was built from this graph."""
    graph = hashlib.sha256(str(program.graph).encode()).hexdigest()
    return Built(graph, left=layers_of(program.graph), **more)


def nested(call: FlatCall, tree: pytree.TreeSpec, added: Sequence[tuple[Any, ...]] = ()) -> Call:
    """The call with its flat outputs nested as the model has them.

    `added` are those that the call does not give, in order: the place, and that of the same tensor before;
    for a plain value the place, None, and the value.
    """
    if tree.is_leaf() and not added:
        return lambda *inputs: call(*inputs)[0]

    def run(*inputs: torch.Tensor) -> Any:  # noqa: ANN401 - a model may return anything
        leaves: list[Any] = list(call(*inputs))
        for place, first, *value in added:
            leaves.insert(place, leaves[first] if first is not None else value[0])
        return pytree.tree_unflatten(leaves, tree)

    return run


def check_count(found: int, program: torch.export.ExportedProgram) -> None:
    """An `EngineUnavailable` where a library has dropped outputs of the model, or added some."""
    wanted = len(program.graph_signature.user_outputs)
    if found != wanted:
        raise EngineUnavailable(f"the converted model has {found} outputs; the model has {wanted}")
