"""The command `torchperf inspect`. Imports torch only when it runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from torchperf_ros.frame.errors import ConfigError, TorchperfError

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
        typer.Option(
            help="Keep the compiler's trace in this new folder, and tlparse's pages of it where tlparse is installed;"
            " implies inductor."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """Why torch.compile splits a model: each graph break, its line, its cost, and what to write instead.

    Over several inputs also what is compiled again and why, branches on sizes,
    and loops that unroll. An adapter brings its inputs, and others from its
    dynamic dimensions; any other callable gets random ones from --input.
    A rewritten line is shown only where the model, captured again with it,
    has lost the break and answers as before.

    Example: torchperf inspect my_robot/net.py:Net --input 1x3x224x224 --also 2x3x224x224 --max-breaks 0

    Exit status: 0 if all is well, 1 if there are more than --max-breaks or the
    compiled model raises, 2 if the input cannot be used.
    """
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    try:
        for flag, path in (("--graph", graph), ("--json", json_file)):
            if path is not None and not path.parent.is_dir():
                msg = f"{flag} {path}: needs a file name in an existing folder"
                raise ConfigError(msg)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            msg = f"--device {device!r} is none of auto, cpu, cuda, cuda:N"
            raise ConfigError(msg)
        if ir is not None:
            backend = "inductor"
            ir.mkdir(parents=True, exist_ok=True)
            if any(ir.iterdir()):
                msg = f"--ir {ir} is not empty; name a new folder, so that nothing gets mixed up"
                raise ConfigError(msg)
        adapter_options = _parse_options(options)
        # To the stream itself, as a running model's own stderr is put aside.
        with Console(file=sys.stderr).status("importing torch") as status:
            from torchperf_ros.model.device import Device, choose_device
            from torchperf_ros.optimize.inspect.inspected_model import load_model
            from torchperf_ros.optimize.inspect.inspection import Inspection
            from torchperf_ros.optimize.inspect.inspection_view import as_json, draw, show

            place = Device(choose_device(device), threads=0).device  # with as many CPU threads as a worker has
            status.update(f"loading {target}")
            model = load_model(target, tier, adapter_options, inputs or [], also or [], place)
            inspection = Inspection(model, backend, place)
            inspection.run(status.update, ir)
        show(inspection, console, max_breaks)
        if graph is not None:
            graph.write_text(draw(inspection), encoding="utf-8")
        if json_file is not None:
            json_file.write_text(json.dumps(as_json(inspection, max_breaks), indent=2), encoding="utf-8")
        if ir is not None:
            console.print(_compiler_pages(ir), markup=False, soft_wrap=True)
    except (TorchperfError, OSError) as error:
        sys.stderr.write(f"torchperf: {error}\n")
        raise typer.Exit(_BAD_INPUT) from None
    raise typer.Exit(inspection.exit_status(max_breaks))


def _compiler_pages(folder: Path) -> str:
    """Have tlparse write pages of the compiler's trace, and say where to look."""
    trace = next(folder.glob("*.log"))
    pages = folder / "pages"
    if not (tlparse := shutil.which("tlparse", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")):
        return f"compiler's trace: {trace}\npip install tlparse, then: tlparse {trace} -o {pages}"
    command = [tlparse, str(trace), "-o", str(pages), "--no-browser"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return f"compiler's trace: {trace}\ntlparse cannot read it: {done.stderr.strip()}"
    return f"compiler's graphs, guards and code: {pages / 'index.html'}"


def _parse_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        msg = f"--options {text!r} is not a JSON object like '{{\"classes\": 4}}'"
        raise ConfigError(msg)
    return options
