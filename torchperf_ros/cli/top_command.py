"""`torchperf top`: the command line; everything else is imported when it runs."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

_BAD_INPUT = 2
_NAME = re.compile(r"(/[A-Za-z_][A-Za-z0-9_]*)+")
_WIDTH = 100


def node_name(text: str | None) -> str | None:
    """A node's name with its namespace, from an option; `perf` is `/perf`.

    Raises:
        BadParameter: no node can be called so.
    """
    if text is None:
        return None
    name = text if text.startswith("/") else f"/{text}"
    if not _NAME.fullmatch(name):
        msg = f"{text!r}: a node's name with its namespace is letters, digits, _ and /, for example /robot1/perf"
        raise typer.BadParameter(msg)
    return name


def _svg_path(path: Path | None) -> Path | None:
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        msg = f"{path} cannot be written: it has to be a file in a folder that exists"
        raise typer.BadParameter(msg)
    return path


def top(
    name: Annotated[
        str, typer.Option("--node", callback=node_name, help="The node, with its namespace, for example /robot1/perf.")
    ] = "/perf",
    once: Annotated[bool, typer.Option("--once", help="Print one picture after three reports, and end.")] = False,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Look for so long (with --once: wait at most); 0: until q or Ctrl-C.")
    ] = 0.0,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", callback=_svg_path, help="Write the last picture to this file.")
    ] = None,
) -> None:
    """Look at a running node, here or on another machine.

    Health, tier, latency, outcomes, fallbacks, memory and anomalies, from the
    node's topics and /diagnostics alone. It waits for a node that is not there
    yet, says when one falls silent, and goes on when it is back. Keys: q quits,
    p pauses. Without a terminal it prints plain lines.

    Example: ssh -t robot torchperf top --node /robot1/perf

    Exit status: 0; 1 if nothing was heard of the node; 2 for input that cannot be used.
    """
    if importlib.util.find_spec("rclpy") is None:
        text = "rclpy is not installed: source a ROS 2 installation, or `pip install torchperf_ros[ros]`"
        sys.stderr.write(f"torchperf: {text}\n")
        raise typer.Exit(_BAD_INPUT)
    from rich.console import Console

    from torchperf_ros.top.top import look

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH, height=30)
    raise typer.Exit(look(name, console, once=once, seconds=seconds, svg_file=svg_file))
