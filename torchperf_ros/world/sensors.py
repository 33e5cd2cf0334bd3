"""What the vehicle's sensors send: odometry, a laser scan, and the truth about what is in sight of it.

And, where they are asked for, a radar's echoes, a camera's images, and the clouds of a 3-D lidar on
the roof: one sweep over what is ahead, as the driver of a Velodyne publishes it. A box is a prism
on flat ground. Every azimuth is cut with every box as seen from above, which gives where its rays
come over the box and where they leave it; the height there says for each ring whether it hits the
near side, the top, or nothing.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.messages import empty_message, header
from torchperf_ros.models.closed_loop import (
    MARKER_ARRAY,
    ODOMETRY,
    SCAN,
    Floats,
    SeenObject,
    encoded,
    objects_message,
    odometry_message,
)
from torchperf_ros.models.point_cloud import CLOUD, cloud_message
from torchperf_ros.models.road_scene import IMAGE_TYPE, RoadScene, SceneObject
from torchperf_ros.world.vehicles import Vehicle
from torchperf_ros.world.world import World

# Of the boxes by kind.
HEIGHTS_M: Final = {"car": 1.45, "truck": 3.4, "cyclist": 1.75, "pedestrian": 1.2, "wall": 1.0}
RINGS: Final = 32
AZIMUTHS: Final = 801
LIDAR_RANGE_M: Final = 120.0
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
_LIDAR_ANGLES: Final = np.radians(np.linspace(100.0, -100.0, AZIMUTHS))
_TIMES_S: Final = (_LIDAR_ANGLES[-1] - _LIDAR_ANGLES) * (_TURN_S / (2.0 * math.pi))
_GROUND_M: Final = np.where(_SLOPES < 0.0, -MOUNTED_M / _SLOPES, np.inf)
_LIDAR_LEAST_M: Final = 0.2
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
    enter, leave = _over(boxes, x, y, pose.yaw + turned + _LIDAR_ANGLES)
    ranges = np.repeat(_GROUND_M[None], AZIMUTHS, axis=0)
    hit = np.full((AZIMUTHS, RINGS), -1)
    crossed = (enter < leave) & (enter > _LIDAR_LEAST_M) & (enter < LIDAR_RANGE_M)
    for index in np.flatnonzero(crossed.any(axis=1)):
        columns, tall = np.flatnonzero(crossed[index]), heights_m[index]
        near, far = enter[index, columns, None], leave[index, columns, None]
        begin, end = MOUNTED_M + near * _SLOPES, MOUNTED_M + far * _SLOPES
        on_top = np.where((begin > tall) & (end <= tall), (tall - MOUNTED_M) / _SLOPES, np.inf)
        found = np.where(begin <= tall, near, on_top)  # what would be below the ground has hit it before
        closer = found < ranges[columns]
        ranges[columns] = np.where(closer, found, ranges[columns])
        hit[columns] = np.where(closer, index, hit[columns])
    column, ring = np.nonzero(ranges < LIDAR_RANGE_M)
    hit = hit[column, ring]
    shine = np.append(reflects, _GROUND)[hit]
    away = ranges[column, ring] + random.normal(0.0, _NOISE_M, len(ring)) * _COSINES[ring]
    points = np.empty(len(ring), _POINT)
    points["x"], points["y"] = away * np.cos(_LIDAR_ANGLES)[column], away * np.sin(_LIDAR_ANGLES)[column]
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


BEAMS: Final = 501
RANGE_M: Final = 160.0
_HALF_VIEW: Final = math.radians(100.0)
_ANGLES: Final = np.linspace(-_HALF_VIEW, _HALF_VIEW, BEAMS)
_STEP: Final = 2 * _HALF_VIEW / (BEAMS - 1)
_SQUARE: Final = np.array([[0.5, 0.5], [-0.5, 0.5], [-0.5, -0.5], [0.5, -0.5]])
_NEXT: Final = [1, 2, 3, 0]
_LEAST_M: Final = 0.3  # of an echo's box
_NEAREST_M: Final = 1.0  # of what a camera sees, and of a stray beam
_STRAY: Final = 0.001  # share of the beams that measure something that is not there, such as rain
_CAMERA_PX: Final = (640, 360)
_PAINTS: Final = {"car": (38, 70, 140), "pedestrian": (178, 34, 42), "wall": (150, 150, 146)}


class Sensors:
    """Messages as CDR bytes, each stamped with the moment at which it was measured.

    The scanner turns on the roof, above the vehicle's reference point, which is the origin of `base_link`.
    """

    def __init__(
        self, world: World, *, radar: bool = False, camera: bool = False, lidar: bool = False
    ) -> None:
        self._world, self._radar, self._lidar = world, radar, lidar
        self._scene = RoadScene(*_CAMERA_PX) if camera else None
        self._scanner = Scanner(world.scenario.seed)

    def messages(self, stamp_ns: int) -> tuple[tuple[str, str, bytes], ...]:
        """Topic, type and bytes of all: the scan, which triggers the stages, comes last."""
        vehicle = self._world.vehicle
        scanned, ranges, hit = self._scanner.scan(self._world.boxes, vehicle, stamp_ns)
        odometry = odometry_message(
            vehicle.x, vehicle.y, vehicle.yaw, vehicle.speed, vehicle.yaw_rate, stamp_ns
        )
        arrays = [("objects_in_sight", self.objects(set(hit.tolist()) - {-1}))]
        if self._radar:
            arrays.append(("echoes", self.echoes(ranges, hit)))
        sent = [("odom", ODOMETRY, encoded(odometry, ODOMETRY))]
        sent += [
            (topic, MARKER_ARRAY, encoded(objects_message(seen, stamp_ns), MARKER_ARRAY))
            for topic, seen in arrays
        ]
        if self._scene is not None:
            pixels = self._scene.draw_objects(self._world.progress_m, self._in_view())
            sent.append(("image", IMAGE_TYPE, restamped(self._scene.pixels_cdr(pixels), stamp_ns)))
        if self._lidar:
            pose = Pose(vehicle.x, vehicle.y, vehicle.yaw, vehicle.speed, vehicle.yaw_rate)
            kinds = [body.kind for body in self._world.bodies]
            cloud = cloud_bytes(self._world.boxes, kinds, pose, stamp_ns, self._world.scenario.seed)
            sent.append(("cloud", CLOUD, cloud))
        return *sent, ("scan", SCAN, scanned)

    def before(self, stamps_ns: Iterable[int]) -> Iterator[tuple[int, tuple[tuple[str, str, bytes], ...]]]:
        """Odometry and scans of these moments before the beginning, when all moved as at the beginning."""
        vehicle = self._world.vehicle
        for stamp_ns in stamps_ns:
            since_s = (self._world.start_ns - stamp_ns) / NS_PER_S
            boxes = self._world.boxes
            boxes[:, :2] -= since_s * boxes[:, 3:5]
            then = Vehicle(vehicle.x - since_s * vehicle.speed, speed=vehicle.speed)
            odometry = odometry_message(then.x, then.y, then.yaw, then.speed, 0.0, stamp_ns)
            scanned, *_ = self._scanner.scan(boxes, then, stamp_ns)
            yield stamp_ns, (("odom", ODOMETRY, encoded(odometry, ODOMETRY)), ("scan", SCAN, scanned))

    def objects(self, seen: set[int]) -> list[SeenObject]:
        bodies, boxes = self._world.bodies, self._world.boxes
        return [
            SeenObject(bodies[index].kind, index, boxes[index].tolist())
            for index in sorted(seen)
            if bodies[index].kind != "wall"
        ]

    def echoes(self, ranges: Floats, hit: NDArray[np.int64]) -> list[SeenObject]:
        """What a radar makes of what the beams hit.

        Boxes around the hits, with the radial part of their velocities.

        It neither knows what it sees nor how large that is; Doppler says nothing of a velocity across the
        beam.
        """
        vehicle, boxes, found = self._world.vehicle, self._world.boxes, []
        cosine, sine = math.cos(vehicle.yaw), math.sin(vehicle.yaw)
        for index in sorted(set(hit.tolist()) - {-1}):
            beams = np.flatnonzero(hit == index)
            ahead, left = ranges[beams] * np.cos(_ANGLES[beams]), ranges[beams] * np.sin(_ANGLES[beams])
            x, y = 0.5 * (ahead.min() + ahead.max()), 0.5 * (left.min() + left.max())
            towards = vehicle.yaw + _ANGLES[beams[np.argmin(ranges[beams])]]
            ux, uy = math.cos(towards), math.sin(towards)
            radial = boxes[index, 3] * ux + boxes[index, 4] * uy
            size = max(_LEAST_M, float(np.ptp(ahead))), float(np.ptp(left) + ranges[beams].min() * _STEP)
            place = vehicle.x + x * cosine - y * sine, vehicle.y + x * sine + y * cosine
            found.append(SeenObject("echo", index, (*place, vehicle.yaw, radial * ux, radial * uy, *size)))
        return found

    def _in_view(self) -> list[SceneObject]:
        """Everybody before the camera, the farthest first.

        Cars are drawn from behind, and the road as if straight.
        """
        vehicle, seen = self._world.vehicle, []
        cosine, sine = math.cos(vehicle.yaw), math.sin(vehicle.yaw)
        for body, (x, y, *_, length, _) in zip(self._world.bodies, self._world.boxes.tolist(), strict=True):
            ahead = (x - vehicle.x) * cosine + (y - vehicle.y) * sine - 0.5 * length
            right = (x - vehicle.x) * sine - (y - vehicle.y) * cosine
            if ahead > _NEAREST_M:
                seen.append(SceneObject(ahead, right, _PAINTS[body.kind], body.kind))
        return sorted(seen, key=lambda one: -one.ahead_m)


class Scanner:
    """Scans as CDR bytes of a `sensor_msgs/msg/LaserScan`, as noisy as a scanner's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._message = empty_message(
            SCAN,
            angle_min=-_HALF_VIEW,
            angle_max=_HALF_VIEW,
            angle_increment=_STEP,
            range_min=0.1,
            range_max=RANGE_M,
        )

    def scan(
        self, boxes: Floats, vehicle: Vehicle, stamp_ns: int
    ) -> tuple[bytes, Floats, NDArray[np.int64]]:
        """The message, and what `scan` says, which is without noise."""
        ranges, hit = scan(boxes, vehicle.x, vehicle.y, vehicle.yaw)
        random = np.random.default_rng((self._seed, stamp_ns))
        measured = ranges + _NOISE_M * random.standard_normal(BEAMS)
        stray = random.integers(BEAMS, size=random.binomial(BEAMS, _STRAY))
        measured[stray] = random.uniform(_NEAREST_M, RANGE_M, len(stray))
        self._message.header, self._message.ranges = (
            header(stamp_ns, "base_link"),
            measured.astype(np.float32),
        )
        return encoded(self._message, SCAN), ranges, hit


