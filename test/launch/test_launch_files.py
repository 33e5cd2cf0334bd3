"""The launch files with the real launch, launch_ros and nodes.

What starts becomes active, speaks, and ends.
"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

launch_pytest = pytest.importorskip(
    "launch_pytest",
    reason="launch_pytest is not installed: it comes with a ROS 2 installation, not from PyPI",
)

import rclpy  # noqa: E402
from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from launch import LaunchDescription  # noqa: E402
from launch.actions import IncludeLaunchDescription, RegisterEventHandler  # noqa: E402
from launch.event_handlers import OnProcessExit, OnProcessStart  # noqa: E402
from launch.launch_description_sources import PythonLaunchDescriptionSource  # noqa: E402
from lifecycle_msgs.msg import State  # noqa: E402
from lifecycle_msgs.srv import GetState  # noqa: E402
from rcl_interfaces.srv import GetParameters  # noqa: E402
from std_msgs.msg import Float64MultiArray  # noqa: E402
from visualization_msgs.msg import MarkerArray  # noqa: E402

from ..ros_domain import own_domain  # noqa: E402

pytestmark = pytest.mark.ros

LAUNCH = Path(__file__).parents[2] / "launch"
TRANSPORT = (
    "FASTDDS_BUILTIN_TRANSPORTS",
    "FASTDDS_DEFAULT_PROFILES_FILE",
    "FASTRTPS_DEFAULT_PROFILES_FILE",
)
WITHIN_S = 90.0  # two stages load their models first
IMAGE = "sensor_msgs/msg/Image"
START_NS = 1_600_000_000_000_000_000
FRAMES = 5
ONE_STAGE = (
    "/**/perf: {ros__parameters: {stages: [perception], metrics_port: 0, recorder: false, compile_missing:"
    " false, worker_threads: 1, perception: {tiers: [fast], backup: none, budget_ms: 5000.0, hang_ms:"
    " 10000.0, input_reliability: reliable}}}"
)
environments, exit_codes = [], []


@pytest.fixture(autouse=True)
def domain(monkeypatch):
    """A DDS domain of this test's own, where no other node answers, and no transport, as in a shell."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(own_domain()))
    for name in TRANSPORT:
        monkeypatch.delenv(name, raising=False)
    environments.clear()
    exit_codes.clear()


def launched(file, **arguments):
    """What a launch file starts; `environments` and `exit_codes` get those of its processes."""
    included = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(LAUNCH / file)),
        launch_arguments={"device": "cpu", **arguments}.items(),
    )
    started = OnProcessStart(
        on_start=lambda event, _: environments.append(psutil.Process(event.pid).environ())
    )
    ended = OnProcessExit(on_exit=lambda event, _: exit_codes.append(event.returncode))
    handlers = [RegisterEventHandler(handler) for handler in (started, ended)]
    return LaunchDescription([*handlers, included, launch_pytest.actions.ReadyToTest()])


@launch_pytest.fixture
def perception():
    return launched("perception.launch.py", image="/camera/image_raw")


