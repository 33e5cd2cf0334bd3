"""Images as CDR bytes. The camera's process imports this, and with it nothing that takes long."""

from typing import Final

import numpy as np

from torchperf_ros.config.message_types import empty_message, encode, header

IMAGE: Final = "sensor_msgs/msg/Image"


def image_cdr(width: int, height: int, pixels: np.ndarray | None = None) -> bytes:
    """CDR bytes of an rgb8 image, with a zero stamp; the pixels, black unless given, come last."""
    data = np.zeros(height * width * 3, np.uint8) if pixels is None else pixels
    own = {"height": height, "width": width, "encoding": "rgb8", "step": width * 3, "data": data}
    return bytes(encode(empty_message(IMAGE, header=header(0, "camera"), **own), IMAGE))


def noise_cdr(width: int, height: int, seed: int = 0) -> bytes:
    """The same, of noise."""
    return image_cdr(width, height, np.random.default_rng(seed).integers(0, 256, height * width * 3, dtype=np.uint8))
