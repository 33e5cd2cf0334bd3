"""What the emergency lane publishes once it has latched.

The vehicle brakes once, and nothing moves it after that.
"""

import math
import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.safety.emergency import OBSTACLE, SILENT, TRIGGER, Emergency
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.config import node_config

from .sensor_messages import bool_bytes, odometry_bytes, scan_bytes

ROS_NS = 1_700_000_000 * NS_PER_S
SCAN, BUTTON = range(2)
DECELERATION, TIMEOUT_S, STEP_S = 6.0, 0.3, 0.05
FREE, BLOCKED, BLIND = (scan_bytes(np.full(91, distance)) for distance in (np.inf, 4.0, 0.0))
OPTIONS = {
    "emergency.sensors": ["scan", "button Bool timeout 0"],
    "emergency.start_s": 2.0,
    "emergency.deceleration": DECELERATION,
    "emergency.odometry_timeout_ms": 1000 * TIMEOUT_S,
}


class Loop:
    """Rules of a lane, two clocks, and a vehicle that follows what is published by the stamps of its poses."""

    def __init__(self):
        self.rules = self.new_rules()
        self.now_ns, self.ros_ns = 1_000 * NS_PER_S, ROS_NS
        self.x = self.speed = 0.0
        self.published = None
        self.rules.activate(self.now_ns)

    @staticmethod
    def new_rules():
        return Emergency(node_config(OPTIONS, {}).emergency)

    def move(self, *, speed=None, x=None, stamp_ns=0):
        """Have odometry come that tells the truth, or something else; returns it."""
        speed, x = (self.speed if speed is None else speed), (self.x if x is None else x)
        said = odometry_bytes(x=x, speed=speed, stamp_ns=stamp_ns)
        self.rules.moved(said, self.now_ns)
        return said

    def see(self, *messages):
        for message in messages or [FREE]:
            self.rules.saw(SCAN, message, self.now_ns)

    def press(self, value):
        self.rules.saw(BUTTON, bool_bytes(value), self.now_ns)

    def look(self):
        """What the lane's thread does when it wakes up."""
        rules = self.rules
        rules.look_for_silence(self.now_ns)
        self.published = rules.stop_path(self.now_ns, self.ros_ns) if rules.latch and rules.active else None
        return self.published

    def pass_by(self, seconds):
        self.now_ns, self.ros_ns = (
            at_ns + round(seconds * NS_PER_S) for at_ns in (self.now_ns, self.ros_ns)
        )

    def step(self, seconds=STEP_S):
        """Let time pass: the vehicle follows the path, and the lane looks again."""
        self.pass_by(seconds)
        if self.published is not None:
            wanted = speed_at(self.published, self.ros_ns)
            self.speed += min(max(wanted - self.speed, -9.0 * seconds), 3.0 * seconds)
        self.x += self.speed * seconds
        return self.look()

    def latched(self):
        self.see(BLOCKED, BLOCKED)
        return self.look()


def speeds_of(path, ros_ns):
    """The speeds in m/s for which a path asks from a time on."""
    timed = TimedPath.read(path)
    speeds = np.hypot(*np.diff(timed.points[:, :2], axis=0).T) / np.diff(timed.stamps_ns) * NS_PER_S
    return speeds[timed.stamps_ns[1:] > ros_ns]


def speed_at(path, ros_ns):
    speeds = speeds_of(path, ros_ns)
    return float(speeds[0]) if len(speeds) else 0.0


def stands(path):
    return not speeds_of(path, 0).any()


def begin_of(path):
    timed = TimedPath.read(path)
    return float(timed.points[0, 0]), int(timed.stamps_ns[0])


@pytest.fixture
def loop():
    """At 10 m/s."""
    loop = Loop()
    loop.speed = 10.0
    loop.move()
    return loop


# -- one braking path, and then standing


@pytest.mark.parametrize("speed", [3.0, 10.0, 30.0])
def test_given_odometry_that_falls_silent_when_it_stays_so_then_the_vehicle_brakes_once_and_stands(speed):
    loop = Loop()
    loop.speed = speed
    loop.move()
    paths = []
    for _ in range(round(5 * speed / DECELERATION / STEP_S) + 100):
        loop.see()
        if (path := loop.step()) is not None and not stands(path) and path not in paths:
            paths.append(path)
    assert loop.rules.latch.kind == SILENT
    assert len(paths) == 1
    assert loop.speed == 0.0
    assert loop.x < speed * (TIMEOUT_S + 2 * STEP_S) + speed**2 / (2 * DECELERATION) + 0.5


def test_given_odometry_that_is_too_fast_for_a_moment_when_it_latches_then_the_path_does_not_begin_with_it(
    loop,
):
    loop.step(0.02)
    loop.move(speed=60.0)
    assert speed_at(loop.latched(), loop.ros_ns) == pytest.approx(10.2, abs=0.2)


