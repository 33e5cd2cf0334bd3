"""Recorded drives, ROS 2 or ROS 1, as a stream of camera and odometry messages that can be published now."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from rosbags.highlevel import AnyReader
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.core.errors import TorchperfError

IMAGE_TYPES: Final = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
ODOMETRY_TYPE: Final = "nav_msgs/msg/Odometry"


class LogError(TorchperfError):
    """A log cannot be played; the message says which and why."""


class LogMessage(NamedTuple):
    """One message of a drive.

    Attributes:
        topic: where it was published.
        type: its message type.
        cdr: its CDR bytes.
        t_ns: when it was recorded.
    """

    topic: str
    type: str
    cdr: bytes
    t_ns: int


class LogSource:
    """The messages of one image topic, and of one odometry topic if there is one, of a rosbag2 or a ROS 1 bag.

    Attributes:
        image_topic: the one with most messages; depth images only if there are no others.
        image_type: `sensor_msgs/msg/Image` or `CompressedImage`.
        odometry_topic: likewise, None where there is none.
        images: how many the log says it has.
    """

    def __init__(self, path: Path) -> None:
        """Open a log: a rosbag2 folder, an `.mcap` or `.db3` file, or a `.bag` file.

        Raises:
            LogError: it does not exist, cannot be read, or has no images.
        """
        self._path = path
        if not path.exists():
            msg = f"log {path}: does not exist"
            raise LogError(msg)
        if path.is_dir() and not (path / "metadata.yaml").exists():
            msg = f"log {path}: a folder without metadata.yaml is no rosbag2; name the .mcap, .db3 or .bag file in it"
            raise LogError(msg)
        self._jazzy = get_typestore(Stores.ROS2_JAZZY)
        self._reader = self._guarded(lambda: AnyReader([path], default_typestore=self._jazzy))
        self._guarded(self._reader.open)
        try:
            self.image_topic, self.image_type, self.images = self._choose_images()
            self.odometry_topic = self._choose_odometry()
            next(self.messages())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        with contextlib.suppress(Exception):  # closing a damaged bag may find the damage once more
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
        topics = {self.image_topic, self.odometry_topic}
        stream = self._reader.messages([c for c in self._reader.connections if c.topic in topics])
        started = False
        while (entry := self._guarded(lambda: next(stream, None))) is not None:
            connection, t_ns, raw = entry
            started = started or connection.topic == self.image_topic
            if started:
                cdr = raw if self._reader.is2 else self._to_cdr(raw, connection.msgtype)
                yield LogMessage(connection.topic, connection.msgtype, cdr, t_ns)
        if not started:
            msg = f"log {self._path}: {self.image_topic} holds no image"
            raise LogError(msg)

    def _to_cdr(self, raw: bytes, name: str) -> bytes:
        return bytes(self._guarded(lambda: self._jazzy.ros1_to_cdr(raw, name)))

    def _choose_images(self) -> tuple[str, str, int]:
        connections = [c for c in self._reader.connections if c.msgtype in IMAGE_TYPES and c.msgcount]
        if not connections:
            found = sorted({f"{c.topic} ({c.msgtype})" for c in self._reader.connections if c.msgcount})
            shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")  # noqa: PLR2004
            has = f"no image topic, but {shown}" if found else "no messages at all"
            msg = f"log {self._path}: has {has}; the demo needs sensor_msgs/Image or CompressedImage"
            raise LogError(msg)
        best = max(connections, key=lambda c: ("depth" not in c.topic.lower(), c.msgcount))
        return best.topic, best.msgtype, best.msgcount

    def _choose_odometry(self) -> str | None:
        connections = [c for c in self._reader.connections if c.msgtype == ODOMETRY_TYPE and c.msgcount]
        return max(connections, key=lambda c: c.msgcount).topic if connections else None

    def _guarded(self, act: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the act returns
        try:
            return act()
        except Exception as error:
            # A stranger's file is read here: rosbags raises its own errors, assertions, struct.error, lz4's, ...
            why = str(error).splitlines()[0] if str(error) else "its index or a chunk is damaged"
            msg = f"log {self._path}: cannot be read: {why} ({type(error).__name__})"
            raise LogError(msg) from error


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
