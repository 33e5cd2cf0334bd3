import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes
from torchperf_ros.safety.distance import roles_of
from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Track
from torchperf_ros.safety.obstacles import read_obstacles, seen_now
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.safety.prediction import (
    Arc,
    Looks,
    Shown,
    along_joined,
    along_lane,
    course_of,
    leads_to,
    leaves_lane,
    left_of_what_we_drive,
    lefts_of_roads,
    predicted,
    runs_beside,
)
from torchperf_ros.settings.safety_options import guard_options

T = np.arange(0.0, 3.05, 0.1)
OPTIONS = guard_options({})


def bent(s, bend):
    """x + iy and heading on a circle that begins at the origin along x."""
    turned = bend * s
    if abs(bend) < 1e-9:
        return s + 0j, turned
    return (np.sin(turned) + 1j * (1 - np.cos(turned))) / bend, turned


def in_bend(s, left, bend, speed, drift=0.0, **size):
    """Something that drives in a bend, at a distance along it."""
    place, yaw = bent(s, bend)
    way = np.exp(1j * yaw)
    place, velocity = place + 1j * left * way, (speed + 1j * drift) * way
    return Box(place.real, place.imag, yaw, velocity=(velocity.real, velocity.imag), **size)


def seen_of(boxes, turned=0.0):
    moved = []
    for box in boxes:
        place, velocity = (complex(*of) * np.exp(1j * turned) for of in (box[:2], box.velocity))
        moved.append(
            Box(place.real, place.imag, box.yaw + turned, *box[3:5], (velocity.real, velocity.imag))
        )
    motion = Motion.read(odometry_bytes(), 10 * S)
    read = read_obstacles(markers_bytes(moved), 10 * S, OPTIONS, motion, None)
    return seen_now((read,), OPTIONS, 10 * S, START_NS, 0.0)[0]


def straight_track(speed=10.0, turned=0.0):
    return Track(T, speed * T * np.exp(1j * turned), 0 * T + turned)


def change_track(speed=10.0, begins_m=0.0, over_m=40.0, to_m=3.5):
    """A change of lanes that begins there, which may be behind us; from where we are then."""
    x = speed * T
    share = np.clip((x - begins_m) / over_m, 0.0, 1.0)
    y = to_m * share**3 * (10 - 15 * share + 6 * share**2)
    slope = to_m / over_m * 30 * share**2 * (1 - share) ** 2
    return Track(T, x + 1j * y, np.arctan(slope))


def bend_track(bend, speed=10.0, begins_m=0.0, over_m=0.0, then_m=1e3):
    """Into a bend that begins there and is full after `over_m`, and out of it after `then_m`."""
    fine = np.linspace(0.0, speed * 3.0, 3001)
    bends = bend * np.interp(
        fine, [begins_m, begins_m + over_m + 1e-6, begins_m + over_m + then_m], [0.0, 1.0, 1.0]
    )
    bends[fine > begins_m + over_m + then_m] = 0.0
    step = fine[1] - fine[0]
    yaw = np.concatenate(([0.0], np.cumsum(0.5 * (bends[1:] + bends[:-1]) * step)))
    place = np.concatenate(([0.0], np.cumsum(step * np.exp(0.5j * (yaw[1:] + yaw[:-1])))))
    return Track(T, np.interp(speed * T, fine, place), np.interp(speed * T, fine, yaw))


def course(track, boxes, bend=0.0, turned=0.0):
    lane = Lane(track, bend)
    arc = Arc(lane, bend)
    seen = seen_of(boxes, turned)
    return course_of(lane, arc, seen), lane, arc, seen


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("bend", [0.03, -0.03, 0.0])
def test_given_a_bend_that_we_drive_when_points_are_beside_it_then_they_are_as_far_aside_as_put(
    bend, backward
):
    heading, at, way = 2.5, 70.0 - 30.0j, -1 if backward else 1
    s, left = np.array([-12.0, 0.0, 5.0, 30.0]), np.array([4.0, -2.0, 0.0, 7.0])
    along, yaw = bent(s, way * bend)
    directions = way * np.exp(1j * (heading + yaw))
    start = np.exp(1j * heading)
    places = at + way * start * along + 1j * left * directions
    found = Arc(Lane(Track(T, at + way * T * start, heading + 0 * T)), bend).beside(places)
    assert found[0] == pytest.approx(s, abs=1e-3)
    assert found[1] == pytest.approx(left, abs=1e-3)
    assert found[2] == pytest.approx(directions, abs=1e-4)


