"""The node's log for people: throttled, and every line of it in the records."""

import threading

from rclpy.node import Node

from torchperf_ros.core.clock import monotonic_ns
from torchperf_ros.core.log_throttle import LogThrottle
from torchperf_ros.ros.announcer import Announcer


class NodeLog:
    """Takes lines from any thread."""

    def __init__(self, node: Node, announcer: Announcer) -> None:
        """Log as this node."""
        self._node = node
        self._announcer = announcer
        self._throttle = LogThrottle(monotonic_ns)
        self._lock = threading.Lock()

    def __call__(self, severity: str, text: str) -> None:
        """Log a text; `severity` is info, warn or error."""
        self._announcer.log(severity, text)
        with self._lock:
            lines = self._throttle.lines(text)
        logger = self._node.get_logger()  # one call for each severity: rclpy remembers it by the place of the call
        for line in lines:
            if severity == "error":
                logger.error(line)
            elif severity == "warn":
                logger.warning(line)
            else:
                logger.info(line)
