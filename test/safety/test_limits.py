import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rig.messages import START_NS, S, odometry_bytes, plan_bytes, straight_plan
from torchperf_ros.api.errors import BadInput
from torchperf_ros.safety.limits import Track, beyond_limits, off_start, unreadable
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.safety_options import guard_options

from ..stage.conftest import STORE

OPTIONS = guard_options({})
T = np.arange(0.0, 3.05, 0.1)


def track(times_s, x, y=0.0, yaw=0.0):
    return Track(
        *(np.broadcast_to(part, np.shape(times_s)) for part in (times_s, x + 1j * np.asarray(y), yaw))
    )


def circle(speed, bend):
    turned = speed * T * bend
    return track(T, np.sin(turned) / bend, (1 - np.cos(turned)) / bend, turned)


def found(one, **options):
    limits = guard_options(
        {name if "." in name else f"guard.{name}": value for name, value in options.items()}
    )
    return [finding.check for finding in beyond_limits(one, limits)]


def read(data):
    return unreadable(TimedPath.parse(data), START_NS)


@pytest.mark.parametrize(
    ("one", "checks"),
    [
        (track(T, 39.9 * T), []),
        (track(T, 41.0 * T), ["speed"]),
        (track(T, -41.0 * T), ["speed"]),
        (track(T, 0.0 * T), []),
        (track(T, 2.0 * T + 0.5 * 3.0 * T**2), []),
        (track(T, 2.0 * T + 0.5 * 3.1 * T**2), ["acceleration"]),
        (track(T, -2.0 * T - 0.5 * 3.1 * T**2), ["acceleration"]),  # in reverse
        (
            track(T[:16], 3.0 * T[:16] - 0.5 * 3.2 * T[:16] ** 2),
            ["acceleration"],
        ),  # forward, then ever faster back
        (track(T, 30.0 * T - 0.5 * 8.0 * T**2), []),
        (track(T, 30.0 * T - 0.5 * 8.2 * T**2), ["acceleration"]),
        (track(T, -30.0 * T + 0.5 * 8.0 * T**2), []),
        (circle(15.0, 2.9 / 225), []),
        (circle(15.0, 3.1 / 225), ["lateral"]),
        (circle(-15.0, -3.1 / 225), ["lateral"]),
        (circle(3.0, 0.195), []),
        (circle(3.0, 0.21), ["curvature"]),
        (circle(3.0, -0.21), ["curvature"]),
        (track(T, 0.0, 0.0, 0.1 * T), []),  # 0.01 rad in 0.1 m or less
        (track(T, 0.0, 0.0, 0.25 * T), ["curvature"]),  # turns on the spot
        (track(T, 0.9 * T, 0.9 * T), []),  # 9 cm aside a step
        (track(T, 10.0 * T, 2.0 * T), ["curvature"]),  # 0.2 m aside of 1 m: 0.4 1/m
        (track(T, 0.1 * T, 2.0 * T), ["curvature"]),
        (track(T[:1].repeat(2) + [0.0, 1.0], np.array([0.0, 5.0])), []),
        (track(T[:1].repeat(2) + [0.0, 1.0], np.array([0.0, 41.0])), ["speed"]),
    ],
)
def test_given_a_plan_when_its_own_motion_is_judged_then_what_is_beyond_a_limit_is_found(one, checks):
    assert found(one) == checks


def test_given_a_sudden_change_of_acceleration_when_judged_then_its_jerk_is_the_mean_over_half_a_second():
    x = np.where(T < 1.5, 20.0 * T, 20.0 * T - 3.0 * np.maximum(T - 1.5, 0.0) ** 2)
    assert found(track(T, x), max_jerk=12.1) == []
    (finding,) = beyond_limits(track(T, x), guard_options({"guard.max_jerk": 11.0}))
    assert finding.check == "jerk"
    assert finding.value == pytest.approx(12.0, rel=0.01)  # from 0 to -6 m/s^2
    assert "12 m/s^3" in finding.text
    short = track(T[:4], x[13:17] - x[13])
    assert found(short, max_jerk=5.0) == ["jerk"]  # all there is counts as half a second at least
    assert found(track(T[:3], x[13:16]), max_jerk=0.1) == []
    # one change is none
    assert found(track(T[:3], 3.0 * np.array([0.0, 0.1, 0.22])), max_jerk=0.1) == ["acceleration"]


