"""`torchperf play`: the command line; everything else is imported when it runs."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from torchperf_ros.cli.top_command import node_name
from torchperf_ros.frame.errors import ConfigError, TorchperfError

_BAD_INPUT = 2
_WIDTH = 200


def play_command(  # noqa: PLR0913, PLR0917 - options of a command line
    log: Annotated[
        Path, typer.Argument(help="A rosbag2 folder, an .mcap or .db3 file, or a ROS 1 .bag.", show_default=False)
    ],
    rate: Annotated[float, typer.Option(min=0.01, max=100.0, help="How much faster than recorded.")] = 1.0,
    loop: Annotated[bool, typer.Option("--loop", help="Begin again at the end, until Ctrl-C.")] = False,
    start: Annotated[float, typer.Option(min=0.0, metavar="S", help="Leave out so much of the beginning.")] = 0.0,
    duration: Annotated[
        float | None, typer.Option(min=0.0, metavar="S", help="Play so much of the log; default: to its end.")
    ] = None,
    topics: Annotated[
        list[str] | None, typer.Option(metavar="NAME[,NAME]", help="Play these topics of the log; default: all.")
    ] = None,
    remap: Annotated[
        list[str] | None, typer.Option(metavar="/A:=/B", help="Publish the log's /A as /B; may be given several times.")
    ] = None,
    clock: Annotated[
        bool, typer.Option("--clock", help="Publish the log's time on /clock, for nodes with use_sim_time.")
    ] = False,
    clock_hz: Annotated[
        float, typer.Option(min=0.1, max=1000.0, help="How often, beside once with each message.")
    ] = 40.0,
    restamp: Annotated[
        bool,
        typer.Option("--restamp", help="Stamp headers with the time of publishing: now, or the log's with --clock."),
    ] = False,
    pause: Annotated[bool, typer.Option("--pause", help="Begin with a pause: nothing goes out yet.")] = False,
    wait_for_subscribers: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Wait until each topic has a subscriber, S seconds at most.")
    ] = 0.0,
    wait_for_node: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", callback=node_name, help="Wait until this perf node can answer frames, 120 s at most."
        ),
    ] = None,
    read_ahead: Annotated[
        int, typer.Option(min=1, max=4096, metavar="MIB", help="Read so much in advance, so that no message is late.")
    ] = 64,
) -> None:
    """Publish a log's messages onto their topics, as they were recorded.

    The bytes go out as they are, at the times at which they were received.
    Publishers are reliable, which serves every subscriber; /tf_static and what
    was latched is kept for those who come later. Messages that go out more than
    5 ms after they are due are counted. Topics whose type is not installed here
    are left out, and said. What can be read of a broken log is played.

    In a terminal: space pauses and goes on, n plays the next message, q ends.
    Services: /player/pause, resume, toggle_paused, play_next (std_srvs/Trigger).

    Example: torchperf play drive/ --clock --remap /camera/front:=/image

    Exit status: 0 played to its end, or to q or Ctrl-C; 1 a part of the log
    could not be read; 2 input that cannot be used.
    """
    if importlib.util.find_spec("rclpy") is None:
        _fail("rclpy is not installed: source a ROS 2 installation, or `pip install torchperf_ros[ros]`")
    from rich.console import Console

    from torchperf_ros.logs.play import PlayOptions, play

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=_WIDTH, soft_wrap=True)
    names = frozenset(name for text in topics or [] for name in text.split(",") if name)
    try:
        options = PlayOptions(
            rate=rate, loop=loop, start_s=start, duration_s=duration, topics=names or None, remap=remaps(remap or []),
            clock_hz=clock_hz if clock else 0.0, restamp=restamp, paused=pause, subscribers_s=wait_for_subscribers,
            node=wait_for_node, read_ahead_mib=read_ahead,
        )  # fmt: skip
        status = play(log, options, console)
    except (TorchperfError, OSError) as error:
        _fail(str(error))
    raise typer.Exit(status)


def remaps(texts: Sequence[str]) -> dict[str, str]:
    """`--remap /A:=/B` options: another name by topic of the log.

    Raises:
        ConfigError: one does not have this form, or a topic stands in two.
    """
    found: dict[str, str] = {}
    for text in texts:
        topic, sign, name = text.partition(":=")
        if not (sign and topic and name):
            msg = f"--remap {text!r}: has to be /A:=/B, the log's topic and its other name"
            raise ConfigError(msg)
        if topic in found:
            msg = f"--remap {text!r}: {topic} is {found[topic]} already"
            raise ConfigError(msg)
        found[topic] = name
    return found


def _fail(text: str) -> None:
    sys.stderr.write(f"torchperf: {text}\n")
    raise typer.Exit(_BAD_INPUT)
