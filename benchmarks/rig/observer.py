"""The onlooker in the ROS graph: what a node publishes, and when that left it and arrived here.

Both times come from DDS and not from a callback: when the writer wrote, and when the reader's own thread
received. That thread is real-time where permitted, so that a busy machine does not make the onlooker late
instead of the node.
"""

import contextlib
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Path
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import Float64MultiArray

from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.messages import decode
from torchperf_ros.observe.telemetry.rows import LABELS

_DEPTH = 1000
_PRIORITY = 5  # between the camera and the node
_INDEX = {label: index for index, label in enumerate(LABELS)}
_ROW = struct.Struct(f"<{len(LABELS)}d")


@dataclass(frozen=True, slots=True)
class Row:
    """One record of `latency_stages`, and when it was written (ROS time in ns)."""

    written_ns: int
    values: tuple[float, ...]

    def __getitem__(self, label: str) -> float:
        """The value with a label of `LABELS`."""
        return self.values[_INDEX[label]]


class Output(NamedTuple):
    """One output.

    When it was written and received here, the stamp and frame_id of its header, whether it is finite.
    """

    written_ns: int
    received_ns: int
    stamp_ns: int
    source: str
    finite: bool


@dataclass
class Seen:
    """What one node has published since `clear`."""

    rows: list[Row] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def clear(self) -> None:
        self.rows.clear()
        self.outputs.clear()


class Observer:
    """Listens to nodes by their namespace while `listen` runs.

    Attributes:
        seen: namespace -> what that node published.
        status: name of a status on `/diagnostics` -> its values.
        reports: messages on `/diagnostics` so far.
    """

    def __init__(self, namespaces: tuple[str, ...], *, outputs: bool = True) -> None:
        """Join the graph that the environment names; `outputs`: listen to `answer` as well."""
        self.seen = {namespace: Seen() for namespace in namespaces}
        self.status: dict[str, dict[str, str]] = {}
        self.reports = 0
        with realtime():
            rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
            self._node = Node(
                "onlooker", use_global_arguments=False, enable_rosout=False, start_parameter_services=False
            )
            self._executor = SingleThreadedExecutor()
            self._executor.add_node(self._node)
            qos = QoSProfile(depth=_DEPTH)
            self._node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, qos)
            for namespace, seen in self.seen.items():
                topic = f"{namespace}/perf/latency_stages"
                self._node.create_subscription(Float64MultiArray, topic, _take_row(seen), qos, raw=True)
                if outputs:
                    self._node.create_subscription(
                        Path, f"{namespace}/answer", _take_output(seen), qos, raw=True
                    )

    def listen(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Take in what comes in this time, or until a condition holds; returns whether it did."""
        end_s = time.monotonic() + seconds
        while not until():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            self._executor.spin_once(timeout_sec=min(left_s, 0.05))
        return True

    def values(self, status: str) -> dict[str, str]:
        """The newest values of a status, empty before the first."""
        return self.status.get(status, {})

    def close(self) -> None:
        self._executor.shutdown()
        self._node.destroy_node()
        rclpy.try_shutdown()

    def _on_diagnostics(self, message: Any) -> None:
        for status in message.status:
            self.status[status.name] = {pair.key: pair.value for pair in status.values}
        self.reports += 1


def _take_row(seen: Seen) -> Callable[[bytes, Any], None]:
    def take(data: bytes, info: Any) -> None:
        seen.rows.append(Row(info["source_timestamp"], _ROW.unpack(data[-_ROW.size :])))

    return take


def _take_output(seen: Seen) -> Callable[[bytes, Any], None]:
    def take(data: bytes, info: Any) -> None:
        path = decode(data, "nav_msgs/msg/Path")
        finite = bool(np.isfinite([pose.pose.position.y for pose in path.poses]).all())
        written_ns, received_ns = info["source_timestamp"], info["received_timestamp"]
        seen.outputs.append(
            Output(written_ns, received_ns, header_stamp_ns(data), path.header.frame_id, finite)
        )

    return take


@contextlib.contextmanager
def realtime() -> Any:
    """This thread, and those that start meanwhile, are real-time where that is permitted.

    The caller is not, after.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
