"""The lifecycle node `perf`: ROS on the outside, stages on the inside."""

import contextlib
import functools
import math
import os
import platform
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from torchperf_ros import __version__
from torchperf_ros.api.clock import monotonic_ns
from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.node.alert_publisher import AlertPublisher, NodeLog
from torchperf_ros.node.emergency_lane import EmergencyLane
from torchperf_ros.node.endpoints import (
    OUTPUT_QOS,
    Endpoints,
    RawPublisher,
    stage_inputs,
)
from torchperf_ros.node.parameters import NodeParameters, plain_values
from torchperf_ros.node.reporter import Reporter
from torchperf_ros.node.ring_subscription import TakeError, Taker, checked_taker
from torchperf_ros.node.services import CaptureServices, SwapService
from torchperf_ros.node.versions import VersionsOnDemand
from torchperf_ros.observe.recording import Recording
from torchperf_ros.observe.ros_types import ros_message_class
from torchperf_ros.observe.telemetry.diagnostics import warm_up
from torchperf_ros.observe.telemetry.metrics import MetricsExporter
from torchperf_ros.observe.telemetry.rows import LatencyRecord, float64_bytes
from torchperf_ros.safety.kept_latch import warning_without_lane
from torchperf_ros.settings.build_options import version_of
from torchperf_ros.settings.config import NodeConfig
from torchperf_ros.stage.frame import Answer
from torchperf_ros.stage.hooks import StagePorts
from torchperf_ros.stage.right_of_way import set_right_of_way
from torchperf_ros.stage.stage import Stage
from torchperf_ros.stage.wiring import beside
from torchperf_ros.workers import process_setup
from torchperf_ros.workers.process_setup import keep_freed_memory
from torchperf_ros.workers.worker_setup import WorkerSetup, worker_setup

_MORE_KEPT_BYTES = 1 << 20
_DESCRIBE_POLL_S = 0.02
# What the reporter and the alert publisher publish, as the black box keeps it.
_TOPICS = (
    ("~/memory", "std_msgs/msg/Float64"),
    ("~/memory_stats", "std_msgs/msg/Float64MultiArray"),
    ("~/anomaly", "diagnostic_msgs/msg/DiagnosticArray"),
    ("/diagnostics", "diagnostic_msgs/msg/DiagnosticArray"),
)
_PACKAGES = ("torch", "numpy", "rosbags", "rclpy", "ros-rclpy")
_SUCCESS, _FAILURE, _ERROR = (
    TransitionCallbackReturn.SUCCESS,
    TransitionCallbackReturn.FAILURE,
    TransitionCallbackReturn.ERROR,
)
_Transition = Callable[["PerfNode", LifecycleState], TransitionCallbackReturn]


def _transition(callback: _Transition) -> _Transition:
    """Wraps a lifecycle transition and logs the traceback of an unexpected exception, which rclpy drops."""

    @functools.wraps(callback)
    def logged(node: "PerfNode", state: LifecycleState) -> TransitionCallbackReturn:
        try:
            return callback(node, state)
        except Exception:  # a thread's boundary: rclpy calls `on_error` next
            node.get_logger().error(f"{callback.__name__} failed:\n{traceback.format_exc()}")
            return _ERROR

    return logged


