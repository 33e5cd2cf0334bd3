"""Publishes a drive, real or drawn, as if it happened now: a process of its own, so that nothing else sets its pace.

Its parent writes the line `go` to its standard input when the receivers are ready, and reads its standard output:
one JSON object per line, with `event` ready, note, late or done.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import rclpy
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.frame import restamped
from torchperf_ros.demo.log_source import IMAGE_TYPES, LogSource, looped
from torchperf_ros.demo.road_scene import RoadScene
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage
from torchperf_ros.replay.player import Player

IMAGE_TOPICS: Final = {IMAGE_TYPES[0]: "/camera/image_raw", IMAGE_TYPES[1]: "/camera/image_raw/compressed"}
ODOMETRY_TOPIC: Final = "/odom"
_MATCH_S: Final = 10.0
_PRIORITY: Final = 1


@dataclass
class Tally:
    """What the player did.

    Attributes:
        images: published.
        odometries: published.
        late: messages published more than 5 ms after their time.
        worst_late_ms: the latest of them.
    """

    images: int = 0
    odometries: int = 0
    late: int = 0
    worst_late_ms: float = 0.0


def play(
    messages: Iterator[LogMessage],
    speed: float,
    seconds: float,
    publish: Callable[[str, bytes], None],
    tally: Tally,
    **clock: Any,  # noqa: ANN401 - the player's
) -> None:
    """Publish messages at their times, stamped with them.

    Args:
        messages: in order, their times counted from 0.
        speed: how much faster than recorded.
        seconds: nothing that is due later is published.
        publish: takes the message type and the CDR bytes.
        tally: counted into.
        clock: `clock` and `wait` of the player, for tests.
    """
    ros_offset_ns = time.time_ns() - time.monotonic_ns()

    def stamped(message: LogMessage, due_ns: int) -> LogMessage:
        return message._replace(data=restamped(message.data, due_ns + ros_offset_ns))

    def count(message: LogMessage) -> None:
        publish(message.type_name, message.data)
        tally.images += message.type_name in IMAGE_TYPES
        tally.odometries += message.type_name not in IMAGE_TYPES

    until_then = itertools.takewhile(lambda message: message.t_ns < seconds * speed * NS_PER_S, messages)
    player = Player(count, rate=speed, prepare=stamped, **clock)
    try:
        player.play(until_then)
    finally:
        tally.late, tally.worst_late_ms = player.tally.late, player.tally.worst_late_ms


def recorded_rate_hz(source: LogSource) -> float:
    """Images per second of a log, from its first second or so; NaN from a single image."""
    times: list[int] = []
    for message in source.messages():
        if message.topic == source.image_topic:
            times.append(message.t_ns)
            if times[-1] - times[0] > NS_PER_S:
                break
    span_ns = times[-1] - times[0]
    return (len(times) - 1) * NS_PER_S / span_ns if span_ns else float("nan")


def _say(event: str, **values: Any) -> None:  # noqa: ANN401 - JSON values
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def _drive(log: Path | None, rate_hz: float | None) -> tuple[Iterator[LogMessage], str, float]:
    """Messages, image type, and the speed at which to play them."""
    if log is None:
        return RoadScene(rate_hz or 30.0).messages(), IMAGE_TYPES[0], 1.0
    source = LogSource(log, lambda text: _say("note", text=text))
    recorded_hz = recorded_rate_hz(source)
    speed = rate_hz / recorded_hz if rate_hz and recorded_hz > 0 else 1.0
    return looped(source, lambda text: _say("note", text=text)), source.image_type, speed


def _run(node: Node, arguments: argparse.Namespace) -> None:
    messages, image_type, speed = _drive(arguments.log, arguments.rate)
    qos = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
    publishers = {kind: _publisher(node, kind, qos) for kind in (image_type, "nav_msgs/msg/Odometry")}
    _say("ready", image_topic=publishers[image_type].topic_name)
    if sys.stdin.readline().strip() != "go":
        return
    # A camera does not wait for a free processor core. The node's own priority is higher, so this costs it nothing.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    matched_by = time.monotonic() + _MATCH_S
    while not publishers[image_type].get_subscription_count() and time.monotonic() < matched_by:
        time.sleep(0.02)
    tally = Tally()
    try:
        play(messages, speed, arguments.seconds, lambda kind, cdr: publishers[kind].publish(cdr), tally)
    finally:
        _say("done", **asdict(tally))


def _publisher(node: Node, kind: str, qos: QoSProfile) -> Any:  # noqa: ANN401 - rclpy's
    from nav_msgs.msg import Odometry
    from sensor_msgs.msg import CompressedImage, Image

    types = {
        Odometry: ODOMETRY_TOPIC,
        Image: IMAGE_TOPICS[IMAGE_TYPES[0]],
        CompressedImage: IMAGE_TOPICS[IMAGE_TYPES[1]],
    }
    (found,) = (t for t in types if t.__name__ == kind.rpartition("/")[2])
    return node.create_publisher(found, types[found], qos)


def main() -> int:
    """Entry of the process; returns its exit status."""
    parser = argparse.ArgumentParser(prog="player", description=__doc__)
    parser.add_argument("--log", type=Path, help="a rosbag2 or a ROS 1 bag with images; without it a drawn scene")
    parser.add_argument("--rate", type=float, help="images per second; default as recorded, 30 for the drawn scene")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    node = Node("player", use_global_arguments=False, enable_rosout=False, start_parameter_services=False)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _run(node, arguments)
    except LogError as error:
        _say("note", text=str(error))
        return 2
    finally:
        node.destroy_node()
        rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
