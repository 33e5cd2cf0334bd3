"""How close a plan comes to obstacles: its swept footprint against predicted boxes, and RSS to what drives ahead.

Obstacles go on at constant velocity. One that drives along the plan's way, either way, follows its bends at constant
speed and keeps drifting sideways as it does now: a straight line would take every car of the lane beside us into ours
in a bend. But a plan that changes lanes bends as well, and what drives beside or behind us in that lane, or is passed
soon, does not: such an obstacle also goes on, for 2 s (1 s if it comes towards us), in the bend that we drive now, and
has to stay clear of the plan in both cases.
"""

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.config.safety_options import GuardOptions
from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Finding, Track, largest, unit
from torchperf_ros.safety.obstacles import Complex, Seen

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
_Halves: TypeAlias = tuple[float, float] | Floats  # of the length and of the width, in m

_STANDS = 0.5  # m/s of an obstacle; slower, its direction is noise
_ALONG = math.cos(math.radians(30.0))  # to the way: such an obstacle drives in a lane of our road
_DRIFTS = 0.35  # m/s across the way: 1 m in 3 s, as much as there is between cars of two lanes
_ASLANT = 0.002  # rad; a lane's heading is known so well where it is led on round a bend
_KNOWN_M = 10.0  # beyond its ends a lane is known for so far
_ASIDE_M = 20.0  # further off the way, an obstacle is not on our road
_MOVES = 0.05  # m/s; what touches a vehicle that is slower has come to it
_FULL_BRAKING = 0.9  # of rss_brake: the plan's braking is found from rounded poses
_SURE_M = 0.1  # by which what follows us has to be behind us and in our way, at least
_UNSEEN_BEND = 0.001  # 1/m; the plan of a vehicle that hardly moves does not show it
_SAME_BEND_S = 2.0  # the longer, the sooner a lane change is noticed; the shorter, the later a road's bend may begin
_TOWARDS_BEND_S = 1.0  # likewise of what comes towards us, which is far ahead in another bend
_FEW = 40  # obstacles, of which leaving out the far ones takes as long as it saves
_STRAIGHT = 1e-6  # rad/s: 5e-6 rad after 5 s, and enough for a division
_STRAIGHT_ARC = 1e-6  # 1/m: 5 mm aside after 100 m, likewise
_ROUGH_M = 0.1  # that may be missing where obstacles are left out: between the points that were looked at
_ROUGH_WAY_M = 1.8  # of two points 5 m apart, a bend leads so far squared aside: 5^2 / 8
_TOUCHES_M = 0.001  # boxes so close are in contact
_SLACK_M = 0.05  # that a plan may come closer to what is already too close


class Closeness(NamedTuple):
    """What was found about obstacles.

    Attributes:
        finding: what is too close, None if nothing is.
        contact: whether the moving vehicle touches an obstacle, without any margin.
        ttc_s: until the plan touches an obstacle, or the vehicle at its speed one that is ahead; NaN: not foreseen.
        needed_deceleration: m/s^2 that avoid this, NaN likewise.
    """

    finding: Finding | None = None
    contact: bool = False
    ttc_s: float = math.nan
    needed_deceleration: float = math.nan


def rss_distance(speed: Floats, lead_speed: Floats, response_s: Floats, options: GuardOptions) -> Floats:
    """The smallest safe distance in m to a vehicle ahead, of RSS (Shalev-Shwartz et al. 2017, definition 1).

    We respond after `response_s`, accelerating until then by `rss_accel`, and brake by `rss_brake`; the vehicle ahead
    brakes by `rss_lead_brake` at once: v r + a r^2 / 2 + (v + a r)^2 / (2 b) - v_lead^2 / (2 b_lead), at least 0.
    """
    faster = speed + options.rss_accel * response_s
    own = speed * response_s + 0.5 * options.rss_accel * response_s**2 + faster**2 / (2 * options.rss_brake)
    return np.maximum(own - lead_speed**2 / (2 * options.rss_lead_brake), 0.0)


