"""Packages of parts: each kind of block compiled once, every module with its own weights, the rest in eager."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchperf_ros.config.build_options import BuildOptions
from torchperf_ros.config.shape_options import ShapeOptions
from torchperf_ros.engines import parts as parts_module
from torchperf_ros.engines import parts_package
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.engine import ENGINES, make_runner
from torchperf_ros.engines.package_engine import Built, EngineUnavailable
from torchperf_ros.engines.parity import ParityError, measure, random_inputs
from torchperf_ros.engines.parts_package import open_parts
from torchperf_ros.packages.package_manifest import PackageError, check_package

from .conftest import PATIENCE_S, build, job
from .test_tier_loader import Loaded

pytestmark = pytest.mark.timeout(PATIENCE_S)
CPU = torch.device("cpu")
IN_BLOCKS = BuildOptions("aoti", parts="blocks")
DYNAMIC = {"dynamic": True}


def job_of(folder, parts, tiers=("blocks",), **changes):
    options = BuildOptions("aoti", parts=parts).as_dict()
    return job(folder, tiers, build=[options] * len(tiers), **changes)


def result_of(said):
    return next(message for message in said if message["kind"] in {"built", "failed"})


@pytest.fixture(scope="module", autouse=True)
def any_share():
    with pytest.MonkeyPatch.context() as patch:  # parts as small as these take their time in Python
        patch.setattr(parts_module, "_LEAST_COVERED", 0.0)
        patch.setattr(parts_module, "_LEAST_SHARE", 0.0)
        yield patch


@pytest.fixture(scope="module")
def in_parts(adapters, tmp_path_factory, any_share):
    """Packages of `blocks` and of what exports of `split`, both dynamic."""
    folder = tmp_path_factory.mktemp("parts") / "cache"
    said = {tier: build(job_of(folder, parts, [tier], options=DYNAMIC))[0]
            for tier, parts in (("blocks", "blocks"), ("split", "auto"))}  # fmt: skip
    return folder, {tier: result_of(messages) for tier, messages in said.items()}


def tier_of(adapters, name, seed=0):
    adapter = adapters.Compiled({"dynamic": True, "seed": seed}, CPU)
    return BuiltTier(adapter.build(name).eval(), adapter.example_inputs(name), adapter.dynamic_dims(), CPU)


def run(call, tier, batch):
    with torch.inference_mode():
        inputs = random_inputs(tier.example, batch, {0: {0: (batch, batch)}, 1: {0: (batch, batch)}})
        return call(*(t.clone() for t in inputs))


def test_given_blocks_that_are_alike_when_built_then_the_manifest_says_what_is_compiled(in_parts):
    result = in_parts[1]["blocks"]
    manifest = check_package(Path(result["package"]), None)
    assert re.fullmatch(
        r"blocks.0 to blocks.4 \(5 alike\): \d+% of eager's time; the rest runs in eager", manifest.parts
    )
    assert manifest.identity.options["parts"] == "blocks"
    assert manifest.parity["relative_l2"] < 1e-3
    assert list(manifest.timings) == [f"float32 {n}x4, int64 {n}x3" for n in (4, 8, 1)]


def test_given_blocks_when_opened_then_each_has_its_own_weights_and_the_code_is_there_once(in_parts, adapters):
    tier = tier_of(adapters, "blocks")
    before = libraries()
    call, calls = open_parts(Path(in_parts[1]["blocks"]["package"]), tier, IN_BLOCKS)
    for batch in (1, 3, 8):
        assert measure(run(tier.model, tier, batch), run(call, tier, batch)).relative_l2 < 1e-5
    assert [(one.hits, one.misses) for one in calls] == [(3, 0)] * 4 + [(6, 0)]
    assert len(libraries() - before) == 1
    # with the first one's weights in all of them the outputs would be others
    first = tier_of(adapters, "blocks")
    for block in first.model.blocks:
        block.load_state_dict(first.model.blocks[0].state_dict())
    assert measure(run(first.model, tier, 3), run(call, tier, 3)).relative_l2 > 1e-2


def libraries():
    """Addresses of code that packages have in memory."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if " r-xp " in line and "/aotinductor/" in line}


def test_given_parts_in_a_model_then_the_model_itself_is_as_before_and_who_looks_at_a_block_finds_it(
    in_parts, adapters
):
    tier = tier_of(adapters, "blocks")
    call, _ = open_parts(Path(in_parts[1]["blocks"]["package"]), tier, IN_BLOCKS)
    assert isinstance(call.blocks[0], adapters.Block)
    assert call.blocks[0].layer is tier.model.blocks[0].layer
    assert "forward" not in vars(tier.model.blocks[0])
    assert call is not tier.model


