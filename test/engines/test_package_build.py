"""Packages as a real compile process builds them; the slow part is shared, see the fixture `built`."""

import contextlib
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from torchperf_ros.api.adapter import load_adapter
from torchperf_ros.engines import package, package_build
from torchperf_ros.engines.device import Timing
from torchperf_ros.engines.engine import CaptureFailed, prepare_inductor
from torchperf_ros.engines.file_engines import (
    build_package,
    check_linked,
    check_toolkit,
    lays_out_images,
    load_package,
)
from torchperf_ros.engines.fingerprint import identify, machine_facts
from torchperf_ros.engines.package import TimingFailed
from torchperf_ros.engines.package_engine import Built, export
from torchperf_ros.engines.parity import check_engine
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.settings.files import exposed
from torchperf_ros.workers.compile_process import CompileProcess
from torchperf_ros.workers.package_cache import NoRoom
from torchperf_ros.workers.package_manifest import PackageError, check_package

from .compiled_adapters import Counting
from .conftest import PATIENCE_S, build, job

pytestmark = [pytest.mark.timeout(PATIENCE_S), pytest.mark.usefixtures("adapters")]
CPU = torch.device("cpu")


def kinds(said):
    return [message["kind"] for message in said if message["kind"] != "tier"]


@pytest.fixture
def no_build(monkeypatch):
    monkeypatch.setattr(
        "torchperf_ros.engines.file_engines.build_package", lambda *inputs: pytest.fail("built again")
    )


def test_given_a_tier_that_cannot_be_built_when_built_then_it_says_why_and_the_others_are_built(built):
    assert kinds(built.reported["static"]) == ["failed", "built", "done"]
    failed = next(message for message in built.reported["static"] if message["kind"] == "failed")
    assert failed["tier"] == "untraceable"
    assert "\n" not in failed["text"]
    assert "Traceback" in failed["detail"]
    assert built.end.startswith("the compile process ended by exit status 1")
    assert kinds(built.reported["dynamic"]) == ["built", "done"]


@pytest.mark.parametrize("which", ["static", "dynamic"])
def test_given_a_package_when_built_then_its_manifest_holds_everything(built, which):
    package = built.package(which)
    manifest = check_package(package, None)
    assert (manifest.adapter, manifest.tier) == ("compiled_adapters:Compiled", "full")
    identity = manifest.identity
    assert package.stem == identity.key
    assert (identity.torch, identity.device, identity.capability) == (
        torch.__version__,
        *machine_facts(CPU),
    )
    assert identity.signature == ["float32 1x4", "int64 1x3"]
    assert identity.dynamic == ([] if which == "static" else [[0, 0, 1, 8], [1, 0, 1, 8]])
    assert all(
        len(text) == 64
        for text in (identity.weights, identity.code, manifest.graph, manifest.package_sha256)
    )
    assert manifest.parity["relative_l2"] < 1e-3
    # the example's comes last
    assert list(manifest.timings) == [
        f"float32 {n}x4, int64 {n}x3" for n in ([1] if which == "static" else [4, 8, 1])
    ]
    for timing in manifest.timings.values():
        assert set(timing) == {"p50_ms", "p99_ms", "eager_p50_ms", "eager_p99_ms"}
        assert all(value > 0 for value in timing.values())
    assert list(manifest.variants_ms) == (["plain"] if which == "static" else ["frozen"])
    assert manifest.compile_s > 0
    assert manifest.peak_memory_bytes > 1 << 20
    assert manifest.built.endswith("+00:00")


