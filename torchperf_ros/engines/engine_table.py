"""Every engine by its name, and how `auto` chooses between those that run packages.

An engine `graph` (eager inside of a CUDA graph) belongs into `IN_PROCESS`; `candidates_of` is where `auto` decides
what it times.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from torchperf_ros.engines.aoti import Aoti
from torchperf_ros.engines.built_tier import BuiltTier, Call, Inputs
from torchperf_ros.engines.engine import Compile, Eager, Engine, Runner, finished
from torchperf_ros.engines.fingerprint import identify
from torchperf_ros.engines.library_engines import OnnxRuntime, OpenVino, TensorRt
from torchperf_ros.engines.package_engine import PackageEngine
from torchperf_ros.engines.stopwatch import time_interleaved
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers.engine_choice import EngineChoice, choose_engine
from torchperf_ros.workers.package_manifest import Identity

# Every engine that runs packages.
ENGINES: dict[str, PackageEngine] = {
    engine.name: engine for engine in (Aoti(), OnnxRuntime(), OpenVino(), TensorRt())
}
# Those that run the model itself.
IN_PROCESS: dict[str, Engine] = {engine.name: engine for engine in (Eager(), Compile())}

# A camera's pace: between two frames caches go cold, and threads that wait for work go to sleep.
_PACE_S = 1 / 30
_ROUNDS = 40


def make_runner(tier: BuiltTier, options: BuildOptions) -> Runner:
    """Make a model ready to run, which stays as it is; compiled engines take 10 s and more.

    The tier's `dims` are the adapter's.

    Raises:
        ConfigError: an option that cannot be used here.
        EngineUnavailable: the engine cannot run this here.
        Exception: the error of torch or the library, which cannot compile the model.
    """
    tier = tier.narrowed(options)
    engine = IN_PROCESS.get(options.engine) or ENGINES[options.engine]
    engine.check(options, tier.dims, tier.device)
    return finished(engine.prepare(tier, options), options, tier.example, tier.device)


def candidates_of(tier: BuiltTier, options: BuildOptions) -> tuple[list[PackageEngine], Identity]:
    """The installed engines that can do here what the options ask for, and the identity of a choice of them."""
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

    Call it under inference mode. `calls` are those that are right, eager among them; `left_out` has the reason for
    every other engine.
    """
    bound = {name: lambda call=call: call(*example) for name, call in calls.items()}
    found = time_interleaved(
        bound, device, seconds=0.0, rounds=(_ROUNDS, _ROUNDS), inner=1, pause_s=_PACE_S
    )
    calibrations = {name: timing.calibration for name, timing in found.items()}
    timings_ms = {name: [one.median_ms, one.p99_ms] for name, one in calibrations.items()}
    return EngineChoice(choose_engine(calibrations), timings_ms, dict(left_out))
