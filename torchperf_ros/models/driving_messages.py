"""The messages between the stages of a closed loop: objects with velocities, odometry, timed paths.

An object is two markers of one namespace and id: a CUBE, its box, and an ARROW whose second point less its
first is its velocity in m/s. Both are in the frame that their headers name.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.messages import empty_message, encode, header, message_class
from torchperf_ros.models.driving_rules import OBJECT_FIELDS, STEP_S, Centreline, Floats
from torchperf_ros.safety.stop_output import TimedPath

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
_NS: Final = 1_000_000_000


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
    stamps_ns = first_ns + np.arange(len(plan)) * round(STEP_S * _NS)
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
