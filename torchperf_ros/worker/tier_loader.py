"""Makes each tier ready to run, by the engine that was asked for if it is there and right, else by eager.

The way of a tier: its adapter's model (`BuiltTier`), an engine or a package that makes a `Runner` of it, the comparison
with eager, a `ShapeRunner` for other sizes, and the `Tier` that the session runs.
"""

import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.errors import ConfigError, one_line
from torchperf_ros.engines.built_tier import BuiltTier, Inputs, build_model, scoring_of, varying_dims
from torchperf_ros.engines.device import Device
from torchperf_ros.engines.engine import (
    CaptureFailed,
    CaptureRecord,
    EngineUnavailable,
    Runner,
    finished,
    from_front,
)
from torchperf_ros.engines.fingerprint import code_hash, files_hash, identify, weights_hash
from torchperf_ros.engines.package import (
    ENGINES,
    Package,
    identity_of,
    make_runner,
    users_package,
    ways_of,
)
from torchperf_ros.engines.parity import (
    KeptState,
    ParityError,
    check_engine,
    depends_on_state,
    random_inputs,
)
from torchperf_ros.engines.shape_runner import ShapeRunner
from torchperf_ros.settings.build_options import AUTO, GRAPH, OF_PARTS, BuildOptions
from torchperf_ros.worker.batching import batch_shapes
from torchperf_ros.worker.tier import InvalidOutput, OutputCheck, Tier
from torchperf_ros.workers.control import TierFacts
from torchperf_ros.workers.package_cache import open_cache, use_compiler_cache
from torchperf_ros.workers.package_manifest import EAGER, Identity, PackageError, check_package
from torchperf_ros.workers.worker_setup import WorkerSetup

_NOT_YET = "not compiled yet"
_PROBE = 77  # the seed of inputs that no check draws


