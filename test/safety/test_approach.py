"""What threatens the vehicle.

Not what drives as fast as it does, nor points that nothing holds together.
"""

import functools
import math
import os
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.traffic import lane_drives, lane_everyday
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.safety.approach import Approach, gap_left_m, together
from torchperf_ros.safety.corridor import Corridor
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.safety.sensor_points import Points
from torchperf_ros.settings.config import node_config

from .sensor_messages import odometry_bytes

DRIVES = int(os.environ.get("TORCHPERF_LANE_DRIVES", "12"))
OPTIONS = node_config({"emergency.sensors": ["scan"]}, {}).emergency
FRONT_M, EVERY_S = 3.5, 0.05


def rear_of(ahead_m, left_m=0.0, *, width_m=1.8, count=9):
    """The points of a car's rear, so far ahead of the vehicle's front."""
    return np.full(count, FRONT_M + ahead_m), left_m + np.linspace(-width_m / 2, width_m / 2, count)


def found_in(messages, *, speed=20.0, yaw_rate=0.0, every_s=EVERY_S):
    """How often in a row the thing of the last of these messages (x, y of points) has threatened."""
    approach, found = Approach(), None
    for number, (x, y) in enumerate(messages):
        motion = Motion.read(odometry_bytes(speed, yaw_rate), 0)
        points = Points(np.asarray(x), np.asarray(y), len(x), len(x) or 1, len(x) or 1)
        now_ns = round((100 + number * every_s) * NS_PER_S)
        found = approach.look(points, Corridor.of(OPTIONS, motion), motion, OPTIONS, now_ns)
    return found.threatens if found else 0


@pytest.mark.parametrize("speed", [3.0, 10.0, 20.0, 30.0])
@pytest.mark.parametrize("headway_s", [1.0, 1.5, 2.0])
def test_given_a_car_ahead_at_the_vehicles_speed_when_it_is_followed_then_it_never_threatens(
    speed, headway_s
):
    for count in range(1, 15):
        messages = [rear_of(max(speed * headway_s, 2.0))] * count
        assert found_in(messages, speed=speed) < OPTIONS.scans


@pytest.mark.parametrize("speed", [3.0, 10.0, 20.0, 30.0])
def test_given_what_stands_when_the_vehicle_comes_to_its_braking_distance_then_it_threatens_and_not_much_before(
    speed,
):
    stop_m = speed * OPTIONS.reaction_ms / 1000 + speed**2 / (2 * OPTIONS.deceleration)
    begin_m = stop_m + speed  # a second before
    latched_m = None
    ways_m = begin_m - speed * EVERY_S * np.arange(30)
    for count in range(1, len(ways_m)):
        if found_in([rear_of(way_m) for way_m in ways_m[:count]], speed=speed) >= OPTIONS.scans:
            latched_m = ways_m[count - 1]
            break
    assert stop_m <= latched_m <= stop_m + 0.31 + speed * EVERY_S * OPTIONS.scans


def test_given_three_points_that_nothing_holds_together_when_they_are_elsewhere_each_time_then_nothing_threatens():
    draw = np.random.default_rng(1)
    for _ in range(300):
        messages = [(draw.uniform(5.0, 40.0, 3), draw.uniform(-1.0, 1.0, 3)) for _ in range(2)]
        apart = all(len(each) == 1 for x, y in messages for each in together(x, y))
        assert not apart or found_in(messages) == 0


def test_given_a_thing_that_comes_into_the_way_when_it_was_followed_before_then_its_speed_is_known_at_once():
    lefts_m = [2.8 - 1.5 * EVERY_S * step for step in range(25)]  # its side is in the corridor from 2.05 on
    cutting_in = [rear_of(15.0 - 1.0 * EVERY_S * step, left_m) for step, left_m in enumerate(lefts_m)]
    assert all(found_in(cutting_in[:count]) == 0 for count in range(1, 25))
    standing = [rear_of(40.0 - 20.0 * EVERY_S * step, left_m) for step, left_m in enumerate(lefts_m)]
    assert found_in(standing) >= 2


