"""Obstacles read from the CDR bytes of a `visualization_msgs/MarkerArray`.

Oriented boxes with velocities, in a plane.

Each array replaces the one before of its source. `safety/markers.py` defines what an object is; an ARROW
of the same `ns` and `id` says how it moves over ground: from `points[0]` to `points[1]` in m/s, turned by
the ARROW's pose as RViz draws it.

An array proves that the way is free only if all of it could be read. Of a marker that could not, what could
be read
counts: an object whose place is known is judged all the same. `Obstacles.unclear` says what the array
    leaves open.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.errors import BadInput
from torchperf_ros.safety.markers import NO_ARROW, Floats, Markers, rotated, rotations
from torchperf_ros.safety.odometry import MOST_M, Motion, yaw_of
from torchperf_ros.safety.source_clock import SourceClock, was_overtaken
from torchperf_ros.safety.tracks import FAR_M, Complex, Flags, Tracked, Tracks, follow
from torchperf_ros.settings.safety_options import GuardOptions

_SIZES_M: Final = (0.01, 10_000.0)  # a size beyond is not that of an object
_UNKNOWN_SIZE_M: Final = 10.0  # of an object whose size cannot be read
_FASTEST: Final = 100.0  # m/s; a velocity beyond is no road user's
_STRAY_NS: Final = NS_PER_S  # a stamp so far ahead of the array's others is no time of its own
_SURE: Final = 0.6  # standard deviations, by which what drives ahead may be slower than it seems
_REVERSES: Final = 2.0  # standard deviations; what moves by less, ahead, does not come towards us
_MOVES: Final = 0.8  # standard deviations; what seems to move by less stands
# Standard deviations, by which what drives ahead may be faster than it seems where there is time to see it better.
_LIKELY: Final = 1.0
_KNOWN: Final = 1.5  # m/s, standard deviation; of a velocity that is known less well nothing is likely


class Seen(NamedTuple):
    """Obstacles in the odometry's frame.

    Attributes:
        places: centres as x + iy in m, shape [n].
        yaws, units: headings in rad, and as x + iy, shape [n].
        halves: half length and half width in m, shape [n, 2].
        velocities, speeds: over ground, as x + iy, and how large they are, in m/s; zero where it is not
        known.
        unsure: standard deviation of the velocity in m/s along each axis; 0 of what has an ARROW.
        response_s: until we respond to each, shape [n].
    """

    places: Complex
    yaws: Floats
    units: Complex
    halves: Floats
    velocities: Complex
    speeds: Floats
    unsure: Floats
    response_s: Floats

    def packed(self) -> list[Any]:
        return [np.stack((column.real, column.imag)).tolist() for column in self]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> "Seen":
        parts = [np.array(column, np.float64) for column in packed]
        halves = parts[3][0].reshape(-1, 2)
        places, units, velocities = (parts[at][0] + 1j * parts[at][1] for at in (0, 2, 4))
        return cls(places, parts[1][0], units, halves, velocities, *(parts[at][0] for at in (5, 6, 7)))

    def only(self, kept: Flags) -> "Seen":
        # Before the time to respond is known.
        return self._replace(
            places=self.places[kept],
            yaws=self.yaws[kept],
            units=self.units[kept],
            halves=self.halves[kept],
            velocities=self.velocities[kept],
            speeds=self.speeds[kept],
            unsure=self.unsure[kept],
        )


_NONE, _NO_PLACES = np.zeros(0), np.zeros(0, np.complex128)
_NOTHING = Seen(_NO_PLACES, _NONE, _NO_PLACES, np.zeros((0, 2)), _NO_PLACES, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class Obstacles:
    """What one source saw.

    Attributes:
        received_ns: when the array was received, monotonic.
        stamps_ns: when each was seen, by the source's clock, shape [n].
        stamp_ns: the one that counts for the array, 0 for none.
        unstamped: whether it has nothing that could have a stamp.
        seen: where they were then; the time to respond is not known yet.
        no_velocity: of how many it is not known.
        refused: how many markers could not be read, or not all of them.
        why: which part of the first of these could not be.
        unclear: why the array does not prove that the way is free, "" if it does.
        solids: of its objects, as `Markers` has them.
        tracks: of what has no ARROW, for the next array's velocities; None: nothing was without.
        clock: the source's.
    """

    received_ns: int
    stamps_ns: NDArray[np.int64]
    stamp_ns: int
    unstamped: bool
    seen: Seen
    no_velocity: int
    refused: int
    why: str
    unclear: str
    solids: Floats
    tracks: Tracks | None
    clock: SourceClock = field(default_factory=SourceClock)

    def before(self, later: "Obstacles", most_ms: float) -> "Obstacles":
        """What counts once another array has come: that, or, if it was overtaken by this one, both.

        What is older takes nothing away of what is newer.
        """
        if not was_overtaken(later.stamp_ns, later.received_ns - self.received_ns, self.stamp_ns, most_ms):
            return later
        return replace(
            self,
            stamps_ns=np.concatenate((self.stamps_ns, later.stamps_ns)),
            seen=Seen._make(map(np.concatenate, zip(self.seen, later.seen, strict=True))),
            unstamped=self.unstamped and later.unstamped,
            unclear=self.unclear or later.unclear,
        )


def seen_now(
    sources: Sequence[Obstacles | None],
    options: GuardOptions,
    now_ns: int,
    ros_now_ns: int,
    frame_age_s: float,
) -> tuple[Seen, dict[int, str]]:
    """All fresh obstacles, led on at constant velocity to now.

    And of each source that leaves something open, what.

    The response time to one is the age of the plan's frame, or its own if that is larger, and the actuation
    delay.
    """
    missing, fresh = {}, []
    for index, source in enumerate(sources):
        if source is None:
            missing[index] = "were not received"
            continue
        age_s, unknown = source.clock.age_s(source.stamp_ns, source.received_ns, now_ns, ros_now_ns)
        if unknown and source.unstamped:
            age_s, unknown = (now_ns - source.received_ns) / NS_PER_S, ""
        differ = not unknown and (source.stamps_ns != source.stamp_ns).any()
        if unknown or (not differ and 1000 * age_s > options.obstacles_timeout_ms):
            missing[index] = f"are {unknown or f'{1000 * age_s:.0f} ms old'}"
            continue
        if source.unclear:
            missing[index] = source.unclear
        seen = source.seen
        ages_s: Floats | float = age_s
        if differ:  # each is as old as its own stamp says: one that is old takes none of the others with it
            ages_s = np.maximum(age_s + (source.stamp_ns - source.stamps_ns) / NS_PER_S, 0.0)
            kept = 1000 * ages_s <= options.obstacles_timeout_ms
            if not kept.all():
                missing[index] = f"are {1000 * float(ages_s.max()):.0f} ms old in part"
                ages_s, seen = ages_s[kept], seen.only(kept)
        places, yaws, units, halves, velocities, speeds, unsure, _ = seen
        response_s = np.empty(len(yaws))
        response_s[:] = np.fmax(ages_s, frame_age_s)  # a NaN counts as unknown
        response_s += options.actuation_delay_ms / 1000
        fresh.append(
            Seen(places + velocities * ages_s, yaws, units, halves, velocities, speeds, unsure, response_s)
        )
    if len(fresh) == 1:
        return fresh[0], missing
    return (Seen._make(map(np.concatenate, zip(*fresh, strict=True))) if fresh else _NOTHING), missing


def read_obstacles(
    message: bytes,
    received_ns: int,
    options: GuardOptions,
    motion: Motion | None,
    before: Obstacles | None,
    stamp_ns: int = 0,
    motion_clock: SourceClock | None = None,
) -> Obstacles:
    """Read an array and bring it into the odometry's frame.

    Args:
        message: CDR bytes.
        received_ns: monotonic time of receipt.
        options: for the axes of markers in another frame.
        motion: the newest odometry, which says where the vehicle was at the markers' stamps.
        before: the source's last array, for its clock, and for velocities where there is no arrow.
        stamp_ns: of what the array was computed from; it counts for markers without a stamp.
        motion_clock: that of the odometry.

    Raises:
        BadInput: the bytes are no such array, or there are objects and no odometry that says where they
            are.
    """
    read = Markers(message)
    problems = _Problems(read)
    clock = SourceClock() if before is None else before.clock
    stamps_ns, own_stamp_ns = _stamps(read, stamp_ns, problems)
    tracks = None if before is None else before.tracks
    unstamped = not read.keys and not own_stamp_ns
    if not read.keys and (tracks is None or _is_stale(motion, received_ns, options)):
        found = problems.found(_NO_PLACES, 0j)
        return Obstacles(
            received_ns, stamps_ns, own_stamp_ns, unstamped, _NOTHING, 0, *found, read.solids, tracks, clock
        )
    if motion is None or _is_stale(motion, received_ns, options):
        raise BadInput("obstacles: there is no fresh odometry, which says where the vehicle saw them from")
    since_s = _since_s(stamps_ns, received_ns, motion, clock, motion_clock)
    places, yaws, halves, velocities = _in_plane(read, since_s, options, motion, problems)
    here = complex(motion.x, motion.y)
    refused, why, unclear = problems.found(places, here)
    placed = ~np.isnan(places)
    seen = Seen(places, yaws, _NO_PLACES, halves, velocities, _NONE, np.zeros(len(places)), _NONE)
    unknown = 0
    loose = (placed & np.array([key not in read.arrows for key in read.keys], np.bool_)).nonzero()[0]
    if len(loose) or tracks is not None:
        at_ns = own_stamp_ns or received_ns
        if before is not None and tracks is not None and _has_no_time(own_stamp_ns, read, before):
            at_ns = tracks.stamp_ns + received_ns - before.received_ns
        late_ns = at_ns - own_stamp_ns + stamps_ns
        seen, counts, followed = _tracked(tracks, read, at_ns, motion, options, seen, late_ns, loose)
        unknown, tracks = followed.unknown, followed.tracks
        if followed.left_out and not unclear:
            unclear = f"have {followed.left_out} objects without velocities more than can be followed"
        more = len(seen.yaws) - len(stamps_ns)
        stamps_ns = np.concatenate((stamps_ns, np.full(more, own_stamp_ns, np.int64)))
        placed = np.concatenate((placed, np.ones(more, np.bool_))) & counts
    seen = seen._replace(units=np.exp(1j * seen.yaws), speeds=np.abs(seen.velocities))
    if not placed.all():
        seen, stamps_ns = seen.only(placed), stamps_ns[placed]
    found = (refused, why, unclear)
    return Obstacles(
        received_ns, stamps_ns, own_stamp_ns, unstamped, seen, unknown, *found, read.solids, tracks, clock
    )


def _has_no_time(stamp_ns: int, read: Markers, before: Obstacles) -> bool:
    """Whether an array's stamp does not say when it was seen: it has none, or that of another array.

    The same array again is of its stamp.
    """
    return not stamp_ns or (
        stamp_ns == before.stamp_ns and not np.array_equal(read.solids, before.solids, equal_nan=True)
    )


def _tracked(
    before: Tracks | None,
    read: Markers,
    at_ns: int,
    motion: Motion,
    options: GuardOptions,
    seen: Seen,
    stamps_ns: NDArray[np.int64],
    loose: NDArray[np.intp],
) -> tuple[Seen, Flags, Tracked]:
    """The objects, with velocities for what has no ARROW, and what was not detected; which of these count."""
    here = complex(motion.x, motion.y)
    keys, late_s = [read.keys[at] for at in loose.tolist()], (at_ns - stamps_ns[loose]) / NS_PER_S
    found = follow(
        before, at_ns, here, seen.places[loose], seen.yaws[loose], seen.halves[loose], keys, late_s
    )
    coasting, heading = found.coasting, complex(math.cos(motion.yaw), math.sin(motion.yaw))
    place, velocity, spread = coasting.mean()
    seen.places[loose], seen.velocities[loose], seen.unsure[loose] = (
        found.places,
        found.velocities,
        found.unsure,
    )
    places, velocities = np.concatenate((seen.places, place)), np.concatenate((seen.velocities, velocity))
    yaws, halves = (
        np.concatenate((seen.yaws, coasting.yaws)),
        np.concatenate((seen.halves, coasting.halves)),
    )
    unsure = np.concatenate((seen.unsure, spread))
    off, radius_m = (places - here) * heading.conjugate(), np.hypot(*halves.T)
    waits = _can_wait(np.abs(off) - radius_m, motion, options)
    in_way = (off.real > 0) & (np.abs(off.imag) < radius_m + 0.5 * options.vehicle.width_m)
    velocities = _on_the_safe_side(velocities, unsure, off.real > 0, waits & in_way, heading)
    # What was seen once counts where there is no time to see whether it is there.
    counts = np.ones(len(places), np.bool_)
    counts[loose] = (found.times > 1) | ((found.times == 1) & ~waits[loose])
    seen = Seen(places, yaws, _NO_PLACES, halves, velocities, _NONE, unsure, _NONE)
    return seen, counts, found


class _Problems:
    """Which parts of an array's objects could not be read.

    Each problem is of some objects. It leaves open whether the way is free, unless these are far away, or
    the object was made larger than it can be.
    """

    def __init__(self, read: Markers) -> None:
        self._read = read
        self._any, self._open = np.zeros((2, len(read.keys)), np.bool_)
        self._why = ""

    def note(self, has: Flags, what: str, *, leaves_open: bool = True) -> None:
        if not has.any():
            return
        self._any |= has
        if leaves_open:
            self._open |= has
        if not self._why:
            ns, number = self._read.keys[int(has.argmax())]
            self._why = f"marker {ns.decode('utf-8', 'replace')!r} {number}: {what}"

    def found(self, places: Complex, here: complex) -> tuple[int, str, str]:
        """How many markers, why the first, and why the way may not be free.

        `places`: NaN where it is not known.
        """
        read = self._read
        count = int(self._any.sum()) + len(read.unread)
        why = self._why or next(iter(read.unread), "")
        if read.unread:
            return count, why, f"have a part that cannot be read ({read.unread[0]})"
        if (self._open & ~(np.abs(places - here) > FAR_M)).any():
            return count, why, f"have a part that cannot be read ({why})"
        if not read.keys and read.labels:
            return count, why, f"have {read.labels} labels, and no object"
        return count, why, ""


def _is_stale(motion: Motion | None, received_ns: int, options: GuardOptions) -> bool:
    return motion is None or received_ns - motion.received_ns > options.odometry_timeout_ms * NS_PER_MS


def _stamps(read: Markers, stamp_ns: int, problems: _Problems) -> tuple[NDArray[np.int64], int]:
    """When each was seen, and the array: of its objects' stamps the median, the earlier of two."""
    stamps_ns = np.array(read.stamps_ns, np.int64)
    if not len(stamps_ns):
        return stamps_ns, read.stamp_ns or stamp_ns
    stamped = np.sort(stamps_ns[stamps_ns > 0])
    own_ns = int(stamped[(len(stamped) - 1) // 2]) if len(stamped) else read.stamp_ns or stamp_ns
    problems.note(stamps_ns < 0, "the stamp is no time")
    stray = stamps_ns - own_ns > _STRAY_NS
    problems.note(stray, "the stamp is more than a second ahead of the others")
    # so that no old marker takes one without a stamp with it
    newest_ns = stamped[-1] if len(stamped) else own_ns
    return np.where(stamps_ns <= 0, newest_ns, stamps_ns), own_ns


def _since_s(
    stamps_ns: NDArray[np.int64],
    received_ns: int,
    motion: Motion,
    clock: SourceClock,
    other: SourceClock | None,
) -> Floats:
    """How long after the odometry the objects were seen.

    By the receipts where the two clocks are not one.
    """
    since_s = (stamps_ns - motion.stamp_ns) / NS_PER_S
    if clock.is_ros is not None and other is not None and other.is_ros is not None:
        one = clock.is_ros and other.is_ros and (stamps_ns > 0)
    else:  # neither is known before the first plan
        one = (stamps_ns > 0) & (motion.stamp_ns > 0) & (np.abs(since_s) <= 1.0)
    return np.where(one, since_s, (received_ns - motion.received_ns) / NS_PER_S)


def _can_wait(away_m: Floats, motion: Motion, options: GuardOptions) -> Flags:
    """Before which objects the vehicle stops, even if they stand, although it does nothing until later arrays.

    Until then it may accelerate, as RSS has it, for as long as an array counts. So what is judged anew with each array
    is never closer than braking by `rss_brake` allows, however wrong its velocity was.

    Args:
        away_m: how far from the reference point each begins.
        motion: the vehicle's.
        options: its size and brakes, and how old arrays may be.
    """
    waits_s = (options.obstacles_timeout_ms + options.actuation_delay_ms) / 1000
    faster = max(motion.speed, 0.0) + options.rss_accel * waits_s
    stops_m = (faster - 0.5 * options.rss_accel * waits_s) * waits_s + faster**2 / (2 * options.rss_brake)
    front_m = options.vehicle.length_m - options.vehicle.rear_m
    return away_m >= front_m + stops_m + options.margin_m


def _on_the_safe_side(
    velocities: Complex, unsure: Floats, ahead: Flags, waits: Flags, heading: complex
) -> Complex:
    """Velocities as they count: doubt is on the safe side, but not where there is time to see an object better.

    What drives ahead of us may be slower, but reverses only where that is sure. What moves by no more than noise
    stands.
    Where braking can wait for later arrays, what is ahead is as fast as it may well be.
    """
    along = (velocities * heading.conjugate()).real
    less = np.where(ahead, np.minimum(_SURE * unsure, np.maximum(along, 0.0)), 0.0)
    less = np.where(ahead & (along < 0.0) & (np.abs(velocities) < _REVERSES * unsure), along, less)
    moves = np.abs(velocities) > _MOVES * unsure
    found = np.where(moves, velocities - less * heading, 0.0)
    may_drive = waits & ahead & (along > -_REVERSES * unsure) & (unsure <= _KNOWN)
    likely = np.where(
        moves, velocities - np.minimum(along, 0.0) * heading, np.maximum(along, 0.0) * heading
    )
    return np.where(may_drive, likely + _LIKELY * unsure * heading, found)


def _in_plane(
    read: Markers, since_s: Floats, options: GuardOptions, motion: Motion, problems: _Problems
) -> tuple[Complex, Floats, Floats, Complex]:
    """Centres (NaN where unknown), headings, half sizes and velocities of objects in the odometry's frame."""
    is_own, from_vehicle, seated = _seats(read.frames, options, motion)
    optical = options.obstacles_frame == "optical"
    turns, turned = rotations(read.solids[:, 3:7])
    vectors, moved = _vectors(read)
    at, sizes = read.solids[:, :3], np.abs(read.solids[:, 7:])
    x, y, z, w = turns.T
    ahead, left, length, width = at[:, 0], at[:, 1], sizes[:, 0], sizes[:, 1]
    yaws, velocities = yaw_of(x, y, z, w), vectors[:, 0] + 1j * vectors[:, 1]
    if optical and not is_own.all():  # forward is z, left is -x
        ahead, left = np.where(is_own, ahead, at[:, 2]), np.where(is_own, left, -at[:, 0])
        length, width = np.where(is_own, length, sizes[:, 2]), np.where(is_own, width, sizes[:, 0])
        yaws = np.where(is_own, yaws, np.arctan2(-2.0 * (x * z + w * y), w * w - x * x - y * y + z * z))
        velocities = np.where(is_own, velocities, vectors[:, 2] - 1j * vectors[:, 0])
    there = np.abs(np.stack((ahead, left))) <= MOST_M  # NaN compares false
    placed = there.all(axis=0)
    sized = (np.minimum(length, width) >= _SIZES_M[0]) & (np.maximum(length, width) <= _SIZES_M[1])
    if not seated.all():
        problems.note(~seated, _no_seat(read.frames, motion))
    problems.note(~placed, "the position is not finite, or beyond 1e+08 m")
    problems.note(~sized, "the size is not within 0.01 and 10000 m")
    problems.note(~turned, "the orientation is not 0.1 to 10 long", leaves_open=False)
    problems.note(~moved, "the velocity is not finite, beyond 100 m/s, or there are several")
    problems.note(read.odd, "the action is none of ADD, DELETE and DELETEALL")
    places = np.where(placed & seated, ahead, np.nan) + 1j * np.where(placed & seated, left, np.nan)
    halves = np.stack((length, width), axis=1) / 2
    if not (sized & turned).all():
        halves[~sized] = _UNKNOWN_SIZE_M / 2
        around = ~sized | ~turned  # in any heading it lies within a square
        halves[around] = np.hypot(*halves[around].T)[:, None]
    if from_vehicle.any():
        off = places + np.where(is_own, 0.0, options.sensor_forward_m)
        at_x, at_y, yaw = motion.after(since_s)
        turn = np.exp(1j * yaw)
        places = np.where(from_vehicle, at_x + 1j * at_y + off * turn, places)
        velocities = np.where(from_vehicle, velocities * turn, velocities)
        yaws = np.where(from_vehicle, yaws + yaw, yaws)
    return places, yaws, halves, velocities


def _seats(frames: list[bytes], options: GuardOptions, motion: Motion) -> tuple[Flags, Flags, Flags]:
    """Which objects are in a frame of the odometry's, which move with the vehicle, and which are in a known frame.

    Axes of another frame are those of `obstacles_frame`, which can be true of one other frame only.
    """
    names = set(frames)
    others = names - {motion.frame, motion.child_frame}
    is_own = np.array([frame not in others for frame in frames], np.bool_)
    from_vehicle = np.array([frame != motion.frame for frame in frames], np.bool_)
    seated = (
        is_own if options.obstacles_frame == "plan" or len(others) > 1 else np.ones(len(frames), np.bool_)
    )
    return is_own, from_vehicle, seated


def _no_seat(frames: list[bytes], motion: Motion) -> str:
    others, own = (
        ", ".join(repr(frame.decode("utf-8", "replace")) for frame in sorted(some))
        for some in (set(frames) - {motion.frame, motion.child_frame}, {motion.frame})
    )
    return (
        f"frame_id {others} is not the odometry's, {own}; tf is not looked up, so obstacles_frame has to"
        " say optical or body for one other frame, or the markers have to be in the odometry's frame"
    )


def _vectors(read: Markers) -> tuple[Floats, Flags]:
    """Velocities in the markers' axes, 0 where there is no ARROW, and which can be read."""
    arrows = np.array([read.arrows.get(key, NO_ARROW) for key in read.keys]).reshape(-1, 7)
    turns, turned = rotations(arrows[:, :4])
    moved = turned & (np.abs(arrows[:, 4:]) <= _FASTEST).all(axis=1)
    vectors = np.where(moved[:, None], arrows[:, 4:], 0.0)
    return rotated(turns, vectors), moved & (np.linalg.norm(vectors, axis=1) <= _FASTEST)
