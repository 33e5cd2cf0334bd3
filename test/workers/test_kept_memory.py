"""Freed memory, each case in a process of its own."""

import subprocess
import sys
import textwrap


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
