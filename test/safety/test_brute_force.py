"""No plan that the guard accepts is unsafe by a brute force.

Shapely, step by step, nothing of the guard's arithmetic.

`TORCHPERF_GUARD_PLANS=100000` looks at as many plans.
"""

import math
import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, plan_bytes
from torchperf_ros.safety.guard import Guard
from torchperf_ros.settings.safety_options import guard_options

shapely = pytest.importorskip("shapely", reason="shapely is not installed")

PLANS = int(os.environ.get("TORCHPERF_GUARD_PLANS", "200"))
MOST_DRAWN, OF_A_SEED = (
    5000,
    100,
)  # plans of which Hypothesis draws every value; of one seed that it draws, beyond
LENGTH, WIDTH, REAR = 4.5, 1.9, 1.0
MARGIN, RESPONSE_S, DELAY_S = 0.3, 0.21, 0.15  # 60 ms old frames and 150 ms of actuation
ACCEL, BRAKE, LEAD_BRAKE = 2.0, 6.0, 8.0
SHOWS_RAD, ROLLS = (
    0.0021,
    1.01,
)  # rad that a plan turns, and m/s of the vehicle: less says nothing of the bend
MOVES = 0.06  # m/s; a slower vehicle stands, and what touches it has come to it
STEPS = 5  # looked at from one pose to the next
ROUNDED = 0.05  # m; whether something is in our lane is found on a lane of straight pieces
GIVEN_M = 0.05  # so much closer may come what is within the margin now


@dataclass
class Plan:
    """A plan that begins at the origin along x, in a constant bend or with a change of lanes."""

    speed: float
    acceleration: float  # of the first second and a half
    then: float  # and of the second
    bend: float = 0.0
    aside: float = 0.0  # m to the left after `over` m

    over: float = 60.0

    def __post_init__(self):
        self.times_s = np.linspace(0.0, 3.0, 31)
        fine = np.linspace(0.0, 3.0, 3001)
        rate = np.where(fine < 1.5, self.acceleration, self.then)
        speed = np.maximum(self.speed + np.concatenate(([0.0], np.cumsum(rate[:-1]) * 0.001)), 0.0)
        way = np.concatenate(([0.0], np.cumsum(0.5 * (speed[1:] + speed[:-1])) * 0.001))
        self.s = np.interp(self.times_s, fine, way)
        self.speeds = np.interp(self.times_s, fine, speed)
        self.place, self.yaw = self.at(self.s)

    def at(self, s):
        """Place and heading after this way."""
        if abs(self.bend) > 1e-6:
            turned = self.bend * s
            return (np.sin(turned) + 1j * (1 - np.cos(turned))) / self.bend, turned
        share = np.clip(s / self.over, 0.0, 1.0)
        left = self.aside * (10 * share**3 - 15 * share**4 + 6 * share**5)
        slope = self.aside * (30 * share**2 - 60 * share**3 + 30 * share**4) / self.over
        return s + 1j * left, np.arctan(slope)


@dataclass
class Other:
    """An obstacle by its place along the plan's bend and aside of it, with its motion in those directions."""

    kind: str  # along, stands, crosses
    s: float
    left: float
    turned: float  # of the box from the way
    length: float
    width: float
    speed: float  # along the way, negative against it
    drift: float  # to the left

    def box(self, plan):
        """Place, heading and velocity now."""
        if abs(plan.bend) > 1e-6:
            turned = plan.bend * self.s
            way = np.exp(1j * turned)
            place = (np.sin(turned) + 1j * (1 - np.cos(turned))) / plan.bend + 1j * self.left * way
        else:
            way, place = 1.0, complex(self.s, self.left)
        return place, float(np.angle(way) + self.turned), (self.speed + 1j * self.drift) * way

    def after(self, plan, times_s):
        """Places and headings: one that drives along follows the plan's bend, others go straight on."""
        place, yaw, velocity = self.box(plan)
        if abs(plan.bend) > 1e-6 and self.kind == "along":
            s, left = self.s + self.speed * times_s, self.left + self.drift * times_s
            turned = plan.bend * s
            way = np.exp(1j * turned)
            places = (np.sin(turned) + 1j * (1 - np.cos(turned))) / plan.bend + 1j * left * way
            return places, yaw + plan.bend * self.speed * times_s
        return place + velocity * times_s, np.full_like(times_s, yaw)


