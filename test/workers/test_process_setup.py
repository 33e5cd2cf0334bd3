"""Freed memory, each case in a process of its own; and Ctrl-C while something is half done."""

import signal
import subprocess
import sys
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


def run(code):
    """The lines that a fresh interpreter prints."""
    prologue = (
        "from torchperf_ros.workers.process_setup import LARGEST_KEPT_BYTES, keep_freed_memory,"
        " kept_bytes\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prologue + textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_given_large_blocks_when_freed_memory_is_kept_then_taking_them_again_costs_no_page_faults():
    faults = [
        int(
            run(f"""
        import resource
        if {keep}: keep_freed_memory(4_000_000)
        bytearray(3_000_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20): bytearray(b"x" * 3_000_000)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        """)[0]
        )
        for keep in (False, True)
    ]
    assert faults[1] < faults[0] / 4


def test_given_freed_memory_when_it_is_kept_then_it_can_be_seen_and_has_a_bound():
    kept_mib = run("""
        keep_freed_memory(LARGEST_KEPT_BYTES, 64 << 20)
        for count in (2, 6):  # of 20 MiB each: what lies below the bound is kept, what exceeds it goes back
            blocks = [bytearray(20 << 20) for _ in range(count)]
            blocks.clear()
            print(kept_bytes() >> 20)
    """)
    assert 40 <= int(kept_mib[0]) < 64
    assert int(kept_mib[1]) < 64
