"""Rows of numbers under labels, as another reader of CDR finds them."""

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.observe.telemetry.latency_record import (
    LABELS,
    LabelledArray,
    LatencyRecord,
    float64_bytes,
)
from torchperf_ros.stage.frame import StepTimes

STORE = get_typestore(Stores.ROS2_HUMBLE)


def row(record, answer):
    message = STORE.deserialize_cdr(record.encode(answer), "std_msgs/msg/Float64MultiArray")
    return dict(zip([dim.label for dim in message.layout.dim], message.data.tolist(), strict=True))


def test_given_answers_when_recorded_then_every_value_is_under_its_label_and_the_unknown_is_nan(
    make_answer,
):
    answer = make_answer(seq=7, tier=2, total_ms=12.5)
    answer.check, answer.missing_inputs = GuardVerdict.REBASED, 0b110
    found = row(LatencyRecord(1, stream=3), answer)
    values = [1, 7, 4.0, 0.5, 1.0, 2.0, 3.0, 4.0, 12.5, 50.0, 2, 0, math.nan, 2, 0, 6, 13.5, -1.0, 0, 3]
    assert found == pytest.approx(dict(zip(LABELS, values, strict=True)), nan_ok=True)
    answer = make_answer(Outcome.STARTING, Fallback.STOP, tier=-1, steps=StepTimes(), age_ms=math.nan)
    found = row(LatencyRecord(0), answer)
    unknown = {"age_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms", "tier", "check"}
    assert {label for label, value in found.items() if math.isnan(value)} == unknown | {"stream"}
    assert (found["outcome"], found["fallback"]) == (7, 2)


labels_and_values = st.lists(
    st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9), st.floats()),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(labels_and_values)
def test_given_any_labels_and_values_when_encoded_then_another_reader_finds_them(pairs):
    labels, values = zip(*pairs, strict=True)
    message = STORE.deserialize_cdr(LabelledArray(labels).encode(values), "std_msgs/msg/Float64MultiArray")
    assert [dim.label for dim in message.layout.dim] == list(labels)
    assert {(dim.size, dim.stride) for dim in message.layout.dim} == {(1, 1)}
    assert [struct.pack("<d", x) for x in message.data] == [struct.pack("<d", x) for x in values]
    with pytest.raises(struct.error):
        LabelledArray(labels).encode([*values, 1.0])


@given(st.floats())
def test_given_any_number_when_encoded_then_another_reader_finds_it(value):
    message = STORE.deserialize_cdr(float64_bytes(value), "std_msgs/msg/Float64")
    assert message.data == pytest.approx(value, rel=0, abs=0, nan_ok=True)
