"""The emergency lane's rules: what is in the way, when that is an emergency, and the path on which the vehicle stops.

The lane uses raw measurements, no model and no worker. An obstacle, a trigger or a sensor that has fallen silent
latches it; a person clears it, which is refused while a reason lasts. All times are monotonic and arguments.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.config.safety_options import EmergencyOptions
from torchperf_ros.frame.alert_rules import Alert, Level
from torchperf_ros.frame.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.frame.errors import BadInput
from torchperf_ros.frame.stop_output import TimedPath
from torchperf_ros.safety.odometry import Motion, age_s
from torchperf_ros.safety.sensor_points import Floats, SensorPoints, read_bool

OBSTACLE, TRIGGER, SILENT = KINDS = ("obstacle", "trigger", "silent")
_STRAIGHT: Final = 1e-6  # 1/m
_SLOW_M_S: Final = 0.5  # below this speed, yaw rate and speed say nothing about the arc
_MOVES_M_S: Final = 0.3
_CREEPS_M_S: Final = 0.01  # so that a standing vehicle has a braking time, too
_PATH_POSES: Final = 40
_LEAST_STOP_S: Final = 0.5
_BODY_FRAME: Final = b"base_link"  # REP 105; of the stop path where odometry has never come


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

        The length is v t + v^2 / (2 a): the reaction distance, and the braking distance at a constant deceleration.
        """
        speed = abs(motion.speed) if motion is not None else 0.0
        backwards = motion is not None and motion.speed < -_MOVES_M_S
        length_m = speed * options.reaction_ms / 1000 + speed**2 / (2 * options.deceleration)
        return cls(
            0.0 if motion is None else curvature_of(motion, options.vehicle.max_curvature),
            max(length_m, options.min_length_m),
            options.vehicle.rear_m if backwards else options.vehicle.length_m - options.vehicle.rear_m,
            options.vehicle.width_m / 2, options.margin_m, backwards,
        )  # fmt: skip

    def inside(self, x: Floats, y: Floats) -> NDArray[np.bool_]:
        """Which of the points, in m in the vehicle's axes, the vehicle or its margin will reach; those in it are not.

        On an arc of radius R, a point at distance r from its centre and angle t around it meets the front, which spans
        R - w/2 to hypot(R + w/2, front), after R (t - asin(front / r)), or the inner side, if that is earlier,
        after R (t - acos((R - w/2) / r)). Beside the vehicle, where only the inner side comes closer, there is no
        margin: a wall along which it drives is no obstacle. The tail, which swings out a little, is left out.
        """
        x = -x if self.backwards else x
        wide_m, front_m = self.half_width_m + self.margin_m, self.ahead_m
        if abs(self.curvature) < _STRAIGHT:
            return np.asarray((x > front_m) & (x <= front_m + self.length_m) & (np.abs(y) <= wide_m))
        y, radius_m = (y if self.curvature > 0 else -y), 1 / abs(self.curvature)
        distance = np.maximum(np.hypot(x, radius_m - y), 1e-9)
        angle = np.arctan2(x, radius_m - y)
        at_front = np.arcsin(np.minimum(front_m / distance, 1.0))

        def is_met(inner_m: float) -> NDArray[np.bool_]:
            at_side = np.arccos(np.clip(inner_m / distance, -1.0, 1.0))
            soon = radius_m * (angle - np.minimum(at_front, at_side)) <= self.length_m
            return np.asarray(soon & (distance >= inner_m))

        ahead = (x > front_m) & (distance <= math.hypot(radius_m + wide_m, front_m)) & is_met(radius_m - wide_m)
        beside = (x > 0) & (x <= front_m) & (y > self.half_width_m) & is_met(radius_m - self.half_width_m)
        return np.asarray(ahead | beside)


def curvature_of(motion: Motion, most: float) -> float:
    """Of the arc that the vehicle is on, in 1/m: yaw rate over speed, within what it can turn."""
    speed = math.copysign(max(abs(motion.speed), _SLOW_M_S), motion.speed)
    return min(max(motion.yaw_rate / speed, -most), most)


class Sensor:
    """What has come from one topic.

    Attributes:
        seen_ns: when something usable came last, None if nothing has since activation.
        points: of the last message, how many were in the corridor.
        problem: what was wrong with the last message that could not be used.
    """

    def __init__(self, topic: str, timeout_ms: float, points: SensorPoints | None) -> None:
        """A topic, and who reads its points; None for a trigger."""
        self.topic, self.timeout_ns, self.reader = topic, round(timeout_ms * NS_PER_MS), points
        self.messages = self.refused = 0
        self.problem = ""
        self.forget()

    def forget(self) -> None:
        """As if nothing had come yet."""
        self.seen_ns: int | None = None
        self.is_true = False
        self.points = self.shown = self.in_a_row = 0

    def take(self, data: bytes, corridor: Corridor, options: EmergencyOptions) -> str:
        """Judge a message: what it triggers, empty if nothing; one that cannot be used leaves all as it was.

        Raises:
            BadInput: it cannot be used.
        """
        if self.reader is None:
            self.is_true = read_bool(data)
            return f"{self.topic} is true" if self.is_true else ""
        points = self.reader.read(data)
        if not points.usable:
            raise BadInput(f"none of {points.measured} measurements can be used: zero, NaN, or out of range")
        self.points = min(int(np.count_nonzero(corridor.inside(points.x, points.y))), points.most)
        shows = self.points >= min(options.min_points, max(points.most, 1))
        self.in_a_row, self.shown = (self.in_a_row + 1, self.shown + self.points) if shows else (0, 0)
        if self.in_a_row < options.scans or self.shown < options.min_points:
            return ""
        return f"{self.topic} shows {self.points} points within {corridor.length_m:.1f} m of the vehicle's path"

    @property
    def lasting(self) -> str:
        """Why the lane would latch again, empty if it would not: by the last message."""
        if self.is_true:
            return f"{self.topic} is true"
        return f"{self.topic} still shows {self.points} points in the vehicle's way" if self.in_a_row else ""


