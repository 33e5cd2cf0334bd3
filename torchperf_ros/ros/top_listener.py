"""The onlooker in the ROS graph: subscribes to what a node says about itself and folds it into a state."""

import time
from types import TracebackType
from typing import Any, Final

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions

from torchperf_ros.ros.endpoints import ros_message_class
from torchperf_ros.telemetry.node_state import NodeState

_DEPTH: Final = 200  # the picture may take its time: nothing is lost meanwhile


class TopListener:
    """Listens while `listen` runs; needs a thread of nobody."""

    def __init__(self, state: NodeState, name: str, own_name: str) -> None:
        """Join the graph that the environment names.

        Args:
            state: what messages are folded into.
            name: the node to listen to, for example `/perf`; it may come and go.
            own_name: what this onlooker is called in the graph.
        """
        self._state = state
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        self._node = Node(own_name, use_global_arguments=False, enable_rosout=False, start_parameter_services=False)
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        array, diagnostics = "std_msgs/msg/Float64MultiArray", "diagnostic_msgs/msg/DiagnosticArray"
        for topic, type_name, callback in (
            (f"{name}/latency_stages", array, self._on_frame),
            (f"{name}/latency", "std_msgs/msg/Float64", self._on_latency),
            (f"{name}/memory", "std_msgs/msg/Float64", self._on_memory),
            (f"{name}/memory_stats", array, state.on_memory_stats),
            (f"{name}/anomaly", diagnostics, state.on_anomaly),
            ("/diagnostics", diagnostics, state.on_diagnostics),
        ):
            self._node.create_subscription(ros_message_class(type_name), topic, callback, QoSProfile(depth=_DEPTH))

    def listen(self, seconds: float) -> None:
        """Fold in what comes in this time."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left_s)

    def __enter__(self) -> "TopListener":
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
        self._state.on_latency(message.data)

    def _on_memory(self, message: Any) -> None:  # noqa: ANN401
        self._state.on_memory(message.data)
