"""Bytes of the sensors that the emergency lane watches, as points around the vehicle.

Points are in the vehicle's axes: x forward, y left, from the reference point on the ground (REP 103). A
sensor is mounted upright: it has a place and a yaw, and neither roll nor pitch.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.cdr import aligned, byte_order, header_at, text_at
from torchperf_ros.api.errors import BadInput

Floats: TypeAlias = NDArray[np.float64]
_FLOATS = {7: "f4", 8: "f8"}  # datatypes of `sensor_msgs/PointField`
# Of the ground that a cloud shows: how far, and how far to each side, it is followed; the returns in a metre, and
# the metres with as many, that it takes. The first metre with some is at most so far away, and the next at most
# so far on, as a share of its distance. For each metre the ground rises or falls by at most so much, a road and
# the vehicle's dip together, and it is uneven by so much.
_GROUND_M, _ACROSS_M, _RETURNS, _RINGS = 60.0, 4.0, 10, 3
_FIRST_M, _GAP, _GRADE, _UNEVEN_M = 8.0, 0.25, 0.1, 0.05
# Where only what stands beside the way is seen, as on a wet road, that is no ground: returns of about the same
# height have to lie all across the way, and so many of them at most so far beside its middle.
_ALIKE_M, _MIDDLE_M, _IN_MIDDLE = 0.1, 1.5, 3
# So many points are enough for it. Of a larger cloud every so many are taken: primes, so that all rings are
# among them.
_FOR_GROUND, _EVERY = 10_000, (1, 3, 7, 13, 29)
_CONE_POINTS = 7  # that stand for the arc on which what a range sensor sees may be


@dataclass(frozen=True, slots=True)
class Points:
    """What one message shows.

    Attributes:
        x, y: of each return in m, in the vehicle's axes.
        most: how many of them count at most; 1 where all of them stand for one measurement.
        usable: measurements that say something, "nothing there" included; 0: the sensor is blind.
        measured: how many there were.
    """

    x: Floats
    y: Floats
    most: int
    usable: int
    measured: int


class _Cdr:
    """Reads a message from behind its header on.

    Numbers stand at multiples of their size after the encapsulation.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.order = data, byte_order(data)
        self.at = header_at(data, 4, self.order)[2]

    def numbers(self, kind: str) -> tuple[float, ...]:
        """Numbers of one kind, for example `7f`."""
        self.at = aligned(self.at, struct.calcsize(kind[-1]))
        found = struct.unpack_from(f"{self.order}{kind}", self.data, self.at)
        self.at += struct.calcsize(f"={kind}")
        return found

    def count(self) -> int:
        return int(self.numbers("I")[0])

    def text(self) -> bytes:
        found, self.at = text_at(self.data, self.at, self.order)
        return found

    def bytes(self) -> int:
        """Pass a list of bytes; where it begins."""
        length = self.count()
        self.at += length
        if self.at > len(self.data):
            raise ValueError("a list ends beyond the message")
        return self.at - length


def _read(data: bytes, name: str, read: Callable[[_Cdr], Points]) -> Points:
    try:
        return read(_Cdr(data))
    except (struct.error, IndexError, ValueError, TypeError) as error:  # what reading beyond the end raises
        raise BadInput(f"{len(data)} bytes are no {name}: {error}") from error