@dataclass(frozen=True, slots=True)
class Latch:
    """Why the vehicle is stopped, in one of the words of `KINDS` and in a line for people, and since when."""

    kind: str
    reason: str
    at_ns: int


class Emergency:
    """Watches, latches, and says how to stop; for one thread, while others read its attributes.

    Attributes:
        latch: None while nothing has happened.
        active: whether sensors are judged.
        triggers: how often it latched, by kind.
    """

    def __init__(self, options: EmergencyOptions) -> None:
        """Watch nothing before `activate`."""
        heights_m = options.lowest_m, options.highest_m
        places = np.reshape(options.mounting, (-1, 4)).tolist()
        self.options = options
        self.sensors = [
            Sensor(topic, timeout_ms, None if kind == "Bool" else SensorPoints(kind, tuple(place), heights_m))
            for topic, kind, timeout_ms, place in zip(
                options.sensors, options.types, options.timeouts_ms, places, strict=True
            )
        ]
        self.odometry = Sensor(options.odometry, options.odometry_timeout_ms, None)
        self.motion: Motion | None = None
        self.latch: Latch | None = None
        self.active = False
        self.triggers = dict.fromkeys(KINDS, 0)
        self.clears = 0
        self._activated_ns = 0
        self._stop: tuple[bytes, int] | None = None  # the path, and when it ends

    def activate(self, now_ns: int) -> None:
        """Watch from now on; a latch stays."""
        for sensor in (*self.sensors, self.odometry):
            sensor.forget()
        self.motion, self._stop, self._activated_ns, self.active = None, None, now_ns, True

    def deactivate(self) -> None:
        """Judge nothing more; a latch stays."""
        self.active = False

    # -- what comes in ------------------------------------------------------------------------------------------------

    def moved(self, data: bytes, now_ns: int) -> None:
        """Take the bytes of a `nav_msgs/Odometry`; one that cannot be used is counted, and nothing else changes."""
        odometry = self.odometry
        odometry.messages += 1
        try:
            self.motion = Motion.read(data, now_ns)
            odometry.seen_ns = now_ns
        except BadInput as error:
            odometry.refused, odometry.problem = odometry.refused + 1, str(error)

    def saw(self, index: int, data: bytes, now_ns: int) -> None:
        """Take a message of a sensor, by its index; one that cannot be used does not count as one that came."""
        if not self.active:
            return
        sensor = self.sensors[index]
        sensor.messages += 1
        try:
            found = sensor.take(data, Corridor.of(self.options, self.motion), self.options)
        except BadInput as error:
            sensor.refused, sensor.problem = sensor.refused + 1, str(error)
            return
        sensor.seen_ns = now_ns
        if found:
            self._trigger(TRIGGER if sensor.reader is None else OBSTACLE, found, now_ns)

    def look_for_silence(self, now_ns: int) -> None:
        """Latch if something has been silent for longer than it may be."""
        for sensor in self._silent(now_ns):
            self._trigger(SILENT, self._why_silent(sensor, now_ns), now_ns)

    def next_silence_ns(self) -> int | None:
        """When the next sensor would be silent for too long; None while none could latch anything."""
        watched = [] if self.latch is not None or not self.active else self._watched()
        return min((self._due_ns(sensor) for sensor in watched), default=None)

    def _watched(self) -> list[Sensor]:
        return [sensor for sensor in (*self.sensors, self.odometry) if sensor.timeout_ns]

    def _due_ns(self, sensor: Sensor) -> int:
        if sensor.seen_ns is None:
            return self._activated_ns + round(self.options.start_s * NS_PER_S)
        return sensor.seen_ns + sensor.timeout_ns

    def _silent(self, now_ns: int) -> list[Sensor]:
        return [sensor for sensor in self._watched() if now_ns >= self._due_ns(sensor)] if self.active else []

    def _why_silent(self, sensor: Sensor, now_ns: int) -> str:
        since_ns = self._activated_ns if sensor.seen_ns is None else sensor.seen_ns
        problem = f"; {sensor.problem}" if sensor.problem else ""
        return f"{sensor.topic} has sent nothing usable for {(now_ns - since_ns) / NS_PER_MS:.0f} ms{problem}"

    def _trigger(self, kind: str, reason: str, now_ns: int) -> None:
        if self.latch is None:
            self.triggers[kind] += 1
            self._stop = None
            self.latch = Latch(kind, reason, now_ns)

    def left_alone(self, now_ns: int) -> None:
        """The node that this lane belongs to is gone: latch."""
        self._trigger(SILENT, "the node is gone", now_ns)

    # -- the latch ----------------------------------------------------------------------------------------------------

    def lasting(self, now_ns: int) -> list[str]:
        """Every reason for which it would latch now."""
        if not self.active:
            return []
        silent = [self._why_silent(sensor, now_ns) for sensor in self._silent(now_ns)]
        return [*silent, *(sensor.lasting for sensor in self.sensors if sensor.lasting)]

    def clear(self, now_ns: int) -> str:
        """Unlatch; returns why not, empty if it is done or nothing was latched."""
        if reasons := self.lasting(now_ns):
            return "; ".join(reasons)
        self.clears += self.latch is not None
        self.latch = self._stop = None
        return ""

    def resume(self, kind: str, reason: str, stop: bytes | None, now_ns: int) -> None:
        """Be latched as rules before these were, with their path if any until odometry says that the vehicle moves."""
        self.latch, self._stop = Latch(kind, reason, now_ns), None if stop is None else (stop, now_ns)

    # -- the stop -----------------------------------------------------------------------------------------------------

    def stop_path(self, now_ns: int, ros_now_ns: int) -> bytes:
        """The path from where the vehicle is to standstill, as CDR bytes of a `nav_msgs/Path`; ROS time of now in ns.

        It is made once, so that the vehicle keeps to one braking trajectory, and anew when it has ended and the vehicle
        moves all the same. Where odometry has never come, it is one place, the vehicle's own.
        """
        motion = self.motion
        moves = motion is not None and abs(motion.speed) > _MOVES_M_S
        if self._stop is None or (moves and now_ns > self._stop[1]):
            path, lasts_ns = stop_along_arc(motion, self.options, now_ns, ros_now_ns)
            self._stop = path, now_ns + lasts_ns
        return self._stop[0]

    # -- what is said of it -------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One word: off, inactive, watching or latched."""
        if not self.options.sensors:
            return "off"
        return "latched" if self.latch is not None else "watching" if self.active else "inactive"

    def status(self, now_ns: int) -> Alert:
        """For `/diagnostics`: state, reason, ages and counters."""
        latch, motion = self.latch, self.motion
        values = {
            "state": self.state,
            "reason": latch.reason if latch else "",
            "lasting": "; ".join(self.lasting(now_ns)),
            "latched_s": f"{(now_ns - latch.at_ns) / NS_PER_S:.1f}" if latch else "",
            "clears": str(self.clears),
            "corridor_m": f"{Corridor.of(self.options, motion).length_m:.2f}",
            "speed": "nan" if motion is None else f"{motion.speed:.3f}",
            **{f"triggers_{kind}": str(count) for kind, count in self.triggers.items()},
        }
        for sensor in (*self.sensors, self.odometry):
            age_ms = math.nan if sensor.seen_ns is None else (now_ns - sensor.seen_ns) / NS_PER_MS
            values[f"{sensor.topic} age_ms"] = f"{age_ms:.1f}"
            values[f"{sensor.topic} messages"] = str(sensor.messages)
            values[f"{sensor.topic} refused"] = str(sensor.refused)
            values[f"{sensor.topic} points"] = str(sensor.points)
            values[f"{sensor.topic} problem"] = sensor.problem
        level = Level.ERROR if latch else Level.OK if self.active else Level.WARN
        return Alert(level, "perf: emergency", f"{self.state}: {latch.reason}" if latch else self.state, values)


