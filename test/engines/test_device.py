import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.engines.device import Device, DeviceLost, choose_device


@pytest.fixture
def cuda():
    yield Device(torch.device("cuda", 0), threads=1)
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_given_auto_when_chosen_then_it_is_cuda_just_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto") == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2), ("cuda:300", 64), ("foo", 0), ("mps", 1)],
)
def test_given_a_cuda_device_that_is_not_there_then_the_error_says_how_many_there_are(
    monkeypatch, wanted, count
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(
        ConfigError, match=f"parameter device: '{wanted}' is not there; .* sees {count} CUDA devices"
    ):
        choose_device(wanted)


def test_given_a_gpu_that_is_gone_when_the_next_worker_chooses_then_it_neither_takes_the_cpu_nor_gives_up(
    monkeypatch,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceLost, match="device cuda:0, which the worker before had, is not there"):
        choose_device("auto", before="cuda:0")


def test_given_errors_when_asked_then_those_that_the_allocator_counted_are_for_want_of_memory(monkeypatch):
    device, refused = Device(torch.device("cpu"), threads=1), iter([1, 1, 2])
    device.is_cuda = True
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_ooms": next(refused)})
    errors = [
        RuntimeError("run_func_(...) API call failed"),
        RuntimeError("shapes"),
        torch.OutOfMemoryError("no"),
    ]
    assert [device.is_out_of_memory(error) for error in errors] == [True, False, True]


def test_given_the_cpu_when_used_then_nothing_is_copied_and_time_is_the_clocks():
    device = Device(torch.device("cpu"), threads=1)
    inputs = (torch.zeros(2),)
    assert device.to_device(inputs) is inputs
    with device.timed as timed:
        time.sleep(0.002)
    assert timed.took_ns >= 2_000_000
    assert timed.waited_ns == 0
    took_ns = []
    for _ in range(20):  # another process may have the processor in between
        with device.timed as again:
            pass
        took_ns.append(again.took_ns)
    assert 0 <= min(took_ns) < 2_000_000
    assert device.memory_bytes() == {}
    assert not device.is_cuda
    assert not device.is_lost(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize(("cores", "threads"), [(8, 7), (2, 1), (1, 1)])
def test_given_no_number_of_threads_when_made_then_one_core_is_left_to_the_node(
    monkeypatch, cores, threads
):
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    Device(torch.device("cpu"), 0)
    assert chosen == [threads]


@pytest.mark.parametrize("spare", [0, 1])
def test_given_a_thread_for_each_cpu_when_parted_then_no_other_shares_the_leading_ones_cpu_wherever_it_goes(
    spare,
):
    """In a process of its own, whose OpenMP threads nobody has made yet."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 + spare:
        pytest.skip("needs a CPU for each of two threads, and one to spare for the other case")
    code = f"""
        import os, threading, torch
        from torchperf_ros.engines.device import Device
        cpus = {cpus[: 2 + spare]}
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(2)  # which makes a thread of another pool
        before = set(os.listdir("/proc/self/task"))
        device = Device(torch.device("cpu"), threads=2)
        torch.ones(1 << 20).add_(1)
        (other,) = set(os.listdir("/proc/self/task")) - before
        for cpu in [*cpus[:2], cpus[1], cpus[0]]:
            os.sched_setaffinity(threading.get_native_id(), {{cpu}})
            device.part_threads()
            print(cpu, *sorted(os.sched_getaffinity(int(other))))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    first, second = cpus[:2]
    parted = [f"{first} {second}", f"{second} {first}", f"{second} {first}", f"{first} {second}"]
    free = [f"{cpu} {' '.join(map(str, cpus[:3]))}" for cpu in (first, second, second, first)]
    assert done.stdout.splitlines() == (free if spare else parted), done.stderr


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_given_cuda_when_taken_then_all_that_follows_goes_to_the_workers_own_stream():
    assert torch.cuda.current_stream() != torch.cuda.default_stream()
    assert torch.cuda.current_stream().priority == -1


@pytest.mark.gpu
def test_given_streams_of_two_priorities_when_both_have_work_then_the_urgent_ones_is_done_first(cuda):
    least, most = torch.cuda.Stream.priority_range()
    priorities = []
    for asked in (-1, 0, -100):
        Device(torch.device("cuda", 0), threads=1, stream_priority=asked)
        priorities.append(torch.cuda.current_stream().priority)
    assert priorities == [-1, least, most]
    urgent, patient = torch.cuda.current_stream(), torch.cuda.Stream(priority=least)
    big, small = torch.randn(8192, 8192, device="cuda"), torch.randn(64, 64, device="cuda")
    big @ big, small @ small  # the first product loads cuBLAS
    torch.cuda.synchronize()
    with torch.cuda.stream(patient):
        for _ in range(30):
            last = big @ big
    found = small @ small
    urgent.synchronize()
    assert not patient.query()
    patient.synchronize()
    assert torch.isfinite(last).all()
    torch.testing.assert_close(found.cpu(), small.cpu() @ small.cpu(), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_given_kernels_when_timed_then_the_time_is_theirs_and_not_that_of_launching_them(cuda):
    a = torch.randn(4096, 4096, device="cuda")
    a @ a  # the first product loads cuBLAS
    torch.cuda.synchronize()
    times_ns = []
    for repeats in (1, 50):
        with cuda.timed as timed:
            for _ in range(repeats):
                a @ a
        times_ns.append(timed.took_ns)
    assert times_ns[1] > 5 * times_ns[0] > 0


@pytest.mark.gpu
def test_given_what_follows_the_model_when_stopped_before_it_then_it_is_waited_for_and_not_timed(cuda):
    a = torch.randn(4096, 4096, device="cuda")
    a @ a
    torch.cuda.synchronize()
    with cuda.timed as timed:
        a @ a
        timed.stop()
        for _ in range(50):
            last = a @ a
    assert torch.cuda.current_stream().query()
    assert timed.waited_ns > 5 * timed.took_ns > 0
    assert torch.isfinite(last).all()


@pytest.mark.gpu
def test_given_a_tensor_when_allocated_then_the_memory_shows_it(cuda):
    before = cuda.memory_bytes()
    kept = torch.ones(1 << 24, device="cuda")
    after = cuda.memory_bytes()
    assert after["allocated"] - before["allocated"] >= kept.numel() * 4
    assert after["reserved"] >= after["allocated"]
    assert after["peak"] >= after["allocated"]
    assert {"inactive_split", "retries", "ooms"} <= after.keys()
    assert 0 < after["free"] < torch.cuda.get_device_properties(0).total_memory


@pytest.mark.gpu
def test_given_errors_that_a_process_survives_when_asked_then_the_device_is_not_lost(cuda):
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    for error in (ValueError("no"), RuntimeError("shapes do not match"), caught.value):
        assert not cuda.is_lost(error)
    assert torch.ones(1, device="cuda").item() == 1.0


@pytest.mark.gpu
def test_given_a_device_side_assert_when_asked_then_the_device_is_lost():
    """In a process of its own: nothing on the device works afterwards."""
    code = """
        import torch
        from torchperf_ros.engines.device import Device
        device = Device(torch.device("cuda", 0), 1)
        try:
            with device.timed:
                torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")]
        except RuntimeError as error:
            print("lost" if device.is_lost(error) else "not lost")
        else:
            print("no error")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "lost"


@pytest.mark.gpu
def test_given_pageable_inputs_when_sent_in_a_row_then_none_overwrites_the_one_before(cuda):
    sent = [cuda.to_device((torch.full((1 << 20,), float(n)),))[0] for n in range(20)]
    assert [float(tensor.mean()) for tensor in sent] == [float(n) for n in range(20)]


@pytest.mark.gpu
def test_given_channels_last_inputs_when_sent_then_they_stay_so_and_those_there_are_not_copied(cuda):
    image = torch.randn(1, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    there = torch.ones(2, device="cuda")
    moved, same, pinned = cuda.to_device((image, there, torch.arange(5).pin_memory()))
    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert same is there
    assert torch.equal(moved.cpu(), image)
    assert pinned.tolist() == [0, 1, 2, 3, 4]
