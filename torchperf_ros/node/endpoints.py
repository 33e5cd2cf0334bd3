"""What a node takes and gives.

Message classes and names of topics, publishers, and the endpoints of its stages.
"""

import functools
import importlib.util
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription
from rclpy.topic_endpoint_info import TopicEndpointInfo

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import has_header
from torchperf_ros.node.ring_subscription import Receiver, RingSubscription, Slot, Taker
from torchperf_ros.observe.ros_types import HEARD_QOS, ros_message_class
from torchperf_ros.stage.frame import Frame
from torchperf_ros.stage.hooks import Instead
from torchperf_ros.stage.stage import Stage
from torchperf_ros.stage.wiring import StageInput, Wiring

if TYPE_CHECKING:
    from torchperf_ros.observe.recording import (
        Recording,
    )  # which the emergency lane and listeners do without

EVENTS = importlib.import_module(  # in Humble it is the latter
    "rclpy.event_handler" if importlib.util.find_spec("rclpy.event_handler") else "rclpy.qos_event"
)
# It matches only publishers that keep their last message for who comes later, and gets that one.
LATCHED_QOS = QoSProfile(
    depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL
)
# How many messages back one is known again that comes by another subscription, too.
_KNOWN: Final = 8
# Whether rclpy's executor gives a callback the info of its message, as from 3.4 on; that of Humble does not.
_GIVES_INFO: Final = hasattr(Subscription, "CallbackType")
_UNKNOWN: Final = {"source_timestamp": 0}
OUTPUT_QOS = QoSProfile(
    depth=10, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.VOLATILE
)


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


def alike_topics(node: Node, topic: str, type_name: str, owner: str) -> list[str]:
    """Other topics of a type in the graph, which could be remapped to this one.

    Not those that only the node called `owner` publishes: the output of a stage is no input that was
    forgotten. Those with the topic's last word come first, as `/camera/image_raw` for `/image`.
    """
    found = (
        name
        for name, types in node.get_topic_names_and_types()
        if name != topic
        and type_name in types
        and any(whole_name(one) != owner for one in node.get_publishers_info_by_topic(name))
    )
    return sorted(found, key=lambda name: (topic.rpartition("/")[2] not in name, name))


def whole_name(endpoint: TopicEndpointInfo) -> str:
    """The name of an endpoint's node with its namespace."""
    return f"{endpoint.node_namespace.rstrip('/')}/{endpoint.node_name}"


def stage_inputs(node: Node, stage: Stage) -> list[StageInput]:
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

    `Publisher.publish` asks for the message's type and guards each call against the publisher's end, which
    takes a quarter of the time of two publications. Whoever destroys this one ends those threads first.
    """

    def __init__(self, publisher: Publisher) -> None:
        """Take rclpy's publisher."""
        self.publisher = publisher  # rclpy's
        self.topic_name = publisher.topic_name  # as resolved
        self._publish = publisher.handle.publish_raw

    def publish(self, data: bytes) -> None:
        """Send a message."""
        self._publish(data)


