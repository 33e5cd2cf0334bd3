"""`bench cuda` without ROS, a network or a GPU.

What it says, and that the end of one part does not end the others.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cuda

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
    status, found = bench("--device", "cpu", "--parts", "copies,streams", "--seconds", "0.01")
    assert status == 0, found
    assert found["copies"]["image 1920x1080 up"]["p50_ms"] > 0
    assert found["parts"]["copies"]["ended"] == "done"
    assert "streams" not in found["parts"]


def test_given_a_part_that_is_not_done_in_time_when_run_then_it_is_named_and_the_next_one_begins(bench):
    status, found = bench(
        "--device", "cpu", "--parts", "machine,copies", "--part-within", "0.1", "--jobs", "1"
    )
    assert status == 1
    ended = [found["parts"][name]["ended"].split(":")[0] for name in ("machine", "copies")]
    assert ended == ["killed", "killed"]
