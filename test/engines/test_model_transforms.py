"""What is done to a model before an engine runs it, and what runs in int8 by the compiled graph."""

import copy
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.engines import model_transforms
from torchperf_ros.engines.built_tier import BuiltTier, read_frames, scoring_of, write_frames
from torchperf_ros.engines.engine import EngineUnavailable
from torchperf_ros.engines.fingerprint import identify
from torchperf_ros.engines.model_transforms import (
    applies,
    int8_in_package,
    layers_of,
    matrix_precision,
    quantise_static,
    transform,
    why_no_int8,
)
from torchperf_ros.engines.package import ENGINES, make_runner
from torchperf_ros.engines.package_engine import Built, export
from torchperf_ros.engines.parity import LIMITS, check, measure, random_inputs
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers.package_manifest import read_manifest

from .compiled_adapters import Sees
from .conftest import PATIENCE_S, build, job
from .test_package_engines import needs
from .test_tier_loader import Loaded

pytestmark = pytest.mark.timeout(PATIENCE_S)
CPU = torch.device("cpu")


class Blocks(nn.Module):
    """Convolutions as attributes, called in another order than they are made, and a head."""

    def __init__(self):
        super().__init__()
        self.up, self.conv = (
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
        )
        self.tail = nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(4, 5)

    def forward(self, image):
        x = self.up(self.tail(torch.relu(self.conv(image))))
        return {"pixels": x, "classes": self.head(x.mean(dim=(2, 3)))}


def image(seed=0):
    return torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(seed))


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()


EVERYTHING = [
    BuildOptions(channels_last=True),
    BuildOptions(precision="bf16"),
    BuildOptions(precision="fp16"),
    BuildOptions(precision="int8_weight"),
    BuildOptions(precision="int8_dynamic"),
    BuildOptions(precision="bf16", channels_last=True),
]
needs_torchao = pytest.mark.skipif(bool(why_no_int8()), reason=why_no_int8() or "installed")
each_transform = pytest.mark.parametrize("options", EVERYTHING, ids=lambda options: options.label)


@needs_torchao
@each_transform
def test_given_a_network_when_transformed_then_it_agrees_and_the_original_is_as_before(options):
    model = Blocks().eval()
    before, weights = model(image()), copy.deepcopy(model.state_dict())
    changed = transform(model, options, CPU, (image(),))
    assert changed is not model
    with torch.inference_mode():
        found = changed(image())
    check(before, found, options.precision)
    assert [tensor.dtype for tensor in found.values()] == [torch.float32] * 2
    assert found["pixels"].is_contiguous() == before["pixels"].is_contiguous()
    assert all(torch.equal(after, model(image())[name]) for name, after in before.items())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *(
            (Blocks().eval(), options)
            for options in (
                BuildOptions(),
                BuildOptions("compile"),
                BuildOptions(precision="tf32"),
                BuildOptions(cuda_graphs=True),
            )
        ),
        *((nn.ReLU(), options) for options in EVERYTHING[-2:]),
    ],
)
def test_given_nothing_to_change_when_transformed_then_it_is_the_very_same_model(model, options):
    assert transform(model, options, CPU, (image(),)) is model


def test_given_an_unknown_precision_when_transformed_then_the_error_names_it_and_what_is_allowed():
    with pytest.raises(ConfigError, match=r"precision: 'fp8' is not allowed; it has to be fp32, tf32"):
        transform(linear(), BuildOptions(precision="fp8"), CPU, (torch.zeros(1, 32),))


