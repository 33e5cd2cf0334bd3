"""Publishes a drive, real or drawn, as if it happened now: a process of its own, so that nothing else sets its pace.

Its argument is a JSON list: the log or null for the drawn road, images per second or null for as recorded, and seconds.
Its parent writes the line `go` to its standard input when the receivers are ready, and reads its standard output:
one JSON object per line, with `event` ready, note or done.
"""

import contextlib
import itertools
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import rclpy
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions

from torchperf_ros.demo.make_log import IMAGE_TOPICS, ODOMETRY_TOPIC, DriveLog
from torchperf_ros.demo.road_scene import IMAGE_TYPE, ODOMETRY_TYPE
from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.frame.errors import TorchperfError
from torchperf_ros.logs.log_reader import LogError, LogMessage, LogReader, LogTopic
from torchperf_ros.logs.player import HeaderStamps, LogRounds, Player
from torchperf_ros.node.endpoints import ros_message_class
from torchperf_ros.workers.process_setup import prefer_this_process

DRAWN_HZ: Final = 30.0
_MATCH_S: Final = 10.0
_PRIORITY: Final = 1
_RATE_IMAGES: Final = 31
_QOS: Final = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)


def drive_topics(log: LogReader) -> list[LogTopic]:
    """The image topic with most messages, depth images only if there are no others; then that of odometry, if any.

    Raises:
        LogError: the log has no images.
    """
    filled = [topic for topic in log.topics.values() if topic.count]
    images = [topic for topic in filled if topic.type_name in IMAGE_TOPICS]
    odometries = [topic for topic in filled if topic.type_name == ODOMETRY_TYPE]
    if not images:
        found = ", ".join(f"{topic.name} ({topic.type_name})" for topic in filled) or "no messages at all"
        msg = f"log {log.path}: has {found}, but no image topic; the demo needs sensor_msgs/Image or CompressedImage"
        raise LogError(msg)
    image = max(images, key=lambda topic: ("depth" not in topic.name.lower(), topic.count))
    if next(log.messages({image.name}), None) is None:
        msg = f"log {log.path}: {image.name} holds no image"
        raise LogError(msg)
    return [image, *sorted(odometries, key=lambda topic: topic.count)[-1:]]


def _rate_hz(log: LogReader, image: LogTopic) -> float:
    """Images per second at the log's beginning; 0 from a single image."""
    times = [message.t_ns for message in itertools.islice(log.messages({image.name}), _RATE_IMAGES)]
    return (len(times) - 1) * NS_PER_S / (times[-1] - times[0]) if times[-1] > times[0] else 0.0


def _say(event: str, **values: Any) -> None:  # noqa: ANN401 - JSON values
    print(json.dumps({"event": event, **values}), flush=True)


def _note(text: str) -> None:
    _say("note", text=text)


def _run(node: Node, log: LogReader | None, rate_hz: float | None, seconds: float) -> None:
    speed = 1.0
    if log is None:
        drawn = DriveLog(seconds, rate_hz or DRAWN_HZ, labelled=False)
        topics = {drawn.image_topic: IMAGE_TYPE, ODOMETRY_TOPIC: ODOMETRY_TYPE}
        messages: Iterator[LogMessage | None] = drawn.messages()
    else:
        chosen = drive_topics(log)
        recorded_hz = _rate_hz(log, chosen[0])
        speed = rate_hz / recorded_hz if rate_hz and recorded_hz else 1.0
        topics = {topic.name: topic.type_name for topic in chosen}
        messages = LogRounds(log, {topic.name: topic for topic in chosen}, loop=True).messages()
    publishers = {
        name: node.create_publisher(ros_message_class(kind), IMAGE_TOPICS.get(kind, ODOMETRY_TOPIC), _QOS)
        for name, kind in topics.items()
    }
    first = next(messages)  # draws what can be drawn before, or finds that the log cannot be read
    _say("ready")
    if sys.stdin.readline().strip() != "go":
        return
    # A camera does not wait for a free processor core. The node's own priority is higher, so this costs it nothing.
    prefer_this_process(_PRIORITY)
    matched_by = time.monotonic() + _MATCH_S
    image_publisher = next(iter(publishers.values()))
    while not image_publisher.get_subscription_count() and time.monotonic() < matched_by:
        time.sleep(0.02)
    published: Counter[str] = Counter()

    def publish(message: LogMessage) -> None:
        publishers[message.topic].publish(message.data)
        published[message.type_name] += 1

    player = Player(publish, rate=speed, prepare=HeaderStamps(set(topics), log_time=False).stamp)
    end = threading.Timer(seconds, player.end)
    end.start()
    try:
        player.play(itertools.chain([first], messages))
    except LogError as error:
        _note(f"played up to the damage: {error}")
    finally:
        end.cancel()
        odometries = published.pop(ODOMETRY_TYPE, 0)
        tally = {"late": player.tally.late, "worst_late_ms": player.tally.worst_late_ms}
        _say("done", images=published.total(), odometries=odometries, **tally)


def main() -> int:
    """Entry of the process; returns its exit status."""
    log_path, rate_hz, seconds = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    node = Node("player", use_global_arguments=False, enable_rosout=False, start_parameter_services=False)
    try:
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
            log = stack.enter_context(LogReader(Path(log_path), _note)) if log_path else None
            _run(node, log, rate_hz, seconds)
    except TorchperfError as error:
        _note(str(error))
        return 2
    finally:
        node.destroy_node()
        rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
