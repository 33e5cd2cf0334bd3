import numpy as np
import pytest
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.core.errors import BadInput
from torchperf_ros.core.stop_output import PATH, can_stop, stop_path

STORE = get_typestore(Stores.ROS2_HUMBLE)
TYPES = STORE.types
S = 1_000_000_000
START_NS = 1_700_000_000 * S


def stamp(at_ns):
    return TYPES["builtin_interfaces/msg/Time"](sec=at_ns // S, nanosec=at_ns % S)


def path(x_positions, step_ns=S // 10, frame_id="odom"):
    header, point = TYPES["std_msgs/msg/Header"], TYPES["geometry_msgs/msg/Point"]
    turn = TYPES["geometry_msgs/msg/Quaternion"]
    poses = [
        TYPES["geometry_msgs/msg/PoseStamped"](
            header=header(stamp=stamp(START_NS + number * step_ns), frame_id=frame_id),
            pose=TYPES["geometry_msgs/msg/Pose"](
                position=point(x=float(x), y=1.0, z=2.0), orientation=turn(x=0.0, y=0.0, z=0.6, w=0.8)
            ),
        )
        for number, x in enumerate(x_positions)
    ]
    message = TYPES[PATH](header=header(stamp=stamp(START_NS - S), frame_id=frame_id), poses=poses)
    return bytes(STORE.serialize_cdr(message, PATH))


def test_given_a_path_when_stopped_then_another_reader_finds_a_braking_path_in_the_bytes():
    speed, braking_ns = 10.0, START_NS + S // 2
    stopped = stop_path(path(np.arange(31) * speed * 0.1), braking_ns, deceleration=5.0)
    assert stopped is not None
    message = STORE.deserialize_cdr(stopped, PATH)
    x = [pose.pose.position.x for pose in message.poses]
    at_ns = [pose.header.stamp.sec * S + pose.header.stamp.nanosec for pose in message.poses]
    assert x[0] == pytest.approx(5.0)
    assert x[-1] == pytest.approx(5.0 + speed**2 / 10.0)
    assert at_ns[0] == braking_ns
    assert at_ns == sorted(at_ns)
    assert at_ns[-1] == pytest.approx(braking_ns + 3 * S)
    assert np.all(np.diff(x) >= 0)


def test_given_a_path_when_stopped_then_its_own_stamp_frame_and_orientations_stay():
    stopped = stop_path(path(np.arange(31.0), frame_id="map"), START_NS, deceleration=3.0)
    assert stopped is not None
    message = STORE.deserialize_cdr(stopped, PATH)
    assert message.header.stamp.sec * S + message.header.stamp.nanosec == START_NS - S
    assert message.header.frame_id == "map"
    assert {pose.header.frame_id for pose in message.poses} == {"map"}
    assert {pose.pose.orientation.w for pose in message.poses} == {0.8}
    assert {(pose.pose.position.y, pose.pose.position.z) for pose in message.poses} == {(1.0, 2.0)}


def test_given_a_path_without_poses_when_stopped_then_there_is_no_stop():
    assert stop_path(path([]), START_NS, deceleration=3.0) is None


def test_given_bytes_that_are_no_path_when_stopped_then_they_are_bad_input():
    with pytest.raises(BadInput, match="not a nav_msgs/msg/Path"):
        stop_path(b"\x00\x01\x00\x00" + b"\xff" * 40, START_NS, deceleration=3.0)


@pytest.mark.parametrize(
    ("output", "stoppable"),
    [(PATH, True), ("nav_msgs/msg/Odometry", False), ("std_msgs/msg/Header", False), ("", False)],
)
def test_given_an_output_type_when_asked_then_only_a_path_can_stop(output, stoppable):
    assert can_stop(output) is stoppable
