"""Drawn sequences of what can happen to an emergency lane.

The world's vehicle follows every path that is published.

A sequence is 15 s of driving. Obstacles appear, odometry is late, silent or jumps, the scanner falls
silent, the button is pressed, the node is deactivated, hangs or dies, the lane's process is replaced, the
clock steps, a person clears. A planner that knows of nothing drives on where the lane is not latched, so
that only the lane stops the vehicle.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.messages import empty_message, encode
from torchperf_ros.models.closed_loop import FRAME, ODOMETRY, Floats, encoded, odometry_message
from torchperf_ros.safety.emergency import Latch
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.safety_options import emergency_options
from torchperf_ros.world.loop import LaneOnClock
from torchperf_ros.world.sensors import Scanner
from torchperf_ros.world.vehicles import DELAY_S, DT_S, Vehicle

SEQUENCE_S: Final = 15.0
EVENTS: Final = (
    "obstacle",
    "odometry late",
    "odometry silent",
    "odometry jumps",
    "scan silent",
    "button",
    "inactive",
    "lane restarts",
    "node hangs",
    "node dies",
    "clock steps",
    "clear",
)
_LATCHING: Final = ("obstacle", "odometry silent", "scan silent", "button", "node dies")
_MOST_S: Final = {
    "lane restarts": 1.5,
    "clear": 0.0,
    "clock steps": 0.0,
}  # a longer one lasts up to `_LONGEST_S`
_LONGEST_S: Final = 6.0
_BUTTON: Final = "std_msgs/msg/Bool"
# By which a path may be faster than the one before it.
#
# What odometry and the vehicle's speed differ in at a moment.
FASTER_MS: Final = 0.5
_START_NS: Final = 1_700_000_000 * NS_PER_S
_MONOTONIC_NS: Final = 500 * NS_PER_S
_DT_NS: Final = round(DT_S * NS_PER_S)
_ODOMETRY_EVERY, _SCAN_EVERY, _PLAN_EVERY = 2, 5, 10  # steps
# by a new subscription: the last value of a button that latches its state
_HEARD_AFTER_NS: Final = NS_PER_S // 10
_BEAT_EVERY: Final = 25  # steps; how often the node tells the lane that it answers
_PLAN_S: Final = np.arange(0.0, 3.1, 0.5)
_ACCELERATION: Final = 1.5
_STILL_MS: Final = 0.5
_SILENT_NS: Final = NS_PER_S // 2  # longer than a timeout and the time between two messages
# one that brakes harder than its path stands for a moment before the path ends
_STANDSTILL_STEPS: Final = 25
_FRESH_NS: Final = 3 * NS_PER_S // 10
OPTIONS: Final = emergency_options(
    {
        "emergency.sensors": ["scan", "button Bool timeout 0"],
        "emergency.start_s": 1.0,
    }
)


class LaneEvent(NamedTuple):
    """What happens, from when to when in s, and a number of its own: metres, seconds, or a share."""

    at_s: float
    kind: str
    until_s: float
    value: float


def draw_events(seed: int) -> list[LaneEvent]:
    """What happens in a sequence, in order; something that latches the lane is always among it."""
    draw = random.Random(f"lane {seed}")
    kinds = [draw.choice(_LATCHING), "clear", *draw.choices(EVENTS, k=draw.randint(2, 7))]
    events = []
    for number, kind in enumerate(kinds):
        at_s = draw.uniform(1.0, 4.0) if not number else draw.uniform(1.0, SEQUENCE_S - 1.0)
        lasts_s = draw.uniform(0.1, 1.0) * _MOST_S.get(kind, _LONGEST_S)
        events.append(LaneEvent(at_s, kind, at_s + lasts_s, _value(draw, kind)))
    return sorted(events)


def _value(draw: random.Random, kind: str) -> float:
    if kind == "obstacle":
        return draw.uniform(3.0, 50.0)  # m ahead
    if kind == "odometry late":
        return draw.uniform(0.05, 0.8)  # s
    if kind == "clock steps":
        return draw.choice((-1.0, 1.0)) * math.exp(draw.uniform(math.log(0.05), math.log(20.0)))  # s
    return draw.uniform(-1.0, 1.0)


@dataclass
class Held:
    """What the lane did in one sequence.

    Attributes:
        seed: of the sequence.
        latched: how often it latched.
        paths: how many different stop paths it published.
        fastest_ms: largest speed between the first standstill and a granted clear, m/s.
        past_m: how far the vehicle drove beyond the end of the first stop path, or where it could have
            stood.
        faster_by_ms: by how much a path asked for more speed than the vehicle had when the one before was
            made.
        moving_ends: paths whose last part is no standstill.
        cleared_too_early: clears that were granted while the button was pressed or a sensor silent for too
            long.
        refused: paths that the vehicle could not follow.
    """

    seed: int
    latched: int = 0
    paths: int = 0
    fastest_ms: float = 0.0
    past_m: float = 0.0
    faster_by_ms: float = 0.0
    moving_ends: int = 0
    cleared_too_early: int = 0
    refused: int = 0
    kinds: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        wrong = self.moving_ends or self.cleared_too_early or self.refused
        return not wrong and self.fastest_ms == 0.0 and self.faster_by_ms <= FASTER_MS


def _end_of(path: TimedPath, vehicle: Vehicle) -> tuple[float, float, float, float]:
    """Where a stop ends, x and y, and its direction there.

    Odometry may have made the path too short to be driven: then where the vehicle stands if it brakes as
    hard as the path was to.
    """
    steps = np.diff(path.points[:, :2], axis=0)
    lengths = np.hypot(steps[:, 0], steps[:, 1])
    yaw = math.atan2(*steps[lengths.argmax()][::-1]) if lengths.any() else vehicle.yaw
    x, y = path.points[-1, :2].tolist() if path.frame == FRAME.encode() else (vehicle.x, vehicle.y)
    needed_m = vehicle.speed * DELAY_S + vehicle.speed**2 / (2.0 * OPTIONS.deceleration)
    left_m = needed_m - (x - vehicle.x) * math.cos(yaw) - (y - vehicle.y) * math.sin(yaw)
    return (
        x + max(left_m, 0.0) * math.cos(yaw),
        y + max(left_m, 0.0) * math.sin(yaw),
        math.cos(yaw),
        math.sin(yaw),
    )


class Judge:
    """Follows one latch, from its beginning to the clear that a person is granted."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.is_held = False

    def begin(self) -> None:
        if not self.is_held:
            self.is_held, self._stood_steps = True, 0
            self._last: bytes | None = None
            self._speed_ms = math.inf
            self._end: tuple[float, float, float, float] | None = None

    def published(self, stop: bytes, vehicle: Vehicle, known_ms: float, ros_ns: int) -> None:
        """A stop path; `known_ms`: the speed by odometry, which may be off; `ros_ns`: now."""
        if stop == self._last:
            return
        self._last = stop
        self._held.paths += 1
        path = TimedPath.read(stop)
        if path is None:
            self._held.refused += 1
            return
        steps = np.diff(path.points[:, :2], axis=0)
        lengths = np.hypot(steps[:, 0], steps[:, 1])
        speeds = lengths / (np.diff(path.stamps_ns) / NS_PER_S)
        asked_ms = float(speeds[path.stamps_ns[1:] > ros_ns].max(initial=0.0))
        self._held.faster_by_ms = max(self._held.faster_by_ms, asked_ms - self._speed_ms)
        self._held.moving_ends += bool(speeds[-1] > _STILL_MS)
        self._speed_ms = max(vehicle.speed, known_ms)
        if self._end is None:
            self._end = _end_of(path, vehicle)

    def look(self, vehicle: Vehicle) -> None:
        if not self.is_held:
            return
        held = self._held
        if self._stood_steps >= _STANDSTILL_STEPS:
            held.fastest_ms = max(held.fastest_ms, vehicle.speed)
        else:
            self._stood_steps = self._stood_steps + 1 if vehicle.speed == 0.0 else 0
        if self._end is not None:
            x, y, cosine, sine = self._end
            held.past_m = max(held.past_m, (vehicle.x - x) * cosine + (vehicle.y - y) * sine)


