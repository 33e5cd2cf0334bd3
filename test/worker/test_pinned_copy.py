import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.worker.device import Device
from torchperf_ros.worker.pinned_copy import PinnedBuffers, PinnedCopy

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available")
PAGE_BYTES = 4096


class Event:
    """Counts how often it was waited for."""

    def __init__(self):
        self.waits = 0

    def record(self, stream):
        pass

    def synchronize(self):
        self.waits += 1


def buffers(most_bytes=1 << 20):
    return PinnedBuffers(most_bytes, allocate=torch.empty_like, event=Event)


def test_given_the_same_shape_when_taken_again_then_it_is_the_same_memory_after_its_copy_was_waited_for():
    kept = buffers()
    first = kept.take(0, torch.zeros(3, 4))
    assert first.copied.waits == 0
    again = kept.take(0, torch.ones(3, 4))
    assert again is first
    assert first.copied.waits == 1


def test_given_inference_mode_when_memory_is_made_then_it_can_be_written_to_outside_of_it():
    kept = buffers()
    with torch.inference_mode():
        made = kept.take(0, torch.zeros(3))
    made.tensor.copy_(torch.ones(3))


@pytest.mark.parametrize(
    ("place", "other"),
    [
        (1, torch.zeros(3, 4)),
        (0, torch.zeros(4, 3)),
        (0, torch.zeros(3, 4, dtype=torch.int32)),
        (0, torch.zeros(4, 3).t()),
    ],
    ids=["place", "shape", "type", "layout"],
)
def test_given_another_tensor_when_taken_then_it_is_memory_of_its_own(place, other):
    kept = buffers()
    first, second = kept.take(0, torch.zeros(3, 4)), kept.take(place, other)
    assert first.tensor.data_ptr() != second.tensor.data_ptr()
    assert (second.tensor.dtype, second.tensor.shape, second.tensor.stride()) == (
        other.dtype,
        other.shape,
        other.stride(),
    )


def test_given_a_tensor_beyond_the_bound_when_taken_then_there_is_none_and_the_others_stay():
    kept = buffers(2 * PAGE_BYTES)
    small = kept.take(0, torch.zeros(4))
    assert kept.take(0, torch.zeros(2 * PAGE_BYTES)) is None
    assert kept.take(0, torch.zeros(4)) is small


def test_given_no_room_when_taken_then_the_one_used_longest_ago_goes():
    kept = buffers(2 * PAGE_BYTES)
    first, second = kept.take(0, torch.zeros(1)), kept.take(1, torch.zeros(1))
    assert kept.take(0, torch.zeros(1)) is first
    kept.take(2, torch.zeros(1))
    assert kept.take(0, torch.zeros(1)) is first
    assert kept.take(1, torch.zeros(1)) is not second


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3000)), max_size=60))
def test_given_any_shapes_when_taken_then_the_memory_stays_within_the_bound(wanted):
    kept = buffers(4 * PAGE_BYTES)
    for place, size in wanted:
        found = kept.take(place, torch.zeros(size))
        assert found is None or found.tensor.shape == (size,)
        assert sum(max(b.tensor.nbytes, PAGE_BYTES) for b in kept._kept.values()) == kept.bytes <= 4 * PAGE_BYTES


@pytest.fixture
def stream():
    return torch.cuda.Stream(priority=-1)


@pytest.fixture
def copies(stream):
    return PinnedCopy(torch.device("cuda", 0), stream)


@pytest.mark.gpu
@needs_cuda
def test_given_pageable_inputs_when_sent_in_a_row_then_none_overwrites_the_one_before(copies, stream):
    with torch.cuda.stream(stream):
        sent = [copies.to_device((torch.full((1 << 20,), float(n)),))[0] for n in range(20)]
        assert [float(tensor.mean()) for tensor in sent] == [float(n) for n in range(20)]


@pytest.mark.gpu
@needs_cuda
def test_given_another_stream_when_inputs_are_sent_from_it_then_its_work_sees_them_complete(copies):
    for n in range(20):
        (there,) = copies.to_device((torch.full((1 << 22,), float(n)),))
        assert float(there.mean()) == n


@pytest.mark.gpu
@needs_cuda
def test_given_channels_last_inputs_when_sent_then_they_stay_so_and_those_there_are_not_copied(copies):
    image = torch.randn(1, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    there = torch.ones(2, device="cuda")
    moved, same, pinned = copies.to_device((image, there, torch.arange(5).pin_memory()))
    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert same is there
    assert torch.equal(moved.cpu(), image)
    assert pinned.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.gpu
@needs_cuda
def test_given_outputs_when_fetched_then_they_are_complete_in_pinned_memory_that_is_used_again(copies):
    for n in range(20):
        outputs = {
            "a": torch.full((1 << 20,), float(n), device="cuda"),
            "b": [torch.ones(3, device="cuda") * n, "text"],
        }
        found = copies.to_host(outputs)
        assert found["a"].is_pinned()
        assert float(found["a"].mean()) == n
        assert found["b"][0].tolist() == [n] * 3
        assert found["b"][1] == "text"
    assert copies.to_host(outputs)["a"].data_ptr() == found["a"].data_ptr()


@pytest.mark.gpu
@needs_cuda
def test_given_a_busy_stream_when_inputs_are_sent_then_the_caller_does_not_wait_for_it():
    device = Device(torch.device("cuda", 0), threads=1)
    a = torch.randn(4096, 4096, device="cuda")
    device.to_device((torch.ones(8),))  # the buffer is there
    torch.cuda.synchronize()
    with device.on_stream():
        for _ in range(50):
            a @ a
        busy = torch.cuda.Event()
        busy.record()
        device.to_device((torch.ones(8),))
        assert not busy.query()
    torch.cuda.synchronize()
