"""Whether an image shows anything: black, white or featureless, by a few thousand of its bytes."""

import io
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

_POINTS = 64  # rows and columns that are looked at
_BLACK, _WHITE = 0.08, 0.98  # of the full scale
_FLAT = 0.02  # of the full scale, between the 2nd and the 98th percentile
_SATURATED = 0.8  # of the points
_EIGHT_BITS = re.compile(r"(mono8|rgba?8|bgra?8|8uc\d|8sc\d|bayer_\w+8)")
_SIXTEEN_BITS = re.compile(r"(mono16|16uc\d|rgba?16|bgra?16|bayer_\w+16)")
_LUMA = {"yuv422": (1, 2), "uyvy": (1, 2), "yuv422_yuy2": (0, 2), "yuyv": (0, 2), "nv12": (0, 1), "nv21": (0, 1),
         "nv24": (0, 1)}  # fmt: skip
"""Where the brightness is among an image's bytes: the first, and every which one."""

Points = NDArray[Any]


def raw_points(message: Any) -> Points | None:  # noqa: ANN401 - rosbags builds these dataclasses at run time
    """Some points of a `sensor_msgs/msg/Image` on a scale from 0 to 1; None if its encoding or size is not usable.

    Depth in 16 bits or floats has no full scale: its largest value counts as that.
    """
    encoding = str(message.encoding).lower()
    height, step, data = int(message.height), int(message.step), np.asarray(message.data)
    if not height or not step or len(data) < height * step:
        return None
    rows = data[: height * step].reshape(height, step)[:: max(1, height // _POINTS)]
    if encoding in _LUMA:
        first, every = _LUMA[encoding]
        return _some(rows[:, first::every]) / 255.0
    if _EIGHT_BITS.fullmatch(encoding):
        return _some(rows) / 255.0
    kind = "u2" if _SIXTEEN_BITS.fullmatch(encoding) else "f4" if encoding.startswith("32fc") else ""
    if not kind or step % int(kind[1]):
        return None
    values = np.nan_to_num(_some(rows.view((">" if message.is_bigendian else "<") + kind)).astype(np.float64))
    largest = float(values.max(initial=0.0))
    return values / largest if largest > 0 else np.zeros_like(values)


def compressed_points(message: Any) -> Points | None:  # noqa: ANN401
    """The same of a `sensor_msgs/msg/CompressedImage`; None if it cannot be decoded."""
    from PIL import Image, UnidentifiedImageError  # 10 MiB that most recorders never need

    try:
        with Image.open(io.BytesIO(bytes(message.data))) as image:
            image.draft("L", (_POINTS, _POINTS))  # a JPEG is decoded at an eighth of its size
            return np.asarray(image.convert("L").resize((_POINTS, _POINTS), Image.Resampling.NEAREST)) / 255.0
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        return None


def blindness(points: Points) -> str:
    """Why nothing can be seen: `black`, `white`, `saturated` or `featureless`; empty where something can."""
    if not points.size:
        return ""
    if float((points >= _WHITE).mean()) >= _SATURATED:
        return "white" if float(points.mean()) >= _WHITE else "saturated"
    low, high = (float(value) for value in np.quantile(points, (0.02, 0.98)))
    if high - low > _FLAT:
        return ""
    return "black" if high <= _BLACK else "featureless"


def _some(rows: Points) -> Points:
    """Every so many-th of each row; an odd step, so that all channels have their turn."""
    return rows[:, :: max(1, rows.shape[1] // _POINTS) | 1]
