"""What the node says once a second.

`/diagnostics` and `/perf/memory`, from a thread that no frame waits for.
"""

import gc
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import ReliabilityPolicy

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S, monotonic_ns
from torchperf_ros.api.outcome import Health
from torchperf_ros.node.alert_publisher import AlertPublisher
from torchperf_ros.node.emergency_lane import EmergencyLane
from torchperf_ros.node.endpoints import OUTPUT_QOS, alike_topics, resolved, ros_message_class
from torchperf_ros.observe.telemetry.diagnostics import LEVELS, diagnostic_bytes, stage_status
from torchperf_ros.observe.telemetry.latency_record import LabelledArray, float64_bytes
from torchperf_ros.observe.telemetry.memory import LABELS, MemoryUse, ProportionalMemory, sample_memory
from torchperf_ros.observe.watch.memory_watch import NODE, MemoryWatch
from torchperf_ros.observe.watch.stage_signals import COUNTED
from torchperf_ros.stage.frame import USABLE_AGE_MS
from torchperf_ros.stage.stage import Stage, StageInput
from torchperf_ros.workers.process_setup import step_back

_EVERY_S = 1.0
_CANDIDATES_EVERY = 10  # reports
_SILENT_NS = 5 * NS_PER_S
_MOST_ALERTS = 16
_MOST_SAID = 8
_SPANS = ((365.25 * 86_400, "years"), (86_400, "days"), (3600, "h"), (1, "s"))
_UNSAID = frozenset({"kind", "problem"})
_WORST_FIRST = (Health.SAFE_STOP, Health.STARTING, Health.DEGRADED, Health.WAITING, Health.NOMINAL)


