"""Makes each tier ready to run.

By the engine that was asked for if it is there and right, else by eager.
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
from torchperf_ros.engines.cuda_graph import CaptureFailed
from torchperf_ros.engines.device import Device
from torchperf_ros.engines.engine import (
    ENGINES,
    Runner,
    choice_of,
    finished,
    identity_of,
    load_ready_package,
    make_runner,
    open_package,
)
from torchperf_ros.engines.fingerprint import code_hash, files_hash, identify, weights_hash
from torchperf_ros.engines.kept_state import KeptState
from torchperf_ros.engines.package_engine import EngineUnavailable
from torchperf_ros.engines.parity import Parity, ParityError, check_engine, depends_on_state, random_inputs
from torchperf_ros.engines.shape_runner import ShapeRunner
from torchperf_ros.settings.build_options import AUTO, PACKAGE_SUFFIXES, BuildOptions
from torchperf_ros.worker.batching import batch_shapes
from torchperf_ros.worker.tier import InvalidOutput, OutputCheck, Tier
from torchperf_ros.workers.control import TierFacts
from torchperf_ros.workers.engine_choice import EAGER
from torchperf_ros.workers.package_cache import open_cache
from torchperf_ros.workers.package_manifest import Identity, PackageError, check_package
from torchperf_ros.workers.worker_setup import WorkerSetup

_NOT_YET = "not compiled yet"
_PROBE = 77  # the seed of inputs that no check draws


class TierLoader:
    """Loads the tiers of one adapter.

    Attributes:
        missing: tiers whose package is not there, or whose model is still to be compiled.
    """

    def __init__(
        self, adapter: Adapter, setup: WorkerSetup, device: Device, say: Callable[[str], None]
    ) -> None:
        self.missing: list[str] = []
        self._adapter = adapter
        self._dims = adapter.dynamic_dims()
        self._setup = setup
        self._device = device
        self._on = device.device
        self._say = say
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
        if self._adapter.anytime and package:
            raise ConfigError(f"tier {name}: package {package} cannot be: an anytime model runs in eager")
        hashes: tuple[str, ...] | None = None
        if package:
            with torch.inference_mode(mode=False):
                runner = load_ready_package(
                    Path(package),
                    setup.package_dirs,
                    self._on,
                    example,
                    varying_dims(options, self._dims),
                )
                runner = finished(runner, replace(options, engine="aoti"), example, self._on)
            hashes = runner.model
            tier = self._with_package(name, runner, options, example, strict=setup.swapped == number)
        else:
            model = self._model(name)
            if setup.identify:  # what a replay's outputs depend on, `preprocess` and `postprocess` too
                hashes = weights_hash(model), code_hash(model), files_hash(type(self._adapter))
            tier = self._with_engine(name, self._built(name, model, example), options)
        if hashes and setup.identify:
            tier.facts.model = hashlib.sha256("".join(hashes).encode()).hexdigest()
        tier.facts.load_s = time.monotonic() - started_s
        self.forget_runs(name, example)  # another tier may share modules with it
        return tier

    def forget_runs(self, name: str, example: Inputs) -> list[str]:
        """Bring a model whose answers depend on earlier calls back to the state that its build gave it.

        Returns what it keeps, by name.
        """
        model, kept = self._models.get(name, (None, None))
        if model is None or kept is None or not kept.has_changed:
            return []
        try:
            inputs = random_inputs(
                self._device.to_device(example), _PROBE
            )  # others than those of the runs before
            return depends_on_state(model, kept, inputs, model(*inputs))
        except Exception:  # a model may not take inputs that are drawn
            kept.restore()
            return []

    def _model(self, name: str) -> torch.nn.Module:
        model = build_model(self._adapter, name).to(self._on)
        self._models[name] = model, KeptState(model)
        return model

    def _with_package(
        self, name: str, runner: Runner, options: BuildOptions, example: Inputs, *, strict: bool
    ) -> Tier:
        """A user's package.

        Compared with what the adapter builds, if it can, and with its results if it is that model.

        Raises:
            ParityError: it differs, and it is `strict`: being swapped in. Otherwise the adapter's model
                runs in eager.
        """
        eager, facts, parity = None, TierFacts(name, runner.engine), None
        try:
            with torch.inference_mode(mode=False):
                eager = self._model(name)
                identity = weights_hash(eager), code_hash(eager)
        except Exception as error:  # the user's code: that it cannot build may be why there is a package
            facts.why = f"nothing to compare with, and no eager: {one_line(error)}"
        try:
            if eager is not None:
                OutputCheck(eager(*example), fixed_sizes=True).check(runner.call(*example))
                if runner.model == identity:
                    tier = self._built(name, eager, example)
                    parity = check_engine(
                        eager,
                        runner.call,
                        example,
                        {},
                        options.precision,
                        2,
                        tier.scoring,
                        known=runner.known,
                    )
                else:
                    eager = None  # another model: it is no stand-in
                    del self._models[name]
            shapes = self._fitted(name, runner, eager, options, example, parity)
        except (ParityError, InvalidOutput) as error:
            if strict or eager is None:
                raise
            self._say(f"tier {name} runs in eager: its package is refused: {error}")
            return Tier(TierFacts(name, "eager", str(error)), Runner(eager), eager, self._device, self._say)
        return Tier(facts, runner, eager, self._device, self._say, shapes)

    def _built(self, name: str, model: torch.nn.Module, example: Inputs) -> BuiltTier:
        scoring = scoring_of(self._adapter, name, self._on)
        return BuiltTier(model, example, self._dims, self._on, scoring=scoring)

    def _with_engine(self, name: str, tier: BuiltTier, options: BuildOptions) -> Tier:
        facts, names_engine, model = TierFacts(name, options.engine), False, tier.model
        if self._adapter.anytime:
            facts = TierFacts(
                name, "eager", "" if options.engine == "eager" else "an anytime model's steps are eager"
            )
            steps = functools.partial(self._adapter.steps, model)
            return Tier(facts, Runner(model), model, self._device, self._say, steps=steps)
        runner, shapes, identity, parity = Runner(model), None, None, None
        try:
            if options.engine == AUTO:
                options, identity = self._chosen(tier, options, facts)
            runner = self._runner(name, tier, options, identity) or runner
            if runner.call is not model:
                dims = varying_dims(options, self._dims)
                parity = check_engine(
                    model,
                    runner.call,
                    tier.example,
                    dims,
                    options.precision,
                    2,
                    tier.scoring,
                    known=runner.known,
                )
            shapes = self._fitted(name, runner, model, options, tier.example, parity)
        except (ConfigError, CaptureFailed):
            raise
        except ParityError as error:
            if (
                runner.package
            ):  # out of date in a way that its key does not show; built anew, it is checked again
                self._remove(self._cache.folder / f"{runner.package}{PACKAGE_SUFFIXES[options.engine]}")
                self.missing.append(name)
            facts.why = f"refused: {error}"
        except EngineUnavailable as error:
            facts.why, names_engine = str(error), True
        except (
            Exception
        ) as error:  # the compiler's boundary: a model that it cannot take runs in eager, and says why
            if (
                self._device.is_cuda and options != options.without_graphs()
            ):  # it may have failed in a capture
                raise CaptureFailed(f"tier {name}: {options.label}: {one_line(error)}") from error
            facts.why = one_line(error)
        if facts.why:
            self._say(
                f"tier {name} runs in eager: {'' if names_engine else options.label + ' '}{facts.why}"
            )
        elif options.engine != "eager" and runner.call is model:
            facts.why = _NOT_YET
        if facts.why:
            facts.engine, runner, shapes = "eager", Runner(model), None
        return Tier(facts, runner, model, self._device, self._say, shapes)

    def _fitted(
        self,
        name: str,
        runner: Runner,
        eager: torch.nn.Module | None,
        options: BuildOptions,
        example: Inputs,
        parity: Parity | None,
    ) -> ShapeRunner | None:
        """What runs inputs of other sizes than the engine's; None where eager takes inputs of any size.

        Raises:
            ParityError: not even the example's results are eager's.
        """
        shapes, dims = self._setup.shapes, varying_dims(options, self._dims)
        if self._setup.batch > 1 and dims and not runner.static:  # an engine for ranges takes batches, too
            common = (*shapes.common, *batch_shapes(self._adapter, example, self._setup.batch))
            shapes = replace(shapes, common=common)
        if runner.call is eager and shapes.policy != "bucket":
            return None
        fitted = ShapeRunner(
            runner.call,
            eager,
            shapes,
            self._dims,
            example,
            options.precision,
            parity,
            unpad=self._adapter.unpad,
            dynamic_engine=options.engine == "eager" or bool(dims),
            static=runner.static,
        )
        fitted.warm_up()
        for note in fitted.notes:
            self._say(f"tier {name}: {note}")
        return fitted

    def _chosen(
        self, tier: BuiltTier, options: BuildOptions, facts: TierFacts
    ) -> tuple[BuildOptions, Identity]:
        engines, identity = choice_of(replace(tier, dims=varying_dims(options, self._dims)), options)
        self._cache.check_private()
        choice = self._cache.choice(identity)
        if choice is None or choice.engine not in {EAGER, *(engine.name for engine in engines)}:
            return options, identity
        facts.engine, facts.choice = choice.engine, choice.words
        options = options.with_engine(choice.engine)
        return options, (
            identity if choice.engine == EAGER else identity_of(identity, ENGINES[choice.engine])
        )

    def _runner(
        self, name: str, tier: BuiltTier, options: BuildOptions, identity: Identity | None
    ) -> Runner | None:
        """The engine, unchecked; None where it has to be compiled first."""
        if options.engine == "eager" or (options.engine == "compile" and self._setup.compile):
            return make_runner(tier, options)
        if engine := ENGINES.get(options.engine):
            tier = replace(tier, dims=varying_dims(options, self._dims))
            engine.check(options, tier.dims, self._on)
            identity = identity or identify(tier, options, engine.version)
            path = self._cache.path(identity)
            self._cache.check_private()
            try:
                if path.exists():
                    manifest = check_package(path, identity)
                    self._cache.used(path)
                    return open_package(
                        path,
                        manifest,
                        options,
                        tier,
                        package=identity.key,
                        static=not identity.dynamic,
                        known=Parity.read(manifest.parity),
                    )
            except PackageError as error:
                self._say(f"{error}; it is built anew")
                self._remove(path)
        self.missing.append(name)
        return None

    def _remove(self, package: Path) -> None:
        try:
            self._cache.remove(package)
        except ConfigError as error:
            self._say(str(error))
