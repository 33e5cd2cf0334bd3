"""The tests' place in a real ROS graph, and the node beside it as a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from torchperf_ros.node.terminal import PROCESS_NAME

from ..ros_domain import own_domain
from .warm_process import BASE

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 150.0  # for each condition; a worker takes seconds to start, and the machine may be busy
DOMAIN_ID = own_domain()

_FORK_MAIN = "torchperf_ros.worker.fork_main"
_LANE_MAIN = "torchperf_ros.node.emergency_process"


class Graph:
    """The tests' own ROS node.

    Publishes, subscribes and calls services; everything is taken in while it waits.
    """

    def __init__(self):
        import rclpy
        from rclpy.context import Context
        from rclpy.executors import SingleThreadedExecutor
        from rclpy.node import Node

        self.context = Context()
        rclpy.init(context=self.context, args=[], domain_id=DOMAIN_ID)
        self.node = Node("tests", context=self.context, use_global_arguments=False)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.clients = {}

    def close(self):
        self.executor.shutdown()
        self.node.destroy_node()
        self.context.try_shutdown()

    def listen(self, topic, message_type, *, raw=False):
        """A list that grows with the messages of a topic, or with their bytes."""
        messages = []
        take = (lambda data: messages.append(bytes(data))) if raw else messages.append
        self.node.create_subscription(message_type, topic, take, 200, raw=raw)
        return messages

    def wait_for(self, condition, what, within_s=WITHIN_S):
        """What the condition says as soon as it is true.

        `what`, or what that returns, says what was waited for.
        """
        until = time.monotonic() + within_s
        while not (said := condition()):
            if time.monotonic() > until:
                pytest.fail(f"not within {within_s:.0f} s: {what() if callable(what) else what}")
            self.executor.spin_once(timeout_sec=0.02)
        return said

    def client(self, service_type, name):
        """A client of a service, from now on."""
        client = self.clients[name] = self.node.create_client(service_type, name)
        self.wait_for(client.service_is_ready, f"service {name}")

    def call(self, service_type, name, request):
        """The answer of a service, to a client that the server is acquainted with."""
        return self._answer(self.clients[name], request, WITHIN_S) or pytest.fail(f"no answer of {name}")

    def acquaint(self, service_type, name, harmless):
        """Wait until the process of this service knows of all clients, publishers and subscriptions of now.

        That these know of it does not say so: what it sends before is lost, and so is what it is sent
        without acknowledgement. A process announces its endpoints in order, so whoever answers a new client
        knows of all that was there before. An answer may be lost itself, so a request that does no harm is
        sent until one comes.
        """
        client = self.node.create_client(service_type, name)
        self.wait_for(client.service_is_ready, f"service {name}")
        self.wait_for(lambda: self._answer(client, harmless, 2.0), f"an answer of {name}")
        self.node.destroy_client(client)

    def wait_for_end(self, *processes):
        """Wait until none of these processes runs any more; one that waits for its parent does not."""
        self.wait_for(
            lambda: not any(map(is_alive, processes)),
            lambda: f"the end of {list(filter(is_alive, processes))}",
        )

    def _answer(self, client, request, within_s):
        """The answer to one request, None if there is none in time."""
        future = client.call_async(request)
        self.executor.spin_until_future_complete(future, timeout_sec=within_s)
        if not future.done():
            client.remove_pending_request(future)
            return None
        return future.result()


class PerfProcess:
    """The node as a process; what it publishes is kept from its start on.

    Attributes:
        name: its fully qualified name.
        rows: what it says on `~/latency_stages`, as dicts by label.
        anomalies: the messages of `~/anomaly`.
        statuses: the last status of each name on `/diagnostics`, as (level, message, values).
    """

    def __init__(self, graph, folder, parameters, *, namespace="", arguments=(), warm=None, prints=None):
        """Start it; without parameters (None) the file has to be among the arguments.

        `warm`: as a fork of that.

        `prints` is a descriptor that it prints to, None: a file, see `errors`.
        """
        from diagnostic_msgs.msg import DiagnosticArray
        from std_msgs.msg import Float64MultiArray

        self.graph = graph
        self.namespace = namespace
        self.name = f"{namespace}/perf"
        self.statuses = {}
        self.reports = 0
        # A node that is heard on /diagnostics knows of the subscriptions before that one, too: see
        # `Graph.acquaint`.
        self._rows, self._rows_of = [], defaultdict(list)
        self._records = graph.listen(f"{self.name}/latency_stages", Float64MultiArray)
        self.anomalies = graph.listen(f"{self.name}/anomaly", DiagnosticArray)
        self._subscription = graph.node.create_subscription(DiagnosticArray, "/diagnostics", self._take, 50)
        folder.mkdir(exist_ok=True)
        if parameters is not None:
            file = folder / "parameters.yaml"
            given = {
                "metrics_port": 0,
                "worker_threads": 1,
                "compile_missing": False,
                "recorder": False,
                **parameters,
            }
            file.write_text(json.dumps({"/**": {"ros__parameters": given}}))  # JSON is YAML too
            arguments = ("--params-file", str(file), *arguments)
        self._err = folder / "stderr"
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "ROS_DOMAIN_ID": str(DOMAIN_ID)}
        words = ["--ros-args", *(["-r", f"__ns:={namespace}"] if namespace else []), *arguments]
        with self._err.open("wb") as err:
            if warm:
                self.process = warm.start(
                    "node", words, environment, err.fileno() if prints is None else prints
                )
            else:
                self.process = psutil.Popen(
                    [sys.executable, "-m", "torchperf_ros.node.main", *words],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=prints or err,
                    stderr=prints or err,
                    start_new_session=True,
                )

    # -- what it says

    @property
    def errors(self):
        """What it has printed so far."""
        return self._err.read_text(errors="replace")

    @property
    def rows(self):
        self._take_rows()
        return self._rows[:]

    def forget_rows(self):
        """As if nothing had been answered so far."""
        self._records.clear()
        self._rows.clear()
        self._rows_of.clear()

    def rows_of(self, stage):
        """The rows of one stage, by its index."""
        self._take_rows()
        return self._rows_of[stage][:]

    def _take_rows(self):
        for record in self._records[len(self._rows) :]:
            row = dict(zip((dim.label for dim in record.layout.dim), record.data, strict=True))
            self._rows.append(row)
            self._rows_of[row["stage"]].append(row)

    def _take(self, message):
        own = [status for status in message.status if status.hardware_id == self.name]
        if own:
            self.reports += 1
            self.statuses = {
                status.name: (
                    ord(status.level),
                    status.message,
                    {pair.key: pair.value for pair in status.values},
                )
                for status in own
            }

    def values(self, stage):
        """Key -> value of the stage's last status; empty before the first."""
        return self.statuses.get(f"perf: {stage}", (3, "", {}))[2]

    def counted(self, stage, **at_least):
        """The stage's values as soon as each of these counters has reached its number."""
        return self.wait_for(
            lambda: (
                (now := self.values(stage))
                and all(int(now[key]) >= n for key, n in at_least.items())
                and now
            ),
            f"{stage} with {at_least}",
        )

    def next_report(self):
        """Wait for a whole report that began after now."""
        seen = self.reports
        self.wait_for(lambda: self.reports > seen + 1, "two more reports on /diagnostics")

    def prints(self, text):
        """Wait until it has printed this: another process passes on what it prints, a moment later."""
        self.wait_for(lambda: text in self.errors, f"{text!r} to be printed")

    def wait_for(self, condition, what, within_s=WITHIN_S):
        """As the graph's; fails at once when the process ends, and shows what it printed."""

        def alive_or_done():
            said = condition()
            if not said and self.process.poll() is not None:
                pytest.fail(
                    f"the node ended with {self.process.poll()} before {what}; it printed:\n{self.errors}"
                )
            return said

        detail = lambda: f"{what}; last statuses {self.statuses}; it printed:\n{self.errors[-4000:]}"  # noqa: E731
        return self.graph.wait_for(alive_or_done, detail, within_s)

    def wait_for_health(self, stage, *healths):
        """The stage's values once it is in one of these states."""
        return self.wait_for(
            lambda: (now := self.values(stage)) and now["health"] in healths and now,
            f"{stage} to be {healths}",
        )

    def wait_until_ready(self, *stages):
        """Wait until each of the stages could answer."""
        for stage in stages:
            self.wait_for_health(stage, "WAITING", "NOMINAL", "DEGRADED")

    # -- what is done to it

    def children(self):
        """All living processes that it has started, or that those have."""
        return [child for child in self.process.children(recursive=True) if is_alive(child)]

    def workers(self):
        """Its living workers."""
        base = [child for child in self.process.children() if is_alive(child) and is_base(child)]
        servers = [*base, *(child for each in base for child in each.children())]
        others = [*servers, *self.lanes()]
        return [child for child in self.children() if child not in others and child.name() != PROCESS_NAME]

    def lanes(self):
        """The living process of its emergency lane, if it has one."""
        return [
            child
            for child in self.process.children()
            if is_alive(child) and _LANE_MAIN in str(child.cmdline())
        ]

    def publisher(self, topic, message_type):
        """A publisher that one of the node's subscriptions is connected to."""
        publisher = self.graph.node.create_publisher(message_type, f"{self.namespace}/{topic}", 10)
        self.wait_for(publisher.get_subscription_count, f"a subscription of {topic}")
        self.acquaint()
        return publisher

    def acquaint(self):
        """Wait until it knows of all publishers and subscriptions of the tests, and has started."""
        from lifecycle_msgs.srv import GetState

        self.graph.acquaint(GetState, f"{self.name}/get_state", GetState.Request())

    def call(self, service_type, service, request):
        """The answer of one of its services, for example `get_state`."""
        name = f"{self.name}/{service}"
        if name not in self.graph.clients:
            self.graph.client(service_type, name)
            self.acquaint()
        return self.graph.call(service_type, name, request)

    def state(self):
        """The label of its lifecycle state."""
        from lifecycle_msgs.srv import GetState

        return self.call(GetState, "get_state", GetState.Request()).current_state.label

    def change_state(self, label):
        """Ask for a transition, for example `configure`; returns whether it succeeded."""
        from lifecycle_msgs.msg import Transition
        from lifecycle_msgs.srv import ChangeState

        request = ChangeState.Request(transition=Transition(label=label))
        return self.call(ChangeState, "change_state", request).success

    def answer(self, publisher, message, stage=0):
        """Publish a message and wait for the stage's row that answers it; one at a time."""
        seen = len(self.rows_of(stage))
        publisher.publish(message)
        self.wait_for(lambda: len(self.rows_of(stage)) > seen, f"an answer of stage {stage}")
        return self.rows_of(stage)[seen]

    def drive(self, publisher, make, condition, what, within_s=WITHIN_S):
        """Have a frame answered and then a pause made, 25 times a second at most, until a condition holds.

        Frames without a pause would leave no processor to what is waited for.
        """
        until = time.monotonic() + within_s
        while not (said := condition()):
            if time.monotonic() > until:
                pytest.fail(f"not within {within_s:.0f} s: {what() if callable(what) else what}")
            self.answer(publisher, make())
            pause_ends = time.monotonic() + 0.04
            while (left_s := pause_ends - time.monotonic()) > 0:
                self.graph.executor.spin_once(timeout_sec=left_s)
        return said

    def tell(self, publisher, message):
        """Publish a message and wait until the node has taken it.

        What is published afterwards is taken later.

        The node has one executor, which takes a message that has arrived before it answers a service. The
        middleware's acknowledgement is not waited for: it comes with the next heartbeat, up to 3 s later.
        """
        publisher.publish(message)
        self.state()

    def end(self, number=signal.SIGTERM):
        """End it by a signal; returns its exit status once neither it nor any worker is left."""
        tree = [self.process, *self.children()]
        self.process.send_signal(number)
        status = self.process.wait(WITHIN_S)
        self.graph.wait_for_end(*tree)
        return status

    def clear_away(self):
        """Kill what a failed test has left running."""
        if self.process.poll() is None:
            for process in [*self.children(), self.process]:
                process.kill()
            self.process.wait()
        self.graph.node.destroy_subscription(self._subscription)
        for name in [name for name in self.graph.clients if name.startswith(f"{self.name}/")]:
            self.graph.node.destroy_client(self.graph.clients.pop(name))


def odometry(speed, *, x=100.0, frame="odom"):
    """Odometry of a vehicle that drives ahead."""
    from nav_msgs.msg import Odometry

    message = Odometry(child_frame_id="base_link")
    message.header.frame_id = frame
    message.pose.pose.position.x, message.pose.pose.orientation.w = x, 1.0
    message.twist.twist.linear.x = speed
    return message


def is_base(process):
    """Whether workers are forked from this child of a node."""
    return process.name() == BASE or _FORK_MAIN in process.cmdline()


def is_alive(process):
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def segment_locks(process):
    """Those that it holds in /dev/shm, one for each segment; others of the machine come and go as well."""
    held = []
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            held.append(path.readlink())
    return {path for path in held if path.match("/dev/shm/fast*_el") and "port" not in path.name}
