"""What the node says once a second.

`/diagnostics` and `/perf/memory`, from a thread that no frame waits for.
"""

import gc
import os
import re
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
from rclpy.node import Node
from rclpy.publisher import Publisher

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S, monotonic_ns
from torchperf_ros.api.outcome import WORST_FIRST, Health
from torchperf_ros.node.alert_publisher import AlertPublisher
from torchperf_ros.node.emergency_lane import EmergencyLane
from torchperf_ros.node.endpoints import OUTPUT_QOS, resolved
from torchperf_ros.node.input_watch import InputWatch
from torchperf_ros.observe.ros_types import ros_message_class
from torchperf_ros.observe.telemetry.diagnostics import LEVELS, diagnostic_bytes, stage_status
from torchperf_ros.observe.telemetry.memory import (
    LABELS,
    NODE,
    MemoryUse,
    MemoryWatch,
    ProportionalMemory,
    sample_memory,
)
from torchperf_ros.observe.telemetry.rows import LabelledArray, float64_bytes
from torchperf_ros.observe.watch.stage_signals import COUNTED
from torchperf_ros.stage.stage import Stage
from torchperf_ros.stage.wiring import StageInput
from torchperf_ros.workers.process_setup import step_back

_EVERY_S = 1.0
_BEFORE_NUMBERS = re.compile(r"\d")
_CANDIDATES_EVERY = 10  # reports
_MOST_ALERTS = 16
_UNSAID = frozenset({"kind", "problem"})


@dataclass(frozen=True)
class Sources:
    """What the node consists of while it is configured, as far as it is reported on."""

    stages: tuple[Stage, ...] = ()
    inputs: tuple[StageInput, ...] = ()  # those from topics
    ask_for_kept: Callable[[], None] = lambda: None  # see `Endpoints`
    lane: EmergencyLane | None = None
    memory_limit_mib: int = 0
    # What else the node's own status has; `..._warning` is logged, too.
    facts: Mapping[str, str] = field(default_factory=dict)