@settings(max_examples=100)
@given(
    bend=st.floats(-0.03, 0.03),
    left=st.floats(-5.0, 5.0),
    beyond_m=st.floats(1.0, 60.0),
    towards=st.booleans(),
    backward=st.booleans(),
)
def test_given_a_circle_beyond_the_plans_end_then_what_drives_along_it_is_as_far_aside_as_put(
    bend, left, beyond_m, towards, backward
):
    ours = straight_track(-10.0 if backward else 10.0)
    box = in_bend(beyond_m, left, bend, -9.0 if towards else 9.0)
    place, heading = bent(beyond_m, bend)
    even, eased, unsure_m = lefts_of_roads(
        np.array([place + 1j * left * np.exp(1j * heading)]), np.array([heading]), bend
    )
    assert even[0] == pytest.approx(left, abs=1e-6)
    assert eased[0] == pytest.approx(left, abs=0.02 + 0.15 * abs(heading) * (abs(unsure_m[0]) + abs(left)))
    way = -1.0 if backward else 1.0
    box = box._replace(
        x=way * (30.0 + box.x), y=way * box.y, velocity=tuple(way * one for one in box.velocity)
    )
    lane = Lane(ours, 0.0)
    found = along_joined(lane, Arc(lane, 0.0), seen_of([box]), Looks.KEEPS)
    assert abs(found.left[0]) >= abs(left) - 1e-6
    assert found.ahead[0] == pytest.approx(-9.0 if towards else 9.0)
    nearest = along_joined(lane, Arc(lane, 0.0), seen_of([box]), Looks.CHANGE)
    furthest = along_joined(lane, Arc(lane, 0.0), seen_of([box]), Looks.CIRCLE)
    assert abs(nearest.left[0]) <= abs(left) <= abs(furthest.left[0]) + 1e-6


@settings(max_examples=100)
@given(
    begins=st.floats(-0.02, 0.02),
    ends=st.floats(-0.02, 0.02),
    over_m=st.floats(5.0, 40.0),
    left=st.floats(-5.0, 5.0),
)
def test_given_a_road_whose_bend_goes_over_evenly_then_what_drives_along_it_is_as_far_aside_as_put(
    begins, ends, over_m, left
):
    fine = np.linspace(0.0, over_m, 4001)
    yaw = begins * fine + (ends - begins) * fine**2 / (2 * over_m)
    place = np.trapezoid(np.exp(1j * yaw), fine)
    turned = float(yaw[-1])
    off = np.array([place + 1j * left * np.exp(1j * turned)])
    _, eased, aside_m = lefts_of_roads(off, np.array([turned]), begins)
    if begins * ends >= 0.0:  # a road that bends one way only
        assert eased[0] == pytest.approx(
            left, abs=0.02 + 0.15 * abs(turned) * (abs(aside_m[0]) + abs(left))
        )


@settings(max_examples=150)
@given(
    speed=st.floats(5.0, 30.0),
    takes_s=st.floats(3.0, 5.5),
    begun=st.floats(0.0, 0.2),
    side=st.sampled_from([-3.5, 3.5]),
)
def test_given_a_change_of_lanes_when_half_of_it_is_seen_then_it_is_known_from_a_bend(
    speed, takes_s, begun, side
):
    over = max(takes_s * speed, 20.0)
    track = change_track(speed, -begun * over, over, side)
    share = begun
    bend = side / over**2 * (60 * share - 180 * share**2 + 120 * share**3)
    if begun + 3.0 * speed / over >= 0.62:
        lane = Lane(track, bend)
        assert leaves_lane(lane, Arc(lane, bend)) < 0


