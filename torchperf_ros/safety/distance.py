"""How close a plan comes to obstacles.

Its swept footprint against predicted boxes, and RSS to what is ahead.

RSS is Shalev-Shwartz, Shammah and Shashua 2017, On a Formal Model of Safe and Scalable Self-driving Cars.
Of its rules the longitudinal ones are here: definition 1 for one direction, definition 3 for opposite ones.
Sideways, the swept footprint keeps `margin_m` (mu in definition 6) to predicted boxes, which drift as they
do. See `prediction` for these.
"""

import math
from typing import NamedTuple, TypeAlias

import numpy as np

from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Complex, Finding, Floats, Track, largest, unit
from torchperf_ros.safety.obstacles import Seen
from torchperf_ros.safety.prediction import (
    NOTHING_SHOWN,
    STANDS,
    Arc,
    Course,
    Flags,
    Indices,
    Rows,
    Shown,
    certain_drift,
    course_of,
    predicted,
)
from torchperf_ros.settings.safety_options import GuardOptions

_Halves: TypeAlias = tuple[float, float] | Floats  # of the length and of the width, in m

_TOWARDS = math.cos(math.radians(30.0))  # between both directions: such an obstacle comes towards us
_MOVES = 0.05  # m/s; what touches a vehicle that is slower has come to it
_FULL_BRAKING = 0.9  # of rss_brake: the plan's braking is found from rounded poses
_SURE_M = 0.1  # by which what follows us has to be behind us and in our way, at least
_UNSEEN_BEND = 0.001  # 1/m; the plan of a vehicle that hardly moves does not show it
_FEW = 40  # obstacles, of which leaving out the far ones takes as long as it saves
_TOUCHES_M = 0.001  # boxes so close are in contact
_ROUGH_M = 0.5  # that may be missing where obstacles are left out: between the points that were looked at
_SLACK_M = 0.05  # that a plan may come closer to what is already too close


class Closeness(NamedTuple):
    """What was found about obstacles.

    Attributes:
        finding: what is too close, None if nothing is.
        contact: whether the vehicle, by its doing, touches an obstacle, without any margin.
        ttc_s: until the plan touches an obstacle, or the vehicle at its speed one that is ahead; NaN: not
            foreseen.
        needed_deceleration: m/s^2 that avoid this, NaN likewise.
        contact_s, impact: when it touches, infinite if it does not, and how fast both are against each
        other, in m/s.
        meets_s: when it meets what comes towards it and in whose way it ends, if both go on; infinite if nothing does.
        late: whether it is closer to what is ahead than RSS allows, and does not brake.
    """

    finding: Finding | None = None
    contact: bool = False
    ttc_s: float = math.nan
    needed_deceleration: float = math.nan
    contact_s: float = math.inf
    impact: float = 0.0
    meets_s: float = math.inf
    late: bool = False

    @property
    def in_way(self) -> bool:
        """Whether it ends in the way of something that comes towards it, however far."""
        return not math.isinf(self.meets_s)


def stopping_m(speed: Floats, response_s: Floats, accel: float, brake: float) -> Floats:
    """The way in m of a vehicle that responds and stops, as in all of RSS.

    V r + a r^2 / 2 + (v + a r)^2 / (2 b).

    Args:
        speed: v in m/s, at least 0.
        response_s: r, until which it accelerates.
        accel: a in m/s^2 meanwhile; RSS a_max,accel.
        brake: b in m/s^2 from then on; RSS a_min,brake.
    """
    faster = speed + accel * response_s
    return np.asarray(speed * response_s + 0.5 * accel * response_s**2 + faster**2 / (2 * brake))


def rss_same_direction(
    speed: Floats, lead_speed: Floats, response_s: Floats, options: GuardOptions
) -> Floats:
    """The smallest safe distance in m to a vehicle ahead in our direction: RSS, definition 1.

    We respond and brake by `rss_brake`; the vehicle ahead brakes by `rss_lead_brake` (a_max,brake) at once:
    stopping way less v_lead^2 / (2 b_lead), at least 0. Speeds in m/s, at least 0.
    """
    own = stopping_m(speed, response_s, options.rss_accel, options.rss_brake)
    return np.maximum(own - lead_speed**2 / (2 * options.rss_lead_brake), 0.0)


