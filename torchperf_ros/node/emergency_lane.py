"""The node's side of the emergency lane: starts its process, asks it how it is, and replaces one that is gone."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from rclpy.lifecycle import LifecycleNode

from torchperf_ros.config.config import NodeConfig
from torchperf_ros.config.safety_options import SENSOR_TYPES
from torchperf_ros.frame.alert_rules import Alert, Level
from torchperf_ros.frame.errors import ConfigError, how_it_ended
from torchperf_ros.frame.outcome import Fallback
from torchperf_ros.frame.stop_output import PATH
from torchperf_ros.node.alert_publisher import AlertPublisher
from torchperf_ros.node.emergency_process import MAX_PACKET_BYTES, StopArea
from torchperf_ros.node.endpoints import RawPublisher, resolved, ros_message_class
from torchperf_ros.node.middleware import own_segment
from torchperf_ros.stage.stage_versions import Instead
from torchperf_ros.workers.process_setup import step_back

SERVICE = "~/clear_emergency"
_ENTRY: Final = """\
import sys
from torchperf_ros.workers.process_setup import leave_priority
leave_priority()  # before the imports: they take 0.4 s, and the node's first frames come just then
from torchperf_ros.node.emergency_process import main
main(*map(int, sys.argv[1:]))"""
_NAME: Final = "perf: emergency"
_ANSWERS_WITHIN_S: Final = 0.5
_SILENT_S: Final = 5.0  # one that has not answered for so long is replaced
_RESTART_S: Final = 1.0  # one that ended sooner has its successor after as long, any other at once
_ENDS_WITHIN_S: Final = 5.0


class EmergencyLane:
    """One process after the other that watches raw sensors and publishes the stop path, see `emergency_process`.

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
        self._answers_with_path = self._active = self._ready = False
        self._status = Alert(Level.WARN, _NAME, "inactive", {"state": "inactive"})
        self._news = threading.Condition()
        self._replies, self._replied_at = 0, time.monotonic()
        self._ending = threading.Event()
        self._spawn()

    def connect(self, node: LifecycleNode, last_output: str, last_type: str, alerts: AlertPublisher) -> None:
        """Say what is to be watched, and wait until it is subscribed to.

        The last stage's output has this topic, and this message type, "" if that is not known.

        Raises:
            ConfigError: the stop path's topic is the last stage's, and that publishes something else; no topic can be
                called so; or the process does not get as far.
            UnknownMessageType: a sensor's package is not installed.
        """
        options = self._config.emergency
        topic = resolved(node, options.output or last_output)
        if last_type not in {PATH, ""} and topic == resolved(node, last_output):
            said = f"{options.output or last_output!r} is not allowed, as the last stage publishes {last_type} there"
            raise ConfigError(f"parameter emergency.output: {said}; it has to be a topic of {PATH}")
        kinds = [SENSOR_TYPES[kind] for kind in options.types]
        given = [(options.odometry, "nav_msgs/msg/Odometry"), *zip(options.sensors, kinds, strict=True)]
        self.topics = [(resolved(node, name), kind) for name, kind in given]
        for _, kind in self.topics:
            ros_message_class(kind)
        self._answers_with_path = last_type == PATH
        self._alerts, self._log = alerts, node.get_logger()
        self._setup = {
            "node": f"{node.get_name()}_emergency", "namespace": node.get_namespace(), "options": asdict(options),
            "topics": self.topics, "output": topic, "service": node.resolve_service_name(SERVICE),
            "priority": self._config.realtime_priority, "cpus": list(self._config.cpu_affinity),
            "lock_memory": self._config.lock_memory, "use_sim_time": node.get_parameter("use_sim_time").value,
            "domain": node.context.get_domain_id(), "active": False, "latched": None,
        }  # fmt: skip
        self._send(self._setup)
        self._thread = threading.Thread(target=self._listen, name="emergency", daemon=True)
        self._thread.start()
        with self._news:
            self._news.wait_for(lambda: self._ready or self.restarts, self._config.start_timeout_s)
        if not self._ready:
            why = "ended" if self.restarts else f"is not ready after {self._config.start_timeout_s:g} s"
            raise ConfigError(f"the emergency lane cannot run: its process {why}; see what it printed")

    # -- for the node's threads ---------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Watch from now on; a latch stays."""
        with self._news:  # a process that is being replaced is told either way
            self._active = True
            self._send({"order": "activate"})

    def deactivate(self) -> None:
        """Publish and judge nothing more; a latch stays."""
        with self._news:
            self._active = False
            self._send({"order": "deactivate"})

    def close(self) -> None:
        """End the process."""
        with self._news:  # from now on, none is replaced
            self._ending.set()
        if self._setup:
            self._send({"order": "close"})
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._setup:
            self._thread.join()
        self._socket.close()
        self._area.close()

    def answer(self, publisher: RawPublisher, payload: bytes) -> Instead | None:
        """Publish an output of the last stage, on its thread; while latched the stop path, or nothing, in its place.

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
        """Whether it does what it is there for: always, unless its process was just lost."""
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
        values = {**last.values, "withheld": str(self.withheld), "restarts": str(self.restarts)}
        if self._replies > replies:
            return Alert(last.level, last.name, last.message, values)
        silent_s = time.monotonic() - self._replied_at
        if self._ready and silent_s > _SILENT_S:
            self._process.kill()
        text = "gone: a new process starts" if not self._ready else f"has not answered for {silent_s:.1f} s"
        return Alert(Level.ERROR, _NAME, text, {**values, "state": "gone"})

    def alert(self) -> Alert | None:
        """For `/perf/anomaly`, None while nothing is latched; of the last status."""
        values = self._status.values
        if not self.latched or not values.get("kind"):
            return None
        told = {key: values[key] for key in ("kind", "reaction_ms")} | {"value": values["reaction_ms"]}
        return Alert(Level.ERROR, "node: emergency stop", values["reason"], told)

    # -- the process --------------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._began_at = time.monotonic()
        with theirs:
            passed = [theirs.fileno(), self._area.fd]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, *map(str, passed)], pass_fds=passed, stdin=subprocess.DEVNULL,
                env={**os.environ, **own_segment(os.environ, lane=True), "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it is gone: its successor is told anew
            self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def _listen(self) -> None:
        step_back()
        while True:
            try:
                data = self._socket.recv(MAX_PACKET_BYTES)
            except OSError:
                data = b""
            if data:
                self._take(json.loads(data))
            elif self._ending.is_set():
                return
            else:
                self._replace()

    def _take(self, message: dict[str, Any]) -> None:
        if "error" in message:
            self._log.error(f"the emergency lane failed:\n{message['error']}", throttle_duration_sec=1.0)
        with self._news:
            if "ready" in message:
                self._ready, self._replied_at = True, time.monotonic()
            if "status" in message:
                level, name, text, values = message["status"]
                self._status = Alert(Level(level), name, text, values)
                self._replies, self._replied_at = self._replies + 1, time.monotonic()
            self._news.notify_all()
        if "latched" in message and (alert := self.alert()) is not None:
            self._alerts.found(alert)

    def _replace(self) -> None:
        """Start another process; a latch stays, with the path if there is one, and no sensor counts as seen."""
        how = how_it_ended(self._process.wait())
        text = f"the emergency lane's process is gone ({how}); another one starts"
        self._log.error(text)
        self._alerts.found(Alert(Level.ERROR, "node: emergency lane", text, {"restarts": str(self.restarts + 1)}))
        with self._news:
            quick, self._ready = time.monotonic() - self._began_at < _RESTART_S, False
            self.restarts += 1
            self._news.notify_all()
        if quick:
            self._ending.wait(_RESTART_S)
        with self._news:
            if self._ending.is_set():
                return
            self._socket.close()
            self._spawn()
            values = self._status.values
            # While the node is active, the area is newer than the status; else it is empty, latched or not.
            stays = values.get("kind") and (self.latched or not self._active)
            latched = [values["kind"], values["reason"]] if stays else None
            self._send({**self._setup, "active": self._active, "latched": latched})