class Endpoints:
    """The endpoints of a configured node's stages, and of what its recorder takes besides.

    Attributes:
        inputs: those that come from topics.
        outputs: by stage, None while its message type is not known.
        heard: message types of topics that a black box is to hold and no record of a frame carries, by
            name.
        recording: takes their messages.
        active: whether frames are let in.
    """

    def __init__(
        self, node: Node, stages: int, answer_last: Callable[[RawPublisher, bytes], Instead | None] | None
    ) -> None:
        """Nothing is subscribed to before `connect`.

        `answer_last` publishes the last stage's outputs, if not None.
        """
        self.inputs: list[StageInput] = []
        self.outputs: list[RawPublisher | None] = [None] * stages
        self.heard: dict[str, str] = {}
        self.recording: Recording | None = None
        self.active = False
        self._node = node
        # Those whose publishers were not asked yet for what they keep, with what takes it.
        self._not_asked: list[tuple[StageInput, Callable[..., None]]] = []
        self._by_ring: Callable[[Subscription, Slot], RingSubscription] | None = None
        self._answer_last = answer_last
        self._followers: list[list[StageInput]] = [[] for _ in range(stages)]
        self._carried: frozenset[str] = frozenset()
        self._subscriptions: list[Subscription] = []
        self._receiver: Receiver | None = None

    def connect(
        self, stages: Sequence[Stage], taker: Taker | None, no_taker: Callable[[str], None]
    ) -> None:
        """Publishers for outputs; inputs from the stage that makes them, else from topics.

        Triggers are taken by `taker`, or by rclpy where that is None or fails: then `no_taker` is called
        with the reason.

        Raises:
            ConfigError: no topic can be called so, or two stages publish one, or two streams take one, or a
                stage would answer its own output, or take a topic as of another type.
            UnknownMessageType: a message's package is not installed.
        """
        every = [stage_inputs(self._node, stage) for stage in stages]
        wiring = Wiring(stages, every, functools.partial(resolved, self._node))
        self._followers = wiring.followers
        self._carried = wiring.published | {
            source.topic for sources in every for source in sources if source.index >= 0
        }
        kinds = {resolved(self._node, stage.config.output): stage.output_type for stage in stages}
        for source in wiring.from_topics:
            kind = kinds.setdefault(source.topic, source.type_name)
            if kind != source.type_name or (source.index == 0 and source.topic in wiring.published):
                raise ConfigError(
                    f"stage {source.stage.config.name} takes {source.topic} as {source.type_name}, which this"
                    f" node publishes or takes as {kind}: remap one of them, or set another output"
                )
        for index, stage in enumerate(stages):
            if (description := stage.pool.description) is not None:
                self.outputs[index] = RawPublisher(
                    self._node.create_publisher(
                        ros_message_class(description.output), stage.config.output, OUTPUT_QOS
                    )
                )
        if taker is not None:
            self._by_ring = functools.partial(RingSubscription, self._node, taker, no_taker)
        for source in wiring.from_topics:
            self._subscribe(source)
        self.ask_for_kept()

    def _say_failure(self) -> None:
        self._node.get_logger().error(
            f"a trigger could not be handed to its stage:\n{traceback.format_exc()}",
            throttle_duration_sec=1.0,
        )

    def _subscribe(self, source: StageInput) -> None:
        """A raw subscription: the message stays bytes on its way through the node."""
        best_effort = source.stage.config.input_reliability == "best_effort"
        reliability = ReliabilityPolicy.BEST_EFFORT if best_effort else ReliabilityPolicy.RELIABLE
        qos = QoSProfile(depth=1, reliability=reliability, durability=DurabilityPolicy.VOLATILE)
        # A guard, or scenes, depend on it, and frames do not carry it: an incident is to hold it.
        is_heard = self._begin_to_hear(source.topic, source.type_name)
        known: deque[int] = deque(maxlen=_KNOWN)

        def receive(data: bytes, info: Mapping[str, Any]) -> None:
            """Of a publisher that keeps its last message it comes by two subscriptions, and counts once."""
            published_ns = info["source_timestamp"]
            if published_ns in known:
                return
            if published_ns and self._can_use(source):  # 0: the middleware does not say it
                known.append(published_ns)
            source.receive(data)
            if is_heard:
                self._record(source.topic, data)

        callback = receive if _GIVES_INFO else lambda data, info=_UNKNOWN: receive(data, info)
        self.inputs.append(source)
        # What comes by two subscriptions would count twice there, which is seen of a trigger only.
        if _GIVES_INFO or source.index != 0 or self._by_ring is not None:
            self._not_asked.append((source, callback))
        self._take_input(source, callback, qos)

    def _can_use(self, source: StageInput) -> bool:
        """Whether a message is not lost on the stage: that of a trigger is, where no worker can answer it."""
        return source.index != 0 or (self.active and source.stage.pool.ready)

    def ask_for_kept(self) -> None:
        """Ask publishers for the last message that they keep for who comes later; to be called now and then.

        So a calibration, a map or a still picture that was published once is heard, whoever started first. A
        trigger's is asked for once its frame can be answered, and may be late by its stamp, as any frame.
        Others would warn of a subscription that they do not match.
        """
        for source, receive in [one for one in self._not_asked if self._can_use(one[0])]:
            if any(
                publisher.qos_profile.durability is DurabilityPolicy.TRANSIENT_LOCAL
                for publisher in self._node.get_publishers_info_by_topic(source.topic)
            ):
                self._not_asked.remove((source, receive))
                self._take_input(source, receive, LATCHED_QOS)

    def _take_input(self, source: StageInput, receive: Callable[..., None], qos: QoSProfile) -> None:
        made = self._take(source.topic, source.type_name, receive, qos)
        if self._by_ring is not None and source.index == 0:
            ring = self._by_ring(made, source.stage.slot)
            if self._receiver is None:
                self._receiver = Receiver(self._node.context, [ring], self._say_failure)
            else:
                self._receiver.add(ring)

    def listen(self, topics: Iterable[tuple[str, str]]) -> None:
        """Have messages of these topics, with their types, recorded, where they are not yet."""
        for topic, type_name in topics:
            if self._begin_to_hear(topic, type_name):
                self._take(topic, type_name, functools.partial(self._record, topic), HEARD_QOS)

    def _begin_to_hear(self, topic: str, type_name: str) -> bool:
        if topic in self._carried or topic in self.heard:
            return False
        self.heard[topic] = type_name
        return True

    def _take(
        self, topic: str, type_name: str, receive: Callable[..., None], qos: QoSProfile
    ) -> Subscription:
        made = self._node.create_subscription(
            ros_message_class(type_name),
            topic,
            receive,
            qos,
            raw=True,
            # By default a subscription warns of each publisher that it does not match.
            event_callbacks=EVENTS.SubscriptionEventCallbacks(use_default_callbacks=qos is not LATCHED_QOS),
        )
        self._subscriptions.append(made)
        return made

    def _record(self, topic: str, data: bytes) -> None:
        if self.recording is not None:
            self.recording.message(topic, self._node.get_clock().now().nanoseconds, data)

    def publish(self, index: int, payload: bytes) -> Instead | None:
        """Send the output of the stage of this index; returns what went out instead, if something did."""
        if (publisher := self.outputs[index]) is None:
            return None
        if self._answer_last is not None and index == len(self.outputs) - 1:
            return self._answer_last(publisher, payload)
        publisher.publish(payload)
        return None

    def hand_on(self, index: int, payload: bytes | None, frame: Frame) -> None:
        """Give that stage's output to those that take it, inside the node."""
        for follower in self._followers[index]:
            follower.hand_over(payload, frame)

    def take_no_more(self) -> None:
        """End all subscriptions, before the stages stop."""
        if self._receiver is not None:
            self._receiver.close()
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._receiver, self._subscriptions, self._not_asked = None, [], []

    def close(self) -> None:
        """End the publishers, after the stages."""
        for publisher in filter(None, self.outputs):
            self._node.destroy_publisher(publisher.publisher)
