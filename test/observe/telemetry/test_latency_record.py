"""Rows of numbers under labels, as another reader of CDR finds them."""

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.telemetry.latency_record import LabelledArray, LatencyRecord, float64_bytes
from torchperf_ros.stage.frame import StepTimes

STORE = get_typestore(Stores.ROS2_HUMBLE)


def row(record, answer):
    message = STORE.deserialize_cdr(record.encode(answer), "std_msgs/msg/Float64MultiArray")
    return dict(zip([dim.label for dim in message.layout.dim], message.data.tolist(), strict=True))


def test_given_an_answer_on_time_when_recorded_then_every_value_is_under_its_label(make_answer):
    found = row(LatencyRecord(1), make_answer(seq=7, tier=2, total_ms=12.5))
    assert math.isnan(found.pop("fallback"))
    assert math.isnan(found.pop("check"))
    assert found == {
        "stage": 1,
        "seq": 7,
        "age_ms": 4.0,
        "wait_ms": 0.5,
        "decode_ms": 1.0,
        "preprocess_ms": 2.0,
        "inference_ms": 3.0,
        "postprocess_ms": 4.0,
        "total_ms": 12.5,
        "budget_ms": 50.0,
        "tier": 2,
        "outcome": 0,
        "scene": 0,
        "missing_inputs": 0,
        "deadline_ms": 13.5,
        "lateness_ms": -1.0,
        "stale": 0,
    }


def test_given_an_answer_without_a_result_when_recorded_then_what_is_unknown_is_nan(make_answer):
    answer = make_answer(Outcome.STARTING, Fallback.STOP, tier=-1, steps=StepTimes(), age_ms=math.nan)
    found = row(LatencyRecord(0), answer)
    assert {label for label, value in found.items() if math.isnan(value)} == {
        "age_ms",
        "decode_ms",
        "preprocess_ms",
        "inference_ms",
        "postprocess_ms",
        "tier",
        "check",
    }
    assert (found["outcome"], found["fallback"]) == (7, 2)


labels_and_values = st.lists(
    st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9), st.floats()),
    min_size=1,
    max_size=20,
)


def same(found, wanted):
    return [struct.pack("<d", x) for x in found] == [struct.pack("<d", x) for x in wanted]


@settings(deadline=None)
@given(labels_and_values)
def test_given_any_labels_and_values_when_encoded_then_another_reader_finds_them(pairs):
    labels, values = zip(*pairs, strict=True)
    data = LabelledArray(labels).encode(values)
    message = STORE.deserialize_cdr(data, "std_msgs/msg/Float64MultiArray")
    assert [dim.label for dim in message.layout.dim] == list(labels)
    assert {(dim.size, dim.stride) for dim in message.layout.dim} == {(1, 1)}
    assert message.layout.data_offset == 0
    assert same(message.data, values)


@pytest.mark.parametrize("values", [(), (1.0,), (1.0, 2.0, 3.0)])
def test_given_another_number_of_values_than_labels_when_encoded_then_it_is_refused(values):
    with pytest.raises(struct.error):
        LabelledArray(("a", "b")).encode(values)


@given(st.floats())
def test_given_any_number_when_encoded_then_another_reader_finds_it(value):
    message = STORE.deserialize_cdr(float64_bytes(value), "std_msgs/msg/Float64")
    assert same([message.data], [value])
