"""Ordinary traffic for the guard.

Lane keeping in bends and IDM behind leads, with vehicles in the lanes beside.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, plan_bytes
from torchperf_ros.api.outcome import GuardVerdict
from torchperf_ros.safety.odometry import Motion

AGE_S = 0.06  # of a plan's frame when the plan is checked
LANE_M, LENGTH = 3.5, 4.5
IDM = {
    "time_s": 1.5,
    "gap_m": 2.0,
    "accel": 1.5,
    "brake": 2.0,
}  # Treiber and Kesting 2013, table 11.2; highway


GOES_OUT = {GuardVerdict.ACCEPT, GuardVerdict.UNCHECKED}


class Road:
    """A road whose bends come and go with a clothoid of 40 m each."""

    def __init__(self, bend):
        self.s = np.arange(-200.0, 100_000.0, 1.0)
        turns = np.interp(
            self.s % 600, [0, 150, 190, 290, 330, 400, 440, 540, 580], [0, 0, 1, 1, 0, 0, -1, -1, 0]
        )
        self.bends = bend * turns
        self.heading = np.cumsum(self.bends)
        self.centre = np.cumsum(np.exp(1j * self.heading))

    def at(self, s, left=0.0):
        heading = np.interp(s, self.s, self.heading)
        return np.interp(s, self.s, self.centre) + 1j * left * np.exp(1j * heading), heading


def idm(speed, wanted, gap, lead_speed):
    """The Intelligent Driver Model's acceleration (Treiber, Hennecke and Helbing 2000)."""
    desired = IDM["gap_m"] + max(
        0.0,
        speed * IDM["time_s"] + speed * (speed - lead_speed) / (2 * (IDM["accel"] * IDM["brake"]) ** 0.5),
    )
    return max(-8.0, IDM["accel"] * (1 - (speed / wanted) ** 4 - (desired / max(gap, 0.1)) ** 2))


def planned(speed, wanted, lead):
    """Ways and speeds of the next 3 s; the lead goes on as it does."""
    ways, speeds, way = [0.0], [speed], 0.0
    for number in range(300):
        gap, lead_speed = (
            (1e3, wanted) if lead is None else (lead[0] + lead[1] * number * 0.01 - way - LENGTH, lead[1])
        )
        accel = idm(speed, wanted, gap, lead_speed)
        new = max(0.0, speed + accel * 0.01)
        way, speed = way + 0.5 * (speed + new) * 0.01, new
        ways.append(way)
        speeds.append(speed)
    return np.array(ways), np.array(speeds)


class Moment(NamedTuple):
    """What there is at one time of a drive: times, messages, and objects in odometry's frame."""

    t_s: float
    ros_ns: int
    now_ns: int
    odometry: bytes
    plan: bytes
    boxes: list[Box]

    @property
    def exact(self) -> bytes:
        """The objects with their velocities, as CDR bytes."""
        return markers_bytes(self.boxes, stamp_ns=self.ros_ns)


class Scene(NamedTuple):
    """A road's bends in 1/m, the speed wanted in m/s, the lead's over time, and who else is there."""

    bend: float
    wanted: float
    lead_speed_at: Callable[[float], float]
    neighbours: tuple[float, ...] = ()
    follower: bool = False
    oncoming: bool = False