class PerfNode(LifecycleNode):
    """Runs stages: `configure` starts their workers, `activate` lets frames in."""

    def __init__(
        self,
        ending: threading.Event | None = None,
        lines_lost: Callable[[], int] = lambda: 0,
        **kwargs: Any,  # noqa: ANN401 - rclpy's
    ) -> None:
        """Declare the parameters and start reporting.

        Once `ending` is set, `configure` gives up waiting for workers.

        `lines_lost` says how many lines of what was printed were left out, see `terminal`.

        Raises:
            ConfigError: a parameter has a value that is not allowed.
        """
        super().__init__("perf", **kwargs)
        self._ending = ending or threading.Event()
        self.parameters = NodeParameters(self)
        self.parameters.change = self._reconfigure
        self._stages: list[Stage] = []
        self._endpoints = Endpoints(self, 0, None)
        self._recording: Recording | None = None
        # What `configure` made, to be closed in the opposite order.
        self._made = contextlib.ExitStack()
        self._lane: EmergencyLane | None = None
        self._lifecycle = "unconfigured"
        number, array = (ros_message_class(f"std_msgs/msg/Float64{kind}") for kind in ("", "MultiArray"))
        self._latency = RawPublisher(self.create_publisher(number, "~/latency", OUTPUT_QOS))
        self._latency_stages = RawPublisher(self.create_publisher(array, "~/latency_stages", OUTPUT_QOS))
        self._swap = SwapService(self, lambda: self._stages)
        self._alerts = AlertPublisher(self)
        self._log = NodeLog(self, self._alerts)
        self._versions = VersionsOnDemand(
            self.parameters.of_stage,
            self._log,
            self._alerts.found,
            self.get_fully_qualified_name(),
        )
        self.parameters.check = self._versions.check
        self._captures = CaptureServices(self, lambda: self._stages, self._log, self._alerts)
        self._reporter = Reporter(
            self, self._alerts, lambda: self._lifecycle, self._versions.values, lines_lost
        )
        self._reporter.start()

    # -- transitions

    @_transition
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Start the workers and wait until their adapters have described what they take and give."""
        try:
            config = self._versions.prepared(self.parameters.refresh())
            setups = {stage.name: worker_setup(stage, config) for stage in config.whole_stages}
        except ConfigError as error:
            self._versions.end()
            self.get_logger().error(str(error))
            return _FAILURE
        if not config.emergency.sensors and (
            warning := warning_without_lane(self.get_fully_qualified_name())
        ):
            self.get_logger().error(warning)
        self._build(config, setups)
        if not self._come_up(config):
            self._tear_down()
            return _FAILURE
        self._log(
            "info", f"configured: {', '.join(stage.name for stage in config.stages)}; workers are loading"
        )
        self.parameters.configured = True
        self._lifecycle = "inactive"
        process_setup.stop_collecting()
        return _SUCCESS

    @_transition
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Let frames in."""
        if self._lane is not None:
            try:
                self._lane.activate()
            except ConfigError as error:
                self.get_logger().error(str(error))
                return _FAILURE
        for stage in self._stages:
            stage.activate()
        self._lifecycle, self._endpoints.active = "active", True
        triggers = {source.topic for source in self._endpoints.inputs if source.index == 0}
        outputs = [publisher.topic_name for publisher in self._endpoints.outputs if publisher is not None]
        self._log(
            "info", f"active: answers {', '.join(sorted(triggers))} with {', '.join(sorted(outputs))}"
        )
        return super().on_activate(state)

    @_transition
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Let no more frames in; the workers stay warm."""
        self._finish()
        self._lifecycle, self._endpoints.active = "inactive", False
        return super().on_deactivate(state)

    @_transition
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """End the workers and take the endpoints down."""
        self._tear_down()
        return _SUCCESS

    on_error = on_cleanup  # nothing is left running, so that configure can be tried again

    @_transition
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """End the workers, in any state."""
        self._tear_down()
        self._lifecycle = "finalized"
        return _SUCCESS

    # -- building and taking down

    def _build(self, config: NodeConfig, setups: Mapping[str, WorkerSetup]) -> None:
        """Make the lane, the endpoints and the stages, and start the workers."""
        # The first to be entered is the last to be closed: a disk that hangs may delay the recorder.
        self._made.callback(self._end_recording)
        self._reporter.note(**_set_up_process(config))
        if config.emergency.sensors:
            self._lane = EmergencyLane(config)
            self._made.callback(self._lane.close)
        self._endpoints = Endpoints(self, len(config.stages), self._lane.answer if self._lane else None)
        self._made.callback(self._endpoints.close)
        for index, one in enumerate(config.stages):
            self._stages.append(self._make_stage(index, setups[one.stage], config))
        set_right_of_way(self._stages, config)
        self._versions.begin(self._stages, config)
        for stage in self._stages:
            stage.start()
        self._reporter.report_on(stages=tuple(self._stages), memory_limit_mib=config.memory_limit_mib)
        self._lifecycle = "configuring"

    def _come_up(self, config: NodeConfig) -> bool:
        """Connect everything once the adapters have described what they take and give.

        False, and an error, if it fails.
        """
        taker = self._find_taker()  # while workers start, which takes longer
        if not self._wait_for_descriptions(config.start_timeout_s):
            return False
        try:
            self._endpoints.connect(self._stages, taker, self._takes_by_rclpy)
            self._reporter.report_on(
                inputs=tuple(self._endpoints.inputs), ask_for_kept=self._endpoints.ask_for_kept
            )
            self._open_lane(config)
        except TorchperfError as error:
            self.get_logger().error(str(error))
            return False
        for stage in self._stages:
            stage.warm_up()
            warm_up(stage.config)
        self._start_recording(config)
        self._export_metrics(config)
        return True

    def _make_stage(self, index: int, setup: WorkerSetup, config: NodeConfig) -> Stage:
        stage = config.stages[index]
        record = LatencyRecord(index, stage.stream_number)
        # what `now()` asks; its objects take longer than the question
        ros_now = self.get_clock().handle.get_now
        last = stage.stage == config.stages[-1].stage
        ports = StagePorts(
            publish=functools.partial(self._endpoints.publish, index),
            hand_on=functools.partial(self._endpoints.hand_on, index),
            answered=lambda answer: self._publish_record(record, answer, last),
            anomaly=self._alerts.found,
            log=self._log,
        )
        actor = Stage(
            stage, setup, ports, lambda: int(ros_now().nanoseconds), beside=beside(self._stages, stage)
        )
        self._made.callback(actor.stop)
        return actor

    def _wait_for_descriptions(self, timeout_s: float) -> bool:
        """Wait for every adapter's description; a stage without one stops safely and disturbs no other."""
        give_up_at = time.monotonic() + timeout_s
        waiting = list(self._stages)
        while waiting and time.monotonic() < give_up_at:
            waiting = [s for s in waiting if s.pool.description is None and not s.pool.gave_up]
            if self._ending.wait(_DESCRIBE_POLL_S):
                return False
        missing = [stage for stage in self._stages if stage.pool.description is None]
        for stage in missing:
            why = stage.pool.last_error or f"no answer within {timeout_s:.0f} s ({stage.pool.progress})"
            self.get_logger().error(f"stage {stage.config.name} cannot run: {why}")
        return len(missing) < len(self._stages)

    def _open_lane(self, config: NodeConfig) -> None:
        """The emergency lane, unless it is off, and what an incident is to hold of its topics."""
        if self._lane is None:
            self._reporter.note(emergency="off: emergency.sensors is empty")
            return
        last = self._stages[-1]
        self._lane.connect(
            self,
            last.config.output,
            last.output_type,
            self._alerts,
            self._overdue_ms,
        )
        self._reporter.report_on(lane=self._lane)
        if config.recorder:
            self._endpoints.listen(self._lane.topics)

    def _overdue_ms(self) -> float:
        now_ns = monotonic_ns()
        return max(stage.overdue_ms(now_ns) for stage in self._stages)

    def _find_taker(self) -> Taker | None:
        """Find out whether triggers can be taken straight into the stages' rings."""
        try:
            taker = checked_taker(self.context.get_domain_id())
        except (TakeError, RuntimeError) as error:  # rclpy's own errors are of the second kind
            self._takes_by_rclpy(str(error))
            return None
        self._reporter.note(inputs_taken="into shared memory")
        return taker

    def _takes_by_rclpy(self, why: str) -> None:
        self._reporter.note(inputs_taken=f"by rclpy, and copied from there: {why}")

    def _start_recording(self, config: NodeConfig) -> None:
        if config.recorder:
            rings = [stage.ring for stage in self._stages]
            setup = _recording_setup(self, self._stages, self._endpoints.heard.items())
            self._recording = Recording(config, setup, rings)
            self._endpoints.recording = self._alerts.recording = self._recording

    def _export_metrics(self, config: NodeConfig) -> None:
        if not config.metrics_port:
            return
        try:
            exporter = MetricsExporter(config, self._stages, self._lane.values if self._lane else dict)
        except OSError as error:
            why = f"metrics_port {config.metrics_port} cannot be used: {error}, on metrics_address"
            self._reporter.note(
                metrics_warning=f"{why} {config.metrics_address}; set another, or 0 for none"
            )
        else:
            self._made.callback(exporter.close)

    def _finish(self) -> None:
        """Let no more frames in, and wait for the answers of those that run.

        What a stage answers the next one gets. The lane watches until then: while it is latched, it withholds
        these answers.
        """
        if self._lane is not None:
            self._lane.hold()
        for stage in self._stages:
            stage.deactivate()
            stage.finish()
        if self._lane is not None:
            self._lane.deactivate()

    def _tear_down(self) -> None:
        # First, while all that an answer goes to is there. What follows takes time, or waits for a disk: a
        # lane that watched meanwhile would latch, as sensors that end with this node are silent.
        self._finish()
        self._versions.end()
        self.parameters.configured = False
        self._reporter.forget()
        self._endpoints.take_no_more()
        self._made.close()
        self._stages, self._lane, self._recording = [], None, None
        self._endpoints = Endpoints(self, 0, None)
        self._lifecycle = "unconfigured"

    def _end_recording(self) -> None:
        ros_now_ns = self.get_clock().now().nanoseconds
        if self._recording is not None and (problem := self._recording.close(ros_now_ns)):
            self.get_logger().error(problem)

    def close(self, *, stop_vehicle: bool = False) -> None:
        """Leave nothing running: no worker, no thread, no port.

        With `stop_vehicle`, an emergency lane that watches stops the vehicle first, as if this node had
        died.
        """
        if stop_vehicle and self._lane is not None:
            self._lane.leave()
        self._tear_down()
        self._reporter.stop()

    # -- what the stages call

    def _publish_record(self, record: LatencyRecord, answer: Answer, last: bool) -> None:
        self._latency_stages.publish(record.encode(answer))
        latency_ms = answer.frame.origin.latency_ms(answer.published_ns) if last else math.nan
        if last:
            self._latency.publish(float64_bytes(latency_ms))
        if self._recording is not None:
            self._recording.frame(record.stage_index, answer, latency_ms)

    def _reconfigure(self, config: NodeConfig) -> None:
        for stage, stage_config in zip(self._stages, config.stages, strict=True):
            stage.reconfigure(stage_config)
        self._versions.reconfigure(config)


