"""Whether what is in the vehicle's way comes so near that only braking now avoids it.

Points that lie together are one thing. From one message to the next it is found again, and its speed is
measured: a car ahead at the vehicle's own speed is none that it runs into. What has been seen for a moment
only counts as slow as the measurement allows, which at first is standing.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.safety.corridor import Corridor
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.safety.sensor_points import Floats, Points
from torchperf_ros.settings.safety_options import EmergencyOptions

_CELL_M: Final = 0.5
_NEAR_CELLS: Final = 2  # things are one where less than three cells, 1.5 m, lie between them
_ROW: Final = 1 << 20  # cells of a row of the grid, as keys count them
_NEIGHBOURS: Final = np.array(
    [
        dx * _ROW + dy
        for dx in range(_NEAR_CELLS + 1)
        for dy in range(-_NEAR_CELLS, _NEAR_CELLS + 1)
        if (dx, dy) > (0, 0)
    ]
)
_NEAREST: Final = 3  # points whose middle one is where a thing begins: one alone may be noise
# so far beside the corridor things are followed, so that their speed is known when they enter
_BESIDE_M: Final = 2.0
_LONGEST_M: Final = 7.0  # along the way; what is longer, as a wall, has no one place there
_WINDOW_S: Final = 0.5  # over which speeds are measured
_UNSURE_M: Final = 0.25  # where a thing begins may jump by so much, from one point to another one of it
_FASTEST_M_S: Final = 50.0
_GATE_M: Final = 1.5
_BRAKES_M_S2: Final = 1.5  # less than this is not seen as braking
_HARDEST_M_S2: Final = 14.0
# Braking that has just begun shows in the last 0.3 s, if they have 6 places: from 6 m/s^2 on, and from
# 3.5 times what their noise shows as braking.
_LATE_S, _FEWEST_PLACES, _HARD_M_S2, _OVER_NOISE = 0.301, 6, 6.0, 3.5
_BRAKING_AFTER_S: Final = 0.35  # before that, noise looks the same
_CROSSES_M_S: Final = 3.0  # a thing that moves so fast across the way is expected to go on so
_CROSSES_S: Final = 0.2
_TAIL_M: Final = 30.0  # no further away than this is the end of a thing that crosses
_MISSED_S, _MISSED = 0.2, 2.0  # for so long, and so many messages, a thing may not be shown
_LONGEST_WAIT_S: Final = 0.2
# so much further than it has to brake the vehicle looks, so that speeds are known by then
_LOOKS_S: Final = 1.0
_LEAST_LEFT_M: Final = 0.3
# Drops of rain and spray are seen near the vehicle. They look like a thing of a few points that nothing has
# shown before, in the next message by chance again: less than so many times `min_points`, so many messages more.
# Few points of a leg, a dog or a pole lie closer together than drops do: those need no more messages.
_NEAR_M, _FEW, _MORE_SCANS, _CLOSE_M = 4.0, 2, 2, 0.6
_STEPS_KEPT: Final = 10  # between messages, from which is measured how evenly they come
_JITTERS: Final = 2.0  # delays differ by so much of the mean distance of steps from their median
_STEPS: Final = 40
_NONE: Final = np.zeros(0)


@dataclass(slots=True)
class Thing:
    """What points that lie together belong to.

    Attributes:
        x, y: where it begins, and its middle across, in the vehicle's axes, in m.
        way_m: how far the vehicle moves until it is there.
        long_m: its length along the way; `sides_m`: the least and the most of its points to the left, in m.
        size_m: how far apart its points lie, along x or y; `points`: how many it has.
        times_s, places: of the messages that showed it, in the window, and where it was, in axes that stay.
        messages: how many have shown it, also before the window.
        threatens: in how many messages in a row it did; `shown`: the points that they had of it.
    """

    x: float
    y: float
    way_m: float
    long_m: float
    sides_m: tuple[float, float]
    size_m: float
    points: int
    times_s: list[float]
    places: list[complex]
    messages: int = 1
    threatens: int = 0
    shown: int = 0

    @property
    def known_s(self) -> float:
        return self.times_s[-1] - self.times_s[0]

    def velocity(self, last_s: float = math.inf) -> complex:
        """In axes that stay, m/s: the slope of the straight line through its places (least squares)."""
        first = next(i for i, at_s in enumerate(self.times_s) if at_s >= self.times_s[-1] - last_s)
        times, places = np.array(self.times_s[first:]), np.array(self.places[first:])
        times -= times.mean()
        return complex((times * places).sum() / max(float((times * times).sum()), 1e-12))

    def braking(self, along: complex) -> float:
        """How hard it brakes in the direction `along`, in m/s^2, by the parabola through its places.

        0: it does not.
        """
        if self.known_s < _BRAKING_AFTER_S or len(self.times_s) < _FEWEST_PLACES:
            return 0.0
        times = np.array(self.times_s) - self.times_s[-1]
        moved = (np.array(self.places) * along.conjugate()).real
        found = -2.0 * float(np.polyfit(times, moved, 2)[0])
        # The whole window shows only half of a braking that began in its middle. The last of it shows it
        # sooner, but noise alone may look like braking there: only what exceeds that by far counts.
        late = times >= -_LATE_S
        if (count := np.count_nonzero(late)) >= _FEWEST_PLACES:
            lately = -2.0 * float(np.polyfit(times[late], moved[late], 2)[0])
            # Third differences leave noise only. By least squares, a parabola through n places over T seconds
            # has a second derivative with a standard deviation of about 27 / (T^2 sqrt(n)) times theirs.
            noise_m = float(np.median(np.abs(np.diff(moved, 3)))) / 3.0
            noise_m_s2 = 27.0 * noise_m / (float(times[late][0]) ** 2 * math.sqrt(count))
            if lately > max(_HARD_M_S2, _OVER_NOISE * noise_m_s2):
                found = max(found, lately)
        return min(found, _HARDEST_M_S2) if found > _BRAKES_M_S2 else 0.0


class _Follower:
    """Finds the things of a message again that earlier ones have shown."""

    def __init__(self) -> None:
        self.things: list[Thing] = []
        self._missed: list[Thing] = []  # that the last messages did not show, but some just before them

    def look(self, found: list[Thing], now_s: float, passed_s: float) -> None:
        """Give the things of a message their past.

        Each takes that of the one that was to be expected nearest to it.
        """
        oldest_s = now_s - _MISSED_S - _MISSED * passed_s
        before = [one for one in (*self.things, *self._missed) if one.times_s[-1] >= oldest_s]
        pairs = []
        for old in before:
            since_s = now_s - old.times_s[-1]
            settled = old.known_s > 0.0
            expected = old.places[-1] + (old.velocity() * since_s if settled else 0.0)
            gate_m = _GATE_M + (_UNSURE_M / max(old.known_s, 0.05) if settled else _FASTEST_M_S) * since_s
            for new in found:
                off_m = abs(new.places[-1] - expected)
                if off_m <= gate_m:
                    pairs.append((off_m, id(old), id(new), old, new))
        used: set[int] = set()
        for _, old_id, new_id, old, new in sorted(pairs, key=lambda pair: pair[0]):
            if old_id in used or new_id in used:
                continue
            used |= {old_id, new_id}
            first = next(
                (i for i, at_s in enumerate(old.times_s) if at_s >= now_s - _WINDOW_S), len(old.times_s)
            )
            new.times_s, new.places = old.times_s[first:] + new.times_s, old.places[first:] + new.places
            new.messages += old.messages
            new.threatens, new.shown = old.threatens, old.shown
        self.things, self._missed = found, [one for one in before if id(one) not in used]
        for one in self._missed:
            one.threatens = one.shown = 0


class Approach:
    """Follows what one sensor shows in the vehicle's way, and says what threatens."""

    def __init__(self) -> None:
        """Nothing has been seen yet."""
        self.forget()

    def forget(self) -> None:
        """As if nothing had been seen."""
        self._in_way, self._beside = _Follower(), _Follower()
        self._points = Points(_NONE, _NONE, 0, 0, 0)  # of the last message
        self._at_s, self._place, self._yaw = -math.inf, 0j, 0.0
        # when the last message came, and how long after the one before
        self._received_s = self._waited_s = 0.0
        self._passed_s: deque[float] = deque(maxlen=_STEPS_KEPT)  # between the last messages
        self._every_s = self._jitter_s = 0.0  # usually so much, and by how much their delays differ

    def look(
        self,
        points: Points,
        way: Corridor,
        motion: Motion | None,
        options: EmergencyOptions,
        now_ns: int,
        late_ns: int = 0,
        brakes: float = 0.0,
    ) -> Thing | None:
        """What threatens most among the points of a message, None if nothing does.

        `way` is the vehicle's corridor.

        `late_ns`: so much longer than others it was on its way, while the vehicle drove on. Were its
        receipt taken for when it was measured, growing delays would show what stands as driving away.
        `brakes`: by how many m/s^2 the vehicle brakes already; what it stops before by that is no threat.
        """
        late_s, speed = late_ns / NS_PER_S, 0.0 if motion is None else motion.speed
        received_s = now_ns / NS_PER_S
        now_s, is_first = received_s - late_s, not math.isfinite(self._at_s)
        passed_s = 0.0 if is_first else max(now_s - self._at_s, 0.0)
        self._waited_s, self._received_s = 0.0 if is_first else received_s - self._received_s, received_s
        # The vehicle moves on in axes that stay, by its speed and yaw rate: a place that jumps moves nothing.
        turned = 0.0 if motion is None else motion.yaw_rate * passed_s
        heading = self._yaw + 0.5 * turned
        self._place += speed * passed_s * complex(math.cos(heading), math.sin(heading))
        self._yaw += turned
        if not is_first:
            self._passed_s.append(passed_s)
            steps_s = np.array(self._passed_s)
            self._every_s = float(np.median(steps_s))
            self._jitter_s = _JITTERS * float(np.abs(steps_s - self._every_s).mean())
        self._at_s = now_s
        far_m, wide = (
            way.length_m + abs(speed) * (_LOOKS_S + late_s),
            replace(way, margin_m=way.margin_m + _BESIDE_M),
        )
        # an arc leads no further than it is long
        reach_m = far_m + way.ahead_m + wide.half_width_m + wide.margin_m
        x, y = points.x, points.y
        self._points = points
        before = ((x < 0) if way.backwards else (x > 0)) & (x * x + y * y <= reach_m * reach_m)
        x, y = x[before], y[before]
        wide_way_m = wide.way_m(x, y)
        near = wide_way_m <= far_m
        x, y, wide_way_m = x[near], y[near], wide_way_m[near]
        way_m = way.way_m(x, y)
        inside = way_m <= far_m
        least = min(options.min_points, max(points.most, 1))
        self._beside.look(self._things(x, y, wide_way_m, now_s, least), now_s, passed_s)
        self._in_way.look(self._things(x[inside], y[inside], way_m[inside], now_s, least), now_s, passed_s)
        worst = None
        for thing in self._in_way.things:
            if self._threatens(thing, way, options, abs(speed), late_s, brakes):
                thing.threatens, thing.shown = (
                    thing.threatens + 1,
                    thing.shown + min(thing.points, points.most),
                )
                if worst is None or (thing.threatens, -thing.way_m) > (worst.threatens, -worst.way_m):
                    worst = thing
            else:
                thing.threatens = thing.shown = 0
        return worst

    def _things(self, x: Floats, y: Floats, way_m: Floats, now_s: float, least: int) -> list[Thing]:
        turn = complex(math.cos(self._yaw), math.sin(self._yaw))
        things = []
        for members in together(x, y):
            if len(members) < least:
                continue
            ordered = members[np.argsort(way_m[members])]
            first = ordered[min(_NEAREST, len(ordered)) // 2]
            at_x, at_m = float(x[first]), float(way_m[first])
            at_y = float(y[members].mean())  # the nearest may be any of a flat side's
            long_m = float(way_m[ordered[-1]]) - at_m
            sides_m = float(y[members].min()), float(y[members].max())
            place = self._place + complex(at_x, at_y) * turn
            size_m = max(sides_m[1] - sides_m[0], float(np.ptp(x[members])))
            things.append(Thing(at_x, at_y, at_m, long_m, sides_m, size_m, len(members), [now_s], [place]))
        return things

    def _threatens(
        self,
        thing: Thing,
        way: Corridor,
        options: EmergencyOptions,
        speed: float,
        late_s: float,
        brakes: float,
    ) -> bool:
        """Whether the vehicle can only just stop before it, or cannot, if it goes on as it moves."""
        known = self._known(thing)
        few = thing.way_m < _NEAR_M and thing.points < _FEW * options.min_points
        scattered = few and thing.size_m > _CLOSE_M
        if scattered and max(known.messages, thing.messages) < options.scans + _MORE_SCANS:
            return False
        if thing.way_m - speed * late_s <= options.min_length_m:
            return True
        ahead = 0.0
        yaw = self._yaw + way.curvature * (thing.way_m + way.ahead_m)  # of the way there
        along = complex(math.cos(yaw), math.sin(yaw))
        if known.known_s > 0.0 and not way.backwards:
            velocity = known.velocity() * along.conjugate()
            if known.known_s > _BRAKING_AFTER_S and abs(velocity.imag) >= _CROSSES_M_S:
                latest = known.velocity(_CROSSES_S) * along.conjugate()  # it may have stopped just now

                def leaves(sides_m: tuple[float, float]) -> bool:
                    return all(_leaves(known, sides_m, one, way, speed) for one in (velocity, latest))

                if leaves(known.sides_m) and leaves(
                    self._whole_sides_m(known)
                ):  # to find all of it takes longer
                    return False
            # What comes later than others shows a place from before, and the vehicle has moved on
            # meanwhile.
            ahead = velocity.real - (_UNSURE_M + speed * self._jitter_s) / known.known_s
        # The first of the messages that have to show it may come as late as the time between two after it
        # could have.
        reaction_s = (
            late_s
            + options.reaction_ms / 1000
            + options.scans * min(max(self._waited_s, self._every_s), _LONGEST_WAIT_S)
        )

        def is_left(ahead_brakes: float) -> bool:
            """Whether there is room if what is ahead brakes so, by braking now, or by what the vehicle does already."""
            slower = max(
                0.0, ahead - 0.5 * known.known_s * ahead_brakes
            )  # the slope is the speed in the window's middle
            ways = [(options.deceleration, reaction_s)] + (
                [(brakes, late_s)] if brakes > _BRAKES_M_S2 else []
            )
            return any(
                gap_left_m(thing.way_m, speed, slower, ahead_brakes, *way) > _LEAST_LEFT_M for way in ways
            )

        if ahead <= 0.0 or is_left(_HARDEST_M_S2):
            return not is_left(0.0)
        return not is_left(known.braking(along))

    def _whole_sides_m(self, thing: Thing) -> tuple[float, float]:
        """The least and the most to the left of all that belongs to it, also beyond where things are followed."""
        x, y = self._points.x, self._points.y
        around = (np.abs(x - thing.x) <= _TAIL_M) & (np.abs(y) <= _TAIL_M)
        x, y = x[around], y[around]
        whole = [thing.sides_m]
        for members in together(x, y):
            if np.isin(thing.sides_m, y[members]).any():  # they are of points, so they are found again
                whole.append((float(y[members].min()), float(y[members].max())))
        return min(right for right, _ in whole), max(left for _, left in whole)

    def _known(self, thing: Thing) -> Thing:
        """The same thing as it was followed before it came into the way, if that says more.

        Of several the slowest.
        """
        right_m, left_m = thing.sides_m
        before = [
            other
            for other in self._beside.things
            if abs(other.x - thing.x) < _GATE_M
            and other.sides_m[0] <= right_m
            and left_m <= other.sides_m[1]
            if other.long_m <= _LONGEST_M and other.known_s > thing.known_s
        ]
        return min(before, key=lambda other: abs(other.velocity()), default=thing)


def _leaves(
    thing: Thing, sides_m: tuple[float, float], velocity: complex, way: Corridor, speed: float
) -> bool:
    """Whether all of a thing that crosses the way will have left it by the time at which the vehicle would be there."""
    closing = speed - velocity.real
    if closing <= 0.0 or abs(velocity.imag) < _CROSSES_M_S:
        return False
    moved_m, half_m = velocity.imag * thing.way_m / closing, way.half_width_m + way.margin_m + _LEAST_LEFT_M
    right_m, left_m = sides_m
    return right_m + moved_m > half_m if moved_m > 0 else left_m + moved_m < -half_m


def gap_left_m(
    gap_m: float, speed: float, ahead: float, ahead_brakes: float, deceleration: float, reaction_s: float
) -> float:
    """The least distance to what is ahead, in m, if the vehicle begins to brake now; negative: it is hit.

    It goes on at its speed v for the reaction time r, and brakes by a then: v t - a (t - r)^2 / 2. What is
    ahead goes on at its speed u, or brakes by b to a standstill: u t - b t^2 / 2.
    """
    times = np.linspace(0.0, reaction_s + speed / deceleration, _STEPS)
    own = speed * times - 0.5 * deceleration * np.maximum(times - reaction_s, 0.0) ** 2
    moving_s = np.minimum(times, ahead / ahead_brakes) if ahead_brakes else times
    other = ahead * moving_s - 0.5 * ahead_brakes * moving_s**2
    return float(gap_m + (other - own).min())


def together(x: Floats, y: Floats) -> list[NDArray[np.int64]]:
    """Indices of points that lie together, of each thing: linked over cells of a grid."""
    if not len(x):
        return []
    keys = np.floor(x / _CELL_M).astype(np.int64) * _ROW + np.floor(y / _CELL_M).astype(np.int64)
    cells, of_point = np.unique(keys, return_inverse=True)
    wanted = cells[:, None] + _NEIGHBOURS
    at = np.minimum(cells.searchsorted(wanted), len(cells) - 1)
    one, neighbour = np.nonzero(cells[at] == wanted)
    other = at[one, neighbour]
    label, before = np.arange(len(cells)), None
    while (
        before is None or (label != before).any()
    ):  # each takes the least label of its neighbours, and that one's own
        before = label.copy()
        np.minimum.at(label, one, before[other])
        np.minimum.at(label, other, before[one])
        label = label[label]
    labels = label[of_point.reshape(-1)]
    order = np.argsort(labels, kind="stable")
    return list(np.split(order, np.flatnonzero(np.diff(labels[order])) + 1))
