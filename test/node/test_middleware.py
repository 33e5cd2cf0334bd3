"""The transport that processes choose, and who hears whom then.

Shared memory that killed ones leave; a bounded end.
"""

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("rclpy")

from torchperf_ros.node import main
from torchperf_ros.node.middleware import image_transport, own_segment, remove_dead_segments

from ..ros_domain import own_domain
from .perf_process import segment_locks

NEWER, OLDER = "FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE"
QOS_FROM_XML = "RMW_FASTRTPS_USE_QOS_FROM_XML"
SAY = """
import sys, time, rclpy
from std_msgs.msg import Float64
rclpy.init(); node = rclpy.create_node("says"); publisher = node.create_publisher(Float64, "/small", 10)
while True: publisher.publish(Float64(data=1.0)); time.sleep(0.05)
"""
HEAR = """
import sys, time, rclpy
from std_msgs.msg import Float64
rclpy.init(); node = rclpy.create_node("hears"); heard = []
node.create_subscription(Float64, "/small", heard.append, 10)
until = time.monotonic() + 60
while len(heard) < 10 and time.monotonic() < until: rclpy.spin_once(node, timeout_sec=0.1)
print(len(heard))
"""

SEND = """
import time, rclpy
from rclpy.qos import qos_profile_sensor_data
from rclpy.serialization import serialize_message
from std_msgs.msg import String
rclpy.init(); node = rclpy.create_node("sends"); image = serialize_message(String(data=(4 << 20) * "x"))
cameras = [node.create_publisher(String, f"/image_{n}", qos_profile_sensor_data) for n in range(6)]
while True:
    for camera in cameras: camera.publish(image); time.sleep(0.1)
"""
TAKE = """
import rclpy
from pathlib import Path
from rclpy.qos import QoSProfile, ReliabilityPolicy
from std_msgs.msg import String
from torchperf_ros.workers.process_setup import keep_freed_memory
# not getrusage, which counts what this was forked from
most_mib = lambda: int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
rclpy.init(); keep_freed_memory(8 << 20); node = rclpy.create_node("takes"); taken = [0] * 6
newest = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
def take(n, data): taken[n] += len(data) > 4 << 20
for n in range(6):
    node.create_subscription(String, f"/image_{n}", lambda data, n=n: take(n, data), newest, raw=True)
before_mib = most_mib()
while min(taken) < 3: rclpy.spin_once(node, timeout_sec=30.0)
print(most_mib() - before_mib)
"""
HERE = "import rclpy; rclpy.init(); node = rclpy.create_node('here'); print('up', flush=True); input()"


@pytest.mark.parametrize("chosen", ["FASTDDS_BUILTIN_TRANSPORTS", NEWER, OLDER])
def test_given_a_transport_that_the_user_chose_when_asked_then_nothing_is_changed(chosen):
    assert image_transport({chosen: "UDPv4"}) == {}


@pytest.mark.parametrize(("rclpy", "variable"), [("9.1.2", NEWER), ("7.1.6", OLDER), ("3.3.13", OLDER)])
def test_given_a_version_of_ros_when_no_transport_is_chosen_then_its_variable_names_the_profile(
    monkeypatch, rclpy, variable
):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: rclpy)
    ((name, profile),) = image_transport({}).items()
    assert name == variable
    assert "<segment_size>67108864</segment_size>" in Path(profile).read_text()


def test_given_a_node_when_it_starts_then_only_our_profile_becomes_its_smaller_one_and_the_lanes_smaller_still():
    environment = image_transport({})
    for lane, segment_bytes, policies in ((False, 16 << 20, "1"), (True, 1 << 20, "0")):
        environment |= own_segment(environment, lane=lane)
        (_, profile), from_xml = environment.items()
        assert f"<segment_size>{segment_bytes}</segment_size>" in Path(profile).read_text()
        assert from_xml == (QOS_FROM_XML, policies)
    assert own_segment({name: "/etc/own.xml" for name in environment}) == {}


@pytest.mark.parametrize("chosen", [QOS_FROM_XML, "RMW_FASTRTPS_PUBLICATION_MODE"])
def test_given_a_user_who_has_chosen_policies_when_the_node_starts_then_they_stay(chosen):
    assert QOS_FROM_XML not in own_segment(image_transport({}) | {chosen: "any"})


def test_given_a_node_when_it_starts_then_its_workers_are_forked_from_what_it_starts_first(
    monkeypatch, tmp_path
):
    """Which has imported torch by then: with another environment it would have to be started anew."""
    profile = image_transport({})
    started_with, goes_on_with = [], []

    def init(**_):
        goes_on_with.append(dict(os.environ))
        raise RuntimeError

    monkeypatch.setattr(main, "start_base", lambda: started_with.append(dict(os.environ)))
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main.rclpy, "init", init)
    for environment in ({}, profile):
        monkeypatch.setattr(os, "environ", {"TMPDIR": str(tmp_path), **environment})
        assert main.main([]) == 2
    assert started_with == goes_on_with
    assert all(set(environment) == {"TMPDIR", QOS_FROM_XML, *profile} for environment in started_with)


def test_given_a_launch_file_when_it_asks_then_rclpy_is_not_imported(python):
    code = (
        "import sys; from torchperf_ros.node.middleware import image_transport; print('rclpy' in"
        " sys.modules)"
    )
    assert python(code) == "False\n"


