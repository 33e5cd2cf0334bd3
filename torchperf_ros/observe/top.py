"""`torchperf top` and the demo: listen to a node, and show it live or line by line."""

import contextlib
import io
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import rclpy
from rcl_interfaces.srv import GetParameters
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import parameter_value_to_python
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.errors import UnknownMessageType
from torchperf_ros.api.messages import has_header
from torchperf_ros.observe.ros_types import HEARD_QOS, ros_message_class
from torchperf_ros.observe.runs.run_builder import RunLogBuilder
from torchperf_ros.observe.runs.run_log import RunLog, RunLogError
from torchperf_ros.observe.telemetry.node_state import NodeState, by_label
from torchperf_ros.observe.top_view import event_line, node_line, node_picture, node_title, whole_height
from torchperf_ros.workers.process_setup import held_interrupt

_DEPTH: Final = 200  # the picture may take its time: nothing is lost meanwhile
_TYPES: Final = {
    "latency": "std_msgs/msg/Float64",
    "memory": "std_msgs/msg/Float64",
    **dict.fromkeys(("latency_stages", "memory_stats"), "std_msgs/msg/Float64MultiArray"),
    **dict.fromkeys(("anomaly", "/diagnostics"), "diagnostic_msgs/msg/DiagnosticArray"),
}


class NodeListener(contextlib.AbstractContextManager["NodeListener"]):
    """Listens while `listen` runs, on the thread that calls it."""

    def __init__(
        self, state: NodeState, own_name: str, callbacks: Mapping[str, Callable[..., None]] | None = None
    ) -> None:
        """Join the graph under a name of its own, to fold messages of the node that `state` names into it.

        `callbacks` take the messages instead, by their topic below the node's name, or `/diagnostics`.
        """
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        name = f"{own_name}_{os.getpid()}"
        self._node = Node(
            name, use_global_arguments=False, enable_rosout=False, start_parameter_services=False
        )
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        folded: Mapping[str, Callable[..., None]] = {
            "latency_stages": lambda message, info: state.on_frame(message, _sent_ns(info)),
            "latency": lambda message: state.end_to_end_ms.append(message.data),
            "memory": lambda message: state.on_memory(message.data),
            "memory_stats": state.on_memory_stats,
            "anomaly": state.on_anomaly,
            "/diagnostics": state.on_diagnostics,
        }
        for topic, callback in (callbacks or folded).items():
            kind, name = (
                ros_message_class(_TYPES[topic]),
                topic if topic[0] == "/" else f"{state.name}/{topic}",
            )
            self._node.create_subscription(kind, name, callback, QoSProfile(depth=_DEPTH))

    def listen(self, seconds: float) -> None:
        """Fold in what comes in this time; Ctrl-C waits for its end."""
        end_s = time.monotonic() + seconds
        with held_interrupt():
            while (left_s := end_s - time.monotonic()) > 0:
                self._executor.spin_once(timeout_sec=left_s)

    def hear(self, topic: str, callback: Callable[[int, Mapping[str, int], int], None]) -> str:
        """Take the messages of a topic as bytes from now on, best effort.

        Returns why it cannot, else nothing.

        The callback gets the header's stamp in ns (0 without one), rclpy's information on the message, and
        its size.
        """
        kinds: list[str] = dict(self._node.get_topic_names_and_types()).get(topic, [])
        if not kinds:
            return f"no node publishes {topic}"
        try:
            kind, stamped = ros_message_class(kinds[0]), has_header(kinds[0])
        except UnknownMessageType as error:
            return f"{topic}: {error}"

        def take(data: bytes, info: Mapping[str, int]) -> None:
            callback(header_stamp_ns(data) if stamped else 0, info, len(data))

        self._node.create_subscription(kind, topic, take, HEARD_QOS, raw=True)
        return ""

    def publishers(self, topic: str) -> list[str]:
        """Whole names of the nodes that publish a topic."""
        found = self._node.get_publishers_info_by_topic(topic)
        return sorted({f"{one.node_namespace.rstrip('/')}/{one.node_name}" for one in found})

    def parameters(self, of: str, names: Sequence[str], within_s: float) -> dict[str, Any]:
        """A node's parameters by name.

        None of them where it does not answer in time, or does not know one.
        """
        client = self._node.create_client(GetParameters, f"{of}/get_parameters")
        if not client.wait_for_service(within_s):
            return {}
        future = client.call_async(GetParameters.Request(names=list(names)))
        self._executor.spin_until_future_complete(future, within_s)
        values = future.result().values if future.done() else []
        return dict(zip(names, map(parameter_value_to_python, values), strict=False))

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()
        self._node.destroy_node()
        rclpy.try_shutdown()


