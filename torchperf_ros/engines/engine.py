"""The engines.

Ways to run a model. Each takes the adapter's model and gives a callable with the same inputs.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.api.errors import ConfigError, one_line
from torchperf_ros.engines.built_tier import BuiltTier, Call, Inputs, varying_dims
from torchperf_ros.engines.cuda_graph import GraphReplay
from torchperf_ros.engines.fingerprint import declared_dims, identify, machine_facts
from torchperf_ros.engines.library_engines import OnnxRuntime, OpenVino, TensorRt
from torchperf_ros.engines.model_transforms import in_precision, matrix_precision, transform
from torchperf_ros.engines.outputs import signature_of, tensors_in
from torchperf_ros.engines.package import Aoti, name_torch_unquoted
from torchperf_ros.engines.package_engine import Built, EngineUnavailable, PackageEngine, from_front
from torchperf_ros.engines.parity import DynamicDims, Parity, random_inputs, same
from torchperf_ros.engines.stopwatch import time_interleaved
from torchperf_ros.settings.build_options import INT8_STATIC, PACKAGE_SUFFIXES, STATIC_ENGINE, BuildOptions
from torchperf_ros.settings.shape_options import MOST_SHAPES
from torchperf_ros.workers.engine_choice import EngineChoice, choose_engine
from torchperf_ros.workers.package_cache import find_package
from torchperf_ros.workers.package_manifest import (
    Identity,
    Manifest,
    PackageError,
    check_package,
    file_sha256,
    manifest_path,
)

# Every engine that runs packages; `compile` and `eager` run the model itself.
ENGINES: dict[str, PackageEngine] = {
    engine.name: engine for engine in (Aoti(), OnnxRuntime(), OpenVino(), TensorRt())
}

_MOST_GRAPHS = 8 * MOST_SHAPES
# a camera's: between two frames caches go cold, and threads that wait for work go to sleep
_PACE_S = 1 / 30
_ROUNDS = 40


@dataclass(frozen=True)
class Runner:
    """A model that is ready to run.

    Attributes:
        graphs, breaks: graphs that were compiled and the breaks between them; 0 and 0 for eager.
        cache_hits: graphs that came out of the compiler's own cache on disk.
        package: key of the package, "" where there is none.
        model: hashes of weights and code that a user's package was built from, where that is known.
        static: whether it takes the example's shapes only, and does not notice others: it would give wrong
            results.
        engine: of a user's package; "" where the options name it.
        parts: paths of the modules that are compiled, where not the whole is; "" elsewhere.
        known: what the build has found of the package's parity, where that is known.
    """

    call: Call
    graphs: int = 0
    breaks: int = 0
    cache_hits: int = 0
    compile_s: float = 0.0
    package: str = ""
    model: tuple[str, str] | None = None
    static: bool = False
    engine: str = ""
    parts: str = ""
    known: Parity | None = None


def make_runner(tier: BuiltTier, options: BuildOptions) -> Runner:
    """Make a model ready to run, which stays as it is; compiled engines take 10 s and more.

    The tier's `dims` are the adapter's. Engine compile has to be made and called under the same mode
    (`torch.inference_mode`), with inputs made under it: it is a guard.

    Eager has no int8_static: there it is the model itself.

    Raises:
        ConfigError: an option that cannot be used here.
        EngineUnavailable: the engine cannot run this here.
        Exception: the error of torch or the library, which cannot compile the model.
    """
    tier = replace(tier, dims=varying_dims(options, tier.dims))
    if options.engine in PACKAGE_SUFFIXES:
        return _package(tier, options)
    if options.engine == "compile" and options.precision == INT8_STATIC:
        raise EngineUnavailable(f"engine compile has no precision {INT8_STATIC}; {STATIC_ENGINE} has")
    with torch.inference_mode(mode=False):
        prepared = replace(tier, model=transform(tier.model, options, tier.device, tier.example))
    with matrix_precision(options.precision, tier.device):
        runner = _compile(prepared, options) if options.engine == "compile" else Runner(prepared.model)
    return finished(runner, options, tier.example, tier.device)


def finished(runner: Runner, options: BuildOptions, example: Inputs, device: torch.device) -> Runner:
    """The same with what concerns CUDA only.

    Tf32, or captured as one graph, a `ConfigError` on another device.
    """
    if options.cuda_graphs and options.engine != "compile":  # which captures its own
        if device.type != "cuda":
            raise ConfigError(f"parameter cuda_graphs: true is for CUDA; the device here is {device}")
        with matrix_precision(options.precision, device):
            return replace(runner, call=GraphReplay(runner.call, example))
    tf32 = options.precision == "tf32"
    return replace(runner, call=in_precision(runner.call, "tf32", device)) if tf32 else runner


def open_package(
    path: Path,
    built: Built | Manifest,
    options: BuildOptions,
    tier: BuiltTier,
    **of_runner: Any,  # noqa: ANN401
) -> Runner:
    """A checked package as a worker runs it, of this tier; a `PackageError` if it cannot be loaded."""
    call = ENGINES[options.engine].load(path, built.outputs, options, tier.device)
    return finished(Runner(call, graphs=1, **of_runner), options, tier.example, tier.device)


def _package(tier: BuiltTier, options: BuildOptions) -> Runner:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="torchperf_") as folder:
        path = Path(folder) / f"model{PACKAGE_SUFFIXES[options.engine]}"
        with torch.inference_mode(mode=False):
            plain = replace(tier, example=tuple(tensor.clone() for tensor in tier.example))
            built = ENGINES[options.engine].build(plain, options, path)
        runner = open_package(path, built, options, tier, static=not tier.dims)
    return replace(runner, compile_s=time.perf_counter() - started)


def _compile(tier: BuiltTier, options: BuildOptions) -> Runner:
    """torch.compile, and a first call of every kind of size, so that nothing is left to compile.

    Beyond its limits, 8 graphs of a model and 256 of a class, the compiler would run it in eager from then
    on, and only its log would mention it.
    """
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, limit, max(_MOST_GRAPHS, getattr(torch._dynamo.config, limit)))
    started, before = time.perf_counter(), _counters()
    mode = None if options.mode == "default" else options.mode
    if options.cuda_graphs and mode is None:
        mode = "reduce-overhead"
    dims = tier.dims
    dynamic = bool(dims) or options.dynamic == "always"
    if dynamic:  # a graph would be captured at the first frame of every new size, while that frame waits
        from torch._inductor import config

        config.triton.cudagraph_skip_dynamic_graphs = True
    name_torch_unquoted()
    compiled: Call
    if options.parts:
        paths = [path.strip() for path in options.parts.split(",")]
        compiled = InParts(tier, paths, mode=mode, dynamic=dynamic)
    else:
        compiled = torch.compile(tier.model, mode=mode, dynamic=None if dims else dynamic)
    for usual in tier.inputs_by_size():
        inputs = tuple(
            tensor.clone() for tensor in usual
        )  # marks stay on a tensor, and the example is the adapter's
        for index, spans in from_front(dims, tier.example).items():
            for dim, (low, high) in spans.items():
                if inputs[index].shape[dim] > 1:  # sizes 0 and 1 have a graph of their own
                    torch._dynamo.mark_dynamic(inputs[index], dim, min=max(low, 2), max=high)
        compiled(*inputs)
    after = _counters()
    made = {key: after[key] - before[key] for key in after}
    took_s = time.perf_counter() - started
    return Runner(compiled, made["graphs"], made["breaks"], made["cache_hits"], took_s, parts=options.parts)


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
        self._parts = {path: modules[path] for path in paths}
        self._check_run(tier.example)
        # `Module.compile` would leave `nn.Sequential` and all else of torch.nn as it is
        self._forwards = [(vars(part), torch.compile(part.forward, **how)) for part in self._parts.values()]
        # mostly None: it is the class's
        self._own = [attributes.get("forward") for attributes, _ in self._forwards]

    def _check_run(self, example: Inputs) -> None:
        run: set[torch.nn.Module] = set()
        hooks = [
            part.register_forward_pre_hook(lambda part, _: run.add(part)) for part in self._parts.values()
        ]
        try:
            self._model(*example)
        finally:
            for hook in hooks:
                hook.remove()
        for path, part in self._parts.items():
            if part not in run:
                raise EngineUnavailable(f"parts: the model does not run {path} on the example inputs")

    def __call__(self, *inputs: torch.Tensor) -> Any:  # noqa: ANN401 - a model may return anything
        try:
            for attributes, forward in self._forwards:
                attributes["forward"] = forward
            return self._model(*inputs)
        finally:
            for (attributes, _), own in zip(self._forwards, self._own, strict=True):
                if own is None:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = own


def _counters() -> dict[str, int]:
    from torch._dynamo.utils import counters  # imports the compiler, which an eager worker does not need

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "cache_hits": (
            counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        ),
    }


def choice_of(tier: BuiltTier, options: BuildOptions) -> tuple[list[PackageEngine], Identity]:
    """The engines that are installed and can do what the options ask for here.

    And the identity of a choice of them.
    """
    engines = [engine for engine in ENGINES.values() if not engine.why_not(options, tier.dims, tier.device)]
    return engines, identify(tier, options, ", ".join(engine.version or engine.name for engine in engines))


def identity_of(identity: Identity, engine: PackageEngine) -> Identity:
    """The identity of an engine's package, from that of the choice: the model is hashed once."""
    options = BuildOptions(**identity.options).with_engine(engine.name)
    return replace(identity, options=options.as_identity(), library=engine.version)


