"""`torchperf play`: plays a log into the ROS graph, and says how that goes."""

import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from torchperf_ros.config.message_types import has_header
from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.frame.errors import TorchperfError
from torchperf_ros.logs.log_reader import LogReader, LogTopic
from torchperf_ros.logs.play_node import PlayNode
from torchperf_ros.logs.player import HeaderStamps, Player, ReadAhead, Tally, choose_topics, part_ns, rounds
from torchperf_ros.node.middleware import carry_images, end_within
from torchperf_ros.top.top import key_presses
from torchperf_ros.workers.process_setup import prefer_this_process

_MIB: Final = 1 << 20
_PLAIN_EVERY_S: Final = 10.0
_NODE_S: Final = 120.0


@dataclass(frozen=True)
class PlayOptions:
    """How a log is played, see `torchperf play --help`.

    None: all topics, to the end, no node to wait for; `clock_hz` 0: no `/clock`; `subscribers_s` 0: no wait.
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
    read_ahead_mib: int = 64


class PlayView:
    """How far a log has been played: a line that is drawn again and again in a terminal, plain lines elsewhere."""

    def __init__(self, player: Player, span_ns: tuple[int, int], rate: float, console: Console) -> None:
        """Show this player of the log's part from begin to end (equal: unknown), at a rate, on this console."""
        self._player, self._rate, self._console = player, rate, console
        self._begin_ns, self._total_ns = span_ns[0], max(span_ns[1] - span_ns[0], 0)
        self._began_s = time.monotonic()
        self._next_plain_s = self._began_s + _PLAIN_EVERY_S
        self._was_paused = False
        columns = BarColumn(30), TextColumn("{task.description}")
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=max(self._total_ns, 1))

    def __enter__(self) -> "PlayView":
        self._began_s = time.monotonic()
        if self._console.is_terminal:
            self._console.print("space pauses and goes on, n plays the next message, q ends", style="dim")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self) -> None:
        """Show the state of now."""
        tally, paused = self._player.tally, self._player.paused
        done_ns = min(max(self._player.log_ns - self._begin_ns, 0), self._total_ns) if tally.rounds else 0
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done_ns, description=self._state(done_ns))
        elif paused is not self._was_paused or time.monotonic() >= self._next_plain_s:
            self._console.print(self._state(done_ns))
            self._next_plain_s = time.monotonic() + _PLAIN_EVERY_S
        self._was_paused = paused

    def _state(self, done_ns: int) -> str:
        text = "playing"
        if self._total_ns:
            left_s = (self._total_ns - done_ns) / NS_PER_S / self._rate
            text = f"{done_ns / NS_PER_S:.1f} of {self._total_ns / NS_PER_S:.1f} s, {left_s:.0f} s left"
        tally = self._player.tally
        text += f", round {tally.rounds}" if tally.rounds > 1 else ""
        played, late = _counts(tally)
        return f"{text}, {played}{late}" + (", paused" if self._player.paused else "")

    def summary(self) -> str:
        """What was played, in one line."""
        tally, (played, late) = self._player.tally, _counts(self._player.tally)
        rounds = f" in {tally.rounds} rounds" if tally.rounds > 1 else ""
        late = late or f", none later than 5 ms (the worst {tally.worst_late_ms:.1f} ms)"
        return f"played {played}{rounds} in {time.monotonic() - self._began_s:.1f} s{late}"


def _counts(tally: Tally) -> tuple[str, str]:
    late = f", {tally.late} late, the worst by {tally.worst_late_ms:.1f} ms" if tally.late else ""
    return f"{tally.played:,} message{'' if tally.played == 1 else 's'}", late


def play(log: Path, options: PlayOptions, console: Console) -> int:
    """Play a log; returns the exit status: 0, or 1 if a part of it could not be read.

    Raises:
        LogError: nothing of it can be read.
        PlayError: it cannot be played as asked.
    """
    carry_images()
    with LogReader(log, console.print) as reader:
        topics = choose_topics(reader, options.topics, options.remap.keys())
        with PlayNode(topics, options.remap, publishes_time=options.clock_hz > 0) as node:
            for text in node.left_out.values():
                console.print(text)
            published = {name: topic for name, topic in topics.items() if name not in node.left_out}
            return _play(node, reader, published, options, console)


def _play(
    node: PlayNode, log: LogReader, topics: Mapping[str, LogTopic], options: PlayOptions, console: Console
) -> int:
    stamped = {name for name, topic in topics.items() if options.restamp and has_header(topic.type_name)}
    stamps = HeaderStamps(stamped, log_time=options.clock_hz > 0)
    player = Player(
        node.publish, rate=options.rate, prepare=stamps.stamp, publish_time=node.publish_time,
        clock_hz=options.clock_hz, paused=options.paused,
    )  # fmt: skip
    view = PlayView(player, part_ns(log, options.start_s, options.duration_s), options.rate, console)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C
    # What is due does not wait for a free processor core, nor for a thread that has none and holds the interpreter
    # lock; the perf node's own priority is higher.
    prefer_this_process(1)
    node.serve(player)
    messages = rounds(log, topics, options.start_s, options.duration_s, options.loop)
    ahead = ReadAhead(messages, lambda m: len(m.data) if m else 0, options.read_ahead_mib * _MIB)
    playing: Future[None] = Future()  # of what is played by then
    acts = {" ": player.toggle, "n": player.play_next, "q": player.end}
    pool = ThreadPoolExecutor(1, "player")
    try:
        _wait_for_listeners(node, options, console)
        with key_presses() as pressed_keys, view:
            playing = pool.submit(player.play, ahead)
            while wait([playing], 0.1).not_done:
                for key in pressed_keys():
                    acts.get(key, bool)()
                view.show()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one need not stop what is bounded anyway
            signal.signal(number, signal.SIG_IGN)
        end_within(5)
        console.print("interrupted")
    finally:
        player.end()
        ahead.close()
        pool.shutdown()
    failed = playing.exception() if playing.done() else None
    if failed is not None and not (isinstance(failed, TorchperfError) and player.tally.played):
        raise failed
    console.print(view.summary())
    if kept := stamps.kept:
        why = "too short for a header, or at a time that a stamp cannot hold"
        console.print(f"{kept:,} {'message was' if kept == 1 else 'messages were'} not restamped: {why}")
    if failed is not None:
        console.print(f"played up to the damage: {failed}")
    found = log.findings
    return 1 if failed is not None or found.chunks_lost or found.messages_lost or found.bytes_skipped else 0


def _wait_for_listeners(node: PlayNode, options: PlayOptions, console: Console) -> None:
    if options.node is not None:
        console.print(f"waiting for {options.node} to be ready")
        if not node.wait_for_node(options.node, _NODE_S):
            console.print(f"{options.node} is not ready, or subscribes to none of the topics, after {_NODE_S:g} s")
    if options.subscribers_s and (unheard := node.wait_for_subscribers(options.subscribers_s)):
        console.print(f"nobody subscribes to {', '.join(unheard)} after {options.subscribers_s:g} s")
