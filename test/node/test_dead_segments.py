"""Shared memory that a killed process leaves behind, with real processes of the real middleware."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rclpy")

from torchperf_ros.node.middleware import remove_dead_segments

pytestmark = pytest.mark.ros

SHARED_MEMORY = Path("/dev/shm")
NODE = "import rclpy; rclpy.init(); node = rclpy.create_node('here'); print('up', flush=True); input()"


@pytest.fixture
def start():
    """Start processes with a node each; returns the process and the locks of its segments."""
    processes = []

    def locks(process):
        """Those that this process holds: others of the machine come and go as well."""
        files = []
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                files.append(path.readlink())
        return {path for path in files if path.parent == SHARED_MEMORY and path.name.endswith("_el")}

    def start():
        environment = os.environ | {"FASTDDS_BUILTIN_TRANSPORTS": "DEFAULT"}
        process = subprocess.Popen(
            [sys.executable, "-c", NODE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        processes.append(process)
        assert process.stdout.readline() == b"up\n"
        own = {lock for lock in locks(process) if "port" not in lock.name}
        assert own
        return process, own

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def age(paths):
    for path in paths:
        os.utime(path, (1, 1))


def segments(locks):
    return {lock.with_name(lock.name.removesuffix("_el")) for lock in locks}


def test_given_a_killed_process_when_cleared_then_its_segments_are_gone_and_those_of_a_living_one_are_not(start):
    living, dead = start(), start()
    dead[0].send_signal(signal.SIGKILL)
    dead[0].wait()
    age(living[1] | dead[1])
    size = sum(path.stat().st_size for path in segments(dead[1]))
    assert remove_dead_segments() >= size > 0
    assert not any(path.exists() for path in dead[1] | segments(dead[1]))
    assert all(path.exists() for path in living[1] | segments(living[1]))


def test_given_what_killed_processes_left_then_it_is_gone_and_the_log_says_so(start, start_node, tmp_path, monkeypatch):
    dead, locks = start()
    dead.kill()
    dead.wait()
    age(locks)
    files = tmp_path / "torchperf_worker_dead"
    files.mkdir()
    (files / "model.so").write_bytes(bytes(3_000_000))
    age([files])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    node = start_node({"autostart": False})
    said = "MB of shared memory and 3 MB of temporary files that killed processes had left"
    node.wait_for(lambda: said in node.errors, "the line in the log")
    assert not any(path.exists() for path in [files, *segments(locks)])


def test_given_a_lock_that_was_just_made_when_cleared_then_it_is_left_to_whoever_makes_it(tmp_path):
    name = "fastdds_0123456789abcdef"
    (tmp_path / name).write_bytes(b"segment")
    (tmp_path / f"{name}_el").touch()
    assert remove_dead_segments(tmp_path) == 0
    assert (tmp_path / name).exists()


def test_given_files_of_others_when_cleared_then_they_are_left(tmp_path):
    names = {"fastdds_port7412_el", "fastdds_0123456789abcdef", "psm_0123456789abcdef_el"}
    for name in names:
        (tmp_path / name).write_bytes(b"1")
        os.utime(tmp_path / name, (1, 1))
    assert remove_dead_segments(tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere_el")], ids=["fifo", "link"])
def test_given_what_is_no_file_under_a_locks_name_when_cleared_then_it_is_left_and_nobody_waits(tmp_path, make):
    for name in ("fastdds_0123456789abcdef", "elsewhere_el"):
        (tmp_path / name).write_bytes(b"1")
    lock = tmp_path / "fastdds_0123456789abcdef_el"
    make(lock)
    age([path for path in tmp_path.iterdir() if path != lock])
    os.utime(lock, (1, 1), follow_symlinks=False)
    code = "import sys, pathlib as p; from torchperf_ros.node import middleware as d"
    code += "; print(d.remove_dead_segments(p.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "0\n"
    assert (tmp_path / "fastdds_0123456789abcdef").exists()
