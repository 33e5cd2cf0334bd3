"""The emergency lane's process, spawned by the node.

It waits for raw sensors by itself and publishes the stop path. No executor, stage, worker or interpreter
lock of the node is in its way, nor are the images that the node takes: a process of its own has its own
participant. Its one thread that matters runs at the highest real-time priority that is permitted. Should
the node go without a word, the lane stops the vehicle.
"""

import contextlib
import gc
import json
import mmap
import os
import socket
import struct
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import rclpy
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions
from rclpy.subscription import Subscription
from std_srvs.srv import Trigger

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from torchperf_ros.node.endpoints import EVENTS, OUTPUT_QOS, RawPublisher
from torchperf_ros.node.middleware import end_within
from torchperf_ros.observe.ros_types import ros_message_class
from torchperf_ros.safety.emergency import Emergency
from torchperf_ros.safety.emergency_stop import warm_up
from torchperf_ros.safety.kept_latch import LatchKeeper, read_latch
from torchperf_ros.safety.stop_output import PATH
from torchperf_ros.settings.safety_options import SENSOR_TYPES, EmergencyOptions, VehicleOptions
from torchperf_ros.workers import process_setup
from torchperf_ros.workers.memory_file import keep_order, make_memory_file

MAX_PACKET_BYTES = 100_000
_WORD, _SLOTS, _SLOT_BYTES = 8, 16, 1 << 16