def drive(scene: Scene, seconds: float, period_s: float = 0.1, seed: int = 1) -> Iterator[Moment]:
    """A drive, moment by moment; the seed draws where the neighbours are."""
    bend, wanted, lead_speed_at, neighbours, follower, oncoming = scene
    road, rng = Road(bend), np.random.default_rng(seed)
    # stops behind it if it stands: begins as IDM does, at its own distance
    s, speed, lead_s = 0.0, min(wanted, lead_speed_at(0.0)), 2.0 + 1.7 * lead_speed_at(0.0) + LENGTH
    beside = [
        [rng.uniform(-60, 90), left, rng.uniform(0.7, 1.2) * wanted]
        for left in neighbours
        for _ in range(4)
    ]
    towards = [40.0, 90.0, 140.0] if oncoming else []
    for number in range(round(seconds / period_s)):
        t = number * period_s
        ros_ns, now_ns = START_NS + round(t * S), 10 * S + round(t * S)
        lead_v = lead_speed_at(t)
        ways, speeds = planned(speed, wanted, (lead_s - s, lead_v))
        everything = [(lead_s, 0.0, lead_v)] + [tuple(one) for one in beside]
        if follower:
            everything.append((s - LENGTH - 2.0 - speed, 0.0, speed * 1.1))
        boxes = []
        for other_s, left, v in everything:
            place, heading = road.at(other_s, left)
            boxes.append(
                Box(place.real, place.imag, heading, velocity=(v * np.cos(heading), v * np.sin(heading)))
            )
        for other_s in towards:
            place, heading = road.at(other_s, LANE_M)
            velocity = -15 * np.cos(heading), -15 * np.sin(heading)
            boxes.append(Box(place.real, place.imag, heading + np.pi, velocity=velocity))
        here, heading = road.at(s)
        yaw_rate = speed * np.interp(s, road.s, road.bends)
        odometry = odometry_bytes(here.real, here.imag, heading, speed, yaw_rate, stamp_ns=ros_ns)
        place, yaw = road.at(s + ways[::10])
        plan = plan_bytes(np.arange(31) * 0.1, place.real, place.imag, yaw, start_ns=ros_ns)
        yield Moment(t, ros_ns, now_ns, odometry, plan, boxes)
        later = period_s / 0.01
        s, speed = s + np.interp(later, np.arange(301), ways), np.interp(later, np.arange(301), speeds)
        lead_s += 0.5 * (lead_v + lead_speed_at(t + period_s)) * period_s
        towards = [one - 15 * period_s if one > s - 20 else s + 140 for one in towards]
        for one in beside:
            one[0] += one[2] * period_s
            if abs(one[0] - s) > 120:
                one[0] = s + rng.uniform(-110, 110)


def check(guard, moment: Moment, markers: bytes):
    """What a guard makes of a moment's plan."""
    guard.moved(moment.odometry, moment.now_ns)
    guard.saw(0, markers, moment.now_ns)
    later_ns = round(AGE_S * S)
    return guard.check(moment.plan, moment.now_ns + later_ns, moment.ros_ns + later_ns, AGE_S * 1000)


FAULTS = {
    "split": "10 % of the boxes are two halves",
    "merged": "in 20 % of the arrays, the two nearest boxes are one, if their middles are within 12 m",
    "clutter": "each array has a box more, within 60 m ahead or behind and 20 m aside",
    "new ids": "each id is drawn in each array",
    "swapped ids": "ids stay, but in 20 % of the arrays two are swapped",
    "NaN": "each array has a box whose place is NaN",
    "jitter": "stamps are up to 20 ms off",
    "repeat": "10 % of the arrays have the stamp of the one before",
}
"""What else may be wrong with detections, by its name."""