@pytest.mark.parametrize(
    ("one", "value", "limit", "text"),
    [
        (track(T, -42.5 * T), 42.5, 40.0, "42.5 m/s at pose"),
        (track(T, 2.0 * T + 0.5 * 3.5 * T**2), 3.5, 3.0, "3.5 m/s^2 at pose"),
        (track(T, 30.0 * T - 0.5 * 8.5 * T**2), 8.5, 8.0, "8.5 m/s^2 of braking at pose"),
        (circle(15.0, -4 / 225), 4.0, 3.0, "4 m/s^2 sideways at pose"),
        (circle(3.0, 0.25), 0.25, 0.2, "0.25 1/m at pose"),
        (track(T, 0.0, 2.0 * T), 0.4, 0.2, "0.4 1/m at pose"),  # 0.2 m aside counts as over 1 m
        (
            track(T, 60.0 * T, 15.0 * T),
            2 * 1.5 / 30,
            0.05,
            "0.1 1/m at pose",
        ),  # 1.5 m aside over 6 m: over 6 and 5
    ],
)
def test_given_a_plan_beyond_a_limit_when_judged_then_what_was_measured_and_where_is_there(
    one, value, limit, text
):
    options = guard_options(
        {"vehicle.max_curvature": min(limit, 0.2), "guard.max_speed": 40.0 if limit == 40 else 90.0}
    )
    (finding,) = [each for each in beyond_limits(one, options) if each.check not in {"jerk", "steering"}][
        :1
    ]
    assert (finding.value, finding.limit) == (pytest.approx(value, rel=2e-3), limit)
    assert finding.text.startswith(text)
    assert finding.text.endswith(f", the limit is {limit:g}")


def test_given_poses_at_uneven_times_when_judged_then_the_jerk_is_that_of_the_motion():
    times_s = np.cumsum(np.linspace(0.02, 0.18, 31))
    for after_s in (0.0, -2.0, 5.0):
        (finding,) = beyond_limits(
            track(times_s + after_s, 10 * times_s + times_s**3 / 6),
            guard_options({"guard.max_jerk": 0.5, "guard.max_acceleration": 20.0}),
        )
        assert finding.check == "jerk"
        assert finding.value == pytest.approx(1.0, rel=0.02)


def test_given_a_wheel_that_turns_too_fast_when_judged_then_the_steering_rate_is_found():
    bend = np.where(T < 1.5, 0.0, 0.05)
    yaw = np.concatenate(([0.0], np.cumsum(0.5 * bend[:-1])))
    way = np.concatenate(([0.0], np.cumsum(0.5 * np.exp(0.5j * (yaw[1:] + yaw[:-1])))))
    one = track(T, way.real, way.imag, yaw)
    (finding,) = beyond_limits(one, OPTIONS)
    assert finding.check == "steering"
    assert finding.value == pytest.approx(math.atan(2.7 * 0.05) / 0.1, rel=1e-6)
    assert finding.text == "1.34 rad/s at pose 14, the limit is 0.7"
    assert found(one, max_steering_rate=1.4) == []
    slow = one._replace(place=0.15 * one.place)
    assert found(slow, **{"vehicle.max_curvature": 1.0}) == []  # too slow to tell


@given(st.floats(0.0, 35.0), st.floats(-1.0, 1.0), st.floats(-7.9, 2.9))
def test_given_a_plan_within_the_limits_when_judged_then_nothing_is_found(speed, turn, acceleration):
    bend = turn * min(0.19, 2.9 / max(speed + 3 * max(acceleration, 0.0), 0.1) ** 2)
    moving_s = np.minimum(T, speed / -acceleration) if acceleration < 0 else T
    way = speed * moving_s + 0.5 * acceleration * moving_s**2
    turned = way * bend
    half = np.where(np.abs(turned) > 1e-6, np.sin(turned / 2) / np.where(turned == 0, 1, turned / 2), 1.0)
    one = track(T, way * half * np.cos(turned / 2), way * half * np.sin(turned / 2), turned)
    assert found(one, max_speed=45.0) == []