@settings(max_examples=150)
@given(
    speed=st.floats(8.0, 30.0),
    lateral=st.floats(0.2, 2.5),
    side=st.sampled_from([-1.0, 1.0]),
    over_m=st.floats(0.0, 60.0),
    begins=st.floats(-1.0, 0.75),
)
def test_given_a_bend_that_begins_when_a_plan_follows_it_then_it_is_no_change_of_lanes(
    speed, lateral, side, over_m, begins
):
    bend, begins_m = side * min(lateral / speed**2, 0.035), begins * 3.0 * speed
    track = bend_track(bend, speed, begins_m, over_m)
    driven = bend * float(np.interp(0.0, [begins_m, begins_m + over_m + 1e-6], [0.0, 1.0]))
    lane = Lane(track, driven)
    assert leaves_lane(lane, Arc(lane, driven)) >= 0


@settings(max_examples=100)
@given(
    speed=st.floats(6.0, 25.0),
    lateral=st.floats(0.3, 2.5),
    side=st.sampled_from([-1.0, 1.0]),
    begins=st.floats(0.15, 0.3),
    takes=st.floats(0.8, 1.0),
)
def test_given_a_bend_when_a_plan_changes_to_its_outside_then_it_is_known_by_the_dip_of_its_turn(
    speed, lateral, side, begins, takes
):
    bend, way_m = side * min(lateral / speed**2, 0.02), 3.0 * speed
    straight = change_track(speed, begins * way_m, takes * way_m, -side * 3.5)
    heading = straight.yaw + bend * speed * T
    turn = bent(speed * T, bend)[0] + 1j * straight.place.imag * np.exp(1j * bend * speed * T)
    lane = Lane(Track(T, turn, heading), bend)
    assert leaves_lane(lane, Arc(lane, bend)) is Looks.CHANGE


@settings(max_examples=100)
@given(
    bend=st.floats(-0.02, 0.02),
    beyond_m=st.floats(5.0, 50.0),
    left=st.floats(-5.0, 5.0),
    towards=st.booleans(),
    side=st.sampled_from([-3.5, 3.5]),
    over_m=st.floats(35.0, 60.0),
)
def test_given_half_of_a_change_when_the_road_bends_beyond_it_then_what_comes_is_as_near_as_put(
    bend, beyond_m, left, towards, side, over_m
):
    lane = Lane(change_track(10.0, 0.0, over_m, side), 0.0)
    arc, box = Arc(lane, 0.0), in_bend(beyond_m, left, bend, -9.0 if towards else 9.0)
    end = complex(lane.own_place[-1])
    seen = seen_of([box._replace(x=end.real + box.x, y=end.imag + box.y)])
    assume(seen.places.real[0] > end.real)
    assert left_of_what_we_drive(lane, arc, seen)[0] == pytest.approx(left, abs=1e-3)
    for looks in (Looks.CHANGE, Looks.EITHER):
        assert abs(along_joined(lane, arc, seen, looks).left[0]) <= abs(left) + 1e-3


@settings(max_examples=100)
@given(
    lateral=st.floats(0.3, 2.5),
    side=st.sampled_from([-1.0, 1.0]),
    left=st.sampled_from([-3.5, 3.5]),
    behind_m=st.floats(0.5, 7.5),
    drift=st.floats(0.5, 3.0),
)
def test_given_a_bend_just_begun_when_a_car_is_on_the_straight_beside_then_only_its_own_drift_counts(
    lateral, side, left, behind_m, drift
):
    bend = side * lateral / 10.0**2
    track = bend_track(bend)
    beside = Box(-behind_m, left, velocity=(10.0, 0.0))
    found = course(track, [beside], bend)[0].along
    assert found.drift[0] == pytest.approx(0.0, abs=0.1)  # of a lane of chords
    against = beside._replace(velocity=(10.0, -side * drift))  # a bend explains nothing of this
    found = course(track, [against], bend)[0].along
    explained = abs(bend) * behind_m * 10.0
    assert -side * found.drift[0] == pytest.approx(max(drift - explained, 0.0), abs=0.15)