class SensorPoints:
    def __init__(
        self, kind: str, place: tuple[float, float, float, float], heights_m: tuple[float, float]
    ) -> None:
        """Take what it is and where.

        Args:
            kind: LaserScan, PointCloud2 or Range.
            place: x, y, z in m and yaw in rad in the vehicle's axes.
            heights_m: least and greatest height above the ground at which points of a cloud count.
        """
        self._kind = kind
        self._x, self._y, self._z, self._yaw = place
        self._cos, self._sin = math.cos(self._yaw), math.sin(self._yaw)
        self._heights = heights_m
        # of the last scan, with its geometry
        self._directions: tuple[tuple[float, ...], Floats, Floats] | None = None
        self._reader = {"LaserScan": self._scan, "PointCloud2": self._cloud, "Range": self._range}[kind]

    def read(self, data: bytes) -> Points:
        """The points of a message, as CDR bytes.

        Raises:
            BadInput: the bytes are no such message, or its description of itself makes no sense.
        """
        return _read(data, f"sensor_msgs/{self._kind}", self._reader)

    def _scan(self, cdr: _Cdr) -> Points:
        """REP 117: +Inf is no return, -Inf too near to be measured, NaN and what is out of range an error."""
        first, _, step, _, _, least, most = cdr.numbers("7f")
        count = cdr.count()
        ranges = (
            np.frombuffer(cdr.data, f"{cdr.order}f4", count, cdr.at) if count else np.empty(0, np.float32)
        )
        if not (math.isfinite(first) and math.isfinite(step)):
            raise BadInput(f"LaserScan: angle_min {first} and angle_increment {step} have to be finite")
        if not 0 <= least < most:
            raise BadInput(
                f"LaserScan: range_min {least} has to be below range_max {most}, and not negative"
            )
        geometry = (count, first, step)
        if self._directions is None or self._directions[0] != geometry:
            angles = self._yaw + first + step * np.arange(count)
            self._directions = geometry, np.cos(angles), np.sin(angles)
        _, cos, sin = self._directions
        near = np.flatnonzero((ranges <= most) & ((ranges >= least) & (ranges > 0) | (ranges == -np.inf)))
        found = np.maximum(ranges[near].astype(np.float64), least)
        usable = len(near) + int(np.count_nonzero(ranges > most))
        return Points(self._x + found * cos[near], self._y + found * sin[near], count, usable, count)

    def _cloud(self, cdr: _Cdr) -> Points:
        height, width = (int(size) for size in cdr.numbers("2I"))
        fields: dict[bytes, tuple[int, str]] = {}
        for _ in range(cdr.count()):
            name, offset = cdr.text(), cdr.count()
            (kind,) = cdr.numbers("B")
            cdr.count()
            fields[name] = offset, _FLOATS.get(int(kind), "")
        (is_big,) = cdr.numbers("B")
        step, row_step = cdr.count(), cdr.count()
        begin = cdr.bytes()
        if missing := [axis for axis in "xyz" if not fields.get(axis.encode(), (0, ""))[1]]:
            raise BadInput(f"PointCloud2: field {missing[0]} has to be there as float32 or float64")
        if step <= 0 or (height > 1 and row_step < width * step):
            raise BadInput(f"PointCloud2: {width} points of {step} bytes do not fit rows of {row_step}")
        count, order = height * width, ">" if is_big else "<"
        none = np.empty(0)
        if not count:
            return Points(none, none, 0, 0, 0)
        view, shape, strides = memoryview(cdr.data)[begin : cdr.at], (height, width), (row_step, step)
        places = (fields[axis] for axis in (b"x", b"y", b"z"))
        x, y, z = (
            np.ndarray(shape, order + kind, view, offset, strides).reshape(-1) for offset, kind in places
        )
        # drivers fill what has no return with zeros
        usable = np.isfinite(x) & np.isfinite(y) & ((x != 0) | (y != 0))
        low_m, high_m = self._heights
        some = slice(
            None, None, next(each for each in _EVERY if count <= each * _FOR_GROUND or each == _EVERY[-1])
        )
        at_m, up_m = ground_profile(*self._placed(x[some], y[some], z[some], usable[some]), low_m)
        lowest_m, highest_m = low_m + min(up_m), high_m + max(up_m)
        near = usable & (z >= lowest_m - self._z) & (z <= highest_m - self._z)
        body_x, body_y, height_m = self._placed(x, y, z, near)
        if any(up_m):
            height_m -= np.interp(body_x, at_m, up_m)
            near_m = (height_m >= low_m) & (height_m <= high_m)
            body_x, body_y = body_x[near_m], body_y[near_m]
        return Points(body_x, body_y, count, int(np.count_nonzero(usable)), count)

    def _placed(
        self, x: Floats, y: Floats, z: Floats, which: NDArray[np.bool_]
    ) -> tuple[Floats, Floats, Floats]:
        """Those of a cloud's points, in the vehicle's axes, and their heights above where it stands."""
        forward, left, up = (axis[which].astype(np.float64) for axis in (x, y, z))
        body_x = self._x + self._cos * forward - self._sin * left
        body_y = self._y + self._sin * forward + self._cos * left
        return body_x, body_y, self._z + up

    def _range(self, cdr: _Cdr) -> Points:
        """What is seen is somewhere on an arc; a sensor of one fixed distance says -Inf for it."""
        cdr.numbers("B")
        view, least, most, found = cdr.numbers("4f")
        if not (0 <= least <= most and 0 <= view <= 2 * math.pi):
            raise BadInput(
                f"Range: min_range {least}, max_range {most} or field_of_view {view} rad makes no sense"
            )
        none = np.empty(0)
        if math.isnan(found) or found == 0 or -math.inf < found < least:
            return Points(none, none, 0, 0, 1)
        if found > most:
            return Points(none, none, 0, 1, 1)
        angles = self._yaw + view * np.linspace(-0.5, 0.5, _CONE_POINTS)
        distance = max(found, least)
        return Points(self._x + distance * np.cos(angles), self._y + distance * np.sin(angles), 1, 1, 1)


