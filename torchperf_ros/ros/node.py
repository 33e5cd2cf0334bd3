"""The lifecycle node `perf`: ROS on the outside, stages on the inside."""

import functools
import math
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from torchperf_ros.core.config import NodeConfig, StageConfig
from torchperf_ros.core.errors import ConfigError, TorchperfError
from torchperf_ros.core.frame import Answer, Frame
from torchperf_ros.ros.endpoints import OUTPUT_QOS, output_publisher, ros_message_class, stage_inputs, subscribe
from torchperf_ros.ros.evidence_services import EvidenceServices
from torchperf_ros.ros.node_log import NodeLog
from torchperf_ros.ros.parameters import NodeParameters
from torchperf_ros.ros.record_service import RecordService
from torchperf_ros.ros.recording_setup import recording_setup
from torchperf_ros.ros.reporter import Reporter
from torchperf_ros.ros.swap_service import SwapService
from torchperf_ros.supervise import realtime
from torchperf_ros.supervise.stage_actor import StageActor
from torchperf_ros.supervise.stage_input import StageInput
from torchperf_ros.supervise.stage_ports import StagePorts
from torchperf_ros.supervise.worker_setup import worker_setup
from torchperf_ros.telemetry.labelled_array import float64_bytes
from torchperf_ros.telemetry.latency_record import LatencyRecord
from torchperf_ros.telemetry.metrics import MetricsExporter
from torchperf_ros.telemetry.recording import Recording

_DESCRIBE_POLL_S = 0.02
_SUCCESS, _FAILURE, _ERROR = (
    TransitionCallbackReturn.SUCCESS,
    TransitionCallbackReturn.FAILURE,
    TransitionCallbackReturn.ERROR,
)
_Transition = Callable[["PerfNode", LifecycleState], TransitionCallbackReturn]


def _transition(callback: _Transition) -> _Transition:
    """A transition whose unexpected errors are told: rclpy turns them into ERROR and says nothing."""

    @functools.wraps(callback)
    def told(node: "PerfNode", state: LifecycleState) -> TransitionCallbackReturn:
        try:
            return callback(node, state)
        except Exception:  # a thread's boundary: rclpy calls `on_error` next
            node.get_logger().error(f"{callback.__name__} failed:\n{traceback.format_exc()}")
            return _ERROR

    return told