def _sent_ns(info: Mapping[str, int]) -> int:
    """When a message was sent, not when it was taken here: this process is in no hurry."""
    return info["source_timestamp"] or time.time_ns()


def listen_for(
    name: str,
    seconds: float,
    progress: Callable[[int, int], None],
    look: Callable[[NodeListener, NodeState], bool] = lambda _listener, _state: True,
) -> RunLog:
    """Listen to a node such as `/perf` for a while, so that `torchperf report` can show it like a log.

    `progress` is called with how many of how many milliseconds have passed, and `look` as often, to hear
    more. Where it says at the end that it has not heard enough, as another process may take seconds to know
    of a new subscriber, the listening goes on for as long again at most.

    Raises:
        RunLogError: nothing was heard of it.
    """
    builder = RunLogBuilder(name)
    node, start_s = builder.state, time.monotonic()
    callbacks: Mapping[str, Callable[..., None]] = {
        "latency_stages": lambda message, info: builder.row(_sent_ns(info), by_label(message)),
        "memory_stats": lambda message: builder.memory(time.time_ns(), by_label(message)),
        "anomaly": lambda message: builder.on_anomaly(time.time_ns(), message),
        "/diagnostics": lambda message: builder.on_diagnostics(time.time_ns(), message),
    }
    with NodeListener(node, "torchperf_report", callbacks) as listener:
        end_s = seconds
        while (passed_s := time.monotonic() - start_s) < end_s:
            progress(round(passed_s * 1e3), round(end_s * 1e3))
            node.at(passed_s)
            look(listener, node)
            listener.listen(min(0.5, end_s - passed_s))
            if not look(listener, node) and time.monotonic() - start_s >= end_s:
                end_s = min(end_s + 0.5, 2 * seconds)
    run = builder.build(f"{name}, live", None)
    if run.span_ns == (0, 0) and not node.heard:
        heard = f"; heard instead: {', '.join(sorted(node.others))}" if node.others else ""
        domain = os.environ.get("ROS_DOMAIN_ID", "0")
        raise RunLogError(f"node {name}: nothing heard in {seconds:g} s, in ROS_DOMAIN_ID {domain}{heard}")
    return run


SVG_WIDTH: Final = 100
SVG_HEIGHT: Final = 30
_LINE_EVERY_S: Final = 1.0  # where there is no terminal
_ENOUGH_REPORTS: Final = 3  # until `--once` has a picture worth looking at
_WEB_FONT: Final = re.compile(
    r"@font-face \{.*?\}", re.DOTALL
)  # a picture must not load anything from the network