def test_given_a_bend_when_a_car_ahead_drives_in_it_then_it_does_not_threaten_and_one_that_stands_does():
    speed, radius_m = 14.0, 98.0
    angle = (FRONT_M + 16.0) / radius_m
    _, left = rear_of(0.0)
    x, y = (radius_m - left) * math.sin(angle), radius_m - (radius_m - left) * math.cos(angle)
    assert found_in([(x, y)] * 14, speed=speed, yaw_rate=speed / radius_m) < 2
    assert found_in([(x, y)] * 2, speed=speed, yaw_rate=speed / radius_m, every_s=1e-3) == 2


def crossing(seed):
    """A drive to a long vehicle that crosses a little before it, and until when braking avoids it."""
    draw = random.Random(f"crossing {seed}")
    speed, length_m, across = draw.uniform(8.0, 16.0), draw.uniform(14.0, 18.0), draw.uniform(6.0, 12.0)
    side, enters_s = draw.choice((-1.0, 1.0)), 1.0
    stop_m = speed * (lane_drives.REACTION_S + 0.15) + speed**2 / (2 * lane_drives.DECELERATION)
    ahead_m = stop_m + speed * (draw.uniform(0.1, 0.4) + enters_s)
    left_m = side * (1.15 + length_m / 2 + across * enters_s)
    other = lane_drives.Other(FRONT_M + ahead_m + 1.25, left_m, 0.0, 2.5, length_m)
    other.across_plan = lambda _: -side * across
    return (
        lane_drives.Drive(lane_drives.Road(), speed, [other], 8.0),
        enters_s + 0.15 + lane_drives.REACTION_S,
    )


def is_hit(make, seed, *, brakes_s=math.inf, watches=False):
    drive, until_s = make(seed)
    brakes_s = until_s if brakes_s is None else brakes_s
    return lane_drives.run(drive, seed, brakes_s=brakes_s, watches=watches).hit_m_s > 0.0


def beside_a_car(seed, has_car=True):
    """A drive to a pedestrian who steps out, with a car in the next lane, and until when braking avoids it."""
    draw = random.Random(f"beside {seed}")
    speed, walks, side, enters_s = (
        draw.uniform(4.0, 11.0),
        draw.uniform(1.0, 2.5),
        draw.choice((-1.0, 1.0)),
        1.2,
    )
    gap_m = (
        speed * (lane_drives.REACTION_S + 0.15)
        + speed**2 / (2 * lane_drives.DECELERATION)
        + draw.uniform(0.5, 1.2)
    )
    left_m = side * (1.4 + walks * enters_s)
    walker = lane_drives.Other(FRONT_M + gap_m + speed * enters_s + 0.25, left_m, 0.0, 0.5, 0.5)
    walker.across_plan = lambda _: -side * walks
    car = lane_drives.Other(
        FRONT_M + gap_m + draw.uniform(-2.5, 0.5) + 2.25, -side * draw.uniform(2.9, 3.3), speed
    )
    others = [walker, car] if has_car else [walker]
    return (
        lane_drives.Drive(lane_drives.Road(), speed, others, 8.0),
        enters_s + 0.15 + lane_drives.REACTION_S,
    )


def test_given_a_pedestrian_who_steps_out_when_a_car_drives_in_the_next_lane_then_its_speed_is_not_taken_for_theirs():
    def alone(seed):
        return beside_a_car(seed, has_car=False)

    stopped = [seed for seed in range(20) if is_hit(alone, seed) and not is_hit(alone, seed, watches=True)]
    assert len(stopped) > 10
    assert [seed for seed in stopped if is_hit(beside_a_car, seed, watches=True)] == []


