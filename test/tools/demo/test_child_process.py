"""Processes that end with the drive, whatever they do."""

import contextlib
import os
import signal
import sys

import psutil
import pytest

from torchperf_ros.tools.demo.child_process import ChildProcess, GrowingFile

ECHO = """
import sys
sys.stderr.write("ready\\n")
for line in sys.stdin:
    print(f"heard {line.strip()}", flush=True)
"""
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
PARENT = """
import sys
from pathlib import Path
from torchperf_ros.tools.demo.child_process import ChildProcess
child = ChildProcess("child", ["sleeper"], Path(sys.argv[1]))
print(child._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that a child can run."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def write(text: str, name: str = "program") -> list[str]:
        (tmp_path / f"{name}.py").write_text(text)
        return [name]

    return write


def wait_for_line(file: GrowingFile, child: ChildProcess) -> str:
    """The first line of a file, as soon as it is there."""
    while child.exit_status is None:
        for line in file.lines():
            return line
        os.sched_yield()
    pytest.fail(f"ended with {child.exit_status}: {child.errors.tail(20)}")


def ended(process: psutil.Process) -> bool:
    """Whether a process ends soon; nobody may be there to collect its exit status."""
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0.05)
    return True


def test_given_a_growing_file_when_read_then_only_whole_new_lines_come(tmp_path):
    file = GrowingFile(tmp_path / "log")
    assert list(file.lines()) == []
    assert file.tail(3) == ""
    with (tmp_path / "log").open("a") as writer:
        writer.write("one\ntw")
        writer.flush()
        assert list(file.lines()) == ["one"]
        writer.write("o\nthree\n")
        writer.flush()
        assert list(file.lines()) == ["two", "three"]
    assert file.tail(2) == "two\nthree"


def test_given_a_child_when_spoken_to_then_it_answers_and_ends_with_its_block(tmp_path, module):
    with ChildProcess("echo", module(ECHO), tmp_path) as child:
        assert wait_for_line(child.errors, child) == "ready"
        child.say("go")
        assert wait_for_line(child.output, child) == "heard go"
        assert child.exit_status is None
    assert child.exit_status in {-signal.SIGINT, 1}


def test_given_a_child_that_ignores_signals_and_has_children_then_all_are_gone(
    tmp_path, module, monkeypatch
):
    monkeypatch.setattr(
        "torchperf_ros.tools.demo.child_process._PATIENCE_S", {signal.SIGTERM: 0.1, signal.SIGKILL: 10.0}
    )
    with ChildProcess("stubborn", module(STUBBORN), tmp_path) as child:
        grandchild = psutil.Process(int(wait_for_line(child.output, child)))
    assert child.exit_status == -signal.SIGKILL
    assert ended(grandchild)


def test_given_a_parent_that_is_killed_when_its_child_runs_then_the_child_ends_too(tmp_path, module):
    module("import time\ntime.sleep(600)", "sleeper")
    with ChildProcess("parent", [*module(PARENT, "parent"), str(tmp_path)], tmp_path) as parent:
        child = psutil.Process(int(wait_for_line(parent.output, parent)))
        parent._process.kill()
        parent._process.wait()
        assert ended(child)
