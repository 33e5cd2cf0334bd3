"""The engines: ways to run a model. Each takes the adapter's model and gives a callable with the same inputs."""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.shape_options import MOST_SHAPES
from torchperf_ros.worker.graph_replay import GraphReplay
from torchperf_ros.worker.model_transforms import matrix_precision, transform
from torchperf_ros.worker.package import build_package, from_front, load_package
from torchperf_ros.worker.parity import DynamicDims, random_inputs

Call = Callable[..., Any]

_MOST_GRAPHS = 8 * MOST_SHAPES


@dataclass(frozen=True)
class Runner:
    """A model that is ready to run.

    Attributes:
        call: takes the model's inputs and gives its outputs.
        graphs, breaks: graphs that were compiled and the breaks between them; 0 and 0 for eager.
        cache_hits: graphs that came out of the compiler's own cache on disk.
        compile_s: seconds that this took.
        package: hash of the package, "" where there is none.
        model: hashes of weights and code that a user's package was built from, where that is known.
        static: whether it takes the example's shapes only and does not notice others: its results, or its process,
            would be lost.
    """

    call: Call
    graphs: int = 0
    breaks: int = 0
    cache_hits: int = 0
    compile_s: float = 0.0
    package: str = ""
    model: tuple[str, str] | None = None
    static: bool = False


def varying_dims(options: BuildOptions, declared: DynamicDims) -> DynamicDims:
    """The dimensions that an engine with these options has to let vary; a range of one size does not."""
    if options.dynamic == "never":
        return {}
    varying = {i: {dim: span for dim, span in spans.items() if span[0] != span[1]} for i, spans in declared.items()}
    return {index: spans for index, spans in varying.items() if spans}


def make_runner(
    model: torch.nn.Module,
    options: BuildOptions,
    example: tuple[torch.Tensor, ...],
    dynamic_dims: DynamicDims,
    device: torch.device,
) -> Runner:
    """Make a model ready to run; compiled engines take 10 s and more.

    Args:
        model: as the adapter built it, on the device, in eval mode; it is not changed.
        options: which engine, and what is done to the model before.
        example: inputs of the usual shape, on the device.
        dynamic_dims: input index -> {dimension: (smallest, largest)}.
        device: where it runs.

    Engine compile has to be made and called under the same mode (`torch.inference_mode`), with inputs made under it:
    the mode is one of its guards.

    Raises:
        ConfigError: an option that cannot be used here.
        Exception: whatever torch raises where it cannot compile the model.
    """
    with torch.inference_mode(mode=False):
        prepared = transform(model, options, device)
    dims = varying_dims(options, dynamic_dims)
    with matrix_precision(options.precision, device):
        if options.engine == "compile":
            runner = _compile(prepared, options, example, dims)
        elif options.engine == "aoti":
            runner = _package(prepared, example, dims, device)
        else:
            runner = Runner(prepared)
    return finished(runner, options, example, device)


def finished(runner: Runner, options: BuildOptions, example: tuple[torch.Tensor, ...], device: torch.device) -> Runner:
    """The same with what concerns CUDA only: run with the precision of the options, or captured as one graph.

    Raises:
        ConfigError: a graph is wanted, and the device is not CUDA.
    """
    if options.cuda_graphs and options.engine != "compile":  # which captures its own
        if device.type != "cuda":
            msg = f"parameter cuda_graphs: true is for CUDA; the device here is {device}"
            raise ConfigError(msg)
        with matrix_precision(options.precision, device):
            return replace(runner, call=GraphReplay(runner.call, example))
    if options.precision != "tf32" or device.type != "cuda":
        return runner

    def call(*inputs: torch.Tensor) -> Any:  # noqa: ANN401 - whatever the model returns
        with matrix_precision(options.precision, device):
            return runner.call(*inputs)

    return replace(runner, call=call)


def _package(
    model: torch.nn.Module, example: tuple[torch.Tensor, ...], dims: DynamicDims, device: torch.device
) -> Runner:
    """An AOTInductor package that is kept in memory only."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="torchperf_") as folder:
        path = Path(folder) / "model.pt2"
        with torch.inference_mode(mode=False):
            build_package(model, tuple(tensor.clone() for tensor in example), dims, path)
        call = load_package(path, device)
    return Runner(call, graphs=1, compile_s=time.perf_counter() - started, static=not dims)


def _compile(
    model: torch.nn.Module, options: BuildOptions, example: tuple[torch.Tensor, ...], dims: DynamicDims
) -> Runner:
    """torch.compile, and a first call of every kind of size, so that nothing is left to compile.

    Beyond its limits, 8 graphs of a model and 256 of a class, the compiler would run it in eager from then on, and only
    its log would say so.
    """
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, limit, max(_MOST_GRAPHS, getattr(torch._dynamo.config, limit)))
    started, before = time.perf_counter(), _counters()
    mode = None if options.mode == "default" else options.mode
    if options.cuda_graphs and mode is None:
        mode = "reduce-overhead"
    dynamic = bool(dims) or options.dynamic == "always"
    compiled = torch.compile(model, mode=mode, dynamic=None if dims else dynamic)
    for usual in warm_up_inputs(example, dims):
        inputs = tuple(tensor.clone() for tensor in usual)  # marks stay on a tensor, and the example is the adapter's
        for index, spans in from_front(dims, example).items():
            for dim, (low, high) in spans.items():
                if inputs[index].shape[dim] > 1:  # sizes 0 and 1 have a graph of their own
                    torch._dynamo.mark_dynamic(inputs[index], dim, min=max(low, 2), max=high)
        compiled(*inputs)
    after = _counters()
    made = {key: after[key] - before[key] for key in after}
    return Runner(compiled, made["graphs"], made["breaks"], made["cache_hits"], time.perf_counter() - started)


def warm_up_inputs(example: tuple[torch.Tensor, ...], dims: DynamicDims) -> list[tuple[torch.Tensor, ...]]:
    """The example, and where sizes vary, inputs of the middle, smallest and largest sizes."""
    if not dims:
        return [example]
    spans = [(0.5, 0.5), (0.0, 0.0), (1.0, 1.0)]
    return [*(random_inputs(example, 0, _at(dims, *span)) for span in spans), example]


def _at(dims: DynamicDims, low: float, high: float) -> Mapping[int, Mapping[int, tuple[int, int]]]:
    """The ranges, narrowed to this part of them."""
    return {
        index: {dim: (round(a + low * (b - a)), round(a + high * (b - a))) for dim, (a, b) in spans.items()}
        for index, spans in dims.items()
    }


def _counters() -> dict[str, int]:
    from torch._dynamo.utils import counters  # imports the compiler, which an eager worker does not need

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "cache_hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    }
