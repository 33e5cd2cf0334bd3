import gc
import os
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchperf_ros.worker.memory_recording import MemoryRecording

MIB = 1 << 20


@pytest.fixture
def recording():
    return MemoryRecording(torch.device("cpu"), window_s=0.0)


def test_given_a_process_that_keeps_things_when_recorded_then_the_report_says_what_where_and_how_much(
    recording, tmp_path
):
    gc.collect()  # what other tests have left behind does not go meanwhile
    recording.begin()
    kept = [bytearray(MIB) for _ in range(3)]  # the line that grows
    tensors = [torch.ones(701, 1001) for _ in range(5)]
    views = [tensor[:1] for tensor in tensors]
    assert recording.full
    summary = recording.finish(tmp_path)
    report = (tmp_path / "memory.md").read_text(encoding="utf-8")
    where = rf"{re.escape(__file__)}:\d+"
    assert re.match(
        rf"in 0\.\d s: resident memory \+?-?[\d.]+ MiB, Python's allocations most at {where} \(\+3", summary
    )
    assert re.search(rf"\| {where} \| 3\.\d+ \| \+\d+ \|", report)
    assert re.search(r"\| \[701, 1001\] \| float32 \| cpu \| 5 \| \d+\.\d{3} \|", report)
    sums = [float(size) for size in re.findall(r"\| \[(?:1|701), 1001\] .*\| ([\d.]+) \|", report)]
    assert sum(sums) == pytest.approx(5 * 701 * 1001 * 4 / MIB, abs=0.002)  # a view's bytes are counted once
    assert re.search(r"\| torch\.Tensor \| \d+ \| \+10 \|", report)
    assert f"This process, pid {os.getpid()}" in report
    assert f"The node, pid {os.getppid()}" in report
    assert re.search(r"\| pss \| [\d.]+ \|", report)
    assert re.search(r"\| \S*libtorch_cpu\.so \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", report)
    assert len(kept) == len(views) - 2


def test_given_a_window_that_is_not_over_when_asked_then_it_is_not_full_and_tracing_ends_with_it(tmp_path):
    import tracemalloc

    recording = MemoryRecording(torch.device("cpu"), window_s=1000.0)
    recording.begin()
    assert tracemalloc.is_tracing()
    assert not recording.full
    recording.finish(tmp_path)
    assert not tracemalloc.is_tracing()


class Computed:
    """An object that answers everything by computing something."""

    @property
    def __class__(self):
        raise RuntimeError("asked")


def test_given_an_object_that_answers_by_raising_when_recorded_then_it_is_passed_by(recording, tmp_path):
    strange = [Computed()]
    gc.collect()
    recording.begin()
    assert recording.finish(tmp_path)
    del strange


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_given_a_cuda_device_when_recorded_then_torchs_viewer_gets_its_snapshot(tmp_path):
    recording = MemoryRecording(torch.device("cuda"), window_s=0.0)
    recording.begin()
    kept = torch.ones(MIB, device="cuda")
    recording.finish(tmp_path)
    assert (tmp_path / "cuda_memory.pickle").stat().st_size > 0
    assert "| cuda:0 |" in (tmp_path / "memory.md").read_text(encoding="utf-8")
    del kept


@pytest.mark.filterwarnings("error")
def test_given_a_compilers_fake_tensors_when_recorded_then_they_are_passed_by(recording, tmp_path):
    with FakeTensorMode():
        fakes = [torch.ones(300, 1003) for _ in range(20)]
    kept = torch.ones(301, 1003)
    recording.begin()
    recording.finish(tmp_path)
    report = (tmp_path / "memory.md").read_text(encoding="utf-8")
    assert re.search(r"\| \[301, 1003\] \| float32 \| cpu \| 1 \| 1\.15\d \|", report)
    assert not re.search(r"\| \[300, 1003\] \| float32 \| cpu \| \d+ \| [1-9]", report)
    assert fakes[0].shape != kept.shape