class OwnTypes(nn.Module):
    """Outputs of several types, out of weights and a table of two, and a count of its calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 4)
        self.register_buffer("table", torch.ones(4, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        y = self.layer(x)
        return {
            "own": (y, y.half(), y.bfloat16()),
            "exact": y * self.table,
            "best": y.argmax(-1),
            "name": "a",
        }


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_given_outputs_of_several_types_when_the_precision_is_another_then_each_keeps_its_own(precision):
    model, example = OwnTypes().eval(), (torch.zeros(1, 32),)
    changed = transform(model, BuildOptions(precision=precision), CPU, example)
    assert model.calls == changed.calls == 0
    x = torch.randn(3, 32)
    with torch.inference_mode():
        check(model(x), changed(x), precision)
        check(model(x), torch.compile(changed, fullgraph=True, backend="eager")(x), precision)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (Blocks().eval(), BuildOptions(channels_last=True), ""),
        (linear(), BuildOptions(channels_last=True), "no two-dimensional convolution"),
        (
            Blocks().eval().to(memory_format=torch.channels_last),
            BuildOptions(channels_last=True),
            "the model does so itself",
        ),
        (nn.Conv2d(3, 3, 1), BuildOptions(precision="int8_weight"), "no nn.Linear layer"),
        (nn.Conv2d(3, 3, 1), BuildOptions(precision="int8_static"), why_no_int8()),
        (nn.ReLU(), BuildOptions(precision="int8_static"), "no nn.Linear layer and no convolution"),
        (linear(), BuildOptions(precision="tf32"), "CUDA only"),
        (nn.ReLU(), BuildOptions(precision="bf16"), "no floating-point weights"),
        (linear().to(torch.bfloat16), BuildOptions(precision="bf16"), "the model is bf16 already"),
    ],
)
def test_given_a_model_when_asked_whether_an_option_applies_then_it_does_or_the_reason_is_said(
    model, options, reason
):
    assert applies(model, options, CPU) == reason


@pytest.mark.parametrize(
    ("text", "bf16", "fp16"),
    [
        ("flags\t\t: fpu avx2\n", False, False),
        ("flags\t\t: fpu avx512_bf16\nvmx flags\t: amx_fp16\n", True, False),
        ("Features\t: fp asimd asimdhp bf16\n", True, True),
        ("", False, False),
    ],
)
def test_given_a_processor_when_asked_for_half_precision_then_its_instructions_decide(
    monkeypatch, tmp_path, text, bf16, fp16
):
    info = tmp_path / "cpuinfo"
    info.write_text(text, encoding="utf-8")
    monkeypatch.setattr(model_transforms, "_CPU_INFO", info)
    for precision, has in (("bf16", bf16), ("fp16", fp16)):
        reason = applies(linear(), BuildOptions(precision=precision), CPU)
        assert reason == "" if has else f"this CPU has no {precision} instructions" in reason


def test_given_no_torchao_when_int8_is_wanted_then_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = BuildOptions(precision="int8_weight")
    assert "pip install torchao" in applies(linear(), options, CPU)
    with pytest.raises(
        ConfigError, match=r"precision: 'int8_weight' cannot be used: torchao is not installed: `pip"
    ):
        transform(linear(), options, CPU, (torch.zeros(1, 32),))


@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16"])
def test_given_cuda_when_matrix_precision_is_set_then_products_and_convolutions_have_it_and_lose_it(
    precision,
):
    def settings():
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = settings()
    with matrix_precision(precision, torch.device("cuda", 0)):
        assert settings() == (precision == "tf32", precision == "tf32")
    assert settings() == before


@needs_torchao
def test_given_precisions_when_used_then_torchao_is_loaded_for_int8_only_in_silence_and_no_compiler_setting_changes():
    code = """
import sys, torch, torch._inductor.config as config
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.engines.model_transforms import transform
before = config.save_config_portable()
for precision in ("bf16", "int8_weight"):
    layer, example = torch.nn.Linear(8, 8).eval(), (torch.zeros(1, 8),)
    transform(layer, BuildOptions(precision=precision), torch.device("cpu"), example)
    print("torchao" in sys.modules, before == config.save_config_portable())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False True\nTrue True\n", "")


@needs_torchao
def test_given_weights_in_int8_that_were_exported_when_asked_for_channels_last_then_the_model_is_left_alone():
    example = (torch.randn(1, 64),)
    quantised = transform(
        nn.Sequential(nn.Linear(64, 64)).eval(), BuildOptions(precision="int8_weight"), CPU, example
    )
    export(quantised, example, {})  # torch refuses to move weights that its exporter has looked at
    assert transform(quantised, BuildOptions(channels_last=True), CPU, example) is quantised


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
    said, good = build(
        job(folder, adapter="compiled_adapters:Sees", options={"loss": loss}, build=[options.as_dict()])
    )
    return next(one for one in said if one["kind"] in {"built", "failed"}), good


@needs_torchao
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
        distance = measure(adapter.build("full")(image), loaded.tier.run(inputs)[0]).relative_l2
        assert (
            0.0 < distance < LIMITS["int8_static"].relative_l2
        )  # without VNNI, products of bytes saturate


@needs_torchao
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


@needs_torchao
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

    monkeypatch.setattr("torchperf_ros.engines.file_engines.build_package", without_kernels)
    own = tier(model, (torch.ones(1, 3, 16, 16),))
    with pytest.raises(EngineUnavailable, match=why):
        ENGINES[engine].build(own, BuildOptions(engine, precision=precision), tmp_path / "model")


@needs_torchao
def test_given_static_int8_when_torch_compile_is_asked_for_it_then_it_says_who_has_it():
    with pytest.raises(EngineUnavailable, match="compile has no precision int8_static; aoti has"):
        make_runner(tier(), BuildOptions("compile", precision="int8_static"))


@needs_torchao
def test_given_frames_unlike_the_example_when_quantised_then_ranges_are_theirs_and_random_ones_would_not_do():
    own = tier()

    def error(calibration):
        graph = quantise_static(export(own.model, own.example, {}).module(check_guards=False), calibration)
        with torch.inference_mode():
            return measure(own.model(*frame), graph(*frame)).relative_l2, layers_of(graph.graph)

    (frame,), (other,) = own.calibration(), own.held_out("int8_static")
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


@needs_torchao
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
    assert [
        len(kept),
        len(seen.calibration()),
        len(seen.held_out("int8_static")),
        seen.why_uncalibrated(),
    ] == [
        5,
        3,
        2,
        "",
    ]
    assert all(a.equal(b) for (a,), (b,) in zip(kept, frames, strict=True))


@needs_torchao
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
