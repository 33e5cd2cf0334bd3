"""A stage's subscriptions and its output publisher."""

import importlib
from collections.abc import Callable
from typing import Any

from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription

from torchperf_ros.config.message_types import has_header
from torchperf_ros.frame.errors import ConfigError, UnknownMessageType
from torchperf_ros.stage.stage_actor import StageActor
from torchperf_ros.stage.stage_input import StageInput

OUTPUT_QOS = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.VOLATILE)

HEARD_QOS = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT, durability=DurabilityPolicy.VOLATILE)
"""Of topics that the recorder alone takes."""


def ros_message_class(name: str) -> Any:  # noqa: ANN401 - rosidl classes are untyped
    """The rclpy class of `package/msg/Name`.

    Raises:
        UnknownMessageType: the package is not installed.
    """
    package, _, short = name.split("/")
    try:
        return getattr(importlib.import_module(f"{package}.msg"), short)
    except (ImportError, AttributeError) as error:
        msg = f"message type {name!r} cannot be used with rclpy ({error}); install {package}"
        raise UnknownMessageType(msg) from error


def resolved(node: Node, topic: str) -> str:
    """The topic's whole name.

    Raises:
        ConfigError: no topic can be called so.
    """
    try:
        return str(node.resolve_topic_name(topic))
    except (RuntimeError, ValueError) as error:
        why = str(error).removeprefix("failed to resolve name: ").partition(", at ")[0]
        raise ConfigError(f"{topic!r} is not allowed as the name of a topic: {why}") from error


def stage_inputs(node: Node, stage: StageActor) -> list[StageInput]:
    """What the stage's adapter takes, its scenes and its guard.

    Raises:
        ConfigError: no topic can be called so.
    """
    return [
        StageInput(stage, index, resolved(node, topic), type_name, has_header(type_name))
        for index, topic, type_name in stage.inputs
    ]


class RawPublisher:
    """Publishes CDR bytes, on the threads that answer frames.

    `Publisher.publish` asks for the message's type and guards each call against the publisher's end, which takes a
    quarter of the time of two publications. Whoever destroys this one ends those threads first.
    """

    def __init__(self, publisher: Publisher) -> None:
        """Take rclpy's publisher."""
        self.publisher = publisher  # rclpy's
        self.topic_name = publisher.topic_name  # as resolved
        self._publish = publisher.handle.publish_raw

    def publish(self, data: bytes) -> None:
        """Send a message."""
        self._publish(data)


def output_publisher(node: Node, stage: StageActor) -> RawPublisher:
    """The publisher of the stage's output."""
    description = stage.pool.description
    assert description is not None  # stages without one get no endpoints
    kind = ros_message_class(description.output)
    return RawPublisher(node.create_publisher(kind, stage.config.output, OUTPUT_QOS))


def subscribe(node: Node, source: StageInput, receive: Callable[[bytes], None]) -> Subscription:
    """A raw subscription: the message stays bytes on its way through the node."""
    best_effort = source.stage.config.input_reliability == "best_effort"
    reliability = ReliabilityPolicy.BEST_EFFORT if best_effort else ReliabilityPolicy.RELIABLE
    qos = QoSProfile(depth=1, reliability=reliability, durability=DurabilityPolicy.VOLATILE)
    return node.create_subscription(ros_message_class(source.type_name), source.topic, receive, qos, raw=True)
