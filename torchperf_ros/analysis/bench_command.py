"""`torchperf bench`: what engines are worth on this machine."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchperf_ros.core.build_options import ENGINES

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="What the engines are worth on this machine: measured, in turns, warmed up.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_BAD_INPUT = 2
_MOST = 1000
_LONGEST_S = 600.0
_TIERS = ("full", "medium", "fast")
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


def _numbers(text: str, what: str, example: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", word) and 1 <= int(word) <= _MOST for word in words):
        msg = f"{text!r}: {what} from 1 to {_MOST}, separated by commas, for example {example}"
        raise typer.BadParameter(msg)
    return sorted({int(word) for word in words})


@app.command()
def curve(
    n: Annotated[
        str, typer.Option(help="Numbers of operations, separated by commas.", show_default=True)
    ] = "1,5,10,15,20,25,30",
    seconds: Annotated[float, typer.Option(min=0.01, max=_LONGEST_S, help="Timing, for each engine at each n.")] = 1.0,
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
    lengths = _numbers(n, "lengths", "1,5,30")
    with _clear_errors():
        folder = _folder(output)
        from torchperf_ros.analysis.curve_run import run_curve

        met = run_curve(lengths, device, seconds, folder, _console())
    raise typer.Exit(0 if met else 1)


@app.command()
def model(  # noqa: PLR0913, PLR0917 - one argument for each option
    adapter: Annotated[str, typer.Option(help="module:Class of the adapter.")],
    tier: Annotated[
        list[str] | None, typer.Option(help="Only this tier; repeatable. Default: full, medium, fast.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,2,4",
    engines: Annotated[str, typer.Option(help=f"Out of {', '.join(ENGINES)}, separated by commas.")] = ",".join(
        ENGINES
    ),
    options: Annotated[str, typer.Option(help="JSON object, handed to the adapter.")] = "{}",
    seconds: Annotated[float, typer.Option(min=0.01, max=_LONGEST_S, help="Timing, for each case.")] = 3.0,
    timeout: Annotated[
        float, typer.Option(min=1.0, max=86_400.0, help="Seconds after which a case is given up.")
    ] = 900.0,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each case instead of the table.")] = False,
    output: Output = None,
) -> None:
    """Any adapter's model: tiers x batch sizes x engines, each in a process of its own.

    Cold start, warm-up, p50, p95, p99 and max once warm, beside eager in the
    same process; throughput, peak memory, compile time, and whether the answers
    are eager's. The end says what follows from the figures.

    Example: torchperf bench model --adapter torchperf_ros.models.camera:CameraAdapter --tier fast --batch 1,4

    With -o DIR, writes model.csv and model.json there. Exit status: 0 if every
    case was measured, 1 if one was not, 2 for input that cannot be used.
    """
    batches = _numbers(batch, "batch sizes", "1,2,4")
    names = [word.strip() for word in engines.split(",")]
    if not set(names) <= set(ENGINES):
        msg = f"engines {engines!r}: {', '.join(ENGINES)}, or some of them, separated by commas"
        raise typer.BadParameter(msg)
    with _clear_errors():
        folder = _folder(output)
        from torchperf_ros.analysis.model_bench import ModelBench
        from torchperf_ros.analysis.model_bench_run import run_model_bench

        bench = ModelBench(
            adapter, _json_object(options), device, list(dict.fromkeys(tier or _TIERS)), batches,
            [name for name in ENGINES if name in names], seconds, timeout,
        )  # fmt: skip
        complete = run_model_bench(bench, folder, _console(), as_json=as_json)
    raise typer.Exit(0 if complete else 1)


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        msg = f"options {text!r}: {error}; it has to be a JSON object, for example '{{\"classes\": 4}}'"
        raise typer.BadParameter(msg) from error
    if not isinstance(value, dict):
        msg = f"options {text!r}: it has to be a JSON object, for example '{{\"classes\": 4}}'"
        raise typer.BadParameter(msg)
    return value


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
