"""The layer Engine: how a model is made to run here, from `eager` to packages.

An engine takes a tier's model (`BuiltTier`) and gives a `Runner`. The two that run the model itself are in
this file; those that build it into a file first derive from `PackageEngine`. `engine_table` has them all by
name.

A CUDA graph holds a model's kernels, captured once and replayed. A capture that fails leaves torch unusable
in its process, so the process has to end. What was found is kept beside the packages, by the model's
identity: the next process does not try again.
"""

import os
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.engines.built_tier import BuiltTier, Call, Inputs
from torchperf_ros.engines.device import lacks_memory, no_garbage_collection, refused_memory
from torchperf_ros.engines.model_transforms import matrix_precision, transform
from torchperf_ros.engines.outputs import (
    SeesOperations,
    holds_lazy,
    in_new_memory,
    layout_of,
    leaves_in,
    mapped,
)
from torchperf_ros.engines.parity import DynamicDims
from torchperf_ros.settings.build_options import (
    GRAPH,
    INT8_STATIC,
    MOST_SHAPES,
    STATIC_ENGINE,
    BuildOptions,
)
from torchperf_ros.workers.package_cache import PackageCache, unquoted_path
from torchperf_ros.workers.package_manifest import Identity

if TYPE_CHECKING:
    from torchperf_ros.engines.package import Package


_OF_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


class CaptureFailed(TorchperfError):
    """A model cannot be captured as a CUDA graph.

    This process has to end, and the next one to do without graphs.

    torch leaves the capture's stream as the current one, and its allocator counts a capture that never
    ends: later calls, such as `torch.cuda.empty_cache`, raise (pytorch/pytorch pull requests 180395 and
    190308).

    Attributes:
        is_known: the next process finds it in the cache by itself.
        lacked: the key of what had not enough memory, which is not kept: there may be enough the next time.
    """

    is_known, lacked = False, ""


# The kernel's word: torch 2.11 has no call for it.
_DRIVER = Path("/sys/module/nvidia/version")


