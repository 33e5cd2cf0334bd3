"""The commands on a model before it drives.

Check, inspect, tune. Each imports what it needs when it runs.
"""

import json
import math
import re
from typing import Annotated

import typer
from typer import Argument, Option

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.build_options import ENGINES, MOST_LOSS
from torchperf_ros.tools import shell

_MOST_JUDGED = 100_000
_USUAL_TIERS = "those of full, medium, fast that it has"
_TIERS = (
    f"Of the adapter, most accurate first: that one is tuned, others are checked; default: {_USUAL_TIERS}."
)
_MARKS = {True: "[green]ok[/]", False: "[red]no[/]", None: "[yellow]--[/]"}


def check(
    adapter: Annotated[str, Argument(help="module:Class, for example my_robot.segmenter:Segmenter.")],
    tiers: Annotated[
        str, Option(help=f"Names of its tiers, most accurate first; default: {_USUAL_TIERS}.")
    ] = "",
    options: shell.AdapterOptions = "{}",
    log: Annotated[
        shell.File, Option(exists=True, help="Take the frame from this log; default: a made one.")
    ] = None,
    device: shell.Device = "auto",
) -> None:
    """Check that an adapter works: load it, build it twice, run a frame, check the message.

    The first command for a new adapter: it takes seconds, and needs no node and
    no ROS. It finds weights that differ at every build, tiers that take
    different inputs, NaN, and output messages whose sizes contradict each other.

    Example: torchperf check my_robot.segmenter:Segmenter --log drive.mcap

    Exit status: 0 if all is well, 1 if something is not, 2 if the input cannot be used.
    """
    shell.import_from_here()
    parsed, shown = shell.json_object(options), shell.console()
    with shell.console(stderr=True).status("importing torch"):
        from torchperf_ros.tools.check import AdapterCheck
    checked = AdapterCheck(adapter, parsed, shell.words(tiers), device, log)
    for found in checked.run():
        took = "" if math.isnan(found.took_ms) else f" ({found.took_ms:.1f} ms)"
        shown.print(f"{_MARKS[found.ok]}  [bold]{found.step}[/]{took}", end="")
        shell.say(shown, f"  {found.text}" if found.text else "")
    good = "all is well, as far as it goes: the frame was refused" if checked.refused else "all is well"
    shown.print("something is wrong: see the lines with `no`" if checked.failed else good, style="bold")
    if not checked.failed:
        shell.say(
            shown, f"next: torchperf tune {adapter} -o tuned.yaml finds how it runs best on this machine"
        )
    raise typer.Exit(checked.failed)


def inspect(
    target: Annotated[
        str, Argument(help="module:Adapter, module:callable or file.py:callable (module or function).")
    ],
    inputs: Annotated[
        shell.Texts,
        Option("--input", help="Sizes of its arguments, as '1x3x224x224:float32 8'; repeatable."),
    ] = None,
    tier: Annotated[str, Option(help="Which tier of an adapter.")] = "full",
    options: shell.AdapterOptions = "{}",
    device: shell.Device = "auto",
    max_breaks: Annotated[
        int | None, Option(min=0, help="A gate for CI: exit status 1 where there are more.")
    ] = None,
    json_file: shell.JsonFile = None,
) -> None:
    """Show why torch.compile splits a model.

    Each graph break, its line, its reason, and what to write instead.

    Over several inputs also what is compiled again and why: branches on sizes,
    loops that unroll. An adapter brings its inputs, and others from its
    dynamic dimensions; any other callable gets random ones from each --input.
    What a compiled model gains is measured by torchperf tune.

    Example: torchperf inspect my_robot/net.py:Net --input 1x3x224x224 --input 2x3x224x224 --max-breaks 0

    Exit status: 0 if all is well, 1 if there are more than --max-breaks or the
    compiled model raises, 2 if the input cannot be used.
    """
    shell.check_outputs({"--json": json_file})
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        shell.fail(f"--device {device!r} is none of auto, cpu, cuda, cuda:N")
    adapter_options, shown = shell.json_object(options), shell.console()
    with shell.console(stderr=True).status("importing torch") as status:
        from torchperf_ros.engines.device import Device as Place
        from torchperf_ros.engines.device import choose_device
        from torchperf_ros.tools.inspect.inspected_model import load_model
        from torchperf_ros.tools.inspect.inspection import Inspection, as_json, show

        place = Place(choose_device(device), threads=0).device  # with as many CPU threads as a worker has
        status.update(f"loading {target}")
        model = load_model(target, tier, adapter_options, inputs or [], place)
        inspection = Inspection(model, place)
        inspection.run(status.update)
    show(inspection, shown, max_breaks)
    if json_file is not None:
        shell.write_output(json_file, json.dumps(as_json(inspection, max_breaks), indent=2))
    raise typer.Exit(inspection.exit_status(max_breaks))


