"""How the emergency lane stops the vehicle.

One braking path, and then `stand here` for as long as it is latched.
"""

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.safety.odometry import Motion, age_s
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.safety_options import EmergencyOptions

MOVES_M_S: Final = 0.3
_PATH_POSES: Final = 40
_LEAST_STOP_S: Final = 0.5
_BODY_FRAME: Final = b"base_link"  # REP 105; of the path where odometry has never come
# A path `stand here` holds for longer than the lane's process takes to be replaced, and is made anew each
# second.
_STANDS_S: Final = 10.0
_STANDS_ANEW_NS: Final = NS_PER_S
_DRIFT_NS: Final = 20 * NS_PER_MS  # a path that is so late asks for 0.1 m/s more, at 6 m/s^2
# simulated time that gains more than this from one look to the next has been set
_STEP_NS: Final = NS_PER_S


class Stop:
    """The paths of one stop, in the order in which they are published.

    There is one braking path, from the vehicle's motion when the lane latched. Once it is over, each path
    is one place at which the vehicle is to stand. No odometry leads to a second braking path: where it is
    late, has frozen, or is only noise, that would order a vehicle off that stands. A vehicle that still
    moves then, as its brakes are weaker, cannot do better than to brake as hard as it can.
    """

    def __init__(self, path: TimedPath, lasts_ns: int, now_ns: int, ros_now_ns: int) -> None:
        """A path that begins now, and is over after so long; 0: it is one place."""
        self._now_ns, self._ros_now_ns = now_ns, ros_now_ns
        self._begin(path, lasts_ns)

    @classmethod
    def of(cls, motion: Motion | None, options: EmergencyOptions, now_ns: int, ros_now_ns: int) -> "Stop":
        """Of a vehicle that moves like this; None: its motion is not known."""
        if motion is None or abs(motion.speed) <= MOVES_M_S:
            return cls(_standing(motion, ros_now_ns), 0, now_ns, ros_now_ns)
        return cls(*stop_along_arc(motion, options, now_ns, ros_now_ns), now_ns, ros_now_ns)

    @classmethod
    def resumed(cls, data: bytes | None, here: Motion | None, now_ns: int, ros_now_ns: int) -> "Stop":
        """Go on with a path that rules before these have published, unless that is over.

        Then the vehicle stands.

        It is over, too, where it would begin later than now, as the clock has been set meanwhile.
        """
        path = None if data is None else TimedPath.read(data)
        if path is None:
            return cls(_standing(here, ros_now_ns), 0, now_ns, ros_now_ns)
        lasts_ns, past_ns = (
            int(at_ns) - int(path.stamps_ns[0]) for at_ns in (path.stamps_ns[-1], ros_now_ns)
        )
        stop = cls(path, lasts_ns, now_ns, ros_now_ns)
        stop._past_ns = past_ns if 0 <= past_ns <= lasts_ns else lasts_ns
        return stop

    def _begin(self, path: TimedPath, lasts_ns: int) -> None:
        self._path, self._data, self._lasts_ns, self._past_ns = path, path.bytes(), lasts_ns, 0

    @property
    def left_ns(self) -> int:
        """How long the braking path still lasts, as of the last look."""
        return max(0, self._lasts_ns - self._past_ns)

    def look(self, here: Motion | None, now_ns: int, ros_now_ns: int, *, simulated: bool) -> bytes:
        """What is to be published now, as CDR bytes of a `nav_msgs/Path`.

        The same object while it stays the same.

        Args:
            here: fresh odometry; None: there is none, so that the vehicle stands where the path before
                ends.
            now_ns: monotonic.
            ros_now_ns: ROS time; where that was set meanwhile, the poses are stamped anew.
            simulated: ROS time is not this machine's, so that the braking path lasts by ROS time.
        """
        passed_ns, ros_passed_ns = now_ns - self._now_ns, ros_now_ns - self._ros_now_ns
        if simulated and 0 <= ros_passed_ns <= _STEP_NS:
            passed_ns = ros_passed_ns
        self._now_ns, self._ros_now_ns, self._past_ns = (
            now_ns,
            ros_now_ns,
            self._past_ns + max(0, passed_ns),
        )
        drift_ns = ros_now_ns - self._past_ns - int(self._path.stamps_ns[0])
        was_set = abs(drift_ns) > _DRIFT_NS
        if self._past_ns >= self._lasts_ns:
            if self._lasts_ns or was_set or self._past_ns >= _STANDS_ANEW_NS:
                self._begin(
                    _at_its_end(self._path, ros_now_ns) if here is None else _standing(here, ros_now_ns), 0
                )
        elif was_set:
            stamps_ns = self._path.stamps_ns + drift_ns
            head = restamped(self._path.head, int(stamps_ns[0]))
            self._path = replace(self._path, head=head, stamps_ns=stamps_ns)
            self._data = self._path.bytes()
        return self._data


def stop_along_arc(
    motion: Motion, options: EmergencyOptions, now_ns: int, ros_now_ns: int
) -> tuple[TimedPath, int]:
    """Brake on the arc that the vehicle is on, from where it is by now.

    Returns the path, and how long it lasts in ns.

    At speed v and deceleration a it goes as far in t s as it would have gone unbraked in t - a t^2 / (2 v)
    s.
    """
    speed = abs(motion.speed)
    lasts_s = max(speed / options.deceleration, _LEAST_STOP_S)
    after_s = np.linspace(0.0, lasts_s, _PATH_POSES)
    braking_s = np.minimum(after_s, speed / options.deceleration)
    moved_s = braking_s - options.deceleration * braking_s**2 / (2 * speed)
    known_s = age_s(motion.stamp_ns, motion.received_ns, now_ns, ros_now_ns)
    points = np.full((_PATH_POSES, 3), motion.z)
    since_s = min(known_s, options.odometry_timeout_ms / 1000)
    points[:, 0], points[:, 1], yaws = motion.after(since_s + moved_s)
    path = TimedPath.made(_stamps(ros_now_ns, lasts_s), points, yaws, motion.frame)
    return path, round(lasts_s * NS_PER_S)


def _standing(motion: Motion | None, ros_now_ns: int) -> TimedPath:
    place, yaw, frame = (0.0, 0.0, 0.0), 0.0, _BODY_FRAME
    if motion is not None:
        place, yaw, frame = (motion.x, motion.y, motion.z), motion.yaw, motion.frame
    points = np.tile(place, (_PATH_POSES, 1))
    return TimedPath.made(_stamps(ros_now_ns, _STANDS_S), points, np.full(_PATH_POSES, yaw), frame)


def _at_its_end(path: TimedPath, ros_now_ns: int) -> TimedPath:
    points, turns = (np.tile(each[-1], (_PATH_POSES, 1)) for each in (path.points, path.turns))
    head = restamped(path.head, ros_now_ns)
    return replace(path, head=head, stamps_ns=_stamps(ros_now_ns, _STANDS_S), points=points, turns=turns)


def _stamps(ros_now_ns: int, lasts_s: float) -> NDArray[np.int64]:
    return ros_now_ns + (np.linspace(0.0, lasts_s, _PATH_POSES) * NS_PER_S).astype(np.int64)


def warm_up(options: EmergencyOptions) -> None:
    """Make the paths of one stop: the first take longer than those that follow."""
    motion = Motion(_BODY_FRAME, b"", 0, 0, 0.0, 0.0, 0.0, 0.0, 10.0, 0.1)
    stop = Stop.of(motion, options, 0, 0)
    stop.look(motion, 0, _STEP_NS, simulated=False)
    stop.look(None, stop.left_ns, 0, simulated=False)
