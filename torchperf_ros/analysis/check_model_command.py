"""`torchperf check-model`: which optimisations a model bears here, what each gains, and what to change."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

_BAD_INPUT = 2
_LONGEST_S = 600.0


def _device_name(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        msg = f"{text!r}: it has to be auto, cpu, cuda or cuda:N"
        raise typer.BadParameter(msg)
    return text


def _json_path(path: Path | None) -> Path | None:
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        msg = f"{path} cannot be written: it has to be a file in a folder that exists"
        raise typer.BadParameter(msg)
    return path


def check_model(  # noqa: PLR0913, PLR0917 - one argument for each option
    adapter: Annotated[
        str | None, typer.Option(help="module:Class of the adapter; default: that of --params and --stage.")
    ] = None,
    tier: Annotated[str | None, typer.Option(help="Which tier; default: the first.")] = None,
    options: Annotated[str | None, typer.Option(help="JSON object handed to the adapter.")] = None,
    params: Annotated[Path | None, typer.Option(help="The node's YAML file, for what is on now.")] = None,
    stage: Annotated[str | None, typer.Option(help="Which stage of --params.")] = None,
    device: Annotated[
        str | None,
        typer.Option(callback=_device_name, help="auto, cpu, cuda or cuda:N; default: as in --params, else auto."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.05, max=_LONGEST_S, help="Measuring, for each candidate.")] = 2.0,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Leave out compiled engines, 10 to 40 s each; measure in eager.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=_json_path, help="Write all figures to this file.")
    ] = None,
) -> None:
    """Which optimisations your model bears, what each gains on this machine, and what to change.

    Engines, memory layout, folded batch normalisation, precisions, CUDA graphs,
    CPU threads and copies: each is measured in turns with the same model without
    it, and refused where its outputs are not those of eager fp32. A gain counts
    only beyond the noise, which is measured, too. The end is a parameter file
    with what to change, for the node as it is.

    Example: torchperf check-model --adapter torchperf_ros.models.camera:CameraAdapter --tier fast

    Exit status: 0, whatever the verdicts; 2 for input that cannot be used.
    """
    from rich.console import Console

    from torchperf_ros.core.errors import TorchperfError

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    try:
        from torchperf_ros.analysis.model_check_run import Request, run_check

        request = Request(adapter, tier, options, params, stage, device, seconds, not no_compile)
        run_check(request, console, json_file)
    except (TorchperfError, OSError) as error:
        sys.stderr.write(f"torchperf: {error}\n")
        raise typer.Exit(_BAD_INPUT) from error
