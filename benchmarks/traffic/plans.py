"""Plans and traffic, drawn by a seed, and what really happens.

Footprints step by step, none of the guard's sums.

A road bends as drawn, and everything drives along it: we along our manoeuvre, the others at a constant
speed in their lane, ours or the next one. The guard sees a plan of the next seconds, exact odometry and
exact boxes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, plan_bytes
from torchperf_ros.api.outcome import GuardVerdict
from torchperf_ros.safety.guard import Guard
from torchperf_ros.safety.limits import Track
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.safety_options import guard_options

LANE_M = 3.5
LENGTH, WIDTH, REAR = 4.5, 1.9, 1.0
BRAKE, DELAY_S, AGE_MS = 8.0, 0.15, 60.0  # hardest braking, until it acts, and the age of a plan's frame
HELD = 4.0  # m/s^2 to the side; nobody drives a bend faster
TURNS = 2.0  # rad in one bend, at most; roads do not come back to where they were
AFTER_S = 9.0  # that is looked at, beyond any plan
STEP_S = 0.02
IN_LANE_M = (
    0.75  # from the middle of our lane, which is 3.5 m wide: 0.5 m, and what the vehicle drives off it
)
ENDED_S = 20.0  # of a drive whose planner ends
KEPT_S = 1.5  # that a vehicle has kept its lane before it changes
MOVES = 0.1  # m/s; slower, the vehicle stands
ROLLS = 1.5  # m/s; slower, a vehicle whose planner ends stays where it is
STAGE_BRAKES = 3.0  # m/s^2 of a stage's stop, as it is by default
RETURN_BRAKE = 5.0  # m/s^2 of a way back that could be driven
CLEAR_S, CLEAR_M, BEHIND_S = 2.0, 0.5, 1.0
"""Of a clear plan.

What comes towards us passes 2 s after we have left its way, everything else is 0.5 m off, and what drives
in the lane that we change into is 1 s behind us, by the faster one's speed.
"""


class Road:
    """A centre line from s = 0 in the direction of x, straight or with bends.

    `bends` are pairs of s and 1/m.
    """

    def __init__(self, bends: tuple[tuple[float, float], ...] = ()) -> None:
        self.s = np.arange(-400.0, 900.0, 0.5)
        knots = bends or ((0.0, 0.0),)
        self.bends = np.interp(self.s, [s for s, _ in knots], [bend for _, bend in knots])
        turned = np.concatenate(([0.0], np.cumsum(0.5 * (self.bends[1:] + self.bends[:-1]) * 0.5)))
        self.heading = turned - np.interp(0.0, self.s, turned)
        steps = 0.5 * np.exp(0.5j * (self.heading[1:] + self.heading[:-1]))
        self.place = np.concatenate(([0.0], np.cumsum(steps)))
        self.place -= np.interp(0.0, self.s, self.place)

    def held(self, speed: float) -> float:
        """A speed, or the greatest at which its sharpest bend is driven."""
        sharpest = float(np.abs(self.bends).max())
        return min(speed, math.sqrt(HELD / sharpest)) if sharpest else speed

    def at(self, s: np.ndarray, left: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Places x + iy, `left` of the centre line, and its heading there."""
        heading = np.interp(s, self.s, self.heading)
        return np.interp(s, self.s, self.place) + 1j * left * np.exp(1j * heading), heading