def test_given_a_package_when_loaded_then_the_constants_that_were_copied_are_not_held_twice(built):
    call = load_package(built.package(), CPU)
    mappings = re.split(r"^(?=\w+-\w+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    own = [text for text in mappings if "/aotinductor/" in text.partition("\n")[0]]
    copied = [
        text for text in own if " r--p " in text and re.search(r"^Anonymous: +0 kB", text, re.MULTILINE)
    ]
    assert copied
    assert [text for text in copied if not re.search(r"^Rss: +0 kB", text, re.MULTILINE)] == []
    adapter = load_adapter("compiled_adapters:Compiled")({}, CPU)
    check_engine(adapter.build("full").eval(), call, adapter.example_inputs("full"), {}, "fp32")


def test_given_a_umask_for_groups_when_built_then_only_the_user_may_enter_the_cache_and_write_packages(
    built,
):
    assert stat.S_IMODE(built.cache.folder.stat().st_mode) == 0o700
    assert [path.name for path in built.cache.folder.iterdir() if exposed(path)] == []
    assert sorted({path.suffix for path in built.cache.folder.glob("*.p*")}) == [".pt2"]  # no half file


def test_given_weights_that_differ_at_every_build_when_built_or_planned_then_they_are_named_and_nothing_is_compiled(
    adapters, no_build, tmp_path
):
    for how in ({}, {"dry_run": True}):
        said, good = build(job(tmp_path, options={"seed": None}, **how))
        assert not good
        (failed,) = (message for message in said if message["kind"] == "failed")
        assert failed["tier"] == "full"
        assert (
            "build('full') gives other weights at every call (layers.0.bias and 3 more)" in failed["text"]
        )
        assert "torch.manual_seed" in failed["text"]
        assert not failed["detail"]  # which would say it again
        assert "\n" not in failed["text"]


def images():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU(True)
    )


@pytest.fixture
def compiler(monkeypatch):
    """In the place of the compiler.

    Notes what it is given; the loaded packages are the numbers of their builds.
    """
    given = []

    def compile_and_package(program, package_path, inductor_configs):
        assert not torch.is_grad_enabled()  # Inductor would freeze nothing
        given.append(inductor_configs["freezing"])
        Path(package_path).write_text(str(len(given)))

    def load(path, device):
        number = int(path.read_text())
        return lambda *inputs: time.sleep(0.1 if number == 1 else 0.0)

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile_and_package)
    monkeypatch.setattr(
        "torchperf_ros.engines.file_engines.check_linked", lambda path: None
    )  # a number links nothing
    monkeypatch.setattr("torchperf_ros.engines.file_engines.load_package", load)
    monkeypatch.setattr("torchperf_ros.engines.file_engines._VARIANT_SECONDS", 0.01)
    return given


@pytest.mark.parametrize(
    ("model", "shape", "frozen", "names"),
    [
        (images, (1, 3, 8, 8), [True], ["frozen"]),  # Inductor chooses channels last itself
        (images, (1, 3, 8, 8), [True, True], ["frozen channels_last", "frozen"]),
        (lambda: torch.nn.Linear(4, 4), (1, 4), [True, False], ["plain", "frozen"]),
        (Counting, (1, 4), [False], ["plain"]),
        (torch.nn.ReLU, (1, 4), [False], ["plain"]),
    ],
)
def test_given_a_model_then_the_fastest_of_its_variants_is_kept(
    compiler, monkeypatch, tmp_path, model, shape, frozen, names
):
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: len(frozen) == 1)
    found = build_package(model().eval(), (torch.zeros(shape),), {}, tmp_path / "model.pt2")
    assert compiler == frozen
    assert list(found.variants_ms) == names
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    assert (tmp_path / "model.pt2").read_text() == str(len(frozen))


def grouped(count):
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, groups=count)
    )


@pytest.mark.parametrize(
    ("model", "dims"),
    [(images(), {}), (images(), {0: {0: (1, 8)}}), (grouped(8), {}), (grouped(2), {})],
    ids=["fixed", "varying", "depthwise", "grouped"],
)
def test_given_images_on_cuda_then_two_variants_are_built_where_inductor_does_not_choose_channels_last(
    monkeypatch, model, dims
):
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    program = export(model.eval(), (torch.zeros(1, 3, 8, 8),), dims)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)  # torch's rule for CUDA
    with torch.no_grad():
        graph = program.run_decompositions(select_decomp_table()).graph_module
    chosen = GraphLowering.decide_layout_opt(graph, is_inference=True)
    assert lays_out_images(program, torch.device("cuda")) is chosen


_ASKED = """
import sys, torch
from torchperf_ros.engines.engine import prepare_inductor
from torch._inductor import codecache, config, cpu_vec_isa
started = []
sys.addaudithook(lambda event, given: event == "subprocess.Popen" and started.append(given))
prepare_inductor(torch.device(sys.argv[1]))
cpu_vec_isa.pick_vec_isa()
print(len(started), config.cpp.vec_isa_ok, config.aot_inductor.precompile_headers, codecache._HEADER_DIR)
"""


