import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from torchperf_ros.api.messages import empty_message, encode, header
from torchperf_ros.api.outcome import Fallback
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.config import stage_config
from torchperf_ros.stage.fallbacks import FallbackOutputs
from torchperf_ros.stage.frame import Frame, Origin

from .conftest import MS, STORE

PATH = "nav_msgs/msg/Path"


def frame(seq, received_ns=0, stamp_ns=0):
    return Frame(seq, b"", stamp_ns, math.nan, received_ns, 0, Origin(0, math.nan))


def path(count=31, start_ms=0, step_ms=100):
    """Poses that are 1 m apart."""
    stamps_ns = (start_ms + np.arange(count) * step_ms) * MS
    points = np.arange(float(count))[:, None] * (1.0, 0.0, 0.0)
    return TimedPath.made(stamps_ns, points, np.zeros(count), b"map").bytes()


@pytest.fixture
def config():
    return stage_config("planning", {"hold_last_ms": 100.0})


def prepared(outputs, config, at_ms=200, output_type=PATH):
    outputs.prepare(config, output_type, at_ms * MS, at_ms * MS)
    return outputs.choose(config, at_ms * MS)


MARKERS = "visualization_msgs/msg/MarkerArray"


def markers(*stamps_ns):
    made = [
        empty_message("visualization_msgs/msg/Marker", header=header(stamp_ns, "map"))
        for stamp_ns in stamps_ns
    ]
    return bytes(encode(empty_message(MARKERS, markers=made), MARKERS))


def number():
    return bytes(encode(empty_message("std_msgs/msg/Float64", data=5.0), "std_msgs/msg/Float64"))


@pytest.fixture
def outputs():
    return FallbackOutputs()


@pytest.mark.parametrize(
    ("kind", "payload", "stamp_ns", "words"),
    [
        (PATH, path(start_ms=2000), 2000 * MS, ""),
        (PATH, path(start_ms=2000), 0, ""),  # the frame has none that the output could keep
        (
            PATH,
            path(),
            2000 * MS,
            "an output has the stamp 0: `postprocess` has to give it its frame's header.stamp",
        ),
        (PATH, path(start_ms=3500), 2000 * MS, "an output is stamped +1.500 s off: `postprocess`"),
        (MARKERS, markers(2000 * MS, 0), 2000 * MS, ""),
        (MARKERS, markers(0), 2000 * MS, "an output has the stamp 0"),
        (MARKERS, markers(), 2000 * MS, ""),
        ("std_msgs/msg/Float64", number(), 2000 * MS, ""),
        ("", path(), 2000 * MS, ""),
    ],
)
def test_given_a_good_output_when_its_stamp_is_looked_at_then_it_has_to_be_its_frame_s(
    outputs, kind, payload, stamp_ns, words
):
    assert outputs.stamp_problem(kind) == ""
    outputs.remember(payload, frame(1, stamp_ns=stamp_ns))
    assert outputs.stamp_problem(kind).startswith(words)
    assert bool(words) == bool(outputs.stamp_problem(kind))


def test_given_nothing_to_hold_when_chosen_then_there_is_nothing(outputs, config):
    assert prepared(outputs, config) is Fallback.NONE
    assert outputs.payload(Fallback.HOLD_LAST) is None
    assert outputs.payload(Fallback.STOP) is None
    assert outputs.frame is None


def test_given_a_good_output_when_young_enough_then_it_is_held_and_else_a_stop_is_made_of_it(
    outputs, config
):
    outputs.remember(path(), frame(0, stamp_ns=77))
    assert prepared(outputs, config, at_ms=100) is Fallback.HOLD_LAST
    assert outputs.payload(Fallback.HOLD_LAST) == path()
    assert outputs.payload(Fallback.STOP) is None
    assert prepared(outputs, config, at_ms=101) is Fallback.STOP
    assert STORE.deserialize_cdr(outputs.payload(Fallback.STOP), PATH).header.frame_id == "map"
    assert outputs.frame.stamp_ns == 77


