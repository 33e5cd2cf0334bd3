"""Messages to compare, each written in one line."""

import io

import numpy as np
from PIL import Image

from torchperf_ros.config.message_types import message_class

MARKERS, PATH, ARRAY, IMAGE, COMPRESSED, POSE_2D = (
    "visualization_msgs/msg/MarkerArray",
    "nav_msgs/msg/Path",
    "std_msgs/msg/Float64MultiArray",
    "sensor_msgs/msg/Image",
    "sensor_msgs/msg/CompressedImage",
    "geometry_msgs/msg/Pose2D",
)


def header(stamp_ns=0, frame_id="map"):
    seconds, nanoseconds = divmod(stamp_ns, 1_000_000_000)
    stamp = message_class("builtin_interfaces/msg/Time")(seconds, nanoseconds)
    return message_class("std_msgs/msg/Header")(stamp, frame_id)


def point(x, y=0.0, z=0.0):
    return message_class("geometry_msgs/msg/Point")(x, y, z)


def pose(x=0.0, y=0.0, z=0.0, turn=(0.0, 0.0, 0.0, 1.0)):
    return message_class("geometry_msgs/msg/Pose")(point(x, y, z), message_class("geometry_msgs/msg/Quaternion")(*turn))


def marker(x=0.0, y=0.0, *, number=0, kind=1, action=0, lifetime_s=0, score=1.0, stamp_ns=0):
    no_bytes = np.empty(0, np.uint8)
    vector, colour = message_class("geometry_msgs/msg/Vector3"), message_class("std_msgs/msg/ColorRGBA")
    image = message_class("sensor_msgs/msg/CompressedImage")(header(), "", no_bytes)
    mesh = message_class("visualization_msgs/msg/MeshFile")("", no_bytes)
    lifetime = message_class("builtin_interfaces/msg/Duration")(lifetime_s, 0)
    return message_class("visualization_msgs/msg/Marker")(
        header(stamp_ns), "car", number, kind, action, pose(x, y), vector(4.5, 1.8, 1.5), colour(0.0, 0.0, 1.0, score),
        lifetime, False, [], [], "", image, [], "", "", mesh, False,
    )  # fmt: skip


def markers(*items):
    return message_class(MARKERS)(list(items))


def path(*poses, stamp_ns=0):
    stamped = message_class("geometry_msgs/msg/PoseStamped")
    return message_class(PATH)(header(stamp_ns), [stamped(header(stamp_ns), item) for item in poses])


def array(*values, label="a"):
    dimension = message_class("std_msgs/msg/MultiArrayDimension")(label, len(values), len(values))
    layout = message_class("std_msgs/msg/MultiArrayLayout")([dimension], 0)
    return message_class(ARRAY)(layout, np.array(values, np.float64))


def image(*data, width=0, encoding="mono8"):
    """One row, of so many pixels, else of a byte each."""
    return message_class(IMAGE)(header(), 1, width or len(data), encoding, 0, len(data), np.array(data, np.uint8))


def jpeg(grey, size):
    file = io.BytesIO()
    Image.new("L", size, grey).save(file, "JPEG")
    return message_class(COMPRESSED)(header(), "jpeg", np.frombuffer(file.getvalue(), np.uint8))
