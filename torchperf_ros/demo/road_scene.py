"""A road to look at where there is no log: a moving scene of lanes and cars, and the odometry that goes with it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperf_ros.core.message_types import encode, message_class
from torchperf_ros.replay.logs.log_reader import LogMessage

Pixels = npt.NDArray[np.uint8]

IMAGE_TOPIC: Final = "/camera/image_raw"
IMAGE_TYPE: Final = "sensor_msgs/msg/Image"
ODOMETRY_TOPIC: Final = "/odom"
ODOMETRY_TYPE: Final = "nav_msgs/msg/Odometry"
ODOMETRY_HZ: Final = 30.0
WIDTH: Final = 1280
HEIGHT: Final = 720
SPEED_MPS: Final = 15.0
_HORIZON: Final = 300
_FOCAL_PX: Final = 1000.0
_CAMERA_HEIGHT_M: Final = 1.4
_LANE_M: Final = 3.5
_LINE_M: Final = 0.15
_DASH_M: Final = 4.0
_DASH_PERIOD_M: Final = 12.0
_PHASES: Final = 24  # prerendered backgrounds, half a metre apart
_FARTHEST_M: Final = 120.0
_NEAREST_M: Final = 5.0
CAR_WIDTH_M: Final = 1.9
CAR_HEIGHT_M: Final = 1.45
_BODY: Final = (-CAR_WIDTH_M / 2, CAR_WIDTH_M / 2, 0.0, CAR_HEIGHT_M)


@dataclass(frozen=True)
class SceneObject:
    """A car as it is seen: where it is, and its box in the image.

    Attributes:
        ahead_m: distance from the camera along the road.
        lateral_m: right of our lane's centre.
        rgb: its paint.
        box_px: left, top, right and bottom of its body in the image, not cut at the image's borders.
    """

    ahead_m: float
    lateral_m: float
    rgb: tuple[int, int, int]
    box_px: tuple[int, int, int, int]


@dataclass(frozen=True)
class _Canvas:
    """Width and height of the image; the scene is made for 1280x720 and scaled to it."""

    width: int
    height: int

    @property
    def scale_x(self) -> float:
        return self.width / WIDTH

    @property
    def scale_y(self) -> float:
        return self.height / HEIGHT

    @property
    def horizon(self) -> int:
        return round(_HORIZON * self.scale_y)

    def box(self, car: "_Car", ahead_m: float, sides: tuple[float, float, float, float]) -> tuple[int, int, int, int]:
        """Left, right, low and high of a box at the rear of a car, in metres, as left, top, right, bottom in pixels."""
        px_per_m = _FOCAL_PX / ahead_m
        left, right, low, high = sides
        x = [round((WIDTH / 2 + (car.lateral_m + side) * px_per_m) * self.scale_x) for side in (left, right)]
        y = [round((_HORIZON + (_CAMERA_HEIGHT_M - tall) * px_per_m) * self.scale_y) for tall in (high, low)]
        return x[0], y[0], x[1], y[1]


@dataclass(frozen=True)
class _Car:
    """A car that drives towards or away from us in its lane, again and again.

    Attributes:
        lateral_m: centre of its lane, right of ours.
        relative_mps: its speed relative to ours; negative ones are overtaken.
        offset_m: where in its round it starts.
        rgb: its paint.
    """

    lateral_m: float
    relative_mps: float
    offset_m: float
    rgb: tuple[int, int, int]

    def distance_m(self, at_s: float) -> float:
        return _NEAREST_M + (self.offset_m + self.relative_mps * at_s) % (_FARTHEST_M - _NEAREST_M)


_CARS: Final = (
    _Car(-_LANE_M, 9.0, 20.0, (178, 34, 42)),
    _Car(-_LANE_M, 9.0, 75.0, (232, 232, 228)),
    _Car(_LANE_M, -6.0, 30.0, (38, 70, 140)),
    _Car(_LANE_M, -6.0, 85.0, (214, 162, 24)),
)


class RoadScene:
    """Images, rgb8, and odometry, as if recorded; cheap to make, the backgrounds are drawn once."""

    def __init__(self, rate_hz: float, width: int = WIDTH, height: int = HEIGHT) -> None:
        """Draw the backgrounds.

        Args:
            rate_hz: images per second.
            width: of the images, in pixels.
            height: likewise.
        """
        self._rate_hz = rate_hz
        self._canvas = canvas = _Canvas(width, height)
        self._backgrounds = [_background(phase * _DASH_PERIOD_M / _PHASES, canvas) for phase in range(_PHASES)]
        empty = self._image_message(np.empty(0, np.uint8))
        pixels = self._backgrounds[0].size
        # The length of the data is the last field before them: the prefix of every image, followed by its pixels.
        self._prefix = bytes(empty)[:-4] + pixels.to_bytes(4, "little")

    def messages(self) -> Iterator[LogMessage]:
        """Images and odometry in order of time, from 0 ns on, without end."""
        images = odometries = 0
        while True:
            image_s, odometry_s = images / self._rate_hz, odometries / ODOMETRY_HZ
            if image_s < odometry_s:
                yield LogMessage(IMAGE_TOPIC, IMAGE_TYPE, self.image_cdr(image_s), round(image_s * 1e9))
                images += 1
            else:
                yield LogMessage(ODOMETRY_TOPIC, ODOMETRY_TYPE, odometry_cdr(odometry_s), round(odometry_s * 1e9))
                odometries += 1

    def draw(self, at_s: float) -> Pixels:
        """The scene at a time, [height, width, 3]."""
        phase = int(at_s * SPEED_MPS / _DASH_PERIOD_M * _PHASES) % _PHASES
        image = self._backgrounds[phase].copy()
        for car in _cars(at_s):
            _draw_car(image, self._canvas, car, car.distance_m(at_s))
        return image

    def objects(self, at_s: float) -> list[SceneObject]:
        """The cars at a time, the farthest first."""
        return [
            SceneObject(ahead_m, car.lateral_m, car.rgb, self._canvas.box(car, ahead_m, _BODY))
            for car, ahead_m in ((car, car.distance_m(at_s)) for car in _cars(at_s))
        ]

    def image_cdr(self, at_s: float) -> bytes:
        """The scene at a time as the CDR bytes of a `sensor_msgs/msg/Image`, its stamp 0."""
        return self.pixels_cdr(self.draw(at_s))

    def pixels_cdr(self, pixels: Pixels) -> bytes:
        """An image of the scene's size, [height, width, 3], as CDR bytes of a `sensor_msgs/msg/Image`, its stamp 0."""
        return b"".join([self._prefix, pixels.data])

    def _image_message(self, data: Pixels) -> memoryview:
        image = message_class(IMAGE_TYPE)(
            header=_header("camera"),
            height=self._canvas.height,
            width=self._canvas.width,
            encoding="rgb8",
            is_bigendian=0,
            step=self._canvas.width * 3,
            data=data,
        )
        return encode(image, IMAGE_TYPE)


