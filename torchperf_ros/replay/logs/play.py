"""`torchperf play`: plays a log into the ROS graph, and says how that goes.

The player's place in the graph is a node with a publisher for each topic, `/clock`, and services to pause.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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
from torchperf_ros.api.errors import TorchperfError, UnknownMessageType
from torchperf_ros.api.messages import has_header
from torchperf_ros.api.outcome import Health
from torchperf_ros.node.endpoints import whole_name
from torchperf_ros.node.middleware import carry_images, end_within
from torchperf_ros.observe.ros_types import ros_message_class
from torchperf_ros.observe.telemetry.node_state import NodeState
from torchperf_ros.observe.top import key_presses
from torchperf_ros.replay.logs.log_reader import LogMessage, LogReader, LogTopic, Progress, Say
from torchperf_ros.replay.logs.player import (
    HeaderStamps,
    Player,
    PlayError,
    ReadAhead,
    Tally,
    choose_topics,
    part_ns,
    rounds,
)
from torchperf_ros.workers.process_setup import prefer_this_process

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

    def wait_for_node(self, name: str, seconds: float, say: Say) -> bool:
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


_NODE_S: Final = 120.0
# How often the time is published besides once with each message, as `ros2 bag play --clock` does.
_CLOCK_HZ: Final = 40.0


@dataclass(frozen=True)
class PlayOptions:
    """How a log is played, see `torchperf play --help`.

    None: all topics, to the end, no node to wait for; `subscribers_s` 0: no wait.
    """

    rate: float = 1.0
    loop: bool = False
    start_s: float = 0.0
    duration_s: float | None = None
    topics: frozenset[str] | None = None
    remap: Mapping[str, str] = field(default_factory=dict)
    clock: bool = False
    restamp: bool = False
    paused: bool = False
    subscribers_s: float = 0.0
    node: str | None = None


def play(log: Path, options: PlayOptions, say: Say, progress: Progress) -> int:
    """Play a log; returns the exit status: 0, or 1 if a part of it could not be read.

    `say` gets a line for what people should know.

    Raises:
        LogError: nothing of it can be read.
        PlayError: it cannot be played as asked.
    """
    carry_images()
    with LogReader(log, say) as reader:
        topics = choose_topics(reader, options.topics, options.remap.keys())
        with PlayNode(topics, options.remap, publishes_time=options.clock) as node:
            for text in node.left_out.values():
                say(text)
            published = {name: topic for name, topic in topics.items() if name not in node.left_out}
            return _play(node, reader, published, options, say, progress)


def _play(
    node: PlayNode,
    log: LogReader,
    topics: Mapping[str, LogTopic],
    options: PlayOptions,
    say: Say,
    progress: Progress,
) -> int:
    stamped = {name for name, topic in topics.items() if options.restamp and has_header(topic.type_name)}
    stamps = HeaderStamps(stamped, log_time=options.clock)
    player = Player(
        node.publish,
        rate=options.rate,
        prepare=stamps.stamp,
        publish_time=node.publish_time,
        clock_hz=_CLOCK_HZ if options.clock else 0.0,
        paused=options.paused,
    )
    tally = player.tally
    begin_ns, end_ns = part_ns(log, options.start_s, options.duration_s)
    # What is due does not wait for a free processor core, nor for a thread that has none and holds the
    # interpreter lock; the perf node's own priority is higher.
    prefer_this_process(1)
    node.serve(player)
    ahead = ReadAhead(rounds(log, topics, options.start_s, options.duration_s, options.loop))
    playing: Future[None] = Future()  # of what is played by then
    acts = {" ": player.toggle, "q": player.end}
    pool = ThreadPoolExecutor(1, "player")
    began_s, was_paused = time.monotonic(), False
    try:
        _wait_for_listeners(node, options, say)
        with key_presses() as pressed_keys:
            if sys.stdin.isatty():
                say("space pauses and goes on, q ends")
            began_s, playing = time.monotonic(), pool.submit(player.play, ahead)
            while wait([playing], 0.1).not_done:
                for key in pressed_keys():
                    acts.get(key, bool)()
                if player.paused is not was_paused:
                    was_paused = player.paused
                    say("paused" if was_paused else "playing")
                if tally.rounds:
                    progress(min(max(player.log_ns, begin_ns), end_ns) - begin_ns, end_ns - begin_ns)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one need not stop what is bounded anyway
            signal.signal(number, signal.SIG_IGN)
        end_within(5)
        say("interrupted")
    finally:
        player.end()
        ahead.close()
        pool.shutdown()
    failed = playing.exception() if playing.done() else None
    if failed is not None and not (isinstance(failed, TorchperfError) and tally.played):
        raise failed
    say(summary(tally, time.monotonic() - began_s))
    if kept := stamps.kept:
        why = "too short for a header, or at a time that a stamp cannot hold"
        say(f"{kept:,} {'message was' if kept == 1 else 'messages were'} not restamped: {why}")
    if failed is not None:
        say(f"played up to the damage: {failed}")
    found = log.findings
    lacks = found.chunks_lost or found.messages_lost or found.bytes_skipped or found.set_aside
    return 1 if failed is not None or lacks else 0


def summary(tally: Tally, took_s: float) -> str:
    rounds = f" in {tally.rounds} rounds" if tally.rounds > 1 else ""
    late = f"{tally.late} late, the worst by" if tally.late else "none later than 5 ms, the worst by"
    played = f"{tally.played:,} message{'' if tally.played == 1 else 's'}"
    return f"played {played}{rounds} in {took_s:.1f} s, {late} {tally.worst_late_ms:.1f} ms"


def _wait_for_listeners(node: PlayNode, options: PlayOptions, say: Say) -> None:
    if options.node is not None and not node.wait_for_node(options.node, _NODE_S, say):
        say(f"{options.node} is not ready, or subscribes to none of the topics, after {_NODE_S:g} s")
    if options.subscribers_s and (unheard := node.wait_for_subscribers(options.subscribers_s)):
        say(f"no node subscribes to {', '.join(unheard)} after {options.subscribers_s:g} s")
