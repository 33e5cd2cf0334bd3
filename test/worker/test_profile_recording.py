import gzip
import json

import pytest
import torch
from torch.profiler import record_function

from torchperf_ros.worker.profile_recording import ProfileRecording


@pytest.fixture
def recording():
    return ProfileRecording("seeing", torch.device("cpu"))


def frame(recording, tier="full"):
    with record_function(f"seeing/{tier}"):
        with record_function("preprocess"):
            x = torch.ones(64, 64) + 1
        with record_function("inference"):
            y = x @ x
            torch.relu(y)
    recording.frame_done()


def rows(text, title):
    """Cells of a table, by the first one of each row."""
    section = text.split(f"## {title}")[1].split("##")[0].splitlines()
    lines = [line for line in section if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_given_frames_when_recorded_then_the_warm_up_is_left_out_and_the_tables_count_what_was_run(recording, tmp_path):
    recording.begin()
    for number in range(14):
        assert not recording.full
        frame(recording, "fast" if number == 13 else "full")
    assert recording.full
    summary = recording.finish(tmp_path)
    assert summary.startswith("10 frames of ")
    text = (tmp_path / "profile.md").read_text(encoding="utf-8")
    steps = rows(text, "Frames and steps")
    assert {name: cells[0] for name, cells in steps.items()} == {
        "seeing/full": "9", "seeing/fast": "1", "preprocess": "10", "inference": "10",
    }  # fmt: skip
    operators = rows(text, "Operators")
    assert {operators[name][0] for name in ("aten::add", "aten::mm", "aten::relu", "aten::matmul")} == {"10"}
    assert float(operators["aten::matmul"][1]) <= float(operators["aten::matmul"][2])  # its own, and with callees
    assert float(steps["inference"][1]) <= float(steps["inference"][2])  # mean and most
    gaps = rows(text, "Gaps")
    assert gaps
    assert set(gaps) <= {"(begin of the frame)", "aten::ones", "aten::add", "aten::matmul", "aten::relu"}
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "seeing/full" for event in trace["traceEvents"]) == 9


def test_given_no_frame_when_recorded_then_the_report_says_so(recording, tmp_path):
    recording.begin()
    assert recording.finish(tmp_path) == "no frame came while the profiler ran"
    assert "no frame came" in (tmp_path / "profile.md").read_text(encoding="utf-8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_given_a_cuda_device_when_recorded_then_kernels_and_copies_are_listed(tmp_path):
    recording = ProfileRecording("seeing", torch.device("cuda"))
    recording.begin()
    for _ in range(14):
        with record_function("seeing/full"), record_function("inference"):
            x = torch.ones(256, 256).to("cuda")
            (x @ x).cpu()
        recording.frame_done()
    recording.finish(tmp_path)
    kernels = rows((tmp_path / "profile.md").read_text(encoding="utf-8"), "Kernels and copies")
    assert any("Memcpy HtoD" in name for name in kernels)
    assert any("gemm" in name.lower() for name in kernels)