def test_given_arguments_other_than_compiled_for_when_called_then_eager_answers_and_it_is_counted(in_parts, adapters):
    tier = tier_of(adapters, "blocks")
    call, calls = open_parts(Path(in_parts[1]["blocks"]["package"]), tier, IN_BLOCKS)
    block, eager = call.blocks[0], tier.model.blocks[0]
    x, missed = torch.randn(2, 4), []
    with torch.inference_mode():
        for args, kwargs in [
            ((x,), {"scale": 2.0}), ((torch.randn(9, 4),), {"scale": 0.5}), ((x,), {}), ((x, ), {"scale": 0.5}),
            ((torch.randn(4, 2).t(),), {"scale": 0.5}),
        ]:  # fmt: skip
            torch.testing.assert_close(block(*args, **kwargs), eager(*args, **kwargs))
            missed.append(calls[0].misses)
    assert missed == [1, 2, 3, 3, 3]  # the last one lies in memory in another way, and is copied


def test_given_a_package_of_parts_when_loaded_then_it_is_what_runs_and_its_facts_say_so(in_parts, adapters):
    folder, results = in_parts
    loaded = Loaded(adapters.Compiled(DYNAMIC, CPU), folder, IN_BLOCKS, "blocks", shapes=ShapeOptions("dynamic"))
    assert (loaded.facts.engine, loaded.facts.why, loaded.missing, loaded.said) == ("aoti", "", [], [])
    assert (loaded.facts.graphs, loaded.facts.parts) == (1, results["blocks"]["manifest"]["parts"])
    for batch in (1, 5, 9):  # 9 is beyond the declared range
        loaded.run(batch)
    report = loaded.tier.report()
    assert (report["hits"], report["misses"], report["part_misses"], report["recompiles"]) == (2, 1, 0, 0)
    whole = Loaded(adapters.Compiled(DYNAMIC, CPU), folder, BuildOptions("aoti"), "blocks")
    assert (whole.facts.why, whole.missing) == ("not compiled yet", ["blocks"])


def test_given_a_package_of_parts_that_is_there_when_asked_again_then_it_is_not_built(in_parts, monkeypatch):
    monkeypatch.setattr("torchperf_ros.engines.parts_package.build_parts", lambda *inputs: pytest.fail("built again"))
    said, good = build(job_of(in_parts[0], "blocks", options=DYNAMIC))
    assert good
    assert result_of(said)["new"] is False


def test_given_a_model_with_a_part_that_cannot_be_exported_when_built_by_itself_then_the_others_are_compiled(
    in_parts, adapters
):
    manifest = in_parts[1]["split"]["manifest"]
    assert manifest["parts"].startswith("body: ")
    tier = tier_of(adapters, "split")
    call, calls = open_parts(Path(in_parts[1]["split"]["package"]), tier, BuildOptions("aoti", parts="auto"))
    for batch in (1, 8):
        assert measure(run(tier.model, tier, batch), run(call, tier, batch)).relative_l2 < 1e-5
    assert [(one.path, one.hits, one.misses) for one in calls] == [("body", 2, 0)]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ("head", "DataDependent|GuardOnDataDependent|data-dependent"),
        ("body,neck", "parts: the model has no module 'neck'; at its top are body, head"),
        ("body,body.0", "parts: body.0 is named twice, or lies within another part"),
    ],
)
def test_given_parts_that_cannot_be_when_built_then_it_fails_with_the_reason(in_parts, adapters, tmp_path, parts, why):
    said, good = build(job_of(tmp_path / "cache", parts, ["split"]))
    assert not good
    assert re.search(why, result_of(said)["text"] + result_of(said)["detail"])


@pytest.mark.parametrize(
    ("parts", "why"),
    [("blocks", "it has no 4 blocks that are alike"), ("auto", "it exports as a whole")],
)
def test_given_a_request_that_cannot_be_met_when_built_then_the_whole_is_and_says_why(
    built, monkeypatch, tmp_path, parts, why
):
    def ready(model, example, dims, path):  # the same model's, compiled before
        shutil.copy(built.package(), path)
        return Built("")

    monkeypatch.setattr("torchperf_ros.engines.package.build_package", ready)
    said, good = build(job_of(tmp_path / "cache", parts, ["full"]))
    assert good
    assert result_of(said)["manifest"]["parts"] == f"the whole model: {why}"


def test_given_parts_whose_results_are_others_when_built_then_the_whole_is_and_says_why(
    adapters, monkeypatch, tmp_path
):
    wrong = tier_of(adapters, "blocks", seed=1).model
    monkeypatch.setattr("torchperf_ros.engines.parts_package.open_parts", lambda *_: (wrong, []))
    monkeypatch.setattr("torchperf_ros.engines.parts_package._kinds", lambda *_, **__: [])
    tier = tier_of(adapters, "blocks")
    found = ENGINES["aoti"]
    monkeypatch.setattr("torchperf_ros.engines.package.build_package", lambda *_: Built("whole"))
    assert found.build(tier, IN_BLOCKS, tmp_path / "x.pt2").parts.startswith(
        "the whole model: outputs differ from eager"
    )
    with pytest.raises(ParityError):
        found.build(tier, BuildOptions("aoti", parts="blocks.0"), tmp_path / "x.pt2")


