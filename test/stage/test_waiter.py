import os
import select
import socket
import threading
import time

import pytest

from torchperf_ros.stage.waiter import StageWaiter

PATIENCE_S = 100.0
LATER_NS = 3_600 * 1_000_000_000


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


@pytest.mark.parametrize("speak", [lambda far_end: far_end.send(b"done"), lambda far_end: far_end.close()])
def test_given_a_worker_that_speaks_or_is_gone_when_waited_then_it_is_named(waiter, worker, speak):
    waiter.add(worker)
    speak(worker.far_end)
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
    assert returned.wait(PATIENCE_S)
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


def is_due(waiter, timeout_s=0.0):
    return bool(select.select([waiter.timer], [], [], timeout_s)[0])


def test_given_a_time_ahead_when_set_then_it_wakes_then_and_not_before(waiter):
    assert not is_due(waiter)
    at_ns = time.monotonic_ns() + 30_000_000
    waiter.set(at_ns)
    (descriptor,) = waiter.wait()
    assert time.monotonic_ns() >= at_ns
    assert waiter.worker(descriptor) is None
    assert not is_due(waiter)  # it is cleared
    assert waiter.worker(descriptor) is None  # and not due when it is cleared again


def test_given_a_set_timer_when_disarmed_or_set_anew_then_only_the_last_setting_counts(waiter):
    waiter.set(time.monotonic_ns() + 1_000_000)
    waiter.set(0)
    assert not is_due(waiter, 0.02)
    waiter.set(time.monotonic_ns() + LATER_NS)
    waiter.set(1)
    assert is_due(waiter, PATIENCE_S)
    waiter.set(time.monotonic_ns() + LATER_NS)
    assert not is_due(waiter)


def test_given_a_waiter_when_closed_then_its_descriptors_are_gone_and_no_child_inherits_its_timer():
    before = set(os.listdir("/proc/self/fd"))
    waiter = StageWaiter()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2
    assert not os.get_inheritable(waiter.timer)
    waiter.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(OSError, match="timerfd_settime"):
        waiter.set(1)


def test_given_a_waiter_that_is_closed_when_it_is_still_set_then_the_timer_of_another_one_is_not():
    closed = StageWaiter()
    closed.close()
    other = StageWaiter()  # it gets the descriptors that are free now
    try:
        for call in (closed.wake, lambda: closed.set(1)):
            with pytest.raises(OSError, match="Bad file descriptor"):
                call()
        done = threading.Event()
        threading.Thread(target=lambda: (other.wait(), done.set()), daemon=True).start()
        assert not done.wait(0.2)
        other.wake()
        assert done.wait(PATIENCE_S)
    finally:
        other.close()