def test_given_a_stop_when_results_come_late_then_the_vehicle_keeps_to_it_until_a_frame_is_answered(
    outputs, config
):
    outputs.remember(path(), frame(0, stamp_ns=77))
    prepared(outputs, config)
    first = outputs.payload(Fallback.STOP)
    outputs.remember(path(start_ms=100), frame(1, received_ns=50 * MS, stamp_ns=78), late=True)
    outputs.remember(path(start_ms=201), frame(2, received_ns=201 * MS, stamp_ns=78), late=True)
    assert prepared(outputs, config, at_ms=333) is Fallback.STOP
    assert outputs.payload(Fallback.STOP) is first
    assert outputs.frame.stamp_ns == 77
    outputs.remember(path(start_ms=100), frame(3, received_ns=333 * MS, stamp_ns=79))
    assert outputs.payload(Fallback.STOP) is None
    assert prepared(outputs, config, at_ms=500) is Fallback.STOP
    assert outputs.payload(Fallback.STOP) != first
    assert outputs.frame.stamp_ns == 79


def test_given_a_stop_when_a_late_result_is_young_enough_to_be_held_then_the_next_failure_brakes_anew(
    outputs, config
):
    outputs.remember(path(), frame(0))
    prepared(outputs, config)
    first = outputs.payload(Fallback.STOP)
    outputs.remember(path(start_ms=200), frame(1, received_ns=201 * MS), late=True)
    assert prepared(outputs, config, at_ms=233) is Fallback.HOLD_LAST
    assert prepared(outputs, config, at_ms=302) is Fallback.STOP
    assert outputs.payload(Fallback.STOP) != first


def test_given_a_stop_that_was_made_but_not_needed_when_a_late_result_comes_then_the_next_is_made_of_that(
    outputs, config
):
    outputs.remember(path(), frame(0))
    outputs.prepare(config, PATH, 200 * MS, 200 * MS)
    first = outputs.payload(Fallback.STOP)
    outputs.remember(path(start_ms=100), frame(1, received_ns=50 * MS), late=True)
    assert outputs.payload(Fallback.STOP) is None
    assert prepared(outputs, config) is Fallback.STOP
    assert outputs.payload(Fallback.STOP) != first


def test_given_a_path_that_begins_later_when_its_time_comes_then_a_stop_is_made(outputs, config):
    outputs.remember(path(start_ms=220), frame(0))
    assert prepared(outputs, config, at_ms=200) is Fallback.NONE
    assert prepared(outputs, config, at_ms=233) is Fallback.STOP


def test_given_outputs_when_forgotten_then_neither_they_nor_late_ones_of_earlier_frames_are_held(
    outputs, config
):
    outputs.remember(path(), frame(0))
    prepared(outputs, config)
    outputs.forget(210 * MS)
    outputs.remember(path(), frame(1, received_ns=190 * MS), late=True)
    assert prepared(outputs, config, at_ms=220) is Fallback.NONE
    assert outputs.frame is None
    outputs.remember(path(), frame(2, received_ns=215 * MS))
    assert prepared(outputs, config, at_ms=220) is Fallback.HOLD_LAST


def test_given_a_late_output_when_a_newer_one_is_held_then_the_newer_one_stays(outputs, config):
    outputs.remember(b"newer", frame(5))
    outputs.remember(b"older", frame(4))
    outputs.remember(b"again", frame(5))
    assert outputs.payload(Fallback.HOLD_LAST) == b"newer"


@pytest.mark.parametrize(
    ("payload", "asked", "own"),
    [
        (path(step_ms=0), {}, {}),
        (path(step_ms=-100), {}, {}),
        (path(), {"at_ms": 3001}, {}),
        (path(), {"at_ms": 600_000}, {}),
        (bytes(encode(empty_message(PATH), PATH)), {}, {}),
        (b"\x00\x01\x00\x00\xff", {}, {}),
        (path(), {"output_type": "vision_msgs/msg/Detection3DArray"}, {}),
        (path(), {}, {"hold_last_ms": 1.0, "fallback": ["hold_last"]}),
    ],
    ids=[
        "at one time",
        "back in time",
        "over",
        "old",
        "no poses",
        "damaged",
        "no path",
        "stage without stop",
    ],
)
def test_given_an_output_that_no_stop_can_be_made_of_when_chosen_then_there_is_none(
    outputs, payload, asked, own
):
    outputs.remember(payload, frame(0))
    config = stage_config("planning", {"hold_last_ms": 100.0, **own})
    assert prepared(outputs, config, **asked) is Fallback.NONE
    assert outputs.payload(Fallback.STOP) is None


