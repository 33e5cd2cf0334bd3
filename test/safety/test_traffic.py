"""Drawn plans and traffic: what really happens, by footprints step by step, against what the guard says.

`TORCHPERF_GUARD_TRAFFIC=1000` draws so many plans that end head-on, and four times as many clear ones.
"""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.traffic import plans

PLANS = int(os.environ.get("TORCHPERF_GUARD_TRAFFIC", "60"))


def test_given_plans_that_end_head_on_when_braking_now_avoids_it_then_those_of_a_straight_road_are_refused():
    accepted = {True: 0, False: 0}
    for scene in plans.head_on_plans(11, PLANS):
        went_through = not plans.refused(scene, 0.7)
        accepted[bool(scene.road.bends.any())] += went_through
    assert accepted[False] <= 0.01 * PLANS
    assert accepted[True] <= 0.1 * PLANS  # beyond a plan's end, a bend of the road is a guess


def test_given_a_vehicle_that_has_kept_its_lane_when_a_plan_ends_head_on_then_it_is_refused_in_bends_as_well():
    accepted = [scene for scene in plans.head_on_plans(14, PLANS) if not plans.refused_driven(scene, 0.7)]
    assert len(accepted) <= 0.01 * PLANS


def test_given_clear_plans_when_checked_then_no_more_than_one_in_a_hundred_is_refused():
    refused = [scene.kind for scene in plans.clear_plans(12, 4 * PLANS) if plans.refused(scene, 0.7)]
    assert len(refused) <= 0.01 * 4 * PLANS, refused


def test_given_cars_beside_when_a_bend_begins_then_no_plan_is_replaced():
    assert [plans.false_stops(scene) for scene in plans.passages(13, max(PLANS // 6, 1))] == [[]] * max(
        PLANS // 6, 1
    )


def test_given_several_that_come_when_a_bend_is_driven_through_then_hardly_a_plan_is_replaced():
    scenes = list(plans.streams(13, max(PLANS // 6, 1)))
    replaced = sum(len(plans.false_stops(scene, until_m=200.0)) for scene in scenes)
    assert replaced <= 0.01 * sum(10.0 * 200.0 / scene.speed for scene in scenes)


@settings(max_examples=20, deadline=None)
@given(
    radius=st.floats(80.0, 400.0),
    lateral=st.floats(1.0, 2.0),
    side=st.sampled_from([-1.0, 1.0]),
    outside=st.booleans(),
    towards=st.floats(11.0, 25.0),
    first_m=st.floats(50.0, 150.0),
    apart_m=st.floats(40.0, 150.0),
)
@example(350.0, 1.8, 1.0, False, 12.3, 90.0, 100.0)
@example(138.0, 1.64, 1.0, False, 21.1, 110.0, 100.0)
def test_given_cars_that_come_when_a_bend_ends_at_once_then_no_plan_is_replaced(
    radius, lateral, side, outside, towards, first_m, apart_m
):
    road = plans.Road(((20.0, side / radius), (21.0, 0.0)))
    left = plans.LANE_M * side * (-1.0 if outside else 1.0)
    cars = tuple(plans.Car(first_m + apart_m * number, left, -towards) for number in range(5))
    speed = min((lateral * radius) ** 0.5, 25.0)
    assert plans.false_stops(plans.Scene("bend", road, speed, 0.0, 0.0, (), cars), until_m=25.0) == []


@pytest.mark.parametrize("seed", range(3))
def test_given_an_overtaking_that_something_comes_towards_when_driven_then_the_moving_vehicle_touches_nothing(
    seed,
):
    drive = plans.an_overtaking(np.random.default_rng(seed))
    found = plans.driven(drive)
    assert math.isnan(found.speed) or found.speed <= plans.MOVES
    assert found.verdicts & {"brake", "rebased", "stop"}


def test_given_a_scene_when_its_footprints_touch_then_the_contact_is_found():
    road = plans.Road()
    ahead = plans.Scene("ahead", road, 10.0, cars=(plans.Car(20.0, 0.0, -10.0),))
    assert plans.contact_s(ahead, 3.0) == pytest.approx((20.0 - 2.25 - 3.5) / 20.0, abs=0.03)
    assert plans.spared_m(ahead) <= 0.0
    beside = plans.Scene("beside", road, 10.0, cars=(plans.Car(20.0, 1.95, -10.0),))
    assert math.isnan(plans.contact_s(beside, 3.0))
    assert not plans.is_clear(beside)  # 5 cm


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sends=st.sampled_from(plans.SENDS),
    straight=st.booleans(),
)
def test_given_a_planner_that_ends_in_an_overtaking_when_a_return_is_clear_then_the_vehicle_ends_in_its_lane(
    seed, sends, straight
):
    drive, end = plans.an_ending(np.random.default_rng(seed), sends)
    if straight:
        drive = replace(drive, road=plans.Road())
    found = plans.driven(drive, end, lasts_s=plans.ENDED_S)
    assert not found.speed > plans.MOVES
    # In bends the lane is known less well.
    most_m = plans.IN_LANE_M + (0.0 if not drive.road.bends.any() else 0.5)
    assert not found.at_end[2] or abs(found.left) <= most_m or not math.isnan(found.contact_s)


# In a bend that begins or ends beside the change: what comes is in the way of the plan's end, and its direction differs
# from the plan's there, or is that of the bend that we drive.
IN_THE_WAY = (
    (
        ((-28.0, 0.0), (5.0, -0.00515), (43.0, -0.00516), (76.0, 0.0)),
        (13.5, 0.77, 0.18, (-3.5, 9.5, 47.8)),
        plans.Car(68.9, -3.7, -16.9, 9.5, 2.45),
    ),
    (
        ((17.5, 0.0), (23.5, -0.0127), (175.5, -0.0127), (181.5, 0.0)),
        (13.66, -0.97, 0.0, (3.5, -4.7, 44.5)),
        plans.Car(31.4, 3.66, -15.7, 4.1, 2.5),
    ),
    (
        ((-55.0, 0.0), (-4.0, -0.0121), (35.5, -0.0121), (86.0, 0.0)),
        (11.8, 0.2, -0.05, (3.5, -21.0, 66.6)),
        plans.Car(26.9, 3.75, -18.2, 4.1, 2.0),
    ),
)


@settings(max_examples=30, deadline=None)
@given(
    drawn=st.sampled_from(IN_THE_WAY),
    mirrored=st.sampled_from([1.0, -1.0]),
    turned=st.floats(-3.0, 3.0),
    sooner_m=st.floats(-1.0, 1.0),
    faster=st.floats(0.99, 1.01),
)
@example(IN_THE_WAY[0], 1.0, 0.7, 0.0, 1.0)
@example(IN_THE_WAY[1], -1.0, 0.7, 0.0, 1.0)
@example(IN_THE_WAY[2], 1.0, 0.7, 0.0, 1.0)
def test_given_what_comes_in_the_way_of_a_plan_when_the_road_bends_beside_it_then_even_a_first_plan_is_refused(
    drawn, mirrored, turned, sooner_m, faster
):
    bends, (speed, gains, left, (by_m, *from_over)), car = drawn
    road = plans.Road(tuple((s, mirrored * bend) for s, bend in bends))
    car = replace(car, s=car.s + sooner_m, left=mirrored * car.left, speed=faster * car.speed)
    changes = ((mirrored * by_m, *from_over),)
    scene = plans.Scene("head-on", road, speed, gains, mirrored * left, changes, (car,))
    assert not math.isnan(plans.contact_s(scene, scene.horizon_s))
    assert plans.refused(scene, turned)
