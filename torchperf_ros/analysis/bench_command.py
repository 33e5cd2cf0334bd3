"""`torchperf bench`: what engines are worth on this machine."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="What the engines are worth on this machine: measured, in turns, warmed up.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_BAD_INPUT = 2
_LONGEST = 1000
_WIDTH = 100


def _device_name(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        msg = f"{text!r}: auto, cpu, cuda or cuda:N"
        raise typer.BadParameter(msg)
    return text


Device = Annotated[
    str, typer.Option(callback=_device_name, help="auto (CUDA where there is one), cpu, cuda or cuda:N.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the files; made if missing.")]


def _lengths(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= _LONGEST for word in words):
        msg = f"{text!r}: lengths from 1 to {_LONGEST}, separated by commas, for example 1,5,30"
        raise typer.BadParameter(msg)
    return sorted({int(word) for word in words})


@app.command()
def curve(
    n: Annotated[
        str, typer.Option(help="Numbers of operations, separated by commas.", show_default=True)
    ] = "1,5,10,15,20,25,30",
    seconds: Annotated[float, typer.Option(min=0.01, max=600.0, help="Timing, for each engine at each n.")] = 1.0,
    device: Device = "auto",
    output: Output = None,
) -> None:
    """Launch-bound chains: how many times faster than eager each engine is.

    A chain of n elementwise operations and a sum on inputs of changing batch
    size, (4..13, 16), in eager; static and dynamic (torch.compile); aoti-dynamic
    (an AOTInductor package); CUDA graphs where there is CUDA; and auto: the one
    that the project chooses from a calibration of its own. Compiling takes
    minutes the first time, less where Inductor's cache holds the chains.

    Example: torchperf bench curve --n 1,10,30 --seconds 0.3 -o curve

    writes curve.csv, curve.json and curve.png there. Exit status: 0 if the
    targets were reached, 1 if one was missed, 2 for input that cannot be used.
    """
    lengths = _lengths(n)
    with _clear_errors():
        folder = _folder(output)
        from torchperf_ros.analysis.curve_run import run_curve

        met = run_curve(lengths, device, seconds, folder, _console())
    raise typer.Exit(0 if met else 1)


def _folder(output: Path | None) -> Path | None:
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    return output


def _console() -> "Console":
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


@contextmanager
def _clear_errors() -> Iterator[None]:
    from torchperf_ros.core.errors import TorchperfError

    try:
        yield
    except (TorchperfError, OSError) as error:
        sys.stderr.write(f"torchperf: {error}\n")
        raise typer.Exit(_BAD_INPUT) from error