def rectangles(places, yaws, half_length, half_width, offset=0.0):
    corners = offset + half_length * np.array([1, 1, -1, -1]) + 1j * half_width * np.array([1, -1, -1, 1])
    points = places[:, None] + corners * np.exp(1j * yaws)[:, None]
    return shapely.polygons(np.stack((points.real, points.imag), axis=-1))


def distances(plan, other):
    """In m between both outlines at every step of the plan, 0 where they overlap.

    And whether the vehicle moves.
    """
    fine = np.interp(
        np.arange((len(plan.times_s) - 1) * STEPS + 1) / STEPS, np.arange(len(plan.times_s)), plan.times_s
    )
    places = np.interp(fine, plan.times_s, plan.place)
    yaws = np.interp(fine, plan.times_s, plan.yaw)
    own = rectangles(places, yaws, LENGTH / 2, WIDTH / 2, LENGTH / 2 - REAR)
    moving = np.repeat(np.diff(plan.s) > MOVES * np.diff(plan.times_s), STEPS)
    moves = np.append(moving, False) | np.insert(moving, 0, False)
    return (
        shapely.distance(own, rectangles(*other.after(plan, fine), other.length / 2, other.width / 2)),
        moves,
    )


def stays_behind(speed, lead_speed, gap):
    """Whether nothing happens if what is ahead brakes its hardest at this moment; step by step."""
    step = 0.005
    times = np.arange(0.0, 12.0, step)
    own = np.where(
        times < RESPONSE_S, speed + ACCEL * times, speed + ACCEL * RESPONSE_S - BRAKE * (times - RESPONSE_S)
    )
    lead = lead_speed - LEAD_BRAKE * times
    closing = np.maximum(own, 0.0) - np.maximum(lead, 0.0)
    return gap - float(np.cumsum(closing * step).max(initial=0.0)) > -0.1