@contextlib.contextmanager
def key_presses() -> Iterator[Callable[[], str]]:
    """Gives a function that returns the keys pressed since the last call; they are not echoed.

    Where standard input is no terminal, none ever come.
    """
    if not sys.stdin.isatty():
        yield str  # which gives ""
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    keys = sys.stdin.fileno()
    try:
        yield (
            lambda: os.read(keys, 64).decode(errors="ignore") if select.select([keys], [], [], 0)[0] else ""
        )
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Screen:
    """Shows a node while it is open.

    A live picture in a terminal; elsewhere new events, and a line a second.
    """

    def __init__(
        self,
        node: NodeState,
        console: Console,
        picture: Callable[[int, int], RenderableType] | None,
        began_s: float | None = None,
        line: Callable[[NodeState], str] = node_line,
    ) -> None:
        """Show this node by a picture of so many columns and rows, None.

        By lines; `began_s`: see `node_picture`.
        """
        self._line = line
        self._node, self._console, self._began_s = node, console, began_s
        self._draw = picture or (lambda _width, _height: "")
        self._live = None if picture is None else Live(console=console, screen=True, auto_refresh=False)
        self._shown_events = 0
        self._joined = False
        self._next_line_s = 0.0

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        if self._live is not None:
            self._live.update(self._draw(*self._console.size), refresh=True)
            return
        if self._node.heard and not self._joined:  # what was published before
            self._joined = True
            for alert in self._node.alerts:
                self._console.print(event_line(alert, self._began_s, now=True), soft_wrap=True)
        new = min(self._node.event_count - self._shown_events, len(self._node.events))
        for event in list(self._node.events)[len(self._node.events) - new :]:
            self._console.print(event_line(event, self._began_s), soft_wrap=True)
        self._shown_events = self._node.event_count
        if time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LINE_EVERY_S
            self._console.print(self._line(self._node), highlight=False, markup=False, soft_wrap=True)


def save_svg(shown: RenderableType, path: Path, title: str) -> None:
    """Write what a terminal of 100 columns and 30 rows would show as a picture for a document.

    Raises:
        OSError: the file cannot be written.
    """
    console = Console(
        record=True,
        width=SVG_WIDTH,
        height=SVG_HEIGHT,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(shown)
    path.write_text(_WEB_FONT.sub("", console.export_svg(title=title)), encoding="utf-8")


def look(name: str, console: Console, *, once: bool, seconds: float, svg_file: Path | None = None) -> int:
    """Look at a node until it is enough, see `torchperf top --help`.

    Returns 0, or 1 if nothing was heard of it.
    """
    node, began_s, paused = NodeState(name), time.time(), False

    def picture(width: int, height: int) -> RenderableType:
        keys = (
            Text(" paused: p goes on ", "bold gold1") if paused else Text(" q quits  p pauses ", "grey42")
        )
        return node_picture(node, width, height, node_title(node, width), _waits_for(node), keys, began_s)

    def is_enough(pressed: str) -> bool:
        out_of_time = 0 < seconds <= node.elapsed_s
        return "q" in pressed or out_of_time or (once and node.reports >= _ENOUGH_REPORTS)

    screen = Screen(node, console, picture if console.is_terminal and not once else None, began_s)
    with (
        contextlib.suppress(KeyboardInterrupt),
        Console(stderr=True).status(f"listening to {name}") if once else contextlib.nullcontext(),
        NodeListener(node, "torchperf_top") as listener,
        key_presses() as pressed_keys,
        screen,
    ):
        start_s = time.monotonic()
        while not is_enough(pressed := pressed_keys()):
            listener.listen(0.25)
            node.at(time.monotonic() - start_s)
            if "p" in pressed:
                paused = not paused
            if not once and (not paused or "p" in pressed):
                screen.show()
    if once:
        console.print(picture(console.width, max(console.height, whole_height(node))))
    if svg_file:
        save_svg(picture(SVG_WIDTH, SVG_HEIGHT), svg_file, "torchperf top")
    return int(not node.heard)


def _waits_for(node: NodeState) -> list[str]:
    if node.heard:
        return [
            f"{node.name} is there, and has no stages yet",
            f"its lifecycle state: {node.node.get('lifecycle', 'unknown')}",
            "it shows them once it is configured: autostart:=true, or `ros2 lifecycle set`",
        ]
    domain = os.environ.get("ROS_DOMAIN_ID", "0")
    lines = [
        f"waiting for {node.name} ... {node.elapsed_s:.0f} s",
        f"listening to /diagnostics, {node.name}/latency_stages, {node.name}/anomaly, {node.name}/memory",
        f"in ROS_DOMAIN_ID {domain}, by {os.environ.get('RMW_IMPLEMENTATION', 'the default middleware')}",
        "same ROS_DOMAIN_ID? same FASTDDS_BUILTIN_TRANSPORTS? another name: --node",
    ]
    return lines + ([f"heard instead: {', '.join(sorted(node.others))}"] if node.others else [])
