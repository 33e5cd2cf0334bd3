import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import START_NS, S, odometry_bytes
from torchperf_ros.api.errors import BadInput
from torchperf_ros.safety.odometry import Motion, YawRates, age_s, yaw_of

from ..stage.conftest import STORE

ODOMETRY = "nav_msgs/msg/Odometry"
MOTION = Motion.read(odometry_bytes(), 10 * S)


def changed(**fields):
    """The bytes of an odometry with some fields changed, by their paths with `__` for a dot."""
    message = STORE.deserialize_cdr(odometry_bytes(), ODOMETRY)
    for path, value in fields.items():
        *way, last = path.split("__")
        owner = message
        for name in way:
            owner = getattr(owner, name)
        setattr(owner, last, value)
    return bytes(STORE.serialize_cdr(message, ODOMETRY))


@pytest.mark.parametrize("frame", ["", "m", "ma", "map", "odom", "odomx"])  # every alignment
@pytest.mark.parametrize("little", [True, False])
def test_given_an_odometry_when_read_then_pose_and_motion_are_found(frame, little):
    data = odometry_bytes(x=1.0, y=2.0, yaw=0.5, speed=-3.0, yaw_rate=0.25, frame=frame, child="base")
    message = STORE.deserialize_cdr(data, ODOMETRY)
    message.pose.pose.position.z = 7.0
    found = Motion.read(bytes(STORE.serialize_cdr(message, ODOMETRY, little_endian=little)), 42)
    assert (found.frame, found.child_frame) == (frame.encode(), b"base")
    assert (found.stamp_ns, found.received_ns) == (START_NS, 42)
    assert (found.x, found.y, found.z, found.speed, found.yaw_rate) == (1.0, 2.0, 7.0, -3.0, 0.25)
    assert found.yaw == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", r"0 bytes are no nav_msgs/Odometry \(IndexError: .*\)"),
        (b"\0\1", r"2 bytes are no nav_msgs/Odometry \(error: .*\)"),
        (odometry_bytes()[:-300], r"\d+ bytes are no nav_msgs/Odometry \(error: .*\)"),
        (odometry_bytes(frame="o" * 256), "odometry: a frame_id of 256 bytes; at most 255 are taken"),
        (b"\0\1\0\0" + b"\xff" * 60, r"64 bytes are no nav_msgs/Odometry \(error: .*\)"),
        (changed(pose__pose__position__x=math.nan), "odometry: a value of pose or twist is not finite"),
        (changed(twist__twist__linear__x=math.inf), "odometry: a value of pose or twist is not finite"),
        (
            changed(twist__twist__linear__x=100.1),
            "odometry: 100.1 m/s or 0 rad/s is beyond 100 m/s, 10 rad/s",
        ),
        (
            changed(twist__twist__angular__z=-10.1),
            "odometry: 10 m/s or -10.1 rad/s is beyond 100 m/s, 10 rad/s",
        ),
        (
            changed(pose__pose__orientation__w=4.6e-310),
            "odometry: an orientation 4.6e-310 long; it has to be 0.1 to 10.0",
        ),
        (
            changed(pose__pose__orientation__z=11.0),
            "odometry: an orientation 11.0454 long; it has to be 0.1 to 10.0",
        ),
        (
            changed(pose__pose__position__y=1e300),
            r"odometry: the position 0, 1e\+300, 0.5 is beyond 1e\+08 m",
        ),
        (
            changed(header__stamp__sec=-1),
            "odometry: the stamp is no time: sec is negative, or nanosec a second or more",
        ),
        (changed(header__stamp__nanosec=S), "odometry: the stamp is no time: .*"),
        (
            changed(pose__pose__orientation__w=0.0),
            "odometry: an orientation 0 long; it has to be 0.1 to 10.0",
        ),
    ],
)
def test_given_a_bad_odometry_when_read_then_the_reason_is_clear(data, text):
    with pytest.raises(BadInput, match=f"^{text}$"):
        Motion.read(data, 0)


@pytest.mark.parametrize("yaw_rate", [0.0, 1e-9, 0.4, -0.4])
def test_given_a_motion_when_led_on_then_small_steps_come_to_the_same_place(yaw_rate):
    motion = Motion.read(odometry_bytes(x=5.0, y=-1.0, yaw=0.3, speed=8.0, yaw_rate=yaw_rate), 0)
    x, y, yaw = 5.0, -1.0, 0.3
    for _ in range(20_000):
        middle = yaw + 0.5 * yaw_rate * 1e-4
        x, y, yaw = x + 8e-4 * math.cos(middle), y + 8e-4 * math.sin(middle), yaw + yaw_rate * 1e-4
    assert motion.after(2.0) == pytest.approx((x, y, yaw), abs=1e-6)
    many = motion.after(np.array([0.0, 2.0]))
    assert (many[0][1], many[1][1], many[2][1]) == pytest.approx((x, y, yaw), abs=1e-6)
    assert (many[0][0], many[2][0]) == (5.0, pytest.approx(0.3))


def test_given_a_motion_at_the_bounds_when_read_then_it_is_taken():
    for speed, yaw_rate in ((100.0, 10.0), (-100.0, -10.0)):
        found = Motion.read(odometry_bytes(speed=speed, yaw_rate=yaw_rate), 0)
        assert (found.speed, found.yaw_rate) == (speed, yaw_rate)


