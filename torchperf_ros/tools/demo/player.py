"""Publishes a drive, real or drawn, as if it happened now.

A process of its own, so that nothing else sets its pace.

Its argument is a JSON list: the log, or null for the drawn road, seconds, and how many cameras are drawn.
Its parent writes the line `go` to its standard input when the receivers are ready, and reads its standard
output: one JSON object per line, with `event` ready, note or done.
"""

import contextlib
import itertools
import json
import signal
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.models.road_scene import IMAGE_TYPE, ODOMETRY_TYPE
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage, LogReader, LogTopic
from torchperf_ros.replay.logs.play import PlayNode
from torchperf_ros.replay.logs.player import HeaderStamps, Player, rounds
from torchperf_ros.tools.demo.make_log import IMAGE_TOPICS, ODOMETRY_TOPIC, DriveLog
from torchperf_ros.workers.process_setup import prefer_this_process

# Width and height of the images, and images a second, where several cameras are drawn.
SMALL: Final = (640, 360)
SLOW_HZ: Final = 15.0


def drive_topics(log: LogReader) -> list[LogTopic]:
    """The image topic with most messages, depth images only if there are no others.

    Then that of odometry, if any.

    Raises:
        LogError: the log has no images.
    """
    filled = [topic for topic in log.topics.values() if topic.count]
    images = [topic for topic in filled if topic.type_name in IMAGE_TOPICS]
    odometries = [topic for topic in filled if topic.type_name == ODOMETRY_TYPE]
    if not images:
        found = ", ".join(f"{topic.name} ({topic.type_name})" for topic in filled) or "no messages at all"
        raise LogError(
            f"log {log.path}: has {found}, but no image topic; the demo needs sensor_msgs/Image or"
            " CompressedImage"
        )
    image = max(images, key=lambda topic: ("depth" not in topic.name.lower(), topic.count))
    if next(log.messages({image.name}), None) is None:
        raise LogError(f"log {log.path}: {image.name} holds no image")
    return [image, *sorted(odometries, key=lambda topic: topic.count)[-1:]]


def _say(event: str, **values: Any) -> None:  # noqa: ANN401 - JSON values
    print(json.dumps({"event": event, **values}), flush=True)


def _note(text: str) -> None:
    _say("note", text=text)


def _run(log: LogReader | None, seconds: float, cameras: int) -> None:
    if log is None:
        drawn = DriveLog(seconds, labelled=False, cameras=cameras)
        if cameras > 1:
            drawn = replace(drawn, width=SMALL[0], height=SMALL[1], rate_hz=SLOW_HZ)
        images = [LogTopic(topic, IMAGE_TYPE) for topic in drawn.image_topics]
        chosen = [*images, LogTopic(ODOMETRY_TOPIC, ODOMETRY_TYPE)]
    else:
        chosen = drive_topics(log)
    topics = {topic.name: topic for topic in chosen}
    names = {
        topic.name: topic.name if log is None else IMAGE_TOPICS.get(topic.type_name, ODOMETRY_TOPIC)
        for topic in chosen
    }
    messages = drawn.messages() if log is None else rounds(log, topics, loop=True)
    published: Counter[str] = Counter()
    with PlayNode(topics, names, publishes_time=False) as node:

        def publish(message: LogMessage) -> None:
            node.publish(message)
            published[message.type_name] += 1

        first = next(messages)  # draws what can be drawn before, or finds that the log cannot be read
        _say("ready")
        if sys.stdin.readline().strip() != "go":
            return
        # A camera does not wait for a free processor core. The node's own priority is higher, so this costs
        # it nothing.
        prefer_this_process(1)
        node.wait_for_subscribers(10.0)
        player = Player(publish, prepare=HeaderStamps(set(topics), log_time=False).stamp)
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
    log_path, seconds, cameras = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
            log = stack.enter_context(LogReader(Path(log_path), _note)) if log_path else None
            _run(log, seconds, cameras)
    except TorchperfError as error:
        _note(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
