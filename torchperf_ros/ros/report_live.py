"""Listens to a running node for a while, so that `torchperf report` can tell of it as of a log."""

import os
import time
from collections.abc import Callable
from typing import Any

from torchperf_ros.analysis.run_log import RunLog, RunLogError
from torchperf_ros.analysis.run_log_builder import RunLogBuilder
from torchperf_ros.ros.top_listener import TopListener
from torchperf_ros.telemetry.watched_node import WatchedNode

_STEP_S = 0.5


class _Kept(WatchedNode):
    """A watched node of which everything is kept."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.builder = RunLogBuilder(name)

    def on_frame(self, message: Any, published_ns: int) -> None:  # noqa: ANN401 - rclpy's
        self.builder.row(published_ns, _by_label(message))

    def on_memory_stats(self, message: Any) -> None:  # noqa: ANN401
        self.builder.memory(time.time_ns(), _by_label(message))

    def on_anomaly(self, message: Any) -> None:  # noqa: ANN401
        self.builder.on_anomaly(time.time_ns(), message)

    def on_diagnostics(self, message: Any) -> None:  # noqa: ANN401
        super().on_diagnostics(message)
        self.builder.on_diagnostics(time.time_ns(), message)


def listen_for(name: str, seconds: float, progress: Callable[[int, int], None]) -> RunLog:
    """What a node says in this time.

    Args:
        name: for example `/perf`.
        seconds: how long to listen.
        progress: told how many of how many milliseconds have passed.

    Raises:
        RunLogError: nothing was heard of it.
    """
    node = _Kept(name)
    start_s = time.monotonic()
    with TopListener(node, name, f"torchperf_report_{os.getpid()}") as listener:
        while (passed_s := time.monotonic() - start_s) < seconds:
            progress(round(passed_s * 1e3), round(seconds * 1e3))
            node.at(passed_s)
            listener.listen(min(_STEP_S, seconds - passed_s))
    run = node.builder.build(f"{name}, live", None)
    if run.span_ns == (0, 0) and not node.heard:
        heard = f"; heard instead: {', '.join(sorted(node.others))}" if node.others else ""
        domain = os.environ.get("ROS_DOMAIN_ID", "0")
        msg = f"node {name}: nothing heard in {seconds:g} s, in ROS_DOMAIN_ID {domain}{heard}"
        raise RunLogError(msg)
    return run


def _by_label(message: Any) -> dict[str, float]:  # noqa: ANN401 - std_msgs/Float64MultiArray
    return {dim.label: float(value) for dim, value in zip(message.layout.dim, message.data, strict=False)}
