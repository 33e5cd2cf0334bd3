"""The launch file that plays a log to the node: every image is answered, with ages of the log's time, and all ends."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

launch_pytest = pytest.importorskip(
    "launch_pytest", reason="launch_pytest is not installed: it comes with a ROS 2 installation, not from PyPI"
)

import rclpy  # noqa: E402
from launch import LaunchDescription  # noqa: E402
from launch.actions import IncludeLaunchDescription, RegisterEventHandler  # noqa: E402
from launch.event_handlers import OnProcessExit  # noqa: E402
from launch.launch_description_sources import PythonLaunchDescriptionSource  # noqa: E402
from std_msgs.msg import Float64MultiArray  # noqa: E402
from visualization_msgs.msg import MarkerArray  # noqa: E402

pytestmark = pytest.mark.ros

LAUNCH_FILE = Path(__file__).parents[2] / "launch" / "replay.launch.py"
WITHIN_S = 90.0  # two stages load their models first
IMAGE = "sensor_msgs/msg/Image"
START_NS = 1_600_000_000_000_000_000
FRAMES = 5
exit_codes = []


@pytest.fixture(autouse=True)
def domain(monkeypatch):
    """A DDS domain of this test's own: no other node on the machine answers in its place."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))


@pytest.fixture
def log(tmp_path):
    """A log of years ago: five images, half a second apart, received 40 ms after their stamps."""
    store = get_typestore(Stores.ROS2_JAZZY)
    types = store.types
    with Writer(tmp_path / "log", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        camera = writer.add_connection("/camera/front", IMAGE, typestore=store)
        for number in range(FRAMES):
            stamp_ns = START_NS + number * 500_000_000
            stamp = types["builtin_interfaces/msg/Time"](*divmod(stamp_ns, 1_000_000_000))
            pixels = np.full(3 * 320 * 180, number, np.uint8)
            image = types[IMAGE](types["std_msgs/msg/Header"](stamp, "camera"), 180, 320, "rgb8", 0, 960, pixels)
            writer.write(camera, stamp_ns + 40_000_000, store.serialize_cdr(image, IMAGE))
    return tmp_path / "log"


@pytest.fixture
def perception(tmp_path):
    """Parameters of one small stage that misses no frame, whatever else the machine does."""
    path = tmp_path / "params.yaml"
    path.write_text(
        "/**/perf: {ros__parameters: {stages: [perception], metrics_port: 0, recorder: false, compile_missing: false, "
        "worker_threads: 1, perception: {tiers: [fast], backup: none, budget_ms: 5000.0, hang_ms: 10000.0, "
        "input_reliability: reliable}}}"
    )
    return path


@launch_pytest.fixture
def replay(log, perception):
    everything = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(LAUNCH_FILE)),
        launch_arguments={
            "log": str(log), "image": "/camera/front", "params_file": str(perception), "device": "cpu",
            "play": "--rate 0.5",
        }.items(),
    )  # fmt: skip
    ended = OnProcessExit(on_exit=lambda event, _: exit_codes.append(event.returncode))
    return LaunchDescription([RegisterEventHandler(ended), everything, launch_pytest.actions.ReadyToTest()])


@pytest.fixture
def listener():
    rclpy.init()
    node = rclpy.create_node("listener")
    yield node
    node.destroy_node()
    rclpy.shutdown()


@pytest.mark.launch(fixture=replay)
def test_log_is_answered_frame_by_frame_in_its_own_time_and_all_ends_with_the_player(listener):
    rows, outputs = [], []
    listener.create_subscription(Float64MultiArray, "/perf/latency_stages", rows.append, 50)
    listener.create_subscription(MarkerArray, "/detections", outputs.append, 50)
    until = time.monotonic() + WITHIN_S
    while len(exit_codes) < 2:
        assert time.monotonic() < until, f"not within {WITHIN_S} s: the end; {len(outputs)} outputs, {exit_codes}"
        rclpy.spin_once(listener, timeout_sec=0.1)
    said = [dict(zip((dim.label for dim in row.layout.dim), row.data, strict=True)) for row in rows]
    assert [row["outcome"] for row in said] == [0.0] * FRAMES
    assert all(0 < row["age_ms"] < 1000 for row in said)
    assert len(outputs) == FRAMES
    assert exit_codes == [0, 0]
