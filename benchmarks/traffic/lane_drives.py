"""Drawn drives for the emergency lane's rules.

Ordinary traffic, and obstacles that only braking now avoids.

A vehicle follows its lane; others drive, stand or come towards it. A laser scanner of 501 beams looks 20
times a second, with noise, and odometry comes with it. Nothing is published: the lane sees, and says when
it latches.
"""

import math
import random
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.messages import odometry_bytes
from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.messages import empty_message, encode
from torchperf_ros.safety.emergency import Emergency
from torchperf_ros.settings.config import node_config
from torchperf_ros.world.sensors import BEAMS, RANGE_M, scan
from torchperf_ros.world.vehicles import LENGTH_M, REAR_M, WIDTH_M, overlap

Floats = NDArray[np.float64]

EVERY_S: Final = 0.05
DECELERATION, REACTION_S = 6.0, 0.3
LANE_M: Final = 3.5
_FRONT_M: Final = LENGTH_M - REAR_M
_HALF_VIEW: Final = math.radians(100.0)
_SCAN: Final = "sensor_msgs/msg/LaserScan"
_RANGE_NOISE_M, _YAW_NOISE = 0.02, 0.003  # m, rad/s
_DROPS_M: Final = 6.0  # mean distance of drops that are seen
_LONG_M, _TABLE_M = 1500.0, 0.5
_ROS_NS: Final = 1_700_000_000 * NS_PER_S
_ODOMETRY: Final = odometry_bytes()
_POSE_AT: Final = len(_ODOMETRY) - 8 * (7 + 36 + 6 + 36)
_SAME_S: Final = 1e-6
_CONTACT_M: Final = 12.0  # middles of two that touch are nearer


class Road:
    """A lane's middle: straight, then a bend with a transition that takes `transition_m`."""

    def __init__(
        self, straight_m: float = _LONG_M, curvature: float = 0.0, transition_m: float = 1.0
    ) -> None:
        """Draw it up."""
        s = np.arange(-200.0, _LONG_M, _TABLE_M)
        self.s, self.curvature = s, curvature * np.clip((s - straight_m) / transition_m, 0.0, 1.0)
        self.yaw, self.x, self.y = turn_table(self.curvature)

    def at(self, s: float, d: float) -> tuple[float, float, float]:
        """Place and heading, so far along it and to the left of it."""
        x, y, yaw = (float(np.interp(s, self.s, values)) for values in (self.x, self.y, self.yaw))
        return x - d * math.sin(yaw), y + d * math.cos(yaw), yaw


def turn_table(curvature: Floats) -> tuple[Floats, Floats, Floats]:
    """Heading, x and y along a road, by its curvature each `_TABLE_M`."""
    yaw = np.cumsum(curvature) * _TABLE_M
    return yaw, np.cumsum(np.cos(yaw)) * _TABLE_M, np.cumsum(np.sin(yaw)) * _TABLE_M


@dataclass
class Other:
    """Somebody or something.

    Middle `s` along the lane and `d` to its left, m/s along and across, size in m.

    `plan` gives the acceleration along the lane at a time; `across_plan` the speed across it.
    """

    s: float
    d: float
    speed: float = 0.0
    length: float = 4.5
    width: float = 1.9
    plan: Callable[[float], float] = lambda _: 0.0
    across_plan: Callable[[float], float] = lambda _: 0.0
    moves: bool = True

    def step(self, now_s: float) -> None:
        before = self.speed
        wanted = self.speed + self.plan(now_s) * EVERY_S
        self.speed = max(0.0, wanted) if before >= 0 else wanted
        self.s += 0.5 * (before + self.speed) * EVERY_S
        self.d += self.across_plan(now_s) * EVERY_S


@dataclass
class Drive:
    """What happens.

    Attributes:
        follows: for whom the vehicle brakes by itself, as any driver does; None: it sees nothing.
        known_s: from when on it can be known that the vehicle has to brake.
        rain: share of the beams that may hit a drop instead, most of them near the vehicle.
    """

    road: Road
    speed: float
    others: list[Other]
    lasts_s: float
    follows: Other | None = None
    headway_s: float = 1.5
    noise_points: int = 0
    kind: str = "ordinary"
    known_s: float = 0.0
    rain: float = 0.0


@dataclass(frozen=True)
class Driven:
    """What came of a drive.

    Attributes:
        latched_s: when the lane latched, NaN: never; `reason`: why.
        hit_m_s: the speed at which the vehicle hit something, 0: nothing.
    """

    latched_s: float
    reason: str
    hit_m_s: float