@pytest.mark.parametrize(("device", "chosen"), [("cuda", ""), ("cpu", "0")])
def test_given_a_build_for_cuda_then_no_program_asks_for_vector_instructions_and_no_header_is_precompiled(
    tmp_path, device, chosen
):
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_VEC_ISA_OK": chosen,
    }
    found = subprocess.check_output([sys.executable, "-c", _ASKED, device], env=environment, text=True)
    assert found.endswith(f"0 False False {tmp_path}/precompiled_headers\n")


def test_given_a_variant_that_cannot_be_compiled_when_built_then_the_other_is_kept(
    compiler, monkeypatch, tmp_path
):
    whole = torch._inductor.aoti_compile_and_package
    arguments = torch.nn.Linear(4, 4), (torch.zeros(1, 4),), {}, tmp_path / "model.pt2"
    for refused in ({True}, {True, False}):

        def picky(program, package_path, inductor_configs, refused=refused):
            if inductor_configs["freezing"] in refused:
                raise NotImplementedError("no such operator")
            whole(program, package_path, inductor_configs)

        monkeypatch.setattr("torch._inductor.aoti_compile_and_package", picky)
        if False not in refused:
            assert list(build_package(*arguments).variants_ms) == ["plain"]
    with pytest.raises(NotImplementedError, match="no such operator"):
        build_package(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


def test_given_a_dry_run_when_planned_then_it_says_what_is_there_and_writes_nothing(
    built, no_build, tmp_path
):
    before = sorted(built.cache.folder.iterdir())
    (_, planned, _), _ = build(job(built.cache.folder, dry_run=True))
    assert planned["text"] == f"is there: {built.package()}"
    (_, planned, _), _ = build(job(built.cache.folder, dry_run=True, force=True))
    assert planned["text"].endswith("; it would be built again")
    assert sorted(built.cache.folder.iterdir()) == before
    (_, planned, _), good = build(job(tmp_path / "none", dry_run=True))
    assert (good, (tmp_path / "none").exists()) == (True, False)
    assert planned["text"].startswith("would be built: ")
    assert planned["text"].endswith(" is not there")


def copy_instead_of_building(monkeypatch, content):
    """The compiler, in no time."""

    def copy(model, example, dims, path):
        path.write_bytes(content)
        return Built("g" * 64)

    monkeypatch.setattr("torchperf_ros.engines.file_engines.build_package", copy)


def test_given_a_folder_when_built_then_the_package_has_the_tiers_name_and_is_built_once(
    built, monkeypatch, tmp_path
):
    copy_instead_of_building(monkeypatch, built.package().read_bytes())
    values = job(tmp_path / "cache", out=str(tmp_path / "out"))
    (*_, result, _), _ = build(values)
    assert (result["package"], result["new"]) == (str(tmp_path / "out" / "full.pt2"), True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["full.json", "full.pt2"]
    assert not list((tmp_path / "cache").glob("*.pt2"))
    (*_, result, _), _ = build(values)
    assert result["new"] is False
    (*_, result, _), _ = build({**values, "force": True})
    assert result["new"] is True


def test_given_a_package_that_gives_other_outputs_then_it_is_refused_and_never_stored(
    built, monkeypatch, tmp_path
):
    copy_instead_of_building(monkeypatch, built.package().read_bytes())
    said, good = build(job(tmp_path, options={"seed": 1}))
    assert not good
    assert "outputs differ from eager's: relative L2" in said[-2]["text"]
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_given_a_build_that_fails_half_way_when_it_was_there_before_then_the_old_one_stays(
    built, monkeypatch, tmp_path
):
    shutil.copytree(built.cache.folder, tmp_path / "copy")
    before = sorted(path.name for path in (tmp_path / "copy").iterdir())
    monkeypatch.setattr("torchperf_ros.engines.package_build.file_sha256", lambda path: 1 / 0)
    copy_instead_of_building(monkeypatch, built.package().read_bytes())
    said, good = build(job(tmp_path / "copy", force=True))
    assert not good
    assert said[-2]["text"].startswith("ZeroDivisionError: division by zero (test_package_build.py:")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == before
    check_package(tmp_path / "copy" / built.package().name, None)


def test_given_a_users_compiled_package_for_a_tier_when_built_then_there_is_nothing_to_do(
    built, no_build, tmp_path
):
    package = built.package()
    said, good = build(job(tmp_path, packages=[str(package)]))
    assert good
    assert said[1] == {"kind": "planned", "tier": "full", "text": f"is compiled: {package}"}


@pytest.mark.parametrize("engine", ["eager", "graph", "compile"])
def test_given_an_engine_that_takes_no_package_when_built_then_it_says_so_and_nothing_is(
    no_build, tmp_path, engine
):
    said, good = build(job(tmp_path / "cache", build=[BuildOptions(engine).as_dict()]))
    assert (good, kinds(said), said[0]["kind"]) == (True, ["planned", "done"], "planned")
    assert re.match(f"engine {engine} .*: nothing is built", said[0]["text"])
    assert not (tmp_path / "cache").exists()


def test_given_a_full_disk_when_engines_are_chosen_from_then_no_choice_without_them_is_kept(
    monkeypatch, tmp_path
):
    full = mock.Mock(
        side_effect=RuntimeError("C++ compile error\n\nld: final link failed: No space left on device")
    )
    monkeypatch.setattr("torchperf_ros.engines.file_engines.build_package", full)
    with pytest.raises(NoRoom, match=f"{tmp_path} .or TMPDIR. cannot be written: ld: final link"):
        build(job(tmp_path, build=[BuildOptions("auto").as_dict()]))
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}


def test_given_no_room_when_a_process_builds_then_its_last_word_says_so_and_what_compilers_kept_is_gone(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with contextlib.closing(CompileProcess(job(tmp_path), background=False)) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1024, 1024))
        *_, last = process.messages(PATIENCE_S)
    assert (last["kind"], last["unusable"], last["no_room"]) == ("failed", True, True)
    assert "File too large" in last["text"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}


