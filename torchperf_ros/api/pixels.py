"""The one decoder of images.

The pixels of an `Image` or `CompressedImage` message, or the reason why there are none.

It imports neither torch nor ROS, so that adapters, reports and watches can all use it.
"""

import io
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from torchperf_ros.api.errors import BadInput

MOST_PIXELS: Final = 67_108_864
# Channels in memory order. 8UC3 has no order of its own; cv_bridge, like OpenCV, means blue first.
_COLOURS: Final = {
    "rgb8": (3, "rgb"),
    "bgr8": (3, "bgr"),
    "8UC3": (3, "bgr"),
    "rgba8": (4, "rgb"),
    "bgra8": (4, "bgr"),
}
_DEEP: Final = ("mono16", "16UC1")
_GREYS: Final = ("mono8", "8UC1", *_DEEP, "bayer_rggb8", "bayer_bggr8", "bayer_gbrg8", "bayer_grbg8")
ENCODINGS: Final = (*_COLOURS, *_GREYS)
"""All that can be shown; 16 bits and Bayer patterns only as grey."""
_COMPRESSED_FORMATS: Final = ("JPEG", "PNG")
_COMPRESSED_MODES: Final = ("L", "P", "RGB", "RGBA")
_ORIENTATION: Final = 0x0112  # a tag of EXIF, which has the values below
_UPRIGHT, _FIRST_ON_ITS_SIDE, _LAST = 1, 5, 8


@dataclass(frozen=True)
class Pixels:
    """Pixels of one image.

    Attributes:
        array: [rows, columns, channels] uint8; maybe a view on the message, maybe fewer than the image's
            own.
        order: "rgb", "bgr" or "mono".
    """

    array: NDArray[np.uint8]
    order: str

    def rgb(self) -> NDArray[np.uint8]:
        """[rows, columns, 3] uint8, red first."""
        if self.order == "mono":
            return self.array.repeat(3, axis=2)
        return np.ascontiguousarray(self.array[..., ::-1] if self.order == "bgr" else self.array)


def raw_pixels(
    message: Any,  # noqa: ANN401
    max_pixels: int = MOST_PIXELS,
    encodings: Collection[str] = ENCODINGS,
) -> Pixels:
    """The pixels of a decoded `sensor_msgs/msg/Image`, without padding at the ends of rows.

    8 bits are not copied.

    `max_pixels` is the largest width times height; `encodings` are those that the caller can use.

    Raises:
        BadInput: the encoding is not one of these, or size, step and data do not fit.
    """
    encoding, width, height, step = message.encoding, message.width, message.height, message.step
    if encoding not in encodings:
        why = "a Bayer pattern, debayer it first" if encoding.startswith("bayer_") else "not supported"
        raise BadInput(f"image encoding {encoding!r} is {why}; supported: {', '.join(encodings)}")
    _check_size(width, height, max_pixels)
    channels, order = _COLOURS.get(encoding, (1, "mono"))
    pixel_bytes = 2 if encoding in _DEEP else channels
    if step < width * pixel_bytes:
        msg = (
            f"image step is {step} bytes, less than width {width} * {pixel_bytes} bytes ="
            f" {width * pixel_bytes}"
        )
        raise BadInput(msg)
    if message.data.size < step * height:
        msg = (
            f"image data has {message.data.size} bytes, less than step {step} * height {height} ="
            f" {step * height}"
        )
        raise BadInput(msg)
    rows = message.data[: step * height].reshape(height, step)[:, : width * pixel_bytes]
    if encoding in _DEEP:
        deep = np.ascontiguousarray(rows).view(">u2" if message.is_bigendian else "<u2").astype(np.float32)
        rows = (deep * (255.0 / max(float(deep.max()), 1.0))).astype(np.uint8)
    return Pixels(rows.reshape(height, width, channels)[..., :3], order)


def compressed_pixels(
    message: Any,  # noqa: ANN401
    max_pixels: int = MOST_PIXELS,
    least: tuple[int, int] | None = None,
    encodings: Collection[str] = ENCODINGS,
) -> Pixels:
    """The decoded pixels of a `sensor_msgs/msg/CompressedImage`, whose bytes tell whether it is a JPEG or a PNG.

    `max_pixels`, the largest width times height, is checked before anything is decoded. Where a width and
    height are the `least` that is enough, a large JPEG is decoded at 1/2, 1/4 or 1/8 of its size.

    Raises:
        BadInput: the bytes are no such file, are cut off or damaged, or the image's size or mode is not
            allowed.
    """
    try:
        with _open(message) as image:
            _check_size(*image.size, max_pixels)
            if image.mode not in _COMPRESSED_MODES:
                raise BadInput(
                    f"compressed image has mode {image.mode!r}; supported: {', '.join(_COMPRESSED_MODES)}"
                )
            order, mode = ("mono", "L") if image.mode == "L" else ("rgb", "RGB")
            raw = message.format.partition(";")[
                0
            ].strip()  # `bayer_rggb8; jpeg compressed`, as image_transport writes
            if mode == "L" and raw.startswith("bayer_") and raw not in encodings:
                raise BadInput(
                    f"compressed image of format {message.format!r} is a Bayer pattern, debayer it first"
                )
            turned = _orientation(image)
            image.draft(mode, least[::-1] if least and turned >= _FIRST_ON_ITS_SIDE else least)
            upright = image if turned == _UPRIGHT else ImageOps.exif_transpose(image)
            array = np.asarray(upright if upright.mode == mode else upright.convert(mode))
    except BadInput:
        raise
    except UnidentifiedImageError as error:
        msg = (
            f"compressed image of {message.data.size} bytes (format {message.format!r}) is neither JPEG"
            " nor PNG"
        )
        raise BadInput(msg) from error
    except Exception as error:
        # On damaged bytes Pillow's decoders raise whatever they trip over: OSError, SyntaxError,
        # ValueError, ...
        msg = (
            f"compressed image of {message.data.size} bytes (format {message.format!r}) cannot be decoded:"
            f" {error}"
        )
        raise BadInput(msg) from error
    return Pixels(array.reshape(*array.shape[:2], -1), order)


def compressed_size(message: Any) -> tuple[int, int]:  # noqa: ANN401
    """Width and height in pixels from the file's header, of a message that `compressed_pixels` has accepted."""
    with _open(message) as image:
        width, height = image.size
        return (height, width) if _orientation(image) >= _FIRST_ON_ITS_SIDE else (width, height)


def _orientation(image: Image.Image) -> int:
    """How the file says that its image has to be turned, as OpenCV and cv_bridge do, 1 to 8.

    `_UPRIGHT`: not at all.
    """
    if "exif" not in image.info:  # asking for it would decode a PNG
        return _UPRIGHT
    turned = image.getexif().get(_ORIENTATION, _UPRIGHT)
    return turned if turned in range(_UPRIGHT, _LAST + 1) else _UPRIGHT


def _open(message: Any) -> Image.Image:  # noqa: ANN401
    # Pillow: small wheels for every platform, no OpenCV beside the one that the vehicle already has, reads
    # the size before it decodes, can be held to two formats, and scales JPEGs while decoding.
    return Image.open(io.BytesIO(message.data), formats=_COMPRESSED_FORMATS)


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise BadInput(f"image is empty: width {width}, height {height}")
    if width * height > max_pixels:
        raise BadInput(
            f"image of {width} x {height} = {width * height} pixels is larger than max_pixels {max_pixels}"
        )