def tune(  # noqa: PLR0913, PLR0917 - one for each option
    adapter: Annotated[
        shell.Text, Argument(help="module:Class of the adapter; with --params also the stage's name.")
    ] = None,
    params: Annotated[
        shell.File, Option(help="A node's parameter file: its names are kept, and its values.")
    ] = None,
    budget_ms: Annotated[
        float | None, Option(help="The stage's, which p99 has to fit; default: the node's.")
    ] = None,
    max_loss: Annotated[
        float, Option(help="Of accuracy against eager fp32, of adapters with a task.")
    ] = MOST_LOSS,
    judged: Annotated[
        int, Option(min=0, max=_MOST_JUDGED, help="Held-out examples for accuracy; 0: none.")
    ] = 100,
    tiers: Annotated[shell.Texts, Option("--tiers", "--tier", help=_TIERS)] = None,
    options: Annotated[shell.Text, Option(help="JSON object, handed to the adapter.")] = None,
    log: Annotated[
        shell.File, Option(help="A drive: int8_static is calibrated on its frames, all is compared.")
    ] = None,
    device: Annotated[shell.Text, Option(help="auto, cpu, cuda or cuda:N.")] = None,
    engines: Annotated[
        shell.Texts, Option("--engines", "--engine", help=f"Only these: {', '.join(ENGINES)}.")
    ] = None,
    minutes: Annotated[float, Option(help="For the whole search.")] = 10.0,
    seconds: Annotated[
        float,
        Option(help="Of measuring what may be the best, and as long eager; at most 2 % of --minutes."),
    ] = 3.0,
    output: Annotated[
        shell.Files,
        shell.outputs_option("Write the parameters, as YAML, or every figure (FILE.json)."),
    ] = None,
    dry_run: shell.DryRun = False,
) -> None:
    """Find how your model runs best on this machine, and write it as the node's parameters.

    Searches engine, mode, precision, layout, threads, buckets and CUDA graphs
    for the smallest p99 within the limits: one option after the other from the
    best so far, cheap ones first: on CUDA graphs, on the CPU the libraries.
    Eager and graphs share a process until one fails in it; every compiled
    candidate has its own. Each is compared with eager fp32, and is timed in turns
    with it: briefly, and at length where that is near the best. What crashes or
    hangs is noted. Results are kept: the same command goes on where the last one
    ended.

    The first tier is tuned, with three quarters of the time. What is best there
    is then checked on the others, which may only differ in precision.

    With --log, frames of a drive go through the adapter's `preprocess`: ranges of
    int8_static come from every other of them, and every engine is compared with
    eager on the rest. Without, they come from `Adapter.score_inputs`; where that
    has none, int8_static is left out. What is not fp32 has to answer as eager
    does: by the adapter's score, else by the largest along dimension 1.

    An adapter with a training task is also judged by held-out examples of it:
    what is less accurate than eager fp32 is refused, and in the end tiers are
    proposed: which are worth keeping here, and which comes first.

    Examples: torchperf tune my_robot.segmenter:Segmenter --budget-ms 40 -o tuned.yaml
              torchperf tune segmentation --params robot.yaml --log drive.mcap -o tuned.yaml

    Exit status: 0 if something fits the limits, 1 if not, 2 if the input cannot be used, 130 after Ctrl-C.
    """
    numbers = {
        "--budget-ms": 1.0 if budget_ms is None else budget_ms,
        "--max-loss": max_loss,
        "--minutes": minutes,
        "--seconds": seconds,
    }
    for name, number in numbers.items():
        if not number > 0:
            shell.fail(f"{name} {number:g} is not allowed; it has to be a number above 0")
    files = shell.files_by_suffix(output, "", ".json")
    shell.check_outputs({"-o": files.get("")}, filter(None, [files.get(".json")]))
    only, names = shell.every_word(engines), shell.every_word(tiers)
    if unknown := [name for name in only if name not in ENGINES]:
        shell.fail(f"--engines {unknown[0]!r} is not allowed; it has to be one of {', '.join(ENGINES)}")
    from torchperf_ros.tools.tune.run import tune as search
    from torchperf_ros.tools.tune.search import TuneOptions
    from torchperf_ros.tools.tune.target import target_of_adapter, target_of_file
    from torchperf_ros.tools.tune.trial import Limits

    values = {"options": options, "budget_ms": budget_ms}
    if params is not None and options is None:
        target = target_of_file(params, adapter, values, device)
    elif adapter is not None and params is None:
        target = target_of_adapter(adapter, names, values, device or "auto")
    else:
        raise ConfigError(
            "give what to tune: either an adapter, module:Class, with --options, or --params FILE, with"
            " the stage's name, which holds the options itself"
        )
    chosen = TuneOptions(
        Limits(target.stage.budget_ms, max_loss),
        only,
        seconds,
        minutes,
        dry_run,
        files.get(""),
        files.get(".json"),
        judged,
        log,
    )
    raise typer.Exit(search(target.with_tiers(names), chosen, shell.console(140)))
