"""How soon the emergency lane's stop path is there.

After an obstacle in a scan, after a trigger, after a silence.

A real node answers a camera meanwhile. Again and again a scan without and then one with an obstacle is
published, the stop path is awaited, and the latch cleared. Times are from just before the scan is published
until the onlooker's DDS reader has received the path, so they hold both ways through the middleware.
Silence: a sensor publishes once and then not again; from the end of its timeout until the path is received.

The part `traffic` drives the lane's rules through drawn traffic, without a node: how often they stop a
vehicle that follows its lane in ordinary and everyday traffic, and how often one that sees nothing hits what braking in
time would have avoided.
"""

import argparse
import math
import sys
import time
from typing import Any

import numpy as np
from nav_msgs.msg import Odometry
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from sensor_msgs.msg import LaserScan
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from benchmarks.rig.arguments import add_backup, add_camera, add_some, add_stage, arguments_of
from benchmarks.rig.bench_stage import OURS
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import Graph, GraphError, PerfNodeProcess, Streaming
from benchmarks.rig.observer import realtime
from benchmarks.rig.report import Report, Target, say
from benchmarks.traffic import lane_drives, lane_everyday
from torchperf_ros.api.messages import empty_message, encode, header

_BEAMS, _SPEED = 1080, 10.0
_TIMEOUT_MS = 500.0  # of a sensor that is otherwise published before each obstacle and trigger
_WITHIN_S = 20.0
_FRAME = "odom"
_LANE = {
    "emergency.sensors": [
        "scan LaserScan x 3.5 z 0.5 timeout 0",
        "button Bool timeout 0",
        f"beat Bool timeout {_TIMEOUT_MS}",
    ],
    "emergency.scans": 1,
    "emergency.start_s": 600.0,
    "emergency.odometry_timeout_ms": 60_000.0,
}
_EPILOG = """\
targets of stops: scan and trigger to received stop path, p99.9 <= 5 ms; with --load (four busy processes for each core:
fourfold) <= 10 ms; a silence <= 5 ms after its timeout
targets of traffic: no stop in 1,000 ordinary drives; no collision that could be avoided

examples:
  ./run bench emergency
  ./run bench emergency --parts stops --load 8 --json emergency.json
  ./run bench emergency --parts traffic --drives 1000 --seed 0"""


def main() -> int:
    parts = {"stops": _stops, "traffic": _traffic}
    parser = arguments_of(__doc__ or "", _EPILOG)
    add_some(parser, "--parts", parts)
    parser.add_argument(
        "--times", type=int, default=3000, help="how often an obstacle appears (default 3000)"
    )
    parser.add_argument(
        "--triggers", type=int, default=500, help="how often the trigger is pressed (default 500)"
    )
    parser.add_argument(
        "--silences", type=int, default=100, help="how often a sensor falls silent (default 100)"
    )
    parser.add_argument("--load", type=int, default=0, help="busy processes at normal priority (default 0)")
    parser.add_argument("--no-camera", action="store_true", help="no frames meanwhile")
    parser.add_argument(
        "--drives",
        type=int,
        default=1000,
        help="ordinary ones, half as many dangers, a tenth of each everyday kind (default 1000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first drive (default 0)")
    add_camera(parser)
    add_stage(parser)
    add_backup(parser)
    arguments = parser.parse_args()
    Report("emergency", arguments).finish_parts(arguments, parts)
    return 0


