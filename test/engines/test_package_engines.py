"""Engines of other libraries.

What they build is what eager gives, and what is said where one cannot run here.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.engine import EngineUnavailable
from torchperf_ros.engines.package import ENGINES, make_runner, users_package
from torchperf_ros.engines.package_engine import TensorsOnly
from torchperf_ros.engines.parity import check_engine, random_inputs
from torchperf_ros.settings.build_options import PACKAGE_SUFFIXES, BuildOptions, ShapeOptions
from torchperf_ros.workers.package_manifest import PackageError, read_manifest

from .compiled_adapters import Counting
from .conftest import PATIENCE_S, build, job
from .test_tier_loader import Loaded

pytestmark = pytest.mark.timeout(PATIENCE_S)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OTHERS = ("onnxruntime", "openvino")
DIMS = {0: {0: (1, 8)}, 1: {0: (1, 8)}}
IMAGE = (torch.zeros(1, 3, 16, 16),)


def needs(engine):
    for library in (*ENGINES[engine].distributions[:1], *ENGINES[engine].build_distributions):
        if (
            importlib.util.find_spec(library) is None
        ):  # not imported: openvino would say to its maker that it was
            pytest.skip(f"{library} is not installed")


@pytest.fixture(scope="module", params=OTHERS)
def engine(request):
    needs(request.param)
    return request.param


@pytest.fixture(scope="module")
def package(engine, adapters, tmp_path_factory):
    """A dynamic package in a cache of its own."""
    folder, threads = tmp_path_factory.mktemp("cache") / engine, torch.get_num_threads()
    said, good = build(job(folder, options={"dynamic": True}, build=[BuildOptions(engine).as_dict()]))
    assert good, said
    torch.set_num_threads(threads)
    (path,) = folder.glob(f"*{PACKAGE_SUFFIXES[engine]}")
    return path


def pretend(monkeypatch, *installed):
    """Have pip know these packages only."""

    def version(name):
        if name in installed:
            return "1"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.fixture
def picture():
    """A model that is made outside of inference mode, as a worker makes it."""
    with torch.inference_mode(mode=False):
        return Picture().eval()


def test_given_an_engine_then_the_manifest_names_its_library_and_a_loader_takes_it(
    engine, package, adapters
):
    manifest = read_manifest(package)
    version = f"{engine} {importlib.metadata.version(engine)}"
    assert (manifest.identity.library, manifest.identity.options["engine"]) == (version, engine)
    assert manifest.parity["relative_l2"] < 1e-3
    loaded = Loaded(
        adapters.Compiled({"dynamic": True}, CPU),
        package.parent,
        BuildOptions(engine),
        shapes=ShapeOptions("dynamic"),
    )
    assert (loaded.facts.engine, loaded.facts.why, loaded.facts.package) == (engine, "", package.stem)
    assert (loaded.missing, loaded.reported) == ([], [])
    for batch in (1, 5, 8):  # 8: the end of the range that the adapter declares
        loaded.run(batch)
    assert (loaded.tier.report().hits, loaded.tier.report().misses) == (3, 0)


@torch.inference_mode()
def test_given_another_engines_package_when_named_by_the_user_then_its_manifest_says_how_to_run_it(
    engine, package, adapters
):
    example = adapters.Compiled({}, CPU).example_inputs("full")
    runner = users_package(package, None, CPU, example, DIMS)
    assert (runner.package.engine.name, runner.static) == (engine, False)
    check_engine(adapters.Compiled({}, CPU).build("full").eval(), runner.call, example, {}, "fp32")
    kept = runner.call(*example)["scores"]
    before = kept.clone()
    runner.call(*random_inputs(example, 1))
    assert torch.equal(kept, before)  # the caller's own, as eager's are


def test_given_a_file_that_the_library_cannot_load_then_the_file_and_the_library_are_named(
    engine, tmp_path
):
    path = tmp_path / "bad"
    path.write_bytes(b"nothing")
    with pytest.raises(PackageError, match=f"package {path} cannot be loaded by {engine} "):
        ENGINES[engine].load(path, "", BuildOptions(engine), CPU)


class Picture(torch.nn.Module):
    """What has a precision.

    A convolution and a product; of its outputs some are plain, and one stands there twice.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.head = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, 4)

    def forward(self, image):
        features = self.convolution(image).relu().mean((2, 3))
        return [self.head(features), None, {"features": features, "count": 7}, "car", 2.5, features]


@pytest.fixture
def loaded(engine, monkeypatch):
    """What OpenVINO loads."""
    if engine != "openvino":
        return []
    core, loaded = importlib.import_module("openvino").Core, []
    load = core.import_model
    monkeypatch.setattr(core, "import_model", lambda *given: loaded.append(load(*given)) or loaded[-1])
    return loaded


