"""The emergency lane in ROS: a thread that waits for raw sensors by itself and publishes the stop path.

No executor, stage or worker is in its way: its subscriptions and its service belong to the node, but only this thread
waits for them. It runs at the highest real-time priority that is permitted.
"""

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription
from std_srvs.srv import Trigger

from torchperf_ros.config.emergency_options import SENSOR_TYPES, EmergencyOptions
from torchperf_ros.frame.alert_rules import Alert, Level
from torchperf_ros.frame.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from torchperf_ros.frame.errors import ConfigError
from torchperf_ros.frame.outcome import Fallback
from torchperf_ros.frame.stop_output import PATH
from torchperf_ros.node.endpoints import OUTPUT_QOS, RawPublisher, ros_message_class
from torchperf_ros.node.ring_subscription import NoExecutor
from torchperf_ros.safety.emergency import Emergency, stop_along_arc
from torchperf_ros.stage.stage_actor import Instead
from torchperf_ros.workers.process_setup import prefer_this_thread

SERVICE = "~/clear_emergency"
_DEPTH = 5
_LONGEST_WAIT_NS = NS_PER_S
_AFTER_ERROR_S = 0.02  # a thread of this priority that fails without end must leave the machine to others


class EmergencyLane:
    """Watches from `activate` to `deactivate`, and publishes while latched.

    Attributes:
        rules: what it judges by.
        topics: names as resolved, and message types, of odometry and sensors.
        published: stop paths so far.
        withheld: outputs of the last stage that were not published, as the lane was latched.
        reaction_ms: from the middleware's receipt of the message that latched it last to the published stop path; NaN
            before the first, and where a silence did.
    """

    def __init__(
        self, node: Node, options: EmergencyOptions, last_output: str, last_type: str,
        anomaly: Callable[[Alert], None], heard: Callable[[str, bytes], None],
    ) -> None:  # fmt: skip
        """Subscribe, offer the service, and start the thread.

        Args:
            node: which node.
            options: the parameters; at least one sensor.
            last_output: topic of the last stage's output.
            last_type: message type of that output, empty if it is not known.
            anomaly: takes the alert when the lane latches, on the lane's thread.
            heard: takes every message, on that thread, too, and must not wait; topics as in `topics`.

        Raises:
            ConfigError: the stop path's topic is the last stage's, and that publishes something else.
            UnknownMessageType: a sensor's package is not installed.
        """
        topic = options.output or last_output
        if last_type not in {PATH, ""} and node.resolve_topic_name(topic) == node.resolve_topic_name(last_output):
            said = f"{topic!r} is not allowed, as the last stage publishes {last_type} there"
            raise ConfigError(f"parameter emergency.output: {said}; it has to be a topic of {PATH}")
        self.rules = Emergency(options)
        self.published = self.withheld = self.errors = 0
        self.reaction_ms = float("nan")
        self.scheduling = ""
        self._node, self._anomaly, self._answers_with_path = node, anomaly, last_type == PATH
        self._heard = heard
        self._ros_now = node.get_clock().handle.get_now
        self._stop: bytes | None = None  # what is published instead of the last stage's outputs
        self._publish_at_ns: int | None = None
        self._received_ns = 0  # ROS time at which the middleware received the message that is judged
        group = NoExecutor()

        def subscribe(name: str, type_name: str) -> Subscription:
            reliable = type_name == SENSOR_TYPES["Bool"]  # it may come once, and then has to
            reliability = ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT
            qos = QoSProfile(depth=_DEPTH, reliability=reliability)
            kind = ros_message_class(type_name)
            return node.create_subscription(kind, name, lambda _: None, qos, callback_group=group, raw=True)

        kinds = [SENSOR_TYPES[kind] for kind in options.types]
        given = [(options.odometry, "nav_msgs/msg/Odometry"), *zip(options.sensors, kinds, strict=True)]
        self.topics = [(node.resolve_topic_name(name), kind) for name, kind in given]
        self._subscriptions = [subscribe(name, kind) for name, kind in given]
        self._service = node.create_service(Trigger, SERVICE, lambda _, response: response, callback_group=group)
        self._publisher = RawPublisher(node.create_publisher(ros_message_class(PATH), topic, OUTPUT_QOS))
        self._wake = node.create_guard_condition(lambda: None, group)
        self._wait_set = rclpy_implementation.WaitSet(
            len(self._subscriptions), 1, 0, 0, 1, 0, node.context.handle
        )  # fmt: skip
        stop_along_arc(None, options, 0, 0)  # the first takes longer than those that follow
        self._orders: list[Callable[[int], None]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="emergency", daemon=True)
        self._thread.start()

    # -- for the node's threads ---------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Watch from now on; a latch stays."""
        self._order(self.rules.activate)

    def deactivate(self) -> None:
        """Publish and judge nothing more; a latch stays."""
        self._order(lambda _: self.rules.deactivate())

    def close(self) -> None:
        """End the thread and take the endpoints down."""
        self._ending.set()
        self._wake.trigger()
        self._thread.join()
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._node.destroy_service(self._service)
        self._node.destroy_publisher(self._publisher.publisher)
        self._node.destroy_guard_condition(self._wake)

    def answer(self, publisher: RawPublisher, payload: bytes) -> Instead | None:
        """Publish an output of the last stage, on its thread; while latched the stop path, or nothing, in its place.

        Where the lane latches just then, the stop path follows it: the last word is the lane's.

        Returns:
            What went out in its place; None: it went out itself.
        """
        was_latched = self._stop is not None
        if was_latched:
            self.withheld += 1
        else:
            publisher.publish(payload)
        stop = self._stop if self._answers_with_path else None
        if stop is not None:
            publisher.publish(stop)
        return (Fallback.NONE if stop is None else Fallback.STOP, stop) if was_latched else None

    def status(self) -> Alert:
        """For `/diagnostics`."""
        alert = self.rules.status(monotonic_ns())
        values = {
            "published": str(self.published), "withheld": str(self.withheld), "errors": str(self.errors),
            "reaction_ms": f"{self.reaction_ms:.3f}", "scheduling": self.scheduling,
        }  # fmt: skip
        return replace(alert, values={**alert.values, **values})

    def alert(self) -> Alert | None:
        """For `/perf/anomaly`, None while nothing is latched."""
        latch = self.rules.latch
        if latch is None:
            return None
        values = {"kind": latch.kind, "value": f"{self.reaction_ms:.3f}", "reaction_ms": f"{self.reaction_ms:.3f}"}
        return Alert(Level.ERROR, "node: emergency stop", latch.reason, values)

    def _order(self, order: Callable[[int], None]) -> None:
        self._orders.append(order)
        self._wake.trigger()

    # -- the lane's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.scheduling = prefer_this_thread()
        while not self._ending.is_set():
            try:
                self._step()
            except Exception:  # the thread's boundary: what failed does not count as seen, and is silent before long
                self.errors += 1
                text = f"the emergency lane failed:\n{traceback.format_exc()}"
                self._node.get_logger().error(text, throttle_duration_sec=1.0)
                self._ending.wait(_AFTER_ERROR_S)

    def _step(self) -> None:
        """Do what is due, then wait for what comes first: a message, a silence, the next publication."""
        rules, now_ns = self.rules, monotonic_ns()
        while self._orders:
            self._orders.pop(0)(now_ns)
        rules.look_for_silence(now_ns)
        self._publish_if_due(now_ns)
        due = [at_ns for at_ns in (rules.next_silence_ns(), self._publish_at_ns) if at_ns is not None]
        wait_ns = min([_LONGEST_WAIT_NS, *(at_ns - monotonic_ns() for at_ns in due)])
        wait_set = self._wait_set
        wait_set.clear_entities()
        for subscription in self._subscriptions:
            wait_set.add_subscription(subscription.handle)
        wait_set.add_guard_condition(self._wake.handle)
        wait_set.add_service(self._service.handle)
        wait_set.wait(max(wait_ns, 0))
        self._received_ns = 0
        for index, subscription in enumerate(self._subscriptions):
            if wait_set.is_ready("subscription", index):
                self._take(index - 1, subscription)
        if wait_set.is_ready("service", 0):
            self._clear()

    def _take(self, index: int, subscription: Subscription) -> None:
        """Take a message: of the odometry (-1), or of a sensor."""
        found = subscription.handle.take_message(subscription.msg_type, True)
        if found is None:
            return
        was_latched = self.rules.latch is not None
        if index < 0:
            self.rules.moved(found[0], monotonic_ns())
        else:
            self.rules.saw(index, found[0], monotonic_ns())
        self._heard(self.topics[index + 1][0], found[0])
        if self.rules.latch is not None and not was_latched:
            self._received_ns = found[1]["received_timestamp"]

    def _publish_if_due(self, now_ns: int) -> None:
        rules = self.rules
        if rules.latch is None or not rules.active:
            self._stop = self._publish_at_ns = None
            return
        if self._publish_at_ns is not None and now_ns < self._publish_at_ns:
            return
        begins = self._stop is None
        self._stop = rules.stop_path(now_ns, int(self._ros_now().nanoseconds))
        self._publisher.publish(self._stop)
        self.published += 1
        self._publish_at_ns = now_ns + round(NS_PER_S / rules.options.rate_hz)
        if begins:
            since_ns = time.time_ns() - self._received_ns if self._received_ns else None
            self.reaction_ms = float("nan") if since_ns is None else since_ns / NS_PER_MS
            if (alert := self.alert()) is not None:
                self._anomaly(alert)

    def _clear(self) -> None:
        request, header = self._service.handle.service_take_request(Trigger.Request)
        if request is None:
            return
        was_latched = self.rules.latch is not None
        refusal = self.rules.clear(monotonic_ns())
        done = "cleared: the last stage's outputs are published again" if was_latched else "nothing was latched"
        self._publish_if_due(monotonic_ns())
        response = Trigger.Response(success=not refusal, message=f"refused: {refusal}" if refusal else done)
        self._service.send_response(response, header)
