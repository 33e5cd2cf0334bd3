"""Answered frames as the recorder gets them."""

import math

import numpy as np

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.observe.telemetry.rows import SENT, FrameRecord, sent_row
from torchperf_ros.stage.frame import Answer, Frame, Origin, StepTimes

_FRAME = {
    "seq": 0,
    "data": None,
    "stamp_ns": 1,
    "age_ms": 1.0,
    "received_ns": 1,
    "deadline_ns": 0,
    "stale": False,
}
_ANSWER = {
    "outcome": Outcome.ON_TIME,
    "fallback": None,
    "reason": "",
    "tier": 0,
    "wait_ms": 0.1,
    "total_ms": 10.0,
    "budget_ms": 50.0,
    "lateness_ms": -40.0,
    "published_ns": 0,
    "payload": None,
    "shapes": b"",
    "offset": 0,
    "length": 0,
}


def answered_frame(*, steps=None, **changed):
    """A frame's answer as the node has it: on time, but for what is `changed` of frame or answer."""
    frame = {key: changed.pop(key, value) for key, value in _FRAME.items()}
    answer = {key: changed.pop(key, value) for key, value in _ANSWER.items()}
    assert not changed, changed
    origin = Origin(frame["received_ns"], frame["age_ms"])
    whole = Answer(Frame(**frame, origin=origin), **answer, steps=steps or StepTimes())
    whole.published_ns = frame["received_ns"] + round(answer["total_ms"] * 1e6)
    return whole


def frame_record(t_ns=5, *, stage=0, answer_ms=math.nan, inputs=(), ring=None, **changed):
    """The same as the recorder has it."""
    answer = answered_frame(**changed)
    (row,) = np.frombuffer(sent_row(answer, t_ns, answer_ms), SENT)
    return FrameRecord(t_ns, stage, row, answer.payload, answer.reason, list(inputs), ring)
