"""Plays a log into the ROS graph, and says how that goes."""

import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.core.message_types import has_header
from torchperf_ros.replay.log_rounds import LogRounds, choose_topics
from torchperf_ros.replay.logs.log_reader import LogMessage, LogReader
from torchperf_ros.replay.player import Player
from torchperf_ros.replay.read_ahead import ReadAhead
from torchperf_ros.ros.bounded_end import end_within
from torchperf_ros.ros.header_stamps import HeaderStamps
from torchperf_ros.ros.image_transport import carry_images
from torchperf_ros.ros.play_node import PlayNode
from torchperf_ros.ros.play_view import PlayView
from torchperf_ros.ros.top_keys import Keys
from torchperf_ros.supervise.realtime import prefer_this_process

_MIB: Final = 1 << 20
_LOOK_S: Final = 0.1
_PRIORITY: Final = 1
_DAMAGED: Final = 1
_ENDS_WITHIN_S: Final = 5


@dataclass(frozen=True)
class PlayOptions:
    """How a log is played.

    Attributes:
        rate: how much faster than recorded.
        loop: whether to begin again at its end.
        start_s, duration_s: which part of it; None: to its end.
        topics: of the log; None: all.
        remap: other names, by topic of the log.
        clock_hz: how often to publish `/clock` beside each message; 0: no `/clock` at all.
        restamp: whether headers are stamped with the time at which they are published.
        paused: whether to begin with a pause.
        subscribers_s: how long to wait until each topic has a subscriber.
        node, node_s: the perf node to wait for, None: none; and for how long.
        read_ahead_mib: how much is read in advance.
    """

    rate: float = 1.0
    loop: bool = False
    start_s: float = 0.0
    duration_s: float | None = None
    topics: frozenset[str] | None = None
    remap: Mapping[str, str] = field(default_factory=dict)
    clock_hz: float = 0.0
    restamp: bool = False
    paused: bool = False
    subscribers_s: float = 0.0
    node: str | None = None
    node_s: float = 120.0
    read_ahead_mib: int = 64


def play(log: Path, options: PlayOptions, console: Console) -> int:
    """Play a log; returns the exit status: 0, or 1 if a part of it could not be read.

    Raises:
        LogError: nothing of it can be read.
        PlayError: it cannot be played as asked.
    """
    carry_images()
    say = console.print
    with LogReader(log, say) as reader:
        topics = choose_topics(reader, options.topics, options.remap.keys())
        with PlayNode(topics, options.remap, tells_time=options.clock_hz > 0) as node:
            for text in node.left_out.values():
                say(text)
            played = {name: topics[name] for name in node.topics}
            rounds = LogRounds(reader, played, options.start_s, options.duration_s, options.loop, say)
            return _Playing(node, rounds, options, console).run()


class _Playing:
    """One log, from the wait for those who listen to the summary."""

    def __init__(self, node: PlayNode, rounds: LogRounds, options: PlayOptions, console: Console) -> None:
        self._node, self._rounds, self._options, self._console = node, rounds, options, console
        stamped = {name for name, topic in rounds.topics.items() if options.restamp and has_header(topic.type_name)}
        self._stamps = HeaderStamps(stamped, log_time=options.clock_hz > 0)
        self._player = Player(
            node.publish,
            rate=options.rate,
            prepare=self._stamps.stamp,
            tell_time=node.tell_time,
            clock_hz=options.clock_hz,
            paused=options.paused,
        )
        self._view = PlayView(self._player, rounds.span_ns, options.rate, console)
        self._error: Exception | None = None

    def run(self) -> int:
        """Play; Ctrl-C ends it early."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C
        # What is due does not wait for a free processor core, nor for a thread that has none and holds the interpreter
        # lock; the perf node's own priority is higher.
        prefer_this_process(_PRIORITY)
        self._node.serve(self._player)
        ahead = ReadAhead(self._rounds.messages(), _size, self._options.read_ahead_mib * _MIB)
        thread = threading.Thread(target=self._play, args=(ahead,), name="player", daemon=True)
        try:
            self._wait_for_listeners()
            with Keys() as keys, self._view:
                thread.start()
                while thread.is_alive():
                    self._obey(keys.pressed())
                    self._view.show()
                    thread.join(_LOOK_S)
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):  # a second one need not stop what is bounded anyway
                signal.signal(number, signal.SIG_IGN)
            end_within(_ENDS_WITHIN_S, 0)
            self._console.print("interrupted")
        finally:
            self._player.end()
            ahead.close()
            if thread.ident is not None:
                thread.join()
        return self._summary()

    def _play(self, ahead: ReadAhead[LogMessage | None]) -> None:
        try:
            self._player.play(ahead)
        except Exception as error:  # the thread's boundary: told, or raised again, by the one that waits for it
            self._error = error

    def _wait_for_listeners(self) -> None:
        options, say = self._options, self._console.print
        if options.node is not None:
            say(f"waiting for {options.node} to be ready")
            if not self._node.wait_for_node(options.node, options.node_s):
                say(f"{options.node} is not ready, or subscribes to none of the topics, after {options.node_s:g} s")
        if options.subscribers_s and (unheard := self._node.wait_for_subscribers(options.subscribers_s)):
            say(f"nobody subscribes to {', '.join(unheard)} after {options.subscribers_s:g} s")

    def _obey(self, keys: str) -> None:
        for key in keys:
            if key == " ":
                self._player.toggle()
            elif key == "n":
                self._player.play_next()
            elif key == "q":
                self._player.end()

    def _summary(self) -> int:
        told = isinstance(self._error, TorchperfError) and self._player.tally.played
        if self._error is not None and not told:
            raise self._error
        self._console.print(self._view.summary())
        if kept := self._stamps.summary():
            self._console.print(kept)
        if self._error is not None:
            self._console.print(f"played up to the damage: {self._error}")
        found = self._rounds.log.findings
        damaged = self._error is not None or found.chunks_lost or found.messages_lost or found.bytes_skipped
        return _DAMAGED if damaged else 0


def _size(message: LogMessage | None) -> int:
    return 0 if message is None else len(message.data)
