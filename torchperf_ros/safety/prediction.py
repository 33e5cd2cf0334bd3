"""How obstacles go on while a plan lasts: along the plan's way, in the bend that we drive, or straight on.

There is no map, so a plan that bends may follow the road or leave its lane. Where an obstacle drives to
says which: one that keeps to its lane drives in the direction that the road has where it is. So each is
compared with two ways, the plan's and the bend that we drive now, and goes on along the one whose direction
it has, or along both where they do not differ. One that has neither direction goes straight on. Beyond its
end a plan says nothing of the road: there an obstacle is on a road that bends evenly from the plan's end to
where the obstacle is.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Complex, Floats, largest, unit
from torchperf_ros.safety.obstacles import Seen

Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]

STANDS = 0.5  # m/s of an obstacle; slower, its direction is noise
_CERTAIN = 0.8  # standard deviations; a drift counts as far as it exceeds them
_ALONG = math.cos(math.radians(30.0))  # to the way: such an obstacle drives in a lane of our road
_ASIDE_M = 20.0  # further off the way, an obstacle is not on our road
_ON_COURSE = 0.05  # rad between an obstacle's direction and that of its lane: 0.5 m/s aside at 10 m/s
# rad; two ways whose directions differ by less look the same to what drives there
_SAME_COURSE = 0.01
_DRIFTS = 0.34  # m/s aside; less is taken for what it is, also where nothing says where the lane leads
_STRAYS = 0.5  # m/s aside, which keeps on course what is too slow for `_ON_COURSE`
_STRAYS_LITTLE = 0.2  # m/s aside; beyond the plan's end more is no sign of where the lane leads
_NEAR_M = 9.0  # beyond the plan's end, the lane goes on as the plan ends, for what has its direction
_BESIDE_US_M = 4.0  # so far behind the plan's end, what begins there and drives as we do may be beside us
_BESIDE_M = 2.65  # aside of our way; what is nearer is in no lane beside, and need not bend with us
# What comes shows where the road goes: so fast in m/s, so far along a plan, so far aside in m, aslant by so many rad.
_SHOWS, _SHOWN, _LANE_BESIDE_M, _PARALLEL = 3.0, 0.25, 5.0, 0.02
_ROW_REACHES_M = 40.0  # behind the first of what comes beyond a plan's end
_TURNED = 0.01  # rad; a plan that turns less away from the bend that we drive does not leave it
# Of what is not known of a road, by which it may lead nearer where a plan may be either: where what comes
# has the direction that we have now, so that the road may be straight, and else.
_NEARER = (0.5, 0.1)
_AS_NOW = 0.06  # rad, likewise
_EVEN = 0.008  # rad; of a plan that follows one circle no quarter turns more than another one
_EVEN_END = 0.002  # rad; likewise the last eighth than the one before it
_NO_TURN = 1e-9  # rad, likewise
_BACK = 0.92  # of its largest turn; a plan that ends with less has begun to turn back
_TURNS_OFF = 0.042  # 1/m: sharper than 24 m is a junction more often than a bend of the road
# 1/m, and rad: so sharp is a road, and so much it turns from a plan's end to where something is.
_SHARPEST, _MOST_TURN = 0.062, 1.55
# m/s^2 to the side, with which a bend is driven at most, and of braking for it.
_HELD, _SLOWS = 4.0, 2.0
# In rad; what has turned more, beyond a plan's end, may drive straight across our road as well.
_MUCH_TURN = 0.45
# rad between one car and the next of a row; m, share of how far it leads aside, and share of a speed, by which the road
# between them may differ.
_MOST_APART, _ROW_M, _UNEVEN, _AS_FAST = 0.8, 0.5, 0.1, 0.2
_MOST_ROUND = 2.2  # rad; what is further round the bend that we drive is on another part of the road
_LITTLE_ASLANT = 0.12  # rad to the plan's way; so is what comes in it, where the road bends beside a change
_ASLANT = 0.25  # rad; in a change of lanes our own direction is aslant by less, on a straight road, too
_LEAST_AHEAD_M = 5.0  # nearer, the direction of what comes says nothing of the road between
_EASES = 0.85  # likewise: less than this is no bend that goes on
_OFF_M = 0.3  # aside of the bend that we drive; a plan that leads no further only returns to its line
_KEEPS_OFF_M = (
    0.4  # likewise, of one that keeps to a lane that is known: at the end of a bend it comes off so far
)
_NO_LONGER = 0.4  # of the quarter that turns most
_EIGHTHS = np.linspace(0.0, 1.0, 9)
# rad in an eighth of a plan; so much less than before and after is no road's bend, which grows and then fades
_DIPS = 0.001
# m aside, by which a plan that keeps to a lane that is known returns to its line. A quintic that leads so far
# aside over two thirds of a plan turns by so much of that for each m of the plan, and an eighth of it by so much
# more or less than the road.
_RETURNS_M, _SLOPES, _WAVES = 0.12, 2.8, 1.7
_BEHIND_M = 8.0  # so far behind us, what drives along may still be before the bend that we are in
_BENDS = 0.0005  # 1/m; where we drive so, how the road goes on is a guess
_STRAIGHT = 1e-6  # rad/s: 5e-6 rad after 5 s, and enough for a division
_STRAIGHT_ARC = 1e-6  # 1/m: 5 mm aside after 100 m, likewise


class Looks(IntEnum):
    """What a plan looks like, from what leaves its lane to what keeps to it."""

    CHANGE = -2
    EITHER = -1
    BEND = 1
    KEEPS = 2  # known by the lane that the vehicle has kept
    CIRCLE = 3


class Along(NamedTuple):
    """Obstacles as they are along a way; shapes [n].

    Attributes:
        s, left: distance along it and to its left, in m.
        ways: its direction there, as x + iy.
        ahead, drift: velocity along it and to its left, in m/s.
    """

    s: Floats
    left: Floats
    ways: Complex
    ahead: Floats
    drift: Floats


class Course(NamedTuple):
    """Along which ways each obstacle may go on; shapes [n].

    Attributes:
        along: where it is along the plan's way, or along the road that joins the plan's end to it.
        on_arc: where it is along the bend that we drive, or along that of its own.
        bends: of that bend, in 1/m.
        own_bend: whether it comes along a bend of its own, which leads evenly from us to it.
        lane, arc, straight: whether it may go on along that way, in the bend that we drive, or straight on.
        joined: whether it is beyond the plan's end.
        strays: whether it is there and drifts from where the plan's end leads, but little.
        is_along: whether it drives along our road, either way, at all.
        changes: whether the plan looks like a change of lanes.
    """

    along: Along
    on_arc: Along
    bends: Floats
    own_bend: Flags
    lane: Flags
    arc: Flags
    straight: Flags
    joined: Flags
    strays: Flags
    is_along: Flags
    changes: bool


class Rows(NamedTuple):
    """Predicted obstacles, one row for each way that one may go on.

    Attributes:
        which: their indices, shape [k]; the first `lanes` rows are along the plan's way, the next `arcs` in
        our bend. places, yaws: middles as x + iy and headings in rad at each pose, shape [poses, k].
    """

    which: Indices
    lanes: int
    arcs: int
    places: Complex
    yaws: Floats


class Road(NamedTuple):
    """How a road leads on: its direction as x + iy, and its bend in 1/m, not 0."""

    travel: complex
    bend: float


class Shown(NamedTuple):
    """What the lane that was kept says of a plan.

    Attributes:
        looks: `CHANGE` where it leaves that lane, `KEEPS` where it keeps to it; None: that is not known.
        road: of one that leaves it, how the road leads on where it begins.
        near: whether it keeps to what is known of that lane, which says nothing of what is beyond.
    """

    looks: Looks | None = None
    road: Road | None = None
    near: bool = False


NOTHING_SHOWN = Shown()


class Arc:
    """The bend that the vehicle drives now, through where the plan begins, in the direction of travel."""

    def __init__(self, lane: Lane, bend: float) -> None:
        """`bend` in 1/m is positive to the left of where the vehicle looks."""
        self.place = complex(lane.own_place[0])
        self.travel, self.bend = complex(lane.own_unit[0]), bend
        if lane.backward:
            self.travel, self.bend = -self.travel, -bend
        if abs(self.bend) < _STRAIGHT_ARC:
            self.bend = _STRAIGHT_ARC

    def beside(self, places: Complex) -> tuple[Floats, Floats, Complex]:
        """Of points x + iy.

        Way along the circle to where they are beside it, how far to its left, its direction.
        """
        turned = (places - self.place) * (self.travel.conjugate() * 1j * self.bend) + 1.0
        radius = np.abs(turned)  # from the centre, as a share of the arc's
        ways = turned * (self.travel / np.maximum(radius, _STRAIGHT_ARC))
        return np.arctan2(turned.imag, turned.real) / self.bend, (1.0 - radius) / self.bend, ways


def along_lane(lane: Lane, seen: Seen) -> Along:
    s, left, heading = lane.project(seen.places)
    ways = unit(heading)
    velocities = seen.velocities * ways.conj()
    return Along(s, left, ways, velocities.real, certain_drift(velocities.imag, seen))


def along_arc(arc: Arc, seen: Seen) -> Along:
    s, left, ways = arc.beside(seen.places)
    velocities = seen.velocities * ways.conj()
    return Along(s, left, ways, velocities.real, certain_drift(velocities.imag, seen))


def certain_drift(drift: Floats, seen: Seen) -> Floats:
    """As much of a velocity across a way as is no noise."""
    if not np.count_nonzero(seen.unsure):
        return drift
    return np.copysign(np.maximum(np.abs(drift) - _CERTAIN * seen.unsure, 0.0), drift)


def lefts_of_roads(off: Complex, turned: Floats, bend: float) -> tuple[Floats, Floats, Floats]:
    """How far to the left of a road places are, which leaves the origin along x and has turned beside them.

    A road that bends evenly is a circle. It has turned by p beside a place (x, y), seen from where it
    begins, and passes that place at y - t to its left, t = x tan(p / 2), for any radius: tangents from
    a point to a circle are equal. A road whose bend goes over evenly from k where it begins, as one drives
    out of a plan's last bend, is a clothoid of length S: its direction k s + (p - k S) (s / S)^2, summed up,
    leads S^2 k / 6 + S p / 3 aside. With t = S p / 2, as on a circle, that is t (2 + k S / p) / 3. A road
    bends between at once (2 t) and at last (0), so that is the most and the least of it.

    Args:
        off: the places as x + iy in m.
        turned: p in rad, between -pi / 2 and pi / 2.
        bend: k in 1/m.

    Returns:
        Of the circle, of the clothoid, and t, in m.
    """
    aside_m = off.real * np.tan(0.5 * turned)
    half = np.maximum(np.abs(0.5 * turned), _NO_TURN)
    way_m = np.hypot(off.real, aside_m) * half / np.sin(half)
    eases = aside_m * (2.0 / 3.0) + (bend / 6.0) * way_m * way_m
    least_m, most_m = np.minimum(0.0, 2.0 * aside_m), np.maximum(0.0, 2.0 * aside_m)
    return off.imag - aside_m, off.imag - np.minimum(np.maximum(eases, least_m), most_m), aside_m


def along_joined(lane: Lane, arc: Arc, seen: Seen, looks: Looks) -> Along:
    """Obstacles along a road that leaves the plan's end as the plan does and has their direction beside them.

    A plan that leaves its lane has to expect them as near to its way as such a road allows; one that keeps
    to it as far. How far they are if the road goes on as the plan ends is known better. But half of a change of
    lanes ends aslant to the road: where it may be one, the road may also go on as we drive now until beside the
    plan's end, and bend evenly from there.
    """
    changes = looks is Looks.CHANGE
    end = lane.own_unit[-1] * (-1.0 if lane.backward else 1.0)
    off = (seen.places - lane.own_place[-1]) * end.conjugate()
    direction = seen.velocities * (end.conjugate() / np.maximum(seen.speeds, STANDS))
    # What comes round more than a right angle drives away from us by its direction, but nearer by its place.
    against = (
        (seen.velocities * (seen.places - lane.own_place[0]).conj()).real if changes else direction.real
    )
    direction = np.where(against < 0, -direction, direction)
    even, eased, unsure_m = lefts_of_roads(off, np.angle(direction), lane.last_bend)
    unsure_m = np.abs(unsure_m)
    if looks is Looks.KEEPS:
        left = np.where(np.abs(even) > np.abs(eased), even, eased)
    elif looks in {Looks.EITHER, Looks.BEND}:
        nearer = np.where(even * eased > 0.0, np.minimum(np.abs(even), np.abs(eased)), 0.0)
        start = lane.own_unit[0] * (-1.0 if lane.backward else 1.0)
        as_now = np.abs(np.angle(direction * end * start.conjugate())) < _AS_NOW
        share = np.where(as_now, *_NEARER) if looks is Looks.EITHER else 0.0
        left = np.copysign(np.maximum(nearer - share * unsure_m, 0.0), even)
    else:
        room_m = unsure_m if looks is Looks.CIRCLE else -unsure_m
        left = np.copysign(np.maximum(np.abs(even) + room_m, 0.0), even)
    if looks < Looks.BEND:
        as_driven = left_of_what_we_drive(lane, arc, seen)
        left = np.where(np.abs(as_driven) < np.abs(left), as_driven, left)
    s = lane.length + np.hypot(off.real, off.imag - left)
    velocities = (seen.velocities * (end * direction).conj()).real
    return Along(s, left, end * direction, velocities, np.zeros_like(s))


def drift_beside(on_lane: Along, bend: float) -> Floats:
    """Drift of what drives along in a lane beside, a little behind us, less what our bend explains.

    That bend may begin between it and us.
    There the road may be straight still: then its direction leads into the bend.
    """
    back_m = np.minimum(np.maximum(-on_lane.s, 0.0), _BEHIND_M)
    explained = abs(bend) * back_m * (on_lane.ahead * (np.abs(on_lane.left) > _BESIDE_M))
    into = math.copysign(1.0, bend)
    return on_lane.drift - into * np.maximum(np.minimum(into * on_lane.drift, explained), 0.0)


def left_of_what_we_drive(lane: Lane, arc: Arc, seen: Seen) -> Floats:
    """How far obstacles are to the left of the way that we would drive from the plan's end on, along the road.

    That is, if the road goes on in the bend that we drive until beside the plan's end, and then bends evenly to where
    they are; infinite where such a road does not lead.
    """
    end = lane.own_place[-1:]
    (way,) = arc.beside(end)[2]
    off = (seen.places - end) * way.conjugate()
    direction = seen.velocities * way.conjugate()
    turned = np.angle(np.where(direction.real < 0, -direction, direction))
    leads = (off.real > 0.0) & (np.abs(turned) < _MOST_TURN)
    return np.where(leads, off.imag - off.real * np.tan(0.5 * turned), np.inf)


def leaves_lane(  # noqa: PLR0911 - one look after the other
    lane: Lane, arc: Arc, *, returns: bool = False
) -> Looks:
    """Whether the plan looks like a change of lanes, which may have begun, like a bend of the road, or either.

    A change of lanes turns away from straight on and back; or it turns away from the bend that we drive,
    and no longer does so at its end. At the entrance of a bend a plan turns more and more, or goes on, and
    at its end less and less than before: so does a change of lanes in a bend. What turns off the road
    counts as a change, for what drives beside us may go straight on. What follows one circle changes
    nothing: a change of lanes does not within 3 s.

    `returns`: it keeps to what is known of a lane, so that it may return to its line.
    """
    if not lane.curved:
        return Looks.CIRCLE
    if lane.tightest > _TURNS_OFF:
        return Looks.CHANGE
    most_dip, most_turned = _DIPS, _TURNED
    if returns:
        per_m = _RETURNS_M / max(lane.length, _RETURNS_M)
        most_dip, most_turned = max(most_dip, _WAVES * per_m), max(most_turned, _SLOPES * per_m)
    turned = np.angle(lane.own_unit * complex(lane.own_unit[0]).conjugate())
    if abs(float(turned[-1])) < _BACK * (most := largest(np.abs(turned))) and most > most_turned:
        return Looks.CHANGE
    eighths = np.interp(_EIGHTHS * lane.length, lane.own_s, turned)
    quarters = eighths[::2]
    turns = quarters[1:] - quarters[:-1]
    away = np.abs(turns - 0.25 * arc.bend * lane.length)
    most = largest(away)
    has_turned_back = float(away[-1]) < _NO_LONGER * most and most > 0.5 * _TURNED
    if (has_turned_back or dips(eighths, 0.125 * arc.bend * lane.length) > most_dip) and (
        leads_off_m(lane, arc) > _OFF_M
    ):
        return Looks.CHANGE
    fewest, widest = float(turns[turns.argmin()]), float(turns[turns.argmax()])
    turns_now = 0.25 * arc.bend * lane.length
    if min(-min(fewest, turns_now), max(widest, turns_now)) > most_turned:
        return Looks.CHANGE
    if widest - fewest < _EVEN:
        return Looks.CIRCLE
    eases = abs(float(turns[-1])) < _EASES * largest(np.abs(turns)) or float(away[-1]) < _EASES * most
    return Looks.EITHER if eases else Looks.BEND


def leads_off_m(lane: Lane, arc: Arc) -> float:
    """How far aside of the bend that we drive a plan leads, at its middle or at its end, in m."""
    return largest(np.abs(arc.beside(lane.own_place[[len(lane.own_place) // 2, -1]])[1]))


def dips(eighths: Floats, turns_now: float) -> float:
    """How much less a plan turns, the way that it turns most, than both before and after, in rad.

    A bend of a road grows and then fades. Where something else is added, as a change of lanes to the outside,
    it dips.

    Args:
        eighths: how much the plan has turned after each eighth of it, in rad.
        turns_now: how much an eighth turns in the bend that we drive before it, in rad.
    """
    turns = np.empty(len(eighths))
    turns[0] = turns_now
    np.subtract(eighths[1:], eighths[:-1], out=turns[1:])
    if eighths[-1] < 0.0:
        turns = -turns
    before, after = np.maximum.accumulate(turns), np.maximum.accumulate(turns[::-1])[::-1]
    return largest(np.minimum(before, after) - turns)


def on_a_road(
    on_joined: Along, lane: Lane, travel: complex, most_turn: float, speed: float
) -> tuple[Flags, Flags]:
    """Which obstacles a road may lead to from the plan's end, and of which it is no more than a guess.

    The latter may cross our road as well. They have turned much, or the road to them is too sharp for their speed, or
    for the `speed` in m/s with which the plan ends.
    """
    turned = np.abs(np.angle(on_joined.ways * travel.conjugate()))
    way_m = on_joined.s - lane.length
    leads = np.abs(on_joined.left) < _ASIDE_M
    leads &= turned <= np.minimum(_SHARPEST * way_m + _ON_COURSE, most_turn)
    squared = np.maximum(np.square(on_joined.ahead), speed * speed - 2.0 * _SLOWS * way_m)
    held = _HELD / np.maximum(squared, STANDS) * way_m + _ON_COURSE
    return leads, turned > np.minimum(held, _MUCH_TURN)


def in_no_row(seen: Seen, s: Floats, comes: Flags, others: Flags) -> Flags:
    """Which of others do not drive behind one of what comes, as fast, on a road that bends evenly from that one to it.

    `s`: how far along the road each is, in m.
    """
    alone = others.copy()
    for one in sorted(others.nonzero()[0], key=lambda at: float(s[at])):
        before = (comes & ~alone).nonzero()[0]
        way = -unit(np.angle(seen.velocities[before]))
        off = (seen.places[one] - seen.places[before]) * way.conj()
        turned = np.angle(-seen.velocities[one] * way.conj())
        aside_m = off.real * np.tan(0.5 * turned)
        leads = (off.real > 0.0) & (np.abs(turned) < _MOST_APART)
        leads &= np.abs(off.imag - aside_m) < _ROW_M + _UNEVEN * np.abs(aside_m)
        leads &= np.abs(seen.speeds[before] - seen.speeds[one]) < _AS_FAST * seen.speeds[one]
        alone[one] = not leads.any()
    return alone


def _looks_of(lane: Lane, arc: Arc, on_lane: Along, seen: Seen, shown: Shown) -> Looks:
    if shown.looks is Looks.CHANGE:
        return shown.looks
    looks = leaves_lane(lane, arc, returns=shown.near)
    # What looks like a change of lanes may have drawn the lane that it keeps itself, step by step.
    keeps = looks is Looks.BEND or (looks is Looks.EITHER and leads_off_m(lane, arc) <= _KEEPS_OFF_M)
    keeps |= looks < Looks.BEND and runs_beside(lane, on_lane, seen)
    keeps |= looks is Looks.EITHER and leads_to(lane, on_lane, seen)
    return Looks.KEEPS if shown.looks is Looks.KEEPS and keeps else looks


def runs_beside(lane: Lane, on_lane: Along, seen: Seen) -> bool:
    """Whether what comes towards us in the lane beside shows that a plan goes as the road does, to its end.

    There the plan is parallel to that lane, and from there on it follows one circle. In a change of lanes it would be
    aslant to what comes, or in its way.
    """
    near = (on_lane.s > _SHOWN * lane.length) & (on_lane.s < lane.length + _NEAR_M)
    shows = _show_the_road(on_lane, seen, near)
    if not np.count_nonzero(shows):
        return False
    last = min(float(on_lane.s[shows].max()), lane.length)
    turned = np.angle(lane.own_unit * complex(lane.own_unit[0]).conjugate())
    rest = np.interp(np.linspace(last, lane.length, 5), lane.own_s, turned)
    turns = rest[1:] - rest[:-1]
    return float(turns[turns.argmax()] - turns[turns.argmin()]) < _EVEN


def leads_to(lane: Lane, on_lane: Along, seen: Seen) -> bool:
    """Whether what comes towards us beyond a plan's end shows that the road goes on as the plan ends.

    The last quarter of the plan follows one circle, which leads on beside what comes, parallel to it. A change of
    lanes turns less and less there, or is aslant to the road. Where the lane leads far beyond the first that
    comes is a guess, so that others say nothing there.
    """
    comes = (on_lane.s > lane.length) & (on_lane.ahead < -_SHOWS) & (np.abs(on_lane.left) < _LANE_BESIDE_M)
    comes &= on_lane.s <= np.where(comes, on_lane.s, math.inf).min(initial=math.inf) + _ROW_REACHES_M
    if not np.count_nonzero(_show_the_road(on_lane, seen, comes)):
        return False
    turned = np.angle(lane.own_unit * complex(lane.own_unit[0]).conjugate())
    before, half, last = np.interp(np.array((0.75, 0.875, 1.0)) * lane.length, lane.own_s, turned).tolist()
    return bool(abs(last - 2.0 * half + before) < _EVEN_END)


def _show_the_road(on_lane: Along, seen: Seen, among: Flags) -> Flags:
    """Which of them come towards us, in the lane beside and parallel to ours.

    None where one that comes does not.
    """
    comes = among & (on_lane.ahead < -_SHOWS) & (np.abs(on_lane.left) < _LANE_BESIDE_M)
    if not np.count_nonzero(comes):
        return comes
    aslant = np.maximum(np.abs((seen.velocities * on_lane.ways.conj()).imag), seen.unsure)
    shows = comes & (aslant <= _PARALLEL * seen.speeds) & (np.abs(on_lane.left) >= _BESIDE_M)
    return shows if np.count_nonzero(shows) == np.count_nonzero(comes) else np.zeros_like(comes)


def course_of(lane: Lane, arc: Arc, seen: Seen, shown: Shown = NOTHING_SHOWN, speed: float = 0.0) -> Course:
    """Along which ways each obstacle may go on; see above.

    `shown`: what the lane that was kept says of the plan. `speed`: of the plan at its end, in m/s.
    """
    on_lane = along_lane(lane, seen)
    moves = seen.speeds >= STANDS
    none = np.zeros(len(moves), np.bool_)
    on_arc = along_arc(arc, seen)
    if lane.both_ways:
        return Course(
            on_lane, on_arc, np.zeros(len(moves)), none, none, none, ~none, none, none, none, False
        )
    looks = _looks_of(lane, arc, on_lane, seen, shown)
    if looks >= Looks.BEND and abs(arc.bend) > _BENDS:
        on_lane = on_lane._replace(drift=drift_beside(on_lane, arc.bend))
    slow = np.maximum(seen.speeds, STANDS)
    off_lane, off_arc = np.abs(on_lane.drift) / slow, np.abs(on_arc.drift) / slow
    is_along = moves & (np.abs(on_lane.ahead) >= _ALONG * slow) & (np.abs(on_lane.left) < _ASIDE_M)
    changes = looks is Looks.CHANGE
    on_course = np.maximum(_ON_COURSE, _STRAYS / slow)
    as_we, may_change = on_lane.ahead > 0.0, shown.looks is not Looks.KEEPS and looks is not Looks.BEND
    near_m: Floats = np.where((off_lane <= on_course) & (as_we | may_change), _NEAR_M, 0.0)
    near_m = np.maximum(near_m, as_we * (_BESIDE_US_M + seen.halves[:, 0])) * (not changes)
    beyond = moves & (on_lane.s > lane.length + near_m)
    as_the_plan = (off_lane <= 2.0 * _SAME_COURSE) | (np.abs(on_lane.drift) <= _DRIFTS)
    goes_on = is_along & as_the_plan & (looks >= Looks.BEND)  # as the plan does at its end
    strays = beyond & goes_on & (np.abs(on_lane.drift) > _STRAYS_LITTLE)
    along, joined, crosses = on_lane, beyond & ~goes_on, none
    joined &= (off_arc > _SAME_COURSE) | (
        (changes | ~as_we) & (looks < Looks.BEND and abs(arc.bend) > _BENDS)
    )
    if np.count_nonzero(joined):
        on_joined = along_joined(lane, arc, seen, looks)
        leads, crosses = on_a_road(
            on_joined,
            lane,
            complex(lane.own_unit[-1]) * (-1.0 if lane.backward else 1.0),
            _MOST_ROUND if changes else _MOST_TURN,
            speed,
        )
        joined &= leads
        comes = (is_along & (~beyond | goes_on) | joined) & (on_lane.ahead < 0.0)
        crosses = in_no_row(seen, on_joined.s, comes, crosses & joined)
        along = Along._make(np.where(joined, *both) for both in zip(on_joined, on_lane, strict=True))
        is_along |= joined
    along = along._replace(
        drift=along.drift * ~(beyond & ~goes_on)
    )  # the direction of the lane is a guess there
    beyond &= ~goes_on
    keeps_lane = is_along & ~beyond
    off_course = np.where(beyond, 2.0 * _SAME_COURSE, on_course)
    by_arc = moves & (off_arc <= off_course) & (np.abs(on_arc.left) < _ASIDE_M) & (on_arc.ahead != 0.0)
    by_arc &= np.abs(on_arc.s * arc.bend) < _MOST_ROUND
    by_arc &= ~keeps_lane | (off_arc <= off_lane + _SAME_COURSE) | changes
    by_lane = keeps_lane & (off_lane <= on_course) & (off_lane <= off_arc + _SAME_COURSE)
    if not changes:
        beside = (on_lane.ahead > 0) & (np.abs(on_arc.left) > _BESIDE_M)
        by_arc &= ~(by_lane & beside)  # in a bend of the road it bends with us
    if not lane.curved and abs(arc.bend) <= _STRAIGHT_ARC:  # then both are straight on
        by_lane, by_arc = joined, none
    by_lane |= joined
    straight = ~(by_lane | by_arc) | crosses
    # What comes in the plan's way is in no lane beside it: a little aslant, it may keep to that way.
    by_lane |= keeps_lane & ~as_we & (np.abs(on_lane.left) < _BESIDE_M) & (off_lane < _LITTLE_ASLANT)
    bends = np.full(len(moves), arc.bend)
    course = Course(
        along, on_arc, bends, none, by_lane, by_arc, straight, joined, strays, is_along, changes
    )
    return with_own_bends(course, arc, seen) if changes and np.count_nonzero(moves & ~by_arc) else course


def with_own_bends(course: Course, arc: Arc, seen: Seen) -> Course:
    """The same, and what comes towards us may come round a bend of its own, too."""
    own_bend, bends, lefts = comes_round(arc, seen)
    own_bend &= ~course.arc
    on_arc = course.on_arc
    return course._replace(
        on_arc=on_arc._replace(
            left=np.where(own_bend, lefts, on_arc.left),
            ahead=np.where(own_bend, -seen.speeds, on_arc.ahead),
            drift=on_arc.drift * ~own_bend,
        ),
        bends=np.where(own_bend, bends, course.bends),
        own_bend=own_bend,
        arc=course.arc | own_bend,
    )


def comes_round(arc: Arc, seen: Seen) -> tuple[Flags, Floats, Floats]:
    """What comes towards us on a road that bends evenly from where we are, as `lefts_of_roads` has it.

    Returns:
        Which does, how much that road bends in 1/m (its chord is as long as the root of 2 t / k), and how far to its
        left each is in m.
    """
    off = (seen.places - arc.place) * arc.travel.conjugate()
    turned = np.angle(-seen.velocities * arc.travel.conjugate())
    comes = (off.real > _LEAST_AHEAD_M) & (np.abs(turned) < _MOST_TURN) & (seen.speeds >= STANDS)
    comes &= np.abs(turned) > _ASLANT
    aside_m = np.where(comes, off.real * np.tan(0.5 * turned), 0.0)
    bends = 2.0 * aside_m / (np.maximum(off.real, _LEAST_AHEAD_M) ** 2 + aside_m * aside_m)
    comes &= (np.abs(bends) <= _SHARPEST) & (np.abs(off.imag - aside_m) < _ASIDE_M)
    return comes, np.where(bends == 0.0, _STRAIGHT_ARC, bends), off.imag - aside_m


def predicted(
    t_s: Floats, course: Course, counts: tuple[Flags, Flags], lane: Lane, arc: Arc, seen: Seen
) -> Rows:
    """Where obstacles are at these times.

    Those that count if they go on along the lane, and if they do not.
    """
    on_lane, others = counts
    by_lane, by_arc = (on_lane & course.lane).nonzero()[0], (others & course.arc).nonzero()[0]
    straight = (others & course.straight).nonzero()[0]
    which = np.concatenate((by_lane, by_arc, straight))
    later, velocities = t_s[:, None], seen.velocities[which]
    places = seen.places[which] + velocities * later
    yaws = np.empty(places.shape)
    yaws[:] = seen.yaws[which]
    lanes, arcs = len(by_lane), len(by_arc)
    if lanes:
        along = course.along
        # One obstacle's times follow one another in memory, which makes interpolation twice as fast.
        s = along.s[by_lane, None] + along.ahead[by_lane, None] * t_s
        bent, headings = lane.place_at(s, along.left[by_lane, None] + along.drift[by_lane, None] * t_s)
        joined = course.joined[by_lane]
        first = np.where(joined, 0.0, seen.places[by_lane] - bent[:, 0])
        places[:, :lanes] = (bent + first[:, None]).T
        begins = np.where(joined, np.angle(along.ways[by_lane]), headings[:, 0])
        yaws[:, :lanes] += (headings - begins[:, None]).T
    if arcs:
        # Concentric circles: one that is nearer to the middle turns faster. The way is v (e^iwt - 1) / iw.
        at = slice(lanes, lanes + arcs)
        bends, on_arc = course.bends[by_arc], course.on_arc
        rate = bends * on_arc.ahead[by_arc] / np.maximum(1.0 - bends * on_arc.left[by_arc], 0.1)
        rate[np.abs(rate) < _STRAIGHT] = _STRAIGHT
        turned = rate * later
        places[:, at] = seen.places[by_arc] + velocities[at] / (1j * rate) * (unit(turned) - 1.0)
        yaws[:, at] += turned
    return Rows(which, lanes, arcs, places, yaws)
