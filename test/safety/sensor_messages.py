"""Sensor messages as CDR bytes, by the type store that the models use."""

import math
import struct

import numpy as np

from torchperf_ros.config.message_types import encode, header, message_class

FLOAT32 = 7


def _bytes(name, **fields):
    return bytes(encode(message_class(name)(**fields), name))


def scan_bytes(ranges, *, first=-math.pi / 2, last=math.pi / 2, least=0.1, most=30.0, frame="laser", step=None):
    count = max(len(ranges) - 1, 1)
    return _bytes(
        "sensor_msgs/msg/LaserScan", header=header(5, frame), angle_min=first, angle_max=last,
        angle_increment=(last - first) / count if step is None else step, time_increment=0.0, scan_time=0.1,
        range_min=least, range_max=most, ranges=np.asarray(ranges, np.float32), intensities=np.zeros(3, np.float32),
    )  # fmt: skip


def cloud_bytes(points, *, fields="xyzi", padding=0, big=False, kind="f4", rows=1, frame="lidar"):
    """A cloud of [n, 3] points whose fields stand in this order, with so many bytes between two points."""
    size = 4 if kind == "f4" else 8
    record = np.dtype({
        "names": list(fields), "formats": [("<>"[big]) + kind] * len(fields),
        "offsets": [size * number + padding for number in range(len(fields))],
        "itemsize": size * len(fields) + 2 * padding,
    })  # fmt: skip
    found = np.zeros(len(points), record)
    for axis, name in enumerate("xyz"):
        if name in fields:
            found[name] = np.asarray(points, float).reshape(-1, 3)[:, axis]
    described = [
        message_class("sensor_msgs/msg/PointField")(
            name=name, offset=record.fields[name][1], datatype=FLOAT32 + (kind == "f8"), count=1
        )
        for name in fields
    ]
    width = len(points) // rows
    return _bytes(
        "sensor_msgs/msg/PointCloud2", header=header(5, frame), height=rows, width=width, fields=described,
        is_bigendian=big, point_step=record.itemsize, row_step=record.itemsize * width,
        data=np.frombuffer(found.tobytes(), np.uint8), is_dense=True,
    )  # fmt: skip


def range_bytes(distance, *, least=0.2, most=4.0, view=0.4):
    """As Humble has it, and with the variance of later versions left out: it comes last."""
    head = b"\0\1\0\0" + struct.pack("<iII", 0, 0, 4) + b"son\0"
    return head + struct.pack("<B3x4f", 0, view, least, most, distance)


def bool_bytes(value):
    return b"\0\1\0\0" + bytes([value])


def odometry_bytes(speed=0.0, yaw_rate=0.0, *, x=0.0, y=0.0, yaw=0.0, frame="odom", stamp_ns=0):
    vector, point = message_class("geometry_msgs/msg/Vector3"), message_class("geometry_msgs/msg/Point")
    turn = message_class("geometry_msgs/msg/Quaternion")(x=0.0, y=0.0, z=math.sin(yaw / 2), w=math.cos(yaw / 2))
    pose = message_class("geometry_msgs/msg/Pose")(position=point(x=x, y=y, z=0.5), orientation=turn)
    twist = message_class("geometry_msgs/msg/Twist")(
        linear=vector(x=speed, y=0.0, z=0.0), angular=vector(x=0.0, y=0.0, z=yaw_rate)
    )
    none = np.zeros(36)
    return _bytes(
        "nav_msgs/msg/Odometry", header=header(stamp_ns, frame), child_frame_id="base_link",
        pose=message_class("geometry_msgs/msg/PoseWithCovariance")(pose=pose, covariance=none),
        twist=message_class("geometry_msgs/msg/TwistWithCovariance")(twist=twist, covariance=none),
    )  # fmt: skip
