"""A recorded log, whatever wrote it, as a stream of CDR messages in the order in which they were received."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from rosbags.highlevel import AnyReader
from rosbags.interfaces import Connection, ConnectionExtRosbag2, QosDurability
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.core.errors import TorchperfError


class LogError(TorchperfError):
    """A log cannot be read; the message names file, topic and offset as far as they are known, and what would do."""


class LogMessage(NamedTuple):
    """One message of a log.

    Attributes:
        topic: where it was published.
        type_name: for example `sensor_msgs/msg/Image`.
        data: CDR bytes; those of a ROS 1 log converted.
        t_ns: when it was received, ns since the epoch.
    """

    topic: str
    type_name: str
    data: bytes
    t_ns: int


@dataclass(frozen=True)
class LogTopic:
    """A topic of a log.

    Attributes:
        name, type_name: for example `/tf_static`, `tf2_msgs/msg/TFMessage`.
        count: messages that the log says it has, -1: it does not say.
        latched: whether its publisher kept messages for those who subscribe later (transient local).
    """

    name: str
    type_name: str
    count: int = -1
    latched: bool = False


class LogReader:
    """Reads a rosbag2 folder, an `.mcap` or `.db3` file, or a ROS 1 `.bag`; memory does not grow with the log.

    Attributes:
        path: the log.
        topics: by name.
        start_ns, end_ns: of its first and last message as far as the log says so, 0 otherwise.
        count: messages in it, -1 if it does not say.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None) -> None:
        """Open a log.

        Args:
            path: what to read.
            say: told in one line of everything that is wrong with the log and can be done without.

        Raises:
            LogError: it does not exist, is no log, or nothing of it can be read.
        """
        self.path = path
        self._say = say
        self._store = get_typestore(Stores.ROS2_JAZZY)
        try:
            self._reader = AnyReader([path], default_typestore=self._store)
            self._reader.open()
        except Exception as error:
            msg = f"log {path}: cannot be read: {error}"
            raise LogError(msg) from error
        self.topics = {c.topic: LogTopic(c.topic, c.msgtype, c.msgcount, _latched(c)) for c in self._reader.connections}
        self.start_ns, self.end_ns = self._reader.start_time, self._reader.end_time
        self.count = self._reader.message_count

    def messages(
        self, topics: Collection[str] | None = None, start_ns: int | None = None, end_ns: int | None = None
    ) -> Iterator[LogMessage]:
        """The messages of these topics (None: all) with `start_ns <= t_ns < end_ns`, in the log's order.

        Raises:
            LogError: the log is damaged here, and nothing after it can be read.
        """
        connections = [c for c in self._reader.connections if topics is None or c.topic in topics]
        for connection, t_ns, raw in self._reader.messages(connections, start=start_ns, stop=end_ns):
            name = connection.msgtype
            data = raw if self._reader.is2 else bytes(self._store.ros1_to_cdr(raw, name))
            yield LogMessage(connection.topic, name, data, t_ns)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __enter__(self) -> "LogReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _latched(connection: Connection) -> bool:
    if isinstance(connection.ext, ConnectionExtRosbag2):
        profiles = connection.ext.offered_qos_profiles
        return any(profile.durability is QosDurability.TRANSIENT_LOCAL for profile in profiles)
    return bool(connection.ext.latching)
