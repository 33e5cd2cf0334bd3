"""What the vehicle's sensors send: odometry, a laser scan, and the truth about what is in sight of it.

And, where they are asked for, a radar's echoes, a camera's images and a lidar's clouds.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.messages import empty_message, header
from torchperf_ros.models.driving_messages import (
    MARKER_ARRAY,
    ODOMETRY,
    SCAN,
    SeenObject,
    encoded,
    objects_message,
    odometry_message,
)
from torchperf_ros.models.driving_rules import Floats
from torchperf_ros.models.point_cloud import CLOUD
from torchperf_ros.models.road_scene import IMAGE_TYPE, RoadScene, SceneObject
from torchperf_ros.world.lidar import Pose, cloud_bytes
from torchperf_ros.world.vehicles import Vehicle
from torchperf_ros.world.world import World

BEAMS: Final = 501
RANGE_M: Final = 160.0
_HALF_VIEW: Final = math.radians(100.0)
_ANGLES: Final = np.linspace(-_HALF_VIEW, _HALF_VIEW, BEAMS)
_STEP: Final = 2 * _HALF_VIEW / (BEAMS - 1)
_SQUARE: Final = np.array([[0.5, 0.5], [-0.5, 0.5], [-0.5, -0.5], [0.5, -0.5]])
_NEXT: Final = [1, 2, 3, 0]
_LEAST_M: Final = 0.3  # of an echo's box
_NEAREST_M: Final = 1.0  # of what a camera sees, and of a stray beam
_NOISE_M: Final = 0.02  # of a range, one sigma
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
