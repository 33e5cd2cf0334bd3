"""Obstacles read from the CDR bytes of a `visualization_msgs/MarkerArray`: oriented boxes with velocities, in a plane.

Each array replaces the one before of its source. A marker of type CUBE, SPHERE or CYLINDER is an obstacle; an ARROW of
the same `ns` and `id` says how it moves over ground: from `points[0]` to `points[1]` in m/s, turned by the ARROW's pose
as RViz draws it. Other types are no obstacles.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.config.safety_options import GuardOptions
from torchperf_ros.frame.cdr import aligned, byte_order, header_at, text_at
from torchperf_ros.frame.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.frame.errors import BadInput, one_line
from torchperf_ros.safety.odometry import USABLE_AGE_S, Motion, age_s, yaw_of

Floats = NDArray[np.float64]
Complex = NDArray[np.complex128]

_ADD, _ARROW, _SOLIDS = 0, 0, (1, 2, 3)  # visualization_msgs/Marker: action ADD; ARROW; CUBE, SPHERE, CYLINDER
_MOST_MARKERS = 4000  # reading them takes some 30 ms; an array of more is refused
_MOST_M = 10_000.0  # positions and sizes beyond are no obstacle of a road vehicle
_MAX_SPEED = 70.0  # m/s, of an estimated velocity
_MAX_CHANGE = 3.0  # m/s between two estimates in a row: more, and the id does not follow one object
_STEP_S = (0.01, 1.0)  # between two arrays that velocities are estimated from
_NO_TEXT = b"\1\0\0\0\0" + bytes(3)
_NO_LISTS = bytes(8) + _NO_TEXT + bytes(8) + _NO_TEXT * 2 + bytes(8)
"""Points, colours, texture and coordinates of a marker that has none of them, little-endian, from the points on."""
_NO_MESH = _NO_TEXT * 2 + bytes(4)
_NO_ARROW = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
_Step: TypeAlias = tuple[int, float, float, float, float, bool]
"""Of one object: stamp in ns, x and y in m, velocity by x and y in m/s, and whether that counts."""


class Seen(NamedTuple):
    """Obstacles in the odometry's frame.

    Attributes:
        places: centres as x + iy in m, shape [n].
        yaws, units: headings in rad, and as x + iy, shape [n].
        halves: half length and half width in m, shape [n, 2].
        velocities, speeds: over ground, as x + iy, and how large they are, in m/s; zero where it is not known.
        response_s: until we respond to each, shape [n].
    """

    places: Complex
    yaws: Floats
    units: Complex
    halves: Floats
    velocities: Complex
    speeds: Floats
    response_s: Floats


@dataclass(frozen=True, slots=True)
class Obstacles:
    """What one source saw.

    Attributes:
        received_ns: when the array was received, monotonic.
        stamps_ns: ROS time of each, shape [n].
        stamp_ns: of all of them; None: they differ.
        seen: where they were then; the time to respond is not known yet.
        no_velocity: of how many it is not known.
        steps: by `ns` and `id`, what the next array's velocities are estimated from.
    """

    received_ns: int
    stamps_ns: NDArray[np.int64]
    stamp_ns: int | None
    seen: Seen
    no_velocity: int
    steps: dict[tuple[bytes, int], _Step]

    def packed(self) -> list[Any]:
        """The same in what JSON knows, without the steps; `unpacked` makes it whole."""
        seen = [np.stack((column.real, column.imag)).tolist() for column in self.seen]
        return [self.received_ns, self.stamps_ns.tolist(), self.stamp_ns, seen, self.no_velocity]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> "Obstacles":
        """Of what `packed` gave."""
        received_ns, stamps_ns, stamp_ns, columns, no_velocity = packed
        parts = [np.array(column, np.float64) for column in columns]
        seen = Seen(*(
            real + 1j * imaginary if has is np.complex128 else real
            for has, (real, imaginary) in zip(_COLUMNS, parts, strict=True)
        ))  # fmt: skip
        return cls(received_ns, np.array(stamps_ns, np.int64), stamp_ns, seen, no_velocity, {})


_COLUMNS: Final = (np.complex128, float, np.complex128, float, np.complex128, float, float)  # of `Seen`
_NONE, _NO_PLACES = np.zeros(0), np.zeros(0, np.complex128)
_NOTHING = Seen(_NO_PLACES, _NONE, _NO_PLACES, np.zeros((0, 2)), _NO_PLACES, _NONE, _NONE)


def seen_now(
    sources: Sequence[Obstacles | None], options: GuardOptions, now_ns: int, ros_now_ns: int, frame_age_s: float
) -> tuple[Seen, dict[int, str]]:
    """All fresh obstacles, led on at constant velocity to now; and of each source that has none fresh, why.

    The response time to one is the age of the plan's frame, or its own if that is larger, and the actuation delay.
    """
    missing, fresh = {}, []
    for index, source in enumerate(sources):
        if source is None:
            missing[index] = "were not received"
            continue
        since_s = (now_ns - source.received_ns) / NS_PER_S
        if source.stamp_ns is None:
            ages_s = (ros_now_ns - source.stamps_ns) / NS_PER_S
            usable = (source.stamps_ns > 0) & (ages_s >= 0) & (ages_s <= USABLE_AGE_S)
            old_s: Floats | float = np.where(usable, ages_s, since_s)
            oldest_s = float(np.max(old_s))
            unseen_s = np.fmax(old_s, frame_age_s)  # a NaN counts as unknown
        else:
            old_s = oldest_s = age_s(source.stamp_ns, source.received_ns, now_ns, ros_now_ns)
            unseen_s = max(oldest_s, frame_age_s)  # likewise
        oldest_ms = 1000 * max(since_s, oldest_s)
        if oldest_ms > options.obstacles_timeout_ms:
            missing[index] = f"are {oldest_ms:.0f} ms old"
            continue
        places, yaws, units, halves, velocities, speeds, _ = source.seen
        response_s = np.empty(len(yaws))
        response_s[:] = unseen_s + options.actuation_delay_ms / 1000
        fresh.append(Seen(places + velocities * old_s, yaws, units, halves, velocities, speeds, response_s))
    if len(fresh) == 1:
        return fresh[0], missing
    return (Seen._make(map(np.concatenate, zip(*fresh, strict=True))) if fresh else _NOTHING), missing


class _Reader:
    """The markers of one array, field by field."""

    def __init__(self, message: bytes) -> None:
        self.order = byte_order(message)
        (count,) = struct.unpack_from(f"{self.order}I", message, 4)
        if count > _MOST_MARKERS:
            raise BadInput(f"obstacles: an array of {count} markers; at most {_MOST_MARKERS} are read")
        self._message, self._at = message, 8
        self._kind = struct.Struct(f"{self.order}3i")
        self._place = struct.Struct(f"{self.order}10d")
        self._count = struct.Struct(f"{self.order}I")
        self.frames: set[bytes] = set()
        self.solids: list[tuple[float, ...]] = []
        self.keys: list[tuple[bytes, int]] = []
        self.stamps_ns: list[int] = []
        self.arrows: dict[tuple[bytes, int], tuple[float, ...]] = {}
        for _ in range(count):
            self._marker()

    def _marker(self) -> None:
        message = self._message
        stamp_ns, frame, at = header_at(message, self._at, self.order)
        ns, at = text_at(message, at, self.order)
        at = aligned(at, 4)
        number, kind, action = self._kind.unpack_from(message, at)
        at = aligned(at + 12, 8)
        place = self._place.unpack_from(message, at)
        at = aligned(at + 80 + 16 + 8 + 1, 4)  # behind colour, lifetime and frame_locked
        if action == _ADD and (kind in _SOLIDS or kind == _ARROW):
            self.frames.add(frame)
            if kind in _SOLIDS:
                self.solids.append(place)
                self.keys.append((ns, number))
                self.stamps_ns.append(stamp_ns)
            else:
                self.arrows[ns, number] = (*place[3:7], *self._arrow(at))
        self._at = self._end(at)

    def _arrow(self, at: int) -> tuple[float, ...]:
        if self._count.unpack_from(self._message, at)[0] != 2:  # noqa: PLR2004 - from where and to where
            raise BadInput("obstacles: an ARROW has to have two points, from the first to the second in m/s")
        begin_and_end = struct.unpack_from(f"{self.order}6d", self._message, aligned(at + 4, 8))
        return tuple(begin_and_end[3 + axis] - begin_and_end[axis] for axis in range(3))

    def _end(self, at: int) -> int:
        """Where the marker ends whose points begin here."""
        message, order = self._message, self.order
        if message.startswith(_NO_LISTS, at):
            at += len(_NO_LISTS)
        else:
            at = self._list_end(at, 24, 8)  # points
            at = self._list_end(at, 16, 4)  # colours
            at = text_at(message, at, order)[1]  # texture_resource
            at = header_at(message, at, order)[2]  # texture: header, format, data
            at = self._list_end(text_at(message, at, order)[1], 1, 1)
            at = self._list_end(at, 8, 4)  # uv_coordinates
        at = aligned(text_at(message, at, order)[1], 4)  # text
        if message.startswith(_NO_MESH, at):
            at += len(_NO_MESH) + 1  # mesh_use_embedded_materials
        else:
            at = text_at(message, text_at(message, at, order)[1], order)[1]  # mesh_resource, mesh_file's name
            at = self._list_end(at, 1, 1) + 1  # mesh_file's data, mesh_use_embedded_materials
        if at > len(message):
            raise BadInput(f"obstacles: the array's {len(message)} bytes end within a marker")
        return at

    def _list_end(self, at: int, size: int, alignment: int) -> int:
        at = aligned(at, 4)
        count = int(self._count.unpack_from(self._message, at)[0])
        return aligned(at + 4, alignment) + count * size if count else at + 4


def read_obstacles(
    message: bytes, received_ns: int, options: GuardOptions, motion: Motion | None, before: Obstacles | None
) -> Obstacles:
    """Read an array and bring it into the odometry's frame.

    Args:
        message: CDR bytes.
        received_ns: monotonic time of receipt.
        options: for the axes of markers in another frame.
        motion: the newest odometry, which says where the vehicle was at the markers' stamps.
        before: the source's last array, for velocities where there is no arrow.

    Raises:
        BadInput: the bytes are no such array, a value is not finite, markers have different frames or one that cannot
            be brought into the odometry's, or there is no odometry at that time.
    """
    try:
        read = _Reader(message)
    except (struct.error, IndexError) as error:
        raise BadInput(f"obstacles: {len(message)} bytes are no MarkerArray ({one_line(error)})") from error
    values = np.array(read.solids).reshape(-1, 10)
    arrows = np.array([read.arrows.get(key, _NO_ARROW) for key in read.keys]).reshape(-1, 7)
    if not (np.abs(values) <= _MOST_M).all() or not (np.abs(arrows) <= _MOST_M).all():  # NaN compares false
        raise BadInput(f"obstacles: a position, orientation, size or velocity is not finite, or beyond {_MOST_M:g}")
    stamps_ns = np.array(read.stamps_ns)
    boxes = _in_plane(values, arrows, stamps_ns, received_ns, read.frames, options, motion)
    steps = {}
    for n, key in enumerate(read.keys):
        if key not in read.arrows:
            last = None if before is None else before.steps.get(key)
            steps[key] = _next_step(last, int(stamps_ns[n]) or received_ns, boxes[0][n].real, boxes[0][n].imag)
            boxes[3][n] = complex(*steps[key][3:5]) if steps[key][5] else 0.0
    unknown = sum(not step[5] for step in steps.values())
    stamp_ns = (*read.stamps_ns, 0)[0] if len(set(read.stamps_ns)) <= 1 else None
    places, yaws, halves, velocities = boxes
    seen = Seen(places, yaws, np.exp(1j * yaws), halves, velocities, np.abs(velocities), _NONE)
    return Obstacles(received_ns, stamps_ns, stamp_ns, seen, unknown, steps)


def _next_step(last: _Step | None, stamp_ns: int, x: float, y: float) -> _Step:
    """An object's velocity counts once two steps in a row agree: else the id may have gone from one to another."""
    dt_s = 0.0 if last is None else (stamp_ns - last[0]) / NS_PER_S
    if last is None or not _STEP_S[0] <= dt_s <= _STEP_S[1]:
        return last if last is not None and dt_s == 0.0 else (stamp_ns, x, y, math.nan, math.nan, False)
    along_x, along_y = (x - last[1]) / dt_s, (y - last[2]) / dt_s
    agree = math.hypot(along_x - last[3], along_y - last[4]) <= _MAX_CHANGE  # NaN compares false
    return stamp_ns, x, y, along_x, along_y, agree and math.hypot(along_x, along_y) <= _MAX_SPEED


