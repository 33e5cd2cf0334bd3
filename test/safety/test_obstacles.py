import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rosbags.typesys import Stores, get_typestore

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes
from torchperf_ros.config.safety_options import guard_options
from torchperf_ros.frame.errors import BadInput
from torchperf_ros.safety.obstacles import read_obstacles, seen_now
from torchperf_ros.safety.odometry import Motion

STORE = get_typestore(Stores.ROS2_HUMBLE)
T, ARRAY = STORE.types, "visualization_msgs/msg/MarkerArray"
OPTIONS = guard_options({})
HERE = Motion.read(odometry_bytes(x=100.0, y=50.0, yaw=math.pi / 2, speed=10.0), 10 * S)
QUARTER = {"x": 0.0, "y": 0.0, "z": math.sin(math.pi / 4), "w": math.cos(math.pi / 4)}


def read(data, frame="body", motion=HERE, before=None, received_ns=10 * S, **options):
    return read_obstacles(data, received_ns, guard_options({"guard.obstacles_frame": frame, **options}), motion, before)


def edited(data, edit, *, little=True):
    message = STORE.deserialize_cdr(data, ARRAY)
    for marker in message.markers:
        edit(marker)
    return bytes(STORE.serialize_cdr(message, ARRAY, little_endian=little))


def fill(marker):
    """Every list and text of a marker, so that nothing lies where it does in a plain one."""
    point, colour = T["geometry_msgs/msg/Point"], T["std_msgs/msg/ColorRGBA"]
    if marker.type != 0:
        marker.points = [point(x=1.0, y=2.0, z=3.0)] * 3
    marker.colors = [colour(r=1.0, g=1.0, b=1.0, a=1.0)] * 2
    marker.texture_resource, marker.text, marker.mesh_resource = "abc", "a car", "mesh://x"
    marker.texture.header.frame_id, marker.texture.format = "tex", "png"
    marker.texture.data, marker.mesh_file.data = np.arange(5, dtype=np.uint8), np.arange(3, dtype=np.uint8)
    marker.uv_coordinates = [T["visualization_msgs/msg/UVCoordinate"](u=0.5, v=0.5)] * 3
    marker.mesh_file.filename = "file"


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("little", [True, False])
@pytest.mark.parametrize("frame", ["odom", "odo", "o"])
def test_given_boxes_in_the_odometrys_frame_when_read_then_they_are_as_they_were_written(frame, little, filled):
    motion = Motion.read(odometry_bytes(frame=frame), 10 * S)
    boxes = [Box(1.0, 2.0, 0.3, 4.0, 2.0, (5.0, -6.0)), Box(-3.0, 4.0, -2.0, 0.5, 0.6, (0.0, 1.0))]
    data = edited(markers_bytes(boxes, frame=frame), fill if filled else lambda marker: None, little=little)
    found = read(data, "plan", motion)
    assert found.seen.places.tolist() == [1 + 2j, -3 + 4j]
    assert found.seen.velocities.tolist() == [5 - 6j, 1j]
    assert found.seen.yaws == pytest.approx([0.3, -2.0])
    assert found.seen.halves.tolist() == [[2.0, 1.0], [0.25, 0.3]]
    assert found.stamps_ns.tolist() == [START_NS] * 2
    assert (found.no_velocity, found.received_ns) == (0, 10 * S)


def test_given_boxes_seen_from_the_vehicle_when_read_then_they_are_turned_with_it():
    data = markers_bytes([Box(10.0, 2.0, 0.0, 4.0, 2.0, (3.0, 1.0))], frame="lidar")
    found = read(data, "body", **{"guard.sensor_forward_m": 1.5})
    assert found.seen.places[0] == pytest.approx(98 + 61.5j)  # ahead is +y, left is -x
    assert found.seen.velocities[0] == pytest.approx(-1 + 3j)
    assert found.seen.yaws[0] == pytest.approx(math.pi / 2)
    own = read(markers_bytes([Box(10.0, 2.0)], frame="base_link"))
    assert own.seen.places[0] == pytest.approx(98 + 60j)  # the odometry's own child: whatever obstacles_frame says
    assert read(markers_bytes([Box(10.0, 2.0)], frame="base_link"), "optical").seen.places[0] == pytest.approx(98 + 60j)