def follow(speed: float, wanted: float, gap_m: float, ahead: float, headway_s: float) -> float:
    """Intelligent Driver Model (Treiber et al.

    2000) with 1.5 m/s^2, 2 m/s^2 comfortable braking and 2 m distance.
    """
    near_m = 2.0 + max(0.0, speed * headway_s + speed * (speed - ahead) / (2 * math.sqrt(1.5 * 2.0)))
    return max(-5.0, 1.5 * (1 - (speed / wanted) ** 4 - (near_m / max(gap_m, 0.1)) ** 2))


def rules() -> Emergency:
    """A lane with one scanner over the vehicle's reference point."""
    values = {
        "emergency.sensors": ["scan"],
        "emergency.deceleration": DECELERATION,
        "emergency.reaction_ms": 300.0,
    }
    return Emergency(node_config(values, {}).emergency)


def run(
    drive: Drive,
    seed: int,
    *,
    until_hit: bool = True,
    brakes_s: float = math.inf,
    watches: bool = True,
    late_s: Callable[[float], float] = lambda _: 0.0,
) -> Driven:
    """Drive: when the lane latches, the vehicle brakes by its deceleration, after its reaction time.

    Without a lane that watches it brakes from `brakes_s` on. A scan comes as much later as `late_s` says of
    its time.
    """
    chance, lane = np.random.default_rng(seed), rules()
    message = empty_message(
        _SCAN,
        angle_min=-_HALF_VIEW,
        angle_max=_HALF_VIEW,
        angle_increment=2 * _HALF_VIEW / (BEAMS - 1),
        range_min=0.1,
        range_max=RANGE_M,
    )
    message.ranges = np.zeros(BEAMS, np.float32)
    head = bytes(encode(message, _SCAN))[: -4 * BEAMS - 4]  # behind it come the ranges, and no intensities
    moves = [one for one in drive.others if one.moves]
    still = boxes_of(drive, [one for one in drive.others if not one.moves])
    s, speed, wanted, latched_s = 0.0, drive.speed, drive.speed, math.nan
    begin_ns = 1_000 * NS_PER_S
    queue: deque[tuple[float, bytes]] = deque()  # scans on their way: when each comes
    lane.activate(begin_ns)
    for step in range(round(drive.lasts_s / EVERY_S)):
        now_s = step * EVERY_S
        now_ns = begin_ns + round(now_s * NS_PER_S)
        x, y, yaw = drive.road.at(s, 0.0)
        curvature = float(np.interp(s, drive.road.s, drive.road.curvature))
        moving = [(*drive.road.at(one.s, one.d), 0.0, 0.0, one.length, one.width) for one in moves]
        boxes = np.vstack((still[np.hypot(still[:, 0] - x, still[:, 1] - y) < RANGE_M], *moving))
        own = (
            x + (0.5 * LENGTH_M - REAR_M) * math.cos(yaw),
            y + (0.5 * LENGTH_M - REAR_M) * math.sin(yaw),
            yaw,
        )
        for box in boxes[np.hypot(boxes[:, 0] - x, boxes[:, 1] - y) < _CONTACT_M]:
            if overlap((*own, LENGTH_M, WIDTH_M), (*box[:3], *box[5:])):
                return Driven(latched_s, lane.latch.reason if lane.latch else "", max(speed, 0.01))
        if watches:
            ranges = _measured(drive, scan(boxes, x, y, yaw)[0], chance)
            stamp_ns = _ROS_NS + round(now_s * NS_PER_S)
            rate = speed * curvature + chance.normal(0.0, _YAW_NOISE)
            queue.append(
                (
                    now_s + late_s(now_s),
                    restamped(head, stamp_ns) + ranges.astype("<f4").tobytes() + bytes(4),
                )
            )
            while queue and queue[0][0] < now_s - _SAME_S:
                at_s, late = queue.popleft()
                lane.saw(0, late, begin_ns + round(at_s * NS_PER_S))
            lane.moved(_odometry(x, y, yaw, speed, rate, stamp_ns), now_ns)
            if queue and queue[0][0] <= now_s + _SAME_S:
                lane.saw(0, queue.popleft()[1], now_ns)
            lane.look_for_silence(now_ns)
            if lane.latch is not None and math.isnan(latched_s):
                latched_s = (lane.latch.at_ns - begin_ns) / NS_PER_S
                brakes_s = latched_s + REACTION_S - _SAME_S
                if not until_hit:
                    return Driven(latched_s, lane.latch.reason, 0.0)
        acceleration = 0.0
        if now_s >= brakes_s:
            acceleration = -DECELERATION
        elif drive.follows is not None:
            gap_m = drive.follows.s - 0.5 * drive.follows.length - s - _FRONT_M
            acceleration = follow(speed, wanted, gap_m, drive.follows.speed, drive.headway_s)
        before, speed = speed, max(0.0, speed + acceleration * EVERY_S)
        s += 0.5 * (before + speed) * EVERY_S
        for other in moves:
            other.step(now_s)
        if brakes_s < math.inf and speed == 0.0:
            break
    return Driven(latched_s, lane.latch.reason if lane.latch else "", 0.0)


