"""The onlooker in the ROS graph: subscribes to what the node says about itself and folds it into the drive's state."""

import time
from types import TracebackType
from typing import Any, Final

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import Float64, Float64MultiArray

from torchperf_ros.demo.drive_state import DriveState

_DEPTH: Final = 200  # the picture may take its time: nothing is lost meanwhile


class Watcher:
    """Listens while `listen` runs; needs a thread of nobody."""

    def __init__(self, state: DriveState) -> None:
        """Join the graph that the environment names."""
        self._state = state
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        self._node = Node(
            "torchperf_demo", use_global_arguments=False, enable_rosout=False, start_parameter_services=False
        )
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        qos = QoSProfile(depth=_DEPTH)
        self._node.create_subscription(Float64MultiArray, "/perf/latency_stages", self._on_frame, qos)
        self._node.create_subscription(Float64, "/perf/latency", self._on_latency, qos)
        self._node.create_subscription(Float64, "/perf/memory", self._on_memory, qos)
        self._node.create_subscription(DiagnosticArray, "/perf/anomaly", state.on_anomaly, qos)
        self._node.create_subscription(DiagnosticArray, "/diagnostics", state.on_diagnostics, qos)

    def listen(self, seconds: float) -> None:
        """Fold in what comes in this time."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left_s)

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._executor.shutdown()
        self._node.destroy_node()
        rclpy.try_shutdown()

    def _on_frame(self, message: Any, info: Any) -> None:  # noqa: ANN401 - rclpy's
        # When it was sent, not when it was taken here: this process is in no hurry.
        self._state.on_frame(message, info["source_timestamp"] or time.time_ns())

    def _on_latency(self, message: Any) -> None:  # noqa: ANN401
        self._state.end_to_end_ms.append(message.data)

    def _on_memory(self, message: Any) -> None:  # noqa: ANN401
        self._state.memory_mib = message.data