def rss_opposite_direction(
    speed: Floats, other_speed: Floats, response_s: Floats, options: GuardOptions
) -> Floats:
    """The smallest safe distance in m between two that drive towards each other: RSS, definition 3.

    Both respond after the same time, accelerating until then, and brake by `rss_brake` to standstill: the
    sum of both stopping ways. Speeds in m/s, at least 0, each in its own direction.
    """
    own = stopping_m(speed, response_s, options.rss_accel, options.rss_brake)
    return own + stopping_m(other_speed, response_s, options.rss_accel, options.rss_brake)


class Ahead(NamedTuple):
    """A plan from now on, as it is compared with obstacles.

    Its poses, its way, and its speed at each pose in m/s.
    """

    track: Track
    widened_m: float
    lane: Lane
    arc: Arc
    speeds: Floats

    @property
    def lasts_s(self) -> float:
        return float(self.track.t_s[-1])


class Roles(NamedTuple):
    """What obstacles are to us along the plan's way; shapes [n].

    Attributes:
        reach_m, near_m: half of each box along our way; so far aside of it its middle is in our way.
        gap_m: from our front to its rear.
        nearest_m: how far its middle is aside at least, while the plan lasts.
        follows: it comes from behind in our way, and has to keep its distance itself (RSS, rule 1).
        passes: it comes from behind, and overlaps our way with its margin.
        ahead: it is in our way now, and before us.
        allowed_m: so close to it the plan may lead.
    """

    reach_m: Floats
    near_m: Floats
    gap_m: Floats
    nearest_m: Floats
    follows: Flags
    passes: Flags
    ahead: Flags
    allowed_m: Floats


def roles_of(course: Course, lane: Lane, lasts_s: float, seen: Seen, options: GuardOptions) -> Roles:
    """What obstacles are to us; see `Roles`.

    To change into the way of something in another lane would be our doing, so what follows us has to
    overlap our way, the more the further behind it is. What passes beside our lane may be as close as it is
    aside now.
    """
    along, vehicle, margin_m = course.along, options.vehicle, options.margin_m
    reach_m, near_m = _shadow(seen.units * along.ways.conj(), _as_complex(seen.halves))
    near_m = near_m + (0.5 * vehicle.width_m + margin_m)
    front = vehicle.rear_m if lane.backward else vehicle.length_m - vehicle.rear_m
    gap_m = along.s - reach_m - front
    side_m = np.abs(along.left) - near_m  # less than zero: in our way
    nearest_m = _nearest(along.left, along.left + along.drift * course.is_along * lasts_s)
    same = course.is_along & (along.ahead > 0)
    behind = same & (along.s + reach_m < front - vehicle.length_m - _SURE_M)
    passes = behind & (side_m < 0)
    follows = behind & (side_m + 0.5 * _UNSEEN_BEND * along.s * along.s < -margin_m - _SURE_M)
    ahead = (side_m < 0) & (along.s > front - 0.5 * vehicle.length_m) & ~passes
    allowed_m = np.minimum(np.maximum(side_m - _SLACK_M, -margin_m) * behind + margin_m, margin_m)
    return Roles(reach_m, near_m, gap_m, nearest_m, follows, passes, ahead, allowed_m)