@pytest.fixture
def plain():
    """The environment of a shell in which no transport is chosen."""
    names = {
        name: value for name, value in os.environ.items() if not name.startswith(("FASTDDS_", "FASTRTPS_"))
    }
    return names | {"ROS_DOMAIN_ID": str(own_domain("another one than that of the other live tests"))}


def test_given_no_launch_file_when_a_node_starts_then_it_has_the_segment_of_the_profile(plain):
    words = [sys.executable, "-m", "torchperf_ros.node.main", "--ros-args", "-p", "autostart:=false"]
    node = psutil.Popen(words, env=plain, stderr=subprocess.PIPE)
    try:
        assert any(
            b"no parameters were given" in line for line in node.stderr
        )  # Fast DDS may complain of others
        shared = {
            Path(mapped.path) for mapped in node.memory_maps() if mapped.path.startswith("/dev/shm/fast")
        }
        assert max(path.stat().st_size for path in shared) > 16 << 20
    finally:
        node.kill()
        node.wait()


def test_given_a_process_with_the_profile_when_it_speaks_then_a_plain_one_hears_it(plain):
    speaker = subprocess.Popen([sys.executable, "-c", SAY], env={**plain, **image_transport(plain)})
    try:
        done = subprocess.run(
            [sys.executable, "-c", HEAR], env=plain, capture_output=True, text=True, check=True
        )
    finally:
        speaker.kill()
        speaker.wait()
    assert done.stdout == "10\n"


def test_given_several_cameras_when_the_node_takes_their_images_then_they_share_its_memory(plain):
    """Of 4 MiB each; by rmw_fastrtps' own choice each camera keeps some for itself."""
    apart, took_mib = plain | image_transport(plain), []
    cameras = subprocess.Popen([sys.executable, "-c", SEND], env=apart)
    try:
        for policies in ("0", "1"):
            node = apart | own_segment(apart) | {QOS_FROM_XML: policies}
            done = subprocess.run([sys.executable, "-c", TAKE], env=node, capture_output=True, check=True)
            took_mib.append(float(done.stdout))
    finally:
        cameras.kill()
        cameras.wait()
    assert took_mib[1] < took_mib[0] - 2.0 * 4, took_mib


ENDS = {
    "stuck in C": ("ctypes.PyDLL(None).pause()", 1),
    "stuck while the interpreter ends": ("atexit.register(ctypes.PyDLL(None).pause)", 1),
    "not stuck": ("sys.exit(7)", 7),
}


@pytest.mark.parametrize("kind", ENDS)
def test_given_a_bound_when_the_process_is_to_end_then_it_has_ended_by_then(kind):
    last, status = ENDS[kind]
    imports = "import atexit, ctypes, sys; from torchperf_ros.node.middleware import end_within"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}; end_within(1); {last}"], timeout=200, check=False
    )
    assert done.returncode == status
    assert kind == "not stuck" or time.monotonic() - began >= 1.0


# -- what killed processes leave behind


@pytest.fixture
def start():
    """Start processes with a node each; returns the process and the locks of its segments."""
    processes = []

    def start():
        environment = os.environ | {"FASTDDS_BUILTIN_TRANSPORTS": "DEFAULT"}
        process = subprocess.Popen(
            [sys.executable, "-c", HERE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        processes.append(process)
        assert process.stdout.readline() == b"up\n"
        own = segment_locks(process)
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


def test_given_a_killed_process_when_cleared_then_its_segments_are_gone_and_those_of_a_living_one_are_not(
    start,
):
    living, dead = start(), start()
    dead[0].send_signal(signal.SIGKILL)
    dead[0].wait()
    age(living[1] | dead[1])
    size = sum(path.stat().st_size for path in segments(dead[1]))
    assert remove_dead_segments() >= size > 0
    assert not any(path.exists() for path in dead[1] | segments(dead[1]))
    assert all(path.exists() for path in living[1] | segments(living[1]))


def test_given_what_killed_processes_left_then_it_is_gone_and_the_log_says_so(
    start, start_node, tmp_path, monkeypatch
):
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


DEAD = "fastdds_0123456789abcdef"
NO_LOCKS = {
    "one that is just being made": Path.touch,
    "a FIFO, which none writes to": lambda lock: os.mkfifo(lock) or age([lock]),
    "a link": lambda lock: lock.symlink_to("elsewhere_el") or os.utime(lock, (1, 1), follow_symlinks=False),
}
"""What lies under the name of a dead process's lock, and is none."""


@pytest.mark.parametrize("kind", NO_LOCKS)
def test_given_no_lock_of_a_dead_process_when_cleared_then_the_segment_is_left_and_nothing_waits(
    tmp_path, kind
):
    others = [tmp_path / DEAD, tmp_path / "elsewhere_el"]
    for path in others:
        path.write_bytes(b"1")
    age(others)
    NO_LOCKS[kind](tmp_path / f"{DEAD}_el")
    assert remove_dead_segments(tmp_path) == 0
    assert others[0].exists()


def test_given_files_of_others_when_cleared_then_they_are_left(tmp_path):
    names = {"fastdds_port7412_el", "fastdds_0123456789abcdef", "psm_0123456789abcdef_el"}
    for name in names:
        (tmp_path / name).write_bytes(b"1")
        os.utime(tmp_path / name, (1, 1))
    assert remove_dead_segments(tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == names
