import itertools
import math

import pytest
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.config.config import stage_config
from torchperf_ros.frame.frame import Frame, Origin
from torchperf_ros.frame.outcome import Fallback
from torchperf_ros.stage.fallback_outputs import FallbackOutputs

MS = 1_000_000
PATH = "nav_msgs/msg/Path"
STORE = get_typestore(Stores.ROS2_HUMBLE)


def frame(seq, received_ns=0, stamp_ns=0):
    return Frame(seq, b"", stamp_ns, math.nan, received_ns, 0, Origin(0, math.nan))


def path(count=31, start_ms=0, step_ms=100):
    """Poses that are 1 m apart."""
    types = STORE.types

    def header(at_ms):
        at_ns = round(at_ms * MS)
        return types["std_msgs/msg/Header"](
            stamp=types["builtin_interfaces/msg/Time"](at_ns // (1000 * MS), at_ns % (1000 * MS)), frame_id="map"
        )

    poses = [
        types["geometry_msgs/msg/PoseStamped"](
            header(start_ms + number * step_ms),
            types["geometry_msgs/msg/Pose"](
                types["geometry_msgs/msg/Point"](float(number), 0.0, 0.0),
                types["geometry_msgs/msg/Quaternion"](0.0, 0.0, 0.0, 1.0),
            ),
        )
        for number in range(count)
    ]
    return bytes(STORE.serialize_cdr(types[PATH](header(start_ms), poses), PATH))


@pytest.fixture
def config():
    return stage_config("planning", {"hold_last_ms": 100.0})


def prepared(outputs, config, at_ms=200, output_type=PATH):
    outputs.prepare(config, output_type, at_ms * MS, at_ms * MS)
    return outputs.choose(config, at_ms * MS)


def test_given_nothing_to_hold_when_chosen_then_there_is_nothing(config):
    outputs = FallbackOutputs()
    assert prepared(outputs, config) is Fallback.NONE
    assert outputs.payload(Fallback.HOLD_LAST) is None
    assert outputs.payload(Fallback.STOP) is None
    assert outputs.frame is None


def test_given_a_good_output_when_young_enough_then_it_is_held_and_else_a_stop_is_made_of_it(config):
    outputs = FallbackOutputs()
    outputs.remember(path(), frame(0, stamp_ns=77))
    assert prepared(outputs, config, at_ms=100) is Fallback.HOLD_LAST
    assert outputs.payload(Fallback.HOLD_LAST) == path()
    assert outputs.payload(Fallback.STOP) is None
    assert prepared(outputs, config, at_ms=101) is Fallback.STOP
    assert STORE.deserialize_cdr(outputs.payload(Fallback.STOP), PATH).header.frame_id == "map"
    assert outputs.frame.stamp_ns == 77


def test_given_a_failure_that_outlasts_path_and_braking_when_answered_then_the_one_stop_is_kept(config):
    outputs = FallbackOutputs()
    outputs.remember(path(), frame(0))
    assert prepared(outputs, config) is Fallback.STOP
    first = outputs.payload(Fallback.STOP)
    for at_ms in (233, 1000, 3001, 3_600_000):
        assert prepared(outputs, config, at_ms=at_ms) is Fallback.STOP
        assert outputs.payload(Fallback.STOP) is first


def test_given_a_stop_when_results_come_late_then_the_vehicle_keeps_to_it_until_a_frame_is_answered(config):
    outputs = FallbackOutputs()
    outputs.remember(path(), frame(0, stamp_ns=77))
    prepared(outputs, config)
    first = outputs.payload(Fallback.STOP)
    outputs.remember(path(start_ms=100), frame(1, received_ns=50 * MS, stamp_ns=78), late=True)
    assert prepared(outputs, config, at_ms=233) is Fallback.STOP
    assert outputs.payload(Fallback.STOP) is first
    assert outputs.frame.stamp_ns == 77
    outputs.remember(path(start_ms=200), frame(2, received_ns=233 * MS, stamp_ns=79))
    assert outputs.payload(Fallback.STOP) is None
    assert prepared(outputs, config, at_ms=400) is Fallback.STOP
    assert outputs.payload(Fallback.STOP) != first
    assert outputs.frame.stamp_ns == 79


def test_given_a_stop_when_a_late_result_is_young_enough_to_be_held_then_the_next_failure_brakes_anew(config):
    outputs = FallbackOutputs()
    outputs.remember(path(), frame(0))
    prepared(outputs, config)
    first = outputs.payload(Fallback.STOP)
    outputs.remember(path(start_ms=100), frame(1, received_ns=190 * MS), late=True)
    assert prepared(outputs, config, at_ms=233) is Fallback.HOLD_LAST
    assert prepared(outputs, config, at_ms=300) is Fallback.STOP
    assert outputs.payload(Fallback.STOP) != first


def test_given_a_stop_that_was_made_but_not_needed_when_a_late_result_comes_then_the_next_is_made_of_that(config):
    outputs = FallbackOutputs()
    outputs.remember(path(), frame(0))
    outputs.prepare(config, PATH, 200 * MS, 200 * MS)
    first = outputs.payload(Fallback.STOP)
    outputs.remember(path(start_ms=100), frame(1, received_ns=50 * MS), late=True)
    assert outputs.payload(Fallback.STOP) is None
    assert prepared(outputs, config) is Fallback.STOP
    assert outputs.payload(Fallback.STOP) != first


@pytest.mark.parametrize(
    ("step_ms", "at_ms"), [(0, 200), (-100, 200), (100, 3001), (100, 600_000)], ids=["none", "back", "over", "old"]
)
def test_given_a_path_that_does_not_say_where_the_vehicle_is_now_then_there_is_no_stop(config, step_ms, at_ms):
    outputs = FallbackOutputs()
    outputs.remember(path(step_ms=step_ms), frame(0))
    assert prepared(outputs, config, at_ms=at_ms) is Fallback.NONE
    assert outputs.payload(Fallback.STOP) is None


def test_given_a_path_that_begins_later_when_its_time_comes_then_a_stop_is_made(config):
    outputs = FallbackOutputs()
    outputs.remember(path(start_ms=220), frame(0))
    assert prepared(outputs, config, at_ms=200) is Fallback.NONE
    assert prepared(outputs, config, at_ms=233) is Fallback.STOP


def test_given_outputs_when_forgotten_then_neither_they_nor_late_ones_of_earlier_frames_are_held(config):
    outputs = FallbackOutputs()
    outputs.remember(path(), frame(0))
    prepared(outputs, config)
    outputs.forget(210 * MS)
    outputs.remember(path(), frame(1, received_ns=190 * MS), late=True)
    assert prepared(outputs, config, at_ms=220) is Fallback.NONE
    assert outputs.frame is None
    outputs.remember(path(), frame(2, received_ns=215 * MS))
    assert prepared(outputs, config, at_ms=220) is Fallback.HOLD_LAST


def test_given_a_late_output_when_a_newer_one_is_held_then_the_newer_one_stays(config):
    outputs = FallbackOutputs()
    outputs.remember(b"newer", frame(5))
    outputs.remember(b"older", frame(4))
    outputs.remember(b"again", frame(5))
    assert outputs.payload(Fallback.HOLD_LAST) == b"newer"


@pytest.mark.parametrize(
    ("payload", "output_type"),
    [(path(0), PATH), (b"\x00\x01\x00\x00\xff", PATH), (path(), "vision_msgs/msg/Detection3DArray")],
)
def test_given_an_output_that_no_stop_can_be_made_of_when_chosen_then_there_is_none(config, payload, output_type):
    outputs = FallbackOutputs()
    outputs.remember(payload, frame(0))
    assert prepared(outputs, config, output_type=output_type) is Fallback.NONE
    assert outputs.payload(Fallback.STOP) is None


def test_given_a_stage_without_stop_when_prepared_then_none_is_made():
    outputs = FallbackOutputs()
    outputs.remember(path(), frame(0))
    config = stage_config("planning", {"hold_last_ms": 1.0, "fallback": ["hold_last"]})
    assert prepared(outputs, config) is Fallback.NONE
    assert outputs.payload(Fallback.STOP) is None


@pytest.mark.parametrize(
    ("ros_now_ms", "begins_ms"),
    [
        (100_300, 100_300),
        (0, 100_250),  # before the first /clock
        (1_700_000_000_000, 100_250),  # a log that is played without a /clock
    ],
)
def test_given_ros_time_when_it_is_none_of_the_output_s_own_then_braking_begins_where_its_stamp_says(
    config, ros_now_ms, begins_ms
):
    outputs = FallbackOutputs()
    good = frame(0, received_ns=0, stamp_ns=100_000 * MS)
    good.age_ms = 50.0
    outputs.remember(path(start_ms=100_000), good)
    outputs.prepare(config, PATH, 200 * MS, ros_now_ms * MS)
    stop = STORE.deserialize_cdr(outputs.payload(Fallback.STOP), PATH)
    first = stop.poses[0].header.stamp
    assert first.sec * 1000 + first.nanosec / MS == begins_ms


BEST = ("backup", "hold_last", "stop")


@pytest.mark.parametrize("order", [*itertools.permutations(BEST), ("none", "hold_last"), ("stop",), ()])
@pytest.mark.parametrize("backup", [True, False])
@pytest.mark.parametrize(("at_ms", "hold_ms"), [(300, 300.0), (301, 300.0)])
def test_given_any_order_when_chosen_then_the_first_that_is_available_wins(order, backup, at_ms, hold_ms):
    outputs, config = FallbackOutputs(), stage_config("planning", {"hold_last_ms": hold_ms, "fallback": list(order)})
    outputs.remember(path(), frame(0))
    outputs.prepare(config, PATH, at_ms * MS, at_ms * MS)
    chosen = outputs.choose(config, at_ms * MS, backup=backup).word
    available = {"backup": backup, "hold_last": at_ms <= hold_ms, "none": True}
    stops = next((kind for kind in order if available.get(kind, kind == "stop")), "none")
    assert chosen == stops