def what_is_unsafe(plan, other):  # noqa: PLR0911 - one way to be safe after the other
    """Why this plan is not safe beside this obstacle, "" if it is."""
    apart, moves = distances(plan, other)
    reach_s = other.length / 2 * abs(math.cos(other.turned)) + other.width / 2 * abs(math.sin(other.turned))
    reach_left = other.length / 2 * abs(math.sin(other.turned)) + other.width / 2 * abs(
        math.cos(other.turned)
    )
    side_m = abs(other.left) - reach_left - WIDTH / 2
    from_behind = other.kind == "along" and other.speed > 0 and other.s + reach_s < -REAR
    if from_behind and side_m < ROUNDED:
        return ""  # it follows us
    unknown = other.s > 0.95 * plan.s[-1] + 9.0 or other.s < -9.0
    far_round = plan.bend != 0 and abs(other.s) + plan.s[-1] > 1.1 / abs(plan.bend)
    # A bend that neither the plan nor the odometry shows cannot be known: the plan turns too little.
    shown = (abs(plan.bend) * plan.s[-1] > SHOWS_RAD and plan.s[-1] >= 1.0) or (
        other.s < 0 and plan.speed > ROLLS
    )
    drift = other.drift + (0.0 if shown else other.speed * math.sin(plan.bend * other.s))
    if other.kind == "along" and unknown and (abs(drift) > 0.34 or far_round):
        return ""  # it follows a bend beyond the plan, for all that is known
    if (
        plan.aside and other.kind == "along"
    ):  # what drives along is known not to bend with us for 2 s, where it is near
        moves[(20 if other.speed > 0 else 10) * STEPS :] = False  # 1 s if it comes towards us
        if other.s > plan.s[-1]:
            return ""
    if (apart[moves] <= 0).any():
        return "touches"
    guessed = plan.bend and not 0 <= other.s <= plan.s[-1]  # where the bend of the plan is led on
    passes = from_behind and side_m < MARGIN + ROUNDED  # as close as it is aside now
    # Separating axes call two corners that are diagonal to each other closer than they are, by up to the
    # root of two.
    floor = min(MARGIN, apart[0] / math.sqrt(2) - GIVEN_M)
    if not guessed and not passes and (apart[moves] < floor).any():
        return f"comes to {apart[moves].min():.3f} m"
    if other.kind == "crosses" or other.speed < 0 or plan.aside:
        return ""
    for number in range(len(plan.s) - 1):
        t, v = plan.times_s[number], plan.speeds[number]
        left, s = other.left + other.drift * t, other.s + other.speed * t
        gap = s - reach_s - plan.s[number] - (LENGTH - REAR)
        brakes = v - plan.speeds[number + 1] > min(0.85 * BRAKE * 0.1, 0.45 * v) or v < 0.2
        known = s - reach_s <= plan.s[-1]
        if (
            t < DELAY_S + 0.05
            or brakes
            or gap < 0
            or not known
            or abs(left) - reach_left > WIDTH / 2 + MARGIN - 0.01
        ):
            continue
        if not stays_behind(v, other.speed, gap):
            return (
                f"is {gap:.2f} m behind at {v:.2f} m/s what drives at {other.speed:.2f} m/s, {t:.2f} s"
                " from now"
            )
    return ""


class Drawn:
    """Values drawn by Hypothesis, which finds edges and shrinks."""

    def __init__(self, draw):
        self._draw = draw

    def between(self, low, high):
        return self._draw(st.floats(low, high))

    def one(self, *values):
        return self._draw(st.sampled_from(values))


class Rolled:
    """Values of a generator of which Hypothesis draws the seed.

    Ten times as many situations in the same time.
    """

    def __init__(self, seed):
        self._rng = random.Random(seed)

    def between(self, low, high):
        return self._rng.uniform(low, high)

    def one(self, *values):
        return self._rng.choice(values)


def situation_of(pick):
    speed = pick.between(
        0, pick.one(2, 35, 35, 35)
    )  # a slow plan is short, and most obstacles are beyond its end
    shape = pick.one("straight", "bend", "bend", "lane")
    most = min(0.03, 2.9 / max(speed, 1.0) ** 2)
    plan = Plan(
        speed,
        pick.between(-7, 2),
        pick.between(-7, 2),
        bend=pick.between(-1, 1) * most if shape == "bend" else 0.0,
        aside=pick.one(-3.5, 3.5) if shape == "lane" else 0.0,
        over=max(20.0, 4.0 * speed),
    )
    others = []
    for _ in range(pick.one(1, 2, 3, 4)):
        kind = pick.one("along", "along", "stands", "crosses")
        s, left = pick.between(-40, 110), pick.between(-6, 6)
        length, width, turned = pick.between(0.3, 9), pick.between(0.3, 2.6), pick.between(-0.3, 0.3)
        motion = {"speed": 0.0, "drift": 0.0}
        if kind == "along":
            motion = {
                "speed": pick.one(1, 1, 1, -1) * pick.between(1, 35),
                "drift": pick.between(-0.5, 0.5),
            }
        elif kind == "crosses":
            turned, drift = pick.between(-1.57, 1.57), pick.one(-1, 1) * pick.between(0.8, 12)
            motion = {"speed": pick.between(-0.5, 0.5) * drift, "drift": drift}
        others.append(Other(kind, s, left, turned, length, width, **motion))
    return plan, others


situations = st.composite(lambda draw: situation_of(Drawn(draw)))


