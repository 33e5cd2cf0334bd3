import math

import pytest
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.core.config import stage_config
from torchperf_ros.core.frame import Frame, Origin
from torchperf_ros.core.outcome import Fallback
from torchperf_ros.supervise.fallback_outputs import FallbackOutputs

MS = 1_000_000
PATH = "nav_msgs/msg/Path"
STORE = get_typestore(Stores.ROS2_HUMBLE)


def frame(seq, received_ns=0, stamp_ns=0):
    return Frame(seq, b"", stamp_ns, math.nan, received_ns, 0, Origin(0, math.nan))


def path(count=2):
    types = STORE.types
    header = types["std_msgs/msg/Header"](stamp=types["builtin_interfaces/msg/Time"](1, 0), frame_id="map")
    pose = types["geometry_msgs/msg/Pose"](
        types["geometry_msgs/msg/Point"](0.0, 0.0, 0.0), types["geometry_msgs/msg/Quaternion"](0.0, 0.0, 0.0, 1.0)
    )
    poses = [types["geometry_msgs/msg/PoseStamped"](header, pose)] * count
    return bytes(STORE.serialize_cdr(types[PATH](header, poses), PATH))


@pytest.fixture
def config():
    return stage_config("planning", {"hold_last_ms": 100.0})


def prepared(outputs, config, at_ms=200, output_type=PATH):
    outputs.prepare(config, output_type, at_ms * MS, 10**18)
    return outputs.choose(config, at_ms * MS)


def test_given_nothing_to_hold_when_chosen_then_there_is_nothing(config):
    outputs = FallbackOutputs()
    assert prepared(outputs, config) is Fallback.NONE
    assert outputs.payload(Fallback.HOLD_LAST) is None
    assert outputs.payload(Fallback.STOP) is None
    assert outputs.stamp_ns == 0


def test_given_a_good_output_when_young_enough_then_it_is_held_and_else_a_stop_is_made_of_it(config):
    outputs = FallbackOutputs()
    outputs.remember(path(), frame(0, stamp_ns=77))
    assert prepared(outputs, config, at_ms=100) is Fallback.HOLD_LAST
    assert outputs.payload(Fallback.HOLD_LAST) == path()
    assert outputs.payload(Fallback.STOP) is None
    assert prepared(outputs, config, at_ms=101) is Fallback.STOP
    assert STORE.deserialize_cdr(outputs.payload(Fallback.STOP), PATH).header.frame_id == "map"
    assert outputs.stamp_ns == 77


def test_given_a_stop_when_prepared_again_then_it_is_the_same_until_a_newer_output_comes(config):
    outputs = FallbackOutputs()
    outputs.remember(path(), frame(0))
    prepared(outputs, config)
    first = outputs.payload(Fallback.STOP)
    outputs.prepare(config, PATH, 300 * MS, 2 * 10**18)
    assert outputs.payload(Fallback.STOP) is first
    outputs.remember(path(), frame(1))
    assert outputs.payload(Fallback.STOP) is None


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
    outputs.remember(path(), good)
    outputs.prepare(config, PATH, 200 * MS, ros_now_ms * MS)
    stop = STORE.deserialize_cdr(outputs.payload(Fallback.STOP), PATH)
    first = stop.poses[0].header.stamp
    assert first.sec * 1000 + first.nanosec / MS == begins_ms
