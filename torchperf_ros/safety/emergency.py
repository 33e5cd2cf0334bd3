"""The emergency lane's rules.

What is in the way, when that is an emergency, and the path on which the vehicle stops.

The lane uses raw measurements, no model and no worker. An obstacle, a trigger or a sensor that has fallen
silent latches it; a person clears it, which is refused while a reason lasts. All times are monotonic and
arguments.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.cdr import byte_order, header_at
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.errors import BadInput
from torchperf_ros.safety.approach import Approach
from torchperf_ros.safety.corridor import Corridor
from torchperf_ros.safety.emergency_stop import Stop
from torchperf_ros.safety.odometry import Motion, age_s
from torchperf_ros.safety.sensor_points import SensorPoints, read_bool
from torchperf_ros.safety.source_clock import SourceClock
from torchperf_ros.settings.safety_options import EmergencyOptions

_BUTTON: Final = "Bool"
OBSTACLE, TRIGGER, SILENT = KINDS = ("obstacle", "trigger", "silent")
_TO_BE_HEARD: Final = (
    "press and release it, or have its node publish its state transient local, or again and again"
)
# longer than anything that the node's receiving thread does while it is active
_NODE_SILENT_NS: Final = 2 * NS_PER_S
_GAINS_M_S2, _NOISE_M_S = (
    10.0,
    0.1,
)  # what a vehicle's speed rises by at most, and what is added to each message
# So long a lane whose node is gone stops the vehicle: longer where the stop lasts, less where it stands
# before.
_ALONE_NS, _AT_LEAST_ALONE_NS = 10 * NS_PER_S, NS_PER_S
_STANDS_M_S: Final = 0.1
# Over the last so many seconds of odometry is found whether the vehicle brakes already, and in the second
# half still.
_BRAKES_S: Final = 0.3
_HELD_S: Final = 0.2  # of them, at least
_MOST_SPEEDS: Final = 100
_KNOWN_NS: Final = NS_PER_S  # so long after its timeout, odometry says nothing of how the vehicle moves


class Sensor:
    """What has come from one topic.

    Attributes:
        is_trigger: whether it is a button.
        pressed: a button's last value, None if it has sent none; activation does not change it.
        seen_ns: when something usable came last, None if nothing has since activation.
        points: of the last message, how many what threatens has.
        problem: what was wrong with the last message that could not be used.
    """

    def __init__(
        self, topic: str, timeout_ms: float, points: SensorPoints | None, *, is_trigger: bool = False
    ) -> None:
        """A topic, and the reader of its points; None for a trigger and for odometry."""
        self.topic, self.timeout_ns, self.reader = topic, round(timeout_ms * NS_PER_MS), points
        self.is_trigger, self.pressed = is_trigger, None if is_trigger else False
        self.messages = self.refused = 0
        self.problem = ""
        self._approach = Approach()
        self.forget()

    def forget(self) -> None:
        """As if nothing had come yet; but a button that is pressed stays so until it says otherwise."""
        self.seen_ns: int | None = None
        self.is_usable = True  # the last message
        self.points = self.shown = self.in_a_row = 0
        self._approach.forget()
        self._clock, self._stamp_ns = SourceClock(is_ros=False), 0

    def take(
        self,
        data: bytes,
        motion: Motion | None,
        options: EmergencyOptions,
        now_ns: int,
        *,
        brakes: float = 0.0,
        stamped: bool = True,
    ) -> str:
        """Judge a message.

        What it triggers, empty if nothing; one that cannot be used leaves all as it was.

        `brakes`: by how many m/s^2 the vehicle does so already. `stamped`: whether the message's stamp
        passes as monotonic time does; simulated time does not.

        Raises:
            BadInput: it cannot be used.
        """
        if self.reader is None:
            self.pressed = read_bool(data)
            return self.lasting
        points = self.reader.read(data)
        if not points.usable:
            raise BadInput(
                f"none of {points.measured} measurements can be used: zero, NaN, or out of range"
            )
        late_ns = self.late_ns(data, now_ns) if stamped else 0
        corridor = Corridor.of(options, motion)
        found = self._approach.look(points, corridor, motion, options, now_ns, late_ns, brakes)
        self.points, self.shown, self.in_a_row = (
            (found.points, found.shown, found.threatens) if found else (0, 0, 0)
        )
        if found is None or self.in_a_row < options.scans or self.shown < options.min_points:
            return ""
        return f"{self.topic} shows {self.points} points {found.way_m:.1f} m ahead in the vehicle's way"

    def late_ns(self, data: bytes, now_ns: int) -> int:
        """How much longer than the quickest ones a message was on its way; 0 where its stamp does not say.

        Messages of one sensor keep their order, so a stamp that does not advance is of a clock that was set
        or stands.

        Raises:
            BadInput: it was longer than the sensor may be silent.
        """
        stamp_ns, _, _ = header_at(data, 4, byte_order(data))
        if stamp_ns <= self._stamp_ns:
            self._clock = SourceClock(is_ros=False)
        self._stamp_ns = max(stamp_ns, 0)
        late_s, _ = self._clock.age_s(self._stamp_ns, now_ns, now_ns, now_ns)
        if math.isinf(late_s):  # the clock has leapt ahead, or there is no stamp
            self._clock = SourceClock(is_ros=False)
            return 0
        late_ns = round(late_s * NS_PER_S)
        if 0 < self.timeout_ns < late_ns:
            late_ms, most_ms = late_ns / NS_PER_MS, self.timeout_ns / NS_PER_MS
            raise BadInput(
                f"it came {late_ms:.0f} ms later than others, by its stamp; its timeout is {most_ms:.0f} ms"
            )
        return late_ns

    def used(self, now_ns: int) -> None:
        self.seen_ns, self.is_usable = now_ns, True

    def refuse(self, error: BadInput) -> None:
        """Count a message that could not: it does not count as one that came."""
        self.refused, self.problem, self.is_usable = self.refused + 1, str(error), False

    @property
    def lasting(self) -> str:
        """Why the lane would latch again, empty if it would not: by the last message."""
        if self.pressed:
            return f"{self.topic} is true"
        return (
            f"{self.topic} still shows {self.points} points in the vehicle's way" if self.in_a_row else ""
        )

    @property
    def unknown(self) -> str:
        """Why this topic does not say that all is well, as far as `lasting` says nothing.

        Empty if it does.
        """
        if self.pressed is None:
            return f"{self.topic} has not been heard yet: {_TO_BE_HEARD}"
        if self.seen_ns is None and not self.is_trigger:
            return f"{self.topic} has not been heard yet since the node became active"
        return "" if self.is_usable else f"{self.topic}: its last message cannot be used: {self.problem}"


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
        simulated: whether ROS time is another than this machine's.
        triggers: how often it latched, by kind.
    """

    def __init__(self, options: EmergencyOptions) -> None:
        """Watch nothing before `activate`."""
        self.options = options
        self.sensors = [
            (
                Sensor(topic, timeout_ms, None, is_trigger=True)
                if kind == _BUTTON
                else Sensor(topic, timeout_ms, SensorPoints(kind, place, options.heights_m))
            )
            for topic, kind, timeout_ms, place in zip(
                options.sensors, options.types, options.timeouts_ms, options.mounting, strict=True
            )
        ]
        self.odometry = Sensor(options.odometry, options.odometry_timeout_ms, None)
        self.motion: Motion | None = None
        self.latch: Latch | None = None
        self.active = self.simulated = False
        self.triggers = dict.fromkeys(KINDS, 0)
        self.clears = 0
        self._speed = 0.0  # m/s, either way; not faster than the vehicle can have become
        self._speeds: deque[tuple[int, float]] = deque(
            maxlen=_MOST_SPEEDS
        )  # of the last odometry, with its receipt
        self._activated_ns = 0
        # when the node last showed that it answers; None: it does not have to
        self._beat_ns: int | None = None
        self._alone_ns: int | None = None  # since when the node has been gone
        self._leave_ns = 0
        self._resumes: tuple[bytes | None] | None = None  # the path of rules before these
        self._stop: Stop | None = None

    def activate(self, now_ns: int) -> None:
        """Watch from now on; a latch stays, with its stop, and a button that is pressed latches."""
        for sensor in (*self.sensors, self.odometry):
            sensor.forget()
        self.motion = self._beat_ns = None
        self._speeds.clear()
        self._activated_ns, self.active = now_ns, True
        for sensor in self.sensors:
            if sensor.pressed:
                self._trigger(TRIGGER, sensor.lasting, now_ns)

    def deactivate(self) -> None:
        """Judge nothing more, but hear buttons; a latch stays."""
        self.active = False

    # -- what comes in

    def moved(self, data: bytes, now_ns: int) -> None:
        """Take the bytes of a `nav_msgs/Odometry`.

        One that cannot be used is counted, and nothing else changes.
        """
        odometry, before = self.odometry, self.motion
        odometry.messages += 1
        try:
            motion = Motion.read(data, now_ns)
            if not self.simulated:
                odometry.late_ns(data, now_ns)
        except BadInput as error:
            odometry.refuse(error)
            return
        self.motion = motion
        odometry.used(now_ns)
        self._speed, before_speed = abs(self.motion.speed), self._speed
        if before is not None:
            passed_s = (now_ns - before.received_ns) / NS_PER_S
            self._speed = min(self._speed, before_speed + _GAINS_M_S2 * passed_s + _NOISE_M_S)
        self._speeds.append((now_ns, abs(self.motion.speed)))

    def _brakes(self, now_ns: int) -> float:
        """By how many m/s^2 the vehicle has braked for a moment, and still does.

        0: it does not, or that is not known.

        What it lost in the last 0.3 s, and in their second half, the lesser of both: a brake that is
        released counts no longer after half of that.
        """
        kept = [one for one in self._speeds if now_ns - one[0] <= _BRAKES_S * NS_PER_S]
        if not kept or kept[-1][0] - kept[0][0] < _HELD_S * NS_PER_S:
            return 0.0
        last_ns, last = kept[-1]
        half = next(one for one in kept if last_ns - one[0] <= 0.5 * _BRAKES_S * NS_PER_S)
        lost = [(speed - last) / max(last_ns - at_ns, 1) * NS_PER_S for at_ns, speed in (kept[0], half)]
        return min(max(min(lost), 0.0), self.options.deceleration)

    def saw(self, index: int, data: bytes, now_ns: int, *, again: bool = False) -> None:
        """Take a message of a sensor, by its index.

        One that cannot be used does not count as one that came.

        `again`: the same message has come before, on another subscription. While inactive only buttons are
        heard.
        """
        sensor = self.sensors[index]
        if not self.active and not sensor.is_trigger:
            return
        sensor.messages += not again
        try:
            found = sensor.take(
                data,
                self.motion,
                self.options,
                now_ns,
                brakes=self._brakes(now_ns),
                stamped=not self.simulated,
            )
        except BadInput as error:
            sensor.refuse(error)
            return
        sensor.used(now_ns)
        if found and self.active and not again:
            self._trigger(TRIGGER if sensor.is_trigger else OBSTACLE, found, now_ns)

    def pressed(self, topics: Iterable[str]) -> None:
        """These buttons were pressed when rules before these heard them last.

        Of the others nothing is known.
        """
        for sensor in self.sensors:
            if sensor.topic in topics:
                sensor.pressed = True

    def beat(self, now_ns: int) -> None:
        """Note that the node answers.

        From now on, and until `hold` or the next activation, it has to go on so.
        """
        self._beat_ns = now_ns

    def hold(self) -> None:
        """Expect no beat: the node waits for what goes on in it to end."""
        self._beat_ns = None

    def look_for_silence(self, now_ns: int) -> None:
        """Latch if something has been silent for longer than it may be."""
        for sensor in self._silent(now_ns):
            self._trigger(SILENT, self._why_silent(sensor, now_ns), now_ns)
        if why := self._node_hangs(now_ns):
            self._trigger(SILENT, why, now_ns)

    def next_silence_ns(self) -> int | None:
        """When the next sensor would be silent for too long; None while none could latch anything."""
        if self.latch is not None or not self.active:
            return None
        due_ns = [self._due_ns(sensor) for sensor in self._watched()]
        return min(
            due_ns + ([] if self._beat_ns is None else [self._beat_ns + _NODE_SILENT_NS]), default=None
        )

    def _watched(self) -> list[Sensor]:
        return [sensor for sensor in (*self.sensors, self.odometry) if sensor.timeout_ns]

    def _due_ns(self, sensor: Sensor) -> int:
        if sensor.seen_ns is None:
            return self._activated_ns + round(self.options.start_s * NS_PER_S)
        return sensor.seen_ns + sensor.timeout_ns

    def _silent(self, now_ns: int) -> list[Sensor]:
        return (
            [sensor for sensor in self._watched() if now_ns >= self._due_ns(sensor)] if self.active else []
        )

    def _why_silent(self, sensor: Sensor, now_ns: int) -> str:
        since_ns = self._activated_ns if sensor.seen_ns is None else sensor.seen_ns
        problem = f"; {sensor.problem}" if sensor.problem else ""
        return (
            f"{sensor.topic} has sent nothing usable for {(now_ns - since_ns) / NS_PER_MS:.0f} ms{problem}"
        )

    def _node_hangs(self, now_ns: int) -> str:
        """Why the node counts as one that hangs, empty if it does not."""
        if self._alone_ns is not None:
            return "the node is gone"
        if not self.active or self._beat_ns is None or now_ns < self._beat_ns + _NODE_SILENT_NS:
            return ""
        return f"the node hangs: it has not answered for {(now_ns - self._beat_ns) / NS_PER_S:.1f} s"

    def _trigger(self, kind: str, reason: str, now_ns: int) -> None:
        if self.latch is None:
            self.triggers[kind] += 1
            self.latch = Latch(kind, reason, now_ns)

    def left_alone(self, now_ns: int) -> None:
        """The node that this lane belongs to is gone: latch."""
        self._alone_ns, self._leave_ns = now_ns, now_ns + _ALONE_NS
        self._trigger(SILENT, self._node_hangs(now_ns), now_ns)

    def may_end(self, now_ns: int) -> bool:
        """Whether a lane that was left alone has done what there was to do.

        The vehicle stands, or has had time to.
        """
        if self._alone_ns is None or not self.active:
            return self._alone_ns is not None
        motion = self.motion
        if motion is not None and motion.received_ns > self._alone_ns and abs(motion.speed) < _STANDS_M_S:
            return now_ns >= self._alone_ns + _AT_LEAST_ALONE_NS
        if self._stop is not None and self._stop.left_ns:
            self._leave_ns = max(self._leave_ns, now_ns + _AT_LEAST_ALONE_NS)
        return now_ns >= self._leave_ns

    # -- the latch

    def lasting(self, now_ns: int) -> list[str]:
        """Every reason for which a person may not clear it now.

        It would latch again, or a sensor is not known well.

        While inactive, only buttons are heard. One that has not been heard may be pressed, also where it
        latched for another reason.
        """
        if not self.active:
            latched = self.latch is not None
            return [
                why
                for one in self.sensors
                if one.is_trigger and (why := one.lasting or (latched and one.unknown))
            ]
        reasons, silent = [], self._silent(now_ns)
        for sensor in (*self.sensors, self.odometry):
            reasons.append(
                self._why_silent(sensor, now_ns) if sensor in silent else sensor.lasting or sensor.unknown
            )
        return [reason for reason in (*reasons, self._node_hangs(now_ns)) if reason]

    def clear(self, now_ns: int) -> str:
        """Unlatch; returns why not, empty if it is done or nothing was latched."""
        if self.latch is None:
            return ""
        if reasons := self.lasting(now_ns):
            return "; ".join(reasons)
        self.clears += 1
        self.latch = self._stop = self._resumes = None
        return ""

    def resume(self, kind: str, reason: str, stop: bytes | None, now_ns: int) -> None:
        """Be latched as rules before these were, and go on with their path, if any."""
        self.latch, self._stop, self._resumes = Latch(kind, reason, now_ns), None, (stop,)

    # -- the stop

    def stop_path(self, now_ns: int, ros_now_ns: int) -> bytes:
        """What is to be published while latched, as CDR bytes of a `nav_msgs/Path`; ROS time of now in ns.

        One path from where the vehicle is to standstill, so that it keeps to one braking trajectory; after
        that, or where odometry has never come, one place, see `Stop`.
        """
        here = self._here(now_ns, ros_now_ns)
        if self._stop is None and self._resumes is not None:
            self._stop = Stop.resumed(*self._resumes, here, now_ns, ros_now_ns)
        elif self._stop is None:
            self._stop = Stop.of(self._braked_from(now_ns), self.options, now_ns, ros_now_ns)
        return self._stop.look(here, now_ns, ros_now_ns, simulated=self.simulated)

    def _braked_from(self, now_ns: int) -> Motion | None:
        """The motion that a stop begins with, None where that is not known.

        Messages that make the vehicle faster than it can be would have it go faster.
        """
        motion = self.motion
        if motion is None or now_ns - motion.received_ns > self.odometry.timeout_ns + _KNOWN_NS:
            return None
        if self._speed >= abs(motion.speed):
            return motion
        share = self._speed / abs(motion.speed)
        return replace(motion, speed=share * motion.speed, yaw_rate=share * motion.yaw_rate)  # the same arc

    def _here(self, now_ns: int, ros_now_ns: int) -> Motion | None:
        motion = self.motion
        if motion is None or now_ns - motion.received_ns > self.odometry.timeout_ns:
            return None
        old_s = age_s(motion.stamp_ns, motion.received_ns, now_ns, ros_now_ns)
        return motion if old_s * NS_PER_S <= self.odometry.timeout_ns else None

    # -- what /diagnostics shows

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
            "lasting": "; ".join(self.lasting(now_ns)) if latch else "",
            "latched_s": f"{(now_ns - latch.at_ns) / NS_PER_S:.1f}" if latch else "",
            "clears": str(self.clears),
            "corridor_m": f"{Corridor.of(self.options, motion).length_m:.2f}",
            "speed": "nan" if motion is None else f"{motion.speed:.3f}",
            "node_age_ms": (
                "nan" if self._beat_ns is None else f"{(now_ns - self._beat_ns) / NS_PER_MS:.0f}"
            ),
            **{f"triggers_{kind}": str(count) for kind, count in self.triggers.items()},
        }
        for sensor in (*self.sensors, self.odometry):
            age_ms = math.nan if sensor.seen_ns is None else (now_ns - sensor.seen_ns) / NS_PER_MS
            values[f"{sensor.topic} age_ms"] = f"{age_ms:.1f}"
            values[f"{sensor.topic} messages"] = str(sensor.messages)
            values[f"{sensor.topic} refused"] = str(sensor.refused)
            values[f"{sensor.topic} points"] = str(sensor.points)
            values[f"{sensor.topic} problem"] = sensor.problem
            if sensor.is_trigger:
                values[f"{sensor.topic} pressed"] = {None: "unknown", True: "yes", False: "no"}[
                    sensor.pressed
                ]
        level = Level.ERROR if latch else Level.OK if self.active else Level.WARN
        return Alert(
            level, "perf: emergency", f"{self.state}: {latch.reason}" if latch else self.state, values
        )
