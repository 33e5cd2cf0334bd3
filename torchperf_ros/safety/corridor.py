"""The emergency lane's corridor: where the vehicle will be until it stands, on the arc that it is on."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperf_ros.safety.odometry import Motion
from torchperf_ros.safety.sensor_points import Floats
from torchperf_ros.settings.safety_options import EmergencyOptions

_STRAIGHT: Final = 1e-6  # 1/m
_SLOW_M_S: Final = 0.5  # below this speed, yaw rate and speed say nothing about the arc
_MOVES_M_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Corridor:
    """Where the vehicle will be until it stands: its arc of now, over reaction and braking distance.

    Attributes:
        curvature: of the arc of the reference point in 1/m, positive to the left.
        length_m: how far the vehicle moves.
        ahead_m: from the reference point to the end of the vehicle that moves ahead.
        half_width_m: of the vehicle, without the margin.
    """

    curvature: float
    length_m: float
    ahead_m: float
    half_width_m: float
    margin_m: float
    backwards: bool

    @classmethod
    def of(cls, options: EmergencyOptions, motion: Motion | None) -> "Corridor":
        """For a motion; without one, the least length straight ahead.

        The length is v t + v^2 / (2 a): the reaction distance, and the braking distance at a constant
        deceleration.
        """
        speed = abs(motion.speed) if motion is not None else 0.0
        backwards = motion is not None and motion.speed < -_MOVES_M_S
        length_m = speed * options.reaction_ms / 1000 + speed**2 / (2 * options.deceleration)
        return cls(
            0.0 if motion is None else curvature_of(motion, options.vehicle.max_curvature),
            max(length_m, options.min_length_m),
            options.vehicle.rear_m if backwards else options.vehicle.length_m - options.vehicle.rear_m,
            options.vehicle.width_m / 2,
            options.margin_m,
            backwards,
        )

    def way_m(self, x: Floats, y: Floats) -> Floats:
        """How far the vehicle moves along its arc until it, or its margin, reaches each of the points.

        Inf: never, as those in it.

        On an arc of radius R, a point at distance r from its centre and angle t around it meets the front,
        which spans R - w/2 to hypot(R + w/2, front), after R (t - asin(front / r)), or the inner side, if
        that is earlier, after R (t - acos((R - w/2) / r)). Beside the vehicle, where only the inner side
        comes closer, there is no
        margin: a wall along which it drives is no obstacle. The tail, which swings out a little, is left
            out.
        """
        x = -x if self.backwards else x
        wide_m, front_m = self.half_width_m + self.margin_m, self.ahead_m
        if abs(self.curvature) < _STRAIGHT:
            return np.where((x > front_m) & (np.abs(y) <= wide_m), x - front_m, np.inf)
        y, radius_m = (y if self.curvature > 0 else -y), 1 / abs(self.curvature)
        distance = np.maximum(np.hypot(x, radius_m - y), 1e-9)
        angle = np.arctan2(x, radius_m - y)
        at_front = np.arcsin(np.minimum(front_m / distance, 1.0))

        def until_m(inner_m: float) -> Floats:
            at_side = np.arccos(np.clip(inner_m / distance, -1.0, 1.0))
            way_m = radius_m * (angle - np.minimum(at_front, at_side))
            return np.where(distance >= inner_m, way_m, np.inf)

        ahead = (x > front_m) & (distance <= math.hypot(radius_m + wide_m, front_m))
        beside = (x > 0) & (x <= front_m) & (y > self.half_width_m)
        way_m = np.where(ahead, until_m(radius_m - wide_m), np.inf)
        return np.where(beside, np.minimum(way_m, until_m(radius_m - self.half_width_m)), way_m)


def curvature_of(motion: Motion, most: float) -> float:
    """Of the arc that the vehicle is on, in 1/m: yaw rate over speed, within what it can turn."""
    speed = math.copysign(max(abs(motion.speed), _SLOW_M_S), motion.speed)
    return min(max(motion.yaw_rate / speed, -most), most)
