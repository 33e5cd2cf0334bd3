import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, plan_bytes
from torchperf_ros.api.errors import BadInput
from torchperf_ros.safety.guard import Guard
from torchperf_ros.safety.limits import Track
from torchperf_ros.safety.obstacles import read_obstacles, seen_now
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.safety_options import guard_options

from ..stage.conftest import STORE

T, ARRAY = STORE.types, "visualization_msgs/msg/MarkerArray"
OPTIONS = guard_options({})
HERE = Motion.read(odometry_bytes(x=100.0, y=50.0, yaw=math.pi / 2, speed=10.0), 10 * S)
QUARTER = {"x": 0.0, "y": 0.0, "z": math.sin(math.pi / 4), "w": math.cos(math.pi / 4)}


def read(data, frame="body", motion=HERE, before=None, received_ns=10 * S, given_ns=0, **options):
    options = guard_options({"guard.obstacles_frame": frame, **options})
    return read_obstacles(data, received_ns, options, motion, before, given_ns)


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
def test_given_boxes_in_the_odometrys_frame_when_read_then_they_are_as_they_were_written(
    frame, little, filled
):
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
    assert own.seen.places[0] == pytest.approx(
        98 + 60j
    )  # the odometry's own child, for any obstacles_frame
    assert read(markers_bytes([Box(10.0, 2.0)], frame="base_link"), "optical").seen.places[
        0
    ] == pytest.approx(98 + 60j)


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
    assert read(data, motion=unstamped, received_ns=10 * S + S // 10).seen.places[0] == pytest.approx(
        100 + 61j
    )


def step(x, after_s, before, y=0.0, number=0, **more):
    data = markers_bytes(
        [Box(x, y, velocity=None)] if number == 0 else [], stamp_ns=START_NS + round(after_s * S)
    )
    received_ns = 10 * S + round(after_s * S)
    motion = more.pop("motion", replace(HERE, received_ns=received_ns))
    return read(data, "plan", motion, before, received_ns, **more)


def test_given_no_arrow_when_an_object_moves_evenly_then_its_velocity_counts_from_the_third_array_on():
    found, unknown = None, []
    for number in range(12):
        found = step(110.0 + number, 0.1 * number, found, y=50.0 - 0.3 * number)
        unknown.append(found.no_velocity)
        if number == 1:
            assert (found.seen.velocities[0], found.seen.unsure[0]) == (0, 15.0)
    assert unknown == [1, 1] + [0] * 10
    assert found.seen.velocities[0] == pytest.approx(10 - 3j, abs=0.5)
    assert 0.0 < found.seen.unsure[0] < 0.6
    again = step(121.0, 1.1, found, y=46.7)  # the same array once more
    assert again.seen.velocities[0] == pytest.approx(found.seen.velocities[0])
    assert again.no_velocity == 0


def ahead(speed, seed, arrays=40, first_m=30.0):
    """Velocities towards us, array by array, of what is ahead and drives away at a speed, with 0.1 m of noise."""
    rng, found, along = np.random.default_rng(seed), None, []
    for number in range(arrays):
        x, y = rng.normal(0.0, 0.1, 2) + (100.0, 50.0 + first_m + speed * 0.1 * number)
        found = step(x, 0.1 * number, found, y=y)
        along.append(-found.seen.velocities[0].imag)
    return np.array(along)


def test_given_noise_when_what_is_ahead_stands_then_it_hardly_ever_seems_to_reverse():
    towards = np.concatenate([ahead(0.0, seed)[2:] for seed in range(20)])
    assert np.mean(towards > 1e-6) < 0.1


@settings(max_examples=20, deadline=None)
@given(speed=st.floats(1.5, 8.0), seed=st.integers(0, 1000))
def test_given_noise_when_anything_ahead_reverses_then_it_is_known_within_a_second(speed, seed):
    towards = ahead(-speed, seed)
    assert (towards[10:] > 0.4 * speed).all()


FRONT_M = OPTIONS.vehicle.length_m - OPTIONS.vehicle.rear_m


def stops_m(speed):
    """The way of a vehicle that does nothing while an array counts, and then brakes."""
    waits_s = (OPTIONS.obstacles_timeout_ms + OPTIONS.actuation_delay_ms) / 1000
    faster = speed + OPTIONS.rss_accel * waits_s
    return 0.5 * (speed + faster) * waits_s + faster**2 / (2 * OPTIONS.rss_brake)


