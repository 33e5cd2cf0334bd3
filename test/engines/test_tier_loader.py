"""Which engine each tier gets, and what is said where it is not the one that was asked for."""

import functools
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map_only

from torchperf_ros.api.errors import AdapterError, BadInput, ConfigError
from torchperf_ros.engines.device import Device
from torchperf_ros.engines.file_engines import load_package
from torchperf_ros.engines.parity import ParityError, measure, random_inputs
from torchperf_ros.settings.build_options import BuildOptions, ShapeOptions
from torchperf_ros.worker.tier import InvalidOutput
from torchperf_ros.worker.tier_loader import TierLoader
from torchperf_ros.workers.package_cache import PackageCache
from torchperf_ros.workers.package_manifest import manifest_path
from torchperf_ros.workers.worker_setup import WorkerSetup

from .conftest import PATIENCE_S, edit_identity

pytestmark = pytest.mark.timeout(PATIENCE_S)
CPU = torch.device("cpu")
AOTI = BuildOptions("aoti")


class Loaded:
    """What a loader makes of one tier."""

    def __init__(self, adapter, cache, options=AOTI, tier="full", package="", shapes=None, **more):
        self.reported = []
        setup = WorkerSetup(
            stage="tested",
            adapter="",
            options={},
            tiers=(tier,),
            build=(options,),
            packages=(str(package),),
            loaded=(0,),
            lower=(-1,),
            cache_dir=str(cache),
            cache_mib=4096,
            package_dirs=(str(Path(package).parent),),
            shapes=shapes or ShapeOptions(),
            **more,
        )
        self.loader = TierLoader(adapter, setup, Device(CPU, 1), self.reported.append)
        with torch.inference_mode():
            self.tier = self.loader.load(0)
        self.facts, self.missing = self.tier.facts, self.loader.missing

    def run(self, batch):
        """The engine's outputs for a batch, and how far they are from eager's."""
        with torch.inference_mode():
            example = (torch.zeros(1, 4), torch.tensor([[0, 1, 2]]))
            inputs = random_inputs(example, 3, {0: {0: (batch, batch)}, 1: {0: (batch, batch)}})
            return self.tier.run(inputs)[0], inputs


@pytest.fixture
def load(adapters, built, tmp_path):
    """Load a tier with a copy of the packages that were built."""
    cache = tmp_path / "cache"

    def make(*, dynamic=False, seed=0, prepare=lambda package: None, **values):
        shutil.copytree(built.cache.folder, cache, dirs_exist_ok=True)
        package = cache / built.package("dynamic" if dynamic else "static").name
        prepare(package)
        adapter = adapters.Compiled(
            {"dynamic": dynamic, "seed": seed} if seed else {"dynamic": dynamic}, CPU
        )
        loaded = Loaded(adapter, cache, **values)
        loaded.package, loaded.adapter = package, adapter
        return loaded

    return make


def eager_differs(loaded, batch):
    outputs, inputs = loaded.run(batch)
    with torch.inference_mode(mode=False):
        model = loaded.adapter.build("full").eval()
    with torch.inference_mode():
        return measure(model(*inputs), outputs).relative_l2


def test_given_a_package_in_the_cache_when_loaded_then_it_is_what_runs(load):
    loaded = load()
    assert (loaded.facts.engine, loaded.facts.why, loaded.missing, loaded.reported) == ("aoti", "", [], [])
    assert (loaded.facts.package, loaded.facts.graphs) == (loaded.package.stem, 1)
    assert eager_differs(loaded, 1) < 1e-3
    assert loaded.tier.report().hits == 1


def test_given_no_package_for_the_model_when_loaded_then_eager_runs_and_it_is_missing(load):
    loaded = load(seed=1)
    assert (loaded.facts.engine, loaded.facts.why) == ("eager", "not compiled yet")
    assert (loaded.missing, loaded.reported) == (["full"], [])
    assert loaded.facts.package == ""
    loaded.run(1)
    assert loaded.package.exists()


def test_given_a_package_that_is_not_as_it_should_be_then_that_is_said_and_it_is_removed_and_missing(load):
    loaded = load(prepare=lambda package: edit_identity(package, weights="0" * 64))
    (said,) = loaded.reported
    assert "does not fit: weights 000000000000..., wanted" in said
    assert said.endswith("; it is built anew")
    assert not loaded.package.exists()
    assert not manifest_path(loaded.package).exists()
    assert (loaded.missing, loaded.facts.engine) == (["full"], "eager")


def other_package(monkeypatch, call):
    monkeypatch.setattr("torchperf_ros.engines.file_engines.load_package", lambda path, device: call)


def test_given_a_cache_that_is_somebody_elses_when_a_package_is_refused_then_the_tier_runs_in_eager_all_the_same(
    load, monkeypatch
):
    refuse = mock.Mock(side_effect=ConfigError("parameter cache_dir: cannot be written"))
    monkeypatch.setattr(PackageCache, "remove", refuse)
    other_package(monkeypatch, lambda x, mask: {"scores": x})
    loaded = load()
    assert "parameter cache_dir: cannot be written" in loaded.reported
    assert (loaded.facts.engine, loaded.missing) == ("eager", ["full"])
    loaded.run(1)