@pytest.mark.parametrize(
    ("stamp_ns", "off_s"),
    [(START_NS - 10 * S - 1, 10.0), (START_NS + 11 * S, 11.0), (START_NS + 10 * S, None)],
)
def test_given_a_plan_seen_from_the_vehicle_long_ago_or_ahead_when_read_then_it_is_refused(stamp_ns, off_s):
    motion = Motion.read(odometry_bytes(), 0)
    path = TimedPath.parse(straight_plan(10.0, frame="base_link", start_ns=stamp_ns))
    finding = unreadable(path, START_NS, motion)
    if off_s is None:
        assert finding is None
    else:
        assert (finding.check, finding.value, finding.limit) == ("stamps", pytest.approx(off_s), 10.0)
        assert (
            finding.text
            == f"is seen from the vehicle as it was {off_s:g} s from now, by its header.stamp; 10 s are"
            " allowed"
        )
    assert unreadable(TimedPath.parse(straight_plan(10.0, start_ns=stamp_ns)), START_NS, motion) is None
    assert unreadable(path, START_NS, None) is None


def test_given_a_header_whose_stamp_is_no_time_when_seen_from_the_vehicle_then_it_is_refused():
    data = bytearray(straight_plan(10.0, frame="base_link"))
    data[8:12] = (S).to_bytes(4, "little")
    finding = unreadable(TimedPath.parse(bytes(data)), START_NS, Motion.read(odometry_bytes(), 0))
    assert (finding.check, finding.value) == ("stamps", math.inf)


@pytest.mark.parametrize("pose", [0, 1, 30])
@pytest.mark.parametrize(
    ("seconds", "nanoseconds"), [(-1, 0), (1_700_000_000, S), (1_700_000_000, 2**32 - 1)]
)
def test_given_a_pose_whose_stamp_is_no_time_when_read_then_the_path_is_none(pose, seconds, nanoseconds):
    path = STORE.deserialize_cdr(straight_plan(10.0), "nav_msgs/msg/Path")
    path.poses[pose].header.stamp.sec, path.poses[pose].header.stamp.nanosec = seconds, nanoseconds
    data = bytes(STORE.serialize_cdr(path, "nav_msgs/msg/Path"))
    with pytest.raises(
        BadInput, match=f"has a stamp that is no time at pose {pose}: sec is negative, or nanosec"
    ):
        TimedPath.parse(data)
    assert TimedPath.read(data) is None


@pytest.mark.parametrize(
    ("length", "good"), [(0.101, True), (0.099, False), (9.99, True), (10.01, False), (5e-310, False)]
)
def test_given_orientations_of_any_length_when_read_then_only_those_of_a_rotation_are_taken(length, good):
    path = TimedPath.parse(plan_bytes(T, 10 * T, 0.0, 0.3))
    finding = unreadable(replace(path, turns=path.turns * length), START_NS)
    if good:
        assert finding is None
    else:
        text = f"has {len(T)} poses with an orientation that is not 0.1 to 10.0 long: no rotation"
        assert (finding.check, finding.value, finding.limit, finding.text) == ("finite", len(T), 0, text)


def test_given_values_that_are_no_numbers_when_read_then_it_is_said_how_many_poses_have_one():
    finding = read(plan_bytes(T, np.where(T > 2.85, math.nan, T), 0.0, 0.0))
    assert (finding.check, finding.value, finding.limit) == ("finite", 2, 0)
    assert finding.text.startswith("has 2 poses with a value that is NaN, infinite")
    assert read(plan_bytes(T, 1.001e8, 0.0, 0.0)).value == 31
    assert read(plan_bytes(T, 1e8, 0.0, 0.0)) is None
    path = TimedPath.parse(straight_plan())
    path.turns[3] = 0.0
    assert unreadable(path, START_NS)[:3] == ("finite", 1, 0)
    assert unreadable(path, START_NS).text.endswith(
        "an orientation that is not 0.1 to 10.0 long: no rotation"
    )


def test_given_stamps_that_do_not_increase_when_read_then_the_first_worst_one_is_named():
    times_s = T.copy()
    times_s[7] = times_s[6]
    finding = read(plan_bytes(times_s, T, 0.0, 0.0))
    assert (finding.check, finding.value, finding.limit) == ("stamps", 0.0, 0)
    assert finding.text == "stamps pose 7 0 s after the one before; each has to be later"
    times_s[20] = 0.0
    assert read(plan_bytes(times_s, T, 0.0, 0.0)).value == pytest.approx(-1.9)