@pytest.mark.parametrize("side", [1, -1])
def test_given_a_change_of_lanes_when_something_comes_then_it_is_not_led_round_the_plan(side):
    track = change_track(15.0, 0.0, 50.0, side * 3.5)
    boxes = [Box(x, side * 3.5, velocity=(-14.0, 0.0)) for x in (10.0, 25.0, 44.0, 60.0, 80.0)]
    found, lane, arc, seen = course(track, boxes)
    everything = np.ones(5, np.bool_)
    rows = predicted(T, found, (everything, everything), lane, arc, seen)
    for number, box in enumerate(boxes):
        ys = rows.places.imag[:, rows.which == number]
        true_x = box.x - 14.0 * T
        inside = (true_x > -5.0) & (true_x < 45.0)
        straight = [
            column for column in range(ys.shape[1]) if np.abs(ys[inside, column] - side * 3.5).max() < 0.3
        ]
        assert straight, box


@settings(max_examples=100)
@given(
    lateral=st.floats(0.3, 2.5),
    side=st.sampled_from([-1.0, 1.0]),
    begins=st.floats(-30.0, 25.0),
    over_m=st.floats(0.0, 40.0),
    at=st.floats(-15.0, 40.0),
    left=st.sampled_from([-3.5, 3.5]),
    speed=st.floats(10.0, 18.0),
)
def test_given_a_bend_that_begins_when_a_car_drives_beside_then_it_is_predicted_to_bend_with_it(
    lateral, side, begins, over_m, at, left, speed
):
    # Behind the beginning of a bend that we have entered, nothing shows that the road is straight.
    assume(begins >= 0.0 or at >= begins + over_m)
    bend = side * lateral / 14.0**2
    knots = [begins, begins + over_m + 1e-6]
    fine = np.arange(-60.0, 130.0, 0.01)
    yaw = np.cumsum(0.01 * bend * np.interp(fine, knots, [0.0, 1.0]))
    yaw -= np.interp(0.0, fine, yaw)
    centre = np.cumsum(0.01 * np.exp(1j * yaw))
    centre -= np.interp(0.0, fine, centre)

    def road(s, aside):
        heading = np.interp(s, fine, yaw)
        return np.interp(s, fine, centre) + 1j * aside * np.exp(1j * heading), heading

    track = Track(T, *road(14.0 * T, 0.0))
    place, heading = road(at, left)
    box = Box(
        place.real, place.imag, heading, velocity=(speed * math.cos(heading), speed * math.sin(heading))
    )
    driven = bend * float(np.interp(0.0, knots, [0.0, 1.0]))
    found, lane, arc, seen = course(track, [box], driven)
    everything = np.ones(1, np.bool_)
    rows = predicted(T, found, (everything, everything), lane, arc, seen)
    true, _ = road(at + speed * T, left)
    beside = (at + speed * T > 0.0) & (at + speed * T < 42.0)  # where the plan says how the road goes on
    if beside.any():
        assert np.abs(rows.places[beside] - true[beside, None]).max() < 2.0
        along, aside, _ = lane.project(rows.places[beside].ravel())
        assert np.abs(aside - left).max() < 0.6


def test_given_obstacles_at_the_limits_of_what_drives_along_then_they_still_do():
    turned = [np.exp(1j * math.radians(angle)) for angle in (29.9, 30.1, 149.9, 150.1)]
    aslant = course(
        straight_track(), [Box(25.0, 0.0, velocity=(9.0 * one.real, 9.0 * one.imag)) for one in turned]
    )[0]
    assert aslant.is_along.tolist() == [True, False, False, True]
    assert aslant.straight.all()
    far = course(
        straight_track(), [Box(25.0, y, velocity=(9.0, 0.0)) for y in (19.99, 20.0, -19.99, -20.0)]
    )[0]
    assert far.is_along.tolist() == [True, False, True, False]
    slow = course(straight_track(), [Box(25.0, 0.0, velocity=(one, 0.0)) for one in (0.5, 0.4999)])[0]
    assert slow.is_along.tolist() == [True, False]


