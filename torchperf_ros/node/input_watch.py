"""The inputs of a configured node: silent ones, wrong types, clocks that do not fit; and why."""

import os
from collections.abc import Mapping, Sequence
from typing import Final

from rclpy.node import Node
from rclpy.qos import ReliabilityPolicy
from rclpy.topic_endpoint_info import TopicEndpointInfo

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.node.endpoints import alike_topics
from torchperf_ros.stage.frame import USABLE_AGE_MS
from torchperf_ros.stage.wiring import StageInput

_SILENT_NS: Final = 5 * NS_PER_S
_MOST_SAID: Final = 8
_SPANS: Final = ((365.25 * 86_400, "years"), (86_400, "days"), (3600, "h"), (1, "s"))


class InputWatch:
    """Looks at the inputs of an active node once a second; `forget` when it is active no more.

    Attributes:
        silent: by stage and topic what was logged of an input that is silent now, newest last.
    """

    def __init__(self, node: Node) -> None:
        """Ask this node for its graph, and log by it."""
        self._node = node
        # By stage and topic: frames so far, whether it is published, and since when it is so.
        self._heard: dict[tuple[str, str], tuple[int, bool, int]] = {}
        self.silent: dict[tuple[str, str], list[str]] = {}
        self._active_since_ns = 0

    def forget(self) -> None:
        """Begin anew with the next look."""
        self._heard.clear()
        self.silent.clear()
        self._active_since_ns = 0

    def look(self, inputs: Sequence[StageInput], now_ns: int) -> None:
        """A line on the terminal where an input has been silent for 5 s, with what the graph knows of it.

        Of a trigger that no message has come; of another input that no node publishes it, or none of its type
        and reliability. Logged again where the graph has changed, as when a topic appears that could be
        remapped.
        """
        for source in inputs:
            key = source.stage.config.name, source.topic
            is_trigger = source.index == 0
            frames = source.stage.statistics.counters.frames if is_trigger else 0
            publishers = self._node.get_publishers_info_by_topic(source.topic)
            is_published = any(_can_reach(one, source) for one in publishers)
            *known, since_ns = self._heard.setdefault(key, (frames, is_published, now_ns))
            if known != [frames, is_published] or (is_published and not is_trigger):
                self._heard[key] = frames, is_published, now_ns
                self.silent.pop(key, None)
            elif since_ns <= now_ns - _SILENT_NS:
                self._say_silence(key, why_silent(self._node, source))

    def _say_silence(self, key: tuple[str, str], why: str) -> None:
        reported = self.silent.setdefault(key, [])
        is_new = why not in reported
        self.silent[key] = [*(text for text in reported[-_MOST_SAID:] if text != why), why]
        if is_new:
            self._node.get_logger().warning(f"no message on {key[1]} for {_SILENT_NS // NS_PER_S} s: {why}")

    def clocks(
        self, inputs: Sequence[StageInput], statuses: Mapping[str, Mapping[str, str]], now_ns: int
    ) -> dict[str, str]:
        """Why stamps and ROS time cannot fit: one side goes by `/clock`, and the other does not.

        `statuses`: values of the stages' statuses, by name.
        """
        self._active_since_ns = self._active_since_ns or now_ns
        topic = self._node.resolve_topic_name("/clock")
        is_simulated = bool(self._node.get_parameter("use_sim_time").value)
        has_clock = self._node.count_publishers(topic) > 0
        if is_simulated and not has_clock:
            is_late = now_ns - self._active_since_ns >= _SILENT_NS
            why = clock_problem("", 0.0, topic, is_simulated=True, has_clock=False)
            return {"clock_warning": why} if is_late else {}
        ages_ms = {
            source.topic: float(
                statuses.get(f"perf: {source.stage.config.name}", {}).get("age_p50_ms", "nan")
            )
            for source in inputs
            if source.index == 0 and has_clock
        }
        odd = [one for one in ages_ms.items() if abs(one[1]) > USABLE_AGE_MS]
        if not odd:
            return {}
        return {"stamps_warning": clock_problem(*odd[0], topic, is_simulated=is_simulated, has_clock=True)}

    def wrong_types(self, inputs: Sequence[StageInput]) -> list[Alert]:
        """Publishers of another message type than a stage expects.

        DDS never connects them, and says nothing.
        """
        return [
            Alert(
                Level.ERROR,
                f"perf: {source.stage.config.name} input",
                f"{source.topic}: {other.node_name} publishes {other.topic_type}, not {source.type_name}",
                {},
            )
            for source in inputs
            for other in self._node.get_publishers_info_by_topic(source.topic)
            if other.topic_type != source.type_name
        ]

    def silences(self) -> list[Alert]:
        """A status for each input that is silent: who looks at the node later sees why, too."""
        return [
            Alert(Level.WARN, f"perf: {stage} input", f"no message on {topic}: {reported[-1]}", {})
            for (stage, topic), reported in self.silent.items()
        ]


def clock_problem(topic: str, age_ms: float, clock: str, *, is_simulated: bool, has_clock: bool) -> str:
    """What does not fit, by the median age of a trigger's frames, and what to do about it; for people.

    One of the two is given: the node goes by `clock`, or a node publishes it.
    """
    if not has_clock:
        return (
            f"use_sim_time is true, and no node publishes {clock}: ROS time stands still; start the"
            " simulation, play with --clock, or set use_sim_time to false"
        )
    seconds, side = abs(age_ms) / 1e3, "behind" if age_ms > 0 else "ahead of"
    size, unit = next((pair for pair in _SPANS if seconds >= pair[0]), _SPANS[-1])
    off = f"stamps on {topic} are {seconds / size:,.1f} {unit} {side}"
    if is_simulated:
        return (
            f"{off} {clock}, which this node goes by: set use_sim_time for the node that publishes"
            f" {topic}, too"
        )
    return f"{off} this node's clock, and {clock} is published: start this node with -p use_sim_time:=true"


def _can_reach(publisher: TopicEndpointInfo, source: StageInput) -> bool:
    """Whether the middleware connects them: the publisher has the input's type, and is as reliable."""
    wants_reliable = source.stage.config.input_reliability == "reliable"
    is_less = wants_reliable and publisher.qos_profile.reliability is ReliabilityPolicy.BEST_EFFORT
    return publisher.topic_type == source.type_name and not is_less


def why_silent(node: Node, source: StageInput) -> str:
    """Why no message comes on a stage's input, by what the graph knows; for people."""
    publishers = node.get_publishers_info_by_topic(source.topic)
    if not publishers:
        alike = alike_topics(node, source.topic, source.type_name, node.get_fully_qualified_name())
        if not alike:
            domain = f"ROS_DOMAIN_ID {os.environ.get('ROS_DOMAIN_ID', '0')}"
            return f"no node publishes it, nor another topic of its type ({source.type_name}), in {domain}"
        remap = f"start this node with `--ros-args -r {source.topic}:={alike[0]}` ({source.type_name})"
        return f"no node publishes it; of its type there is {', '.join(alike)}: {remap}"
    names = ", ".join(sorted({publisher.node_name for publisher in publishers}))
    if source.type_name not in {publisher.topic_type for publisher in publishers}:
        return f"{names} publishes {publishers[0].topic_type}, not {source.type_name}"
    if not any(_can_reach(publisher, source) for publisher in publishers):
        return f"{names} publishes it best effort, and input_reliability is reliable: set it to best_effort"
    return (
        f"{names} publishes it: it has stopped, or its images are lost on the way, as those of 1 MB and"
        " more are where a camera driver runs with Fast DDS's defaults; see README, On a robot"
    )