def _stops(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    figures = _measure(arguments)
    rows = [
        [name, *(figures[name][key] for key in ("count", "p50", "p99", "p99_9", "max"))] for name in _NAMES
    ]
    title = f"Milliseconds; {arguments.load} busy processes; the lane runs at {figures['scheduling']}"
    report.table(title, ("until the stop path", "times", "p50", "p99", "p99.9", "max"), rows)
    limit_ms = 10.0 if arguments.load else 5.0
    return figures, [
        *(Target(f"{name}, p99.9", figures[name]["p99_9"], "<=", limit_ms, "ms") for name in _NAMES[:2]),
        Target(f"{_NAMES[2]}, max", figures[_NAMES[2]]["max"], "<=", 5.0, "ms"),
    ]


def _traffic(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    first, drives, dangers = arguments.seed, arguments.drives, arguments.drives // 2
    say(f"{drives} ordinary drives and {dangers} dangers, from seed {first} on")
    stopped: list[str] = []
    for seed in range(first, first + drives):
        drive = lane_drives.ordinary(seed)
        found = lane_drives.run(drive, seed, until_hit=False)
        if found.reason or found.hit_m_s:
            stopped.append(f"seed {seed} at {drive.speed:.0f} m/s: {found.reason or 'hit'}")
    ordinary_stops = len(stopped)
    counts = {kind: {"drawn": 0, "avoidable": 0, "hit": 0} for kind in lane_drives.KINDS}
    hit: list[str] = []
    for seed in range(first, first + dangers):
        kind, avoidable = lane_drives.danger(seed).kind, lane_drives.is_avoidable(seed)
        found = lane_drives.run(lane_drives.danger(seed), seed)
        counts[kind]["drawn"] += 1
        counts[kind]["avoidable"] += avoidable
        if avoidable and found.hit_m_s:
            counts[kind]["hit"] += 1
            hit.append(f"seed {seed}, {kind}: at {found.hit_m_s:.1f} m/s")
    each = max(1, drives // 10)
    say(f"{each} drives of each kind of everyday traffic")
    everyday: dict[str, list[int]] = {}
    for kind in lane_everyday.EVERYDAY:
        everyday[kind] = []
        for seed in range(first, first + each):
            found = lane_drives.run(lane_everyday.everyday(kind, seed), seed, until_hit=False)
            if found.reason or found.hit_m_s:
                everyday[kind].append(seed)
                stopped.append(f"{kind}, seed {seed}: {found.reason or 'hit'}")
    falsely = sum(len(seeds) for kind, seeds in everyday.items() if kind not in lane_everyday.STEERED)
    rows = [[f"ordinary, seeds {first} to {first + drives - 1}", drives, "-", ordinary_stops]]
    rows += [
        [f"{kind}, seeds {first} to {first + each - 1}", each, "-", len(seeds)]
        for kind, seeds in everyday.items()
    ]
    rows += [[f"{kind}, of {dangers} from seed {first}", *counts[kind].values()] for kind in counts]
    report.table("Drives", ("", "drawn", "avoidable", "stopped falsely, or hit"), rows)
    for text in [*stopped, *hit]:
        report.text(text)
    avoidable_ones = sum(count["avoidable"] for count in counts.values())
    figures = {"seed": first, "drives": drives, "stopped": stopped, "dangers": counts, "hit": hit}
    figures["everyday"] = {"drives_each": each, "stopped": everyday}
    return figures, [
        Target("stops in ordinary traffic", ordinary_stops, "<=", 0, f"of {drives}"),
        Target(
            f"stops in everyday traffic but for {' and '.join(lane_everyday.STEERED)}",
            falsely,
            "<=",
            0,
            f"of {each * (len(everyday) - len(lane_everyday.STEERED))}",
        ),
        Target("collisions that could be avoided", len(hit), "<=", 0, f"of {avoidable_ones}"),
    ]


_NAMES = ("scan", "trigger", "silence", "scan, until it is published")


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with Streaming(arguments, node_parameters=_LANE) as streaming:
        graph = streaming.graph
        drive = _Drive(graph, streaming.node)
        if not arguments.no_camera:
            # ended with the graph
            seconds = 60 + 0.1 * (arguments.times + arguments.triggers) + arguments.silences
            streaming.camera.begin(OURS, seconds=seconds, rate=arguments.rate, size=arguments.size)
        graph.busy(arguments.load)
        with realtime():
            say(
                f"{arguments.times} obstacles, {arguments.triggers} triggers, {arguments.silences} silences"
            )
            found = [drive.obstacles(arguments.times)]
            published_ms = list(drive.published_ms)
            found += [drive.triggers(arguments.triggers), drive.silences(arguments.silences), published_ms]
        return {
            **{name: distribution(ms[len(ms) // 100 :]) for name, ms in zip(_NAMES, found, strict=True)},
            "scheduling": graph.observer.values("perf: emergency").get("scheduling", ""),
        }


class _Drive:
    """The vehicle's sensors, and the wait for its stop."""

    def __init__(self, graph: Graph, node: PerfNodeProcess) -> None:
        self._graph, self._process, self._seen = graph, node.process, graph.observer.seen[OURS]
        self._node = Node(
            "vehicle", use_global_arguments=False, enable_rosout=False, start_parameter_services=False
        )
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        kinds = {"scan": LaserScan, "button": Bool, "beat": Bool, "odom": Odometry}
        self._topics = {
            name: self._node.create_publisher(kind, f"{OURS}/{name}", 10) for name, kind in kinds.items()
        }
        self._client = self._node.create_client(Trigger, f"{OURS}/perf/clear_emergency")
        subscribed = lambda: all(topic.get_subscription_count() for topic in self._topics.values())  # noqa: E731
        graph.wait(lambda: subscribed() and self._client.service_is_ready(), "the lane", self._process)
        # Nearer than `min_length_m`: farther ahead, what is there again and again would drive at the
        # vehicle's speed.
        self._blocked, self._free = _scan(0.4), _scan(math.inf)
        self._no, self._yes = (
            bytes(encode(empty_message(_BOOL, data=value), _BOOL)) for value in (False, True)
        )
        self.published_ms: list[float] = []  # until the node has published the stop path
        self._until_latched()

    def obstacles(self, times: int) -> list[float]:
        """Milliseconds from a scan with an obstacle to the stop path, each time."""
        return [self._stopped("scan", self._blocked, self._free) for _ in range(times)]

    def triggers(self, times: int) -> list[float]:
        """The same from a trigger that becomes true."""
        return [self._stopped("button", self._yes, self._no) for _ in range(times)]

    def silences(self, times: int) -> list[float]:
        """Milliseconds from the end of a sensor's timeout to the stop path, each time."""
        found = []
        for _ in range(times):
            self._clear()
            found.append(self._until_stop("beat", self._no) - _TIMEOUT_MS)
        self._clear()  # or the next node of this name would begin with it
        return found

    def _stopped(self, topic: str, message: bytes, then: bytes) -> float:
        self._publish("beat", self._no)
        took_ms = self._until_stop(topic, message)
        self._publish(topic, then)
        self._clear()
        return took_ms

    def _until_latched(self) -> None:
        """Publish until something comes back: by then everyone has found everyone."""
        self._publish("odom", _odometry())
        self._publish("button", self._no)
        for _ in range(100):
            self._publish("scan", self._blocked)
            if self._graph.observer.listen(
                0.2, lambda: any(one.source == _FRAME for one in self._seen.outputs)
            ):
                break
        self._publish("scan", self._free)
        self._clear()

    def _publish(self, topic: str, message: bytes) -> None:
        self._topics[topic].publish(message)

    def _until_stop(self, topic: str, message: bytes) -> float:
        self._seen.clear()
        began_ns = time.time_ns()
        self._publish(topic, message)
        began_at = lambda one: one.source == _FRAME and one.stamp_ns > began_ns  # noqa: E731
        if not self._graph.observer.listen(_WITHIN_S, lambda: any(map(began_at, self._seen.outputs))):
            raise GraphError(f"no stop path within {_WITHIN_S:g} s of a message on {topic}")
        first = next(filter(began_at, self._seen.outputs))
        self.published_ms.append((first.written_ns - began_ns) / 1e6)
        return (first.received_ns - began_ns) / 1e6

    def _clear(self) -> None:
        give_up_at = time.monotonic() + _WITHIN_S
        while time.monotonic() < give_up_at:
            self._publish(
                "beat", self._no
            )  # a latch is cleared once each sensor has been heard, and is not silent
            future = self._client.call_async(Trigger.Request())
            self._executor.spin_until_future_complete(future, timeout_sec=1.0)
            if future.done() and (answer := future.result()).success:
                return
        raise GraphError(f"not cleared within {_WITHIN_S:g} s: {answer.message}")


_BOOL = "std_msgs/msg/Bool"


def _scan(distance_m: float) -> bytes:
    name, step = "sensor_msgs/msg/LaserScan", math.radians(270) / (_BEAMS - 1)
    return bytes(
        encode(
            empty_message(
                name,
                header=header(time.time_ns(), "laser"),
                angle_min=-math.radians(135),
                angle_max=math.radians(135),
                angle_increment=step,
                scan_time=0.025,
                range_min=0.1,
                range_max=30.0,
                ranges=np.full(_BEAMS, distance_m, np.float32),
            ),
            name,
        )
    )


def _odometry() -> bytes:
    name = "nav_msgs/msg/Odometry"
    message = empty_message(name, header=header(0, _FRAME), child_frame_id="base_link")
    message.twist.twist.linear.x = _SPEED
    return bytes(encode(message, name))


if __name__ == "__main__":
    sys.exit(main())
