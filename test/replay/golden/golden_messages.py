"""Messages to compare, each written in one line."""

import io

import numpy as np
from PIL import Image

from torchperf_ros.config.message_types import empty_message, header

MARKERS, PATH, ARRAY, IMAGE, COMPRESSED, POSE_2D = (
    "visualization_msgs/msg/MarkerArray", "nav_msgs/msg/Path", "std_msgs/msg/Float64MultiArray",
    "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage", "geometry_msgs/msg/Pose2D",
)  # fmt: skip


def point(x, y=0.0, z=0.0):
    return empty_message("geometry_msgs/msg/Point", x=x, y=y, z=z)


def pose(x=0.0, y=0.0, z=0.0, turn=(0.0, 0.0, 0.0, 1.0)):
    orientation = empty_message("geometry_msgs/msg/Quaternion", **dict(zip("xyzw", turn, strict=True)))
    return empty_message("geometry_msgs/msg/Pose", position=point(x, y, z), orientation=orientation)


def marker(x=0.0, y=0.0, *, number=0, kind=1, action=0, lifetime_s=0, score=1.0, stamp_ns=0):
    return empty_message(
        "visualization_msgs/msg/Marker", header=header(stamp_ns, "map"), ns="car", id=number, type=kind, action=action,
        pose=pose(x, y), color=empty_message("std_msgs/msg/ColorRGBA", b=1.0, a=score),
        lifetime=empty_message("builtin_interfaces/msg/Duration", sec=lifetime_s),
    )  # fmt: skip


def markers(*items):
    return empty_message(MARKERS, markers=list(items))


def path(*poses, stamp_ns=0):
    head = header(stamp_ns, "map")
    stamped = [empty_message("geometry_msgs/msg/PoseStamped", header=head, pose=item) for item in poses]
    return empty_message(PATH, header=head, poses=stamped)


def array(*values, label="a"):
    size = len(values)
    dimension = empty_message("std_msgs/msg/MultiArrayDimension", label=label, size=size, stride=size)
    layout = empty_message("std_msgs/msg/MultiArrayLayout", dim=[dimension])
    return empty_message(ARRAY, layout=layout, data=np.array(values, np.float64))


def image(*data, width=0, encoding="mono8"):
    """One row, of so many pixels, else of a byte each."""
    step = len(data)
    data = np.array(data, np.uint8)
    return empty_message(IMAGE, height=1, width=width or step, encoding=encoding, step=step, data=data)


def jpeg(grey, size):
    file = io.BytesIO()
    Image.new("L", size, grey).save(file, "JPEG")
    return empty_message(COMPRESSED, format="jpeg", data=np.frombuffer(file.getvalue(), np.uint8))
