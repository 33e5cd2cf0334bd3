"""What is printed reaches its reader, in order.

Where nobody reads, nothing waits, and what is left out is counted.
"""

import contextlib
import fnmatch
import os
import signal
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
    import os, signal, sys, time
    from torchperf_ros.node.terminal import passed_on
"""


@pytest.fixture
def start():
    """Start a program; its standard error is a pipe."""
    started = []

    def run(code, **how):
        lines = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
        started.append(subprocess.Popen([sys.executable, "-c", lines], **how))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()


def test_given_lines_on_both_outputs_when_they_are_one_file_then_all_come_in_order(start):
    process = start(
        """
        with passed_on() as lost:
            for number in range(1000):
                os.write(1 + number % 2, b"%d\\n" % number)
            assert lost() == 0
        os.write(2, b"after\\n")
        """,
        stderr=subprocess.STDOUT,
    )
    out, _ = process.communicate(timeout=200)
    assert out.decode().split() == [*map(str, range(1000)), "after"]
    assert process.returncode == 0


PROGRAMS = {
    "outputs are two files: each has its own": (
        """
        with passed_on():
            os.write(1, b"out")
            os.write(2, b"err")
        """,
        (b"out", b"err", 0),
    ),
    "it is killed: its last words arrive, and the pipe's end, which no process holds any more": (
        """
        with passed_on():
            os.write(2, b"last words")
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        (b"", b"last words", -signal.SIGKILL),
    ),
    "the machine gives no process for it: it says so, and prints as before": (
        """
        import errno

        def refuse():
            raise BlockingIOError(errno.EAGAIN, "no more processes")

        os.fork = refuse
        with passed_on() as lost:
            os.write(2, b"goes on")
            assert lost() == 0
        """,
        (b"", b"*no process can be forked for it: [Errno 11] no more processes*goes on", 0),
    ),
    "the process that passes lines on is killed: they are printed as before": (
        """
        with passed_on() as lost:
            (pid,) = map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert lost() == lost() == 0
            os.write(2, b"goes on")
        os.write(2, b", and ends")
        """,
        (b"", b"*the node up: the process that passes it on is gone\ngoes on, and ends", 0),
    ),
}
"""What a program does, and what comes of it: both outputs, as patterns, and its status."""


@pytest.mark.parametrize("case", PROGRAMS)
def test_given_a_program_when_it_prints_then_all_of_it_arrives_and_a_fault_is_said(start, case):
    code, (out, err, status) = PROGRAMS[case]
    process = start(code)
    said = process.communicate(timeout=200)
    assert (said[0], process.returncode) == (out, status)
    assert fnmatch.fnmatchcase(said[1].decode(), err.decode().replace("[", "[[]")), said[1]


def test_given_a_reader_that_does_not_read_when_much_is_printed_then_nothing_waits_and_it_says_what_is_missing(
    start,
):
    process = start(
        """
        with passed_on() as lost:
            began = time.monotonic()
            for number in range(4000):
                os.write(2, b"%04d %s\\n" % (number, b"x" * 994))
                time.sleep(0.0005)  # what is printed at once has to fit into a pipe
            while not lost():
                time.sleep(0.01)
            os.write(1, b"not held up\\n")
            sys.stdin.read(1)
            os.write(2, b"last\\n")
        """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"not held up\n"
    head = os.read(process.stderr.fileno(), 100_000)
    assert head.startswith(b"0000 ")
    process.stdin.write(b"x")
    process.stdin.close()
    lines = (head + process.stderr.read()).decode().splitlines()
    assert process.wait(200) == 0
    (said,) = [
        number
        for number, line in enumerate(lines)
        if "lines were left out here, as they were not read" in line
    ]
    kept = [int(line[:4]) for line in lines if line[0] in "0123456789" and "left out" not in line]
    assert kept == sorted(kept)
    assert int(lines[said].split()[0]) == 4000 - len(kept)
    assert lines[-1] == "last"


def test_given_a_reader_that_goes_away_then_the_process_goes_on(start):
    process = start(
        """
        with passed_on():
            sys.stdin.read(1)
            for _ in range(100):
                os.write(2, b"nobody reads this\\n")
            os.write(1, b"goes on")
        """,
        stdin=subprocess.PIPE,
    )
    process.stderr.close()
    process.stdin.write(b"x")
    process.stdin.close()
    process.stderr = None
    assert process.stdout.read() == b"goes on"
    assert process.wait(200) == 0


@pytest.fixture
def paused():
    """The writing end of a full pipe without a reader."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    yield writes
    os.close(writes)
    os.close(reads)


def test_given_a_node_whose_terminal_is_paused_when_its_worker_dies_then_it_is_replaced_and_the_node_goes_on(
    start_node, obedient, orders, paused
):
    """The logger holds the interpreter lock while it waits: one line would stop the whole node."""
    node = start_node({"stages": ["obeys"], "obeys": obedient(orders, backup="none")}, prints=paused)
    node.wait_until_ready("obeys")
    for count in (1, 2):
        (worker,) = node.workers()
        worker.kill()
        node.counted("obeys", restarts=count)
        node.wait_until_ready("obeys")
    node.next_report()
    assert node.values("node")["lines_lost"] == "0"  # they wait for a reader
