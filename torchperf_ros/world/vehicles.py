"""What moves in the closed loop.

The vehicle that follows published plans, and the others, which follow a script.

Kinematic, 100 steps a second. The vehicle is a bicycle model (Rajamani, "Vehicle Dynamics and Control",
2.2) whose controller tracks the newest path's stamped poses; what it orders takes effect `DELAY_S` later.
Others move along and across the lane. Boxes that overlap have collided.
"""

import bisect
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.models.closed_loop import Centreline, Floats, idm
from torchperf_ros.safety.stop_output import TimedPath

DT_S: Final = 0.01
# From an order to its effect; as `actuation_delay_ms` of the guard.
DELAY_S: Final = 0.15
# Of the vehicle; its reference point is the rear axle, 1 m before its rear bumper.
LENGTH_M, WIDTH_M, REAR_M, WHEELBASE_M = 4.5, 1.9, 1.0, 2.7
# m/s^2; what tyres give on a dry road.
MOST_BRAKING: Final = 9.0
# m/s^2, once the newest path has ended: what Autoware's emergency stop operator brakes with by
# default.
NO_PLAN_BRAKING: Final = 2.5

_MOST_ACCELERATION: Final = 3.0
_STEER, _STEER_RATE = 0.5, 0.6  # rad, rad/s
_SPEED_GAIN, _PLACE_GAIN = 2.0, 1.0  # 1/s, 1/s^2
_EVERY: Final = 2  # steps of the world from one order of the controller to the next
_STANDING: Final = 0.05  # m/s


@dataclass
class Body:
    """Somebody or something else.

    Attributes:
        kind: `car`, `pedestrian` or `wall`; a wall hides what is behind it, and is no object.
        s, d: of its middle along the lane, and to the left of it, in m.
        speed, across: m/s along the lane and to the left.
        length, width: m; `turned`: rad from the lane's direction.
        brake_at_s, braking: when it begins to brake, and how hard in m/s^2; `slowest`: down to how many
        m/s. move_at_s, move_to_m, move_speed: when it begins to move to another `d`, and how fast in m/s.
        wanted: m/s; above 0 it follows whoever is ahead of it by the Intelligent Driver Model.
    """

    kind: str
    s: float
    d: float
    speed: float = 0.0
    across: float = 0.0
    length: float = 4.5
    width: float = 1.9
    turned: float = 0.0
    brake_at_s: float = math.inf
    braking: float = 0.0
    slowest: float = 0.0
    move_at_s: float = math.inf
    move_to_m: float = 0.0
    move_speed: float = 0.0
    wanted: float = 0.0

    def step(self, now_s: float, ahead: tuple[float, float] | None) -> None:
        """Move on by `DT_S`.

        `ahead` has the gap in m to whoever is ahead of it in its lane, and how fast they are.
        """
        acceleration = 0.0
        if now_s >= self.brake_at_s:
            acceleration = -self.braking if self.speed > self.slowest else 0.0
        elif self.wanted:
            acceleration = idm(self.speed, self.wanted, *(ahead or (math.inf, 0.0)))
        before = self.speed
        if acceleration:
            self.speed = max(0.0, self.speed + acceleration * DT_S)
        if now_s >= self.move_at_s:
            left = self.move_to_m - self.d
            self.across = math.copysign(min(self.move_speed, abs(left) / DT_S), left)
        self.s += 0.5 * (before + self.speed) * DT_S
        self.d += self.across * DT_S