def closeness(
    track: Track,
    widened_m: float,
    lane: Lane,
    bend: float,
    seen: Seen,
    options: GuardOptions,
    *,
    known: Shown = NOTHING_SHOWN,
) -> Closeness:
    """Judge a track that begins now, along its lane.

    Args:
        track: the plan from now on.
        widened_m: by how much its footprint may be off, because poses of the plan were left out.
        lane: its way.
        bend: curvature in 1/m that the vehicle drives now.
        seen: the obstacles of now.
        options: vehicle and limits.
        known: of the plan by the lane that the vehicle has kept.
    """
    t_s = track.t_s
    arc = Arc(lane, bend)
    if known.road is not None:
        arc.travel, arc.bend = known.road
    ahead = Ahead(track, widened_m, lane, arc, _speeds(t_s, lane.own_steps))
    seen = _near(ahead, seen, options)
    if not len(seen.yaws):
        return Closeness()
    course = course_of(lane, ahead.arc, seen, known, float(ahead.speeds[-1]))
    roles = roles_of(course, lane, ahead.lasts_s, seen, options)
    rows = predicted(t_s, course, _may_be_close(ahead, course, roles, seen, options), lane, ahead.arc, seen)
    finding = behind = too_close_behind(ahead, course, roles, seen, options)
    contact_s, impact, touches = math.inf, 0.0, None
    clearance, kept = _clearances(
        track, lane, widened_m, rows.places, rows.yaws, seen.halves[rows.which], options
    )
    which = rows.which[kept]
    if len(which):
        moves = np.broadcast_to(
            (lane.own_steps > _MOVES * (t_s[1:] - t_s[:-1]))[:, None], clearance[1:].shape
        )
        touches = clearance[1:] < _TOUCHES_M
        if (touches & ~moves).any():
            moves = moves | _clear_of_standing(
                track, rows.places[:, kept], rows.yaws[:, kept], seen.halves[which], options
            )
        allowed = np.minimum(np.maximum(clearance[0] - _SLACK_M, _TOUCHES_M), roles.allowed_m[which])
        short = np.where(moves, clearance[1:] - allowed, math.inf)
        if short.min() < 0.0:
            at, column = np.unravel_index(short.argmin(), short.shape)
            value, limit = float(clearance[1 + at, column]), float(allowed[column])
            text = (
                f"comes to {value:.3g} m from an obstacle {t_s[at]:.3g} s from now; {limit:.3g} m have to"
                " remain"
            )
            finding = Finding("distance", value, limit, text)
        touches &= moves
        if touches.any():
            at, column = np.unravel_index(touches.argmax(), touches.shape)
            contact_s, impact = float(t_s[at]), _impact(track, rows.places[:, kept[column]], int(at))
    meets_s = math.inf
    if math.isinf(contact_s):
        head_on, contact_s, impact, meets_s = meets_head_on(ahead, course, roles, rows, seen, options)
        finding = finding or head_on
    ttc_s, needed = _collision(ahead, touches, which, course, roles, seen)
    touched = not math.isinf(contact_s)
    return Closeness(finding, touched, ttc_s, needed, contact_s, impact, meets_s, behind is not None)


def _may_be_close(
    ahead: Ahead, course: Course, roles: Roles, seen: Seen, options: GuardOptions
) -> tuple[Flags, Flags]:
    """Which obstacles may come within the margin, if they go on along the lane, and if they do not.

    Few on a road do.

    Along the lane none does whose middle is further aside at all times than both half widths, the margin,
    what our ends swing out, and what the lane bends over both lengths. Others may go anywhere at their
    speed.
    """
    track, lane, vehicle = ahead.track, ahead.lane, options.vehicle
    furthest_m = max(vehicle.rear_m, vehicle.length_m - vehicle.rear_m)
    steps = (track.place[1:] - track.place[:-1]) * lane.own_unit[:-1].conj()
    slips = np.abs(steps.imag) / np.maximum(lane.own_steps, _TOUCHES_M)
    swings_m = furthest_m * min(largest(slips), 1.0) + ahead.widened_m + _ROUGH_M
    bends = lane.tightest if lane.curved else 0.0
    reach_m = furthest_m + roles.reach_m
    room_m = (
        roles.nearest_m
        - roles.near_m
        - (swings_m + bends * (reach_m * reach_m + lane.own_steps.max() ** 2))
    )
    counts = ~roles.follows
    anywhere_m = np.abs(course.along.left) - seen.speeds * ahead.lasts_s - roles.near_m - reach_m - swings_m
    if not lane.curved:
        # What goes straight on keeps its velocity, also beyond the plan's end, where `course.along` knows
        # no drift.
        sideways_m = (
            np.abs(certain_drift((seen.velocities * lane.own_unit[0].conj()).imag, seen)) * ahead.lasts_s
        )
        anywhere_m = np.abs(course.along.left) - sideways_m - roles.near_m - swings_m
    return counts & (room_m < 0.0), counts & ((anywhere_m < 0.0) | course.joined)