def closeness(track: Track, widened_m: float, lane: Lane, bend: float, seen: Seen, options: GuardOptions) -> Closeness:
    """Judge a track that begins now, along its lane.

    Args:
        track: the plan from now on.
        widened_m: by how much its footprint may be off, because poses of the plan were left out.
        lane: its way.
        bend: curvature in 1/m that the vehicle drives now.
        seen: the obstacles of now.
        options: vehicle and limits.
    """
    t_s = track.t_s
    speeds = _speeds(t_s, lane.own_steps)
    seen = _near(seen, lane.own_place[0], lane.length, float(t_s[-1]), speeds, options)
    if not len(seen.yaws):
        return Closeness()
    others = _Others(lane, float(t_s[-1]), bend, seen, options)
    finding = _rss(t_s, speeds, others, lane, options)
    which, aside = _chosen(track, largest(speeds), widened_m, others, lane, options)
    once, contact, touches = len(which), False, None
    if once + len(aside):
        places, yaws = _predicted(t_s, which, aside, others, lane, seen)
        which = np.concatenate((which, aside))
        clearance, kept = _clearances(track, lane, widened_m, places, yaws, seen.halves[which], options)
        which = which[kept]
    if len(which):
        moves = lane.own_steps > _MOVES * (t_s[1:] - t_s[:-1])
        ours = moves[:, None] & ((t_s[:-1, None] <= others.bends_s[which]) | (kept < once))
        allowed = np.minimum(
            np.maximum(clearance[0] - _SLACK_M, _TOUCHES_M), np.minimum(others.allowed_m, options.margin_m)[which]
        )
        short = np.where(ours, clearance[1:] - allowed, math.inf)
        if short.min() < 0.0:
            at, column = np.unravel_index(short.argmin(), short.shape)
            value, limit = float(clearance[1 + at, column]), float(allowed[column])
            text = f"comes to {value:.3g} m from an obstacle {t_s[at]:.3g} s from now; {limit:.3g} m have to remain"
            finding = Finding("distance", value, limit, text)
        touches = ours & (clearance[1:] < _TOUCHES_M)
        contact = bool(touches.any())
    ttc_s, needed = _collision(t_s, float(speeds[0]), touches, which, others, lane)
    return Closeness(finding, contact, ttc_s, needed)


def _speeds(t_s: Floats, ways: Floats) -> Floats:
    """At each pose: the mean of the steps before and after, led on at both ends; exact under constant acceleration."""
    steps = ways / (t_s[1:] - t_s[:-1])
    speeds = np.empty(len(t_s))
    speeds[0], speeds[-1] = steps[0], steps[-1]
    if len(steps) > 1:
        half = 0.5 * (steps[1:] - steps[:-1])
        np.add(steps[:-1], half, out=speeds[1:-1])
        speeds[0] -= half[0]
        speeds[-1] += half[-1]
    return np.maximum(speeds, 0.0, out=speeds)


def _fastest(speeds: Floats, steps: Floats) -> Floats:
    """The speeds at poses, or what the two steps before or after lead on to: at a peak the mean of two is less."""
    fastest = speeds.copy()
    np.maximum(fastest[2:], 1.5 * steps[1:] - 0.5 * steps[:-1], out=fastest[2:])
    np.maximum(fastest[:-2], 1.5 * steps[:-1] - 0.5 * steps[1:], out=fastest[:-2])
    return fastest


def _near(seen: Seen, here: complex, way_m: float, lasts_s: float, speeds: Floats, options: GuardOptions) -> Seen:
    """The obstacles that may matter: circles around them and around all of the plan with its stopping distance."""
    if len(seen.yaws) <= _FEW:
        return seen
    stopping = rss_distance(speeds.max(keepdims=True), np.zeros(1), seen.response_s.max(), options)[0]
    reach = way_m + stopping + options.vehicle.length_m + options.vehicle.width_m + options.margin_m
    far = np.abs(seen.places - here) - seen.speeds * lasts_s - seen.halves.sum(axis=1)
    return Seen._make(part[far <= reach] for part in seen)