def test_given_messages_that_are_late_by_different_times_when_what_stands_is_near_then_it_does_not_seem_to_drive():
    for seed in range(50):
        draw = random.Random(f"late {seed}")
        speed, approach = draw.uniform(8.0, 28.0), Approach()
        motion = Motion.read(odometry_bytes(speed, 0.0), 0)
        stop_m = speed * OPTIONS.reaction_ms / 1000 + speed**2 / (2 * OPTIONS.deceleration)
        for number in range(30):
            way_m = stop_m + speed * (1.0 - number * EVERY_S)
            x, y = rear_of(way_m)
            now_ns = round((100 + number * EVERY_S + draw.uniform(0.0, 0.04)) * NS_PER_S)
            points = Points(x, y, len(x), len(x), len(x))
            found = approach.look(points, Corridor.of(OPTIONS, motion), motion, OPTIONS, now_ns)
            assert found or way_m > stop_m + 0.07 * speed, seed  # two messages have to show it


@pytest.mark.parametrize("grows", [0.1, 0.25])
def test_given_scans_that_come_later_and_later_when_there_is_a_danger_then_what_stands_does_not_seem_to_drive(
    grows,
):
    def late_s(now_s):
        return min(grows * now_s, 0.3)

    hits_m_s = []
    for seed in range(DRIVES):
        known_s = lane_drives.danger(seed).known_s + EVERY_S  # a scan is looked at with the next one
        if hit_late_m_s(seed, brakes_s=known_s + late_s(known_s) + lane_drives.REACTION_S) == 0.0:
            hits_m_s.append(hit_late_m_s(seed, late_s=late_s))
    # It brakes as late as it can, and the time between two messages grows: few are hit, and slowly.
    assert len(hits_m_s) > DRIVES / 2
    assert np.count_nonzero(hits_m_s) <= 2 + 0.1 * DRIVES
    assert max(hits_m_s) < 4.0


def hit_late_m_s(seed, **how):
    return lane_drives.run(lane_drives.danger(seed), seed, watches="late_s" in how, **how).hit_m_s


def brakes_hard(seed):
    """A drive behind a car that brakes as hard as tyres can, or hits something, and until when braking avoids it."""
    draw = random.Random(f"hard {seed}")
    speed, begins_s = draw.uniform(6.0, 30.0), draw.uniform(1.0, 3.0)
    ahead_m, by = speed * draw.uniform(1.0, 2.5), draw.uniform(9.0, 12.0)
    lead = lane_drives.Other(FRONT_M + ahead_m + 2.25, 0.0, speed * draw.uniform(0.8, 1.0))
    lead.plan = lambda now_s: -by if now_s >= begins_s else 0.0
    return (
        lane_drives.Drive(lane_drives.Road(), speed, [lead], 20.0),
        begins_s + 0.35 + lane_drives.REACTION_S,
    )


def test_given_a_lead_at_the_vehicles_speed_when_its_distance_is_noisy_then_it_does_not_seem_to_brake():
    draw = np.random.default_rng(5)
    for speed, headway_s, noise_m in [(30.0, 0.8, 0.02), (25.0, 1.0, 0.05), (20.0, 1.5, 0.08)]:
        messages = [rear_of(speed * headway_s + draw.normal(0.0, noise_m)) for _ in range(400)]
        approach = Approach()
        motion = Motion.read(odometry_bytes(speed, 0.0), 0)
        way = Corridor.of(OPTIONS, motion)
        for number, (x, y) in enumerate(messages):
            now_ns = round((100 + number * EVERY_S) * NS_PER_S)
            found = approach.look(Points(x, y, len(x), len(x), len(x)), way, motion, OPTIONS, now_ns)
            assert found is None or found.threatens < OPTIONS.scans, (speed, number)


@pytest.mark.parametrize(
    ("make", "drives", "least"), [(crossing, 30, 10), (brakes_hard, DRIVES, DRIVES / 4)]
)
def test_given_what_crosses_or_brakes_as_few_cars_can_when_there_is_time_then_the_lane_stops_the_vehicle(
    make, drives, least
):
    """The end of what crosses is far beside the corridor, and has not left it."""
    dangers = [seed for seed in range(drives) if is_hit(make, seed)]
    dangers = [seed for seed in dangers if not is_hit(make, seed, brakes_s=None)]
    assert len(dangers) > least
    assert [seed for seed in dangers if is_hit(make, seed, watches=True)] == []