def _clear_of_standing(
    track: Track, places: Complex, yaws: Floats, halves: Floats, options: GuardOptions
) -> Flags:
    """Which boxes [poses, n] would never touch the vehicle if it stood where it is now.

    Then driving there was ours.
    """
    here = Track(
        track.t_s, np.full_like(track.place, track.place[0]), np.full_like(track.yaw, track.yaw[0])
    )
    clearance, kept = _clearances(here, Lane(here), 0.0, places, yaws, halves, options)
    clear = np.ones(places.shape[1], np.bool_)
    clear[kept] = np.minimum.reduce(clearance) >= _TOUCHES_M
    return clear


def _impact(track: Track, places: Complex, at: int) -> float:
    """How fast the vehicle and an obstacle are against each other in m/s, from one pose to the next."""
    steps = (track.place[at + 1] - track.place[at]) - (places[at + 1] - places[at])
    return abs(complex(steps)) / float(track.t_s[at + 1] - track.t_s[at])


def _speeds(t_s: Floats, ways: Floats) -> Floats:
    """At each pose.

    The mean of the steps before and after, led on at both ends; exact under constant acceleration.
    """
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
    """The speeds at poses, or what the two steps before or after lead on to.

    At a peak the mean of two is less.
    """
    fastest = speeds.copy()
    np.maximum(fastest[2:], 1.5 * steps[1:] - 0.5 * steps[:-1], out=fastest[2:])
    np.maximum(fastest[:-2], 1.5 * steps[:-1] - 0.5 * steps[1:], out=fastest[:-2])
    return fastest


def _near(ahead: Ahead, seen: Seen, options: GuardOptions) -> Seen:
    """The obstacles that may matter.

    Circles around them and around all of the plan with its stopping distance.
    """
    if len(seen.yaws) <= _FEW:
        return seen
    fastest, response_s = ahead.speeds.max(keepdims=True), seen.response_s.max()
    others = seen.speeds.max(keepdims=True)
    stopping = float(rss_opposite_direction(fastest, others, response_s, options)[0])
    reach = (
        ahead.lane.length + stopping + options.vehicle.length_m + options.vehicle.width_m + options.margin_m
    )
    far = (
        np.abs(seen.places - ahead.lane.own_place[0])
        - seen.speeds * ahead.lasts_s
        - seen.halves.sum(axis=1)
    )
    return Seen._make(part[far <= reach] for part in seen)


def _clearances(
    track: Track,
    lane: Lane,
    widened_m: float,
    places: Complex,
    yaws: Floats,
    halves: Floats,
    options: GuardOptions,
) -> tuple[Floats, Indices]:
    """How far apart the footprint and boxes [poses, objects] are, now and then between each two poses.

    Of which boxes.

    Separating axes: two boxes are apart by at least the largest gap between their shadows on the four
    directions of their sides. From one pose to the next a gap is no smaller than the smaller of both, or 0
    if the sides change; turning in between by an angle moves no corner by more than its radius times half
    of that. Most boxes stay apart by the margin on our own two sides, and are left out.
    """
    turn, way = track.yaw[1:] - track.yaw[:-1], lane.own_steps
    half_length, half_width = size = 0.5 * options.vehicle.length_m, 0.5 * options.vehicle.width_m
    offset = half_length - options.vehicle.rear_m  # of the middle from the reference point
    turning = np.abs(turn)
    bent_m = (
        turning * (0.5 * math.hypot(half_length, half_width) + 0.125 * (way + abs(offset) * turning))
        + widened_m
    )
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
    """Half of a turned box's extent on the other one's two sides.

    L cos + w sin, l sin + w cos, both positive.
    """
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