@dataclass
class Vehicle:
    """The vehicle that the stages drive.

    Attributes:
        x, y, yaw: of its reference point, in m and rad.
        speed, acceleration, steer: m/s, m/s^2, rad at the front wheels.
        refused: plans that nothing can follow (not finite, fewer than two poses, stamps that do not
            increase).
    """

    x: float = 0.0
    y: float = 0.0
    yaw: float = 0.0
    speed: float = 0.0
    acceleration: float = 0.0
    steer: float = 0.0
    refused: int = 0
    _orders: deque[tuple[float, float]] = field(default_factory=deque)
    _steps: int = 0
    _path: "_Followed" = field(default_factory=lambda: _Followed(np.zeros((2, 2)), np.arange(2.0)))
    _last: tuple[float, float] = (0.0, 0.0)

    @property
    def yaw_rate(self) -> float:
        """rad/s."""
        return self.speed * math.tan(self.steer) / WHEELBASE_M

    @property
    def followed(self) -> Floats:
        return self._path.points

    def take(self, path: bytes, start_ns: int) -> None:
        """Follow this `nav_msgs/msg/Path` from now on; `start_ns` is the ROS time that the world calls 0 s.

        A path that cannot be followed is refused: the one before it stays.
        """
        timed = TimedPath.read(path)
        if timed is None:
            self.refused += 1
            return
        self.follow(timed.points[:, :2], (timed.stamps_ns - start_ns) / NS_PER_S)

    def follow(self, points: Floats, times_s: Floats) -> None:
        self._path = _Followed(points, times_s)

    def step(self, now_s: float) -> None:
        if self._steps % _EVERY == 0:
            self._last = self._order(now_s)
        self._steps += 1
        self._orders.append(self._last)
        if len(self._orders) <= round(DELAY_S / DT_S):
            wanted, steer = 0.0, self.steer
        else:
            wanted, steer = self._orders.popleft()
        self.steer += min(max(steer - self.steer, -_STEER_RATE * DT_S), _STEER_RATE * DT_S)
        before, self.speed = self.speed, max(0.0, self.speed + wanted * DT_S)
        self.acceleration = (self.speed - before) / DT_S
        travelled = 0.5 * (before + self.speed) * DT_S
        turn = travelled * math.tan(self.steer) / WHEELBASE_M
        self.x += travelled * math.cos(self.yaw + 0.5 * turn)
        self.y += travelled * math.sin(self.yaw + 0.5 * turn)
        self.yaw += turn

    def _order(self, now_s: float) -> tuple[float, float]:
        path, then_s = self._path, now_s + DELAY_S
        at = path.place(self.x, self.y)
        speed = max(0.0, self.speed + sum(order[0] for order in self._orders) * DT_S)
        path.has_ended |= then_s > path.times_s[-1]
        if path.has_ended:
            acceleration = -NO_PLAN_BRAKING
        else:
            wanted_at, wanted, acceleration = path.wanted(then_s)
            acceleration += _SPEED_GAIN * (wanted - speed)
            if wanted > _STANDING:
                acceleration += _PLACE_GAIN * (wanted_at - at - 0.5 * (self.speed + speed) * DELAY_S)
            elif speed < 1.0:  # at a standstill it holds the brake, wherever it stands
                acceleration = -MOST_BRAKING
        return min(max(acceleration, -MOST_BRAKING), _MOST_ACCELERATION), self._steering(at)

    def _steering(self, at: float) -> float:
        """Pure pursuit (Coulter, 1992) of the point so far ahead on the path, or straight beyond it."""
        point = self._path.point(at + max(5.0, 0.8 * self.speed))
        if point is None:
            return self.steer
        dx, dy = point[0] - self.x, point[1] - self.y
        alpha = math.atan2(dy, dx) - self.yaw
        steer = math.atan2(2.0 * WHEELBASE_M * math.sin(alpha), max(math.hypot(dx, dy), 1.0))
        return min(max(steer, -_STEER), _STEER)

    @property
    def box(self) -> tuple[float, float, float, float, float]:
        """x, y of its middle, yaw, length, width."""
        ahead = 0.5 * LENGTH_M - REAR_M
        return (
            self.x + ahead * math.cos(self.yaw),
            self.y + ahead * math.sin(self.yaw),
            self.yaw,
            LENGTH_M,
            WIDTH_M,
        )