def ground_profile(x: Floats, y: Floats, height_m: Floats, low_m: float) -> tuple[list[float], list[float]]:
    """How high the ground is ahead, by what a cloud shows of it: distances and heights in m.

    A vehicle that brakes dips by a degree or two, and roads rise: 20 m ahead that is more than `low_m`. From the
    vehicle on, metre by metre, the ground is the lower part of what lies all across the way, as far as it
    rises or falls by no more than a road does. Where it cannot be followed on, it stays at the last height. The
    last metre, which no further one confirms, does not rise above the one before. It is flat where there is no
    such ground at all. What is narrow, or steep, or only beside the way, is none.
    """
    flat = [0.0], [0.0]
    ahead = np.flatnonzero(
        (np.abs(y) <= _ACROSS_M) & (x > 0) & (x < _GROUND_M) & (np.abs(height_m) <= low_m + _GRADE * x)
    )
    if len(ahead) < _RETURNS * _RINGS:
        return flat
    metres = x[ahead].astype(np.int64)
    ordered = ahead[np.argsort(metres, kind="stable")]
    at_m, up_m = [0.0], [0.0]
    for members in np.split(ordered, np.cumsum(np.bincount(metres))[:-1]):
        if len(members) < _RETURNS or np.ptp(y[members]) < _ACROSS_M:
            continue
        quarter = len(members) // 4
        here_m, there_m = float(x[members].mean()), float(np.partition(height_m[members], quarter)[quarter])
        if here_m - at_m[-1] > max(_FIRST_M, _GAP * here_m):
            break
        alike = y[members[np.abs(height_m[members] - there_m) <= _ALIKE_M]]
        if np.ptp(alike) < _ACROSS_M or np.count_nonzero(np.abs(alike) <= _MIDDLE_M) < _IN_MIDDLE:
            continue
        if abs(there_m - up_m[-1]) <= _GRADE * (here_m - at_m[-1]) + _UNEVEN_M:
            at_m.append(here_m)
            up_m.append(there_m)
    if len(at_m) <= _RINGS:
        return flat
    up_m[-1] = min(up_m[-2:])
    return at_m, up_m


def read_bool(data: bytes) -> bool:
    """The value of a `std_msgs/Bool`.

    Raises:
        BadInput: the bytes are none.
    """
    if len(data) < 5 or data[4] > 1:  # noqa: PLR2004 - the encapsulation and one byte
        raise BadInput(f"{len(data)} bytes are no std_msgs/Bool")
    return bool(data[4])
