"""A drive that never was, message by message.

Camera, odometry, labelled objects, and faults on request.

The demo plays it; `torchperf make-log` writes it as a log: all of it, or nothing under the final name.
"""

import contextlib
import heapq
import io
import operator
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer as Writer2
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.api.messages import empty_message, encode, header, message_class, typestore
from torchperf_ros.models import road_scene
from torchperf_ros.models.road_scene import IMAGE_TYPE, ODOMETRY_TYPE, Pixels, RoadScene
from torchperf_ros.replay.logs.log_reader import LogMessage
from torchperf_ros.workers.process_setup import held_interrupt

# Where the demo has images, by their type.
IMAGE_TOPICS: Final = {
    IMAGE_TYPE: "/camera/image_raw",
    "sensor_msgs/msg/CompressedImage": "/camera/image_raw/compressed",
}
ODOMETRY_TOPIC: Final = "/odom"
OBJECTS_TOPIC: Final = "/ground_truth/objects"
# Of a drive with several cameras, each of which has the topic /NAME/image.
CAMERAS: Final = ("front", "left", "right", "rear", "front_left", "front_right", "rear_left", "rear_right")
_APART_S: Final = 11.0  # of the drawn road, from one camera to the next
START_NS: Final = 1_700_000_000 * NS_PER_S
FORMATS: Final = ("mcap", "db3", "bag")
# What can go wrong for a while; `torchperf make-log --help` says what each is.
FAULTS: Final = (
    "gap",
    "zero-stamp",
    "backward-stamp",
    "jump-stamp",
    "repeat-stamp",
    "other-size",
    "black",
    "frozen",
    "truncated",
)
_OBJECTS_TYPE: Final = "visualization_msgs/msg/MarkerArray"
_ODOMETRY_HZ: Final = 30.0
_CAR_LENGTH_M: Final = 4.5
_SPREAD: Final = 4.0  # standard deviations, beyond which no delay is drawn
_RECEIVE_NS: Final = 5_000_000
_JPEG_SHARE: Final = 0.05  # of an image's bytes, about
_CUBE: Final = 1
_VERSION: Final = 9  # of rosbag2's metadata
_PLUGINS: Final = {"mcap": StoragePlugin.MCAP, "db3": StoragePlugin.SQLITE3}


class MakeLogError(TorchperfError):
    """A log cannot be written as it was asked for; the message says why and what would do."""


