"""Message types and QoS by which topics are listened to, for the node and for commands beside it."""

import importlib
from typing import Any

from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from torchperf_ros.api.errors import UnknownMessageType

# Of topics that the recorder or a command takes beside the stages.
HEARD_QOS = QoSProfile(
    depth=5, reliability=ReliabilityPolicy.BEST_EFFORT, durability=DurabilityPolicy.VOLATILE
)


def ros_message_class(name: str) -> Any:  # noqa: ANN401 - rosidl classes are untyped
    """The rclpy class of `package/msg/Name`.

    Raises:
        UnknownMessageType: the package is not installed.
    """
    package, _, short = name.split("/")
    try:
        return getattr(importlib.import_module(f"{package}.msg"), short)
    except (ImportError, AttributeError) as error:
        hint = (
            f"; install {package}, or source the workspace that has it"
            if isinstance(error, ImportError)
            else ""
        )
        raise UnknownMessageType(
            f"message type {name!r} cannot be used with rclpy ({error}){hint}"
        ) from error