def test_given_a_package_with_other_results_when_loaded_then_it_is_refused_with_the_figures_and_built_anew(
    load, monkeypatch, adapters
):
    other_package(monkeypatch, adapters.Compiled({"seed": 1}, CPU).build("full").eval())
    loaded = load()
    (said,) = loaded.reported
    assert said.startswith(
        "tier full runs in eager: aoti refused: outputs differ from eager's: relative L2 "
    )
    assert "allowed for fp32: relative L2 0.001" in said
    assert loaded.facts.why in said
    assert (loaded.facts.engine, loaded.facts.package, loaded.missing) == ("eager", "", ["full"])
    assert not loaded.package.exists()
    assert eager_differs(loaded, 1) == 0.0


@pytest.fixture
def no_code(monkeypatch, fresh_compiler):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def test_given_engine_compile_when_loaded_then_it_is_compiled_here_and_checked(load, no_code):
    loaded = load(options=BuildOptions("compile"))
    assert (loaded.facts.engine, loaded.facts.why, loaded.missing, loaded.reported) == (
        "compile",
        "",
        [],
        [],
    )
    assert loaded.facts.graphs >= 1
    assert eager_differs(loaded, 1) == 0.0
    later = load(options=BuildOptions("compile"), compile=False)  # it may not compile now
    assert (later.facts.engine, later.facts.why, later.missing) == ("eager", "not compiled yet", ["full"])


def test_given_a_model_that_cannot_be_compiled_or_a_package_that_raises_then_eager_runs_and_says_why(
    load, monkeypatch
):
    refuse = mock.Mock(side_effect=RuntimeError("no such operator\nmore\nlines"))
    monkeypatch.setattr(torch, "compile", refuse)
    loaded = load(options=BuildOptions("compile"))
    assert loaded.reported[0].startswith("tier full runs in eager: compile RuntimeError: no such operator")
    assert (loaded.facts.engine, loaded.facts.why.split(" (")[0]) == (
        "eager",
        "RuntimeError: no such operator",
    )
    assert loaded.missing == []
    loaded.run(1)
    other_package(monkeypatch, lambda x, mask: 1 / 0)
    assert (
        load().reported[0].startswith("tier full runs in eager: aoti ZeroDivisionError: division by zero")
    )


def test_given_an_option_or_a_model_that_cannot_be_used_then_the_worker_is_told(
    load, adapters, monkeypatch
):
    with pytest.raises(
        ConfigError, match="compile_mode: reduce-overhead makes CUDA graphs; the device here is"
    ):
        load(options=BuildOptions("aoti", cuda_graphs=True))
    monkeypatch.setattr(adapters.Compiled, "build", lambda self, tier: "weights.pt")
    with pytest.raises(AdapterError, match="tier full: Compiled.build gave a str, not a torch.nn.Module"):
        load()


NO_SIZES = [
    f"shapes: the policy {name} cannot be used: the adapter declares no dynamic_dims"
    for name in ("bucket", "dynamic")
]


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            ShapeOptions(common=(((3, 4), (3, 3)),)),
            ["common_shapes: left to eager: its package runs the example's shapes only"],
        ),
        (ShapeOptions("bucket", 4), NO_SIZES),
        (ShapeOptions("dynamic"), []),
    ],
)
def test_given_a_static_package_when_other_shapes_are_asked_for_then_it_is_said_and_it_never_runs_them(
    load, monkeypatch, shapes, said
):
    ran, real = set(), torch._C._aoti.AOTIModelPackageLoader

    def watched(*args):
        loader = real(*args)

        class Watched:
            get_call_spec = loader.get_call_spec

            def boxed_run(self, inputs):
                ran.add(tuple(inputs[0].shape))
                return loader.boxed_run(inputs)

        return Watched()

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", watched)
    loaded = load(shapes=shapes)
    assert loaded.reported == [f"tier full: {text}" for text in said]
    assert loaded.facts.engine == "aoti"
    for batch in (1, 2, 3, 8):
        assert eager_differs(loaded, batch) < 1e-3
    assert ran == {(1, 4)}
    report = loaded.tier.report()
    assert report.shapes == "exact"
    assert (report.hits, report.misses) == (1, 3)


def test_given_a_dynamic_package_when_sizes_vary_then_it_runs_them(load):
    loaded = load(dynamic=True, shapes=ShapeOptions("dynamic"))
    assert (loaded.facts.engine, loaded.reported) == ("aoti", [])
    for batch in range(1, 9):
        assert eager_differs(loaded, batch) < 1e-3
    loaded.run(9)
    report = loaded.tier.report()
    assert (report.shapes, report.hits, report.misses, report.recompiles) == (
        "dynamic",
        8,
        1,
        0,
    )


