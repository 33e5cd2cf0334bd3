"""Scheduling and memory, each tried in a process of its own."""

import subprocess
import sys
import textwrap

import pytest


def run(code, *, as_nobody=False):
    """What a fresh interpreter prints; as a user without rights if asked for."""
    prologue = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n" if as_nobody else ""
    prologue = "from torchperf_ros.workers import process_setup as realtime\nimport gc, os, sys, threading\n" + prologue
    done = subprocess.run(
        [sys.executable, "-c", prologue + textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_given_priority_0_when_set_up_then_the_scheduler_is_left_alone():
    assert run("print(realtime.prefer_this_process(0)); print(os.sched_getscheduler(0) == os.SCHED_OTHER)") == [
        "normal", "True",
    ]  # fmt: skip


def test_given_a_priority_when_permitted_then_every_thread_has_it_and_one_can_step_back():
    found = run("""
        go, stop = threading.Event(), threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        print(realtime.prefer_this_process(7))
        print({os.sched_getparam(int(t)).sched_priority for t in os.listdir("/proc/self/task")})
        realtime.step_back()
        print(os.sched_getparam(0).sched_priority)
        stop.set()
    """)
    if found[0] != "fifo 7":
        pytest.skip(f"SCHED_FIFO is not permitted here: {found[0]}")
    assert found == ["fifo 7", "{7}", "1"]


def test_given_a_user_without_rights_when_set_up_then_it_goes_on_and_says_what_to_do():
    try:
        found = run("print(realtime.prefer_this_process(7))", as_nobody=True)
    except AssertionError as error:
        pytest.skip(f"cannot become another user here: {str(error)[-80:]}")
    assert found == ["normal: SCHED_FIFO and nice are not permitted; give the user an rtprio limit, or CAP_SYS_NICE"]


def test_given_a_thread_that_is_not_real_time_when_it_steps_back_then_nothing_changes():
    assert run("realtime.step_back(); print(os.sched_getscheduler(0) == os.SCHED_OTHER)") == ["True"]


def test_given_a_process_when_it_stops_collecting_then_only_what_it_asks_for_is_collected():
    assert run("""
        class Loop:
            def __init__(self): self.me = self
            def __del__(self): print("collected")
        realtime.stop_collecting()
        print(gc.isenabled())
        for _ in range(5000): [[]]
        Loop()
        print("asking")
        gc.collect()
    """) == ["False", "asking", "collected"]


def test_given_a_second_configure_when_it_stops_collecting_then_what_the_first_one_made_is_collected():
    assert run("""
        import weakref
        class Stage:
            def __init__(self): self.me = self
        stage = Stage()
        gone = weakref.ref(stage)
        realtime.stop_collecting()
        stage = Stage()
        gc.collect()
        print(gone() is None)
        realtime.stop_collecting()
        print(gone() is None, gc.isenabled(), gc.get_freeze_count() > 0)
    """) == ["False", "True False True"]


def test_given_a_cpu_that_is_not_there_when_pinned_then_it_is_an_os_error():
    assert run("""
        try: realtime.pin_this_process((4095,))
        except OSError as error: print("refused")
        cpu = min(os.sched_getaffinity(0))
        realtime.pin_this_process((cpu,))
        print(os.sched_getaffinity(0) == {cpu})
    """) == ["refused", "True"]


def test_given_a_lock_on_memory_when_asked_for_then_it_says_what_it_came_to():
    (said,) = run("print(realtime.lock_memory())")
    assert said == "locked" or said.startswith("not locked: ")
