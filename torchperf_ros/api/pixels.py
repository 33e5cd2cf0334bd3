"""The one decoder of images.

The pixels of an `Image` or `CompressedImage` message, or the reason why there are none. `pixels` is what
adapters call: values as the camera gave them, patterns and brightness-colour encodings turned into red, green
and blue. `raw_pixels` and `compressed_pixels` give 8 bits to look at, and copy as little as they can.

It imports neither torch nor ROS, so that adapters, reports and watches can all use it.
"""

import contextlib
import io
import itertools
from collections.abc import Callable, Collection, Iterator
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
# What `raw_pixels` gives; 16 bits and Bayer patterns only as grey.
ENCODINGS: Final = (*_COLOURS, *_GREYS)
_ONE_CHANNEL: Final = {"mono8": "u1", "8UC1": "u1", "mono16": "u2", "16UC1": "u2", "32FC1": "f4"}
# Row and column of the first red pixel.
_BAYER: Final = {"bayer_rggb8": (0, 0), "bayer_grbg8": (0, 1), "bayer_gbrg8": (1, 0), "bayer_bggr8": (1, 1)}
_SMALLEST_BAYER: Final = 2
_YUV422: Final = ("yuv422", "uyvy", "yuv422_yuy2", "yuyv")
_CHROMA_FIRST: Final = ("yuv422", "uyvy")
_NV: Final = ("nv12", "nv21")
# ITU-R BT.601, limited range, as tables in 1/32, so that sums fit 16 bits:
# R = 1.164 (Y - 16) + 1.596 (V - 128) and so on.
_LEVELS: Final = np.arange(256)
_BRIGHTNESS: Final = np.round(32 * 1.164 * np.maximum(_LEVELS - 16, 0)).astype(np.int16)
_RED_OF_V, _GREEN_OF_U, _GREEN_OF_V, _BLUE_OF_U = (
    np.round(32 * factor * (_LEVELS - 128)).astype(np.int16) for factor in (1.596, 0.391, 0.813, 2.018)
)
_DEPTH_HEADER: Final = 12  # bytes: a number that is 0, and two float32
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


def pixels(message: Any) -> NDArray[Any]:  # noqa: ANN401
    """An image of any usual encoding as an array [rows, columns, channels].

    Colours come as red, green, blue in uint8, without alpha: rgb8, bgr8, 8UC3, rgba8, bgra8, yuv422, yuv422_yuy2,
    nv12, nv21, 8-bit Bayer patterns (bilinear), JPEG and PNG, turned as their EXIF orientation says. One channel
    keeps its type: mono8, 8UC1 (uint8), mono16, 16UC1 and PNGs of 16 bits (uint16), 32FC1 (float32, in the unit
    that the sender chose). So do depths of `compressed_depth_image_transport` as PNG: 16UC1, and 32FC1, NaN
    where no depth is known.

    The array may be a view on the message: copy what you keep.

    Args:
        message: a decoded `sensor_msgs/msg/Image` or `sensor_msgs/msg/CompressedImage`.

    Raises:
        BadInput: the encoding is another one, or size, step and data do not fit, or a file is damaged.
    """
    if not hasattr(message, "encoding"):
        return _decoded(message)
    _check_size(message.width, message.height, MOST_PIXELS)
    if message.encoding not in _DECODERS:
        known = ", ".join(_DECODERS)
        raise BadInput(f"image encoding {message.encoding!r} is not supported; supported: {known}")
    return _DECODERS[message.encoding](message)


def _one_channel(message: Any) -> NDArray[Any]:  # noqa: ANN401
    kind = np.dtype(_ONE_CHANNEL[message.encoding])
    rows = np.ascontiguousarray(_rows(message, kind.itemsize))
    sent = rows.view(kind.newbyteorder(">" if message.is_bigendian else "<"))
    return sent.astype(kind, copy=False)[..., None]


def _decoded(message: Any) -> NDArray[Any]:  # noqa: ANN401
    """The pixels of a `CompressedImage`; a PNG of 16 bits keeps them, or holds depths in metres."""
    with _open(message) as image:
        if image.mode.startswith("I"):
            _check_size(*image.size, MOST_PIXELS)
            kept = np.asarray(image).astype(np.uint16)[..., None]
            is_inverse = message.format.startswith("32FC1") and _file_begin(message)
            return _from_inverse(kept, message) if is_inverse else kept
    found = compressed_pixels(message)
    pattern = message.format.partition(";")[0].strip()
    if found.order == "mono" and pattern in _BAYER:
        return _from_bayer(found.array[..., 0], _BAYER[pattern])
    return found.array


