"""Packages as a real compile process builds them; the slow part is shared, see the fixture `built`."""

import os
import shutil
import signal

import pytest
import torch

from torchperf_ros.core.package_manifest import check_package, manifest_path, read_manifest
from torchperf_ros.supervise.compile_process import CompileProcess
from torchperf_ros.worker.adapter import load_adapter
from torchperf_ros.worker.fingerprint import machine_facts
from torchperf_ros.worker.package import load_package
from torchperf_ros.worker.package_build import build_all
from torchperf_ros.worker.parity import check_engine

from .conftest import PATIENCE_S, job

pytestmark = pytest.mark.timeout(PATIENCE_S)
CPU = torch.device("cpu")


def build(values):
    """Build in this process; what it says, and whether all is there."""
    said = []
    good = build_all(values, lambda kind, **fields: said.append({"kind": kind, **fields}))
    return said, good


def kinds(said):
    return [message["kind"] for message in said if message["kind"] != "tier"]


@pytest.fixture
def no_build(monkeypatch):
    monkeypatch.setattr("torchperf_ros.worker.package_build.build_package", lambda *inputs: pytest.fail("built again"))


@pytest.fixture(autouse=True)
def one_thread(adapters):
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_given_two_processes_that_build_the_same_when_done_then_one_has_built_it_and_both_have_it(built):
    results = [next(message for message in said if message["kind"] == "built") for said in built.at_once]
    assert sorted(result["new"] for result in results) == [False, True]
    assert results[0]["package"] == results[1]["package"]
    assert results[0]["manifest"] == results[1]["manifest"]


def test_given_a_tier_that_cannot_be_built_when_built_then_it_says_why_and_the_others_are_built(built):
    for said, end in zip(built.at_once, built.ends, strict=False):
        assert kinds(said) == ["failed", "built", "done"]
        failed = next(message for message in said if message["kind"] == "failed")
        assert failed["tier"] == "untraceable"
        assert "\n" not in failed["text"]
        assert "Traceback" in failed["detail"]
        assert end.startswith("the compile process ended by exit status 1")
    assert kinds(built.dynamic) == ["built", "done"]
    assert built.ends[2] == ""


def test_given_a_build_when_it_goes_on_then_each_step_is_said(built):
    steps = [(m["tier"], m["number"], m["step"]) for m in built.dynamic if m["kind"] == "tier"]
    assert steps == [("full", 1, step) for step in ("loading", "compiling", "checking", "timing")]


@pytest.mark.parametrize("which", ["static", "dynamic"])
def test_given_a_package_when_built_then_its_manifest_holds_everything(built, which):
    package = built.package(built.at_once[0] if which == "static" else built.dynamic)
    manifest = check_package(package, None)
    assert (manifest.adapter, manifest.tier) == ("compiled_adapters:Compiled", "full")
    identity = manifest.identity
    assert package.stem == identity.key
    assert (identity.torch, identity.device, identity.capability) == (torch.__version__, *machine_facts(CPU))
    assert identity.signature == ["float32 1x4", "int64 1x3"]
    assert identity.dynamic == ([] if which == "static" else [[0, 0, 1, 8], [1, 0, 1, 8]])
    assert all(len(text) == 64 for text in (identity.weights, identity.code, manifest.graph, manifest.package_sha256))
    assert manifest.parity["relative_l2"] < 1e-3
    batches = [1] if which == "static" else [4, 8, 1]
    assert list(manifest.timings) == [f"float32 {n}x4, int64 {n}x3" for n in batches]  # the example's comes last
    for timing in manifest.timings.values():
        assert set(timing) == {"p50_ms", "p99_ms", "eager_p50_ms", "eager_p99_ms"}
        assert all(value > 0 for value in timing.values())
    assert manifest.compile_s > 0
    assert manifest.peak_memory_bytes > 1 << 20
    assert manifest.built.endswith("+00:00")


@torch.inference_mode()
def test_given_a_dynamic_package_when_run_on_every_batch_then_it_gives_what_eager_gives(built):
    adapter = load_adapter("compiled_adapters:Compiled")({"dynamic": True}, CPU)
    call = load_package(built.package(built.dynamic), CPU)
    example = adapter.example_inputs("full")
    model = adapter.build("full").eval()
    for batch in range(1, 9):
        check_engine(model, call, example, {0: {0: (batch, batch)}, 1: {0: (batch, batch)}}, "fp32")


def test_given_builds_when_done_then_no_half_file_is_left(built):
    assert sorted({path.suffix for path in built.cache.folder.glob("*.p*")}) == [".pt2"]
    assert len(list(built.cache.folder.glob("*.json"))) == 2
    assert not list(built.cache.folder.glob("*.part.*"))


def test_given_a_package_that_is_there_when_asked_again_then_it_is_not_built(built, no_build):
    said, good = build(job(built.cache.folder))
    assert good
    (result,) = (message for message in said if message["kind"] == "built")
    assert result["new"] is False
    assert result["package"] == str(built.package(built.at_once[0]))