def test_given_a_part_with_convolutions_when_built_then_images_have_channels_last_in_it_and_not_in_the_outputs():
    torch.manual_seed(0)
    part = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    stem, laid_out = torch.nn.Conv2d(3, 3, 3), []
    stem.register_forward_hook(lambda *of: laid_out.append(of[2].is_contiguous(memory_format=torch.channels_last)))
    tier = BuiltTier(torch.nn.Sequential(stem, part, torch.nn.ReLU()).eval(), (torch.randn(1, 3, 8, 8),), {}, CPU)
    runner = make_runner(tier, BuildOptions("aoti", parts="1"))
    laid_out.clear()
    with torch.inference_mode():
        found = runner.call(*tier.example)
        assert measure(tier.model(*tier.example), found).relative_l2 < 1e-5
    assert found.is_contiguous()
    assert laid_out == [True, False]  # of what runs, so that nothing is copied before the part; of the model itself
    (call,) = runner.part_calls
    assert (call.misses, call.part.example[0].is_contiguous(memory_format=torch.channels_last)) == (0, True)


def test_given_parts_without_convolutions_when_packing_does_not_pay_then_weights_stay_as_they_are(monkeypatch):
    torch.manual_seed(0)
    asked = []
    monkeypatch.setattr(parts_package, "_packing_pays", asked.append)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)))
    tier = BuiltTier(model.eval(), (torch.randn(3, 8),), {}, CPU)
    runner = make_runner(tier, IN_BLOCKS)
    with torch.inference_mode():
        assert measure(model(*tier.example), runner.call(*tier.example)).relative_l2 < 1e-5
    assert [(call.hits, call.misses) for call in runner.part_calls] == [(1, 0)] * 4
    (((rows, weight),),) = asked
    assert rows == 3
    assert torch.equal(weight, model[0][0].weight)


@pytest.mark.parametrize(("packed_ms", "pays"), [(1.0, True), (3.0, False)])
def test_given_products_when_timed_then_both_ways_multiply_the_same_and_the_faster_one_decides(
    monkeypatch, packed_ms, pays
):
    made = []
    monkeypatch.setattr(torch, "randn", lambda *sizes, **_: made.append(torch.ones(sizes)) or made[-1])

    def timed(calls, *_, **__):
        for packed, plain, weight in zip(calls["packed"](), calls["plain"](), weights, strict=True):
            torch.testing.assert_close(packed, plain)
            torch.testing.assert_close(plain, made[0] @ weight.t())
        return {name: SimpleNamespace(median_ms=packed_ms if name == "packed" else 2.0) for name in calls}

    monkeypatch.setattr(parts_package, "time_interleaved", timed)
    weights = [torch.arange(64.0).reshape(8, 8), torch.arange(32.0).reshape(4, 8)]
    assert parts_package._packing_pays([(3, weight) for weight in weights]) is pays
    assert [tensor.shape for tensor in made] == [(3, 8), (3, 8)]


def test_given_a_users_package_of_parts_when_loaded_then_it_runs_and_another_model_is_refused(
    in_parts, adapters, tmp_path
):
    package = in_parts[1]["blocks"]["package"]
    loaded = Loaded(
        adapters.Compiled(DYNAMIC, CPU), tmp_path, tier="blocks", package=package, shapes=ShapeOptions("dynamic")
    )
    assert (loaded.facts.engine, loaded.said) == ("aoti", [])
    assert loaded.facts.parts.startswith("blocks.0 to blocks.4")
    loaded.run(3)
    with pytest.raises(PackageError, match="has parts of another model than the adapter builds"):
        Loaded(adapters.Compiled(DYNAMIC | {"seed": 1}, CPU), tmp_path, tier="blocks", package=package)


def test_given_parts_when_an_engine_takes_only_wholes_then_it_says_so_and_engine_auto_has_it_whole():
    with pytest.raises(EngineUnavailable, match="engine openvino takes whole models only; parts has to be empty"):
        ENGINES["openvino"].check(BuildOptions("openvino", parts="blocks"), {}, CPU)
    with pytest.raises(EngineUnavailable, match="precision int8_static takes whole models only"):
        ENGINES["aoti"].check(BuildOptions("aoti", precision="int8_static", parts="auto"), {}, CPU)
    assert ENGINES["openvino"].why_not(BuildOptions("auto", parts="blocks"), {}, CPU) == ""
    assert BuildOptions("auto", parts="blocks").with_engine("openvino") == BuildOptions("openvino")
    assert BuildOptions("auto", parts="blocks").with_engine("aoti") == IN_BLOCKS
