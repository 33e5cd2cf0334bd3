"""The pixels of an `Image` or `CompressedImage` message as an array view, or a reason why not."""

import io
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from torchperf_ros.core.errors import BadInput
from torchperf_ros.models.networks import IMAGE_HEIGHT, IMAGE_WIDTH

# Channels in memory order. 8UC3 has no order of its own; cv_bridge, like OpenCV, means blue first.
_CHANNELS: Final = {"rgb8": "rgb", "bgr8": "bgr", "8UC3": "bgr", "mono8": "mono"}
_COMPRESSED_FORMATS: Final = ("JPEG", "PNG")
_COMPRESSED_MODES: Final = ("L", "P", "RGB", "RGBA")


@dataclass(frozen=True)
class Pixels:
    """Pixels of one image.

    Attributes:
        array: [rows, columns, channels] uint8; maybe a view on the message, maybe fewer than the image's own.
        order: "rgb", "bgr" or "mono".
    """

    array: NDArray[np.uint8]
    order: str


def raw_pixels(message: Any, max_pixels: int) -> Pixels:  # noqa: ANN401 - rosbags builds the class at run time
    """The pixels of a `sensor_msgs/msg/Image`, without copying them; padding at the ends of rows is left out.

    Args:
        message: the decoded message.
        max_pixels: largest width times height.

    Raises:
        BadInput: the encoding is not one of rgb8, bgr8, 8UC3 and mono8, or size, step and data do not fit.
    """
    encoding, width, height, step = message.encoding, message.width, message.height, message.step
    if encoding not in _CHANNELS:
        why = "a Bayer pattern, debayer it first" if encoding.startswith("bayer_") else "not supported"
        msg = f"image encoding {encoding!r} is {why}; supported: {', '.join(_CHANNELS)}"
        raise BadInput(msg)
    _check_size(width, height, max_pixels)
    order = _CHANNELS[encoding]
    channels = 1 if order == "mono" else 3
    if step < width * channels:
        msg = f"image step is {step} bytes, less than width {width} * {channels} channels = {width * channels}"
        raise BadInput(msg)
    if message.data.size < step * height:
        msg = f"image data has {message.data.size} bytes, less than step {step} * height {height} = {step * height}"
        raise BadInput(msg)
    rows = message.data[: step * height].reshape(height, step)
    return Pixels(rows[:, : width * channels].reshape(height, width, channels), order)


def compressed_pixels(message: Any, max_pixels: int) -> Pixels:  # noqa: ANN401
    """The decoded pixels of a `sensor_msgs/msg/CompressedImage` that holds a JPEG or PNG file.

    Large JPEGs are decoded at 1/2, 1/4 or 1/8 of their size where that still covers the network's resolution.

    Args:
        message: the decoded message; its `format` field is not trusted, the bytes tell.
        max_pixels: largest width times height, checked before anything is decoded.

    Raises:
        BadInput: the bytes are no such file, are cut off or damaged, or the image's size or mode is not allowed.
    """
    try:
        with _open(message) as image:
            _check_size(*image.size, max_pixels)
            if image.mode not in _COMPRESSED_MODES:
                msg = f"compressed image has mode {image.mode!r}; supported: {', '.join(_COMPRESSED_MODES)}"
                raise BadInput(msg)
            order = "mono" if image.mode == "L" else "rgb"
            mode = "L" if order == "mono" else "RGB"
            image.draft(mode, (IMAGE_WIDTH, IMAGE_HEIGHT))
            array = np.asarray(image if image.mode == mode else image.convert(mode))
    except BadInput:
        raise
    except UnidentifiedImageError as error:
        msg = f"compressed image of {message.data.size} bytes (format {message.format!r}) is neither JPEG nor PNG"
        raise BadInput(msg) from error
    except Exception as error:
        # On damaged bytes Pillow's decoders raise whatever they trip over: OSError, SyntaxError, ValueError, ...
        msg = f"compressed image of {message.data.size} bytes (format {message.format!r}) cannot be decoded: {error}"
        raise BadInput(msg) from error
    return Pixels(array.reshape(*array.shape[:2], -1), order)


def raw_size(message: Any) -> tuple[int, int]:  # noqa: ANN401
    """Width and height in pixels of a message that `raw_pixels` has accepted."""
    return message.width, message.height


def compressed_size(message: Any) -> tuple[int, int]:  # noqa: ANN401
    """Width and height in pixels from the file's header, of a message that `compressed_pixels` has accepted."""
    with _open(message) as image:
        return image.size


def _open(message: Any) -> Image.Image:  # noqa: ANN401
    # Pillow: small wheels for every platform, no OpenCV beside the one that the vehicle already has, reads the size
    # before it decodes, can be held to two formats, and scales JPEGs while decoding.
    return Image.open(io.BytesIO(message.data), formats=_COMPRESSED_FORMATS)


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        msg = f"image is empty: width {width}, height {height}"
        raise BadInput(msg)
    if width * height > max_pixels:
        msg = f"image of {width} x {height} = {width * height} pixels is larger than max_pixels {max_pixels}"
        raise BadInput(msg)
