"""A plan as arrays, and its own motion against the limits.

Speed, acceleration, jerk, curvature and steering.
"""

import cmath
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.cdr import header_at
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.safety.odometry import LEAST_TURN, MOST_M, MOST_TURN, USABLE_AGE_S, Motion
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.safety_options import GuardOptions

Floats = NDArray[np.float64]
Complex = NDArray[np.complex128]

# a plan at a limit stays a plan at the limit when its motion is found from rounded positions and stamps
_ROOM = 1.01
_JERK_S = 0.5  # mean over so long: ISO 11270 judges lateral jerk so
_SHORT_STEP_M = 0.1  # over shorter steps a curvature, 1 / m, says more of rounding than of the path
_STANDING = 0.1  # m/s at the end of a plan that ends standing
_ASKEW = 0.5  # rad between a plan's heading and the vehicle's
_ROLLS = 1.0  # m/s; a vehicle that is faster does not turn back at once
# A damaged stamp is years off, and what is braked along such a plan would end beyond what a stamp can say.
_MOST_OFF_S = 3600.0
_MOST_POSES = 64  # of a plan that is compared with obstacles


class Finding(NamedTuple):
    """A check that failed.

    Its name, what it measured, the limit, both in the unit that `text` tells people.
    """

    check: str
    value: float
    limit: float
    text: str


class Track(NamedTuple):
    """Where a plan has the vehicle when.

    Times in s from now on, x + iy in m, headings in rad without leaps; [n].
    """

    t_s: Floats
    place: Complex
    yaw: Floats

    @classmethod
    def of(
        cls, path: TimedPath, ros_now_ns: int, motion: Motion | None, motion_age_s: float = 0.0
    ) -> "Track":
        """The poses of a path; one in the frame of the odometry's child is moved into the odometry's.

        Such a path is seen from where the vehicle was at its `header.stamp`, or, without one, is now. That
        stamp is as much before now as the ROS clock says, less its steps since.
        """
        place = np.ascontiguousarray(path.points[:, :2]).view(np.complex128)[:, 0]
        # The heading of x, y, z, w as two complex numbers; see `yaw_of`.
        squares = np.square(path.turns.view(np.complex128))
        sines, cosines = squares.imag, squares.real
        yaw = np.arctan2(sines[:, 0] + sines[:, 1], cosines[:, 0] - cosines[:, 1])
        turns = yaw[1:] - yaw[:-1]
        # From one side of the half turn to the other it leaps.
        if turns[turns.argmax()] > math.pi or turns[turns.argmin()] < -math.pi:
            yaw = np.concatenate(
                (yaw[:1], yaw[0] + np.cumsum(turns - math.tau * np.rint(turns / math.tau)))
            )
        if motion is not None and path.frame == motion.child_frame != motion.frame:
            at_x, at_y, turned = motion.after(_after_now_s(path, ros_now_ns) + motion_age_s)
            place, yaw = complex(at_x, at_y) + cmath.rect(1.0, turned) * place, yaw + turned
        return cls((path.stamps_ns - ros_now_ns) / NS_PER_S, place, yaw)

    def at(self, t_s: float) -> tuple[complex, float]:
        """Place and heading at a time; before the first pose and after the last as there."""
        later = int(self.t_s.searchsorted(t_s))
        if not 0 < later < len(self.t_s):
            end = 0 if later == 0 else -1
            return self.place.item(end), self.yaw.item(end)
        before_s, place, yaw = (
            self.t_s.item(later - 1),
            self.place.item(later - 1),
            self.yaw.item(later - 1),
        )
        share = (t_s - before_s) / (self.t_s.item(later) - before_s)
        return place + share * (self.place.item(later) - place), yaw + share * (self.yaw.item(later) - yaw)

    def from_now(self) -> "Track":
        """The same from now on, with a pose at now; of a plan that is over, standing for a second."""
        later = int(self.t_s.searchsorted(0.0, side="right"))
        place, yaw = self.at(0.0)
        if later == len(self.t_s):
            return Track(np.array([0.0, 1.0]), np.full(2, place), np.full(2, yaw))
        if later == 0:
            return Track(np.append(0.0, self.t_s), np.append(place, self.place), np.append(yaw, self.yaw))
        begun = Track(
            self.t_s[later - 1 :].copy(), self.place[later - 1 :].copy(), self.yaw[later - 1 :].copy()
        )
        begun.t_s[0], begun.place[0], begun.yaw[0] = 0.0, place, yaw
        return begun

    def thinned(self, reach_m: float) -> tuple["Track", float]:
        """At most 64 of the poses, and how far that moves any point within `reach_m` of the others."""
        if len(self.t_s) <= _MOST_POSES:
            return self, 0.0
        kept = np.unique(np.linspace(0, len(self.t_s) - 1, _MOST_POSES).astype(np.intp))
        few = Track(self.t_s[kept], self.place[kept], self.yaw[kept])
        off = np.abs(np.interp(self.t_s, few.t_s, few.place) - self.place)
        turned = np.abs(np.interp(self.t_s, few.t_s, few.yaw) - self.yaw)
        return few, largest(off + reach_m * turned)

    @property
    def ends_standing(self) -> bool:
        """Whether the vehicle stands at the end.

        Its last speed, led on by its last change, is no more than 0.1 m/s.
        """
        spans = np.diff(self.t_s[-3:])
        steps = np.abs(np.diff(self.place[-3:])) / spans
        change = float(steps[-1] - steps[0])
        return float(steps[-1]) + change * float(spans[-1] / spans.sum()) <= _STANDING


