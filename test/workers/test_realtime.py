"""Scheduling and memory, each tried in a process of its own."""

import subprocess
import sys
import textwrap

import pytest


def run(code, *, as_nobody=False):
    """What a fresh interpreter prints; as a user without rights if asked for."""
    prologue = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n" if as_nobody else ""
    prologue = (
        "from torchperf_ros.workers import process_setup as realtime\nimport gc, os, sys, threading\n"
        + prologue
    )
    done = subprocess.run(
        [sys.executable, "-c", prologue + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


THREADS = """
    go, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    print(realtime.prefer_this_process(7))
    print({os.sched_getparam(int(t)).sched_priority for t in os.listdir("/proc/self/task")})
    realtime.step_back()
    print(os.sched_getparam(0).sched_priority)
    stop.set()
"""
FIRST = """
    print(realtime.prefer_this_thread())
    print(realtime.prefer_this_process(7))
    print(realtime.prefer_this_thread())
    set_scheduler = os.sched_setscheduler
    def limited(thread, policy, parameter):
        if parameter.sched_priority > 20:
            raise PermissionError
        set_scheduler(thread, policy, parameter)
    os.sched_setscheduler, realtime.resource.getrlimit = limited, lambda _: (20, 20)
    print(realtime.prefer_this_thread())
"""


@pytest.mark.parametrize(
    ("code", "at", "expected"),
    [(THREADS, 0, ["fifo 7", "{7}", "1"]), (FIRST, 1, ["normal", "fifo 7", "fifo 98", "fifo 20"])],
    ids=["every thread has it, and one can step back", "one comes first, by the highest that is permitted"],
)
def test_given_a_priority_when_permitted_then_threads_have_the_one_that_they_are_to_have(
    code, at, expected
):
    found = run(code)
    if found[at] != "fifo 7":
        pytest.skip(f"SCHED_FIFO is not permitted here: {found[at]}")
    assert found == expected


def test_given_a_user_without_rights_when_set_up_then_it_goes_on_and_says_what_to_do():
    try:
        found = run("print(realtime.prefer_this_process(7))", as_nobody=True)
    except AssertionError as error:
        pytest.skip(f"cannot become another user here: {str(error)[-80:]}")
    assert found == [
        "normal: SCHED_FIFO and nice are not permitted; give the user an rtprio limit, or CAP_SYS_NICE"
    ]


def test_given_a_process_when_it_stops_collecting_then_only_what_it_asks_for_is_collected_the_last_configures_too():
    assert run("""
        import weakref
        class Loop:
            def __init__(self): self.me = self
            def __del__(self): print("collected")
        stage = Loop()
        gone = weakref.ref(stage)
        realtime.stop_collecting()
        stage = None
        for _ in range(5000): [[]]
        gc.collect()
        print(gc.isenabled(), gone() is None)
        realtime.stop_collecting()
        print(gone() is None, gc.isenabled(), gc.get_freeze_count() > 0)
        Loop()
        print("asking")
        gc.collect()
    """) == ["False False", "collected", "True False True", "asking", "collected"]


def test_given_no_priority_when_set_up_then_the_scheduler_is_left_alone_and_the_rest_says_what_it_came_to():
    *found, memory = run("""
        print(realtime.prefer_this_process(0))
        realtime.step_back()
        print(os.sched_getscheduler(0) == os.SCHED_OTHER)
        try: realtime.pin_this_process((4095,))
        except OSError as error: print("refused")
        cpu = min(os.sched_getaffinity(0))
        realtime.pin_this_process((cpu,))
        print(os.sched_getaffinity(0) == {cpu})
        print(realtime.lock_memory())
    """)
    assert found == ["normal", "True", "refused", "True"]
    assert memory == "locked" or memory.startswith("not locked: ")
