"""Images, plans, odometry and obstacles as messages.

The camera's process imports this, so nothing that takes long.
"""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from torchperf_ros.api.messages import empty_message, encode, header, message_class
from torchperf_ros.safety.stop_output import TimedPath

S = 1_000_000_000
START_NS = 1_700_000_000 * S
"""ROS time of now, where nothing else is said."""

CUBE, ARROW = 1, 0
IMAGE: Final = "sensor_msgs/msg/Image"


class Box(NamedTuple):
    """An obstacle.

    Centre in m, heading in rad, size in m, velocity in m/s; None: its marker has no ARROW.
    """

    x: float
    y: float
    yaw: float = 0.0
    length: float = 4.5
    width: float = 1.9
    velocity: tuple[float, float] | None = (0.0, 0.0)


def plan_bytes(times_s, x, y, yaw, frame="odom", start_ns=START_NS) -> bytes:
    """A `nav_msgs/Path` with poses at these times from `start_ns`."""
    times_s, x, y, yaw = (
        np.broadcast_to(np.asarray(part, float), np.shape(times_s)) for part in (times_s, x, y, yaw)
    )
    stamps_ns = start_ns + np.rint(times_s * S).astype(np.int64)
    return TimedPath.made(
        stamps_ns, np.stack((x, y, np.zeros_like(x)), axis=1), yaw, frame.encode()
    ).bytes()


def straight_plan(speed=10.0, horizon_s=3.0, step_s=0.1, acceleration=0.0, **more) -> bytes:
    """A plan along x from the origin, at constant acceleration until it stands."""
    times_s = np.arange(0.0, horizon_s + step_s / 2, step_s)
    moving_s = np.minimum(times_s, speed / -acceleration) if acceleration < 0 else times_s
    return plan_bytes(times_s, speed * moving_s + 0.5 * acceleration * moving_s**2, 0.0, 0.0, **more)


def odometry_bytes(
    x=0.0, y=0.0, yaw=0.0, speed=10.0, yaw_rate=0.0, stamp_ns=START_NS, frame="odom", child="base_link"
):
    """A `nav_msgs/Odometry`, whose reference point is 0.5 m above the ground."""
    message = empty_message("nav_msgs/msg/Odometry", header=header(stamp_ns, frame), child_frame_id=child)
    message.pose.pose = _pose(x, y, yaw, 0.5)
    message.twist.twist.linear.x, message.twist.twist.angular.z = speed, yaw_rate
    return bytes(encode(message, "nav_msgs/msg/Odometry"))


def markers_bytes(boxes: Iterable[Box], stamp_ns=START_NS, frame="odom", ids=None) -> bytes:
    """A `visualization_msgs/MarkerArray`: a CUBE for each box and an ARROW for its velocity.

    `ids`: of the boxes; by default their places in the list.
    """
    kind, point, vector = (
        message_class(name)
        for name in (
            "visualization_msgs/msg/Marker",
            "geometry_msgs/msg/Point",
            "geometry_msgs/msg/Vector3",
        )
    )
    shared = vars(empty_message("visualization_msgs/msg/Marker", header=header(stamp_ns, frame), ns="car"))
    begin, markers = point(x=0.0, y=0.0, z=0.0), []
    for number, box in enumerate(boxes) if ids is None else zip(ids, boxes, strict=True):
        size = vector(x=float(box.length), y=float(box.width), z=1.5)
        own = {"id": number, "type": CUBE, "pose": _pose(box.x, box.y, box.yaw), "scale": size}
        markers.append(kind(**shared | own))
        if box.velocity is not None:
            end = point(x=float(box.velocity[0]), y=float(box.velocity[1]), z=0.0)
            markers.append(
                kind(
                    **shared
                    | {
                        "id": number,
                        "type": ARROW,
                        "pose": _pose(box.x, box.y, 0.0),
                        "points": [begin, end],
                    }
                )
            )
    array = message_class("visualization_msgs/msg/MarkerArray")(markers=markers)
    return bytes(encode(array, "visualization_msgs/msg/MarkerArray"))


def _pose(x, y, yaw, z=0.0):
    point, turn = message_class("geometry_msgs/msg/Point"), message_class("geometry_msgs/msg/Quaternion")
    orientation = turn(x=0.0, y=0.0, z=math.sin(yaw / 2), w=math.cos(yaw / 2))
    place = point(x=float(x), y=float(y), z=z)
    return message_class("geometry_msgs/msg/Pose")(position=place, orientation=orientation)


def image_cdr(width: int, height: int, pixels: np.ndarray | None = None) -> bytes:
    """CDR bytes of an rgb8 image, with a zero stamp; the pixels, black unless given, come last."""
    data = np.zeros(height * width * 3, np.uint8) if pixels is None else pixels
    own = {"height": height, "width": width, "encoding": "rgb8", "step": width * 3, "data": data}
    return bytes(encode(empty_message(IMAGE, header=header(0, "camera"), **own), IMAGE))


def scene_cdr(width: int, height: int, seed: int = 0) -> bytes:
    """The same, of squares with the noise of a sensor: nothing but noise counts as a broken cable."""
    rng, square = np.random.default_rng(seed), 16
    squares = rng.integers(8, 248, (-(-height // square), -(-width // square), 3), dtype=np.uint8)
    pixels = squares.repeat(square, axis=0)[:height].repeat(square, axis=1)[:, :width]
    return image_cdr(width, height, (pixels + rng.integers(0, 8, pixels.shape, dtype=np.uint8)).reshape(-1))