@pytest.mark.parametrize("change", [{"options": {"seed": 1}}, {"options": {"dynamic": True, "seed": 1}}])
def test_given_other_weights_when_planned_then_another_package_would_be_built(built, change):
    said, good = build(job(built.cache.folder, dry_run=True, **change))
    assert good
    assert kinds(said) == ["planned", "done"]
    assert "would be built: " in said[1]["text"]
    assert " is not there" in said[1]["text"]


def test_given_a_dry_run_when_planned_then_it_says_what_is_there_and_writes_nothing(built, no_build, tmp_path):
    before = sorted(built.cache.folder.iterdir())
    (_, planned, _), _ = build(job(built.cache.folder, dry_run=True))
    assert planned["text"] == f"is there: {built.package(built.at_once[0])}"
    (_, planned, _), _ = build(job(built.cache.folder, dry_run=True, force=True))
    assert planned["text"].endswith("; it would be built again")
    assert sorted(built.cache.folder.iterdir()) == before
    build(job(tmp_path / "none", dry_run=True))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "corrupt"),
        (lambda path: manifest_path(path).write_text("{"), "cannot be read"),
        (lambda path: manifest_path(path).unlink(), "no manifest"),
    ],
)
def test_given_a_damaged_package_when_built_then_it_is_replaced(built, monkeypatch, tmp_path, damage, said):
    shutil.copytree(built.cache.folder, tmp_path / "copy")
    package = tmp_path / "copy" / built.package(built.at_once[0]).name
    good = package.read_bytes()
    damage(package)
    (_, planned, _), _ = build(job(tmp_path / "copy", dry_run=True))
    assert said in planned["text"]
    copy_instead_of_building(monkeypatch, good)
    (*_, result, _), _ = build(job(tmp_path / "copy"))
    assert result["new"] is True
    check_package(package, read_manifest(built.package(built.at_once[0])).identity)


def copy_instead_of_building(monkeypatch, content):
    """The compiler, in no time."""

    def copy(model, example, dims, path):
        path.write_bytes(content)
        return "g" * 64

    monkeypatch.setattr("torchperf_ros.worker.package_build.build_package", copy)
    monkeypatch.setattr("torchperf_ros.worker.package_build._TIMING_SECONDS", 0.0)


def test_given_a_folder_when_built_then_the_package_has_the_tiers_name_and_is_built_once(built, monkeypatch, tmp_path):
    copy_instead_of_building(monkeypatch, built.package(built.at_once[0]).read_bytes())
    values = job(tmp_path / "cache", out=str(tmp_path / "out"))
    (*_, result, _), _ = build(values)
    assert (result["package"], result["new"]) == (str(tmp_path / "out" / "full.pt2"), True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["full.json", "full.pt2"]
    assert not list((tmp_path / "cache").glob("*.pt2"))
    (*_, result, _), _ = build(values)
    assert result["new"] is False
    (*_, result, _), _ = build({**values, "force": True})
    assert result["new"] is True


def test_given_a_package_that_gives_other_outputs_when_built_then_it_is_refused_and_never_stored(
    built, monkeypatch, tmp_path
):
    copy_instead_of_building(monkeypatch, built.package(built.at_once[0]).read_bytes())
    said, good = build(job(tmp_path, options={"seed": 1}))
    assert not good
    assert "outputs differ from eager's: relative L2" in said[-2]["text"]
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_given_a_build_that_fails_half_way_when_it_was_there_before_then_the_old_one_stays(
    built, monkeypatch, tmp_path
):
    shutil.copytree(built.cache.folder, tmp_path / "copy")
    before = sorted(path.name for path in (tmp_path / "copy").iterdir())
    monkeypatch.setattr("torchperf_ros.worker.package_build.file_sha256", lambda path: 1 / 0)
    copy_instead_of_building(monkeypatch, built.package(built.at_once[0]).read_bytes())
    said, good = build(job(tmp_path / "copy", force=True))
    assert not good
    assert said[-2]["text"] == "ZeroDivisionError: division by zero"
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == before
    check_package(tmp_path / "copy" / built.package(built.at_once[0]).name, None)


def test_given_a_cache_that_is_full_when_built_then_the_new_package_is_kept(built, monkeypatch, tmp_path):
    copy_instead_of_building(monkeypatch, built.package(built.at_once[0]).read_bytes())
    (*_, result, _), _ = build(job(tmp_path, cache_mib=0))
    assert os.path.exists(result["package"])


def test_given_a_users_compiled_package_for_a_tier_when_built_then_there_is_nothing_to_do(built, no_build, tmp_path):
    package = built.package(built.at_once[0])
    said, good = build(job(tmp_path, packages=[str(package)]))
    assert good
    assert said[1] == {"kind": "planned", "tier": "full", "text": f"is compiled: {package}"}


def test_given_a_process_that_is_killed_while_it_compiles_when_looked_for_then_no_package_is_there(adapters, tmp_path):
    process = CompileProcess(job(tmp_path), background=True)
    try:
        while not any(m.get("step") == "compiling" for m in process.listen() or ()):
            assert process._process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        while process.listen() is not None:
            pass
        assert process.death_reason().startswith("the compile process ended by signal SIGKILL")
    finally:
        process.close()
    assert not [path for path in tmp_path.glob("*.pt2") if ".part." not in path.name]
    assert not list(tmp_path.glob("*.json"))
