"""What `torchperf play --restamp` does with headers: each gets the time at which its message is published."""

import time
from collections.abc import Collection

from torchperf_ros.core.frame import restamped
from torchperf_ros.replay.logs.log_reader import LogMessage


class HeaderStamps:
    """Stamps the messages that have a header.

    Attributes:
        kept: how many messages went on with the stamp they had, as they are too short for one or the time is too late.
    """

    def __init__(self, topics: Collection[str], *, log_time: bool) -> None:
        """Prepare to stamp.

        Args:
            topics: whose messages have a header.
            log_time: whether to stamp with the log's time, and not with that of now.
        """
        self.kept = 0
        self._topics, self._log_time = topics, log_time
        self._last_kept: LogMessage | None = None
        self._ros_offset_ns = time.time_ns() - time.monotonic_ns()

    def stamp(self, message: LogMessage, due_ns: int) -> LogMessage:
        """The message as it is published when it is due; again with another time after a pause."""
        if message.topic not in self._topics:
            return message
        data = restamped(message.data, message.t_ns if self._log_time else due_ns + self._ros_offset_ns)
        if data is message.data and message is not self._last_kept:
            self.kept += 1
            self._last_kept = message
        return message._replace(data=data)

    def summary(self) -> str:
        """One line on messages that kept their stamps; empty if none did."""
        if not self.kept:
            return ""
        what = "message was" if self.kept == 1 else "messages were"
        return f"{self.kept:,} {what} not restamped: too short for a header, or at a time that a stamp cannot hold"