def test_given_no_headers_of_cuda_when_a_package_for_it_is_to_be_built_then_the_error_says_what_to_install(
    monkeypatch, tmp_path
):
    monkeypatch.setattr("torch.utils.cpp_extension.include_paths", lambda device_type: [str(tmp_path)])
    with pytest.raises(
        PackageError,
        match=f"cuda_runtime_api.h is missing .{tmp_path}, /usr/include.; install a CUDA toolkit",
    ):
        check_toolkit()
    (tmp_path / "cuda_runtime_api.h").touch()
    check_toolkit()


def test_given_no_compiler_when_a_package_is_to_be_built_then_the_error_says_what_to_install(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("CXX", "/no/such/g++")
    with pytest.raises(
        PackageError, match=r"compiler /no/such/g\+\+ is not there; install g\+\+, or set CXX"
    ):
        build_package(torch.nn.ReLU(), (torch.zeros(1),), {}, tmp_path / "model.pt2")


def test_given_a_compiler_that_links_its_own_cpp_library_when_a_package_is_built_then_it_is_refused(
    tmp_path,
):
    file = tmp_path / "model.pt2"
    for needed, name in ((b"libc.so.6", "a.so"), (b"libstdc++.so.6", "b.so")):
        with zipfile.ZipFile(file, "w") as package:
            package.writestr(f"model/{name}", b"\0" + needed + b"\0")
        if name == "a.so":
            with pytest.raises(PackageError, match="set CXX and CC"):
                check_linked(file)
    check_linked(file)


def test_given_a_torch_below_a_folder_with_a_space_when_linked_then_it_is_named_by_a_link_without_one(
    monkeypatch, tmp_path
):
    from torch._inductor import cpp_builder
    from torch.utils import cpp_extension

    folder = tmp_path / "my robot" / "torch" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(folder))
    monkeypatch.setattr(cpp_builder, "_LINKER_SCRIPT", str(folder / "script.ld"))
    prepare_inductor(CPU)
    options = cpp_builder.CppTorchOptions(aot_mode=True)
    (named,) = [path for path in options.get_libraries_dirs() if Path(path).resolve() == folder]
    assert " " not in named + cpp_builder._LINKER_SCRIPT
    for link in (named, cpp_builder._LINKER_SCRIPT):
        Path(link).unlink()


