"""Where the vehicle is and how it moves, read from the CDR bytes of a `nav_msgs/Odometry`."""

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchperf_ros.api.cdr import aligned, byte_order, header_at, text_at
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput, one_line

# A stamp that is zero or further off than this is of another clock; the time of receipt counts
# instead.
USABLE_AGE_S = 10.0

# A coordinate in m beyond is not a place on Earth.
MOST_M = 1e8
# The length of a quaternion that was written on purpose; unset memory or a pointer has another.
LEAST_TURN, MOST_TURN = 0.1, 10.0

_MAX_SPEED, _MAX_YAW_RATE = 100.0, 10.0  # m/s, rad/s; more is a broken odometry, not a road vehicle
_LONGEST_FRAME = 255  # bytes; each pose of a path that is made from it repeats the name
_TWIST_AFTER = 7 * 8 + 36 * 8  # bytes of the pose with its covariance


def age_s(stamp_ns: int, received_ns: int, now_ns: int, ros_now_ns: int) -> float:
    """How old a message's content is, in s.

    By its stamp in ROS time, else since its receipt (monotonic).
    """
    by_stamp_s = (ros_now_ns - stamp_ns) / NS_PER_S
    usable = stamp_ns > 0 and 0.0 <= by_stamp_s <= USABLE_AGE_S
    return by_stamp_s if usable else max(0.0, (now_ns - received_ns) / NS_PER_S)


@dataclass(frozen=True, slots=True)
class Motion:
    """The vehicle's pose and motion at one moment.

    M, rad, m/s (negative in reverse), rad/s (left positive).
    """

    frame: bytes
    child_frame: bytes
    stamp_ns: int
    received_ns: int
    x: float
    y: float
    z: float
    yaw: float
    speed: float
    yaw_rate: float

    @classmethod
    def read(cls, message: bytes, received_ns: int) -> "Motion":
        """Read an odometry message, received at this monotonic time.

        Raises:
            BadInput: the bytes are none, a value is not finite or impossible, or the orientation is no
                rotation.
        """
        try:
            order = byte_order(message)
            stamp_ns, frame, at = header_at(message, 4, order)
            child_frame, at = text_at(message, at, order)
            at = aligned(at, 8)
            x, y, z, *turn = struct.unpack_from(f"{order}7d", message, at)
            speed, *_, yaw_rate = struct.unpack_from(f"{order}6d", message, at + _TWIST_AFTER)
        except (struct.error, IndexError) as error:
            raise BadInput(f"{len(message)} bytes are no nav_msgs/Odometry ({one_line(error)})") from error
        if len(frame) > _LONGEST_FRAME:
            raise BadInput(
                f"odometry: a frame_id of {len(frame)} bytes; at most {_LONGEST_FRAME} are taken"
            )
        if stamp_ns < 0:
            raise BadInput("odometry: the stamp is no time: sec is negative, or nanosec a second or more")
        if not all(map(math.isfinite, (x, y, z, *turn, speed, yaw_rate))):
            raise BadInput("odometry: a value of pose or twist is not finite")
        if max(abs(x), abs(y), abs(z)) > MOST_M:
            raise BadInput(f"odometry: the position {x:g}, {y:g}, {z:g} is beyond {MOST_M:g} m")
        if abs(speed) > _MAX_SPEED or abs(yaw_rate) > _MAX_YAW_RATE:
            most = f"{_MAX_SPEED:g} m/s, {_MAX_YAW_RATE:g} rad/s"
            raise BadInput(f"odometry: {speed:g} m/s or {yaw_rate:g} rad/s is beyond {most}")
        if not any(turn):
            raise BadInput("odometry: the orientation is all zeros, which is no rotation")
        if not LEAST_TURN <= math.hypot(*turn) <= MOST_TURN:
            raise BadInput(
                f"odometry: an orientation {math.hypot(*turn):g} long; it has to be {LEAST_TURN} to"
                f" {MOST_TURN}"
            )
        return cls(
            frame, child_frame, stamp_ns, received_ns, x, y, z, float(yaw_of(*turn)), speed, yaw_rate
        )

    def after(self, dt_s: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401 - a number or an array of them
        """x, y and yaw this many seconds later, or before, at constant speed and yaw rate (an arc of a circle)."""
        half = 0.5 * self.yaw_rate * dt_s
        heading = self.yaw + half
        if isinstance(dt_s, float):  # the same twenty times faster
            chord = self.speed * dt_s * (math.sin(half) / half if half else 1.0)
            return self.x + chord * math.cos(heading), self.y + chord * math.sin(heading), heading + half
        chord = self.speed * dt_s * np.sinc(half / math.pi)
        return self.x + chord * np.cos(heading), self.y + chord * np.sin(heading), heading + half


def yaw_of(x: Any, y: Any, z: Any, w: Any) -> Any:  # noqa: ANN401 - numbers or arrays
    """Heading in rad of a quaternion of any length: direction of the rotated x axis in the plane."""
    return np.arctan2(2.0 * (w * z + x * y), w * w + x * x - y * y - z * z)
