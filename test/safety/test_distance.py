import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import (
    START_NS,
    Box,
    S,
    markers_bytes,
    odometry_bytes,
    plan_bytes,
    straight_plan,
)
from torchperf_ros.safety.distance import (
    _clearances,
    _fastest,
    _speeds,
    rss_opposite_direction,
    rss_same_direction,
)
from torchperf_ros.safety.guard import Guard
from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Track
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.safety_options import guard_options

from .test_prediction import T, in_bend


def check(plan, boxes, speed=10.0, yaw_rate=0.0, **options):
    own = {f"guard.{name}": value for name, value in options.items()}
    guard = Guard(guard_options({"guard.act": ["distance"], **own}))
    guard.moved(odometry_bytes(speed=speed, yaw_rate=yaw_rate), 10 * S)
    guard.saw(0, markers_bytes(boxes), 10 * S)
    return guard.check(plan, 10 * S, START_NS, 60.0)


@pytest.mark.parametrize(
    ("distance", "ours", "theirs", "responses_s", "expected_m"),
    [
        (rss_same_direction, [20.0, 5.0], [10.0, 30.0], [0.5, 0.5], 10 + 0.25 + 21**2 / 12 - 100 / 16),
        # towards each other: the sum of both stopping ways
        (
            rss_opposite_direction,
            [20.0, 0.0],
            [10.0, 0.0],
            [0.5, 0.0],
            10 + 0.25 + 21**2 / 12 + 5 + 0.25 + 11**2 / 12,
        ),
    ],
)
def test_given_speeds_when_the_rss_distance_is_computed_then_it_is_that_of_the_paper(
    distance, ours, theirs, responses_s, expected_m
):
    found = distance(*map(np.array, (ours, theirs, responses_s)), guard_options({}))
    assert found == pytest.approx([expected_m, 0.0])


def test_given_many_obstacles_when_most_are_far_then_the_near_one_is_found_all_the_same():
    far = [Box(500.0 + number, 300.0) for number in range(60)]
    assert check(straight_plan(), far).check == ""
    assert check(straight_plan(), [*far, Box(25.0, 0.0), *far]).check == "distance"
    for near in (
        Box(25.0, -60.0, velocity=(0.0, 24.0)),
        Box(320.0, 0.0, length=600.0),
        Box(80.0, 0.0, velocity=(-30.0, 0.0)),
    ):
        assert check(straight_plan(), [*far, near]).check == "distance"


@pytest.mark.parametrize(("x", "check_name"), [(-24.0, "distance"), (-45.0, ""), (25.0, "")])
def test_given_a_plan_in_reverse_when_checked_then_what_is_behind_counts(x, check_name):
    assert check(plan_bytes(T, -5.0 * T, 0.0, 0.0), [Box(x + 6.0, 0.0)], speed=-5.0).check == check_name


def test_given_a_plan_that_goes_both_ways_when_checked_then_only_its_footprint_counts():
    x = 2.0 * np.minimum(T, 3.0 - T)
    assert Lane(Track(T, x + 0j, 0 * T)).both_ways
    assert check(plan_bytes(T, x, 0.0, 0.0), [Box(10.0, 0.0)], speed=2.0).check == ""
    assert check(plan_bytes(T, x, 0.0, 0.0), [Box(8.4, 0.0)], speed=2.0).check == "distance"
    assert (
        check(plan_bytes(T, x, 0.0, 0.0), [Box(10.0, 0.0, velocity=(-2.0, 0.0))], speed=2.0).check
        == "distance"
    )


@pytest.mark.parametrize(("back_m", "both"), [(0.49, False), (0.51, True)])
@pytest.mark.parametrize("way", [1, -1])
def test_given_a_plan_of_9_m_that_turns_round_when_half_a_metre_leads_back_then_it_goes_both_ways(
    back_m, both, way
):
    x = way * np.interp(T, [0.0, 2.0, 3.0], [0.0, 9.0 - back_m, 9.0 - 2 * back_m])
    lane = Lane(Track(T, x + 0j, 0 * T))
    assert (lane.both_ways, lane.backward) == (both, way < 0)
    assert lane.length == pytest.approx(9.0)


