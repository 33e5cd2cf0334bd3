"""The lane that the vehicle keeps, as its accepted plans have drawn it, and ways back into it."""

import math

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Floats, Track, largest
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.safety.prediction import Arc, Looks, leaves_lane
from torchperf_ros.safety.stop_output import TimedPath

_KEEPS_M = 0.5  # a plan that leads no further aside keeps the lane
_SAME_M, _UNSURE = (
    0.3,
    0.03,
)  # as near the lane's next part is to the last one, and what is added for each m beyond
_DRIVEN = 0.3  # of a lane, before it is taken anew
_OTHER_M = 2.5  # further aside, the vehicle is in another lane
_LASTS_NS = 10 * NS_PER_S  # an older lane is not ours any more
_BEYOND_M = 60.0  # of what was planned, a lane is known so far
_LEAST_M = 1.0  # of a plan that says anything of a lane
_SIDEWAYS = 2.0  # m/s^2 of a way back; max_lateral is 3
_QUINTIC = 5.8  # its largest lateral acceleration is 5.8 v^2 / L^2 times what it leads aside
_SHORTEST_M = 6.0  # of a way back
_STEEPEST = 0.5  # of the direction to the lane, beyond which nothing leads back
_EASY = 2.0  # m/s^2 of braking once the vehicle is slow enough
_POSES, _ARC_POSES = 41, 16
_NO_BEND = 1e-9  # 1/m


class OwnLane:
    """Remembers the way of the last plans that kept the lane, in the odometry's frame."""

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self._since_ns = 0

    def take(self, way: Lane, bend: float, now_ns: int, *, goes_out: bool) -> None:
        """Note the way of a path, and the bend in 1/m that the vehicle drives.

        Our lane goes on along a way that keeps to it. It is not taken anew before a part of it is driven:
        step by step, it would follow a change of lanes. While none is known, it is the way of a plan that
        looks like a road, else the bend of now. `goes_out`: the path is followed, so that the vehicle may
        come to be in another lane.
        """
        if way.backward or way.both_ways or way.length < _LEAST_M:
            return
        lane = self.lane
        if lane is not None and now_ns - self._since_ns <= _LASTS_NS:
            if abs(complex(way.own_place[0] - lane.own_place[0])) <= _DRIVEN * lane.length:
                return
            s, aside_m = lane.beside(way.own_place[[0, len(way.own_place) // 2, -1]])
            if s[0] < lane.length + _BEYOND_M:
                keeps = (np.abs(aside_m) <= _SAME_M + _UNSURE * np.maximum(s - lane.length, 0.0)).all()
                changed = abs(aside_m[0]) > _OTHER_M and abs(aside_m[-1] - aside_m[0]) <= _SAME_M
                if goes_out and (changed or keeps):
                    self.lane, self._since_ns = way, now_ns
                return
        if leaves_lane(way, Arc(way, bend)) < Looks.BEND:
            ways = np.linspace(0.0, way.length, _ARC_POSES)
            turned = 1j * (bend or _NO_BEND) * ways
            places = way.own_place[0] + way.own_unit[0] * ways * np.expm1(turned) / np.where(
                ways > 0.0, turned, 1.0
            )
            way = Lane(Track(ways, places, np.angle(way.own_unit[0]) + turned.imag), bend)
        self.lane, self._since_ns = way, now_ns

    def leads_aside(self, way: Lane, bend: float) -> bool:
        """Whether a way leaves the lane, or is beside it.

        Where none is known, whether it looks so from our bend.
        """
        if self.lane is None:
            return leaves_lane(way, Arc(way, bend)) < Looks.BEND
        s, aside_m = self.lane.beside(way.own_place[[0, len(way.own_place) // 2, -1]])
        return largest(np.abs(aside_m[s <= self.lane.length + _BEYOND_M])) > _KEEPS_M

    def aside_m(self, place: complex) -> float:
        """How far a place is beside the lane; 0 where none is known."""
        return 0.0 if self.lane is None else abs(float(self.lane.beside(np.array([place]))[1][0]))

    def back(
        self, here: Motion, speed: float, ros_now_ns: int, hard: float, slow: float
    ) -> TimedPath | None:
        """Back into the lane from where the vehicle is, and to standstill.

        It brakes by `hard` until it has this share of its speed left, straight on along the lane, and then
        returns and brakes easily; at a share of 0 it returns while it brakes hard. None: there is no lane,
        or no way back.
        """
        lane = self.lane
        if lane is None or here.speed <= 0.0:
            return None
        s, left, heading = (float(part[0]) for part in lane.project(np.array([complex(here.x, here.y)])))
        turned = math.remainder(here.yaw - heading, math.tau)
        if abs(math.tan(turned)) > _STEEPEST or abs(turned) > 1.0 or s > lane.length + _BEYOND_M:
            return None
        hard_s = speed * (1.0 - slow) / hard
        times_s = np.linspace(0.0, hard_s + slow * speed / _EASY + 0.2, _POSES)
        begins_m = 0.0 if slow == 0.0 else speed * hard_s - 0.5 * hard * hard_s**2
        braking_s, easy_s = (
            np.minimum(times_s, hard_s),
            np.clip(times_s - hard_s, 0.0, slow * speed / _EASY),
        )
        ways = (
            speed * braking_s - 0.5 * hard * braking_s**2 + slow * speed * easy_s - 0.5 * _EASY * easy_s**2
        )
        then = speed if slow == 0.0 else slow * speed
        over = max(then * math.sqrt(_QUINTIC * abs(left) / _SIDEWAYS), 1.5 * then, _SHORTEST_M)
        aside, slope = _faded(left, math.tan(turned), ways, begins_m, over)
        places, headings = lane.place_at(s + ways, aside)
        yaws = headings + np.arctan(slope)
        yaws += here.yaw - yaws[0] - math.remainder(here.yaw - yaws[0], math.tau)
        points = np.stack((places.real, places.imag, np.full(_POSES, here.z)), axis=1)
        return TimedPath.made(
            ros_now_ns + np.rint(times_s * NS_PER_S).astype(np.int64), points, yaws, here.frame
        )


def _faded(
    left: float, slope: float, ways: Floats, begins_m: float, over: float
) -> tuple[Floats, NDArray[np.float64]]:
    """How far aside, and how steep, after each way.

    Straightened first, then back by a quintic over so many m.
    """
    share = np.clip(ways / over, 0.0, 1.0)
    straightens = slope * over * share * (1 - share) ** 3 * (1 + 3 * share)
    straightens_by = slope * (1 - share) ** 2 * (1 + 2 * share - 15 * share**2)
    back = np.clip((ways - begins_m) / over, 0.0, 1.0)
    aside = left * (1 - back) ** 3 * (1 + 3 * back + 6 * back**2) + straightens
    return aside, -30.0 * left / over * back**2 * (1 - back) ** 2 + straightens_by