class CaptureRecord:
    """What is known of capturing one model, on disk beside the packages."""

    def __init__(
        self, cache: PackageCache, identity: Identity, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Take the cache and what the model, as it is captured, is kept under, with the driver's version.

        `say` takes the key when a capture begins, and "" when it is over, for the parent, which notes the
        death of a process in between.
        """
        self._cache, self._say = cache, say
        driver = _DRIVER.read_text(encoding="ascii").strip() if _DRIVER.is_file() else ""
        self.key = f"{identity.key}-{driver.replace('.', '_')}"

    def why_not(self) -> str:
        """Why it cannot be captured, as an earlier process has found out; empty: nothing is known."""
        return self._cache.uncapturable(self.key).get(self.key, "")

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Context in which the model is captured. Keeps that it failed."""
        self._say(self.key)
        try:
            yield
        except CaptureFailed as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                error.lacked = self.key
            else:
                error.is_known = self._cache.keep_uncapturable(self.key, str(error))
            raise
        else:
            self._cache.forget_findings(self.key)
        finally:
            self._say("")


class _Run(SeesOperations):
    """Notes a run's operations, with the numbers that they are given.

    Also which tensors are there when it is over: weights, and tables that the model keeps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[weakref.ref[torch.Tensor]]()
        self.operations = list[str]()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        outputs = func(*args, **(kwargs or {}))
        given, made = pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(outputs)
        self.seen += [weakref.ref(leaf) for leaf in given + made if isinstance(leaf, torch.Tensor)]
        numbers = [leaf for leaf in given if isinstance(leaf, (int, float, complex))]
        self.operations.append(f"{func}{numbers}")
        return outputs


class GraphReplay:
    """Replays a model on inputs of the shapes that it was captured with.

    On others it calls the model itself.

    The graph's outputs are its own memory, which the next call writes to (CUDA graphs, PyTorch notes on CUDA
    semantics). Each call gives copies, which belong to the caller, as eager's outputs do. A model that waits
    for the device, or changes what it does with the values of its inputs, cannot be captured.
    """

    def __init__(self, call: Call, example: Inputs, record: CaptureRecord | None = None) -> None:
        """Warm up and capture a model with the shapes of the example, or raise `CaptureFailed`.

        The `record` keeps how that went.
        """
        self._call, self._record = call, record
        # With each graph the tensors that it reads, of which it holds only addresses: a model may give up a
        # table as soon as it makes one for another size.
        self._replays: dict[object, tuple[Inputs, Callable[[], object], Any, list[torch.Tensor]]] = {}
        self._pool: Any = None
        self.capture(example)

    def capture(self, inputs: Inputs) -> None:
        """Have inputs of these shapes and types replayed from now on, too.

        All graphs share their memory, as one runs at a time.

        Raises:
            CaptureFailed: this process has to end.
            EngineUnavailable: what it gives beside tensors is another at each call.
        """
        key = _key(inputs)
        if key in self._replays:
            return
        kept = tuple(tensor.clone() for tensor in inputs)
        with self._record.trying() if self._record else nullcontext():
            graph, outputs, reads = _capture(self._call, kept, self._pool)
        self._pool = graph.pool()
        self._replays[key] = kept, graph.replay, outputs, reads

    def memory_bytes(self) -> int:
        """Device memory that the graphs hold for what they compute between inputs and outputs.

        The allocator counts it as free, but gives it to no other tensor.
        """
        return sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment.get("segment_pool_id") == self._pool
        )

    def __call__(self, *inputs: torch.Tensor) -> Any:  # noqa: ANN401 - a model may return anything
        captured = self._replays.get(_key(inputs))
        if captured is None:
            return self._call(*inputs)
        kept, replay, outputs, _ = captured
        for own, given in zip(kept, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        replay()
        return in_new_memory(outputs)


def _key(inputs: Inputs) -> object:
    return tuple([(tensor.shape, tensor.dtype) for tensor in inputs])


def _capture(
    call: Call,
    inputs: Inputs,
    pool: Any,  # noqa: ANN401
) -> tuple[torch.cuda.CUDAGraph, Any, list[torch.Tensor]]:
    device, runs, graph = inputs[0].device, (_Run(), _Run()), None
    caller, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    refused = refused_memory(device)
    try:
        side.wait_stream(caller)
        with torch.cuda.stream(side):
            call(*inputs)
            # The last ones: a part that the user has compiled would be compiled anew while one looks on.
            for run in runs:
                with run:
                    plain = _plain_values(call(*inputs))
        caller.wait_stream(side)
        refused, graph = refused_memory(device), torch.cuda.CUDAGraph()
        # what the collector frees may call the driver, which ends a capture; so may other threads, hence
        # the mode
        with (
            no_garbage_collection(collects=False),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            outputs = call(*inputs)
    except Exception as ended:  # the model's and the driver's boundary
        # The end of a capture that has failed raises as well, and says less: its context is the error that
        # came through here. An error of the model may have one, too, which the model handled: no reason.
        error = (
            ended.__context__
            if ended.__context__ is not None
            and any(
                frame.f_code is _capture.__code__
                for frame, _ in traceback.walk_tb(ended.__context__.__traceback__)
            )
            else ended
        )
        is_lacking = lacks_memory(error, is_refused=refused_memory(device) > refused)
        if graph is None and not is_lacking:
            raise
        torch.cuda.set_stream(caller)
        text = f"it cannot be captured as a CUDA graph: {_place(error)}{type(error).__name__}: {error}"
        cause = torch.OutOfMemoryError(str(error)) if is_lacking else error
        raise CaptureFailed(text.splitlines()[0]) from cause
    before, after = (run.operations for run in runs)
    if holds_lazy(outputs) or _plain_values(outputs) != plain or before != after:
        raise EngineUnavailable(
            "no CUDA graph: its outputs hold a generator, or a plain value that is another at each call,"
            f" or it computes otherwise at each call, {', '.join(sorted({*before} ^ {*after})[:1])}"
        )
    reads = [tensor for seen in runs[1].seen if (tensor := seen()) is not None]
    # A model may fill the same dict or list at each call.
    return graph, mapped(outputs, lambda leaf: leaf), reads


def _plain_values(outputs: Any) -> tuple[str, list[Any]]:  # noqa: ANN401 - a model may return anything
    return layout_of(outputs), [leaf for leaf in leaves_in(outputs) if isinstance(leaf, (float, complex))]


def _place(error: BaseException) -> str:
    """The innermost line outside of torch that an error came through, which is the model's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OF_TORCH, "<")) and frame.filename != __file__
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}: " if frames else ""


_MOST_GRAPHS = 8 * MOST_SHAPES


class EngineUnavailable(TorchperfError):
    """An engine cannot run this here: its library is absent, or it lacks the device, precision or sizes."""


@dataclass(frozen=True)
class Runner:
    """A model that is ready to run.

    Attributes:
        graphs, breaks: graphs that were compiled and the breaks between them; 0 and 0 for eager.
        cache_hits: graphs that came out of the compiler's own cache on disk.
        static: it takes the example's shapes only, and does not notice others: it would give wrong results.
        package: what it was loaded from, where that is kept on disk.
        captured: its CUDA graphs, which is then what `call` is; they capture more sizes.
    """

    call: Call
    graphs: int = 0
    breaks: int = 0
    cache_hits: int = 0
    compile_s: float = 0.0
    static: bool = False
    package: "Package | None" = None
    captured: GraphReplay | None = None


