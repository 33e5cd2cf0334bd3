"""`bench cuda` without ROS, a network or a GPU.

What it says, and that the end of one part does not end the others.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import cuda
from benchmarks.rig.cuda.build_times import build_times
from benchmarks.rig.cuda.by_hand import FP32, best_of, by_hand
from benchmarks.rig.cuda.networks import SIZES, NetworkAdapter, network
from benchmarks.rig.cuda.parts import PARTS, PHASES, ROS_ONLY, usual
from benchmarks.rig.cuda.parts import tests_so_far as found_of_tests
from benchmarks.rig.report import shown

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs it, its parts as processes, where importing rclpy fails.

    Gives its status and, if it wrote some, figures.
    """
    (tmp_path / "rclpy.py").write_text("raise ImportError('there is no ROS here')\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "rclpy", None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))

    def run(*arguments):
        file = tmp_path / "it.json"
        monkeypatch.setattr(sys, "argv", ["cuda", *arguments, "--json", str(file)])
        status = cuda.main()
        return status, json.loads(file.read_text(encoding="utf-8"))["figures"] if file.exists() else {}

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_given_no_cuda_when_run_then_one_line_says_so_and_the_status_is_its_own(bench, capsys):
    assert bench()[0] == 3
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "sees no CUDA device; --device cpu tries what a CPU can run" in said


def test_given_the_cpu_when_tried_then_the_figures_are_written(bench):
    status, found = bench("--device", "cpu", "--parts", "copies,streams,steps", "--seconds", "0.01")
    assert {name for name, part in found["parts"].items() if part["ended"] == "done"} == {"copies", "steps"}
    assert set(found["steps"]) == {"eager"}
    assert found["steps"]["eager"]["fresh"] > 0, found
    assert found["steps"]["eager"]["bare, all steps"]["p50"] > 0
    for verdict, ratio in zip(
        found["parts"]["steps"]["verdicts"], found["steps"]["eager"]["ratios"].values(), strict=True
    ):
        assert verdict.endswith(f"{shown(ratio)} (<= 1.05): {'met' if ratio <= 1.05 else 'missed'}")
    assert found["copies"]["image 1920x1080 up"]["p50_ms"] > 0


def test_given_a_part_that_is_not_done_in_time_when_run_then_it_is_named_and_the_next_one_begins(bench):
    status, found = bench(
        "--device", "cpu", "--parts", "machine,networks", "--part-within", "0.1", "--jobs", "1"
    )
    assert status == 1
    ended = [found["parts"][name]["ended"].split(":")[0] for name in ("machine", "resnet50")]
    assert ended == ["killed", "killed"]


def test_given_an_unknown_part_when_run_then_the_message_has_the_groups_too(bench, capsys):
    with pytest.raises(SystemExit):
        bench("--device", "cpu", "--parts", "engines")
    assert "'engines' is unknown; there are machine, resnet50" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("name", SIZES)
def test_given_our_own_networks_when_built_twice_then_they_are_alike_and_answer_as_they_are_used(name):
    adapter = NetworkAdapter({"network": name, "small": True}, torch.device("cpu"))
    first, second = adapter.build("full"), adapter.build("full")
    (image,) = adapter.example_inputs("full")
    with torch.inference_mode():
        outputs = first(image)
        assert len(adapter.sideways(outputs)) == 5
        assert adapter.sideways(outputs) == adapter.sideways(second(image))


@pytest.mark.parametrize(("name", "millions"), [("resnet50", 25.6), ("vit_b_16", 86.6)])
def test_given_our_own_networks_when_whole_then_they_are_as_large_as_those_of_the_papers(name, millions):
    with torch.device("meta"):
        found = network(name, own=True)
    assert sum(each.numel() for each in found.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_given_a_model_when_run_by_hand_then_each_way_that_fails_is_named_and_the_others_are_there():
    model = network("vit_b_16", small=True).eval()
    with torch.inference_mode():
        found, refused = by_hand(model, torch.zeros(1, 3, 64, 64), [FP32], compiles=[])
        broken, why = by_hand(model, torch.zeros(1, 3, 80, 64), [FP32], compiles=[])
    assert (list(found), refused) == (["by hand: eager, fp32"], {})
    assert best_of({"auto": 0.1, "by hand: eager, fp32": 1.0}, found, FP32) == "by hand: eager, fp32"
    assert not broken
    assert list(why) == ["by hand: eager, fp32"]


def test_given_a_package_when_built_then_each_process_is_counted_and_what_torch_does_itself_between_them(
    tmp_path,
):
    program = torch.export.export(torch.nn.Linear(4, 4).eval(), (torch.zeros(1, 4),))
    quickly = torch._inductor.config.patch(
        {"cpp.vec_isa_ok": False, "aot_inductor.precompile_headers": False}
    )
    with build_times() as times, torch.no_grad(), quickly:
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    calls = {step.partition(": ")[2] or step: count for step, count in times.calls.items()}
    assert (calls["wrapper.o"], calls["wrapper.so"], calls["archive"], calls["AOTInductor, all of it"]) == (
        1,
    ) * 4
    whole_s = times.seconds["AotCodeCompiler.compile, all of it"]
    own_s = sum(took_s for step, took_s in times.seconds.items() if step.startswith("torch itself"))
    processes_s = sum(
        took_s for step, took_s in times.seconds.items() if ": " in step and "torch itself" not in step
    )
    assert 0 < own_s < whole_s <= own_s + processes_s


def test_given_all_parts_when_run_then_each_begins_in_one_phase_and_what_needs_ros_only_where_that_is(
    bench,
):
    phased = [name for phase in PHASES for name in phase.parts]
    assert sorted(phased) == sorted(PARTS)
    assert not set(ROS_ONLY) & set(usual())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_given_a_run_that_is_cut_off_when_it_ends_then_what_it_had_found_is_in_the_file_and_no_part_runs_on(
    tmp_path, number
):
    file = tmp_path / "it.json"
    command = [sys.executable, "-m", "benchmarks.cuda", "--device", "cpu", "--parts", "machine,contexts"]
    with subprocess.Popen(
        [*command, "--json", str(file)], cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as process:
        parts = {}
        while parts.get("contexts", {}).get("ended") != "runs" or parts["machine"]["ended"] != "done":
            assert process.poll() is None
            time.sleep(0.1)
            parts = (
                json.loads(file.read_text(encoding="utf-8"))["figures"]["parts"] if file.exists() else {}
            )
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
        printed = process.stdout.read()
    assert psutil.wait_procs(started, timeout=20)[1] == []
    found = json.loads(file.read_text(encoding="utf-8"))["figures"]
    assert found["machine"]["threads"] == 1
    if number == signal.SIGTERM:
        more = f"bench cuda --parts contexts --device cpu --within 250 --json {tmp_path / 'it-more.json'}"
        assert found["left"].endswith(more)
        assert (found["left"] in printed, process.returncode) == (True, 1)


def test_given_tests_of_which_some_still_run_when_cut_off_then_those_that_have_ended_are_known():
    lines = [
        "[gw1] linux Python 3.12",
        "[gw0] [ 50%] PASSED test/a.py::b ",
        "[gw1] [100%] FAILED test/c.py::d",
        "e.py",
    ]
    found = found_of_tests(lines)
    assert found.figures["ended"] == {"test/a.py::b": "PASSED", "test/c.py::d": "FAILED"}
    assert found.wrong == ["FAILED test/c.py::d"]
