"""Scenes as parameters: nested in the file, flat in ROS; what does not fit is refused with a reason."""

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import stage_config, stage_parameters
from torchperf_ros.settings.params_file import config_of, read_params_file
from torchperf_ros.settings.stage_options import ODOMETRY, SCENE_PARAMETERS

TEXT = """
/**/perf:
  ros__parameters:
    stages: [perception]
    perception:
      scenes: [intersection, highway]
      scene:
        intersection: {tiers: [medium, sharp], packages: ['', /tmp/sharp.pt2], budget_ms: 30, topic: /scene}
        highway: {min_speed: 22.0, tiers: [full]}
"""


def test_given_scenes_in_a_parameter_file_when_read_then_default_comes_first_and_tiers_are_the_stages(
    tmp_path,
):
    path = tmp_path / "params.yaml"
    path.write_text(TEXT, encoding="utf-8")
    (stage,) = read_params_file(path).stages
    assert stage.tiers == ("full", "medium", "fast", "sharp")
    assert stage.packages == ("", "", "", "/tmp/sharp.pt2")
    assert stage.precision == ("fp32",) * 4
    assert [(scene.name, scene.tiers, scene.word) for scene in stage.scenes] == [
        ("default", (0, 1, 2), ""),
        ("intersection", (1, 3), "intersection"),
        ("highway", (0,), "highway"),
    ]
    assert [stage.scene_budget_ms(scene) for scene in range(3)] == [50.0, 30.0, 50.0]
    assert stage.situation_inputs == (
        (ODOMETRY, "odom", "nav_msgs/msg/Odometry"),
        (ODOMETRY - 1, "/scene", "std_msgs/msg/String"),
    )


def test_given_the_parameters_of_a_stage_when_it_has_scenes_then_each_has_its_own_below_its_name():
    names = [parameter.name for parameter in stage_parameters("perception", ["night"])]
    assert names[-len(SCENE_PARAMETERS) :] == [
        f"scene.night.{parameter.name}" for parameter in SCENE_PARAMETERS
    ]
    assert len(stage_parameters("perception", [""])) == len(stage_parameters("perception"))


def test_given_a_live_budget_when_changed_then_default_follows_and_a_scene_of_its_own_does_not():
    values = {"adapter": "a:B", "output": "o", "scenes": ["park"], "scene.park.tiers": ["fast"]}
    stage = stage_config("seen", {**values, "budget_ms": 80.0, "scene.park.budget_ms": 20.0})
    assert (stage.scene_budget_ms(0), stage.scene_budget_ms(1)) == (80.0, 20.0)


STREAMS = """
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


def test_given_streams_in_a_parameter_file_when_read_then_each_has_its_own_and_they_are_one_stage(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(STREAMS, encoding="utf-8")
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
    assert [
        (one.name, one.stream, one.priority, one.streams, one.output) for one in config.whole_stages
    ] == [
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
        ({"seen.scenes": ["park"]}, ["seen.scene.park.tiers", "is empty", "at least one tier"]),
        ({"seen.scenes": ["park"], "seen.scene.park.tiers": []}, ["seen.scene.park.tiers", "is empty"]),
        (
            {"seen.scenes": ["park"], "seen.scene.park.tiers": ["a", "a"]},
            ["seen.scene.park.tiers", "each once"],
        ),
        ({"seen.scenes": ["default"]}, ["seen.scenes", "default is there anyway"]),
        ({"seen.scenes": ["park", "park"]}, ["seen.scenes", "each once"]),
        ({"seen.scenes": ["Park"]}, ["seen.scenes", "'Park'", "lower-case"]),
        ({"seen.scene.park.tiers": ["fast"]}, ["seen.scene.park.tiers", "no scene 'park'", "it has none"]),
        ({"seen.scenes": ["park"], "seen.scene.prak.tiers": ["fast"]}, ["no scene 'prak'", "it has park"]),
        (
            {"seen.scenes": ["park"], "seen.scene.park.tier": ["fast"]},
            ["seen.scene.park.tier", "a scene has tiers,"],
        ),
        (
            {"seen.scenes": ["park"], "seen.scene.park.tiers": ["fast"], "seen.scene.park.budget_ms": 0.5},
            ["budget_ms: 0.5", "from 1"],
        ),
        (
            {"seen.scenes": ["park"], "seen.scene.park.tiers": ["a"], "seen.scene.park.budget_ms": "x"},
            ["scene.park.budget_ms: 'x'"],
        ),
        (
            {
                "seen.scenes": ["park"],
                "seen.scene.park.tiers": ["a"],
                "seen.scene.park.min_speed": 5.0,
                "seen.scene.park.max_speed": 5.0,
            },
            ["min_speed: 5.0", "below max_speed 5.0"],
        ),
        (
            {
                "seen.scenes": ["park"],
                "seen.scene.park.tiers": ["fast"],
                "seen.scene.park.budget_ms": 1001.0,
            },
            ["seen.scene.park.budget_ms: 1001.0 is above seen.hang_ms 1000.0"],
        ),
        (
            {
                "seen.scenes": ["park"],
                "seen.scene.park.tiers": ["fast"],
                "seen.scene.park.packages": ["x.pt2"],
            },
            ["scene.park.packages", "tier fast runs no package in another scene"],
        ),
        (
            {
                "seen.scenes": ["park"],
                "seen.scene.park.tiers": ["a", "b"],
                "seen.scene.park.packages": ["x", "y", "z"],
            },
            ["scene.park.packages", "3 entries", "1, or 2"],
        ),
        (
            {
                "seen.scenes": ["park"],
                "seen.scene.park.tiers": ["a"],
                "seen.precision": ["fp32", "fp32", "fp32"],
            },
            ["seen.precision", "3 entries", "1, or 4"],
        ),
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
def test_given_scenes_streams_or_topics_that_do_not_fit_when_read_then_the_error_says_what_would(
    values, parts
):
    with pytest.raises(ConfigError) as error:
        config_of({**STAGE, **values})
    assert [part for part in parts if part not in str(error.value)] == []
