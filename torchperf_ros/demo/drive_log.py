"""A drive that never was, message by message: camera, odometry, labelled objects, and whatever is to go wrong."""

import heapq
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.frame import restamped
from torchperf_ros.core.message_types import encode, message_class
from torchperf_ros.demo.log_source import IMAGE_TYPES
from torchperf_ros.demo.road_scene import (
    CAR_HEIGHT_M,
    CAR_WIDTH_M,
    IMAGE_TOPIC,
    ODOMETRY_HZ,
    ODOMETRY_TOPIC,
    ODOMETRY_TYPE,
    Pixels,
    RoadScene,
    odometry_cdr,
)
from torchperf_ros.replay.logs.log_reader import LogMessage

OBJECTS_TOPIC: Final = "/ground_truth/objects"
OBJECTS_TYPE: Final = "visualization_msgs/msg/MarkerArray"
START_NS: Final = 1_700_000_000 * NS_PER_S
FAULTS: Final = {
    "gap": "no message at all",
    "zero-stamp": "images stamped 0",
    "backward-stamp": "images stamped 1 s early",
    "jump-stamp": "images stamped 1 h late",
    "repeat-stamp": "images with the stamp of the first of them",
    "other-size": "images of half the width and height",
    "black": "black images",
    "frozen": "the same image again and again",
    "truncated": "images of which the second half of the bytes is missing",
}
"""What can go wrong for a while, and what it is."""
_CAR_LENGTH_M: Final = 4.5
_SPREAD: Final = 4.0  # standard deviations, beyond which no delay is drawn
_RECEIVE_NS: Final = 5_000_000
_JPEG_QUALITY: Final = 90
_CUBE: Final = 1


@dataclass(frozen=True)
class Fault:
    """What goes wrong, from when to when, in seconds of the drive."""

    kind: str
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class DriveLog:
    """A drive to be written.

    Attributes:
        seconds: how long.
        rate_hz: images per second; odometry comes at 30 Hz.
        width, height: of the images, in pixels.
        compressed: JPEG images on `/camera/image_raw/compressed` instead of rgb8 on `/camera/image_raw`.
        jitter_ms: standard deviation of the time from stamp to receipt, which is 5 ms in the mean.
        drop: share of the images and odometries that are lost, 0 to 1.
        faults: what goes wrong.
        seed: of delays and losses.
    """

    seconds: float = 10.0
    rate_hz: float = 30.0
    width: int = 1280
    height: int = 720
    compressed: bool = False
    jitter_ms: float = 0.0
    drop: float = 0.0
    faults: tuple[Fault, ...] = ()
    seed: int = 1

    @property
    def image_topic(self) -> str:
        """Where the images are."""
        return f"{IMAGE_TOPIC}/compressed" if self.compressed else IMAGE_TOPIC

    def messages(self) -> Iterator[LogMessage]:
        """All messages in the order of their receipt; one image is held at a time, or as many as the jitter mixes."""
        waiting: list[tuple[int, int, LogMessage]] = []
        numbers = itertools.count()
        for stamp_ns, message in self._sent():
            while waiting and waiting[0][0] <= stamp_ns:
                yield heapq.heappop(waiting)[2]
            heapq.heappush(waiting, (message.t_ns, next(numbers), message))
        while waiting:
            yield heapq.heappop(waiting)[2]

    def _sent(self) -> Iterator[tuple[int, LogMessage]]:
        """When a message was sent, and the message; images, objects and odometry in the order of sending."""
        random = np.random.default_rng(self.seed)
        scene = RoadScene(self.rate_hz, self.width, self.height)
        camera = _Camera(self, scene)
        images = ((number / self.rate_hz, 0) for number in range(round(self.seconds * self.rate_hz)))
        odometries = ((number / ODOMETRY_HZ, 1) for number in range(round(self.seconds * ODOMETRY_HZ)))
        for at_s, kind in heapq.merge(images, odometries):
            sent_ns = START_NS + round(at_s * NS_PER_S)
            late_ns = round(float(np.clip(random.normal(), -_SPREAD, _SPREAD)) * self.jitter_ms * 1e6)
            received_ns = sent_ns + max(_RECEIVE_NS + late_ns, 0)
            lost = random.random() < self.drop or self.active("gap", at_s) is not None
            if kind:
                if not lost:
                    data = restamped(odometry_cdr(at_s), sent_ns)
                    yield sent_ns, LogMessage(ODOMETRY_TOPIC, ODOMETRY_TYPE, data, received_ns)
                continue
            if not lost:
                yield sent_ns, LogMessage(self.image_topic, IMAGE_TYPES[self.compressed], camera.cdr(at_s), received_ns)
            if self.active("gap", at_s) is None:
                yield sent_ns, LogMessage(OBJECTS_TOPIC, OBJECTS_TYPE, _objects_cdr(scene, at_s, sent_ns), received_ns)

    def active(self, kind: str, at_s: float) -> Fault | None:
        """The fault of this kind that is on at a time, if there is one."""
        return next(
            (
                fault
                for fault in self.faults
                if fault.kind == kind and fault.start_s <= at_s < fault.start_s + fault.duration_s
            ),
            None,
        )


