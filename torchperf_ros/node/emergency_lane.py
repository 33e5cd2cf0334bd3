"""The node's side of the emergency lane.

Starts its process, asks it how it is, and replaces one that is gone.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.errors import ConfigError, how_it_ended
from torchperf_ros.api.outcome import Fallback
from torchperf_ros.node.alert_publisher import AlertPublisher
from torchperf_ros.node.emergency_process import StopArea, received
from torchperf_ros.node.endpoints import RawPublisher, resolved
from torchperf_ros.node.middleware import own_segment
from torchperf_ros.observe.ros_types import ros_message_class
from torchperf_ros.safety.emergency import SILENT
from torchperf_ros.safety.kept_latch import latch_file
from torchperf_ros.safety.stop_output import PATH
from torchperf_ros.settings.config import NodeConfig
from torchperf_ros.settings.safety_options import SENSOR_TYPES
from torchperf_ros.stage.hooks import Instead
from torchperf_ros.workers.process_setup import step_back

SERVICE = "~/clear_emergency"
_ENTRY: Final = """\
import sys
from torchperf_ros.workers.process_setup import leave_priority, outlive_the_group
outlive_the_group()
leave_priority()  # before the imports: they take 0.4 s, and the node's first frames come just then
from torchperf_ros.node.emergency_process import main
main(*map(int, sys.argv[1:]))"""
_NAME: Final = "perf: emergency"
_ANSWERS_WITHIN_S: Final = 0.5
# One that has left so many questions in a row unanswered, one a second, is replaced. They are counted, and
# not the time: this process may have been stopped itself.
_UNANSWERED: Final = 5
_RESTART_S: Final = 1.0  # a process that lived for less is replaced after as long, any other at once
_BEATS_EVERY_S: Final = 0.25  # so that eight have to be missing before the node counts as one that hangs
_OVERDUE_MS: Final = 500.0  # a stage that is so late with an answer has none: the node does not answer then
_ENDS_WITHIN_S: Final = 5.0


class EmergencyLane:
    """One process after the other that watches raw sensors and publishes the stop path.

    Attributes:
        topics: names as resolved, and message types, of odometry and sensors.
        withheld: outputs of the last stage that were not published, as the lane was latched.
        restarts: processes that had to be replaced.
    """

    def __init__(self, config: NodeConfig) -> None:
        """Spawn the first process, which imports what it needs while workers start."""
        self.topics: list[tuple[str, str]] = []
        self.withheld = self.restarts = 0
        self._config = config
        self._area = StopArea()
        self._setup: dict[str, Any] = {}
        self._answers_with_path = self._active = self._ready = self._confirmed = self._left = False
        self._status = Alert(Level.WARN, _NAME, "inactive", {"state": "inactive"})
        self._pressed: list[str] = []
        self._news = threading.Condition()
        self._replies = self._unanswered = self._failures = 0
        self._why_none = ""  # why there is no process at present
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._spawn()

    def connect(
        self,
        node: LifecycleNode,
        last_output: str,
        last_type: str,
        alerts: AlertPublisher,
        overdue_ms: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Say what is to be watched, and wait until it is subscribed to.

        The last stage's output has this topic, and this message type, "" if that is not known. `overdue_ms`
        says by how much the stages are late with an answer. From activation on, the thread that runs the
        node's callbacks has to come by here again and again.

        Raises:
            ConfigError: the stop path's topic is the last stage's, and that publishes something else; no
                topic can be called so; or the process does not get as far.
            UnknownMessageType: a sensor's package is not installed.
        """
        options = self._config.emergency
        topic = resolved(node, options.output or last_output)
        if last_type not in {PATH, ""} and topic == resolved(node, last_output):
            raise ConfigError(
                f"parameter emergency.output: {options.output or last_output!r} is not allowed, as the last"
                f" stage publishes {last_type} there; it has to be a topic of {PATH}"
            )
        kinds = [SENSOR_TYPES[kind] for kind in options.types]
        given = [(options.odometry, "nav_msgs/msg/Odometry"), *zip(options.sensors, kinds, strict=True)]
        self.topics = [(resolved(node, name), kind) for name, kind in given]
        for _, kind in self.topics:
            ros_message_class(kind)
        self._answers_with_path = last_type == PATH
        self._alerts, self._log = alerts, node.get_logger()
        self._setup = {
            "node": f"{node.get_name()}_emergency",
            "namespace": node.get_namespace(),
            "options": asdict(options),
            "topics": self.topics,
            "output": topic,
            "service": node.resolve_service_name(SERVICE),
            "priority": self._config.realtime_priority,
            "cpus": list(self._config.cpu_affinity),
            "lock_memory": self._config.lock_memory,
            "use_sim_time": node.get_parameter("use_sim_time").value,
            "domain": node.context.get_domain_id(),
            "latch_file": str(latch_file(node.get_fully_qualified_name())),
            "active": False,
            "latched": None,
            "pressed": [],
        }
        self._send(self._setup)
        self._timer = node.create_timer(
            _BEATS_EVERY_S,
            functools.partial(self._beat, overdue_ms),
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )
        self._node = node
        self._thread = threading.Thread(target=self._listen, name="emergency", daemon=True)
        self._thread.start()
        with self._news:
            self._news.wait_for(lambda: self._ready or self.restarts, self._config.start_timeout_s)
        if not self._ready:
            ended = "ended" if self.restarts else f"is not ready after {self._config.start_timeout_s:g} s"
            why = self._why_none or ended
            raise ConfigError(f"the emergency lane cannot run: its process {why}; see what it printed")

    # -- for the node's threads

    def activate(self) -> None:
        """Watch from now on.

        A latch stays. Returns once the process does so: a latched one has its path out by then.

        Raises:
            ConfigError: it does not.
        """
        with self._news:  # a process that is being replaced gets it either way
            self._active, self._confirmed = True, False
            self._send({"order": "activate"})
            if self._news.wait_for(lambda: self._confirmed, self._config.start_timeout_s):
                return
        self.deactivate()
        waited = f"does not watch after {self._config.start_timeout_s:g} s"
        raise ConfigError(f"the emergency lane {self._why_none or waited}")

    def hold(self) -> None:
        """Say that the node waits for its stages now, so that it does not count as one that hangs."""
        self._send({"order": "hold"})

    def deactivate(self) -> None:
        """Publish and judge nothing more; a latch stays."""
        with self._news:
            self._active = False
            self._send({"order": "deactivate"})

    def leave(self) -> None:
        """Leave the process alone, for good.

        It stops the vehicle, if the node is active, and ends by itself.
        """
        with self._news:
            self._ending.set()
            self._left = True
            self._shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process, unless it was left alone."""
        with self._news:  # from now on, none is replaced
            self._ending.set()
            if not self._left:
                self._send({"order": "close"})
                self._shut_down(socket.SHUT_WR)
        process = self._process
        if process is not None and not self._left:
            try:
                process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._setup:
            self._node.destroy_timer(self._timer)
            self._thread.join()
        if self._socket is not None:
            self._socket.close()
        self._area.close()

    def _shut_down(self, how: int) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(how)

    def answer(self, publisher: RawPublisher, payload: bytes) -> Instead | None:
        """Publish an output of the last stage, on its thread.

        While latched the stop path, or nothing, in its place.

        Where the lane latches just then, the stop path follows it: the last word is the lane's.

        Returns:
            What went out in its place; None: it went out itself.
        """
        stop = self._area.read()
        was_latched = stop is not None
        if was_latched:
            self.withheld += 1
        else:
            publisher.publish(payload)
            stop = self._area.read()
        if not self._answers_with_path:
            stop = None
        if stop is not None:
            publisher.publish(stop)
        return (Fallback.NONE if stop is None else Fallback.STOP, stop) if was_latched else None

    @property
    def latched(self) -> bool:
        """Whether the vehicle is being stopped."""
        return self._area.read() is not None

    @property
    def watches(self) -> bool:
        """Whether its process is ready, which it has to be while the lane is active."""
        return self._ready or not self._active

    def values(self) -> Mapping[str, str]:
        """Of the last status."""
        return self._status.values

    def status(self) -> Alert:
        """For `/diagnostics`: asks the process, and replaces one that has not answered for long."""
        replies = self._replies
        self._send({"order": "status"})
        with self._news:
            self._news.wait_for(lambda: self._replies > replies, _ANSWERS_WITHIN_S)
        last = self._status
        counted = {"withheld": self.withheld, "restarts": self.restarts, "failed_starts": self._failures}
        values = {**last.values, **{key: str(count) for key, count in counted.items()}}
        if self._replies > replies:
            self._unanswered = 0
            return Alert(last.level, last.name, last.message, values)
        text = self._why_none or "gone: a new process starts"
        if self._ready:
            self._unanswered += 1
            text = f"has not answered {self._unanswered} times in a row"
            if self._unanswered >= _UNANSWERED and self._process is not None:
                self._process.kill()
        return Alert(Level.ERROR, _NAME, text, {**values, "state": "gone"})

    def alert(self) -> Alert | None:
        """For `/perf/anomaly`, None while nothing is latched; of the last status."""
        values = self._status.values
        if not self.latched or not values.get("kind"):
            return None
        shown = {key: values[key] for key in ("kind", "reaction_ms")} | {"value": values["reaction_ms"]}
        return Alert(Level.ERROR, "node: emergency stop", values["reason"], shown)

    # -- the process

    def _spawn(self) -> bool:
        """Start a process; False: that is not possible now, and `_why_none` says why."""
        self._began_at = time.monotonic()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._process = None
        try:
            own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            return self._cannot_start(error)
        with theirs:
            passed = [theirs.fileno(), self._area.fd]
            try:
                # A session of its own: what ends a terminal, or all that runs in it, leaves this process to
                # stop the vehicle.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _ENTRY, *map(str, passed)],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **own_segment(os.environ, lane=True), "OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                own.close()
                return self._cannot_start(error)
        self._socket, self._why_none = own, ""
        return True

    def _cannot_start(self, error: Exception) -> bool:
        self._failures += 1
        self._why_none = (
            f"cannot be started: {error}; tried {self._failures} times, again every {_RESTART_S:g} s;"
            " nothing is watched meanwhile"
        )
        return False

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is not None and self._setup:  # the process takes what comes first for its setup
            with contextlib.suppress(OSError):  # it is gone: its successor gets it anew
                self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def _beat(self, overdue_ms: Callable[[], float]) -> None:
        """Show that the node answers: its callbacks run, as this is one, and no stage is overdue."""
        if self._active and overdue_ms() < _OVERDUE_MS:
            self._send({"order": "beat"})

    def _listen(self) -> None:
        step_back()
        while not self._ending.is_set():
            try:
                if data := b"" if self._socket is None else received(self._socket):
                    self._take(json.loads(data))
                elif not self._ending.is_set():
                    self._replace()
            except Exception:  # the thread's boundary: after any failure the lane is looked after again
                self._log.error(f"looking after the emergency lane failed:\n{traceback.format_exc()}")
                self._ending.wait(_RESTART_S)

    def _take(self, message: dict[str, Any]) -> None:
        if "error" in message:
            self._log.error(f"the emergency lane failed:\n{message['error']}", throttle_duration_sec=1.0)
        self._pressed = message.get("pressed", self._pressed)
        with self._news:
            self._ready = self._ready or "ready" in message
            self._confirmed = self._confirmed or "watches" in message
            if "status" in message:
                level, name, text, values = message["status"]
                self._status = Alert(Level(level), name, text, values)
                self._replies += 1
            self._news.notify_all()
        if "latched" in message and (alert := self.alert()) is not None:
            self._alerts.found(alert)

    def _replace(self) -> None:
        """Start another process, as often as it takes; a latch stays, with the path if there is one.

        Buttons that were pressed stay so, too; but no sensor counts as seen.
        """
        if self._process is not None:
            self._bury(self._process)
        if self._why_none or time.monotonic() - self._began_at < _RESTART_S:
            self._ending.wait(_RESTART_S)
        with self._news:
            if self._ending.is_set():
                return
            failed = self._why_none
            if not self._spawn():
                if not failed:
                    self._log.error(f"the emergency lane {self._why_none}")
                return
            self._send(
                {
                    **self._setup,
                    "active": self._active,
                    "latched": self._latched(),
                    "pressed": self._pressed,
                }
            )

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        how = how_it_ended(process.wait())
        self._process = None
        text = f"the emergency lane's process is gone ({how}); another one starts"
        with self._news:
            self._ready, self._unanswered = False, 0
            self.restarts += 1
            self._news.notify_all()
        self._log.error(text)
        self._alerts.found(
            Alert(Level.ERROR, "node: emergency lane", text, {"restarts": str(self.restarts)})
        )

    def _latched(self) -> tuple[str, str] | None:
        """Kind and reason of the latch that the next process begins with, None if it begins with none.

        While the node is active, the area is newer than the status. While it is not, the area is empty.
        """
        values = self._status.values
        if self._active and not self.latched:
            return None
        if values.get("kind"):
            return values["kind"], values["reason"]
        return (
            (SILENT, "it latched just before its process ended, and did not say why")
            if self.latched
            else None
        )
