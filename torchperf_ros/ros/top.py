"""`torchperf top`: listens to a node and shows it, as a live picture or line by line."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live

from torchperf_ros.ros.top_keys import Keys
from torchperf_ros.ros.top_listener import TopListener
from torchperf_ros.telemetry.event_panel import event_line
from torchperf_ros.telemetry.node_view import node_line, node_picture
from torchperf_ros.telemetry.terminal_picture import save_svg
from torchperf_ros.telemetry.watched_node import WatchedNode

_REFRESH_S: Final = 0.25
_LINE_EVERY: Final = 4  # refreshes, where there is no terminal
_ENOUGH_REPORTS: Final = 3  # until `--once` has a picture worth looking at
NOTHING_HEARD: Final = 1


@dataclass(frozen=True)
class TopOptions:
    """What to look at, and how.

    Attributes:
        name: the node, with its namespace.
        once: one picture, as soon as the node has reported three times, then the end.
        seconds: how long to look, or with `once` to wait at most; 0: until it is told to stop.
        live: whether the console can show a picture that changes.
        svg_file: where the last picture is written, if anywhere.
    """

    name: str
    once: bool
    seconds: float
    live: bool
    svg_file: Path | None = None


class Top:
    """One session of looking at a node."""

    def __init__(self, options: TopOptions, console: Console) -> None:
        """Take options and where to draw."""
        self._options = options
        self._console = console
        self._node = WatchedNode(options.name)
        self._began_s = time.time()
        self._paused = False
        self._told = self._told_events = 0

    def run(self) -> int:
        """Look until it is enough; returns 0, or 1 if nothing was heard of the node."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))
            listener = stack.enter_context(TopListener(self._node, self._options.name, f"torchperf_top_{os.getpid()}"))
            keys = stack.enter_context(Keys())
            show = stack.enter_context(self._screen())
            start_s = time.monotonic()
            while not self._enough(keys.pressed()):
                listener.listen(_REFRESH_S)
                self._node.at(time.monotonic() - start_s)
                show()
        if self._options.once:
            self._console.print(self._picture(self._console.width, max(self._console.height, 24)))
        if self._options.svg_file:
            save_svg(self._picture(100, 30), self._options.svg_file, "torchperf top", 100, 30)
        return 0 if self._node.heard else NOTHING_HEARD

    def _enough(self, keys: str) -> bool:
        if "p" in keys:
            self._paused = not self._paused
        seconds = self._options.seconds
        out_of_time = 0 < seconds <= self._node.elapsed_s
        return "q" in keys or out_of_time or (self._options.once and self._node.diagnostics >= _ENOUGH_REPORTS)

    @contextlib.contextmanager
    def _screen(self) -> Iterator[Callable[[], None]]:
        """What is called after each refresh."""
        if self._options.once:
            yield lambda: None
        elif not self._options.live:
            yield self._lines
        else:
            with Live(console=self._console, screen=True, auto_refresh=False) as live:
                yield lambda: self._draw(live)

    def _draw(self, live: Live) -> None:
        if not self._paused:
            live.update(self._picture(*self._console.size), refresh=True)

    def _lines(self) -> None:
        """New events, and now and then how it stands."""
        new = min(self._node.events_told - self._told_events, len(self._node.events))
        for event in list(self._node.events)[len(self._node.events) - new :]:
            self._console.print(event_line(event, self._began_s), soft_wrap=True)
        self._told_events = self._node.events_told
        if self._told % _LINE_EVERY == 0:
            self._console.print(node_line(self._node), highlight=False, markup=False, soft_wrap=True)
        self._told += 1

    def _picture(self, width: int, height: int) -> RenderableType:
        domain = os.environ.get("ROS_DOMAIN_ID", "0")
        where = f"in ROS_DOMAIN_ID {domain}, by {os.environ.get('RMW_IMPLEMENTATION', 'the default middleware')}"
        return node_picture(self._node, width, height, began_s=self._began_s, where=where, paused=self._paused)