@torch.inference_mode()
def test_given_outputs_that_are_no_tensors_when_built_then_they_are_where_the_model_has_them(
    engine, picture, loaded
):
    runner = make_runner(BuiltTier(picture, IMAGE, {}, CPU), BuildOptions(engine))
    check_engine(picture, runner.call, IMAGE, {}, "fp32")
    (inputs,) = random_inputs(IMAGE, 1)
    first, *others, again = runner.call(inputs)
    assert others == [None, {"features": others[1]["features"], "count": 7}, "car", 2.5]
    assert torch.equal(others[1]["features"], again)
    assert not torch.equal(first.clone(), runner.call(inputs + 1)[0])
    strided = inputs.transpose(2, 3)
    check_engine(
        lambda x: picture(x.transpose(2, 3)), lambda x: runner.call(x.transpose(2, 3)), IMAGE, {}, "fp32"
    )
    assert not strided.is_contiguous()
    for compiled in loaded:  # it has not chosen bf16 by itself
        assert compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"
        assert compiled.get_property("INFERENCE_NUM_THREADS") == torch.get_num_threads()
        assert compiled.get_property("ENABLE_CPU_PINNING") is False
        assert sys.modules["openvino_telemetry"] is None  # what reports its use


class Sized(torch.nn.Module):
    def forward(self, x):
        return x * 2.0, x.shape[0]


class Measured(torch.nn.Module):
    def forward(self, x):
        return x * 2.0, slice(1)


class Best(torch.nn.Module):
    def forward(self, x):
        return x, x.max(1)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Sized(), "output 1 .*follows from the inputs"),
        (Measured(), "output 1 .*is a slice, neither"),
        (Best(), "a max of 2: .*: only eager, graph and compile run that; packages take tuples"),
    ],
)
def test_given_a_plain_value_that_varies_or_is_none_of_these_when_built_then_the_output_is_named(
    engine, model, why
):
    tier = BuiltTier(model, (torch.ones(2, 2),), {0: {0: (1, 4)}}, CPU)
    with pytest.raises(EngineUnavailable, match=why):
        make_runner(tier, BuildOptions(engine))


def test_given_a_scripted_part_when_built_then_it_is_named(engine):
    part = torch.jit.script(torch.nn.ReLU())
    for model, words in (
        (torch.nn.Sequential(torch.nn.Linear(2, 2), part), r"module 1 .* only eager and compile run that"),
        (part, r"the model is scripted or traced \(torch.jit\): only eager runs that"),
    ):
        with pytest.raises(EngineUnavailable, match=words):
            make_runner(BuiltTier(model, (torch.ones(1, 2),), {}, CPU), BuildOptions(engine))


@torch.inference_mode()
def test_given_a_model_that_gives_its_input_when_built_then_each_answer_is_that_of_its_own_call(engine):
    model, inputs = torch.nn.Identity().eval(), [torch.full((1, 2), value) for value in (1.0, 2.0, 3.0)]
    runner = make_runner(BuiltTier(model, (torch.ones(1, 2),), {}, CPU), BuildOptions(engine))
    assert torch.equal(torch.cat([runner.call(one) for one in inputs]), torch.cat(inputs))


@torch.inference_mode()
def test_given_an_exported_program_when_built_then_it_runs_as_any_model(engine):
    with torch.inference_mode(mode=False):
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()).eval()
        model = torch.export.export(layers, (torch.ones(1, 2),)).module()
    runner = make_runner(BuiltTier(model, (torch.ones(1, 2),), {}, CPU), BuildOptions(engine))
    check_engine(layers, runner.call, (torch.ones(1, 2),), {}, "fp32")


DROPPED_BY_ANOTHER_THREAD = """
import signal, threading
import torch
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.package import make_runner

tier = BuiltTier(torch.nn.Linear(2, 2).eval(), (torch.ones(2, 2),), {}, torch.device("cpu"))
runners = [make_runner(tier, BuildOptions("openvino")) for _ in range(2)]
drop = threading.Thread(target=runners.clear)
drop.start()
drop.join()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("told")
"""


def test_given_packages_dropped_by_another_thread_when_a_signal_comes_then_it_is_handled():
    """OpenVINO unmaps a signal stack with what it has loaded.

    The process ended by SIGSEGV, without a word.
    """
    needs("openvino")
    command = [sys.executable, "-c", DROPPED_BY_ANOTHER_THREAD]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout) == (0, "told\n"), ended.stderr


@torch.inference_mode()
@pytest.mark.parametrize(("engine", "precision"), [("onnxruntime", "int8_dynamic"), ("openvino", "bf16")])
def test_given_a_precision_that_the_library_has_itself_then_results_are_within_its_limits(
    engine, precision, picture
):
    needs(engine)
    runner = make_runner(BuiltTier(picture, IMAGE, {}, CPU), BuildOptions(engine, precision=precision))
    check_engine(picture, runner.call, IMAGE, {}, precision)