@pytest.mark.parametrize(
    ("at", "off_s", "named"),
    [
        (-1, 3599.0, []),
        (-1, 3601.0, ["stamps"]),
        (-1, 4.0e8, ["stamps"]),
        (0, -3599.0, []),
        (0, -1.3e9, ["stamps"]),
    ],
)
def test_given_a_stamp_hours_off_when_read_then_the_plan_is_refused(at, off_s, named):
    times_s = T.copy()
    times_s[at] = off_s
    finding = read(plan_bytes(times_s, T, 0.0, 0.0))
    assert [one.check for one in (finding,) if one] == named
    assert finding is None or "3600 s are allowed" in finding.text


def test_given_headings_across_the_half_turn_when_read_then_they_do_not_leap():
    yaw = 3.0 + 0.1 * T * 10
    one = Track.of(
        TimedPath.parse(plan_bytes(T, np.cumsum(np.cos(yaw)), np.cumsum(np.sin(yaw)), yaw)), START_NS, None
    )
    assert np.diff(one.yaw) == pytest.approx(0.1)
    assert one.yaw[0] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("stamp_ns", "begin"), [(START_NS - S // 2, 45.0), (START_NS - 10 * S, -50.0), (0, 50.0)]
)
@pytest.mark.parametrize("age_s", [0.0, 0.25])
def test_given_a_plan_in_the_vehicles_frame_when_read_then_it_begins_where_that_was_at_its_stamp(
    stamp_ns, begin, age_s
):
    motion = Motion.read(
        odometry_bytes(x=100.0, y=50.0 - 10 * age_s, yaw=math.pi / 2, speed=10.0, stamp_ns=5), 0
    )
    path = TimedPath.parse(straight_plan(10.0, frame="base_link", start_ns=stamp_ns))
    one = Track.of(path, START_NS, motion, age_s)
    assert one.place[[0, -1]] == pytest.approx(np.array([100 + 1j * begin, 100 + 1j * (begin + 30.0)]))
    assert one.yaw == pytest.approx(np.full(31, math.pi / 2))
    assert Track.of(path, START_NS, None).place[-1] == pytest.approx(30.0)


def test_given_a_track_when_asked_where_it_is_then_times_outside_are_its_ends():
    one = track(np.array([1.0, 2.0, 4.0]), np.array([0.0, 10.0, 50.0]), 1.0, np.array([0.0, 0.2, 0.4]))
    assert one.at(0.0) == (1j, 0.0)
    assert one.at(1.5) == pytest.approx((5 + 1j, 0.1))
    assert one.at(3.0) == pytest.approx((30 + 1j, 0.3))
    assert one.at(9.0) == (50 + 1j, 0.4)
    begun = track(np.array([-1.0, 1.0, 3.0]), np.array([0.0, 10.0, 50.0])).from_now()
    assert (begun.t_s.tolist(), begun.place.real.tolist()) == ([0.0, 1.0, 3.0], [5.0, 10.0, 50.0])
    begun = track(np.array([-1.0, 1.0]), 0.0, np.array([2.0, 6.0]), np.array([0.2, 0.6])).from_now()
    assert (begun.place.imag.tolist(), begun.yaw.tolist()) == (
        pytest.approx([4.0, 6.0]),
        pytest.approx([0.4, 0.6]),
    )
    over = track(np.array([-2.0, -1.0]), np.array([0.0, 10.0])).from_now()
    assert (over.t_s.tolist(), over.place.tolist(), over.yaw.tolist()) == (
        [0.0, 1.0],
        [10.0, 10.0],
        [0.0, 0.0],
    )


def test_given_thousands_of_poses_when_thinned_then_the_rest_is_no_further_off_than_is_said():
    t = np.linspace(0.0, 3.0, 2000)
    one = track(t, 10 * t, np.sin(5 * t), 0.1 * np.cos(5 * t))
    few, off_m = one.thinned(6.0)
    assert len(few.t_s) == 64
    assert (few.t_s[0], few.t_s[-1]) == (0.0, 3.0)
    gap = np.abs(np.interp(t, few.t_s, few.place) - one.place) + 6.0 * np.abs(
        np.interp(t, few.t_s, few.yaw) - one.yaw
    )
    assert 0 < gap.max() <= off_m + 1e-9 < 0.1
    assert one.thinned(0.0)[1] < off_m
    short = track(t[:64], t[:64])
    assert short.thinned(6.0) == (short, 0.0)


def test_given_a_plan_when_its_end_is_looked_at_then_it_stands_where_its_last_speeds_lead_to_none():
    for x in (0.0 * T, 0.09 * T, np.minimum(T, 2.9), 3.0 * T - 0.5 * T**2):  # the last is uniformly braked
        assert track(T, x).ends_standing is True
    for x in (5.0 * T, 0.12 * T, 3.3 * T - 0.5 * T**2):
        assert track(T, x).ends_standing is False
    assert track(T[-2:], np.array([0.0, 0.0])).ends_standing


def judged(times_s, x, speed=10.0, age_s=0.0, y=0.0, yaw=0.0):
    motion = Motion.read(odometry_bytes(speed=speed), 0)
    return off_start(track(times_s, x, y, yaw), motion, age_s, OPTIONS)


def start(*args, **more):
    finding = judged(*args, **more)
    return "" if finding is None else finding.text


def test_given_a_plan_when_it_is_elsewhere_than_the_vehicle_then_it_is_said_where_and_when():
    assert start(T, 10 * T) == ""
    assert start(T, 10 * T + 0.99) == ""
    assert start(T, 10 * T, y=1.01) == "is 1.01 m from where the vehicle is 0 s from now, 1 m are allowed"
    assert start(T - 0.5, 10 * (T - 0.5)) == ""
    assert start(T, 10 * T + 2.0, age_s=0.2) == ""
    assert start(T, 14.9 * T) == ""
    assert start(T, 15.2 * T).startswith(
        "is 1.04 m from where the vehicle is 0.2 s from now"
    )  # 5 m/s faster
    assert start(T + 0.2, 10 * T + 2.0) == ""
    assert start(T + 0.2, 10 * T + 3.1).startswith("is 1.1 m from where the vehicle is 0.2 s from now")
    # Turned round, a footprint would be that of a vehicle elsewhere, also where the places are right.
    assert start(T, 10 * T, yaw=0.49) == start(T, 0 * T, speed=0.0, yaw=-0.49) == ""
    turned = "is 3.14 rad from where the vehicle is 0 s from now, 0.5 rad are allowed"
    assert start(T, 10 * T, yaw=math.pi) == start(T, 0 * T, speed=0.0, yaw=-math.pi) == turned
    assert start(T, -2 * T, speed=0.9) == start(T, 2 * T, speed=-0.9) == ""
    rolls = "leads the other way than the vehicle rolls, by 1.1 m/s; it stops first"
    assert start(T, -2 * T, speed=1.1) == rolls == start(T, 2 * T, speed=-1.1).replace("-", "")
    assert start(T + 0.21, 10 * T + 2.1) == "begins 0.21 s from now, 0.2 s are allowed"


def test_given_a_plan_when_it_is_almost_over_then_only_one_that_ends_standing_lasts():
    assert start(T - 2.8, 10 * (T - 2.8)) == ""
    assert (
        start(T - 2.81, 10 * (T - 2.81)) == "ends 0.19 s from now, still moving; it has to last for 0.2 s"
    )
    assert start(T - 9.0, 0 * T, speed=0.0) == ""
    assert start(T - 9.0, 0 * T + 2.0, speed=0.0).startswith("is 2 m from where")


def test_given_values_at_a_bound_then_they_are_still_good():
    at = TimedPath.parse(plan_bytes(T, 1e8 * (T > 1), 0.0, 0.0))
    assert unreadable(at, START_NS) is None
    at.turns[4, 3], at.points[7, 0] = 1.1e8, math.nan
    finding = unreadable(at, START_NS)
    assert finding == ("finite", 2, 0, "has 2 poses with a value that is NaN, infinite or beyond 1e+08")
    here = Motion.read(odometry_bytes(speed=0.0, y=1.0), 0)
    for times_s in (
        [0.2, 1.0],
        [0.0, 0.2],
    ):  # begins, ends as late or early as it may, 1 m from the vehicle
        assert off_start(track(np.array(times_s), np.zeros(2)), here, 0.0, OPTIONS) is None