def _after_now_s(path: TimedPath, ros_now_ns: int) -> float:
    """When a path's `header.stamp` is, in s from now on; 0 if it has none, infinite if it is no time."""
    stamp_ns = header_at(path.head, 4, path.order)[0]
    if stamp_ns < 0:
        return math.inf
    return (stamp_ns + path.moved_ns - ros_now_ns) / NS_PER_S if stamp_ns else 0.0


def unreadable(path: TimedPath, ros_now_ns: int, motion: Motion | None = None) -> Finding | None:
    """What makes every other check of a plan impossible.

    That is values that are no numbers, stamps that do not increase or are hours off, and, of a plan that
    is seen from the vehicle, a `header.stamp` that does not say from where.
    """
    places, turns = np.abs(path.points), np.abs(path.turns)
    if not (largest(places.ravel()) <= MOST_M and largest(turns.ravel()) <= MOST_M):  # NaN compares false
        count = int((~(np.maximum(places.max(axis=1), turns.max(axis=1)) <= MOST_M)).sum())
        text = f"has {count} poses with a value that is NaN, infinite or beyond {MOST_M:g}"
        return Finding("finite", count, 0, text)
    lengths = np.sqrt((turns * turns).sum(axis=1))
    if count := int(np.count_nonzero((lengths < LEAST_TURN) | (lengths > MOST_TURN))):
        text = (
            f"has {count} poses with an orientation that is not {LEAST_TURN} to {MOST_TURN} long: no"
            " rotation"
        )
        return Finding("finite", count, 0, text)
    steps = path.stamps_ns[1:] - path.stamps_ns[:-1]
    at = int(steps.argmin())
    if steps[at] <= 0:
        step_s = float(steps[at]) / NS_PER_S
        text = f"stamps pose {at + 1} {step_s:g} s after the one before; each has to be later"
        return Finding("stamps", step_s, 0, text)
    off_s = float(max(abs(path.stamps_ns.item(end) - ros_now_ns) for end in (0, -1))) / NS_PER_S
    if off_s > _MOST_OFF_S:
        text = f"has a stamp {off_s:g} s from now; {_MOST_OFF_S:g} s are allowed"
        return Finding("stamps", off_s, _MOST_OFF_S, text)
    if motion is not None and path.frame == motion.child_frame != motion.frame:
        off_s = abs(_after_now_s(path, ros_now_ns))
        if off_s > USABLE_AGE_S:
            text = f"is seen from the vehicle as it was {off_s:g} s from now, by its header.stamp"
            return Finding("stamps", off_s, USABLE_AGE_S, f"{text}; {USABLE_AGE_S:g} s are allowed")
    return None


def beyond_limits(track: Track, options: GuardOptions) -> list[Finding]:
    """Which parts of a plan's own motion are beyond the limits, in the order of `GUARD_CHECKS`.

    Speed is that of each step between two poses; acceleration its change from step to step, at the steps'
    middles; lateral acceleration is speed times yaw rate; jerk the change of each over 0.5 s; curvature the
    turn per way, or, where a step goes sideways, that of the arc that would lead there; the steering angle
    atan(wheelbase * curvature).
    """
    dt, turn = (part[1:] - part[:-1] for part in (track.t_s, track.yaw))
    moved = track.place[1:] - track.place[:-1]
    moved *= unit(-0.5 * turn - track.yaw[:-1])  # as seen from the heading in between
    along, aside = moved.real, np.abs(moved.imag)
    way = np.abs(along)
    speed = along / dt
    between = 0.5 * (dt[1:] + dt[:-1])
    acceleration = (speed[1:] - speed[:-1]) / between
    changes = np.abs(acceleration)
    backward = speed[1:] + speed[:-1] < 0
    gained = np.where(backward, -acceleration, acceleration) if np.count_nonzero(backward) else acceleration
    lateral = speed * turn / dt
    sideways = np.abs(lateral)
    bends = np.abs(turn) / np.maximum(way, _SHORT_STEP_M)
    tightest = largest(bends)
    if 2.0 * largest(aside) > options.vehicle.max_curvature:
        # y = k s^2 / 2 sideways over a way s, which counts as 1 to 5 m: a step of 1 cm or 50 m says little
        # of a bend
        at_least = np.maximum(way, 1.0)
        bends = np.maximum(bends, 2.0 * aside / (at_least * np.minimum(at_least, 5.0)))
    found = [
        _worst("speed", np.abs(moved) / dt, options.max_speed, "m/s"),
        _worst("acceleration", gained, options.max_acceleration, "m/s^2")
        or _worst("acceleration", -gained, options.max_deceleration, "m/s^2 of braking"),
        _worst("lateral", sideways, options.max_lateral, "m/s^2 sideways"),
    ]
    # The larger values' double is more than any change: most plans are far from a limit of changes.
    if 2.0 * max(largest(changes), largest(sideways)) > options.max_jerk * _JERK_S:
        middles = track.t_s[:-1] + 0.5 * dt
        jerk = (_changes(acceleration, middles[:-1] + 0.5 * between), _changes(lateral, middles))
        found.append(_worst("jerk", np.concatenate(jerk), options.max_jerk, "m/s^3"))
    found.append(_worst("curvature", bends, options.vehicle.max_curvature, "1/m"))
    if 2.0 * math.atan(options.vehicle.wheelbase_m * tightest) > options.max_steering_rate * -largest(
        -between
    ):
        curvature = turn / np.maximum(way, _SHORT_STEP_M)
        steering = np.arctan(options.vehicle.wheelbase_m * curvature * np.sign(along))
        rolling = (way[1:] > _SHORT_STEP_M) & (way[:-1] > _SHORT_STEP_M)
        rate = np.abs(steering[1:] - steering[:-1]) / between * rolling
        found.append(_worst("steering", rate, options.max_steering_rate, "rad/s"))
    return [finding for finding in found if finding is not None]