def test_given_a_path_that_is_over_then_the_vehicle_stands_where_fresh_odometry_has_it_else_where_the_path_ends(
    loop,
):
    loop.latched()
    loop.step(2.0)
    end = pytest.approx(10.0**2 / (2 * DECELERATION))
    assert begin_of(loop.published) == (end, loop.ros_ns)
    loop.move(x=42.0, stamp_ns=loop.ros_ns - NS_PER_S)  # of a second ago
    loop.step(0.1)
    assert begin_of(loop.step(1.0)) == (end, loop.ros_ns)
    loop.step(0.9)
    loop.move(x=42.0, stamp_ns=loop.ros_ns)
    assert begin_of(loop.step(0.2)) == (42.0, loop.ros_ns)


def test_given_a_vehicle_that_stands_when_it_goes_on_then_each_path_holds_for_longer_than_until_the_next(
    loop,
):
    loop.latched()
    loop.step(3.0)
    for _ in range(100):
        path = TimedPath.read(loop.step())
        assert path.stamps_ns[0] <= loop.ros_ns < path.stamps_ns[-1] - 5 * NS_PER_S


@pytest.mark.parametrize("step_s", [-3600.0, -1.0, -0.3, 0.3, 1.0, 3600.0])
def test_given_a_clock_that_is_set_when_it_brakes_then_the_rest_of_the_path_is_stamped_anew(loop, step_s):
    first = loop.latched()
    loop.step(0.5)
    loop.ros_ns += round(step_s * NS_PER_S)
    path = loop.look()
    began_ns = loop.ros_ns - 500 * NS_PER_MS
    assert begin_of(path) == (begin_of(first)[0], began_ns)
    assert [int.from_bytes(path[at : at + 4], "little") for at in (4, 8)] == list(
        divmod(began_ns, NS_PER_S)
    )
    assert speed_at(path, loop.ros_ns) == pytest.approx(10.0 - 0.5 * DECELERATION, abs=0.3)


def test_given_simulated_time_that_passes_slowly_or_stands_when_it_brakes_then_the_path_lasts_by_that_time(
    loop,
):
    loop.rules.simulated = True
    first = loop.latched()
    for _ in range(20):  # 2 s, of which a fifth in the simulation
        loop.now_ns, loop.ros_ns = loop.now_ns + 100 * NS_PER_MS, loop.ros_ns + 20 * NS_PER_MS
        assert loop.look() is first
    loop.now_ns += 60 * NS_PER_S
    assert loop.look() is first
    loop.now_ns, loop.ros_ns = loop.now_ns + 100 * NS_PER_MS, loop.ros_ns - 100 * NS_PER_S  # it begins anew
    assert begin_of(loop.look())[1] == loop.ros_ns - 500 * NS_PER_MS


def test_given_a_latch_that_is_cleared_when_it_latches_again_then_the_vehicle_brakes_from_where_it_is_by_then(
    loop,
):
    loop.latched()
    for _ in range(60):
        loop.step()
        loop.move()
        loop.see()
        loop.press(False)
    assert loop.speed == 0.0
    assert loop.rules.clear(loop.now_ns) == ""
    assert loop.look() is None
    for loop.speed in (1.0, 2.0, 3.0, 4.0):
        loop.step(0.25)
        loop.move()
        loop.see()
    path = loop.latched()
    assert begin_of(path)[0] == loop.x
    assert speed_at(path, loop.ros_ns) == pytest.approx(4.0, abs=0.1)


@pytest.mark.parametrize("gone_s", [0.5, 1.6, 1.8, 60.0])
def test_given_a_lane_that_is_replaced_when_it_brakes_then_the_next_goes_on_with_the_path_or_has_it_stand(
    loop, gone_s
):
    first = loop.latched()
    loop.pass_by(gone_s)
    loop.rules = loop.new_rules()
    loop.rules.activate(loop.now_ns)
    loop.rules.resume(OBSTACLE, "scan shows a wall", first, loop.now_ns)
    assert (loop.rules.latch.kind, loop.rules.latch.reason) == (OBSTACLE, "scan shows a wall")
    loop.move(speed=20.0)
    path = loop.look()
    assert path == first if gone_s < 10.0 / DECELERATION else stands(path)
    for step in range(60):
        loop.move(speed=20.0)
        assert speed_at(loop.step(), loop.ros_ns) <= max(
            0.0, 10.3 - DECELERATION * (gone_s + step * STEP_S)
        )


