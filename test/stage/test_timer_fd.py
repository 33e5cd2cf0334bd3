import os
import select
import threading
import time

import pytest

from torchperf_ros.stage.stage_waiter import TimerFd

PATIENCE_S = 20.0
LATER_NS = 3_600 * 1_000_000_000


@pytest.fixture
def timer():
    made = TimerFd()
    yield made
    made.close()


def readable(timer, timeout_s=0.0):
    return bool(select.select([timer.fileno()], [], [], timeout_s)[0])


def test_given_a_new_timer_when_waited_for_then_it_is_not_set(timer):
    assert not readable(timer)


def test_given_a_time_in_the_past_when_set_then_it_is_readable_at_once_until_cleared(timer):
    timer.set(1)
    assert readable(timer, PATIENCE_S)
    assert readable(timer)
    timer.clear()
    assert not readable(timer)


def test_given_a_time_ahead_when_set_then_it_becomes_readable_then_and_not_before(timer):
    at_ns = time.monotonic_ns() + 30_000_000
    timer.set(at_ns)
    assert readable(timer, PATIENCE_S)
    assert time.monotonic_ns() >= at_ns


def test_given_a_set_timer_when_disarmed_or_set_anew_then_only_the_last_setting_counts(timer):
    timer.set(time.monotonic_ns() + 1_000_000)
    timer.set(0)
    assert not readable(timer, 0.02)
    timer.set(time.monotonic_ns() + LATER_NS)
    timer.set(1)
    assert readable(timer, PATIENCE_S)
    timer.set(time.monotonic_ns() + LATER_NS)
    assert not readable(timer)


def test_given_a_timer_that_is_not_due_when_cleared_then_nothing_happens(timer):
    timer.clear()
    timer.set(time.monotonic_ns() + LATER_NS)
    timer.clear()
    assert not readable(timer)


def test_given_a_thread_that_waits_when_another_sets_the_timer_then_it_wakes(timer):
    woken = threading.Event()

    def wait():
        if readable(timer, PATIENCE_S):
            woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    timer.set(1)
    assert woken.wait(PATIENCE_S)
    thread.join()


def test_given_a_timer_when_closed_then_its_descriptor_is_gone_and_no_child_inherits_it():
    timer = TimerFd()
    descriptor = timer.fileno()
    assert not os.get_inheritable(descriptor)
    timer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(OSError, match="timerfd_settime"):
        timer.set(1)