def unit(angles: Floats) -> Complex:
    """Directions as complex numbers of length 1; numpy's complex exponential takes three times as long."""
    found = np.empty(angles.shape, np.complex128)
    np.cos(angles, out=found.real)
    np.sin(angles, out=found.imag)
    return found


def largest(values: Floats) -> float:
    """0 of none; twice as fast as `max`."""
    return values.item(values.argmax()) if len(values) else 0.0


def _worst(check: str, values: Floats, limit: float, unit: str) -> Finding | None:
    worst = largest(values)
    if worst <= limit * _ROOM:
        return None
    return Finding(
        check, worst, limit, f"{worst:.3g} {unit} at pose {values.argmax()}, the limit is {limit:g}"
    )


def _changes(values: Floats, times_s: Floats) -> Floats:
    """How fast values change, over half a second or all the time there is."""
    if len(values) < 2:  # noqa: PLR2004 - from one to another
        return values[:0]
    span = min(
        len(values) - 1, max(1, round(_JERK_S * (len(values) - 1) / float(times_s[-1] - times_s[0])))
    )
    changes = np.abs(values[span:] - values[:-span])
    return np.asarray(changes / np.maximum(times_s[span:] - times_s[:-span], _JERK_S))


def off_start(track: Track, motion: Motion, age_s: float, options: GuardOptions) -> Finding | None:
    """Whether a plan begins elsewhere than the vehicle is, or is of another time.

    The vehicle goes on from its odometry at constant speed and yaw rate. A plan is where the vehicle is if
    it is no further away now than `start_tolerance_m`, and no further `start_tolerance_s` later, which
    compares speeds as well. It looks where the vehicle does: turned round, its footprint would be that of
    another place. A plan that ends standing lasts for ever.
    """
    first, last = float(track.t_s[0]), float(track.t_s[-1])
    tolerance_s, tolerance_m = options.start_tolerance_s, options.start_tolerance_m
    if first > tolerance_s:
        return Finding(
            "start", first, tolerance_s, f"begins {first:.3g} s from now, {tolerance_s:g} s are allowed"
        )
    if last < tolerance_s and not track.ends_standing:
        text = f"ends {last:.3g} s from now, still moving; it has to last for {tolerance_s:g} s"
        return Finding("start", last, tolerance_s, text)
    times_s = max(first, 0.0), max(first, 0.0) + tolerance_s
    for at_s in times_s:
        x, y, yaw = motion.after(age_s + at_s)
        place, heading = track.at(at_s)
        off, turned = abs(place - complex(x, y)), abs(math.remainder(heading - yaw, math.tau))
        for found, unit_name, limit in ((off, "m", tolerance_m), (turned, "rad", _ASKEW)):
            if found > limit:
                where = (
                    f"from where the vehicle is {at_s:.3g} s from now, {limit:g} {unit_name} are allowed"
                )
                return Finding("start", found, limit, f"is {found:.3g} {unit_name} {where}")
    before, after = (track.at(at_s)[0] for at_s in times_s)
    if (
        motion.speed * ((after - before) * cmath.rect(1.0, -motion.yaw)).real < 0.0
        and abs(motion.speed) > _ROLLS
    ):
        rolls = f"leads the other way than the vehicle rolls, by {motion.speed:.3g} m/s; it stops first"
        return Finding("start", motion.speed, _ROLLS, rolls)
    return None
