"""How close a plan comes to obstacles: its swept footprint against predicted boxes, and RSS to what drives ahead.

Obstacles go on at constant velocity. One that drives along the plan's way, either way, follows its bends at constant
speed and keeps drifting sideways as it does now: a straight line would take every car of the lane beside us into ours
in a bend. But a plan that changes lanes bends as well, and what drives beside or behind us in that lane does not: such
an obstacle also goes on, for 2 s, in the bend that we drive now, and has to stay clear of the plan in both cases.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.config.guard_options import GuardOptions
from torchperf_ros.safety.lane import Lane, unit
from torchperf_ros.safety.limits import Finding, Track
from torchperf_ros.safety.obstacles import Complex, Seen

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_STANDS = 0.5  # m/s of an obstacle; slower, its direction is noise
_ALONG = math.cos(math.radians(30.0))  # to the way: such an obstacle drives in a lane of our road
_DRIFTS = 0.35  # m/s across the way: 1 m in 3 s, as much as there is between cars of two lanes
_KNOWN_M = 10.0  # beyond its ends a lane is known for so far
_ASIDE_M = 20.0  # further off the way, an obstacle is not on our road
_MOVES = 0.05  # m/s; what touches a vehicle that is slower has come to it
_FULL_BRAKING = 0.9  # of rss_brake: the plan's braking is found from rounded poses
_SAME_BEND_S = 2.0  # the longer, the sooner a lane change is noticed; the shorter, the later a road's bend may begin
_FEW = 40  # obstacles, of which leaving out the far ones takes as long as it saves
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
    t_s, place = track.t_s, track.x + 1j * track.y
    speeds = _speeds(t_s, place)
    seen = _near(seen, place[0], lane.length, float(t_s[-1]), float(speeds.max()), options)
    count = len(seen.yaws)
    if not count:
        return Closeness()
    others = _Others(lane, seen, t_s)
    front = options.rear_m if lane.backward else options.length_m - options.rear_m
    gap = others.s - others.reach_s - (lane.own_s[:, None] + front)
    beside = np.abs(others.left) - others.reach_left - (0.5 * options.width_m + options.margin_m)
    # What comes from behind in our lane has to keep its distance itself (RSS, rule 1); to change into the way of
    # something in another lane would be our doing.
    follows = others.same & (beside[0] < 0) & (gap[0] < -options.length_m - 2 * others.reach_s)
    ahead = (beside < 0) & (gap > -0.5 * options.length_m - others.reach_s) & ~follows  # its middle beyond ours
    finding = _rss(t_s, speeds, gap, ahead, others, lane.length, options)
    places, yaws, which = others.places, others.yaws, np.arange(count)
    if lane.curved:
        aside = np.flatnonzero(others.along & ~follows & (gap[0] < 0))
        turned = bend * others.speed[aside] * t_s[:, None]
        arcs = seen.velocities[aside] * t_s[:, None] * np.sinc(turned / math.tau) * unit(0.5 * turned)
        places = np.concatenate((places, seen.places[aside] + arcs), axis=1)
        yaws = np.concatenate((yaws, seen.yaws[aside] + turned), axis=1)
        which = np.concatenate((which, aside))
    clearance, moves = _clearances(track, place, widened_m, places, yaws, seen.halves[which], options)
    ours = moves[:, None] & ~(follows | others.elsewhere)[which]
    ours[:, count:] &= (t_s[:-1] <= _SAME_BEND_S)[:, None]
    allowed = np.minimum(np.maximum(clearance[0] - _SLACK_M, 0.0), options.margin_m)
    short = np.where(ours, clearance[1:] - allowed, math.inf)
    if short.min() < 0.0:
        at, column = np.unravel_index(short.argmin(), short.shape)
        value, limit = float(clearance[1 + at, column]), float(allowed[column])
        text = f"comes to {value:.3g} m from an obstacle {t_s[at]:.3g} s from now; {limit:.3g} m have to remain"
        finding = Finding("distance", value, limit, text)
    touches = ours & (clearance[1:] < 0.0)
    ttc_s, needed = _collision(t_s, float(speeds[0]), touches, which, gap[0], ahead[0], others, lane)
    return Closeness(finding, bool(touches.any()), ttc_s, needed)


def _speeds(t_s: Floats, place: Complex) -> Floats:
    """At each pose: the mean of the steps before and after, led on at both ends; exact under constant acceleration."""
    steps = np.abs(place[1:] - place[:-1]) / (t_s[1:] - t_s[:-1])
    half = 0.5 * (steps[1:] - steps[:-1])
    ends = (steps[0] - half[0], steps[-1] + half[-1]) if len(half) else (steps[0], steps[0])
    return np.maximum(np.concatenate((ends[:1], steps[:-1] + half, ends[1:])), 0.0)


def _near(seen: Seen, here: complex, way_m: float, lasts_s: float, speed: float, options: GuardOptions) -> Seen:
    """The obstacles that may matter: circles around them and around all of the plan with its stopping distance."""
    if len(seen.yaws) <= _FEW:
        return seen
    stopping = rss_distance(np.array([speed]), np.zeros(1), seen.response_s.max(), options)[0]
    reach = way_m + stopping + options.length_m + options.width_m + options.margin_m
    far = np.abs(seen.places - here) - np.abs(seen.velocities) * lasts_s - seen.halves.sum(axis=1)
    near = far <= reach
    parts = (seen.places, seen.yaws, seen.halves, seen.velocities, seen.response_s)
    return Seen(*(part[near] for part in parts))


class _Others:
    """Obstacles along a lane, as predicted at some times; shapes [n], or [times, n]."""

    def __init__(self, lane: Lane, seen: Seen, t_s: Floats) -> None:
        s, left, heading = lane.project(seen.places)
        local = seen.velocities * unit(-heading)
        speed = np.abs(local)
        self.stands = (speed < _STANDS) & (not lane.both_ways)
        self.along = ~self.stands & (np.abs(local.real) >= _ALONG * speed) & (np.abs(left) < _ASIDE_M)
        self.along &= not lane.both_ways
        # Beyond the plan's end, and behind us, nothing says where our lane leads. What drives aslant there is in a bend.
        unknown = (s > lane.length + _KNOWN_M) | (s < -_KNOWN_M)
        self.elsewhere = self.along & unknown & (np.abs(local.imag) > _DRIFTS)
        self.along &= ~self.elsewhere
        self.same = self.along & (local.real > 0)
        self.speed = np.where(self.along, local.real, 0.0)  # along the lane
        self.response_s = seen.response_s
        turned = unit(seen.yaws - heading)
        cosine, sine = np.abs(turned.real), np.abs(turned.imag)
        half_length, half_width = seen.halves.T
        self.reach_s = half_length * cosine + half_width * sine
        self.reach_left = half_length * sine + half_width * cosine
        later = t_s[:, None]
        self.s = s + self.speed * later
        self.left = left + np.where(self.along, local.imag, 0.0) * later
        self.places = seen.places + seen.velocities * later
        self.yaws: Floats = seen.yaws  # or by time, where some obstacle follows a bend
        if lane.curved:
            bent, headings = lane.place_at(self.s, self.left)
            self.places = np.where(self.along, seen.places + bent - bent[0], self.places)
            self.yaws = seen.yaws + np.where(self.along, headings - headings[0], 0.0)


def _clearances(
    track: Track, place: Complex, widened_m: float, places: Complex, yaws: Floats, halves: Floats, options: GuardOptions
) -> tuple[Floats, Flags]:
    """How far apart the footprint and boxes [poses, objects] are: now, then between each two poses; whether we move.

    Separating axes: two boxes are apart by at least the largest gap between their shadows on the four directions of
    their sides. From one pose to the next a gap is no smaller than the smaller of both, or 0 if the sides change;
    turning in between by an angle moves no corner by more than its radius times half of that.
    """
    turn, way = track.yaw[1:] - track.yaw[:-1], np.abs(place[1:] - place[:-1])
    half_length, half_width = 0.5 * options.length_m, 0.5 * options.width_m
    offset = half_length - options.rear_m  # of the middle from the reference point
    turning = np.abs(turn)
    bent_m = turning * (0.5 * math.hypot(half_length, half_width) + 0.125 * (way + abs(offset) * turning)) + widened_m
    bent_m = np.concatenate(((0.0,), bent_m))[:, None]
    off = places - (place + offset * unit(track.yaw))[:, None]
    own = unit(-np.concatenate((track.yaw[:1], track.yaw[:-1] + 0.5 * turn)))[:, None]
    their_half_length, their_half_width = halves.T
    if yaws.ndim > 1:
        their_turn = np.abs(yaws[1:] - yaws[:-1])
        radius = np.hypot(their_half_length, their_half_width)
        their_bent_m = their_turn * (0.5 * radius + 0.125 * np.abs(places[1:] - places[:-1]))
        bent_m = bent_m + np.concatenate((0.0 * yaws[:1], their_bent_m))
        yaws = np.concatenate((yaws[:1], 0.5 * (yaws[1:] + yaws[:-1])))
    apart = _apart(
        np.concatenate((off[:1], off[:-1])), off, own, unit(-yaws),
        (half_length, half_width, their_half_length, their_half_width),
    )  # fmt: skip
    return apart - bent_m, way > _MOVES * (track.t_s[1:] - track.t_s[:-1])


def _apart(
    before: Complex, after: Complex, own: Complex, theirs: Complex, halves: tuple[float, float, Floats, Floats]
) -> Floats:
    """The largest gap between two boxes' shadows; `before` and `after`: from our middle to theirs."""
    half_length, half_width, their_half_length, their_half_width = halves
    turned = theirs * own.conj()
    cosine, sine = np.abs(turned.real), np.abs(turned.imag)
    ours_before, ours_after, theirs_before, theirs_after = before * own, after * own, before * theirs, after * theirs
    gaps = (
        _gap(ours_before.real, ours_after.real) - cosine * their_half_length - sine * their_half_width - half_length,
        _gap(ours_before.imag, ours_after.imag) - sine * their_half_length - cosine * their_half_width - half_width,
        _gap(theirs_before.real, theirs_after.real) - cosine * half_length - sine * half_width - their_half_length,
        _gap(theirs_before.imag, theirs_after.imag) - sine * half_length - cosine * half_width - their_half_width,
    )
    return np.maximum(np.maximum(gaps[0], gaps[1]), np.maximum(gaps[2], gaps[3]))


