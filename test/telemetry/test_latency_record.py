import math

from rosbags.typesys import Stores, get_typestore

from torchperf_ros.frame.frame import StepTimes
from torchperf_ros.frame.outcome import Fallback, Outcome
from torchperf_ros.telemetry.latency_record import LABELS, LatencyRecord

STORE = get_typestore(Stores.ROS2_HUMBLE)


def row(record, answer):
    message = STORE.deserialize_cdr(record.encode(answer), "std_msgs/msg/Float64MultiArray")
    return dict(zip([dim.label for dim in message.layout.dim], message.data.tolist(), strict=True))


def test_given_the_labels_when_published_then_they_are_those_of_the_design_in_their_order():
    assert LABELS == (
        "stage", "seq", "age_ms", "wait_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms",
        "total_ms", "budget_ms", "tier", "outcome", "fallback",
    )  # fmt: skip


def test_given_an_answer_on_time_when_recorded_then_every_value_is_under_its_label(make_answer):
    found = row(LatencyRecord(1), make_answer(seq=7, tier=2, total_ms=12.5))
    fallback = found.pop("fallback")
    assert math.isnan(fallback)
    assert found == {
        "stage": 1, "seq": 7, "age_ms": 4.0, "wait_ms": 0.5, "decode_ms": 1.0, "preprocess_ms": 2.0,
        "inference_ms": 3.0, "postprocess_ms": 4.0, "total_ms": 12.5, "budget_ms": 50.0, "tier": 2, "outcome": 0,
    }  # fmt: skip


def test_given_an_answer_without_a_result_when_recorded_then_what_is_unknown_is_nan(make_answer):
    answer = make_answer(Outcome.STARTING, Fallback.STOP, tier=-1, steps=StepTimes(), age_ms=math.nan)
    found = row(LatencyRecord(0), answer)
    assert {label for label, value in found.items() if math.isnan(value)} == {
        "age_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms", "tier",
    }  # fmt: skip
    assert (found["outcome"], found["fallback"]) == (7, 2)
