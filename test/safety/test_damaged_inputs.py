"""Any value in a field that the guard reads: no plan is accepted that would be refused without it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, straight_plan
from torchperf_ros.api.outcome import GuardVerdict
from torchperf_ros.safety.guard import Guard
from torchperf_ros.settings.safety_options import guard_options

from ..stage.conftest import STORE

ARRAY, ODOMETRY, PATH = "visualization_msgs/msg/MarkerArray", "nav_msgs/msg/Odometry", "nav_msgs/msg/Path"
POINT = STORE.types["geometry_msgs/msg/Point"]
NOW_NS, LATER_NS = 10 * S, S // 100
PLAN = straight_plan()
WALL, FAR = Box(12.0, 0.0, velocity=None), Box(90.0, 20.0)
DOUBLES = st.one_of(
    st.floats(),  # NaN and Inf, too
    st.floats(0.0, 2.3e-308, allow_subnormal=True),
    st.integers(0x7F00_0000_0000, 0x7FFF_FFFF_FFFF).map(
        lambda one: np.int64(one).view(np.float64).item()
    ),  # a pointer
    st.sampled_from(
        [0.0, -0.0, 1.0, -1.0, 1e300, -1e300, 1.7e308, 5e-324, 1e8, 100.0, math.nan, math.inf, -math.inf]
    ),
)
SIGNED, UNSIGNED = st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1)
STAMPS = st.tuples(
    st.one_of(SIGNED, st.integers(START_NS // S - 20, START_NS // S + 20), st.just(0)),
    st.one_of(UNSIGNED, st.just(0)),
)
FRAMES = st.sampled_from(["odom", "base_link", "map", "", "lidar"])


def guarded(array, odometry=None, frame="plan", before=None):
    guard = Guard(guard_options({"guard.act": ["all"], "guard.obstacles_frame": frame}))
    guard.moved(odometry_bytes(), NOW_NS)
    if odometry is not None:
        guard.moved(odometry, NOW_NS)
    if before is not None:
        guard.saw(0, before, NOW_NS)
    guard.saw(0, array, NOW_NS)
    return guard


def verdict(guard, plan=PLAN):
    return guard.check(plan, NOW_NS + LATER_NS, START_NS + LATER_NS, 60.0).verdict


def edited(data, kind, edit):
    message = STORE.deserialize_cdr(data, kind)
    edit(message)
    return bytes(STORE.serialize_cdr(message, kind))


def set_field(message, way, value):
    *owners, last = way.split(".")
    for name in owners:
        message = message[int(name)] if name.isdigit() else getattr(message, name)
    setattr(message, last, value)


MARKER_FIELDS = {
    **dict.fromkeys([f"pose.position.{axis}" for axis in "xyz"], DOUBLES),
    **dict.fromkeys([f"pose.orientation.{axis}" for axis in "xyzw"], DOUBLES),
    **dict.fromkeys([f"scale.{axis}" for axis in "xyz"], DOUBLES),
    "color.a": st.floats(width=32),
    "lifetime.sec": SIGNED,
    "lifetime.nanosec": UNSIGNED,
    "header.stamp.sec": STAMPS.map(lambda one: one[0]),
    "header.stamp.nanosec": UNSIGNED,
    "header.frame_id": FRAMES,
    "ns": st.sampled_from(["car", "", "other"]),
    "id": SIGNED,
    "type": st.one_of(st.integers(-1, 13), SIGNED),
    "action": st.one_of(st.integers(-1, 5), SIGNED),
    "text": st.sampled_from(["", "x" * 9]),
    "frame_locked": st.booleans(),
    "points": (
        st.lists(st.tuples(DOUBLES, DOUBLES, DOUBLES), max_size=3).map(
            lambda found: [POINT(x=x, y=y, z=z) for x, y, z in found]
        )
    ),
}
FIELDS = st.sampled_from(sorted(MARKER_FIELDS)).flatmap(
    lambda way: st.tuples(st.just(way), MARKER_FIELDS[way])
)


def test_given_the_wall_when_nothing_is_damaged_then_the_plan_is_refused_and_without_it_accepted():
    assert verdict(guarded(markers_bytes([WALL, FAR]))) not in {GuardVerdict.ACCEPT, GuardVerdict.UNCHECKED}
    assert verdict(guarded(markers_bytes([FAR]))) is GuardVerdict.ACCEPT


def means_something_else(way, value):
    """Whether the field's value says, readably, that there is no wall in our way."""
    if way in {"pose.position.x", "pose.position.y"}:
        return abs(value) <= 1e8
    return (way == "type" and value == 9) or (way == "action" and value in {2, 3})


@settings(max_examples=200)
@given(changes=st.lists(FIELDS, min_size=1, max_size=4), alone=st.booleans())
def test_given_an_obstacle_in_the_way_when_any_of_its_fields_is_damaged_then_the_plan_is_not_accepted(
    changes, alone
):
    changes = [one for one in changes if not means_something_else(*one)]

    def damage(array):
        for way, value in changes:
            set_field(array.markers[0], way, value)

    array = edited(markers_bytes([WALL] if alone else [WALL, FAR]), ARRAY, damage)
    for before in (None, markers_bytes([FAR])):
        assert verdict(guarded(array, before=before)) is not GuardVerdict.ACCEPT