def compare(
    calls: Mapping[str, Call], example: Inputs, device: torch.device, left_out: Mapping[str, str]
) -> EngineChoice:
    """Time engines in turns on the example inputs, at a camera's pace, and choose.

    Call it under inference mode.

    `calls` are those that are right, eager among them; `left_out` has the reason for every other engine.
    """
    bound = {name: lambda call=call: call(*example) for name, call in calls.items()}
    found = time_interleaved(
        bound, device, seconds=0.0, rounds=(_ROUNDS, _ROUNDS), inner=1, pause_s=_PACE_S
    )
    calibrations = {name: timing.calibration for name, timing in found.items()}
    timings_ms = {name: [one.median_ms, one.p99_ms] for name, one in calibrations.items()}
    return EngineChoice(choose_engine(calibrations), timings_ms, dict(left_out))


def load_ready_package(
    path: Path,
    folders: Sequence[str] | None,
    device: torch.device,
    example: Inputs,
    dynamic_dims: DynamicDims,
) -> Runner:
    """A compiled package, ready to run; it takes other sizes than the example's if its manifest has ranges.

    Raises:
        PackageError: it is not there or not to be loaded from there, it is an exported program, its hash,
            machine or engine does not match, or it does not run on the example's shapes.
        EngineUnavailable: its engine cannot run it here.
    """
    path = find_package(path, folders)
    manifest = _check_hash(path, device, example)
    identity = manifest.identity if manifest else None
    if identity and identity.dynamic not in ([], declared_dims(dynamic_dims)):
        msg = (
            f"package {path} was built for the dynamic dimensions {identity.dynamic}; the adapter declares"
        )
        raise PackageError(
            f"{msg} {declared_dims(dynamic_dims)}, each [input, dimension, smallest, largest]"
        )
    options = BuildOptions(**identity.options) if identity else BuildOptions("aoti")
    engine = ENGINES[options.engine]
    engine.check(options, {}, device)
    if identity and identity.library != engine.version:
        raise PackageError(f"package {path} was built by {identity.library}; here is {engine.version}")
    call = engine.load(path, manifest.outputs if manifest else "", options, device)
    drawn, outputs = [random_inputs(example, seed) for seed in (1, 2)], []
    for inputs in drawn:
        try:
            outputs.append([tensor.clone() for tensor in tensors_in(call(*inputs))])
        except RuntimeError as error:
            shapes = ", ".join(signature_of(tensor) for tensor in inputs)
            raise PackageError(
                f"package {path} does not run on the adapter's inputs ({shapes}): {one_line(error)}"
            ) from error
    if not all(
        bool(torch.isfinite(t).all()) for tensors in outputs for t in tensors if t.is_floating_point()
    ):
        raise PackageError(f"package {path} gives NaN or Inf on random inputs like the adapter's example")
    # classes may agree
    numbers = [[t for t in tensors if t.is_floating_point() and t.numel()] for tensors in outputs]
    if numbers[0] and same(*numbers) and not same(*drawn):
        raise PackageError(f"package {path} gives the same outputs for different inputs")
    return Runner(
        call,
        graphs=1,
        package=file_sha256(path)[:32],
        model=(identity.weights, identity.code) if identity else None,
        static=identity is None or not identity.dynamic,
        engine=engine.name,
        known=Parity.read(manifest.parity) if manifest else None,
    )


def _check_hash(path: Path, device: torch.device, example: Inputs) -> Manifest | None:
    """Against the manifest that `torchperf compile` wrote, or `<file>.sha256` as the program sha256sum writes it."""
    if manifest_path(path).is_file():
        manifest = check_package(path, None)
        identity = manifest.identity
        name, capability = machine_facts(device)
        here = [torch.__version__, name, capability, *map(signature_of, example)]
        built = [identity.torch, identity.device, identity.capability, *identity.signature]
        if here != built:
            raise PackageError(
                f"package {path} was built for {'; '.join(built)}; this is {'; '.join(here)}"
            )
        return manifest
    beside = path.with_name(f"{path.name}.sha256")
    digest = file_sha256(path)
    try:
        expected = beside.read_text(encoding="utf-8").split()
    except OSError:
        raise PackageError(
            f"package {path} has neither a manifest nor {beside.name}: `sha256sum {path.name}` makes the"
            " latter"
        ) from None
    if expected[:1] != [digest]:
        raise PackageError(
            f"package {path} has the SHA-256 {digest}; {beside.name} says"
            f" {' '.join(expected[:1]) or 'nothing'}"
        )
    return None