class LogFault(NamedTuple):
    """What goes wrong, from when to when, in seconds of the drive."""

    kind: str
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class DriveLog:
    seconds: float = 10.0  # how long
    rate_hz: float = 30.0  # images per second; odometry comes at 30 Hz
    width: int = 1280  # of the images, in pixels
    height: int = 720
    compressed: bool = False  # JPEG images instead of rgb8
    # standard deviation of the time from stamp to receipt, which is 5 ms in the mean
    jitter_ms: float = 0.0
    drop: float = 0.0  # share of the images and odometries that are lost, 0 to 1
    faults: tuple[LogFault, ...] = ()  # what goes wrong
    seed: int = 1  # of delays and losses
    labelled: bool = True  # whether the cars come as markers on `/ground_truth/objects`
    # several: each has another part of the road on /NAME/image; the labels are of the first
    cameras: int = 1

    @property
    def image_topics(self) -> list[str]:
        if self.cameras == 1:
            return [list(IMAGE_TOPICS.values())[self.compressed]]
        return [f"/{name}/image{'/compressed' * self.compressed}" for name in CAMERAS[: self.cameras]]

    def messages(self) -> Iterator[LogMessage]:
        """All messages in the order of their receipt.

        One image is held at a time, or as many as the jitter mixes.
        """
        waiting: list[tuple[int, int, LogMessage]] = []
        for number, (stamp_ns, message) in enumerate(self._sent()):
            while waiting and waiting[0][0] <= stamp_ns:
                yield heapq.heappop(waiting)[2]
            heapq.heappush(waiting, (message.t_ns, number, message))
        while waiting:
            yield heapq.heappop(waiting)[2]

    def active(self, kind: str, at_s: float) -> LogFault | None:
        on = (fault for fault in self.faults if fault.start_s <= at_s < fault.start_s + fault.duration_s)
        return next((fault for fault in on if fault.kind == kind), None)

    def _sent(self) -> Iterator[tuple[int, LogMessage]]:
        random = np.random.default_rng(self.seed)
        scene = half = RoadScene(self.width, self.height)
        if any(fault.kind == "other-size" for fault in self.faults):
            half = RoadScene(max(self.width // 2, 1), max(self.height // 2, 1))
        image_type = list(IMAGE_TOPICS)[self.compressed]
        images = ((number / self.rate_hz, True) for number in range(round(self.seconds * self.rate_hz)))
        odometries = (
            (number / _ODOMETRY_HZ, False) for number in range(round(self.seconds * _ODOMETRY_HZ))
        )
        for at_s, is_image in heapq.merge(images, odometries, key=operator.itemgetter(0)):
            sent_ns = START_NS + round(at_s * NS_PER_S)
            late_ns = round(float(np.clip(random.normal(), -_SPREAD, _SPREAD)) * self.jitter_ms * 1e6)
            received_ns = sent_ns + max(_RECEIVE_NS + late_ns, 0)
            in_gap = self.active("gap", at_s) is not None
            is_lost = random.random() < self.drop or in_gap
            if is_image and not is_lost:
                one = half if self.active("other-size", at_s) else scene
                for number, topic in enumerate(self.image_topics):
                    data = self._image_cdr(one, at_s, number * _APART_S)
                    yield sent_ns, LogMessage(topic, image_type, data, received_ns)
            elif not is_lost:
                data = restamped(road_scene.odometry_cdr(at_s), sent_ns)
                yield sent_ns, LogMessage(ODOMETRY_TOPIC, ODOMETRY_TYPE, data, received_ns)
            if is_image and self.labelled and not in_gap:
                yield (
                    sent_ns,
                    LogMessage(
                        OBJECTS_TOPIC, _OBJECTS_TYPE, _objects_cdr(scene, at_s, sent_ns), received_ns
                    ),
                )

    def _image_cdr(self, scene: RoadScene, at_s: float, ahead_s: float) -> bytes:
        frozen = self.active("frozen", at_s)
        pixels = scene.draw((frozen.start_s if frozen else at_s) + ahead_s)
        if self.active("black", at_s):
            pixels[:] = 0
        data = restamped(
            _jpeg_cdr(pixels) if self.compressed else scene.pixels_cdr(pixels), self._stamp_ns(at_s)
        )
        return data[: len(data) // 2] if self.active("truncated", at_s) else data

    def _stamp_ns(self, at_s: float) -> int:
        if self.active("zero-stamp", at_s):
            return 0
        if repeated := self.active("repeat-stamp", at_s):
            at_s = repeated.start_s
        at_s -= 1.0 if self.active("backward-stamp", at_s) else 0.0
        at_s += 3600.0 if self.active("jump-stamp", at_s) else 0.0
        return START_NS + round(at_s * NS_PER_S)


def fault_of(text: str) -> LogFault:
    """A fault as people write it.

    `gap@3` or `gap@3:0.5`, from second 3 on, for half a second, which is the default.

    Raises:
        ConfigError: it is not of this form, or there is no such fault.
    """
    kind, _, times = text.partition("@")
    start, _, duration = times.partition(":")
    with contextlib.suppress(ValueError):
        fault = LogFault(kind, float(start), float(duration or 0.5))
        if kind in FAULTS and fault.start_s >= 0 and fault.duration_s > 0:
            return fault
    raise ConfigError(
        f"fault {text!r} has to be like gap@3 or gap@3:0.5, second and duration; there are:"
        f" {', '.join(FAULTS)}"
    )


def write_drive(
    path: Path,
    drive: DriveLog,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Path:
    """Write a drive, see `torchperf make-log --help`.

    The same arguments give the same bytes, and the path is returned.

    `progress` is called with how much of how much of the drive has been written, in ns.

    Raises:
        MakeLogError: something is there already, the format cannot hold the drive, or it cannot be written.
    """
    named = path.suffix.removeprefix(".")
    kind = named or "mcap"
    if kind not in FORMATS:
        raise MakeLogError(
            f"{path}: a log is called .{', .'.join(FORMATS)}, or has no suffix as a rosbag2 folder"
        )
    part = path.with_name(f".{path.name}.part") if path.name else path
    try:
        _check(path, drive, kind, force)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            alone = named in _PLUGINS
            written = part / (path.stem if alone else path.name)
            with contextlib.ExitStack() as stack:
                with (
                    held_interrupt()
                ):  # within what a message takes, some libraries swallow every exception
                    put, messages = stack.enter_context(_writer(written, kind)), drive.messages()
                while True:
                    with held_interrupt():
                        if (message := next(messages, None)) is None:
                            break
                        put(message)
                    progress(message.t_ns - START_NS, round(drive.seconds * NS_PER_S))
            if path.exists():
                path.rename(part / "replaced")
            (written / path.name if alone else written).rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except (OSError, sqlite3.Error) as error:
        raise MakeLogError(
            f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error
    return path


def _check(path: Path, drive: DriveLog, kind: str, force: bool) -> None:
    needed = (
        drive.seconds
        * drive.rate_hz
        * drive.cameras
        * 3
        * drive.width
        * drive.height
        * (_JPEG_SHARE if drive.compressed else 1.0)
    )
    late = [fault for fault in drive.faults if fault.start_s >= drive.seconds]
    msg = ""
    if path.name in {"", ".."} or not path.parent.is_dir():
        msg = f"{path}: has to be the name of a log, such as drive.mcap, in a folder that is there"
    elif path.exists() and not force:
        msg = f"{path} exists; --force replaces it"
    elif path.exists() and not path.is_file() and not (path / "metadata.yaml").exists():
        msg = f"{path} is no file, and no folder of a rosbag2; it is not replaced"
    elif late:
        msg = (
            f"fault {late[0].kind}@{late[0].start_s:g} begins after the end of the drive, at"
            f" {drive.seconds:g} s"
        )
    elif kind == "bag" and any(fault.kind == "truncated" for fault in drive.faults):
        msg = "a truncated message cannot be written to a ROS 1 bag; choose mcap or db3"
    elif needed > (free := shutil.disk_usage(path.parent).free):
        msg = (
            f"{path}: needs about {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free; --compressed"
            " needs less"
        )
    if msg:
        raise MakeLogError(msg)


@contextlib.contextmanager
def _writer(path: Path, kind: str) -> Iterator[Callable[[LogMessage], None]]:
    """What writes messages to a ROS 1 bag, or to a rosbag2 folder.

    The bag has no objects: its markers are others.
    """
    log = Writer1(path) if kind == "bag" else Writer2(path, version=_VERSION, storage_plugin=_PLUGINS[kind])
    ros1 = get_typestore(Stores.ROS1_NOETIC) if kind == "bag" else None
    connections = {}

    def put(message: LogMessage) -> None:
        topic, type_name, data, t_ns = message
        if ros1 is not None and topic == OBJECTS_TOPIC:
            return
        store = typestore([type_name])
        if topic not in connections:
            connections[topic] = log.add_connection(topic, type_name, typestore=ros1 or store)
        log.write(connections[topic], t_ns, store.cdr_to_ros1(data, type_name) if ros1 else data)

    with log:
        yield put


def _jpeg_cdr(pixels: Pixels) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    type_name, data = list(IMAGE_TOPICS)[1], np.frombuffer(buffer.getbuffer(), np.uint8)
    message = empty_message(
        type_name, header=header(0, "camera"), format="rgb8; jpeg compressed bgr8", data=data
    )
    return bytes(encode(message, type_name))


def _objects_cdr(scene: RoadScene, at_s: float, stamp_ns: int) -> bytes:
    """A marker for each car.

    A cube in `base_link` (x ahead, y left); `points`: corners of its box in the image, px.
    """
    head, point = header(stamp_ns, "base_link"), message_class("geometry_msgs/msg/Point")
    lifetime = empty_message("builtin_interfaces/msg/Duration", nanosec=200_000_000)
    markers = []
    for number, car in enumerate(road_scene.objects(at_s)):
        left, top, right, bottom = map(float, scene.box_px(car))
        marker = empty_message(
            "visualization_msgs/msg/Marker",
            header=head,
            ns="car",
            id=number,
            type=_CUBE,
            lifetime=lifetime,
            text="car",
        )
        marker.texture.header = head
        marker.points = [point(x=left, y=top, z=0.0), point(x=right, y=bottom, z=0.0)]
        at, size, colour = marker.pose.position, marker.scale, marker.color
        at.x, at.y, at.z = car.ahead_m + _CAR_LENGTH_M / 2, -car.lateral_m, road_scene.CAR_HEIGHT_M / 2
        size.x, size.y, size.z = _CAR_LENGTH_M, road_scene.CAR_WIDTH_M, road_scene.CAR_HEIGHT_M
        colour.r, colour.g, colour.b = (value / 255 for value in car.rgb)
        colour.a = 1.0
        markers.append(marker)
    return bytes(encode(message_class(_OBJECTS_TYPE)(markers=markers), _OBJECTS_TYPE))