def _in_plane(
    values: Floats,
    arrows: Floats,
    stamps_ns: NDArray[np.int64],
    received_ns: int,
    frames: set[bytes],
    options: GuardOptions,
    motion: Motion | None,
) -> tuple[Complex, Floats, Floats, Complex]:
    """Centres, headings, half sizes and velocities of markers in the odometry's frame."""
    if not frames:
        return _NOTHING.places, _NOTHING.yaws, _NOTHING.halves, _NOTHING.velocities
    if motion is None or received_ns - motion.received_ns > options.odometry_timeout_ms * NS_PER_MS:
        raise BadInput("obstacles: there is no fresh odometry, which says where the vehicle saw them from")
    if len(frames) > 1:
        raise BadInput(f"obstacles: one array has markers in several frames: {_names(frames)}")
    frame = next(iter(frames))
    own = frame in (motion.frame, motion.child_frame)
    optical = options.obstacles_frame == "optical" and not own
    if options.obstacles_frame == "plan" and not own:
        raise BadInput(
            f"obstacles: frame_id {_names(frames)} is not the odometry's, {_names({motion.frame})}; tf is not looked"
            " up, so obstacles_frame has to say optical or body, or the markers have to be in the odometry's frame"
        )
    x, y, z, w = _rotations(values[:, 3:7]).T
    vectors = _rotated(_rotations(arrows[:, :4]), arrows[:, 4:])
    if optical:  # forward is z, left is -x
        places, sizes = values[:, 2] - 1j * values[:, 0], values[:, [9, 7]]
        yaws = np.arctan2(-2.0 * (x * z + w * y), w * w - x * x - y * y + z * z)
        velocities = vectors[:, 2] - 1j * vectors[:, 0]
    else:
        places, sizes, yaws = values[:, 0] + 1j * values[:, 1], values[:, 7:9], yaw_of(x, y, z, w)
        velocities = vectors[:, 0] + 1j * vectors[:, 1]
    if frame != motion.frame:  # seen from the vehicle
        off = places + (0.0 if own else options.sensor_forward_m)
        since_s = (stamps_ns - motion.stamp_ns) / NS_PER_S
        other_clock = (stamps_ns <= 0) | (motion.stamp_ns <= 0) | (np.abs(since_s) > USABLE_AGE_S)
        at_x, at_y, yaw = motion.after(np.where(other_clock, (received_ns - motion.received_ns) / NS_PER_S, since_s))
        turned = np.exp(1j * yaw)
        places, velocities, yaws = at_x + 1j * at_y + off * turned, velocities * turned, yaws + yaw
    return places, yaws, np.abs(sizes) / 2, velocities


def _rotations(turns: Floats) -> Floats:
    """Quaternions of length one; one of zeros, which messages have where nobody set it, is no rotation."""
    turns = np.where(turns.any(axis=1, keepdims=True), turns, (0.0, 0.0, 0.0, 1.0))
    return np.asarray(turns / np.linalg.norm(turns, axis=1, keepdims=True))


def _rotated(turns: Floats, vectors: Floats) -> Floats:
    """Vectors turned: v + 2 w (u x v) + 2 u x (u x v), of the quaternions (u, w)."""
    across = 2.0 * np.cross(turns[:, :3], vectors)
    return np.asarray(vectors + turns[:, 3:] * across + np.cross(turns[:, :3], across))


def _names(frames: set[bytes]) -> str:
    return ", ".join(repr(frame.decode("utf-8", "replace")) for frame in sorted(frames))
