"""What the stages of a closed loop share: driving by rules, and the messages between them; no torch.

A lane, the Intelligent Driver Model, and a plan of the next three seconds: `RulePlannerAdapter`
(`models/driving.py`) runs these in a worker, the closed loop's arms without workers call them directly.

The messages are objects with velocities, odometry and timed paths. An object is two markers of one
namespace and id: a CUBE, its box, and an ARROW whose second point less its first is its velocity in m/s.
Both are in the frame that their headers name.
"""

import bisect
import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.messages import empty_message, encode, header, message_class
from torchperf_ros.safety.stop_output import TimedPath

Floats = NDArray[np.float64]

# Between two poses of a plan.
STEP_S: Final = 0.1
# Of a plan: 0 to 3.0 s.
POSES: Final = 31
# m/s^2; what UN R157 (5.2.5.2) takes a vehicle to brake with in an emergency.
MAX_BRAKING: Final = 6.0
# x m, y m, yaw rad, vx m/s, vy m/s, length m, width m, in the frame of the plan.
OBJECT_FIELDS: Final = 7

# How far each tier of the oracle sees.
RANGES_M: Final = {"full": 150.0, "medium": 110.0, "fast": 80.0}
# How far ahead each tier of the planner foresees objects that move into the lane.
AHEAD_S: Final = {"full": 2.0, "medium": 1.5, "fast": 1.0}

_CHORD_M: Final = 4.0  # of a curve: off by 1.3 cm at a radius of 150 m
_TIME_GAP_S, _GAP_M = 1.5, 2.5
_ACCELERATION, _COMFORTABLE_BRAKING = 1.5, 2.0
# m/s^3 while braking begins; 6 m/s^2 are reached after 0.24 s, as brakes build up pressure
_MAX_JERK: Final = 25.0
_HALF_WIDTH_M, _FRONT_M = (
    0.95,
    3.5,
)  # of the vehicle; from its reference point, the rear axle, to its front bumper
_SIDE_MARGIN_M: Final = 0.35
_CENTRE_AFTER_S: Final = 3.0
_CHANGES_M: Final = 1.0  # one that is further aside than that changes lanes
_SPARE_M: Final = 0.5
_MOST_LATERAL, _MOST_CURVATURE = (
    2.0,
    0.1,
)  # m/s^2 and 1/m, of 6 d / way^2, as sharply as it turns to move d m aside