class Reporter:
    """Publishes diagnostics from the node's construction to its end, in every lifecycle state.

    Attributes:
        sources: what is reported on; replaced as a whole, so that a report sees one state of it.
    """

    def __init__(
        self,
        node: Node,
        alert_publisher: AlertPublisher,
        lifecycle_state: Callable[[], str],
        candidates: Callable[[str], Mapping[str, str]],
        lines_lost: Callable[[], int],
    ) -> None:
        """Create the publishers and begin to report.

        Args:
            node: it publishes.
            alert_publisher: gets what the reports find, and publishes it.
            lifecycle_state: gives the node's.
            candidates: gives what there is to say of a stage's versions.
            lines_lost: gives how many printed lines were left out, see `terminal`.
        """
        self.sources = Sources()
        self.alert_publisher = alert_publisher
        alert_publisher.heard = self._hand_to_stages
        self._candidates, self._lines_lost = candidates, lines_lost
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
        self._memory_watch = MemoryWatch()
        self._proportional_memory = ProportionalMemory()
        # The last, and why there is no newer one.
        self._memory_use, self._memory_problem = MemoryUse(0, {}, {}, 0), ""
        # keys of the warnings that hold, each of which was logged when it began
        self._warned: set[str] = set()
        self._doing: dict[str, str] = {}  # by stage: what its start or compiler was last found to do
        self._ready: set[str] = set()  # names of the stages that could answer since they started
        self._reports = 0  # that were recorded
        self._input_watch = InputWatch(node)
        self._clock_problem: dict[str, str] = {}  # why stamps and this node's clock do not fit
        self._ending = threading.Event()
        self._reporting = threading.Lock()  # held for a report, in which no stage may be taken down
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def report_on(self, **sources: Any) -> None:  # noqa: ANN401 - fields of `Sources`
        """Take what has been made of the node, by the names of `Sources`."""
        self.sources = replace(self.sources, **sources)

    def note(self, **facts: str) -> None:
        """Add facts to the node's own status."""
        self.report_on(facts={**self.sources.facts, **facts})

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
            self.sources = Sources()
            self.alert_publisher.recording = None

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
        if self.sources.lane is not None and (alert := self.sources.lane.alert()) is not None:
            self.alert_publisher.found(alert)
        healths = [(stage, stage.statistics.health.state(now_ns)) for stage in self.sources.stages]
        statuses = self._statuses(healths, memory)
        for stage, health in healths:
            self._log_progress(stage, health)
            if problem := stage.output_stamp_problem:
                self.alert_publisher.found(Alert(Level.WARN, f"{stage.config.name}: stamps", problem))
        self.sources.ask_for_kept()
        if self._lifecycle_state() == "active":
            self._input_watch.look(self.sources.inputs, now_ns)
        else:
            self._input_watch.forget()
        ros_now_ns, row = self._node.get_clock().now().nanoseconds, memory.row()
        self.alert_publisher.step(now_ns, ros_now_ns, healths)
        for stage in self.sources.stages:
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
        memory = sample_memory(self.sources.stages, self._proportional_memory)
        for finding in self._memory_watch.step(
            memory, self.sources.stages, self.sources.memory_limit_mib, now_ns / NS_PER_S
        ):
            self.alert_publisher.found(finding)
        self.alert_publisher.takes_memory = self._memory_watch.suspect()
        for stage in self.sources.stages:
            used_share = memory.used_share(self.sources.memory_limit_mib)
            stage.limit_memory(used_share, self.alert_publisher.takes_memory[0])
        return memory

    def _statuses(self, healths: Sequence[tuple[Stage, Health]], memory: MemoryUse) -> list[Alert]:
        """Of the stages in their order, of the node, of the emergency lane, and of inputs of a wrong type."""
        lane = self.sources.lane
        statuses = [self._stage_status(stage, health, memory.rss_by_pid) for stage, health in healths]
        is_active, inputs = self._lifecycle_state() == "active", self.sources.inputs
        values = {one.name: one.values for one in statuses}
        self._clock_problem = self._input_watch.clocks(inputs, values, monotonic_ns()) if is_active else {}
        stopped = {Health.SAFE_STOP} if lane is not None and (lane.latched or not lane.watches) else set()
        statuses.append(self._node_status({health for _, health in healths} | stopped, memory.node_rss))
        return [
            *statuses,
            *([] if lane is None else [lane.status()]),
            *self._input_watch.wrong_types(inputs),
            *self._input_watch.silences(),
        ]

    def _record(self, ros_now_ns: int, memory_row: Sequence[float], statuses: Sequence[Alert]) -> None:
        """Have the recorder know the memory, each stage's counters, and now and then its candidate."""
        if (recording := self.alert_publisher.recording) is None:
            return
        recording.event(ros_now_ns, kind="memory", values=dict(zip(LABELS, memory_row, strict=True)))
        counters = {
            stage.config.name: {key: value for key, value in status.values.items() if key.endswith(COUNTED)}
            for stage, status in zip(self.sources.stages, statuses, strict=False)
        }
        self._reports += 1
        for name in counters if self._reports % _CANDIDATES_EVERY == 0 else ():
            if found := self._candidates(name):
                recording.event(ros_now_ns, kind="candidate", stage=name, **found)
        recording.event(
            ros_now_ns, kind="counters", active=self._lifecycle_state() == "active", stages=counters
        )

    def _publish(self, publisher: Publisher, ros_now_ns: int, data: bytes) -> None:
        publisher.publish(data)
        if (recording := self.alert_publisher.recording) is not None:
            recording.message(publisher.topic_name, ros_now_ns, data)

    def _hand_to_stages(self, alert: Alert) -> None:
        for stage in self.sources.stages:
            stage.actions.report(alert, monotonic_ns())

    def _stage_status(self, stage: Stage, health: Health, rss_bytes: Mapping[int, int]) -> Alert:
        status = stage_status(stage, health, rss_bytes)
        name = stage.config.name
        waits_for = {
            topic: reported[-1] for (of, topic), reported in self._input_watch.silent.items() if of == name
        }
        trigger = next(
            (one.topic for one in self.sources.inputs if one.stage is stage and one.index == 0), ""
        )
        # names are checked by then
        publishes = resolved(self._node, stage.config.output) if self.sources.inputs else ""
        topics = {"trigger": trigger, "publishes": publishes, "evidence": stage.pool.capture.last}
        topics["waits_for"] = "; ".join(f"{topic}: {why}" for topic, why in waits_for.items())
        more = {**self._memory_watch.values(name), **topics, **self._candidates(name)}
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
        health = next((health for health in WORST_FIRST if health in healths), None)
        for alert in self.alert_publisher.open[:_MOST_ALERTS]:  # for who joins after they were published
            values[f"alert {alert.name}"] = f"{alert.level.name} {alert.message}"
        values["findings_lost"] = str(self.alert_publisher.findings_lost)
        values["lines_lost"] = str(self._lines_lost())
        facts = {**self.sources.facts, **self._shared_name(), **self._recorder_facts()}
        facts |= {"memory_warning": self._memory_problem} if self._memory_problem else {}
        facts |= self._clock_problem
        warnings_by_key = {key: text for key, text in facts.items() if key.endswith("_warning")}
        warnings = list(warnings_by_key.values())
        # Numbers in it grow; what it says before them is what is wrong.
        new = {_BEFORE_NUMBERS.split(text, maxsplit=1)[0]: text for text in warnings}
        for begin in new.keys() - self._warned:
            self._node.get_logger().warning(new[begin])
        self._warned = set(new)
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
        counts = {"recorder_restarts": str(recording.restarts), "recorder_cut": str(recording.cut)}
        return {**facts, **counts, **({"recorder_warning": recording.problem} if recording.problem else {})}

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

    def _log_progress(self, stage: Stage, health: Health) -> None:
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