class StopArea:
    """Shared memory that says whether the lane is latched, and with which path.

    Its process writes, the node reads.

    A path goes into the next of several slots, so that what a reader copies is not written to meanwhile:
    the lane would have to make 16 paths in that time. What lies in it outlives the process.
    """

    def __init__(self, fd: int = -1) -> None:
        """Map the area of this descriptor, or make one."""
        size = (_SLOTS + 1) * _SLOT_BYTES
        self.fd = make_memory_file("torchperf_emergency", size) if fd < 0 else fd
        self._map = mmap.mmap(self.fd, size)
        self._view = memoryview(self._map)
        self._newest = self._view[:_WORD].cast("Q")  # where the path begins, 0: not latched
        self._stop = self.read()  # as a process before this one may have left it

    def write(self, stop: bytes | None) -> None:
        """Latched, with this path, which fits in as `Motion` takes no longer names of frames.

        None: not latched.
        """
        if stop is self._stop:
            return
        begin = 0
        if stop is not None:
            begin = (self._newest[0] // _SLOT_BYTES % _SLOTS + 1) * _SLOT_BYTES
            self._view[begin : begin + _WORD] = len(stop).to_bytes(_WORD, "little")
            self._view[begin + _WORD : begin + _WORD + len(stop)] = stop
            keep_order()  # a reader finds the path by the word, so it has the order by itself
        self._newest[0] = begin
        self._stop = stop

    def read(self) -> bytes | None:
        """The path; None: not latched."""
        begin = self._newest[0]
        if not begin:
            return None
        length = int.from_bytes(self._map[begin : begin + _WORD], "little")
        return self._map[begin + _WORD : begin + _WORD + length]

    def close(self) -> None:
        """Release the mapping and the descriptor."""
        self._newest.release()
        self._view.release()
        self._map.close()
        os.close(self.fd)


def received(other: socket.socket) -> bytes:
    """What the other process says next.

    Empty once it is gone, which it may be before it has read all that it was sent.
    """
    try:
        return other.recv(MAX_PACKET_BYTES)
    except OSError:
        return b""


_DEPTH: Final = 5
_REMEMBERED: Final = 4 * _DEPTH  # messages of a button, of which copies come by several subscriptions
# A wait that ends early for nothing would end so again at once, and a thread of this priority take the
# processor.
_AFTER_NOTHING_S: Final = 0.001
_LONGEST_WAIT_NS: Final = NS_PER_S
# a thread of this priority that fails without end must leave the machine to others
_AFTER_ERROR_S: Final = 0.02
_ENDS_WITHIN_S: Final = 3
_CLOCK, _CDR_HEADER = struct.Struct("<iI"), 4


_SENSOR_QOS: Final = QoSProfile(depth=_DEPTH, reliability=ReliabilityPolicy.BEST_EFFORT)
# A press has to come, and may have come before the lane.
#
# No one subscription hears every kind of publisher.
#
# The first hears what a publisher keeps for those that join later; it does not match one that keeps
# nothing, which the second hears. Neither matches a publisher that is best effort, which the third
# does.
_BUTTON_QOS: Final = (
    QoSProfile(
        depth=_DEPTH, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL
    ),
    QoSProfile(depth=_DEPTH, reliability=ReliabilityPolicy.RELIABLE),
    _SENSOR_QOS,
)


class _Lane:
    """Watches between `activate` and `deactivate`, and publishes while latched.

    The setup holds `node` and `namespace` of its own node, `options` (parameters `emergency.NAME`),
    `topics` (resolved names and types of odometry and sensors), `output`, `service`, `priority`, `cpus`,
    `lock_memory`, `use_sim_time`, `domain`, `latch_file`; and whether the node is `active`, kind and reason
    if the process before this one was `latched`, and the topics of the buttons that were `pressed`.
    """

    def __init__(self, node_socket: socket.socket, area: StopArea, setup: dict[str, Any]) -> None:
        """Subscribe, offer the service, and listen to the node."""
        if setup["cpus"]:
            with contextlib.suppress(OSError):  # one that is not there: the node says so
                process_setup.pin_this_process(tuple(setup["cpus"]))
        if setup["lock_memory"]:
            process_setup.lock_memory()
        process_setup.prefer_this_process(setup["priority"])
        self.scheduling = process_setup.prefer_this_thread()  # the middleware's threads inherit it
        rclpy.init(args=[], domain_id=setup["domain"], signal_handler_options=SignalHandlerOptions.NO)
        node = Node(
            setup["node"],
            namespace=setup["namespace"],
            use_global_arguments=False,
            enable_rosout=False,
            start_parameter_services=False,
        )
        self._node, self._area, self._socket = node, area, node_socket
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in setup["options"].items()
        }
        options = EmergencyOptions(**{**given, "vehicle": VehicleOptions(**given["vehicle"])})
        self.rules = Emergency(options)
        self.published = self.errors = 0
        self.reaction_ms = float("nan")
        self._confirms = False  # that it watches
        self._begins = True  # the next stop path is the first since it latched
        self._publish_at_ns: int | None = None
        self._received_ns = 0  # ROS time at which the middleware received the message that is judged
        self._closes = False

        self._ros_now_ns: Callable[[], int] = time.time_ns
        self._clock_ns = 0  # of simulated time
        if setup["use_sim_time"]:
            self.rules.simulated, self._ros_now_ns = True, lambda: self._clock_ns
        self._clock_at = len(setup["topics"])  # the clock's place among the topics
        self._subscriptions = self._subscribe(setup["topics"])
        self._heard: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._service = node.create_service(Trigger, setup["service"], lambda _, response: response)
        self._publisher = RawPublisher(
            node.create_publisher(ros_message_class(PATH), setup["output"], OUTPUT_QOS)
        )
        self._wake = node.create_guard_condition(lambda: None)
        self._wait_set = rclpy_implementation.WaitSet(
            len(self._subscriptions), 1, 0, 0, 1, 0, node.context.handle
        )
        warm_up(options)
        self._orders: list[Callable[[int], None]] = []
        self._pressed: list[str] = setup["pressed"]
        self.rules.pressed(self._pressed)
        if setup["active"]:
            self._activate(monotonic_ns())
        self._keeper = self._resume(setup["latched"], Path(setup["latch_file"]))
        process_setup.stop_collecting()
        self._send(ready=True)
        threading.Thread(target=self._listen, name="node", daemon=True).start()

    def _resume(self, latched: tuple[str, str] | None, file: Path) -> LatchKeeper:
        """Be latched as the process or the node before this one was, by what it left on disk."""
        now_ns = monotonic_ns()
        kept = read_latch(file, now_ns)
        if kept is not None and latched is None:
            latched = kept.kind, kept.reason
        if latched is not None:
            self.rules.resume(*latched, self._area.read(), now_ns)
            self._begins = False
        return LatchKeeper(file, self.rules.latch if kept else None, process_setup.step_back)

    def _subscribe(self, topics: list[tuple[str, str]]) -> list[tuple[int, Subscription]]:
        """To odometry, sensors and the clock; of each subscription the place of its topic among them.

        Events of a subscription, as of a publisher that it does not match, would wake the lane's thread for
        ever, as no executor takes them; by default rclpy asks for them.
        """
        no_events = EVENTS.SubscriptionEventCallbacks(use_default_callbacks=False)
        clock = [("/clock", "rosgraph_msgs/msg/Clock")] if self.rules.simulated else []
        return [
            (
                place,
                self._node.create_subscription(
                    ros_message_class(kind), name, lambda _: None, qos, raw=True, event_callbacks=no_events
                ),
            )
            for place, (name, kind) in enumerate([*topics, *clock])
            for qos in (_BUTTON_QOS if kind == SENSOR_TYPES["Bool"] else (_SENSOR_QOS,))
        ]

    # -- the thread that listens to the node

    def _listen(self) -> None:
        process_setup.step_back()
        orders: dict[str, Callable[[int], None]] = {
            "activate": self._activate,
            "hold": lambda _: self.rules.hold(),
            "deactivate": lambda _: self.rules.deactivate(),
            "close": self._close,
        }
        while data := received(self._socket):
            try:
                order = json.loads(data)["order"]
                if (
                    order == "beat"
                ):  # without waking the lane's thread, which looks when the node would be silent
                    self.rules.beat(monotonic_ns())
                elif order == "status":
                    self._send(status=_fields(self._status()))
                    gc.collect()
                else:
                    self._do(orders[order])
            except Exception:  # the thread's boundary: after any error it has to notice the node's end
                self.errors += 1
                self._send(error=traceback.format_exc())
        self._do(self._left_alone)

    def _do(self, what: Callable[[int], None]) -> None:
        self._orders.append(what)
        self._wake.trigger()

    def _send(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        try:
            self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except OSError:  # the node is gone, or has not looked for long; the status tells it again
            self.errors += 1

    def _status(self) -> Alert:
        alert, latch = self.rules.status(monotonic_ns()), self.rules.latch
        values = {
            "kind": "" if latch is None else latch.kind,
            "pid": str(os.getpid()),
            "published": str(self.published),
            "errors": str(self.errors),
            "reaction_ms": f"{self.reaction_ms:.3f}",
            "scheduling": self.scheduling,
            "clock_s": f"{self._ros_now_ns() / NS_PER_S:.3f}",
        }
        alert = replace(alert, values={**alert.values, **values})
        if problem := self._keeper.problem:
            return replace(alert, level=max(alert.level, Level.WARN), message=f"{alert.message}; {problem}")
        return alert

    # -- orders, on the lane's thread

    def _activate(self, now_ns: int) -> None:
        self.rules.activate(now_ns)
        self.rules.beat(now_ns)
        self._begins = self._confirms = True

    def _close(self, _now_ns: int) -> None:
        self._closes = True

    def _left_alone(self, now_ns: int) -> None:
        """The node is gone: stop the vehicle, unless nothing was to be watched, and end."""
        if not self.rules.active:
            self._closes = True
            return
        self.rules.left_alone(now_ns)

    # -- the lane's thread

    def run(self) -> None:
        """Until the node says so, or is gone."""
        while not (self._closes or self.rules.may_end(monotonic_ns())):
            try:
                self._step()
            except (
                Exception
            ):  # the thread's boundary: what failed does not count as seen, and is silent before long
                self.errors += 1
                self._send(error=traceback.format_exc())
                time.sleep(_AFTER_ERROR_S)
        # the last word is of now: ROS time may have been set since the one before
        self._publish_at_ns = None
        self._publish_if_due(monotonic_ns())
        # The area stays latched: a node that has left this process alone may still answer a frame.
        self._keeper.close()
        self._node.destroy_node()

    def _step(self) -> None:
        """Do what is due, then wait for what comes first: a message, a silence, the next publication."""
        rules, now_ns = self.rules, monotonic_ns()
        while self._orders:
            self._orders.pop(0)(now_ns)
        rules.look_for_silence(now_ns)
        self._publish_if_due(now_ns)
        self._tell()
        due = [at_ns for at_ns in (rules.next_silence_ns(), self._publish_at_ns) if at_ns is not None]
        wait_ns = min([_LONGEST_WAIT_NS, *(at_ns - monotonic_ns() for at_ns in due)])
        wait_set = self._wait_set
        wait_set.clear_entities()
        for _, subscription in self._subscriptions:
            wait_set.add_subscription(subscription.handle)
        wait_set.add_guard_condition(self._wake.handle)
        wait_set.add_service(self._service.handle)
        wait_set.wait(max(wait_ns, 0))
        self._received_ns = 0
        woken = wait_set.is_ready("guard_condition", 0)
        for index, (place, subscription) in enumerate(self._subscriptions):
            if wait_set.is_ready("subscription", index):
                woken = True
                self._take(place, subscription, monotonic_ns())
        if wait_set.is_ready("service", 0):
            woken = True
            self._clear(monotonic_ns())
        if not woken and monotonic_ns() < now_ns + wait_ns:
            time.sleep(_AFTER_NOTHING_S)

    def _take(self, place: int, subscription: Subscription, now_ns: int) -> None:
        """Take a message: of the odometry (0), of a sensor, or of the clock."""
        found = subscription.handle.take_message(subscription.msg_type, True)
        if found is None:
            return
        rules, (data, info) = self.rules, found
        if place == self._clock_at:
            seconds, nanoseconds = _CLOCK.unpack_from(data, _CDR_HEADER)
            self._clock_ns = seconds * NS_PER_S + nanoseconds
            return
        was_latched = rules.latch is not None
        if place == 0:
            rules.moved(data, now_ns)
        elif rules.sensors[place - 1].is_trigger:
            self._hear(place - 1, data, info["source_timestamp"], now_ns)
        else:
            rules.saw(place - 1, data, now_ns)
        if rules.latch is not None and not was_latched:
            self._received_ns = info["received_timestamp"]

    def _hear(self, index: int, data: bytes, sent_ns: int, now_ns: int) -> None:
        """Take a message of a button, each copy.

        The subscription that brings the last of them has lost none.
        """
        heard = self._heard[index]
        again = sent_ns in heard and sent_ns != 0  # 0: the middleware does not say
        self.rules.saw(index, data, now_ns, again=again)
        if not again:
            heard.append(sent_ns)

    def _tell(self) -> None:
        """Have others know, once the stop path is out.

        The disk of the latch, the node of buttons, and that it watches.

        Which buttons are pressed, a process after this one is to know.
        """
        self._keeper.keep(self.rules.latch)
        pressed = [sensor.topic for sensor in self.rules.sensors if sensor.pressed]
        if pressed != self._pressed:
            self._pressed = pressed
            self._send(pressed=pressed)
        if self._confirms:
            self._confirms = False
            self._send(watches=True)

    def _publish_if_due(self, now_ns: int) -> None:
        rules = self.rules
        if rules.latch is None or not rules.active:
            self._area.write(None)
            self._begins, self._publish_at_ns = True, None
            return
        if self._publish_at_ns is not None and now_ns < self._publish_at_ns:
            return
        stop = rules.stop_path(now_ns, self._ros_now_ns())
        self._area.write(
            stop
        )  # before it is published: what the node publishes meanwhile, a stop path follows
        self._publisher.publish(stop)
        self.published += 1
        self._publish_at_ns = now_ns + round(NS_PER_S / rules.options.rate_hz)
        if self._begins:
            self._begins = False
            self.reaction_ms = (
                (time.time_ns() - self._received_ns) / NS_PER_MS if self._received_ns else float("nan")
            )
            self._send(status=_fields(self._status()), latched=True)

    def _clear(self, now_ns: int) -> None:
        request, header = self._service.handle.service_take_request(Trigger.Request)
        if request is None:
            return
        was_latched = self.rules.latch is not None
        refusal = self.rules.clear(now_ns)
        done = (
            "cleared: the last stage's outputs are published again"
            if was_latched
            else "nothing was latched"
        )
        self._publish_if_due(now_ns)
        response = Trigger.Response(success=not refusal, message=f"refused: {refusal}" if refusal else done)
        self._service.send_response(response, header)
        self._send(status=_fields(self._status()))  # so that no process after this one is latched for it


def _fields(alert: Alert) -> list[Any]:
    return [int(alert.level), alert.name, alert.message, dict(alert.values)]


def main(socket_fd: int, area_fd: int) -> None:
    """Take the setup, watch, and end with the node, or some time after it."""
    node_socket, area = socket.socket(fileno=socket_fd), StopArea(area_fd)
    if setup := node_socket.recv(MAX_PACKET_BYTES):
        _Lane(node_socket, area, json.loads(setup)).run()
        end_within(_ENDS_WITHIN_S)
        rclpy.try_shutdown()
