"""Where the vehicle is and how it moves, read from the CDR bytes of a `nav_msgs/Odometry`."""

import math
import struct
from collections import deque
from dataclasses import dataclass, replace
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

MAX_SPEED, _MAX_YAW_RATE = 100.0, 10.0  # m/s, rad/s; more is broken, not a road vehicle's
_LONGEST_FRAME = 255  # bytes; each pose of a path that is made from it repeats the name
_TWIST_AFTER = 7 * 8 + 36 * 8  # bytes of the pose with its covariance
# A transition into a bend takes half a second or more. Three messages have always a straight line close by, so that
# they show no noise. At 200 Hz, 100 come in that time.
_TURNS_OVER_S, _FEWEST, _MOST = 0.5, 4, 128
_SIGMAS = 3.0


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

    Attributes:
        child_frame: of the vehicle; `frame` where it has no name.
        turns, unsure: the yaw rate by several messages, and as much of it as may be noise; see `YawRates`. None:
            there are too few.
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
    turns: float | None = None
    unsure: float = 0.0

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
        if abs(speed) > MAX_SPEED or abs(yaw_rate) > _MAX_YAW_RATE:
            most = f"{MAX_SPEED:g} m/s, {_MAX_YAW_RATE:g} rad/s"
            raise BadInput(f"odometry: {speed:g} m/s or {yaw_rate:g} rad/s is beyond {most}")
        if not LEAST_TURN <= math.hypot(*turn) <= MOST_TURN:
            raise BadInput(
                f"odometry: an orientation {math.hypot(*turn):g} long; it has to be {LEAST_TURN} to"
                f" {MOST_TURN}"
            )
        return cls(
            frame,
            child_frame or frame,  # a name that was not set is no frame of the vehicle's
            stamp_ns,
            received_ns,
            x,
            y,
            z,
            float(yaw_of(*turn)),
            speed,
            yaw_rate,
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


class YawRates:
    """The yaw rate of the last half second, of which a straight line through time shows the present one and its noise.

    It follows a transition into a bend, in which the yaw rate changes evenly, without delay. It knows no pose, so that
    a jump of the frame is no turn. A clock that begins anew, stands still or leaves a gap empties it.
    """

    def __init__(self) -> None:
        self._found = deque[tuple[float, float]](maxlen=_MOST)

    def take(self, motion: Motion) -> Motion:
        """The same motion, with what is known of its yaw rate."""
        found, at_s = self._found, (motion.stamp_ns or motion.received_ns) / NS_PER_S
        if found and not 0.0 < at_s - found[-1][0] < _TURNS_OVER_S:
            found.clear()
        found.append((at_s, motion.yaw_rate))
        while at_s - found[0][0] > _TURNS_OVER_S:
            found.popleft()
        count = len(found)
        if count < _FEWEST:
            return motion
        ago_s, rates = (np.array(found) - (at_s, 0.0)).T
        middle_s, mean = float(ago_s.sum()) / count, float(rates.sum()) / count
        ago_s -= middle_s
        rates -= mean
        spread = float(ago_s @ ago_s)
        slope = float(ago_s @ rates) / spread
        rates -= slope * ago_s
        variance = float(rates @ rates) / (count - 2) * (1.0 / count + middle_s * middle_s / spread)
        return replace(motion, turns=mean - slope * middle_s, unsure=_SIGMAS * math.sqrt(variance))


def yaw_of(x: Any, y: Any, z: Any, w: Any) -> Any:  # noqa: ANN401 - numbers or arrays
    """Heading in rad of a quaternion of any length: direction of the rotated x axis in the plane."""
    return np.arctan2(2.0 * (w * z + x * y), w * w + x * x - y * y - z * z)
