"""Processes that end with the drive, whatever they do."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from torchperf_ros.models.sabotage import KINDS, FaultSchedule
from torchperf_ros.observe.telemetry.node_state import StageState
from torchperf_ros.tools.demo.drive import (
    STAGES,
    ChildProcess,
    FaultGate,
    GrowingFile,
    faults_of,
    what_next,
)
from torchperf_ros.tools.demo.verdict import FAILED, PASSED, TOO_BUSY, DriveState

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
from torchperf_ros.tools.demo.drive import ChildProcess
child = ChildProcess("child", ["sleeper"], Path(sys.argv[1]))
print(child.process.pid, flush=True)
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
        "torchperf_ros.tools.demo.drive._PATIENCE_S", {signal.SIGTERM: 0.1, signal.SIGKILL: 10.0}
    )
    with ChildProcess("stubborn", module(STUBBORN), tmp_path) as child:
        grandchild = psutil.Process(int(wait_for_line(child.output, child)))
    assert child.exit_status == -signal.SIGKILL
    assert ended(grandchild)


def test_given_a_parent_that_is_killed_when_its_child_runs_then_the_child_ends_too(tmp_path, module):
    module("import time\ntime.sleep(600)", "sleeper")
    with ChildProcess("parent", [*module(PARENT, "parent"), str(tmp_path)], tmp_path) as parent:
        child = psutil.Process(int(wait_for_line(parent.output, parent)))
        parent.process.kill()
        parent.process.wait()
        assert ended(child)


pytest.importorskip("rclpy")


DEADLY = {kind for kind in KINDS if kind.endswith(("sigkill", "sigsegv", "hang"))}


@pytest.mark.parametrize("seconds", [8.0, 20.0, 60.0])
def test_given_a_drive_when_faults_are_planned_then_every_kind_comes_and_deaths_keep_apart(
    seconds: float,
) -> None:
    plans = {stage: faults_of(stage, seconds) for stage in STAGES}
    assert {kind for plan in plans.values() for kind in plan} == set(KINDS)
    for plan in plans.values():
        faults = {kind: FaultSchedule.read(kind, entry) for kind, entry in plan.items()}
        assert all(0 < fault.after_s < seconds for fault in faults.values())
        times = sorted(
            f.after_s + n * f.every_s for kind, f in faults.items() for n in range(3) if kind in DEADLY
        )
        assert all(
            later - earlier > seconds / 10
            for earlier, later in itertools.pairwise(times)
            if later < seconds
        )


def test_given_a_drive_when_it_is_over_then_the_report_named_is_of_its_last_incident_or_of_the_records() -> (
    None
):
    evidence = Path("/evidence")
    assert any("report /evidence/records/perf/records.jsonl -o" in line for line in what_next(evidence, []))
    lines = what_next(evidence, [evidence / "a", evidence / "b"])
    assert any("report /evidence/b -o" in line for line in lines)
    assert lines[1:3] == ["  a", "  b"]
    assert any(
        "report '/my robot/a' -o" in line for line in what_next(Path("/my robot"), [Path("/my robot/a")])
    )


def test_given_a_stage_when_a_worker_is_missing_then_no_fault_begins_before_a_report_shows_all_of_them(
    tmp_path: Path,
):
    state, gate = DriveState("a road", 20.0), FaultGate("planning", tmp_path / "gate")
    state.phase, stage = "driving", StageState("planning")

    def report(*workers: str) -> bool:
        state.reports += 1
        stage.values = {f"worker_{number}_state": word for number, word in enumerate(workers)}
        gate.step(state)
        return (tmp_path / "gate").exists()

    gate.step(state)
    state.stages["planning"] = stage
    assert [report("busy", "loading full"), report("busy", "starting"), report("idle", "busy")] == [
        False,
        False,
        True,
    ]
    (tmp_path / "gate").unlink()  # a fault was taken
    gate.step(state)
    assert [report("busy", "waits for its restart"), report("idle", "idle")] == [False, True]
    (tmp_path / "gate").unlink()
    gate.step(state)
    gate.step(state)  # the same report, which may be from before the fault
    assert not (tmp_path / "gate").exists()


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command `torchperf demo`."""
    env = {k: v for k, v in os.environ.items() if k != "ROS_DOMAIN_ID"} | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }
    command = [sys.executable, "-u", "-m", "torchperf_ros.tools", "demo", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.ros
def test_given_a_sabotaged_drive_when_ctrl_c_ends_it_then_every_started_frame_was_answered_and_no_process_is_left(
    tmp_path: Path,
) -> None:
    files = "--json", str(tmp_path / "report.json"), "--svg", str(tmp_path / "view.svg")
    process = start("--seconds", "20", "--sabotage", *files)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("starting, ")
    line = next(
        line for line in process.stdout if re.match(r" *1[3-6]\.\d s /perf .* p50 .*% on time", line)
    )
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 4, line
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode in {PASSED, FAILED, TOO_BUSY}, output
    assert ("PASS" in output) == (process.returncode == PASSED)
    assert "Traceback" not in output
    assert "sabotage: what was injected" in output
    assert "What next:" in output
    assert not psutil.wait_procs(children, timeout=200)[1]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_status"] == process.returncode
    assert report["player"]["images"] > 0
    for name in STAGES:
        stage = report["stages"][name]
        assert stage["records"] > 100, output
        assert stage["lost"] in {0, 1}, output
        # only what comes before the first own result, or long after the last one, has nothing to publish:
        # on a machine that others keep busy these may be many
        assert stage["unanswered"] <= 0.05 * stage["records"] or (report["others_share"] or 0) > 0.1, output
    kinds = {entry["kind"] for entry in report["sabotage"]}
    assert kinds >= {"sigkill", "hang", "raise"} or (report["others_share"] or 0) > 0.1, output
    assert (tmp_path / "view.svg").read_text().startswith("<svg")