def _gap(before: Floats, after: Floats) -> Floats:
    """The smaller distance of two on one side, less than zero of two on both sides."""
    return np.maximum(np.minimum(before, after), -np.maximum(before, after))


def _rss(
    t_s: Floats, speeds: Floats, gap: Floats, ahead: Flags, others: _Others, way_m: float, options: GuardOptions
) -> Finding | None:
    """Whether a pose is closer than the RSS distance to what stands or drives ahead, and the plan does not brake.

    A plan may be as close as it is if it brakes by `rss_brake` from `actuation_delay_ms` on, until it is no longer too
    close: that is RSS's proper response. Beyond the plan's end nothing says where our lane goes, so what is there
    counts only until the next plan can respond to it.
    """
    safe = rss_distance(speeds[:, None], np.where(others.same, others.speed, 0.0), others.response_s, options)
    lost = speeds[:-1] - speeds[1:]
    enough = np.minimum(
        _FULL_BRAKING * options.rss_brake * np.diff(t_s), 0.5 * speeds[:-1]
    )  # the last step to standing
    idle = np.append(lost < enough, lost[-1] < enough[-1])
    idle &= (speeds > _MOVES) & (t_s >= options.actuation_delay_ms / 1000)
    known = (others.s - others.reach_s <= way_m) | (t_s[:, None] <= others.response_s)
    short = np.where((others.same | others.stands) & ahead & known & idle[:, None], gap - safe, math.inf)
    if short.min() >= 0.0:
        return None
    at, which = np.unravel_index(short.argmin(), short.shape)
    value, limit = float(gap[at, which]), float(safe[at, which])
    text = f"is {value:.3g} m behind an obstacle {t_s[at]:.3g} s from now and does not brake; {limit:.3g} m are safe"
    return Finding("distance", value, limit, text)


def _collision(
    t_s: Floats,
    speed: float,
    touches: Flags,
    which: NDArray[np.intp],
    gap: Floats,
    ahead: Flags,
    others: _Others,
    lane: Lane,
) -> tuple[float, float]:
    """Time to collision in s and the deceleration in m/s^2 that avoids it, NaN where none is foreseen.

    To what is ahead now: gap / closing speed, and closing speed^2 / (2 gap), of which what comes towards us brakes its
    own share; to what the plan touches on its way: when it does, and speed^2 / (2 way until then).
    """
    closing = speed - others.speed
    closes = (others.stands | others.along) & ahead & (closing > 0) & (gap > 0)
    ttc_s = gap[closes] / closing[closes]
    needed = closing[closes] * np.minimum(closing, speed)[closes] / (2 * gap[closes])
    crossed = (touches & ~closes[which]).any(axis=1)
    if crossed.any():
        first = int(crossed.argmax())
        ttc_s = np.append(ttc_s, t_s[first])
        needed = np.append(needed, speed**2 / (2 * max(float(lane.own_s[first]), 0.1)))
    return (float(ttc_s.min()), float(needed.max())) if len(ttc_s) else (math.nan, math.nan)
