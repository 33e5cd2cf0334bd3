"""What a frame was computed from, as small pictures: images of the log whose stamps are the frames'."""

import base64
import io
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rosbags.highlevel import AnyReader
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.config.image_pixels import compressed_pixels, raw_pixels
from torchperf_ros.frame.errors import BadInput

_IMAGE = "sensor_msgs/msg/Image"
_COMPRESSED = "sensor_msgs/msg/CompressedImage"
_CLOUD = "sensor_msgs/msg/PointCloud2"
_NEAR_MS = 100.0  # a neighbour of the frame shows the scene, too, and says by how much it is off
_NONE_NEAR = f"the log has none with a stamp within {_NEAR_MS:.0f} ms of the frame's"
_BEFORE_NS = 1_500_000_000
_AFTER_NS = 200_000_000
_NS_PER_MS = 1e6
_CLOUD_CELLS = 240
_CLOUD_M = 40.0
_QUALITY = 70


@dataclass(frozen=True)
class InputPicture:
    """A message that a frame was computed from, or the one of its topic with the nearest stamp.

    Attributes:
        topic: where it was published.
        uri: a JPEG as a `data:` URI.
        off_ms: by how much its stamp differs from the frame's, as far as that is known.
    """

    topic: str
    uri: str
    off_ms: float


def input_pictures(
    paths: Sequence[Path], frames: Iterable[tuple[int, int]], side: int
) -> tuple[dict[int, InputPicture], str]:
    """Pictures by stamp, and why some are missing, empty if none is.

    Args:
        paths: the log, as for `AnyReader`.
        frames: of each frame the stamp, and the ROS time at which it was recorded, in ns.
        side: longest side of a picture in pixels.
    """
    found: dict[int, InputPicture] = {}
    failures: dict[str, int] = {}
    wanted = list(frames)
    try:
        with AnyReader(list(paths), default_typestore=get_typestore(Stores.ROS2_JAZZY)) as reader:
            connections = [c for c in reader.connections if c.msgtype in {_IMAGE, _COMPRESSED, _CLOUD} and c.msgcount]
            images = [c for c in connections if c.msgtype != _CLOUD and "depth" not in c.topic.lower()]
            if not connections:
                return {}, "no images or point clouds in this log, so the frames' inputs cannot be shown"
            for stamp_ns, t_ns in wanted:
                nearest = _nearest(reader, images or connections, stamp_ns, t_ns)
                try:
                    if nearest is None:
                        raise ValueError(_NONE_NEAR)
                    connection, raw, off_ms = nearest
                    picture = _picture(reader.deserialize(raw, connection.msgtype), connection.msgtype)
                    found[stamp_ns] = InputPicture(connection.topic, _data_uri(picture, side), off_ms)
                except (ValueError, OSError, BadInput) as error:
                    failures[str(error)] = failures.get(str(error), 0) + 1
    except Exception as error:  # a stranger's file may raise anything; the report is worth having without pictures
        failures[f"the log's images cannot be read ({type(error).__name__}: {error})"] = len(wanted) - len(found)
    return found, "; ".join(f"{count} frames without a picture: {why}" for why, count in failures.items())


def _nearest(reader: AnyReader, connections: list[Any], stamp_ns: int, t_ns: int) -> tuple[Any, bytes, float] | None:
    """The message with the nearest stamp among those recorded shortly before the answer."""
    best: tuple[Any, bytes, float] | None = None
    for connection, _, raw in reader.messages(connections, start=t_ns - _BEFORE_NS, stop=t_ns + _AFTER_NS):
        off_ms = (_stamp_ns(raw, ros2=reader.is2) - stamp_ns) / _NS_PER_MS
        if abs(off_ms) <= (_NEAR_MS if best is None else abs(best[2])):
            best = connection, bytes(raw), off_ms
    return best


def _stamp_ns(raw: bytes, *, ros2: bool) -> int:
    """`header.stamp`: what a message begins with, after the encapsulation, or in ROS 1 after `seq`."""
    order = "<" if not ros2 or raw[1] & 1 else ">"
    seconds, nanoseconds = struct.unpack_from(f"{order}II", raw, 4)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


def _picture(message: Any, type_name: str) -> Image.Image:  # noqa: ANN401 - any of the three
    """The message in RGB; images of 16 bits and Bayer patterns as grey.

    Raises:
        ValueError: it is a point cloud without x and y.
        BadInput: the image's encoding is not known, or it is damaged.
    """
    if type_name == _CLOUD:
        return _from_above(message)
    return Image.fromarray((compressed_pixels if type_name == _COMPRESSED else raw_pixels)(message).rgb())


def _from_above(message: Any) -> Image.Image:  # noqa: ANN401 - sensor_msgs/PointCloud2
    """The points from above, forward up, within 40 m: the more in a cell, the brighter.

    Raises:
        ValueError: it has no x and y as 32-bit floats.
    """
    offsets = {field.name: field.offset for field in message.fields if field.datatype == 7}  # noqa: PLR2004 - FLOAT32
    if not {"x", "y"} <= set(offsets):
        msg = "a point cloud without x and y as 32-bit floats is not drawn"
        raise ValueError(msg)
    order = ">f4" if message.is_bigendian else "<f4"
    kind = np.dtype({"names": ["x", "y"], "formats": [order] * 2, "offsets": [offsets["x"], offsets["y"]],
                     "itemsize": message.point_step})  # fmt: skip
    count = len(message.data) // message.point_step
    points = np.frombuffer(np.asarray(message.data, dtype=np.uint8).tobytes(), kind, count)
    x, y = points["x"].astype(np.float64), points["y"].astype(np.float64)
    near = (np.abs(x) < _CLOUD_M) & (np.abs(y) < _CLOUD_M)  # false for NaN, too
    cells: NDArray[np.float64]
    cells, _, _ = np.histogram2d(-x[near], -y[near], bins=_CLOUD_CELLS, range=[[-_CLOUD_M, _CLOUD_M]] * 2)
    bright = np.log1p(cells) / max(float(np.log1p(cells.max())), 1.0) * 255
    return Image.fromarray(bright.astype(np.uint8)).convert("RGB")


def _data_uri(picture: Image.Image, side: int) -> str:
    picture.thumbnail((side, side))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode("ascii")
