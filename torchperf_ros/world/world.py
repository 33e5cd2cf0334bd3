"""The world that a scenario puts around the vehicle.

It moves on by itself, plans move the vehicle in it; a score.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.models.closed_loop import Floats
from torchperf_ros.world.scenarios import LANE_M, Scenario
from torchperf_ros.world.vehicles import DT_S, LENGTH_M, REAR_M, WIDTH_M, Vehicle, box_of, overlap

_EPOCH_NS: Final = 1_700_000_000 * NS_PER_S
_APART_NS: Final = 1_000 * NS_PER_S
# m/s; a vehicle that is slower when it is touched has not caused that.
STANDING: Final = 0.5
# Somebody at such an angle from straight ahead or more is behind, as in nuPlan.
_BEHIND: Final = math.cos(math.radians(150.0))
_CLEAR_M: Final = 12.0  # ahead of whom we have overtaken, before the route leads back
_NEAR_S: Final = 2.5  # behind whom we overtake, when the route leads out
_SPARE_S, _LEAST_GAIN = 5.0, 2.0  # to gain speed and to return, in s; m/s
_FIRST_PLAN_S: Final = 3.0
_TTC_EVERY: Final = 10
_TTC_HORIZON_S: Final = 3.0
_LEADS_EVERY: Final = 5
_JERK_STEPS: Final = 51  # half a second
_TRACE_EVERY: Final = 5
# nuPlan's bounds of comfort, which NAVSIM uses: braking, acceleration, lateral acceleration m/s^2, jerk
# m/s^3
_BRAKING, _ACCELERATION, _LATERAL, _JERK = 4.05, 2.40, 4.89, 4.13


def start_ns(seed: int) -> int:
    """ROS time at which the drives of a seed begin.

    No two seeds share a stamp, by which faults are drawn.
    """
    return _EPOCH_NS + seed * _APART_NS


class Moment(NamedTuple):
    """Where everybody is.

    Time in s, the vehicle's x, y, yaw and speed, the others' boxes [n, 7], TTC in s.
    """

    at_s: float
    vehicle: tuple[float, float, float, float]
    boxes: Floats
    ttc_s: float


@dataclass
class SoFar:
    """What happened to the vehicle so far.

    Attributes:
        hit: what it ran into, and is to blame for; "" while there is nothing.
        impact_ms: relative speed then in m/s.
        touched: contacts that others are to blame for: the vehicle stood, or was hit behind its middle.
        min_ttc_s: the least time to collision, up to 3 s ahead at constant velocities; inf: never any.
        left_road: whether its middle came within half its width of the road's edge, or beyond.
        hardest, quickest, jerk, lateral: most braking, acceleration, jerk (mean over 0.5 s), lateral
        acceleration, SI.
    """

    hit: str = ""
    impact_ms: float = 0.0
    touched: set[int] = field(default_factory=set)
    min_ttc_s: float = math.inf
    left_road: bool = False
    hardest: float = 0.0
    quickest: float = 0.0
    jerk: float = 0.0
    lateral: float = 0.0


class World:
    """One scenario while it runs.

    The vehicle is to blame for a contact if it moves and the other's middle is ahead of its own; or, while
    it is not wholly in one lane, also where it is beside. This is the rule of nuPlan and NAVSIM.

    Attributes:
        vehicle, bodies: the vehicle, and the scenario's own bodies, which move.
        seen: what happened.
        start_ns: ROS time of 0 s.
        ttc_s: time to collision at this moment in s, up to 3; inf: none is coming.
        trace: 20 moments a second.
    """

    def __init__(self, scenario: Scenario) -> None:
        """Begin at 0 s, with a plan to keep lane and speed for 3 s."""
        self.scenario, self.seen, self.trace = scenario, SoFar(), list[Moment]()
        self.start_ns = start_ns(scenario.seed)
        self.bodies = scenario.bodies
        self.vehicle = Vehicle(speed=scenario.speed)
        times = np.arange(0.0, _FIRST_PLAN_S + 0.1, 0.1)
        self.vehicle.follow(scenario.lane.at(times * scenario.speed)[:, :2], times)
        self._steps = 0
        self._leads: list[tuple[float, float] | None] = [None] * len(self.bodies)
        self._accelerations = deque([0.0] * _JERK_STEPS, _JERK_STEPS)
        self._boxes = [box_of(scenario.lane, body) for body in self.bodies]
        self.ttc_s = math.inf
        self._beside = self._passed = False  # of whom the route leads past

    @property
    def boxes(self) -> Floats:
        """x, y, yaw, vx, vy, length and width of every body, [n, 7]."""
        return np.array(self._boxes, dtype=np.float64).reshape(-1, 7)

    @property
    def now_s(self) -> float:
        return self._steps * DT_S

    @property
    def over(self) -> bool:
        """Whether the scenario has ended, or the vehicle has hit something."""
        return bool(self.seen.hit) or self.now_s >= self.scenario.duration_s - 1e-9

    @property
    def progress_m(self) -> float:
        """How far along the lane the vehicle is."""
        return self._placed()[0]

    def take(self, path: bytes) -> None:
        """Have the vehicle follow a `nav_msgs/msg/Path` from now on."""
        self.vehicle.take(path, self.start_ns)

    def advance(self, to_ns: int) -> None:
        """Move on to a ROS time, in whole steps of 10 ms; nothing moves once it is over."""
        while not self.over and self.start_ns + round((self.now_s + DT_S) * NS_PER_S) <= to_ns:
            self._step()

    def _placed(self) -> tuple[float, float, float]:
        place = self.scenario.lane.place(np.array([[self.vehicle.x, self.vehicle.y]]))[0]
        return float(place[0]), float(place[1]), float(place[2])

    def _step(self) -> None:
        if self._steps % _LEADS_EVERY == 0:
            self._look_ahead()
        now_s, vehicle = self.now_s, self.vehicle
        vehicle.step(now_s)
        for number, body in enumerate(self.bodies):
            if body.kind != "wall":
                body.step(now_s, self._leads[number])
                self._boxes[number] = box_of(self.scenario.lane, body)
        self._steps += 1
        self._feel()
        self._touch()
        if self._steps % _TTC_EVERY == 0:
            self.ttc_s = self._time_to_collision()
            self.seen.min_ttc_s = min(self.seen.min_ttc_s, self.ttc_s)
        if self._steps % _TRACE_EVERY == 0 or self.over:
            where = (vehicle.x, vehicle.y, vehicle.yaw, vehicle.speed)
            self.trace.append(Moment(self.now_s, where, self.boxes, self.ttc_s))

    def _feel(self) -> None:
        vehicle, seen = self.vehicle, self.seen
        seen.hardest, seen.quickest = (
            max(seen.hardest, -vehicle.acceleration),
            max(seen.quickest, vehicle.acceleration),
        )
        seen.lateral = max(seen.lateral, abs(vehicle.speed * vehicle.yaw_rate))
        self._accelerations.append(vehicle.acceleration)
        if vehicle.speed > STANDING:  # that acceleration ends at a standstill is no jerk of the plan's
            seen.jerk = max(
                seen.jerk,
                abs(self._accelerations[-1] - self._accelerations[0]) / ((_JERK_STEPS - 1) * DT_S),
            )

    def _touch(self) -> None:
        vehicle, box = self.vehicle, self.vehicle.box
        for index, (x, y, yaw, vx, vy, length, width) in enumerate(self._boxes):
            if abs(x - box[0]) + abs(y - box[1]) > 2.0 * (LENGTH_M + length):
                continue
            if index in self.seen.touched or not overlap(box, (x, y, yaw, length, width)):
                continue
            ahead = (x - box[0]) * math.cos(vehicle.yaw) + (y - box[1]) * math.sin(vehicle.yaw)
            apart = math.hypot(x - box[0], y - box[1])
            beside = ahead > _BEHIND * apart and self._is_between_lanes()
            if vehicle.speed > STANDING and (ahead > 0.0 or beside):
                self.seen.hit = self.seen.hit or self.bodies[index].kind
                own = vehicle.speed * math.cos(vehicle.yaw), vehicle.speed * math.sin(vehicle.yaw)
                self.seen.impact_ms = math.hypot(own[0] - vx, own[1] - vy)
            else:
                self.seen.touched.add(index)

    def _is_between_lanes(self) -> bool:
        off = (self._placed()[1] + 0.5 * LANE_M) % LANE_M - 0.5 * LANE_M
        return abs(off) > 0.5 * (LANE_M - WIDTH_M)

    def route(self, *, hasty: bool = False) -> float:
        """How far to the left of the scenario's lane the route leads by now, in m.

        Into the next lane, and back.

        It leads past a slower car once that is near, and only while no car comes towards us, unless it is
        `hasty`.
        """
        if self.scenario.overtakes < 0 or self._passed:
            return 0.0
        s, vehicle, slower = self._placed()[0], self.vehicle, self.bodies[self.scenario.overtakes]
        if self._beside:
            self._passed = s - REAR_M > slower.s + 0.5 * slower.length + _CLEAR_M
            return 0.0 if self._passed else LANE_M
        gap = slower.s - 0.5 * slower.length - s - (LENGTH_M - REAR_M)
        gained = max(self.scenario.speed - slower.speed, _LEAST_GAIN)
        needed_s = _SPARE_S + (max(gap, 0.0) + LENGTH_M + slower.length + _CLEAR_M) / gained
        towards = [body.s - s for body in self.bodies if body.speed < 0.0 and body.s + LENGTH_M > s]
        fastest = self.scenario.speed - min((body.speed for body in self.bodies), default=0.0)
        free = hasty or min(towards, default=math.inf) > needed_s * fastest
        self._beside = free and gap < _NEAR_S * vehicle.speed + LENGTH_M
        return LANE_M if self._beside else 0.0

    def _along(self) -> Floats:
        """s, d, their speeds, half extents along and across the lane of every body, [n, 6]."""
        return np.array(
            [
                (
                    b.s,
                    b.d,
                    b.speed,
                    b.across,
                    0.5 * (b.length * abs(math.cos(b.turned)) + b.width * abs(math.sin(b.turned))),
                    0.5 * (b.length * abs(math.sin(b.turned)) + b.width * abs(math.cos(b.turned))),
                )
                for b in self.bodies
            ]
        ).reshape(-1, 6)

    def _time_to_collision(self) -> float:
        """Along the lane, at constant velocities; walls and what is behind do not count."""
        s, d, heading = self._placed()
        low, high = self.scenario.road
        if not low < d - WIDTH_M / 2 or not d + WIDTH_M / 2 < high:
            self.seen.left_road = True
        vehicle, rows = self.vehicle, self._along()
        counts = np.array([body.kind != "wall" for body in self.bodies], dtype=bool) & (rows[:, 0] > s)
        if vehicle.speed < STANDING or not counts.any():
            return math.inf
        rows, turn = rows[counts], vehicle.yaw - heading
        times = np.arange(0.0, _TTC_HORIZON_S + 0.05, 0.1)
        middle = s + (0.5 * LENGTH_M - REAR_M)
        apart = (rows[:, 0] - middle)[:, None] + (rows[:, 2] - vehicle.speed * math.cos(turn))[
            :, None
        ] * times
        beside = (rows[:, 1] - d)[:, None] + (rows[:, 3] - vehicle.speed * math.sin(turn))[:, None] * times
        met = (np.abs(apart) < rows[:, 4:5] + LENGTH_M / 2) & (np.abs(beside) < rows[:, 5:6] + WIDTH_M / 2)
        return float(times[met.any(axis=0)].min(initial=math.inf))

    def _look_ahead(self) -> None:
        """Find whom traffic follows: the nearest ahead in the same lane, the vehicle among them."""
        followers = [(number, body) for number, body in enumerate(self.bodies) if body.wanted]
        if not followers:
            return
        s, d, _ = self._placed()
        others = [(s + 0.5 * LENGTH_M - REAR_M, d, self.vehicle.speed, LENGTH_M)]
        others += [(b.s, b.d, b.speed, b.length) for b in self.bodies if b.kind != "wall"]
        for number, body in followers:
            gaps = [
                (at - body.s - 0.5 * (length + body.length), speed)
                for at, beside, speed, length in others
                if at > body.s and abs(beside - body.d) < LANE_M / 2
            ]
            self._leads[number] = min(gaps, default=None)


@dataclass(frozen=True)
class Score:
    """Figures of one drive.

    Attributes:
        collision: the vehicle hit something, and is to blame for it.
        impact_ms: relative speed then in m/s; 0 without a collision.
        min_ttc_s: the least time to collision in s, at most 3.
        progress_m: along the lane, up to the end or the collision.
        comfortable: within nuPlan's bounds.
        hardest: braking in m/s^2; `jerk`: m/s^3.
        left_road: it left the road.
        end_speed: speed in m/s at the end.
    """

    collision: bool
    impact_ms: float
    min_ttc_s: float
    progress_m: float
    comfortable: bool
    hardest: float
    jerk: float
    left_road: bool
    end_speed: float


def score_of(world: World) -> Score:
    seen = world.seen
    comfortable = (
        seen.hardest <= _BRAKING
        and seen.quickest <= _ACCELERATION
        and seen.lateral <= _LATERAL
        and seen.jerk <= _JERK
    )
    return Score(
        bool(seen.hit),
        round(seen.impact_ms, 3),
        min(round(seen.min_ttc_s, 2), 3.0) if not seen.hit else 0.0,
        round(world.progress_m, 2),
        comfortable,
        round(seen.hardest, 2),
        round(seen.jerk, 2),
        seen.left_road,
        round(world.vehicle.speed, 3),
    )