class _Others:
    """Obstacles along a lane, as they are now, while a plan lasts; shapes [n].

    Where two rows belong together, the first is of the lane, and the second of the bend that we drive: of an arc
    through where we are, in the direction of travel.
    """

    def __init__(self, lane: Lane, lasts_s: float, bend: float, seen: Seen, options: GuardOptions) -> None:
        arc = self.arc = _Arc(lane, bend)
        s, left, heading = lane.project(seen.places)
        from_here = arc.from_here(seen.places)
        arc_left, arc_way = arc.beside(from_here)
        along_m, self.lefts = np.array((s, from_here.real)), np.array((left, arc_left))
        self.ways = np.array((unit(heading), arc_way))
        velocity = seen.velocities * self.ways.conj()
        # More than 10 m behind us, what is aslant to where the plan leads back may drive in the bend that we drive.
        behind, aslant = s < -_KNOWN_M, np.abs(velocity.imag) > _DRIFTS
        driven = self.driven = behind & aslant[0] & ~aslant[1]
        if np.count_nonzero(driven) and not lane.both_ways:
            for of_both in (along_m, self.lefts, self.ways, velocity):
                of_both[0, driven] = of_both[1, driven]
        self.s, self.left, ahead = along_m[0], self.lefts[0], velocity[0].real
        drift = velocity.imag  # as much of it as is no noise
        self.drift, self.arc_drift = np.sign(drift) * np.maximum(np.abs(drift) - seen.unsure, 0.0)
        self.speeds, self.response_s = seen.speeds, seen.response_s
        self.stands = seen.speeds < _STANDS
        # Beyond the plan's end, and behind us, nothing says where our lane leads. What is aslant there is in a bend.
        asides = np.abs(self.lefts)
        self.aside = asides[0]
        self.along = (np.abs(ahead) >= _ALONG * seen.speeds) & (self.aside < _ASIDE_M) & ~self.stands
        unknown = behind | (self.s > lane.length + _KNOWN_M)
        self.elsewhere = self.along & unknown & (np.abs(self.drift) > _DRIFTS + _ASLANT * seen.speeds)
        if lane.both_ways:
            self.stands, self.along, self.elsewhere, self.driven = np.zeros((4, len(s)), np.bool_)
        self.along &= ~self.elsewhere
        self.driven &= self.along
        self.same = self.along & (ahead > 0)
        self.speed: Floats = ahead * self.along  # along the lane
        self.bends_s = np.where(self.speed < 0, _TOWARDS_BEND_S, _SAME_BEND_S)
        self.nearest_m = _nearest(self.left, self.left + self.drift * self.along * lasts_s)
        reach, near = _shadow(seen.units * self.ways.conj(), _as_complex(seen.halves))
        near = near + (0.5 * options.vehicle.width_m + options.margin_m)
        self.reach_s, self.near = reach[0], near[0]
        """So far aside of the lane, in m, it is still in our way."""
        self.front = options.vehicle.rear_m if lane.backward else options.vehicle.length_m - options.vehicle.rear_m
        self.gap = self.s - self.reach_s - self.front
        sides = asides - near  # less than zero: in our way
        self.passes = self.follows = self.ahead = np.zeros(len(s), np.bool_)
        self.allowed_m = np.full(len(s), options.margin_m)
        """So close to it the plan may lead; at most the margin, where it is positive."""
        if not np.count_nonzero(sides[0] < _SLACK_M):
            return  # nothing is in our way, or passes closely
        # What comes from behind in our lane has to keep its distance itself (RSS, rule 1); to change into the way of
        # something in another lane would be our doing. What passes beside our lane may be as close as it is aside now.
        # Behind us our lane is where the plan's bend leads back, or the bend that we drive: nobody counts as following
        # us who does so in one of them only.
        side_m = np.maximum(sides[0], sides[1])
        noses = along_m + reach
        at_rear = noses < self.front - options.vehicle.length_m - _SURE_M
        behind = self.same & at_rear[0] & (at_rear[1] | (noses[0] < -_KNOWN_M))
        self.passes = behind & (side_m < 0)
        self.follows = behind & (side_m + 0.5 * _UNSEEN_BEND * self.s * self.s < -options.margin_m - _SURE_M)
        self.allowed_m = np.maximum(side_m - _SLACK_M, -options.margin_m) * behind + options.margin_m
        self.ahead = (sides[0] < 0) & (self.s > self.front - 0.5 * options.vehicle.length_m) & ~self.passes


