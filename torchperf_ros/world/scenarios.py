"""Eight situations in which driving goes wrong, with the parameters that rules and test protocols publish.

And traffic.

Each seed draws its own parameters within the published ranges. The vehicle starts at the origin of its lane
at the wanted speed; a lane is 3.5 m wide (UN R157's figures use it), `d` counts from its middle to the
left.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.models.closed_loop import Centreline
from torchperf_ros.world.vehicles import LENGTH_M, REAR_M, WIDTH_M, Body

LANE_M: Final = 3.5
_FRONT_M: Final = LENGTH_M - REAR_M
_KMH: Final = 1 / 3.6


# Later ones would begin at a ROS time, see `start_ns`, whose seconds no message holds.
MOST_SEED: Final = 440_000


@dataclass(frozen=True)
class Scenario:
    """One drawn situation.

    Attributes:
        lane: to be kept.
        speed: m/s, at the start and wanted.
        bodies: the other road users and things.
        duration_s: how long it lasts.
        road: to the right and to the left of the lane's middle in m, where driving is allowed.
        overtakes: index of the body that the route leads past, on the left; -1: it keeps to the lane.
        drawn: the parameters, with their units in their names.
    """

    name: str
    seed: int
    lane: Centreline
    speed: float
    bodies: list[Body]
    duration_s: float
    drawn: dict[str, float]
    road: tuple[float, float] = (-1.5 * LANE_M, 1.5 * LANE_M)
    overtakes: int = -1


@dataclass
class _Draw:
    """Numbers of one seed, kept by name."""

    random: random.Random
    drawn: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, low: float, high: float) -> float:
        """One, rounded so that it can be written down; speeds in km/h come as m/s."""
        self.drawn[name] = round(self.random.uniform(low, high), 3)
        return self.drawn[name] * (_KMH if name.endswith("_kmh") else 1.0)

    def side(self) -> float:
        """Left (1) or right (-1)."""
        self.drawn["side"] = self.random.choice((-1.0, 1.0))
        return self.drawn["side"]


_Built = tuple[Centreline, float, list[Body], float]
_LONG: Final = 800.0
_RAIL_M: Final = 8.0  # of a guard rail, one piece


def _straight() -> Centreline:
    return Centreline.of(_LONG)


def _ccrs(draw: _Draw) -> _Built:
    speed = draw("speed_kmh", 10, 80)
    after_s = draw("impact_after_s", 7, 9)
    offset = (1.0 - draw("overlap", 0.5, 1.0)) * WIDTH_M * draw.side()
    return (
        _straight(),
        speed,
        [Body("car", _FRONT_M + speed * after_s + 2.25, offset), _behind(speed)],
        after_s + 5,
    )


def _ccrm(draw: _Draw) -> _Built:
    speed, slow = draw("speed_kmh", 30, 80), draw("target_kmh", 20, 20)
    after_s = draw("impact_after_s", 7, 9)
    at = _FRONT_M + (speed - slow) * after_s + 2.25
    offset = (1.0 - draw("overlap", 0.5, 1.0)) * WIDTH_M * draw.side()
    return _straight(), speed, [Body("car", at, offset, slow), _behind(speed)], after_s + 5


def _ccrb(draw: _Draw) -> _Built:
    speed = draw("speed_kmh", 50, 50)
    lead = Body("car", _FRONT_M + draw("headway_m", 12, 40) + 2.25, 0.0, speed)
    lead.brake_at_s, lead.braking = draw("brake_after_s", 1, 5), draw("braking_ms2", 2, 6)
    return _straight(), speed, [lead, _behind(speed)], 13.0


def _cut_in(draw: _Draw) -> _Built:
    speed, closing = draw("speed_kmh", 60, 110), draw("closing_kmh", 10, 50)
    move_at_s, move_speed = draw("move_after_s", 3, 6), draw("move_ms", 0.8, 1.8)
    # UN R157, 5.2.5.2: has to be avoided if this is left when it is 0.3 m inside the lane
    ttc_s = closing / (2.0 * 6.0) + 0.35 + draw("spare_ttc_s", 0.2, 1.5)
    intrusion_s = (LANE_M - WIDTH_M / 2 - LANE_M / 2 + 0.3) / move_speed
    at = _FRONT_M + closing * (ttc_s + intrusion_s + move_at_s) + 2.25
    side = draw.side()
    cutter = Body("car", at, side * LANE_M, speed - closing, move_at_s=move_at_s, move_speed=move_speed)
    beside = Body("car", at + 40.0, side * LANE_M, speed - closing, wanted=speed)
    return _straight(), speed, [cutter, beside, _behind(speed)], move_at_s + 8.0


def _cut_out(draw: _Draw) -> _Built:
    speed = draw("speed_kmh", 40, 80)
    gap = speed * draw("time_gap_s", 1.6, 2.2)
    after_s, left_s = draw("move_after_s", 3, 6), draw("lead_ttc_s", 2.0, 3.0)
    lead = Body("car", _FRONT_M + gap + 2.25, 0.0, speed, move_at_s=after_s, move_speed=1.8)
    lead.move_to_m = draw.side() * LANE_M
    stopped = Body("car", lead.s + 4.5 + speed * (after_s + left_s), 0.0)
    return _straight(), speed, [lead, stopped, _behind(speed)], after_s + left_s + 7.0


def _crossing(draw: _Draw) -> _Built:
    speed, target = draw("speed_kmh", 20, 60), draw("target_kmh", 20, 60)
    after_s, side = draw("impact_after_s", 6, 9), draw.side()
    body = Body(
        "car", _FRONT_M + speed * after_s + 0.95, side * target * after_s, turned=-side * math.pi / 2
    )
    body.across = -side * target
    return _straight(), speed, [body, _behind(speed)], after_s + 4.0


def _pedestrian(draw: _Draw) -> _Built:
    speed, walk = draw("speed_kmh", 10, 50), 5.0 * _KMH
    after_s = draw("impact_after_s", 6, 9)
    at = _FRONT_M + speed * after_s + 0.25
    near_m = -(
        WIDTH_M / 2 + 1.0
    )  # the near sides of the cars that hide the child, 1 m beside the vehicle's
    child = Body("pedestrian", at, -walk * after_s, across=walk, length=0.5, width=0.5)
    hiding = [Body("car", at - 1.25 - 2.25 - 5.5 * number, near_m - 0.95) for number in range(2)]
    return _straight(), speed, [child, *hiding], after_s + 4.0


def _tailback(draw: _Draw) -> _Built:
    radius = draw("radius_m", 150, 400)
    speed = min(math.sqrt(draw("lateral_ms2", 1.5, 2.3) * radius), 100 * _KMH)
    begin, turn = speed * draw("curve_after_s", 2, 4), draw("turn_m", 100, 160)
    tail = begin + turn + draw("tail_m", -20, 30)
    lane = Centreline.of(_LONG, begin, radius, turn)
    queue = [Body("car", tail + 7.0 * number, 0.0) for number in range(3)]
    walls = [
        Body("wall", begin + 8.0 * number, 6.0, length=8.5, width=0.5)
        for number in range(int(turn / 8.0) + 1)
    ]
    return lane, speed, [*queue, *walls], tail / speed + 6.0


def _slows(draw: _Draw, speed: float) -> Body:
    """A car ahead at an ordinary distance, which slows down as drivers do, and goes on more slowly."""
    lead = Body("car", _FRONT_M + speed * draw("headway_s", 1.2, 2.0) + 2.25, 0.0, speed)
    lead.brake_at_s, lead.braking, share = (
        draw("slows_after_s", 3, 8),
        draw("slows_ms2", 0.5, 2),
        draw("to", 0.5, 0.9),
    )
    lead.slowest = share * speed
    return lead


def _traffic(draw: _Draw) -> _Built:
    speed = draw("speed_kmh", 50, 110)
    bodies = [_slows(draw, speed), _behind(speed)]
    for side in (-1.0, 1.0):
        faster = draw(f"side_{side:+g}_ms", -5, 5)
        at, gap = draw(f"side_{side:+g}_m", -60, 0), draw(f"side_{side:+g}_s", 1.2, 2.5) * speed + 4.5
        bodies += [Body("car", at + gap * number, side * LANE_M, speed + faster) for number in range(6)]
    return _straight(), speed, bodies, 15.0


def _country(draw: _Draw) -> _Built:
    radius = draw("radius_m", 80, 400)
    speed = min(math.sqrt(draw("lateral_ms2", 1.0, 2.0) * radius), 90 * _KMH)
    begin, turn = speed * draw("curve_after_s", 2, 5), draw("turn_m", 60, 200)
    # No car drives a bend with more than 4 m/s^2 to the side.
    towards = min(draw("towards_kmh", 40, 90), math.sqrt(4.0 * (radius - LANE_M)))
    first, apart = draw("first_m", 40, 120), draw("apart_m", 40, 150)
    bodies = [_slows(draw, speed), _behind(speed)]
    bodies += [_towards(first + apart * number, towards) for number in range(5)]
    rail = begin - 40.0, int((turn + 120.0) / _RAIL_M)
    right, left = -0.5 * LANE_M - draw("right_m", 1.0, 2.0), 1.5 * LANE_M + draw("left_m", 1.0, 2.0)
    bodies += [
        Body("wall", rail[0] + _RAIL_M * number, beside, length=1.03 * _RAIL_M, width=0.3)
        for beside in (right, left)
        for number in range(rail[1])
    ]
    return Centreline.of(_LONG, begin, radius, turn), speed, bodies, 15.0


def _overtake(draw: _Draw) -> _Built:
    speed, slow = draw("speed_kmh", 60, 90), draw("slow_kmh", 30, 50)
    towards = draw("towards_kmh", 40, 90)
    bodies = [Body("car", _FRONT_M + draw("ahead_m", 35, 55), 0.0, slow), _behind(speed)]
    met_s = 0.0  # when, at the speed of the slower car, we meet them
    for number in range(3):
        met_s += draw(f"met_{number}_s", 1.5, 4.0)
        bodies.append(_towards((slow + towards) * met_s, towards))
    return _straight(), speed, bodies, 28.0


def _towards(at_m: float, speed: float) -> Body:
    """A car that comes towards us in the lane on the left."""
    return Body("car", at_m, LANE_M, -speed, turned=math.pi)


def _behind(speed: float) -> Body:
    return Body("car", -REAR_M - 1.8 * speed - 2.25, 0.0, speed, wanted=speed)


_BUILDERS: dict[str, tuple[Callable[[_Draw], _Built], str, str]] = {
    "ccrs": (_ccrs, "a stationary car ahead", "Euro NCAP AEB Car-to-Car 2023, CCRs: 10 to 80 km/h, overlap from 50 %"),
    "ccrm": (_ccrm, "a slower car ahead", "Euro NCAP AEB Car-to-Car 2023, CCRm: 30 to 80 km/h, target 20 km/h"),
    "ccrb": (_ccrb, "the car ahead brakes",
             "Euro NCAP AEB Car-to-Car 2023, CCRb: 50 km/h both, 12 or 40 m, 2 or 6 m/s^2; here also between"),
    "cut_in": (_cut_in, "a slower car cuts in",
               "UN R157 5.2.5.2: time to collision at 0.3 m of intrusion above v_rel / (2 * 6 m/s^2) + 0.35 s"),
    "cut_out": (_cut_out, "the car ahead changes lanes before a stopped one",
                "UN R157 annex 5, 4.5: a lead vehicle that leaves the lane"),
    "crossing": (_crossing, "a car crosses at an intersection",
                 "Euro NCAP Frontal Collisions 2026, CCCscp: both 20 to 60 km/h; here to its side's middle"),
    "pedestrian": (_pedestrian, "a child runs out from behind parked cars",
                   "Euro NCAP AEB VRU 2023, CPNCO-50: 10 to 60 km/h (here to 50), child 5 km/h, cars 1 m beside"),
    "tailback": (_tailback, "stopped cars after a curve with a wall inside",
                 "radii of ISO 15622's curve classes (125 to 500 m), lateral acceleration below ISO 11270's 3 m/s^2"),
}  # fmt: skip

# Those in which driving goes wrong.
SCENARIOS: Final = tuple(_BUILDERS)

_BUILDERS |= {
    "traffic": (
        _traffic,
        "three lanes of traffic, and the car ahead slows down",
        "ours: headways of 1.2 to 2 s",
    ),
    "country": (
        _country,
        "a bend between guard rails, cars come towards us, the car ahead slows down",
        "ours: radii of 80 to 400 m, at most 2 m/s^2 to the side, and 4 of those cars",
    ),
    "overtake": (_overtake, "a slower car to overtake, and cars that come towards us", "ours"),
}
# Ordinary ones, in which nothing is to be an emergency.
TRAFFIC: Final = tuple(name for name in _BUILDERS if name not in SCENARIOS)


def describe(name: str) -> tuple[str, str]:
    """What happens in a scenario, and where its parameters come from.

    Raises:
        ConfigError: there is no such scenario.
    """
    _, what, source = _builder(name)
    return what, source


def draw_scenario(name: str, seed: int) -> Scenario:
    """The scenario with the parameters that this seed draws.

    Raises `ConfigError` where there is no such scenario.
    """
    builder, *_ = _builder(name)
    draw = _Draw(random.Random(f"{name} {seed}"))
    lane, speed, bodies, duration_s = builder(draw)
    overtakes = 0 if builder is _overtake else -1
    return Scenario(name, seed, lane, speed, bodies, duration_s, draw.drawn, overtakes=overtakes)


def _builder(name: str) -> tuple[Callable[[_Draw], _Built], str, str]:
    if name not in _BUILDERS:
        raise ConfigError(f"scenario {name!r} is not there; it has to be one of: {', '.join(_BUILDERS)}")
    return _BUILDERS[name]
