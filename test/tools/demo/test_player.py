"""What the demo plays of a log; how logs are read and paced is tested with them."""

from pathlib import Path

import pytest

pytest.importorskip("rclpy")

from rosbags.rosbag2 import Writer
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api.messages import empty_message, encode
from torchperf_ros.replay.logs.log_reader import LogError, LogReader
from torchperf_ros.tools.demo.player import drive_topics

IMAGE, ODOMETRY = "sensor_msgs/msg/Image", "nav_msgs/msg/Odometry"


def write(path: Path, *topics: tuple[str, str, int]) -> Path:
    """A rosbag2 of so many messages of each topic."""
    with Writer(path, version=9) as writer:
        for name, type_name, count in topics:
            connection = writer.add_connection(name, type_name, typestore=get_typestore(Stores.ROS2_JAZZY))
            for number in range(count):
                writer.write(
                    connection, 10**18 + number, bytes(encode(empty_message(type_name), type_name))
                )
    return path


def test_given_colour_and_more_depth_images_when_chosen_then_it_is_colour_and_the_fullest_odometry(
    tmp_path,
):
    path = write(
        tmp_path / "log",
        ("/depth/image", IMAGE, 5),
        ("/colour/image", IMAGE, 3),
        ("/colour/left", IMAGE, 2),
        ("/wheels", ODOMETRY, 1),
        ("/fused", ODOMETRY, 2),
    )
    with LogReader(path) as log:
        assert [topic.name for topic in drive_topics(log)] == ["/colour/image", "/fused"]


@pytest.mark.parametrize(
    ("topics", "says"),
    [
        ([("/cam", IMAGE, 0)], "has no messages at all, but no image topic"),
        (
            [("/wheels", ODOMETRY, 1)],
            "has /wheels (nav_msgs/msg/Odometry), but no image topic; the demo needs",
        ),
    ],
)
def test_given_a_log_without_images_when_chosen_then_one_line_says_what_there_is(tmp_path, topics, says):
    with LogReader(write(tmp_path / "log", *topics)) as log, pytest.raises(LogError) as error:
        drive_topics(log)
    assert says in str(error.value)
    assert str(tmp_path / "log") in str(error.value)
