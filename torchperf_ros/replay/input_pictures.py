"""What a frame was computed from, as small pictures: images of the log whose stamps are the frames'."""

import base64
import io
import struct
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
from PIL import Image

from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.pixels import compressed_pixels, raw_pixels
from torchperf_ros.observe.runs.run_log import RunLog
from torchperf_ros.replay.logs.log_reader import LogError, LogReader

_IMAGE: Final = "sensor_msgs/msg/Image"
_COMPRESSED: Final = "sensor_msgs/msg/CompressedImage"
_CLOUD: Final = "sensor_msgs/msg/PointCloud2"
_NEAR_MS: Final = 100.0  # a neighbour of the frame shows the scene, too, and says by how much it is off
_NONE_NEAR: Final = f"the log has none with a stamp within {_NEAR_MS:.0f} ms of the frame's"
_SAME_MS: Final = 8.0  # a frame's stamp is known from outside to some milliseconds
_BEFORE_NS: Final = 1_500_000_000
_AFTER_NS: Final = 200_000_000
_NS_PER_MS: Final = 1e6
_CLOUD_CELLS: Final = 240
_CLOUD_M: Final = 40.0
_FLOAT32: Final = 7
_QUALITY: Final = 70


def input_pictures(
    run: RunLog, chosen: Mapping[str, Collection[int]], side: int
) -> tuple[dict[tuple[str, int], dict[str, str]], str]:
    """Pictures by trigger and stamp in ns, and why some are missing, empty if none is.

    They are of frames that are `chosen` by stage and index, if their stamps are known, and come from the
    run's recordings; what stages publish shows no input. `side`: longest side of a picture in pixels.
    """
    if not run.recordings:
        return {}, "no recorded inputs beside these figures, so the worst frames are shown without pictures"
    rows = [
        (stage.trigger, stage.frames[index]) for stage in run.stages for index in chosen.get(stage.name, ())
    ]
    frames = {(trigger, int(row["stamp_ns"])): int(row["t_ns"]) for trigger, row in rows if row["stamp_ns"]}
    found: dict[tuple[str, int], dict[str, str]] = {}
    failures: dict[tuple[str, int], str] = {}
    triggers = {trigger for trigger, _ in frames if trigger}
    ends = tuple(f"/{stage.output.lstrip('/')}" for stage in run.stages if stage.output)
    for path in run.recordings:
        try:
            with LogReader(path) as log:
                shown = {
                    one.name: one.type_name
                    for one in log.topics.values()
                    if one.type_name in {_IMAGE, _COMPRESSED, _CLOUD}
                    and one.count
                    and not f"/{one.name}".endswith(ends)
                }
                images = [
                    name for name, kind in shown.items() if kind != _CLOUD and "depth" not in name.lower()
                ]
                for key in [key for key in frames if key not in found] if shown else ():
                    topics = (
                        [key[0]] if key[0] in shown else [*triggers & set(shown)] or images or list(shown)
                    )
                    try:
                        found[key] = _nearest(log, topics, key[1], frames[key], side)
                    except (ValueError, IndexError, OSError, BadInput, struct.error) as error:
                        failures[key] = str(error)
        except LogError as error:
            failures |= dict.fromkeys(frames, str(error))
    missing = Counter(why for key, why in failures.items() if key not in found)
    if not found and not missing and frames:
        return {}, "no images or point clouds in this log, so the frames' inputs cannot be shown"
    return found, "; ".join(f"{count} frames without a picture: {why}" for why, count in missing.items())


def _nearest(log: LogReader, topics: list[str], stamp_ns: int, t_ns: int, side: int) -> dict[str, str]:
    """The message with the nearest stamp of those recorded shortly before the answer; or a `ValueError`."""
    near = [
        (abs(off_ms), off_ms, message)
        for message in log.messages(topics, t_ns - _BEFORE_NS, t_ns + _AFTER_NS)
        if abs(off_ms := (_stamp_ns(message.data) - stamp_ns) / _NS_PER_MS) <= _NEAR_MS
    ]
    if not near:
        raise ValueError(_NONE_NEAR)
    _, off_ms, message = min(near, key=lambda one: one[0])
    decoded = log.decode(message)
    picture = (
        _from_above(decoded)
        if message.type_name == _CLOUD
        else Image.fromarray(
            (raw_pixels if message.type_name == _IMAGE else compressed_pixels)(decoded).rgb()
        )
    )
    picture.thumbnail((side, side))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=_QUALITY, optimize=True)
    return {
        "picture": f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}",
        "words": f"{message.topic}, stamp {off_ms:+.1f} ms from the frame's",
        "off": f"a neighbour, {off_ms:+.0f} ms off" if abs(off_ms) > _SAME_MS else "",
    }


def _stamp_ns(raw: bytes) -> int:
    """`header.stamp`, which a message begins with after the encapsulation."""
    seconds, nanoseconds = struct.unpack_from("<II" if raw[1] & 1 else ">II", raw, 4)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


def _from_above(cloud: Any) -> Image.Image:  # noqa: ANN401 - sensor_msgs/PointCloud2
    """The points from above, forward up, within 40 m: the more in a cell, the brighter."""
    offsets = {field.name: field.offset for field in cloud.fields if field.datatype == _FLOAT32}
    if not {"x", "y"} <= set(offsets):
        raise ValueError("a point cloud without x and y as 32-bit floats is not drawn")
    kind = np.dtype(
        {
            "names": ["x", "y"],
            "formats": [">f4" if cloud.is_bigendian else "<f4"] * 2,
            "offsets": [offsets["x"], offsets["y"]],
            "itemsize": cloud.point_step,
        }
    )
    points = np.frombuffer(bytes(cloud.data), kind, len(cloud.data) // cloud.point_step)
    x, y = points["x"].astype(np.float64), points["y"].astype(np.float64)
    near = (np.abs(x) < _CLOUD_M) & (np.abs(y) < _CLOUD_M)  # false for NaN, too
    cells, _, _ = np.histogram2d(-x[near], -y[near], bins=_CLOUD_CELLS, range=[[-_CLOUD_M, _CLOUD_M]] * 2)
    bright = np.log1p(cells) / max(float(np.log1p(cells.max())), 1.0) * 255
    return Image.fromarray(bright.astype(np.uint8)).convert("RGB")