class Detector:
    """Detections as perception sends them: places with noise, no velocity, in any order, some missing.

    `fault`: one of `FAULTS`, "" for none. `keeps_ids`: each object has an id of its own; else it is the place in the
    list.
    """

    def __init__(
        self,
        sigma_m: float,
        missing: float = 0.0,
        seed: int = 1,
        fault: str = "",
        *,
        keeps_ids: bool = False,
    ) -> None:
        self._keeps_ids = keeps_ids
        self._sigma_m, self._missing, self._rng = sigma_m, missing, np.random.default_rng(seed)
        self._fault, self._stamp_ns = fault, 0

    def markers(self, moment: Moment) -> bytes:
        """CDR bytes."""
        rng, seen = self._rng, []
        for at in rng.permutation(len(moment.boxes)):
            if rng.random() >= self._missing:
                box, (x, y) = (
                    moment.boxes[at],
                    rng.normal(0.0, self._sigma_m, 2) if self._sigma_m else (0.0, 0.0),
                )
                seen.append((int(at), box._replace(x=box.x + x, y=box.y + y, velocity=None)))
        ids, boxes = [number for number, _ in seen], [box for _, box in seen]
        boxes = self._with_fault(boxes, moment)
        if self._fault == "new ids":
            ids = rng.integers(0, 1 << 30, len(boxes)).tolist()
        elif self._fault == "swapped ids" and len(ids) > 1:
            if rng.random() < 0.2:
                one, other = rng.permutation(len(ids))[:2]
                ids[one], ids[other] = ids[other], ids[one]
        elif not self._keeps_ids:
            ids = None
        stamp_ns = moment.ros_ns
        if self._fault == "jitter":
            stamp_ns += round(rng.uniform(-0.02, 0.02) * S)
        if self._fault == "repeat" and self._stamp_ns and rng.random() < 0.1:
            stamp_ns = self._stamp_ns
        self._stamp_ns = stamp_ns
        return markers_bytes(boxes, stamp_ns=stamp_ns, ids=ids)

    def _with_fault(self, boxes: list[Box], moment: Moment) -> list[Box]:
        rng = self._rng
        if self._fault == "split":
            split = rng.random(len(boxes)) < 0.1
            return [part for box, two in zip(boxes, split, strict=True) for part in _parts(box, two)]
        if self._fault == "merged" and len(boxes) > 1 and rng.random() < 0.2:
            return _merged(boxes)
        if self._fault == "clutter":
            motion = Motion.read(moment.odometry, 0)
            off = complex(rng.uniform(-60.0, 60.0), rng.uniform(-20.0, 20.0)) * np.exp(1j * motion.yaw)
            box = Box(motion.x + off.real, motion.y + off.imag, rng.uniform(-np.pi, np.pi), velocity=None)
            return [*boxes, box]
        if self._fault == "NaN":
            return [*boxes, Box(float("nan"), 0.0, velocity=None)]
        return boxes


def _parts(box: Box, in_two: bool) -> list[Box]:
    off = np.exp(1j * box.yaw) * box.length / 4
    half = box._replace(length=box.length / 2)
    return (
        [half._replace(x=box.x + k * off.real, y=box.y + k * off.imag) for k in (1, -1)]
        if in_two
        else [box]
    )


def _merged(boxes: list[Box]) -> list[Box]:
    """The two nearest as one box around both."""
    places = np.array([complex(box.x, box.y) for box in boxes])
    apart = np.abs(places[:, None] - places) + np.diag(np.full(len(boxes), np.inf))
    one, other = np.unravel_index(apart.argmin(), apart.shape)
    if apart[one, other] > 12.0:
        return boxes
    yaw = boxes[one].yaw
    turns = np.exp(1j * np.array([boxes[one].yaw, boxes[other].yaw])) * np.exp(-1j * yaw)
    at, half = (
        places[[one, other]] * np.exp(-1j * yaw),
        0.5 * np.array([boxes[one].length, boxes[one].width]),
    )
    reach = np.abs(turns.real) * half[0] + np.abs(turns.imag) * half[1]
    reach = reach + 1j * (np.abs(turns.imag) * half[0] + np.abs(turns.real) * half[1])
    least, most = at - reach, at + reach
    low, high = complex(least.real.min(), least.imag.min()), complex(most.real.max(), most.imag.max())
    middle, size = 0.5 * (low + high) * np.exp(1j * yaw), high - low
    both = Box(middle.real, middle.imag, yaw, size.real, size.imag, velocity=None)
    return [*(box for at, box in enumerate(boxes) if at not in {one, other}), both]


def steady(speed):
    return lambda t: speed


def stop_and_go(speed):
    return lambda t: max(0.0, speed * (0.5 + 0.55 * np.cos(2 * np.pi * t / 40)))


def brakes(speed):
    """Every 20 s the lead brakes by 4 m/s^2 to 8 m/s, and later speeds up by 2 m/s^2."""

    def at(t):
        again_s = t % 20
        fastest = speed if t < 20 else min(speed, 8.0 + 2.0 * again_s)
        return max(8.0, fastest - 4.0 * max(0.0, again_s - 10))

    return at


