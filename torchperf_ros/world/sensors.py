"""What the vehicle's sensors send: odometry, a laser scan, and the truth about what is in sight of it."""

import math
from typing import Final

import numpy as np

from torchperf_ros.config.message_types import empty_message, header
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
from torchperf_ros.world.world import World

BEAMS: Final = 501
RANGE_M: Final = 160.0
_HALF_VIEW: Final = math.radians(100.0)
_ANGLES: Final = np.linspace(-_HALF_VIEW, _HALF_VIEW, BEAMS)
_SQUARE: Final = np.array([[0.5, 0.5], [-0.5, 0.5], [-0.5, -0.5], [0.5, -0.5]])
_NEXT: Final = [1, 2, 3, 0]


class Sensors:
    """Messages as CDR bytes, each stamped with the moment at which it was measured.

    The scanner turns on the roof, above the vehicle's reference point, which is the origin of `base_link`.
    """

    def __init__(self, world: World) -> None:
        """Look at a world."""
        self._world = world
        step = 2 * _HALF_VIEW / (BEAMS - 1)
        self._scan = empty_message(
            SCAN, angle_min=-_HALF_VIEW, angle_max=_HALF_VIEW, angle_increment=step, range_min=0.1, range_max=RANGE_M
        )

    def messages(self, stamp_ns: int) -> tuple[tuple[str, str, bytes], ...]:
        """Topic, type and bytes of all: the scan, which triggers the stages, comes last."""
        vehicle = self._world.vehicle
        ranges, seen = scan(self._world.boxes, vehicle.x, vehicle.y, vehicle.yaw)
        self._scan.header, self._scan.ranges = header(stamp_ns, "base_link"), ranges.astype(np.float32)
        odometry = odometry_message(vehicle.x, vehicle.y, vehicle.yaw, vehicle.speed, vehicle.yaw_rate, stamp_ns)
        return (
            ("odom", ODOMETRY, encoded(odometry, ODOMETRY)),
            ("objects_in_sight", MARKER_ARRAY, encoded(objects_message(self.objects(seen), stamp_ns), MARKER_ARRAY)),
            ("scan", SCAN, encoded(self._scan, SCAN)),
        )

    def objects(self, seen: set[int]) -> list[SeenObject]:
        """Those of the bodies that are seen and are no walls."""
        bodies, boxes = self._world.bodies, self._world.boxes
        return [
            SeenObject(bodies[index].kind, index, boxes[index].tolist())
            for index in sorted(seen) if bodies[index].kind != "wall"
        ]  # fmt: skip


def scan(boxes: Floats, x: float, y: float, yaw: float) -> tuple[Floats, set[int]]:
    """Ranges [501] of a scanner in a plane, infinite where nothing is near enough, and the boxes that it hits.

    Every beam is cut with every side of every box: with the side's ends p and q and the beam's direction u, the range
    is (p x e) / (u x e), e = q - p, where 0 <= (p x u) / (u x e) <= 1.
    """
    ranges = np.full(BEAMS, np.inf)
    near = np.flatnonzero(np.hypot(boxes[:, 0] - x, boxes[:, 1] - y) < RANGE_M + boxes[:, 5])
    if not len(near):
        return ranges, set()
    found = boxes[near]
    cosine, sine = np.cos(found[:, 2])[:, None], np.sin(found[:, 2])[:, None]
    along, across = found[:, 5:6] * _SQUARE[:, 0], found[:, 6:7] * _SQUARE[:, 1]
    corner_x = found[:, 0:1] + along * cosine - across * sine - x
    corner_y = found[:, 1:2] + along * sine + across * cosine - y
    side_x, side_y = corner_x[:, _NEXT] - corner_x, corner_y[:, _NEXT] - corner_y
    offset = corner_x * side_y - corner_y * side_x
    facing = np.flatnonzero(offset < 0.0)  # corners go round to the left: the far sides are hidden by the near ones
    px, py, ex, ey, offset = (each.ravel()[facing, None] for each in (corner_x, corner_y, side_x, side_y, offset))
    ux, uy = np.cos(_ANGLES + yaw), np.sin(_ANGLES + yaw)
    with np.errstate(divide="ignore", invalid="ignore"):
        across_side = ux * ey - uy * ex
        away = offset / across_side
        share = (px * uy - py * ux) / across_side
        hit = (away > 0.0) & (away <= RANGE_M) & (share >= 0.0) & (share <= 1.0)
    away = np.where(hit, away, np.inf)
    first = np.argmin(away, axis=0)
    ranges = away[first, np.arange(BEAMS)]
    return ranges, set(near[facing[first[np.isfinite(ranges)]] // 4].tolist())
