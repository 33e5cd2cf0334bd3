"""A road to look at.

Lanes, cars and pedestrians as a camera sees them; and a drive along it, with odometry.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from torchperf_ros.api.messages import empty_message, encode, header

Pixels = npt.NDArray[np.uint8]

IMAGE_TYPE: Final = "sensor_msgs/msg/Image"
ODOMETRY_TYPE: Final = "nav_msgs/msg/Odometry"
WIDTH: Final = 1280
HEIGHT: Final = 720
SPEED_MPS: Final = 15.0
CAR_WIDTH_M: Final = 1.9
CAR_HEIGHT_M: Final = 1.45
_HORIZON: Final = 300
_FOCAL_PX: Final = 1000.0
CAMERA_HEIGHT_M: Final = 1.4
HORIZONTAL_FOV_DEG: Final = 2.0 * math.degrees(math.atan(WIDTH / 2.0 / _FOCAL_PX))
# Its row, as a share of the image's height.
HORIZON: Final = _HORIZON / HEIGHT
_LANE_M: Final = 3.5
_LINE_M: Final = 0.15
_DASH_M: Final = 4.0
_DASH_PERIOD_M: Final = 12.0
_PHASES: Final = 24  # prerendered backgrounds, half a metre apart
_FARTHEST_M: Final = 120.0
_NEAREST_M: Final = 5.0
# lane right of ours in m, speed relative to ours in m/s, where in its round it starts in m, paint
_CARS: Final = (
    (-_LANE_M, 9.0, 20.0, (178, 34, 42)),
    (-_LANE_M, 9.0, 75.0, (232, 232, 228)),
    (_LANE_M, -6.0, 30.0, (38, 70, 140)),
    (_LANE_M, -6.0, 85.0, (214, 162, 24)),
)
_LEAD_RGB: Final = (60, 64, 70)
_SKIN: Final = (224, 182, 150)
_BODY: Final = (-CAR_WIDTH_M / 2, CAR_WIDTH_M / 2, 0.0, CAR_HEIGHT_M)


class SceneObject(NamedTuple):
    """A car, or a pedestrian.

    The distance ahead, how far right of our lane's centre it is, and its paint.
    """

    ahead_m: float
    lateral_m: float
    rgb: tuple[int, int, int]
    kind: str = "car"


class RoadScene:
    """Images of the scene, which is made for 1280x720 and scaled.

    Cheap to draw, the backgrounds are drawn once.
    """

    def __init__(self, width: int = WIDTH, height: int = HEIGHT) -> None:
        """Draw the backgrounds of images of so many pixels."""
        self._scale_x, self._scale_y = width / WIDTH, height / HEIGHT
        self._backgrounds = _backgrounds(width, height)
        image = empty_message(
            IMAGE_TYPE,
            header=header(0, "camera"),
            height=height,
            width=width,
            encoding="rgb8",
            step=width * 3,
        )
        # The length of the data is the last field before them: the prefix of every image, followed by its
        # pixels.
        self._prefix = bytes(encode(image, IMAGE_TYPE))[:-4] + self._backgrounds[0].size.to_bytes(
            4, "little"
        )

    def draw(self, at_s: float) -> Pixels:
        """The scene at a time, [height, width, 3]."""
        return self.draw_objects(at_s * SPEED_MPS, objects(at_s))

    def draw_objects(self, travelled_m: float, seen: Iterable[SceneObject]) -> Pixels:
        """The road after so many metres, with these objects, the farthest first; [height, width, 3]."""
        phase = int(travelled_m / _DASH_PERIOD_M * _PHASES) % _PHASES
        image = self._backgrounds[phase].copy()
        for one in seen:
            self._draw(image, one)
        return image

    def pixels_cdr(self, pixels: Pixels) -> bytes:
        """An image of the scene's size, [height, width, 3], as CDR of an `Image` message with stamp 0."""
        return b"".join([self._prefix, pixels.data])

    def box_px(
        self, car: SceneObject, sides_m: tuple[float, float, float, float] = _BODY
    ) -> tuple[int, int, int, int]:
        """Left, top, right, bottom in the image, uncut, of a box at the rear of a car, its body.

        `sides_m` are left, right, low and high of the box, from the middle of the lane and the road.
        """
        left, right, low, high = sides_m
        x0, y0 = point_px(car.ahead_m, car.lateral_m + left, high)
        x1, y1 = point_px(car.ahead_m, car.lateral_m + right, low)
        scale_x, scale_y = self._scale_x, self._scale_y
        return round(x0 * scale_x), round(y0 * scale_y), round(x1 * scale_x), round(y1 * scale_y)

    def _draw(self, image: Pixels, one: SceneObject) -> None:
        paint = np.array(one.rgb)
        for sides_m, colour in _PARTS[one.kind]:
            left, top, right, bottom = self.box_px(one, sides_m)
            image[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = (
                paint * colour if isinstance(colour, float) else colour
            )


@functools.lru_cache(maxsize=2)  # training has scenes of two sizes, and one of each for each of its seeds
def _backgrounds(width: int, height: int) -> list[Pixels]:
    scale_x, scale_y = width / WIDTH, height / HEIGHT
    horizon = round(_HORIZON * scale_y)
    sky = np.empty((horizon, width, 3), np.uint8)
    rows = np.linspace(0, 1, horizon)[:, None, None]
    sky[:] = (1 - rows) * (96, 148, 205) + rows * (206, 222, 234)
    columns = np.arange(width) / scale_x
    for (scale, tall), shade in zip(
        ((97.0, 34), (41.0, 18)), ((112, 136, 150), (74, 104, 92)), strict=True
    ):
        peaks = tall * (1.2 + np.sin(columns / scale) + 0.4 * np.sin(columns / (scale / 2.7))) / 2
        sky[np.arange(horizon)[:, None] >= horizon - peaks * scale_y] = shade
    below = (np.arange(horizon + 1, height + 1)[:, None] - horizon) / scale_y
    ahead_m = _FOCAL_PX * CAMERA_HEIGHT_M / below
    lateral_m = np.abs((columns[None, :] - WIDTH / 2) * ahead_m / _FOCAL_PX)
    haze = np.clip(ahead_m / 260.0, 0, 0.6)[..., None]
    light, dark, asphalt, paint = (
        (np.array(rgb) * (1 - haze) + np.array((196, 208, 214)) * haze).astype(np.uint8)
        for rgb in ((78, 118, 60), (70, 108, 54), (86, 87, 90), (236, 236, 230))
    )
    road = (lateral_m < _LANE_M * 1.5 + 0.9)[..., None]
    solid = np.abs(lateral_m - _LANE_M * 1.5) < _LINE_M
    dashed = np.abs(lateral_m - _LANE_M / 2) < _LINE_M
    found = []
    for phase in range(_PHASES):
        along = (ahead_m + phase * _DASH_PERIOD_M / _PHASES) % _DASH_PERIOD_M
        ground = np.where(road, asphalt, np.where((along < _DASH_PERIOD_M / 2)[..., None], light, dark))
        ground = np.where((solid | (dashed & (along < _DASH_M)))[..., None], paint, ground)
        found.append(np.concatenate([sky, ground]))
    return found


def point_px(ahead_m: float, right_m: float, high_m: float) -> tuple[float, float]:
    """Column and row, in an image of 1280x720, of a point above the road."""
    px_per_m = _FOCAL_PX / ahead_m
    return WIDTH / 2 + right_m * px_per_m, _HORIZON + (CAMERA_HEIGHT_M - high_m) * px_per_m


# Left, right, low and high side in m of all that is drawn of an object, as of `box_px`.
EXTENTS: Final = {
    "car": (-0.95, 0.95, -0.08, 1.45),
    "truck": (-1.25, 1.25, -0.05, 3.4),
    "cyclist": (-0.3, 0.3, 0.0, 1.75),
    "pedestrian": (-0.25, 0.25, 0.0, 1.2),
    "wall": (-0.25, 0.25, 0.0, 1.0),
}


_DARK, _RED = (26, 27, 29), (226, 38, 32)
# Sides in m, as of `box_px`, and colour of what an object is drawn of: a number is a share of its own paint.
_PARTS: Final[dict[str, tuple[tuple[tuple[float, float, float, float], Any], ...]]] = {
    "pedestrian": (
        ((-0.2, 0.2, 0.0, 0.55), 0.4),
        ((-0.25, 0.25, 0.5, 1.0), 1.0),
        ((-0.1, 0.1, 1.0, 1.2), _SKIN),
    ),
    "truck": (
        ((-1.1, -0.75, -0.05, 0.9), _DARK),
        ((0.75, 1.1, -0.05, 0.9), _DARK),
        ((-1.25, 1.25, 0.7, 3.4), 1.0),
        ((-0.03, 0.03, 0.8, 3.3), 0.6),
        ((-1.2, -0.9, 0.72, 0.9), _RED),
        ((0.9, 1.2, 0.72, 0.9), _RED),
    ),
    "cyclist": (
        ((-0.05, 0.05, 0.0, 0.7), _DARK),
        ((-0.3, 0.3, 0.95, 1.02), _DARK),
        ((-0.14, 0.14, 0.4, 0.95), 0.4),
        ((-0.22, 0.22, 0.85, 1.5), 1.0),
        ((-0.1, 0.1, 1.5, 1.75), _SKIN),
    ),
    "wall": (((-0.25, 0.25, 0.0, 1.0), 1.0),),
    "car": (
        ((-0.95, 0.95, -0.08, 0.35), _DARK),
        ((-0.72, 0.72, 0.85, 1.45), 0.8),
        ((-0.62, 0.62, 0.92, 1.36), (48, 62, 74)),
        ((-0.9, 0.9, 0.25, 0.92), 1.0),
        ((-0.86, -0.56, 0.62, 0.8), _RED),
        ((0.56, 0.86, 0.62, 0.8), _RED),
        ((-0.26, 0.26, 0.42, 0.56), (240, 238, 224)),
    ),
}


def objects(at_s: float) -> list[SceneObject]:
    """The cars at a time, the farthest first.

    They drive towards or away from us again and again, one leads us.
    """
    cars = [
        SceneObject(
            _NEAREST_M + (offset_m + relative_mps * at_s) % (_FARTHEST_M - _NEAREST_M), lateral_m, rgb
        )
        for lateral_m, relative_mps, offset_m, rgb in _CARS
    ]
    lead_m = 17.0 + 7.0 * math.sin(at_s / 2)
    return sorted([*cars, SceneObject(_NEAREST_M + lead_m, 0.0, _LEAD_RGB)], key=lambda car: -car.ahead_m)


def odometry_cdr(at_s: float) -> bytes:
    """Straight ahead at 15 m/s: the CDR bytes of a `nav_msgs/msg/Odometry`, its stamp 0."""
    odometry = empty_message(ODOMETRY_TYPE, header=header(0, "odom"), child_frame_id="base_link")
    odometry.pose.pose.position.x = SPEED_MPS * at_s
    odometry.twist.twist.linear.x = SPEED_MPS
    return bytes(encode(odometry, ODOMETRY_TYPE))
