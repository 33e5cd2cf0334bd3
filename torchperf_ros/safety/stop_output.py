"""The fallback `stop`: an output that brings the vehicle to a halt, made from the last good one."""

import functools
import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.cdr import aligned, byte_order, header_at
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput, one_line
from torchperf_ros.safety.odometry import MAX_SPEED

Floats = NDArray[np.float64]


def brake_along(
    points: Floats,
    times_s: Floats,
    start_s: float,
    deceleration: float,
    count: int,
    *,
    speed: float | None = None,
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Brake at a constant deceleration along a timed path, from where the vehicle is on it at `start_s`.

    The speed at the start is the path's own there, unless another is given; distance travelled after t
    seconds is v t - a t^2 / 2 until t = v / a, then constant (uniformly decelerated motion). The geometry
    of the path is kept, only its timing changes; where braking is longer than the path, its last segment is
    extended in a straight line.

    Args:
        points: positions in m, shape [n, 3], n >= 2.
        times_s: time of each point in s, strictly increasing, shape [n].
        start_s: when braking begins, on the same time line, within the path.
        deceleration: m/s^2, > 0.
        count: how many points to give, >= 2.
        speed: m/s at `start_s`, >= 0; None: the path's own, as far as a vehicle can have it.

    Returns:
        Positions [count, 3] and their times [count]: equally spaced from `start_s` to standstill, but no less than over
        the duration of the path; and of each the last point of the path that it has passed, as an index
        [count].

    Raises:
        ValueError: the deceleration is not positive, there are fewer than two points, or braking does not
            begin within their times.
    """
    if deceleration <= 0 or len(points) < 2:  # noqa: PLR2004 - a first and a last
        raise ValueError(
            f"cannot brake with {deceleration} m/s^2 along {len(points)} points: it takes two, and more"
            " than 0 m/s^2"
        )
    if not times_s[0] <= start_s <= times_s[-1]:
        raise ValueError(
            f"cannot brake from {start_s} s on: the path lasts from {times_s[0]} to {times_s[-1]} s"
        )
    steps = _lengths(points[1:] - points[:-1])
    distance = np.zeros(len(points))
    steps.cumsum(out=distance[1:])
    segment = min(int(times_s.searchsorted(start_s, side="right")), len(times_s) - 1) - 1
    if speed is None:
        speed = min(float(steps[segment] / (times_s[segment + 1] - times_s[segment])), MAX_SPEED)
    stop_after_s = speed / deceleration
    after_s = np.linspace(0.0, max(stop_after_s, float(times_s[-1] - times_s[0])), count)
    braking_s = np.minimum(after_s, stop_after_s)
    wanted = np.interp(start_s, times_s, distance) + speed * braking_s - 0.5 * deceleration * braking_s**2
    passed = np.maximum(distance.searchsorted(wanted, side="right") - 1, segment)
    return _points_at(points, distance, wanted), start_s + after_s, passed


def _lengths(vectors: Floats) -> Floats:
    return np.asarray(
        np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    )  # a third of what np.linalg.norm takes


def _points_at(points: Floats, distance: Floats, wanted: Floats) -> Floats:
    inside = np.empty((len(wanted), points.shape[1]))
    for axis in range(points.shape[1]):
        inside[:, axis] = np.interp(wanted, distance, points[:, axis])
    beyond = np.maximum(wanted - distance[-1], 0.0)
    moving = np.flatnonzero(distance[1:] > distance[:-1])
    if not len(moving) or not np.count_nonzero(beyond):
        return inside
    end = moving[-1]
    direction = (points[end + 1] - points[end]) / (distance[end + 1] - distance[end])
    return np.asarray(inside + beyond[:, None] * direction)


PATH = "nav_msgs/msg/Path"

_MOST_POSES = 200  # of a stop: 5 cm apart over the 10 m that 10 m/s take at 5 m/s^2
# poses of a path that is read: reading and braking take some 2 ms then, and a stop has 4
_MOST_READ = 10_000
# between two answers, beyond what a clock at up to twice the speed gains; 15 cm at 30 m/s
_STEP_NS = 5_000_000
_STANDS = 0.5  # m/s in the last step of a path that brakes to standstill
_SAME_PLACE_M = 0.1  # places of a path that are as near to the vehicle
_PLACE_BYTES = 56  # x, y, z and a quaternion, as float64
_NAME_AT = 12  # of a path's bytes: the header's `frame_id`, behind encapsulation and stamp


def can_stop(output_type: str) -> bool:
    """Whether there is a stop output for this message type; for now only for `nav_msgs/msg/Path`."""
    return output_type == PATH


@functools.cache
def warm_up_stop(output_type: str) -> None:
    """Make a stop output once, where there is one.

    The first takes ten times as long as those that follow.
    """
    if not can_stop(output_type):
        return
    head = b"\0\1\0\0" + bytes(8) + b"\1\0\0\0" + bytes(4)  # little-endian; a header without stamp or frame
    path = TimedPath(head, "<", b"\1\0\0\0\0", np.arange(2) * NS_PER_S, np.zeros((2, 3)), np.zeros((2, 4)))
    stop = path.stop(0, 1.0)
    TimedPath.read(b"" if stop is None else stop.bytes())


@dataclass(frozen=True, slots=True)
class TimedPath:
    """A path that says where the vehicle is to be when, so that braking can begin somewhere on it.

    It is read from the message's bytes and the stop is written as bytes: 3,000 poses as objects take 20 ms
    and more.
    """

    head: bytes  # the message's bytes before the number of poses: encapsulation and header
    order: str  # byte order, `<` or `>`
    frame_id: bytes  # of every pose, as in the message: its length, the text, NUL
    stamps_ns: NDArray[np.int64]  # of the poses, shape [n]
    points: Floats  # positions in m, shape [n, 3]
    turns: Floats  # orientations as x, y, z, w, shape [n, 4]
    # by how much the stamps were moved since they were read; that of `head` is as it was read
    moved_ns: int = 0

    @classmethod
    def read(cls, path: bytes) -> "TimedPath | None":
        """Read the CDR bytes of a `nav_msgs/msg/Path`.

        Returns:
            None where nothing can brake along it: it cannot be parsed, its stamps do not increase from pose to pose
            (they may have none of their own), or a value is not finite.
        """
        try:
            found = cls.parse(path)
        except BadInput:
            return None
        numbers = np.concatenate((found.points, found.turns), axis=1)
        return found if np.isfinite(numbers).all() and (np.diff(found.stamps_ns) > 0).all() else None

    @classmethod
    def parse(cls, path: bytes) -> "TimedPath":
        """Read the CDR bytes of a `nav_msgs/msg/Path`, with any stamps and values.

        Raises:
            BadInput: it has fewer than two poses or more than 10,000, they do not share one frame, a stamp
                is no time, or the bytes are no path; the message says which.
        """
        try:
            return cls._parse(path)
        except (
            struct.error,
            IndexError,
            TypeError,
            ValueError,
        ) as error:  # what reading beyond the end raises
            raise BadInput(f"is no nav_msgs/Path of {len(path)} bytes: {one_line(error)}") from error

    @classmethod
    def _parse(cls, path: bytes) -> "TimedPath":
        order = byte_order(path)
        head_end = aligned(header_at(path, 4, order)[2], 4)
        (count,) = struct.unpack_from(f"{order}I", path, head_end)
        if not 1 < count <= _MOST_READ:
            raise BadInput(f"has {count} poses; it has to have 2 to {_MOST_READ}")
        first_at = head_end + 4
        frame_id = path[first_at + 8 : header_at(path, first_at, order)[2]]
        poses = _Poses(path, order, first_at, len(frame_id), count)
        if poses.later_ids.tobytes() != frame_id * (count - 1):
            raise BadInput("has poses that do not share one frame_id")
        parts = np.concatenate((poses.first_stamp, poses.later_stamps)).astype(np.int64)
        seconds, nanoseconds = parts.T
        if (
            parts.min() < 0 or nanoseconds.max() >= NS_PER_S
        ):  # nanosec is unsigned: a negative one is of 2^31 and more
            at = int((parts.min(axis=1) < 0).argmax() or (nanoseconds >= NS_PER_S).argmax())
            raise BadInput(
                f"has a stamp that is no time at pose {at}: sec is negative, or nanosec a second or more"
            )
        stamps = seconds * NS_PER_S + nanoseconds
        places = poses.places.astype(np.float64)
        return cls(path[:head_end], order, frame_id, stamps, places[:, :3], places[:, 3:])

    @classmethod
    def made(cls, stamps_ns: NDArray[np.int64], points: Floats, yaws: Floats, frame: bytes) -> "TimedPath":
        """A flat path.

        Stamps [n], positions in m [n, 3], headings in rad [n], and the frame's name without NUL.
        """
        frame_id = struct.pack("<I", len(frame) + 1) + frame + b"\0"
        head = b"\0\1\0\0" + struct.pack("<iI", *divmod(int(stamps_ns[0]), NS_PER_S)) + frame_id
        head += bytes(aligned(len(head), 4) - len(head))
        turns = np.zeros((len(points), 4))
        halves = 0.5 * yaws
        np.sin(halves, out=turns[:, 2])
        np.cos(halves, out=turns[:, 3])
        return cls(head, "<", frame_id, stamps_ns, points, turns)

    @property
    def frame(self) -> bytes:
        # Of its header and its poses, where they name one. Two that differ are both named: who follows the
        # path may take either, so it is in no frame that there is.
        own = self.frame_id[4:].rstrip(b"\0")
        if not self.head.startswith(self.frame_id, _NAME_AT):
            own = b" and ".join(sorted({own, header_at(self.head, 4, self.order)[1]} - {b""}))
        return own

    @property
    def stops(self) -> bool:
        """Whether it ends with less than 0.5 m/s."""
        last_s = float(self.stamps_ns[-1] - self.stamps_ns[-2]) / NS_PER_S
        return float(_lengths(self.points[-1:] - self.points[-2:-1])[0]) <= _STANDS * last_s

    def moved(self, by_ns: int) -> "TimedPath":
        """The same path, its poses stamped so much later: with the ROS clock, which has stepped."""
        return (
            replace(self, stamps_ns=self.stamps_ns + by_ns, moved_ns=self.moved_ns + by_ns)
            if by_ns
            else self
        )

    def speed_at(self, at_ns: int) -> float:
        """In m/s, exact where it changes evenly, as in braking; 0 beyond either end."""
        if not self.stamps_ns[0] <= at_ns < self.stamps_ns[-1]:
            return 0.0
        times_s = (self.stamps_ns - at_ns) / NS_PER_S
        spans = times_s[1:] - times_s[:-1]
        speeds = _lengths(self.points[1:] - self.points[:-1]) / spans  # those in the middle of each step
        middles = times_s[:-1] + 0.5 * spans
        if middles[0] < 0.0 or len(speeds) < 2:  # noqa: PLR2004 - from one to another
            return float(np.interp(0.0, middles, speeds))
        gained = (speeds[1] - speeds[0]) / (middles[1] - middles[0])
        return max(float(speeds[0] - gained * middles[0]), 0.0)

    def stop(self, start_ns: int, deceleration: float) -> "TimedPath | None":
        """Brake along the path from `start_ns` on, as fast as the path is there.

        `header.stamp` stays that of the frame that the path was computed from, so that its age shows; the
        poses, as many as the path has and at most 200, are stamped from `start_ns` to standstill and turned
        as the path is there.

        Args:
            start_ns: when braking begins, in the time of the path's stamps.
            deceleration: m/s^2.

        Returns:
            The braking path; None if the path does not say where the vehicle is then.
        """
        if not self.stamps_ns[0] <= start_ns <= self.stamps_ns[-1]:
            return None
        return self.braked(start_ns, deceleration, min(len(self.stamps_ns), _MOST_POSES))

    def braked(
        self, start_ns: int, deceleration: float, count: int, *, speed: float | None = None
    ) -> "TimedPath":
        """The path with this many poses from `start_ns`, which lies on it, to standstill.

        See `brake_along`.
        """
        times_s = (self.stamps_ns - start_ns) / NS_PER_S
        where, after_s, passed = brake_along(self.points, times_s, 0.0, deceleration, count, speed=speed)
        stamps = start_ns + np.rint(after_s * NS_PER_S).astype(np.int64)
        following = np.minimum(passed + 1, len(self.points) - 1)
        before = self.points[passed]
        steps = _lengths(self.points[following] - before)
        share = _lengths(where - before) / np.where(steps > 0, steps, np.inf)
        turns = self._turned(passed, following, np.minimum(share, 1.0)[:, None])
        return replace(self, stamps_ns=stamps, points=where, turns=turns)

    def begun_at(self, place: complex, now_ns: int, most_m: float) -> "TimedPath":
        """The path with its clock set so that it is at `now_ns` where it comes nearest to a place (x + iy, m).

        A vehicle that was braked is behind the place that an earlier plan has for now, and one that has left it is
        beside. By up to `most_m` the path is put where the vehicle is, so that it leads on from there in the same
        shape: it must not ask a vehicle that stands to be elsewhere. Where the path passes the place twice, as one
        that turns round does, the pass nearer to its own clock counts.
        """
        ways = self.points[:, 0] + 1j * self.points[:, 1]
        steps = ways[1:] - ways[:-1]
        squares = np.abs(steps) ** 2
        along = ((place - ways[:-1]) * steps.conj()).real
        share = np.clip(np.divide(along, squares, out=np.zeros(len(steps)), where=squares > 0), 0.0, 1.0)
        off = place - (ways[:-1] + share * steps)
        off_m = np.abs(off)
        times_ns = self.stamps_ns[:-1] + np.rint(share * np.diff(self.stamps_ns)).astype(np.int64)
        near = np.flatnonzero(off_m <= off_m.min() + _SAME_PLACE_M)
        passes = np.split(near, np.flatnonzero(np.diff(near) > 1) + 1)
        same = min(passes, key=lambda one: int(np.abs(times_ns[one] - now_ns).min()))
        own = int(same[off_m[same].argmin()])
        points = self.points
        if off_m[own] <= most_m:
            points = points + (off[own].real, off[own].imag, 0.0)
        return replace(self, points=points, stamps_ns=self.stamps_ns + (now_ns - int(times_ns[own])))

    def cut(self, start_ns: int) -> "TimedPath":
        """What is left of the path from `start_ns` on, which lies before its last pose, with a pose at that time."""
        later = int(np.searchsorted(self.stamps_ns, start_ns, side="right"))
        before_ns, later_ns = self.stamps_ns[later - 1 : later + 1]
        share = (start_ns - before_ns) / (later_ns - before_ns)
        where = self.points[later - 1] + share * (self.points[later] - self.points[later - 1])
        return replace(
            self,
            stamps_ns=np.concatenate(([start_ns], self.stamps_ns[later:])),
            points=np.vstack((where, self.points[later:])),
            turns=np.vstack((self._turned(later - 1, later, share), self.turns[later:])),
        )

    # one index or many
    def _turned(self, passed: Any, following: Any, share: Any) -> Floats:  # noqa: ANN401
        """Orientations between two poses each; of the second's two quaternions the nearer one counts."""
        before, after = self.turns[passed], self.turns[following]
        same = np.sign((before * after).sum(axis=-1, keepdims=True))
        return np.asarray(before + share * (np.where(same < 0, -after, after) - before))

    def bytes(self) -> bytes:
        count, first_at = len(self.stamps_ns), len(self.head) + 4
        message = bytearray(_Poses.end(first_at, len(self.frame_id), count))
        message[:first_at] = self.head + struct.pack(f"{self.order}I", count)
        message[first_at + 8 : first_at + 8 + len(self.frame_id)] = self.frame_id
        poses = _Poses(message, self.order, first_at, len(self.frame_id), count)
        poses.places[:, :3], poses.places[:, 3:] = self.points, self.turns
        for column, part in enumerate(np.divmod(self.stamps_ns, NS_PER_S)):
            poses.first_stamp[0, column], poses.later_stamps[:, column] = part[0], part[1:]
        poses.later_ids[:] = np.frombuffer(self.frame_id, np.uint8)
        return bytes(message)


@dataclass(frozen=True, slots=True)
class GoingStop:
    """A stop that goes out, as it was published last.

    Its place and its braking follow the monotonic clock. Its stamps are in ROS time, so they move with a
    step of that clock. A clock that runs slower or faster, as that of a simulation, does not step.
    """

    path: TimedPath
    payload: bytes
    now_ns: int  # monotonic
    ros_now_ns: int

    @classmethod
    def begun(cls, path: TimedPath, now_ns: int, ros_now_ns: int) -> "GoingStop":
        return cls(path, path.bytes(), now_ns, ros_now_ns)

    def at(self, now_ns: int, ros_now_ns: int) -> "GoingStop":
        """The same at a later time; with other stamps if the ROS clock has stepped since."""
        passed_ns = now_ns - self.now_ns
        step_ns = ros_now_ns - self.ros_now_ns - passed_ns
        if abs(step_ns) <= abs(passed_ns) + _STEP_NS:
            return replace(self, now_ns=now_ns, ros_now_ns=ros_now_ns)
        return self.begun(self.path.moved(step_ns), now_ns, ros_now_ns)


class _Poses:
    """Views on the poses of a path's bytes: all of them have a `frame_id` of the same length.

    In CDR a number stands at a multiple of its size, counted from the end of the encapsulation's 4 bytes. A
    pose ends at such a multiple of eight, so the same number of bytes lies between any two.
    """

    def __init__(
        self, message: bytes | bytearray, order: str, first_at: int, id_bytes: int, count: int
    ) -> None:
        place_at, step = self._layout(first_at, id_bytes)
        later_at = place_at + _PLACE_BYTES
        self.places = np.ndarray((count, 7), f"{order}f8", message, place_at, (step, 8))
        self.first_stamp = np.ndarray((1, 2), f"{order}i4", message, first_at)
        self.later_stamps = np.ndarray((count - 1, 2), f"{order}i4", message, later_at, (step, 4))
        self.later_ids = np.ndarray((count - 1, id_bytes), np.uint8, message, later_at + 8, (step, 1))

    @staticmethod
    def _layout(first_at: int, id_bytes: int) -> tuple[int, int]:
        """Where the first place begins, and how far it is from one to the next."""
        return aligned(first_at + 8 + id_bytes, 8), _PLACE_BYTES + -(-(8 + id_bytes) // 8) * 8

    @classmethod
    def end(cls, first_at: int, id_bytes: int, count: int) -> int:
        place_at, step = cls._layout(first_at, id_bytes)
        return place_at + (count - 1) * step + _PLACE_BYTES
