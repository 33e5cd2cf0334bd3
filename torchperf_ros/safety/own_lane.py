"""The lane that the vehicle keeps, as its accepted plans have drawn it, and ways back into it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Complex, Floats, Track, largest
from torchperf_ros.safety.obstacles import Seen
from torchperf_ros.safety.odometry import Motion, yaw_of
from torchperf_ros.safety.prediction import (
    NOTHING_SHOWN,
    Arc,
    Flags,
    Looks,
    Road,
    Shown,
    along_lane,
    leaves_lane,
    runs_beside,
)
from torchperf_ros.safety.stop_output import TimedPath

IN_LANE_M = 0.5  # aside of it; further, the vehicle has left it
_KEEPS_M = 0.5  # a plan that leads no further aside keeps the lane
_SAME_M, _UNSURE = (
    0.3,
    0.03,
)  # as near the lane's next part is to the last one, and what is added for each m beyond
_SURELY_M = 0.1  # a plan that leads no further aside is known to keep it
_EIGHTHS = np.arange(9)
_THREE = [0, 9, 8]  # of these and the middle: where a way begins, its middle and its end
_NEW = 0.35  # of a plan that keeps the lane, beyond what is known of that
_DRIVEN = 0.3  # of a lane, before it is taken anew
_OTHER_M = 2.5  # further aside, the vehicle is in another lane
_LASTS_NS = 30 * NS_PER_S  # an older lane is not ours any more
_BEYOND_M = 60.0  # of what was planned, a lane is known so far
_LEAST_M = 1.0  # of a plan that says anything of a lane
_SHOWN_M = 15.0  # of one that says where the lane goes on; one that creeps aside is shorter
_PARALLEL = 0.02  # rad, in which such a plan begins and ends as the lane beside it does
_SIDEWAYS = 2.0  # m/s^2 of a way back; max_lateral is 3
_QUINTIC = 5.8  # its largest lateral acceleration is 5.8 v^2 / L^2 times what it leads aside
# Its curvature changes by at most 60 / L^3 of it for each m; that, times 2.7 m of wheelbase, by 0.4 rad/s of steering.
_QUINTIC_STEERS = 60.0 * 2.7 / 0.4
_SHORTEST_M = 6.0  # of a way back
_STEEPEST = 0.5  # of the direction to the lane, beyond which nothing leads back
_EASY = 2.0  # m/s^2 of braking once the vehicle is back
_SHARES = (1.0, 0.6, 0.3)  # of its speed, that a vehicle keeps to return
_CREEPS, _GETS_TO = 3.0, 5.0  # m/s; a slower vehicle gains so much to return
_KEEPS_S = 1.0
_BESIDE_S = (0.0, 1.0, 2.0, 3.0)  # for which it passes what is beside it
_NEXT_S = 0.3  # for which a plan is followed until the next one is judged: two periods and a response
_NEAR_S = 0.1  # around a time, in which a speed is found
_GAINS = 2.0  # m/s^2 of a vehicle that is too slow to return
_TIGHTEST = 0.15  # 1/m of a way back
_POSES, _ARC_POSES = 61, 4
# What a car says of the road: if it is so fast in m/s, and its direction so sure in rad; so far beyond what is
# known in m; so far aside; and so sharp is a road, in 1/m.
_SHOWS, _SURE, _REACHES_M, _ON_ROAD_M, _SHARPEST = 3.0, 0.02, 60.0, 8.0, 0.05
_TURNS_ELSE = 0.03  # rad between a car's direction and that of a road that it does not drive along
_STEP_M, _MOST_POSES = 3.0, 80  # of a lane
_LEAST_GUESS_M = 3.0
_NOISY_BEND = 0.002  # 1/m, by which yaw rate and speed may be off: 0.03 rad/s at 15 m/s
_AROUND_M = 10.0  # over which the bend that we drive is found
_ROAD_M = 20.0  # over which the bend of a road is found
_NO_BEND = 1e-6  # 1/m


class Returns(NamedTuple):
    """A way back into the lane.

    Attributes:
        then: m/s that the vehicle brakes or gains to first, and keeps until it is back; 0: it returns while it
            brakes to standstill.
        brakes: m/s^2 of this first braking.
        beside_s: s that it stays beside the lane at that speed.
        stops: m/s^2 to standstill once it is back; 0: it keeps its speed for a second, for what it has passed drives
            behind it then.
    """

    then: float
    brakes: float
    beside_s: float = 0.0
    stops: float = _EASY


class OwnLane:
    """Remembers the way of the last plans that kept the lane, in the odometry's frame."""

    def __init__(self) -> None:
        self.lane: Lane | None = None
        # The same without a bend that cars show beyond a guess: where that begins is a guess too, so that no plan is
        # known to leave it.
        self._known: Lane | None = None
        self._former: Lane | None = None  # before the vehicle changed to this one
        # Before it was led on into what looked like a bend: so does the first half of a change of lanes.
        self._surer: Lane | None = None
        self._guessed = False
        self._since_ns = 0
        self._asked: tuple[Lane, Lane, Floats] | None = None

    def take(self, way: Lane, bend: float, now_ns: int, seen: Seen, *, goes_out: bool) -> None:
        """Note the way of a path, the bend in 1/m that the vehicle drives, and the cars around.

        `goes_out`: the path is followed, so that the vehicle may come to be in another lane.
        """
        if way.backward or way.both_ways or way.length < _LEAST_M:
            return
        self._follow(way, bend, now_ns, seen, goes_out=goes_out)
        if self._guessed or self.leads_aside(way, bend):
            self._learn(seen)

    def _follow(self, way: Lane, bend: float, now_ns: int, seen: Seen, *, goes_out: bool) -> None:
        """Lead our lane on along a way that keeps to it, or beside a way that runs beside it.

        It is not taken anew before a part of it is driven: step by step, it would follow a change of lanes. While
        none is known, it is the way of a plan that looks like a road, else the bend of now, until a plan looks
        like a road.
        """
        lane = self.lane
        if lane is None or now_ns - self._since_ns > _LASTS_NS:
            self._begin(way, bend, now_ns, seen)
            return
        driven = abs(complex(way.own_place[0] - lane.own_place[0])) > _DRIVEN * lane.length
        if not (driven or self._guessed):
            return
        s, aside_m = self._beside(lane, way)[:, _THREE]
        if s[0] >= lane.length + _BEYOND_M:
            # A vehicle that is beside it has to return to it: in the lane of others it begins no lane of ours.
            if not IN_LANE_M < largest(np.abs(aside_m)) < _ON_ROAD_M:
                self._begin(way, bend, now_ns, seen)
            return
        looks = self._looks_of(way, bend, float(s[0]), seen)
        self._return_to_surer(way, looks)
        if not goes_out or looks is Looks.CHANGE:
            return
        beyond_m = np.maximum(s - lane.length, 0.0)
        keeps = bool((np.abs(aside_m) <= _SAME_M + _UNSURE * beyond_m).all())
        bends = largest(np.abs(aside_m[:2])) <= _SAME_M  # all but its end
        if bends and not keeps and self._surer is None:
            self._surer = lane
        keeps |= bends
        if self._guessed and looks >= Looks.BEND and abs(aside_m[0]) <= _SAME_M:
            self._former = None
        elif keeps and driven and way.length >= _SHOWN_M:
            if self._former is not None:
                self._former = _beside(way, float(self._former.beside(way.own_place[:1])[1][0]))
        elif driven and way.length >= _SHOWN_M and self._runs_beside(lane, way, s, aside_m):
            beside = _beside(way, float(aside_m[0]))
            way, self._former = (way, beside) if abs(aside_m[0]) > _OTHER_M else (beside, None)
        else:
            return
        self.lane = self._known = way
        self._guessed, self._since_ns = False, now_ns

    def _looks_of(self, way: Lane, bend: float, s: float, seen: Seen) -> Looks:
        """What a way looks like that begins at `s` of the lane."""
        if self._known is not None and not self._guessed and s < self._known.length:
            known = self._road_at(self._known, s).bend
            bend = known if abs(known - bend) < _NOISY_BEND else bend
        looks = leaves_lane(way, Arc(way, bend), returns=not self._guessed and self.shows(way).near)
        return Looks.BEND if looks < Looks.BEND and runs_beside(way, along_lane(way, seen), seen) else looks

    def _return_to_surer(self, way: Lane, looks: Looks) -> None:
        """Take back the lane from before it followed a bend, if what it followed was a change of lanes."""
        surer = self._surer
        if surer is None:
            return
        if float(surer.beside(way.own_place[:1])[0][0]) > surer.length:
            self._surer = None  # all of it is driven, and nothing of a plan since then turned back
        elif looks is Looks.CHANGE:
            self.lane, self._known, self._surer = surer, surer, None

    def _learn(self, seen: Seen) -> None:
        """Lead the lane on to the next car beyond what is known of it: that has the direction of the road there.

        Between, the road bends evenly.
        """
        lane = self.lane
        if lane is None or not len(seen.yaws):
            return
        end, travel = complex(lane.own_place[-1]), complex(lane.own_unit[-1])
        off = (seen.places - end) * travel.conjugate()
        moves, turned = _turned(seen, travel)
        shows = moves & (off.real > _STEP_M) & (off.real < _REACHES_M) & (np.abs(off.imag) < _ON_ROAD_M)
        shows &= np.abs(turned) <= _SHARPEST * off.real
        if not np.count_nonzero(shows):
            return
        at = int(np.where(shows, off.real, math.inf).argmin())
        count = math.ceil(off.real[at] / _STEP_M)
        shares = np.arange(1, count + 1) / count
        step_m = float(off.real[at] / math.cos(0.5 * turned[at])) / count
        heading, turn = float(lane.heading[np.searchsorted(lane.s, lane.length)]), float(turned[at])
        headings = heading + turn * shares
        places = end + np.cumsum(step_m * np.exp(1j * (headings - 0.5 * turn / count)))
        ways = lane.length + step_m * np.arange(1, count + 1)
        kept = slice(-_MOST_POSES, None)
        # From where plans have drawn it, a lane bends as they do; from a guess, the bend may begin anywhere.
        aside_m = abs(turn) * float(off.real[at])
        is_known = lane is self._known and (not self._guessed or aside_m <= IN_LANE_M)
        self.lane = Lane(
            Track(
                np.concatenate((lane.own_s, ways))[kept],
                np.concatenate((lane.own_place, places))[kept],
                np.concatenate((np.unwrap(np.angle(lane.own_unit)), headings))[kept],
            )
        )
        if is_known:
            self._known, self._guessed = self.lane, False

    def _begin(self, way: Lane, bend: float, now_ns: int, seen: Seen) -> None:
        """Take the way of a plan that looks like a road, and along which cars drive; else the bend of now."""
        self._former = None
        self._guessed = leaves_lane(way, Arc(way, bend)) < Looks.BEND or _others_turn(way, seen)
        if self._guessed:
            ways = np.linspace(0.0, _LEAST_GUESS_M, _ARC_POSES)
            turned = 1j * (bend or _NO_BEND) * ways
            places = way.own_place[0] + way.own_unit[0] * ways * np.expm1(turned) / np.where(
                ways > 0.0, turned, 1.0
            )
            way = Lane(Track(ways, places, np.angle(way.own_unit[0]) + turned.imag), bend)
        self.lane = self._known = way
        self._since_ns = now_ns

    @staticmethod
    def _runs_beside(lane: Lane, way: Lane, s: Floats, aside_m: Floats) -> bool:
        headings = np.interp(s[[0, -1]], lane.s, lane.heading)
        turned = np.angle(way.own_unit[[0, -1]] * np.exp(-1j * headings))
        return abs(aside_m[-1] - aside_m[0]) <= _SAME_M and largest(np.abs(turned)) <= _PARALLEL

    @property
    def _known_m(self) -> float:
        """How far beyond what was planned the lane is known: in a bend, for as long as that might end unseen."""
        bend = 0.0 if self.lane is None else abs(self.lane.last_bend)
        return min(_BEYOND_M, math.sqrt(2.0 * IN_LANE_M / bend)) if bend else _BEYOND_M

    def is_theirs(self, way: Lane) -> None:
        """Note that something comes towards a way.

        Where that keeps to the lane, the lane is not ours: it is still the one that the vehicle drove in before.
        """
        if self._former is not None and self.lane is not None:
            aside_m = self._beside(self.lane, way)[1, _THREE]
            if largest(np.abs(aside_m)) <= _KEEPS_M:
                self.lane, self._known, self._former = self._former, self._former, None

    def leads_aside(self, way: Lane, bend: float) -> bool:
        """Whether a way leaves the lane, or is beside it.

        Where none is known, whether it looks so from our bend.
        """
        if self.lane is None:
            return leaves_lane(way, Arc(way, bend)) < Looks.BEND
        s, aside_m = self._beside(self.lane, way)[:, _THREE]
        return largest(np.abs(aside_m[s <= max(self.lane.length + _BEYOND_M, s[0])])) > _KEEPS_M

    def _beside(self, lane: Lane, way: Lane) -> Floats:
        """How far along a lane and beside it a way's eighths and its middle pose are, found once."""
        if self._asked is None or self._asked[0] is not lane or self._asked[1] is not way:
            last = len(way.own_place) - 1
            at = np.append(_EIGHTHS * last // 8, (last + 1) // 2)
            self._asked = lane, way, np.stack(lane.beside(way.own_place[at]))
        return self._asked[2]

    def aside_m(self, place: complex) -> float:
        """How far a place is beside the lane; 0 where none is known."""
        return 0.0 if self.lane is None else abs(float(self.lane.beside(np.array([place]))[1][0]))

    def is_beside(self, place: complex, yaw: float) -> bool | None:
        """Whether a path that ends at a place ends beside the lane; None: it turns off, or the lane is a guess."""
        if self.lane is None or (self._guessed and self.lane is self._known):
            return None
        _, left, heading = self.lane.project(np.array([place]))
        turns_off = abs(math.tan(0.5 * (yaw - float(heading[0])))) > math.tan(0.5 * _STEEPEST)
        return None if turns_off else abs(float(left[0])) > IN_LANE_M

    def shows(self, way: Lane) -> Shown:
        """What the lane says of a plan: whether that is known to leave it or to keep it, and how the road leads on."""
        lane = self._known
        if lane is None or way.backward or way.both_ways:
            return NOTHING_SHOWN
        s, left = self._beside(lane, way)[:, :-1]
        aside_m = np.abs(left)
        is_known = s <= lane.length
        known_m = aside_m * is_known
        known_m[-1] = np.interp(lane.length, s, aside_m)
        leaves = aside_m[0] > IN_LANE_M or (not self._guessed and largest(known_m) > _KEEPS_M)
        if leaves:
            heading, later = np.interp((s[0], s[0] + _ROAD_M), lane.s, lane.heading).tolist()
            travel = complex(math.cos(heading), math.sin(heading))
            return Shown(Looks.CHANGE, Road(travel, (later - heading) / _ROAD_M or _NO_BEND))
        is_sure = not self._guessed and self._surer is None and s[-1] - lane.length <= _NEW * way.length
        near = not self._guessed and bool(is_known[4]) and largest(known_m) <= _SURELY_M
        if not (near and is_sure and largest(aside_m) <= _KEEPS_M):
            return Shown(near=near)
        return Shown(Looks.KEEPS, self._road_at(lane, float(s[0])), near)

    @staticmethod
    def _road_at(lane: Lane, s: float) -> Road:
        """How a lane leads on around a place: yaw rate and speed, which say it of the vehicle, are noisy."""
        around = np.array([s - 0.5 * _AROUND_M, s, s + 0.5 * _AROUND_M])
        before, heading, after = np.interp(around, lane.s, lane.heading)
        return Road(
            complex(math.cos(heading), math.sin(heading)), float(after - before) / _AROUND_M or _NO_BEND
        )

    def ways_out(
        self, track: Track, motion: Motion, ros_now_ns: int, hard: float, hardest: float
    ) -> Iterator[TimedPath]:
        """Along a plan from now on until the next one is judged, and then back, each way that there is."""
        place, yaw = track.at(_NEXT_S)
        near = [track.at(_NEXT_S + off_s)[0] for off_s in (-_NEAR_S, _NEAR_S)]
        speed = abs(near[1] - near[0]) / (2.0 * _NEAR_S)
        here = replace(motion, x=place.real, y=place.imag, yaw=yaw, speed=speed)
        first = track.t_s < _NEXT_S
        places = track.place[first]
        points = np.stack((places.real, places.imag, np.full(len(places), motion.z)), axis=1)
        stamps_ns = ros_now_ns + np.rint(track.t_s[first] * NS_PER_S).astype(np.int64)
        next_ns = ros_now_ns + round(_NEXT_S * NS_PER_S)
        for back, _ in self.ways_back(here, speed, next_ns, hard, hardest):
            yield TimedPath.made(
                np.append(stamps_ns, back.stamps_ns),
                np.vstack((points, back.points)),
                np.append(track.yaw[first], yaw_of(*back.turns.T)),
                motion.frame,
            )

    def ways_back(
        self, here: Motion, speed: float, ros_now_ns: int, hard: float, hardest: float
    ) -> Iterator[tuple[TimedPath, str]]:
        """Ways back into the lane that the vehicle has left, or to standstill in the one that it keeps.

        And what each does, in words.
        """
        if self.aside_m(complex(here.x, here.y)) <= IN_LANE_M:
            ways = [(Returns(0.0, by), f"brakes by {by:g} m/s^2 in its lane") for by in (hard, hardest)]
        else:
            ways = [
                (Returns(then, hard, 0.0, stops), f"returns to its lane at {then:.3g} m/s and brakes")
                for then, stops in [
                    (max(speed, _CREEPS), _EASY),
                    *((max(share * speed, _CREEPS), hard) for share in _SHARES),
                    *(((_GETS_TO, _EASY), (_GETS_TO, hard)) if speed < _GETS_TO else ()),
                ]
            ]
            ways += [
                (Returns(speed, hard, s, 0.0), f"passes what is beside it for {s:g} s and returns")
                for s in (_BESIDE_S if speed > _GETS_TO else ())
            ]
            if speed > _CREEPS:
                ways.append((Returns(0.0, hard), "returns to its lane and brakes"))
        for way, does in ways:
            if (path := self._back(here, speed, ros_now_ns, way)) is not None:
                yield path, does

    def _back(self, here: Motion, speed: float, ros_now_ns: int, returns: Returns) -> TimedPath | None:
        """Back into the lane from where the vehicle is, and to standstill; None: there is no lane, or no way back."""
        lane = self.lane
        if lane is None or here.speed < 0.0:
            return None
        s, left, heading = (float(part[0]) for part in lane.project(np.array([complex(here.x, here.y)])))
        turned = math.remainder(here.yaw - heading, math.tau)
        if abs(math.tan(turned)) > _STEEPEST or abs(turned) > 1.0 or s > lane.length + self._known_m:
            return None
        then, brakes = returns.then, returns.brakes
        first_s = abs(speed - then) / (brakes if then < speed else _GAINS)
        first_m = 0.5 * (speed + then) * first_s
        fast = then if then > 0.0 else speed
        over = max(
            fast * math.sqrt(_QUINTIC * abs(left) / _SIDEWAYS),
            1.5 * fast,
            math.sqrt(_QUINTIC * abs(left) / _TIGHTEST),
            math.cbrt(_QUINTIC_STEERS * abs(left) * fast),
            _SHORTEST_M,
        )
        begins_m = first_m + then * returns.beside_s if then > 0.0 else 0.0
        holds_s = (begins_m - first_m + over) / then if then > 0.0 else 0.0
        last_s = then / returns.stops if returns.stops else 0.0
        holds_s += 0.0 if returns.stops else _KEEPS_S
        times_s = np.linspace(0.0, first_s + holds_s + last_s + (0.2 if returns.stops else 0.0), _POSES)
        change_s = np.minimum(times_s, first_s)
        held_s = np.clip(times_s - first_s, 0.0, holds_s)
        stop_s = np.clip(times_s - first_s - holds_s, 0.0, last_s)
        rate = 0.0 if first_s == 0.0 else (then - speed) / first_s
        ways = (
            (speed + 0.5 * rate * change_s) * change_s
            + then * held_s
            + (then - 0.5 * returns.stops * stop_s) * stop_s
        )
        aside, slope = _faded(left, math.tan(turned), ways, begins_m, over)
        places, headings = lane.place_at(s + ways, aside)
        yaws = headings + np.arctan(slope)
        yaws += here.yaw - yaws[0] - math.remainder(here.yaw - yaws[0], math.tau)
        points = np.stack((places.real, places.imag, np.full(_POSES, here.z)), axis=1)
        stamps_ns = ros_now_ns + np.rint(times_s * NS_PER_S).astype(np.int64)
        return TimedPath.made(stamps_ns, points, yaws, here.frame)


def _turned(seen: Seen, travel: Complex | complex) -> tuple[Flags, Floats]:
    """Which cars show the direction of a road, and by how much that differs from a direction, in rad."""
    moves = (seen.speeds >= _SHOWS) & (seen.unsure <= _SURE * seen.speeds)
    direction = seen.velocities * np.conj(travel)
    return moves, np.angle(np.where(direction.real < 0.0, -direction, direction))


def _others_turn(way: Lane, seen: Seen) -> bool:
    """Whether a car on a road along this way would have another direction than it has."""
    if not len(seen.yaws):
        return False
    s, left, heading = way.project(seen.places)
    moves, turned = _turned(seen, np.exp(1j * heading))
    on_road = (s > 0.0) & (s < way.length) & (np.abs(left) < _ON_ROAD_M)
    return bool((moves & on_road & (np.abs(turned) > _TURNS_ELSE)).any())


def _beside(way: Lane, left_m: float) -> Lane:
    """The lane so far to the right of a way."""
    return Lane(Track(way.own_s, way.own_place - 1j * left_m * way.own_unit, np.angle(way.own_unit)))


def _faded(left: float, slope: float, ways: Floats, begins_m: float, over: float) -> tuple[Floats, Floats]:
    """How far aside, and how steep, after each way.

    Straightened first, then back by a quintic over so many m.
    """
    share = np.clip(ways / over, 0.0, 1.0)
    straightens = slope * over * share * (1 - share) ** 3 * (1 + 3 * share)
    straightens_by = slope * (1 - share) ** 2 * (1 + 2 * share - 15 * share**2)
    back = np.clip((ways - begins_m) / over, 0.0, 1.0)
    aside = left * (1 - back) ** 3 * (1 + 3 * back + 6 * back**2) + straightens
    return aside, -30.0 * left / over * back**2 * (1 - back) ** 2 + straightens_by