@pytest.mark.parametrize("turned", [0.0, 2.0])
@pytest.mark.parametrize("left", [0.0, 3.5])
def test_given_what_drives_behind_in_the_bend_that_we_come_from_then_it_is_along_that(turned, left):
    box = in_bend(-30.0, left, 0.02, 9.0)
    found = course(straight_track(turned=turned), [box], 0.02, turned)[0]
    assert found.is_along.tolist() == [True]
    assert (found.along.s[0], found.along.left[0]) == pytest.approx((-30.0, left), abs=0.2)
    assert found.along.drift[0] == pytest.approx(0.0, abs=0.3)
    aside = course(straight_track(turned=turned), [box], 0.0, turned)[0]
    assert abs(aside.along.left[0]) > 7.0


def roles(boxes):
    found, lane, _, seen = course(straight_track(), boxes)
    return roles_of(found, lane, 3.0, seen, OPTIONS)


def test_given_what_is_beside_and_behind_then_it_passes_follows_or_is_ahead():
    aside = 0.95 + 0.95 + 0.3
    ys = (aside - 0.01, aside + 0.01)
    assert roles([Box(-8.0, y, velocity=(9.0, 0.0)) for y in ys]).passes.tolist() == [True, False]
    assert roles([Box(0.0, y, velocity=(9.0, 0.0)) for y in ys]).ahead.tolist() == [False, False]
    assert roles([Box(20.0, y, velocity=(9.0, 0.0)) for y in ys]).ahead.tolist() == [True, False]
    middles = roles([Box(x, 0.0) for x in (1.24, 1.26)])  # ours is 1.25 m ahead of the reference point
    assert middles.ahead.tolist() == [False, True]
    noses = roles([Box(x - 2.25, 0.0, velocity=(9.0, 0.0)) for x in (-1.09, -1.11)])
    assert noses.follows.tolist() == [False, True]
    ys = [1.9 - 0.1 - 0.0005 * (one - 0.5) - 0.5 * 0.001 * 64.0 for one in (-10.0, 10.0)]
    assert roles([Box(-8.0, y, velocity=(9.0, 0.0)) for y in ys]).follows.tolist() == [False, True]
    allowed = roles([Box(-8.0, y, velocity=(9.0, 0.0)) for y in (0.0, 2.0, 2.1)]).allowed_m
    assert allowed == pytest.approx([0.0, 2.0 - 1.9 - 0.05, 2.1 - 1.9 - 0.05])
    assert roles([Box(20.0, 0.0)]).gap_m == pytest.approx([20.0 - 2.25 - 3.5])


def test_given_a_plan_that_looks_like_a_change_when_it_keeps_the_lane_then_it_still_counts_as_a_change():
    """The beginning of a change that comes into sight step by step may have drawn that lane."""
    t = np.linspace(0.0, 3.0, 31)
    share = t / 3.0
    y = 3.5 * share**3 * (10 - 15 * share + 6 * share**2)
    lane = Lane(Track(t, 10.0 * t + 1j * y, np.arctan2(np.gradient(y, t), 10.0)), 0.0)
    seen = seen_of([Box(60.0, 3.5, math.pi, velocity=(-9.0, 0.0))])
    assert course_of(lane, Arc(lane, 0.0), seen, Shown(Looks.KEEPS)).changes


