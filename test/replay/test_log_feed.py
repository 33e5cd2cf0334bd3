from types import SimpleNamespace

import pytest

from torchperf_ros.logs.log_reader import LogError, LogTopic
from torchperf_ros.replay.log_feed import match_topics, parse_maps
from torchperf_ros.stage.stage_input import StageInput

IMAGE, COMPRESSED, ODOM = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage", "nav_msgs/msg/Odometry"
PERCEPTION, PLANNING = (SimpleNamespace(config=SimpleNamespace(name=name)) for name in ("perception", "planning"))
CAMERA, SPEED = StageInput(PERCEPTION, 0, "image", IMAGE, True), StageInput(PLANNING, 1, "odom", ODOM, True)


def topics(**types):
    return {f"/{name}": LogTopic(f"/{name}", type_name, 5) for name, type_name in types.items()}


def match(log, *wanted, remap=None):
    said = []
    return match_topics(wanted or [CAMERA], log, remap or {}, "drive.mcap", said.append), said


def test_given_a_topic_of_the_name_or_the_only_one_of_the_type_when_matched_then_it_is_taken_and_a_guess_is_said():
    assert match(topics(image=IMAGE, other=IMAGE)) == ({"image": "/image"}, [])
    found, said = match(topics(front=IMAGE, odom=ODOM))
    assert found == {"image": "/front"}
    assert said == ["perception takes image (sensor_msgs/msg/Image) from /front, the only topic of this type"]


def test_given_a_log_of_a_node_in_a_namespace_when_a_type_is_there_twice_then_the_name_at_the_end_decides():
    log = {name: LogTopic(name, IMAGE, 5) for name in ("/car/image", "/car/rear_image")}
    found, said = match(log)
    assert found == {"image": "/car/image"}
    assert said[0].endswith("from /car/image, the only topic of this type and name")


@pytest.mark.parametrize(
    ("log", "remap", "words"),
    [
        ({"left": IMAGE, "right": IMAGE}, {}, r"drive\.mcap.*/left .*/right .*choose one: --map /left:=image"),
        ({"odom": ODOM}, {}, r"perception takes image .*no such topic; it has: /odom \(nav_msgs/msg/Odometry\)"),
        ({"front": COMPRESSED}, {}, r'--set \'perception.options=\{"compressed": true\}\''),
        ({"odom": ODOM}, {"image": "/odom"}, r"/odom is nav_msgs/msg/Odometry; perception takes sensor_msgs/msg/Image"),
        ({"image": IMAGE}, {"image": "/absent"}, "no topic /absent, which --map names"),
        ({"image": IMAGE}, {"lidar": "/image"}, "no stage takes /lidar"),
    ],
)
def test_given_no_trigger_or_none_that_is_clear_when_matched_then_the_error_says_what_there_is(log, remap, words):
    with pytest.raises(LogError, match=words):
        match(topics(**log), remap=remap)


@pytest.mark.parametrize(("log", "words"), [({}, "does not have"), ({"left": ODOM, "right": ODOM}, "several")])
def test_given_an_input_that_can_be_done_without_when_it_is_not_clear_then_it_is_said(log, words):
    found, said = match(topics(image=IMAGE, **log), CAMERA, SPEED)
    assert found == {"image": "/image"}
    assert len(said) == 1
    assert words in said[0]


@pytest.mark.parametrize("texts", [["/camera"], [":=image"], ["/camera:="], ["/a:=image", "/b:=/image"]])
def test_given_a_map_option_of_another_form_when_parsed_then_it_is_refused(texts):
    with pytest.raises(LogError, match="--map"):
        parse_maps(texts)
