"""Sensor messages as CDR bytes, by the type store that the models use."""

import math
import struct

import numpy as np

from benchmarks.rig import messages
from torchperf_ros.api.messages import empty_message, encode, header

FLOAT32 = 7


def _bytes(name, **fields):
    return bytes(encode(empty_message(name, **fields), name))


def scan_bytes(ranges, *, first=-math.pi / 2, last=math.pi / 2, least=0.1, most=30.0, step=None):
    count = max(len(ranges) - 1, 1)
    return _bytes(
        "sensor_msgs/msg/LaserScan",
        header=header(5, "laser"),
        angle_min=first,
        angle_max=last,
        angle_increment=(last - first) / count if step is None else step,
        intensities=np.zeros(3, np.float32),
        range_min=least,
        range_max=most,
        ranges=np.asarray(ranges, np.float32),
    )


def cloud_bytes(points, *, fields="xyzi", padding=0, big=False, kind="f4", rows=1, stamp_ns=5):
    """A cloud of [n, 3] points whose fields stand in this order, with so many bytes between two points."""
    size = 4 if kind == "f4" else 8
    record = np.dtype(
        {
            "names": list(fields),
            "formats": [("<>"[big]) + kind] * len(fields),
            "offsets": [size * number + padding for number in range(len(fields))],
            "itemsize": size * len(fields) + 2 * padding,
        }
    )
    found = np.zeros(len(points), record)
    for axis, name in enumerate("xyz"):
        if name in fields:
            found[name] = np.asarray(points, float).reshape(-1, 3)[:, axis]
    own = {"datatype": FLOAT32 + (kind == "f8"), "count": 1}
    described = [
        empty_message("sensor_msgs/msg/PointField", name=name, offset=record.fields[name][1], **own)
        for name in fields
    ]
    width = len(points) // rows
    return _bytes(
        "sensor_msgs/msg/PointCloud2",
        header=header(stamp_ns, "lidar"),
        height=rows,
        width=width,
        fields=described,
        is_bigendian=big,
        point_step=record.itemsize,
        row_step=record.itemsize * width,
        data=np.frombuffer(found.tobytes(), np.uint8),
        is_dense=True,
    )


def range_bytes(distance, *, least=0.2, most=4.0, view=0.4):
    """As Humble has it, and with the variance of later versions left out: it comes last."""
    head = b"\0\1\0\0" + struct.pack("<iII", 0, 0, 4) + b"son\0"
    return head + struct.pack("<B3x4f", 0, view, least, most, distance)


def bool_bytes(value):
    return b"\0\1\0\0" + bytes([value])


def odometry_bytes(speed=0.0, yaw_rate=0.0, *, stamp_ns=0, **more):
    return messages.odometry_bytes(speed=speed, yaw_rate=yaw_rate, stamp_ns=stamp_ns, **more)
