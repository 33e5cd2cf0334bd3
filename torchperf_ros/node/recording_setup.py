"""What the recorder has to know of the node: its stages, topics, parameters and versions."""

import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

from rclpy.lifecycle import LifecycleNode

from torchperf_ros import __version__
from torchperf_ros.config.build_options import version_of
from torchperf_ros.frame.clock import monotonic_ns
from torchperf_ros.node.endpoints import stage_inputs
from torchperf_ros.stage.stage_actor import StageActor

TOPICS = (
    ("~/memory", "std_msgs/msg/Float64"),
    ("~/memory_stats", "std_msgs/msg/Float64MultiArray"),
    ("~/anomaly", "diagnostic_msgs/msg/DiagnosticArray"),
    ("/diagnostics", "diagnostic_msgs/msg/DiagnosticArray"),
)
"""What the reporter publishes, in the order of the recorder's index."""
MEMORY, MEMORY_STATS, ANOMALY, DIAGNOSTICS = range(len(TOPICS))
_PACKAGES = ("torch", "numpy", "rosbags", "rclpy", "ros-rclpy")


def recording_setup(
    node: LifecycleNode, stages: Sequence[StageActor], heard: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """The recorder's setup, see `recorder/recorder.py`; `heard`: topics and types of what no frame carries."""
    outputs = {node.resolve_topic_name(stage.config.output) for stage in stages}
    return {
        "node": node.get_fully_qualified_name(),
        "pid": os.getpid(),
        "ros_offset_ns": node.get_clock().now().nanoseconds - monotonic_ns(),
        "versions": _versions(),
        "parameters": _parameters(node),
        "topics": [(node.resolve_topic_name(name), type_name) for name, type_name in TOPICS],
        "heard": list(heard),
        "stages": [_stage(node, stage, outputs) for stage in stages],
    }


def _stage(node: LifecycleNode, stage: StageActor, outputs: set[str]) -> dict[str, Any]:
    config, description = stage.config, stage.pool.description
    return {
        "name": config.name,
        "tiers": list(config.tiers),
        "scenes": {scene.name: list(scene.tiers) for scene in config.scenes},
        "budget_ms": config.budget_ms,
        "output": (node.resolve_topic_name(config.output), "" if description is None else description.output),
        "inputs": [
            None if source.topic in outputs else (source.topic, source.type_name)
            for source in stage_inputs(node, stage)
            if source.index >= 0
        ],
    }


def _parameters(node: LifecycleNode) -> dict[str, Any]:
    names = sorted(node.list_parameters([], 0).names)
    return {parameter.name: parameter.value for parameter in node.get_parameters(names)}


def _versions() -> dict[str, str]:
    found = {"torchperf_ros": __version__, "python": platform.python_version(), "machine": platform.machine()}
    # rclpy of a sourced ROS, or of wheels: one of the two
    found |= {name: version for name in _PACKAGES if (version := version_of(name))}
    return found | {"ros_distro": os.environ.get("ROS_DISTRO", "")}
