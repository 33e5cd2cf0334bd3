"""Messages that take the decoder seconds: they cost their frame, and no worker."""

import struct

import pytest

from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.messages import decode, empty_message, encode
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.worker.preparation import TimeLimit

from ..stage.conftest import wait_until

JOINTS = "sensor_msgs/msg/JointState"
LARGEST_BYTES = 64 << 20


def many_names(count):
    """The CDR bytes of a message that lists so many empty names, a multiple of eight, and an eighth of efforts.

    rosbags takes a list only where five bytes for each of its texts follow.
    """
    header = b"\0\1\0\0" + struct.pack("<iII4x", 1, 0, 1)
    names = struct.pack("<I", count) + bytes(4 * count)
    return header + names + struct.pack("<III", 0, 0, count // 8) + bytes(count)


def test_given_a_message_of_few_bytes_in_the_form_of_the_large_one_when_decoded_then_it_lists_names():
    assert decode(many_names(1000), JOINTS).name == [""] * 1000


def test_given_a_decoder_that_takes_too_long_when_its_time_is_over_then_it_is_bad_input_and_the_next_is_good():
    limit, data = TimeLimit(50.0), many_names(8_000_000)
    for _ in range(2):
        with pytest.raises(
            BadInput, match="took longer than 50 ms, half of hang_ms: their lists are too long"
        ):
            limit.call(decode, data, JOINTS)
        assert decode(many_names(1000), JOINTS).name


def test_given_a_message_that_takes_longer_than_a_hang_when_it_comes_then_its_workers_live_and_serve(
    start_own_stage,
):
    stage = start_own_stage(
        adapter="Joints", backup="standby", budget_ms=900.0, hang_ms=2000.0, max_frame_bytes=LARGEST_BYTES
    )
    pids, pool = stage.pids, stage.actor.pool
    answer = stage.ask(data=many_names(8_000_000))
    assert answer.outcome in {Outcome.LATE, Outcome.BAD_INPUT}
    wait_until(lambda: all(worker.idle for worker in pool.workers), lambda: pool.progress)
    good = bytes(encode(empty_message(JOINTS), JOINTS))
    assert stage.ask(data=good).outcome is Outcome.ON_TIME
    assert (stage.pids, pool.restarts) == (pids, 0)