class _Arc:
    """The bend that the vehicle drives now, through where it is, in its direction of travel."""

    def __init__(self, lane: Lane, bend: float) -> None:
        self.place = complex(lane.own_place[0])
        self.travel, self.bend = complex(lane.own_unit[0]), bend
        if lane.backward:
            self.travel, self.bend = -self.travel, -bend
        if abs(self.bend) < _STRAIGHT_ARC:
            self.bend = _STRAIGHT_ARC

    def from_here(self, places: Complex) -> Complex:
        """Points x + iy as they are seen from where it begins, ahead as real part."""
        return (places - self.place) * self.travel.conjugate()

    def beside(self, from_here: Complex) -> tuple[Floats, Complex]:
        """Of such points: how far they are to its left, and its direction where they are."""
        turned = from_here * (1j * self.bend) + 1.0
        radius = np.abs(turned)  # from the centre, as a share of the arc's
        return (1.0 - radius) / self.bend, turned * (self.travel / np.maximum(radius, _STRAIGHT_ARC))


def _chosen(
    track: Track, speed: float, widened_m: float, others: _Others, lane: Lane, options: GuardOptions
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Which obstacles may come close to a plan, whose largest speed is given: along the lane, and in the bend of now.

    An obstacle whose distance to the lane is, at all times, larger by the margin than that of any point of the
    footprint does not come closer than the margin; likewise to the bend of now. Few of the others on a road are left.
    """
    t_s = track.t_s
    lasts_s = float(t_s[-1])
    # Between two poses it drives an arc.
    rough_m = widened_m + _ROUGH_M + 0.125 * largest(np.abs((track.yaw[1:] - track.yaw[:-1]) * lane.own_steps))
    ends_m = np.array([[options.vehicle.length_m - options.vehicle.rear_m], [-options.vehicle.rear_m]])
    ends = lane.own_place + ends_m * lane.own_unit
    off = ends - np.interp(lane.own_s + (-ends_m if lane.backward else ends_m), lane.s, lane.place)
    # What is not along the lane goes straight on, in any direction to it.
    loose_m = others.aside - others.speeds * lasts_s - others.reach_s * ~others.stands
    room = np.where(others.along, others.nearest_m, loose_m) - others.near
    room -= float(np.abs(off).max()) + rough_m
    if lane.curved:
        # Of a point x along a tangent, a lane that bends by k, within 1 / 2k, is nearer by k x^2 at most.
        room -= lane.tightest * (others.reach_s * others.reach_s + _ROUGH_WAY_M**2)
        furthest = np.maximum(others.aside, np.abs(others.left + others.drift * lasts_s))
        room[~(furthest <= (0.5 / lane.tightest if lane.turn < math.pi else -1.0))] = -1.0
    else:
        room -= 2.0 * largest(np.abs(others.arc.from_here(lane.own_place).imag))
    counts = ~(others.follows | others.elsewhere)
    which = (counts & ~others.driven & (room < 0.0)).nonzero()[0]
    if not lane.curved and not np.count_nonzero(others.driven):
        return which, which[:0]
    aside = others.driven
    if lane.curved:
        soon_m = np.maximum(speed - others.speed, 0.0) * others.bends_s
        aside = counts & others.along & (others.gap < soon_m)
    soon = t_s[: int(t_s.searchsorted(_SAME_BEND_S, side="right")) + 1]
    lasts_s, arc, left = float(soon[-1]), others.arc, others.lefts[1]
    way, turned = others.speeds * lasts_s, others.ways[0] * others.ways[1].conj()
    # Its circle has another middle than ours; its box was measured along the lane, which is turned to the bend.
    other_m = np.abs(arc.bend**2 * left) * way * (0.5 * way + others.reach_s) + others.reach_s * np.abs(turned.imag)
    room = _nearest(left, left + others.arc_drift * lasts_s) - other_m - others.near
    room -= float(np.abs(arc.beside(arc.from_here(ends[:, : len(soon)]))[0]).max()) + rough_m
    known = np.abs(arc.bend * left) <= 0.5  # noqa: PLR2004
    return which, (aside & ~(known & (room >= 0.0))).nonzero()[0]


def _predicted(
    t_s: Floats, which: NDArray[np.intp], aside: NDArray[np.intp], others: _Others, lane: Lane, seen: Seen
) -> tuple[Complex, Floats]:
    """Places [poses, n], and headings [n], or [poses, n] if some follow a bend: along the lane, then in that of now."""
    later, every = t_s[:, None], np.concatenate((which, aside))
    velocities = seen.velocities[every]
    places = seen.places[every] + velocities * later
    columns = others.along[which].nonzero()[0] if lane.curved else which[:0]
    if not len(columns) and not len(aside):
        return places, seen.yaws[every]
    yaws = np.empty(places.shape)
    yaws[:] = seen.yaws[every]
    if len(columns):
        along = which[columns]
        # One obstacle's times follow one another in memory, which makes interpolation twice as fast.
        s = others.s[along, None] + others.speed[along, None] * t_s
        bent, headings = lane.place_at(s, others.left[along, None] + others.drift[along, None] * t_s)
        places[:, columns] = (bent + (seen.places[along] - bent[:, 0])[:, None]).T
        yaws[:, columns] += (headings - headings[:, :1]).T
    if len(aside):
        rate = others.arc.bend * others.speed[aside]  # rad/s; of an arc, velocity (e^iwt - 1) / iw is the way
        rate[np.abs(rate) < _STRAIGHT] = _STRAIGHT
        turned, once = rate * later, len(which)
        places[:, once:] = seen.places[aside] + velocities[once:] / (1j * rate) * (unit(turned) - 1.0)
        yaws[:, once:] += turned
    return places, yaws


def _clearances(
    track: Track, lane: Lane, widened_m: float, places: Complex, yaws: Floats, halves: Floats, options: GuardOptions
) -> tuple[Floats, NDArray[np.intp]]:
    """How far apart the footprint and boxes [poses, objects] are, now and then between each two poses; of which boxes.

    Separating axes: two boxes are apart by at least the largest gap between their shadows on the four directions of
    their sides. From one pose to the next a gap is no smaller than the smaller of both, or 0 if the sides change;
    turning in between by an angle moves no corner by more than its radius times half of that. Most boxes stay apart by
    the margin on our own two sides, and are left out.
    """
    turn, way = track.yaw[1:] - track.yaw[:-1], lane.own_steps
    half_length, half_width = size = 0.5 * options.vehicle.length_m, 0.5 * options.vehicle.width_m
    offset = half_length - options.vehicle.rear_m  # of the middle from the reference point
    turning = np.abs(turn)
    bent_m = turning * (0.5 * math.hypot(half_length, half_width) + 0.125 * (way + abs(offset) * turning)) + widened_m
    bent_m = bent_m[:, None]
    off = places - (lane.own_place + offset * lane.own_unit)[:, None]
    heading = track.yaw[:-1] + 0.5 * turn
    own = unit(-heading)[:, None]
    middles = yaws
    if yaws.ndim > 1:
        their_turn = np.abs(yaws[1:] - yaws[:-1])
        radius = np.hypot(halves[:, 0], halves[:, 1])
        bent_m = bent_m + their_turn * (0.5 * radius + 0.125 * np.abs(places[1:] - places[:-1]))
        middles = 0.5 * (yaws[1:] + yaws[:-1])
    # Shadows are no longer than these, which cost no sine: cos a <= 1, sin a <= a.
    half_turns = (middles - heading[:, None]) * (1.0 / math.pi)
    sine = np.abs(half_turns - np.rint(half_turns)) * math.pi
    shadow = halves[:, 0] + sine * halves[:, 1], halves[:, 1] + sine * halves[:, 0]
    apart = np.maximum(*_gaps(off[:-1], off[1:], own, *shadow, size))
    apart -= bent_m
    kept = (np.minimum.reduce(apart) < options.margin_m).nonzero()[0]
    if not len(kept):
        return apart[:, kept], kept
    off, halves = off[:, kept], halves[kept]
    if yaws.ndim > 1:
        bent_m, middles = bent_m[:, kept], np.concatenate((yaws[:1, kept], middles[:, kept]))
    else:
        middles = middles[kept]
    theirs = unit(-middles)
    own = np.concatenate((lane.own_unit[:1, None].conj(), own))
    before, turned = np.concatenate((off[:1], off[:-1])), theirs * own.conj()
    clearance = np.maximum(
        np.maximum(*_gaps(before, off, own, *_shadow(turned, _as_complex(halves)), size)),
        np.maximum(*_gaps(before, off, theirs, *_shadow(turned, complex(*size)), halves.T)),
    )
    clearance[1:] -= bent_m
    return clearance, kept


def _as_complex(halves: Floats) -> Complex:
    """Half lengths as real part and half widths as imaginary part, of an array [n, 2]."""
    return np.ascontiguousarray(halves).view(np.complex128)[:, 0]


def _shadow(turned: Complex, halves: Complex | complex) -> tuple[Floats, Floats]:
    """Half of a turned box's extent on the other one's two sides: l cos + w sin, l sin + w cos, both positive."""
    turned = np.abs(turned.view(np.float64)).view(np.complex128)
    return (turned.conj() * halves).real, (turned * halves).imag


def _gaps(
    before: Complex, after: Complex, sides: Complex, along: Floats, across: Floats, halves: _Halves
) -> tuple[Floats, Floats]:
    """Gaps between two boxes' shadows on the sides of one, whose halves are given, and whose turn back is `sides`."""
    before, after = before * sides, after * sides
    half_length, half_width = halves
    along, across = along + half_length, across + half_width
    return _nearest(before.real, after.real) - along, _nearest(before.imag, after.imag) - across


def _nearest(before: Floats, after: Floats) -> Floats:
    """The smaller distance of two on one side, less than zero of two on both sides."""
    return np.maximum(np.minimum(before, after), -np.maximum(before, after))


def _rss(t_s: Floats, speeds: Floats, others: _Others, lane: Lane, options: GuardOptions) -> Finding | None:
    """Whether a pose is closer than the RSS distance to what stands or drives ahead, and the plan does not brake.

    A plan may be as close as it is if it brakes by `rss_brake` from `actuation_delay_ms` on, until it is no longer too
    close: that is RSS's proper response. Beyond the plan's end nothing says where our lane goes, so what is there
    counts only until the next plan can respond to it.
    """
    in_way = others.nearest_m < others.near  # at some time
    leads = ((others.same | others.stands) & in_way & ~others.passes).nonzero()[0]
    if not len(leads):
        return None
    lost = speeds[:-1] - speeds[1:]
    enough = np.minimum(  # the last step to standing is shorter
        _FULL_BRAKING * options.rss_brake * (t_s[1:] - t_s[:-1]), 0.5 * speeds[:-1]
    )
    idle = np.append(lost < enough, lost[-1] < enough[-1])
    idle &= (speeds > _MOVES) & (t_s >= options.actuation_delay_ms / 1000)
    later, response_s, speed = t_s[:, None], others.response_s[leads], others.speed[leads]
    rear = others.s[leads] + speed * later - others.reach_s[leads]
    gap = rear - (lane.own_s[:, None] + others.front)
    beside = np.abs(others.left[leads] + (others.drift * others.along)[leads] * later) < others.near[leads]
    known = (rear <= lane.length) | (later <= response_s)
    safe = rss_distance(_fastest(speeds, lane.own_steps / (t_s[1:] - t_s[:-1]))[:, None], speed, response_s, options)
    not_behind = gap > -0.5 * options.vehicle.length_m - others.reach_s[leads]  # its middle is ahead of ours
    counts = beside & not_behind & known & idle[:, None]
    short = np.where(counts, gap - safe, math.inf)
    if short.min() >= 0.0:
        return None
    at, which = np.unravel_index(short.argmin(), short.shape)
    value, limit = float(gap[at, which]), float(safe[at, which])
    text = f"is {value:.3g} m behind an obstacle {t_s[at]:.3g} s from now and does not brake; {limit:.3g} m are safe"
    return Finding("distance", value, limit, text)


def _collision(
    t_s: Floats, speed: float, touches: Flags | None, which: NDArray[np.intp], others: _Others, lane: Lane
) -> tuple[float, float]:
    """Time to collision in s and the deceleration in m/s^2 that avoids it, NaN where none is foreseen.

    To what is ahead now: gap / closing speed, and closing speed^2 / (2 gap), of which what comes towards us brakes its
    own share; to what the plan touches on its way: when it does, and speed^2 / (2 way until then).
    """
    if touches is None and not np.count_nonzero(others.ahead):
        return math.nan, math.nan
    closing = speed - others.speed
    closes = (others.stands | others.along) & others.ahead & (closing > _MOVES) & (others.gap > 0)
    gap, fast = others.gap[closes], closing[closes]
    ttcs_s, needed = (gap / fast).tolist(), (fast * np.minimum(fast, speed) / (2 * np.maximum(gap, 0.01))).tolist()
    if touches is not None and (crossed := (touches & ~closes[which]).any(axis=1)).any():
        first = int(crossed.argmax())
        ttcs_s.append(float(t_s[first]))
        needed.append(speed**2 / (2 * max(float(lane.own_s[first]), 0.1)))
    return min(ttcs_s, default=math.nan), max(needed, default=math.nan)