def too_close_behind(
    ahead: Ahead, course: Course, roles: Roles, seen: Seen, options: GuardOptions
) -> Finding | None:
    """Whether a pose is closer than the RSS distance to what stands or drives ahead, and the plan does not brake.

    A plan may be as close as it is if it brakes by `rss_brake` from `actuation_delay_ms` on, until it is no
    longer too
    close: that is RSS's proper response. Beyond the plan's end nothing says where our lane goes, so what is
    there counts only until the next plan can respond to it.
    """
    t_s, speeds, lane, along = ahead.track.t_s, ahead.speeds, ahead.lane, course.along
    stands = (seen.speeds < STANDS) & (not lane.both_ways)
    leads = (
        ((course.is_along & (along.ahead > 0)) | stands)
        & (roles.nearest_m < roles.near_m)  # in our way at some time
        & ~roles.passes
    ).nonzero()[0]
    if not len(leads):
        return None
    lost = speeds[:-1] - speeds[1:]
    enough = np.minimum(  # the last step to standing is shorter
        _FULL_BRAKING * options.rss_brake * (t_s[1:] - t_s[:-1]), 0.5 * speeds[:-1]
    )
    idle = np.append(lost < enough, lost[-1] < enough[-1])
    idle &= (speeds > _MOVES) & (t_s >= options.actuation_delay_ms / 1000)
    moves = course.is_along[leads]
    later, response_s, speed = t_s[:, None], seen.response_s[leads], along.ahead[leads] * moves
    front = options.vehicle.rear_m if lane.backward else options.vehicle.length_m - options.vehicle.rear_m
    rear = along.s[leads] + speed * later - roles.reach_m[leads]
    gap = rear - (lane.own_s[:, None] + front)
    beside = np.abs(along.left[leads] + along.drift[leads] * moves * later) < roles.near_m[leads]
    # A plan of few poses may have none until then; its first one that could brake counts in any case.
    first_s = t_s.item(min(int(t_s.searchsorted(options.actuation_delay_ms / 1000)), len(t_s) - 1))
    counts = (rear <= lane.length) | (later <= np.maximum(response_s, first_s))
    fastest = _fastest(speeds, lane.own_steps / (t_s[1:] - t_s[:-1]))
    safe = rss_same_direction(fastest[:, None], speed, response_s, options)
    counts &= gap > -0.5 * options.vehicle.length_m - roles.reach_m[leads]  # its middle is ahead of ours
    counts &= beside & idle[:, None]
    short = np.where(counts, gap - safe, math.inf)
    if short.min() >= 0.0:
        return None
    at, which = np.unravel_index(short.argmin(), short.shape)
    value, limit = float(gap[at, which]), float(safe[at, which])
    text = (
        f"is {value:.3g} m behind an obstacle {t_s[at]:.3g} s from now and does not brake; {limit:.3g} m"
        " are safe"
    )
    return Finding("distance", value, limit, text)


