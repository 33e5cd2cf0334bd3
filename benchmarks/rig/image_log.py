"""A recorded log of camera images, for benchmarks that replay one."""

import os
from pathlib import Path
from typing import Final

import numpy as np
from mcap.writer import CompressionType, Writer

from torchperf_ros.config.message_types import encode, message_class, typestore

_IMAGE: Final = "sensor_msgs/msg/Image"


def write_images(path: Path, frames: int, width: int, height: int) -> None:
    """Images of noise, not compressed, chunked as rosbag2 does it."""
    store = typestore({_IMAGE})
    pixels = np.random.default_rng(1).integers(0, 255, width * height * 3, dtype=np.uint8)
    header, stamp = message_class("std_msgs/msg/Header"), message_class("builtin_interfaces/msg/Time")
    with path.open("wb") as file:
        writer = Writer(file, compression=CompressionType.NONE)
        writer.start(profile="ros2")
        text, _ = store.generate_msgdef(_IMAGE, ros_version=2)
        channel = writer.register_channel("/image", "cdr", writer.register_schema(_IMAGE, "ros2msg", text.encode()))
        for number in range(frames):
            seconds, nanoseconds = divmod(number * 33_333_333, 1_000_000_000)
            image = message_class(_IMAGE)(
                header=header(stamp=stamp(sec=1_700_000_000 + seconds, nanosec=nanoseconds), frame_id="camera"),
                height=height, width=width, encoding="rgb8", is_bigendian=0, step=3 * width, data=pixels,
            )  # fmt: skip
            t_ns = (1_700_000_000 + seconds) * 1_000_000_000 + nanoseconds
            writer.add_message(channel, t_ns, bytes(encode(image, _IMAGE)), t_ns)
        writer.finish()
        os.fsync(file.fileno())