def stop_along_arc(motion: Motion | None, options: EmergencyOptions, now_ns: int, ros_now_ns: int) -> tuple[bytes, int]:
    """Brake on the arc that the vehicle is on, from where it is by now; CDR bytes of the path, and how long it lasts.

    At speed v and deceleration a it goes as far in t s as it would have gone unbraked in t - a t^2 / (2 v) s.
    """
    if motion is None:
        motion = Motion(_BODY_FRAME, b"", 0, now_ns, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    speed = max(abs(motion.speed), _CREEPS_M_S)
    lasts_s = max(speed / options.deceleration, _LEAST_STOP_S)
    after_s = np.linspace(0.0, lasts_s, _PATH_POSES)
    braking_s = np.minimum(after_s, speed / options.deceleration)
    moved_s = braking_s - options.deceleration * braking_s**2 / (2 * speed)
    known_s = age_s(motion.stamp_ns, motion.received_ns, now_ns, ros_now_ns)
    points = np.full((_PATH_POSES, 3), motion.z)
    since_s = min(known_s, options.odometry_timeout_ms / 1000)
    points[:, 0], points[:, 1], yaws = motion.after(since_s + moved_s)
    stamps_ns = ros_now_ns + (after_s * NS_PER_S).astype(np.int64)
    return TimedPath.made(stamps_ns, points, yaws, motion.frame).bytes(), round(lasts_s * NS_PER_S)