def _measured(drive: Drive, ranges: Floats, chance: np.random.Generator) -> Floats:
    """What the scanner makes of the true ranges, with noise, stray points and rain."""
    ranges = ranges + chance.normal(0.0, _RANGE_NOISE_M, BEAMS)
    ranges[chance.integers(0, BEAMS, drive.noise_points)] = chance.uniform(0.5, 60.0, drive.noise_points)
    if drive.rain:
        drops_m = 0.3 + chance.exponential(_DROPS_M, BEAMS)
        hit = (chance.random(BEAMS) < drive.rain) & (drops_m < ranges)
        ranges[hit] = drops_m[hit]
    return ranges


def boxes_of(drive: Drive, others: list[Other]) -> Floats:
    """Of these: x, y, yaw, vx, vy, length, width."""
    rows = [(*drive.road.at(one.s, one.d), 0.0, 0.0, one.length, one.width) for one in others]
    return np.array(rows) if rows else np.zeros((0, 7))


def _odometry(x: float, y: float, yaw: float, speed: float, yaw_rate: float, stamp_ns: int) -> bytes:
    data = bytearray(_ODOMETRY)
    struct.pack_into("<iI", data, 4, *divmod(stamp_ns, NS_PER_S))
    struct.pack_into("<7d", data, _POSE_AT, x, y, 0.5, 0.0, 0.0, math.sin(yaw / 2), math.cos(yaw / 2))
    struct.pack_into("<6d", data, _POSE_AT + 344, speed, 0.0, 0.0, 0.0, 0.0, yaw_rate)
    return bytes(data)


def ordinary(seed: int) -> Drive:
    """Traffic in which nobody has to brake hard: leads, oncoming cars, parked cars, walls, bends, noise."""
    draw = random.Random(f"ordinary {seed}")
    speed = draw.uniform(3.0, 30.0)
    others: list[Other] = []
    headway_s = draw.uniform(1.0, 2.0)
    lead = None
    if draw.random() < 0.75:
        braking, at_s = draw.uniform(1.0, 3.5), draw.uniform(2.0, 6.0)
        least = draw.uniform(0.0, 0.8) * speed
        lead = Other(_FRONT_M + max(speed * headway_s, 2.0) + 2.25, 0.0, speed)
        lead.plan = lambda now_s: 0.0 if now_s < at_s else (-braking if lead.speed > least else 0.0)
        others.append(lead)
    most = 2.0 if speed < 15.0 else 1.0
    bend = draw.choice((0.0, draw.uniform(0.3, 1.0) * most / speed**2 * draw.choice((-1.0, 1.0))))
    bend = math.copysign(min(abs(bend), 0.025), bend)
    fastest = math.sqrt(
        3.0 / max(abs(bend), 1e-3)
    )  # of those who come towards the vehicle, in the same bend
    road = Road(draw.uniform(20.0, 100.0), bend, max(2.0 * speed, 10.0))
    for _ in range(draw.randint(0, 4)):
        others.append(Other(draw.uniform(30.0, 300.0), LANE_M, -draw.uniform(3.0, min(30.0, fastest))))
    slow = speed < 15.0
    if slow and draw.random() < 0.5:
        beside_m = draw.uniform(2.5, 3.5)
        others += [
            Other(draw.uniform(10.0, 200.0), -beside_m, moves=False) for _ in range(draw.randint(1, 8))
        ]
    for side in (-1, 1):
        if draw.random() < 0.4:
            wall_m = draw.uniform(2.0, 7.0) if slow else draw.uniform(4.0, 8.0)
            wall_m = wall_m + LANE_M if side > 0 else wall_m
            count = int(60 + 12 * speed) // 8
            others += [
                Other(8.0 * number, side * wall_m, 0.0, 8.5, 0.3, moves=False) for number in range(count)
            ]
    return Drive(road, speed, others, 10.0, lead, headway_s, draw.randint(0, 12))


KINDS: Final = ("standing", "slower", "brakes", "cut_in", "steps_out", "oncoming", "stops_across")
"""Of what comes into the way of a vehicle that sees nothing."""
_CORRIDOR_M: Final = 0.5 * WIDTH_M + 0.2
_BEAM: Final = 2 * _HALF_VIEW / (BEAMS - 1)
# At a faster vehicle's braking distance, 0.5 m give fewer than three returns, and a lane's width not enough
# for noise.
_SMALL_M_S, _FAR_M_S, _WIDE = 11.0, 22.0, ("standing", "stops_across", "oncoming")
_TWICE_S: Final = 0.15  # until two scans have shown it, and the lane has looked at both
_SEEN_S: Final = 0.35  # until it shows that a car brakes