@dataclass(frozen=True)
class Centreline:
    """The middle of a lane as a line of points, a few metres apart where it turns, straight beyond its ends.

    Attributes:
        points: x and y in m, shape [n, 2], n >= 2.
    """

    points: Floats

    @classmethod
    def of(
        cls, length_m: float, curve_at_m: float = math.inf, radius_m: float = math.inf, turn_m: float = 0.0
    ) -> "Centreline":
        """A lane from the origin along x.

        From `curve_at_m` on it turns left with `radius_m` for `turn_m`.
        """
        if not turn_m:
            return cls(np.array([[0.0, 0.0], [length_m, 0.0]]))
        turning = np.arange(curve_at_m, curve_at_m + turn_m + _CHORD_M, _CHORD_M)
        s = np.concatenate(([0.0, curve_at_m - _CHORD_M], turning, [turning[-1] + _CHORD_M, length_m]))
        headings = np.clip(0.5 * (s[1:] + s[:-1]) - curve_at_m, 0.0, turn_m) / radius_m
        steps = np.diff(s)[:, None] * np.stack((np.cos(headings), np.sin(headings)), axis=1)
        return cls(np.concatenate((np.zeros((1, 2)), np.cumsum(steps, axis=0))))

    @cached_property
    def _segments(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Starts and directions of the segments, how far along the lane each begins, and headings."""
        steps = np.diff(self.points, axis=0)
        lengths = np.hypot(steps[:, 0], steps[:, 1])
        begins = np.concatenate(([0.0], np.cumsum(lengths)[:-1]))
        return (
            self.points[:-1],
            steps / lengths[:, None],
            begins,
            np.unwrap(np.arctan2(steps[:, 1], steps[:, 0])),
        )

    def at(self, s: Floats, d: Floats | float = 0.0) -> Floats:
        """x, y and heading [n, 3] at distances along the lane, `d` to its left."""
        starts, directions, begins, headings = self._segments
        index = np.clip(np.searchsorted(begins, s, side="right") - 1, 0, len(begins) - 1)
        along, direction = s - begins[index], directions[index]
        x = starts[index, 0] + along * direction[:, 0] - d * direction[:, 1]
        y = starts[index, 1] + along * direction[:, 1] + d * direction[:, 0]
        # from the middle of a segment to that of the next one the heading goes over
        return np.stack(
            (x, y, np.interp(s, begins + 0.5 * np.append(np.diff(begins), 0.0), headings)), axis=1
        )

    def beside(self, left_m: float) -> "Centreline":
        """The lane so far to the left of this one."""
        if not left_m:
            return self
        *_, begins, _ = self._segments
        ends = np.append(begins, begins[-1] + np.hypot(*(self.points[-1] - self.points[-2])))
        return Centreline(self.at(ends, left_m)[:, :2])

    @cached_property
    def _lists(self) -> tuple[list[list[float]], list[list[float]], list[float], list[float]]:
        starts, directions, begins, headings = self._segments
        return starts.tolist(), directions.tolist(), begins.tolist(), headings.tolist()

    def one_at(self, s: float, d: float) -> tuple[float, float, float]:
        """`at` for one place; quicker for a few of them. The heading is that of the segment."""
        starts, directions, begins, headings = self._lists
        index = max(bisect.bisect_right(begins, s) - 1, 0)
        (x, y), (cosine, sine), along = starts[index], directions[index], s - begins[index]
        return x + along * cosine - d * sine, y + along * sine + d * cosine, headings[index]

    def place(self, points: Floats) -> Floats:
        """s, d and the lane's heading [n, 3] of points [n, 2]."""
        starts, directions, begins, headings = self._segments
        away = points[:, None] - starts
        along = away[..., 0] * directions[:, 0] + away[..., 1] * directions[:, 1]
        left = directions[:, 0] * away[..., 1] - directions[:, 1] * away[..., 0]
        before = np.maximum(-along, 0.0)
        beyond = np.maximum(along - np.append(np.diff(begins), np.inf), 0.0)
        before[:, 0] = 0.0  # the first segment and the last are straight on for ever
        rows, nearest = (
            np.arange(len(points)),
            np.argmin(left * left + before * before + beyond * beyond, axis=1),
        )
        return np.stack(
            (begins[nearest] + along[rows, nearest], left[rows, nearest], headings[nearest]), axis=1
        )


def idm(speed: float, wanted: float, gap_m: float, lead_speed: float) -> float:
    """Acceleration in m/s^2 of the Intelligent Driver Model, at most `MAX_BRAKING` of braking.

    Treiber, Hennecke and Helbing, "Congested traffic states in empirical observations and microscopic
    simulations", Physical Review E 62 (2000): a (1 - (v/v0)^4 - (s*/s)^2), s* = s0 + v T + v dv / (2 sqrt(a
    b)).
    """
    free = 1.0 - (speed / max(wanted, 0.1)) ** 4
    if gap_m == math.inf:
        return max(_ACCELERATION * free, -_COMFORTABLE_BRAKING)
    closing = speed * (speed - lead_speed) / (2.0 * math.sqrt(_ACCELERATION * _COMFORTABLE_BRAKING))
    desired = _GAP_M + max(0.0, speed * _TIME_GAP_S + closing)
    return max(-MAX_BRAKING, _ACCELERATION * (free - (desired / max(gap_m, 0.1)) ** 2))


def needed_braking(speed: float, gap_m: float, lead_speed: float) -> float:
    """Deceleration in m/s^2 that brings the speed down to the lead's within the gap.

    Infinite where there is none.
    """
    closing = speed - lead_speed
    if closing <= 0.0:
        return 0.0
    return closing * closing / (2.0 * gap_m) if gap_m > 0.0 else math.inf


def plan_along(
    lane: Centreline, ego: tuple[float, float, float, float], objects: Floats, wanted: float, ahead_s: float
) -> Floats:
    """Where the vehicle is to be in the next three seconds.

    Along the lane, behind what is in it or will be.

    An object counts where its box, at constant velocity, is within the vehicle's width at some time in the
    next `ahead_s`. Behind the nearest one the speed follows the Intelligent Driver Model; the brakes are
    applied fully where less than that would not do.

    Args:
        lane: the lane to keep.
        ego: x, y, yaw of the vehicle's reference point, and its speed in m/s.
        objects: `OBJECT_FIELDS` of each, shape [n, 7].
        wanted: speed in m/s where nothing is ahead.
        ahead_s: how far ahead objects are foreseen; tiers differ in it.

    Returns:
        x, y, heading and speed [31, 4], the first for now.
    """
    x, y, _, speed = ego
    s0, d0, _ = lane.place(np.array([[x, y]]))[0].tolist()
    leads = _leads(lane, objects, s0, d0, ahead_s)
    travelled, speeds, acceleration = [0.0], [max(speed, 0.0)], 0.0
    for step in range(POSES - 1):
        v = speeds[-1]
        chosen = idm(v, wanted, math.inf, 0.0)
        for gap_m, lead_speed in leads:
            gap = gap_m + lead_speed * step * STEP_S - travelled[-1]
            chosen = min(chosen, idm(v, wanted, gap, lead_speed))
            if needed_braking(v, gap - _SPARE_M, lead_speed) > 0.8 * MAX_BRAKING:
                chosen = -MAX_BRAKING
        acceleration = max(chosen, acceleration - _MAX_JERK * STEP_S)
        speeds.append(max(0.0, v + acceleration * STEP_S))
        travelled.append(travelled[-1] + 0.5 * (v + speeds[-1]) * STEP_S)
    s = s0 + np.array(travelled)
    aside_m = abs(d0)
    way_m = max(
        speed * _CENTRE_AFTER_S,
        max(speeds) * math.sqrt(6.0 * aside_m / _MOST_LATERAL),
        math.sqrt(6.0 * aside_m / _MOST_CURVATURE),
        _GAP_M,
    )
    share = np.clip(np.array(travelled) / way_m, 0.0, 1.0)
    d = d0 * (1.0 - share * share * (3.0 - 2.0 * share))
    plan = np.concatenate((lane.at(s, d), np.array(speeds)[:, None]), axis=1)
    plan[:, 2] -= np.arctan(6.0 * d0 * share * (1.0 - share) / way_m)  # the slope of d
    return plan


def _leads(
    lane: Centreline, objects: Floats, s0: float, d0: float, ahead_s: float
) -> Sequence[tuple[float, float]]:
    """Gap in m and speed along the lane of each object that is in the way, or will be."""
    if not len(objects):
        return ()
    place = lane.place(objects[:, :2])
    cosine, sine = np.cos(place[:, 2]), np.sin(place[:, 2])
    along = objects[:, 3] * cosine + objects[:, 4] * sine
    across = objects[:, 4] * cosine - objects[:, 3] * sine
    turn = np.abs(objects[:, 2] - place[:, 2])
    half_length = 0.5 * (objects[:, 5] * np.abs(np.cos(turn)) + objects[:, 6] * np.abs(np.sin(turn)))
    half_width = 0.5 * (objects[:, 5] * np.abs(np.sin(turn)) + objects[:, 6] * np.abs(np.cos(turn)))
    gap = place[:, 0] - half_length - s0 - _FRONT_M
    later = place[:, 1] + across * ahead_s
    nearest = np.where(place[:, 1] * later <= 0, 0.0, np.minimum(np.abs(place[:, 1]), np.abs(later)))
    margin = _HALF_WIDTH_M + half_width + _SIDE_MARGIN_M + 0.5 * min(abs(d0), 1.0)
    in_way = nearest < margin
    if abs(d0) > _CHANGES_M:  # until it has left the lane in which they are, it follows the vehicles there
        in_way |= (np.abs(place[:, 1] - d0) < _HALF_WIDTH_M + half_width + _SIDE_MARGIN_M) & (along >= 0.0)
    ahead = place[:, 0] + half_length > s0
    chosen = np.flatnonzero(ahead & in_way)
    return [(float(gap[index]), max(0.0, float(along[index]))) for index in chosen]


@dataclass(frozen=True)
class Blindness:
    """A fault that nothing in a message shows: a planner that takes no object into account for a second.

    Attributes:
        share: of the seconds of the stamps, 0 to 1.
    """

    share: float

    def at(self, stamp_ns: int) -> bool:
        """Whether frames of this stamp are planned blindly."""
        return random.Random(f"blind {stamp_ns // NS_PER_S}").random() < self.share


MARKER_ARRAY: Final = "visualization_msgs/msg/MarkerArray"
ODOMETRY: Final = "nav_msgs/msg/Odometry"
PATH: Final = "nav_msgs/msg/Path"
SCAN: Final = "sensor_msgs/msg/LaserScan"
FRAME: Final = "odom"

_ARROW, _CUBE = 0, 1
_COLOURS: Final = {
    "car": (0.1, 0.6, 1.0),
    "truck": (1.0, 0.6, 0.1),
    "cyclist": (0.2, 0.9, 0.3),
    "pedestrian": (1.0, 0.2, 0.4),
    "echo": (1.0, 0.8, 0.1),
}
_HEIGHTS_M: Final = {"car": 1.5, "truck": 3.2, "cyclist": 1.75, "pedestrian": 1.2, "echo": 0.5}


class SeenObject(NamedTuple):
    """An object on its way into a message.

    Attributes:
        kind: a class of objects, or `echo`; the markers' namespace.
        number: the markers' id.
        box: `OBJECT_FIELDS` in the frame of the message.
    """

    kind: str
    number: int
    box: Sequence[float]


@functools.cache
def _parts() -> tuple[Any, ...]:
    names = ("Pose", "Point", "Quaternion", "Vector3")
    classes = tuple(message_class(f"geometry_msgs/msg/{name}") for name in names)
    colour, marker = message_class("std_msgs/msg/ColorRGBA"), message_class("visualization_msgs/msg/Marker")
    return *classes, colour, marker, vars(empty_message("visualization_msgs/msg/Marker"))


def objects_message(objects: Sequence[SeenObject], stamp_ns: int) -> Any:  # noqa: ANN401 - rosbags' class
    """A `MarkerArray` of the objects, two markers of each."""
    pose, point, quaternion, vector, colour, marker, shared = _parts()
    head, markers = header(stamp_ns, FRAME), []
    for kind, number, (x, y, yaw, vx, vy, length, width) in objects:
        height = _HEIGHTS_M[kind]
        centre = point(x=x, y=y, z=height / 2)
        turn = quaternion(x=0.0, y=0.0, z=math.sin(yaw / 2), w=math.cos(yaw / 2))
        red, green, blue = _COLOURS[kind]
        own = {"header": head, "ns": kind, "id": number, "color": colour(r=red, g=green, b=blue, a=1.0)}
        size = vector(x=length, y=width, z=height)
        markers.append(
            marker(
                **shared
                | own
                | {
                    "type": _CUBE,
                    "pose": pose(position=centre, orientation=turn),
                    "scale": size,
                }
            )
        )
        points = [centre, point(x=x + vx, y=y + vy, z=height / 2)]
        markers.append(
            marker(
                **shared | own | {"type": _ARROW, "points": points, "scale": vector(x=0.1, y=0.2, z=0.0)}
            )
        )
    return message_class(MARKER_ARRAY)(markers=markers)


def objects_of(array: Any) -> Floats:  # noqa: ANN401
    """The boxes of a `MarkerArray` with their velocities, [n, 7]; one without an arrow stands still."""
    arrows = {(m.ns, m.id): m.points for m in array.markers if m.type == _ARROW and len(m.points) == 2}  # noqa: PLR2004
    rows = []
    for m in array.markers:
        if m.type != _CUBE:
            continue
        at, turn, size = m.pose.position, m.pose.orientation, m.scale
        begin, end = arrows.get((m.ns, m.id), (at, at))
        rows.append(
            (at.x, at.y, 2 * math.atan2(turn.z, turn.w), end.x - begin.x, end.y - begin.y, size.x, size.y)
        )
    return np.array(rows, dtype=np.float64).reshape(-1, OBJECT_FIELDS)


def without_distant(array: Any, x: float, y: float, range_m: float) -> Any:  # noqa: ANN401
    """The same with what is nearer than so many metres."""
    near = {
        (m.ns, m.id)
        for m in array.markers
        if m.type == _CUBE and math.hypot(m.pose.position.x - x, m.pose.position.y - y) <= range_m
    }
    return message_class(MARKER_ARRAY)(markers=[m for m in array.markers if (m.ns, m.id) in near])


def odometry_message(x: float, y: float, yaw: float, speed: float, yaw_rate: float, stamp_ns: int) -> Any:  # noqa: ANN401
    """A `nav_msgs/msg/Odometry` of the vehicle's reference point.

    What the last call gave is no longer valid.
    """
    odometry = _odometry()
    odometry.header = header(stamp_ns, FRAME)
    odometry.pose.pose.position.x, odometry.pose.pose.position.y = x, y
    odometry.pose.pose.orientation.z, odometry.pose.pose.orientation.w = (
        math.sin(yaw / 2),
        math.cos(yaw / 2),
    )
    odometry.twist.twist.linear.x, odometry.twist.twist.angular.z = speed, yaw_rate
    return odometry


@functools.cache
def _odometry() -> Any:  # noqa: ANN401
    """One for all: making it takes ten times as long as filling it."""
    return empty_message(ODOMETRY, child_frame_id="base_link")


def pose_of(odometry: Any) -> tuple[float, float, float, float]:  # noqa: ANN401
    """x, y, yaw and speed of a flat odometry."""
    at, turn = odometry.pose.pose.position, odometry.pose.pose.orientation
    return at.x, at.y, 2 * math.atan2(turn.z, turn.w), odometry.twist.twist.linear.x


def path_bytes(plan: Floats, frame_id: str, stamp_ns: int, first_ns: int, z: float = 0.0) -> bytes:
    """The CDR bytes of a `nav_msgs/msg/Path` of a plan [n, 4] as `plan_along` gives it.

    Args:
        plan: x, y, heading and speed every `STEP_S`.
        frame_id: of the path and of every pose.
        stamp_ns: of the header: of the frame that it was computed from.
        first_ns: ROS time of the first pose.
        z: of every pose.
    """
    stamps_ns = first_ns + np.arange(len(plan)) * round(STEP_S * NS_PER_S)
    points = np.column_stack((plan[:, :2], np.full(len(plan), z)))
    return restamped(TimedPath.made(stamps_ns, points, plan[:, 2], frame_id.encode()).bytes(), stamp_ns)


def route_bytes(lane: Centreline, wanted: float, stamp_ns: int) -> bytes:
    """A lane to keep as a `nav_msgs/msg/Path`, and the speed in m/s as z of its points."""
    poses = np.column_stack((lane.points, np.zeros((len(lane.points), 2))))
    return path_bytes(poses, FRAME, stamp_ns, stamp_ns, wanted)


def route_of(path: Any) -> tuple[Centreline, float]:  # noqa: ANN401
    """The lane to keep, and the speed in m/s."""
    points = [(stamped.pose.position.x, stamped.pose.position.y) for stamped in path.poses]
    wanted = path.poses[0].pose.position.z if path.poses else 0.0
    return Centreline(np.array(points, dtype=np.float64).reshape(-1, 2)), wanted


def encoded(message: object, type_name: str) -> bytes:
    """CDR bytes."""
    return bytes(encode(message, type_name))
