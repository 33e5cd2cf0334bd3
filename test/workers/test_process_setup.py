"""Freed memory, scheduling, each case in a process of its own; and Ctrl-C while something is half done."""

import signal
import textwrap
import threading

import pytest

from torchperf_ros.workers.process_setup import held_interrupt


@pytest.mark.parametrize(("times", "reached"), [(1, ["block"]), (2, [])])  # a second one does not wait
def test_given_ctrl_c_in_the_block_when_held_then_it_comes_at_its_end_and_later_ones_at_once(
    times, reached
):
    done = []

    def block():
        with held_interrupt():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.append("block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == reached
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_given_another_answer_to_ctrl_c_or_another_thread_when_held_then_nothing_is_changed():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("own"))
    try:
        with held_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert seen == ["own"]
    finally:
        signal.signal(signal.SIGINT, before)

    def in_a_thread():
        with held_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert seen == ["own", before]


@pytest.fixture
def run(python):
    """The lines that a fresh interpreter prints; as a user without rights if asked for."""
    prologue = "import gc, os, sys, threading\nfrom torchperf_ros.workers import process_setup\n"
    nobody = "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"

    def run(code, *, as_nobody=False):
        return python(prologue + nobody * as_nobody + textwrap.dedent(code)).splitlines()

    return run


def test_given_large_blocks_when_freed_memory_is_kept_then_taking_them_again_costs_no_page_faults(run):
    faults = [
        int(
            run(f"""
        import resource
        if {keep}: process_setup.keep_freed_memory(4_000_000)
        bytearray(3_000_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20): bytearray(b"x" * 3_000_000)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        """)[0]
        )
        for keep in (False, True)
    ]
    assert faults[1] < faults[0] / 4


def test_given_freed_memory_when_it_is_kept_then_it_can_be_seen_and_has_a_bound(run):
    kept_mib = run("""
        process_setup.keep_freed_memory(process_setup.LARGEST_KEPT_BYTES, 64 << 20)
        for count in (2, 6):  # of 20 MiB each: what lies below the bound is kept, what exceeds it goes back
            blocks = [bytearray(20 << 20) for _ in range(count)]
            blocks.clear()
            print(process_setup.kept_bytes() >> 20)
    """)
    assert 40 <= int(kept_mib[0]) < 64
    assert int(kept_mib[1]) < 64


# -- scheduling


THREADS = """
    go, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    print(process_setup.prefer_this_process(7))
    print({os.sched_getparam(int(t)).sched_priority for t in os.listdir("/proc/self/task")})
    process_setup.step_back()
    print(os.sched_getparam(0).sched_priority)
    stop.set()
"""
FIRST = """
    print(process_setup.prefer_this_thread())
    print(process_setup.prefer_this_process(7))
    print(process_setup.prefer_this_thread())
    set_scheduler = os.sched_setscheduler
    def limited(thread, policy, parameter):
        if parameter.sched_priority > 20:
            raise PermissionError
        set_scheduler(thread, policy, parameter)
    os.sched_setscheduler, process_setup.resource.getrlimit = limited, lambda _: (20, 20)
    print(process_setup.prefer_this_thread())
"""


@pytest.mark.parametrize(
    ("code", "at", "expected"),
    [(THREADS, 0, ["fifo 7", "{7}", "1"]), (FIRST, 1, ["normal", "fifo 7", "fifo 98", "fifo 20"])],
    ids=["every thread has it, and one can step back", "one comes first, by the highest that is permitted"],
)
def test_given_a_priority_when_permitted_then_threads_have_the_one_that_they_are_to_have(
    run, code, at, expected
):
    found = run(code)
    if found[at] != "fifo 7":
        pytest.skip(f"SCHED_FIFO is not permitted here: {found[at]}")
    assert found == expected


def test_given_a_user_without_rights_when_set_up_then_it_goes_on_and_says_what_to_do(run):
    try:
        found = run("print(process_setup.prefer_this_process(7))", as_nobody=True)
    except AssertionError as error:
        pytest.skip(f"cannot become another user here: {str(error)[-80:]}")
    assert found == [
        "normal: SCHED_FIFO and nice are not permitted; give the user an rtprio limit, or CAP_SYS_NICE"
    ]


def test_given_a_process_when_it_stops_collecting_then_only_what_it_asks_for_is_collected_the_last_configures_too(
    run,
):
    assert run("""
        import weakref
        class Loop:
            def __init__(self): self.me = self
            def __del__(self): print("collected")
        stage = Loop()
        gone = weakref.ref(stage)
        process_setup.stop_collecting()
        stage = None
        for _ in range(5000): [[]]
        gc.collect()
        print(gc.isenabled(), gone() is None)
        process_setup.stop_collecting()
        print(gone() is None, gc.isenabled(), gc.get_freeze_count() > 0)
        Loop()
        print("asking")
        gc.collect()
    """) == ["False False", "collected", "True False True", "asking", "collected"]


def test_given_no_priority_when_set_up_then_the_scheduler_is_left_alone_and_the_rest_says_what_it_came_to(
    run,
):
    *found, memory = run("""
        print(process_setup.prefer_this_process(0))
        process_setup.step_back()
        print(os.sched_getscheduler(0) == os.SCHED_OTHER)
        try: process_setup.pin_this_process((4095,))
        except OSError as error: print("refused")
        cpu = min(os.sched_getaffinity(0))
        process_setup.pin_this_process((cpu,))
        print(os.sched_getaffinity(0) == {cpu})
        print(process_setup.lock_memory())
    """)
    assert found == ["normal", "True", "refused", "True"]
    assert memory == "locked" or memory.startswith("not locked: ")