def meets_head_on(
    ahead: Ahead, course: Course, roles: Roles, rows: Rows, seen: Seen, options: GuardOptions
) -> tuple[Finding | None, float, float, float]:
    """Whether the plan ends in the way of what comes towards us, closer than both need to stop.

    RSS, definition 3.

    What that is depends on how it goes on: beside the plan's own way, beside the bend that we drive, or
    beside a road that joins the plan's end to it. Also returns when both meet although both brake at once,
    and how fast, infinite and 0 if they do not; and when it meets the first in whose way it ends, if both go on.
    """
    nothing, track, lane, speeds = (None, math.inf, 0.0, math.inf), ahead.track, ahead.lane, ahead.speeds
    end, half_m = (
        complex(lane.own_unit[-1]) * (-1.0 if lane.backward else 1.0),
        0.5 * options.vehicle.length_m,
    )
    which, along, on_arc = rows.which, course.along, course.on_arc
    turned = (rows.places[-1] - rows.places[-2]) * end.conjugate()
    moved_m = np.abs(turned)
    towards = (turned.real < -_TOWARDS * moved_m) & (seen.speeds[which] >= STANDS)
    if course.changes:
        # What goes along a way of ours comes towards us, however that bends until it is here.
        along_road, on_road = slice(0, rows.lanes + rows.arcs), which[: rows.lanes + rows.arcs]
        ahead_m_s = np.where(
            np.arange(len(on_road)) < rows.lanes, along.ahead[on_road], on_arc.ahead[on_road]
        )
        towards[along_road] |= (ahead_m_s < 0.0) & (seen.speeds[on_road] >= STANDS)
    else:
        # A plan that keeps its lane says nothing of the road beyond its end, but of our own bend.
        towards &= (course.is_along & ~(course.joined & ~course.arc) & ~course.strays)[which]
    if lane.length < _MOVES or not np.count_nonzero(towards):
        return nothing
    lasts_s = ahead.lasts_s
    off = (rows.places[-1] - track.place[-1]) * end.conjugate()
    lean = -turned / np.maximum(moved_m, _TOUCHES_M)
    left = off.imag - off.real * lean.imag / (1.0 + np.maximum(lean.real, 0.0))
    lanes, arcs = slice(0, rows.lanes), slice(rows.lanes, rows.lanes + rows.arcs)
    left[lanes] = along.left[which[lanes]] + along.drift[which[lanes]] * lasts_s
    middle = track.place[-1] + (half_m - options.vehicle.rear_m) * lane.own_unit[-1]
    _, aside_m, _ = ahead.arc.beside(np.asarray(middle)[None])
    beside_arc = on_arc.left[which[arcs]] + on_arc.drift[which[arcs]] * lasts_s - aside_m[0]
    left[arcs] = np.where(course.own_bend[which[arcs]], left[arcs], beside_arc)
    front = options.vehicle.rear_m if lane.backward else options.vehicle.length_m - options.vehicle.rear_m
    gap = np.hypot(off.real, off.imag - left) - roles.reach_m[which] - front
    in_way = towards & (off.real > half_m) & (np.abs(left) < roles.near_m[which])
    if not np.count_nonzero(in_way):
        return nothing
    speed, others = speeds[-1:], seen.speeds[which]
    safe = rss_opposite_direction(speed, others, seen.response_s[which], options)
    short = np.where(in_way, gap - safe, math.inf)
    at = int(short.argmin())
    # What comes does move; what does not come may stand, as we do then.
    closing = np.where(in_way, np.maximum(gap, 0.0) / np.maximum(speed + others, _MOVES), math.inf)
    meets_in_s = lasts_s + float(closing.min())
    if short[at] >= 0.0:
        return None, math.inf, 0.0, meets_in_s
    value, limit = float(gap[at]), float(safe[at])
    text = f"ends {value:.3g} m before what comes towards it in its way; both need {limit:.3g} m to stop"
    brake_m = float(speed[0] ** 2 + others[at] ** 2) / (2 * options.rss_brake)
    meets_s, impact = math.inf, 0.0
    if value < brake_m:
        meets_s = lasts_s + max(value, 0.0) / max(float(speed[0] + others[at]), _MOVES)
        impact = float(speed[0] + others[at]) * math.sqrt(max(1.0 - max(value, 0.0) / brake_m, 0.0))
    return Finding("distance", value, limit, text), meets_s, impact, meets_in_s


def _collision(
    ahead: Ahead, touches: Flags | None, which: Indices, course: Course, roles: Roles, seen: Seen
) -> tuple[float, float]:
    """Time to collision in s and the deceleration in m/s^2 that avoids it, NaN where none is foreseen.

    To what is ahead now: gap / closing speed, and closing speed^2 / (2 gap), of which what comes towards us
    brakes its own share; to what the plan touches on its way: when it does, and speed^2 / (2 way until
    then).
    """
    if touches is None and not np.count_nonzero(roles.ahead):
        return math.nan, math.nan
    speed, stands = float(ahead.speeds[0]), (seen.speeds < STANDS) & (not ahead.lane.both_ways)
    closing = speed - course.along.ahead * course.is_along
    closes = (stands | course.is_along) & roles.ahead & (closing > _MOVES) & (roles.gap_m > 0)
    gap, fast = roles.gap_m[closes], closing[closes]
    ttcs_s, needed = (
        (gap / fast).tolist(),
        (fast * np.minimum(fast, speed) / (2 * np.maximum(gap, 0.01))).tolist(),
    )
    if touches is not None and (crossed := (touches & ~closes[which]).any(axis=1)).any():
        first = int(crossed.argmax())
        ttcs_s.append(float(ahead.track.t_s[first]))
        needed.append(speed**2 / (2 * max(float(ahead.lane.own_s[first]), 0.1)))
    return min(ttcs_s, default=math.nan), max(needed, default=math.nan)