SCENES = {
    "highway": Scene(0.001, 33.0, steady(27.0), (-LANE_M, LANE_M), follower=True),
    "country road in bends": Scene(0.006, 17.0, steady(15.0), follower=True, oncoming=True),
    "two lanes in bends": Scene(0.008, 15.0, steady(14.0), (-LANE_M, LANE_M), follower=True),
    "stop and go": Scene(0.002, 15.0, stop_and_go(15.0), (-LANE_M, LANE_M), follower=True),
    "stop and go in bends": Scene(0.01, 12.0, stop_and_go(12.0), oncoming=True),
    "a lead that brakes by 4 m/s^2": Scene(0.0, 25.0, brakes(25.0), (LANE_M,), follower=True),
}


def _lead_brakes(rng, speed):
    gap, brake = rng.uniform(1.2, 2.0) * speed, rng.uniform(3.0, 8.0)

    def boxes(t):
        moving_s = min(t, speed / brake)
        x = (
            gap + LENGTH + speed * t
            if t < 0
            else gap + LENGTH + speed * moving_s - 0.5 * brake * moving_s**2
        )
        return [Box(x, 0.0, velocity=(speed - brake * moving_s if t > 0 else speed, 0.0))]

    return boxes


def _pedestrian_crosses(rng, speed):
    """It stands 3 to 5 m beside our way, and begins to walk: it is in our way when we are there."""
    left, walks = rng.choice((-1, 1)) * rng.uniform(3.0, 5.0), rng.uniform(1.0, 2.0)
    x = 3.5 + speed * abs(left) / walks + rng.uniform(-0.5, 0.5)

    def boxes(t):
        y = left - np.sign(left) * walks * max(t, 0.0)
        return [Box(x, y, length=0.5, width=0.5, velocity=(0.0, -np.sign(left) * walks * (t > 0)))]

    return boxes


def _car_cuts_in(rng, speed):
    """A slower car of the lane beside; within 0.5 s it drifts as fast as it will."""
    left, drift, slower = rng.choice((-1, 1)) * LANE_M, rng.uniform(0.8, 1.8), rng.uniform(3.0, 8.0)
    ahead, side = rng.uniform(10.0, 20.0) + LENGTH, np.sign(left)

    def boxes(t):
        ramp_s = min(max(t, 0.0), 0.5)
        y = left - side * drift * (ramp_s**2 + max(t - 0.5, 0.0))
        inside = side * y < 0
        velocity = (speed - slower, 0.0 if inside else -side * drift * 2.0 * ramp_s)
        return [Box(ahead + (speed - slower) * t, 0.0 if inside else y, velocity=velocity)]

    return boxes


EVENTS = {
    "the lead brakes by 3 to 8 m/s^2": (_lead_brakes, 20.0),
    "a pedestrian begins to cross": (_pedestrian_crosses, 10.0),
    "a slower car cuts in": (_car_cuts_in, 20.0),
}
"""What happens at 0 s, and our speed in m/s."""
_BEFORE_S = 2.0


def event(name: str, period_s: float, seed: int) -> Iterator[Moment]:
    """What happens to a vehicle that keeps its lane and speed, from 2 s before until 4 s after."""
    make, speed = EVENTS[name]
    boxes = make(np.random.default_rng(seed), speed)
    for number in range(round((_BEFORE_S + 4.0) / period_s)):
        t = number * period_s - _BEFORE_S
        ros_ns, now_ns = START_NS + round((t + _BEFORE_S) * S), 10 * S + round((t + _BEFORE_S) * S)
        x = speed * t
        times_s = np.arange(31) * 0.1
        odometry = odometry_bytes(x, speed=speed, stamp_ns=ros_ns)
        plan = plan_bytes(times_s, x + speed * times_s, 0.0, 0.0, start_ns=ros_ns)
        yield Moment(t, ros_ns, now_ns, odometry, plan, boxes(t))
