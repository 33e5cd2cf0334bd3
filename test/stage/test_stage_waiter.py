import os
import socket
import threading

import pytest

from torchperf_ros.stage.stage_waiter import StageWaiter


class Talking:
    """What the waiter knows of a worker: a socket on which it speaks."""

    def __init__(self):
        self.frames, self.far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.fixture
def waiter():
    made = StageWaiter()
    yield made
    made.close()


@pytest.fixture
def worker():
    made = Talking()
    yield made
    made.frames.close()
    made.far_end.close()


def test_given_a_worker_that_speaks_when_waited_then_it_is_named(waiter, worker):
    waiter.add(worker)
    worker.far_end.send(b"done")
    (descriptor,) = waiter.wait()
    assert waiter.worker(descriptor) is worker


def test_given_a_worker_that_is_gone_when_waited_then_it_is_named_too(waiter, worker):
    waiter.add(worker)
    worker.far_end.close()
    (descriptor,) = waiter.wait()
    assert waiter.worker(descriptor) is worker


def test_given_a_wake_up_when_waited_then_it_is_nobodys_and_does_not_repeat(waiter, worker):
    waiter.add(worker)
    waiter.wake()
    (descriptor,) = waiter.wait()
    assert waiter.worker(descriptor) is None
    worker.far_end.send(b"done")
    assert [waiter.worker(descriptor) for descriptor in waiter.wait()] == [worker]


def test_given_a_thread_that_waits_when_another_wakes_it_then_it_returns(waiter):
    returned = threading.Event()

    def wait():
        waiter.wait()
        returned.set()

    thread = threading.Thread(target=wait)
    thread.start()
    waiter.wake()
    assert returned.wait(20.0)
    thread.join()


def test_given_a_dropped_worker_when_it_speaks_then_nobody_hears_and_a_second_drop_says_so(waiter, worker):
    waiter.add(worker)
    worker.far_end.send(b"done")
    (descriptor,) = waiter.wait()
    assert waiter.drop(worker) is True
    assert waiter.worker(descriptor) is None
    assert waiter.drop(worker) is False
    waiter.set(1)
    assert [waiter.worker(found) for found in waiter.wait()] == [None]


def test_given_a_worker_that_was_never_added_or_is_closed_when_dropped_then_nothing_happens(waiter, worker):
    assert waiter.drop(worker) is False
    worker.frames.close()
    assert waiter.drop(worker) is False


def test_given_a_waiter_when_closed_then_its_descriptors_are_gone():
    before = set(os.listdir("/proc/self/fd"))
    waiter = StageWaiter()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2
    waiter.close()
    assert set(os.listdir("/proc/self/fd")) <= before