class _Followed:
    """A path that is followed: its points [n, 2], the times [n] at which they are to be reached.

    One that has ended is over, also where the clock steps back; whoever wants it driven again has to
    publish it again.
    """

    def __init__(self, points: Floats, times_s: Floats) -> None:
        steps = np.diff(points, axis=0)
        lengths = np.hypot(steps[:, 0], steps[:, 1])
        along = np.concatenate(([0.0], np.cumsum(lengths)))
        self.points, self.has_ended = points, False
        self.times_s: list[float] = times_s.tolist()
        self._along: list[float] = along.tolist()
        moving = np.flatnonzero(lengths > 1e-4)  # noqa: PLR2004 - m
        self._lengths, self._begins, self._at = lengths[moving], points[moving], along[moving]
        self._units = steps[moving] / self._lengths[:, None]
        self._least, self._most = np.zeros(len(moving)), self._lengths.copy()
        if len(moving):  # straight on beyond both ends
            self._least[0], self._most[-1] = -np.inf, np.inf

    def place(self, x: float, y: float) -> float:
        """How far along the path the nearest point is; beyond its ends, too."""
        if not len(self._units):
            return 0.0
        away = np.array([x, y]) - self._begins
        along = np.minimum(np.maximum((away * self._units).sum(axis=1), self._least), self._most)
        off = away - along[:, None] * self._units
        nearest = int((off * off).sum(axis=1).argmin())
        return float(self._at[nearest] + along[nearest])

    def point(self, along: float) -> tuple[float, float] | None:
        """The point so far along the path; None of one that stands still."""
        if not len(self._units):
            return None
        index = min(max(int(self._at.searchsorted(along, side="right")) - 1, 0), len(self._at) - 1)
        (x, y), (ux, uy), rest = self._begins[index], self._units[index], along - self._at[index]
        return float(x + rest * ux), float(y + rest * uy)

    def wanted(self, then_s: float) -> tuple[float, float, float]:
        """Place along the path, speed and acceleration that it has at a time.

        Speeds are those of its segments.
        """
        times, along, last = self.times_s, self._along, len(self.times_s) - 1
        i = min(max(bisect.bisect_right(times, then_s) - 1, 0), last - 1)
        span = times[i + 1] - times[i]
        share = (then_s - times[i]) / span
        speed = (along[i + 1] - along[i]) / span
        place = along[i] + share * (along[i + 1] - along[i])
        j = i + 1 if share >= 0.5 else i - 1  # noqa: PLR2004 - the neighbour whose middle is on this side
        if not 0 <= j < last:
            return place, speed, 0.0
        other_span = times[j + 1] - times[j]
        gained = (
            ((along[j + 1] - along[j]) / other_span - speed)
            / (0.5 * (span + other_span))
            * (1 if j > i else -1)
        )
        return place, speed + gained * (share - 0.5) * span, gained


# x, y, yaw, vx, vy, length and width, in the frame of the lane's points.
Box = tuple[float, float, float, float, float, float, float]


def box_of(lane: Centreline, body: Body) -> Box:
    x, y, heading = lane.one_at(body.s, body.d)
    cosine, sine = math.cos(heading), math.sin(heading)
    vx, vy = body.speed * cosine - body.across * sine, body.speed * sine + body.across * cosine
    return x, y, heading + body.turned, vx, vy, body.length, body.width


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether two boxes (x, y, yaw, length, width) overlap, by separating axes (Gottschalk et al., 1996)."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    for one, other in ((a, b), (b, a)):
        cosine, sine = math.cos(one[2]), math.sin(one[2])
        turned = other[2] - one[2]
        c, s = abs(math.cos(turned)), abs(math.sin(turned))
        if abs(dx * cosine + dy * sine) > 0.5 * (one[3] + other[3] * c + other[4] * s):
            return False
        if abs(dy * cosine - dx * sine) > 0.5 * (one[4] + other[3] * s + other[4] * c):
            return False
    return True
