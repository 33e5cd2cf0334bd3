"""What runs in int8 when it is asked for, by the graph that is really compiled.

And what is refused, and why.
"""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torchperf_ros.engines.built_tier import BuiltTier, read_frames, scoring_of, write_frames
from torchperf_ros.engines.engine import EngineUnavailable
from torchperf_ros.engines.fingerprint import identify
from torchperf_ros.engines.model_transforms import int8_in_package, layers_of, quantise_static, why_no_int8
from torchperf_ros.engines.package import ENGINES, make_runner
from torchperf_ros.engines.package_engine import Built, export
from torchperf_ros.engines.parity import LIMITS, measure, random_inputs
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers.package_manifest import read_manifest

from .compiled_adapters import Sees
from .conftest import PATIENCE_S, build, job
from .test_package_engines import needs
from .test_tier_loader import Loaded

pytestmark = [
    pytest.mark.timeout(PATIENCE_S),
    pytest.mark.skipif(bool(why_no_int8()), reason=why_no_int8() or "installed"),
]
CPU = torch.device("cpu")
STATIC = BuildOptions("aoti", precision="int8_static")


def tier(model=None, example=None):
    adapter = Sees({}, CPU)
    if model is None:
        return BuiltTier(
            adapter.build("full").eval(),
            adapter.example_inputs("full"),
            {},
            CPU,
            scoring=scoring_of(adapter, "full", CPU),
        )
    return BuiltTier(model.eval(), example, {}, CPU)


def package_of(folder, options, loss):
    """What a compile process builds of `Sees` whose task says that all but eager lose so much."""
    values = job(
        folder, adapter="compiled_adapters:Sees", options={"loss": loss}, build=[options.as_dict()]
    )
    said, good = build(values)
    return next(one for one in said if one["kind"] in {"built", "failed"}), good


def test_given_convolutions_when_built_then_the_manifest_says_how_many_run_in_int8_and_a_worker_takes_it(
    adapters, tmp_path
):
    said, good = package_of(tmp_path / "cache", STATIC, 0.004)
    assert good, said
    package = Path(said["package"])
    manifest = read_manifest(package)
    assert manifest.int8 == {
        "convolutions": {"there": 3, "quantised": 2, "int8": 2},
        # its input is not contiguous: Inductor multiplies in fp32
        "linear layers": {"there": 1, "quantised": 1, "int8": 0},
    }
    assert int8_in_package(package) == {"convolutions": 2}
    assert manifest.parity["loss"] == pytest.approx(0.004)
    assert manifest.identity.quantised.startswith("torchao ")
    adapter = adapters.Sees({"loss": 0.004}, CPU)
    loaded = Loaded(adapter, package.parent, STATIC)
    assert (loaded.facts.engine, loaded.facts.why, loaded.missing) == ("aoti", "", [])
    with torch.inference_mode():
        (image,) = inputs = adapter.score_inputs("full")[0]
        expected = adapter.build("full")(image)
        distance = measure(expected, loaded.tier.run(inputs)[0]).relative_l2
        assert (
            0.0 < distance < LIMITS["int8_static"].relative_l2
        )  # without VNNI, products of bytes saturate


def test_given_a_task_whose_accuracy_falls_when_built_then_it_is_refused_with_the_figure(
    adapters, tmp_path
):
    needs("onnxruntime")
    said, good = package_of(tmp_path, BuildOptions("onnxruntime", precision="int8_dynamic"), 0.006)
    assert not good
    assert (
        "map on held-out examples is 0.8940, eager's 0.9000; at most 0.005 less is allowed" in said["text"]
    )
    assert not list(tmp_path.glob("*.onnx"))


