"""What a stage gives out, from real messages as CDR bytes, on a virtual clock."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.messages import encode, message_class
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.models.detection_messages import MARKER_ARRAY, Detection, ImageFrame, MarkerArrays
from torchperf_ros.observe.watch.content import OutputContent, statistics_of
from torchperf_ros.workers.frame_ring import InputBytes

from ..telemetry.frame_records import frame_record

MARKERS = MarkerArrays(70.0)


def detections(count, score=0.8, x=50.0):
    return [Detection(number % 4, score, x, 60.0, 20.0, 30.0) for number in range(count)]


def boxes(stamp_ns, found):
    return bytes(encode(MARKERS.build(found, ImageFrame(stamp_ns, "camera", 640, 480)), MARKER_ARRAY))


def drive(seconds, at, fallback=None):
    """What is found, by second.

    `at(second, rng)` gives the detections of a frame and the bytes of its input.
    """
    content, rng, found = OutputContent("camera", "/detections", MARKER_ARRAY), random.Random(0), {}
    for second in range(seconds):
        for part in range(4):
            now_ns = 1_000 * NS_PER_S + second * NS_PER_S + part * NS_PER_S // 4
            things, data = at(second, rng)
            content.take(
                frame_record(
                    now_ns,
                    stamp_ns=now_ns,
                    received_ns=now_ns,
                    fallback=fallback,
                    outcome=Outcome.ON_TIME if fallback is None else Outcome.LATE,
                    inputs=[InputBytes(0, now_ns, 0.0, data)],
                    payload=boxes(now_ns, things),
                )
            )
        for finding in content.second(now_ns)[1]:
            found.setdefault(finding.name, []).append((second, finding))
    return found


def usual(second, rng):
    """Some objects, now more and now fewer, with scores that vary."""
    count = 6 + round(2 * math.sin(second / 40)) + rng.randint(-1, 1)
    return detections(count, min(1.0, rng.gauss(0.8, 0.03)), rng.random()), rng.randbytes(100)


def test_given_minutes_of_a_changing_scene_when_watched_then_nothing_is_told():
    assert drive(600, usual) == {}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda rng: detections(20, 0.8, rng.random()), "objects per output 20.0, usually"),
        (lambda rng: detections(6, 0.55, rng.random()), "mean score of the outputs 0.55, usually 0.80"),
    ],
)
def test_given_outputs_unlike_before_when_they_go_on_then_it_is_told(fault, words):
    def at(second, rng):
        return (fault(rng), rng.randbytes(100)) if second >= 300 else usual(second, rng)

    told = drive(360, at)["camera: output"]
    assert 308 <= told[0][0] <= 330
    assert words in told[0][1].message


def frozen_from(begin, things, data):
    return lambda second, rng: (things, data(rng)) if second >= begin else usual(second, rng)


def test_given_equal_outputs_of_changing_inputs_when_they_go_on_then_they_are_frozen():
    told = drive(80, frozen_from(40, detections(6), lambda rng: rng.randbytes(100)))[
        "camera: output frozen"
    ]
    assert 49 <= told[0][0] <= 51
    assert "/detections has not changed although its inputs have, since 1" in told[0][1].message


def test_given_outputs_without_objects_when_longer_than_ever_then_it_is_told_until_there_are_some():
    def at(second, rng):
        return (
            (detections(0), rng.randbytes(100))
            if 40 <= second < 43 or 80 <= second < 100
            else usual(second, rng)
        )

    told = drive(120, at)["camera: output empty"]
    assert [told[0][0], told[-1][0]] == [90, 99]
    assert "holds nothing any more, since 11 s; 3.0 s at most before" in told[0][1].message


@pytest.mark.parametrize(
    ("things", "data"),
    [
        (detections(6), lambda rng: bytes(100)),  # the inputs stand still, too
        (detections(0), lambda rng: rng.randbytes(100)),  # there is nothing to see
    ],
)
def test_given_equal_outputs_for_a_reason_when_watched_then_they_are_not_frozen(things, data):
    assert "camera: output frozen" not in drive(80, frozen_from(40, things, data))


def test_given_markers_when_counted_then_what_is_deleted_is_no_object_and_alpha_is_the_score():
    message = MARKERS.build(detections(3, 0.5), ImageFrame(1, "camera", 640, 480))
    assert statistics_of(message, MARKER_ARRAY) == (3.0, [0.5, 0.5, 0.5])


def test_given_any_message_when_counted_then_scores_are_those_within_its_list_and_without_one_nothing_is_known():
    hypotheses = [SimpleNamespace(class_id="car", score=0.25), SimpleNamespace(class_id="bus", score=0.5)]
    results = [SimpleNamespace(hypothesis=hypothesis, pose=np.zeros(3)) for hypothesis in hypotheses]
    message = SimpleNamespace(
        header=None, detections=[SimpleNamespace(results=results), SimpleNamespace(results=[])]
    )
    assert statistics_of(message, "vision_msgs/msg/Detection2DArray") == (2.0, [0.25, 0.5])
    count, scores = statistics_of(message_class("geometry_msgs/msg/Point")(x=1.0, y=2.0, z=np.nan), "")
    assert math.isnan(count)
    assert scores == []
