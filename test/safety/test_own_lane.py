"""The lane that is ours: what cars show of it, ways back into it, and what a plan beside it has to leave open."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, plan_bytes
from benchmarks.traffic import plans
from torchperf_ros.api.outcome import GuardVerdict
from torchperf_ros.safety.guard import Guard
from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Track
from torchperf_ros.safety.obstacles import Seen
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.safety.own_lane import IN_LANE_M, OwnLane
from torchperf_ros.safety.prediction import Arc, Looks, course_of
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.safety_options import guard_options

T = np.linspace(0.0, 3.0, 31)


def seen(*cars):
    """Cars of x, y, heading and speed."""
    x, y, yaw, speed = np.array(cars, np.float64).reshape(-1, 4).T
    units = np.exp(1j * yaw)
    halves = np.tile((2.25, 0.95), (len(x), 1))
    zeros = np.zeros(len(x))
    return Seen(x + 1j * y, yaw, units, halves, units * speed, speed, zeros, zeros)


def a_lane(speed=15.0, cars=()):
    """Our lane along x from 0, as a plan draws it that keeps to it."""
    lane = OwnLane()
    lane.take(Lane(Track(T, speed * T + 0j, 0.0 * T), 0.0), 0.0, 0, seen(*cars), goes_out=True)
    return lane


@settings(max_examples=40, deadline=None)
@given(
    left=st.floats(-4.0, 4.0),
    slope=st.floats(-0.15, 0.15),
    speed=st.floats(0.0, 25.0),
)
def test_given_a_vehicle_beside_its_lane_when_it_returns_then_it_begins_where_it_is_and_ends_in_the_lane(
    left, slope, speed
):
    here = Motion(b"odom", b"base_link", 0, 0, 20.0, left, 0.0, math.atan(slope), speed, 0.0)
    ways = list(a_lane().ways_back(here, speed, START_NS, 6.0, 8.0))
    assert ways
    for path, does in ways:
        place = path.points[:, 0] + 1j * path.points[:, 1]
        track = Track.of(path, START_NS, None)
        assert place[0] == pytest.approx(complex(20.0, left))
        assert track.yaw[0] == pytest.approx(math.atan(slope))
        assert np.all(np.diff(path.stamps_ns) > 0)
        steps = np.abs(np.diff(place)) / np.diff(track.t_s)
        assert steps.max() <= max(1.1 * math.hypot(1.0, slope) * speed, 6.7)
        if abs(left) > IN_LANE_M and does != "returns to its lane and brakes":
            assert abs(path.points[-1, 1]) < 0.05
            assert abs(track.yaw[-1]) < 0.02


@pytest.mark.parametrize(("bend", "direction"), [(0.006, 1), (-0.01, 1), (-0.01, -1)])
def test_given_a_plan_that_changes_lanes_in_a_bend_when_a_car_drives_there_then_our_lane_goes_on_as_it_does(
    bend, direction
):
    road = plans.Road(((0.0, bend), (1.0, bend)))
    lane, out = OwnLane(), plans.Scene("out", road, 15.0, changes=((3.5, 0.0, 60.0),))
    (at,), (heading,) = road.at(np.array([40.0]), 0.0 if direction > 0 else 3.5)
    car = (at.real, at.imag, heading + (0.0 if direction > 0 else math.pi), 8.0)
    place, yaw = out.poses(15.0 * T)
    lane.take(Lane(Track(T, place, yaw), 0.0), 0.0, 0, seen(car), goes_out=True)
    places, _ = road.at(np.linspace(0.0, 40.0, 9), 0.0)
    assert max(lane.aside_m(complex(one)) for one in places) < 1.0
    blind = OwnLane()
    blind.take(Lane(Track(T, place, yaw), 0.0), 0.0, 0, seen(), goes_out=True)
    assert max(blind.aside_m(complex(one)) for one in places) > 2.0


@settings(max_examples=30, deadline=None)
@given(
    bend=st.floats(0.01, 0.04),
    left=st.booleans(),
    over_m=st.floats(0.5, 40.0),
    speed=st.floats(6.0, 25.0),
)
def test_given_a_bend_of_the_road_when_it_is_driven_then_our_lane_bends_with_it(bend, left, over_m, speed):
    bend = min(bend, 3.0 / speed**2) * (1 if left else -1)
    ends = 40.0 + over_m + 1.5 / abs(bend)
    road = plans.Road(((40.0, 0.0), (40.0 + over_m, bend), (ends, bend), (ends + over_m, 0.0)))
    lane, scene = OwnLane(), plans.Scene("bend", road, speed)
    for at_s in np.arange(0.0, (ends + 60.0) / speed, 0.1):
        place, yaw = scene.poses(speed * (at_s + T))
        now = float(np.interp(speed * at_s, road.s, road.bends))
        way = Lane(Track(T, place, yaw), now)
        assert lane.shows(way).looks is not Looks.CHANGE
        lane.take(way, now, round(at_s * S), seen(), goes_out=True)
        assert lane.aside_m(complex(place[0])) < IN_LANE_M


@settings(max_examples=40, deadline=None)
@given(
    bend=st.floats(0.004, 0.03),
    side=st.sampled_from((-1, 1)),
    begins=st.floats(0.0, 1.2),
    over_m=st.floats(2.0, 40.0),
    speed=st.floats(6.0, 20.0),
    off_m=st.sampled_from((-0.08, 0.08)),
)
def test_given_cars_in_a_bend_when_the_first_plan_returns_to_its_line_then_no_later_one_is_known_to_change_lanes(
    bend, side, begins, over_m, speed, off_m
):
    bend, begins = side * min(bend, 2.0 / speed**2), begins * 3.0 * speed
    ends = begins + over_m + 1.5 / abs(bend)
    road = plans.Road(((begins, 0.0), (begins + over_m, bend), (ends, bend), (ends + over_m, 0.0)))
    returns = plans.Scene("returns", road, speed, left=off_m, changes=((-off_m, 0.0, 1.5 * speed),))
    lane, looks = OwnLane(), []
    for at_s in np.arange(0.0, 2.0, 0.1):
        place, yaw = returns.poses(speed * (at_s + T))
        now = float(np.interp(speed * at_s, road.s, road.bends))
        way = Lane(Track(T, place, yaw), now)
        looks.append(lane.shows(way).looks)
        at, headings = road.at(np.array([50.0, 75.0, 110.0]) - 0.8 * speed * at_s, 3.5)
        cars = zip(at.real, at.imag, headings + math.pi, [0.8 * speed] * 3, strict=True)
        lane.take(way, now, round(at_s * S), seen(*cars), goes_out=True)
    assert Looks.CHANGE not in looks


@settings(max_examples=40, deadline=None)
@given(
    lateral=st.floats(0.5, 2.0),
    bends=st.sampled_from((-1, 1)),
    over_s=st.floats(0.5, 3.0),
    speed=st.floats(6.0, 28.0),
    off_m=st.floats(-0.1, 0.1),
    begins=st.floats(-1.0, 1.0),
)
def test_given_a_lane_that_is_kept_when_plans_return_to_their_line_at_a_bend_then_none_looks_like_a_change_of_lanes(
    lateral, bends, over_s, speed, off_m, begins
):
    bend, over_m = bends * min(lateral / speed**2, 0.033), over_s * speed
    road = plans.Road(((40.0, 0.0), (40.0 + over_m, bend), (400.0, bend)))
    line = ((-off_m, 40.0 + begins * over_m, 2.0 * speed),)
    returns, lane, changed = plans.Scene("returns", road, speed, left=off_m, changes=line), OwnLane(), []
    nobody_near = seen((400.0, 100.0, 0.0, 5.0))
    for at_s in np.arange(0.0, (40.0 + 3.0 * over_m) / speed, 0.1):
        place, yaw = returns.poses(speed * (at_s + T))
        driven = float(np.diff(returns.poses(speed * (at_s + np.array([-0.02, 0.02])))[1])[0]) / (
            0.04 * speed
        )
        way = Lane(Track(T, place, yaw), driven)
        shown, arc = lane.shows(way), Arc(way, driven)
        if shown.road is not None:
            arc.travel, arc.bend = shown.road
        changed.append(course_of(way, arc, nobody_near, shown).changes)
        lane.take(way, driven, round(at_s * S), nobody_near, goes_out=True)
    assert not any(changed[15:])  # it has kept its lane for 1.5 s


@settings(max_examples=40, deadline=None)
@given(
    lateral=st.floats(0.0, 2.0),
    bends=st.sampled_from((-1, 1)),
    side=st.sampled_from((-3.5, 3.5)),
    speed=st.floats(8.0, 25.0),
    begins=st.floats(0.1, 0.4),
    takes_s=st.floats(3.0, 4.5),
)
def test_given_a_lane_that_is_kept_when_the_next_plan_leaves_it_then_it_is_known_as_far_as_the_lane_is(
    lateral, bends, side, speed, begins, takes_s
):
    bend, way_m = bends * lateral / speed**2, 3.0 * speed
    road = plans.Road(((0.0, bend), (1.0, bend)))
    leaves = plans.Scene("leaves", road, speed, changes=((side, begins * way_m, takes_s * speed),))
    keeps, lane = replace(leaves, changes=()), OwnLane()
    for scene, at_s in ((keeps, -0.3), (keeps, 0.0), (leaves, 0.1)):
        place, yaw = scene.poses(speed * (at_s + T))
        way = Lane(Track(T, place, yaw), bend)
        if scene is keeps:
            lane.take(way, bend, round((at_s + 1.0) * S), seen(), goes_out=True)
    aside_m = abs(float(leaves.lefts(np.array([2.7 * speed]))[0]))  # where the first of these plans ended
    assert (lane.shows(way).looks is Looks.CHANGE) == (aside_m > 0.52) or abs(aside_m - 0.5) < 0.1


@settings(max_examples=40, deadline=None)
@given(
    lateral=st.floats(0.6, 2.0),
    bends=st.sampled_from((-1, 1)),
    side=st.sampled_from((-1, 1)),
    speed=st.floats(8.0, 20.0),
)
def test_given_a_lane_that_plans_have_drawn_when_a_car_leads_it_on_in_a_bend_then_a_plan_is_known_to_leave_it_there(
    lateral, bends, side, speed
):
    bend, length = bends * lateral / speed**2, 3.0 * speed
    road = plans.Road(((0.0, bend), (1.0, bend)))
    leaves = plans.Scene("leaves", road, speed, changes=((3.5 * side, 0.8 * length, 0.45 * length),))

    def way_at(scene, at_m):
        place, yaw = scene.poses(at_m + speed * T)
        return Lane(Track(T, place, yaw), bend)

    (at,), (heading,) = road.at(np.array([length + math.sqrt(3.0 / abs(bend))]), 3.5 * side)
    car = (at.real, at.imag, heading, speed)
    lane = OwnLane()
    lane.take(way_at(replace(leaves, changes=()), 0.0), bend, 0, seen(car), goes_out=True)
    lane.take(way_at(leaves, 0.26 * length), bend, S, seen(car), goes_out=True)
    assert lane.shows(way_at(leaves, 0.27 * length)).looks is Looks.CHANGE


class Vehicle:
    """Follows what a guard publishes, ten plans a second, while a car comes in the other lane."""

    def __init__(self, speed, gap_m, other):
        self.guard = Guard(guard_options({"guard.act": ["all"]}))
        self.x, self.y, self.yaw, self.speed = 0.0, 0.0, 0.0, speed
        self.other_m, self.other, self.at_s, self.found = gap_m, other, 0.0, None

    def step(self, plan):
        now_ns, ros_ns = 10 * S + round(self.at_s * S), START_NS + round(self.at_s * S)
        boxes = [Box(self.other_m, 3.5, math.pi, velocity=(-self.other, 0.0))]
        self.guard.moved(odometry_bytes(self.x, self.y, self.yaw, self.speed, stamp_ns=ros_ns), now_ns)
        self.guard.saw(0, markers_bytes(boxes, stamp_ns=ros_ns), now_ns)
        self.found = self.guard.check(plan and plan(self, ros_ns), now_ns, ros_ns, 60.0)
        track = Track.of(TimedPath.parse(self.found.payload), ros_ns, None)
        before, after = track.at(0.08)[0], track.at(0.1)
        self.x, self.y, self.yaw = after[0].real, after[0].imag, after[1]
        self.speed = abs(after[0] - before) / 0.02
        self.other_m, self.at_s = self.other_m - 0.1 * self.other, self.at_s + 0.1

    @property
    def apart_m(self):
        own = plans.corners(np.array([complex(self.x, self.y)]), np.array([self.yaw]), 4.5, 1.9, 1.25)
        car = plans.corners(np.array([complex(self.other_m, 3.5)]), np.array([math.pi]), 4.5, 1.9)
        return float(plans.apart_m(own, car)[0])


def leads(aim):
    """A plan towards a lane, begun anew each time, so that the vehicle moves there more slowly than any says."""

    def plan(vehicle, ros_ns):
        speed = max(vehicle.speed, 2.0)
        way, slope = speed * T, math.tan(vehicle.yaw)
        over = 3.5 * max(speed, 4.0)
        share = np.clip(way / over, 0.0, 1.0)
        fade = (1 - share) ** 3 * (1 + 3 * share + 6 * share**2)
        y = aim + (vehicle.y - aim) * fade + slope * over * share * (1 - share) ** 3 * (1 + 3 * share)
        yaws = np.arctan2(np.gradient(y, T), speed)
        yaws[0] = vehicle.yaw
        return plan_bytes(T, vehicle.x + way, y, yaws, start_ns=ros_ns)

    return plan


@settings(max_examples=25, deadline=None)
@given(
    speed=st.floats(8.0, 18.0),
    gap_m=st.floats(120.0, 320.0),
    other=st.floats(8.0, 20.0),
)
def test_given_a_planner_that_creeps_into_the_way_of_a_car_when_that_never_brakes_then_nothing_touches(
    speed, gap_m, other
):
    vehicle = Vehicle(speed, gap_m, other)
    while vehicle.other_m > vehicle.x - 5.0:
        keeps = vehicle.at_s < 0.45
        vehicle.step(leads(0.0 if keeps else 3.5))
        assert vehicle.apart_m > 0.0


def test_given_a_way_back_when_the_planner_insists_then_it_goes_on_as_a_whole():
    vehicle, verdicts = Vehicle(14.0, 230.0, 15.0), []
    for number in range(110):
        vehicle.step(leads(0.0 if number < 5 else 3.5))
        verdicts.append((vehicle.found.verdict, vehicle.found.reason))
    assert any(verdict is GuardVerdict.BRAKE and "goes on back" in why for verdict, why in verdicts)
    assert vehicle.apart_m > 0.0