class _Sequence:
    """One sequence while it runs.

    Times are in ns: `now` of the monotonic clock, `ros` of the one that steps.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"lane {seed} vehicle")
        self.held = Held(seed)
        self.judge = Judge(self.held)
        self.vehicle = Vehicle(speed=draw.uniform(3.0, 30.0))
        self.wanted_ms, self.curvature = (
            self.vehicle.speed,
            draw.choice((0.0, 0.0, 1.0, -1.0)) * draw.uniform(0, 0.01),
        )
        self.noise = draw
        self.scanner = Scanner(seed)
        self.obstacles: Floats = np.empty((0, 7))
        self.now_ns, self.offset_ns = _MONOTONIC_NS, _START_NS - _MONOTONIC_NS
        self.node = "active"
        self.lane: LaneOnClock | None = LaneOnClock(OPTIONS)
        self.lane.rules.activate(self.now_ns)
        self.latch: Latch | None = None  # as the node knows it
        self.going_on: dict[str, LaneEvent] = {}
        self.pressed: bool | None = None  # None: never
        self.spoken_ns = dict.fromkeys(("odom", "scan"), self.now_ns)
        self.on_the_way: list[tuple[int, str, bytes]] = []
        self.odometry = self.vehicle.speed, self.now_ns
        self.stop: bytes | None = None  # that was published last

    @property
    def ros_ns(self) -> int:
        return self.now_ns + self.offset_ns

    def run(self, events: list[LaneEvent]) -> Held:
        waiting = events[:]
        self.held.kinds = [event.kind for event in events]
        for step in range(round(SEQUENCE_S / DT_S)):
            self.now_ns = _MONOTONIC_NS + step * _DT_NS
            now_s = step * DT_S
            for kind in [kind for kind, event in self.going_on.items() if now_s >= event.until_s]:
                self._end(self.going_on.pop(kind))
            while waiting and now_s >= waiting[0].at_s:
                event = waiting.pop(0)
                if event.kind not in self.going_on:
                    self.going_on[event.kind] = event
                    self._begin(event)
            self._sense(step)
            if step % _BEAT_EVERY == 0 and self.node == "active" and self.lane is not None:
                self.lane.rules.beat(self.now_ns)
            self._watch()
            if step % _PLAN_EVERY == 0 and self.node == "active" and not self._is_latched:
                self._plan()
            self.vehicle.step((self.ros_ns - _START_NS) / NS_PER_S)
            self.judge.look(self.vehicle)
        return self.held

    # -- what happens

    def _begin(self, event: LaneEvent) -> None:
        vehicle = self.vehicle
        if event.kind == "obstacle":
            ahead = event.value + 4.0
            x, y = vehicle.x + ahead * math.cos(vehicle.yaw), vehicle.y + ahead * math.sin(vehicle.yaw)
            self.obstacles = np.array([[x, y, vehicle.yaw, 0.0, 0.0, 1.0, 1.8]])
        elif event.kind == "button":
            self._press(pressed=True)
        elif event.kind == "clock steps":
            self.offset_ns += round(event.value * NS_PER_S)
        elif event.kind == "clear":
            self._clear()
        elif event.kind == "inactive" and self.node == "active":
            self.node = "inactive"
            if self.lane is not None:
                self.lane.rules.deactivate()
        elif event.kind == "lane restarts" and self.node in {"active", "inactive"}:
            self.lane = None
        elif event.kind == "node hangs" and self.node == "active":
            self.node = "hung"
        elif event.kind == "node dies" and self.node in {"active", "hung"}:
            self.node = "dead"
            if self.lane is not None:
                self.lane.rules.left_alone(self.now_ns)

    def _end(self, event: LaneEvent) -> None:
        if event.kind == "obstacle":
            self.obstacles = np.empty((0, 7))
        elif event.kind == "button":
            self._press(pressed=False)
        elif event.kind == "inactive" and self.node == "inactive":
            self.node = "active"
            if self.lane is not None:
                self.lane.rules.activate(self.now_ns)
                self._hear_button_again()
        elif event.kind == "lane restarts" and self.node != "dead":
            self._start_lane()
        elif event.kind == "node hangs" and self.node == "hung":
            self.node = "active"
        elif event.kind == "node dies" and self.node == "dead":
            self.node, self.stop = "active", None  # a latch is kept on disk, its path and buttons are not
            self._start_lane(anew=True)

    def _start_lane(self, *, anew: bool = False) -> None:
        """Begin a process of the lane; `anew`: of another node."""
        self.lane = LaneOnClock(OPTIONS)
        rules = self.lane.rules
        rules.pressed(["button"] if self.pressed and not anew else [])
        if self.node != "inactive":
            rules.activate(self.now_ns)
        if self.latch is not None:
            rules.resume(self.latch.kind, self.latch.reason, self.stop, self.now_ns)
        self._hear_button_again()

    def _press(self, *, pressed: bool) -> None:
        self.pressed = pressed
        self._send("button", encoded_button(pressed=pressed), 0)

    def _hear_button_again(self) -> None:
        if self.pressed is not None:
            self._send("button", encoded_button(pressed=self.pressed), _HEARD_AFTER_NS)

    def _clear(self) -> None:
        if self.lane is None or self.node in {"dead", "hung"} or not self._is_latched:
            return
        if self.lane.rules.clear(self.now_ns):
            return
        silent_ns = max(self.now_ns - spoken_ns for spoken_ns in self.spoken_ns.values())
        # while inactive, only buttons are heard
        is_silent = self.node == "active" and silent_ns > _SILENT_NS
        self.held.cleared_too_early += bool(self.pressed or is_silent)
        self.judge.is_held, self.latch = False, None

    # -- what is sent and heard

    def _sense(self, step: int) -> None:
        vehicle, going_on = self.vehicle, self.going_on
        if step % _ODOMETRY_EVERY == 0 and "odometry silent" not in going_on:
            jump = (0.0, 0.0, 1.0)
            if event := going_on.get("odometry jumps"):
                jump = (
                    5.0 * event.value,
                    self.noise.uniform(-2.0, 2.0),
                    1.0 + 0.5 * self.noise.uniform(-1.0, 1.0),
                )
            dx, dy, share = jump
            self.odometry = vehicle.speed * share, self.now_ns
            message = odometry_message(
                vehicle.x + dx, vehicle.y + dy, vehicle.yaw, self.odometry[0], vehicle.yaw_rate, self.ros_ns
            )
            late = going_on.get("odometry late")
            self._send("odom", encoded(message, ODOMETRY), round((late.value if late else 0.0) * NS_PER_S))
        if step % _SCAN_EVERY == 0 and "scan silent" not in going_on:
            self._send("scan", self.scanner.scan(self.obstacles, vehicle, self.ros_ns)[0], 0)
        arrived = [one for one in self.on_the_way if one[0] <= self.now_ns]
        self.on_the_way = [one for one in self.on_the_way if one[0] > self.now_ns]
        for _, topic, data in arrived:
            self._hear(topic, data)

    def _send(self, topic: str, data: bytes, later_ns: int) -> None:
        self.on_the_way.append((self.now_ns + later_ns, topic, data))

    def _hear(self, topic: str, data: bytes) -> None:
        if topic in self.spoken_ns:
            self.spoken_ns[topic] = self.now_ns
        if self.lane is None:
            return
        rules = self.lane.rules
        if topic == "odom":
            rules.moved(data, self.now_ns)
        else:
            rules.saw(OPTIONS.sensors.index(topic), data, self.now_ns)

    # -- what follows

    @property
    def _is_latched(self) -> bool:
        """What the node knows: the lane is latched, or was before its process ended."""
        return (self.latch if self.lane is None else self.lane.rules.latch) is not None

    def _watch(self) -> None:
        if self.lane is None:
            return
        was_held = self.judge.is_held
        is_over = self.lane.rules.may_end(self.now_ns)
        stop = self.lane.due(self.now_ns, self.ros_ns, at_once=is_over)
        self.latch = self.lane.rules.latch
        self.lane = None if is_over else self.lane
        if self.latch is not None:
            self.judge.begin()
        self.held.latched += self.judge.is_held and not was_held
        if stop is None:
            return
        speed, measured_ns = self.odometry
        known_ms = speed if self.now_ns - measured_ns < _FRESH_NS else 0.0
        self.judge.published(stop, self.vehicle, known_ms, self.ros_ns)
        self.stop = stop
        self.vehicle.take(stop, _START_NS)

    def _plan(self) -> None:
        """Go on at the wanted speed, without a look ahead."""
        vehicle = self.vehicle
        gained = np.minimum(vehicle.speed + _ACCELERATION * _PLAN_S, max(self.wanted_ms, vehicle.speed))
        along = np.concatenate(([0.0], np.cumsum(0.5 * (gained[1:] + gained[:-1]) * np.diff(_PLAN_S))))
        heading = vehicle.yaw + 0.5 * self.curvature * along
        points = np.column_stack((vehicle.x + along * np.cos(heading), vehicle.y + along * np.sin(heading)))
        vehicle.follow(points, (self.ros_ns - _START_NS) / NS_PER_S + _PLAN_S)


def encoded_button(*, pressed: bool) -> bytes:
    """A `std_msgs/Bool`."""
    return bytes(encode(empty_message(_BUTTON, data=pressed), _BUTTON))


def run_sequence(seed: int) -> Held:
    return _Sequence(seed).run(draw_events(seed))