@pytest.mark.parametrize(
    ("gap_m", "speed", "ahead", "brakes", "left_m"),
    [
        (40.0, 20.0, 0.0, 0.0, 40.0 - 6.0 - 400 / 12),
        (10.0, 20.0, 20.0, 0.0, 10.0),
        (30.0, 20.0, 10.0, 0.0, 30.0 - 3.0 - 100 / 12),
        (20.0, 20.0, 20.0, 6.0, 20.0 - 6.0),
        (5.0, 0.0, 0.0, 0.0, 5.0),
    ],
)
def test_given_two_that_brake_then_the_least_distance_is_that_of_their_parabolas(
    gap_m, speed, ahead, brakes, left_m
):
    assert gap_left_m(gap_m, speed, ahead, brakes, 6.0, 0.3) == pytest.approx(left_m, abs=0.1)


def test_given_points_on_a_line_when_they_are_put_together_then_gaps_separate_them():
    x = np.concatenate([np.arange(0.0, 3.0, 0.3), np.arange(8.0, 9.0, 0.3), [20.0]])
    things = [x[each].tolist() for each in together(x, np.zeros(len(x)))]
    assert sorted(map(len, things)) == [1, 4, 10]
    assert together(np.empty(0), np.empty(0)) == []


def test_given_a_range_sensor_or_a_slow_one_when_messages_are_far_apart_then_they_belong_together_all_the_same():
    ways_m = [2.6, 1.6, 0.6]
    assert found_in([rear_of(way_m) for way_m in ways_m], speed=1.0, every_s=1.0) >= 1
    assert found_in([rear_of(0.4), rear_of(0.3)], speed=0.1, every_s=1.0) == 2


# -- drawn drives


@pytest.mark.parametrize(("every_s", "scans"), [(0.2, 2), (0.1, 2), (0.1, 5), (0.05, 2)])
def test_given_a_thing_of_few_points_when_it_appears_near_then_it_threatens_as_soon_as_any_other(
    every_s, scans
):
    near = [rear_of(2.5 - 4.0 * every_s * number, width_m=0.4, count=4) for number in range(scans)]
    assert found_in(near, speed=4.0, every_s=every_s) == scans


def test_given_scattered_points_when_a_slow_sensor_shows_them_for_long_then_they_threaten():
    """So few messages fit into the window of a speed that their number there says nothing."""
    near = [rear_of(0.5 - 0.1 * number, width_m=1.6, count=4) for number in range(5)]
    assert [found_in(near[:count], speed=0.5, every_s=0.2) for count in (3, 5)] == [0, 2]


@pytest.mark.parametrize(
    ("make", "seeds"),
    [
        (lane_drives.ordinary, range(DRIVES // 2)),
        (lane_drives.ordinary, range(1000, 1000 + DRIVES // 2)),
        *(
            pytest.param(functools.partial(lane_everyday.everyday, kind), range(DRIVES // 3), id=kind)
            for kind in lane_everyday.EVERYDAY
            if kind not in lane_everyday.STEERED
        ),
    ],
)
def test_given_ordinary_traffic_of_a_kind_when_it_is_driven_through_then_the_lane_never_stops_the_vehicle(
    make, seeds
):
    for seed in seeds:
        found = lane_drives.run(make(seed), seed, until_hit=False)
        assert (found.reason, found.hit_m_s) == ("", 0.0), seed


def test_given_dangers_that_braking_in_time_avoids_when_the_vehicle_sees_nothing_then_the_lane_stops_it():
    for seed in range(2 * DRIVES):
        found = lane_drives.run(lane_drives.danger(seed), seed)
        assert found.hit_m_s == 0.0 or not lane_drives.is_avoidable(seed), seed


@pytest.mark.parametrize("kind", lane_drives.KINDS)
def test_given_a_danger_of_each_kind_when_nobody_brakes_then_it_is_hit(kind):
    """So that the test before can fail."""
    seed = next(seed for seed in range(200) if lane_drives.danger(seed).kind == kind)
    drive = replace(lane_drives.danger(seed), lasts_s=25.0)
    assert lane_drives.run(drive, seed, watches=False).hit_m_s > 0.0