def odometry_cdr(at_s: float) -> bytes:
    """Straight ahead at 15 m/s: the CDR bytes of a `nav_msgs/msg/Odometry`, its stamp 0."""
    vector, point, quaternion = (message_class(f"geometry_msgs/msg/{n}") for n in ("Vector3", "Point", "Quaternion"))
    pose = message_class("geometry_msgs/msg/Pose")(
        position=point(x=SPEED_MPS * at_s, y=0.0, z=0.0), orientation=quaternion(x=0.0, y=0.0, z=0.0, w=1.0)
    )
    twist = message_class("geometry_msgs/msg/Twist")(
        linear=vector(x=SPEED_MPS, y=0.0, z=0.0), angular=vector(x=0.0, y=0.0, z=0.0)
    )
    odometry = message_class(ODOMETRY_TYPE)(
        header=_header("odom"),
        child_frame_id="base_link",
        pose=message_class("geometry_msgs/msg/PoseWithCovariance")(pose=pose, covariance=np.zeros(36)),
        twist=message_class("geometry_msgs/msg/TwistWithCovariance")(twist=twist, covariance=np.zeros(36)),
    )
    return bytes(encode(odometry, ODOMETRY_TYPE))


def _header(frame_id: str) -> object:
    stamp = message_class("builtin_interfaces/msg/Time")(sec=0, nanosec=0)
    return message_class("std_msgs/msg/Header")(stamp=stamp, frame_id=frame_id)