def scan(boxes: Floats, x: float, y: float, yaw: float) -> tuple[Floats, NDArray[np.int64]]:
    """Ranges [501] of a scanner in a plane, infinite where nothing is near, and the box of each beam, or -1.

    Every beam is cut with every side of every box: with the side's ends p and q and the beam's direction u,
    the range is (p x e) / (u x e), e = q - p, where 0 <= (p x u) / (u x e) <= 1.
    """
    ranges, none = np.full(BEAMS, np.inf), np.full(BEAMS, -1)
    near = np.flatnonzero(np.hypot(boxes[:, 0] - x, boxes[:, 1] - y) < RANGE_M + boxes[:, 5])
    if not len(near):
        return ranges, none
    found = boxes[near]
    cosine, sine = np.cos(found[:, 2])[:, None], np.sin(found[:, 2])[:, None]
    along, across = found[:, 5:6] * _SQUARE[:, 0], found[:, 6:7] * _SQUARE[:, 1]
    corner_x = found[:, 0:1] + along * cosine - across * sine - x
    corner_y = found[:, 1:2] + along * sine + across * cosine - y
    side_x, side_y = corner_x[:, _NEXT] - corner_x, corner_y[:, _NEXT] - corner_y
    offset = corner_x * side_y - corner_y * side_x
    facing = np.flatnonzero(
        offset < 0.0
    )  # corners go round to the left: the far sides are hidden by the near ones
    if not len(facing):  # the scanner is within the only box that is near
        return ranges, none
    px, py, ex, ey, offset = (
        each.ravel()[facing, None] for each in (corner_x, corner_y, side_x, side_y, offset)
    )
    ux, uy = np.cos(_ANGLES + yaw), np.sin(_ANGLES + yaw)
    with np.errstate(divide="ignore", invalid="ignore"):
        across_side = ux * ey - uy * ex
        away = offset / across_side
        share = (px * uy - py * ux) / across_side
        hit = (away > 0.0) & (away <= RANGE_M) & (share >= 0.0) & (share <= 1.0)
    away = np.where(hit, away, np.inf)
    first = np.argmin(away, axis=0)
    ranges = away[first, np.arange(BEAMS)]
    return ranges, np.where(np.isfinite(ranges), near[facing[first] // 4], none)