@pytest.mark.parametrize("turned", [0.6, 1.2, 1.8, 2.1])
def test_given_a_change_of_lanes_when_something_comes_round_more_than_a_right_angle_then_it_comes_towards_us(
    turned,
):
    t = np.linspace(0.0, 3.0, 31)
    share = t / 3.0
    y = 3.5 * share**3 * (10 - 15 * share + 6 * share**2)
    lane = Lane(Track(t, 7.0 * t + 1j * y, np.arctan2(np.gradient(y, t), 7.0)), 0.0)
    radius = 25.0
    at = lane.own_place[-1] + radius * (math.sin(turned) + 1j * (1.0 - math.cos(turned)))
    speed = -9.0 * np.exp(1j * turned)
    seen = seen_of([Box(at.real, at.imag, turned + math.pi, velocity=(speed.real, speed.imag))])
    found = along_joined(lane, Arc(lane, 0.0), seen, Looks.CHANGE)
    assert found.ahead[0] < 0.0
    assert abs(found.left[0]) < 1.0


@pytest.mark.parametrize("side", [-1.0, 1.0])
@pytest.mark.parametrize(("aslant", "crosses"), [(0.3, False), (0.6, True), (1.1, True)])
def test_given_what_comes_aslant_from_beyond_a_plans_end_when_no_road_is_known_then_it_may_drive_straight_on(
    side, aslant, crosses
):
    lane = Lane(straight_track(), 0.0)
    away = 25.0 * np.exp(1j * side * 0.5 * aslant)
    place, speed = lane.own_place[-1] + away, -9.0 * np.exp(1j * side * aslant)
    seen = seen_of([Box(place.real, place.imag, side * aslant, velocity=(speed.real, speed.imag))])
    course = course_of(lane, Arc(lane, 0.0), seen, Shown(Looks.KEEPS))
    assert course.joined.all()
    assert course.lane.all()
    assert course.straight.all() == crosses


@settings(max_examples=60, deadline=None)
@given(
    bend=st.floats(0.015, 0.03),
    side=st.sampled_from([-1.0, 1.0]),
    left=st.sampled_from([-3.5, 3.5]),
    apart_m=st.floats(12.0, 22.0),
    aside=st.sampled_from([-3.0, 3.0]),
)
def test_given_a_row_of_cars_round_a_bend_when_the_first_comes_along_our_road_then_those_behind_it_do_as_well(
    bend, side, left, apart_m, aside
):
    bend *= side
    lane = Lane(straight_track(7.0), 0.0)
    first_m = 0.25 / abs(bend)  # of the bend, which begins at the plan's end
    row = [in_bend(first_m + number * apart_m, left, bend, -7.0) for number in range(3)]
    row = [car._replace(x=car.x + lane.length) for car in row]
    row = [car for car in row if abs(car.yaw) < 1.4]
    found = course_of(lane, Arc(lane, 0.0), seen_of(row), Shown(Looks.KEEPS))
    assert not found.straight[found.joined].any()  # others are too far aside to be on a road of ours
    for car in row[1:]:
        off = aside * 1j * np.exp(1j * car.yaw)
        for one in (  # nothing is before it, or it is in no row
            [car],
            [row[0], car._replace(x=car.x + off.real, y=car.y + off.imag)],
            [row[0], car._replace(velocity=(2.0 * car.velocity[0], 2.0 * car.velocity[1]))],
        ):
            found = course_of(lane, Arc(lane, 0.0), seen_of(one), Shown(Looks.KEEPS))
            assert found.straight[-1] or abs(car.yaw) < 0.45


