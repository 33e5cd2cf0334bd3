"""The commands that run a node or ask something of a running one: node, demo, swap, record, profile, snapshot."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from torchperf_ros.cli.top_command import node_name
from torchperf_ros.config.build_options import ENGINE_CHOICES

_BAD_INPUT: Final = 2
_Node = Annotated[
    str, typer.Option("--node", callback=node_name, help="The node, with its namespace, for example /robot1/perf.")
]
_Timeout = Annotated[float, typer.Option("--timeout", min=1.0, help="How long to wait, in seconds.")]


def node(context: typer.Context) -> None:
    """Run the node; takes ROS arguments.

    Example: torchperf node --ros-args -r image:=/camera/image_raw --params-file perception.yaml
    """
    _need_rclpy()
    from torchperf_ros.node.main import main

    raise typer.Exit(main(context.args) or 0)


def swap(
    stage: Annotated[str, typer.Argument(help="For example perception.")],
    tier: Annotated[str, typer.Argument(help="For example full.")],
    package: Annotated[
        Path, typer.Argument(help="The .pt2 file, with the manifest that `torchperf compile -o` wrote.")
    ],
    name: _Node = "/perf",
    timeout_s: _Timeout = 120.0,
) -> None:
    """Put a new package into a running node, without missing a frame.

    A new worker loads it beside those that serve, checks it, and measures it.
    If all is well the new worker takes over and the others are replaced;
    otherwise nothing changes and the reason is printed. The file lies below the
    cache folder, beside one of the node's packages, or below one of package_dirs.

    Example: torchperf swap perception full ~/packages/full.pt2

    Exit status: 0 if the package runs, 1 if it does not, 2 if the input cannot be used.
    """
    _need_rclpy()
    if not package.is_file():
        _fail(f"package {package} is not there", _BAD_INPUT)
    from torchperf_ros.node.services import ServiceFailed
    from torchperf_ros.node.services import swap as ask

    last = ""

    def say(text: str) -> None:
        nonlocal last
        if text != last:
            typer.echo(text)
        last = text

    try:
        ask(name, stage, tier, str(package.resolve()), timeout_s, say)
    except ServiceFailed as error:
        _fail(f"{stage} {tier} runs what it ran before: {error}", 1)
    typer.echo(f"{stage} {tier} runs {package}; to keep it after a restart, name it in {stage}.packages")


def record(name: _Node = "/perf", timeout_s: _Timeout = 15.0) -> None:
    """Have a running node write the last seconds and the next to disk.

    The folder that it prints is complete when `torchperf report` can read it:
    after `black_box_after_s` seconds.

    Example: torchperf record --node /robot1/perf

    Exit status: 0 if it records, 1 if it cannot, and says why.
    """
    _ask(name, "record", timeout_s)


def profile(name: _Node = "/perf", timeout_s: _Timeout = 15.0) -> None:
    """Have a worker of each stage profiled for some frames, while the other answers.

    Example: torchperf profile

    Exit status: 0 if it begins, 1 if it cannot, and says why.
    """
    _ask(name, "profile", timeout_s)


def snapshot(name: _Node = "/perf", timeout_s: _Timeout = 15.0) -> None:
    """Have a worker of each stage write down what holds its memory, and what grew.

    Example: torchperf snapshot

    Exit status: 0 if it begins, 1 if it cannot, and says why.
    """
    _ask(name, "snapshot", timeout_s)


def _ask(name: str, service: str, timeout_s: float) -> None:
    _need_rclpy()
    from torchperf_ros.node.services import ServiceFailed, trigger

    try:
        typer.echo(trigger(name, service, timeout_s))
    except ServiceFailed as error:
        _fail(str(error), 1)


def demo(
    log: Annotated[
        Path | None,
        typer.Option(help="Play this rosbag2 (folder, .mcap, .db3) or ROS 1 .bag instead of the drawn road."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to drive; a shorter log is played again.")] = 20.0,
    rate: Annotated[
        float | None,
        typer.Option(min=0.1, max=240.0, help="Images per second; default: as recorded, 30 for the drawn road."),
    ] = None,
    sabotage: Annotated[
        bool,
        typer.Option(
            "--sabotage",
            help="Make workers stall, hold the GIL, hang, raise, emit NaN and die by SIGKILL and SIGSEGV meanwhile.",
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(ENGINE_CHOICES)}; what is not compiled yet is compiled meanwhile, in the background."
        ),
    ] = "eager",
    no_tui: Annotated[bool, typer.Option("--no-tui", help="Plain lines instead of the live view.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Write the view's last picture to this file.")] = None,
) -> None:
    """Drive on this machine: the node, with both reference stages, and a camera.

    A live view shows each stage's health, tier and latency, one column per
    frame, and what goes wrong. The end is a summary: what was answered, what
    was sabotaged, and how the frames that it hit were answered.

    Exit status: 0 if every started frame was answered by its deadline + 5 ms,
    1 if one was not, 2 if the log cannot be played.
    """
    _need_rclpy()
    if engine not in ENGINE_CHOICES:
        _fail(f"--engine {engine!r} is not there; it has to be one of: {', '.join(ENGINE_CHOICES)}", _BAD_INPUT)
    from rich.console import Console

    from torchperf_ros.demo.drive import Drive, DriveError, DriveOptions
    from torchperf_ros.frame.errors import TorchperfError

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    tui = console.is_terminal and not no_tui
    try:
        status = Drive(DriveOptions(log, seconds, rate, sabotage, engine, tui, json_file, svg_file), console).run()
    except DriveError as error:
        _fail(str(error), 1)
    except (TorchperfError, OSError) as error:
        _fail(str(error), _BAD_INPUT)
    raise typer.Exit(status)


def _need_rclpy() -> None:
    if importlib.util.find_spec("rclpy") is None:
        _fail("rclpy is not installed: source a ROS 2 installation, or `pip install torchperf_ros[ros]`", _BAD_INPUT)


def _fail(text: str, status: int) -> NoReturn:
    sys.stderr.write(f"torchperf: {text}\n")
    raise typer.Exit(status)
