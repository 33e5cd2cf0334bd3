import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.models.closed_loop import (
    MAX_BRAKING,
    POSES,
    STEP_S,
    Blindness,
    Centreline,
    idm,
    plan_along,
)

STRAIGHT = Centreline.of(500.0)
CURVE = Centreline.of(600.0, 80.0, 200.0, 150.0)


def car(x, y=0.0, vx=0.0, vy=0.0, yaw=0.0):
    return np.array([[x, y, yaw, vx, vy, 4.5, 1.9]])


def speeds(objects, speed=20.0, ahead_s=2.0):
    return plan_along(STRAIGHT, (0.0, 0.0, 0.0, speed), objects, speed, ahead_s)[:, 3]


@given(s=st.floats(0, 500), d=st.floats(-5, 5), lane=st.sampled_from([STRAIGHT, CURVE]))
def test_given_a_place_on_a_lane_when_found_again_then_it_is_the_same(s, d, lane):
    x, y, _ = lane.at(np.array([s]), d)[0]
    found = lane.place(np.array([[x, y]]))[0]
    assert found[0] == pytest.approx(s, abs=0.15)
    assert found[1] == pytest.approx(d, abs=0.02)
    assert lane.one_at(s, d)[:2] == pytest.approx((x, y))


def test_given_a_curve_when_followed_then_it_turns_by_its_length_over_its_radius():
    assert CURVE.at(np.array([400.0]))[0, 2] == pytest.approx(150.0 / 200.0, abs=0.02)
    assert CURVE.at(np.array([60.0]))[0, 2] == 0.0


def test_given_places_before_and_beyond_a_lane_when_found_then_it_goes_straight_on():
    assert STRAIGHT.place(np.array([[-30.0, 1.0], [900.0, -2.0]]))[:, :2].tolist() == [
        [-30.0, 1.0],
        [900.0, -2.0],
    ]


@given(speed=st.floats(0, 40), gap=st.floats(0.1, 200), lead=st.floats(0, 40))
def test_given_any_gap_when_followed_then_braking_is_bounded_and_no_harder_for_a_larger_gap(
    speed, gap, lead
):
    near, far = idm(speed, 20.0, gap, lead), idm(speed, 20.0, gap + 5.0, lead)
    assert -MAX_BRAKING <= near <= far


def test_given_a_stopped_car_when_followed_by_the_model_alone_then_it_is_never_reached():
    at, speed = 0.0, 20.0
    for _ in range(3000):
        speed = max(0.0, speed + 0.01 * idm(speed, 20.0, 120.0 - at, 0.0))
        at += 0.01 * speed
    assert 110.0 < at < 120.0


def test_given_nothing_ahead_when_planned_then_speed_and_lane_are_kept():
    plan = plan_along(CURVE, (*CURVE.at(np.array([120.0]))[0], 15.0), np.empty((0, 7)), 15.0, 2.0)
    assert plan.shape == (POSES, 4)
    assert plan[:, 3] == pytest.approx(15.0)
    assert np.abs(CURVE.place(plan[:, :2])[:, 1]).max() < 0.01
    assert np.hypot(*np.diff(plan[:, :2], axis=0).T) == pytest.approx(15.0 * STEP_S, rel=1e-2)


def test_given_a_vehicle_beside_its_lane_when_planned_then_it_is_back_in_the_middle_after_three_seconds():
    plan = plan_along(STRAIGHT, (0.0, 0.8, 0.0, 10.0), np.empty((0, 7)), 10.0, 2.0)
    assert plan[0, 1] == pytest.approx(0.8)
    assert plan[-1, 1] == pytest.approx(0.0)
    assert (np.diff(plan[:, 1]) <= 1e-12).all()


def test_given_a_stopped_car_too_near_for_comfort_when_planned_then_the_brakes_are_applied_fully():
    plan = speeds(car(3.5 + 38.0 + 2.25))
    assert np.diff(plan).min() == pytest.approx(-MAX_BRAKING * STEP_S)
    assert plan[-1] < 5.0


@pytest.mark.parametrize(
    ("objects", "brakes"),
    [
        (car(60.0, 3.5), False),  # beside
        (car(60.0, 3.5, vx=10.0, vy=-1.2), True),  # cuts in
        (car(60.0, 3.5, vx=10.0, vy=1.2), False),  # leaves
        (car(60.0, 12.0, vy=-8.0, yaw=-math.pi / 2), True),  # crosses
        (car(60.0, -12.0, vy=-8.0, yaw=-math.pi / 2), False),  # has crossed
        (car(-30.0), False),  # is behind
    ],
)
def test_given_an_object_when_planned_then_it_counts_if_it_is_in_the_way_or_will_be(objects, brakes):
    assert (speeds(objects)[-1] < 19.0) == brakes


def test_given_a_shorter_look_ahead_when_a_child_walks_towards_the_lane_then_only_the_longer_one_brakes():
    child = np.array([[30.0, -3.2, 0.0, 0.0, 1.4, 0.5, 0.5]])
    assert speeds(child, 10.0, 2.0)[5] < 10.0
    assert speeds(child, 10.0, 1.0)[5] == pytest.approx(10.0)


def test_given_a_share_of_blindness_when_asked_then_whole_seconds_are_blind_and_always_the_same():
    blindness = Blindness(0.2)
    seconds = [blindness.at(number * 1_000_000_000) for number in range(2000)]
    assert 300 < sum(seconds) < 500
    assert seconds[7] == blindness.at(7_900_000_000)
    assert not any(Blindness(0.0).at(number) for number in range(100))
