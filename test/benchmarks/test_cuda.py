"""`bench cuda` without ROS, a network or a GPU: what it says, and that the end of one part does not end the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(tmp_path):
    """Runs it where importing rclpy fails; gives what it said and its status."""
    (tmp_path / "rclpy.py").write_text("raise ImportError('there is no ROS here')\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])

    def run(*arguments):
        command = [sys.executable, "-m", "benchmarks.cuda", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_given_no_cuda_when_run_then_one_line_says_so_and_the_status_is_its_own(bench):
    done = bench()
    assert done.returncode == 3
    assert done.stdout.count("\n") == 1
    assert "sees no CUDA device; --device cpu tries what a CPU can run" in done.stdout


def test_given_the_cpu_when_tried_then_the_figures_are_written(bench, tmp_path):
    done = bench(
        "--device", "cpu", "--parts", "copies,streams", "--seconds", "0.01", "--json", str(tmp_path / "it.json")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "it.json").read_text(encoding="utf-8"))["figures"]
    assert found["copies"]["image 1920x1080 up"]["p50_ms"] > 0
    assert found["parts"]["copies"]["ended"] == "done"
    assert "streams" not in found["parts"]


def test_given_a_part_that_is_not_done_in_time_when_run_then_it_is_named_and_the_next_one_begins(bench, tmp_path):
    arguments = (
        "--parts",
        "machine,copies",
        "--part-within",
        "0.1",
        "--jobs",
        "1",
        "--json",
        str(tmp_path / "it.json"),
    )
    done = bench("--device", "cpu", *arguments)
    assert done.returncode == 1, done.stderr
    parts = json.loads((tmp_path / "it.json").read_text(encoding="utf-8"))["figures"]["parts"]
    assert [parts[name]["ended"].split(":")[0] for name in ("machine", "copies")] == ["killed", "killed"]