@settings(max_examples=100)
@given(
    ends=st.tuples(DOUBLES, DOUBLES, DOUBLES, DOUBLES),
    turn=st.tuples(DOUBLES, DOUBLES),
    count=st.integers(0, 3),
)
def test_given_an_obstacle_in_the_way_when_its_arrow_is_damaged_then_only_a_readable_velocity_clears_the_way(
    ends, turn, count
):
    def damage(array):
        arrow = array.markers[1]
        arrow.points = [
            POINT(x=ends[0], y=ends[1], z=0.0),
            POINT(x=ends[2], y=ends[3], z=0.0),
            POINT(0.0, 0.0, 0.0),
        ][:count]
        arrow.pose.orientation.z, arrow.pose.orientation.w = turn

    array = edited(markers_bytes([WALL._replace(velocity=(0.0, 0.0)), FAR]), ARRAY, damage)
    velocity = math.hypot(ends[2] - ends[0], ends[3] - ends[1])  # NaN compares false
    length = math.hypot(*turn)
    if not (count == 2 and velocity <= 100.1 and (0.09 <= length <= 10.1 or length == 0.0)):
        assert verdict(guarded(array)) is not GuardVerdict.ACCEPT


@settings(max_examples=150)
@given(
    changes=st.lists(FIELDS, max_size=6),
    first=st.booleans(),
    is_arrow=st.booleans(),
    frame=st.sampled_from(["plan", "optical", "body"]),
)
def test_given_a_refused_plan_when_any_other_marker_is_added_then_it_is_not_accepted(
    changes, first, is_arrow, frame
):
    base = markers_bytes([WALL._replace(velocity=(0.0, 0.0)), FAR])

    def add(array):
        one = STORE.deserialize_cdr(base, ARRAY).markers[3 if is_arrow else 2]
        for way, value in changes:
            set_field(one, way, value)
        array.markers = [one, *array.markers] if first else [*array.markers, one]

    assert verdict(guarded(edited(base, ARRAY, add), frame=frame)) is not GuardVerdict.ACCEPT


@settings(max_examples=50)
@given(boxes=st.lists(st.tuples(*[st.floats(-200, 200)] * 2, *[st.floats(-30, 30)] * 2), max_size=12))
def test_given_a_refused_plan_when_more_obstacles_come_then_it_is_not_accepted(boxes):
    more = [Box(x, y, velocity=(vx, vy)) for x, y, vx, vy in boxes]
    assert verdict(guarded(markers_bytes([WALL, *more]))) is not GuardVerdict.ACCEPT
    assert verdict(guarded(markers_bytes([*more, WALL]))) is not GuardVerdict.ACCEPT


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 255])
def test_given_a_wrong_number_of_markers_when_read_then_the_plan_is_not_accepted(count):
    array = bytearray(markers_bytes([FAR, WALL]))
    assert array[4] == 3  # boxes, and the far one's ARROW
    array[4] = count
    assert verdict(guarded(bytes(array))) is not GuardVerdict.ACCEPT


def test_given_an_array_that_is_cut_off_anywhere_when_read_then_the_plan_is_not_accepted():
    array = markers_bytes([FAR, WALL])
    for length in range(len(array)):
        for before in (None, markers_bytes([FAR])):
            assert verdict(guarded(array[:length], before=before)) is not GuardVerdict.ACCEPT, length


ODOMETRY_FIELDS = {
    **dict.fromkeys([f"pose.pose.position.{axis}" for axis in "xyz"], DOUBLES),
    **dict.fromkeys([f"pose.pose.orientation.{axis}" for axis in "xyzw"], DOUBLES),
    **dict.fromkeys(
        [f"twist.twist.{kind}.{axis}" for kind in ("linear", "angular") for axis in "xyz"], DOUBLES
    ),
    "header.stamp.sec": STAMPS.map(lambda one: one[0]),
    "header.stamp.nanosec": UNSIGNED,
    "header.frame_id": FRAMES,
    "child_frame_id": FRAMES,
}
OF_ODOMETRY = st.sampled_from(sorted(ODOMETRY_FIELDS)).flatmap(
    lambda way: st.tuples(st.just(way), ODOMETRY_FIELDS[way])
)


@settings(max_examples=150)
@given(changes=st.lists(OF_ODOMETRY, min_size=1, max_size=3), boxes=st.sampled_from([[WALL], [WALL, FAR]]))
def test_given_a_refused_plan_when_odometry_is_damaged_then_it_is_not_accepted(changes, boxes):
    def damage(message):
        for way, value in changes:
            set_field(message, way, value)

    odometry = edited(odometry_bytes(), ODOMETRY, damage)
    assert verdict(guarded(markers_bytes(boxes), odometry)) is not GuardVerdict.ACCEPT


PLAN_FIELDS = {
    **dict.fromkeys([f"pose.position.{axis}" for axis in "xyz"], DOUBLES),
    **dict.fromkeys([f"pose.orientation.{axis}" for axis in "xyzw"], DOUBLES),
    "header.stamp.sec": STAMPS.map(lambda one: one[0]),
    "header.stamp.nanosec": UNSIGNED,
    "header.frame_id": FRAMES,
}
OF_PLAN = st.tuples(st.integers(0, 30), st.sampled_from(sorted(PLAN_FIELDS))).flatmap(
    lambda one: st.tuples(st.just(f"poses.{one[0]}.{one[1]}"), PLAN_FIELDS[one[1]])
)


@settings(max_examples=150)
@given(changes=st.lists(OF_PLAN, min_size=1, max_size=3), header=STAMPS, frame=FRAMES)
def test_given_a_refused_plan_when_its_own_fields_are_damaged_then_it_is_not_accepted(
    changes, header, frame
):
    def damage(message):
        message.header.stamp.sec, message.header.stamp.nanosec = header
        message.header.frame_id = frame
        for way, value in changes:
            set_field(message, way, value)

    plan = edited(PLAN, PATH, damage)
    assert verdict(guarded(markers_bytes([WALL, FAR])), plan) is not GuardVerdict.ACCEPT
