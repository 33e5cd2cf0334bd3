"""Subscribes to what a node publishes about itself and folds it into a state, for views and for reports."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import rclpy
from rcl_interfaces.srv import GetParameters
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import parameter_value_to_python
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions

from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.errors import UnknownMessageType
from torchperf_ros.api.messages import has_header
from torchperf_ros.observe.ros_types import HEARD_QOS, ros_message_class
from torchperf_ros.observe.runs.run_builder import RunLogBuilder
from torchperf_ros.observe.runs.run_log import RunLog, RunLogError
from torchperf_ros.observe.telemetry.node_state import NodeState, by_label
from torchperf_ros.workers.process_setup import held_interrupt

_DEPTH: Final = 200  # the picture may take its time: nothing is lost meanwhile
_TYPES: Final = {
    "latency": "std_msgs/msg/Float64",
    "memory": "std_msgs/msg/Float64",
    **dict.fromkeys(("latency_stages", "memory_stats"), "std_msgs/msg/Float64MultiArray"),
    **dict.fromkeys(("anomaly", "/diagnostics"), "diagnostic_msgs/msg/DiagnosticArray"),
}


class NodeListener(contextlib.AbstractContextManager["NodeListener"]):
    """Listens while `listen` runs, on the thread that calls it."""

    def __init__(
        self, state: NodeState, own_name: str, callbacks: Mapping[str, Callable[..., None]] | None = None
    ) -> None:
        """Join the graph under a name of its own, to fold messages of the node that `state` names into it.

        `callbacks` take the messages instead, by their topic below the node's name, or `/diagnostics`.
        """
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        name = f"{own_name}_{os.getpid()}"
        self._node = Node(
            name, use_global_arguments=False, enable_rosout=False, start_parameter_services=False
        )
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        folded: Mapping[str, Callable[..., None]] = {
            "latency_stages": lambda message, info: state.on_frame(message, _sent_ns(info)),
            "latency": lambda message: state.end_to_end_ms.append(message.data),
            "memory": lambda message: state.on_memory(message.data),
            "memory_stats": state.on_memory_stats,
            "anomaly": state.on_anomaly,
            "/diagnostics": state.on_diagnostics,
        }
        for topic, callback in (callbacks or folded).items():
            kind, name = (
                ros_message_class(_TYPES[topic]),
                topic if topic[0] == "/" else f"{state.name}/{topic}",
            )
            self._node.create_subscription(kind, name, callback, QoSProfile(depth=_DEPTH))

    def listen(self, seconds: float) -> None:
        """Fold in what comes in this time; Ctrl-C waits for its end."""
        end_s = time.monotonic() + seconds
        with held_interrupt():
            while (left_s := end_s - time.monotonic()) > 0:
                self._executor.spin_once(timeout_sec=left_s)

    def hear(self, topic: str, callback: Callable[[int, Mapping[str, int], int], None]) -> str:
        """Take the messages of a topic as bytes from now on, best effort.

        Returns why it cannot, else nothing.

        The callback gets the header's stamp in ns (0 without one), rclpy's information on the message, and
        its size.
        """
        kinds: list[str] = dict(self._node.get_topic_names_and_types()).get(topic, [])
        if not kinds:
            return f"no node publishes {topic}"
        try:
            kind, stamped = ros_message_class(kinds[0]), has_header(kinds[0])
        except UnknownMessageType as error:
            return f"{topic}: {error}"

        def take(data: bytes, info: Mapping[str, int]) -> None:
            callback(header_stamp_ns(data) if stamped else 0, info, len(data))

        self._node.create_subscription(kind, topic, take, HEARD_QOS, raw=True)
        return ""

    def publishers(self, topic: str) -> list[str]:
        """Whole names of the nodes that publish a topic."""
        found = self._node.get_publishers_info_by_topic(topic)
        return sorted({f"{one.node_namespace.rstrip('/')}/{one.node_name}" for one in found})

    def parameters(self, of: str, names: Sequence[str], within_s: float) -> dict[str, Any]:
        """A node's parameters by name.

        None of them where it does not answer in time, or does not know one.
        """
        client = self._node.create_client(GetParameters, f"{of}/get_parameters")
        if not client.wait_for_service(within_s):
            return {}
        future = client.call_async(GetParameters.Request(names=list(names)))
        self._executor.spin_until_future_complete(future, within_s)
        values = future.result().values if future.done() else []
        return dict(zip(names, map(parameter_value_to_python, values), strict=False))

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()
        self._node.destroy_node()
        rclpy.try_shutdown()


def _sent_ns(info: Mapping[str, int]) -> int:
    """When a message was sent, not when it was taken here: this process is in no hurry."""
    return info["source_timestamp"] or time.time_ns()


def listen_for(
    name: str,
    seconds: float,
    progress: Callable[[int, int], None],
    look: Callable[[NodeListener, NodeState], bool] = lambda _listener, _state: True,
) -> RunLog:
    """Listen to a node such as `/perf` for a while, so that `torchperf report` can show it like a log.

    `progress` is called with how many of how many milliseconds have passed, and `look` as often, to hear
    more. Where it says at the end that it has not heard enough, as another process may take seconds to know
    of a new subscriber, the listening goes on for as long again at most.

    Raises:
        RunLogError: nothing was heard of it.
    """
    builder = RunLogBuilder(name)
    node, start_s = builder.state, time.monotonic()
    callbacks: Mapping[str, Callable[..., None]] = {
        "latency_stages": lambda message, info: builder.row(_sent_ns(info), by_label(message)),
        "memory_stats": lambda message: builder.memory(time.time_ns(), by_label(message)),
        "anomaly": lambda message: builder.on_anomaly(time.time_ns(), message),
        "/diagnostics": lambda message: builder.on_diagnostics(time.time_ns(), message),
    }
    with NodeListener(node, "torchperf_report", callbacks) as listener:
        end_s = seconds
        while (passed_s := time.monotonic() - start_s) < end_s:
            progress(round(passed_s * 1e3), round(end_s * 1e3))
            node.at(passed_s)
            look(listener, node)
            listener.listen(min(0.5, end_s - passed_s))
            if not look(listener, node) and time.monotonic() - start_s >= end_s:
                end_s = min(end_s + 0.5, 2 * seconds)
    run = builder.build(f"{name}, live", None)
    if run.span_ns == (0, 0) and not node.heard:
        heard = f"; heard instead: {', '.join(sorted(node.others))}" if node.others else ""
        domain = os.environ.get("ROS_DOMAIN_ID", "0")
        raise RunLogError(f"node {name}: nothing heard in {seconds:g} s, in ROS_DOMAIN_ID {domain}{heard}")
    return run
