"""`torchperf top`: listens to a node and shows it, as a live picture or line by line; so does the demo."""

import contextlib
import io
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from torchperf_ros.observe.telemetry.node_state import NodeState
from torchperf_ros.observe.top.listener import NodeListener
from torchperf_ros.observe.top.view import event_line, node_line, node_picture, node_title, whole_height

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
