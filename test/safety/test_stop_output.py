import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import START_NS, S
from torchperf_ros.safety.stop_output import PATH, TimedPath, can_stop, warm_up_stop

from ..stage.conftest import STORE

TYPES = STORE.types


def stamp(at_ns):
    return TYPES["builtin_interfaces/msg/Time"](sec=at_ns // S, nanosec=at_ns % S)


def path(x_positions, step_ns=S // 10, frame_id="odom", own_frame_ids=None, endianness="little"):
    header, point = TYPES["std_msgs/msg/Header"], TYPES["geometry_msgs/msg/Point"]
    pose, turn = TYPES["geometry_msgs/msg/Pose"], TYPES["geometry_msgs/msg/Quaternion"]
    frame_ids, poses = own_frame_ids or [frame_id] * len(x_positions), []
    for number, (x, own_id) in enumerate(zip(x_positions, frame_ids, strict=True)):
        place = pose(point(x=float(x), y=1.0, z=2.0), turn(x=0.0, y=0.0, z=number / 100, w=0.8))
        head = header(stamp=stamp(START_NS + number * step_ns), frame_id=own_id)
        poses.append(TYPES["geometry_msgs/msg/PoseStamped"](head, place))
    message = TYPES[PATH](header=header(stamp=stamp(START_NS - S), frame_id=frame_id), poses=poses)
    return bytes(STORE.serialize_cdr(message, PATH, little_endian=endianness == "little"))


def stopped(data, start_ns, deceleration=3.0):
    """The stop as another reader finds it, None where there is none."""
    timed = TimedPath.read(data)
    stop = None if timed is None else timed.stop(start_ns, deceleration)
    return None if stop is None else STORE.deserialize_cdr(stop.bytes(), PATH)


def stamps_ns(message):
    return [pose.header.stamp.sec * S + pose.header.stamp.nanosec for pose in message.poses]


@pytest.mark.parametrize("endianness", ["little", "big"])
@pytest.mark.parametrize(
    "frame_id", ["", "m", "ma", "map", "odom", "odomx", "odomxy", "odomxyz"]
)  # every alignment
def test_given_a_path_when_stopped_then_another_reader_finds_a_braking_path_in_the_bytes(
    frame_id, endianness
):
    speed, braking_ns = 10.0, START_NS + S // 2
    data = path(np.arange(31) * speed * 0.1, frame_id=frame_id, endianness=endianness)
    message = stopped(data, braking_ns, deceleration=5.0)
    x = [pose.pose.position.x for pose in message.poses]
    assert len(x) == 31
    assert x[0] == pytest.approx(5.0)
    assert x[-1] == pytest.approx(5.0 + speed**2 / 10.0)
    at_ns = stamps_ns(message)
    assert at_ns[0] == braking_ns
    assert at_ns == sorted(at_ns)
    assert at_ns[-1] == pytest.approx(braking_ns + 3 * S)
    assert np.all(np.diff(x) >= 0)
    assert message.header.stamp.sec * S + message.header.stamp.nanosec == START_NS - S
    assert {message.header.frame_id, *(pose.header.frame_id for pose in message.poses)} == {frame_id}
    assert {(pose.pose.position.y, pose.pose.position.z) for pose in message.poses} == {(1.0, 2.0)}


def test_given_a_turning_path_when_stopped_then_each_pose_is_turned_as_the_path_is_there():
    message = stopped(path(np.arange(31.0)), START_NS + S // 2)
    for pose in message.poses:
        assert 0 <= pose.pose.position.x - 100 * pose.pose.orientation.z <= 1 + 1e-9


def test_given_thousands_of_poses_when_stopped_then_the_stop_has_two_hundred_on_the_same_curve():
    message = stopped(path(np.arange(3000) * 0.01, step_ns=S // 1000), START_NS + S, deceleration=5.0)
    assert len(message.poses) == 200
    x, after_s = message.poses[60].pose.position.x, (stamps_ns(message)[60] - START_NS - S) / S
    assert x == pytest.approx(10.0 + 10.0 * after_s - 2.5 * after_s**2)
    assert message.poses[-1].pose.position.x == pytest.approx(20.0)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(path([]), id="no pose"),
        pytest.param(path([1.0]), id="one pose"),
        pytest.param(path(np.arange(31.0), step_ns=0), id="poses without stamps of their own"),
        pytest.param(path(np.arange(31.0), step_ns=-S // 10), id="stamps that go back"),
        pytest.param(path([0.0, 1.0, math.nan]), id="a position that is not finite"),
        pytest.param(path(np.arange(3.0), own_frame_ids=["map", "map", "odo"]), id="poses in two frames"),
        pytest.param(
            path(np.arange(3.0), own_frame_ids=["map", "odometry", "map"]), id="frames of different lengths"
        ),
        pytest.param(path(np.arange(10_001.0)), id="too many poses"),
        pytest.param(path(np.arange(31.0))[:-8], id="cut off"),
        pytest.param(b"\x00\x01\x00\x00" + b"\xff" * 40, id="no path"),
        pytest.param(b"\x00", id="no message"),
    ],
)
def test_given_a_path_that_does_not_say_where_the_vehicle_is_when_stopped_then_there_is_no_stop(data):
    assert stopped(data, START_NS + S // 10) is None


@pytest.mark.parametrize(
    ("after_ms", "there"),
    [(-1, False), (0, True), (1500, True), (3000, True), (3001, False), (3_600_000, False)],
)
def test_given_when_braking_begins_when_it_is_outside_of_the_path_then_there_is_no_stop(after_ms, there):
    assert (stopped(path(np.arange(31.0)), START_NS + after_ms * S // 1000) is not None) is there


@settings(deadline=None)
@given(
    length=st.integers(0, 200),
    flips=st.lists(st.tuples(st.integers(0, 199), st.integers(0, 255)), max_size=8),
)
def test_given_any_bytes_when_read_then_nothing_is_raised(length, flips):
    data = bytearray(path([0.0, 1.0])[:length])
    for at, value in flips:
        if at < len(data):
            data[at] = value
    timed = TimedPath.read(bytes(data))
    if timed is not None:
        timed.stop(int(timed.stamps_ns[0]), 3.0)


def test_given_a_path_as_output_when_warmed_up_then_a_stop_was_made(monkeypatch):
    made = []
    monkeypatch.setattr(TimedPath, "stop", lambda *given: made.append(given))
    for output in (PATH, "nav_msgs/msg/Odometry", "std_msgs/msg/Header", ""):
        warm_up_stop.__wrapped__(output)
        assert can_stop(output) is (output == PATH)
    assert len(made) == 1