@pytest.mark.parametrize(("left", "check_name"), [(2.19, "distance"), (2.21, "")])
def test_given_an_obstacle_beside_when_passed_then_the_margin_counts(left, check_name):
    assert check(straight_plan(), [Box(20.0, left)]).check == check_name
    assert check(straight_plan(), [Box(20.0, -left)]).check == check_name


def test_given_an_obstacle_that_is_too_close_already_when_passed_then_it_must_not_come_closer():
    wall = Box(2.0, 2.1, length=60.0)  # 0.2 m beside
    assert check(straight_plan(), [wall]).check == ""
    closer = plan_bytes(T, 10 * T, 0.1 * T, 0.01)
    found = check(closer, [wall])
    assert (found.check, found.limit) == ("distance", pytest.approx(0.115, abs=0.001))


def test_given_a_lane_when_points_are_projected_then_they_come_back_to_their_places():
    turned = 10 * T * 0.01
    lane = Lane(Track(T, (np.sin(turned) + 1j * (1 - np.cos(turned))) / 0.01, turned))
    s = np.array([-40.0, -5.0, 0.0, 12.0, 29.0, 35.0, 60.0])
    left = np.array([3.0, -2.0, 1.0, 4.0, -4.0, 0.5, 2.0])
    places, heading = lane.place_at(s, left)
    assert heading == pytest.approx(0.01 * s, abs=1e-3)
    found = lane.project(places)
    assert found[0] == pytest.approx(s, abs=0.3)
    assert found[1] == pytest.approx(left, abs=0.05)
    exact = (np.sin(0.01 * s) + 1j * (1 - np.cos(0.01 * s))) / 0.01 + 1j * left * np.exp(0.01j * s)
    assert np.abs(places - exact).max() < 0.1
    assert lane.length == pytest.approx(30.0, rel=1e-3)
    assert not lane.backward


@pytest.mark.parametrize(("bend", "beyond"), [(0.1, 1.2), (-0.1, -1.2), (0.008, 0.96)])
def test_given_a_bend_when_its_lane_is_led_on_then_it_turns_no_further_than_is_likely(bend, beyond):
    x, y, yaw = bent(6 * T, bend)
    lane = Lane(Track(T, x + 1j * y, yaw))
    assert lane.heading[[0, -1]] == pytest.approx([-beyond, 18 * bend + beyond])  # 120 m, or 1.2 rad
    assert lane.s[[0, -1]] == pytest.approx(
        [-400 - abs(beyond / bend), 18 + 400 + abs(beyond / bend)], abs=0.1
    )
    assert np.abs(np.diff(lane.place)) == pytest.approx(np.diff(lane.s), rel=0.02)
    assert lane.tightest == pytest.approx(abs(bend), rel=1e-2)
    assert lane.turn == pytest.approx(abs(18 * bend + 2 * beyond))


def test_given_a_standing_track_when_its_lane_is_taken_then_it_leads_straight_on():
    lane = Lane(Track(T, 0 * T + 1 + 2j, 0 * T + np.pi / 2))
    s, left, heading = lane.project(np.array([1 + 12j, -1 + 2j]))
    assert (s.tolist(), left.tolist()) == (
        pytest.approx([10.0, 0.0], abs=1e-9),
        pytest.approx([0.0, 2.0], abs=1e-9),
    )
    assert heading == pytest.approx(np.pi / 2)


def test_given_a_bend_when_cars_drive_beside_then_they_are_led_round_it_but_not_into_a_change_of_lanes():
    bend = 0.008
    turned = 15 * T * bend
    plan = plan_bytes(T, np.sin(turned) / bend, (1 - np.cos(turned)) / bend, turned)
    beside = [Box(0.0, left, velocity=(15.0, 0.0)) for left in (-3.5, 3.5)]
    assert check(plan, beside, speed=15.0, yaw_rate=15 * bend).check == ""
    share = np.clip(T / 3.0, 0.0, 1.0)
    y = 3.5 * (10 * share**3 - 15 * share**4 + 6 * share**5)
    yaw = np.arctan(np.gradient(y, 15 * T))
    change = plan_bytes(T, 15 * T, y, yaw)
    assert check(change, [], speed=15.0).check == ""
    assert check(change, beside, speed=15.0).check == "distance"