def optical(marker):
    """Ten metres ahead and 2 to the left of a camera: x is right, y down, z forward."""
    marker.pose.position.x, marker.pose.position.y, marker.pose.position.z = -2.0, 0.7, 10.0
    marker.scale.x, marker.scale.y, marker.scale.z = 1.9, 1.5, 4.5
    if marker.points:
        marker.points[1].x, marker.points[1].y, marker.points[1].z = -1.0, 0.0, 3.0


def test_given_boxes_in_optical_axes_when_read_then_forward_is_z_and_left_is_minus_x():
    found = read(edited(markers_bytes([Box(0.0, 0.0)], frame="camera"), optical), "optical")
    assert found.seen.places[0] == pytest.approx(98 + 60j)
    assert found.seen.velocities[0] == pytest.approx(-1 + 3j)
    assert found.seen.halves[0] == pytest.approx([2.25, 0.95])
    assert found.seen.yaws[0] == pytest.approx(math.pi / 2)

    def turn_left(marker):
        optical(marker)
        turn = marker.pose.orientation  # about y, which is down: a left turn is negative
        turn.x, turn.y, turn.z, turn.w = 0.0, -math.sin(0.2), 0.0, math.cos(0.2)

    turned = read(edited(markers_bytes([Box(0.0, 0.0)], frame="camera"), turn_left), "optical")
    assert turned.seen.yaws[0] == pytest.approx(math.pi / 2 + 0.4)


def test_given_a_roll_in_optical_axes_when_read_then_the_heading_stays():
    def roll(marker):
        optical(marker)
        turn = marker.pose.orientation  # about z, which is forward
        turn.z, turn.w = math.sin(1.0), math.cos(1.0)

    rolled = read(edited(markers_bytes([Box(0.0, 0.0)], frame="camera"), roll), "optical")
    assert rolled.seen.yaws[0] == pytest.approx(math.pi / 2)


def test_given_an_arrow_with_a_pose_when_read_then_the_velocity_is_turned_as_rviz_draws_it():
    def turn_arrows(marker):
        if marker.type == 0:
            for name, value in QUARTER.items():
                setattr(marker.pose.orientation, name, 3 * value)

    found = read(edited(markers_bytes([Box(1.0, 2.0, velocity=(4.0, 1.0))]), turn_arrows), "plan")
    assert found.seen.velocities[0] == pytest.approx(-1 + 4j)


def test_given_an_orientation_of_zeros_when_read_then_it_is_no_rotation():
    def no_turn(marker):
        marker.pose.orientation.w = 0.0

    found = read(edited(markers_bytes([Box(1.0, 2.0, velocity=(3.0, 1.0))]), no_turn), "plan")
    assert found.seen.yaws[0] == 0.0
    assert found.seen.velocities[0] == 3 + 1j


def test_given_orientations_of_any_length_when_read_then_each_turns_its_own_velocity():
    lengths = iter([1.0, 2.0, 1.0, 0.5])

    def turn(marker):
        length = next(lengths)
        for name, value in QUARTER.items():
            setattr(marker.pose.orientation, name, length * value)

    boxes = [Box(1.0, 2.0, velocity=(4.0, 1.0)), Box(3.0, 2.0, velocity=(-2.0, 5.0))]
    found = read(edited(markers_bytes(boxes), turn), "plan")
    assert found.seen.velocities == pytest.approx([-1 + 4j, -5 - 2j])
    assert found.seen.yaws == pytest.approx([math.pi / 2] * 2)