@launch_pytest.fixture
def replay(tmp_path):
    """A log of years ago: images received 40 ms after their stamps, and a stage that misses no frame."""
    store = get_typestore(Stores.ROS2_JAZZY)
    types = store.types
    with Writer(tmp_path / "log", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        camera = writer.add_connection("/camera/front", IMAGE, typestore=store)
        for number in range(FRAMES):
            stamp_ns = START_NS + number * 500_000_000
            stamp = types["builtin_interfaces/msg/Time"](*divmod(stamp_ns, 1_000_000_000))
            pixels = np.full(3 * 320 * 180, number, np.uint8)
            image = types[IMAGE](
                types["std_msgs/msg/Header"](stamp, "camera"), 180, 320, "rgb8", 0, 960, pixels
            )
            writer.write(camera, stamp_ns + 40_000_000, store.serialize_cdr(image, IMAGE))
    params = tmp_path / "params.yaml"
    params.write_text(ONE_STAGE)
    log, play = str(tmp_path / "log"), "--rate 0.5"
    return launched("replay.launch.py", log=log, image="/camera/front", params_file=str(params), play=play)


@pytest.fixture
def listener():
    rclpy.init()
    node = rclpy.create_node("listener")
    yield node
    node.destroy_node()
    rclpy.shutdown()


def wait_for(condition, what):
    until = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until, f"not within {WITHIN_S} s: {what}; exit codes {exit_codes}"


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def call(service, name, request, listener):
    client = listener.create_client(service, name)
    answer = client.call_async(request)
    rclpy.spin_until_future_complete(listener, answer, timeout_sec=1.0 if service is GetState else WITHIN_S)
    listener.destroy_client(client)
    return answer.result() if answer.done() else None


def state_of(node, listener):
    answer = call(GetState, f"{node}/get_state", GetState.Request(), listener)
    return answer.current_state.id if answer else State.PRIMARY_STATE_UNKNOWN


@pytest.mark.launch(fixture=perception)
def test_node_becomes_active_speaks_and_ends_cleanly_on_sigint(listener):
    wait_for(lambda: state_of("/perf", listener) == State.PRIMARY_STATE_ACTIVE, "the state active")

    said = []
    listener.create_subscription(DiagnosticArray, "/diagnostics", said.append, 10)
    wait_for(lambda: rclpy.spin_once(listener, timeout_sec=0.1) or said, "a message on /diagnostics")
    topics = dict(listener.get_topic_names_and_types())
    assert {"/perf/latency", "/perf/latency_stages", "/perf/memory", "/perf/anomaly"} <= topics.keys()
    assert "/camera/image_raw" in topics
    (environment,) = environments
    chosen = {name: Path(environment[name]).name for name in TRANSPORT if name in environment}
    # and this process, with the defaults, hears it
    assert list(chosen.values()) == ["fastdds_shared_memory.xml"]

    yield  # launch now interrupts what it started, and waits for it

    assert exit_codes == [0]


@pytest.mark.launch(fixture=replay)
def test_log_is_answered_frame_by_frame_in_its_own_time_and_all_ends_with_the_player(listener):
    rows, outputs = [], []
    listener.create_subscription(Float64MultiArray, "/perf/latency_stages", rows.append, 50)
    listener.create_subscription(MarkerArray, "/detections", outputs.append, 50)
    wait_for(lambda: rclpy.spin_once(listener, timeout_sec=0.1) or len(exit_codes) == 2, "the end")
    said = [dict(zip((dim.label for dim in row.layout.dim), row.data, strict=True)) for row in rows]
    assert [row["outcome"] for row in said] == [0.0] * FRAMES
    assert all(0 < row["age_ms"] < 1000 for row in said)
    assert len(outputs) == FRAMES
    assert exit_codes == [0, 0]


LAUNCH_IT = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.actions import SetParameter
file, *words = sys.argv[1:]
arguments = [word.split(":=", 1) for word in words]
included = IncludeLaunchDescription(PythonLaunchDescriptionSource(file), launch_arguments=arguments)
service = LaunchService(argv=words)
service.include_launch_description(LaunchDescription([SetParameter("wheel_radius", 0.3), included]))
sys.exit(service.run())
"""
REFUSED = {  # an argument, whether the node has to be started to see it, and what the line says
    "imge:=/camera": (False, "argument imge is not there; image is"),
    "camera_info:=/camera/info": (False, "argument camera_info is not there; there are image, odom,"),
    "params_file:=mine.yml": (False, "params_file mine.yml is not there: no such file"),
    "remap:=camera_info=/camera/info": (
        False,
        "remap: 'camera_info=/camera/info' is not FROM:=TO, as in remap:='camera_info:=",
    ),
    "device:=gpu": (True, "parameter device: 'gpu' is not allowed; it has to be auto,"),
}


def launching(*arguments):
    return [sys.executable, "-c", LAUNCH_IT, str(LAUNCH / "perception.launch.py"), *arguments]


@pytest.mark.parametrize("argument", REFUSED)
def test_launch_with_an_argument_that_cannot_be_meant_says_so_and_ends(argument, tmp_path):
    launch = subprocess.run(
        launching(argument), cwd=tmp_path, timeout=WITHIN_S, check=False, capture_output=True, text=True
    )
    by_node, line = REFUSED[argument]
    assert line in launch.stdout
    assert (launch.returncode, "process started" in launch.stdout) == ((0, True) if by_node else (1, False))


def test_launch_with_a_file_of_this_folder_that_is_terminated_leaves_no_process(listener, tmp_path):
    (tmp_path / "mine.yaml").write_text(ONE_STAGE)
    arguments = [
        "device:=cpu",
        "params_file:=mine.yaml",
        "use_sim_time:=true",
        "remap:=image:=/one detections:=/two",
    ]
    launch = psutil.Popen(launching(*arguments), cwd=tmp_path)
    started = [launch]
    try:
        wait_for(lambda: state_of("/perf", listener) == State.PRIMARY_STATE_ACTIVE, "the state active")
        request = GetParameters.Request(names=["use_sim_time", "perception.tiers"])
        sim_time, tiers = call(GetParameters, "/perf/get_parameters", request, listener).values
        assert (sim_time.bool_value, list(tiers.string_array_value)) == (True, ["fast"])
        inputs, outputs = (
            dict(names("perf", "/"))
            for names in (
                listener.get_subscriber_names_and_types_by_node,
                listener.get_publisher_names_and_types_by_node,
            )
        )
        assert ("/one" in inputs, "/image" in inputs, "/two" in outputs) == (True, False, True)
        started += launch.children(recursive=True)
        assert len(started) > 1
        launch.terminate()
        wait_for(
            lambda: launch.poll() is not None and not any(map(is_alive, started)), f"the end of {started}"
        )
    finally:
        for process in filter(is_alive, started):
            process.kill()
