"""Messages that take the decoder seconds: they cost their frame, and no worker."""

import struct

import pytest
import torch

from torchperf_ros.api.adapter import open_adapter
from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.messages import decode, empty_message, encode
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.worker.preparation import TimeLimit
from torchperf_ros.worker.reports import of_start

from ..stage.conftest import wait_until

JOINTS = "sensor_msgs/msg/JointState"
LARGEST_BYTES = 64 << 20


def many_names(count):
    """The CDR bytes of a message of so many empty names, a multiple of eight, and an eighth of efforts.

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
        adapter="Joints", backup="standby", budget_ms=900.0, hang_ms=5000.0, max_frame_bytes=LARGEST_BYTES
    )
    pids, pool = stage.pids, stage.actor.pool
    answer = stage.ask(data=many_names(8_000_000))
    assert answer.outcome in {Outcome.LATE, Outcome.BAD_INPUT}
    wait_until(lambda: all(worker.idle for worker in pool.workers), lambda: pool.progress)
    good = bytes(encode(empty_message(JOINTS), JOINTS))
    assert stage.ask(data=good).outcome is Outcome.ON_TIME
    assert (stage.pids, pool.restarts) == (pids, 0)


def test_given_an_adapter_that_raises_at_the_start_then_the_reason_has_its_line_and_no_calls_that_lead_to_it(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unlicensed.py").write_text(
        "from torchperf_ros import Adapter\n"
        "class Camera(Adapter):\n    build = example_inputs = preprocess = postprocess = print\n"
        "    def __init__(self, options, device):\n"
        "        raise RuntimeError('no licence')\n",
        encoding="utf-8",
    )
    with pytest.raises(RuntimeError) as caught:
        open_adapter("unlicensed:Camera", {}, torch.device("cpu"))
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without this test's own call
    first, *calls = of_start(error, "unlicensed:Camera").splitlines()
    assert first == "adapter 'unlicensed:Camera': RuntimeError: no licence (unlicensed.py:5)"
    assert calls[0] == "Traceback (most recent call last):"
    assert "unlicensed.py" in calls[1]
    assert not any("torchperf_ros" in line for line in calls)


def test_given_an_error_of_no_users_code_at_the_start_then_the_reason_has_every_call():
    with pytest.raises(AttributeError) as caught:
        decode(b"", None)
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)
    first, *calls = of_start(error, "mine:Mine").splitlines()
    assert first.startswith("AttributeError: ")
    assert any("messages.py" in line for line in calls)
