import json
from types import SimpleNamespace

import pytest

from torchperf_ros.replay.log_feed import KnownTopics, match_topics
from torchperf_ros.replay.logs.log_reader import LogError, LogTopic
from torchperf_ros.stage.wiring import StageInput

IMAGE, COMPRESSED, ODOM = (
    "sensor_msgs/msg/Image",
    "sensor_msgs/msg/CompressedImage",
    "nav_msgs/msg/Odometry",
)
PERCEPTION, PLANNING = (
    SimpleNamespace(config=SimpleNamespace(name=name)) for name in ("perception", "planning")
)
CAMERA, SPEED = StageInput(PERCEPTION, 0, "image", IMAGE, True), StageInput(PLANNING, 1, "odom", ODOM, True)


def topics(**types):
    return {f"/{name}": LogTopic(f"/{name}", type_name, 5) for name, type_name in types.items()}


def match(log, *wanted, remap=None, known=None):
    said = []
    return match_topics(wanted or [CAMERA], log, remap or {}, "drive.mcap", said.append, known), said


def test_given_outputs_of_stages_in_a_log_when_matched_then_they_are_no_candidates():
    known = KnownTopics(outputs=frozenset({"/labels"}))
    assert match(topics(front=IMAGE, labels=IMAGE), known=known)[0] == {"image": "/front"}
    in_a_namespace = {name: LogTopic(name, IMAGE, 5) for name in ("/car/front", "/car/labels")}
    assert match(in_a_namespace, known=known)[0] == {"image": "/car/front"}
    with pytest.raises(
        LogError, match=r"but what a stage publishes; if that is meant: --map /labels:=image"
    ):
        match(topics(labels=IMAGE), known=known)
    assert match(topics(labels=IMAGE), known=known, remap={"image": "/labels"})[0] == {"image": "/labels"}
    with pytest.raises(LogError, match=r"has several such topics: /left \(.*\), /right \(.*\); choose one"):
        match(topics(left=IMAGE, labels=IMAGE, right=IMAGE), known=known)


def test_given_an_incident_when_matched_then_its_node_s_remapping_counts_and_an_option_counts_more(
    tmp_path,
):
    stages = [
        {"name": "perception", "inputs": ["/left", None], "output": "/found"},
        {"name": "planning", "inputs": [None, "/wheels"], "output": "/path"},
    ]
    (tmp_path / "incident.json").write_text(json.dumps({"name": "a", "stages": stages}), "utf-8")
    known = KnownTopics.of_incident(tmp_path)
    assert known.outputs == {"/found", "/path"}
    log = topics(left=IMAGE, right=IMAGE, found=IMAGE, wheels=ODOM, odometry=ODOM)
    assert match(log, CAMERA, SPEED, known=known) == ({"image": "/left", "odom": "/wheels"}, [])
    assert match(log, CAMERA, SPEED, known=known, remap={"image": "/right"})[0] == {
        "image": "/right",
        "odom": "/wheels",
    }
    gone = topics(right=IMAGE, found=IMAGE)
    assert match(gone, known=known)[0] == {"image": "/right"}


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"stages": 3}', '{"stages": [{"name": "a"}]}'])
def test_given_an_incident_that_does_not_say_when_read_then_nothing_is_known(tmp_path, content):
    if content is not None:
        (tmp_path / "incident.json").write_text(content, "utf-8")
    assert KnownTopics.of_incident(tmp_path) == KnownTopics()


def test_given_a_topic_of_the_name_or_the_only_one_of_the_type_when_matched_then_it_is_taken_and_a_guess_is_said():
    assert match(topics(image=IMAGE, other=IMAGE)) == ({"image": "/image"}, [])
    found, said = match(topics(front=IMAGE, odom=ODOM))
    assert found == {"image": "/front"}
    assert said == [
        "perception takes image (sensor_msgs/msg/Image) from /front, the only topic of this type"
    ]


def test_given_a_stage_with_two_inputs_of_a_type_when_matched_then_no_topic_is_taken_for_both():
    left, right = (StageInput(PERCEPTION, n, name, IMAGE, True) for n, name in enumerate(("left", "right")))
    found, said = match(topics(front=IMAGE), left, right)
    assert found == {"left": "/front"}
    assert said[1].endswith("right (sensor_msgs/msg/Image), which the log does not have; goes without")
    both = {"left": "/front", "right": "/rear"}
    assert match(topics(front=IMAGE, rear=IMAGE), left, right, remap={"left": "/front"})[0] == both
    with pytest.raises(LogError, match="perception takes left .*and has no such topic"):
        match(topics(right=IMAGE), left, right)


def test_given_a_log_of_a_node_in_a_namespace_when_a_type_is_there_twice_then_the_name_at_the_end_decides():
    log = {name: LogTopic(name, IMAGE, 5) for name in ("/car/image", "/car/rear_image")}
    found, said = match(log)
    assert found == {"image": "/car/image"}
    assert said[0].endswith("from /car/image, the only topic of this type and name")


@pytest.mark.parametrize(
    ("log", "remap", "words"),
    [
        (
            {"left": IMAGE, "right": IMAGE},
            {},
            r"drive\.mcap.*/left .*/right .*choose one: --map /left:=image",
        ),
        (
            {"odom": ODOM},
            {},
            r"perception takes image .*no such topic; it has: /odom \(nav_msgs/msg/Odometry\)",
        ),
        ({"front": COMPRESSED}, {}, r'--set \'perception.options=\{"compressed": true\}\''),
        (
            {"odom": ODOM},
            {"image": "/odom"},
            r"/odom is nav_msgs/msg/Odometry; perception takes sensor_msgs/msg/Image",
        ),
        ({"image": IMAGE}, {"image": "/absent"}, "no topic /absent, which --map names"),
        ({"image": IMAGE}, {"lidar": "/image"}, "no stage takes /lidar"),
    ],
)
def test_given_no_trigger_or_none_that_is_clear_when_matched_then_the_error_says_what_there_is(
    log, remap, words
):
    with pytest.raises(LogError, match=words):
        match(topics(**log), remap=remap)


@pytest.mark.parametrize(
    ("log", "words"), [({}, "does not have"), ({"left": ODOM, "right": ODOM}, "several")]
)
def test_given_an_input_that_can_be_done_without_when_it_is_not_clear_then_it_is_said(log, words):
    found, said = match(topics(image=IMAGE, **log), CAMERA, SPEED)
    assert found == {"image": "/image"}
    assert len(said) == 1
    assert words in said[0]
