"""The fallback `stop`: an output that brings the vehicle to a halt, made from the last good one."""

import functools

import numpy as np

from torchperf_ros.core.brake_path import brake_along
from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.message_types import decode, encode, message_class

PATH = "nav_msgs/msg/Path"


def can_stop(output_type: str) -> bool:
    """Whether there is a stop output for this message type; for now only for `nav_msgs/msg/Path`."""
    return output_type == PATH


@functools.cache
def warm_up_stop(output_type: str) -> None:
    """Make a stop output once, where there is one: the first takes ten times as long as those that follow."""
    if not can_stop(output_type):
        return
    pose = message_class("geometry_msgs/msg/PoseStamped")
    header = message_class("std_msgs/msg/Header")(stamp=message_class("builtin_interfaces/msg/Time")(0, 0), frame_id="")
    point = message_class("geometry_msgs/msg/Point")(0.0, 0.0, 0.0)
    upright = message_class("geometry_msgs/msg/Quaternion")(0.0, 0.0, 0.0, 1.0)
    place = message_class("geometry_msgs/msg/Pose")(point, upright)
    stop_path(bytes(encode(message_class(PATH)(header, [pose(header, place)] * 2), PATH)), 0, 1.0)


def stop_path(last_path: bytes, start_ns: int, deceleration: float) -> bytes | None:
    """Brake along the last good path from `start_ns` on.

    Where and how fast the vehicle is comes from the path's own stamped poses. `header.stamp` stays that of the frame
    that the path was computed from, so that its age shows; the poses are stamped from `start_ns` to standstill.

    Args:
        last_path: CDR bytes of a `nav_msgs/msg/Path` with stamped poses.
        start_ns: ROS time at which braking begins.
        deceleration: m/s^2.

    Returns:
        CDR bytes of the braking path; None if the last path has no poses.
    """
    path = decode(last_path, PATH)
    poses = path.poses
    if not poses:
        return None
    stamps = [pose.header.stamp for pose in poses]
    stamps_ns = np.array([stamp.sec * NS_PER_S + stamp.nanosec for stamp in stamps], dtype=np.int64)
    points = np.array([(p.pose.position.x, p.pose.position.y, p.pose.position.z) for p in poses])
    times_s = (stamps_ns - start_ns) / NS_PER_S
    where, when_s = brake_along(points, times_s, 0.0, deceleration)
    time_class = message_class("builtin_interfaces/msg/Time")
    for pose, point, after_s in zip(poses, where.tolist(), when_s.tolist(), strict=True):
        pose.pose.position.x, pose.pose.position.y, pose.pose.position.z = point
        seconds, nanoseconds = divmod(start_ns + round(after_s * NS_PER_S), NS_PER_S)
        pose.header.stamp = time_class(sec=seconds, nanosec=nanoseconds)
    return bytes(encode(path, PATH))
