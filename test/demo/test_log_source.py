"""Logs of every kind, good and bad, read as a drive."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer as Writer2
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.core.message_types import decode
from torchperf_ros.demo.log_source import LogSource, looped
from torchperf_ros.demo.road_scene import odometry_cdr
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage

ROS2 = get_typestore(Stores.ROS2_JAZZY)
ROS1 = get_typestore(Stores.ROS1_NOETIC)
IMAGE = "sensor_msgs/msg/Image"
ODOMETRY = "nav_msgs/msg/Odometry"
START_NS = 1_600_000_000_000_000_000
STEP_NS = 40_000_000


def image(store: Any, number: int) -> Any:
    """A 2x2 image that tells its number."""
    time = store.types["builtin_interfaces/msg/Time"](sec=number, nanosec=7)
    seq = {"seq": number} if store is ROS1 else {}
    header = store.types["std_msgs/msg/Header"](stamp=time, frame_id="odd!!", **seq)
    data = np.full(12, number % 256, np.uint8)
    return store.types[IMAGE](header=header, height=2, width=2, encoding="rgb8", is_bigendian=0, step=6, data=data)


def write_ros2(path: Path, images: int = 5, storage: StoragePlugin = StoragePlugin.MCAP, topic: str = "/cam") -> Path:
    """A rosbag2 of an odometry before the first image, then images with an odometry after each."""
    with Writer2(path, version=9, storage_plugin=storage) as writer:
        odometry = writer.add_connection("/wheels", ODOMETRY, typestore=ROS2)
        camera = writer.add_connection(topic, IMAGE, typestore=ROS2)
        writer.write(odometry, START_NS - STEP_NS, odometry_cdr(0.0))
        for number in range(images):
            at_ns = START_NS + number * STEP_NS
            writer.write(camera, at_ns, ROS2.serialize_cdr(image(ROS2, number), IMAGE))
            writer.write(odometry, at_ns + 1, odometry_cdr(float(number)))
    return path


def write_ros1(path: Path) -> Path:
    """A ROS 1 bag of three images."""
    with Writer1(path) as writer:
        camera = writer.add_connection("/cam", IMAGE, typestore=ROS1)
        for number in range(3):
            writer.write(camera, START_NS + number * STEP_NS, ROS1.serialize_ros1(image(ROS1, number), IMAGE))
    return path


@pytest.mark.parametrize("storage", list(StoragePlugin))
def test_given_a_rosbag2_when_opened_then_its_messages_come_from_the_first_image_on(
    tmp_path: Path, storage: StoragePlugin
) -> None:
    with LogSource(write_ros2(tmp_path / "log", storage=storage)) as source:
        messages = list(source.messages())
        assert (source.image_topic, source.image_type, source.odometry_topic) == ("/cam", IMAGE, "/wheels")
        assert source.images == 5
    assert [m.topic for m in messages] == ["/cam", "/wheels"] * 5
    assert messages[0].t_ns == START_NS


def test_given_the_storage_file_alone_when_opened_then_it_plays_too(tmp_path: Path) -> None:
    (file,) = write_ros2(tmp_path / "log").glob("*.mcap")
    with LogSource(file) as source:
        assert len(list(source.messages())) == 10


def test_given_a_ros1_bag_when_read_then_the_messages_are_cdr_without_the_sequence_number(tmp_path: Path) -> None:
    with LogSource(write_ros1(tmp_path / "log.bag")) as source:
        second = decode(list(source.messages())[1].data, IMAGE)
    assert (second.header.stamp.sec, second.header.frame_id, second.encoding) == (1, "odd!!", "rgb8")
    assert second.data.tolist() == [1] * 12


def test_given_colour_and_more_depth_images_when_opened_then_colour_is_chosen(tmp_path: Path) -> None:
    with Writer2(tmp_path / "log", version=9) as writer:
        for topic, count in (("/depth/image", 5), ("/colour/image", 3)):
            connection = writer.add_connection(topic, IMAGE, typestore=ROS2)
            for number in range(count):
                writer.write(connection, START_NS + number, ROS2.serialize_cdr(image(ROS2, number), IMAGE))
    with LogSource(tmp_path / "log") as source:
        assert source.image_topic == "/colour/image"


def test_given_a_short_log_when_looped_then_time_goes_on_in_even_steps_and_it_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    with LogSource(write_ros2(tmp_path / "log")) as source:
        images = [m for m in itertools.islice(looped(source, said.append), 24) if m.type_name == IMAGE]
    assert [m.t_ns // 1_000_000 for m in images] == [40 * i for i in range(12)]
    assert len(said) == 2
    assert "starts again" in said[0]


def test_given_a_log_of_one_image_when_looped_then_time_still_goes_on(tmp_path: Path) -> None:
    with LogSource(write_ros2(tmp_path / "log", images=1)) as source:
        times = [m.t_ns for m in itertools.islice(looped(source, lambda _: None), 6)]
    assert times == sorted(times)
    assert times[-1] > 0


def test_given_a_log_that_breaks_off_when_opened_then_what_is_left_plays_and_it_says_so(tmp_path: Path) -> None:
    (file,) = write_ros2(tmp_path / "log", images=300).glob("*.mcap")
    os.truncate(file, 30_000)
    said: list[str] = []
    with LogSource(file, said.append) as source:
        assert 50 < len(list(source.messages())) < 600
    assert any("no usable index" in text for text in said)


class TornLog(LogSource):
    """A log that breaks off after some of its messages."""

    whole = 4

    def messages(self) -> Iterator[LogMessage]:
        yield from itertools.islice(super().messages(), self.whole)
        msg = "torn here"
        raise LogError(msg)


def test_given_a_log_damaged_in_the_middle_when_looped_then_it_plays_up_to_there_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    with TornLog(write_ros2(tmp_path / "log")) as source:
        messages = list(itertools.islice(looped(source, said.append), 10))
    assert [m.t_ns // 1_000_000 for m in messages if m.type_name == IMAGE] == [0, 40, 80, 120, 160]
    assert "torn here" in said[0]


def test_given_a_log_damaged_from_its_first_image_on_when_looped_then_that_is_the_error(tmp_path: Path) -> None:
    with LogSource(write_ros2(tmp_path / "log")) as source:
        source.__class__ = type("Torn", (TornLog,), {"whole": 0})
        with pytest.raises(LogError, match="torn here"):
            next(looped(source, lambda _: None))


def _empty(folder: Path) -> Path:
    with Writer2(folder / "empty", version=9) as writer:
        writer.add_connection("/cam", IMAGE, typestore=ROS2)
    return folder / "empty"


def _no_images(folder: Path) -> Path:
    with Writer2(folder / "log", version=9) as writer:
        connection = writer.add_connection("/wheels", ODOMETRY, typestore=ROS2)
        writer.write(connection, START_NS, odometry_cdr(0.0))
    return folder / "log"


def _garbage(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(b"\x89MCAP0\r\nnot really" * 99)
        return folder / name

    return write


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "none.mcap", "does not exist"),
        (lambda folder: folder, "metadata.yaml"),
        (_empty, "no messages at all"),
        (_no_images, "no image topic, but /wheels"),
        (_garbage("log.mcap"), "nothing in it can be read"),
        (_garbage("log.db3"), "nothing in it can be read"),
        (_garbage("log.bag"), "nothing in it can be read"),
        (_garbage("log.txt"), "nothing in it can be read"),
    ],
)
def test_given_a_log_that_cannot_be_played_when_opened_then_one_line_says_which_and_why(
    tmp_path: Path, make: Callable[[Path], Path], says: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(LogError) as error:
        LogSource(path)
    assert str(path) in str(error.value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