class Reporter:
    """Publishes diagnostics from the node's construction to its end, whatever its lifecycle state.

    Attributes:
        memory_limit_mib, memory_share: the parameters.
        alert publisher: tells what happens, and the recorder everything.
    """

    def __init__(self, node: Node, lifecycle_state: Callable[[], str]) -> None:
        """Create the publishers; nothing is said before `start`."""
        self.stages: list[Stage] = []  # the stages to report on; empty while the node is not configured
        self.inputs: list[
            StageInput
        ] = []  # their inputs from topics, checked for publishers of another type
        self.facts: dict[
            str, str
        ] = {}  # what else the node's own status says; `..._warning` is logged, too
        self.lane: EmergencyLane | None = None  # the emergency lane, unless it is off
        self.memory_limit_mib, self.memory_share = 0, 1.0
        self.alert_publisher = AlertPublisher(node)
        self.alert_publisher.heard = self._hand_to_stages
        self._node = node
        self._lifecycle_state = lifecycle_state
        diagnostics = ros_message_class("diagnostic_msgs/msg/DiagnosticArray")
        array = ros_message_class("std_msgs/msg/Float64MultiArray")
        self._diagnostics = node.create_publisher(diagnostics, "/diagnostics", OUTPUT_QOS)
        self._memory = node.create_publisher(
            ros_message_class("std_msgs/msg/Float64"), "~/memory", OUTPUT_QOS
        )
        self._memory_stats = node.create_publisher(array, "~/memory_stats", OUTPUT_QOS)
        self._memory_array = LabelledArray(LABELS)
        # what there is of a stage's versions
        self.candidates: Callable[[str], Mapping[str, str]] = lambda _stage: {}
        self.lines_lost: Callable[[], int] = lambda: 0  # of what the node printed, see `terminal`
        self._memory_watch = MemoryWatch()
        self._proportional_memory = ProportionalMemory()
        self._memory_use, self._memory_problem = (
            MemoryUse(0, {}, {}, 0),
            "",
        )  # the last, and why there is no newer one
        # keys of the warnings that hold, each of which was logged when it began
        self._warned: set[str] = set()
        self._doing: dict[str, str] = {}  # by stage: what its start or compiler was last found to do
        self._ready: set[str] = set()  # names of the stages that could answer since they started
        self._reports = 0  # that were recorded
        # by stage and topic: frames so far, whether it is published, and since when it is so
        self._heard: dict[tuple[str, str], tuple[int, bool, int]] = {}
        self._active_since_ns = 0
        self._clock_problem: dict[str, str] = {}  # why stamps and this node's clock do not fit
        self._silent: dict[
            tuple[str, str], list[str]
        ] = {}  # likewise, of silent ones: what was said of it, newest last
        self._ending = threading.Event()
        self._reporting = threading.Lock()  # held for a report, in which no stage may be taken down
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting, before the node's publishers are destroyed."""
        self._ending.set()
        self._thread.join()

    def forget(self) -> None:
        """Have nothing more to do with the stages, before they stop.

        A report that goes on comes to its end first.

        It would set timers and signal processes of stages that are gone, by descriptors that are others' by
        then.
        """
        with self._reporting:
            self.inputs, self.stages, self.facts = [], [], {}
            self.alert_publisher.recording = self.lane = None

    def _run(self) -> None:
        step_back()
        while not self._ending.wait(_EVERY_S):
            try:
                with self._reporting:
                    self.report()
            except Exception:  # the thread's boundary: a report that fails must not be the last one
                self._node.get_logger().error(f"report failed:\n{traceback.format_exc()}")

    def report(self) -> None:
        """Publish one report and collect what garbage there is."""
        if (
            not gc.isenabled()
        ):  # before that, at start, there is much to look through, and Python does it itself
            gc.collect()
        now_ns = monotonic_ns()
        memory = self._look_at_memory(now_ns)
        if self.lane is not None and (alert := self.lane.alert()) is not None:
            self.alert_publisher.found(alert)
        healths = [(stage, stage.statistics.health.state(now_ns)) for stage in self.stages]
        statuses = self._statuses(healths, memory)
        for stage, health in healths:
            self._tell_progress(stage, health)
            if problem := stage.output_stamp_problem:
                self.alert_publisher.found(Alert(Level.WARN, f"{stage.config.name}: stamps", problem))
        self._look_for_silence(now_ns)
        ros_now_ns, row = self._node.get_clock().now().nanoseconds, memory.row()
        self.alert_publisher.step(now_ns, ros_now_ns, healths)
        for stage in self.stages:
            stage.act(now_ns)
        diagnostics = diagnostic_bytes(statuses, self._node.get_fully_qualified_name(), ros_now_ns)
        self._publish(self._diagnostics, ros_now_ns, diagnostics)
        self._publish(self._memory, ros_now_ns, float64_bytes(memory.workers_mib))
        self._publish(self._memory_stats, ros_now_ns, self._memory_array.encode(row))
        self._record(ros_now_ns, row, statuses)

    def _look_at_memory(self, now_ns: int) -> MemoryUse:
        """What is in use.

        Where that cannot be read, as without a descriptor for it, what was in use before.
        """
        try:
            memory = self._memory_use = self._sample_memory(now_ns)
            self._memory_problem = ""
        except (OSError, psutil.Error) as error:
            memory, self._memory_problem = self._memory_use, f"memory in use cannot be read: {error}"
        return memory

    def _sample_memory(self, now_ns: int) -> MemoryUse:
        memory = sample_memory(self.stages, self._proportional_memory)
        for finding in self._memory_watch.step(
            memory, self.stages, self.memory_limit_mib, now_ns / NS_PER_S
        ):
            self.alert_publisher.found(finding)
        self.alert_publisher.takes_memory = self._memory_watch.suspect()
        for stage in self.stages:
            used_share = memory.used_share(self.memory_limit_mib)
            stage.limit_memory(used_share, self.memory_share, self.alert_publisher.takes_memory[0])
        return memory

    def _statuses(self, healths: Sequence[tuple[Stage, Health]], memory: MemoryUse) -> list[Alert]:
        """Of the stages in their order, of the node, of the emergency lane, and of inputs of a wrong type."""
        lane = self.lane
        statuses = [self._stage_status(stage, health, memory.rss_by_pid) for stage, health in healths]
        self._clock_problem = self._look_at_clocks({one.name: one.values for one in statuses})
        stopped = {Health.SAFE_STOP} if lane is not None and (lane.latched or not lane.watches) else set()
        statuses.append(self._node_status({health for _, health in healths} | stopped, memory.node_rss))
        return [
            *statuses,
            *([] if lane is None else [lane.status()]),
            *self._wrong_types(),
            *self._silences(),
        ]

    def _record(self, ros_now_ns: int, memory_row: Sequence[float], statuses: Sequence[Alert]) -> None:
        """Have the recorder know the memory, each stage's counters, and now and then its candidate."""
        if (recording := self.alert_publisher.recording) is None:
            return
        recording.tell(ros_now_ns, kind="memory", values=dict(zip(LABELS, memory_row, strict=True)))
        counters = {
            stage.config.name: {key: value for key, value in status.values.items() if key.endswith(COUNTED)}
            for stage, status in zip(self.stages, statuses, strict=False)
        }
        self._reports += 1
        for name in counters if self._reports % _CANDIDATES_EVERY == 0 else ():
            if found := self.candidates(name):
                recording.tell(ros_now_ns, kind="candidate", stage=name, **found)
        recording.tell(
            ros_now_ns, kind="counters", active=self._lifecycle_state() == "active", stages=counters
        )

    def _publish(self, publisher: Publisher, ros_now_ns: int, data: bytes) -> None:
        publisher.publish(data)
        if (recording := self.alert_publisher.recording) is not None:
            recording.message(publisher.topic_name, ros_now_ns, data)

    def _hand_to_stages(self, alert: Alert) -> None:
        for stage in self.stages:
            stage.actions.report(alert, monotonic_ns())

    def _stage_status(self, stage: Stage, health: Health, rss_bytes: Mapping[int, int]) -> Alert:
        status = stage_status(stage, health, rss_bytes)
        name = stage.config.name
        waits_for = {topic: said[-1] for (of, topic), said in self._silent.items() if of == name}
        trigger = next((one.topic for one in self.inputs if one.stage is stage and one.index == 0), "")
        # names are checked by then
        publishes = resolved(self._node, stage.config.output) if self.inputs else ""
        topics = {"trigger": trigger, "publishes": publishes, "evidence": stage.pool.capture.last}
        topics["waits_for"] = "; ".join(f"{topic}: {why}" for topic, why in waits_for.items())
        more = {**self._memory_watch.values(name), **topics, **self.candidates(name)}
        why = (
            f": {trigger}: {waits_for[trigger]}"
            if health is Health.WAITING and trigger in waits_for
            else ""
        )
        return replace(status, message=f"{status.message}{why}", values={**status.values, **more})

    def _node_status(self, healths: set[Health], rss_bytes: int) -> Alert:
        state = self._lifecycle_state()
        values = {"lifecycle": state, "pid": str(os.getpid()), "rss_mib": f"{rss_bytes / (1 << 20):.3f}"}
        values |= self._memory_watch.values(NODE)
        health = next((health for health in _WORST_FIRST if health in healths), None)
        for alert in self.alert_publisher.open[:_MOST_ALERTS]:  # for who joins after they were published
            values[f"alert {alert.name}"] = f"{alert.level.name} {alert.message}"
        values["findings_lost"] = str(self.alert_publisher.findings_lost)
        values["lines_lost"] = str(self.lines_lost())
        facts = self.facts | self._shared_name() | self._recorder_facts()
        facts |= {"memory_warning": self._memory_problem} if self._memory_problem else {}
        facts |= self._clock_problem
        told = {key: text for key, text in facts.items() if key.endswith("_warning")}
        for key in told.keys() - self._warned:
            self._node.get_logger().warning(told[key])
        self._warned, warnings = set(told), list(told.values())
        if health is None:
            message = "; ".join([f"not configured ({state})", *warnings])
            return Alert(Level.WARN, "perf: node", message, values | facts)
        level = max(LEVELS[health], Level.WARN) if warnings else LEVELS[health]
        message = "; ".join([health.name, *warnings])
        return Alert(level, "perf: node", message, {"health": health.name, **values, **facts})

    def _recorder_facts(self) -> dict[str, str]:
        """How the recorder is doing, and a warning if it cannot do its work."""
        recording = self.alert_publisher.recording
        if recording is None:
            return {}
        facts = {
            f"recorder_{key}": str(value) for key, value in recording.status.items() if key not in _UNSAID
        }
        facts |= {"recorder_restarts": str(recording.restarts), "recorder_cut": str(recording.cut)}
        return facts | ({"recorder_warning": recording.problem} if recording.problem else {})

    def _shared_name(self) -> dict[str, str]:
        """A warning if the graph holds this node's name more than once.

        Topics and services of all of them mix.
        """
        name = self._node.get_fully_qualified_name()
        own = (self._node.get_name(), self._node.get_namespace())
        count = self._node.get_node_names_and_namespaces().count(own)
        if count <= 1:
            return {}
        return {"name_warning": f"{count} nodes are called {name}; give each its own name or namespace"}

    def _tell_progress(self, stage: Stage, health: Health) -> None:
        """Lines on the terminal.

        What a start waits for, that the stage is ready, what is compiled beside it.
        """
        name, log, starting = stage.config.name, self._node.get_logger(), health is Health.STARTING
        if starting:
            self._ready.discard(name)
        elif name not in self._ready and health is not Health.SAFE_STOP:
            self._ready.add(name)
            tiers = ", ".join(stage.pool.loaded_tiers)
            log.info(f"stage {name} is ready: {tiers}, each frame within {stage.config.budget_ms:g} ms")
        before, doing = self._doing.get(name, ""), stage.pool.rolling_update.compiling
        self._doing[name] = doing or (stage.pool.progress if starting else "")
        if self._doing[name] and self._doing[name] != before:
            log.info(f"stage {name}: {self._doing[name]}")
        elif before.startswith("compiling") and not self._doing[name]:
            log.info(f"stage {name}: nothing more is compiled")

    def _look_for_silence(self, now_ns: int) -> None:
        """A line on the terminal where an input has been silent for 5 s, with what the graph knows of it.

        Of a trigger that no message has come; of another input that no node publishes it. Said again where
        the graph has changed, as when a topic appears that could be remapped.
        """
        if self._lifecycle_state() != "active":
            self._heard.clear()
            self._silent.clear()
            return
        for source in self.inputs:
            key = source.stage.config.name, source.topic
            is_trigger = source.index == 0
            frames = source.stage.statistics.counters.frames if is_trigger else 0
            is_published = self._node.count_publishers(source.topic) > 0
            *known, since_ns = self._heard.setdefault(key, (frames, is_published, now_ns))
            if known != [frames, is_published] or (is_published and not is_trigger):
                self._heard[key] = frames, is_published, now_ns
                self._silent.pop(key, None)
            elif since_ns <= now_ns - _SILENT_NS:
                self._say_silence(key, why_silent(self._node, source))

    def _say_silence(self, key: tuple[str, str], why: str) -> None:
        said = self._silent.setdefault(key, [])
        is_new = why not in said
        self._silent[key] = [*(text for text in said[-_MOST_SAID:] if text != why), why]
        if is_new:
            self._node.get_logger().warning(f"no message on {key[1]} for {_SILENT_NS // NS_PER_S} s: {why}")

    def _look_at_clocks(self, statuses: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Why stamps and ROS time cannot fit: one side goes by `/clock`, and the other does not."""
        if self._lifecycle_state() != "active":
            self._active_since_ns = 0
            return {}
        self._active_since_ns = self._active_since_ns or monotonic_ns()
        topic = self._node.resolve_topic_name("/clock")
        is_simulated = bool(self._node.get_parameter("use_sim_time").value)
        has_clock = self._node.count_publishers(topic) > 0
        if is_simulated and not has_clock:
            is_late = monotonic_ns() - self._active_since_ns >= _SILENT_NS
            why = clock_problem("", 0.0, topic, is_simulated=True, has_clock=False)
            return {"clock_warning": why} if is_late else {}
        if not is_simulated and not has_clock:
            return {}
        for source in self.inputs:
            age_ms = float(statuses.get(f"perf: {source.stage.config.name}", {}).get("age_p50_ms", "nan"))
            if source.index == 0 and abs(age_ms) > USABLE_AGE_MS:
                why = clock_problem(
                    source.topic, age_ms, topic, is_simulated=is_simulated, has_clock=has_clock
                )
                return {"stamps_warning": why}
        return {}

    def _wrong_types(self) -> list[Alert]:
        """Publishers of another message type than a stage expects.

        DDS never connects them, and says nothing.
        """
        found = []
        for source in self.inputs:
            for other in self._node.get_publishers_info_by_topic(source.topic):
                if other.topic_type != source.type_name:
                    message = (
                        f"{source.topic}: {other.node_name} publishes {other.topic_type}, not"
                        f" {source.type_name}"
                    )
                    found.append(Alert(Level.ERROR, f"perf: {source.stage.config.name} input", message, {}))
        return found

    def _silences(self) -> list[Alert]:
        """A status for each input that is silent: whoever looks at the node later sees why, too."""
        return [
            Alert(Level.WARN, f"perf: {stage} input", f"no message on {topic}: {said[-1]}", {})
            for (stage, topic), said in self._silent.items()
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
    off = f"stamps on {topic} are {_span(abs(age_ms) / 1e3)} {'behind' if age_ms > 0 else 'ahead of'}"
    if is_simulated:
        return (
            f"{off} {clock}, which this node goes by: set use_sim_time for the node that publishes"
            f" {topic}, too"
        )
    return f"{off} this node's clock, and {clock} is published: start this node with -p use_sim_time:=true"


def _span(seconds: float) -> str:
    size, unit = next((pair for pair in _SPANS if seconds >= pair[0]), _SPANS[-1])
    return f"{seconds / size:,.1f} {unit}"


def why_silent(node: Node, source: StageInput) -> str:
    """Why no message comes on a stage's input, by what the graph knows; for people."""
    publishers = node.get_publishers_info_by_topic(source.topic)
    if not publishers:
        alike = alike_topics(node, source.topic, source.type_name, node.get_fully_qualified_name())
        if not alike:
            return f"no node publishes it, nor another topic of its type ({source.type_name})"
        remap = f"start this node with `--ros-args -r {source.topic}:={alike[0]}` ({source.type_name})"
        return f"no node publishes it; of its type there is {', '.join(alike)}: {remap}"
    names = ", ".join(sorted({publisher.node_name for publisher in publishers}))
    if source.type_name not in {publisher.topic_type for publisher in publishers}:
        return f"{names} publishes {publishers[0].topic_type}, not {source.type_name}"
    wants = source.stage.config.input_reliability
    if wants == "reliable" and all(
        p.qos_profile.reliability is ReliabilityPolicy.BEST_EFFORT for p in publishers
    ):
        return f"{names} publishes it best effort, and input_reliability is reliable: set it to best_effort"
    return (
        f"{names} publishes it: it has stopped, or its images are lost on the way, as those of 1 MB and"
        " more are where a camera driver runs with Fast DDS's defaults; see README, On a robot"
    )