class Engine(ABC):
    """One way to run a model.

    A tier's `dims` are those that have to vary under the options, see `BuiltTier.narrowed`.
    """

    name: ClassVar[str]

    @abstractmethod
    def why_not(self, options: BuildOptions, dynamic_dims: DynamicDims, device: torch.device) -> str:
        """Why it cannot run what these options describe here; empty: it can. Nothing is imported for that."""

    @abstractmethod
    def prepare(self, tier: BuiltTier, options: BuildOptions) -> Runner:
        """Make the tier's model ready to run; the model itself stays as it is."""

    def check(self, options: BuildOptions, dynamic_dims: DynamicDims, device: torch.device) -> None:
        if why := self.why_not(options, dynamic_dims, device):
            raise EngineUnavailable(why)


def finished(
    runner: Runner,
    options: BuildOptions,
    example: Inputs,
    device: torch.device,
    record: CaptureRecord | None = None,
) -> Runner:
    """The runner with what concerns CUDA only: tf32, and one graph of all its kernels.

    The `record` keeps whether it can be captured.

    Raises:
        ConfigError: a graph is asked for on another device.
        CaptureFailed: this process has to end.
    """
    call = (
        runner.call
        if options.precision != "tf32" or device.type != "cuda"
        else matrix_precision("tf32", device)(runner.call)
    )
    if not options.is_captured:
        has_own = device.type == "cuda" and options != options.without_graphs()  # torch.compile's
        return replace(runner, call=(lambda *each: in_new_memory(call(*each))) if has_own else call)
    if device.type != "cuda":
        raise ConfigError(
            f"parameter compile_mode: reduce-overhead makes CUDA graphs; the device here is {device}"
        )
    captured = GraphReplay(call, example, record)
    return replace(runner, call=captured, captured=captured)


class Eager(Engine):
    """The model as it is, in the precision and memory layout of the options; without int8_static."""

    name = "eager"

    def why_not(self, options: BuildOptions, dynamic_dims: DynamicDims, device: torch.device) -> str:
        return ""

    def prepare(self, tier: BuiltTier, options: BuildOptions) -> Runner:
        with torch.inference_mode(mode=False):
            return Runner(transform(tier.model, options, tier.device, tier.example))


class CapturedEager(Eager):
    """Eager in CUDA graphs, for sizes that do not vary: `finished` captures what it prepares."""

    name = GRAPH

    def why_not(self, options: BuildOptions, dynamic_dims: DynamicDims, device: torch.device) -> str:
        return "" if device.type == "cuda" else f"engine {GRAPH} runs on cuda; the device here is {device}"


class Compile(Engine):
    """torch.compile, of the whole model or of some of its modules.

    Prepare and call it under the same mode (`torch.inference_mode`), with inputs made under it: it is a guard.
    """

    name = "compile"

    def why_not(self, options: BuildOptions, dynamic_dims: DynamicDims, device: torch.device) -> str:
        return (
            f"engine {self.name} has no precision {INT8_STATIC}; {STATIC_ENGINE} has"
            if options.precision == INT8_STATIC
            else ""
        )

    def prepare(self, tier: BuiltTier, options: BuildOptions) -> Runner:
        """Compile, and call it once for every kind of size, so that nothing is left to compile.

        Beyond its limits, 8 graphs of a model and 256 of a class, the compiler would run the model in eager
        from then on, and only its log would mention it.
        """
        with torch.inference_mode(mode=False):
            model = transform(tier.model, options, tier.device, tier.example)
        config = torch._dynamo.config
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(config, limit, max(_MOST_GRAPHS, getattr(config, limit)))
        started, before = time.perf_counter(), _counters()
        with matrix_precision(options.precision, tier.device):
            compiled = _compiled(replace(tier, model=model), options)
            for inputs in tier.inputs_by_size():
                compiled(*_marked(inputs, tier))
        graphs, breaks, hits = (now - then for now, then in zip(_counters(), before, strict=True))
        return Runner(compiled, graphs, breaks, hits, time.perf_counter() - started)


def _compiled(tier: BuiltTier, options: BuildOptions) -> Call:
    mode = None if options.mode == "default" else options.mode
    if options.cuda_graphs and mode is None:
        mode = "reduce-overhead"
    dynamic = bool(tier.dims)
    if dynamic:  # a graph would be captured at the first frame of every new size, while that frame waits
        from torch._inductor import config

        config.triton.cudagraph_skip_dynamic_graphs = True
    prepare_inductor(tier.device)
    if options.parts:
        paths = [path.strip() for path in options.parts.split(",")]
        return InParts(tier, paths, mode=mode, dynamic=dynamic)
    # With ranges, `None` leaves the decision to the marks on the inputs.
    compiled: Call = torch.compile(tier.model, mode=mode, dynamic=None if tier.dims else dynamic)
    return compiled


