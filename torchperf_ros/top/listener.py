"""Subscribes to what a node publishes about itself and folds it into a state, for views and for reports."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Final

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions

from torchperf_ros.node.endpoints import ros_message_class
from torchperf_ros.runs.run_log import RunLog, RunLogBuilder, RunLogError
from torchperf_ros.telemetry.node_state import NodeState, by_label

_DEPTH: Final = 200  # the picture may take its time: nothing is lost meanwhile


class NodeListener(contextlib.AbstractContextManager["NodeListener"]):
    """Listens while `listen` runs, on the thread that calls it."""

    def __init__(self, state: NodeState, own_name: str) -> None:
        """Join the graph under a name of its own, to fold messages of the node that `state` names into it."""
        self._state = state
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        name = f"{own_name}_{os.getpid()}"
        self._node = Node(name, use_global_arguments=False, enable_rosout=False, start_parameter_services=False)
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        array, diagnostics = "std_msgs/msg/Float64MultiArray", "diagnostic_msgs/msg/DiagnosticArray"
        for topic, type_name, callback in (
            (f"{state.name}/latency_stages", array, self._on_frame),
            (f"{state.name}/latency", "std_msgs/msg/Float64", lambda message: state.end_to_end_ms.append(message.data)),
            (f"{state.name}/memory", "std_msgs/msg/Float64", lambda message: state.on_memory(message.data)),
            (f"{state.name}/memory_stats", array, state.on_memory_stats),
            (f"{state.name}/anomaly", diagnostics, state.on_anomaly),
            ("/diagnostics", diagnostics, state.on_diagnostics),
        ):
            self._node.create_subscription(ros_message_class(type_name), topic, callback, QoSProfile(depth=_DEPTH))

    def listen(self, seconds: float) -> None:
        """Fold in what comes in this time."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left_s)

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()
        self._node.destroy_node()
        rclpy.try_shutdown()

    def _on_frame(self, message: Any, info: Any) -> None:  # noqa: ANN401 - rclpy's
        # When it was sent, not when it was taken here: this process is in no hurry.
        self._state.on_frame(message, info["source_timestamp"] or time.time_ns())


class _KeptNode(NodeState):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.builder = RunLogBuilder(name)

    def on_frame(self, message: Any, published_ns: int) -> None:  # noqa: ANN401 - rclpy's
        self.builder.row(published_ns, by_label(message))

    def on_memory_stats(self, message: Any) -> None:  # noqa: ANN401
        self.builder.memory(time.time_ns(), by_label(message))

    def on_anomaly(self, message: Any) -> None:  # noqa: ANN401
        self.builder.on_anomaly(time.time_ns(), message)

    def on_diagnostics(self, message: Any) -> None:  # noqa: ANN401
        super().on_diagnostics(message)
        self.builder.on_diagnostics(time.time_ns(), message)


def listen_for(name: str, seconds: float, progress: Callable[[int, int], None]) -> RunLog:
    """Listen to a node such as `/perf` for a while, so that `torchperf report` can show it like a log.

    `progress` is called with how many of how many milliseconds have passed.

    Raises:
        RunLogError: nothing was heard of it.
    """
    node = _KeptNode(name)
    start_s = time.monotonic()
    with NodeListener(node, "torchperf_report") as listener:
        while (passed_s := time.monotonic() - start_s) < seconds:
            progress(round(passed_s * 1e3), round(seconds * 1e3))
            node.at(passed_s)
            listener.listen(min(0.5, seconds - passed_s))
    run = node.builder.build(f"{name}, live", None)
    if run.span_ns == (0, 0) and not node.heard:
        heard = f"; heard instead: {', '.join(sorted(node.others))}" if node.others else ""
        domain = os.environ.get("ROS_DOMAIN_ID", "0")
        raise RunLogError(f"node {name}: nothing heard in {seconds:g} s, in ROS_DOMAIN_ID {domain}{heard}")
    return run