def test_given_a_fast_plan_that_leaves_a_bend_when_a_car_drives_beside_then_it_is_led_along_as_well():
    s = 27 * T
    turned = -0.001 * (np.minimum(s, 36) - np.minimum(s, 36) ** 2 / 72)  # 0.018 rad, which are 0.9 m aside
    place = np.concatenate(([0.0], np.cumsum(2.7 * np.exp(0.5j * (turned[1:] + turned[:-1])))))
    beside = Box(-8.6, -3.53, 0.0086, velocity=(30.0, 30 * 0.0086))
    plan = plan_bytes(T, place.real, place.imag, turned)
    assert check(plan, [beside], speed=27.0, yaw_rate=-0.027).check == ""


@pytest.mark.parametrize(
    ("left", "turns_in", "expected"), [(1.0, True, ""), (1.3, True, "distance"), (1.3, False, "")]
)
def test_given_a_cyclist_from_behind_when_beside_our_lane_then_it_may_pass_but_is_not_cut_off(
    left, turns_in, expected
):
    cyclist = Box(-4.0, left, length=1.0, width=0.5, velocity=(12.0, 0.0))  # 0.1 m beside us at 1.3 m
    plan = plan_bytes(T, 10 * T, 0.15 * T, 0.015) if turns_in else straight_plan()
    assert check(plan, [cyclist]).check == expected


def bent(s, bend):
    """x, y and heading on a circle that begins at the origin along x."""
    return np.sin(bend * s) / bend, (1 - np.cos(bend * s)) / bend, bend * s


def to_the_left(over_m=29.0, x=10 * T):
    """x, y and heading of a change of lanes."""
    share = np.clip(x / over_m, 0.0, 1.0)
    y = 3.5 * (10 * share**3 - 15 * share**4 + 6 * share**5)
    return x, y, np.arctan(np.gradient(y, x))


