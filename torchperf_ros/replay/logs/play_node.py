"""The player's place in the ROS graph: a publisher for each topic, `/clock`, and services to pause."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import rclpy
from lifecycle_msgs.srv import GetState
from rclpy.duration import Duration
from rclpy.exceptions import InvalidTopicNameException
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node, NodeNameNonExistentError
from rclpy.publisher import Publisher
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions
from rclpy.validate_topic_name import validate_topic_name
from std_srvs.srv import Trigger

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import UnknownMessageType
from torchperf_ros.api.outcome import Health
from torchperf_ros.node.endpoints import whole_name
from torchperf_ros.observe.ros_types import ros_message_class
from torchperf_ros.observe.telemetry.node_state import NodeState
from torchperf_ros.replay.logs.log_reader import LogMessage, LogTopic
from torchperf_ros.replay.logs.player import Player, PlayError

CLOCK_TOPIC: Final = "/clock"
_DEPTH: Final = 10
_MOST_LATCHED: Final = 1000
# A publisher may know a subscriber before the subscriber knows it, and what it publishes until then
# is lost.
_MUTUAL_S: Final = 0.5
# A request may be lost, and an answer.
_ASK_AGAIN_S: Final = 1
_LAST_S: Final = 1
_LOOK_S: Final = 0.5


class PlayNode(contextlib.AbstractContextManager["PlayNode"]):
    """Publishes on the player's thread.

    Its own thread answers the services. `left_out`: topics by name, and why.
    """

    def __init__(
        self, topics: Mapping[str, LogTopic], remap: Mapping[str, str], *, publishes_time: bool
    ) -> None:
        """Join the environment's graph, to publish these topics of the log, some under other names.

        If it `publishes_time`, on `/clock`, the log's own is left out.

        Raises:
            PlayError: none of the topics can be published, a name is not allowed, or two types have one
                name.
        """
        self.left_out: dict[str, str] = {}
        self._types: dict[str, LogTopic] = {}
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        self._node = Node(
            "player", use_global_arguments=False, enable_rosout=False, start_parameter_services=False
        )
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        self._clock: Publisher | None = None
        try:
            if publishes_time:
                kind = ros_message_class("rosgraph_msgs/msg/Clock")
                self._clock = self._node.create_publisher(kind, CLOCK_TOPIC, QoSProfile(depth=1))
            made = {name: self._publisher(topic, remap.get(name, name)) for name, topic in topics.items()}
            self._publishers = {
                name: publisher for name, publisher in made.items() if publisher is not None
            }
            if not self._publishers:
                raise PlayError("; ".join(self.left_out.values()))
        except BaseException:
            self._shut_down()
            raise
        self._thread = threading.Thread(target=self._spin, name="services", daemon=True)
        self._thread.start()

    def _publisher(self, topic: LogTopic, name: str) -> Publisher | None:
        """Reliable, so that a subscriber of any kind is served; None if the type cannot be used here."""
        if self._clock is not None and name == CLOCK_TOPIC:
            self.left_out[topic.name] = f"{topic.name} is left out: --clock publishes the time itself"
            return None
        try:
            kind = ros_message_class(topic.type_name)
        except UnknownMessageType as error:
            self.left_out[topic.name] = f"{topic.name} is left out: {error}"
            return None
        qos = QoSProfile(depth=_DEPTH, reliability=ReliabilityPolicy.RELIABLE)
        if topic.latched or name == "/tf_static":
            qos.durability = DurabilityPolicy.TRANSIENT_LOCAL
            qos.depth = min(max(topic.count, _DEPTH), _MOST_LATCHED)
        try:
            validate_topic_name(name)
            first = self._types.setdefault(self._node.resolve_topic_name(name), topic)
            if first.type_name != topic.type_name:  # DDS takes no second one
                both = f"{first.name} ({first.type_name}) and {topic.name} ({topic.type_name})"
                hint = "--remap one of them to another name, or leave it out with --topics"
                raise PlayError(f"{both} cannot both be published as {name}: a topic has one type; {hint}")
            return self._node.create_publisher(kind, name, qos)
        except InvalidTopicNameException as error:
            raise PlayError(f"topic {name!r} is not allowed: {' '.join(str(error).split())}") from error

    def publish(self, message: LogMessage) -> None:
        self._publishers[message.topic].publish(message.data)

    def publish_time(self, log_ns: int) -> None:
        if self._clock is not None:
            clock = self._clock.msg_type()
            clock.clock.sec, clock.clock.nanosec = divmod(max(log_ns, 0), NS_PER_S)
            self._clock.publish(clock)

    def serve(self, player: Player) -> None:
        """Offer `~/pause` and `~/resume` from now on."""

        # rclpy's
        def answer(act: Callable[[], None], word: str, _: Any, response: Any) -> Any:  # noqa: ANN401
            act()
            response.success, response.message = True, word
            return response

        for name, act, word in (("pause", player.pause, "paused"), ("resume", player.resume, "playing")):
            self._node.create_service(Trigger, f"~/{name}", partial(answer, act, word))

    def _spin(self) -> None:
        with contextlib.suppress(ExternalShutdownException):
            self._executor.spin()

    def wait_for_subscribers(self, seconds: float) -> list[str]:
        """Wait until every topic has a subscriber; returns those that have none after so long."""

        def unheard() -> list[str]:
            return sorted(
                each.topic_name for each in self._publishers.values() if not each.get_subscription_count()
            )

        _wait(lambda: not unheard(), seconds)
        time.sleep(_MUTUAL_S)
        return unheard()

    def wait_for_node(self, name: str, seconds: float, say: Callable[[str], None]) -> bool:
        """Wait until a perf node can answer frames and hears what it subscribes to.

        False if not within so long.

        `say` gets what it waits for, whenever that is something else.
        """
        kind, state = ros_message_class("diagnostic_msgs/msg/DiagnosticArray"), NodeState(name)
        subscription = self._node.create_subscription(kind, "/diagnostics", state.on_diagnostics, 50)
        client = self._node.create_client(GetState, f"{name}/get_state")
        end_s = time.monotonic() + seconds
        shown, next_s = "", 0.0

        def can_answer() -> bool:
            nonlocal shown, next_s
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + _LOOK_S
                if (why := self._why_unheard(name, state)) != shown:
                    shown = why
                    say(f"waiting for {name}: {why}")
            health = {state.node.get("health", ""), *(stage.health for stage in state.stages.values())} - {
                ""
            }
            return bool(health) and Health.STARTING.name not in health and self._is_heard_by(name)

        def knows_us() -> bool:  # it does once it answers a client that was announced after the publishers
            answer = client.call_async(GetState.Request())
            if known := _wait(answer.done, _ASK_AGAIN_S):
                return known
            client.remove_pending_request(answer)
            return False

        try:
            return _wait(can_answer, seconds) and _wait(knows_us, end_s - time.monotonic())
        finally:
            self._node.destroy_subscription(subscription)
            self._node.destroy_client(client)

    def _why_unheard(self, name: str, state: NodeState) -> str:
        """What keeps a node from hearing.

        It is not there, its start, or names; with the `--remap` that would help.
        """
        namespace, _, short = name.rpartition("/")
        try:
            wanted = self._node.get_subscriber_names_and_types_by_node(short, namespace or "/")
        except NodeNameNonExistentError:
            return f"no node of this name is in ROS_DOMAIN_ID {os.environ.get('ROS_DOMAIN_ID', '0')}"
        own = {publisher.topic_name for publisher in self._publishers.values()}
        lacks = [
            (topic, types[0])
            for topic, types in sorted(wanted)
            if topic not in own
            and not topic.endswith(("/clock", "/parameter_events"))
            and not self._node.count_publishers(topic)
        ]
        starting = state.node.get("health", "") in {"", Health.STARTING.name}
        hints = [self._hint(topic, kind) for topic, kind in lacks]
        words = ["it is starting" if starting else f"it is {state.node['health']}", *filter(None, hints)]
        return "; ".join(words)

    def _hint(self, topic: str, type_name: str) -> str:
        """Which topics of the log could be an input of the node; "" where none has its type."""
        alike = sorted(name for name, own in self._types.items() if own.type_name == type_name)
        if not alike:
            return ""
        others = f" (or {', '.join(alike[1:])})" if alike[1:] else ""
        remap = f"--remap {self._types[alike[0]].name}:={topic}"
        return f"it takes {topic} ({type_name}), which nothing publishes: play with `{remap}`{others}"

    def _is_heard_by(self, name: str) -> bool:
        wanted = [
            publisher
            for publisher in self._publishers.values()
            for info in self._node.get_subscriptions_info_by_topic(publisher.topic_name)
            if whole_name(info) == name
        ]
        return bool(wanted) and all(publisher.get_subscription_count() for publisher in wanted)

    def _shut_down(self) -> None:
        self._executor.shutdown()
        self._node.destroy_node()
        rclpy.try_shutdown()

    def __exit__(self, *_: object) -> None:
        end_s = time.monotonic() + _LAST_S
        for publisher in self._publishers.values():  # reliable subscribers get the last messages
            publisher.wait_for_all_acked(Duration(seconds=max(end_s - time.monotonic(), 0)))
        self._shut_down()
        self._thread.join()


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True