def _marked(usual: Inputs, tier: BuiltTier) -> Inputs:
    inputs = tuple(tensor.clone() for tensor in usual)
    for index, spans in from_front(tier.dims, tier.example).items():
        for dim, (low, high) in spans.items():
            if inputs[index].shape[dim] > 1:  # sizes 0 and 1 have a graph of their own
                torch._dynamo.mark_dynamic(inputs[index], dim, min=max(low, 2), max=high)
    return inputs


def _counters() -> tuple[int, int, int]:
    from torch._dynamo.utils import counters  # imports the compiler, which an eager worker does not need

    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), hits


def from_front(dynamic_dims: DynamicDims, example: Inputs) -> DynamicDims:
    """The same with every dimension counted from the first, as compilers want them."""
    rank = [tensor.dim() for tensor in example]
    return {i: {dim % rank[i]: span for dim, span in spans.items()} for i, spans in dynamic_dims.items()}


def prepare_inductor(device: torch.device) -> None:
    """Set torch's compiler up for this process: what it need not ask, nor make, and where torch lies.

    By its own default it asks which vector instructions the C++ compiler has: a program and a new Python for
    each of 6 to 11 answers, in each process. A model on CUDA uses none. A torch that runs AVX-512 itself has
    what that takes. For a package its precompiled headers pay from the fifth one on and take 280 MB. For
    torch.compile they pay from the second graph on (151 MB; 4 s of computing in place of 10). By its default
    they lie below /tmp, where another user may have made the folder first, with code in it.

    Linkers get a path to torch without a space, in a checkout below a home that has one.
    """
    from torch._inductor import codecache, config, cpp_builder
    from torch.utils import cpp_extension

    codecache._HEADER_DIR = os.path.join(codecache.cache_dir(), "precompiled_headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
    if config.cpp.vec_isa_ok is None:  # else the user has chosen, by TORCHINDUCTOR_VEC_ISA_OK
        config.cpp.vec_isa_ok = device.type == "cpu" and (
            torch.backends.cpu.get_cpu_capability() == "AVX512" or None
        )
    if hasattr(config.aot_inductor, "precompile_headers"):
        config.aot_inductor.precompile_headers = False
    cpp_extension.TORCH_LIB_PATH = unquoted_path(cpp_extension.TORCH_LIB_PATH)
    cpp_builder._LINKER_SCRIPT = unquoted_path(cpp_builder._LINKER_SCRIPT)


class InParts:
    """A model of which some modules are compiled by themselves; between calls the model is as it was.

    The modules stay where they are, with their hooks: a copy would have a state of its own.
    """

    def __init__(self, tier: BuiltTier, paths: Sequence[str], **how: Any) -> None:  # noqa: ANN401
        """Take the paths of modules in the tier's model; `how` is `torch.compile`'s.

        Raises:
            EngineUnavailable: there is no such module, or the model does not run it.
        """
        self._model, modules = tier.model, dict(tier.model.named_modules(remove_duplicate=False))
        for number, path in enumerate(paths):
            if not path or path not in modules:
                near = ", ".join(one for one in modules if one and "." not in one)
                raise EngineUnavailable(f"parts: the model has no module {path!r}; at its top are {near}")
            others = (other for place, other in enumerate(paths) if place != number)
            if any(f"{path}.".startswith(f"{other}.") for other in others):
                raise EngineUnavailable(f"parts: {path} is named twice, or lies within another part")
        parts = {path: modules[path] for path in paths}
        self._check_run(parts, tier.example)
        # `Module.compile` would leave `nn.Sequential` and all else of torch.nn as it is.
        self._forwards = [(vars(part), torch.compile(part.forward, **how)) for part in parts.values()]
        # Mostly none: `forward` is the class's.
        self._own = [
            {key: value for key, value in own.items() if key == "forward"} for own, _ in self._forwards
        ]

    def _check_run(self, parts: dict[str, torch.nn.Module], example: Inputs) -> None:
        run: set[torch.nn.Module] = set()
        hooks = [part.register_forward_pre_hook(lambda part, _: run.add(part)) for part in parts.values()]
        try:
            self._model(*example)
        finally:
            for hook in hooks:
                hook.remove()
        for path, part in parts.items():
            if part not in run:
                raise EngineUnavailable(f"parts: the model does not run {path} on the example inputs")

    def __call__(self, *inputs: torch.Tensor) -> Any:  # noqa: ANN401 - a model may return anything
        try:
            for attributes, forward in self._forwards:
                attributes["forward"] = forward
            return self._model(*inputs)
        finally:
            for (attributes, _), own in zip(self._forwards, self._own, strict=True):
                attributes.pop("forward", None)
                attributes.update(own)