SITUATIONS = {
    "turned and standing beside": ((10 * T, 0 * T, 0 * T), [Box(20.0, 2.9, 0.5)], 10.0, 0.0),
    "crossing": ((10 * T, 0 * T, 0 * T), [Box(20.0, -10.0, 1.2, velocity=(1.0, 5.0))], 10.0, 0.0),
    "drifting into our lane": ((10 * T, 0 * T, 0 * T), [Box(3.0, 3.0, 0.1, velocity=(11.0, -1.0))], 10.0, 0.0),
    "a slower lead": ((20 * T, 0 * T, 0 * T), [Box(26.0, 0.5, 0.1, velocity=(14.0, 0.3))], 20.0, 0.0),
    "coming towards us": ((10 * T, 0 * T, 0 * T), [Box(60.0, 0.5, 3.0, velocity=(-9.0, 0.2))], 10.0, 0.0),
    "standing far ahead": ((33 * T, 0 * T, 0 * T), [Box(105.75, 1.0)], 33.0, 0.0),
    "crossing a bend": ((*bent(10 * T, 0.03),), [Box(20.0, -8.0, 1.0, velocity=(1.0, 6.0))], 10.0, 0.3),
    "drifting in a bend": (
        (*bent(10 * T, 0.03),), [in_bend(4.3, 2.4, 0.03, 10.0, length=9.0), Box(0.0, -9.0)], 10.0, 0.3,
    ),
    "slower in a bend": ((*bent(15 * T, -0.01),), [in_bend(20.0, 0.3, -0.01, 10.0)], 15.0, -0.15),
    "beside a change of lanes": (to_the_left(), [Box(-6.0, 3.5, velocity=(14.0, 0.0))], 10.0, 0.05),
    "from far behind, straight on": (
        to_the_left(16.0, 4.0 * T), [Box(-11.0, 2.0, length=1.0, width=1.0, velocity=(9.0, 0.0))], 4.0, 0.01
    ),
    "coming in a change of lanes": (to_the_left(), [Box(26.0, 2.3, 3.1, velocity=(-14.0, 0.0))], 10.0, 0.05),
    "behind in reverse": ((-5 * T, 0 * T, 0 * T), [Box(-15.0, 0.5, 0.4)], -5.0, 0.0),
    "behind in a bend in reverse": ((*bent(-5.1 * T, 0.05),), [in_bend(-12.0, 0.5, 0.05, -2.0)], -5.1, -0.255),
    "both ways": (
        (2 * np.minimum(T, 3 - T), 0 * T, 0 * T), [Box(11.0, -1.0, 0.5, velocity=(-1.8, 0.2))], 2.0, 0.0
    ),
    "crossing a tight bend": ((*bent(3 * T, 0.19),), [Box(-3.0, 10.5, velocity=(3.0, -0.5))], 3.0, 0.57),
}  # fmt: skip


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("name", SITUATIONS)
def test_given_a_situation_when_it_is_turned_moved_or_mirrored_then_the_answer_is_the_same(name, side):
    (x, y, yaw), boxes, speed, yaw_rate = SITUATIONS[name]
    plain = check(plan_bytes(T, x, y, yaw), boxes, speed=speed, yaw_rate=yaw_rate)
    assert plain.check == "distance"
    turn, at = 2.5, 70.0 - 30.0j
    there = at + np.exp(1j * turn) * (x + 1j * side * y)
    moved = []
    for box in boxes:
        place = at + np.exp(1j * turn) * complex(box.x, side * box.y)
        velocity = np.exp(1j * turn) * complex(box.velocity[0], side * box.velocity[1])
        yaw_there = turn + side * box.yaw
        moved.append(
            Box(place.real, place.imag, yaw_there, box.length, box.width, (velocity.real, velocity.imag))
        )
    guard = Guard(guard_options({"guard.act": ["distance"]}))
    odometry = odometry_bytes(at.real, at.imag, turn, speed, side * yaw_rate)
    guard.moved(odometry, 10 * S)
    guard.saw(0, markers_bytes(moved), 10 * S)
    found = guard.check(plan_bytes(T, there.real, there.imag, turn + side * yaw), 10 * S, START_NS, 60.0)
    assert (found.verdict, found.check) == (plain.verdict, "distance")
    measured, expected = (
        (one.value, one.limit, one.ttc_s, one.needed_deceleration) for one in (found, plain)
    )
    assert measured == pytest.approx(expected, abs=1e-6, nan_ok=True)
    path, same = TimedPath.parse(found.payload), TimedPath.parse(plain.payload)
    back = (path.points[:, 0] + 1j * path.points[:, 1] - at) * np.exp(-1j * turn)
    assert back == pytest.approx(same.points[:, 0] + 1j * side * same.points[:, 1], abs=1e-6)


@pytest.mark.parametrize("yaw", [0.0, 0.5, -0.5, 1.2, math.pi / 2, 2.0, math.pi])
def test_given_a_turned_box_beside_when_passed_then_its_corner_counts(yaw):
    left = 0.95 + 2.25 * abs(math.sin(yaw)) + 0.95 * abs(math.cos(yaw))
    assert check(straight_plan(), [Box(15.0, left + 0.29, yaw)]).value == pytest.approx(0.29)
    assert check(straight_plan(), [Box(15.0, left + 0.31, yaw)]).check == ""


@pytest.mark.parametrize(("acceleration", "speed"), [(0.0, 10.0), (-2.0, 10.0), (2.0, 10.0), (0.0, 4.0)])
def test_given_something_that_crosses_when_touched_then_the_time_and_the_braking_count_until_there(
    acceleration, speed
):
    t = 1.6  # 1.95 m beside is the last place where it does not touch us
    way = speed * t + 0.5 * acceleration * t**2
    box = Box(way + 3.5, -1.95 - 5.0 * 1.65, length=2.0, width=2.0, velocity=(0.0, 5.0))
    found = check(straight_plan(speed, acceleration=acceleration), [box], speed=speed)
    assert found.ttc_s == pytest.approx(1.6)
    assert found.needed_deceleration == pytest.approx(speed**2 / (2 * way))
    ahead = check(
        straight_plan(speed, acceleration=acceleration), [Box(18.0, 0.0, velocity=(1.0, 0.0))], speed=speed
    )
    gap = 18.0 - 2.25 - 3.5
    assert ahead.ttc_s == pytest.approx(gap / (speed - 1.0))  # at the speed of now, braking or not
    assert ahead.needed_deceleration == pytest.approx((speed - 1.0) ** 2 / (2 * gap))


