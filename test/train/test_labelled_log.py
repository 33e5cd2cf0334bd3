"""Labels of a user's log: what they become, and every way in which they cannot be used."""

import json

import numpy as np
import pytest
import torch

from torchperf_ros.api.adapter import HELD_OUT
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import empty_message, encode, header
from torchperf_ros.models.networks import CLASSES, IMAGE_HEIGHT, IMAGE_WIDTH
from torchperf_ros.replay.replay_record import OutputLog
from torchperf_ros.train.labelled_log import LabelledLog, LoggedImages

from ..api.test_pixels import image

# The camera's module filters this warning itself, but pytest resets filters.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

IMAGE, ODOMETRY = "sensor_msgs/msg/Image", "nav_msgs/msg/Odometry"
COUNT = 15


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Images of 224x128, each of a grey of its own."""
    path = tmp_path_factory.mktemp("log") / "drive.mcap"
    out = OutputLog(path)
    for number in range(1, COUNT + 1):
        pixels = np.full((128, 224, 3), 10 * number, np.uint8)
        message = image("rgb8", pixels, header=header(number * 10**9, "camera"))
        out.write("/image", IMAGE, bytes(encode(message, IMAGE)), number * 10**9)
        out.write("/odom", ODOMETRY, bytes(encode(empty_message(ODOMETRY), ODOMETRY)), number * 10**9)
    out.close()
    return path


def line(number, labels=()):
    return {"stamp_ns": number * 10**9, "labels": list(labels)}


def car(*box):
    return {"class": "car", "box": list(box)}


def labelled(log, folder, lines, topic="/image"):
    path = folder / "labels.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return LabelledLog(log, topic, path)


def test_given_a_labelled_log_when_read_then_boxes_are_stretched_and_the_last_fifth_is_held_out(
    log, tmp_path
):
    lines = [line(number, [car(10, 20, 60, 100 + number)]) for number in range(1, COUNT)] + [line(COUNT)]
    found = labelled(log, tmp_path, lines)
    held_out = LoggedImages(found, HELD_OUT)
    images, labels = held_out.batch(0, 100)
    assert images.shape == (3, 3, IMAGE_HEIGHT, IMAGE_WIDTH)
    assert images[:, 0, 0, 0].tolist() == pytest.approx(
        [grey / 127.5 - 1 for grey in (130, 140, 150)], abs=0.01
    )
    assert labels[0] == [(20.0, 40.0, 120.0, 226.0, CLASSES.index("car"), True)]
    assert labels[2] == []
    assert held_out.batch(3, 5)[1] == []
    images, labels = LoggedImages(found, 1).batch(7, 64)
    again, same = LoggedImages(found, 1).batch(7, 64)
    assert torch.equal(images, again)
    assert labels == same
    assert {round(float(grey)) for grey in (images[:, 0, 0, 0] + 1) * 12.75} == set(range(1, 13))
    assert {one.left for label in labels for one in label} == {
        20.0,
        IMAGE_WIDTH - 120.0,
    }, "some are mirrored"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([line(number) for number in range(1, 5)], "4 lines; at least 10 are needed"),
        (["{", *(line(number) for number in range(2, 12))], "line 1: '{' is not like"),
        (["[]", *(line(number) for number in range(2, 12))], "line 1: '\\[\\]' is not like"),
        ([{"stamp_ns": 1.5, "labels": []}], "stamp_ns is 1.5; it has to be a whole number"),
        ([line(1), line(1)], "line 2: stamp_ns 1000000000 has been there before"),
    ],
)
def test_given_lines_that_are_no_labels_when_opened_then_the_error_says_where_and_what(
    log, tmp_path, lines, says
):
    with pytest.raises(ConfigError, match=says):
        labelled(log, tmp_path, lines)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (
            [{"class": "horse", "box": [1, 2, 3, 4]}],
            "line 3: class 'horse' is not there; it has to be of: car, truck",
        ),
        ([car(1, 2, 3)], r"line 3: box \[1, 2, 3\] is not \[left, top, right, bottom\]"),
        ([car(1, 2, float("nan"), 4)], "line 3: box .* is not"),
        ([car(1, 2, 225, 4)], "line 3: box .* is not in its image of 224x128 pixels"),
        ([car(10, 2, 5, 4)], "with left < right"),
        ([7], "line 3: class None"),
    ],
)
def test_given_a_label_that_cannot_be_when_read_then_the_error_names_its_line(log, tmp_path, odd, says):
    found = labelled(
        log, tmp_path, [line(1), line(2), line(3, odd), *(line(number) for number in range(4, 12))]
    )
    with pytest.raises(ConfigError, match=says):
        LoggedImages(found, 1)


def test_given_a_topic_or_a_stamp_that_is_not_there_when_read_then_the_error_says_so(log, tmp_path):
    lines = [line(number) for number in range(1, 12)]
    with pytest.raises(ConfigError, match="topic /front is not there; it has /image, /odom"):
        labelled(log, tmp_path, lines, "/front")
    with pytest.raises(
        ConfigError, match="/odom is nav_msgs/msg/Odometry; it has to be sensor_msgs/msg/Image"
    ):
        LoggedImages(labelled(log, tmp_path, lines, "/odom"), 1)
    with pytest.raises(
        ConfigError, match="line 12: no message of /image in .* has the stamp 99000000000 ns"
    ):
        LoggedImages(labelled(log, tmp_path, [*lines, line(99)]), 1)
    with pytest.raises(ConfigError, match="labels .*none.jsonl: cannot be read"):
        LabelledLog(log, "/image", tmp_path / "none.jsonl")