def test_given_other_markers_when_read_then_only_solids_that_are_added_are_obstacles():
    kinds = iter([(1, 3), (2, 0), (3, 0), (9, 0), (1, 2), (1, 0)])

    def set_kind(marker):
        marker.type, marker.action = next(kinds)

    data = edited(markers_bytes([Box(float(x), 0.0, velocity=None) for x in range(6)]), set_kind)
    assert read(data, "plan").seen.places.tolist() == [1, 2, 5]


@pytest.mark.parametrize("lag_ms", [-100, 0, 150])
def test_given_markers_of_another_moment_when_read_then_the_vehicle_is_where_it_was_then(lag_ms):
    data = markers_bytes([Box(10.0, 0.0)], stamp_ns=START_NS + lag_ms * S // 1000, frame="lidar")
    assert read(data).seen.places[0] == pytest.approx(100 + (60 + 10 * lag_ms / 1000) * 1j)


def test_given_an_arrow_that_does_not_begin_at_zero_when_read_then_the_velocity_is_from_point_to_point():
    def begin(marker):
        for number, point in enumerate(marker.points):
            point.x, point.y = (3.0, 2.0) if number == 0 else (8.0, -2.0)

    assert read(edited(markers_bytes([Box(1.0, 2.0)]), begin), "plan").seen.velocities.tolist() == [5 - 4j]


@pytest.mark.parametrize("stamp_ns", [0, START_NS + 11 * S])
def test_given_markers_of_another_clock_when_read_then_the_time_of_receipt_counts(stamp_ns):
    data = markers_bytes([Box(10.0, 0.0)], stamp_ns=stamp_ns, frame="lidar")
    assert read(data, received_ns=10 * S + S // 10).seen.places[0] == pytest.approx(100 + 61j)
    unstamped = Motion.read(odometry_bytes(x=100.0, y=50.0, yaw=math.pi / 2, stamp_ns=0), 10 * S)
    data = markers_bytes([Box(10.0, 0.0)], stamp_ns=5 * S, frame="lidar")
    assert read(data, motion=unstamped, received_ns=10 * S + S // 10).seen.places[0] == pytest.approx(100 + 61j)


def step(x, after_s, before, y=0.0, number=0):
    data = markers_bytes([Box(x, y, velocity=None)] if number == 0 else [], stamp_ns=START_NS + round(after_s * S))
    return read(data, "plan", before=before, received_ns=10 * S)


def test_given_no_arrow_when_an_object_moves_evenly_then_its_velocity_counts_from_the_third_array_on():
    first = step(0.0, 0.0, None)
    second = step(1.0, 0.1, first)
    third = step(2.1, 0.2, second, y=0.1)
    assert [one.no_velocity for one in (first, second, third)] == [1, 1, 0]
    assert (first.seen.velocities[0], second.seen.velocities[0]) == (0, 0)
    assert third.seen.velocities[0] == pytest.approx(11 + 1j)
    assert step(2.1, 0.2, third, y=0.1).seen.velocities[0] == pytest.approx(11 + 1j)  # the same array once more


def test_given_no_arrow_when_an_object_moves_to_either_side_then_its_velocity_is_that():
    found = None
    for number in range(3):
        found = step(-2.0 * number, 0.1 * number, found, y=3.0 - 1.5 * number)
    assert (found.no_velocity, found.seen.velocities[0]) == (0, pytest.approx(-20 - 15j))
    assert step(-6.0, 0.3, found, y=-1.25).no_velocity == 0  # by 2.5 m/s slower
    assert step(-6.0, 0.3, found, y=-1.15).no_velocity == 1
    for number in range(3):
        found = step(0.0, 1.0 + 0.1 * number, found if number else None, y=7.1 * number)
    assert found.no_velocity == 1  # 71 m/s


@pytest.mark.parametrize(
    ("places", "times_s", "known"),
    [
        ([0.0, 1.0, 2.3], [0.0, 0.1, 0.2], True),
        ([0.0, 1.0, 2.31], [0.0, 0.1, 0.2], False),  # 10 and then 13.1 m/s
        ([0.0, 7.0, 14.0], [0.0, 0.1, 0.2], True),
        ([0.0, 7.1, 14.2], [0.0, 0.1, 0.2], False),  # 71 m/s
        ([0.0, 10.0, 20.0], [0.0, 1.0, 2.0], True),
        ([0.0, 10.1, 20.2], [0.0, 1.01, 2.02], False),  # seen too long ago
        ([0.0, 0.1, 0.2], [0.0, 0.01, 0.02], True),
        ([0.0, 0.09, 0.18], [0.0, 0.009, 0.018], False),  # too soon
        ([0.0, -1.0, -2.0], [0.2, 0.1, 0.0], False),  # back in time
    ],
)
def test_given_steps_when_they_do_not_agree_then_the_object_counts_as_standing(places, times_s, known):
    found = None
    for place, after_s in zip(places, times_s, strict=True):
        found = step(place, after_s, found)
    assert found.no_velocity == (not known)
    assert bool(found.seen.velocities[0]) == known


def bad_value(name):
    def edit(marker):
        *way, last = name.split(".")
        owner = marker
        for part in way:
            owner = getattr(owner, part)
        setattr(owner, last, math.nan if last != "z" else 10_001.0)

    return edit


def two_frames(marker):
    marker.header.frame_id = "map" if marker.id else "odom"


def one_point(marker):
    marker.points = marker.points[:1]


ONE = markers_bytes([Box(1.0, 2.0)])
NOT_FINITE = "a position, orientation, size or velocity is not finite, or beyond 10000"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", r"0 bytes are no MarkerArray \(IndexError: .*\)"),
        (b"\0\1\0\0\xff\xff\xff\xff" + bytes(300), "an array of 4294967295 markers; at most 4000 are read"),
        (b"\0\1\0\0\1\0\0\0" + b"\xff" * 300, r"308 bytes are no MarkerArray \(error: .*\)"),
        (ONE[:-1], rf"the array's {len(ONE) - 1} bytes end within a marker"),
        (ONE[:-40], r"\d+ bytes are no MarkerArray \(error: .*\)"),
        (edited(ONE, bad_value("pose.position.x")), NOT_FINITE),
        (edited(ONE, bad_value("scale.z")), NOT_FINITE),
        (markers_bytes([Box(1.0, 2.0, velocity=(math.nan, 0.0))]), NOT_FINITE),
        (edited(markers_bytes([Box(1.0, 2.0)] * 2), two_frames), "one array has markers in several.*: 'map', 'odom'"),
        (edited(ONE, one_point), "an ARROW has to have two points, from the first to the second in m/s"),
    ],
)
def test_given_a_bad_array_when_read_then_the_reason_is_clear(data, text):
    with pytest.raises(BadInput, match=f"^obstacles: {text}$"):
        read(data)


def test_given_an_unknown_frame_when_only_the_plans_is_allowed_then_the_reason_says_that_tf_is_not_looked_up():
    text = (
        "obstacles: frame_id 'map' is not the odometry's, 'odom'; tf is not looked up, so obstacles_frame has to say"
        " optical or body, or the markers have to be in the odometry's frame"
    )
    with pytest.raises(BadInput, match=f"^{text}$"):
        read(markers_bytes([Box(1.0, 2.0)], frame="map"), "plan")


def test_given_a_frame_that_is_no_text_when_refused_then_it_is_named_all_the_same():
    with pytest.raises(BadInput, match="^obstacles: frame_id 'od\ufffdm' is not"):
        read(ONE.replace(b"odom\0", b"od\xffm\0"), "plan")


@pytest.mark.parametrize(
    ("motion", "received_ns", "there"),
    [(None, 10 * S, False), (HERE, 10 * S + 200_000_000, True), (HERE, 10 * S + 200_000_001, False)],
)
def test_given_no_fresh_odometry_when_read_then_boxes_have_no_place_but_nothing_needs_none(motion, received_ns, there):
    assert len(read(markers_bytes([]), motion=motion, received_ns=received_ns).seen.yaws) == 0
    if there:
        assert len(read(ONE, motion=motion, received_ns=received_ns).seen.yaws) == 1
    else:
        with pytest.raises(BadInput, match="^obstacles: there is no fresh odometry, which says where the vehicle saw "):
            read(ONE, motion=motion, received_ns=received_ns)


def test_given_sources_when_looked_at_now_then_they_are_led_on_and_what_is_missing_is_named():
    one = read(markers_bytes([Box(1.0, 2.0, velocity=(10.0, 0.0))], stamp_ns=START_NS - S // 10), "plan")
    stamps_ns = iter([0, START_NS - S // 20])

    def stamp(marker):
        marker.header.stamp.sec, marker.header.stamp.nanosec = divmod(next(stamps_ns), S)

    two = read(edited(markers_bytes([Box(5.0, 0.0, velocity=None), Box(6.0, 0.0, velocity=None)]), stamp), "plan")
    options = guard_options({"guard.obstacles": ["a", "b", "c"]})
    seen, missing = seen_now((one, None, two), options, 10 * S + S // 5, START_NS, 0.15)
    assert missing == {1: "were not received"}
    assert seen.places == pytest.approx([2 + 2j, 5, 6])
    assert seen.response_s == pytest.approx([0.3, 0.35, 0.3])  # frame 0.15 s, receipt 0.2 s; 0.15 s of actuation
    assert seen.halves.shape == (3, 2)
    seen, missing = seen_now((one,), OPTIONS, 10 * S, START_NS + 250_000_000, math.nan)
    assert missing == {0: "are 350 ms old"}
    assert not len(seen.yaws)
    seen, missing = seen_now((one,), OPTIONS, 10 * S, START_NS + 200_000_000, math.nan)
    assert missing == {}
    assert seen.response_s == pytest.approx([0.45])
    none = read(markers_bytes([]))
    assert seen_now((none,), OPTIONS, 10 * S + 300_000_001, START_NS, 0.0)[1] == {0: "are 300 ms old"}
    assert seen_now((none,), OPTIONS, 10 * S + 300_000_000, START_NS, 0.0)[1] == {}


@pytest.mark.parametrize(
    ("stamp_ns", "age_s"),
    [(0, 0.2), (START_NS + 1, 0.2), (START_NS, 0.0), (START_NS - S // 4, 0.25), (START_NS - 11 * S, 0.2)],
)
@pytest.mark.parametrize("alone", [True, False])
def test_given_a_stamp_of_another_clock_when_looked_at_now_then_it_is_as_old_as_its_receipt(stamp_ns, age_s, alone):
    stamps_ns = iter([stamp_ns] * 2 + [START_NS - S // 10] * 2)

    def stamp(marker):
        marker.header.stamp.sec, marker.header.stamp.nanosec = divmod(next(stamps_ns), S)

    boxes = [Box(1.0, 2.0, velocity=(10.0, 20.0)), Box(50.0, 0.0)][: 1 if alone else 2]
    one = read(edited(markers_bytes(boxes), stamp), "plan")
    seen, missing = seen_now((one,), OPTIONS, 10 * S + S // 5, START_NS, 0.0)
    assert missing == {}
    assert seen.places[0] == pytest.approx(complex(1 + 10 * age_s, 2 + 20 * age_s), abs=1e-6)
    assert seen.response_s[0] == pytest.approx(0.15 + age_s, abs=1e-6)


@settings(max_examples=80)
@given(length=st.integers(0, 700), flips=st.lists(st.tuples(st.integers(0, 699), st.integers(0, 255)), max_size=8))
def test_given_any_bytes_when_read_then_there_are_boxes_or_a_reason(length, flips):
    data = bytearray(markers_bytes([Box(1.0, 2.0), Box(3.0, 4.0)])[:length])
    for at, value in flips:
        if at < len(data):
            data[at] = value
    try:
        found = read(bytes(data))
    except BadInput as error:
        assert "obstacles: " in str(error)  # noqa: PT017 - either is right
    else:
        assert np.isfinite(found.seen.places).all()
        assert np.isfinite(found.seen.velocities).all()