def test_given_something_ahead_when_we_reverse_or_it_comes_then_its_time_is_known():
    behind = check(plan_bytes(T, -5.0 * T, 0.0, 0.0), [Box(-20.0, 0.0)], speed=-5.0)
    gap = 20.0 - 2.25 - 1.0  # behind the rear bumper
    assert (behind.ttc_s, behind.needed_deceleration) == pytest.approx((gap / 5, 25 / (2 * gap)))
    comes = check(straight_plan(), [Box(60.0, 0.0, velocity=(-14.0, 0.0))])
    gap = 60.0 - 2.25 - 3.5
    assert (comes.ttc_s, comes.needed_deceleration) == pytest.approx(
        (gap / 24, 24 * 10 / (2 * gap))
    )  # our share


def test_given_a_plan_whose_acceleration_grows_when_checked_then_the_speed_of_now_is_that_of_its_first_steps():
    found = check(plan_bytes(T, 10 * T + T**3, 0.0, 0.0), [Box(30.0, 0.0)])
    assert found.ttc_s == pytest.approx((30 - 2.25 - 3.5) / (10.01 - 0.5 * 0.06))  # 10.01 and 10.07 m/s


@pytest.mark.parametrize("gap", [0.5, 2.0])
def test_given_something_close_ahead_when_we_move_on_then_the_time_and_the_braking_are_known(gap):
    found = check(straight_plan(), [Box(3.5 + gap + 2.25, 0.0)])
    assert (found.ttc_s, found.needed_deceleration) == pytest.approx((gap / 10, 100 / (2 * gap)))


@pytest.mark.parametrize(
    ("left", "drift", "from_s"), [(3.05, -1.0, 0.9), (-3.05, 1.0, 0.9), (1.0, 0.2, 0.2)]
)
def test_given_a_lead_that_drifts_into_our_way_when_it_is_there_then_the_distance_of_rss_counts(
    left, drift, from_s
):
    lead = Box(9.0, left, velocity=(10.1, drift))
    found = check(straight_plan(), [lead])
    gap, faster = 9.0 - 2.25 - 3.5 + 0.1 * from_s, 10 + 2 * 0.21
    assert found.value == pytest.approx(gap, abs=1e-3)
    assert found.limit == pytest.approx(10 * 0.21 + 0.21**2 + faster**2 / 12 - 10.1**2 / 16, abs=1e-3)
    assert f"behind an obstacle {from_s:g} s from now and does not brake" in found.reason
    assert check(straight_plan(), [Box(9.0, 3.05, velocity=(10.1, 0.0))]).check == ""


def test_given_something_that_stands_beyond_the_end_of_a_fast_plan_then_its_distance_is_that_of_rss():
    found = check(straight_plan(33.0), [Box(105.75, 0.0)], speed=33.0)
    faster = 33 + 2 * 0.21
    assert found.limit == pytest.approx(33 * 0.21 + 0.21**2 + faster**2 / 12)
    assert found.value == pytest.approx(105.75 - 2.25 - 3.5 - 33 * 0.2)  # the last pose before a response
    assert "behind an obstacle 0.2 s from now" in found.reason
    assert check(straight_plan(33.0), [Box(112.6, 0.0)], speed=33.0).check == ""
    assert check(straight_plan(33.0), [Box(112.3, 0.0)], speed=33.0).check == "distance"


@settings(max_examples=80, deadline=None)
@given(
    speed=st.floats(8.0, 35.0),
    slower=st.floats(0.0, 0.6),
    steps_s=st.lists(st.floats(0.03, 1.0), min_size=1, max_size=12),
    since_s=st.floats(0.0, 0.1),
    share=st.floats(0.02, 0.95),
)
@example(30.0, 0.0, [0.4], 0.0, 0.1)
@example(12.0, 0.0, [0.1] * 7, 0.06, 0.5)
def test_given_a_short_plan_of_any_poses_when_something_beyond_its_end_is_too_close_to_stop_then_it_is_refused(
    speed, slower, steps_s, since_s, share
):
    times_s = np.cumsum([0.0, *steps_s]) - since_s
    lead = slower * speed
    safe = rss_same_direction(np.array([speed]), np.array([lead]), np.array([0.21]), guard_options({}))[0]
    beyond_m = safe - speed * times_s[-1]
    assume(times_s[-1] >= 0.25 and beyond_m > 1.0)
    at = 3.5 + 2.25 + safe - (1.0 - share) * beyond_m
    plan = plan_bytes(times_s, speed * times_s, 0.0, 0.0)
    assert check(plan, [Box(at, 0.0, velocity=(lead, 0.0))], speed=speed).check == "distance"


