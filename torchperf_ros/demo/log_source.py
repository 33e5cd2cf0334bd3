"""Recorded drives, ROS 2 or ROS 1, as a stream of camera and odometry messages that can be published now."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from torchperf_ros.replay.logs.log_reader import LogError, LogMessage, LogReader, LogTopic

IMAGE_TYPES: Final = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
ODOMETRY_TYPE: Final = "nav_msgs/msg/Odometry"


class LogSource:
    """The messages of one image topic, and of one odometry topic if there is one, of a rosbag2 or a ROS 1 bag.

    Attributes:
        image_topic: the one with most messages; depth images only if there are no others.
        image_type: `sensor_msgs/msg/Image` or `CompressedImage`.
        odometry_topic: likewise, None where there is none.
        images: how many the log says it has.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None) -> None:
        """Open a log: a rosbag2 folder, an `.mcap` or `.db3` file, or a `.bag` file.

        Args:
            path: the log.
            say: told, in one line, of what is damaged in it and can be done without.

        Raises:
            LogError: it does not exist, cannot be read, or has no images.
        """
        self._path = path
        self._reader = LogReader(path, say)
        try:
            image = self._choose_images()
            self.image_topic, self.image_type, self.images = image.name, image.type_name, image.count
            self.odometry_topic = self._choose_odometry()
            next(self.messages())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __enter__(self) -> "LogSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def messages(self) -> Iterator[LogMessage]:
        """The messages from the first image on, in order of their recording.

        Raises:
            LogError: the log is damaged here, or holds no image after all.
        """
        topics = {topic for topic in (self.image_topic, self.odometry_topic) if topic is not None}
        started = False
        for message in self._reader.messages(topics):
            started = started or message.topic == self.image_topic
            if started:
                yield message
        if not started:
            msg = f"log {self._path}: {self.image_topic} holds no image"
            raise LogError(msg)

    def _choose_images(self) -> LogTopic:
        filled = [topic for topic in self._reader.topics.values() if topic.count]
        images = [topic for topic in filled if topic.type_name in IMAGE_TYPES]
        if not images:
            found = [f"{topic.name} ({topic.type_name})" for topic in filled]
            shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")  # noqa: PLR2004
            has = f"no image topic, but {shown}" if found else "no messages at all"
            msg = f"log {self._path}: has {has}; the demo needs sensor_msgs/Image or CompressedImage"
            raise LogError(msg)
        return max(images, key=lambda topic: ("depth" not in topic.name.lower(), topic.count))

    def _choose_odometry(self) -> str | None:
        found = [topic for topic in self._reader.topics.values() if topic.type_name == ODOMETRY_TYPE and topic.count]
        return max(found, key=lambda topic: topic.count).name if found else None


def looped(source: LogSource, say: Callable[[str], None]) -> Iterator[LogMessage]:
    """The messages again and again without end, their times counted from 0 at the first image.

    A log that breaks off in the middle is played up to there.

    Args:
        source: the log.
        say: told, in one line, when the log starts again.
    """
    offset_ns = 0
    for turn in itertools.count(1):
        images_ns: list[int] = []
        start_ns = end_ns = 0
        try:
            for message in source.messages():
                start_ns = start_ns or message.t_ns
                end_ns = max(end_ns, message.t_ns)
                if message.topic == source.image_topic:
                    images_ns.append(message.t_ns)
                yield message._replace(t_ns=offset_ns + message.t_ns - start_ns)
        except LogError as error:
            if not images_ns:
                raise
            say(f"played up to the damage: {error}")
        period_ns = (images_ns[-1] - images_ns[0]) // max(len(images_ns) - 1, 1) or 33_000_000
        offset_ns += end_ns - start_ns + period_ns
        say(f"the log ended after {offset_ns / turn / 1e9:.1f} s and starts again (round {turn + 1})")