@pytest.mark.parametrize(
    ("age_ms", "ros_now_ms"),
    [
        (50.0, 0),  # a /clock that has ended
        (math.nan, 0),  # before the first /clock
        (1.6e12, 1_700_000_000_000),  # a log that is played without a /clock
    ],
)
def test_given_a_frame_in_no_ros_time_when_a_stop_is_made_then_it_is_stamped_in_the_frames_own(
    outputs, config, age_ms, ros_now_ms
):
    good = frame(0, received_ns=0, stamp_ns=100_000 * MS)
    good.age_ms = age_ms
    outputs.remember(path(start_ms=100_000), good)
    outputs.prepare(config, PATH, 200 * MS, ros_now_ms * MS)
    begins_ms, x = begin_of(outputs.payload(Fallback.STOP))
    assert begins_ms == 100_200 + (50 if age_ms == 50.0 else 0)
    assert x == pytest.approx((begins_ms - 100_000) / 100)


def begin_of(payload):
    """Stamp in ms and x in m of a path's first pose."""
    first = STORE.deserialize_cdr(payload, PATH).poses[0]
    return first.header.stamp.sec * 1000 + first.header.stamp.nanosec / MS, first.pose.position.x


steps_ms = st.one_of(
    st.just(0), st.integers(-20, 20), st.integers(-12_000, 12_000), st.integers(-(10**9), 10**9)
)


@settings(max_examples=300)
@given(
    stamped=st.booleans(),
    age_ms=st.integers(0, 200),
    since_ms=st.integers(101, 1500),
    before_ms=steps_ms,
    gone_ms=st.integers(1, 3000),
    later_ms=steps_ms,
)
def test_given_any_step_of_the_system_clock_before_or_during_a_stop_then_place_and_braking_are_the_same(
    stamped, age_ms, since_ms, before_ms, gone_ms, later_ms
):
    config = stage_config("planning", {"hold_last_ms": 100.0})
    start_ms = 1_700_000_000_000
    outputs, received_ms = FallbackOutputs(), 5000
    good = frame(0, received_ns=received_ms * MS, stamp_ns=start_ms * MS if stamped else 0)
    good.age_ms, good.received_ros_ns = age_ms if stamped else math.nan, (start_ms + age_ms) * MS
    outputs.remember(path(start_ms=start_ms), good)
    now_ms = received_ms + since_ms
    ros_ms = start_ms + age_ms + since_ms + before_ms
    outputs.prepare(config, PATH, now_ms * MS, ros_ms * MS)
    assert outputs.choose(config, now_ms * MS) is Fallback.STOP
    first = STORE.deserialize_cdr(outputs.payload(Fallback.STOP), PATH)
    begins_ms, x = begin_of(outputs.payload(Fallback.STOP))
    assert begins_ms == ros_ms
    assert x == pytest.approx((age_ms + since_ms) / 100)
    assert first.poses[-1].pose.position.x == pytest.approx(x + 100 / (2 * config.stop_deceleration))
    outputs.prepare(config, PATH, (now_ms + gone_ms) * MS, (ros_ms + gone_ms + later_ms) * MS)
    assert outputs.choose(config, (now_ms + gone_ms) * MS) is Fallback.STOP
    moved_ms = begin_of(outputs.payload(Fallback.STOP))[0] - begins_ms
    # A clock that gains no more than the time that has passed may be one that runs fast, as in a
    # simulation.
    assert moved_ms == (later_ms if abs(later_ms) > gone_ms + 5 else 0)
    again = STORE.deserialize_cdr(outputs.payload(Fallback.STOP), PATH)
    assert [one.pose.position.x for one in again.poses] == [one.pose.position.x for one in first.poses]


