"""Streams as parameters: each is a configuration of its own, and what the workers share is the stage's."""

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.params_file import config_of, read_params_file

TEXT = """
/**/perf:
  ros__parameters:
    stages: [perception, planning]
    planning: {topics: ['detections:=front/detections']}
    perception:
      adapter: a:B
      streams: [front, rear]
      topics: ['image:=image_raw']
      budget_ms: 40
      batch: 4
      front: {budget_ms: 25, priority: 1}
      rear: {topics: ['image:=/rear/image_color'], output: /rear/found, guard: {act: [finite]}}
"""
STAGE = {"stages": ["seen"], "seen.adapter": "a:B", "seen.output": "out"}


def test_given_streams_in_a_parameter_file_when_read_then_each_has_topics_and_a_budget_of_its_own(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(TEXT, encoding="utf-8")
    config = read_params_file(path)
    front, rear, planning = config.stages
    assert [(one.name, one.stage, one.stream, one.stream_number) for one in config.stages] == [
        ("perception.front", "perception", "front", 0),
        ("perception.rear", "perception", "rear", 1),
        ("planning", "planning", "", None),
    ]
    assert (front.budget_ms, rear.budget_ms) == (25.0, 40.0)
    assert (front.output, rear.output) == ("front/detections", "/rear/found")
    assert (front.topic_of("image"), rear.topic_of("image")) == ("front/image_raw", "/rear/image_color")
    assert (front.topic_of("/tf"), planning.topic_of("detections")) == ("/tf", "front/detections")
    assert (front.guard, rear.guard is not None, front.batch, planning.batch) == (None, True, 2, 1)


def test_given_streams_when_the_stages_are_counted_then_streams_of_one_stage_are_one(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(TEXT, encoding="utf-8")
    whole = read_params_file(path).whole_stages
    assert [(one.name, one.stream, one.priority, one.streams, one.output) for one in whole] == [
        ("perception", "", 1, ("front", "rear"), "detections"),
        ("planning", "", 0, (), "trajectory"),
    ]


@pytest.mark.parametrize(("batch", "most"), [("auto", 3), (1, 1), ("2", 2), (64, 3)])
def test_given_a_batch_when_read_then_it_holds_no_more_frames_than_there_are_streams(batch, most):
    config = config_of({**STAGE, "seen.streams": ["a", "b", "c"], "seen.batch": batch})
    assert {stage.batch for stage in config.stages} == {most}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"seen.streams": ["a", "a"]}, ["seen.streams", "a stands there 2 times"]),
        ({"seen.streams": ["seen"]}, ["seen.streams", "seen is a stage"]),
        ({"seen.streams": ["guard"]}, ["seen.streams", "guard is a parameter of the stage"]),
        ({"seen.streams": ["Front Left"]}, ["seen.streams", "lower-case letters"]),
        ({"seen.streams": ["a"], "seen.a.engine": "eager"}, ["seen.a.engine", "budget_ms", "share"]),
        ({"seen.streams": ["a"], "seen.b.budget_ms": 10.0}, ["seen.b.budget_ms", "unknown"]),
        ({"seen.streams": ["a"], "seen.a.budget_ms": -1.0}, ["seen.a.budget_ms", "-1.0"]),
        ({"seen.streams": ["a", "b"], "seen.output": "/out"}, ["output", "seen.a, seen.b share", "/out"]),
        ({"seen.streams": ["a"], "seen.backup": "active"}, ["seen.backup", "active"]),
        ({"seen.streams": ["a"], "seen.candidate": "/v.yaml"}, ["seen.candidate", "streams"]),
        (
            {"seen.streams": ["a"], "seen.scenes": ["night"], "seen.scene.night.tiers": ["full"]},
            ["seen.scenes", "streams"],
        ),
        (
            {"seen.streams": ["a"], "emergency.sensors": ["scan"]},
            ["emergency.sensors", "seen", "one output"],
        ),
        ({"seen.batch": 65}, ["seen.batch", "65"]),
        ({"seen.batch": "many"}, ["seen.batch", "many", "auto, 1 to 64"]),
        ({"seen.streams": [""], "seen.batch": 4}, ["seen.batch", "4", "streams"]),
        ({"seen.streams": [""], "seen.batch_wait_ms": 2.0}, ["seen.batch_wait_ms", "2.0", "streams"]),
        ({"seen.topics": ["image"]}, ["seen.topics", "'image'", "INPUT:=TOPIC"]),
        ({"seen.topics": ["a:=b", "a:=c"]}, ["seen.topics", "a has the topic b already"]),
    ],
)
def test_given_streams_or_topics_that_cannot_be_when_read_then_the_message_says_what_would_be_right(
    values, parts
):
    with pytest.raises(ConfigError) as error:
        config_of({**STAGE, **values})
    assert [part for part in parts if part not in str(error.value)] == []