@dataclass(frozen=True)
class Car:
    """What else is there: along the road at constant speed, negative against us."""

    s: float
    left: float
    speed: float
    length: float = 4.5
    width: float = 1.9

    def after(self, road: Road, times_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places of its middle and headings."""
        place, heading = road.at(self.s + self.speed * times_s, self.left)
        return place, heading + (math.pi if self.speed < 0 else 0.0)


@dataclass(frozen=True)
class Scene:
    """A manoeuvre.

    From `left` of our lane's middle, `changes` of so many m to the left from s on, over so many m.
    """

    kind: str
    road: Road
    speed: float
    acceleration: float = 0.0
    left: float = 0.0
    changes: tuple[tuple[float, float, float], ...] = ()
    cars: tuple[Car, ...] = ()
    horizon_s: float = 3.0

    def lefts(self, s: np.ndarray) -> np.ndarray:
        """How far to the left of our lane's middle we drive at each s."""
        left = np.full_like(s, self.left)
        for by_m, from_s, over_m in self.changes:
            share = np.clip((s - from_s) / over_m, 0.0, 1.0)
            left = left + by_m * share**3 * (10 - 15 * share + 6 * share**2)
        return left

    def ways(self, times_s: np.ndarray) -> np.ndarray:
        """How far along the road we are at each time, if all goes as planned."""
        gains = np.minimum(times_s, self.horizon_s)
        return self.speed * times_s + self.acceleration * gains * (times_s - 0.5 * gains)

    def poses(self, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places of our reference point, and headings."""
        left = self.lefts(s)
        place, heading = self.road.at(s, left)
        slope = (self.lefts(s + 0.05) - self.lefts(s - 0.05)) / 0.1
        return place, heading + np.arctan2(slope, 1.0 - np.interp(s, self.road.s, self.road.bends) * left)


def corners(
    place: np.ndarray, yaw: np.ndarray, length: float, width: float, offset: float = 0.0
) -> np.ndarray:
    """Of rectangles, whose middle is `offset` ahead of these places; shape [n, 4]."""
    outline = offset + 0.5 * length * np.array([1, 1, -1, -1]) + 0.5j * width * np.array([1, -1, -1, 1])
    return place[:, None] + outline * np.exp(1j * yaw)[:, None]


def apart_m(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The largest gap between two rectangles' shadows on the directions of their sides.

    Negative: they overlap.
    """
    gaps = []
    for outline in (own, other):
        for side in (outline[:, 0] - outline[:, 3], outline[:, 0] - outline[:, 1]):
            turn = (side / np.abs(side)).conj()[:, None]
            a, b = (own * turn).real, (other * turn).real
            gaps += [b.min(axis=1) - a.max(axis=1), a.min(axis=1) - b.max(axis=1)]
    return np.max(gaps, axis=0)


def nearest_m(scene: Scene, s: np.ndarray, times_s: np.ndarray, car: Car) -> np.ndarray:
    """How far a car is from us at each time, if we are at `s` then."""
    place, yaw = scene.poses(s)
    own = corners(place, yaw, LENGTH, WIDTH, 0.5 * LENGTH - REAR)
    return apart_m(own, corners(*car.after(scene.road, times_s), car.length, car.width))


def braked(scene: Scene, times_s: np.ndarray) -> np.ndarray:
    """How far along the road we are if we brake now."""
    acts_s = np.maximum(times_s - DELAY_S, 0.0)
    stops_s = np.minimum(acts_s, scene.speed / BRAKE)
    return scene.speed * np.minimum(times_s, DELAY_S) + scene.speed * stops_s - 0.5 * BRAKE * stops_s**2


def contact_s(scene: Scene, until_s: float) -> float:
    """When the plan first touches anything; NaN: not until then."""
    times_s = np.arange(0.0, until_s, STEP_S)
    touches = np.zeros(len(times_s), bool)
    for car in scene.cars:
        touches |= nearest_m(scene, scene.ways(times_s), times_s, car) < 0
    return float(times_s[touches.argmax()]) if touches.any() else math.nan


def spared_m(scene: Scene) -> float:
    """How far everything stays from us if we brake now, along the same way; at most 0: something touches us."""
    times_s = np.arange(0.0, AFTER_S, STEP_S)
    ways = braked(scene, times_s)
    return min(float(nearest_m(scene, ways, times_s, car).min()) for car in scene.cars)


def is_clear(scene: Scene) -> bool:
    """Whether the whole manoeuvre is clear of everything, with the margins above.

    RSS distances to what is ahead.
    """
    times_s = np.arange(0.0, AFTER_S, STEP_S)
    ways, options = scene.ways(times_s), guard_options({})
    lefts, speed = scene.lefts(ways), np.gradient(ways, times_s)
    for car in scene.cars:
        if (nearest_m(scene, ways, times_s, car) < CLEAR_M).any():
            return False
        in_way = np.abs(lefts - car.left) < 0.5 * (WIDTH + car.width) + options.margin_m + 0.1
        if car.speed < 0:
            sooner = replace(car, s=car.s + car.speed * CLEAR_S)
            if (nearest_m(scene, ways, times_s, sooner) < CLEAR_M).any():
                return False
            continue
        gap = car.s + car.speed * times_s - 0.5 * car.length - ways - (LENGTH - REAR)
        back = ways - REAR - (car.s + car.speed * times_s + 0.5 * car.length)
        response_s = (AGE_MS / 1000) + DELAY_S
        faster = speed + options.rss_accel * response_s
        safe = (
            speed * response_s
            + 0.5 * options.rss_accel * response_s**2
            + faster**2 / (2 * options.rss_brake)
        )
        safe = np.maximum(safe - car.speed**2 / (2 * options.rss_lead_brake), 0.0)
        behind = BEHIND_S * np.maximum(car.speed, speed)
        unsafe = in_way & (
            ((gap > -LENGTH) & (gap < safe + 1.0)) | ((back > -LENGTH) & (back < behind) & (gap <= -LENGTH))
        )
        if car.speed >= 0 and scene.changes and unsafe.any():
            return False
        if not scene.changes and (in_way & (gap > -LENGTH) & (gap < safe + 1.0)).any():
            return False
    return True


def refused(scene: Scene, turned: float = 0.0, at_s: float = 0.0, **options: object) -> str:
    """Why the guard would replace the first plan that it ever sees, "" if it accepts it; all is turned by so much."""
    return judged(Guard(guard_options({"guard.shadow": ["distance"], **options})), scene, turned, at_s)


def refused_driven(scene: Scene, turned: float = 0.0, yaw_noise: Callable[[], float] = float) -> str:
    """The same of a guard that has seen the plans before: of a planner that kept the lane until it changed it.

    It decides to change up to a second before the vehicle begins to, and drove a second and a half in its lane before.
    `yaw_noise` draws by how much each yaw rate of the odometry is off, in rad/s.
    """
    guard = Guard(guard_options({"guard.shadow": ["distance"]}))
    begins_m = min((from_s for _, from_s, _ in scene.changes), default=0.0)
    decides_s = min(begins_m, 0.0) / scene.speed - 0.3
    keeps = replace(scene, changes=())
    for at_s in np.arange(-round(10.0 * (KEPT_S - decides_s)), 0.0) / 10.0:
        judged(guard, keeps if at_s < decides_s else scene, turned, float(at_s), yaw_noise)
    return judged(guard, scene, turned, 0.0, yaw_noise)


def judged(
    guard: Guard, scene: Scene, turned: float, at_s: float, yaw_noise: Callable[[], float] = float
) -> str:
    """Why a guard, whose checks are in shadow, would replace the plan at a time."""
    times_s = np.arange(0.0, scene.horizon_s + 0.05, 0.1)
    place, yaw = scene.poses(scene.ways(at_s + times_s))
    near_s = scene.ways(at_s + np.array([-0.02, 0.02]))
    speed, rate = float(np.diff(near_s)[0]) / 0.04, float(np.diff(scene.poses(near_s)[1])[0]) / 0.04
    rate += yaw_noise()
    turn = complex(math.cos(turned), math.sin(turned))
    place, yaw = place * turn, yaw + turned
    now_ns, ros_ns = 10 * S + round(at_s * S), START_NS + round(at_s * S)
    boxes = boxes_of(scene.cars, scene.road, at_s, turned)
    guard.moved(odometry_bytes(place[0].real, place[0].imag, yaw[0], speed, rate, stamp_ns=ros_ns), now_ns)
    guard.saw(0, markers_bytes(boxes, stamp_ns=ros_ns), now_ns)
    plan = plan_bytes(times_s, place.real, place.imag, yaw, start_ns=ros_ns)
    return guard.check(plan, now_ns, ros_ns, AGE_MS).shadow


def boxes_of(cars: Iterable[Car], road: Road, at_s: float, turned: float = 0.0) -> list[Box]:
    """Exact boxes and velocities at a time."""
    boxes = []
    for car in cars:
        (at,), (heading,) = car.after(road, np.array([at_s]))
        at, heading, speed = (
            at * complex(math.cos(turned), math.sin(turned)),
            heading + turned,
            abs(car.speed),
        )
        velocity = speed * math.cos(heading), speed * math.sin(heading)
        boxes.append(Box(at.real, at.imag, heading, car.length, car.width, velocity))
    return boxes


# -- what is drawn


def a_road(rng: np.random.Generator, speed: float, *, straight: float = 0.4) -> Road:
    """Straight, in a bend that has begun or is about to, or out of one."""
    if rng.random() < straight:
        return Road()
    bend = rng.choice([-1, 1]) * min(rng.uniform(0.2, 1.0) * 2.5 / speed**2, 0.05)
    begins, over, lasts = rng.uniform(-60.0, 60.0), rng.uniform(0.5, 60.0), rng.uniform(20.0, 200.0)
    ends = begins + over + min(lasts, TURNS / abs(bend))
    return Road(((begins, 0.0), (begins + over, bend), (ends, bend), (ends + over, 0.0)))


def a_change(rng: np.random.Generator, speed: float, side: int) -> tuple[tuple[float, float, float], ...]:
    """A change to the next lane that has begun, or begins soon, and takes 3 to 6 s.

    Sometimes it leads back.
    """
    over = speed * rng.uniform(3.0, 6.0)
    begins = rng.uniform(-0.5 * over, 1.0 * speed)
    out = (side * LANE_M, begins, over)
    if rng.random() < 0.5:
        return (out,)
    stays = speed * rng.uniform(0.0, 2.5)
    return (out, (-side * LANE_M, begins + over + stays, over))


def head_on(rng: np.random.Generator) -> Scene:
    """A change into the lane of what comes towards us."""
    speed, side = rng.uniform(6.0, 28.0), int(rng.choice([-1, 1]))
    changes, road = a_change(rng, speed, side), a_road(rng, speed, straight=0.6)
    other = road.held(rng.uniform(4.0, 28.0))
    closing = speed + other
    car = Car(
        closing * rng.uniform(0.7, 4.0),
        side * LANE_M + rng.uniform(-0.4, 0.4),
        -other,
        rng.uniform(3.5, 12.0),
        rng.uniform(1.7, 2.5),
    )
    return Scene("head-on", road, speed, rng.uniform(-1.0, 1.0), rng.uniform(-0.2, 0.2), changes, (car,))


def overtaking(rng: np.random.Generator) -> Scene:
    """Past a slower car or a parked one, by the lane of what comes towards us, which is still far."""
    speed, side = rng.uniform(8.0, 25.0), int(rng.choice([-1, 1]))
    slow = rng.choice([0.0, rng.uniform(0.3, 0.7)]) * speed
    over = speed * rng.uniform(3.0, 5.0)
    begins = rng.uniform(-over, speed)
    out = side * rng.choice([LANE_M, rng.uniform(2.8, LANE_M)])
    stays = speed * rng.uniform(0.0, 4.0)
    changes = ((out, begins, over), (-out, begins + over + stays, over))
    cars, road = [Car(rng.uniform(0.0, 80.0), rng.uniform(-0.2, 0.2), slow)], a_road(rng, speed)
    if rng.random() < 0.8:
        cars.append(Car(rng.uniform(40.0, 500.0), side * LANE_M, -road.held(rng.uniform(6.0, 25.0))))
    return Scene("overtaking", road, speed, 0.0, 0.0, changes, tuple(cars))


def lane_change(rng: np.random.Generator) -> Scene:
    """On a road with lanes in one direction, with traffic in both."""
    speed, side = rng.uniform(8.0, 30.0), int(rng.choice([-1, 1]))
    over = speed * rng.uniform(3.0, 6.0)
    changes = ((side * LANE_M, rng.uniform(-over, speed), over),)
    cars = [
        Car(rng.uniform(-60.0, 90.0), lane * LANE_M + rng.uniform(-0.3, 0.3), rng.uniform(0.7, 1.3) * speed)
        for lane in (0, side, side, -side)
        for _ in range(int(rng.integers(0, 2)))
    ]
    return Scene(
        "lane change", a_road(rng, speed), speed, rng.uniform(-0.5, 0.5), 0.0, changes, tuple(cars)
    )


def oncoming(rng: np.random.Generator) -> Scene:
    """Some come towards us in their own lane, and we keep ours."""
    speed, side = rng.uniform(6.0, 28.0), int(rng.choice([-1, 1]))
    road = a_road(rng, speed, straight=0.2)
    other = road.held(rng.uniform(5.0, 28.0))
    cars = tuple(
        Car(
            at,
            side * LANE_M + rng.uniform(-0.3, 0.3),
            -other,
            rng.uniform(3.5, 12.0),
            rng.uniform(1.7, 2.4),
        )
        for at in rng.uniform(-10.0, 180.0, int(rng.integers(1, 4)))
    )
    return Scene("oncoming", road, speed, rng.uniform(-1.0, 0.5), rng.uniform(-0.3, 0.3), (), cars)


def beside(rng: np.random.Generator) -> Scene:
    """Cars of the lane beside, in our direction, before, in and after a bend."""
    speed, side = rng.uniform(6.0, 30.0), int(rng.choice([-1, 1]))
    cars = tuple(
        Car(
            rng.uniform(-25.0, 60.0),
            side * LANE_M + rng.uniform(-0.3, 0.3),
            rng.uniform(0.7, 1.4) * speed,
            rng.uniform(3.5, 12.0),
            rng.uniform(1.7, 2.4),
        )
        for _ in range(int(rng.integers(1, 4)))
    )
    return Scene(
        "beside",
        a_road(rng, speed, straight=0.05),
        speed,
        rng.uniform(-1.0, 0.5),
        rng.uniform(-0.3, 0.3),
        (),
        cars,
    )


def lead(rng: np.random.Generator) -> Scene:
    """Behind something in our lane, and past what is parked beside it."""
    speed = rng.uniform(6.0, 28.0)
    cars = [Car(rng.uniform(8.0, 120.0), rng.uniform(-0.4, 0.4), rng.uniform(0.6, 1.3) * speed)]
    cars += [Car(at, rng.choice([-1, 1]) * rng.uniform(2.4, 3.5), 0.0) for at in rng.uniform(0.0, 90.0, 2)]
    return Scene(
        "lead and parked",
        a_road(rng, speed),
        speed,
        rng.uniform(-1.5, 0.3),
        rng.uniform(-0.3, 0.3),
        (),
        tuple(cars),
    )


CLEAR: tuple[Callable[[np.random.Generator], Scene], ...] = (
    overtaking,
    lane_change,
    oncoming,
    beside,
    lead,
)


def passages(seed: int, count: int) -> Iterator[Scene]:
    """Into a bend that begins 40 m ahead, beside cars of the next lane, in our direction or against it."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        speed, side, lean = rng.uniform(6.0, 30.0), rng.choice([-1, 1]), rng.choice([-1, 1])
        bend, over = lean * min(rng.uniform(0.3, 2.8) / speed**2, 0.04), rng.uniform(0.01, 40.0)
        ends = 40.0 + over + TURNS / abs(bend)
        road = Road(((40.0, 0.0), (40.0 + over, bend), (ends, bend), (ends + over, 0.0)))
        same = [
            Car(
                rng.uniform(-15.0, 25.0),
                side * LANE_M + rng.uniform(-0.4, 0.4),
                rng.uniform(0.9, 1.1) * speed,
            )
        ]
        against = [
            Car(at, side * LANE_M + rng.uniform(-0.4, 0.4), -road.held(rng.uniform(6.0, 25.0)))
            for at in rng.uniform(20.0, 250.0, 3)
        ]
        cars = (
            same
            if rng.random() < 0.6
            else against[:1] + [replace(one, speed=against[0].speed) for one in against[1:]]
        )
        yield Scene("passage", road, speed, 0.0, rng.uniform(-0.3, 0.3), (), tuple(cars))


def streams(seed: int, count: int) -> Iterator[Scene]:
    """Through a bend that begins 40 m ahead and ends, while several come at one speed; we return to our line twice."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        speed, side, lean = rng.uniform(6.0, 28.0), rng.choice([-1, 1]), rng.choice([-1, 1])
        bend, over = lean * min(rng.uniform(0.5, 2.0) / speed**2, 0.033), speed * rng.uniform(0.5, 3.0)
        lasts = min(rng.uniform(0.3, 1.6) / abs(bend), 200.0)
        ends = 40.0 + over + lasts
        road = Road(((40.0, 0.0), (40.0 + over, bend), (ends, bend), (ends + over, 0.0)))
        off_m, other = rng.uniform(-0.1, 0.1), road.held(rng.uniform(0.5, 1.1) * speed)
        apart_m = other * rng.uniform(1.0, 3.0) + 8.0
        ahead_m = rng.uniform(30.0, 150.0) + apart_m * np.arange(rng.integers(1, 6))
        cars = tuple(Car(float(at), side * LANE_M + rng.uniform(-0.2, 0.2), -other) for at in ahead_m)
        changes = tuple((-off_m * sign, at, 2.0 * speed) for sign, at in ((1.0, 20.0), (-1.0, 40.0 + over)))
        yield Scene("stream", road, speed, 0.0, off_m, changes, cars)


def false_stops(
    scene: Scene, *, first: bool = False, until_m: float = 100.0, yaw_noise: Callable[[], float] = float
) -> list[str]:
    """Why plans of a passage are replaced, ten a second, from 40 m before the bend until 60 m behind its beginning.

    By a guard that has driven in the lane for `KEPT_S` before; `first`: each by one that has seen none before.
    """
    times_s = np.arange(0.0, until_m / scene.speed, 0.1)
    if first:
        return list(filter(None, (refused(scene, 1.0, at_s) for at_s in times_s)))
    guard = Guard(guard_options({"guard.shadow": ["distance"]}))
    for at_s in np.arange(-round(10.0 * KEPT_S), 0.0) / 10.0:
        judged(guard, scene, 1.0, float(at_s), yaw_noise)
    return list(filter(None, (judged(guard, scene, 1.0, float(at_s), yaw_noise) for at_s in times_s)))


def head_on_plans(seed: int, count: int) -> Iterator[Scene]:
    """Plans that end head-on within their horizon, although braking now would avoid it."""
    rng = np.random.default_rng(seed)
    found = 0
    while found < count:
        scene = head_on(rng)
        if not math.isnan(contact_s(scene, scene.horizon_s)) and spared_m(scene) > 0.0:
            found += 1
            yield scene


def clear_plans(seed: int, count: int) -> Iterator[Scene]:
    """Clear plans of each kind in turn."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        scene = CLEAR[number % len(CLEAR)](rng)
        while not is_clear(scene):
            scene = CLEAR[number % len(CLEAR)](rng)
        yield scene


# -- drives: the vehicle follows what is published


@dataclass(frozen=True)
class Overtaking:
    """We come up behind a slower car and overtake, whatever comes towards us: the planner does not look."""

    road: Road
    side: int
    speed: float
    wanted: float
    lead: Car
    other: Car
    keeps_s: float  # for which the plans keep the lane first

    def plan(
        self, s: float, left: float, slope: float, speed: float, at_s: float
    ) -> tuple[np.ndarray, ...]:
        """Times, ways and lefts of the plan from a state."""
        times_s = np.linspace(0.0, 3.0, 31)
        gains_s = np.minimum(times_s, max(self.wanted - speed, 0.0) / 1.5)
        ways = s + speed * times_s + 1.5 * gains_s * (times_s - 0.5 * gains_s)
        past = s - 12.0 > self.lead.s + self.lead.speed * at_s
        aim = 0.0 if past or at_s < self.keeps_s else self.side * LANE_M
        over = 3.5 * max(speed, 4.0)
        share = np.clip((ways - s) / over, 0.0, 1.0)
        fade = (1 - share) ** 3 * (1 + 3 * share + 6 * share**2)
        return (
            times_s,
            ways,
            aim + (left - aim) * fade + slope * over * share * (1 - share) ** 3 * (1 + 3 * share),
        )


def an_overtaking(rng: np.random.Generator) -> Overtaking:
    """Something comes that is too near for it, most often."""
    speed, side = rng.uniform(10.0, 22.0), int(rng.choice([-1, 1]))
    lead = Car(
        rng.uniform(14.0, 30.0) + 0.8 * speed, rng.uniform(-0.2, 0.2), rng.uniform(0.4, 0.75) * speed
    )
    other = Car(rng.uniform(60.0, 320.0), side * LANE_M, -rng.uniform(8.0, 22.0))
    return Overtaking(
        a_road(rng, 1.3 * speed, straight=0.7),
        side,
        speed,
        speed + rng.uniform(0.0, 4.0),
        lead,
        other,
        rng.choice([0.0, 0.5, 1.0]),
    )


@dataclass(frozen=True)
class End:
    """When a planner ends, and what its stage sends from then on.

    `sends`: nothing, the stage's stop along the last plan, bytes that are no plan, or plans that are too fast.
    """

    at_s: float
    sends: str


SENDS = ("nothing", "stop", "junk", "too fast")


class Refused(NamedTuple):
    """A plan that was replaced: why, and how near it leads to a car that goes on as it does, in m."""

    reason: str
    nearest_m: float


class Driven(NamedTuple):
    """What came of a drive.

    Attributes:
        contact_s: when something was touched; NaN: nothing was.
        speed: how fast we were then in m/s, NaN likewise.
        verdicts: of the guard, in words.
        refused: the plans that were replaced.
        left: how far to the left of our lane's middle we were at last, in m.
        at_end: that, the speed, and whether we could return, when the planner ended.
    """

    contact_s: float
    speed: float
    verdicts: set[str]
    refused: list[Refused]
    left: float
    at_end: tuple[float, float, bool] = (0.0, 0.0, False)


def driven(
    drive: Overtaking,
    end: End | None = None,
    lasts_s: float = 15.0,
    *,
    guarded: bool = True,
    touches_m: float = 0.0,
) -> Driven:
    """Drives it, ten plans a second, until something is as near as that, or as long as that.

    The vehicle follows what the guard publishes, or every plan, where there is none.
    """
    guard, road = Guard(guard_options({"guard.act": ["all"]})), drive.road
    place, heading = road.at(np.zeros(1), 0.0)
    x, yaw, speed, rate, path = complex(place[0]), float(heading[0]), drive.speed, 0.0, None
    verdicts, refused = set[str](), list[Refused]()
    cars, data, at_end = (drive.lead, drive.other), b"", (0.0, 0.0, False)
    stop: bytes | None = None
    for number in range(round(10.0 * lasts_s)):
        at_s = 0.1 * number
        ros_ns, now_ns = START_NS + round(at_s * S), 10 * S + round(at_s * S)
        s, left, slope = _along(road, x, yaw)
        if guarded:
            guard.moved(odometry_bytes(x.real, x.imag, yaw, speed, rate, stamp_ns=ros_ns), now_ns)
            guard.saw(0, markers_bytes(boxes_of(cars, road, at_s), stamp_ns=ros_ns), now_ns)
        has_ended = end is not None and at_s >= end.at_s and number > 0
        if has_ended and stop is None:
            at_end = left, speed, speed > ROLLS and could_return(drive, s, left, slope, speed, at_s)
            braked_path = TimedPath.parse(data).stop(ros_ns, STAGE_BRAKES)
            stop = b"" if braked_path is None else braked_path.bytes()
        if not has_ended or (end is not None and end.sends == "too fast"):
            times_s, ways, lefts = drive.plan(s, left, slope, speed, at_s)
            if has_ended:
                ways = s + 5.0 * (ways - s) + 20.0 * times_s
            places, headings = road.at(ways, lefts)
            near_m = np.maximum(np.gradient(ways, times_s), 0.1)
            yaws = headings + np.arctan2(np.gradient(lefts, times_s), near_m)
            yaws[0] = yaw
            data = plan_bytes(times_s, places.real, places.imag, yaws, start_ns=ros_ns)
        plan: bytes | None = data
        if has_ended and end is not None:
            plan = {"nothing": None, "stop": stop, "junk": b"junk"}.get(end.sends, data)
        is_stop = has_ended and end is not None and end.sends == "stop"
        if guarded:
            found = guard.check(plan, now_ns, ros_ns, AGE_MS, is_stop=is_stop)
            verdicts.add(found.verdict.word)
            if found.verdict is not GuardVerdict.ACCEPT:
                refused.append(Refused(found.reason, leads_near_m(plan, cars, road, at_s)))
            plan = found.payload
        if plan is not None:
            path = Track.of(TimedPath.parse(plan), START_NS, None)
        fine_s = at_s + np.linspace(0.0, 0.1, 6)
        own = np.interp(fine_s, path.t_s, path.place)
        turns = np.interp(fine_s, path.t_s, path.yaw)
        outline = corners(own, turns, LENGTH, WIDTH, 0.5 * LENGTH - REAR)
        moved = np.abs(np.diff(own)) / 0.02
        for car in cars:
            touches = apart_m(outline, corners(*car.after(road, fine_s), car.length, car.width)) < touches_m
            if touches.any():
                at = int(touches.argmax())
                return Driven(fine_s[at], float(moved[max(at - 1, 0)]), verdicts, refused, left, at_end)
        x, yaw, speed = complex(own[-1]), float(turns[-1]), float(moved[-1])
        rate = float(turns[-1] - turns[-2]) / 0.02
    return Driven(math.nan, math.nan, verdicts, refused, _along(road, x, yaw)[1], at_end)


def leads_near_m(plan: bytes | None, cars: Iterable[Car], road: Road, at_s: float) -> float:
    """How near a plan leads to cars; infinite where it is none."""
    path = plan and TimedPath.read(plan)
    if not path:
        return math.inf
    track, times_s = Track.of(path, START_NS, None), at_s + np.arange(0.0, 3.0, 0.05)
    places, yaws = np.interp(times_s, track.t_s, track.place), np.interp(times_s, track.t_s, track.yaw)
    own = corners(places, yaws, LENGTH, WIDTH, 0.5 * LENGTH - REAR)
    boxes = [corners(*car.after(road, times_s), car.length, car.width) for car in cars]
    return min(float(apart_m(own, box).min()) for box in boxes)


def an_ending(rng: np.random.Generator, sends: str) -> tuple[Overtaking, End]:
    """An overtaking whose planner ends on the way; what comes is far still, more often than not."""
    drive = an_overtaking(rng)
    if rng.random() < 0.6:
        drive = replace(drive, other=replace(drive.other, s=rng.uniform(250.0, 600.0)))
    return drive, End(rng.uniform(0.3, 8.0), sends)


def has_room(drive: Overtaking) -> bool:
    """Whether the whole overtaking is clear by `CLEAR_M`, also if what comes were there `CLEAR_S` sooner."""
    other = drive.other
    sooner = replace(drive, other=replace(other, s=other.s + other.speed * CLEAR_S))
    both = (driven(one, guarded=False, touches_m=CLEAR_M) for one in (drive, sooner))
    return all(math.isnan(one.contact_s) for one in both)


def could_return(drive: Overtaking, s: float, left: float, slope: float, speed: float, at_s: float) -> bool:
    """Whether one of a few ways back into the lane, and to standstill there, is clear of every car by `CLEAR_M`.

    The vehicle brakes to a share of its speed, returns by a quintic in 3.5 s of that, and brakes.
    """
    times_s = np.arange(0.0, AFTER_S, STEP_S)
    for share in (1.0, 0.7, 0.4, 0.25):
        then = max(share * speed, 3.0)
        slows_s = max(speed - then, 0.0) / RETURN_BRAKE
        slowing_s, over = np.minimum(times_s, slows_s), max(3.5 * then, 6.0)
        begins_m = max(speed, then) * slows_s - 0.5 * RETURN_BRAKE * slows_s**2
        keeps_s = np.clip(times_s - slows_s, 0.0, over / then)
        stops_s = np.clip(times_s - slows_s - over / then, 0.0, then / RETURN_BRAKE)
        ways = speed * slowing_s - 0.5 * RETURN_BRAKE * slowing_s**2 + then * keeps_s
        ways += then * stops_s - 0.5 * RETURN_BRAKE * stops_s**2
        straight = left + slope * np.minimum(ways, begins_m)
        back = np.clip((ways - begins_m) / over, 0.0, 1.0)
        lefts = (left + slope * begins_m) * (1 - back) ** 3 * (1 + 3 * back + 6 * back**2)
        lefts = np.where(
            back > 0.0, lefts + slope * over * back * (1 - back) ** 3 * (1 + 3 * back), straight
        )
        places, headings = drive.road.at(s + ways, lefts)
        yaws = headings + np.arctan(np.gradient(lefts) / np.maximum(np.gradient(ways), 1e-3))
        own = corners(places, yaws, LENGTH, WIDTH, 0.5 * LENGTH - REAR)
        cars = [car.after(drive.road, at_s + times_s) for car in (drive.lead, drive.other)]
        if all((apart_m(own, corners(*car, 4.5, 1.9)) > CLEAR_M).all() for car in cars):
            return True
    return False


def _along(road: Road, place: complex, yaw: float) -> tuple[float, float, float]:
    """Where a place is along the road and to its left, and the slope of its direction to that of the road."""
    at = int(np.abs(road.place - place).argmin())
    off = (place - road.place[at]) * complex(np.exp(-1j * road.heading[at]))
    s = float(road.s[at]) + off.real
    return s, off.imag, math.tan(yaw - float(np.interp(s, road.s, road.heading)))
