"""A camera: publishes images of one size at a fixed rate, in a process of its own, so that nothing else sets its pace.

Reads one JSON object per line from standard input, `{"topic": "/x/image", "seconds": 10, "rate": 30,
"size": "64x48"}`, streams accordingly (with `"first_bytes": {"30": 2}` image 30 begins with a 2 and not a
0), and answers each with one
line: the stamps of the images that it published (ROS time, ns), and how late the latest of them went out.
Several topics are several cameras of that rate, evenly apart: `"topic": ["/x/front/image", "/x/rear/image"]`.
What `first_bytes` says is of the first of them.
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
from typing import Any

import rclpy
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions

from benchmarks.rig.messages import scene_cdr
from torchperf_ros.api.cdr import restamped

_PRIORITY = 1
_MATCH_S = 10.0
_LEAD_NS = 20_000_000


class Camera:
    def __init__(self) -> None:
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        self._node = Node(
            "camera", use_global_arguments=False, enable_rosout=False, start_parameter_services=False
        )
        self._publishers: dict[str, Any] = {}
        self._images: dict[str, list[bytearray]] = {}

    def stream(
        self,
        topic: str | list[str],
        seconds: float,
        rate: float,
        size: str,
        first_bytes: dict[str, int] | None = None,
    ) -> dict[str, Any]:
        """Publish for so long; returns what the module's description says.

        Args:
            topic, seconds, rate, size: see there.
            first_bytes: by the number of the image, what its first byte is instead of 0.
        """
        publishers = [self._publisher(one) for one in ([topic] if isinstance(topic, str) else topic)]
        images = self._some_images(size)
        # the pixels come last
        first = len(images[0]) - math.prod(int(word) for word in size.split("x")) * 3
        start_ns = time.monotonic_ns() + _LEAD_NS
        to_ros_ns = time.time_ns() - time.monotonic_ns()
        stamps, worst_ns = [], 0
        for count in range(round(seconds * rate) * len(publishers)):
            number, camera = divmod(count, len(publishers))
            due_ns = start_ns + round(count * 1e9 / (rate * len(publishers)))
            cdr = images[
                number % len(images)
            ]  # a camera that sends the same pixels again and again counts as frozen
            cdr[first] = 0 if camera else (first_bytes or {}).get(str(number), 0)
            image = restamped(bytes(cdr), due_ns + to_ros_ns)
            while (ahead_ns := due_ns - time.monotonic_ns()) > 0:
                time.sleep(ahead_ns / 1e9)
            publishers[camera].publish(image)
            stamps.append(due_ns + to_ros_ns)
            worst_ns = max(worst_ns, -ahead_ns)
        return {"stamps": stamps, "worst_late_ms": worst_ns / 1e6}

    def _publisher(self, topic: str) -> Any:
        from sensor_msgs.msg import Image

        if topic not in self._publishers:
            qos = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
            self._publishers[topic] = self._node.create_publisher(Image, topic, qos)
        matched_by = time.monotonic() + _MATCH_S
        while not self._publishers[topic].get_subscription_count() and time.monotonic() < matched_by:
            time.sleep(0.02)
        return self._publishers[topic]

    def _some_images(self, size: str) -> list[bytearray]:
        """Seven: the watch looks twice a second, and should see another one than before at all usual rates."""
        if size not in self._images:
            width, height = (int(word) for word in size.split("x"))
            self._images[size] = [bytearray(scene_cdr(width, height, seed)) for seed in range(7)]
        return self._images[size]


def main() -> None:
    # A camera does not wait for a free processor core. Before DDS starts its threads, so that they have it
    # as well.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    camera = Camera()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    print(json.dumps({"event": "ready"}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"event": "done", **camera.stream(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