@pytest.mark.parametrize(
    ("lacks", "without", "kept"), [("other", "other", "third"), ("eager", "third", "other")]
)
def test_given_too_little_memory_for_all_ways_when_auto_times_them_then_the_next_process_does_without_one(
    tmp_path, monkeypatch, lacks, without, kept
):
    """Memory that eager lacks beside the others is there without the last of them."""
    eager, make, compare, is_timed = BuildOptions(), package_build.make_runner, package_build.compare, []
    is_short, ways = (
        [True],
        {"eager": eager, "other": replace(eager, channels_last=True), "third": replace(eager, mode="max")},
    )

    def made(tier, options, record=None):
        def call(*inputs):
            if is_short and is_timed and options is ways[lacks]:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 GB")
            return tier.model(*inputs)

        return replace(make(tier, eager), call=call)

    monkeypatch.setattr(package_build, "ways_of", lambda *of: (ways, identify(*of)))
    monkeypatch.setattr(package_build, "make_runner", made)
    monkeypatch.setattr(package_build, "compare", lambda *of: is_timed.append(1) or compare(*of))
    monkeypatch.setattr(package, "_ROUNDS", 1)
    values = job(tmp_path, build=[BuildOptions("auto").as_dict()])
    with pytest.raises(
        TimingFailed, match=f"no memory for {lacks} beside all others: .*allocate"
    ) as caught:
        build(values)
    assert caught.value.lacked == f"full {without}"
    is_short.clear()
    said, _ = build(values | {"lacked": {caught.value.lacked: str(caught.value)}})
    (words,) = [each["choice"] for each in said if each["kind"] == "built"]
    assert re.search(f"{kept} .*; left out: {without}: no memory for {lacks}", words)
    assert words.endswith("; `torchperf compile` tries it again")


def test_given_a_stall_that_one_engine_met_when_timed_beside_eager_then_only_late_calls_of_its_own_count(
    monkeypatch,
):
    times_ms = {"eager": [4.6] * 40, "stalled": [4.0] * 38 + [8.0, 9.0], "late": [2.0] * 34 + [7.0] * 6}
    timings = {name: Timing(tuple(found)) for name, found in times_ms.items()}
    monkeypatch.setattr(package, "time_interleaved", lambda *_, **__: timings)
    assert package.compare(dict.fromkeys(times_ms), (), CPU, {}).engine == "stalled"


def test_given_too_little_memory_to_capture_when_auto_chooses_then_the_others_are_judged_and_a_command_tries_again(
    tmp_path, monkeypatch
):
    eager, make, tried, is_short = BuildOptions(), package_build.make_runner, [], [True]
    ways = {"eager": eager, "graph": BuildOptions("graph"), "other": replace(eager, channels_last=True)}

    def made(tier, options, record=None):
        with record.trying() if record else nullcontext():
            tried.extend([record] if record else [])
            if record and is_short:
                raise CaptureFailed("no memory") from torch.OutOfMemoryError()
        return make(tier, eager)

    monkeypatch.setattr(package_build, "ways_of", lambda *of: (ways, identify(*of)))
    monkeypatch.setattr(package_build, "make_runner", made)
    monkeypatch.setattr(package, "_ROUNDS", 1)
    values = job(tmp_path, build=[BuildOptions("auto").as_dict()], background=True, options={"plain": True})
    with pytest.raises(CaptureFailed) as caught:  # its process ends; the next one is handed that
        build(values)

    def choice(**more):
        said, _ = build(values | more)
        return next((each["new"], each["choice"]) for each in said if each["kind"] == "built")

    is_new, words = choice(lacked={caught.value.lacked: str(caught.value)})
    assert is_new
    assert "other " in words
    assert "; left out: graph: no memory; `torchperf compile` tries it again" in words
    assert choice() == (False, words)  # at the next start, beside workers: it is remembered
    is_short.clear()
    is_new, words = choice(background=False)
    assert (is_new, "left out" in words, len(tried)) == (True, False, 2)
    assert choice(background=False) == (False, words)