def test_given_something_that_crosses_and_is_gone_or_follows_closely_then_it_is_no_lead():
    assert check(straight_plan(), [Box(25.0, -6.0, math.pi / 2, velocity=(2.0, 8.0))]).check == ""
    assert (
        check(straight_plan(), [Box(-5.0, 0.0, velocity=(12.0, 0.0))]).check == ""
    )  # 1.75 m behind our bumper


@pytest.mark.parametrize("speed", [0.3, 0.8, 2.0])
def test_given_something_slow_beyond_the_end_of_a_fast_plan_then_it_is_a_lead(speed):
    found = check(straight_plan(33.0), [Box(105.0, 0.0, velocity=(speed, 0.0))], speed=33.0)
    assert "behind an obstacle 0.2 s from now" in found.reason


def corners(places, yaws, length, width, offset=0.0):
    outline = offset + 0.5 * length * np.array([1, 1, -1, -1]) + 0.5j * width * np.array([1, -1, -1, 1])
    return places[:, None] + outline * np.exp(1j * yaws)[:, None]


def apart(own, other, yaws):
    """The largest gap between two outlines' shadows on these directions and across them."""
    gaps = []
    for yaw in yaws:
        for side in (np.exp(-1j * yaw), -1j * np.exp(-1j * yaw)):
            a, b = ((outline * np.reshape(side, (-1, 1))).real for outline in (own, other))
            gaps += [b.min(axis=1) - a.max(axis=1), a.min(axis=1) - b.max(axis=1)]
    return np.max(gaps, axis=0)


@pytest.mark.parametrize("seed", range(8))
def test_given_poses_when_what_lies_between_is_looked_at_in_fine_steps_then_it_is_no_closer_than_was_said(
    seed,
):
    rng, options = np.random.default_rng(seed), guard_options({})
    bend = rng.choice([0.0, 0.02, -0.1])
    s = (10.0 if abs(bend) < 0.1 else 4.0) * T
    x, y, yaw = bent(s, bend or 1e-9)
    track, places, turns = Track(T, x + 1j * y, yaw), [], []
    sizes = rng.uniform(0.5, 6.0, (60, 2))
    for _ in sizes:
        at, velocity = complex(rng.uniform(-5, 35), rng.uniform(-6, 6)), complex(*rng.normal(0, 3, 2))
        places.append(at + velocity * T)
        turns.append(rng.uniform(-4, 4) + rng.choice([0.0, 0.2]) * T)
    places, turns = np.array(places).T, np.array(turns).T
    clearance, kept = _clearances(track, Lane(track), 0.0, places, turns, sizes / 2, options)
    fine = np.linspace(0.0, 3.0, 30 * 8 + 1)
    own_at, own_yaw = np.interp(fine, T, x + 1j * y), np.interp(fine, T, yaw)
    own = corners(own_at, own_yaw, 4.5, 1.9, 1.25)
    assert len(kept) > 5
    around, same = _clearances(track, Lane(track), 0.0, places, turns + math.pi, sizes / 2, options)
    assert same.tolist() == kept.tolist()  # a box that is turned round is the same
    assert around == pytest.approx(clearance)
    wide, more = _clearances(track, Lane(track), 0.4, places, turns, sizes / 2, options)
    assert wide[1:, np.isin(more, kept)] == pytest.approx(clearance[1:] - 0.4)
    for n in range(len(sizes)):
        at, turned = np.interp(fine, T, places[:, n]), np.interp(fine, T, turns[:, n])
        exact = apart(own, corners(at, turned, *sizes[n]), (own_yaw, turned))
        between = np.minimum.reduce([exact[i:240:8] for i in range(8)] + [exact[8::8]])
        assert n in more or exact.min() >= options.margin_m + 0.4 - 1e-9
        if n not in kept:
            assert exact.min() >= options.margin_m - 1e-9
            continue
        said = clearance[:, list(kept).index(n)]
        assert said[0] == pytest.approx(exact[0])
        assert (said[1:] <= 1.03 * between + 1e-3)[
            between > 0
        ].all()  # on sides that are turned by half a step


