"""Writes `drive.mcap`: four seconds behind a vehicle, in which low sun dazzles the camera for two images.

Your drive would come from the vehicle: `ros2 bag record -s mcap /camera/image_raw`, cut to the seconds that
matter.
"""

import tempfile
from pathlib import Path

import numpy as np
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

HEIGHT, WIDTH = 64, 96
IMAGES, PERIOD_NS, START_NS = 40, 100_000_000, 1_760_000_000_000_000_000
DAZZLED = (22, 23)
LATENCY_NS = 3_000_000  # from the image's stamp to its receipt

store = get_typestore(Stores.ROS2_JAZZY)
types = store.types


def pixels(number: int) -> np.ndarray:
    """The rear of the vehicle ahead: nearer in each image, and moving to the left."""
    image = np.full((HEIGHT, WIDTH), 40, np.uint8)
    height = 8 + number // 4
    left, top = 60 - number // 2, 40 - height // 2
    image[top : top + height, left : left + height * 5 // 4] = 230
    if number in DAZZLED:
        image[:] = 255
    return image


def main() -> None:
    """Write the log beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "drive")
        writer = Writer(log, version=9, storage_plugin=StoragePlugin.MCAP)
        writer.set_compression(CompressionMode.STORAGE, CompressionFormat.ZSTD)
        with writer:
            topic = writer.add_connection("/camera/image_raw", "sensor_msgs/msg/Image", typestore=store)
            for number in range(IMAGES):
                stamp_ns = START_NS + number * PERIOD_NS
                stamp = types["builtin_interfaces/msg/Time"](*divmod(stamp_ns, 1_000_000_000))
                header = types["std_msgs/msg/Header"](stamp, "camera_optical_frame")
                image = types["sensor_msgs/msg/Image"](
                    header, HEIGHT, WIDTH, "mono8", 0, WIDTH, pixels(number).ravel()
                )
                data = store.serialize_cdr(image, "sensor_msgs/msg/Image")
                writer.write(topic, stamp_ns + LATENCY_NS, data)
        next(log.glob("*.mcap")).replace(Path(__file__).with_name("drive.mcap"))


if __name__ == "__main__":
    main()
