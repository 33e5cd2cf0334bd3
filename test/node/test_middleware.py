"""The transport that processes choose and who hears whom then; and a bounded end, also of a process stuck in C."""

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("rclpy")

from torchperf_ros.node.middleware import image_transport, own_segment

pytestmark = pytest.mark.ros

NEWER, OLDER = "FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE"
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
    for lane, segment_bytes in ((False, 16 << 20), (True, 1 << 20)):
        environment |= own_segment(environment, lane=lane)
        ((_, profile),) = environment.items()
        assert f"<segment_size>{segment_bytes}</segment_size>" in Path(profile).read_text()
    assert own_segment({name: "/etc/own.xml" for name in environment}) == {}


def test_given_a_launch_file_when_it_asks_then_rclpy_is_not_imported():
    code = "import sys; from torchperf_ros.node.middleware import image_transport; print('rclpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.fixture
def plain():
    """The environment of a shell in which no transport is chosen."""
    names = {name: value for name, value in os.environ.items() if not name.startswith(("FASTDDS_", "FASTRTPS_"))}
    return names | {"ROS_DOMAIN_ID": str(101 + os.getpid() % 100)}  # not the one of the other live tests


def test_given_no_launch_file_when_a_node_starts_then_it_has_the_segment_of_the_profile(plain):
    words = [sys.executable, "-m", "torchperf_ros.node.main", "--ros-args", "-p", "autostart:=false"]
    node = psutil.Popen(words, env=plain, stderr=subprocess.PIPE)
    try:
        assert b"no parameters were given" in node.stderr.readline()
        shared = {Path(mapped.path) for mapped in node.memory_maps() if mapped.path.startswith("/dev/shm/fast")}
        assert max(path.stat().st_size for path in shared) > 16 << 20
    finally:
        node.kill()
        node.wait()


def test_given_a_process_with_the_profile_when_it_speaks_then_a_plain_one_hears_it(plain):
    speaker = subprocess.Popen([sys.executable, "-c", SAY], env={**plain, **image_transport(plain)})
    try:
        done = subprocess.run([sys.executable, "-c", HEAR], env=plain, capture_output=True, text=True, check=True)
    finally:
        speaker.kill()
        speaker.wait()
    assert done.stdout == "10\n"


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
    done = subprocess.run([sys.executable, "-c", f"{imports}; end_within(1); {last}"], timeout=60.0, check=False)
    assert done.returncode == status
    assert kind == "not stuck" or time.monotonic() - began >= 1.0