@pytest.mark.parametrize("left", [None, b"", b"no path at all"])
def test_given_a_lane_that_is_replaced_without_a_path_then_the_vehicle_stands_wherever_it_is(loop, left):
    loop.rules = loop.new_rules()
    loop.rules.activate(loop.now_ns)
    loop.rules.resume(OBSTACLE, "scan shows a wall", left, loop.now_ns)
    path = loop.look()
    assert (TimedPath.read(path).frame, begin_of(path)) == (b"base_link", (0.0, loop.ros_ns))
    for _ in range(30):
        loop.move(speed=20.0, x=7.0)
        assert stands(loop.step())
    assert (TimedPath.read(loop.published).frame, begin_of(loop.published)[0]) == (b"odom", 7.0)


@pytest.mark.parametrize(
    ("speed", "odometry_comes", "ends_s"),
    [
        (10.0, True, 10.0 / DECELERATION),
        (10.0, False, 10.0),
        (30.0, False, 10.0),
        (0.0, True, 1.0),
        (80.0, False, 80.0 / DECELERATION + 1.0),
    ],
)
def test_given_a_lane_that_is_left_alone_then_it_may_end_once_the_vehicle_stands_or_has_had_time_to(
    speed, odometry_comes, ends_s
):
    loop = Loop()
    loop.speed = speed
    loop.move()
    assert not loop.rules.may_end(loop.now_ns)
    loop.look()
    loop.rules.left_alone(loop.now_ns)
    ended_s = 0.0
    while not loop.rules.may_end(loop.now_ns):
        loop.step()
        ended_s += STEP_S
        if odometry_comes:
            loop.move()
    assert ended_s == pytest.approx(ends_s, abs=0.3)
    inactive = Loop()
    inactive.rules.deactivate()
    inactive.rules.left_alone(inactive.now_ns)
    assert inactive.rules.may_end(inactive.now_ns)


# -- the invariants, in any order of events

SEQUENCES = int(os.environ.get("TORCHPERF_LANE_SEQUENCES", "60"))
ODOMETRY = ("fresh", "late", "silent", "frozen", "jumping", "noisy")
SCANS = {"free": FREE, "blocked": BLOCKED, "blind": BLIND, "silent": b""}
SLOWEST_NS, NODE_SILENT_NS = round(TIMEOUT_S * NS_PER_S), 2 * NS_PER_S


