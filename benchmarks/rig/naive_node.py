"""The node to compare with: the model in an rclpy callback, its deadline a thread's time-out.

What a careful author writes without torchperf_ros: a typed subscription that keeps the newest image, a pool
of threads that outlives the frame (leaving a `with ThreadPoolExecutor()` block would wait for the model),
more threads than one so that a stalled frame does not block the next, `future.result(timeout)` with a
margin, the last result when it is missed, and exceptions caught. The deadline, the model, the threads of
torch and the records are those of the other node; so is, with `realtime_priority`, the scheduling of its
process, model included.
"""

import argparse
import contextlib
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import rclpy
import torch
from geometry_msgs.msg import PoseStamped
from nav_msgs.msg import Path
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from std_msgs.msg import Float64MultiArray

from torchperf_ros.api.adapter import Received, load_adapter
from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.messages import stamp_ns_of
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.telemetry.rows import LatencyRecord
from torchperf_ros.stage.frame import Answer, Frame, Origin, StepTimes, stamp_age_ms
from torchperf_ros.workers.process_setup import prefer_this_process

_THREADS = 4
_WARM_UP_RUNS = 5


class NaiveNode(Node):
    """Publishes `answer` for every image, and a record of it as the other node does."""

    def __init__(
        self,
        adapter: str,
        options: dict[str, Any],
        budget_ms: float,
        margin_ms: float,
        realtime_priority: int = 0,
        device: str = "cpu",
    ) -> None:
        """Build the model, warm it up, subscribe, and take the priority, which threads that are made later inherit."""
        super().__init__("perf")
        torch.set_num_threads(1)
        self._budget_ms = budget_ms
        self._margin_ms = margin_ms
        self._adapter = load_adapter(adapter)(options, torch.device(device))
        self._model = self._adapter.build("full")
        with torch.inference_mode():
            for _ in range(_WARM_UP_RUNS):
                self._model(*self._adapter.example_inputs("full"))
        self._pool = ThreadPoolExecutor(max_workers=_THREADS)
        self._last: Path | None = None
        self._record = LatencyRecord(0)
        self._seq = -1
        self._answers = self.create_publisher(Path, "answer", 10)
        self._records = self.create_publisher(Float64MultiArray, "~/latency_stages", 10)
        newest = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
        self.create_subscription(Image, "image", self._on_image, newest)
        self.scheduling = prefer_this_process(realtime_priority) if realtime_priority else "normal"

    def _on_image(self, message: Image) -> None:
        received_ns = time.monotonic_ns()
        stamp_ns = stamp_ns_of(message.header)
        age_ms = stamp_age_ms(stamp_ns, self.get_clock().now().nanoseconds)
        steps, outcome, fallback = StepTimes(), Outcome.ON_TIME, None
        future = self._pool.submit(self._run, message, stamp_ns, age_ms)
        try:
            output, steps = future.result(timeout=(self._budget_ms - self._margin_ms) / 1e3)
            self._last = output
        except FutureTimeoutError:
            future.cancel()
            outcome, output, fallback = Outcome.LATE, self._last, Fallback.HOLD_LAST
        except Exception as error:
            self.get_logger().error(f"{type(error).__name__}: {error}")
            outcome, output, fallback = Outcome.ERROR, self._last, Fallback.HOLD_LAST
        if output is not None:
            self._answers.publish(output)
        published_ns = time.monotonic_ns()
        self._publish_record(
            received_ns,
            stamp_ns,
            age_ms,
            published_ns,
            steps,
            outcome,
            fallback if output is not None else Fallback.NONE,
        )

    def _run(self, message: Image, stamp_ns: int, age_ms: float) -> tuple[Path, StepTimes]:
        messages = {"image": Received(message, stamp_ns, age_ms)}
        with torch.inference_mode():
            started = time.perf_counter()
            inputs = self._adapter.preprocess(messages)
            prepared = time.perf_counter()
            outputs = self._model(*inputs)
            inferred = time.perf_counter()
            path = _ros_path(self._adapter.postprocess(outputs, messages))
            done = time.perf_counter()
        return path, StepTimes(
            0.0, (prepared - started) * 1e3, (inferred - prepared) * 1e3, (done - inferred) * 1e3
        )

    def _publish_record(
        self,
        received_ns: int,
        stamp_ns: int,
        age_ms: float,
        published_ns: int,
        steps: StepTimes,
        outcome: Outcome,
        fallback: Fallback | None,
    ) -> None:
        self._seq += 1
        deadline_ns = received_ns + round(self._budget_ms * NS_PER_MS)
        origin = Origin(received_ns, age_ms)
        frame = Frame(self._seq, None, stamp_ns, age_ms, received_ns, deadline_ns, origin)
        answer = Answer(
            frame,
            outcome,
            fallback,
            "",
            tier=0,
            wait_ms=0.0,
            total_ms=(published_ns - received_ns) / NS_PER_MS,
            budget_ms=self._budget_ms,
            lateness_ms=(published_ns - deadline_ns) / NS_PER_MS,
            published_ns=published_ns,
            steps=steps if fallback is None else StepTimes(*[math.nan] * 4),
        )
        self._records.publish(self._record.encode(answer))


def _ros_path(made: Any) -> Path:
    """The adapter's message as rclpy's."""
    path = Path()
    path.header.frame_id = made.header.frame_id
    path.header.stamp.sec, path.header.stamp.nanosec = made.header.stamp.sec, made.header.stamp.nanosec
    for pose in made.poses:
        copy = PoseStamped()
        copy.header.stamp.sec, copy.header.stamp.nanosec = pose.header.stamp.sec, pose.header.stamp.nanosec
        copy.header.frame_id = pose.header.frame_id
        copy.pose.position.x, copy.pose.position.y = pose.pose.position.x, pose.pose.position.y
        path.poses.append(copy)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, help="the node's arguments as JSON")
    parser.add_argument("--namespace", default="/", help="namespace of its topics")
    arguments = parser.parse_args()
    rclpy.init(args=["--ros-args", "-r", f"__ns:={arguments.namespace}"])
    node = NaiveNode(**arguments.config)
    print(f"scheduling {node.scheduling}\nready", flush=True)
    with contextlib.suppress(KeyboardInterrupt, ExternalShutdownException):
        rclpy.spin(node)
    os._exit(0)  # a hung thread of the pool would keep the process


if __name__ == "__main__":
    main()