class PerfNode(LifecycleNode):
    """Runs stages: `configure` starts their workers, `activate` lets frames in."""

    def __init__(self, ending: threading.Event | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - rclpy's
        """Declare the parameters and start reporting.

        Args:
            ending: once set, `configure` gives up waiting for workers.
            kwargs: passed through to rclpy.

        Raises:
            ConfigError: a parameter has a value that is not allowed.
        """
        super().__init__("perf", **kwargs)
        self._ending = ending or threading.Event()
        self.parameters = NodeParameters(self)
        self.parameters.on_change = self._reconfigure  # type: ignore[method-assign]
        self._stages: list[StageActor] = []
        self._followers: list[list[StageInput]] = []
        self._outputs: list[Any] = []
        self._subscriptions_of_stages: list[Any] = []
        self._exporter: MetricsExporter | None = None
        self._recording: Recording | None = None
        self._lifecycle = "unconfigured"
        self._latency = self.create_publisher(ros_message_class("std_msgs/msg/Float64"), "~/latency", OUTPUT_QOS)
        array = ros_message_class("std_msgs/msg/Float64MultiArray")
        self._latency_stages = self.create_publisher(array, "~/latency_stages", OUTPUT_QOS)
        self._swap = SwapService(self, lambda: self._stages)
        self._reporter = Reporter(self, lambda: self._lifecycle)
        self._log = NodeLog(self, self._reporter.announcer)
        self._evidence = EvidenceServices(self, lambda: self._stages, self._log)
        self._reporter.announcer.told = self._evidence.told
        self._record = RecordService(self, self._reporter.announcer)
        self._reporter.start()

    # -- transitions --------------------------------------------------------------------------------------------------

    @_transition
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Start the workers and wait until their adapters have said what they take and give."""
        try:
            config = self.parameters.refresh()
        except ConfigError as error:
            self.get_logger().error(str(error))
            return _FAILURE
        self._set_up_process(config)
        self._stages = [self._make_stage(index, stage, config) for index, stage in enumerate(config.stages)]
        self._followers = [[] for _ in self._stages]
        self._outputs = [None for _ in self._stages]
        for stage in self._stages:
            stage.start()
        self._reporter.memory_limit_mib, self._reporter.memory_share = config.memory_limit_mib, config.memory_share
        self._reporter.stages = list(self._stages)
        self._lifecycle = "configuring"
        if not self._wait_for_descriptions(config.start_timeout_s) or not self._connect():
            self._tear_down()
            return _FAILURE
        self._start_recording(config)
        self._export_metrics(config)
        self._log("info", f"configured: {', '.join(stage.name for stage in config.stages)}; workers are loading")
        self.parameters.configured = True
        self._lifecycle = "inactive"
        realtime.stop_collecting()
        return _SUCCESS

    @_transition
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Let frames in."""
        for stage in self._stages:
            stage.activate()
        self._lifecycle = "active"
        return super().on_activate(state)

    @_transition
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Let no more frames in; the workers stay warm."""
        for stage in self._stages:
            stage.deactivate()
        self._lifecycle = "inactive"
        return super().on_deactivate(state)

    @_transition
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """End the workers and take the endpoints down."""
        self._tear_down()
        return _SUCCESS

    @_transition
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """End the workers from whatever state."""
        self._tear_down()
        self._lifecycle = "finalized"
        return _SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Back to unconfigured with nothing left running, so that configure can be tried again."""
        self._tear_down()
        return _SUCCESS

    # -- building and taking down -----------------------------------------------------------------------------------

    def _set_up_process(self, config: NodeConfig) -> None:
        realtime.keep_freed_memory(max(stage.max_frame_bytes for stage in config.stages))
        scheduling = realtime.prefer_this_process(config.realtime_priority)
        facts = {"scheduling": scheduling}
        if ":" in scheduling:
            facts["scheduling_warning"] = scheduling
            self.get_logger().warning(f"scheduling is {scheduling}")
        if config.lock_memory:
            facts["memory_lock"] = realtime.lock_memory()
        if config.cpu_affinity:
            try:
                realtime.pin_this_process(config.cpu_affinity)
                facts["cpu_affinity"] = str(list(config.cpu_affinity))
            except OSError as error:
                facts["cpu_affinity_warning"] = f"cpu_affinity {list(config.cpu_affinity)} cannot be set: {error}"
                self.get_logger().warning(facts["cpu_affinity_warning"])
        self._reporter.facts = facts

    def _make_stage(self, index: int, stage: StageConfig, config: NodeConfig) -> StageActor:
        record = LatencyRecord(index)
        last = stage is config.stages[-1]
        ports = StagePorts(
            publish=lambda payload: self._publish_output(index, payload),
            hand_on=lambda payload, frame: self._hand_on(index, payload, frame),
            answered=lambda answer: self._publish_record(record, answer, last),
            anomaly=self._reporter.announcer.found,
            log=self._log,
        )
        return StageActor(stage, worker_setup(stage, config), ports, lambda: self.get_clock().now().nanoseconds)

    def _wait_for_descriptions(self, timeout_s: float) -> bool:
        """Wait for every adapter's description; a stage without one stops safely and disturbs no other."""
        give_up_at = time.monotonic() + timeout_s
        waiting = list(self._stages)
        while waiting and time.monotonic() < give_up_at:
            waiting = [s for s in waiting if s.crew.description is None and not s.crew.gave_up]
            if self._ending.wait(_DESCRIBE_POLL_S):
                return False
        missing = [stage for stage in self._stages if stage.crew.description is None]
        for stage in missing:
            why = stage.crew.last_error or f"no answer within {timeout_s:.0f} s ({stage.crew.progress})"
            self.get_logger().error(f"stage {stage.config.name} cannot run: {why}")
        return len(missing) < len(self._stages)

    def _connect(self) -> bool:
        """Publishers for outputs; inputs from the stage that makes them, else from topics."""
        made_by = {self.resolve_topic_name(s.config.output): i for i, s in enumerate(self._stages)}
        try:
            for index, stage in enumerate(self._stages):
                if stage.crew.description is not None:
                    self._outputs[index] = output_publisher(self, stage)
                for source in stage_inputs(self, stage):
                    maker = made_by.get(source.topic)
                    if maker is not None and maker != index:
                        self._followers[maker].append(source)
                    else:
                        self._subscriptions_of_stages.append(subscribe(self, source, source.receive))
                        self._reporter.inputs.append(source)
        except TorchperfError as error:
            self.get_logger().error(str(error))
            return False
        return True

    def _start_recording(self, config: NodeConfig) -> None:
        if config.recorder:
            fds = [stage.crew.ring.fd for stage in self._stages]
            self._recording = Recording(config, recording_setup(self, self._stages), fds)
            self._reporter.announcer.recording = self._recording

    def _export_metrics(self, config: NodeConfig) -> None:
        if not config.metrics_port:
            return
        try:
            self._exporter = MetricsExporter(config, self._stages)
        except OSError as error:
            place = f"on metrics_address {config.metrics_address}; set another, or 0 for none"
            text = f"metrics_port {config.metrics_port} cannot be used: {error}, {place}"
            self._reporter.facts["metrics_warning"] = text
            self.get_logger().warning(text)

    def _tear_down(self) -> None:
        self.parameters.configured = False
        for subscription in self._subscriptions_of_stages:
            self.destroy_subscription(subscription)
        self._subscriptions_of_stages.clear()
        self._reporter.inputs, self._reporter.stages, self._reporter.facts = [], [], {}
        self._reporter.announcer.recording = None
        for stage in self._stages:
            stage.stop()
        for publisher in self._outputs:
            if publisher is not None:
                self.destroy_publisher(publisher)
        if self._exporter is not None:
            self._exporter.close()
        self._exporter = None
        if self._recording is not None:
            problem = self._recording.close(self.get_clock().now().nanoseconds)
            if problem:
                self.get_logger().error(problem)
        self._recording = None
        self._stages, self._outputs, self._followers = [], [], []
        self._lifecycle = "unconfigured"

    def close(self) -> None:
        """Leave nothing running: no worker, no thread, no port."""
        self._tear_down()
        self._reporter.stop()

    # -- what the stages call -----------------------------------------------------------------------------------------

    def _publish_output(self, index: int, payload: bytes) -> None:
        self._outputs[index].publish(payload)

    def _hand_on(self, index: int, payload: bytes | None, frame: Frame) -> None:
        for follower in self._followers[index]:
            follower.hand_over(payload, frame)

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