class Stopping(RuleBasedStateMachine):
    """Sensors, buttons, clocks, the node and the lane's process do what they can.

    A vehicle follows what comes out.

    What is known beside the rules: how the vehicle really moves, and what each topic said last, and when.
    """

    @initialize(speed=st.floats(0.0, 30.0))
    def begin(self, speed):
        self.loop = Loop()
        self.loop.speed = speed
        self.frozen = self.loop.move()
        self.good = {}  # when each topic last reported that all is well, None if it later reported that it is not
        self.button = None  # its last message, as far as this lane's process can know
        self.beat_ns = None
        self.is_alone = False
        self.unlatched()

    def unlatched(self):
        self.latch = self.stood_at = None
        self.asked = math.inf  # the most that the path before asks for from now on
        self.braked_s = 0.0

    # -- what goes on

    @rule(
        seconds=st.floats(0.05, 2.5),
        odometry=st.sampled_from(ODOMETRY),
        scans=st.sampled_from(list(SCANS)),
        beats=st.booleans(),
        wild=st.floats(-60.0, 60.0),
    )
    def drive(self, seconds, odometry, scans, beats, wild):
        for _ in range(round(seconds / STEP_S)):
            self.loop.step()
            if self.loop.published is not None:
                self.braked_s += STEP_S
            self.odometry(odometry, wild)
            self.scan(scans)
            if beats and not self.is_alone:
                self.beat()
            self.holds()

    def odometry(self, kind, wild):
        loop = self.loop
        if kind == "silent":
            return
        if kind == "fresh":
            self.frozen = loop.move(stamp_ns=loop.ros_ns)
        elif kind == "late":
            loop.move(speed=abs(wild), stamp_ns=loop.ros_ns - 3 * NS_PER_S)
        elif kind == "frozen":
            loop.rules.moved(self.frozen, loop.now_ns)
        elif kind == "jumping":
            loop.move(speed=wild, x=loop.x + wild, stamp_ns=loop.ros_ns)
        else:
            loop.move(speed=loop.speed + wild / 60, stamp_ns=loop.ros_ns)
        self.good["odom"] = loop.now_ns

    def scan(self, kind):
        if kind != "silent":
            self.loop.see(SCANS[kind])
            self.good["scan"] = self.loop.now_ns if kind == "free" and self.loop.rules.active else None

    def beat(self):
        self.beat_ns = self.loop.now_ns
        self.loop.rules.beat(self.beat_ns)

    @rule(value=st.booleans(), copies=st.integers(0, 2))
    def press(self, value, copies):
        """The same message may come by several subscriptions."""
        self.loop.press(value)
        for _ in range(copies):
            self.loop.rules.saw(BUTTON, bool_bytes(value), self.loop.now_ns, again=True)
        self.button = value

    @precondition(lambda self: self.latch is None and not self.is_alone)
    @rule(speed=st.floats(0.0, 30.0))
    def go_on(self, speed):
        self.loop.speed = speed

    @rule(seconds=st.one_of(st.floats(-5.0, 5.0), st.floats(-1e6, 1e6)))
    def set_clock(self, seconds):
        self.loop.ros_ns += round(seconds * NS_PER_S)

    @precondition(lambda self: not self.is_alone)
    @rule()
    def deactivate(self):
        self.loop.rules.deactivate()
        self.beat_ns = None

    @precondition(lambda self: not self.is_alone)
    @rule()
    def activate(self):
        self.loop.rules.activate(self.loop.now_ns)
        self.began()

    def began(self):
        """A lane watches from now on; a button that is pressed latches at once."""
        self.beat()
        self.good = {}
        if self.button:
            assert self.loop.rules.latch is not None

    @precondition(lambda self: not self.is_alone)
    @rule(seconds=st.floats(0.0, 12.0))
    def replace_lane(self, seconds):
        """Its process dies; the node starts another one, and sets it up as `EmergencyLane` does."""
        loop, old, area = self.loop, self.loop.rules, self.loop.published
        loop.pass_by(seconds)
        if area is not None:  # with which the last stage's frames are answered meanwhile
            loop.speed = max(0.0, loop.speed - 9.0 * seconds)
            self.braked_s += seconds
        new = loop.rules = loop.new_rules()
        new.pressed([sensor.topic for sensor in old.sensors if sensor.pressed])
        self.button = self.button or None  # what it says meanwhile is lost
        if old.active:
            new.activate(loop.now_ns)
            self.began()
        if old.latch is not None:
            new.resume(old.latch.kind, old.latch.reason, area, loop.now_ns)
            self.latch = new.latch

    @precondition(lambda self: not self.is_alone)
    @rule()
    def end_node(self):
        """It dies; an active lane stops the vehicle."""
        if self.loop.rules.active:
            self.loop.rules.left_alone(self.loop.now_ns)
            self.is_alone = True
            assert self.loop.rules.latch is not None

    @rule(seconds=st.floats(0.0, 100.0))
    def restart_node(self, seconds):
        """Another node of the same name comes up, inactive.

        It knows what the one before it has left on disk.
        """
        loop, latch = self.loop, self.loop.rules.latch
        loop.pass_by(seconds)
        loop.speed = max(0.0, loop.speed - 9.0 * seconds)
        loop.published = None
        loop.rules = loop.new_rules()
        if latch is not None:
            loop.rules.resume(latch.kind, latch.reason, None, loop.now_ns)
        self.latch, self.is_alone, self.button, self.beat_ns, self.good = (
            loop.rules.latch,
            False,
            None,
            None,
            {},
        )

    @rule()
    def clear(self):
        loop, rules, latch = self.loop, self.loop.rules, self.loop.rules.latch
        why = rules.clear(loop.now_ns)
        assert (rules.latch is latch) == (latch is None or why != "")
        if latch is None or why:
            return
        assert not self.is_alone
        assert not self.button
        assert self.button is False or not (rules.active or latch.kind == TRIGGER)
        if rules.active:
            ages_ns = [loop.now_ns - (self.good.get(topic) or 0) for topic in ("scan", "odom")]
            assert max(ages_ns) < SLOWEST_NS
            assert self.beat_ns is None or loop.now_ns - self.beat_ns < NODE_SILENT_NS
        self.unlatched()
        loop.published = None

    # -- what holds

    @invariant()
    def holds(self):
        loop = self.loop
        path, latch = loop.look(), loop.rules.latch
        assert self.latch is None or latch is self.latch  # it stays until a granted `clear`
        self.latch = latch
        assert (
            latch
            or not loop.rules.active
            or self.beat_ns is None
            or loop.now_ns - self.beat_ns < NODE_SILENT_NS
        )
        if path is None:
            return
        speeds = speeds_of(path, loop.ros_ns)
        asks = float(speeds.max(initial=0.0))
        assert len(speeds)  # it says for later, too, what to do
        assert asks <= self.asked * (1 + 2 / 40)  # the same path, which is looked at in steps of a fortieth
        self.asked = min(self.asked, asks)
        assert asks == 0.0 or self.braked_s <= 60.0 / DECELERATION + STEP_S
        if self.stood_at is None and asks == loop.speed == 0.0:
            self.stood_at = loop.x
        assert self.stood_at in {None, loop.x}
        assert self.stood_at is None or asks == loop.speed == 0.0


TestStopping = Stopping.TestCase
TestStopping.settings = settings(max_examples=SEQUENCES, stateful_step_count=20)