def _set_up_process(config: NodeConfig) -> dict[str, str]:
    """Give the process its memory, priority and processors; returns what the node's status says of them."""
    largest_bytes = max(stage.max_frame_bytes for stage in config.stages)
    # What is kept holds what taking a message by rclpy needs, twice its size. More goes back: while the first
    # images of several cameras wait, it is many times that, and none is needed later.
    keep_freed_memory(largest_bytes, 2 * largest_bytes + _MORE_KEPT_BYTES)
    scheduling = process_setup.prefer_this_process(config.realtime_priority)
    facts = {"scheduling": scheduling}
    if ":" in scheduling:
        facts["scheduling_warning"] = f"scheduling is {scheduling}"
    if config.lock_memory:
        facts["memory_lock"] = process_setup.lock_memory()
    if config.cpu_affinity:
        try:
            process_setup.pin_this_process(config.cpu_affinity)
            facts["cpu_affinity"] = str(list(config.cpu_affinity))
        except OSError as error:
            facts["cpu_affinity_warning"] = (
                f"cpu_affinity {list(config.cpu_affinity)} cannot be set: {error}"
            )
    return facts


def _recording_setup(
    node: LifecycleNode, stages: Sequence[Stage], heard: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """The recorder's setup, see `observe/recorder.py`.

    `heard`: topics and types of what no frame carries.
    """
    outputs = {node.resolve_topic_name(stage.config.output) for stage in stages}
    return {
        "node": node.get_fully_qualified_name(),
        "pid": os.getpid(),
        "ros_offset_ns": node.get_clock().now().nanoseconds - monotonic_ns(),
        "versions": _versions(),
        "parameters": plain_values(node),
        "topics": [(node.resolve_topic_name(name), type_name) for name, type_name in _TOPICS],
        "heard": list(heard),
        "stages": [_recorded_stage(node, stage, outputs) for stage in stages],
    }


def _recorded_stage(node: LifecycleNode, stage: Stage, outputs: set[str]) -> dict[str, Any]:
    config, description = stage.config, stage.pool.description
    return {
        "name": config.name,
        "stream": config.stream_number,
        "tiers": list(config.tiers),
        "scenes": {scene.name: list(scene.tiers) for scene in config.scenes},
        "budget_ms": config.budget_ms,
        "output": (
            node.resolve_topic_name(config.output),
            "" if description is None else description.output,
        ),
        "inputs": [
            None if source.topic in outputs else (source.topic, source.type_name)
            for source in stage_inputs(node, stage)
            if source.index >= 0
        ],
    }


def _versions() -> dict[str, str]:
    found = {
        "torchperf_ros": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    # rclpy of a sourced ROS, or of wheels: one of the two
    found |= {name: version for name in _PACKAGES if (version := version_of(name))}
    return found | {"ros_distro": os.environ.get("ROS_DISTRO", "")}
