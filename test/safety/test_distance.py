import numpy as np
import pytest

from benchmarks.rig.plan_messages import START_NS, Box, S, markers_bytes, odometry_bytes, plan_bytes, straight_plan
from torchperf_ros.config.guard_options import guard_options
from torchperf_ros.safety.distance import rss_distance
from torchperf_ros.safety.guard import Guard
from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Track

T = np.arange(0.0, 3.05, 0.1)


def check(plan, boxes, speed=10.0, yaw_rate=0.0, **options):
    guard = Guard(
        guard_options({"guard.act": ["distance"], **{f"guard.{name}": value for name, value in options.items()}})
    )
    guard.moved(odometry_bytes(speed=speed, yaw_rate=yaw_rate), 10 * S)
    guard.saw(0, markers_bytes(boxes), 10 * S)
    return guard.check(plan, 10 * S, START_NS, 60.0)


def test_given_speeds_when_the_rss_distance_is_computed_then_it_is_that_of_the_paper():
    options = guard_options({})
    found = rss_distance(np.array([20.0, 5.0]), np.array([10.0, 30.0]), np.array([0.5, 0.5]), options)
    assert found == pytest.approx([10 + 0.25 + 21**2 / 12 - 100 / 16, 0.0])


def test_given_many_obstacles_when_most_are_far_then_the_near_one_is_found_all_the_same():
    far = [Box(500.0 + number, 300.0) for number in range(60)]
    assert check(straight_plan(), far).check == ""
    assert check(straight_plan(), [*far, Box(25.0, 0.0), *far]).check == "distance"
    assert check(straight_plan(), [*far, Box(25.0, -60.0, velocity=(0.0, 24.0))]).check == "distance"


@pytest.mark.parametrize(("x", "check_name"), [(-24.0, "distance"), (-45.0, ""), (25.0, "")])
def test_given_a_plan_in_reverse_when_checked_then_what_is_behind_counts(x, check_name):
    assert check(plan_bytes(T, -5.0 * T, 0.0, 0.0), [Box(x + 6.0, 0.0)], speed=-5.0).check == check_name


def test_given_a_plan_that_goes_both_ways_when_checked_then_only_its_footprint_counts():
    x = 2.0 * np.minimum(T, 3.0 - T)
    assert Lane(Track(T, x, 0 * T, 0 * T)).both_ways
    assert check(plan_bytes(T, x, 0.0, 0.0), [Box(10.0, 0.0)], speed=2.0).check == ""
    assert check(plan_bytes(T, x, 0.0, 0.0), [Box(8.4, 0.0)], speed=2.0).check == "distance"
    assert check(plan_bytes(T, x, 0.0, 0.0), [Box(10.0, 0.0, velocity=(-2.0, 0.0))], speed=2.0).check == "distance"


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
    lane = Lane(Track(T, np.sin(turned) / 0.01, (1 - np.cos(turned)) / 0.01, turned))
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


def test_given_a_standing_track_when_its_lane_is_taken_then_it_leads_straight_on():
    lane = Lane(Track(T, 0 * T + 1.0, 0 * T + 2.0, 0 * T + np.pi / 2))
    s, left, heading = lane.project(np.array([1 + 12j, -1 + 2j]))
    assert (s.tolist(), left.tolist()) == (pytest.approx([10.0, 0.0], abs=1e-9), pytest.approx([0.0, 2.0], abs=1e-9))
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
    ("left", "turns_in", "check_name"), [(1.0, True, ""), (1.3, True, "distance"), (1.3, False, "")]
)
def test_given_a_cyclist_from_behind_when_it_is_beside_our_lane_then_it_may_pass_but_is_not_cut_off(
    left, turns_in, check_name
):
    cyclist = Box(-4.0, left, length=1.0, width=0.5, velocity=(12.0, 0.0))  # 0.1 m beside us at 1.3 m
    plan = plan_bytes(T, 10 * T, 0.15 * T, 0.015) if turns_in else straight_plan()
    assert check(plan, [cyclist]).check == check_name