def fault_of(text: str) -> Fault:
    """A fault as people write it: `gap@3` or `gap@3:0.5`, from second 3 on, for half a second, which is the default.

    Raises:
        ConfigError: it is not of this form, or there is no such fault.
    """
    kind, _, times = text.partition("@")
    start, _, duration = times.partition(":")
    try:
        fault = Fault(kind, float(start), float(duration or 0.5))
    except ValueError:
        fault = Fault("", 0.0, 0.0)
    if fault.kind not in FAULTS or not (fault.start_s >= 0 and fault.duration_s > 0):
        msg = f"fault {text!r} has to be like gap@3 or gap@3:0.5, second and duration; there are: {', '.join(FAULTS)}"
        raise ConfigError(msg)
    return fault


class _Camera:
    """Images of a scene, as the faults make them."""

    def __init__(self, drive: DriveLog, scene: RoadScene) -> None:
        self._drive = drive
        self._scenes = {False: scene}
        if any(fault.kind == "other-size" for fault in drive.faults):
            self._scenes[True] = RoadScene(drive.rate_hz, max(drive.width // 2, 1), max(drive.height // 2, 1))

    def cdr(self, at_s: float) -> bytes:
        """The image of a time, stamped and spoilt as it should be."""
        active = self._drive.active
        frozen = active("frozen", at_s)
        scene = self._scenes[active("other-size", at_s) is not None]
        pixels = scene.draw(frozen.start_s if frozen else at_s)
        if active("black", at_s):
            pixels[:] = 0
        data = restamped(
            _jpeg_cdr(pixels) if self._drive.compressed else scene.pixels_cdr(pixels), self._stamp_ns(at_s)
        )
        return data[: len(data) // 2] if active("truncated", at_s) else data

    def _stamp_ns(self, at_s: float) -> int:
        active = self._drive.active
        if active("zero-stamp", at_s):
            return 0
        if repeated := active("repeat-stamp", at_s):
            at_s = repeated.start_s
        at_s -= 1.0 if active("backward-stamp", at_s) else 0.0
        at_s += 3600.0 if active("jump-stamp", at_s) else 0.0
        return START_NS + round(at_s * NS_PER_S)


def _jpeg_cdr(pixels: Pixels) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    data = np.frombuffer(buffer.getbuffer(), np.uint8)
    message = message_class(IMAGE_TYPES[1])(header=_header("camera", 0), format="rgb8; jpeg compressed bgr8", data=data)
    return bytes(encode(message, IMAGE_TYPES[1]))


def _header(frame_id: str, stamp_ns: int) -> object:
    seconds, nanoseconds = divmod(stamp_ns, NS_PER_S)
    stamp = message_class("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
    return message_class("std_msgs/msg/Header")(stamp=stamp, frame_id=frame_id)


def _objects_cdr(scene: RoadScene, at_s: float, stamp_ns: int) -> bytes:
    """A marker for each car: a cube in `base_link` (x ahead, y left); `points`: corners of its box in the image, px."""
    vector, point, quaternion, pose = (
        message_class(f"geometry_msgs/msg/{name}") for name in ("Vector3", "Point", "Quaternion", "Pose")
    )
    color, time = message_class("std_msgs/msg/ColorRGBA"), message_class("builtin_interfaces/msg/Duration")
    header = _header("base_link", stamp_ns)
    no_texture = message_class(IMAGE_TYPES[1])(header=header, format="", data=np.empty(0, np.uint8))
    no_mesh = message_class("visualization_msgs/msg/MeshFile")(filename="", data=np.empty(0, np.uint8))
    markers = []
    for number, found in enumerate(scene.objects(at_s)):
        left, top, right, bottom = map(float, found.box_px)
        red, green, blue = (value / 255 for value in found.rgb)
        markers.append(
            message_class("visualization_msgs/msg/Marker")(
                header=header, ns="car", id=number, type=_CUBE, action=0,
                pose=pose(
                    position=point(x=found.ahead_m + _CAR_LENGTH_M / 2, y=-found.lateral_m, z=CAR_HEIGHT_M / 2),
                    orientation=quaternion(x=0.0, y=0.0, z=0.0, w=1.0),
                ),
                scale=vector(x=_CAR_LENGTH_M, y=CAR_WIDTH_M, z=CAR_HEIGHT_M),
                color=color(r=red, g=green, b=blue, a=1.0), lifetime=time(sec=0, nanosec=200_000_000),
                frame_locked=False, points=[point(x=left, y=top, z=0.0), point(x=right, y=bottom, z=0.0)], colors=[],
                texture_resource="", texture=no_texture, uv_coordinates=[], text="car", mesh_resource="",
                mesh_file=no_mesh, mesh_use_embedded_materials=False,
            )
        )  # fmt: skip
    return bytes(encode(message_class(OBJECTS_TYPE)(markers=markers), OBJECTS_TYPE))