def _cars(at_s: float) -> list[_Car]:
    """The cars, the farthest first."""
    lead = _Car(0.0, 0.0, 17.0 + 7.0 * math.sin(at_s / 2), (60, 64, 70))
    return sorted((*_CARS, lead), key=lambda car: -car.distance_m(at_s))


def _background(travelled_m: float, canvas: _Canvas) -> Pixels:
    """Sky, grass, road and markings, after so many metres; repeats every 12 m."""
    horizon = canvas.horizon
    image = np.empty((canvas.height, canvas.width, 3), np.uint8)
    rows = np.linspace(0, 1, horizon)[:, None, None]
    image[:horizon] = (1 - rows) * (96, 148, 205) + rows * (206, 222, 234)
    columns = np.arange(canvas.width) / canvas.scale_x
    for (scale, tall), shade in zip(((97.0, 34), (41.0, 18)), ((112, 136, 150), (74, 104, 92)), strict=True):
        peaks = tall * (1.2 + np.sin(columns / scale) + 0.4 * np.sin(columns / (scale / 2.7))) / 2
        image[:horizon][np.arange(horizon)[:, None] >= horizon - peaks * canvas.scale_y] = shade
    below = (np.arange(horizon + 1, canvas.height + 1)[:, None] - horizon) / canvas.scale_y
    ahead_m = _FOCAL_PX * _CAMERA_HEIGHT_M / below
    lateral_m = (columns[None, :] - WIDTH / 2) * ahead_m / _FOCAL_PX
    along = (ahead_m + travelled_m) % _DASH_PERIOD_M
    haze = np.clip(ahead_m / 260.0, 0, 0.6)[..., None]
    stripe = (along < _DASH_PERIOD_M / 2)[..., None]
    ground = np.where(stripe, (78, 118, 60), (70, 108, 54)) + np.zeros((1, canvas.width, 1))
    ground[np.abs(lateral_m) < _LANE_M * 1.5 + 0.9] = (86, 87, 90)
    solid = np.abs(np.abs(lateral_m) - _LANE_M * 1.5) < _LINE_M
    dashed = (np.abs(np.abs(lateral_m) - _LANE_M / 2) < _LINE_M) & (along < _DASH_M)
    ground[solid | dashed] = (236, 236, 230)
    image[horizon:] = ground * (1 - haze) + np.array((196, 208, 214)) * haze
    return image


def _draw_car(image: Pixels, canvas: _Canvas, car: _Car, ahead_m: float) -> None:
    """Seen from behind, in boxes: shadow, body, cabin, rear window, lights and plate."""
    paint = np.array(car.rgb)

    def box(left_m: float, right_m: float, low_m: float, high_m: float, rgb: npt.ArrayLike) -> None:
        left, top, right, bottom = canvas.box(car, ahead_m, (left_m, right_m, low_m, high_m))
        image[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = np.asarray(rgb)

    box(-0.95, 0.95, -0.08, 0.35, (26, 27, 29))
    box(-0.72, 0.72, 0.85, 1.45, paint * 0.8)
    box(-0.62, 0.62, 0.92, 1.36, (48, 62, 74))
    box(-0.9, 0.9, 0.25, 0.92, paint)
    box(-0.86, -0.56, 0.62, 0.8, (226, 38, 32))
    box(0.56, 0.86, 0.62, 0.8, (226, 38, 32))
    box(-0.26, 0.26, 0.42, 0.56, (240, 238, 224))
