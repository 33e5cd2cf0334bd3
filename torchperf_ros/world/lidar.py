"""A 3-D lidar on the vehicle's roof.

One sweep over what is ahead, as the driver of a Velodyne publishes it.

A box is a prism on flat ground. Every azimuth is cut with every box as seen from above, which gives where
its rays come over the box and where they leave it; the height there says for each ring whether it hits the
near side, the top, or nothing.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.models.driving_messages import encoded
from torchperf_ros.models.driving_rules import Floats
from torchperf_ros.models.point_cloud import CLOUD, cloud_message

# Of the boxes by kind.
HEIGHTS_M: Final = {"car": 1.45, "truck": 3.4, "cyclist": 1.75, "pedestrian": 1.2, "wall": 1.0}
RINGS: Final = 32
AZIMUTHS: Final = 801
RANGE_M: Final = 120.0
# Above the vehicle's reference point, which is the origin of the cloud.
MOUNTED_M: Final = 1.9

_REFLECTS: Final = {
    "car": 0.5,
    "truck": 0.6,
    "cyclist": 0.35,
    "pedestrian": 0.25,
    "wall": 0.4,
}  # share of the light
_GROUND: Final = 0.12
_NOISE_M: Final = 0.02  # of a Velodyne's range, one sigma
_TURN_S: Final = 0.05  # a whole turn; it goes clockwise, and passes the last azimuth at the stamp
_SLOPES: Final = np.tan(np.radians(np.linspace(-16.0, 6.0, RINGS)))
_COSINES: Final = 1.0 / np.hypot(1.0, _SLOPES)
_ANGLES: Final = np.radians(np.linspace(100.0, -100.0, AZIMUTHS))
_TIMES_S: Final = (_ANGLES[-1] - _ANGLES) * (_TURN_S / (2.0 * math.pi))
_GROUND_M: Final = np.where(_SLOPES < 0.0, -MOUNTED_M / _SLOPES, np.inf)
_LEAST_M: Final = 0.2
_POINT: Final = np.dtype(
    {
        "names": ["x", "y", "z", "intensity", "ring", "time"],
        "formats": ["<f4", "<f4", "<f4", "<f4", "<u2", "<f4"],
        "offsets": [0, 4, 8, 12, 16, 18],
        "itemsize": 22,
    }
)


class Pose(NamedTuple):
    """Where the vehicle's reference point is at the stamp, and how it moves: m, rad and m/s."""

    x: float
    y: float
    yaw: float
    speed: float
    yaw_rate: float


class Sweep(NamedTuple):
    """What came back.

    Attributes:
        points: [n] of x, y, z in m in the vehicle's axes when it was measured, x ahead and z above the
            ground; intensity, 0 to 255; ring, from below; time in s from the stamp, 0 or less.
        hit: [n], which box that was, or -1 for the ground.
    """

    points: NDArray[np.void]
    hit: NDArray[np.int64]


def sweep(
    boxes: Floats, heights_m: Floats, reflects: Floats, pose: Pose, random: np.random.Generator
) -> Sweep:
    """One turn over the front 200 degrees, which ends at the stamp.

    Vehicle and boxes move meanwhile, at constant velocity and yaw rate.

    Args:
        boxes: x, y, yaw, vx, vy, length, width at the stamp, [n, 7].
        heights_m: of the boxes, [n].
        reflects: share of the light that each of them sends back, [n].
        pose: of the vehicle at the stamp.
        random: for the noise.
    """
    turned = pose.yaw_rate * _TIMES_S
    chord = pose.speed * _TIMES_S * np.sinc(turned / (2.0 * math.pi))
    x, y = (
        pose.x + chord * np.cos(pose.yaw + turned / 2.0),
        pose.y + chord * np.sin(pose.yaw + turned / 2.0),
    )
    enter, leave = _over(boxes, x, y, pose.yaw + turned + _ANGLES)
    ranges = np.repeat(_GROUND_M[None], AZIMUTHS, axis=0)
    hit = np.full((AZIMUTHS, RINGS), -1)
    crossed = (enter < leave) & (enter > _LEAST_M) & (enter < RANGE_M)
    for index in np.flatnonzero(crossed.any(axis=1)):
        columns, tall = np.flatnonzero(crossed[index]), heights_m[index]
        near, far = enter[index, columns, None], leave[index, columns, None]
        begin, end = MOUNTED_M + near * _SLOPES, MOUNTED_M + far * _SLOPES
        on_top = np.where((begin > tall) & (end <= tall), (tall - MOUNTED_M) / _SLOPES, np.inf)
        found = np.where(begin <= tall, near, on_top)  # what would be below the ground has hit it before
        closer = found < ranges[columns]
        ranges[columns] = np.where(closer, found, ranges[columns])
        hit[columns] = np.where(closer, index, hit[columns])
    column, ring = np.nonzero(ranges < RANGE_M)
    hit = hit[column, ring]
    shine = np.append(reflects, _GROUND)[hit]
    away = ranges[column, ring] + random.normal(0.0, _NOISE_M, len(ring)) * _COSINES[ring]
    points = np.empty(len(ring), _POINT)
    points["x"], points["y"] = away * np.cos(_ANGLES)[column], away * np.sin(_ANGLES)[column]
    points["z"] = MOUNTED_M + away * _SLOPES[ring]
    points["intensity"] = np.clip(255.0 * shine * random.uniform(0.8, 1.2, len(ring)), 0.0, 255.0)
    points["ring"], points["time"] = ring, _TIMES_S[column]
    return Sweep(points, hit)


def _over(boxes: Floats, x: Floats, y: Floats, angles: Floats) -> tuple[Floats, Floats]:
    """Where the azimuths' rays come over each box and leave it, in m along the ground, [boxes, azimuths].

    A ray that misses leaves before it comes. The slabs of Kay and Kajiya, "Ray Tracing Complex Scenes"
    (1986).
    """
    at_x, at_y, yaw, vx, vy, length, width = boxes.T[:, :, None]
    cosine, sine = np.cos(yaw), np.sin(yaw)
    dx, dy = x - (at_x + vx * _TIMES_S), y - (at_y + vy * _TIMES_S)
    ux, uy = np.cos(angles), np.sin(angles)
    enter, leave = np.full(dx.shape, -np.inf), np.full(dx.shape, np.inf)
    for origin, towards, half in (
        (dx * cosine + dy * sine, ux * cosine + uy * sine, 0.5 * length),
        (dy * cosine - dx * sine, uy * cosine - ux * sine, 0.5 * width),
    ):
        with np.errstate(divide="ignore", invalid="ignore"):
            one, other = (-half - origin) / towards, (half - origin) / towards
        enter = np.maximum(enter, np.minimum(one, other))
        leave = np.minimum(leave, np.maximum(one, other))
    return enter, leave


def cloud_bytes(boxes: Floats, kinds: list[str], pose: Pose, stamp_ns: int, seed: int) -> bytes:
    """A sweep over boxes of these kinds as CDR bytes; the noise follows from seed and stamp."""
    heights_m, reflects = (np.array([table[kind] for kind in kinds]) for table in (HEIGHTS_M, _REFLECTS))
    found = sweep(boxes, heights_m, reflects, pose, np.random.default_rng((seed, stamp_ns)))
    return encoded(cloud_message(found.points, stamp_ns, "base_link"), CLOUD)