def test_given_stamps_when_aged_then_one_of_another_clock_counts_from_its_receipt():
    assert age_s(5 * S, 0, 3 * S, 5 * S + S // 2) == 0.5
    assert age_s(0, S, 3 * S, 5 * S) == 2.0
    assert age_s(5 * S, S, 3 * S, 5 * S) == 0.0
    assert age_s(6 * S, S, 3 * S, 5 * S) == 2.0  # ahead of now
    assert age_s(5 * S, S, 3 * S, 15 * S) == 10.0
    assert age_s(5 * S, S, 3 * S, 15 * S + 1) == 2.0
    assert age_s(0, 4 * S, 3 * S, 5 * S) == 0.0


def test_given_a_quaternion_of_any_length_when_read_then_the_yaw_is_that_of_the_forward_axis():
    assert yaw_of(0.0, 0.0, 3 * math.sin(0.4), 3 * math.cos(0.4)) == pytest.approx(0.8)
    assert yaw_of(1.0, 0.0, 0.0, 1.0) == 0.0  # a roll
    assert yaw_of(0.5, 0.5, 0.5, 0.5) == pytest.approx(math.pi / 2)


def shown(rates, hz=50.0, yaw_rates=None):
    """What an odometry shows of its yaw rate after messages with these."""
    yaw_rates = yaw_rates or YawRates()
    for number, rate in enumerate(rates):
        stamp_ns = START_NS + round(number / hz * S)
        last = yaw_rates.take(replace(MOTION, yaw_rate=float(rate), stamp_ns=stamp_ns))
    return last


@settings(max_examples=50, deadline=None)
@given(
    st.floats(-0.5, 0.5),
    st.floats(0.0, 0.01),
    st.sampled_from([10.0, 20.0, 50.0, 200.0]),
    st.integers(0, 2**32 - 1),
)
def test_given_white_noise_on_a_circle_when_turning_is_asked_for_then_it_is_within_what_the_messages_allow(
    rate, sigma, hz, seed
):
    count = round(0.5 * hz) + 1
    noise = np.random.default_rng(seed).normal(0.0, sigma, count)
    found = shown(rate + noise, hz)
    # The end of a straight line through n points is off by 2 / sqrt(n) of their noise at most, five sigma of it drawn.
    assert abs(found.turns - rate) <= 5.0 * 2.0 / math.sqrt(count) * sigma + 1e-7
    # The noise is found from its own scatter, by four points more at least.
    assert found.unsure <= 3.0 * 2.0 / math.sqrt(count) * 3.5 * sigma + 1e-7


def test_given_white_noise_when_turning_is_asked_for_then_the_truth_is_mostly_within_its_uncertainty():
    for hz, least in ((10.0, 0.93), (50.0, 0.98)):
        rng = np.random.default_rng(3)
        found = [shown(0.1 + rng.normal(0.0, 0.01, round(0.5 * hz) + 1), hz) for _ in range(200)]
        assert np.mean([abs(one.turns - 0.1) <= one.unsure for one in found]) >= least


@settings(max_examples=50, deadline=None)
@given(
    st.floats(-0.4, 0.4),
    st.floats(-0.2, 0.2),
    st.sampled_from([10.0, 20.0, 50.0, 200.0]),
    st.floats(0.0, 0.5),
)
def test_given_a_clothoid_when_turning_is_asked_for_then_it_lags_by_80_ms_at_most_where_it_begins_and_not_later(
    steepness, rate, hz, begins_s
):
    times_s = np.arange(round(0.5 * hz) + 1) / hz
    assert shown(rate + steepness * times_s, hz).turns == pytest.approx(
        rate + steepness * times_s[-1], abs=1e-6
    )
    rates = rate + steepness * np.maximum(times_s - begins_s, 0.0)
    assert abs(shown(rates, hz).turns - rates[-1]) <= 0.08 * abs(steepness) + 1e-6


def test_given_a_jump_of_the_frame_when_turning_is_asked_for_then_it_is_no_turn():
    yaw_rates = YawRates()
    shown(np.full(30, 0.1), yaw_rates=yaw_rates)
    moved = Motion.read(
        odometry_bytes(x=900.0, yaw=2.0, yaw_rate=0.1, stamp_ns=START_NS + round(0.6 * S), frame="map"), 0
    )
    found = yaw_rates.take(moved)
    assert (found.turns, found.unsure) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-9))


@pytest.mark.parametrize("next_s", [-5.0, 0.58, 1.2], ids=["begins anew", "stands still", "leaves a gap"])
def test_given_a_clock_that_jumps_when_turning_is_asked_for_then_what_was_before_does_not_count(next_s):
    yaw_rates = YawRates()
    shown(np.full(30, 0.1), yaw_rates=yaw_rates)
    found = yaw_rates.take(
        Motion.read(odometry_bytes(yaw_rate=0.3, stamp_ns=START_NS + round(next_s * S)), 0)
    )
    assert (found.turns, found.unsure, found.yaw_rate) == (None, 0.0, 0.3)


def test_given_messages_without_stamps_when_turning_is_asked_for_then_their_receipt_counts():
    yaw_rates = YawRates()
    for number in range(10):
        data = odometry_bytes(yaw_rate=0.1 + 0.01 * number, stamp_ns=0)
        found = yaw_rates.take(Motion.read(data, 10 * S + number * S // 50))
    assert found.turns == pytest.approx(0.19)
