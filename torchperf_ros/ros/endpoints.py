"""A stage's subscriptions and its output publisher."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription

from torchperf_ros.core.errors import UnknownMessageType
from torchperf_ros.core.frame import Frame, header_stamp_ns
from torchperf_ros.core.message_types import has_header
from torchperf_ros.supervise.stage_actor import StageActor

OUTPUT_QOS = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.VOLATILE)


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


@dataclass
class Input:
    """One input of a stage: its topic as resolved, its message type, and whether that has a stamp."""

    stage: StageActor
    index: int
    topic: str
    type_name: str
    stamped: bool

    def receive(self, data: bytes) -> None:
        """A message from a topic."""
        stamp_ns = header_stamp_ns(data) if self.stamped else 0
        if self.index == 0:
            self.stage.offer(data, stamp_ns, stamped=self.stamped)
        else:
            self.stage.offer_latest(self.index, data, stamp_ns)

    def hand_over(self, data: bytes | None, frame: Frame) -> None:
        """The output of the stage before, None if it has none for this frame; it keeps that frame's stamp."""
        if self.index == 0:
            why = "" if data is not None else "the stage before had nothing to hand over"
            self.stage.offer(data, frame.stamp_ns, stamped=False, upstream=frame, refusal=why)
        elif data is not None:
            self.stage.offer_latest(self.index, data, frame.stamp_ns)


def stage_inputs(node: Node, stage: StageActor) -> list[Input]:
    """The inputs that the stage's adapter described."""
    description = stage.crew.description
    return [] if description is None else [
        Input(stage, index, node.resolve_topic_name(topic), type_name, has_header(type_name))
        for index, (topic, type_name) in enumerate(description.inputs)
    ]  # fmt: skip


def output_publisher(node: Node, stage: StageActor) -> Publisher:
    """The publisher of the stage's output."""
    description = stage.crew.description
    assert description is not None  # stages without one get no endpoints
    return node.create_publisher(ros_message_class(description.output), stage.config.output, OUTPUT_QOS)


def subscribe(node: Node, source: Input, receive: Callable[[bytes], None]) -> Subscription:
    """A raw subscription: the message stays bytes on its way through the node."""
    best_effort = source.stage.config.input_reliability == "best_effort"
    reliability = ReliabilityPolicy.BEST_EFFORT if best_effort else ReliabilityPolicy.RELIABLE
    qos = QoSProfile(depth=1, reliability=reliability, durability=DurabilityPolicy.VOLATILE)
    return node.create_subscription(ros_message_class(source.type_name), source.topic, receive, qos, raw=True)
