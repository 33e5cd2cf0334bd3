"""The launch file with the real launch, launch_ros and node: it becomes active, speaks, and ends when asked to."""

import os
import time
from pathlib import Path

import psutil
import pytest

launch_pytest = pytest.importorskip(
    "launch_pytest", reason="launch_pytest is not installed: it comes with a ROS 2 installation, not from PyPI"
)

import rclpy  # noqa: E402
from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from launch import LaunchDescription  # noqa: E402
from launch.actions import IncludeLaunchDescription, RegisterEventHandler  # noqa: E402
from launch.event_handlers import OnProcessExit, OnProcessStart  # noqa: E402
from launch.launch_description_sources import PythonLaunchDescriptionSource  # noqa: E402
from lifecycle_msgs.msg import State, Transition  # noqa: E402
from lifecycle_msgs.srv import ChangeState, GetState  # noqa: E402

pytestmark = pytest.mark.ros

LAUNCH_FILE = Path(__file__).parents[2] / "launch" / "perception.launch.py"
TRANSPORT = ("FASTDDS_BUILTIN_TRANSPORTS", "FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE")
WITHIN_S = 90.0  # two stages load their models first
environments, exit_codes = [], []


@pytest.fixture(autouse=True)
def domain(monkeypatch):
    """A DDS domain of this test's own, where no other node answers, and no transport chosen, as in a plain shell."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
    for name in TRANSPORT:
        monkeypatch.delenv(name, raising=False)


@launch_pytest.fixture
def perception():
    node = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(LAUNCH_FILE)),
        launch_arguments={"image": "/camera/image_raw", "device": "cpu"}.items(),
    )
    started = OnProcessStart(on_start=lambda event, _: environments.append(psutil.Process(event.pid).environ()))
    ended = OnProcessExit(on_exit=lambda event, _: exit_codes.append(event.returncode))
    handlers = [RegisterEventHandler(handler) for handler in (started, ended)]
    return LaunchDescription([*handlers, node, launch_pytest.actions.ReadyToTest()])


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
        assert time.monotonic() < until, f"not within {WITHIN_S} s: {what}"


def call(service, name, request, listener):
    client = listener.create_client(service, name)
    answer = client.call_async(request)
    rclpy.spin_until_future_complete(listener, answer, timeout_sec=1.0 if service is GetState else WITHIN_S)
    listener.destroy_client(client)
    return answer.result() if answer.done() else None


def state_of(node, listener):
    answer = call(GetState, f"{node}/get_state", GetState.Request(), listener)
    return answer.current_state.id if answer else State.PRIMARY_STATE_UNKNOWN


def change(node, transition_id, listener):
    request = ChangeState.Request(transition=Transition(id=transition_id))
    assert call(ChangeState, f"{node}/change_state", request, listener).success


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
    assert list(chosen.values()) == ["fastdds_shared_memory.xml"]  # and this process, with the defaults, hears it

    for transition_id in (Transition.TRANSITION_DEACTIVATE, Transition.TRANSITION_CLEANUP):
        change("/perf", transition_id, listener)
    change("/perf", Transition.TRANSITION_CONFIGURE, listener)
    time.sleep(2.0)  # time for a launch file that would activate the node on its own account
    assert state_of("/perf", listener) == State.PRIMARY_STATE_INACTIVE  # it does so once, at the start

    yield  # launch now interrupts what it started, and waits for it

    assert exit_codes == [0]
