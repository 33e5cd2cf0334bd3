"""Drawn drives of everyday traffic of nine kinds, in none of which the emergency lane has anything to do.

Closer than the mixed traffic of `lane_drives.ordinary`: short headways, stop and go, people beside the road,
cars that cut in or overtake, roundabouts, guard rails in bends, walls on both sides, and rain.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks.traffic.lane_drives import LANE_M, Drive, Other, Road, turn_table
from torchperf_ros.world.vehicles import LENGTH_M, REAR_M

_FRONT_M: Final = LENGTH_M - REAR_M
_HALF_M: Final = 2.25  # of a car's length
_RAIL_M: Final = 4.0  # of a guard rail, one piece


class Course(Road):
    """Pieces of a length and a curvature each, which a transition of so many m leads to."""

    def __init__(self, pieces: Sequence[tuple[float, float]], transition_m: float) -> None:
        super().__init__()
        begin_m, before = 0.0, 0.0
        for length_m, curvature in pieces:
            share = np.clip((self.s - begin_m) / transition_m, 0.0, 1.0)
            self.curvature = np.where(
                self.s >= begin_m, before + (curvature - before) * share, self.curvature
            )
            begin_m, before = begin_m + length_m, curvature
        self.yaw, self.x, self.y = turn_table(self.curvature)


def _lead(speed: float, headway_s: float) -> Other:
    return Other(_FRONT_M + max(speed * headway_s, 3.0) + _HALF_M, 0.0, speed)


def _follow(draw: random.Random) -> Drive:
    """A car ahead at 0.6 to 1.5 s, which brakes by up to 2 m/s^2."""
    speed, headway_s = draw.uniform(15.0, 33.0), draw.uniform(0.6, 1.5)
    lead, by, at_s = _lead(speed, headway_s), draw.uniform(0.0, 2.0), draw.uniform(1.0, 5.0)
    least = draw.uniform(0.5, 0.9) * speed
    lead.plan = lambda now_s: -by if now_s > at_s and lead.speed > least else 0.0
    return Drive(Road(), speed, [lead], 10.0, lead, headway_s, draw.randint(0, 5))


def _city(draw: random.Random) -> Drive:
    """Stop and go at 0.8 s, parked cars on the right, cars that come towards us on the left."""
    speed = draw.uniform(3.0, 9.0)
    lead = Other(_FRONT_M + draw.uniform(2.0, 4.0) + 0.8 * speed + _HALF_M, 0.0, speed)
    phases = [draw.choice((-2.5, -1.5, 0.0, 1.0, 1.5)) for _ in range(10)]
    lead.plan = lambda now_s: min(phases[min(int(now_s / 2.5), 9)], 9.0 - lead.speed)
    beside_m = draw.uniform(2.3, 2.8)
    others = [lead]
    others += [Other(draw.uniform(0.0, 4.0) + 6.5 * one, -beside_m, moves=False) for one in range(12)]
    others += [Other(20.0 * one, 3.2, -draw.uniform(3.0, 9.0)) for one in range(1, 8)]
    return Drive(Road(), speed, others, 15.0, lead, 0.8, draw.randint(0, 5))


def _cuts_in(draw: random.Random) -> Drive:
    """A car that is about as fast, or faster, comes into the lane 0.4 to 1.2 s ahead."""
    speed, side, at_s = draw.uniform(8.0, 30.0), draw.choice((-1.0, 1.0)), draw.uniform(0.5, 3.0)
    across = draw.uniform(0.8, 2.0)
    other = Other(
        _FRONT_M + speed * draw.uniform(0.4, 1.2) + _HALF_M, side * LANE_M, speed + draw.uniform(-1.5, 4.0)
    )
    other.across_plan = lambda now_s: -side * across if now_s >= at_s and side * other.d > 0.0 else 0.0
    return Drive(Road(), speed, [other, _lead(speed, 2.5)], 10.0, other, 0.8, draw.randint(0, 5))


def _people(draw: random.Random) -> Drive:
    """Pedestrians and cyclists along the road, and some who walk up to it and stop."""
    others = []
    for _ in range(12):
        side, to_m, walks = draw.choice((-1.0, 1.0)), draw.uniform(1.6, 1.9), draw.uniform(0.8, 2.0)
        other = Other(
            draw.uniform(5.0, 150.0),
            side * draw.uniform(1.9, 5.0),
            draw.choice((-1.4, 0.0, 1.4, 4.0)),
            0.5,
            0.5,
        )
        if draw.random() < 0.4:
            other.across_plan = _until(other, side, to_m, walks)
        others.append(other)
    return Drive(Road(), draw.uniform(4.0, 16.0), others, 10.0, noise_points=draw.randint(0, 5))


def _until(other: Other, side: float, to_m: float, walks: float) -> Callable[[float], float]:
    return lambda _: -side * walks if side * other.d > to_m else 0.0


def _overtakes(draw: random.Random) -> Drive:
    """Faster cars on both sides, one of which moves over 3 to 12 m ahead of us."""
    speed, side, gap_m = draw.uniform(8.0, 30.0), draw.choice((-1.0, 1.0)), draw.uniform(3.0, 12.0)
    others = [
        Other(-draw.uniform(8.0, 40.0), where * draw.uniform(2.7, 3.5), speed + draw.uniform(2.0, 10.0))
        for where in (side, -side)
    ]
    first = others[0]

    def moves_over(now_s: float) -> float:
        is_past = first.s > speed * now_s + _FRONT_M + gap_m + _HALF_M
        return -side * 1.2 if is_past and side * first.d > 0.0 else 0.0

    first.across_plan = moves_over
    return Drive(Road(), speed, others, 10.0, noise_points=draw.randint(0, 5))


def _roundabout(draw: random.Random) -> Drive:
    """In to the right, 1 to 3 rad round an island with a wall, out to the right, by at most 2.5 m/s^2."""
    radius_m, in_m, at_m = draw.uniform(11.0, 25.0), draw.uniform(15.0, 30.0), draw.uniform(10.0, 25.0)
    speed = math.sqrt(draw.uniform(1.2, 2.5) * radius_m)
    pieces = [
        (at_m, 0.0),
        (draw.uniform(6.0, 12.0), -1 / in_m),
        (radius_m * draw.uniform(1.2, 3.5), 1 / radius_m),
        (draw.uniform(6.0, 12.0), -1 / in_m),
        (100.0, 0.0),
    ]
    beside_m = draw.uniform(2.2, 3.0)
    others = [
        Other(at_m + 10.0 + 3.0 * one, beside_m, 0.0, 3.5, 0.3, moves=False)
        for one in range(int(0.4 * radius_m))
    ]
    lead = _lead(speed, 1.2) if draw.random() < 0.6 else None
    others += [lead] if lead else []
    course = Course(pieces, draw.uniform(6.0, 12.0))
    return Drive(course, speed, others, 12.0, lead, 1.0, draw.randint(0, 5))


def _rails(draw: random.Random) -> Drive:
    """A bend of 20 to 400 m between guard rails, by at most 2.5 m/s^2, entered within 0.7 to 2 s."""
    radius_m = math.exp(draw.uniform(math.log(20.0), math.log(400.0)))
    speed, side = min(30.0, math.sqrt(draw.uniform(0.8, 2.5) * radius_m)), draw.choice((-1.0, 1.0))
    pieces = [(draw.uniform(20.0, 60.0), 0.0), (radius_m * draw.uniform(0.5, 2.5), side / radius_m)]
    course = Course([*pieces, (300.0, side / radius_m)], max(3.0, speed * draw.uniform(0.7, 2.0)))
    rails_m = (-draw.uniform(2.3, 4.0), draw.uniform(2.3, 4.0) + draw.choice((0.0, LANE_M)))
    others = [
        Other(_RAIL_M * one - 20.0, beside_m, 0.0, 1.1 * _RAIL_M, 0.3, moves=False)
        for beside_m in rails_m
        for one in range(int((40.0 + 14.0 * speed) / _RAIL_M))
    ]
    others += [
        Other(40.0 + 45.0 * one, LANE_M, -0.8 * speed) for one in range(5) if rails_m[1] > LANE_M + 1.5
    ]
    lead = _lead(speed, draw.uniform(1.0, 2.0)) if draw.random() < 0.5 else None
    others += [lead] if lead else []
    return Drive(course, speed, others, 12.0, lead, 1.2, draw.randint(0, 5))


def _walls(draw: random.Random) -> Drive:
    """Walls 1.6 to 2.5 m to both sides of the lane's middle."""
    speed = draw.uniform(5.0, 25.0)
    sides_m = (-draw.uniform(1.6, 2.5), draw.uniform(1.6, 2.5))
    others = [
        Other(8.0 * one - 20.0, beside_m, 0.0, 8.5, 0.3, moves=False)
        for beside_m in sides_m
        for one in range(int(4 + 1.5 * speed))
    ]
    return Drive(Road(), speed, others, 10.0, noise_points=5)


def _rain(draw: random.Random) -> Drive:
    """A car ahead at 1.5 s in rain: one beam in twenty may hit a drop."""
    speed = draw.uniform(5.0, 30.0)
    lead = _lead(speed, 1.5)
    return Drive(Road(), speed, [lead], 8.0, lead, rain=0.05)


_BUILDERS: Final[dict[str, Callable[[random.Random], Drive]]] = {
    "follow": _follow,
    "city": _city,
    "cuts_in": _cuts_in,
    "people": _people,
    "overtakes": _overtakes,
    "walls": _walls,
    "rain": _rain,
    "roundabout": _roundabout,
    "rails": _rails,
}
EVERYDAY: Final = tuple(_BUILDERS)
STEERED: Final = ("roundabout", "rails")
"""Those in which the lane cannot know that the vehicle is about to steer: it follows the present arc."""


def everyday(kind: str, seed: int) -> Drive:
    """A drive of a kind of `EVERYDAY`."""
    return _BUILDERS[kind](random.Random(f"{kind} {seed}"))