@settings(max_examples=100, deadline=None)
@given(
    own=st.floats(8.0, 28.0),
    other=st.floats(3.0, 28.0),
    lateral=st.floats(0.5, 12.0),
    way_m=st.floats(10.0, 40.0),
    side=st.sampled_from([-1.0, 1.0]),
)
def test_given_what_comes_aslant_when_the_road_to_it_is_too_sharp_for_either_then_it_drives_straight_on(
    own, other, lateral, way_m, side
):
    squared = max(
        own * own - 4.0 * way_m, other * other
    )  # we may brake by 2 m/s^2 for a bend beyond the plan
    bend, aslant = lateral / squared, lateral / squared * way_m
    # What drifts by less than 0.34 m/s goes on as the plan does at its end.
    assume(0.1 < aslant < 0.44 and bend < 0.06 and other * math.sin(aslant) > 0.36)
    lane = Lane(straight_track(own), 0.0)
    place = lane.own_place[-1] + 2.0 / bend * math.sin(0.5 * aslant) * np.exp(1j * side * 0.5 * aslant)
    speed = -other * np.exp(1j * side * aslant)
    box = Box(place.real, place.imag, side * aslant, velocity=(speed.real, speed.imag))
    found = course_of(lane, Arc(lane, 0.0), seen_of([box]), Shown(Looks.KEEPS), own)
    assert found.joined.all()
    if aslant > 1.05 * (4.0 / squared * way_m + 0.05):
        assert found.straight.all()
    elif lateral < 4.0:
        assert not found.straight.any()


def leaving(bend, speed, ends):
    """The way of a plan of 3 s that leaves a bend after this share of it."""
    heading = bend * np.minimum(speed * T, ends * 3.0 * speed)
    place = np.concatenate(([0.0], np.cumsum(0.1 * speed * np.exp(0.5j * (heading[1:] + heading[:-1])))))
    return Track(T, place, heading)


@settings(max_examples=60, deadline=None)
@given(
    lateral=st.floats(0.5, 2.5),
    speed=st.floats(8.0, 25.0),
    side=st.sampled_from([-1.0, 1.0]),
    ends=st.floats(0.2, 0.6),
    left=st.floats(3.0, 4.2),
)
def test_given_the_end_of_a_bend_when_what_comes_drives_beside_then_it_shows_that_the_plan_keeps_the_road(
    lateral, speed, side, ends, left
):
    bend, way_m = side * min(lateral / speed**2, 0.02), 3.0 * speed
    lane = Lane(leaving(bend, speed, ends), bend)
    (at,), (way,) = lane.place_at(np.array([0.9 * way_m]), np.array([side * left]))
    velocity = -9.0 * np.exp(1j * way)
    car = Box(at.real, at.imag, way + math.pi, velocity=(velocity.real, velocity.imag))
    nearer = car._replace(x=car.x + side * 2.0 * math.sin(way), y=car.y - side * 2.0 * math.cos(way))
    for boxes, shows in (([car], True), ([nearer], False), ([car, nearer], False), ([], False)):
        seen = seen_of(boxes) if boxes else seen_of([car]).only(np.zeros(1, np.bool_))
        assert runs_beside(lane, along_lane(lane, seen), seen) == shows
    assert not course_of(lane, Arc(lane, bend), seen_of([car]), Shown(Looks.KEEPS)).changes
    # A velocity that a tracker found shows it as well, if it is known as well as parallel has to be.
    aslant = velocity * np.exp(0.011j)
    found = seen_of([car._replace(velocity=(aslant.real, aslant.imag))])
    for unsure, shows in ((0.15, True), (0.3, False)):
        seen = found._replace(unsure=np.array([unsure]))
        assert runs_beside(lane, along_lane(lane, seen), seen) == shows


@settings(max_examples=60, deadline=None)
@given(
    speed=st.floats(8.0, 25.0),
    over=st.floats(0.5, 1.0),
    side=st.sampled_from([-3.5, 3.5]),
    car=st.floats(0.3, 1.1),
)
def test_given_a_change_of_lanes_when_what_comes_drives_there_then_it_shows_no_road_of_ours(
    speed, over, side, car
):
    lane = Lane(change_track(speed, 0.0, max(over * 3.0 * speed, 20.0), side), 0.0)
    boxes = [Box(car * 3.0 * speed, side, math.pi, velocity=(-9.0, 0.0))]
    seen = seen_of(boxes)
    assert not runs_beside(lane, along_lane(lane, seen), seen)
    assert not leads_to(lane, along_lane(lane, seen), seen)


