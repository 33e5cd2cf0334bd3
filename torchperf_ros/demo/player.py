"""Publishes a drive, real or drawn, as if it happened now: a process of its own, so that nothing else sets its pace.

Its parent writes the line `go` to its standard input when the receivers are ready, and reads its standard output:
one JSON object per line, with `event` ready, note, late or done.
"""

import argparse
import contextlib
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
from torchperf_ros.demo.log_source import IMAGE_TYPES, LogError, LogMessage, LogSource, looped, restamped
from torchperf_ros.demo.road_scene import RoadScene

IMAGE_TOPICS: Final = {IMAGE_TYPES[0]: "/camera/image_raw", IMAGE_TYPES[1]: "/camera/image_raw/compressed"}
ODOMETRY_TOPIC: Final = "/odom"
_LATE_NS: Final = 5_000_000
_MATCH_S: Final = 10.0
_PRIORITY: Final = 1


@dataclass
class Tally:
    """What the player did.

    Attributes:
        images: published.
        odometries: published.
        late: images published more than 5 ms after their time.
        worst_late_ms: the latest of them.
    """

    images: int = 0
    odometries: int = 0
    late: int = 0
    worst_late_ms: float = 0.0


class Pace:
    """When the messages of a drive are due: fixed once for the whole drive, so that delays do not add up."""

    def __init__(self, start_ns: int, stamp_start_ns: int, speed: float = 1.0) -> None:
        """Fix the start.

        Args:
            start_ns: monotonic time of the drive's time 0.
            stamp_start_ns: ROS time of it.
            speed: how much faster than recorded.
        """
        self._start_ns = start_ns
        self._stamp_start_ns = stamp_start_ns
        self._speed = speed

    def due_ns(self, t_ns: int) -> int:
        """Monotonic time at which a message of the drive's time `t_ns` is published."""
        return self._start_ns + round(t_ns / self._speed)

    def stamp_ns(self, t_ns: int) -> int:
        """ROS time of the same moment."""
        return self._stamp_start_ns + round(t_ns / self._speed)


def play(
    messages: Iterator[LogMessage],
    pace: Pace,
    publish: Callable[[str, bytes], None],
    tally: Tally,
    *,
    end_ns: int,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Publish messages at their times until `end_ns` of the monotonic clock.

    Args:
        messages: in order, their times counted from 0.
        pace: when they are due.
        publish: takes the message type and the CDR bytes, stamped.
        tally: counted into.
        end_ns: no message that is due later is published.
        clock_ns: the monotonic clock.
        sleep: waits on it, in seconds.
    """
    for message in messages:
        due_ns = pace.due_ns(message.t_ns)
        if due_ns >= end_ns:
            return
        cdr = restamped(message.cdr, pace.stamp_ns(message.t_ns))
        while (ahead_ns := due_ns - clock_ns()) > 0:
            sleep(ahead_ns / 1e9)
        publish(message.type, cdr)
        if message.type in IMAGE_TYPES:
            tally.images += 1
            tally.late += ahead_ns < -_LATE_NS
            tally.worst_late_ms = max(tally.worst_late_ms, -ahead_ns / 1e6)
        else:
            tally.odometries += 1


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
    source = LogSource(log)
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
    start_ns = time.monotonic_ns() + 20_000_000
    pace = Pace(start_ns, time.time_ns() + 20_000_000, speed)
    try:
        play(
            messages,
            pace,
            lambda kind, cdr: publishers[kind].publish(cdr),
            tally,
            end_ns=start_ns + int(arguments.seconds * 1e9),
        )
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