@pytest.mark.parametrize(
    ("engine", "options", "device", "dims", "why"),
    [
        (
            "openvino",
            {"precision": "int8_dynamic"},
            CPU,
            {},
            "has no precision int8_dynamic on cpu; it has fp32, bf16",
        ),
        (
            "onnxruntime",
            {"precision": "bf16"},
            CPU,
            {},
            "has no precision bf16 on cpu; it has fp32, int8_dynamic",
        ),
        ("openvino", {}, CUDA, {}, "engine openvino runs on cpu; the device here is cuda"),
        ("tensorrt", {}, CPU, {}, "engine tensorrt runs on cuda; the device here is cpu"),
        ("onnxruntime", {}, CUDA, {}, "engine onnxruntime needs the package onnxruntime-gpu on CUDA"),
        ("tensorrt", {"cuda_graphs": True}, CUDA, {}, "engine tensorrt cannot be captured"),
        (
            "tensorrt",
            {},
            CUDA,
            {0: {0: (1, 2)}},
            "engine tensorrt runs fixed sizes only; shapes has to be exact",
        ),
        ("tensorrt", {"precision": "fp16"}, CUDA, {}, ""),
        ("aoti", {"precision": "int8_weight", "cuda_graphs": True}, CUDA, {0: {0: (1, 2)}}, ""),
    ],
)
def test_given_what_an_engine_cannot_do_when_asked_then_it_says_why(
    monkeypatch, engine, options, device, dims, why
):
    pretend(monkeypatch, "onnxruntime", "openvino", "torch-tensorrt")
    said = ENGINES[engine].why_not(BuildOptions(engine, **options), dims, device)
    assert why in said
    assert bool(why) == bool(said)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_given_torch_tensorrt_when_built_then_it_gets_the_graph_as_typed_and_tf32_only_where_that_is_asked_for(
    monkeypatch, tmp_path, picture, precision
):
    class Pretended(types.ModuleType):
        asked = []

        class dynamo:
            def compile(program, **settings):
                Pretended.asked.append((program, settings))
                return "graph"

        def save(graph, path, **how):
            Pretended.asked.append((graph, how))
            Path(path).write_bytes(b"package")

    monkeypatch.setitem(sys.modules, "torch_tensorrt", Pretended)
    options = BuildOptions("tensorrt", precision=precision)
    ENGINES["tensorrt"].convert(
        BuiltTier(TensorsOnly(picture), IMAGE, {}, CPU), options, tmp_path / "x.pt2"
    )
    (program, settings), (graph, how) = Pretended.asked
    assert isinstance(program, torch.export.ExportedProgram)
    assert (settings["use_explicit_typing"], settings["disable_tf32"]) == (True, precision == "fp32")
    assert (graph, how["output_format"], how["retrace"]) == ("graph", "aot_inductor", True)
    assert (tmp_path / "x.pt2").read_bytes() == b"package"


@pytest.mark.parametrize("engine", ["onnxruntime", "tensorrt"])
def test_given_no_library_when_a_tier_is_loaded_then_it_runs_in_eager_and_the_command_that_installs_it_is_said(
    monkeypatch, adapters, tmp_path, engine
):
    pretend(monkeypatch)
    loaded = Loaded(adapters.Compiled({}, CPU), tmp_path, BuildOptions(engine))
    library = {"tensorrt": "torch-tensorrt"}.get(engine, engine)
    why = f"engine {engine} needs the package {library}: pip install 'torchperf-ros[{engine}]'"
    assert (loaded.facts.engine, loaded.facts.why, loaded.missing) == ("eager", why, [])
    assert loaded.reported == [f"tier full runs in eager: {why}"]


def test_given_no_exporter_when_built_then_only_the_build_fails_and_says_what_it_needs(
    monkeypatch, tmp_path
):
    pretend(monkeypatch, "onnxruntime", "onnx")
    engine = ENGINES["onnxruntime"]
    engine.check(BuildOptions("onnxruntime"), {}, CPU)
    with pytest.raises(
        EngineUnavailable, match="engine onnxruntime needs the package onnxscript: pip install"
    ):
        engine.build(BuiltTier(Picture(), IMAGE, {}, CPU), BuildOptions("onnxruntime"), tmp_path / "x.onnx")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ("buffers", "writes to its buffers"),
        ("weights", r"changes its weights \(calls\): only eager runs that"),
    ],
)
def test_given_a_model_that_writes_to_what_it_has_when_built_then_it_is_refused(tmp_path, changes, why):
    needs("openvino")
    model = Counting()
    if changes == "weights":
        delattr(model, "calls")
        model.calls = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    tier = BuiltTier(model, (torch.zeros(1, 4),), {}, CPU)
    with pytest.raises(EngineUnavailable, match=why):
        ENGINES["openvino"].build(tier, BuildOptions("openvino"), tmp_path / "x.blob")