class FailingStage(RuleBasedStateMachine):
    """A stage that fails as it likes, and a vehicle that follows what it publishes, at 10 m/s or less.

    Its planner leads on from where the vehicle was when the frame was received, at the speed that it had
    then.
    """

    def __init__(self):
        super().__init__()
        self.config = stage_config("planning", {"hold_last_ms": 700.0})
        self.outputs, self.now_ms, self.step_ms = FallbackOutputs(), 1000, 0
        self.speed, self.frames = 10.0, []
        self.stop = None  # what goes out: its points, when it was made and its first speed
        self.most = 10.0  # the speed when a stop was made last
        self.receive()

    @property
    def ros_ns(self):
        return (self.now_ms + 1_700_000_000_000 + self.step_ms) * MS

    @rule()
    def receive(self):
        made = frame(len(self.frames), received_ns=self.now_ms * MS, stamp_ns=self.ros_ns)
        made.age_ms, x = 0.0, self.speed * np.arange(31) * 0.1
        stamps = self.ros_ns + np.arange(31) * 100 * MS
        plan = TimedPath.made(stamps, np.stack((x, 0 * x, 0 * x), axis=1), 0 * x, b"map")
        self.frames.append((plan.bytes(), made, self.speed))

    @rule()
    def answers_in_time(self):
        data, made, self.speed = self.frames[-1]
        self.outputs.remember(data, made)
        self.stop = None
        self.most = 10.0

    @rule(back=st.integers(0, 3))
    def answers_late(self, back):
        self.outputs.remember(*self.frames[max(len(self.frames) - 1 - back, 0)][:2], late=True)

    @rule(ms=st.one_of(st.integers(1, 60), st.integers(1, 900)))
    def waits(self, ms):
        self.now_ms += ms
        if self.stop is not None:
            _, made_ms, first = self.stop
            self.speed = max(first - self.config.stop_deceleration * (self.now_ms - made_ms) / 1000, 0.0)

    @rule(ms=st.integers(-20_000, 20_000))
    def clock_steps(self, ms):
        self.step_ms += ms

    @rule()
    def fails(self):
        self.outputs.prepare(self.config, PATH, self.now_ms * MS, self.ros_ns)
        chosen = self.outputs.choose(self.config, self.now_ms * MS)
        if chosen is not Fallback.STOP:
            if chosen is Fallback.HOLD_LAST:
                self.speed = next(speed for _, made, speed in self.frames if made is self.outputs.frame)
            assert (
                self.stop is None or chosen is Fallback.HOLD_LAST
            )  # it goes on for as long as the stage fails
            self.stop = None
            return
        stop = TimedPath.read(self.outputs.payload(Fallback.STOP))
        assert stop.points[-1, 0] - stop.points[-2, 0] < 0.02  # it ends at standstill
        if self.stop is not None:
            assert stop.points == pytest.approx(self.stop[0])
            return
        first = stop.speed_at(int(stop.stamps_ns[0]))
        assert first <= self.most + 1e-6
        assert first <= self.speed + 1e-6
        self.stop, self.most = (stop.points, self.now_ms, first), self.speed


TestFailingStage = FailingStage.TestCase
TestFailingStage.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


BEST = ("backup", "hold_last", "stop")


@pytest.mark.parametrize("order", [*itertools.permutations(BEST), ("none", "hold_last"), ("stop",), ()])
@pytest.mark.parametrize("backup", [True, False])
@pytest.mark.parametrize(("at_ms", "hold_ms"), [(300, 300.0), (301, 300.0)])
def test_given_any_order_when_chosen_then_the_first_that_is_available_wins(order, backup, at_ms, hold_ms):
    outputs, config = (
        FallbackOutputs(),
        stage_config("planning", {"hold_last_ms": hold_ms, "fallback": list(order)}),
    )
    outputs.remember(path(), frame(0))
    outputs.prepare(config, PATH, at_ms * MS, at_ms * MS)
    chosen = outputs.choose(config, at_ms * MS, backup=backup).word
    available = {"backup": backup, "hold_last": at_ms <= hold_ms, "none": True}
    stops = next((kind for kind in order if available.get(kind, kind == "stop")), "none")
    assert chosen == stops
