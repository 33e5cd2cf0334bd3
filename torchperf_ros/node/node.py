"""The lifecycle node `perf`: ROS on the outside, stages on the inside."""

import functools
import math
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from torchperf_ros.config.config import NodeConfig
from torchperf_ros.frame.errors import ConfigError, TorchperfError
from torchperf_ros.frame.frame import Answer, Frame
from torchperf_ros.node.alert_publisher import NodeLog
from torchperf_ros.node.emergency_lane import EmergencyLane
from torchperf_ros.node.endpoints import (
    HEARD_QOS,
    OUTPUT_QOS,
    RawPublisher,
    output_publisher,
    resolved,
    ros_message_class,
    stage_inputs,
    subscribe,
)
from torchperf_ros.node.parameters import NodeParameters
from torchperf_ros.node.recording_setup import recording_setup
from torchperf_ros.node.reporter import Reporter
from torchperf_ros.node.ring_subscription import RingSubscription, TakeError, Taker, checked_taker
from torchperf_ros.node.rollouts import Rollouts
from torchperf_ros.node.services import CaptureServices, SwapService
from torchperf_ros.recorder.recording import Recording
from torchperf_ros.stage.right_of_way import set_right_of_way
from torchperf_ros.stage.stage_actor import StageActor
from torchperf_ros.stage.stage_input import StageInput
from torchperf_ros.stage.stage_versions import Instead, StagePorts
from torchperf_ros.telemetry.diagnostics import warm_up
from torchperf_ros.telemetry.latency_record import LatencyRecord, float64_bytes
from torchperf_ros.telemetry.metrics import MetricsExporter
from torchperf_ros.workers import process_setup
from torchperf_ros.workers.process_setup import keep_freed_memory
from torchperf_ros.workers.shared_process import share_processes
from torchperf_ros.workers.worker_setup import worker_setup

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
        """Declare the parameters and start reporting; once `ending` is set, `configure` gives up waiting for workers.

        Raises:
            ConfigError: a parameter has a value that is not allowed.
        """
        super().__init__("perf", **kwargs)
        self._ending = ending or threading.Event()
        self.parameters = NodeParameters(self)
        self.parameters.on_change = self._reconfigure  # type: ignore[method-assign]
        self._stages: list[StageActor] = []
        self._followers: list[list[StageInput]] = []
        self._outputs: list[RawPublisher | None] = []
        self._subscriptions_of_stages: list[Any] = []
        self._waitables_of_stages: list[RingSubscription] = []
        self._taker: Taker | None = None
        self._exporter: MetricsExporter | None = None
        self._recording: Recording | None = None
        self._lane: EmergencyLane | None = None
        self._carried: set[str] = set()  # topics whose messages the records of frames hold
        self._heard: dict[str, str] = {}  # message types of the other topics that guards, scenes and the lane take
        self._lifecycle = "unconfigured"
        number, array = (ros_message_class(f"std_msgs/msg/Float64{kind}") for kind in ("", "MultiArray"))
        self._latency = RawPublisher(self.create_publisher(number, "~/latency", OUTPUT_QOS))
        self._latency_stages = RawPublisher(self.create_publisher(array, "~/latency_stages", OUTPUT_QOS))
        self._swap = SwapService(self, lambda: self._stages)
        self._reporter = Reporter(self, lambda: self._lifecycle)
        self._log = NodeLog(self, self._reporter.alert_publisher)
        self._rollouts = Rollouts(self.parameters.of_stage, self._log, self._reporter.alert_publisher.found)
        self._reporter.candidates = self._rollouts.values
        self.parameters.on_check = self._rollouts.check  # type: ignore[method-assign]
        self._captures = CaptureServices(self, lambda: self._stages, self._log, self._reporter.alert_publisher)
        self._reporter.start()

    # -- transitions --------------------------------------------------------------------------------------------------

    @_transition
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Start the workers and wait until their adapters have said what they take and give."""
        try:
            config = self._rollouts.prepared(self.parameters.refresh())
            setups = [worker_setup(stage, config) for stage in config.stages]
        except ConfigError as error:
            self.get_logger().error(str(error))
            return _FAILURE
        self._set_up_process(config)
        self._lane = EmergencyLane(config) if config.emergency.sensors else None
        self._stages = [self._make_stage(index, setup, config) for index, setup in enumerate(setups)]
        set_right_of_way(self._stages, config)
        share_processes([stage.pool for stage in self._stages])
        self._followers = [[] for _ in self._stages]
        self._outputs = [None for _ in self._stages]
        self._rollouts.begin(self._stages, config)
        for stage in self._stages:
            stage.start()
        self._reporter.memory_limit_mib, self._reporter.memory_share = config.memory_limit_mib, config.memory_share
        self._reporter.stages = list(self._stages)
        self._lifecycle = "configuring"
        self._find_taker()  # while workers start, which takes longer
        described = self._wait_for_descriptions(config.start_timeout_s)
        if not described or not self._connect() or not self._open_lane(config):
            self._tear_down()
            return _FAILURE
        for stage in self._stages:
            stage.warm_up()
            warm_up(stage.config)
        self._start_recording(config)
        self._export_metrics(config)
        self._log("info", f"configured: {', '.join(stage.name for stage in config.stages)}; workers are loading")
        self.parameters.configured = True
        self._lifecycle = "inactive"
        process_setup.stop_collecting()
        return _SUCCESS

    @_transition
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Let frames in."""
        if self._lane is not None:
            self._lane.activate()
        for stage in self._stages:
            stage.activate()
        self._lifecycle = "active"
        triggers = sorted({source.topic for source in self._reporter.inputs if source.index == 0})
        outputs = sorted(publisher.topic_name for publisher in self._outputs if publisher is not None)
        self._log("info", f"active: answers {', '.join(triggers)} with {', '.join(outputs)}")
        return super().on_activate(state)

    @_transition
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Let no more frames in; the workers stay warm."""
        self._finish()
        if self._lane is not None:
            self._lane.deactivate()
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
        keep_freed_memory(max(stage.max_frame_bytes for stage in config.stages))
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
                facts["cpu_affinity_warning"] = f"cpu_affinity {list(config.cpu_affinity)} cannot be set: {error}"
        self._reporter.facts = facts

    def _make_stage(self, index: int, setup: dict[str, Any], config: NodeConfig) -> StageActor:
        stage, record = config.stages[index], LatencyRecord(index)
        ros_now = self.get_clock().handle.get_now  # what `now()` asks; its objects take longer than the question
        last = stage is config.stages[-1]
        ports = StagePorts(
            publish=lambda payload: self._publish_output(index, payload),
            hand_on=lambda payload, frame: self._hand_on(index, payload, frame),
            answered=lambda answer: self._publish_record(record, answer, last),
            anomaly=self._reporter.alert_publisher.found,
            log=self._log,
        )
        return StageActor(stage, setup, ports, lambda: int(ros_now().nanoseconds))

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

    def _connect(self) -> bool:
        """Publishers for outputs; inputs from the stage that makes them, else from topics."""
        try:
            made_by = {resolved(self, stage.config.output): index for index, stage in enumerate(self._stages)}
            every = [source for stage in self._stages for source in stage_inputs(self, stage)]
            self._carried = {*made_by, *(source.topic for source in every if source.index >= 0)}
            for index, stage in enumerate(self._stages):
                if stage.pool.description is not None:
                    self._outputs[index] = output_publisher(self, stage)
                for source in stage_inputs(self, stage):
                    maker = made_by.get(source.topic)
                    if maker is not None and maker != index:
                        self._followers[maker].append(source)
                    else:
                        is_heard = source.topic not in self._carried and source.topic not in self._heard
                        if is_heard:
                            self._heard[source.topic] = source.type_name
                        receive = functools.partial(self._hear, source) if is_heard else source.receive
                        subscription = subscribe(self, source, receive)
                        self._subscriptions_of_stages.append(subscription)
                        self._reporter.inputs.append(source)
                        if self._taker is not None and source.index == 0:
                            self._waitables_of_stages.append(
                                RingSubscription(self, subscription, self._taker, stage.slot, self._takes_by_rclpy)
                            )
        except TorchperfError as error:
            self.get_logger().error(str(error))
            return False
        return True

    def _open_lane(self, config: NodeConfig) -> bool:
        """The emergency lane, unless it is off, and what an incident is to hold of its topics."""
        if self._lane is None:
            self._reporter.facts["emergency"] = "off: emergency.sensors is empty"
            return True
        last = self._stages[-1]
        output_type = "" if last.pool.description is None else last.pool.description.output
        try:
            self._lane.connect(self, last.config.output, output_type, self._reporter.alert_publisher)
        except TorchperfError as error:
            self.get_logger().error(str(error))
            return False
        self._reporter.lane = self._lane
        if config.recorder:
            for topic, kind in self._lane.topics:
                if topic not in self._carried and topic not in self._heard:
                    self._heard[topic] = kind
                    record = functools.partial(self._record_heard, topic)
                    subscription = self.create_subscription(ros_message_class(kind), topic, record, HEARD_QOS, raw=True)
                    self._subscriptions_of_stages.append(subscription)
        return True

    def _find_taker(self) -> None:
        """Find out whether triggers can be taken straight into the stages' rings."""
        self._taker = None
        try:
            self._taker = checked_taker(self.context.get_domain_id())
        except (TakeError, RuntimeError) as error:  # rclpy's own errors are of the second kind
            self._takes_by_rclpy(str(error))
        else:
            self._reporter.facts["inputs_taken"] = "into shared memory"

    def _takes_by_rclpy(self, why: str) -> None:
        self._reporter.facts["inputs_taken"] = f"by rclpy, and copied from there: {why}"

    def _start_recording(self, config: NodeConfig) -> None:
        if config.recorder:
            rings = [stage.pool.ring for stage in self._stages]
            self._recording = Recording(config, recording_setup(self, self._stages, self._heard.items()), rings)
            self._reporter.alert_publisher.recording = self._recording

    def _export_metrics(self, config: NodeConfig) -> None:
        if not config.metrics_port:
            return
        try:
            self._exporter = MetricsExporter(config, self._stages, self._lane.values if self._lane else dict)
        except OSError as error:
            place = f"on metrics_address {config.metrics_address}; set another, or 0 for none"
            self._reporter.facts["metrics_warning"] = (
                f"metrics_port {config.metrics_port} cannot be used: {error}, {place}"
            )

    def _finish(self) -> None:
        """Let no more frames in, and wait for the answers of those that run; what a stage answers the next one gets."""
        for stage in self._stages:
            stage.deactivate()
            stage.finish()

    def _tear_down(self) -> None:
        self._rollouts.end()
        self._finish()  # while all that an answer goes to is there
        self.parameters.configured = False
        for waitable in self._waitables_of_stages:
            self.remove_waitable(waitable)
        for subscription in self._subscriptions_of_stages:
            self.destroy_subscription(subscription)
        self._waitables_of_stages.clear()
        self._subscriptions_of_stages.clear()
        self._reporter.inputs, self._reporter.stages, self._reporter.facts = [], [], {}
        self._reporter.alert_publisher.recording = self._reporter.lane = None
        for stage in self._stages:
            stage.stop()
        if self._lane is not None:
            self._lane.close()
        self._lane = None
        for publisher in self._outputs:
            if publisher is not None:
                self.destroy_publisher(publisher.publisher)
        if self._exporter is not None:
            self._exporter.close()
        self._exporter = None
        if self._recording is not None:
            problem = self._recording.close(self.get_clock().now().nanoseconds)
            if problem:
                self.get_logger().error(problem)
        self._recording = None
        self._stages, self._outputs, self._followers, self._heard = [], [], [], {}
        self._lifecycle = "unconfigured"

    def close(self) -> None:
        """Leave nothing running: no worker, no thread, no port."""
        self._tear_down()
        self._reporter.stop()

    # -- what the stages call -----------------------------------------------------------------------------------------

    def _publish_output(self, index: int, payload: bytes) -> Instead | None:
        if (publisher := self._outputs[index]) is None:
            return None
        if self._lane is not None and index == len(self._outputs) - 1:
            return self._lane.answer(publisher, payload)
        publisher.publish(payload)
        return None

    def _hear(self, source: StageInput, data: bytes) -> None:
        """A message that a guard, or scenes, depend on: an incident is to hold it, and frames do not carry it."""
        source.receive(data)
        self._record_heard(source.topic, data)

    def _record_heard(self, topic: str, data: bytes) -> None:
        if self._recording is not None:
            self._recording.heard(topic, self.get_clock().now().nanoseconds, data)

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
        self._rollouts.reconfigure(config)