def _file_begin(message: Any) -> int:  # noqa: ANN401
    """Where the file begins: `compressed_depth_image_transport` puts 12 bytes before its PNGs."""
    return _DEPTH_HEADER if bytes(message.data[_DEPTH_HEADER : _DEPTH_HEADER + 4]) == b"\x89PNG" else 0


def _from_inverse(kept: NDArray[np.uint16], message: Any) -> NDArray[np.float32]:  # noqa: ANN401
    """Depths from 16 bits that hold their inverse, as that package keeps 32FC1; 0 is no depth: NaN."""
    scale, shift = np.frombuffer(bytes(message.data[4:_DEPTH_HEADER]), "<f4")
    with np.errstate(divide="ignore"):
        return np.where(kept, scale / (kept - shift), np.float32(np.nan)).astype(np.float32)


def _of_yuv422(rows: NDArray[np.uint8], encoding: str) -> tuple[NDArray[np.uint8], ...]:
    """Brightness [rows, columns], and both colour differences at half the columns."""
    _check_even(rows.shape[1] // 2, "width", encoding)
    first = 1 if encoding in _CHROMA_FIRST else 0
    return rows[:, first::2], rows[:, 1 - first :: 4], rows[:, 3 - first :: 4]


def _of_nv(message: Any) -> tuple[NDArray[np.uint8], ...]:  # noqa: ANN401
    """The same of a plane of brightness and one of colour differences, which has half the rows."""
    _check_even(message.width, "width", message.encoding)
    _check_even(message.height, "height", message.encoding)
    planes = _rows(message, 1, rows=message.height + message.height // 2)
    bright, colour = planes[: message.height], planes[message.height :].repeat(2, axis=0)
    first = 1 if message.encoding == "nv21" else 0
    return bright, colour[:, first::2], colour[:, 1 - first :: 2]


def _from_yuv(y: NDArray[np.uint8], u: NDArray[np.uint8], v: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Red, green and blue by ITU-R BT.601 in limited range (16 to 235), as OpenCV and cv_bridge do."""
    bright = _BRIGHTNESS[y]
    blue, red = (each.repeat(2, axis=1) for each in (u, v))
    colours = (
        bright + _RED_OF_V[red],
        bright - (_GREEN_OF_U[blue] + _GREEN_OF_V[red]),
        bright + _BLUE_OF_U[blue],
    )
    return np.stack([np.clip((each + 16) >> 5, 0, 255).astype(np.uint8) for each in colours], axis=2)


def _from_bayer(raw: NDArray[np.uint8], red: tuple[int, int]) -> NDArray[np.uint8]:
    """Bilinear interpolation of a Bayer pattern whose first red pixel is at `red` (row, column)."""
    height, width = raw.shape
    if min(height, width) < _SMALLEST_BAYER:
        raise BadInput(
            f"image of {width} x {height} pixels is too small for a Bayer pattern; 2 x 2 is the least"
        )
    around = np.pad(raw, 1, mode="reflect").astype(np.uint16)
    up, down = around[:-2], around[2:]
    left_right = around[1:-1, :-2] + around[1:-1, 2:]
    up_down = up[:, 1:-1] + down[:, 1:-1]
    corners = (up[:, :-2] + up[:, 2:] + down[:, :-2] + down[:, 2:] + 2) >> 2
    cross, beside, above = (left_right + up_down + 2) >> 2, (left_right + 1) >> 1, (up_down + 1) >> 1
    colours_of = {  # of a pixel, by whether its row and its column are those of red
        (True, True): (raw, cross, corners),
        (True, False): (beside, raw, above),
        (False, True): (above, raw, beside),
        (False, False): (corners, cross, raw),
    }
    made = np.empty((height, width, 3), np.uint8)
    for row, column in itertools.product((0, 1), repeat=2):
        for channel, values in enumerate(colours_of[row == red[0], column == red[1]]):
            made[row::2, column::2, channel] = values[row::2, column::2]
    return made


def _check_even(size: int, what: str, encoding: str) -> None:
    if size % 2:
        raise BadInput(f"image of encoding {encoding!r} has {what} {size}; it has to be even")


def _rows(message: Any, pixel_bytes: int, rows: int | None = None) -> NDArray[np.uint8]:  # noqa: ANN401
    """The bytes of the image's rows without the padding at their ends, a view on the message.

    Raises:
        BadInput: step or data do not fit the size.
    """
    width, step, height = message.width, message.step, message.height if rows is None else rows
    if step < width * pixel_bytes:
        raise BadInput(
            f"image step is {step} bytes, less than width {width} * {pixel_bytes} bytes ="
            f" {width * pixel_bytes}"
        )
    if message.data.size < step * height:
        raise BadInput(
            f"image data has {message.data.size} bytes, less than step {step} * height {height} ="
            f" {step * height}"
        )
    used: NDArray[np.uint8] = message.data[: step * height].reshape(height, step)[:, : width * pixel_bytes]
    return used


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
    encoding, width, height = message.encoding, message.width, message.height
    if encoding not in encodings:
        why = "a Bayer pattern, debayer it first" if encoding.startswith("bayer_") else "not supported"
        raise BadInput(f"image encoding {encoding!r} is {why}; supported: {', '.join(encodings)}")
    _check_size(width, height, max_pixels)
    channels, order = _COLOURS.get(encoding, (1, "mono"))
    rows = _rows(message, 2 if encoding in _DEEP else channels)
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
    """The decoded pixels of a `sensor_msgs/msg/CompressedImage`: a JPEG or a PNG, by its first bytes.

    `max_pixels`, the largest width times height, is checked before anything is decoded. Where a width and
    height are the `least` that is enough, a large JPEG is decoded at 1/2, 1/4 or 1/8 of its size.

    Raises:
        BadInput: the bytes are no such file, are cut off or damaged, or the image's size or mode is not
            allowed.
    """
    with _open(message) as image:
        _check_size(*image.size, max_pixels)
        if image.mode not in _COMPRESSED_MODES:
            raise BadInput(
                f"compressed image has mode {image.mode!r}; supported: {', '.join(_COMPRESSED_MODES)}"
            )
        order, mode = ("mono", "L") if image.mode == "L" else ("rgb", "RGB")
        # `bayer_rggb8; jpeg compressed`, as image_transport writes.
        raw = message.format.partition(";")[0].strip()
        if mode == "L" and raw.startswith("bayer_") and raw not in encodings:
            raise BadInput(
                f"compressed image of format {message.format!r} is a Bayer pattern, debayer it first"
            )
        turned = _orientation(image)
        image.draft(mode, least[::-1] if least and turned >= _FIRST_ON_ITS_SIDE else least)
        upright = image if turned == _UPRIGHT else ImageOps.exif_transpose(image)
        array = np.asarray(upright if upright.mode == mode else upright.convert(mode))
    return Pixels(array.reshape(*array.shape[:2], -1), order)


def compressed_size(message: Any) -> tuple[int, int]:  # noqa: ANN401
    """Width and height in pixels by the header of a message that `compressed_pixels` has accepted."""
    with _open(message) as image:
        width, height = image.size
        return (height, width) if _orientation(image) >= _FIRST_ON_ITS_SIDE else (width, height)


def _orientation(image: Image.Image) -> int:
    """How the file says that its image has to be turned, as OpenCV and cv_bridge do, 1 to 8.

    `_UPRIGHT`: not at all.
    """
    # asking for one that is not there would decode a PNG
    turned = image.getexif().get(_ORIENTATION, _UPRIGHT) if "exif" in image.info else _UPRIGHT
    return turned if turned in range(_UPRIGHT, _LAST + 1) else _UPRIGHT


@contextlib.contextmanager
def _open(message: Any) -> Iterator[Image.Image]:  # noqa: ANN401
    """The file in a message; what its bytes make Pillow raise in the context is a `BadInput`."""
    try:
        # Pillow: small wheels for every platform, no OpenCV beside the one that the vehicle has, reads the
        # size before it decodes, can be held to two formats, and scales JPEGs while decoding.
        with Image.open(
            io.BytesIO(message.data[_file_begin(message) :]), formats=_COMPRESSED_FORMATS
        ) as image:
            yield image
    except BadInput:
        raise
    except Exception as error:  # on damaged bytes Pillow raises OSError, SyntaxError, ValueError, ...
        why = (
            "is neither JPEG nor PNG"
            if isinstance(error, UnidentifiedImageError)
            else f"cannot be decoded: {error}"
        )
        raise BadInput(
            f"compressed image of {message.data.size} bytes (format {message.format!r}) {why}"
        ) from error


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise BadInput(f"image is empty: width {width}, height {height}")
    if width * height > max_pixels:
        raise BadInput(
            f"image of {width} x {height} = {width * height} pixels is larger than max_pixels {max_pixels}"
        )


# By encoding, what makes an array of a message of a size that is allowed.
_DECODERS: Final[dict[str, Callable[[Any], NDArray[Any]]]] = {
    **dict.fromkeys(_COLOURS, lambda message: raw_pixels(message).rgb()),
    "rgba8": lambda message: raw_pixels(message).array,  # a view
    **dict.fromkeys(_ONE_CHANNEL, _one_channel),
    **dict.fromkeys(_BAYER, lambda message: _from_bayer(_rows(message, 1), _BAYER[message.encoding])),
    **dict.fromkeys(_YUV422, lambda message: _from_yuv(*_of_yuv422(_rows(message, 2), message.encoding))),
    **dict.fromkeys(_NV, lambda message: _from_yuv(*_of_nv(message))),
}