def test_given_a_turn_between_two_poses_then_corners_come_closer_by_their_radius_times_half_of_it():
    options, halves = guard_options({"vehicle.rear_m": 2.25, "guard.margin_m": 5.0}), np.array([[1.5, 2.0]])

    def gap(own_yaw, yaw, moved=0.0):
        track = Track(T[:2], np.array([0.0, 1.0]) + 0j, np.array([-own_yaw, own_yaw]))
        places, yaws = np.array([[0.5 - moved + 5.0j], [0.5 + moved + 5.0j]]), np.array([[-yaw], [yaw]])
        return float(_clearances(track, Lane(track), 0.0, places, yaws, halves, options)[0][1, 0])

    assert gap(0.0, 0.0) == pytest.approx(5.0 - 0.95 - 2.0)
    assert gap(0.05, 0.0) == pytest.approx(
        gap(0.0, 0.0) - 0.1 * (0.5 * math.hypot(2.25, 0.95) + 0.125), abs=1e-3
    )
    assert gap(0.0, 0.05) == pytest.approx(gap(0.0, 0.0) - 0.1 * 0.5 * 2.5)
    assert gap(0.0, 0.05, 0.4) == pytest.approx(gap(0.0, 0.0) - 0.1 * (0.5 * 2.5 + 0.125 * 0.8))


def test_given_ways_between_poses_then_speeds_are_led_on_at_the_ends_and_a_peak_is_no_mean():
    assert _speeds(np.array([0.0, 1.0, 2.0, 4.0]), np.array([2.0, 3.0, 14.0])).tolist() == [
        1.5,
        2.5,
        5.0,
        9.0,
    ]
    assert _speeds(np.array([0.0, 1.0, 2.0]), np.array([1.0, 5.0])).tolist() == [0.0, 3.0, 7.0]
    assert _speeds(np.array([0.0, 2.0]), np.array([8.0])).tolist() == [4.0, 4.0]
    steps = np.array([2.0, 6.0, 6.0, 1.0])
    speeds = _speeds(np.arange(5.0), steps)
    assert speeds.tolist() == [0.0, 4.0, 6.0, 3.5, 0.0]
    assert _fastest(speeds, steps).tolist() == [0.0, 6.0, 8.5, 6.0, 0.0]


@pytest.mark.parametrize("length_m", [8.0, 15.0])
def test_given_a_lane_of_two_poses_in_a_bend_then_each_end_goes_on_from_its_own_pose(length_m):
    x, y, yaw = bent(np.array([0.0, length_m]), 0.02)
    s = np.array([-20.0, length_m + 20.0])
    at_x, at_y, turned = bent(s, 0.02)
    found = Lane(Track(np.array([0.0, 1.0]), x + 1j * y, yaw)).project(at_x + 1j * at_y)
    assert found[0] == pytest.approx(s, abs=0.2)
    assert found[1] == pytest.approx(0.0, abs=0.2)
    assert found[2] == pytest.approx(turned, abs=0.01)


def test_given_no_margin_when_a_plan_stops_behind_something_then_only_a_contact_counts():
    braking = straight_plan(acceleration=-6.0)  # stands after 8.33 m
    assert check(braking, [Box(8.34 + 3.5 + 2.25 + 0.02, 0.0)], margin_m=0.0).check == ""
    assert check(braking, [Box(8.33 + 3.5 + 2.25 - 0.02, 0.0)], margin_m=0.0).check == "distance"


def test_given_something_within_the_margin_beside_us_then_it_is_a_lead_once_its_middle_is_ahead_of_ours():
    ours = 3.5 - 2.25
    found = [check(straight_plan(), [Box(ours + x, 2.1, length=1.0)]) for x in (1.9, 2.1)]
    assert [one.check for one in found] == ["", "distance"]
    assert found[1].reason.startswith(
        "distance: the plan is -2.65 m behind an obstacle 0.2 s from now and does not br"
    )