class TierLoader:
    """Loads the tiers of one adapter.

    Attributes:
        missing: tiers whose package is not there, or whose model is still to be compiled.
        capturing: takes the key of a model while it is captured, see `CaptureRecord`.
    """

    def __init__(
        self,
        adapter: Adapter,
        setup: WorkerSetup,
        device: Device,
        say: Callable[[str], None],
        capturing: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.missing: list[str] = []
        self._adapter = adapter
        self._dims = adapter.dynamic_dims()
        self._setup = setup
        self._device, self._on = device, device.device
        self._say, self.capturing = say, capturing
        self._cache = open_cache(setup.cache_dir, setup.cache_mib)
        self._models: dict[str, tuple[torch.nn.Module, KeptState]] = {}

    def load(self, number: int) -> Tier:
        """The tier of this number, checked against eager.

        Raises:
            AdapterError: the adapter's model or inputs cannot be used.
        """
        started_s = time.monotonic()
        setup = self._setup
        name, package, options = setup.tiers[number], setup.packages[number], setup.build[number]
        if setup.without_graphs:  # a worker before this one has ended as its capture failed
            options = options.without_graphs()
        example = self._device.to_device(self._adapter.example_inputs(name))
        if package and self._adapter.anytime:
            raise ConfigError(f"tier {name}: package {package} cannot be: an anytime model runs in eager")
        hashes: tuple[str, ...] = ()
        if package:
            runner = self._users(Path(package), options, example)
            hashes = _hashes_of(runner)
            tier = self._with_package(name, runner, options, example, strict=setup.swapped == number)
        else:
            built = self._built(name, example, options)
            if setup.identify:  # what a replay's outputs depend on, `preprocess` and `postprocess` too
                hashes = weights_hash(built.model), code_hash(built.model), files_hash(type(self._adapter))
            if self._adapter.anytime:
                why = "" if options.engine == EAGER else "an anytime model's steps are eager"
                tier = self._eager(TierFacts(name, EAGER, why), built.model)
            else:
                tier = self._with_engine(name, built, options)
        if hashes and setup.identify:
            tier.facts.model = hashlib.sha256("".join(hashes).encode()).hexdigest()
        tier.facts.load_s = time.monotonic() - started_s
        self.forget_runs(name, example)  # another tier may share modules with it
        return tier

    def forget_runs(self, name: str, example: Inputs) -> list[str]:
        """Bring a model whose answers depend on earlier calls back to the state that its build gave it.

        Returns what it keeps, by name. Weights that calls change come from another build: no copy is kept.
        A model that fuses its layers at its first call is then as that call left it.
        """
        model, kept = self._models.get(name, (None, None))
        if model is None or kept is None:
            return []
        if not kept.fits:
            self._models[name] = model, KeptState(model)
        names = list[str]()
        if kept.has_changed:
            try:
                # Other inputs than those of the runs before.
                inputs = random_inputs(self._device.to_device(example), _PROBE)
                names = depends_on_state(model, kept, inputs, model(*inputs))
            except Exception:  # a model may not take inputs that are drawn
                kept.restore()
        if weights := kept.changed_weights():
            kept.restore()  # what says that the weights are as they are to be
            built = build_model(self._adapter, name)
            for weight in weights:
                model.get_parameter(weight).copy_(built.get_parameter(weight))
        return [*names, *weights]

    def _built(self, name: str, example: Inputs, options: BuildOptions) -> BuiltTier:
        model = build_model(self._adapter, name).to(self._on)
        self._models[name] = model, KeptState(model)
        dims, scoring = varying_dims(options, self._dims), scoring_of(self._adapter, name, self._on)
        return BuiltTier(model, example, dims, self._on, scoring=scoring)

    def _users(self, path: Path, options: BuildOptions, example: Inputs) -> Runner:
        dims = varying_dims(options, self._dims)
        with torch.inference_mode(mode=False):
            runner = users_package(path, self._setup.package_dirs, self._on, example, dims)
            return finished(runner, replace(options, engine="aoti"), example, self._on)

    def _with_package(
        self, name: str, runner: Runner, options: BuildOptions, example: Inputs, *, strict: bool
    ) -> Tier:
        """A user's package, compared with what the adapter builds; by results if it is that model.

        Raises:
            ParityError: it differs, and it is `strict`: being swapped in. Otherwise the adapter's model
                runs in eager.
        """
        assert runner.package
        facts = TierFacts(name, runner.package.engine.name)
        built, is_model = None, False
        try:
            with torch.inference_mode(mode=False):
                built = self._built(name, example, options)
                is_model = _hashes_of(runner) == (weights_hash(built.model), code_hash(built.model))
        except Exception as error:  # the user's code: that it cannot build may be why there is a package
            facts.why = f"nothing to compare with, and no eager: {one_line(error)}"
        try:
            if built is not None:
                OutputCheck(built.model(*example), fixed_sizes=True).check(runner.call(*example))
            if built is not None and is_model:
                return self._tier(facts, runner, options, example, replace(built, dims={}))
            self._models.pop(name, None)  # another model is no stand-in
            return self._tier(facts, runner, options, example)
        except (ParityError, InvalidOutput) as error:
            if strict or built is None:
                raise
            self._say(f"tier {name} runs in eager: its package is refused: {error}")
            return self._eager(TierFacts(name, EAGER, str(error)), built.model)

    def _eager(self, facts: TierFacts, model: torch.nn.Module) -> Tier:
        steps = functools.partial(self._adapter.steps, model) if self._adapter.anytime else None
        return Tier(facts, Runner(model), model, self._device, self._say, steps=steps)

    def _with_engine(self, name: str, built: BuiltTier, options: BuildOptions) -> Tier:
        facts, model = TierFacts(name, options.engine), built.model
        runner: Runner | None = None
        try:
            options, identity = self._settled(built, options, facts)
            runner = self._runner(name, built, options, identity)
            # Also where it is still to be compiled: shapes that do not fit are refused now.
            tier = self._tier(facts, runner or Runner(model), options, built.example, built)
            if runner is not None:
                facts.engine = options.engine
                facts.parts = options.parts if options.engine == OF_PARTS else ""
                return tier
            facts.why = "; ".join(filter(None, (_NOT_YET, facts.why)))
        except (ConfigError, CaptureFailed):
            raise
        except Exception as error:  # the compiler's boundary: the model may be one that it cannot take
            facts.why = self._refused(name, runner, options, error)
        facts.engine = EAGER
        return self._eager(facts, model)

    def _settled(
        self, tier: BuiltTier, options: BuildOptions, facts: TierFacts
    ) -> tuple[BuildOptions, Identity | None]:
        """The options as `auto` has chosen, with a graph only where there can be one, and their key.

        As long as nothing is chosen, `auto` is a graph of eager, or stays as it is where there cannot be one.
        """
        asked, identity = options, None
        if options.engine == AUTO:
            options, of_choice = self._chosen(tier, options, facts)
            if options.engine != AUTO:
                identity = identity_of(of_choice, options.engine)
        elif options.is_captured or options.engine in ENGINES:
            library = ENGINES[options.engine].version if options.engine in ENGINES else ""
            identity = identify(tier, options, library)
        if why := self._why_no_graph(tier, options, identity):
            facts.why = f"no CUDA graph: {why}"
            self._say(f"tier {facts.name} runs without a CUDA graph: {why}")
            is_meanwhile = asked.engine == AUTO and facts.name in self.missing
            options = asked if is_meanwhile else options.without_graphs()
        return options, identity

    def _why_no_graph(self, tier: BuiltTier, options: BuildOptions, identity: Identity | None) -> str:
        if not options.is_captured or identity is None or self._on.type != "cuda":
            return ""
        if self._setup.without_graphs:
            return "an earlier worker failed to capture one"
        if options.engine == GRAPH and not self._has_known_sizes(tier):
            return "sizes vary; `shapes: bucket` rounds them up, `exact` fixes them"
        return CaptureRecord(self._cache, identity).why_not()

    def _has_known_sizes(self, tier: BuiltTier) -> bool:
        """Whether the sizes of frames are known now: fixed, rounded up, or numbers of frames in a batch."""
        varying = {dim for dims in from_front(tier.dims, tier.example).values() for dim in dims}
        are_frames = self._setup.batch > 1 and varying <= {0}
        return are_frames or not varying or self._setup.shapes.policy != "dynamic"

    def _refused(self, name: str, runner: Runner | None, options: BuildOptions, error: Exception) -> str:
        """Why the tier runs in eager in place of an engine.

        Raises:
            CaptureFailed: it may have failed while a CUDA graph was captured.
        """
        why, engine = one_line(error), f"{options.label} "
        if isinstance(error, EngineUnavailable):
            why, engine = str(error), ""
        elif isinstance(error, ParityError):
            why = f"refused: {error}"
            if runner and runner.package:
                # It is out of date in a way that its key does not show. Built anew, it is checked again.
                self._remove(runner.package.path)
                self.missing.append(name)
        elif self._device.is_cuda and options != options.without_graphs():
            raise CaptureFailed(f"tier {name}: {options.label}: {why}") from error
        self._say(f"tier {name} runs in eager: {engine}{why}")
        return why

    def _tier(
        self,
        facts: TierFacts,
        runner: Runner,
        options: BuildOptions,
        example: Inputs,
        built: BuiltTier | None = None,
    ) -> Tier:
        """The tier of a runner: compared with eager, where there is one, and ready for inputs of other sizes.

        Raises:
            ParityError: not even the example's results are eager's.
        """
        model = None if built is None else built.model
        parity, shapes = None, None
        if built is not None and runner.call is not model:
            known = runner.package.parity if runner.package else None
            parity = check_engine(
                built.model,
                runner.call,
                example,
                {} if runner.captured else built.dims,  # other sizes do not reach the graph
                options.precision,
                briefly=True,
                scoring=built.scoring,
                known=known,
            )
        wanted, dims = self._setup.shapes, varying_dims(options, self._dims)
        if options.engine == GRAPH and wanted.policy == "dynamic":
            wanted = replace(wanted, policy="exact")
        if self._setup.batch > 1 and dims and not runner.static:  # an engine for ranges takes batches, too
            common = (*wanted.common, *batch_shapes(self._adapter, example, self._setup.batch))
            wanted = replace(wanted, common=common)
        # Eager itself takes inputs of any size.
        if runner.call is not model or wanted.policy == "bucket":
            shapes = ShapeRunner(
                runner.call,
                model,
                wanted,
                self._dims,
                example,
                options.precision,
                parity,
                unpad=self._adapter.unpad,
                dynamic_engine=options.engine == EAGER or (bool(dims) and options.engine != GRAPH),
                static=runner.static,
                capture=runner.captured.capture if runner.captured else None,
            )
            shapes.warm_up()
            for note in shapes.notes:
                self._say(f"tier {facts.name}: {note}")
        if runner.captured:
            self._device.graph_bytes += runner.captured.memory_bytes()
        return Tier(facts, runner, model, self._device, self._say, shapes)

    def _chosen(
        self, tier: BuiltTier, options: BuildOptions, facts: TierFacts
    ) -> tuple[BuildOptions, Identity]:
        """The options as auto has chosen, if it has, and what its choice is kept under."""
        ways, identity = ways_of(tier, options)
        if not self._has_known_sizes(tier):
            ways.pop(GRAPH, None)
        self._cache.check_private()
        choice = self._cache.choice(identity)
        chosen = ways[choice.best_of(ways)] if choice is not None else None
        # What takes long to compile is not for the first worker.
        if choice is not None and chosen is not None and (chosen.engine != OF_PARTS or self._setup.compile):
            facts.choice = choice.words
            return chosen, identity
        if self._on.type != "cuda" or not self._has_known_sizes(tier):
            return options, identity
        self.missing.append(facts.name)
        facts.why = _NOT_YET
        return ways[GRAPH], identity

    def _runner(
        self, name: str, tier: BuiltTier, options: BuildOptions, identity: Identity | None
    ) -> Runner | None:
        """The engine, unchecked; None where it has to be compiled first."""
        record = (
            CaptureRecord(self._cache, identity, self.capturing)
            if options.is_captured and identity
            else None
        )
        if options.engine in {EAGER, GRAPH}:
            return make_runner(tier, options, record)
        if options.engine == OF_PARTS and self._setup.compile:
            if not self._setup.compiles:  # else the process has begun with that
                setup = self._setup
                self._compiler_lock = use_compiler_cache(setup.cache_dir, setup.cache_mib << 20)
            return make_runner(tier, options)
        if (engine := ENGINES.get(options.engine)) and identity:
            engine.check(options, tier.dims, self._on)
            path = self._cache.path(identity)
            self._cache.check_private()
            try:
                if path.exists():
                    package = Package(path, identity.key, check_package(path, identity))
                    self._cache.used(path)
                    return finished(package.runner(self._on), options, tier.example, self._on, record)
            except PackageError as error:
                self._say(f"{error}; it is built anew")
                self._remove(path)
        if name not in self.missing:
            self.missing.append(name)
        return None

    def _remove(self, package: Path) -> None:
        try:
            self._cache.remove(package)
        except ConfigError as error:
            self._say(str(error))


def _hashes_of(runner: Runner) -> tuple[str, ...]:
    identity = runner.package.identity if runner.package else None
    return (identity.weights, identity.code) if identity else ()