def test_given_a_users_package_then_it_runs_and_eager_answers_other_sizes_if_it_is_the_adapters_model(
    load, built
):
    loaded = load(package=built.package())
    assert (loaded.facts.engine, loaded.reported) == ("aoti", [])
    assert eager_differs(loaded, 1) < 1e-3
    assert eager_differs(loaded, 2) == 0.0
    loaded = load(package=built.package(), seed=1)  # other weights
    assert (loaded.facts.engine, loaded.reported) == ("aoti", [])
    assert eager_differs(loaded, 1) > 1e-2
    with pytest.raises(BadInput, match="not prepared, and there is no eager model"):
        loaded.run(2)


def test_given_a_users_package_when_the_adapter_cannot_build_then_it_runs_and_that_is_said(
    load, built, adapters, monkeypatch
):
    def refuse(self, name):
        raise FileNotFoundError("no weights on this vehicle")

    monkeypatch.setattr(adapters.Compiled, "build", refuse)
    loaded = load(package=built.package())
    assert loaded.facts.engine == "aoti"
    assert loaded.facts.why.startswith(
        "nothing to compare with, and no eager: FileNotFoundError: no weights on this vehicle"
        " (test_tier_loader.py:"
    )


@pytest.mark.parametrize("fits", [True, False])
def test_given_a_users_package_when_the_built_model_cannot_be_hashed_then_the_reason_is_there_whichever_runs(
    load, built, monkeypatch, fits
):
    def refuse(model):
        raise RuntimeError("weights on another machine")

    package = built.package()
    if not fits:
        other_package(monkeypatch, lambda x, mask: {"scores": x})
    monkeypatch.setattr("torchperf_ros.worker.tier_loader.weights_hash", refuse)
    loaded = load(package=package)
    if (
        fits
    ):  # which model it is, is not known: it is not compared with this one, which is no stand-in for it
        assert loaded.facts.engine == "aoti"
        assert "no eager: RuntimeError: weights on another machine (" in loaded.facts.why
        with pytest.raises(BadInput, match="not prepared, and there is no eager model"):
            loaded.run(2)
    else:
        assert loaded.facts.engine == "eager"
        assert loaded.reported == [f"tier full runs in eager: its package is refused: {loaded.facts.why}"]
        assert eager_differs(loaded, 2) == 0.0


@pytest.mark.parametrize(
    ("change", "seed", "why"),
    [
        (lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor, 0, "differ"),
        (lambda tensor: tensor[..., :1], 1, "on the example inputs"),
    ],
)
def test_given_a_users_package_with_wrong_results_when_loaded_then_eager_runs_and_when_swapped_in_it_is_refused(
    load, built, monkeypatch, change, seed, why
):
    package = built.package()
    real = load_package(package, CPU)
    other_package(monkeypatch, lambda *x: tree_map_only(torch.Tensor, change, real(*x)))
    loaded = load(package=package, seed=seed)
    (said,) = loaded.reported
    assert said.startswith("tier full runs in eager: its package is refused: ")
    assert why in said
    assert eager_differs(loaded, 1) == 0.0
    with pytest.raises((ParityError, InvalidOutput), match=why):
        load(package=package, seed=seed, swapped=0)


def halve(model):
    model.layers[0].weight.mul_(0.5)


def normalise_once(model):
    if not vars(model).get("is_normal"):
        model.layers[0].weight.div_(model.layers[0].weight.norm())
        model.is_normal = True


def fuse_once(model):
    if "first" in dict(model.named_children()):
        model.factor = torch.nn.Parameter(model.first.weight * 2.0)
        del model.first


@pytest.mark.parametrize(
    ("change", "kept"),
    [(halve, ["layers.0.weight"]), (normalise_once, ["layers.0.weight"]), (fuse_once, [])],
)
def test_given_a_model_whose_calls_change_it_when_its_runs_are_forgotten_then_it_answers_as_after_its_build(
    adapters, tmp_path, change, kept
):
    class Changing(adapters.Compiled):
        def build(self, tier):
            model = super().build(tier)
            model.first = torch.nn.Linear(1, 1)
            model.register_forward_pre_hook(lambda model, _: change(model))
            return model

    adapter, answers = Changing({}, CPU), []
    loaded = Loaded(adapter, tmp_path, BuildOptions("eager"))
    for _ in range(2):
        answers.append(loaded.run(1)[0]["scores"])
        with torch.inference_mode():
            names = loaded.loader.forget_runs("full", adapter.example_inputs("full"))
        assert names == kept
    assert torch.equal(*answers)


def test_given_a_cache_that_others_can_write_when_loaded_then_it_says_how_to_mend_it_and_nothing_is_taken(
    load,
):
    def share(package):
        package.parent.chmod(0o775)

    with pytest.raises(
        ConfigError, match=r"parameter cache_dir: .*/cache .mode 0775.*`chmod 700 .*/cache`"
    ):
        load(prepare=share)
    assert load(prepare=share, options=BuildOptions()).facts.engine == "eager"