def danger(seed: int) -> Drive:
    """Something comes into the way of a vehicle that sees nothing, see `KINDS`."""
    draw = random.Random(f"danger {seed}")
    kind, speed = draw.choice(KINDS), draw.uniform(3.0, 30.0)
    small = kind == "steps_out" or (kind == "standing" and draw.random() < 0.3)
    speed = min(speed, _SMALL_M_S if small else _FAR_M_S if kind in _WIDE else 30.0)
    stop_m = speed * (REACTION_S + 0.3) + speed**2 / (2 * DECELERATION)
    side, known_s = draw.choice((-1.0, 1.0)), 0.0
    if kind == "standing":
        size = (0.5, 0.5) if small else draw.choice(((4.5, 1.9), (0.3, 6.0), (12.0, 2.5)))
        other = Other(_FRONT_M + stop_m * draw.uniform(1.0, 2.0) + 6.5, draw.uniform(-1.0, 1.0), 0.0, *size)
    elif kind == "slower":
        other = Other(
            _FRONT_M + stop_m + draw.uniform(5.0, 30.0),
            draw.uniform(-0.8, 0.8),
            speed * draw.uniform(0.1, 0.8),
        )
    elif kind == "brakes":
        other = Other(_FRONT_M + speed * draw.uniform(1.0, 2.0) + 2.25, 0.0, speed)
        known_s, braking = draw.uniform(0.5, 3.0), draw.uniform(2.0, 6.0)
        other.plan = _from(known_s, -braking)
        known_s += _SEEN_S
    elif kind == "cut_in":
        slower, across, at_s = (
            speed * draw.uniform(0.3, 0.9),
            draw.uniform(0.8, 1.8),
            draw.uniform(0.5, 2.0),
        )
        enters_s = at_s + (LANE_M - 0.95 - _CORRIDOR_M) / across
        spare_m = draw.uniform(0.0, 10.0)
        closing = speed - slower
        at_m = closing * (enters_s + REACTION_S + _TWICE_S) + closing**2 / (2 * DECELERATION) + spare_m
        shows_s = 3 * _BEAM * (at_m + 10.0) / across  # until three beams hit what is in the way
        other = Other(_FRONT_M + at_m + closing * shows_s + 2.25, side * LANE_M, slower)
        other.across_plan = lambda now_s: -side * across if now_s >= at_s and side * other.d > 0.0 else 0.0
        known_s = enters_s + shows_s + _TWICE_S
    elif kind in {"steps_out", "stops_across"}:
        walks = kind == "steps_out"
        across, size = (
            (draw.uniform(1.0, 2.5), (0.5, 0.5)) if walks else (draw.uniform(3.0, 10.0), (1.9, 4.5))
        )
        begins_m = _CORRIDOR_M + 0.5 * size[1] + draw.uniform(0.5, 2.5)
        at_s = draw.uniform(0.3, 2.0)
        enters_s = at_s + (begins_m - 0.5 * size[1] - _CORRIDOR_M) / across
        until_s = (enters_s if walks else at_s + begins_m / across) + REACTION_S + _SEEN_S
        stop_m = speed * until_s + speed**2 / (2 * DECELERATION)
        other = Other(
            _FRONT_M + stop_m + draw.uniform(0.5, 15.0) + 0.5 * size[0], side * begins_m, 0.0, *size
        )
        other.across_plan = lambda now_s: -side * across if now_s >= at_s and side * other.d > 0.0 else 0.0
        # What crosses is expected to go on so, until it stops.
        known_s = enters_s + _TWICE_S if walks else at_s + begins_m / across + _SEEN_S
    else:
        other = Other(_FRONT_M + stop_m * 2 + 60.0, draw.uniform(-0.5, 0.5), -draw.uniform(2.0, 10.0))
        other.plan = lambda _: 3.0 if other.speed < 0.0 else 0.0  # it brakes, too
    others = [other]
    if kind == "steps_out":
        others += [
            Other(other.s - 3.0 - 6.0 * number, side * draw.uniform(2.4, 3.2), moves=False)
            for number in range(3)
        ]
    return Drive(Road(), speed, others, 25.0, noise_points=draw.randint(0, 4), kind=kind, known_s=known_s)


def is_avoidable(seed: int) -> bool:
    """Whether nothing is hit if the vehicle brakes from where it can be known on, after the reaction time."""
    drive = danger(seed)
    return run(drive, seed, brakes_s=drive.known_s + REACTION_S, watches=False).hit_m_s == 0.0


def _from(at_s: float, acceleration: float) -> Callable[[float], float]:
    return lambda now_s: acceleration if now_s >= at_s else 0.0