@pytest.mark.parametrize(
    ("engine", "precision", "model", "why"),
    [
        ("aoti", "int8_static", nn.ReLU(), "int8_static: the model has no convolution and no linear layer"),
        (
            "aoti",
            "int8_dynamic",
            nn.Conv2d(3, 3, 1),
            "no nn.Linear layer; int8_static takes convolutions, too",
        ),
        ("onnxruntime", "int8_dynamic", nn.ReLU(), "int8_dynamic: the model has no nn.Linear layer"),
        (
            "aoti",
            "int8_weight",
            nn.Linear(16, 8),
            "1 of 1 linear layers are quantised, none runs in int8 as aoti has",
        ),
    ],
)
def test_given_a_graph_that_would_run_in_fp32_when_built_then_it_is_refused_and_the_layers_are_counted(
    monkeypatch, tmp_path, engine, precision, model, why
):
    needs(engine)

    def without_kernels(model, example, dims, path):  # what Inductor makes of so small a layer, in no time
        with zipfile.ZipFile(path, "w") as package:
            package.writestr("model/code.cpp", "int main() {}")
        return Built("")

    monkeypatch.setattr("torchperf_ros.engines.aoti.build_package", without_kernels)
    own = tier(model, (torch.ones(1, 3, 16, 16),))
    with pytest.raises(EngineUnavailable, match=why):
        ENGINES[engine].build(own, BuildOptions(engine, precision=precision), tmp_path / "model")


def test_given_static_int8_when_torch_compile_is_asked_for_it_then_it_says_who_has_it():
    with pytest.raises(EngineUnavailable, match="compile has no precision int8_static; aoti has"):
        make_runner(tier(), BuildOptions("compile", precision="int8_static"))


def test_given_frames_unlike_the_example_when_quantised_then_ranges_are_theirs_and_random_ones_would_not_do():
    own = tier()

    def error(calibration):
        graph = quantise_static(export(own.model, own.example, {}).module(check_guards=False), calibration)
        with torch.inference_mode():
            return measure(own.model(*frame), graph(*frame)).relative_l2, layers_of(graph.graph)

    (frame,), (other,) = own.calibration(), own.held_out()
    assert not frame[0].equal(other[0])
    near, left = error(own.calibration())
    assert left == {"convolutions": 1}  # the transposed one
    assert near < 0.05
    assert error([random_inputs(own.example, seed) for seed in (1, 2)])[0] > 0.5


class Zeros(Sees):
    """Its example and its other inputs are blank, as those of many adapters are."""

    def example_inputs(self, tier):
        return (torch.zeros(1, 3, 16, 16),)

    def score_inputs(self, tier):
        return [*([(torch.zeros(1, 3, 16, 16),)] * 3), *super().score_inputs(tier)[:1]]


def test_given_blank_inputs_when_quantised_statically_then_it_is_refused_until_a_log_has_frames(tmp_path):
    adapter = Zeros({}, CPU)
    blank = BuiltTier(
        adapter.build("full").eval(),
        adapter.example_inputs("full"),
        {},
        CPU,
        scoring=scoring_of(adapter, "full", CPU),
    )
    with pytest.raises(
        EngineUnavailable, match="there are 1 that are not constant, 2 are needed: --log LOG, or"
    ):
        ENGINES["aoti"].build(blank, STATIC, tmp_path / "model.pt2")
    frames = [(40.0 * torch.randn(1, 3, 16, 16),) for _ in range(5)]
    write_frames([*frames, (torch.ones(1, 3, 8, 8),)], tmp_path / "frames.safetensors")
    kept = read_frames(str(tmp_path / "frames.safetensors"), blank.example, CPU)
    seen = replace(blank, frames=kept)
    assert [len(kept), len(seen.calibration()), len(seen.held_out()), seen.why_uncalibrated()] == [
        5,
        3,
        2,
        "",
    ]
    assert all(a.equal(b) for (a,), (b,) in zip(kept, frames, strict=True))


def test_given_other_frames_or_another_precision_then_the_package_is_another():
    other = Sees({}, CPU)
    other.score_inputs = lambda _: [(torch.ones(1, 3, 16, 16),)]
    own = tier()
    changed = BuiltTier(own.model, own.example, {}, CPU, scoring=scoring_of(other, "full", CPU))
    keys = [
        identify(one, options).key for one in (own, changed) for options in (STATIC, BuildOptions("aoti"))
    ]
    assert len(set(keys)) == 3
    assert keys[1] == keys[3]  # which no range is taken for
    assert identify(tier(), STATIC).key == keys[0]