@settings(max_examples=60, deadline=None)
@given(
    bend=st.floats(0.003, 0.012),
    speed=st.floats(8.0, 25.0),
    side=st.sampled_from([-1.0, 1.0]),
    ends=st.floats(0.2, 0.6),
    beyond_m=st.floats(15.0, 120.0),
)
def test_given_a_known_lane_when_a_plan_leaves_a_bend_then_what_comes_beyond_its_end_is_beside_it(
    bend, speed, side, ends, beyond_m
):
    bend = side * min(bend, 2.0 / speed**2)
    track = leaving(bend, speed, ends)
    lane, heading = Lane(track, bend), track.yaw[-1]
    arc = Arc(lane, bend)
    assume(leaves_lane(lane, arc) is Looks.EITHER)
    travel = np.exp(1j * heading)
    at, velocity = track.place[-1] + travel * (beyond_m + 3.5j * side), -12.0 * travel
    aslant = velocity * np.exp(0.03j)
    for moves, beside in ((aslant, False), (velocity, True)):
        seen = seen_of([Box(at.real, at.imag, heading + math.pi, velocity=(moves.real, moves.imag))])
        assert leads_to(lane, along_lane(lane, seen), seen) == beside
    course = course_of(lane, arc, seen, Shown(Looks.KEEPS))
    assert not course.joined[0]
    assert course.along.left[0] == pytest.approx(3.5 * side, abs=0.1)
    # What is aslant says that the road bends, but not where that is far behind the first that comes.
    for behind_m, beside in ((30.0, False), (45.0, True)):
        places, moves = np.append(seen.places, at + behind_m * travel), np.append(seen.velocities, aslant)
        row = seen_of(
            [
                Box(one.real, one.imag, 0.0, velocity=(v.real, v.imag))
                for one, v in zip(places, moves, strict=True)
            ]
        )
        assert leads_to(lane, along_lane(lane, row), row) == beside


@settings(max_examples=60, deadline=None)
@given(
    bend=st.floats(-0.01, 0.01),
    speed=st.floats(6.0, 25.0),
    off_m=st.floats(-0.1, 0.1),
)
def test_given_a_vehicle_beside_its_line_when_the_plan_returns_to_it_in_a_bend_then_it_changes_no_lane(
    bend, speed, off_m
):
    bend = math.copysign(min(abs(bend), 2.0 / speed**2), bend)
    turned, fades = bend * speed * T, off_m * np.exp(-T)
    place = bent(speed * T, bend)[0] + 1j * fades * np.exp(1j * turned)
    lane = Lane(Track(T, place, turned - fades / speed), bend)
    assert leaves_lane(lane, Arc(lane, bend)) >= Looks.EITHER


@settings(max_examples=60, deadline=None)
@given(
    bend=st.floats(-0.02, 0.02),
    speed=st.floats(8.0, 25.0),
    share=st.floats(0.3, 0.98),
    left=st.floats(-2.0, 2.0),
    aslant=st.floats(0.055, 0.11),
    side=st.sampled_from([-1.0, 1.0]),
    turned=st.floats(-3.0, 3.0),
)
def test_given_what_comes_in_a_plans_way_when_it_is_a_little_aslant_then_it_may_keep_to_that_way(
    bend, speed, share, left, aslant, side, turned
):
    track = bend_track(bend, speed, 5.0, 10.0)
    towards = -15.0
    place = complex(np.interp(share * 3.0, T, track.place))
    yaw = float(np.interp(share * 3.0, T, track.yaw)) + side * aslant
    place += 1j * left * np.exp(1j * (yaw - side * aslant))
    velocity = towards * np.exp(1j * yaw)
    box = Box(place.real, place.imag, yaw, velocity=(velocity.real, velocity.imag))
    start = np.exp(1j * turned)
    moved = Track(T, track.place * start, track.yaw + turned)
    found, *_ = course(moved, [box], 0.0, turned)
    assert found.lane.all()