@settings(max_examples=40, deadline=None)
@given(
    own_speed=st.floats(0.0, 20.0),
    room_m=st.floats(-10.0, 10.0),
    lead_speed=st.floats(0.0, 1.0),
    left_m=st.sampled_from([0.0, 6.0]),
    seed=st.integers(0, 1000),
)
def test_given_noise_when_braking_could_not_wait_or_nothing_is_ahead_then_what_may_stand_is_never_faster_than_it_seems(
    own_speed, room_m, lead_speed, left_m, seed
):
    rng, found = np.random.default_rng(seed), None
    motion = Motion.read(odometry_bytes(speed=own_speed), 10 * S)
    at_m = FRONT_M + stops_m(own_speed) + room_m + 3.0
    for number in range(20):
        x, y = rng.normal(0.0, 0.1, 2) + (at_m + lead_speed * 0.1 * number, left_m)
        now = replace(motion, received_ns=10 * S + number * S // 10)
        found = step(x, 0.1 * number, found, y=y, motion=now)
        (mean,), along = found.tracks.mean()[1], found.seen.velocities[0].real
        rear_m = found.seen.places[0].real - np.hypot(*found.seen.halves[0])
        can_wait = left_m == 0.0 and rear_m - FRONT_M >= stops_m(own_speed) + OPTIONS.margin_m - 1e-6
        assert can_wait or along <= max(mean.real, 0.0) + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    own_speed=st.floats(0.0, 20.0),
    room_m=st.floats(-8.0, -0.1) | st.floats(0.1, 8.0),
    turned=st.floats(-3.1, 3.1),
)
def test_given_something_new_when_braking_can_wait_then_it_counts_once_it_was_seen_twice_and_else_at_once(
    own_speed, room_m, turned
):
    found, motion = None, Motion.read(odometry_bytes(speed=own_speed), 10 * S)
    at = (FRONT_M + OPTIONS.margin_m + stops_m(own_speed) + np.hypot(2.25, 0.95) + room_m) * np.exp(
        1j * turned
    )
    for number in range(4):
        boxes = [Box(200.0, 0.0, velocity=None)]
        boxes += [Box(at.real, at.imag, velocity=None)] * (number >= 2)
        data = markers_bytes(boxes, stamp_ns=START_NS + number * S // 10)
        now = replace(motion, received_ns=10 * S + number * S // 10)
        found = read(data, "plan", now, found, now.received_ns)
        counts = [0, 0, int(room_m < 0.0), 1][number]
        assert np.count_nonzero(np.abs(found.seen.places - at) < 0.5) == counts


@pytest.mark.parametrize("seed", range(3))
def test_given_noise_when_a_queue_moves_off_then_its_last_car_counts_as_moving_before_it_is_sure(seed):
    rng, found, counted = np.random.default_rng(seed), None, []
    motion = Motion.read(odometry_bytes(speed=0.0), 10 * S)
    for number in range(70):
        driven_s = max(0.1 * number - 6.0, 0.0)
        x, y = rng.normal(0.0, 0.1, 2) + (6.8 + 0.3 * driven_s**2, 0.0)
        now = replace(motion, received_ns=10 * S + number * S // 10)
        found = step(x, 0.1 * number, found, y=y, motion=now)
        if number >= 62:
            counted.append(found.seen.velocities[0].real - 0.6 * driven_s)
    assert np.mean(counted) > -0.25


@settings(max_examples=8, deadline=None)
@given(
    own_speed=st.floats(0.0, 15.0),
    room_m=st.floats(1.0, 25.0),
    lead_speed=st.sampled_from([0.0, 0.0, 1.0]),
    sigma_m=st.sampled_from([0.05, 0.1, 0.2]),
    hurries=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_given_a_planner_that_insists_when_what_is_ahead_stands_or_stops_then_noise_never_lets_the_vehicle_reach_it(
    own_speed, room_m, lead_speed, sigma_m, hurries, seed
):
    """The lead drives until 2 s and stops at once. The vehicle follows what is published, 10 plans a second."""
    rng, guard = np.random.default_rng(seed), Guard(guard_options({"guard.act": ["all"]}))
    x, speed, lead_m = 0.0, own_speed, FRONT_M + 2.25 + stops_m(own_speed) + room_m
    times_s = np.arange(31) * 0.1
    for number in range(50):
        ros_ns, now_ns = START_NS + number * S // 10, 10 * S + number * S // 10
        lead_m += 0.1 * lead_speed * (number < 20)
        at = rng.normal(0.0, sigma_m, 2) + (lead_m, 0.0)
        guard.moved(odometry_bytes(x, speed=speed, stamp_ns=ros_ns), now_ns)
        guard.saw(0, markers_bytes([Box(*at, velocity=None)], stamp_ns=ros_ns), now_ns)
        ways = x + speed * times_s + hurries * times_s**2
        plan = plan_bytes(times_s, ways, 0.0, 0.0, start_ns=ros_ns)
        path = Track.of(TimedPath.parse(guard.check(plan, now_ns, ros_ns, 60.0).payload), ros_ns, None)
        before, x, after = np.interp((0.05, 0.1, 0.15), path.t_s, path.place.real).tolist()
        speed = max((after - before) / 0.1, 0.0)
        assert x + FRONT_M < lead_m - 2.25


@pytest.mark.parametrize(
    ("count", "velocity", "left_out"), [(256, None, 0), (300, None, 44), (300, (0.0, 0.0), 0)]
)
def test_given_more_objects_than_can_be_followed_when_read_then_all_count_and_the_way_is_not_clear(
    count, velocity, left_out
):
    data = markers_bytes(
        [Box(110.0 + number % 20, 50.0 + number // 20, velocity=velocity) for number in range(count)]
    )
    found = read(data, "plan")
    again = read(data, "plan", before=found)  # once more: it is no clearer
    for one in (found, again):
        assert len(one.seen.yaws) == count
        assert one.unclear == (
            f"have {left_out} objects without velocities more than can be followed" * (left_out > 0)
        )


def test_given_no_stamps_when_an_object_moves_then_receipts_say_how_fast_and_no_clock_is_learned():
    found = None
    for number in range(12):
        data = markers_bytes([Box(110.0 + 0.5 * number, 50.0, velocity=None)], stamp_ns=0)
        found = read(data, "plan", before=found, received_ns=10 * S + number * S // 100)
        assert seen_now((found,), OPTIONS, 10 * S + number * S // 100, START_NS, 0.0)[1] == {}
    assert found.clock.is_ros is None
    assert (found.stamp_ns, found.stamps_ns.tolist()) == (0, [0])
    assert found.seen.velocities[0].real == pytest.approx(50.0, abs=5.0)  # half a metre in 10 ms


def test_given_a_stamp_that_stays_when_the_object_moves_on_then_the_receipt_says_when_it_was_seen():
    found, at_s = None, 0.0
    for number in range(24):
        at_s = at_s if number in {12, 18, 19} else 0.1 * number
        data = markers_bytes(
            [Box(110.0 + 2.0 * number, 50.0, velocity=None)], stamp_ns=START_NS + round(at_s * S)
        )
        received_ns = 10 * S + number * S // 10
        motion = replace(HERE, received_ns=received_ns, stamp_ns=START_NS + number * S // 10)
        found = read(data, "plan", motion, found, received_ns)
        if number > 4:
            assert (found.no_velocity, len(found.seen.yaws)) == (0, 1), number
            assert found.seen.velocities[0] == pytest.approx(20.0, abs=1.0)
    again = read(data, "plan", motion, found, received_ns + S // 20)  # the same array: of its stamp
    assert again.tracks is found.tracks


def test_given_an_object_that_is_not_detected_when_it_was_a_moment_ago_then_it_counts_for_a_while():
    found = None
    for number in range(6):
        found = step(110.0 + number, 0.1 * number, found)
    places = []
    for number in range(6, 11):
        found = step(0.0, 0.1 * number, found, number=1)
        places.append(found.seen.places.real.tolist())
        assert seen_now((found,), OPTIONS, found.received_ns, START_NS + number * S // 10, 0.0)[1] == {}
        assert found.no_velocity == 0
    assert [len(one) for one in places] == [1, 1, 1, 0, 0]
    assert places[:3] == [pytest.approx([116.0 + number], abs=0.3) for number in range(3)]
    found = step(0.0, 2.0, found, number=1, motion=None)
    assert len(found.seen.yaws) == 0  # without odometry nothing is known, and an empty array is one


ONE = markers_bytes([Box(1.0, 2.0)])
TWO = markers_bytes([Box(1.0, 2.0), Box(5.0, 6.0)])
POSITION = "the position is not finite, or beyond 1e+08 m"
SIZE = "the size is not within 0.01 and 10000 m"
TURN = "the orientation is not 0.1 to 10 long"
VELOCITY = "the velocity is not finite, beyond 100 m/s, or there are several"
ACTION = "the action is none of ADD, DELETE and DELETEALL"
STAMP = "the stamp is no time"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", r"0 bytes are no MarkerArray \(IndexError: .*\)"),
        (b"\0\1\0\0\1", r"5 bytes are no MarkerArray \(error: .*\)"),
        (b"\0\1\0\0\xff\xff\xff\xff" + bytes(300), "an array of 4294967295 markers; at most 4000 are read"),
        (b"\0\1\0\0\1\0\0\0" + b"\xff" * 300, r"308 bytes are no MarkerArray \(error: .*\)"),
        (ONE[: len(ONE) // 3], r"\d+ bytes are no MarkerArray \(error: .*\)"),
    ],
    ids=range(5),
)
def test_given_bytes_that_are_no_array_when_read_then_the_reason_is_clear(data, text):
    with pytest.raises(BadInput, match=f"^obstacles: {text}$"):
        read(data)


def damaged(way, value):
    """Of the first object, a field that has another value."""

    def edit(marker):
        if marker.id == 0 and (marker.type == 1) != way.startswith("points"):
            *owners, last = way.split(".")
            for name in owners:
                marker = marker.points[1] if name == "points" else getattr(marker, name)
            setattr(marker, last, value)

    return edited(TWO, edit)


@pytest.mark.parametrize(
    ("way", "value", "why", "half_m"),
    [
        ("pose.orientation.w", 4.6e-310, TURN, math.hypot(2.25, 0.95)),
        ("pose.orientation.w", 1e-162, TURN, math.hypot(2.25, 0.95)),
        ("pose.orientation.w", 0.09, TURN, math.hypot(2.25, 0.95)),
        ("pose.orientation.w", 11.0, TURN, math.hypot(2.25, 0.95)),
        ("pose.orientation.z", math.nan, TURN, math.hypot(2.25, 0.95)),
        ("pose.orientation.x", math.inf, TURN, math.hypot(2.25, 0.95)),
        ("scale.x", math.nan, SIZE, math.hypot(5.0, 5.0)),
        ("scale.y", 0.0, SIZE, math.hypot(5.0, 5.0)),
        ("scale.y", -1e-300, SIZE, math.hypot(5.0, 5.0)),
        ("scale.x", 1e5, SIZE, math.hypot(5.0, 5.0)),
        ("points.x", math.nan, VELOCITY, None),
        ("points.y", 101.0, VELOCITY, None),
        ("points.z", math.inf, VELOCITY, None),
        ("action", 7, ACTION, None),
        ("header.stamp.nanosec", S, STAMP, None),
        ("header.stamp.sec", -1, STAMP, None),
    ],
)
def test_given_a_field_that_cannot_be_read_when_read_then_the_object_counts_where_it_is(
    way, value, why, half_m
):
    found = read(damaged(way, value), "plan")
    assert found.seen.places.tolist() == [1 + 2j, 5 + 6j]
    assert found.refused == 1
    assert found.why == f"marker 'car' 0: {why}"
    # In any heading it lies within its box, so that only this leaves nothing open.
    assert found.unclear == ("" if why == TURN else f"have a part that cannot be read ({found.why})")
    assert found.seen.halves[0] == pytest.approx([2.25, 0.95] if half_m is None else [half_m, half_m])
    assert found.seen.velocities[0] == 0.0
    assert all(np.isfinite(column).all() for column in found.seen)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -1.1e8])
@pytest.mark.parametrize("axis", ["x", "y"])
def test_given_an_object_without_a_place_when_read_then_the_others_count_and_the_way_is_not_clear(
    axis, value
):
    found = read(damaged(f"pose.position.{axis}", value), "plan")
    assert found.seen.places.tolist() == [5 + 6j]
    assert (found.refused, found.why) == (1, f"marker 'car' 0: {POSITION}")
    assert found.unclear == f"have a part that cannot be read ({found.why})"
    assert len(found.stamps_ns) == len(found.seen.yaws) == len(found.seen.halves) == 1


def test_given_a_stray_marker_far_away_when_read_then_it_is_counted_and_leaves_nothing_open():
    for x, is_open in ((599.0, True), (601.0, False)):  # the vehicle is at 100 and 50
        data = markers_bytes([Box(x, 50.0, length=0.0), Box(110.0, 50.0)])
        found = read(data, "plan")
        assert (found.refused, bool(found.unclear), len(found.seen.yaws)) == (1, is_open, 2)


def test_given_a_height_that_is_no_number_when_read_then_the_place_in_the_plane_counts():
    found = read(damaged("pose.position.z", 1e300), "plan")
    assert (found.seen.places.tolist(), found.refused) == ([1 + 2j, 5 + 6j], 0)

    def high(marker):
        optical(marker)
        marker.pose.position.y = math.nan

    found = read(edited(markers_bytes([Box(0.0, 0.0)], frame="camera"), high), "optical")
    assert (found.seen.places[0], found.refused) == (pytest.approx(98 + 60j), 0)


def test_given_markers_of_several_frames_when_read_then_those_of_known_ones_count():
    def frames(marker):
        marker.header.frame_id = ("odom", "lidar", "base_link")[marker.id]

    def one_more(marker):
        frames(marker)
        marker.header.frame_id = "radar" if marker.id == 2 else marker.header.frame_id

    data = markers_bytes([Box(1.0, 2.0), Box(10.0, 0.0), Box(20.0, 0.0)])
    assert read(edited(data, frames)).seen.places == pytest.approx([1 + 2j, 100 + 60j, 100 + 70j])
    found = read(edited(data, one_more))
    assert found.seen.places.tolist() == [1 + 2j]
    assert found.refused == 2
    assert found.why.startswith(
        "marker 'car' 1: frame_id 'lidar', 'radar' is not the odometry's, 'odom'; tf is not"
    )
    assert found.unclear


def test_given_an_unknown_frame_when_only_the_plans_is_allowed_then_the_reason_says_that_tf_is_not_looked_up():
    found = read(markers_bytes([Box(1.0, 2.0)], frame="map"), "plan")
    assert (
        found.why == "marker 'car' 0: frame_id 'map' is not the odometry's, 'odom'; tf is not looked up, so"
        " obstacles_frame has to say optical or body for one other frame, or the markers have to be in"
        " the odometry's frame"
    )
    assert (len(found.seen.yaws), bool(found.unclear)) == (0, True)


def test_given_a_frame_that_is_no_text_when_refused_then_it_is_named_all_the_same():
    assert "frame_id 'od\ufffdm' is not" in read(ONE.replace(b"odom\0", b"od\xffm\0"), "plan").why


def test_given_two_arrows_of_one_object_when_they_contradict_then_its_velocity_is_not_known():
    same = edited(
        markers_bytes([Box(1.0, 2.0, velocity=(3.0, 0.0)), Box(9.0, 2.0, velocity=(3.0, 0.0))]), one_id
    )
    assert (read(same, "plan").refused, read(same, "plan").seen.velocities.tolist()) == (0, [3.0, 3.0])
    other = edited(
        markers_bytes([Box(1.0, 2.0, velocity=(3.0, 0.0)), Box(9.0, 2.0, velocity=(70.0, 0.0))]), one_id
    )
    found = read(other, "plan")
    assert (found.refused, found.seen.velocities.tolist(), bool(found.unclear)) == (2, [0.0, 0.0], True)


def one_id(marker):
    marker.id = 0


def listed(kind, points, turn=None):
    """The first object as a list, with these elements."""
    point = T["geometry_msgs/msg/Point"]

    def edit(marker):
        marker.type, marker.points = kind, [point(x=x, y=y, z=0.0) for x, y in points]
        for name, value in (turn or {}).items():
            setattr(marker.pose.orientation, name, value)

    return edited(markers_bytes([Box(1.0, 2.0, length=3.0, width=2.0, velocity=None)]), edit)


@pytest.mark.parametrize("kind", [6, 7])
def test_given_a_list_when_read_then_each_element_is_an_object_in_the_markers_axes(kind):
    found = read(listed(kind, [(0.0, 0.0), (10.0, 1.0)]), "plan")
    assert found.seen.places.tolist() == [1 + 2j, 11 + 3j]
    assert found.seen.halves.tolist() == [[1.5, 1.0]] * 2
    turned = read(listed(kind, [(10.0, 1.0)], QUARTER), "plan")
    assert turned.seen.places == pytest.approx([0 + 12j])
    assert turned.seen.yaws == pytest.approx([math.pi / 2])
    assert (found.refused, found.unclear) == (0, "")
    bad = read(listed(kind, [(math.nan, 0.0), (10.0, 1.0)]), "plan")
    assert (bad.seen.places.tolist(), bad.refused, bool(bad.unclear)) == ([11 + 3j], 1, True)
    lost = read(listed(kind, [(1.0, 0.0), (10.0, 1.0)], {"w": 1e-200}), "plan")
    assert (len(lost.seen.yaws), lost.refused, bool(lost.unclear)) == (0, 2, True)


def test_given_a_list_of_too_many_elements_when_read_then_the_array_is_refused():
    with pytest.raises(BadInput, match="an array of more than 4000 objects; at most so many are read"):
        read(listed(6, [(1.0, 1.0)] * 4001), "plan")


def typed(kinds, boxes=3):
    kinds = iter(kinds)

    def edit(marker):
        marker.type = next(kinds)

    return edited(markers_bytes([Box(float(x), 0.0, velocity=None) for x in range(boxes)]), edit)


@pytest.mark.parametrize("kind", [4, 5, 8, 10, 11, 12, 77, -1])
def test_given_a_marker_that_is_not_read_when_it_is_there_then_the_way_is_not_clear(kind):
    why = f"a marker of type {kind} is not read; CUBE, SPHERE, CYLINDER and lists of them are"
    for kinds, count in (((1, kind, 1), 2), ((kind, kind, kind), 0)):
        found = read(typed(kinds), "plan")
        assert (len(found.seen.yaws), found.refused, found.why) == (count, 3 - count, why)
        assert found.unclear == f"have a part that cannot be read ({why})"


def test_given_labels_when_there_are_objects_then_they_are_none_and_alone_they_say_nothing():
    found = read(typed((1, 9, 9)), "plan")
    assert (len(found.seen.yaws), found.refused, found.unclear) == (1, 0, "")
    assert read(typed((9, 9, 9)), "plan").unclear == "have 3 labels, and no object"
    assert read(markers_bytes([]), "plan").unclear == ""


def test_given_bytes_that_end_early_or_late_when_read_then_what_was_read_counts():
    found = read(TWO[:-40], "plan")
    assert (found.seen.places.tolist(), found.seen.velocities.tolist()) == ([1 + 2j, 5 + 6j], [0, 0])
    assert found.why == f"the array's {len(TWO) - 40} bytes end within marker 3 of 4"
    assert found.unclear == f"have a part that cannot be read ({found.why})"
    assert len(read(TWO[: len(TWO) // 2], "plan").seen.yaws) == 1
    fewer = TWO[:4] + b"\2" + TWO[5:]
    found = read(fewer, "plan")
    assert found.seen.places.tolist() == [1 + 2j]
    assert found.why == f"{len(TWO) - len(ONE)} bytes lie behind the last of 2 markers"
    assert found.unclear
    assert read(TWO + bytes(7), "plan").unclear == ""


@pytest.mark.parametrize(
    ("ahead_s", "refused"),
    [((0.0, 1.0), 0), ((0.0, 1.01), 1), ((0.0, 0.0, 1e8), 1), ((0.0, 0.0, -5.0), 0), ((5.0, 0.0), 1)],
)
def test_given_a_stamp_that_is_ahead_of_the_arrays_others_when_read_then_it_is_not_believed(
    ahead_s, refused
):
    stamps_s = iter(ahead_s)

    def stamp(marker):
        marker.header.stamp.sec, marker.header.stamp.nanosec = divmod(
            START_NS + round(next(stamps_s) * S), S
        )

    data = edited(markers_bytes([Box(float(x), 0.0, velocity=None) for x, _ in enumerate(ahead_s)]), stamp)
    found = read(data, "plan")
    assert (found.refused, bool(found.unclear)) == (refused, bool(refused))
    assert found.stamp_ns == START_NS


@pytest.mark.parametrize(
    ("motion", "received_ns", "there"),
    [(None, 10 * S, False), (HERE, 10 * S + 200_000_000, True), (HERE, 10 * S + 200_000_001, False)],
)
def test_given_no_fresh_odometry_when_read_then_boxes_have_no_place_but_nothing_needs_none(
    motion, received_ns, there
):
    assert len(read(markers_bytes([]), motion=motion, received_ns=received_ns).seen.yaws) == 0
    if there:
        assert len(read(ONE, motion=motion, received_ns=received_ns).seen.yaws) == 1
    else:
        with pytest.raises(
            BadInput, match="^obstacles: there is no fresh odometry, which says where the vehicle saw "
        ):
            read(ONE, motion=motion, received_ns=received_ns)


def test_given_sources_when_looked_at_now_then_they_are_led_on_and_what_is_missing_is_named():
    one = read(markers_bytes([Box(1.0, 2.0, velocity=(10.0, 0.0))], stamp_ns=START_NS - S // 10), "plan")
    stamps_ns = iter([START_NS, START_NS - S // 20])

    def stamp(marker):
        marker.header.stamp.sec, marker.header.stamp.nanosec = divmod(next(stamps_ns), S)

    two = read(
        edited(markers_bytes([Box(5.0, 0.0, velocity=None), Box(6.0, 0.0, velocity=None)]), stamp), "plan"
    )
    options = guard_options({"guard.obstacles": ["a", "b", "c"]})
    later = 10 * S + S // 10, START_NS + S // 10
    seen, missing = seen_now((one, None, two), options, *later, 0.17)
    assert missing == {1: "were not received"}
    assert seen.places == pytest.approx([3 + 2j, 5, 6])
    assert seen.response_s == pytest.approx(
        [0.35, 0.32, 0.32]
    )  # own age 0.2, else the frame's; 0.15 s of actuation
    assert seen.halves.shape == (3, 2)
    seen, missing = seen_now((one,), OPTIONS, 10 * S + 250_000_000, START_NS + 250_000_000, math.nan)
    assert missing == {0: "are 350 ms old"}
    assert not len(seen.yaws)
    seen, missing = seen_now((one,), OPTIONS, 10 * S + 200_000_000, START_NS + 200_000_000, math.nan)
    assert missing == {}
    assert seen.response_s == pytest.approx([0.45])
    none = read(markers_bytes([]))
    assert seen_now((none,), OPTIONS, 10 * S + 301_000_000, START_NS, 0.0)[1] == {0: "are 301 ms old"}
    assert seen_now((none,), OPTIONS, 10 * S + 300_000_000, START_NS, 0.0)[1] == {}


def test_given_objects_of_several_times_when_some_are_old_then_only_those_are_left_out():
    stamps_ns = iter([START_NS, START_NS - S // 5, START_NS - S])

    def stamp(marker):
        marker.header.stamp.sec, marker.header.stamp.nanosec = divmod(next(stamps_ns), S)

    one = read(edited(markers_bytes([Box(float(x), 0.0, velocity=None) for x in range(3)]), stamp), "plan")
    assert one.stamp_ns == START_NS - S // 5
    seen, missing = seen_now((one,), OPTIONS, 10 * S + S // 10, START_NS + S // 10, 0.0)
    assert seen.places.tolist() == [0, 1]
    assert seen.response_s == pytest.approx([0.25, 0.45])
    assert missing == {0: "are 1100 ms old in part"}


@pytest.mark.parametrize(
    ("stamp_ns", "given_ns", "age_s"),
    [
        (0, 0, 0.1),
        (START_NS, 0, 0.1),
        (START_NS - S // 5, 0, 0.3),
        (0, START_NS - S // 5, 0.3),
        (5 * S, 0, 0.1),
    ],
)
def test_given_stamps_of_any_clock_when_looked_at_now_then_objects_are_as_old_as_they_can_be(
    stamp_ns, given_ns, age_s
):
    boxes = [Box(1.0, 2.0, velocity=(10.0, 20.0))]
    one = read(markers_bytes(boxes, stamp_ns=stamp_ns), "plan", given_ns=given_ns)
    seen, missing = seen_now((one,), OPTIONS, 10 * S + S // 10, START_NS + S // 10, 0.0)
    assert missing == {}
    assert seen.places[0] == pytest.approx(complex(1 + 10 * age_s, 2 + 20 * age_s), abs=1e-6)
    assert seen.response_s[0] == pytest.approx(0.15 + age_s, abs=1e-6)


@settings(max_examples=80)
@given(
    length=st.integers(0, 700),
    flips=st.lists(st.tuples(st.integers(0, 699), st.integers(0, 255)), max_size=8),
)
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
        assert all(np.isfinite(column).all() for column in found.seen)
