"""The emergency lane's rules on a virtual clock.

What is in the way, when it latches and is cleared, how it stops.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.alert import Level
from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S, VirtualClock
from torchperf_ros.api.messages import decode
from torchperf_ros.safety.emergency import OBSTACLE, SILENT, TRIGGER, Corridor, Emergency
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.settings.config import node_config

from .sensor_messages import bool_bytes, odometry_bytes, range_bytes, scan_bytes

SENSORS = {
    "sensors": ["scan LaserScan x 3.5 z 0.5", "sonar Range x 3.5 z 0.5 timeout 0", "button Bool timeout 0"],
}
PATIENT = [
    f"{line} timeout 0" for line in ("scan LaserScan x 3.5 z 0.5", "sonar Range x 3.5 z 0.5", "button Bool")
]
SCAN, SONAR, BUTTON = range(3)
ROS_S = 1_700_000_000
FREE = scan_bytes(np.full(91, np.inf))
BLOCKED = scan_bytes(np.full(91, 4.0))


def options(**changed):
    return node_config(
        {f"emergency.{key}": value for key, value in {**SENSORS, **changed}.items()}, {}
    ).emergency


def motion(speed=0.0, yaw_rate=0.0):
    return Motion.read(odometry_bytes(speed, yaw_rate), 0)


class Lane:
    """The rules, a clock, and messages that come now."""

    def __init__(self, **changed):
        self.clock = VirtualClock()
        self.rules = Emergency(options(**changed))
        self.rules.activate(self.clock())

    def see(self, *messages, sensor=SCAN, every_ms=0.0):
        for message in messages:
            self.clock.advance_ms(every_ms)
            self.rules.saw(sensor, message, self.clock())
        return self.rules.latch

    def move(self, speed=10.0, yaw_rate=0.0, **how):
        self.rules.moved(odometry_bytes(speed, yaw_rate, **how), self.clock())

    def wait(self, ms):
        self.clock.advance_ms(ms)
        self.rules.look_for_silence(self.clock())
        return self.rules.latch

    def all_well(self, speed=0.0):
        """Have each sensor say so."""
        self.see(FREE)
        self.see(range_bytes(math.inf), sensor=SONAR)
        self.see(bool_bytes(False), sensor=BUTTON)
        self.move(speed)

    def clear(self):
        return self.rules.clear(self.clock())

    def stop(self, ros_now_ns=ROS_S * NS_PER_S):
        return decode(self.rules.stop_path(self.clock(), ros_now_ns), "nav_msgs/msg/Path")


@pytest.fixture
def lane():
    lane = Lane()
    lane.move()
    return lane


# -- the corridor


def swept(corridor, x, y, *, wider_m=0.0, longer_m=0.0):
    """Which points the part of the vehicle ahead of its axle comes over, step by step; and those in it now.

    By brute force: the points as the vehicle sees them from each place on its arc.
    """
    s = np.linspace(0.0, corridor.length_m + longer_m, 200)[:, None]
    x, k = (-x if corridor.backwards else x), corridor.curvature
    chord = s * np.sinc(k * s / (2 * math.pi))
    dx, dy = x - chord * np.cos(k * s / 2), y - chord * np.sin(k * s / 2)
    own_x, own_y = np.cos(k * s) * dx + np.sin(k * s) * dy, np.cos(k * s) * dy - np.sin(k * s) * dx
    inside = (own_x >= 0) & (own_x <= corridor.ahead_m) & (np.abs(own_y) <= corridor.half_width_m + wider_m)
    return inside.any(axis=0), inside[0]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("speed", "turn"),
    [
        (6.0, 0.0),
        (6.0, 0.2),
        (6.0, -0.2),
        (7.0, 0.13),
        (8.0, -0.07),
        (9.0, 0.01),
        (4.0, 0.2),
        (0.0, 0.0),
    ],
)
def test_given_points_all_around_then_those_that_the_vehicle_will_come_over_are_in_the_corridor_and_no_others(
    speed, turn, backwards
):
    sign = -1 if backwards else 1
    corridor = Corridor.of(options(), motion(sign * speed, speed * turn * sign))
    assert corridor.curvature == pytest.approx(turn)
    backwards = corridor.backwards  # not at a standstill
    sign = -1 if backwards else 1
    x, y = (
        grid.ravel() for grid in np.meshgrid(sign * np.arange(0.03, 13.0, 0.12), np.arange(-6.0, 6.0, 0.12))
    )
    found = corridor.way_m(x, y) <= corridor.length_m
    ahead = np.abs(x) > corridor.ahead_m
    comes_over, _ = swept(corridor, x, y, wider_m=-0.01, longer_m=-0.05)
    _, is_there = swept(corridor, x, y, wider_m=0.01)
    assert found[comes_over & ~is_there].all()
    assert found[ahead & swept(corridor, x, y, wider_m=corridor.margin_m - 0.01, longer_m=-0.05)[0]].all()
    may_come_over, _ = swept(corridor, x, y, wider_m=corridor.margin_m + 0.02, longer_m=0.1)
    assert may_come_over[found].all()
    assert not found[swept(corridor, x, y, wider_m=-0.01)[1]].any()  # what is in the vehicle is the vehicle
    passed = ~swept(corridor, x, y, wider_m=0.02, longer_m=0.1)[0]
    assert not found[~ahead & passed].any()  # beside the vehicle there is no margin
    assert not (corridor.way_m(-x, y) <= corridor.length_m).any()  # nor is anything behind it in its way


def test_given_a_speed_when_the_corridor_is_made_then_it_is_as_long_as_reaction_and_braking_take():
    given_options = options(reaction_ms=500.0, deceleration=5.0, min_length_m=0.7)
    lengths = [Corridor.of(given_options, motion(speed)).length_m for speed in (0.0, 1.0, 10.0, -10.0)]
    assert lengths == pytest.approx([0.7, 0.7, 15.0, 15.0])
    assert Corridor.of(given_options, None).length_m == 0.7
    back = Corridor.of(given_options, motion(-3.0))
    assert (back.ahead_m, back.backwards) == (1.0, True)


@pytest.mark.parametrize(
    ("speed", "yaw_rate", "expected"),
    [
        (10.0, 1.0, 0.1),
        (10.0, -1.0, -0.1),
        (-10.0, 1.0, -0.1),
        (0.0, 0.05, 0.1),
        (1.0, 9.0, 0.2),
        (5.0, 0.0, 0.0),
    ],
)
def test_given_speed_and_yaw_rate_when_the_arc_is_found_then_the_vehicle_can_drive_it(
    speed, yaw_rate, expected
):
    assert Corridor.of(options(), motion(speed, yaw_rate)).curvature == pytest.approx(expected)


# -- when it latches


@pytest.mark.parametrize("scans", [1, 2, 4])
def test_given_an_obstacle_when_so_many_successive_scans_show_it_then_it_latches_with_the_last(scans):
    lane = Lane(scans=scans)
    lane.move()
    for _ in range(3):
        assert lane.see(*[BLOCKED] * (scans - 1), FREE) is None
    assert lane.see(*[BLOCKED] * (scans - 1)) is None
    latch = lane.see(BLOCKED)
    assert (latch.kind, latch.at_ns) == (OBSTACLE, lane.clock())
    assert latch.reason.startswith("scan shows ")
    assert lane.rules.triggers == {OBSTACLE: 1, TRIGGER: 0, SILENT: 0}


@pytest.mark.parametrize("points", [2, 3])
def test_given_few_points_when_they_are_fewer_than_an_obstacle_has_then_nothing_happens(lane, points):
    ranges = np.full(91, np.inf)
    ranges[45 : 45 + points] = 4.0
    assert (lane.see(*[scan_bytes(ranges)] * 5) is None) == (points == 2)


def test_given_an_obstacle_beyond_the_braking_distance_then_it_is_none_until_the_vehicle_is_faster(lane):
    far = scan_bytes(np.where(np.abs(np.linspace(-90, 90, 361)) < 2, 12.0, np.inf))
    assert lane.see(far, far, far) is None
    lane.move(11.0)
    assert lane.see(far, far) is not None


def test_given_a_range_sensor_whose_messages_are_one_point_then_as_many_have_to_follow_each_other(lane):
    near, free = range_bytes(1.0), range_bytes(math.inf)
    assert lane.see(near, near, free, near, near, sensor=SONAR) is None
    assert lane.see(near, sensor=SONAR).kind == OBSTACLE


def towards_a_wall(wall_m, braking, released_m_s=0.0):
    """Brake from 12 m/s, with a wall so far ahead that is seen after 0.4 s.

    Returns the speed at which the lane latches, 0 if it does not, and how long after the brake is released.
    """
    lane, speed, since_s = Lane(), 12.0, 0.0
    before_s = (12.0 - released_m_s) / max(braking, 0.1)
    while speed > 0.0 and lane.rules.latch is None:
        lane.clock.advance_ms(50.0)
        lane.move(speed)
        wall = np.where(np.abs(np.linspace(-1, 1, 181)) < 0.05, wall_m, np.inf)
        lane.see(FREE if since_s < 0.4 else scan_bytes(wall, first=-1.0, last=1.0))
        since_s, wall_m = since_s + 0.05, wall_m - speed * 0.05
        speed = max(speed - 0.05 * braking * (since_s < before_s), 0.0)
    return speed if lane.rules.latch else 0.0, since_s - before_s


def test_given_a_vehicle_that_brakes_already_when_it_stops_before_the_wall_by_that_then_it_is_left_alone():
    assert towards_a_wall(16.0, 5.0)[0] == 0.0  # it needs 14.7 m
    assert towards_a_wall(16.0, 3.0)[0] > 9.0  # 24 m
    assert towards_a_wall(14.0, 5.0)[0] > 6.0
    assert towards_a_wall(16.0, 0.0)[0] == 12.0


@pytest.mark.parametrize("released_m_s", [3.0, 6.0, 9.0])
def test_given_a_vehicle_that_brakes_already_when_it_no_longer_does_then_it_latches_soon(released_m_s):
    speed, after_s = towards_a_wall(16.0, 5.0, released_m_s)
    assert speed == pytest.approx(released_m_s, abs=0.3)
    assert after_s <= (
        1.0 if released_m_s == 3.0 else 0.31
    )  # at 3 m/s the wall is still far enough at first


def test_given_two_sensors_when_each_shows_something_once_then_that_is_not_twice(lane):
    lane.see(range_bytes(1.0), sensor=SONAR)
    assert lane.see(BLOCKED) is None


def test_given_a_trigger_when_it_is_true_then_it_latches_at_once_and_a_false_one_does_not(lane):
    assert lane.see(bool_bytes(False), sensor=BUTTON) is None
    assert lane.see(bool_bytes(True), sensor=BUTTON).kind == TRIGGER


@given(st.lists(st.floats(0.1, 299.0), max_size=20), st.floats(0.0, 1000.0))
def test_given_a_sensor_that_stops_then_it_latches_when_its_timeout_is_over_and_not_before(
    intervals_ms, more_ms
):
    lane = Lane(odometry_timeout_ms=60_000.0)
    lane.move()
    assert lane.see(FREE) is None
    for interval_ms in intervals_ms:
        assert lane.wait(interval_ms) is None
        lane.see(FREE)
    assert lane.rules.next_silence_ns() == lane.clock() + 300 * NS_PER_MS
    assert lane.wait(299.9) is None
    latch = lane.wait(0.1 + more_ms)
    assert latch.kind == SILENT
    assert latch.reason == f"scan has sent nothing usable for {300 + more_ms:.0f} ms"
    assert lane.rules.next_silence_ns() is None


def test_given_a_sensor_that_never_came_when_it_had_time_to_then_it_latches():
    lane = Lane(start_s=2.0)
    assert lane.wait(1999.0) is None
    assert "scan has sent nothing usable for 2000 ms" in lane.wait(1.0).reason


def test_given_odometry_that_stops_then_it_latches_as_nobody_knows_where_the_vehicle_goes(lane):
    for _ in range(3):
        latch = lane.wait(99.9) or lane.see(FREE)
    assert latch is None
    assert lane.wait(0.4).reason == "odom has sent nothing usable for 300 ms"


def test_given_scans_of_which_nothing_can_be_used_when_they_go_on_then_each_is_counted_and_the_sensor_is_silent(
    lane,
):
    lane.see(FREE)
    blind = [scan_bytes(np.zeros(91)), scan_bytes(np.full(20, np.nan)), b"\0\1\0\0", b""]
    for message in blind:
        lane.clock.advance_ms(74.0)
        lane.move()
        assert lane.see(message) is None
    assert (lane.rules.sensors[SCAN].messages, lane.rules.sensors[SCAN].refused) == (5, 4)
    assert lane.wait(3.0) is None
    assert lane.wait(1.0).reason.startswith(
        "scan has sent nothing usable for 300 ms; 0 bytes are no sensor_msgs/Las"
    )


def stamped(message, at_ms):
    return restamped(message, round(ROS_S * NS_PER_S + at_ms * NS_PER_MS))


@pytest.mark.parametrize("of_odometry", [False, True])
def test_given_scans_that_come_later_and_later_when_one_is_older_than_its_timeout_then_it_counts_as_none(
    lane, of_odometry
):
    late = lane.rules.odometry if of_odometry else lane.rules.sensors[SCAN]
    for late_ms in 50.0 * np.arange(8):  # 50 ms later each
        lane.clock.advance_ms(100.0)
        speed = 10.0 if late_ms < 350.0 else 3.0
        lane.move(speed, stamp_ns=round((lane.clock() / NS_PER_MS - of_odometry * late_ms) * NS_PER_MS))
        assert lane.see(stamped(FREE, 0.0 if of_odometry else late_ms)) is None
    problem = late.problem
    assert lane.rules.motion.speed == (10.0 if of_odometry else 3.0)
    assert (
        problem == "it came 349 ms later than others, by its stamp; its timeout is 300 ms"
    )  # a thousandth is forgotten
    assert lane.wait(200.0).reason.endswith(problem)


@pytest.mark.parametrize(
    "stamps_ms",
    [
        [0.0] * 30,
        [5.0] * 30,
        range(0, 30),
        [*range(1_000_000, 1_001_500, 100), *range(0, 1500, 100)],
        [*range(0, 1500, 100), *range(3_600_000, 3_601_500, 100)],
        [-ROS_S * 1000.0] * 30,
    ],
    ids=["none", "stands", "slow", "set back", "set ahead", "zero"],
)
def test_given_a_clock_of_a_sensor_that_stands_or_is_set_then_its_scans_count_by_their_receipt(
    lane, stamps_ms
):
    refused = 0
    for stamp_ms in stamps_ms:
        lane.clock.advance_ms(100.0)
        lane.move()
        assert lane.see(stamped(FREE, stamp_ms)) is None or stamps_ms == range(0, 30)
        refused = lane.rules.sensors[SCAN].refused
    assert (refused > 20) == (stamps_ms == range(0, 30))  # so slow a clock looks like growing delays


def test_given_simulated_time_when_it_passes_at_half_speed_then_scans_count_by_their_receipt(lane):
    lane.rules.simulated = True
    for step in range(30):
        lane.clock.advance_ms(100.0)
        lane.move()
        assert lane.see(stamped(FREE, 50.0 * step)) is None
    assert lane.rules.sensors[SCAN].refused == 0


def test_given_a_message_that_cannot_be_used_between_two_that_show_an_obstacle_then_it_changes_nothing(
    lane,
):
    assert lane.see(BLOCKED, scan_bytes(np.zeros(91))) is None
    assert (
        lane.rules.sensors[SCAN].problem
        == "none of 91 measurements can be used: zero, NaN, or out of range"
    )
    assert lane.see(BLOCKED) is not None


def test_given_odometry_that_cannot_be_used_then_the_last_counts_and_it_is_told(lane):
    before = lane.rules.motion
    lane.move(math.nan)
    lane.rules.moved(b"\0\1\0\0", lane.clock())
    assert lane.rules.motion is before
    assert (lane.rules.odometry.messages, lane.rules.odometry.refused) == (3, 2)
    assert lane.rules.odometry.problem.startswith("4 bytes are no nav_msgs/Odometry")


def test_given_no_activation_then_nothing_is_judged_and_a_latch_outlasts_it(lane):
    lane.rules.deactivate()
    assert lane.see(BLOCKED, BLOCKED) is None
    assert lane.wait(10_000.0) is None
    lane.rules.activate(lane.clock())
    lane.move()
    lane.see(BLOCKED, BLOCKED)
    lane.rules.deactivate()
    lane.rules.activate(lane.clock())
    assert lane.rules.state == "latched"
    lane.all_well()
    assert lane.clear() == ""
    assert lane.rules.state == "watching"


def test_given_a_message_of_a_button_that_comes_by_two_subscriptions_then_it_counts_once_and_latches_once(
    lane,
):
    lane.all_well()
    before = lane.rules.sensors[BUTTON].messages
    for value in (True, False):
        for again in (False, True, True):
            lane.rules.saw(BUTTON, bool_bytes(value), lane.clock(), again=again)
    assert lane.rules.sensors[BUTTON].messages == before + 2
    assert lane.clear() == ""
    lane.rules.saw(BUTTON, bool_bytes(True), lane.clock(), again=True)  # a late copy
    assert lane.rules.latch is None
    assert lane.rules.triggers[TRIGGER] == 1


# -- the node that it belongs to


def test_given_a_node_that_answers_when_it_no_longer_does_then_it_latches_after_two_seconds_and_stays_so(
    lane,
):
    lane = Lane(sensors=PATIENT, odometry_timeout_ms=60_000.0)
    lane.move()
    for _ in range(10):
        lane.rules.beat(lane.clock())
        assert lane.wait(1990.0) is None
    assert lane.rules.next_silence_ns() == lane.clock() + 10 * NS_PER_MS
    latch = lane.wait(10.0)
    assert (latch.kind, latch.reason) == (SILENT, "the node hangs: it has not answered for 2.0 s")
    lane.all_well()
    assert lane.clear() == "the node hangs: it has not answered for 2.0 s"
    lane.rules.beat(lane.clock())
    assert lane.rules.latch is latch
    assert lane.clear() == ""


def test_given_a_node_that_is_inactive_or_waits_or_whose_beats_nobody_makes_then_its_silence_is_none(lane):
    lane = Lane(sensors=PATIENT, odometry_timeout_ms=60_000.0)
    lane.move()
    assert lane.wait(50_000.0) is None
    lane.move()
    lane.rules.beat(lane.clock())
    lane.rules.hold()
    assert lane.wait(50_000.0) is None
    lane.rules.beat(lane.clock())
    lane.rules.deactivate()
    assert lane.wait(600_000.0) is None
    lane.rules.activate(lane.clock())
    lane.move()
    assert lane.wait(3000.0) is None


def test_given_a_lane_whose_node_is_gone_then_it_latches_and_nobody_clears_it(lane):
    lane.rules.left_alone(lane.clock())
    assert (lane.rules.latch.kind, lane.rules.latch.reason) == (SILENT, "the node is gone")
    lane.all_well()
    assert lane.clear() == "the node is gone"


# -- when it is cleared


def test_given_a_reason_that_lasts_when_it_is_to_be_cleared_then_that_is_refused_with_the_reason(lane):
    lane.all_well(10.0)
    lane.see(BLOCKED, BLOCKED)
    lane.see(bool_bytes(True), sensor=BUTTON)
    reasons = lane.clear().split("; ")
    assert reasons[0].startswith("scan still shows ")
    assert reasons[1] == "button is true"
    lane.see(bool_bytes(False), sensor=BUTTON)
    lane.see(FREE)
    lane.wait(300.0)
    assert [reason.partition(" has")[0] for reason in lane.clear().split("; ")] == ["scan", "odom"]
    lane.see(FREE)
    lane.move(0.0)
    assert lane.clear() == ""
    assert (lane.rules.latch, lane.rules.clears) == (None, 1)
    assert lane.clear() == ""
    assert lane.rules.clears == 1


def test_given_a_sensor_that_was_not_heard_since_activation_then_clearing_is_refused_and_says_what_would_be_right(
    lane,
):
    lane.see(BLOCKED, BLOCKED)
    lane.rules.activate(lane.clock())
    hears = "press and release it, or have its node publish its state transient local, or again and again"
    since = "has not been heard yet since the node became active"
    refused = [
        f"scan {since}",
        f"sonar {since}",
        f"button has not been heard yet: {hears}",
        f"odom {since}",
    ]
    assert lane.clear().split("; ") == refused
    well = [(FREE, SCAN), (range_bytes(math.inf), SONAR), (bool_bytes(False), BUTTON)]
    for message, sensor in well:
        refused.pop(0)
        lane.see(message, sensor=sensor)
        assert lane.clear().split("; ") == refused
    lane.see(b"", scan_bytes(np.zeros(9)))
    lane.move()
    assert lane.clear().startswith("scan: its last message cannot be used: none of 9 measurements")
    lane.see(FREE)
    assert lane.clear() == ""


# -- how it stops


@pytest.mark.parametrize("speed", [20.0, 3.0, -4.0])
@pytest.mark.parametrize("yaw_rate", [0.0, 0.4, -0.4])
def test_given_a_motion_when_it_stops_then_the_path_is_its_arc_to_standstill_from_where_it_is_by_now(
    speed, yaw_rate
):
    lane = Lane(deceleration=5.0)
    lane.move(speed, yaw_rate, x=7.0, y=-3.0, yaw=0.5)
    lane.clock.advance_ms(100.0)
    path = lane.stop()
    assert {pose.header.frame_id for pose in path.poses} | {path.header.frame_id} == {"odom"}
    xy = np.array([[pose.pose.position.x, pose.pose.position.y] for pose in path.poses])
    assert {pose.pose.position.z for pose in path.poses} == {0.5}
    times_s = np.array(
        [pose.header.stamp.sec - ROS_S + pose.header.stamp.nanosec / 1e9 for pose in path.poses]
    )
    assert (path.header.stamp.sec, path.header.stamp.nanosec, times_s[0]) == (ROS_S, 0, 0.0)
    assert (np.diff(times_s) > 0).all()
    assert times_s[-1] == pytest.approx(abs(speed) / 5.0)

    # the state of a vehicle on an arc that brakes, step by step
    x, y, yaw = Motion.read(odometry_bytes(speed, yaw_rate, x=7.0, y=-3.0, yaw=0.5), 0).after(0.1)
    assert xy[0] == pytest.approx([x, y])
    now, step_s = speed, 1e-4
    for _ in range(round(abs(speed) / 5.0 / step_s)):
        x, y = x + now * math.cos(yaw) * step_s, y + now * math.sin(yaw) * step_s
        yaw += yaw_rate * now / speed * step_s
        now -= math.copysign(5.0 * step_s, speed)
    assert xy[-1] == pytest.approx([x, y], abs=0.01)
    turn = path.poses[-1].pose.orientation
    assert 2 * math.atan2(turn.z, turn.w) == pytest.approx(yaw, abs=1e-3)


def test_given_a_vehicle_that_stands_or_no_odometry_when_it_stops_then_the_path_is_one_place(lane):
    lane.move(0.0, x=4.0)
    assert {pose.pose.position.x for pose in lane.stop().poses} == {4.0}
    unknown = Lane().stop()
    assert unknown.header.frame_id == "base_link"
    assert {(pose.pose.position.x, pose.pose.position.y) for pose in unknown.poses} == {(0.0, 0.0)}
    assert {(pose.pose.orientation.z, pose.pose.orientation.w) for pose in unknown.poses} == {(0.0, 1.0)}


# -- its status


def test_given_each_state_when_asked_then_the_status_says_it_with_ages_and_counters(lane):
    assert Emergency(node_config({}, {}).emergency).state == "off"
    assert Emergency(options()).state == "inactive"
    lane.see(FREE)
    lane.clock.advance_ms(50.0)
    watching = lane.rules.status(lane.clock())
    assert (watching.level, watching.name, watching.message) == (Level.OK, "perf: emergency", "watching")
    assert watching.values["reason"] == ""
    assert watching.values["scan age_ms"] == "50.0"
    assert watching.values["sonar age_ms"] == "nan"
    assert watching.values["corridor_m"] == "11.33"
    lane.see(BLOCKED, BLOCKED, b"")
    latched = lane.rules.status(lane.clock())
    assert latched.level is Level.ERROR
    assert latched.message.startswith("latched: scan shows ")
    assert latched.values["lasting"].startswith("scan still shows ")
    assert (latched.values["triggers_obstacle"], latched.values["scan refused"]) == ("1", "1")
    lane.rules.deactivate()
    lane.rules.latch = None
    assert lane.rules.status(lane.clock()).level is Level.WARN


# -- false stops

HOURS, RATE_HZ, BEAMS, BLOCK = 10, 10, 181, 10_000
FALSE_RETURNS = 1e-3  # share of beams that see rain, dust or nothing at all


def test_given_ten_hours_of_noisy_scans_between_walls_when_driven_then_it_stops_falsely_at_most_once():
    """Walls at 2 m, noise of 3 cm, a yaw rate that is off by 0.01 rad/s.

    Whatever two scans show goes to the rules.
    """
    random = np.random.default_rng(14)
    lane = Lane(odometry_timeout_ms=60_000.0, sensors=PATIENT)
    angles = np.linspace(-math.pi / 2, math.pi / 2, BEAMS)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    walls_m = np.minimum(2.0 / np.maximum(np.abs(sin), 1e-9), 60.0).astype(np.float32)
    stops = suspects = 0
    for _ in range(HOURS * 3600 * RATE_HZ // BLOCK):
        yaw_rate = random.normal(0.0, 0.01)
        ranges = random.standard_normal((BLOCK, BEAMS), np.float32)
        ranges *= 0.03
        ranges += walls_m
        false = random.integers(0, ranges.size, random.binomial(ranges.size, FALSE_RETURNS))
        ranges.flat[false] = random.uniform(0.1, 30.0, len(false))
        corridor = Corridor.of(lane.rules.options, motion(10.0, yaw_rate))
        assert (
            abs(corridor.curvature) * corridor.length_m**2 < 0.7
        )  # so that no wall is in it, and this is all of it:
        row, beam = np.nonzero((np.abs(ranges * sin) < 1.9) & (ranges < 16.0))
        x, y = 3.5 + (ranges * cos)[row, beam], (ranges * sin)[row, beam]
        shown = np.bincount(
            row[corridor.way_m(x.astype(float), y.astype(float)) <= corridor.length_m], minlength=BLOCK
        )
        rows = np.flatnonzero(shown >= lane.rules.options.min_points)
        suspects += len(rows)
        lane.move(10.0, yaw_rate)
        lane.see(FREE)
        for first in rows:
            following = ranges[first : first + 2]
            stops += lane.see(FREE, *(scan_bytes(each) for each in following)) is not None
            lane.see(FREE)
            lane.clear()
    assert stops <= 1
    assert (
        lane.see(*[scan_bytes(np.where(np.abs(angles) < 0.2, 5.0, walls_m))] * 2) is not None
    )  # a real one
    assert 0 < suspects < HOURS * 3600  # scans that show enough by themselves
