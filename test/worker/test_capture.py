import gc
import gzip
import json
import os
import re
import tracemalloc
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import record_function

from torchperf_ros.engines.model_transforms import quantise_linear
from torchperf_ros.worker.capture import MemoryRecording, ProfileRecording

MIB = 1 << 20


class Computed:
    """An object that answers everything by computing something."""

    @property
    def __class__(self):
        raise RuntimeError("asked")


@pytest.mark.filterwarnings("error")
def test_given_a_process_that_keeps_things_when_recorded_then_the_report_says_what_where_and_how_much(
    tmp_path,
):
    gc.collect()  # what other tests have left behind does not go meanwhile
    strange = [Computed()]
    with FakeTensorMode():
        fakes = [torch.ones(300, 1003) for _ in range(20)]  # a compiler's: they hold no memory
    recording = MemoryRecording(torch.device("cpu"), os.getppid(), window_s=1000.0)
    recording.begin()
    assert not recording.full
    kept = [bytearray(MIB) for _ in range(3)]  # the line that grows
    tensors = [torch.ones(701, 1001) for _ in range(5)]
    views = [tensor[:1] for tensor in tensors]
    summary = recording.finish(tmp_path)
    assert not tracemalloc.is_tracing()
    report = (tmp_path / "memory.txt").read_text(encoding="utf-8")
    where = rf"{re.escape(__file__)}:\d+"
    assert re.match(
        rf"in \d+\.\d s: resident memory \+?-?[\d.]+ MiB, Python's allocations most at {where} \(\+3",
        summary,
    )
    assert re.search(rf"^{where}: size=3\d{{3}} KiB \(\+3\d{{3}} KiB\)", report, re.MULTILINE)
    assert re.search(r"^ +\d+\.\d{3} +5  \[701, 1001\] float32 cpu$", report, re.MULTILINE)
    sums = [float(size) for size in re.findall(r"([\d.]+) +\d+  \[(?:1|701), 1001\]", report)]
    assert sum(sums) == pytest.approx(
        5 * 701 * 1001 * 4 / MIB, abs=0.002
    )  # a view's bytes are counted once
    assert re.findall(r"([1-9][\d.]*) +\d+  \[300, 1003\] float32 cpu", report) == []
    assert f"This process, pid {os.getpid()}" in report
    assert f"The node, pid {os.getppid()}" in report
    assert re.search(r", pss [\d.]+, ", report)
    assert re.search(r"^( +[\d.]+){3}  \S*libtorch_cpu\.so$", report, re.MULTILINE)
    assert len(kept) == len(views) - 2
    assert (len(strange), len(fakes)) == (1, 20)


def int8_weight():
    layer = torch.nn.Sequential(torch.nn.Linear(320, 640))
    quantise_linear(layer, "int8_weight")
    return layer[0].weight


@pytest.mark.filterwarnings("ignore")  # torch calls some of these kinds a beta
@pytest.mark.parametrize(
    ("make", "line", "mib"),
    [
        (
            lambda: torch.sparse_coo_tensor(torch.arange(MIB)[None], torch.ones(MIB)),
            "[1048576] float32",
            12,
        ),
        (
            lambda: torch.sparse_csr_tensor(torch.tensor([0, MIB]), torch.arange(MIB), torch.ones(MIB)),
            "[1, 1048576] float32",
            12,
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(MIB), torch.ones(3)]), "nested 2 float32", 4),
        pytest.param(
            int8_weight,
            "[640, 320] int8",
            0.195,
            marks=pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed"),
        ),
    ],
    ids=["sparse", "rows", "nested", "int8"],
)
def test_given_a_tensor_of_another_kind_when_recorded_then_it_is_listed_with_its_bytes(
    make, line, mib, tmp_path
):
    gc.collect()
    kept = make()
    recording = MemoryRecording(torch.device("cpu"), os.getppid(), window_s=0.0)
    recording.begin()
    recording.finish(tmp_path)
    report = (tmp_path / "memory.txt").read_text(encoding="utf-8")
    assert re.search(rf"^ +[\d.]+ +\d+  {re.escape(line)} cpu$", report, re.MULTILINE)
    parts = re.findall(r"^ +([\d.]+) +\d+  .*(?:1048576|nested 2|640, 320).* cpu$", report, re.MULTILINE)
    assert sum(map(float, parts)) == pytest.approx(mib, rel=0.1)  # what it is made of may be listed as well
    del kept


@pytest.mark.gpu
def test_given_a_cuda_device_when_recorded_then_torchs_viewer_gets_its_snapshot(tmp_path):
    recording = MemoryRecording(torch.device("cuda"), os.getppid(), window_s=0.0)
    recording.begin()
    kept = torch.ones(MIB, device="cuda")
    recording.finish(tmp_path)
    assert (tmp_path / "cuda_memory.pickle").stat().st_size > 0
    assert " cuda:0" in (tmp_path / "memory.txt").read_text(encoding="utf-8")
    del kept


@pytest.fixture
def profiling():
    return ProfileRecording("seeing", torch.device("cpu"))


def frame(profiling, tier="full"):
    with record_function(f"seeing/{tier}"):
        with record_function("preprocess"):
            x = torch.ones(64, 64) + 1
        with record_function("inference"):
            y = x @ x
            torch.relu(y)
    profiling.frame_done()


def rows(text):
    """Cells of torch's table, by the name in the first one of each row."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) > 3}


def test_given_frames_when_recorded_then_the_warm_up_is_left_out_and_the_table_counts_what_was_run(
    profiling, tmp_path
):
    profiling.begin()
    for number in range(14):
        assert not profiling.full
        frame(profiling, "fast" if number == 13 else "full")
    assert profiling.full
    summary = profiling.finish(tmp_path)
    assert summary.startswith("10 frames of ")
    assert ", most of it in " in summary
    assert ", most in aten::" in summary
    table = rows((tmp_path / "profile.txt").read_text(encoding="utf-8"))
    calls = {
        "seeing/full": "9",
        "seeing/fast": "1",
        "preprocess": "10",
        "inference": "10",
        "aten::add": "10",
        "aten::mm": "10",
        "aten::relu": "10",
        "aten::matmul": "10",
    }
    assert {name: table[name][-1] for name in calls} == calls
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "seeing/full" for event in trace["traceEvents"]) == 9


def test_given_no_frame_when_recorded_then_the_report_says_so(profiling, tmp_path):
    profiling.begin()
    assert profiling.finish(tmp_path) == "no frame came while the profiler ran"
    assert "no frame came" in (tmp_path / "profile.txt").read_text(encoding="utf-8")


@pytest.mark.gpu
def test_given_a_cuda_device_when_recorded_then_kernels_and_copies_are_listed(tmp_path):
    recording = ProfileRecording("seeing", torch.device("cuda"))
    recording.begin()
    for _ in range(14):
        with record_function("seeing/full"), record_function("inference"):
            x = torch.ones(256, 256).to("cuda")
            (x @ x).cpu()
        recording.frame_done()
    recording.finish(tmp_path)
    table = (tmp_path / "profile.txt").read_text(encoding="utf-8")
    assert any("Memcpy HtoD" in name for name in rows(table))
    assert "Self CUDA time total" in table
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    kinds = Counter(event.get("cat") for event in trace["traceEvents"])
    # how the library calls its products depends on the card
    assert kinds["kernel"] >= 10
    assert kinds["gpu_memcpy"] >= 20
