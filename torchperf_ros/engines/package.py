"""The layer Package: a model that was built into a file, with its manifest, and what may be loaded of it.

It also has the table of all engines, and how `auto` chooses between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from torchperf_ros.api.errors import TorchperfError, one_line
from torchperf_ros.engines.built_tier import BuiltTier, Call, Inputs
from torchperf_ros.engines.device import lacks_memory, refused_memory, time_interleaved
from torchperf_ros.engines.engine import (
    CapturedEager,
    CaptureRecord,
    Compile,
    Eager,
    Engine,
    Runner,
    finished,
)
from torchperf_ros.engines.file_engines import Aoti, OnnxRuntime, OpenVino, TensorRt
from torchperf_ros.engines.fingerprint import declared_dims, identify, machine_facts
from torchperf_ros.engines.outputs import signature_of, tensors_in
from torchperf_ros.engines.package_engine import PackageEngine
from torchperf_ros.engines.parity import DynamicDims, KeptState, Parity, random_inputs, same
from torchperf_ros.settings.build_options import GRAPH, GRAPH_MODE, OF_PARTS, BuildOptions
from torchperf_ros.workers.package_cache import find_package
from torchperf_ros.workers.package_manifest import (
    EAGER,
    EngineChoice,
    Identity,
    Manifest,
    PackageError,
    check_package,
    choose_engine,
    file_sha256,
    manifest_path,
)

# Every engine that runs packages.
ENGINES: dict[str, PackageEngine] = {
    engine.name: engine for engine in (Aoti(), OnnxRuntime(), OpenVino(), TensorRt())
}
# Those that run the model itself.
IN_PROCESS: dict[str, Engine] = {engine.name: engine for engine in (Eager(), CapturedEager(), Compile())}

# A camera's pace: between two frames caches go cold, and threads that wait for work go to sleep.
_PACE_S = 1 / 30
_ROUNDS = 40
# The p99 of so few samples is about the longest one. Where the machine stalls in 1 % of all calls, an engine
# meets one stall or more in a third of all choices (1 - 0.99^40), and more than two in 0.8 % (binomial).
_SPARED = 2


@dataclass(frozen=True)
class Package:
    """A file that was checked against what lies beside it.

    Attributes:
        key: names it on `/diagnostics`: that of its identity, of a user's file its hash.
        manifest: None where only a checksum lies beside it; then it is AOTInductor's, of the example's shapes.
    """

    path: Path
    key: str
    manifest: Manifest | None

    @property
    def identity(self) -> Identity | None:
        return self.manifest.identity if self.manifest else None

    @property
    def options(self) -> BuildOptions:
        return BuildOptions(**self.identity.options) if self.identity else BuildOptions("aoti")

    @property
    def engine(self) -> PackageEngine:
        return ENGINES[self.options.engine]

    @property
    def parity(self) -> Parity | None:
        return Parity.read(self.manifest.parity) if self.manifest else None

    def runner(self, device: torch.device) -> Runner:
        """What runs it, before it is `finished`; a `PackageError` if its library cannot load it."""
        outputs = self.manifest.outputs if self.manifest else ""
        call = self.engine.load(self.path, outputs, self.options, device)
        static = self.identity is None or not self.identity.dynamic
        return Runner(call, graphs=1, static=static, package=self)


def users_package(
    path: Path,
    folders: Sequence[str] | None,
    device: torch.device,
    example: Inputs,
    dynamic_dims: DynamicDims,
) -> Runner:
    """A file that a user has named, before it is `finished`; it takes other sizes if its manifest has ranges.

    Raises:
        PackageError: it is not there or not to be loaded from there, it is an exported program, its hash,
            machine or engine does not match, or it does not run on the example's shapes.
        EngineUnavailable: its engine cannot run it here.
    """
    package = _checked(find_package(path, folders), device, example)
    path, identity, engine = package.path, package.identity, package.engine
    declared = declared_dims(dynamic_dims)
    if identity and identity.dynamic not in ([], declared):
        raise PackageError(
            f"package {path} was built for the dynamic dimensions {identity.dynamic}; the adapter declares"
            f" {declared}, each [input, dimension, smallest, largest]"
        )
    engine.check(package.options, {}, device)
    if identity and identity.library != engine.version:
        raise PackageError(f"package {path} was built by {identity.library}; here is {engine.version}")
    runner = package.runner(device)
    _try(path, runner.call, example)
    return runner


def _checked(path: Path, device: torch.device, example: Inputs) -> Package:
    """By the manifest that `torchperf compile` wrote, or `<file>.sha256` as sha256sum writes it."""
    if manifest_path(path).is_file():
        manifest = check_package(path, None)
        identity = manifest.identity
        here = [torch.__version__, *machine_facts(device), *map(signature_of, example)]
        built = [identity.torch, identity.device, identity.capability, *identity.signature]
        if here != built:
            raise PackageError(
                f"package {path} was built for {'; '.join(built)}; this is {'; '.join(here)}"
            )
        return Package(path, manifest.package_sha256[:32], manifest)
    beside, digest = path.with_name(f"{path.name}.sha256"), file_sha256(path)
    try:
        expected = beside.read_text(encoding="utf-8").split()[:1]
    except OSError:
        raise PackageError(
            f"package {path} has neither a manifest nor {beside.name}: `sha256sum {path.name}` makes the"
            " latter"
        ) from None
    if expected != [digest]:
        raise PackageError(
            f"package {path} has the SHA-256 {digest}; {beside.name} says {' '.join(expected) or 'nothing'}"
        )
    return Package(path, digest[:32], None)


def _try(path: Path, call: Call, example: Inputs) -> None:
    """Run it on two random inputs, whose outputs have to be numbers and to differ."""
    drawn, numbers = [random_inputs(example, seed) for seed in (1, 2)], []
    for inputs in drawn:
        try:
            outputs = [t.clone() for t in tensors_in(call(*inputs)) if t.is_floating_point() and t.numel()]
        except RuntimeError as error:
            shapes = ", ".join(signature_of(tensor) for tensor in inputs)
            raise PackageError(
                f"package {path} does not run on the adapter's inputs ({shapes}): {one_line(error)}"
            ) from error
        if not all(bool(torch.isfinite(tensor).all()) for tensor in outputs):
            raise PackageError(
                f"package {path} gives NaN or Inf on random inputs like the adapter's example"
            )
        numbers.append(outputs)
    # Classes, which are no numbers with a point, may agree.
    if numbers[0] and same(*numbers) and not same(*drawn):
        raise PackageError(f"package {path} gives the same outputs for different inputs")


def make_runner(tier: BuiltTier, options: BuildOptions, record: CaptureRecord | None = None) -> Runner:
    """Make a model ready to run, which stays as it is; compiled engines take 10 s and more.

    The tier's `dims` are the adapter's. The `record` keeps whether it can be captured, where that is asked for.

    Raises:
        ConfigError: an option that cannot be used here.
        EngineUnavailable: the engine cannot run this here.
        CaptureFailed: it cannot be captured, and this process has to end.
        Exception: the error of torch or the library, which cannot compile the model.
    """
    tier = tier.narrowed(options)
    engine = IN_PROCESS.get(options.engine) or ENGINES[options.engine]
    engine.check(options, tier.dims, tier.device)
    kept = KeptState(tier.model) if options.is_captured else None
    runner = finished(engine.prepare(tier, options), options, tier.example, tier.device, record)
    if kept is not None:
        # What the runs before a capture have changed: eager's answers will be compared with the engine's.
        kept.restore()
    return runner


def ways_of(tier: BuiltTier, options: BuildOptions) -> tuple[dict[str, BuildOptions], Identity]:
    """The ways to run a model here, by name, eager first, and what a choice between them is kept under.

    On CUDA each of them is also captured as a graph, eager among them. It depends on a stage's `shapes` and `batch`
    whether a graph of eager can be used where sizes vary, which is for who loads the choice.
    """
    is_cuda = tier.device.type == "cuda"
    plain = replace(options, cuda_graphs=False) if is_cuda else options
    packages = {name: plain.with_engine(name) for name in ENGINES}
    if is_cuda:
        packages |= {f"{name} cuda_graphs": replace(packages[name], cuda_graphs=True) for name in ENGINES}
    ways = {EAGER: plain.with_engine(EAGER)} | {
        name: each
        for name, each in packages.items()
        if not ENGINES[each.engine].why_not(each, tier.dims, tier.device)
    }
    library = ", ".join(engine.version or name for name, engine in ENGINES.items() if name in ways)
    if is_cuda:
        library += ", graphs of all sizes"
        ways[GRAPH] = replace(
            plain.with_engine(GRAPH),
            # Tensor cores take convolutions with channels last; others would be laid out anew for each.
            channels_last=plain.channels_last or plain.precision in {"bf16", "fp16"},
        )
        if not tier.dims:
            ways[f"compile {GRAPH_MODE}"] = replace(plain.with_engine(OF_PARTS), mode=GRAPH_MODE)
    return ways, identify(tier, options, library)


def identity_of(identity: Identity, engine: str) -> Identity:
    """What an engine's package or capture is kept under, from the choice's: the model is hashed once."""
    options = BuildOptions(**identity.options).with_engine(engine)
    library = ENGINES[engine].version if engine in ENGINES else ""
    return replace(identity, options=options.as_identity(), library=library)


class TimingFailed(TorchperfError):
    """Memory did not suffice for all ways together, so that this process has to end.

    Attributes:
        lacked: the way that the next process has to do without.
    """

    def __init__(self, why: str, lacked: str) -> None:
        super().__init__(why)
        self.lacked = lacked


def compare(
    calls: Mapping[str, Call], example: Inputs, device: torch.device, left_out: Mapping[str, str]
) -> EngineChoice:
    """Time engines in turns on the example inputs, at a camera's pace, and choose.

    Call it under inference mode. `calls` are those that are right, eager among them; `left_out` has the reason for
    every other engine.

    Raises:
        TimingFailed: memory did not suffice for one of them, or for eager beside the last one.
    """
    is_cuda = device.type == "cuda"
    refused = refused_memory(device) if is_cuda else 0

    def run(name: str) -> None:
        try:
            calls[name](*example)
        except Exception as error:  # the libraries' boundary
            lacked = name if name != EAGER else [*calls][-1]
            is_refused = is_cuda and refused_memory(device) > refused
            if lacked == EAGER or not lacks_memory(error, is_refused=is_refused):
                raise
            why = f"no memory for {name} beside all others: {one_line(error)}"
            raise TimingFailed(why, lacked) from error

    bound = {name: partial(run, name) for name in calls}
    found = time_interleaved(
        bound, device, seconds=0.0, rounds=(_ROUNDS, _ROUNDS), inner=1, pause_s=_PACE_S
    )
    calibrations = {name: timing.calibration(_SPARED) for name, timing in found.items()}
    timings_ms = {name: [one.median_ms, one.p99_ms] for name, one in calibrations.items()}
    return EngineChoice(choose_engine(calibrations), timings_ms, dict(left_out))
