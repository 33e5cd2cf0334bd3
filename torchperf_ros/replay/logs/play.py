"""`torchperf play`: plays a log into the ROS graph, and says how that goes."""

import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.messages import has_header
from torchperf_ros.node.middleware import carry_images, end_within
from torchperf_ros.observe.top import key_presses
from torchperf_ros.replay.logs.log_reader import LogReader, LogTopic
from torchperf_ros.replay.logs.play_node import PlayNode
from torchperf_ros.replay.logs.player import (
    HeaderStamps,
    Player,
    ReadAhead,
    Tally,
    choose_topics,
    part_ns,
    rounds,
)
from torchperf_ros.workers.process_setup import prefer_this_process

Say = Callable[[str], None]
# Gets how much of how much of the log's time has been played, in ns.
#
# Of 0 where its length is not known.
Progress = Callable[[int, int], None]
_NODE_S: Final = 120.0
# How often the time is published besides once with each message, as `ros2 bag play --clock` does.
_CLOCK_HZ: Final = 40.0


@dataclass(frozen=True)
class PlayOptions:
    """How a log is played, see `torchperf play --help`.

    None: all topics, to the end, no node to wait for; `subscribers_s` 0: no wait.
    """

    rate: float = 1.0
    loop: bool = False
    start_s: float = 0.0
    duration_s: float | None = None
    topics: frozenset[str] | None = None
    remap: Mapping[str, str] = field(default_factory=dict)
    clock: bool = False
    restamp: bool = False
    paused: bool = False
    subscribers_s: float = 0.0
    node: str | None = None


def play(log: Path, options: PlayOptions, say: Say, progress: Progress) -> int:
    """Play a log; returns the exit status: 0, or 1 if a part of it could not be read.

    `say` gets a line for what people should know.

    Raises:
        LogError: nothing of it can be read.
        PlayError: it cannot be played as asked.
    """
    carry_images()
    with LogReader(log, say) as reader:
        topics = choose_topics(reader, options.topics, options.remap.keys())
        with PlayNode(topics, options.remap, publishes_time=options.clock) as node:
            for text in node.left_out.values():
                say(text)
            published = {name: topic for name, topic in topics.items() if name not in node.left_out}
            return _play(node, reader, published, options, say, progress)


def _play(
    node: PlayNode,
    log: LogReader,
    topics: Mapping[str, LogTopic],
    options: PlayOptions,
    say: Say,
    progress: Progress,
) -> int:
    stamped = {name for name, topic in topics.items() if options.restamp and has_header(topic.type_name)}
    stamps = HeaderStamps(stamped, log_time=options.clock)
    player = Player(
        node.publish,
        rate=options.rate,
        prepare=stamps.stamp,
        publish_time=node.publish_time,
        clock_hz=_CLOCK_HZ if options.clock else 0.0,
        paused=options.paused,
    )
    tally = player.tally
    begin_ns, end_ns = part_ns(log, options.start_s, options.duration_s)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C
    # What is due does not wait for a free processor core, nor for a thread that has none and holds the
    # interpreter lock; the perf node's own priority is higher.
    prefer_this_process(1)
    node.serve(player)
    ahead = ReadAhead(rounds(log, topics, options.start_s, options.duration_s, options.loop))
    playing: Future[None] = Future()  # of what is played by then
    acts = {" ": player.toggle, "q": player.end}
    pool = ThreadPoolExecutor(1, "player")
    began_s, was_paused = time.monotonic(), False
    try:
        _wait_for_listeners(node, options, say)
        with key_presses() as pressed_keys:
            if sys.stdin.isatty():
                say("space pauses and goes on, q ends")
            began_s, playing = time.monotonic(), pool.submit(player.play, ahead)
            while wait([playing], 0.1).not_done:
                for key in pressed_keys():
                    acts.get(key, bool)()
                if player.paused is not was_paused:
                    was_paused = player.paused
                    say("paused" if was_paused else "playing")
                if tally.rounds:
                    progress(min(max(player.log_ns, begin_ns), end_ns) - begin_ns, end_ns - begin_ns)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one need not stop what is bounded anyway
            signal.signal(number, signal.SIG_IGN)
        end_within(5)
        say("interrupted")
    finally:
        player.end()
        ahead.close()
        pool.shutdown()
    failed = playing.exception() if playing.done() else None
    if failed is not None and not (isinstance(failed, TorchperfError) and tally.played):
        raise failed
    say(summary(tally, time.monotonic() - began_s))
    if kept := stamps.kept:
        why = "too short for a header, or at a time that a stamp cannot hold"
        say(f"{kept:,} {'message was' if kept == 1 else 'messages were'} not restamped: {why}")
    if failed is not None:
        say(f"played up to the damage: {failed}")
    found = log.findings
    lacks = found.chunks_lost or found.messages_lost or found.bytes_skipped or found.set_aside
    return 1 if failed is not None or lacks else 0


def summary(tally: Tally, took_s: float) -> str:
    rounds = f" in {tally.rounds} rounds" if tally.rounds > 1 else ""
    late = f"{tally.late} late, the worst by" if tally.late else "none later than 5 ms, the worst by"
    played = f"{tally.played:,} message{'' if tally.played == 1 else 's'}"
    return f"played {played}{rounds} in {took_s:.1f} s, {late} {tally.worst_late_ms:.1f} ms"


def _wait_for_listeners(node: PlayNode, options: PlayOptions, say: Say) -> None:
    if options.node is not None and not node.wait_for_node(options.node, _NODE_S, say):
        say(f"{options.node} is not ready, or subscribes to none of the topics, after {_NODE_S:g} s")
    if options.subscribers_s and (unheard := node.wait_for_subscribers(options.subscribers_s)):
        say(f"no node subscribes to {', '.join(unheard)} after {options.subscribers_s:g} s")
