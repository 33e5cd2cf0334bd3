"""The command `torchperf check`. Imports torch only when it runs."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchperf_ros.cli.inspect_command import _parse_options

if TYPE_CHECKING:
    from rich.console import Console

    from torchperf_ros.optimize.check import Finding

_BAD_INPUT = 2
_WIDTH = 100
_MARKS = {True: "[green]ok[/]", False: "[red]no[/]", None: "[yellow]--[/]"}


def check(
    adapter: Annotated[str, typer.Argument(help="module:Class, for example my_robot.segmenter:Segmenter.")],
    tiers: Annotated[str, typer.Option(help="Names of its tiers, from most to least accurate.")] = "full",
    options: Annotated[str, typer.Option(help="JSON, handed to the adapter.")] = "{}",
    log: Annotated[
        Path | None, typer.Option(exists=True, help="Take the frame from this recorded log; default: a made one.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Whether an adapter works: load it, build it twice, run a frame, check the message.

    The first command for a new adapter: it takes seconds, and needs no node and
    no ROS. It finds weights that differ at every build, tiers that take
    different inputs, NaN, and output messages whose sizes contradict each other.

    Example: torchperf check my_robot.segmenter:Segmenter --tiers full,fast --log drive.mcap

    Exit status: 0 if all is well, 1 if something is not, 2 if the input cannot be used.
    """
    from rich.console import Console

    from torchperf_ros.frame.errors import TorchperfError

    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    try:
        parsed = _parse_options(options)
        with Console(file=sys.stderr).status("importing torch"):
            from torchperf_ros.optimize.check import AdapterCheck
        names = tuple(filter(None, (name.strip() for name in tiers.split(","))))
        checked = AdapterCheck(adapter, parsed, names, device, log, lambda finding: _show(console, finding))
        good = checked.run()
    except (TorchperfError, OSError) as error:
        sys.stderr.write(f"torchperf: {error}\n")
        raise typer.Exit(_BAD_INPUT) from None
    so_far = "all is well, as far as it goes: the frame was refused" if checked.refused else "all is well"
    console.print(so_far if good else "something is wrong: see the lines with `no`", style="bold")
    raise typer.Exit(0 if good else 1)


def _show(console: "Console", finding: "Finding") -> None:
    took = "" if math.isnan(finding.took_ms) else f" ({finding.took_ms:.1f} ms)"
    console.print(f"{_MARKS[finding.ok]}  [bold]{finding.step}[/]{took}", end="")
    console.print(f"  {finding.text}" if finding.text else "", markup=False, highlight=False)
