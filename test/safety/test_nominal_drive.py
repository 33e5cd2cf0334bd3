"""Ordinary driving is not refused: lane keeping in bends and IDM behind leads, with traffic in the lanes beside.

`TORCHPERF_GUARD_DRIVE_S=2000` drives for so long in each scene.
"""

import os

import numpy as np
import pytest

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, plan_bytes
from torchperf_ros.config.safety_options import guard_options
from torchperf_ros.frame.outcome import GuardVerdict
from torchperf_ros.safety.guard import Guard

DRIVE_S = float(os.environ.get("TORCHPERF_GUARD_DRIVE_S", "10"))
AGE_S, PERIOD_S = 0.06, 0.1
LANE_M, LENGTH = 3.5, 4.5
IDM = {"time_s": 1.5, "gap_m": 2.0, "accel": 1.5, "brake": 2.0}  # Treiber and Kesting 2013, table 11.2; highway


class Road:
    """A road whose bends come and go with a clothoid of 40 m each."""

    def __init__(self, bend):
        self.s = np.arange(-200.0, 100_000.0, 1.0)
        turns = np.interp(self.s % 600, [0, 150, 190, 290, 330, 400, 440, 540, 580], [0, 0, 1, 1, 0, 0, -1, -1, 0])
        self.bends = bend * turns
        self.heading = np.cumsum(self.bends)
        self.centre = np.cumsum(np.exp(1j * self.heading))

    def at(self, s, left=0.0):
        heading = np.interp(s, self.s, self.heading)
        return np.interp(s, self.s, self.centre) + 1j * left * np.exp(1j * heading), heading


def idm(speed, wanted, gap, lead_speed):
    """The Intelligent Driver Model's acceleration (Treiber, Hennecke and Helbing 2000)."""
    desired = IDM["gap_m"] + max(
        0.0, speed * IDM["time_s"] + speed * (speed - lead_speed) / (2 * (IDM["accel"] * IDM["brake"]) ** 0.5)
    )
    return max(-8.0, IDM["accel"] * (1 - (speed / wanted) ** 4 - (desired / max(gap, 0.1)) ** 2))


def planned(speed, wanted, lead):
    """Ways and speeds of the next 3 s; the lead goes on as it does."""
    ways, speeds, way = [0.0], [speed], 0.0
    for number in range(300):
        gap, lead_speed = (1e3, wanted) if lead is None else (lead[0] + lead[1] * number * 0.01 - way - LENGTH, lead[1])
        accel = idm(speed, wanted, gap, lead_speed)
        new = max(0.0, speed + accel * 0.01)
        way, speed = way + 0.5 * (speed + new) * 0.01, new
        ways.append(way)
        speeds.append(speed)
    return np.array(ways), np.array(speeds)


def drive(bend, wanted, lead_speed_at, neighbours, follower, oncoming, seconds):
    """Verdicts of all plans of a drive."""
    road, guard = Road(bend), Guard(guard_options({"guard.act": ["all"]}))
    rng = np.random.default_rng(1)
    # stops behind it if it stands: begins as IDM does, at its own distance
    s, speed, lead_s = 0.0, min(wanted, lead_speed_at(0.0)), 2.0 + 1.7 * lead_speed_at(0.0) + LENGTH
    beside = [[rng.uniform(-60, 90), left, rng.uniform(0.7, 1.2) * wanted] for left in neighbours for _ in range(4)]
    verdicts = []
    for number in range(round(seconds / PERIOD_S)):
        t = number * PERIOD_S
        ros_ns, now_ns = START_NS + round(t * S), 10 * S + round(t * S)
        lead_v = lead_speed_at(t)
        ways, speeds = planned(speed, wanted, (lead_s - s, lead_v))
        everything = [(lead_s, 0.0, lead_v)] + [tuple(one) for one in beside]
        if follower:
            everything.append((s - LENGTH - 2.0 - speed, 0.0, speed * 1.1))
        boxes = []
        for other_s, left, v in everything:
            place, heading = road.at(other_s, left)
            boxes.append(Box(place.real, place.imag, heading, velocity=(v * np.cos(heading), v * np.sin(heading))))
        for ahead in (40.0, 90.0, 140.0) if oncoming else ():
            place, heading = road.at(s + ahead - (number % 20) * 2.0, LANE_M)
            velocity = -15 * np.cos(heading), -15 * np.sin(heading)
            boxes.append(Box(place.real, place.imag, heading + np.pi, velocity=velocity))
        here, heading = road.at(s)
        yaw_rate = speed * np.interp(s, road.s, road.bends)
        guard.moved(odometry_bytes(here.real, here.imag, heading, speed, yaw_rate, stamp_ns=ros_ns), now_ns)
        guard.saw(0, markers_bytes(boxes, stamp_ns=ros_ns), now_ns)
        place, yaw = road.at(s + ways[::10])
        plan = plan_bytes(np.arange(31) * 0.1, place.real, place.imag, yaw, start_ns=ros_ns)
        later_ns = round(AGE_S * S)
        verdicts.append(guard.check(plan, now_ns + later_ns, ros_ns + later_ns, AGE_S * 1000))
        s, speed = s + ways[10], speeds[10]
        lead_s += 0.5 * (lead_v + lead_speed_at(t + PERIOD_S)) * PERIOD_S
        for one in beside:
            one[0] += one[2] * PERIOD_S
            if abs(one[0] - s) > 120:
                one[0] = s + rng.uniform(-110, 110)
    return verdicts


def steady(speed):
    return lambda t: speed


def stop_and_go(speed):
    return lambda t: max(0.0, speed * (0.5 + 0.55 * np.cos(2 * np.pi * t / 40)))


def brakes(speed):
    return lambda t: max(8.0, speed - 4.0 * max(0.0, (t % 20) - 10))


SCENES = {
    "highway": (0.001, 33.0, steady(27.0), (-LANE_M, LANE_M), True, False),
    "country road in bends": (0.006, 17.0, steady(15.0), (), True, True),
    "two lanes in bends": (0.008, 15.0, steady(14.0), (-LANE_M, LANE_M), True, False),
    "stop and go": (0.002, 15.0, stop_and_go(15.0), (-LANE_M, LANE_M), True, False),
    "stop and go in bends": (0.01, 12.0, stop_and_go(12.0), (), False, True),
    "a lead that brakes by 4 m/s^2": (0.0, 25.0, brakes(25.0), (LANE_M,), True, False),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_given_ordinary_driving_when_checked_then_no_more_than_a_thousandth_is_refused(scene):
    found = drive(*SCENES[scene], DRIVE_S)
    refused = [one for one in found if one.verdict is not GuardVerdict.ACCEPT]
    print(f"{scene}: {len(refused)} of {len(found)} refused", [one.reason for one in refused[:3]])
    assert len(refused) <= 0.001 * len(found), refused[0].reason