def accepted(plan, others):
    guard = Guard(OPTIONS)
    guard.moved(odometry_bytes(speed=plan.speed, yaw_rate=plan.bend * plan.speed), 10 * S)
    boxes = []
    for other in others:
        place, yaw, velocity = other.box(plan)
        boxes.append(
            Box(place.real, place.imag, yaw, other.length, other.width, (velocity.real, velocity.imag))
        )
    guard.saw(0, markers_bytes(boxes), 10 * S)
    message = plan_bytes(plan.times_s, plan.place.real, plan.place.imag, plan.yaw)
    return not guard.check(message, 10 * S, START_NS, 60.0).shadow


OPTIONS = guard_options({"guard.shadow": ["distance"]})  # what acts looks for a replacement as well


def test_given_generated_plans_when_accepted_then_none_is_unsafe_by_brute_force():
    seen = {"accepted": 0, "refused": 0}

    def look(plan, others):
        went_through = accepted(plan, others)
        seen["accepted" if went_through else "refused"] += 1
        why = [found for other in others if went_through and (found := what_is_unsafe(plan, other))]
        assert not why, (why, plan, others)

    @settings(max_examples=min(PLANS, MOST_DRAWN), database=None)
    @given(situations())
    def draw(situation):
        look(*situation)

    @settings(max_examples=max((PLANS - MOST_DRAWN) // OF_A_SEED, 1), database=None)
    @given(st.integers(0, 2**64))
    def roll(seed):
        pick = Rolled(seed)
        for _ in range(OF_A_SEED):
            look(*situation_of(pick))

    draw()
    if PLANS > MOST_DRAWN:
        roll()
    print(seen)  # with -s: the figures of the documents
    assert min(seen.values()) > 0.1 * PLANS


ONCE_ACCEPTED = {
    "it drives straight on, more than 10 m behind, where the plan's first bend leads back elsewhere": (
        Plan(0.0, 2.0, 0.0, aside=-3.5, over=20.0),
        Other("along", -10.0, -2.0, 0.0, 1.0, 1.0, 7.0, 0.0),
    ),
    "we pass it within 2 s, and change lanes towards it": (
        Plan(26.6, -4.02, -5.81, aside=-3.5, over=106.4),
        Other("along", 9.51, -1.9, 0.0, 8.1, 0.66, 11.9, 0.0),
    ),
    "it comes towards us in the lane that we change into": (
        Plan(19.89, -0.057, -3.91, aside=-3.5, over=79.55),
        Other("along", 23.1, -2.7, -0.042, 7.34, 2.28, -11.2, 0.23),
    ),
    "it comes towards us round a bend, far beyond a short plan": (
        Plan(4.86, 0.0, -2.99, bend=0.0098),
        Other("along", 76.4, 0.0, 0.287, 0.3, 1.63, -27.3, 0.0),
    ),
    "it comes round and drifts": (
        Plan(2.304, 1.3, -5.557, bend=-0.017465),
        Other("along", 45.969, 1.273, 0.0558, 1.274, 2.428, -29.093, -0.3314),
    ),
    "it comes from far behind, aside of our way by 8 cm more than a plan of 2 m shows": (
        Plan(1.0, -0.5, -2.62, bend=0.0006),
        Other("along", -19.7, -1.266, 0.0107, 2.77, 0.44, 15.75, 0.28),
    ),
    "it walks into our side, beyond the end of a plan that sets off": (
        Plan(0.0, 0.0, 1.0, over=20.0),
        Other("crosses", 2.0, -3.0, 0.0, 1.0, 1.0, 0.0, 1.0),
    ),
    "it crosses before us, beyond the end of a short plan": (
        Plan(1.0, 0.5, 0.0, over=20.0),
        Other("crosses", 4.5, 6.0, 0.0, 0.6, 0.6, 0.5, -2.0),
    ),
    "it changes lanes as we do, and need not go on so": (
        Plan(20.256, -2.569, 0.642, aside=3.5, over=81.024),
        Other("along", 9.2252, 2.84825, -0.05748, 8.70935, 1.65048, 10.90654, 0.17295),
    ),
    "it passes within the margin where our change of lanes begins, and goes straight on": (
        Plan(12.043, -5.0495, -5.5238, aside=-3.5, over=48.172),
        Other("along", -30.3666, -2.4924, 0.09066, 6.1138, 2.19009, 33.30546, -0.16236),
    ),
    "it comes towards us beyond the plan's end, and strays a little": (
        Plan(18.617, -1.354, -2.0703),
        Other("along", 77.7769, 1.85777, 0.12753, 4.38304, 0.68812, -10.391, -0.20952),
    ),
    "it comes towards us just beyond the plan's end, and strays": (
        Plan(2.264, -2.434, -6.5555, over=20.0),
        Other("along", 8.60864, -2.46432, -0.10763, 6.62866, 1.84389, -12.59724, 0.36359),
    ),
    "it overlaps us, and is called beyond the end of a plan of 15 cm": (
        Plan(0.54842, -0.997, -4.2525, bend=-0.027608),
        Other("along", 4.21746, 1.23873, -0.22019, 5.25333, 1.0677, 13.95943, -0.28248),
    ),
    "it overlaps us, and a plan of 1 cm does not show that both are in a bend": (
        Plan(0.25313, -2.6698, -0.50466, bend=0.0284506, over=20.0),
        Other("along", 7.51165, -1.03665, 0.16641, 8.2141, 2.58748, 2.63507, 0.2125),
    ),
    "it is slow and strays, and bends with us all the same": (
        Plan(11.75348, 0.32905, 0.28386, bend=0.0029631),
        Other("along", 11.20621, -2.62369, 0.2822, 0.85087, 0.78043, 6.80626, 0.46764),
    ),
    "it comes from behind in a bend that only the plan of a vehicle shows which sets off": (
        Plan(0.1641688872953866, 1.890011438301487, -3.5460519618612, bend=0.0204000158089275, over=20.0),
        Other(
            "along",
            -15.788060145784275,
            -2.2637838744628116,
            0.08567656948278435,
            4.550406289050476,
            2.110987210972434,
            32.40295486437855,
            0.2076961318785947,
        ),
    ),
    "it touches our side": (Plan(0.3, -1.478, 1.493), Other("stands", 1.0, 1.9, 0.0, 0.3, 1.9, 0.0, 0.0)),
    "the plan is fastest at one pose, and too fast there for what drives ahead": (
        Plan(14.934, 1.2479, -3.7626, bend=0.011995),
        Other("along", 18.591, 1.8173, -0.18348, 7.7205, 2.2901, 16.1864, -0.26057),
    ),
    "it overtakes us in the lane that we change into; only where the plan leads back is it in our way": (
        Plan(7.6915, 1.7813, -3.69155, aside=-3.5, over=30.766),
        Other("along", -8.35106, -2.6904, -0.08905, 7.6082, 2.24159, 26.65288, 0.13376),
    ),
    "it has come up to our side by 10 cm, though not where the plan leads back": (
        Plan(6.01657, -6.19236, -2.44595, aside=3.5, over=24.06630),
        Other("along", -5.034575, 2.683067, 0.289929, 8.324796, 1.076565, 12.05022, 0.326297),
    ),
    "it has come up to our side by 3 cm, likewise": (
        Plan(2.6265, 1.284, -6.278, bend=0.010526),
        Other("along", -5.24831, 2.65245, -0.205823, 8.24689, 2.36814, 4.77965, 0.35038),
    ),
}


@pytest.mark.parametrize(("plan", "other"), ONCE_ACCEPTED.values(), ids=ONCE_ACCEPTED)
def test_given_a_plan_that_was_accepted_once_and_is_unsafe_when_checked_then_it_is_refused(plan, other):
    assert what_is_unsafe(plan, other)
    assert not accepted(plan, [other])
