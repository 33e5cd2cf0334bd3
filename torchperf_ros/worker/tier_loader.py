"""Makes each tier ready to run: by the engine that was asked for if it is there and right, else by eager."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.errors import AdapterError, ConfigError
from torchperf_ros.core.package_cache import open_cache
from torchperf_ros.core.package_manifest import PackageError, check_package
from torchperf_ros.core.shape_buckets import axes_of
from torchperf_ros.core.shape_options import ShapeOptions
from torchperf_ros.worker.adapter import Adapter
from torchperf_ros.worker.batch_chunks import BatchChunks
from torchperf_ros.worker.device import Device
from torchperf_ros.worker.engine import Runner, finished, make_runner, varying_dims
from torchperf_ros.worker.fingerprint import code_hash, identify, weights_hash
from torchperf_ros.worker.output_check import InvalidOutput, OutputCheck
from torchperf_ros.worker.output_sizes import shapes_of
from torchperf_ros.worker.package import load_package
from torchperf_ros.worker.parity import DynamicDims, ParityError, check_engine
from torchperf_ros.worker.ready_package import load_ready_package
from torchperf_ros.worker.shape_runner import ShapeRunner
from torchperf_ros.worker.tier import Tier, TierFacts

_NOT_YET = "not compiled yet"


class TierLoader:
    """Loads the tiers of one adapter.

    Attributes:
        missing: tiers whose package is not there, or whose model is still to be compiled.
    """

    def __init__(self, adapter: Adapter, setup: Mapping[str, Any], device: Device, say: Callable[[str], None]) -> None:
        """Take what the worker was told at its start; `say` takes lines for log and `/perf/anomaly`."""
        self.missing: list[str] = []
        self._adapter = adapter
        self._setup = setup
        self._device = device
        self._say = say
        self._cache = open_cache(setup.get("cache_dir", ""), setup.get("cache_mib", 4096))

    def load(self, number: int) -> Tier:
        """The tier of this number, checked against eager.

        Raises:
            AdapterError: the adapter's model or inputs cannot be used.
        """
        started_s = time.monotonic()
        name = self._setup["tiers"][number]
        options = BuildOptions(**self._setup["build"][number])
        package = self._setup["packages"][number]
        example = self._device.to_device(self._adapter.example_inputs(name))
        with torch.inference_mode(mode=False):  # a model whose weights are inference tensors cannot be exported
            if package:
                dims = varying_dims(options, self._adapter.dynamic_dims())
                model, runner = load_ready_package(Path(package), self._device.device, example, dims)
            else:
                model = self._built(name)
        if model is None:
            hashes = runner.model
            tier = self._ready(name, runner, options, example, strict=self._setup.get("swapped") == number)
        else:
            hashes = (weights_hash(model), code_hash(model)) if self._setup.get("identify") else None
            tier = self._with_engine(name, model.to(self._device.device), options, example)
        if hashes and self._setup.get("identify"):
            tier.facts.model = hashlib.sha256("".join(hashes).encode()).hexdigest()
        tier.facts.load_s = time.monotonic() - started_s
        return tier

    def _ready(
        self, name: str, runner: Runner, options: BuildOptions, example: tuple[torch.Tensor, ...], *, strict: bool
    ) -> Tier:
        """A user's package: compared with what the adapter builds, if it can, and with its results if it is that model.

        Raises:
            ParityError: it differs, and it is `strict`: being swapped in. Otherwise the adapter's model runs in eager.
        """
        eager, facts = None, TierFacts(name, "aoti")
        try:
            with torch.inference_mode(mode=False):
                eager = self._built(name).to(self._device.device)
        except Exception as error:  # the user's code: that it cannot build may be why there is a package
            facts.why = f"nothing to compare with, and no eager: {type(error).__name__}: {error}".splitlines()[0]
        try:
            if eager is not None:
                OutputCheck(eager(*example), fixed_sizes=True).check(runner.call(*example))
                if runner.model == (weights_hash(eager), code_hash(eager)):
                    check_engine(eager, runner.call, example, {}, options.precision, seeds=2)
                else:
                    eager = None  # another model: it is no stand-in
            shapes = self._fitted(name, runner, eager, options, example)
        except (ParityError, InvalidOutput) as error:
            if strict or eager is None:
                raise
            self._say(f"tier {name} runs in eager: its package is refused: {error}")
            return Tier(TierFacts(name, "eager", str(error)), Runner(eager), eager, self._device, self._say)
        return Tier(facts, runner, eager, self._device, self._say, shapes)

    def _built(self, name: str) -> torch.nn.Module:
        """What the adapter builds.

        Raises:
            AdapterError: it is no module.
        """
        model = self._adapter.build(name)
        if not isinstance(model, torch.nn.Module):
            msg = f"tier {name}: {type(self._adapter).__name__}.build gave a {type(model).__name__}, not a Module"
            raise AdapterError(msg)
        return model.eval()

    def _with_engine(
        self, name: str, model: torch.nn.Module, options: BuildOptions, example: tuple[torch.Tensor, ...]
    ) -> Tier:
        facts = TierFacts(name, options.engine)
        runner, shapes = Runner(model), None
        try:
            runner = self._runner(name, model, options, example) or runner
            if runner.call is not model:
                dims = self._adapter.dynamic_dims()
                check_engine(model, runner.call, example, varying_dims(options, dims), options.precision, seeds=2)
            shapes = self._fitted(name, runner, model, options, example)
        except ConfigError:
            raise
        except ParityError as error:
            if runner.package:  # out of date in a way that its key does not show; built anew, it is checked again
                self._remove(self._cache.folder / f"{runner.package}.pt2")
                self.missing.append(name)
            facts.why = f"refused: {error}"
        except Exception as error:  # the compiler's boundary: a model that it cannot take runs in eager, and says why
            facts.why = f"{type(error).__name__}: {error}".splitlines()[0]
        if facts.why:
            self._say(f"tier {name} runs in eager: {options.label} {facts.why}")
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
        example: tuple[torch.Tensor, ...],
    ) -> ShapeRunner | None:
        """The engine with what fits other sizes to it; None where eager takes whatever comes.

        Raises:
            ParityError: not even the example's results are eager's.
        """
        shapes = ShapeOptions.from_dict(self._setup.get("shapes", {}))
        dims = self._adapter.dynamic_dims()
        if runner.static:
            shapes = self._exact_only(name, shapes, dims, example)
        if runner.call is eager and shapes.policy != "bucket" and not shapes.max_batch:
            return None
        if shapes.policy == "dynamic" and not dims:  # nothing varies, so there is nothing to say about it
            shapes = replace(shapes, policy="exact")
        fitted = ShapeRunner(
            runner.call, eager, shapes, dims, example, options.precision,
            dynamic_engine=options.engine == "eager" or bool(varying_dims(options, dims)),
        )  # fmt: skip
        fitted.warm_up()
        for note in fitted.notes:
            self._say(f"tier {name}: {note}")
        return fitted

    def _runner(
        self, name: str, model: torch.nn.Module, options: BuildOptions, example: tuple[torch.Tensor, ...]
    ) -> Runner | None:
        """The engine, unchecked; None where it has to be compiled first."""
        dims = self._adapter.dynamic_dims()
        if options.engine == "eager" or (options.engine == "compile" and self._setup.get("compile", True)):
            return make_runner(model, options, example, dims, self._device.device)
        if options.engine == "aoti":
            identity = identify(model, options, example, varying_dims(options, dims), self._device.device)
            path = self._cache.path(identity)
            try:
                if path.exists():
                    check_package(path, identity)
                    self._cache.used(path)
                    call = load_package(path, self._device.device)
                    runner = Runner(call, graphs=1, package=identity.key, static=not identity.dynamic)
                    return finished(runner, options, example, self._device.device)
            except PackageError as error:
                self._say(f"{error}; it is built anew")
                self._remove(path)
        self.missing.append(name)
        return None

    def _exact_only(
        self, name: str, shapes: ShapeOptions, dims: DynamicDims, example: tuple[torch.Tensor, ...]
    ) -> ShapeOptions:
        """What may be asked of an engine that takes the example's shapes only; says what may not."""
        asked = []
        if shapes.policy == "bucket" or (shapes.policy == "dynamic" and dims):
            asked.append(f"shapes {shapes.policy}")
        usual = shapes_of(example)
        if any(each != usual for each in shapes.common):
            asked.append("common_shapes")
        if shapes.max_batch and BatchChunks(shapes.max_batch, axes_of(dims, usual), usual).bounded(usual) != usual:
            shapes = replace(shapes, max_batch=0)
            asked.append("max_batch below the example's batch")
        if asked:
            self._say(f"tier {name}: {', '.join(asked)}: not used, as its package runs the example's shapes only")
        return replace(shapes, policy="exact", common=())

    def _remove(self, package: Path) -> None:
        """Remove a package from the cache, if that is ours."""
        try:
            self._cache.remove(package)
        except ConfigError as error:
            self._say(str(error))
