"""The command `torchperf inspect`. Imports torch only when it runs."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torchperf_ros.analysis.inspection import Inspection

_BAD_INPUT = 2
_PLAIN_WIDTH = 100


def inspect_command(  # noqa: PLR0913, PLR0917 - one for each option
    target: Annotated[
        str,
        typer.Argument(help="module:Adapter, module:callable or file.py:callable (module, factory or function)."),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="Size and type of one argument, e.g. 1x3x224x224:float32; once for each."),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(help="A further set of inputs, all arguments in one text, e.g. '2x3x224x224 8'; repeatable."),
    ] = None,
    tier: Annotated[str, typer.Option(help="Which tier of an adapter.")] = "full",
    options: Annotated[str, typer.Option(help="JSON, handed to the adapter.")] = "{}",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    backend: Annotated[
        str,
        typer.Option(help="What runs the graphs: eager (quick), aot_eager, inductor (compiles: true times, slow)."),
    ] = "eager",
    max_breaks: Annotated[
        int | None, typer.Option(min=0, help="A gate for CI: exit status 1 if there are more breaks.")
    ] = None,
    graph: Annotated[Path | None, typer.Option(help="Draw the graphs and the breaks to this SVG file.")] = None,
    ir: Annotated[
        Path | None,
        typer.Option(help="Keep the compiler's debug output in this new folder, with index.html; implies inductor."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """Why torch.compile splits a model: each graph break, its line, its cost, and what to write instead.

    Over several inputs also what is compiled again and why, branches on sizes,
    and loops that unroll. An adapter brings its inputs, and others from its
    dynamic dimensions; any other callable gets random ones from --input.

    Example: torchperf inspect my_robot/net.py:Net --input 1x3x224x224 --also 2x3x224x224 --max-breaks 0

    Exit status: 0 if all is well, 1 if there are more than --max-breaks or the
    compiled model raises, 2 if the input cannot be used.
    """
    from rich.console import Console

    from torchperf_ros.core.errors import TorchperfError

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    try:
        for flag, path in (("--graph", graph), ("--json", json_file)):
            _need_folder(flag, path)
        chosen = backend if ir is None else "inductor"
        inspection = _inspect(target, tier, _parse_options(options), inputs or [], also or [], device, chosen, ir)
        from torchperf_ros.analysis.graph_picture import draw
        from torchperf_ros.analysis.inspection_report import as_json
        from torchperf_ros.analysis.inspection_view import show

        show(inspection, console, max_breaks)
        if graph is not None:
            graph.write_text(draw(inspection), encoding="utf-8")
        if json_file is not None:
            json_file.write_text(json.dumps(as_json(inspection, max_breaks), indent=2), encoding="utf-8")
    except (TorchperfError, OSError) as error:
        sys.stderr.write(f"torchperf: {error}\n")
        raise typer.Exit(_BAD_INPUT) from None
    raise typer.Exit(inspection.exit_status(max_breaks))


def _inspect(
    target: str,
    tier: str,
    options: dict[str, Any],
    inputs: list[str],
    also: list[str],
    device: str,
    backend: str,
    ir: Path | None,
) -> "Inspection":
    from rich.console import Console

    progress = Console(file=sys.stderr)  # the stream itself: a running model's own stderr is put aside
    with progress.status("importing torch") as status:
        from torchperf_ros.analysis.compiler_output import CompilerOutput
        from torchperf_ros.analysis.inspected_model import InspectError, load_model
        from torchperf_ros.analysis.inspection import Inspector
        from torchperf_ros.worker.device import Device, choose_device

        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            msg = f"--device {device!r} is none of auto, cpu, cuda, cuda:N"
            raise InspectError(msg)
        place = Device(choose_device(device), threads=0).device  # with as many CPU threads as a worker has
        status.update(f"loading {target}")
        model = load_model(target, tier, options, inputs, also, place)
        output = None if ir is None else CompilerOutput(ir)
        if output is None:
            return Inspector(model, backend, place, status.update).run()
        inspection = Inspector(model, backend, place, status.update, output.keep, output.recording).run()
        output.write_index(inspection)
    return inspection


def _parse_options(text: str) -> dict[str, Any]:
    from torchperf_ros.core.errors import ConfigError

    try:
        options = json.loads(text)
    except ValueError as error:
        msg = f"--options {text!r} is not JSON: {error}"
        raise ConfigError(msg) from error
    if not isinstance(options, dict):
        msg = f"--options {text!r} is not a JSON object like '{{\"classes\": 4}}'"
        raise ConfigError(msg)
    return options


def _need_folder(flag: str, path: Path | None) -> None:
    from torchperf_ros.core.errors import ConfigError

    if path is not None and not path.parent.is_dir():
        msg = f"{flag} {path}: needs a file name in an existing folder"
        raise ConfigError(msg)
